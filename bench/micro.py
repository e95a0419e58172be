"""Micro-benchmarks of single costs: a round trip, a batch, infos, copies, the start.

Each of them compares the engine with a baseline in the same run: a socket pair between two processes, a bare loop, the same
environment without infos, ``memcpy``, or the start of Gymnasium's engine.
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
from bench import run_interleaved
from bench.engines import SamplingOptions, SteppingRunner
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


class PingPong(SteppingRunner):
    """A runner that exchanges five bytes with another process through a socket pair, and waits or polls for the reply."""

    def __init__(self, spin: bool) -> None:
        self._spin = spin
        self._receive = _receive_by_polling if spin else _receive

    def _step(self) -> int:
        self._socket.send(MESSAGE)
        self._receive(self._socket)
        return 1

    def run(self, seconds: float) -> float:
        """Run a sample with a new partner process, because a partner that polls would occupy a core between samples."""
        self._socket, partner = socket.socketpair()
        for end in (self._socket, partner):
            end.setblocking(not self._spin)
        pid = os.fork()
        if pid == 0:
            try:
                self._socket.close()
                while message := self._receive(partner):
                    partner.send(message)
            finally:  # also after an exception, because the child process must not return to the caller's code
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


def _receive_by_polling(end: socket.socket) -> bytes:
    while True:
        try:
            return end.recv(16)
        except BlockingIOError:
            pass


class Copier(SteppingRunner):
    """A runner that copies observations: row by row into the same memory, as a worker does, or all into "fresh" memory."""

    def __init__(self, shape: Sequence[int], method: str) -> None:
        self._row = np.ones(shape[1:], np.uint8)
        self._batch = np.zeros(shape, np.uint8)
        self._rows = list(self._batch)
        methods: dict[str, Callable[[], object]] = {"rows": self._copy_rows, "fresh": self._batch.copy}
        self._copy = methods[method]

    def _copy_rows(self) -> None:
        copy, row = np.copyto, self._row
        for target in self._rows:
            copy(target, row)

    def _step(self) -> int:
        self._copy()
        return len(self._rows)

    def close(self) -> None:
        pass


def compare_round_trips(sampling: SamplingOptions) -> Report:
    """Compare an empty step of one environment in one worker with a round trip of five bytes."""
    rows = [
        vecenv_candidate("workers", "vecenv, 1 worker, empty step", EmptyEnv, 1, num_workers=1),
        gymnasium_candidate("gym-async", "AsyncVectorEnv", EmptyEnv, 1),
        Candidate("pipe", "bare ping-pong, blocking", partial(PingPong, False)),
        Candidate("spinning-pipe", "bare ping-pong, spinning", partial(PingPong, True)),
    ]
    return compare("round trip, empty step", EmptyEnv, 1, rows, **sampling)


def compare_batches(sampling: SamplingOptions, num_envs: int = 8) -> Report:
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
    return compare("CartPole-v1", env_fn, num_envs, rows, **sampling)


def batch_overhead(report: Report) -> dict[str, Summary | None]:
    """Return the microseconds per batch that each engine adds to a bare loop in as many processes."""
    rates = {row.name: row.rates for row in report.rows}
    overheads = {}
    for name, bare in (("gym-sync", "bare"), ("in-process", "bare"), ("use-caller", "bare-2"), ("workers", "bare-2")):
        pairs = zip(rates[name], rates[bare], strict=True)
        samples = (1e6 * report.num_envs * (1 / rate - 1 / bare_rate) for rate, bare_rate in pairs)
        overheads[name] = Summary.from_samples(samples)
    return overheads


def compare_infos(sampling: SamplingOptions, num_envs: int = 32, workers: int = 2) -> Report:
    """Compare Ant-v5 with and without its infos, which it computes in both cases, for three engines."""
    rows = []
    for suffix, wrapper in (("", gymnasium.Wrapper), ("-without", DropInfos)):
        env_fn = partial(make_wrapped, wrapper, "Ant-v5")
        text = "without infos" if suffix else "with infos"
        label = f"vecenv, {workers} workers, {text}"
        rows.append(vecenv_candidate(f"workers{suffix}", label, env_fn, num_envs, num_workers=workers))
        for name, kind in (("gym-sync", "SyncVectorEnv"), ("gym-async", "AsyncVectorEnv")):
            candidate = gymnasium_candidate(f"{name}{suffix}", kind, env_fn, num_envs)
            rows.append(replace(candidate, label=f"{candidate.label}, {text}"))
    return compare(
        "Ant-v5, infos", partial(make_wrapped, gymnasium.Wrapper, "Ant-v5"), num_envs, rows, check=False, **sampling
    )


def compare_copies(sampling: SamplingOptions, num_envs: int = 64) -> Report:
    """Compare steps with observations (84, 84, 4) uint8 with steps with small observations, and with ``memcpy``.

    There is only one worker, so that its copies run on one core, as those of ``memcpy`` do.
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
    return compare("copies", images, num_envs, rows, check=False, **sampling)


