"""One environment, built in a process of its own to see what it is and how long its steps take.

Nothing of it is left in the caller: no GPU context, no threads, no open simulator that every forked worker would inherit.
And nothing of it is left on the machine: that process is a :class:`~vecenv.system.helper_process.HelperProcess`.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import statistics
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any, Final

import cloudpickle
import numpy as np
from gymnasium import Space
from gymnasium.spaces import Discrete

from vecenv.errors import StartupTimeout, WorkerDied
from vecenv.link.packing import PackedError, dumps, pack, unpack
from vecenv.system.cores import seconds_waited
from vecenv.system.helper_process import HelperProcess
from vecenv.system.spawning import NO_GUARD, Variables, missing_guard, why_no_processes
from vecenv.system.supervision import describe_exit
from vecenv.worker.envs import made_by

__all__ = ["Described", "Probe", "Scouted", "Trial", "describe", "probe", "scout"]

_PROBE_SECONDS: Final = 0.15
_PROBE_STEPS: Final = 3000
_CHORES: Final = 100
_CHORE_SECONDS: Final = 40e-6  # of one, where a step of CartPole-v1 takes 6 us: there the constants of plan.py were measured
_CLOSE_SECONDS: Final = 5.0  # for env.close()
_READY: Final = b"?"  # from the scout: it wants to know what to build
_STAY_AWAKE: Final = b"!"  # from the scout: wait for the rest without sleeping
_MASK_KEYS: Final = ("action_mask", "action_masks")


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
        failure: What the environment raised while it was stepped, or how its process ended; then nothing was measured.
    """

    steps: int
    step: float
    cpu: float
    slowest: float
    pace: float = 1.0
    crowding: float = 1.0
    failure: str = ""

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
    """What came back: the description, or why it could not travel, and what its steps showed if they were asked for."""

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
        daemon: As of the workers: a daemonic process may not have ``multiprocessing`` children.
        variables: Environment variables of that process.
    """

    def __init__(
        self,
        env_fns: Sequence[Callable[[], Any]],
        context: Any,
        timeout: float,
        here: bool | None,
        *,
        step: bool,
        daemon: bool = True,
        variables: Variables | None = None,
    ) -> None:
        self._variables = variables
        self._env_fns, self._context, self._timeout, self._daemon = env_fns, context, timeout, daemon
        self._here, self._step = here, step
        self._probe: Probe | None = None

    def describe(self, everyone: bool) -> Described:
        """Metadata and spaces of the first environment; ``everyone``: the observation spaces of all.

        Raises:
            Exception: As :func:`scout`; or why the description could not travel, if none may be built here.
        """
        if self._here or (self._here is None and not self._step) or why_no_processes():
            return describe(self._env_fns, everyone)
        found = scout(
            self._env_fns, self._context, self._timeout, everyone=everyone, step=self._step, daemon=self._daemon,
            variables=self._variables,
        )  # fmt: skip
        self._probe = found.probe
        if isinstance(found.described, Described):
            return found.described
        if self._here is None:
            return describe(self._env_fns, everyone)
        raise found.described

    def measure(self) -> Probe:
        """The time of the first environment's steps."""
        return self._probe or probe(
            self._env_fns[0], self._context, self._timeout, daemon=self._daemon, variables=self._variables
        )


def describe(env_fns: Sequence[Callable[[], Any]], everyone: bool) -> Described:
    """Build the first environment here and read it; with ``everyone`` also each one's observation space, one at a time."""
    env = made_by(env_fns[0], 0)
    try:
        return _read(env, env_fns, everyone)
    finally:
        env.close()


def _read(env: Any, env_fns: Sequence[Callable[[], Any]], everyone: bool) -> Described:
    spaces = [_observation_space(*each) for each in enumerate(env_fns)] if everyone else [env.observation_space]
    return Described({**env.metadata}, env.render_mode, env.action_space, spaces)


def _observation_space(index: int, env_fn: Callable[[], Any]) -> Space[Any]:
    env = made_by(env_fn, index)
    try:
        space: Space[Any] = env.observation_space
        return space
    finally:
        env.close()


