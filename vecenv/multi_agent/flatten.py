"""``FlattenAgents``: every agent a row of an ordinary Gymnasium vector environment, for single-agent trainers.

Row ``env * A + agent``; observations, rewards, flags and masks are reshaped, not copied. Trainers that know no masks see an
agent's episodes as they are, and rows of padding after its death; those end with the environment's episode, so that nothing
is bootstrapped from padding into the next episode and episode statistics are right.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space

from vecenv.front.gymnasiums import NotClosedUnasked
from vecenv.front.phases import dropping_pending
from vecenv.multi_agent.infos import own_keys
from vecenv.multi_agent.roster import tree_of
from vecenv.shm import Tree
from vecenv.shm.layout import Array

__all__ = ["FlattenAgents"]

Bools = npt.NDArray[np.bool_]


class FlattenAgents(NotClosedUnasked, VectorEnv[Any, Any, Any]):
    """The agents of a :class:`~vecenv.MultiAgentVecEnv` with stacked layout as rows of one vector environment.

    Args:
        envs: What to flatten; closing this closes it.
        padding_done: On the last step of an environment, rows of agents that are not there (dead, or not born) get
            ``terminated=True``. Padding then shows up as episodes of return 0 whose rows have a False
            ``infos["transition_mask"]``. With ``False`` the flags are the agents' own, and programs that count from flag to
            flag count the padding into the next episode.

    Raises:
        ValueError: The layout is not ``"stack"``.

    Infos of environments are repeated for their agents; every key has a mask ``_key``, bool ``(num_envs,)``.
    ``final_obs`` is an object array of single observations as in Gymnasium; under same-step autoreset an agent that dies
    before the others has one too.
    """

    def __init__(self, envs: Any, *, padding_done: bool = True) -> None:
        if envs.layout != "stack":
            raise ValueError(f"flatten_agents() needs layout='stack', not {envs.layout!r}: rows must have equal spaces")
        self.envs = envs
        self.padding_done = padding_done
        self.num_agents = envs.num_agents
        self.num_envs = envs.num_envs * envs.num_agents
        self.metadata = envs.metadata
        self.render_mode = envs.render_mode
        self.single_observation_space = envs.single_observation_space
        self.single_action_space = envs.single_action_space
        self.observation_space = batch_space(self.single_observation_space, self.num_envs)
        self.action_space = batch_space(self.single_action_space, self.num_envs)
        self._tree = tree_of(self.single_observation_space, "observation")
        self._action_tree = tree_of(self.single_action_space, "actions")
        self._same_step = envs.autoreset_mode is AutoresetMode.SAME_STEP

    # -- reset and step ---------------------------------------------------------------------------------------------

    def reset(self, *, seed: Any = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Reset the environments; the pending answer to a step that timed out or was interrupted is dropped.

        Args:
            seed: An int seeds environment i with ``seed + i * seed_stride``; of a sequence of ``num_envs`` each environment
                gets that of its first row.
            options: Handed to every environment; ``"reset_mask"``, bool ``(num_envs,)``, must choose whole environments.

        Raises:
            ValueError, TypeError: Wrong length, type or shape, or a mask that splits an environment.
        """
        seeds = seed
        if seed is not None and not isinstance(seed, (int, np.integer)):
            if len(seed) != self.num_envs:
                raise ValueError(f"got {len(seed)} seeds for {self.num_envs} rows")
            seeds = list(seed)[:: self.num_agents]
        chosen = np.ones(self.num_envs, np.bool_)
        if options is not None and "reset_mask" in options:
            chosen = self._whole_envs(options["reset_mask"])
            options = {**options, "reset_mask": chosen[:: self.num_agents].copy()}
        obs, infos = dropping_pending(self.envs, lambda: self.envs.reset(seed=seeds, options=options))
        return self._rows(obs), self._flat(infos, chosen)

    def _whole_envs(self, mask: Any) -> Bools:
        if not isinstance(mask, np.ndarray):
            raise TypeError(f"`options['reset_mask']` must be a numpy array, got {type(mask)}")
        if mask.shape != (self.num_envs,):
            raise ValueError(f"`options['reset_mask']` must have shape ({self.num_envs},), got {mask.shape}")
        if mask.dtype != np.bool_:
            raise TypeError(f"`options['reset_mask']` must have dtype bool, got {mask.dtype}")
        if not mask.any():
            raise ValueError("`options['reset_mask']` chooses no environment")
        split = mask.reshape(-1, self.num_agents)
        torn = np.flatnonzero(split.any(axis=1) & ~split.all(axis=1)).tolist()
        if torn:
            raise ValueError(
                f"`options['reset_mask']` chooses some rows of envs {torn} and not others: all agents of an environment are "
                "reset together (infos['env_done'] tells when)"
            )
        return mask.copy()

    def step(self, actions: Any) -> tuple[Any, Array, Bools, Bools, dict[str, Any]]:
        """Step all environments: actions of ``action_space``; rows of padding may hold anything."""
        obs, rewards, terminations, truncations, infos = self.envs.step(self._split(actions, self._action_tree, "actions"))
        done = infos["env_done"]
        ended = terminations | truncations
        if self.padding_done and done.any():
            terminations |= done[:, None] & ~ended
            ended = terminations | truncations
        flat = self._flat(infos, np.ones(self.num_envs, np.bool_), obs, ended)
        return self._rows(obs), rewards.reshape(-1), terminations.reshape(-1), truncations.reshape(-1), flat

    def _split(self, actions: Any, tree: Tree, name: str) -> Any:
        """``(n * A, ...)`` to ``(n, A, ...)``, leaf by leaf."""
        if tree.leaf is not None:
            array = np.asarray(actions)
            if array.ndim == 0 or len(array) != self.num_envs:
                raise ValueError(f"{name}: got shape {array.shape}, wanted {self.num_envs} rows")
            return array.reshape(self.envs.num_envs, self.num_agents, *array.shape[1:])
        wanted = dict if tree.keyed else tuple
        if not isinstance(actions, wanted) or len(actions) != len(tree.children):
            raise ValueError(f"{name}: wanted a {wanted.__name__} of {[key for key, _ in tree.children]}")
        parts = [(key, self._split(actions[key], child, f"{name}[{key!r}]")) for key, child in tree.children]
        return dict(parts) if tree.keyed else tuple(part for _, part in parts)

    def _rows(self, obs: Any) -> Any:
        return self._tree.map(lambda leaf: leaf.reshape(self.num_envs, *leaf.shape[2:]), obs)

    # -- infos ------------------------------------------------------------------------------------------------------

    def _flat(self, infos: dict[str, Any], rows: Bools, obs: Any = None, ended: Bools | None = None) -> dict[str, Any]:
        """Infos of rows. ``rows``: whom they are about; ``obs`` and ``ended`` of a step."""
        last, last_mask = infos.pop("final_obs", None), infos.pop("_final_obs", None)
        final_info, _ = infos.pop("final_info", None), infos.pop("_final_info", None)
        out = self._flat_keys(infos, rows)
        ends = np.zeros(self.num_envs, np.bool_) if ended is None else ended.reshape(-1)
        if not (self._same_step and ends.any()) and last is None:
            return out
        whole = np.zeros(self.num_envs, np.bool_) if last_mask is None else np.repeat(last_mask, self.num_agents)
        final = ends if self._same_step else whole
        values = np.full(self.num_envs, None, dtype=object)
        for row in np.flatnonzero(final):
            source = self._rows(last if whole[row] else obs)
            values[row] = self._tree.map(lambda leaf, row=row: leaf[row].copy(), source)  # type: ignore[misc]
        out["final_obs"], out["_final_obs"] = values, final.copy()
        if self._same_step:
            out["final_info"] = {} if final_info is None else self._flat_keys(final_info, rows)
            out["_final_info"] = final.copy()
        return out

    def _flat_keys(self, infos: Mapping[Any, Any], rows: Bools) -> dict[str, Any]:
        out: dict[str, Any] = {}
        for key in own_keys(infos):
            value, mask = infos[key], infos.get(f"_{key}")
            if key == "common":
                out[key] = self._flat_keys(value, rows)
                masks = [out[key][f"_{name}"] for name in own_keys(out[key])]
                out[f"_{key}"] = np.logical_or.reduce(masks)
                continue
            of_agents = mask.ndim == 2 if mask is not None else key in ("agent_mask", "transition_mask", "action_mask")
            if isinstance(value, dict) and mask is None:  # action masks of different sizes: no array of rows
                continue
            out[key] = self._spread(value, of_agents)
            out[f"_{key}"] = rows.copy() if mask is None else self._spread(mask, of_agents)
        return out

    def _spread(self, value: Any, of_agents: bool) -> Any:
        if isinstance(value, dict):
            return {key: self._spread(inner, of_agents) for key, inner in value.items()}
        if of_agents:
            return value.reshape(self.num_envs, *value.shape[2:])
        return np.repeat(value, self.num_agents, axis=0)

    # -- the rest ---------------------------------------------------------------------------------------------------

    def call(self, name: str, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        """As of the environments, each result once for every agent."""
        return tuple(result for result in self.envs.call(name, *args, **kwargs) for _ in range(self.num_agents))

    def get_attr(self, name: str) -> tuple[Any, ...]:
        """As of the environments, each value once for every agent."""
        return self.call(name)

    def set_attr(self, name: str, values: Any) -> None:
        """Set an attribute of every environment; of a list of ``num_envs`` each gets that of its first row."""
        if isinstance(values, (list, tuple)):
            if len(values) != self.num_envs:
                raise ValueError(f"got {len(values)} values for {self.num_envs} rows")
            values = list(values)[:: self.num_agents]
        self.envs.set_attr(name, values)

    def render(self) -> tuple[Any, ...] | None:
        """One frame an environment (not a row)."""
        return self.envs.render()  # type: ignore[no-any-return]

    def stats(self) -> dict[str, float]:
        """Figures of the engine."""
        return self.envs.stats()  # type: ignore[no-any-return]

    def close_extras(self, **kwargs: Any) -> None:
        """Close the environments."""
        self.envs.close(**kwargs)

    def __repr__(self) -> str:
        name = f"{self.spec.id}, " if self.spec is not None else ""
        return f"FlattenAgents({name}num_envs={self.num_envs}, {self.envs!r})"
