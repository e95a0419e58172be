"""Helpers for the commands: exit codes, errors, and a progress bar."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Final

from vecenv.errors import how_to_install

__all__ = [
    "DIED",
    "INTERRUPTED",
    "USAGE",
    "WRONG",
    "CliError",
    "Progress",
    "import_module_or_exit",
    "one_line",
    "progress_bar",
    "require",
]  # fmt: skip

WRONG: Final = 1
USAGE: Final = 2
DIED: Final = 3
INTERRUPTED: Final = 130

Progress = Callable[[str, int, int], object]  # called with the stage, the units done, and the units in total (0: unknown)


class CliError(Exception):
    """An error that ends the command with exit code ``code``. Its message, one line except for lists, goes to stderr."""

    def __init__(self, message: str, code: int = USAGE) -> None:
        super().__init__(message)
        self.code = code


def one_line(error: BaseException) -> str:
    """Return the class of an error and the first line of its text."""
    first = (str(error).strip().splitlines() or [""])[0]
    return f"{type(error).__name__}: {first}"


def require(feature: str, *libraries: str, install: str | None = None) -> None:
    """Raise :class:`CliError` if a library is missing. ``install`` is the advice; default: install the extra ``bench``."""
    for library in libraries:
        if importlib.util.find_spec(library) is None:
            raise CliError(f"{feature} needs {library}: {install or how_to_install('bench')}")


def import_module_or_exit(name: str) -> ModuleType:
    """Import a module, which may be in the current folder. Exceptions, even ``SystemExit``, become a :class:`CliError`."""
    if not name or name.startswith("."):
        raise CliError(f"{name!r} is not the full name of a module")
    if "" not in sys.path:
        sys.path.insert(0, "")  # console scripts start without the current folder on the path
    try:
        return importlib.import_module(name)
    except ImportError as error:
        hint = f" (the module in {name} is {name[:-3].replace('/', '.')!r})" if name.endswith(".py") else ""
        raise CliError(f"cannot import {name!r}: {error}{hint}") from None
    except (Exception, SystemExit) as error:
        raise CliError(f"cannot import {name!r}: it raised {one_line(error)}") from None


@contextmanager
def progress_bar() -> Iterator[Progress]:
    """Show a progress bar on stderr, so that stdout holds only results.

    Without a terminal, print a line per stage with a known total.
    """
    from rich.console import Console
    from rich.progress import BarColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as Bar

    console = Console(stderr=True)
    columns = (BarColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    if not console.is_terminal:
        printed: set[str] = set()

        def show(stage: str, done: int, total: int) -> None:
            if total and stage not in printed:
                print(stage, file=sys.stderr, flush=True)
                printed.add(stage)

        yield show
        return
    with Bar(*columns, console=console, transient=True) as bar:
        task = bar.add_task("starting", total=None)  # the bar pulses until the total is known
        yield lambda stage, done, total: bar.update(task, description=stage, completed=done, total=total or None)
