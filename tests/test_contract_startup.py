"""Start-up: all workers at once, every failure with its cause, and nothing left running."""

from __future__ import annotations

import multiprocessing
import os
import sys
import time
from typing import Any

import gymnasium
import pytest
from envs import PROCESS_ENGINES, CounterEnv, counters, opened

import vecenv
from vecenv.errors import StartupTimeout, VecEnvError

engines = pytest.mark.parametrize("engine", PROCESS_ENGINES.values(), ids=list(PROCESS_ENGINES))


def only_in_a_worker(do: Any) -> Any:
    """A function that builds a :class:`CounterEnv` in this process, and elsewhere does what it is told."""
    here = os.getpid()

    def build() -> gymnasium.Env:
        if os.getpid() != here:
            do()
        return CounterEnv()

    return build


def explode() -> None:
    raise RuntimeError("no display")


@engines
@pytest.mark.parametrize("bad", [0, 1, 2])
def test_an_env_fn_that_raises_in_a_worker_gives_its_own_exception_and_the_index(engine: dict[str, Any], bad: int) -> None:
    fns = counters(3)
    fns[bad] = only_in_a_worker(explode)
    with pytest.raises(RuntimeError, match="no display") as caught:
        vecenv.AsyncVectorEnv(fns, **engine)
    assert f"env {bad}" in str(caught.value) + "\n".join(getattr(caught.value, "__notes__", []))
    assert "explode" in str(caught.value.__cause__)
    assert multiprocessing.active_children() == []


@engines
def test_the_lowest_index_is_raised_when_several_env_fns_raise(engine: dict[str, Any]) -> None:
    def other() -> None:
        raise ValueError("another")

    fns = [*counters(1), only_in_a_worker(explode), only_in_a_worker(other)]
    with pytest.raises(RuntimeError, match="no display"):
        vecenv.AsyncVectorEnv(fns, **engine)


@engines
def test_an_env_fn_that_exits_is_an_error_and_not_the_end_of_the_program(engine: dict[str, Any]) -> None:
    with pytest.raises(VecEnvError, match=r"\b2\b"):
        vecenv.AsyncVectorEnv([*counters(2), only_in_a_worker(lambda: sys.exit(3))], **engine)
    with pytest.raises(VecEnvError):
        vecenv.AsyncVectorEnv([*counters(2), only_in_a_worker(lambda: os._exit(4))], **engine)
    assert multiprocessing.active_children() == []


@engines
def test_a_start_that_hangs_ends_at_start_timeout(engine: dict[str, Any]) -> None:
    begin = time.monotonic()
    with pytest.raises(StartupTimeout) as caught:
        vecenv.AsyncVectorEnv([*counters(2), only_in_a_worker(lambda: time.sleep(60))], start_timeout=0.5, **engine)
    assert time.monotonic() - begin < 10
    assert isinstance(caught.value, TimeoutError)
    assert isinstance(caught.value, multiprocessing.TimeoutError)
    assert multiprocessing.active_children() == []


def test_workers_start_side_by_side() -> None:
    begin = time.monotonic()
    with opened([only_in_a_worker(lambda: time.sleep(0.4))] * 4):
        assert time.monotonic() - begin < 1.4


def test_an_env_fn_that_returns_no_environment_is_an_error() -> None:
    with pytest.raises(Exception, match=r"metadata|int"):
        vecenv.AsyncVectorEnv([lambda: 3] * 2)


@pytest.mark.parametrize(
    "option",
    [
        {"num_workers": -1},
        {"num_workers": 1.5},
        {"num_workers": "many"},
        {"batch_size": 0},
        {"batch_size": 9},
        {"on_failure": "shrug"},
        {"start_timeout": 0},
        {"start_timeout": -1},
        {"threads_per_worker": 0},
        {"strict": "yes"},
    ],
    ids=str,
)
def test_an_option_without_a_meaning_is_refused_before_anything_is_built(option: dict[str, Any]) -> None:
    def never() -> gymnasium.Env:
        raise AssertionError("built too early")

    with pytest.raises((ValueError, TypeError), match=next(iter(option))):
        vecenv.AsyncVectorEnv([never, never], **option)
