"""The contract of vector environments, over EnvPool's classic control and over nested dict observations."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
import pytest
from gymnasium.vector import AutoresetMode

pytest.importorskip("envpool")

from vecenv.backends import EnvPoolVectorEnv
from vecenv.testing import VectorEnvContract


class EnvPoolContract(VectorEnvContract):
    """EnvPool seeds its environments when it builds them, so a masked reset cannot have seeds of its own."""

    task_id: str
    options: ClassVar[dict[str, Any]] = {}
    seeds_masked_resets = False

    def make(
        self,
        num_envs: int = 3,
        autoreset_mode: AutoresetMode = AutoresetMode.NEXT_STEP,
        **kwargs: Any,
    ) -> EnvPoolVectorEnv:
        return EnvPoolVectorEnv(
            self.task_id, num_envs, autoreset_mode=autoreset_mode, num_threads=1, **self.options, **kwargs
        )

    def test_a_seed_for_a_masked_reset_is_refused_and_changes_nothing(self) -> None:
        self._needs("supports_reset_mask")
        with self.opened(3) as envs:
            envs.reset(seed=1)
            with pytest.raises(NotImplementedError, match="seed some environments only"):
                envs.reset(seed=9, options={"reset_mask": np.array([True, False, True])})
            self._check_step(envs, self.step(envs))


class TestClassicControl(EnvPoolContract):
    task_id = "CartPole-v1"


@pytest.mark.long
class TestTimeLimit(EnvPoolContract):
    task_id = "CartPole-v1"
    options: ClassVar[dict[str, Any]] = {"max_episode_steps": 11}


@pytest.mark.long
class TestFlatDictObservations(EnvPoolContract):
    task_id = "MiniGrid-Empty-5x5-v0"
    options: ClassVar[dict[str, Any]] = {"max_episode_steps": 20}


@pytest.mark.long
class TestNestedDictObservations(EnvPoolContract):
    task_id = "Maze-v0"


class TestFirstReady(EnvPoolContract):
    """``step`` of a pool with small batches sends to all and collects all."""

    task_id = "CartPole-v1"
    autoreset_modes = (AutoresetMode.NEXT_STEP, AutoresetMode.DISABLED)
    supports_reset_mask = False
    options: ClassVar[dict[str, Any]] = {"batch_size": 1}

    def test_a_reset_mask_names_what_to_use_instead(self) -> None:
        with self.opened(3) as envs:
            envs.reset(seed=1)
            with pytest.raises(NotImplementedError, match="reset_async"):
                envs.reset(options={"reset_mask": np.array([False, True, False])})

    def test_without_autoreset_some_are_reset_by_their_numbers(self) -> None:
        with self.opened(autoreset_mode=AutoresetMode.DISABLED) as envs:
            envs.reset(seed=1)
            for _ in range(3):
                _, _, terminations, truncations, _ = self.step_until_done(envs)
                over = np.flatnonzero(terminations | truncations)
                envs.reset_async(env_id=over)
                assert {int(envs.recv()[4]["env_id"][0]) for _ in over} == set(over.tolist())
