"""A double of a Ray cluster with hosts in this process, which execute calls when the caller waits for the replies.

Values are pickled, and arrays arrive read-only, as from Ray's object store. ``crash`` and ``paused`` imitate failures of
hosts and of the network.
"""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from typing import Any

import numpy as np

from vecenv.backends import RayVectorEnv
from vecenv.backends.ray.host import Host, HostPlan, HostReply, Lost
from vecenv.errors import ClusterError


class InProcessCluster:
    """A double of ``vecenv.backends.ray.cluster.Cluster``."""

    own = True

    def __init__(self) -> None:
        self.hosts: list[Host] = []
        self.calls: dict[int, tuple[Host, str, bytes]] = {}
        self.done: dict[int, Any] = {}
        self.paused: set[int] = set()  # indices of hosts that do not reply for now
        self.crashed: set[int] = set()  # ids of host objects
        self.has_free_cores = True
        self.closed = False
        self.executed: list[tuple[int, str]] = []

    # -- methods of a cluster

    def nodes(self) -> list[dict[str, Any]]:
        return [{"NodeID": "a"}, {"NodeID": "b"}]

    def fair_share(self, hosts: int, spread: bool) -> int:
        return 1

    def reserve_cores(self, cpus: Sequence[int], strategy: str, timeout: float) -> None:
        self.cpus, self.strategy = list(cpus), strategy
        self.require_cores(timeout)

    def require_cores(self, timeout: float) -> None:
        int(timeout)  # Ray takes whole seconds, and raises OverflowError for infinity
        if not self.has_free_cores:
            raise ClusterError("no room")

    # -- methods that concern hosts

    def launch(self, plan: HostPlan) -> None:
        self.hosts.append(Host(pickle.loads(pickle.dumps(plan))))

    def host(self, index: int) -> Host:
        """Return the latest host with this index."""
        return next(host for host in reversed(self.hosts) if host._plan.index == index)

    def crash(self, index: int) -> None:
        """End a host without a reply to its pending calls."""
        host = self.host(index)
        self.crashed.add(id(host))
        if host.envs is not None:
            host.envs.close()

    def submit(self, index: int, method: str, *args: Any) -> int:
        if self.closed:
            raise KeyError(index)  # as for a host that the cluster has removed
        number = len(self.calls)
        self.calls[number] = (self.host(index), method, pickle.dumps(args))
        return number

    def _is_ready(self, reference: int) -> bool:
        host, method, _ = self.calls[reference]
        return method == "start" or id(host) in self.crashed or host._plan.index not in self.paused

    def _run(self, reference: int) -> Any:
        """Return the reply to a call. Like an actor, its host first executes all earlier calls."""
        host = self.calls[reference][0]
        if id(host) in self.crashed and reference not in self.done:
            return Lost("it died")
        for number, (other, method, args) in list(self.calls.items())[: reference + 1]:
            if other is host and number not in self.done:
                self.executed.append((host._plan.index, method))
                self.done[number] = _transfer(getattr(host, method)(*pickle.loads(args)))
        return self.done[reference]

    def collect(self, references: list[int], deadline: float | None, *, every: bool = False) -> list[tuple[int, Any]]:
        assert deadline is not None or any(map(self._is_ready, references)), "this call would wait forever"
        return [(reference, self._run(reference)) for reference in references if self._is_ready(reference)]

    def kill(self, index: int) -> None:
        if any(host._plan.index == index for host in self.hosts) and id(self.host(index)) not in self.crashed:
            self.crash(index)

    def close(self) -> None:
        for host in self.hosts:
            self.kill(host._plan.index)
        self.closed = True


def _transfer(value: Any) -> Any:
    """Pickle and unpickle a value. Its arrays become read-only, like views of an object store."""
    buffers: list[Any] = []
    data = pickle.dumps(value, 5, buffer_callback=buffers.append)
    received = pickle.loads(data, buffers=[bytes(buffer.raw()) for buffer in buffers])
    if isinstance(received, HostReply):
        for leaf in received.arrays:
            assert isinstance(leaf, np.ndarray)
            leaf.flags.writeable = False
    return received


class InProcessRayVectorEnv(RayVectorEnv):
    """A ``RayVectorEnv`` over :class:`InProcessCluster`. By default, each host steps its environments itself."""

    def __init__(self, env_fns: Sequence[Any], cluster: InProcessCluster | None = None, **options: Any) -> None:
        self.cluster = cluster or InProcessCluster()
        super().__init__(env_fns, **{"workers_per_host": 0, "num_hosts": min(2, max(len(env_fns), 1)), **options})

    def _connect(self) -> InProcessCluster:
        return self.cluster
