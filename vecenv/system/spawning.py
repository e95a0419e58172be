"""Starts processes: with environment variables of their own, a lifeline, and a way out for a program without a main guard.

:func:`spawn` is the one way in which a worker or a helper process starts. What it promises: the process has its own session,
ends with its caller, and bears a mark by which all that it starts is found (:mod:`vecenv.system.descendants`).
"""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import os
import select
import signal
import sys
import weakref
from collections.abc import Callable, Mapping, Sequence
from multiprocessing import process as this_process
from typing import Any, Final, TypeAlias

from vecenv.system.descendants import forkserver_pid, mark
from vecenv.system.descriptors import Descriptor, DescriptorOwner
from vecenv.system.uninterrupted import blocked, let_in

if sys.platform != "win32":
    import fcntl

NO_GUARD: Final = 113
"""Exit code of a process whose main file starts processes while it is imported."""

_NO_GUARD_TEXT: Final = "the main guard is missing"
_NO_FILE_TEXT: Final = "the main file is missing"

# -- can there be processes? --------------------------------------------------------------------------------------------


def why_no_processes() -> str | None:
    """Why there can be no worker processes here; ``None``: there can.

    Workers are waited for by ``poll()``, and end with the process group that their environments' helpers are in. Windows has
    neither.
    """
    if hasattr(select, "poll") and hasattr(os, "killpg"):
        return None
    return f"worker processes need poll() and process groups, which this system ({sys.platform}) has not"


def require_processes(what: str) -> None:
    """Refuse what needs worker processes where there can be none.

    Args:
        what: What was asked for, as the beginning of a sentence.

    Raises:
        NotImplementedError: With the way out.
    """
    why = why_no_processes()
    if why is not None:
        raise NotImplementedError(
            f"{what}: {why}. Use num_workers=0, which steps all environments in this process, or backend='envpool' of "
            "vecenv.make_vec for what EnvPool's threads can step"
        )


# -- environment variables ----------------------------------------------------------------------------------------------

WorkerEnv: TypeAlias = Mapping[str, str | int | float | Callable[[int], str | int | float | None] | None]
"""Name -> value, or a function of a worker's index that gives it. ``None`` removes a variable."""

Variables: TypeAlias = dict[str, str | None]
"""Name -> value for one process; ``None``: removed."""

