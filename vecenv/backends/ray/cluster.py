"""The backend's interface to Ray: finds or starts a cluster, reserves cores on its nodes, and calls actors.

No other module of the backend imports Ray. An existing cluster is used and left unchanged. A cluster that vecenv starts is
for this machine only: it listens on the loopback interface, has no dashboard, sends no usage reports, and is stopped when
its last vector environment is closed.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any, Final

from vecenv.backends.ray.host import Host, HostPlan, HostReady, Lost
from vecenv.errors import ClusterError, format_seconds
from vecenv.system.cores import usable_cores

_OWN_RESOURCE: Final = "vecenv_core"  # replaces "CPU" in a cluster that vecenv started, which runs nothing else
_OWN_AMOUNT: Final = 1_000_000.0
_LOCAL_ONLY_VARIABLES: Final = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}
_LOOPBACK: Final = "127.0.0.1"

_lock = threading.Lock()
_connection: tuple[str, str] | None = None  # the latest connection made by vecenv
_users = 0  # the number of vector environments that use it
_started = False  # True if vecenv also started the cluster


class Cluster:
    """The hosts of one vector environment on a Ray cluster, and the cores reserved for them.

    Args:
        address: The address of a cluster. ``None`` or ``"auto"``: the cluster to which this process is connected, one that
            ``RAY_ADDRESS`` names, or one on this machine; if there is none, ``None`` starts a new one. ``"local"``: a new
            cluster, unless this process is already connected to one.

    Attributes:
        own: True if vecenv started the cluster.
        actors: The hosts, by index.
    """

    def __init__(self, address: str | None) -> None:
        global _connection, _users, _started
        import ray  # takes a second, so only programs that use a cluster import it

        self._ray: Any = ray
        self._placement_group: Any = None
        self.actors: dict[int, Any] = {}
        self._open = True
        with _lock:
            if not ray.is_initialized():
                _users, _started = 0, _connect(ray, address)
                _connection = _identify_connection(ray)
            elif address not in (None, "auto", "local", current := ray.get_runtime_context().gcs_address):
                raise ValueError(f"address={address!r}, but this process is connected to the Ray cluster at {current!r}")
            self._connection = _identify_connection(ray)
            self._counted = self._connection == _connection
            _users += self._counted
            self.own = _started and self._counted
        self._resource = _OWN_RESOURCE if self.own else "CPU"

    def _is_connected(self) -> bool:
        """True until ``ray.shutdown()``, which ends the hosts. If the program connects again, this stays False."""
        return self._ray.is_initialized() and _identify_connection(self._ray) == self._connection

    def _require_connection(self) -> None:
        """Raise ``ClusterError`` after ``ray.shutdown()``, because Ray would start another cluster for the next call."""
        if not self._is_connected():
            raise ClusterError("ray.shutdown() ended the hosts: close this vector environment and build a new one")

    # -- cores ------------------------------------------------------------------------------------------------------

    def nodes(self) -> list[dict[str, Any]]:
        """Return the nodes that are alive and have cores, the largest first."""
        alive = [node for node in self._ray.nodes() if node["Alive"] and node["Resources"].get("CPU", 0) >= 1]
        return sorted(alive, key=lambda node: -node["Resources"]["CPU"])

    def fair_share(self, hosts: int, spread: bool) -> int:
        """Return the number of cores per host: an equal share of all.

        With ``spread``, if there is a node for each host: the cores of the smallest node used.
        """
        cores = [int(node["Resources"]["CPU"]) for node in self.nodes()]
        if self.own:
            return max(1, usable_cores() // hosts)
        if spread and len(cores) >= hosts:
            return max(1, cores[hosts - 1])
        return max(1, sum(cores) // hosts)

    def reserve_cores(self, cpus: Sequence[int], strategy: str, timeout: float) -> None:
        """Reserve the given number of cores for each host.

        Raises:
            ClusterError: The cores were not free within ``timeout`` seconds; the message gives the requested and the free
                cores.
        """
        from ray.util.placement_group import placement_group

        self._bundles = [{self._resource: float(count)} for count in cpus]
        self._strategy = strategy
        self._placement_group = placement_group(self._bundles, strategy=strategy)
        self.require_cores(timeout)

    def require_cores(self, timeout: float) -> None:
        """Raise ``ClusterError`` unless the cores are reserved within ``timeout`` seconds."""
        self._require_connection()
        if not self._placement_group.wait(math.ceil(timeout)):  # Ray ignores fractions of a second
            raise ClusterError(f"{self._describe_shortage()} (waited {format_seconds(timeout)})")

    def _describe_shortage(self) -> str:
        nodes = [node for node in self._ray.nodes() if node["Alive"]]
        per_node = ", ".join(f"{node['NodeManagerAddress']}: {node['Resources'].get(self._resource, 0):g}" for node in nodes)
        free = self._ray.available_resources().get(self._resource, 0)
        requested = " + ".join(f"{bundle[self._resource]:g}" for bundle in self._bundles)
        text = (
            f"the Ray cluster has too few free cores for {len(self._bundles)} hosts ({self._strategy}) with {requested} "
            f"{self._resource} (one per worker and one for the host): {_format_nodes(len(nodes))} with {per_node} in all, "
            f"{free:g} of them free"
        )
        if self._strategy == "STRICT_SPREAD" and len(nodes) < len(self._bundles):
            missing = _format_nodes(len(self._bundles) - len(nodes))
            text += f"; add {missing}, or pass placement='PACK' to put several hosts on one node"
        return text

    # -- hosts ------------------------------------------------------------------------------------------------------

    def launch(self, plan: HostPlan) -> None:
        """Create the actor of a host on its reserved cores, without waiting until it runs."""
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        bundle = self._bundles[plan.index]
        resources: Any = {"num_cpus": bundle["CPU"]} if self._resource == "CPU" else {"num_cpus": 0, "resources": bundle}
        placement = PlacementGroupSchedulingStrategy(self._placement_group, plan.index)
        # no restarts, because the new environments would not be in the state that the caller expects: vecenv rebuilds them;
        # no retries of calls, because a step must never be executed twice; and no events, which take 60 us per call
        options = {"max_restarts": 0, "max_task_retries": 0, "max_concurrency": 1, "enable_task_events": False}
        actor = self._ray.remote(_HostActor).options(**resources, **options, scheduling_strategy=placement).remote(plan)
        self.actors[plan.index] = actor

    def submit(self, index: int, method: str, *args: Any) -> Any:
        """Call a method of a :class:`~vecenv.backends.ray.host.Host`, and return a reference to the reply."""
        self._require_connection()
        return getattr(self.actors[index], method).remote(*args)

    def collect(self, references: list[Any], deadline: float | None, *, every: bool = False) -> list[tuple[Any, Any]]:
        """Wait for the first reply, and return those that have arrived, each with its reference.

        The list is empty if the deadline passes first. The reply of a host that has died is :class:`Lost`.

        Args:
            references: References to replies, from :meth:`submit`.
            deadline: The latest time, by ``time.monotonic()``; ``None``: no limit.
            every: Wait for all replies instead. If a host dies or the deadline passes first, return those that have arrived.
        """
        self._require_connection()
        if every:  # the usual case, in one call for all hosts
            try:
                replies = self._ray.get(references, timeout=_seconds_until(deadline))
                return list(zip(references, replies, strict=True))
            except self._ray.exceptions.RayError:  # a host died, or the deadline has passed
                pass
        first, _ = self._ray.wait(references, num_returns=1, timeout=_seconds_until(deadline))
        arrived, _ = self._ray.wait(references, num_returns=len(references), timeout=0)
        return [(reference, self._result(reference)) for reference in arrived or first]

    def _result(self, reference: Any) -> Any:
        try:
            return self._ray.get(reference)
        except self._ray.exceptions.RayError as error:
            return Lost(_shorten_error(error))

    def kill(self, index: int) -> None:
        """Kill a host immediately, if it was launched."""
        if (actor := self.actors.get(index)) is not None and self._is_connected():
            with contextlib.suppress(Exception):  # it may be dead, or its node lost
                self._ray.kill(actor, no_restart=True)
        self.actors.pop(index, None)

    def close(self) -> None:
        """End all hosts, free their cores, and close vecenv's connection if no other vector environment uses it."""
        global _users
        if not self._open:
            return
        self._open = False
        if not self._is_connected():
            return
        for index in list(self.actors):
            self.kill(index)
        if self._placement_group is not None:
            from ray.util.placement_group import remove_placement_group

            with contextlib.suppress(Exception):
                remove_placement_group(self._placement_group)
        with _lock:
            if self._counted:
                _users -= 1
                if _users == 0:
                    self._ray.shutdown()  # only disconnects from a cluster that existed before


