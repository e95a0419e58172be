"""``python -m bench waits`` and ``episodes``: every row that can run here does, and counts what it says."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
import pytest

from bench import waits

PACE: dict[str, Any] = {"seconds": 0.05, "repeats": 1}
HERE = ("per-env", "first-ready-per-env", "deadline", "threads", "gym-sync")


@pytest.mark.long
def test_every_way_to_wait_is_measured() -> None:
    report = waits.waits("free-resets", 4, 2, PACE, HERE)
    assert [row.name for row in report.rows] == ["per-env", "first-ready-per-env", "deadline", "threads", "gym-sync"]
    assert all(row.rates[0] > 0 for row in report.rows)


@pytest.mark.long
def test_spare_workers_are_measured_by_resets_that_cost_nothing_and_with_their_memory() -> None:
    memory: dict[str, Any] = {}
    report = waits.waits("long-resets", 2, 1, PACE, ("per-env", "spares-2", "free"), memory)
    assert [row.name for row in report.rows] == ["per-env", "spares-2", "free"]
    assert all(row.rates[0] > 0 for row in report.rows), [row.failed for row in report.rows]
    assert [memory[name].processes for name in ("per-env", "spares-2", "free")] == [2, 4, 2]


@pytest.mark.long
def test_a_list_of_episodes_is_run_in_every_way() -> None:
    report = waits.episodes(2, PACE, ("evaluate", "batches", "gym-sync"))
    assert [row.name for row in report.rows] == ["evaluate", "batches", "gym-sync"]
    assert all(row.rates[0] > 0 for row in report.rows)


@pytest.mark.parametrize("name", waits.WAITS)
def test_the_workloads_are_environments(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[float] = []
    monkeypatch.setattr("time.sleep", waited.append)
    env: gymnasium.Env[Any, Any] = waits.WAITS[name].prepare()()
    observation, _ = env.reset(seed=1)
    assert observation in env.observation_space
    for _ in range(3):
        observation, *_ = env.step(np.int64(0))
    assert observation in env.observation_space
    assert max(waited) > 0
    assert (waited[0] == 0.2) == (name == "long-resets")
    env.close()
