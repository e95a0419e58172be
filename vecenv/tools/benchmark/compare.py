"""The comparison itself: check, warm up, interleaved rounds, and what came out of them."""

from __future__ import annotations

import json
import math
import os
import platform
import random
import statistics
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np

from vecenv.system.cores import usable_cores
from vecenv.tools.benchmark.candidates import gymnasium_candidate
from vecenv.tools.benchmark.hosts import START_TIMEOUT, WARM_UP, Candidate, HostFailed, Live, Progress, started
from vecenv.tools.benchmark.runners import SEED, EnvFn, Stream, first_difference

CHECK_STEPS = 256
CHECK_SECONDS = 1.5
LOCK_STEP_SECONDS = 1.0
BASELINES = ("gym-async", "limit")


class TrajectoryMismatch(Exception):
    """An engine returned something else than ``SyncVectorEnv`` did for the same seeds and actions."""


def machine() -> dict[str, Any]:
    """What a reader needs to judge a figure: processor, cores, versions, and how busy the machine was."""
    model = platform.processor() or platform.machine()
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                model = line.partition(":")[2].strip()
                break
    return {
        "cpu": model,
        "usable_cores": usable_cores(),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "gymnasium": gymnasium.__version__,
        "numpy": np.__version__,
        "load_average": list(os.getloadavg()) if hasattr(os, "getloadavg") else None,
    }


class Interrupted(KeyboardInterrupt):
    """Ctrl-C in the middle of the rounds.

    Attributes:
        report: Of the rounds that were complete by then, at least one.
    """

    def __init__(self, report: Report) -> None:
        super().__init__()
        self.report = report


@dataclass(frozen=True)
class Summary:
    """Median and spread of some samples."""

    median: float
    lower: float  # first quartile
    upper: float  # third quartile
    minimum: float
    maximum: float
    count: int

    @classmethod
    def of(cls, samples: Iterable[float]) -> Summary | None:
        """Of the samples that are numbers; ``None`` if there is none."""
        good = [sample for sample in samples if math.isfinite(sample)]
        if not good:
            return None
        lower, upper = (float(q) for q in np.percentile(good, [25, 75]))
        return cls(statistics.median(good), lower, upper, min(good), max(good), len(good))


def short_rate(rate: float) -> str:
    """A rate where there is little room: three digits and a unit."""
    if rate < 1e3:
        return f"{rate:.3g}"
    number, unit = (rate / 1e3, "k") if rate < 999_500 else (rate / 1e6, "M")
    return f"{number:.{0 if number >= 99.95 else 1 if number >= 9.995 else 2}f}{unit}"


def show_rate(rate: float) -> str:
    """A rate for people: whole numbers where they are large, three digits where they are not."""
    return f"{rate:,.0f}" if rate >= 100 else f"{rate:.3g}"


@dataclass
class Row:
    """One candidate's samples, one per round, or why there are none."""

    name: str
    label: str
    kind: str
    rates: list[float]
    failed: str | None = None
    missing: str | None = None
    description: str = ""
    log: str = ""

    @property
    def summary(self) -> Summary | None:
        return Summary.of(self.rates)


def ratio(row: Row, baseline: Row) -> Summary | None:
    """How many times faster ``row`` is than ``baseline``, round by round."""
    return Summary.of(a / b for a, b in zip(row.rates, baseline.rates, strict=True) if b)


