"""The tables of ``README.md``, ``bench/RESULTS.md`` and ``docs/benchmarks.md``, written only from measurements.

``python -m bench table`` reads all JSON in the folder of results: the goals, the main job, ``compare``,
``sweep``, ``waits``, ``episodes`` and ``train``. A table without new measurements stays as it is.
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
GAINS = ("CartPole-v1", "Ant-v5", "ALE/Pong-v5")  # README.md's rows
REAL = {  # docs/benchmarks.md's rows ...
    **{name: name for name in ("CartPole-v1", "Pendulum-v1", "HalfCheetah-v5", "LunarLander-v3")},
    "MiniGrid-DoorKey-8x8-v0": "MiniGrid DoorKey-8x8",
    **{name: name for name in ("Ant-v5", "ALE/Pong-v5")},
    "busy-1000us": "steps of 1 ms",
    "sleeping": "steps that wait (log-normal, sleeping)",
}
SHOWN = {  # ... and columns
    "auto": "vecenv, auto",
    "gym-sync": "SyncVectorEnv",
    "per-env": "one process per environment",
    "bare-loop": "the bare loop (upper bound)",
}
PICTURED = {  # the bars of README.md's picture
    "auto": 'vecenv, "auto"',
    "per-env": "vecenv, import only",
    "gym-sync": "SyncVectorEnv",
    "gym-async": "AsyncVectorEnv",
}


def between(text: str, marker: str, lines: list[str]) -> str:
    """Return a page with these lines between two markers."""
    begin, end = f"<!-- {marker}: begin -->", f"<!-- {marker}: end -->"
    before, _, rest = text.partition(begin)
    _, found, after = rest.partition(end)
    if not found:
        raise ValueError(f"no {begin} ... {end} in the file")
    return "\n".join([before + begin, *lines, end + after])


def goals_table(out: Path, page: str) -> list[str]:
    """Return the rows of ``bench/RESULTS.md``: measured ones, and the others as they are in ``page``."""
    figures: dict[str, dict[str, str]] = {}
    for part in PARTS:
        path = out / f"goals-{part}.json"
        if path.exists():
            kept = json.loads(path.read_text())
            figures.update({} if kept["quick"] else kept["figures"])
    lines = ["| what | measured | spread | command |", "|---|---|---|---|"]
    for row in ROWS:
        begin = f"| {row.what} |"
        standing = [line for line in page.splitlines() if line.startswith(begin)]
        if row.key not in figures and standing:
            lines += standing[:1]
            continue
        cells = figures.get(row.key, {"measured": NOT_YET, "spread": NOT_YET})
        lines.append(f"{begin} {cells['measured']} | {cells['spread']} | `python -m bench goals {row.part}` |")
    return lines


def main_table(path: Path) -> list[str]:
    """Return the rows of ``docs/benchmarks.md`` from the JSON of ``vecenv bench CartPole-v1 --num-envs 64``."""
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
    """Return a row per workload and a column per engine: the speed-up over Gymnasium's ``AsyncVectorEnv``."""
    against = "gym-async"
    names = list(dict.fromkeys(row["name"] for report in reports for row in report["rows"]))
    names = [name for name in names if name != against]
    lines = [f"| workload | {against}, {reports[0]['unit']} | {' | '.join(names)} |", "|---|---:|" + "---:|" * len(names)]
    for report in reports:
        base = next((row["steps_per_second"] for row in report["rows"] if row["name"] == against), None)
        cells = [_times(report, name, against) for name in names]
        first = f"{report['env']}, {report['num_envs']} | " + (f"{base['median']:,.0f}" if base else "-")
        lines.append(f"| {first} | {' | '.join(cells)} |")
    return lines


def real_table(reports: list[dict[str, Any]]) -> list[str]:
    """Return the rows of ``docs/benchmarks.md`` about real environments, from those of ``compare``."""
    lines = [f"| workload | {' | '.join(SHOWN.values())} |", "|---|" + "---:|" * len(SHOWN)]
    for report in _of(reports, REAL):
        cells = [_times(report, name, "gym-async", spread=True) for name in SHOWN]
        lines.append(f"| {REAL[report['env']]} | {' | '.join(cells)} |")
    return lines


def gains_table(reports: list[dict[str, Any]]) -> list[str]:
    """Return the rows of ``README.md``: ``"auto"`` against both of Gymnasium's engines."""
    lines = ["| environment | against `AsyncVectorEnv` | against `SyncVectorEnv` |", "|---|---:|---:|"]
    for report in _of(reports, GAINS):
        cells = [_times(report, "auto", other) for other in ("gym-async", "gym-sync")]
        lines.append(f"| {report['env']} | {' | '.join(cells)} |")
    return lines


