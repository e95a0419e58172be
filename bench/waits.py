"""Environments that delay others: long resets, steps of very different duration, services, simulators with images.

``python -m bench waits`` compares the rates and the memory of engines with such environments: batches of all environments,
of the first ready ones, or by deadline; spare workers; threads within workers; and TorchRL's ``AsyncEnvPool``, which has
most of these. For long resets, the row ``free`` is the same engine with resets that take no time, for reference.
``python -m bench episodes`` runs a list of episodes of very different lengths: by :func:`vecenv.evaluate`, and in successive
batches, as other libraries do.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import gymnasium
import numpy as np
from gymnasium.vector import SyncVectorEnv

import vecenv
from bench.engines import OTHERS, Pace, Stepping, need, sb3_envs, torchrl_env
from bench.suites import Memory, compare_named
from bench.workloads import LogNormalWaitingEnv, WaitingEnv, Workload
from vecenv.tools.benchmark import Report
from vecenv.tools.runners import (
    Candidate,
    EnvFn,
    Runner,
    Unavailable,
    VectorRunner,
    default_candidates,
    sample_actions,
    vecenv_candidate,
)

__all__ = ["WAITS", "episodes", "torchrl_pool", "waits"]


def _waiting_workload(name: str, text: str, **kwargs: Any) -> Workload:
    return Workload(name, lambda: partial(WaitingEnv, **kwargs), text)


# episodes of different length, because otherwise all environments would reset at the same time
LONG_RESETS: dict[str, Any] = {"step": 0.001, "length": (150, 251)}
WAITS = {
    workload.name: workload
    for workload in (
        _waiting_workload("long-resets", "steps of 1 ms, a reset of 200 ms every 200 steps or so", **LONG_RESETS, reset=0.2),
        _waiting_workload("free-resets", "the same without waiting in resets", **LONG_RESETS),
        Workload("log-normal", lambda: LogNormalWaitingEnv, "log-normal steps, mean 10 ms, sigma 1"),
        _waiting_workload("waiting", "steps that wait 50 ms, as for a service", step=0.05, length=100),
        _waiting_workload(
            "simulator", "steps of 5 to 20 ms, observations (128, 128, 3) uint8", step=(0.005, 0.02), length=200,
            shape=(128, 128, 3), dtype="uint8",
        ),
    )
}  # fmt: skip


class DeadlineRunner(VectorRunner):
    """A runner that receives the environments that are ready after ``within`` seconds, at least one."""

    _warm_up_steps = 1

    def __init__(self, make_envs: Callable[[], Any], within: float) -> None:
        super().__init__(make_envs)
        self._within = within
        self._batches = {
            count: itertools.cycle(sample_actions(self.envs.single_action_space, count)).__next__
            for count in range(1, self.num_envs + 1)
        }

    def _step(self) -> float:
        rows = self.envs.recv(count=self.num_envs, at_least=1, within=self._within)[4]["env_id"]
        self.envs.send(self._batches[len(rows)](), rows)
        return len(rows)

    def _begin(self) -> None:
        self.envs.reset_async(seed=0)


def torchrl_pool(env_fn: EnvFn, num_envs: int, envs_per_worker: int) -> Any:
    """Build TorchRL's ``AsyncEnvPool`` with processes and shared memory."""
    module, torch = need("torchrl.envs", "torchrl"), need("torch", "torch")
    if not hasattr(module, "AsyncEnvPool"):
        raise Unavailable("this torchrl has no AsyncEnvPool")
    torch.set_num_threads(1)
    make = partial(torchrl_env, env_fn)
    return module.AsyncEnvPool([make] * num_envs, backend="multiprocessing", exchange="shm", envs_per_worker=envs_per_worker)


