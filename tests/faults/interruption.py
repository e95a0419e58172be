"""Raises exceptions at chosen moments inside the package, including every moment at which a signal handler may raise.

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
from vecenv.system.signals import _replaced as deferred_blocks

PACKAGE = str(Path(vecenv.__file__).parent)
KINDS = ("line", "call")
"""The kinds of moments of most tests. The third kind, ``"opcode"``, has ten times as many moments: before each bytecode."""


class Stopped(Exception):
    """An exception such as a time limit may raise: neither a ``KeyboardInterrupt`` nor an error of the package."""


class Interruption:
    """A context manager that raises at a chosen moment while code of this package runs, and catches that exception.

    Args:
        kind: ``"line"``: before a line; ``"call"``: at the beginning or the end of a function, or right after a C function
            has returned; ``"opcode"``: before a bytecode. In the outermost function, only right after a bytecode at which
            Python checks for signals: elsewhere, an exception could lose a result that no signal handler can lose.
        moment: The index of the moment, from 0.
        error: The class of the exception.
        within: Path prefixes of the files in which to raise.

    Attributes:
        fired: True if the exception was raised.
        where: The file, line and function that were interrupted.
        propagated: True if it left the body unchanged.
        in_finalizer: True if it was raised in a finalizer, from which no exception propagates.
    """

    def __init__(
        self, kind: str, moment: int, error: type[BaseException] = KeyboardInterrupt, within: tuple[str, ...] = (PACKAGE,)
    ) -> None:
        self.kind, self.moment, self.error, self.within = kind, moment, error, within
        self._left = moment
        self._raised: BaseException | None = None
        self._latest: dict[FrameType, str] = {}  # the previous bytecode of each frame
        self.fired = self.propagated = self.in_finalizer = False
        self.where = "nowhere"
        self.note = ""  # the notes of the exception that left the body

    def __repr__(self) -> str:
        return f"{self.error.__name__} at {self.kind} {self.moment}, {self.where}"

    def __enter__(self) -> Interruption:
        self._previous_hooks = sys.gettrace(), sys.getprofile(), sys.unraisablehook
        sys.unraisablehook = self._handle_unraisable
        if self.kind == "call":
            sys.setprofile(self._profile)
        else:
            sys._getframe().f_trace_opcodes = True  # Python 3.12 traces bytecodes only if this is set before settrace()
            sys.settrace(self._enter_frame)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> bool:
        trace, profile, unraisable_hook = self._previous_hooks
        sys.settrace(trace)
        sys.setprofile(profile)
        sys.unraisablehook = unraisable_hook
        self.propagated = error is not None and error is self._raised
        self.note = "\n".join(getattr(error, "__notes__", ()))
        self._raised = None
        self._latest.clear()
        return self.propagated

    @property
    def name(self) -> str:
        """The name of the exception class."""
        return self.error.__name__

    @property
    def swallowed(self) -> bool:
        """True if the exception was raised where it could propagate, and did not leave the body."""
        return self.fired and not self.propagated and not self.in_finalizer

    def _handle_unraisable(self, unraisable: Any) -> None:
        if unraisable.exc_value is not None and unraisable.exc_value is self._raised:
            self.in_finalizer = True
        else:
            self._previous_hooks[2](unraisable)

    def _is_in_scope(self, frame: FrameType | None) -> bool:
        if frame is None or not frame.f_code.co_filename.startswith(self.within):
            return False
        return not frame.f_code.co_filename.endswith("/signals.py")  # separate tests cover the code that defers signals

    def _enter_frame(self, frame: FrameType, event: str, arg: Any) -> Any:
        if not self._is_in_scope(frame):
            return None
        if self.kind == "opcode":
            frame.f_trace_opcodes, frame.f_trace_lines = True, False
        return self._trace_frame

    def _trace_frame(self, frame: FrameType, event: str, arg: Any) -> Any:
        if event == self.kind and (event == "line" or self._may_interrupt(frame)):
            self._reach_moment(frame, event)
        return self._trace_frame

    def _may_interrupt(self, frame: FrameType) -> bool:
        previous = self._latest.get(frame, "RESUME")
        self._latest[frame] = dis.opname[frame.f_code.co_code[frame.f_lasti]]
        return self._is_in_scope(frame.f_back) or previous.startswith("CALL") or previous in ("RESUME", "JUMP_BACKWARD")

    def _profile(self, frame: FrameType, event: str, arg: Any) -> None:
        # after the outermost return, an exception would lose the result
        is_outermost_return = event == "return" and not self._is_in_scope(frame.f_back)
        if event in ("call", "return", "c_return") and not is_outermost_return and self._is_in_scope(frame):
            name = getattr(arg, "__qualname__", "") if event == "c_return" else ""
            self._reach_moment(frame, f"{event} {name}".strip())

    def _reach_moment(self, frame: FrameType, event: str) -> None:
        """Count a moment, and raise if it is the chosen one or, where it could not raise there, the next possible one."""
        self._left -= 1
        # while signal handlers are deferred, none can raise
        if self._left < 0 and not self.fired and not deferred_blocks and not _is_in_finalizer(frame):
            self.fired = True
            code = frame.f_code
            self.where = f"{Path(code.co_filename).name}:{frame.f_lineno} {code.co_qualname} ({event})"
            self._raised = self.error()
            raise self._raised


def _is_in_finalizer(frame: FrameType | None) -> bool:
    """True if the frame is in a finalizer, which the garbage collector may call in the middle of any instruction.

    If a trace or profile function raises there, CPython 3.11 crashes or confuses the surrounding ``with``, even without any
    code of this package. A signal handler may raise there; ``at_random.py`` covers that case.
    """
    while frame is not None:
        if frame.f_code.co_name == "__del__":
            return True
        if frame.f_code is _FINALIZE and frame.f_locals["_"] is not None:  # the argument is a dead reference
            return True
        frame = frame.f_back
    return False


_FINALIZE = weakref.finalize.__call__.__code__


def run_in_generator(function: Callable[..., None], *args: Any) -> Iterator[None]:
    """Call a function in a generator, as in ``next(run_in_generator(function))``.

    If a trace function raises at a ``return`` in an except clause, or at the end of a ``with``, CPython never leaves the
    handling of that exception: the traceback keeps the observations, and with them the shared memory, alive. In a generator,
    the handling ends with the generator.
    """
    function(*args)
    yield


def _disable_in_child() -> None:
    """Disable interruptions in forked workers."""
    sys.settrace(None)
    sys.setprofile(None)


os.register_at_fork(after_in_child=_disable_in_child)


def moments(
    kind: str,
    *,
    every: int = 1,
    offset: int = 0,
    least: int = 0,
    errors: tuple[type[BaseException], ...] = (KeyboardInterrupt, Stopped),
    within: tuple[str, ...] = (PACKAGE,),
) -> Iterator[Interruption]:
    """Yield interruptions at successive moments, until three in a row did not fire.

    Args:
        kind: See :class:`Interruption`.
        every: The distance between two moments.
        offset: The first moment, modulo ``every``.
        least: The minimum number of moments, which is checked at the end.
        errors: The exception classes, used in turn.
        within: See :class:`Interruption`.
    """
    unfired = 0
    for count, moment in enumerate(itertools.count(offset % every, every)):
        interruption = Interruption(kind, moment, errors[count % len(errors)], within)
        yield interruption
        unfired = 0 if interruption.fired else unfired + 1
        if unfired == 3:
            break
    first_unfired = moment - 2 * every
    assert first_unfired >= least, f"only {first_unfired} moments, expected at least {least}"