_READ_BY: Final = {
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
"""Variable -> the module that reads it when it is imported."""


def check_variables(worker_env: Any) -> None:
    """Refuse what is no mapping of names to values.

    Raises:
        TypeError: No mapping, or a name or a value of another type; named.
        ValueError: A name that no variable can have.
    """
    if not isinstance(worker_env, Mapping):
        raise TypeError(f"`worker_env` must be a dict of environment variables, got {type(worker_env).__name__}")
    for name, value in worker_env.items():
        if not isinstance(name, str):
            raise TypeError(f"`worker_env` has a name that is no string: {name!r}")
        if not name or "=" in name or "\0" in name:
            raise ValueError(f"`worker_env` has a name that no environment variable can have: {name!r}")
        if not callable(value):
            _text(name, value, "")


def variables_of(worker_env: WorkerEnv | None, index: int) -> Variables:
    """The variables of worker ``index``.

    Raises:
        TypeError, ValueError: A function gave something that is no value; the variable and the worker are named.
        Exception: Whatever a function raises.
    """
    where = f" for worker {index}"
    return {
        name: _text(name, value(index) if callable(value) else value, where) for name, value in (worker_env or {}).items()
    }


def _text(name: str, value: Any, where: str) -> str | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        wanted = "a string, a number, None (remove it), or a function of the worker's index"
        raise TypeError(f"`worker_env[{name!r}]` must be {wanted}; got {value!r}{where}")
    text = str(value)
    if "\0" in text:
        raise ValueError(f"`worker_env[{name!r}]` must not contain a null character, got {value!r}{where}")
    return text


def too_late(each: Sequence[Variables]) -> dict[str, str]:
    """Variable -> module, for those that a module of this process has read already, with another value.

    A forked worker has that module from its start.
    """
    here = os.environ
    return {
        name: module
        for name, module in _READ_BY.items()
        if module in sys.modules and any(name in own and own[name] != here.get(name) for own in each)
    }


class NameWithVariables(str):
    """A process name that sets environment variables where it is unpickled.

    ``CUDA_VISIBLE_DEVICES``, ``MUJOCO_GL`` and their like are read once, by an import or by the first use of a device, so
    they have to be set before a worker imports the program's main module. A new interpreter does that before it unpickles
    what it is to run; the one thing that it reads earlier and that we can choose is its name. Builtins alone unpickle it,
    because nothing can be imported that early.
    """

    variables: Variables

    def __new__(cls, name: str, variables: Variables) -> NameWithVariables:
        self = super().__new__(cls, name)
        self.variables = variables
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        given = {name: value for name, value in self.variables.items() if value is not None}
        removed = [name for name, value in self.variables.items() if value is None]
        environ = "__import__('os').environ"
        program = f"({environ}.update({given!r}), [{environ}.pop(n, None) for n in {removed!r}], {str(self)!r})[-1]"
        return eval, (program,)


# -- the program's main file ----------------------------------------------------------------------------------------------


def missing_guard(method: str) -> str:
    """What to tell a program without a main guard, which would start workers in each worker that imports its main file."""
    return (
        f"{_NO_GUARD_TEXT} in {_file_of_main() or 'the program'}: under {method!r} each worker imports the program again, "
        "and this one would start workers there.\n"
        "Move what it does into a function, `def main():`, and end it with these two lines:\n\n"
        '    if __name__ == "__main__":\n        main()'
    )


def is_about_main(error: BaseException) -> bool:
    """Whether an error is about the program's main file: then its traceback tells nothing."""
    return str(error).startswith((_NO_GUARD_TEXT, _NO_FILE_TEXT))


def end_if_importing_main() -> None:
    """In a process that is importing the main file of its program: end it. It must not start processes."""
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        os._exit(NO_GUARD)


def _file_of_main() -> str:
    """As ``multiprocessing`` finds it; empty for a module, a notebook, or ``-c``, where no file is imported again."""
    main = sys.modules.get("__main__")
    if getattr(getattr(main, "__spec__", None), "name", None) is not None:
        return ""
    file: str = getattr(main, "__file__", None) or ""
    original: str | None = getattr(this_process, "ORIGINAL_DIR", None)
    return os.path.join(original, file) if file and original and not os.path.isabs(file) else file


def _server_exit() -> int | None:
    """The exit code of the fork server, if it has ended; ``multiprocessing`` is left to reap it."""
    pid = forkserver_pid()
    try:
        ended = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) if pid else None
    except (OSError, AttributeError):
        return None
    return ended.si_status if ended else None


def context_of(method: str | None, preload: Sequence[str] | None) -> Any:
    """The ``multiprocessing`` context of a start method, with the modules that its fork server is to import.

    Raises:
        ValueError: ``preload`` is no list of modules, or there is no fork server.
    """
    context = multiprocessing.get_context(method)
    if preload is None:
        return context
    if isinstance(preload, str) or not all(isinstance(name, str) for name in preload):
        raise ValueError(f"`preload` must be a list of names of modules, got {preload!r}")
    if context.get_start_method() != "forkserver":
        raise ValueError(f"`preload` needs context='forkserver', got {context.get_start_method()!r}")
    if (server := forkserver_pid()) is not None:
        logging.getLogger("vecenv").warning("`preload` comes too late: the fork server (pid %s) runs already", server)
    context.set_forkserver_preload(list(preload))
    return context


# -- the lifeline -------------------------------------------------------------------------------------------------------


class Lifeline:
    """A pipe whose writing end only the caller holds: processes with the reading end end when the writing end closes.

    On Linux the kernel kills a process and its group in that moment, whatever the process is doing, also inside C code that
    holds the interpreter's lock. Elsewhere a process ends when it next reads from its caller, or writes to it.

    Args:
        owner: Of the descriptors.
    """

    def __init__(self, owner: DescriptorOwner) -> None:
        self.reader, self.writer = owner.pipe()
        _lifelines.add(self)

    def close(self) -> None:
        """Close both ends in the caller."""
        self.reader.close()
        self.writer.close()


