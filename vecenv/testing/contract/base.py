"""What every subject of the contract stands on: the factory, what a backend can do, and a few checks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

import numpy as np
import pytest
from gymnasium.vector import AutoresetMode

from vecenv.trajectories import AnyVectorEnv, Step

__all__ = ["Subject"]


class Subject:
    """What a contract knows of the vector environment under test.

    Attributes:
        autoreset_modes: The modes that :meth:`make` accepts; tests of the others are skipped.
        honours_seeds: Whether the same seed gives the same trajectory.
        supports_reset_mask: Whether ``options["reset_mask"]`` resets some environments and leaves the others.
        seeds_masked_resets: Whether such a reset may be given seeds.
        refuses_wrong_actions: Whether a batch of the wrong length raises before any environment is stepped.
        fresh_observations: Whether earlier observations stay as they were (``copy=True`` in Gymnasium's
            terms).
        masks_infos: Whether infos are dicts of arrays with a mask for every key.
        gives_final_observations: Whether same-step autoreset reports ``final_obs`` and ``final_info``.
        max_steps: Some episode must end within that many random steps.
        wrong_action_errors: What a wrong batch of actions may raise.
    """

    autoreset_modes: ClassVar[tuple[AutoresetMode, ...]] = tuple(AutoresetMode)
    honours_seeds: ClassVar[bool] = True
    supports_reset_mask: ClassVar[bool] = True
    seeds_masked_resets: ClassVar[bool] = True
    refuses_wrong_actions: ClassVar[bool] = True
    fresh_observations: ClassVar[bool] = True
    masks_infos: ClassVar[bool] = True
    gives_final_observations: ClassVar[bool] = True
    max_steps: ClassVar[int] = 500
    wrong_action_errors: ClassVar[tuple[type[Exception], ...]] = (ValueError, TypeError)

    def make(
        self,
        num_envs: int = 3,
        autoreset_mode: AutoresetMode = AutoresetMode.NEXT_STEP,
        **kwargs: Any,
    ) -> AnyVectorEnv:
        """Build the vector environment under test, ready for its first ``reset``.

        Args:
            num_envs: Number of environments in it.
            autoreset_mode: One of :attr:`autoreset_modes`.
            **kwargs: For a subclass's own tests.
        """
        raise NotImplementedError("override make() with a factory of the vector environment under test")

    def sample_actions(self, envs: AnyVectorEnv) -> Any:
        """A batch of actions: ``envs.action_space.sample()`` unless overridden (for action masks, say)."""
        return envs.action_space.sample()

    @contextmanager
    def opened(
        self,
        num_envs: int = 3,
        autoreset_mode: AutoresetMode | None = None,
        **kwargs: Any,
    ) -> Iterator[AnyVectorEnv]:
        """A vector environment with a seeded action space, closed at the end; ``None`` is the first mode."""
        mode = self.autoreset_modes[0] if autoreset_mode is None else autoreset_mode
        if mode not in self.autoreset_modes:
            pytest.skip(f"{type(self).__name__} does not offer {mode}")
        envs = self.make(num_envs=num_envs, autoreset_mode=mode, **kwargs)
        try:
            envs.action_space.seed(123)
            yield envs
        finally:
            envs.close()

    def step(self, envs: AnyVectorEnv, actions: Any = None) -> Step:
        """One step with the given or random actions."""
        return envs.step(self.sample_actions(envs) if actions is None else actions)

    def step_until_done(self, envs: AnyVectorEnv) -> Step:
        """Step until some environment ends its episode; the result of that step."""
        for _ in range(self.max_steps):
            result = self.step(envs)
            if (result[2] | result[3]).any():
                return result
        pytest.fail(f"no episode ended within {self.max_steps} random steps; override max_steps or make()")

    def _needs(self, attribute: str) -> None:
        if not getattr(self, attribute):
            pytest.skip(f"{type(self).__name__}.{attribute} is False")

    def _check_step(self, envs: AnyVectorEnv, result: Step) -> None:
        """Assert the types, shapes and dtypes of what ``step`` returned."""
        assert isinstance(result, tuple)
        assert len(result) == 5, f"step returned {len(result)} values instead of 5"
        observations, rewards, terminations, truncations, infos = result
        assert observations in envs.observation_space
        for name, array, dtype in (
            ("rewards", rewards, np.float64),
            ("terminations", terminations, np.bool_),
            ("truncations", truncations, np.bool_),
        ):
            assert isinstance(array, np.ndarray), f"{name} is {type(array)}"
            assert array.dtype == dtype, f"{name} has dtype {array.dtype}, not {dtype.__name__}"
            assert array.shape == (envs.num_envs,), f"{name} has shape {array.shape}"
        assert isinstance(infos, dict)
