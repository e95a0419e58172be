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
from bench.engines import SamplingOptions
from bench.workloads import WORKLOADS, LogNormalWaitingEnv
from vecenv.tools.benchmark import CandidateProcess, Report, ResultRow, compare
from vecenv.tools.runners import Candidate, EnvFn, FirstReadyVectorRunner, VectorRunner, default_candidates, vecenv_candidate

PROCESS_PER_ENV = {"per-env", "bare-pipes", "gym-async", "sb3", "tianshou", "torchrl"}
MAX_PROCESSES = 600  # at once; if there were more, engines with a process per environment are measured one by one
PROCESS_BYTES = {"torchrl": 60 << 20, "sb3": 20 << 20, "tianshou": 20 << 20}  # private memory of a forked process
OTHER_PROCESS_BYTES = 12 << 20


@dataclass
class Memory:
    """The memory of a candidate: proportional set sizes in bytes, and the number of its child processes.

    A page that several processes share is divided among them.
    """

    trainer: int
    workers: int
    processes: int


def measure_memory(host: CandidateProcess) -> Memory:
    process = psutil.Process(host.pid)
    children = process.children(recursive=True)
    workers = sum(child.memory_full_info().pss for child in children)
    return Memory(process.memory_full_info().pss, workers, len(children))


def compare_selected(
    names: Iterable[str] | None, memory: dict[str, Memory] | None, env: str, env_fn: EnvFn, num_envs: int,
    rows: list[Candidate], **kwargs: Any,
) -> Report:  # fmt: skip
    """Call :func:`compare` with the candidates in ``names``, or with all. Record their memory in ``memory``, if given."""

    def record_memory(hosts: list[CandidateProcess]) -> None:
        assert memory is not None
        memory.update((host.candidate.name, measure_memory(host)) for host in hosts if host.usable)

    if names is not None:
        rows = [candidate for candidate in rows if candidate.name in set(names)]
    return compare(env, env_fn, num_envs, rows, inspect=None if memory is None else record_memory, **kwargs)


def _divide(candidates: list[Candidate], num_envs: int) -> list[list[Candidate]]:
    """Divide candidates into groups that can run at once: all of them, or one group per engine with many processes.

    Each of these groups also has the baselines. The first group has all engines with few processes.
    """
    many_processes = [c for c in candidates if c.name in PROCESS_PER_ENV]
    if len(many_processes) * num_envs <= MAX_PROCESSES:
        return [candidates]
    few_processes = [c for c in candidates if c.name not in PROCESS_PER_ENV]
    baselines = [c for c in few_processes if c.name in ("gym-sync", "bare-loop")]
    return [few_processes, *([c, *baselines] for c in many_processes)]


def compare_engines(
    workload: str,
    num_envs: int,
    workers: int,
    sampling: SamplingOptions,
    names: Iterable[str] | None = None,
    memory: dict[str, Memory] | None = None,
) -> list[Report]:
    """Compare all engines, or those in ``names``, on one workload.

    Returns one report, or several with the same baselines if the engines have too many processes to run at once. The memory
    of the engines is recorded in ``memory``, if given.
    """
    env_fn = WORKLOADS[workload].prepare()
    candidates = engines.candidates(env_fn, num_envs, workers)
    if names is not None:
        candidates = [c for c in candidates if c.name in set(names)]
    reports = []
    for group in _divide(candidates, num_envs):
        many_processes = [c for c in group if c.name in PROCESS_PER_ENV]
        needed = sum(PROCESS_BYTES.get(c.name, OTHER_PROCESS_BYTES) for c in many_processes) * num_envs
        too_large = [] if needed < psutil.virtual_memory().available else many_processes
        report = compare_selected(
            None, memory, workload, env_fn, num_envs, [c for c in group if c not in too_large], **sampling
        )
        reason = f"{num_envs} processes would need about {needed / 2**30:.0f} GiB"
        report.rows += [ResultRow(c.name, c.label, c.kind, [math.nan] * report.repeats, missing=reason) for c in too_large]
        reports.append(report)
    return reports


def merge_reports(reports: list[Report]) -> Report:
    """Merge the rows of all reports into one report. Ratios of rows from different reports are meaningless."""
    rows: dict[str, ResultRow] = {}
    for report in reports:
        for row in report.rows:
            rows.setdefault(row.name, row)
    return replace(reports[0], rows=list(rows.values()))


def compare_worker_counts(
    workload: str, num_envs: int, workers: int, sampling: SamplingOptions, names: Iterable[str] | None = None
) -> Report:
    """Compare ``num_workers="auto"``, fixed numbers of workers and ``SyncVectorEnv``, or only the rows in ``names``."""
    env_fn = WORKLOADS[workload].prepare()
    excluded = ("first-ready", "gym-async", "bare-pipes", "bare-lockstep", "bare-loop")
    rows = [c for c in default_candidates(env_fn, num_envs, workers) if c.name not in excluded]
    worker_counts = {0: "in-process", 1: "1 worker", 2 * workers: f"{2 * workers} workers"}
    rows += [
        vecenv_candidate(f"workers-{count}", f"vecenv, {text}", env_fn, num_envs, num_workers=count)
        for count, text in worker_counts.items()
        if count <= num_envs
    ]
    return compare_selected(names, None, workload, env_fn, num_envs, rows, **sampling)


class SleepRunner(VectorRunner):
    """A runner that counts the seconds that environments sleep, divided by the number of environments.

    An ideal engine never lets a finished environment wait, and has a rate of 1.
    """

    def _step(self) -> float:
        return float(self.envs.step(self._next())[0].sum()) / self.num_envs


class FirstReadySleepRunner(FirstReadyVectorRunner):
    """A runner like :class:`SleepRunner` that steps first-ready batches."""

    def _step(self) -> float:
        observations, _, _, _, infos = self.envs.recv()
        self.envs.send(self._next(), infos["env_id"])
        return float(observations.sum()) / self.num_envs


def measure_first_ready(sampling: SamplingOptions, num_envs: int = 64) -> Report:
    """Measure environments that sleep, with one process per environment, relative to an ideal engine."""
    make_candidate = partial(vecenv_candidate, env_fn=LogNormalWaitingEnv, num_envs=num_envs)
    rows = []
    for size in sorted({1, num_envs // 8, num_envs // 4, num_envs // 2} - {0}):
        runner = partial(FirstReadySleepRunner, batch_size=size)
        rows.append(make_candidate(f"first-{size}", f"vecenv, first {size} ready", runner=runner, batch_size=size))
    rows.append(make_candidate("all", "vecenv, waiting for all", runner=SleepRunner))
    title = "sleeping, share of the ideal"
    return compare(title, LogNormalWaitingEnv, num_envs, rows, check=False, unit="of the ideal", **sampling)


def raise_descriptor_limit() -> None:
    """Raise the soft limit of descriptors, which is usually 1,024: a thousand processes need a few thousand."""
    if os.name == "posix":
        import resource

        _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
