"""Compares the agent steps per second of ``MultiAgentVecEnv`` and SuperSuit's ``concat_vec_envs_v1`` on the same game.

Both run alternately for a short time, so that other load on the machine affects both. Each repeat takes a sample of both;
the result is the median of the repeats' ratios. A short trial selects the fastest mode of each: SuperSuit in this process or
in 2 processes; vecenv in this process, with one worker per core, or with one worker fewer while the caller steps a share of
the environments. Steps of ``pursuit`` take hardly any time, so its row shows the cost of the engines. Steps of ``spread``
(MPE with 3 agents) take most of the time in its row. The upper bound is the rate of the bare loop over one environment,
times the number of cores.

    python bench/multi_agent_rate.py
    python bench/multi_agent_rate.py --game spread --num-envs 16 --seconds 1 --repeats 7 --json
"""

from __future__ import annotations

import argparse
import functools
import json
import statistics
import warnings
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import numpy as np
from gymnasium import spaces
from pettingzoo import ParallelEnv

from bench import run_interleaved
from vecenv.multi_agent import MultiAgentVecEnv
from vecenv.system.cores import usable_cores
from vecenv.tools.benchmark import Summary
from vecenv.tools.runners import run_for


class Pursuit(ParallelEnv[str, Any, Any]):
    """A game of 200 steps: four agents on a line follow a moving goal."""

    metadata = {"name": "pursuit_on_a_line", "is_parallelizable": True}  # noqa: RUF012
    render_mode = None

    def __init__(self) -> None:
        self.possible_agents = [f"runner_{index}" for index in range(4)]
        self.agents: list[str] = []
        self._observation_space = spaces.Box(-np.inf, np.inf, (2,), np.float32)
        self._action_space = spaces.Discrete(3)

    def observation_space(self, agent: str) -> Any:
        return self._observation_space

    def action_space(self, agent: str) -> Any:
        return self._action_space

    def reset(self, seed: int | None = None, options: Any = None) -> Any:
        self.agents = self.possible_agents[:]
        self.positions = dict.fromkeys(self.agents, 0)
        self.time = 0
        self.observations = {agent: np.zeros(2, np.float32) for agent in self.agents}
        return self.observations, {agent: {} for agent in self.agents}

    def step(self, actions: dict[str, Any]) -> Any:
        self.time += 1
        goal = self.time % 20
        rewards = {}
        for agent, action in actions.items():
            position = self.positions[agent] = self.positions[agent] + int(action) - 1
            observation = self.observations[agent]
            observation[0], observation[1] = position, goal
            rewards[agent] = -abs(position - goal)
        is_over = self.time >= 200
        agents = self.agents
        if is_over:
            self.agents = []
        terminations, truncations = dict.fromkeys(agents, False), dict.fromkeys(agents, is_over)
        return self.observations, rewards, terminations, truncations, {agent: {} for agent in agents}


def make_spread() -> Any:
    """Build MPE's simple_spread, with three agents."""
    from mpe2 import simple_spread_v3

    return simple_spread_v3.parallel_env(max_cycles=100)


GAMES: dict[str, Callable[[], Any]] = {"pursuit": Pursuit, "spread": make_spread}


def make_bare_step(game: Callable[[], Any]) -> Callable[[Any], None]:
    """Return a function that steps one environment directly, and resets it after the end of an episode."""
    env = game()
    env.reset(seed=0)
    actions = {agent: env.action_space(agent).sample() for agent in env.possible_agents}

    def step(_: Any) -> None:
        if not env.agents:
            env.reset()
        env.step(actions)

    return step


def make_supersuit(game: Callable[[], Any], num_envs: int, processes: int) -> Any:
    """Build SuperSuit's vector environment; with 0 ``processes``, it steps in this process."""
    import supersuit

    single = supersuit.pettingzoo_env_to_vec_env_v1(game())
    envs = supersuit.concat_vec_envs_v1(single, num_envs, num_cpus=processes, base_class="gymnasium")
    envs.reset()
    return envs


