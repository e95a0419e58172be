"""Hosts without a cluster: in this process, with the methods of a cluster; they reply when the caller waits for them.

Values are pickled as for a cluster, and arrive read-only, as from an object store. ``die`` and ``held`` imitate failures
of a network.
"""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from typing import Any

import numpy as np

from vecenv.backends import RayVectorEnv
from vecenv.backends.ray.host import Host, HostPlan, HostReply, Lost
from vecenv.errors import ClusterError


class HostsHere:
    """A stand-in for ``vecenv.backends.ray.cluster.Cluster``."""

    own = True

    def __init__(self) -> None:
        self.living: list[Host] = []
        self.calls: dict[int, tuple[Host, str, bytes]] = {}
        self.done: dict[int, Any] = {}
        self.held: set[int] = set()  # indices of hosts that do not reply for now
        self.dead: set[int] = set()  # identities of hosts
        self.room = True
        self.closed = False
        self.served: list[tuple[int, str]] = []

    # -- a cluster

    def nodes(self) -> list[dict[str, Any]]:
        return [{"NodeID": "a"}, {"NodeID": "b"}]

    def fair_share(self, hosts: int, spread: bool) -> int:
        return 1

    def reserve_cores(self, cpus: Sequence[int], strategy: str, timeout: float) -> None:
        self.cpus, self.strategy = list(cpus), strategy
        self.require_cores(timeout)

    def require_cores(self, timeout: float) -> None:
        if not self.room:
            raise ClusterError("no room")

    # -- hosts

    def launch(self, plan: HostPlan) -> None:
        self.living.append(Host(pickle.loads(pickle.dumps(plan))))

    def host(self, index: int) -> Host:
        """Return the latest host with this index."""
        return next(host for host in reversed(self.living) if host._plan.index == index)

    def die(self, index: int) -> None:
        """End a host silently, whatever is pending there."""
        host = self.host(index)
        self.dead.add(id(host))
        if host.envs is not None:
            host.envs.close()

    def submit(self, index: int, method: str, *args: Any) -> int:
        number = len(self.calls)
        self.calls[number] = (self.host(index), method, pickle.dumps(args))
        return number

    def _ready(self, reference: int) -> bool:
        host, method, _ = self.calls[reference]
        return method == "start" or id(host) in self.dead or host._plan.index not in self.held

    def _run(self, reference: int) -> Any:
        if reference not in self.done:
            host, method, args = self.calls[reference]
            if id(host) in self.dead:
                return Lost("it died")
            self.served.append((host._plan.index, method))
            self.done[reference] = _as_received(getattr(host, method)(*pickle.loads(args)))
        return self.done[reference]

    def collect(self, references: list[int], deadline: float | None, *, every: bool = False) -> list[tuple[int, Any]]:
        assert deadline is not None or any(map(self._ready, references)), "this would wait for ever"
        return [(reference, self._run(reference)) for reference in references if self._ready(reference)]

    def kill(self, index: int) -> None:
        if any(host._plan.index == index for host in self.living) and id(self.host(index)) not in self.dead:
            self.die(index)

    def close(self) -> None:
        for host in self.living:
            self.kill(host._plan.index)
        self.closed = True


def _as_received(value: Any) -> Any:
    """Return the value as it would arrive: with arrays that are read-only views of shared memory."""
    buffers: list[Any] = []
    data = pickle.dumps(value, 5, buffer_callback=buffers.append)
    again = pickle.loads(data, buffers=[bytes(buffer.raw()) for buffer in buffers])
    if isinstance(again, HostReply):
        for leaf in again.arrays:
            assert isinstance(leaf, np.ndarray)
            leaf.flags.writeable = False
    return again


class VectorEnvHere(RayVectorEnv):
    """``RayVectorEnv`` over :class:`HostsHere`; by default each host steps its environments itself."""

    def __init__(self, env_fns: Sequence[Any], hosts: HostsHere | None = None, **options: Any) -> None:
        self.here = hosts or HostsHere()
        super().__init__(env_fns, **{"workers_per_host": 0, "num_hosts": min(2, max(len(env_fns), 1)), **options})

    def _connect(self) -> HostsHere:
        return self.here
