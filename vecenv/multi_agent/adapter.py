"""The worker's side: one parallel environment as an ordinary one with a row of fixed size.

The engine knows environments with an observation, a reward and two flags. Here a PettingZoo parallel environment becomes
one: its observation is a row that holds the observations, rewards, flags and masks of all agents (see
:meth:`vecenv.multi_agent.roster.Roster.observation_space`), written straight into shared memory; its own flags are those of
the episode. What happens to whom is decided here, and nowhere else: who is alive, who may act, whose row is padding.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from operator import itemgetter
from typing import Any

import gymnasium
import numpy as np

from vecenv.errors import ObservationError
from vecenv.link.observations import tree_writer
from vecenv.multi_agent.conventions import StackedAgents, TurnBased, as_parallel
from vecenv.multi_agent.rllib_game import RLlibGame
from vecenv.multi_agent.roster import FLAGS, Part, Roster, tree_of
from vecenv.multi_agent.single import OneAgent
from vecenv.shm import Tree
from vecenv.shm.layout import Array

__all__ = ["AgentsEnv", "EnvFn"]

ALL = "__all__"
_MASK_KEYS = ("action_mask", "action_masks")
_NUMBERS = frozenset({float, int, bool, np.float64, np.float32, np.float16, np.int64, np.int32})  # what most rewards are


class EnvFn:
    """Builds environment ``index`` of a vector: an ``env_fn`` for the engine."""

    def __init__(self, env_fn: Callable[[], Any], index: int, roster: Roster) -> None:
        self.env_fn = env_fn
        self.index = index
        self.roster = roster

    def __call__(self) -> AgentsEnv:
        return AgentsEnv(as_parallel(self.env_fn()), self.index, self.roster)


class AgentsEnv(gymnasium.Env[Any, Any]):
    """A parallel environment as a Gymnasium environment whose observation is a row of all agents.

    Args:
        env: The parallel environment.
        index: Its place in the vector, for error texts.
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
        self._known = frozenset(roster.agents)
        self._pick = [_picker(part, place) for part, place in roster.places()]
        count = len(roster.agents)
        self._alive = [False] * count
        self._acting = [False] * count
        self._dead = [False] * count
        self._cut = False  # an agent was truncated in this episode
        self._turns = hasattr(env, "agents_to_act")
        self._everybody = list(roster.agents)
        first = roster.parts[0]
        self._zips = roster.layout == "stack" and tree_of(first.action_space, "action").leaf is not None
        self._tree = tree_of(self.observation_space, "observation")
        self._scalars = any(leaf.shape == () for leaf in self._tree.leaves())
        self._assembled = self._scalars or roster.state_space is not None
        own = [np.zeros(leaf.shape, leaf.dtype) for leaf in self._tree.leaves()]
        self._attach(self._tree.build(iter(own)))

    def observation_buffer(self, row: dict[str, Any]) -> None:
        """Write every row into ``row`` from now on: the engine's shared memory."""
        self._attach(row)

    def _attach(self, row: dict[str, Any]) -> None:
        roster = self.roster
        self._row = row
        self._paid, *flags = row["signals"]
        self._cells: Any = memoryview(self._paid)  # one number in costs a third of what an array of numbers costs
        self._flags = dict(zip(FLAGS, flags, strict=True))
        self._written: dict[str, list[bool]] = {}
        self._ordinary = False  # the flags in the row say: everybody acted, and is alive
        self._filled = [True] * len(self._names)
        self._puts: list[Callable[[Any], None]] = []
        self._rows: list[list[Array]] = []
        self._plain: list[tuple[Any, Any, Callable[[Any], None]]] = []  # agents with one array each
        for part, place in roster.places():
            space = part.observation_space
            tree = tree_of(space, "observation")
            held = row["obs"] if roster.layout == "stack" else row["obs"][part.key]
            outer = tree_of(part.widened(space), "observation")
            leaves = _flat(outer, held)
            rows = leaves if part.axis else [leaf.reshape(1, *leaf.shape) for leaf in leaves]
            self._puts.append(self._writer(tree, rows, place, self._names[part.agents[place]]))
            self._rows.append([leaf[place : place + 1] for leaf in rows])
            if tree.leaf is not None:
                cells = memoryview(self._rows[-1][0][0]) if tree.leaf.flat else None
                self._plain.append((self._names[part.agents[place]], cells, self._puts[-1]))
        if roster.state_space is not None:
            tree = tree_of(roster.state_space, "state")
            leaves = [leaf.reshape(1, *leaf.shape) for leaf in _flat(tree, row["state"])]
            self._put_state = self._writer(tree, leaves, 0, None)

    def _writer(self, tree: Tree, leaves: list[Array], place: int, agent: Any) -> Callable[[Any], None]:
        """Writes one agent's observation (or, without an agent, the state), shape-checked."""
        index = self.index
        who = f"env {index}" if agent is None else f"env {index}, agent {agent!r}"

        def warn(field: str, text: str) -> None:
            warnings.warn(f"{who}: {text.partition(': ')[2]}", RuntimeWarning, stacklevel=2)

        put = tree_writer(tree, leaves, index - place, warn)

        def write(value: Any) -> None:
            try:
                put(place, value)
            except ObservationError as error:
                raise ObservationError(f"{who}: {str(error).partition(': ')[2]}") from error.__cause__

        return write

    def take_snapshot(self) -> Any:
        """Who is there; the environment inside is a layer of its own."""
        return self._alive[:], self._acting[:], self._dead[:], self._cut

    def restore_snapshot(self, state: Any) -> None:
        """Go on from there; the row is written anew."""
        alive, acting, dead, self._cut = state
        self._alive, self._acting, self._dead = alive[:], acting[:], dead[:]
        self._written, self._ordinary, self._filled = {}, False, [True] * len(alive)

    # -- reset and step ---------------------------------------------------------------------------------------------

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Start an episode."""
        if self.problems:
            raise ValueError(f"env {self.index}: {'; '.join(self.problems)}")
        result = self.env.reset(seed=seed, options=options)
        if not isinstance(result, tuple) or len(result) != 2:
            raise ValueError(f"env {self.index}: reset must return (observations, infos), got {type(result).__name__}")
        observations, infos = result
        count = len(self._names)
        self._dead = [False] * count
        self._cut = False
        self._written = {}  # whoever wrote into the row meanwhile, nothing of it is left
        self._ordinary = False
        self._filled = [True] * count
        present = self._present()
        if not present:
            raise ValueError(f"env {self.index}: nobody is there after a reset (`env.agents` is empty)")
        self._alive = [name in present for name in self._names]
        for index, name in enumerate(self._names):
            if self._alive[index]:
                self._observe(index, name, observations)
            else:
                self._pad(index)
        nothing = [False] * count
        self._acting = self._who_acts()
        self._write([0.0] * count, terminations=nothing, truncations=nothing, transition_mask=nothing)
        return self._finish(), self._info(infos)

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Step everybody who is alive; others' actions are not looked at."""
        acting = self._acting
        if self._ordinary and self._zips:
            given = dict(zip(self._names, action))  # noqa: B905 - the engine sees to the length, and `strict` costs a tenth of it
        else:
            given = {name: pick(action) for name, acts, pick in zip(self._names, acting, self._pick, strict=True) if acts}
        result = self.env.step(given)
        if not isinstance(result, tuple) or len(result) != 5:
            got = f"a tuple of {len(result)}" if isinstance(result, tuple) else type(result).__name__
            raise ValueError(f"env {self.index}: step must return five dicts, got {got}")
        if self._ordinary and self._take_ordinary(result):
            return self._finish() if self._assembled else self._row, 0.0, False, False, {}
        observations, rewards, terminations, truncations, infos = result
        present = self._present()
        if not (rewards.keys() <= self._known and terminations.keys() <= self._known):
            self._refuse_unknown(rewards, terminations)
        paid, ended, cut = self._settle(present, observations, rewards, terminations, truncations)
        over = not any(self._alive)
        if any(cut):
            self._cut = True
        cut_off = self._cut
        if self.roster.any_end and not over and (any(ended) or any(cut)):
            over = True
            cut = [one or alive for one, alive in zip(cut, self._alive, strict=True)]
            self._alive = [False] * len(self._alive)
        self._acting = self._who_acts()
        self._write(paid, terminations=ended, truncations=cut, transition_mask=acting)
        self._ordinary = all(acting) and all(self._acting) and not self._turns and len(self._plain) == len(self._names)
        return self._finish(), 0.0, over and not cut_off, over and cut_off, self._info(infos)

    def _take_ordinary(self, result: tuple[Any, ...]) -> bool:
        """The short way for what most steps are: everybody was there and is there, nothing ended, and there are no infos.

        Flags and masks then stay as they are. False if the step was no such step; the long way says what it was.
        """
        observations, rewards, terminations, truncations, infos = result
        if (
            self.env.agents != self._everybody
            or not len(observations) == len(rewards) == len(infos) == len(self._everybody)
            or infos.__class__ is not dict
            or any(terminations.values())
            or any(truncations.values())
            or any(infos.values())
        ):
            return False
        cells, others = self._cells, []
        try:
            for index, (name, row, put) in enumerate(self._plain):
                value, reward = observations[name], rewards[name]
                try:
                    row[:] = value  # checks dtype and shape, too
                except (TypeError, ValueError):  # other ones, or more axes than a memoryview can write
                    others.append((put, value))
                cells[index] = reward if reward.__class__ in _NUMBERS else self._number(index, reward)
        except (KeyError, TypeError, ValueError, OverflowError):
            return False
        for put, value in others:
            put(value)
        return True

    def _settle(
        self,
        present: frozenset[Any],
        observations: Mapping[Any, Any],
        rewards: Mapping[Any, Any],
        terminations: Mapping[Any, Any],
        truncations: Mapping[Any, Any],
    ) -> tuple[list[Any], list[bool], list[bool]]:
        """What the step meant for each agent: rewards and flags; keeps observations and who is alive.

        ``"__all__"`` among the flags, as RLlib's games have it, is the end of everybody who is there.
        """
        all_ended, all_cut = self._of_all(terminations), self._of_all(truncations)
        paid: list[Any] = []
        ended: list[bool] = []
        cut: list[bool] = []
        alive, dead, puts = self._alive, self._dead, self._puts
        for i, name in enumerate(self._names):
            terminated, truncated = bool(terminations.get(name, False)), bool(truncations.get(name, False))
            named = terminated or truncated
            if (all_ended or all_cut) and not dead[i] and (alive[i] or name in present or named):
                terminated, truncated = terminated or all_ended, truncated or all_cut
            lives = name in present and not (terminated or truncated)
            if dead[i]:
                if lives:
                    raise ValueError(f"env {self.index}, agent {name!r}: came back after it had died in this episode")
                self._pad(i)
                paid.append(0.0)
                ended.append(False)
                cut.append(False)
                continue
            if name in observations:
                self._filled[i] = True
                puts[i](observations[name])
            elif lives:
                self._refuse_blind(name)
            else:
                self._pad(i)
            if name in rewards or (
                self._acting[i] and (lives or named)
            ):  # who has vanished or was just born need not be paid
                paid.append(self._reward(name, rewards))
            else:
                paid.append(0.0)
            dead[i] = (alive[i] and not lives) or terminated or truncated
            alive[i] = lives
            ended.append(terminated)
            cut.append(truncated)
        return paid, ended, cut

    def _present(self) -> frozenset[Any]:
        present = frozenset(self.env.agents)
        if not present <= self._known:
            unknown = sorted(map(str, present - self._known))
            raise ValueError(f"env {self.index}: unknown agents {unknown}; possible_agents are {list(self._names)}")
        return present

    def _refuse_unknown(self, *dicts: Mapping[Any, Any]) -> None:
        unknown = sorted({str(name) for each in dicts for name in each if name not in self._known and name != ALL})
        if unknown:
            raise ValueError(f"env {self.index}: unknown agents {unknown}; possible_agents are {list(self._names)}")

    def _refuse_blind(self, name: Any) -> None:
        raise ObservationError(f"env {self.index}, agent {name!r}: is alive and has no observation")

    def _reward(self, name: Any, rewards: Mapping[Any, Any]) -> Any:
        try:
            return rewards[name]  # not `in`: a defaultdict has one for everybody
        except KeyError:
            raise ObservationError(
                f"env {self.index}, agent {name!r}: reward: there is none, and the agent has acted; there are rewards of "
                f"{list(rewards)}"
            ) from None

    def _of_all(self, flags: Mapping[Any, Any]) -> bool:
        return ALL in flags and ALL not in self._known and bool(flags[ALL])

    def _who_acts(self) -> list[bool]:
        if not self._turns:
            return list(self._alive)
        turn = self.env.agents_to_act
        return [alive and name in turn for alive, name in zip(self._alive, self._names, strict=True)]

    # -- the row ----------------------------------------------------------------------------------------------------

    def _observe(self, index: int, name: Any, observations: Mapping[Any, Any]) -> None:
        if name not in observations:
            self._refuse_blind(name)
        self._puts[index](observations[name])

    def _pad(self, index: int) -> None:
        if self._filled[index]:
            self._filled[index] = False
            for row in self._rows[index]:
                row.fill(self.roster.pad_value)

    def _write(self, rewards: list[Any], **flags: list[bool]) -> None:
        """Write the rewards, and of the flags what changed since the last step."""
        for index, reward in enumerate(rewards):
            self._cells[index] = reward if reward.__class__ in _NUMBERS else self._number(index, reward)
        flags["agent_mask"] = self._acting
        written = self._written
        for key, values in flags.items():
            if written.get(key) != values:
                self._flags[key][:] = values
                written[key] = values

    def _number(self, index: int, reward: Any) -> float:
        """A reward as a float; arrays of one element are numbers too, and whatever is none is named."""
        array = np.asarray(reward)
        if array.size != 1 or array.dtype.kind not in "biuf":
            raise ObservationError(
                f"env {self.index}, agent {self._names[index]!r}: reward: got {reward!r}, wanted one number"
            )
        return float(array.reshape(()))

    def _finish(self) -> Any:
        if self.roster.state_space is not None:
            self._put_state(self.env.state())
        if not self._scalars:
            return self._row
        return self._tree.map(lambda leaf: leaf[()] if leaf.ndim == 0 else leaf, self._row)

    def _info(self, infos: Any) -> dict[str, Any]:
        """``{"agents": {index: info}, "common": {...}}``, without what is empty; action masks as bool arrays."""
        if not isinstance(infos, Mapping):
            raise ValueError(f"env {self.index}: infos must be a dict of agents, got {infos!r}")
        out: dict[str, Any] = {}
        agents: dict[int, Any] = {}
        matched = 0
        for index, name in enumerate(self._names):
            if name in infos:
                matched += 1
                if info := infos[name]:
                    agents[index] = self._with_mask(info, name) if self.roster.info_masks else info
        if agents:
            out["agents"] = agents
        if matched < len(infos):
            common = {key: value for key, value in infos.items() if key not in self._known}
            if isinstance(common.get("common"), dict):
                common = {**common.pop("common"), **common}
            if common:
                out["common"] = common
        return out

    def _with_mask(self, info: Mapping[Any, Any], name: Any) -> Mapping[Any, Any]:
        for key in _MASK_KEYS:
            if key in info:
                mask = np.asarray(info[key])
                if mask.ndim != 1 or mask.dtype.kind not in "biuf":
                    raise ValueError(
                        f"env {self.index}, agent {name!r}: {key} must be one row of 0 and 1, got {info[key]!r}"
                    )
                rest = {other: value for other, value in info.items() if other not in _MASK_KEYS}
                return {**rest, "action_mask": mask != 0}
        return info

    # -- the environment inside -------------------------------------------------------------------------------------

    @property
    def inside(self) -> Any:
        """The environment itself: not the adapter around one of another convention, where writes would be lost."""
        return self.env.env if isinstance(self.env, (OneAgent, RLlibGame, StackedAgents, TurnBased)) else self.env

    def render(self) -> Any:
        """As the environment inside."""
        return self.env.render()

    def close(self) -> None:
        """Close the environment inside."""
        self.env.close()

    def has_wrapper_attr(self, name: str) -> bool:
        """Whether the environment inside has it, or its adapter."""
        return hasattr(self.inside, name) or hasattr(self.env, name)

    def get_wrapper_attr(self, name: str) -> Any:
        """Of the environment inside; :data:`PROBLEMS` is how its agents and spaces differ from env 0's."""
        if name == PROBLEMS:
            return self.problems
        return getattr(self.inside if hasattr(self.inside, name) else self.env, name)

    def set_wrapper_attr(self, name: str, value: Any, *, force: bool = True) -> bool:
        """On whichever wrapper of the environment inside has it, else on the innermost one."""
        env = self.inside
        while not (name in getattr(env, "__dict__", {}) or hasattr(type(env), name)):
            inside = getattr(env, "__dict__", {}).get("env")
            if inside is None:
                break
            env = inside
        setattr(env, name, value)
        return True


PROBLEMS = "vecenv:problems"


def _picker(part: Part, place: int) -> Callable[[Any], Any]:
    """Takes one agent's action out of the environment's."""
    if not part.axis:
        return itemgetter(part.key)
    tree = tree_of(part.widened(part.action_space), "action")
    take = itemgetter(place)
    inside: Callable[[Any], Any] = take if tree.leaf is not None else lambda action: tree.map(take, action)
    if part.key is None:
        return inside
    return lambda action: inside(action[part.key])


def _flat(tree: Tree, value: Any) -> list[Array]:
    found: list[Array] = []
    tree.map(lambda leaf: found.append(leaf) or leaf, value)  # type: ignore[func-returns-value]
    return found
