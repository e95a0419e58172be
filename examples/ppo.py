"""Proximal policy optimisation over ``vecenv.make_vec``: one program for every backend.

    pip install -e ".[examples,envpool]"
    python examples/ppo.py CartPole-v1
    python examples/ppo.py Pendulum-v1 --backend envpool --first-ready

It trains until the mean return of the last 100 episodes reaches the target, shows a progress bar, and writes the learning
curve as a PNG.

Runs on 2 cores without a GPU, with these commands and the default seed; the seconds include the start of the environments
and JAX's compilation, and the mean is that of the last 100 training episodes:

    python examples/ppo.py CartPole-v1                                    482.1 after 131,072 steps,  9.1 s
    python examples/ppo.py CartPole-v1 --first-ready                      477.0 after 129,024 steps, 11.0 s
    python examples/ppo.py CartPole-v1 --backend envpool                  479.5 after 137,216 steps,  7.5 s
    python examples/ppo.py CartPole-v1 --backend envpool --first-ready    475.9 after 141,312 steps,  8.6 s
    python examples/ppo.py Pendulum-v1                                   -233.3 after  90,112 steps,  9.6 s
    python examples/ppo.py Pendulum-v1 --first-ready                     -237.7 after  73,728 steps, 10.4 s
    python examples/ppo.py Pendulum-v1 --backend envpool                 -222.9 after  83,968 steps,  6.4 s
    python examples/ppo.py Pendulum-v1 --backend envpool --first-ready   -237.6 after  83,968 steps,  7.2 s

How it deals with the end of an episode: vecenv's default is Gymnasium's ``AutoresetMode.NEXT_STEP``. The row that ends an
episode holds its true last observation; the next row of that environment is its reset, whatever the action was. So each
transition's next observation is the real one, a truncated episode bootstraps from the value of its true last state, and the
row of the reset is no transition: it has weight 0.

How it deals with ``--first-ready``: ``recv`` returns whichever half of the environments is done first, and ``send`` gives
just those new actions while the others still step. Rows then come in any order, so everything is kept by environment; the
ordinary way is the special case in which all environments come at once.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
import optax
from matplotlib.figure import Figure
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

import vecenv

Params = dict[str, Any]
Rollout = dict[str, np.ndarray]


@dataclass(frozen=True)
class Settings:
    num_envs: int = 32
    rollout: int = 64  # steps of each environment from one update to the next
    epochs: int = 8
    minibatches: int = 4
    learning_rate: float = 1e-3
    discount: float = 0.99
    gae_lambda: float = 0.95
    clip: float = 0.2
    entropy: float = 0.0
    reward_scale: float = 1.0
    steps: int = 1_000_000  # give up after so many
    target: float = float("inf")  # stop when the last 100 episodes returned so much on average


PRESETS = {
    "CartPole-v1": Settings(target=475.0),
    "Pendulum-v1": Settings(discount=0.9, reward_scale=0.1, target=-250.0),
}


# --- the policy -----------------------------------------------------------------------------------


class Policy:
    """A multilayer perceptron for the actor and one for the critic; the parameters are the caller's to keep."""

    def __init__(self, observation_space: gymnasium.Space[Any], action_space: gymnasium.Space[Any]) -> None:
        if not isinstance(observation_space, gymnasium.spaces.Box):
            raise SystemExit(f"this program wants observations that are an array of numbers, not {observation_space}")
        self.discrete = isinstance(action_space, gymnasium.spaces.Discrete)
        if not self.discrete and not isinstance(action_space, gymnasium.spaces.Box):
            raise SystemExit(f"this program wants discrete or continuous actions, not {action_space}")
        self.space = action_space
        self.inputs = int(np.prod(observation_space.shape))
        self.outputs = int(action_space.n) if self.discrete else int(np.prod(action_space.shape))
        self.act = jax.jit(self._act)

    def init(self, key: jax.Array) -> Params:
        def mlp(key: jax.Array, outputs: int, last: float) -> list[tuple[jax.Array, jax.Array]]:
            sizes, gains = (self.inputs, 64, 64, outputs), (2**0.5, 2**0.5, last)
            weights = [
                jax.nn.initializers.orthogonal(gain)(k, (i, o))
                for k, gain, i, o in zip(jax.random.split(key, 3), gains, sizes, sizes[1:], strict=False)
            ]
            return [(weight, jnp.zeros(weight.shape[1])) for weight in weights]

        actor, critic = jax.random.split(key)
        return {"actor": mlp(actor, self.outputs, 0.01), "critic": mlp(critic, 1, 1.0), "log_std": jnp.zeros(self.outputs)}

    @staticmethod
    def _mlp(layers: list[tuple[jax.Array, jax.Array]], x: jax.Array) -> jax.Array:
        for weight, bias in layers[:-1]:
            x = jnp.tanh(x @ weight + bias)
        weight, bias = layers[-1]
        return x @ weight + bias

    def value(self, params: Params, observation: jax.Array) -> jax.Array:
        return self._mlp(params["critic"], observation)[..., 0]

    def log_prob_and_entropy(self, params: Params, observation: jax.Array, action: jax.Array) -> tuple[jax.Array, jax.Array]:
        head = self._mlp(params["actor"], observation)
        if self.discrete:
            log_probs = jax.nn.log_softmax(head)
            return jnp.take_along_axis(log_probs, action[:, None], 1)[:, 0], -(jnp.exp(log_probs) * log_probs).sum(-1)
        log_std = params["log_std"]
        log_prob = jax.scipy.stats.norm.logpdf(action, head, jnp.exp(log_std)).sum(-1)
        return log_prob, jnp.broadcast_to((log_std + 0.5 * jnp.log(2 * jnp.pi * jnp.e)).sum(), log_prob.shape)

    def _act(self, params: Params, observation: jax.Array, key: jax.Array, turn: int) -> tuple[jax.Array, ...]:
        key = jax.random.fold_in(key, turn)
        head = self._mlp(params["actor"], observation)
        if self.discrete:
            action = jax.random.categorical(key, head)
        else:
            action = head + jnp.exp(params["log_std"]) * jax.random.normal(key, head.shape)
        return action, self.log_prob_and_entropy(params, observation, action)[0], self.value(params, observation)

    def to_env(self, action: np.ndarray) -> np.ndarray:
        """Actions as the environments want them."""
        if self.discrete:
            return action.astype(self.space.dtype) + self.space.start
        return np.clip(action.reshape(-1, *self.space.shape), self.space.low, self.space.high).astype(self.space.dtype)


