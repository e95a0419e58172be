"""What a benchmark measures: a vector environment driven with random actions, or the bare loop over its environments.

All runners draw the same actions and the same seeds, so that any two of them do the same work.
"""

from __future__ import annotations

import hashlib
import itertools
import logging
import math
import multiprocessing
import os
import select
import struct
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Final, Protocol

import gymnasium
import numpy as np
from gymnasium.vector.utils import batch_space, concatenate, create_empty_array, iterate

__all__ = [
    "SEED", "BareLockstep", "BareLoop", "BareLoops", "BarePipes", "EnvFn", "FirstReadyVectorRunner", "Runner", "Step",
    "VectorRunner", "digest", "first_difference", "make_env", "run_for", "sample_actions",
]  # fmt: skip

EnvFn = Callable[[], gymnasium.Env[Any, Any]]

SEED: Final = 20_240_917


class Runner(Protocol):
    """What a benchmark asks of the candidate that it measures."""

    def run(self, seconds: float) -> float:
        """Work for ``seconds``; returns the units of work per second."""
        ...

    def close(self) -> None: ...


def make_env(env_id: str) -> gymnasium.Env[Any, Any]:
    """``gymnasium.make``, which also takes ``module:Class`` and knows which package registers ``ALE/`` ids.

    Gymnasium's own warnings are silenced: 64 workers would each print them over the progress bar.
    """
    level, gymnasium.logger.min_level = gymnasium.logger.min_level, logging.ERROR
    try:
        module, _, name = env_id.rpartition(":")
        if env_id.startswith("ALE/"):
            import ale_py

            gymnasium.register_envs(ale_py)
        if module:
            found = getattr(__import__(module, fromlist=["_"]), name, None)
            if callable(found) and name not in gymnasium.registry:
                made: gymnasium.Env[Any, Any] = found()
                return made
        return gymnasium.make(env_id)
    finally:
        gymnasium.logger.min_level = level


def run_for(step: Callable[[], float], seconds: float) -> float:
    """Call ``step``, which returns the units of work it did, until ``seconds`` are over; returns units per second.

    The clock is read about once in a millisecond, so that reading it does not count.
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
    """Batches of random actions for ``num_envs`` environments, the same for every candidate that asks."""
    batched = batch_space(space, num_envs)
    batched.seed(SEED)
    return [batched.sample() for _ in range(64)]


# --- trajectories -----------------------------------------------------------------------------------

Step = dict[str, Any]
"""What a reset or a step returned: for each environment a digest of its ``observation``, its ``reward``, ``termination`` and
``truncation``, and one digest of all ``infos``, empty where they are not compared."""


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


def first_difference(reference: Sequence[Step], other: Sequence[Step]) -> str | None:
    """Where two trajectories part, in words; ``None`` if they never do."""
    for number, (wanted, got) in enumerate(zip(reference, other, strict=False)):
        where = f"at step {number}" if number else "at the reset"
        for name in ("reward", "termination", "truncation", "observation"):
            for env, (one, another) in enumerate(zip(wanted[name], got[name], strict=True)):
                if name == "observation":
                    if one != another:
                        return f"{where}, env {env}: another observation"
                elif one.tobytes() != another.tobytes():
                    return f"{where}, env {env}: {name} {another} instead of {one}"
        if wanted["infos"] and got["infos"] and wanted["infos"] != got["infos"]:
            return f"{where}: other infos"
    return None


# --- vector environments ----------------------------------------------------------------------------


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

    def run(self, seconds: float) -> float:
        if self._fresh:
            self.envs.reset(seed=SEED)
            self._fresh = False
        return run_for(self._step, seconds)

    def trajectory(self, steps: int, seconds: float = math.inf) -> list[Step]:
        """Reset with the seed, then take ``steps`` steps, or as many as ``seconds`` allow."""
        self._fresh = False
        observations, infos = self.envs.reset(seed=SEED)
        zeros = np.zeros(self.num_envs)
        found = [self._record(observations, zeros, zeros.astype(bool), zeros.astype(bool), infos)]
        end = time.perf_counter() + seconds
        for actions in itertools.islice(itertools.cycle(self.actions), steps):
            found.append(self._record(*self.envs.step(actions)))
            if time.perf_counter() > end:
                break
        return found

    def _record(self, observations: Any, rewards: Any, terminations: Any, truncations: Any, infos: Any) -> Step:
        return {
            "observation": [digest(row) for row in iterate(self.envs.observation_space, observations)],
            "reward": np.array(rewards), "termination": np.array(terminations), "truncation": np.array(truncations),
            "infos": digest(infos),
        }  # fmt: skip

    def close(self) -> None:
        self.envs.close()


class FirstReadyVectorRunner(VectorRunner):
    """Steps the environments that have finished, ``batch_size`` at a time, through ``recv`` and ``send``."""

    def __init__(self, make_envs: Callable[[], Any], batch_size: int) -> None:
        super().__init__(make_envs)
        self.batch_size = batch_size
        self._next = itertools.cycle(sample_actions(self.envs.single_action_space, batch_size)).__next__

    def _step(self) -> float:
        infos = self.envs.recv()[4]
        self.envs.send(self._next(), infos["env_id"])
        return self.batch_size

    def run(self, seconds: float) -> float:
        if self._fresh:
            self.envs.reset_async(seed=SEED)
            self._fresh = False
        for _ in range(-(-self.num_envs // self.batch_size)):
            self._step()  # environments that finished between two samples are no part of this one
        return run_for(self._step, seconds)

    def trajectory(self, steps: int, seconds: float = math.inf) -> list[Step]:
        """As in the base class, without infos: each environment gets its own actions, in their order."""
        self._fresh = False
        space = self.envs.single_action_space
        actions = [list(iterate(batch_space(space, self.num_envs), batch)) for batch in self.actions]
        out: Any = create_empty_array(space, self.batch_size)
        batched = batch_space(self.envs.single_observation_space, self.batch_size)
        found: list[list[Any]] = [[] for _ in range(self.num_envs)]  # by environment
        self.envs.reset_async(seed=SEED)
        while any(len(rows) <= steps for rows in found):
            observations, *numbers, infos = self.envs.recv()
            ids = infos["env_id"].tolist()
            chosen = [actions[len(found[env]) % len(actions)][env] for env in ids]
            for env, *row in zip(ids, map(digest, iterate(batched, observations)), *numbers, strict=True):
                found[env].append(row)
            self.envs.send(concatenate(space, chosen, out), ids)
        names = ("observation", "reward", "termination", "truncation")
        return [
            {"infos": b"", **{name: [rows[step][at] for rows in found] for at, name in enumerate(names)}}
            for step in range(steps + 1)
        ]


# --- upper bounds -----------------------------------------------------------------------------------


class BareLoop:
    """``env.step`` in a plain loop, and nothing else; an episode that ended is followed by a reset.

    Args:
        env_fn: Makes an environment.
        share: Which of the ``num_envs`` environments these are; they get the same seeds and actions as anywhere else.
        num_envs: How many there are in all.
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
        """One step, or one reset, of each environment in each pass; returns how many those are."""
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
    """What a process per environment costs at least: bare pipes, and the loop ``read, env.step, write`` in each process.

    No observation, reward or flag comes back. The caller writes eight bytes to each process and reads eight from each.

    Args:
        env_fn, num_envs: The environments.
        shares: Which environments each process has; default: one each.
    """

    _polls = False

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
            core = index + 1 if self._polls else None
            process = context.Process(target=_serve, args=(env_fn, num_envs, share, core, *ends))
            process.start()
            theirs_in.close()
            theirs_out.close()
            self._ends.append((ours_in, ours_out))
            self._processes.append(process)
        self._readers = [reader.fileno() for reader, _ in self._ends]
        self._writers = [writer.fileno() for _, writer in self._ends]
        for reader in self._readers:
            _number(os.read(reader, 8))

    def describe(self) -> str:
        return f"bare pipes to {len(self._processes)} processes"

    def _step(self) -> int:
        for writer in self._writers:
            os.write(writer, _ONE_STEP)
        for reader in self._readers:
            _number(os.read(reader, 8))
        return self._num_envs

    def run(self, seconds: float) -> float:
        return run_for(self._step, seconds)

    def close(self) -> None:
        for ends in self._ends:
            for end in ends:
                end.close()
        for process in self._processes:
            process.join()


