"""What lives in a host and is measured there: an engine driven with random actions, or the bare loop.

Every runner of a batch draws the same actions and the same seeds, so that any two do the same work; a
:class:`Stream` is what lets two of them be compared step by step without shipping the observations.
"""

from __future__ import annotations

import hashlib
import itertools
import logging
import math
import multiprocessing
import os
import select
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, Protocol

import gymnasium
import numpy as np
from gymnasium.vector.utils import batch_space, concatenate, create_empty_array, iterate

from vecenv.system.cores import seconds_waited

EnvFn = Callable[[], gymnasium.Env[Any, Any]]

SEED = 20_240_917


def make_env(env_id: str) -> gymnasium.Env[Any, Any]:
    """``gymnasium.make``, which also takes ``module:Class`` and knows which package registers ``ALE/`` ids.

    Gymnasium's own warnings are silenced: 64 workers would each print them over the progress bar.
    """
    level, gymnasium.logger.min_level = gymnasium.logger.min_level, logging.ERROR
    try:
        return _make_env(env_id)
    finally:
        gymnasium.logger.min_level = level


def _make_env(env_id: str) -> gymnasium.Env[Any, Any]:
    module, _, name = env_id.rpartition(":")
    if env_id.startswith("ALE/"):
        import ale_py

        gymnasium.register_envs(ale_py)
    if module:
        value = getattr(__import__(module, fromlist=["_"]), name, None)
        if callable(value) and name not in gymnasium.registry:
            made: gymnasium.Env[Any, Any] = value()
            return made
    return gymnasium.make(env_id)


class Sample(NamedTuple):
    """Units of work done and the seconds they took."""

    units: float
    seconds: float

    @property
    def rate(self) -> float:
        return self.units / self.seconds


def run_for(step: Callable[[], float], seconds: float) -> Sample:
    """Call ``step``, which returns the units it did, until ``seconds`` are over.

    The clock is looked at about once a millisecond, so that looking at it does not count.
    """
    calls, units = 1, 0.0
    start = before = time.perf_counter()
    while True:
        for _ in range(calls):
            units += step()
        now = time.perf_counter()
        if now - start >= seconds:
            return Sample(units, now - start)
        if now - before < 0.001:
            calls *= 2
        before = now


def sample_actions(space: gymnasium.Space[Any], num_envs: int, seed: int = SEED) -> list[Any]:
    """Batches of random actions for ``num_envs`` environments, the same for every candidate that asks."""
    batched = batch_space(space, num_envs)
    batched.seed(seed)
    return [batched.sample() for _ in range(64)]


@dataclass
class Stream:
    """What an engine returned for a reset and some steps; observations and infos only as digests.

    Attributes:
        observations: ``[step][env]``; step 0 is the reset.
        rewards: Shape (steps + 1, num_envs), float64; likewise ``terminations`` and ``truncations`` (bool).
        infos: ``[step]``, or ``None`` where rows arrive in another order, so that infos cannot be compared.
    """

    observations: list[list[bytes]]
    rewards: np.ndarray
    terminations: np.ndarray
    truncations: np.ndarray
    infos: list[bytes] | None


def digest(value: Any) -> bytes:
    """Sixteen bytes that are equal exactly if two values are, bit for bit, type for type."""
    seen = hashlib.blake2b(digest_size=16)
    _feed(seen, value)
    return seen.digest()


def _feed(seen: Any, value: Any) -> None:
    if isinstance(value, np.ndarray):
        seen.update(f"{value.dtype.str}{value.shape}".encode())
        if value.dtype == object:
            for item in value.flat:
                _feed(seen, item)
        else:
            seen.update(np.ascontiguousarray(value).tobytes())
    elif isinstance(value, Mapping):
        seen.update(b"{%d" % len(value))
        for key in sorted(value, key=repr):
            seen.update(repr(key).encode())
            _feed(seen, value[key])
    elif isinstance(value, list | tuple):
        seen.update(b"[%d" % len(value))
        for item in value:
            _feed(seen, item)
    else:
        seen.update(f"{type(value).__name__}:{value!r}".encode())


