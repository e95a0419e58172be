"""Snapshots of single environments: their state, and the kind of environment into which it can be loaded."""

from __future__ import annotations

import importlib.metadata
import pickle
import sys
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final, TypeVar

import gymnasium

from vecenv.errors import NotRestorable, SnapshotMismatch
from vecenv.state.capture import find_layers
from vecenv.state.codecs import registered_name
from vecenv.state.describe import describe, describe_space, differ, is_importable
from vecenv.system.signals import call_with_fallback, deferred_signals

FORMAT: Final = 6

_T = TypeVar("_T")
_NOT_COMPARED: Final = frozenset({"render_mode", "video_folder", "name_prefix"})
"""Arguments that affect only rendering and the location of its files."""


@dataclass(frozen=True, slots=True)
class Kind:
    """The kind of an environment. A snapshot fits only environments of the same kind.

    Attributes:
        env_id: The id of the registered environment, or else the class of the innermost layer.
        arguments: (name, description) of the constructor arguments that the layers have recorded (``EnvSpec.kwargs``,
            ``RecordConstructorArgs``, ``EzPickle``), except those that concern only rendering; and of classes of layers that
            cannot be imported.
        layers: The classes of the wrapper stack, the outermost first.
        versions: (package, version) of all packages that define the layers.
        spaces: (name, description) of the outermost layer's spaces, and of each space that is an attribute of a layer.
    """

    env_id: str
    arguments: tuple[tuple[str, str], ...]
    layers: tuple[str, ...]
    versions: tuple[tuple[str, str], ...]
    spaces: tuple[tuple[str, str], ...] = ()

    def differs_from(self, other: Kind) -> str:
        """Describe how a snapshot's kind differs from an environment's. Return an empty string if they are equal."""
        if self is other or self == other:
            return ""
        if self.env_id != other.env_id:
            return f"it is of {self.env_id}, and the environment is {other.env_id}"
        if self.layers != other.layers:
            return f"its wrapper stack is {_join_layers(self.layers)}, and the environment's is {_join_layers(other.layers)}"
        if changed := _changes(self.arguments, other.arguments):
            own = ", ".join(f"{name}={text}" for name, text, _ in changed if text)
            others = ", ".join(f"{name}={text}" for name, _, text in changed if text)
            return f"its environment was made with {own or 'no arguments'}, and this one with {others or 'no arguments'}"
        for name, text, others in _changes(self.spaces, other.spaces):
            return f"its {name} are {text}, and the environment's are {others}"
        mine, theirs = dict(self.versions), dict(other.versions)
        texts = [
            f"{name} {mine.get(name)} (here {theirs.get(name)})"
            for name in sorted(mine.keys() | theirs.keys())
            if mine.get(name) != theirs.get(name)
        ]
        return f"it was saved with {', '.join(texts)}" if texts else ""


def _changes(one: Sequence[tuple[str, str]], other: Sequence[tuple[str, str]]) -> list[tuple[str, str, str]]:
    """Return (name, first description, second description) of each difference. A missing name has an empty description."""
    first, second = dict(one), dict(other)
    pairs = ((name, first.get(name, ""), second.get(name, "")) for name in {**first, **second})
    return [(name, mine, theirs) for name, mine, theirs in pairs if differ(mine, theirs)]


def _join_layers(layers: Sequence[str]) -> str:
    text = " / ".join(layer.rpartition(".")[2] for layer in layers)
    return text.replace("OwnGenerators", "OwnGenerators (generators='own')")


@dataclass(frozen=True, slots=True)
class Row:
    """The data about a row that an engine saves in addition to the state of its environment.

    Attributes:
        kind: Kind of the environment.
        pending: True if the episode has ended, so that the next step is an automatic reset or, without those, refused.
        used: True if the environment has been reset before.
        upcoming: Seed and options of the next episode that autoreset begins, if they were set.
        observation: The row's last observation.
        beside: Data about the row from vector environments and their wrappers, each in its own entry of a dict; a tuple from
            ``MultiAgentVecEnv``, around which there are no such wrappers.
    """

    kind: Kind
    pending: bool = False
    used: bool = True
    upcoming: tuple[Any, Any] | None = None
    observation: Any = None
    beside: Any = None


