"""``examples/openrl_spread.py`` runs, computes advantages that match their definition, and learns."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
from programs import EXAMPLES, import_program, python_output

pytest.importorskip("torch", reason="needs torch: pip install 'vecenv[clients]'")
pytest.importorskip("mpe2", reason="needs MPE: pip install mpe2")

import torch

EXAMPLE = EXAMPLES / "openrl_spread.py"
LINE = re.compile(r"\s+(\d+) steps, mean return of the last 5 updates (-\d+\.\d{3})")


@pytest.fixture(scope="module")
def example() -> Iterator[Any]:
    with import_program(EXAMPLE) as module:
        yield module


def run_example(*arguments: str, timeout: float) -> list[tuple[int, float]]:
    """Return the number of steps and the mean return in each line that the example prints."""
    output = python_output("-W", "error::ResourceWarning", EXAMPLE, *arguments, timeout=timeout)
    return [(int(steps), float(mean_return)) for steps, mean_return in LINE.findall(output)]


def test_advantages_equal_their_definition(example: Any) -> None:
    torch.manual_seed(0)
    rewards, values = torch.randn(2, 5, 3, 2)
    next_values = torch.cat([values[1:], torch.zeros(1, 3, 2)])  # 0 after the end of an episode
    deltas = rewards + 0.9 * next_values - values
    expected = torch.stack([sum((0.9 * 0.8) ** k * deltas[t + k] for k in range(5 - t)) for t in range(5)])
    torch.testing.assert_close(example.advantages(rewards, values, 0.9, 0.8), expected)


@pytest.mark.long
@pytest.mark.parametrize("num_workers", ["0", "2"])
def test_example_prints_a_line_per_100_steps(num_workers: str) -> None:
    lines = run_example("--num-envs", "4", "--steps", "200", "--workers", num_workers, timeout=250)
    assert [steps for steps, _ in lines] == [100, 200]


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_example_learns() -> None:
    mean_returns = [mean_return for _, mean_return in run_example(timeout=1700)]
    assert len(mean_returns) == 100
    assert mean_returns[-1] > 0.8 * mean_returns[4]  # both are below 0
