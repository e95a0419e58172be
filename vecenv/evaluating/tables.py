"""Tables of results: statistics for each group of episodes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import NormalDist
from typing import Any

import numpy as np

from vecenv.errors import how_to_install


def make_table(by: str, groups: Mapping[Any, Sequence[Any]]) -> Any:
    """Build a ``rich.table.Table`` with one row per group, and one for all episodes if there are several groups.

    Raises:
        ImportError: rich is not installed.
    """
    try:
        from rich.table import Table
        from rich.text import Text
    except ImportError as error:
        raise ImportError(f"a table needs rich: {how_to_install('bench')}") from error
    table = Table(by, "episodes", "mean", "95% interval", "length", "failures")
    table.columns[0].overflow = "fold"
    for column in table.columns[1:]:
        column.justify, column.no_wrap = "right", True
    for group, results in groups.items():
        # as Text, because in a string "[...]" would be markup
        table.add_row(Text(str(group)), *_cells(results), end_section=len(groups) > 1 and group == list(groups)[-1])
    if len(groups) > 1:
        table.add_row("all", *_cells([result for results in groups.values() for result in results]))
    return table


def _cells(results: Sequence[Any]) -> list[str]:
    completed = [result for result in results if result.error is None]
    statistics = ("-", "-", "-")
    if completed:
        returns = [result.episode_return for result in completed]
        average, interval = np.mean(returns), "-"
        if len(returns) > 1:
            half_width = _t_quantile(len(returns) - 1) * np.std(returns, ddof=1) / math.sqrt(len(returns))
            interval = f"{average - half_width:.4g} to {average + half_width:.4g}"
        statistics = f"{average:.4g}", interval, f"{np.mean([result.length for result in completed]):.4g}"
    return [str(len(results)), *statistics, str(len(results) - len(completed))]


def _t_quantile(degrees_of_freedom: int) -> float:
    """Return the 97.5% quantile of Student's t-distribution, accurate to 0.2%."""
    if degrees_of_freedom <= 4:
        return (12.706, 4.303, 3.182, 2.776)[degrees_of_freedom - 1]
    z = NormalDist().inv_cdf(0.975)
    return (  # the Cornish-Fisher expansion
        z
        + (z**3 + z) / (4 * degrees_of_freedom)
        + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * degrees_of_freedom**2)
        + (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * degrees_of_freedom**3)
    )
