"""Compiling before it counts."""

from __future__ import annotations

import time
from collections.abc import Callable

import jax
import numpy as np

from vecenv.backends.jax_native.building import spinner
from vecenv.backends.jax_native.driver import Driver
from vecenv.front.driver import Call
from vecenv.front.phases import Phase

__all__ = ["compile_now"]


def compile_now(driver: Driver, chunk: int | None, progress: bool | None) -> dict[str, float]:
    """Compile reset and step, and ``chunk`` steps in one program; seconds by name. The state is left as it is."""
    functional = driver.functional
    zeros = jax.tree.map(lambda leaf: np.zeros_like(np.asarray(leaf)), functional.action_space.sample())

    def reset() -> None:
        driver.state = None
        seeds = list(range(functional.num_envs))
        driver.begin_reset(Call(Phase.WAITING_RESET, functional.num_envs, by_row=False), seeds, None)
        driver.read(Phase.WAITING_RESET)

    def step() -> None:
        driver.begin_step(Call(Phase.WAITING_STEP, functional.num_envs, by_row=False), zeros)
        driver.read(Phase.WAITING_STEP)

    stages: dict[str, Callable[[], object]] = {"reset": reset, "step": step}
    if chunk:
        many = jax.tree.map(lambda leaf: np.broadcast_to(leaf, (chunk, *leaf.shape)), zeros)
        stages[f"step_chunk({chunk})"] = lambda: driver.chunk(many)
    seconds: dict[str, float] = {}
    kept = driver.latest
    try:
        with spinner(progress) as say:
            for name, stage in stages.items():
                say(f"compiling {name} of {functional.num_envs} x {getattr(functional.single_env, 'name', 'env')}")
                start = time.perf_counter()
                stage()
                jax.tree.map(lambda leaf: leaf.block_until_ready(), driver.state)
                seconds[name] = time.perf_counter() - start
    finally:
        driver.latest = kept
    return seconds
