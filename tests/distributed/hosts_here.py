"""Hosts without a cluster: in this process, answering when they are waited for, behind the interface a cluster has.

What travels is pickled as it would be, and what arrives is read-only, as in an object store. ``die`` and ``held`` do to a
host what a network does.
"""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from typing import Any

import numpy as np

from vecenv.backends import RayVectorEnv
from vecenv.backends.ray.host import Host, HostPlan, HostReply
from vecenv.backends.ray.pool import Lost
from vecenv.errors import ClusterError


class HostsHere:
    """Implements ``vecenv.backends.ray.pool.Hosts``, and what ``RayVectorEnv`` asks of a cluster."""

    own = True

    def __init__(self) -> None:
        self.living: list[Host] = []
        self.calls: dict[int, tuple[Host, str, bytes]] = {}
        self.done: dict[int, Any] = {}
        self.held: set[int] = set()  # indices of hosts that do not answer for now
        self.dead: set[int] = set()  # identities of hosts
        self.room = True
        self.closed = False
        self.served: list[tuple[int, str]] = []

    # -- a cluster

    def nodes(self) -> list[dict[str, Any]]:
        return [{"NodeID": "a"}, {"NodeID": "b"}]

    def fair_share(self, hosts: int, spread: bool) -> int:
        return 1

    def place(self, cpus: Sequence[int], strategy: str, timeout: float) -> None:
        self.cpus, self.strategy = list(cpus), strategy
        self.require_places(timeout)

    def require_places(self, timeout: float) -> None:
        if not self.room:
            raise ClusterError("no room")

    # -- hosts

    def launch(self, plan: HostPlan) -> Host:
        host = Host(pickle.loads(pickle.dumps(plan)))
        self.living.append(host)
        return host

    def host(self, index: int) -> Host:
        """The latest host with this index."""
        return next(host for host in reversed(self.living) if host._plan.index == index)

    def die(self, index: int) -> None:
        """End a host without a word, whatever it was asked."""
        host = self.host(index)
        self.dead.add(id(host))
        if host.envs is not None:
            host.envs.close()

    def submit(self, host: Host, method: str, *args: Any) -> int:
        number = len(self.calls)
        self.calls[number] = (host, method, pickle.dumps(args))
        return number

    def _ready(self, reference: int) -> bool:
        host, method, _ = self.calls[reference]
        return method == "start" or id(host) in self.dead or host._plan.index not in self.held

    def _run(self, reference: int) -> Any:
        if reference not in self.done:
            host, method, args = self.calls[reference]
            if id(host) in self.dead:
                raise Lost("it died")
            self.served.append((host._plan.index, method))
            self.done[reference] = _travelled(getattr(host, method)(*pickle.loads(args)))
        return self.done[reference]

    def fetch(self, references: Sequence[int], timeout: float | None) -> list[Any] | None:
        if not all(map(self._ready, references)):
            return None
        try:
            return [self._run(reference) for reference in references]
        except Lost:
            return None

    def wait(self, references: Sequence[int], timeout: float | None) -> list[int]:
        assert timeout is not None or any(map(self._ready, references)), "this would wait for ever"
        return [reference for reference in references if self._ready(reference)]

    def result(self, reference: int) -> Any:
        return self._run(reference)

    def kill(self, host: Host) -> None:
        if id(host) not in self.dead:
            self.dead.add(id(host))
            if host.envs is not None:
                host.envs.close()

    def close(self) -> None:
        for host in self.living:
            self.kill(host)
        self.closed = True


def _travelled(value: Any) -> Any:
    """The value as it would arrive: its arrays are read-only views of somebody else's memory."""
    buffers: list[Any] = []
    data = pickle.dumps(value, 5, buffer_callback=buffers.append)
    again = pickle.loads(data, buffers=[bytes(buffer.raw()) for buffer in buffers])
    if isinstance(again, HostReply) and again.leaves is not None:
        for leaf in again.leaves:
            assert isinstance(leaf, np.ndarray)
            leaf.flags.writeable = False
    return again


class VectorEnvHere(RayVectorEnv):
    """``RayVectorEnv`` over :class:`HostsHere`; each host steps its environments itself unless told otherwise."""

    def __init__(self, env_fns: Sequence[Any], hosts: HostsHere | None = None, **options: Any) -> None:
        self.here = hosts or HostsHere()
        super().__init__(env_fns, **{"workers_per_host": 0, "num_hosts": min(2, max(len(env_fns), 1)), **options})

    def _connect(self) -> HostsHere:
        return self.here
