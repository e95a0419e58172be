"""``examples/openrl_spread.py`` runs, its advantages follow their definition, and it learns (slow)."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
from programs import EXAMPLES, imported, printed

pytest.importorskip("torch", reason="needs torch: pip install 'vecenv[clients]'")
pytest.importorskip("mpe2", reason="needs MPE: pip install mpe2")

import torch

EXAMPLE = EXAMPLES / "openrl_spread.py"
LINE = re.compile(r"\s+(\d+) steps, mean return of the last 5 updates (-\d+\.\d{3})")


@pytest.fixture(scope="module")
def example() -> Iterator[Any]:
    with imported(EXAMPLE) as module:
        yield module


def returns(*arguments: str, timeout: float) -> list[tuple[int, float]]:
    """Return steps and mean return of each line that it prints."""
    shown = printed("-W", "error::ResourceWarning", EXAMPLE, *arguments, timeout=timeout)
    return [(int(steps), float(value)) for steps, value in LINE.findall(shown)]


def test_advantages_are_those_of_the_definition(example: Any) -> None:
    torch.manual_seed(0)
    rewards, values = torch.randn(2, 5, 3, 2)
    following = torch.cat([values[1:], torch.zeros(1, 3, 2)])  # nothing follows the end of an episode
    deltas = rewards + 0.9 * following - values
    wanted = torch.stack([sum((0.9 * 0.8) ** k * deltas[t + k] for k in range(5 - t)) for t in range(5)])
    torch.testing.assert_close(example.advantages(rewards, values, 0.9, 0.8), wanted)


@pytest.mark.long
@pytest.mark.parametrize("workers", ["0", "2"])
def test_it_runs(workers: str) -> None:
    found = returns("--num-envs", "4", "--steps", "200", "--workers", workers, timeout=250)
    assert [steps for steps, _ in found] == [100, 200]


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_it_learns() -> None:
    found = [value for _, value in returns(timeout=1700)]
    assert len(found) == 100
    assert found[-1] > 0.8 * found[4]  # both are below 0
