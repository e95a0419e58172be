"""Stable-Baselines3's PPO on CartPole-v1, with vecenv environments.

    pip install -e ".[sb3]"
    python examples/sb3_ppo.py

On 2 cores without a GPU, it prints:

    return 500 +- 0 over 20 episodes, after 100000 steps and 27 s

Only the lines that build the environments use vecenv; all others are the same as in any SB3 program.
"""

import argparse
import time

try:
    import torch
    from stable_baselines3 import PPO
    from stable_baselines3.common.evaluation import evaluate_policy
    from stable_baselines3.common.vec_env import VecMonitor
except ModuleNotFoundError as missing:
    needed = "torch (CPU build: pytorch.org)" if missing.name == "torch" else "-e '.[sb3]'"
    raise SystemExit(f"sb3_ppo: {missing}: pip install {needed}") from None

import vecenv
from vecenv.adapters import as_sb3


def main(steps: int, num_envs: int) -> None:
    start = time.perf_counter()
    torch.set_num_threads(1)  # the networks are tiny, so leave the cores to the environments
    envs = vecenv.make_vec("CartPole-v1", num_envs, autoreset_mode="SameStep")  # SB3's autoreset mode
    model = PPO(
        "MlpPolicy",
        VecMonitor(as_sb3(envs)),
        n_steps=32,
        batch_size=256,
        n_epochs=20,
        gamma=0.98,
        gae_lambda=0.8,
        learning_rate=lambda remaining: 1e-3 * remaining,
        clip_range=lambda remaining: 0.2 * remaining,
        seed=1,
        device="cpu",
    )
    model.learn(steps)
    mean, deviation = evaluate_policy(model, model.get_env(), n_eval_episodes=20)
    envs.close()
    seconds = time.perf_counter() - start
    print(f"return {mean:.0f} +- {deviation:.0f} over 20 episodes, after {steps} steps and {seconds:.0f} s")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=100_000, help="total environment steps (default: %(default)s)")
    parser.add_argument("--num-envs", type=int, default=8, help="number of environments (default: %(default)s)")
    options = parser.parse_args()
    main(options.steps, options.num_envs)
