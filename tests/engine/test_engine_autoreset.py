"""Section 1.6: what happens when an episode ends, in each of the three modes."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
import pytest
from envs import Options, ReturningEnv, ReusingEnv, assert_as_sync, counters, started
from gymnasium import spaces
from gymnasium.vector import AutoresetMode

ZEROS = np.zeros(4, dtype=np.float32)


EPISODES: dict[str, Options] = {
    "of one step": {"lengths": (1,)},
    "of one step, without infos": {"lengths": (1,), "infos": False},
    "of different lengths": {"lengths": (1, 3, 2)},
    "that are truncated": {"lengths": (2, 3), "truncates": True},
}


@pytest.mark.parametrize("mode", AutoresetMode)
@pytest.mark.parametrize("kind", EPISODES)
def test_episodes_end_and_begin_as_in_sync_vector_env(
    engine: Options, shared_memory: bool, kind: str, mode: AutoresetMode
) -> None:
    """Each environment by itself: they begin in different episodes."""
    lengths = EPISODES[kind]["lengths"]
    fns = [counters(3, **{**EPISODES[kind], "lengths": lengths[row % len(lengths) :] + lengths})[row] for row in range(3)]
    assert_as_sync(fns, 12, autoreset_mode=mode, shared_memory=shared_memory, **engine)


def test_a_reset_info_may_override_what_is_reported_as_final(engine: Options) -> None:
    def build() -> ReturningEnv:
        return ReturningEnv([(ZEROS, {"final_info": {"mine": 1}})], [(ZEROS + 1, 1.0, True, False, {"theirs": 2})])

    with started([build] * 2, autoreset_mode="SameStep", **engine) as envs:
        infos = envs.step([0, 0])[4]
        assert infos["final_info"]["mine"].tolist() == [1, 1]
        assert "theirs" not in infos["final_info"]


def test_final_observations_stay_as_they_were_when_later_episodes_end(engine: Options) -> None:
    with started(counters(2, lengths=(1,)), autoreset_mode="SameStep", **engine) as envs:
        first = envs.step([0, 0])[4]["final_obs"]
        kept = [array.copy() for array in first]
        for _ in range(3):
            envs.step([0, 0])
        np.testing.assert_array_equal(np.stack(first), np.stack(kept))
        first[0][:] = 0  # a wrapper may overwrite it


def test_an_environment_that_reuses_its_arrays_still_gives_the_right_final_observation(
    engine: Options, shared_memory: bool
) -> None:
    with started([ReusingEnv] * 2, autoreset_mode="SameStep", shared_memory=shared_memory, **engine) as envs:
        envs.step([0, 0])
        observations, _, _, _, infos = envs.step([0, 0])
        assert observations[:, 1:3].tolist() == [[0, 2], [0, 2]]
        assert [final[1:3].tolist() for final in infos["final_obs"]] == [[2, 1], [2, 1]]
        assert infos["final_info"]["steps"].tolist() == [2, 2]


def test_disabled_mode_never_resets_and_passes_steps_after_the_end_through(engine: Options, shared_memory: bool) -> None:
    options = {"autoreset_mode": "Disabled", "shared_memory": shared_memory, **engine}
    with started(counters(2, lengths=(2,)), **options) as envs:
        for t in range(1, 5):
            observations, _, terminations, _, infos = envs.step([0, 0])
            assert observations[:, 1:3].tolist() == [[t, 1], [t, 1]]
            assert terminations.tolist() == [t >= 2] * 2
            assert set(infos) == {"steps", "_steps"}


class Reuses(gymnasium.Env[Any, Any]):
    """Hands out the same objects in every info, and its reset writes into them."""

    observation_space = action_space = spaces.Discrete(3)

    def __init__(self) -> None:
        self.array, self.inner = np.zeros(2), {"list": [0]}

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[int, dict[str, Any]]:
        self.array[:], self.inner["list"][0] = 7.0, 7
        return 0, {"array": self.array, "inner": self.inner}

    def step(self, action: Any) -> tuple[int, float, bool, bool, dict[str, Any]]:
        self.array[:], self.inner["list"][0] = 3.0, 3
        return 1, 0.0, bool(action), False, {"array": self.array, "inner": self.inner}


def test_the_final_info_is_that_of_the_end_also_where_the_reset_writes_into_it(engine: Options) -> None:
    with started([Reuses] * 2, autoreset_mode=AutoresetMode.SAME_STEP, **engine) as envs:
        infos = envs.step([1, 0])[4]
        assert infos["final_info"]["array"][0].tolist() == [3.0, 3.0]
        assert infos["final_info"]["inner"]["list"][0] == [3]
        assert infos["array"].tolist() == [[7.0, 7.0], [3.0, 3.0]]
