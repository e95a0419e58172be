"""Tianshou's PPO on CartPole-v1, with vecenv environments.

    pip install -e ".[clients]"
    python examples/tianshou_ppo.py

On 2 cores without a GPU, while other programs ran, it printed:

    return 500 +- 0 over 20 episodes, after 61440 steps and 49 s

Tianshou has its own environment interface, which ``vecenv.adapters.as_tianshou`` provides.
"""

import argparse
import time
from typing import Any

try:
    import torch
    from tianshou.algorithm import PPO
    from tianshou.algorithm.modelfree.reinforce import DiscreteActorPolicy
    from tianshou.algorithm.optim import AdamOptimizerFactory, LRSchedulerFactoryLinear
    from tianshou.data import Collector, VectorReplayBuffer
    from tianshou.trainer import OnPolicyTrainerParams
    from tianshou.utils.net.common import Net
    from tianshou.utils.net.discrete import DiscreteActor, DiscreteCritic
except ModuleNotFoundError as missing:
    needed = "torch (CPU build: pytorch.org)" if missing.name == "torch" else "-e '.[clients]'"
    raise SystemExit(f"tianshou_ppo: {missing}: pip install {needed}") from None

import vecenv
from vecenv.adapters import as_tianshou


def make_network(envs: Any) -> Net:
    shape = envs.single_observation_space.shape
    return Net(state_shape=shape, hidden_sizes=[64, 64], activation=torch.nn.Tanh)


def main(steps: int, num_envs: int) -> None:
    start = time.perf_counter()
    torch.manual_seed(1)
    torch.set_num_threads(1)  # the networks are tiny, so leave the cores to the environments
    envs = vecenv.make_vec("CartPole-v1", num_envs)

    per_epoch, per_update = min(steps, 10_000), 64 * num_envs
    epochs = max(1, steps // per_epoch)
    actor = DiscreteActor(preprocess_net=make_network(envs), action_shape=envs.single_action_space.n, softmax_output=False)
    critic = DiscreteCritic(preprocess_net=make_network(envs))
    for layer in [*actor.modules(), *critic.modules()]:
        if isinstance(layer, torch.nn.Linear):
            torch.nn.init.orthogonal_(layer.weight, 2**0.5)
            torch.nn.init.zeros_(layer.bias)
    policy = DiscreteActorPolicy(actor=actor, action_space=envs.single_action_space, deterministic_eval=True)
    optim = AdamOptimizerFactory(lr=2e-3, eps=1e-5)
    optim.with_lr_scheduler_factory(LRSchedulerFactoryLinear(epochs, per_epoch, per_update))
    settings = {"gamma": 0.98, "gae_lambda": 0.9, "max_grad_norm": 0.5, "ent_coef": 0.005}
    algorithm = PPO(policy=policy, critic=critic, optim=optim, **settings)

    tianshou_envs = as_tianshou(envs)
    collector = Collector(algorithm, tianshou_envs, VectorReplayBuffer(20_000, num_envs))
    collector.reset(gym_reset_kwargs={"seed": list(range(num_envs))})
    result = algorithm.run_training(
        OnPolicyTrainerParams(
            training_collector=collector,
            max_epochs=epochs,
            epoch_num_steps=per_epoch,
            collection_step_num_env_steps=per_update,
            update_step_num_repetitions=8,
            batch_size=256,
            show_progress=False,
            verbose=False,
        )
    )
    # with a new buffer, because the training collector's contains unfinished episodes
    evaluation = Collector(algorithm, tianshou_envs, VectorReplayBuffer(20_000, num_envs))
    with torch.no_grad():
        episodes = evaluation.collect(n_episode=20, reset_before_collect=True)
    envs.close()
    mean, deviation, seconds = episodes.returns.mean(), episodes.returns.std(), time.perf_counter() - start
    print(f"return {mean:.0f} +- {deviation:.0f} over 20 episodes, after {result.train_step} steps and {seconds:.0f} s")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=60_000, help="total environment steps (default: %(default)s)")
    parser.add_argument("--num-envs", type=int, default=16, help="number of environments (default: %(default)s)")
    options = parser.parse_args()
    main(options.steps, options.num_envs)
