"""Compares the JAX-native engine with the bare compiled physics: ``python bench/jax_cost.py``.

For each number of environments, all columns are measured alternately in one process. The table shows medians of the repeats;
ratios compare times of the same repeat.

* ``raw``      the upper bound on the speed of steps: ``jit(vmap(step))`` without resets or a time limit, with a wait
  for ``terminated`` only;
* ``numpy``    ``JaxVectorEnv(to="numpy").step``: time limits, autoresets with ``reset="fresh"``, statistics, infos, new
  NumPy arrays;
* ``jax``      the same with ``to="jax"``, with a wait after every step;
* ``step``     ``FunctionalVectorEnv.step``, with a wait after every step;
* ``scan``     the upper bound on the speed of rollouts: a compiled scan of ``vmap(step)`` that returns the fields of a
  rollout, except ``valid`` and ``first``;
* ``rollout``  ``vecenv.jax.rollout`` with as many steps as ``scan``.

On a GPU: ``python bench/jax_cost.py --envs 4096 65536``.
"""

from __future__ import annotations

import argparse
import functools
import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from bench import run_interleaved, seconds_per_unit
from vecenv.backends.jax_native import JaxVectorEnv
from vecenv.jax import FunctionalVectorEnv, adapt, rollout, stateless


def main() -> None:
    """Measure all numbers of environments and print the table."""
    options = _parse_arguments()
    env = adapt(options.env, **dict(pair.split("=", 1) for pair in options.kwargs))
    rows = []
    for count in options.envs:
        row = measure(env, count, options)
        _print_row(row, with_header=not rows)
        rows.append(row)
    if options.json:
        with open(options.json, "w") as file:
            json.dump({"device": str(jax.devices()[0]), "env": options.env, "rows": rows}, file, indent=1)


def measure(env: Any, count: int, options: argparse.Namespace) -> dict[str, Any]:
    """Return a row of the table: the microseconds per vector step in each column, and their ratios."""
    functional = FunctionalVectorEnv(env, count, options.mode, max_episode_steps=options.limit)
    runs = {**_make_step_runs(env, functional, options.steps), **_make_scan_runs(env, functional, options.length)}
    clock = time.process_time if options.cpu else time.perf_counter

    for run, _ in runs.values():
        run()  # compiles
    # the unit is a million steps, so that the results are microseconds per step
    timed = {name: functools.partial(seconds_per_unit, steps / 1e6, run, clock) for name, (run, steps) in runs.items()}
    times = run_interleaved(timed, options.repeats)
    row: dict[str, Any] = {"envs": count}
    row |= {name: statistics.median(values) for name, values in times.items()}
    for name, bound in (("numpy", "raw"), ("rollout", "scan")):
        pairs = zip(times[name], times[bound], strict=True)
        row[f"{name} / {bound}"] = statistics.median(value / bound_value for value, bound_value in pairs)
    row["env steps / s"] = count / row["numpy"] * 1e6
    return row


def _make_step_runs(env: Any, functional: FunctionalVectorEnv, steps: int) -> dict[str, tuple[Callable[[], None], int]]:
    """Return, by column, a function that runs single steps and the number of steps per call."""
    count = functional.num_envs
    actions = np.random.default_rng(0).uniform(-0.1, 0.1, (steps, *functional.action_space.shape)).astype(np.float32)
    keys = jax.vmap(jax.random.fold_in, (None, 0))(jax.random.PRNGKey(0), jnp.arange(count))
    state, _ = jax.jit(jax.vmap(env.init))(keys)
    key = jax.random.PRNGKey(0)
    raw_step = jax.jit(jax.vmap(lambda state, action: env.step(state, action, key)[:4]))
    numpy_envs, jax_envs = JaxVectorEnv(functional, to="numpy"), JaxVectorEnv(functional, to="jax")
    numpy_envs.reset(seed=0)
    jax_envs.reset(seed=0)
    functional_state = functional.reset(jax.random.key(0))

    def run_raw() -> None:
        current = state
        for action in actions:
            current, _, _, terminated = raw_step(current, action)
            terminated.block_until_ready()

    def run_numpy() -> None:
        for action in actions:
            numpy_envs.step(action)

    def run_jax() -> None:
        for action in actions:
            jax_envs.step(action)[2].block_until_ready()

    def run_functional() -> None:
        nonlocal functional_state
        for action in actions:
            functional_state = functional.step(functional_state, action)
            functional_state.terminated.block_until_ready()

    return {"raw": (run_raw, steps), "numpy": (run_numpy, steps), "jax": (run_jax, steps), "step": (run_functional, steps)}


def _make_scan_runs(env: Any, functional: FunctionalVectorEnv, length: int) -> dict[str, tuple[Callable[[], None], int]]:
    """Return, by column, a function that runs a compiled rollout and the number of steps per call."""
    count, shape = functional.num_envs, functional.single_action_space.shape or ()
    key = jax.random.PRNGKey(0)
    keys = jax.vmap(jax.random.fold_in, (None, 0))(key, jnp.arange(count))
    state, obs = jax.jit(jax.vmap(env.init))(keys)

    def sample_actions(key: Any) -> Any:
        return 0.1 * jax.random.normal(key, (count, *shape))

    def step(carry: Any, t: Any) -> Any:
        state, obs = carry
        action = sample_actions(jax.random.fold_in(key, t))
        state, next_obs, reward, terminated, truncated, _ = jax.vmap(lambda s, a: env.step(s, a, key))(state, action)
        return (state, next_obs), (obs, action, reward, terminated, truncated, next_obs)

    scan = jax.jit(lambda carry: jax.lax.scan(step, carry, jnp.arange(length)))
    policy = stateless(lambda params, obs, key: (sample_actions(key), {}))
    compiled_rollout = jax.jit(lambda state: rollout(functional, policy, (), state, (), key, length)[:2])
    initial_state = functional.reset(jax.random.key(0))

    def run_scan() -> None:
        jax.block_until_ready(scan((state, obs)))

    def run_rollout() -> None:
        jax.block_until_ready(compiled_rollout(initial_state))

    return {"scan": (run_scan, length), "rollout": (run_rollout, length)}


def _print_row(row: dict[str, Any], with_header: bool) -> None:
    if with_header:
        print(f"device {jax.devices()[0]}; microseconds per vector step")
        print("  ".join(f"{name:>14}" for name in row))
    print("  ".join(f"{value:14.2f}" if isinstance(value, float) else f"{value:14d}" for value in row.values()), flush=True)


def _parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--env", default="inverted_pendulum", help="name of an environment of Brax or Playground")
    parser.add_argument("--kwargs", nargs="*", default=["backend=spring"], help="environment arguments, name=value")
    parser.add_argument("--envs", nargs="*", type=int, default=[128, 1024])
    parser.add_argument("--mode", default="NextStep", choices=["NextStep", "SameStep", "Disabled"])
    parser.add_argument("--limit", type=int, default=200, help="time limit in steps")
    parser.add_argument("--steps", type=int, default=200, help="single steps per repeat")
    parser.add_argument("--length", type=int, default=100, help="steps per scan")
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--cpu", action="store_true", help="measure CPU time instead of wall time, for a busy machine")
    parser.add_argument("--json", help="also write the rows to this file")
    return parser.parse_args()


if __name__ == "__main__":
    main()
