"""Measures vector environments in interleaved rounds.

Throughput on a shared machine drifts by tens of percent within a minute, so figures measured one after another cannot
be compared. Here all candidates are built first and stay alive (those with many processes only while they are measured).
Each round then runs each of them for a moment, in a new random order, and ratios are only formed between samples of the same
round. Each candidate has a process of its own, its *host*, in place of a training program: a candidate that dies, hangs or
binds itself to a core spoils only its own row.

One unit of work is one ``env.step`` or ``env.reset``. The *bare loop* is the upper bound: the same environments and
actions, in independent processes.

Unless ``check=False``, the trajectories of vecenv's candidates are compared first, bit for bit, with those of
``gymnasium.vector.SyncVectorEnv`` for the same seeds and actions.
"""

from __future__ import annotations

import itertools
import math
import multiprocessing
import os
import pickle
import platform
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import cloudpickle
import gymnasium
import numpy as np

from vecenv.system.cores import usable_cores
from vecenv.system.helper_process import HelperProcess
from vecenv.system.supervision import describe_exit
from vecenv.tools import WRONG, CliError, Progress, one_line
from vecenv.tools.runners import SEED, Candidate, EnvFn, Step, Unavailable, first_difference, gymnasium_candidate
from vecenv.worker.row_writer import is_compiled

if TYPE_CHECKING:
    from rich.table import Table

BASELINES: Final = {"gym-async": ("x Async", ".2f"), "bare-loop": ("of bare loop", ".3f")}
"""Baseline -> the heading of its column in tables, and the format of a ratio."""
CHECK_STEPS: Final = 256
CHECK_SECONDS: Final = 1.5
START_TIMEOUT_SECONDS: Final = 300.0
WARM_UP_SECONDS: Final = 0.3  # for caches, allocators and the first reset


# --- hosts ------------------------------------------------------------------------------------------


def _host_main(pipe: Any, blob: bytes, log: str, start_method: str) -> None:
    multiprocessing.set_start_method(start_method, force=True)  # as in the calling program; here it would be "spawn"
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
        pipe.send(("failed", one_line(error).removesuffix(": ")))
    finally:
        pipe.close()
        if runner is not None:
            runner.close()


class CandidateProcess:
    """A host: a process that runs one candidate and serves one request at a time, each with a timeout.

    The :class:`~vecenv.system.helper_process.HelperProcess` and everything that it started end when the calling process
    ends, even while an engine is being built. Its output goes to a file.

    Attributes:
        failed: The reason why the process failed; ``None`` if it did not.
        missing: The reason why the candidate cannot run here; ``None`` if it can.
        description: The runner's description of itself.
    """

    def __init__(self, candidate: Candidate, folder: Path) -> None:
        self.candidate = candidate
        self.log = folder / f"{candidate.name}.log"
        self.failed: str | None = None
        self.missing: str | None = None
        self.description = ""
        self._helper: HelperProcess | None = None

    @property
    def usable(self) -> bool:
        return self.failed is None and self.missing is None

    @property
    def running(self) -> bool:
        return self._helper is not None

    @property
    def pid(self) -> int:
        """The process id, while the process exists."""
        assert self._helper is not None
        assert self._helper.pid is not None
        return self._helper.pid

    def start(self) -> None:
        """Start the process; :meth:`wait_until_ready` waits for its runner."""
        args = (cloudpickle.dumps(self.candidate.build), str(self.log), multiprocessing.get_start_method())
        self._helper = HelperProcess(
            multiprocessing.get_context("spawn"), _host_main, args, name="vecenv-bench-host", daemon=False
        )
        self._helper.start()

    def wait_until_ready(self) -> None:
        """Wait until the runner is built."""
        self.description = self._wait_for_reply(START_TIMEOUT_SECONDS) or ""

    def call(self, method: str, *arguments: Any, timeout: float = 60.0) -> Any:
        """Call a method of the runner, and return its result. If the process was ended, start it again first.

        Return ``None`` if the candidate fails, has failed or cannot run here.
        """
        if self.usable and not self.running:
            self.start()
            self.wait_until_ready()
        if self._helper is None:
            return None
        with suppress(ConnectionError):
            self._helper.pipe.send((method, arguments))
        return self._wait_for_reply(timeout)

    def _wait_for_reply(self, timeout: float) -> Any:
        helper = self._helper
        assert helper is not None
        status, value = "failed", f"no reply within {timeout:.0f} s"
        if has_replied := helper.wait(time.monotonic() + timeout):
            message = helper.receive()
            # no message: the host has ended (a process that it started may still hold the pipe), or has closed its pipe
            status, value = pickle.loads(message) if message else ("failed", _describe_end(helper))
        if status == "ok":
            return value
        if status == "failed":
            self.failed = value
        else:
            self.missing = value
        self.close(timeout=10.0 if has_replied else 0.0)
        return None

    def suspend(self) -> None:
        """End the process if :attr:`Candidate.has_many_processes` is true; the next call starts it again."""
        if self.candidate.has_many_processes:
            self.close()

    def kill(self) -> None:
        """Kill the process and clear its failure; the next call starts a new one."""
        self.close(timeout=0.0)
        self.failed = None

    def trajectory(self, steps: int, seconds: float = math.inf) -> list[Step]:
        """Return the trajectory for the fixed seeds and actions; empty if the candidate failed or cannot run here."""
        trajectory = self.call("trajectory", steps, seconds, timeout=START_TIMEOUT_SECONDS)
        self.suspend()
        return trajectory or []

    def rate(self, seconds: float) -> float:
        """Measure one sample, in units per second; NaN if the candidate failed or cannot run here."""
        if not self.running:
            self.call("run", min(seconds, WARM_UP_SECONDS))
        rate = self.call("run", seconds, timeout=60 + 10 * seconds)
        return math.nan if rate is None else float(rate)

    def close(self, timeout: float = 10.0) -> None:
        """Give the runner ``timeout`` seconds to close, then end the process and everything that it started."""
        if self._helper is not None:
            try:
                if timeout:
                    with suppress(ConnectionError):
                        self._helper.pipe.send(("close", ()))
                    self._helper.has_ended(timeout)
            finally:
                self._helper.end()
                self._helper = None


