"""The messages between the caller and its workers, and their encoding, without I/O.

A message begins with five bytes: an operation and a sequence number. If the operation's high bit is set, a length and a
pickled payload follow. Most steps and resets need none, as their data lies in shared memory. A late reply cannot be assigned
to another message, because it carries the number of its own message.

In a reply's payload (:class:`Outcome`) each info value, result and observation is pickled separately: one that cannot be
pickled or unpickled is reported with its environment and key, and the others arrive. Classes and functions of ``__main__``
are sent by name wherever possible, because ``isinstance`` and ``except MyError`` in the program refer to its own classes;
a spawned worker also sends its copy, for programs that lack the name. Exceptions are sent as text and, if possible, as
objects.
"""

from __future__ import annotations

import collections
import io
import operator
import pickle
import struct
import sys
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from enum import IntEnum
from functools import partial
from multiprocessing.context import get_spawning_popen
from multiprocessing.reduction import ForkingPickler
from types import CodeType, FunctionType
from typing import Any, Final, TypeAlias

import cloudpickle

from vecenv.errors import EnvError, InfoError, RemoteTraceback, envs_text
from vecenv.front.infos import short_repr
from vecenv.shm.arena import Place, SharedBlock, find_place
from vecenv.system.signals import call_with_fallback

# -- operations and their bytes ----------------------------------------------------------------------------------------


class Op(IntEnum):
    """The operation of a message. ``*_SOME`` applies to the rows that ``SharedArrays.requested`` marks with its number.

    Operations and replies have different numbers.
    """

    STEP = 1
    STEP_SOME = 2
    RESET = 3
    RESET_SOME = 4
    REBUILD_SOME = 5
    CALL = 6
    SET_ATTR = 7
    EXEC = 8
    CLOSE = 9
    SET_NEXT = 10  # options and seeds for the episodes that autoreset begins
    SAVE = 11
    PROVE = 12
    CHECK = 13  # read the snapshots to be loaded and reject those that do not fit; missing environments are built
    LOAD = 14  # load the checked snapshots, after all workers have accepted theirs
    RUN = 21  # (function, argument): call function(process, argument), which may change the `WorkerState`


class Reply(IntEnum):
    """The kind of a reply."""

    READY = 17  # start-up is over; the payload is a `vecenv.worker.main.Ready`
    PLAIN = 18  # done, without infos, final observations or a payload
    COLUMNS = 19  # done, with infos or final observations in shared memory
    FULL = 20  # done, with a payload: an Outcome


Message = tuple[int, int, bytes | None]  # operation or kind of reply, sequence number, pickled payload

Definition: TypeAlias = tuple[tuple[Any, Any], ...]
"""The keys and types of an info. A type is ``("s", type name)`` for a scalar, ``("a", dtype, shape)`` for an array,
or ``("d", definition)`` for a dict."""

LAST_STEP_OP: Final = int(Op.REBUILD_SOME)
"""The last operation that steps or resets environments. Those with higher numbers do neither."""
PAYLOAD: Final = 0x80
"""Added to the operation of a message with a payload."""
OVERLAPS: Final = 0x40
"""Added to the operation of a message from ``Submissions`` about one row of a worker with several. With ``env_threads``, the
worker executes such messages concurrently, and may reply to them in another order."""
_HEADER: Final = struct.Struct("<BI")
_LENGTH: Final = struct.Struct("<Q")
HEAD: Final = _HEADER.size
"""Bytes of a message without a payload."""
FULL_HEAD: Final = HEAD + _LENGTH.size
"""Bytes before a payload."""

pack_head: Final = _HEADER.pack
"""``(operation, number) -> bytes``: a message without a payload. Pass plain ints: packing an enum takes longer."""
pack_seq: Final = struct.Struct("<I").pack
"""``number -> bytes``: a sequence number, as at the end of such a message."""


def is_call(op: int) -> bool:
    """True if the operation neither steps nor resets environments."""
    return op & ~OVERLAPS > LAST_STEP_OP


def packed_seq_of(message: bytes) -> bytes:
    """Return the sequence number in a message, as :data:`pack_seq` packs it."""
    return message[1:HEAD]


def encode(code: int, seq: int, payload: bytes | None = None) -> bytes:
    """Encode one message. ``payload`` is already pickled."""
    if payload is None:
        return _HEADER.pack(code, seq)
    return _HEADER.pack(code | PAYLOAD, seq) + _LENGTH.pack(len(payload)) + payload


