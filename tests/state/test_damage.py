"""What is damaged, or does not fit, is a SnapshotMismatch, and nothing was changed."""

from __future__ import annotations

import pickle
import random
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from typing import Any

import gymnasium
import kept_envs
import numpy as np
import pytest

import vecenv
from vecenv.errors import SnapshotMismatch
from vecenv.testing import assert_identical

ACTIONS = np.array([1, 2])


class Sized(kept_envs.Counts):
    """Made with a size, and without a spec that would say so."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.observation_space = gymnasium.spaces.Box(-1e12, 1e12, (size,), np.float64)

    def more(self, action: int) -> float:
        return float(self.observation_space.shape[0])  # type: ignore[index]

    def reset(self, **arguments: Any) -> Any:
        super().reset(**arguments)
        return np.zeros(self.observation_space.shape), {}

    def step(self, action: Any) -> Any:
        observation, *rest = super().step(action)
        return np.full(self.observation_space.shape, observation[0]), *rest


def engine(env_fn: Callable[[], Any] = kept_envs.Generators, num_workers: int = 0) -> Any:
    return closing(vecenv.AsyncVectorEnv([env_fn] * 2, num_workers=num_workers))


def begun(envs: Any) -> Any:
    envs.reset(seed=2)
    envs.action_space.seed(3)
    envs.step(ACTIONS)
    return envs


def damaged_bytes(whole: bytes, every: bool) -> Any:
    """(place, damaged): each byte once, or many bits anywhere."""
    rng = random.Random(5)
    for number in range(len(whole) if every else 10_000):
        place = number if every else rng.randrange(len(whole))
        bit = 1 << rng.randrange(8)
        yield place, whole[:place] + bytes([whole[place] ^ (rng.randrange(1, 256) if every else bit)]) + whole[place + 1 :]


@pytest.mark.long
@pytest.mark.parametrize("every", [True, False], ids=["every byte", "10,000 bits"])
@pytest.mark.parametrize("what", ["save", "state_dict"])
def test_damaged_bytes_are_never_loaded(what: str, every: bool) -> None:
    with engine(kept_envs.Counts) as envs, engine(kept_envs.Counts) as twin:
        begun(envs)
        begun(twin)
        save, load = (envs.save, envs.load) if what == "save" else (envs.state_dict, envs.load_state_dict)
        whole = pickle.dumps(save())
        wanted = envs.load(pickle.loads(whole)) if what == "save" else envs.load_state_dict(pickle.loads(whole))
        inside = whole.index(b"_unsealed") + 24  # where the sealed bytes begin
        framing = 0
        for place, spoilt in damaged_bytes(whole, every):
            try:
                found = pickle.loads(spoilt)
            except SnapshotMismatch:
                continue
            except Exception:  # of the few bytes of pickle's own around the sealed ones
                framing += 1
                assert place <= inside or place >= len(whole) - 8, f"byte {place} of {len(whole)}"
                continue
            try:
                said = load(found)
            except SnapshotMismatch:
                continue
            assert_identical(said, wanted, f"byte {place} of {len(whole)}")  # a byte that means nothing
        for _ in range(30):
            assert_identical(envs.step(ACTIONS), twin.step(ACTIONS))
        assert framing < 200 or not every


@pytest.mark.parametrize("part", ["body", "rest"])
def test_each_byte_of_a_snapshot_has_a_checksum(part: str) -> None:
    with engine(kept_envs.Counts) as envs:
        begun(envs)
        one = envs.save()[0]
    for _, spoilt in damaged_bytes(getattr(one, part), every=True):
        with pytest.raises(SnapshotMismatch):
            replace(one, **{part: spoilt}).require_whole()


SPOILT: dict[str, Callable[[Any], Any]] = {
    "another body": lambda one: replace(one, body=pickle.dumps("nothing")),
    "another rest": lambda one: replace(one, rest=pickle.dumps(None)),
    "no rest": lambda one: replace(one, rest=None),
    "text for checksums": lambda one: replace(one, checksums=("a", "b")),
    "another body, with its checksum": lambda one: type(one).of(one.row.kind, pickle.dumps(["x"])),
    "no kind": lambda one: type(one).of(None, one.body),
    "another observation": lambda one: one.having(observation=np.zeros((3, 3))),
    "no observation": lambda one: one.having(observation=None),
}
STATES: dict[str, dict[str, Any]] = {
    "text in counters": {"counters": ("a", "b", "c")},
    "too few counters": {"counters": (1, 2)},
    "negative counters": {"counters": (-1, 2, 0)},
    "counters": {"counters": None},
    "seeds": {"seeds": {"entropy": "x"}},
    "no seeds": {"seeds": None},
    "too few spaces": {"spaces": [None]},
    "spaces": {"spaces": ["x", "y", "z", "w"]},
    "another generator": {"spaces": [[({"bit_generator": "MT19937"}, None)], None, None, None]},
    "snapshots": {"snapshots": None},
}


@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize("case", SPOILT)
def test_a_spoilt_snapshot_is_refused_and_the_engine_goes_on(case: str, num_workers: int) -> None:
    with engine(num_workers=num_workers) as envs:
        begun(envs)
        kept = envs.save(verify=False)
        wanted = [envs.step(ACTIONS) for _ in range(2)]
        envs.load(kept)
        with pytest.raises(SnapshotMismatch):
            envs.load([kept[0], SPOILT[case](kept[1])])
        assert_identical([envs.step(ACTIONS) for _ in range(2)], wanted)


@pytest.mark.parametrize("case", STATES)
def test_a_spoilt_state_dict_is_refused_and_the_engine_goes_on(case: str) -> None:
    with engine() as envs:
        begun(envs)
        state = envs.state_dict(verify=False)
        wanted = envs.step(ACTIONS), envs.action_space.sample()
        envs.load_state_dict(state)
        with pytest.raises(SnapshotMismatch):
            envs.load_state_dict({**state, **STATES[case]})
        assert_identical((envs.step(ACTIONS), envs.action_space.sample()), wanted)


@pytest.mark.parametrize("num_workers", [0, 1])
def test_an_environment_of_another_size_is_refused_and_nothing_is_touched(num_workers: int) -> None:
    with engine(lambda: Sized(2)) as small, engine(lambda: Sized(3), num_workers=num_workers) as large:
        kept = begun(small).save(verify=False)
        begun(large)
        own = large.save(verify=False)
        wanted = large.step(ACTIONS)
        large.load(own)
        with pytest.raises(SnapshotMismatch, match=r"\(2,\).*\(3,\)"):
            large.load(kept)
        assert_identical(large.step(ACTIONS), wanted)