def first_difference(reference: Stream, other: Stream) -> str | None:
    """Where two streams part, in words; ``None`` if they never do."""
    for step, rows in enumerate(reference.observations):
        what = "the reset" if step == 0 else f"step {step}"
        for name in ("rewards", "terminations", "truncations"):
            want, got = getattr(reference, name)[step], getattr(other, name)[step]
            for env in range(len(rows)):
                if want[env].tobytes() != got[env].tobytes():
                    return f"at {what}, env {env}: {name[:-1]} {got[env]} instead of {want[env]}"
        for env, row in enumerate(rows):
            if row != other.observations[step][env]:
                return f"at {what}, env {env}: another observation"
        if reference.infos and other.infos and reference.infos[step] != other.infos[step]:
            return f"at {what}: other infos"
    return None


class Runner(Protocol):
    """What a host asks of the engine it holds."""

    def run(self, seconds: float) -> Sample: ...
    def close(self) -> None: ...


class VectorRunner:
    """Steps a ``gymnasium.vector.VectorEnv`` with random actions, all environments at once."""

    def __init__(self, make_envs: Callable[[], Any]) -> None:
        self.envs = make_envs()
        self.num_envs: int = self.envs.num_envs
        self.actions = sample_actions(self.envs.single_action_space, self.num_envs)
        self._next = itertools.cycle(self.actions).__next__
        self._fresh = True

    def describe(self) -> str:
        plan = getattr(self.envs, "plan", None)
        return str(self.envs) if plan is None else str(plan).splitlines()[-1]  # a plan ends with its choice, and why

    def _step(self) -> float:
        self.envs.step(self._next())
        return self.num_envs

    def run(self, seconds: float) -> Sample:
        if self._fresh:
            self.envs.reset(seed=SEED)
            self._fresh = False
        return run_for(self._step, seconds)

    def trajectory(self, steps: int, seconds: float = math.inf) -> Stream:
        """Reset with the seed, then take ``steps`` steps, or as many as ``seconds`` allow."""
        self._fresh = False
        observation, info = self.envs.reset(seed=SEED)
        zeros = np.zeros(self.num_envs)
        returned = [(self._rows(observation), zeros, zeros.astype(bool), zeros.astype(bool), digest(info))]
        end = time.perf_counter() + seconds
        for actions in itertools.islice(itertools.cycle(self.actions), steps):
            observation, rewards, terminations, truncations, info = self.envs.step(actions)
            returned.append((self._rows(observation), rewards, terminations, truncations, digest(info)))
            if time.perf_counter() > end:
                break
        observations, rewards, terminations, truncations, infos = zip(*returned, strict=True)
        return Stream(list(observations), np.stack(rewards), np.stack(terminations), np.stack(truncations), list(infos))

    def _rows(self, observation: Any) -> list[bytes]:
        return [digest(row) for row in iterate(self.envs.observation_space, observation)]

    def close(self) -> None:
        self.envs.close()


