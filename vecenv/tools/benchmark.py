"""Measures vector environments side by side, in turns.

Throughput on a shared machine drifts by tens of percent within a minute, so figures taken one after another say little
about each other. Here all candidates are built first and stay alive. Each round then runs all of them for a moment, in a
new random order, and a ratio is only formed between two samples of one round. Each candidate lives in a process of its own,
its *host*, in the place of the training program: one that dies, hangs or binds itself to a core spoils no row but its own.

One unit of work is one ``env.step`` or ``env.reset``. The *bare loop* is the upper bound: the same environments and
actions, run by as many processes at once as there are usable cores, which share nothing.

Before anything is timed, all candidates of vecenv replay the trajectories of ``gymnasium.vector.SyncVectorEnv``: same
seeds, same actions, equal to the last bit.
"""

from __future__ import annotations

import itertools
import json
import math
import multiprocessing
import os
import pickle
import platform
import random
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

import cloudpickle
import gymnasium
import numpy as np

from vecenv.system.cores import usable_cores
from vecenv.system.helper_process import HelperProcess
from vecenv.tools.runners import (
    SEED,
    BareLockstep,
    BareLoops,
    BarePipes,
    EnvFn,
    FirstReadyVectorRunner,
    Runner,
    Step,
    VectorRunner,
    first_difference,
)

__all__ = [
    "BASELINES", "Candidate", "CandidateProcess", "HostFailed", "Interrupted", "Progress", "Report", "ResultRow", "Summary",
    "TrajectoryMismatch", "Unavailable", "bare_lockstep_candidate", "bare_loop_candidate", "bare_pipes_candidate",
    "compare", "default_candidates", "gymnasium_candidate", "machine", "scale_candidates", "started",
    "take_turns", "vecenv_candidate",
]  # fmt: skip

BASELINES: Final = ("gym-async", "bare-loop")
CROWD: Final = 16  # processes; with more of them, and more than cores, a candidate is alive only while it is measured
CHECK_STEPS: Final = 256
CHECK_SECONDS: Final = 1.5
START_TIMEOUT: Final = 300.0
WARM_UP: Final = 0.3  # seconds: caches, allocators, and the first reset

Progress = Callable[[str, int, int], object]  # what is being done, how much of it is done, of how much


class HostFailed(Exception):
    """A candidate died, hung or raised; the text is one line for its row of the table."""


class Unavailable(Exception):
    """A candidate that cannot exist here: a library or an option is missing. Not a failure."""


class TrajectoryMismatch(Exception):
    """An engine returned something else than ``SyncVectorEnv`` did for the same seeds and actions."""


class Interrupted(KeyboardInterrupt):
    """Ctrl-C in the middle of the rounds.

    Attributes:
        report: Of the rounds that were complete by then, at least one.
    """

    def __init__(self, report: Report) -> None:
        super().__init__()
        self.report = report


# --- candidates -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Candidate:
    """Something to measure.

    Attributes:
        name: Its short name, for options and JSON.
        label: What the table calls it.
        build: Pickled, called in the host; returns a runner.
        kind: ``"vecenv"``, ``"gymnasium"``, ``"other"`` or ``"bound"``: its colour in the plots.
        checked: Its trajectories must equal those of ``SyncVectorEnv``.
        alone: It measures something itself while it starts, and is started before all others for that.
        processes: How many its host starts, as far as that is known before.
    """

    name: str
    label: str
    build: Callable[[], Runner]
    kind: str = "other"
    checked: bool = False
    alone: bool = False
    processes: int = 0

    @property
    def crowd(self) -> bool:
        """Whether it lives only while it is measured, because it has many more processes than there are cores.

        On a virtual machine the mere existence of that many address spaces slows down what runs beside them.
        """
        return self.processes > max(CROWD, usable_cores())


def _build_vecenv(env_fn: EnvFn, num_envs: int, options: dict[str, Any]) -> Any:
    from vecenv.engine.vector_env import AsyncVectorEnv

    return AsyncVectorEnv([env_fn] * num_envs, **options)


