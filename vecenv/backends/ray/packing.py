"""Arrays on their way to a host and back, in as few objects as can be.

Ray pickles every array by itself, which takes longer than what a small one holds; a ``bytes`` it hands on as it is. So small
arrays travel joined to one ``bytes``. Large ones travel as arrays: Ray gives those out where they arrived, but a ``bytes``
it copies first.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np

from vecenv.shm.layout import Array

__all__ = ["Packed", "Packing"]

_LARGE: Final = 16 * 1024  # bytes; copying so many takes a few microseconds, pickling an array tens

Packed = bytes | tuple[Any, ...]
"""The small arrays joined, or those and each of the large ones."""


class Packing:
    """Packs arrays of the shapes and dtypes of ``arrays``, all of them C-contiguous, and unpacks them again."""

    def __init__(self, arrays: Sequence[Array]) -> None:
        self._forms = [(array.shape, array.dtype, array.nbytes) for array in arrays]
        self._any_large = any(size >= _LARGE for _, _, size in self._forms)

    def pack(self, arrays: Sequence[Any]) -> Packed:
        if not self._any_large:
            return b"".join(arrays)
        return b"".join(a for a in arrays if a.nbytes < _LARGE), *(a for a in arrays if a.nbytes >= _LARGE)

    def unpack(self, packed: Packed) -> list[Array]:
        """The arrays, read-only: views of ``packed``, not copies."""
        joined, *large = packed if isinstance(packed, tuple) else (packed,)
        rest, arrays, at = iter(large), [], 0
        for shape, dtype, size in self._forms:
            if size >= _LARGE:
                arrays.append(next(rest))
            else:
                arrays.append(np.ndarray(shape, dtype, joined, at))
                at += size
        return arrays
