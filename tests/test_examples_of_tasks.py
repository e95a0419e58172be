"""``examples/action_chunks.py`` and ``examples/evaluate_tasks.py`` run, print their tables and draw their plots."""

from __future__ import annotations

from pathlib import Path

import pytest
from programs import EXAMPLES, python_output


def _example_output(name: str, folder: Path, *options: str) -> str:
    return python_output(EXAMPLES / name, *options, cwd=folder)


@pytest.mark.long
def test_action_chunks_give_equal_returns_with_fewer_policy_calls(tmp_path: Path) -> None:
    options = ("--horizons", "1", "8", "--episodes", "2", "--num-envs", "2", "--policy-seconds", "0")
    output = _example_output("action_chunks.py", tmp_path, *options)
    rows = [line.replace("│", " ").split() for line in output.splitlines() if line.startswith("│")]
    (_, single_return, single_calls, *_), (_, chunked_return, chunked_calls, *_) = (
        next(row for row in rows if row[0] == horizon) for horizon in ("1", "8")
    )
    assert single_return == chunked_return
    assert int(chunked_calls) <= int(single_calls) / 4
    assert (tmp_path / "action_chunks.png").stat().st_size > 1000


@pytest.mark.long
def test_second_run_of_evaluate_tasks_reuses_the_results_and_prints_the_same_table(tmp_path: Path) -> None:
    pytest.importorskip("minigrid")
    options = ("--episodes", "2", "--num-envs", "4", "--folder", "results", "--tasks", "Empty-5x5", "Empty-Random-6x6")
    first_output, second_output = (_example_output("evaluate_tasks.py", tmp_path, *options) for _ in range(2))
    assert first_output == second_output
    for text in ("Empty-5x5", "Empty-Random-6x6", "all", "95% interval"):
        assert text in first_output
    lines = (tmp_path / "results" / "episodes.jsonl").read_text().splitlines()
    assert len(lines) == 1 + 4
    assert (tmp_path / "evaluate_tasks.png").stat().st_size > 1000