def vecenv_candidate(
    name: str, label: str, env_fn: EnvFn, num_envs: int, runner: Callable[..., Runner] | None = None, **options: Any
) -> Candidate:
    """The engine with these options, driven by ``runner``; by default all at once, or first-ready with a ``batch_size``."""
    make_envs = partial(_build_vecenv, env_fn, num_envs, options)
    workers = options.get("num_workers")
    processes = num_envs if workers is None else 0 if workers == "auto" else workers
    if runner is None:
        runner = VectorRunner
        if "batch_size" in options:
            runner = partial(FirstReadyVectorRunner, batch_size=options["batch_size"])
    build = partial(runner, make_envs)
    return Candidate(name, label, build, "vecenv", checked=True, alone=workers == "auto", processes=processes)


def _build_gymnasium(kind: str, env_fn: EnvFn, num_envs: int) -> Any:
    return getattr(gymnasium.vector, kind)([env_fn] * num_envs)


def gymnasium_candidate(
    name: str, kind: str, env_fn: EnvFn, num_envs: int, runner: Callable[..., Runner] = VectorRunner
) -> Candidate:
    """One of Gymnasium's vector environments."""
    processes = num_envs if kind == "AsyncVectorEnv" else 0
    build = partial(runner, partial(_build_gymnasium, kind, env_fn, num_envs))
    return Candidate(name, f"Gymnasium {kind}", build, "gymnasium", processes=processes)


def _shares(num_envs: int, workers: int) -> list[range]:
    processes = min(workers, num_envs)
    bounds = [num_envs * i // processes for i in range(processes + 1)]
    return [range(a, b) for a, b in itertools.pairwise(bounds)]


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 'es' if what.endswith('s') else 's'}"


def bare_loop_candidate(env_fn: EnvFn, num_envs: int, workers: int) -> Candidate:
    """The bare loop in ``workers`` processes (no more than there are environments), each over its share."""
    shares = _shares(num_envs, workers)
    label = f"bare loop, {_count(len(shares), 'process')}"
    return Candidate("bare-loop", label, partial(BareLoops, env_fn, num_envs, shares), "bound", processes=len(shares))


def bare_pipes_candidate(env_fn: EnvFn, num_envs: int) -> Candidate:
    """What a process per environment costs at least."""
    build = partial(BarePipes, env_fn, num_envs)
    return Candidate("bare-pipes", "bare pipes, one process per env", build, "bound", processes=num_envs)


def bare_lockstep_candidate(env_fn: EnvFn, num_envs: int, workers: int) -> Candidate:
    """What lock-step costs at least, in ``workers`` processes (no more than there are environments)."""
    shares = _shares(num_envs, workers)
    label = f"bare lock-step, {_count(len(shares), 'process')}"
    build = partial(BareLockstep, env_fn, num_envs, shares)
    return Candidate("bare-lockstep", label, build, "bound", processes=len(shares) - 1)


