"""Tests that functions which ignore errors of the system raise the ``TimeoutError`` of a signal handler."""

from __future__ import annotations

import json
import os
import signal
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gymnasium.error import ClosedEnvironmentError
from signals import Alarm, interrupt_at, signal_handler

import vecenv
from vecenv.engine import published
from vecenv.recording import file
from vecenv.shm import lending
from vecenv.system import cores, descendants, descriptors

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="files of Linux")


def review_spins() -> None:
    policy = cores.SpinPolicy(1e-6, np.zeros(1), frozenset(os.sched_getaffinity(0)))
    policy._bind(policy._cpus)


def remove_recorded(tmp_path: Path) -> None:
    (tmp_path / f"old{file.SUFFIX}").write_bytes(b"")
    file.remove_old(tmp_path, 0, [])


FUNCTIONS: dict[str, tuple[types.ModuleType, Callable[[Path], object]]] = {
    "read_kernel_file": (cores, lambda _: cores.read_kernel_file("/proc/self/stat")),
    "SpinPolicy": (cores, lambda _: review_spins()),
    "end_group": (descendants, lambda _: descendants.end_group([1 << 22])),
    "lending.is_possible": (lending, lambda _: lending.is_possible.__wrapped__()),
    "remove_old": (file, remove_recorded),
    "find_files": (published, lambda _: list(published.find_files())),
}


def assert_no_time_limit_is_lost(module: types.ModuleType, function: Callable[[], object]) -> None:
    """Check that an exception of a signal handler at any call or return inside the module leaves the function."""

    def finish() -> str:
        function()
        return "finished"

    assert module.__file__ is not None
    event, fired = 1, True
    with signal_handler(signal.SIGUSR2, Alarm):
        while fired:
            fired, result = interrupt_at(event, finish, module.__file__)
            assert not fired or result != "finished", f"the exception at event {event} was lost"
            event += 1
    assert event > 3


@pytest.mark.parametrize("name", FUNCTIONS)
def test_time_limit_inside_a_function_that_ignores_errors_of_the_system_is_raised(name: str, tmp_path: Path) -> None:
    module, function = FUNCTIONS[name]
    assert_no_time_limit_is_lost(module, lambda: function(tmp_path))


def test_time_limit_while_a_descriptor_is_closed_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    close = os.close

    def close_late(number: int) -> None:
        close(number)
        raise Alarm

    descriptor = descriptors.DescriptorOwner(None).open(os.open, os.devnull, os.O_RDONLY)
    monkeypatch.setattr(os, "close", close_late)
    with pytest.raises(Alarm):
        descriptor.close()
    monkeypatch.undo()
    assert not descriptor


def test_time_limit_while_statistics_are_published_is_raised(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, closes: Any
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    envs = closes(vecenv.make_vec("CartPole-v1", 2, num_workers=1))
    envs.reset(seed=0)
    envs.publish_stats()

    def publish() -> None:
        envs._stats_file._due = 0.0
        envs._stats_file.on_result(None, ())

    assert_no_time_limit_is_lost(published, publish)


@pytest.mark.parametrize("by_variable", [False, True])
def test_interrupted_publish_stats_can_be_repeated_and_leaves_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, closes: Any, by_variable: bool
) -> None:
    def rename_and_interrupt(path: Path, target: Path) -> None:
        os.rename(path, target)
        signal.raise_signal(signal.SIGUSR2)

    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    if by_variable:
        monkeypatch.setenv("VECENV_TOP", "1")
    envs = closes(vecenv.make_vec("CartPole-v1", 2, num_workers=1))
    publish = envs.reset if by_variable else envs.publish_stats
    with monkeypatch.context() as patches:
        patches.setattr(Path, "rename", rename_and_interrupt)
        with signal_handler(signal.SIGUSR2, Alarm), pytest.raises(Alarm):
            publish()
    publish()
    assert json.loads(envs._stats_file._path.read_text())["name"] == "CartPole-v1"
    assert envs._stats_file in envs._driver.observers
    envs.close()
    assert list(tmp_path.joinpath("vecenv").iterdir()) == []


def test_close_in_a_signal_handler_while_statistics_are_written_leaves_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, closes: Any
) -> None:
    def dump_and_interrupt(stats: Any, file: Any) -> None:
        file.write(json.dumps(stats))
        signal.raise_signal(signal.SIGUSR2)

    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    envs = closes(vecenv.make_vec("CartPole-v1", 2, num_workers=1))
    envs.publish_stats()
    envs.reset(seed=0)
    envs._stats_file._due = 0.0
    monkeypatch.setattr(published.json, "dump", dump_and_interrupt)
    with signal_handler(signal.SIGUSR2, lambda *_: envs.close()), pytest.raises(ClosedEnvironmentError):
        envs.step(envs.action_space.sample())
    assert list(tmp_path.joinpath("vecenv").iterdir()) == []
