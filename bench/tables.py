"""Writes the tables of ``README.md``, ``bench/RESULTS.md`` and ``docs/benchmarks.md`` from measurements.

``python -m bench table`` reads all JSON files in the folder of results: those of the goals, ``vecenv bench``, ``compare``,
``sweep``, ``waits``, ``episodes`` and ``train``. A table without new measurements does not change.
"""

from __future__ import annotations

import json
import shutil
import statistics
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import matplotlib

from bench.goals import PARTS, ROWS
from vecenv.tools.benchmark import COLOURS, new_figure

ROOT = Path(__file__).resolve().parent.parent
NOT_YET = "not measured yet"
SWEEP = "sweep-CartPole-v1"
GAINS = ("CartPole-v1", "Ant-v5", "ALE/Pong-v5")  # the rows of README.md
REAL = {  # the rows of docs/benchmarks.md ...
    **{name: name for name in ("CartPole-v1", "Pendulum-v1", "HalfCheetah-v5", "LunarLander-v3")},
    "MiniGrid-DoorKey-8x8-v0": "MiniGrid DoorKey-8x8",
    **{name: name for name in ("Ant-v5", "ALE/Pong-v5")},
    "busy-1000us": "steps of 1 ms",
    "sleeping": "steps that wait (log-normal, sleeping)",
}
REAL_COLUMNS = {  # ... and the columns
    "auto": "vecenv, auto",
    "gym-sync": "SyncVectorEnv",
    "per-env": "one process per environment",
    "bare-loop": "the bare loop (upper bound)",
}
CHART_BARS = {  # the bars of the chart in README.md
    "auto": 'vecenv, "auto"',
    "per-env": "vecenv, import only",
    "gym-sync": "SyncVectorEnv",
    "gym-async": "AsyncVectorEnv",
}


def replace_between(text: str, marker: str, lines: list[str]) -> str:
    """Return ``text`` with ``lines`` between the two markers of this name."""
    begin, end = f"<!-- {marker}: begin -->", f"<!-- {marker}: end -->"
    before, _, rest = text.partition(begin)
    _, found, after = rest.partition(end)
    if not found:
        raise ValueError(f"no {begin} ... {end} in the file")
    return "\n".join([before + begin, *lines, end + after])


def goals_table(out: Path, page: str) -> list[str]:
    """Return the lines of the table of goals: rows with new measurements, and the other rows from ``page``."""
    figures: dict[str, dict[str, str]] = {}
    for part in PARTS:
        path = out / f"goals-{part}.json"
        if path.exists():
            kept = json.loads(path.read_text())
            figures.update({} if kept["quick"] else kept["figures"])
    lines = ["| what | measured | spread | command |", "|---|---|---|---|"]
    for row in ROWS:
        begin = f"| {row.what} |"
        existing = [line for line in page.splitlines() if line.startswith(begin)]
        if row.key not in figures and existing:
            lines += existing[:1]
            continue
        cells = figures.get(row.key, {"measured": NOT_YET, "spread": NOT_YET})
        lines.append(f"{begin} {cells['measured']} | {cells['spread']} | `python -m bench goals {row.part}` |")
    return lines


def main_table(path: Path) -> list[str]:
    """Return the first table of ``docs/benchmarks.md`` from the JSON of ``vecenv bench CartPole-v1 --num-envs 64``."""
    lines = [
        "| engine | steps/s | min to max | x Gymnasium Async | of the bare loop |",
        "|---|---:|---:|---:|---:|",
    ]
    for row in json.loads(path.read_text())["rows"]:
        rate = row["steps_per_second"]
        if not rate or row.get("failed"):
            continue
        against, share = row["ratios"].get("gym-async"), row["ratios"].get("bare-loop")
        lines.append(
            f"| {row['label']} | {rate['median']:,.0f} | {rate['minimum']:,.0f} - {rate['maximum']:,.0f} "
            f"| {against['median']:.1f} | {share['median']:.2f} |"
        )
    return lines


