"""A policy that takes 50 ms and plans 1, 4 or 16 actions at once: the same returns, for fewer calls.

    pip install -e '.[examples]'
    python examples/action_chunks.py
    python examples/action_chunks.py --horizons 1 8 32 --episodes 32

The policy stands for a large model that predicts chunks of actions. It swings a pendulum up by the energy of a model that it
knows, and rolls the model out for the whole chunk. The program prints a table, and draws the returns of all episodes.
"""

from __future__ import annotations

import argparse
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table

import vecenv
from vecenv.wrappers import ActionChunks

DT, GRAVITY, MAX_SPEED, MAX_TORQUE = 0.05, 10.0, 8.0, 2.0  # of Pendulum-v1, with a mass and a length of 1


def torque(angle: Any, speed: Any) -> Any:
    """Add energy until the pendulum is upright, then hold it there; zero is upright."""
    energy = speed**2 / 6 + GRAVITY / 2 * (np.cos(angle) - 1)
    swing = np.where(speed == 0, 1.0, np.sign(speed)) * np.clip(-energy * 4, -MAX_TORQUE, MAX_TORQUE)
    hold = -12 * angle - 3 * speed
    return np.clip(np.where(np.abs(angle) < 0.4, hold, swing), -MAX_TORQUE, MAX_TORQUE)


class Planner:
    """The policy.

    Args:
        horizon: Number of actions in a chunk.
        seconds: Time that a call takes, for any number of rows.
    """

    def __init__(self, horizon: int, seconds: float) -> None:
        self.horizon, self.seconds, self.calls = horizon, seconds, 0

    def __call__(self, observations: Any) -> Any:
        """Return chunks, float32 ``(rows, horizon, 1)``."""
        self.calls += 1
        time.sleep(self.seconds)
        angle, speed = np.arctan2(observations[:, 1], observations[:, 0]), observations[:, 2].astype(np.float64)
        chunk = []
        for _ in range(self.horizon):
            action = torque(angle, speed)
            chunk.append(action)
            speed = np.clip(speed + (1.5 * GRAVITY * np.sin(angle) + 3 * action) * DT, -MAX_SPEED, MAX_SPEED)
            angle = (angle + speed * DT + np.pi) % (2 * np.pi) - np.pi
        return np.stack(chunk, 1)[:, :, np.newaxis].astype(np.float32)


def draw(results: dict[int, Any], path: Path) -> None:
    """Draw the returns of all episodes, a column per horizon."""
    figure = Figure(figsize=(6.0, 3.4), layout="constrained")
    axes = figure.subplots()
    for place, found in enumerate(results.values()):
        axes.plot(np.linspace(place - 0.2, place + 0.2, len(found)), found.returns, "o", color="#1b7f5c", markersize=3)
        axes.plot([place - 0.3, place + 0.3], [found.mean] * 2, color="#c8553d", linewidth=2)
    axes.set_xticks(range(len(results)), [str(horizon) for horizon in results])
    axes.set(xlabel="actions per chunk", ylabel="return of an episode", title="Pendulum-v1, a policy that takes 50 ms")
    axes.grid(alpha=0.2)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=100)


def main(argv: list[str] | None = None) -> None:
    """Evaluate the policy with each horizon, print the table, draw the picture."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, prog="python examples/action_chunks.py"
    )
    parser.add_argument("--horizons", type=int, nargs="+", default=[1, 4, 16], help="actions per chunk (default: 1 4 16)")
    parser.add_argument("--episodes", type=int, default=16, help="episodes of each (default: 16)")
    parser.add_argument("--num-envs", type=int, default=16, help="environments (default: 16)")
    parser.add_argument("--workers", type=int, default=2, help="worker processes (default: 2)")
    parser.add_argument("--policy-seconds", type=float, default=0.05, help="time of a call (default: 0.05)")
    parser.add_argument("--plot", type=Path, default=Path("action_chunks.png"), help="picture (default: action_chunks.png)")
    args = parser.parse_args(argv)
    table = Table("actions per chunk", "mean return", "calls of the policy", "seconds", "steps per second")
    results = {}
    for horizon in args.horizons:
        envs = vecenv.make_vec(
            "Pendulum-v1", args.num_envs, wrappers=[partial(ActionChunks, horizon=horizon)],
            num_workers=args.workers,
        )  # fmt: skip
        policy = Planner(horizon, args.policy_seconds)
        began = time.perf_counter()
        found = results[horizon] = vecenv.evaluate(envs, policy, args.episodes, seed=0, progress=True)
        seconds = time.perf_counter() - began
        envs.close()
        figures = f"{found.mean:.1f}", f"{policy.calls:,}", f"{seconds:.1f}", f"{found.lengths.sum() / seconds:,.0f}"
        table.add_row(str(horizon), *figures)
    Console().print(table)
    draw(results, args.plot)
    print(f"wrote {args.plot}")


if __name__ == "__main__":
    main()
