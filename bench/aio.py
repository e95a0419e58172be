"""Compares ``vecenv.aio.Pool`` with OpenEnv's server, and with ``send`` and ``recv``: ``python bench/aio.py``.

64 environments run in 2 and in 64 workers; a step waits for 50 ms or computes for 5 ms. Each measurement runs in a new
process, and the rounds of the rows with the same work and number of workers are interleaved. The table shows the steps per
second and the delay of the event loop: the 99th percentile of how late a timer of 2 ms fires.

    python bench/aio.py                                   # without OpenEnv, which is reported as missing
    python -m venv /tmp/openenv && /tmp/openenv/bin/pip install openenv==0.10.0
    python bench/aio.py --openenv-python /tmp/openenv/bin/python

OpenEnv needs a separate Python environment because it pins its dependencies. Its server is one process with a thread per
session, so it ignores the number of workers. The row ``bare`` is an idle event loop, while as many processes as workers do
the same work without communication. It shows the lowest delay that is possible on this machine.
"""

from __future__ import annotations

import argparse
import asyncio
import functools
import itertools
import json
import os
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

WAIT_SECONDS, COMPUTE_SECONDS = 0.05, 0.005
WARM_UP_SECONDS = 1.0


def work(kind: str) -> None:
    """Do the work of one step of an environment."""
    if kind == "wait":
        time.sleep(WAIT_SECONDS)
        return
    end = time.thread_time() + COMPUTE_SECONDS
    while time.thread_time() < end:
        pass


# -- the measured programs -----------------------------------------------------------------------------------------------


class Counter:
    """A counter of steps in a period that begins after a warm-up."""

    def __init__(self, seconds: float) -> None:
        self.steps = 0
        self.start = time.perf_counter() + WARM_UP_SECONDS
        self.end = self.start + seconds

    def add(self, steps: int = 1) -> bool:
        """Count steps; return False after the end of the period."""
        now = time.perf_counter()
        if self.start <= now < self.end:
            self.steps += steps
        return now < self.end

    @property
    def rate(self) -> float:
        return self.steps / (self.end - self.start)


async def measure_loop(seconds: float, num_envs: int, play: Callable[[Counter], Awaitable[None]]) -> dict[str, float]:
    """Run ``play`` for all environments concurrently. Return the steps per second, and the delay of the event loop."""
    loop = asyncio.get_running_loop()
    counter, delays = Counter(seconds), list[float]()

    async def measure_delays() -> None:
        while True:
            due = loop.time() + 0.002
            await asyncio.sleep(0.002)
            if time.perf_counter() >= counter.start:
                delays.append(max(loop.time() - due, 0.0))

    task = asyncio.create_task(measure_delays())
    await asyncio.gather(*(play(counter) for _ in range(num_envs)))
    task.cancel()
    delays.sort()
    percentile_99, median = delays[int(0.99 * len(delays))], delays[len(delays) // 2]
    return {"rate": counter.rate, "late_ms": 1000 * percentile_99, "median_ms": 1000 * median}


def make_env_class(kind: str) -> Any:
    from bench.workloads import EmptyEnv

    class WorkingEnv(EmptyEnv):
        def step(self, action: Any) -> Any:
            work(kind)
            return super().step(action)

    return WorkingEnv


def run_pool(kind: str, workers: int, args: argparse.Namespace) -> dict[str, float]:
    from vecenv.aio import Pool

    threads = args.num_envs // workers if kind == "wait" else 1

    async def main() -> dict[str, float]:
        async with Pool(make_env_class(kind), args.num_envs, workers, env_threads=threads) as pool:

            async def play(counter: Counter) -> None:
                async with pool.episode() as env:
                    while counter.add():
                        await env.step(0)

            return await measure_loop(args.seconds, args.num_envs, play)

    if args.uvloop:
        import uvloop

        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            return runner.run(main())
    return asyncio.run(main())


def run_send_recv(kind: str, workers: int, args: argparse.Namespace, *, first_ready: bool) -> dict[str, float]:
    import numpy as np
    from gymnasium.vector import AutoresetMode

    import vecenv

    threads = args.num_envs // workers if kind == "wait" else 1
    envs = vecenv.AsyncVectorEnv(
        [make_env_class(kind)] * args.num_envs, num_workers=workers, env_threads=threads, use_caller=False,
        autoreset_mode=AutoresetMode.DISABLED,
    )  # fmt: skip
    try:
        envs.reset()
        counter, recv_options = Counter(args.seconds), {"at_least": 1} if first_ready else {}
        actions = np.zeros(args.num_envs, np.int64)
        envs.send(actions)
        while True:
            *_, infos = envs.recv(**recv_options)
            rows = infos["env_id"]
            if not counter.add(len(rows)):
                break
            envs.send(actions[rows], rows)
    finally:
        envs.close(terminate=True)
    return {"rate": counter.rate}


def run_bare(kind: str, workers: int, args: argparse.Namespace) -> dict[str, float]:
    import multiprocessing

    def work_forever() -> None:
        while True:
            work(kind)

    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=work_forever, daemon=True) for _ in range(workers)]
    for process in processes:
        process.start()

    async def play(counter: Counter) -> None:
        while counter.add():
            await asyncio.sleep(0.1)

    try:
        return asyncio.run(measure_loop(args.seconds, 1, play))
    finally:
        for process in processes:
            process.kill()


