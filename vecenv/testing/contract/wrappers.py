"""Gymnasium's vector wrappers work on top."""

from __future__ import annotations

import gymnasium
import numpy as np
import pytest
from gymnasium.vector import AutoresetMode

from vecenv.trajectories import assert_identical
from vecenv.testing.contract.base import Subject

__all__ = ["WrapperContract"]


class WrapperContract(Subject):
    """Wrappers see what they expect."""

    @pytest.mark.parametrize("mode", [AutoresetMode.NEXT_STEP, AutoresetMode.SAME_STEP])
    def test_record_episode_statistics_counts_returns_and_lengths(self, mode: AutoresetMode) -> None:
        with self.opened(autoreset_mode=mode) as envs:
            wrapped = gymnasium.wrappers.vector.RecordEpisodeStatistics(envs)
            wrapped.reset(seed=1)
            returns = np.zeros(envs.num_envs)
            lengths = np.zeros(envs.num_envs, dtype=np.int64)
            ended = np.zeros(envs.num_envs, dtype=np.bool_)
            for _ in range(self.max_steps):
                _, rewards, terminations, truncations, infos = self.step(wrapped)
                counted = ~ended if mode is AutoresetMode.NEXT_STEP else np.ones_like(ended)
                returns[ended] = 0.0
                lengths[ended] = 0
                returns[counted] += rewards[counted]
                lengths[counted] += 1
                ended = terminations | truncations
                if ended.any():
                    assert_identical(infos["_episode"], ended, "infos['_episode']")
                    np.testing.assert_array_equal(infos["episode"]["l"][ended], lengths[ended])
                    np.testing.assert_array_equal(infos["episode"]["r"][ended], returns[ended])
                    return
            pytest.fail(f"no episode ended within {self.max_steps} random steps; override max_steps or make()")

    def test_dict_info_to_list_gives_one_dict_for_each_environment(self) -> None:
        self._needs("masks_infos")
        with self.opened() as envs:
            wrapped = gymnasium.wrappers.vector.DictInfoToList(envs)
            _, reset_infos = wrapped.reset(seed=1)
            step_infos = self.step(wrapped)[4]
            for infos in (reset_infos, step_infos):
                assert isinstance(infos, list)
                assert len(infos) == envs.num_envs
                assert all(isinstance(info, dict) for info in infos)

    def test_a_reward_wrapper_sees_every_reward(self) -> None:
        with self.opened() as envs:
            wrapped = gymnasium.wrappers.vector.TransformReward(envs, lambda rewards: rewards * 0.0 - 1.0)
            wrapped.reset(seed=1)
            np.testing.assert_array_equal(self.step(wrapped)[1], -np.ones(envs.num_envs))

    def test_closing_a_wrapper_closes_what_is_inside(self) -> None:
        with self.opened() as envs:
            wrapped = gymnasium.wrappers.vector.RecordEpisodeStatistics(envs)
            wrapped.reset(seed=1)
            wrapped.close()
            assert envs.closed is True
            assert wrapped.closed is True
