"""Measurements of the goals, the first table in ``bench/RESULTS.md``.

``python -m bench goals PART`` measures the rows of one part and writes their figures to ``bench-results/goals-PART.json``,
from which :mod:`bench.tables` writes the table.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

from bench import micro, suites
from bench.engines import OTHERS, Pace, candidates
from bench.workloads import WORKLOADS, installed_workloads
from vecenv.tools.benchmark import Report, Summary

VECENV = ("auto", "auto-view", "use-caller", "workers", "per-env")

# limits of _compare_best()
CLEAR_RATIO = 1.2  # with a higher ratio, the first comparison is sufficient
MAX_ROUNDS, MIN_ROUNDS = 45, 15
SAMPLE_SECONDS = 0.1  # at least, and at least the time of this number of batches:
BATCHES_PER_SAMPLE = 10
SECONDS_PER_ROW = 6.0  # the limit of all samples, unless MIN_ROUNDS take longer
GOOD_RATIO = 0.95

Comparison = Callable[[Pace, "Iterable[str] | None"], Report]


@dataclass(frozen=True)
class Figure:
    """The two cells of a row that are measured."""

    measured: str
    spread: str


@dataclass(frozen=True)
class Settings:
    """The settings of a measurement, from which each part derives its sizes."""

    workers: int
    pace: Pace
    quick: bool = False

    @property
    def sizes(self) -> tuple[int, ...]:
        return (2, 8) if self.quick else (2, 8, 64)

    @property
    def large(self) -> int:
        return self.sizes[-1]


@dataclass(frozen=True)
class Row:
    """A row of the table: its key, the part that measures it, and its description."""

    key: str
    part: str
    what: str


_ASYNC = "against Gymnasium's AsyncVectorEnv, CartPole-v1, 64 envs: best mode / W workers / one process per env"
_OTHERS = "against the best other process engine in the same run (SB3, Tianshou, TorchRL, PufferLib)"
_INFOS = "Ant-v5, 32 envs (9 numeric info keys per step), engine cost over the same env without infos"
_COPIES = "observations (84, 84, 4) uint8, 64 envs: bytes copied per step, `copy=False` / `copy=True`"
_SLEEPS = "first-ready batches, sleeping envs with log-normal step times (sigma 1): of the ideal, mean-bound rate"
ROWS = (
    Row("limit-best", "cartpole", "CartPole-v1, of the bare loop, best mode: 2 / 8 / 64 envs"),
    Row("limit-workers", "cartpole", "CartPole-v1, of the bare loop, isolated workers only: 8 / 64 envs"),
    Row("async", "cartpole", _ASYNC),
    Row("others", "others", _OTHERS),
    Row("auto", "auto", '`num_workers="auto"` against the best of SyncVectorEnv and every fixed choice'),
    Row("infos", "infos", _INFOS),
    Row("copies", "copies", _COPIES),
    Row("first-ready", "first-ready", _SLEEPS),
    Row("round-trip", "round-trip", "one env, one worker, empty step: against a bare pipe ping-pong in the same run"),
    Row("startup", "startup", "start of 64 envs, forkserver, W workers, against Gymnasium with forkserver"),
)


def _format_figure(summaries: list[Summary | None], form: str) -> Figure:
    """Format the medians, and the minimum and maximum of each."""
    shown = [format(s.median, form) if s else "-" for s in summaries]
    spread = [f"{s.minimum:{form}} - {s.maximum:{form}}" if s else "-" for s in summaries]
    return Figure(" / ".join(shown), " / ".join(spread))


def _ranked(report: Report, names: tuple[str, ...], *, invert: bool = False) -> list[str]:
    """Return the names of these rows, or of all others, with the highest median first; rows without samples are omitted."""
    medians = {row.name: s.median for row in report.rows if (row.name in names) is not invert and (s := row.summary)}
    return sorted(medians, key=lambda name: medians[name], reverse=True)


def _fastest(report: Report, names: tuple[str, ...]) -> str:
    """Return the row with the highest median of these, or the first one if none has samples."""
    return next(iter(_ranked(report, names)), names[0])


def cartpole(settings: Settings) -> tuple[dict[str, Figure], list[Report]]:
    names = _own_and_gymnasium_rows()
    reports = [
        report
        for n in settings.sizes
        for report in suites.side_by_side("CartPole-v1", n, settings.workers, settings.pace, names)
    ]
    shares = [report.ratio(_fastest(report, VECENV), "bare-loop") for report in reports]
    isolated = [report.ratio(_fastest(report, ("workers", "per-env")), "bare-loop") for report in reports[1:]]
    last = reports[-1]
    against = [last.ratio(name, "gym-async") for name in (_fastest(last, VECENV), "workers", "per-env")]
    return {
        "limit-best": _format_figure(shares, ".2f"),
        "limit-workers": _format_figure(isolated, ".2f"),
        "async": _format_figure(against, ".1f"),
    }, reports


def _own_and_gymnasium_rows() -> list[str]:
    rows = candidates(WORKLOADS["empty"].prepare(), 1, 1)
    return [row.name for row in rows if row.name not in (*OTHERS, "auto-view")]


def others(settings: Settings) -> tuple[dict[str, Figure], list[Report]]:
    names = [*VECENV, *OTHERS]
    chosen = ("CartPole-v1", "empty") if settings.quick else installed_workloads()
    cases = [(workload, 8) for workload in chosen]
    if not settings.quick:  # few workloads, because the 64 processes of each library start again for every sample
        cases += [(workload, 64) for workload in ("CartPole-v1", "Ant-v5", "ALE/Pong-v5")]
    reports = [_compare_best(partial(_compare_once, w, n, settings.workers), names, VECENV, settings) for w, n in cases]
    return {"others": _worst_case(reports, VECENV, "x")}, reports


def _compare_once(workload: str, num_envs: int, workers: int, pace: Pace, names: Iterable[str] | None) -> Report:
    (report,) = suites.side_by_side(workload, num_envs, workers, pace, names)
    return report


def auto(settings: Settings) -> tuple[dict[str, Figure], list[Report]]:
    chosen = ("CartPole-v1", "empty") if settings.quick else installed_workloads()
    sizes = (8,) if settings.quick else (1, 8, 64)
    comparisons = [partial(suites.auto, workload, n, settings.workers) for workload in chosen for n in sizes]
    reports = [_compare_best(compare_rows, None, ("auto",), settings) for compare_rows in comparisons]
    return {"auto": _worst_case(reports, ("auto",), "")}, reports


def _compare_best(
    compare_rows: Comparison, names: Iterable[str] | None, ours: tuple[str, ...], settings: Settings
) -> Report:
    """Compare our best row with the best of the others, by other samples than those that selected these rows.

    A first comparison of all rows selects our best row and the two best others. These are compared again in many short
    rounds, and only these rounds count, unless our row was much faster in the first comparison.
    """
    report = compare_rows(settings.pace, names)
    mine, others = _ranked(report, ours), _ranked(report, ours, invert=True)
    if not mine or not others:
        return report
    ratio = report.ratio(mine[0], others[0])
    slowest = min(s.median for row in report.rows if row.name in (mine[0], *others[:2]) and (s := row.summary))
    seconds = max(SAMPLE_SECONDS, BATCHES_PER_SAMPLE * report.num_envs / slowest)
    if ratio is None or ratio.median < CLEAR_RATIO or report.seconds < seconds:
        rounds = 2 if settings.quick else max(MIN_ROUNDS, min(MAX_ROUNDS, int(SECONDS_PER_ROW / seconds)))
        report = compare_rows({**settings.pace, "seconds": seconds, "repeats": rounds}, [mine[0], *others[:2]])
    found = _best_ratio(report, ours)
    if found:
        print(f"{found[1]}: {found[0].median:.2f} [{found[0].minimum:.2f} - {found[0].maximum:.2f}]", flush=True)
    return report


def _best_ratio(report: Report, ours: tuple[str, ...]) -> tuple[Summary, str] | None:
    """Return the ratio of our best row to the best of the others, and a description of the comparison."""
    mine, others = _ranked(report, ours), _ranked(report, ours, invert=True)
    first, second = report.row(mine[0]) if mine else None, report.row(others[0]) if others else None
    found = report.ratio(first.name, second.name) if first and second else None
    return (found, f"{report.env}, {report.num_envs} envs, against {second.label}") if found and second else None


def _worst_case(reports: list[Report], ours: tuple[str, ...], unit: str) -> Figure:
    """Return the lowest ratio of our best row to the best of the others over all cases, with its case."""
    cases = [found for report in reports if (found := _best_ratio(report, ours))]
    if not cases:
        return Figure("no case could be measured", "-")
    summary, case = min(cases, key=lambda entry: entry[0].median)
    good = sum(found.median >= GOOD_RATIO for found, _ in cases)
    return Figure(
        f"{summary.median:.2f}{unit} in the worst of {len(cases)} cases ({case})",
        f"{summary.minimum:.2f} - {summary.maximum:.2f}; {good} cases at {GOOD_RATIO} or more",
    )


def infos(settings: Settings) -> tuple[dict[str, Figure], list[Report]]:
    report = micro.infos(settings.pace, num_envs=8 if settings.quick else 32, workers=settings.workers)
    found = report.ratio("workers-without", "workers")
    if found is None:
        return {}, [report]
    cost = [100 * (value - 1) for value in (found.median, found.minimum, found.maximum)]
    return {"infos": Figure(f"{cost[0]:.1f} %", f"{cost[1]:.1f} - {cost[2]:.1f} %")}, [report]


def copies(settings: Settings) -> tuple[dict[str, Figure], list[Report]]:
    """Count copies and measure their time, because copying from another core's cache is slower than ``memcpy``."""
    report = micro.copies(settings.pace, num_envs=settings.large)
    counted = " / ".join(f"{count:.2f}" for count in micro.count_copies(settings.large).values())
    times = _format_figure(list(micro.copying_times(report).values()), ".1f")
    return {"copies": Figure(counted, f"counted; in time {times.measured} memcpys ({times.spread})")}, [report]


