"""Measures the cost of a Ray cluster, compared with the local engine and a bare ``ray.get``.

    python bench/ray_rate.py cost          # microseconds per step: local engine, 1 and 2 hosts, bare ray.get calls
    python bench/ray_rate.py efficiency    # share of the time that hosts spend in steps of 1 to 100 ms; --plot draws it
    python bench/ray_rate.py driver        # the caller's own work per step for 8, 32 and 128 simulated hosts

Everything runs on this machine, so no result includes a network. All candidates run alternately for a short time; results
are medians over the rounds, with minimum and maximum.

``bare`` is what a simple program would do: it calls an actor with an array of actions, and fetches four prepared arrays
(rewards, terminations, truncations, observations) with ``ray.get``. ``bare_packed`` is the same with the objects that vecenv
sends and returns: small arrays are joined into one ``bytes``.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import pickle
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

import vecenv
from bench import run_interleaved
from bench.workloads import WaitingEnv
from vecenv.backends import RayVectorEnv
from vecenv.backends.ray.host import Host, HostPlan
from vecenv.link.messages import PackedEnvFns
from vecenv.tools.runners import run_for

SHAPES: dict[str, tuple[tuple[int, ...], str]] = {"small": ((4,), "float32"), "image": ((84, 84, 4), "uint8")}
ENVS_PER_HOST = 16
BATCH_MS = (1, 2, 5, 10, 20, 50, 100)
STORE_BYTES = 400 * 1024 * 1024


def make_env_fn(kind: str, seconds: float = 0.0) -> Callable[[], Any]:
    """Return a function that builds an environment with constant observations and steps of ``seconds``."""
    shape, dtype = SHAPES[kind]
    return functools.partial(WaitingEnv, seconds, shape=shape, dtype=dtype)


class BareActor:
    """A Ray actor that returns a prepared payload from each step."""

    def __init__(self, payload: Any) -> None:
        self._payload = payload

    def step(self, actions: Any) -> Any:
        return self._payload


def make_step_arrays(kind: str) -> list[Any]:
    """Return the arrays of one host's step: rewards, terminations, truncations, observations."""
    shape, dtype = SHAPES[kind]
    flags = np.zeros(ENVS_PER_HOST, np.bool_)
    observations = np.ones((ENVS_PER_HOST, *shape), dtype)
    return [np.zeros(ENVS_PER_HOST), flags, flags.copy(), observations]


class LocalHost(Host):
    """A host in this process that does not end the process's other children, such as Ray's, when it closes."""

    def close(self, timeout: float) -> list[str]:
        self.envs.close(timeout=timeout)
        return []


def step_host(host: Host) -> Any:
    """Reset and step a host; return its reply to the step, packed for Ray."""
    host.reset(pickle.dumps(([None] * ENVS_PER_HOST, None)))
    return host.step(np.zeros(ENVS_PER_HOST, np.int64).tobytes())


def make_reply(kind: str) -> Any:
    """Return the reply to a step of a host with environments of this kind, packed for Ray."""
    fns = PackedEnvFns.pack(range(ENVS_PER_HOST), [make_env_fn(kind)] * ENVS_PER_HOST, "travels")
    host = LocalHost(HostPlan(0, range(ENVS_PER_HOST), fns, 1, 0, {}, []))
    host.start()
    reply = step_host(host)
    host.close(0.0)
    return reply


def microseconds_per_call(call: Callable[[], Any], seconds: float) -> float:
    """Return the microseconds per call, measured over ``seconds``."""

    def count_call() -> int:
        call()
        return 1

    return 1e6 / run_for(count_call, seconds)


def measure_alternately(calls: dict[str, Callable[[], Any]], seconds: float, rounds: int) -> dict[str, list[float]]:
    """Return the microseconds per call in each round, by name."""
    for call in calls.values():
        microseconds_per_call(call, seconds / 2)  # warm-up
    runs = {name: functools.partial(microseconds_per_call, call, seconds) for name, call in calls.items()}
    return run_interleaved(runs, rounds)


