"""Anonymous shared memory: the memory of a vector environment, and read-only arrays that all processes share.

A memfd has no path, is not limited by the size of ``/dev/shm`` (by default 64 MB in a Docker container), and is freed when
the last process that holds it ends. All of its memory is allocated on creation, so that a lack of memory is an error at the
start and not a SIGBUS hours later. Then it is sealed, so that no worker can truncate it. Systems without memfds use an
unlinked file, which has no seals. If worker processes are not possible either, the memory is private and has no file.

The kernel may grant an allocation that exceeds the available memory; the OOM killer then ends a process, and no error is
returned. So the size is first compared with the memory that the machine and the control group have left.

:func:`share` copies arrays into memory that is then read-only for all processes, and returns plain arrays over it. In place
of the data of such an array, :mod:`vecenv.link.messages` sends the block and the place that :func:`find_place` returns.
"""

from __future__ import annotations

import mmap
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from multiprocessing import context, reduction
from pickle import PickleBuffer
from typing import Any, NamedTuple, TypeVar

import numpy as np

from vecenv.errors import ArenaError
from vecenv.shm.layout import ALIGNMENT, Array
from vecenv.system.cores import control_groups, read_kernel_file
from vecenv.system.descriptors import Descriptor, DescriptorOwner, open_unnamed_file
from vecenv.system.spawning import explain_unsupported_processes

if sys.platform != "win32":
    import fcntl

_UNLIMITED = 1 << 60  # cgroup v1 writes "no limit" as a huge number
_CHUNK_BYTES = 1 << 20
_Data = TypeVar("_Data", Array, dict[Any, Any])


def memory_limits() -> Iterator[tuple[str, int, int]]:
    """Yield (name, bytes left, limit in bytes) for every control group of this process that has a limit.

    The bytes left include the inactive page cache of files, which the kernel frees when memory is needed.
    """
    for folder, name, version in control_groups("memory"):
        files = ("memory.max", "memory.current") if version == 2 else ("memory.limit_in_bytes", "memory.usage_in_bytes")
        limit, usage = (read_kernel_file(f"{folder}/{file}").strip() for file in files)
        if limit.isdigit() and usage.isdigit() and int(limit) < _UNLIMITED:
            stat = dict(line.split() for line in read_kernel_file(f"{folder}/memory.stat").splitlines())
            reclaimable = int(stat.get("inactive_file" if version == 2 else "total_inactive_file", 0))
            yield name, min(max(int(limit) - int(usage) + reclaimable, 0), int(limit)), int(limit)


def available_memory() -> int | None:
    """Return the smallest number of bytes left on the machine and in its control groups; ``None`` if unknown."""
    lines = [line.split() for line in read_kernel_file("/proc/meminfo").splitlines()]
    found = [int(words[1]) * 1024 for words in lines if words[0] == "MemAvailable:"]
    found += [free for _, free, _ in memory_limits()]
    return min(found) if found else None


