"""The last steps before a driver's result is returned: its infos are merged, and the steps of action chunks are counted."""

from __future__ import annotations

from typing import Any

from vecenv.errors import InfoError
from vecenv.front.infos import ColumnInfos, RowInfos, executed_steps


def as_row_infos(infos: RowInfos | dict[Any, Any], count: int) -> RowInfos:
    """Return the infos of a driver's result of ``count`` rows, even if its library has merged them."""
    return infos if isinstance(infos, RowInfos) else ColumnInfos(infos, count, infos.get("env_id"))


def finish_merged(driver: Any, stepped: Any, infos: RowInfos) -> tuple[Any, ...]:
    """Return a driver's result with Gymnasium's dict of arrays.

    Raises:
        InfoError: An info is not a dict. The call is complete nevertheless.
    """
    observations, rewards, terminations, truncations, _ = stepped
    try:
        merged = infos.merged()
    except InfoError as error:
        error.result = (observations, rewards, terminations, truncations, infos.rows())
        driver.result_error = error
        raise
    if "chunk_steps" in merged or "final_info" in merged:
        _count_chunks(driver, executed_steps(merged, len(rewards)), len(rewards))
    return observations, rewards, terminations, truncations, merged


def finish_unmerged(driver: Any, stepped: Any, infos: RowInfos) -> tuple[Any, ...]:
    """Return a driver's result with its :class:`~vecenv.front.infos.RowInfos`."""
    observations, rewards, terminations, truncations, _ = stepped
    _count_chunks(driver, infos.executed_steps(), len(rewards))
    return observations, rewards, terminations, truncations, infos


def _count_chunks(driver: Any, steps: Any, count: int) -> None:
    """Count the environment steps that action chunks executed beyond one per row."""
    if not isinstance(steps, int):
        driver.counters.steps += int(steps.sum()) - count
