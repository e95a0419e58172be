"""Signals at random moments: a timer with a handler that raises, and Ctrl-C. Nothing is wrong afterwards and nothing hangs.

Each test runs ``at_random.py`` and prints its figures (``pytest -rP`` shows them). By default 40
trials of each call; ``pytest -m slow`` makes it 1,000, in all configurations; ``VECENV_TRIALS`` sets another number,
``VECENV_SEED`` other moments.
"""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest
from interrupted_calls import CALLS, SETTINGS
from observe import last_line
from sampling import each_once
from streams import FIRST_READY

PROGRAM = Path(__file__).with_name("at_random.py")
TRIALS = os.environ.get("VECENV_TRIALS")
slow = [pytest.mark.slow, pytest.mark.timeout(7200, method="signal")]
pytestmark = pytest.mark.timeout(300, method="signal")


def run_program(kind: str, setting: str, trials: int, calls: tuple[str, ...], limit: float) -> None:
    """Run the program, end it after ``limit`` seconds with all that it started, and assert that nothing was wrong."""
    seed = os.environ.get("VECENV_SEED", str(random.randrange(10**6)))
    asked = int(TRIALS or trials)
    found = last_line(PROGRAM, kind, setting, asked, seed, *calls, within=limit)
    report = []
    for call, figures in found.items():
        report.append(
            f"{setting}, {call}, {kind}: {figures['trials']} trials, {figures['raised']} interrupted, "
            f"{figures['wrong']} wrong, {figures['hung']} hung, {figures['excused']} failed as they may"
        )
        report += [f"    {text}" for text in figures["texts"]]
    print("\n".join(report))
    assert not any(figures["wrong"] or figures["hung"] for figures in found.values()), f"seed {seed}\n" + "\n".join(report)
    raised = sum(figures["raised"] for figures in found.values())
    # The program makes more trials until a tenth of them was interrupted in time, up to a limit: on a busy machine a call
    # of microseconds is over before most signals arrive. A tenth shows that the signals do interrupt calls.
    assert raised >= asked / 10, f"only {raised} signals came in time"


@pytest.mark.long
@pytest.mark.parametrize(
    ("setting", "kind"), each_once(["one worker", "caller's share", "list actions", "restart"], ["ALARM", "SIGINT"])
)
def test_calls(setting: str, kind: str) -> None:
    run_program(kind, setting, 40, ("step", "reset", "call", "set_attr"), 200)


@pytest.mark.long
@pytest.mark.parametrize("kind", ["ALARM", "SIGINT"])
def test_first_ready(kind: str) -> None:
    run_program(kind, "two of four", 40, ("send", "recv", "reset_async"), 200)


@pytest.mark.long
@pytest.mark.parametrize("kind", ["ALARM", "SIGINT"])
def test_close(kind: str) -> None:
    run_program(kind, "two workers", 20, ("close",), 200)


@pytest.mark.parametrize("kind", ["ALARM", "SIGINT"])
@pytest.mark.parametrize("setting", [pytest.param(name, marks=slow) for name in SETTINGS])
def test_a_thousand_of_each_call(setting: str, kind: str) -> None:
    run_program(kind, setting, 1000, (*CALLS, "close"), 7000)


@pytest.mark.parametrize("kind", ["ALARM", "SIGINT"])
@pytest.mark.parametrize("setting", [pytest.param(name, marks=slow) for name in FIRST_READY])
def test_a_thousand_batches(setting: str, kind: str) -> None:
    run_program(kind, setting, 1000, ("send", "recv", "reset_async"), 7000)
