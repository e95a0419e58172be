"""Evaluates one policy on many MiniGrid tasks in one pool of workers. A killed run can continue from saved results.

    pip install -e '.[examples]'
    python examples/evaluate_tasks.py
    python examples/evaluate_tasks.py --episodes 100 --folder runs/explorer   # a second run adds only missing episodes

The policy walks to the goal if it is visible, and otherwise explores at random. The program prints a table and plots the
returns of all episodes, with a column per task.
"""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
from matplotlib.figure import Figure
from rich.console import Console

import vecenv

TASKS = (
    "Empty-8x8", "Empty-Random-6x6", "FourRooms", "SimpleCrossingS9N1", "SimpleCrossingS9N3", "LavaGapS7",
    "LavaCrossingS9N1", "DistShift1",
)  # fmt: skip
LEFT, RIGHT, FORWARD = 0, 1, 2
EMPTY, GOAL = 1, 8  # kinds of cells in an observation


def make_task(name: str) -> gymnasium.Env[Any, Any]:
    """Build a task. Observations are ``(7, 7, 3)`` numbers that describe the cells in front of the agent."""
    import minigrid.wrappers  # imported here, in the worker, because the import registers the environments

    return minigrid.wrappers.ImgObsWrapper(gymnasium.make(f"MiniGrid-{name}-v0"))


def explore(observations: Any, rngs: list[np.random.Generator]) -> Any:
    """Walk to a visible goal, otherwise walk ahead or turn. The agent is at (3, 6); the cell in front of it is (3, 5)."""
    actions = []
    for cells, rng in zip(observations[..., 0], rngs, strict=True):
        goals = np.argwhere(cells == GOAL)
        can_walk = cells[3, 5] in (EMPTY, GOAL)
        if len(goals) and rng.random() < 0.9:
            column, row = goals[0]
            turn = RIGHT if column > 3 else LEFT
            actions.append(FORWARD if can_walk and row != 6 else turn)
        elif can_walk and rng.random() < 0.8:
            actions.append(FORWARD)
        else:
            actions.append(int(rng.choice([LEFT, RIGHT])))
    return np.array(actions)


def plot_returns(results: Any, path: Path) -> None:
    """Plot the returns of all episodes, with a column per task."""
    groups = results.group("env")
    figure = Figure(figsize=(7.0, 3.8), layout="constrained")
    axes = figure.subplots()
    for x, episodes in enumerate(groups.values()):
        axes.plot(np.linspace(x - 0.3, x + 0.3, len(episodes)), episodes.returns, "o", color="#1b7f5c", markersize=3)
        axes.plot([x - 0.35, x + 0.35], [episodes.mean] * 2, color="#c8553d", linewidth=2)
    axes.set_xticks(range(len(groups)), list(groups), rotation=30, ha="right", fontsize=8)
    axes.set(ylabel="episode return", title="One policy on MiniGrid tasks, with mean returns")
    axes.grid(alpha=0.2)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=100)


def main(argv: list[str] | None = None) -> None:
    """Evaluate the policy, print the table, and write the plot."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, prog="python examples/evaluate_tasks.py"
    )
    parser.add_argument("--tasks", nargs="+", default=TASKS, help=f"MiniGrid tasks (default: {' '.join(TASKS)})")
    parser.add_argument("--episodes", type=int, default=25, help="episodes per task (default: 25)")
    parser.add_argument("--num-envs", type=int, default=16, help="number of environments (default: 16)")
    parser.add_argument("--workers", type=int, default=2, help="number of worker processes (default: 2)")
    parser.add_argument("--folder", type=Path, help="save results in this folder, and run only missing episodes")
    parser.add_argument(
        "--plot", type=Path, default=Path("evaluate_tasks.png"), help="file for the plot (default: %(default)s)"
    )
    args = parser.parse_args(argv)
    tasks = {name: partial(make_task, name) for name in args.tasks}
    envs = vecenv.make_vec(vecenv.EnvChoice(tasks), args.num_envs, num_workers=args.workers)
    episodes = [vecenv.Episode(env=name, seed=seed) for name in tasks for seed in range(args.episodes)]
    name = None if args.folder is None else "explore"
    results = vecenv.evaluate(envs, explore, episodes, seed=0, folder=args.folder, name=name, progress=True)
    envs.close()
    Console().print(results.table(by="env"))
    plot_returns(results, args.plot)
    print(f"wrote {args.plot}")


if __name__ == "__main__":
    main()
