"""The table of goals: each row is measured by one part, and written only from what a part has measured.

``python -m bench goals PART`` runs a part and keeps its figures in ``bench-results/goals-PART.json``;
``python -m bench table`` writes every figure found there into ``bench/README.md``, and the last main job's
into ``README.md``, with its picture. Nothing else puts a figure there.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from bench import micro, suites
from bench.engines import OTHERS, candidates
from bench.workloads import WORKLOADS
from vecenv.benchmark import Report, Summary, compare, ratio

ROOT = Path(__file__).resolve().parent.parent
NOT_YET = "not measured yet"
VECENV = ("auto", "use-caller", "workers", "per-env")


@dataclass(frozen=True)
class Figure:
    """Two cells of the table."""

    measured: str
    spread: str


@dataclass(frozen=True)
class Settings:
    """How long and on what; the parts scale the rest."""

    workers: int
    pace: suites.Pace
    quick: bool = False

    @property
    def sizes(self) -> tuple[int, ...]:
        return (2, 8) if self.quick else (2, 8, 64)

    @property
    def large(self) -> int:
        return self.sizes[-1]


@dataclass(frozen=True)
class Row:
    key: str
    what: str
    goal: str
    part: str


ROWS = (
    Row(
        "limit-best",
        "CartPole-v1, of the limit, best mode: 2 / 8 / 64 envs",
        "0.75 / 0.85 / 0.95",
        "cartpole",
    ),
    Row(
        "limit-workers",
        "CartPole-v1, of the limit, isolated workers only: 8 / 64 envs",
        "0.50 / 0.85",
        "cartpole",
    ),
    Row(
        "async",
        "against Gymnasium's AsyncVectorEnv, CartPole-v1, 64 envs: best mode / W workers / one process per env",
        "18x / 14x / 5x",
        "cartpole",
    ),
    Row(
        "others",
        "against the best other process engine in the same run (SB3, Tianshou, TorchRL, PufferLib)",
        "ahead in every case",
        "others",
    ),
    Row(
        "auto",
        '`num_workers="auto"` against the best of SyncVectorEnv and every fixed choice',
        "0.95 in every case",
        "auto",
    ),
    Row(
        "infos",
        "Ant-v5, 32 envs (10 numeric info keys a step), engine cost over the same env without infos",
        "under 3 %",
        "infos",
    ),
    Row(
        "copies",
        "observations (84, 84, 4) uint8, 64 envs: bytes copied per step, `copy=False` / `copy=True`",
        "1x / 2x",
        "copies",
    ),
    Row(
        "first-ready",
        "first-ready batches, sleeping envs with log-normal step times (sigma 1): of the ideal, mean-bound rate",
        "0.90",
        "first-ready",
    ),
    Row(
        "round-trip",
        "one env, one worker, empty step: against a bare pipe ping-pong in the same run",
        "1.3x",
        "round-trip",
    ),
    Row(
        "startup",
        "start of 64 envs, forkserver, W workers, against Gymnasium with forkserver",
        "10x faster",
        "startup",
    ),
)


def _cell(summaries: list[Summary | None], form: str) -> Figure:
    """Medians side by side, and the least and greatest of each."""
    shown = [format(s.median, form) if s else "-" for s in summaries]
    spread = [f"{s.minimum:{form}} - {s.maximum:{form}}" if s else "-" for s in summaries]
    return Figure(" / ".join(shown), " / ".join(spread))


def _best(report: Report, names: tuple[str, ...]) -> str:
    """The fastest of these rows, by median."""
    medians = {row.name: row.summary.median for row in report.rows if row.name in names and row.summary}
    return max(medians, key=lambda name: medians[name]) if medians else names[0]


def cartpole(settings: Settings) -> tuple[dict[str, Figure], list[Report]]:
    names = _not_others()
    reports = [
        report
        for n in settings.sizes
        for report in suites.side_by_side("CartPole-v1", n, settings.workers, settings.pace, names)
    ]
    shares = [report.ratio(_best(report, VECENV), "limit") for report in reports]
    isolated = [report.ratio(_best(report, ("workers", "per-env")), "limit") for report in reports[1:]]
    last = reports[-1]
    against = [last.ratio(name, "gym-async") for name in (_best(last, VECENV), "workers", "per-env")]
    return {
        "limit-best": _cell(shares, ".2f"),
        "limit-workers": _cell(isolated, ".2f"),
        "async": _cell(against, ".1f"),
    }, reports


def _not_others() -> list[str]:
    rows = candidates(WORKLOADS["empty"].prepare(), 1, 1)
    return [row.name for row in rows if row.name not in OTHERS]


def others(settings: Settings) -> tuple[dict[str, Figure], list[Report]]:
    names = [*VECENV, *OTHERS]
    chosen = ("CartPole-v1", "empty") if settings.quick else tuple(WORKLOADS)
    cases = [(workload, 8) for workload in chosen]
    if not settings.quick:  # sixty-four processes of each library start anew for every sample, which takes its time
        cases += [(workload, 64) for workload in ("CartPole-v1", "Ant-v5", "ALE/Pong-v5")]
    reports = [
        report
        for workload, n in cases
        for report in suites.side_by_side(workload, n, settings.workers, settings.pace, names)
    ]
    return {"others": _worst(reports, VECENV, tuple(OTHERS), "x")}, reports


def auto(settings: Settings) -> tuple[dict[str, Figure], list[Report]]:
    chosen = ("CartPole-v1", "empty") if settings.quick else tuple(WORKLOADS)
    sizes = (8,) if settings.quick else (1, 8, 64)
    reports = [suites.auto(w, n, settings.workers, settings.pace) for w in chosen for n in sizes]
    fixed = tuple({row.name for report in reports for row in report.rows} - {"auto"})
    return {"auto": _worst(reports, ("auto",), fixed, "")}, reports


def _worst(reports: list[Report], ours: tuple[str, ...], theirs: tuple[str, ...], unit: str) -> Figure:
    """Over all cases, the least ratio of our best row to their best, with the case it was."""
    cases: list[tuple[float, Summary, str]] = []
    for report in reports:
        first, second = report.row(_best(report, ours)), report.row(_best(report, theirs))
        found = ratio(first, second) if first and second else None
        if found and second:
            cases.append((found.median, found, f"{report.env}, {report.num_envs} envs, against {second.label}"))
    if not cases:
        return Figure("no case could be measured", "-")
    median, summary, case = min(cases, key=lambda entry: entry[0])
    return Figure(
        f"{median:.2f}{unit} in the worst of {len(cases)} cases ({case})",
        f"{summary.minimum:.2f} - {summary.maximum:.2f}; best case {max(cases)[0]:.2f}",
    )


def infos(settings: Settings) -> tuple[dict[str, Figure], list[Report]]:
    report = micro.infos(settings.pace, num_envs=8 if settings.quick else 32, workers=settings.workers)
    bare, full = report.row("workers-without"), report.row("workers")
    found = ratio(bare, full) if bare and full else None
    if found is None:
        return {}, [report]
    cost = [100 * (value - 1) for value in (found.median, found.minimum, found.maximum)]
    return {"infos": Figure(f"{cost[0]:.1f} %", f"{cost[1]:.1f} - {cost[2]:.1f} %")}, [report]


def copies(settings: Settings) -> tuple[dict[str, Figure], list[Report]]:
    """Counted; the time it takes goes beside it, since a copy out of another core's cache is slower than ``memcpy``."""
    report = micro.copies(settings.pace, num_envs=settings.large)
    counted = " / ".join(f"{count:.2f}" for count in micro.counted_copies(settings.large).values())
    times = _cell(list(micro.copying_times(report).values()), ".1f")
    return {"copies": Figure(counted, f"counted; in time {times.measured} memcpys ({times.spread})")}, [report]


