"""The table of calls and backends in Markdown."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from .backends import BACKENDS
from .calls import CALLS

BEGIN, END = "<!-- table: begin -->", "<!-- table: end -->"
_WORST_FIRST = ("FAILED", "not yet", "yes", "refused")


def build_table(stats: Mapping[str, Iterable[Any]]) -> str:
    """Return the table for pytest's reports, which are grouped by category."""
    cells: dict[tuple[str, str], str] = {}
    for category, reports in stats.items():
        for report in reports:
            properties = dict(getattr(report, "user_properties", ()))
            if "call" in properties and category in ("passed", "failed", "error", "xfailed"):
                if category == "passed" and report.when != "call":
                    continue
                passed = "refused" if "refused" in properties else "yes"
                cell = {"passed": passed, "xfailed": "not yet"}.get(category, "FAILED")
                place = properties["call"], properties["backend"]
                cells[place] = min(cell, cells.get(place, cell), key=_WORST_FIRST.index)
    return format_table(cells)


def format_table(cells: Mapping[tuple[str, str], str]) -> str:
    """Return Markdown with a row for each call."""
    names = [backend.name for backend in BACKENDS]
    rows = [[call, *(cells.get((call, name), "-") for name in names)] for call in CALLS.values()]
    return "\n".join(f"| {' | '.join(row)} |" for row in [["call", *names], ["---"] * (len(names) + 1), *rows])


def read_headings(page: str) -> tuple[list[str], list[str]]:
    """Return the calls and the backends of the table in a page."""
    lines = page.splitlines()
    head = next(index for index, line in enumerate(lines) if line.startswith("| call | two-workers"))
    rows = []
    for line in lines[head + 2 :]:
        if not line.startswith("|"):
            break
        rows.append(line.split("|")[1].strip())
    return rows, [cell.strip() for cell in lines[head].split("|")[2:-1]]


def replace_table(page: Path, new_table: str) -> None:
    """Replace the table between the two marks of a page."""
    before, _, rest = page.read_text().partition(BEGIN)
    page.write_text(f"{before}{BEGIN}\n{new_table}\n{END}{rest.partition(END)[2]}")
