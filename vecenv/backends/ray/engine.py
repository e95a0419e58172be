"""The engine with hosts for workers, and what only hosts have to say.

Everything else, phases and seeds to restarts, is :class:`~vecenv.engine.Engine`'s.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from vecenv.backends.ray.host import HostPlan, HostReady
from vecenv.backends.ray.pool import GRACE, HostAnswer, HostPool
from vecenv.engine import Engine, Policy
from vecenv.errors import ErrorRecord
from vecenv.failure import PackedError, unpack
from vecenv.pool import PoolOptions
from vecenv.requests import Pending, Result
from vecenv.shm import Arena, Batch, Layout
from vecenv.worker import Plan
from vecenv.workers import COMMANDS, Answer, AnyWorker, Request, envs_text

__all__ = ["HostsEngine", "disagreements"]


class HostsEngine(Engine):
    """The engine, with hosts for workers.

    Args:
        pool: Hosts that are ready.
        num_envs: Number of environments in all of them.
        layout: What lies where in the caller's memory.
        make_store: As of :class:`~vecenv.engine.Engine`.
        plan: Of which only the autoreset mode is read.
        policy: What to do about hosts that fail.
    """

    def __init__(
        self,
        pool: HostPool,
        env_fns: Sequence[Callable[[], Any]],
        layout: Layout,
        make_store: Callable[[Batch], Any],
        plan: Plan,
        policy: Policy,
        mismatches: list[tuple[int, str, str]],
    ) -> None:
        self._host_pool: Any = pool
        self.mismatches = mismatches
        options = PoolOptions(None, False, "", policy.start_timeout)
        super().__init__(env_fns, layout, make_store, plan, options, policy, len(pool.workers), 0)

    def _open_pool(self, plan: Plan, arena: Arena, options: PoolOptions, num_workers: int) -> Any:
        self._host_pool.attach(self.batch, self.store, arena, self._reader.learn)
        return self._host_pool

    def _start(self, env_fns: Sequence[Callable[[], Any]], plan: Plan, num_workers: int, caller_share: int) -> None:
        """They are started: the spaces came from them."""

    def absorb(self, answers: Iterable[tuple[AnyWorker, Answer]]) -> Result:
        listed = list(answers)
        result = super().absorb(listed)
        errors: list[Exception] = []
        for host, answer in listed:
            if isinstance(answer, HostAnswer):
                self.failed.update(answer.lost)
                if answer.error is not None:
                    errors.append(self._error_of(host, answer.error, answer.request))
        if errors:
            for other in errors[1:]:
                errors[0].add_note(f"also: {other}")
            raise errors[0]
        return result

    def _error_of(self, host: AnyWorker, packed: PackedError, request: Request) -> Exception:
        command = COMMANDS[request.op]
        error = unpack(packed, f"{host.who}, {envs_text(host.rows)}, during {command}")
        record = ErrorRecord(None, host.index, host.pid, command, error, packed.text, time.monotonic())
        self.ledger.errors.append(record)
        return error

    # What a host sent last stays in the store until it sends something new, so nothing has to be kept beside it.

    def remember(self, rows: list[int] | None) -> None:
        """Not needed."""

    def _restart(self, lost: list[int], result: Result, pending: Pending) -> None:
        super().remember(None)
        super()._restart(lost, result, pending)

    def stats(self) -> dict[str, float]:
        """As :meth:`Engine.stats`, of all hosts together; one that is busy for long or dead is left out."""
        own = super().stats()
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
