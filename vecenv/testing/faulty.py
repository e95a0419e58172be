"""Environments that fail on purpose, to test an engine, or your own training loop, against real failures.

A fault is a function. It receives the result of a call (``(observation, info)`` or the five values of a step) and kills the
process, damages it, raises, hangs, or returns another result. :data:`FAULTS` lists the faults by name, and
:class:`FaultyEnv` triggers one inside any environment at a chosen step, reset, seed or action, or when it is closed:
``FaultyEnv(env, "segfault", step=1000)``.

Faults are real, because a simulated crash is reported by code that a real crash never reaches: ``segfault`` reads address
zero, ``hold_gil`` deadlocks in C, ``kill`` sends SIGKILL. Do not call them in a process that you need. The observations of
:class:`WitnessEnv` name their environment, life, episode and step and carry a checksum, which exposes shifted, repeated and
torn rows.
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
import tempfile
import threading
import time
from collections.abc import Callable, Container
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
"""A fault: a function of the result of a call, which returns it or another one, raises, or never returns."""

FAULTS: Final[dict[str, Fault]] = {}
"""Every fault by name."""

_F = TypeVar("_F", bound=Fault)


def fault(function: _F) -> _F:
    """Add a fault to :data:`FAULTS`, under its own name."""
    FAULTS[function.__name__] = function
    return function


def find_fault(name: str | Fault) -> Fault:
    """Return the fault of this name; return a function unchanged."""
    if callable(name):
        return name
    try:
        return FAULTS[name]
    except KeyError:
        raise ValueError(f"unknown fault {name!r}; the faults are: {', '.join(FAULTS)}") from None


# -- faults that end the process, or hang -----------------------------------------------------------------------------

FOREVER: Final = 3600.0  # seconds that a sleep lasts; finite, so that a process left behind ends


def _disable_core_dump() -> None:
    """Disable the core file of a deliberate crash: it would be useless, and slow to write."""
    try:
        import resource
    except ImportError:  # Windows
        return
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))


def _signal_self(name: str) -> NoReturn:
    """Send this process a signal that ends it."""
    _disable_core_dump()
    os.kill(os.getpid(), getattr(signal, name))
    time.sleep(FOREVER)  # the signal may take a moment, and no code may run after it
    raise AssertionError(f"{name} did not end the process")


@fault
def segfault(result: Any) -> NoReturn:
    """Read the byte at address zero, which raises SIGSEGV from C."""
    _disable_core_dump()
    ctypes.string_at(0)
    raise AssertionError("address zero could be read")


@fault
def abort(result: Any) -> NoReturn:
    """Raise SIGABRT, like a failed C assertion."""
    _disable_core_dump()
    os.abort()


@fault
def bus_error(result: Any) -> NoReturn:
    """Write to a page of a mapped file after the file was truncated, which raises SIGBUS."""
    _disable_core_dump()
    with tempfile.TemporaryFile() as file:
        file.truncate(mmap.PAGESIZE)
        view = mmap.mmap(file.fileno(), mmap.PAGESIZE)
        file.truncate(0)
        view[0] = 1
    raise AssertionError("a page past the end of the file could be written")


@fault
def arithmetic_error(result: Any) -> NoReturn:
    """Raise SIGFPE, like an integer division by zero in C."""
    _signal_self("SIGFPE")


@fault
def kill(result: Any) -> NoReturn:
    """Send this process SIGKILL, as the kernel does when memory runs out."""
    _signal_self("SIGKILL")


@fault
def stop(result: Any) -> Any:
    """Raise SIGSTOP: the process stays alive, and does nothing until it receives SIGCONT."""
    os.kill(os.getpid(), signal.SIGSTOP)
    return result


@fault
def exit_now(result: Any) -> NoReturn:
    """Call ``os._exit(0)``: the process ends without an exception, a signal or a message."""
    os._exit(0)


@fault
def sys_exit(result: Any) -> NoReturn:
    """Call ``sys.exit(3)``, which raises an exception that is not an ``Exception``."""
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
    """Hang in C with the GIL held: no Python code of this process runs any more.

    On Linux, a thread locks a mutex twice. Unlike a sleep, this is not interrupted by a signal.
    """
    if sys.platform == "linux":
        libc = ctypes.PyDLL(None)  # unlike CDLL, keeps the GIL during a call
        mutex = ctypes.create_string_buffer(128)  # all zeros: an unlocked pthread mutex of the default kind
        libc.pthread_mutex_lock(mutex)
        libc.pthread_mutex_lock(mutex)
    else:
        while True:
            sum(range(10**12))
    return result


@fault
def ignore_sigterm(result: Any) -> Any:
    """Ignore SIGTERM, then hang: ``Process.terminate()`` has no effect."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    time.sleep(FOREVER)
    return result


