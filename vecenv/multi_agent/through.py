"""The engine under a vector environment with agents, and what is left to it: calls into environments, figures, the end."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import numpy.typing as npt
from gymnasium.vector.utils import batch_space

from vecenv.engine.vector_env import AsyncVectorEnv
from vecenv.front.arguments import env_ids_of
from vecenv.front.capabilities import Capabilities
from vecenv.multi_agent.adapter import AgentsEnv, EnvFn
from vecenv.multi_agent.roster import Roster

if TYPE_CHECKING:
    from vecenv.multi_agent.player_pool import PlayerPool

__all__ = ["AgentRows", "ThroughToRows"]


class AgentRows(AsyncVectorEnv[Any, Any]):
    """The engine over adapted environments; spaces come from the roster instead of from one more environment."""

    def __init__(self, env_fns: Sequence[EnvFn], *, template: Any, **options: Any) -> None:
        self._template = (getattr(template, "metadata", None) or {}, getattr(template, "render_mode", None))
        super().__init__(env_fns, observation_mode="different", **options)

    def _read_spaces(self, env_fns: Sequence[Any]) -> None:
        roster: Roster = env_fns[0].roster
        metadata, self.render_mode = self._template
        self.metadata = {**metadata, "autoreset_mode": self.autoreset_mode}
        self.single_observation_space = self.observation_space = roster.observation_space()
        self.single_action_space = roster.action_space()
        self.action_space = batch_space(self.single_action_space, self.num_envs)

    def rows(self, env_id: Any) -> npt.NDArray[np.intp]:
        """Which environments a ``send`` is about."""
        return self._owed.latest if env_id is None else env_ids_of(env_id, self.num_envs)


AgentRows.__name__ = "MultiAgentVecEnv"  # the name in the engine's own messages


class ThroughToRows:
    """Passes calls on to ``_rows``, the vector environment whose observations are rows of all agents."""

    _rows: AgentRows | PlayerPool

    def call(self, name: str, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        """An attribute of every (PettingZoo) environment, called with the arguments if it can be called."""
        return self._rows.call(name, *args, **kwargs)

    def call_async(self, name: str, /, *args: Any, **kwargs: Any) -> None:
        """Begin a :meth:`call`."""
        self._rows.call_async(name, *args, **kwargs)

    def call_wait(self, timeout: float | None = None) -> tuple[Any, ...]:
        """Fetch the answer to :meth:`call_async`: one result an environment."""
        return self._rows.call_wait(timeout)

    def exec_func(self, func: Callable[..., Any], indices: Any = None, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        """``func(env, *args, **kwargs)`` of the environments ``indices``; ``None`` for the others.

        ``env`` is what the ``env_fn`` built, so that what ``func`` changes stays changed; of :class:`StackedAgents` and
        :class:`TurnBased`, as of RLlib's, it is the environment inside.
        """
        self.exec_func_send(func, indices, *args, **kwargs)
        return self.exec_func_fetch()

    def exec_func_send(self, func: Callable[..., Any], indices: Any = None, *args: Any, **kwargs: Any) -> None:
        """Begin an :meth:`exec_func`."""
        if not callable(func):
            raise TypeError(f"exec_func wants a function of an environment, got {func!r}")
        self._rows.exec_func_send(_inside, indices, func, args, kwargs)

    def exec_func_outside(self, func: Callable[[AgentsEnv], Any]) -> tuple[Any, ...]:
        """``func`` of every environment's adapter: what is about the row, and not about the environment."""
        return self._rows.exec_func(func)

    def exec_func_fetch(self, timeout: float | None = None) -> tuple[Any, ...]:
        """Fetch the answer to :meth:`exec_func_send`."""
        return self._rows.exec_func_fetch(timeout)

    def get_attr(self, name: str) -> tuple[Any, ...]:
        """An attribute of every environment."""
        return self._rows.get_attr(name)

    def set_attr(self, name: str, values: Any) -> None:
        """Set an attribute of every environment; a list or tuple is one value an environment."""
        self._rows.set_attr(name, values)

    def set_next_options(self, options: Any = None, *, seed: Any = None, env_id: Any = None) -> None:
        """Options, and seeds, of the next episode that autoreset begins; as of ``AsyncVectorEnv.set_next_options``."""
        self._rows.set_next_options(options, seed=seed, env_id=env_id)

    def render(self) -> tuple[Any, ...] | None:
        """One frame an environment."""
        return self._rows.render()

    call_send = call_async
    call_fetch = call_wait

    # -- what can be looked at, and the end -------------------------------------------------------------------------

    @property
    def closed(self) -> bool:
        """Whether it was closed."""
        return self._rows.closed

    @property
    def capabilities(self) -> Capabilities:
        """What the engine can do."""
        return self._rows.capabilities

    @property
    def errors(self) -> Any:
        """What failed so far, as of ``AsyncVectorEnv.errors``."""
        return self._rows.errors

    def _read(name: str) -> Any:  # type: ignore[misc]  # noqa: N805
        """What is the same of the rows."""
        return property(lambda self: getattr(self._rows, name), doc=f"As of ``AsyncVectorEnv.{name}``.")

    error_queue, in_flight, plan, step_timeout = map(_read, ("error_queue", "in_flight", "plan", "step_timeout"))
    processes, parent_pipes, worker_rows = map(_read, ("processes", "parent_pipes", "worker_rows"))
    env_fns, local_envs, observations, spec = map(_read, ("env_fns", "local_envs", "observations", "spec"))
    shared_memory, copy, context, daemon = map(_read, ("shared_memory", "copy", "context", "daemon"))
    worker, observation_mode, max_concurrency = map(_read, ("worker", "observation_mode", "max_concurrency"))
    del _read

    def abandon(self, env_id: Any) -> None:
        """Wait no longer for some environments; as of ``AsyncVectorEnv.abandon``."""
        self._rows.abandon(env_id)

    def publish_stats(self, name: str | None = None) -> None:
        """Let ``vecenv top`` show the workers; as of ``AsyncVectorEnv.publish_stats``."""
        self._rows.publish_stats(name)

    def stats(self) -> dict[str, float]:
        """Figures of the engine (see ``AsyncVectorEnv.stats``); a step is one of an environment, with all its agents."""
        return self._rows.stats()

    def close(self, **kwargs: Any) -> None:
        """Close all environments and end all workers; arguments as of ``AsyncVectorEnv.close``."""
        self._rows.close(**kwargs)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _inside(env: AgentsEnv, func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    return func(env.inside, *args, **kwargs)
