"""Snapshots, as users keep them: the state of one environment, and which kind of environment it is."""

from __future__ import annotations

import importlib.metadata
import pickle
import re
import sys
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final, TypeVar

import gymnasium

from vecenv.errors import NotRestorable, SnapshotMismatch
from vecenv.state.capture import layers_of
from vecenv.system.uninterrupted import contained

FORMAT: Final = 5

_T = TypeVar("_T")
_ADDRESS: Final = re.compile(r" at 0x[0-9a-f]+")


@dataclass(frozen=True, slots=True)
class Kind:
    """The kind of an environment. Snapshots fit environments of their own kind only.

    Attributes:
        env_id: Of the registered environment; of others, the class of the innermost layer.
        arguments: The arguments of its constructor, without ``render_mode``.
        layers: The wrapper stack by class, the outermost first.
        versions: (package, version) of all packages that the layers come from.
        spaces: Of observations and actions, as the outermost layer has them, in words.
    """

    env_id: str
    arguments: str
    layers: tuple[str, ...]
    versions: tuple[tuple[str, str], ...]
    spaces: tuple[str, ...] = ()

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
        for own, others_own, what in zip(self.spaces, other.spaces, ("observations", "actions"), strict=False):
            if own != others_own:
                return f"its {what} are {own}, and the environment's are {others_own}"
        mine, others = dict(self.versions), dict(other.versions)
        texts = [
            f"{name} {mine.get(name)} (here {others.get(name)})"
            for name in sorted(mine.keys() | others.keys())
            if mine.get(name) != others.get(name)
        ]
        return f"it was saved with {', '.join(texts)}" if texts else ""


def _stack(layers: Sequence[str]) -> str:
    return " / ".join(layer.rpartition(".")[2] for layer in layers)


@dataclass(frozen=True, slots=True)
class Row:
    """What an engine knows about a row beside the state of its environment.

    Attributes:
        kind: Of the environment.
        pending: The next step begins with an automatic reset.
        used: It was reset before.
        upcoming: Seed and options of the next episode that autoreset begins, where they were set.
        observation: The row's last observation.
        beside: What a vector environment over the engine knows about the row.
        generators: With ``generators="own"``, the states of the row's.
        episodes: With spare workers, where the seeds of its episodes come from
            (:meth:`vecenv.engine.spares.EpisodeTable.source`).
    """

    kind: Kind
    pending: bool = False
    used: bool = True
    upcoming: tuple[Any, Any] | None = None
    observation: Any = None
    beside: Any = None
    generators: Any = None
    episodes: tuple[int | None, int, int] | None = None


@dataclass(frozen=True, slots=True, repr=False, eq=False)
class Snapshot:
    """The state of one environment. Opaque; it can be pickled, kept, and loaded in other processes and on other machines.

    It consists of bytes with checksums, so that damage is found before anything is read. Loading a snapshot runs code that
    its bytes name, as unpickling does: load only what you have kept yourself.

    Attributes:
        body: The environment's layers (:mod:`vecenv.state.capture`).
        rest: A pickled :class:`Row`.
        checksums: Of both.
        format: Of these attributes.
    """

    body: bytes
    rest: bytes
    checksums: tuple[int, int]
    format: int = FORMAT

    @classmethod
    def of(cls, kind: Kind, body: bytes, **row: Any) -> Snapshot:
        """A new snapshot; ``row``: fields of :class:`Row`."""
        rest = _pickled(Row(kind, **row))
        return cls(body, rest, (zlib.crc32(body), zlib.crc32(rest)))

    def having(self, **changes: Any) -> Snapshot:
        """The same snapshot with other fields of its :class:`Row`."""
        rest = _pickled(replace(self.row, **changes))
        return Snapshot(self.body, rest, (self.checksums[0], zlib.crc32(rest)))

    def __reduce__(self) -> Any:
        return _snapshot_of, (self.body, self.rest, *self.checksums, self.format)

    def require_whole(self) -> None:
        """Refuse bytes that are not those that were saved.

        Raises:
            SnapshotMismatch: They are damaged.
        """
        _ = self.row
        if not isinstance(self.body, bytes) or zlib.crc32(self.body) != self.checksums[0]:
            raise SnapshotMismatch(_DAMAGED)

    @property
    def row(self) -> Row:
        """What is known about the row; read anew each time, so that it cannot be changed.

        Raises:
            SnapshotMismatch: Its bytes are damaged.
        """
        if self.format != FORMAT:
            raise SnapshotMismatch(f"its format is {self.format}, and this version of vecenv reads {FORMAT}")
        if not isinstance(self.rest, bytes) or zlib.crc32(self.rest) != self.checksums[1]:
            raise SnapshotMismatch(_DAMAGED)
        found = _read(self.rest, Row)
        if not isinstance(found.kind, Kind):
            raise SnapshotMismatch(f"it does not say of which environment it is, but {found.kind!r}")
        return found

    @property
    def observation(self) -> Any:
        """The row's last observation; ``None``: it was not reset before."""
        return self.row.observation

    @property
    def nbytes(self) -> int:
        """Bytes of the state itself."""
        return len(self.body)

    def __repr__(self) -> str:
        try:
            row = self.row
        except SnapshotMismatch:
            return "Snapshot(damaged)"
        pending = ", autoreset pending" if row.pending else ""
        return f"Snapshot({row.kind.env_id}, {len(row.kind.layers)} layers, {self.nbytes} bytes{pending})"


