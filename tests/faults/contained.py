"""A program for a container: ``contained.py METHOD``, with the start method of the workers.

It prints its pid, and the processes that its environments left behind (``unknown`` if there is no ``/proc``).
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from typing import Any

import gymnasium
import numpy as np

import vecenv
from vecenv import WorkerOptions
from vecenv.errors import WorkerDied


def start_shell(command: str, **kwargs: Any) -> None:
    null = subprocess.DEVNULL
    subprocess.Popen(["sh", "-c", command], stdin=null, stdout=null, stderr=null, **kwargs)


class HelperEnv(gymnasium.Env[Any, Any]):
    """An environment that starts helpers in each reset: one in its process group, an orphan and, if there is a ``/proc``,
    one in a new session.
    """

    observation_space = gymnasium.spaces.Box(0, 1, (1,))
    action_space = gymnasium.spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        start_shell("sleep 600")
        start_shell("sleep 601 & sleep 0.1")
        if os.path.exists("/proc/self"):  # without /proc, the engine cannot find helpers outside the process group
            start_shell("sleep 602", start_new_session=True)
        return np.zeros(1, np.float32), {}

    def step(self, action: Any) -> Any:
        return np.zeros(1, np.float32), 0.0, False, False, {}


def list_other_processes() -> list[str]:
    """Return the name and state of every other process."""
    found = []
    for name in os.listdir("/proc"):
        if name.isdigit() and int(name) != os.getpid():
            # the process may have ended since listdir()
            with contextlib.suppress(FileNotFoundError, ProcessLookupError), open(f"/proc/{name}/stat") as file:
                found.append(" ".join(file.read().split()[1:3]))
    return found


def main(method: str) -> None:
    for kill_worker, pool_options in ((False, {}), (True, {"num_workers": "auto", "use_caller": False})):
        options = {"worker_options": WorkerOptions(dummy_env=False), **pool_options}
        envs = vecenv.AsyncVectorEnv([HelperEnv, HelperEnv], context=method, **options)
        envs.reset(seed=1)
        envs.step([0, 0])
        time.sleep(0.3)  # the shell that starts an orphan ends after 0.1 s
        if kill_worker:
            os.kill(envs._pool.workers[0].pid, signal.SIGKILL)
            try:
                envs.step([0, 0])
            except WorkerDied:
                envs.reset(seed=1)
        envs.close()
    print(f"pid {os.getpid()}, left: {list_other_processes() if os.path.exists('/proc/self') else 'unknown'}")


if __name__ == "__main__":
    main(sys.argv[1])
