"""RLlib's multi-agent runner over :class:`vecenv.MultiAgentVecEnv`.

RLlib steps vectorized multi-agent environments one after the other in the runner's own process, and has no option for
another vector environment. ``MultiAgentVecEnvRunner`` is RLlib's runner with one method replaced, ``make_env``.
:func:`as_rllib` provides the format that the rest of the runner reads: a list with one dict of agents per environment.
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

from vecenv.evaluating.policies import map_leaves
from vecenv.front.driver import drop_pending_and_retry
from vecenv.multi_agent import MultiAgentVecEnv
from vecenv.multi_agent.views import forwarding

__all__ = ["MultiAgentVecEnvRunner", "RLlibVectorEnv", "as_rllib"]

_COMMON = "__common__"  # RLlib's key for infos that belong to no agent


def as_rllib(envs: MultiAgentVecEnv) -> RLlibVectorEnv:
    """Wrap a multi-agent vector environment in an RLlib ``VectorMultiAgentEnv``; closing the wrapper closes ``envs``.

    Args:
        envs: A vector environment with next-step autoreset and ``copy=True`` (the defaults), and layout ``"stack"`` or
            ``"agents"``.

    Raises:
        TypeError: ``envs`` is not a ``MultiAgentVecEnv``.
        ValueError: Another autoreset mode, ``copy=False``, or a layout of groups.
    """
    if not isinstance(envs, MultiAgentVecEnv):
        raise TypeError(f"RLlib's multi-agent runner needs a vecenv.MultiAgentVecEnv, got {envs!r}")
    if envs.autoreset_mode is not AutoresetMode.NEXT_STEP:
        raise ValueError(f"RLlib needs autoreset_mode='NextStep', got {envs.autoreset_mode.value!r}: use the default")
    if getattr(envs._rows, "copy", True) is False:
        raise ValueError("RLlib needs copy=True: episodes keep observations that copy=False would overwrite")
    if envs.layout not in ("stack", "agents"):
        raise ValueError("RLlib maps agents to policies itself (policy_mapping_fn): do not pass a layout of groups")
    return RLlibVectorEnv(envs)


@forwarding("vector_env", "call", "get_attr", "render")
class RLlibVectorEnv(VectorMultiAgentEnv):  # type: ignore[misc, unused-ignore]
    """An RLlib vector environment, built by :func:`as_rllib`, with one dict of agents per environment.

    An agent has an observation if it acts next, and in the step that ends its episode.

    Attributes:
        vector_env: The wrapped :class:`vecenv.MultiAgentVecEnv`.
        envs: Objects with the agents and spaces of each environment, for RLlib to read; not the environments themselves.
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
        self.envs = [_EnvSpaces(self) for _ in range(self.num_envs)]
        self._batch_spaces = {
            agent: batch_space(space, self.num_envs) for agent, space in self.single_observation_spaces.items()
        }
        self._placeholder_actions = {
            agent: next(iter(iterate(batch_space(space, 1), create_empty_array(space, 1))))
            for agent, space in self.single_action_spaces.items()
        }

    def _by_agent(self, space: Any) -> dict[Any, Any]:
        return dict.fromkeys(self._agents, space) if self.vector_env.layout == "stack" else dict(space)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, Any]:
        """Begin an episode in every environment; environment i gets the seed ``seed + i * seed_stride``."""

        def begin() -> Any:
            self.vector_env.reset_async(seed=seed, options=options)
            return self.vector_env.results_by_row("reset_wait")

        (obs, infos), env_infos = drop_pending_and_retry(self.vector_env, begin)
        acting = infos["agent_mask"]
        return self._observations(obs, acting), self._infos(infos, env_infos, acting)

    def step(self, actions: Sequence[Mapping[Any, Any]]) -> tuple[Any, Any, Any, Any, Any]:
        """Step all environments; those with an ended episode begin the next one and ignore their actions.

        Raises:
            ValueError: An action is missing for an agent that must act; nothing was sent.
        """
        self.vector_env.step_async(self._actions(actions))
        (obs, rewards, terminated, truncated, infos), env_infos = self.vector_env.results_by_row("step_wait")
        acted, ended = infos["transition_mask"], terminated | truncated
        visible = infos["agent_mask"] | ended
        has_reward = acted | ended | (rewards != 0)
        done = infos["env_done"]
        ends_truncated = done & truncated.any(1)
        return (
            self._observations(obs, visible),
            self._agent_dicts(rewards.tolist(), has_reward),
            self._flags(terminated, acted | ended, done & ~ends_truncated),
            # if all agents had flags, RLlib would also count the episode as terminated, so only `__all__` marks a truncation
            self._flags(truncated & ~done[:, None], acted | ended, ends_truncated),
            self._infos(infos, env_infos, visible),
        )

    def _actions(self, actions: Sequence[Mapping[Any, Any]]) -> Any:
        """Return the actions in the layout of the vector environment, with placeholders for agents without an action."""
        acting = self.vector_env.agent_mask
        missing = [
            f"{agent!r} in env {i}"
            for i, env_actions in enumerate(actions)
            for j, agent in enumerate(self._agents)
            if acting[i, j] and agent not in env_actions
        ]
        if missing:
            raise ValueError(f"actions of agents are missing: {', '.join(missing)}; nothing was sent")
        batches = {}
        for agent, space in self.single_action_spaces.items():
            rows = [env_actions.get(agent, self._placeholder_actions[agent]) for env_actions in actions]
            empty: Any = create_empty_array(space, len(rows))
            batches[agent] = concatenate(space, rows, empty)
        if self.vector_env.layout == "agents":
            return batches
        return map_leaves(lambda *leaves: np.stack(leaves, axis=1), *batches.values())

    def _observations(self, obs: Any, visible: Any) -> list[dict[Any, Any]]:
        by_env: list[dict[Any, Any]] = [{} for _ in range(self.num_envs)]
        for j, agent in enumerate(self._agents):
            batch = map_leaves(itemgetter((slice(None), j)), obs) if self.vector_env.layout == "stack" else obs[agent]
            flags = visible[:, j].tolist()
            for row, value, is_visible in zip(by_env, iterate(self._batch_spaces[agent], batch), flags, strict=True):
                if is_visible:
                    row[agent] = value
        return by_env

    def _agent_dicts(self, values: Any, mask: Any) -> list[dict[Any, Any]]:
        """Return one dict of agents per environment, with the values of the agents that ``mask`` selects."""
        return [
            {agent: value for agent, value, selected in zip(self._agents, row, flags, strict=True) if selected}
            for row, flags in zip(values, mask.tolist(), strict=True)
        ]

    def _flags(self, flags: Any, mask: Any, episode_flags: Any) -> list[dict[Any, Any]]:
        """Return flags as :meth:`_agent_dicts` does, with ``episode_flags`` under RLlib's key for the episode."""
        rows = self._agent_dicts(flags.tolist(), mask)
        return [{**row, "__all__": episode_flag} for row, episode_flag in zip(rows, episode_flags.tolist(), strict=True)]

    def _infos(self, infos: Mapping[str, Any], env_infos: Sequence[Mapping[str, Any]], visible: Any) -> list[dict[Any, Any]]:
        """Return one dict per environment: infos of visible agents, common infos, and action masks of agents that act."""
        by_env = self._agent_dicts([[{} for _ in self._agents] for _ in range(self.num_envs)], visible)
        for row, env_info in zip(by_env, env_infos, strict=True):
            for j, info in env_info.get("agents", {}).items():
                if self._agents[j] in row:
                    row[self._agents[j]].update(info)
            if "common" in env_info:
                row[_COMMON] = env_info["common"]
        if (masks := infos.get("action_mask")) is not None:
            by_agent = [masks[agent] if isinstance(masks, dict) else masks[:, j] for j, agent in enumerate(self._agents)]
            for i, j in np.argwhere(infos["agent_mask"]).tolist():
                by_env[i][self._agents[j]]["action_mask"] = by_agent[j][i]
        return by_env

    def close_extras(self, **kwargs: Any) -> None:
        """Close the environments."""
        self.vector_env.close()