class BareLoops(BarePipes):
    """The upper bound: the bare loop in a process per share, which share nothing and never wait for each other."""

    def describe(self) -> str:
        return f"bare loop in {len(self._processes)} processes"

    def run(self, seconds: float) -> float:
        for writer in self._writers:
            os.write(writer, struct.pack("d", seconds))
        return sum(_number(os.read(reader, 8)) for reader in self._readers)


class BareLockstep(BarePipes):
    """What a step that waits for all environments costs at least: a process on each core, the caller one of them.

    Each has its share of the environments. The caller writes to each of the others, steps its own share, and reads from
    each; both sides poll in place of sleeping. No values travel.
    """

    _polls = True

    def __init__(self, env_fn: EnvFn, num_envs: int, shares: Sequence[range]) -> None:
        own, *others = shares
        super().__init__(env_fn, num_envs, others)
        self._own = BareLoop(env_fn, own, num_envs)
        self._cores = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else None
        _stay_on(0)
        for reader in self._readers:
            os.set_blocking(reader, False)

    def describe(self) -> str:
        return f"bare lock-step of {len(self._processes) + 1} processes"

    def _step(self) -> int:
        for writer in self._writers:
            os.write(writer, _ONE_STEP)
        self._own.step()
        for reader in self._readers:
            _number(_read_polling(reader))
        return self._num_envs

    def close(self) -> None:
        super().close()
        self._own.close()
        if self._cores is not None:
            os.sched_setaffinity(0, self._cores)


_ONE_STEP: Final = struct.pack("d", 0.0)  # a message is for how many seconds to run
_POLLS_FOR: Final = 0.02  # seconds; then it sleeps, so that the candidate that is measured next has the core


def _number(message: bytes) -> float:
    if not message:
        raise EOFError("a process of the bare loop has ended")
    number: float = struct.unpack("d", message)[0]
    return number


def _read_polling(source: int) -> bytes:
    end = time.perf_counter() + _POLLS_FOR
    while True:
        try:
            return os.read(source, 8)
        except BlockingIOError:
            if time.perf_counter() > end:
                select.select([source], [], [])


def _stay_on(index: int) -> None:
    """Bind this process to one of its cores, where the system lets it."""
    if hasattr(os, "sched_setaffinity"):
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cores[index % len(cores)]})


def _serve(
    env_fn: EnvFn, num_envs: int, share: range, core: int | None, reader: Any, writer: Any, others: list[Any]
) -> None:
    for end in others:  # came along with the fork; the end of file would never be seen
        end.close()
    loop = BareLoop(env_fn, share, num_envs)
    source, sink, read = reader.fileno(), writer.fileno(), partial(os.read, reader.fileno(), 8)
    if core is not None:
        _stay_on(core)
        os.set_blocking(source, False)
        read = partial(_read_polling, source)
    os.write(sink, _ONE_STEP)
    while message := read():
        seconds = _number(message)
        os.write(sink, struct.pack("d", loop.run(seconds) if seconds else loop.step()))
