"""The candidates of a benchmark: vector environments stepped with random actions, and bounds that step bare environments.

All runners use fixed seeds and actions, so that they do the same work in every run.
"""

from __future__ import annotations

import hashlib
import importlib
import inspect
import itertools
import logging
import math
import multiprocessing
import os
import select
import struct
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, Protocol

import gymnasium
import numpy as np
from gymnasium.vector.utils import batch_space, concatenate, create_empty_array, iterate

from vecenv.system.cores import usable_cores
from vecenv.tools import CliError, import_module_or_exit, require

EnvFn = Callable[..., gymnasium.Env[Any, Any]]

SEED: Final = 20_240_917
MANY_PROCESSES: Final = 16  # a candidate with more processes than this, and than cores, runs only while it is measured


class Unavailable(Exception):
    """The error for a candidate that cannot run here, for example without a library. It counts as missing, not as failed."""


class Runner(Protocol):
    """The interface of the object that a candidate builds and a benchmark measures."""

    def run(self, seconds: float) -> float:
        """Work for ``seconds``, and return the units of work per second."""
        ...

    def close(self) -> None: ...


def make_env(env_id: str) -> gymnasium.Env[Any, Any]:
    """Build an environment with ``gymnasium.make``; import the package that registers ``ALE/`` ids.

    Gymnasium's own warnings are silenced, because every worker would repeat them.
    """
    level, gymnasium.logger.min_level = gymnasium.logger.min_level, logging.ERROR
    try:
        if env_id.startswith("ALE/"):
            import ale_py

            gymnasium.register_envs(ale_py)
        return gymnasium.make(env_id)
    finally:
        gymnasium.logger.min_level = level


def resolve(env_id: str) -> EnvFn:
    """Return a function that builds an environment, for an id or ``"module:name"`` as the commands accept them.

    Raises:
        CliError: There is no such environment or module, a library is missing, or the function requires arguments.
    """
    from vecenv.make import find_spec  # imported here, because processes that measure other engines do not need it

    module, _, name = env_id.rpartition(":")
    if module:
        env_fn: Any = getattr(import_module_or_exit(module), name, None)
        if callable(env_fn) and name not in gymnasium.registry:
            _require_no_arguments(env_id, env_fn)
            return env_fn  # type: ignore[no-any-return]
    elif env_id.startswith("ALE/"):
        require(env_id, "ale_py")
        importlib.import_module("ale_py")  # registers these ids
    try:
        newest = find_spec(name).id
    except gymnasium.error.Error as error:
        hint = f" For a function in that file: {name[:-3]}:function." if name.endswith(".py") else ""
        raise CliError(f"{env_id!r}: {error}{hint}") from None
    return partial(make_env, f"{module}:{newest}" if module else newest)


def _require_no_arguments(env_id: str, env_fn: EnvFn) -> None:
    try:
        parameters = inspect.signature(env_fn).parameters.values()
    except (TypeError, ValueError):  # written in C
        return
    optional = inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD
    required = [one.name for one in parameters if one.default is one.empty and one.kind not in optional]
    if required:
        raise CliError(
            f"{env_id} needs arguments ({', '.join(required)}): name a function that builds an environment without any"
        )


def run_for(step: Callable[[], float], seconds: float) -> float:
    """Call ``step`` for ``seconds``, and return the units of work per second; ``step`` returns the units of one call.

    The clock is read once per batch of calls. Batches grow until they take a millisecond, so that reading the clock does not
    distort the result.
    """
    calls, units = 1, 0.0
    start = before = time.perf_counter()
    while True:
        for _ in range(calls):
            units += step()
        now = time.perf_counter()
        if now - start >= seconds:
            return units / (now - start)
        if now - before < 0.001:
            calls *= 2
        before = now


def sample_actions(space: gymnasium.Space[Any], num_envs: int) -> list[Any]:
    """Draw 64 batches of random actions for ``num_envs`` environments, the same in every call."""
    batched = batch_space(space, num_envs)
    batched.seed(SEED)
    return [batched.sample() for _ in range(64)]


# --- trajectories -----------------------------------------------------------------------------------

Step = dict[str, Any]
"""The result of a reset or a step. For each environment, it has a digest of the ``observation``, and the ``reward``,
``termination`` and ``truncation`` themselves. One digest covers all ``infos``; it is empty if they are not compared."""


def digest(value: Any) -> bytes:
    """Return a 16-byte digest of a tree.

    It covers dtype, shape and bits of arrays (of object arrays, their items), and type and ``repr`` of other leaves. Lists
    count as tuples, and the order of dict keys does not count.
    """
    hasher = hashlib.blake2b(digest_size=16)
    _update_digest(hasher, value)
    return hasher.digest()


