"""What an engine of worker processes needs of a system, and whether this one has it.

Workers are waited for by ``poll()``, together with what tells of their end, and are ended with the process group that their
environments' helpers are in. Windows has neither, and nothing here does the same there.
"""

from __future__ import annotations

import os
import select
import sys

__all__ = ["require_processes", "why_no_processes"]


def why_no_processes() -> str | None:
    """Why there can be no worker processes here; ``None``: there can."""
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