def compare_table(reports: list[dict[str, Any]]) -> list[str]:
    """Return a table of speed-ups over Gymnasium's ``AsyncVectorEnv``, with a row per workload and a column per engine."""
    against = "gym-async"
    names = list(dict.fromkeys(row["name"] for report in reports for row in report["rows"]))
    names = [name for name in names if name != against]
    lines = [f"| workload | {against}, {reports[0]['unit']} | {' | '.join(names)} |", "|---|---:|" + "---:|" * len(names)]
    for report in reports:
        base = next((row["steps_per_second"] for row in report["rows"] if row["name"] == against), None)
        cells = [_speedup(report, name, against) for name in names]
        first = f"{report['env']}, {report['num_envs']} | " + (f"{base['median']:,.0f}" if base else "-")
        lines.append(f"| {first} | {' | '.join(cells)} |")
    return lines


def real_table(reports: list[dict[str, Any]]) -> list[str]:
    """Return the table of real environments in ``docs/benchmarks.md`` from the reports of ``compare``."""
    lines = [f"| workload | {' | '.join(REAL_COLUMNS.values())} |", "|---|" + "---:|" * len(REAL_COLUMNS)]
    for report in _first_reports(reports, REAL):
        cells = [_speedup(report, name, "gym-async", spread=True) for name in REAL_COLUMNS]
        lines.append(f"| {REAL[report['env']]} | {' | '.join(cells)} |")
    return lines


def gains_table(reports: list[dict[str, Any]]) -> list[str]:
    """Return the table of ``README.md``: the speed-up of ``"auto"`` over both of Gymnasium's engines."""
    lines = ["| environment | against `AsyncVectorEnv` | against `SyncVectorEnv` |", "|---|---:|---:|"]
    for report in _first_reports(reports, GAINS):
        cells = [_speedup(report, "auto", other) for other in ("gym-async", "gym-sync")]
        lines.append(f"| {report['env']} | {' | '.join(cells)} |")
    return lines


def headline(reports: list[dict[str, Any]]) -> list[str]:
    """Return the line of ``README.md`` with the speed-ups over both of Gymnasium's engines."""
    found = list(_first_reports(reports, GAINS))
    gains = [
        f"{_speedup(report, 'auto', 'gym-async')} and {_speedup(report, 'auto', 'gym-sync')} times on {report['env']}"
        for report in found
    ]
    gains[0] = gains[0].replace(" and ", " times `AsyncVectorEnv` and ").replace(" times on", " times `SyncVectorEnv` on")
    cores = found[0]["machine"]["usable_cores"]
    return [f"- **Faster:** {', '.join(gains)} ({found[0]['num_envs']} environments, {cores} cores)."]


def _first_reports(reports: list[dict[str, Any]], workloads: Iterable[str]) -> list[dict[str, Any]]:
    """Return the first report of each of these workloads, in this order."""
    by_name = {report["env"]: report for report in reversed(reports)}
    return [by_name[name] for name in workloads if name in by_name]


def _ratios(report: dict[str, Any], name: str, against: str) -> list[float]:
    """Return the ratios of one engine's samples to another's, round by round."""
    rates = {row["name"]: row["rates"] for row in report["rows"]}
    pairs = zip(rates.get(name, []), rates.get(against, []), strict=False)
    return [ours / theirs for ours, theirs in pairs if ours is not None and theirs]


def _speedup(report: dict[str, Any], name: str, against: str, spread: bool = False) -> str:
    """Format the median of the ratios, with ``spread`` also minimum and maximum, or "-" if there are none."""
    ratios = _ratios(report, name, against)
    if not ratios:
        return "-"
    middle = statistics.median(ratios)
    text = f"{middle:{'.2g' if middle < 10 else '.0f'}}"
    return f"{text} ({min(ratios):.2g} - {max(ratios):.2g})" if spread else text