# --- stepping the environments --------------------------------------------------------------------


class Collector:
    """Steps the environments, and makes transitions of the rows that come back."""

    def __init__(self, envs: gymnasium.vector.VectorEnv, policy: Policy, seed: int, first_ready: bool) -> None:
        mode = envs.metadata.get("autoreset_mode")
        if mode is not gymnasium.vector.AutoresetMode.NEXT_STEP:
            raise SystemExit(f"this program is written for next-step autoreset, and these environments have {mode}")
        n = envs.num_envs
        self.envs, self.policy, self.first_ready = envs, policy, first_ready
        self.observation = np.zeros((n, policy.inputs), np.float32)  # the latest of each environment
        self.action = np.zeros(n, np.int32) if policy.discrete else np.zeros((n, policy.outputs), np.float32)
        self.log_prob, self.value = np.zeros(n, np.float32), np.zeros(n, np.float32)
        self.begins = np.ones(n, bool)  # the next row of this environment is the reset of an episode
        self.running_return = np.zeros(n)
        self.returns: list[float] = []
        if first_ready:
            envs.reset_async(seed=seed)
            observation, *_, infos = envs.recv()
            self.at_hand = infos["env_id"]
        else:
            observation, _ = envs.reset(seed=seed)
            self.at_hand = np.arange(n)
        self._take_in(observation)
        self.begins[self.at_hand] = False

    def _take_in(self, observation: Any) -> None:
        self.observation[self.at_hand] = np.asarray(observation).reshape(len(self.at_hand), -1)

    def step(self, action: np.ndarray) -> tuple[Any, ...]:
        """Act for the environments at hand; returns the next rows, and from then on those are at hand."""
        if self.first_ready:
            self.envs.send(action, self.at_hand)
            *rows, infos = self.envs.recv()
            self.at_hand = infos["env_id"]
        else:
            *rows, _ = self.envs.step(action)
        return tuple(rows)

    def collect(self, params: Params, key: jax.Array, batches: int) -> Rollout:
        """``batches`` times as many rows as are at hand; every field is ``(batches, rows, ...)``."""
        found: list[Rollout] = []
        for turn in range(batches):
            ids = self.at_hand
            action, log_prob, value = jax.device_get(self.policy.act(params, self.observation[ids], key, turn))
            self.action[ids], self.log_prob[ids], self.value[ids] = action, log_prob, value
            observation, reward, terminated, truncated = self.step(self.policy.to_env(action))
            ids, done = self.at_hand, np.asarray(terminated | truncated)
            kept = {name: getattr(self, name)[ids] for name in ("observation", "action", "log_prob", "value")}
            row = {"env_id": ids, "reward": np.asarray(reward, np.float32), "terminated": terminated, "done": done}
            found.append({**kept, **row, "weight": (~self.begins[ids]).astype(np.float32)})
            self._take_in(observation)
            self._count(ids, row["reward"], done)
        return {name: np.stack([row[name] for row in found]) for name in found[0]}

    def _count(self, ids: np.ndarray, reward: np.ndarray, done: np.ndarray) -> None:
        self.running_return[ids] += reward  # 0 in the row of a reset
        self.begins[ids] = done
        self.returns += self.running_return[ids[done]].tolist()
        self.running_return[ids[done]] = 0.0


