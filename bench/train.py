"""Compares training runs with different engines: frames per second, including the time of policy and learning.

``python -m bench train`` runs proximal policy optimisation with the same network and updates for every row. The rows differ
in the engine, and in whether the policy waits for all environments. The program also prints and draws the shares of the time
that environments, policy and learning take. A frame is a step that the training uses; resets do not count.
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
from bench.engines import SamplingOptions, make_sb3_envs
from bench.steppers import AsyncEnvPool, FirstReadyHalves, StableBaselines3, Stepper
from bench.workloads import MINIGRID, Workload, make_minigrid
from vecenv.tools.benchmark import CandidateProcess, Report, compare, new_figure, save
from vecenv.tools.runners import SEED, Candidate, EnvFn, Unavailable, make_env, run_for

__all__ = ["TRAININGS", "compare_trainings", "draw_shares"]

ROLLOUT_STEPS, EPOCHS, MINIBATCHES = 64, 3, 4
PARTS = ("environments", "policy", "learning")


def _make_pong() -> gymnasium.Env[Any, Any]:
    import ale_py
    from gymnasium.wrappers import AtariPreprocessing, FrameStackObservation

    gymnasium.register_envs(ale_py)
    return FrameStackObservation(AtariPreprocessing(gymnasium.make("ALE/Pong-v5", frameskip=1)), 4)


TRAININGS = {
    workload.name: workload
    for workload in (
        Workload("pong", lambda: _make_pong, "Pong, 84 x 84, four frames"),
        Workload("ant", lambda: partial(make_env, "Ant-v5"), "Ant-v5"),
        Workload("minigrid", lambda: partial(make_minigrid, MINIGRID), "MiniGrid-DoorKey-8x8"),
    )
}
ENVPOOL_IDS = {"pong": ("Pong-v5", {"noop_max": 30}), "ant": ("Ant-v5", {})}


# --- the learner --------------------------------------------------------------------------------------------------------


class Learner:
    """A network, and its update by proximal policy optimisation as one compiled function.

    Args:
        observations: The observation space of one environment; images go through convolutions, all others are flattened.
        actions: The action space of one environment, Discrete or a flat Box.
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
            def step_back(next_row: tuple[Any, Any], row: dict[str, Any]) -> tuple[tuple[Any, Any], Any]:
                next_value, next_advantage = next_row
                delta = row["reward"] + 0.99 * next_value * ~row["terminated"] - row["value"]
                advantage = delta + 0.99 * 0.95 * next_advantage * ~row["done"]
                return (row["value"], advantage), advantage

            inputs = {name: rollout[name] for name in ("reward", "terminated", "done", "value")}
            return jax.lax.scan(step_back, (last_value, jax.numpy.zeros_like(last_value)), inputs, reverse=True)[1]

        @jax.jit
        def update(params: Any, state: Any, rollout: dict[str, Any], last_obs: Any, key: Any) -> tuple[Any, Any]:
            advantage = advantages(rollout, net.apply(params, last_obs)[1])
            rollout = {**rollout, "advantage": advantage, "target": advantage + rollout["value"]}
            flat = {name: rows.reshape(-1, *rows.shape[2:]) for name, rows in rollout.items()}
            permutations = jax.vmap(lambda k: jax.random.permutation(k, advantage.size))(jax.random.split(key, EPOCHS))

            def update_on_minibatch(carry: tuple[Any, Any], indices: Any) -> tuple[tuple[Any, Any], None]:
                params, state = carry
                grads = jax.grad(loss)(params, {name: rows[indices] for name, rows in flat.items()})
                updates, state = optimizer.update(grads, state)
                return (optax.apply_updates(params, updates), state), None

            return jax.lax.scan(update_on_minibatch, (params, state), permutations.reshape(EPOCHS * MINIBATCHES, -1))[0]

        self.policy, self._update = act, update
        self._act = jax.jit(lambda params, observation, key, count: act(params, observation, jax.random.fold_in(key, count)))
        self._act_count = 0

    def act(self, observations: np.ndarray, batch: int) -> tuple[np.ndarray, dict[str, np.ndarray]]:
        """Return actions, and the arrays that learning needs. Pad rows to ``batch``, so that JAX compiles only once."""
        self._act_count += 1
        rows = len(observations)
        if rows < batch:
            observations = np.resize(observations, (batch, *observations.shape[1:]))
        padded = self.jax.device_get(self._act(self.params, observations, self.key, self._act_count))
        actions, extras = self.jax.tree.map(lambda part: part[:rows], padded)
        return actions, extras

    def learn(self, rollout: dict[str, Any], last_obs: Any) -> None:
        """Learn from a rollout ``(ROLLOUT_STEPS, num_envs, ...)`` and the next observations ``(num_envs, ...)``."""
        self.key, key = self.jax.random.split(self.key)
        self.params, self.optimizer_state = self._update(self.params, self.optimizer_state, rollout, last_obs, key)
        self.jax.block_until_ready(self.params)


