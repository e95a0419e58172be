"""Tests that exceptions of signal handlers are never reported as errors of an environment, a snapshot or a codec."""

from __future__ import annotations

import functools
import pickle
import signal
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from importlib.metadata import PackageNotFoundError
from typing import Any

import kept_envs
import numpy as np
import pytest
from signals import Alarm, signal_handler

import vecenv
from vecenv.state.codecs import Codec, register_rule, registered_name
from vecenv.state.snapshots import package_version
from vecenv.testing import assert_identical, assert_isolated, assert_restorable

ACTIONS = np.array([1, 2])


class Interruption:
    """A signal with a handler that raises. It is sent by the last of ``remaining`` calls of :meth:`send_if_due`."""

    remaining = 0

    @classmethod
    def send_if_due(cls) -> None:
        cls.remaining -= 1
        if cls.remaining == 0:
            signal.raise_signal(signal.SIGUSR2)


@pytest.fixture(autouse=True)
def raising_handler() -> Iterator[None]:
    with signal_handler(signal.SIGUSR2, Alarm):
        yield
        Interruption.remaining = 0


class InterruptibleObject:
    """An object that can be interrupted when it is pickled, unpickled or converted to an array."""

    def __reduce__(self) -> Any:
        Interruption.send_if_due()
        return _unpickle, ()

    def __array__(self, dtype: Any = None, copy: Any = None) -> Any:
        Interruption.send_if_due()
        return np.zeros(1)


def _unpickle() -> InterruptibleObject:
    Interruption.send_if_due()
    return InterruptibleObject()


class InterruptibleDict(dict[str, Any]):
    def __getitem__(self, key: str) -> Any:
        Interruption.send_if_due()
        return super().__getitem__(key)


class InterruptibleEnv(kept_envs.CountingEnv):
    """An environment that can be interrupted in its constructor, in resets and in steps."""

    def __init__(self) -> None:
        Interruption.send_if_due()
        super().__init__()

    def reset(self, **arguments: Any) -> Any:
        Interruption.send_if_due()
        return super().reset(**arguments)

    def step(self, action: Any) -> Any:
        Interruption.send_if_due()
        return super().step(action)


class Tape:
    """An object that is rebuilt by a codec."""


def _make_tape(state: Any) -> Tape:
    Interruption.send_if_due()
    if state != "a tape":
        raise ValueError("the state of another class")
    return Tape()


register_rule(registered_name(Tape), Codec(lambda tape: "a tape", lambda tape, state: None, make=_make_tape))


class LateTapeEnv(kept_envs.CountingEnv):
    """An environment that builds its tape only in the first step."""

    tape: Tape | None = None

    def step(self, action: Any) -> Any:
        self.tape = self.tape or Tape()
        return super().step(action)


def open_stepped_engine(env_fn: Callable[[], Any] = kept_envs.GeneratorsEnv) -> Any:
    """Return a context manager with an engine of two environments after a reset and a step."""
    envs = vecenv.AsyncVectorEnv([env_fn] * 2, num_workers=0)
    envs.reset(seed=2)
    envs.step(ACTIONS)
    return closing(envs)


def count_moments(call: Callable[[], Any]) -> int:
    """Return the number of moments at which a call can be interrupted."""
    Interruption.remaining = 10**9
    call()
    return 10**9 - Interruption.remaining


def interrupt_and_complete(envs: Any, call: Callable[[], Any], moment: int) -> Any:
    """Interrupt a call, check that it raises the handler's exception, then complete it and return its result."""
    Interruption.remaining = moment
    with pytest.raises(Alarm):
        call()
    return call() if envs._state.value == "default" else envs.call_wait()


@pytest.mark.parametrize("place", ["rest", "observation", "state_dict", "codec"])
def test_interrupted_load_succeeds_in_the_next_call(place: str) -> None:
    with open_stepped_engine(LateTapeEnv) as envs:
        if place == "rest":
            envs.set_next_options([{"object": InterruptibleObject()}] * 2)
        snapshots = envs.save(verify=False)
        load: Callable[[], Any] = functools.partial(envs.load, snapshots)
        if place == "observation":
            replaced = [snapshot.having(observation=InterruptibleObject()) for snapshot in snapshots]
            load = functools.partial(envs.load, replaced)
        elif place == "state_dict":
            load = functools.partial(envs.load_state_dict, InterruptibleDict(envs.state_dict(verify=False)))
        expected = envs.step(ACTIONS)
        if place == "codec":
            envs.set_attr("tape", None)
        moments = count_moments(load)
        assert moments > 1
        for moment in range(1, moments + 1):
            if place == "codec":
                envs.set_attr("tape", None)
            interrupt_and_complete(envs, load, moment)
            assert_identical(envs.step(ACTIONS), expected)


def test_interrupted_save_succeeds_in_the_next_call() -> None:
    with open_stepped_engine() as envs:
        envs.set_next_options([{"object": InterruptibleObject()}] * 2)
        save = functools.partial(envs.save, verify=False)
        moments = count_moments(save)
        assert moments > 1
        for moment in range(1, moments + 1):
            assert len(interrupt_and_complete(envs, save, moment)) == 2


def test_interrupted_pickling_of_a_state_dict_raises_the_handlers_exception() -> None:
    state = vecenv.state.snapshots.StateDict(object=InterruptibleObject())
    Interruption.remaining = 1
    with pytest.raises(Alarm):
        pickle.dumps(state)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("fraction", [0.0, 0.01, 0.05, 0.1, 0.2, 0.5, 0.9, 1.0])
def test_interrupted_verification_raises_the_handlers_exception(fraction: float) -> None:
    """In the calling process, an interruption never makes the verification fail."""
    moments = count_moments(lambda: assert_restorable(InterruptibleEnv))
    with open_stepped_engine(InterruptibleEnv) as envs:
        assert len(interrupt_and_complete(envs, envs.save, 1 + round(fraction * (moments - 1)))) == 2


def test_interrupted_assert_functions_raise_the_handlers_exception() -> None:
    for check in (assert_restorable, assert_isolated):
        moments = count_moments(lambda check=check: check(InterruptibleEnv))
        for moment in {1, 2, 5, *range(7, moments, moments // 12), moments}:
            Interruption.remaining = moment
            with pytest.raises(Alarm):
                check(InterruptibleEnv)


def test_time_limit_during_the_search_for_a_version_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    """``importlib.metadata`` suppresses all exceptions while it lists folders."""

    def suppress_all(package: str) -> str:
        with suppress(Exception):
            signal.raise_signal(signal.SIGUSR1)
        raise PackageNotFoundError(package)

    monkeypatch.setattr("importlib.metadata.version", suppress_all)
    with signal_handler(signal.SIGUSR1, Alarm), pytest.raises(Alarm):
        package_version("kept_envs")
