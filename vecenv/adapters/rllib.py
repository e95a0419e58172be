"""RLlib's multi-agent runner over :class:`vecenv.MultiAgentVecEnv`.

RLlib vectorizes games of many agents only one after the other, in the runner's own process, and has no door for another
vector environment. ``MultiAgentVecEnvRunner`` is its runner with one method replaced, the one that makes the environment;
:func:`as_rllib` gives the shapes that the rest of the runner reads: a list with a dict of agents for each environment.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from operator import itemgetter
from typing import Any

import numpy as np
from gymnasium import spaces
from gymnasium.vector import AutoresetMode
from gymnasium.vector.utils import batch_space, concatenate, create_empty_array, iterate
from ray.rllib.callbacks.utils import make_callback
from ray.rllib.env.env_context import EnvContext
from ray.rllib.env.multi_agent_env import MultiAgentEnv
from ray.rllib.env.multi_agent_env_runner import MultiAgentEnvRunner
from ray.rllib.env.vector.vector_multi_agent_env import VectorMultiAgentEnv
from ray.tune.registry import ENV_CREATOR, _global_registry

from vecenv.adapters.single import reset_all
from vecenv.evaluating.policies import map_leaves
from vecenv.front.infos import own_keys
from vecenv.multi_agent import MultiAgentVecEnv
from vecenv.multi_agent.views import RESERVED, forwarding, row_of

__all__ = ["MultiAgentVecEnvRunner", "RLlibVectorEnv", "as_rllib"]

_COMMON = "__common__"  # RLlib's name for infos of no agent


def as_rllib(envs: MultiAgentVecEnv) -> RLlibVectorEnv:
    """An RLlib ``VectorMultiAgentEnv`` over games of many agents; closing it closes them.

    Args:
        envs: With next-step autoreset and ``copy=True``, the defaults; layout ``"stack"`` or ``"agents"``.

    Raises:
        TypeError: ``envs`` is no ``MultiAgentVecEnv``.
        ValueError: Another autoreset mode, ``copy=False``, or a layout of groups.
    """
    if not isinstance(envs, MultiAgentVecEnv):
        raise TypeError(f"RLlib's multi-agent runner wants a vecenv.MultiAgentVecEnv, got {envs!r}")
    if envs.autoreset_mode is not AutoresetMode.NEXT_STEP:
        raise ValueError(f"RLlib needs autoreset_mode='NextStep', got {envs.autoreset_mode.value!r}: leave it out")
    if getattr(envs._rows, "copy", True) is False:
        raise ValueError("RLlib needs copy=True: episodes keep observations that copy=False would overwrite")
    if envs.layout not in ("stack", "agents"):
        raise ValueError("RLlib maps agents to policies itself (policy_mapping_fn): leave the layout of groups out")
    return RLlibVectorEnv(envs)


@forwarding("vector_env", "call", "get_attr", "render")
class RLlibVectorEnv(VectorMultiAgentEnv):  # type: ignore[misc, unused-ignore]
    """What :func:`as_rllib` returns: lists with a dict of agents for each environment.

    An agent has an observation where it acts next, and in the step that ends its episode.

    Attributes:
        vector_env: The :class:`vecenv.MultiAgentVecEnv` beneath.
        envs: Agents and spaces of each environment, as RLlib asks for them. The environments live elsewhere.
    """

    def __init__(self, envs: MultiAgentVecEnv) -> None:
        super().__init__()
        self.vector_env = envs
        self.num_envs = envs.num_envs
        self.metadata = {**envs.metadata, "autoreset_mode": "next_step"}
        self.render_mode = envs.render_mode
        self._agents = list(envs.possible_agents)
        self.single_observation_spaces = self._by_agent(envs.single_observation_space)
        self.single_action_spaces = self._by_agent(envs.single_action_space)
        self.single_observation_space = spaces.Dict(self.single_observation_spaces)
        self.single_action_space = spaces.Dict(self.single_action_spaces)
        self.envs = [_Game(self) for _ in range(self.num_envs)]
        self._batches = {a: batch_space(s, self.num_envs) for a, s in self.single_observation_spaces.items()}
        self._idle = {
            agent: next(iter(iterate(batch_space(space, 1), create_empty_array(space, 1))))
            for agent, space in self.single_action_spaces.items()
        }

    def _by_agent(self, space: Any) -> dict[Any, Any]:
        return dict.fromkeys(self._agents, space) if self.vector_env.layout == "stack" else dict(space)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, Any]:
        """Begin an episode in every environment; environment i has the seed ``seed + i``."""
        obs, infos = reset_all(self.vector_env, seed, options)
        acting = infos["agent_mask"]
        return self._observations(obs, acting), self._infos(infos, acting)

    def step(self, actions: Sequence[Mapping[Any, Any]]) -> tuple[Any, Any, Any, Any, Any]:
        """Step all environments; those whose episodes were over begin their next one, whatever their actions.

        Raises:
            ValueError: An agent that has to act has no action; nothing was sent.
        """
        obs, rewards, terminated, truncated, infos = self.vector_env.step(self._actions(actions))
        acted, ended = infos["transition_mask"], terminated | truncated
        shown = infos["agent_mask"] | ended
        paid = acted | ended | (rewards != 0)
        done = infos["env_done"]
        cut = done & truncated.any(1)
        return (
            self._observations(obs, shown),
            self._dicts(rewards.tolist(), paid),
            self._flags(terminated, acted | ended, done & ~cut),
            # RLlib takes an episode whose agents were all truncated one by one for terminated: there `__all__` says it
            self._flags(truncated & ~done[:, None], acted | ended, cut),
            self._infos(infos, shown),
        )

    def _actions(self, actions: Sequence[Mapping[Any, Any]]) -> Any:
        """In the layout of the vector environment; an agent that does not act does anything."""
        acting = self.vector_env.agent_mask
        missing = [
            f"{agent!r} in env {i}"
            for i, given in enumerate(actions)
            for j, agent in enumerate(self._agents)
            if acting[i, j] and agent not in given
        ]
        if missing:
            raise ValueError(f"actions of agents are missing: {', '.join(missing)}; nothing was sent")
        batches = {}
        for agent, space in self.single_action_spaces.items():
            rows = [given.get(agent, self._idle[agent]) for given in actions]
            empty: Any = create_empty_array(space, len(rows))
            batches[agent] = concatenate(space, rows, empty)
        if self.vector_env.layout == "agents":
            return batches
        return map_leaves(lambda *leaves: np.stack(leaves, axis=1), *batches.values())

    def _observations(self, obs: Any, shown: Any) -> list[dict[Any, Any]]:
        found: list[dict[Any, Any]] = [{} for _ in range(self.num_envs)]
        for j, agent in enumerate(self._agents):
            own = map_leaves(itemgetter((slice(None), j)), obs) if self.vector_env.layout == "stack" else obs[agent]
            for row, value, there in zip(found, iterate(self._batches[agent], own), shown[:, j].tolist(), strict=True):
                if there:
                    row[agent] = value
        return found

    def _dicts(self, values: Any, mask: Any) -> list[dict[Any, Any]]:
        return [
            {agent: value for agent, value, there in zip(self._agents, row, rows, strict=True) if there}
            for row, rows in zip(values, mask.tolist(), strict=True)
        ]

    def _flags(self, flags: Any, mask: Any, of_all: Any) -> list[dict[Any, Any]]:
        rows = self._dicts(flags.tolist(), mask)
        return [{**row, "__all__": every} for row, every in zip(rows, of_all.tolist(), strict=True)]

    def _infos(self, infos: Mapping[str, Any], shown: Any) -> list[dict[Any, Any]]:
        found = self._dicts([[{} for _ in self._agents] for _ in range(self.num_envs)], shown)
        for key in own_keys(infos):
            value, given = infos[key], infos.get(f"_{key}")
            if key == "action_mask":
                by_agent = [value[agent] if isinstance(value, dict) else value[:, j] for j, agent in enumerate(self._agents)]
                for i, j in np.argwhere(infos["agent_mask"]).tolist():
                    found[i][self._agents[j]][key] = by_agent[j][i]
            elif key == "common":
                for i, row in enumerate(found):
                    if own := row_of(value, i):
                        row[_COMMON] = own
            elif key not in RESERVED and getattr(given, "ndim", 0) == 2:
                for i, j in np.argwhere(given & shown).tolist():
                    found[i][self._agents[j]][key] = row_of(value, (i, j))
        return found

    def close_extras(self, **kwargs: Any) -> None:
        """Close the environments."""
        self.vector_env.close()


class _Game(MultiAgentEnv):  # type: ignore[misc, unused-ignore]
    """Agents and spaces of one environment; spaces of its own, so that each can be seeded."""

    def __init__(self, envs: RLlibVectorEnv) -> None:
        super().__init__()
        self.possible_agents = self.agents = list(envs._agents)
        self.observation_spaces = envs.single_observation_spaces
        self.action_spaces = {agent: copy.deepcopy(space) for agent, space in envs.single_action_spaces.items()}
        self.render_mode = envs.render_mode


class MultiAgentVecEnvRunner(MultiAgentEnvRunner):  # type: ignore[misc, unused-ignore]
    """RLlib's multi-agent runner over :class:`vecenv.MultiAgentVecEnv`: ``config.env_runners(env_runner_cls=...)``.

    The function given to ``register_env`` (or to ``config.environment``) builds the vector environment;
    ``context["num_envs"]`` is ``num_envs_per_env_runner``.

    Raises:
        ValueError: No function is registered under the name, or it builds another number of environments.
        TypeError: It builds something else.
    """

    env: Any

    def make_env(self) -> None:
        """Build the environments by the registered function, in the place of those that were there."""
        if self.env is not None:
            self.env.close()
            self.env = None
        config = self.config
        wanted = config.num_envs_per_env_runner
        context = EnvContext(
            {**config.env_config, "num_envs": wanted},
            worker_index=self.worker_index or 0,
            num_workers=config.num_env_runners,
        )
        build = config.env
        if isinstance(build, str):
            if not _global_registry.contains(ENV_CREATOR, build):
                raise ValueError(f"ray.tune.registry.register_env({build!r}, function) comes first: it says how to build it")
            build = _global_registry.get(ENV_CREATOR, build)
        self.env = as_rllib(build(context))
        self.num_envs = self.env.num_envs
        if self.num_envs != wanted:
            self.env.close()
            raise ValueError(f"num_envs_per_env_runner is {wanted}, and {config.env!r} built {self.num_envs}")
        self._needs_initial_reset = True
        make_callback(
            "on_environment_created",
            callbacks_objects=self._callbacks,
            callbacks_functions=config.callbacks_on_environment_created,
            kwargs={"env_runner": self, "metrics_logger": self.metrics, "env": self.env, "env_context": context},
        )
