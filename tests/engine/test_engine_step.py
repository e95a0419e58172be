"""Actions, and the results of reset, step and calls into environments."""

from __future__ import annotations

import functools
import re
import threading
import types
import warnings
from collections.abc import Callable
from typing import Any

import gymnasium
import numpy as np
import pytest
from envs import (
    ALL_SPACES,
    CounterEnv,
    EchoEnv,
    Options,
    ReturningEnv,
    counters,
    describe,
    open_engine,
    raises_and_warns,
    ready_engine,
)
from gymnasium import spaces
from gymnasium.error import AlreadyPendingCallError, ResetNeeded
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from gymnasium.vector.utils import batch_space, iterate
from gymnasium.wrappers.vector import RecordEpisodeStatistics
from sampling import each_once

from vecenv.errors import ObservationError
from vecenv.testing import assert_identical

# --- reset: seeds, options, and resets of some environments only ---------------------------------

SEED_COLUMN = 3  # in the observations of CounterEnv


def assert_gymnasium_raises_the_same(error: BaseException, **arguments: Any) -> None:
    """Assert that Gymnasium raises an error with the same text, and that ``except`` with its class catches ``error``."""
    reference = SyncVectorEnv(counters(3))
    with pytest.raises((ValueError, TypeError, AssertionError)) as caught:
        reference.reset(**arguments)
    reference.close()
    assert isinstance(error, caught.type)
    assert str(error) == str(caught.value)


@pytest.mark.parametrize(
    ("seed", "expected"),
    [
        (None, [-1, -1, -1]),
        (7, [7, 8, 9]),
        (0, [0, 1, 2]),
        (True, [1, 2, 3]),
        ([5, 3, 1], [5, 3, 1]),
        ((5, 3, 1), [5, 3, 1]),
        ([5, None, 1], [5, -1, 1]),
        ([None, None, None], [-1, -1, -1]),
        ([4, 4, 4], [4, 4, 4]),
    ],
)
def test_every_environment_receives_its_seed(engine: Options, seed: Any, expected: list[int]) -> None:
    with open_engine(counters(3), **engine) as envs:
        assert envs.reset(seed=seed)[0][:, SEED_COLUMN].tolist() == expected


@pytest.mark.parametrize("seed", [[], [1], [1, 2], [1, 2, 3, 4], (1,)], ids=str)
def test_list_of_seeds_with_a_wrong_length_raises(engine: Options, seed: Any) -> None:
    with open_engine(counters(3), **engine) as envs:
        text = f"If seeds are passed as a list the length must match num_envs=3 but got length={len(seed)}."
        with pytest.raises(ValueError, match=re.escape(text)) as caught:
            envs.reset(seed=seed)
        assert_gymnasium_raises_the_same(caught.value, seed=seed)
        assert envs.reset(seed=1)[0][:, SEED_COLUMN].tolist() == [1, 2, 3]


@pytest.mark.parametrize(
    "seed", ["abc", 1.5, {"a": 1, "b": 2, "c": 3}.keys(), object()], ids=lambda seed: type(seed).__name__
)
def test_seed_of_a_wrong_type_raises(engine: Options, seed: Any) -> None:
    with open_engine(counters(3), **engine) as envs:
        with pytest.raises(Exception):  # noqa: B017 - the type depends on the code that fails, as in Gymnasium
            envs.reset(seed=seed)
        assert envs.reset(seed=1)[0][:, SEED_COLUMN].tolist() == [1, 2, 3]


def test_environment_receives_exactly_seed_and_options(engine: Options) -> None:
    with open_engine(counters(2), **engine) as envs:
        _, infos = envs.reset()
        assert infos["reset_kwargs"].tolist() == [describe({"seed": None, "options": None})] * 2
        _, infos = envs.reset(seed=3, options={"level": 2})
        assert infos["reset_kwargs"].tolist() == [
            describe({"seed": 3, "options": {"level": 2}}),
            describe({"seed": 4, "options": {"level": 2}}),
        ]
        _, infos = envs.reset(options={})
        assert infos["reset_kwargs"].tolist() == [describe({"seed": None, "options": {}})] * 2


