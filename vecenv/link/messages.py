"""Messages between the caller and its workers: what they say, and their bytes. Values and pure functions, no I/O.

A message is five bytes, a word and a sequence number; the high bit of the word says that a pickled payload follows. A step
or a reset, and its answer, is five bytes and nothing else, because everything else lies in shared memory. The sequence
number makes it impossible to give an answer to another request, for example to one made after a timeout.

The payload of an answer is an :class:`Outcome`. Each info value, result and observation in it is a pickle of its own: one
that cannot be pickled, or does harm when it is unpickled, is reported with its environment and key, and the others arrive.

Pickle sends a class by its name, cloudpickle sends those of ``__main__`` by value, as copies; but ``except MyError`` and
``isinstance`` around a call of the engine mean the program's own class. So everything that can be found by its name is sent
by it. A spawned worker has copies of the classes of ``__main__``; these are sent by their name as well, together with the
copy for a program that has no such name. An exception is sent as an object only if it survives a pickle, and as text always.
"""

from __future__ import annotations

import io
import operator
import pickle
import struct
import sys
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from functools import partial
from types import FunctionType
from typing import Any, Final, TypeAlias

import cloudpickle

from vecenv.errors import EnvError, RemoteTraceback
from vecenv.shm.arena import Place, SharedBlock, place_of
from vecenv.system.uninterrupted import contained

# -- words and their bytes ---------------------------------------------------------------------------------------------


class Op(IntEnum):
    """What the caller asks of a worker. ``*_SOME`` means the rows whose ``requested`` number equals the message's own."""

    STEP = 1
    STEP_SOME = 2
    RESET = 3
    RESET_SOME = 4
    REBUILD_SOME = 5
    CALL = 6
    SET_ATTR = 7
    EXEC = 8
    CLOSE = 9
    SET_NEXT = 10  # options and seeds of the episodes that autoreset begins
    SAVE = 11
    PROVE = 12
    CHECK = 13  # snapshots to be loaded: read them and refuse those that do not fit, but touch nothing ...
    LOAD = 14  # ... until all were found to fit
    TAKE = 15  # another row, and an episode to begin ahead of time: not answered, and may be sent twice
    FREEZE = 21  # copy the worker; the copy waits ...
    THAW = 22  # ... until it is to be copied again, for a row


class Reply(IntEnum):
    """What a worker answers."""

    READY = 17  # start-up is over; the payload holds what went wrong, per environment
    PLAIN = 18  # done, every info is empty
    COLUMNS = 19  # done, infos lie in shared memory
    FULL = 20  # done, the payload (an Outcome) holds what shared memory could not


Message = tuple[int, int, bytes | None]  # word, sequence number, pickled payload

Definition: TypeAlias = tuple[tuple[Any, Any], ...]
"""Of an info: key -> ``("s", type name)`` for a scalar, ``("a", dtype, shape)`` for an array, or a nested definition."""

PAYLOAD: Final = 0x80
_HEADER: Final = struct.Struct("<BI")
_LENGTH: Final = struct.Struct("<Q")
HEAD: Final = _HEADER.size
"""Bytes of a message without a payload."""
FULL_HEAD: Final = HEAD + _LENGTH.size
"""Bytes before a payload."""


pack_head: Final = _HEADER.pack
"""``(word, number) -> bytes``: a message without a payload. Give it plain ints: packing an enum takes longer."""


def encode(word: int, seq: int, payload: bytes | None = None) -> bytes:
    """The bytes of one message; ``payload`` is an already pickled object or nothing."""
    if payload is None:
        return _HEADER.pack(word, seq)
    return _HEADER.pack(word | PAYLOAD, seq) + _LENGTH.pack(len(payload)) + payload


def decode(data: bytes | bytearray) -> Message:
    """The message whose bytes are ``data``, all of them."""
    word, seq = _HEADER.unpack_from(data)
    if word < PAYLOAD:
        return word, seq, None
    return word & ~PAYLOAD, seq, bytes(memoryview(data)[FULL_HEAD:])


def missing_bytes(data: bytes | bytearray, have: int | None = None) -> int:
    """How many bytes a message still lacks, but for one that lacks its length: then as many as that takes.

    Args:
        data: Its first bytes.
        have: How many bytes of it are there, where that is more than ``data``.
    """
    have = len(data) if have is None else have
    if have < HEAD:
        return HEAD - have
    if data[0] < PAYLOAD:
        return 0
    if have < FULL_HEAD:
        return FULL_HEAD - have
    (length,) = _LENGTH.unpack_from(data, HEAD)
    return max(FULL_HEAD + int(length) - have, 0)


