"""``vecenv run``: a program as it stands, with vecenv in the place of Gymnasium's engines."""

from __future__ import annotations

import argparse
import atexit
import importlib.util
import io
import os
import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from types import CodeType, ModuleType, TracebackType
from typing import Any, Final

from vecenv.patching import REPORT, install
from vecenv.tools.usage import CliError, one_line

__all__ = ["OPTIONS", "Option", "prepare"]

_DEFAULTS: Final = ("num_workers", "on_failure", "step_timeout", "context", "copy")


def prepare(arguments: argparse.Namespace) -> Callable[[], None]:
    """Check everything, put vecenv in place, and return what runs the program.

    What the program raises, ``SystemExit`` included, comes out of that, and a traceback begins in the program.

    Raises:
        CliError: There is no such program; an option has no meaning.
    """
    words = arguments.program if arguments.module is None else arguments.module
    if not words:
        raise CliError("which program? vecenv run [options] PROGRAM ..., or vecenv run [options] -m MODULE ...")
    start = _file(words[0]) if arguments.module is None else _module(words[0])
    defaults = {name: value for name in _DEFAULTS if (value := getattr(arguments, name)) is not None}
    if defaults["num_workers"] == "each":
        del defaults["num_workers"]
    install(sync=arguments.sync, **defaults)
    if not arguments.quiet:
        replaced = "AsyncVectorEnv and SyncVectorEnv are" if arguments.sync else "AsyncVectorEnv is"
        given = ", ".join(f"{name}={value!r}" for name, value in defaults.items())
        given = given or "one worker for each environment"
        print(f"vecenv run: gymnasium.vector.{replaced} vecenv's ({given})", file=sys.stderr)
        atexit.register(_report, arguments.sync)
    sys.excepthook = _without_us
    sys.argv = list(words)
    return start


def _report(sync: bool) -> None:
    text = str(REPORT)
    if not REPORT.engines and not REPORT.kept:
        text += ": the program never called gymnasium.vector.AsyncVectorEnv"
        text += "" if sync else "; --sync replaces SyncVectorEnv too"
    print(f"vecenv run: {text}", file=sys.stderr)


def _workers(text: str) -> int | str:
    if text in ("auto", "each"):
        return text
    try:
        number = int(text)
    except ValueError:
        number = -1
    if number < 0:
        raise argparse.ArgumentTypeError(f"wants 0 or more, 'auto' or 'each', got {text!r}")
    return number


def _file(name: str) -> Callable[[], None]:
    path, whole = Path(name), Path(name).resolve()
    if not path.is_file():
        raise CliError(f"no such program: {name}" + (" is a folder" if path.is_dir() else ""))
    try:
        with io.open_code(str(whole)) as file:
            source = file.read()
    except OSError as error:
        raise CliError(f"cannot read {name}: {one_line(error)}") from None

    def run() -> None:
        sys.path[0] = str(whole.parent)
        # not by `runpy`, which would take `__main__` away again before threads and handlers of the program have ended
        main = ModuleType("__main__")
        main.__dict__.update(__file__=str(whole), __builtins__=__builtins__, __cached__=None)
        sys.modules["__main__"] = main
        code: CodeType = compile(source, str(whole), "exec")
        exec(code, main.__dict__)

    return run


def _module(name: str) -> Callable[[], None]:
    sys.path[0] = os.getcwd()
    try:
        found = importlib.util.find_spec(name)
    except (ImportError, ValueError) as error:
        raise CliError(f"no module {name!r}: {one_line(error)}") from None
    if found is None:
        raise CliError(f"no module {name!r}")

    def run() -> None:
        runpy.run_module(name, run_name="__main__", alter_sys=True)

    return run


def _without_us(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
    """Show a traceback from the program's first line on."""
    own = step = traceback
    while step is not None:
        if step.tb_frame.f_code.co_filename == __file__:
            own = step.tb_next
        step = step.tb_next
    while own is not None and own.tb_frame.f_globals.get("__name__") == "runpy":
        own = own.tb_next
    sys.__excepthook__(kind, error.with_traceback(own), own)


Option = tuple[tuple[str, ...], dict[str, Any]]
"""Arguments of ``ArgumentParser.add_argument``."""

OPTIONS: Final[tuple[Option, ...]] = (
    (("--num-workers",), {
        "type": _workers, "default": "auto", "metavar": "N", "help": "processes: a number, auto, or each (default: auto)",
    }),
    (("--on-failure",), {"choices": ("raise", "restart"), "help": "what to do about an environment that fails"}),
    (("--step-timeout",), {"type": float, "metavar": "S", "help": "seconds after which a step counts as hanging"}),
    (("--context",), {"choices": ("fork", "spawn", "forkserver"), "help": "how worker processes are started"}),
    (("--copy",), {"action": argparse.BooleanOptionalAction, "help": "whether observations are copies"}),
    (("--sync",), {"action": "store_true", "help": "replace gymnasium.vector.SyncVectorEnv too"}),
    (("--quiet",), {"action": "store_true", "help": "say nothing at the beginning and at the end"}),
    (("-m",), {
        "dest": "module", "nargs": argparse.REMAINDER, "metavar": "MODULE", "help": "run a module, as python -m does",
    }),
    (("program",), {"nargs": argparse.REMAINDER, "metavar": "PROGRAM ...", "help": "a file, and its own arguments"}),
)  # fmt: skip
"""What comes before the program; everything behind its name is its own."""
