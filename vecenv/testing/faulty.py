"""Environments that go wrong on purpose, to test an engine, or your own training loop, against what really
happens.

A fault is a function. It is handed what the environment was about to return (``(observation, info)`` or the
five values of a step) and does one bad thing: it kills the process, raises, hangs, or hands back something
else. :data:`FAULTS` gives each of them a name, and :class:`FaultyEnv` sets one off inside any environment at
a chosen step, reset, seed or action::

    envs = vecenv.AsyncVectorEnv(
        [lambda: FaultyEnv(gymnasium.make("CartPole-v1"), "segfault", step=1000)] * 8, on_failure="restart"
    )

Faults are real: ``segfault`` reads address zero, ``hold_gil`` deadlocks in C, ``kill`` sends SIGKILL. Nothing
is simulated, because a simulated crash is reported by code that a real crash never reaches. So do not call
them in a process you need.

:class:`WitnessEnv` is the honest counterpart: its observations say which environment, life, episode and step
they belong to, and carry a checksum, so that a shifted, repeated or torn row cannot pass for a right one.
"""

from __future__ import annotations

import ctypes
import mmap
import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Container, Mapping
from types import MappingProxyType
from typing import Any, Final, NoReturn, TypeVar

import gymnasium as gym
import numpy as np
from gymnasium.utils import RecordConstructorArgs

__all__ = [
    "FAULTS", "FOREVER", "HUGE_INFO_BYTES", "LEAK_BYTES", "EvilElsewhereError", "EvilError", "Fault", "FaultyConstructor",
    "FaultyEnv", "KeywordOnlyError", "NestedEnv", "TwoArgumentsError", "UnloadableConstructor", "UnpicklableConstructor",
    "UnpicklableError", "UnprintableError", "WitnessEnv",
]  # fmt: skip

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
    raise EvilError("ends the process that unpickles it")


@fault
def evil_elsewhere_error(result: Any) -> NoReturn:
    """Raise :class:`EvilElsewhereError`."""
    raise EvilElsewhereError("ends every other process that unpickles it")


@fault
def unprintable_error(result: Any) -> NoReturn:
    """Raise :class:`UnprintableError`."""
    raise UnprintableError("this text is never read")


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


# -- environments -----------------------------------------------------------------------------------------------------


