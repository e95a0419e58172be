"""Pictures of several comparisons together."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from bench.suites import Memory
from vecenv.tools.benchmark import Report
from vecenv.tools.report import COLOURS, new_figure, save, show_rate


def draw_matrix(reports: Sequence[Report], path: Path) -> None:
    """A panel for each comparison, its bars as shares of the fastest engine."""
    columns = min(4, len(reports))
    rows = -(-len(reports) // columns)
    height = max(len(report.rows) for report in reports) * 0.22 + 0.6
    figure = new_figure(4.2 * columns, height * rows)
    panels = figure.subplots(rows, columns, squeeze=False)
    for axes in panels.flat[len(reports) :]:
        axes.set_visible(False)
    for axes, report in zip(panels.flat, reports, strict=False):
        shown = [(row, row.summary) for row in report.rows if row.summary][::-1]
        top = max((summary.median for _, summary in shown if summary), default=1.0)
        for y, (row, summary) in enumerate(shown):
            assert summary is not None
            axes.barh(y, summary.median / top, color=COLOURS[row.kind], height=0.75)
            axes.plot(
                [summary.minimum / top, summary.maximum / top],
                [y, y],
                color="#000000",
                linewidth=1,
                alpha=0.6,
            )
        axes.set_yticks(range(len(shown)), [row.name for row, _ in shown], fontsize=7)
        axes.set_xlim(0, 1.15)
        axes.tick_params(axis="x", labelsize=7)
        axes.set_title(f"{report.env}, {report.num_envs} envs (1 = {show_rate(top)} {report.unit})", fontsize=8)
        save(figure, path)


def draw_memory(memory: dict[int, dict[str, Memory]], path: Path) -> None:
    """Bytes an environment over the number of environments, trainer and workers together."""
    figure = new_figure(8.0, 5.0)
    axes = figure.subplots()
    names = {name for found in memory.values() for name in found}
    for name in sorted(names):
        points = [(n, found[name]) for n, found in sorted(memory.items()) if name in found]
        axes.plot(
            [n for n, _ in points],
            [(m.trainer + m.workers) / n / 2**20 for n, m in points],
            marker="o",
            label=name,
        )
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(sorted(memory), [str(n) for n in sorted(memory)])
    axes.set_xlabel("environments")
    axes.set_ylabel("MiB an environment (proportional set size)")
    axes.legend(fontsize=8, frameon=False)
    save(figure, path)
