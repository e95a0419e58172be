"""What every vector environment here has in common, whatever steps its environments.

A ``step`` has two halves, which a subclass may have its own of; and what a backend cannot do it refuses by name.
"""

from __future__ import annotations

from typing import Any, ClassVar

from vecenv.front.capabilities import unable

__all__ = ["RefusedAttribute", "VectorEnvBase", "refusing"]


class VectorEnvBase:
    """The front of all backends.

    Attributes:
        _halves: ``step_async`` and ``step_wait`` of the class whose ``_step`` does both in one call.
        _why_no_attributes, _why_no_snapshots, _why_no_workers: Where a backend does not have these.
    """

    capabilities: Any
    _halves: ClassVar[tuple[Any, ...]] = ()
    _in_halves: ClassVar[bool] = False
    _why_no_attributes: ClassVar[str] = "its environments are no Python objects"
    _why_no_snapshots: ClassVar[str] = "its environments are a library's own, which gives their state to nobody"
    _why_no_workers: ClassVar[str] = "its environments are stepped by no worker processes"

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        own: Any = cls
        cls._in_halves = bool(cls._halves) and (own.step_async, own.step_wait) != cls._halves

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
