"""The same seeds give the same trajectories, and a masked reset touches nobody else."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
from gymnasium.vector import AutoresetMode
from gymnasium.vector.utils import iterate

from vecenv.trajectories import AnyVectorEnv, assert_identical, assert_same_steps, reset
from vecenv.testing.contract.base import Subject

__all__ = ["SeedingContract"]


class SeedingContract(Subject):
    """Seeds, and resets of some environments."""

    @pytest.mark.parametrize("mode", AutoresetMode)
    def test_the_same_seed_gives_the_same_trajectory(self, mode: AutoresetMode) -> None:
        self._needs("honours_seeds")
        if mode is AutoresetMode.DISABLED:
            self._needs("supports_reset_mask")
        with self.opened(autoreset_mode=mode) as one, self.opened(autoreset_mode=mode) as other:
            self._assert_same_trajectory(one, other, 7, 7)

    def test_an_integer_seed_is_that_seed_and_the_next_ones(self) -> None:
        self._needs("honours_seeds")
        with self.opened(3) as one, self.opened(3) as other:
            self._assert_same_trajectory(one, other, 7, [7, 8, 9])

    def test_seeding_again_starts_the_same_trajectory_again(self) -> None:
        self._needs("honours_seeds")
        with self.opened() as envs, self.opened() as fresh:
            envs.reset(seed=3)
            for _ in range(5):
                self.step(envs)
            envs.action_space.seed(123)
            self._assert_same_trajectory(envs, fresh, 11, 11)

    def _assert_same_trajectory(self, one: AnyVectorEnv, other: AnyVectorEnv, seed: Any, same_seed: Any) -> None:
        assert_identical(reset(one, seed), reset(other, same_seed), "reset")
        assert_same_steps(one, other, 20, lambda: self.sample_actions(one))

    @pytest.mark.parametrize("mode", AutoresetMode)
    def test_a_masked_reset_leaves_the_other_rows_as_they_are(self, mode: AutoresetMode) -> None:
        self._needs("supports_reset_mask")
        with self.opened(3, mode) as envs:
            envs.reset(seed=1)
            before = copy.deepcopy(self.step(envs)[0])
            mask = np.array([False, True, False])
            observations, infos = envs.reset(options={"reset_mask": mask})
            assert observations in envs.observation_space
            self._assert_same_rows(envs, (0, 2), observations, before)
            for key, flags in infos.items():
                if isinstance(key, str) and key.startswith("_") and isinstance(flags, np.ndarray):
                    assert not flags[[0, 2]].any(), f"{key} speaks of environments that were not reset"
            assert_identical(mask, np.array([False, True, False]), "the caller's mask")

    def test_a_masked_reset_gives_the_chosen_rows_their_own_seeds(self) -> None:
        self._needs("supports_reset_mask")
        self._needs("seeds_masked_resets")
        with self.opened(3) as envs, self.opened(3) as fresh:
            envs.reset(seed=1)
            self.step(envs)
            mask = np.array([True, False, True])
            observations, _ = envs.reset(seed=9, options={"reset_mask": mask})
            wanted, _ = fresh.reset(seed=9)
            self._assert_same_rows(envs, (0, 2), observations, wanted)

    def _assert_same_rows(self, envs: AnyVectorEnv, indices: tuple[int, ...], actual: Any, expected: Any) -> None:
        mine, theirs = (list(iterate(envs.observation_space, batch)) for batch in (actual, expected))
        for index in indices:
            assert_identical(mine[index], theirs[index], f"observation of environment {index}")
