"""An agent with a slow policy that plays many text games at the same time, each in a coroutine.

    pip install -e '.[examples]'
    python examples/agent_pool.py
    python examples/agent_pool.py --episodes 2000 --size 64 --workers 4

In the game, the agent guesses a number. The policy stands in for a language model behind a service: it reads and returns
text, and some calls take longer than others. While a game waits for the policy, the others continue. With ``--crash 0.01``,
one guess in a hundred kills its worker: the games of that worker start again, and all others continue.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import re
import signal
import statistics
import time
from typing import Any

import gymnasium as gym
from gymnasium import spaces
from rich.progress import Progress

import vecenv
from vecenv.aio import Pool
from vecenv.errors import EnvFailed, RestartsExhausted, StepTimeout, WorkerDied

HIGHEST = 1000


class GuessingGame(gym.Env[str, str]):
    """A game of guessing a number from 1 to ``HIGHEST``: a wrong guess costs 1, the right one earns 20.

    Args:
        seconds: The duration of a step.
        crash: The probability that a guess kills the process, as a faulty game would.
    """

    def __init__(self, seconds: float = 0.01, crash: float = 0.0) -> None:
        self.observation_space = spaces.Text(200)
        self.action_space = spaces.Text(20)
        self._seconds, self._crash = seconds, crash

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        super().reset(seed=seed)
        self._number = int(self.np_random.integers(1, HIGHEST + 1))
        self._low, self._high = 1, HIGHEST
        return self._text("Guess my number."), {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        time.sleep(self._seconds)
        if random.SystemRandom().random() < self._crash:  # without a seed, or a restarted game would crash again
            os.kill(os.getpid(), signal.SIGKILL)
        guess = int(action)
        if guess == self._number:
            return "That is it!", 20.0, True, False, {}
        if guess < self._number:
            self._low = max(self._low, guess + 1)
            return self._text(f"{guess} is too low."), -1.0, False, False, {}
        self._high = min(self._high, guess - 1)
        return self._text(f"{guess} is too high."), -1.0, False, False, {}

    def _text(self, answer: str) -> str:
        return f"{answer} The number lies between {self._low} and {self._high}."


async def policy(observation: str) -> str:
    """Return a guess, usually near the middle of the possible numbers, after 1 to 30 ms."""
    await asyncio.sleep(random.uniform(0.001, 0.03))
    low, high = map(int, re.findall(r"between (\d+) and (\d+)", observation)[0])
    return str(round(random.triangular(low, high)))


async def play(pool: Pool, seed: int) -> float:
    """Play one game, starting again after each failure, and return the sum of its rewards."""
    while True:
        try:
            async with pool.episode(seed=seed) as env:
                total = 0.0
                while not env.over:
                    action = await policy(env.observation)
                    _, reward, *_ = await env.step(action)
                    total += reward
                return total
        except RestartsExhausted:  # a subclass of `WorkerDied`: the budget of restarts is used up
            raise
        except (WorkerDied, StepTimeout, EnvFailed):
            continue


async def play_all(args: argparse.Namespace) -> list[float]:
    """Play all games, ``args.size`` of them at a time, and return the sum of the rewards of each game."""
    pool = Pool(
        lambda: GuessingGame(args.game_seconds, args.crash), args.size, args.workers, env_threads=8, step_timeout=10.0,
        on_failure=vecenv.Restart(args.episodes),
    )  # fmt: skip
    async with pool:
        with Progress() as progress:
            bar = progress.add_task("games", total=args.episodes)

            async def play_one(seed: int) -> float:
                total = await play(pool, seed)
                progress.advance(bar)
                return total

            returns = await asyncio.gather(*map(play_one, range(args.episodes)))
        print(f"{pool.stats()['steps']:.0f} guesses; restarts: {pool.stats()['restarts']:.0f}")
    return returns


def main() -> None:
    """Play all games and print the results."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, prog="python examples/agent_pool.py"
    )
    parser.add_argument("--episodes", type=int, default=500, help="number of games (default: 500)")
    parser.add_argument("--size", type=int, default=64, help="number of games at the same time (default: 64)")
    parser.add_argument("--workers", type=int, default=4, help="number of worker processes (default: 4)")
    parser.add_argument("--game-seconds", type=float, default=0.01, help="seconds per step of a game (default: 0.01)")
    parser.add_argument("--crash", type=float, default=0.0, help="probability that a guess kills its worker (default: 0)")
    args = parser.parse_args()
    start = time.perf_counter()
    returns = asyncio.run(play_all(args))
    seconds = time.perf_counter() - start
    mean, deviation = statistics.mean(returns), statistics.pstdev(returns)
    print(f"{len(returns)} games in {seconds:.1f} s: mean return {mean:.2f}, standard deviation {deviation:.2f}")


if __name__ == "__main__":
    main()
