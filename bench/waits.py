"""Compares engines with environments that delay others: long resets, steps of very different duration, services, simulators.

``python -m bench waits`` compares rates and memory for batches of all environments, of the first ready ones, or of those
that are ready at a deadline; for spare workers; for threads within workers; and for other libraries, of which TorchRL's
``AsyncEnvPool`` has most of these. For long resets, the row ``free`` shows the same engine with resets that take no time.
``python -m bench episodes`` runs a list of episodes of very different lengths: by :func:`vecenv.evaluate`, in successive
batches, and by Stable-Baselines3's ``evaluate_policy``.
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
from bench.engines import OTHER_ENGINES, SamplingOptions, SteppingRunner, import_optional, make_sb3_envs, make_torchrl_env
from bench.suites import Memory, compare_selected
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

__all__ = ["WAITS", "compare_episodes", "compare_waits", "make_torchrl_pool"]


def _waiting_workload(name: str, description: str, **kwargs: Any) -> Workload:
    return Workload(name, lambda: partial(WaitingEnv, **kwargs), description)


# with episodes of different length, because otherwise all environments would reset at the same time
LONG_RESETS: dict[str, Any] = {"step": 0.001, "length": (150, 251)}
WAITS = {
    workload.name: workload
    for workload in (
        _waiting_workload("long-resets", "steps of 1 ms, a reset of 200 ms about every 200 steps", **LONG_RESETS, reset=0.2),
        _waiting_workload("free-resets", "the same with resets that take no time", **LONG_RESETS),
        Workload("log-normal", lambda: LogNormalWaitingEnv, "log-normal steps, mean 10 ms, sigma 1"),
        _waiting_workload("waiting", "steps that wait 50 ms, as for a service", step=0.05, length=100),
        _waiting_workload(
            "simulator", "steps of 5 to 20 ms, observations (128, 128, 3) uint8", step=(0.005, 0.02), length=200,
            shape=(128, 128, 3), dtype="uint8",
        ),
    )
}  # fmt: skip


class DeadlineRunner(VectorRunner):
    """A runner that steps the environments that are ready after ``within`` seconds, but at least one."""

    _warm_up_steps = 1

    def __init__(self, make_envs: Callable[[], Any], within: float) -> None:
        super().__init__(make_envs)
        self._within = within
        self._next_actions = {
            count: itertools.cycle(sample_actions(self.envs.single_action_space, count)).__next__
            for count in range(1, self.num_envs + 1)
        }

    def _step(self) -> float:
        rows = self.envs.recv(count=self.num_envs, at_least=1, within=self._within)[4]["env_id"]
        self.envs.send(self._next_actions[len(rows)](), rows)
        return len(rows)

    def _begin(self) -> None:
        self.envs.reset_async(seed=0)


def make_torchrl_pool(env_fn: EnvFn, num_envs: int, envs_per_worker: int) -> Any:
    """Build TorchRL's ``AsyncEnvPool`` with processes and shared memory."""
    module, torch = import_optional("torchrl.envs", "torchrl"), import_optional("torch", "torch")
    if not hasattr(module, "AsyncEnvPool"):
        raise Unavailable("this torchrl has no AsyncEnvPool")
    torch.set_num_threads(1)
    make = partial(make_torchrl_env, env_fn)
    return module.AsyncEnvPool([make] * num_envs, backend="multiprocessing", exchange="shm", envs_per_worker=envs_per_worker)


