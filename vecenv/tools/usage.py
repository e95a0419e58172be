"""What the commands share: how they end, what they say about a wrong name, and environments by name."""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import re
import shutil
import sys
import textwrap
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Final

from vecenv.errors import how_to_install

if TYPE_CHECKING:
    from vecenv.tools.runners import EnvFn

__all__ = [
    "DIED", "INTERRUPTED", "USAGE", "WRONG", "CliError", "did_you_mean", "fitted", "hint_of_arguments", "one_line",
    "require", "resolve",
]  # fmt: skip

WRONG: Final = 1
USAGE: Final = 2
DIED: Final = 3
INTERRUPTED: Final = 130


class CliError(Exception):
    """Ends the command with one line on stderr and this exit code."""

    def __init__(self, message: str, code: int = USAGE) -> None:
        super().__init__(message)
        self.code = code


def did_you_mean(word: str, known: Sequence[str]) -> str:
    close = difflib.get_close_matches(word, known, n=3, cutoff=0.6)
    return f"; did you mean {' or '.join(close)}?" if close else ""


def one_line(error: Exception) -> str:
    """The kind of an error and the first line of its text."""
    first = (str(error).strip().splitlines() or [""])[0]
    return f"{type(error).__name__}: {first}"


def fitted(text: str) -> str:
    """The lines of a text, wrapped between words at the width of the terminal; as they are where there is none."""
    width = max(shutil.get_terminal_size(fallback=(sys.maxsize, 0)).columns, 40)

    def fit(line: str) -> str:
        indent = " " * (len(line) - len(line.lstrip()) + 2)
        return textwrap.fill(line, width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)

    return "\n".join(fit(line) if len(line) > width else line for line in text.splitlines())


def hint_of_arguments(error: str) -> str:
    """What to do where a class or function could not be called as it is."""
    if "TypeError" in error and re.search(r"missing \d+ required", error):
        return "; module:name is called without arguments: write a function in that module that gives them"
    return ""


def require(command: str, *libraries: str) -> None:
    """Raise if a library is missing that the extra ``bench`` brings."""
    for library in libraries:
        if importlib.util.find_spec(library) is None:
            raise CliError(f"vecenv {command} needs {library}: {how_to_install('bench')}")


def resolve(env_id: str) -> EnvFn:
    """The function that makes this environment; unknown ids name close matches."""
    import gymnasium

    from vecenv.make import newest_version
    from vecenv.tools.runners import make_env

    module, _, name = env_id.rpartition(":")
    public: list[str] = []
    if module:
        if "" not in sys.path:
            sys.path.insert(0, "")  # a console script does not look into the current folder
        try:
            found = importlib.import_module(module)
        except ImportError as error:
            raise CliError(f"cannot import {module!r}, the module of {env_id!r}: {error}") from None
        if name in gymnasium.registry or callable(getattr(found, name, None)):
            return partial(make_env, env_id)
        if hasattr(found, name):
            shown = textwrap.shorten(repr(getattr(found, name)), 60)
            raise CliError(f"{env_id!r} is {shown}, which cannot be called to build an environment")
        public = [key for key, value in vars(found).items() if callable(value) and not key.startswith("_")]
    elif name.startswith("ALE/"):
        if importlib.util.find_spec("ale_py") is None:
            raise CliError(f"{env_id} needs ale-py: {how_to_install('bench')}")
        importlib.import_module("ale_py")
    newest = newest_version(name)
    if newest is not None:
        name, env_id = newest, f"{module}:{newest}" if module else newest
    if name not in gymnasium.registry:
        hint = did_you_mean(name, [*public, *gymnasium.registry])
        if module:
            raise CliError(f"{module!r} has no {name!r} and registers no environment of that name{hint}")
        raise CliError(f"no environment {env_id!r} is registered{hint or '; other packages: module:Env-v0'}")
    return partial(make_env, env_id)
