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
    """The part of a ``faulthandler`` dump that names the environment's own code: vecenv's frames cut off below it."""
    kept: list[str] = []
    for line in stack.splitlines():
        if _OWN in line:
            if kept:
                break
            continue
        kept.append(line)
    return "\n".join(kept[:lines])
