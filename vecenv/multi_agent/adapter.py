"""Adapts multi-agent environments, inside the workers, to Gymnasium environments with one observation of fixed size.

The engine steps environments that return one observation, one reward and two flags. :class:`AgentsEnv` turns a PettingZoo
parallel environment into such an environment. Its observation holds the observations, rewards, flags and masks of all agents
(see :meth:`vecenv.multi_agent.roster.Roster.observation_space`) and is written directly into shared memory. The flags that
``step`` returns are those of the episode. This module decides which agents are alive, which must act, and which rows are
padding.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from operator import itemgetter
from typing import Any, Final, TypeAlias

import gymnasium
import numpy as np
from gymnasium import spaces

from vecenv.errors import ObservationError
from vecenv.link.messages import copy_if_possible
from vecenv.link.observations import flatten, make_observation_writer
from vecenv.multi_agent.roster import AgentGroup, Roster, build_tree, map_space, zeros
from vecenv.shm import Tree
from vecenv.shm.layout import Array
from vecenv.system import reporting

# -- environments with other conventions -------------------------------------------------------------------------------
#
# * :func:`from_aec`: turn-based games (PettingZoo's AEC interface);
# * :class:`StackedAgents`: environments with ``agent_num`` and arrays with an axis of agents instead of dicts;
# * :class:`RLlibGame`: RLlib's ``MultiAgentEnv``;
# * :class:`OneAgent`: Gymnasium environments.
#
# The rest of the package uses only PettingZoo's convention and, if an adapter has them, the attributes ``agents_to_act``
# and ``num_step_values``.
# This module does not import RLlib, and imports PettingZoo only to convert a parallelizable AEC game.

ALL_AGENTS: Final = "__all__"
"""RLlib's key for the flag of all agents, in a dict of flags."""

Step: TypeAlias = tuple[Any, Any, Any, Any, Any]

MASK_KEYS: Final = ("action_mask", "action_masks")
"""Keys of an info that hold an action mask."""


def as_parallel(env: Any) -> Any:
    """Wrap an RLlib, ``agent_num`` or Gymnasium environment in its adapter; return any other unchanged."""
    inner = getattr(env, "unwrapped", env)
    has_getter, has_space = (callable(getattr(inner, name, None)) for name in ("get_observation_space", "observation_space"))
    if has_getter and not has_space and (hasattr(inner, "possible_agents") or hasattr(inner, "observation_spaces")):
        return RLlibGame(env)
    if getattr(env, "possible_agents", None) is not None:
        return env
    if _agent_num(env):
        return StackedAgents(env)
    return OneAgent(env) if isinstance(env, gymnasium.Env) else env


def _agent_num(env: Any) -> int:
    value = getattr(env, "agent_num", 0)
    return max(int(value), 0) if isinstance(value, (int, np.integer)) else 0


def from_aec(env: Any) -> Any:
    """Convert a PettingZoo AEC environment to a parallel one.

    If ``env.metadata["is_parallelizable"]`` is true, PettingZoo's own ``aec_to_parallel`` converts it; every other game is
    treated as turn based (:class:`TurnBased`).
    """
    if (getattr(env, "metadata", None) or {}).get("is_parallelizable", False):
        from pettingzoo.utils.conversions import aec_to_parallel

        return aec_to_parallel(env)
    return TurnBased(env)


class AgentsAdapter:
    """The base class of adapters: provides agents and their spaces, and forwards other attributes to ``env``."""

    agents: Any = ()

    def __init__(self, env: Any, possible_agents: Any) -> None:
        self.env = env
        self.possible_agents = list(possible_agents)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name == "env":
            raise AttributeError(name)
        return getattr(self.env, name)

    @property
    def unwrapped(self) -> Any:
        """The environment without its wrappers."""
        return getattr(self.env, "unwrapped", self.env)

    def observation_space(self, agent: Any) -> Any:
        """Return the observation space of one agent."""
        return self._space("observation_space", agent)

    def action_space(self, agent: Any) -> Any:
        """Return the action space of one agent."""
        return self._space("action_space", agent)

    def _space(self, name: str, agent: Any) -> Any:
        """Return an agent's space, from a method or from an attribute that all agents share."""
        found = getattr(self.env, name)
        return found(agent) if callable(found) else found

    def _finish_step(self, observations: Any, rewards: Any, terminations: Any, truncations: Any, infos: Any) -> Step:
        """Remove terminated and truncated agents from ``agents``, and return the results of ``step``."""
        self.agents = [name for name in self.agents if not (terminations.get(name, False) or truncations.get(name, False))]
        return observations, rewards, terminations, truncations, infos

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.env})"


