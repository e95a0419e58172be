"""Micro-benchmarks of single costs: a round trip, a batch, infos, copies, the start.

Each one compares the engine with the simplest code for the same work in the same run: a socket pair between two processes,
``memcpy``, or the same environment without infos.
"""

from __future__ import annotations

import ctypes
import math
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np

import vecenv
from bench import take_turns
from bench.engines import Pace, Stepping
from bench.workloads import DropInfos, EmptyEnv, make_wrapped
from vecenv.tools.benchmark import Report, Summary, compare
from vecenv.tools.runners import (
    Candidate,
    EnvFn,
    bound_candidate,
    gymnasium_candidate,
    make_env,
    vecenv_candidate,
)

MESSAGE = b"12345"
IMAGE = (84, 84, 4)


class PingPong(Stepping):
    """A runner that exchanges five bytes with another process through a socket pair, blocking or polling for the reply."""

    def __init__(self, spin: bool) -> None:
        self._spin, self._receive = spin, _spin_receive if spin else _receive

    def _step(self) -> int:
        self._socket.send(MESSAGE)
        self._receive(self._socket)
        return 1

    def run(self, seconds: float) -> float:
        """Run a sample with a new partner process, because a spinning one would occupy a core between samples."""
        self._socket, partner = socket.socketpair()
        for end in (self._socket, partner):
            end.setblocking(not self._spin)
        pid = os.fork()
        if pid == 0:
            try:
                self._socket.close()
                while message := self._receive(partner):
                    partner.send(message)
            finally:  # also after an error, which must not continue in the caller's code
                os._exit(0)
        partner.close()
        try:
            return super().run(seconds)
        finally:
            self._socket.close()
            os.waitpid(pid, 0)

    def close(self) -> None:
        """Do nothing, because no process exists between samples."""


def _receive(end: socket.socket) -> bytes:
    return end.recv(16)


def _spin_receive(end: socket.socket) -> bytes:
    while True:
        try:
            return end.recv(16)
        except BlockingIOError:
            pass


class Copier(Stepping):
    """A runner that copies the bytes of a batch of observations as an engine does, and counts rows."""

    def __init__(self, shape: Sequence[int], method: str) -> None:
        self._row = np.ones(shape[1:], np.uint8)
        self._batch = np.zeros(shape, np.uint8)
        self._rows = list(self._batch)
        methods: dict[str, Callable[[], object]] = {"rows": self._copy_rows, "fresh": self._batch.copy}
        self._copy = methods[method]

    def _copy_rows(self) -> None:
        """Copy into the same memory row by row, as a worker does."""
        copy, row = np.copyto, self._row
        for target in self._rows:
            copy(target, row)

    def _step(self) -> int:
        self._copy()
        return len(self._rows)

    def close(self) -> None:
        pass


def round_trip(pace: Pace) -> Report:
    """Compare an empty step of one environment in one worker with five bytes sent there and back."""
    rows = [
        vecenv_candidate("workers", "vecenv, 1 worker, empty step", EmptyEnv, 1, num_workers=1),
        gymnasium_candidate("gym-async", "AsyncVectorEnv", EmptyEnv, 1),
        Candidate("pipe", "bare ping-pong, blocking", partial(PingPong, False)),
        Candidate("spinning-pipe", "bare ping-pong, spinning", partial(PingPong, True)),
    ]
    return compare("round trip, empty step", EmptyEnv, 1, rows, **pace)


def batch(pace: Pace, num_envs: int = 8) -> Report:
    """Compare engines on CartPole-v1 with the bare loop in one process and in two."""
    env_fn = partial(make_env, "CartPole-v1")
    bare_loops = {name: bound_candidate("bare-loop", env_fn, num_envs, n) for name, n in (("bare", 1), ("bare-2", 2))}
    rows = [
        gymnasium_candidate("gym-sync", "SyncVectorEnv", env_fn, num_envs),
        vecenv_candidate("in-process", "vecenv, in-process", env_fn, num_envs, num_workers=0),
        vecenv_candidate("use-caller", "vecenv, caller and 1 worker", env_fn, num_envs, num_workers=1, use_caller=True),
        vecenv_candidate("workers", "vecenv, 2 workers", env_fn, num_envs, num_workers=2),
        *(replace(bare_loop, name=name) for name, bare_loop in bare_loops.items()),
    ]
    return compare("CartPole-v1", env_fn, num_envs, rows, **pace)