def _update_digest(hasher: Any, value: Any) -> None:
    if isinstance(value, np.ndarray):
        hasher.update(f"{value.dtype.str}{value.shape}".encode())
        if value.dtype == object:
            for item in value.flat:
                _update_digest(hasher, item)
        else:
            hasher.update(np.ascontiguousarray(value).tobytes())
    elif isinstance(value, Mapping):
        hasher.update(b"{%d" % len(value))
        for key in sorted(value, key=repr):
            hasher.update(repr(key).encode())
            _update_digest(hasher, value[key])
    elif isinstance(value, list | tuple):
        hasher.update(b"[%d" % len(value))
        for item in value:
            _update_digest(hasher, item)
    else:
        hasher.update(f"{type(value).__name__}:{value!r}".encode())


def first_difference(reference: Sequence[Step], other: Sequence[Step]) -> str | None:
    """Describe the first difference between two trajectories; ``None`` if all steps that both have are equal."""
    for number, (expected, actual) in enumerate(zip(reference, other, strict=False)):
        where = f"at step {number}" if number else "at the reset"
        for name in ("reward", "termination", "truncation", "observation"):
            for env, (value, other_value) in enumerate(zip(expected[name], actual[name], strict=True)):
                if name == "observation":
                    if value != other_value:
                        return f"{where}, env {env}: a different observation"
                elif value.tobytes() != other_value.tobytes():
                    return f"{where}, env {env}: {name} {other_value} instead of {value}"
        if expected["infos"] and actual["infos"] and expected["infos"] != actual["infos"]:
            return f"{where}: different infos"
    return None


# --- vector environments ----------------------------------------------------------------------------


class VectorRunner:
    """A runner that steps all environments of a ``gymnasium.vector.VectorEnv`` at once, with random actions."""

    _warm_up_steps = 0  # unmeasured steps before each sample: first-ready environments finish steps between samples

    def __init__(self, make_envs: Callable[[], Any]) -> None:
        self.envs = make_envs()
        self.num_envs: int = self.envs.num_envs
        self.actions = sample_actions(self.envs.single_action_space, self.num_envs)
        self._next = itertools.cycle(self.actions).__next__
        self._needs_reset = True

    def describe(self) -> str:
        plan = getattr(self.envs, "plan", None)
        return str(self.envs) if plan is None else str(plan).splitlines()[-1]  # the last line has the choice and the reason

    def _step(self) -> float:
        self.envs.step(self._next())
        return self.num_envs

    def _begin(self) -> None:
        self.envs.reset(seed=SEED)

    def run(self, seconds: float) -> float:
        if self._needs_reset:
            self._begin()
        self._needs_reset = False
        for _ in range(self._warm_up_steps):
            self._step()
        return run_for(self._step, seconds)

    def trajectory(self, steps: int, seconds: float = math.inf) -> list[Step]:
        """Return the results of a seeded reset and of ``steps`` steps, or of as many as ``seconds`` allow."""
        self._needs_reset = False
        observations, infos = self.envs.reset(seed=SEED)
        zeros = np.zeros(self.num_envs)
        trajectory = [self._record(observations, zeros, zeros.astype(bool), zeros.astype(bool), infos)]
        end = time.perf_counter() + seconds
        for actions in itertools.islice(itertools.cycle(self.actions), steps):
            trajectory.append(self._record(*self.envs.step(actions)))
            if time.perf_counter() > end:
                break
        return trajectory

    def _record(self, observations: Any, rewards: Any, terminations: Any, truncations: Any, infos: Any) -> Step:
        return {
            "observation": [digest(row) for row in iterate(self.envs.observation_space, observations)],
            "reward": np.array(rewards), "termination": np.array(terminations), "truncation": np.array(truncations),
            "infos": digest(infos),
        }  # fmt: skip

    def close(self) -> None:
        self.envs.close()


