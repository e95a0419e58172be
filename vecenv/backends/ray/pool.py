"""Hosts, seen from the caller: what the pool of workers is on one machine.

Of every request that was sent a reference is kept until its answer was taken in, oldest first; a host answers in the order
in which it was asked. A request is never sent twice: whether a step that went unanswered was taken cannot be known, so a
host that cannot be reached is ended and counts as dead.

What answers is behind :class:`Hosts`, so that the pool can be tested and measured without a cluster.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal, Protocol

import cloudpickle
import numpy as np

from vecenv.backends.ray.host import HostPlan, HostReady, Reply
from vecenv.backends.ray.packing import Packing
from vecenv.errors import HostDied, StartupTimeout
from vecenv.failure import PackedError, unpack
from vecenv.infos import NO_INFO, Definition
from vecenv.protocol import Op
from vecenv.rows import Failure
from vecenv.shm import Arena, Batch
from vecenv.wire import load
from vecenv.worker import Ready
from vecenv.workers import COMMANDS, Answer, Desk, Request, envs_text

__all__ = ["HostAnswer", "HostPool", "Hosts", "Lost", "RemoteHost"]

GRACE: Final = 2.0  # for a host to come up or to say goodbye, beyond what its environments may take
_PAUSES: Final = (0.5, 1.0, 2.0, 4.0)  # between attempts at a new host
_START_GRACE: Final = 30.0  # for a process with its imports on a machine that may be busy


class Lost(Exception):
    """A host ended, or cannot be reached any more."""


class Hosts(Protocol):
    """A way to processes on other machines."""

    def launch(self, plan: HostPlan) -> Any:
        """Begin to start a host at the place with ``plan.index``."""

    def require_places(self, timeout: float) -> None:
        """Wait until there is a place for every host. Raises :class:`~vecenv.errors.ClusterError`."""

    def submit(self, host: Any, method: str, *args: Any) -> Any:
        """Call a method of :class:`~vecenv.backends.ray.host.Host`; returns a reference to the answer."""

    def fetch(self, references: Sequence[Any], timeout: float | None) -> list[Any] | None:
        """All answers, or ``None`` if one is late or lost."""

    def wait(self, references: Sequence[Any], timeout: float | None) -> list[Any]:
        """Those of ``references`` that are answered or lost, at least one unless the time is up."""

    def result(self, reference: Any) -> Any:
        """The answer. Raises :class:`Lost`."""

    def kill(self, host: Any) -> None:
        """End a host at once."""

    def close(self) -> None:
        """End everything."""


@dataclass(slots=True)
class HostAnswer(Answer):
    """An answer, and what only hosts have to say."""

    lost: dict[int, str] = field(default_factory=dict)
    error: PackedError | None = None


class RemoteHost(Desk):
    """A host, seen from the caller."""

    local: Literal[False] = False

    def __init__(self, plan: HostPlan, actor: Any, ready: HostReady, hosts: Hosts) -> None:
        super().__init__(plan.index, plan.rows)
        self.plan = plan
        self.actor = actor
        self.pid = ready.pid
        self.node = ready.node
        self.num_workers = ready.num_workers
        self.who = f"host {self.index} (node {self.node}), pid {self.pid}"
        self.exitcode: int | None = None
        self.overdue = False
        self.references: deque[Any] = deque()  # one a request in `asked`
        self._hosts = hosts

    def __repr__(self) -> str:
        state = "dead" if self.death else "busy" if self.asked else "idle"
        return f"RemoteHost({self.index}, {envs_text(self.rows)}, node={self.node}, pid={self.pid}, {state})"

    def attach(self, batch: Batch) -> None:
        """Say what actions and answers look like."""
        where = slice(self.rows.start, self.rows.stop)
        self._own_actions = [leaf[where] for leaf in batch.actions or ()]
        self._actions = Packing(self._own_actions)
        numbers = (batch.rewards, batch.terminations, batch.truncations)
        self._answers = Packing([array[where] for array in (*numbers, *(batch.observations or ()))])

    def ask_step(self, request: Request) -> None:
        """Send a request for a step of all rows, with actions from the batch."""
        self.ask(request, "step", self._actions.pack(self._own_actions))

    def ask(self, request: Request, method: str, *arguments: Any) -> None:
        """Send a request. To a dead host it is answered at once, by its death."""
        self.asked.append(request)
        if self.death is not None:
            self._lose_all()
            return
        self.references.append(self._hosts.submit(self.actor, method, *arguments))

    def opened(self, reply: Any) -> Reply:
        """An answer as it is said in full."""
        if isinstance(reply, Reply):
            return reply
        rewards, terminations, truncations, *leaves = self._answers.unpack(reply)
        return Reply(leaves=leaves, numbers=(rewards, terminations, truncations))

    def bury(self, reason: str = "") -> None:
        """End the host for good; everything it was asked is lost."""
        if self.death is not None:
            return
        self._hosts.kill(self.actor)
        command = COMMANDS[self.asked[0].op] if self.asked else "idle"
        doing = "while idle" if command == "idle" else f"during {command}"
        self.death = HostDied(
            f"{self.who}, {envs_text(self.rows)}, died {doing}: {reason}",
            worker=self.index, envs=list(self.rows), pid=self.pid, command=command,
        )  # fmt: skip
        self._lose_all()

    def _lose_all(self) -> None:
        self.references.clear()
        while self.asked:
            self.replies.append(Answer(self.asked.popleft(), death=self.death))

    # What a worker process has, so that a host can be late and be ended like one.

    def stack(self) -> str:
        """Nobody on this machine can look into it."""
        return ""

    def signal(self, number: int) -> None:
        """End it, whatever the signal."""
        self._hosts.kill(self.actor)

    def is_stopped(self) -> bool:
        """Not known."""
        return False


class HostPool:
    """The hosts of one vector environment: what :class:`~vecenv.pool.WorkerPool` is for worker processes."""

    def __init__(self, hosts: Hosts, plans: Sequence[HostPlan], start_timeout: float) -> None:
        self.workers: list[RemoteHost] = []
        self.failures_in_close: list[tuple[Failure, RemoteHost]] = []
        self.time_waiting = 0.0
        self._hosts = hosts
        self._patience = start_timeout + _START_GRACE
        self._owner = os.getpid()
        self._seq = 0
        self._arena: Arena | None = None
        self.readies = self._start(plans)

    @property
    def abandoned(self) -> bool:
        """Whether this process was forked from the one that asks the hosts."""
        return os.getpid() != self._owner

    # -- starting ---------------------------------------------------------------------------------------------------

    def _start(self, plans: Sequence[HostPlan]) -> list[HostReady]:
        """Start all hosts at once; if one fails, what was started is left to ``hosts.close()``."""
        actors = [self._hosts.launch(plan) for plan in plans]
        references = [self._hosts.submit(actor, "start") for actor in actors]
        deadline = time.monotonic() + self._patience
        readies = [self._ready(plan, reference, deadline) for plan, reference in zip(plans, references, strict=True)]
        self.workers = [
            RemoteHost(plan, actor, ready, self._hosts) for plan, actor, ready in zip(plans, actors, readies, strict=True)
        ]
        return readies

    def _ready(self, plan: HostPlan, reference: Any, deadline: float) -> HostReady:
        where = f"host {plan.index} ({envs_text(plan.rows)})"
        if not self._hosts.wait([reference], max(deadline - time.monotonic(), 0.0)):
            raise StartupTimeout(f"{where} was not ready within {self._patience} seconds of its start")
        try:
            ready: HostReady = self._hosts.result(reference)
        except Lost as error:
            raise HostDied(
                f"{where} died during its start: {error}", worker=plan.index, envs=list(plan.rows), command="start"
            ) from error
        if ready.error is not None:
            where = f"{where}, node {ready.node}, pid {ready.pid}, during start"
            raise unpack(ready.error, f"{where}: what is called env 0 here is env {plan.rows.start}")
        return ready

    def replace(self, host: RemoteHost) -> Ready:
        """Start a new host in the place of a dead one, wherever the cluster has room for it."""
        for pause in _PAUSES:
            self._hosts.require_places(self._patience)  # a node that was lost may be replaced, or another have room
            try:
                new = self._launch_one(host.plan)
                break
            except HostDied:  # a cluster may not have noticed yet that a node is gone, and try to use it
                time.sleep(pause)
        else:
            new = self._launch_one(host.plan)
        new.attach(self._batch)
        self.workers[self.workers.index(host)] = new
        return Ready(new.pid, [], [])

    def _launch_one(self, plan: HostPlan) -> RemoteHost:
        actor = self._hosts.launch(plan)
        try:
            ready = self._ready(plan, self._hosts.submit(actor, "start"), time.monotonic() + self._patience)
        except BaseException as error:
            self._hosts.kill(actor)
            if isinstance(error, StartupTimeout):
                self._hosts.require_places(0.0)
            raise
        return RemoteHost(plan, actor, ready, self._hosts)

    # -- asking and answering ---------------------------------------------------------------------------------------

    def attach(self, batch: Batch, store: Any, arena: Arena, learn: Callable[[dict[int, Any]], None]) -> None:
        """Say where answers go."""
        self._batch = batch
        for host in self.workers:
            host.attach(batch)
        self._store = store
        self._arena = arena
        self._learn = learn

    def next_seq(self) -> int:
        """A fresh sequence number."""
        self._seq += 1
        return self._seq

    def post(self, host: RemoteHost, request: Request) -> None:
        """Ask a host."""
        payload = request.payload
        request.payload = None
        whole = len(request.rows) == len(host.rows)
        steps = payload is None and request.op in (Op.STEP, Op.STEP_SOME)
        if steps and whole:
            host.ask_step(request)
            return
        if steps:
            payload = tuple(leaf[list(request.rows)] for leaf in self._batch.actions or ())
        elif payload is not None:
            payload = cloudpickle.dumps(payload)
        rows = None if whole else [row - host.rows.start for row in request.rows]
        host.ask(request, "serve", int(request.op), rows, payload)

    def ring(self, seq: int) -> None:
        """Ask every host for a step of all its rows, with actions from the batch."""
        for host in self.workers:
            host.ask_step(Request(seq, Op.STEP, host.rows))

    def gather(self, hosts: Sequence[RemoteHost], deadline: float | None) -> list[RemoteHost]:
        """Wait until each of ``hosts`` has answered; returns those that had not when the time was up."""
        began = time.perf_counter()
        try:
            owing = [host for host in hosts if host.asked]
            if all(len(host.references) == 1 for host in owing):  # nearly always: one call for everybody
                replies = self._hosts.fetch([host.references[0] for host in owing], _left(deadline))
                if replies is not None:
                    for host, reply in zip(owing, replies, strict=True):
                        self._take(host, reply)
                    return []
            while owing and self._take_some(owing, deadline):
                owing = [host for host in owing if host.asked]
            return owing
        finally:
            self.time_waiting += time.perf_counter() - began

    def gather_any(self, deadline: float | None) -> bool:
        """Take in at least one answer, waiting for it; false when the time was up."""
        if any(host.replies for host in self.workers):
            return True
        owing = [host for host in self.workers if host.asked]
        began = time.perf_counter()
        try:
            return bool(owing) and self._take_some(owing, deadline)
        finally:
            self.time_waiting += time.perf_counter() - began

    def _take_some(self, hosts: Sequence[RemoteHost], deadline: float | None) -> bool:
        """Take in the oldest answers of those of ``hosts`` that have one; false when the time was up."""
        oldest = {host.references[0]: host for host in hosts}
        answered = self._hosts.wait(list(oldest), _left(deadline))
        for reference in answered:
            host = oldest[reference]
            try:
                reply = self._hosts.result(reference)
            except Lost as error:
                host.bury(str(error))
            else:
                self._take(host, reply)
        return bool(answered)

    def _take(self, host: RemoteHost, answered: Any) -> None:
        """Put the answer to the oldest request where the engine looks for it, as a worker does itself."""
        reply = host.opened(answered)
        request = host.asked.popleft()
        host.references.popleft()
        first = host.rows.start
        whole = len(request.rows) == len(host.rows)
        rows: Any = slice(first, host.rows.stop) if whole else np.array(request.rows)
        batch = self._batch
        if reply.leaves is not None:
            self._store.put_part(host.index, None if whole else [row - first for row in request.rows], reply.leaves)
        if reply.numbers is not None:
            batch.rewards[rows], batch.terminations[rows], batch.truncations[rows] = reply.numbers
        outcome = None if reply.outcome is None else load(reply.outcome)
        news: dict[int, Definition] = {}
        if reply.infos is not None:
            batch.info_schemas[rows], records, news = reply.infos
            batch.infos[rows, : records.shape[1]] = records
        elif request.op <= Op.REBUILD_SOME:
            batch.info_schemas[rows] = NO_INFO
        answer = HostAnswer(request, reply.columns, outcome, None, reply.lost or {}, reply.error)
        self._learn(news)
        host.replies.append(answer)

    def ask_all(self, method: str, *args: Any, timeout: float | None = None) -> dict[int, Any]:
        """Call a method of every host that is alive; index -> answer, of those that answer within the time."""
        deadline = None if timeout is None else time.monotonic() + timeout
        alive = [host for host in self.workers if host.death is None]
        owed = {self._hosts.submit(host.actor, method, *args): host.index for host in alive}
        answers: dict[int, Any] = {}
        while owed and (answered := self._hosts.wait(list(owed), _left(deadline))):
            for reference in answered:
                with contextlib.suppress(Lost):
                    answers[owed.pop(reference)] = self._hosts.result(reference)
        return answers

    # -- ending -----------------------------------------------------------------------------------------------------

    def close(self, timeout: float, *, terminate: bool) -> None:
        """End all hosts within about ``timeout`` seconds: ask, then kill."""
        if self.abandoned:
            return
        try:
            if not terminate:
                said = self.ask_all("close", timeout, timeout=timeout + GRACE)
                self.failures_in_close += [(failure, self.workers[index]) for index in said for failure in said[index]]
        finally:
            self._hosts.close()
            if self._arena is not None:
                self._arena.close()

    def __repr__(self) -> str:
        return f"HostPool({self.workers})"


def _left(deadline: float | None) -> float | None:
    return None if deadline is None else max(deadline - time.monotonic(), 0.0)
