"""Writes the tables and charts of ``README.md``, ``bench/RESULTS.md`` and ``docs/`` from measurements.

``python -m bench table`` reads the files in the folder of results: those of ``vecenv bench`` and ``sweep`` for CartPole-v1,
and of the parts ``goals``, ``compare``, ``waits``, ``episodes`` and ``train``. A table without new measurements does not
change.
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
GAINS = ("CartPole-v1", "Ant-v5", "ALE/Pong-v5")  # the environments in README.md
REAL_ROWS = {  # the rows of the second table in docs/benchmarks.md
    **{name: name for name in ("CartPole-v1", "Pendulum-v1", "HalfCheetah-v5", "LunarLander-v3")},
    "MiniGrid-DoorKey-8x8-v0": "MiniGrid DoorKey-8x8",
    **{name: name for name in ("Ant-v5", "ALE/Pong-v5")},
    "busy-1000us": "steps of 1 ms",
    "sleeping": "steps that wait (log-normal, sleeping)",
}
REAL_COLUMNS = {  # its columns
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
    """Replace the lines between the two markers with this name."""
    begin, end = f"<!-- {marker}: begin -->", f"<!-- {marker}: end -->"
    before, _, rest = text.partition(begin)
    _, end_marker, after = rest.partition(end)
    if not end_marker:
        raise ValueError(f"no {begin} ... {end} in the file")
    return "\n".join([before + begin, *lines, end + after])


def goals_table(out: Path, page: str) -> list[str]:
    """Return the lines of the table of goals. Rows without new measurements are those of ``page``."""
    figures: dict[str, dict[str, str]] = {}
    for part in PARTS:
        path = out / f"goals-{part}.json"
        if path.exists():
            results = json.loads(path.read_text())
            if not results["quick"]:
                figures.update(results["figures"])
    lines = ["| what | measured | spread | command |", "|---|---|---|---|"]
    for row in ROWS:
        begin = f"| {row.description} |"
        existing = [line for line in page.splitlines() if line.startswith(begin)]
        if row.key not in figures and existing:
            lines += existing[:1]
            continue
        cells = figures.get(row.key, {"measured": NOT_YET, "spread": NOT_YET})
        lines.append(f"{begin} {cells['measured']} | {cells['spread']} | `python -m bench goals {row.part}` |")
    return lines


def main_table(path: Path) -> list[str]:
    """Return the first table of ``docs/benchmarks.md`` from the JSON file of ``vecenv bench CartPole-v1 --num-envs 64``."""
    lines = [
        "| engine | steps/s | min to max | x Gymnasium Async | of the bare loop |",
        "|---|---:|---:|---:|---:|",
    ]
    for row in json.loads(path.read_text())["rows"]:
        rate = row["steps_per_second"]
        if not rate or row.get("failed"):
            continue
        speedup, share = row["ratios"].get("gym-async"), row["ratios"].get("bare-loop")
        lines.append(
            f"| {row['label']} | {rate['median']:,.0f} | {rate['minimum']:,.0f} - {rate['maximum']:,.0f} "
            f"| {speedup['median']:.1f} | {share['median']:.2f} |"
        )
    return lines


def compare_table(reports: list[dict[str, Any]]) -> list[str]:
    """Return a table of speed-ups over Gymnasium's ``AsyncVectorEnv``, with a row per workload and a column per engine."""
    baseline = "gym-async"
    names = list(dict.fromkeys(row["name"] for report in reports for row in report["rows"]))
    names = [name for name in names if name != baseline]
    lines = [f"| workload | {baseline}, {reports[0]['unit']} | {' | '.join(names)} |", "|---|---:|" + "---:|" * len(names)]
    for report in reports:
        rate = next((row["steps_per_second"] for row in report["rows"] if row["name"] == baseline), None)
        cells = [f"{report['env']}, {report['num_envs']}", f"{rate['median']:,.0f}" if rate else "-"]
        cells += [_format_speedup(report, name, baseline) for name in names]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def real_table(reports: list[dict[str, Any]]) -> list[str]:
    """Return the second table of ``docs/benchmarks.md`` from the reports of ``compare``."""
    lines = [f"| workload | {' | '.join(REAL_COLUMNS.values())} |", "|---|" + "---:|" * len(REAL_COLUMNS)]
    for report in _first_reports(reports, REAL_ROWS):
        cells = [_format_speedup(report, name, "gym-async", spread=True) for name in REAL_COLUMNS]
        lines.append(f"| {REAL_ROWS[report['env']]} | {' | '.join(cells)} |")
    return lines