def decode(data: bytes | bytearray) -> Message:
    """Decode the bytes of exactly one message."""
    code, seq = _HEADER.unpack_from(data)
    if code < PAYLOAD:
        return code, seq, None
    return code & ~PAYLOAD, seq, bytes(memoryview(data)[FULL_HEAD:])


def missing_bytes(data: bytes | bytearray, received: int | None = None) -> int:
    """Return the number of bytes that a message lacks, or that its head lacks while the length of the message is unknown.

    Args:
        data: The first bytes of the message.
        received: Number of bytes received, if more than those in ``data``.
    """
    received = len(data) if received is None else received
    if received < HEAD:
        return HEAD - received
    if data[0] < PAYLOAD:
        return 0
    if received < FULL_HEAD:
        return FULL_HEAD - received
    (length,) = _LENGTH.unpack_from(data, HEAD)
    return max(FULL_HEAD + int(length) - received, 0)


# -- outcomes ----------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Failure:
    """An exception of one environment. In a message, ``error`` is a :class:`PackedError`.

    With ``fatal``, the environment has to be rebuilt: it was closed, or it has not executed the request. With ``refused``,
    it was not called, because its episode is over. With ``is_unsent``, its observation could not be sent.
    """

    env: int
    error: Any
    fatal: bool = True
    refused: bool = False
    is_unsent: bool = False

    @property
    def text(self) -> str:
        """The exception's type and text."""
        return self.error.summary if isinstance(self.error, PackedError) else summary(self.error)

    @property
    def has_result(self) -> bool:
        """True if a step or reset has a result nevertheless: only an info or a final observation is invalid or missing."""
        return not (self.fatal or self.refused or self.is_unsent)


@dataclass(slots=True)
class Outcome:
    """The results of a message, except those in shared memory. Keys are environment indices, except in ``schemas``.

    Attributes:
        infos: Infos that could not be written as columns.
        observations: Observations that are not in shared memory.
        finals: Last observations of ended episodes, if they are not in shared memory.
        failures: Exceptions of environments.
        results: Results of calls.
        schemas: Schema number -> definition, for info columns used for the first time.
        warnings: (field, text) pairs; the caller logs one per field.
        columns: True if some infos or final observations lie in shared memory.
    """

    infos: dict[int, Any] = field(default_factory=dict)
    observations: dict[int, Any] = field(default_factory=dict)
    finals: dict[int, Any] = field(default_factory=dict)
    failures: list[Failure] = field(default_factory=list)
    results: dict[int, Any] = field(default_factory=dict)
    schemas: dict[int, Definition] = field(default_factory=dict)
    warnings: list[tuple[str, str]] = field(default_factory=list)
    columns: bool = False

    def has_payload(self) -> bool:
        """True if there is anything to send. Otherwise the reply is plain, unless there are columns."""
        values = self.infos or self.observations or self.finals or self.results
        return bool(values or self.failures or self.schemas or self.warnings)


PLAIN_OUTCOME: Final = Outcome()
"""The outcome of a step or a reset without payload and columns. The object is shared: never modify it."""
COLUMNS_OUTCOME: Final = Outcome(columns=True)
"""The outcome of a step or a reset with columns and without payload. The object is shared: never modify it."""


def find_bad_infos(outcome: Outcome) -> list[Failure]:
    """Return a failure for each info that is not a dict."""
    bad = {row: info for row, info in outcome.infos.items() if not isinstance(info, Mapping)}
    return [
        Failure(row, InfoError(f"env {row}: info: got {short_repr(info)}, expected a dict"), fatal=False)
        for row, info in bad.items()
    ]


_VALUE_KINDS: Final = {"results": "result", "observations": "observation", "finals": "observation"}


