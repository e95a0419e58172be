"""The three autoreset modes: what the step that ends an episode returns, and the one after it."""

from __future__ import annotations

import copy

import numpy as np
from gymnasium.vector import AutoresetMode

from vecenv.trajectories import assert_identical
from vecenv.testing.contract.base import Subject

__all__ = ["AutoresetContract"]


class AutoresetContract(Subject):
    """The ends of episodes."""

    def test_next_step_autoreset_ignores_one_action_and_pays_nothing_for_it(self) -> None:
        with self.opened(autoreset_mode=AutoresetMode.NEXT_STEP) as envs:
            envs.reset(seed=1)
            for _ in range(3):
                _, _, terminations, truncations, infos = self.step_until_done(envs)
                assert "final_obs" not in infos
                dones = terminations | truncations
                observations, rewards, terminations, truncations, _ = self.step(envs)
                assert observations in envs.observation_space
                assert (rewards[dones] == 0.0).all(), "the step that resets must have reward 0"
                assert not terminations[dones].any(), "the step that resets ends nothing"
                assert not truncations[dones].any(), "the step that resets ends nothing"

    def test_same_step_autoreset_reports_the_final_observation_and_info(self) -> None:
        self._needs("gives_final_observations")
        with self.opened(autoreset_mode=AutoresetMode.SAME_STEP) as envs:
            envs.reset(seed=1)
            for _ in range(3):
                result = self.step_until_done(envs)
                self._check_step(envs, result)
                _, _, terminations, truncations, infos = result
                dones = terminations | truncations
                final_obs = infos["final_obs"]
                assert isinstance(final_obs, np.ndarray)
                assert final_obs.dtype == object
                assert final_obs.shape == (envs.num_envs,)
                assert_identical(infos["_final_obs"], dones, "infos['_final_obs']")
                assert_identical(infos["_final_info"], dones, "infos['_final_info']")
                assert isinstance(infos["final_info"], dict)
                for done, final in zip(dones, final_obs, strict=True):
                    assert (final in envs.single_observation_space) if done else (final is None)

    def test_same_step_autoreset_reports_nothing_final_while_no_episode_ends(self) -> None:
        self._needs("gives_final_observations")
        with self.opened(autoreset_mode=AutoresetMode.SAME_STEP) as envs:
            envs.reset(seed=1)
            for _ in range(5):
                _, _, terminations, truncations, infos = self.step(envs)
                if not (terminations | truncations).any():
                    assert not {"final_obs", "_final_obs", "final_info", "_final_info"} & set(infos)

    def test_same_step_autoreset_goes_on_from_the_new_episode(self) -> None:
        self._needs("honours_seeds")
        with (
            self.opened(1, autoreset_mode=AutoresetMode.SAME_STEP) as same,
            self.opened(1, autoreset_mode=AutoresetMode.NEXT_STEP) as following,
        ):
            assert_identical(same.reset(seed=5), following.reset(seed=5), "reset")
            for t in range(self.max_steps):
                actions = self.sample_actions(same)
                one, other = self.step(same, actions), self.step(following, copy.deepcopy(actions))
                assert_identical(one[1:4], other[1:4], f"rewards and flags of step {t}")
                if (one[2] | one[3]).any():
                    after_reset = self.step(following, copy.deepcopy(actions))
                    assert_identical(one[0], after_reset[0], f"observation of the new episode at step {t}")
                    return
                assert_identical(one[0], other[0], f"observation of step {t}")

    def test_without_autoreset_a_masked_reset_starts_the_next_episode(self) -> None:
        self._needs("supports_reset_mask")
        with self.opened(autoreset_mode=AutoresetMode.DISABLED) as envs:
            envs.reset(seed=1)
            for _ in range(3):
                _, _, terminations, truncations, infos = self.step_until_done(envs)
                assert "final_obs" not in infos
                observations, _ = envs.reset(options={"reset_mask": terminations | truncations})
                assert observations in envs.observation_space
