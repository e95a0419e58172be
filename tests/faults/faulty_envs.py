"""Environments with a fault at a chosen moment, and a checker for the rows that a vector environment returns."""

from __future__ import annotations

import functools
import os
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.vector import AutoresetMode

from vecenv.testing import faulty
from vecenv.testing.faulty import FAULTS, FaultyEnv, WitnessEnv

__all__ = [
    "Chain",
    "EchoEnv",
    "ForkAndReturnLater",
    "Pause",
    "RowChecker",
    "WritePid",
    "faulty_env_fn",
    "healthy_env_fn",
    "make_env_fns",
    "write_pid_then",
]

EnvFn = Callable[[], gym.Env]


class EchoEnv(WitnessEnv):
    """A ``WitnessEnv`` that records its reset options and has methods for tests of ``call``."""

    secret: Any = None
    options: Any = None

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        self.options = options
        return super().reset(seed=seed, options=options)

    def trigger(self, fault: str, only: int | None = None) -> Any:
        """Trigger a fault in all environments or, with ``only``, in that one; return the info that the fault returns."""
        if only not in (None, self.witness_id):
            return None
        return FAULTS[fault](({},))[-1]

    def echo(self, value: Any) -> Any:
        """Return the argument."""
        return value


def healthy_env_fn(index: int, **options: Any) -> EnvFn:
    """Return a function that builds an :class:`EchoEnv`."""
    return functools.partial(EchoEnv, index, **options)


def faulty_env_fn(index: int, fault: str | faulty.Fault, options: Mapping[str, Any] | None = None, **when: Any) -> EnvFn:
    """Return a function that builds an :class:`EchoEnv` with a fault; ``when`` selects the moment, as in ``FaultyEnv``."""
    return functools.partial(_build_faulty_env, index, fault, dict(options or {}), when)


def _build_faulty_env(index: int, fault: str | faulty.Fault, options: dict[str, Any], when: dict[str, Any]) -> gym.Env:
    return FaultyEnv(EchoEnv(index, **options), fault, **when)


def make_env_fns(count: int, replacements: Mapping[int, EnvFn] | None = None, **options: Any) -> list[EnvFn]:
    """Return ``count`` functions that build healthy environments, except for the given replacements."""
    replacements = replacements or {}
    return [replacements.get(index) or healthy_env_fn(index, **options) for index in range(count)]


# --- more faults: instances of classes, because closures cannot be pickled ----------------------


class Pause:
    """A fault that delays the result and does not change it."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def __call__(self, result: Any) -> Any:
        time.sleep(self.seconds)
        return result


class WritePid:
    """A fault that writes the pid of its process to a file, to show that it was reached."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = os.fspath(path)

    def __call__(self, result: Any) -> Any:
        Path(self.path).write_text(str(os.getpid()))
        return result


class ForkAndReturnLater:
    """A fault that forks and writes the child's pid to the file ``copy``. When ``go`` exists, the child returns or exits."""

    def __init__(self, folder: Path, exits: bool) -> None:
        self.folder, self.exits = folder, exits

    def __call__(self, result: Any) -> Any:
        if child := os.fork():
            (self.folder / "copy").write_text(str(child))
            return result
        deadline = time.monotonic() + 20.0
        while not (self.folder / "go").exists() and time.monotonic() < deadline:
            time.sleep(0.01)
        if self.exits:
            sys.exit(0)
        return result


class Chain:
    """A sequence of faults; each receives the result of the one before."""

    def __init__(self, *faults: str | faulty.Fault) -> None:
        self.faults = [FAULTS[fault] if isinstance(fault, str) else fault for fault in faults]

    def __call__(self, result: Any) -> Any:
        for fault in self.faults:
            result = fault(result)
        return result


def write_pid_then(path: str | os.PathLike[str], fault: str | faulty.Fault) -> Chain:
    """Return a fault that first writes the pid of its process to a file, for which a test can wait."""
    return Chain(WritePid(path), fault)


# --- the checker of rows ------------------------------------------------------------------------


