"""One copy of read-only arrays for all processes: sealed memory, which travels to a worker as a descriptor.

A table that every environment reads would lie in each worker once. Here it lies in memory that no process can write to any
more, and its arrays are plain NumPy arrays over that. They know nothing of it: :func:`place_of` finds the memory under an
array, and :mod:`vecenv.link.messages` sends its descriptor in place of the data.
"""

from __future__ import annotations

import mmap
from collections.abc import Mapping, Sequence
from multiprocessing import context, reduction
from pickle import PickleBuffer
from typing import Any, NamedTuple, TypeVar

import numpy as np

from vecenv.shm.arena import has_memfd, memory_file, seal
from vecenv.shm.layout import Array
from vecenv.system.descriptors import Descriptor, DescriptorOwner
from vecenv.system.spawning import why_no_processes

__all__ = ["Place", "SharedBlock", "place_of", "share"]

_ALIGNED = 64  # bytes
_Data = TypeVar("_Data", Array, dict[Any, Any])


class Place(NamedTuple):
    """Where an array lies in a block."""

    offset: int
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    strides: tuple[int, ...] | None

    def array(self, memory: Any) -> Array:
        """The array."""
        return np.ndarray(self.shape, self.dtype, memory, self.offset, self.strides)


class SharedBlock(mmap.mmap):
    """Memory that can only be read, and the descriptor by which other processes get it."""

    file: Descriptor

    @classmethod
    def mapped(cls, file: Descriptor, size: int, owner: DescriptorOwner) -> SharedBlock:
        """The memory of a file, which is closed with it."""
        block = cls(file.number, size, access=mmap.ACCESS_READ)
        block.file = file
        owner.go_with(block)
        return block

    @classmethod
    def of(cls, size: int, places: Sequence[Place], arrays: Sequence[Array]) -> SharedBlock:
        """A block of this machine's, with copies of arrays in these places.

        Raises:
            ArenaError: There is no room for it.
        """
        owner = DescriptorOwner(None)
        try:
            memfd = has_memfd()
            file = memory_file(size, owner, "share() needs", memfd=memfd)
            _fill(file.number, size, places, arrays)
            if memfd:
                seal(file, contents=True)
            return cls.mapped(file, size, owner)
        except BaseException:
            owner.close()
            raise

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        if context.get_spawning_popen() is not None:  # to a process that is being started
            return _attached, (len(self), reduction.DupFd(self.file.number))
        return _copied, (PickleBuffer(self),)


def _fill(number: int, size: int, places: Sequence[Place], arrays: Sequence[Array]) -> None:
    with mmap.mmap(number, size) as memory:
        for place, array in zip(places, arrays, strict=True):
            place.array(memory)[...] = array


def _attached(size: int, handle: Any) -> SharedBlock:
    owner = DescriptorOwner(None)
    return SharedBlock.mapped(owner.open(handle.detach), size, owner)


def _copied(data: Any) -> SharedBlock:
    contents = np.frombuffer(data, np.uint8)
    return SharedBlock.of(len(contents), [Place(0, contents.dtype, contents.shape, contents.strides)], [contents])


def place_of(array: Any) -> tuple[SharedBlock, Place] | None:
    """The block that an array, or the array that it is a view of, lies in; and where."""
    root = array
    while isinstance(root, np.ndarray):
        root = root.base
    if type(array) is not np.ndarray or not isinstance(root, SharedBlock):
        return None
    start = np.frombuffer(root, np.uint8).__array_interface__["data"][0]
    offset = array.__array_interface__["data"][0] - start
    return root, Place(offset, array.dtype, array.shape, array.strides)


def share(data: _Data) -> _Data:
    """Put an array, or the arrays of a dict, into memory that all worker processes have in common.

    Args:
        data: An array, or a dict of arrays, of any dtype without objects. It is copied once, here.

    Returns:
        The same as plain arrays that are read-only. Functions that build environments may hold them, or views of them:
        workers of every start method, restarted ones and spare ones read the same memory, and so do the workers of a Ray
        host, which gets one copy. The memory is freed when no process has an array over it. What pickles an array on other
        ways, ``set_attr`` for example, copies it.

    Raises:
        TypeError: It is no array, or an array of objects.
        vecenv.errors.ArenaError: It is more than the machine or its control group has left.
    """
    named: Mapping[Any, Any] = data if isinstance(data, dict) else {None: data}
    places, size = [], 0
    for name, array in named.items():
        what = "share()" if name is None else f"share(): {name!r}"
        if not isinstance(array, np.ndarray):
            raise TypeError(f"{what} got {type(array).__name__}, wanted a NumPy array or a dict of arrays")
        if array.dtype.hasobject:
            raise TypeError(f"{what} got an array of dtype {array.dtype}, wanted one without Python objects")
        whole = array.flags.c_contiguous or array.flags.f_contiguous
        places.append(Place(size, array.dtype, array.shape, array.strides if whole else None))
        size += -(-max(array.nbytes, 1) // _ALIGNED) * _ALIGNED
    if not places:
        return data.copy()
    made: list[Array]
    if why_no_processes():  # there is only this one
        made = [array.copy() for array in named.values()]
        for array in made:
            array.flags.writeable = False
    else:
        block = SharedBlock.of(size, places, list(named.values()))
        made = [place.array(block) for place in places]
    return dict(zip(named, made, strict=True)) if isinstance(data, dict) else made[0]  # type: ignore[return-value]