class TurnBased(AgentsAdapter):
    """A turn-based game: every step is one agent's move.

    ``agents_to_act`` holds the agent to move. In ``MultiAgentVecEnv``, only this agent has a True ``agent_mask``, and after
    its move a True ``transition_mask``. Every step returns observations and rewards for all agents in the game, so an agent
    that did not move can have a reward too, for example if another agent's move made it lose. Its ``transition_mask`` is
    then False, and the reward belongs to its last move.
    """

    def __init__(self, env: Any) -> None:
        super().__init__(env, env.possible_agents)

    @property
    def agents(self) -> list[Any]:
        """The agents that are still in the game."""
        game = self.env
        return [agent for agent in game.agents if not (game.terminations[agent] or game.truncations[agent])]

    @property
    def agents_to_act(self) -> tuple[Any, ...]:
        """The agent to move, in a tuple; empty before the first reset and after the game."""
        return (self.env.agent_selection,) if getattr(self.env, "agents", None) else ()

    def reset(self, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, Any]:
        """Start a game; return the observations and infos of all agents."""
        self.env.reset(seed=seed, options=options)
        self._skip_dead_agents()
        return {agent: self.env.observe(agent) for agent in self.agents}, dict(self.env.infos)

    def step(self, actions: Mapping[Any, Any]) -> Step:
        """Make one move; return the results of all agents that were in the game before or after it."""
        game = self.env
        before, mover = list(game.agents), game.agent_selection
        if mover not in actions:
            raise ValueError(f"agent {mover!r} is next, but its action is missing")
        game.step(actions[mover])
        involved = [*before, *(agent for agent in game.agents if agent not in before)]
        rewards, terminations, truncations, infos = (
            {agent: values[agent] for agent in involved if agent in values}
            for values in (game.rewards, game.terminations, game.truncations, game.infos)
        )
        observations = {agent: game.observe(agent) for agent in involved if agent in game.agents}
        self._skip_dead_agents()
        return observations, rewards, terminations, truncations, infos

    def _skip_dead_agents(self) -> None:
        """Pass ``None`` as the action of each terminated or truncated agent, as AEC games require."""
        game = self.env
        while game.agents and (game.terminations[game.agent_selection] or game.truncations[game.agent_selection]):
            game.step(None)


