"""The tables of ``bench/README.md`` and ``docs/benchmarks.md``, written from what was measured and from nothing else.

``python -m bench table`` takes whatever JSON it finds in the folder of results: the goals, the main job, ``compare``
and ``sweep``. A table of which nothing was measured anew stays as it stands.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from bench.goals import PARTS, ROWS

ROOT = Path(__file__).resolve().parent.parent
NOT_YET = "not measured yet"
SWEEP = "sweep-CartPole-v1"


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
    """The rows of ``docs/benchmarks.md`` from the JSON of ``vecenv bench CartPole-v1 --num-envs 64``."""
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


def compare_table(reports: list[dict[str, Any]]) -> list[str]:
    """A line a workload, a column an engine: how many times faster than Gymnasium's ``AsyncVectorEnv``."""
    names = list(dict.fromkeys(row["name"] for report in reports for row in report["rows"]))
    names = [name for name in names if name != "gym-async"]
    lines = [f"| workload | gym-async, steps/s | {' | '.join(names)} |", "|---|---:|" + "---:|" * len(names)]
    for report in reports:
        rows = {row["name"]: row for row in report["rows"]}
        base = rows.get("gym-async", {}).get("steps_per_second")
        against = [rows.get(name, {}).get("ratios", {}).get("gym-async") for name in names]
        cells = [f"{found['median']:{'.2g' if found['median'] < 10 else '.0f'}}" if found else "-" for found in against]
        first = f"{report['env']}, {report['num_envs']} | " + (f"{base['median']:,.0f}" if base else "-")
        lines.append(f"| {first} | {' | '.join(cells)} |")
    return lines


def sweep_table(reports: list[dict[str, Any]], memory: dict[str, dict[str, dict[str, int]]]) -> list[str]:
    """A line an engine, a column a number of environments: steps a second, and MiB an environment."""
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
    """Write every table for which there is something in ``out``."""
    page = ROOT / "bench" / "README.md"
    text = page.read_text()
    text = _between(text, "goals", goals_table(out, text))
    compared, swept, memory = (out / name for name in ("compare.json", f"{SWEEP}.json", f"{SWEEP}-memory.json"))
    if compared.exists():
        text = _between(text, "compare", compare_table(json.loads(compared.read_text())))
    if swept.exists():
        used = json.loads(memory.read_text()) if memory.exists() else {}
        text = _between(text, "sweep", sweep_table(json.loads(swept.read_text()), used))
    page.write_text(text)
    main = out / "CartPole-v1-64.json"
    if main.exists():
        page = ROOT / "docs" / "benchmarks.md"
        page.write_text(_between(page.read_text(), "measured", main_table(main)))
        shutil.copyfile(main.with_suffix(".png"), ROOT / "docs" / "cartpole_64.png")
