"""The environment probe: reads spaces, times steps and checks independence, in a temporary process.

So nothing that forked workers would inherit is created in the caller: no GPU context, no threads, no open simulator. (Only
spaces may also be read from an environment that the caller builds.) The process is a
:class:`~vecenv.system.helper_process.HelperProcess`, so everything that the environment starts ends with it. To try
environments, it forks one child per run (:mod:`vecenv.planning.independence`).
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import closing, suppress
from dataclasses import KW_ONLY, dataclass, field, replace
from functools import partial
from multiprocessing.connection import Connection
from types import CellType, FunctionType, MethodType
from typing import Any, Final

from gymnasium import Space

from vecenv.errors import StartupTimeout, WorkerDied, format_seconds
from vecenv.link.envs import build_env, find_env_id
from vecenv.link.messages import EnvFnsToStart, PackedEnvFns, PackedError, dumps, note_once, pack_error, unpack_error
from vecenv.link.own_generators import with_own_generators
from vecenv.planning.independence import CANNOT_TELL, Independence, IndependenceCheck, Run, choose_pairs
from vecenv.planning.trial import CLOSE_SECONDS, ChildEnd, StepTimes
from vecenv.system.helper_process import HelperProcess
from vecenv.system.signals import call_with_fallback
from vecenv.system.spawning import NO_GUARD, Variables, explain_missing_guard, explain_unsupported_processes
from vecenv.system.supervision import describe_exit

__all__ = ["EnvDescription", "EnvProbe", "StepTimes"]

_BENCHMARK_RUNS: Final = 100
# Per benchmark run, on the machine where plan.py's constants were measured. A step of CartPole-v1 takes 6 us there.
_REFERENCE_SECONDS: Final = 40e-6
_READY: Final = b"?"  # sent by the process when it is ready to receive the functions
_POLL_WITHOUT_SLEEP: Final = b"!"  # sent by the process: the caller must poll for the next message without sleeping


@dataclass(frozen=True, slots=True)
class EnvDescription:
    """The properties of environments that a vector environment needs before it starts workers.

    Attributes:
        metadata: The first environment's metadata, a copy.
        render_mode: Its render mode.
        action_space: Its action space.
        observation_spaces: A list with its observation space, or with those of all environments if they may differ.
        env_id: Its id in the registry, or its class.
    """

    metadata: dict[str, Any]
    render_mode: str | None
    action_space: Space[Any]
    observation_spaces: list[Space[Any]]
    env_id: str = ""


@dataclass(eq=False)
class EnvProbe:
    """A probe that describes and tries environments before a vector environment builds all of them.

    The temporary process gets a few seconds to close the environments. Processes that the environments started end with it.

    Args:
        env_fns: Functions that build the environments.
        context: A ``multiprocessing`` context, ``multiprocessing.get_context()`` by default.
        timeout: Time limit, in seconds, to build and step environments in another process.
        example: An object with the spaces and metadata of all environments; no environment is then built to read them.
        in_this_process: Describe an environment built in this process; ``None``: only without ``step``, or if a description
            cannot be sent. Where worker processes are not possible, it is always built here.
        step: Also try the environment and time its steps.
        check: When trying it, also check whether environments may share a process.
        own_generators: True if each environment has generators of its own.
        daemon: The workers' ``daemon`` option: a daemonic process may not have ``multiprocessing`` children.
        variables: Environment variables of the process.
    """

    env_fns: Sequence[Callable[[], Any]]
    context: Any = field(default_factory=multiprocessing.get_context)
    timeout: float = 60.0
    _: KW_ONLY
    example: Any = None
    in_this_process: bool | None = None
    step: bool = True
    check: bool = True
    own_generators: bool = False
    daemon: bool = True
    variables: Variables | None = None
    _measured: tuple[StepTimes, Independence] | None = field(default=None, init=False)

    def describe(self, all_envs: bool = False) -> EnvDescription:
        """Return metadata and spaces of the first environment; with ``all_envs`` the observation spaces of all.

        Raises:
            StartupTimeout: The environment was not built within ``timeout`` seconds; the process was killed.
            WorkerDied: The process ended, or closed its pipe, while the environment was built.
            ValueError: Two functions returned the same environment.
            Exception: An error of ``env_fn``; or of sending the description, if ``in_this_process`` is ``False``.
        """
        env_fns = self.env_fns if all_envs else self.env_fns[:1]
        if self.example is not None:
            example = _describe(self.example)
            return replace(example, observation_spaces=example.observation_spaces * len(env_fns))
        if not (self.in_this_process or (self.in_this_process is None and not self.step) or explain_unsupported_processes()):
            if self.step and not all_envs and not find_process_object(self.env_fns):
                description = self._try_envs()
            else:
                description = self._run_in_process(env_fns, range(len(env_fns)), step=False)
            if isinstance(description, EnvDescription):
                return description
            if self.in_this_process is not None:
                raise description
        with closing(build_env(env_fns[0], 0)) as env:
            return _describe(env, env_fns[1:])

    def measure(self) -> tuple[StepTimes, Independence]:
        """Return the times of random steps, and the verdict on whether environments may share a process.

        If a reset, a step or a rendering raises, the exception is the ``failure`` of the times. Environments are not tried
        where worker processes are not possible, or if their functions use an object of ``multiprocessing``, for example a
        counter.

        Raises:
            Exception: The errors of :meth:`describe`.
        """
        if self._measured is None:
            if obstacle := explain_unsupported_processes():
                self._measured = StepTimes.failed(obstacle), Independence()
            elif found := find_process_object(self.env_fns):
                reason = f"they were not tried, because their functions use a {found}, which other processes share"
                self._measured = StepTimes.failed(reason), Independence(CANNOT_TELL, reason)
            else:
                self._try_envs()
        assert self._measured is not None
        return self._measured

    @property
    def draws(self) -> tuple[str, ...]:
        """The shared generators that the environment drew from, if it was stepped."""
        return () if self._measured is None else self._measured[0].draws

    def _try_envs(self) -> EnvDescription | Exception:
        """Try environments, and return the description of the first one, or the error raised while it was sent."""
        indices = [0, *(choose_pairs(self.env_fns) if self.check else [])]
        return self._run_in_process([self.env_fns[index] for index in indices], indices, step=True)

    def _run_in_process(
        self, env_fns: Sequence[Callable[[], Any]], indices: Sequence[int], *, step: bool
    ) -> EnvDescription | Exception:
        if self.own_generators:
            env_fns = with_own_generators(env_fns)
        sent: Any = env_fns
        if self.context.get_start_method() != "fork":
            sent = EnvFnsToStart(indices, env_fns, "the process that inspects it needs", separately=True)
        trial = (indices, self.check, self.own_generators) if step else None
        helper = HelperProcess(
            self.context, _run_probe, (sent, trial), name="vecenv-probe", daemon=self.daemon, abrupt=True,
            variables=self.variables,
        )  # fmt: skip
        try:
            deadline = time.monotonic() + self.timeout
            helper.start()
            blob = pickle.dumps(sent.functions) if isinstance(sent, EnvFnsToStart) else b""
            reply: PackedError | tuple[bytes | PackedError] = self._receive(helper, blob, deadline)
            where = f"an environment tried in a process of its own, pid {helper.pid}"
            if isinstance(reply, PackedError):
                helper.has_ended(CLOSE_SECONDS)
                raise unpack_error(reply, where)
            if step:
                self._measured = self._receive_result(helper, deadline)
            if time.monotonic() < deadline:  # until closed, its environment may hold a resource that the first worker needs
                helper.has_ended(CLOSE_SECONDS)
        finally:
            helper.end()
        if isinstance(reply[0], PackedError):
            return unpack_error(reply[0], where)
        # this may raise, for example for a class of the main module, if the start method does not share that module
        unpickle = partial(pickle.loads, reply[0])
        description: EnvDescription | Exception = call_with_fallback(unpickle, lambda error: error, Exception)
        return description

    def _receive_result(self, helper: HelperProcess, deadline: float) -> tuple[StepTimes, Independence]:
        try:
            reply = self._receive(helper, b"", deadline)
        except (StartupTimeout, WorkerDied) as error:
            reason = f"one of them failed while it was tried: {error}"
            return StepTimes.failed(str(error)), Independence(CANNOT_TELL, reason)
        if isinstance(reply, PackedError):
            reason = f"one of them failed while it was tried: {reply.summary}"
            return StepTimes.failed(reply.summary), Independence(CANNOT_TELL, reason)
        times, found = reply
        if isinstance(found, PackedError):
            raise unpack_error(found, "found by trying two environments in one process")
        return times, found

    def _receive(self, helper: HelperProcess, blob: bytes, deadline: float) -> Any:
        """Return the next message of the process, or raise ``StartupTimeout`` or ``WorkerDied`` if none arrives."""
        # a program that the environment started may hold the pipe open, so the wait also ends when the process does
        message = helper.receive() if helper.wait(deadline) else b""
        # a new interpreter reads the functions only now: sent earlier, they could fill the pipe while its imports hang
        if message == _READY:
            with suppress(ConnectionError):  # the process has ended
                helper.pipe.send_bytes(blob)
            message = helper.receive() if helper.wait(deadline) else b""
        if message == _POLL_WITHOUT_SLEEP:
            while not helper.pipe.poll(0) and not helper.has_ended() and time.monotonic() < deadline:
                pass
            message = helper.receive()
        if message:
            return pickle.loads(message)
        if time.monotonic() >= deadline and not helper.has_ended():
            limit = format_seconds(self.timeout)
            raise StartupTimeout(f"an environment could not be built, reset and stepped within {limit}")
        code = helper.reap() if helper.has_ended(CLOSE_SECONDS) else None
        end = "closed its pipe" if code is None else f"died: {describe_exit(code)}"
        text = f"the process that tried an environment {end}"
        if code == NO_GUARD:
            text = explain_missing_guard(self.context.get_start_method())
        raise WorkerDied(text, pid=helper.pid, exitcode=code, command="plan")


_IPC_MODULES: Final = (
    "multiprocessing.connection", "multiprocessing.managers", "multiprocessing.queues", "multiprocessing.sharedctypes",
    "multiprocessing.shared_memory", "multiprocessing.synchronize",
)  # fmt: skip


def find_process_object(functions: Iterable[Any], depth: int = 3) -> str:
    """Return the type of an interprocess communication object that the functions use, or an empty string.

    The search covers arguments, closures, globals and attributes of the functions, and of the functions that they use.
    """
    for function in {id(function): function for function in functions}.values():
        if type(function).__module__ in _IPC_MODULES:
            return f"multiprocessing {type(function).__name__}"
        used: list[Any] = []
        if isinstance(function, partial):
            used = [function.func, *function.args, *function.keywords.values()]
        elif isinstance(function, MethodType):
            used = [function.__func__, *getattr(function.__self__, "__dict__", {}).values()]
        elif isinstance(function, type):
            used = [value for value in vars(function).values() if isinstance(value, FunctionType)]
        elif isinstance(function, FunctionType):
            cells = [cell.cell_contents for cell in function.__closure__ or () if cell != CellType()]
            names = [function.__globals__.get(name) for name in function.__code__.co_names]
            used = [*cells, *names, *(function.__defaults__ or ())]
        elif callable(function):
            used = [type(function).__call__, *getattr(function, "__dict__", {}).values()]
        if depth and (found := find_process_object(used, depth - 1)):
            return found
    return ""


def _describe(env: Any, others: Sequence[Callable[[], Any]] = ()) -> EnvDescription:
    """Describe ``env``, and build each of the others for its observation space, one at a time."""
    spaces = [env.observation_space]
    for index, env_fn in enumerate(others, start=1):
        with closing(build_env(env_fn, index)) as other:
            spaces.append(other.observation_space)
    return EnvDescription({**env.metadata}, env.render_mode, env.action_space, spaces, find_env_id(env))


# -- in the process ----------------------------------------------------------------------------------------------------


def _run_probe(connection: Connection[Any, Any], env_fns: Any, trial: tuple[Sequence[int], bool, bool] | None) -> None:
    """Try the environments, with ``trial`` as arguments of :func:`_try_envs`, or only describe them if it is ``None``."""
    pid = os.getpid()
    env: Any = None
    result: Any
    try:
        if isinstance(env_fns, PackedEnvFns):
            connection.send_bytes(_READY)
            env_fns.functions = pickle.loads(connection.recv_bytes())
            env_fns = env_fns.load(0, "in the process that inspects it")
        if trial is None:
            env = build_env(env_fns[0], 0)
            result = (_pack_description(_describe(env, env_fns[1:])),)
        else:
            result = _try_envs(connection, env_fns, *trial)
    except BaseException as error:
        result = pack_error(error)
    if os.getpid() != pid:  # a child that the environment forked has returned into this code
        os._exit(0)
    connection.send_bytes(pickle.dumps(result))
    if env is not None:  # an error of close() only ends this process: the caller gets it from a worker's environment
        env.close()


def _try_envs(
    connection: Connection[Any, Any], env_fns: Sequence[Callable[[], Any]], indices: Sequence[int], check: bool,
    own_generators: bool,
) -> PackedError | tuple[StepTimes, Independence | PackedError]:  # fmt: skip
    """Try the environments in child processes, the first of which sends the description."""
    pid = os.getpid()

    def describe(env: Any) -> None:
        packed = _pack_description(_describe(env))
        if os.getppid() == pid:  # otherwise this is a child that the environment forked and that returned into this code
            connection.send_bytes(pickle.dumps((packed,)))

    independence = IndependenceCheck(env_fns, indices, own_generators)
    run = independence.try_first(describe)
    if isinstance(run, PackedError):
        return run
    if isinstance(run, ChildEnd) and run.exitcode is not None:  # end in the same way, so that the caller reports it
        if run.exitcode < 0:
            os.kill(os.getpid(), -run.exitcode)
        os._exit(run.exitcode & 255)
    assert isinstance(run, Run)
    times = run.times
    assert times is not None
    checked = check and not times.slow
    if checked and (error := independence.compare(run)) is not None:
        return times, error
    alone_seconds = _time_benchmark()
    connection.send_bytes(_POLL_WITHOUT_SLEEP)
    crowding = max(_time_benchmark() / alone_seconds, 1.0)
    times = replace(times, pace=alone_seconds / _REFERENCE_SECONDS, crowding=crowding)
    return times, independence.result(checked=checked)


def _pack_description(description: EnvDescription) -> bytes | PackedError:
    try:
        return dumps(description)
    except Exception as error:
        note_once(error, "the metadata and spaces of an environment could not be sent by the process that built it")
        return pack_error(error)


def _time_benchmark() -> float:
    """Run a fixed Python benchmark and return its median time in seconds."""
    times = []
    for _ in range(_BENCHMARK_RUNS):
        started, total, table = time.perf_counter(), 0.0, {}
        for i in range(500):
            table[i & 15] = (i, total)
            total += len(table) * 0.5
        times.append(time.perf_counter() - started)
    return statistics.median(times)
