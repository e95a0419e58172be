"""The engine with hosts for workers, and what only hosts have to say.

Everything else, phases and seeds to restarts, is :class:`~vecenv.engine.engine.Engine`'s.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from vecenv.backends.ray.host import HostPlan, HostReady
from vecenv.backends.ray.pool import GRACE, HostPool
from vecenv.engine.engine import Engine, Policy
from vecenv.engine.handles import command_of, envs_text
from vecenv.engine.pending import Answer, Result, Worker
from vecenv.engine.processes import PoolOptions
from vecenv.engine.recovery import writeable
from vecenv.errors import ErrorRecord
from vecenv.link.messages import PackedError, unpack_error
from vecenv.shm import Arena, Batch, Layout
from vecenv.worker.main import WorkerPlan

__all__ = ["HostsEngine", "disagreements"]


class HostsEngine(Engine):
    """The engine, with hosts for workers.

    Args:
        pool: Hosts that are ready.
        num_envs: Number of environments in all of them.
        layout: What lies where in the caller's memory.
        make_store: As of :class:`~vecenv.engine.engine.Engine`.
        plan: Of which only the autoreset mode is read.
        policy: What to do about hosts that fail.
    """

    backend = "ray"

    def __init__(
        self,
        pool: HostPool,
        env_fns: Sequence[Callable[[], Any]],
        layout: Layout,
        make_store: Callable[[Batch], Any],
        plan: WorkerPlan,
        policy: Policy,
        mismatches: list[tuple[int, str, str]],
    ) -> None:
        self._host_pool: Any = pool
        self._found = mismatches
        options = PoolOptions(None, False, "", policy.start_timeout)
        super().__init__(env_fns, layout, make_store, plan, options, policy, len(pool.workers), 0)

    def _open_pool(self, plan: WorkerPlan, arena: Arena, options: PoolOptions, num_workers: int) -> Any:
        self._host_pool.attach(self.batch, arena, self._infos.learn, self)
        return self._host_pool

    def _start(self, env_fns: Sequence[Callable[[], Any]], plan: WorkerPlan, num_workers: int, caller_share: int) -> None:
        """They are started: the spaces came from them."""
        self.mismatches = self._found

    def read(self, answers: Iterable[tuple[Worker, Answer]]) -> Result:
        listed = list(answers)
        result = super().read(listed)
        for host, answer in listed:
            self.failed.update(answer.lost)
            if answer.error is not None:
                result = writeable(result)
                result.errors.append(self._error_of(host, answer.error))
        return result

    def _error_of(self, host: Worker, packed: PackedError) -> tuple[Exception, ErrorRecord]:
        busy = self.oldest_of(host)
        command = "a request" if busy is None else command_of(busy, host)
        note = f"{host.label}, {envs_text(host.rows)}, during {command}"
        record = ErrorRecord(None, host.index, host.pid, command, unpack_error(packed, note), packed.text, time.monotonic())
        return unpack_error(packed, note), record

    def stats(self) -> dict[str, float]:
        """As :meth:`Engine.stats`, of all hosts together; one that is busy for long or dead is left out."""
        own = super().stats()
        if self._host_pool.closing:  # no host is left to ask
            return own
        each = list(self._host_pool.ask_all("stats", timeout=GRACE).values())
        if each:
            for key in ("restarts", "bytes_pickled"):
                own[key] += sum(stats[key] for stats in each)
            own["step_time_mean"] = float(np.mean([stats["step_time_mean"] for stats in each]))
            for key in ("step_time_slowest_env", "straggler_share"):
                own[key] = max(stats[key] for stats in each)
        return own


def disagreements(plans: Sequence[HostPlan], readies: Sequence[HostReady], fits: Any) -> list[tuple[int, str, str]]:
    """(env, which space, what it is) for environments whose spaces do not go with those of the first host."""
    first = readies[0]
    found = [mismatch for ready in readies for mismatch in ready.mismatches]
    for plan, ready in zip(plans[1:], readies[1:], strict=True):
        where = f"on host {plan.index} (node {ready.node})"
        if not fits(ready.observation_space, first.observation_space):
            found.append((plan.rows.start, "observation", f"{ready.observation_space} {where}"))
        elif ready.action_space != first.action_space:
            found.append((plan.rows.start, "action", f"{ready.action_space} {where}"))
    return found
