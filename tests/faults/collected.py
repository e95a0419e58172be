"""A program that drops engines without closing them, while a thread uses files and pipes.

Usage: ``python collected.py COUNT``, with the number of engines. Each engine raises, which puts it in a reference cycle
(error, traceback, frame, engine), so the garbage collector finalizes its objects in any order. The thread opens and closes
descriptors all the time. It soon reuses the number of one that an engine has closed, and then detects a finalizer that
still reads or closes that number. The last line of output is JSON.
"""

from __future__ import annotations

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

HANG_SECONDS = 30.0  # the program ends itself if it makes no progress for this long


class RaisingEnv(gym.Env):
    """A cheap environment that raises in every step."""

    observation_space = gym.spaces.Box(-1, 1, (4,), np.float32)
    action_space = gym.spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        return np.zeros(4, np.float32), {"text": "x"}  # workers send infos with text through their pipe

    def step(self, action: Any) -> Any:
        raise ValueError("every step raises")


class FileThread(threading.Thread):
    """A thread that writes, reads and closes files and pipes, and reports in ``conflicts`` if other code has used them."""

    def __init__(self) -> None:
        super().__init__(name="files", daemon=True)
        self.rounds = 0
        self.conflicts: list[str] = []
        self.stopping = False

    def run(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            while not self.stopping:
                try:
                    self._run_round(os.path.join(folder, "file"))
                except OSError as error:
                    self.conflicts.append(f"round {self.rounds}: {error!r}")
                self.rounds += 1

    def _run_round(self, path: str) -> None:
        pipes = [os.pipe() for _ in range(3)]
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC)
        descriptors = [*(end for pipe in pipes for end in pipe), file]
        targets = {number: os.readlink(f"/proc/self/fd/{number}") for number in descriptors}
        text = f"round {self.rounds}".encode()
        for reader, writer in pipes:
            os.write(writer, text)
            os.set_blocking(reader, False)
        os.write(file, text)
        time.sleep(0.0005)  # lets the main thread run
        for reader, _ in pipes:
            try:
                content = os.read(reader, 100)
            except BlockingIOError:
                self.conflicts.append(f"round {self.rounds}: another reader emptied the pipe")
            else:
                if content != text:
                    self.conflicts.append(f"round {self.rounds}: the pipe contained {content!r}")
        if (content := os.pread(file, 100, 0)) != text:
            self.conflicts.append(f"round {self.rounds}: the file contained {content!r}")
        for number in descriptors:
            if (target := os.readlink(f"/proc/self/fd/{number}")) != targets[number]:
                self.conflicts.append(f"round {self.rounds}: descriptor {number} was {targets[number]} and is {target}")
        for number in descriptors:
            try:
                os.close(number)
            except OSError as error:
                self.conflicts.append(f"round {self.rounds}: other code closed {targets[number]}: {error!r}")


def child_pids() -> list[int]:
    return [int(pid) for task in Path("/proc/self/task").iterdir() for pid in (task / "children").read_text().split()]


def count_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def drop_engine() -> None:
    """Open an engine and drop the last reference to it while it is in a cycle with its error."""
    envs: Any = vecenv.AsyncVectorEnv([RaisingEnv] * 2, num_workers=1, context="fork")
    envs.reset()
    try:
        envs.step(np.zeros(2, np.int64))
    except ValueError as error:
        envs.kept = error  # its traceback refers to this frame, and so to the engine


def main(count: int) -> None:
    warnings.simplefilter("ignore")
    sys.setswitchinterval(1e-5)  # lets the thread run often while an engine is finalized
    unraisable: list[str] = []
    sys.unraisablehook = lambda arguments: unraisable.append(repr(arguments.exc_value))
    drop_engine()  # the first engine opens descriptors that stay open
    gc.collect()
    descriptors_before = count_descriptors()
    gc.disable()  # the loop collects whenever five engines have accumulated
    thread = FileThread()
    thread.start()
    for dropped in range(count):
        faulthandler.dump_traceback_later(HANG_SECONDS, exit=True)
        drop_engine()
        if dropped % 5 == 4:
            gc.collect()
        rounds, started_at = thread.rounds, time.monotonic()
        while thread.rounds == rounds:
            if time.monotonic() - started_at > HANG_SECONDS / 2:
                raise SystemExit(f"the thread hangs after {dropped} engines and {rounds} rounds")
            time.sleep(0.0001)
    gc.collect()
    thread.stopping = True
    thread.join(HANG_SECONDS / 2)
    deadline = time.monotonic() + 5.0
    while child_pids() and time.monotonic() < deadline:
        time.sleep(0.01)
    result = {
        "engines": count, "rounds": thread.rounds, "conflicts": thread.conflicts[:5], "unraisable": unraisable[:5],
        "processes": len(child_pids()), "descriptors": count_descriptors() - descriptors_before,
        "thread hangs": thread.is_alive(),
    }  # fmt: skip
    print(json.dumps(result), flush=True)
    for pid in child_pids():
        os.kill(pid, signal.SIGKILL)
    os._exit(0)


if __name__ == "__main__":
    main(int(sys.argv[1]))