class StackedAgents(AgentsAdapter):
    """An environment with ``agent_num``: ``A`` agents with one space, and arrays with an axis of agents.

    Its ``reset`` returns observations ``[A, *s]``, with or without an info; in ``Dict`` and ``Tuple`` spaces every leaf has
    the axis of agents. Its ``step`` takes actions ``[A, *a]`` and returns four values (observations, rewards ``[A]`` or
    ``[A, 1]``, dones ``[A]``, info) or five. Agents are named ``agent_0`` and so on. An info dict's ``"action_masks"``
    ``[A, k]`` become the agents' masks. All its values but ``"final_observation"`` are common infos. An info list has one
    info per agent.

    An environment with a true ``has_auto_reset`` has already begun its next episode when it reports the end of one:
    ``info["final_observation"]`` is then the last observation, and the next reset without a seed or options returns the
    observation and the info of that step. Observations of a ``Discrete`` space may be one-hot rows.
    """

    def __init__(self, env: Any) -> None:
        self.agent_num = _agent_num(env)
        super().__init__(env, [f"agent_{index}" for index in range(self.agent_num)])
        self._next_episode: Any = None  # the first results of an episode that the environment began itself
        self.num_step_values = 0  # the number of values that the latest step returned

    def reset(self, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, Any]:
        """Start an episode with all agents."""
        if self._next_episode is not None and seed is None and not options:
            observations, info = self._next_episode
        else:
            arguments = {"seed": seed, "options": options or None}
            observations, info = self._parse_reset(self.env.reset(**{k: v for k, v in arguments.items() if v is not None}))
        self._next_episode = None
        self.agents = list(self.possible_agents)
        return self._split_by_agent(observations), self._parse_info(info)

    def step(self, actions: Mapping[Any, Any]) -> Step:
        """Step all agents; an agent that is done stays in the environment's arrays, but leaves ``agents``."""
        no_action = np.zeros_like(np.asarray(next(iter(actions.values()))))  # for agents that are done
        result = self.env.step(np.stack([np.asarray(actions.get(agent, no_action)) for agent in self.possible_agents]))
        self.num_step_values = len(result)
        if self.num_step_values not in (4, 5):
            raise ValueError(f"step must return four or five values, got {self.num_step_values}")
        observations, rewards, *flags, info = result
        ended = [np.broadcast_to(np.asarray(flag, np.bool_).ravel(), self.agent_num) for flag in flags]
        if self.num_step_values == 4:
            truncated = ended[0] & self._time_limit_reached(info)
            ended = [ended[0] & ~truncated, truncated]
        done = ended[0] | ended[1]
        if getattr(self.env, "has_auto_reset", False) and done.all():
            self._next_episode = (observations, info)
            last = info.get("final_observation") if isinstance(info, dict) else None
            observations = observations if last is None else last
        rewards, terminated, truncated = (
            dict(zip(self.possible_agents, column.tolist(), strict=True))
            for column in (np.asarray(rewards).reshape(self.agent_num), *ended)
        )
        return self._finish_step(self._split_by_agent(observations), rewards, terminated, truncated, self._parse_info(info))

    def _time_limit_reached(self, info: Any) -> Any:
        infos = info if isinstance(info, (list, tuple)) else [info] * self.agent_num
        return np.array([bool(isinstance(one, dict) and one.get("TimeLimit.truncated", False)) for one in infos])

    def _parse_reset(self, result: Any) -> tuple[Any, Any]:
        """Parse the result of ``reset``, which may lack the info, and may have the observations in a tuple of length one."""
        with_info = isinstance(result, tuple) and len(result) == 2 and isinstance(result[1], (dict, list))
        is_tuple_space = isinstance(self.env.observation_space, spaces.Tuple)
        if with_info and is_tuple_space:  # without an info, the observations are a tuple too, which may end in a dict
            with_info = isinstance(result[0], tuple)
        observations, info = result if with_info else (result, {})
        has_length_one = isinstance(observations, tuple) and len(observations) == 1
        if has_length_one and (not is_tuple_space or (not with_info and isinstance(observations[0], tuple))):
            return observations[0], info
        return observations, info

    def _split_by_agent(self, observations: Any) -> dict[str, Any]:
        """Split a structure with an axis of agents in its leaves into one observation per agent."""
        space = self.env.observation_space
        rows = map_space(self._leaf_rows, space, observations)

        def select_agent(index: int) -> Any:
            return map_space(lambda _, leaf: leaf[index], space, rows)

        return {agent: select_agent(index) for index, agent in enumerate(self.possible_agents)}

    def _leaf_rows(self, space: spaces.Space[Any], observations: Any) -> Any:
        """Return a leaf with one row per agent; one-hot rows of a ``Discrete`` leaf become numbers."""
        if not isinstance(space, spaces.Discrete):
            return observations
        array = np.asarray(observations).reshape(self.agent_num, -1)
        is_one_hot = array.shape[1] == space.n and space.n > 1
        return space.start + array.argmax(axis=1) if is_one_hot else array.reshape(self.agent_num)

    def _parse_info(self, info: Any) -> dict[Any, Any]:
        if isinstance(info, (list, tuple)):
            return dict(zip(self.possible_agents, info, strict=True))
        common = {key: value for key, value in (info or {}).items() if key != "final_observation"}
        masks = common.get("action_masks")
        return _join_infos(common, {} if masks is None else dict(zip(self.possible_agents, masks, strict=True)))


