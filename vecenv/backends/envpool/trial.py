"""Options of a task, tried in a process that may die of them.

EnvPool's tasks have hundreds of options that no one looks at before C++ does: some values end the process, others overwrite
memory or make a reset that never returns, and it depends on the others which. Those that are common are known to be harmless
(see ``options``); any other configuration is built, reset and stepped in a process of its own first, which takes a second or
two, once.
"""

from __future__ import annotations

import functools
import os
import pickle
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from typing import Any, Final

from vecenv.shm.arena import available_memory

__all__ = ["require"]

_PROGRAM: Final = """
import pickle, sys
path, task, options, memory = pickle.load(sys.stdin.buffer)
sys.path[:] = path
sys.modules["jax"] = None  # EnvPool imports it if it is there, which takes a second
try:
    import resource
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
except (ImportError, ValueError, OSError):
    pass
import envpool
import numpy as np
pool = envpool.make_gymnasium(task, num_envs=2, num_threads=1, seed=1, **options)
pool.reset()
space = pool.action_space
if not hasattr(space, "spaces"):
    for _ in range(32):
        pool.step(np.stack([space.sample(), space.sample()]))
del pool
print("tried")
"""
_NOT_TRIED: Final = ("from_pixels", "render_width", "render_height", "render_camera_id")  # `rendering` tries those
_PATIENCE: Final = 60.0
_MEMORY: Final = 16 << 30  # of addresses, most of which are never used


def require(task_id: str, unknown: Mapping[str, Any], env_config: Mapping[str, Any]) -> None:
    """Return if a task can be built with these options without danger.

    Args:
        task_id: EnvPool's.
        unknown: The options that are not known to be harmless.
        env_config: All options.

    Raises:
        ValueError: The process that tried did not survive it.
    """
    options = {key: value for key, value in env_config.items() if key not in _NOT_TRIED}
    complaint = _tried(task_id, pickle.dumps(sorted(options.items(), key=lambda item: item[0])))
    if complaint is not None:
        given = ", ".join(f"{key}={value!r}" for key, value in unknown.items())
        raise ValueError(
            f"EnvPool's {task_id!r} cannot be had with {given}: a process that tried, because EnvPool itself checks no such "
            f"thing, ended with {complaint}"
        )


@functools.cache
def _tried(task_id: str, options: bytes) -> str | None:
    """What went wrong, or ``None``."""
    free = available_memory()
    memory = _MEMORY if free is None else min(_MEMORY, max(free, 4 << 30))
    payload = pickle.dumps(([os.path.abspath(entry) for entry in sys.path], task_id, dict(pickle.loads(options)), memory))
    try:
        with tempfile.TemporaryDirectory(prefix="vecenv-trial-") as folder:  # MuJoCo leaves a log where it fails
            done = subprocess.run(
                [sys.executable, "-c", _PROGRAM],
                input=payload,
                capture_output=True,
                timeout=_PATIENCE,
                check=False,
                cwd=folder,
            )
    except subprocess.TimeoutExpired:
        return f"no answer within {_PATIENCE:g} s"
    if done.returncode == 0 and b"tried" in done.stdout:
        return None
    said = [line for line in done.stderr.decode(errors="replace").splitlines() if line.strip()]
    return f"exit code {done.returncode}" + (f" ({_telling(said)})" if said else "")


def _telling(lines: list[str]) -> str:
    """The line that tells the most: C++ says what it was, and then where, in addresses."""
    for line in lines:
        if "what():" in line or "Check failure" in line or line.startswith("F"):
            return line.strip()
    return lines[-1].strip()
