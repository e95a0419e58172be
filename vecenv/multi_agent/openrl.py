"""The shapes of the ``agent_num`` convention (OpenRL and on-policy trainers like it) over a ``MultiAgentVecEnv``."""

from __future__ import annotations

import math
import queue
from collections.abc import Callable, Sequence
from typing import Any, Final

import numpy as np
from gymnasium import spaces
from gymnasium.vector import AutoresetMode

from vecenv.multi_agent.adapter import AgentsEnv
from vecenv.multi_agent.infos import list_of_dicts
from vecenv.shm.layout import Array

__all__ = ["ErrorQueue", "OpenRLView"]

SEED_STRIDE: Final = 10086
RENDER_MODES: Final = (
    "human", "rgb_array", "group_human", "group_rgb_array", "single_human", "single_rgb_array",
)  # fmt: skip


class OpenRLView:
    """A view with that convention's shapes: rewards ``[n, A, 1]``, dones ``[n, A]``, infos a list of n dicts.

    ``step`` gives four values, or five (terminations and truncations apart) where the environments do.

    ``infos[i]`` is what environment i gave (``infos[i]["key"]``), and beside that ``active_masks`` float32 ``[A, 1]`` (1 for
    agents that are alive, and for all after the environment's episode ended), ``action_masks`` bool ``[A, k]`` where there
    are masks, and after the end ``final_observation`` and ``final_info``. A dead agent stays done until its environment's
    episode ends, and then all are. Observations of a ``Discrete`` space are one-hot ``[n, A, k]``. Environment i is seeded
    with ``seed + i * 10086``.

    Args:
        envs: With ``layout="stack"`` and same-step autoreset (or none, the convention's ``auto_reset=False``).
        render_mode: Of the view, one of ``RENDER_MODES``; default, that of the environments.

    Raises:
        ValueError: It has another layout or autoreset mode.

    Attributes:
        envs: The vector environment beneath.
        observation_space, action_space: Of one agent.
        parallel_env_num, env_num, agent_num: Numbers of environments, the same, and of agents in each.
        error_queue: What failed, see :class:`ErrorQueue`.
    """

    def __init__(self, envs: Any, render_mode: str | None = None) -> None:
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
        self.env_name = self._env_name = envs.env_name
        self.render_mode = envs.render_mode if render_mode is None else render_mode
        self.auto_reset = envs.autoreset_mode is AutoresetMode.SAME_STEP
        self.error_queue = ErrorQueue(envs)
        self._latest: Any = None
        self._values: int | None = None  # of a step, known after the first
        self._ended = np.zeros((2, envs.num_envs, envs.num_agents), np.bool_)  # terminated, truncated
        self._mask: Any = None  # of the latest reset
        self._random = np.random.default_rng()

    # -- reset and step ---------------------------------------------------------------------------------------------

    def reset(
        self, seed: int | Sequence[int | None] | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, list[dict[str, Any]]]:
        """``(observations [n, A, ...], infos)``."""
        self.reset_send(seed, options)
        return self.reset_fetch()

    def reset_send(self, seed: int | Sequence[int | None] | None = None, options: dict[str, Any] | None = None) -> None:
        """Begin a :meth:`reset`."""
        seeds: Any = seed
        if isinstance(seed, (int, np.integer)):
            seeds = [int(seed) + index * SEED_STRIDE for index in range(self.env_num)]
            self._random = np.random.default_rng(int(seed))
            self.action_space.seed(int(seed))
        self.envs.reset_async(seed=seeds, options=options)
        self._mask = None if options is None else options.get("reset_mask")

    def reset_fetch(self, timeout: float | None = None) -> tuple[Any, list[dict[str, Any]]]:
        """What :meth:`reset` returns, of :meth:`reset_send`; errors as of ``AsyncVectorEnv.reset_wait``."""
        obs, infos = self.envs.reset_wait(timeout)
        self._ended[:, slice(None) if self._mask is None else self._mask] = False
        self._latest = self._shown(obs)
        return self._latest, self._listed(infos, np.zeros(self.env_num, np.bool_))

    def step(self, actions: Any, extra_data: Any = None) -> tuple[Any, ...]:
        """One step of all environments; ``extra_data`` is not looked at.

        Returns:
            ``(observations [n, A, ...], rewards [n, A, 1], dones bool [n, A], infos)``, or with terminations and truncations
            ``[n, A]`` each in the place of ``dones``.
        """
        self.step_send(actions)
        return self.step_fetch()

    def step_send(self, actions: Any) -> None:
        """Begin a :meth:`step`."""
        self.envs.step_async(actions)

    def step_fetch(self, timeout: float | None = None) -> tuple[Any, ...]:
        """What :meth:`step` returns, of :meth:`step_send`; errors as of ``AsyncVectorEnv.step_wait``."""
        obs, rewards, terminations, truncations, infos = self.envs.step_wait(timeout)
        over = infos["env_done"]
        ended = self._ended | np.stack([terminations, truncations])
        self._ended = ended & ~over[:, None]
        self._latest = self._shown(obs)
        listed = self._listed(infos, over)
        if self._values is None:
            self._values = self._values_of_a_step()
        if self._values == 5:
            return self._latest, rewards[..., None], ended[0], ended[1], listed
        return self._latest, rewards[..., None], ended.any(axis=0) | over[:, None], listed

    def _values_of_a_step(self) -> int:
        """Four, or five where all environments give so many."""
        if not self.envs.capabilities.attributes:
            return 4
        return int(min(self.envs.exec_func_outside(_values)))

    def _shown(self, obs: Any) -> Any:
        return _one_hot(self.observation_space, obs)

    def _listed(self, infos: dict[str, Any], over: Array) -> list[dict[str, Any]]:
        active = (infos["agent_mask"] | over[:, None]).astype(np.float32)[..., None]
        masks = infos.pop("action_mask", None)
        if "final_obs" in infos:
            infos["final_observation"] = self._shown(infos.pop("final_obs"))
            infos["_final_observation"] = infos.pop("_final_obs")
        listed = list_of_dicts(infos)
        for index, info in enumerate(listed):
            _unfold(info)
            if "final_info" in info:
                _unfold(info["final_info"])
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

    # -- pictures ---------------------------------------------------------------------------------------------------

    def render(self, mode: str | None = None) -> Any:
        """Frames of the environments, each as its own ``render_mode`` says.

        Args:
            mode: ``"rgb_array"``, ``"group_rgb_array"``: one image of all, tiled; ``"single_rgb_array"``: that of
                environment 0; ``"human"``, ``"group_human"``, ``"single_human"``: nothing is returned, environments made
                with ``render_mode="human"`` draw themselves; ``None``: as the view's ``render_mode``, or tiled.
        """
        if mode is None:
            mode = self.render_mode if self.render_mode in RENDER_MODES else "rgb_array"
        if mode not in RENDER_MODES:
            raise ValueError(f"render mode must be one of {RENDER_MODES} or None, got {mode!r}")
        frames = self.envs.render()
        if mode.endswith("human") or frames is None or frames[0] is None:
            return None
        return frames[0] if mode.startswith("single") else _tiled([np.asarray(frame) for frame in frames])

    # -- the environments -------------------------------------------------------------------------------------------

    def exec_func(self, func: Callable[..., Any], indices: Any = None, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        """As of ``MultiAgentVecEnv``."""
        return self.envs.exec_func(func, indices, *args, **kwargs)  # type: ignore[no-any-return]

    def exec_func_send(self, func: Callable[..., Any], indices: Any = None, *args: Any, **kwargs: Any) -> None:
        """Begin an :meth:`exec_func`."""
        self.envs.exec_func_send(func, indices, *args, **kwargs)

    def exec_func_fetch(self, timeout: float | None = None) -> tuple[Any, ...]:
        """Fetch the answer to :meth:`exec_func_send`."""
        return self.envs.exec_func_fetch(timeout)  # type: ignore[no-any-return]

    def env_is_wrapped(self, wrapper_class: type[Any], indices: int | Sequence[int] | None = None) -> list[bool]:
        """Whether each environment has a wrapper of this class, or of one derived from it."""
        chosen = [indices] if isinstance(indices, (int, np.integer)) else indices
        name = f"{wrapper_class.__module__}.{wrapper_class.__qualname__}"
        answers = self.envs.exec_func(_is_wrapped, chosen, name)
        return [answers[index] for index in (range(self.env_num) if chosen is None else chosen)]

    def seed(self, seed: int | None = None) -> None:
        """Nothing, as in OpenRL: seeds are given to :meth:`reset`."""

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

    # -- what can be looked at, and the end -------------------------------------------------------------------------

    @property
    def closed(self) -> bool:
        """Whether it was closed."""
        return bool(self.envs.closed)

    @property
    def metadata(self) -> dict[str, Any]:
        """The environments'."""
        return self.envs.metadata  # type: ignore[no-any-return]

    @property
    def unwrapped(self) -> OpenRLView:
        """The view itself."""
        return self

    @property
    def observations(self) -> Any:
        """The latest batch; ``None`` before the first reset."""
        return self._latest

    @property
    def env_fns(self) -> list[Callable[[], Any]]:
        """What built the environments."""
        return [wrapped.env_fn for wrapped in self.envs._rows.env_fns]

    @property
    def processes(self) -> list[Any]:
        """The worker processes."""
        return self.envs._rows.processes  # type: ignore[no-any-return]

    @property
    def parent_pipes(self) -> list[Any]:
        """The caller's reading ends of the workers' pipes; each has a ``fileno()``."""
        return self.envs._rows.parent_pipes  # type: ignore[no-any-return]

    def close(self, **kwargs: Any) -> None:
        """Close the environments."""
        self.envs.close(**kwargs)

    def __repr__(self) -> str:
        return f"OpenRLView({self.envs!r})"


class ErrorQueue:
    """What failed, as OpenRL's queue tells it: oldest first, each once."""

    def __init__(self, envs: Any) -> None:
        self._envs = envs
        self._last: Any = None

    def _new(self) -> list[Any]:
        records = list(self._envs.errors)
        known = [index for index, record in enumerate(records) if record is self._last]
        return records[known[0] + 1 :] if known else records

    def get(self, block: bool = False, timeout: float | None = None) -> tuple[int | None, type[Any], BaseException]:
        """``(index of the environment, class, exception)`` of the next failure.

        Raises:
            queue.Empty: There is none; nobody waits for one, whatever the arguments.
        """
        new = self._new()
        if not new:
            raise queue.Empty
        self._last = new[0]
        return new[0].env, type(new[0].error), new[0].error

    get_nowait = get

    def empty(self) -> bool:
        """Whether nothing failed that was not told yet."""
        return not self._new()

    def qsize(self) -> int:
        """How many failures were not told yet."""
        return len(self._new())


def _values(env: AgentsEnv) -> int:
    return int(getattr(env.env, "values", 4))


def _is_wrapped(env: Any, name: str) -> bool:
    """By name, so that no worker has to import the class; wrappers keep what is inside as ``env``."""
    while env is not None:
        if any(f"{kind.__module__}.{kind.__qualname__}" == name for kind in type(env).__mro__):
            return True
        env = vars(env).get("env")
    return False


def _one_hot(space: spaces.Space[Any], obs: Any) -> Any:
    if isinstance(space, spaces.Dict):
        return {key: _one_hot(inner, obs[key]) for key, inner in space.spaces.items()}
    if isinstance(space, spaces.Tuple):
        return tuple(_one_hot(inner, part) for inner, part in zip(space.spaces, obs, strict=True))
    if isinstance(space, spaces.Discrete):  # (padding need not lie in the space)
        return (np.arange(space.start, space.start + space.n) == np.asarray(obs)[..., None]).astype(space.dtype)
    return obs


def _unfold(info: dict[str, Any]) -> None:
    """What the environment said of itself stands where it put it; Python's numbers are Python's again."""
    for key, value in info.pop("common", {}).items():
        plain = isinstance(value, np.generic) and value.dtype.char in "?ld"
        info.setdefault(key, value.item() if plain else value)


def _tiled(frames: Sequence[Array]) -> Array:
    """Frames of one shape ``[h, w, c]`` in a grid that is as square as can be, black where there is none."""
    rows = math.ceil(math.sqrt(len(frames)))
    columns = math.ceil(len(frames) / rows)
    height, width = frames[0].shape[:2]
    grid = np.zeros((rows * height, columns * width, *frames[0].shape[2:]), frames[0].dtype)
    for index, frame in enumerate(frames):
        top, left = index // columns * height, index % columns * width
        grid[top : top + height, left : left + width] = frame
    return grid
