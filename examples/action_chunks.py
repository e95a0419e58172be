"""Compares policies that plan 1, 4 or 16 actions per call of 50 ms: with fewer calls, the returns are the same.

    pip install -e '.[examples]'
    python examples/action_chunks.py
    python examples/action_chunks.py --horizons 1 8 32 --episodes 32

The policy stands in for a large model that predicts chunks of actions. It swings a pendulum up by controlling its energy,
and plans each chunk with a model of the pendulum. The program prints a table and plots the returns of all episodes.
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

TIME_STEP, GRAVITY, MAX_SPEED, MAX_TORQUE = 0.05, 10.0, 8.0, 2.0  # of Pendulum-v1, where mass and length are 1


def choose_torque(angle: Any, speed: Any) -> Any:
    """Return the torque that swings the pendulum up to an angle of 0, and then keeps it there."""
    energy_error = speed**2 / 6 + GRAVITY / 2 * (np.cos(angle) - 1)
    swing = np.where(speed == 0, 1.0, np.sign(speed)) * np.clip(-energy_error * 4, -MAX_TORQUE, MAX_TORQUE)
    hold = -12 * angle - 3 * speed
    return np.clip(np.where(np.abs(angle) < 0.4, hold, swing), -MAX_TORQUE, MAX_TORQUE)


class Planner:
    """A policy that plans chunks of actions with a model of the pendulum.

    Args:
        horizon: The number of actions in a chunk.
        seconds: The duration of a call, with any number of rows.
    """

    def __init__(self, horizon: int, seconds: float) -> None:
        self.horizon, self.seconds, self.calls = horizon, seconds, 0

    def __call__(self, observations: Any) -> Any:
        """Return one chunk per row, as float32 ``(rows, horizon, 1)``."""
        self.calls += 1
        time.sleep(self.seconds)
        angle, speed = np.arctan2(observations[:, 1], observations[:, 0]), observations[:, 2].astype(np.float64)
        chunk = []
        for _ in range(self.horizon):
            action = choose_torque(angle, speed)
            chunk.append(action)
            speed = np.clip(speed + (1.5 * GRAVITY * np.sin(angle) + 3 * action) * TIME_STEP, -MAX_SPEED, MAX_SPEED)
            angle = (angle + speed * TIME_STEP + np.pi) % (2 * np.pi) - np.pi
        return np.stack(chunk, 1)[:, :, np.newaxis].astype(np.float32)


def plot_returns(results: dict[int, Any], path: Path) -> None:
    """Plot the returns of all episodes, with a column per horizon."""
    figure = Figure(figsize=(6.0, 3.4), layout="constrained")
    axes = figure.subplots()
    for x, episodes in enumerate(results.values()):
        axes.plot(np.linspace(x - 0.2, x + 0.2, len(episodes)), episodes.returns, "o", color="#1b7f5c", markersize=3)
        axes.plot([x - 0.3, x + 0.3], [episodes.mean] * 2, color="#c8553d", linewidth=2)
    axes.set_xticks(range(len(results)), [str(horizon) for horizon in results])
    axes.set(xlabel="actions per chunk", ylabel="episode return", title="Pendulum-v1, a policy that takes 50 ms")
    axes.grid(alpha=0.2)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=100)


def main(argv: list[str] | None = None) -> None:
    """Evaluate the policy with each horizon, print the table, and write the plot."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, prog="python examples/action_chunks.py"
    )
    parser.add_argument("--horizons", type=int, nargs="+", default=[1, 4, 16], help="actions per chunk (default: 1 4 16)")
    parser.add_argument("--episodes", type=int, default=16, help="episodes with each number of actions (default: 16)")
    parser.add_argument("--num-envs", type=int, default=16, help="number of environments (default: 16)")
    parser.add_argument("--workers", type=int, default=2, help="number of worker processes (default: 2)")
    parser.add_argument("--policy-seconds", type=float, default=0.05, help="seconds per call of the policy (default: 0.05)")
    parser.add_argument(
        "--plot", type=Path, default=Path("action_chunks.png"), help="file for the plot (default: %(default)s)"
    )
    args = parser.parse_args(argv)
    table = Table("actions per chunk", "mean return", "policy calls", "seconds", "steps per second")
    results = {}
    for horizon in args.horizons:
        envs = vecenv.make_vec(
            "Pendulum-v1", args.num_envs, wrappers=[partial(ActionChunks, horizon=horizon)],
            num_workers=args.workers,
        )  # fmt: skip
        policy = Planner(horizon, args.policy_seconds)
        start = time.perf_counter()
        episodes = results[horizon] = vecenv.evaluate(envs, policy, args.episodes, seed=0, progress=True)
        seconds = time.perf_counter() - start
        envs.close()
        cells = f"{episodes.mean:.1f}", f"{policy.calls:,}", f"{seconds:.1f}", f"{episodes.lengths.sum() / seconds:,.0f}"
        table.add_row(str(horizon), *cells)
    Console().print(table)
    plot_returns(results, args.plot)
    print(f"wrote {args.plot}")


if __name__ == "__main__":
    main()
