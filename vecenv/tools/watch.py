"""``vecenv watch``: a short video of some environments side by side, under a random policy or one of the user's."""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gymnasium.envs.registration import registry

from vecenv.make import make_vec
from vecenv.system.cores import usable_cores
from vecenv.tools.pictures import Frame, Policy, frames, require_writer, shrink, write_video

__all__ = ["Recording", "hint_of_rendering", "load_policy", "record"]

Progress = Callable[[str, int, int], None]


@dataclass(frozen=True, slots=True)
class Recording:
    """What was written: ``size`` is (width, height) in pixels, ``seconds`` how long it plays."""

    file: str
    env: str
    num_envs: int
    policy: str
    frames: int
    size: tuple[int, int]
    seconds: float


def load_policy(name: str) -> Policy:
    """The function that ``module:function`` names: a batch of observations in, a batch of actions out.

    Raises:
        ValueError: It is not written like that, or is not to be found; says what is wrong.
    """
    module, colon, function = name.partition(":")
    if not (module and colon and function):
        raise ValueError(f"a policy is written module:function, got {name!r}")
    try:
        found = getattr(importlib.import_module(module), function, None)
    except ImportError as error:
        raise ValueError(f"cannot import {module!r}, the module of the policy {name!r}: {error}") from None
    if not callable(found):
        raise ValueError(f"{module!r} has no function {function!r}, which the policy {name!r} names")
    policy: Policy = found
    return policy


def record(
    env_id: str,
    path: Path,
    *,
    policy: str | None = None,
    backend: str = "process",
    num_envs: int = 4,
    steps: int = 200,
    seed: int | None = None,
    fps: float = 30.0,
    width: int = 800,
    progress: Progress | None = None,
) -> Recording:
    """Step ``num_envs`` environments and write what they look like; the arguments are those of the command.

    Raises:
        ValueError: The name of the file or of the policy, or the frames.
        ImportError: A library is missing; says what to install.
        Exception: Of :func:`vecenv.make_vec`, of the environments, or of the policy.
    """
    require_writer(path)
    act = None if policy is None else load_policy(policy)
    options = {"num_workers": min(num_envs, usable_cores())} if backend == "process" else {}
    with closing(make_vec(_what(env_id), num_envs, backend, vector_kwargs=options, render_mode="rgb_array")) as envs:
        sizes: list[tuple[int, int]] = []
        images = _smaller(frames(envs, act, steps, seed), width, sizes, steps + 1, progress)
        count = write_video(images, path, fps=fps)
    return Recording(str(path), env_id, num_envs, policy or "random", count, sizes[0], round(count / fps, 3))


def _what(env_id: str) -> Any:
    """An id for ``make_vec``, or the class that ``module:Class`` names."""
    module, _, name = env_id.rpartition(":")
    found = getattr(importlib.import_module(module), name, None) if module else None
    return found if callable(found) and name not in registry else env_id


def hint_of_rendering(env_id: str, error: Exception) -> str:
    """What to do where a class or a function does not take the argument that makes it draw."""
    takes = re.search(r"takes no arguments|unexpected keyword argument 'render_mode'|takes 0 positional", str(error))
    if isinstance(error, TypeError) and takes:
        wanted = f"let {env_id} take that argument, and its render() return a picture"
        return f"; watch builds it with render_mode='rgb_array': {wanted}"
    return ""


def _smaller(
    images: Iterable[Frame], width: int, sizes: list[tuple[int, int]], total: int, progress: Progress | None
) -> Iterator[Frame]:
    for done, image in enumerate(images):
        if progress is not None:
            progress("drawing", done, total)
        small = shrink(image, width)
        sizes[:] = [(small.shape[1], small.shape[0])]
        yield small
