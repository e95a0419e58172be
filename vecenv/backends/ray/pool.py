"""Hosts, seen from the caller: what the pool of workers is on one machine.

What a host was asked stands in the table of pending requests, and with it the reference of the answer. Where an exception
fell between sending and keeping the reference, the request is sent again under the same number, and a host gives the answer
it gave: nothing is carried out twice. Whether a step was taken by a host that cannot be reached cannot be known, so such a
host is ended and counts as dead.

What answers is behind :class:`Hosts`, so that the pool can be tested and measured without a cluster.
"""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final, Protocol

import cloudpickle
import numpy as np
from gymnasium.error import ClosedEnvironmentError

from vecenv.backends.ray.host import HostPlan, HostReady, HostReply, Packing
from vecenv.engine.handles import command_of, envs_text
from vecenv.engine.pending import ONLY_COLUMNS, PLAIN, Answer, Death, PendingRequests, Request, Worker, WorkerRequest
from vecenv.errors import HostDied, StartupTimeout
from vecenv.front.driver import left_in_a_fork
from vecenv.link.infos import NO_INFO
from vecenv.link.messages import Failure, Op, unpack_error
from vecenv.shm import Arena, Batch
from vecenv.worker.main import Ready

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


class RemoteHost(Worker):
    """A host, seen from the caller. No process of this machine can inspect it."""

    def __init__(self, plan: HostPlan, actor: Any, ready: HostReady, hosts: Hosts) -> None:
        super().__init__(plan.index, plan.rows, ready.pid, f"host {plan.index} (node {ready.node}), pid {ready.pid}")
        self.plan = plan
        self.actor = actor
        self.ready = ready
        self.node = ready.node
        self.num_workers = ready.num_workers
        self._hosts = hosts
        self._table = PendingRequests(0)

    def __repr__(self) -> str:
        state = "dead" if self.death else "busy" if self._table.is_pending(self) else "idle"
        return f"RemoteHost({self.index}, {envs_text(self.rows)}, node={self.node}, pid={self.pid}, {state})"

    def attach(self, batch: Batch, table: PendingRequests) -> None:
        """Say what actions and answers look like, and which table records what is pending."""
        self._table = table
        where = slice(self.rows.start, self.rows.stop)
        self._own_actions = [leaf[where] for leaf in batch.actions or ()]
        self._actions = Packing(self._own_actions)
        numbers = (batch.rewards, batch.terminations, batch.truncations)
        self._answers = Packing([array[where] for array in (*numbers, *(batch.observations or ()))])

    def send(self, seq: int, part: WorkerRequest) -> None:
        """Send a request, of which the host may have heard already. To a dead host it is answered by its death."""
        if self.death is not None:
            self._table.mark_lost(self, self.death)
        elif part.op is Op.STEP and part.payload is None:
            part.reference = self._hosts.submit(self.actor, "step", seq, self._actions.pack(self._own_actions))
        else:
            rows = None if len(part.rows) == len(self.rows) else [row - self.rows.start for row in part.rows]
            part.reference = self._hosts.submit(self.actor, "serve", seq, int(part.op), rows, part.payload)

    def opened(self, reply: Any) -> HostReply:
        """An answer as it is said in full."""
        if isinstance(reply, HostReply):
            return reply
        rewards, terminations, truncations, *leaves = self._answers.unpack(reply)
        return HostReply(leaves=leaves, numbers=(rewards, terminations, truncations))

    def mark_dead(self, reason: str = "") -> None:
        """End the host for good; everything it was asked is lost."""
        if self.death is None:
            self._hosts.kill(self.actor)
            busy = self._table.oldest_of(self)
            command = "idle" if busy is None else command_of(busy, self)
            doing = "while idle" if command == "idle" else f"during {command}"
            text = f"{self.label}, {envs_text(self.rows)}, died {doing}: {reason}"
            self.death = Death(text, self.index, tuple(self.rows), self.pid, None, command, HostDied)
        self._table.mark_lost(self, self.death)

    def signal(self, number: int) -> None:
        """End it, whatever the signal."""
        self._hosts.kill(self.actor)


