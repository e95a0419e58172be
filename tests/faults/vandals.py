"""The vandals: everything ``vecenv.testing`` has to break an environment with, and what only these tests need."""

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
    "Announce",
    "Chain",
    "Ledger",
    "Obedient",
    "Pause",
    "Touch",
    "crew",
    "vandal",
    "witness",
]

EnvFn = Callable[[], gym.Env]


def witness(index: int, **options: Any) -> EnvFn:
    """An honest environment."""
    return functools.partial(Obedient, index, **options)


def vandal(index: int, fault: str | faulty.Fault, options: Mapping[str, Any] | None = None, **when: Any) -> EnvFn:
    """An environment with one fault, at the moment ``when`` says."""
    return functools.partial(_vandal, index, fault, dict(options or {}), when)


def _vandal(index: int, fault: str | faulty.Fault, options: dict[str, Any], when: dict[str, Any]) -> gym.Env:
    return FaultyEnv(Obedient(index, **options), fault, **when)


def crew(count: int, vandals: Mapping[int, EnvFn] | None = None, **options: Any) -> list[EnvFn]:
    """``count`` honest environments, some of them replaced."""
    return [(vandals or {}).get(index) or witness(index, **options) for index in range(count)]


class Obedient(WitnessEnv):
    """A witness with methods to be reached by ``call``: it does what it is told."""

    secret: Any = None
    options: Any = None

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Remember the options."""
        self.options = options
        return super().reset(seed=seed, options=options)

    def do(self, fault: str, only: int | None = None) -> Any:
        """Commit a fault, if ``only`` is this environment or nobody in particular."""
        return FAULTS[fault](({},))[-1] if only in (None, self.witness_id) else None

    def echo(self, value: Any) -> Any:
        """Send back what came."""
        return value


# --- faults that only tests need; classes, so that they pickle by name --------------------------


class Pause:
    """A fault that takes its time and then does nothing."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def __call__(self, result: Any) -> Any:
        time.sleep(self.seconds)
        return result


