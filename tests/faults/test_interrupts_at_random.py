"""Tests with signals at random moments: Ctrl-C, and SIGALRM with a handler that raises.

Each test runs ``at_random.py`` and prints its counts (``pytest -rP`` shows them). It makes 20 or 40 trials of each call, or
1,000 if it is marked ``slow``. ``VECENV_TRIALS`` sets another number, and ``VECENV_SEED`` the seed of the random moments.
"""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest
from interrupted_calls import CALLS, SETTINGS
from observe import run_json_program
from sampling import each_once
from streams import FIRST_READY

PROGRAM = Path(__file__).with_name("at_random.py")
TRIALS = os.environ.get("VECENV_TRIALS")
slow = [pytest.mark.slow, pytest.mark.timeout(7200, method="signal")]
pytestmark = pytest.mark.timeout(300, method="signal")


def check_random_signals(kind: str, setting: str, trials: int, calls: tuple[str, ...], time_limit: float) -> None:
    """Run ``at_random.py`` for at most ``time_limit`` seconds, and check that no result was wrong and no call hung."""
    seed = os.environ.get("VECENV_SEED", str(random.randrange(10**6)))
    trials = int(TRIALS or trials)
    results = run_json_program(PROGRAM, kind, setting, trials, seed, *calls, within=time_limit)
    report = []
    for call, counts in results.items():
        report.append(
            f"{setting}, {call}, {kind}: {counts['trials']} trials, {counts['raised']} interrupted, "
            f"{counts['wrong']} wrong, {counts['hung']} hung, {counts['tolerated']} tolerated failures"
        )
        report += [f"    {text}" for text in counts["texts"]]
    print("\n".join(report))
    assert not any(counts["wrong"] or counts["hung"] for counts in results.values()), f"seed {seed}\n" + "\n".join(report)
    interrupted = sum(counts["raised"] for counts in results.values())
    # On a busy machine, most signals arrive after a call of microseconds has returned. So the program makes more trials,
    # up to a limit, until enough calls were interrupted. Without interrupted calls, this test would prove nothing.
    assert interrupted >= trials / 10, f"only {interrupted} signals arrived during a call"


@pytest.mark.long
@pytest.mark.parametrize(
    ("setting", "kind"), each_once(["one worker", "caller's share", "list actions", "restart"], ["ALARM", "SIGINT"])
)
def test_signals_during_calls_lose_nothing(setting: str, kind: str) -> None:
    check_random_signals(kind, setting, 40, ("step", "reset", "call", "set_attr"), 200)


@pytest.mark.long
@pytest.mark.parametrize("kind", ["ALARM", "SIGINT"])
def test_signals_during_send_and_recv_lose_nothing(kind: str) -> None:
    check_random_signals(kind, "two of four", 40, ("send", "recv", "reset_async"), 200)


@pytest.mark.long
@pytest.mark.parametrize("kind", ["ALARM", "SIGINT"])
def test_signals_during_close_leave_nothing(kind: str) -> None:
    check_random_signals(kind, "two workers", 20, ("close",), 200)


@pytest.mark.parametrize("kind", ["ALARM", "SIGINT"])
@pytest.mark.parametrize("setting", [pytest.param(name, marks=slow) for name in SETTINGS])
def test_thousand_signals_during_any_call_lose_nothing(setting: str, kind: str) -> None:
    check_random_signals(kind, setting, 1000, (*CALLS, "close"), 7000)


@pytest.mark.parametrize("kind", ["ALARM", "SIGINT"])
@pytest.mark.parametrize("setting", [pytest.param(name, marks=slow) for name in FIRST_READY])
def test_thousand_signals_during_send_and_recv_lose_nothing(setting: str, kind: str) -> None:
    check_random_signals(kind, setting, 1000, ("send", "recv", "reset_async"), 7000)