def encode_outcome(outcome: Outcome) -> bytes:
    """Pickle an outcome, and pack its exceptions in place. A value that cannot be pickled becomes a failure of its row."""
    for failure in outcome.failures:
        if not isinstance(failure.error, PackedError):
            failure.error = pack_error(failure.error)  # breaks a cycle: the exception's frames hold the failure
    failures = list(outcome.failures)

    def add_failure(row: int, error: BaseException, text: str, *, is_unsent: bool = False) -> None:
        note_once(error, f"env {row}: its {text}")
        packed = pack_error(error)
        packed = replace(packed, summary=f"its {text}: {packed.summary}")
        failures.append(Failure(row, packed, fatal=False, is_unsent=is_unsent))

    def read_items(row: int, info: Any) -> list[tuple[Any, Any]]:
        if not isinstance(info, Mapping):
            return [(None, info)]
        try:
            return [(key, value) for key, value in info.items()]
        except BaseException as error:  # raised by the environment's code: the worker continues
            add_failure(row, error, f"info of type {type(info).__name__} cannot be read")
            return []

    def try_pickle(row: int, value: Any, name: str = "infos") -> bytes | None:
        try:
            return dumps(value)
        except Exception as error:
            kind = _VALUE_KINDS.get(name) or f"info key {short_repr(value[0])}"
            add_failure(row, error, f"{kind} cannot be pickled", is_unsent=name == "observations")
            return None

    infos = {}
    for row, info in outcome.infos.items():
        items = [try_pickle(row, item) for item in read_items(row, info)]
        infos[row] = isinstance(info, Mapping), [blob for blob in items if blob is not None]
    tables = {
        name: {row: try_pickle(row, value, name) for row, value in getattr(outcome, name).items()} for name in _VALUE_KINDS
    }
    message = Outcome(
        infos, failures=failures, schemas=outcome.schemas, warnings=outcome.warnings, columns=outcome.columns, **tables
    )
    return pickle.dumps(message, pickle.HIGHEST_PROTOCOL)


def decode_outcome(payload: bytes) -> Outcome:
    """Unpickle an outcome. A value that cannot be unpickled becomes a failure of its environment.

    If an observation could not be pickled or unpickled, the row keeps its last one, and the info is left out, too.
    """
    outcome: Outcome = pickle.loads(payload)
    for row, (is_mapping, blobs) in list(outcome.infos.items()):
        items = [item for blob in blobs if (item := _unpickle_value(outcome, row, "infos", blob)) is not None]
        outcome.infos[row] = dict(items) if is_mapping else items[0][1] if items else {}
    for name in _VALUE_KINDS:
        table = getattr(outcome, name)
        for row, blob in list(table.items()):
            table[row] = None if blob is None else _unpickle_value(outcome, row, name, blob)
    for failure in outcome.failures:
        if failure.is_unsent:
            outcome.observations.pop(failure.env, None)
            outcome.infos.pop(failure.env, None)
    return outcome


def _unpickle_value(outcome: Outcome, row: int, name: str, blob: bytes) -> Any:
    """Unpickle a value of an outcome; if that fails, add a failure to the outcome and return ``None``."""

    def add_failure(error: BaseException) -> None:
        kind = _VALUE_KINDS.get(name) or f"info{_find_key(blob)}"
        replacement = EnvError(f"env {row}: its {kind} cannot be unpickled: {summary(error)}")
        replacement.__cause__ = error if isinstance(error, Exception) else None
        outcome.failures.append(Failure(row, replacement, fatal=False, is_unsent=name == "observations"))

    # including SystemExit: an environment's value must not end the caller's process
    return call_with_fallback(partial(pickle.loads, blob), add_failure, BaseException)


def _find_key(blob: bytes) -> str:
    """Return text that names a pickled info item by its key, the first string or number in it; empty if that is unknown."""
    import pickletools

    for opcode, argument, _ in pickletools.genops(blob):
        if opcode.name in ("SHORT_BINUNICODE", "BINUNICODE", "BININT1", "BININT"):
            return f" key {argument!r}"
        if opcode.name not in ("PROTO", "FRAME", "MARK", "MEMOIZE"):
            break
    return ""


# -- pickles -----------------------------------------------------------------------------------------------------------


def _load_from_main(qualname: str, copy: bytes) -> Any:
    """Return the object of this name in the main module, or else the unpickled copy."""
    try:
        return operator.attrgetter(qualname)(sys.modules["__main__"])
    except AttributeError:
        return pickle.loads(copy)


class _MainByName:
    """A mixin for picklers that sends classes and functions of the main module by name."""

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, (type, FunctionType)) and value.__module__ in ("__main__", "__mp_main__"):
            try:
                if operator.attrgetter(value.__qualname__)(sys.modules[value.__module__]) is value:
                    return NotImplemented  # pickle sends the name
            except (AttributeError, KeyError):
                pass
            if "<locals>" not in value.__qualname__:
                return _load_from_main, (value.__qualname__, dumps_with_code(value))
        other: Any = getattr(super(), "reducer_override", None)
        return NotImplemented if other is None else other(value)