def advantages(rollout: Rollout, last_value: np.ndarray, discount: float, gae_lambda: float) -> np.ndarray:
    """Generalised advantage estimates, ``(batches, rows)``, from the latest row of each environment back.

    ``last_value`` is the value of each environment's latest observation, ``(num_envs,)``. A terminated episode has no value
    to come, a truncated one has that of its last state, which is the observation of the row that follows: the reset's.
    """
    next_value, next_advantage = last_value.copy(), np.zeros_like(last_value)
    found = np.zeros_like(rollout["reward"])
    for t in reversed(range(len(found))):
        ids, value = rollout["env_id"][t], rollout["value"][t]
        delta = rollout["reward"][t] + discount * next_value[ids] * ~rollout["terminated"][t] - value
        found[t] = delta + discount * gae_lambda * next_advantage[ids] * ~rollout["done"][t]
        next_value[ids], next_advantage[ids] = value, found[t]
    return found


# --- learning -------------------------------------------------------------------------------------


def make_update(policy: Policy, optimizer: optax.GradientTransformation, s: Settings) -> Callable[..., Any]:
    """The whole of an update, all epochs and minibatches, as one compiled function."""

    def loss(params: Params, batch: dict[str, jax.Array]) -> jax.Array:
        def mean(x: jax.Array) -> jax.Array:
            return (x * batch["weight"]).sum() / batch["weight"].sum()

        log_prob, entropy = policy.log_prob_and_entropy(params, batch["observation"], batch["action"])
        advantage = batch["advantage"] - mean(batch["advantage"])
        advantage /= jnp.sqrt(mean(advantage**2)) + 1e-8
        ratio = jnp.exp(log_prob - batch["log_prob"])
        gain = jnp.minimum(ratio * advantage, jnp.clip(ratio, 1 - s.clip, 1 + s.clip) * advantage)
        error = (policy.value(params, batch["observation"]) - batch["target"]) ** 2
        return mean(-gain + 0.5 * error - s.entropy * entropy)

    @partial(jax.jit, donate_argnums=(0, 1))
    def update(params: Params, state: Any, batch: dict[str, jax.Array], key: jax.Array) -> tuple[Params, Any]:
        def minibatch(carry: tuple[Params, Any], index: jax.Array) -> tuple[tuple[Params, Any], None]:
            params, state = carry
            grads = jax.grad(loss)(params, jax.tree.map(lambda leaf: leaf[index], batch))
            changes, state = optimizer.update(grads, state)
            return (optax.apply_updates(params, changes), state), None

        size = len(batch["weight"]) // s.minibatches
        orders = jax.vmap(lambda k: jax.random.permutation(k, len(batch["weight"])))(jax.random.split(key, s.epochs))
        indices = orders[:, : size * s.minibatches].reshape(-1, size)
        return jax.lax.scan(minibatch, (params, state), indices)[0]

    return update


@dataclass(frozen=True)
class Point:
    """One point of the learning curve."""

    steps: int
    seconds: float
    mean_return: float  # of the last 100 episodes