def test_options_in_a_list_reach_only_their_environment(engine: Options) -> None:
    with open_engine(counters(3), **engine) as envs:
        options = [{"level": 1}, None, {}]
        _, infos = envs.reset(seed=3, options=options)
        assert infos["reset_kwargs"].tolist() == [
            describe({"seed": 3 + row, "options": row_options}) for row, row_options in enumerate(options)
        ]
        envs.reset_async(env_id=[2, 0], seed=[7, None], options=({"level": 5}, {"level": 6}))
        _, _, _, _, infos = envs.recv(count=2)
        reset_kwargs = dict(zip(infos["env_id"].tolist(), infos["reset_kwargs"].tolist(), strict=True))
        assert reset_kwargs[2] == describe({"seed": 7, "options": {"level": 5}})
        assert reset_kwargs[0] == describe({"seed": None, "options": {"level": 6}})
        with pytest.raises(ValueError, match=re.escape("options has 3 dicts, expected 2: one per environment")):
            envs.reset_async(env_id=[2, 0], options=options)


def test_reset_mask_may_be_changed_while_the_reset_is_pending(engine: Options) -> None:
    with ready_engine(counters(2), **engine) as envs:
        mask = np.array([True, False])
        envs.reset_async(options={"reset_mask": mask})
        mask[:] = [False, True]
        assert envs.reset_wait()[1]["_reset_kwargs"].tolist() == [True, False]


def test_options_may_be_changed_while_the_reset_is_pending(engine: Options) -> None:
    with open_engine(counters(2), **engine) as envs:
        for options in ({"level": 1}, [{"level": 1}, {"level": 1}]):
            envs.reset_async(options=options)
            for changed in options if isinstance(options, list) else [options]:
                changed["level"] = 2
            _, infos = envs.reset_wait()
            assert infos["reset_kwargs"].tolist() == [describe({"seed": None, "options": {"level": 1}})] * 2


def test_first_masked_reset_returns_zeros_for_the_others(engine: Options) -> None:
    with open_engine(counters(2), **engine) as envs:
        observations, _ = envs.reset(seed=1, options={"reset_mask": np.array([False, True])})
        assert observations.tolist() == [[0, 0, 0, 0], [1, 0, 1, 2]]


WRONG_MASKS = [
    ([True, False, True], TypeError, "must be a numpy array, got <class 'list'>"),
    (None, TypeError, "must be a numpy array, got <class 'NoneType'>"),
    (np.ones(4, dtype=np.bool_), ValueError, "must have shape `(3,)`, got (4,)"),
    (np.ones((3, 1), dtype=np.bool_), ValueError, "must have shape `(3,)`, got (3, 1)"),
    (np.ones((), dtype=np.bool_), ValueError, "must have shape `(3,)`, got ()"),
    (np.array([1, 0, 1]), TypeError, "must have `dtype=np.bool_`, got int64"),
    (np.array([1.0, 0.0, 1.0]), TypeError, "must have `dtype=np.bool_`, got float64"),
    (np.zeros(3, dtype=np.bool_), ValueError, "must contain a boolean array"),
]


@pytest.mark.parametrize(
    ("mode", "wrong"), each_once(AutoresetMode, {text: (mask, error, text) for mask, error, text in WRONG_MASKS})
)
def test_wrong_reset_mask_is_refused_before_anything_is_sent(
    engine: Options, mode: AutoresetMode, wrong: tuple[Any, type[Exception], str]
) -> None:
    mask, error, text = wrong
    with ready_engine(counters(3), autoreset_mode=mode, **engine) as envs:
        with pytest.raises(error, match=re.escape(text)) as caught:
            envs.reset(options={"reset_mask": mask})
        assert_gymnasium_raises_the_same(caught.value, options={"reset_mask": mask})
        observations, *_ = envs.step([0, 0, 0])
        assert observations[:, 1:3].tolist() == [[1, 1]] * 3


@pytest.mark.sampled(4)
@pytest.mark.parametrize("copied", [True, False], ids=["copy", "no-copy"])
@pytest.mark.parametrize("mode", AutoresetMode)
def test_long_series_of_masked_resets_equals_sync_vector_env(
    engine: Options, shared_memory: bool, mode: AutoresetMode, copied: bool, closes: Any
) -> None:
    """Environments are reset in the middle of episodes, at their ends, and when an autoreset is due."""
    rng = np.random.default_rng(0)
    fns = [lambda i=i: CounterEnv(i, lengths=(1 + i, 2, 4)) for i in range(4)]
    reference = closes(SyncVectorEnv(fns, autoreset_mode=mode))
    with open_engine(fns, autoreset_mode=mode, shared_memory=shared_memory, copy=copied, **engine) as envs:
        assert_identical(envs.reset(seed=1), reference.reset(seed=1))
        ended = np.zeros(4, dtype=np.bool_)
        for t in range(25):
            mask = rng.random(4) < 0.4
            if mode is AutoresetMode.DISABLED:
                mask |= ended
            if t % 8 == 7:
                assert_identical(envs.reset(), reference.reset(), f"reset before step {t}")
            elif mask.any():
                mask.flags.writeable = False
                other_options = {"level": t} if t % 2 else {}
                result, expected_result = (
                    vector_env.reset(seed=t, options={"reset_mask": mask, **other_options})
                    for vector_env in (envs, reference)
                )
                assert_identical(result, expected_result, f"masked reset before step {t}")
            actions = rng.integers(5, size=4)
            result, expected_result = envs.step(actions), reference.step(actions)
            assert_identical(result, expected_result, f"step {t}")
            ended = expected_result[2] | expected_result[3]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("mode", list(AutoresetMode))
