"""The calls that reach into environments, for backends whose environments are no Python objects: they say why not."""

from __future__ import annotations

from functools import partial
from typing import Any, ClassVar, NoReturn

from vecenv.front.capabilities import unable

__all__ = ["NoAttributes", "NoSnapshots"]


def _refused(owner: str, name: str, told: str) -> Any:
    """A method of ``owner`` that refuses, with the reason that ``_why_no_...`` of the class gives."""
    why = f"_why_no_{owner.removeprefix('No').lower()}"

    def refused(self: Any, *args: Any, **kwargs: Any) -> NoReturn:
        unable(self, f"`{name}`", getattr(self, why))

    refused.__name__ = name
    refused.__qualname__ = f"{owner}.{name}"
    refused.__doc__ = f"Raise :class:`NotImplementedError`: {told}."
    return refused


_attribute = partial(_refused, "NoAttributes", told="the environments are no Python objects")
_snapshot = partial(_refused, "NoSnapshots", told="the engine gives no state away")


class NoAttributes:
    """Refuses what needs Python environments, with the reason."""

    _why_no_attributes: ClassVar[str] = "its environments are no Python objects"

    call = _attribute("call")
    call_async = call_send = _attribute("call_async")
    call_wait = call_fetch = _attribute("call_wait")
    exec_func = _attribute("exec_func")
    exec_func_send = _attribute("exec_func_send")
    exec_func_fetch = _attribute("exec_func_fetch")
    get_attr = _attribute("get_attr")
    set_attr = _attribute("set_attr")
    set_next_options = _attribute("set_next_options")


class NoSnapshots:
    """Refuses to save and to load, with the reason."""

    _why_no_snapshots: ClassVar[str] = "its environments are a library's own, which gives their state to nobody"

    save = _snapshot("save")
    load = _snapshot("load")
    state_dict = _snapshot("state_dict")
    load_state_dict = _snapshot("load_state_dict")
