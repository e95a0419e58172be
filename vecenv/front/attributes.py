"""The calls that reach into environments, for backends whose environments are no Python objects: they say why not."""

from __future__ import annotations

from typing import Any, ClassVar, NoReturn

from vecenv.front.capabilities import unable

__all__ = ["NoAttributes"]


class NoAttributes:
    """Refuses ``call``, ``exec_func``, ``get_attr`` and ``set_attr``, with their halves, by :class:`NotImplementedError`."""

    _why_no_attributes: ClassVar[str] = "its environments are no Python objects"

    def _have_none(self, method: str) -> NoReturn:
        unable(self, f"`{method}`", self._why_no_attributes)

    def call(self, name: str, *args: Any, **kwargs: Any) -> NoReturn:
        """Not here."""
        self._have_none("call")

    def call_async(self, name: str, /, *args: Any, **kwargs: Any) -> NoReturn:
        """Not here."""
        self._have_none("call_async")

    def call_wait(self, timeout: float | None = None) -> NoReturn:
        """Not here."""
        self._have_none("call_wait")

    def exec_func(self, func: Any, indices: Any = None, *args: Any, **kwargs: Any) -> NoReturn:
        """Not here."""
        self._have_none("exec_func")

    def exec_func_send(self, func: Any, indices: Any = None, *args: Any, **kwargs: Any) -> NoReturn:
        """Not here."""
        self._have_none("exec_func_send")

    def exec_func_fetch(self, timeout: float | None = None) -> NoReturn:
        """Not here."""
        self._have_none("exec_func_fetch")

    def get_attr(self, name: str) -> NoReturn:
        """Not here."""
        self._have_none("get_attr")

    def set_attr(self, name: str, values: Any) -> NoReturn:
        """Not here."""
        self._have_none("set_attr")

    call_send = call_async
    call_fetch = call_wait
