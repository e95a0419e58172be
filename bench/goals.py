"""Measures the performance goals of the engine, the first table in ``bench/RESULTS.md``.

``python -m bench goals PART`` measures the rows of one part and writes their figures to ``bench-results/goals-PART.json``,
and :mod:`bench.tables` writes the table from these files.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

from bench import micro, suites
from bench.engines import OTHER_ENGINES, SamplingOptions, candidates
from bench.workloads import WORKLOADS, installed_workloads
from vecenv.tools.benchmark import Report, Summary

VECENV = ("auto", "auto-view", "use-caller", "workers", "per-env")

# limits of _compare_best()
CLEAR_RATIO = 1.2  # with a higher ratio, the first comparison is sufficient
MIN_ROUNDS, MAX_ROUNDS = 15, 45
MIN_SAMPLE_SECONDS = 0.1
MIN_BATCHES_PER_SAMPLE = 10
MAX_SECONDS_PER_ROW = 6.0  # of all samples together, unless MIN_ROUNDS take longer

GOOD_RATIO = 0.95  # a case with a lower ratio counts as slower than the best other engine

Comparison = Callable[[SamplingOptions, "Iterable[str] | None"], Report]
"""A function that compares the rows with the given names, or all rows."""


@dataclass(frozen=True)
class Figure:
    """The measured cells of a row."""

    measured: str
    spread: str


@dataclass(frozen=True)
class Settings:
    """The settings of all parts."""

    workers: int
    sampling: SamplingOptions
    quick: bool = False

    @property
    def env_counts(self) -> tuple[int, ...]:
        return (2, 8) if self.quick else (2, 8, 64)

    @property
    def max_envs(self) -> int:
        return self.env_counts[-1]


@dataclass(frozen=True)
class Row:
    """A row of the table: its key, the part that measures it, and its description."""

    key: str
    part: str
    description: str


_ASYNC = "CartPole-v1, 64 envs, speed relative to Gymnasium's AsyncVectorEnv: best mode / W workers / one process per env"
_OTHERS = "speed relative to the best process engine of another library in the same run (SB3, Tianshou, TorchRL, PufferLib)"
_AUTO = '`num_workers="auto"`, speed relative to the best of SyncVectorEnv and all fixed numbers of workers'
_INFOS = "Ant-v5, 32 envs, 9 numeric info keys per step: extra time of a step over the same env without infos"
_COPIES = "observations (84, 84, 4) uint8, 64 envs: copies of their bytes per step, `copy=False` / `copy=True`"
_SLEEPS = "first-ready batches of envs that sleep, with log-normal step times (sigma 1): share of the ideal rate"
_ROUND_TRIP = "one env, one worker, empty step: duration relative to a bare ping-pong over a socket pair in the same run"
_STARTUP = "start of 64 envs in W workers, speed relative to Gymnasium's AsyncVectorEnv, both by forkserver"
ROWS = (
    Row("limit-best", "cartpole", "CartPole-v1, share of the bare loop, best mode: 2 / 8 / 64 envs"),
    Row("limit-workers", "cartpole", "CartPole-v1, share of the bare loop, only modes with isolated workers: 8 / 64 envs"),
    Row("async", "cartpole", _ASYNC),
    Row("others", "others", _OTHERS),
    Row("auto", "auto", _AUTO),
    Row("infos", "infos", _INFOS),
    Row("copies", "copies", _COPIES),
    Row("first-ready", "first-ready", _SLEEPS),
    Row("round-trip", "round-trip", _ROUND_TRIP),
    Row("startup", "startup", _STARTUP),
)


def _format_figure(summaries: list[Summary | None], form: str) -> Figure:
    """Format the medians, and the minimum and maximum of each."""
    medians = [format(s.median, form) if s else "-" for s in summaries]
    spreads = [f"{s.minimum:{form}} - {s.maximum:{form}}" if s else "-" for s in summaries]
    return Figure(" / ".join(medians), " / ".join(spreads))


def _rank_rows(report: Report, names: tuple[str, ...]) -> tuple[list[str], list[str]]:
    """Return the rows in ``names`` and all other rows, both by descending median. Rows without samples are omitted."""
    medians = {row.name: row.summary.median for row in report.rows if row.summary}
    ranked = sorted(medians, key=lambda name: medians[name], reverse=True)
    return [name for name in ranked if name in names], [name for name in ranked if name not in names]


def _fastest_row(report: Report, names: tuple[str, ...]) -> str:
    """Return the row in ``names`` with the highest median, or the first one if none has samples."""
    ranked, _ = _rank_rows(report, names)
    return ranked[0] if ranked else names[0]


def measure_cartpole(settings: Settings) -> tuple[dict[str, Figure], list[Report]]:
    names = _own_and_gymnasium_names()
    reports = [
        report
        for n in settings.env_counts
        for report in suites.compare_engines("CartPole-v1", n, settings.workers, settings.sampling, names)
    ]
    shares = [report.ratio(_fastest_row(report, VECENV), "bare-loop") for report in reports]
    isolated = [report.ratio(_fastest_row(report, ("workers", "per-env")), "bare-loop") for report in reports[1:]]
    last = reports[-1]
    speedups = [last.ratio(name, "gym-async") for name in (_fastest_row(last, VECENV), "workers", "per-env")]
    return {
        "limit-best": _format_figure(shares, ".2f"),
        "limit-workers": _format_figure(isolated, ".2f"),
        "async": _format_figure(speedups, ".1f"),
    }, reports


def _own_and_gymnasium_names() -> list[str]:
    rows = candidates(WORKLOADS["empty"].prepare(), 1, 1)
    return [row.name for row in rows if row.name not in (*OTHER_ENGINES, "auto-view")]


def measure_others(settings: Settings) -> tuple[dict[str, Figure], list[Report]]:
    names = [*VECENV, *OTHER_ENGINES]
    workloads = ("CartPole-v1", "empty") if settings.quick else installed_workloads()
    cases = [(workload, 8) for workload in workloads]
    if not settings.quick:  # with few workloads, because the 64 processes of each library start again for every sample
        cases += [(workload, 64) for workload in ("CartPole-v1", "Ant-v5", "ALE/Pong-v5")]
    reports = [_compare_best(partial(_compare_once, w, n, settings.workers), names, VECENV, settings) for w, n in cases]
    return {"others": _format_worst_case(reports, VECENV, "x")}, reports


def _compare_once(
    workload: str, num_envs: int, workers: int, sampling: SamplingOptions, names: Iterable[str] | None
) -> Report:
    """Compare engines that all fit on the machine at once, so that there is only one report."""
    (report,) = suites.compare_engines(workload, num_envs, workers, sampling, names)
    return report


def measure_auto(settings: Settings) -> tuple[dict[str, Figure], list[Report]]:
    workloads = ("CartPole-v1", "empty") if settings.quick else installed_workloads()
    env_counts = (8,) if settings.quick else (1, 8, 64)
    comparisons = [
        partial(suites.compare_worker_counts, workload, n, settings.workers) for workload in workloads for n in env_counts
    ]
    reports = [_compare_best(compare_rows, None, ("auto",), settings) for compare_rows in comparisons]
    return {"auto": _format_worst_case(reports, ("auto",), "")}, reports


def _compare_best(
    compare_rows: Comparison, names: Iterable[str] | None, own_names: tuple[str, ...], settings: Settings
) -> Report:
    """Compare the best row in ``own_names`` with the best of the other rows.

    A first comparison of all rows selects the best own row and the two best others. These three are compared again in many
    short rounds, and only these rounds count, unless the own row was clearly faster in the first comparison and the samples
    were long enough.
    """
    report = compare_rows(settings.sampling, names)
    own_rows, other_rows = _rank_rows(report, own_names)
    if not own_rows or not other_rows:
        return report
    selected = [own_rows[0], *other_rows[:2]]
    ratio = report.ratio(own_rows[0], other_rows[0])
    lowest_rate = min(row.summary.median for row in report.rows if row.name in selected and row.summary)
    seconds = max(MIN_SAMPLE_SECONDS, MIN_BATCHES_PER_SAMPLE * report.num_envs / lowest_rate)
    if ratio is None or ratio.median < CLEAR_RATIO or report.seconds < seconds:
        rounds = 2 if settings.quick else max(MIN_ROUNDS, min(MAX_ROUNDS, int(MAX_SECONDS_PER_ROW / seconds)))
        report = compare_rows({**settings.sampling, "seconds": seconds, "repeats": rounds}, selected)
    best = _best_ratio(report, own_names)
    if best:
        ratio, case = best
        print(f"{case}: {ratio.median:.2f} [{ratio.minimum:.2f} - {ratio.maximum:.2f}]", flush=True)
    return report


def _best_ratio(report: Report, own_names: tuple[str, ...]) -> tuple[Summary, str] | None:
    """Return the ratio of the best own row to the best other row, and a description of the case."""
    own_rows, other_rows = _rank_rows(report, own_names)
    if not own_rows or not other_rows:
        return None
    ratio, other = report.ratio(own_rows[0], other_rows[0]), report.row(other_rows[0])
    if ratio is None or other is None:
        return None
    return ratio, f"{report.env}, {report.num_envs} envs, against {other.label}"


def _format_worst_case(reports: list[Report], own_names: tuple[str, ...], unit: str) -> Figure:
    """Format the lowest of the ratios of all cases, with its case, and the number of cases with a good ratio."""
    ratios = [best for report in reports if (best := _best_ratio(report, own_names))]
    if not ratios:
        return Figure("no case could be measured", "-")
    lowest, case = min(ratios, key=lambda entry: entry[0].median)
    num_good = sum(ratio.median >= GOOD_RATIO for ratio, _ in ratios)
    return Figure(
        f"{lowest.median:.2f}{unit} in the worst of {len(ratios)} cases ({case})",
        f"{lowest.minimum:.2f} - {lowest.maximum:.2f}; {num_good} cases at {GOOD_RATIO} or more",
    )


def measure_infos(settings: Settings) -> tuple[dict[str, Figure], list[Report]]:
    report = micro.compare_infos(settings.sampling, num_envs=8 if settings.quick else 32, workers=settings.workers)
    ratio = report.ratio("workers-without", "workers")
    if ratio is None:
        return {}, [report]
    median, minimum, maximum = (100 * (value - 1) for value in (ratio.median, ratio.minimum, ratio.maximum))
    return {"infos": Figure(f"{median:.1f} %", f"{minimum:.1f} - {maximum:.1f} %")}, [report]


def measure_copies(settings: Settings) -> tuple[dict[str, Figure], list[Report]]:
    """Count copies, and measure their time too, because copying from another core's cache is slower than ``memcpy``."""
    report = micro.compare_copies(settings.sampling, num_envs=settings.max_envs)
    counts = " / ".join(f"{count:.2f}" for count in micro.count_copies(settings.max_envs).values())
    times = _format_figure(list(micro.copying_times(report).values()), ".1f")
    return {"copies": Figure(counts, f"counted; their time: {times.measured} memcpys ({times.spread})")}, [report]