class Snapshots(tuple[Snapshot, ...]):
    """What ``save()`` gives: a tuple that is pickled as one piece of bytes with a checksum."""

    __slots__ = ()

    def __reduce__(self) -> Any:
        return _unsealed, (_sealed(Snapshots, tuple(self)),)


class StateDict(dict[str, Any]):
    """What ``state_dict()`` gives: a dict that is pickled as one piece of bytes with a checksum."""

    def __reduce__(self) -> Any:
        return _unsealed, (_sealed(StateDict, dict(self)),)


_DAMAGED: Final = "its bytes are damaged: they are not those that were saved"


def _pickled(value: Any) -> bytes:
    def refuse(error: Exception) -> bytes:
        text = f"what is known of the row cannot be pickled: {type(error).__name__}: {error}"
        raise NotRestorable(text) from error

    return contained(partial(pickle.dumps, value, pickle.HIGHEST_PROTOCOL), refuse, Exception)


def _read(blob: bytes, kind: type[_T]) -> _T:
    def refuse(error: Exception) -> Any:
        raise SnapshotMismatch(f"its bytes cannot be read: {type(error).__name__}: {error}") from error

    found = contained(partial(pickle.loads, blob), refuse, Exception)
    if not isinstance(found, kind):
        raise SnapshotMismatch(f"it is a {type(found).__name__}, and no {kind.__name__}")
    return found


def _sealed(kind: type, content: Any) -> bytes:
    blob = _pickled((kind, content))
    return zlib.crc32(blob).to_bytes(4, "big") + blob


def _unsealed(*parts: Any) -> Any:
    """The value of sealed bytes; called by ``pickle``, perhaps with damaged arguments."""
    if len(parts) != 1 or not isinstance(parts[0], bytes) or zlib.crc32(parts[0][4:]) != int.from_bytes(parts[0][:4], "big"):
        raise SnapshotMismatch(_DAMAGED)
    kind, content = _read(parts[0][4:], tuple)
    return kind(content)


def _snapshot_of(*parts: Any) -> Snapshot:
    if len(parts) != 5:
        raise SnapshotMismatch(_DAMAGED)
    body, rest, first, second, form = parts
    return Snapshot(body, rest, (first, second), form)


def parse_snapshots(snapshots: Any, rows: Sequence[int]) -> list[Snapshot]:
    """One undamaged snapshot per row.

    Args:
        snapshots: As many as there are rows, or one for all of them.
        rows: The rows.

    Raises:
        SnapshotMismatch: The number is wrong, or one is damaged or is no snapshot.
    """
    if isinstance(snapshots, Snapshot):
        each = [snapshots] * len(rows)
    elif isinstance(snapshots, Sequence) and not isinstance(snapshots, str | bytes | bytearray):
        each = list(snapshots)
    else:
        raise SnapshotMismatch(f"load wants what save() gave, got {type(snapshots).__name__}")
    if len(each) != len(rows):
        raise SnapshotMismatch(f"{len(each)} snapshots for {len(rows)} environments: give as many, or one for all")
    whole: set[int] = set()
    for place, one in enumerate(each):
        if not isinstance(one, Snapshot):
            raise SnapshotMismatch(f"snapshots[{place}] is a {type(one).__name__}, and none that save() gave")
        if id(one) in whole:
            continue
        try:
            one.require_whole()
        except SnapshotMismatch as error:
            raise SnapshotMismatch(f"snapshots[{place}]: {error}") from None
        whole.add(id(one))
    return each


_KINDS: dict[tuple[Any, ...], Kind] = {}


def kind_of(layers: Sequence[Any] | Any) -> Kind:
    """The kind of an environment, given as its layers or itself."""
    each = layers if isinstance(layers, list) else layers_of(layers)
    spec = None
    for layer in each:
        if (spec := layer.__dict__.get("spec")) is not None:
            break
    spaces = _spaces_of(each[0])
    key = (id(spec), tuple([type(layer) for layer in each]), spaces)
    known = _KINDS.get(key)
    if known is not None:
        return known
    names = tuple(f"{type(layer).__module__}.{type(layer).__qualname__}" for layer in each)
    arguments = getattr(spec, "kwargs", None) or {}
    text = ", ".join(f"{name}={arguments[name]!r}" for name in sorted(arguments) if name != "render_mode")
    env_id = getattr(spec, "id", None) or names[-1]
    versions = _versions(sorted({name.partition(".")[0] for name in names}))
    made = Kind(env_id, text or "no arguments", names, versions, spaces)
    if spec is None or "0x" not in text:
        _KEPT.append(spec)  # while it exists, no other object has its id
        _KINDS[key] = made
    return made


_KEPT: list[Any] = []


def _spaces_of(env: Any) -> tuple[str, ...]:
    found = env.observation_space, env.action_space
    return tuple(_ADDRESS.sub("", repr(space)) if isinstance(space, gymnasium.Space) else "" for space in found)


def _versions(packages: Sequence[str]) -> tuple[tuple[str, str], ...]:
    return tuple((package, found) for package in packages if (found := version_of(package)))


def version_of(package: str) -> str:
    """The version of an installed package; empty where there is none."""
    said = getattr(sys.modules.get(package), "__version__", None)
    if isinstance(said, str):
        return said
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""
