"""Builds one environment in a process of its own, to read what it is and to time its steps.

The process keeps everything out of the caller that every forked worker would inherit: a GPU context, threads, an open
simulator. It is a :class:`~vecenv.system.helper_process.HelperProcess`, so that what the environment starts ends with it.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import statistics
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from dataclasses import KW_ONLY, dataclass, field
from multiprocessing.connection import Connection
from typing import Any, Final

import numpy as np
from gymnasium import Space
from gymnasium.spaces import Discrete

from vecenv.errors import StartupTimeout, WorkerDied
from vecenv.link.messages import PackedEnvFns, PackedError, dumps, pack_error, unpack_error
from vecenv.system.cores import seconds_waited
from vecenv.system.helper_process import HelperProcess
from vecenv.system.spawning import NO_GUARD, Variables, missing_guard, why_no_processes
from vecenv.system.supervision import describe_exit
from vecenv.worker.envs import made_by

__all__ = ["EnvDescription", "EnvProbe", "StepTimes"]

_STEP_SECONDS: Final = 0.15
_MOST_STEPS: Final = 3000
_CHORES: Final = 100
_CHORE_SECONDS: Final = 40e-6  # of one, where a step of CartPole-v1 takes 6 us: the constants of plan.py were measured there
_CLOSE_SECONDS: Final = 5.0  # for env.close()
_READY: Final = b"?"  # from the process: it waits for the functions to call
_STAY_AWAKE: Final = b"!"  # from the process: the caller is to wait for the next message without sleeping
_MASK_KEYS: Final = ("action_mask", "action_masks")


@dataclass(frozen=True, slots=True)
class StepTimes:
    """How long the steps of one environment took.

    Attributes:
        steps: How many steps (automatic resets included) were timed.
        step: Mean seconds per step, resets included, without the time in which other processes had the core.
        cpu: Seconds per step spent computing.
        slowest: The longest step in seconds.
        pace: How long this machine takes over a fixed piece of work, where 1 is the machine behind the constants of
            :mod:`vecenv.planning.plan`.
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
class EnvDescription:
    """What a vector environment has to know of its environments before it starts workers.

    Attributes:
        metadata: The first environment's metadata, a copy.
        render_mode: Its render mode.
        action_space: Its action space.
        observation_spaces: Its observation space; or, where they may differ, those of all environments.
        env_id: Under which it is registered, or its class.
    """

    metadata: dict[str, Any]
    render_mode: str | None
    action_space: Space[Any]
    observation_spaces: list[Space[Any]]
    env_id: str = ""


@dataclass(eq=False)
class EnvProbe:
    """Describes and times the first environment of a vector environment, before the others are built.

    The process closes the environment, for which it has a few seconds, and ends what the environment started.

    Args:
        env_fns: Functions that build the environments.
        context: A ``multiprocessing`` context; ``None``: the default one.
        timeout: Seconds to build and step the environment in another process.
        here: Describe an environment built in this process; ``None``: unless another process steps one anyway.
        step: The times of steps will be needed.
        daemon: As of the workers: a daemonic process may not have ``multiprocessing`` children.
        variables: Environment variables of the process.
    """

    env_fns: Sequence[Callable[[], Any]]
    context: Any = None
    timeout: float = 60.0
    _: KW_ONLY
    here: bool | None = None
    step: bool = True
    daemon: bool = True
    variables: Variables | None = None
    _times: StepTimes | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        self.context = self.context or multiprocessing.get_context()

    def describe(self, all_envs: bool = False) -> EnvDescription:
        """Metadata and spaces of the first environment; ``all_envs``: the observation spaces of all.

        Raises:
            StartupTimeout: It was not built within ``timeout`` seconds; the process was killed.
            WorkerDied: The process ended, or closed its pipe, while the environment was built.
            Exception: What the environment raised while it was built; why its description could not be sent, where no
                environment may be built in this process.
        """
        if not (self.here or (self.here is None and not self.step) or why_no_processes()):
            description = self._ask_process(all_envs, self.step)
            if isinstance(description, EnvDescription):
                return description
            if self.here is not None:
                raise description
        with closing(made_by(self.env_fns[0], 0)) as env:
            return _describe(env, self.env_fns, all_envs)

    def times(self) -> StepTimes:
        """The times of random steps. An environment that fails while it is stepped is no error, but a ``failure``.

        Raises:
            Exception: As of :meth:`describe`.
        """
        if self._times is None and why_no_processes():
            with closing(made_by(self.env_fns[0], 0)) as env:
                try:
                    self._times = _time_steps(env, None)
                except Exception as error:
                    self._times = _failed(f"{type(error).__name__}: {error}")
        elif self._times is None:
            self._ask_process(all_envs=False, step=True)
        assert self._times is not None
        return self._times

    def _ask_process(self, all_envs: bool, step: bool) -> EnvDescription | Exception:
        """The description, or why it could not be sent; with ``step`` also times the steps."""
        env_fns = list(self.env_fns if all_envs else self.env_fns[:1])
        sent: Any = env_fns
        blob = b""
        if self.context.get_start_method() != "fork":
            sent = PackedEnvFns.of(range(len(env_fns)), env_fns, "the process that looks at it needs")
            blob, sent.functions = pickle.dumps(sent.functions), []
        helper = HelperProcess(
            self.context, _main, (sent, all_envs, step), name="vecenv-probe", daemon=self.daemon, abrupt=True,
            variables=self.variables,
        )  # fmt: skip
        try:
            deadline = time.monotonic() + self.timeout
            helper.start()
            said: PackedError | tuple[bytes | PackedError] = self._receive(helper, blob, deadline)
            where = f"one environment, pid {helper.pid}, built to look at it"
            if isinstance(said, PackedError):
                helper.has_ended(_CLOSE_SECONDS)
                raise unpack_error(said, where)
            if step:
                self._times = self._receive_times(helper, deadline)
            if time.monotonic() < deadline:  # it closes its environment, which may hold what the first worker needs
                helper.has_ended(_CLOSE_SECONDS)
        finally:
            helper.end()
        if isinstance(said[0], PackedError):
            return unpack_error(said[0], where)
        try:
            description: EnvDescription = pickle.loads(said[0])
        except Exception as error:  # a class of the main module, say, which another start method does not share
            return error
        return description

    def _receive_times(self, helper: HelperProcess, deadline: float) -> StepTimes:
        try:
            said: StepTimes | PackedError = self._receive(helper, b"", deadline)
        except (StartupTimeout, WorkerDied) as error:
            return _failed(str(error))
        return said if isinstance(said, StepTimes) else _failed(said.summary)

    def _receive(self, helper: HelperProcess, blob: bytes, deadline: float) -> Any:
        """The next message of the process. An open pipe proves nothing: a program of the environment may hold it.

        A new interpreter gets the functions (``blob``) when it is ready to read them: they may be larger than a pipe, and
        its imports may take for ever.

        Raises:
            StartupTimeout, WorkerDied: Nothing came.
        """
        message = helper.receive() if helper.wait(deadline) else b""
        if message == _READY:
            with suppress(ConnectionError):  # it has ended
                helper.pipe.send_bytes(blob)
            message = helper.receive() if helper.wait(deadline) else b""
        if message == _STAY_AWAKE:
            while not helper.pipe.poll(0) and not helper.has_ended() and time.monotonic() < deadline:
                pass
            message = helper.receive()
        if message:
            return pickle.loads(message)
        if time.monotonic() >= deadline and not helper.has_ended():
            raise StartupTimeout(f"an environment could not be built and looked at within {self.timeout} seconds")
        code = helper.exit_code() if helper.has_ended(_CLOSE_SECONDS) else None
        how = "closed its pipe" if code is None else describe_exit(code)
        text = missing_guard(helper.method) if code == NO_GUARD else f"the environment that was built to look at it {how}"
        raise WorkerDied(text, pid=helper.pid, exitcode=code, command="plan")