class AsyncEnvPoolRunner(Stepping):
    """A runner of TorchRL's pool.

    Args:
        env_fn, num_envs: The environments.
        envs_per_worker: The number of threads in a worker.
        within: Seconds after which the ready environments are received, at least one; ``None``: the first half.
    """

    def __init__(self, env_fn: EnvFn, num_envs: int, envs_per_worker: int, within: float | None = None) -> None:
        self.pool = torchrl_pool(env_fn, num_envs, envs_per_worker)
        self._enough: dict[str, Any] = {"min_get": max(num_envs // 2, 1)}
        if within is not None:
            self._enough = {"min_get": 1, "max_get": num_envs, "timeout": within}
        self.pool.async_reset_send(env_index=list(range(num_envs)))
        self._send(self.pool.async_reset_recv(min_get=num_envs))

    def _send(self, roots: Any) -> None:
        roots.set("action", roots.get("done").new_zeros(roots.batch_size, dtype=int))
        self.pool.async_step_and_maybe_reset_send(roots)

    def _step(self) -> int:
        while True:
            try:
                stepped, roots = self.pool.async_step_and_maybe_reset_recv(**self._enough)
                break
            except TimeoutError:  # no environment is ready
                pass
        self._send(roots)
        done = stepped.get(("next", "done"))
        return int(done.numel()) + int(done.sum())

    def close(self) -> None:
        self.pool.close()


def _spare_candidates(workload: str, env_fn: EnvFn, num_envs: int) -> list[Candidate]:
    """Return candidates with several numbers of spare workers, and with resets that take no time."""
    if workload != "long-resets":
        return []
    rows = [
        vecenv_candidate(
            f"spares-{count}", f"vecenv, {count} spare workers", env_fn, num_envs, num_workers=None, spare_workers=count
        )
        for count in sorted({max(num_envs // 2, 1), num_envs, num_envs + max(num_envs // 4, 1)})
    ]
    free, half = WAITS["free-resets"].prepare(), max(num_envs // 2, 1)
    ours = partial(vecenv_candidate, num_envs=num_envs, num_workers=None)
    return [
        *rows,
        ours(
            "spares-first-ready", f"vecenv, first {half} ready, {num_envs} spare workers", env_fn, spare_workers=num_envs,
            batch_size=half,
        ),
        ours("free", "vecenv, resets that cost nothing", free),
        ours("free-first-ready", f"vecenv, first {half} ready, resets that cost nothing", free, batch_size=half),
    ]  # fmt: skip


def _candidates(workload: str, env_fn: EnvFn, num_envs: int, workers: int) -> list[Candidate]:
    workers = min(workers, num_envs)
    count = -(-num_envs // workers)  # environments per worker
    own_rows = ("per-env", "gym-sync", "gym-async")
    ours = partial(vecenv_candidate, env_fn=env_fn, num_envs=num_envs)
    rows = [row for row in default_candidates(env_fn, num_envs, workers) if row.name in own_rows]
    rows[:1] = [
        rows[0],
        ours("first-ready-per-env", f"vecenv, first {max(num_envs // 2, 1)} ready", batch_size=max(num_envs // 2, 1)),
        ours("deadline", "vecenv, those ready within 2 ms", runner=partial(DeadlineRunner, within=0.002)),
    ]
    rows += _spare_candidates(workload, env_fn, num_envs)
    if count > 1:
        rows.insert(3, ours("threads", f"vecenv, {workers} workers, threads", num_workers=workers, env_threads=count))
    for name in ("sb3", "tianshou", "torchrl"):
        label, build = OTHERS[name]
        rows.append(Candidate(name, label, partial(build, env_fn, num_envs, workers), kind="other"))
    for name, label, threads in (
        ("torchrl-async", "TorchRL AsyncEnvPool, a process each", 1),
        ("torchrl-threads", f"TorchRL AsyncEnvPool, {count} in a worker", count),
    ):
        if threads > 1 or name == "torchrl-async":
            rows.append(Candidate(name, label, partial(AsyncEnvPoolRunner, env_fn, num_envs, threads), kind="other"))
    by_deadline = partial(AsyncEnvPoolRunner, env_fn, num_envs, 1, 0.002)
    rows.append(Candidate("torchrl-deadline", "TorchRL AsyncEnvPool, ready within 2 ms", by_deadline, kind="other"))
    return rows


def waits(
    workload: str,
    num_envs: int,
    workers: int,
    pace: Pace,
    names: Iterable[str] | None = None,
    memory: dict[str, Memory] | None = None,
) -> Report:
    """Measure all candidates, or those in ``names``, on one workload of :data:`WAITS`. Record their memory in ``memory``."""
    env_fn = WAITS[workload].prepare()
    rows = _candidates(workload, env_fn, num_envs, workers)
    return compare_named(names, memory, workload, env_fn, num_envs, rows, check=False, **pace)


# -- lists of episodes --------------------------------------------------------------------------------------------------


class EpisodesRunner(Stepping):
    """A runner of lists of episodes, four per environment. It counts the steps that belong to these episodes.

    Args:
        make_envs: Builds a vector environment.
        run_list: Takes the vector environment, a number of episodes and the first seed; runs the episodes and returns the
            number of their steps.
    """

    def __init__(self, make_envs: Callable[[], Any], run_list: Callable[[Any, int, int], int]) -> None:
        self.envs = make_envs()
        self._run_list = run_list
        self._seed = 0

    def _step(self) -> float:
        count = 4 * self.envs.num_envs
        self._seed += count
        return self._run_list(self.envs, count, self._seed)


def _zero_policy(observations: Any) -> Any:
    return np.zeros(len(observations), np.int64)


def _run_by_evaluate(envs: Any, count: int, seed: int) -> int:
    return sum(result.length for result in vecenv.evaluate(envs, _zero_policy, count, seed=seed))


def _run_in_batches(envs: Any, count: int, seed: int) -> int:
    """Run the episodes in successive batches, each of which takes as long as its longest episode."""
    counted_steps = 0
    for first in range(seed, seed + count, envs.num_envs):
        envs.reset(seed=first)
        running = np.ones(envs.num_envs, bool)
        while running.any():
            _, _, terminations, truncations, _ = envs.step(np.zeros(envs.num_envs, np.int64))
            counted_steps += int(running.sum())
            running &= ~(terminations | truncations)
    return counted_steps


class _ZeroPolicy:
    def predict(self, observations: Any, **_: Any) -> Any:
        return _zero_policy(observations), None


def _run_by_sb3(envs: Any, count: int, seed: int) -> int:
    from stable_baselines3.common.evaluation import evaluate_policy

    envs.seed(seed)
    _, lengths = evaluate_policy(_ZeroPolicy(), envs, count, return_episode_rewards=True, warn=False)
    return int(sum(lengths))


def episodes(num_envs: int, pace: Pace, names: Iterable[str] | None = None) -> Report:
    """Compare the rates at which lists of episodes run, of 20 to 200 steps of 1 ms. Only steps of these episodes count."""
    env_fn: EnvFn = partial(WaitingEnv, step=0.001, length=(20, 201))
    make_vecenv = partial(vecenv.AsyncVectorEnv, [env_fn] * num_envs)

    def row(name: str, label: str, make: Callable[[], Any], run_list: Any, kind: Any = "vecenv") -> Candidate:
        build: Callable[[], Runner] = partial(EpisodesRunner, make, run_list)
        return Candidate(name, label, build, kind=kind, processes=num_envs)

    rows = [
        row("evaluate", "vecenv.evaluate", make_vecenv, _run_by_evaluate),
        row("batches", "vecenv, batch after batch", make_vecenv, _run_in_batches),
        row("gym-sync", "SyncVectorEnv, batch after batch", partial(SyncVectorEnv, [env_fn] * num_envs), _run_in_batches,
        "gymnasium"), row(
            "gym-async", "AsyncVectorEnv, batch after batch",
            partial(gymnasium.vector.AsyncVectorEnv, [env_fn] * num_envs), _run_in_batches, "gymnasium",
        ),
        row("sb3", "Stable-Baselines3 evaluate_policy", partial(sb3_envs, env_fn, num_envs), _run_by_sb3, "other"),
    ]  # fmt: skip
    return compare_named(names, None, "episodes of 20 to 200 steps", env_fn, num_envs, rows, check=False, **pace)
