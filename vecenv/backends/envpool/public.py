"""A pool whose private functions are missing, driven through its public ones.

The drivers talk to a pool by ``_send``, ``_recv`` and ``_reset``, which take and give lists of arrays. Those names are
EnvPool's own and may go; ``send``, ``recv``, ``async_reset`` and ``reset`` are its interface. :class:`PublicPool` makes the
former of the latter: slower, because EnvPool converts everything to its own dicts and here it is converted back.

What the drivers need besides is that no Ctrl-C falls between two parts of one thing (see ``wire``). The public functions are
Python, and Python can be interrupted anywhere, but only in its main thread. So one helper thread calls them, and to the
drivers ``_send`` and ``_reset`` are ``put`` of a queue, and ``_recv`` is ``get`` of another: C functions.
"""

from __future__ import annotations

import operator
import weakref
from collections.abc import Callable, Mapping
from queue import SimpleQueue
from threading import Thread, current_thread
from typing import Any

import numpy as np

from vecenv.backends.envpool.helpers import join, watch
from vecenv.backends.envpool.rows import Array, States
from vecenv.backends.envpool.task import Task, quietly

__all__ = ["PublicPool", "is_complete"]


def is_complete(pool: Any) -> bool:
    """Whether a pool has the private functions that drivers call."""
    return hasattr(pool, "_send") and hasattr(pool, "_recv") and hasattr(pool, "_reset")


class PublicPool:
    """Stands in for a pool, for the drivers.

    Args:
        pool: What EnvPool made.
        task: What it is of.
        batch_size: Rows in one answer.

    Raises:
        RuntimeError: With first-ready batches and an exact time limit, which need a reset of some environments while others
            are in flight; EnvPool's public functions have none.
    """

    def __init__(self, pool: Any, task: Task, batch_size: int) -> None:
        if batch_size < int(task.config["num_envs"]) and task.limit is not None:
            raise RuntimeError(
                f"this version of EnvPool does not let vecenv keep the time limit of {task.id!r} in first-ready batches: "
                "use batch_size=num_envs, or exact_time_limit=False"
            )
        requests: SimpleQueue[Any] = SimpleQueue()
        answers: SimpleQueue[Callable[[], States]] = SimpleQueue()
        quietly(lambda: pool.observation_space)  # kept there, and looked at with every answer
        self._pool = pool
        self._send = self._reset = requests.put
        # each answer is something to be called, so that an error is raised to whoever receives it
        self._recv = map(operator.call, iter(answers.get, None)).__next__
        serve = _Server(pool, task, batch_size, requests, answers).serve
        self._thread = Thread(target=serve, name="vecenv-envpool-public", daemon=True)
        self._end = weakref.finalize(self, requests.put, None)  # also where a Ctrl-C keeps close() from being called
        self._thread.start()

    def render(self, **options: Any) -> Any:
        """As the pool's."""
        return self._pool.render(**options)

    def xla(self) -> Any:
        """As the pool's."""
        return self._pool.xla()

    def close(self, timeout: float = 5.0) -> None:
        """End the helper thread and let go of the pool."""
        self._end()
        join(self._thread, timeout)
        self._pool = None


class _Server:
    """What the helper thread does; it knows nothing of :class:`PublicPool`, so that one can be forgotten."""

    def __init__(
        self,
        pool: Any,
        task: Task,
        batch_size: int,
        requests: SimpleQueue[Any],
        answers: SimpleQueue[Callable[[], States]],
    ) -> None:
        self._pool = pool
        self._requests, self._answers = requests, answers
        self._num_envs, self._batch_size = int(task.config["num_envs"]), batch_size
        self._lockstep = batch_size == self._num_envs
        self._action_keys, self._state_keys = task.action_keys, task.state_keys
        self.thread_inside: Thread | None = None
        watch(self)

    def serve(self) -> None:
        """Requests in their order; answers as soon as the pool has enough for one."""
        flying = 0
        while (request := self._requests.get()) is not None:
            self.thread_inside = current_thread()
            try:
                if isinstance(request, list):
                    flying += len(request[0])
                    self._pool.send(dict(zip(self._action_keys, request, strict=True)))
                elif len(request) == self._num_envs:
                    flying += len(request)
                    self._pool.async_reset()
                else:
                    self._answers.put([self._reset_some(request)].pop)
                # (lockstep: any number of environments is one answer)
                while flying and (self._lockstep or flying >= self._batch_size):
                    answer = self._pool.recv()
                    flying -= len(answer[1])
                    self._answers.put([self._states(*answer)].pop)
            except Exception as error:
                self._answers.put(_raising(error))
            self.thread_inside = None

    def _reset_some(self, ids: Array) -> States:
        if not self._lockstep:
            raise RuntimeError(
                "this version of EnvPool cannot reset some environments while others are in flight: reset() all, or use "
                "batch_size=num_envs"
            )
        observations, infos = self._pool.reset(ids)
        no = np.zeros(len(ids), dtype=np.bool_)
        return self._states(observations, np.zeros(len(ids), dtype=np.float32), no, no.copy(), infos)

    def _states(self, observations: Any, rewards: Array, terminated: Array, truncated: Array, infos: Any) -> States:
        """What the private ``_recv`` would have returned, as far as it is ever looked at."""
        elapsed = infos["elapsed_step"]
        known: dict[str, Any] = {
            "reward": rewards,
            "done": terminated | truncated,
            "trunc": truncated,
            "terminated": terminated,
            "elapsed_step": elapsed,
            "step_type": elapsed,  # 0 in the first row of an episode, like the pool's own
            "discount": 1 - terminated.astype(np.float32),
        }
        return [known[key] if key in known else _leaf(key, observations, infos) for key in self._state_keys]


def _leaf(key: str, observations: Any, infos: Mapping[str, Any]) -> Array:
    """The array of one state key: ``obs``, ``obs:a.b`` or ``info:a.b``."""
    kind, *path = key.replace(":", ".").split(".")
    at: Any = infos if kind == "info" else observations
    for name in path:
        if isinstance(at, Mapping):  # EnvPool unwraps an observation that is only one array
            at = at[name]
    found: Array = at
    return found


def _raising(error: Exception) -> Callable[[], States]:
    def fail() -> States:
        raise error

    return fail
