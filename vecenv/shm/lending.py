"""Lends batches in shared memory to the program, so that a result need not be copied.

The workers write the observations of a step into one of several batches. The program gets arrays over that batch, and the
next step writes into another one. A batch is free again when no array refers to it any more. The program may keep its arrays
as long as it likes and may write into them, as with a copy:

* The arrays lie in a private mapping of the memory, which shows what workers have written. Before the program's first write
  into a page, the kernel gives the program its own copy of this page. So the engine's view of a batch never changes.
* ``/proc/self/pagemap`` shows within microseconds whether the program has such pages in a free batch. They are dropped
  before workers write there again. A program that has written into several results in succession gets copies from
  then on, because copying single pages on demand takes longer.
* A forked child shares all pages that the program has not written to, and would see what workers write there later. So
  lent batches get their own pages before each fork.
"""

from __future__ import annotations

import functools
import mmap
import os
import weakref
from typing import Any, Final

import numpy as np

from vecenv.shm.arena import Arena, available_memory
from vecenv.shm.layout import Array, Field, Layout, Tree
from vecenv.system.descriptors import DescriptorOwner

_SPARE_BATCHES: Final = 3  # four in all: two results that the program keeps, the result to lend, and one for the next step
_MIN_BYTES: Final = 1 << 16  # copying less is as fast as lending
_MAX_SHARE: Final = 1 / 16  # of the memory that is left
_MAX_WRITES: Final = 8  # batches in succession that the program has written to
_MADV_POPULATE_WRITE: Final = 23  # since Linux 5.14; the mmap module has no name for it
_PAGE_MAP: Final = "/proc/self/pagemap"
_UNWRITTEN: Final = b"\xa0\xa1\0"  # the highest bytes of entries of the page map: pages of the file; pages not mapped yet


def count_spare_batches(tree: Tree | None, num_envs: int) -> int:
    """Return the number of additional batches of observations to allocate; 0 if batches cannot or should not be lent."""
    size = 0 if tree is None else num_envs * sum(leaf.dtype.itemsize * int(np.prod(leaf.shape)) for leaf in tree.leaves())
    if size < _MIN_BYTES or _SPARE_BATCHES * size > _MAX_SHARE * (available_memory() or 0) or not is_possible():
        return 0
    return _SPARE_BATCHES


@functools.cache
def is_possible() -> bool:
    """True if private mappings show later writes to the file, and the page map shows writes to them: on Linux since 5.14."""
    try:
        arena = Arena(mmap.PAGESIZE)
        memory = PrivateMemory(arena)
        arena.close()
        shared, private = np.frombuffer(arena.buffer, np.uint8), np.frombuffer(memory.mapping, np.uint8)
        values = [private[0]]
        shared[0] = 1
        values.append(private[0])
        written = [memory.is_written(0, len(private))]
        private[0] = 2
        written.append(memory.is_written(0, len(private)))
        memory.discard(0, len(private))
        values += [shared[0], private[0]]
        memory.separate(0, len(private))
        written.append(memory.is_written(0, len(private)))
        return values == [0, 1, 1, 1] and written == [False, True, True]
    except TimeoutError:  # from a signal handler
        raise
    except (OSError, AttributeError, ValueError):
        return False


class PrivateMemory:
    """A private mapping of a block of shared memory. Writes into it are not shared.

    Attributes:
        mapping: The mapping.
        address: Its address.
    """

    def __init__(self, arena: Arena) -> None:
        self.mapping = mmap.mmap(arena.fileno(), arena.size, flags=mmap.MAP_PRIVATE)
        self.address: int = np.frombuffer(self.mapping, np.uint8).__array_interface__["data"][0]
        self._page_map = DescriptorOwner(self).open(os.open, _PAGE_MAP, os.O_RDONLY | os.O_CLOEXEC)

    def is_written(self, start: int, size: int) -> bool:
        """True if this process has written to some of these pages, so that the kernel has copied them."""
        first, count = (self.address + start) // mmap.PAGESIZE, size // mmap.PAGESIZE
        entries = os.pread(self._page_map.number, 8 * count, 8 * first)
        return len(entries) < 8 * count or bool(entries[7::8].translate(None, _UNWRITTEN))

    def separate(self, start: int, size: int) -> None:
        """Make the kernel copy these pages for this process, as if it had written to them."""
        self.mapping.madvise(_MADV_POPULATE_WRITE, start, size)

    def discard(self, start: int, size: int) -> None:
        """Forget what this process has written to these pages."""
        self.mapping.madvise(mmap.MADV_DONTNEED, start, size)


class _Loan:
    """The base of one lent array. NumPy keeps it alive as long as the array or a view of it exists."""

    __slots__ = ("__array_interface__", "__weakref__", "_mapping")

    def __init__(self, mapping: mmap.mmap, interface: dict[str, Any]) -> None:
        self._mapping, self.__array_interface__ = mapping, interface


class Lender:
    """The lender of the batches of observations in one block of shared memory.

    Args:
        arena: The block.
        layout: Its layout, with spare batches.
    """

    def __init__(self, arena: Arena, layout: Layout) -> None:
        self._memory = PrivateMemory(arena)
        self._interfaces = [[self._make_interface(field) for field in fields] for fields in layout.batches]
        self._pages = [(pages.start, pages.stop - pages.start) for pages in layout.pages]
        self._loans: list[list[weakref.ref[_Loan]]] = [[] for _ in layout.batches]
        self._writes = 0
        _lenders.add(self)

    def _make_interface(self, field: Field) -> dict[str, Any]:
        data = self._memory.address + field.offset, False
        return {"version": 3, "shape": field.shape, "typestr": field.dtype.str, "data": data}

    def lend(self, batch: int) -> list[Array]:
        """Return one array per leaf over a batch, which is not free until they and all views of them are gone."""
        loans = [_Loan(self._memory.mapping, interface) for interface in self._interfaces[batch]]
        self._loans[batch] += map(weakref.ref, loans)
        return [np.asarray(loan) for loan in loans]

    def is_useful(self) -> bool:
        """True unless the program has written into each of the last ``_MAX_WRITES`` results that were lent."""
        return self._writes < _MAX_WRITES

    def has_free(self, *excluded: int | None) -> bool:
        """True if a batch is free that is not one of ``excluded``."""
        return any(batch not in excluded and self._is_free(batch) for batch in range(len(self._loans)))

    def take_free(self, preferred: int, excluded: int | None) -> int:
        """Return the number of a free batch that is not ``excluded``, and discard what the program has written into it.

        This is ``preferred`` if possible. At least one such batch must exist.
        """
        candidates = (batch for batch in (preferred, *range(len(self._loans))) if batch != excluded)
        batch: int = next(filter(self._is_free, candidates))
        if self._loans[batch]:
            pages = self._pages[batch]
            written = self._memory.is_written(*pages)
            if written:
                self._memory.discard(*pages)
            self._writes = self._writes + 1 if written else 0
            self._loans[batch].clear()
        return batch

    def _is_free(self, batch: int) -> bool:
        for loan in self._loans[batch]:  # noqa: SIM110 - a generator takes longer
            if loan() is not None:
                return False
        return True

    def separate(self) -> None:
        """Make the kernel copy all pages of lent batches."""
        for batch, pages in enumerate(self._pages):
            if not self._is_free(batch):
                self._memory.separate(*pages)


_lenders: weakref.WeakSet[Lender] = weakref.WeakSet()


def _separate_all() -> None:
    for lender in list(_lenders):
        lender.separate()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_separate_all, after_in_child=_lenders.clear)
