"""A program for containers: ``contained.py METHOD``. Its environments start helpers; it prints the processes left at the
end.
"""

from __future__ import annotations

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


def start(command: str, **kwargs: Any) -> None:
    nothing = subprocess.DEVNULL
    subprocess.Popen(["sh", "-c", command], stdin=nothing, stdout=nothing, stderr=nothing, **kwargs)


class Starts(gymnasium.Env[Any, Any]):
    """An environment that starts a helper in its process group, an orphaned one, and one in its own session."""

    observation_space = gymnasium.spaces.Box(0, 1, (1,))
    action_space = gymnasium.spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        start("sleep 600")
        start("sleep 601 & sleep 0.1")
        if os.path.exists("/proc/self"):  # helpers outside its group are found through /proc only
            start("sleep 602", start_new_session=True)
        return np.zeros(1, np.float32), {}

    def step(self, action: Any) -> Any:
        return np.zeros(1, np.float32), 0.0, False, False, {}


def children() -> list[str]:
    """Return the state and name of all processes but this one."""
    found = []
    for name in os.listdir("/proc"):
        if name.isdigit() and int(name) != os.getpid():
            with open(f"/proc/{name}/stat") as file:
                words = file.read().split()
            found.append(" ".join(words[1:3]))
    return found


def main(method: str) -> None:
    for kill, more in ((False, {}), (True, {"num_workers": "auto", "use_caller": False})):
        envs = vecenv.AsyncVectorEnv([Starts, Starts], context=method, worker_options=WorkerOptions(dummy_env=False), **more)
        envs.reset(seed=1)
        envs.step([0, 0])
        time.sleep(0.3)
        if kill:
            os.kill(envs._pool.workers[0].pid, signal.SIGKILL)
            try:
                envs.step([0, 0])
            except WorkerDied:
                envs.reset(seed=1)
        envs.close()
    print(f"pid {os.getpid()}, left: {children() if os.path.exists('/proc/self') else 'unknown'}")


if __name__ == "__main__":
    main(sys.argv[1])
