"""Faults: functions that end the process, hang, raise, or return what a call should not.

A function that is decorated with :func:`fault` is one of :data:`FAULTS`, under its own name.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Final, NoReturn, TypeVar

import numpy as np

Fault = Callable[[Any], Any]
"""What a fault is: it gets what a call was about to return, and returns something, raises, or never returns."""

_F = TypeVar("_F", bound=Fault)
_faults: dict[str, Fault] = {}

FAULTS: Final[Mapping[str, Fault]] = MappingProxyType(_faults)
"""Every fault by name."""


def fault(function: _F) -> _F:
    """Put a fault among :data:`FAULTS`, under its own name."""
    _faults[function.__name__] = function
    return function


def find(name: str | Fault) -> Fault:
    """The fault of this name; a function is one already."""
    if callable(name):
        return name
    try:
        return FAULTS[name]
    except KeyError:
        raise ValueError(f"there is no fault {name!r}; there are: {', '.join(FAULTS)}") from None


# -- the process ends, or the call never does -------------------------------------------------------------------------

FOREVER: Final = 3600.0  # seconds; what "hangs" means here, so that a lost process does not stay for good


def _no_core_dump() -> None:
    """Keep a deliberate crash from writing a core file, which would be slow and of no use."""
    try:
        import resource
    except ImportError:  # Windows
        return
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))


def _signal_self(name: str) -> NoReturn:
    """Send this process a signal that ends it."""
    _no_core_dump()
    os.kill(os.getpid(), getattr(signal, name))
    time.sleep(FOREVER)  # the signal may need a moment; nothing after it may run
    raise AssertionError(f"{name} did not end the process")


@fault
def segfault(result: Any) -> NoReturn:
    """SIGSEGV, from C: read the byte at address zero."""
    _no_core_dump()
    ctypes.string_at(0)
    raise AssertionError("address zero could be read")


@fault
def abort(result: Any) -> NoReturn:
    """SIGABRT: what a failed C assertion does."""
    _no_core_dump()
    os.abort()


@fault
def bus_error(result: Any) -> NoReturn:
    """SIGBUS: touch a page of a mapping whose file was truncated meanwhile."""
    _no_core_dump()
    if not hasattr(os, "memfd_create"):
        _signal_self("SIGBUS")
    fd = os.memfd_create("bus-error")
    os.ftruncate(fd, mmap.PAGESIZE)
    view = mmap.mmap(fd, mmap.PAGESIZE)
    os.ftruncate(fd, 0)
    view[0] = 1
    raise AssertionError("a page past the end of the file could be written")


@fault
def arithmetic_error(result: Any) -> NoReturn:
    """SIGFPE: what an integer division by zero in C does."""
    _signal_self("SIGFPE")


@fault
def kill(result: Any) -> NoReturn:
    """SIGKILL: what the kernel does to a process when memory runs out."""
    _signal_self("SIGKILL")


@fault
def stop(result: Any) -> Any:
    """SIGSTOP: the process stays, and does nothing until it is continued."""
    os.kill(os.getpid(), signal.SIGSTOP)
    return result


@fault
def exit_now(result: Any) -> NoReturn:
    """``os._exit(0)``: the process is gone without an exception, a signal or a message."""
    os._exit(0)


@fault
def sys_exit(result: Any) -> NoReturn:
    """``sys.exit(3)``: an exception that is not an ``Exception``."""
    sys.exit(3)


@fault
def keyboard_interrupt(result: Any) -> NoReturn:
    """Raise ``KeyboardInterrupt`` inside the environment."""
    raise KeyboardInterrupt("raised by an environment")


# --- the call does not return ---------------------------------------------------------------------


@fault
def sleep(result: Any) -> Any:
    """Hang in ``time.sleep``: other threads of the process still run."""
    time.sleep(FOREVER)
    return result


@fault
def hold_gil(result: Any) -> Any:
    """Hang in C with the interpreter's lock held: no Python code of this process runs any more.

    A mutex is locked twice by one thread. Unlike a sleep, no signal wakes it.
    """
    if sys.platform == "linux":
        libc = ctypes.PyDLL(None)  # unlike CDLL, does not let go of the interpreter's lock around a call
        mutex = ctypes.create_string_buffer(128)  # all zeros: an unlocked pthread mutex of the default kind
        libc.pthread_mutex_lock(mutex)
        libc.pthread_mutex_lock(mutex)
    else:
        while True:
            sum(range(10**12))
    return result


@fault
def ignore_sigterm(result: Any) -> Any:
    """Refuse SIGTERM, then hang: only SIGKILL ends this one."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    time.sleep(FOREVER)
    return result


# -- exceptions that pickle or print badly, or end the process that reads them ----------------------------------------

class TwoArgumentsError(Exception):
    """Needs two arguments, hands one to its base class: pickling works, unpickling raises ``TypeError``."""

    def __init__(self, code: int, text: str) -> None:
        super().__init__(f"{code}: {text}")
        self.code = code
        self.text = text


