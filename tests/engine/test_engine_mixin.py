"""The mixin that users inherit, over several configurations of the engine, and over vector environments
with a fault.

A contract that a broken vector environment passes is worth nothing. So each test of the second half breaks
one promise and names the test of the mixin that must notice.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, ClassVar

import gymnasium
import numpy as np
import pytest
from envs import NestedDictEnv, counters, scripted
from gymnasium.vector import AutoresetMode, SyncVectorEnv, VectorEnv

import vecenv
from vecenv.testing import VectorEnvContract, assert_same_trajectory


class _Contract(VectorEnvContract):
    options: ClassVar[dict[str, Any]] = {}

    def make(self, num_envs: int = 3, autoreset_mode: AutoresetMode = AutoresetMode.NEXT_STEP, **kwargs: Any) -> VectorEnv:
        options = {"autoreset_mode": autoreset_mode, **self.options, **kwargs}
        return vecenv.AsyncVectorEnv(scripted(num_envs), **options)


@pytest.mark.long
class TestProcessPerEnv(_Contract):
    pass


class TestInProcess(_Contract):
    options: ClassVar[dict[str, Any]] = {"num_workers": 0}


@pytest.mark.long
class TestWithoutSharedMemory(_Contract):
    options: ClassVar[dict[str, Any]] = {"num_workers": 2, "shared_memory": False}


@pytest.mark.long
class TestNestedObservationsAndActionsInTwoWorkers(VectorEnvContract):
    def make(self, num_envs: int = 3, autoreset_mode: AutoresetMode = AutoresetMode.NEXT_STEP, **kwargs: Any) -> VectorEnv:
        fns = [functools.partial(NestedDictEnv, index) for index in range(num_envs)]
        return vecenv.AsyncVectorEnv(fns, autoreset_mode=autoreset_mode, num_workers=2, **kwargs)


# -- the contract notices ------------------------------------------------------------------------------------


class Broken(gymnasium.vector.VectorWrapper):
    """A vector environment with a fault: ``change`` changes what ``step`` returns."""

    def __init__(self, envs: Any, change: Callable[[Any, list[Any]], None]) -> None:
        super().__init__(envs)
        self.change = change

    def step(self, actions: Any) -> Any:
        result = list(self.env.step(actions))
        self.change(self, result)
        return tuple(result)


class IgnoresSeeds(gymnasium.vector.VectorWrapper):
    count = 0

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        IgnoresSeeds.count += 100
        return self.env.reset(seed=IgnoresSeeds.count, options=options)


class IgnoresMasks(gymnasium.vector.VectorWrapper):
    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        return self.env.reset(seed=seed)


class StepsFirst(gymnasium.vector.VectorWrapper):
    """Takes actions before they are counted."""

    def step(self, actions: Any) -> Any:
        result = self.env.step(np.resize(actions, (self.num_envs, 2)))
        if len(actions) != self.num_envs:
            raise ValueError("too late")
        return result


def _float32_rewards(self: Any, result: list[Any]) -> None:
    result[1] = result[1].astype(np.float32)


def _integer_flags(self: Any, result: list[Any]) -> None:
    result[2] = result[2].astype(np.int64)


def _same_reward_array(self: Any, result: list[Any]) -> None:
    self.kept = getattr(self, "kept", result[1])
    self.kept[:] = result[1]
    result[1] = self.kept


def _same_observation_array(self: Any, result: list[Any]) -> None:
    self.kept = getattr(self, "kept", result[0])
    self.kept["x"][:] = result[0]["x"]
    result[0] = self.kept


def _two_dimensional_rewards(self: Any, result: list[Any]) -> None:
    result[1] = result[1][:, None]


def _no_masks(self: Any, result: list[Any]) -> None:
    for key in [key for key in result[4] if key.startswith("_")]:
        del result[4][key]


def _infos_in_a_list(self: Any, result: list[Any]) -> None:
    result[4] = [{}] * self.num_envs


def _noise(self: Any, result: list[Any]) -> None:
    result[0]["x"] = np.random.default_rng().random(result[0]["x"].shape, dtype=np.float32)


def _pays_for_the_reset(self: Any, result: list[Any]) -> None:
    result[1] = np.ones_like(result[1])


def _no_final_observation(self: Any, result: list[Any]) -> None:
    result[4].pop("final_obs", None)


def _final_observation_for_all(self: Any, result: list[Any]) -> None:
    if "final_obs" in result[4]:
        result[4]["final_obs"][:] = [self.single_observation_space.sample() for _ in range(self.num_envs)]
        result[4]["_final_obs"][:] = True


NEXT, SAME, NONE = AutoresetMode.NEXT_STEP, AutoresetMode.SAME_STEP, AutoresetMode.DISABLED
FIVE = "test_step_returns_five_values_of_the_right_shapes_and_dtypes"
FINAL = "test_same_step_autoreset_reports_the_final_observation_and_info"
FAULTS: list[tuple[Any, str, dict[str, Any]]] = [
    (_float32_rewards, FIVE, {"mode": NEXT, "num_envs": 3}),
    (_integer_flags, FIVE, {"mode": NONE, "num_envs": 1}),
    (_two_dimensional_rewards, FIVE, {"mode": SAME, "num_envs": 3}),
    (_infos_in_a_list, FIVE, {"mode": NEXT, "num_envs": 3}),
    (_same_reward_array, "test_rewards_and_flags_are_fresh_arrays_at_every_step", {}),
    (_same_observation_array, "test_observations_of_an_earlier_step_stay_as_they_were", {}),
    (_no_masks, "test_every_info_has_a_mask_with_one_flag_for_each_environment", {"mode": NEXT}),
    (_noise, "test_the_same_seed_gives_the_same_trajectory", {"mode": NEXT}),
    (_noise, "test_seeding_again_starts_the_same_trajectory_again", {}),
    (_pays_for_the_reset, "test_next_step_autoreset_ignores_one_action_and_pays_nothing_for_it", {}),
    (_no_final_observation, FINAL, {}),
    (_final_observation_for_all, FINAL, {}),
    (IgnoresSeeds, "test_an_integer_seed_is_that_seed_and_the_next_ones", {}),
    (IgnoresSeeds, "test_a_masked_reset_gives_the_chosen_rows_their_own_seeds", {}),
    (IgnoresMasks, "test_a_masked_reset_leaves_the_other_rows_as_they_are", {"mode": NEXT}),
    (StepsFirst, "test_the_wrong_number_of_actions_is_refused_before_anything_happens", {"count": 2}),
]


@pytest.mark.parametrize(("fault", "test", "arguments"), FAULTS, ids=lambda value: getattr(value, "__name__", None))
def test_a_broken_promise_is_noticed(fault: Any, test: str, arguments: dict[str, Any]) -> None:
    class Contract(_Contract):
        options: ClassVar[dict[str, Any]] = {"num_workers": 0}

        def make(self, *args: Any, **kwargs: Any) -> Any:
            inner = super().make(*args, **kwargs)
            return fault(inner) if isinstance(fault, type) else Broken(inner, fault)

    with pytest.raises((AssertionError, KeyError)):
        getattr(Contract(), test)(**arguments)


def test_use_after_close_that_works_is_noticed() -> None:
    class Contract(VectorEnvContract):
        def make(self, num_envs: int = 3, autoreset_mode: Any = AutoresetMode.NEXT_STEP, **kwargs: Any) -> Any:
            return SyncVectorEnv(scripted(num_envs), autoreset_mode=autoreset_mode)

    with pytest.raises(pytest.fail.Exception):
        Contract().test_use_after_close_says_so()


def test_what_a_backend_cannot_do_is_skipped_with_a_reason() -> None:
    class Contract(_Contract):
        options: ClassVar[dict[str, Any]] = {"num_workers": 0}
        autoreset_modes: ClassVar[tuple[AutoresetMode, ...]] = (AutoresetMode.NEXT_STEP,)
        honours_seeds: ClassVar[bool] = False

    with pytest.raises(pytest.skip.Exception, match="SAME_STEP"):
        Contract().test_same_step_autoreset_reports_the_final_observation_and_info()
    with pytest.raises(pytest.skip.Exception, match="honours_seeds"):
        Contract().test_seeding_again_starts_the_same_trajectory_again()


def test_a_class_without_a_factory_says_what_to_override() -> None:
    with pytest.raises(NotImplementedError, match="make"):
        VectorEnvContract().make()


# -- the function beside it ----------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", AutoresetMode)
def test_same_trajectories_are_told_from_different_ones(mode: AutoresetMode) -> None:
    fns = counters(2, lengths=(3,))
    oracle = SyncVectorEnv(fns, autoreset_mode=mode)
    envs: Any = vecenv.AsyncVectorEnv(fns, autoreset_mode=mode, num_workers=0)
    other: Any = vecenv.AsyncVectorEnv(counters(2, lengths=(4,)), autoreset_mode=mode, num_workers=0)
    assert_same_trajectory(envs, oracle, 20, seed=3)
    fresh = SyncVectorEnv(fns, autoreset_mode=mode)
    with pytest.raises(AssertionError, match="step 2"):
        assert_same_trajectory(other, fresh, 20, seed=[1, 2])
    for one in (envs, other, oracle, fresh):
        one.close()