def gains_table(reports: list[dict[str, Any]]) -> list[str]:
    """Return the table of ``README.md`` with the speed-ups of ``"auto"`` over both of Gymnasium's engines."""
    lines = ["| environment | against `AsyncVectorEnv` | against `SyncVectorEnv` |", "|---|---:|---:|"]
    for report in _first_reports(reports, GAINS):
        cells = [_format_speedup(report, "auto", other) for other in ("gym-async", "gym-sync")]
        lines.append(f"| {report['env']} | {' | '.join(cells)} |")
    return lines


def headline(reports: list[dict[str, Any]]) -> list[str]:
    """Return the line of ``README.md`` with the speed-ups over both of Gymnasium's engines."""
    shown = _first_reports(reports, GAINS)
    gains = []
    for report in shown:
        over_async, over_sync = (_format_speedup(report, "auto", name) for name in ("gym-async", "gym-sync"))
        if not gains:  # only the first speed-ups name the engines
            gains.append(f"{over_async} times `AsyncVectorEnv` and {over_sync} times `SyncVectorEnv` on {report['env']}")
        else:
            gains.append(f"{over_async} and {over_sync} times on {report['env']}")
    cores = shown[0]["machine"]["usable_cores"]
    return [f"- **Faster:** {', '.join(gains)} ({shown[0]['num_envs']} environments, {cores} cores)."]


def _first_reports(reports: list[dict[str, Any]], workloads: Iterable[str]) -> list[dict[str, Any]]:
    """Return the first report of each of these workloads, in their order."""
    by_name = {report["env"]: report for report in reversed(reports)}
    return [by_name[name] for name in workloads if name in by_name]


def _ratios(report: dict[str, Any], name: str, baseline: str) -> list[float]:
    """Return the ratios of one engine's rates to another's, round by round."""
    rates = {row["name"]: row["rates"] for row in report["rows"]}
    pairs = zip(rates.get(name, []), rates.get(baseline, []), strict=False)
    return [rate / baseline_rate for rate, baseline_rate in pairs if rate is not None and baseline_rate]


def _format_speedup(report: dict[str, Any], name: str, baseline: str, spread: bool = False) -> str:
    """Format the median of the ratios, with ``spread`` also minimum and maximum, or "-" if there are none."""
    ratios = _ratios(report, name, baseline)
    if not ratios:
        return "-"
    median = statistics.median(ratios)
    text = f"{median:.2g}" if median < 10 else f"{median:.0f}"
    return f"{text} ({min(ratios):.2g} - {max(ratios):.2g})" if spread else text


def sweep_table(reports: list[dict[str, Any]], memory: dict[str, dict[str, dict[str, int]]]) -> list[str]:
    """Return a table of steps per second and MiB per environment: a row per engine, a column per number of environments."""
    rates: dict[str, dict[str, str]] = {}
    for report in reports:
        for row in report["rows"]:
            num_envs, rate = str(report["num_envs"]), row["steps_per_second"]
            rates_by_size = rates.setdefault(row["name"], {})
            if rate:  # baselines occur in several reports; the first one counts
                rates_by_size.setdefault(num_envs, f"{rate['median']:,.0f}")
    sizes = list(dict.fromkeys(str(report["num_envs"]) for report in reports))
    lines = [f"| engine | {' | '.join(sizes)} |", "|---|" + "---:|" * len(sizes)]
    for name, rates_by_size in rates.items():
        cells = []
        for num_envs in sizes:
            used = memory.get(num_envs, {}).get(name)
            mib = f", {(used['trainer'] + used['workers']) / int(num_envs) / 2**20:.3g} MiB" if used else ""
            cells.append(rates_by_size[num_envs] + mib if num_envs in rates_by_size else "-")
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return lines


