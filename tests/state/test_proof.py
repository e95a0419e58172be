"""What cannot be saved exactly is found out by the proof, and named; what can, passes."""

from __future__ import annotations

import functools
import importlib.util
import random
import subprocess
import sys
from collections.abc import Callable
from operator import length_hint
from pathlib import Path
from typing import Any

import gymnasium
import kept_envs
import numpy as np
import pytest
from gymnasium.wrappers import (
    FrameStackObservation,
    NormalizeObservation,
    RecordEpisodeStatistics,
    TimeLimit,
    TransformObservation,
)

from vecenv import state
from vecenv.errors import NotRestorable
from vecenv.testing import assert_restorable

EXACT = [kept_envs.Counts, kept_envs.Built, kept_envs.Generators, kept_envs.Stepwise, kept_envs.Offers, kept_envs.Arrays]
NAMED = {
    kept_envs.ByClass: r"ByClass cannot be saved: .* goes on differently: .*observations.*ByClass\.last",
    kept_envs.ByModule: r"goes on differently: .*kept_envs\._DRAWN",
    kept_envs.ByGlobalGenerator: r"goes on differently: .*numpy's global generator",
    kept_envs.InC: r"InC cannot be saved: loaded into another environment, it goes on differently: .*step 0, observations",
    kept_envs.InClosure: r"goes on differently: .*InClosure\.tick",
    kept_envs.InFrame: r"InFrame\.numbers \(generator\) cannot be saved",
    kept_envs.OverSocket: r"cannot be saved: OverSocket\.line \(socket\): a socket's other end cannot be taken back",
}


@pytest.mark.parametrize("env_fn", EXACT)
def test_plain_python_is_exact(env_fn: Callable[[], Any]) -> None:
    assert_restorable(env_fn)


@pytest.mark.parametrize("env_fn", NAMED)
def test_what_is_hidden_is_found_and_named(env_fn: Callable[[], Any]) -> None:
    with pytest.raises(NotRestorable, match=NAMED[env_fn]):
        assert_restorable(env_fn)


@pytest.mark.long
def test_what_shows_in_one_step_of_ten_is_found_from_every_seed() -> None:
    for seed in range(30):
        with pytest.raises(NotRestorable, match=r"goes on differently: .*step [01], observations"):
            assert_restorable(kept_envs.Sticky, seed=seed)


def made(name: str) -> Callable[[], Any]:
    return functools.partial(gymnasium.make, name)


def wrapped() -> Any:
    """Wrappers that have state."""
    env: Any = gymnasium.make("CartPole-v1")
    env = TransformObservation(env, lambda seen: seen * 2, env.observation_space)
    env = FrameStackObservation(NormalizeObservation(RecordEpisodeStatistics(env)), 3)
    return TimeLimit(env, 50)


@pytest.mark.parametrize("env_fn", [wrapped, *map(made, ("Pendulum-v1", "Blackjack-v1", "FrozenLake-v1"))])
def test_gymnasiums_environments_and_wrappers_are_exact(env_fn: Callable[[], Any]) -> None:
    assert_restorable(env_fn)


@pytest.mark.parametrize("name", ["Ant-v5", "HalfCheetah-v5"])
def test_physics_go_on_from_what_the_solver_starts_from(name: str) -> None:
    pytest.importorskip("mujoco")
    assert_restorable(made(name))


@pytest.mark.long
@pytest.mark.skipif(importlib.util.find_spec("jaxlib") is None, reason="needs JAX: pip install 'vecenv[jax]'")
def test_the_keys_of_jax_are_saved_as_generators_are() -> None:
    program = f"""
import sys
sys.path.insert(0, {str(Path(__file__).parent)!r})
import kept_envs
from vecenv.testing import assert_restorable
assert_restorable(kept_envs.JaxKeys)
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=300)  # JAX starts threads, which stay


def test_the_proof_leaves_shared_generators_as_they_were() -> None:
    np.random.seed(3)
    random.seed(3)
    wanted = np.random.RandomState(3).rand(), random.Random(3).random()
    with pytest.raises(NotRestorable):
        assert_restorable(kept_envs.ByGlobalGenerator)
    assert (np.random.rand(), random.random()) == wanted


def test_an_environment_that_cannot_be_built_again_is_told_of() -> None:
    built: list[Any] = []

    def once() -> Any:
        if built:
            raise OSError("the port is taken")
        built.append(kept_envs.Counts())
        return built[0]

    with pytest.raises(NotRestorable, match=r"once.*the port is taken.*verify=False"):
        assert_restorable(once)


def test_a_codec_is_registered_in_one_line() -> None:
    class Tape:
        __slots__ = ("place",)

        def __init__(self) -> None:
            self.place = iter(range(10**6))

    class Taped(kept_envs.Counts):
        def __init__(self) -> None:
            super().__init__()
            self.tape = Tape()

        def more(self, action: int) -> float:
            return next(self.tape.place)

    def put(tape: Tape, at: int) -> None:
        tape.place = iter(range(at, 10**6))

    state.register(Tape, lambda tape: 10**6 - length_hint(tape.place), put)
    assert_restorable(Taped)
