"""One environment, built in a process of its own to see what it is and how long its steps take.

Nothing of it is left in the caller: no GPU context, no threads, no open simulator that every forked worker would inherit.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any, Final

import cloudpickle
from gymnasium import Space

from vecenv.cores import seconds_waited
from vecenv.errors import StartupTimeout, WorkerDied
from vecenv.failure import PackedError, describe_exit, pack, unpack

__all__ = ["Described", "Probe", "Scouted", "Trial", "describe", "probe", "scout"]

_PROBE_SECONDS: Final = 0.15
_PROBE_STEPS: Final = 3000
_CHORES: Final = 100
_CHORE_SECONDS: Final = 40e-6  # of one, where a step of CartPole-v1 takes 6 us: there the constants of plan.py were measured
_STAY_AWAKE: Final = b""  # from the scout: wait for the rest without sleeping


@dataclass(frozen=True, slots=True)
class Probe:
    """What one environment did for a moment.

    Attributes:
        steps: How many steps (automatic resets included) were timed.
        step: Seconds a step, mean, resets included, without the time in which other processes had the core.
        cpu: Seconds a step spent computing.
        slowest: The longest step in seconds.
        pace: How long this machine takes over a fixed piece of work, where 1 is the machine behind the constants of
            :mod:`vecenv.plan`.
        crowding: How much longer it takes while another process computes as well. 1: each has a core of its own; up to 2
            where two of the usable cores are two threads of one.
    """

    steps: int
    step: float
    cpu: float
    slowest: float
    pace: float = 1.0
    crowding: float = 1.0

    @property
    def waits(self) -> float:
        """Share of a step that is waiting, 0 to 1."""
        return min(max(1.0 - self.cpu / self.step, 0.0), 1.0) if self.step > 0 else 0.0


@dataclass(frozen=True, slots=True)
class Described:
    """What a vector environment wants to know of the first environment before any worker starts.

    Attributes:
        metadata: Its metadata, a copy.
        render_mode: Its render mode.
        action_space: Its action space.
        observation_spaces: Its observation space; or, where they may differ, those of all environments.
    """

    metadata: dict[str, Any]
    render_mode: str | None
    action_space: Space[Any]
    observation_spaces: list[Space[Any]]


@dataclass(frozen=True, slots=True)
class Scouted:
    """What came back: the description, or why it could not travel, and the steps' times if they were asked for."""

    described: Described | Exception
    probe: Probe | None


class Trial:
    """One environment of a vector environment, tried before the others are built.

    Args:
        env_fns: Functions that build the environments.
        context: How processes are started.
        timeout: Seconds that building and trying may take in another process.
        here: Whether to describe one built in this process; ``None``: unless another process steps one anyway.
        step: The time of its steps will be wanted.
    """

    def __init__(
        self, env_fns: Sequence[Callable[[], Any]], context: Any, timeout: float, here: bool | None, *, step: bool
    ) -> None:
        self._env_fns, self._context, self._timeout = env_fns, context, timeout
        self._here, self._step = here, step
        self._probe: Probe | None = None

    def describe(self, everyone: bool) -> Described:
        """Metadata and spaces of the first environment; ``everyone``: the observation spaces of all.

        Raises:
            Exception: As :func:`scout`; or why the description could not travel, if none may be built here.
        """
        if self._here or (self._here is None and not self._step):
            return describe(self._env_fns, everyone)
        found = scout(self._env_fns, self._context, self._timeout, everyone=everyone, step=self._step)
        self._probe = found.probe
        if isinstance(found.described, Described):
            return found.described
        if self._here is None:
            return describe(self._env_fns, everyone)
        raise found.described

    def measure(self) -> Probe:
        """The time of the first environment's steps."""
        return self._probe or probe(self._env_fns[0], self._context, self._timeout)


def describe(env_fns: Sequence[Callable[[], Any]], everyone: bool) -> Described:
    """Build the first environment here and read it; with ``everyone`` also each one's observation space, one at a time."""
    env = env_fns[0]()
    try:
        return _read(env, env_fns, everyone)
    finally:
        env.close()


def _read(env: Any, env_fns: Sequence[Callable[[], Any]], everyone: bool) -> Described:
    spaces = [_observation_space(env_fn) for env_fn in env_fns] if everyone else [env.observation_space]
    return Described({**env.metadata}, env.render_mode, env.action_space, spaces)


def _observation_space(env_fn: Callable[[], Any]) -> Space[Any]:
    env = env_fn()
    try:
        space: Space[Any] = env.observation_space
        return space
    finally:
        env.close()


def probe(env_fn: Callable[[], Any], context: Any = None, timeout: float = 60.0) -> Probe:
    """Step one environment with random actions for a moment, in a process of its own; raises as :func:`scout` does."""
    found = scout([env_fn], context, timeout).probe
    assert found is not None
    return found


