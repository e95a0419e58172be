"""EnvPool's pools of several players, as rows for ``MultiAgentVecEnv``.

:class:`PlayerPool` stands where the engine stands for Python environments: it takes batches of actions of all agents and
gives batches of rows (:meth:`vecenv.multi_agent.roster.Roster.observation_space`). Players are the agents ``player_0``,
``player_1`` and so on. A pool ends episodes for all players at once and begins the next one by itself in the following step;
it cannot be seeded again, so a reset with a seed builds a new one.
"""

from __future__ import annotations

from collections import deque
from typing import Any

import numpy as np
import numpy.typing as npt
from gymnasium import spaces
from gymnasium.vector import AutoresetMode
from gymnasium.vector.utils import batch_space

from vecenv.backends.envpool.calls import answering, one_at_a_time
from vecenv.backends.envpool.options import check_options
from vecenv.backends.envpool.over_pools import OverPools
from vecenv.backends.envpool.player_driver import PlayerAnswer, PlayerDriver
from vecenv.backends.envpool.players import PlayerRows
from vecenv.backends.envpool.pools import Pools
from vecenv.backends.envpool.seeds import spread
from vecenv.backends.envpool.task import Task
from vecenv.front.arguments import ResetOptions, count_of, env_ids_of
from vecenv.front.capabilities import Capabilities, unable
from vecenv.front.deadlines import deadline_of
from vecenv.front.phases import Phase, advance
from vecenv.multi_agent.roster import FLAGS, Part, Roster
from vecenv.shm.layout import Array

__all__ = ["PlayerPool"]

_OBSERVATIONS = ("obs", "obs:players.obs")
_BOOKKEEPING = ("info:env_id", "info:players.env_id", "info:players.id", "info:current_player", "info:legal_action_mask")