# -- outcomes ----------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Failure:
    """One environment's exception. ``error`` is the exception itself, in a message a :class:`PackedError`."""

    env: int
    error: Any
    fatal: bool = True

    @property
    def text(self) -> str:
        """The exception in a line."""
        return self.error.summary if isinstance(self.error, PackedError) else summary(self.error)


@dataclass(slots=True)
class Outcome:
    """What a request brought about, apart from what lies in shared memory. All keys are environment indices.

    Attributes:
        infos: Infos that could not be written as columns.
        observations: Observations of spaces without a fixed size.
        finals: Last observations of ended episodes, where they are not in shared memory.
        failures: Environments that raised.
        results: Results of ``call`` and functions.
        schemas: Definitions of info columns used for the first time.
        warnings: (field, text) that the caller logs once.
        columns: Some infos or final observations lie in shared memory.
    """

    infos: dict[int, Any] = field(default_factory=dict)
    observations: dict[int, Any] = field(default_factory=dict)
    finals: dict[int, Any] = field(default_factory=dict)
    failures: list[Failure] = field(default_factory=list)
    results: dict[int, Any] = field(default_factory=dict)
    schemas: dict[int, Definition] = field(default_factory=dict)
    warnings: list[tuple[str, str]] = field(default_factory=list)
    columns: bool = False

    def is_plain(self) -> bool:
        """Nothing here that would have to travel."""
        values = self.infos or self.observations or self.finals or self.results
        return not (values or self.failures or self.schemas or self.warnings)


PLAIN_OUTCOME: Final = Outcome()
"""The outcome of a step or a reset that has nothing to report, the same object every time: it is never written to."""

_WHAT: Final = {"results": "result", "observations": "observation", "finals": "observation"}


def encode_outcome(outcome: Outcome) -> bytes:
    """The payload of an outcome. It never raises because of an environment's values: each becomes a failure."""
    failures = [
        one if isinstance(one.error, PackedError) else Failure(one.env, pack_error(one.error), one.fatal)
        for one in outcome.failures
    ]

    def note(row: int, error: BaseException, text: str) -> None:
        error.add_note(f"env {row}: its {text}")
        failures.append(Failure(row, pack_error(error), fatal=False))

    def items_of(row: int, info: Any) -> list[tuple[Any, Any]]:
        if not isinstance(info, Mapping):
            return [(None, info)]
        try:
            return [(key, value) for key, value in info.items()]
        except BaseException as error:  # the environment's own code; the worker goes on
            note(row, error, f"info, a {type(info).__name__}, cannot be read")
            return []

    def pickled(row: int, value: Any, what: str = "") -> bytes | None:
        try:
            return dumps(value)
        except Exception as error:
            note(row, error, f"{what or f'info key {shown(value[0])}'} cannot be pickled")
            return None

    infos = {}
    for row, info in outcome.infos.items():
        items = [pickled(row, item) for item in items_of(row, info)]
        infos[row] = isinstance(info, Mapping), [blob for blob in items if blob is not None]
    tables = {
        name: {row: pickled(row, each, what) for row, each in getattr(outcome, name).items()} for name, what in _WHAT.items()
    }
    message = Outcome(
        infos, failures=failures, schemas=outcome.schemas, warnings=outcome.warnings, columns=outcome.columns, **tables
    )
    return pickle.dumps(message, pickle.HIGHEST_PROTOCOL)


def decode_outcome(payload: bytes) -> Outcome:
    """The outcome again; each value that cannot be unpickled becomes a failure of its environment."""
    outcome: Outcome = pickle.loads(payload)
    for row, (is_mapping, blobs) in list(outcome.infos.items()):
        items = [item for blob in blobs if (item := _unpickled(outcome, row, "info", blob)) is not None]
        outcome.infos[row] = dict(items) if is_mapping else items[0][1] if items else {}
    for name, what in _WHAT.items():
        table = getattr(outcome, name)
        for row, blob in list(table.items()):
            table[row] = None if blob is None else _unpickled(outcome, row, what, blob)
    return outcome


