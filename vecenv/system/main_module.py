"""Programs that a new interpreter has to import again: under ``spawn`` and ``forkserver``, the program's main file.

A main file without ``if __name__ == "__main__":`` would start workers in each worker that imports it. A process that is
about to do so ends with :data:`NO_GUARD`, and its parent says what is missing. A program that came from standard input is
refused before anything is started.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
from multiprocessing import process as this_process
from typing import Any, Final

__all__ = ["NO_GUARD", "end_if_importing_main", "is_about_main", "missing_guard", "start_process"]

NO_GUARD: Final = 113
"""Exit code of a process whose main file starts processes while it is imported."""

_NO_GUARD_TEXT: Final = "the main guard is missing"
_NO_FILE_TEXT: Final = "the main file is missing"


def missing_guard(method: str) -> str:
    """What to tell a program without a main guard."""
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


def start_process(process: Any, method: str) -> None:
    """Start a process of ``multiprocessing``'s.

    Raises:
        RuntimeError: The program came from standard input, or its main file has no main guard.
        OSError: As ``Process.start``.
    """
    end_if_importing_main()
    file = _file_of_main()
    if method != "fork" and file and not os.path.exists(file):
        raise RuntimeError(
            f"{_NO_FILE_TEXT}: under {method!r} workers import it again, and {file!r} is none. Save a program that comes "
            "from standard input as a file, or use context='fork'"
        )
    try:
        process.start()
    except (EOFError, OSError):
        if method == "forkserver" and _server_exit() == NO_GUARD:  # some versions of Python import the main file there
            raise RuntimeError(missing_guard(method)) from None
        raise


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
    from multiprocessing import forkserver

    pid = getattr(getattr(forkserver, "_forkserver", None), "_forkserver_pid", None)
    try:
        ended = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) if pid else None
    except (OSError, AttributeError):
        return None
    return ended.si_status if ended else None
