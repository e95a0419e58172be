"""The cost of vecenv's EnvPool backend: environment steps per second against raw EnvPool, side by side.

Both step the same task with the same number of environments and threads and the same actions, in short turns that
alternate, so that whatever else the machine does hits both; a repeat is one turn each, and the ratio of a repeat is what
counts. Modes: ``sync`` is ``step()`` of all environments, ``first-ready`` is ``recv()`` and ``send()`` of half of them at
a time. Raw EnvPool gets numpy actions in its own dtype and has its own checks, which look at its first call only.

    python bench/envpool_rate.py                      # CartPole-v1, Ant-v4, Pong-v5 with 64 environments
    python bench/envpool_rate.py --task CartPole-v1 --seconds 1 --repeats 9 --json
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import envpool
import numpy as np

from vecenv.backends import EnvPoolVectorEnv

TASKS = ("CartPole-v1", "Ant-v4", "Pong-v5")
MODES = ("sync", "first-ready")


@dataclass
class Row:
    """One task in one mode; rates in environment steps per second."""

    task: str
    mode: str
    num_envs: int
    raw_rate: float
    vecenv_rate: float
    ratio: float
    lowest: float
    highest: float
    repeats: int


def raw_turn(pool: Any, actions: Any, batch: int) -> Callable[[], None]:
    """One batch of raw EnvPool."""
    if batch == len(actions):
        return lambda: pool.step(actions)
    held = actions[:batch]

    def turn() -> None:
        info = pool.recv()[4]
        pool.send(held, info["env_id"])

    pool.async_reset()
    return turn


def vecenv_turn(envs: EnvPoolVectorEnv, actions: Any, batch: int) -> Callable[[], None]:
    """The same of vecenv."""
    if batch == len(actions):
        return lambda: envs.step(actions)
    held = actions[:batch]

    def turn() -> None:
        infos = envs.recv()[4]
        envs.send(held, infos["env_id"])

    envs.reset_async()
    return turn


def rate(turn: Callable[[], None], batch: int, seconds: float) -> float:
    """Environment steps per second over at least ``seconds``."""
    count = 0
    begin = time.perf_counter()
    while True:
        for _ in range(16):
            turn()
        count += 16
        elapsed = time.perf_counter() - begin
        if elapsed >= seconds:
            return count * batch / elapsed


def compare(task: str, mode: str, num_envs: int, seconds: float, repeats: int, threads: int | None) -> Row:
    """Alternate turns of both, in changing order."""
    batch = num_envs if mode == "sync" else num_envs // 2
    pool = envpool.make_gymnasium(
        task, num_envs=num_envs, batch_size=batch, num_threads=threads or 0, seed=list(range(num_envs))
    )
    envs = EnvPoolVectorEnv(task, num_envs, batch_size=batch, num_threads=threads, seed=0)
    envs.action_space.seed(0)
    actions = np.ascontiguousarray(envs.action_space.sample().astype(pool.spec._action_spec[-1][0]))
    if mode == "sync":
        pool.reset()
        envs.reset()
    turns = {"raw": raw_turn(pool, actions, batch), "vecenv": vecenv_turn(envs, actions, batch)}
    rates: dict[str, list[float]] = {"raw": [], "vecenv": []}
    for turn in turns.values():
        rate(turn, batch, seconds / 2)
    for repeat in range(repeats):
        for who in ("raw", "vecenv") if repeat % 2 else ("vecenv", "raw"):
            rates[who].append(rate(turns[who], batch, seconds))
    envs.close()
    ratios = [mine / theirs for mine, theirs in zip(rates["vecenv"], rates["raw"], strict=True)]
    return Row(
        task,
        mode,
        num_envs,
        statistics.median(rates["raw"]),
        statistics.median(rates["vecenv"]),
        statistics.median(ratios),
        min(ratios),
        max(ratios),
        repeats,
    )


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--task", action="append", help=f"EnvPool task id, repeatable; default: {', '.join(TASKS)}")
    parser.add_argument("--mode", choices=MODES, action="append", help="default: both")
    parser.add_argument("--num-envs", type=int, default=64)
    parser.add_argument("--threads", type=int, help="default: EnvPool's choice")
    parser.add_argument("--seconds", type=float, default=0.5, help="of one turn")
    parser.add_argument("--repeats", type=int, default=11)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(argv)
    rows = []
    if not options.json:
        print(f"{'task':<14}{'mode':<13}{'raw EnvPool/s':>14}{'vecenv/s':>12}{'ratio':>8}   lowest, highest")
    for task in options.task or TASKS:
        for mode in options.mode or MODES:
            row = compare(task, mode, options.num_envs, options.seconds, options.repeats, options.threads)
            rows.append(row)
            if not options.json:
                print(
                    f"{task:<14}{mode:<13}{row.raw_rate:>14,.0f}{row.vecenv_rate:>12,.0f}{row.ratio:>8.3f}"
                    f"   {row.lowest:.3f}, {row.highest:.3f}",
                    flush=True,
                )
    if options.json:
        print(json.dumps([asdict(row) for row in rows], indent=2))


if __name__ == "__main__":
    main()
