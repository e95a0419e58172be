"""Looking at environments: the frames of all of them as one image, videos of such images, and ``vecenv watch``."""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from gymnasium.vector import VectorEnv

from vecenv.errors import how_to_install
from vecenv.make import make_vec
from vecenv.system.cores import usable_cores
from vecenv.tools import CliError, module_named, one_line, progress_bar, require
from vecenv.tools.runners import resolve

Frame = npt.NDArray[np.uint8]
"""uint8 ``(height, width, 3)``."""
Policy = Callable[[Any], Any]
"""Batch of observations -> batch of actions."""

VIDEO_SUFFIXES: Final = {".gif": ("PIL", how_to_install("bench")), ".mp4": ("moviepy", "pip install 'moviepy>=2'")}
"""What videos can be written, the module that writes each, and what installs it."""
FPS: Final = 30.0
WIDTH: Final = 800
"""Pixels at most, of what ``vecenv watch`` writes."""


def render_grid(envs: VectorEnv[Any, Any, Any], *, columns: int | None = None, gap: int = 2) -> Frame:
    """The frames of all environments, tiled into one image, row by row in the order of the environments.

    Args:
        envs: Any vector environment made with ``render_mode="rgb_array"``, reset before.
        columns: How many environments side by side; default: as many as make the image about as wide as high.
        gap: Black pixels between them.

    Returns:
        uint8 ``(rows * height + gaps, columns * width + gaps, 3)``. Grey frames become RGB; those smaller than the largest
        are centred; of a list of frames (``"rgb_array_list"``) the last is taken.

    Raises:
        ValueError: They were not made to be drawn, or their frames are not images; says what came.
    """
    mode = getattr(envs, "render_mode", None)
    if mode not in ("rgb_array", "rgb_array_list"):
        raise ValueError(f"render_grid wants environments made with render_mode='rgb_array', these have {mode!r}")
    rendered = envs.render()
    if rendered is None:
        raise ValueError(f"{envs} returned no frames")
    return tile([_as_rgb(frame, env) for env, frame in enumerate(rendered)], columns=columns, gap=gap)


def _as_rgb(frame: Any, env: int) -> Frame:
    if isinstance(frame, list) and frame:
        frame = frame[-1]
    image = np.asarray(frame)
    if image.ndim == 2:
        image = image[..., np.newaxis]
    if image.dtype != np.uint8 or image.ndim != 3 or image.shape[2] not in (1, 3, 4) or 0 in image.shape:
        what = type(frame).__name__ if image.dtype == object else f"{image.dtype} of shape {np.shape(frame)}"
        raise ValueError(f"env {env}: a frame is uint8 of shape (height, width, 3), got {what}")
    return image.repeat(3, 2) if image.shape[2] == 1 else image[..., :3]


