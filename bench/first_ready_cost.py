"""Measures where the time of a first-ready batch goes: ``python bench/first_ready_cost.py Ant-v5 --num-envs 8``.

For each way to step the same environments, it prints the time of one core per worker, in microseconds per environment step,
divided into processor time of the caller, processor time of the workers, and the rest, when a core was idle. One program
builds all of them and runs them alternately. A row shows medians over the rounds, and its rate relative to that of ``step``.

    python bench/first_ready_cost.py ALE/Pong-v5 --num-envs 8 --rounds 9
    python bench/first_ready_cost.py --sleep 0.001 --num-envs 64 --workers 16   # simulates one core per process

With ``--sleep``, a step only sleeps for about that many seconds, so workers and caller need hardly any processor time.
"""

from __future__ import annotations

import argparse
import functools
import statistics
import time
from collections.abc import Callable
from typing import Any

import psutil

import vecenv
from bench import run_interleaved
from bench.workloads import WaitingEnv
from vecenv.tools.runners import make_env


class MeasuredEnvs:
    """A vector environment that is stepped in one way, and its measurements."""

    def __init__(self, name: str, env_fn: Callable[[], Any], options: argparse.Namespace, **kwargs: Any) -> None:
        self.name = name
        self.envs: Any = vecenv.AsyncVectorEnv([env_fn] * options.num_envs, num_workers=options.workers, **kwargs)
        self.first_ready = "batch_size" in kwargs
        if kwargs.get("batch_size") == "auto":
            self.name += f": {self.envs.batch_size}, {self.envs.plan.rows_at_once or 'all'} at once"
        self.envs.action_space.seed(0)
        self.actions = self.envs.action_space.sample()[: self.envs.batch_size]
        self.workers = [psutil.Process(worker.pid) for worker in self.envs._pool.processes]
        self.samples: list[tuple[float, float, float]] = []
        if self.first_ready:
            self.envs.reset_async(seed=0)
        else:
            self.envs.reset(seed=0)

    def run(self, seconds: float, *, record: bool = True) -> float:
        """Step for ``seconds`` and return the actual duration."""
        envs, actions = self.envs, self.actions
        steps, before = 0, self._processor_times()
        start = time.perf_counter()
        while time.perf_counter() - start < seconds:
            if self.first_ready:
                envs.send(actions, envs.recv()[-1]["env_id"])
            else:
                envs.step(actions)
            steps += len(actions)
        duration, after = time.perf_counter() - start, self._processor_times()
        if record:
            caller, workers = (1e6 * (end - begin) / steps for begin, end in zip(before, after, strict=True))
            self.samples.append((1e6 * duration * len(self.workers) / steps, caller, workers))
        return duration

    def _processor_times(self) -> tuple[float, float]:
        """Return the processor seconds of the caller, and those of all workers together."""
        return time.process_time(), sum(sum(worker.cpu_times()[:2]) for worker in self.workers)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("env", nargs="?", default="Ant-v5", help="id of the environment")
    parser.add_argument("--sleep", type=float, help="use environments that only sleep, for about that many seconds per step")
    parser.add_argument("--num-envs", type=int, default=8)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=1.0, help="seconds per sample")
    options = parser.parse_args()
    env_fn: Callable[[], Any] = functools.partial(make_env, options.env)
    if options.sleep:
        env_fn = functools.partial(WaitingEnv, (0.8 * options.sleep, 1.2 * options.sleep), shape=(27,))
    count = options.num_envs
    sizes = {f"batches of {size}": size for size in (max(count // 2, 1), max(count // 4, 1))}
    ways = [MeasuredEnvs("step", env_fn, options)]
    ways += [MeasuredEnvs(name, env_fn, options, batch_size=size) for name, size in sizes.items()]
    ways.append(MeasuredEnvs('"auto"', env_fn, options, batch_size="auto"))
    for way in ways:
        way.run(options.seconds / 2, record=False)  # warm-up
    run_interleaved({way.name: functools.partial(way.run, options.seconds) for way in ways}, options.rounds)
    print(f"{'us per environment step':<28} {'all cores':>10} {'caller':>8} {'workers':>8} {'rest':>8}   x the rate of step")
    for way in ways:
        total, caller, workers = (statistics.median(column) for column in zip(*way.samples, strict=True))
        rest = statistics.median(cores - caller - workers for cores, caller, workers in way.samples)
        ratios = sorted(base[0] / sample[0] for base, sample in zip(ways[0].samples, way.samples, strict=True))
        spread = f"{statistics.median(ratios):.2f} ({ratios[0]:.2f} - {ratios[-1]:.2f})"
        print(f"{way.name:<28} {total:>10.1f} {caller:>8.1f} {workers:>8.1f} {rest:>8.1f}   {spread}")
        way.envs.close()


if __name__ == "__main__":
    main()
