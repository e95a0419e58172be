"""Measures the cost of the JAX bridge: ``python bench/bridge_cost.py``.

Every step of the environments returns the same arrays, so the figures are the cost of the round trip from a compiled
program to numpy and back. The table has microseconds per step, medians of interleaved repeats, for a scan and for single
compiled steps called from Python, and for observations of several sizes:

* ``io_callback``   JAX's ordered ``io_callback``, used directly: the same arguments and results, a numpy function, no token,
  no checks;
* ``call``          the host call of the bridge with the same function;
* ``bridge``        ``bridge(envs).step``: the same, plus the token, the checks and the rest of ``EnvState``.

For comparison, ``copy`` is numpy's copy of the observations.
"""

from __future__ import annotations

import argparse
import functools
import json
import statistics
from collections.abc import Callable
from typing import Any

import gymnasium as gym
import jax
import jax.numpy as jnp
import numpy as np
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space
from jax.experimental import io_callback

from bench import seconds_per, take_turns
from vecenv.jax import bridge
from vecenv.jax.bridging import host_call

SHAPES = {
    "8 x (4,) float32": (8, (4,), np.float32),
    "64 x (87,) float32": (64, (87,), np.float32),
    "64 x (84, 84, 4) uint8": (64, (84, 84, 4), np.uint8),
}


class IdleVectorEnv(VectorEnv[Any, Any, Any]):
    """A vector environment that does nothing in a step."""

    def __init__(self, num_envs: int, shape: tuple[int, ...], dtype: Any) -> None:
        self.num_envs = num_envs
        self.metadata = {"autoreset_mode": AutoresetMode.NEXT_STEP}
        self.single_observation_space = gym.spaces.Box(0, 1, shape, dtype)
        self.single_action_space = gym.spaces.Discrete(2)
        self.observation_space = batch_space(self.single_observation_space, num_envs)
        self.action_space = batch_space(self.single_action_space, num_envs)
        flags = np.zeros(num_envs, np.bool_)
        self.result = (np.ones((num_envs, *shape), dtype), np.ones(num_envs), flags, flags, {})

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        return self.result[0], {}

    def step(self, actions: Any) -> Any:
        return self.result


def main() -> None:
    """Measure all shapes and print the table."""
    options = _parse_arguments()
    rows = []
    for name, spec in SHAPES.items():
        for kind, length in (("scan", options.length), ("single", 1)):
            row = measure(spec, length, options)
            rows.append({"observations": name, "kind": kind, **row})
            _print_row(rows[-1], first=len(rows) == 1)
    if options.json:
        with open(options.json, "w") as file:
            json.dump({"device": str(jax.devices()[0]), "jax": jax.__version__, "rows": rows}, file, indent=1)


def measure(spec: tuple[int, tuple[int, ...], Any], length: int, options: argparse.Namespace) -> dict[str, float]:
    """Return the microseconds per step of each kind of call."""
    envs = IdleVectorEnv(*spec)
    runs = {
        "io_callback": _compile_steps(_host_call_step(envs, _with_io_callback), length),
        "call": _compile_steps(_host_call_step(envs, _with_host_call), length),
        "bridge": _compile_bridge_steps(IdleVectorEnv(*spec), length),
        "copy": lambda: [envs.result[0].copy() for _ in range(length)],
    }
    for run in runs.values():
        run()  # compiles
    calls = max(1, options.steps // length)

    def microseconds(run: Callable[[], Any]) -> float:
        return 1e6 * seconds_per(calls * length, lambda: [run() for _ in range(calls)])

    times = take_turns({name: functools.partial(microseconds, run) for name, run in runs.items()}, options.repeats)
    row = {name: statistics.median(values) for name, values in times.items()}
    row["bridge / io_callback"] = statistics.median(
        a / b for a, b in zip(times["bridge"], times["io_callback"], strict=True)
    )
    return row


Step = Callable[[Any, Any], Any]


def _host_call_step(envs: IdleVectorEnv, call: Any) -> tuple[Step, Any]:
    """Return a step that only calls the host and returns ``(obs, reward, terminated, truncated)``, and its first carry."""
    obs, rewards, terminated, truncated, _ = envs.result
    rewards = rewards.astype(np.float32)
    results = [jax.ShapeDtypeStruct(array.shape, array.dtype) for array in (obs, rewards, terminated, truncated)]

    def host_step(action: Any) -> Any:
        return obs, rewards, terminated, truncated

    start = [jnp.asarray(array) for array in (obs, rewards, terminated, truncated)]
    return lambda carry, action: call(host_step, results, action), start


def _with_io_callback(function: Any, results: Any, action: Any) -> Any:
    return io_callback(function, results, action, ordered=True)


def _with_host_call(function: Any, results: Any, action: Any) -> Any:
    return host_call(function, results, [action])


def _compile_steps(step_and_start: tuple[Step, Any], length: int) -> Callable[[], None]:
    step, start = step_and_start
    count = start[1].shape[0]

    @jax.jit
    def program(carry: Any, actions: Any) -> Any:
        if length == 1:
            return step(carry, actions[0])
        return jax.lax.scan(lambda carry, action: (step(carry, action), None), carry, actions)[0]

    actions = jnp.zeros((length, count), jnp.int32)
    return lambda: jax.block_until_ready(program(start, actions))


def _compile_bridge_steps(envs: IdleVectorEnv, length: int) -> Callable[[], None]:
    env = bridge(envs)
    state = env.reset(jax.random.key(0))

    @jax.jit
    def program(state: Any, actions: Any) -> Any:
        if length == 1:
            return env.step(state, actions[0])
        return jax.lax.scan(lambda state, action: (env.step(state, action), None), state, actions)[0]

    actions = jnp.zeros((length, envs.num_envs), jnp.int32)

    def run() -> None:
        nonlocal state
        state = jax.block_until_ready(program(state, actions))

    return run


def _print_row(row: dict[str, Any], first: bool) -> None:
    if first:
        print(f"device {jax.devices()[0]}, jax {jax.__version__}; microseconds per step")
        print("  ".join(f"{name:>{_width(name)}}" for name in row))
    cells = [f"{v:{_width(k)}.1f}" if isinstance(v, float) else f"{v:>{_width(k)}}" for k, v in row.items()]
    print("  ".join(cells), flush=True)


def _width(name: str) -> int:
    return max(len(name), 24 if name == "observations" else 8)


def _parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--length", type=int, default=200, help="steps per scan")
    parser.add_argument("--steps", type=int, default=400, help="steps per repeat")
    parser.add_argument("--repeats", type=int, default=9, help="interleaved repeats; the table has their medians")
    parser.add_argument("--json", help="also write the rows to this file")
    return parser.parse_args()


if __name__ == "__main__":
    main()
