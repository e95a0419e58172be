"""``examples/tree_search.py``: a tree that branches from snapshots is the one that comes of replaying, for fewer steps."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).parents[2] / "examples" / "tree_search.py"


@pytest.mark.long
def test_both_searches_make_the_same_moves_and_snapshots_need_fewer_steps() -> None:
    options = ["CartPole-v1", "--moves=20", "--expansions=4", "--horizon=8", "--num-workers=2"]
    options.append("--by=snapshots,replay,frozen")
    ran = subprocess.run([sys.executable, PROGRAM, *options], check=True, capture_output=True, text=True, timeout=300)
    said = ran.stdout
    by_snapshots, by_replay, by_copies = (int(steps.replace(",", "")) for steps in re.findall(r"([\d,]+) steps of", said))
    assert re.search(r"snapshots +20 moves, score 20:", said)
    assert said.count("the same moves") == 2
    assert by_snapshots <= 20 * 4 * 9 * 2 < by_replay
    assert by_copies == by_snapshots