class FaultyEnv(gym.Wrapper[Any, Any, Any, Any], RecordConstructorArgs):
    """Sets a fault off inside another environment, at a moment of your choice.

    The inner environment is called first; the fault then gets what it returned. Several conditions are joined
    by *and*; for several faults, wrap several times.

    Args:
        env: The environment to spoil.
        fault: A name from :data:`FAULTS`, or any function of one argument.
        step: Which steps, counted from 1 over the life of this object: a number, or anything with ``in``
            (``range(5, 9)``).
        reset: Which resets, counted the same way; automatic resets count as well.
        seed: Only in episodes that were begun with this seed (or one of these). Alone, it means the reset
            itself.
        action: Only in steps with this action (compared with ``numpy.array_equal``). Alone, it means every
            such step.
        close: Set it off in ``close()`` instead, with ``None`` as its argument.
        once: Path of a file that must not exist yet. The fault then fires once for all processes and restarts
            together: in the process that can create the file.

    Raises:
        ValueError: For an unknown fault, or when no moment is given.
    """

    def __init__(
        self,
        env: gym.Env[Any, Any],
        fault: str | Fault,
        *,
        step: int | Container[int] | None = None,
        reset: int | Container[int] | None = None,
        seed: int | Container[int] | None = None,
        action: Any = None,
        close: bool = False,
        once: str | os.PathLike[str] | None = None,
    ) -> None:
        RecordConstructorArgs.__init__(
            self, fault=fault, step=step, reset=reset, seed=seed, action=action, close=close, once=once
        )
        gym.Wrapper.__init__(self, env)
        if not close and all(moment is None for moment in (step, reset, seed, action)):
            raise ValueError("say when the fault should happen: step=, reset=, seed=, action= or close=True")
        self._fault = find(fault)
        self._at_step, self._at_reset, self._at_seed, self._at_action, self._at_close = step, reset, seed, action, close
        self._once = once
        self._steps = self._resets = 0
        self._episode_seed: int | None = None

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Reset the inner environment; then, if it is the moment, go wrong."""
        result = self.env.reset(seed=seed, options=options)
        self._resets += 1
        self._episode_seed = seed
        only_seed = self._at_seed is not None and self._at_step is None and self._at_action is None
        if (self._at_reset is not None or only_seed) and _among(self._resets, self._at_reset) and self._seed_matches():
            result = self._go_wrong(result)
        return result

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        """Step the inner environment; then, if it is the moment, go wrong."""
        result = self.env.step(action)
        self._steps += 1
        by_step_or_action = self._at_step is not None or self._at_action is not None
        this_action = self._at_action is None or np.array_equal(action, self._at_action)
        if by_step_or_action and this_action and _among(self._steps, self._at_step) and self._seed_matches():
            result = self._go_wrong(result)
        return result

    def close(self) -> None:
        """Close the inner environment, or go wrong instead."""
        if self._at_close:
            self._at_close = False  # a second close, from a finalizer for one, is the inner environment's
            self._go_wrong(None)
        self.env.close()

    def _seed_matches(self) -> bool:
        return self._at_seed is None or (self._episode_seed is not None and _among(self._episode_seed, self._at_seed))

    def _go_wrong(self, result: Any) -> Any:
        if self._once is not None:
            try:
                os.close(os.open(self._once, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
            except FileExistsError:
                return result
        return self._fault(result)


def _among(number: int, chosen: int | Container[int] | None) -> bool:
    if chosen is None:
        return True
    return number == chosen if isinstance(chosen, int) else number in chosen


class FaultyConstructor:
    """An ``env_fn`` whose call goes wrong: ``FaultyConstructor(env_fn, "sleep")`` never returns an
    environment.

    By default only in child processes, because a vector environment may build one of its environments in the
    parent to learn the spaces; with ``everywhere=True`` in the parent too.
    """

    def __init__(self, env_fn: Callable[[], gym.Env[Any, Any]], fault: str | Fault, *, everywhere: bool = False) -> None:
        self.env_fn = env_fn
        self.fault = find(fault)
        self.everywhere = everywhere

    def __call__(self) -> gym.Env[Any, Any]:
        env = self.env_fn()
        if self.everywhere or multiprocessing.parent_process() is not None:
            self.fault(None)
        return env


class UnpicklableConstructor:
    """An ``env_fn`` that cannot be sent to a worker: it refuses to be pickled."""

    def __init__(self, env_fn: Callable[[], gym.Env[Any, Any]]) -> None:
        self.env_fn = env_fn

    def __call__(self) -> gym.Env[Any, Any]:
        return self.env_fn()

    def __reduce__(self) -> NoReturn:
        raise pickle.PicklingError("this constructor stays where it is")


def _refuse_to_load() -> NoReturn:
    raise ImportError("this constructor cannot be loaded here")


class UnloadableConstructor(UnpicklableConstructor):
    """An ``env_fn`` that pickles well and raises ``ImportError`` where it is unpickled."""

    def __reduce__(self) -> tuple[Any, ...]:  # type: ignore[override]
        return _refuse_to_load, ()


class NestedEnv(gym.Env[Any, Any]):
    """An environment that is itself a vector environment, with worker processes of its own.

    Args:
        vector_fn: Makes the inner vector environment.

    Its observation is the inner batch of observations; its reward their sum; it never ends.
    """

    def __init__(self, vector_fn: Callable[[], gym.vector.VectorEnv[Any, Any, Any]]) -> None:
        self.inner = vector_fn()
        self.observation_space = self.inner.observation_space
        self.action_space = self.inner.action_space

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Reset all inner environments."""
        super().reset(seed=seed)
        return self.inner.reset(seed=seed)[0], {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Step all inner environments."""
        observation, rewards, *_ = self.inner.step(action)
        return observation, float(np.sum(rewards)), False, False, {}

    def close(self) -> None:
        """Close the inner vector environment."""
        self.inner.close()


class WitnessEnv(gym.Env[np.ndarray[Any, np.dtype[np.int64]], Any]):
    """Says in every observation where it comes from.

    The observation is ``int64``, shape ``(width,)``. Its first entries are :data:`WitnessEnv.FIELDS`; every
    further entry is a checksum of them and of its own position, so that a row put together from two
    observations does not add up. :meth:`read` takes a row apart and checks it. The reward of a step is ``tick
    + actions / 1024``; infos carry ``witness_id``, ``episode`` and ``tick``, and ``last_action`` on every
    third tick only, so that missing keys are exercised too.

    Args:
        witness_id: A number of your choice, the environment's index for one.
        length: Steps in an episode; the last one is terminated if the episode's number is even, truncated if
            it is odd.
        delay: Seconds that every step takes.
        num_actions: Size of the discrete action space.
        width: Entries of an observation, at least ``len(FIELDS) + 1``.
    """

    FIELDS = ("witness_id", "life", "episode", "tick", "steps", "seed", "last_action", "actions")
    """The environment's number; a random number chosen at construction; episodes begun (resets), from 1;
    steps in this episode; steps in this life; the seed of the last seeded reset or -1; the last action or -1;
    the sum of all actions of this episode."""

    def __init__(
        self, witness_id: int = 0, *, length: int = 10, delay: float = 0.0, num_actions: int = 16, width: int = 64
    ) -> None:
        self.observation_space = gym.spaces.Box(-(2**63), 2**63 - 1, (width,), np.int64)
        self.action_space = gym.spaces.Discrete(num_actions)
        self.witness_id, self.length, self.delay, self.width = witness_id, length, delay, width
        self.life = int.from_bytes(os.urandom(4), "little")
        self.episode = self.tick = self.steps = self.actions = 0
        self.last_action = self.seed = -1

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[np.ndarray[Any, np.dtype[np.int64]], dict[str, Any]]:
        """Begin another episode."""
        super().reset(seed=seed)
        self.seed = self.seed if seed is None else seed
        self.episode += 1
        self.tick = self.actions = 0
        self.last_action = -1
        return self.observation(), self.info()

    def step(self, action: Any) -> tuple[np.ndarray[Any, np.dtype[np.int64]], float, bool, bool, dict[str, Any]]:
        """Count one step."""
        if self.delay:
            time.sleep(self.delay)
        self.tick += 1
        self.steps += 1
        self.last_action = int(action)
        self.actions += self.last_action
        done, even = self.tick >= self.length, self.episode % 2 == 0
        return self.observation(), self.tick + self.actions / 1024, done and even, done and not even, self.info()

    def observation(self) -> np.ndarray[Any, np.dtype[np.int64]]:
        """The observation of this moment, shape ``(width,)``."""
        fields = np.array([getattr(self, name) for name in self.FIELDS], dtype=np.int64)
        return np.concatenate([fields, _checksums(fields, self.width)])

    def info(self) -> dict[str, Any]:
        """The info of this moment."""
        info = {"witness_id": self.witness_id, "episode": self.episode, "tick": self.tick}
        return info | {"last_action": self.last_action} if self.tick % 3 == 2 else info

    @classmethod
    def read(cls, row: np.ndarray[Any, Any]) -> dict[str, int]:
        """Take one observation apart.

        Raises:
            AssertionError: If the row is not one whole observation.
        """
        fields = np.array(row[: len(cls.FIELDS)], dtype=np.int64)
        wanted = _checksums(fields, len(row))
        if not np.array_equal(row[len(fields) :], wanted):
            wrong = np.flatnonzero(row[len(fields) :] != wanted) + len(fields)
            raise AssertionError(f"torn row: fields {fields.tolist()} do not belong to entries {wrong.tolist()} of {row}")
        return dict(zip(cls.FIELDS, fields.tolist(), strict=True))


def _checksums(fields: np.ndarray[Any, np.dtype[np.int64]], width: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    digest = 0xCBF29CE484222325  # FNV-1a over the words: the same in every process, unlike hash()
    for word in fields.tolist():
        digest = ((digest ^ (word % 2**64)) * 0x100000001B3) % 2**64
    return np.int64(digest % 2**40) + np.arange(len(fields), width, dtype=np.int64)