class PlayerPool(OverPools):
    """A pool with several players an environment; the part of ``AsyncVectorEnv``'s interface that a pool can have.

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
    render_mode = None
    num_workers = 0
    capabilities = Capabilities(
        "envpool", attributes=False, reset_mask=False, masked_seeds=False, reset_options=False, row_options=False,
        in_this_process=True,
    )

    def __init__(
        self, task_id: str, num_envs: int, *, batch_size: int | None = None, num_threads: int | None = None, **config: Any
    ) -> None:
        self.closed = True  # until there is something to close
        self.num_envs, self.batch_size = check_options(
            num_envs, batch_size, num_threads, None, "safe", None, self.autoreset_mode
        )
        self.errors: deque[Any] = deque()
        self.task = task = Task.of(
            task_id, num_envs=self.num_envs, batch_size=self.batch_size, num_threads=num_threads or 0,
            thread_affinity_offset=-1, max_episode_steps=config.pop("max_episode_steps", None), exact_time_limit=False,
            render_mode=None, env_config=config,
        )  # fmt: skip
        found = [key for key in _OBSERVATIONS if key in task.state_specs and task.state_specs[key].shape[:1] == [-1]]
        space = task.observation_space
        if len(found) != 1 or isinstance(space, (spaces.Dict, spaces.Tuple)):
            raise ValueError(f"{task_id}: observations must be one array a player, got {space}")
        self._observed = found[0]
        self.roster = _roster(task.max_num_players, space, task.action_space)
        self.metadata = {"name": task_id, "autoreset_mode": self.autoreset_mode}
        self.single_observation_space = self.roster.observation_space()
        self.single_action_space = self.roster.action_space()
        self.action_space = batch_space(self.single_action_space, self.num_envs)
        self._generator = np.random.default_rng()
        seeds = spread(None, self.num_envs, self._generator)
        self._open(Pools(task, lambda pool: PlayerDriver(pool, task, self.batch_size), seeds))

    def _random(self) -> np.random.Generator:
        return self._generator

    # -- reset ------------------------------------------------------------------------------------------------------

    @one_at_a_time
    def reset_async(self, seed: Any = None, options: ResetOptions = None, *, env_id: Any = None) -> None:
        """Begin a reset of all environments, in a new pool if there are seeds; or of those in ``env_id``, for :meth:`recv`.

        Raises:
            TypeError, ValueError: Seeds or indices of the wrong kind, any option; nothing was sent.
            AlreadyPendingCallError: An answer is owed; with ``env_id``, one of these environments is in flight.
            NotImplementedError: A mask; seeds for some environments.
            ResetNeeded: The first reset must be of all environments.
        """
        self._begin_reset(seed, options, env_id)

    @answering
    def reset_wait(self, timeout: float | None = None) -> tuple[Any, dict[str, Any]]:
        """All rows, in the order of environments; raises as ``AsyncVectorEnv.reset_wait``."""
        batch, _, _, _, infos = self._finish("reset_wait", timeout)
        return batch, infos

    # -- step -------------------------------------------------------------------------------------------------------

    @one_at_a_time
    def step_async(self, actions: Array) -> None:
        """Step all environments."""
        driver = self._pool_driver("step_async")
        driver.begin_step("step", [np.asarray(actions)], driver.all_ids)
        self._steps += self.num_envs

    @answering
    def step_wait(self, timeout: float | None = None) -> Any:
        """All rows, in the order of environments; raises as ``AsyncVectorEnv.step_wait``."""
        return self._finish("step_wait", timeout)

    def _finish(self, method: str, timeout: float | None) -> Any:
        self._require_open(method)
        driver = self._pools.driver
        advance(Phase.DEFAULT if driver is None else driver.phase, method, self)
        return self._read(self._pools.current.finish(deadline_of(timeout)))

    def rows(self, env_id: Any) -> npt.NDArray[np.intp]:
        """Which environments a ``send`` is about."""
        if env_id is not None:
            return env_ids_of(env_id, self.num_envs)
        return self._pool_driver("send").latest[0].astype(np.intp)

    @one_at_a_time
    def send(self, actions: Array, rows: Array) -> None:
        """Step some environments, which must not be in flight."""
        driver = self._pool_driver("send")
        driver.begin_step("send", [np.asarray(actions)], driver.choose(rows))
        self._steps += len(rows)

    @answering
    def recv(self, timeout: float | None = None, *, count: int | None = None) -> Any:
        """The next ``count`` environments (default ``batch_size``), as they come from the pool.

        Raises:
            NoAsyncCallError: Fewer than ``count`` environments are in flight; or EnvPool, which answers in batches of
                ``batch_size``, cannot fill one with them.
            AlreadyPendingCallError: The answer to :meth:`step_async` is owed.
            StepTimeout: Not within ``timeout`` seconds; nothing is lost, call again.
        """
        driver = self._pool_driver("recv")
        number = None if count is None else count_of(count, self.batch_size, self.num_envs)
        answer = driver.recv(number, deadline_of(timeout))
        result = self._read(answer)
        ids = answer[0].env_ids
        result[-1]["env_id"], result[-1]["_env_id"] = ids.astype(np.intp), np.ones(len(ids), np.bool_)
        return result

    # -- rows -------------------------------------------------------------------------------------------------------

    def _read(self, answer: PlayerAnswer) -> tuple[Any, Array, Array, Array, dict[Any, Any]]:
        """An answer of the pool as rows of all agents, with infos as the engine gives them."""
        rows, acted, acting = answer
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
            "obs": players[self._observed].astype(self.task.observation_space.dtype),
            "signals": np.stack(
                [players["reward"] * ~begins[:, None], *(flags[key] for key in FLAGS)], axis=1, dtype=np.float64
            ),
        }
        return batch, np.zeros(len(done)), terminated, truncated, self._infos(rows, acting)

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

    def render(self) -> Any:
        """Not here."""
        unable(self, "`render`", "EnvPool draws no environments of several players")

    def close(self, **kwargs: Any) -> None:
        """Let go of the pool: its environments and threads are gone when this returns. Idempotent."""
        if not self.closed:
            self._let_go(**kwargs)
            self.closed = True

    def __repr__(self) -> str:
        driver = self._pools.driver
        phase = Phase.CLOSED if self.closed else Phase.DEFAULT if driver is None else driver.phase
        return f"PlayerPool({self.task.id}, num_envs={self.num_envs}, phase={phase.name})"


PlayerPool.__name__ = "MultiAgentVecEnv"  # the name in messages, which is what the caller has


def _roster(players: int, observation: Any, action: Any) -> Roster:
    agents = tuple(f"player_{index}" for index in range(players))
    everyone = Part(None, tuple(range(players)), True, observation, action)
    return Roster(
        agents, (observation,) * players, (action,) * players, (everyone,), "stack",
        state_space=None, pad_value=0, any_end=False, info_masks=True,
    )  # fmt: skip
