"""A helper that runs a check in a forked child."""

from __future__ import annotations

import gc
import os
import signal
from collections.abc import Callable


def run_in_fork(check: Callable[[], None]) -> int:
    """Run ``check`` in a forked child for at most one minute. Return the exit code, negative if a signal ended the child."""
    pid = os.fork()
    if pid == 0:
        code = 3
        try:
            signal.alarm(60)
            check()
            gc.collect()
            code = 0
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
