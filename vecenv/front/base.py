"""What every vector environment here has in common, whatever steps its environments.

``step``, ``reset`` and others have two halves each, of which a subclass may have its own; and what a backend cannot do, it
refuses by name.
"""

from __future__ import annotations

from typing import Any, ClassVar, Final

from vecenv.front.capabilities import unable

__all__ = ["RefusedAttribute", "VectorEnvBase", "refusing"]


HALVES: Final = {
    "step": ("step_async", "step_wait"), "reset": ("reset_async", "reset_wait"), "call": ("call_async", "call_wait"),
    "exec_func": ("exec_func_send", "exec_func_fetch"),
}  # fmt: skip
"""Call -> the two that it is made of."""


class VectorEnvBase:
    """The front of all backends.

    Attributes:
        _halves: Those of the class whose ``step`` makes both in one call, and so on, by name.
        _in_halves: The calls of which a subclass has a half of its own; the guard makes these in two.
        _why_no_attributes, _why_no_snapshots, _why_no_workers: Where a backend does not have these.
    """

    capabilities: Any
    _halves: ClassVar[dict[str, Any]] = {}
    _in_halves: ClassVar[frozenset[str]] = frozenset()
    _why_no_attributes: ClassVar[str] = "its environments are no Python objects"
    _why_no_snapshots: ClassVar[str] = "its environments are a library's own, which gives their state to nobody"
    _why_no_workers: ClassVar[str] = "its environments are stepped by no worker processes"

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        own = {name for name, half in cls._halves.items() if getattr(cls, name) is not half}
        cls._in_halves = frozenset(whole for whole, halves in HALVES.items() if not own.isdisjoint(halves))

    def _make_in_halves(self, whole: str, args: Any, kwargs: Any) -> Any:
        """A call of which a subclass has a half of its own."""
        begin, wait = HALVES[whole]
        getattr(self, begin)(*args, **kwargs)
        return getattr(self, wait)()

    def _need(self, capability: str, name: str) -> None:
        """Refuse ``name`` where there is no such capability.

        Raises:
            NotImplementedError: Says which backend it is, and why.
        """
        if not getattr(self.capabilities, capability, False):
            unable(self, f"`{name}`", getattr(self, f"_why_no_{capability}"))


def refusing(capability: str, name: str) -> Any:
    """A method of a backend without this capability: it says so."""

    def refused(self: VectorEnvBase, *args: Any, **kwargs: Any) -> None:
        self._need(capability, name)

    refused.__name__ = refused.__qualname__ = name
    refused.__doc__ = f"Raise :class:`NotImplementedError`: there are no {capability} here."
    return refused


class _Unable(NotImplementedError, AttributeError):
    """So that ``hasattr`` and ``getattr`` with a default go on telling what there is."""


class RefusedAttribute:
    """An attribute of a backend without this capability: reading it says so."""

    def __init__(self, capability: str) -> None:
        self._capability = capability

    def __set_name__(self, owner: type[Any], name: str) -> None:
        self._name = name

    def __get__(self, instance: Any, owner: type[Any]) -> Any:
        if instance is None:
            return self
        try:
            instance._need(self._capability, self._name)
        except NotImplementedError as error:
            raise _Unable(*error.args) from None
