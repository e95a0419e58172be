"""Measures environment steps per second with chunks of actions, relative to the bare loop: ``python -m bench.chunks``.

For each environment, the bare loop (``env.step`` in one independent process per core), the engine without chunks, and the
engine with chunks of 4 and 16 actions run alternately, each in a separate process. All executed steps and resets count,
including resets within a step; unused actions of a chunk do not count. A share is the rate of the engine divided by that of
the bare loop in the same round; the table shows the median, minimum and maximum.

    python -m bench.chunks CartPole-v1 HalfCheetah-v5 Ant-v5 --num-envs 8
"""

from __future__ import annotations

import argparse
import functools
import random
import statistics
from collections.abc import Callable, Sequence
from typing import Any

from gymnasium.vector import AutoresetMode
from rich.console import Console
from rich.table import Table

from vecenv.front.infos import executed_steps
from vecenv.system.cores import usable_cores
from vecenv.tools.benchmark import started
from vecenv.tools.runners import Candidate, VectorRunner, bound_candidate, make_env, vecenv_candidate
from vecenv.wrappers import ActionChunks


class ChunkRunner(VectorRunner):
    """A runner that steps a vector environment with random chunks, and counts the steps and resets of its environments."""

    def _step(self) -> float:
        _, _, terminations, truncations, infos = self.envs.step(self._next())
        executed = executed_steps(infos, self.num_envs)
        steps = executed * self.num_envs if isinstance(executed, int) else int(executed.sum())
        resets = (terminations | truncations).sum() if self.envs.autoreset_mode is AutoresetMode.SAME_STEP else 0
        return steps + int(resets)


def _column_title(horizon: int) -> str:
    return "no chunks" if horizon == 1 else f"chunks of {horizon}"


def _make_chunked_env(env_fn: Callable[[], Any], horizon: int) -> Any:
    return ActionChunks(env_fn(), horizon)


def make_candidates(env_id: str, num_envs: int, workers: int, horizons: Sequence[int], mode: str) -> list[Candidate]:
    """Return the bare loop, and the engine with chunks of each horizon; a horizon of 1 means no chunks."""
    env_fn = functools.partial(make_env, env_id)
    options: dict[str, Any] = {"runner": ChunkRunner, "num_workers": workers, "autoreset_mode": mode}
    make_candidate = functools.partial(vecenv_candidate, num_envs=num_envs, **options)
    candidates = [bound_candidate("bare-loop", env_fn, num_envs, workers)]
    for horizon in horizons:
        chunked_fn = env_fn if horizon == 1 else functools.partial(_make_chunked_env, env_fn, horizon)
        candidates.append(make_candidate(str(horizon), _column_title(horizon), env_fn=chunked_fn))
    return candidates


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("envs", nargs="*", default=["CartPole-v1", "HalfCheetah-v5", "Ant-v5"])
    parser.add_argument("--num-envs", type=int, default=8)
    parser.add_argument("--workers", type=int, default=usable_cores())
    parser.add_argument("--horizons", type=int, nargs="+", default=[1, 4, 16], help="actions per chunk; 1: no chunks")
    parser.add_argument("--mode", default="SameStep", help="autoreset mode (default: SameStep)")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--seconds", type=float, default=0.5, help="seconds per sample")
    options = parser.parse_args()
    table = Table("share of the bare loop", *map(_column_title, options.horizons))
    for env_id in options.envs:
        candidates = make_candidates(env_id, options.num_envs, options.workers, options.horizons, options.mode)
        rates: dict[str, list[float]] = {candidate.name: [] for candidate in candidates}
        with started(candidates) as hosts:
            for _ in range(options.rounds + 1):
                for host in random.sample(hosts, len(hosts)):
                    rates[host.candidate.name].append(host.rate(options.seconds))
        bare = rates["bare-loop"][1:]  # the first round is a warm-up
        cells = []
        for horizon in options.horizons:
            shares = [rate / bare_rate for rate, bare_rate in zip(rates[str(horizon)][1:], bare, strict=True)]
            cells.append(f"{statistics.median(shares):.2f} ({min(shares):.2f} - {max(shares):.2f})")
        table.add_row(f"{env_id} x {options.num_envs}", *cells)
    Console().print(table)


if __name__ == "__main__":
    main()
