"""``RayVectorEnv``: Gymnasium's vector interface over the hosts of a Ray cluster, and the engine with hosts for workers.

Everything a caller can see is :class:`~vecenv.AsyncVectorEnv`'s; what differs is where environments are built and where
spaces come from.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import operator
import os
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from gymnasium.core import ActType, Env, ObsType
from gymnasium.spaces.utils import is_space_dtype_shape_equiv
from gymnasium.vector import AutoresetMode
from gymnasium.vector.utils import batch_differing_spaces, batch_space

from vecenv.backends.ray.host import HostPlan, HostReady
from vecenv.backends.ray.pool import GRACE, HostPool, RemoteHost
from vecenv.engine.engine import Engine, shares
from vecenv.engine.handles import PoolOptions, command_of, envs_text
from vecenv.engine.pending import Answer, Result, Worker
from vecenv.engine.recovery import Policy, writeable
from vecenv.engine.vector_env import EngineVectorEnv
from vecenv.errors import ErrorRecord, how_to_install
from vecenv.front.arguments import check_env_fns, check_names
from vecenv.front.capabilities import Capabilities
from vecenv.link.messages import PackedEnvFns, PackedError, unpack_error
from vecenv.link.observations import PickledStore, SharedStore
from vecenv.planning.options import check_option, check_options, one_of, whole
from vecenv.recording.file import write
from vecenv.recording.recorder import FlightRecorder, keep_parcels
from vecenv.shm import Arena, Batch, Layout, fixed_tree
from vecenv.worker.envs import Expected, WorkerPlan

_PLACEMENTS = ("STRICT_SPREAD", "SPREAD", "PACK")
_ENGINE_OPTIONS = (
    "shared_memory", "copy", "context", "daemon", "observation_mode", "max_concurrency", "use_caller", "step_timeout",
    "start_timeout", "threads_per_worker", "strict", "worker_env", "ragged_infos", "generators", "record_failures",
)  # fmt: skip


class HostsEngine(Engine):
    """The engine, with hosts for workers.

    Args:
        pool: Hosts that are ready.
        mismatches: Environments whose spaces do not go with those of the first host.
        env_fns, layout, make_store, plan: As of :class:`~vecenv.engine.engine.Engine`.
        policy: What to do about hosts that fail.
    """

    backend = "ray"
    records = False
    """Hosts record what fails."""

    def __init__(
        self, pool: HostPool, mismatches: list[tuple[int, str, str]], env_fns: Sequence[Any], layout: Layout,
        make_store: Callable[[Batch], Any], plan: WorkerPlan, policy: Policy,
    ) -> None:  # fmt: skip
        self._host_pool: Any = pool
        self._found = mismatches
        options = PoolOptions(None, False, "", policy.start_timeout)
        super().__init__(env_fns, layout, make_store, plan, options, policy, len(pool.workers), 0)

    def _open_pool(self, plan: WorkerPlan, arena: Arena, options: PoolOptions, num_workers: int) -> Any:
        self._host_pool.attach(self.batch, arena, self._infos.learn, self)
        return self._host_pool

    def _start(self, env_fns: Sequence[Callable[[], Any]], plan: WorkerPlan, num_workers: int, caller_share: int) -> None:
        """They are started: the spaces came from them."""
        self.mismatches = self._found

    def keep_files(self, recording: FlightRecorder, files: Sequence[tuple[int, str, bytes]]) -> None:
        """Write what a host has recorded."""
        self.ledger.recordings.update(keep_parcels(recording, files))

    def record(self, row: int, path: Any) -> Path:
        host = next(host for host in self._host_pool.workers if row in host.rows)
        _, own, content = self._host_pool.ask_host(host, "record", row - host.rows.start)
        write(Path(path or own), content)
        return Path(path or own)

    @property
    def capabilities(self) -> Capabilities:
        return dataclasses.replace(super().capabilities, recording=self.records)

    def _why_not_frozen(self) -> str:
        return "its environments are stepped by hosts"

    def read(self, answers: Iterable[tuple[Worker, Answer]]) -> Result:
        listed = list(answers)
        result = super().read(listed)
        for host, answer in listed:
            self.failed.update(answer.lost)
            if answer.error is not None:
                result = writeable(result)
                result.errors.append(self._error_of(host, answer.error))
        return result

    def _error_of(self, host: Worker, packed: PackedError) -> tuple[Exception, ErrorRecord]:
        busy = self.oldest_of(host)
        command = "a request" if busy is None else command_of(busy, host)
        note = f"{host.label}, {envs_text(host.rows)}, during {command}"
        record = ErrorRecord(None, host.index, host.pid, command, unpack_error(packed, note), packed.text, time.monotonic())
        return unpack_error(packed, note), record

    def stats(self) -> dict[str, float]:
        """As :meth:`Engine.stats`, of all hosts together; one that is busy for long or dead is left out."""
        own = super().stats()
        if self._host_pool.closing:  # no host is left to ask
            return own
        each = list(self._host_pool.ask_all("stats", timeout=GRACE).values())
        if each:
            for key in ("restarts", "bytes_pickled"):
                own[key] += sum(stats[key] for stats in each)
            own["step_time_mean"] = float(np.mean([stats["step_time_mean"] for stats in each]))
            for key in ("step_time_slowest_env", "straggler_share"):
                own[key] = max(stats[key] for stats in each)
        return own


class RayVectorEnv(EngineVectorEnv[ObsType, ActType]):
    """Environments on several machines: one host actor a node of a Ray cluster, each with a local engine over its share.

    Use it when one host's batch takes 10 ms or more: a step costs a round trip of one to two milliseconds whatever it does.
    Below that, run ``AsyncVectorEnv`` on one machine, or send the policy to the environments (``docs/distributed.md``).

    Host h holds a contiguous share of the environments. All of :class:`~vecenv.AsyncVectorEnv` is here under its own names,
    with these differences:

    * ``send`` and ``recv`` work by host: what is sent to a host together comes back together, and a second message to the
      same host waits for the first.
    * A killed worker is its host's own matter; its error comes back as on one machine. A host that is lost is
      :class:`~vecenv.errors.HostDied`, and the next ``reset`` starts it anew; with ``on_failure="restart"`` its environments
      are built anew wherever the cluster has room, and its rows come back truncated, with ``restarted`` in their infos. No
      step is ever sent twice.
    * Each host has a budget of restarts for its workers, and the caller one for hosts.
    * No memory is shared between machines; an observation is copied here once, and with ``copy=True`` twice.
    * vecenv, and whatever ``env_fns`` import, has to be installed on every node.

    Args:
        env_fns: Functions that build the environments, called on the hosts only. They travel by cloudpickle.
        num_hosts: Default: as many as ``envs_per_host`` asks for, else one per node, at most one per environment.
        envs_per_host: Default: even shares.
        workers_per_host: Worker processes per host, as ``num_workers`` of :class:`~vecenv.AsyncVectorEnv`. ``"auto"``
            measures on the host. A host reserves a core per worker and one for itself; with ``"auto"`` a node's cores.
        address: Of a Ray cluster. ``None``: the one this process is connected to, or that runs here, or that ``RAY_ADDRESS``
            names. If there is none, one is started for this machine, on the loopback interface, and stopped by
            :meth:`close`. A cluster that was there before is left alone.
        placement: ``"STRICT_SPREAD"`` (every host on a node of its own), ``"SPREAD"`` (if possible) or ``"PACK"`` (as few
            nodes as possible). ``None``: strict, or in a cluster that vecenv started, which is one node, packed.
        batch_size: Environments that :meth:`recv` returns at a time; a multiple of a host's share wastes nothing.
        on_failure, restart_limit, restart_period, autoreset_mode: As :class:`~vecenv.AsyncVectorEnv`.
        **engine_options: ``shared_memory``, ``copy``, ``context`` (default here: ``"forkserver"``), ``daemon``,
            ``observation_mode``, ``max_concurrency`` (a host), ``use_caller`` (the host's own process steps a share),
            ``step_timeout``, ``start_timeout``, ``threads_per_worker``, ``strict``, ``generators``,
            ``record_failures`` (the files come to the caller), as of :class:`~vecenv.AsyncVectorEnv`.

    Raises:
        ImportError: Ray is not installed.
        ClusterError: The cluster has no room, after ``start_timeout`` seconds; says what is missing.
        TypeError, ValueError: An option does not exist or has no meaning.
        RuntimeError: Environments differ in their spaces; the host is named.
        HostDied, StartupTimeout: A host did not get ready.
        Exception: What pickling an ``env_fn`` raised, with a note that says which, or what calling it raised on its host.

    Nothing is left running when the constructor raises.
    """

    _cluster: Any = None  # a Cluster, or what stands in for one

    def __init__(
        self, env_fns: Sequence[Callable[[], Env[Any, Any]]], *, num_hosts: int | None = None,
        envs_per_host: int | None = None, workers_per_host: int | str | None = "auto", address: str | None = None,
        placement: str | None = None, batch_size: int | None = None, on_failure: str = "raise",
        restart_limit: int | None = None, restart_period: float = 60.0,
        autoreset_mode: str | AutoresetMode = AutoresetMode.NEXT_STEP, **engine_options: Any,
    ) -> None:  # fmt: skip
        self.closed = True  # until there is something to close
        check_env_fns(env_fns, type(self).__name__)
        env_fns = list(env_fns)
        _check(env_fns, num_hosts, envs_per_host, placement, engine_options)
        engine_options.setdefault("context", "forkserver")
        self._start_timeout = engine_options.setdefault("start_timeout", 60.0)
        self._workers_per_host = workers_per_host
        self._address = address
        self._placement = placement
        self._split = (num_hosts, envs_per_host)
        step_timeout = engine_options.get("step_timeout")
        if isinstance(batch_size, str):
            raise ValueError(f"`batch_size` must be None or an int within 1..{len(env_fns)}, got {batch_size!r}.")
        recovery: Any = {"on_failure": on_failure, "restart_limit": restart_limit, "restart_period": restart_period}
        check_options(len(env_fns), batch_size, num_workers=workers_per_host, **recovery, **engine_options)
        self.generators = engine_options.get("generators", "shared")
        if (recording := FlightRecorder.of(engine_options.get("record_failures"))) is not None:
            recording = dataclasses.replace(recording, folder=os.path.abspath(recording.folder))
            engine_options["record_failures"] = recording
        self._host_options = {**engine_options, **recovery}
        self._host_options.pop("copy", None)
        self._take_options(
            env_fns, engine_options.get("shared_memory", True), engine_options.get("copy", True), engine_options["context"],
            engine_options.get("daemon", True), engine_options.get("observation_mode", "same"), autoreset_mode,
            engine_options.get("max_concurrency"),
        )  # fmt: skip
        policy = Policy.of(on_failure, restart_limit, restart_period, step_timeout, self._start_timeout)
        try:
            self._adopt(self._start_engine(self._start_hosts(env_fns), policy), batch_size)
        except BaseException:
            if self._cluster is not None:
                self._cluster.close()
            raise

    # -- starting ---------------------------------------------------------------------------------------------------

    def _start_hosts(self, env_fns: Sequence[Callable[[], Env[Any, Any]]]) -> HostPool:
        """Start the hosts, and take metadata and spaces from the first."""
        mode = self.observation_mode
        if isinstance(mode, str) and mode not in ("same", "different"):
            raise ValueError(f"`observation_mode` must be 'same', 'different' or two spaces, got {mode!r}")
        plans = self._plans(env_fns)
        self._cluster.place([plan.cpus for plan in plans], self._strategy, self._start_timeout)
        pool = HostPool(self._cluster, plans, self._start_timeout)
        readies = [host.ready for host in pool.workers]
        first = readies[0]
        self.metadata = {**first.metadata, "autoreset_mode": self.autoreset_mode}
        self.render_mode = first.render_mode
        self.single_action_space = first.action_space
        self.action_space = batch_space(first.action_space, self.num_envs)
        fits: Any = is_space_dtype_shape_equiv
        if isinstance(mode, tuple):
            self.observation_space, self.single_observation_space = mode
        else:
            self.single_observation_space = first.observation_space
            self.observation_space = batch_space(first.observation_space, self.num_envs)
            if mode == "same":
                fits = operator.eq
        self._mismatches = _disagreements(plans, readies, fits)
        if mode == "different" and not self._mismatches:
            each = [space for ready in readies for space in ready.observation_spaces]
            self.observation_space = batch_differing_spaces(each)
        return pool

    def _connect(self) -> Any:
        if "ray" not in sys.modules and importlib.util.find_spec("ray") is None:
            raise ImportError(f"RayVectorEnv needs ray, not installed here: {how_to_install('ray')}")
        from vecenv.backends.ray.cluster import Cluster

        return Cluster(self._address)

    def _plans(self, env_fns: Sequence[Callable[[], Any]]) -> list[HostPlan]:
        """What each host is sent; connects to the cluster, but not before everything can travel."""
        packed = PackedEnvFns.of(range(self.num_envs), env_fns, "it needs to get to its host")
        self._cluster = self._connect()
        ranges = self._shares()
        self._strategy = self._placement or ("PACK" if self._cluster.own else "STRICT_SPREAD")
        options = {**self._host_options, "autoreset_mode": self.autoreset_mode}
        if options["on_failure"] == "raise":
            options.pop("step_timeout", None)  # the wait for the host keeps to it, and may be repeated
        plans = []
        for index, rows in enumerate(ranges):
            if isinstance(self.observation_mode, tuple):
                single = self.observation_mode[1]
                options = {**options, "observation_mode": (batch_space(single, len(rows)), single)}
            cpus, workers = self._cores(len(rows), len(ranges))
            plans.append(HostPlan(index, rows, packed.part(rows), cpus, workers, options, list(sys.path)))
        return plans

    def _shares(self) -> list[range]:
        num_hosts, envs_per_host = self._split
        if envs_per_host is not None:
            bounds = range(0, self.num_envs, envs_per_host)
            return [range(first, min(first + envs_per_host, self.num_envs)) for first in bounds]
        if num_hosts is None:
            num_hosts = max(1, min(len(self._cluster.nodes()), self.num_envs))
        return shares(self.num_envs, num_hosts)

    def _cores(self, envs: int, hosts: int) -> tuple[int, int | str | None]:
        """Cores that a host reserves, and its workers."""
        workers = self._workers_per_host
        if workers == "auto":
            return min(self._cluster.fair_share(hosts, self._strategy != "PACK"), envs + 1), workers
        count = envs if workers is None else min(int(workers), envs)
        return count + 1, workers if workers is None else count

    def _start_engine(self, pool: HostPool, policy: Policy) -> Engine:
        self.num_hosts = len(pool.workers)
        self.num_workers = sum(host.num_workers for host in pool.workers)
        if policy.restart and policy.step_timeout is not None:
            # the host ends what hangs and builds it anew; the wait for the host leaves it the time for that
            policy = dataclasses.replace(policy, step_timeout=policy.step_timeout + (policy.start_timeout or 0.0))
        observations = fixed_tree(self.single_observation_space) if self.shared_memory else None
        layout = Layout.of(observations, fixed_tree(self.single_action_space, "action"), self.num_envs, 1, final=False)

        def make_store(batch: Batch) -> Any:
            if observations is not None and batch.observations is not None:
                return SharedStore(observations, batch.observations)
            return PickledStore(self.single_observation_space, self.num_envs)

        expected = Expected(self.observation_mode, self.single_observation_space, self.single_action_space)
        plan = WorkerPlan(layout, self.autoreset_mode, expected, ragged=self._host_options.get("ragged_infos", False))
        engine = HostsEngine(pool, self._mismatches, self.env_fns, layout, make_store, plan, policy)
        if (recording := self._host_options.get("record_failures")) is not None:
            pool.keep_files, engine.records = partial(engine.keep_files, recording), True
        return engine

    # -- what can be looked at --------------------------------------------------------------------------------------

    @property
    def hosts(self) -> list[dict[str, Any]]:
        """For each host its ``index``, ``node``, ``pid``, ``envs`` (a range) and whether it is ``alive``."""

        def seen(host: RemoteHost) -> dict[str, Any]:
            own = {"index": host.index, "node": host.node, "pid": host.pid, "envs": host.rows}
            return {**own, "workers": host.num_workers, "alive": host.death is None}

        pool: Any = self._pool
        return [seen(host) for host in pool.workers]

    def __repr__(self) -> str:
        text = super().__repr__()
        return text.replace("num_envs=", f"hosts={self.num_hosts}, num_envs=", 1) if hasattr(self, "num_hosts") else text


def _check(env_fns: Sequence[Any], num_hosts: Any, envs_per_host: Any, placement: Any, engine_options: Any) -> None:
    """Refuse what means nothing, before anything is started."""
    if "num_workers" in engine_options:
        raise TypeError("RayVectorEnv has no option 'num_workers': workers_per_host is how many each host has")
    check_names(engine_options, _ENGINE_OPTIONS, "RayVectorEnv")
    accepted = f"one of {', '.join(map(repr, _PLACEMENTS))} or None"
    check_option("placement", placement, (lambda value: value is None or value in _PLACEMENTS, accepted))
    hosts = one_of(None, or_=whole(1, len(env_fns))), f"None or an int within 1..{len(env_fns)}"
    check_option("num_hosts", num_hosts, hosts)
    check_option("envs_per_host", envs_per_host, hosts)
    if num_hosts is not None and envs_per_host is not None and num_hosts != -(-len(env_fns) // envs_per_host):
        raise ValueError(
            f"{len(env_fns)} environments with envs_per_host={envs_per_host} are {-(-len(env_fns) // envs_per_host)} hosts, "
            f"not num_hosts={num_hosts}: give one of the two"
        )


def _disagreements(plans: Sequence[HostPlan], readies: Sequence[HostReady], fits: Any) -> list[tuple[int, str, str]]:
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