class OneAgent(AgentsAdapter):
    """A Gymnasium environment with the single agent ``agent_0``.

    Its infos are common infos; an ``"action_mask"`` or ``"action_masks"`` among them is also the agent's mask.
    """

    num_step_values = 5

    def __init__(self, env: gymnasium.Env[Any, Any]) -> None:
        super().__init__(env, ["agent_0"])

    def reset(self, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, Any]:
        """Start an episode."""
        observation, info = self.env.reset(seed=seed, options=options)
        self.agents = ["agent_0"]
        return {"agent_0": observation}, self._parse_info(info)

    def step(self, actions: Mapping[Any, Any]) -> Step:
        """Step the environment."""
        *values, info = self.env.step(actions["agent_0"])
        observations, rewards, terminations, truncations = ({"agent_0": value} for value in values)
        return self._finish_step(observations, rewards, terminations, truncations, self._parse_info(info))

    def _parse_info(self, info: Mapping[Any, Any]) -> dict[Any, Any]:
        masks = [info[key] for key in MASK_KEYS if key in info]
        return _join_infos(dict(info), {"agent_0": masks[-1]} if masks else {})


class RLlibGame(AgentsAdapter):
    """RLlib's ``MultiAgentEnv``: agents with an observation act next, and ``"__all__"`` ends the episode of all agents.

    The results of a step determine which agents are in the game and which act next, because RLlib's list of agents is not
    reliable. An agent in the game without an observation waits: it keeps its last observation and does not act.
    ``infos["__common__"]`` holds infos of the environment. A missing reward is 0.
    """

    def __init__(self, env: Any) -> None:
        inner = getattr(env, "unwrapped", env)
        super().__init__(env, getattr(inner, "possible_agents", None) or inner.observation_spaces or ())
        self.agents_to_act: tuple[Any, ...] = ()
        self._latest: dict[Any, Any] = {}

    def _space(self, name: str, agent: Any) -> Any:
        return getattr(self.unwrapped, f"get_{name}")(agent)

    def reset(self, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, Any]:
        """Start an episode; agents with an observation are in the game, and act."""
        observations, infos = self.env.reset(seed=seed, options=options)
        self._latest = copy_if_possible(dict(observations))  # a game may reuse its arrays
        self.agents = list(observations)
        self.agents_to_act = tuple(observations)
        return observations, self._parse_info(infos)

    def step(self, actions: Mapping[Any, Any]) -> Step:
        """Step the agents that act."""
        observations, rewards, terminations, truncations, infos = self.env.step(dict(actions))
        agents_in_game = [*self.agents, *(agent for agent in observations if agent not in self.agents)]
        self._latest.update(copy_if_possible(observations))
        current_observations = {agent: self._latest[agent] for agent in agents_in_game}
        agent_rewards = {agent: rewards.get(agent, 0.0) for agent in agents_in_game}
        self.agents = [] if terminations.get(ALL_AGENTS, False) or truncations.get(ALL_AGENTS, False) else agents_in_game
        stepped = self._finish_step(current_observations, agent_rewards, terminations, truncations, self._parse_info(infos))
        self.agents_to_act = tuple(agent for agent in self.agents if agent in observations)
        return stepped

    def _parse_info(self, infos: Mapping[Any, Any] | None) -> dict[Any, Any]:
        by_agent = dict(infos or {})
        return {**by_agent.pop("__common__", {}), **by_agent}


def _join_infos(common: dict[Any, Any], masks: Mapping[Any, Any]) -> dict[Any, Any]:
    """Return infos with the common infos of an environment and the action masks of its agents."""
    return {**({"common": common} if common else {}), **{agent: {"action_mask": mask} for agent, mask in masks.items()}}


_PLAIN_REWARD_TYPES = frozenset({float, int, bool, np.float64, np.float32, np.float16, np.int64, np.int32})


@dataclass(eq=False, repr=False)
class EnvFn:
    """An ``env_fn`` for the engine: builds environment ``index`` and wraps it in an :class:`AgentsEnv`."""

    env_fn: Callable[[], Any]
    index: int
    roster: Roster

    def __call__(self) -> AgentsEnv:
        return AgentsEnv(as_parallel(self.env_fn()), self.index, self.roster)