def write_tables(out: Path) -> None:
    """Write all tables and charts that have results in ``out``."""
    comparison = _read_json(out / "compare.json")
    page = ROOT / "bench" / "RESULTS.md"
    text = page.read_text()
    text = replace_between(text, "goals", goals_table(out, text))
    sweep = _read_json(out / f"{SWEEP}.json")
    if sweep:
        text = replace_between(text, "sweep", sweep_table(sweep, _read_json(out / f"{SWEEP}-memory.json") or {}))
    for name in ("compare", "waits", "episodes", "train"):
        if reports := _read_json(out / f"{name}.json"):
            text = replace_between(text, name, compare_table(reports))
    page.write_text(text)
    if comparison:
        if _first_reports(comparison, GAINS):
            _replace_lines(ROOT / "README.md", "headline", headline(comparison))
        _replace_lines(ROOT / "README.md", "gains", gains_table(comparison))
        _replace_lines(ROOT / "docs" / "benchmarks.md", "real", real_table(comparison))
        draw_gains(comparison, ROOT / "docs" / "gains.svg")
    cartpole = out / "CartPole-v1-64.json"
    if cartpole.exists():
        _replace_lines(ROOT / "docs" / "benchmarks.md", "measured", main_table(cartpole))
        shutil.copyfile(cartpole.with_suffix(".png"), ROOT / "docs" / "cartpole_64.png")
    shares = out / "train-ant-shares.png"
    if shares.exists():
        shutil.copyfile(shares, ROOT / "docs" / "train_ant_shares.png")


def draw_gains(reports: list[dict[str, Any]], path: Path) -> None:
    """Draw the chart of ``README.md``: the share of the bare loop that each engine reaches."""
    shown = _first_reports(reports, GAINS)
    grey = "#7d8590"  # visible on light and on dark pages
    coloured = dict.fromkeys(("text.color", "axes.labelcolor", "xtick.color", "ytick.color"), grey)
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "vecenv", "font.size": 15, **coloured}):
        figure = new_figure(7.0, 1.0 + 0.42 * len(CHART_BARS) * len(shown))
        for axes, report in zip(figure.subplots(len(shown), sharex=True, squeeze=False)[:, 0], shown, strict=True):
            shares = [statistics.median(_ratios(report, name, "bare-loop") or [0.0]) for name in CHART_BARS]
            colours = [COLOURS["vecenv"] if name == "auto" else grey for name in CHART_BARS]
            axes.barh(range(len(shares)), shares, color=colours, height=0.75)
            for position, share in enumerate(shares):
                axes.annotate(f" {share:.2f}", (share, position), va="center")
            axes.set_yticks(range(len(shares)), CHART_BARS.values())
            axes.get_yticklabels()[list(CHART_BARS).index("auto")].set(color=COLOURS["vecenv"], fontweight="bold")
            axes.set_title(report["env"], loc="left", fontsize=15)
            axes.set(xlim=(0, 1))
            axes.invert_yaxis()
            axes.spines[:].set_visible(False)
        axes.set_xlabel("share of the bare loop (upper bound)")
        figure.savefig(path, transparent=True, metadata={"Date": None})


def _read_json(path: Path) -> Any:
    return json.loads(path.read_text()) if path.exists() else None


def _replace_lines(page: Path, marker: str, lines: list[str]) -> None:
    page.write_text(replace_between(page.read_text(), marker, lines))