def test_masked_reset_keeps_the_mask_in_the_options_for_wrappers(mode: AutoresetMode) -> None:
    """``RecordEpisodeStatistics`` reads the mask from the caller's dict after the reset."""
    with ready_engine(counters(2, lengths=(9,)), num_workers=2, autoreset_mode=mode) as inner:
        envs = RecordEpisodeStatistics(inner)
        envs.reset(seed=1)
        envs.step(np.zeros(2, np.int64))
        envs.reset(options={"reset_mask": np.array([True, False])})
        assert envs.episode_lengths.tolist() == [0, 1]


# --- actions, and the results of a step ----------------------------------------------------------

ZEROS = np.zeros(4, dtype=np.float32)


def echo_env_fn(space: spaces.Space, mutate: bool = False) -> Any:
    return lambda: EchoEnv(space, mutate)


def returning_env_fn(*steps: Any) -> Any:
    return lambda: ReturningEnv([(ZEROS, {})], steps)


@pytest.mark.sampled(12)
@pytest.mark.parametrize("name", ALL_SPACES)
def test_action_samples_of_every_space_reach_the_envs_unchanged(engine: Options, name: str) -> None:
    space = ALL_SPACES[name]
    with ready_engine([echo_env_fn(space)] * 3, **engine) as envs:
        envs.action_space.seed(3)
        for _ in range(2):
            actions = envs.action_space.sample()
            infos = envs.step(actions)[4]
            assert infos["action"].tolist() == [describe(a) for a in iterate(envs.action_space, actions)]


class ForeignArray:
    """An array of another library, which NumPy can convert. Its rows are of the same class."""

    def __init__(self, values: Any) -> None:
        self.values = np.asarray(values)

    def __array__(self, *arguments: Any, **options: Any) -> np.ndarray:
        return self.values.__array__(*arguments)

    def __len__(self) -> int:
        return len(self.values)

    def __iter__(self) -> Any:
        return map(ForeignArray, self.values)


def test_array_of_another_library_warns_once() -> None:
    with ready_engine(counters(2)) as envs:
        with pytest.warns(UserWarning, match=r"actions are a test_engine_step ForeignArray.*Pass numpy\.asarray\(actions\)"):
            envs.step(ForeignArray([0, 1]))
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            envs.step(ForeignArray([0, 1]))
            envs.step([0, 1])


BOX = spaces.Box(-1, 1, (2,), np.float32)
ARM = spaces.Dict({"arm": spaces.Box(-1, 1, (2,), np.float32), "gear": spaces.Discrete(3)})