class AgentsEnv(gymnasium.Env[Any, Any]):
    """A parallel environment as a Gymnasium environment with one observation for all agents.

    Args:
        env: The parallel environment.
        index: Its index in the vector environment, for error messages.
        roster: The agents and spaces it must have, and their layout.
    """

    def __init__(self, env: Any, index: int, roster: Roster) -> None:
        self.env = env
        self.index = index
        self.roster = roster
        self.problems = roster.problems(env)
        self.metadata = getattr(env, "metadata", None) or {}
        self.render_mode = getattr(env, "render_mode", None)
        self.observation_space = roster.observation_space()
        self.action_space = roster.action_space()
        self._names = roster.agents
        self._agent_names = frozenset(roster.agents)
        self._action_pickers = [_action_picker(part, place) for part, place in roster.places()]
        self._begin_episode()
        self._takes_turns = hasattr(env, "agents_to_act")
        self._all_agents = list(roster.agents)
        first = roster.parts[0]
        self._can_zip_actions = roster.layout == "stack" and build_tree(first.action_space, "action").leaf is not None
        self._tree = build_tree(self.observation_space, "observation")
        self._has_scalars = any(leaf.shape == () for leaf in self._tree.leaves())
        self._needs_building = self._has_scalars or roster.state_space is not None
        self._attach_memory(zeros(self._tree))

    def observation_buffer(self, row: dict[str, Any]) -> None:
        """Write all further observations into ``row``, which is the engine's shared memory."""
        self._attach_memory(row)

    def _attach_memory(self, row: dict[str, Any]) -> None:
        roster = self.roster
        self._row = row
        self._rewards: Any = memoryview(row["signals"][0])  # assigns a number three times as fast as an array
        self._flags = row["signals"][1:]  # in the order of FLAGS in roster.py
        self._force_full_write()
        self._observation_writers: list[Callable[[Any], None]] = []
        self._leaves: list[list[Array]] = []
        # (name, cells, writer) of each agent that observes one array
        self._single_arrays: list[tuple[Any, Any, Callable[[Any], None]]] = []
        for (part, place), name in zip(roster.places(), self._names, strict=True):
            tree = build_tree(part.observation_space, "observation")
            row_observations = row["obs"] if roster.layout == "stack" else row["obs"][part.key]
            leaves = flatten(build_tree(part.stack_space(part.observation_space), "observation"), row_observations)
            leaves = leaves if part.has_axis else [leaf[None] for leaf in leaves]
            self._observation_writers.append(self._make_writer(tree, leaves, place, name))
            self._leaves.append([leaf[place : place + 1] for leaf in leaves])
            if tree.leaf is not None:
                cells = memoryview(leaves[0][place]) if tree.leaf.flat else None
                self._single_arrays.append((name, cells, self._observation_writers[-1]))
        if roster.state_space is not None:
            tree = build_tree(roster.state_space, "state")
            self._write_state = self._make_writer(tree, [leaf[None] for leaf in flatten(tree, row["state"])], 0, None)

    def _force_full_write(self) -> None:
        """Make the next reset or step write every flag and all padding, regardless of the memory's contents."""
        self._written_flags: Any = None
        self._may_be_ordinary = False  # True if the next step may be one for `_apply_ordinary_step`
        self._needs_padding = [True] * len(self._names)

    def _begin_episode(self) -> None:
        self._alive, self._acting, self._dead = ([False] * len(self._names) for _ in range(3))
        self._truncated = False  # True if an agent was truncated in this episode

    def _make_writer(self, tree: Tree, leaves: list[Array], place: int, agent: Any) -> Callable[[Any], None]:
        """Return a function that checks and writes one agent's observation, or the state if ``agent`` is ``None``."""
        name = f"env {self.index}" if agent is None else f"env {self.index}, agent {agent!r}"

        def warn(field: str, text: str) -> None:
            reporting.warn(f"{name}: {text.partition(': ')[2]}", RuntimeWarning)

        write_row = make_observation_writer(tree, leaves, self.index - place, warn)

        def write(value: Any) -> None:
            try:
                write_row(place, value)
            except ObservationError as error:
                raise ObservationError(f"{name}: {str(error).partition(': ')[2]}") from error.__cause__

        return write

    def take_snapshot(self) -> Any:
        """Return the flags of the agents and of the episode; the wrapped environment saves its own state."""
        return self._alive[:], self._acting[:], self._dead[:], self._truncated

    def restore_snapshot(self, state: Any) -> None:
        """Continue from the result of :meth:`take_snapshot`."""
        *lists, self._truncated = state
        self._alive, self._acting, self._dead = ([*each] for each in lists)
        self._force_full_write()

    # -- reset and step ---------------------------------------------------------------------------------------------

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Start an episode."""
        if self.problems:
            raise ValueError(f"env {self.index}: {'; '.join(self.problems)}")
        result = self.env.reset(seed=seed, options=options)
        if not isinstance(result, tuple) or len(result) != 2:
            raise ValueError(f"env {self.index}: reset must return (observations, infos), got {_describe_type(result)}")
        observations, infos = result
        self._force_full_write()
        present = self._present_agents()
        if not present:
            raise ValueError(f"env {self.index}: there are no agents after a reset (`env.agents` is empty)")
        self._begin_episode()
        self._apply_results(present, {name: observations[name] for name in present if name in observations}, {}, {}, {})
        self._acting = self._read_acting()
        all_false = [False] * len(self._names)
        self._write_signals(all_false, all_false, all_false, all_false)
        return self._build_observation(), self._parse_infos(infos)

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Step all agents that act; the actions of others are ignored."""
        acting = self._acting
        if self._may_be_ordinary and self._can_zip_actions:
            actions = dict(zip(self._names, action))  # noqa: B905 - the engine checks the length; `strict` takes 10% longer
        else:
            pickers = zip(self._names, acting, self._action_pickers, strict=True)
            actions = {name: pick(action) for name, acts, pick in pickers if acts}
        result = self.env.step(actions)
        if not isinstance(result, tuple) or len(result) != 5:
            raise ValueError(f"env {self.index}: step must return five dicts, got {_describe_type(result)}")
        if self._may_be_ordinary and self._apply_ordinary_step(result):
            return self._build_observation() if self._needs_building else self._row, 0.0, False, False, {}
        observations, rewards, terminations, truncations, infos = result
        present = self._present_agents()
        if not (rewards.keys() <= self._agent_names and terminations.keys() <= self._agent_names):
            self._require_known({*rewards, *terminations} - {ALL_AGENTS})
        agent_rewards, terminated, truncated = self._apply_results(present, observations, rewards, terminations, truncations)
        ended = not any(self._alive)
        by_truncation = self._truncated = self._truncated or any(truncated)
        if self.roster.any_end and not ended and (any(terminated) or any(truncated)):
            ended = True
            truncated = [one or alive for one, alive in zip(truncated, self._alive, strict=True)]
            self._alive = [False] * len(self._alive)
        self._acting = self._read_acting()
        self._write_signals(agent_rewards, terminated, truncated, acting)
        all_single = len(self._single_arrays) == len(self._names)
        self._may_be_ordinary = all(acting) and all(self._acting) and not self._takes_turns and all_single
        return self._build_observation(), 0.0, ended and not by_truncation, ended and by_truncation, self._parse_infos(infos)

    def _apply_ordinary_step(self, result: tuple[Any, ...]) -> bool:
        """Apply the results of an ordinary step: all agents acted and are still present, nothing ended, infos are empty.

        Flags and masks then stay unchanged. Return False for any other step, which needs :meth:`_apply_results`.
        """
        observations, rewards, terminations, truncations, infos = result
        if (
            self.env.agents != self._all_agents
            or not len(observations) == len(rewards) == len(infos) == len(self._all_agents)
            or infos.__class__ is not dict
            or any(terminations.values())
            or any(truncations.values())
        ):
            return False
        reward_cells, slow_writes = self._rewards, []
        try:
            for index, (name, cells, write) in enumerate(self._single_arrays):
                value, reward = observations[name], rewards[name]
                if infos[name]:
                    return False
                try:
                    cells[:] = value  # also checks dtype and shape
                except (TypeError, ValueError):  # another dtype or shape, or more axes than a memoryview can write
                    slow_writes.append((write, value))
                reward_cells[index] = reward if reward.__class__ in _PLAIN_REWARD_TYPES else self._to_float(index, reward)
        except (KeyError, TypeError, ValueError, OverflowError):
            return False
        for write, value in slow_writes:
            write(value)
        return True

    def _apply_results(
        self, present: frozenset[Any], observations: Mapping[Any, Any], rewards: Mapping[Any, Any],
        terminations: Mapping[Any, Any], truncations: Mapping[Any, Any],
    ) -> tuple[list[Any], list[bool], list[bool]]:  # fmt: skip
        """Write observations, record which agents are alive, and return each agent's reward and flags.

        ``"__all__"`` among the flags, as in RLlib's games, ends the episode of every agent that was alive or is present.
        """
        all_terminated, all_truncated = self._read_all_flag(terminations), self._read_all_flag(truncations)
        count = len(self._names)
        agent_rewards, flags_terminated, flags_truncated = [0.0] * count, [False] * count, [False] * count
        alive, dead, writers = self._alive, self._dead, self._observation_writers
        for i, name in enumerate(self._names):
            terminated, truncated = bool(terminations.get(name, False)), bool(truncations.get(name, False))
            has_flag = terminated or truncated
            if (all_terminated or all_truncated) and not dead[i] and (alive[i] or name in present or has_flag):
                terminated, truncated = terminated or all_terminated, truncated or all_truncated
            is_alive = name in present and not (terminated or truncated)
            if dead[i]:
                if is_alive:
                    raise ValueError(f"env {self.index}, agent {name!r}: came back after its death in this episode")
                self._write_padding(i)
                continue
            if name in observations:
                self._needs_padding[i] = True
                writers[i](observations[name])
            elif is_alive:
                raise ObservationError(f"env {self.index}, agent {name!r}: is alive, but has no observation")
            else:
                self._write_padding(i)
            # an agent that just left or joined may lack a reward
            if name in rewards or (self._acting[i] and (is_alive or has_flag)):
                agent_rewards[i] = self._read_reward(name, rewards)
            dead[i] = (alive[i] and not is_alive) or terminated or truncated
            alive[i], flags_terminated[i], flags_truncated[i] = is_alive, terminated, truncated
        return agent_rewards, flags_terminated, flags_truncated

    def _present_agents(self) -> frozenset[Any]:
        present = frozenset(self.env.agents)
        if not present <= self._agent_names:
            self._require_known(present)
        return present

    def _require_known(self, names: Iterable[Any]) -> None:
        if unknown := sorted({str(name) for name in names if name not in self._agent_names}):
            raise ValueError(f"env {self.index}: unknown agents {unknown}; possible_agents are {list(self._names)}")

    def _read_reward(self, name: Any, rewards: Mapping[Any, Any]) -> Any:
        try:
            return rewards[name]  # not `in`: a defaultdict has a reward for every agent
        except KeyError:
            raise ObservationError(
                f"env {self.index}, agent {name!r}: reward is missing, although the agent acted; got rewards of "
                f"{list(rewards)}"
            ) from None

    def _read_all_flag(self, flags: Mapping[Any, Any]) -> bool:
        return ALL_AGENTS in flags and ALL_AGENTS not in self._agent_names and bool(flags[ALL_AGENTS])

    def _read_acting(self) -> list[bool]:
        if not self._takes_turns:
            return list(self._alive)
        to_act = self.env.agents_to_act
        return [alive and name in to_act for alive, name in zip(self._alive, self._names, strict=True)]

    # -- the memory of the observation ------------------------------------------------------------------------------

    def _write_padding(self, index: int) -> None:
        if self._needs_padding[index]:
            self._needs_padding[index] = False
            for leaf in self._leaves[index]:
                leaf.fill(self.roster.pad_value)

    def _write_signals(
        self, rewards: list[Any], terminations: list[bool], truncations: list[bool], transition_mask: list[bool]
    ) -> None:
        for index, reward in enumerate(rewards):
            self._rewards[index] = reward if reward.__class__ in _PLAIN_REWARD_TYPES else self._to_float(index, reward)
        flags = terminations, truncations, self._acting, transition_mask, self._alive[:]
        if flags != self._written_flags:
            self._flags[:] = self._written_flags = flags

    def _to_float(self, index: int, reward: Any) -> float:
        """Convert a reward to a float; an array of one element is valid too."""
        array = np.asarray(reward)
        if array.size != 1 or array.dtype.kind not in "biuf":
            raise ObservationError(
                f"env {self.index}, agent {self._names[index]!r}: reward: got {reward!r}, expected one number"
            )
        return float(array.reshape(()))

    def _build_observation(self) -> Any:
        if self.roster.state_space is not None:
            self._write_state(self.env.state())
        if not self._has_scalars:
            return self._row
        return self._tree.map(lambda leaf: leaf[()] if leaf.ndim == 0 else leaf, self._row)

    def _parse_infos(self, infos: Any) -> dict[str, Any]:
        """Return ``{"agents": {index: info}, "common": {...}}`` without empty dicts; action masks are bool arrays."""
        if not isinstance(infos, Mapping):
            raise ValueError(f"env {self.index}: infos must be a dict of agents, got {infos!r}")
        out: dict[str, Any] = {}
        agent_infos = [(index, infos[name]) for index, name in enumerate(self._names) if name in infos]
        if agents := {index: self._convert_mask(index, info) for index, info in agent_infos if info}:
            out["agents"] = agents
        if len(agent_infos) < len(infos):
            common = {key: value for key, value in infos.items() if key not in self._agent_names}
            if isinstance(common.get("common"), dict):
                common = {**common.pop("common"), **common}
            if common:
                out["common"] = common
        return out

    def _convert_mask(self, index: int, info: Any) -> Mapping[Any, Any]:
        if not isinstance(info, Mapping):
            raise ValueError(f"env {self.index}, agent {self._names[index]!r}: info must be a dict, got {info!r}")
        for key in MASK_KEYS if self.roster.info_masks else ():
            if key in info:
                mask = np.asarray(info[key])
                if mask.ndim != 1 or mask.dtype.kind not in "biuf":
                    name = f"env {self.index}, agent {self._names[index]!r}"
                    raise ValueError(f"{name}: {key} must be a 1-D array of 0s and 1s, got {info[key]!r}")
                rest = {other: value for other, value in info.items() if other not in MASK_KEYS}
                return {**rest, "action_mask": mask != 0}
        return info

    # -- the wrapped environment ------------------------------------------------------------------------------------

    @property
    def inner_env(self) -> Any:
        """The environment without its adapter: attributes set on the adapter would not reach it."""
        return self.env.env if isinstance(self.env, AgentsAdapter) else self.env

    def render(self) -> Any:
        """Return the frame of the wrapped environment."""
        return self.env.render()

    def close(self) -> None:
        """Close the wrapped environment, if it has a ``close``."""
        if (close := getattr(self.env, "close", None)) is not None:
            close()

    def has_wrapper_attr(self, name: str) -> bool:
        """True if the wrapped environment or its adapter has the attribute."""
        return hasattr(self.inner_env, name) or hasattr(self.env, name)

    def get_wrapper_attr(self, name: str) -> Any:
        """Return an attribute of the wrapped environment, or else of its adapter."""
        return getattr(self.inner_env if hasattr(self.inner_env, name) else self.env, name)

    def set_wrapper_attr(self, name: str, value: Any, *, force: bool = True) -> bool:
        """Set an attribute on the outermost wrapper that has it, or else on the innermost environment."""
        env = self.inner_env
        while not (name in getattr(env, "__dict__", {}) or hasattr(type(env), name)):
            inner = getattr(env, "__dict__", {}).get("env")
            if inner is None:
                break
            env = inner
        setattr(env, name, value)
        return True


def _action_picker(part: AgentGroup, place: int) -> Callable[[Any], Any]:
    """Return a function that selects one agent's action from those of an environment."""
    if not part.has_axis:
        return itemgetter(part.key)
    tree = build_tree(part.stack_space(part.action_space), "action")
    pick_at_place = itemgetter(place)
    pick: Callable[[Any], Any] = pick_at_place if tree.leaf is not None else lambda action: tree.map(pick_at_place, action)
    if part.key is None:
        return pick
    return lambda action: pick(action[part.key])


def has_wrapper(env: Any, name: str) -> bool:
    """True if an environment has a wrapper of the class ``name`` or of a subclass; workers need not import the class."""
    while env is not None:
        if any(class_name(kind) == name for kind in type(env).__mro__):
            return True
        env = getattr(env, "__dict__", {}).get("env")  # the attribute in which wrappers store the inner environment
    return False


def class_name(kind: type[Any]) -> str:
    """Return the module-qualified name of a class."""
    return f"{kind.__module__}.{kind.__qualname__}"


def _describe_type(result: Any) -> str:
    return f"a tuple of {len(result)}" if isinstance(result, tuple) else type(result).__name__
