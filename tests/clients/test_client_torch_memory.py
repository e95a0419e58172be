"""Tensors over the memory of observations keep their values while environments step on."""

from __future__ import annotations

import functools
import gc

import numpy as np
import torch
from envs import SpaceEnv
from gymnasium.spaces import Box

import vecenv

IMAGE = Box(0, 255, (160, 120), np.uint8)


def test_tensors_over_lent_observations_keep_their_values() -> None:
    envs = vecenv.AsyncVectorEnv([functools.partial(SpaceEnv, IMAGE)] * 4, num_workers=2)
    envs.reset(seed=1)
    held: list[tuple[torch.Tensor, np.ndarray]] = []
    for step in range(60):
        observations = envs.step(envs.action_space.sample())[0]
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