def first_ready(settings: Settings) -> tuple[dict[str, Figure], list[Report]]:
    report = suites.first_ready(settings.pace, settings.large)
    row = report.row(_best(report, tuple(row.name for row in report.rows if row.name != "all")))
    if row is None or row.summary is None:
        return {}, [report]
    cell = _cell([row.summary], ".2f")
    return {"first-ready": Figure(f"{cell.measured} ({row.label})", cell.spread)}, [report]


def round_trip(settings: Settings) -> tuple[dict[str, Figure], list[Report]]:
    report = micro.round_trip(settings.pace)
    found = report.ratio("pipe", "workers")
    return ({"round-trip": _cell([found], ".2f")} if found else {}), [report]


def startup(settings: Settings) -> tuple[dict[str, Figure], list[Report]]:
    seconds = micro.startup(1 if settings.quick else 5, settings.large, settings.workers)
    found = Summary.of(b / a for a, b in zip(seconds["workers"], seconds["gym-async"], strict=True))
    shown = ", ".join(f"{name} {micro.middle(taken)} s" for name, taken in seconds.items())
    figure = _cell([found], ".1f")
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
    """Measure one part and keep what came out of it."""
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


# --- writing the tables ---------------------------------------------------------------------------


def _between(text: str, marker: str, lines: list[str]) -> str:
    begin, end = f"<!-- {marker}: begin -->", f"<!-- {marker}: end -->"
    before, _, rest = text.partition(begin)
    _, found, after = rest.partition(end)
    if not found:
        raise ValueError(f"no {begin} ... {end} in the file")
    return "\n".join([before + begin, *lines, end + after])


