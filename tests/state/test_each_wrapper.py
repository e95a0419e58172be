"""Each of Gymnasium's own wrappers, one by one, is saved exactly. A wrapper without a row here is a failure."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import wrappers
from gymnasium.spaces import Box, Dict, Discrete

from vecenv.state.capture import capture_state, prepare_restore
from vecenv.testing import assert_identical, assert_restorable

Env = Any  # gymnasium.Env[Any, Any], which each wrapper has type parameters of its own for


class Pictures(gymnasium.Env[Any, Any]):
    """An image that its actions and its generator change; an episode ends at random."""

    metadata = {"render_modes": ["rgb_array"], "render_fps": 0}  # noqa: RUF012 - as Gymnasium has it; 0: no waiting
    observation_space = Box(0, 255, (12, 10, 3), np.uint8)
    render_mode = "rgb_array"

    def __init__(self, action_space: Any = None) -> None:
        self.action_space = action_space or Discrete(3)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.picture = self.np_random.integers(0, 256, (12, 10, 3), np.uint8)
        return self.picture.copy(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        change = int(np.sum(np.asarray(action, float) * 7))
        self.picture = self.picture + np.uint8(change % 256) + self.np_random.integers(0, 3, (12, 10, 3), np.uint8)
        return self.picture.copy(), float(self.picture.mean()), bool(self.np_random.random() < 0.03), False, {}

    def render(self) -> Any:
        return self.picture.copy()


class Shows(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Puts what an environment shows beside its steps into their infos, where the proof looks."""

    def __init__(self, env: Env, look: Callable[[Any], Any] = lambda env: env.render()) -> None:
        super().__init__(env)
        self.look = look

    def reset(self, **options: Any) -> Any:
        seen, info = self.env.reset(**options)
        return seen, {**info, "shown": np.array(self.look(self.env))}

    def step(self, action: Any) -> Any:
        *step, info = self.env.step(action)
        return (*step, {**info, "shown": np.array(self.look(self.env))})


def continuous() -> Env:
    return Pictures(Box(-1, 1, (2,), np.float32))


def numbers() -> Env:
    """A bounded vector."""
    return gymnasium.make("Pendulum-v1", max_episode_steps=40)


def cards() -> Env:
    """A tuple of numbers, and episodes of a few steps."""
    return gymnasium.make("Blackjack-v1")


def named() -> Env:
    """Observations by name."""
    space = Dict({"one": Box(-1, 1, (3,)), "other": Box(-9, 9, (3,))})
    return wrappers.TransformObservation(numbers(), lambda seen: {"one": seen, "other": seen * 2}, space)


def jax_env() -> Env:
    return gymnasium.make("phys2d/CartPole-v1", max_episode_steps=40)


def converted() -> Env:
    import jax.numpy as jnp

    return wrappers.ArrayConversion(numbers(), env_xp=np, target_xp=jnp)


def atari() -> Env:
    import ale_py

    gymnasium.register_envs(ale_py)
    return wrappers.AtariPreprocessing(gymnasium.make("ALE/Pong-v5", frameskip=1, max_episode_steps=60))


def recording() -> Env:
    video = wrappers.RecordVideo(Pictures(), "videos", step_trigger=lambda step: step == 3, video_length=10**6, fps=30)
    return Shows(video, lambda env: (env.step_id, env.episode_id, *(int(frame.sum()) for frame in env.recorded_frames)))


