"""Whether this machine can draw a task, asked of a process that may die of it.

EnvPool's MuJoCo tasks draw with OpenGL, and where no OpenGL library is to be found they end the process with ``exit(1)``:
no exception, no ``finally``. So the first frame of such a task is drawn in a process of its own, be it for ``render()`` or
for observations (``from_pixels=True``).
"""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from typing import Any

import numpy as np
import numpy.typing as npt

from vecenv.backends.envpool.rows import Array
from vecenv.backends.envpool.task import Task

__all__ = ["frames", "require"]

_PROBE = """
import sys
sys.path[:] = {path!r}
import envpool
pool = envpool.make_gymnasium({task!r}, num_envs=1, **{options!r})
pool.reset()
pool.render()
print("drawn")
"""
_OPTIONS = ("from_pixels", "render_width", "render_height", "render_camera_id")
_PATIENCE = 120.0


def require(task: Task) -> None:
    """Return if a task can be drawn without danger.

    Raises:
        RuntimeError: The process that tried did not survive it.
    """
    if not task.family.startswith("mujoco."):
        return
    options = {key: value for key, value in task.pool_config.items() if key in _OPTIONS}
    complaint = _probe(task.id, tuple(sorted({"render_mode": "rgb_array", **options}.items())))
    if complaint is not None:
        raise RuntimeError(
            f"{task.id!r} cannot be drawn on this machine: a process that tried ended with {complaint}. MuJoCo tasks need "
            "an OpenGL library: on Debian and Ubuntu, apt install libegl1 libgl1"
        )


@functools.cache
def _probe(task_id: str, options: tuple[tuple[str, Any], ...]) -> str | None:
    """What went wrong, or ``None``."""
    program = _PROBE.format(path=sys.path, task=task_id, options=dict(options))
    try:
        done = subprocess.run(
            [sys.executable, "-c", program],
            capture_output=True,
            text=True,
            timeout=_PATIENCE,
            check=False,
            env={**os.environ, "JAX_PLATFORMS": "cpu"},
        )
    except subprocess.TimeoutExpired:
        return f"no answer within {_PATIENCE:g} s"
    if done.returncode == 0 and "drawn" in done.stdout:
        return None
    said = (done.stderr or done.stdout).strip().splitlines()
    return f"exit code {done.returncode}" + (f" ({said[-1]})" if said else "")


def frames(pool: Any, ids: Array, task: Task) -> npt.NDArray[np.uint8]:
    """Frames of shape ``(len(ids), height, width, 3)``.

    Raises:
        RuntimeError: EnvPool cannot draw this task.
    """
    try:
        drawn: npt.NDArray[np.uint8] = pool.render(env_ids=ids)
    except RuntimeError as error:
        raise RuntimeError(f"EnvPool cannot draw {task.id!r}: {error}") from error
    return drawn
