"""A rollout of ``vecenv.torch.TensorDictEnv`` beside one of TorchRL's ``BraxEnv``: ``python bench/torchrl_brax.py``.

Both have the same environment, backend and batch size, and take random actions of their specs. Everything is built and
compiled first and takes turns in one process; a ratio is formed within a round, never across rounds, and a row shows its
median, least and greatest, in wall time and in CPU time of the process (JAX's threads included).

* ``TensorDictEnv``, as it is: with the state in the TensorDict;
* ``BraxWrapper``, what TorchRL's ``BraxEnv`` is, which takes no backend;
* the compiled step of the same physics by itself, for what TensorDicts add.

    python bench/torchrl_brax.py --env ant --envs 16 --rounds 9 --json brax.json
"""

from __future__ import annotations

import argparse
import functools
import json
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import brax.envs
import jax
import jax.numpy as jnp
import torch
from torchrl.envs import BraxWrapper

import vecenv.torch

OURS = "TensorDictEnv"
Taken = dict[str, list[dict[str, float]]]
CLOCKS: dict[str, Callable[[], float]] = {"wall": time.perf_counter, "cpu": time.process_time}


def main() -> None:
    options = _arguments()
    torch.set_num_threads(1)
    rows = []
    for count in options.envs:
        taken = compared(environments(count, options), options)
        for row in rows_of(taken, options.steps):
            rows.append({"env": options.env, "backend": options.backend, "envs": count, **row})
            _show(rows[-1])
    if options.json:
        with open(options.json, "w") as file:
            json.dump(rows, file, indent=1)


def environments(count: int, options: argparse.Namespace) -> dict[str, Callable[[], None]]:
    """What a turn of each runs."""
    given: dict[str, Any] = {"batch_size": [count], "requires_grad": False}
    theirs = brax.envs.get_environment(options.env, backend=options.backend)  # BraxEnv(name) takes no backend
    ours = vecenv.torch.TensorDictEnv(options.env, backend=options.backend, **given)
    # By default it clears all of JAX's caches every now and then, and all that is compiled is compiled again.
    wrapper = BraxWrapper(theirs, cache_clear_frequency=False, **given)
    runs = {OURS: functools.partial(rollout, ours, options), "BraxWrapper": functools.partial(rollout, wrapper, options)}
    runs["the compiled step"] = functools.partial(steps, ours.functional, jax.jit(ours.functional.step), options.steps)
    return runs


def rollout(env: Any, options: argparse.Namespace) -> None:
    env.rollout(options.steps, break_when_any_done=False)


def steps(functional: Any, step: Any, count: int) -> None:
    keys = jax.random.split(jax.random.key(0), functional.num_envs)
    state = functional.begin(jax.random.key_data(keys))
    action = jnp.zeros((functional.num_envs, *functional.single_action_space.shape))
    for _ in range(count):
        state = step(state, action)
    jax.block_until_ready(state.obs)


def compared(runs: Mapping[str, Callable[[], None]], options: argparse.Namespace) -> Taken:
    """Turns of all ``runs``, their order turned round from one round to the next, after two that compile."""
    for run in runs.values():
        run()
        run()
    taken: Taken = {name: [] for name in runs}
    for turn in range(options.rounds):
        for name, run in list(runs.items())[:: -1 if turn % 2 else 1]:
            start = {clock: read() for clock, read in CLOCKS.items()}
            run()
            taken[name].append({clock: read() - start[clock] for clock, read in CLOCKS.items()})
    return taken


def rows_of(taken: Taken, count: int) -> list[dict[str, Any]]:
    """By both clocks: milliseconds a step of the batch, and how many times as long as ``TensorDictEnv`` it takes."""
    rows = []
    for name, turns in taken.items():
        row: dict[str, Any] = {"name": name}
        for clock in CLOCKS:
            ratios = [turn[clock] / ours[clock] for turn, ours in zip(turns, taken[OURS], strict=True)]
            row[clock] = {
                "ms a step": statistics.median(turn[clock] for turn in turns) * 1000 / count,
                "median": statistics.median(ratios), "least": min(ratios), "greatest": max(ratios),
            }  # fmt: skip
        rows.append(row)
    return rows


def _show(row: dict[str, Any]) -> None:
    what = f"{row['env']}, {row['backend']}, {row['envs']} environments, {row['name']}"
    texts = []
    for clock in CLOCKS:
        found = row[clock]
        spread = f"{found['median']:.2f} ({found['least']:.2f} - {found['greatest']:.2f})"
        texts.append(f"{clock} {found['ms a step']:8.3f} ms a step, {spread} times as long as {OURS}")
    print(f"{what:55} {'; '.join(texts)}", flush=True)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--env", default="ant", help="of Brax")
    parser.add_argument("--backend", default="spring", help="of its physics")
    parser.add_argument("--envs", nargs="*", type=int, default=[16])
    parser.add_argument("--steps", type=int, default=32, help="of a rollout")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--json", help="write the rows here")
    return parser.parse_args()


if __name__ == "__main__":
    main()
