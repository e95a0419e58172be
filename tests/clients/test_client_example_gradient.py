"""``examples/torchrl_gradient.py``: a policy that learns only from the gradient through the physics."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torchrl", reason="needs TorchRL: pip install 'vecenv[clients]'")
pytest.importorskip("brax", reason="needs Brax: pip install 'vecenv[brax]'")

PROGRAM = Path(__file__).parents[2] / "examples" / "torchrl_gradient.py"


@pytest.mark.long
@pytest.mark.timeout(580)
def test_policy_learns_to_keep_the_pole_upright() -> None:
    done = subprocess.run([sys.executable, str(PROGRAM)], capture_output=True, text=True, timeout=560, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    lengths = {when: int(steps) for when, steps in re.findall(r"(before|after): (\d+) of 200 steps", done.stdout)}
    assert lengths["before"] < 40
    assert lengths["after"] > 2 * lengths["before"]
