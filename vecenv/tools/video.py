"""Tiles the frames of all environments into one image, and writes such images as an animated GIF or an MP4."""

from __future__ import annotations

import copy
import importlib.util
import math
import operator
import struct
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from gymnasium.vector import VectorEnv

Frame = npt.NDArray[np.uint8]
"""uint8 ``(height, width, 3)``."""

VIDEO_SUFFIXES: Final = {
    ".gif": ("PIL", "Pillow", "pip install pillow"),
    ".mp4": ("moviepy", "moviepy", "pip install 'moviepy>=2'"),
}
"""File suffix -> the module that writes such videos, its library, and the command that installs it."""


def render_grid(envs: VectorEnv[Any, Any, Any], *, columns: int | None = None, gap: int = 2) -> Frame:
    """Tile the frames of all environments into one image, row by row in the order of the environments.

    Args:
        envs: Any vector environment with ``render_mode="rgb_array"`` that has been reset.
        columns: The number of frames per line; default: the one that makes the image closest to a square.
        gap: The number of black pixels between frames.

    Returns:
        uint8 ``(rows * height + gaps, columns * width + gaps, 3)``. Grey and RGBA frames become RGB, frames smaller than the
        largest are centred, and the last of a list of frames (``"rgb_array_list"``) is used.

    Raises:
        ValueError: ``envs`` have another ``render_mode``, or return another number of frames; a frame is not an image (the
            error names its environment); ``columns`` is below 1, or ``gap`` below 0.
    """
    mode = getattr(envs, "render_mode", None)
    if mode not in ("rgb_array", "rgb_array_list"):
        raise ValueError(f"render_grid needs environments made with render_mode='rgb_array', got {mode!r}")
    rendered: Any = envs.render()
    if rendered is None:
        raise ValueError(f"{envs} returned no frames")
    if len(rendered) != envs.num_envs:
        shape = f"an array of shape {rendered.shape}" if isinstance(rendered, np.ndarray) else f"{len(rendered)} frames"
        raise ValueError(f"{envs} must render one frame for each of {envs.num_envs} environments, got {shape}")
    return tile([as_rgb(frame, env) for env, frame in enumerate(rendered)], columns=columns, gap=gap)


def as_rgb(frame: Any, env: int) -> Frame:
    """Return a frame as uint8 ``(height, width, 3)``. ``env`` names the environment in the error."""
    if isinstance(frame, list) and frame:
        frame = frame[-1]
    image = np.asarray(frame)
    if image.ndim == 2:
        image = image[..., np.newaxis]
    if image.dtype != np.uint8 or image.ndim != 3 or image.shape[2] not in (1, 3, 4) or 0 in image.shape:
        description = type(frame).__name__ if image.dtype == object else f"{image.dtype} of shape {np.shape(frame)}"
        raise ValueError(f"env {env}: a frame must be uint8 of shape (height, width, 3), got {description}")
    return image.repeat(3, 2) if image.shape[2] == 1 else image[..., :3]


