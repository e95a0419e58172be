"""Measures how the time of a first-ready batch is spent: ``python bench/first_ready_cost.py Ant-v5 --num-envs 8``.

For each way to step the same environments, it prints the microseconds of all used cores per environment step, divided into
processor time of the caller, processor time of the workers, and the rest, in which a worker's core was idle. All are built
first and take turns in one process. A row shows the medians of its rounds, and its rate relative to ``step``, by round.

    python bench/first_ready_cost.py ALE/Pong-v5 --num-envs 8 --rounds 9
    python bench/first_ready_cost.py --sleep 0.001 --num-envs 64 --workers 16   # simulates one core per process

With ``--sleep`` the environments only sleep, for about that many seconds per step, so that workers and caller need hardly
any processor time.
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
from bench import take_turns
from bench.workloads import WaitingEnv
from vecenv.tools.runners import make_env


class MeasuredEnvs:
    """A vector environment, and the measurements of stepping it in one way."""

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
        began = time.perf_counter()
        while time.perf_counter() - began < seconds:
            if self.first_ready:
                envs.send(actions, envs.recv()[-1]["env_id"])
            else:
                envs.step(actions)
            steps += len(actions)
        wall, after = time.perf_counter() - began, self._processor_times()
        if record:
            caller, workers = (1e6 * (now - then) / steps for now, then in zip(after, before, strict=True))
            self.samples.append((1e6 * wall * len(self.workers) / steps, caller, workers))
        return wall

    def _processor_times(self) -> tuple[float, float]:
        return time.process_time(), sum(sum(worker.cpu_times()[:2]) for worker in self.workers)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("env", nargs="?", default="Ant-v5", help="id of the environment")
    parser.add_argument("--sleep", type=float, help="environments that only sleep, for that many seconds per step")
    parser.add_argument("--num-envs", type=int, default=8)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=1.0, help="seconds per turn")
    options = parser.parse_args()
    env_fn: Callable[[], Any] = functools.partial(make_env, options.env)
    if options.sleep:
        env_fn = functools.partial(WaitingEnv, (0.8 * options.sleep, 1.2 * options.sleep), shape=(27,))
    count = options.num_envs
    sizes = {f"batches of {size}": size for size in (max(count // 2, 1), max(count // 4, 1))}
    measured = [MeasuredEnvs("step", env_fn, options)]
    measured += [MeasuredEnvs(name, env_fn, options, batch_size=size) for name, size in sizes.items()]
    measured.append(MeasuredEnvs('"auto"', env_fn, options, batch_size="auto"))
    for each in measured:
        each.run(options.seconds / 2, record=False)
    take_turns({each.name: functools.partial(each.run, options.seconds) for each in measured}, options.rounds)
    print(f"{'us per environment step':<28} {'all cores':>10} {'caller':>8} {'workers':>8} {'rest':>8}   x the rate of step")
    for each in measured:
        total, caller, workers = (statistics.median(column) for column in zip(*each.samples, strict=True))
        rest = statistics.median(cores - caller - workers for cores, caller, workers in each.samples)
        ratios = sorted(base[0] / sample[0] for base, sample in zip(measured[0].samples, each.samples, strict=True))
        spread = f"{statistics.median(ratios):.2f} ({ratios[0]:.2f} - {ratios[-1]:.2f})"
        print(f"{each.name:<28} {total:>10.1f} {caller:>8.1f} {workers:>8.1f} {rest:>8.1f}   {spread}")
        each.envs.close()


if __name__ == "__main__":
    main()
