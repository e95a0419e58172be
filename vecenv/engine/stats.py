"""Statistics of a process engine."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from vecenv.engine.worker_process import LocalWorker, Worker
from vecenv.shm import SharedArrays


def measure_workers(arrays: SharedArrays) -> dict[str, float]:
    """Return the mean and longest step time in seconds, and the share of the workers' time spent waiting for the busiest."""
    total_steps = float(arrays.worker_steps.sum())
    num_active = int(np.count_nonzero(arrays.worker_steps))  # the caller has an entry even if it steps no environments
    total_seconds = float(arrays.worker_time.sum())
    per_worker = arrays.worker_time / np.maximum(arrays.worker_steps, 1.0)
    times = arrays.step_time[arrays.step_time > 0]
    busiest = float(arrays.worker_time.max())
    return {
        "step_time_mean": total_seconds / max(total_steps, 1.0),
        "step_time_slowest_env": float(times.max()) if len(times) else float(per_worker.max()),
        "straggler_share": 1.0 - total_seconds / (busiest * num_active) if busiest > 0 and num_active else 0.0,
    }


@dataclass(frozen=True, slots=True)
class WorkerStats:
    """The statistics of one worker since its vector environment was built; see :meth:`vecenv.AsyncVectorEnv.worker_stats`.

    Attributes:
        index: Its index in ``envs.processes``; the caller's own share comes last.
        pid: Its process id.
        in_this_process: True for the caller's own share, which this process steps.
        envs: The indices of its environments.
        steps: The number of steps of its environments, estimated from the timed ones.
        seconds: The time spent in these steps, estimated in the same way.
        slowest_env: The environment that took longest in its latest sampled step; ``None`` before the first sample.
        slowest_seconds: The duration of that step; 0 before the first sample.
    """

    index: int
    pid: int
    in_this_process: bool
    envs: range
    steps: float
    seconds: float
    slowest_env: int | None
    slowest_seconds: float


def worker_stats(workers: Iterable[Worker], arrays: SharedArrays) -> list[WorkerStats]:
    """Return the current statistics of these workers, ordered by index, from their counters in shared memory."""
    return sorted((_measure_worker(worker, arrays) for worker in workers), key=lambda worker: worker.index)


def _measure_worker(worker: Worker, arrays: SharedArrays) -> WorkerStats:
    first, last = int(worker.rows[0]), int(worker.rows[-1])
    times = arrays.step_time[first : last + 1]
    slowest = int(times.argmax())
    return WorkerStats(
        worker.index, worker.pid, isinstance(worker, LocalWorker), range(first, last + 1),
        steps=float(arrays.worker_steps[worker.index]), seconds=float(arrays.worker_time[worker.index]),
        slowest_env=first + slowest if times[slowest] else None, slowest_seconds=float(times[slowest]),
    )  # fmt: skip