def default_candidates(env_fn: EnvFn, num_envs: int, workers: int) -> list[Candidate]:
    """The rows of the main table, best known first."""
    workers = min(workers, num_envs)
    share, half = max(1, workers - 1), max(1, num_envs // 2)
    ours = partial(vecenv_candidate, env_fn=env_fn, num_envs=num_envs)
    return [
        ours("auto", "vecenv, auto", num_workers="auto"),
        ours("use-caller", f"vecenv, caller and {_count(share, 'worker')}", num_workers=share, use_caller=True),
        ours("workers", f"vecenv, {_count(workers, 'worker')}", num_workers=workers),
        ours("first-ready", f"vecenv, first {half} ready", num_workers=workers, batch_size=half),
        ours("per-env", "vecenv, one process per env"),
        gymnasium_candidate("gym-sync", "SyncVectorEnv", env_fn, num_envs),
        gymnasium_candidate("gym-async", "AsyncVectorEnv", env_fn, num_envs),
        bare_pipes_candidate(env_fn, num_envs),
        bare_lockstep_candidate(env_fn, num_envs, workers),
        bare_loop_candidate(env_fn, num_envs, workers),
    ]


def scale_candidates(env_fn: EnvFn, num_envs: int, worker_counts: Sequence[int]) -> list[Candidate]:
    """The main table without first-ready, and with a row for each number of workers instead of one."""
    rows = default_candidates(env_fn, num_envs, max(worker_counts))
    fixed = [
        vecenv_candidate(f"workers-{count}", f"vecenv, {_count(count, 'worker')}", env_fn, num_envs, num_workers=count)
        for count in worker_counts
        if count <= num_envs
    ]
    kept = [row for row in rows if row.name not in ("workers", "first-ready")]
    return [*kept[:2], *fixed, *kept[2:]]


# --- hosts ------------------------------------------------------------------------------------------


def _host_main(pipe: Any, blob: bytes, log: str, start_method: str) -> None:
    multiprocessing.set_start_method(start_method, force=True)  # a program's default, not that of a spawned process
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.close(output)
    runner = None
    try:
        runner = cloudpickle.loads(blob)()
        pipe.send(("ok", runner.describe() if hasattr(runner, "describe") else ""))
        while True:
            method, arguments = pipe.recv()
            if method == "close":
                break
            pipe.send(("ok", getattr(runner, method)(*arguments)))
    except EOFError:  # the parent is gone
        pass
    except (Unavailable, NotImplementedError) as error:
        pipe.send(("unavailable", str(error) or type(error).__name__))
    except BaseException as error:
        sys.excepthook(type(error), error, error.__traceback__)
        first = (str(error).strip().splitlines() or [""])[0]
        pipe.send(("failed", f"{type(error).__name__}: {first}".removesuffix(": ")))
    finally:
        pipe.close()
        if runner is not None:
            runner.close()


class CandidateProcess:
    """A candidate in a process of its own, which answers one question at a time and always with a timeout.

    It is a :class:`~vecenv.system.helper_process.HelperProcess`: it dies with this process, also while it builds an engine,
    and its end is the end of everything that it has started. What it prints goes to a file.

    Attributes:
        failed, missing: Once something went wrong, one of these says what.
        description: What its runner says of itself.
    """

    def __init__(self, candidate: Candidate, folder: Path) -> None:
        self.candidate = candidate
        self.log = folder / f"{candidate.name}.log"
        self.failed: str | None = None
        self.missing: str | None = None
        self.description = ""
        self._blob = cloudpickle.dumps(candidate.build)
        self._helper: HelperProcess | None = None
        self.start()

    @property
    def usable(self) -> bool:
        return self.failed is None and self.missing is None

    @property
    def running(self) -> bool:
        return self._helper is not None

    @property
    def pid(self) -> int:
        """Of the process, while it is there."""
        assert self._helper is not None
        assert self._helper.pid is not None
        return self._helper.pid

    def start(self) -> None:
        """Start the process; :meth:`ready` waits for its runner."""
        args = (self._blob, str(self.log), multiprocessing.get_start_method())
        helper = self._helper = HelperProcess(
            multiprocessing.get_context("spawn"), _host_main, args, name="vecenv-bench-host", daemon=False
        )
        try:
            helper.start()
        except BaseException:
            helper.end()
            raise

    def ready(self) -> None:
        """Wait until the runner is built."""
        self.description = self._answer(START_TIMEOUT) or ""

    def ask(self, method: str, *arguments: Any, timeout: float = 60.0) -> Any:
        """Call a method of the runner; ``None`` if that failed."""
        assert self._helper is not None
        with suppress(ConnectionError):
            self._helper.pipe.send((method, arguments))
        return self._answer(timeout)

    def _answer(self, timeout: float) -> Any:
        helper = self._helper
        assert helper is not None
        status, value = "failed", f"gave no answer within {timeout:.0f} s"
        if helper.wait(time.monotonic() + timeout):
            try:
                message = helper.receive()
            except EOFError:
                message = b""
            # without one it has ended, though something that it started may hold its pipe
            status, value = pickle.loads(message) if message else ("failed", _how_it_ended(helper))
        if status == "ok":
            return value
        if status == "failed":
            self.failed = value
        else:
            self.missing = value
        self.close()
        return None

    def _wake(self) -> bool:
        """Start a crowd that rests, and wait for it; false if there was nothing to be started."""
        if not self.usable or self.running:
            return False
        self.start()
        self.ready()
        return True

    def rest(self) -> None:
        """End a crowd until it is needed again."""
        if self.candidate.crowd:
            self.close()

    def trajectory(self, steps: int, seconds: float = math.inf) -> list[Step]:
        """What it returned for its seeds; empty if it failed."""
        self._wake()
        found = self.ask("trajectory", steps, seconds, timeout=START_TIMEOUT) if self.usable else None
        self.rest()
        return found or []

    def rate(self, seconds: float) -> float:
        """Units per second over one sample; NaN if it failed."""
        if self._wake() and self.usable:
            self.ask("run", min(seconds, WARM_UP))
        rate = self.ask("run", seconds, timeout=60 + 10 * seconds) if self.usable else None
        return math.nan if rate is None else float(rate)

    def close(self, timeout: float = 10.0) -> None:
        """Wait so long for it to close its runner, then end it with everything that it has started. Idempotent."""
        if self._helper is not None:
            try:
                if timeout:
                    with suppress(ConnectionError):
                        self._helper.pipe.send(("close", ()))
                    self._helper.has_ended(timeout)
            finally:
                self._helper.end()
                self._helper = None


def _how_it_ended(helper: HelperProcess) -> str:
    if not helper.has_ended(1.0):
        return "it closed its pipe"
    code = helper.exit_code()
    if code is not None and code < 0:
        return f"its process was killed by {signal.Signals(-code).name}"
    return f"its process ended with exit code {code}"


def _start_order(candidates: Sequence[Candidate]) -> list[list[Candidate]]:
    """What starts at the same time: candidates that measure something themselves, the others, and then each crowd."""
    others = [c for c in candidates if not c.crowd]
    return [[c for c in others if c.alone], [c for c in others if not c.alone], *([c] for c in candidates if c.crowd)]


@contextmanager
def started(candidates: Sequence[Candidate], progress: Progress = lambda *_: None) -> Iterator[list[CandidateProcess]]:
    """All candidates alive at once, except crowds, which were started once and rest; nothing is left afterwards.

    After an exception, Ctrl-C among them, hosts are ended at once and not asked.
    """
    with tempfile.TemporaryDirectory(prefix="vecenv-bench-") as folder:
        hosts: list[CandidateProcess] = []
        try:
            for group in _start_order(candidates):
                first = len(hosts)
                for candidate in group:
                    hosts.append(CandidateProcess(candidate, Path(folder)))  # noqa: PERF401 - one may fail, all must end
                for number, host in enumerate(hosts[first:], first + 1):
                    progress(f"starting {host.candidate.label} ({number} of {len(candidates)})", 0, 0)
                    host.ready()
                    host.rest()
            order = [candidate.name for candidate in candidates]
            yield sorted(hosts, key=lambda host: order.index(host.candidate.name))
            for host in hosts:
                host.close()
        finally:
            for host in hosts:
                host.close(timeout=0.0)


# --- the comparison ---------------------------------------------------------------------------------


def machine() -> dict[str, Any]:
    """What a reader needs to judge a figure: processor, cores, versions, and how busy the machine was."""
    model = platform.processor() or platform.machine()
    with suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        model = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), model)
    return {
        "cpu": model,
        "usable_cores": usable_cores(),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "gymnasium": gymnasium.__version__,
        "numpy": np.__version__,
        "load_average": list(os.getloadavg()) if hasattr(os, "getloadavg") else None,
    }


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

    @classmethod
    def of_ratios(cls, ours: Iterable[float], theirs: Iterable[float]) -> Summary | None:
        """Of the ratios of two candidates' samples, round by round."""
        return cls.of(a / b for a, b in zip(ours, theirs, strict=True) if b)

    def show(self, form: str = ".2f") -> str:
        """Median, and in brackets the least and the greatest."""
        return f"{self.median:{form}} ({self.minimum:{form}} - {self.maximum:{form}})"


