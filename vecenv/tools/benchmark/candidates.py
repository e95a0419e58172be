"""Who takes part: the engine in its modes, Gymnasium's engines, and the limit."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import gymnasium

from vecenv.tools.benchmark.hosts import Candidate, Unavailable
from vecenv.tools.benchmark.runners import BareLockstep, BareLoop, BarePipes, EnvFn, FirstReadyRunner, Runner, VectorRunner

CROWD = 16
"""More processes than this, and an engine is alive only while it is measured."""


def _build_vecenv(env_fn: EnvFn, num_envs: int, options: Mapping[str, Any]) -> Any:
    from vecenv.engine.vector_env import AsyncVectorEnv

    for name in options:
        if name not in inspect.signature(AsyncVectorEnv.__init__).parameters:
            raise Unavailable(f"this version of vecenv has no option {name!r}")
    return AsyncVectorEnv([env_fn] * num_envs, **options)


def vecenv_candidate(name: str, label: str, env_fn: EnvFn, num_envs: int, **options: Any) -> Candidate:
    """The engine with these options; ``batch_size`` among them makes it run first-ready."""
    make_envs = partial(_build_vecenv, env_fn, num_envs, options)
    workers = options.get("num_workers")
    processes = num_envs if workers is None else 0 if workers == "auto" else workers
    if "batch_size" in options:
        build: Callable[[], Runner] = partial(FirstReadyRunner, make_envs, options["batch_size"])
    else:
        build = partial(VectorRunner, make_envs)
    return Candidate(
        name,
        label,
        (build,),
        kind="vecenv",
        checked=True,
        alone=workers == "auto",
        crowd=processes > CROWD,
        processes=processes,
    )


def _build_gymnasium(kind: str, env_fn: EnvFn, num_envs: int) -> Any:
    return getattr(gymnasium.vector, kind)([env_fn] * num_envs)


def gymnasium_candidate(name: str, kind: str, env_fn: EnvFn, num_envs: int) -> Candidate:
    build = partial(VectorRunner, partial(_build_gymnasium, kind, env_fn, num_envs))
    processes = num_envs if kind == "AsyncVectorEnv" else 0
    return Candidate(name, f"Gymnasium {kind}", (build,), kind="gymnasium", crowd=processes > CROWD, processes=processes)


def limit_candidate(env_fn: EnvFn, num_envs: int, workers: int) -> Candidate:
    """The bare loop in ``workers`` processes (no more than there are environments), each over its share."""
    processes = min(workers, num_envs)
    bounds = [num_envs * i // processes for i in range(processes + 1)]
    builds = tuple(partial(BareLoop, env_fn, a, b - a, num_envs) for a, b in itertools.pairwise(bounds))
    return Candidate("limit", f"the limit: bare loop, {processes} processes", builds, kind="limit")


def bare_pipes_candidate(env_fn: EnvFn, num_envs: int) -> Candidate:
    """What a process per environment costs at least."""
    build = partial(BarePipes, env_fn, num_envs)
    return Candidate(
        "bare-pipes", "bare pipes, one process per env", (build,), kind="limit", crowd=num_envs > CROWD, processes=num_envs
    )


def bare_lockstep_candidate(env_fn: EnvFn, num_envs: int, workers: int) -> Candidate:
    """What lock-step costs at least, in ``workers`` processes (no more than there are environments)."""
    processes = min(workers, num_envs)
    return Candidate(
        "bare-lockstep", f"bare lock-step, {processes} process{'es' if processes > 1 else ''}",
        (partial(BareLockstep, env_fn, num_envs, processes),), kind="limit", processes=processes - 1,
    )  # fmt: skip


def _workers(count: int) -> str:
    return f"{count} worker{'s' if count > 1 else ''}"


def default_candidates(env_fn: EnvFn, num_envs: int, workers: int) -> list[Candidate]:
    """The rows of the main table, best known first."""
    workers = min(workers, num_envs)
    share, half = max(1, workers - 1), max(1, num_envs // 2)
    ours = partial(vecenv_candidate, env_fn=env_fn, num_envs=num_envs)
    return [
        ours("auto", "vecenv, auto", num_workers="auto"),
        ours("use-caller", f"vecenv, caller and {_workers(share)}", num_workers=share, use_caller=True),
        ours("workers", f"vecenv, {_workers(workers)}", num_workers=workers),
        ours("first-ready", f"vecenv, first {half} ready", num_workers=workers, batch_size=half),
        ours("per-env", "vecenv, one process per env"),
        gymnasium_candidate("gym-sync", "SyncVectorEnv", env_fn, num_envs),
        gymnasium_candidate("gym-async", "AsyncVectorEnv", env_fn, num_envs),
        bare_pipes_candidate(env_fn, num_envs),
        bare_lockstep_candidate(env_fn, num_envs, workers),
        limit_candidate(env_fn, num_envs, workers),
    ]


def scale_candidates(env_fn: EnvFn, num_envs: int, worker_counts: Sequence[int]) -> list[Candidate]:
    """The main table without first-ready, and with a row for each number of workers instead of one."""
    rows = default_candidates(env_fn, num_envs, max(worker_counts))
    fixed = [
        vecenv_candidate(f"workers-{count}", f"vecenv, {_workers(count)}", env_fn, num_envs, num_workers=count)
        for count in worker_counts
        if count <= num_envs
    ]
    kept = [row for row in rows if row.name not in ("workers", "first-ready")]
    return [*kept[:2], *fixed, *kept[2:]]
