"""Compares the JAX-native engine with the bare compiled physics: ``python bench/jax_cost.py``.

All rows run interleaved in one process for each number of environments. The table shows medians of the repeats; ratios
compare times of the same repeat.

* ``raw``      the limit: ``jit(vmap(step))`` without resets and time limit, of which only one flag is read;
* ``numpy``    ``JaxVectorEnv(to="numpy").step``: time limits, fresh autoresets, statistics, infos, fresh numpy arrays;
* ``jax``      the same with ``to="jax"``, with a wait after every step;
* ``step``     ``FunctionalVectorEnv.step``, with a wait after every step;
* ``scan``     the upper bound of rollouts: a compiled scan of ``vmap(step)`` that returns the same fields as a rollout;
* ``rollout``  ``vecenv.jax.rollout`` of as many steps.

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

from bench import seconds_per, take_turns
from vecenv.backends.jax_native import JaxVectorEnv
from vecenv.jax import FunctionalVectorEnv, adapt, rollout, stateless


def main() -> None:
    """Measure all numbers of environments and print the table."""
    options = _parse_arguments()
    env = adapt(options.env, **dict(pair.split("=", 1) for pair in options.kwargs))
    rows = []
    for count in options.envs:
        rows.append(measure(env, count, options))
        _print_row(rows[-1], first=len(rows) == 1)
    if options.json:
        with open(options.json, "w") as file:
            json.dump({"device": str(jax.devices()[0]), "env": options.env, "rows": rows}, file, indent=1)


def measure(env: Any, count: int, options: argparse.Namespace) -> dict[str, Any]:
    """Return a row of the table: the microseconds per vector step of each kind."""
    functional = FunctionalVectorEnv(env, count, options.mode, max_episode_steps=options.limit)
    runs = {**_single_steps(env, functional, options.steps), **_scans(env, functional, options.length)}
    clock = time.process_time if options.cpu else time.perf_counter

    for run, _ in runs.values():
        run()  # compiles
    timed = {name: functools.partial(seconds_per, steps / 1e6, run, clock) for name, (run, steps) in runs.items()}
    times = take_turns(timed, options.repeats)
    row: dict[str, Any] = {"envs": count}
    row |= {name: statistics.median(values) for name, values in times.items()}
    row["numpy / raw"] = statistics.median(n / r for n, r in zip(times["numpy"], times["raw"], strict=True))
    row["rollout / scan"] = statistics.median(n / r for n, r in zip(times["rollout"], times["scan"], strict=True))
    row["env steps / s"] = count / row["numpy"] * 1e6
    return row


def _single_steps(env: Any, functional: FunctionalVectorEnv, steps: int) -> dict[str, tuple[Callable[[], None], int]]:
    count = functional.num_envs
    actions = np.random.default_rng(0).uniform(-0.1, 0.1, (steps, *functional.action_space.shape)).astype(np.float32)
    keys = jax.vmap(jax.random.fold_in, (None, 0))(jax.random.PRNGKey(0), jnp.arange(count))
    state, _ = jax.jit(jax.vmap(env.init))(keys)
    key = jax.random.PRNGKey(0)
    bare = jax.jit(jax.vmap(lambda state, action: env.step(state, action, key)[:4]))
    envs = {to: JaxVectorEnv(functional, to=to) for to in ("numpy", "jax")}
    for each in envs.values():
        each.reset(seed=0)
    latest = {"state": functional.reset(jax.random.key(0))}

    def raw() -> None:
        now = state
        for action in actions:
            now, _, _, flag = bare(now, action)
            flag.block_until_ready()

    def numpy() -> None:
        for action in actions:
            envs["numpy"].step(action)

    def on_device() -> None:
        for action in actions:
            envs["jax"].step(action)[2].block_until_ready()

    def pure() -> None:
        for action in actions:
            latest["state"] = functional.step(latest["state"], action)
            latest["state"].terminated.block_until_ready()

    return {name: (run, steps) for name, run in (("raw", raw), ("numpy", numpy), ("jax", on_device), ("step", pure))}


def _scans(env: Any, functional: FunctionalVectorEnv, length: int) -> dict[str, tuple[Callable[[], None], int]]:
    count, shape = functional.num_envs, functional.single_action_space.shape or ()
    key = jax.random.PRNGKey(0)
    keys = jax.vmap(jax.random.fold_in, (None, 0))(key, jnp.arange(count))
    state, obs = jax.jit(jax.vmap(env.init))(keys)

    def choose(key: Any) -> Any:
        return 0.1 * jax.random.normal(key, (count, *shape))

    def bare(carried: Any, t: Any) -> Any:
        state, obs = carried
        action = choose(jax.random.fold_in(key, t))
        state, after, reward, terminated, truncated, _ = jax.vmap(lambda s, a: env.step(s, a, key))(state, action)
        return (state, after), (obs, action, reward, terminated, truncated, after)

    scan = jax.jit(lambda carried: jax.lax.scan(bare, carried, jnp.arange(length)))
    policy = stateless(lambda params, obs, key: (choose(key), {}))
    compiled_rollout = jax.jit(lambda state: rollout(functional, policy, (), state, (), key, length)[:2])
    initial_state = functional.reset(jax.random.key(0))

    def run_scan() -> None:
        jax.block_until_ready(scan((state, obs)))

    def run_rollout() -> None:
        jax.block_until_ready(compiled_rollout(initial_state))

    return {"scan": (run_scan, length), "rollout": (run_rollout, length)}


def _print_row(row: dict[str, Any], first: bool) -> None:
    if first:
        print(f"device {jax.devices()[0]}; microseconds per vector step")
        print("  ".join(f"{name:>14}" for name in row))
    print("  ".join(f"{value:14.2f}" if isinstance(value, float) else f"{value:14d}" for value in row.values()), flush=True)


def _parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--env", default="inverted_pendulum", help="a name of Brax or Playground")
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
