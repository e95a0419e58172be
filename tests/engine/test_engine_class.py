"""Section 1.1: what the class is, and what every wrapper of Gymnasium takes for granted about it."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
import pytest
from envs import CounterEnv, Options, counters, opened
from gymnasium.vector import AutoresetMode, VectorEnv

import vecenv


def test_the_class_is_a_gymnasium_vector_env() -> None:
    assert issubclass(vecenv.AsyncVectorEnv, VectorEnv)
    assert issubclass(vecenv.AsyncVectorEnv, gymnasium.vector.AsyncVectorEnv)
    assert vecenv.AsyncVectorEnv.__name__ == "AsyncVectorEnv"


def test_every_method_is_its_own() -> None:
    """What is left of Gymnasium's class is what nobody calls from outside: how it waits for its own pipes."""
    theirs = gymnasium.vector.AsyncVectorEnv
    inherited = {name for name in vars(theirs) if getattr(vecenv.AsyncVectorEnv, name) is getattr(theirs, name)}
    assert {name for name in inherited if not name.startswith("__")} == {
        "_poll_pipe_envs", "_assert_is_running", "_raise_if_errors",
    }  # fmt: skip


def test_a_subclass_of_gymnasiums_that_calls_super_works_over_it() -> None:
    """As programs write it that were made for Gymnasium's class and import ours under its name."""

    class Lenient(vecenv.AsyncVectorEnv):
        def step_wait(self, timeout: float | None = None) -> Any:
            observations, rewards, *rest = super().step_wait(timeout)
            return (observations, rewards * 2, *rest)

        def close_extras(self, timeout: float | None = None, terminate: bool = False) -> None:
            self.was_closed = True
            super().close_extras(timeout=timeout, terminate=terminate)

    envs: Any = Lenient(counters(2))
    try:
        envs.reset(seed=1)
        assert isinstance(envs, gymnasium.vector.AsyncVectorEnv)
        assert envs.step([0, 0])[1].tolist() == [0.002, 2.002]
    finally:
        envs.close()
    assert envs.was_closed


def test_the_class_takes_type_arguments() -> None:
    assert vecenv.AsyncVectorEnv[np.ndarray, np.ndarray] is not None


def test_a_generic_subclass_can_be_written_and_run() -> None:
    class Mine(vecenv.AsyncVectorEnv[np.ndarray, np.ndarray]):
        pass

    envs: Any = Mine(counters(2), num_workers=0)
    assert envs.reset(seed=1)[0].shape == (2, 4)
    assert "Mine" in repr(envs)
    envs.close()


def test_attributes_of_the_base_class_have_their_defaults() -> None:
    with opened(counters(2), num_workers=0) as envs:
        assert envs.spec is None
        assert envs.render_mode is None
        assert envs.closed is False
        assert envs.num_envs == 2
        assert envs.unwrapped is envs
        assert envs._np_random is None
        assert envs._np_random_seed is None
        assert callable(envs._add_info)


def test_the_spaces_are_the_environments_and_their_batches(every_engine: Options) -> None:
    single = CounterEnv()
    with opened(counters(3), **every_engine) as envs:
        assert envs.single_observation_space == single.observation_space
        assert envs.single_action_space == single.action_space
        assert envs.observation_space == gymnasium.vector.utils.batch_space(single.observation_space, 3)
        assert envs.action_space == gymnasium.vector.utils.batch_space(single.action_space, 3)


def test_a_seeded_action_space_samples_what_sync_vector_env_samples() -> None:
    oracle = gymnasium.vector.SyncVectorEnv(counters(3))
    with opened(counters(3), num_workers=0) as envs:
        envs.action_space.seed(5)
        oracle.action_space.seed(5)
        for _ in range(5):
            np.testing.assert_array_equal(envs.action_space.sample(), oracle.action_space.sample())
    oracle.close()


def test_metadata_is_a_copy_with_the_autoreset_mode() -> None:
    CounterEnv.metadata.pop("autoreset_mode", None)  # Gymnasium's own classes wrote it there before 1.4
    with opened(counters(2), num_workers=0, autoreset_mode="SameStep") as envs:
        assert envs.metadata["autoreset_mode"] is AutoresetMode.SAME_STEP
        assert envs.metadata["render_modes"] == ["rgb_array"]
        assert envs.metadata["render_fps"] == 30
    assert "autoreset_mode" not in CounterEnv.metadata


def test_the_repr_names_class_environments_and_spec() -> None:
    with opened(counters(2), num_workers=0) as envs:
        assert repr(envs).startswith("AsyncVectorEnv(")
        assert "num_envs=2" in repr(envs)
        envs.spec = gymnasium.spec("CartPole-v1")
        assert repr(envs).startswith("AsyncVectorEnv(CartPole-v1, num_envs=2")


def test_every_attribute_of_the_constructor_is_kept_as_given(every_engine: Options) -> None:
    env_fns = counters(3)
    with opened(env_fns, shared_memory=False, copy=False, daemon=False, max_concurrency=2, **every_engine) as envs:
        assert envs.env_fns is env_fns
        assert envs.shared_memory is False
        assert envs.copy is False
        assert envs.context is None
        assert envs.daemon is False
        assert envs.worker is None
        assert envs.observation_mode == "same"
        assert envs.autoreset_mode is AutoresetMode.NEXT_STEP
        assert envs.max_concurrency == 2


@pytest.mark.parametrize("name", ["observations", "processes", "parent_pipes", "error_queue", "_state"])
def test_the_attributes_that_programs_look_at_are_there(name: str) -> None:
    with opened(counters(2)) as envs:
        assert hasattr(envs, name)


def test_there_is_one_named_process_for_each_environment_unless_asked_otherwise() -> None:
    with opened(counters(3)) as envs:
        assert len(envs.processes) == 3
        assert len(set(envs.call("pid"))) == 3
        names = [process.name for process in envs.processes]
        assert all("AsyncVectorEnv" in name for name in names)
        assert [name.rsplit("-", 1)[1] for name in names] == ["0", "1", "2"]
