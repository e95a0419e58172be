"""Simulates how the caller limits the step rate of many cores: ``python bench/many_cores.py``.

The program needs only a few cores: it measures how much processor time a batch takes in the calling process while workers
sleep, and simulates the rest. The simulated caller is one server with a queue; a worker is busy while its environments step.
For several durations of a step, the table shows the rate as a share of the rate that all cores would reach if the caller
took no time: for ``step``, for first-ready halves, for halves with two messages in flight per worker
(``batch_size="auto"``), and for ``step`` in two programs with one engine each.

    python bench/many_cores.py                       # measures, then simulates
    python bench/many_cores.py --costs 40 8 0.4      # simulates with these costs, in us per batch, worker and row
    python bench/many_cores.py --bytes 28224         # with observations of this size, which the caller copies

Processor time depends less on other programs than wall time does.
"""

from __future__ import annotations

import argparse
import functools
import heapq
import statistics
import time
from typing import Any, NamedTuple

import numpy as np

import vecenv
from bench import seconds_per_unit
from bench.workloads import WaitingEnv

CORES = (8, 16, 32, 64, 128)
STEP_SECONDS = (100e-6, 300e-6, 1e-3, 5e-3)
BATCHES = 60  # batches of all environments in a simulation
SPREAD = 0.3  # sigma of the log-normal step times


class Costs(NamedTuple):
    """The caller's processor time in seconds: per batch, and in addition per worker and per row."""

    batch: float
    worker: float
    row: float


def measure_costs(size: int) -> Costs:
    """Measure the caller's cost of ``step`` with few and many workers, and with few and many rows per worker."""
    few, many, rows = 8, 64, 256
    with_few, with_many = (caller_seconds(workers, workers, 0.004, size) for workers in (few, many))
    worker_and_row = (with_many - with_few) / (many - few)
    row = max((caller_seconds(few, rows, 0.0, size) - caller_seconds(few, few, 0.0, size)) / (rows - few), 0.0)
    return Costs(max(with_few - few * worker_and_row, 0.0), max(worker_and_row - row, 0.0), row)


def caller_seconds(workers: int, rows: int, step_seconds: float, size: int) -> float:
    """Return the median of the caller's processor seconds per batch."""
    env_fn = functools.partial(WaitingEnv, step_seconds, shape=(size,), dtype="uint8")
    envs = vecenv.AsyncVectorEnv([env_fn] * rows, num_workers=workers)
    try:
        envs.reset(seed=0)
        actions = np.zeros(rows, np.int64)
        times = [seconds_per_unit(1, lambda: envs.step(actions), time.process_time) for _ in range(150)]
        return statistics.median(times[20:])
    finally:
        envs.close()


def simulate_step(workers: int, envs_per_worker: int, step_seconds: float, costs: Costs, rng: np.random.Generator) -> float:
    """Simulate ``step``; return environment steps per second. Request and reply each take half of a worker's cost."""
    sent = costs.batch / 2 + costs.worker / 2 * np.arange(1, workers + 1)
    now = 0.0
    for _ in range(BATCHES):
        finish_times = np.sort(now + sent + draw_step_times(workers, envs_per_worker, step_seconds, rng))
        caller_free_at = now + sent[-1]
        for finish_time in finish_times:
            caller_free_at = max(caller_free_at, finish_time) + costs.worker / 2
        now = caller_free_at + costs.batch / 2 + costs.row * workers * envs_per_worker
    return BATCHES * workers * envs_per_worker / now


def simulate_halves(
    workers: int, envs_per_worker: int, step_seconds: float, costs: Costs, rng: np.random.Generator, messages: int = 1
) -> float:
    """Simulate first-ready halves with ``messages`` in flight per worker; return environment steps per second."""
    rows, half = envs_per_worker // messages, max(workers * messages // 2, 1)
    finish_times = np.zeros(workers)  # of each worker's latest message
    in_flight: list[tuple[float, int]] = []

    def send(batch: list[int], now: float) -> None:
        durations = draw_step_times(len(batch), rows, step_seconds, rng)
        for number, (worker, duration) in enumerate(zip(batch, durations, strict=True), 1):
            sent = now + costs.worker / 2 * number
            finish_times[worker] = max(finish_times[worker], sent) + duration
            heapq.heappush(in_flight, (float(finish_times[worker]), worker))

    send(list(range(workers)) * messages, 0.0)
    now = 0.0
    for _ in range(2 * BATCHES):
        batch = [heapq.heappop(in_flight) for _ in range(half)]
        now = max(now, batch[-1][0]) + costs.batch / 2 + half * (costs.worker / 2 + costs.row * rows)
        send([worker for _, worker in batch], now)
        now += costs.batch / 2 + half * costs.worker / 2
    return 2 * BATCHES * half * rows / now


def draw_step_times(messages: int, rows: int, step_seconds: float, rng: np.random.Generator) -> Any:
    """Draw the seconds that a worker needs for each message. It steps the ``rows`` of a message one after another."""
    return rng.lognormal(np.log(step_seconds) - SPREAD**2 / 2, SPREAD, (messages, rows)).sum(1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--costs", type=float, nargs=3, metavar=("BATCH", "WORKER", "ROW"), help="microseconds")
    parser.add_argument("--bytes", type=int, default=128, help="bytes of an observation (default: 128)")
    parser.add_argument("--envs-per-worker", type=int, default=4, help="environments per worker (default: 4)")
    options = parser.parse_args()
    costs = Costs(*(cost * 1e-6 for cost in options.costs)) if options.costs else measure_costs(options.bytes)
    print(f"A batch costs the caller {costs.batch * 1e6:.0f} us, plus {costs.worker * 1e6:.1f} us per worker and")
    print(f"{costs.row * 1e6:.2f} us per row of {options.bytes} bytes. {options.envs_per_worker} environments per worker.\n")
    print("| cores | " + " | ".join(f"{step * 1e3:g} ms" for step in STEP_SECONDS) + " |")
    print("|---:|" + "---|" * len(STEP_SECONDS))
    for cores in CORES:
        cells = []
        for step in STEP_SECONDS:
            two_messages = functools.partial(simulate_halves, messages=2)
            cases = [(simulate_step, 1), (simulate_halves, 1), (two_messages, 1), (simulate_step, 2)]
            rates = [
                engines * simulate(cores // engines, options.envs_per_worker, step, costs, np.random.default_rng(0))
                for simulate, engines in cases
            ]
            cells.append(", ".join(f"{rate * step / cores:.2f}" for rate in rates))
        print(f"| {cores} | " + " | ".join(cells) + " |")


if __name__ == "__main__":
    main()
