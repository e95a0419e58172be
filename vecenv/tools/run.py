"""``vecenv run``: runs an unchanged program with vecenv in place of Gymnasium's engines."""

from __future__ import annotations

import argparse
import atexit
import builtins
import functools
import importlib.util
import io
import os
import sys
import zipfile
from collections.abc import Callable
from importlib.machinery import ExtensionFileLoader, ModuleSpec, PathFinder, SourceFileLoader
from types import CodeType, ModuleType, TracebackType
from typing import Any, Final

from vecenv.front.arguments import check_start_method
from vecenv.patching import DEFAULTS, REPORT, install
from vecenv.planning.independence import MAX_STEPS
from vecenv.planning.options import check_option
from vecenv.recording.recorder import FlightRecorder
from vecenv.system.spawning import explain_missing_guard
from vecenv.tools import CliError, one_line

_DEFAULT_OPTIONS: Final = ("num_workers", "on_failure", "step_timeout", "record_failures", "context", "generators")


def main(arguments: argparse.Namespace) -> Callable[[], None]:
    """run an unmodified program with vecenv in place of Gymnasium's AsyncVectorEnv

    Runs a Python program with vecenv's AsyncVectorEnv in place of Gymnasium's, even where gymnasium.make_vec(...,
    vectorization_mode="async") builds it. The options set arguments that the program does not pass itself. The exit code and
    tracebacks are the program's own.

    Exit codes: those of the program; 2 wrong usage, or a program that cannot be run.
    Try: vecenv run --on-failure restart train.py --seed 1
    """
    # Returns a function that runs the program, and raises its exceptions with tracebacks that begin in the program.
    # an option's arguments end before "--", so those of a module may continue in `program`
    program_arguments = [*(arguments.module or ()), *arguments.program]
    if not program_arguments:
        raise CliError("no program given: vecenv run [options] PROGRAM ..., or vecenv run [options] -m MODULE ...")
    try:
        check_option("step_timeout", arguments.step_timeout)
        check_start_method(arguments.context)
        FlightRecorder.from_option(arguments.record_failures)
    except ValueError as error:
        raise CliError(str(error)) from None
    defaults = {name: value for name in _DEFAULT_OPTIONS if (value := getattr(arguments, name)) is not None}
    install(sync=arguments.sync, **defaults)
    sys.argv = list(program_arguments) if arguments.module is None else ["-m", *program_arguments[1:]]
    # last, because finding a module imports its package, which may use Gymnasium's class or sys.argv
    start = _prepare_file(program_arguments[0]) if arguments.module is None else _prepare_module(program_arguments[0])
    if not arguments.quiet:
        replaced = "AsyncVectorEnv and SyncVectorEnv are" if arguments.sync else "AsyncVectorEnv is"
        settings = ", ".join(f"{name}={value!r}" for name, value in defaults.items())
        settings = settings or "one worker per environment"
        print(f"vecenv run: gymnasium.vector.{replaced} vecenv's ({settings})", file=sys.stderr)
        if defaults.get("num_workers") == "auto":
            note = f"auto first tries environments in temporary processes for up to {MAX_STEPS} steps"
            print(f"vecenv run: {note}", file=sys.stderr)
        atexit.register(_print_report, os.getpid())
    return start


def _print_report(pid: int) -> None:
    if os.getpid() == pid:  # not in a process that the program forked
        print(f"vecenv run: {REPORT}", file=sys.stderr)


def _parse_num_workers(text: str) -> int | str | None:
    if text in ("auto", "each"):
        return text if text == "auto" else None
    try:
        number = int(text)
    except ValueError:
        number = -1
    if number < 0:
        raise argparse.ArgumentTypeError(f"must be a non-negative int, 'auto' or 'each', got {text!r}")
    return number


def _prepare_file(name: str) -> Callable[[], None]:
    """Return a function that runs a source file, or a folder or zip with ``__main__``, as ``python NAME`` does."""
    path = os.path.join(os.getcwd(), name)  # Python keeps symbolic links in `__file__`, and resolves them in `sys.path[0]`
    if os.path.isdir(path) or zipfile.is_zipfile(path):
        return _prepare_container(name, path)
    if not os.path.isfile(path):
        raise CliError(f"no such program: {name}")
    try:
        with io.open_code(path) as file:
            source = file.read()
    except OSError as error:
        raise CliError(f"cannot read {name}: {one_line(error)}") from None

    def run() -> None:
        _replace_first_path_entry(os.path.dirname(os.path.realpath(path)))
        _execute(
            # `dont_inherit`: this module's __future__ imports must not apply to the program
            lambda: compile(source, path, "exec", dont_inherit=True),
            __file__=path, __loader__=SourceFileLoader("__main__", path), __package__=None, __spec__=None, __cached__=None,
        )  # fmt: skip

    return run


def _prepare_container(name: str, path: str) -> Callable[[], None]:
    spec = PathFinder.find_spec("__main__", [path])
    if spec is None:
        raise CliError(f"no such program: {name} has no __main__.py")

    def run() -> None:
        if sys.flags.safe_path:  # even under -P, Python searches the folder or archive that it runs
            sys.path.insert(0, path)
        _replace_first_path_entry(path)
        _execute_spec(spec)

    return run


