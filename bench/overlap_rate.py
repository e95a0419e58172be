"""What double-buffered stepping gains: ``rollout(overlap=True)`` over two halves against one ``rollout`` over all.

The environments sleep, and the policy multiplies matrices, for as long as is asked; sleeping stands for a simulator that
does not compete with the policy for cores, as where the policy runs on an accelerator. Three programs, compiled whole,
alternate; a repeat is one turn each, and the ratio of a repeat is what counts:

* ``whole``       one bridge over all environments: policy, step, policy, step;
* ``halves``      two bridges over half of them each, both stepped and waited for in turn, nothing overlapped;
* ``overlap``     the same two bridges, double-buffered.

A step of ``whole`` takes ``--env-ms`` of the environments and ``--policy-ms`` of the policy; a half, which has as many
workers, takes half of either. So the best possible ratio is (env + policy) / max(env, policy), 2 for equal ones.

    python bench/overlap_rate.py
    python bench/overlap_rate.py --env-ms 8 --policy-ms 2 --repeats 9
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import gymnasium as gym
import jax
import jax.numpy as jnp
import numpy as np

import vecenv
import vecenv.jax as vj
from bench import seconds_per, take_turns
from bench.workloads import WaitingEnv
from vecenv.jax.rollouts import Policy

WIDTH, TOKENS = 128, 16


class Sleeper(WaitingEnv):
    """A step sleeps."""

    def __init__(self, seconds: float) -> None:
        super().__init__(seconds)
        self.action_space: Any = gym.spaces.Box(-np.inf, np.inf, (1,), np.float32)


def make_bridge(num_envs: int, workers: int, seconds: float) -> Any:
    """``num_envs`` sleepers in ``workers`` processes, so that a step of all of them sleeps ``seconds`` in each process."""
    make = functools.partial(Sleeper, seconds * workers / num_envs)
    envs = vecenv.AsyncVectorEnv([make] * num_envs, num_workers=workers, context="forkserver")
    return vj.bridge(envs)


def policy_of(layers: int) -> Policy:
    """Matrix products, of :data:`TOKENS` rows for each environment, so that half the environments cost half the time."""

    def act(weights: Any, obs: Any, key: Any) -> Any:
        x = jnp.tile(obs, (1, TOKENS * WIDTH // obs.shape[1])).reshape(-1, WIDTH)
        x = jax.lax.fori_loop(0, layers, lambda _, x: jnp.tanh(x @ weights), x)
        return x.reshape(len(obs), -1)[:, :1], {}

    return vj.stateless(act)


def layers_for(seconds: float, rows: int, weights: Any) -> int:
    """So many layers that the policy takes ``seconds`` on ``rows`` rows here and now."""

    def taken(layers: int) -> float:
        run = jax.jit(functools.partial(policy_of(layers), weights, ()))
        obs, first, key = jnp.zeros((rows, 4)), jnp.zeros(rows, bool), jax.random.key(0)
        jax.block_until_ready(run(obs, first, key))
        return statistics.median(seconds_per(1, lambda: jax.block_until_ready(run(obs, first, key))) for _ in range(15))

    few, many = 10, 110
    each = (taken(many) - taken(few)) / (many - few)
    return max(1, round(seconds / each))


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Milliseconds a step by program, as a dict that JSON can hold."""
    weights = jax.random.normal(jax.random.key(0), (WIDTH, WIDTH)) / WIDTH**0.5
    layers = layers_for(options.policy_ms / 1e3, options.envs, weights)
    policy, key, half = policy_of(layers), jax.random.key(1), options.envs // 2
    with contextlib.ExitStack() as stack:
        seconds = options.env_ms / 1e3
        whole = stack.enter_context(make_bridge(options.envs, options.workers, seconds))
        halves = tuple(stack.enter_context(make_bridge(half, options.workers, seconds / 2)) for _ in range(2))

        def run_whole(state: Any) -> Any:
            return vj.rollout(whole, policy, weights, state, (), key, options.length)[:2]

        def run_halves(states: Any) -> Any:
            def step(states: Any, _: Any) -> Any:
                acted = [policy(weights, (), state.obs, state.first, key)[1] for state in states]
                states = tuple(map(lambda env, state, action: env.step(state, action), halves, states, acted))
                return states, [(s.obs, s.reward, s.terminated, s.truncated, s.next_obs, s.valid) for s in states]

            states, rows = jax.lax.scan(step, states, length=options.length)
            return rows, states

        def run_overlap(states: Any) -> Any:
            return vj.rollout(halves, policy, weights, states, ((), ()), key, options.length, overlap=True)[:2]

        both = tuple(env.reset(key) for env in halves)
        begin = {"whole": (run_whole, whole.reset(key)), "halves": (run_halves, both), "overlap": (run_overlap, both)}
        turns: dict[str, Callable[[Any], Any]] = {name: jax.jit(run) for name, (run, _) in begin.items()}
        states = {"whole": begin["whole"][1], "both": both}

        def milliseconds(name: str) -> float:
            slot = "whole" if name == "whole" else "both"
            start = time.perf_counter()
            _, states[slot] = jax.block_until_ready(turns[name](states[slot]))
            return (time.perf_counter() - start) / options.length * 1e3

        runs = {name: functools.partial(milliseconds, name) for name in turns}
        take_turns(runs, 1)  # compiles
        times = take_turns(runs, options.repeats)
    ratios = {
        name: [base / ours for base, ours in zip(times[name], times["overlap"], strict=True)] for name in ("whole", "halves")
    }
    return {"options": vars(options), "layers": layers, "ms": times, "ratios": ratios}


def main() -> None:
    """Parse, measure, print a table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--env-ms", type=float, default=2.0, help="a step of all environments")
    parser.add_argument("--policy-ms", type=float, default=2.0, help="the policy on all rows")
    parser.add_argument("--envs", type=int, default=16)
    parser.add_argument("--workers", type=int, default=4, help="processes of the whole, and of each half")
    parser.add_argument("--length", type=int, default=200, help="steps a turn")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--json", action="store_true", help="all figures as JSON")
    options = parser.parse_args()
    if options.envs % (2 * options.workers):
        parser.error("--envs must be a multiple of twice --workers.")
    found = measure(options)
    if options.json:
        print(json.dumps(found, indent=1))
        return
    print(f"{options.envs} envs, {options.env_ms:g} ms env, {options.policy_ms:g} ms policy; ms a step, median [min, max]")
    for name, values in found["ms"].items():
        print(f"  {name:8} {statistics.median(values):6.2f}  [{min(values):.2f}, {max(values):.2f}]")
    for name, values in found["ratios"].items():
        print(f"  {name} / overlap  {statistics.median(values):.2f}x  [{min(values):.2f}, {max(values):.2f}]")


if __name__ == "__main__":
    main()