def first_ready(settings: Settings) -> tuple[dict[str, Figure], list[Report]]:
    report = suites.first_ready(settings.pace, settings.large)
    row = report.row(_fastest(report, tuple(row.name for row in report.rows if row.name != "all")))
    if row is None or row.summary is None:
        return {}, [report]
    cell = _format_figure([row.summary], ".2f")
    return {"first-ready": Figure(f"{cell.measured} ({row.label})", cell.spread)}, [report]


def round_trip(settings: Settings) -> tuple[dict[str, Figure], list[Report]]:
    report = micro.round_trip(settings.pace)
    found = report.ratio("pipe", "workers")
    return ({"round-trip": _format_figure([found], ".2f")} if found else {}), [report]


def startup(settings: Settings) -> tuple[dict[str, Figure], list[Report]]:
    seconds = micro.startup(1 if settings.quick else 5, settings.large, settings.workers)
    found = Summary.from_samples(b / a for a, b in zip(seconds["workers"], seconds["gym-async"], strict=True))
    summaries = {name: Summary.from_samples(taken) for name, taken in seconds.items()}
    shown = ", ".join(f"{name} {each.show('.3g')} s" for name, each in summaries.items() if each)
    figure = _format_figure([found], ".1f")
    return {"startup": Figure(f"{figure.measured}x", f"{figure.spread}; {shown}")}, []


PARTS: dict[str, Callable[[Settings], tuple[dict[str, Figure], list[Report]]]] = {
    "cartpole": cartpole,
    "others": others,
    "auto": auto,
    "infos": infos,
    "copies": copies,
    "first-ready": first_ready,
    "round-trip": round_trip,
    "startup": startup,
}


def run(part: str, settings: Settings, out: Path) -> list[Report]:
    """Measure one part and store its figures."""
    figures, reports = PARTS[part](settings)
    out.mkdir(parents=True, exist_ok=True)
    kept = {
        "quick": settings.quick,
        "figures": {key: asdict(figure) for key, figure in figures.items()},
        "reports": [report.to_dict() for report in reports],
    }
    (out / f"goals-{part}.json").write_text(json.dumps(kept, indent=1) + "\n")
    for key, figure in figures.items():
        print(f"{key}: {figure.measured}   [{figure.spread}]")
    return reports