def tile(images: Sequence[Frame], *, columns: int | None = None, gap: int = 2) -> Frame:
    """Images ``(height, width, 3)`` in one image, row by row; see :func:`render_grid`."""
    if not images:
        raise ValueError("there are no images to tile")
    if columns is not None and columns < 1:
        raise ValueError(f"columns must be at least 1, got {columns}")
    if gap < 0:
        raise ValueError(f"gap must not be negative, got {gap}")
    height, width = max(image.shape[0] for image in images), max(image.shape[1] for image in images)
    if columns is None:
        columns = _squarest(len(images), height, width)
    columns = min(columns, len(images))
    rows = -(-len(images) // columns)
    grid = np.zeros((rows * (height + gap) - gap, columns * (width + gap) - gap, 3), np.uint8)
    for position, image in enumerate(images):
        row, column = divmod(position, columns)
        top = row * (height + gap) + (height - image.shape[0]) // 2
        left = column * (width + gap) + (width - image.shape[1]) // 2
        grid[top : top + image.shape[0], left : left + image.shape[1]] = image
    return grid


def _squarest(count: int, height: int, width: int) -> int:
    """How many columns make the image most nearly square; of two that are equal, the one with fewer empty places."""

    def oddness(columns: int) -> tuple[float, int]:
        rows = -(-count // columns)
        return abs(math.log(columns * width / (rows * height))), rows * columns - count

    return min(range(1, count + 1), key=oddness)


# --- videos ---------------------------------------------------------------------------------------


def frames(envs: VectorEnv[Any, Any, Any], policy: Policy | None, steps: int, seed: int | None = None) -> Iterator[Frame]:
    """The grid after the reset and after each of ``steps`` steps; ``policy=None`` is a random one."""
    if seed is not None:
        envs.action_space.seed(seed)
    observations, _ = envs.reset(seed=seed)
    yield render_grid(envs)
    for _ in range(steps):
        observations, *_ = envs.step(envs.action_space.sample() if policy is None else policy(observations))
        yield render_grid(envs)


def shrink(image: Frame, width: int) -> Frame:
    """The image at most ``width`` pixels wide, its shape kept."""
    from PIL import Image

    picture = Image.fromarray(image)
    picture.thumbnail((width, image.shape[0]), Image.Resampling.LANCZOS)
    return np.asarray(picture)


def require_writer(path: Path) -> None:
    """Raise unless videos of this name can be written: ValueError for the name, ImportError for a missing library."""
    needs = VIDEO_SUFFIXES.get(path.suffix.lower())
    if needs is None:
        raise ValueError(f"a video is written as {' or '.join(VIDEO_SUFFIXES)}, got {path.name!r}")
    module, command = needs
    if importlib.util.find_spec(module) is None:
        raise ImportError(f"writing {path.suffix} needs {module}, not installed here: {command}")


def write_video(images: Iterable[Frame], path: str | Path, *, fps: float = 30.0) -> int:
    """Write images of one size as an animated GIF or an MP4, as the name of the file says; returns how many there were.

    Raises:
        ValueError: The name says neither; there are no images.
        ImportError: The library for it is missing; says what to install.
        OSError: The file cannot be written.
    """
    path = Path(path)
    require_writer(path)
    if not isinstance(images, Iterable):
        raise TypeError(f"write_video wants images, as [vecenv.render_grid(envs) for ...], got {images!r}")
    every = list(images)
    if not every:
        raise ValueError("there are no images to write")
    path.parent.mkdir(parents=True, exist_ok=True)
    write = _write_gif if path.suffix.lower() == ".gif" else _write_mp4
    write(every, path, fps)
    return len(every)


def _write_gif(images: list[Frame], path: Path, fps: float) -> None:
    from PIL import Image

    # one palette for all: no flicker, and frames that differ by little are small
    some = images[:: -(-len(images) // 8)]
    palette = Image.fromarray(np.concatenate(some)).quantize(256)
    first, *rest = [Image.fromarray(image).quantize(palette=palette, dither=Image.Dither.NONE) for image in images]
    first.save(path, save_all=True, append_images=rest, duration=max(round(1000 / fps), 20), loop=0, optimize=False)


def _write_mp4(images: list[Frame], path: Path, fps: float) -> None:
    from moviepy.video.io.ImageSequenceClip import ImageSequenceClip

    # H.264 wants even sizes
    even = [np.pad(image, ((0, image.shape[0] % 2), (0, image.shape[1] % 2), (0, 0))) for image in images]
    ImageSequenceClip(even, fps=fps).write_videofile(str(path), logger=None, audio=False)


# --- the command ------------------------------------------------------------------------------------


def main(arguments: argparse.Namespace) -> int:
    """write a short video of some environments side by side

    Steps some environments, tiles their frames into one image, and writes a GIF or an MP4.

    A policy is a function of yours: it gets a batch of observations and returns a batch of actions.
    """
    require("watch", "rich", "PIL")
    env_id, num_envs = arguments.env_id, arguments.num_envs
    env_fn = resolve(env_id)
    policy = None if arguments.policy is None else load_policy(arguments.policy)
    path = arguments.out or Path(re.sub(r"[^\w.-]+", "_", env_id) + ".gif")
    options = {"num_workers": min(num_envs, usable_cores())}
    small = []
    try:
        require_writer(path)
        with (
            progress_bar() as progress,
            closing(make_vec(env_fn, num_envs, vector_kwargs=options, render_mode="rgb_array")) as envs,
        ):
            for done, image in enumerate(frames(envs, policy, arguments.steps, arguments.seed)):
                progress("drawing", done, arguments.steps + 1)
                small.append(shrink(image, WIDTH))
        count, (height, width) = write_video(small, path, fps=FPS), small[0].shape[:2]
    except OSError as error:
        raise CliError(f"cannot write {path}: {error}") from None
    except (ValueError, TypeError, ImportError) as error:
        first = (str(error).strip().splitlines() or [repr(error)])[0]
        raise CliError(f"{first}{_hint_of_rendering(env_id, error)}") from None
    except Exception as error:
        raise CliError(f"{env_id} cannot be shown: {one_line(error)}") from None
    seconds = round(count / FPS, 3)
    if arguments.json:
        found = {"file": str(path), "env": env_id, "num_envs": num_envs, "policy": arguments.policy or "random"}
        print(json.dumps({**found, "frames": count, "size": [width, height], "seconds": seconds}, indent=1))
    else:
        print(f"Written: {path}, {count} frames of {width} x {height}, {seconds:g} s")
    return 0


def load_policy(name: str) -> Policy:
    """The function that ``module:function`` names: a batch of observations in, a batch of actions out.

    Raises:
        CliError: It is not written like that, or is not to be found; says what is wrong.
    """
    module, colon, function = name.partition(":")
    if not (module and colon and function):
        raise CliError(f"a policy is written module:function, got {name!r}")
    found: Policy | None = getattr(module_named(module, f", the module of the policy {name!r}"), function, None)
    if not callable(found):
        raise CliError(f"{module!r} has no function {function!r}, which the policy {name!r} names")
    return found


def _hint_of_rendering(env_id: str, error: Exception) -> str:
    """What to do where a class or a function does not take the argument that makes it draw."""
    takes = re.search(r"takes no arguments|unexpected keyword argument 'render_mode'|takes 0 positional", str(error))
    if isinstance(error, TypeError) and takes:
        wanted = f"let {env_id} take that argument, and its render() return a picture"
        return f"; watch builds it with render_mode='rgb_array': {wanted}"
    return ""