@dataclass(frozen=True, slots=True, repr=False, eq=False)
class Snapshot:
    """The opaque state of one environment. It can be pickled, kept, and loaded in other processes and on other machines.

    It consists of bytes with checksums, so that damage is found before anything is unpickled. Loading a snapshot can run
    code, like unpickling: load only snapshots that you have saved yourself.

    Attributes:
        body: The environment's layers (:mod:`vecenv.state.capture`).
        rest: A pickled :class:`Row`.
        checksums: Checksums of both.
        format: Format of these attributes.
    """

    body: bytes
    rest: bytes
    checksums: tuple[int, int]
    format: int = FORMAT

    @classmethod
    def of(cls, kind: Kind, body: bytes, **row: Any) -> Snapshot:
        """Create a snapshot. ``row`` holds the other fields of its :class:`Row`."""
        rest = _pickle(Row(kind, **row))
        return cls(body, rest, (zlib.crc32(body), zlib.crc32(rest)))

    def having(self, **changes: Any) -> Snapshot:
        """Return a copy of the snapshot, with changed fields of its :class:`Row`."""
        rest = _pickle(replace(self.row, **changes))
        return Snapshot(self.body, rest, (self.checksums[0], zlib.crc32(rest)))

    def __reduce__(self) -> Any:
        return _snapshot_of, (self.body, self.rest, *self.checksums, self.format)

    def require_whole(self) -> None:
        """Raise :class:`SnapshotMismatch` if the bytes are damaged or of another format."""
        _ = self.row
        if not isinstance(self.body, bytes) or zlib.crc32(self.body) != self.checksums[0]:
            raise SnapshotMismatch(_DAMAGED)

    @property
    def row(self) -> Row:
        """The engine's data, unpickled at each access so that changes to it do not affect the snapshot.

        Raises:
            SnapshotMismatch: Its bytes are damaged or of another format.
        """
        if self.format != FORMAT:
            raise SnapshotMismatch(f"its format is {self.format}, and this version of vecenv reads {FORMAT}")
        if not isinstance(self.rest, bytes) or zlib.crc32(self.rest) != self.checksums[1]:
            raise SnapshotMismatch(_DAMAGED)
        row = _unpickle(self.rest, Row)
        if not isinstance(row.kind, Kind):
            raise SnapshotMismatch(f"its kind of environment is invalid: {row.kind!r}")
        return row

    @property
    def observation(self) -> Any:
        """The row's last observation; ``None`` if the row has not been reset."""
        return self.row.observation

    @property
    def nbytes(self) -> int:
        """Size of the state itself in bytes."""
        return len(self.body)

    def __repr__(self) -> str:
        try:
            row = self.row
        except SnapshotMismatch:
            return "Snapshot(damaged)"
        pending = ", reset due" if row.pending else ""
        return f"Snapshot({row.kind.env_id}, {len(row.kind.layers)} layers, {self.nbytes} bytes{pending})"


class Snapshots(tuple[Snapshot, ...]):
    """The tuple of snapshots that ``save()`` returns; it is pickled as one sequence of bytes with a checksum."""

    __slots__ = ()

    def __reduce__(self) -> Any:
        return _unsealed, (_sealed(Snapshots, tuple(self)),)


class StateDict(dict[str, Any]):
    """The dict that ``state_dict()`` returns; it is pickled as one sequence of bytes with a checksum."""

    def __reduce__(self) -> Any:
        return _unsealed, (_sealed(StateDict, dict(self)),)


_DAMAGED: Final = "its bytes are damaged: they differ from those that were saved"


def _pickle(value: Any) -> bytes:
    def refuse(error: Exception) -> bytes:
        text = f"the data about the row cannot be pickled: {type(error).__name__}: {error}"
        raise NotRestorable(text) from error

    return call_with_fallback(partial(pickle.dumps, value, pickle.HIGHEST_PROTOCOL), refuse, Exception)


def _unpickle(blob: bytes, kind: type[_T]) -> _T:
    def refuse(error: Exception) -> Any:
        raise SnapshotMismatch(f"its bytes cannot be read: {type(error).__name__}: {error}") from error

    found = call_with_fallback(partial(pickle.loads, blob), refuse, Exception)
    if not isinstance(found, kind):
        raise SnapshotMismatch(f"it is a {type(found).__name__}, not a {kind.__name__}")
    return found


def _sealed(kind: type, content: Any) -> bytes:
    blob = _pickle((kind, content))
    return zlib.crc32(blob).to_bytes(4, "big") + blob


def _unsealed(*parts: Any) -> Any:
    """Return the value of sealed bytes. ``pickle`` calls this function; damaged pickles pass wrong arguments."""
    if len(parts) != 1 or not isinstance(parts[0], bytes) or zlib.crc32(parts[0][4:]) != int.from_bytes(parts[0][:4], "big"):
        raise SnapshotMismatch(_DAMAGED)
    kind, content = _unpickle(parts[0][4:], tuple)
    return kind(content)


def _snapshot_of(*parts: Any) -> Snapshot:
    if len(parts) != 5:
        raise SnapshotMismatch(_DAMAGED)
    body, rest, body_checksum, rest_checksum, form = parts
    return Snapshot(body, rest, (body_checksum, rest_checksum), form)


