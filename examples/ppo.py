"""Proximal policy optimisation with vecenv.make_vec: one program for every backend.

    pip install -e ".[examples,envpool,ray]"
    python examples/ppo.py                                          # CartPole-v1 in worker processes
    python examples/ppo.py Pendulum-v1 --backend envpool            # in EnvPool's threads
    python examples/ppo.py --backend ray --num-hosts 2              # on two hosts of a Ray cluster, or on this machine
    python examples/ppo.py --resume run-one                         # saves the run, and continues it after a kill
    python examples/ppo.py --first-ready                            # the policy acts for one half while the other steps

It trains for --steps, or until the mean return of the last 100 episodes reaches the target, shows a progress bar, and writes
the learning curve as a PNG. On CartPole-v1 with two hosts on one machine with 2 busy cores, the mean return was 476.7 after
108,544 steps and 40.1 s; in worker processes, it was the same after 39.5 s. docs/examples.md has more results.
"""

# The end of an episode: vecenv's default is Gymnasium's next-step autoreset. The row that ends an episode contains its true
# last observation, and the environment's next step ignores its action and only resets. So a truncated episode bootstraps
# from the value of its true last state, and the row of a reset is no transition: it has weight 0.
#
# --first-ready: recv returns the half of the environments that finishes first, and send sends new actions to these while the
# others are still stepping. Rows arrive in any order, so each is stored with the index of its environment. Without this
# option, each step returns the rows of all environments.
#
# --resume: After each update, the program saves the whole run in the folder: the learner, the collector, and the
# environments themselves (envs.state_dict()). It writes a new file, which replaces the old one in one step. If a run is
# killed at any moment and started again, it prints the same numbers as an uninterrupted one, except for times.

from __future__ import annotations

import os
import pickle
import sys
from collections import deque
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np

import vecenv.errors

try:
    import jax
    import jax.numpy as jnp
    import optax
    from common import Agent, Curve, option, parse
except ModuleNotFoundError as missing:
    raise SystemExit(f"ppo: {missing}: pip install -e '.[examples]'") from None

Rollout = dict[str, np.ndarray]


@dataclass(frozen=True)
class Config:
    env_id: str = option("CartPole-v1", "id of the environment")
    backend: str = option("process", "backend: process, serial, envpool, ray, brax, playground")
    num_envs: int = option(32, "number of environments")
    num_hosts: int = option(2, "hosts, for the backend ray")
    first_ready: bool = option(False, "use send and recv, with half of the environments at a time")
    steps: int = option(1_000_000, "maximum number of steps; training stops earlier at the target")
    target: float = option(float("inf"), "mean return of 100 episodes at which to stop; CartPole-v1: 475, Pendulum-v1: -250")
    rollout: int = option(64, "steps of each environment per update")
    epochs: int = option(8, "passes over a rollout")
    minibatches: int = option(4, "gradient steps per pass")
    learning_rate: float = option(1e-3, "learning rate of Adam")
    discount: float = option(0.99, "discount factor of rewards")
    gae_lambda: float = option(0.95, "lambda of generalised advantage estimation")
    clip: float = option(0.2, "clipping range of the probability ratio")
    entropy: float = option(0.0, "weight of the entropy bonus")
    reward_scale: float = option(1.0, "factor applied to rewards for learning")
    hidden: int = option(64, "units in each of the two hidden layers")
    seed: int = option(1, "seed of environments, policy and shuffling")
    out: str = option("ppo-results", "folder for the learning curve")
    resume: str = option("", "folder in which the run is saved, and from which it continues")


PRESETS = {
    "CartPole-v1": {"target": 475.0},
    "Pendulum-v1": {"target": -250.0, "discount": 0.9, "reward_scale": 0.1},
}


