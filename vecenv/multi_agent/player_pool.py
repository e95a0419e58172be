"""EnvPool's pools of several players, as rows for ``MultiAgentVecEnv``.

:class:`PlayerPool` stands where the engine stands for Python environments: it takes batches of actions of all agents and
gives batches of rows (:meth:`vecenv.multi_agent.roster.Roster.observation_space`). Players are the agents ``player_0``,
``player_1`` and so on. A pool ends episodes for all players at once and begins the next one by itself in the following step;
it cannot be seeded again, so a reset with a seed builds a new one.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from gymnasium import spaces
from gymnasium.vector import AutoresetMode
from gymnasium.vector.utils import batch_space

from vecenv.backends.envpool.drivers import FirstReadyDriver, Seeding
from vecenv.backends.envpool.rows import PlayerBatch, PlayerRows
from vecenv.backends.envpool.task import Task, check_options, spread
from vecenv.backends.envpool.vector_env import PoolVectorEnv
from vecenv.front.arguments import env_ids_of
from vecenv.front.capabilities import unable
from vecenv.front.driver import Stepped
from vecenv.multi_agent.roster import FLAGS, AgentGroup, Roster
from vecenv.shm.layout import Array

__all__ = ["PlayerPool"]

_OBSERVATIONS = ("obs", "obs:players.obs")
_BOOKKEEPING = ("info:env_id", "info:players.env_id", "info:players.id", "info:current_player", "info:legal_action_mask")


class PlayerPool(PoolVectorEnv):
    """A pool with several players per environment, whose observations are rows of all agents.

    Args:
        task_id: EnvPool's.
        num_envs: Number of environments.
        batch_size: Rows of :meth:`recv`, must divide ``num_envs``; ``None``: all.
        num_threads: Threads that step; ``None``: EnvPool's choice.
        config: Options of the task.

    Raises:
        ImportError: EnvPool is not installed.
        UnregisteredEnv, TypeError, ValueError: As of :class:`~vecenv.backends.EnvPoolVectorEnv`.
        ValueError: The task has observations that are not one array a player.
    """

    autoreset_mode = AutoresetMode.NEXT_STEP
    _driver: FirstReadyDriver

    def __init__(
        self, task_id: str, num_envs: int, *, batch_size: int | None = None, num_threads: int | None = None, **config: Any
    ) -> None:
        self.closed = True  # until there is something to close
        self.num_envs, batch_size = check_options(
            num_envs, batch_size, num_threads, None, None, self.autoreset_mode
        )
        max_episode_steps = config.pop("max_episode_steps", None)
        task = Task.of(
            task_id, config, num_envs=self.num_envs, batch_size=batch_size, num_threads=num_threads or 0,
            max_episode_steps=max_episode_steps,
        )  # fmt: skip
        rows = PlayerRows(task, self.num_envs, _PlayerReader(task))
        self.roster = _roster(task.max_num_players, task.observation_space, task.action_space)
        self.metadata = {"name": task_id, "autoreset_mode": self.autoreset_mode}
        self.single_observation_space = self.observation_space = self.roster.observation_space()
        self.single_action_space = self.roster.action_space()
        self.action_space = batch_space(self.single_action_space, self.num_envs)
        seeding = Seeding(spread(None, self.num_envs, self.np_random), self.np_random)
        self._open(FirstReadyDriver(task, batch_size, seeding, self.autoreset_mode, rows))

    def rows(self, env_id: Any) -> npt.NDArray[np.intp]:
        """Which environments a ``send`` is about."""
        return self._driver.latest.astype(np.intp) if env_id is None else env_ids_of(env_id, self.num_envs)

    def render(self) -> Any:
        """Not here."""
        unable(self, "`render`", "EnvPool draws no environments of several players")


PlayerPool.__name__ = "MultiAgentVecEnv"  # the name in messages, which is what the caller has


class _PlayerReader:
    """Makes rows of all agents, with infos as the engine gives them."""

    def __init__(self, task: Task) -> None:
        found = [key for key in _OBSERVATIONS if key in task.state_specs and task.state_specs[key].shape[:1] == [-1]]
        space = task.observation_space
        if len(found) != 1 or isinstance(space, (spaces.Dict, spaces.Tuple)):
            raise ValueError(f"{task.id}: observations must be one array a player, got {space}")
        self._observed, self._dtype = found[0], space.dtype

    def __call__(self, rows: PlayerBatch, acted: Array, acting: Array) -> Stepped:
        envs, players = rows.envs, rows.players
        begins = envs["elapsed_step"] == 0
        done = envs["done"].astype(np.bool_) & ~begins
        truncated = done & envs["trunc"].astype(np.bool_)
        terminated = done & ~truncated
        flags = {
            "terminations": terminated[:, None] & rows.mask,
            "truncations": truncated[:, None] & rows.mask,
            "agent_mask": acting,
            "transition_mask": acted,
        }
        batch = {
            "obs": players[self._observed].astype(self._dtype),
            "signals": np.stack(
                [players["reward"] * ~begins[:, None], *(flags[key] for key in FLAGS)], axis=1, dtype=np.float64
            ),
        }
        return batch, np.zeros(len(done)), terminated, truncated, self._infos(rows, acting)

    def _infos(self, rows: PlayerBatch, acting: Array) -> dict[Any, Any]:
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


def _roster(players: int, observation: Any, action: Any) -> Roster:
    agents = tuple(f"player_{index}" for index in range(players))
    all_players = AgentGroup(None, tuple(range(players)), True, observation, action)
    return Roster(
        agents, (observation,) * players, (action,) * players, (all_players,), "stack",
        state_space=None, pad_value=0, any_end=False, info_masks=True,
    )  # fmt: skip