class _Pickler(_MainByName, pickle.Pickler):
    pass


def _reduce_code(code: CodeType) -> tuple[Any, ...]:
    """Pickle code with the name of its file, which cloudpickle omits from version 3.1.3 on: tracebacks need it."""
    function, arguments = cloudpickle.Pickler.dispatch_table[CodeType](code)
    return function, tuple(
        code.co_filename if isinstance(value, str) and value == "<dynamic-code>" else value for value in arguments
    )


_REDUCERS: Final = collections.ChainMap({CodeType: _reduce_code}, *cloudpickle.Pickler.dispatch_table.maps)


class _CodePickler(cloudpickle.Pickler):  # type: ignore[misc]
    """A cloudpickle pickler that keeps the file names of code."""

    dispatch_table: Any = _REDUCERS


def dumps_with_code(value: Any) -> bytes:
    """Pickle a value, with the code of functions and classes that cannot be imported by name."""
    buffer = io.BytesIO()
    _CodePickler(buffer).dump(value)
    return buffer.getvalue()


class _CloudPickler(_MainByName, _CodePickler):
    pass


def dumps(value: Any, *, by_value: bool = False) -> bytes:
    """Pickle a value for the other process, including instances of classes that a spawned worker received as copies.

    Args:
        value: The value to send.
        by_value: Send objects that have no name in the other process, such as lambdas, by value.
    """
    try:
        return pickle.dumps(value, pickle.HIGHEST_PROTOCOL)
    except (pickle.PicklingError, TypeError, AttributeError):  # not `Exception`: that of a time limit must propagate
        buffer = io.BytesIO()
        (_CloudPickler if by_value else _Pickler)(buffer, pickle.HIGHEST_PROTOCOL).dump(value)
        return buffer.getvalue()


def find_main_definitions() -> dict[str, Any]:
    """Return the classes and functions that the main module has now, by name."""
    return {name: value for name, value in vars(sys.modules["__main__"]).items() if isinstance(value, (type, FunctionType))}


class _ForkPickler(_CodePickler):
    """A pickler for a forked process: classes and functions of the main module that it lacks are sent with their code."""

    def __init__(self, file: io.BytesIO, main: Mapping[str, Any]) -> None:
        super().__init__(file)
        self._main = main

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, (type, FunctionType)) and value.__module__ == "__main__":
            name, _, rest = value.__qualname__.partition(".")
            found = self._main.get(name)
            if found is value or (found is not None and rest and getattr(found, rest, None) is value):
                return NotImplemented  # pickle sends the name
        return super().reducer_override(value)


def dumps_for_fork(value: Any, main: Mapping[str, Any]) -> bytes:
    """Pickle a value for a forked process, which has a copy of the main module; ``main``: its definitions at the fork."""
    blob = dumps(value, by_value=True)
    if b"__main__" in blob:
        buffer = io.BytesIO()
        _ForkPickler(buffer, main).dump(value)
        blob = buffer.getvalue()
    return blob


def dumps_by_value(value: Any) -> bytes:
    """Pickle a value for a spawned process, which received copies of __main__'s classes with its env_fns."""
    blob: bytes = dumps(value, by_value=True)
    if b"__main__" in blob:
        blob = dumps_with_code(value)
    return blob


def copy_if_possible(value: Any) -> Any:
    """Return a deep copy of a value, or the value itself if it cannot be copied, for example because it holds a lock."""
    return call_with_fallback(partial(deepcopy, value), lambda _: value, Exception)


# -- exceptions --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class PackedError:
    """An exception in a message.

    Attributes:
        blob: The pickled exception; ``None`` if it cannot be pickled and unpickled, or is not an ``Exception``.
        summary: ``Type: text``.
        text: The traceback as its process would have printed it.
    """

    blob: bytes | None
    summary: str
    text: str


def summary(error: BaseException) -> str:
    """Return ``Type: text``, or ``Type`` without a text, even if the exception's own ``__str__`` raises."""
    name = type(error).__name__
    text = call_with_fallback(lambda: f": {error}", lambda _: " (it could not be printed)", BaseException)
    return name if text == ": " else name + text