def headline(reports: list[dict[str, Any]]) -> list[str]:
    """Return the first line of ``README.md`` with figures: the gains over both of Gymnasium's engines."""
    found = list(_of(reports, GAINS))
    gains = [
        f"{_times(report, 'auto', 'gym-async')} and {_times(report, 'auto', 'gym-sync')} times on {report['env']}"
        for report in found
    ]
    gains[0] = gains[0].replace(" and ", " times `AsyncVectorEnv` and ").replace(" times on", " times `SyncVectorEnv` on")
    cores = found[0]["machine"]["usable_cores"]
    return [f"- **Faster:** {', '.join(gains)} ({found[0]['num_envs']} environments, {cores} cores)."]


def _of(reports: list[dict[str, Any]], workloads: Iterable[str]) -> list[dict[str, Any]]:
    by_name = {report["env"]: report for report in reversed(reports)}  # the first of a workload's
    return [by_name[name] for name in workloads if name in by_name]


def _ratios(report: dict[str, Any], name: str, against: str) -> list[float]:
    """Return the ratios of one engine's samples to another's, round by round."""
    rates = {row["name"]: row["rates"] for row in report["rows"]}
    pairs = zip(rates.get(name, []), rates.get(against, []), strict=False)
    return [ours / theirs for ours, theirs in pairs if ours is not None and theirs]


def _times(report: dict[str, Any], name: str, against: str, spread: bool = False) -> str:
    """Format the median of the rounds' ratios, with minimum and maximum on request; "-" without any."""
    ratios = _ratios(report, name, against)
    if not ratios:
        return "-"
    middle = statistics.median(ratios)
    text = f"{middle:{'.2g' if middle < 10 else '.0f'}}"
    return f"{text} ({min(ratios):.2g} - {max(ratios):.2g})" if spread else text


def sweep_table(reports: list[dict[str, Any]], memory: dict[str, dict[str, dict[str, int]]]) -> list[str]:
    """Return a row per engine and a column per number of environments: steps per second, and MiB per environment."""
    rates: dict[str, dict[str, str]] = {}
    for report in reports:
        for row in report["rows"]:
            n, rate = str(report["num_envs"]), row["steps_per_second"]
            found = rates.setdefault(row["name"], {})
            if rate:
                found.setdefault(n, f"{rate['median']:,.0f}")  # baselines are in every report; the first is kept
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
    compared = _read(out / "compare.json")
    page = ROOT / "bench" / "RESULTS.md"
    text = page.read_text()
    text = between(text, "goals", goals_table(out, text))
    swept = _read(out / f"{SWEEP}.json")
    if swept:
        text = between(text, "sweep", sweep_table(swept, _read(out / f"{SWEEP}-memory.json") or {}))
    for name in ("compare", "waits", "episodes", "train"):
        if reports := _read(out / f"{name}.json"):
            text = between(text, name, compare_table(reports))
    page.write_text(text)
    if compared:
        _write(ROOT / "README.md", "headline", headline(compared))
        _write(ROOT / "README.md", "gains", gains_table(compared))
        _write(ROOT / "docs" / "benchmarks.md", "real", real_table(compared))
        draw_gains(compared, ROOT / "docs" / "gains.svg")
    main = out / "CartPole-v1-64.json"
    if main.exists():
        _write(ROOT / "docs" / "benchmarks.md", "measured", main_table(main))
        shutil.copyfile(main.with_suffix(".png"), ROOT / "docs" / "cartpole_64.png")
    shares = out / "train-ant-shares.png"
    if shares.exists():
        shutil.copyfile(shares, ROOT / "docs" / "train_ant_shares.png")


def draw_gains(reports: list[dict[str, Any]], path: Path) -> None:
    """Draw the chart of ``README.md``: the share of the bare loop that each engine reaches. For light and dark pages."""
    found = list(_of(reports, GAINS))
    grey = "#7d8590"
    coloured = dict.fromkeys(("text.color", "axes.labelcolor", "xtick.color", "ytick.color"), grey)
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "vecenv", "font.size": 15, **coloured}):
        figure = new_figure(7.0, 1.0 + 0.42 * len(PICTURED) * len(found))
        for axes, each in zip(figure.subplots(len(found), sharex=True, squeeze=False)[:, 0], found, strict=True):
            shares = [statistics.median(_ratios(each, name, "bare-loop") or [0.0]) for name in PICTURED]
            colours = [COLOURS["vecenv"] if name == "auto" else grey for name in PICTURED]
            axes.barh(range(len(shares)), shares, color=colours, height=0.75)
            for place, share in enumerate(shares):
                axes.annotate(f" {share:.2f}", (share, place), va="center")
            axes.set_yticks(range(len(shares)), PICTURED.values())
            axes.get_yticklabels()[list(PICTURED).index("auto")].set(color=COLOURS["vecenv"], fontweight="bold")
            axes.set_title(each["env"], loc="left", fontsize=15)
            axes.set(xlim=(0, 1))
            axes.invert_yaxis()
            axes.spines[:].set_visible(False)
        axes.set_xlabel("share of the bare loop (upper bound)")
        figure.savefig(path, transparent=True, metadata={"Date": None})


def _read(path: Path) -> Any:
    return json.loads(path.read_text()) if path.exists() else None


def _write(page: Path, marker: str, lines: list[str]) -> None:
    page.write_text(between(page.read_text(), marker, lines))
