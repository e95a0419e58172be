"""Process creation with environment variables, a lifeline, and a check for a missing main guard.

Workers and helpers start with :func:`spawn`, except for copies of workers, which :func:`set_up_copy` prepares. Each
process has its own session, ends with its caller, and has a mark by which everything that it starts can be found
(:mod:`vecenv.system.descendants`).
"""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import os
import select
import signal
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from multiprocessing import process as this_process
from types import ModuleType
from typing import Any, Final, TypeAlias

from vecenv.system.descendants import end_group, forkserver_pid, mark
from vecenv.system.descriptors import Descriptor, DescriptorOwner
from vecenv.system.supervision import close_process, was_reaped

if sys.platform != "win32":
    import fcntl

NO_GUARD: Final = 113
"""Exit code of a process that ended because importing the main file would have started processes."""

_NO_GUARD_TEXT: Final = "the main guard is missing"
_NO_FILE_TEXT: Final = "the main file is missing"
_TORCH_LIBRARIES: Final = {"torch", "sb3_contrib", "stable_baselines3", "tianshou", "torchrl"}  # they import torch

# -- support for worker processes ---------------------------------------------------------------------------------------


def explain_unsupported_processes() -> str | None:
    """Return the reason why worker processes are not possible here, or ``None`` if they are.

    Windows lacks ``poll()``, which the engine uses to wait for workers, and process groups, which it uses to end the helpers
    of environments.
    """
    if multiprocessing.current_process().daemon:
        return (
            "this process is daemonic, like those of multiprocessing.Pool and of vecenv, and may not have children; start "
            "it with daemon=False, or use concurrent.futures.ProcessPoolExecutor"
        )
    if hasattr(select, "poll") and hasattr(os, "killpg"):
        return None
    return f"worker processes need poll() and process groups, which this system ({sys.platform}) lacks"


def require_processes(what: str) -> None:
    """Raise if worker processes are not possible.

    Args:
        what: The requested feature, as the beginning of a sentence.

    Raises:
        NotImplementedError: They are not possible; the message names the alternatives.
    """
    reason = explain_unsupported_processes()
    if reason is not None:
        raise NotImplementedError(
            f"{what}: {reason}. Use num_workers=0, which steps all environments in this process, or, for environments of "
            "EnvPool, vecenv.make_vec with backend='envpool'"
        )


# -- environment variables ----------------------------------------------------------------------------------------------

WorkerVariables: TypeAlias = Mapping[str, str | int | float | Callable[[int], str | int | float | None] | None]
"""Name -> value, or a function of a worker's index that returns it. ``None`` removes a variable."""

Variables: TypeAlias = dict[str, str | None]
"""Name -> value for one process. ``None`` removes a variable."""

_READING_MODULES: Final = {
    "JAX_ENABLE_X64": "jax",
    "JAX_PLATFORMS": "jax",
    "MKL_NUM_THREADS": "numpy",
    "MUJOCO_EGL_DEVICE_ID": "mujoco.egl",
    "MUJOCO_GL": "mujoco",
    "OMP_NUM_THREADS": "numpy",
    "OPENBLAS_NUM_THREADS": "numpy",
    "PYOPENGL_PLATFORM": "OpenGL",
    "XLA_FLAGS": "jax",
}
"""Variable -> the module that reads it during its import."""


def check_variables(variables: Any) -> None:
    """Check that ``variables`` is a mapping of names to values.

    Raises:
        TypeError: It is not a mapping, or a name or value has the wrong type; the message names it.
        ValueError: A name or value is not valid for an environment variable.
    """
    if not isinstance(variables, Mapping):
        raise TypeError(f"WorkerOptions(env) must be a dict of environment variables, got {type(variables).__name__}")
    for name, value in variables.items():
        if not isinstance(name, str):
            raise TypeError(f"WorkerOptions(env) has a name that is not a string: {name!r}")
        if not name or "=" in name or "\0" in name:
            raise ValueError(f"WorkerOptions(env) has an invalid name of an environment variable: {name!r}")
        if not callable(value):
            _as_text(name, value, "")


