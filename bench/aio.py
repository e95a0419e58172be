"""``vecenv.aio.Pool`` beside OpenEnv's server, and beside ``send`` and ``recv``: ``python bench/aio.py``.

64 environments that wait 50 ms, or compute 5 ms of a core, in 2 workers and in 64. Each row is a program of its own, and the
rounds of all are interleaved. The table shows steps per second, and how late the event loop is: the 99th percentile of how
long after its time a timer of 2 ms is called.

    python bench/aio.py                                   # without OpenEnv, which is named as missing
    python -m venv /tmp/openenv && /tmp/openenv/bin/pip install openenv==0.10.0
    python bench/aio.py --openenv-python /tmp/openenv/bin/python

OpenEnv has a Python of its own because it pins what it needs. Its server is one process with a thread for each session, so
the number of workers means nothing to it. The row ``bare`` is a loop that does nothing, beside as many processes that do the
same work and never talk: as late as that any loop is on this machine.
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

WAIT, COMPUTE = 0.05, 0.005
BEFORE = 1.0  # seconds before counting begins


def work(kind: str) -> None:
    """Make one step of an environment."""
    if kind == "wait":
        time.sleep(WAIT)
        return
    until = time.thread_time() + COMPUTE
    while time.thread_time() < until:
        pass


# -- programs that are measured ------------------------------------------------------------------------------------------


class Counter:
    """Counts steps, once the program has run for a while."""

    def __init__(self, seconds: float) -> None:
        self.steps = 0
        self.begins = time.perf_counter() + BEFORE
        self.ends = self.begins + seconds

    def add(self, steps: int = 1) -> bool:
        """Count steps. Return False once the measurement is over."""
        now = time.perf_counter()
        if self.begins <= now < self.ends:
            self.steps += steps
        return now < self.ends

    @property
    def rate(self) -> float:
        return self.steps / (self.ends - self.begins)


async def measured(seconds: float, num_envs: int, play: Callable[[Counter], Awaitable[None]]) -> dict[str, float]:
    """Play with all environments at the same time, and measure how late the loop is meanwhile."""
    loop = asyncio.get_running_loop()
    counter, late = Counter(seconds), list[float]()

    async def measure_delays() -> None:
        while True:
            due = loop.time() + 0.002
            await asyncio.sleep(0.002)
            if time.perf_counter() >= counter.begins:
                late.append(max(loop.time() - due, 0.0))

    measuring = asyncio.create_task(measure_delays())
    await asyncio.gather(*(play(counter) for _ in range(num_envs)))
    measuring.cancel()
    late.sort()
    return {"rate": counter.rate, "late_ms": 1000 * late[int(0.99 * len(late))], "median_ms": 1000 * late[len(late) // 2]}


def env_class(kind: str) -> Any:
    from bench.workloads import EmptyEnv

    class Works(EmptyEnv):
        def step(self, action: Any) -> Any:
            work(kind)
            return super().step(action)

    return Works


def run_pool(kind: str, workers: int, args: argparse.Namespace) -> dict[str, float]:
    from vecenv.aio import Pool

    threads = args.num_envs // workers if kind == "wait" else 1

    async def main() -> dict[str, float]:
        async with Pool(env_class(kind), args.num_envs, workers, env_threads=threads) as pool:

            async def play(counter: Counter) -> None:
                async with pool.episode() as env:
                    while counter.add():
                        await env.step(0)

            return await measured(args.seconds, args.num_envs, play)

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
        [env_class(kind)] * args.num_envs, num_workers=workers, env_threads=threads, autoreset_mode=AutoresetMode.DISABLED,
        use_caller=False,
    )  # fmt: skip
    try:
        envs.reset()
        counter, kwargs = Counter(args.seconds), {"at_least": 1} if first_ready else {}
        actions = np.zeros(args.num_envs, np.int64)
        envs.send(actions)
        while True:
            *_, infos = envs.recv(**kwargs)
            rows = infos["env_id"]
            if not counter.add(len(rows)):
                break
            envs.send(actions[rows], rows)
    finally:
        envs.close(terminate=True)
    return {"rate": counter.rate}


def run_bare(kind: str, workers: int, args: argparse.Namespace) -> dict[str, float]:
    import multiprocessing

    def forever() -> None:
        while True:
            work(kind)

    context = multiprocessing.get_context("fork")
    others = [context.Process(target=forever, daemon=True) for _ in range(workers)]
    for other in others:
        other.start()

    async def play(counter: Counter) -> None:
        while counter.add():
            await asyncio.sleep(0.1)

    try:
        return asyncio.run(measured(args.seconds, 1, play))
    finally:
        for other in others:
            other.kill()


def run_openenv(kind: str, args: argparse.Namespace) -> dict[str, float]:
    """Run in OpenEnv's own Python: its client, and its server in another process."""
    from openenv.core.generic_client import GenericEnvClient

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, __file__, "--serve", kind, "--port", str(port), "--num-envs", str(args.num_envs)]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    try:
        until = time.monotonic() + 60
        while time.monotonic() < until:
            with socket.socket() as probe:
                if not probe.connect_ex(("127.0.0.1", port)):
                    break
            time.sleep(0.1)

        async def play(counter: Counter) -> None:
            async with GenericEnvClient(f"http://127.0.0.1:{port}", connect_timeout_s=60.0) as env:
                await env.reset()
                while counter.add():
                    await env.step({"action": 0})

        return asyncio.run(measured(args.seconds, args.num_envs, play))
    finally:
        server.kill()
        server.wait()


