"""Builds a task in a process that may die of it, before it is built here.

EnvPool's tasks have hundreds of options that C++ does not check: some values end the process, others overwrite memory or
make a reset that never returns, and it depends on the others which. Common ones are known to be harmless (see ``task``); any
other configuration is built, reset and stepped in a process of its own first, which takes a second or two, once. MuJoCo
tasks draw with OpenGL, and end the process by ``exit(1)`` without an OpenGL library: their first frame is drawn there, too.
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

__all__ = ["require_drawable", "require_harmless"]

_PROGRAM: Final = """
import pickle, sys
path, task, options, memory, draw = pickle.load(sys.stdin.buffer)
sys.path[:] = path
sys.modules["jax"] = None  # EnvPool imports it if it is there, which takes a second
try:
    import resource
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if not draw:
        resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
except (ImportError, ValueError, OSError):
    pass
import envpool
import numpy as np
pool = envpool.make_gymnasium(task, num_envs=2, num_threads=1, seed=1, **options)
pool.reset()
space = pool.action_space
if draw:
    pool.render()
elif not hasattr(space, "spaces"):
    for _ in range(32):
        pool.step(np.stack([space.sample(), space.sample()]))
print("survived", flush=True)
del pool
"""
_DRAWING: Final = ("from_pixels", "render_width", "render_height", "render_camera_id")
_PATIENCE: Final = 120.0
_MEMORY: Final = 16 << 30  # of addresses, most of which are never used


def require_harmless(task_id: str, unknown: Mapping[str, Any], env_config: Mapping[str, Any]) -> None:
    """Return if a task can be built with these options without danger.

    Args:
        task_id: EnvPool's.
        unknown: The options that are not known to be harmless.
        env_config: All options.

    Raises:
        ValueError: The process that tried did not survive it.
    """
    options = {key: value for key, value in env_config.items() if key not in _DRAWING}
    if (complaint := _complaint(task_id, pickle.dumps(sorted(options.items())), draw=False)) is not None:
        given = ", ".join(f"{key}={value!r}" for key, value in unknown.items())
        raise ValueError(
            f"EnvPool's {task_id!r} cannot be had with {given}: a process that tried, because EnvPool itself checks no such "
            f"thing, ended with {complaint}"
        )


def require_drawable(task_id: str, family: str, pool_config: Mapping[str, Any]) -> None:
    """Return if a task can be drawn without danger.

    Raises:
        RuntimeError: The process that tried did not survive it.
    """
    if not family.startswith("mujoco."):
        return
    options = {"render_mode": "rgb_array", **{key: value for key, value in pool_config.items() if key in _DRAWING}}
    if (complaint := _complaint(task_id, pickle.dumps(sorted(options.items())), draw=True)) is not None:
        raise RuntimeError(
            f"{task_id!r} cannot be drawn on this machine: a process that tried ended with {complaint}. MuJoCo tasks need "
            "an OpenGL library: on Debian and Ubuntu, apt install libegl1 libgl1"
        )


@functools.cache
def _complaint(task_id: str, options: bytes, *, draw: bool) -> str | None:
    """How the process that tried has ended; ``None`` if it survived."""
    free = available_memory()
    memory = _MEMORY if free is None else min(_MEMORY, max(free, 4 << 30))
    path = [os.path.abspath(entry) for entry in sys.path]
    payload = pickle.dumps((path, task_id, dict(pickle.loads(options)), memory, draw))
    try:
        with tempfile.TemporaryDirectory(prefix="vecenv-trial-") as folder:  # MuJoCo leaves a log where it fails
            done = subprocess.run(
                [sys.executable, "-c", _PROGRAM],
                input=payload, capture_output=True, timeout=_PATIENCE, check=False, cwd=folder,
            )  # fmt: skip
    except subprocess.TimeoutExpired:
        return f"no answer within {_PATIENCE:g} s"
    if done.returncode == 0 and b"survived" in done.stdout:
        return None
    said = [line.strip() for line in (done.stderr or done.stdout).decode(errors="replace").splitlines() if line.strip()]
    # C++ says what it was, and then where, in addresses
    telling = [line for line in said if "what():" in line or "Check failure" in line or line.startswith("F")] or said[-1:]
    return f"exit code {done.returncode}" + (f" ({telling[0]})" if telling else "")