def sweep_table(reports: list[dict[str, Any]], memory: dict[str, dict[str, dict[str, int]]]) -> list[str]:
    """Return a table of steps per second and MiB per environment: a row per engine, a column per number of environments."""
    rates: dict[str, dict[str, str]] = {}
    for report in reports:
        for row in report["rows"]:
            n, rate = str(report["num_envs"]), row["steps_per_second"]
            found = rates.setdefault(row["name"], {})
            if rate:
                found.setdefault(n, f"{rate['median']:,.0f}")  # baselines occur in several reports; the first counts
    sizes = list(dict.fromkeys(str(report["num_envs"]) for report in reports))
    lines = [f"| engine | {' | '.join(sizes)} |", "|---|" + "---:|" * len(sizes)]
    for name, by_size in rates.items():
        cells = []
        for n in sizes:
            used = memory.get(n, {}).get(name)
            size = f", {(used['trainer'] + used['workers']) / int(n) / 2**20:.3g} MiB" if used else ""
            cells.append(by_size[n] + size if n in by_size else "-")
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return lines


def write_tables(out: Path) -> None:
    """Write every table that has results in ``out``."""
    compared = _read_json(out / "compare.json")
    page = ROOT / "bench" / "RESULTS.md"
    text = page.read_text()
    text = replace_between(text, "goals", goals_table(out, text))
    swept = _read_json(out / f"{SWEEP}.json")
    if swept:
        text = replace_between(text, "sweep", sweep_table(swept, _read_json(out / f"{SWEEP}-memory.json") or {}))
    for name in ("compare", "waits", "episodes", "train"):
        if reports := _read_json(out / f"{name}.json"):
            text = replace_between(text, name, compare_table(reports))
    page.write_text(text)
    if compared:
        _replace_lines(ROOT / "README.md", "headline", headline(compared))
        _replace_lines(ROOT / "README.md", "gains", gains_table(compared))
        _replace_lines(ROOT / "docs" / "benchmarks.md", "real", real_table(compared))
        draw_gains(compared, ROOT / "docs" / "gains.svg")
    main = out / "CartPole-v1-64.json"
    if main.exists():
        _replace_lines(ROOT / "docs" / "benchmarks.md", "measured", main_table(main))
        shutil.copyfile(main.with_suffix(".png"), ROOT / "docs" / "cartpole_64.png")
    shares = out / "train-ant-shares.png"
    if shares.exists():
        shutil.copyfile(shares, ROOT / "docs" / "train_ant_shares.png")


def draw_gains(reports: list[dict[str, Any]], path: Path) -> None:
    """Draw the chart of ``README.md``, the share of the bare loop for each engine, for light and dark pages."""
    found = list(_first_reports(reports, GAINS))
    grey = "#7d8590"
    coloured = dict.fromkeys(("text.color", "axes.labelcolor", "xtick.color", "ytick.color"), grey)
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "vecenv", "font.size": 15, **coloured}):
        figure = new_figure(7.0, 1.0 + 0.42 * len(CHART_BARS) * len(found))
        for axes, each in zip(figure.subplots(len(found), sharex=True, squeeze=False)[:, 0], found, strict=True):
            shares = [statistics.median(_ratios(each, name, "bare-loop") or [0.0]) for name in CHART_BARS]
            colours = [COLOURS["vecenv"] if name == "auto" else grey for name in CHART_BARS]
            axes.barh(range(len(shares)), shares, color=colours, height=0.75)
            for place, share in enumerate(shares):
                axes.annotate(f" {share:.2f}", (share, place), va="center")
            axes.set_yticks(range(len(shares)), CHART_BARS.values())
            axes.get_yticklabels()[list(CHART_BARS).index("auto")].set(color=COLOURS["vecenv"], fontweight="bold")
            axes.set_title(each["env"], loc="left", fontsize=15)
            axes.set(xlim=(0, 1))
            axes.invert_yaxis()
            axes.spines[:].set_visible(False)
        axes.set_xlabel("share of the bare loop (upper bound)")
        figure.savefig(path, transparent=True, metadata={"Date": None})


def _read_json(path: Path) -> Any:
    return json.loads(path.read_text()) if path.exists() else None


def _replace_lines(page: Path, marker: str, lines: list[str]) -> None:
    page.write_text(replace_between(page.read_text(), marker, lines))
