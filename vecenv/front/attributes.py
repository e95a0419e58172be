"""The calls that reach into environments, for backends whose environments are no Python objects: they say why not."""

from __future__ import annotations

from typing import Any, ClassVar, NoReturn

from vecenv.front.capabilities import unable

__all__ = ["NoAttributes", "NoSnapshots"]


def _refused(name: str) -> Any:
    def refused(self: NoAttributes, *args: Any, **kwargs: Any) -> NoReturn:
        unable(self, f"`{name}`", self._why_no_attributes)

    refused.__name__ = name
    refused.__qualname__ = f"NoAttributes.{name}"
    refused.__doc__ = "Raise :class:`NotImplementedError`: the environments are no Python objects."
    return refused


class NoAttributes:
    """Refuses what needs Python environments, with the reason."""

    _why_no_attributes: ClassVar[str] = "its environments are no Python objects"

    call = _refused("call")
    call_async = call_send = _refused("call_async")
    call_wait = call_fetch = _refused("call_wait")
    exec_func = _refused("exec_func")
    exec_func_send = _refused("exec_func_send")
    exec_func_fetch = _refused("exec_func_fetch")
    get_attr = _refused("get_attr")
    set_attr = _refused("set_attr")
    set_next_options = _refused("set_next_options")


def _not_kept(name: str) -> Any:
    def refused(self: NoSnapshots, *args: Any, **kwargs: Any) -> NoReturn:
        unable(self, f"`{name}`", self._why_no_snapshots)

    refused.__name__ = name
    refused.__qualname__ = f"NoSnapshots.{name}"
    refused.__doc__ = "Raise :class:`NotImplementedError`: the engine gives no state away."
    return refused


class NoSnapshots:
    """Refuses to save and to load, with the reason."""

    _why_no_snapshots: ClassVar[str] = "its environments are a library's own, which gives their state to nobody"

    save = _not_kept("save")
    load = _not_kept("load")
    state_dict = _not_kept("state_dict")
    load_state_dict = _not_kept("load_state_dict")