def probe(
    env_fn: Callable[[], Any],
    context: Any = None,
    timeout: float = 60.0,
    *,
    daemon: bool = True,
    variables: Variables | None = None,
) -> Probe:
    """Step one environment with random actions for a moment, in a process of its own; see :func:`scout`.

    Where there can be no processes it is built, stepped and closed here.
    """
    if why_no_processes():
        env = made_by(env_fn, 0)
        try:
            return _step_for_a_moment(env, None)
        except Exception as error:
            return _failed(f"{type(error).__name__}: {error}")
        finally:
            env.close()
    found = scout([env_fn], context, timeout, daemon=daemon, variables=variables).probe
    assert found is not None
    return found


def scout(
    env_fns: Sequence[Callable[[], Any]],
    context: Any = None,
    timeout: float = 60.0,
    *,
    everyone: bool = False,
    step: bool = True,
    daemon: bool = True,
    variables: Variables | None = None,
) -> Scouted:
    """Describe environments in a process of their own, and with ``step`` the first one's steps for a moment.

    That process closes the environment, for which it has a few seconds, and ends whatever the environment started. An
    environment that fails while it is stepped is one to be careful with, so that is told by the probe.

    Raises:
        StartupTimeout: It was not built within ``timeout`` seconds; the process was killed.
        WorkerDied: The process ended, or closed its pipe, while the environment was built.
        Exception: What the environment raised while it was built.
    """
    mp = context if context is not None else multiprocessing.get_context()
    wanted = list(env_fns if everyone else env_fns[:1])
    forks = mp.get_start_method() == "fork"
    blob = b"" if forks else cloudpickle.dumps(wanted)
    args = (wanted if forks else None, everyone, step)
    helper = HelperProcess(mp, _scout_main, args, name="vecenv-scout", daemon=daemon, abrupt=True, variables=variables)
    try:
        deadline = time.monotonic() + timeout
        said: PackedError | tuple[bytes | PackedError] = pickle.loads(_hear(helper, helper.start(), blob, deadline, timeout))
        where = f"one environment, pid {helper.pid}, built to look at it"
        if isinstance(said, PackedError):
            helper.has_ended(_CLOSE_SECONDS)
            raise unpack(said, where)
        found = _probed(helper, deadline, timeout) if step else None
        if time.monotonic() < deadline:  # it closes its environment, which may hold what the first worker needs
            helper.has_ended(_CLOSE_SECONDS)
    finally:
        helper.end()
    return Scouted(_opened(said[0], where), found)


def _probed(helper: HelperProcess, deadline: float, timeout: float) -> Probe:
    """What its steps showed."""
    try:
        said: Probe | PackedError = pickle.loads(_hear(helper, helper.pipe, b"", deadline, timeout))
    except (StartupTimeout, WorkerDied) as error:
        return _failed(str(error))
    return said if isinstance(said, Probe) else _failed(said.summary)


def _failed(why: str) -> Probe:
    return Probe(0, 0.0, 0.0, 0.0, failure=why)


def _hear(helper: HelperProcess, pipe: Connection[Any, Any], blob: bytes, deadline: float, timeout: float) -> bytes:
    """What it has to say next. That its pipe is open says nothing: a helper may hold it.

    A new interpreter gets the environments' functions when it is there to read them: they may be larger than a pipe, and
    what it imports first may take for ever.

    Raises:
        StartupTimeout, WorkerDied: Nothing came.
    """
    message = b""
    closed = False
    try:
        if helper.wait(deadline):
            message = helper.receive()
        if message == _READY:
            pipe.send_bytes(blob)
            message = helper.receive() if helper.wait(deadline) else b""
        if message == _STAY_AWAKE:
            while not pipe.poll(0) and not helper.has_ended() and time.monotonic() < deadline:
                pass
            message = helper.receive()
    except (EOFError, ConnectionError):
        closed, message = True, b""
    if message:
        return message
    if not closed and not helper.has_ended():
        raise StartupTimeout(f"an environment could not be built and looked at within {timeout} seconds")
    code = helper.exit_code() if helper.has_ended(_CLOSE_SECONDS) else None
    how = "closed its pipe" if code is None else describe_exit(code)
    text = missing_guard(helper.method) if code == NO_GUARD else f"the environment that was built to look at it {how}"
    raise WorkerDied(text, pid=helper.pid, exitcode=code, command="plan")


