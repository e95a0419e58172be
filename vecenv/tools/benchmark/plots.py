"""The pictures: bars with spread for one comparison, lines over the number of environments for several."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from vecenv.tools.benchmark.compare import Report, short_rate, show_rate

COLOURS = {"vecenv": "#1b7f5c", "gymnasium": "#c8553d", "other": "#7a7f87", "limit": "#33373d"}


def new_figure(width: float, height: float) -> Any:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def draw_bars(report: Report, path: Path) -> bool:
    """One bar per candidate at its median, a whisker from least to greatest, and the samples as dots; what died by name.

    Returns:
        Whether there was anything to draw; otherwise no file is written.
    """
    rows = [row for row in report.rows if row.summary or row.failed][::-1]
    if not any(row.summary for row in rows):
        return False
    figure = new_figure(8.0, 1.4 + 0.42 * max(1, len(rows)))
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
    if axes.get_xlim()[1] > 100:
        axes.xaxis.set_major_formatter(lambda rate, _: short_rate(rate))
    axes.set_xlabel(f"{report.unit} (bar: median, whisker: least to greatest, dots: samples)", fontsize=8)
    axes.set_title(f"{report.env}, {report.num_envs} environments, {report.machine['usable_cores']} cores", fontsize=10)
    axes.spines[["top", "right"]].set_visible(False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    return True


def draw_scale(reports: Sequence[Report], path: Path) -> bool:
    """Throughput over the number of environments, one line per candidate, the spread as a band.

    Returns:
        Whether there was anything to draw; otherwise no file is written.
    """
    if not any(row.summary for report in reports for row in report.rows):
        return False
    figure = new_figure(8.0, 5.0)
    axes = figure.subplots()
    names = {row.name: row for report in reports for row in report.rows}
    shades = itertools.count()
    for name, row in names.items():
        points = [(report.num_envs, found.summary) for report in reports if (found := report.row(name))]
        seen = [(size, summary) for size, summary in points if summary]
        if not seen:
            continue
        sizes = [size for size, _ in seen]
        colour = f"C{next(shades)}" if row.kind in ("vecenv", "other") else COLOURS[row.kind]
        style = {"limit": "--", "gymnasium": ":"}.get(row.kind, "-")
        marker = "x" if name == "gym-sync" else "o"
        axes.plot(
            sizes,
            [s.median for _, s in seen],
            style,
            marker=marker,
            color=colour,
            label=row.label,
            markersize=4,
        )
        axes.fill_between(
            sizes,
            [s.minimum for _, s in seen],
            [s.maximum for _, s in seen],
            color=colour,
            alpha=0.12,
            linewidth=0,
        )
    sizes = [report.num_envs for report in reports]
    axes.set_xscale("log", base=2)
    axes.set_xticks(sizes, [str(size) for size in sizes])
    axes.set_ylim(bottom=0)
    axes.yaxis.set_major_formatter(lambda rate, _: short_rate(rate))
    axes.set_xlabel("environments")
    axes.set_ylabel("steps per second (median; band: least to greatest)")
    axes.set_title(f"{reports[0].env}, {reports[0].machine['usable_cores']} cores", fontsize=10)
    axes.legend(fontsize=8, frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    return True
