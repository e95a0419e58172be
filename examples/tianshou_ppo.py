"""Tianshou's PPO on CartPole-v1, its collector over vecenv.

    pip install -e ".[clients]"
    python examples/tianshou_ppo.py

On 2 cores without a GPU, with other programs running, it printed:

    return 357 +- 16 over 20 episodes, after 100000 steps and 64 s

Tianshou's interface is its own; ``vecenv.adapters.as_tianshou`` speaks it.
"""

import argparse
import time

import torch
from tianshou.algorithm import PPO
from tianshou.algorithm.modelfree.reinforce import DiscreteActorPolicy
from tianshou.algorithm.optim import AdamOptimizerFactory
from tianshou.data import Collector, VectorReplayBuffer
from tianshou.trainer import OnPolicyTrainerParams
from tianshou.utils.net.common import Net
from tianshou.utils.net.discrete import DiscreteActor, DiscreteCritic

import vecenv
from vecenv.adapters import as_tianshou


def main(steps: int, num_envs: int) -> None:
    start = time.perf_counter()
    torch.manual_seed(1)
    torch.set_num_threads(1)  # the networks are tiny, and the cores are for the environments
    envs = vecenv.make_vec("CartPole-v1", num_envs)

    body = Net(state_shape=envs.single_observation_space.shape, hidden_sizes=[64, 64])
    actor = DiscreteActor(preprocess_net=body, action_shape=envs.single_action_space.n, softmax_output=False)
    policy = DiscreteActorPolicy(actor=actor, action_space=envs.single_action_space, deterministic_eval=True)
    critic = DiscreteCritic(preprocess_net=body)
    algorithm = PPO(policy=policy, critic=critic, optim=AdamOptimizerFactory(lr=1e-3), gamma=0.98, gae_lambda=0.9)

    stepped = as_tianshou(envs)
    collector = Collector(algorithm, stepped, VectorReplayBuffer(20_000, num_envs))
    collector.reset(gym_reset_kwargs={"seed": list(range(num_envs))})
    result = algorithm.run_training(
        OnPolicyTrainerParams(
            training_collector=collector,
            max_epochs=max(1, steps // 10_000),
            epoch_num_steps=min(steps, 10_000),
            collection_step_num_env_steps=1_000,
            update_step_num_repetitions=8,
            batch_size=256,
            show_progress=False,
            verbose=False,
        )
    )
    # (a buffer of its own: in the other one, episodes that training has left unfinished would go on)
    evaluation = Collector(algorithm, stepped, VectorReplayBuffer(20_000, num_envs))
    with torch.no_grad():
        found = evaluation.collect(n_episode=20, reset_before_collect=True)
    envs.close()
    mean, deviation, seconds = found.returns.mean(), found.returns.std(), time.perf_counter() - start
    print(f"return {mean:.0f} +- {deviation:.0f} over 20 episodes, after {result.train_step} steps and {seconds:.0f} s")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=100_000)
    parser.add_argument("--num-envs", type=int, default=8)
    options = parser.parse_args()
    main(options.steps, options.num_envs)