def _describe_end(helper: HelperProcess) -> str:
    return f"process {describe_exit(helper.reap())}" if helper.has_ended(1.0) else "it closed its pipe"


def _start_order(candidates: Sequence[Candidate]) -> list[list[Candidate]]:
    """Return groups to start in turn: those that start first, the others, then each with many processes on its own."""
    others = [c for c in candidates if not c.has_many_processes]
    first, rest = [c for c in others if c.starts_first], [c for c in others if not c.starts_first]
    return [first, rest, *([c] for c in candidates if c.has_many_processes)]


@contextmanager
def started(candidates: Sequence[Candidate], progress: Progress = lambda *_: None) -> Iterator[list[CandidateProcess]]:
    """Start all candidates, yield their processes, and end them after the block.

    Candidates with many processes are suspended after their start. After an exception, Ctrl-C included, all processes are
    killed without closing their runners.
    """
    with tempfile.TemporaryDirectory(prefix="vecenv-bench-") as folder:
        hosts = {candidate.name: CandidateProcess(candidate, Path(folder)) for candidate in candidates}
        number = itertools.count(1)
        try:
            for group in _start_order(candidates):
                for candidate in group:
                    hosts[candidate.name].start()
                for candidate in group:
                    progress(f"starting {candidate.label} ({next(number)} of {len(candidates)})", 0, 0)
                    hosts[candidate.name].wait_until_ready()
                    hosts[candidate.name].suspend()
            yield list(hosts.values())
            for host in hosts.values():
                host.close()
        finally:
            for host in hosts.values():
                host.close(timeout=0.0)


# --- the comparison ---------------------------------------------------------------------------------


def describe_machine() -> dict[str, Any]:
    """Describe this machine: processor, cores, versions and load."""
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
        "row_writer": "compiled" if is_compiled() else "in Python",
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
    def from_samples(cls, samples: Iterable[float]) -> Summary | None:
        """Summarize the finite samples; ``None`` if there are none."""
        finite = [sample for sample in samples if math.isfinite(sample)]
        if not finite:
            return None
        lower, upper = (float(q) for q in np.percentile(finite, [25, 75]))
        return cls(statistics.median(finite), lower, upper, min(finite), max(finite), len(finite))

    @classmethod
    def from_ratios(cls, ours: Iterable[float], theirs: Iterable[float]) -> Summary | None:
        """Summarize the ratios of two candidates' samples, round by round."""
        return cls.from_samples(a / b for a, b in zip(ours, theirs, strict=True) if b)

    def format(self, spec: str = ".2f") -> str:
        """Format the median, with the minimum and maximum in parentheses."""
        return f"{self.median:{spec}} ({self.minimum:{spec}} - {self.maximum:{spec}})"


