"""What the package does and refuses on the system that it is run on, or that is emulated, as a line of JSON."""

from __future__ import annotations

import functools
import json
import multiprocessing
import warnings
from typing import Any

import gymnasium
import numpy as np

import vecenv
from vecenv.system import cores, supervision
from vecenv.tools.doctor import examine

MAKE = functools.partial(gymnasium.make, "CartPole-v1")
ASKED: dict[str, dict[str, Any]] = {
    "default": {},
    "two": {"num_workers": 2},
    "auto with restarts": {"num_workers": "auto", "on_failure": "restart"},
    "auto with a timeout": {"num_workers": "auto", "step_timeout": 1.0},
    "use_caller": {"num_workers": 0, "use_caller": True},
    "dummy_env": {"num_workers": 0, "dummy_env": False},
    "none": {"num_workers": 0},
    "auto": {"num_workers": "auto"},
}


def outcome(build: Any) -> str | list[Any]:
    """The refusal, or the workers and what a reset and ten steps give."""
    try:
        envs = build()
    except NotImplementedError as error:
        return str(error)
    try:
        total = float(np.sum(envs.reset(seed=5)[0]))
        for step in range(10):
            total += float(np.sum(envs.step(np.array([step % 2] * 3))[0]))
        return [envs.num_workers, total]
    finally:
        envs.close()


def plan_of(**options: Any) -> str:
    try:
        return str(vecenv.plan(MAKE, 3, **options))
    except NotImplementedError as error:
        return str(error)


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    facts = {
        "asked": {
            name: outcome(functools.partial(vecenv.AsyncVectorEnv, [MAKE] * 3, **given)) for name, given in ASKED.items()
        },
        "make_vec": outcome(lambda: vecenv.make_vec("CartPole-v1", 3)),
        "serial": outcome(lambda: vecenv.make_vec("CartPole-v1", 3, backend="serial")),
        "plan": plan_of(),
        "isolated plan": plan_of(isolate=True),
        "doctor": {finding.name: [finding.verdict, finding.value, finding.advice] for finding in examine()},
        "start method": multiprocessing.get_start_method(),
        "spins": cores.placements(1)[1],
        "times itself": type(cores.Patience(1e-4, np.zeros(1))).__name__ == "_SelfTimed",
        "stack signals": supervision.STACK_SIGNALS,
    }
    print(json.dumps(facts))
