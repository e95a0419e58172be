"""Tensors over the memory of observations keep their values while environments step on; tensors as reset masks."""

from __future__ import annotations

import functools
import gc

import numpy as np
import pytest
import torch
from dying_agents import DyingAgents
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


@pytest.mark.parametrize("view", [False, True])
def test_multi_agent_environments_accept_a_tensor_as_reset_mask(view: bool) -> None:
    envs = vecenv.MultiAgentVecEnv([DyingAgents] * 2, num_workers=0, autoreset_mode="SameStep")
    resettable = envs.to_openrl() if view else envs
    resettable.reset(seed=1)
    envs.step(np.zeros((2, 3), int))
    observations, _ = resettable.reset(options={"reset_mask": torch.tensor([False, True])})
    assert observations[:, 0, 1].tolist() == [1.0, 0.0]  # the time in each environment
    envs.step(np.zeros((2, 3), int))
    envs.close()