def summarize(values: Sequence[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "least": min(values), "greatest": max(values)}


def make_step(envs: Any) -> Callable[[], Any]:
    envs.reset(seed=0)
    actions = np.zeros(envs.num_envs, np.int64)
    return lambda: envs.step(actions)


def make_ray_envs(kind: str, hosts: int, **options: Any) -> Any:
    fns = [make_env_fn(kind)] * (ENVS_PER_HOST * hosts)
    return RayVectorEnv(fns, num_hosts=hosts, workers_per_host=1, placement="PACK", **options)


def measure_cost(seconds: float, rounds: int) -> list[dict[str, Any]]:
    rows = []
    for kind in SHAPES:
        for hosts in (1, 2):
            local: Any = vecenv.AsyncVectorEnv([make_env_fn(kind)] * (ENVS_PER_HOST * hosts), num_workers=hosts)
            envs = make_ray_envs(kind, hosts)
            actions, arrays = np.zeros(ENVS_PER_HOST, np.int64), make_step_arrays(kind)
            bare_call, stop = start_bare_actors(hosts, actions, tuple(arrays))
            bare_packed, stop_packed = start_bare_actors(hosts, actions.tobytes(), make_reply(kind))
            calls = {"local": make_step(local), "ray": make_step(envs), "bare": bare_call, "bare_packed": bare_packed}
            times = measure_alternately(calls, seconds, rounds)
            row: dict[str, Any] = {"observations": kind, "hosts": hosts, "envs": ENVS_PER_HOST * hosts}
            for name in ("bare", "bare_packed"):
                row[f"over_{name}"] = summarize([ray / bare for ray, bare in zip(times["ray"], times[name], strict=True)])
            rows.append(row | {f"{name}_us": summarize(values) for name, values in times.items()})
            print(json.dumps(rows[-1]), flush=True)
            for end in (local.close, envs.close, stop, stop_packed):
                end()
    return rows


def start_bare_actors(hosts: int, actions: Any, payload: Any) -> tuple[Callable[[], Any], Callable[[], None]]:
    """Start one bare actor per host. Return a function that steps them all, and one that ends them."""
    import ray

    actors = [ray.remote(BareActor).options(num_cpus=0).remote(payload) for _ in range(hosts)]

    def stop() -> None:
        for actor in actors:
            ray.kill(actor)

    return lambda: ray.get([actor.step.remote(actions) for actor in actors]), stop


def measure_efficiency(seconds: float, rounds: int) -> list[dict[str, Any]]:
    """Measure two hosts with one sleeping environment each, so that hosts do not compete for cores."""
    rows = []
    for milliseconds in BATCH_MS:
        fns = [make_env_fn("small", milliseconds / 1000)] * 2
        envs: Any = RayVectorEnv(fns, num_hosts=2, workers_per_host=1, placement="PACK")
        local: Any = vecenv.AsyncVectorEnv(fns[:1])  # one host without Ray, to show how long the sleep really takes
        times = measure_alternately(
            {"ray": make_step(envs), "local": make_step(local)}, max(seconds, milliseconds / 100), rounds
        )
        shares = [milliseconds * 1000 / step for step in times["ray"]]
        row = {"batch_ms": milliseconds, "efficiency": summarize(shares)}
        rows.append(row | {"step_us": summarize(times["ray"]), "local_step_us": summarize(times["local"])})
        print(json.dumps(rows[-1]), flush=True)
        envs.close()
        local.close()
    return rows


class InstantCluster:
    """A substitute for ``Cluster`` with prepared replies, so that a step takes only the time of the caller's own work.

    With ``in_store``, the replies are in Ray's object store, and one ``ray.get`` per step fetches them. The reference for a
    step or a reset is the index of the host; those for other calls are negative.
    """

    own = True

    def __init__(self, in_store: bool) -> None:
        self._in_store = in_store
        self._hosts: list[Host] = []
        self._replies: list[Any] = []
        self._results: list[Any] = []
        if in_store:
            import ray

            self._ray = ray

    def nodes(self) -> list[Any]:
        return []

    def reserve_cores(self, cpus: Sequence[int], strategy: str, timeout: float) -> None: ...

    def require_cores(self, timeout: float) -> None: ...

    def launch(self, plan: HostPlan) -> None:
        self._hosts.append(LocalHost(plan))

    def submit(self, index: int, method: str, *args: Any) -> Any:
        if method in ("step", "reset"):
            return index
        host = self._hosts[index]
        self._results.append(getattr(host, method)(*args))
        if method == "start":
            reply = step_host(host)
            self._replies.append(self._ray.put(reply) if self._in_store else reply)
        return -len(self._results)

    def collect(self, references: list[int], deadline: float | None, *, every: bool = False) -> list[tuple[int, Any]]:
        if references[0] < 0:
            return [(reference, self._results[-reference - 1]) for reference in references]
        replies = [self._replies[index] for index in references]
        return list(zip(references, self._ray.get(replies) if self._in_store else replies, strict=True))

    def kill(self, index: int) -> None:
        self._hosts[index].close(0.0)

    def close(self) -> None: ...


class InstantVectorEnv(RayVectorEnv[Any, Any]):
    """A vector environment that uses :class:`InstantCluster`."""

    def __init__(self, kind: str, hosts: int, in_store: bool) -> None:
        self._instant_cluster = InstantCluster(in_store)
        super().__init__([make_env_fn(kind)] * (ENVS_PER_HOST * hosts), num_hosts=hosts, workers_per_host=0)

    def _connect(self) -> Any:
        return self._instant_cluster


def measure_driver(seconds: float, rounds: int) -> list[dict[str, Any]]:
    rows = []
    for kind in SHAPES:
        for hosts in (8, 32, 128):
            pair = {
                "own": InstantVectorEnv(kind, hosts, in_store=False),
                "ray.get": InstantVectorEnv(kind, hosts, in_store=True),
            }
            times = measure_alternately({name: make_step(envs) for name, envs in pair.items()}, seconds, rounds)
            size = make_step_arrays(kind)[-1].nbytes * hosts
            source = np.ones(size, np.uint8)
            copying = summarize([microseconds_per_call(source.copy, seconds / 4) for _ in range(rounds)])
            row = {"observations": kind, "hosts": hosts, "envs": hosts * ENVS_PER_HOST, "bytes": size, "memcpy_us": copying}
            rows.append(row | {"own_us": summarize(times["own"]), "with_ray_get_us": summarize(times["ray.get"])})
            print(json.dumps(rows[-1]), flush=True)
            for envs in pair.values():
                envs.close(terminate=True)
    return rows


def draw(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """Plot the efficiency against the duration of a batch, with a line where two hosts are as fast as one local engine."""
    from vecenv.tools.benchmark import COLOURS, new_figure, save

    figure = new_figure(7.0, 4.2)
    axes = figure.subplots()
    times = [row["batch_ms"] for row in rows]
    values = [row["efficiency"]["median"] for row in rows]
    low, high = ([row["efficiency"][key] for row in rows] for key in ("least", "greatest"))
    axes.fill_between(times, low, high, color=COLOURS["vecenv"], alpha=0.2, linewidth=0)
    axes.plot(times, values, "o-", color=COLOURS["vecenv"], label="2 hosts on one machine (band: minimum to maximum)")
    axes.axhline(0.5, color=COLOURS["gymnasium"], linestyle="--", label="break-even: 2 hosts as fast as one local engine")
    axes.axvline(10, color=COLOURS["bound"], linestyle=":", label="10 ms")
    axes.set_xscale("log")
    axes.set_xticks(times, [str(value) for value in times])
    axes.set_ylim(0, 1)
    axes.set_xlabel("duration of one host's batch, ms")
    axes.set_ylabel("share of the time that hosts spend in steps")
    axes.legend(fontsize=8, loc="lower right")
    save(figure, path)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["cost", "efficiency", "driver"])
    parser.add_argument("--seconds", type=float, default=0.4, help="seconds per sample")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", type=Path, help="write the rows to this file")
    parser.add_argument("--plot", type=Path, help="draw the rows of `efficiency` to this file")
    options = parser.parse_args(argv)
    if options.plot is not None and options.what != "efficiency":
        parser.error("--plot draws only the rows of `efficiency`")
    import ray

    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    ray.init(address="local", num_cpus=8, include_dashboard=False, object_store_memory=STORE_BYTES, log_to_driver=False)
    try:
        measures = {"cost": measure_cost, "efficiency": measure_efficiency, "driver": measure_driver}
        rows = measures[options.what](options.seconds, options.rounds)
    finally:
        ray.shutdown()
    if options.json is not None:
        options.json.write_text(json.dumps(rows, indent=2) + "\n")
    if options.plot is not None:
        draw(rows, options.plot)


if __name__ == "__main__":
    main()