@dataclass
class ResultRow:
    """One candidate's samples, one per round (NaN where there is none), and the reason why some are missing."""

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
        return Summary.from_samples(self.rates)


@dataclass
class Report:
    """The result of one comparison."""

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
        """Return the speed-up of one row over another, round by round."""
        row, other = self.row(name), self.row(baseline)
        return Summary.from_ratios(row.rates, other.rates) if row and other else None

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON: every sample, the summaries, and the ratios to the baselines."""
        rows = []
        for row in self.rows:
            entry = {key: value for key, value in asdict(row).items() if value not in (None, "")}
            entry["rates"] = [rate if math.isfinite(rate) else None for rate in row.rates]
            entry["steps_per_second"] = asdict(row.summary) if row.summary else None
            ratios = {name: self.ratio(row.name, name) for name in BASELINES if self.row(name)}
            entry["ratios"] = {name: asdict(value) for name, value in ratios.items() if value}
            rows.append(entry)
        return {**asdict(self), "rows": rows}


def _run_reference(env: str, env_fn: EnvFn, num_envs: int, steps: int, seconds: float) -> list[Step]:
    """Run ``SyncVectorEnv`` in a separate process, and return its trajectory."""
    with started([gymnasium_candidate("reference", "SyncVectorEnv", env_fn, num_envs)]) as (sync,):
        trajectory = sync.trajectory(steps, seconds)
    if not trajectory:
        raise CliError(f"{env}: the environment fails in Gymnasium's SyncVectorEnv: {sync.failed}")
    return trajectory


def _check_trajectories(
    hosts: list[CandidateProcess], expected: list[Step], rerun: Callable[[int, float], list[Step]], progress: Progress
) -> str:
    """Compare every checked candidate with ``SyncVectorEnv``, and describe the result.

    Raise if one differs, unless ``SyncVectorEnv`` also differs from itself in a second run.
    """
    checked_hosts = [host for host in hosts if host.candidate.checked]
    steps, num_envs = len(expected) - 1, len(expected[0]["reward"])
    for number, host in enumerate(checked_hosts, 1):
        progress(f"checking {host.candidate.label} ({number} of {len(checked_hosts)})", 0, 0)
        difference = first_difference(expected, host.trajectory(steps))
        if difference is None:
            continue
        if first_difference(expected, rerun(steps, math.inf)) is not None:
            return "not comparable: SyncVectorEnv itself returns different trajectories from run to run"
        text = f"WRONG RESULTS, nothing was timed: {host.candidate.label} differs from SyncVectorEnv {difference}"
        raise CliError(text, WRONG)
    num_equal = sum(host.usable for host in checked_hosts)
    equal = "1 engine equals" if num_equal == 1 else f"{num_equal} engines equal"
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
    """Check, warm up, then measure all candidates in interleaved rounds.

    Args:
        env: Name of the environment.
        env_fn: Function that builds an environment.
        num_envs: Number of environments.
        candidates: Engines and bounds to measure.
        seconds: Length of one sample, in seconds.
        repeats: Rounds; a round has one sample of every candidate.
        check: True to compare the trajectories of ``checked`` candidates with ``SyncVectorEnv`` first.
        unit: Unit of the rates, for tables and plots.
        progress: Called with the current stage, the number of samples done, and their total (both 0 before the rounds).
        inspect: Called after the last round, while all candidates that can run are alive (to measure memory).

    Raises:
        CliError: An engine returns wrong results, or the environment fails in ``SyncVectorEnv``; nothing was timed.
    """
    machine, run_reference = describe_machine(), partial(_run_reference, env, env_fn, num_envs)
    expected, check_result = None, "nothing to check" if check else "not requested"
    if check and any(candidate.checked for candidate in candidates):
        progress("checking the environment in SyncVectorEnv", 0, 0)
        expected = run_reference(CHECK_STEPS, CHECK_SECONDS)
    with started(candidates, progress) as hosts:
        if expected is not None:
            check_result = _check_trajectories(hosts, expected, run_reference, progress)
        rates = _measure_rates(hosts, num_envs, seconds, repeats, progress)
        if inspect:
            for host in hosts:
                host.rate(min(seconds, WARM_UP_SECONDS))
            inspect(hosts)
        rows = [_make_result_row(host, rates[host.candidate.name]) for host in hosts]
    return Report(env, num_envs, seconds, repeats, check_result, machine, rows, unit)


def _measure_rates(
    hosts: list[CandidateProcess], num_envs: int, seconds: float, repeats: int, progress: Progress
) -> dict[str, list[float]]:
    rates: dict[str, list[float]] = {host.candidate.name: [] for host in hosts}
    rng = random.Random(SEED)
    for host in hosts:
        if not host.candidate.has_many_processes:
            host.rate(min(seconds, WARM_UP_SECONDS))
    for round_number in range(repeats):
        for i, host in enumerate(rng.sample(hosts, len(hosts))):
            stage = f"{num_envs} environments, round {round_number + 1} of {repeats}"
            progress(stage, round_number * len(hosts) + i, repeats * len(hosts))
            rates[host.candidate.name].append(host.rate(seconds))
            host.suspend()
    return rates


def _make_result_row(host: CandidateProcess, rates: list[float]) -> ResultRow:
    candidate = host.candidate
    log = host.log.read_text(errors="replace")[-8000:] if host.failed and host.log.exists() else ""
    return ResultRow(
        candidate.name, candidate.label, candidate.kind, rates, host.failed, host.missing, host.description, log
    )


# --- tables and plots ------------------------------------------------------------------------------

COLOURS: Final = {"vecenv": "#1b7f5c", "gymnasium": "#c8553d", "other": "#7a7f87", "bound": "#33373d"}


def format_rate(rate: float) -> str:
    """Format a rate with three significant digits, in thousands (k) or millions (M) if it is large."""
    if rate < 999.5:
        return f"{rate:.3g}"
    number, unit = (rate / 1e3, "k") if rate < 999_500 else (rate / 1e6, "M")
    return f"{number:.{0 if number >= 99.95 else 1 if number >= 9.995 else 2}f}{unit}"


def _table(*headings: str) -> Table:
    from rich.table import Table

    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
    table.add_column("engine")
    for heading in headings:
        table.add_column(heading, justify="right", no_wrap=True)
    return table


def _print_table(table: Table) -> None:
    from rich.console import Console

    Console(highlight=False, markup=False).print(table)


def _style(row: ResultRow) -> str | None:
    return "bold" if row.kind == "vecenv" else None


def print_report(report: Report) -> None:
    """Print the table of one comparison, and below it the reasons for rows without figures."""
    machine, baselines = report.machine, [name for name in BASELINES if report.row(name)]
    table = _table(report.unit, "min - max", *(BASELINES[name][0] for name in baselines))
    for row in report.rows:
        summary = row.summary
        if summary is None or row.failed:
            table.add_row(row.label, "failed" if row.failed else "left out")
            continue
        ratios = [(BASELINES[name][1], report.ratio(row.name, name)) for name in baselines]
        table.add_row(
            row.label,
            f"{summary.median:,.0f}" if summary.median >= 100 else f"{summary.median:.3g}",
            f"{format_rate(summary.minimum)} - {format_rate(summary.maximum)}",
            *(f"{ratio.median:{form}}" if ratio else "-" for form, ratio in ratios),
            style=_style(row),
        )
    print(f"Trajectories: {report.check}.")
    rounds = f"{report.repeats} interleaved rounds, samples of {report.seconds:g} s"
    print(f"{report.env}, {report.num_envs} environments: {rounds}")
    _print_table(table)
    versions = f"Python {machine['python']}, Gymnasium {machine['gymnasium']}, row writer {machine['row_writer']}"
    print(f"{machine['cpu']}, {machine['usable_cores']} usable cores; {versions}")
    if "bare-loop" in baselines:
        print("The bare loop is the upper bound: independent processes that only step environments.")
    auto = report.row("auto")
    if auto and auto.description:
        print(f"auto chose {auto.description}")
    _print_reasons(report.rows)


def _print_reasons(rows: Sequence[ResultRow], where: str = "") -> None:
    for row in rows:
        if row.failed:
            print(f"{row.label}{where} failed: {row.failed}")
        elif row.missing:
            print(f"{row.label}{where} left out: {row.missing}")


def print_scale(reports: Sequence[Report]) -> None:
    """Print the median rates by number of environments."""
    table = _table(*(str(report.num_envs) for report in reports))
    for last in reports[-1].rows:  # the last report has every candidate
        summaries = [row.summary if (row := report.row(last.name)) else None for report in reports]
        rates = (format_rate(summary.median) if summary else "-" for summary in summaries)
        table.add_row(last.label, *rates, style=_style(last))
    print(f"{reports[0].env}: steps per second by number of environments (median)")
    _print_table(table)
    for report in reports:
        _print_reasons(report.rows, f", {report.num_envs} environments,")


def new_figure(width: float, height: float) -> Any:
    """Create a figure that needs no display."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def save(figure: Any, path: Path) -> None:
    """Save a figure, without the top and right borders of its axes."""
    for axes in figure.axes:
        axes.spines[["top", "right"]].set_visible(False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)