TABLE: dict[str, Callable[[], Env]] = {
    "AddRenderObservation": lambda: wrappers.AddRenderObservation(Pictures(), render_only=False),
    "AddWhiteNoise": lambda: Shows(wrappers.AddWhiteNoise(Pictures(), 0.3)),
    "ArrayConversion": converted,
    "AtariPreprocessing": atari,
    "Autoreset": lambda: wrappers.Autoreset(wrappers.TimeLimit(Pictures(), 9)),
    "ClipAction": lambda: wrappers.ClipAction(numbers()),
    "ClipReward": lambda: wrappers.ClipReward(numbers(), -1, 0),
    "DelayObservation": lambda: wrappers.DelayObservation(numbers(), 3),
    "DiscretizeAction": lambda: wrappers.DiscretizeAction(numbers(), 5),
    "DiscretizeObservation": lambda: wrappers.DiscretizeObservation(numbers(), 50, multidiscrete=True),
    "DtypeObservation": lambda: wrappers.DtypeObservation(numbers(), np.float64),
    "FilterObservation": lambda: wrappers.FilterObservation(named(), ["other"]),
    "FlattenObservation": lambda: wrappers.FlattenObservation(named()),
    "FrameStackObservation": lambda: wrappers.FrameStackObservation(Pictures(), 4, padding_type="zero"),
    "GrayscaleObservation": lambda: wrappers.GrayscaleObservation(Pictures()),
    "HumanRendering": lambda: wrappers.HumanRendering(Pictures()),
    "JaxToNumpy": lambda: wrappers.JaxToNumpy(jax_env()),
    "JaxToTorch": lambda: wrappers.JaxToTorch(jax_env()),
    "MaxAndSkipObservation": lambda: wrappers.MaxAndSkipObservation(Pictures(), 3),
    "NormalizeObservation": lambda: wrappers.NormalizeObservation(numbers()),
    "NormalizeReward": lambda: wrappers.NormalizeReward(numbers()),
    "NumpyToTorch": lambda: wrappers.NumpyToTorch(numbers()),
    "ObstructView": lambda: Shows(wrappers.ObstructView(Pictures(), 0.3, 2)),
    "OrderEnforcing": lambda: wrappers.OrderEnforcing(Pictures()),
    "PassiveEnvChecker": lambda: wrappers.PassiveEnvChecker(Pictures()),
    "RecordEpisodeStatistics": lambda: wrappers.RecordEpisodeStatistics(cards(), buffer_length=5),
    "RecordVideo": recording,
    "RenderCollection": lambda: Shows(wrappers.RenderCollection(Pictures(), pop_frames=False)),
    "RepeatAction": lambda: wrappers.RepeatAction(Pictures(), 3),
    "RescaleAction": lambda: wrappers.RescaleAction(numbers(), np.float32(-3), np.float32(5)),
    "RescaleObservation": lambda: wrappers.RescaleObservation(numbers(), np.float32(0), np.float32(1)),
    "ReshapeObservation": lambda: wrappers.ReshapeObservation(Pictures(), (360,)),
    "ResizeObservation": lambda: wrappers.ResizeObservation(Pictures(), (5, 7)),
    "StickyAction": lambda: wrappers.StickyAction(continuous(), 0.4, (1, 3)),
    "TimeAwareObservation": lambda: wrappers.TimeAwareObservation(numbers(), normalize_time=True),
    "TimeLimit": lambda: wrappers.TimeLimit(Pictures(), 17),
    "TransformAction": lambda: wrappers.TransformAction(
        continuous(), lambda action: action * 0.5, continuous().action_space
    ),
    "TransformObservation": lambda: wrappers.TransformObservation(numbers(), lambda seen: seen / 2, None),
    "TransformReward": lambda: wrappers.TransformReward(numbers(), lambda reward: reward * 3),
}
NEEDS = {
    "ArrayConversion": ("jax", "array_api_compat"),
    "AtariPreprocessing": ("ale_py", "cv2"),
    "HumanRendering": ("pygame",),
    "JaxToNumpy": ("jax", "array_api_compat"),
    "JaxToTorch": ("jax", "torch", "array_api_compat"),
    "NumpyToTorch": ("torch", "array_api_compat"),
    "RecordVideo": ("moviepy",),
    "ResizeObservation": ("cv2",),
}
TAKES_SECONDS = {"ArrayConversion", "AtariPreprocessing", "HumanRendering", "JaxToNumpy", "JaxToTorch", "NumpyToTorch"}
ALONE = """
import sys
sys.path.insert(0, {folder!r})
from test_each_wrapper import TABLE
from vecenv.testing import assert_restorable
assert_restorable(TABLE[{name!r}])
"""


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.long] if name in TAKES_SECONDS else [])
        for name in wrappers.__all__
        if name != "vector"  # a module
    ],
)
def test_each_wrapper_of_gymnasium_is_saved_exactly(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for package in NEEDS.get(name, ()):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{name} needs {package}")
    monkeypatch.setenv("SDL_VIDEODRIVER", "dummy")
    monkeypatch.chdir(tmp_path)
    if {"jax", "torch", "pygame"} & set(NEEDS.get(name, ())):  # they start threads, which stay
        program = ALONE.format(folder=str(Path(__file__).parent), name=name)
        subprocess.run([sys.executable, "-c", program], check=True, timeout=300)
    else:
        assert_restorable(TABLE[name])


def test_an_episode_that_is_over_and_begins_by_itself_does_so_after_a_load() -> None:
    """The proof resets what has ended, so it never meets the flag of Autoreset."""
    one, other = TABLE["Autoreset"](), TABLE["Autoreset"]()
    one.reset(seed=3)
    other.reset(seed=4)
    while not any(one.step(1)[2:4]):
        pass
    state = capture_state(one)
    wanted = [one.step(1) for _ in range(3)]
    prepare_restore(other, state)()
    assert_identical([other.step(1) for _ in range(3)], wanted)
    for env in (one, other):
        env.close()
