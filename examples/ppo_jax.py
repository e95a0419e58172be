"""PPO with the whole iteration in one jitted function: rollout, advantages, and all minibatch updates.

    pip install -e ".[examples]"
    python examples/ppo_jax.py                   # CartPole-v1 in processes
    python examples/ppo_jax.py --backend brax    # inverted_pendulum on the device

The environments run in processes, behind vecenv.jax.bridge, or are physics on the device. At the end, the program evaluates
the policy without noise, and writes the learning curve as a PNG. docs/examples.md has results and times.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import gymnasium as gym

import vecenv.errors

try:
    import jax
    import jax.numpy as jnp
    import optax
    from common import Agent, Curve, option, parse

    import vecenv.jax as vj
except ModuleNotFoundError as missing:
    raise SystemExit(f"ppo_jax: {missing}: pip install -e '.[examples]'") from None


@dataclass(frozen=True)
class Config:
    env_id: str = option("", "id of the environment in the backend")
    backend: str = option("process", "backend: process or brax")
    num_envs: int = option(0, "number of environments")
    workers: int = option(2, "worker processes, for the backend process")
    steps: int = option(0, "total environment steps")
    rollout: int = option(0, "steps of each environment per update")
    epochs: int = option(8, "passes over a rollout")
    minibatches: int = option(4, "gradient steps per pass")
    learning_rate: float = option(1e-3, "initial learning rate of Adam, which falls to 0")
    discount: float = option(0.98, "discount factor of rewards")
    gae_lambda: float = option(0.8, "lambda of generalised advantage estimation")
    clip: float = option(0.2, "clipping range of the probability ratio")
    entropy: float = option(0.005, "weight of the entropy bonus")
    hidden: int = option(64, "units in each of the two hidden layers")
    episodes: int = option(100, "episodes of the final evaluation")
    seed: int = option(0, "seed of environments, policy and shuffling")
    out: str = option("ppo-results", "folder for the learning curve")


PRESETS = {
    "process": {"env_id": "CartPole-v1", "num_envs": 16, "rollout": 64, "steps": 200_000},
    "brax": {
        "env_id": "inverted_pendulum", "num_envs": 64, "rollout": 32, "steps": 500_000,
        "discount": 0.99, "gae_lambda": 0.95, "learning_rate": 3e-3, "entropy": 0.0,
    },
}  # fmt: skip


def make_env(config: Config, num_envs: int) -> Any:
    """Build an environment with ``reset`` and ``step`` for compiled programs. Only this function depends on the backend."""
    options = {"num_workers": min(config.workers, num_envs)}
    try:
        if config.backend == "brax":
            return vj.FunctionalVectorEnv(vj.adapt(config.env_id, backend="spring"), num_envs)
        return vj.bridge(vecenv.make_vec(config.env_id, num_envs, config.backend, vector_kwargs=options))
    except (gym.error.Error, vecenv.errors.VecEnvError, ImportError, TypeError, ValueError) as error:
        raise SystemExit(f"ppo_jax: {error}") from None


def make_policy(agent: Agent, greedy: bool = False) -> Any:
    """Wrap the agent as a policy for rollouts. The extras of the policy are inputs of the loss."""

    def act(params: Any, obs: jax.Array, key: jax.Array) -> tuple[jax.Array, dict[str, jax.Array]]:
        distribution, _ = agent(params, obs)
        choice = distribution.mode() if greedy else distribution.sample(key)
        return agent.action(choice), {"choice": choice, "log_prob": distribution.log_prob(choice)}

    return vj.stateless(act)


# --- the algorithm ------------------------------------------------------------------------------------------------------


class TrainState(NamedTuple):
    """The state that one iteration passes to the next."""

    params: Any
    optimizer: Any
    env: Any


class Batch(NamedTuple):
    """A batch of transitions, with fields ``[rows, ...]``. Rows that only reset an environment are not ``valid``."""

    obs: jax.Array
    choice: jax.Array
    log_prob: jax.Array
    advantage: jax.Array
    target: jax.Array
    valid: jax.Array


def advantages(trajectory: vj.Trajectory, value: jax.Array, next_value: jax.Array, discount: float, lam: float) -> jax.Array:
    """Return generalised advantage estimates ``[T, n]``.

    ``next_value`` has the values of the true next states; after a truncation, that of the true last observation.
    """
    done = trajectory.terminated | trajectory.truncated
    delta = trajectory.reward + discount * next_value * ~trajectory.terminated - value

    def step_back(next_advantage: jax.Array, row: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        advantage = row[0] + discount * lam * next_advantage * ~row[1]
        return advantage, advantage

    return jax.lax.scan(step_back, jnp.zeros_like(delta[0]), (delta, done), reverse=True)[1]


def make_iteration(config: Config, env: Any, agent: Agent, optimizer: optax.GradientTransformation) -> Callable[..., Any]:
    """Return a compiled function ``iteration(train, key) -> (train, number of ended episodes, sum of their returns)``."""

    def loss(params: Any, batch: Batch) -> jax.Array:
        def mean(x: jax.Array) -> jax.Array:
            return jnp.sum(x * batch.valid) / jnp.maximum(1, jnp.sum(batch.valid))

        distribution, value = agent(params, batch.obs)
        advantage = batch.advantage - mean(batch.advantage)
        advantage /= jnp.sqrt(mean(advantage**2)) + 1e-8
        ratio = jnp.exp(distribution.log_prob(batch.choice) - batch.log_prob)
        gain = jnp.minimum(ratio * advantage, jnp.clip(ratio, 1 - config.clip, 1 + config.clip) * advantage)
        return mean(0.5 * (value - batch.target) ** 2 - gain - config.entropy * distribution.entropy())

    def collect(train: TrainState, key: jax.Array) -> tuple[vj.Trajectory, Any]:
        policy = make_policy(agent)
        return vj.rollout(env, policy, train.params, train.env, (), key, config.rollout, extras=("last_return",))[:2]

    def make_batch(params: Any, trajectory: vj.Trajectory) -> Batch:
        value, next_value = agent(params, trajectory.obs)[1], agent(params, trajectory.next_obs)[1]
        advantage = advantages(trajectory, value, next_value, config.discount, config.gae_lambda)
        extras = trajectory.policy_extras
        batch = Batch(trajectory.obs, extras["choice"], extras["log_prob"], advantage, advantage + value, trajectory.valid)
        return jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[2:]), batch)

    def update_on_minibatch(carry: tuple[Any, Any], batch: Batch) -> tuple[tuple[Any, Any], None]:
        params, state = carry
        changes, state = optimizer.update(jax.grad(loss)(params, batch), state)
        return (optax.apply_updates(params, changes), state), None

    def iteration(train: TrainState, key: jax.Array) -> tuple[TrainState, jax.Array, jax.Array]:
        act_key, shuffle_key = jax.random.split(key)
        trajectory, env_state = collect(train, act_key)
        batch = make_batch(train.params, trajectory)

        def run_epoch(carry: tuple[Any, Any], key: jax.Array) -> tuple[tuple[Any, Any], None]:
            order = jax.random.permutation(key, len(batch.valid)).reshape(config.minibatches, -1)
            return jax.lax.scan(update_on_minibatch, carry, jax.tree.map(lambda leaf: leaf[order], batch))

        keys = jax.random.split(shuffle_key, config.epochs)
        (params, state), _ = jax.lax.scan(run_epoch, (train.params, train.optimizer), keys)
        ended = trajectory.valid & (trajectory.terminated | trajectory.truncated)
        returns = trajectory.env_extras["last_return"]
        return TrainState(params, state, env_state), ended.sum(), jnp.sum(returns * ended)

    return jax.jit(iteration)


# --- the program --------------------------------------------------------------------------------------------------------


def learn(config: Config, env: Any, agent: Agent, curve: Curve) -> Any:
    """Train for ``config.steps`` and return the parameters."""
    steps_per_iteration = config.num_envs * config.rollout
    iterations = config.steps // steps_per_iteration
    schedule = optax.linear_schedule(config.learning_rate, 0.0, iterations * config.epochs * config.minibatches)
    optimizer = optax.chain(optax.clip_by_global_norm(0.5), optax.adam(schedule))
    iteration = make_iteration(config, env, agent, optimizer)
    init_key, reset_key, key = jax.random.split(jax.random.key(config.seed), 3)
    params = agent.init(init_key)
    train = TrainState(params, optimizer.init(params), env.reset(jax.random.fold_in(reset_key, 0)))
    for i in range(iterations):
        train, episodes, total = iteration(train, jax.random.fold_in(key, i))
        if episodes > 0:
            curve.add((i + 1) * steps_per_iteration, float(total / episodes))
    return train.params


def evaluate(config: Config, env: Any, agent: Agent, params: Any) -> float:
    """Return the mean return of the policy without noise."""

    def run_episodes(params: Any, key: jax.Array) -> vj.EpisodeMetrics:
        greedy = make_policy(agent, greedy=True)
        return vj.fast_eval_rollout_episode(env, greedy, params, env.reset(key), (), key, 1000, config.episodes)[0]

    return float(jax.jit(run_episodes)(params, jax.random.key(config.seed + 1)).episode_return.mean())


def main(argv: list[str] | None = None) -> float:
    config = parse(Config, __doc__, PRESETS, "backend", argv)
    if config.backend not in PRESETS:
        raise SystemExit(f"ppo_jax: --backend must be one of {sorted(PRESETS)}, got {config.backend!r}")
    with ExitStack() as stack:
        env = make_env(config, config.num_envs)
        stack.callback(getattr(env, "close", lambda: None))  # physics on the device has nothing to close
        agent = Agent(env, config.hidden)
        with Curve(config.steps) as curve:
            params = learn(config, env, agent, curve)
        mean_return = evaluate(config, env, agent, params)
    name = f"jax-{config.env_id}-{config.backend}"
    path = Path(config.out, name.replace("/", "-") + ".png")
    title = f"PPO in one jitted function: {config.env_id}, {config.num_envs} environments"
    curve.draw(path, title, "episodes of one update", mean_return, "at the end, without noise:")
    result = f"mean return {mean_return:.1f} of {config.episodes} episodes"
    print(f"{name}: {result} after {curve.points[-1].steps:,} steps and {curve.points[-1].seconds:.1f} s; {path}")
    return mean_return


if __name__ == "__main__":
    main(sys.argv[1:])