def train(envs: gymnasium.vector.VectorEnv, s: Settings, seed: int, first_ready: bool) -> Iterator[Point]:
    """Train until the target is reached or the steps are used up; yields a point an update, once episodes have ended."""
    began = time.perf_counter()
    policy = Policy(envs.single_observation_space, envs.single_action_space)
    key, subkey = jax.random.split(jax.random.key(seed))
    params = policy.init(subkey)
    optimizer = optax.chain(optax.clip_by_global_norm(0.5), optax.adam(s.learning_rate, eps=1e-5))
    state, update = optimizer.init(params), make_update(policy, optimizer, s)
    value = jax.jit(policy.value)
    collector = Collector(envs, policy, seed, first_ready)
    batches = s.rollout * envs.num_envs // len(collector.at_hand)
    steps, last = 0, deque[float](maxlen=100)
    while steps < s.steps:
        key, act_key, update_key = jax.random.split(key, 3)
        rollout = collector.collect(params, act_key, batches)
        rollout["reward"] *= s.reward_scale
        last_value = np.array(value(params, collector.observation))
        rollout["advantage"] = advantages(rollout, last_value, s.discount, s.gae_lambda)
        rollout["target"] = rollout["advantage"] + rollout["value"]
        wanted = ("observation", "action", "log_prob", "weight", "advantage", "target")
        batch = {name: rollout[name].reshape(-1, *rollout[name].shape[2:]) for name in wanted}
        params, state = update(params, state, batch, update_key)
        steps += batch["weight"].size
        last.extend(collector.returns)
        collector.returns.clear()
        if last:
            yield Point(steps, time.perf_counter() - began, float(np.mean(last)))
        if len(last) == last.maxlen and np.mean(last) >= s.target:
            return


# --- the program ----------------------------------------------------------------------------------


def draw(points: list[Point], title: str, target: float, path: Path) -> None:
    figure = Figure(figsize=(7.0, 4.0), layout="constrained")
    axes = figure.subplots()
    axes.plot([p.steps for p in points], [p.mean_return for p in points], color="#1b7f5c", linewidth=2)
    if np.isfinite(target):
        axes.axhline(target, color="#c8553d", linestyle="--", linewidth=1)
        axes.annotate(f" target {target:g}", (0, target), color="#c8553d", fontsize=8, va="bottom")
    axes.set_xlabel("environment steps")
    axes.xaxis.set_major_formatter("{x:,.0f}")
    axes.set_ylabel("mean return, last 100 episodes")
    axes.set_title(title, fontsize=10)
    axes.grid(alpha=0.2)
    axes.spines[["top", "right"]].set_visible(False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)


def parse(argv: list[str] | None) -> tuple[argparse.Namespace, Settings]:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0], allow_abbrev=False)
    parser.add_argument("env_id", nargs="?", default="CartPole-v1")
    parser.add_argument("--backend", default="process", help="process, serial, envpool, brax, playground")
    parser.add_argument("--first-ready", action="store_true", help="send and recv, half of the environments at a time")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, default=Path("ppo-results"), help="folder for the learning curve")
    for field in fields(Settings):
        kind = type(field.default)
        parser.add_argument(f"--{field.name.replace('_', '-')}", type=kind, help=f"default: {field.default:g}, or preset")
    arguments = parser.parse_args(argv)
    given = {field.name: getattr(arguments, field.name) for field in fields(Settings)}
    preset = PRESETS.get(arguments.env_id, Settings())
    return arguments, replace(preset, **{name: value for name, value in given.items() if value is not None})


def main(argv: list[str] | None = None) -> int:
    arguments, s = parse(argv)
    began = time.perf_counter()
    options = {"batch_size": s.num_envs // 2} if arguments.first_ready else {}
    try:
        envs = vecenv.make_vec(arguments.env_id, s.num_envs, arguments.backend, vector_kwargs=options)
    except (gymnasium.error.Error, ImportError, TypeError, ValueError) as error:
        raise SystemExit(f"ppo: {error}") from None
    columns = (BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    points: list[Point] = []
    with closing(envs), Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task("compiling", total=s.steps)
        for point in train(envs, s, arguments.seed, arguments.first_ready):
            points.append(point)
            said = f"mean return {point.mean_return:.1f}, {point.steps / point.seconds:,.0f} steps/s"
            bar.update(task, completed=point.steps, description=said)
    if not points:
        raise SystemExit(f"ppo: no episode ended within {s.steps:,} steps")
    last, reached = points[-1], points[-1].mean_return >= s.target
    name = f"{arguments.env_id}, {arguments.backend}" + (", first ready" if arguments.first_ready else "")
    path = arguments.out / (name.replace(", ", "-").replace(" ", "-").replace("/", "-") + ".png")
    draw(points, f"PPO: {name}, {s.num_envs} environments", s.target, path)
    said = f"mean return {last.mean_return:.1f}{' (target reached)' if reached else ''} after {last.steps:,} steps"
    print(f"{name}: {said} in {time.perf_counter() - began:.1f} s; {path}")
    return 0 if reached or not np.isfinite(s.target) else 1


if __name__ == "__main__":
    sys.exit(main())
