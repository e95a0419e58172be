"""Exceptions at chosen moments inside the package: everywhere that a signal handler may raise, and elsewhere.

Python runs a signal handler when a function begins, when a loop jumps back, or right after a C function has returned
(its result is then lost). :class:`Interruption` raises at the k-th such moment, or before the k-th line or bytecode, and
:func:`moments` iterates over all values of k.
"""

from __future__ import annotations

import dis
import itertools
import os
import sys
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

import vecenv

PACKAGE = str(Path(vecenv.__file__).parent)
KINDS = ("line", "call")
"""Kinds of moments that every test covers; ``"opcode"``, before every bytecode, takes ten times as many."""


class Stopped(Exception):
    """An exception like that of a time limit's signal handler: neither a ``KeyboardInterrupt`` nor one of the package's
    errors.
    """


class Interruption:
    """A context manager that raises at the ``moment``-th opportunity (from 0) within this package, and catches the
    exception.

    Args:
        kind: ``"line"``: before a line; ``"call"``: at the beginning or the end of a function, or right after a C function
            has returned; ``"opcode"``: before a bytecode, but in the outermost function, after its last bytecodes nothing
            runs, only where Python checks for signals.
        moment: The index of the moment.
        error: An exception class without arguments.
        within: Prefixes of the names of the files that count.

    Attributes:
        fired: It was raised.
        where: The file, line and function in which it was raised.
        came_out: It left the body unchanged.
        in_a_finalizer: It was raised in a finalizer, which no exception leaves.
    """

    def __init__(
        self, kind: str, moment: int, error: type[BaseException] = KeyboardInterrupt, within: tuple[str, ...] = (PACKAGE,)
    ) -> None:
        self.kind, self.moment, self.error, self.within = kind, moment, error, within
        self._left = moment
        self._raised: BaseException | None = None
        self._latest: dict[FrameType, str] = {}  # the bytecode before
        self.fired = self.came_out = self.in_a_finalizer = False
        self.where = "nowhere"
        self.note = ""  # notes of the exception when it left the body

    def __repr__(self) -> str:
        return f"{self.error.__name__} at {self.kind} {self.moment}, {self.where}"

    def __enter__(self) -> Interruption:
        self._before = sys.gettrace(), sys.getprofile(), sys.unraisablehook
        sys.unraisablehook = self._ignored
        if self.kind == "call":
            sys.setprofile(self._profile)
        else:
            sys._getframe().f_trace_opcodes = True  # Python 3.12 traces bytecodes only if this is set before settrace()
            sys.settrace(self._enter_frame)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None) -> bool:
        sys.settrace(self._before[0])
        sys.setprofile(self._before[1])
        sys.unraisablehook = self._before[2]
        self.came_out = error is not None and error is self._raised
        self.note = "\n".join(getattr(error, "__notes__", ()))
        self._raised = None
        self._latest.clear()
        return self.came_out

    @property
    def name(self) -> str:
        """The name of its class in messages."""
        return self.error.__name__

    @property
    def swallowed(self) -> bool:
        """True if it was raised where it could leave the body, and did not."""
        return self.fired and not self.came_out and not self.in_a_finalizer

    def _ignored(self, unraisable: Any) -> None:
        if unraisable.exc_value is not None and unraisable.exc_value is self._raised:
            self.in_a_finalizer = True
        else:
            self._before[2](unraisable)

    def _counts(self, frame: FrameType | None) -> bool:
        if frame is None or not frame.f_code.co_filename.startswith(self.within):
            return False
        return not frame.f_code.co_filename.endswith("/signals.py")  # there no handler runs: see its own tests

    def _enter_frame(self, frame: FrameType, event: str, arg: Any) -> Any:
        if not self._counts(frame):
            return None
        if self.kind == "opcode":
            frame.f_trace_opcodes, frame.f_trace_lines = True, False
        return self._within_frame

    def _within_frame(self, frame: FrameType, event: str, arg: Any) -> Any:
        if event == self.kind and (event == "line" or self._may_interrupt(frame)):
            self._chance(frame, event)
        return self._within_frame

    def _may_interrupt(self, frame: FrameType) -> bool:
        before, self._latest[frame] = self._latest.get(frame, "RESUME"), dis.opname[frame.f_code.co_code[frame.f_lasti]]
        return self._counts(frame.f_back) or before.startswith("CALL") or before in ("RESUME", "JUMP_BACKWARD")

    def _profile(self, frame: FrameType, event: str, arg: Any) -> None:
        # nothing follows the outermost return: the returned value belongs to the caller
        out = event == "return" and not self._counts(frame.f_back)
        if event in ("call", "return", "c_return") and not out and self._counts(frame):
            name = getattr(arg, "__qualname__", "") if event == "c_return" else ""
            self._chance(frame, f"{event} {name}".strip())

    def _chance(self, frame: FrameType, event: str) -> None:
        self._left -= 1
        if self._left < 0 and not self.fired and not _collecting(frame):
            self.fired = True
            code = frame.f_code
            self.where = f"{Path(code.co_filename).name}:{frame.f_lineno} {code.co_qualname} ({event})"
            self._raised = self.error()
            raise self._raised


def _collecting(frame: FrameType | None) -> bool:
    """True if the collector has called a finalizer, which may be in the middle of any instruction.

    An exception of a trace or profile function there ends CPython 3.11, or confuses the ``with`` around it, without any code
    of
    this package. One of a signal handler does not; ``at_random.py`` covers that case.
    """
    while frame is not None:
        if frame.f_code.co_name == "__del__":
            return True
        if frame.f_code is _FINALIZE and frame.f_locals["_"] is not None:  # the dead reference; a plain call has none
            return True
        frame = frame.f_back
    return False


_FINALIZE = weakref.finalize.__call__.__code__


def apart(function: Callable[..., None], *args: Any) -> Iterator[None]:
    """Call a function in a generator: use it as ``next(apart(...))``.

    CPython keeps handling an exception forever if a trace function raises at a ``return`` in its except clause, or at the
    end of a ``with``: its traceback then keeps the observations, and with them the shared memory. An exception that a
    generator handles ends with the generator.
    """
    function(*args)
    yield


def _only_here() -> None:
    """Disable interruptions in forked workers."""
    sys.settrace(None)
    sys.setprofile(None)


os.register_at_fork(after_in_child=_only_here)


def moments(
    kind: str,
    *,
    every: int = 1,
    offset: int = 0,
    least: int = 0,
    errors: tuple[type[BaseException], ...] = (KeyboardInterrupt, Stopped),
    within: tuple[str, ...] = (PACKAGE,),
) -> Iterator[Interruption]:
    """Yield one interruption after another, until three in a row did not fire.

    Args:
        kind: See :class:`Interruption`.
        every: Only every ``every``-th moment ...
        offset: ... beginning with this one.
        least: The least number of moments to expect.
        errors: The exceptions, used in turn.
        within: See :class:`Interruption`.
    """
    unfired = 0
    for count, moment in enumerate(itertools.count(offset % every, every)):
        interruption = Interruption(kind, moment, errors[count % len(errors)], within)
        yield interruption
        unfired = 0 if interruption.fired else unfired + 1
        if unfired == 3:
            break
    assert moment - 2 * every >= least, f"only {moment} moments: the path was not followed"
