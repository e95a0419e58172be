"""EnvPool's multi-player pools, as the vector environment inside a ``MultiAgentVecEnv``.

:class:`PlayerPool` takes the place of :class:`~vecenv.multi_agent.vector_env.AgentRows`: it accepts actions of all agents
and returns batches of observations in the form of :meth:`vecenv.multi_agent.roster.Roster.observation_space`. Players are
the agents ``player_0``, ``player_1`` and so on. A pool ends an episode for all players at once and begins the next one in
the following step. It cannot be seeded again, so a reset with a seed builds a new pool.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from gymnasium import spaces
from gymnasium.vector import AutoresetMode
from gymnasium.vector.utils import batch_space

from vecenv.backends.envpool.drivers import FirstReadyDriver, Seeding
from vecenv.backends.envpool.rows import ActionChecker, Latest, PoolRows, States
from vecenv.backends.envpool.task import Task, check_options, spread_seeds
from vecenv.backends.envpool.vector_env import PoolVectorEnv
from vecenv.front.capabilities import raise_unsupported
from vecenv.front.driver import Stepped
from vecenv.multi_agent.roster import FLAGS, AgentGroup, Roster
from vecenv.shm.layout import Array

_OBSERVATIONS = ("obs", "obs:players.obs")
_BOOKKEEPING = ("info:env_id", "info:players.env_id", "info:players.id", "info:current_player", "info:legal_action_mask")


class PlayerPool(PoolVectorEnv):
    """A pool with several players per environment. The observation of an environment contains the data of all its players.

    Args:
        task_id: EnvPool's name of the task.
        num_envs: The number of environments.
        batch_size: The number of rows that :meth:`recv` returns, a divisor of ``num_envs``; ``None``: all.
        num_threads: The number of threads that step; ``None``: EnvPool's choice.
        config: Options of the task.

    Raises:
        ImportError: EnvPool is not installed.
        UnregisteredEnv, TypeError, ValueError: See :class:`~vecenv.backends.EnvPoolVectorEnv`.
        ValueError: The task has observations other than one array per player.
    """

    autoreset_mode = AutoresetMode.NEXT_STEP
    _driver: FirstReadyDriver

    def __init__(
        self, task_id: str, num_envs: int, *, batch_size: int | None = None, num_threads: int | None = None, **config: Any
    ) -> None:
        self.closed = True  # until there is a pool to close
        limit = config.pop("max_episode_steps", None)
        num_envs, batch_size = check_options(num_envs, batch_size, num_threads, limit, None, self.autoreset_mode)
        task = Task.from_id(
            task_id, config, num_envs=num_envs, batch_size=batch_size, num_threads=num_threads or 0, max_episode_steps=limit
        )
        rows = PlayerRows(task, num_envs)
        players = tuple(range(task.max_num_players))
        observation, action = task.observation_space, task.action_space
        self.num_envs = num_envs
        self.roster = Roster(
            tuple(f"player_{index}" for index in players), (observation,) * len(players), (action,) * len(players),
            (AgentGroup(None, players, True, observation, action),), "stack",
            state_space=None, pad_value=0, any_end=False, info_masks=True,
        )  # fmt: skip
        self.metadata = {"name": task_id, "autoreset_mode": self.autoreset_mode}
        self.single_observation_space = self.observation_space = self.roster.observation_space()
        self.single_action_space = self.roster.action_space()
        self.action_space = batch_space(self.single_action_space, num_envs)
        seeding = Seeding(spread_seeds(None, num_envs, self.np_random), self.np_random)
        self._open(FirstReadyDriver(task, batch_size, seeding, self.autoreset_mode, rows))

    @property
    def last_received(self) -> npt.NDArray[np.intp]:
        """The environments that :meth:`send` steps by default."""
        return self._driver.latest.astype(np.intp)

    def render(self) -> Any:
        """Raise ``NotImplementedError``, because EnvPool cannot render these tasks."""
        raise_unsupported(self, "`render`", "EnvPool cannot render environments with several players")


PlayerPool.__name__ = "MultiAgentVecEnv"  # messages name the class that the caller uses


class PlayerBatch(NamedTuple):
    """One result of a pool, in the order of environments; n rows, at most k players each.

    Attributes:
        env_ids: int32, shape ``(n,)``, ascending.
        mask: The players that exist, bool, shape ``(n, k)``.
        envs: The pool's arrays of environments by state key, shape ``(n, ...)``.
        players: The pool's arrays of players (``reward``, ``obs``, ...), shape ``(n, k, ...)``; zero for missing
            players. A view of the pool's array if that is complete and in order.
    """

    env_ids: Array
    mask: Array
    envs: dict[str, Array]
    players: dict[str, Array]


class PlayerRows(PoolRows):
    """A converter for pools with several players per environment.

    The latest results determine which players exist, and which of them act.

    Args:
        task: The task of the pools.
        num_envs: The number of environments.
    """

    def __init__(self, task: Task, num_envs: int) -> None:
        self._keys = list(task.state_keys)
        self._is_per_player = [tuple(task.state_specs[key].shape[:1]) == (-1,) for key in self._keys]
        per_player = (key for key, is_per_player in zip(self._keys, self._is_per_player, strict=True) if is_per_player)
        found = [key for key in per_player if key in _OBSERVATIONS]
        space = task.observation_space
        if len(found) != 1 or isinstance(space, (spaces.Dict, spaces.Tuple)):
            raise ValueError(f"{task.id}: observations must be one array per player, got {space}")
        self._observation_key, self._dtype = found[0], space.dtype
        self._env_id_index, self._owner_index = self._keys.index("info:env_id"), self._keys.index("info:players.env_id")
        self._player_id_index = self._keys.index("info:players.id") if "info:players.id" in self._keys else None
        self._shape = num_envs, task.max_num_players
        self._action_dtype = np.dtype(task.action_dtypes[-1])
        self._checker = ActionChecker(task.action_space, task.action_keys[-1:], task.action_dtypes[-1:])
        self._is_turn_based = "info:current_player" in self._keys
        self.begin()

    def begin(self) -> None:
        # the players with an action in the next payload, and the players that act
        self._sent, self._acting = np.zeros((2, *self._shape), np.bool_)
        # in turn-based games, EnvPool uses this one action as the current player's; with more, Go would end the process
        self._sent[:, 0] = True

    def store_held(self, held: Any) -> None:
        ids, present, acting = held
        self._acting[ids] = acting
        if not self._is_turn_based:
            self._sent[ids] = present

    # -- to the pool --------------------------------------------------------------------------------------------------

    def check(self, actions: Any, ids: Array) -> list[Array]:
        """Return the actions as one array, in a list. ``MultiAgentVecEnv`` has checked their shape and dtype."""
        return [np.asarray(actions)]

    def payload(self, ids: Array, actions: list[Array]) -> list[Array]:
        """Return the argument of the pool's ``_send``, in the order of environments; raise for actions out of range."""
        order, (values,) = np.argsort(ids), actions
        ids, values = ids[order], values[order]
        acting = self._acting[ids]
        if acting.any():
            self._checker(values[acting], np.repeat(ids, acting.sum(axis=1)))
        values = np.where(acting.reshape(acting.shape + (1,) * (values.ndim - 2)), values, 0).astype(self._action_dtype)
        if self._is_turn_based:
            values[:, 0] = values[np.arange(len(ids)), acting.argmax(axis=1)]
        return self.build_payload(values, ids, self._sent[ids])

    def filler_payload(self, ids: Array) -> list[Array]:
        mask = self._sent[ids]
        return self.build_payload(np.zeros(mask.shape, self._action_dtype), ids, mask)

    def build_payload(self, actions: Array, env_ids: Array, mask: Array) -> list[Array]:
        """Return ``[env_id, players.env_id, actions]`` of lengths n, p, p. ``mask`` ``(n, k)`` selects p players."""
        owners = np.repeat(env_ids, mask.sum(axis=1)).astype(np.int32)
        return [env_ids.astype(np.int32), owners, np.ascontiguousarray(actions[mask])]

    # -- from the pool ------------------------------------------------------------------------------------------------

    def copy_rows(self, states: States, first: int, last: int) -> States:
        """Copy rows ``first`` to ``last - 1`` of the environments, and the rows of their players."""
        is_player_row = np.isin(states[self._owner_index], states[self._env_id_index][first:last])
        return [
            array[is_player_row] if is_per_player else array[first:last].copy()
            for array, is_per_player in zip(states, self._is_per_player, strict=True)
        ]

    def results_in_order(self, batches: list[States], all_ids: Array, ended: Array) -> tuple[Stepped, Any]:
        stepped, batch, acting = self._parse_states([np.concatenate(parts) for parts in zip(*batches, strict=True)])
        return stepped, (all_ids, batch.mask, acting)

    def results(self, states: States, ended: Array) -> tuple[Stepped, Latest, Any]:
        stepped, batch, acting = self._parse_states(states)
        ids, index = batch.env_ids.copy(), batch.env_ids.astype(np.intp)
        assert isinstance(stepped[4], dict)
        stepped[4].update(env_id=index, _env_id=np.ones(len(ids), np.bool_))
        return stepped, (ids, index.tobytes()), (ids, batch.mask, acting)

    def sort_by_env(self, states: States) -> PlayerBatch:
        """Sort a result by environment.

        Raises:
            ValueError: An environment has too many players, or players belong to an environment that is not in the result.
        """
        env_order = np.argsort(states[self._env_id_index], kind="stable")
        in_order = np.array_equal(env_order, np.arange(len(env_order)))
        env_ids, owners = states[self._env_id_index][env_order], states[self._owner_index]
        n, k = len(env_ids), self._shape[1]
        row = np.searchsorted(env_ids, owners)
        if (row == n).any() or (env_ids[np.minimum(row, n - 1)] != owners).any():
            missing = np.setdiff1d(owners, env_ids).tolist()
            raise ValueError(f"the batch contains players of environments {missing}, but not these environments")
        counts = np.bincount(row, minlength=n)
        if counts.max(initial=0) > k:
            raise ValueError(f"{counts.max()} players in one environment; the maximum is {k}")
        if self._player_id_index is not None:
            slot = states[self._player_id_index]
        else:  # number the players within each environment
            order = np.argsort(row, kind="stable")
            slot = np.empty_like(row)
            slot[order] = np.arange(len(row)) - np.repeat(np.cumsum(counts) - counts, counts)
        complete = np.array_equal(row * k + slot, np.arange(n * k))
        batch = PlayerBatch(env_ids, np.zeros((n, k), np.bool_), {}, {})
        batch.mask[row, slot] = True
        for key, array, is_per_player in zip(self._keys, states, self._is_per_player, strict=True):
            if not is_per_player:
                batch.envs[key] = array if in_order else array[env_order]
            elif complete:
                batch.players[key] = array.reshape(n, k, *array.shape[1:])
            else:
                batch.players[key] = np.zeros((n, k, *array.shape[1:]), dtype=array.dtype)
                batch.players[key][row, slot] = array
        return batch

    def _parse_states(self, states: States) -> tuple[Stepped, PlayerBatch, Array]:
        """Return the results of a step in the engine's format, the sorted batch, and the players that act."""
        batch = self.sort_by_env(states)
        begins = batch.envs["elapsed_step"] == 0
        done = batch.envs["done"].astype(np.bool_) & ~begins
        truncated = done & batch.envs["trunc"].astype(np.bool_)
        terminated = done & ~truncated
        acting = batch.mask & ~done[:, None]
        if self._is_turn_based:
            acting &= np.arange(batch.mask.shape[1]) == batch.envs["info:current_player"][:, None]
        flags = {
            "terminations": terminated[:, None] & batch.mask,
            "truncations": truncated[:, None] & batch.mask,
            "agent_mask": acting,
            "transition_mask": self._acting[batch.env_ids] & ~begins[:, None],
            "alive": batch.mask & ~done[:, None],
        }
        signals = [batch.players["reward"] * ~begins[:, None], *(flags[key] for key in FLAGS)]
        observation = {
            "obs": batch.players[self._observation_key].astype(self._dtype),
            "signals": np.stack(signals, axis=1, dtype=np.float64),
        }
        return (observation, np.zeros(len(done)), terminated, truncated, self._build_infos(batch, acting)), batch, acting

    def _build_infos(self, batch: PlayerBatch, acting: Array) -> dict[Any, Any]:
        all_envs = np.ones(len(batch.env_ids), np.bool_)
        out: dict[Any, Any] = {}
        for key, value in batch.envs.items():
            if key.startswith("info:") and key not in _BOOKKEEPING:
                out[key[5:]], out[f"_{key[5:]}"] = value.copy(), all_envs.copy()
        agents: dict[Any, Any] = {}
        for index in range(batch.mask.shape[1]):
            info: dict[Any, Any] = {}
            for key, value in batch.players.items():
                if key.startswith("info:players.") and key not in _BOOKKEEPING:
                    info[key[13:]], info[f"_{key[13:]}"] = value[:, index], batch.mask[:, index]
            if "info:legal_action_mask" in batch.envs:
                info["action_mask"], info["_action_mask"] = batch.envs["info:legal_action_mask"] != 0, acting[:, index]
            if info:
                agents[index], agents[f"_{index}"] = info, all_envs
        if agents:
            out["agents"], out["_agents"] = agents, all_envs
        return out