class _HostActor(Host):
    """A host as a Ray actor, in its own process."""

    def start(self) -> HostReady:
        main: Any = sys.modules["__main__"]
        main.__file__ = main.__spec__ = None  # here `__main__` is Ray's script, which workers need not import
        logging.getLogger("vecenv").addFilter(self._collector.renumber_log)
        return super().start()


def _identify_connection(ray: Any) -> tuple[str, str]:
    """Return the ids of the node and the job, which together identify the current connection to a cluster."""
    context = ray.get_runtime_context()
    return context.get_node_id(), context.get_job_id()


def _connect(ray: Any, address: str | None) -> bool:
    """Connect to a cluster, and return True if vecenv started it."""
    if address in (None, "auto"):
        address = os.environ.get("RAY_ADDRESS") or address
    if address is not None and address.startswith("ray://"):
        raise ValueError(f"address={address!r}: Ray Client has no zero-copy reads; run the program on a node of the cluster")
    if address != "local":
        try:
            ray.init(address=address or "auto", log_to_driver=True)
            return False
        except ConnectionError:
            if address is not None:
                raise
    with _loopback_only(ray):
        options: Any = {"resources": {_OWN_RESOURCE: _OWN_AMOUNT}, "include_dashboard": False, "_node_ip_address": _LOOPBACK}
        ray.init(address="local", num_cpus=usable_cores(), **options)
    if (address := ray.util.get_node_ip_address()) != _LOOPBACK:
        ray.shutdown()
        raise ClusterError(
            f"this version of Ray ({ray.__version__}) would listen on {address}, not only on the loopback interface: "
            "start a cluster yourself (ray.init() or `ray start --head`), and vecenv will use it"
        )
    return True


@contextlib.contextmanager
def _loopback_only(ray: Any) -> Iterator[None]:
    """Make Ray's processes listen on the loopback interface only, and send no usage reports.

    Ray replaces a loopback address with the machine's own, unless the constant ``ENABLE_RAY_CLUSTER`` is false, as on macOS.
    This process has already read it from an environment variable, and Ray's processes read the variable when they start, so
    both are set.
    """
    constants = ray._private.ray_constants
    enabled, previous = constants.ENABLE_RAY_CLUSTER, {name: os.environ.get(name) for name in _LOCAL_ONLY_VARIABLES}
    constants.ENABLE_RAY_CLUSTER = False
    os.environ.update(_LOCAL_ONLY_VARIABLES)
    try:
        yield
    finally:
        constants.ENABLE_RAY_CLUSTER = enabled
        for name, value in previous.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value


def _seconds_until(deadline: float | None) -> float | None:
    return None if deadline is None else max(deadline - time.monotonic(), 0.0)


def _format_nodes(count: int) -> str:
    return "1 node" if count == 1 else f"{count} nodes"


def _shorten_error(error: BaseException) -> str:
    """Return the beginning of the text of Ray's error, which may be pages long."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: " + " ".join(lines[:6])[:600]
