"""The caller's handles to Ray hosts: starting, calling, replacing and ending them."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from typing import Any, Final

from vecenv.backends.ray.cluster import Cluster
from vecenv.backends.ray.host import HostPlan, HostReady, Lost
from vecenv.errors import ClusterError, HostDied, StartupTimeout, envs_text, format_seconds
from vecenv.link.messages import unpack_error
from vecenv.system.signals import deferred_signals

_GRACE_SECONDS: Final = 2.0  # for a host to reply or to close, beyond its environments' timeout
_RETRY_DELAYS: Final = (0.5, 1.0, 2.0, 4.0, None)  # seconds between attempts to start a host; `None`: give up
_START_GRACE_SECONDS: Final = 30.0  # for a process to start and to import its modules on a machine that may be busy


class RemoteHost:
    """The caller's handle to a host.

    Attributes:
        death: A text that names the host and describes its end; empty while it is alive.
        command: The command that it was executing when it ended, or ``"idle"``.
        notes: Notes that observers added to the first exception about its death.
        restart_counted: True if its restart has been counted against the budget.
    """

    def __init__(self, plan: HostPlan, ready: HostReady) -> None:
        self.plan, self.ready = plan, ready
        self.index, self.rows, self.pid, self.node = plan.index, plan.rows, ready.pid, ready.node
        self.label = f"host {plan.index} (node {ready.node}), pid {ready.pid}"
        self.death, self.command, self.restart_counted = "", "", False
        self.notes: Sequence[str] = ()

    def death_error(self) -> HostDied:
        """Return a new exception for the death of the host."""
        error = HostDied(self.death, worker=self.index, envs=tuple(self.rows), pid=self.pid, command=self.command)
        for note in self.notes:
            error.add_note(note)
        return error


class HostPool:
    """The hosts of one vector environment.

    Attributes:
        hosts: The hosts, in the order of their environments.
        cluster: The cluster that runs them. Tests substitute one that needs no Ray.
    """

    def __init__(self, cluster: Cluster, plans: Sequence[HostPlan], start_timeout: float) -> None:
        self.cluster = cluster
        self._start_timeout = start_timeout + _START_GRACE_SECONDS
        self._is_closed = False  # True also after an interrupted close, which has killed the hosts
        self.hosts = self._start(plans)

    def _start(self, plans: Sequence[HostPlan]) -> list[RemoteHost]:
        """Start hosts concurrently; if one fails, kill all of these."""
        try:
            with deferred_signals():
                for plan in plans:
                    self.cluster.launch(plan)
            references = [self.cluster.submit(plan.index, "start") for plan in plans]
            deadline = time.monotonic() + self._start_timeout
            return [
                RemoteHost(plan, self._wait_until_ready(plan, reference, deadline))
                for plan, reference in zip(plans, references, strict=True)
            ]
        except BaseException:
            for plan in plans:
                self.cluster.kill(plan.index)
            raise

    def _wait_until_ready(self, plan: HostPlan, reference: Any, deadline: float) -> HostReady:
        where = f"host {plan.index} ({envs_text(plan.rows)})"
        if not (replies := self.cluster.collect([reference], deadline)):
            self.cluster.require_cores(0.0)
            raise StartupTimeout(f"{where} was not ready within {format_seconds(self._start_timeout)} of its start")
        ready: HostReady | Lost = replies[0][1]
        if isinstance(ready, Lost):
            text = f"{where} died during its start: {ready}"
            raise HostDied(text, worker=plan.index, envs=list(plan.rows), command="start") from ready
        if ready.error is not None:
            where = f"{where}, node {ready.node}, pid {ready.pid}, during start"
            raise unpack_error(ready.error, f"{where} (env 0 below is env {plan.rows.start})")
        return ready

    def replace(self, host: RemoteHost) -> None:
        """Start a new host in place of a dead one, on any node with room.

        Raises:
            ClusterError, HostDied, StartupTimeout: The cluster has no room, or the host did not become ready.
            Exception: An ``env_fn`` raised on the host.
        """
        self.cluster.kill(host.index)  # also ends a replacement that was interrupted during its start
        for delay in _RETRY_DELAYS:
            self.cluster.require_cores(self._start_timeout)  # a lost node may be replaced, or another may have room
            try:
                self.hosts[host.index : host.index + 1] = self._start([host.plan])
                return
            except HostDied:  # until the loss of a node is detected, the cluster may start hosts there
                if delay is None:
                    raise
                time.sleep(delay)

    def call_all(self, method: str, *args: Any, timeout: float = 0.0) -> dict[int, Any]:
        """Call a method of every host that is alive; return the replies that arrive in time, by host index."""
        deadline = time.monotonic() + timeout + _GRACE_SECONDS
        replies: dict[int, Any] = {}
        with contextlib.suppress(ClusterError):  # `ray.shutdown()` has ended all hosts
            pending = {self.cluster.submit(host.index, method, *args): host.index for host in self.hosts if not host.death}
            while pending and (arrived := self.cluster.collect(list(pending), deadline)):
                replies.update((pending.pop(reference), reply) for reference, reply in arrived)
        return {index: reply for index, reply in replies.items() if not isinstance(reply, Lost)}

    def kill(self) -> None:
        """Kill all hosts immediately."""
        for host in self.hosts:
            host.death = host.death or f"{host.label}, was killed by close()"
            self.cluster.kill(host.index)

    def close(self, timeout: float, *, terminate: bool) -> dict[int, list[str]]:
        """End all hosts within about ``timeout`` seconds: first by a request, then by killing them. Idempotent.

        Args:
            timeout: Seconds for the environments' own ``close()``.
            terminate: Kill the hosts at once, without a request.

        Returns:
            The warnings of each host about environments that raised in ``close()``, by host index.
        """
        try:
            return {} if terminate or self._is_closed else self.call_all("close", timeout, timeout=timeout)
        finally:
            self._is_closed = True
            self.cluster.close()
