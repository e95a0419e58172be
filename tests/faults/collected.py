"""A program that drops engines without closing them, beside a thread that uses files and pipes.

``python collected.py COUNT``. After a failure, an engine is in a reference cycle (error, traceback, frame, engine):
its objects are finalized in any order, whenever the collector runs. The thread opens, writes, reads and closes without
pause,
so that it soon reuses a descriptor number that was freed; a finalizer that still reads, closes or polls that number
is detected. The last line of output is JSON.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import json
import os
import signal
import sys
import tempfile
import threading
import time
import warnings
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np

import vecenv

STUCK = 30.0  # seconds without progress; then the program ends itself


class Raising(gym.Env):
    """A cheap environment that raises in every step."""

    observation_space = gym.spaces.Box(-1, 1, (4,), np.float32)
    action_space = gym.spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        return np.zeros(4, np.float32), {"text": "x"}

    def step(self, action: Any) -> Any:
        raise ValueError("every step raises")


class Neighbour(threading.Thread):
    """A thread that writes, reads and closes files and pipes; ``troubles`` lists what another owner did to them."""

    def __init__(self) -> None:
        super().__init__(name="neighbour", daemon=True)
        self.rounds = 0
        self.troubles: list[str] = []
        self.over = False

    def run(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            while not self.over:
                try:
                    self._one_round(os.path.join(folder, "file"))
                except OSError as error:
                    self.troubles.append(f"round {self.rounds}: {error!r}")
                self.rounds += 1

    def _one_round(self, path: str) -> None:
        mine: list[int] = []
        kept: dict[int, str] = {}
        for _ in range(3):
            mine += os.pipe()
        mine.append(os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC))
        for number in mine:
            kept[number] = os.readlink(f"/proc/self/fd/{number}")
        text = f"round {self.rounds}".encode()
        for reader, writer in zip(mine[0:6:2], mine[1:6:2], strict=True):
            os.write(writer, text)
            os.set_blocking(reader, False)
        os.write(mine[-1], text)
        time.sleep(0.0005)  # another thread may run meanwhile
        for reader in mine[0:6:2]:
            with contextlib.suppress(BlockingIOError):
                if (got := os.read(reader, 100)) == text:
                    continue
                self.troubles.append(f"round {self.rounds}: read {got!r}")
                continue
            self.troubles.append(f"round {self.rounds}: somebody else read it")
        if (got := os.pread(mine[-1], 100, 0)) != text:
            self.troubles.append(f"round {self.rounds}: the file has {got!r}")
        for number in mine:
            if (now := os.readlink(f"/proc/self/fd/{number}")) != kept[number]:
                self.troubles.append(f"round {self.rounds}: descriptor {number} was {kept[number]} and is {now}")
        for number in mine:
            try:
                os.close(number)
            except OSError as error:
                self.troubles.append(f"round {self.rounds}: somebody else closed {kept[number]}: {error!r}")


def children() -> list[int]:
    return [int(pid) for task in Path("/proc/self/task").iterdir() for pid in (task / "children").read_text().split()]


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def drop_one() -> None:
    """Drop the last reference of an engine that is in a cycle with its error."""
    envs: Any = vecenv.AsyncVectorEnv([Raising] * 2, num_workers=1, context="fork")
    envs.reset()
    try:
        envs.step(np.zeros(2, np.int64))
    except ValueError as error:
        envs.kept = error


def main(count: int) -> None:
    warnings.simplefilter("ignore")
    sys.setswitchinterval(1e-5)  # short time slices
    complaints: list[str] = []
    sys.unraisablehook = lambda unraisable: complaints.append(repr(unraisable.exc_value))
    drop_one()
    gc.collect()
    before = descriptors()
    gc.disable()  # it runs below, when some have accumulated
    neighbour = Neighbour()
    neighbour.start()
    for dropped in range(count):
        faulthandler.dump_traceback_later(STUCK, exit=True)
        drop_one()
        if dropped % 5 == 4:
            gc.collect()
        rounds, since = neighbour.rounds, time.monotonic()
        while neighbour.rounds == rounds:  # it must make progress
            if time.monotonic() - since > STUCK / 2:
                raise SystemExit(f"the thread hangs after {dropped} engines and {rounds} rounds")
            time.sleep(0.0001)
    gc.collect()
    neighbour.over = True
    neighbour.join(STUCK / 2)
    deadline = time.monotonic() + 5.0
    while children() and time.monotonic() < deadline:
        time.sleep(0.01)
    result = {
        "engines": count, "rounds": neighbour.rounds, "troubles": neighbour.troubles[:5], "complaints": complaints[:5],
        "processes": len(children()), "descriptors": descriptors() - before, "thread hangs": neighbour.is_alive(),
    }  # fmt: skip
    print(json.dumps(result), flush=True)
    for pid in children():
        os.kill(pid, signal.SIGKILL)
    os._exit(0)


if __name__ == "__main__":
    main(int(sys.argv[1]))