def resolve_variables(variables: WorkerVariables | None, index: int) -> Variables:
    """Return the variables of worker ``index``.

    Raises:
        TypeError, ValueError: A function returned an invalid value; the message names the variable and the worker.
        Exception: Raised by a function.
    """
    where = f" for worker {index}"
    return {
        name: _as_text(name, value(index) if callable(value) else value, where) for name, value in (variables or {}).items()
    }


def _as_text(name: str, value: Any, where: str) -> str | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        expected = "a string, a number, None (remove it), or a function of the worker's index"
        raise TypeError(f"WorkerOptions(env)[{name!r}] must be {expected}; got {value!r}{where}")
    text = str(value)
    if "\0" in text:
        raise ValueError(f"WorkerOptions(env)[{name!r}] must not contain a null character, got {value!r}{where}")
    return text


def find_late_variables(variables_by_worker: Sequence[Variables]) -> dict[str, str]:
    """Return variables that are set too late, each with the module that has already read another value in this process.

    A forked worker inherits that module.
    """
    return {
        name: module
        for name, module in _READING_MODULES.items()
        if module in sys.modules
        and any(name in variables and variables[name] != os.environ.get(name) for variables in variables_by_worker)
    }


class NameWithVariables(str):
    """A process name that sets environment variables when it is unpickled.

    Variables such as ``CUDA_VISIBLE_DEVICES`` and ``MUJOCO_GL`` are read once, by an import or by the first use of a device,
    so they must be set before a worker imports the program's main module, which a new interpreter does before it unpickles
    its target. The process name is the only earlier input under our control. It is unpickled by builtins alone, because
    ``sys.path`` is not set up yet, so vecenv may not be importable.
    """

    variables: Variables

    def __new__(cls, name: str, variables: Variables) -> NameWithVariables:
        self = super().__new__(cls, name)
        self.variables = variables
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        to_set = {name: value for name, value in self.variables.items() if value is not None}
        to_remove = [name for name, value in self.variables.items() if value is None]
        environ = "__import__('os').environ"
        program = f"({environ}.update({to_set!r}), [{environ}.pop(n, None) for n in {to_remove!r}], {str(self)!r})[-1]"
        return eval, (program,)


# -- the program's main file ----------------------------------------------------------------------------------------------


def explain_missing_guard(method: str) -> str:
    """Return an explanation and advice for a program without a main guard, which would start workers in each worker."""
    return (
        f"{_NO_GUARD_TEXT} in {_find_main_file() or 'the program'}: under {method!r} each worker imports the program again, "
        "and this one would start workers there.\n"
        "Move its code into a function, `def main():`, and end the file with these two lines:\n\n"
        '    if __name__ == "__main__":\n        main()'
    )


def is_main_file_error(error: BaseException) -> bool:
    """True if an error is about the program's main file, so that its traceback adds nothing."""
    return str(error).startswith((_NO_GUARD_TEXT, _NO_FILE_TEXT))


def end_if_importing_main() -> None:
    """End this process if it is importing its program's main file, because it must not start processes meanwhile."""
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        os._exit(NO_GUARD)


def _find_main_file() -> str:
    """Return the file that ``multiprocessing`` imports again; empty for a module, a notebook, or ``-c``."""
    main = sys.modules.get("__main__")
    if getattr(getattr(main, "__spec__", None), "name", None) is not None:
        return ""
    file: str = getattr(main, "__file__", None) or ""
    original: str | None = getattr(this_process, "ORIGINAL_DIR", None)
    return os.path.join(original, file) if file and original and not os.path.isabs(file) else file


def _server_exit_code() -> int | None:
    """Return the exit code of the fork server if it has ended, but do not reap it: ``multiprocessing`` does that later."""
    pid = forkserver_pid()
    try:
        ended = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) if pid else None
    except (OSError, AttributeError):
        return None
    return ended.si_status if ended else None


