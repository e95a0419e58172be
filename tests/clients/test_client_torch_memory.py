"""Tensors over the memory of observations keep their values while environments step on."""

from __future__ import annotations

import gc

import gymnasium as gym
import numpy as np
import torch

import vecenv


class ImageEnv(gym.Env):
    """An environment with random images as observations."""

    observation_space = gym.spaces.Box(0, 255, (160, 120), np.uint8)
    action_space = gym.spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: object = None) -> tuple[np.ndarray, dict[str, object]]:
        super().reset(seed=seed)
        return self.observe(), {}

    def observe(self) -> np.ndarray:
        return self.np_random.integers(0, 256, (160, 120), np.uint8)

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict[str, object]]:
        return self.observe(), 0.0, False, False, {}


def test_tensors_over_lent_observations_keep_their_values() -> None:
    envs = vecenv.AsyncVectorEnv([ImageEnv] * 4, num_workers=2)
    envs.reset(seed=1)
    held: list[tuple[torch.Tensor, np.ndarray]] = []
    for step in range(60):
        observations = envs.step([0] * 4)[0]
        tensor = torch.from_numpy(observations)
        assert tensor.data_ptr() == observations.ctypes.data  # no copy
        if step % 3 == 0:
            tensor[step % 4] += 1
        held = [*held[-(step % 5) :], (tensor[1:], observations[1:].copy())]
        del observations, tensor
        gc.collect()
        for view, expected in held:
            np.testing.assert_array_equal(view.numpy(), expected)
    envs.close()