def _prepare_module(name: str) -> Callable[[], None]:
    """Return a function that runs a module, or the ``__main__`` of a package, as ``python -m NAME`` does."""
    _replace_first_path_entry(os.getcwd())
    try:
        found = importlib.util.find_spec(name)
        if found is not None and found.submodule_search_locations is not None:
            name = f"{name}.__main__"
            found = importlib.util.find_spec(name)
    except (ImportError, ValueError) as error:
        raise CliError(f"no module {name!r}: {one_line(error)}") from None
    if found is None:
        raise CliError(f"no module {name!r}")
    if found.origin == "built-in" or isinstance(found.loader, ExtensionFileLoader):
        raise CliError(f"module {name!r} is compiled, not a Python program")
    spec = found

    def run() -> None:
        sys.argv[0] = str(spec.origin)
        _execute_spec(spec)

    return run


def _replace_first_path_entry(folder: str) -> None:
    """Replace the first entry of ``sys.path``, which Python added for vecenv's own command; under ``-P`` it adds none."""
    if not sys.flags.safe_path:
        sys.path[0] = folder


def _execute_spec(spec: ModuleSpec) -> None:
    loader: Any = spec.loader
    _execute(
        lambda: loader.get_code(spec.name), __file__=spec.origin, __loader__=loader, __package__=spec.parent, __spec__=spec,
        __cached__=spec.cached,
    )  # fmt: skip


def _execute(get_code: Callable[[], CodeType], **names: Any) -> None:
    """Run the code that ``get_code`` returns as ``__main__``, and keep that module.

    The program's threads and exit handlers may use the module later; ``runpy`` would remove it.
    """
    main = ModuleType("__main__")
    vars(main).update(names, __builtins__=builtins)
    if sys.version_info < (3, 14):
        vars(main)["__annotations__"] = {}
    sys.modules["__main__"] = sys.modules["__mp_main__"] = main  # `__mp_main__`: its name in spawned processes
    try:
        compiled, start_method = get_code(), DEFAULTS.get("context")
        # workers do not import a __main__.py
        workers_import_it = getattr(names["__spec__"], "name", "").rpartition(".")[2] != "__main__"
        if workers_import_it and start_method in ("spawn", "forkserver") and not _has_main_guard(compiled):
            print(f"vecenv run: {explain_missing_guard(start_method)}", file=sys.stderr)
            sys.exit(2)
        exec(compiled, vars(main))
    except SystemExit:
        raise
    except BaseException:
        sys.excepthook = functools.partial(_hide_own_frames, sys.excepthook)
        raise


def _has_main_guard(program: CodeType) -> bool:
    """True if a program contains the string ``"__main__"``, alone or in a tuple or set, outside of functions and classes."""
    return any("__main__" in (value if isinstance(value, tuple | frozenset) else (value,)) for value in program.co_consts)


def _hide_own_frames(
    hook: Callable[..., Any], kind: type[BaseException], error: BaseException, traceback: TracebackType | None
) -> None:
    """Call the program's hook with a traceback that begins in the program."""
    sys.excepthook, program_traceback = hook, traceback
    while program_traceback is not None and program_traceback.tb_frame.f_code is not _execute.__code__:
        program_traceback = program_traceback.tb_next
    while program_traceback is not None and program_traceback.tb_frame.f_code.co_filename == __file__:
        program_traceback = program_traceback.tb_next
    hook(kind, error.with_traceback(program_traceback), program_traceback)


def add_options(option: Callable[..., Any]) -> None:
    """Declare the options, which come before the program; all arguments after its name are the program's.

    Args:
        option: ``ArgumentParser.add_argument``.
    """
    text = "number of worker processes, 'auto', or 'each' (one per environment); default: auto"
    option("--num-workers", type=_parse_num_workers, default="auto", metavar="N", help=text)
    option("--on-failure", choices=("raise", "restart"), help="what to do when an environment fails (default: raise)")
    text = "seconds after which a step counts as hanging (default: no limit)"
    option("--step-timeout", type=float, metavar="S", help=text)
    text = "folder in which each failure leaves a file for vecenv replay (default: none)"
    option("--record-failures", metavar="FOLDER", help=text)
    option("--context", choices=("fork", "spawn", "forkserver"), help="start method of worker processes (default: Python's)")
    text = "whether environments share the global random generators of their process or have their own (default: shared)"
    option("--generators", choices=("shared", "own"), help=text)
    option("--sync", action="store_true", help="also replace gymnasium.vector.SyncVectorEnv")
    option("--quiet", action="store_true", help="suppress the reports on stderr at the start and the end")
    text = "run a module with its arguments, as python -m does"
    option("-m", dest="module", nargs=argparse.REMAINDER, metavar="MODULE", help=text)
    text = "a Python file, folder or archive, and its arguments"
    option("program", nargs=argparse.REMAINDER, metavar="PROGRAM ...", help=text)
