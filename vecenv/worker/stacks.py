"""Where an environment's own code is on the stack of a worker."""

from __future__ import annotations

import os
import re
from typing import Final

__all__ = ["innermost", "place", "reaches_down"]

_OWN: Final = os.path.dirname(__file__) + os.sep  # the frames below an environment's
_MAIN: Final = f'"{_OWN}main.py"'
_ASKED: Final = f'"{os.path.join(os.path.dirname(os.path.dirname(__file__)), "system", "supervision.py")}"'  # those above
_FRAME: Final = re.compile(r'^  File "(.*)", line (\d+) in (.*)$', re.MULTILINE)
_STANDARD: Final = os.path.dirname(os.__file__) + os.sep


def reaches_down(stack: str) -> bool:
    """Whether a ``faulthandler`` dump that is being written has got beyond the environment's own code in the main thread."""
    return stack.endswith("\n") and _MAIN in stack


def innermost(stack: str, lines: int = 12) -> str:
    """The part of a ``faulthandler`` dump that names the environment's own code: vecenv's frames cut off on both sides.

    Of several threads those count in which vecenv is: the main one; or, where others step environments, these, while the
    main one, which comes last, waits for them.
    """
    threads = stack.split("\n\n")
    ours = [thread for thread in threads if _OWN in thread]
    kept: list[str] = []
    for thread in ours[:-1] or ours or threads:
        above: list[str] = []
        for line in thread.splitlines():
            if _OWN not in line:
                above += [line] if _ASKED not in line else []
            elif above:
                break
        kept += above
    return "\n".join(kept[:lines])


def place(stack: str) -> str:
    """The innermost frame of a stack that is not in Python's standard library, in a few words; empty if there is none."""
    frames = _FRAME.findall(stack)
    others = [frame for frame in frames if not frame[0].startswith(_STANDARD) or f"-packages{os.sep}" in frame[0]]
    if not frames:
        return ""
    file, line, function = (others or frames)[0]
    return f"{os.path.basename(file)}:{line} in {function}"
