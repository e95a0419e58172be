"""Trials of environments: recorded calls, digests of the returned values, and step times.

The trials run in children of the probe's process (:func:`run_in_child`). Calls are recorded as
``(call, {name of a value: digest})``, so that runs in different processes can be compared value by value.
"""

from __future__ import annotations

import collections
import copy
import hashlib
import itertools
import math
import multiprocessing
import os
import pickle
import random
import signal
import statistics
import time
import warnings
from collections.abc import Callable, Generator, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

import numpy as np
from gymnasium.spaces import Discrete

from vecenv.link.envs import build_env, explain_bad_step, unpack_reset
from vecenv.link.messages import pack_error, summary
from vecenv.system.cores import seconds_waited

Record: TypeAlias = list[tuple[str, dict[str, bytes]]]

SLOW_STEP_SECONDS: Final = 0.01
_TIMED_STEPS: Final = 10
_TIMED_SECONDS: Final = 0.03
_SHORT_SECONDS: Final = 1e-3  # in shorter runs, a single interruption by the scheduler would dominate the mean
_MAX_RESETS: Final = 4  # per phase
_SLOW_RESET_SECONDS: Final = 0.1  # after a slower first reset, a phase does not reset at step `reset_at`
_POLL_SECONDS: Final = 0.005
CLOSE_SECONDS: Final = 5.0  # for env.close()
_MASK_KEYS: Final = ("action_mask", "action_masks")
_VALUE_NAMES: Final = {
    "reset": ("observation", "info"),
    "step": ("observation", "reward", "termination", "truncation", "info"),
}


@dataclass(frozen=True, slots=True)
class StepTimes:
    """The step times of one environment.

    Attributes:
        steps: The number of timed steps.
        step: Seconds per step, without the time in which other processes had the core.
        cpu: Seconds per step spent computing.
        pace: The time of a fixed piece of work, relative to the machine on which the constants of
            :mod:`vecenv.planning.plan` were measured.
        crowding: The factor by which that work slows down while another process computes: 1 if each has its own core, up
            to 2 if two usable cores are hardware threads of one core.
        failure: The reason why nothing was measured, such as the error of a step; empty if there is none.
        draws: Names of the shared generators from which the environment drew.
    """

    steps: int
    step: float
    cpu: float
    pace: float = 1.0
    crowding: float = 1.0
    failure: str = ""
    draws: tuple[str, ...] = ()

    @property
    def waits(self) -> float:
        """The share of a step that is spent waiting, 0 to 1."""
        return min(max(1.0 - self.cpu / self.step, 0.0), 1.0) if self.step > 0 else 0.0

    @property
    def slow(self) -> bool:
        """True if steps are so slow that sharing a process gains little."""
        return self.step > SLOW_STEP_SECONDS

    @classmethod
    def failed(cls, reason: str) -> StepTimes:
        """Return the times of an environment that failed, without any timed step."""
        return cls(0, 0.0, 0.0, failure=reason)


def time_steps(env: Any) -> StepTimes:
    """Reset ``env``, and time random steps and the resets after episodes.

    It must have been stepped before, because first steps may compile, allocate and load.
    """
    env.action_space.seed(0)
    latest = env.reset(seed=0)
    actions = [env.action_space.sample() for _ in range(_TIMED_STEPS)]
    seconds: list[float] = []
    cpu, waited_before = time.process_time(), seconds_waited() or 0.0
    for action in actions:
        if sum(seconds) > _TIMED_SECONDS and len(seconds) > 1:
            break
        started = time.perf_counter()
        observation, _, terminated, truncated, info = env.step(allow_action(env.action_space, action, *latest))
        latest = env.reset() if terminated or truncated else (observation, info)
        seconds.append(time.perf_counter() - started)
    computing = (time.process_time() - cpu) / len(seconds)
    if sum(seconds) < _SHORT_SECONDS:
        elapsed = computing = statistics.median(seconds)
    else:  # time in which other processes had the core is not part of a step
        elapsed = (sum(seconds) - ((seconds_waited() or 0.0) - waited_before)) / len(seconds)
    return StepTimes(len(seconds), max(elapsed, computing), computing)


def allow_action(space: Any, action: Any, observation: Any, info: Any) -> Any:
    """Return ``action``, or an allowed one if a mask in the info or the observation forbids it."""
    for source in (info, observation) if isinstance(space, Discrete) else ():
        for key in _MASK_KEYS:
            if isinstance(source, dict) and key in source and np.shape(source[key]) == (space.n,):
                choices = np.flatnonzero(source[key])
                index = int(action - space.start)
                return action if not len(choices) or index in choices else space.start + choices[index % len(choices)]
    return action