def serve_openenv(kind: str, args: argparse.Namespace) -> None:
    import uvicorn
    from openenv.core.env_server.http_server import create_fastapi_app
    from openenv.core.env_server.interfaces import Environment
    from openenv.core.env_server.types import Action, Observation, State

    global Move, Seen  # pydantic looks them up by name

    class Move(Action):
        action: int

    class Seen(Observation):
        values: list[float]

    class Works(Environment[Any, Any, Any]):
        SUPPORTS_CONCURRENT_SESSIONS = True

        def reset(self, seed: int | None = None, episode_id: str | None = None, **_: Any) -> Any:
            return Seen(values=[0.0] * 4, reward=0.0, done=False)

        def step(self, action: Any, timeout_s: float | None = None, **_: Any) -> Any:
            work(kind)
            return Seen(values=[0.0] * 4, reward=0.0, done=False)

        @property
        def state(self) -> Any:
            return State()

    app = create_fastapi_app(Works, Move, Seen, max_concurrent_envs=args.num_envs)
    uvicorn.run(app, host="127.0.0.1", port=args.port, log_level="error")


# -- the comparison --------------------------------------------------------------------------------------------------------


def candidates(args: argparse.Namespace) -> dict[str, Callable[[str, int], dict[str, float]]]:
    """Return name -> (kind, workers) -> a function that measures."""
    return {
        "pool": lambda kind, workers: run_pool(kind, workers, args),
        "recv": lambda kind, workers: run_send_recv(kind, workers, args, first_ready=False),
        "first": lambda kind, workers: run_send_recv(kind, workers, args, first_ready=True),
        "bare": lambda kind, workers: run_bare(kind, workers, args),
        "openenv": lambda kind, workers: run_openenv(kind, args),
    }


def child(name: str, kind: str, workers: int, args: argparse.Namespace) -> dict[str, float]:
    """Return the figures of one program; none if it cannot run here."""
    python = args.openenv_python if name == "openenv" else sys.executable
    command = [python, __file__, "--run", name, "--kind", kind, "--of-workers", str(workers)]
    command += ["--seconds", str(args.seconds), "--num-envs", str(args.num_envs), *(["--uvloop"] if args.uvloop else [])]
    root = str(Path(__file__).parents[1])
    done = subprocess.run(command, capture_output=True, text=True, check=False, env={**os.environ, "PYTHONPATH": root})
    if done.returncode:
        missing = "No module named 'openenv'" in done.stderr
        print("openenv: missing, see --help" if missing else done.stderr, file=sys.stderr)
        return {}
    figures: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return figures


def spread(values: list[float], form: str) -> str:
    return f"{statistics.median(values):{form}} ({min(values):{form}} - {max(values):{form}})"


def compare(args: argparse.Namespace) -> None:
    from bench import take_turns

    print(f"{args.num_envs} environments, {args.repeats} interleaved rounds of {args.seconds:g} s: median (least - most)")
    print(f"{'':28}{'steps/s':>26}{'late, ms (99 %)':>22}{'pool / this':>24}")
    for kind, workers in itertools.product(args.kinds, args.workers):
        names = [name for name in candidates(args) if name in args.only]
        found = take_turns({name: functools.partial(child, name, kind, workers, args) for name in names}, args.repeats)
        for name, rounds in found.items():
            if not all(rounds):
                continue
            late = [each["late_ms"] for each in rounds if "late_ms" in each]
            ratios = [mine["rate"] / each["rate"] for mine, each in zip(found["pool"], rounds, strict=True)]
            steps = "" if name == "bare" else spread([each["rate"] for each in rounds], ",.0f")
            beside = "" if name in ("pool", "bare") else spread(ratios, ".2f")
            what = f"{f'{kind}, {workers} workers':20}{name:8}"
            print(f"{what}{steps:>26}{spread(late, '.1f') if late else '':>22}{beside:>24}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--openenv-python", default=sys.executable, help="a Python that has openenv")
    parser.add_argument("--kinds", nargs="+", default=["wait", "compute"], choices=["wait", "compute"])
    parser.add_argument("--workers", nargs="+", type=int, default=[2, 64])
    parser.add_argument("--num-envs", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--uvloop", action="store_true", help="the pool's loop is uvloop's")
    parser.add_argument("--only", nargs="+", default=["pool", "recv", "first", "bare", "openenv"])
    for hidden in ("--run", "--kind", "--serve"):
        parser.add_argument(hidden, help=argparse.SUPPRESS)
    for hidden in ("--of-workers", "--port"):
        parser.add_argument(hidden, type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        serve_openenv(args.serve, args)
    elif args.run:
        print(json.dumps(candidates(args)[args.run](args.kind, args.of_workers)))
    else:
        compare(args)


if __name__ == "__main__":
    main()
