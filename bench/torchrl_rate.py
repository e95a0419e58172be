"""Measures TorchRL's collector over vecenv and over TorchRL's own classes: ``python bench/torchrl_rate.py``.

The table shows the frames per second of a collector with a small policy over

* ``as_torchrl`` with vecenv's processes, with one process, and with EnvPool;
* ``MultiThreadedEnvWrapper``, TorchRL's class for EnvPool, and ``ParallelEnv``, its class for processes;
* ``GymWrapper`` around vecenv's engine in one process, and around Gymnasium's ``SyncVectorEnv``.

One process builds all collectors first and runs them in turn. A ratio compares times of the same round; a row shows the
median, minimum and maximum of its ratios.

    python bench/torchrl_rate.py --envs 8 64 --rounds 15 --json collector.json
    python bench/torchrl_rate.py --envs 16 --cpu --only "as_torchrl, one process" "GymWrapper, vecenv"

``MultiThreadedEnvWrapper`` needs the packages gym and treevalue (``pip install gym treevalue``). Rows that cannot be built
are omitted.
"""

from __future__ import annotations

import argparse
import functools
import json
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any

import gymnasium as gym
import torch
from tensordict.nn import TensorDictModule, TensorDictSequential
from torch import nn
from torchrl.collectors import Collector
from torchrl.data import OneHot
from torchrl.envs import GymEnv, GymWrapper, MultiThreadedEnvWrapper, ParallelEnv, register_gym_spec_conversion
from torchrl.modules import OneHotCategorical, ProbabilisticActor

import vecenv
from bench import run_interleaved, seconds_per_unit
from vecenv.adapters import as_torchrl
from vecenv.tools.benchmark import Summary


def main() -> None:
    options = _parse_arguments()
    torch.set_num_threads(1)
    rows = []
    for count in options.envs:
        rows += measure_collectors(count, options)
    if options.json:
        with open(options.json, "w") as file:
            json.dump(rows, file, indent=1)


def compare(
    runs: Mapping[str, Callable[[], Any]], first: str, units: int, options: argparse.Namespace
) -> list[dict[str, Any]]:
    """Measure all ``runs`` in turn. Return rows with the time per unit, and its ratio to the time of ``first``."""
    clock = time.process_time if options.cpu else time.perf_counter

    for run in runs.values():
        run()  # warm-up
        run()
    timed = {name: functools.partial(seconds_per_unit, units, run, clock) for name, run in runs.items()}
    times = run_interleaved(timed, options.rounds)
    rows = []
    for name, seconds in times.items():
        ratio: Any = Summary.from_ratios(seconds, times[first])
        rows.append({"name": name, "seconds": statistics.median(seconds), f"times as long as {first}": asdict(ratio)})
    return rows


def _make_policy(env: Any) -> Any:
    torch.manual_seed(0)
    onehot = isinstance(env.action_spec, OneHot)
    width, count = env.observation_spec["observation"].shape[-1], env.action_spec.space.n
    network = nn.Sequential(nn.Linear(width, 64), nn.Tanh(), nn.Linear(64, count))
    return ProbabilisticActor(
        TensorDictSequential(TensorDictModule(network, ["observation"], ["logits"])),
        in_keys=["logits"],
        distribution_class=OneHotCategorical if onehot else torch.distributions.Categorical,
    )


def _make_pool(task: str, count: int) -> Any:
    import envpool
    from torchrl.envs.libs.gym import convert_box_spec, convert_discrete_spec

    # if the package gym is installed, TorchRL accepts only its spaces, but EnvPool has those of Gymnasium
    register_gym_spec_conversion(gym.spaces.Discrete)(convert_discrete_spec)
    register_gym_spec_conversion(gym.spaces.Box)(convert_box_spec)

    return envpool.make(task, env_type="gym", num_envs=count, seed=0)


def _make_engine(task: str, count: int, mode: str) -> Any:
    return vecenv.make_vec(task, count, "serial", vector_kwargs={"autoreset_mode": mode})


def env_fns(task: str, count: int) -> dict[str, Callable[[], Any]]:
    """Return the functions that build the environments of the comparison, by name."""
    env_fn = functools.partial(gym.make, task)
    return {
        "as_torchrl, processes": lambda: as_torchrl(task, count),
        "as_torchrl, one process": lambda: as_torchrl(task, count, "serial"),
        "as_torchrl, EnvPool": lambda: as_torchrl(_make_pool(task, count), categorical_action_encoding=True),
        "MultiThreadedEnvWrapper": lambda: MultiThreadedEnvWrapper(_make_pool(task, count)),
        "ParallelEnv": lambda: ParallelEnv(count, functools.partial(GymEnv, task), mp_start_method="spawn"),
        "GymWrapper, vecenv": lambda: GymWrapper(_make_engine(task, count, "Disabled")),
        "GymWrapper, Gymnasium": lambda: GymWrapper(gym.vector.SyncVectorEnv([env_fn] * count, autoreset_mode="Disabled")),
    }


def measure_collectors(count: int, options: argparse.Namespace) -> list[dict[str, Any]]:
    frames = options.steps * count
    runs, collectors = {}, []
    for name, build in env_fns(options.task, count).items():
        if options.only and name not in options.only:
            continue
        try:
            env = build()
        except (ImportError, KeyError) as error:  # MultiThreadedEnvWrapper needs the package gym and its spaces
            print(f"{name} is omitted: {error}")
            continue
        collector = Collector(
            env, _make_policy(env), frames_per_batch=frames, total_frames=-1, auto_register_policy_transforms=False
        )
        collectors.append(collector)
        runs[name] = functools.partial(next, iter(collector))
    first = next(iter(runs))
    rows = compare(runs, first, frames, options)
    for row in rows:
        label, ratio_name = f"{options.task}, {count} environments, {row['name']}", f"times as long as {first}"
        ratio = Summary(**row[ratio_name]).format()
        print(f"{label:58} {1 / row['seconds']:9,.0f} frames/s   {ratio} {ratio_name}", flush=True)
    for collector in collectors:
        collector.shutdown()
    return [{"envs": count, "task": options.task, **row} for row in rows]


def _parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--envs", nargs="*", type=int, default=[8])
    parser.add_argument("--task", default="CartPole-v1", help="the id of an environment with discrete actions")
    parser.add_argument("--only", nargs="*", help="measure only these rows; their times are compared with the first")
    parser.add_argument("--steps", type=int, default=32, help="steps of each environment per sample")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--cpu", action="store_true", help="measure CPU time of this process, not wall time")
    parser.add_argument("--json", help="write the rows to this file")
    return parser.parse_args()


if __name__ == "__main__":
    main()