def _failed(why: str) -> StepTimes:
    return StepTimes(0, 0.0, 0.0, 0.0, failure=why)


def _describe(env: Any, env_fns: Sequence[Callable[[], Any]], all_envs: bool) -> EnvDescription:
    """Read ``env``; with ``all_envs`` also build each environment for its observation space, one at a time."""
    spaces = [] if all_envs else [env.observation_space]
    for index, env_fn in enumerate(env_fns if all_envs else ()):
        with closing(made_by(env_fn, index)) as other:
            spaces.append(other.observation_space)
    name = env.spec.id if getattr(env, "spec", None) is not None else type(getattr(env, "unwrapped", env)).__name__
    return EnvDescription({**env.metadata}, env.render_mode, env.action_space, spaces, name)


# -- in the process ----------------------------------------------------------------------------------------------------


def _main(connection: Connection[Any, Any], env_fns: Any, all_envs: bool, step: bool) -> None:
    pid, env = os.getpid(), None

    def send(message: Any) -> None:
        if os.getpid() != pid:  # a child that the environment forked has come back from it
            os._exit(0)
        connection.send_bytes(pickle.dumps(message))

    try:
        if isinstance(env_fns, PackedEnvFns):
            connection.send_bytes(_READY)
            env_fns.functions = pickle.loads(connection.recv_bytes())
            env_fns = env_fns.load(0, "in the process that looks at it")
        env = made_by(env_fns[0], 0)
        send((_packed(_describe(env, env_fns, all_envs)),))
        times: StepTimes | PackedError | None = _time_steps(env, connection) if step else None
    except BaseException as error:
        times = pack_error(error)
    if times is not None:
        send(times)
    if env is not None:
        try:
            env.close()
        except BaseException:  # the answers are sent; an environment of a worker will report this to the caller
            traceback.print_exc()


def _packed(description: EnvDescription) -> bytes | PackedError:
    try:
        return dumps(description)
    except Exception as error:
        error.add_note("the metadata and spaces of an environment could not be sent by the process that built it")
        return pack_error(error)


def _time_steps(env: Any, caller: Connection[Any, Any] | None) -> StepTimes:
    """Time steps, and how much slower they are while the caller, if it is another process, computes too."""
    env.action_space.seed(0)
    seen = env.reset(seed=0)
    actions = [env.action_space.sample() for _ in range(64)]
    for action in actions[:3]:  # first steps compile, allocate and load
        seen = _step(env, action, seen)
    count, slowest = 0, 0.0
    cpu, queued, began = time.process_time(), seconds_waited() or 0.0, time.perf_counter()
    until = began + _STEP_SECONDS
    last = began
    while count < _MOST_STEPS and (last < until or count < 3):
        seen = _step(env, actions[count % 64], seen)
        now = time.perf_counter()
        slowest, last = max(slowest, now - last), now
        count += 1
    computing = (time.process_time() - cpu) / count
    # time that a busy machine takes away is no waiting of the environment's
    elapsed = (last - began - ((seconds_waited() or 0.0) - queued)) / count
    alone = together = _time_chores()
    if caller is not None:
        caller.send_bytes(_STAY_AWAKE)
        together = _time_chores()
    return StepTimes(count, max(elapsed, computing), computing, slowest, alone / _CHORE_SECONDS, max(together / alone, 1.0))


def _time_chores() -> float:
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
    """Step, by ``action`` or one that is allowed, and reset at the end of an episode: ``(observation, info)``."""
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
                return action if not len(choices) or place in choices else space.start + choices[place % len(choices)]
    return action
