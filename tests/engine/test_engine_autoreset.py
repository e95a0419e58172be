"""Section 1.6: what happens when an episode ends, in each of the three modes."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
import pytest
from envs import ALL_SPACES, VALUE_ENGINES, ReturningEnv, ReusingEnv, ScriptedEnv, counters, opened
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from sampling import each_once

from vecenv.testing import assert_identical

engines = pytest.mark.parametrize("engine", VALUE_ENGINES.values(), ids=list(VALUE_ENGINES))
memories = pytest.mark.parametrize("shared_memory", [True, False], ids=["shared", "pickled"])
ZEROS = np.zeros(4, dtype=np.float32)


@engines
@memories
@pytest.mark.parametrize("truncates", [False, True])
def test_next_step_mode_resets_in_the_step_after_the_last(
    engine: dict[str, Any], shared_memory: bool, truncates: bool
) -> None:
    with opened(counters(2, lengths=(2,), truncates=truncates), shared_memory=shared_memory, **engine) as envs:
        envs.reset(seed=1)
        envs.step([0, 0])
        observations, rewards, terminations, truncations, infos = envs.step([0, 0])
        assert observations[:, 1:3].tolist() == [[2, 1], [2, 1]]
        assert rewards.tolist() == [0.002, 1.002]
        assert (truncations if truncates else terminations).all()
        assert not (terminations if truncates else truncations).any()
        assert set(infos) == {"steps", "_steps"}
        observations, rewards, terminations, truncations, infos = envs.step([3, 3])
        assert observations[:, 1:3].tolist() == [[0, 2], [0, 2]]
        assert rewards.tolist() == [0.0, 0.0]
        assert not terminations.any()
        assert not truncations.any()
        assert set(infos) == {"reset_kwargs", "_reset_kwargs"}
        assert envs.step([0, 0])[0][:, 1:3].tolist() == [[1, 2], [1, 2]]


@engines
@memories
def test_next_step_mode_resets_each_environment_on_its_own(engine: dict[str, Any], shared_memory: bool) -> None:
    fns = [counters(3, lengths=(length,))[index] for index, length in enumerate((1, 2, 3))]
    with opened(fns, shared_memory=shared_memory, **engine) as envs:
        envs.reset(seed=1)
        seen = [envs.step([0, 0, 0])[0][:, 1].tolist() for _ in range(6)]
        assert seen == [[1, 1, 1], [0, 2, 2], [1, 0, 3], [0, 1, 0], [1, 2, 1], [0, 0, 2]]


@engines
@memories
def test_same_step_mode_returns_the_new_episode_and_reports_the_old(engine: dict[str, Any], shared_memory: bool) -> None:
    fns = [counters(3, lengths=(length,))[index] for index, length in enumerate((2, 3, 2))]
    with opened(fns, autoreset_mode="SameStep", shared_memory=shared_memory, **engine) as envs:
        envs.reset(seed=1)
        infos = envs.step([0, 0, 0])[4]
        assert set(infos) == {"steps", "_steps"}
        observations, rewards, terminations, truncations, infos = envs.step([0, 0, 0])
        assert observations[:, 1:3].tolist() == [[0, 2], [2, 1], [0, 2]]
        assert rewards.tolist() == [0.002, 1.002, 2.002]
        assert terminations.tolist() == [True, False, True]
        assert not truncations.any()
        assert infos["final_obs"].dtype == object
        assert infos["final_obs"].shape == (3,)
        assert infos["final_obs"][0].tolist() == [0, 2, 1, 1]
        assert infos["final_obs"][0].dtype == np.int64
        assert infos["final_obs"][1] is None
        assert infos["final_obs"][2].tolist() == [2, 2, 1, 3]
        assert infos["_final_obs"].tolist() == [True, False, True]
        assert infos["final_info"]["steps"].tolist() == [2, 0, 2]
        assert infos["final_info"]["_steps"].tolist() == [True, False, True]
        assert infos["_final_info"].tolist() == [True, False, True]
        # The keys of the last step are at the top for the environment that goes on, and only for it.
        assert infos["steps"].tolist() == [0, 2, 0]
        assert infos["_steps"].tolist() == [False, True, False]
        assert infos["_reset_kwargs"].tolist() == [True, False, True]


@engines
def test_same_step_mode_reports_an_empty_final_info_too(engine: dict[str, Any]) -> None:
    with opened(counters(2, lengths=(1,), infos=False), autoreset_mode="SameStep", **engine) as envs:
        envs.reset(seed=1)
        infos = envs.step([0, 0])[4]
        assert set(infos) == {"final_info", "_final_info", "final_obs", "_final_obs"}
        assert infos["final_info"] == {}
        assert infos["_final_info"].tolist() == [True, True]


@engines
def test_a_reset_info_may_override_what_is_reported_as_final(engine: dict[str, Any]) -> None:
    def build() -> ReturningEnv:
        return ReturningEnv([(ZEROS, {"final_info": {"mine": 1}})], [(ZEROS + 1, 1.0, True, False, {"theirs": 2})])

    with opened([build] * 2, autoreset_mode="SameStep", **engine) as envs:
        envs.reset(seed=1)
        infos = envs.step([0, 0])[4]
        assert infos["final_info"]["mine"].tolist() == [1, 1]
        assert "theirs" not in infos["final_info"]


@pytest.mark.parametrize(("shared_memory", "name"), each_once({"shared": True, "pickled": False}, list(ALL_SPACES)))
def test_final_observations_are_the_environments_own_in_every_space(shared_memory: bool, name: str) -> None:
    fns = [lambda i=i: ScriptedEnv(ALL_SPACES[name], env_id=i, lengths=(1 + i, 2), step_infos=({"a": i},)) for i in range(3)]
    oracle = SyncVectorEnv(fns, autoreset_mode="SameStep")
    with opened(fns, autoreset_mode="SameStep", shared_memory=shared_memory, num_workers=2) as envs:
        assert_identical(envs.reset(seed=1), oracle.reset(seed=1), "reset")
        for t in range(5):
            mine, theirs = envs.step([0, 1, 0]), oracle.step([0, 1, 0])
            assert_identical(mine, theirs, f"step {t}")
            for final in mine[4].get("final_obs", ()):
                assert final is None or final in envs.single_observation_space
    oracle.close()


@engines
def test_final_observations_stay_as_they_were_when_later_episodes_end(engine: dict[str, Any]) -> None:
    with opened(counters(2, lengths=(1,)), autoreset_mode="SameStep", **engine) as envs:
        envs.reset(seed=1)
        first = envs.step([0, 0])[4]["final_obs"]
        kept = [array.copy() for array in first]
        for _ in range(3):
            envs.step([0, 0])
        np.testing.assert_array_equal(np.stack(first), np.stack(kept))
        first[0][:] = 0  # a wrapper may overwrite it


@engines
@memories
def test_an_environment_that_reuses_its_arrays_still_gives_the_right_final_observation(
    engine: dict[str, Any], shared_memory: bool
) -> None:
    with opened([ReusingEnv] * 2, autoreset_mode="SameStep", shared_memory=shared_memory, **engine) as envs:
        envs.reset(seed=1)
        envs.step([0, 0])
        observations, _, _, _, infos = envs.step([0, 0])
        assert observations[:, 1:3].tolist() == [[0, 2], [0, 2]]
        assert [final[1:3].tolist() for final in infos["final_obs"]] == [[2, 1], [2, 1]]
        assert infos["final_info"]["steps"].tolist() == [2, 2]


@engines
@memories
def test_disabled_mode_never_resets_and_passes_steps_after_the_end_through(
    engine: dict[str, Any], shared_memory: bool
) -> None:
    options = {"autoreset_mode": "Disabled", "shared_memory": shared_memory, **engine}
    with opened(counters(2, lengths=(2,)), **options) as envs:
        envs.reset(seed=1)
        for t in range(1, 5):
            observations, _, terminations, _, infos = envs.step([0, 0])
            assert observations[:, 1:3].tolist() == [[t, 1], [t, 1]]
            assert terminations.tolist() == [t >= 2] * 2
            assert set(infos) == {"steps", "_steps"}


@engines
@pytest.mark.parametrize("mode", AutoresetMode)
def test_a_reset_at_the_end_of_an_episode_starts_the_next_in_every_mode(engine: dict[str, Any], mode: AutoresetMode) -> None:
    with opened(counters(2, lengths=(2,)), autoreset_mode=mode, **engine) as envs:
        envs.reset(seed=1)
        for _ in range(3):
            envs.step([0, 0])
            assert envs.step([0, 0])[2].all()
            episode = envs.reset()[0][:, 2].tolist()
            assert envs.step([0, 0])[0][:, 1].tolist() == [1, 1]
            envs.reset()
            assert episode[0] > 1


@engines
@pytest.mark.parametrize("mode", AutoresetMode)
def test_an_environment_whose_reset_says_nothing_and_whose_episodes_last_one_step(
    engine: dict[str, Any], mode: AutoresetMode
) -> None:
    fns = counters(3, lengths=(1,), infos=False)
    oracle = SyncVectorEnv(fns, autoreset_mode=mode)
    with opened(fns, autoreset_mode=mode, **engine) as envs:
        assert_identical(envs.reset(seed=1), oracle.reset(seed=1))
        for t in range(4):
            if mode is AutoresetMode.DISABLED and t:
                mask = np.ones(3, dtype=np.bool_)
                both = [one.reset(options={"reset_mask": mask.copy()}) for one in (envs, oracle)]
                assert_identical(*both)
            assert_identical(envs.step([0, 0, 0]), oracle.step([0, 0, 0]), f"step {t}")
    oracle.close()


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


@pytest.mark.parametrize("engine", VALUE_ENGINES.values(), ids=list(VALUE_ENGINES))
def test_the_final_info_is_that_of_the_end_also_where_the_reset_writes_into_it(engine: dict[str, Any]) -> None:
    with opened([Reuses] * 2, autoreset_mode=AutoresetMode.SAME_STEP, **engine) as envs:
        envs.reset(seed=1)
        infos = envs.step([1, 0])[4]
        assert infos["final_info"]["array"][0].tolist() == [3.0, 3.0]
        assert infos["final_info"]["inner"]["list"][0] == [3]
        assert infos["array"].tolist() == [[7.0, 7.0], [3.0, 3.0]]
