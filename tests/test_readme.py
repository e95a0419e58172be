"""Every Python block of README.md and docs/ runs as it stands, and the README's commands are the ones that CI runs."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("**/*.md"))]
BLOCK = re.compile(r"^```python\n(.*?)^```", re.DOTALL | re.MULTILINE)
MISSING = re.compile(r"ModuleNotFoundError: No module named '([\w.]+)'\s*\Z")


def blocks() -> list[object]:
    found = []
    for page in PAGES:
        text = page.read_text()
        for match in BLOCK.finditer(text):
            line = text.count("\n", 0, match.start()) + 1
            compiles = "vecenv.jax" in match.group(1) or "JaxVectorEnv" in match.group(1)  # for 20 s and more
            marks = [pytest.mark.slow] if compiles else []
            found.append(pytest.param(match.group(1), id=f"{page.relative_to(ROOT)}:{line}", marks=marks))
    return found


@pytest.mark.parametrize("block", blocks())
def test_block_runs(block: str, tmp_path: Path) -> None:
    """A block whose optional library is not installed is skipped; everything else must end with exit code 0."""
    script = tmp_path / "block.py"
    script.write_text(block)
    command = [sys.executable, "-W", "error::ResourceWarning", str(script)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=100, check=False)
    missing = MISSING.search(done.stderr)
    if done.returncode and missing and importlib.util.find_spec(missing.group(1).partition(".")[0]) is None:
        pytest.skip(f"needs {missing.group(1)}")
    assert done.returncode == 0, done.stderr[-3000:]


def test_readme_gives_the_two_commands() -> None:
    lines = (ROOT / "README.md").read_text().splitlines()
    assert 'pip install -e ".[bench]" && vecenv bench CartPole-v1 --num-envs 64' in lines
    assert 'pip install -e ".[test]" && pytest' in lines
