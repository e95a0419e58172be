"""Ray: finding or starting a cluster, places on its nodes, and calls of actors. All that vecenv knows of Ray is here.

A cluster that is there is used and left as it was found. One that vecenv had to start is for this machine alone: it listens
on the loopback interface, has no dashboard, sends no reports, and is stopped with the last vector environment that uses it.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Iterator, Sequence
from typing import Any, Final

from vecenv.backends.ray.host import Host, HostPlan, HostReady
from vecenv.backends.ray.pool import Lost
from vecenv.errors import ClusterError
from vecenv.system.cores import usable_cores

_OWN_UNIT: Final = "vecenv_core"  # in a cluster of vecenv's own, which has nothing else to share its cores with
_PLENTY: Final = 1_000_000.0
_ALONE: Final = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}
_LOOPBACK: Final = "127.0.0.1"

_lock = threading.Lock()
_users = 0  # vector environments on a connection that vecenv made
_started = False  # and whether vecenv started the cluster behind it


class Cluster:
    """Places for hosts on a Ray cluster.

    Args:
        address: Of a cluster; ``None`` or ``"auto"``: the one this process is connected to, or runs on this machine, or
            that ``RAY_ADDRESS`` names; a new one if there is none. ``"local"``: a new one, unless connected.

    Attributes:
        own: Whether vecenv started it.
    """

    def __init__(self, address: str | None) -> None:
        global _users, _started
        import ray  # the first import of this process takes a second; only a program that uses it pays

        self._ray: Any = ray
        self._group: Any = None
        self._actors: list[Any] = []
        self._open = True
        with _lock:
            if not ray.is_initialized():
                _users, _started = 0, _connect(ray, address)
                _users = 1
            else:
                self._require_same(address)
                _users += bool(_users)
            self._counted = _users > 0
            self.own = _started and self._counted
        self._unit = _OWN_UNIT if self.own else "CPU"

    def _require_same(self, address: str | None) -> None:
        mine = self._ray.get_runtime_context().gcs_address
        if address not in (None, "auto", "local", mine):
            raise ValueError(f"address={address!r}, but this process is connected to the Ray cluster at {mine!r}")

    # -- places -----------------------------------------------------------------------------------------------------

    def nodes(self) -> list[dict[str, Any]]:
        """The nodes that are alive and have cores, the largest first."""
        alive = [node for node in self._ray.nodes() if node["Alive"] and node["Resources"].get("CPU", 0) >= 1]
        return sorted(alive, key=lambda node: -node["Resources"]["CPU"])

    def fair_share(self, hosts: int, spread: bool) -> int:
        """Cores for each of that many hosts: those of the smallest node that is needed, or an equal part of all."""
        cores = [int(node["Resources"]["CPU"]) for node in self.nodes()]
        if self.own:
            return max(1, usable_cores() // hosts)
        if spread and len(cores) >= hosts:
            return max(1, cores[hosts - 1])
        return max(1, sum(cores) // hosts)

    def place(self, cpus: Sequence[int], strategy: str, timeout: float) -> None:
        """Reserve a place with that many cores for every host.

        Raises:
            ClusterError: There was no room within ``timeout`` seconds; says what is missing.
        """
        from ray.util.placement_group import placement_group

        self._bundles = [{self._unit: float(count)} for count in cpus]
        self._strategy = strategy
        self._group = placement_group(self._bundles, strategy=strategy)
        self.require_places(timeout)

    def require_places(self, timeout: float) -> None:
        if not self._group.wait(timeout):
            raise ClusterError(f"{self._missing()} (waited {timeout:g} seconds)")

    def _missing(self) -> str:
        nodes = [node for node in self._ray.nodes() if node["Alive"]]
        each = ", ".join(f"{node['NodeManagerAddress']}: {node['Resources'].get(self._unit, 0):g}" for node in nodes)
        free = self._ray.available_resources().get(self._unit, 0)
        wanted = " + ".join(f"{bundle[self._unit]:g}" for bundle in self._bundles)
        text = (
            f"the Ray cluster has no room for {len(self._bundles)} hosts ({self._strategy}) with {wanted} {self._unit} (one "
            f"a worker and one for the host): {_nodes(len(nodes))} with {each} in all, {free:g} of them free"
        )
        if self._strategy == "STRICT_SPREAD" and len(nodes) < len(self._bundles):
            missing = _nodes(len(self._bundles) - len(nodes))
            text += f"; add {missing}, or placement='PACK' puts several hosts on one node"
        return text

    # -- hosts ------------------------------------------------------------------------------------------------------

    def launch(self, plan: HostPlan) -> Any:
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        asked: Any = {"num_cpus": 0, "resources": self._bundles[plan.index]}
        if self._unit == "CPU":
            asked = {"num_cpus": self._bundles[plan.index]["CPU"]}
        place = PlacementGroupSchedulingStrategy(self._group, plan.index)
        # A restarted actor has other environments than its caller thinks, so vecenv rebuilds them; and a step must never be
        # taken twice.
        once = {"max_restarts": 0, "max_task_retries": 0, "max_concurrency": 1}
        actor = self._ray.remote(_HostActor).options(**asked, **once, scheduling_strategy=place).remote(plan)
        self._actors.append(actor)
        return actor

    def submit(self, host: Any, method: str, *args: Any) -> Any:
        return getattr(host, method).remote(*args)

    def fetch(self, references: Sequence[Any], timeout: float | None) -> list[Any] | None:
        try:
            replies: list[Any] = self._ray.get(references, timeout=timeout)
        except self._ray.exceptions.RayError:  # a timeout is one
            return None
        return replies

    def wait(self, references: Sequence[Any], timeout: float | None) -> list[Any]:
        answered, _ = self._ray.wait(list(references), num_returns=1, timeout=timeout)
        more, _ = self._ray.wait(list(references), num_returns=len(references), timeout=0)
        return list(more or answered)

    def result(self, reference: Any) -> Any:
        try:
            return self._ray.get(reference)
        except self._ray.exceptions.RayError as error:
            raise Lost(_brief(error)) from error

    def kill(self, host: Any) -> None:
        with contextlib.suppress(Exception):  # it may be dead, or its node gone
            self._ray.kill(host, no_restart=True)
        self._actors = [actor for actor in self._actors if actor is not host]

    def close(self) -> None:
        """End all hosts, give back their places, and leave the cluster if no other part of vecenv uses it."""
        global _users
        if not self._open:
            return
        self._open = False
        if not self._ray.is_initialized():  # the session was ended elsewhere, and the hosts with it
            return
        for actor in list(self._actors):
            self.kill(actor)
        if self._group is not None:
            from ray.util.placement_group import remove_placement_group

            with contextlib.suppress(Exception):
                remove_placement_group(self._group)
        with _lock:
            if self._counted:
                _users -= 1
                if _users == 0:
                    self._ray.shutdown()  # only disconnects from a cluster that was there before


class _HostActor(Host):
    """A host that is the only thing in its process."""

    def start(self) -> HostReady:
        main: Any = sys.modules["__main__"]
        main.__file__ = main.__spec__ = None  # it is Ray's: workers have no use for importing it again
        return super().start()


def _connect(ray: Any, address: str | None) -> bool:
    """Connect to a cluster; true if it had to be started."""
    if address is not None and address.startswith("ray://"):
        raise ValueError(f"address={address!r}: Ray Client has no zero-copy reads; run the program on a node of the cluster")
    if address != "local":
        try:
            ray.init(address=address or "auto", log_to_driver=True)
            return False
        except ConnectionError:
            if address is not None or "RAY_ADDRESS" in os.environ:
                raise
    with _for_this_machine_alone(ray):
        own: Any = {"resources": {_OWN_UNIT: _PLENTY}, "include_dashboard": False, "_node_ip_address": _LOOPBACK}
        ray.init(address="local", num_cpus=usable_cores(), **own)
    if (address := ray.util.get_node_ip_address()) != _LOOPBACK:
        ray.shutdown()
        raise ClusterError(
            f"this version of Ray ({ray.__version__}) would listen on {address}, not on the loopback interface alone: start "
            "a cluster yourself (ray.init() or `ray start --head`), and it will be used"
        )
    return True


@contextlib.contextmanager
def _for_this_machine_alone(ray: Any) -> Iterator[None]:
    """Let Ray start processes that listen on the loopback interface, and send no reports.

    Ray replaces a loopback address by the machine's own, except where its constant says that clusters are not to be had,
    as on macOS; it reads the variable of that constant when it is imported, its processes when they start.
    """
    constants = ray._private.ray_constants
    allowed, before = constants.ENABLE_RAY_CLUSTER, {name: os.environ.get(name) for name in _ALONE}
    constants.ENABLE_RAY_CLUSTER = False
    os.environ.update(_ALONE)
    try:
        yield
    finally:
        constants.ENABLE_RAY_CLUSTER = allowed
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value


def _nodes(count: int) -> str:
    return "1 node" if count == 1 else f"{count} nodes"


def _brief(error: BaseException) -> str:
    """The first lines of what Ray has to say, which may be pages."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: " + " ".join(lines[:6])[:600]