def run_openenv(kind: str, args: argparse.Namespace) -> dict[str, float]:
    """Run OpenEnv's client, and its server in another process. Must be called in OpenEnv's Python environment."""
    from openenv.core.generic_client import GenericEnvClient

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, __file__, "--serve", kind, "--port", str(port), "--num-envs", str(args.num_envs)]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            with socket.socket() as probe:
                server_accepts = probe.connect_ex(("127.0.0.1", port)) == 0
            if server_accepts:
                break
            time.sleep(0.1)

        async def play(counter: Counter) -> None:
            async with GenericEnvClient(f"http://127.0.0.1:{port}", connect_timeout_s=60.0) as env:
                await env.reset()
                while counter.add():
                    await env.step({"action": 0})

        return asyncio.run(measure_loop(args.seconds, args.num_envs, play))
    finally:
        server.kill()
        server.wait()


def serve_openenv(kind: str, args: argparse.Namespace) -> None:
    import uvicorn
    from openenv.core.env_server.http_server import create_fastapi_app
    from openenv.core.env_server.interfaces import Environment
    from openenv.core.env_server.types import Action, Observation, State

    global EnvAction, EnvObservation  # pydantic resolves the annotations by these global names

    class EnvAction(Action):
        action: int

    class EnvObservation(Observation):
        values: list[float]

    class WorkingEnvironment(Environment[Any, Any, Any]):
        SUPPORTS_CONCURRENT_SESSIONS = True

        def reset(self, seed: int | None = None, episode_id: str | None = None, **_: Any) -> Any:
            return EnvObservation(values=[0.0] * 4, reward=0.0, done=False)

        def step(self, action: Any, timeout_s: float | None = None, **_: Any) -> Any:
            work(kind)
            return EnvObservation(values=[0.0] * 4, reward=0.0, done=False)

        @property
        def state(self) -> Any:
            return State()

    app = create_fastapi_app(WorkingEnvironment, EnvAction, EnvObservation, max_concurrent_envs=args.num_envs)
    uvicorn.run(app, host="127.0.0.1", port=args.port, log_level="error")


# -- the comparison --------------------------------------------------------------------------------------------------------


def candidates(args: argparse.Namespace) -> dict[str, Callable[[str, int], dict[str, float]]]:
    """Return the function of each row. It takes the kind of work and the number of workers, and returns the results."""
    return {
        "pool": lambda kind, workers: run_pool(kind, workers, args),
        "recv-all": lambda kind, workers: run_send_recv(kind, workers, args, first_ready=False),
        "recv-any": lambda kind, workers: run_send_recv(kind, workers, args, first_ready=True),
        "bare": lambda kind, workers: run_bare(kind, workers, args),
        "openenv": lambda kind, workers: run_openenv(kind, args),
    }


def measure(name: str, kind: str, workers: int, args: argparse.Namespace) -> dict[str, float]:
    """Run one candidate in a new process. Return its results, or an empty dict if it cannot run here."""
    python = args.openenv_python if name == "openenv" else sys.executable
    command = [python, __file__, "--run", name, "--kind", kind, "--num-workers", str(workers)]
    command += ["--seconds", str(args.seconds), "--num-envs", str(args.num_envs), *(["--uvloop"] if args.uvloop else [])]
    root = str(Path(__file__).parents[1])
    completed = subprocess.run(command, capture_output=True, text=True, check=False, env={**os.environ, "PYTHONPATH": root})
    if completed.returncode:
        is_missing = "No module named 'openenv'" in completed.stderr
        print("openenv: missing, see --help" if is_missing else completed.stderr, file=sys.stderr)
        return {}
    results: dict[str, float] = json.loads(completed.stdout.splitlines()[-1])
    return results


def format_spread(values: list[float], form: str) -> str:
    return f"{statistics.median(values):{form}} ({min(values):{form}} - {max(values):{form}})"


def compare(args: argparse.Namespace) -> None:
    from bench import run_interleaved

    print(
        f"{args.num_envs} environments, {args.repeats} interleaved rounds of {args.seconds:g} s: median (minimum - maximum)"
    )
    print(f"{'':28}{'steps/s':>26}{'late, ms (99 %)':>22}{'pool / this':>24}")
    for kind, workers in itertools.product(args.kinds, args.workers):
        names = [name for name in candidates(args) if name in args.only]
        runs = {name: functools.partial(measure, name, kind, workers, args) for name in names}
        results = run_interleaved(runs, args.repeats)
        for name, rounds in results.items():
            if not all(rounds):
                continue
            delays = [result["late_ms"] for result in rounds if "late_ms" in result]
            pairs = zip(results.get("pool", []), rounds, strict=False)
            ratios = [pool["rate"] / result["rate"] for pool, result in pairs if pool]
            rate = "" if name == "bare" else format_spread([result["rate"] for result in rounds], ",.0f")
            delay = format_spread(delays, ".1f") if delays else ""
            ratio = "" if name in ("pool", "bare") or not ratios else format_spread(ratios, ".2f")
            row = f"{f'{kind}, {workers} workers':20}{name:8}"
            print(f"{row}{rate:>26}{delay:>22}{ratio:>24}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--openenv-python", default=sys.executable, help="path of a Python interpreter that has openenv")
    parser.add_argument("--kinds", nargs="+", default=["wait", "compute"], choices=["wait", "compute"])
    parser.add_argument("--workers", nargs="+", type=int, default=[2, 64])
    parser.add_argument("--num-envs", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--uvloop", action="store_true", help="run the pool in uvloop's event loop")
    parser.add_argument("--only", nargs="+", default=["pool", "recv-all", "recv-any", "bare", "openenv"])
    for hidden in ("--run", "--kind", "--serve"):
        parser.add_argument(hidden, help=argparse.SUPPRESS)
    for hidden in ("--num-workers", "--port"):
        parser.add_argument(hidden, type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        serve_openenv(args.serve, args)
    elif args.run:
        print(json.dumps(candidates(args)[args.run](args.kind, args.num_workers)))
    else:
        compare(args)


if __name__ == "__main__":
    main()