def name_envs(error: BaseException, rows: Iterable[int], attribute: str = "envs") -> None:
    """Set ``error.envs``, the environments that an exception is about, unless its class refuses the attribute.

    Another attribute is ``loaded_rows``: those that were loaded although the load failed in others. A refused load has none.
    """
    envs = tuple(sorted(set(rows)))
    call_with_fallback(lambda: BaseException.__setattr__(error, attribute, envs), lambda _: None, Exception)


def note_once(error: BaseException, note: str) -> None:
    """Add a note, unless the error already has it, even if its class refuses attributes, as a frozen dataclass does."""

    def add_note() -> None:
        notes = getattr(error, "__notes__", ())
        if note not in notes:
            BaseException.__setattr__(error, "__notes__", [*notes, note])

    call_with_fallback(add_note, lambda _: None, Exception)


def notes_about_others(raised: Sequence[tuple[int, BaseException]]) -> list[str]:
    """Return notes for the first exception about the other environments; equal exceptions share one note."""
    rows_by_text: dict[str, set[int]] = {}
    for row, error in raised:
        kind, colon, text = original_summary(error).partition(": ")
        text = text.removeprefix(f"env {row}: ").removeprefix(f"env {row}, ")  # the only difference between many messages
        rows_by_text.setdefault(kind + colon + text, set()).add(row)
    first, *others = rows_by_text.items()
    same = sorted(first[1] - {raised[0][0]})
    notes = [f"also failed in the same way: {envs_text(same)}"] if same else []
    return notes + [f"also failed: {envs_text(sorted(rows))}: {text}" for text, rows in others]


def original_summary(error: BaseException) -> str:
    """Return the :func:`summary` of an exception, or of the exception that it replaces."""
    return error.original if isinstance(error, EnvError) and error.original else summary(error)


def pack_error(error: BaseException) -> PackedError:
    """Pack an exception for a message, in the process that raised it. Errors of the exception's own code are suppressed."""

    def try_pickle() -> bytes | None:
        blob = dumps(error, by_value=True)
        return blob if type(pickle.loads(blob)).__qualname__ == type(error).__qualname__ else None

    unprintable = f"{type(error).__name__} (its traceback could not be formatted)\n"
    text = call_with_fallback(lambda: "".join(traceback.format_exception(error)), lambda _: unprintable, BaseException)
    # pickling or unpickling may even raise SystemExit, which must happen here and not in the caller
    blob = call_with_fallback(try_pickle, lambda _: None, BaseException) if isinstance(error, Exception) else None
    return PackedError(blob, summary(error), text)


def unpack_error(packed: PackedError, note: str) -> Exception:
    """Restore an exception, with the remote traceback as its cause and ``note`` attached.

    An exception that cannot be unpickled, or is not an ``Exception`` (an environment's ``sys.exit`` must not end the
    caller), becomes an :class:`~vecenv.errors.EnvError`.
    """
    loaded = None
    if packed.blob is not None:
        loaded = call_with_fallback(partial(pickle.loads, packed.blob), lambda _: None, BaseException)
    error = loaded if isinstance(loaded, Exception) else EnvError(f"{note}: {packed.summary}", original=packed.summary)
    BaseException.__dict__["__cause__"].__set__(error, RemoteTraceback(packed.text))  # even if its class refuses attributes
    notes = [note] if error is loaded else []  # the replacement begins with it
    if "daemonic processes are not allowed" in packed.summary:
        notes.append("environments that start processes of their own need AsyncVectorEnv(..., daemon=False)")
    for text in notes:
        note_once(error, text)
    return error


# -- functions that build environments ---------------------------------------------------------------------------------
#
# Each function is sent to a process once, and the environments that it builds there share it, as in a forked process. For a
# process on this machine, functions are pickled while it is being started: only then can locks, queues and similar objects
# of ``multiprocessing`` be pickled, and descriptors be sent instead of the data of shared arrays (:func:`vecenv.share`).