def parse_snapshots(snapshots: Any, rows: Sequence[int]) -> list[Snapshot]:
    """Return one undamaged snapshot per row.

    Args:
        snapshots: One per row, or one for all of them.
        rows: The rows.

    Raises:
        SnapshotMismatch: The number of snapshots is wrong, or one of them is damaged or of another type or format.
    """
    if isinstance(snapshots, Snapshot):
        listed = [snapshots] * len(rows)
    elif isinstance(snapshots, Sequence) and not isinstance(snapshots, str | bytes | bytearray):
        listed = list(snapshots)
    else:
        raise SnapshotMismatch(f"load() needs snapshots from save(), got {type(snapshots).__name__}")
    if len(listed) != len(rows):
        raise SnapshotMismatch(f"{len(listed)} snapshots for {len(rows)} environments: pass one for each, or one for all")
    checked: set[int] = set()
    for index, snapshot in enumerate(listed):
        if not isinstance(snapshot, Snapshot):
            raise SnapshotMismatch(f"snapshots[{index}] is a {type(snapshot).__name__}, not a snapshot from save()")
        if id(snapshot) in checked:
            continue
        try:
            snapshot.require_whole()
        except SnapshotMismatch as error:
            raise SnapshotMismatch(f"snapshots[{index}]: {error}") from None
        checked.add(id(snapshot))
    return listed


def load_and_restore(load: Callable[[], Any], rows: Sequence[int], restore: Callable[[Sequence[int]], None]) -> Any:
    """Load states into rows, and then what a wrapper has saved beside them. Return the result of ``load``.

    Args:
        load: Loads the states. If it raises for some rows, the others are restored too.
        rows: The rows, as the exception of ``load`` numbers them.
        restore: Called with the positions in ``rows`` of the loaded rows, unless the load was refused or interrupted.
    """
    try:
        result = load()
    except Exception as error:
        if hasattr(error, "loaded_rows"):
            restore([rows.index(row) for row in error.loaded_rows])
        raise
    restore(range(len(rows)))
    return result


def describe_kind(layers: Sequence[Any] | Any) -> Kind:
    """Return the kind of an environment, or of a list of its layers. Takes about 100 microseconds."""
    layer_list = layers if isinstance(layers, list) else find_layers(layers)
    names = tuple(f"{type(layer).__module__}.{type(layer).__qualname__}" for layer in layer_list)
    spec = next((spec for layer in layer_list if (spec := vars(layer).get("spec")) is not None), None)
    env_id = getattr(spec, "id", None) or names[-1]
    versions = _versions(sorted({name.partition(".")[0] for name in names}))
    return Kind(env_id, tuple(_iter_arguments(layer_list, spec)), names, versions, tuple(_iter_spaces(layer_list)))


def _iter_arguments(layers: Sequence[Any], spec: Any) -> Iterator[tuple[str, str]]:
    given = dict(getattr(spec, "kwargs", None) or {})
    for name in sorted(given.keys() - _NOT_COMPARED):
        yield name, describe(given[name])
    for layer_name, layer in _name_layers(layers):
        attributes = vars(layer)
        for number, value in enumerate(attributes.get("_ezpickle_args", ())):
            yield f"{layer_name}[{number}]", describe(value)
        for recorded in attributes.get("_ezpickle_kwargs"), attributes.get("_saved_kwargs"):
            if isinstance(recorded, dict):
                names = sorted(recorded.keys() - _NOT_COMPARED)
                yield from ((f"{layer_name}.{name}", describe(recorded[name])) for name in names)
        # no package version identifies its code; the main program's classes are importable only there, so never compared
        if not (is_importable(type(layer)) or registered_name(type(layer)).startswith("__main__.")):
            yield f"class {layer_name}", describe(type(layer))


def _name_layers(layers: Sequence[Any]) -> Iterator[tuple[str, Any]]:
    """Yield (name, layer). The name is that of the class, numbered from the second layer of the class on."""
    names: Counter[str] = Counter()
    for layer in layers:
        name = type(layer).__name__
        names[name] += 1
        yield f"{name} {names[name]}" if names[name] > 1 else name, layer


def _iter_spaces(layers: Sequence[Any]) -> Iterator[tuple[str, str]]:
    outermost = layers[0]
    for name, label in (("observation_space", "observations"), ("action_space", "actions")):
        if isinstance(space := getattr(outermost, name, None), gymnasium.Space):
            yield label, describe_space(space)
    for layer_name, layer in _name_layers(layers):
        for name, value in vars(layer).items():
            if isinstance(value, gymnasium.Space):
                yield f"{layer_name}.{name}", describe_space(value)


def _versions(packages: Sequence[str]) -> tuple[tuple[str, str], ...]:
    return tuple((package, found) for package in packages if (found := package_version(package)))


def package_version(package: str) -> str:
    """Return the version of an installed package; empty if it is not installed."""
    declared = getattr(sys.modules.get(package), "__version__", None)
    if isinstance(declared, str):
        return declared
    with deferred_signals():  # `importlib.metadata` suppresses exceptions while it lists folders
        try:
            return importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            return ""