# --- steps --------------------------------------------------------------------------------------------------------------


@dataclass
class Rollout:
    """The arrays of a rollout, ``(ROLLOUT_STEPS, num_envs, ...)``, which each environment fills at its own speed."""

    num_envs: int
    fields: dict[str, np.ndarray] = field(default_factory=dict)

    def store(self, steps: np.ndarray, ids: np.ndarray, **rows: np.ndarray) -> None:
        """Store one row for each of the environments ``ids``, at the positions ``steps``."""
        for name, values in rows.items():
            if name not in self.fields:
                self.fields[name] = np.zeros((ROLLOUT_STEPS, self.num_envs, *values.shape[1:]), values.dtype)
            self.fields[name][steps, ids] = values


class Training:
    """A runner that collects rollouts and learns from them.

    Args:
        make_stepper: A function that builds a :class:`bench.steppers.Stepper`.
    """

    def __init__(self, make_stepper: Callable[[], Any]) -> None:
        self.stepper = make_stepper()
        self.learner = Learner(self.stepper.observation_space, self.stepper.action_space)
        self.spent = dict.fromkeys(PARTS, 0.0)  # seconds
        self.latest: np.ndarray | None = None  # the latest observation of each environment
        self.is_compiled = False

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
            start = clock()
            for ids, observations in ready:
                policy_start = clock()
                actions, extras = self.learner.act(observations, stepper.batch)
                spent["policy"] += clock() - policy_start
                start += clock() - policy_start  # so that this time does not also count for the environments
                rollout.store(
                    steps[ids], ids, observation=observations, action=actions, **extras, weight=~self.reset_due[ids]
                )
                stepper.send(actions, ids)
                in_flight += len(ids)
            ids, observations, rewards, terminated, done = stepper.recv(min(stepper.batch, in_flight))
            spent["environments"] += clock() - start
            in_flight -= len(ids)
            rollout.store(steps[ids], ids, reward=rewards.astype(np.float32), terminated=terminated, done=done)
            self.reset_due[ids] = done & stepper.next_step_autoreset
            self.latest[ids] = observations
            steps[ids] += 1
            unfinished = steps[ids] < ROLLOUT_STEPS
            ready = [(ids[unfinished], observations[unfinished])] if unfinished.any() else []
        start = clock()
        self.learner.learn(rollout.fields, self.latest)
        spent["learning"] += clock() - start
        return float(rollout.fields["weight"].sum())

    def run(self, seconds: float) -> float:
        if not self.is_compiled:
            self._step()
            self.is_compiled, self.spent = True, dict.fromkeys(PARTS, 0.0)
        return run_for(self._step, seconds)

    def shares(self) -> dict[str, float]:
        total = sum(self.spent.values()) or 1.0
        return {part: spent / total for part, spent in self.spent.items()}

    def close(self) -> None:
        self.stepper.close()


class BridgeTraining:
    """A runner like :class:`Training`, with the bridge and compiled rollouts."""

    def __init__(self, env_fn: EnvFn, num_envs: int, workers: int) -> None:
        import vecenv.jax as vj

        self.engine = vecenv.AsyncVectorEnv([env_fn] * num_envs, num_workers=workers, context="forkserver")
        bridge, space = vj.bridge(self.engine), self.engine.single_action_space
        self.learner = learner = Learner(self.engine.single_observation_space, space)
        self.spent, self.is_compiled = dict.fromkeys(PARTS, 0.0), False

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
        start = clock()
        learner.key, key = jax.random.split(learner.key)
        rows, self._state = jax.block_until_ready(self._rollout(learner.params, self._state, key))
        learning_start = clock()
        learner.learn(rows, self._state.obs)
        self.spent["environments"] += learning_start - start  # includes the policy, because one compiled program runs both
        self.spent["learning"] += clock() - learning_start
        return float(rows["weight"].sum())

    run, shares = Training.run, Training.shares

    def close(self) -> None:
        self.engine.close()