def _unpickled(outcome: Outcome, row: int, what: str, blob: bytes) -> Any:
    def failed(error: BaseException) -> None:
        stand_in = EnvError(f"env {row}: its {what}{_key_in(blob)} cannot be unpickled: {summary(error)}")
        stand_in.__cause__ = error if isinstance(error, Exception) else None
        outcome.failures.append(Failure(row, stand_in, fatal=False))

    # SystemExit included: an environment must not end its caller
    return contained(partial(pickle.loads, blob), failed, BaseException)


def _key_in(blob: bytes) -> str:
    """The key of an info value that cannot be unpickled: the first string in its pickle."""
    import pickletools

    for opcode, argument, _ in pickletools.genops(blob):
        if opcode.name in ("SHORT_BINUNICODE", "BINUNICODE", "BININT1", "BININT"):
            return f" key {argument!r}"
        if opcode.name not in ("PROTO", "FRAME", "MARK", "MEMOIZE"):
            break
    return ""


# -- pickles -----------------------------------------------------------------------------------------------------------


def _of_main(qualname: str, copy: bytes) -> Any:
    """What the main module has by this name; else the copy."""
    try:
        return operator.attrgetter(qualname)(sys.modules["__main__"])
    except AttributeError:
        return pickle.loads(copy)


class _ByName:
    """A pickler's rule: what the main module defines is pickled by its name."""

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, (type, FunctionType)) and value.__module__ in ("__main__", "__mp_main__"):
            try:
                if operator.attrgetter(value.__qualname__)(sys.modules[value.__module__]) is value:
                    return NotImplemented  # pickle sends its name
            except (AttributeError, KeyError):
                pass
            if "<locals>" not in value.__qualname__:
                return _of_main, (value.__qualname__, cloudpickle.dumps(value))
        other: Any = getattr(super(), "reducer_override", None)
        return NotImplemented if other is None else other(value)


class _Pickler(_ByName, pickle.Pickler):
    pass


class _CloudPickler(_ByName, cloudpickle.Pickler):  # type: ignore[misc]
    pass


def dumps(value: Any, *, by_value: bool = False) -> bytes:
    """Pickle for the other side, instances of the copied classes of a spawned worker included.

    Args:
        value: What is sent.
        by_value: Send by value what has no name on the other side, a lambda for example.
    """
    try:
        return pickle.dumps(value, pickle.HIGHEST_PROTOCOL)
    except (pickle.PicklingError, TypeError, AttributeError):  # not the exception of a time limit
        buffer = io.BytesIO()
        (_CloudPickler if by_value else _Pickler)(buffer, pickle.HIGHEST_PROTOCOL).dump(value)
        return buffer.getvalue()


def dumps_by_value(value: Any) -> bytes:
    """Pickle for a spawned process, which has copies of the classes of ``__main__``: they came with its functions."""
    blob: bytes = dumps(value, by_value=True)
    if b"__main__" in blob:
        blob = cloudpickle.dumps(value)
    return blob


# -- exceptions --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class PackedError:
    """An exception in a message.

    Attributes:
        blob: The pickled object, ``None`` if it does not survive a pickle.
        summary: ``Type: text``, always.
        text: The traceback as the worker would have printed it.
    """

    blob: bytes | None
    summary: str
    text: str


def shown(value: Any) -> str:
    """The repr of an environment's value, also of one whose ``__repr__`` raises."""
    try:
        return repr(value)
    except Exception:
        return f"a {type(value).__name__}"


def summary(error: BaseException) -> str:
    """``Type: text``, also of an exception whose own ``__str__`` raises."""
    name = type(error).__name__
    return contained(lambda: f"{name}: {error}", lambda _: f"{name} (it could not be printed)", BaseException)


def pack_error(error: BaseException) -> PackedError:
    """Make an exception ready for a message, in the process that raised it. Errors of its own code are contained."""

    def pickled() -> bytes | None:
        blob = dumps(error, by_value=True)
        return blob if type(pickle.loads(blob)).__qualname__ == type(error).__qualname__ else None

    unprintable = f"{type(error).__name__} (its traceback could not be formatted)\n"
    text = contained(lambda: "".join(traceback.format_exception(error)), lambda _: unprintable, BaseException)
    # pickling or unpickling may do harm, SystemExit included: here, and so not in the caller
    blob = contained(pickled, lambda _: None, BaseException) if isinstance(error, Exception) else None
    return PackedError(blob, summary(error), text)


