"""``RayVectorEnv``: Gymnasium's vector interface over the hosts of a Ray cluster."""

from __future__ import annotations

import importlib.util
import itertools
import operator
import os
import sys
import warnings
import weakref
from collections.abc import Callable, Sequence
from threading import get_ident
from typing import Any, Final

import numpy as np
from gymnasium.core import ActType, Env, ObsType
from gymnasium.spaces.utils import is_space_dtype_shape_equiv
from gymnasium.vector import AutoresetMode
from gymnasium.vector.utils import batch_differing_spaces, batch_space

from vecenv.backends.ray.cluster import Cluster
from vecenv.backends.ray.driver import HostsDriver
from vecenv.backends.ray.host import HostPlan, HostReady
from vecenv.backends.ray.hosts import HostPool
from vecenv.engine.vector_env import Observer
from vecenv.errors import how_to_install
from vecenv.front.arguments import (
    MAX_TIMEOUT_SECONDS,
    check_option_names,
    parse_close_timeout,
    parse_timeout,
    store_gymnasium_options,
)
from vecenv.front.vector_env import CLOSE_TIMEOUT, SHORT_CLOSE_TIMEOUT, WorkerVectorEnv
from vecenv.link.envs import different_action_space_error
from vecenv.link.messages import PackedEnvFns
from vecenv.planning.options import OnFailure, Restart, WorkerOptions, check_option, check_options, choice_check, int_check
from vecenv.recording.recorder import FlightRecorder, recorder_for_hosts

_PLACEMENTS: Final = ("STRICT_SPREAD", "SPREAD", "PACK")
_HOST_OPTIONS: Final = (
    "shared_memory", "copy", "context", "daemon", "observation_mode", "max_concurrency", "use_caller", "step_timeout",
    "generators", "worker_options", "record_failures",
)  # fmt: skip