# --- the engines --------------------------------------------------------------------------------------------------------


def _make_vecenv_stepper(env_fn: EnvFn, num_envs: int, batch: int | None, **options: Any) -> Stepper:
    if batch is not None:
        return FirstReadyHalves(vecenv.AsyncVectorEnv([env_fn] * num_envs, batch_size=batch, **options), batch)
    return Stepper(vecenv.AsyncVectorEnv([env_fn] * num_envs, **options))


def _make_gymnasium_stepper(kind: str, env_fn: EnvFn, num_envs: int) -> Stepper:
    return Stepper(getattr(gymnasium.vector, kind)([env_fn] * num_envs))


def _make_envpool_stepper(env_id: str, options: dict[str, Any], num_envs: int) -> Stepper:
    try:
        return Stepper(vecenv.make_vec(env_id, num_envs, "envpool", vector_kwargs=options))
    except ImportError as error:
        raise Unavailable(f"envpool is not installed ({error})") from None


def _make_sb3_stepper(env_fn: EnvFn, num_envs: int) -> Stepper:
    return StableBaselines3(make_sb3_envs(env_fn, num_envs))


def _candidates(name: str, num_envs: int, workers: int) -> list[Candidate]:
    env_fn = TRAININGS[name].prepare()
    workers = min(workers, num_envs)

    make_vecenv = partial(_make_vecenv_stepper, env_fn, num_envs)
    make_gymnasium = partial(_make_gymnasium_stepper, env_fn=env_fn, num_envs=num_envs)
    half = max(num_envs // 2, 1)

    def row(engine: str, label: str, make_stepper: Callable[[], Any], kind: Any = "vecenv") -> Candidate:
        return Candidate(engine, label, partial(Training, make_stepper), kind=kind)

    rows = [
        row("auto", "vecenv, auto", partial(make_vecenv, None, num_workers="auto")),
        row("workers", f"vecenv, {workers} workers", partial(make_vecenv, None, num_workers=workers)),
        row("halves", "vecenv, first-ready halves", partial(make_vecenv, half, num_workers=workers)),
        Candidate("bridge", "vecenv, JAX bridge", partial(BridgeTraining, env_fn, num_envs, workers), kind="vecenv"),
        row("gym-sync", "Gymnasium SyncVectorEnv", partial(make_gymnasium, "SyncVectorEnv"), "gymnasium"),
        row("gym-async", "Gymnasium AsyncVectorEnv", partial(make_gymnasium, "AsyncVectorEnv"), "gymnasium"),
        row("sb3", "Stable-Baselines3 SubprocVecEnv", partial(_make_sb3_stepper, env_fn, num_envs), "other"),
        row("torchrl-async", "TorchRL AsyncEnvPool", partial(AsyncEnvPool, env_fn, num_envs, num_envs // workers), "other"),
    ]
    if name in ENVPOOL_IDS:
        make_envpool = partial(_make_envpool_stepper, *ENVPOOL_IDS[name], num_envs)
        rows.append(row("envpool", "EnvPool, through vecenv", make_envpool, "vecenv"))
    return rows


Shares = dict[str, dict[str, float]]
"""For each row, the shares of its time in :data:`PARTS`."""


def compare_trainings(
    name: str, num_envs: int, workers: int, sampling: SamplingOptions, names: Iterable[str] | None = None
) -> tuple[Report, Shares]:
    """Measure the frames per second of each row in one of :data:`TRAININGS`, and the shares of its time."""
    rows = [row for row in _candidates(name, num_envs, workers) if names is None or row.name in set(names)]
    shares: Shares = {}

    def record_shares(hosts: list[CandidateProcess]) -> None:
        for host in hosts:
            if host.usable and (host_shares := host.call("shares")):
                shares[host.candidate.name] = host_shares

    report = compare(
        f"PPO on {TRAININGS[name].description}", TRAININGS[name].prepare(), num_envs, rows, check=False, unit="frames/s",
        inspect=record_shares, **sampling,
    )  # fmt: skip
    return report, shares


def draw_shares(report: Report, shares: Shares, path: Path) -> None:
    """Draw the seconds per 1,000 frames of each row, divided into :data:`PARTS`."""
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
