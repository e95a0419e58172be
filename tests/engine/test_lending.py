"""Observations that are lent to the program behave like copies."""

from __future__ import annotations

import functools
import gc
import os
import pickle
import random
import resource
import select
from collections.abc import Callable
from copy import deepcopy
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.vector import SyncVectorEnv

import vecenv
import vecenv.engine.vector_env
from vecenv.errors import VecEnvError
from vecenv.link.observations import LendingStore, SharedStore
from vecenv.shm import fixed_tree, lending
from vecenv.testing import assert_identical

COUNT = 4
IMAGE = spaces.Box(0, 255, (140, 120), np.uint8)
SPACES: dict[str, spaces.Space[Any]] = {
    "image": IMAGE,
    "dict": spaces.Dict({"image": IMAGE, "vector": spaces.Box(-1, 1, (5,), np.float32), "count": spaces.Discrete(1000)}),
}


class RandomImageEnv(gym.Env):
    """An environment with observations that depend on its seed and the number of its steps.

    Action 1 raises, and action 2 ends the process.
    """

    def __init__(self, space: spaces.Space[Any] = IMAGE, length: int = 9) -> None:
        self.observation_space, self.action_space = space, spaces.Discrete(1)  # the actions that fail are not in this space
        self.length, self.steps, self.image = length, 0, np.zeros(IMAGE.shape, np.uint8)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.steps = 0
        return self.observe(), {}

    def observe(self) -> Any:
        self.image = np.full(IMAGE.shape, self.np_random.integers(256), np.uint8)
        self.image[self.steps % 140] = self.steps
        if isinstance(self.observation_space, spaces.Dict):
            vector = self.np_random.uniform(-1, 1, 5).astype(np.float32)
            return {"image": self.image, "vector": vector, "count": self.steps}
        return self.image

    def step(self, action: int) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        if action == 1:
            raise ValueError("this action raises")
        if action == 2:
            os._exit(3)
        self.steps += 1
        return self.observe(), float(self.steps), False, self.steps == self.length, {}


class InPlaceEnv(RandomImageEnv):
    """An environment that writes its observations into a buffer of the engine."""

    def observation_buffer(self, buffer: Any) -> None:
        self.buffer = buffer

    def observe(self) -> Any:
        self.buffer[...] = super().observe()
        return self.buffer


def open_envs(space: spaces.Space[Any] = IMAGE, **options: Any) -> vecenv.AsyncVectorEnv:
    env_fn = functools.partial(RandomImageEnv, space)
    return vecenv.AsyncVectorEnv([env_fn] * COUNT, **{"num_workers": 2, "context": "fork", **options})


def lends(envs: vecenv.AsyncVectorEnv) -> bool:
    return isinstance(envs._driver.store, LendingStore)


def leaves_of(observations: Any) -> list[Any]:
    if isinstance(observations, list):
        return observations
    return list(observations.values()) if isinstance(observations, dict) else [observations]


# -- random programs -------------------------------------------------------------------------------------------------