# -- exceptions that cannot be pickled, unpickled or printed, or end the process that unpickles them ------------------


class TwoArgumentsError(Exception):
    """An exception with two arguments that passes only one to its base class, so that unpickling raises ``TypeError``."""

    def __init__(self, code: int, text: str) -> None:
        super().__init__(f"{code}: {text}")
        self.code = code
        self.text = text


class KeywordOnlyError(Exception):
    """An exception that cannot be built from positional arguments, as unpickling tries to do."""

    def __init__(self, *, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class UnpicklableError(Exception):
    """An exception that holds a lock, which cannot be pickled."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.lock = threading.Lock()


class EvilError(Exception):
    """An exception that ends the process that unpickles it, with ``sys.exit``."""

    def __reduce__(self) -> tuple[Any, ...]:
        return sys.exit, (7,)


def _exit_in_another_process(raising_pid: int) -> EvilElsewhereError:
    if os.getpid() != raising_pid:
        sys.exit(7)
    return EvilElsewhereError("harmless in the process that raised it")


class EvilElsewhereError(Exception):
    """An exception that can be unpickled in the process that raised it, but calls ``sys.exit`` in every other process.

    Unpickling it in the process that raised it, as a test, does not reveal the problem.
    """

    def __reduce__(self) -> tuple[Any, ...]:
        return _exit_in_another_process, (os.getpid(),)


class UnprintableError(Exception):
    """An exception that raises another exception when it is printed."""

    def __str__(self) -> str:
        raise RuntimeError("this exception has no text")

    __repr__ = __str__


@fault
def raises(result: Any) -> NoReturn:
    """Raise an ordinary ``ValueError``."""
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


# -- faults that return wrong values, or damage the process -----------------------------------------------------------

HUGE_INFO_BYTES: Final = 100 * 2**20
LEAK_BYTES: Final = 2**20


def _with_observation(result: Any, observation: Any) -> Any:
    return (observation, *result[1:])


def _with_info(result: Any, **info: Any) -> Any:
    return (*result[:-1], {**result[-1], **info})


@fault
def wrong_shape(result: Any) -> Any:
    """Return an observation with one element too many."""
    return _with_observation(result, np.append(np.asarray(result[0]).ravel(), 0))


@fault
def scalar_observation(result: Any) -> Any:
    """Return one number as the observation of an array space, a mistake that broadcasting would hide."""
    return _with_observation(result, np.asarray(result[0]).dtype.type(1))


@fault
def no_observation(result: Any) -> Any:
    """Return ``None`` as the observation, like a forgotten ``return``."""
    return _with_observation(result, None)


@fault
def wrong_dtype(result: Any) -> Any:
    """Return float64 numbers too large for float32: a cast makes them infinite."""
    return _with_observation(result, np.full(np.shape(result[0]), 1e300, dtype=np.float64))


@fault
def too_few_values(result: Any) -> Any:
    """Return a step in the form of Gym before 0.26, with one flag instead of two."""
    return (*result[:-2], result[-1])


@fault
def unpicklable_info(result: Any) -> Any:
    """Return an info that cannot be sent to another process."""
    return _with_info(result, lock=threading.Lock())


class _EvilValue:
    def __reduce__(self) -> tuple[Any, ...]:
        return sys.exit, (7,)


@fault
def evil_info(result: Any) -> Any:
    """Return an info that calls ``sys.exit`` in the process that unpickles it."""
    return _with_info(result, evil=_EvilValue())


@fault
def huge_info(result: Any) -> Any:
    """Return an info of 100 MiB, which far exceeds the buffer of a pipe."""
    return _with_info(result, blob=bytes(HUGE_INFO_BYTES))


_LEAKED: list[Any] = []


@fault
def leak_memory(result: Any) -> Any:
    """Allocate another MiB, touch it, and keep it forever."""
    _LEAKED.append(bytearray(os.urandom(1)) * LEAK_BYTES)
    return result


@fault
def leak_descriptors(result: Any) -> Any:
    """Open a pipe and never close it."""
    _LEAKED.append(os.pipe())
    return result


@fault
def stdio(result: Any) -> Any:
    """Print, write to descriptors 1 and 2, read standard input to its end, and read descriptor 0."""
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
    """Start a daemon thread that sleeps."""
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
    """Close the descriptors 3 to 4095, including the worker's own, as some daemons do when they start."""
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
    """Fork like :func:`fork_helper`, then send SIGKILL: the helper keeps the pipe open, so no end of file arrives."""
    fork_helper(result)
    kill(result)


@fault
def fork_and_return(result: Any) -> Any:
    """Fork, and let both processes return from the call: two workers reply to one request."""
    os.fork()
    return result


# -- environments -----------------------------------------------------------------------------------------------------


class FaultyEnv(gym.Wrapper[Any, Any, Any, Any], RecordConstructorArgs):
    """A wrapper that triggers a fault inside an environment at a moment of your choice.

    A step or reset calls the inner environment first; the fault then receives its result. It must meet all conditions
    that apply to it. For several faults, wrap several times.

    Args:
        env: The environment to wrap.
        fault: A name from :data:`FAULTS`, or any function of one argument.
        step: The steps with the fault, counted from 1 over the life of this object: a number, or a container such as
            ``range(5, 9)``.
        reset: The resets with the fault, counted the same way; automatic resets count as well.
        seed: Limits the fault to episodes that began with this seed, or one of these. Without ``step`` and ``action``, the
            fault occurs in the reset itself.
        action: Limits the fault to steps with this action (compared with ``numpy.array_equal``, dicts and tuples by their
            entries). Without ``step``, it occurs in every such step.
        close: Trigger the fault in the first ``close()``, before the inner one, with ``None`` as its argument.
        once: Path of a file that does not exist yet. All processes and restarts together trigger the fault only once: in the
            process that creates the file.

    Raises:
        ValueError: The fault is unknown, or there is no condition.
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
        if not close and all(condition is None for condition in (step, reset, seed, action)):
            raise ValueError("specify when to trigger the fault: step=, reset=, seed=, action= or close=True")
        self._fault = find_fault(fault)
        self._at_step, self._at_reset, self._at_seed, self._at_action, self._at_close = step, reset, seed, action, close
        self._once = once
        self._steps = self._resets = 0
        self._episode_seed: int | None = None

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Reset the inner environment, then trigger the fault if the conditions hold."""
        result = self.env.reset(seed=seed, options=options)
        self._resets += 1
        self._episode_seed = seed
        only_seed = self._at_seed is not None and self._at_step is None and self._at_action is None
        if (self._at_reset is not None or only_seed) and _matches(self._resets, self._at_reset) and self._seed_matches():
            result = self._trigger(result)
        return result

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        """Step the inner environment, then trigger the fault if the conditions hold."""
        result = self.env.step(action)
        self._steps += 1
        triggers_in_steps = self._at_step is not None or self._at_action is not None
        action_matches = self._at_action is None or _are_equal(action, self._at_action)
        if triggers_in_steps and action_matches and _matches(self._steps, self._at_step) and self._seed_matches():
            result = self._trigger(result)
        return result

    def close(self) -> None:
        """Trigger the fault if ``close=True`` was passed, then close the inner environment."""
        if self._at_close:
            self._at_close = False  # a second close, by a finalizer for example, only closes the inner environment
            self._trigger(None)
        self.env.close()

    def _seed_matches(self) -> bool:
        return self._at_seed is None or (self._episode_seed is not None and _matches(self._episode_seed, self._at_seed))

    def _trigger(self, result: Any) -> Any:
        if self._once is not None:
            try:
                os.close(os.open(self._once, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
            except FileExistsError:
                return result
        return self._fault(result)


def _matches(number: int, condition: int | Container[int] | None) -> bool:
    if condition is None:
        return True
    return number in condition if isinstance(condition, Container) else number == condition


def _are_equal(action: Any, expected: Any) -> bool:
    if isinstance(expected, dict) and isinstance(action, dict):
        return action.keys() == expected.keys() and all(_are_equal(action[key], expected[key]) for key in expected)
    if isinstance(expected, tuple) and isinstance(action, tuple):
        return len(action) == len(expected) and all(map(_are_equal, action, expected))
    return np.array_equal(action, expected)


class FaultyConstructor:
    """An ``env_fn`` that fails when it is called: ``FaultyConstructor(env_fn, "sleep")`` never returns an environment.

    By default it fails only in child processes, because a vector environment may build an environment in the parent
    to read the spaces. With ``everywhere=True`` it fails in the parent, too.
    """

    def __init__(self, env_fn: Callable[[], gym.Env[Any, Any]], fault: str | Fault, *, everywhere: bool = False) -> None:
        self.env_fn = env_fn
        self.fault = find_fault(fault)
        self.everywhere = everywhere

    def __call__(self) -> gym.Env[Any, Any]:
        env = self.env_fn()
        if self.everywhere or multiprocessing.parent_process() is not None:
            self.fault(None)
        return env


class UnpicklableConstructor:
    """An ``env_fn`` that cannot be sent to a worker, because pickling it fails."""

    def __init__(self, env_fn: Callable[[], gym.Env[Any, Any]]) -> None:
        self.env_fn = env_fn

    def __call__(self) -> gym.Env[Any, Any]:
        return self.env_fn()

    def __reduce__(self) -> NoReturn:
        raise pickle.PicklingError("this constructor cannot be pickled")


def _refuse_to_load() -> NoReturn:
    raise ImportError("this constructor cannot be loaded here")


class UnloadableConstructor(UnpicklableConstructor):
    """An ``env_fn`` that can be pickled, but raises ``ImportError`` when it is unpickled."""

    def __reduce__(self) -> tuple[Any, ...]:  # type: ignore[override]
        return _refuse_to_load, ()


class NestedEnv(gym.Env[Any, Any]):
    """An environment that is itself a vector environment, with worker processes of its own.

    Its observation is the inner batch of observations, and its reward the sum of the inner rewards. Its episodes never end.

    Args:
        vector_fn: A function that builds the inner vector environment.
    """

    def __init__(self, vector_fn: Callable[[], gym.vector.VectorEnv[Any, Any, Any]]) -> None:
        self.inner = vector_fn()
        self.observation_space = self.inner.observation_space
        self.action_space = self.inner.action_space

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Reset all inner environments."""
        super().reset(seed=seed)
        return self.inner.reset(seed=seed, options=options)[0], {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Step all inner environments."""
        observation, rewards, *_ = self.inner.step(action)
        return observation, float(np.sum(rewards)), False, False, {}

    def close(self) -> None:
        """Close the inner vector environment."""
        self.inner.close()


class WitnessEnv(gym.Env[np.ndarray[Any, np.dtype[np.int64]], Any]):
    """An environment that identifies itself and its history in every observation.

    The observation is ``int64``, shape ``(width,)``. Its first entries are :data:`WitnessEnv.FIELDS`; every further entry is
    a checksum of them and of its own position, so that a row that mixes two observations is detected. :meth:`read` parses
    and checks a row. The reward of a step is ``tick + actions / 1024``. Infos contain ``witness_id``, ``episode`` and
    ``tick``, and ``last_action`` on every third tick only, so that missing keys are tested too.

    Args:
        witness_id: A number of your choice, such as the environment's index.
        length: Steps in an episode. The last step sets ``terminated`` if the episode's number is even, ``truncated`` if
            it is odd.
        delay: Seconds that every step sleeps.
        num_actions: Size of the discrete action space.
        width: Entries of an observation, at least ``len(FIELDS) + 1``.
    """

    FIELDS = ("witness_id", "life", "episode", "tick", "steps", "seed", "last_action", "actions")
    """The environment's number; a random number chosen at construction; episodes begun (resets), from 1; steps in this
    episode; steps in this life; the seed of the last seeded reset or -1; the last action of this episode or -1; the sum of
    its actions.
    """

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
        """Return the current observation, shape ``(width,)``."""
        fields = np.array([getattr(self, name) for name in self.FIELDS], dtype=np.int64)
        return np.concatenate([fields, _checksums(fields, self.width)])

    def info(self) -> dict[str, Any]:
        """Return the current info."""
        info = {"witness_id": self.witness_id, "episode": self.episode, "tick": self.tick}
        return info | {"last_action": self.last_action} if self.tick % 3 == 2 else info

    @classmethod
    def read(cls, row: np.ndarray[Any, Any]) -> dict[str, int]:
        """Parse one observation.

        Raises:
            AssertionError: The row is not one whole observation.
        """
        fields = np.array(row[: len(cls.FIELDS)], dtype=np.int64)
        expected = _checksums(fields, len(row))
        if not np.array_equal(row[len(fields) :], expected):
            wrong = np.flatnonzero(row[len(fields) :] != expected) + len(fields)
            raise AssertionError(f"torn row: fields {fields.tolist()} do not match entries {wrong.tolist()} of {row}")
        return dict(zip(cls.FIELDS, fields.tolist(), strict=True))


def _checksums(fields: np.ndarray[Any, np.dtype[np.int64]], width: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    digest = 0xCBF29CE484222325  # FNV-1a over the fields: the same in every process
    for value in fields.tolist():
        digest = ((digest ^ (value % 2**64)) * 0x100000001B3) % 2**64
    return np.int64(digest % 2**40) + np.arange(len(fields), width, dtype=np.int64)