def unpack_error(packed: PackedError, note: str) -> Exception:
    """The exception again, with the remote traceback as its cause and ``note`` attached.

    An exception that did not survive pickling, or is no ``Exception`` (an environment's ``sys.exit`` must not end the
    caller), becomes an :class:`~vecenv.errors.EnvError`.
    """
    loaded = None if packed.blob is None else contained(partial(pickle.loads, packed.blob), lambda _: None, BaseException)
    error = loaded if isinstance(loaded, Exception) else EnvError(f"{note}: {packed.summary}")
    error.__cause__ = RemoteTraceback(packed.text)
    contained(partial(error.add_note, note), lambda _: None, Exception)
    return error


# -- functions that build environments, on their way to a worker -------------------------------------------------------
#
# Each function travels once, and the environments that it builds there share it, as in a forked process. Of arrays in shared
# memory (:func:`vecenv.share`) the descriptor travels, and not the data.


@dataclass(slots=True)
class PackedEnvFns:
    """Functions that build environments, pickled.

    Attributes:
        which: For each environment, which of ``functions`` builds it.
        functions: Each once.
        blocks: The shared memory that they use. It can be pickled while a process is started, which gets descriptors;
            anything else gets the data.
    """

    which: list[int] = field(default_factory=list)
    functions: list[bytes] = field(default_factory=list)
    blocks: list[SharedBlock] = field(default_factory=list)

    @classmethod
    def of(cls, envs: Iterable[int], env_fns: Sequence[Callable[[], Any]], why: str) -> PackedEnvFns:
        """Pickle what builds these environments.

        Args:
            envs: Their indices.
            env_fns: What builds each of them, in their order.
            why: What needs it pickled, for a note on the error.

        Raises:
            Exception: What pickling a function raised, with a note that says which.
        """
        packed = cls()
        numbers: dict[int, int] = {}
        for env, env_fn in zip(envs, env_fns, strict=True):
            if id(env_fn) not in numbers:
                file = io.BytesIO()
                try:
                    _FunctionPickler(file, packed.blocks).dump(env_fn)
                except Exception as error:
                    error.add_note(f"env_fns[{env}] ({env_fn!r}) cannot be pickled, which {why}")
                    raise
                numbers[id(env_fn)] = len(packed.functions)
                packed.functions.append(file.getvalue())
            packed.which.append(numbers[id(env_fn)])
        return packed

    def part(self, envs: range) -> PackedEnvFns:
        """What builds some of them, for a process of its own."""
        which = self.which[envs.start : envs.stop]
        numbers = sorted(set(which))
        return PackedEnvFns([numbers.index(number) for number in which], [self.functions[n] for n in numbers], self.blocks)

    def load(self, first: int, where: str, hint: str = "") -> list[Callable[[], Any]]:
        """The functions again.

        Args:
            first: Index of the first environment.
            where: Says in an error where this is; ``hint``: what to do.

        Raises:
            RuntimeError: One cannot be unpickled. Its ``env`` says which.
        """
        functions: list[Callable[[], Any]] = []
        for number, blob in enumerate(self.functions):
            try:
                functions.append(_FunctionUnpickler(io.BytesIO(blob), self.blocks).load())
            except BaseException as error:
                env = first + self.which.index(number)
                text = f"env_fns[{env}] could not be unpickled {where}: {type(error).__name__}: {error}{hint}"
                wrapped = RuntimeError(text)
                wrapped.env = env  # type: ignore[attr-defined]
                raise wrapped from error
        return [functions[number] for number in self.which]


class _FunctionPickler(cloudpickle.Pickler):  # type: ignore[misc]
    """Notes the blocks that it meets, and pickles in place of an array in one of them where it lies."""

    def __init__(self, file: io.BytesIO, blocks: list[SharedBlock]) -> None:
        super().__init__(file)
        self._blocks = blocks

    def persistent_id(self, value: Any) -> tuple[int, Place] | None:
        if (found := place_of(value)) is None:
            return None
        block, place = found
        number = next((number for number, known in enumerate(self._blocks) if known is block), len(self._blocks))
        if number == len(self._blocks):
            self._blocks.append(block)
        return number, place


class _FunctionUnpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, blocks: list[SharedBlock]) -> None:
        super().__init__(file)
        self._blocks = blocks

    def persistent_load(self, known: tuple[int, Place]) -> Any:
        number, place = known
        return place.array(self._blocks[number])
