"""RLlib's PPO on CartPole-v1, with a vecenv vector environment in each environment runner.

    pip install -e ".[rllib]"
    python examples/rllib_vector.py --steps 20000

On 2 cores without a GPU, its last lines are:

      18476 steps, mean return 304
      20525 steps, mean return 343
    21 s

RLlib needs no adapter: with ``gym_env_vectorize_mode="vector_entry_point"``, it calls ``make_envs`` in the process of each
runner.
"""

import argparse
import time
from typing import Any

try:
    import ray
    from ray.rllib.algorithms.ppo import PPOConfig
    from ray.tune.registry import register_env
except ModuleNotFoundError as missing:
    raise SystemExit(f"rllib_vector: {missing}: pip install -e '.[rllib]'") from None

import vecenv


def make_envs(context: Any) -> Any:
    """Build a vector environment of the size that RLlib needs, or of one environment if RLlib only reads the spaces."""
    return vecenv.make_vec("CartPole-v1", context.get("num_envs", 1))


def main(steps: int, num_envs: int) -> None:
    start = time.perf_counter()
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    register_env("cartpole-by-vecenv", make_envs)
    config = (
        PPOConfig()
        .environment("cartpole-by-vecenv")
        .env_runners(num_env_runners=1, num_envs_per_env_runner=num_envs, gym_env_vectorize_mode="vector_entry_point")
        .training(train_batch_size_per_learner=2048, minibatch_size=256, num_epochs=10, lr=1e-3, gamma=0.98)
        .debugging(seed=1)
    )
    algorithm = config.build_algo()
    steps_done = 0
    while steps_done < steps:
        metrics = algorithm.train()["env_runners"]
        steps_done = int(metrics["num_env_steps_sampled_lifetime"])
        print(f"{steps_done:7} steps, mean return {metrics['episode_return_mean']:.0f}", flush=True)
    algorithm.stop()
    ray.shutdown()
    print(f"{time.perf_counter() - start:.0f} s")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=60_000, help="total environment steps (default: %(default)s)")
    parser.add_argument("--num-envs", type=int, default=8, help="number of environments (default: %(default)s)")
    options = parser.parse_args()
    main(options.steps, options.num_envs)