def batch_overhead(report: Report) -> dict[str, Summary | None]:
    """Return how many microseconds per batch each engine of :func:`batch` adds to the bare loop in as many processes."""
    rates = {row.name: row.rates for row in report.rows}
    found = {}
    for name, bare in (("gym-sync", "bare"), ("in-process", "bare"), ("use-caller", "bare-2"), ("workers", "bare-2")):
        pairs = zip(rates[name], rates[bare], strict=True)
        found[name] = Summary.from_samples(1e6 * report.num_envs * (1 / ours - 1 / theirs) for ours, theirs in pairs)
    return found


def infos(pace: Pace, num_envs: int = 32, workers: int = 2) -> Report:
    """Compare Ant-v5 with its infos and the same computation without them, for three engines."""
    rows = []
    for suffix, wrapper in (("", gymnasium.Wrapper), ("-without", DropInfos)):
        env_fn = partial(make_wrapped, wrapper, "Ant-v5")
        text = "without infos" if suffix else "with infos"
        label = f"vecenv, {workers} workers, {text}"
        rows.append(vecenv_candidate(f"workers{suffix}", label, env_fn, num_envs, num_workers=workers))
        for name, kind in (("gym-sync", "SyncVectorEnv"), ("gym-async", "AsyncVectorEnv")):
            stock = gymnasium_candidate(f"{name}{suffix}", kind, env_fn, num_envs)
            rows.append(replace(stock, label=f"{stock.label}, {text}"))
    return compare("Ant-v5, infos", partial(make_wrapped, gymnasium.Wrapper, "Ant-v5"), num_envs, rows, check=False, **pace)


def copies(pace: Pace, num_envs: int = 64) -> Report:
    """Compare steps that return (84, 84, 4) uint8 observations to steps that return small ones, and to ``memcpy``.

    All copies run on one core, because there is one worker.
    """
    images = partial(EmptyEnv, IMAGE, "uint8")
    rows = [
        vecenv_candidate("small", "small observations", EmptyEnv, num_envs, num_workers=1, copy=False),
        vecenv_candidate("view", "images, copy=False", images, num_envs, num_workers=1, copy=False),
        vecenv_candidate("copy", "images, copy=True", images, num_envs, num_workers=1, copy=True),
        Candidate("memcpy", "memcpy, row by row", partial(Copier, (num_envs, *IMAGE), "rows")),
        Candidate("memcpy-small", "memcpy, small rows", partial(Copier, (num_envs, 16), "rows")),
        Candidate("fresh", "memcpy into new memory", partial(Copier, (num_envs, *IMAGE), "fresh")),
    ]
    return compare("copies", images, num_envs, rows, check=False, **pace)


def start_once(engine: str, num_envs: int, workers: int) -> None:
    """Print the seconds from construction to the end of the first reset. Must run in a new process."""
    env_fns: list[EnvFn] = [partial(make_env, "CartPole-v1")] * num_envs
    gymnasium.make("CartPole-v1").close()  # imports the environment, which is not part of the engine's start
    start = time.perf_counter()
    if engine == "gym-async":
        envs: Any = gymnasium.vector.AsyncVectorEnv(env_fns, context="forkserver")
    else:
        envs = vecenv.AsyncVectorEnv(env_fns, context="forkserver", num_workers=workers if engine == "workers" else None)
    envs.reset(seed=0)
    print(time.perf_counter() - start, flush=True)
    envs.close()