class FirstReadyVectorRunner(VectorRunner):
    """A runner that steps the environments that finish first, ``batch_size`` at a time, with ``recv`` and ``send``."""

    def __init__(self, make_envs: Callable[[], Any], batch_size: int) -> None:
        super().__init__(make_envs)
        self.batch_size, self._warm_up_steps = batch_size, -(-self.num_envs // batch_size)
        self._next = itertools.cycle(sample_actions(self.envs.single_action_space, batch_size)).__next__

    def _step(self) -> float:
        infos = self.envs.recv()[4]
        self.envs.send(self._next(), infos["env_id"])
        return self.batch_size

    def _begin(self) -> None:
        self.envs.reset_async(seed=SEED)

    def trajectory(self, steps: int, seconds: float = math.inf) -> list[Step]:
        """Return the trajectory without infos; ``seconds`` has no effect. Environments get the actions of the base class."""
        self._needs_reset = False
        space = self.envs.single_action_space
        actions = [list(iterate(batch_space(space, self.num_envs), batch)) for batch in self.actions]
        out: Any = create_empty_array(space, self.batch_size)
        batched = batch_space(self.envs.single_observation_space, self.batch_size)
        trajectories: list[list[Any]] = [[] for _ in range(self.num_envs)]
        self.envs.reset_async(seed=SEED)
        while any(len(rows) <= steps for rows in trajectories):
            observations, *numbers, infos = self.envs.recv()
            ids = infos["env_id"].tolist()
            chosen = [actions[len(trajectories[env]) % len(actions)][env] for env in ids]
            for env, *row in zip(ids, map(digest, iterate(batched, observations)), *numbers, strict=True):
                trajectories[env].append(row)
            self.envs.send(concatenate(space, chosen, out), ids)
        names = ("observation", "reward", "termination", "truncation")
        return [
            {"infos": b"", **{name: [rows[step][i] for rows in trajectories] for i, name in enumerate(names)}}
            for step in range(steps + 1)
        ]


# --- bounds -----------------------------------------------------------------------------------------


class BareLoop:
    """A plain loop over ``env.step``, which resets an environment after the end of its episode.

    Args:
        env_fn: A function that builds an environment.
        share: The indices of the loop's environments; they get the same seeds and actions as in any other runner.
        num_envs: The number of environments in all shares.
    """

    def __init__(self, env_fn: EnvFn, share: range, num_envs: int) -> None:
        self.envs = [env_fn() for _ in share]
        space = self.envs[0].action_space
        batched = batch_space(space, num_envs)
        batches = [list(iterate(batched, batch)) for batch in sample_actions(space, num_envs)]
        self._next = itertools.cycle([batch[share.start : share.stop] for batch in batches]).__next__
        self._done = [False] * len(share)
        for index, env in zip(share, self.envs, strict=True):
            env.reset(seed=SEED + index)

    def step(self, passes: int = 1) -> int:
        """Step or reset each environment once per pass, and return the number of steps and resets."""
        done = self._done
        for _ in range(passes):
            for i, (env, action) in enumerate(zip(self.envs, self._next(), strict=True)):
                if done[i]:
                    env.reset()
                    done[i] = False
                else:
                    result = env.step(action)
                    done[i] = result[2] or result[3]
        return passes * len(self.envs)

    def run(self, seconds: float) -> float:
        return run_for(partial(self.step, max(1, 64 // len(self.envs))), seconds)

    def close(self) -> None:
        for env in self.envs:
            env.close()


class BarePipes:
    """A lower bound on the cost of worker processes: bare pipes, and the loop ``read, env.step, write`` in each process.

    No observations, rewards or flags are sent. The caller writes eight bytes to each process and reads eight from each.

    Args:
        env_fn, num_envs: As for :class:`BareLoop`.
        shares: The indices of the environments of each process.
    """

    _polls = False  # True: each process is bound to a core, and polls its pipe

    def __init__(self, env_fn: EnvFn, num_envs: int, shares: Sequence[range]) -> None:
        context = multiprocessing.get_context()
        self._num_envs = num_envs
        self._ends: list[tuple[Any, Any]] = []
        self._processes = []
        for index, share in enumerate(shares):
            child_reader, own_writer = context.Pipe(duplex=False)
            own_reader, child_writer = context.Pipe(duplex=False)
            core = index + 1 if self._polls else None
            process = context.Process(target=_serve, args=(env_fn, num_envs, share, core, child_reader, child_writer))
            process.start()
            child_reader.close()
            child_writer.close()
            self._ends.append((own_reader, own_writer))
            self._processes.append(process)
        self._readers = [reader.fileno() for reader, _ in self._ends]
        self._writers = [writer.fileno() for _, writer in self._ends]
        for reader in self._readers:
            _unpack_number(os.read(reader, 8))

    def _step(self) -> int:
        for writer in self._writers:
            os.write(writer, _ONE_STEP)
        for reader in self._readers:
            _unpack_number(os.read(reader, 8))
        return self._num_envs

    def run(self, seconds: float) -> float:
        return run_for(self._step, seconds)

    def close(self) -> None:
        for process in self._processes:  # with fork, they inherit each other's pipes: closing the pipes would not end them
            process.kill()
            process.join()
        for end in itertools.chain(*self._ends):
            end.close()


class BareLoops(BarePipes):
    """An upper bound on the speed: a bare loop per share, in processes that share no data and never wait for each other."""

    def run(self, seconds: float) -> float:
        for writer in self._writers:
            os.write(writer, struct.pack("d", seconds))
        return sum(_unpack_number(os.read(reader, 8)) for reader in self._readers)


class BareLockstep(BarePipes):
    """A lower bound on the cost of a step that waits for all environments: one process per share, including the caller.

    Each process is bound to a core. The caller writes to each of the others, steps its own share, and reads from each; both
    sides poll for up to 20 ms before they sleep. No observations or rewards are sent.
    """

    _polls = True

    def __init__(self, env_fn: EnvFn, num_envs: int, shares: Sequence[range]) -> None:
        own, *others = shares
        super().__init__(env_fn, num_envs, others)
        self._own = BareLoop(env_fn, own, num_envs)
        self._cores = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else None
        _pin_to_core(0)
        for reader in self._readers:
            os.set_blocking(reader, False)

    def _step(self) -> int:
        for writer in self._writers:
            os.write(writer, _ONE_STEP)
        self._own.step()
        for reader in self._readers:
            _unpack_number(_read_polling(reader))
        return self._num_envs

    def close(self) -> None:
        super().close()
        self._own.close()
        if self._cores is not None:
            os.sched_setaffinity(0, self._cores)


_ONE_STEP: Final = struct.pack("d", 0.0)  # a message is the number of seconds to run; 0: one step
_POLL_SECONDS: Final = 0.02  # then the process sleeps, to leave its core to the next candidate


def _unpack_number(message: bytes) -> float:
    if not message:
        raise EOFError("the process at the other end of the pipe has ended")
    number: float = struct.unpack("d", message)[0]
    return number


def _read_polling(source: int) -> bytes:
    end = time.perf_counter() + _POLL_SECONDS
    while True:
        try:
            return os.read(source, 8)
        except BlockingIOError:
            if time.perf_counter() > end:
                select.select([source], [], [])


def _pin_to_core(index: int) -> None:
    """Bind this process to one of its cores, if the system supports it."""
    if hasattr(os, "sched_setaffinity"):
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cores[index % len(cores)]})


def _serve(env_fn: EnvFn, num_envs: int, share: range, core: int | None, reader: Any, writer: Any) -> None:
    loop = BareLoop(env_fn, share, num_envs)
    source, sink, read = reader.fileno(), writer.fileno(), partial(os.read, reader.fileno(), 8)
    if core is not None:
        _pin_to_core(core)
        os.set_blocking(source, False)
        read = partial(_read_polling, source)
    os.write(sink, _ONE_STEP)  # any number signals to the caller that the environments are built
    while True:
        seconds = _unpack_number(read())
        os.write(sink, struct.pack("d", loop.run(seconds) if seconds else loop.step()))


# --- candidates -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Candidate:
    """An engine or a bound that a benchmark measures.

    Attributes:
        name: Its short name, for options and JSON.
        label: Its name in the table.
        build: A function that its process unpickles and calls; it returns a :class:`Runner`, or any object with ``close``.
        kind: ``"vecenv"``, ``"gymnasium"``, ``"other"`` or ``"bound"``, which selects its style in the table and the plots.
        checked: True if its trajectories must equal those of ``SyncVectorEnv``.
        starts_first: True if it measures something itself while it starts, and so must start before all others.
        processes: The number of processes that it starts, if known in advance; else 0.
    """

    name: str
    label: str
    build: Callable[[], Any]
    kind: str = "other"
    checked: bool = False
    starts_first: bool = False
    processes: int = 0

    @property
    def has_many_processes(self) -> bool:
        """True if it has more processes than :data:`MANY_PROCESSES` and than cores: it runs only while it is measured.

        On a virtual machine the mere existence of that many address spaces slows down everything that runs at the same time.
        """
        return self.processes > max(MANY_PROCESSES, usable_cores())


def _build_vecenv(env_fn: EnvFn, num_envs: int, options: dict[str, Any]) -> Any:
    from vecenv.engine.vector_env import AsyncVectorEnv
    from vecenv.wrappers.prefetch import EpisodePrefetcher

    if spares := options.get("spare_workers"):
        others = {name: value for name, value in options.items() if name != "spare_workers"}
        return EpisodePrefetcher.from_env_fns([env_fn] * num_envs, spares, **others)
    return AsyncVectorEnv([env_fn] * num_envs, **options)


def vecenv_candidate(
    name: str, label: str, env_fn: EnvFn, num_envs: int, runner: Callable[..., Runner] | None = None, **options: Any
) -> Candidate:
    """Return a vecenv candidate with these options. Its default runner depends on ``batch_size``."""
    make_envs = partial(_build_vecenv, env_fn, num_envs, options)
    workers = options.get("num_workers")
    processes = num_envs if workers is None else 0 if workers == "auto" else workers
    if runner is None:
        runner = VectorRunner
        if "batch_size" in options:
            runner = partial(FirstReadyVectorRunner, batch_size=options["batch_size"])
    build = partial(runner, make_envs)
    return Candidate(name, label, build, "vecenv", checked=True, starts_first=workers == "auto", processes=processes)


def _build_gymnasium(kind: str, env_fn: EnvFn, num_envs: int) -> Any:
    return getattr(gymnasium.vector, kind)([env_fn] * num_envs)


def gymnasium_candidate(name: str, kind: str, env_fn: EnvFn, num_envs: int) -> Candidate:
    """Return a candidate with one of Gymnasium's vector environments."""
    processes = num_envs if kind == "AsyncVectorEnv" else 0
    build = partial(VectorRunner, partial(_build_gymnasium, kind, env_fn, num_envs))
    return Candidate(name, f"Gymnasium {kind}", build, "gymnasium", processes=processes)


def _shares(num_envs: int, workers: int) -> list[range]:
    processes = min(workers, num_envs)
    bounds = [num_envs * i // processes for i in range(processes + 1)]
    return [range(a, b) for a, b in itertools.pairwise(bounds)]


def _format_count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 'es' if noun.endswith('s') else 's'}"


_BOUNDS: Final = {
    "bare-loop": ("bare loop", BareLoops),
    "bare-pipes": ("bare pipes", BarePipes),
    "bare-lockstep": ("bare lock-step", BareLockstep),
}


def bound_candidate(name: str, env_fn: EnvFn, num_envs: int, workers: int) -> Candidate:
    """Return the candidate for a bound, with ``workers`` processes (at most one per environment)."""
    (label, kind), shares = _BOUNDS[name], _shares(num_envs, workers)
    where = "one process per env" if kind is BarePipes else _format_count(len(shares), "process")
    processes = len(shares) - (kind is BareLockstep)
    return Candidate(name, f"{label}, {where}", partial(kind, env_fn, num_envs, shares), "bound", processes=processes)


def default_candidates(env_fn: EnvFn, num_envs: int, workers: int) -> list[Candidate]:
    """Return the candidates of the main table, in the order of its rows."""
    workers = min(workers, num_envs)
    share, half = max(1, workers - 1), max(1, num_envs // 2)
    ours = partial(vecenv_candidate, env_fn=env_fn, num_envs=num_envs)
    return [
        ours("auto", "vecenv, auto", num_workers="auto"),
        ours("use-caller", f"vecenv, caller and {_format_count(share, 'worker')}", num_workers=share, use_caller=True),
        ours("workers", f"vecenv, {_format_count(workers, 'worker')}", num_workers=workers),
        ours("first-ready", f"vecenv, first {half} ready", num_workers=workers, batch_size=half),
        ours("per-env", "vecenv, one process per env"),
        gymnasium_candidate("gym-sync", "SyncVectorEnv", env_fn, num_envs),
        gymnasium_candidate("gym-async", "AsyncVectorEnv", env_fn, num_envs),
        bound_candidate("bare-pipes", env_fn, num_envs, num_envs),
        bound_candidate("bare-lockstep", env_fn, num_envs, workers),
        bound_candidate("bare-loop", env_fn, num_envs, workers),
    ]


def scale_candidates(env_fn: EnvFn, num_envs: int, worker_counts: Sequence[int]) -> list[Candidate]:
    """Return the candidates of the main table without first-ready, and with one for each number of workers that fits."""
    rows = default_candidates(env_fn, num_envs, max(worker_counts))
    fixed = [
        vecenv_candidate(
            f"workers-{count}", f"vecenv, {_format_count(count, 'worker')}", env_fn, num_envs, num_workers=count
        )
        for count in worker_counts
        if count <= num_envs
    ]
    table_rows = [row for row in rows if row.name not in ("workers", "first-ready")]
    return [*table_rows[:2], *fixed, *table_rows[2:]]
