"""The table of the contract in Markdown: a row per call and a column per backend."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from .backends import BACKENDS
from .calls import CALLS

BEGIN, END = "<!-- table: begin -->", "<!-- table: end -->"
_WORST_FIRST = ("FAILED", "not yet", "yes", "refused")


def build_table(stats: Mapping[str, Iterable[Any]]) -> str:
    """Return the table of pytest's reports. ``stats`` contains the reports by category."""
    cells: dict[tuple[str, str], str] = {}
    for category, reports in stats.items():
        for report in reports:
            properties = dict(getattr(report, "user_properties", ()))
            if "call" in properties and category in ("passed", "failed", "error", "xfailed"):
                if category == "passed" and report.when != "call":
                    continue
                passed = "refused" if "refused" in properties else "yes"
                cell = {"passed": passed, "xfailed": "not yet"}.get(category, "FAILED")
                key = properties["call"], properties["backend"]
                cells[key] = min(cell, cells.get(key, cell), key=_WORST_FIRST.index)
    return format_table(cells)


def format_table(cells: Mapping[tuple[str, str], str]) -> str:
    """Return the table with these cells, which are keyed by call and backend."""
    names = [backend.name for backend in BACKENDS]
    header, rule = ["call", *names], ["---"] * (len(names) + 1)
    rows = [[call, *(cells.get((call, name), "-") for name in names)] for call in CALLS.values()]
    return "\n".join(f"| {' | '.join(row)} |" for row in (header, rule, *rows))


def read_headings(page: str) -> tuple[list[str], list[str]]:
    """Return the calls and the backends of the table in the text of a page."""
    lines = page.splitlines()
    header = next(index for index, line in enumerate(lines) if line.startswith("| call | two-workers"))
    calls = []
    for line in lines[header + 2 :]:
        if not line.startswith("|"):
            break
        calls.append(line.split("|")[1].strip())
    return calls, [cell.strip() for cell in lines[header].split("|")[2:-1]]


def replace_table(page: Path, new_table: str) -> None:
    """Replace the table between the markers ``BEGIN`` and ``END`` of a page."""
    before, _, rest = page.read_text().partition(BEGIN)
    page.write_text(f"{before}{BEGIN}\n{new_table}\n{END}{rest.partition(END)[2]}")
