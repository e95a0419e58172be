"""``python without.py LIBRARY PROGRAM [ARGUMENT ...]``: run a program as if a library were not installed."""

from __future__ import annotations

import runpy
import sys
from typing import Any


class HiddenLibrary:
    """A module finder that raises for one library as if it were not installed."""

    def __init__(self, library: str) -> None:
        self.library = library

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
        if name == self.library:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


if __name__ == "__main__":
    library, program = sys.argv[1:3]
    del sys.argv[:2]
    sys.meta_path.insert(0, HiddenLibrary(library))  # type: ignore[arg-type]
    sys.path[0] = program.rpartition("/")[0]
    runpy.run_path(program, run_name="__main__")