@dataclass(slots=True)
class PackedEnvFns:
    """Pickled functions that build environments.

    Attributes:
        indices: Index in ``functions`` for each environment.
        functions: The distinct functions.
        blocks: The shared memory that they use. A process that is being started receives descriptors of it; pickling it at
            any other time copies the data.
    """

    indices: list[int] = field(default_factory=list)
    functions: list[bytes] = field(default_factory=list)
    blocks: list[SharedBlock] = field(default_factory=list)

    @classmethod
    def pack(cls, envs: Iterable[int], env_fns: Sequence[Callable[[], Any]], reason: str) -> PackedEnvFns:
        """Pickle the functions that build the given environments.

        Args:
            envs: The environments' indices.
            env_fns: One function per environment, in the order of ``envs``.
            reason: The end of the note on an error, such as ``"the start method of its worker needs"``.

        Raises:
            Exception: The error of pickling a function, with a note that names its environment.
        """
        packed = cls()
        index_by_id: dict[int, int] = {}
        for env, env_fn in zip(envs, env_fns, strict=True):
            if id(env_fn) not in index_by_id:
                file = io.BytesIO()
                try:
                    _FunctionPickler(file, packed.blocks).dump(env_fn)
                except Exception as error:
                    note_once(error, f"env_fns[{env}] ({env_fn!r}) cannot be pickled, which {reason}")
                    raise
                index_by_id[id(env_fn)] = len(packed.functions)
                packed.functions.append(file.getvalue())
            packed.indices.append(index_by_id[id(env_fn)])
        return packed

    def select(self, envs: range) -> PackedEnvFns:
        """Select the functions of some environments, for a process of their own."""
        selected = self.indices[envs.start : envs.stop]
        used = sorted(set(selected))
        indices = [used.index(index) for index in selected]
        return PackedEnvFns(indices, [self.functions[index] for index in used], self.blocks)

    def load(self, first: int, where: str, hint: str = "") -> list[Callable[[], Any]]:
        """Unpickle the functions.

        Args:
            first: Index of the first environment.
            where: The place of unpickling, for the error text, such as ``"on its host"``.
            hint: Advice to append to the error text.

        Raises:
            RuntimeError: A function cannot be unpickled. Its attribute ``env`` is the environment's index.
        """
        functions: list[Callable[[], Any]] = []
        for index, blob in enumerate(self.functions):
            try:
                functions.append(_FunctionUnpickler(io.BytesIO(blob), self.blocks).load())
            except BaseException as error:
                env = first + self.indices.index(index)
                text = f"env_fns[{env}] could not be unpickled {where}: {type(error).__name__}: {error}{hint}"
                wrapped = RuntimeError(text)
                wrapped.env = env  # type: ignore[attr-defined]
                raise wrapped from error
        return [functions[index] for index in self.indices]


class EnvFnsToStart:
    """An argument for a new process, which receives it as :class:`PackedEnvFns`.

    The functions are pickled when the process is started, which raises the errors of :meth:`PackedEnvFns.pack`.

    Args:
        envs, env_fns, reason: Arguments of :meth:`PackedEnvFns.pack`.
        separately: Leave out the pickled functions. The caller sends :attr:`functions` later.

    Attributes:
        functions: The pickled functions, once the process has been started.
    """

    def __init__(
        self, envs: Iterable[int], env_fns: Sequence[Callable[[], Any]], reason: str, *, separately: bool = False
    ) -> None:
        self.functions: list[bytes] = []
        self._arguments = envs, env_fns, reason
        self._separately = separately

    def __reduce__(self) -> tuple[Any, ...]:
        packed = PackedEnvFns.pack(*self._arguments)
        self.functions = packed.functions
        return PackedEnvFns, (packed.indices, [] if self._separately else packed.functions, packed.blocks)


class _FunctionPickler(_CodePickler):
    """A pickler that collects shared-memory blocks and replaces each array in a block by its place."""

    def __init__(self, file: io.BytesIO, blocks: list[SharedBlock]) -> None:
        if get_spawning_popen() is not None:  # add multiprocessing's reducers of pipes, queues and shared arrays
            code, first, *others = _CodePickler.dispatch_table.maps
            reducers: Any = ForkingPickler._extra_reducers  # type: ignore[attr-defined]
            self.dispatch_table = collections.ChainMap(code, first, reducers, *others)
        super().__init__(file)  # reads dispatch_table
        self._blocks = blocks

    def persistent_id(self, value: Any) -> tuple[int, Place] | None:
        if (found := find_place(value)) is None:
            return None
        block, place = found
        number = next((number for number, other in enumerate(self._blocks) if other is block), len(self._blocks))
        if number == len(self._blocks):
            self._blocks.append(block)
        return number, place


class _FunctionUnpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, blocks: list[SharedBlock]) -> None:
        super().__init__(file)
        self._blocks = blocks

    def persistent_load(self, pid: tuple[int, Place]) -> Any:
        number, place = pid
        return place.array(self._blocks[number])
