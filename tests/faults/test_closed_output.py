"""Programs that are started without standard input, output or error."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from observe import FAULTS

pytestmark = [*FAULTS, pytest.mark.linux]

PROGRAM = Path(__file__).parent / "closed_output.py"


@pytest.mark.long
@pytest.mark.parametrize("closed", [">&-", "2>&-", "<&-", ">&- 2>&- <&-"])
def test_a_program_without_standard_descriptors(method: str, closed: str, tmp_path: Path) -> None:
    """Workers end cleanly, and nothing that is printed gets into a message or into shared memory."""
    log = tmp_path / "log"
    command = f'exec "$0" "$1" {method} "$2" {closed}'
    shell = ["sh", "-c", command, sys.executable, PROGRAM, log]
    done = subprocess.run(shell, check=False, capture_output=True, text=True, timeout=120)
    assert not done.returncode, done.stderr
    assert "Traceback" not in done.stderr
    assert set(log.read_text()) <= set("[0, ]"), log.read_text()
