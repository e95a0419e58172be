"""``examples/torchrl_gradients.py``: returns like those of a loop; it learns: a cart at once, Brax when slow."""

from __future__ import annotations

import importlib
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torchrl", reason="needs TorchRL: pip install 'vecenv[clients]'")
pytest.importorskip("jaxlib", reason="needs JAX: pip install 'vecenv[jax]'")

import jax
import jax.numpy as jnp
import torch
from carts import Cart
from tensordict import TensorDict
from torchrl.modules import ValueOperator

import vecenv.torch

EXAMPLE = Path(__file__).parents[2] / "examples" / "torchrl_gradients.py"


@pytest.fixture(scope="module")
def example() -> Iterator[Any]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(EXAMPLE.parent))
        yield importlib.import_module("torchrl_gradients")


class Away(Cart):
    """Loses the square of its distance from 0."""

    max_episode_steps = 12

    def init(self, key: Any) -> Any:
        place = jax.random.uniform(key, minval=-1.0)
        return place, jnp.stack([place, place])

    def moved(self, place: Any, push: Any) -> Any:
        return place + 0.3 * push

    def paid(self, place: Any) -> Any:
        return -(place**2)


@pytest.mark.long
def test_it_learns_to_bring_a_cart_back(example: Any, capsys: pytest.CaptureFixture[str]) -> None:
    args = example.arguments(["--episode", "12", "--horizon", "5", "--updates", "40", "--learning-rate", "1e-2"])
    points = example.train(vecenv.torch.TensorDictEnv(Away(), (16,), requires_grad=True), args)
    assert len(points) == 11
    assert points[-1] > points[0] / 3  # both are below 0
    assert capsys.readouterr().out.count("mean return") == 11


def test_returns_are_those_of_a_loop(example: Any) -> None:
    torch.manual_seed(0)
    critic = ValueOperator(torch.nn.Linear(1, 1))
    done = torch.tensor([[0, 1, 0, 0], [0, 0, 1, 0], [0, 0, 0, 1]], dtype=torch.bool).unsqueeze(-1)
    terminated = done & torch.tensor([[True], [False], [True]]).unsqueeze(-1)
    step = {"observation": torch.randn(3, 4, 1), "reward": torch.randn(3, 4, 1), "done": done, "terminated": terminated}
    data = TensorDict({"next": step}, batch_size=[3, 4])
    found = example.returns(data, critic, 0.9).detach()
    value = critic.module(step["observation"]).detach()
    for row in range(3):
        for start in range(4):
            total, weight = 0.0, 1.0
            for t in range(start, 4):
                total += weight * float(step["reward"][row, t])
                weight *= 0.9
                if done[row, t] or t == 3:
                    total += weight * float(value[row, t]) * (not terminated[row, t])
                    break
            assert float(found[row, start]) == pytest.approx(total, abs=1e-5)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_it_learns_to_reach() -> None:
    pytest.importorskip("brax", reason="needs Brax: pip install 'vecenv[brax]'")
    done = subprocess.run(
        [sys.executable, str(EXAMPLE)], stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=1700, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    points = [float(number) for number in re.findall(r"mean return (-?[\d.]+)", done.stdout)]
    assert len(points) == 11
    assert max(points[-3:]) > points[0] / 2  # both are below 0