class AsyncEnvPoolRunner(SteppingRunner):
    """A runner of TorchRL's pool, which receives either half of the environments or those that are ready at a deadline.

    Args:
        env_fn, num_envs: The environments.
        envs_per_worker: The number of environments per worker, each of which has a thread.
        within: The deadline in seconds, after which at least one environment is received; ``None``: half of them.
    """

    def __init__(self, env_fn: EnvFn, num_envs: int, envs_per_worker: int, within: float | None = None) -> None:
        self.pool = make_torchrl_pool(env_fn, num_envs, envs_per_worker)
        self._recv_options: dict[str, Any] = {"min_get": max(num_envs // 2, 1)}
        if within is not None:
            self._recv_options = {"min_get": 1, "max_get": num_envs, "timeout": within}
        self.pool.async_reset_send(env_index=list(range(num_envs)))
        self._send(self.pool.async_reset_recv(min_get=num_envs))

    def _send(self, roots: Any) -> None:
        roots.set("action", roots.get("done").new_zeros(roots.batch_size, dtype=int))
        self.pool.async_step_and_maybe_reset_send(roots)

    def _step(self) -> int:
        while True:
            try:
                stepped, roots = self.pool.async_step_and_maybe_reset_recv(**self._recv_options)
                break
            except TimeoutError:  # no environment is ready yet
                pass
        self._send(roots)
        done = stepped.get(("next", "done"))
        return int(done.numel()) + int(done.sum())

    def close(self) -> None:
        self.pool.close()


def _spare_candidates(workload: str, env_fn: EnvFn, num_envs: int) -> list[Candidate]:
    """Return candidates with spare workers, and with resets that take no time; none for workloads without long resets."""
    if workload != "long-resets":
        return []
    rows = [
        vecenv_candidate(
            f"spares-{count}", f"vecenv, {count} spare workers", env_fn, num_envs, num_workers=None, spare_workers=count
        )
        for count in sorted({max(num_envs // 2, 1), num_envs, num_envs + max(num_envs // 4, 1)})
    ]
    free, half = WAITS["free-resets"].prepare(), max(num_envs // 2, 1)
    make_candidate = partial(vecenv_candidate, num_envs=num_envs, num_workers=None)
    return [
        *rows,
        make_candidate(
            "spares-first-ready", f"vecenv, first {half} ready, {num_envs} spare workers", env_fn, spare_workers=num_envs,
            batch_size=half,
        ),
        make_candidate("free", "vecenv, resets that take no time", free),
        make_candidate("free-first-ready", f"vecenv, first {half} ready, resets that take no time", free, batch_size=half),
    ]  # fmt: skip


def _candidates(workload: str, env_fn: EnvFn, num_envs: int, workers: int) -> list[Candidate]:
    workers, half = min(workers, num_envs), max(num_envs // 2, 1)
    envs_per_worker = -(-num_envs // workers)
    make_candidate = partial(vecenv_candidate, env_fn=env_fn, num_envs=num_envs)
    names = ("per-env", "gym-sync", "gym-async")
    per_env, *rows_of_gymnasium = [row for row in default_candidates(env_fn, num_envs, workers) if row.name in names]
    rows = [
        per_env,
        make_candidate("first-ready-per-env", f"vecenv, first {half} ready", batch_size=half),
        make_candidate("deadline", "vecenv, those ready within 2 ms", runner=partial(DeadlineRunner, within=0.002)),
    ]
    if envs_per_worker > 1:
        label = f"vecenv, {workers} workers, threads"
        rows.append(make_candidate("threads", label, num_workers=workers, env_threads=envs_per_worker))
    rows += [*rows_of_gymnasium, *_spare_candidates(workload, env_fn, num_envs)]
    builds: dict[str, tuple[str, Callable[[], Runner]]] = {}
    for name in ("sb3", "tianshou", "torchrl"):
        label, build = OTHER_ENGINES[name]
        builds[name] = label, partial(build, env_fn, num_envs, workers)
    build_pool = partial(AsyncEnvPoolRunner, env_fn, num_envs)
    builds["torchrl-async"] = "TorchRL AsyncEnvPool, a process each", partial(build_pool, 1)
    if envs_per_worker > 1:
        label = f"TorchRL AsyncEnvPool, {envs_per_worker} in a worker"
        builds["torchrl-threads"] = label, partial(build_pool, envs_per_worker)
    builds["torchrl-deadline"] = "TorchRL AsyncEnvPool, ready within 2 ms", partial(build_pool, 1, 0.002)
    rows += [Candidate(name, label, build, kind="other") for name, (label, build) in builds.items()]
    return rows


def compare_waits(
    workload: str,
    num_envs: int,
    workers: int,
    sampling: SamplingOptions,
    names: Iterable[str] | None = None,
    memory: dict[str, Memory] | None = None,
) -> Report:
    """Compare all candidates, or those in ``names``, on one workload of :data:`WAITS`. Record their memory in ``memory``."""
    env_fn = WAITS[workload].prepare()
    rows = _candidates(workload, env_fn, num_envs, workers)
    return compare_selected(names, memory, workload, env_fn, num_envs, rows, check=False, **sampling)


# -- lists of episodes --------------------------------------------------------------------------------------------------


class EpisodesRunner(SteppingRunner):
    """A runner of lists of episodes, four per environment. It counts the steps that belong to these episodes.

    Args:
        make_envs: Builds a vector environment.
        run_list: A function that takes the vector environment, the number of episodes and the first seed, runs the
            episodes and returns the number of their steps.
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


def _evaluate_by_vecenv(envs: Any, count: int, seed: int) -> int:
    return sum(result.length for result in vecenv.evaluate(envs, _zero_policy, count, seed=seed))


def _evaluate_in_batches(envs: Any, count: int, seed: int) -> int:
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


def _evaluate_by_sb3(envs: Any, count: int, seed: int) -> int:
    from stable_baselines3.common.evaluation import evaluate_policy

    envs.seed(seed)
    _, lengths = evaluate_policy(_ZeroPolicy(), envs, count, return_episode_rewards=True, warn=False)
    return int(sum(lengths))


def compare_episodes(num_envs: int, sampling: SamplingOptions, names: Iterable[str] | None = None) -> Report:
    """Compare the rates at which engines run lists of episodes with 20 to 200 steps of 1 ms. Other steps do not count."""
    env_fn: EnvFn = partial(WaitingEnv, step=0.001, length=(20, 201))
    make_vecenv = partial(vecenv.AsyncVectorEnv, [env_fn] * num_envs)
    make_sync = partial(SyncVectorEnv, [env_fn] * num_envs)
    make_async = partial(gymnasium.vector.AsyncVectorEnv, [env_fn] * num_envs)
    make_sb3 = partial(make_sb3_envs, env_fn, num_envs)

    def row(name: str, label: str, make_envs: Callable[[], Any], run_list: Any, kind: Any = "vecenv") -> Candidate:
        build: Callable[[], Runner] = partial(EpisodesRunner, make_envs, run_list)
        return Candidate(name, label, build, kind=kind, processes=num_envs)

    rows = [
        row("evaluate", "vecenv.evaluate", make_vecenv, _evaluate_by_vecenv),
        row("batches", "vecenv, batch after batch", make_vecenv, _evaluate_in_batches),
        row("gym-sync", "SyncVectorEnv, batch after batch", make_sync, _evaluate_in_batches, "gymnasium"),
        row("gym-async", "AsyncVectorEnv, batch after batch", make_async, _evaluate_in_batches, "gymnasium"),
        row("sb3", "Stable-Baselines3 evaluate_policy", make_sb3, _evaluate_by_sb3, "other"),
    ]
    return compare_selected(names, None, "episodes of 20 to 200 steps", env_fn, num_envs, rows, check=False, **sampling)