def take_turns(runs: Mapping[str, Callable[[], float]], rounds: int) -> dict[str, list[float]]:
    """What each run returns in each round, for candidates in this process.

    Every other round goes the other way, so that what drifts within a round favours none.
    """
    found: dict[str, list[float]] = {name: [] for name in runs}
    for turn in range(rounds):
        for name in list(runs)[:: -1 if turn % 2 else 1]:
            found[name].append(runs[name]())
    return found


@dataclass
class ResultRow:
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


@dataclass
class Report:
    """The outcome of one comparison."""

    env: str
    num_envs: int
    seconds: float
    repeats: int
    check: str
    machine: dict[str, Any]
    rows: list[ResultRow]
    unit: str = "steps/s"

    def row(self, name: str) -> ResultRow | None:
        return next((row for row in self.rows if row.name == name), None)

    def ratio(self, name: str, baseline: str) -> Summary | None:
        """How many times faster one row is than another, round by round."""
        row, other = self.row(name), self.row(baseline)
        return Summary.of_ratios(row.rates, other.rates) if row and other else None

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


def _reference(env_fn: EnvFn, num_envs: int, steps: int, seconds: float) -> list[Step]:
    """What ``SyncVectorEnv`` returns, in a process of its own."""
    with started([gymnasium_candidate("reference", "SyncVectorEnv", env_fn, num_envs)]) as (sync,):
        found = sync.trajectory(steps, seconds)
        if not found:
            raise HostFailed(f"the environment fails in Gymnasium's SyncVectorEnv too: {sync.failed}")
        return found