class HostPool:
    """The hosts of one vector environment: what :class:`~vecenv.engine.pool.WorkerPool` is for worker processes."""

    own = None  # this process steps none of the environments

    def __init__(self, hosts: Hosts, plans: Sequence[HostPlan], start_timeout: float) -> None:
        self.closing = False
        self.released = False
        self.abandoned = False
        self.failures_in_close: list[tuple[Failure, RemoteHost]] = []
        self.time_waiting = 0.0
        self._hosts = hosts
        self._patience = start_timeout + _START_GRACE
        self.keep_files: Callable[[Sequence[tuple[int, str, bytes]]], None] = lambda files: None
        self._numbers = itertools.count(1)
        self._arena: Arena | None = None
        self.table = PendingRequests(0)
        left_in_a_fork.add(self)
        self.workers = self._start(plans)

    @property
    def processes(self) -> list[RemoteHost]:
        """All of them: none lives in this process."""
        return self.workers

    def abandon(self) -> None:
        """In a forked child: it cannot ask the hosts."""
        self.abandoned = True
        self.table.abandon()

    # -- starting ---------------------------------------------------------------------------------------------------

    def _start(self, plans: Sequence[HostPlan]) -> list[RemoteHost]:
        """Start hosts, all at once; if one fails, none of them is left."""
        actors = [self._hosts.launch(plan) for plan in plans]
        try:
            references = [self._hosts.submit(actor, "start") for actor in actors]
            deadline = time.monotonic() + self._patience
            readies = [self._ready(plan, reference, deadline) for plan, reference in zip(plans, references, strict=True)]
        except BaseException as error:
            for actor in actors:
                self._hosts.kill(actor)
            if isinstance(error, StartupTimeout):
                self._hosts.require_places(0.0)
            raise
        return [RemoteHost(*started, self._hosts) for started in zip(plans, actors, readies, strict=True)]

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
            raise unpack_error(ready.error, f"{where}: what is called env 0 here is env {plan.rows.start}")
        return ready

    def replace(self, host: RemoteHost) -> Ready:
        """Start a new host in the place of a dead one, wherever the cluster has room for it."""
        for pause in _PAUSES:
            self._hosts.require_places(self._patience)  # a node that was lost may be replaced, or another have room
            try:
                (new,) = self._start([host.plan])
                break
            except HostDied:  # a cluster may not have noticed yet that a node is gone, and try to use it
                time.sleep(pause)
        else:
            (new,) = self._start([host.plan])
        new.attach(self._batch, self.table)
        self.workers[self.workers.index(host)] = new
        return Ready(new.pid, [], [])

    # -- asking and answering ---------------------------------------------------------------------------------------

    def attach(self, batch: Batch, arena: Arena, learn: Callable[[dict[int, Any]], None], table: PendingRequests) -> None:
        """Say where answers go."""
        self._batch, self._arena, self._learn, self.table = batch, arena, learn, table
        for host in self.workers:
            host.attach(batch, table)

    def next_seq(self) -> int:
        """A fresh sequence number."""
        return next(self._numbers)

    def ask_plain_step(self) -> Request:
        """Ask for a step of all rows, with actions from the batch."""
        request = Request(self.next_seq(), "step", tuple(self.workers))
        request.parts = {host.index: WorkerRequest(host, host.rows, Op.STEP) for host in self.workers}
        request.steps = len(self._batch.rewards)
        self.ask(request)
        return request

    def stage(self, part: WorkerRequest, seq: int) -> WorkerRequest:
        """A part made ready to be sent. Raises whatever pickling its payload raises; nothing was sent."""
        if part.payload is not None:
            part.payload = cloudpickle.dumps(part.payload)
        elif part.op is Op.STEP_SOME or (part.op is Op.STEP and len(part.rows) < len(part.worker.rows)):
            part.payload = tuple(leaf[list(part.rows)] for leaf in self._batch.actions or ())
        return part

    def ask(self, request: Request, others: Sequence[Request] = (), *, alone: bool = False) -> None:
        """Make a call."""
        self.table.enter(request, others, alone=alone)
        self._send()

    def resume(self) -> None:
        """The call before was interrupted: the next wait sends what was not sent, and asks again for what was not read."""
        self.table.repair()

    def _send(self) -> None:
        """Send what was not sent, in order."""
        for request in list(self.table.requests.values()):
            for index, part in (request.parts or {}).items():
                if part.reference is None and index not in request.answers:
                    assert isinstance(part.worker, RemoteHost)
                    part.worker.send(request.seq, part)

    def _awaited(self, requests: Iterable[Request]) -> dict[Any, tuple[Request, WorkerRequest]]:
        """Reference -> what it answers, of all that is pending."""
        return {
            part.reference: (request, part)
            for request in requests
            for index, part in (request.parts or {}).items()
            if index not in request.answers
        }

    def gather(self, request: Request, deadline: float | None) -> list[RemoteHost]:
        """Wait until all hosts have answered ``request``; returns those that had not when the time was up."""
        self._send()
        began = time.perf_counter()
        try:
            awaited = self._awaited([request])
            if awaited:  # nearly always: one call for all hosts
                replies = self._hosts.fetch(list(awaited), _left(deadline))
                self._check()
                if replies is not None:
                    for (_, part), reply in zip(awaited.values(), replies, strict=True):
                        self._take(request, part, reply)
                    return []
            while (awaited := self._awaited([request])) and self._take_some(awaited, deadline):
                pass
            return request.missing()  # type: ignore[return-value]
        finally:
            self.time_waiting += time.perf_counter() - began

    def wait_any(self, deadline: float | None, seen: int = 0) -> bool:
        """Take in answers until more than ``seen`` by row are there; false when the time was up."""
        self._send()
        began = time.perf_counter()
        try:
            while len(self.table.pending.arrived) <= seen:
                awaited = self._awaited(self.table.requests.values())
                if not awaited or not self._take_some(awaited, deadline):
                    return False
            return True
        finally:
            self.time_waiting += time.perf_counter() - began

    def _take_some(self, awaited: dict[Any, tuple[Request, WorkerRequest]], deadline: float | None) -> bool:
        """Take in those that are answered; false when the time was up."""
        answered = self._hosts.wait(list(awaited), _left(deadline))
        self._check()
        for reference in answered:
            request, part = awaited[reference]
            try:
                reply = self._hosts.result(reference)
            except Lost as error:
                part.worker.mark_dead(str(error))
            else:
                self._take(request, part, reply)
        return bool(answered)

    def _check(self) -> None:
        if self.closing:
            raise ClosedEnvironmentError("Trying to operate on a vector environment, after a call to `close()`.")

    def _take(self, request: Request, part: WorkerRequest, answered: Any) -> None:
        """Put an answer where the engine looks for it, as a worker does itself. It can be done again."""
        host: Any = part.worker
        reply = host.opened(answered)
        whole = len(part.rows) == len(host.rows)
        rows: Any = slice(host.rows.start, host.rows.stop) if whole else np.array(part.rows)
        batch = self._batch
        if reply.leaves is not None:
            for leaf, values in zip(batch.observations or (), reply.leaves, strict=True):
                leaf[rows] = values
        if reply.numbers is not None:
            batch.rewards[rows], batch.terminations[rows], batch.truncations[rows] = reply.numbers
        if reply.infos is not None:
            batch.info_schemas[rows], records, news = reply.infos
            batch.infos[rows, : records.shape[1]] = records
            self._learn(news)
        elif part.op <= Op.REBUILD_SOME:
            batch.info_schemas[rows] = NO_INFO
        if reply.files:
            self.keep_files(reply.files)
        plain = reply.outcome is None and not reply.lost and reply.error is None
        if plain:
            answer = ONLY_COLUMNS if reply.columns else PLAIN
        else:
            answer = Answer(reply.columns, sealed=reply.outcome, lost=reply.lost or {}, error=reply.error)
        self.table.deliver(request.seq, host.index, answer)

    def ask_host(self, host: RemoteHost, method: str, *args: Any) -> Any:
        """Call a method of one host, when it has answered what it was asked before.

        Raises:
            Lost: It has died.
        """
        reference = self._hosts.submit(host.actor, method, *args)
        self._hosts.wait([reference], None)
        return self._hosts.result(reference)

    def ask_all(self, method: str, *args: Any, timeout: float | None = None) -> dict[int, Any]:
        """Call a method of every host that is alive; index -> answer, of those that answer within the time."""
        deadline = None if timeout is None else time.monotonic() + timeout
        alive = [host for host in self.workers if host.death is None]
        pending = {self._hosts.submit(host.actor, method, *args): host.index for host in alive}
        answers: dict[int, Any] = {}
        while pending and (answered := self._hosts.wait(list(pending), _left(deadline))):
            for reference in answered:
                with contextlib.suppress(Lost):
                    answers[pending.pop(reference)] = self._hosts.result(reference)
        return answers

    # -- ending -----------------------------------------------------------------------------------------------------

    def close(self, timeout: float, *, terminate: bool) -> None:
        """End all hosts within about ``timeout`` seconds: ask, then kill. It can be called again."""
        if self.abandoned:
            return
        self.closing = True
        try:
            if not terminate:
                said = self.ask_all("close", timeout, timeout=timeout + GRACE)
                self.failures_in_close += [(failure, self.workers[index]) for index in said for failure in said[index]]
        finally:
            self._hosts.close()

    def release(self) -> None:
        """Let go of everything. Idempotent."""
        if self._arena is not None:
            self._arena.close()
            self._arena = None
        for holder in (self, *self.workers):
            for name in ("_batch", "_learn", "_own_actions"):  # they keep the arena
                holder.__dict__.pop(name, None)
        self.released = True

    def end_unclosed(self) -> None:
        """It was not closed and can no longer be closed."""
        if not self.abandoned:
            self._hosts.close()

    def __repr__(self) -> str:
        return f"HostPool({self.workers})"


def _left(deadline: float | None) -> float | None:
    return None if deadline is None else max(deadline - time.monotonic(), 0.0)