class Program:
    """A random program that holds and changes observations, with an engine that lends and one that copies."""

    def __init__(self, seed: int, space: spaces.Space[Any], monkeypatch: pytest.MonkeyPatch, **options: Any) -> None:
        self.random, self.seed, self.options = random.Random(seed), seed, options
        self.envs = open_envs(space, **options)
        with monkeypatch.context() as patch:
            patch.setattr(vecenv.engine.vector_env, "count_spare_batches", lambda *_: 0)
            self.reference = open_envs(space, **options)
        assert lends(self.envs)
        assert not lends(self.reference)
        self.held: list[tuple[Any, Any]] = []
        self.saved: list[Any] = []
        self.reset()

    def close(self) -> None:
        self.envs.close()
        self.reference.close()

    def both(self, call: Callable[[Any], Any]) -> bool:
        """Make a call with both engines, compare the outcomes and hold the observations. Return ``False`` after an error."""
        outcomes: list[Any] = []
        for envs in (self.envs, self.reference):
            try:
                outcomes.append(call(envs))
            except (VecEnvError, ValueError) as error:
                outcomes.append(type(error))
        first, second = outcomes
        if isinstance(first, type):
            assert first is second
            return False
        assert_identical(first, second)
        self.held.append((first[0], second[0]))
        return True

    def new_seed(self) -> int:
        self.seed += 1000
        return self.seed

    def reset(self) -> None:
        seed = self.new_seed()
        assert self.both(lambda envs: envs.reset(seed=seed))

    def reset_some(self, rows: list[int] | None = None) -> bool:
        mask, seed = np.zeros(COUNT, np.bool_), self.new_seed()
        mask[self.random.sample(range(COUNT), self.random.randint(1, 3)) if rows is None else rows] = True
        return self.both(lambda envs: envs.reset(seed=seed, options={"reset_mask": mask}))

    def step(self) -> None:
        assert self.both(lambda envs: envs.step([0] * COUNT))

    def fail(self) -> None:
        """Let an environment raise or a worker die, and reset some or all rows if they are not restarted."""
        local = len(self.envs.local_envs) if self.options.get("use_caller") else 0
        row = self.random.randrange(COUNT)
        fault = self.random.choice([1, 1, 2]) if row >= local else 1
        actions = [0] * COUNT
        actions[row] = fault
        if self.both(lambda envs: envs.step(actions)):
            return
        for one, two in zip(leaves_of(self.envs.observations), leaves_of(self.reference.observations), strict=True):
            np.testing.assert_array_equal(one, two)
        if fault == 1 and self.random.random() < 0.7:
            assert self.reset_some([row])
        else:
            self.reset()

    def send_and_receive(self) -> None:
        ids = sorted(self.random.sample(range(COUNT), self.random.randint(1, COUNT)))
        for envs in (self.envs, self.reference):
            envs.send([0] * len(ids), env_id=ids)
        results = [envs.recv(count=len(ids)) for envs in (self.envs, self.reference)]
        orders = [np.argsort(envs.last_received) for envs in (self.envs, self.reference)]
        first, second = (
            [leaf[order] for leaf in leaves_of(result[0])] for result, order in zip(results, orders, strict=True)
        )
        assert_identical(first, second)
        self.held += zip(first, second, strict=True)

    def save(self) -> None:
        self.saved.append([envs.save() for envs in (self.envs, self.reference)])

    def load(self) -> None:
        if self.saved:
            saved = iter(self.random.choice(self.saved))
            assert self.both(lambda envs: (envs.load(next(saved)),))

    def choose_held(self) -> tuple[list[np.ndarray], list[np.ndarray]]:
        """Return the arrays of a held result, and those of the reference; empty lists if none is held."""
        arrays = [pair for pair in self.held if isinstance(pair[0], (np.ndarray, dict))]
        first, second = self.random.choice(arrays) if arrays else ({}, {})
        return leaves_of(first), leaves_of(second)

    def write(self) -> None:
        row, value = self.random.randrange(COUNT), self.random.randrange(100)
        for leaves in self.choose_held():
            for leaf in leaves:
                leaf[row : row + 1] = value

    def hold_view(self) -> None:
        """Hold a part of an array instead of the whole."""
        convert = self.random.choice([
            lambda leaf: leaf[1:], lambda leaf: leaf.reshape(-1)[3:], lambda leaf: leaf.T, lambda leaf: leaf[..., None],
            memoryview, lambda leaf: np.asarray(memoryview(leaf)),
        ])  # fmt: skip
        first, second = self.choose_held()
        if not first:
            return
        self.held = [pair for pair in self.held if leaves_of(pair[0])[0] is not first[0]]
        self.held.append((convert(first[0]), convert(second[0])))

    def hold_pickled(self) -> None:
        first, second = self.choose_held()
        if first:
            self.held.append((pickle.loads(pickle.dumps(first)), deepcopy(second)))

    def drop(self) -> None:
        self.held = self.random.sample(self.held, self.random.randint(1, min(3, len(self.held))))

    def fork(self) -> None:
        """Fork, step on, and check in the child that the held observations are as they were."""
        reader, writer = os.pipe()
        if not (child := os.fork()):
            os.read(reader, 1)
            try:
                assert not lending._lenders, "a child would separate the batches of its parent"
                self.check_held()
            except BaseException:
                os._exit(1)
            os._exit(0)
        for _ in range(4):
            self.step()
            self.drop()
        os.write(writer, b"x")
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0, "observations changed in a forked child"
        os.close(reader)
        os.close(writer)

    def check_held(self) -> None:
        for first, second in self.held:
            for one, two in zip(leaves_of(first), leaves_of(second), strict=True):
                np.testing.assert_array_equal(np.asarray(one), np.asarray(two))

    def run(self, moves: int) -> None:
        usual = [self.step] * 12 + [self.write, self.hold_view, self.drop, self.drop, self.drop]
        rare = [self.reset, self.reset_some, self.send_and_receive, self.save, self.load, self.hold_pickled, self.fail]
        for _ in range(moves):
            self.random.choice(usual + rare)()
            self.check_held()


