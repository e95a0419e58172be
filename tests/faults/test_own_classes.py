"""What a program defines in its main file comes back from its environments as that, not as a copy."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from observe import FAULTS

pytestmark = FAULTS

PROGRAM = Path(__file__).parent / "own_classes.py"


def findings(method: str, engine: str) -> dict[str, str]:
    done = subprocess.run(
        [sys.executable, PROGRAM, method, engine], check=False, capture_output=True, text=True, timeout=120
    )
    assert not done.returncode, done.stdout + done.stderr
    return dict(line.split(": ", 1) for line in done.stdout.splitlines())


@pytest.mark.long
def test_classes_of_the_program_are_its_own(method: str) -> None:
    """``except MyError`` around a call catches what an environment raises; and so on for all that travels."""
    found = findings(method, "vecenv")
    assert len(found) == 14, found  # every line of the program
    assert set(found.values()) == {"True"}, found


def test_they_are_under_fork_what_they_are_with_gymnasiums_engine() -> None:
    """Under other start methods its engine hangs, or refuses them."""
    theirs, ours = findings("fork", "gymnasium"), findings("fork", "vecenv")
    assert set(theirs.values()) == {"True"}, theirs
    assert {name: ours[name] for name in theirs} == theirs
