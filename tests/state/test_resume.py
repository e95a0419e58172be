"""``examples/ppo.py --resume``: killed at any moment and called again, it says number for number what it would have said."""

from __future__ import annotations

import os
import pickle
import random
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from vecenv.testing import assert_identical

PROGRAM = Path(__file__).parents[2] / "examples" / "ppo.py"
OPTIONS = [
    "--num-envs=4", "--rollout=32", "--steps=1280", "--epochs=1", "--minibatches=1", "--hidden=8", "--backend=serial",
    "--target=inf", "--resume",
]  # fmt: skip


def started(folder: Path) -> subprocess.Popen[bytes]:
    command = [sys.executable, str(PROGRAM), *OPTIONS, str(folder / "run"), "--out", str(folder / "out")]
    nothing = subprocess.DEVNULL
    return subprocess.Popen(command, env={**os.environ, "JAX_PLATFORMS": "cpu"}, stdout=nothing, stderr=nothing)


def outcome(folder: Path) -> dict[str, Any]:
    """All that the run came to, but for what it needs to load the environments (their statistics tell the time)."""
    with (folder / "run" / "ppo.pickle").open("rb") as file:
        state = pickle.load(file)
    del state["envs"]
    return dict(state)


@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    "tries", [pytest.param(1, marks=pytest.mark.long), pytest.param(20, marks=pytest.mark.slow)]
)
def test_a_run_that_was_killed_goes_on_as_if_it_had_not_been(tries: int, tmp_path: Path) -> None:
    began = time.monotonic()
    assert started(tmp_path).wait() == 0
    whole = time.monotonic() - began
    wanted = outcome(tmp_path)
    chance = random.Random(tries)
    killed = 0
    for number in range(tries):
        folder = tmp_path / str(number)
        run = started(folder)
        time.sleep(whole * chance.uniform(0.4, 0.95))
        run.kill()
        killed += run.wait() != 0
        assert started(folder).wait() == 0
        assert_identical(outcome(folder), wanted, f"run {number}")
    assert killed