def draw_bars(report: Report, path: Path) -> None:
    """Draw each candidate as a bar (median) with a whisker (minimum to maximum) and dots (samples); mark failed ones."""
    rows = [row for row in report.rows if row.summary or row.failed][::-1]
    figure = new_figure(8.0, 1.4 + 0.42 * len(rows))
    axes = figure.subplots()
    for y, row in enumerate(rows):
        summary = row.summary
        if summary is None or row.failed:
            axes.annotate(" failed", (0.0, y), va="center", fontsize=8, color=COLOURS["gymnasium"])
            continue
        spread = [[summary.median - summary.minimum], [summary.maximum - summary.median]]
        axes.barh(y, summary.median, xerr=spread, color=COLOURS[row.kind], height=0.7, capsize=3, ecolor="#00000088")
        axes.plot(row.rates, [y] * len(row.rates), ".", color="#000000", alpha=0.35, markersize=4)
        axes.annotate(f" {format_rate(summary.median)}", (summary.maximum, y), va="center", fontsize=8)
    axes.set_yticks(range(len(rows)), [row.label for row in rows], fontsize=9)
    axes.margins(x=0.15)
    axes.set_xlim(left=0)
    axes.locator_params(axis="x", nbins=6)
    axes.xaxis.set_major_formatter(lambda rate, _: format_rate(rate))
    axes.set_xlabel(f"{report.unit} (bar: median, whisker: minimum to maximum, dots: samples)", fontsize=8)
    axes.set_title(f"{report.env}, {report.num_envs} environments, {report.machine['usable_cores']} cores", fontsize=10)
    save(figure, path)


