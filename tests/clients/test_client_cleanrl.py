"""A program in the style of CleanRL prints the same results if it imports Gymnasium's class instead of vecenv's."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from programs import EXAMPLES, python_output

pytest.importorskip("torch", reason="needs torch: pip install 'vecenv[clients]'")

EXAMPLE = EXAMPLES / "cleanrl_ppo.py"
OURS, THEIRS = "from vecenv import AsyncVectorEnv\n", "from gymnasium.vector import AsyncVectorEnv\n"


def output_lines(program: Path, *arguments: str, timeout: float = 100) -> list[str]:
    return python_output("-W", "error::ResourceWarning", program, *arguments, timeout=timeout).splitlines()


def test_program_prints_equal_results_with_gymnasiums_import(tmp_path: Path) -> None:
    source = EXAMPLE.read_text()
    assert source.count(OURS) == 1
    assert "vecenv" not in source.replace(OURS, "").partition('"""\n\n')[2]  # except in its docstring
    gymnasium_program = tmp_path / "cleanrl_ppo.py"
    gymnasium_program.write_text(source.replace(OURS, THEIRS))
    short = ("--steps", "2048", "--num-envs", "4", "--epochs", "2")
    ours, theirs = output_lines(EXAMPLE, *short), output_lines(gymnasium_program, *short)
    assert ours[:-1] == theirs[:-1]  # the last line contains its duration
    assert re.fullmatch(r"\s+2048 steps, mean return of the last 100 episodes \d+\.\d{6}", ours[-2])


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_program_learns_cartpole() -> None:
    mean_return_line = output_lines(EXAMPLE, timeout=880)[-2]
    assert float(mean_return_line.split()[-1]) >= 450