def make_envs(config: Config) -> gym.vector.VectorEnv:
    """Build the environments. Only this function depends on the backend."""
    options: dict[str, Any] = {"batch_size": config.num_envs // 2} if config.first_ready else {}
    if config.backend == "ray":
        options |= {"num_hosts": config.num_hosts, "placement": "SPREAD"}  # over several nodes, if there are several
    try:
        return vecenv.make_vec(config.env_id, config.num_envs, config.backend, vector_kwargs=options)
    except (gym.error.Error, vecenv.errors.VecEnvError, ImportError, TypeError, ValueError) as error:
        raise SystemExit(f"ppo: {error}") from None


# --- stepping the environments ------------------------------------------------------------------------------------------


def make_act(agent: Agent) -> Callable[..., Any]:
    """Return ``act(params, observation, key, index)``, which returns actions and the values that learning needs."""

    @jax.jit
    def act(params: Any, observation: jax.Array, key: jax.Array, index: int) -> tuple[jax.Array, dict[str, jax.Array]]:
        distribution, value = agent(params, observation)
        choice = distribution.sample(jax.random.fold_in(key, index))
        return agent.action(choice), {"choice": choice, "log_prob": distribution.log_prob(choice), "value": value}

    return act


class Collector:
    """A collector of transitions, which steps the environments with the policy's actions."""

    def __init__(self, envs: gym.vector.VectorEnv, agent: Agent, seed: int, first_ready: bool) -> None:
        if envs.metadata["autoreset_mode"] is not gym.vector.AutoresetMode.NEXT_STEP:
            raise SystemExit(f"ppo: this program needs next-step autoreset, not {envs.metadata['autoreset_mode']}")
        self.envs, self.act, self.first_ready = envs, make_act(agent), first_ready
        self.observation = np.zeros((envs.num_envs, agent.inputs), np.float32)  # the latest observation of each environment
        self.decisions: Rollout = {}  # the policy's latest choice, log_prob and value of each environment
        self.resets = np.ones(envs.num_envs, bool)  # True if the next row of an environment is a reset
        self.running_return = np.zeros(envs.num_envs)
        self.returns: deque[float] = deque(maxlen=100)
        if first_ready:
            envs.reset_async(seed=seed)
            observation, *_, infos = envs.recv()
            self.ids = infos["env_id"]  # the environments that wait for an action
        else:
            observation, _ = envs.reset(seed=seed)
            self.ids = np.arange(envs.num_envs)
        self.observation[self.ids], self.resets[self.ids] = observation, False

    def step(self, action: np.ndarray) -> list[Any]:
        """Step the environments of the current rows, and return the next rows."""
        if not self.first_ready:
            return self.envs.step(action)[:4]
        self.envs.send(action, self.ids)
        *rows, infos = self.envs.recv()
        self.ids = infos["env_id"]
        return rows

    def collect(self, params: Any, key: jax.Array, batches: int) -> Rollout:
        """Collect this many batches of rows. The fields of the result are ``(batches, rows, ...)``."""
        collected = []
        for index in range(batches):
            action, decisions = jax.device_get(self.act(params, self.observation[self.ids], key, index))
            for name, rows in decisions.items():
                by_env = self.decisions.setdefault(name, np.zeros((self.envs.num_envs, *rows.shape[1:]), rows.dtype))
                by_env[self.ids] = rows
            next_observation, reward, terminated, truncated = self.step(action.astype(self.envs.single_action_space.dtype))
            ids, done = self.ids, terminated | truncated
            row = {"env_id": ids, "observation": self.observation[ids]}
            row |= {name: by_env[ids] for name, by_env in self.decisions.items()}
            row |= {"reward": reward.astype(np.float32), "terminated": terminated, "done": done, "weight": ~self.resets[ids]}
            collected.append(row)
            self.observation[ids], self.resets[ids] = next_observation, done
            self.running_return[ids] += reward  # 0 in the row of a reset
            self.returns.extend(self.running_return[ids[done]])
            self.running_return[ids[done]] = 0.0
        return {name: np.stack([row[name] for row in collected]) for name in collected[0]}


SAVED_ATTRIBUTES = "observation", "decisions", "resets", "running_return", "returns"


class Checkpoint:
    """The file in a folder that holds the saved state of a run. Without a folder, nothing is saved."""

    def __init__(self, folder: str, envs: gym.vector.VectorEnv, first_ready: bool) -> None:
        self.path = Path(folder, "ppo.pickle") if folder else None
        if self.path is None:
            return
        if first_ready or not getattr(envs, "capabilities").snapshots:  # noqa: B009 - Gymnasium's class does not declare it
            raise SystemExit("ppo: --resume needs a backend that can save environments, without --first-ready")
        self.path.parent.mkdir(parents=True, exist_ok=True)

    def load(self) -> dict[str, Any] | None:
        if self.path is None or not self.path.exists():
            return None
        return pickle.loads(self.path.read_bytes())  # safe: a user who can write this file can also change this program

    def save(self, envs: Any, collector: Collector, **others: Any) -> None:
        if self.path is None:
            return
        collector_state = {name: getattr(collector, name) for name in SAVED_ATTRIBUTES}
        new_path = self.path.with_suffix(".new")
        with new_path.open("wb") as file:
            pickle.dump({"envs": envs.state_dict(), "collector": collector_state, **others}, file)
            file.flush()
            os.fsync(file.fileno())
        new_path.replace(self.path)


def advantages(rollout: Rollout, last_value: np.ndarray, discount: float, gae_lambda: float) -> np.ndarray:
    """Return generalised advantage estimates, ``(batches, rows)``, computed backwards for each environment.

    ``last_value`` is the value of each environment's latest observation, ``(num_envs,)``. After a terminated episode, the
    next value is 0. After a truncated one, it is the value of its last state, which is the observation in the row of the
    reset.
    """
    next_value, next_advantage = last_value.copy(), np.zeros_like(last_value)
    result = np.zeros_like(rollout["reward"])
    for t in reversed(range(len(result))):
        ids, value = rollout["env_id"][t], rollout["value"][t]
        delta = rollout["reward"][t] + discount * next_value[ids] * ~rollout["terminated"][t] - value
        result[t] = delta + discount * gae_lambda * next_advantage[ids] * ~rollout["done"][t]
        next_value[ids], next_advantage[ids] = value, result[t]
    return result


# --- learning -----------------------------------------------------------------------------------------------------------


def make_update(agent: Agent, optimizer: optax.GradientTransformation, config: Config) -> Callable[..., Any]:
    """Return a compiled function for the whole update, with all epochs and minibatches."""

    def loss(params: Any, batch: dict[str, jax.Array]) -> jax.Array:
        mean = partial(jnp.average, weights=batch["weight"])
        distribution, value = agent(params, batch["observation"])
        advantage = batch["advantage"] - mean(batch["advantage"])
        advantage /= jnp.sqrt(mean(advantage**2)) + 1e-8
        ratio = jnp.exp(distribution.log_prob(batch["choice"]) - batch["log_prob"])
        gain = jnp.minimum(ratio * advantage, jnp.clip(ratio, 1 - config.clip, 1 + config.clip) * advantage)
        return mean(0.5 * (value - batch["target"]) ** 2 - gain - config.entropy * distribution.entropy())

    @partial(jax.jit, donate_argnums=(0, 1))
    def update(params: Any, state: Any, batch: dict[str, jax.Array], key: jax.Array) -> tuple[Any, Any]:
        def update_on_minibatch(carry: tuple[Any, Any], rows: jax.Array) -> tuple[tuple[Any, Any], None]:
            params, state = carry
            grads = jax.grad(loss)(params, jax.tree.map(lambda field: field[rows], batch))
            changes, state = optimizer.update(grads, state)
            return (optax.apply_updates(params, changes), state), None

        size = len(batch["weight"]) // config.minibatches
        orders = jax.vmap(lambda k: jax.random.permutation(k, len(batch["weight"])))(jax.random.split(key, config.epochs))
        minibatches = orders[:, : size * config.minibatches].reshape(-1, size)
        return jax.lax.scan(update_on_minibatch, (params, state), minibatches)[0]

    return update


def train(envs: gym.vector.VectorEnv, config: Config, curve: Curve) -> bool:
    """Train for ``config.steps``, or until the target is reached. Return True if it was reached."""
    agent = Agent(envs, config.hidden)
    init_key, key = jax.random.split(jax.random.key(config.seed))
    params = agent.init(init_key)
    optimizer = optax.chain(optax.clip_by_global_norm(0.5), optax.adam(config.learning_rate, eps=1e-5))
    state, update = optimizer.init(params), make_update(agent, optimizer, config)
    values = jax.jit(lambda params, observation: agent(params, observation)[1])
    collector = Collector(envs, agent, config.seed, config.first_ready)
    steps_per_update, steps_done = config.rollout * envs.num_envs, 0
    batches = steps_per_update // len(collector.ids)
    checkpoint = Checkpoint(config.resume, envs, config.first_ready)
    if (saved := checkpoint.load()) is not None:
        envs.load_state_dict(saved["envs"])  # type: ignore[attr-defined]
        vars(collector).update(saved["collector"])
        params, state, steps_done = saved["params"], saved["optimizer"], saved["steps"]
        key = jax.random.wrap_key_data(saved["key"])
        for point in saved["curve"]:
            curve.add(*point)
    returns = collector.returns

    def target_is_reached() -> bool:
        return len(returns) == returns.maxlen and np.mean(returns) >= config.target

    if target_is_reached():  # by the saved run
        return True
    for steps in range(steps_done + steps_per_update, config.steps + 1, steps_per_update):
        key, act_key, update_key = jax.random.split(key, 3)
        rollout = collector.collect(params, act_key, batches)
        rollout["reward"] *= config.reward_scale
        last_value = np.array(values(params, collector.observation))
        rollout["advantage"] = advantages(rollout, last_value, config.discount, config.gae_lambda)
        rollout["target"] = rollout["advantage"] + rollout["value"]
        flat = {name: field.reshape(-1, *field.shape[2:]) for name, field in rollout.items()}
        params, state = update(params, state, flat, update_key)
        if returns:
            curve.add(steps, float(np.mean(returns)))
        checkpoint.save(
            envs, collector, params=jax.device_get(params), optimizer=jax.device_get(state), steps=steps,
            key=jax.device_get(jax.random.key_data(key)), curve=[(point.steps, point.mean_return) for point in curve.points],
        )  # fmt: skip
        if target_is_reached():
            return True
    return False


def main(argv: list[str] | None = None) -> int:
    config = parse(Config, __doc__, PRESETS, "env_id", argv)
    with closing(make_envs(config)) as envs, Curve(config.steps) as curve:
        reached = train(envs, config, curve)
    if not curve.points:
        raise SystemExit(f"ppo: no episode ended within {config.steps:,} steps")
    steps, seconds, mean_return = curve.points[-1]
    name = f"{config.env_id}-{config.backend}{'-first-ready' if config.first_ready else ''}"
    path = Path(config.out, name.replace("/", "-") + ".png")
    curve.draw(path, f"PPO: {name}, {config.num_envs} environments", "last 100 episodes", config.target, "target")
    result = f"mean return {mean_return:.1f}{' (target reached)' if reached else ''}"
    print(f"{name}: {result} after {steps:,} steps and {seconds:.1f} s; {path}")
    return 0 if reached or np.isinf(config.target) else 1


if __name__ == "__main__":
    sys.exit(main())
