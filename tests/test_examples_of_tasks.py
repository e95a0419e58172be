"""``examples/action_chunks.py`` and ``examples/evaluate_tasks.py`` run, print their tables and draw their plots."""

from __future__ import annotations

from pathlib import Path

import pytest
from programs import EXAMPLES, python_output


def _run(name: str, folder: Path, *options: str) -> str:
    return python_output(EXAMPLES / name, *options, cwd=folder)


@pytest.mark.long
def test_action_chunks_give_equal_returns_with_fewer_policy_calls(tmp_path: Path) -> None:
    options = ("--horizons", "1", "8", "--episodes", "2", "--num-envs", "2", "--policy-seconds", "0")
    shown = _run("action_chunks.py", tmp_path, *options)
    rows = [line.replace("│", " ").split() for line in shown.splitlines() if line.startswith("│")]
    one, eight = (next(row for row in rows if row[0] == horizon) for horizon in ("1", "8"))
    assert one[1] == eight[1]
    assert int(eight[2]) <= int(one[2]) / 4
    assert (tmp_path / "action_chunks.png").stat().st_size > 1000


@pytest.mark.long
def test_evaluate_tasks_prints_its_table_and_the_second_run_reuses_the_results(tmp_path: Path) -> None:
    pytest.importorskip("minigrid")
    options = ("--episodes", "2", "--num-envs", "4", "--folder", "results", "--tasks", "Empty-5x5", "Empty-Random-6x6")
    shown = [_run("evaluate_tasks.py", tmp_path, *options) for _ in range(2)]
    assert shown[0] == shown[1]
    for text in ("Empty-5x5", "Empty-Random-6x6", "all", "95% interval"):
        assert text in shown[0]
    lines = (tmp_path / "results" / "episodes.jsonl").read_text().splitlines()
    assert len(lines) == 1 + 4
    assert (tmp_path / "evaluate_tasks.png").stat().st_size > 1000
