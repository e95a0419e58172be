"""Exceptions of signal handlers are never taken for errors of an environment, a snapshot or a codec."""

from __future__ import annotations

import functools
import pickle
import signal
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any

import kept_envs
import numpy as np
import pytest
from signals import Alarm, handled

import vecenv
from vecenv.state.codecs import Codec, name_of, register_rule
from vecenv.testing import assert_identical, assert_isolated, assert_restorable

ACTIONS = np.array([1, 2])


class Bell:
    """A bell that raises a signal once, at the given opportunity."""

    left = 0

    @classmethod
    def chance(cls) -> None:
        cls.left -= 1
        if cls.left == 0:
            signal.raise_signal(signal.SIGUSR2)


@pytest.fixture(autouse=True)
def bell() -> Iterator[None]:
    with handled(signal.SIGUSR2, Alarm):
        yield
        Bell.left = 0


class Rings:
    """An object that rings when it is pickled, unpickled or read."""

    def __reduce__(self) -> Any:
        Bell.chance()
        return _rings, ()

    def __array__(self, dtype: Any = None, copy: Any = None) -> Any:
        Bell.chance()
        return np.zeros(1)


def _rings() -> Rings:
    Bell.chance()
    return Rings()


class RingingDict(dict[str, Any]):
    def __getitem__(self, key: str) -> Any:
        Bell.chance()
        return super().__getitem__(key)


class Ringing(kept_envs.Counts):
    """An environment that rings in calls in its own process."""

    def __init__(self) -> None:
        Bell.chance()
        super().__init__()

    def reset(self, **arguments: Any) -> Any:
        Bell.chance()
        return super().reset(**arguments)

    def step(self, action: Any) -> Any:
        Bell.chance()
        return super().step(action)


class Tape:
    """An object that a codec rebuilds."""


def _made(state: Any) -> Tape:
    Bell.chance()
    return Tape() if state == "a tape" else state.refused


register_rule(name_of(Tape), Codec(lambda tape: "a tape", lambda tape, state: None, make=_made))


class LateTape(kept_envs.Counts):
    """An environment that has no tape before its first step."""

    tape: Tape | None = None

    def step(self, action: Any) -> Any:
        self.tape = self.tape or Tape()
        return super().step(action)


def reset_engine(env_fn: Callable[[], Any] = kept_envs.Generators) -> Any:
    envs = vecenv.AsyncVectorEnv([env_fn] * 2, num_workers=0)
    envs.reset(seed=2)
    envs.step(ACTIONS)
    return closing(envs)


def count_opportunities(call: Callable[[], Any]) -> int:
    """Return the number of opportunities to interrupt a call."""
    Bell.left = 10**9
    call()
    return 10**9 - Bell.left


def interrupt(envs: Any, call: Callable[[], Any], moment: int) -> Any:
    """Return the result of a call that is interrupted once; only the handler's exception may be raised."""
    Bell.left = moment
    with pytest.raises(Alarm):
        call()
    return call() if envs._state.value == "default" else envs.call_wait()


@pytest.mark.parametrize("place", ["rest", "observation", "state_dict", "codec"])
def test_loading_works_after_an_interruption(place: str) -> None:
    with reset_engine(LateTape) as envs:
        if place == "rest":
            envs.set_next_options([{"rings": Rings()}] * 2)
        kept = envs.save(verify=False)
        load: Callable[[], Any] = functools.partial(envs.load, kept)
        if place == "observation":
            load = functools.partial(envs.load, [one.having(observation=Rings()) for one in kept])
        elif place == "state_dict":
            load = functools.partial(envs.load_state_dict, RingingDict(envs.state_dict(verify=False)))
        wanted = envs.step(ACTIONS)
        if place == "codec":
            envs.set_attr("tape", None)
        moments = count_opportunities(load)
        assert moments > 1
        for moment in range(1, moments + 1):
            if place == "codec":
                envs.set_attr("tape", None)
            interrupt(envs, load, moment)
            assert_identical(envs.step(ACTIONS), wanted)


def test_saving_works_after_an_interruption() -> None:
    with reset_engine() as envs:
        envs.set_next_options([{"rings": Rings()}] * 2)
        save = functools.partial(envs.save, verify=False)
        moments = count_opportunities(save)
        assert moments > 1
        for moment in range(1, moments + 1):
            assert len(interrupt(envs, save, moment)) == 2
        kept = vecenv.state.snapshots.StateDict(rings=Rings())
        Bell.left = 1
        with pytest.raises(Alarm):
            pickle.dumps(kept)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("share", [0.0, 0.01, 0.05, 0.1, 0.2, 0.5, 0.9, 1.0])
def test_interrupted_proof_raises_the_handlers_exception(share: float) -> None:
    """In the calling process, an interruption never makes the proof refuse an environment."""
    moments = count_opportunities(lambda: assert_restorable(Ringing))
    with reset_engine(Ringing) as envs:
        assert len(interrupt(envs, envs.save, 1 + round(share * (moments - 1)))) == 2


def test_assertions_propagate_interruptions() -> None:
    for check in (assert_restorable, assert_isolated):
        moments = count_opportunities(lambda check=check: check(Ringing))
        for moment in {1, 2, 5, *range(7, moments, moments // 12), moments}:
            Bell.left = moment
            with pytest.raises(Alarm):
                check(Ringing)
