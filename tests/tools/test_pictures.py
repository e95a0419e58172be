"""``render_grid``, which puts the frames of all environments into one image, and ``write_video``."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import gymnasium
import numpy as np
import pytest

import vecenv
from vecenv.tools.video import render_grid, require_writer, tile, write_video


class PlainColourFrames(gymnasium.Env[Any, Any]):
    """An environment that renders frames of one colour, which depends on the seed and the number of steps."""

    metadata: ClassVar = {"render_modes": ["rgb_array"], "render_fps": 30}
    observation_space = gymnasium.spaces.Box(0, 255, (1,), np.float32)
    action_space = gymnasium.spaces.Discrete(3)
    render_mode: str | None

    def __init__(self, shape: tuple[int, ...], render_mode: str | None = "rgb_array", dtype: str = "uint8") -> None:
        self.render_mode, self._shape, self._dtype = render_mode, shape, dtype

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        super().reset(seed=seed)
        self.colour, self.steps = seed or 0, 0
        return np.zeros(1, np.float32), {}

    def step(self, action: Any) -> Any:
        self.steps += 1
        return np.full(1, action, np.float32), 0.0, False, False, {}

    def render(self) -> Any:
        return np.full(self._shape, 10 * self.colour + self.steps, self._dtype)


@pytest.fixture
def make_envs() -> Iterator[Any]:
    """Yield a function that builds a vector environment with frames of these shapes, which is closed after the test."""
    built: list[Any] = []

    def build(*shapes: tuple[int, ...], num_workers: int = 0, **options: Any) -> Any:
        env_fns = [functools.partial(PlainColourFrames, shape, **options) for shape in shapes]
        built.append(vecenv.AsyncVectorEnv(env_fns, num_workers=num_workers))
        return built[-1]

    yield build
    for envs in built:
        envs.close()


@pytest.mark.parametrize("num_workers", [0, 2])
def test_render_grid_places_environments_in_order(make_envs: Any, num_workers: int) -> None:
    envs = make_envs(*[(4, 6, 3)] * 5, num_workers=num_workers)
    envs.reset(seed=1)
    grid = vecenv.render_grid(envs, columns=3, gap=2)
    assert grid.shape == (2 * 4 + 2, 3 * 6 + 2 * 2, 3)
    assert grid.dtype == np.uint8
    for index in range(5):
        row, column = divmod(index, 3)
        cell = grid[row * 6 : row * 6 + 4, column * 8 : column * 8 + 6]
        assert (cell == 10 * (index + 1)).all(), index
    assert not grid[4:6].any(), "the gap is not black"
    assert not grid[6:, 16:].any(), "the empty cell is not black"


def test_render_grid_accepts_small_grey_and_transparent_frames(make_envs: Any) -> None:
    envs = make_envs((4, 6, 3), (2, 2), (4, 6, 4), (4, 6, 1))
    envs.reset(seed=[1, 2, 3, 4])
    grid = render_grid(envs, columns=4, gap=0)
    assert grid.shape == (4, 24, 3)
    small = grid[:, 6:12]
    assert (small[1:3, 2:4] == 20).all()
    assert small.astype(int).sum() == 20 * 12, "the small frame is not on black"
    assert (grid[:, 12:18] == 30).all()
    assert (grid[:, 18:] == 40).all()


@pytest.mark.parametrize(
    ("count", "shape", "expected"), [(1, (5, 5), (5, 5)), (4, (5, 5), (10, 10)), (6, (40, 60), (120, 120))]
)
def test_tile_makes_an_approximately_square_image(count: int, shape: tuple[int, int], expected: tuple[int, int]) -> None:
    assert tile([np.zeros((*shape, 3), np.uint8)] * count, gap=0).shape[:2] == expected


def test_tile_accepts_numpy_integers_as_columns_and_gap() -> None:
    images = [np.full((200, 200, 3), index, np.uint8) for index in range(5)]
    columns: Any = np.uint8(2)
    gap: Any = np.uint8(3)
    np.testing.assert_array_equal(tile(images, columns=columns, gap=gap), tile(images, columns=2, gap=3))


def test_render_grid_and_tile_reject_unusable_frames(make_envs: Any) -> None:
    without_frames = make_envs((4, 6, 3), render_mode=None)
    without_frames.reset()
    with pytest.raises(ValueError, match="render_mode='rgb_array', got None"):
        render_grid(without_frames)
    float_frames = make_envs((4, 6, 3), (4, 6, 3), dtype="float32")
    float_frames.reset()
    with pytest.raises(ValueError, match=r"env 0: a frame must be uint8 .* got float32 of shape \(4, 6, 3\)"):
        render_grid(float_frames)
    with pytest.raises(ValueError, match="columns must be at least 1, got 0"):
        tile([np.zeros((2, 2, 3), np.uint8)], columns=0)
    with pytest.raises(ValueError, match="no images"):
        tile([])


def test_render_grid_rejects_one_frame_of_all_environments(make_envs: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    envs = make_envs((4, 6, 3), (4, 6, 3))
    envs.reset()
    monkeypatch.setattr(type(envs), "render", lambda self: np.zeros((4, 6, 3), np.uint8))
    text = r"must render one frame for each of 2 environments, got an array of shape \(4, 6, 3\)"
    with pytest.raises(ValueError, match=text):
        render_grid(envs)
    monkeypatch.setattr(type(envs), "render", lambda self: [np.zeros((4, 6, 3), np.uint8)])
    with pytest.raises(ValueError, match="got 1 frames"):
        render_grid(envs)


@pytest.mark.parametrize("name", ["a.gif", "b.mp4"])
def test_video_contains_every_frame(name: str, tmp_path: Path) -> None:
    pytest.importorskip("moviepy" if name.endswith("mp4") else "PIL", reason="writes videos")
    images = [np.full((33, 41, 3), 60 * index, np.uint8) for index in range(4)]  # odd sizes, which H.264 does not support
    path = tmp_path / "new" / name
    assert write_video(iter(images), path, fps=10) == 4
    if name.endswith("gif"):
        from PIL import Image

        with Image.open(path) as video:
            assert (video.n_frames, video.size, video.info["duration"]) == (4, (41, 33), 100)
            for index in range(4):
                video.seek(index)
                assert abs(video.convert("RGB").getpixel((5, 5))[0] - 60 * index) < 8
    else:
        from moviepy.video.io.VideoFileClip import VideoFileClip

        with VideoFileClip(str(path)) as video:
            assert (video.n_frames, video.size, video.fps) == (4, [42, 34], 10)  # the last column and row are black
            colours = [int(frame[5, 5, 0]) for frame in video.iter_frames()]
        np.testing.assert_allclose(colours, [0, 60, 120, 180], atol=8)


def test_video_at_a_rate_of_few_bits_contains_every_frame(tmp_path: Path) -> None:
    clips = pytest.importorskip("moviepy.video.io.VideoFileClip", reason="writes videos")
    fps: Any = np.float16(30)
    write_video([np.zeros((8, 8, 3), np.uint8)] * 600, tmp_path / "a.mp4", fps=fps)
    with clips.VideoFileClip(str(tmp_path / "a.mp4")) as video:
        assert video.n_frames == 600


@pytest.mark.parametrize("name", ["a.gif", "b.mp4"])
def test_images_that_are_not_frames_of_one_size_are_refused(name: str, tmp_path: Path) -> None:
    pytest.importorskip("moviepy" if name.endswith("mp4") else "PIL", reason="writes videos")
    image = np.zeros((8, 6, 3), np.uint8)
    unusable = (image / 255, image[:4], image[..., 0], image[..., :1], (image, image), None)
    for images, index in ((image, 0), ([image[:0]], 0), *(([image, other], 1) for other in unusable)):
        with pytest.raises(ValueError, match=rf"images must be uint8 of shape .*, all of one size; images\[{index}\] is "):
            write_video(images, tmp_path / name)
    assert not (tmp_path / name).exists()


def test_frames_from_an_iterator_may_be_one_array_that_changes(tmp_path: Path) -> None:
    pytest.importorskip("PIL")
    from PIL import Image

    def render() -> Any:
        frame = np.zeros((4, 4, 3), np.uint8)
        for colour in (50, 100, 200):
            frame[:] = colour
            yield frame

    assert write_video(render(), tmp_path / "out.gif", fps=10) == 3
    with Image.open(tmp_path / "out.gif") as video:
        assert getattr(video, "n_frames", 1) == 3


def test_gif_keeps_a_colour_that_occurs_in_only_two_frames(tmp_path: Path) -> None:
    pillow = pytest.importorskip("PIL.Image")
    images = [np.zeros((32, 32, 3), np.uint8) for _ in range(101)]
    for index in (53, 54):
        images[index][10:20, 10:20] = 255, 0, 0
    images += [np.full((32, 32, 3), 2 * index + 1, np.uint8) for index in range(100)]
    path = tmp_path / "flash.gif"
    assert write_video(images, path, fps=10) == 201
    frames: list[Any] = []  # one for each tenth of a second
    with pillow.open(path) as video:
        for index in range(video.n_frames):
            video.seek(index)
            frames += [np.asarray(video.convert("RGB"))] * (video.info["duration"] // 100)
    np.testing.assert_array_equal(frames, images)


def test_invalid_video_arguments_and_missing_writers_raise(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=r"must end in .gif or .mp4, got 'a.avi'"):
        require_writer(tmp_path / "a.avi")
    with pytest.raises(ValueError, match="no images to write"):
        write_video([], tmp_path / "a.gif")
    with pytest.raises(ValueError, match="`fps` must be a positive number of frames per second, got 0"):
        write_video([np.zeros((8, 8, 3), np.uint8)], tmp_path / "a.gif", fps=0)
    with pytest.raises(ValueError, match=r"a GIF cannot show an image, .* for more than 655 seconds: write an MP4"):
        write_video([np.zeros((8, 8, 3), np.uint8)] * 700, tmp_path / "a.gif", fps=1)
    assert not (tmp_path / "a.gif").exists()
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ImportError, match=r"writing .gif needs Pillow, not installed here: pip install pillow"):
        require_writer(tmp_path / "a.gif")
