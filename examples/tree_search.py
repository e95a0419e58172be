"""Monte Carlo tree search in an Atari game with snapshots, compared with the same search that replays moves instead.

    pip install -e . ale-py
    python examples/tree_search.py                       # ALE/Breakout-v5
    python examples/tree_search.py CartPole-v1 --moves 40 --by snapshots,frozen,replay
    python examples/tree_search.py LunarLander-v3 --by frozen,replay   # pip install box2d

A node of the tree is a state of the game. To expand a node, the program restores its state in all environments of a vector
environment. Each environment makes a different move and then random moves; their return is the value of the first move.
Snapshots restore a state with ``envs.load(snapshot)``; frozen copies, which also work for games that keep state in C,
restore it with ``envs.thaw(frozen)``. Without these, the program resets the environments and repeats all moves since the
beginning. The game is deterministic here, so all ways restore the same states and find the same moves.
"""

from __future__ import annotations

import argparse
import math
import time
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any

import gymnasium as gym
import numpy as np

import vecenv

DISCOUNT = 0.99
EXPLORATION_WEIGHT = 1.0


@dataclass
class Node:
    """A state, and the results of the search below it.

    Attributes:
        saved: The saved state, as the methods of :class:`Games` return it.
        reward: The reward of the move that led to the state.
        over: True if the game ended with that move.
        visits, total: The number of games played from the state, and the sum of their returns.
        children: One node per move.
    """

    saved: Any
    reward: float = 0.0
    over: bool = False
    visits: int = 0
    total: float = 0.0
    children: list[Node] = field(default_factory=list)

    def uct_score(self, parent_visits: int) -> float:
        """Return the mean return of the node, with a bonus for rarely tried moves (UCT)."""
        mean = self.reward + DISCOUNT * self.total / self.visits
        return mean + EXPLORATION_WEIGHT * math.sqrt(math.log(parent_visits) / self.visits)


class Games:
    """A vector environment with one game per possible move. Subclasses define how to save and restore states."""

    def __init__(self, envs: Any, seed: int) -> None:
        self.envs, self.seed = envs, seed
        self.steps = 0  # of all environments

    def step(self, actions: Any) -> tuple[Any, Any]:
        _, rewards, terminations, truncations, _ = self.envs.step(np.asarray(actions))
        self.steps += self.envs.num_envs
        return rewards, terminations | truncations


class Snapshots(Games):
    """Games that save states as snapshots."""

    def begin(self) -> Any:
        self.envs.reset(seed=[self.seed] * self.envs.num_envs)
        return self.envs.save([0])[0]

    def restore(self, saved: Any) -> None:
        self.envs.load(saved)

    def save_after_moves(self, parent: Any) -> Any:
        return self.envs.save()


class Frozen(Games):
    """Games that save states as frozen copies of their processes. A copy ends when its node is deleted."""

    def begin(self) -> Any:
        self.envs.reset(seed=[self.seed] * self.envs.num_envs)
        return self.envs.freeze([0])[0]

    def restore(self, saved: Any) -> None:
        self.envs.thaw(saved, range(self.envs.num_envs))

    def save_after_moves(self, parent: Any) -> Any:
        return self.envs.freeze()


class Replay(Games):
    """Games that save states as lists of moves."""

    def begin(self) -> Any:
        return ()

    def restore(self, saved: Any) -> None:
        self.envs.reset(seed=[self.seed] * self.envs.num_envs)
        for action in saved:
            self.step(np.full(self.envs.num_envs, action))

    def save_after_moves(self, parent: Any) -> Any:
        return [(*parent, action) for action in range(self.envs.num_envs)]


def expand(games: Any, node: Node, horizon: int, rng: np.random.Generator) -> float:
    """Make all moves from a node, and continue with random moves. Return the mean of the returns."""
    moves = games.envs.num_envs
    games.restore(node.saved)
    rewards, over = games.step(np.arange(moves))
    node.children = [
        Node(saved, float(reward), bool(ended), visits=1)
        for saved, reward, ended in zip(games.save_after_moves(node.saved), rewards, over, strict=True)
    ]
    returns, weight = np.zeros(moves), 1.0
    for _ in range(horizon):
        rewards, ended = games.step(rng.integers(moves, size=moves))
        returns += weight * rewards * ~over  # rewards after the end of a game do not count
        weight, over = weight * DISCOUNT, over | ended
    for child, total in zip(node.children, returns, strict=True):
        child.total = float(total)
    return float(np.mean([child.reward + DISCOUNT * child.total for child in node.children]))


