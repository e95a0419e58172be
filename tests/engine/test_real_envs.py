"""Real environments: the trajectories of SyncVectorEnv, and all of Gymnasium's vector wrappers on top.

One environment of each kind: a small Box, continuous actions, Discrete observations, a Tuple, MuJoCo with
ten numbers of info at every step, images, and nested dicts.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from envs import NestedDictEnv, assert_as_sync, opened
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv, VectorEnv
from gymnasium.wrappers import vector as wrappers

from vecenv.testing import assert_identical


def make(env_id: str, **kwargs: Any) -> gymnasium.Env:
    if env_id.startswith("ALE/"):
        import ale_py

        gymnasium.register_envs(ale_py)
    return gymnasium.make(env_id, **kwargs)


def real(env_id: str, **kwargs: Any) -> Callable[[], gymnasium.Env]:
    return functools.partial(make, env_id, **kwargs)


ENVS: dict[str, Callable[[], gymnasium.Env]] = {
    "CartPole-v1": real("CartPole-v1"),
    "Pendulum-v1": real("Pendulum-v1", max_episode_steps=9),
    "FrozenLake-v1": real("FrozenLake-v1"),
    "Blackjack-v1": real("Blackjack-v1"),
    "Ant-v5": real("Ant-v5", max_episode_steps=8),
    "ALE/Pong-v5": real("ALE/Pong-v5", max_episode_steps=9),
    "NestedDict": NestedDictEnv,
}
SLOW_TO_BUILD = {"Ant-v5", "ALE/Pong-v5"}


@pytest.mark.parametrize(
    ("name", "mode"),
    [
        pytest.param(name, mode, marks=pytest.mark.long if name in SLOW_TO_BUILD and mode.value != "SameStep" else ())
        for name in ENVS
        for mode in AutoresetMode
    ],
)
def test_trajectories_equal_those_of_sync_vector_env(name: str, mode: AutoresetMode) -> None:
    assert_as_sync([ENVS[name]] * 3, 15 if name in SLOW_TO_BUILD else 60, autoreset_mode=mode, num_workers=2)


@pytest.mark.parametrize(
    "options",
    [
        {"num_workers": 0},
        {"num_workers": None},
        {"shared_memory": False, "num_workers": 2},
        {"copy": False, "num_workers": 2},
    ],
    ids=["in-process", "process-per-env", "pickled", "no-copy"],
)
@pytest.mark.parametrize("name", ["CartPole-v1", "Blackjack-v1", "Ant-v5", "NestedDict"])
def test_they_do_in_every_configuration(name: str, options: dict[str, Any]) -> None:
    assert_as_sync([ENVS[name]] * 2, 15, autoreset_mode="SameStep", **options)


# -- wrappers ------------------------------------------------------------------------------------------------

Wrap = Callable[[VectorEnv], VectorEnv]
ALL = tuple(AutoresetMode)
NOT_SAME_STEP = (AutoresetMode.NEXT_STEP, AutoresetMode.DISABLED)


def _double(x: Any) -> Any:
    return x * 2


def _rescaled(single: bool) -> spaces.Box:
    return spaces.Box(-np.inf, np.inf, (4,) if single else (3, 4), np.float32)


# name -> environment, modes that the wrapper accepts, how to wrap
WRAPPERS: dict[str, tuple[str, tuple[AutoresetMode, ...], Wrap]] = {
    "RecordEpisodeStatistics": ("CartPole-v1", ALL, wrappers.RecordEpisodeStatistics),
    "DictInfoToList": ("Ant-v5", ALL, wrappers.DictInfoToList),
    "TransformObservation": (
        "CartPole-v1",
        NOT_SAME_STEP,
        lambda e: wrappers.TransformObservation(e, _double, _rescaled(False), _rescaled(True)),
    ),
    "VectorizeTransformObservation": (
        "CartPole-v1",
        NOT_SAME_STEP,
        lambda e: wrappers.VectorizeTransformObservation(
            e, gymnasium.wrappers.TransformObservation, func=_double, observation_space=_rescaled(True)
        ),
    ),
    "FilterObservation": ("NestedDict", NOT_SAME_STEP, lambda e: wrappers.FilterObservation(e, ["camera", "mode"])),
    "FlattenObservation": ("NestedDict", NOT_SAME_STEP, wrappers.FlattenObservation),
    "GrayscaleObservation": ("ALE/Pong-v5", NOT_SAME_STEP, wrappers.GrayscaleObservation),
    "ResizeObservation": ("ALE/Pong-v5", NOT_SAME_STEP, lambda e: wrappers.ResizeObservation(e, (84, 84))),
    "ReshapeObservation": ("CartPole-v1", NOT_SAME_STEP, lambda e: wrappers.ReshapeObservation(e, (2, 2))),
    "RescaleObservation": ("Pendulum-v1", NOT_SAME_STEP, lambda e: wrappers.RescaleObservation(e, 0.0, 1.0)),
    "DtypeObservation": ("CartPole-v1", NOT_SAME_STEP, lambda e: wrappers.DtypeObservation(e, np.float64)),
    "NormalizeObservation": ("CartPole-v1", (AutoresetMode.NEXT_STEP,), wrappers.NormalizeObservation),
    "TransformAction": ("Pendulum-v1", ALL, lambda e: wrappers.TransformAction(e, _double)),
    "VectorizeTransformAction": (
        "Pendulum-v1",
        ALL,
        lambda e: wrappers.VectorizeTransformAction(
            e, gymnasium.wrappers.TransformAction, func=_double, action_space=spaces.Box(-4, 4, (1,), np.float32)
        ),
    ),
    "ClipAction": ("Pendulum-v1", ALL, wrappers.ClipAction),
    "RescaleAction": ("Pendulum-v1", ALL, lambda e: wrappers.RescaleAction(e, -1.0, 1.0)),
    "TransformReward": ("CartPole-v1", ALL, lambda e: wrappers.TransformReward(e, _double)),
    "VectorizeTransformReward": (
        "CartPole-v1",
        ALL,
        lambda e: wrappers.VectorizeTransformReward(e, gymnasium.wrappers.TransformReward, func=_double),
    ),
    "ClipReward": ("Pendulum-v1", ALL, lambda e: wrappers.ClipReward(e, -2.0, 2.0)),
    "NormalizeReward": ("Pendulum-v1", ALL, wrappers.NormalizeReward),
    "several": (
        "CartPole-v1",
        (AutoresetMode.NEXT_STEP,),
        lambda e: wrappers.NormalizeReward(wrappers.NormalizeObservation(wrappers.RecordEpisodeStatistics(e))),
    ),
}


def without_times(infos: Any) -> Any:
    """RecordEpisodeStatistics measures how long an episode took; no two are the same in that."""
    if isinstance(infos, list):
        return [without_times(info) for info in infos]
    if "episode" in infos:
        infos["episode"].pop("t", None)
    return infos


class ConsiderateSync(SyncVectorEnv):
    """Leaves the caller's options as they are, as AsyncVectorEnv does, so that wrappers find the reset_mask afterwards."""

    def reset(self, *, seed: Any = None, options: dict[str, Any] | None = None) -> Any:
        return super().reset(seed=seed, options=None if options is None else dict(options))


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "mode"),
    [(name, mode) for name, (_, modes, _) in WRAPPERS.items() for mode in modes],
    ids=lambda value: getattr(value, "name", value),
)
def test_a_wrapper_sees_what_it_sees_on_sync_vector_env(name: str, mode: AutoresetMode) -> None:
    env, _, wrap = WRAPPERS[name]
    fns = [ENVS[env]] * 3
    oracle = wrap(ConsiderateSync(fns, autoreset_mode=mode))
    with opened(fns, autoreset_mode=mode, num_workers=2) as inner:
        envs = wrap(inner)
        assert envs.observation_space == oracle.observation_space
        assert envs.action_space == oracle.action_space
        oracle.action_space.seed(5)
        assert_identical(envs.reset(seed=3), oracle.reset(seed=3), "reset")
        for t in range(12 if env in SLOW_TO_BUILD else 30):
            actions = oracle.action_space.sample()
            mine, theirs = envs.step(actions), oracle.step(actions)
            assert_identical(mine[:4], theirs[:4], f"step {t}")
            assert_identical(without_times(mine[4]), without_times(theirs[4]), f"infos of step {t}")
            dones = theirs[2] | theirs[3]
            if mode is AutoresetMode.DISABLED and dones.any():
                both = [one.reset(options={"reset_mask": dones.copy()}) for one in (envs, oracle)]
                assert_identical(*both, f"reset after step {t}")
        envs.close()
        assert inner.closed
    oracle.close()


