"""Section 1.5: how actions reach the environments, and what a step returns."""

from __future__ import annotations

import types
import warnings
from typing import Any

import numpy as np
import pytest
from envs import (
    ALL_SPACES,
    EchoEnv,
    Options,
    ReturningEnv,
    counters,
    describe,
    opened,
    raises_logged,
    started,
)
from gymnasium import spaces
from gymnasium.error import ResetNeeded
from gymnasium.vector.utils import batch_space, iterate

ZEROS = np.zeros(4, dtype=np.float32)


def echo(space: spaces.Space, mutate: bool = False) -> Any:
    return lambda: EchoEnv(space, mutate)


def returning(*steps: Any) -> Any:
    return lambda: ReturningEnv([(ZEROS, {})], steps)


@pytest.mark.parametrize("name", ALL_SPACES)
def test_a_sample_of_any_action_space_reaches_each_environment_as_it_is(engine: Options, name: str) -> None:
    space = ALL_SPACES[name]
    with started([echo(space)] * 3, **engine) as envs:
        envs.action_space.seed(3)
        for _ in range(2):
            actions = envs.action_space.sample()
            infos = envs.step(actions)[4]
            assert infos["action"].tolist() == [describe(a) for a in iterate(envs.action_space, actions)]


class Foreign:
    """An array of another library: what NumPy can make an array of, and whose rows are of its own kind."""

    def __init__(self, values: Any) -> None:
        self.values = np.asarray(values)

    def __array__(self, *arguments: Any, **options: Any) -> np.ndarray:
        return self.values.__array__(*arguments)

    def __len__(self) -> int:
        return len(self.values)

    def __iter__(self) -> Any:
        return map(Foreign, self.values)


def test_an_array_of_another_library_is_warned_of_once() -> None:
    with started(counters(2)) as envs:
        with pytest.warns(UserWarning, match=r"actions are a test_engine_step Foreign.*Pass numpy\.asarray\(actions\)"):
            envs.step(Foreign([0, 1]))
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            envs.step(Foreign([0, 1]))
            envs.step([0, 1])


BOX = spaces.Box(-1, 1, (2,), np.float32)
ARM = spaces.Dict({"arm": spaces.Box(-1, 1, (2,), np.float32), "gear": spaces.Discrete(3)})