def tile(images: Sequence[Frame], *, columns: int | None = None, gap: int = 2) -> Frame:
    """Tile images ``(height, width, 3)`` into one, row by row; see :func:`render_grid`."""
    if not images:
        raise ValueError("there are no images to tile")
    gap, columns = operator.index(gap), None if columns is None else operator.index(columns)  # a uint8 would overflow
    if columns is not None and columns < 1:
        raise ValueError(f"columns must be at least 1, got {columns}")
    if gap < 0:
        raise ValueError(f"gap must not be negative, got {gap}")
    height, width = max(image.shape[0] for image in images), max(image.shape[1] for image in images)
    if columns is None:
        columns = _choose_columns(len(images), height, width)
    columns = min(columns, len(images))
    rows = -(-len(images) // columns)
    grid = np.zeros((rows * (height + gap) - gap, columns * (width + gap) - gap, 3), np.uint8)
    for position, image in enumerate(images):
        row, column = divmod(position, columns)
        top = row * (height + gap) + (height - image.shape[0]) // 2
        left = column * (width + gap) + (width - image.shape[1]) // 2
        grid[top : top + image.shape[0], left : left + image.shape[1]] = image
    return grid


def _choose_columns(count: int, height: int, width: int) -> int:
    """Return the number of columns that makes the image closest to a square; on a tie, the one with fewer empty cells."""

    def cost(columns: int) -> tuple[float, int]:
        rows = -(-count // columns)
        return abs(math.log(columns * width / (rows * height))), rows * columns - count

    return min(range(1, count + 1), key=cost)


# --- videos ---------------------------------------------------------------------------------------


def require_writer(path: Path) -> None:
    """Raise if no video can be written to ``path``: ValueError for its suffix, ImportError for a missing library."""
    requirement = VIDEO_SUFFIXES.get(path.suffix.lower())
    if requirement is None:
        raise ValueError(f"the name of a video must end in {' or '.join(VIDEO_SUFFIXES)}, got {path.name!r}")
    module, library, command = requirement
    if importlib.util.find_spec(module) is None:
        raise ImportError(f"writing {path.suffix} needs {library}, not installed here: {command}")


def write_video(images: Iterable[Frame], path: str | Path, *, fps: float = 30.0) -> int:
    """Write images of one size as an animated GIF or an MP4, depending on the suffix, and return their number.

    A GIF holds equal consecutive images as one that is shown longer.

    Args:
        images: Frames ``uint8 (height, width, 3)`` of one size, such as those of :func:`vecenv.render_grid`.
        path: The file, which ends in ``.gif`` or ``.mp4``.
        fps: Frames per second; a GIF shows at most 50, and each for a multiple of 10 ms.

    Raises:
        TypeError: ``images`` is not iterable.
        ValueError: The file has another suffix, there are no images, one is no such frame, ``fps`` is not positive, or a
            GIF would show one image for more than 655 seconds, which the format cannot express.
        ImportError: The library for this format is missing; the error names the command that installs it.
        OSError: The file cannot be written.
    """
    path = Path(path)
    require_writer(path)
    if not isinstance(images, Iterable):
        raise TypeError(
            f"`images` must be an iterable of frames, such as [vecenv.render_grid(envs) for ...], got {images!r}"
        )
    if not 0 < fps < math.inf:
        raise ValueError(f"`fps` must be a positive number of frames per second, got {fps!r}")
    # an iterator may yield one array again and again, as some environments render
    frames = list(images) if isinstance(images, Sequence | np.ndarray) else list(map(copy.copy, images))
    if not frames:
        raise ValueError("there are no images to write")
    for index, frame in enumerate(frames):
        shape, dtype = np.shape(frame), getattr(frame, "dtype", type(frame).__name__)
        if dtype != np.uint8 or len(shape) != 3 or 0 in shape or shape != (*np.shape(frames[0])[:2], 3):
            expected = "uint8 of shape (height, width, 3), all of one size"
            raise ValueError(f"images must be {expected}; images[{index}] is {dtype} of shape {shape}")
    path.parent.mkdir(parents=True, exist_ok=True)
    write = _write_gif if path.suffix.lower() == ".gif" else _write_mp4
    write(frames, path, float(fps))  # with a float16, MoviePy would lose frames
    return len(frames)


def _write_gif(images: list[Frame], path: Path, fps: float) -> None:
    from PIL import Image

    def with_palette(image: Frame) -> Image.Image:
        picture = Image.fromarray(image)
        is_exact = picture.getcolors(256) is not None  # with more colours, MEDIANCUT takes up to 2 s per frame
        return picture.quantize(256, Image.Quantize.MEDIANCUT if is_exact else Image.Quantize.FASTOCTREE)

    # a palette per frame: a common one lacks colours that only a few frames have
    first, *rest = [with_palette(image) for image in images]
    try:
        first.save(path, save_all=True, append_images=rest, duration=max(round(1000 / fps), 20), loop=0, optimize=False)
    except struct.error:
        text = "a GIF cannot show an image, or equal consecutive ones, for more than 655 seconds: write an MP4"
        raise ValueError(text) from None


def _write_mp4(images: list[Frame], path: Path, fps: float) -> None:
    from moviepy.video.io.ImageSequenceClip import ImageSequenceClip

    # H.264 requires even widths and heights
    padded = [np.pad(image, ((0, image.shape[0] % 2), (0, image.shape[1] % 2), (0, 0))) for image in images]
    ImageSequenceClip(padded, fps=fps).write_videofile(str(path), logger=None, audio=False)
