"""Helpers that import or run programs outside of the package, such as those in ``examples/``."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
_WITHOUT = Path(__file__).with_name("without.py")


@contextmanager
def import_program(program: Path) -> Iterator[Any]:
    """Import a program as a module. Inside the block, the program can also import from its folder."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(program.parent))
        yield importlib.import_module(program.stem)


def run_python(
    *arguments: str | Path, cwd: Path | None = None, timeout: float = 250, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Run Python with these arguments, and with ``variables`` added to the environment variables of this process."""
    return subprocess.run(
        [sys.executable, *map(str, arguments)], cwd=cwd, env={**os.environ, **variables}, timeout=timeout, check=False,
        stdin=subprocess.DEVNULL, capture_output=True, text=True,
    )  # fmt: skip


def python_output(*arguments: str | Path, **kwargs: Any) -> str:
    """Run Python like :func:`run_python`, check that it succeeds, and return its output."""
    result = run_python(*arguments, **kwargs)
    assert result.returncode == 0, result.stdout + result.stderr[-3000:]
    return result.stdout


def check_missing_library(program: str, library: str, extra: str) -> None:
    """Check that the error of an example without one of its libraries names the command that installs the library."""
    requirement = "torch (CPU build: pytorch.org)" if library == "torch" else f"-e '.[{extra}]'"
    result = run_python(_WITHOUT, library, EXAMPLES / f"{program}.py")
    expected = f"{program}: No module named {library!r}: pip install {requirement}"
    assert (result.returncode, result.stderr.splitlines()[-1]) == (1, expected)
    assert "Traceback" not in result.stderr


def check_help(program: str, *texts: str) -> None:
    """Check that the help text of an example contains its command and these texts."""
    output = python_output(EXAMPLES / f"{program}.py", "--help")
    for text in (f"python examples/{program}.py", *texts):
        assert text in output