@pytest.mark.parametrize(
    ("space", "actions", "wanted"),
    [
        (spaces.Discrete(5), np.array([1, 2]), [np.int64(1), np.int64(2)]),
        (spaces.Discrete(5), np.array([1, 2], np.int32), [np.int32(1), np.int32(2)]),
        (spaces.Discrete(5), np.array([1, 2], np.uint8), [np.uint8(1), np.uint8(2)]),
        (spaces.Discrete(5), np.array([1.5, 2.0]), [np.float64(1.5), np.float64(2.0)]),
        (spaces.Discrete(5), np.array([True, False]), [np.True_, np.False_]),
        (spaces.Discrete(5), [1, 2], [1, 2]),
        (spaces.Discrete(5), (1, 2), [1, 2]),
        (spaces.Discrete(5), {1: "x", 2: "y"}, [1, 2]),
        (spaces.Discrete(5), "ab", ["a", "b"]),
        (spaces.Discrete(5), [np.int64(1), 2], [np.int64(1), 2]),
        (spaces.Discrete(5), np.array([99, -7]), [np.int64(99), np.int64(-7)]),
        (BOX, np.ones((2, 2), np.float32), [np.ones(2, np.float32)] * 2),
        (BOX, np.ones((2, 2), np.float64), [np.ones(2, np.float64)] * 2),
        (BOX, np.ones((2, 2), np.int64), [np.ones(2, np.int64)] * 2),
        (BOX, np.full((2, 2), 50, np.float32), [np.full(2, 50, np.float32)] * 2),
        (BOX, [[0.5, 1.0], [2, 3]], [[0.5, 1.0], [2, 3]]),
        (BOX, [np.ones(2, np.float32), [1.0, 2.0]], [np.ones(2, np.float32), [1.0, 2.0]]),
        (BOX, np.asfortranarray(np.arange(4, dtype=np.float32).reshape(2, 2)), None),
        (BOX, np.arange(8, dtype=np.float32).reshape(2, 4)[:, ::2], None),
        (BOX, np.ones((2, 2), ">f4"), None),
        (
            spaces.Box(0, 1, (), np.float32),
            np.array([0.25, 0.5], np.float32),
            [np.float32(0.25), np.float32(0.5)],
        ),
        (spaces.Box(0, 1, (), np.float32), [0.25, 0.5], [0.25, 0.5]),
        (spaces.MultiDiscrete([3, 3]), np.array([[1, 2], [0, 1]]), [np.array([1, 2]), np.array([0, 1])]),
        (spaces.MultiDiscrete([3, 3]), np.array([[1, 2], [0, 1]], np.int16), None),
        (spaces.MultiBinary(2), np.array([[1, 0], [0, 1]], np.int8), None),
        (spaces.MultiBinary(2), [[1, 0], [0, 1]], [[1, 0], [0, 1]]),
        (spaces.Text(3), ("ab", "c"), ["ab", "c"]),
        (spaces.Text(3), ["ab", "c"], ["ab", "c"]),
        (ARM, {"gear": np.array([1, 2]), "arm": np.ones((2, 2), np.float32)}, None),
        (ARM, {"arm": np.ones((2, 2), np.float64), "gear": [1, 2]}, None),
        (spaces.Tuple((spaces.Discrete(3), BOX)), (np.array([1, 2]), np.ones((2, 2), np.float32)), None),
        (
            spaces.Tuple((spaces.Discrete(3), BOX)),
            (np.array([1, 2], np.int8), [[1.0, 2.0], [3.0, 4.0]]),
            None,
        ),
        (spaces.Tuple((spaces.Discrete(3), BOX)), [np.array([1, 2]), np.ones((2, 2), np.float32)], None),
        (spaces.Tuple((spaces.Discrete(3), BOX)), [[1, 2], [[1.0, 2.0], [3.0, 4.0]]], None),
        (spaces.Tuple((spaces.Discrete(3),) * 3), np.array([[1, 2], [0, 1], [2, 2]]), None),
        (spaces.Tuple((spaces.Discrete(3),) * 3), [[1, 2], (0, 1), np.array([2, 2])], None),
        (spaces.Tuple((spaces.Discrete(3), ARM)), [[1, 2], {"gear": [1, 0], "arm": np.ones((2, 2))}], None),
        (spaces.Tuple((spaces.Text(3), spaces.Discrete(3), spaces.Text(3))), [["a", "b"], [1, 2], ("c", "d")], None),
        (spaces.Tuple((spaces.Text(3), spaces.Text(3), spaces.Text(3))), (["a", "b"], ["e", "f"], ("c", "d")), None),
        (spaces.Tuple((spaces.Tuple((spaces.Discrete(3), BOX)),)), [[[1, 2], np.ones((2, 2))]], None),
        (spaces.Tuple((spaces.Discrete(3), BOX)), {1: np.ones((2, 2)), 0: [1, 2]}, None),
        (ARM, types.MappingProxyType({"arm": np.ones((2, 2)), "gear": [1, 2]}), None),
        (ARM, np.array([([1, 2], 3), ([4, 5], 6)], [("arm", np.float32, 2), ("gear", np.int64)]), None),
        (spaces.Dict({"t": spaces.Tuple((spaces.Discrete(3), spaces.Text(3)))}), {"t": [[1, 2], ["a", "b"]]}, None),
    ],
)
def test_actions_reach_the_environments_uncast(engine: Options, space: spaces.Space, actions: Any, wanted: Any) -> None:
    if wanted is None:
        wanted = list(iterate(batch_space(space, 2), actions))
    with started([echo(space)] * 2, **engine) as envs:
        assert envs.step(actions)[4]["action"].tolist() == [describe(action) for action in wanted]


def test_a_generator_of_actions_works(engine: Options) -> None:
    with started([echo(spaces.Discrete(5))] * 2, **engine) as envs:
        assert envs.step(number for number in (3, 4))[4]["action"].tolist() == [describe(3), describe(4)]


class Hurried:
    """Words whose first look is interrupted by a time limit."""

    limit: Exception | None = TimeoutError("time is up")

    def __iter__(self) -> Any:
        if self.limit is not None:
            self.limit, limit = None, self.limit
            raise limit
        return iter(["ab", "c"])


