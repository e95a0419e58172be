"""Compares the steps per second of vecenv's EnvPool backend with those of raw EnvPool or of vecenv's processes.

Both engines step the same task with the same number of environments, alternately for a short time, so that other load on
the machine affects both. A repeat is one sample of each, and the result is the ratio within a repeat. In mode ``sync``, all
environments step together by ``step()``; in mode ``first-ready``, half of them at a time by ``recv()`` and ``send()``.
Against raw EnvPool, both get numpy actions in its dtype; raw EnvPool checks only those of its first call. The processes step
Gymnasium's environments; for Pong they use the same emulator, and wrappers do the preprocessing that EnvPool does in C++.

    python bench/envpool_rate.py                      # CartPole-v1, Ant-v4, Pong-v5 with 64 environments
    python bench/envpool_rate.py --task CartPole-v1 --seconds 1 --repeats 9 --json
    python bench/envpool_rate.py --against process --task CartPole-v1 --task Pong-v5 --mode sync
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

import envpool
import gymnasium as gym
import numpy as np
from gymnasium.wrappers import AtariPreprocessing, FrameStackObservation

import vecenv
from bench import run_interleaved
from vecenv.backends import EnvPoolVectorEnv
from vecenv.tools.benchmark import Summary
from vecenv.tools.runners import run_for

TASKS = ("CartPole-v1", "Ant-v4", "Pong-v5")
MODES = ("sync", "first-ready")


def make_step(envs: Any, actions: Any, batch: int) -> Callable[[], int]:
    """Return a function that steps one batch and returns its number of environments."""
    if batch == len(actions):
        envs.reset()
        return lambda: len(envs.step(actions)[1])
    batch_actions = actions[:batch]

    def step() -> int:
        envs.send(batch_actions, envs.recv()[4]["env_id"])
        return batch

    if hasattr(envs, "async_reset"):  # raw EnvPool
        envs.async_reset()
    else:
        envs.reset_async()
    return step


def make_process_envs(task: str, count: int, batch: int) -> Any:
    """Build a vector environment for the same task in worker processes."""
    import ale_py

    gym.register_envs(ale_py)
    options: dict[str, Any] = {"vector_kwargs": {"batch_size": batch}} if batch < count else {}
    if task == "Pong-v5":
        task, options["frameskip"] = "ALE/Pong-v5", 1
        options["wrappers"] = [partial(AtariPreprocessing, noop_max=30), partial(FrameStackObservation, stack_size=4)]
    return vecenv.make_vec(task, count, **options)


def compare(task: str, mode: str, options: argparse.Namespace) -> dict[str, Any]:
    """Measure both engines alternately; return a row with the rates in environment steps per second."""
    count, threads = options.num_envs, options.threads
    batch = count if mode == "sync" else count // 2
    envs = EnvPoolVectorEnv(task, count, batch_size=batch, num_threads=threads, seed=0)
    envs.action_space.seed(0)
    actions = envs.action_space.sample()
    if options.against == "raw":
        seeds = list(range(count))
        other = envpool.make_gymnasium(task, num_envs=count, batch_size=batch, num_threads=threads or 0, seed=seeds)
        actions = np.ascontiguousarray(actions.astype(other.spec._action_spec[-1][0]))
    else:
        other = make_process_envs(task, count, batch)
    steps = {"other": make_step(other, actions, batch), "vecenv": make_step(envs, actions, batch)}
    for step in steps.values():
        run_for(step, options.seconds / 2)
    rates = run_interleaved({name: partial(run_for, step, options.seconds) for name, step in steps.items()}, options.repeats)
    envs.close()
    other.close()
    medians = {f"{name}_rate": statistics.median(samples) for name, samples in rates.items()}
    ratio = Summary.from_ratios(rates["vecenv"], rates["other"])
    return {"task": task, "mode": mode, "num_envs": count, **medians, "ratio": asdict(ratio)}  # type: ignore[arg-type]


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--task", action="append", help=f"EnvPool task id, repeatable; default: {', '.join(TASKS)}")
    parser.add_argument("--against", choices=("raw", "process"), default="raw", help="raw EnvPool, or vecenv's processes")
    parser.add_argument("--mode", choices=MODES, action="append", help="default: both")
    parser.add_argument("--num-envs", type=int, default=64)
    parser.add_argument("--threads", type=int, help="default: EnvPool's choice")
    parser.add_argument("--seconds", type=float, default=0.5, help="seconds per sample")
    parser.add_argument("--repeats", type=int, default=11)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(argv)
    rows = []
    if not options.json:
        print(f"{'task':<14}{'mode':<13}{options.against + '/s':>14}{'vecenv/s':>12}   ratio (min - max)")
    for task in options.task or TASKS:
        for mode in options.mode or MODES:
            row = compare(task, mode, options)
            rows.append(row)
            ratio = Summary(**row["ratio"])
            if not options.json:
                rates = f"{row['other_rate']:>14,.0f}{row['vecenv_rate']:>12,.0f}"
                print(f"{task:<14}{mode:<13}{rates}   {ratio.format('.3f')}", flush=True)
    if options.json:
        print(json.dumps(rows, indent=2))


if __name__ == "__main__":
    main()
