"""``examples/agent_pool.py``, with games that kill their workers: every game comes to an end."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).parents[2] / "examples" / "agent_pool.py"


@pytest.mark.long
@pytest.mark.parametrize("crash", [0.0, 0.02])
def test_every_game_is_played(crash: float) -> None:
    pytest.importorskip("rich", reason="needs pip install 'vecenv[examples]'")
    options = ["--episodes=60", "--size=12", "--workers=3", f"--crash={crash}"]
    ran = subprocess.run([sys.executable, PROGRAM, *options], capture_output=True, text=True, timeout=200, check=False)
    assert ran.returncode == 0, ran.stderr[-3000:]
    assert re.search(r"60 games in [\d.]+ s: mean return [\d.]+,", ran.stdout), ran.stdout
    assert "100%" in ran.stdout
    restarts = int(re.findall(r"started anew: (\d+)", ran.stdout)[0])
    assert (restarts > 0) == (crash > 0)
