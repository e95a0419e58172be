"""``MultiAgentVecEnv``: PettingZoo parallel environments on the engine, with masks and an axis of agents.

:mod:`vecenv.multi_agent.adapter` turns every environment into an ordinary one with a single observation for all agents, and
:class:`~vecenv.AsyncVectorEnv` runs them. ``MultiAgentVecEnv`` unpacks the batches, and records for each environment
which agents act next and whether its episode has ended.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from operator import attrgetter
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Final, Self, TypeAlias, Unpack

import numpy as np
import numpy.typing as npt
from gymnasium import Space, spaces
from gymnasium.error import ResetNeeded
from gymnasium.vector import AutoresetMode
from gymnasium.vector.utils import batch_space

from vecenv.engine.vector_env import AsyncVectorEnv
from vecenv.errors import SnapshotMismatch, envs_text
from vecenv.freezing import Frozen
from vecenv.front.arguments import (
    ResetOptions,
    check_env_fns,
    check_option_names,
    parse_env_ids,
    parse_rows,
    require_callable,
    split_reset_mask,
)
from vecenv.front.by_row import infos_by_row
from vecenv.front.capabilities import raise_unsupported
from vecenv.front.guard import convert_result
from vecenv.front.infos import InfoMerger, object_column
from vecenv.link.messages import note_once
from vecenv.link.observations import flatten
from vecenv.multi_agent.adapter import AgentsEnv, EnvFn, as_parallel
from vecenv.multi_agent.roster import FLAGS, AgentActionConverter, Roster, build_tree, env_name, read_roster, zeros
from vecenv.multi_agent.views import ActionMasks, FlattenAgents, OpenRLView, agents_to_axis, forwarding
from vecenv.planning.options import EngineOptions, StartMethod, WorkerOptions
from vecenv.shm.layout import Array
from vecenv.state.snapshots import Snapshot, Snapshots, StateDict, load_and_restore

if TYPE_CHECKING:
    from vecenv.multi_agent.player_pool import PlayerPool

__all__ = ["AgentRows", "MultiAgentVecEnv", "make_openrl"]

Bools: TypeAlias = npt.NDArray[np.bool_]
Step: TypeAlias = tuple[Any, Array, Bools, Bools, dict[str, Any]]

_EXAMPLE: Final = "simple_spread_v3.parallel_env()"  # for error messages


class AgentRows(AsyncVectorEnv[Any, Any]):
    """The vector environment inside a ``MultiAgentVecEnv``: adapted environments, with the spaces of their roster."""

    @classmethod
    def build(cls, env_fns: Sequence[EnvFn], roster: Roster, template: Any, options: dict[str, Any]) -> AgentRows:
        """Build the vector environment.

        Args:
            env_fns: Functions that build adapted environments.
            roster: The agents and spaces of every environment.
            template: The environment that supplies the metadata and the render mode for all.
            options: See :class:`vecenv.AsyncVectorEnv`.
        """
        space, metadata = roster.observation_space(), getattr(template, "metadata", None) or {}
        example = SimpleNamespace(
            observation_space=space, action_space=roster.action_space(), metadata=metadata,
            render_mode=getattr(template, "render_mode", None), spec=SimpleNamespace(id=str(metadata.get("name", "game"))),
        )  # fmt: skip
        worker_options = replace(options.get("worker_options") or WorkerOptions(), dummy_env=example)
        return cls(env_fns, observation_mode=(space, space), **{**options, "worker_options": worker_options})


AgentRows.__name__ = "MultiAgentVecEnv"  # messages name the class that the caller uses


@forwarding(
    "_rows", "abandon", "action_space", "add_observer", "autoreset_mode", "batch_size", "call", "call_async", "call_wait",
    "capabilities", "close", "closed", "context", "copy", "daemon", "error_queue", "errors", "exec_func_fetch",
    "generators", "get_attr", "in_flight", "last_received", "local_envs", "max_concurrency", "metadata", "num_workers",
    "observation_mode", "observations", "parent_pipes", "plan", "processes", "publish_stats", "record", "render",
    "render_mode", "set_attr", "shared_memory", "spec", "start_timeout", "stats", "step_timeout", "worker", "worker_rows",
    "worker_stats", call_send="call_async", call_fetch="call_wait",
)  # fmt: skip
class MultiAgentVecEnv:
    """A vector of PettingZoo parallel environments: arrays ``[num_envs, num_agents, ...]`` with masks.

    With n environments and A agents (an agent's index is always its position in ``possible_agents`` of env 0), ``step``
    returns ``(observations, rewards [n, A], terminations [n, A], truncations [n, A], infos)`` and ``reset`` returns
    ``(observations, infos)``. It is not a ``gymnasium.vector.VectorEnv``, which has rewards ``(num_envs,)``;
    :meth:`flatten_agents` returns one.

    ``infos`` always contains ``agent_mask``, bool ``[n, A]``: the agent is present and must act next; and
    ``transition_mask``, bool ``[n, A]``: the agent acted, so its reward and flags belong to a transition (False after a
    reset). After a step it also contains ``env_done``, bool ``[n]``, and ``env_terminated``, bool ``[n]``: done, and the
    environment truncated no agent. The step in which an agent dies returns its last observation, reward and flags; from
    then on, its row is padding: observation ``pad_value``, reward 0, flags and masks False. See ``docs/multi_agent.md``.

    Args:
        env_fns: Functions that build the environments: PettingZoo's parallel ones, RLlib's ``MultiAgentEnv``, ones with
            ``agent_num`` (:class:`vecenv.multi_agent.StackedAgents`), or Gymnasium's, with one agent.
        layout: ``"stack"``: observations and actions are arrays ``[n, A, ...]``; all spaces must be equal. ``"agents"``: a
            dict with an array ``[n, ...]`` per agent. ``{group: [agents]}``: a dict with an array ``[n, k, ...]`` per group;
            spaces must be equal within a group. ``"auto"``: stack if all spaces are equal, else agents.
        autoreset_mode: The autoreset mode of whole environments: ``AutoresetMode`` or its string value.
        reward_dtype: The dtype of rewards.
        episode_end: An episode ends when no agent is left (``"all"``), or as soon as one agent ends (``"any"``; the others
            are truncated).
        state: Return ``env.state()`` as ``infos["state"]``, ``[n, *state]``.
        action_mask: ``"auto"``: return the action masks of observations or infos as ``infos["action_mask"]``, bool
            ``[n, A, k]`` (a dict of agents if k differs), all True for agents that do not act. ``None``: leave infos
            unchanged.
        pad_value: The value that fills the observations of missing agents.
        seed_stride: ``reset(seed=s)`` seeds environment i with ``s + i * seed_stride``.
        **engine: Other keyword arguments of :class:`~vecenv.AsyncVectorEnv`: ``num_workers``, ``batch_size``,
            ``on_failure``, ``step_timeout``, ``copy``, ``context`` and so on.

    Raises:
        TypeError: An environment has no ``possible_agents``, or a space has no fixed size.
        ValueError: Agents or spaces differ between environments (the message lists all), or an option has an invalid value.
        NotImplementedError: ``spare_workers`` is given.
        Exception: Raised by an ``env_fn``, or by :class:`~vecenv.AsyncVectorEnv`.
    """

    def __new__(cls, *args: Any, **options: Any) -> MultiAgentVecEnv:
        if len(args) > 1:  # such as an id and a number, for which Python's message would not show what to write
            check_env_fns(args[0], "MultiAgentVecEnv", _EXAMPLE)
        return super().__new__(cls)

    def __init__(
        self, env_fns: Sequence[Callable[[], Any]], *, layout: str | Mapping[Any, Sequence[Any]] = "auto",
        autoreset_mode: str | AutoresetMode = AutoresetMode.NEXT_STEP, reward_dtype: npt.DTypeLike = np.float64,
        episode_end: str = "all", state: bool = False, action_mask: str | None = "auto", pad_value: float = 0,
        seed_stride: int = 1, **engine: Unpack[EngineOptions],
    ) -> None:  # fmt: skip
        if "spare_workers" in engine:
            reason = "an environment stays in its row, together with the state of its agents"
            raise_unsupported(self, "have spare workers", reason)
        own_options = inspect.signature(MultiAgentVecEnv.__init__).parameters.keys() - {"self", "env_fns", "engine"}
        check_option_names(engine, [*sorted(own_options), *EngineOptions.__annotations__], "MultiAgentVecEnv")
        check_env_fns(env_fns, "MultiAgentVecEnv", _EXAMPLE)
        self._set_reward_dtype_and_seed_stride(reward_dtype, seed_stride)
        template = as_parallel(env_fns[0]())
        try:
            self.env_name = env_name(template)
            roster = read_roster(
                template, layout, state=state, pad_value=pad_value, episode_end=episode_end, action_mask=action_mask
            )
        except (TypeError, ValueError) as error:
            note_once(error, "in env 0, with which the others are compared")
            raise
        finally:
            if hasattr(template, "close"):
                template.close()
        wrapped = [EnvFn(env_fn, index, roster) for index, env_fn in enumerate(env_fns)]
        self._rows: AgentRows | PlayerPool = AgentRows.build(
            wrapped, roster, template, {"autoreset_mode": autoreset_mode, **engine}
        )
        try:
            self._require_equal_spaces()
        except BaseException:
            self._rows.close(terminate=True)
            raise
        self._set_up(roster, action_mask is not None)

    __signature__ = inspect.Signature(list(inspect.signature(__init__).parameters.values())[1:])

    @classmethod
    def from_envpool(
        cls, task_id: str, num_envs: int, *, reward_dtype: npt.DTypeLike = np.float64, seed_stride: int = 1,
        batch_size: int | None = None, num_threads: int | None = None, **config: Any,
    ) -> MultiAgentVecEnv:  # fmt: skip
        """Build environments of EnvPool with several players, such as ``"TicTacToe-v1"``; the players are the agents.

        The result always has ``layout="stack"`` and next-step autoreset; turn-based games have the masks of
        :class:`~vecenv.multi_agent.TurnBased`. ``reset_mask``, a sequence of options, ``seed`` with ``env_id``, ``call``,
        ``exec_func``, attributes and ``render`` raise :class:`NotImplementedError`, other reset options :class:`ValueError`.

        Args:
            task_id: EnvPool's name of the task.
            num_envs: The number of environments.
            reward_dtype, seed_stride: See the class.
            batch_size: The number of rows that :meth:`recv` returns, which must divide ``num_envs``; ``None``: all.
            num_threads: The number of EnvPool's threads; ``None``: EnvPool's choice.
            **config: Options of the task.

        Raises:
            ImportError: EnvPool is not installed.
            UnregisteredEnv, TypeError, ValueError: See :class:`~vecenv.backends.EnvPoolVectorEnv`.
        """
        from vecenv.multi_agent.player_pool import PlayerPool

        self = cls.__new__(cls)
        self._set_reward_dtype_and_seed_stride(reward_dtype, seed_stride)
        self.env_name = task_id
        pool = PlayerPool(task_id, num_envs, batch_size=batch_size, num_threads=num_threads, **config)
        self._rows = pool
        self._set_up(pool.roster, True)
        return self

    def _set_reward_dtype_and_seed_stride(self, reward_dtype: npt.DTypeLike, seed_stride: int) -> None:
        if isinstance(seed_stride, bool) or not isinstance(seed_stride, (int, np.integer)):
            raise ValueError(f"`seed_stride` must be an int, got {seed_stride!r}")
        self.seed_stride = int(seed_stride)
        self.reward_dtype = np.dtype(reward_dtype)
        if self.reward_dtype.kind != "f":
            raise ValueError(f"`reward_dtype` must be a float type, got {self.reward_dtype}")

    def _set_up(self, roster: Roster, with_action_masks: bool) -> None:
        """Set the attributes that depend on the engine and the roster."""
        self._roster = roster
        self.num_envs = self._rows.num_envs
        self.possible_agents = list(roster.agents)
        self.num_agents = self.agent_num = len(roster.agents)
        self.agent_index = {agent: index for index, agent in enumerate(roster.agents)}
        self.layout = roster.layout
        self.groups = {
            part.key: [roster.agents[i] for i in part.agents] for part in roster.parts if roster.layout == "groups"
        }
        self.state_space = roster.state_space
        self._actions = AgentActionConverter(roster)
        self._masks = ActionMasks(roster, with_action_masks, self.num_envs)
        self._tree = build_tree(roster.observation_space(), "observation")
        self._acting = np.zeros((self.num_envs, self.num_agents), np.bool_)  # the latest `agent_mask`
        self._ended = np.zeros(self.num_envs, np.bool_)
        self._begun = np.zeros(self.num_envs, np.bool_)
        self._reset_mask: Bools | None = None  # None if the latest reset had no mask
        self._all_rows = np.arange(self.num_envs)
        self._merger = InfoMerger()  # for action masks

    def _require_equal_spaces(self) -> None:
        problems = self._rows.exec_func(attrgetter("problems"))
        lines = [f"env {index}: {problem}" for index, found in enumerate(problems) for problem in found]
        if lines:
            raise DifferentEnvs("all environments must have the same agents and spaces:\n" + "\n".join(lines))

    # -- spaces -----------------------------------------------------------------------------------------------------

    @property
    def single_observation_space(self) -> Any:
        """The space of one agent if the layout is "stack", otherwise a dict with one space per agent or group."""
        return self._by_part([part.observation_space for part in self._roster.parts])

    @property
    def single_action_space(self) -> Any:
        """The space of one agent if the layout is "stack", otherwise a dict with one space per agent or group."""
        return self._by_part([part.action_space for part in self._roster.parts])

    def _by_part(self, part_spaces: Sequence[Space[Any]]) -> Any:
        if self.layout == "stack":
            return part_spaces[0]
        return {part.key: space for part, space in zip(self._roster.parts, part_spaces, strict=True)}

    @cached_property
    def observation_space(self) -> Space[Any]:
        """The space of the batch: ``[n, A, ...]``, or a ``Dict`` of agents ``[n, ...]`` or groups ``[n, k, ...]``."""
        space = self._rows.single_observation_space
        assert isinstance(space, spaces.Dict)
        return batch_space(space.spaces["obs"], self.num_envs)

    @property
    def agent_mask(self) -> Bools:
        """The latest ``infos["agent_mask"]`` of all environments, bool ``[n, A]``."""
        return self._acting.copy()

    # -- reset ------------------------------------------------------------------------------------------------------

    def reset(
        self, *, seed: int | Sequence[int | None] | None = None, options: ResetOptions = None
    ) -> tuple[Any, dict[str, Any]]:
        """Reset all environments, or those of ``options["reset_mask"]`` (bool ``[n]``).

        Args:
            seed: An int gives environment i ``seed + i * seed_stride``; a sequence of n (ints or ``None``) has one per
                environment.
            options: Passed to every environment, except ``"reset_mask"``; a sequence of n dicts has one per environment.

        Returns:
            ``(observations, infos)``; rows that were not reset keep their last observation. ``infos["transition_mask"]`` is
            False everywhere.
        """
        self.reset_async(seed=seed, options=options)
        return self.reset_wait()

    def reset_async(
        self, seed: int | Sequence[int | None] | None = None, options: ResetOptions = None, *, env_id: Any = None
    ) -> None:
        """Begin a reset; :meth:`reset_wait` returns its result, or :meth:`recv` returns rows as they become ready.

        Args:
            seed, options: See :meth:`reset`.
            env_id: Reset only these environments, which must not be in flight; :meth:`recv` returns the results.
        """
        rows = None if env_id is None else parse_env_ids(env_id, self.num_envs)
        self._rows.reset_async(seed=self._spread_seed(seed, rows), options=options, env_id=env_id)
        mask = self._reset_mask = split_reset_mask(options, self.num_envs)[0] if rows is None else None
        begun: Any = rows if rows is not None else slice(None) if mask is None else mask
        self._begun[begun] = True

    def _spread_seed(self, seed: Any, rows: Array | None) -> Any:
        """Return the seeds of ``rows`` (``None``: all) for an int; anything else is returned unchanged."""
        if not isinstance(seed, (int, np.integer)):
            return seed
        return [int(seed) + int(row) * self.seed_stride for row in (self._all_rows if rows is None else rows)]

    def set_next_options(
        self, options: ResetOptions = None, *, seed: int | Sequence[int | None] | None = None, env_id: Any = None
    ) -> None:
        """Set options and seeds, as for :meth:`reset`, for the next episode that autoreset begins in each environment.

        See :meth:`vecenv.AsyncVectorEnv.set_next_options`.
        """
        rows = None if env_id is None else parse_env_ids(env_id, self.num_envs)
        self._rows.set_next_options(options, seed=self._spread_seed(seed, rows), env_id=env_id)

    def reset_wait(self, timeout: float | None = None) -> tuple[Any, dict[str, Any]]:
        """Wait for the result of :meth:`reset_async` and return it. Errors are those of ``AsyncVectorEnv.reset_wait``."""
        return convert_result(self._rows, lambda: self._rows.reset_wait(timeout), self._after_reset)

    def _after_reset(self, batch: Any, infos: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        no_flags = np.zeros(self.num_envs, np.bool_)
        untouched = None if self._reset_mask is None else ~self._reset_mask
        obs, *_, out = self._unpack(batch, no_flags, no_flags, infos, self._all_rows, untouched)
        out["transition_mask"] = np.zeros_like(out["agent_mask"])
        del out["env_done"], out["env_terminated"]
        return obs, out

    # -- step -------------------------------------------------------------------------------------------------------

    def step(self, actions: Any) -> Step:
        """Step all environments.

        Args:
            actions: Actions in the layout of observations: ``[n, A, *a]`` (for ``Discrete`` also ``[n, A, 1]``), or a dict
                with ``[n, *a]`` per agent or ``[n, k, *a]`` per group. Only the entries that ``agent_mask`` marks are used;
                an agent or a group that acts in no environment may be omitted from a dict.

        Raises:
            ResetNeeded: An environment has not been reset yet, or its episode has ended under ``AutoresetMode.DISABLED``.
            ValueError, TypeError: A shape or dtype is wrong, or an action is missing; nothing was sent.
            Exception: The errors of ``AsyncVectorEnv.step``.
        """
        self.step_async(actions)
        return self.step_wait()

    def step_async(self, actions: Any) -> None:
        """Begin a step."""
        self._require_running(self._all_rows)
        self._rows.step_async(self._actions.convert(actions, self._all_rows, self._acting))
        self._ended[:] = False  # until the result, which an exception of one environment loses for all

    def step_wait(self, timeout: float | None = None) -> Step:
        """Wait for the result of :meth:`step_async` and return it."""
        return convert_result(self._rows, lambda: self._rows.step_wait(timeout), self._after_step)

    def _after_step(self, batch: Any, _: Array, terminated: Bools, truncated: Bools, infos: dict[str, Any]) -> Step:
        return self._unpack(batch, terminated, truncated, infos, infos.get("env_id", self._all_rows))

    def send(self, actions: Any, env_id: Any = None) -> None:
        """Step the environments ``env_id`` without waiting for results.

        ``actions`` are as in :meth:`step`, with one row per environment. The default of ``env_id`` is that of
        :meth:`vecenv.AsyncVectorEnv.send`.
        """
        rows = self._rows.last_received if env_id is None else parse_env_ids(env_id, self.num_envs)
        self._require_running(rows)
        self._rows.send(self._actions.convert(actions, rows, self._acting), rows)
        self._ended[rows] = False

    def recv(
        self, timeout: float | None = None, *, count: int | None = None, at_least: int | None = None,
        within: float | None = None,
    ) -> Step:  # fmt: skip
        """Return the results of the next ``count`` environments that finish (default ``batch_size``), as :meth:`step` does.

        ``infos["env_id"]`` contains their indices. With ``at_least``, return at least that many; see
        :meth:`vecenv.AsyncVectorEnv.recv`.
        """
        return convert_result(
            self._rows, lambda: self._rows.recv(timeout, count=count, at_least=at_least, within=within), self._after_step
        )

    def results_by_row(self, name: str, timeout: float | None = None) -> tuple[Any, list[dict[str, Any]]]:
        """Wait for a result and return it, with each environment's own infos listed separately.

        Args:
            name: ``"reset_wait"`` or ``"step_wait"``.
            timeout: The timeout of that method.

        Returns:
            The result of the method, in which ``infos`` has only the keys that vecenv adds; and the environments' own infos,
            one dict per environment: ``{"agents": {index: info}, "common": info}`` without empty entries, and
            ``"final_info"`` in the same format.
        """
        by_row = infos_by_row(self._rows)
        return convert_result(self._rows, lambda: by_row.results(name, timeout), self._split_infos)

    def _split_infos(self, batch: Any, *flags_and_infos: Any) -> tuple[Any, list[dict[str, Any]]]:
        """Return the converted result of a step or a reset, and the environments' own infos."""
        *flags, infos = flags_and_infos
        listed = infos.rows()
        added: dict[str, Any] = {}
        for key in ("final_obs", "restarted"):
            if where := [row for row, info in enumerate(listed) if key in info]:
                added[key] = object_column(where, [listed[row].pop(key) for row in where], len(listed))
                added[f"_{key}"] = np.isin(self._all_rows, where)
        if any(action_masks := [self._masks.extract_masks(info) for info in listed]):
            added["agents"] = self._merger.merge(action_masks, self._all_rows.tolist())
        convert: Callable[..., Any] = self._after_step if flags else self._after_reset
        return convert(batch, *flags, added), listed

    def _require_running(self, rows: Array) -> None:
        if self._rows.closed:
            return  # the engine raises the error
        if unstarted := rows[~self._begun[rows]].tolist():
            raise ResetNeeded(f"reset() must precede the first step of {envs_text(unstarted)}")
        if self.autoreset_mode is AutoresetMode.DISABLED and (ended := rows[self._ended[rows]].tolist()):
            raise ResetNeeded(
                f"the episodes of {envs_text(ended)} are over: "
                "reset(options={'reset_mask': infos['env_done']}) begins new ones"
            )

    # -- unpacking batches ------------------------------------------------------------------------------------------

    def _unpack(
        self, batch: Any, terminated: Bools, truncated: Bools, infos: dict[str, Any], rows: Array,
        untouched: Bools | None = None,
    ) -> Step:  # fmt: skip
        """Convert the engine's batch to the results of a step; ``untouched``: the rows that a masked reset left out."""
        signals = batch["signals"]
        rewards = signals[:, 0].astype(self.reward_dtype)
        flags = dict(zip(FLAGS, np.not_equal(signals[:, 1:].swapaxes(0, 1), 0.0, order="C"), strict=True))
        done = terminated | truncated
        final_observations = infos.pop("final_obs", None)
        infos.pop("_final_obs", None)
        final_infos = {} if final_observations is None else self._final_infos(final_observations, rewards, flags)
        if "restarted" in infos:
            self._truncate_restarted(infos["_restarted"] & truncated, rewards, flags, self._acting[rows])
        if untouched is not None and self.autoreset_mode is not AutoresetMode.SAME_STEP:
            # for a restarted environment, the engine still has the row from before the failure
            flags["agent_mask"][untouched & self._ended] = False
        out = agents_to_axis(infos, self.num_agents, len(rows)) if infos else {}
        mask, obs = flags["agent_mask"], batch["obs"]
        out["agent_mask"], out["transition_mask"] = mask, flags["transition_mask"]
        out["env_done"], out["env_terminated"] = done, terminated.copy()
        self._masks.add(out, obs, mask, rows, untouched)
        if self.state_space is not None:
            out["state"] = batch["state"]
        out.update(final_infos)
        where: Any = slice(None) if rows is self._all_rows else rows
        self._acting[where] = mask
        self._ended[where] = done if untouched is None else untouched & self._ended
        return obs, rewards, flags["terminations"], flags["truncations"], out

    def _final_infos(self, final_observations: Array, rewards: Array, flags: dict[str, Bools]) -> dict[str, Any]:
        """Return the infos of episodes that ended, and write their last rewards and flags into ``rewards`` and ``flags``."""
        ended = np.array([observation is not None for observation in final_observations])
        final_batch = zeros(self._tree, len(final_observations))
        for row in np.flatnonzero(ended).tolist():
            leaves = flatten(self._tree, final_observations[row])
            for leaf, value in zip(flatten(self._tree, final_batch), leaves, strict=True):
                leaf[row] = value
        rewards[ended] = final_batch["signals"][ended, 0]
        for index, key in enumerate(FLAGS, 1):
            if key != "agent_mask":
                flags[key][ended] = final_batch["signals"][ended, index] != 0
        infos = {"final_obs": final_batch["obs"], "_final_obs": ended}
        if self.state_space is not None:
            infos["final_state"], infos["_final_state"] = final_batch["state"], ended.copy()
        return infos

    def _truncate_restarted(self, restarted: Bools, rewards: Array, flags: dict[str, Bools], acting: Bools) -> None:
        """Truncate the agents of restarted environments; ``acting`` marks those that had to act in this step."""
        rewards[restarted] = 0.0
        flags["terminations"][restarted] = False
        flags["truncations"][restarted] = flags["alive"][restarted]  # of the last good observation
        flags["transition_mask"][restarted] = acting[restarted]
        if self.autoreset_mode is not AutoresetMode.SAME_STEP:
            flags["agent_mask"][restarted] = False

    reset_send, reset_fetch, step_send, step_fetch = reset_async, reset_wait, step_async, step_wait

    if TYPE_CHECKING:  # the attributes that `forwarding` adds

        def __getattr__(self, name: str) -> Any: ...

    # -- calls into environments ------------------------------------------------------------------------------------

    def exec_func(self, func: Callable[..., Any], indices: Any = None, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        """Return ``func(env, *args, **kwargs)`` for the environments ``indices``, and ``None`` for the others.

        ``env`` is the object that the ``env_fn`` returned, or the environment inside if that object is an adapter of this
        package, such as :class:`~vecenv.multi_agent.TurnBased`. Changes that ``func`` makes to it persist.
        """
        require_callable(func)
        results: tuple[Any, ...] = self._rows.exec_func(_call_inside_adapter, indices, func, args, kwargs)
        return results

    def exec_func_send(self, func: Callable[..., Any], indices: Any = None, *args: Any, **kwargs: Any) -> None:
        """Begin an :meth:`exec_func`."""
        require_callable(func)
        self._rows.exec_func_send(_call_inside_adapter, indices, func, args, kwargs)

    # -- snapshots --------------------------------------------------------------------------------------------------

    def save(self, env_id: Any = None, *, verify: bool = True) -> tuple[Snapshot, ...]:
        """Save the state of all or some environments; see :meth:`vecenv.AsyncVectorEnv.save`."""
        return self._add_agent_states(self._rows.save(env_id, verify=verify), env_id)

    def load(self, snapshots: Any, env_id: Any = None) -> Any:
        """Continue environments from saved states; see :meth:`vecenv.AsyncVectorEnv.load`.

        Returns:
            Their observations, in the layout of :meth:`step`; :attr:`agent_mask` marks the agents that must act.
        """
        rows = parse_rows(env_id, self.num_envs)
        listed = [snapshots] * len(rows) if isinstance(snapshots, Snapshot) else snapshots
        return self._load_agent_states(rows, listed, lambda: self._rows.load(snapshots, env_id))

    def state_dict(self, env_id: Any = None, *, verify: bool = True) -> dict[str, Any]:
        """Return the state of the whole vector environment; see :meth:`vecenv.AsyncVectorEnv.state_dict`."""
        state = self._rows.state_dict(env_id, verify=verify)
        return StateDict({**state, "snapshots": self._add_agent_states(state["snapshots"], env_id)})

    def load_state_dict(self, state: Mapping[str, Any], env_id: Any = None) -> Any:
        """Continue from the result of :meth:`state_dict`; results and errors are those of :meth:`load`."""
        snapshots = state.get("snapshots") if isinstance(state, Mapping) else None
        rows = parse_rows(env_id, self.num_envs)
        return self._load_agent_states(rows, snapshots, lambda: self._rows.load_state_dict(state, env_id))

    def freeze(self, env_id: Any = None) -> list[Frozen]:
        """Copy the processes of environments; see :meth:`vecenv.AsyncVectorEnv.freeze`."""
        copies: list[Frozen] = self._rows.freeze(env_id)
        for frozen, row in zip(copies, parse_rows(env_id, self.num_envs), strict=True):
            frozen.beside = self._agent_state(row)
        return copies

    def thaw(self, frozen: Frozen, into: Any, *, reseed: bool = False) -> tuple[Any, dict[str, Any]]:
        """Continue environments from a frozen one; see :meth:`vecenv.AsyncVectorEnv.thaw`. The infos are empty."""
        batch, _ = self._rows.thaw(frozen, into, reseed=reseed)
        rows = parse_rows(into, self.num_envs)
        self._restore_agent_states(rows, [frozen.beside] * len(rows))
        return batch["obs"], {}

    def _agent_state(self, row: int) -> Any:
        """Return the state that this object, not the environment, holds for the environment's agents."""
        return self._acting[row].copy(), bool(self._ended[row]), bool(self._begun[row]), self._masks.copy_masks(row)

    def _add_agent_states(self, snapshots: Sequence[Snapshot], env_id: Any) -> tuple[Snapshot, ...]:
        rows = parse_rows(env_id, self.num_envs)
        return Snapshots(one.having(beside=self._agent_state(row)) for one, row in zip(snapshots, rows, strict=True))

    def _load_agent_states(self, rows: Sequence[int], snapshots: Any, load: Callable[[], Any]) -> Any:
        """Call ``load``, restore the agents' states, and return the observations. Raise if snapshots have no such states."""
        saved_rows = [one.row for one in snapshots if isinstance(one, Snapshot)] if isinstance(snapshots, Sequence) else []
        for index, saved in enumerate(saved_rows):
            agent_state = saved.beside
            is_state = isinstance(agent_state, tuple) and len(agent_state) == 4
            if not is_state or np.shape(agent_state[0]) != self._acting.shape[1:]:
                raise SnapshotMismatch(
                    f"snapshots[{index}] was not saved by a MultiAgentVecEnv with {self._acting.shape[1]} agents"
                )

        def restore(loaded: Sequence[int]) -> None:
            self._restore_agent_states([rows[index] for index in loaded], [saved_rows[index].beside for index in loaded])

        batch = load_and_restore(load, rows, restore)
        return None if batch is None else batch["obs"]

    def _restore_agent_states(self, rows: Sequence[int], states: Sequence[Any]) -> None:
        for row, agent_state in zip(rows, states, strict=True):
            self._acting[row], self._ended[row], self._begun[row], masks = agent_state
            self._masks.restore_masks(row, masks)

    # -- views and close() ------------------------------------------------------------------------------------------

    @property
    def env_fns(self) -> list[Callable[[], Any]]:
        """The functions that built the environments."""
        adapted: Any = self._rows
        return [each.env_fn for each in adapted.env_fns]

    def flatten_agents(self, *, padding_done: bool = True) -> FlattenAgents:
        """Return a ``gymnasium.vector.VectorEnv`` with ``n * A`` rows: :class:`~vecenv.multi_agent.FlattenAgents`."""
        return FlattenAgents(self, padding_done=padding_done)

    def to_openrl(self) -> OpenRLView:
        """Return a view with the shapes of the ``agent_num`` convention; see :class:`~vecenv.multi_agent.OpenRLView`."""
        return OpenRLView(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        inside = repr(self._rows).partition("(")[2]
        return f"MultiAgentVecEnv({self.env_name}, agents={self.num_agents}, layout={self.layout!r}, {inside}"


class DifferentEnvs(ValueError):
    """Environments differ from the first one in their agents or spaces."""


def _call_inside_adapter(env: AgentsEnv, func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    return func(env.inner_env, *args, **kwargs)


def make_openrl(
    env_fns: Sequence[Callable[[], Any]], observation_space: spaces.Space[Any] | None = None,
    action_space: spaces.Space[Any] | None = None, shared_memory: bool = True, copy: bool = True,
    context: StartMethod | None = None, daemon: bool = True, worker: None = None, render_mode: str | None = None,
    auto_reset: bool = True, **engine: Any,
) -> OpenRLView:  # fmt: skip
    """Build the equivalent of OpenRL's ``AsyncVectorEnv(env_fns, ...)``, with the same arguments in the same order.

    Args:
        env_fns: Functions that build environments with ``agent_num``, PettingZoo's parallel ones, or Gymnasium's.
        observation_space, action_space: The spaces of one agent; those of the environments must equal them.
        shared_memory, copy, context, daemon: See :class:`~vecenv.AsyncVectorEnv`.
        worker: Must be ``None``: OpenRL's worker functions use their own protocol.
        render_mode: The render mode of the view.
        auto_reset: ``False``: after an episode, an environment waits for ``reset(options={"reset_mask": ...})``.
        **engine: Options of :class:`~vecenv.MultiAgentVecEnv`: ``num_workers``, ``on_failure``, ``step_timeout`` ...

    Raises:
        RuntimeError: The spaces of an environment differ from the first one's, or from those given.
        TypeError: ``worker`` is given.
        Exception: The errors of :class:`~vecenv.MultiAgentVecEnv`.
    """
    if worker is not None:
        raise TypeError("make_openrl: `worker` must be None, because OpenRL's worker functions use another protocol")
    mode = AutoresetMode.SAME_STEP if auto_reset else AutoresetMode.DISABLED
    options: dict[str, Any] = {"copy": copy, "context": context, "daemon": daemon}
    if shared_memory is not True:  # an explicit True would raise for spaces that cannot be shared
        options["shared_memory"] = shared_memory
    try:
        envs = MultiAgentVecEnv(env_fns, layout="stack", autoreset_mode=mode, **{**options, **engine})
    except DifferentEnvs as error:
        raise RuntimeError(str(error)) from error
    actual_spaces = (envs.single_observation_space, envs.single_action_space)
    expected_spaces = (observation_space, action_space)
    for kind, expected, actual in zip(("observation", "action"), expected_spaces, actual_spaces, strict=True):
        if expected is not None and expected != actual:
            envs.close()
            raise RuntimeError(f"Some environments have an {kind} space different from `{expected}`: they have `{actual}`.")
    return OpenRLView(envs, render_mode)