def print_startup_seconds(engine: str, num_envs: int, workers: int) -> None:
    """Print the seconds from the construction to the end of the first reset. Must run in a new process."""
    env_fns: list[EnvFn] = [partial(make_env, "CartPole-v1")] * num_envs
    gymnasium.make("CartPole-v1").close()  # imports the environment, which does not belong to the start of the engine
    start = time.perf_counter()
    if engine == "gym-async":
        envs: Any = gymnasium.vector.AsyncVectorEnv(env_fns, context="forkserver")
    else:
        envs = vecenv.AsyncVectorEnv(env_fns, context="forkserver", num_workers=workers if engine == "workers" else None)
    envs.reset(seed=0)
    print(time.perf_counter() - start, flush=True)
    envs.close()


def measure_startup(repeats: int, num_envs: int = 64, workers: int = 2) -> dict[str, list[float]]:
    """Start the engines alternately, each time in a new interpreter without a fork server. Return the seconds by engine."""

    def start(engine: str) -> float:
        code = f"from bench.micro import print_startup_seconds; print_startup_seconds({engine!r}, {num_envs}, {workers})"
        completed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=600, check=False)
        if completed.returncode:
            raise RuntimeError(f"{engine} did not start: {completed.stderr.strip().splitlines()[-1:]}")
        return float(completed.stdout.split()[-1])

    return run_interleaved({engine: partial(start, engine) for engine in ("workers", "per-env", "gym-async")}, repeats)


class CopyCountingEnv(EmptyEnv):
    """An environment with large observations, in a process that counts copied bytes (``count_copies.c``, preloaded)."""

    def __init__(self) -> None:
        super().__init__(IMAGE, "uint8")

    def copied_bytes(self) -> int:
        return _copied_bytes()


def _copied_bytes() -> int:
    """Return the number of bytes that this process has copied."""
    function = ctypes.CDLL(None).copied_bytes
    function.restype = ctypes.c_ulonglong
    return int(function())


def _copies_per_step(copy: bool, num_envs: int, steps: int = 50) -> float:
    """Return how often a step copies the bytes of its observations, in the worker and the caller together."""
    envs = vecenv.AsyncVectorEnv([CopyCountingEnv] * num_envs, num_workers=1, copy=copy)
    try:
        envs.reset(seed=0)
        actions = envs.action_space.sample()

        def total_copied_bytes() -> int:
            return int(envs.call("copied_bytes")[0]) + _copied_bytes()

        before = total_copied_bytes()
        overhead = total_copied_bytes() - before  # the call that reads the counters copies bytes too
        before = total_copied_bytes()
        for _ in range(steps):
            envs.step(actions)
        return (total_copied_bytes() - before - overhead) / steps / (num_envs * math.prod(IMAGE))
    finally:
        envs.close()


def count_copies(num_envs: int = 64) -> dict[str, float]:
    """Count how often a step copies the bytes of its observations, with replacements of ``memcpy`` and ``memmove``.

    Raises:
        RuntimeError: There is no working C compiler, or this C library does not use the replacements.
    """
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        raise RuntimeError("counting copied bytes needs a C compiler (`cc` or `gcc`), and none was found")
    with tempfile.TemporaryDirectory() as folder:
        library, source = Path(folder, "count_copies.so"), Path(__file__).with_name("count_copies.c")
        flags = ["-O2", "-shared", "-fPIC", "-fno-builtin", "-fno-tree-loop-distribute-patterns"]
        command = [compiler, *flags, "-o", str(library), str(source)]
        compilation = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        if compilation.returncode:
            raise RuntimeError(f"{source.name} does not compile: {compilation.stderr.strip().splitlines()[-1:]}")
        code = f"from bench.micro import _copies_per_step as c; print(c(False, {num_envs}), c(True, {num_envs}))"
        variables = {**os.environ, "LD_PRELOAD": str(library)}
        completed = subprocess.run(
            [sys.executable, "-c", code], env=variables, capture_output=True, text=True, timeout=120, check=False
        )
    if completed.returncode:
        raise RuntimeError(f"copied bytes could not be counted: {completed.stderr.strip().splitlines()[-1:]}")
    view, copy = map(float, completed.stdout.split())
    return {"copy=False": view, "copy=True": copy}


def copying_times(report: Report) -> dict[str, Summary | None]:
    """Return the time of copying the observations as a multiple of one ``memcpy``, by round of :func:`compare_copies`.

    ``copy=False`` copies into shared memory: a step with large observations takes longer than one with small ones, and this
    difference is divided by that of ``memcpy``. ``copy=True`` may also copy into new memory: its difference to
    ``copy=False`` is divided by the time of one such copy.
    """
    into_shared_memory, both = [], []
    for rates in zip(*(row.rates for row in report.rows), strict=True):  # for each round
        times = {row.name: 1.0 / rate for row, rate in zip(report.rows, rates, strict=True)}
        into_shared_memory.append((times["view"] - times["small"]) / (times["memcpy"] - times["memcpy-small"]))
        into_new_memory = (times["copy"] - times["view"]) / times["fresh"]
        both.append(into_shared_memory[-1] + into_new_memory)
    return {"copy=False": Summary.from_samples(into_shared_memory), "copy=True": Summary.from_samples(both)}