def test_what_a_signal_handler_raises_among_words_is_not_told_as_gymnasiums_own() -> None:
    words = Hurried()
    with started([echo(spaces.Text(3))] * 2, num_workers=0) as envs:
        with pytest.raises(TimeoutError, match="time is up"):
            envs.step(words)
        assert envs.step(words)[4]["action"].tolist() == [describe("ab"), describe("c")]
        with pytest.raises(TypeError, match=r"actions: got object .*, wanted 2, one per environment"):
            envs.step(object())


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_an_action_is_the_environments_own_array(engine: Options, dtype: Any) -> None:
    with started([echo(BOX)] * 3, **engine) as envs:
        sent = [np.full((3, 2), t, dtype) for t in range(4)]
        for actions in sent:
            infos = envs.step(actions)[4]
            assert infos["writeable"].all()
        assert envs.call("history") == tuple([[describe(actions[i]) for actions in sent] for i in range(3)])


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("how", [{"num_workers": 0}, {"num_workers": 2}, {"num_workers": 1, "use_caller": True}], ids=str)
def test_an_environment_may_write_into_its_action(how: Options, dtype: Any) -> None:
    """One that is staged, and one that goes by pickle, alone in a message or with all others."""
    with started([echo(BOX, mutate=True)] * 3, **how) as envs:
        for actions in (np.ones((3, 2), dtype), list(np.ones((3, 2), dtype))):
            for step in (envs.step, lambda given: envs.send(given, range(3)) or envs.recv(count=3)):
                infos = step(actions)[4]
                assert infos["action"].tolist() == [describe(np.ones(2, dtype))] * 3
                np.testing.assert_array_equal(actions, np.ones((3, 2)))


PAIR = spaces.Tuple((spaces.Discrete(5), BOX, spaces.Text(3)))
FIVE = spaces.Discrete(5)
SOME = [ALL_SPACES[name] for name in ("discrete", "box-float32", "dict", "tuple-nested", "text", "graph")]


def sampled(space: spaces.Space, count: int) -> Any:
    """So many actions, as the space batches them; of what is no list, one at least."""
    if isinstance(space, spaces.Dict | spaces.Tuple):
        return batch_space(space, max(count, 1)).sample()
    return list(iterate(batch_space(space, 7), batch_space(space, 7).sample()))[:count]


MISFITS: list[tuple[spaces.Space, Any, Any]] = [
    *((space, sampled(space, count), (ValueError, TypeError)) for space in SOME for count in (0, 2, 4)),
    *((FIVE, kind([0] * count), ValueError) for count in (0, 1, 2, 4) for kind in (list, np.array)),
    *((FIVE, one, TypeError) for one in (3, None, 1.5, np.int64(3), np.array(3))),
    (ARM, {"arm": np.ones((3, 2), np.float32)}, Exception),  # Gymnasium's own depends on the structure
    (ARM, {"gear": np.ones(3, np.int64)}, Exception),
    (ARM, {"arm": np.ones((3, 2), np.float32), "gear": np.ones(2, np.int64)}, Exception),
    (ARM, {"arm": np.ones((3, 2), np.float32), "gear": 1}, Exception),
    (ARM, np.ones((3, 3)), Exception),
    (ARM, 7, Exception),
    *(
        (PAIR, parts, (ValueError, TypeError))
        for parts in (
            [[0, 1, 2], np.zeros((3, 2))],
            [[0, 1, 2], np.zeros((3, 2)), ["a", "b", "c"], 5],
            [[0, 1, 2], np.zeros((4, 2)), ["a", "b", "c"]],
            [[0, 1, 2, 3], np.zeros((3, 2)), ["a", "b", "c"]],
            ([0, 1, 2], np.zeros((3, 2)), ["a", "b", "c", "d"]),
            [[0, 1, 2], np.zeros((3, 2)), ["a", "b"]],
            [(0, np.zeros(2), "a"), (1, np.zeros(2), "b")],
            {0: [0, 1, 2], 1: np.zeros((3, 2))},
            {"x": 1},
            iter([1, 2]),
            5,
        )
    ),
]


@pytest.mark.parametrize(("space", "actions", "error"), MISFITS)
def test_actions_that_do_not_fit_are_refused_before_any_environment_moves(
    engine: Options, space: spaces.Space, actions: Any, error: Any
) -> None:
    with started([echo(space)] * 3, **engine) as envs:
        with pytest.raises(error):
            envs.step(actions)
        assert envs.call("history") == ([], [], [])
        assert envs.step(envs.action_space.sample())[0].tolist() == [1, 1, 1]


