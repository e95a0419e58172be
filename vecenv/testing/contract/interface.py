"""What a vector environment is, and what it returns: spaces, shapes, dtypes, infos with masks."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium.spaces import GraphInstance
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space

from vecenv.trajectories import STEP_FIELDS, assert_identical
from vecenv.testing.contract.base import Subject

__all__ = ["InterfaceContract"]


class InterfaceContract(Subject):
    """Spaces, shapes, dtypes, and who may write into what."""

    def test_it_is_a_gymnasium_vector_env(self) -> None:
        with self.opened() as envs:
            assert isinstance(envs, VectorEnv)
            assert isinstance(envs.unwrapped, VectorEnv)

    @pytest.mark.parametrize("num_envs", [1, 3])
    def test_it_holds_as_many_environments_as_were_asked_for(self, num_envs: int) -> None:
        with self.opened(num_envs) as envs:
            assert envs.num_envs == num_envs

    @pytest.mark.parametrize("num_envs", [1, 3])
    def test_batched_spaces_are_the_single_spaces_batched(self, num_envs: int) -> None:
        with self.opened(num_envs) as envs:
            assert envs.action_space == batch_space(envs.single_action_space, num_envs)
            assert envs.observation_space == batch_space(envs.single_observation_space, num_envs)

    @pytest.mark.parametrize("mode", AutoresetMode)
    def test_metadata_names_the_autoreset_mode(self, mode: AutoresetMode) -> None:
        with self.opened(autoreset_mode=mode) as envs:
            assert envs.metadata["autoreset_mode"] is mode

    def test_a_new_one_is_open_and_has_a_render_mode_and_a_spec_or_none(self) -> None:
        with self.opened() as envs:
            assert envs.closed is False
            assert envs.render_mode is None or isinstance(envs.render_mode, str)
            assert envs.spec is None or isinstance(envs.spec, gymnasium.envs.registration.EnvSpec)

    def test_a_spec_can_be_assigned_and_shows_up_in_the_repr(self) -> None:
        with self.opened() as envs:
            spec = gymnasium.envs.registration.EnvSpec("Contract-v0")
            envs.unwrapped.spec = spec
            assert envs.spec is spec
            assert "Contract-v0" in repr(envs)

    def test_the_repr_names_the_class_and_the_number_of_environments(self) -> None:
        with self.opened(3) as envs:
            assert type(envs).__name__ in repr(envs)
            assert "num_envs=3" in repr(envs)

    @pytest.mark.parametrize("num_envs", [1, 3])
    def test_reset_returns_an_observation_of_the_batched_space_and_an_info_dict(self, num_envs: int) -> None:
        with self.opened(num_envs) as envs:
            result = envs.reset(seed=1)
            assert isinstance(result, tuple)
            assert len(result) == 2
            assert result[0] in envs.observation_space
            assert isinstance(result[1], dict)

    @pytest.mark.parametrize("num_envs", [1, 3])
    @pytest.mark.parametrize("mode", AutoresetMode)
    def test_step_returns_five_values_of_the_right_shapes_and_dtypes(self, mode: AutoresetMode, num_envs: int) -> None:
        with self.opened(num_envs, mode) as envs:
            envs.reset(seed=1)
            for _ in range(5):
                result = self.step(envs)
                self._check_step(envs, result)
                if mode is AutoresetMode.DISABLED and (result[2] | result[3]).any():
                    envs.reset()

    def test_a_reset_in_the_middle_of_an_episode_works_and_so_does_the_step_after_it(self) -> None:
        with self.opened() as envs:
            for seed in range(3):
                observations, _ = envs.reset(seed=seed)
                assert observations in envs.observation_space
                self._check_step(envs, self.step(envs))

    def test_rewards_and_flags_are_fresh_arrays_at_every_step(self) -> None:
        with self.opened() as envs:
            envs.reset(seed=1)
            _, *first, _ = self.step(envs)
            kept = copy.deepcopy(first)
            _, *second, _ = self.step(envs)
            for name, one, two, before in zip(STEP_FIELDS[1:4], first, second, kept, strict=True):
                assert not np.shares_memory(one, two), f"{name} of two steps share memory"
                assert_identical(one, before, f"{name} of an earlier step")
                assert one.flags.writeable, f"{name} cannot be written to"

    def test_observations_of_an_earlier_step_stay_as_they_were(self) -> None:
        self._needs("fresh_observations")
        with self.opened() as envs:
            kept = [envs.reset(seed=1)[0]]
            copies = [copy.deepcopy(kept[0])]
            for _ in range(4):
                kept.append(self.step(envs)[0])
                copies.append(copy.deepcopy(kept[-1]))
            for t, (one, before) in enumerate(zip(kept, copies, strict=True)):
                assert_identical(one, before, f"observations of step {t}")

    def test_observations_can_be_written_to_without_changing_the_next_ones(self) -> None:
        self._needs("fresh_observations")
        self._needs("honours_seeds")
        with self.opened() as envs, self.opened() as untouched:
            envs.reset(seed=1)
            untouched.reset(seed=1)
            for _ in range(3):
                actions = self.sample_actions(envs)
                mine, theirs = self.step(envs, actions), self.step(untouched, copy.deepcopy(actions))
                assert_identical(mine, theirs, "step")
                for leaf in _leaves(mine[0]):
                    if isinstance(leaf, np.ndarray) and leaf.dtype != object:
                        assert leaf.flags.writeable
                        leaf.fill(0)

    @pytest.mark.parametrize("mode", AutoresetMode)
    def test_every_info_has_a_mask_with_one_flag_for_each_environment(self, mode: AutoresetMode) -> None:
        self._needs("masks_infos")
        with self.opened(autoreset_mode=mode) as envs:
            _check_masks(envs.reset(seed=1)[1], envs.num_envs)
            _check_masks(self.step_until_done(envs)[4], envs.num_envs)
            if mode is not AutoresetMode.DISABLED:
                _check_masks(self.step(envs)[4], envs.num_envs)

    def test_infos_are_fresh_so_that_wrappers_may_write_into_them(self) -> None:
        with self.opened() as envs:
            _, infos = envs.reset(seed=1)
            infos["written by a wrapper"] = np.ones(envs.num_envs)
            again = self.step(envs)[4]
            assert again is not infos
            assert "written by a wrapper" not in again
            for leaf in _leaves(again):
                if isinstance(leaf, np.ndarray):
                    assert leaf.flags.writeable


def _leaves(tree: Any) -> Iterator[Any]:
    """The leaves of nested dicts and tuples, depth first."""
    if isinstance(tree, Mapping):
        for value in tree.values():
            yield from _leaves(value)
    elif isinstance(tree, tuple | list) and not isinstance(tree, GraphInstance):
        for value in tree:
            yield from _leaves(value)
    else:
        yield tree


def _check_masks(infos: Mapping[Any, Any], num_envs: int, where: str = "infos") -> None:
    """Assert that every key of a batched info has its mask, bool of shape ``(num_envs,)``, at every level."""
    for key, value in infos.items():
        assert not (isinstance(key, str) and key.startswith("_") and key[1:] not in infos), (
            f"{where}: mask {key!r} has no value"
        )
        if isinstance(key, str) and key.startswith("_") and key[1:] in infos:
            continue
        mask = infos.get(f"_{key}")
        assert isinstance(mask, np.ndarray), f"{where}: key {key!r} has no mask '_{key}'"
        assert mask.dtype == np.bool_, f"{where}: mask '_{key}' has dtype {mask.dtype}"
        assert mask.shape == (num_envs,), f"{where}: mask '_{key}' has shape {mask.shape}"
        assert mask.any(), f"{where}: key {key!r} is there, and no environment gave it"
        if isinstance(value, Mapping):
            _check_masks(value, num_envs, f"{where}[{key!r}]")
        else:
            assert isinstance(value, np.ndarray), f"{where}[{key!r}] is {type(value)}, not an array"
            assert len(value) == num_envs, f"{where}[{key!r}] has {len(value)} rows for {num_envs} environments"