@dataclass
class Report:
    """The outcome of one comparison.

    Attributes:
        lock_step: How much of the limit an engine can reach that waits for all environments in each step and costs
            nothing itself; ``None`` with one process, or where it was not measured.
    """

    env: str
    num_envs: int
    seconds: float
    repeats: int
    check: str
    machine: dict[str, Any]
    rows: list[Row]
    unit: str = "steps/s"
    lock_step: float | None = None

    def row(self, name: str) -> Row | None:
        return next((row for row in self.rows if row.name == name), None)

    def ratio(self, name: str, baseline: str) -> Summary | None:
        row, other = self.row(name), self.row(baseline)
        return ratio(row, other) if row and other else None

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON: every sample, the summaries, and the ratios to the baselines."""
        rows = []
        for row in self.rows:
            entry = {key: value for key, value in asdict(row).items() if value not in (None, "")}
            entry["rates"] = [rate if math.isfinite(rate) else None for rate in row.rates]
            entry["steps_per_second"] = asdict(row.summary) if row.summary else None
            ratios = {name: self.ratio(row.name, name) for name in BASELINES if self.row(name)}
            entry["ratios"] = {name: asdict(value) for name, value in ratios.items() if value}
            rows.append(entry)
        return {**asdict(self), "rows": rows}

    def write(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(self.to_dict(), indent=1) + "\n")


def _reference(env_fn: EnvFn, num_envs: int, steps: int, seconds: float) -> Stream:
    """What ``SyncVectorEnv`` returns, in a process of its own."""
    with started([gymnasium_candidate("reference", "SyncVectorEnv", env_fn, num_envs)]) as (sync,):
        streams: list[Stream] = sync.ask("trajectory", steps, seconds, timeout=START_TIMEOUT)
        if not streams:
            raise HostFailed(f"the environment fails in Gymnasium's SyncVectorEnv too: {sync.failed}")
        return streams[0]


def _check(lives: list[Live], wanted: Stream, env_fn: EnvFn, num_envs: int, progress: Progress | None) -> str:
    """Compare every checked candidate with ``SyncVectorEnv``; returns what was established, or raises."""
    suspects = [live for live in lives if live.candidate.checked]
    steps = len(wanted.observations) - 1
    for i, live in enumerate(suspects):
        if progress:
            progress(f"checking {live.candidate.label} ({i + 1} of {len(suspects)})", 0, 0)
        streams = live.trajectory(steps)
        difference = first_difference(wanted, streams[0]) if streams else None
        if difference is None:
            continue
        if first_difference(wanted, _reference(env_fn, num_envs, steps, math.inf)) is not None:
            return "not comparable: SyncVectorEnv itself gives other trajectories each time it runs"
        raise TrajectoryMismatch(f"{live.candidate.label} differs from SyncVectorEnv {difference}")
    good = sum(live.usable for live in suspects)
    equal = "1 engine equals" if good == 1 else f"{good} engines equal"
    return f"{equal} SyncVectorEnv over {steps} steps of {num_envs} environments, bit for bit"


def _lock_step(lives: list[Live], seconds: float) -> float | None:
    """What waiting for the slowest share costs: the mean of the shares' turns over the mean of the longest of each turn."""
    limit = next((live for live in lives if live.candidate.name == "limit" and live.usable), None)
    if limit is None or len(limit.candidate.builds) < 2:
        return None
    shares = limit.ask("turns", seconds)
    turns = min(map(len, shares), default=0)
    if not turns:
        return None
    took = np.array([share[:turns] for share in shares])
    return float(took.mean() / took.max(axis=0).mean())


def compare(
    env: str,
    env_fn: EnvFn,
    num_envs: int,
    candidates: Sequence[Candidate],
    *,
    seconds: float = 1.0,
    repeats: int = 7,
    check: bool = True,
    unit: str = "steps/s",
    progress: Progress | None = None,
    inspect_live: Callable[[list[Live]], None] | None = None,
) -> Report:
    """Check, warm up, then measure all candidates in ``repeats`` interleaved rounds of ``seconds`` each.

    Args:
        env: What to call the environment.
        env_fn: Makes one.
        num_envs: How many of them.
        candidates: Who takes part.
        seconds: Length of one sample.
        repeats: Rounds; a round has one sample of every candidate.
        check: Compare the trajectories of the candidates that say so with ``SyncVectorEnv`` first.
        unit: What the rates are, for tables and pictures.
        progress: Called with what is being done, and how much of how much is done; of 0 before the rounds begin.
        inspect_live: Called after the last round, while everything still runs (memory is measured there).

    Raises:
        TrajectoryMismatch: An engine is wrong; nothing was timed.
        HostFailed: The environment does not even work in ``SyncVectorEnv``.
        Interrupted: A ``KeyboardInterrupt`` after the first round.
    """
    about = machine()
    order = random.Random(SEED)
    wanted, verdict = None, "nothing to check" if check else "not asked for"
    if check and any(candidate.checked for candidate in candidates):
        if progress:
            progress("checking the environment in SyncVectorEnv", 0, 0)
        wanted = _reference(env_fn, num_envs, CHECK_STEPS, CHECK_SECONDS)  # before the work of starting the others
    with started(candidates, progress) as lives:
        if wanted is not None:
            verdict = _check(lives, wanted, env_fn, num_envs, progress)
        for live in lives:
            if not live.candidate.crowd:
                live.rate(min(seconds, WARM_UP))
        rates: dict[str, list[float]] = {live.candidate.name: [] for live in lives}
        turn = 0
        try:
            for turn in range(repeats):
                for i, live in enumerate(order.sample(lives, len(lives))):
                    if progress:
                        progress(f"round {turn + 1} of {repeats}", turn * len(lives) + i, repeats * len(lives))
                    rates[live.candidate.name].append(live.rate(seconds))
                    live.rest()
        except KeyboardInterrupt:
            if not turn:
                raise
            whole = [_row(live, rates[live.candidate.name][:turn]) for live in lives]
            raise Interrupted(Report(env, num_envs, seconds, turn, verdict, about, whole, unit)) from None
        bound = _lock_step(lives, min(seconds, LOCK_STEP_SECONDS))
        if inspect_live:
            for live in lives:
                live.rate(min(seconds, WARM_UP))
            inspect_live(lives)
        rows = [_row(live, rates[live.candidate.name]) for live in lives]
    return Report(env, num_envs, seconds, repeats, verdict, about, rows, unit, bound)


def _row(live: Live, rates: list[float]) -> Row:
    who = live.candidate
    log = live.log.read_text(errors="replace")[-8000:] if live.failed and live.log.exists() else ""
    return Row(who.name, who.label, who.kind, rates, live.failed, live.missing, live.description, log)