def make_context(method: str | None, preload: Sequence[str] | None) -> Any:
    """Return the ``multiprocessing`` context of a start method, with modules for its fork server to import.

    Raises:
        ValueError: The start method is unknown or has no fork server, or ``preload`` is not a list of module names.
    """
    context = multiprocessing.get_context(method)
    if preload is None:
        return context
    if isinstance(preload, str) or not all(isinstance(name, str) for name in preload):
        raise ValueError(f"WorkerOptions(preload) must be a list of module names, got {preload!r}")
    if context.get_start_method() != "forkserver":
        raise ValueError(f"WorkerOptions(preload) needs context='forkserver', got {context.get_start_method()!r}")
    if (server := forkserver_pid()) is not None:
        text = "WorkerOptions(preload) has no effect: the fork server (pid %s) is already running"
        logging.getLogger("vecenv").warning(text, server)
    context.set_forkserver_preload(list(preload))
    return context


# -- the lifeline -------------------------------------------------------------------------------------------------------


class Lifeline:
    """A pipe that ties processes to their caller: they hold its reading end, and end when the writing end closes.

    On Linux with ``/proc``, the kernel kills a process and its group at that moment, whatever the process is doing, even in
    C code that holds the GIL. Elsewhere a process ends when it next reads from its caller, or writes to it.

    Args:
        owner: Owner of the descriptors.
    """

    def __init__(self, owner: DescriptorOwner) -> None:
        self.reader, self.writer = owner.pipe()
        _lifelines.add(self)

    def close(self) -> None:
        """Close both ends in the caller."""
        self.reader.close()
        self.writer.close()


_lifelines: Final[weakref.WeakSet[Lifeline]] = weakref.WeakSet()
_processes: Final[weakref.WeakSet[Any]] = weakref.WeakSet()


def _leave_to_caller() -> None:
    """In a fork of the caller, close the writing ends and forget the processes, which belong to the caller alone.

    Otherwise ``multiprocessing`` terminates the daemonic ones when the fork ends, unless it started the fork itself.
    """
    for lifeline in list(_lifelines):
        lifeline.writer.close()
    getattr(this_process, "_children", set()).difference_update(_processes)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_leave_to_caller)


_lifeline: list[int] = []
"""In a started process: the lifeline's descriptor and, on Linux, the one through which the kernel kills this process."""


def _end_with_caller(reader: int) -> None:
    _lifeline[:] = [reader]
    if not hasattr(fcntl, "F_SETSIG"):
        return
    try:
        # reopened, because the signal's owner is a property of the open file, which siblings share
        reopened = os.open(f"/proc/self/fd/{reader}", os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError:  # a sandbox without /proc
        return
    _lifeline.append(reopened)
    fcntl.fcntl(reopened, fcntl.F_SETOWN, -os.getpgrp() if os.getpgrp() == os.getpid() else os.getpid())
    fcntl.fcntl(reopened, fcntl.F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(reopened, fcntl.F_SETFL, fcntl.fcntl(reopened, fcntl.F_GETFL) | os.O_ASYNC)
    poll = select.poll()
    poll.register(reopened, 0)
    if poll.poll(0):  # the caller has already ended
        os._exit(1)


# -- starting -----------------------------------------------------------------------------------------------------------


def spawn(
    context: Any,
    target: Callable[..., None],
    args: tuple[Any, ...],
    *,
    name: str,
    daemon: bool,
    lifeline: Lifeline,
    token: int,
    variables: Variables | None = None,
    processes: list[Any],
) -> Any:
    """Start a process that runs ``target(*args)``. Call it within :func:`~vecenv.system.signals.deferred_signals`.

    Args:
        context: A ``multiprocessing`` context.
        target: The function of the process.
        args: The arguments of ``target``.
        name: Name of the process.
        daemon: True if it may *not* have ``multiprocessing`` children.
        lifeline: The process ends when this closes.
        token: The mark of the process, see :mod:`vecenv.system.descendants`.
        variables: Environment variables of the process.
        processes: The list to which the process is appended before its start, so that it can always be ended.

    Raises:
        RuntimeError: The program's main file does not exist (it came from standard input), or has no main guard.
        Exception: Raised by ``Process.start``: the system lacks resources, or an argument cannot be pickled.
    """
    method = context.get_start_method()
    variables = variables or {}
    name = NameWithVariables(name, variables) if variables else name
    process = context.Process(
        target=_run, args=(lifeline.reader, token, variables, target, args), name=name, daemon=daemon
    )  # fmt: skip
    processes.append(process)
    _processes.add(process)
    end_if_importing_main()
    if method == "forkserver":
        _preload()
    file = _find_main_file()
    if method != "fork" and file and not os.path.exists(file):
        raise RuntimeError(
            f"{_NO_FILE_TEXT}: under {method!r} workers import it again, and {file!r} does not exist. Save a program that "
            "comes from standard input as a file, or use context='fork'"
        )
    try:
        with _ctrl_c_blocked(method):
            process.start()
    except (EOFError, OSError):
        if method == "forkserver" and _server_exit_code() == NO_GUARD:  # some Python versions import the main file there
            raise RuntimeError(explain_missing_guard(method)) from None
        raise
    return process


@contextlib.contextmanager
def _ctrl_c_blocked(method: str) -> Iterator[None]:
    """Block Ctrl-C, so that the new process does not end with a traceback before it has its own session."""
    if method == "forkserver" or not hasattr(signal, "pthread_sigmask"):  # a new server would pass the mask on to all forks
        yield
        return
    if method == "spawn":
        from multiprocessing import resource_tracker

        resource_tracker.ensure_running()  # if process.start() started it, that would unblock Ctrl-C
    before = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT,))
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def set_up_copy(token: int) -> None:
    """Set up a forked copy of a started process: its session, its mark, and its end with the caller."""
    os.setsid()
    reader, *own_descriptors = _lifeline
    for number in own_descriptors:  # its signal goes to the process group of the original
        os.close(number)
    _end_with_caller(reader)
    mark(token)


