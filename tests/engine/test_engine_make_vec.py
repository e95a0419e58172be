"""Section 1.13: what ``gymnasium.make_vec`` and the vector wrappers expect of the class."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
import pytest
from envs import counters, opened, started
from gymnasium.vector import AutoresetMode

import vecenv


@pytest.fixture
def swapped_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gymnasium finds the class by this attribute whenever ``make_vec`` is called."""
    monkeypatch.setattr(gymnasium.vector, "AsyncVectorEnv", vecenv.AsyncVectorEnv)


@pytest.mark.usefixtures("swapped_in")
def test_make_vec_builds_it_by_keyword_and_assigns_the_spec(recwarn: pytest.WarningsRecorder) -> None:
    envs: Any = gymnasium.make_vec("CartPole-v1", num_envs=2, vectorization_mode="async")
    assert type(envs) is vecenv.AsyncVectorEnv
    assert envs.spec.id == "CartPole-v1"
    assert repr(envs).startswith("AsyncVectorEnv(CartPole-v1, num_envs=2")
    envs.reset(seed=1)
    envs.close()
    # From Python 3.12 on, every fork beside another thread warns, and pytest-timeout has a thread of its own.
    assert [text for warning in recwarn if "multi-threaded" not in (text := str(warning.message))] == []


@pytest.mark.usefixtures("swapped_in")
def test_make_vec_hands_its_vector_kwargs_on() -> None:
    envs: Any = gymnasium.make_vec(
        "CartPole-v1",
        num_envs=4,
        vectorization_mode="async",
        vector_kwargs={"num_workers": 2, "autoreset_mode": "SameStep", "shared_memory": False},
        wrappers=(gymnasium.wrappers.TimeAwareObservation,),
    )
    assert envs.metadata["autoreset_mode"] is AutoresetMode.SAME_STEP
    assert envs.single_observation_space.shape == (5,)
    assert len(envs.processes) == 2
    assert envs.reset(seed=1)[0].shape == (4, 5)
    envs.close()


@pytest.mark.usefixtures("swapped_in")
def test_an_environment_made_again_from_its_spec_is_the_same() -> None:
    envs: Any = gymnasium.make_vec("CartPole-v1", num_envs=2, vectorization_mode="async")
    again: Any = gymnasium.make_vec(envs.spec)
    np.testing.assert_array_equal(envs.reset(seed=1)[0], again.reset(seed=1)[0])
    envs.close()
    again.close()


def test_call_and_get_attr_are_reached_through_unwrapped() -> None:
    with opened(counters(2), num_workers=0) as envs:
        wrapped: Any = gymnasium.wrappers.vector.RecordEpisodeStatistics(envs)
        assert wrapped.unwrapped.call("env_id") == (0, 1)
        assert wrapped.np_random_seed == envs.np_random_seed


def test_observation_wrappers_refuse_same_step_mode_as_they_do_for_gymnasiums_class() -> None:
    theirs: Any = gymnasium.vector.SyncVectorEnv(counters(2), autoreset_mode="SameStep")
    with pytest.raises((AssertionError, ValueError)) as refused:
        gymnasium.wrappers.vector.FlattenObservation(theirs)
    theirs.close()
    with opened(counters(2), num_workers=0, autoreset_mode="SameStep") as envs, pytest.raises(refused.type):
        gymnasium.wrappers.vector.FlattenObservation(envs)
    with (
        opened(counters(2), num_workers=0, autoreset_mode="Disabled") as envs,
        pytest.raises((AssertionError, ValueError)),
    ):
        gymnasium.wrappers.vector.NormalizeObservation(envs)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_final_observation_may_be_overwritten_in_place_by_a_wrapper(num_workers: int) -> None:
    with started(counters(2, lengths=(1,)), num_workers=num_workers, autoreset_mode="SameStep") as envs:
        for _ in range(2):
            final = envs.step([0, 0])[4]["final_obs"]
            assert [one[:2].tolist() for one in final] == [[0, 1], [1, 1]]
            final[0][:] = -7
            final[1] = "anything"
