"""``vecenv.infos_by_row``: the infos of a vector environment as the environments returned them, one per row."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from vecenv.front.infos import ColumnInfos, ListedInfos, RowInfos, info_rows, own_keys
from vecenv.front.vector_env import VectorEnvBase


def infos_by_row(envs: Any) -> InfosByRow:
    """Return a view of a vector environment, with methods that return one info per row.

    ``infos_by_row(envs).step(actions)`` is ``envs.step(actions)`` with a list instead of the dict of arrays: ``infos[i]`` is
    the info that environment i returned, with its original types, not merged. With same-step autoreset, the info of a
    reset also contains the end of the previous episode, as ``info["final_obs"]`` and ``info["final_info"]``.

    Args:
        envs: A vector environment. The infos include all changes and additions that its vector wrappers made. If the vector
            environment merges infos itself, or comes from another library, its dict is split.
    """
    return InfosByRow(envs)


class InfosByRow:
    """A view of a vector environment, from :func:`infos_by_row`. All other attributes are the vector environment's own.

    Attributes:
        envs: The vector environment.
    """

    def __init__(self, envs: Any) -> None:
        self.envs = envs
        base = getattr(envs, "unwrapped", envs)
        self._base = base if isinstance(base, VectorEnvBase) else None
        self._returns_row_infos = isinstance(envs, VectorEnvBase) and envs._supports_row_infos

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(self.envs, name)

    def reset(self, *, seed: Any = None, options: Any = None) -> tuple[Any, list[Any]]:
        """Reset, and return ``(observations, infos)``; see ``reset`` of the vector environment for arguments and errors."""
        observations, infos = self.results("reset", seed=seed, options=options)
        return observations, infos.rows()

    def reset_wait(self, timeout: float | None = None) -> tuple[Any, list[Any]]:
        """Return the results of :meth:`reset`, for a reset that has begun."""
        observations, infos = self.results("reset_wait", timeout)
        return observations, infos.rows()

    def step(self, actions: Any) -> tuple[Any, Any, Any, Any, list[Any]]:
        """Step, and return ``(observations, rewards, terminations, truncations, infos)``."""
        *results, infos = self.results("step", actions)
        return (*results, infos.rows())

    def step_wait(self, timeout: float | None = None) -> tuple[Any, Any, Any, Any, list[Any]]:
        """Return the results of :meth:`step`, for a step that has begun."""
        *results, infos = self.results("step_wait", *([] if timeout is None else [timeout]))
        return (*results, infos.rows())

    def recv(self, timeout: float | None = None, **options: Any) -> tuple[Any, Any, Any, Any, list[Any], Any]:
        """Return the results of :meth:`step` for the next rows, followed by each row's environment index, int ``(k,)``."""
        *results, infos = self.results("recv", timeout, **options)
        return (*results, infos.rows(), np.array(infos.env_ids))

    def results(self, name: str, *args: Any, **kwargs: Any) -> Any:
        """Call a method, and return its results with :class:`~vecenv.front.infos.RowInfos` instead of the infos."""
        method = getattr(self.envs, name)
        if self._returns_row_infos:
            return method(*args, _unmerged=True, **kwargs)
        *results, infos, base_infos = self._call_and_collect(method, *args, **kwargs)
        if isinstance(infos, (list, tuple)):  # Gymnasium's DictInfoToList
            return (*results, ListedInfos(list(infos)))
        env_ids = infos.get("env_id") if name == "recv" or getattr(base_infos, "env_ids", None) is not None else None
        count = self.envs.num_envs if env_ids is None else len(env_ids)
        column_infos = ColumnInfos(infos, count, env_ids)
        if base_infos is None or isinstance(base_infos, ColumnInfos):
            return (*results, column_infos)
        rows = _apply_changes(base_infos.rows(), base_infos.merged(), infos, count)
        return (*results, ListedInfos(rows, env_ids))

    def _call_and_collect(self, method: Callable[..., Any], *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        """Call a method; return its results, followed by the unwrapped environment's :class:`RowInfos`, or ``None``."""
        if self._base is None:
            return (*method(*args, **kwargs), None)
        collected: list[RowInfos] = []
        self._base._collected_infos = collected
        try:
            return (*method(*args, **kwargs), collected[-1] if collected else None)
        finally:
            self._base._collected_infos = None


def _apply_changes(rows: list[Any], before: dict[Any, Any], after: Mapping[Any, Any], count: int) -> list[Any]:
    """Change the infos of ``rows`` as wrappers have changed the merged dict of arrays, from ``before`` to ``after``."""
    removed = [key for key in own_keys(before) if key not in after]
    changed = {
        key: after[key]
        for key in own_keys(after)
        if key not in before or not all(_is_same(before.get(name), after.get(name)) for name in (key, f"_{key}"))
    }
    if not removed and not changed:
        return rows
    masks = {f"_{key}": after[f"_{key}"] for key in changed if f"_{key}" in after}
    changes = info_rows({**changed, **masks}, count)
    for info, info_changes in zip(rows, changes, strict=True):
        for key in (*removed, *changed):
            info.pop(key, None)
        info.update(info_changes)
    return rows


def _is_same(before: Any, after: Any) -> bool:
    if before is after:
        return True
    if isinstance(before, dict) and isinstance(after, dict):
        return before.keys() == after.keys() and all(_is_same(before[key], after[key]) for key in before)
    if not (isinstance(before, np.ndarray) and isinstance(after, np.ndarray)) or before.dtype != after.dtype:
        return False
    if before.dtype.hasobject:
        return before.shape == after.shape and all(map(_is_same_value, before.reshape(-1), after.reshape(-1)))
    return before.shape == after.shape and before.tobytes() == after.tobytes()


def _is_same_value(before: Any, after: Any) -> bool:
    """True if a wrapper left an object unchanged, or equal: each merge reads new objects from shared memory."""
    return before is after or (type(before) is type(after) and isinstance(before, (int, float, str)) and before == after)