@pytest.mark.sampled(16)
@pytest.mark.parametrize(
    ("space", "actions", "expected"),
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
def test_actions_reach_the_envs_without_a_cast(engine: Options, space: spaces.Space, actions: Any, expected: Any) -> None:
    if expected is None:  # each environment receives its part of the batch, as Gymnasium splits it
        expected = list(iterate(batch_space(space, 2), actions))
    with ready_engine([echo_env_fn(space)] * 2, **engine) as envs:
        assert envs.step(actions)[4]["action"].tolist() == [describe(action) for action in expected]


def test_step_accepts_a_generator_of_actions(engine: Options) -> None:
    with ready_engine([echo_env_fn(spaces.Discrete(5))] * 2, **engine) as envs:
        assert envs.step(number for number in (3, 4))[4]["action"].tolist() == [describe(3), describe(4)]


class InterruptedTexts:
    """A list of text actions. The first iteration raises, as if a signal handler interrupted it."""

    was_interrupted = False

    def __iter__(self) -> Any:
        if not self.was_interrupted:
            self.was_interrupted = True
            raise TimeoutError("time is up")
        return iter(["ab", "c"])


def test_interruption_while_actions_are_read_is_raised_unchanged() -> None:
    texts = InterruptedTexts()
    with ready_engine([echo_env_fn(spaces.Text(3))] * 2, num_workers=0) as envs:
        with pytest.raises(TimeoutError, match="time is up"):
            envs.step(texts)
        assert envs.step(texts)[4]["action"].tolist() == [describe("ab"), describe("c")]
        with pytest.raises(TypeError, match=r"actions: got object .*, expected a batch of 2, one per environment"):
            envs.step(object())


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_actions_are_writeable_and_later_steps_do_not_change_them(engine: Options, dtype: Any) -> None:
    with ready_engine([echo_env_fn(BOX)] * 3, **engine) as envs:
        sent = [np.full((3, 2), t, dtype) for t in range(4)]
        for actions in sent:
            infos = envs.step(actions)[4]
            assert infos["writeable"].all()
        assert envs.call("history") == tuple([describe(actions[row]) for actions in sent] for row in range(3))


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("kwargs", [{"num_workers": 0}, {"num_workers": 2}, {"num_workers": 1, "use_caller": True}], ids=str)
def test_env_that_writes_into_its_action_changes_no_other_action(kwargs: Options, dtype: Any) -> None:
    """Actions are passed in shared memory or pickled, for all environments at once or by row."""
    with ready_engine([echo_env_fn(BOX, mutate=True)] * 3, **kwargs) as envs:

        def send_and_recv(batch: Any) -> Any:
            envs.send(batch, range(3))
            return envs.recv(count=3)

        for actions in (np.ones((3, 2), dtype), list(np.ones((3, 2), dtype)), [np.ones(2, dtype)] * 3):
            for step in (envs.step, send_and_recv):
                infos = step(actions)[4]
                assert infos["action"].tolist() == [describe(np.ones(2, dtype))] * 3
                np.testing.assert_array_equal(actions, np.ones((3, 2)))


def test_env_that_writes_into_an_array_in_its_action_changes_no_other_action() -> None:
    space = spaces.Dict({"a": BOX})
    with ready_engine([echo_env_fn(space)] * 3, num_workers=1) as envs:
        envs.step({"a": [np.zeros(2, np.float32)] * 3})
        envs.exec_func(lambda env: env.actions[-1]["a"].__iadd__(1))
        assert [action["a"].tolist() for action in envs.exec_func(lambda env: env.actions[-1])] == [[1, 1]] * 3


def test_actions_that_cannot_be_copied_reach_envs_in_the_caller() -> None:
    locks = [threading.Lock(), threading.Lock()]
    with ready_engine([echo_env_fn(spaces.Text(3))] * 2, num_workers=0) as envs:
        envs.step(locks)
        assert envs.exec_func(lambda env: env.actions[-1]) == tuple(locks)


TRIPLE = spaces.Tuple((spaces.Discrete(5), BOX, spaces.Text(3)))
DISCRETE = spaces.Discrete(5)
SPACES_TO_SAMPLE = [ALL_SPACES[name] for name in ("discrete", "box-float32", "dict", "tuple-nested", "text", "graph")]


def sample_actions(space: spaces.Space, count: int) -> Any:
    """Return a batch of ``count`` actions; for Dict and Tuple spaces, of at least one action."""
    if isinstance(space, spaces.Dict | spaces.Tuple):
        return batch_space(space, max(count, 1)).sample()
    return list(iterate(batch_space(space, 7), batch_space(space, 7).sample()))[:count]


MISFITS: list[tuple[spaces.Space, Any, Any]] = [  # spaces, batches that do not fit three environments, and error types
    *((space, sample_actions(space, count), (ValueError, TypeError)) for space in SPACES_TO_SAMPLE for count in (0, 2, 4)),
    *((DISCRETE, container([0] * count), ValueError) for count in (0, 1, 2, 4) for container in (list, np.array)),
    *((DISCRETE, action, TypeError) for action in (3, None, 1.5, np.int64(3), np.array(3))),
    (ARM, {"arm": np.ones((3, 2), np.float32)}, Exception),  # the type of Gymnasium's own error depends on the structure
    (ARM, {"gear": np.ones(3, np.int64)}, Exception),
    (ARM, {"arm": np.ones((3, 2), np.float32), "gear": np.ones(2, np.int64)}, Exception),
    (ARM, {"arm": np.ones((3, 2), np.float32), "gear": 1}, Exception),
    (ARM, np.ones((3, 3)), Exception),
    (ARM, 7, Exception),
    *(
        (TRIPLE, parts, (ValueError, TypeError))
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


@pytest.mark.sampled(16)
@pytest.mark.parametrize(("space", "actions", "error"), MISFITS)
def test_actions_that_do_not_fit_are_refused_before_any_env_steps(
    engine: Options, space: spaces.Space, actions: Any, error: Any
) -> None:
    with ready_engine([echo_env_fn(space)] * 3, **engine) as envs:
        with pytest.raises(error):
            envs.step(actions)
        assert envs.call("history") == ([], [], [])
        assert envs.step(envs.action_space.sample())[0].tolist() == [1, 1, 1]


@pytest.mark.parametrize("copied", [True, False], ids=["copy", "no-copy"])
def test_rewards_and_flags_are_new_writeable_arrays_in_every_copy_mode(engine: Options, copied: bool) -> None:
    with ready_engine(counters(3), copy=copied, **engine) as envs:
        first = envs.step([0, 0, 0])[1:4]
        first_copies = [array.copy() for array in first]
        second = envs.step([0, 0, 0])[1:4]
        for first_array, second_array, first_copy in zip(first, second, first_copies, strict=True):
            assert first_array.flags.writeable
            assert not np.shares_memory(first_array, second_array)
            np.testing.assert_array_equal(first_array, first_copy)
            first_array[:] = 1
        assert envs.step([0, 0, 0])[1].tolist() == [0.003, 1.003, 2.003]


@pytest.mark.sampled(5)
@pytest.mark.parametrize(
    ("reward", "expected"),
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
def test_reward_is_converted_to_float64(engine: Options, reward: Any, expected: float) -> None:
    with ready_engine([returning_env_fn((ZEROS, reward, False, False, {}))] * 2, **engine) as envs:
        rewards = envs.step([0, 0])[1]
        assert rewards.dtype == np.float64
        np.testing.assert_array_equal(rewards, [expected, expected])


def test_reward_of_none_warns_once_and_names_the_environment(engine: Options) -> None:
    fns = [returning_env_fn((ZEROS, reward, False, False, {})) for reward in (1.0, None)]
    with warnings.catch_warnings(record=True) as caught, ready_engine(fns, **engine) as envs:
        warnings.simplefilter("always")
        for _ in range(3):
            np.testing.assert_array_equal(envs.step([0, 0])[1], [1.0, np.nan])
    texts = [str(warning.message) for warning in caught if "None" in str(warning.message)]
    assert len(texts) == 1
    assert "env 1 returned the reward None, which becomes nan, as in Gymnasium" in texts[0]


@pytest.mark.parametrize("flag", [np.True_, 1, np.array(True)], ids=["np.True_", "1", "array"])
def test_flag_is_converted_to_bool_and_ends_the_episode(engine: Options, flag: Any) -> None:
    fns = [returning_env_fn((ZEROS, 1.0, flag, False, {})), returning_env_fn((ZEROS, 1.0, False, flag, {}))]
    with ready_engine(fns, **engine) as envs:
        _, _, terminations, truncations, _ = envs.step([0, 0])
        assert terminations.dtype == truncations.dtype == np.bool_
        assert terminations.tolist() == [True, False]
        assert truncations.tolist() == [False, True]
        assert envs.step([0, 0])[1].tolist() == [0.0, 0.0]


@pytest.mark.parametrize(
    "step",
    [(ZEROS, np.array([1.0]), False, False, {}), (ZEROS, 1.0, np.array([True]), False, {})],
    ids=["reward-of-one", "flag-of-one"],
)
def test_array_of_one_reward_or_flag_is_squeezed(engine: Options, shared_memory: bool, step: tuple[Any, ...]) -> None:
    fns = [returning_env_fn((ZEROS, 1.0, True, False, {})), returning_env_fn(step)]
    with ready_engine(fns, shared_memory=shared_memory, **engine) as envs:
        _, rewards, terminations, _, _ = envs.step([0, 0])
        assert rewards.tolist() == [1.0, 1.0]
        assert terminations.tolist() == [True, bool(np.all(step[2]))]


def test_array_of_two_rewards_is_refused(engine: Options, shared_memory: bool) -> None:
    fns = [returning_env_fn((ZEROS, reward, True, False, {})) for reward in (1.0, np.array([1.0, 2.0]))]
    text = r"env 1: reward: got ndarray array\(\[1., 2.\]\), expected one float64"
    with ready_engine(fns, shared_memory=shared_memory, **engine) as envs, raises_and_warns(ObservationError, match=text):
        envs.step([0, 0])


@pytest.mark.parametrize(
    "step",
    [(ZEROS, 1.0, False, {}), (ZEROS,), (ZEROS, 1.0, False, False, {}, 6), None, 3],
    ids=["four values", "one value", "six values", "None", "int"],
)
def test_step_that_does_not_return_five_values_raises(engine: Options, step: Any) -> None:
    with ready_engine([returning_env_fn((ZEROS, 1.0, False, False, {})), returning_env_fn(step)], **engine) as envs:
        with raises_and_warns((ValueError, TypeError)):
            envs.step([0, 0])
        envs.reset(seed=1)


def test_step_before_the_first_reset_is_passed_to_the_environment(engine: Options) -> None:
    with open_engine([lambda: gymnasium.make("CartPole-v1")] * 2, **engine) as envs:
        with raises_and_warns(ResetNeeded, failures=2):
            envs.step([0, 0])
        assert envs.reset(seed=1)[0].shape == (2, 4)
    with open_engine(counters(2), **engine) as envs:
        assert envs.step([0, 0])[0][:, 1].tolist() == [1, 1]


# --- methods and attributes of environments, and functions that run in workers -------------------


def build_limited_cartpole() -> gymnasium.Env:
    return gymnasium.make("CartPole-v1", max_episode_steps=7)


def test_call_returns_the_results_in_environment_order(every_engine: Options) -> None:
    with open_engine(counters(3), **every_engine) as envs:
        assert envs.call("add", 5) == (5, 6, 7)
        assert envs.call("add", 5, scale=2) == (10, 11, 12)
        assert envs.call("env_id") == (0, 1, 2)
        assert envs.call("env_id", 5, scale=2) == (0, 1, 2)  # an attribute ignores arguments
        assert envs.get_attr("env_id") == (0, 1, 2)


def test_call_async_forwards_a_keyword_argument_called_name(every_engine: Options) -> None:
    class GreetingEnv(CounterEnv):
        def greet(self, *, name: str) -> str:
            return f"{name} {self.env_id}"

    with open_engine([functools.partial(GreetingEnv, 0), functools.partial(GreetingEnv, 1)], **every_engine) as envs:
        envs.call_async("greet", name="hello")
        assert envs.call_wait() == ("hello 0", "hello 1")


def test_get_attr_finds_attributes_of_wrappers_and_inner_environments(every_engine: Options) -> None:
    with open_engine([build_limited_cartpole] * 2, **every_engine) as envs:
        assert envs.get_attr("_max_episode_steps") == (7, 7)
        assert envs.get_attr("gravity") == (9.8, 9.8)


def test_call_returns_values_of_any_type(every_engine: Options) -> None:
    class IdentityEnv(CounterEnv):
        def identity(self, value: Any) -> Any:
            return value

    with open_engine([IdentityEnv] * 2, **every_engine) as envs:
        for value in (None, "x", {"a": [1, 2]}, np.arange(3), (1, 2), CounterEnv):
            results = envs.call("identity", value)
            assert len(results) == 2
            assert repr(results[0]) == repr(value)


@pytest.mark.parametrize("name", ["reset", "step", "close", "_setattr", "_check_spaces"])
def test_call_refuses_the_names_of_engine_commands(every_engine: Options, name: str) -> None:
    with open_engine(counters(2), **every_engine) as envs:
        text = f"Trying to call function `{name}` with `call`, use `{name}` directly instead."
        with pytest.raises(ValueError, match=re.escape(text)):
            envs.call(name)
        assert envs.call("env_id") == (0, 1)


def fail_in_env_1(env: Any) -> None:
    if env.unwrapped.env_id == 1:
        raise ValueError("only here")


def test_error_in_a_call_is_raised_and_kills_no_worker(every_engine: Options) -> None:
    failing_calls: list[tuple[Any, Callable[[Any], Any], str]] = [
        (AttributeError, lambda envs: envs.get_attr("nosuch"), "nosuch"),
        (KeyError, lambda envs: envs.call("fail", KeyError("lost")), "lost"),
        (TypeError, lambda envs: envs.call("add"), "number"),
        ((TypeError, AttributeError), lambda envs: envs.call("add", threading.Lock()), "lock"),
        (ValueError, lambda envs: envs.exec_func(fail_in_env_1), "only here"),
    ]
    with ready_engine(counters(3), **every_engine) as envs:
        envs.step([0, 0, 0])
        for error, call, text in failing_calls:
            with pytest.raises(error, match=text) as caught:
                call(envs)
            assert envs._state.value == "default"
        assert "env 1" in str(caught.value) + "".join(caught.value.__notes__)
        assert envs.step([0, 0, 0])[0][:, 1:3].tolist() == [[2, 1]] * 3
        assert envs.call("env_id") == (0, 1, 2)


def test_set_attr_distributes_lists_and_tuples_and_broadcasts_other_values(every_engine: Options) -> None:
    with open_engine(counters(2), **every_engine) as envs:
        envs.set_attr("note", ["a", "b"])
        assert envs.get_attr("note") == ("a", "b")
        envs.set_attr("note", ("c", "d"))
        assert envs.get_attr("note") == ("c", "d")
        for value in ("xy", {"a": 1, "b": 2}, 3.5, None):
            envs.set_attr("note", value)
            assert envs.get_attr("note") == (value, value)
        envs.set_attr("note", np.array([1, 2]))
        assert [note.tolist() for note in envs.get_attr("note")] == [[1, 2], [1, 2]]
        envs.set_attr("note", [[1], [2]])
        assert envs.get_attr("note") == ([1], [2])


@pytest.mark.parametrize("num_workers", [None, 1, 2])
def test_each_environment_of_a_worker_receives_a_copy_of_a_shared_value(num_workers: int | None) -> None:
    with open_engine(counters(4), num_workers=num_workers) as envs:
        shared = {"steps": [0]}
        for set_notes in (
            lambda: envs.set_attr("note", shared),
            lambda: envs.set_attr("note", [shared] * 4),
            lambda: envs.set_attr("note", [{"steps": shared["steps"]} for _ in range(4)]),
            lambda: envs.call("set_wrapper_attr", "note", shared),
        ):
            set_notes()
            envs.exec_func(lambda env: env.get_wrapper_attr("note")["steps"].append(1))
            assert envs.get_attr("note") == ({"steps": [0, 1]},) * 4
        assert envs.exec_func(lambda env, numbers: numbers.pop(), None, [1, 2, 3]) == (3,) * 4
        envs.set_attr("note", {"uncopyable": re})  # deepcopy cannot copy modules, but cloudpickle can
        assert envs.exec_func(lambda env: env.get_wrapper_attr("note")["uncopyable"].__name__) == ("re",) * 4


class OptionPoppingEnv(CounterEnv):
    """An environment that removes the last of ``options["numbers"]`` in a reset."""

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        observation, _ = super().reset(seed=seed)
        return observation, {} if options is None else {"popped": options["numbers"].pop()}


@pytest.mark.parametrize("num_workers", [None, 1, 2])
def test_environment_that_changes_values_in_its_options_does_not_affect_others(num_workers: int | None) -> None:
    with open_engine([OptionPoppingEnv] * 4, num_workers=num_workers, autoreset_mode="SameStep") as envs:
        assert envs.reset(options={"numbers": [1, 2, 3]})[1]["popped"].tolist() == [3] * 4
        envs.set_next_options({"numbers": [1, 2, 3]})
        while "popped" not in (infos := envs.step([0] * 4)[4]):
            pass
        assert infos["popped"].tolist() == [3] * 4


@pytest.mark.parametrize("values", [["a"], ["a", "b", "c"], (), []], ids=len)
def test_set_attr_refuses_a_list_of_a_wrong_length(every_engine: Options, values: Any) -> None:
    with open_engine(counters(2), **every_engine) as envs:
        text = f"Got `{len(values)}` values for 2 environments."
        with pytest.raises(ValueError, match=re.escape(text)):
            envs.set_attr("note", values)
        assert envs.get_attr("note") == ("unset", "unset")


def test_set_attr_changes_the_wrapper_or_environment_that_has_the_attribute(every_engine: Options) -> None:
    with open_engine([build_limited_cartpole] * 2, **every_engine) as envs:
        envs.set_attr("gravity", [1.0, 2.0])
        assert envs.exec_func(lambda env: env.unwrapped.gravity) == (1.0, 2.0)
        envs.set_attr("_max_episode_steps", 3)
        envs.reset(seed=1)
        envs.step([0, 1])
        envs.step([1, 0])
        assert envs.step([0, 1])[3].all()


def test_set_attr_affects_the_next_step(every_engine: Options) -> None:
    with ready_engine(counters(2, lengths=(9,)), **every_engine) as envs:
        envs.set_attr("steps", [3, 5])
        assert envs.step([0, 0])[0][:, 1].tolist() == [4, 6]


def test_render_returns_a_tuple_of_frames(every_engine: Options) -> None:
    with open_engine(counters(3, render_mode="rgb_array"), **every_engine) as envs:
        assert envs.render_mode == "rgb_array"
        envs.reset(seed=1)
        envs.step([0, 0, 0])
        frames = envs.render()
        assert isinstance(frames, tuple)
        assert [int(frame[0, 0, 0]) for frame in frames] == [1, 11, 21]
        assert frames[0].shape == (2, 2, 3)
        assert frames[0].dtype == np.uint8


def test_np_random_and_np_random_seed_are_those_of_the_envs_and_cannot_be_set(every_engine: Options) -> None:
    with open_engine(counters(2), **every_engine) as envs:
        envs.reset(seed=42)
        assert envs.np_random_seed == (42, 43)
        generators = envs.np_random
        assert all(isinstance(generator, np.random.Generator) for generator in generators)
        assert generators[1].random() == gymnasium.utils.seeding.np_random(43)[0].random()
        envs.reset(seed=None)
        assert envs.np_random_seed == (42, 43)
        with pytest.raises(AttributeError):
            envs.np_random = generators
        with pytest.raises(AttributeError):
            envs.np_random_seed = (1, 2)


def test_np_random_of_worker_processes_is_a_copy() -> None:
    with open_engine(counters(2)) as envs:
        envs.reset(seed=42)
        assert envs.np_random[0].random() == envs.np_random[0].random()


# --- exec_func -----------------------------------------------------------------------------------


def test_exec_func_calls_the_function_with_every_environment(every_engine: Options) -> None:
    offset = 10

    def calculate(env: Any, factor: int, *, plus: int = 0) -> int:
        return (env.unwrapped.env_id + offset) * factor + plus

    with open_engine(counters(3), **every_engine) as envs:
        assert envs.exec_func(lambda env: env.env_id) == (0, 1, 2)
        assert envs.exec_func(calculate, None, 2) == (20, 22, 24)
        assert envs.exec_func(calculate, None, 2, plus=1) == (21, 23, 25)


def test_exec_func_with_indices_returns_none_for_other_environments(every_engine: Options) -> None:
    with open_engine(counters(4), **every_engine) as envs:
        assert envs.exec_func(lambda env: env.env_id, [1, 3]) == (None, 1, None, 3)
        assert envs.exec_func(lambda env: env.env_id, [3, 0]) == (0, None, None, 3)
        assert envs.exec_func(lambda env: env.env_id, (2,)) == (None, None, 2, None)
        assert envs.exec_func(lambda env: env.env_id, np.array([2])) == (None, None, 2, None)
        envs.exec_func(lambda env: setattr(env, "note", "changed"), [1])
        assert envs.get_attr("note") == ("unset", "changed", "unset", "unset")


@pytest.mark.parametrize("indices", [[4], [-5], [0, 9], ["a"], [0.5]], ids=str)
def test_exec_func_refuses_invalid_indices(every_engine: Options, indices: Any) -> None:
    with open_engine(counters(4), **every_engine) as envs:
        with pytest.raises((ValueError, IndexError, TypeError)):
            envs.exec_func(lambda env: setattr(env, "note", "changed"), indices)
        assert envs.get_attr("note") == ("unset",) * 4


def test_exec_func_send_and_fetch_return_the_results(every_engine: Options) -> None:
    with open_engine(counters(2), **every_engine) as envs:
        envs.exec_func_send(lambda env: env.env_id + 1)
        with pytest.raises(AlreadyPendingCallError):
            envs.step_async([0, 0])
        with pytest.raises(AlreadyPendingCallError):
            envs.exec_func_send(lambda env: 1)
        assert envs.exec_func_fetch() == (1, 2)
        assert envs.reset(seed=1)[0][:, 0].tolist() == [0, 1]


def test_exec_func_may_step_the_environment(every_engine: Options) -> None:
    with ready_engine(counters(2, lengths=(9,)), **every_engine) as envs:
        assert [result[1] for result in envs.exec_func(lambda env: env.step(0))] == [0.001, 1.001]
        assert envs.step([0, 0])[0][:, 1].tolist() == [2, 2]