def measure_first_ready(settings: Settings) -> tuple[dict[str, Figure], list[Report]]:
    report = suites.measure_first_ready(settings.sampling, settings.max_envs)
    row = report.row(_fastest_row(report, tuple(row.name for row in report.rows if row.name != "all")))
    if row is None or row.summary is None:
        return {}, [report]
    cell = _format_figure([row.summary], ".2f")
    return {"first-ready": Figure(f"{cell.measured} ({row.label})", cell.spread)}, [report]


def measure_round_trip(settings: Settings) -> tuple[dict[str, Figure], list[Report]]:
    report = micro.compare_round_trips(settings.sampling)
    ratio = report.ratio("pipe", "workers")  # of rates, so it is the inverse ratio of the durations
    return ({"round-trip": _format_figure([ratio], ".2f")} if ratio else {}), [report]


def measure_startup(settings: Settings) -> tuple[dict[str, Figure], list[Report]]:
    seconds = micro.measure_startup(1 if settings.quick else 5, settings.max_envs, settings.workers)
    speedup = Summary.from_ratios(seconds["gym-async"], seconds["workers"])
    summaries = {name: Summary.from_samples(samples) for name, samples in seconds.items()}
    durations = ", ".join(f"{name} {summary.format('.3g')} s" for name, summary in summaries.items() if summary)
    figure = _format_figure([speedup], ".1f")
    return {"startup": Figure(f"{figure.measured}x", f"{figure.spread}; {durations}")}, []


PARTS: dict[str, Callable[[Settings], tuple[dict[str, Figure], list[Report]]]] = {
    "cartpole": measure_cartpole,
    "others": measure_others,
    "auto": measure_auto,
    "infos": measure_infos,
    "copies": measure_copies,
    "first-ready": measure_first_ready,
    "round-trip": measure_round_trip,
    "startup": measure_startup,
}


def run(part: str, settings: Settings, out: Path) -> list[Report]:
    """Measure one part, write its figures to a file, and print them."""
    figures, reports = PARTS[part](settings)
    out.mkdir(parents=True, exist_ok=True)
    contents = {
        "quick": settings.quick,
        "figures": {key: asdict(figure) for key, figure in figures.items()},
        "reports": [report.to_dict() for report in reports],
    }
    (out / f"goals-{part}.json").write_text(json.dumps(contents, indent=1) + "\n")
    for key, figure in figures.items():
        print(f"{key}: {figure.measured}   [{figure.spread}]")
    return reports
