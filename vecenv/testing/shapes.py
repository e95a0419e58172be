"""Vector environments of other shapes behind Gymnasium's interface, for :mod:`vecenv.testing.conformity`.

Stable-Baselines3's, Tianshou's and TorchRL's say the same things in other words. What they do not say, such as infos of
steps without a key, stays unsaid.
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
from gymnasium.spaces import Box, Discrete
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space

__all__ = ["as_gymnasium"]


def as_gymnasium(envs: Any) -> Any:
    """A vector environment with Gymnasium's interface, whatever shape it has."""
    for module, name, shape in (
        ("stable_baselines3.common.vec_env", "VecEnv", _FromSb3), ("tianshou.env", "BaseVectorEnv", _FromTianshou),
        ("torchrl.envs", "EnvBase", _FromTorchRL),
    ):  # fmt: skip
        if (loaded := sys.modules.get(module)) is not None and isinstance(envs, getattr(loaded, name)):
            return shape(envs)
    return envs


class _Foreign(VectorEnv[Any, Any, Any]):
    def __init__(self, envs: Any, num_envs: int, observation_space: Any, action_space: Any, mode: AutoresetMode) -> None:
        self.inner, self.num_envs = envs, num_envs
        self.single_observation_space, self.single_action_space = observation_space, action_space
        self.observation_space = batch_space(observation_space, self.num_envs)
        self.action_space = batch_space(action_space, self.num_envs)
        self.metadata = {"autoreset_mode": mode}

    def _batched(self, infos: Any) -> dict[str, Any]:
        batched: dict[str, Any] = {}
        for env, info in enumerate(infos):
            batched = self._add_info(batched, info, env)
        return batched

    def close_extras(self, **kwargs: Any) -> None:
        self.inner.close()


class _FromSb3(_Foreign):
    """Same-step; the final observation is ``info["terminal_observation"]``, truncation ``info["TimeLimit.truncated"]``."""

    def __init__(self, envs: Any) -> None:
        super().__init__(envs, envs.num_envs, envs.observation_space, envs.action_space, AutoresetMode.SAME_STEP)

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        if isinstance(seed, list):
            raise NotImplementedError("seed() takes one number")
        if options is not None and "reset_mask" in options:
            raise NotImplementedError("reset() resets all environments")
        if options is not None:
            self.inner.set_options(options)
        if seed is not None:
            self.inner.seed(seed)
        return self.inner.reset(), self._batched(self.inner.reset_infos)

    def step(self, actions: Any) -> Any:
        observations, rewards, over, infos = self.inner.step(actions)
        cut = np.array([bool(info.get("TimeLimit.truncated", False)) for info in infos])
        final = [info.pop("terminal_observation", None) for info in infos]
        told = []
        for env, info in enumerate(infos):
            info = {key: value for key, value in info.items() if key != "TimeLimit.truncated"}
            begun = {**self.inner.reset_infos[env], "final_obs": final[env], "final_info": info}
            told.append(info if final[env] is None else begun)
        return observations, np.asarray(rewards), over & ~cut, over & cut, self._batched(told)

    def get_attr(self, name: str) -> Any:
        return self.inner.get_attr(name)

    @property
    def processes(self) -> Any:
        return self.inner.processes


class _FromTianshou(_Foreign):
    """Without autoreset; ``reset(ids)`` resets some."""

    def __init__(self, envs: Any) -> None:
        observations, actions = (envs.get_env_attr(name)[0] for name in ("observation_space", "action_space"))
        super().__init__(envs, envs.env_num, observations, actions, AutoresetMode.DISABLED)
        self._latest: Any = None

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        options = dict(options or {})
        mask = options.pop("reset_mask", None)
        ids = np.arange(self.num_envs) if mask is None else np.flatnonzero(mask)
        given = {"options": options} if options else {}
        if isinstance(seed, list):
            raise NotImplementedError("reset() takes one seed")
        observations, infos = self.inner.reset(ids, **({} if seed is None else {"seed": seed}), **given)
        if self._latest is None or mask is None:
            self._latest = np.array(observations)
        self._latest[ids] = observations
        return self._latest.copy(), self._batched(infos)

    def step(self, actions: Any) -> Any:
        observations, *numbers, infos = self.inner.step(actions)
        self._latest = np.array(observations)
        return (observations, *numbers, self._batched(infos))

    def get_attr(self, name: str) -> Any:
        return self.inner.get_env_attr(name)


class _FromTorchRL(_Foreign):
    """Without autoreset; ``_reset`` says which environments a reset is for. Everything is a tensor, and there are no infos.

    Spaces are those of one array for observations, and of categorical actions.
    """

    def __init__(self, envs: Any) -> None:
        shape, choices = envs.observation_spec["observation"].shape[1:], envs.action_spec.space.n
        dtype: Any = str(envs.observation_spec["observation"].dtype).removeprefix("torch.")
        observations, actions = Box(-np.inf, np.inf, tuple(shape), dtype), Discrete(choices)
        super().__init__(envs, envs.batch_size[0], observations, actions, AutoresetMode.DISABLED)
        self._latest: Any = None

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        import torch

        options = dict(options or {})
        mask = options.pop("reset_mask", None)
        if isinstance(seed, list) or options:
            raise NotImplementedError("set_seed() takes one seed, and reset() no options")
        if seed is not None:
            self.inner.set_seed(seed)
        if mask is None:
            self._latest = self.inner.reset()
        else:
            self._latest = self.inner.reset(self._latest.set("_reset", torch.as_tensor(mask)[:, None]))
        return self._latest["observation"].numpy().copy(), {}

    def step(self, actions: Any) -> Any:
        import torch
        from torchrl.envs.utils import step_mdp

        if len(actions) != self.num_envs:
            raise ValueError(f"got {len(actions)} actions for {self.num_envs} environments")
        stepped = self.inner.step(self._latest.set("action", torch.as_tensor(np.asarray(actions))))
        self._latest = step_mdp(stepped)
        numbers = [stepped["next", name].numpy()[:, 0].copy() for name in ("reward", "terminated", "truncated")]
        return (stepped["next", "observation"].numpy().copy(), *numbers, {})