class FirstReadyRunner(VectorRunner):
    """Steps whichever environments have finished, ``batch_size`` at a time, through ``recv`` and ``send``."""

    def __init__(self, make_envs: Callable[[], Any], batch_size: int) -> None:
        super().__init__(make_envs)
        self.batch_size = batch_size
        self._next = itertools.cycle(sample_actions(self.envs.single_action_space, batch_size)).__next__

    def _step(self) -> float:
        infos = self.envs.recv()[4]
        self.envs.send(self._next(), infos["env_id"])
        return self.batch_size

    def run(self, seconds: float) -> Sample:
        if self._fresh:
            self.envs.reset_async(seed=SEED)
            self._fresh = False
        for _ in range(-(-self.num_envs // self.batch_size)):
            self._step()  # rows that finished while nobody was looking are nobody's merit
        return run_for(self._step, seconds)

    def trajectory(self, steps: int, seconds: float = math.inf) -> Stream:
        """As in the base class; environment ``i`` gets its own ``t``-th action whenever its turn comes."""
        self._fresh = False
        space = self.envs.single_action_space
        actions = [list(iterate(batch_space(space, self.num_envs), batch)) for batch in self.actions]
        out: Any = create_empty_array(space, self.batch_size)
        batched = batch_space(self.envs.single_observation_space, self.batch_size)
        rows: list[list[tuple[bytes, Any, Any, Any]]] = [[] for _ in range(self.num_envs)]
        self.envs.reset_async(seed=SEED)
        while any(len(of_env) <= steps for of_env in rows):
            observation, rewards, terminations, truncations, infos = self.envs.recv()
            chosen = []
            for k, row in enumerate(iterate(batched, observation)):
                env = int(infos["env_id"][k])
                chosen.append(actions[len(rows[env]) % len(actions)][env])
                rows[env].append((digest(row), rewards[k], terminations[k], truncations[k]))
            self.envs.send(concatenate(space, chosen, out), infos["env_id"])
        columns = [[of_env[: steps + 1][t] for of_env in rows] for t in range(steps + 1)]
        return Stream(
            [[row[0] for row in column] for column in columns],
            np.array([[row[1] for row in column] for column in columns], dtype=np.float64),
            np.array([[row[2] for row in column] for column in columns], dtype=bool),
            np.array([[row[3] for row in column] for column in columns], dtype=bool),
            None,
        )


class BareLoop:
    """The loop that no engine can beat: ``env.step``, and ``env.reset`` where an episode has ended, and nothing else.

    Runs environments ``first`` to ``first + count`` of a batch of ``num_envs``, with that batch's seeds and
    actions.
    """

    def __init__(self, env_fn: EnvFn, first: int, count: int, num_envs: int, passes: int | None = None) -> None:
        self.envs = [env_fn() for _ in range(count)]
        space = self.envs[0].action_space
        batched = batch_space(space, num_envs)
        batches = [list(iterate(batched, batch)) for batch in sample_actions(space, num_envs)]
        self._next = itertools.cycle([rows[first : first + count] for rows in batches]).__next__
        self._first = first
        self._passes = passes or max(1, 64 // count)
        self._done = [False] * count
        for i, env in enumerate(self.envs):
            env.reset(seed=SEED + first + i)

    def describe(self) -> str:
        return f"bare loop over {len(self.envs)} environments"

    def _step(self) -> int:
        done = self._done
        for _ in range(self._passes):
            for i, (env, action) in enumerate(zip(self.envs, self._next(), strict=True)):
                if done[i]:
                    env.reset()
                    done[i] = False
                else:
                    result = env.step(action)
                    done[i] = result[2] or result[3]
        return self._passes * len(self.envs)

    def run(self, seconds: float) -> Sample:
        return run_for(self._step, seconds)

    def turns(self, seconds: float) -> list[float]:
        """From the seeds on, what each turn over its environments takes, in seconds.

        Of the processor, which other programs do not lengthen; of the clock where turns wait for something.
        """
        for i, env in enumerate(self.envs):
            env.reset(seed=SEED + self._first + i)
        self._done = [False] * len(self.envs)
        passes, self._passes = self._passes, 1
        queued, end = seconds_waited(), time.perf_counter() + seconds
        ran, lasted = [time.thread_time()], [time.perf_counter()]
        while lasted[-1] < end:
            self._step()
            ran.append(time.thread_time())
            lasted.append(time.perf_counter())
        self._passes = passes
        queued = (seconds_waited() or 0.0) - (queued or 0.0)
        asleep = lasted[-1] - lasted[0] - (ran[-1] - ran[0]) - queued
        return [float(took) for took in np.diff(lasted if asleep > (ran[-1] - ran[0]) / 10 else ran)]

    def close(self) -> None:
        for env in self.envs:
            env.close()


class BarePipes:
    """What a process per environment costs at least: two bare pipes and the loop ``read, env.step, write`` in each process.

    No observation, reward or flag comes back; the caller writes five bytes to each process and reads five from each. It
    stands in the table of the engines to show how much of a step is the machine's switching between processes.
    """

    _poll = False

    def __init__(self, env_fn: EnvFn, num_envs: int, shares: Sequence[range] | None = None) -> None:
        context = multiprocessing.get_context()
        self._num_envs = num_envs
        self._ends: list[tuple[Any, Any]] = []
        self._processes = []
        for index, share in enumerate([range(env, env + 1) for env in range(num_envs)] if shares is None else shares):
            theirs_in, ours_out = context.Pipe(duplex=False)
            ours_in, theirs_out = context.Pipe(duplex=False)
            others = [end for ends in self._ends for end in ends] if context.get_start_method() == "fork" else []
            ends = (theirs_in, theirs_out, [*others, ours_in, ours_out])
            core = index + 1 if self._poll else None
            process = context.Process(target=_serve_bare_pipes, args=(env_fn, num_envs, share, core, *ends))
            process.start()
            theirs_in.close()
            theirs_out.close()
            self._ends.append((ours_in, ours_out))
            self._processes.append(process)
        self._readers = [reader.fileno() for reader, _ in self._ends]
        self._writers = [writer.fileno() for _, writer in self._ends]
        for reader in self._readers:
            os.read(reader, 5)

    def describe(self) -> str:
        return f"bare pipes to {len(self._processes)} processes"

    def _step(self) -> int:
        for writer in self._writers:
            os.write(writer, b"step!")
        for reader in self._readers:
            os.read(reader, 5)
        return self._num_envs

    def run(self, seconds: float) -> Sample:
        return run_for(self._step, seconds)

    def close(self) -> None:
        for ends in self._ends:
            for end in ends:
                end.close()
        for process in self._processes:
            process.join()


class BareLockstep(BarePipes):
    """What a step that waits for all environments costs at least: a process on each core, the caller one of them.

    Each has its share of the environments. The caller writes a few bytes to each of the others, steps its own share, and
    reads from each; both sides look for the bytes again and again in place of sleeping. No values travel.
    """

    _poll = True

    def __init__(self, env_fn: EnvFn, num_envs: int, workers: int) -> None:
        bounds = [num_envs * i // workers for i in range(workers + 1)]
        own, *others = [range(a, b) for a, b in itertools.pairwise(bounds)]
        super().__init__(env_fn, num_envs, others)
        self._own = BareLoop(env_fn, own.start, len(own), num_envs, passes=1)
        self._cores = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else None
        _stay_on(0)
        for reader in self._readers:
            os.set_blocking(reader, False)

    def describe(self) -> str:
        return f"bare lock-step of {len(self._processes) + 1} processes"

    def _step(self) -> int:
        for writer in self._writers:
            os.write(writer, b"step!")
        self._own._step()
        for reader in self._readers:
            _read_polling(reader)
        return self._num_envs

    def close(self) -> None:
        super().close()
        self._own.close()
        if self._cores is not None:
            os.sched_setaffinity(0, self._cores)


_POLLS_FOR = 0.02  # seconds; then it sleeps, so that the rows that are measured next have the core


def _read_polling(source: int) -> bytes:
    end = time.perf_counter() + _POLLS_FOR
    while True:
        try:
            return os.read(source, 5)
        except BlockingIOError:
            if time.perf_counter() > end:
                select.select([source], [], [])


def _stay_on(index: int) -> None:
    """Bind this process to one of its cores, where the system lets it."""
    if hasattr(os, "sched_setaffinity"):
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cores[index % len(cores)]})


def _serve_bare_pipes(
    env_fn: EnvFn, num_envs: int, share: range, core: int | None, reader: Any, writer: Any, others: list[Any]
) -> None:
    for end in others:  # came along with the fork; the end of file would never be seen
        end.close()
    step = BareLoop(env_fn, share.start, len(share), num_envs, passes=1)._step
    source, sink, read = reader.fileno(), writer.fileno(), partial(os.read, reader.fileno(), 5)
    if core is not None:
        _stay_on(core)
        os.set_blocking(source, False)
        read = partial(_read_polling, source)
    os.write(sink, b"ready")
    while read():
        step()
        os.write(sink, b"done!")
