"""The last steps before a driver's result is returned: its infos are merged, and the steps of action chunks are counted."""

from __future__ import annotations

from typing import Any

from vecenv.errors import InfoError
from vecenv.front.infos import ColumnInfos, RowInfos, executed_steps


def as_row_infos(infos: RowInfos | dict[Any, Any], count: int) -> RowInfos:
    """Return the infos of a driver's result of ``count`` rows, even if its library has merged them."""
    return infos if isinstance(infos, RowInfos) else ColumnInfos(infos, count, infos.get("env_id"))


def finish_result(driver: Any, stepped: Any, infos: RowInfos, *, unmerged: bool) -> tuple[Any, ...]:
    """Return a driver's result with Gymnasium's dict of arrays; with ``unmerged``, with its :class:`RowInfos`.

    Raises:
        InfoError: An info is not a dict. The call is complete nevertheless.
    """
    observations, rewards, terminations, truncations, _ = stepped
    returned: Any = infos
    steps: Any = 1
    if unmerged:
        steps = infos.executed_steps()
    else:
        try:
            returned = infos.merged()
        except InfoError as error:
            error.result = (observations, rewards, terminations, truncations, infos.rows())
            driver.result_error = error
            raise
        if "chunk_steps" in returned or "final_info" in returned:
            steps = executed_steps(returned, len(rewards))
    if not isinstance(steps, int):  # action chunks: count their environment steps beyond one per row
        driver.counters.steps += int(steps.sum()) - len(rewards)
    return observations, rewards, terminations, truncations, returned
