"""``examples/ppo.py --resume``: killed at any moment and called again, it says number for number what it would have said."""

from __future__ import annotations

import os
import pickle
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from vecenv.testing import assert_identical

PROGRAM = Path(__file__).parents[2] / "examples" / "ppo.py"
STEPS = 1280
OPTIONS = [
    "--num-envs=4", "--rollout=32", f"--steps={STEPS}", "--epochs=1", "--minibatches=1", "--hidden=8", "--backend=serial",
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


def steps_of(folder: Path) -> int:
    """How many had been made at the checkpoint; 0: there is none."""
    try:
        return int(outcome(folder)["steps"])
    except FileNotFoundError:
        return 0


@pytest.mark.long
@pytest.mark.timeout(600)
def test_what_a_kill_leaves_goes_on_as_the_run_that_was_not_killed(tmp_path: Path) -> None:
    """A run is stopped in the middle, its files are copied as SIGKILL would leave them, and it goes on; so does the copy."""
    for number in range(3):
        whole, copy = tmp_path / f"whole {number}", tmp_path / f"copy {number}"
        run = started(whole)
        while not steps_of(whole) and run.poll() is None:
            time.sleep(0.002)
        run.send_signal(signal.SIGSTOP)
        shutil.copytree(whole, copy)
        run.send_signal(signal.SIGCONT)
        if steps_of(copy) < STEPS:
            break
        run.wait()  # it was over before it was stopped
    resumed = started(copy)
    assert [run.wait(), resumed.wait()] == [0, 0]
    assert 0 < steps_of(whole) == STEPS
    assert_identical(outcome(copy), outcome(whole))


STATE_PAGE = Path(__file__).parents[2] / "docs" / "state.md"
INTERRUPTED = """
import os, signal, vecenv
made, step = [], vecenv.AsyncVectorEnv.step
def interrupted(self, actions):
    made.append(actions)
    if len(made) == 1000:
        os.kill(os.getpid(), signal.SIGINT)
    return step(self, actions)
vecenv.AsyncVectorEnv.step = interrupted
"""


def test_the_program_that_saves_on_ctrl_c_goes_on_as_if_there_had_been_none(tmp_path: Path) -> None:
    """The one in ``docs/state.md``."""
    blocks = re.findall(r"```python\n(.*?)```", STATE_PAGE.read_text(), re.DOTALL)
    (program,) = (block for block in blocks if "SIGINT" in block)

    def said(source: str, folder: str) -> str:
        (tmp_path / folder).mkdir(exist_ok=True)
        script = tmp_path / folder / "program.py"
        script.write_text(source)
        command = [sys.executable, str(script)]
        return subprocess.run(command, cwd=script.parent, capture_output=True, text=True, timeout=250, check=True).stdout

    whole = said(program, "whole")
    assert said(INTERRUPTED + program, "broken") == "saved; run it again to go on\n"
    assert said(program, "broken") == whole != ""
    assert not (tmp_path / "broken" / "run.pickle").exists()
