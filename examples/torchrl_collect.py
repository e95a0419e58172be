"""Collects steps of CartPole-v1 as TensorDicts, with TorchRL's collector and vecenv environments.

    pip install -e ".[clients]"
    python examples/torchrl_collect.py

On 2 cores without a GPU, it prints:

    20480 steps of 16 environments, 936 episodes, 4622 steps/s

Workers start by "forkserver", although the import of TorchRL makes "spawn" the default of ``multiprocessing``.
"""

import argparse
import time

try:
    import torch
    from tensordict.nn import TensorDictModule, TensorDictSequential
    from torch import nn
    from torchrl.collectors import Collector
    from torchrl.modules import OneHotCategorical, ProbabilisticActor
except ModuleNotFoundError as missing:
    needed = "torch (CPU build: pytorch.org)" if missing.name == "torch" else "-e '.[clients]'"
    raise SystemExit(f"torchrl_collect: {missing}: pip install {needed}") from None

from vecenv.adapters import as_torchrl


def main(steps: int, num_envs: int) -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)  # the network is tiny, so leave the cores to the environments
    env = as_torchrl("CartPole-v1", num_envs)
    env.set_seed(0)
    network = nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 2))
    policy = ProbabilisticActor(
        TensorDictSequential(TensorDictModule(network, ["observation"], ["logits"])),
        in_keys=["logits"],
        distribution_class=OneHotCategorical,
    )
    frames_per_batch = 32 * num_envs
    collector = Collector(
        env, policy, frames_per_batch=frames_per_batch, total_frames=steps, auto_register_policy_transforms=False
    )
    frames = episodes = 0
    start = time.perf_counter()
    for batch in collector:  # [num_envs, 32], with ("next", "observation"), ("next", "reward"), ("next", "done"), ...
        frames += batch.numel()
        episodes += int(batch["next", "done"].sum())
    seconds = time.perf_counter() - start
    collector.shutdown()
    print(f"{frames} steps of {num_envs} environments, {episodes} episodes, {frames / seconds:.0f} steps/s")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20_480, help="total environment steps (default: %(default)s)")
    parser.add_argument("--num-envs", type=int, default=16, help="number of environments (default: %(default)s)")
    options = parser.parse_args()
    main(options.steps, options.num_envs)