def scout(
    env_fns: Sequence[Callable[[], Any]],
    context: Any = None,
    timeout: float = 60.0,
    *,
    everyone: bool = False,
    step: bool = True,
) -> Scouted:
    """Describe environments in a process of their own, and with ``step`` the first one's steps for a moment.

    Raises:
        StartupTimeout: Nothing came back within ``timeout`` seconds; the process was killed.
        WorkerDied: The process ended.
        Exception: What the environment raised.
    """
    mp = context if context is not None else multiprocessing.get_context()
    wanted = list(env_fns if everyone else env_fns[:1])
    blob = wanted if mp.get_start_method() == "fork" else cloudpickle.dumps(wanted)
    ours, theirs = mp.Pipe()
    process = mp.Process(target=_scout_main, args=(blob, theirs, everyone, step), daemon=True, name="vecenv-scout")
    process.start()
    theirs.close()
    deadline = time.monotonic() + timeout
    try:
        try:
            found = ours.poll(timeout)
            message = ours.recv_bytes() if found else b""
            if found and message == _STAY_AWAKE:
                while not (found := ours.poll(0)) and time.monotonic() < deadline:
                    pass
                message = ours.recv_bytes() if found else b""
        except EOFError:
            process.join(5.0)
            text = f"the environment that was built to look at it {describe_exit(process.exitcode)}"
            raise WorkerDied(text, pid=process.pid, exitcode=process.exitcode, command="plan") from None
        if not found:
            raise StartupTimeout(f"an environment could not be built and looked at within {timeout} seconds")
        result: PackedError | tuple[bytes | PackedError, Probe | None] = pickle.loads(message)
        where = f"one environment, pid {process.pid}, built to look at it"
        if isinstance(result, PackedError):
            raise unpack(result, where)
        return Scouted(_opened(result[0], where), result[1])
    finally:
        ours.close()
        if process.is_alive():
            process.join(1.0)
        if process.is_alive():
            process.kill()
            process.join()
        process.close()


def _opened(described: bytes | PackedError, where: str) -> Described | Exception:
    if isinstance(described, PackedError):
        return unpack(described, where)
    try:
        opened: Described = pickle.loads(described)
    except Exception as error:  # a class of the main module, say, which another start method does not share
        return error
    return opened


def _scout_main(blob: Any, connection: Connection[Any, Any], everyone: bool, step: bool) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        env_fns = cloudpickle.loads(blob) if isinstance(blob, bytes) else blob
        env = env_fns[0]()
        described = _sealed(_read(env, env_fns, everyone))
        result: Any = (described, _step_for_a_moment(env, connection) if step else None)
    except BaseException as error:
        result = pack(error)
    connection.send_bytes(pickle.dumps(result))
    connection.close()
    os._exit(0)  # nothing of the environment's is waited for


def _sealed(described: Described) -> bytes | PackedError:
    try:
        return pickle.dumps(described)
    except Exception as error:
        error.add_note("the metadata and spaces of an environment could not be sent by the process that built it")
        return pack(error)


def _step_for_a_moment(env: Any, caller: Connection[Any, Any]) -> Probe:
    env.action_space.seed(0)
    env.reset(seed=0)
    actions = [env.action_space.sample() for _ in range(64)]
    for action in actions[:3]:  # first steps compile, allocate and load
        if _step(env, action):
            env.reset()
    count, slowest = 0, 0.0
    cpu, queued, began = time.process_time(), seconds_waited() or 0.0, time.perf_counter()
    until = began + _PROBE_SECONDS
    last = began
    while count < _PROBE_STEPS and (last < until or count < 3):
        if _step(env, actions[count % 64]):
            env.reset()
        now = time.perf_counter()
        slowest, last = max(slowest, now - last), now
        count += 1
    computing = (time.process_time() - cpu) / count
    # what a busy machine takes away is no waiting of the environment's
    elapsed = (last - began - ((seconds_waited() or 0.0) - queued)) / count
    alone = _chores()
    caller.send_bytes(_STAY_AWAKE)
    return Probe(count, max(elapsed, computing), computing, slowest, alone / _CHORE_SECONDS, max(_chores() / alone, 1.0))


def _chores() -> float:
    """Seconds, the median, that a fixed piece of Python takes right now."""
    times = []
    for _ in range(_CHORES):
        began, total, table = time.perf_counter(), 0.0, {}
        for i in range(500):
            table[i & 15] = (i, total)
            total += len(table) * 0.5
        times.append(time.perf_counter() - began)
    return statistics.median(times)


def _step(env: Any, action: Any) -> bool:
    _, _, terminated, truncated, _ = env.step(action)
    return bool(terminated or truncated)


