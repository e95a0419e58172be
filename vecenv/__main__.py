"""The command ``vecenv``, also ``python -m vecenv``. It handles Ctrl-C before it imports anything large."""

import os
import signal
import sys

INTERRUPTED = 130


def main() -> int:
    """Run the command and return its exit code."""
    before = signal.getsignal(signal.SIGINT)
    if before is signal.default_int_handler:  # not if SIGINT is ignored, as in background jobs of a script
        signal.signal(signal.SIGINT, _exit_immediately)
    from vecenv.tools.cli import main as run

    if before is signal.default_int_handler:
        signal.signal(signal.SIGINT, before)
    return run()


def _exit_immediately(signum: int, frame: object) -> None:
    """Exit without an exception, which would print a long traceback during an import. There is nothing to clean up."""
    os.write(2, b"vecenv: interrupted\n")
    os._exit(INTERRUPTED)


if __name__ == "__main__":
    sys.exit(main())