class RowChecker:
    """A checker that compares each row with the successor of its environment's last row.

    It detects results that belong to another call, rows of another environment, and rows that mix two steps.
    """

    def __init__(self, count: int, *, length: int, mode: AutoresetMode = AutoresetMode.NEXT_STEP) -> None:
        self.count = count
        self.length = length
        self.mode = mode
        self.rows: list[dict[str, int] | None] = [None] * count
        self.done = [False] * count
        self.was_replaced = [False] * count  # by a restart, and no row of the new environment has been checked yet
        self.seen_lives: set[int] = set()

    @classmethod
    def start(cls, envs: Any, *, seed: int = 1, **options: Any) -> RowChecker:
        """Reset all environments and return a checker for the calls that follow."""
        checker = cls(envs.num_envs, **{"length": 10, **options})
        checker.check_reset(envs.reset(seed=seed), seeds=[seed + env for env in range(envs.num_envs)])
        return checker

    def check_reset(
        self,
        result: tuple[Any, dict[str, Any]],
        *,
        seeds: list[int | None] | None = None,
        mask: np.ndarray | None = None,
        rebuilt: set[int] | frozenset[int] = frozenset(),
    ) -> None:
        """Check the result of ``reset``; the environments in ``rebuilt`` must be new ones."""
        observations, infos = result
        restarted = infos.get("_restarted", np.zeros(self.count, dtype=bool))
        for env in range(self.count):
            row, last = WitnessEnv.read(observations[env]), self.rows[env]
            if mask is not None and not mask[env]:
                assert last is not None
                assert row == last, f"env {env} was reset despite the mask: {last} became {row}"
                assert not infos.get("_tick", np.zeros(self.count))[env]
                continue
            seed = seeds[env] if seeds is not None else None
            if last is None or env in rebuilt or self.was_replaced[env] or restarted[env]:
                self._check_new_life(env, row)
                expected = {**row, **_EPISODE_START} if seed is None else {**row, **_EPISODE_START, "seed": seed}
            else:
                expected = self._after_reset(last, seed)
            self._check_row(env, row, expected, "reset")
            self._check_info(env, infos, row)
            self.done[env] = False

    def check_step(self, actions: Any, result: tuple[Any, ...]) -> None:
        """Check the result of ``step``, including the rows of restarted environments."""
        observations, rewards, terminations, truncations, infos = result
        restarted = infos.get("_restarted", np.zeros(self.count, dtype=bool))
        for env in range(self.count):
            row, last = WitnessEnv.read(observations[env]), self.rows[env]
            assert last is not None
            flags = (bool(terminations[env]), bool(truncations[env]))
            context = f"env {env}, action {actions[env]}, last row {last}"
            if restarted[env]:
                self._check_restarted(env, row, last, float(rewards[env]), flags, infos)
                continue
            if self.mode is AutoresetMode.NEXT_STEP and self.done[env]:
                if self.was_replaced[env]:
                    self._check_new_life(env, row)
                    assert row["seed"] not in (-1, last["seed"]), f"{context}: a restart needs a new seed"
                    expected = {**row, **_EPISODE_START}
                else:
                    expected = self._after_reset(last, None)
                assert (float(rewards[env]), flags) == (0.0, (False, False)), context
                self.done[env] = False
            elif self.was_replaced[env]:  # disabled mode: the new environment has begun an episode without a reset call
                self._check_new_life(env, row)
                expected = self._after_step({**row, **_EPISODE_START, "steps": 0}, int(actions[env]))
                assert flags == (False, False)
            else:
                expected = self._after_step(last, int(actions[env]))
                done = expected["tick"] >= self.length
                is_even = expected["episode"] % 2 == 0  # even episodes are terminated, odd ones truncated
                assert flags == (done and is_even, done and not is_even), f"{context}: unexpected flags {flags}"
                assert rewards[env] == expected["tick"] + expected["actions"] / 1024, context
                self.done[env] = done
                if done and self.mode is AutoresetMode.SAME_STEP:
                    final = WitnessEnv.read(infos["final_obs"][env])
                    assert final == expected, f"{context}: final_obs {final}"
                    assert infos["_final_obs"][env]
                    assert infos["final_info"]["tick"][env] == expected["tick"], context
                    expected, self.done[env] = self._after_reset(expected, None), False
            self._check_row(env, row, expected, context)
            self._check_info(env, infos, row)

    def accept_row(self, env: int, row: Any) -> None:
        """Accept any row of the same environment, because the rows before it were received without a check."""
        new, last = WitnessEnv.read(row), self.rows[env]
        assert last is None or new["life"] == last["life"], f"env {env} was replaced"
        self.rows[env] = new

    def _check_restarted(
        self, env: int, row: dict[str, int], last: dict[str, int], reward: float, flags: tuple[bool, bool], infos: Any
    ) -> None:
        assert reward == 0.0
        assert flags == (False, True), f"a lost step must end the episode as truncated, not {flags}"
        assert infos["restarted"][env]
        final = WitnessEnv.read(infos["final_obs"][env])
        assert final == last, f"env {env}: final_obs must be the last good row {last}, not {final}"
        if self.mode is AutoresetMode.SAME_STEP:  # the row is the first of the new environment
            self._check_new_life(env, row)
            self._check_row(env, row, {**row, **_EPISODE_START}, "restart")
            assert row["seed"] not in (-1, last["seed"]), f"env {env}: a restart needs a new seed"
            self._check_info(env, infos, row)
        else:  # the row is the last of the old environment, as at the end of any episode
            assert row == last, f"env {env}: the row of a lost step must be the last good one {last}, not {row}"
            self.done[env] = self.was_replaced[env] = True

    def _check_new_life(self, env: int, row: dict[str, int]) -> None:
        """Check that a row comes from a new environment that has taken at most one step."""
        assert row["life"] not in self.seen_lives, f"env {env}: this environment is not new"
        assert row["witness_id"] == env
        assert row["episode"] in (1, 2)
        assert row["steps"] == row["tick"] <= 1
        self.seen_lives.add(row["life"])
        self.was_replaced[env] = False

    def _check_row(self, env: int, row: dict[str, int], expected: dict[str, int], context: str) -> None:
        assert row == expected, f"env {env}: {context}\n  expected {expected}\n  got      {row}"
        self.rows[env] = row

    def _check_info(self, env: int, infos: dict[str, Any], row: dict[str, int]) -> None:
        for key in ("witness_id", "episode", "tick"):
            assert infos[f"_{key}"][env]
            assert infos[key][env] == row[key], f"env {env}: info {key} is {infos[key][env]}, but the row is {row}"
        has_last_action = bool(infos.get("_last_action", np.zeros(self.count))[env])
        assert has_last_action == (row["tick"] % 3 == 2)
        assert not has_last_action or infos["last_action"][env] == row["last_action"]

    @staticmethod
    def _after_reset(last: dict[str, int], seed: int | None) -> dict[str, int]:
        latest_seed = last["seed"] if seed is None else seed
        return {**last, **_EPISODE_START, "episode": last["episode"] + 1, "seed": latest_seed}

    @staticmethod
    def _after_step(last: dict[str, int], action: int) -> dict[str, int]:
        return {
            **last,
            "tick": last["tick"] + 1,
            "steps": last["steps"] + 1,
            "last_action": action,
            "actions": last["actions"] + action,
        }


_EPISODE_START = {"tick": 0, "last_action": -1, "actions": 0}
