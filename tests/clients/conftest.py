"""Other libraries' own programs over vecenv. They need torch, so this folder runs only if it is named, by itself.

pip install -e ".[clients]" && pytest tests/clients

Torch starts threads that make every later fork of the process unsafe, and the other tests fork.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent


class LeftOut(pytest.Module):
    """A test module that is not imported."""

    def __init__(self, *, why: str, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._why = why

    def collect(self) -> Any:
        pytest.skip(self._why, allow_module_level=True)


def pytest_pycollect_makemodule(module_path: Path, parent: Any) -> Any:
    invocation = parent.config.invocation_params
    named = [Path(invocation.dir, argument.partition("::")[0]).resolve() for argument in parent.config.args]
    if importlib.util.find_spec("torch") is None:
        return LeftOut.from_parent(parent, path=module_path, why="needs torch: pip install 'vecenv[clients]'")
    if not any(path.is_relative_to(HERE) for path in named):
        return LeftOut.from_parent(parent, path=module_path, why="brings torch: run it by name, pytest tests/clients")
    return None


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> None:
    """Use one thread: tiny networks are fastest with it, and sums have the same order every time."""
    import torch

    torch.set_num_threads(1)