class RayVectorEnv(WorkerVectorEnv[ObsType, ActType, np.ndarray]):
    """Environments on several machines: host actors on the nodes of a Ray cluster, each with an ``AsyncVectorEnv``.

    Use it when one host's batch takes 10 ms or more: every step costs a round trip of a few milliseconds. Below that, run
    ``AsyncVectorEnv`` on one machine, or send the policy to the environments (``docs/distributed.md``).

    Host h holds a contiguous share of the environments. The interface is that of :class:`~vecenv.AsyncVectorEnv`, with these
    differences:

    * ``send`` and ``recv`` work by host: environments sent to a host together finish together, and a second request to the
      same host waits for the first.
    * A host handles the death of a worker itself, and reports it as on one machine. The loss of a host raises
      :class:`~vecenv.errors.HostDied`, and the next ``reset`` restarts it; with ``on_failure="restart"`` its environments
      are rebuilt on any node with room, and its rows are returned truncated, with ``restarted`` in their infos. No step is
      ever sent twice.
    * Each host has a budget of restarts for its workers, and the caller has one for hosts.
    * No memory is shared between machines; the caller copies an observation once, and with ``copy=True`` twice.
    * vecenv, and everything that ``env_fns`` import, must be installed on every node.

    Args:
        env_fns: Functions that build the environments, called on the hosts only. They are sent with cloudpickle.
        num_hosts: The number of hosts. Default: as many as ``envs_per_host`` requires; without it, one per node, but at most
            one per environment.
        envs_per_host: The number of environments per host. Default: an even share.
        workers_per_host: Worker processes per host, like ``num_workers`` of :class:`~vecenv.AsyncVectorEnv`. ``"auto"``
            measures on the host. A host reserves a core per worker and one for itself; with ``"auto"``, its share of the
            cores, but at most one more than its environments.
        address: The address of a Ray cluster. ``None``: the cluster to which this process is connected, the one that
            ``RAY_ADDRESS`` names, or the one on this machine. If there is none, one is started on the loopback interface
            of this machine, and stopped by :meth:`close`. An existing cluster is left unchanged.
        placement: ``"STRICT_SPREAD"`` (every host on a node of its own), ``"SPREAD"`` (if possible) or ``"PACK"`` (as few
            nodes as possible). ``None``: ``"STRICT_SPREAD"``, or ``"PACK"`` in a cluster that vecenv started, which has one
            node.
        batch_size: The number of environments that :meth:`recv` returns at a time, preferably a multiple of a host's share,
            because the environments of a host finish together.
        on_failure, autoreset_mode: See :class:`~vecenv.AsyncVectorEnv`.
        **engine_options: ``shared_memory``, ``copy``, ``context`` (default here: ``"forkserver"``), ``daemon``,
            ``observation_mode``, ``max_concurrency`` (per host), ``use_caller`` (the host's own process steps a share),
            ``step_timeout``, ``generators``, ``worker_options``, ``record_failures`` (the caller writes the files), see
            :class:`~vecenv.AsyncVectorEnv`.

    Raises:
        ImportError: Ray is not installed.
        ConnectionError: There is no cluster at ``address``, or at the address in ``RAY_ADDRESS``.
        ClusterError: The cluster has no room after ``start_timeout`` seconds; the message names what is missing.
        TypeError, ValueError: An option does not exist or has an invalid value.
        RuntimeError: Environments differ in their spaces; the message names the host.
        HostDied, StartupTimeout: A host did not become ready.
        Exception: Raised by pickling an ``env_fn``, with a note that names it, or by calling it on its host.

    If the constructor raises, all processes have been ended.
    """

    _driver: HostsDriver
    env_fns: Sequence[Callable[[], Any]]
    observation_mode: Any
    _cluster: Any = None  # a Cluster, or an object with its interface
    worker: None = None
    processes: tuple[()] = ()
    parent_pipes: tuple[()] = ()
    local_envs: tuple[()] = ()

    def __init__(
        self, env_fns: Sequence[Callable[[], Env[Any, Any]]], *, num_hosts: int | None = None,
        envs_per_host: int | None = None, workers_per_host: int | str | None = "auto", address: str | None = None,
        placement: str | None = None, batch_size: int | None = None, on_failure: OnFailure = "raise",
        autoreset_mode: str | AutoresetMode = AutoresetMode.NEXT_STEP, **engine_options: Any,
    ) -> None:  # fmt: skip
        gymnasium_options: dict[str, Any] = {
            "shared_memory": True, "copy": True, "context": "forkserver", "daemon": True, "observation_mode": "same",
            "max_concurrency": None,
        }  # fmt: skip
        options = {**gymnasium_options, "generators": "shared", **engine_options}
        gymnasium_options = {name: options[name] for name in gymnasium_options}
        store_gymnasium_options(self, env_fns, autoreset_mode=autoreset_mode, **gymnasium_options)
        _check_host_options(env_fns, num_hosts, envs_per_host, placement, engine_options)
        if isinstance(batch_size, str):
            raise ValueError(f"`batch_size` must be None or an int within 1..{len(env_fns)}, got {batch_size!r}.")
        check_options(self.num_envs, batch_size, num_workers=workers_per_host, on_failure=on_failure, **options)
        self.start_timeout = (options.get("worker_options") or WorkerOptions()).start_timeout
        start_timeout = min(self.start_timeout, MAX_TIMEOUT_SECONDS)
        budget = Restart.of(on_failure)
        if isinstance(mode := self.observation_mode, str) and mode not in ("same", "different"):
            raise ValueError(f"`observation_mode` must be 'same', 'different' or two spaces, got {mode!r}")
        self.generators = options["generators"]
        copies, recording = options.pop("copy"), FlightRecorder.from_option(options.pop("record_failures", None))
        self._address, self._placement, self._requested_sizes = address, placement, (num_hosts, envs_per_host)
        self._workers_per_host, self._host_options = workers_per_host, {**options, "on_failure": on_failure}
        self._step_timeout = parse_timeout(options.get("step_timeout"), "step_timeout")
        try:
            pool = self._start_hosts(start_timeout)
            restart, limit = on_failure != "raise", self._step_timeout
            if restart and limit is not None:
                # the host ends and rebuilds environments that hang, so the wait for the host includes that time
                limit += start_timeout
            driver = HostsDriver(
                pool, self.single_observation_space, self.single_action_space, self.action_space, self.autoreset_mode,
                restart=restart, budget=(budget.limit, budget.period), step_timeout=limit,
            )  # fmt: skip
            driver.copies, driver.batch_size = bool(copies), batch_size or self.num_envs
            if recording is not None:
                save, stats = weakref.WeakMethod(driver.snapshots), weakref.WeakMethod(driver.stats)
                recorder = recorder_for_hosts(self, recording, self._env_id, save, stats)  # type: ignore[arg-type]
                driver.observers.append(recorder)
                self._recorder = weakref.proxy(recorder)
            self._finalizer = weakref.finalize(self, _close_unless_forked, os.getpid(), self._cluster)
            self._open(driver)
        except BaseException:
            if self._cluster is not None:
                self._cluster.close()
            raise

    # -- starting ---------------------------------------------------------------------------------------------------

    def _start_hosts(self, start_timeout: float) -> HostPool:
        """Start the hosts, and copy metadata and spaces from the first."""
        plans = self._plans()
        self._cluster.reserve_cores([plan.cpus for plan in plans], self._strategy, start_timeout)
        pool = HostPool(self._cluster, plans, start_timeout)
        ready_messages, mode = [host.ready for host in pool.hosts], self.observation_mode
        first = ready_messages[0]
        self._set_attributes(first)
        if isinstance(mode, tuple):
            self.observation_space, self.single_observation_space = mode
        else:
            self.single_observation_space = first.observation_space
            self.observation_space = batch_space(first.observation_space, self.num_envs)
        _require_same_spaces(plans, ready_messages, mode)
        if mode == "different":
            differing = [space for ready in ready_messages for space in ready.observation_spaces]
            self.observation_space = batch_differing_spaces(differing)
        self.num_hosts = len(pool.hosts)
        self.num_workers = sum(ready.num_workers for ready in ready_messages)
        return pool

    def _connect(self) -> Any:
        if "ray" not in sys.modules and importlib.util.find_spec("ray") is None:
            raise ImportError(f"RayVectorEnv needs ray, not installed here: {how_to_install('ray')}")
        return Cluster(self._address)

    def _plans(self) -> list[HostPlan]:
        """Pickle the functions, connect to the cluster, and return the plan of each host."""
        packed = PackedEnvFns.pack(range(self.num_envs), self.env_fns, "it has to be sent to its host")
        self._cluster = self._connect()
        ranges = self._shares()
        self._strategy = self._placement or ("PACK" if self._cluster.own else "STRICT_SPREAD")
        options = {**self._host_options, "autoreset_mode": self.autoreset_mode}
        if options["on_failure"] == "raise":
            options.pop("step_timeout", None)  # it limits only the caller's wait for the host, which can be repeated
        plans = []
        for index, rows in enumerate(ranges):
            if isinstance(self.observation_mode, tuple):
                single = self.observation_mode[1]
                options = {**options, "observation_mode": (batch_space(single, len(rows)), single)}
            cpus, workers = self._cores_and_workers(len(rows), len(ranges))
            plans.append(HostPlan(index, rows, packed.select(rows), cpus, workers, options, list(sys.path)))
        return plans

    def _shares(self) -> list[range]:
        num_hosts, size = self._requested_sizes
        if num_hosts is None and size is None:
            num_hosts = max(1, min(len(self._cluster.nodes()), self.num_envs))
        if size is not None:
            bounds = [*range(0, self.num_envs, size), self.num_envs]
        else:
            bounds = [self.num_envs * host // num_hosts for host in range(num_hosts + 1)]  # type: ignore[operator]
        return [range(low, high) for low, high in itertools.pairwise(bounds)]

    def _cores_and_workers(self, envs: int, hosts: int) -> tuple[int, int | str | None]:
        """Return the number of cores that a host reserves, and its number of workers."""
        workers = self._workers_per_host
        if workers == "auto":
            return min(self._cluster.fair_share(hosts, self._strategy != "PACK"), envs + 1), workers
        count = envs if workers is None else min(int(workers), envs)
        return count + 1, workers if workers is None else count

    def add_observer(self, observer: Observer) -> None:
        """Notify an observer of all calls; see :meth:`vecenv.AsyncVectorEnv.add_observer`."""
        self._driver.observers.append(observer)

    # -- properties -------------------------------------------------------------------------------------------------

    @property
    def hosts(self) -> list[dict[str, Any]]:
        """The ``index``, ``node``, ``pid``, ``envs`` (a range), ``workers`` and ``alive`` (a bool) of each host."""
        return [
            {"index": host.index, "node": host.node, "pid": host.pid, "envs": host.rows, "workers": host.ready.num_workers,
             "alive": not host.death}
            for host in self._driver.pool.hosts
        ]  # fmt: skip

    @property
    def worker_rows(self) -> list[range]:
        """The environments of each host."""
        return [host.rows for host in self._driver.pool.hosts]

    @property
    def step_timeout(self) -> float | None:
        """Seconds until a ``reset`` or ``step`` without its own timeout counts as hanging; ``None``: no limit."""
        return self._step_timeout

    def _describe_size(self) -> str:
        return f"hosts={self.num_hosts}, num_envs={self.num_envs}, workers={self.num_workers}"

    # -- the end ----------------------------------------------------------------------------------------------------

    def close_extras(self, timeout: float | None = None, terminate: bool = False) -> None:
        """End the hosts, from any thread or signal handler and in any state; see :meth:`vecenv.AsyncVectorEnv.close`.

        Args:
            timeout: Seconds for a pending reply and for the environments' own ``close()``; then hosts are killed. Default: a
                minute, or a second if a host was late before, an earlier close was interrupted, or a signal handler closes
                during a call. During a call in another thread, hosts are killed immediately.
            terminate: Kill the hosts immediately; the environments' ``close()`` is not called.
        """
        driver, state, thread = self._driver, self._driver.state, get_ident()
        seconds = parse_close_timeout(timeout)
        if state.unusable == "forked":
            return
        self._warn_about_pending_call()
        if seconds is None:
            seconds = SHORT_CLOSE_TIMEOUT if driver.was_late or state.unusable or state.active_thread else CLOSE_TIMEOUT
        if not state.active_thread and not state.unusable:
            driver.freeze_stats()
        state.unusable = "closed"
        if state.active_thread not in (0, thread):  # another thread waits for a reply that will not arrive
            driver.pool.kill()
            state.wait_for_other_thread()
        driver.shut_down(0.0 if terminate else seconds, terminate=terminate)
        self._finalizer.detach()
        if not state.active_thread:
            driver.release()

    def __del__(self) -> None:
        if not self.__dict__.get("closed", True) and self._driver.state.unusable != "forked":
            warnings.warn(f"unclosed {type(self).__name__}", ResourceWarning, source=self, stacklevel=2)


def _close_unless_forked(pid: int, cluster: Any) -> None:
    """End the hosts of a vector environment that was not closed, except in a forked child."""
    if os.getpid() == pid:
        cluster.close()


def _check_host_options(
    env_fns: Sequence[Any], num_hosts: Any, envs_per_host: Any, placement: Any, engine_options: Any
) -> None:
    """Raise for invalid options, before anything is started."""
    if "num_workers" in engine_options:
        raise TypeError("RayVectorEnv has no option 'num_workers': use workers_per_host, the number of workers of each host")
    check_option_names(engine_options, _HOST_OPTIONS, "RayVectorEnv")
    accepted = f"one of {', '.join(map(repr, _PLACEMENTS))} or None"
    check_option("placement", placement, (lambda value: value is None or value in _PLACEMENTS, accepted))
    hosts = choice_check(None, or_=int_check(1, len(env_fns))), f"None or an int within 1..{len(env_fns)}"
    check_option("num_hosts", num_hosts, hosts)
    check_option("envs_per_host", envs_per_host, hosts)
    if num_hosts is not None and envs_per_host is not None and num_hosts != -(-len(env_fns) // envs_per_host):
        raise ValueError(
            f"{len(env_fns)} environments with envs_per_host={envs_per_host} need {-(-len(env_fns) // envs_per_host)} "
            f"hosts, not num_hosts={num_hosts}: pass only one of the two"
        )


def _require_same_spaces(plans: Sequence[HostPlan], ready_messages: Sequence[HostReady], mode: Any) -> None:
    """Raise ``RuntimeError`` if a host's spaces do not match the first host's. Each host compares its own environments."""
    first = ready_messages[0]
    fits: Any = operator.eq if mode == "same" else is_space_dtype_shape_equiv
    for plan, ready in zip(plans[1:], ready_messages[1:], strict=True):
        where = f"on host {plan.index} (node {ready.node})"
        if not fits(ready.observation_space, first.observation_space):
            advice = "If this is intentional, use `observation_mode='different'` instead. " if mode == "same" else ""
            raise RuntimeError(
                f"RayVectorEnv(..., observation_mode={mode!r}) however some of the sub-environments observation spaces are "
                f"not equivalent. {advice}Env {plan.rows.start} has {ready.observation_space} {where}, expected "
                f"{first.observation_space}."
            )
        if ready.action_space != first.action_space:
            raise different_action_space_error(first.action_space, plan.rows.start, f"{ready.action_space} {where}")
