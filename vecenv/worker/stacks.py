"""Where an environment's own code is on the stack of a worker."""

from __future__ import annotations

import os
from typing import Final

__all__ = ["innermost", "reaches_down"]

_OWN: Final = os.path.dirname(__file__) + os.sep  # the frames below an environment's


def reaches_down(stack: str) -> bool:
    """Whether a ``faulthandler`` dump that is being written has got beyond the environment's own code."""
    return stack.endswith("\n") and _OWN in stack


def innermost(stack: str, lines: int = 12) -> str:
    """The part of a ``faulthandler`` dump that names the environment's own code: vecenv's frames cut off below it.

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
                above.append(line)
            elif above:
                break
        kept += above
    return "\n".join(kept[:lines])