def build_both(game: Callable[[], Any], num_envs: int, seconds: float, num_workers: Any) -> tuple[Any, Any, str, str]:
    """Build SuperSuit's and vecenv's engine in their fastest modes, and return both engines and both modes.

    ``num_workers`` fixes vecenv's mode, unless it is None.
    """
    supersuit_envs = {f"{processes} processes": make_supersuit(game, num_envs, processes) for processes in (0, 2)}
    actions = np.zeros(next(iter(supersuit_envs.values())).num_envs, np.int64)
    rates = {mode: run_for(make_counting_step(envs.step, actions), seconds) for mode, envs in supersuit_envs.items()}
    supersuit_mode = max(rates, key=rates.__getitem__)
    for mode, envs in supersuit_envs.items():
        if mode != supersuit_mode:
            envs.close()
    modes = [{"num_workers": num_workers}] if num_workers is not None else [
        {"num_workers": usable_cores()}, {"num_workers": usable_cores() - 1, "use_caller": True}, {"num_workers": 0},
    ]  # fmt: skip
    trials: list[tuple[float, dict[str, Any]]] = []
    for options in modes:
        with MultiAgentVecEnv([game] * num_envs, **options) as envs:
            envs.reset(seed=0)
            vecenv_actions = np.zeros((num_envs, envs.num_agents), np.int64)
            trials.append((run_for(make_counting_step(envs.step, vecenv_actions), seconds), options))
    _, options = max(trials, key=lambda trial: trial[0])
    vecenv_mode = ", ".join(f"{key}={value}" for key, value in options.items())
    return supersuit_envs[supersuit_mode], MultiAgentVecEnv([game] * num_envs, **options), supersuit_mode, vecenv_mode


def make_counting_step(step: Callable[[Any], Any], actions: np.ndarray) -> Callable[[], int]:
    """Return a function that calls ``step`` with these actions and returns the number of actions."""

    def counting_step() -> int:
        step(actions)
        return actions.size

    return counting_step


def compare(name: str, options: argparse.Namespace) -> dict[str, Any]:
    """Measure both engines alternately; return a row with the rates in agent steps per second."""
    game = GAMES[name]
    supersuit_envs, envs, supersuit_mode, vecenv_mode = build_both(
        game, options.num_envs, options.seconds, options.num_workers
    )
    envs.reset(seed=0)
    actions = np.zeros((options.num_envs, envs.num_agents), np.int64)
    steps = {
        "supersuit": make_counting_step(supersuit_envs.step, actions.reshape(-1)),
        "vecenv": make_counting_step(envs.step, actions),
        "bare loop": make_counting_step(make_bare_step(game), actions[0]),
    }  # fmt: skip
    rates = run_interleaved(
        {engine: functools.partial(run_for, step, options.seconds) for engine, step in steps.items()}, options.repeats
    )
    supersuit_envs.close()
    envs.close()
    medians = {engine: statistics.median(samples) for engine, samples in rates.items()}
    return {
        "game": name, "num_envs": options.num_envs, "agents": envs.num_agents,
        "mode": vecenv_mode, "supersuit_mode": supersuit_mode,
        "supersuit_rate": medians["supersuit"], "vecenv_rate": medians["vecenv"],
        "upper_bound": medians["bare loop"] * usable_cores(),
        "ratio": asdict(Summary.from_ratios(rates["vecenv"], rates["supersuit"])),  # type: ignore[arg-type]
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--game", action="append", choices=sorted(GAMES))
    parser.add_argument("--num-envs", type=int, default=16)
    parser.add_argument("--num-workers", type=int, help="number of workers (default: the fastest in a short trial)")
    parser.add_argument("--seconds", type=float, default=0.5)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    rows = [compare(game, options) for game in options.game or sorted(GAMES)]
    if options.json:
        print(json.dumps(rows, indent=2))
        return
    print(f"{'game':8} {'envs':>4} {'agents':>6} {'SuperSuit':>10} {'vecenv':>10} {'upper bound':>11}  ratio")
    for row in rows:
        rates = f"{row['supersuit_rate']:10,.0f} {row['vecenv_rate']:10,.0f} {row['upper_bound']:11,.0f}"
        modes = f"(vecenv: {row['mode']}; SuperSuit: {row['supersuit_mode']})"
        print(f"{row['game']:8} {row['num_envs']:4} {row['agents']:6} {rates}  {Summary(**row['ratio']).format()}  {modes}")


if __name__ == "__main__":
    main()
