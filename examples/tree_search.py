"""Monte-Carlo tree search in an Atari game, branching from snapshots, beside the same search by replaying actions.

    pip install -e . ale-py
    python examples/tree_search.py                       # ALE/Breakout-v5
    python examples/tree_search.py CartPole-v1 --moves 40 --by snapshots,frozen,replay
    python examples/tree_search.py LunarLander-v3 --by frozen,replay   # pip install box2d

A node of the tree is a state of the game. To expand one, the environments of one vector environment are put there, each
makes another move, and plays on at random for a while; what it gets is the value of its move. With snapshots "put there" is
one ``envs.load(snapshot)``; with frozen copies, which work for games that keep their state in C, ``envs.thaw(frozen)``.
Without, it is a reset and all moves since the beginning, again: the same states, and the same
search move for move, as the game is deterministic here.
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
EXPLORING = 1.0


@dataclass
class Node:
    """A state, and the results of the search below it.

    Attributes:
        place: Restores the state in environments.
        reward: The reward of the move that led there.
        over: The game ended with that move.
        visits, total: The number of games played from there, and the sum of their returns.
        children: One node per move.
    """

    place: Any
    reward: float = 0.0
    over: bool = False
    visits: int = 0
    total: float = 0.0
    children: list[Node] = field(default_factory=list)

    def worth(self, parents_visits: int) -> float:
        """Return its mean return, with a bonus for rarely tried moves (UCT)."""
        mean = self.reward + DISCOUNT * self.total / self.visits
        return mean + EXPLORING * math.sqrt(math.log(parents_visits) / self.visits)


class Games:
    """One game per possible move, in one vector environment; subclasses restore a state."""

    def __init__(self, envs: Any, seed: int) -> None:
        self.envs, self.seed = envs, seed
        self.steps = 0  # of single environments

    def step(self, actions: Any) -> tuple[Any, Any]:
        _, rewards, terminations, truncations, _ = self.envs.step(np.asarray(actions))
        self.steps += self.envs.num_envs
        return rewards, terminations | truncations


class Snapshots(Games):
    """Games with snapshots as places."""

    def begin(self) -> Any:
        self.envs.reset(seed=[self.seed] * self.envs.num_envs)
        return self.envs.save([0])[0]

    def put(self, place: Any) -> None:
        self.envs.load(place)

    def reached(self, place: Any) -> Any:
        return self.envs.save()


class Frozen(Games):
    """Games with frozen copies of processes as places. Each copy ends with its node."""

    def begin(self) -> Any:
        self.envs.reset(seed=[self.seed] * self.envs.num_envs)
        return self.envs.freeze([0])[0]

    def put(self, place: Any) -> None:
        self.envs.thaw(place, range(self.envs.num_envs))

    def reached(self, place: Any) -> Any:
        return self.envs.freeze()


class Replay(Games):
    """Games with lists of moves as places."""

    def begin(self) -> Any:
        return ()

    def put(self, place: Any) -> None:
        self.envs.reset(seed=[self.seed] * self.envs.num_envs)
        for action in place:
            self.step(np.full(self.envs.num_envs, action))

    def reached(self, place: Any) -> Any:
        return [(*place, action) for action in range(self.envs.num_envs)]


def expand(games: Any, node: Node, horizon: int, chance: np.random.Generator) -> float:
    """Try every move from a node, and continue at random; return the mean of the returns."""
    moves = games.envs.num_envs
    games.put(node.place)
    rewards, over = games.step(np.arange(moves))
    node.children = [
        Node(place, float(reward), bool(ended), visits=1)
        for place, reward, ended in zip(games.reached(node.place), rewards, over, strict=True)
    ]
    returns, weight = np.zeros(moves), 1.0
    for _ in range(horizon):
        rewards, ended = games.step(chance.integers(moves, size=moves))
        returns += weight * rewards * ~over  # results after the end of a game do not count
        weight, over = weight * DISCOUNT, over | ended
    for child, total in zip(node.children, returns, strict=True):
        child.total = float(total)
    return float(np.mean([child.reward + DISCOUNT * child.total for child in node.children]))


def search(games: Any, root: Node, expansions: int, horizon: int, chance: np.random.Generator) -> int:
    """Grow the tree below ``root``; return the move that was tried most often."""
    for _ in range(expansions):
        path = [root]
        while path[-1].children:
            parent = path[-1]
            path.append(max(parent.children, key=lambda child: child.worth(parent.visits)))
        leaf = path[-1]
        value = 0.0 if leaf.over else expand(games, leaf, horizon, chance)
        for node, before in zip(reversed(path), [*reversed(path[:-1]), None], strict=True):
            node.visits, node.total = node.visits + 1, node.total + value
            if before is not None:
                value = node.reward + DISCOUNT * value
    return max(range(len(root.children)), key=lambda move: root.children[move].visits)


def play(games: Any, moves: int, expansions: int, horizon: int, seed: int) -> tuple[list[int], float, float]:
    """Play a game of that many moves; return them, the sum of their rewards, and the seconds."""
    chance = np.random.default_rng(seed)
    root, made, score = Node(games.begin()), [], 0.0
    began = time.perf_counter()  # after the first snapshot, which is verified before it is returned
    while len(made) < moves and not root.over:
        made.append(search(games, root, expansions, horizon, chance))
        root = root.children[made[-1]]  # with all results below it
        score += root.reward
    return made, score, time.perf_counter() - began


def make(env_id: str, num_workers: int | None) -> Any:
    """Build one environment for each move of the game."""
    options: dict[str, Any] = {}
    if env_id.startswith("ALE/"):
        import ale_py

        gym.register_envs(ale_py)
        options = {"repeat_action_probability": 0.0, "obs_type": "ram"}
    with closing(gym.make(env_id, **options)) as one:
        if not isinstance(one.action_space, gym.spaces.Discrete):
            raise SystemExit(f"tree_search: the moves of {env_id} cannot be counted: {one.action_space}")
        moves = int(one.action_space.n)
    return vecenv.make_vec(env_id, moves, num_workers=num_workers, **options)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("env_id", nargs="?", default="ALE/Breakout-v5", help="a game (default: %(default)s)")
    parser.add_argument("--moves", type=int, default=40, help="number of moves (default: %(default)s)")
    parser.add_argument("--expansions", type=int, default=16, help="expanded nodes per move (default: %(default)s)")
    parser.add_argument("--horizon", type=int, default=10, help="random moves after each (default: %(default)s)")
    parser.add_argument("--by", default="snapshots,replay", help="snapshots, frozen, replay (default: %(default)s)")
    parser.add_argument("--num-workers", type=int, default=0, help="processes; frozen: one per game (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the game and the search (default: %(default)s)")
    given = parser.parse_args(argv)
    kinds = {"snapshots": Snapshots, "frozen": Frozen, "replay": Replay}
    if wrong := set(given.by.split(",")) - set(kinds):
        parser.error(f"--by has {', '.join(sorted(wrong))}, wanted some of {', '.join(kinds)}")
    found = {}
    for name in given.by.split(","):
        with closing(make(given.env_id, None if name == "frozen" else given.num_workers)) as envs:
            games = kinds[name](envs, given.seed)
            made, score, seconds = play(games, given.moves, given.expansions, given.horizon, given.seed)
        print(f"{name:10}{len(made)} moves, score {score:g}: {games.steps:,} steps of environments, {seconds:.2f} s")
        found[name] = made, games.steps, seconds
    (first, (made, steps, seconds)), *others = found.items()
    for other, (others_made, others_steps, others_seconds) in others:
        same = "the same moves" if made == others_made else "OTHER MOVES: the game is not deterministic"
        print(
            f"{same}; {first} against {other}: {others_steps / steps:.1f} times fewer steps, "
            f"{others_seconds / seconds:.1f} times faster"
        )


if __name__ == "__main__":
    main()