def _run(lifeline: Descriptor, token: int, variables: Variables, target: Callable[..., None], args: tuple[Any, ...]) -> None:
    """Prepare a new process and run its target."""
    for name, value in variables.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
    with contextlib.suppress(OSError):
        os.setsid()  # shields it from a terminal's Ctrl-C, and puts the environments' helpers into its group
    signal.set_wakeup_fd(-1)  # the inherited one belongs to the caller's event loop, which must not receive our signals
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    _end_with_caller(lifeline.number)
    mark(token)
    target(*args)


def _preload() -> None:
    """Make a fork server that is not running yet import the workers' code, and torch if needed, once for all workers."""
    from multiprocessing import forkserver

    server: Any = forkserver._forkserver
    with contextlib.suppress(AttributeError):  # private names; without them, workers only start more slowly
        if server._forkserver_pid is None and server._preload_modules == ["__main__"]:
            server.set_forkserver_preload(["__main__", "vecenv.worker.main", *(["torch"] if _main_needs_torch() else [])])


def _main_needs_torch() -> bool:
    """True if the main file imports torch at its top level, so that each worker imports it too."""
    values = list(vars(sys.modules["__main__"]).values()) if "torch" in sys.modules else []  # a thread may add names
    names = {value.__name__ for value in values if isinstance(value, ModuleType)}
    names.update(str(base.__module__) for value in values if isinstance(value, type) for base in value.__mro__)
    return any(name.partition(".")[0] in _TORCH_LIBRARIES for name in names)


def advice_for_fork(context: Any) -> str:
    """Return advice for a forked process that does not become ready, if threads may be the cause; else an empty string."""
    if context.get_start_method() != "fork" or threading.active_count() < 2:
        return ""
    return (
        f"\n({threading.active_count()} threads were running when it was forked; a lock that one of them held is never "
        "released in the child: use context='forkserver')"
    )


def end_unclosed(lifeline: Lifeline, processes: list[Any], owner: int) -> None:
    """End the processes of a pool that was garbage-collected, or was still open when the program ended."""
    if os.getpid() != owner or not processes:
        return
    lifeline.close()  # the kernel kills the processes at the other end
    deadline = time.monotonic() + 1.0
    ignored_errors = ValueError, OSError, AttributeError, AssertionError  # for example, the process object is closed
    for process in processes:
        with contextlib.suppress(*ignored_errors):
            if process.pid is not None and process.exitcode is None:  # not reaped yet, so no other process can have its pid
                end_group([process.pid])
                os.kill(process.pid, signal.SIGKILL)
    for process in processes:
        with contextlib.suppress(*ignored_errors):
            while process.exitcode is None and not was_reaped(process.pid) and time.monotonic() < deadline:
                time.sleep(0.001)
        close_process(process)
    processes.clear()