def draw_scale(reports: Sequence[Report], path: Path) -> None:
    """Plot throughput against the number of environments: a line per candidate, with its spread as a band."""
    figure = new_figure(8.0, 5.0)
    axes = figure.subplots()
    sizes = [report.num_envs for report in reports]
    for name, row in {row.name: row for report in reports for row in report.rows}.items():
        summaries = [other.summary if (other := report.row(name)) else None for report in reports]
        medians, minima, maxima = (
            [getattr(summary, statistic) if summary else math.nan for summary in summaries]
            for statistic in ("median", "minimum", "maximum")
        )
        linestyle = {"bound": "--", "gymnasium": ":"}.get(row.kind)
        style = {"label": row.label, "color": COLOURS[row.kind] if linestyle else None, "linestyle": linestyle}
        (line,) = axes.plot(sizes, medians, marker="o", markersize=4, **style)
        axes.fill_between(sizes, minima, maxima, color=line.get_color(), alpha=0.12, linewidth=0)
    axes.set_xlim(sizes[0] / 1.1, sizes[-1] * 1.1)
    axes.set_xscale("log", base=2)
    axes.set_xticks(sizes, [str(size) for size in sizes])
    axes.set_ylim(bottom=0)
    axes.yaxis.set_major_formatter(lambda rate, _: format_rate(rate))
    axes.set_xlabel("environments")
    axes.set_ylabel("steps per second (median; band: minimum to maximum)")
    axes.set_title(f"{reports[0].env}, {reports[0].machine['usable_cores']} cores", fontsize=10)
    axes.legend(fontsize=8, frameon=False)
    save(figure, path)