class _EnvSpaces(MultiAgentEnv):  # type: ignore[misc, unused-ignore]
    """The agents and spaces of one environment. Action spaces are copies, to be seeded separately."""

    def __init__(self, envs: RLlibVectorEnv) -> None:
        super().__init__()
        self.possible_agents = self.agents = list(envs._agents)
        self.observation_spaces = envs.single_observation_spaces
        self.action_spaces = {agent: copy.deepcopy(space) for agent, space in envs.single_action_spaces.items()}
        self.render_mode = envs.render_mode


class MultiAgentVecEnvRunner(MultiAgentEnvRunner):  # type: ignore[misc, unused-ignore]
    """An RLlib multi-agent runner over :class:`vecenv.MultiAgentVecEnv`: ``config.env_runners(env_runner_cls=...)``.

    The function given to ``register_env`` (or to ``config.environment``) builds the vector environment;
    ``context["num_envs"]`` is ``num_envs_per_env_runner``.

    Raises:
        ValueError: No function is registered under the name, it builds another number of environments, or :func:`as_rllib`
            refuses them.
        TypeError: The function does not build a ``MultiAgentVecEnv``.
    """

    env: Any

    def make_env(self) -> None:
        """Close the current environments, if any, and build new ones with the registered function."""
        if self.env is not None:
            self.env.close()
            self.env = None
        config = self.config
        num_envs = config.num_envs_per_env_runner
        context = EnvContext(
            {**config.env_config, "num_envs": num_envs},
            worker_index=self.worker_index or 0,
            num_workers=config.num_env_runners,
        )
        build = config.env
        if isinstance(build, str):
            if not _global_registry.contains(ENV_CREATOR, build):
                raise ValueError(f"{build!r} is not registered: call ray.tune.registry.register_env({build!r}, function)")
            build = _global_registry.get(ENV_CREATOR, build)
        self.env = as_rllib(build(context))
        self.num_envs = self.env.num_envs
        if self.num_envs != num_envs:
            self.env.close()
            raise ValueError(f"num_envs_per_env_runner is {num_envs}, but {config.env!r} built {self.num_envs} environments")
        self._needs_initial_reset = True
        make_callback(
            "on_environment_created",
            callbacks_objects=self._callbacks,
            callbacks_functions=config.callbacks_on_environment_created,
            kwargs={"env_runner": self, "metrics_logger": self.metrics, "env": self.env, "env_context": context},
        )
