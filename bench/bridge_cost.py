"""Measures the cost of the JAX bridge: ``python bench/bridge_cost.py``.

Every step of the environments returns the same arrays, so the table shows only the cost of the round trip from a compiled
program to numpy and back. It has medians of interleaved repeats, in microseconds per step, for observations of several
sizes, both in a scan and in single compiled steps that Python calls:

* ``io_callback``   JAX's ordered ``io_callback``, called directly with a numpy function, without token and checks;
* ``call``          the host call of the bridge with the same function;
* ``bridge``        ``bridge(envs).step``: the same, plus the token, the checks and the rest of ``EnvState``;
* ``copy``          numpy's copy of the observations, for comparison.
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

from bench import run_interleaved, seconds_per_unit
from vecenv.jax import bridge
from vecenv.jax.bridging import host_call

BATCHES = {  # number of environments, shape and dtype
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
    for name, batch in BATCHES.items():
        for kind, length in (("scan", options.length), ("single", 1)):
            row = {"observations": name, "kind": kind, **measure(batch, length, options)}
            _print_row(row, with_header=not rows)
            rows.append(row)
    if options.json:
        with open(options.json, "w") as file:
            json.dump({"device": str(jax.devices()[0]), "jax": jax.__version__, "rows": rows}, file, indent=1)


def measure(batch: tuple[int, tuple[int, ...], Any], length: int, options: argparse.Namespace) -> dict[str, float]:
    """Return the microseconds per step of each kind of call."""
    envs = IdleVectorEnv(*batch)
    runs = {
        "io_callback": _compile_steps(*_make_host_step(envs, _call_by_io_callback), length),
        "call": _compile_steps(*_make_host_step(envs, _call_by_bridge), length),
        "bridge": _compile_bridge_steps(IdleVectorEnv(*batch), length),
        "copy": lambda: [envs.result[0].copy() for _ in range(length)],
    }
    for run in runs.values():
        run()  # compiles
    calls = max(1, options.steps // length)

    def microseconds(run: Callable[[], Any]) -> float:
        return 1e6 * seconds_per_unit(calls * length, lambda: [run() for _ in range(calls)])

    times = run_interleaved({name: functools.partial(microseconds, run) for name, run in runs.items()}, options.repeats)
    row = {name: statistics.median(values) for name, values in times.items()}
    row["bridge / io_callback"] = statistics.median(
        by_bridge / by_callback for by_bridge, by_callback in zip(times["bridge"], times["io_callback"], strict=True)
    )
    return row


Step = Callable[[Any, Any], Any]


def _make_host_step(envs: IdleVectorEnv, call: Any) -> tuple[Step, Any]:
    """Return a step that only calls the host, and its first carry ``(obs, reward, terminated, truncated)``."""
    obs, rewards, terminated, truncated, _ = envs.result
    rewards = rewards.astype(np.float32)
    results = [jax.ShapeDtypeStruct(array.shape, array.dtype) for array in (obs, rewards, terminated, truncated)]

    def host_step(action: Any) -> Any:
        return obs, rewards, terminated, truncated

    first_carry = [jnp.asarray(array) for array in (obs, rewards, terminated, truncated)]
    return lambda carry, action: call(host_step, results, action), first_carry


def _call_by_io_callback(function: Any, results: Any, action: Any) -> Any:
    return io_callback(function, results, action, ordered=True)


def _call_by_bridge(function: Any, results: Any, action: Any) -> Any:
    return host_call(function, results, [action])


def _compile_steps(step: Step, first_carry: Any, length: int) -> Callable[[], None]:
    num_envs = first_carry[1].shape[0]

    @jax.jit
    def program(carry: Any, actions: Any) -> Any:
        if length == 1:
            return step(carry, actions[0])
        return jax.lax.scan(lambda carry, action: (step(carry, action), None), carry, actions)[0]

    actions = jnp.zeros((length, num_envs), jnp.int32)
    return lambda: jax.block_until_ready(program(first_carry, actions))


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


def _print_row(row: dict[str, Any], with_header: bool) -> None:
    widths = {name: max(len(name), 24 if name == "observations" else 8) for name in row}
    if with_header:
        print(f"device {jax.devices()[0]}, jax {jax.__version__}; microseconds per step")
        print("  ".join(f"{name:>{width}}" for name, width in widths.items()))
    texts = {name: f"{value:.1f}" if isinstance(value, float) else value for name, value in row.items()}
    print("  ".join(f"{texts[name]:>{width}}" for name, width in widths.items()), flush=True)


def _parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--length", type=int, default=200, help="steps per scan")
    parser.add_argument("--steps", type=int, default=400, help="steps per repeat")
    parser.add_argument("--repeats", type=int, default=9, help="number of interleaved repeats")
    parser.add_argument("--json", help="also write the rows to this file")
    return parser.parse_args()


if __name__ == "__main__":
    main()
