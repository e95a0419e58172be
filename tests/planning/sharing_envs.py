"""A program that steps environments of :mod:`planning.cases` with ``gymnasium.vector.AsyncVectorEnv``.

``python sharing_envs.py NAME`` prints a digest of the results of a case. ``vecenv run sharing_envs.py NAME`` should print
the same one. ``PYTHONPATH`` must contain the folder ``tests``.
"""

from __future__ import annotations

import hashlib
import json
import pickle
import sys
from typing import Any

import gymnasium as gym

from planning.cases import healthy, settings, sharing
from planning.cases.registry import CASES, CHANGES, CLEAN

# these modules add their cases to CASES when they are imported
__all__ = ["CASES", "healthy", "settings", "sharing"]

MISSED_CASES = ("shares_after_20_steps", "shares_after_30_step_episode")
"""Cases that the check misses, because they share state only after many steps (docs/workers.md, *What is not found*)."""
SLOW_CASES = ("slow_steps", "pygame_window", "highway-v0", "parking-v0", "CarRacing-v3")
"""Cases with steps that take more than 10 ms, some only on slow machines. They get one process per environment unchecked."""
OWN_GENERATORS_SUFFIX = "_with_own_generators"
"""Suffix of the names of cases that run with ``generators="own"``."""

DIFFERENT_RESULTS = {
    "vecenv refuses functions that return the same object; with Gymnasium, each process has a copy": (
        "same_instance", "same_instance_in_wrappers", "pool_of_two_objects",
    ),
    "Gymnasium builds an environment in the program, from which workers inherit; vecenv builds it in a temporary process": (
        "class_counter_as_rank", "class_attribute_set_by_first_instance", "stdout_per_environment",
    ),
    "multiprocessing numbers processes, and the temporary process gets the first number": ("rank_from_process_identity",),
    "each worker has its own state of the global generators; Gymnasium's workers inherit the program's": (
        "draws_from_global_generators", "draws_from_torch", "draws_with_own_generators", "module_generator_unseeded",
        "gym_trading_env_package", "gym_trading_env_package_with_own_generators",
    ),
    "the results of Gymnasium differ between runs": (
        "ignores_seeds", "clock_in_observation", "unseeded_python_generator", "unseeded_space_sample",
        "unseeded_class_space_sample", "unseeded_and_working_directory", "rank_from_process_id", "simulation_in_real_time",
        "set_order_by_address",
    ),
    "an error or a timeout that names the environment, instead of EOFError or a hang": ("crashes_in_step", "hangs_in_step"),
    "Text observations, for which Gymnasium has no shared memory": (
        "MiniGrid-Empty-5x5-v0", "MiniGrid-Dynamic-Obstacles-6x6-v0",
    ),
}  # fmt: skip
"""Cases with results that differ from those of Gymnasium: reason -> names."""
DIFFERS_FROM_GYMNASIUM = tuple(name for names in DIFFERENT_RESULTS.values() for name in names)


def digest_results(envs: Any, steps: int = 12) -> str:
    """Reset and step ``envs``. Return a digest of all observations, rewards and flags."""
    envs.action_space.seed(1)
    values = [envs.reset(seed=3)[0]]
    values += [envs.step(envs.action_space.sample())[:4] for _ in range(steps)]
    return hashlib.blake2b(pickle.dumps(values), digest_size=8).hexdigest()


def main(name: str) -> None:
    try:
        env_fns = CASES[name][1]()
    except ModuleNotFoundError as error:
        print("skipped:", error)
        return
    envs: Any = gym.vector.AsyncVectorEnv(env_fns)
    if (plan := getattr(envs, "plan", None)) is not None:
        print(plan, file=sys.stderr)
        print("VERDICT", json.dumps([get_verdict(plan), plan.num_workers, plan.use_caller]), file=sys.stderr)
    try:
        print(digest_results(envs))
    except Exception as error:
        print(type(error).__name__)
    finally:
        envs.close(terminate=True)


def get_verdict(plan: Any) -> str:
    """Return the verdict of a plan as one of the verdicts in CASES."""
    independence = plan.independence
    return CHANGES if independence.verdict == CLEAN and independence.changes else str(independence.verdict)


if __name__ == "__main__":
    main(sys.argv[1])