def goals_table(out: Path, page: str) -> list[str]:
    """The rows of ``bench/README.md``: those that were measured for good, and the others as they stand in ``page``."""
    figures: dict[str, dict[str, str]] = {}
    for part in PARTS:
        path = out / f"goals-{part}.json"
        if path.exists():
            kept = json.loads(path.read_text())
            figures.update({} if kept["quick"] else kept["figures"])
    lines = ["| what | goal | measured | spread | command |", "|---|---|---|---|---|"]
    for row in ROWS:
        begin = f"| {row.what} | {row.goal} |"
        standing = [line for line in page.splitlines() if line.startswith(begin)]
        if row.key not in figures and standing:
            lines += standing[:1]
            continue
        cells = figures.get(row.key, {"measured": NOT_YET, "spread": NOT_YET})
        lines.append(f"{begin} {cells['measured']} | {cells['spread']} | `python -m bench goals {row.part}` |")
    return lines


def main_table(path: Path) -> list[str]:
    """The rows of ``README.md`` from the JSON of ``vecenv bench CartPole-v1 --num-envs 64``."""
    lines = [
        "| engine | steps/s | least to greatest | x Gymnasium Async | of the limit |",
        "|---|---:|---:|---:|---:|",
    ]
    for row in json.loads(path.read_text())["rows"]:
        rate = row["steps_per_second"]
        if not rate or row.get("failed"):
            continue
        against, share = row["ratios"].get("gym-async"), row["ratios"].get("limit")
        lines.append(
            f"| {row['label']} | {rate['median']:,.0f} | {rate['minimum']:,.0f} - {rate['maximum']:,.0f} "
            f"| {against['median']:.1f} | {share['median']:.2f} |"
        )
    return lines


def write_tables(out: Path) -> None:
    page = ROOT / "bench" / "README.md"
    text = page.read_text()
    page.write_text(_between(text, "goals", goals_table(out, text)))
    main = out / "CartPole-v1-64.json"
    if main.exists():
        page = ROOT / "README.md"
        page.write_text(_between(page.read_text(), "measured", main_table(main)))
        shutil.copyfile(main.with_suffix(".png"), ROOT / "docs" / "cartpole_64.png")


__all__ = ["PARTS", "ROWS", "Settings", "compare", "run", "write_tables"]