def _check(hosts: list[CandidateProcess], wanted: list[Step], env_fn: EnvFn, num_envs: int, progress: Progress) -> str:
    """Compare every checked candidate with ``SyncVectorEnv``; returns what was established, or raises."""
    suspects = [host for host in hosts if host.candidate.checked]
    steps = len(wanted) - 1
    for number, host in enumerate(suspects, 1):
        progress(f"checking {host.candidate.label} ({number} of {len(suspects)})", 0, 0)
        difference = first_difference(wanted, host.trajectory(steps))
        if difference is None:
            continue
        if first_difference(wanted, _reference(env_fn, num_envs, steps, math.inf)) is not None:
            return "not comparable: SyncVectorEnv itself gives other trajectories each time it runs"
        raise TrajectoryMismatch(f"{host.candidate.label} differs from SyncVectorEnv {difference}")
    good = sum(host.usable for host in suspects)
    equal = "1 engine equals" if good == 1 else f"{good} engines equal"
    return f"{equal} SyncVectorEnv over {steps} steps of {num_envs} environments, bit for bit"


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
    progress: Progress = lambda *_: None,
    inspect: Callable[[list[CandidateProcess]], None] | None = None,
) -> Report:
    """Check, warm up, then measure all candidates in ``repeats`` interleaved rounds of ``seconds`` each.

    Args:
        env: What to call the environment.
        env_fn: Makes one.
        num_envs: How many of them.
        candidates: What is measured.
        seconds: Length of one sample.
        repeats: Rounds; a round has one sample of every candidate.
        check: Compare the trajectories of the candidates that say so with ``SyncVectorEnv`` first.
        unit: What the rates are, for tables and pictures.
        progress: Called with what is being done, and how much of how much is done; of 0 before the rounds begin.
        inspect: Called after the last round, while everything still runs (memory is measured there).

    Raises:
        TrajectoryMismatch: An engine is wrong; nothing was timed.
        HostFailed: The environment does not even work in ``SyncVectorEnv``.
        Interrupted: A ``KeyboardInterrupt`` after the first round.
    """
    about = machine()
    wanted, checked = None, "nothing to check" if check else "not asked for"
    if check and any(candidate.checked for candidate in candidates):
        progress("checking the environment in SyncVectorEnv", 0, 0)
        wanted = _reference(env_fn, num_envs, CHECK_STEPS, CHECK_SECONDS)  # before the work of starting the others
    with started(candidates, progress) as hosts:
        if wanted is not None:
            checked = _check(hosts, wanted, env_fn, num_envs, progress)
        rates = {host.candidate.name: list[float]() for host in hosts}

        def report(turns: int) -> Report:
            rows = [_row(host, rates[host.candidate.name][:turns]) for host in hosts]
            return Report(env, num_envs, seconds, turns, checked, about, rows, unit)

        try:
            _run_rounds(hosts, rates, seconds, repeats, progress)
        except KeyboardInterrupt:
            if complete := min(map(len, rates.values())):
                raise Interrupted(report(complete)) from None
            raise
        if inspect:
            for host in hosts:
                host.rate(min(seconds, WARM_UP))
            inspect(hosts)
        return report(repeats)


def _run_rounds(
    hosts: list[CandidateProcess], rates: dict[str, list[float]], seconds: float, repeats: int, progress: Progress
) -> None:
    order = random.Random(SEED)
    for host in hosts:
        if not host.candidate.crowd:
            host.rate(min(seconds, WARM_UP))
    for turn in range(repeats):
        for i, host in enumerate(order.sample(hosts, len(hosts))):
            progress(f"round {turn + 1} of {repeats}", turn * len(hosts) + i, repeats * len(hosts))
            rates[host.candidate.name].append(host.rate(seconds))
            host.rest()


def _row(host: CandidateProcess, rates: list[float]) -> ResultRow:
    about = host.candidate
    log = host.log.read_text(errors="replace")[-8000:] if host.failed and host.log.exists() else ""
    return ResultRow(about.name, about.label, about.kind, rates, host.failed, host.missing, host.description, log)
