"""What the commands share: how they end, what they say of a wrong name, and environments by name."""

from __future__ import annotations

import contextlib
import difflib
import importlib
import importlib.util
import sys
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from vecenv.tools.benchmark import EnvFn

__all__ = ["DIED", "INTERRUPTED", "USAGE", "WRONG", "CliError", "did_you_mean", "one_line", "require", "resolve"]

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


def require(command: str, *libraries: str) -> None:
    """Raise if a library is missing that the extra ``bench`` brings."""
    for library in libraries:
        if importlib.util.find_spec(library) is None:
            raise CliError(f"vecenv {command} needs {library}: pip install 'vecenv[bench]'")


def resolve(env_id: str) -> EnvFn:
    """The function that makes this environment; unknown ids name close matches."""
    import gymnasium

    from vecenv.ids import find_spec
    from vecenv.tools.benchmark import make_env

    module, _, name = env_id.rpartition(":")
    if module:
        if "" not in sys.path:
            sys.path.insert(0, "")  # a console script does not look into the current folder
        try:
            found = importlib.import_module(module)
        except ImportError as error:
            raise CliError(f"cannot import {module!r}, the module of {env_id!r}: {error}") from None
        if name in gymnasium.registry or callable(getattr(found, name, None)):
            return partial(make_env, env_id)
    elif name.startswith("ALE/"):
        if importlib.util.find_spec("ale_py") is None:
            raise CliError(f"{env_id} needs ale-py: pip install 'vecenv[bench]'")
        importlib.import_module("ale_py")
    with contextlib.suppress(gymnasium.error.Error):  # without a version: the newest
        name = find_spec(name).id
        env_id = f"{module}:{name}" if module else name
    if name not in gymnasium.registry:
        hint = did_you_mean(name, list(gymnasium.registry))
        raise CliError(f"no environment {env_id!r} is registered{hint or '; other packages: module:Env-v0'}")
    return partial(make_env, env_id)
