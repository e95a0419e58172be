"""Training runs with different engines: frames per second, with the time of policy and learning included.

``python -m bench train`` runs proximal policy optimisation with the same network and updates for every row. The rows differ
in the engine, and in whether the policy waits for all environments. The program also prints and draws the shares of the time
in environments, policy and learning. A frame is a step that the training uses; resets do not count.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np

import vecenv
from bench.engines import Pace, sb3_envs
from bench.steppers import AsyncEnvPool, FirstReadyHalves, StableBaselines3, Stepper
from bench.workloads import MINIGRID, Workload, make_minigrid
from vecenv.tools.benchmark import CandidateProcess, Report, compare, new_figure, save
from vecenv.tools.runners import SEED, Candidate, EnvFn, Unavailable, make_env, run_for

__all__ = ["TRAININGS", "draw_shares", "train"]

ROLLOUT_STEPS, EPOCHS, MINIBATCHES = 64, 3, 4
PARTS = ("environments", "policy", "learning")


def _pong() -> gymnasium.Env[Any, Any]:
    import ale_py
    from gymnasium.wrappers import AtariPreprocessing, FrameStackObservation

    gymnasium.register_envs(ale_py)
    return FrameStackObservation(AtariPreprocessing(gymnasium.make("ALE/Pong-v5", frameskip=1)), 4)


TRAININGS = {
    workload.name: workload
    for workload in (
        Workload("pong", lambda: _pong, "Pong, 84 x 84, four frames"),
        Workload("ant", lambda: partial(make_env, "Ant-v5"), "Ant-v5"),
        Workload("minigrid", lambda: partial(make_minigrid, MINIGRID), "MiniGrid-DoorKey-8x8"),
    )
}
ENVPOOL_IDS = {"pong": ("Pong-v5", {"noop_max": 30}), "ant": ("Ant-v5", {})}


# --- the learner --------------------------------------------------------------------------------------------------------


class Learner:
    """A network, and its update by proximal policy optimisation as one compiled function.

    Args:
        observations: The space of one environment; images pass through convolutions, other observations are flattened.
        actions: The space of one environment, Discrete or a flat Box.
    """

    def __init__(self, observations: gymnasium.spaces.Box, actions: gymnasium.Space[Any]) -> None:
        try:
            import jax
            import optax

            from bench.networks import Policy
        except ImportError as error:
            raise Unavailable(f"the learner needs jax, flax and optax ({error})") from None
        self.jax = jax
        net, self.key = Policy.for_spaces(observations, actions), jax.random.key(SEED)
        self.params = net.init(jax.random.key(0), np.zeros((1, *observations.shape), observations.dtype))
        optimizer = optax.adam(2.5e-4)
        self.optimizer_state = optimizer.init(self.params)

        def act(params: Any, observation: Any, key: Any) -> tuple[Any, dict[str, Any]]:
            distribution, value = net.apply(params, observation)
            action = distribution.sample(key)
            return action, {"log_prob": distribution.log_prob(action), "value": value}

        def loss(params: Any, rows: dict[str, Any]) -> Any:
            distribution, value = net.apply(params, rows["observation"])
            ratio = jax.numpy.exp(distribution.log_prob(rows["action"]) - rows["log_prob"])
            advantage = rows["advantage"]
            gain = jax.numpy.minimum(ratio * advantage, jax.numpy.clip(ratio, 0.9, 1.1) * advantage)
            losses = 0.5 * (value - rows["target"]) ** 2 - gain - 0.01 * distribution.entropy()
            return (losses * rows["weight"]).sum() / jax.numpy.maximum(rows["weight"].sum(), 1)

        def advantages(rollout: dict[str, Any], last_value: Any) -> Any:
            def accumulate(following: tuple[Any, Any], row: dict[str, Any]) -> tuple[tuple[Any, Any], Any]:
                value, advantage = following
                delta = row["reward"] + 0.99 * value * ~row["terminated"] - row["value"]
                advantage = delta + 0.99 * 0.95 * advantage * ~row["done"]
                return (row["value"], advantage), advantage

            inputs = {name: rollout[name] for name in ("reward", "terminated", "done", "value")}
            return jax.lax.scan(accumulate, (last_value, jax.numpy.zeros_like(last_value)), inputs, reverse=True)[1]

        @jax.jit
        def update(params: Any, state: Any, rollout: dict[str, Any], last_obs: Any, key: Any) -> tuple[Any, Any]:
            advantage = advantages(rollout, net.apply(params, last_obs)[1])
            rollout = {**rollout, "advantage": advantage, "target": advantage + rollout["value"]}
            flat = {name: rows.reshape(-1, *rows.shape[2:]) for name, rows in rollout.items()}
            permutations = jax.vmap(lambda k: jax.random.permutation(k, advantage.size))(jax.random.split(key, EPOCHS))

            def minibatch(carry: tuple[Any, Any], ids: Any) -> tuple[tuple[Any, Any], None]:
                params, state = carry
                grads = jax.grad(loss)(params, {name: rows[ids] for name, rows in flat.items()})
                updates, state = optimizer.update(grads, state)
                return (optax.apply_updates(params, updates), state), None

            return jax.lax.scan(minibatch, (params, state), permutations.reshape(EPOCHS * MINIBATCHES, -1))[0]

        self.policy, self._update = act, update
        self._act = jax.jit(lambda params, observation, key, count: act(params, observation, jax.random.fold_in(key, count)))
        self._act_count = 0

    def act(self, observations: np.ndarray, batch: int) -> tuple[np.ndarray, dict[str, np.ndarray]]:
        """Return actions, and the arrays that learning needs. Pads to ``batch`` rows, so that JAX compiles only once."""
        self._act_count += 1
        rows = len(observations)
        if rows < batch:
            observations = np.resize(observations, (batch, *observations.shape[1:]))
        padded = self.jax.device_get(self._act(self.params, observations, self.key, self._act_count))
        actions, extras = self.jax.tree.map(lambda part: part[:rows], padded)
        return actions, extras

    def learn(self, rollout: dict[str, Any], last_obs: Any) -> None:
        """Learn from rows ``(ROLLOUT_STEPS, num_envs, ...)`` and the observations ``(num_envs, ...)`` that follow them."""
        self.key, key = self.jax.random.split(self.key)
        self.params, self.optimizer_state = self._update(self.params, self.optimizer_state, rollout, last_obs, key)
        self.jax.block_until_ready(self.params)


# --- steps --------------------------------------------------------------------------------------------------------------


@dataclass
class Rollout:
    """A rollout in which each environment fills its own column."""

    num_envs: int
    fields: dict[str, np.ndarray] = field(default_factory=dict)

    def put(self, steps: np.ndarray, ids: np.ndarray, **rows: np.ndarray) -> None:
        for name, value in rows.items():
            if name not in self.fields:
                self.fields[name] = np.zeros((ROLLOUT_STEPS, self.num_envs, *value.shape[1:]), value.dtype)
            self.fields[name][steps, ids] = value


class Training:
    """A runner that collects rollouts and learns from them.

    Args:
        make_stepper: Builds a :class:`bench.steppers.Stepper`.
    """

    def __init__(self, make_stepper: Callable[[], Any]) -> None:
        self.stepper = make_stepper()
        self.learner = Learner(self.stepper.observation_space, self.stepper.action_space)
        self.spent = dict.fromkeys(PARTS, 0.0)
        self.latest: np.ndarray | None = None  # the latest observation of each environment
        self.warm = False

    def describe(self) -> str:
        return str(self.stepper)

    def _step(self) -> float:
        stepper, spent, clock = self.stepper, self.spent, time.perf_counter
        rollout, steps, in_flight = Rollout(stepper.num_envs), np.zeros(stepper.num_envs, np.intp), 0
        if self.latest is None:
            self.latest, self.reset_due = stepper.reset(), np.zeros(stepper.num_envs, bool)
        batches = np.split(np.arange(stepper.num_envs), range(stepper.batch, stepper.num_envs, stepper.batch))
        ready = [(ids, self.latest[ids]) for ids in batches]
        self.latest = np.empty_like(self.latest)
        while ready or in_flight:
            before = clock()
            for ids, observations in ready:
                began = clock()
                actions, extras = self.learner.act(observations, stepper.batch)
                spent["policy"] += clock() - began
                before += clock() - began  # the policy's time is counted separately
                rollout.put(steps[ids], ids, observation=observations, action=actions, **extras, weight=~self.reset_due[ids])
                stepper.send(actions, ids)
                in_flight += len(ids)
            ids, observations, rewards, terminated, done = stepper.recv(min(stepper.batch, in_flight))
            spent["environments"] += clock() - before
            in_flight -= len(ids)
            rollout.put(steps[ids], ids, reward=rewards.astype(np.float32), terminated=terminated, done=done)
            self.reset_due[ids] = done & stepper.next_step_autoreset
            self.latest[ids] = observations
            steps[ids] += 1
            unfinished = steps[ids] < ROLLOUT_STEPS
            ready = [(ids[unfinished], observations[unfinished])] if unfinished.any() else []
        before = clock()
        self.learner.learn(rollout.fields, self.latest)
        spent["learning"] += clock() - before
        return float(rollout.fields["weight"].sum())

    def run(self, seconds: float) -> float:
        if not self.warm:
            self._step()  # compiles
            self.warm, self.spent = True, dict.fromkeys(PARTS, 0.0)
        return run_for(self._step, seconds)

    def shares(self) -> dict[str, float]:
        total = sum(self.spent.values()) or 1.0
        return {part: spent / total for part, spent in self.spent.items()}

    def close(self) -> None:
        self.stepper.close()


class BridgeTraining:
    """A runner like :class:`Training` with rollouts inside ``jit``, through the bridge."""

    def __init__(self, env_fn: EnvFn, num_envs: int, workers: int) -> None:
        import vecenv.jax as vj

        self.engine = vecenv.AsyncVectorEnv([env_fn] * num_envs, num_workers=workers, context="forkserver")
        bridge, space = vj.bridge(self.engine), self.engine.single_action_space
        self.learner = learner = Learner(self.engine.single_observation_space, space)
        self.spent, self.warm = dict.fromkeys(PARTS, 0.0), False

        def act(params: Any, observation: Any, key: Any) -> Any:
            action, extras = learner.policy(params, observation, key)
            return action.astype(learner.jax.dtypes.canonicalize_dtype(space.dtype)), extras

        def rollout(params: Any, state: Any, key: Any) -> Any:
            trajectory, state, _ = vj.rollout(bridge, vj.stateless(act), params, state, (), key, ROLLOUT_STEPS)
            rows = {
                "observation": trajectory.obs, "action": trajectory.action, **trajectory.policy_extras,
                "reward": trajectory.reward, "terminated": trajectory.terminated, "done": trajectory.done,
                "weight": trajectory.valid,
            }  # fmt: skip
            return rows, state

        self._rollout = learner.jax.jit(rollout)
        self._state = bridge.reset(learner.jax.random.key(SEED))

    def describe(self) -> str:
        return str(self.engine)

    def _step(self) -> float:
        learner, clock = self.learner, time.perf_counter
        jax = learner.jax
        began = clock()
        learner.key, key = jax.random.split(learner.key)
        rows, self._state = jax.block_until_ready(self._rollout(learner.params, self._state, key))
        collected = clock()
        learner.learn(rows, self._state.obs)
        self.spent["environments"] += collected - began  # includes the policy, because both run in one compiled program
        self.spent["learning"] += clock() - collected
        return float(rows["weight"].sum())

    run, shares = Training.run, Training.shares

    def close(self) -> None:
        self.engine.close()


# --- the engines --------------------------------------------------------------------------------------------------------


def _vecenv(env_fn: EnvFn, num_envs: int, batch: int | None, **options: Any) -> Stepper:
    if batch is not None:
        return FirstReadyHalves(vecenv.AsyncVectorEnv([env_fn] * num_envs, batch_size=batch, **options), batch)
    return Stepper(vecenv.AsyncVectorEnv([env_fn] * num_envs, **options))


def _gymnasium(kind: str, env_fn: EnvFn, num_envs: int) -> Stepper:
    return Stepper(getattr(gymnasium.vector, kind)([env_fn] * num_envs))


def _envpool(env_id: str, options: dict[str, Any], num_envs: int) -> Stepper:
    try:
        return Stepper(vecenv.make_vec(env_id, num_envs, "envpool", vector_kwargs=options))
    except ImportError as error:
        raise Unavailable(f"envpool is not installed ({error})") from None


def _sb3(env_fn: EnvFn, num_envs: int) -> Stepper:
    return StableBaselines3(sb3_envs(env_fn, num_envs))


def _candidates(name: str, num_envs: int, workers: int) -> list[Candidate]:
    env_fn = TRAININGS[name].prepare()
    workers = min(workers, num_envs)

    def row(engine: str, label: str, make: Callable[[], Any], kind: Any = "vecenv") -> Candidate:
        return Candidate(engine, label, partial(Training, make), kind=kind)

    half = max(num_envs // 2, 1)

    rows = [
        row("auto", "vecenv, auto", partial(_vecenv, env_fn, num_envs, None, num_workers="auto")),
        row("workers", f"vecenv, {workers} workers", partial(_vecenv, env_fn, num_envs, None, num_workers=workers)),
        row("halves", "vecenv, first-ready halves", partial(_vecenv, env_fn, num_envs, half, num_workers=workers)),
        Candidate("bridge", "vecenv, JAX bridge", partial(BridgeTraining, env_fn, num_envs, workers), kind="vecenv"),
        row("gym-sync", "Gymnasium SyncVectorEnv", partial(_gymnasium, "SyncVectorEnv", env_fn, num_envs), "gymnasium"),
        row("gym-async", "Gymnasium AsyncVectorEnv", partial(_gymnasium, "AsyncVectorEnv", env_fn, num_envs), "gymnasium"),
        row("sb3", "Stable-Baselines3 SubprocVecEnv", partial(_sb3, env_fn, num_envs), "other"),
        row("torchrl-async", "TorchRL AsyncEnvPool", partial(AsyncEnvPool, env_fn, num_envs, num_envs // workers), "other"),
    ]
    if name in ENVPOOL_IDS:
        rows.append(row("envpool", "EnvPool, through vecenv", partial(_envpool, *ENVPOOL_IDS[name], num_envs), "vecenv"))
    return rows


Shares = dict[str, dict[str, float]]


def train(name: str, num_envs: int, workers: int, pace: Pace, names: Iterable[str] | None = None) -> tuple[Report, Shares]:
    """Measure the frames per second of each row in one of :data:`TRAININGS`, and the shares of its time."""
    rows = [row for row in _candidates(name, num_envs, workers) if names is None or row.name in set(names)]
    shares: Shares = {}

    def record_shares(hosts: list[CandidateProcess]) -> None:
        for host in hosts:
            if host.usable and (found := host.call("shares")):
                shares[host.candidate.name] = found

    report = compare(
        f"PPO on {TRAININGS[name].text}", TRAININGS[name].prepare(), num_envs, rows, check=False, unit="frames/s",
        inspect=record_shares, **pace,
    )  # fmt: skip
    return report, shares


def draw_shares(report: Report, shares: Shares, path: Path) -> None:
    """Draw the seconds per 1,000 frames of each row, divided into parts."""
    rows = [(row, row.summary) for row in report.rows[::-1] if row.name in shares and row.summary]
    figure = new_figure(8.0, 1.4 + 0.42 * max(1, len(rows)))
    axes = figure.subplots()
    left = np.zeros(len(rows))
    for part, colour in zip(PARTS, ("#1b7f5c", "#c8a13d", "#7a7f87"), strict=True):
        width = np.array([1000 / summary.median * shares[row.name][part] for row, summary in rows])
        axes.barh(range(len(rows)), width, left=left, height=0.7, color=colour, label=part)
        left += width
    axes.set_yticks(range(len(rows)), [row.label for row, _ in rows], fontsize=9)
    axes.set_xlabel("seconds per 1,000 frames (bridge: environments and policy together)", fontsize=8)
    axes.set_title(f"{report.env}, {report.num_envs} environments", fontsize=10)
    axes.legend(fontsize=8, frameon=False)
    save(figure, path)