class TriedEnv:
    """An environment and the record of the calls made to it.

    Args:
        env_fn: The function that builds the environment.
        index: The environment's index, for error messages.
        seed: The seed of the random actions and of unseeded generators. Phases reset the environment with ``1000 + seed``.
        padding: The number of objects to allocate first, so that later ones have other addresses.

    Attributes:
        record: The calls.
        error: The error of the building, or of the latest phase.
        failure: The first error, in one line.
        phase_args: Arguments of :meth:`phase` that repeat the latest phase exactly.

    Raises:
        Exception: The error of building the environment.
    """

    def __init__(self, env_fn: Callable[[], Any], index: int, seed: int, padding: int = 0) -> None:
        self._index, self.seed = index, seed
        self.record: Record = []
        self.error: Exception | None = None
        self.failure = ""
        self.step_seconds: list[float] = []
        self._cpu_seconds = 0.0
        self._space: Any = None
        self.phase_args = (0, 0, math.inf)
        self._entropy = random.Random(seed)

        def build() -> Any:  # no memory may be freed between the padding and the environment, which could reuse it
            self._padding = [bytes(number % 600) for number in range(padding)]
            return env_fn()

        self.env: Any = self.call("build", build_env, build, index)
        if self.error is not None:
            raise self.error

    def call(self, name: str, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Make a call and record the digests of its values, or of its error, which is then kept in ``error``."""
        bit_generator: Any = np.random.bit_generator
        bit_generator.randbits = self._entropy.getrandbits  # makes unseeded generators reproducible
        try:
            value = function(*args, **kwargs)
            self.record.append((name, {} if name == "build" else _digest_values(name, value)))
            return value
        except Exception as error:
            self.error, self.failure = error, self.failure or summary(error)
            self.record.append((name, _digest_values("error", repr(error))))
            return None

    def phase(self, steps: int, reset_at: int, seconds: float = math.inf, delay: float = 0.0) -> Generator[None, None, None]:
        """Reset with the seed and step; reset again at step ``reset_at`` and after episodes. Yield between calls.

        The phase ends after ``seconds`` of stepping, but not before its second step. Last, it renders, unless that is for
        humans. ``phase_args`` repeat it exactly.
        """
        self.error = self._space = None
        resets, ended, seconds_stepped = 1, False, 0.0
        started = time.perf_counter()
        latest = self.call("reset", self._reset, seed=1000 + self.seed)
        if time.perf_counter() - started > _SLOW_RESET_SECONDS and seconds < math.inf:
            reset_at = -1
        self.phase_args = (0, reset_at, math.inf)
        for number in range(steps):
            yield
            time.sleep(delay)
            if seconds_stepped > seconds and number > 1:
                break
            self.phase_args = (number + 1, reset_at, math.inf)
            if self.error is None and (ended or number == reset_at) and resets < _MAX_RESETS:
                latest, resets, ended = self.call("reset", self._reset), resets + 1, False
                yield
            if self.error is not None or ended:
                break
            action, waited_before = self._sample(latest), seconds_waited() or 0.0
            started, cpu = time.perf_counter(), time.process_time()
            results = self.call("step", self._step, action)
            elapsed, cpu_used = time.perf_counter() - started, time.process_time() - cpu
            self.step_seconds.append(max(elapsed - ((seconds_waited() or 0.0) - waited_before), cpu_used))
            self._cpu_seconds += cpu_used
            seconds_stepped += self.step_seconds[-1]
            if self.error is None:
                observation, _, terminated, truncated, info = results
                latest, ended = (observation, info), bool(terminated or truncated)
        yield
        if self.error is None and getattr(self.env, "render_mode", None) not in (None, "human"):
            self.call("render", self.env.render)

    @property
    def is_slow(self) -> bool:
        """True if even the fastest step was slow; a first step may compile."""
        return bool(self.step_seconds) and min(self.step_seconds) > SLOW_STEP_SECONDS

    def times(self) -> StepTimes:
        """Return the times of the recorded steps if they are slow, which is precise enough; otherwise time further steps."""
        if self.is_slow:
            count = len(self.step_seconds)
            return StepTimes(count, sum(self.step_seconds) / count, self._cpu_seconds / count)
        times = None if self.failure else self.call("time", time_steps, self.env)
        return times or StepTimes.failed(self.failure)

    def _reset(self, **kwargs: Any) -> tuple[Any, Any]:
        return unpack_reset(self.env.reset(**kwargs), self._index)

    def _step(self, action: Any) -> tuple[Any, ...]:
        try:
            observation, reward, terminated, truncated, info = self.env.step(action)
        except Exception as error:
            if (explained := explain_bad_step(error, self._index)) is not None:
                raise explained from None
            raise
        return observation, reward, terminated, truncated, info

    def _sample(self, latest: Any) -> Any:
        """Return a random action that the latest observation and info allow; the sequence is the same in each phase."""
        if self._space is None:
            self._space = copy.deepcopy(self.env.action_space)
            self._space.seed(self.seed)
        return allow_action(self._space, self._space.sample(), *latest)


def run_phases(*phases: Generator[None, None, None]) -> None:
    """Run phases to their ends, alternating their calls."""
    collections.deque(itertools.zip_longest(*phases), 0)


def _digest_values(call: str, value: Any) -> dict[str, bytes]:
    """Return a digest of each value that a call returned, by name. Values that cannot be pickled are left out."""
    digests: dict[str, bytes] = {}

    def visit(name: str, item: Any) -> None:
        if isinstance(item, (dict, list, tuple)) and len(digests) < 500:
            for key, part in item.items() if isinstance(item, dict) else enumerate(item):
                visit(f"{name}.{key}", part)
            return
        with suppress(Exception):
            data = pickle.dumps(np.asarray(item) if hasattr(item, "__array__") else item)
            digests[name] = hashlib.blake2b(data, digest_size=8).digest()

    if call in _VALUE_NAMES and isinstance(value, (tuple, list)):
        for name, item in zip(_VALUE_NAMES[call], value, strict=False):
            visit(name, item)
    else:
        visit(call, value)
    return digests


# -- children -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ChildEnd:
    """The end of a child that returned nothing: its exit code (negative: a signal), or ``None`` if it took too long."""

    exitcode: int | None


def run_in_child(function: Callable[..., Iterator[Any]], *args: Any, seconds: float) -> Any:
    """Run ``function``, which yields one value, in a fork of this process.

    The child's output is discarded.

    Args:
        function: A generator function. Its code after ``yield`` may take :data:`CLOSE_SECONDS`; errors there are ignored.
        args: Its arguments.
        seconds: Time limit for the value.

    Returns:
        The value, a :class:`~vecenv.link.messages.PackedError` or a :class:`ChildEnd`.
    """
    (receiver, sender), state = multiprocessing.Pipe(False), random.getstate()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # fork() in a process with threads
        pid = os.fork()
    if pid == 0:
        _run_and_exit(function, args, sender, state)
    sender.close()
    value, code, received, deadline = None, None, False, time.monotonic() + seconds
    try:
        while (code := _poll_exit(pid)) is None and time.monotonic() < deadline:
            if received:
                time.sleep(_POLL_SECONDS)
            elif receiver.poll(_POLL_SECONDS):
                value, received = _receive(receiver), True  # None: the child has closed its end
                deadline = deadline if value is None else time.monotonic() + CLOSE_SECONDS
        if value is None and receiver.poll(0):  # the child ended right after sending
            value = _receive(receiver)
    finally:
        if code is None:
            os.kill(pid, signal.SIGKILL)
            _poll_exit(pid, 0)
        receiver.close()
    return ChildEnd(code) if value is None else value


def _receive(receiver: Any) -> Any:
    try:
        return pickle.loads(receiver.recv_bytes())
    except (EOFError, ConnectionError):
        return None


def _poll_exit(pid: int, options: int | None = None) -> int | None:
    """Return the exit code of a child, or ``None`` while it runs."""
    try:
        ended_pid, status = os.waitpid(pid, os.WNOHANG if options is None else options)
    except ChildProcessError:  # the program ignores SIGCHLD, so the kernel reaped it
        return 255
    return os.waitstatus_to_exitcode(status) if ended_pid else None


def _run_and_exit(function: Callable[..., Iterator[Any]], args: tuple[Any, ...], sender: Any, state: Any) -> None:
    """Run the child: send what the generator yields, run the rest of it, and exit."""
    pid = os.getpid()
    try:
        random.setstate(state)  # fork() reseeds the generator
        null = os.open(os.devnull, os.O_WRONLY)
        for number in (1, 2):
            os.dup2(null, number)
        running = function(*args)
        value: Any = next(running)
    except BaseException as error:
        running, value = iter(()), pack_error(error)
    try:
        if os.getpid() == pid:  # otherwise this is a child that the environment forked and that returned into this code
            sender.send_bytes(pickle.dumps(value))
            next(running, None)
    finally:
        os._exit(0)
