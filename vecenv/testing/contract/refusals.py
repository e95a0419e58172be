"""What is refused leaves things as they were: wrong seeds, masks and actions, and use after close."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
from gymnasium.error import ClosedEnvironmentError
from gymnasium.vector.utils import batch_space

from vecenv.trajectories import assert_identical, assert_same_steps, reset
from vecenv.testing.contract.base import Subject

__all__ = ["RefusalContract"]


class RefusalContract(Subject):
    """Wrong arguments, and the end."""

    def test_a_list_of_seeds_of_the_wrong_length_is_refused_and_changes_nothing(self) -> None:
        self._needs("honours_seeds")
        with self.opened(3) as envs:
            for seeds in ([1, 2], [1, 2, 3, 4]):
                with pytest.raises(ValueError, match="3"):
                    reset(envs, seeds)
            observations, _ = envs.reset(seed=1)
            assert observations in envs.observation_space
            self._check_step(envs, self.step(envs))

    @pytest.mark.parametrize(
        ("mask", "error"),
        [
            ([True, False, True], TypeError),
            (np.array([True, False]), ValueError),
            (np.ones((3, 1), dtype=np.bool_), ValueError),
            (np.array([1, 0, 1]), TypeError),
            (np.zeros(3, dtype=np.bool_), ValueError),
        ],
        ids=["list", "too-short", "two-dimensional", "integers", "all-false"],
    )
    def test_a_wrong_reset_mask_is_refused_and_changes_nothing(self, mask: Any, error: type[Exception]) -> None:
        self._needs("supports_reset_mask")
        with self.opened(3) as envs:
            envs.reset(seed=1)
            with pytest.raises(error, match="reset_mask"):
                envs.reset(options={"reset_mask": mask})
            self._check_step(envs, self.step(envs))

    @pytest.mark.parametrize("count", [2, 4], ids=["too-few", "too-many"])
    def test_the_wrong_number_of_actions_is_refused_before_anything_happens(self, count: int) -> None:
        self._needs("refuses_wrong_actions")
        with self.opened(3) as envs, self.opened(3) as untouched:
            envs.reset(seed=1)
            untouched.reset(seed=1)
            wrong = batch_space(envs.single_action_space, count)
            wrong.seed(1)
            with pytest.raises(self.wrong_action_errors):
                envs.step(wrong.sample())
            if not self.honours_seeds:
                self._check_step(envs, self.step(envs))
                return
            assert_same_steps(envs, untouched, 3, lambda: self.sample_actions(envs))

    def test_actions_are_not_written_to(self) -> None:
        with self.opened() as envs:
            envs.reset(seed=1)
            actions = self.sample_actions(envs)
            before = copy.deepcopy(actions)
            self.step(envs, actions)
            assert_identical(actions, before, "the caller's actions")

    def test_close_may_be_called_twice(self) -> None:
        with self.opened() as envs:
            envs.reset(seed=1)
            envs.close()
            assert envs.closed is True
            envs.close()
            assert envs.closed is True

    def test_it_can_be_closed_before_its_first_reset(self) -> None:
        with self.opened() as envs:
            envs.close()
            assert envs.closed is True

    def test_use_after_close_says_so(self) -> None:
        with self.opened() as envs:
            envs.reset(seed=1)
            actions = self.sample_actions(envs)
            envs.close()
            with pytest.raises(ClosedEnvironmentError):
                envs.reset(seed=1)
            with pytest.raises(ClosedEnvironmentError):
                envs.step(actions)