def startup(repeats: int, num_envs: int = 64, workers: int = 2) -> dict[str, list[float]]:
    """Start each engine in turn, in new interpreters without a running fork server, and return the seconds of its starts."""

    def start(engine: str) -> float:
        code = f"from bench.micro import start_once; start_once({engine!r}, {num_envs}, {workers})"
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=600, check=False)
        if done.returncode:
            raise RuntimeError(f"{engine} did not start: {done.stderr.strip().splitlines()[-1:]}")
        return float(done.stdout.split()[-1])

    return take_turns({engine: partial(start, engine) for engine in ("workers", "per-env", "gym-async")}, repeats)


class CopyCountingEnv(EmptyEnv):
    """An environment with large observations. :meth:`copied` needs ``count_copies.c``, compiled and preloaded."""

    def __init__(self) -> None:
        super().__init__(IMAGE, "uint8")

    def copied(self) -> int:
        return _bytes_copied_here()


def _bytes_copied_here() -> int:
    count = ctypes.CDLL(None).copied_bytes
    count.restype = ctypes.c_ulonglong
    return int(count())


def _copies_per_step(copy: bool, num_envs: int, steps: int = 50) -> float:
    """Return how many times worker and caller together copy the bytes of the observations in a step."""
    envs = vecenv.AsyncVectorEnv([CopyCountingEnv] * num_envs, num_workers=1, copy=copy)
    try:
        envs.reset(seed=0)
        actions = envs.action_space.sample()

        def copied() -> int:
            return int(envs.call("copied")[0]) + _bytes_copied_here()

        before = copied()
        overhead = copied() - before  # bytes that reading the counter copies
        before = copied()
        for _ in range(steps):
            envs.step(actions)
        return (copied() - before - overhead) / steps / (num_envs * math.prod(IMAGE))
    finally:
        envs.close()


def count_copies(num_envs: int = 64) -> dict[str, float]:
    """Count inside ``memcpy`` and ``memmove`` how often a step copies the bytes of its observations.

    Raises:
        RuntimeError: There is no working C compiler, or counting does not work with this C library.
    """
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        raise RuntimeError("counting copied bytes needs a C compiler (`cc` or `gcc`), and none was found")
    with tempfile.TemporaryDirectory() as folder:
        library, source = Path(folder, "count_copies.so"), Path(__file__).with_name("count_copies.c")
        flags = ["-O2", "-shared", "-fPIC", "-fno-builtin", "-fno-tree-loop-distribute-patterns"]
        command = [compiler, *flags, "-o", str(library), str(source)]
        built = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        if built.returncode:
            raise RuntimeError(f"{source.name} does not compile: {built.stderr.strip().splitlines()[-1:]}")
        code = f"from bench.micro import _copies_per_step as c; print(c(False, {num_envs}), c(True, {num_envs}))"
        variables = {**os.environ, "LD_PRELOAD": str(library)}
        done = subprocess.run(
            [sys.executable, "-c", code], env=variables, capture_output=True, text=True, timeout=120, check=False
        )
    if done.returncode:
        raise RuntimeError(f"copied bytes could not be counted: {done.stderr.strip().splitlines()[-1:]}")
    view, copy = map(float, done.stdout.split())
    return {"copy=False": view, "copy=True": copy}


def copying_times(report: Report) -> dict[str, Summary | None]:
    """Return the time of copying the observations as a multiple of one ``memcpy``, from the rounds of :func:`copies`.

    For ``copy=False``: the extra time of a step with large observations over one with small ones, divided by that of
    ``memcpy``. ``copy=True`` adds its extra time over ``copy=False``, divided by the time of one copy into new memory.
    """
    rounds = [
        {row.name: 1.0 / rate for row, rate in zip(report.rows, rates, strict=True)}
        for rates in zip(*(row.rates for row in report.rows), strict=True)
    ]
    into_shared_memory = [(t["view"] - t["small"]) / (t["memcpy"] - t["memcpy-small"]) for t in rounds]
    into_new_memory = [(t["copy"] - t["view"]) / t["fresh"] for t in rounds]
    both = [shared + new for shared, new in zip(into_shared_memory, into_new_memory, strict=True)]
    return {"copy=False": Summary.from_samples(into_shared_memory), "copy=True": Summary.from_samples(both)}
