"""What ``vecenv bench`` shows: a progress bar while it runs, a table at the end, and pictures.

Tables fit into 80 columns, so that they look the same in every terminal and in a file.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from vecenv.tools.benchmark import Progress, Report, ResultRow

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

__all__ = [
    "COLOURS",
    "draw_bars",
    "draw_scale",
    "new_figure",
    "print_report",
    "print_scale",
    "progress_bar",
    "save",
    "show_rate",
]

COLOURS: Final = {"vecenv": "#1b7f5c", "gymnasium": "#c8553d", "other": "#7a7f87", "bound": "#33373d"}
_AGAINST: Final = {"gym-async": ("x Async", ".2f"), "bare-loop": ("of bare loop", ".3f")}
"""What rows are compared with, where it took part: the heading of its column, and how a ratio is written."""


def show_rate(rate: float) -> str:
    """A rate in three digits and a unit."""
    if rate < 1e3:
        return f"{rate:.3g}"
    number, unit = (rate / 1e3, "k") if rate < 999_500 else (rate / 1e6, "M")
    return f"{number:.{0 if number >= 99.95 else 1 if number >= 9.995 else 2}f}{unit}"


@contextmanager
def progress_bar() -> Iterator[Progress]:
    """A bar on stderr, so that stdout holds nothing but the results; nothing at all where stderr is no terminal."""
    from rich.console import Console
    from rich.progress import BarColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as Bar

    console = Console(stderr=True)
    columns = (BarColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Bar(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("starting", total=None)  # it pulses until the rounds begin
        yield lambda stage, done, total: bar.update(task, description=stage, completed=done, total=total or None)


# --- tables -----------------------------------------------------------------------------------------


def _console() -> Console:
    from rich.console import Console

    return Console(highlight=False, markup=False)


def _table(*headings: str) -> Table:
    from rich.table import Table

    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
    table.add_column("engine")
    for heading in headings:
        table.add_column(heading, justify="right", no_wrap=True)
    return table


def _style(row: ResultRow) -> str | None:
    return "bold" if row.kind == "vecenv" else None


def print_report(report: Report) -> None:
    """The table of one comparison, and below it why rows are empty."""
    console, about = _console(), report.machine
    baselines = [name for name in _AGAINST if report.row(name)]
    table = _table(report.unit, "least - most", *(_AGAINST[name][0] for name in baselines))
    for row in report.rows:
        summary = row.summary
        if summary is None or row.failed:
            table.add_row(row.label, "died" if row.failed else "left out")
            continue
        ratios = [(_AGAINST[name][1], report.ratio(row.name, name)) for name in baselines]
        table.add_row(
            row.label,
            f"{summary.median:,.0f}" if summary.median >= 100 else f"{summary.median:.3g}",
            f"{show_rate(summary.minimum)} - {show_rate(summary.maximum)}",
            *(f"{ratio.median:{form}}" if ratio else "-" for form, ratio in ratios),
            style=_style(row),
        )
    rounds = f"{report.repeats} interleaved rounds of {report.seconds:g} s"
    _print_lines(console, f"Trajectories: {report.check}.", f"{report.env}, {report.num_envs} environments: {rounds}")
    console.print(table)
    versions = f"Python {about['python']}, Gymnasium {about['gymnasium']}"
    _print_lines(console, f"{about['cpu']}, {about['usable_cores']} usable cores; {versions}")
    if "bare-loop" in baselines:
        _print_lines(console, "The bare loop is the upper bound: env.step and nothing else, on all cores.")
    load = (about.get("load_average") or [0.0])[0]
    if load > about["usable_cores"] + 1:
        _print_lines(console, f"The machine was busy (load {load:.1f}): other programs cost part of what rows lack.")
    auto = report.row("auto")
    if auto and auto.description:
        _print_lines(console, f"auto chose {auto.description}")
    _print_reasons(console, report.rows)


def _print_lines(console: Console, *lines: str) -> None:
    for line in lines:
        console.print(line, soft_wrap=True)


def _print_reasons(console: Console, rows: Sequence[ResultRow], where: str = "") -> None:
    for row in rows:
        if row.failed:
            _print_lines(console, f"{row.label}{where} died: {row.failed}")
        elif row.missing:
            _print_lines(console, f"{row.label}{where} left out: {row.missing}")


def print_scale(reports: Sequence[Report]) -> None:
    """Medians over the number of environments."""
    console, table = _console(), _table(*(str(report.num_envs) for report in reports))
    for last in reports[-1].rows:  # the largest has all of them
        summaries = [row.summary if (row := report.row(last.name)) else None for report in reports]
        table.add_row(last.label, *(show_rate(each.median) if each else "-" for each in summaries), style=_style(last))
    _print_lines(console, f"{reports[0].env}: steps per second over the number of environments (median)")
    console.print(table)
    for report in reports:
        _print_reasons(console, report.rows, f", {report.num_envs} environments,")


# --- pictures ---------------------------------------------------------------------------------------


def new_figure(width: float, height: float) -> Any:
    """A figure that needs no screen."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def save(figure: Any, path: Path) -> bool:
    """Write a figure, without the upper and the right line of its frames."""
    for axes in figure.axes:
        axes.spines[["top", "right"]].set_visible(False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    return True


def draw_bars(report: Report, path: Path) -> bool:
    """One bar per candidate at its median, a whisker from least to greatest, and the samples as dots; what died by name.

    Returns:
        Whether there was anything to draw; otherwise no file is written.
    """
    rows = [row for row in report.rows if row.summary or row.failed][::-1]
    if not any(row.summary for row in rows):
        return False
    figure = new_figure(8.0, 1.4 + 0.42 * len(rows))
    axes = figure.subplots()
    for y, row in enumerate(rows):
        summary = row.summary
        if summary is None or row.failed:
            axes.annotate(" died", (0.0, y), va="center", fontsize=8, color=COLOURS["gymnasium"])
            continue
        spread = [[summary.median - summary.minimum], [summary.maximum - summary.median]]
        axes.barh(y, summary.median, xerr=spread, color=COLOURS[row.kind], height=0.7, capsize=3, ecolor="#00000088")
        axes.plot(row.rates, [y] * len(row.rates), ".", color="#000000", alpha=0.35, markersize=4)
        axes.annotate(f" {show_rate(summary.median)}", (summary.maximum, y), va="center", fontsize=8)
    axes.set_yticks(range(len(rows)), [row.label for row in rows], fontsize=9)
    axes.margins(x=0.15)
    axes.set_xlim(left=0)
    axes.locator_params(axis="x", nbins=6)
    axes.xaxis.set_major_formatter(lambda rate, _: show_rate(rate))
    axes.set_xlabel(f"{report.unit} (bar: median, whisker: least to greatest, dots: samples)", fontsize=8)
    axes.set_title(f"{report.env}, {report.num_envs} environments, {report.machine['usable_cores']} cores", fontsize=10)
    return save(figure, path)


def draw_scale(reports: Sequence[Report], path: Path) -> bool:
    """Throughput over the number of environments, one line per candidate, the spread as a band.

    Returns:
        Whether there was anything to draw; otherwise no file is written.
    """
    if not any(row.summary for report in reports for row in report.rows):
        return False
    figure = new_figure(8.0, 5.0)
    axes = figure.subplots()
    for name, row in {row.name: row for report in reports for row in report.rows}.items():
        found = [(report.num_envs, other.summary) for report in reports if (other := report.row(name)) and other.summary]
        sizes, summaries = [size for size, _ in found], [summary for _, summary in found]
        style = {
            "bound": {"color": COLOURS["bound"], "linestyle": "--"},
            "gymnasium": {"color": COLOURS["gymnasium"], "linestyle": ":"},
        }.get(row.kind, {})
        (line,) = axes.plot(sizes, [each.median for each in summaries], marker="o", label=row.label, markersize=4, **style)
        least, most = [each.minimum for each in summaries], [each.maximum for each in summaries]
        axes.fill_between(sizes, least, most, color=line.get_color(), alpha=0.12, linewidth=0)
    sizes = [report.num_envs for report in reports]
    axes.set_xscale("log", base=2)
    axes.set_xticks(sizes, [str(size) for size in sizes])
    axes.set_ylim(bottom=0)
    axes.yaxis.set_major_formatter(lambda rate, _: show_rate(rate))
    axes.set_xlabel("environments")
    axes.set_ylabel("steps per second (median; band: least to greatest)")
    axes.set_title(f"{reports[0].env}, {reports[0].machine['usable_cores']} cores", fontsize=10)
    axes.legend(fontsize=8, frameon=False)
    return save(figure, path)
