"""The shapes of the ``agent_num`` convention (OpenRL and on-policy trainers like it) over a ``MultiAgentVecEnv``."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Final

import numpy as np
from gymnasium import spaces
from gymnasium.vector import AutoresetMode

from vecenv.multi_agent.infos import list_of_dicts
from vecenv.shm.layout import Array

__all__ = ["OpenRLView"]

SEED_STRIDE: Final = 10086
RENDER_MODES: Final = ("group_human", "group_rgb_array", "single_human", "single_rgb_array")


class OpenRLView:
    """A view with that convention's shapes: rewards ``[n, A, 1]``, dones ``[n, A]``, infos a list of n dicts.

    ``infos[i]`` has ``active_masks`` float32 ``[A, 1]`` (1 for agents that are alive, and for all after the environment's
    episode ended), ``action_masks`` bool ``[A, k]`` where there are masks, ``final_observation`` and ``final_info`` after
    the end, and whatever the environment gave. A dead agent stays done until its environment's episode ends, and then all
    are. Observations of a ``Discrete`` space are one-hot ``[n, A, k]``. Environment i is seeded with ``seed + i *
    10086``.

    Args:
        envs: With ``layout="stack"`` and same-step autoreset (or none, the convention's ``auto_reset=False``).

    Raises:
        ValueError: It has another layout or autoreset mode.
    """

    def __init__(self, envs: Any) -> None:
        if envs.layout != "stack":
            raise ValueError(f"to_openrl() needs layout='stack', not {envs.layout!r}")
        if envs.autoreset_mode is AutoresetMode.NEXT_STEP:
            raise ValueError(
                "to_openrl() needs autoreset_mode=SAME_STEP (or DISABLED): this convention resets in the same step"
            )
        self.envs = envs
        self.agent_num = envs.num_agents
        self.env_num = self.parallel_env_num = envs.num_envs
        self.observation_space = envs.single_observation_space
        self.action_space = envs.single_action_space
        self.env_name = envs.env_name
        self.render_mode = envs.render_mode
        self._done = np.zeros((envs.num_envs, envs.num_agents), np.bool_)
        self._random = np.random.default_rng()

    def reset(
        self, seed: int | Sequence[int | None] | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, list[dict[str, Any]]]:
        """``(observations [n, A, ...], infos)``."""
        seeds: Any = seed
        if isinstance(seed, (int, np.integer)):
            seeds = [int(seed) + index * SEED_STRIDE for index in range(self.env_num)]
            self._random = np.random.default_rng(int(seed))
            self.action_space.seed(int(seed))
        mask = None if options is None else options.get("reset_mask")
        obs, infos = self.envs.reset(seed=seeds, options=options)
        self._done[slice(None) if mask is None else mask] = False
        return self._shown(obs), self._listed(infos, np.zeros(self.env_num, np.bool_))

    def step(self, actions: Any, extra_data: Any = None) -> tuple[Any, Array, Array, list[dict[str, Any]]]:
        """``(observations [n, A, ...], rewards [n, A, 1], dones bool [n, A], infos)``; ``extra_data`` is not looked at."""
        obs, rewards, terminations, truncations, infos = self.envs.step(actions)
        over = infos["env_done"]
        done = self._done | terminations | truncations | over[:, None]
        self._done = done & ~over[:, None]
        return self._shown(obs), rewards[..., None], done, self._listed(infos, over)

    def _shown(self, obs: Any) -> Any:
        space = self.observation_space
        if isinstance(space, spaces.Discrete):
            return np.eye(int(space.n), dtype=space.dtype)[obs - space.start]
        return obs

    def _listed(self, infos: dict[str, Any], over: Array) -> list[dict[str, Any]]:
        active = (infos["agent_mask"] | over[:, None]).astype(np.float32)[..., None]
        masks = infos.pop("action_mask", None)
        if "final_obs" in infos:
            infos["final_observation"] = self._shown(infos.pop("final_obs"))
            infos["_final_observation"] = infos.pop("_final_obs")
        listed = list_of_dicts(infos)
        for index, info in enumerate(listed):
            info["active_masks"] = active[index]
            if masks is not None:
                info["action_masks"] = masks[index]
        return listed

    def random_action(self, infos: Sequence[dict[str, Any]] | None = None) -> Array:
        """Random actions ``[n, A, ...]`` (``[n, A, 1]`` for ``Discrete``); of those that ``infos`` allow, if given."""
        space = self.action_space
        shape = (self.env_num, self.agent_num)
        if not isinstance(space, spaces.Discrete):
            return np.stack([[space.sample() for _ in range(shape[1])] for _ in range(shape[0])])
        actions = np.empty((*shape, 1), np.int64)
        for row, agent in np.ndindex(shape):
            allowed = None if infos is None or "action_masks" not in infos[row] else infos[row]["action_masks"][agent]
            options = np.arange(int(space.n)) if allowed is None else np.flatnonzero(allowed)
            actions[row, agent, 0] = int(space.start) + self._random.choice(options)
        return actions

    def render(self, mode: str | None = None) -> Any:
        """Frames of the environments, each as its own ``render_mode`` says.

        Args:
            mode: ``"group_rgb_array"``: one image of all, tiled; ``"single_rgb_array"``: that of environment 0;
                ``"group_human"``, ``"single_human"``: nothing is returned, environments made with ``render_mode="human"``
                draw themselves; ``None``: a tuple of frames.
        """
        if mode is not None and mode not in RENDER_MODES:
            raise ValueError(f"render mode must be one of {RENDER_MODES} or None, got {mode!r}")
        frames = self.envs.render()
        if mode is None:
            return frames
        if mode.endswith("human") or frames is None:
            return None
        return frames[0] if mode.startswith("single") else _tiled([np.asarray(frame) for frame in frames])

    def exec_func(self, func: Callable[..., Any], indices: Any = None, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        """As of ``MultiAgentVecEnv``."""
        return self.envs.exec_func(func, indices, *args, **kwargs)  # type: ignore[no-any-return]

    def call(self, name: str, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        """As of ``MultiAgentVecEnv``."""
        return self.envs.call(name, *args, **kwargs)  # type: ignore[no-any-return]

    def call_send(self, name: str, *args: Any, **kwargs: Any) -> None:
        """Begin a :meth:`call`."""
        self.envs.call_async(name, *args, **kwargs)

    def call_fetch(self, timeout: float | None = None) -> tuple[Any, ...]:
        """Fetch the answer to :meth:`call_send`."""
        return self.envs.call_wait(timeout)  # type: ignore[no-any-return]

    def get_attr(self, name: str) -> tuple[Any, ...]:
        """As of ``MultiAgentVecEnv``."""
        return self.envs.get_attr(name)  # type: ignore[no-any-return]

    def set_attr(self, name: str, values: Any) -> None:
        """As of ``MultiAgentVecEnv``."""
        self.envs.set_attr(name, values)

    def close(self, **kwargs: Any) -> None:
        """Close the environments."""
        self.envs.close(**kwargs)

    def __repr__(self) -> str:
        return f"OpenRLView({self.envs!r})"


def _tiled(frames: Sequence[Array]) -> Array:
    """Frames of one shape ``[h, w, c]`` in a grid that is as square as can be, black where there is none."""
    columns = math.ceil(math.sqrt(len(frames)))
    rows = math.ceil(len(frames) / columns)
    height, width = frames[0].shape[:2]
    grid = np.zeros((rows * height, columns * width, *frames[0].shape[2:]), frames[0].dtype)
    for index, frame in enumerate(frames):
        top, left = index // columns * height, index % columns * width
        grid[top : top + height, left : left + width] = frame
    return grid
