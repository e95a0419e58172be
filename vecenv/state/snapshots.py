"""What a user keeps: the state of one row, and of which kind of environment it is."""

from __future__ import annotations

import importlib.metadata
import sys
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from vecenv.errors import SnapshotMismatch
from vecenv.state.capture import layers_of

__all__ = ["FORMAT", "Kind", "Snapshot", "kind_of"]

FORMAT: Final = 1


@dataclass(frozen=True, slots=True)
class Kind:
    """Which environment it is. Snapshots fit environments of their own kind only.

    Attributes:
        env_id: Of the registered environment; of others, the class of the innermost layer.
        arguments: What it was made with, without ``render_mode``.
        layers: The wrapper stack by class, the outermost first.
        versions: (package, version) of all that the layers come from.
    """

    env_id: str
    arguments: str
    layers: tuple[str, ...]
    versions: tuple[tuple[str, str], ...]

    def differs_from(self, other: Kind) -> str:
        """What differs, in words; empty: nothing. ``self`` is the snapshot's."""
        if self is other or self == other:
            return ""
        if self.env_id != other.env_id:
            return f"it is of {self.env_id}, and the environment is {other.env_id}"
        if self.layers != other.layers:
            return f"its wrapper stack is {_stack(self.layers)}, and the environment's is {_stack(other.layers)}"
        if self.arguments != other.arguments:
            return f"its environment was made with {self.arguments}, and this one with {other.arguments}"
        mine, others = dict(self.versions), dict(other.versions)
        texts = [
            f"{name} {mine.get(name)} (here {others.get(name)})"
            for name in sorted(mine.keys() | others.keys())
            if mine.get(name) != others.get(name)
        ]
        return f"it was saved with {', '.join(texts)}" if texts else ""


def _stack(layers: Sequence[str]) -> str:
    return " / ".join(layer.rpartition(".")[2] for layer in layers)


@dataclass(slots=True, repr=False, eq=False)
class Snapshot:
    """One row as it was. Opaque; it can be pickled, kept, and loaded in other processes and on other machines.

    Loading one runs what its bytes say, as unpickling does: load only what you have kept yourself.

    Attributes:
        kind: Of which environment.
        body: Its layers (:mod:`vecenv.state.capture`).
        checksum: Of ``body``.
        pending: The next step begins with an automatic reset.
        used: It was reset before.
        upcoming: Seed and options of the next episode that autoreset begins, where they were set.
        observation: The row's last observation.
        announces: ``(observation,)``: after a restart, the next step only says where the environment is.
        beside: What a vector environment over the engine knows of the row.
        format: Of these attributes.
        generators: With ``generators="own"``, the states of the row's.
    """

    kind: Kind
    body: Any
    checksum: int
    pending: bool = False
    used: bool = True
    upcoming: tuple[Any, Any] | None = None
    observation: Any = None
    announces: tuple[Any] | None = None
    beside: Any = None
    format: int = FORMAT
    generators: Any = None

    @classmethod
    def of(cls, kind: Kind, body: bytes, **row: Any) -> Snapshot:
        """A new one."""
        return cls(kind, body, zlib.crc32(body), **row)

    def __reduce__(self) -> Any:
        return type(self), tuple(getattr(self, name) for name in self.__slots__)

    def require_whole(self) -> None:
        """Refuse bytes that are not what was saved.

        Raises:
            SnapshotMismatch: They are not.
        """
        if self.format != FORMAT:
            raise SnapshotMismatch(f"its format is {self.format}, and this version of vecenv reads {FORMAT}")
        if not isinstance(self.body, bytes) or zlib.crc32(self.body) != self.checksum:
            raise SnapshotMismatch("its bytes are damaged: they are not those that were saved")

    @property
    def nbytes(self) -> int:
        """Bytes of the state itself."""
        return len(self.body)

    def __repr__(self) -> str:
        pending = ", autoreset pending" if self.pending else ""
        return f"Snapshot({self.kind.env_id}, {len(self.kind.layers)} layers, {self.nbytes} bytes{pending})"


_KINDS: dict[tuple[Any, ...], Kind] = {}


def kind_of(layers: Sequence[Any] | Any) -> Kind:
    """The kind of an environment, given as its layers or itself."""
    each = layers if isinstance(layers, list) else layers_of(layers)
    spec = None
    for layer in each:
        if (spec := layer.__dict__.get("spec")) is not None:
            break
    key = (id(spec), tuple([type(layer) for layer in each]))
    known = _KINDS.get(key)
    if known is not None:
        return known
    names = tuple(f"{type(layer).__module__}.{type(layer).__qualname__}" for layer in each)
    arguments = getattr(spec, "kwargs", None) or {}
    text = ", ".join(f"{name}={arguments[name]!r}" for name in sorted(arguments) if name != "render_mode")
    env_id = getattr(spec, "id", None) or names[-1]
    versions = _versions(sorted({name.partition(".")[0] for name in names}))
    made = Kind(env_id, text or "no arguments", names, versions)
    if spec is None or "0x" not in text:
        _KEPT.append(spec)  # as long as it is there, no other has its id
        _KINDS[key] = made
    return made


_KEPT: list[Any] = []


def _versions(packages: Sequence[str]) -> tuple[tuple[str, str], ...]:
    return tuple((package, found) for package in packages if (found := _version(package)))


def _version(package: str) -> str:
    said = getattr(sys.modules.get(package), "__version__", None)
    if isinstance(said, str):
        return said
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""
