"""Comparisons beyond ``vecenv bench``: all workloads, many sizes, memory."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import psutil

from bench import engines
from bench.engines import Pace
from bench.workloads import WORKLOADS, LogNormalWaitingEnv
from vecenv.tools.benchmark import CandidateProcess, Report, ResultRow, compare
from vecenv.tools.runners import Candidate, EnvFn, FirstReadyVectorRunner, VectorRunner, default_candidates, vecenv_candidate

PROCESS_PER_ENV = {"per-env", "gym-async", "sb3", "tianshou", "torchrl"}
MAX_PROCESSES = 600  # running at once; above it, engines with a process per environment are measured one by one
PROCESS_BYTES = {"torchrl": 60 << 20, "sb3": 20 << 20, "tianshou": 20 << 20}  # private memory of a forked process
OTHER_PROCESS_BYTES = 12 << 20


@dataclass
class Memory:
    """The proportional set sizes of a candidate in bytes, in which processes divide the pages that they share."""

    trainer: int
    workers: int
    processes: int


def measure_memory(host: CandidateProcess) -> Memory:
    """Measure the memory of a running candidate."""
    process = psutil.Process(host.pid)
    children = process.children(recursive=True)
    workers = sum(child.memory_full_info().pss for child in children)
    return Memory(process.memory_full_info().pss, workers, len(children))


def compare_named(
    names: Iterable[str] | None, memory: dict[str, Memory] | None, env: str, env_fn: EnvFn, num_envs: int,
    rows: list[Candidate], **kwargs: Any,
) -> Report:  # fmt: skip
    """Call :func:`compare` with the candidates of these names, and record their memory in ``memory``, if given."""

    def record_memory(hosts: list[CandidateProcess]) -> None:
        assert memory is not None
        memory.update((host.candidate.name, measure_memory(host)) for host in hosts if host.usable)

    if names is not None:
        rows = [c for c in rows if c.name in set(names)]
    return compare(env, env_fn, num_envs, rows, inspect=None if memory is None else record_memory, **kwargs)


def _groups(candidates: list[Candidate], num_envs: int) -> list[list[Candidate]]:
    """Return one group if all candidates fit, otherwise groups with the baselines and one engine of many processes each."""
    heavy = [c for c in candidates if c.name in PROCESS_PER_ENV]
    if len(heavy) * num_envs <= MAX_PROCESSES:
        return [candidates]
    light = [c for c in candidates if c.name not in PROCESS_PER_ENV]
    baselines = [c for c in light if c.name in ("gym-sync", "bare-loop")]
    return [light, *([c, *baselines] for c in heavy)]


def side_by_side(
    workload: str,
    num_envs: int,
    workers: int,
    pace: Pace,
    names: Iterable[str] | None = None,
    memory: dict[str, Memory] | None = None,
) -> list[Report]:
    """Measure every engine on one workload. Return several reports, each with the baselines, if not all engines fit at once.

    Record the memory of the engines in ``memory``, if given.
    """
    env_fn = WORKLOADS[workload].prepare()
    candidates = engines.candidates(env_fn, num_envs, workers)
    if names is not None:
        candidates = [c for c in candidates if c.name in set(names)]
    reports = []
    for group in _groups(candidates, num_envs):
        heavy = [c for c in group if c.name in PROCESS_PER_ENV]
        needed = sum(PROCESS_BYTES.get(c.name, OTHER_PROCESS_BYTES) for c in heavy) * num_envs
        too_large = [] if needed < psutil.virtual_memory().available else heavy
        part = compare_named(None, memory, workload, env_fn, num_envs, [c for c in group if c not in too_large], **pace)
        reason = f"{num_envs} processes would need about {needed / 2**30:.0f} GiB"
        part.rows += [ResultRow(c.name, c.label, c.kind, [math.nan] * part.repeats, missing=reason) for c in too_large]
        reports.append(part)
    return reports


def merge(reports: list[Report]) -> Report:
    """Merge the rows of all reports into one. Ratios between rows of different reports are meaningless."""
    rows: dict[str, ResultRow] = {}
    for report in reports:
        for row in report.rows:
            rows.setdefault(row.name, row)
    return replace(reports[0], rows=list(rows.values()))


def auto(workload: str, num_envs: int, workers: int, pace: Pace, names: Iterable[str] | None = None) -> Report:
    """Compare ``num_workers="auto"`` with fixed numbers and ``SyncVectorEnv``, or only the rows in ``names``."""
    env_fn = WORKLOADS[workload].prepare()
    excluded = ("first-ready", "gym-async", "bare-pipes", "bare-loop")
    rows = [c for c in default_candidates(env_fn, num_envs, workers) if c.name not in excluded]
    fixed = {0: "in-process", 1: "1 worker", 2 * workers: f"{2 * workers} workers"}
    rows += [
        vecenv_candidate(f"workers-{count}", f"vecenv, {text}", env_fn, num_envs, num_workers=count)
        for count, text in fixed.items()
        if count <= num_envs
    ]
    return compare_named(names, None, workload, env_fn, num_envs, rows, **pace)


class SleepRunner(VectorRunner):
    """A runner with the time slept as its unit of work, divided by the number of environments.

    An ideal engine, in which no finished environment waits, has a rate of 1.
    """

    def _step(self) -> float:
        return float(self.envs.step(self._next())[0].sum()) / self.num_envs


class FirstReadySleepRunner(FirstReadyVectorRunner):
    """A runner like :class:`SleepRunner`, with first-ready batches."""

    def _step(self) -> float:
        observations, _, _, _, infos = self.envs.recv()
        self.envs.send(self._next(), infos["env_id"])
        return float(observations.sum()) / self.num_envs


def first_ready(pace: Pace, num_envs: int = 64) -> Report:
    """Measure sleeping environments in one process each, relative to the ideal rate, which depends only on the mean."""
    ours = partial(vecenv_candidate, env_fn=LogNormalWaitingEnv, num_envs=num_envs)
    rows = [
        ours(f"first-{b}", f"vecenv, first {b} ready", runner=partial(FirstReadySleepRunner, batch_size=b), batch_size=b)
        for b in sorted({1, num_envs // 8, num_envs // 4, num_envs // 2} - {0})
    ]
    rows.append(ours("all", "vecenv, waiting for all", runner=SleepRunner))
    title = "sleeping, share of the ideal"
    return compare(title, LogNormalWaitingEnv, num_envs, rows, check=False, unit="of the ideal", **pace)


def raise_descriptor_limit() -> None:
    """Raise the soft limit of descriptors, usually 1,024, because a thousand processes need a few thousand."""
    if os.name == "posix":
        import resource

        _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