class Touch:
    """A fault that leaves a file, to show that it was reached; the file holds the pid."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = os.fspath(path)

    def __call__(self, result: Any) -> Any:
        Path(self.path).write_text(str(os.getpid()))
        return result


class ForkAndLinger:
    """A fault that forks, and whose copy returns, or raises, only when there is a file named ``go``."""

    def __init__(self, folder: Path, raises: bool) -> None:
        self.folder, self.raises = folder, raises

    def __call__(self, result: Any) -> Any:
        if copy := os.fork():
            (self.folder / "copy").write_text(str(copy))
            return result
        deadline = time.monotonic() + 20.0
        while not (self.folder / "go").exists() and time.monotonic() < deadline:
            time.sleep(0.01)
        if self.raises:
            sys.exit(0)
        return result


class Chain:
    """Several faults, one after the other."""

    def __init__(self, *faults: str | faulty.Fault) -> None:
        self.faults = [FAULTS[fault] if isinstance(fault, str) else fault for fault in faults]

    def __call__(self, result: Any) -> Any:
        for fault in self.faults:
            result = fault(result)
        return result


def Announce(path: str | os.PathLike[str], fault: str | faulty.Fault) -> Chain:  # noqa: N802 - reads as a class
    """Leave a file, then go wrong."""
    return Chain(Touch(path), fault)


# --- the ledger ---------------------------------------------------------------------------------


class Ledger:
    """Knows what every witness must say next, and compares.

    It keeps, per environment, what its last row said, and derives the next one from the call that was made.
    Anything a vector environment can get wrong about *which* answer belongs to which question shows up as a
    difference.
    """

    def __init__(self, count: int, *, length: int, mode: AutoresetMode = AutoresetMode.NEXT_STEP) -> None:
        self.count = count
        self.length = length
        self.mode = mode
        self.rows: list[dict[str, int] | None] = [None] * count
        self.done = [False] * count
        self.reborn = [False] * count
        self.lives: set[int] = set()

    @classmethod
    def of(cls, envs: Any, *, seed: int = 1, **how: Any) -> Ledger:
        """Reset an engine, and write down what came of that."""
        ledger = cls(envs.num_envs, **{"length": 10, **how})
        ledger.reset(envs.reset(seed=seed), seeds=[seed + env for env in range(envs.num_envs)])
        return ledger

    def reset(
        self,
        answer: tuple[Any, dict[str, Any]],
        *,
        seeds: list[int | None] | None = None,
        mask: np.ndarray | None = None,
        rebuilt: set[int] | frozenset[int] = frozenset(),
    ) -> None:
        """Check a reset's answer. ``rebuilt``: environments that must come back with a new life."""
        observations, infos = answer
        restarted = infos.get("_restarted", np.zeros(self.count, dtype=bool))
        for env in range(self.count):
            row, last = WitnessEnv.read(observations[env]), self.rows[env]
            if mask is not None and not mask[env]:
                assert last is not None
                assert row == last, f"env {env} was not to be reset: {last} became {row}"
                assert not infos.get("_tick", np.zeros(self.count))[env]
                continue
            seed = seeds[env] if seeds is not None else None
            if last is None or env in rebuilt or self.reborn[env] or restarted[env]:
                self._meet(env, row)
                wanted = {**row, **_BEGUN} if seed is None else {**row, **_BEGUN, "seed": seed}
            else:
                wanted = self._after_reset(last, seed)
            self._accept(env, row, wanted, "reset")
            self._check_info(env, infos, row)
            self.done[env] = False

    def step(self, actions: Any, answer: tuple[Any, ...]) -> None:
        """Check a step's answer; rows that a restart replaced are checked as such, and adopted."""
        observations, rewards, terminations, truncations, infos = answer
        restarted = infos.get("_restarted", np.zeros(self.count, dtype=bool))
        for env in range(self.count):
            row, last = WitnessEnv.read(observations[env]), self.rows[env]
            assert last is not None
            flags = (bool(terminations[env]), bool(truncations[env]))
            where = f"env {env}, action {actions[env]}, last row {last}"
            if restarted[env]:
                self._check_restarted(env, row, last, float(rewards[env]), flags, infos)
                continue
            if self.mode is AutoresetMode.NEXT_STEP and self.done[env]:
                if self.reborn[env]:
                    self._meet(env, row)
                    assert row["seed"] not in (-1, last["seed"]), f"{where}: a restart needs a fresh seed"
                    wanted = {**row, **_BEGUN}
                else:
                    wanted = self._after_reset(last, None)
                assert (float(rewards[env]), flags) == (0.0, (False, False)), where
                self.done[env] = False
            elif self.reborn[env]:  # stepped in disabled mode without a reset: a new episode has begun all the same
                self._meet(env, row)
                wanted = self._after_step({**row, **_BEGUN, "steps": 0}, int(actions[env]))
                assert flags == (False, False)
            else:
                wanted = self._after_step(last, int(actions[env]))
                done = wanted["tick"] >= self.length
                even = wanted["episode"] % 2 == 0
                assert flags == (done and even, done and not even), f"{where}: flags {flags}, wanted {wanted}"
                assert rewards[env] == wanted["tick"] + wanted["actions"] / 1024, where
                self.done[env] = done
                if done and self.mode is AutoresetMode.SAME_STEP:
                    final = WitnessEnv.read(infos["final_obs"][env])
                    assert final == wanted, f"{where}: final_obs {final}"
                    assert infos["_final_obs"][env]
                    assert infos["final_info"]["tick"][env] == wanted["tick"], where
                    wanted, self.done[env] = self._after_reset(wanted, None), False
            self._accept(env, row, wanted, where)
            self._check_info(env, infos, row)

    def resume(self, env: int, row: Any) -> None:
        """Take a row as it is: for an environment whose answer was lost with an exception of its sibling's."""
        new, last = WitnessEnv.read(row), self.rows[env]
        assert last is None or new["life"] == last["life"], f"env {env} is not the same any more"
        self.rows[env] = new

    def _check_restarted(
        self, env: int, row: dict[str, int], last: dict[str, int], reward: float, flags: tuple[bool, bool], infos: Any
    ) -> None:
        assert reward == 0.0
        assert flags == (False, True), f"a lost step is truncated, not {flags}"
        assert infos["restarted"][env]
        final = WitnessEnv.read(infos["final_obs"][env])
        assert final == last, f"env {env}: final_obs must be the last good row {last}, not {final}"
        if self.mode is AutoresetMode.SAME_STEP:  # the row is the new environment's first
            self._meet(env, row)
            self._accept(env, row, {**row, **_BEGUN}, "restart")
            assert row["seed"] not in (-1, last["seed"]), f"env {env}: a restart needs a fresh seed"
            self._check_info(env, infos, row)
        else:  # the row is the old one's last, as at the end of any episode; the new one's first comes next
            assert row == last, f"env {env}: the row of a lost step must be the last good one {last}, not {row}"
            self.done[env] = self.reborn[env] = True

    def _meet(self, env: int, row: dict[str, int]) -> None:
        """A new life: nobody has seen it, and it has only just begun."""
        assert row["life"] not in self.lives, f"env {env}: this life was seen before"
        assert row["witness_id"] == env
        assert row["episode"] in (1, 2)
        assert row["steps"] == row["tick"] <= 1
        self.lives.add(row["life"])
        self.reborn[env] = False

    def _accept(self, env: int, row: dict[str, int], wanted: dict[str, int], where: str) -> None:
        assert row == wanted, f"env {env}: {where}\n  wanted {wanted}\n  got    {row}"
        self.rows[env] = row

    def _check_info(self, env: int, infos: dict[str, Any], row: dict[str, int]) -> None:
        for key in ("witness_id", "episode", "tick"):
            assert infos[f"_{key}"][env]
            assert infos[key][env] == row[key], f"env {env}: info {key} is {infos[key][env]}, the row says {row}"
        has = bool(infos.get("_last_action", np.zeros(self.count))[env])
        assert has == (row["tick"] % 3 == 2)
        assert not has or infos["last_action"][env] == row["last_action"]

    @staticmethod
    def _after_reset(last: dict[str, int], seed: int | None) -> dict[str, int]:
        seeded = last["seed"] if seed is None else seed
        return {**last, **_BEGUN, "episode": last["episode"] + 1, "seed": seeded}

    @staticmethod
    def _after_step(last: dict[str, int], action: int) -> dict[str, int]:
        return {
            **last,
            "tick": last["tick"] + 1,
            "steps": last["steps"] + 1,
            "last_action": action,
            "actions": last["actions"] + action,
        }


_BEGUN = {"tick": 0, "last_action": -1, "actions": 0}