@pytest.mark.parametrize("copied", [True, False], ids=["copy", "no-copy"])
def test_rewards_and_flags_are_fresh_writeable_arrays_whatever_the_copy_mode(engine: Options, copied: bool) -> None:
    with started(counters(3), copy=copied, **engine) as envs:
        first = envs.step([0, 0, 0])[1:4]
        kept = [array.copy() for array in first]
        second = envs.step([0, 0, 0])[1:4]
        for one, two, before in zip(first, second, kept, strict=True):
            assert one.flags.writeable
            assert not np.shares_memory(one, two)
            np.testing.assert_array_equal(one, before)
            one[:] = 1
        assert envs.step([0, 0, 0])[1].tolist() == [0.003, 1.003, 2.003]


@pytest.mark.parametrize(
    ("reward", "wanted"),
    [
        (1, 1.0),
        (-2.5, -2.5),
        (True, 1.0),
        (np.float32(0.1), float(np.float32(0.1))),
        (np.int64(3), 3.0),
        (np.array(2.5), 2.5),
        ("2.5", 2.5),
        (None, np.nan),
        (float("inf"), np.inf),
        (float("nan"), np.nan),
    ],
)
def test_a_reward_becomes_a_float64(engine: Options, reward: Any, wanted: float) -> None:
    with started([returning((ZEROS, reward, False, False, {}))] * 2, **engine) as envs:
        rewards = envs.step([0, 0])[1]
        assert rewards.dtype == np.float64
        np.testing.assert_array_equal(rewards, [wanted, wanted])


@pytest.mark.parametrize("flag", [np.True_, 1, np.array(True)], ids=["np.True_", "1", "array"])
def test_a_flag_becomes_a_bool_and_ends_the_episode(engine: Options, flag: Any) -> None:
    fns = [returning((ZEROS, 1.0, flag, False, {})), returning((ZEROS, 1.0, False, flag, {}))]
    with started(fns, **engine) as envs:
        _, _, terminations, truncations, _ = envs.step([0, 0])
        assert terminations.dtype == truncations.dtype == np.bool_
        assert terminations.tolist() == [True, False]
        assert truncations.tolist() == [False, True]
        assert envs.step([0, 0])[1].tolist() == [0.0, 0.0]


@pytest.mark.parametrize(
    "step",
    [
        (ZEROS, np.array([1.0]), False, False, {}),
        (ZEROS, 1.0, np.array([True]), False, {}),
        (ZEROS, np.array([1.0, 2.0]), False, False, {}),
    ],
    ids=["reward-of-one", "flag-of-one", "reward-of-two"],
)
def test_a_reward_or_flag_that_is_an_array_is_squeezed_or_refused_never_mis_stored(
    engine: Options, shared_memory: bool, step: tuple[Any, ...]
) -> None:
    good = (ZEROS, 1.0, True, False, {})
    fns = [returning(good), returning(step)]
    with started(fns, shared_memory=shared_memory, **engine) as envs:
        try:
            _, rewards, terminations, _, _ = envs.step([0, 0])
        except (ValueError, TypeError):
            return
        assert rewards.tolist() == [1.0, 1.0]
        assert terminations.tolist() == [True, bool(np.all(step[2]))]


@pytest.mark.parametrize(
    "step",
    [(ZEROS, 1.0, False, {}), (ZEROS,), (ZEROS, 1.0, False, False, {}, 6), None, 3],
    ids=["4", "1", "6", "None", "3"],
)
def test_a_step_that_returns_other_than_five_values_is_an_error(engine: Options, step: Any) -> None:
    with started([returning((ZEROS, 1.0, False, False, {})), returning(step)], **engine) as envs:
        with raises_logged((ValueError, TypeError)):
            envs.step([0, 0])
        envs.reset(seed=1)


def test_a_step_before_the_first_reset_is_the_environments_affair(engine: Options) -> None:
    import gymnasium

    with opened([lambda: gymnasium.make("CartPole-v1")] * 2, **engine) as envs:
        with raises_logged(ResetNeeded, failures=2):
            envs.step([0, 0])
        assert envs.reset(seed=1)[0].shape == (2, 4)
    with opened(counters(2), **engine) as envs:
        assert envs.step([0, 0])[0][:, 1].tolist() == [1, 1]