class KeywordOnlyError(Exception):
    """Cannot be built from positional arguments, as unpickling would."""

    def __init__(self, *, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class UnpicklableError(Exception):
    """Holds a lock, which no pickle can carry."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.lock = threading.Lock()


class EvilError(Exception):
    """Ends the process that unpickles it, with ``sys.exit``."""

    def __reduce__(self) -> tuple[Any, ...]:
        return sys.exit, (7,)


def _exit_elsewhere(home: int) -> EvilElsewhereError:
    if os.getpid() != home:
        sys.exit(7)
    return EvilElsewhereError("harmless at home")


class EvilElsewhereError(Exception):
    """Unpickles well in the process that raised it and calls ``sys.exit`` in every other: a trial run misses it."""

    def __reduce__(self) -> tuple[Any, ...]:
        return _exit_elsewhere, (os.getpid(),)


class UnprintableError(Exception):
    """Raises again when it is asked for its text."""

    def __str__(self) -> str:
        raise RuntimeError("this exception has no text")

    __repr__ = __str__


@fault
def raises(result: Any) -> NoReturn:
    """An ordinary ``ValueError``."""
    raise ValueError("the environment is out of order")


@fault
def two_arguments_error(result: Any) -> NoReturn:
    """Raise :class:`TwoArgumentsError`."""
    raise TwoArgumentsError(42, "needs two arguments")


@fault
def keyword_only_error(result: Any) -> NoReturn:
    """Raise :class:`KeywordOnlyError`."""
    raise KeywordOnlyError(reason="needs a keyword")


@fault
def unpicklable_error(result: Any) -> NoReturn:
    """Raise :class:`UnpicklableError`."""
    raise UnpicklableError("holds a lock")


@fault
def evil_error(result: Any) -> NoReturn:
    """Raise :class:`EvilError`."""
    raise EvilError("exits whoever unpickles it")


@fault
def evil_elsewhere_error(result: Any) -> NoReturn:
    """Raise :class:`EvilElsewhereError`."""
    raise EvilElsewhereError("exits whoever else unpickles it")


@fault
def unprintable_error(result: Any) -> NoReturn:
    """Raise :class:`UnprintableError`."""
    raise UnprintableError("nobody will read this")


# -- wrong values, or a process left worse than it was ----------------------------------------------------------------

HUGE_INFO_BYTES: Final = 100 * 2**20
LEAK_BYTES: Final = 2**20


def _with_observation(result: Any, observation: Any) -> Any:
    return (observation, *result[1:])


def _with_info(result: Any, **info: Any) -> Any:
    return (*result[:-1], {**result[-1], **info})


@fault
def wrong_shape(result: Any) -> Any:
    """An observation with one element too many."""
    return _with_observation(result, np.append(np.asarray(result[0]).ravel(), 0))


@fault
def scalar_observation(result: Any) -> Any:
    """One number where the space has an array; broadcasting would hide it."""
    return _with_observation(result, np.asarray(result[0]).dtype.type(1))


@fault
def no_observation(result: Any) -> Any:
    """``None`` as the observation: a forgotten ``return``."""
    return _with_observation(result, None)


@fault
def wrong_dtype(result: Any) -> Any:
    """float64 numbers too large for float32: a cast makes them infinite."""
    return _with_observation(result, np.full(np.shape(result[0]), 1e300, dtype=np.float64))


@fault
def too_few_values(result: Any) -> Any:
    """A step as Gym had it before 0.26: one flag instead of two."""
    return (*result[:-2], result[-1])


@fault
def unpicklable_info(result: Any) -> Any:
    """An info that cannot be sent to another process."""
    return _with_info(result, lock=threading.Lock())


class _EvilValue:
    def __reduce__(self) -> tuple[Any, ...]:
        return sys.exit, (7,)


@fault
def evil_info(result: Any) -> Any:
    """An info that calls ``sys.exit`` where it is unpickled."""
    return _with_info(result, evil=_EvilValue())


@fault
def huge_info(result: Any) -> Any:
    """100 MiB in an info: far more than a pipe holds."""
    return _with_info(result, blob=bytes(HUGE_INFO_BYTES))


# --- the process is left worse than it was --------------------------------------------------------

_LEAKED: list[Any] = []


@fault
def leak_memory(result: Any) -> Any:
    """Keep another MiB, touched, for ever."""
    _LEAKED.append(bytearray(os.urandom(1)) * LEAK_BYTES)
    return result


@fault
def leak_descriptors(result: Any) -> Any:
    """Open a pipe and never close it."""
    _LEAKED.append(os.pipe())
    return result


@fault
def stdio(result: Any) -> Any:
    """Print, write to descriptor 1, read standard input to its end, and close it."""
    print("an environment prints")
    os.write(1, b"an environment writes\n")
    os.write(2, b"an environment complains\n")
    text = sys.stdin.read() if sys.stdin is not None and not sys.stdin.closed else ""
    try:
        os.read(0, 1)
    except OSError:
        text += "(stdin is closed)"
    return _with_info(result, stdin=text)


@fault
def start_thread(result: Any) -> Any:
    """Start a thread that never ends."""
    threading.Thread(target=time.sleep, args=(FOREVER,), daemon=True).start()
    return result


@fault
def start_subprocess(result: Any) -> Any:
    """Start a program that outlives the environment; its pid is ``info["subprocess"]``."""
    helper = subprocess.Popen([sys.executable, "-c", f"import time; time.sleep({FOREVER})"])
    _LEAKED.append(helper)
    return _with_info(result, subprocess=helper.pid)


@fault
def close_descriptors(result: Any) -> Any:
    """Close every descriptor beyond the first three, the worker's own included, as some daemons do at their start."""
    os.closerange(3, 4096)
    return result


@fault
def fork_helper(result: Any) -> Any:
    """Fork a helper that inherits all descriptors of the worker and sleeps; its pid is ``info["helper"]``."""
    helper = os.fork()
    if helper == 0:
        time.sleep(FOREVER)
        os._exit(0)
    return _with_info(result, helper=helper)


@fault
def fork_helper_and_die(result: Any) -> NoReturn:
    """As :func:`fork_helper`, then SIGKILL oneself: end of file on the worker's pipe will not come."""
    fork_helper(result)
    kill(result)


@fault
def fork_and_return(result: Any) -> Any:
    """Fork, and let both processes return from the call: two workers answer where one was asked."""
    os.fork()
    return result