_lifelines: Final[weakref.WeakSet[Lifeline]] = weakref.WeakSet()


def _close_writers() -> None:
    """In a fork of the caller: the writing ends are the caller's alone."""
    for lifeline in list(_lifelines):
        lifeline.writer.close()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_close_writers)


_lifeline: list[int] = []
"""In a process that was started: the descriptor of the lifeline, and that by which the kernel ends this process."""


def _end_with_caller(reader: int) -> None:
    _lifeline[:] = [reader]
    if not hasattr(fcntl, "F_SETSIG"):
        return
    try:
        # an open file of its own: the signal's owner is a property of the open file, and siblings share ours
        own = os.open(f"/proc/self/fd/{reader}", os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError:  # a sandbox without /proc
        return
    _lifeline.append(own)
    fcntl.fcntl(own, fcntl.F_SETOWN, -os.getpgrp() if os.getpgrp() == os.getpid() else os.getpid())
    fcntl.fcntl(own, fcntl.F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(own, fcntl.F_SETFL, fcntl.fcntl(own, fcntl.F_GETFL) | os.O_ASYNC)
    poll = select.poll()
    poll.register(own, 0)
    if poll.poll(0):  # the caller ended before this line
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
    into: list[Any],
) -> Any:
    """Start a process that runs ``target(*args)``; to be called within :class:`~vecenv.system.uninterrupted.Uninterrupted`.

    Args:
        context: A ``multiprocessing`` context.
        target: What it runs.
        args: Its arguments.
        name: Of the process.
        daemon: Whether it may *not* have ``multiprocessing`` children.
        lifeline: It ends when this closes.
        token: What it is marked with.
        variables: Its environment variables.
        into: Where to note it before it starts, so that it can be ended in any case.

    Raises:
        RuntimeError: The program came from standard input, or its main file has no main guard.
        OSError: As ``Process.start``.
    """
    method = context.get_start_method()
    variables = variables or {}
    name = NameWithVariables(name, variables) if variables else name
    process = context.Process(
        target=_run, args=(lifeline.reader, token, variables, target, args), name=name, daemon=daemon
    )  # fmt: skip
    into.append(process)
    end_if_importing_main()
    file = _file_of_main()
    if method != "fork" and file and not os.path.exists(file):
        raise RuntimeError(
            f"{_NO_FILE_TEXT}: under {method!r} workers import it again, and {file!r} is none. Save a program that comes "
            "from standard input as a file, or use context='fork'"
        )
    try:
        with _ctrl_c_blocked(method):
            process.start()
    except (EOFError, OSError):
        if method == "forkserver" and _server_exit() == NO_GUARD:  # some versions of Python import the main file there
            raise RuntimeError(missing_guard(method)) from None
        raise
    return process


def _ctrl_c_blocked(method: str) -> contextlib.AbstractContextManager[None]:
    """Until it is in its own session a process would die of the terminal's Ctrl-C, with a traceback."""
    if method == "forkserver":  # a new server would keep the mask for all it forks
        return contextlib.nullcontext()
    if method == "spawn":
        from multiprocessing import resource_tracker

        resource_tracker.ensure_running()  # which would let Ctrl-C in again if it was started with the process
    return blocked((signal.SIGINT,))


def adopt(token: int) -> None:
    """In a copy that a started process made of itself: a session, a mark and an end with the caller of its own."""
    os.setsid()
    reader, *own = _lifeline
    for number in own:  # its signals are for the group of the original
        os.close(number)
    _end_with_caller(reader)
    mark(token)


def _run(lifeline: Descriptor, token: int, variables: Variables, target: Callable[..., None], args: tuple[Any, ...]) -> None:
    """What a new process begins with."""
    let_in()
    for name, value in variables.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
    with contextlib.suppress(OSError):
        os.setsid()  # keeps a terminal's Ctrl-C out, and makes the environments' own helpers one group with us
    signal.set_wakeup_fd(-1)  # a forked one has that of the caller's event loop, which our signals are not for
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    _end_with_caller(lifeline.number)
    mark(token)
    target(*args)
