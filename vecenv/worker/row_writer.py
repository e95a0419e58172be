"""The compiled writer of step results, an optional accelerator.

Most results consist of an array of the space's dtype and shape, a float or int, two flags that are false, and an info that
is empty or has the keys and types of the previous ones. ``_row_writer.c`` writes these into shared memory in a fraction of
the time. It refuses every other result; the step loop of :mod:`vecenv.worker.rows` then processes that result in Python.
Only that loop defines the semantics.

``hatch_build.py`` compiles ``_row_writer.c`` when the package is built, if there is a C compiler.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Sequence
from typing import Any, Final, Protocol

import numpy as np

from vecenv.link.infos import Places
from vecenv.shm.layout import Array, Leaf, SharedArrays

MODULE: Final = "vecenv.worker._row_writer"
INTERFACE: Final = 1
"""Version of the interface of ``_row_writer.c``. A compiled module with another version is ignored."""


class CompiledRow(Protocol):
    """A compiled writer of the results of one row."""

    write: Callable[[Any], int]
    """``write(result)`` returns 1 if it has written the result, 2 if it has also written an info, and 0 if it refuses."""
    learn: Callable[[int, Places], None]
    """``learn(number, places)``: accept infos with these keys, types and shapes; ``number`` identifies their schema."""


def load() -> Any:
    """Import the compiled module. Return ``None`` if it is missing, or does not match this code or this NumPy."""
    try:
        module = importlib.import_module(MODULE)
    except ImportError:
        return None
    array = np.ones((2, 3), np.int32)
    fields = array.ctypes.data, array.ndim, id(array.dtype), array.flags.num
    return module if module.INTERFACE == INTERFACE and module.fields(array) == fields else None


_module: Any = load()


def is_compiled() -> bool:
    """True if workers use the compiled writer: it was built, and the variable ``VECENV_PURE`` is unset, empty or 0."""
    return _module is not None and os.environ.get("VECENV_PURE", "0") in ("", "0")


def make_compiled_rows(
    leaf: Leaf | None, leaves: Sequence[Array], arrays: SharedArrays, rows: slice
) -> Sequence[CompiledRow]:
    """Return a writer for each of ``rows``, or an empty list if Python has to write the results.

    Args:
        leaf: The leaf of the observation space; ``None`` if an observation is not a single array of fixed size.
        leaves: The worker's rows of the observations.
        arrays: Views of the shared memory.
        rows: The worker's rows.
    """
    if not is_compiled() or leaf is None or leaf.shape == () or not leaves:
        return []
    flat = (arrays.rewards, arrays.terminations, arrays.truncations, arrays.info_schemas, arrays.infos)
    cells = leaves[0], *[each[rows].reshape(-1, each[:1].size) for each in flat]
    numpy_objects = np.ndarray, np.float32, np.float64, np.False_
    return [_module.Row(row, numpy_objects) for row in zip(*cells, strict=True)]
