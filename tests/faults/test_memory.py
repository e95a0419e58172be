"""Too little memory, said before anything starts: row 35 of the table in ``FAULTS.md`` (row 34: test_lifetimes.py)."""

from __future__ import annotations

import mmap
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from envs import started
from observe import FAULTS
from vandals import crew

import vecenv
from vecenv.errors import ArenaError
from vecenv.shm import arena
from vecenv.testing.faulty import WitnessEnv

pytestmark = FAULTS

MIB = 2**20


class Images(gym.Env):
    """One MiB an observation."""

    observation_space = gym.spaces.Box(0, 255, (MIB,), np.uint8)
    action_space = gym.spaces.Discrete(2)


def pretend(monkeypatch: pytest.MonkeyPatch, files: dict[str, str]) -> None:
    """Let the system say something else in these files; a file that is not named does not exist."""
    monkeypatch.setattr(arena, "kernel_file", lambda path: files.get(str(path), ""))


LITTLE = {
    "machine": {"/proc/meminfo": "MemTotal:  9000 kB\nMemAvailable:    5000 kB\n"},
    "cgroup v2": {
        "/proc/meminfo": "MemAvailable:    5000000 kB\n",
        "/proc/self/cgroup": "0::/\n",
        "/sys/fs/cgroup/memory.max": "9000000\n",
        "/sys/fs/cgroup/memory.current": "3880000\n",
    },
    "group around the own one": {
        "/proc/meminfo": "MemAvailable:    5000000 kB\n",
        "/proc/self/cgroup": "0::/outer/inner\n",
        "/sys/fs/cgroup/outer/inner/memory.max": "max\n",
        "/sys/fs/cgroup/outer/memory.max": "9000000\n",
        "/sys/fs/cgroup/outer/memory.current": "3880000\n",
    },
    "cgroup v1": {
        "/proc/meminfo": "MemAvailable:    5000000 kB\n",
        "/proc/self/cgroup": "5:memory:/\n",
        "/sys/fs/cgroup/memory/memory.limit_in_bytes": "9000000\n",
        "/sys/fs/cgroup/memory/memory.usage_in_bytes": "3880000\n",
    },
}


@pytest.mark.parametrize("limit", LITTLE)
def test_arena_too_large(limit: str, method: str, monkeypatch: pytest.MonkeyPatch, take_stock: Callable[[], Any]) -> None:
    """Eight MiB where five are left: both numbers in the message, and not a process was started."""
    pretend(monkeypatch, LITTLE[limit])
    before = take_stock()
    with pytest.raises(ArenaError) as caught:
        vecenv.AsyncVectorEnv([Images] * 8, context=method)
    assert not take_stock().beyond(before)
    assert isinstance(caught.value, MemoryError)
    numbers = [int(number.replace(",", "")) for number in re.findall(r"\d[\d,]*", str(caught.value))]
    assert any(8 * MIB <= number < 17 * MIB for number in numbers), caught.value  # what it needs
    assert any(5_000_000 < number < 5_200_000 for number in numbers), caught.value  # what there is


def test_available_memory_is_the_smallest_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """The machine's, and the control group's if there is one; unlimited groups do not count."""
    pretend(monkeypatch, LITTLE["cgroup v2"])
    assert arena.available_memory() == 9_000_000 - 3_880_000
    pretend(monkeypatch, {**LITTLE["cgroup v2"], "/sys/fs/cgroup/memory.max": "max\n"})
    assert arena.available_memory() == 5_000_000 * 1024
    pretend(monkeypatch, {})
    assert arena.available_memory() is None


@pytest.mark.parametrize("call", [pytest.param("posix_fallocate", marks=pytest.mark.linux), "pwrite"])
def test_what_the_kernel_cannot_allocate_is_an_error_too(call: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The estimate was too hopeful: the allocation itself fails, as an ArenaError with the size."""

    def no_space(descriptor: int, *args: Any) -> None:
        raise OSError(28, "No space left on device")

    if call == "pwrite":
        monkeypatch.delattr(os, "posix_fallocate", raising=False)
    monkeypatch.setattr(os, call, no_space)
    with pytest.raises(ArenaError, match=r"1,?048,?576.*No space left"):
        arena.Arena(MIB)


@pytest.mark.linux
def test_the_arena_cannot_be_truncated(closes: Any) -> None:
    """A worker that could shrink it could end the trainer with SIGBUS."""
    block = closes(arena.Arena(MIB))
    for size in (0, mmap.PAGESIZE, 2 * MIB):
        with pytest.raises(PermissionError):
            os.ftruncate(block.fileno(), size)


def test_memory_that_the_system_cannot_reserve_is_written_beforehand(monkeypatch: pytest.MonkeyPatch, closes: Any) -> None:
    monkeypatch.delattr(os, "posix_fallocate", raising=False)
    monkeypatch.delattr(os, "memfd_create", raising=False)
    size = 3 * MIB + 5
    block = closes(arena.Arena(size))
    assert os.fstat(block.fileno()).st_blocks * 512 >= size
    assert block.buffer[:] == bytes(size)


def test_without_memfd(method: str, monkeypatch: pytest.MonkeyPatch, take_stock: Callable[[], Any]) -> None:
    """The fallback, an unlinked file, does the same."""
    monkeypatch.delattr(os, "memfd_create", raising=False)
    before = take_stock()
    with started(crew(2), context=method) as envs:
        rows = [WitnessEnv.read(row) for row in envs.step([1, 2])[0]]
        assert [(row["witness_id"], row["tick"], row["last_action"]) for row in rows] == [(0, 1, 1), (1, 1, 2)]
        assert not take_stock().beyond(before, ["shared_memory"])
        maps = Path("/proc/self/maps").read_text()
        ours = [line for line in maps.splitlines() if re.search(r"/vecenv-[^/]*$", line)]
        assert ours
        assert all(line.endswith("(deleted)") for line in ours)