@pytest.mark.parametrize("moves", [50, pytest.param(3000, marks=[pytest.mark.long, pytest.mark.timeout(1800)])])
@pytest.mark.parametrize("space", SPACES)
@pytest.mark.parametrize(
    "options",
    [{}, {"on_failure": vecenv.Restart(10**6, 1e6)}, {"use_caller": True}, {"autoreset_mode": "SameStep"}],
    ids=["two workers", "restart", "caller's share", "same step"],
)
def test_lent_observations_equal_copies_in_random_programs(
    space: str, options: dict[str, Any], moves: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = Program(random.randrange(10**6), SPACES[space], monkeypatch, **options)
    try:
        for _ in range(moves // 50):
            program.run(50)
            program.fork()
    finally:
        program.close()
    program.check_held()


def test_loans_equal_the_results_of_sync_vector_env() -> None:
    envs, reference = open_envs(SPACES["dict"]), SyncVectorEnv([functools.partial(RandomImageEnv, SPACES["dict"])] * COUNT)
    assert_identical(envs.reset(seed=1), reference.reset(seed=1))
    held = []
    for _ in range(30):
        result, expected = envs.step([0] * COUNT), reference.step([0] * COUNT)
        assert_identical(result, expected)
        held = [*held[-1:], (result[0], deepcopy(expected[0]))]
        for lent, copied in held:
            assert_identical(lent, copied)
    envs.close()


def test_row_that_fails_keeps_the_observation_of_its_latest_step() -> None:
    envs = open_envs()
    envs.reset(seed=1)
    held = envs.step([0] * COUNT)[0]
    envs.send(np.zeros(COUNT, np.int64))
    received = envs.recv(count=2)[0]
    row = int(envs.last_received[0])
    envs.send([1], env_id=[row])
    with pytest.raises(ValueError, match="raises"):
        envs.recv(count=3)
    assert_identical(envs.observations[row], received[0])
    assert (held[row] != received[0]).any()
    envs.close()


@pytest.mark.parametrize("env_threads", [1, 2])
def test_submitted_steps_leave_an_observation_of_an_earlier_reset_as_it_was(env_threads: int) -> None:
    envs = open_envs(num_workers=1, env_threads=env_threads)
    assert lends(envs)
    lent, _ = envs.reset(seed=1)
    expected = lent.copy()
    submissions = envs.submissions()
    for row in range(COUNT):
        submissions.submit(row, "step", 0)
    finished: list[Any] = []
    while len(finished) < COUNT:
        assert select.select([submissions], [], [], 40.0)[0]
        finished += submissions.collect()
    assert [error for _, _, error in finished] == [None] * COUNT
    assert_identical(lent, expected)
    for request, (observation, *_), _ in finished:
        assert (observation != lent[request.rows[0]]).any()
    submissions.close()
    envs.close()


# -- memory ----------------------------------------------------------------------------------------------------------


class ConstantEnv(RandomImageEnv):
    def step(self, action: int) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        return self.image, 0.0, False, False, {}


@pytest.mark.parametrize("kept", [0, 1, 2, 3, 16])
@pytest.mark.parametrize("steps", [1000, pytest.param(100_000, marks=[pytest.mark.long, pytest.mark.timeout(1800)])])
def test_memory_stays_constant(kept: int, steps: int) -> None:
    envs = vecenv.AsyncVectorEnv([ConstantEnv] * COUNT, num_workers=1)
    assert lends(envs)
    envs.reset(seed=0)
    window: list[np.ndarray] = []
    used = []
    for step in range(steps):
        window.append(envs.step([0] * COUNT)[0])
        del window[: len(window) - kept]
        if step % (steps // 4) == steps // 8:
            gc.collect()
            used.append(resident_bytes())
    envs.close()
    # the first sample may be taken before all arrays of the window have been allocated
    assert used[-1] - used[1] < 2_000_000, used


def resident_bytes() -> int:
    """Return the resident bytes of this process."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize()


def test_kept_arrays_outlive_the_engine_and_free_its_memory() -> None:
    def count_mappings() -> int:
        with open("/proc/self/maps") as lines:
            return sum("memfd:vecenv" in line for line in lines)

    gc.collect()
    before = count_mappings()
    envs = open_envs()
    envs.reset(seed=1)
    first, second = (envs.step([0] * COUNT)[0] for _ in range(2))
    copies = first.copy(), second.copy()
    envs.close()
    del envs
    gc.collect()
    assert_identical((first, second), copies)
    first[0] = second[1] = 3
    assert_identical(first[1:], copies[0][1:])
    assert count_mappings() > before
    del first, second
    gc.collect()
    assert count_mappings() == before


# -- when copies are returned ----------------------------------------------------------------------------------------


def count_copies(envs: vecenv.AsyncVectorEnv, steps: int, use: Callable[[np.ndarray], object] = id) -> int:
    """Make steps, and return how many results are copies, which own their memory."""
    copies, last = 0, None
    for _ in range(steps):
        last = envs.step([0] * COUNT)[0]
        copies += last.flags.owndata
        use(last)
    return copies


def test_results_are_lent_unless_the_program_holds_all_batches() -> None:
    envs = open_envs()
    envs.reset(seed=1)
    assert count_copies(envs, 20) == 0
    held: list[np.ndarray] = []
    assert count_copies(envs, 20, held.append) == 17
    held.clear()
    assert count_copies(envs, 20) == 0
    envs.close()


def test_program_that_writes_into_each_result_gets_copies() -> None:
    envs, reference = open_envs(), SyncVectorEnv([RandomImageEnv] * COUNT)
    envs.reset(seed=1)
    reference.reset(seed=1)
    assert count_copies(envs, 40, lambda result: result.fill(0)) >= 30
    for _ in range(40):
        reference.step([0] * COUNT)
    assert_identical(envs.step([0] * COUNT)[0], reference.step([0] * COUNT)[0])
    envs.close()


@pytest.mark.parametrize(
    "options",
    [{"copy": False}, {"num_workers": 0}, {"shared_memory": False}],
    ids=["views", "in process", "pickled"],
)
def test_nothing_is_lent_with_options_that_exclude_it(options: dict[str, Any]) -> None:
    envs = open_envs(**options)
    assert not lends(envs)
    envs.close()


def test_small_and_huge_batches_are_not_lent(monkeypatch: pytest.MonkeyPatch) -> None:
    tree = fixed_tree(IMAGE)
    assert lending.count_spare_batches(tree, 4) == 3
    assert lending.count_spare_batches(tree, 3) == 0
    assert lending.count_spare_batches(None, 4) == 0
    monkeypatch.setattr(lending, "available_memory", lambda: 16 * 3 * 4 * 140 * 120 - 1)
    assert lending.count_spare_batches(tree, 4) == 0
    monkeypatch.setattr(lending, "available_memory", lambda: None)
    assert lending.count_spare_batches(tree, 4) == 0


def test_system_without_a_page_map_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    assert lending.is_possible()
    monkeypatch.setattr(lending, "_PAGE_MAP", "/proc/self/missing")
    lending.is_possible.cache_clear()
    try:
        assert not lending.is_possible()
        envs = open_envs()
        assert type(envs._driver.store) is SharedStore
        envs.close()
    finally:
        lending.is_possible.cache_clear()


def test_pages_count_as_written_if_the_page_map_cannot_be_read(monkeypatch: pytest.MonkeyPatch) -> None:
    envs = open_envs()
    envs.reset(seed=1)
    monkeypatch.setattr(os, "pread", lambda *_: b"")
    assert count_copies(envs, 40) >= 30
    envs.close()


def test_observations_that_environments_write_in_place_are_copied() -> None:
    envs, reference = vecenv.AsyncVectorEnv([InPlaceEnv] * COUNT, num_workers=2), SyncVectorEnv([RandomImageEnv] * COUNT)
    assert_identical(envs.reset(seed=1), reference.reset(seed=1))
    for _ in range(20):
        result = envs.step([0] * COUNT)
        assert result[0].flags.owndata
        assert_identical(result, reference.step([0] * COUNT))
    envs.close()


@pytest.mark.parametrize("on_failure", ["raise", "restart"])
def test_same_arrays_are_returned_every_time_after_copy_is_set_to_false(on_failure: str) -> None:
    actions = np.zeros(COUNT, np.int64)
    envs = open_envs(on_failure=on_failure)
    assert lends(envs)
    envs.reset(seed=0)
    held = [envs.step(actions)[0]]
    envs.copy = False
    first = envs.step(actions)[0]
    for _ in range(3):
        envs.send(actions)
        held.append(envs.recv(count=COUNT)[0])
        assert not np.shares_memory(held[-1], first)
        for _ in range(2):
            assert np.shares_memory(envs.step(actions)[0], first)
    envs.close()
