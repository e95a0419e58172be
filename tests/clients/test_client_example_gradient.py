"""``examples/torchrl_gradient.py``: a policy that learns only from the gradient through the physics."""

from __future__ import annotations

import re

import pytest
from programs import EXAMPLES, python_output

pytest.importorskip("torchrl", reason="needs TorchRL: pip install 'vecenv[clients]'")
pytest.importorskip("brax", reason="needs Brax: pip install 'vecenv[brax]'")


@pytest.mark.long
@pytest.mark.timeout(580)
def test_policy_keeps_the_pole_upright_longer_after_training() -> None:
    output = python_output(EXAMPLES / "torchrl_gradient.py", timeout=560)
    lengths = {when: int(steps) for when, steps in re.findall(r"(before|after): (\d+) of 200 steps", output)}
    assert lengths["before"] < 40
    assert lengths["after"] > 2 * lengths["before"]
