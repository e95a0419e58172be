"""Tests of engines that need more memory than is available: row 35 of ``FAULTS.md`` (row 34: ``test_lifetimes.py``)."""

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
from envs import ready_engine
from faulty_envs import make_env_fns
from observe import FAULT_MARKS
from signals import Alarm

import vecenv
from vecenv.errors import ArenaError
from vecenv.shm import arena
from vecenv.system import cores
from vecenv.testing.faulty import WitnessEnv

pytestmark = FAULT_MARKS

MIB = 2**20


class MebibyteEnv(gym.Env):
    """An environment with observations of one MiB."""

    observation_space = gym.spaces.Box(0, 255, (MIB,), np.uint8)
    action_space = gym.spaces.Discrete(2)


def fake_kernel_files(monkeypatch: pytest.MonkeyPatch, files: dict[str, str]) -> None:
    """Let the package read these texts, by path; all other files of the kernel seem to be missing."""
    for module in (arena, cores):
        monkeypatch.setattr(module, "read_kernel_file", lambda path: files.get(str(path), ""))


LOW_MEMORY = {
    "machine": {"/proc/meminfo": "MemTotal:  9000 kB\nMemAvailable:    5000 kB\n"},
    "cgroup v2": {
        "/proc/meminfo": "MemAvailable:    5000000 kB\n",
        "/proc/self/cgroup": "0::/\n",
        "/sys/fs/cgroup/memory.max": "9000000\n",
        "/sys/fs/cgroup/memory.current": "3880000\n",
    },
    "parent cgroup": {
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


@pytest.mark.parametrize("limit", LOW_MEMORY)
def test_arena_larger_than_available_memory_raises(
    limit: str, method: str, monkeypatch: pytest.MonkeyPatch, take_stock: Callable[[], Any]
) -> None:
    """The message has both numbers, 8 MiB needed and 5 MB available, and no process was started."""
    fake_kernel_files(monkeypatch, LOW_MEMORY[limit])
    before = take_stock()
    with pytest.raises(ArenaError) as caught:
        vecenv.AsyncVectorEnv([MebibyteEnv] * 8, context=method)
    assert not take_stock().new_since(before)
    assert isinstance(caught.value, MemoryError)
    numbers = [int(number.replace(",", "")) for number in re.findall(r"\d[\d,]*", str(caught.value))]
    assert any(8 * MIB <= number < 17 * MIB for number in numbers), caught.value  # needed
    assert any(5_000_000 < number < 5_200_000 for number in numbers), caught.value  # available


def test_available_memory_is_the_smallest_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control group may have a smaller limit than the machine, or none."""
    fake_kernel_files(monkeypatch, LOW_MEMORY["cgroup v2"])
    assert arena.available_memory() == 9_000_000 - 3_880_000
    fake_kernel_files(monkeypatch, {**LOW_MEMORY["cgroup v2"], "/sys/fs/cgroup/memory.max": "max\n"})
    assert arena.available_memory() == 5_000_000 * 1024
    fake_kernel_files(monkeypatch, {})
    assert arena.available_memory() is None


@pytest.mark.parametrize(("group", "name"), [("cgroup v2", "inactive_file"), ("cgroup v1", "total_inactive_file")])
def test_inactive_page_cache_counts_as_available(group: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    files = LOW_MEMORY[group]
    folder = next(file for file in files if file.startswith("/sys")).rpartition("/")[0]
    fake_kernel_files(monkeypatch, {**files, f"{folder}/memory.stat": f"anon 880000\n{name} 3000000\n"})
    assert arena.available_memory() == 9_000_000 - 880_000


@pytest.mark.parametrize("call", [pytest.param("posix_fallocate", marks=pytest.mark.linux), "pwrite"])
def test_failed_allocation_is_an_arena_error(call: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """An allocation may fail although enough memory seemed available. The error has its size."""

    def raise_no_space(descriptor: int, *args: Any) -> None:
        raise OSError(28, "No space left on device")

    if call == "pwrite":
        monkeypatch.delattr(os, "posix_fallocate", raising=False)
    monkeypatch.setattr(os, call, raise_no_space)
    with pytest.raises(ArenaError, match=r"1,?048,?576.*No space left"):
        arena.Arena(MIB)


@pytest.mark.linux
def test_exception_of_a_signal_handler_during_the_allocation_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    def time_out(descriptor: int, *args: Any) -> None:
        raise Alarm

    monkeypatch.setattr(os, "posix_fallocate", time_out)
    with pytest.raises(Alarm):
        arena.Arena(MIB)


@pytest.mark.linux
def test_arena_cannot_be_truncated(closes: Any) -> None:
    """If a worker could truncate the arena, the caller's next access would end it with SIGBUS."""
    block = closes(arena.Arena(MIB))
    for size in (0, mmap.PAGESIZE, 2 * MIB):
        with pytest.raises(PermissionError):
            os.ftruncate(block.fileno(), size)


def test_zeros_are_written_if_memory_cannot_be_reserved(monkeypatch: pytest.MonkeyPatch, closes: Any) -> None:
    monkeypatch.delattr(os, "posix_fallocate", raising=False)
    monkeypatch.delattr(os, "memfd_create", raising=False)
    size = 3 * MIB + 5
    block = closes(arena.Arena(size))
    assert os.fstat(block.fileno()).st_blocks * 512 >= size
    assert block.buffer[:] == bytes(size)


def test_engine_uses_an_unlinked_file_if_memfd_is_missing(
    method: str, monkeypatch: pytest.MonkeyPatch, take_stock: Callable[[], Any]
) -> None:
    monkeypatch.delattr(os, "memfd_create", raising=False)
    before = take_stock()
    with ready_engine(make_env_fns(2), context=method) as envs:
        rows = [WitnessEnv.read(row) for row in envs.step([1, 2])[0]]
        assert [(row["witness_id"], row["tick"], row["last_action"]) for row in rows] == [(0, 1, 1), (1, 1, 2)]
        assert not take_stock().new_since(before, ["shared_memory"])
        maps = Path("/proc/self/maps").read_text()
        mappings = [line for line in maps.splitlines() if re.search(r"/vecenv-[^/]*$", line)]
        assert mappings
        assert all(line.endswith("(deleted)") for line in mappings)
