"""The command ``vecenv``, and ``python -m vecenv``: ready for Ctrl-C before anything large is imported."""

import os
import signal
import sys

INTERRUPTED = 130


def main() -> int:
    """Run the command and return its exit code."""
    before = signal.getsignal(signal.SIGINT)
    if before is signal.default_int_handler:  # not if SIGINT is ignored, as under nohup
        signal.signal(signal.SIGINT, _exit_at_once)
    from vecenv.tools.cli import main as run

    if before is signal.default_int_handler:
        signal.signal(signal.SIGINT, before)
    return run()


def _exit_at_once(signum: int, frame: object) -> None:
    """Exit: there is nothing to clean up, and an exception during an import would be printed with all its frames."""
    os.write(2, b"vecenv: interrupted\n")
    os._exit(INTERRUPTED)


if __name__ == "__main__":
    sys.exit(main())
