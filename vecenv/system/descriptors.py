"""File descriptors with exactly one owner each.

The kernel gives the number of a closed descriptor to the next file that is opened. Two objects that both believe that a
number is theirs will one day close, or read, the wrong file; finalizers, which run in any order when the collector meets a
cycle, are where that happens. Here a number lives in a :class:`Descriptor`, which it enters as it is opened and leaves as it
is closed, each in a single call of C that no signal handler and no other thread can interrupt. What is left of them is
closed when their owner is collected or the program ends.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
import weakref
from collections import deque
from collections.abc import Callable
from itertools import chain, starmap
from multiprocessing import reduction
from typing import Any, TypeVar


class Descriptor:
    """An open file number, until :meth:`close`. It can be pickled while a process is being started, which gets a copy."""

    __slots__ = ("_cell",)

    def __init__(self) -> None:
        self._cell: list[int] = []

    @property
    def number(self) -> int:
        """The number; -1 when it is closed."""
        return self._cell[0] if self._cell else -1

    def __bool__(self) -> bool:
        return bool(self._cell)

    def __reduce__(self) -> tuple[Any, ...]:
        return _received, (reduction.DupFd(self.number),)

    def close(self) -> None:
        """Close it. Idempotent."""
        while self._cell:  # of a pipe that was interrupted between its two ends, both
            with contextlib.suppress(IndexError, OSError):
                deque(map(os.close, map(self._cell.pop, (-1,))), maxlen=0)

    def __repr__(self) -> str:
        return f"Descriptor({self.number})"


def _received(handle: Any) -> Descriptor:
    descriptor = Descriptor()
    descriptor._cell.append(handle.detach())
    return descriptor


def take_standard_numbers() -> None:
    """Give 0, 1 and 2 to ``/dev/null`` where they are closed, here and in all processes that are started.

    The next file that is opened would get such a number, and what a library prints would be written into it: a message to a
    worker, or the memory that observations are in.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            opened = os.open(os.devnull, os.O_RDWR)
            if opened > 2:  # another thread had the number first
                os.close(opened)
            else:
                os.set_inheritable(opened, True)


def unnamed_file(folder: str | None = None) -> int:
    """Open a new file that has no name, where the system has none in memory (``memfd_create``)."""
    descriptor, path = tempfile.mkstemp(prefix="vecenv-", dir=folder)
    os.unlink(path)
    return descriptor


Held = TypeVar("Held", "Descriptor", "DescriptorOwner")


class DescriptorOwner:
    """Descriptors that are closed at the latest when ``owner`` is collected.

    Args:
        owner: The object that they belong to; ``None`` for the child of another owner.
    """

    def __init__(self, owner: object | None) -> None:
        self._held: list[Descriptor | DescriptorOwner] = []
        if owner is not None:
            self.go_with(owner)

    def go_with(self, owner: object) -> None:
        """From now on they are closed when this object is collected."""
        take_standard_numbers()
        weakref.finalize(owner, _close_all, self._held, os.getpid())

    def child(self) -> DescriptorOwner:
        """An owner whose descriptors can be closed together, before the rest."""
        return self._kept(DescriptorOwner(None))

    def open(self, function: Callable[..., int], *args: Any) -> Descriptor:
        """The descriptor that ``function(*args)`` opens."""
        descriptor = self._kept(Descriptor())
        descriptor._cell.extend(starmap(function, (args,)))
        return descriptor

    def pipe(self) -> tuple[Descriptor, Descriptor]:
        """A new pipe: its reading and its writing end."""
        reader, writer = self._kept(Descriptor()), self._kept(Descriptor())
        reader._cell.extend(chain.from_iterable(starmap(os.pipe, ((),))))
        writer._cell.extend(map(reader._cell.pop, (-1,)))
        return reader, writer

    def _kept(self, held: Held) -> Held:
        if len(self._held) > 64:
            self._held[:] = filter(None, self._held)
        self._held.append(held)
        return held

    def close(self) -> None:
        """Close what is left. Idempotent."""
        _close_all(self._held, os.getpid())

    def __len__(self) -> int:
        return sum(len(held) if isinstance(held, DescriptorOwner) else bool(held) for held in self._held)


def _close_all(held: list[Descriptor | DescriptorOwner], owner: int) -> None:
    if os.getpid() != owner:  # at the end of a forked child, which holds copies
        return
    for descriptor in held:
        descriptor.close()