def test_every_vector_wrapper_of_gymnasium_is_in_the_list_above_or_named_here() -> None:
    elsewhere = {
        "RecordVideo",  # below
        "HumanRendering",  # opens a window
        *("ArrayConversion", "JaxToNumpy", "JaxToTorch", "NumpyToTorch"),  # for arrays of other libraries
    }
    assert set(wrappers.__all__) <= set(WRAPPERS) | elsewhere


@pytest.mark.long
@pytest.mark.parametrize("mode", [AutoresetMode.NEXT_STEP, AutoresetMode.DISABLED])
def test_record_video_writes_films_that_can_be_read(tmp_path: Path, mode: AutoresetMode) -> None:
    pytest.importorskip("moviepy")
    fns = [real("CartPole-v1", render_mode="rgb_array", max_episode_steps=6)] * 2
    with opened(fns, autoreset_mode=mode, num_workers=2) as inner:
        envs = wrappers.RecordVideo(inner, str(tmp_path), step_trigger=lambda step: step == 0, video_length=5)
        envs.reset(seed=1)
        for _ in range(8):
            _, _, terminations, truncations, _ = envs.step(np.array([0, 1]))
            dones = terminations | truncations
            if mode is AutoresetMode.DISABLED and dones.any():
                envs.reset(options={"reset_mask": dones})
        envs.close()
    films = list(tmp_path.glob("*.mp4"))
    assert len(films) == 1
    assert films[0].stat().st_size > 1000


@pytest.mark.parametrize("mode", [AutoresetMode.NEXT_STEP, AutoresetMode.SAME_STEP])
def test_episode_statistics_add_up_over_many_episodes(mode: AutoresetMode) -> None:
    with opened([real("CartPole-v1")] * 4, autoreset_mode=mode, num_workers=2) as inner:
        envs: Any = wrappers.RecordEpisodeStatistics(inner)
        envs.action_space.seed(1)
        envs.reset(seed=1)
        for _ in range(150):
            envs.step(envs.action_space.sample())
        assert envs.episode_count > 10
        # CartPole pays 1 for each step, so that the return of an episode is its length.
        assert list(envs.return_queue) == list(envs.length_queue)


@pytest.mark.long
def test_a_frame_stack_inside_the_workers_works() -> None:
    def build() -> gymnasium.Env:
        env = gymnasium.wrappers.GrayscaleObservation(make("ALE/Pong-v5", frameskip=4))
        return gymnasium.wrappers.FrameStackObservation(gymnasium.wrappers.ResizeObservation(env, (84, 84)), 4)

    assert_as_sync([build] * 2, 5)
