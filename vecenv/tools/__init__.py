"""Helpers for the commands: exit codes, errors about unknown names and missing libraries, and a progress bar."""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import re
import shutil
import sys
import textwrap
from collections.abc import Callable, Iterator, Sequence
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
    "did_you_mean",
    "import_module_or_exit",
    "missing_arguments_hint",
    "one_line",
    "progress_bar",
    "require",
    "wrap_to_terminal",
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


def did_you_mean(name: str, known_names: Sequence[str]) -> str:
    close = difflib.get_close_matches(name, known_names, n=3, cutoff=0.6)
    return f"; did you mean {' or '.join(close)}?" if close else ""


def one_line(error: BaseException) -> str:
    """Format the class of an error and the first line of its text."""
    first = (str(error).strip().splitlines() or [""])[0]
    return f"{type(error).__name__}: {first}"


def wrap_to_terminal(text: str) -> str:
    """Wrap the lines of a text at the width of the terminal; without a terminal, leave them as they are."""
    width = max(shutil.get_terminal_size(fallback=(sys.maxsize, 0)).columns, 40)

    def fit(line: str) -> str:
        indent = " " * (len(line) - len(line.lstrip()) + 2)
        return textwrap.fill(line, width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)

    return "\n".join(fit(line) if len(line) > width else line for line in text.splitlines())


def missing_arguments_hint(error: str) -> str:
    """Return a hint for the text of a ``TypeError`` about missing arguments, or ``""`` for any other error."""
    if "TypeError" in error and re.search(r"missing \d+ required", error):
        return "; module:name is called without arguments: write a function in that module that passes them"
    return ""


def require(command: str, *libraries: str) -> None:
    """Raise :class:`CliError` if one of these libraries is missing. The extra ``bench`` installs them."""
    for library in libraries:
        if importlib.util.find_spec(library) is None:
            raise CliError(f"vecenv {command} needs {library}: {how_to_install('bench')}")


def import_module_or_exit(name: str, description: str = "") -> ModuleType:
    """Import a module, which may be in the current folder. In the error, ``description`` follows the module's name."""
    if "" not in sys.path:
        sys.path.insert(0, "")  # console scripts start without the current folder on the path
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise CliError(f"cannot import {name!r}{description}: {error}") from None


@contextmanager
def progress_bar() -> Iterator[Progress]:
    """Show a progress bar on stderr, so that stdout holds only results. Without a terminal, print a line per stage."""
    from rich.console import Console
    from rich.progress import BarColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as Bar

    console = Console(stderr=True)
    columns = (BarColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    if not console.is_terminal:
        yield _make_stage_printer()
        return
    with Bar(*columns, console=console, transient=True) as bar:
        task = bar.add_task("starting", total=None)  # the bar pulses until the total is known
        yield lambda stage, done, total: bar.update(task, description=stage, completed=done, total=total or None)


def _make_stage_printer() -> Progress:
    """Return a function that prints each stage with a known total once on stderr, so that logs show progress."""
    printed = ""

    def show(stage: str, done: int, total: int) -> None:
        nonlocal printed
        if total and stage != printed:
            print(stage, file=sys.stderr, flush=True)
            printed = stage

    return show
