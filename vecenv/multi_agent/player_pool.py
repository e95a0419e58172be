"""EnvPool's pools of several players, as rows for ``MultiAgentVecEnv``.

:class:`PlayerPool` stands where the engine stands for Python environments: it takes batches of actions of all agents and
gives batches of rows (:meth:`vecenv.multi_agent.roster.Roster.observation_space`). Players are the agents ``player_0``,
``player_1`` and so on. A pool ends episodes for all players at once and begins the next one by itself in the following step;
it cannot be seeded again, so a reset with a seed builds a new one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from gymnasium import spaces
from gymnasium.error import ClosedEnvironmentError, NoAsyncCallError
from gymnasium.vector import AutoresetMode
from gymnasium.vector.utils import batch_space

from vecenv.backends.envpool.players import PlayerRows, PlayerSorter
from vecenv.backends.envpool.task import import_envpool
from vecenv.front.capabilities import Capabilities
from vecenv.multi_agent.roster import FLAGS, Part, Roster
from vecenv.shm.layout import Array

__all__ = ["PlayerPool"]

_OBSERVATIONS = ("obs", "obs:players.obs")
_BOOKKEEPING = ("info:env_id", "info:players.env_id", "info:players.id", "info:current_player", "info:legal_action_mask")


class PlayerPool:
    """A pool with several players an environment; the part of ``AsyncVectorEnv``'s interface that a pool can have.

    Args:
        task_id: EnvPool's.
        num_envs: Number of environments.
        batch_size: Rows of :meth:`recv`; ``None``: all.
        num_threads: Threads that step; ``None``: EnvPool's choice.
        config: Options of the task.

    Raises:
        ImportError: EnvPool is not installed.
        ValueError: The task has observations that are not one array a player.
    """

    autoreset_mode = AutoresetMode.NEXT_STEP
    render_mode = None
    num_workers = 0

    def __init__(
        self, task_id: str, num_envs: int, *, batch_size: int | None = None, num_threads: int | None = None, **config: Any
    ) -> None:
        self.closed = False
        self.num_envs = num_envs
        self.batch_size = num_envs if batch_size is None else batch_size
        self.errors: deque[Any] = deque()
        self._task_id = task_id
        self._config = {**config, "num_threads": num_threads or 0, "batch_size": self.batch_size}
        self._pool = self._build([None] * num_envs)
        specs = self._pool.spec.state_array_spec
        self._keys = list(self._pool._state_keys)
        players = int(self._pool.config["max_num_players"])
        self._sorter = PlayerSorter(self._keys, specs, players)
        found = [key for key in _OBSERVATIONS if key in self._keys and tuple(specs[key].shape[:1]) == (-1,)]
        space = self._pool.observation_space
        if len(found) != 1 or isinstance(space, (spaces.Dict, spaces.Tuple)):
            raise ValueError(f"{task_id}: observations must be one array a player, got {space}")
        self._observed = found[0]
        self.roster = _roster(players, space, self._pool.action_space)
        self.metadata = {"name": task_id, "autoreset_mode": self.autoreset_mode}
        self.single_observation_space = self.roster.observation_space()
        self.single_action_space = self.roster.action_space()
        self.action_space = batch_space(self.single_action_space, num_envs)
        self._present = np.zeros((num_envs, players), np.bool_)
        self._acting = np.zeros((num_envs, players), np.bool_)
        self._latest = np.arange(num_envs)
        self._in_flight = np.zeros(num_envs, np.bool_)
        self._fresh = True  # nobody has been asked to reset the pool yet
        self._steps = 0

    def _build(self, seeds: Sequence[int | None]) -> Any:
        numbers = [int(np.random.SeedSequence().generate_state(1)[0]) >> 1 if seed is None else int(seed) for seed in seeds]
        return import_envpool().make_gymnasium(self._task_id, num_envs=self.num_envs, seed=numbers, **self._config)

    # -- reset ------------------------------------------------------------------------------------------------------

    def reset_async(self, seed: Any = None, options: dict[str, Any] | None = None, *, env_id: Any = None) -> None:
        """Reset all environments; in a new pool if there are seeds."""
        self._require_open()
        if options:
            raise ValueError(f"a pool of several players takes no options in a reset, got {sorted(options)}")
        if seed is not None:
            if len(seed) != self.num_envs:
                raise ValueError(f"got {len(seed)} seeds for {self.num_envs} environments")
            self._pool = self._build(seed)
        elif not self._fresh:
            while self._in_flight.any():
                self._receive()
        self._fresh = False
        self._acting[:] = False
        self._in_flight[:] = True
        self._pool._reset(np.arange(self.num_envs, dtype=np.int32))

    def reset_wait(self, timeout: float | None = None) -> tuple[Any, dict[str, Any]]:
        """All rows, in the order of environments."""
        batch, _, _, _, infos = self._gathered()
        return batch, infos

    # -- step -------------------------------------------------------------------------------------------------------

    def step_async(self, actions: Array) -> None:
        """Step all environments."""
        self._send(np.arange(self.num_envs), actions)

    def step_wait(self, timeout: float | None = None) -> Any:
        """All rows, in the order of environments."""
        return self._gathered()

    def rows(self, env_id: Any) -> npt.NDArray[np.intp]:
        """Which environments a ``send`` is about."""
        chosen = self._latest if env_id is None else np.asarray(env_id, np.intp)
        if chosen.ndim != 1 or not len(chosen) or len(np.unique(chosen)) != len(chosen):
            raise ValueError(f"env_id must be distinct indices, got {env_id!r}")
        if chosen.min() < 0 or chosen.max() >= self.num_envs:
            raise ValueError(f"env_id must lie within 0..{self.num_envs - 1}, got {chosen.tolist()}")
        return chosen

    def send(self, actions: Array, rows: Array) -> None:
        """Step some environments."""
        self._send(rows, actions)

    capabilities = Capabilities("envpool", attributes=False, reset_mask=False, masked_seeds=False, reset_options=False)

    def recv(self, timeout: float | None = None, *, count: int | None = None) -> Any:
        """The next ``batch_size`` environments, in ascending order; a pool knows no timeout."""
        self._require_open()
        if self._in_flight.sum() < self.batch_size:
            raise NoAsyncCallError(f"Calling `recv` with {int(self._in_flight.sum())} environments in flight", "recv")
        rows = self._receive()
        result = self._read(rows)
        result[-1]["env_id"], result[-1]["_env_id"] = rows.env_ids.astype(np.intp), np.ones(len(rows.env_ids), np.bool_)
        self._latest = result[-1]["env_id"].copy()
        return result

    def _send(self, rows: Array, actions: Array) -> None:
        self._require_open()
        if self._in_flight[rows].any():
            raise ValueError(f"envs {rows[self._in_flight[rows]].tolist()} are in flight: recv() them first")
        order = np.argsort(rows)
        ids, given = rows[order], np.asarray(actions)[order]
        dtype = self._pool.spec._action_spec[-1][0]
        acting = self._acting[ids]
        given = np.where(acting.reshape(acting.shape + (1,) * (given.ndim - 2)), given, 0).astype(dtype)
        self._in_flight[ids] = True
        self._pool._send(self._sorter.flatten(given, ids.astype(np.int32), self._present[ids]))

    def _receive(self) -> PlayerRows:
        rows = self._sorter(self._pool._recv())
        self._in_flight[rows.env_ids] = False
        return rows

    def _gathered(self) -> Any:
        self._require_open()
        if self.batch_size < self.num_envs:
            raise ValueError(f"a pool with batch_size={self.batch_size} of {self.num_envs} answers recv() only")
        if not self._in_flight.all():
            raise NoAsyncCallError("nothing was asked of all environments", "step")
        return self._read(self._receive())

    # -- rows -------------------------------------------------------------------------------------------------------

    def _read(self, rows: PlayerRows) -> tuple[Any, Array, Array, Array, dict[Any, Any]]:
        """An answer of the pool as rows of all agents, with infos as the engine gives them."""
        ids, envs, players = rows.env_ids, rows.envs, rows.players
        begins = envs["elapsed_step"] == 0
        done = envs["done"].astype(np.bool_) & ~begins
        truncated = done & envs["trunc"].astype(np.bool_)
        terminated = done & ~truncated
        acting = rows.mask & ~done[:, None]
        if "info:current_player" in envs:
            acting &= np.arange(rows.mask.shape[1]) == envs["info:current_player"][:, None]
        flags = {
            "terminations": terminated[:, None] & rows.mask,
            "truncations": truncated[:, None] & rows.mask,
            "agent_mask": acting,
            "transition_mask": self._acting[ids] & ~begins[:, None],
        }
        self._present[ids], self._acting[ids] = rows.mask, acting
        self._steps += len(ids)
        batch = {
            "obs": players[self._observed].astype(self._pool.observation_space.dtype),
            "signals": np.stack(
                [players["reward"] * ~begins[:, None], *(flags[key] for key in FLAGS)], axis=1, dtype=np.float64
            ),
        }
        return batch, np.zeros(len(ids)), terminated, truncated, self._infos(rows, acting)

    def _infos(self, rows: PlayerRows, acting: Array) -> dict[Any, Any]:
        everywhere = np.ones(len(rows.env_ids), np.bool_)
        out: dict[Any, Any] = {}
        for key, value in rows.envs.items():
            if key.startswith("info:") and key not in _BOOKKEEPING:
                out[key[5:]], out[f"_{key[5:]}"] = value.copy(), everywhere.copy()
        agents: dict[Any, Any] = {}
        for index in range(rows.mask.shape[1]):
            own: dict[Any, Any] = {}
            for key, value in rows.players.items():
                if key.startswith("info:players.") and key not in _BOOKKEEPING:
                    own[key[13:]], own[f"_{key[13:]}"] = value[:, index], rows.mask[:, index]
            if "info:legal_action_mask" in rows.envs:
                own["action_mask"], own["_action_mask"] = rows.envs["info:legal_action_mask"] != 0, acting[:, index]
            if own:
                agents[index], agents[f"_{index}"] = own, everywhere
        if agents:
            out["agents"], out["_agents"] = agents, everywhere
        return out

    # -- the rest ---------------------------------------------------------------------------------------------------

    def _require_open(self) -> None:
        if self.closed:
            raise ClosedEnvironmentError("Trying to operate on a pool of players after it was closed.")

    def stats(self) -> dict[str, float]:
        """``steps``: of environments."""
        return {"steps": float(self._steps)}

    def close(self, **_: Any) -> None:
        """Let go of the pool."""
        self.closed = True
        if hasattr(self, "_pool"):
            del self._pool

    def __getattr__(self, name: str) -> Any:
        if name in ("call", "call_async", "exec_func_send", "get_attr", "set_attr", "render"):
            raise NotImplementedError(f"a pool of several players has no `{name}`: its environments live in C++")
        raise AttributeError(name)

    def __repr__(self) -> str:
        return f"PlayerPool({self._task_id}, num_envs={self.num_envs})"


def _roster(players: int, observation: Any, action: Any) -> Roster:
    agents = tuple(f"player_{index}" for index in range(players))
    everyone = Part(None, tuple(range(players)), True, observation, action)
    return Roster(
        agents, (observation,) * players, (action,) * players, (everyone,), "stack",
        state_space=None, pad_value=0, any_end=False, info_masks=True,
    )  # fmt: skip