def _opened(described: bytes | PackedError, where: str) -> Described | Exception:
    if isinstance(described, PackedError):
        return unpack(described, where)
    try:
        opened: Described = pickle.loads(described)
    except Exception as error:  # a class of the main module, say, which another start method does not share
        return error
    return opened


def _scout_main(connection: Connection[Any, Any], env_fns: Any, everyone: bool, step: bool) -> None:
    pid, env = os.getpid(), None

    def tell(result: Any) -> None:
        if os.getpid() != pid:  # a child that the environment forked has come back from it
            os._exit(0)
        connection.send_bytes(pickle.dumps(result))

    try:
        if env_fns is None:
            connection.send_bytes(_READY)
            env_fns = cloudpickle.loads(connection.recv_bytes())
        env = made_by(env_fns[0], 0)
        tell((_sealed(_read(env, env_fns, everyone)),))
        result: Any = _step_for_a_moment(env, connection) if step else None
    except BaseException as error:
        result = pack(error)
    if result is not None:
        tell(result)
    if env is not None:
        try:
            env.close()
        except BaseException:  # what was asked is answered; a worker's environment will say this to the caller
            traceback.print_exc()


def _sealed(described: Described) -> bytes | PackedError:
    try:
        return dumps(described)
    except Exception as error:
        error.add_note("the metadata and spaces of an environment could not be sent by the process that built it")
        return pack(error)


def _step_for_a_moment(env: Any, caller: Connection[Any, Any] | None) -> Probe:
    """Time steps, and how much slower they are while the caller computes too, if that is another process."""
    env.action_space.seed(0)
    seen = env.reset(seed=0)
    actions = [env.action_space.sample() for _ in range(64)]
    for action in actions[:3]:  # first steps compile, allocate and load
        seen = _step(env, action, seen)
    count, slowest = 0, 0.0
    cpu, queued, began = time.process_time(), seconds_waited() or 0.0, time.perf_counter()
    until = began + _PROBE_SECONDS
    last = began
    while count < _PROBE_STEPS and (last < until or count < 3):
        seen = _step(env, actions[count % 64], seen)
        now = time.perf_counter()
        slowest, last = max(slowest, now - last), now
        count += 1
    computing = (time.process_time() - cpu) / count
    # what a busy machine takes away is no waiting of the environment's
    elapsed = (last - began - ((seconds_waited() or 0.0) - queued)) / count
    alone = together = _chores()
    if caller is not None:
        caller.send_bytes(_STAY_AWAKE)
        together = _chores()
    return Probe(count, max(elapsed, computing), computing, slowest, alone / _CHORE_SECONDS, max(together / alone, 1.0))


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


def _step(env: Any, action: Any, seen: Any) -> Any:
    """A step, by ``action`` or one that is allowed, and the next episode after the last one: ``(observation, info)``."""
    if isinstance(env.action_space, Discrete):
        action = _allowed(env.action_space, action, *seen)
    observation, _, terminated, truncated, info = env.step(action)
    return env.reset() if terminated or truncated else (observation, info)


def _allowed(space: Discrete, action: Any, observation: Any, info: Any) -> Any:
    """``action``, or another one where a mask of the info or the observation forbids it."""
    for held in (info, observation):
        for key in _MASK_KEYS:
            if isinstance(held, dict) and key in held and np.shape(held[key]) == (space.n,):
                choices = np.flatnonzero(held[key])
                place = int(action - space.start)
                if len(choices) and place not in choices:
                    return space.start + choices[place % len(choices)]
                return action
    return action