def search(games: Any, root: Node, expansions: int, horizon: int, rng: np.random.Generator) -> int:
    """Expand the tree below ``root``, and return the move that was tried most often."""
    for _ in range(expansions):
        path = [root]
        while path[-1].children:
            parent = path[-1]
            path.append(max(parent.children, key=lambda child: child.uct_score(parent.visits)))
        leaf = path[-1]
        value = 0.0 if leaf.over else expand(games, leaf, horizon, rng)
        for node in reversed(path):
            node.visits, node.total = node.visits + 1, node.total + value
            value = node.reward + DISCOUNT * value  # of the parent
    return max(range(len(root.children)), key=lambda move: root.children[move].visits)


def play(games: Any, moves: int, expansions: int, horizon: int, seed: int) -> tuple[list[int], float, float]:
    """Play a game of at most this many moves. Return the moves, the sum of their rewards, and the seconds."""
    rng = np.random.default_rng(seed)
    root, played, score = Node(games.begin()), [], 0.0
    start = time.perf_counter()  # after the first snapshot, which takes longer because it is verified
    while len(played) < moves and not root.over:
        played.append(search(games, root, expansions, horizon, rng))
        root = root.children[played[-1]]  # the next search continues with the subtree of the move
        score += root.reward
    return played, score, time.perf_counter() - start


def make_envs(env_id: str, num_workers: int | None) -> Any:
    """Build a vector environment with one environment per possible move of the game."""
    options: dict[str, Any] = {}
    if env_id.startswith("ALE/"):
        import ale_py

        gym.register_envs(ale_py)
        options = {"repeat_action_probability": 0.0, "obs_type": "ram"}
    with closing(gym.make(env_id, **options)) as env:
        if not isinstance(env.action_space, gym.spaces.Discrete):
            raise SystemExit(f"tree_search: the action space of {env_id} is not Discrete: {env.action_space}")
        moves = int(env.action_space.n)
    return vecenv.make_vec(env_id, moves, num_workers=num_workers, **options)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("env_id", nargs="?", default="ALE/Breakout-v5", help="id of the game (default: %(default)s)")
    parser.add_argument("--moves", type=int, default=40, help="maximum number of moves (default: %(default)s)")
    parser.add_argument("--expansions", type=int, default=16, help="nodes to expand per move (default: %(default)s)")
    parser.add_argument("--horizon", type=int, default=10, help="random moves after each move (default: %(default)s)")
    parser.add_argument(
        "--by", default="snapshots,replay", help="ways to restore states: snapshots, frozen, replay (default: %(default)s)"
    )
    parser.add_argument(
        "--num-workers",
        type=int,
        default=0,
        help="number of worker processes; frozen always uses one per game (default: %(default)s)",
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of the game and the search (default: %(default)s)")
    args = parser.parse_args(argv)
    kinds = {"snapshots": Snapshots, "frozen": Frozen, "replay": Replay}
    names = args.by.split(",")
    if unknown := set(names) - set(kinds):
        parser.error(f"--by: got {', '.join(sorted(unknown))}, expected some of {', '.join(kinds)}")
    results = {}
    for name in names:
        num_workers = None if name == "frozen" else args.num_workers  # copies need one process per game
        with closing(make_envs(args.env_id, num_workers)) as envs:
            games = kinds[name](envs, args.seed)
            played, score, seconds = play(games, args.moves, args.expansions, args.horizon, args.seed)
        print(f"{name:10}{len(played)} moves, score {score:g}: {games.steps:,} environment steps, {seconds:.2f} s")
        results[name] = played, games.steps, seconds
    (first, (played, steps, seconds)), *others = results.items()
    for other, (other_played, other_steps, other_seconds) in others:
        comparison = "the same moves" if played == other_played else "DIFFERENT MOVES: the game is not deterministic"
        print(
            f"{comparison}; {first} against {other}: {other_steps / steps:.1f} times fewer steps, "
            f"{other_seconds / seconds:.1f} times faster"
        )


if __name__ == "__main__":
    main()