def _create_memory_file(size: int, owner: DescriptorOwner, message_start: str, advice: str = "") -> Descriptor:
    """Create a zeroed, fully allocated memory file of ``size`` bytes.

    Without memfds and worker processes, return a closed descriptor.

    Raise ``ArenaError`` if the allocation fails, or if ``size`` exceeds the memory that is left. In the latter case, the
    message begins with ``message_start`` and ends with ``advice``.
    """
    free = available_memory()
    if free is not None and size > free:
        raise ArenaError(
            f"{message_start} {size:,} bytes of shared memory, but only {free:,} bytes are available here (the smaller of "
            f"MemAvailable and the memory that the control group has left){advice}"
        )
    if hasattr(os, "memfd_create"):
        file = owner.open(os.memfd_create, "vecenv", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    elif explain_unsupported_processes() is None:
        file = owner.open(open_unnamed_file, "/dev/shm" if os.path.isdir("/dev/shm") else None)
    else:
        return Descriptor()
    try:
        os.ftruncate(file.number, size)
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(file.number, 0, size)
        else:
            _fill(file.number, size)
    except BaseException as error:
        file.close()
        if not isinstance(error, OSError) or isinstance(error, TimeoutError):  # from a signal handler
            raise
        raise ArenaError(f"could not allocate {size:,} bytes of shared memory: {error}") from error
    return file


def _seal(file: Descriptor, *, contents: bool) -> None:
    """Make the size of a memfd final; with ``contents``, its contents too."""
    if hasattr(os, "memfd_create"):
        seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
        fcntl.fcntl(file.number, fcntl.F_ADD_SEALS, seals | fcntl.F_SEAL_WRITE if contents else seals)


def _fill(descriptor: int, size: int) -> None:
    """Allocate a file by writing zeros, because a file system reserves only the blocks that were written."""
    zeros = bytes(min(size, _CHUNK_BYTES))
    written = 0
    while written < size:
        written += os.pwrite(descriptor, zeros[: size - written], written)


class Arena:
    """A block of zeroed memory, shared with processes that receive it when they start.

    Args:
        size: Bytes.

    Raises:
        ArenaError: ``size`` exceeds the memory that the machine or its control group has left, or the allocation fails.
    """

    def __init__(self, size: int) -> None:
        self.size = max(size, 1)
        advice = "; use fewer environments or smaller observations"
        self._file = _create_memory_file(self.size, DescriptorOwner(self), "the environments need", advice)
        try:
            _seal(self._file, contents=False)
            self.buffer = mmap.mmap(self._file.number, self.size)  # -1: private memory without a file
        except BaseException:
            self._file.close()
            raise

    def __reduce__(self) -> tuple[Any, ...]:
        return _attach_arena, (self.size, self._file)

    def fileno(self) -> int:
        """Return the descriptor; -1 if there is no file or it has been closed."""
        return self._file.number

    def close(self) -> None:
        """Close the descriptor. The mapping lives as long as this object or a NumPy view of it."""
        self._file.close()


def _attach_arena(size: int, file: Descriptor) -> Arena:
    arena = Arena.__new__(Arena)
    arena.size, arena._file = size, file
    arena.buffer = mmap.mmap(file.number, size)
    file.close()
    return arena


# -- read-only arrays -----------------------------------------------------------------------------------------------------


class Place(NamedTuple):
    """The location of an array in a block."""

    offset: int
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    strides: tuple[int, ...] | None

    def array(self, memory: Any) -> Array:
        """Return the array, as a view of the block ``memory``."""
        return np.ndarray(self.shape, self.dtype, memory, self.offset, self.strides)


class SharedBlock(mmap.mmap):
    """Read-only memory, with a descriptor from which other processes can map it."""

    file: Descriptor

    @classmethod
    def map_file(cls, file: Descriptor, size: int, owner: DescriptorOwner) -> SharedBlock:
        """Map a file, which is closed when the block is garbage-collected."""
        block = cls(file.number, size, access=mmap.ACCESS_READ)
        block.file = file
        owner.close_with(block)
        return block

    @classmethod
    def from_arrays(cls, size: int, places: Sequence[Place], arrays: Sequence[Array]) -> SharedBlock:
        """Create a block with copies of ``arrays`` at ``places``.

        Raises:
            ArenaError: There is not enough memory.
        """
        owner = DescriptorOwner(None)
        try:
            file = _create_memory_file(size, owner, "share() needs")
            with mmap.mmap(file.number, size) as memory:
                for place, array in zip(places, arrays, strict=True):
                    place.array(memory)[...] = array
            _seal(file, contents=True)
            return cls.map_file(file, size, owner)
        except BaseException:
            owner.close()
            raise

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        if context.get_spawning_popen() is not None:  # pickled for a process that is being started
            return _attach_block, (len(self), reduction.DupFd(self.file.number))
        return _rebuild_block, (PickleBuffer(self),)


def _attach_block(size: int, handle: Any) -> SharedBlock:
    owner = DescriptorOwner(None)
    return SharedBlock.map_file(owner.open(handle.detach), size, owner)


def _rebuild_block(data: Any) -> SharedBlock:
    contents = np.frombuffer(data, np.uint8)
    return SharedBlock.from_arrays(len(contents), [Place(0, contents.dtype, contents.shape, contents.strides)], [contents])


def find_place(array: Any) -> tuple[SharedBlock, Place] | None:
    """Return the block that contains the data of an array, and its place there; ``None`` if there is no such block."""
    root = array
    while isinstance(root, np.ndarray):
        root = root.base
    if type(array) is not np.ndarray or not isinstance(root, SharedBlock):
        return None
    start = np.frombuffer(root, np.uint8).__array_interface__["data"][0]
    offset = array.__array_interface__["data"][0] - start
    return root, Place(offset, array.dtype, array.shape, array.strides)


def share(data: _Data) -> _Data:
    """Copy an array, or the arrays of a dict, into memory that all worker processes share.

    Args:
        data: An array or a dict of arrays, without Python objects or masks. It is copied once, in this call.

    Returns:
        The same data in plain, read-only arrays. Functions that build environments may refer to them, or to views of them:
        all workers, including restarted and spare ones, read the same memory, with every start method. A Ray host gets one
        copy, which its workers share. The memory is freed when no process has an array over it. An array that is sent to a
        worker outside such a function, for example by ``set_attr``, is copied.

    Raises:
        TypeError: ``data`` is not an array or a dict of arrays, or an array contains objects or has a mask.
        vecenv.errors.ArenaError: ``data`` needs more memory than the machine or its control group has left.
    """
    named: Mapping[Any, Any] = data if isinstance(data, dict) else {None: data}
    places, size = [], 0
    for name, array in named.items():
        prefix = "share()" if name is None else f"share(): {name!r}"
        if not isinstance(array, np.ndarray):
            raise TypeError(f"{prefix}: expected a NumPy array or a dict of arrays, got {type(array).__name__}")
        if isinstance(array, np.ma.MaskedArray):
            raise TypeError(
                f"{prefix}: expected an array without a mask, got a masked array: share its data and its mask separately"
            )
        if array.dtype.hasobject:
            raise TypeError(f"{prefix}: expected an array without Python objects, got dtype {array.dtype}")
        contiguous = array.flags.c_contiguous or array.flags.f_contiguous
        places.append(Place(size, array.dtype, array.shape, array.strides if contiguous else None))
        size += -(-max(array.nbytes, 1) // ALIGNMENT) * ALIGNMENT
    if not places:
        return data.copy()
    shared: list[Array]
    if explain_unsupported_processes():  # no other process can share it
        shared = [array.copy() for array in named.values()]
        for array in shared:
            array.flags.writeable = False
    else:
        block = SharedBlock.from_arrays(size, places, list(named.values()))
        shared = [place.array(block) for place in places]
    return dict(zip(named, shared, strict=True)) if isinstance(data, dict) else shared[0]  # type: ignore[return-value]
