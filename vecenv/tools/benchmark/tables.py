"""What the terminal shows: a progress bar while it runs, a table at the end."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from vecenv.tools.benchmark.compare import Report, Row, short_rate, show_rate
from vecenv.tools.benchmark.hosts import Progress

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

WIDTH = 140  # of a table that does not go to a terminal, where COLUMNS does not say it
_WIDE = 110  # from here on there is room for whole numbers ...
_WIDEST = 134  # ... and for quartiles


@contextmanager
def progress_bar() -> Iterator[Progress]:
    """A bar on stderr, so that stdout holds nothing but the results; nothing at all where stderr is no terminal."""
    from rich.console import Console
    from rich.progress import BarColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as Bar

    console = Console(stderr=True)
    if not console.is_terminal:
        yield lambda stage, done, total: None
        return
    columns = (BarColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Bar(*columns, console=console, transient=True) as bar:
        task = bar.add_task("starting", total=None)

        def show(stage: str, done: int, total: int) -> None:
            bar.update(task, description=stage, completed=done, total=total or None)  # it pulses until the rounds begin

        yield show


_AGAINST = {"gym-async": ("x Gymnasium Async", "x Async", ".2f"), "limit": ("of the limit", "of limit", ".3f")}
"""What rows are compared with, where it took part: its column's heading, a narrow one, and how a ratio is written."""


def _cells(report: Report, row: Row, width: int) -> list[str]:
    summary = row.summary
    if summary is None or row.failed:
        return ["died" if row.failed else "left out"]
    rate = show_rate if width >= _WIDE else short_rate
    quartiles = [f"{rate(summary.lower)} - {rate(summary.upper)}"] if width >= _WIDEST else []
    return [
        show_rate(summary.median),
        *quartiles,
        f"{rate(summary.minimum)} - {rate(summary.maximum)}",
        *(
            f"{ratio.median:{_AGAINST[name][2]}}" if (ratio := report.ratio(row.name, name)) else "-"
            for name in _baselines(report)
        ),
    ]


def _baselines(report: Report) -> list[str]:
    return [name for name in _AGAINST if report.row(name)]


def _width() -> int | None:
    """The width to print at; ``None``: rich finds out, by COLUMNS or of the terminal."""
    return None if sys.stdout.isatty() or os.environ.get("COLUMNS", "").isdigit() else WIDTH


def _console() -> Console:
    from rich.console import Console

    return Console(width=_width(), highlight=False)


@contextmanager
def _no_trailing_blanks(console: Console) -> Iterator[None]:
    """Where no terminal shows it, a table's lines end with their last words."""
    if console.is_terminal:
        yield
        return
    with console.capture() as capture:
        yield
    sys.stdout.writelines(f"{line.rstrip()}\n" for line in capture.get().splitlines())


def print_report(report: Report) -> None:
    """The table of one comparison, and below it why rows are empty. In a narrow terminal it has fewer columns."""
    from rich.table import Table

    console = _console()
    wide, about = console.width >= _WIDE, report.machine
    narrow: dict[str, Any] = {} if wide else {"box": None, "padding": (0, 2, 0, 0), "pad_edge": False}
    table = Table(
        title=f"{report.env}, {report.num_envs} environments: {report.repeats} interleaved rounds of {report.seconds:g} s",
        caption=f"{about['cpu']}, {about['usable_cores']} usable cores; Python {about['python']}, "
        f"Gymnasium {about['gymnasium']}. Ratios are medians of the rounds' own ratios, "
        "so they can differ from a quotient of the first column. Where they do, the machine was busy: measure again.",
        title_justify="left",
        caption_justify="left",
        **narrow,
    )
    quartiles = ("quartiles",) if console.width >= _WIDEST else ()
    table.add_column("engine")
    against = [_AGAINST[name][0 if wide else 1] for name in _baselines(report)]
    spread = "least to greatest" if wide else "least - most"
    for heading in (report.unit, *quartiles, spread, *against):
        table.add_column(heading, justify="right", no_wrap=True)
    for row in report.rows:
        table.add_row(row.label, *_cells(report, row, console.width), style="bold" if row.kind == "vecenv" else None)
    with _no_trailing_blanks(console):
        _print_parts(console, report, table)


def _print_parts(console: Console, report: Report, table: Table) -> None:
    console.print(f"Trajectories: {report.check}.")
    console.print(table)
    if report.lock_step is not None:
        console.print(
            f"A step that waits for all workers can reach {report.lock_step:.2f} of the limit: what a row is "
            "below that, its engine costs."
        )
    auto = report.row("auto")
    if auto and auto.description:
        console.print(f"auto chose {auto.description}", markup=False)
    _print_reasons(console, report.rows)


def _print_reasons(console: Console, rows: Sequence[Row], where: str = "") -> None:
    for row in rows:
        if row.failed:
            console.print(f"{row.label}{where} died: {row.failed}", markup=False)
        elif row.missing:
            console.print(f"{row.label}{where} left out: {row.missing}", markup=False)


def print_scale(reports: Sequence[Report]) -> None:
    """Medians over the number of environments."""
    from rich.table import Table

    console = _console()
    rate = show_rate if console.width >= _WIDE else short_rate
    table = Table(title=f"{reports[0].env}: steps per second over the number of environments (median)", title_justify="left")
    table.add_column("engine")
    for report in reports:
        table.add_column(str(report.num_envs), justify="right", no_wrap=True)
    labels = {row.name: row.label for row in reports[-1].rows}  # the largest has all of them
    for name, label in labels.items():
        summaries = [row.summary if (row := report.row(name)) else None for report in reports]
        table.add_row(label, *(rate(summary.median) if summary else "-" for summary in summaries))
    with _no_trailing_blanks(console):
        console.print(table)
        for report in reports:
            _print_reasons(console, report.rows, f", {report.num_envs} environments,")
