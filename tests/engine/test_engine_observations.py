"""Observations of every space, with and without copies and shared memory."""

from __future__ import annotations

import array
import copy
import mmap
import re
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from envs import (
    ALL_SPACES,
    FIXED_SPACES,
    VALUE_ENGINES,
    VARYING_SPACES,
    CustomSpace,
    Options,
    ReturningEnv,
    SameLengthSpace,
    SpaceEnv,
    assert_matches_sync,
    counters,
    open_engine,
    raises_and_warns,
    ready_engine,
)
from gymnasium import spaces
from gymnasium.error import CustomSpaceError
from gymnasium.vector import SyncVectorEnv
from gymnasium.vector.utils import concatenate, create_empty_array
from sampling import each_pair

import vecenv
from vecenv.errors import ObservationError
from vecenv.link.observations import WRITTEN, make_observation_writer, make_reply_writer
from vecenv.shm import fixed_tree
from vecenv.testing import assert_identical

MEMORIES = {"shared": True, "pickled": False}
SOME_SPACES = ["box-float32", "box-0d", "box-empty", "discrete-start", "multi-discrete-2d", "multi-binary", "dict-nested"]


def get_leaves(tree: Any) -> list[np.ndarray]:
    if isinstance(tree, dict):
        return [leaf for value in tree.values() for leaf in get_leaves(value)]
    if isinstance(tree, tuple):
        return [leaf for value in tree for leaf in get_leaves(value)]
    return [tree]


def make_space_env_fns(space: spaces.Space, n: int = 3) -> list[Any]:
    return [lambda i=i: SpaceEnv(space, env_id=i, lengths=(2 + i,)) for i in range(n)]


def make_returning_env_fns(space: spaces.Space, observation: Any, good: Any = None) -> list[Any]:
    """Return functions for two environments. The second returns ``observation`` in its first step, and ``good`` later."""
    good = space.sample() if good is None else good
    steps = [(observation, 1.0, False, False, {}), (good, 1.0, False, False, {})]
    return [
        lambda: ReturningEnv([(good, {})], steps[1:], space),
        lambda: ReturningEnv([(good, {})], steps, space),
    ]


@pytest.mark.sampled(14)
@pytest.mark.parametrize(
    ("engine", "shared_memory", "mode", "name"),
    each_pair(VALUE_ENGINES, MEMORIES, ["NextStep", "SameStep"], list(ALL_SPACES)),
)
def test_observations_of_every_space_equal_those_of_sync_vector_env(
    engine: Options, shared_memory: bool, mode: str, name: str
) -> None:
    assert_matches_sync(make_space_env_fns(ALL_SPACES[name]), autoreset_mode=mode, shared_memory=shared_memory, **engine)


@pytest.mark.sampled(5)
@pytest.mark.parametrize("name", VARYING_SPACES)
def test_observations_of_varying_size_change_in_steps_with_shared_memory(name: str) -> None:
    """Gymnasium's class always returns the first value, or refuses the space."""
    with open_engine(make_space_env_fns(VARYING_SPACES[name])) as envs:
        first = copy.deepcopy(envs.reset(seed=1)[0])
        assert any(repr(envs.step([0, 0, 0])[0]) != repr(first) for _ in range(5))


@pytest.mark.sampled(6)
@pytest.mark.parametrize("name", SOME_SPACES)
def test_copy_returns_new_observation_arrays_at_every_step(shared_memory: bool, name: str) -> None:
    with open_engine(make_space_env_fns(FIXED_SPACES[name]), shared_memory=shared_memory, num_workers=2) as envs:
        first = envs.reset(seed=1)[0]
        first_copy = copy.deepcopy(first)
        second = envs.step([0, 0, 0])[0]
        assert_identical(first, first_copy)
        all_leaves = zip(get_leaves(first), get_leaves(second), get_leaves(envs.observations), strict=True)
        for first_leaf, second_leaf, internal_leaf in all_leaves:
            assert first_leaf.flags.writeable
            assert not np.shares_memory(first_leaf, second_leaf)
            assert not np.shares_memory(first_leaf, internal_leaf)


def test_copied_observations_own_their_data(engine: Options, shared_memory: bool) -> None:
    with open_engine(counters(3), shared_memory=shared_memory, **engine) as envs:
        assert envs.reset(seed=1)[0].flags.owndata
        assert envs.step([0, 0, 0])[0].flags.owndata


def test_no_copy_returns_the_same_object_in_shared_memory(engine: Options) -> None:
    with open_engine(make_space_env_fns(FIXED_SPACES["dict-nested"]), copy=False, **engine) as envs:
        first = envs.reset(seed=1)[0]
        assert first is envs.observations
        before = copy.deepcopy(first)
        assert envs.step([0, 0, 0])[0] is first
        assert any((a != b).any() for a, b in zip(get_leaves(before), get_leaves(first), strict=True))


def test_no_copy_returns_the_same_arrays_without_shared_memory(engine: Options) -> None:
    with open_engine(counters(3), copy=False, shared_memory=False, **engine) as envs:
        first = envs.reset(seed=1)[0]
        assert envs.step([0, 0, 0])[0] is first
        assert first.flags.writeable
    with open_engine(make_space_env_fns(FIXED_SPACES["dict-nested"]), copy=False, shared_memory=False, **engine) as envs:
        first_leaves = get_leaves(envs.reset(seed=1)[0])
        second_leaves = get_leaves(envs.step([0, 0, 0])[0])
        for first_leaf, second_leaf in zip(first_leaves, second_leaves, strict=True):
            assert first_leaf is second_leaf or np.shares_memory(first_leaf, second_leaf)


@pytest.mark.sampled(6)
@pytest.mark.parametrize("name", SOME_SPACES)
def test_no_copy_observations_equal_sync_vector_env(shared_memory: bool, name: str) -> None:
    assert_matches_sync(make_space_env_fns(FIXED_SPACES[name]), copy=False, shared_memory=shared_memory, num_workers=2)


@pytest.mark.sampled(6)
@pytest.mark.parametrize("name", SOME_SPACES)
def test_observations_are_zeros_of_the_batched_space_before_the_first_reset(shared_memory: bool, name: str) -> None:
    with open_engine(make_space_env_fns(FIXED_SPACES[name]), shared_memory=shared_memory, num_workers=0) as envs:
        assert type(envs.observations) is type(envs.observation_space.sample())
        samples = get_leaves(envs.observation_space.sample())
        for leaf, sample in zip(get_leaves(envs.observations), samples, strict=True):
            assert leaf.dtype == sample.dtype
            assert leaf.shape == sample.shape
            assert not leaf.any()


def test_dict_observations_have_the_key_order_of_the_space(engine: Options, shared_memory: bool) -> None:
    space = spaces.Dict({"z": spaces.Discrete(2), "a": spaces.Discrete(3), "m": spaces.Box(0, 1, (1,))})
    with open_engine(make_space_env_fns(space), shared_memory=shared_memory, **engine) as envs:
        assert list(envs.reset(seed=1)[0]) == list(envs.single_observation_space.spaces)
        assert type(envs.step([0, 0, 0])[0]) is dict


PARTS = {"custom": CustomSpace(), "box": spaces.Box(0, 1, (2,))}
CUSTOM_SPACES = {"alone": CustomSpace(), "dict": spaces.Dict(PARTS), "tuple": spaces.Tuple(tuple(PARTS.values()))}


@pytest.mark.parametrize("copied", [True, False], ids=["copy", "no-copy"])
@pytest.mark.parametrize("name", CUSTOM_SPACES)
def test_custom_space_without_shared_memory_equals_sync_vector_env(engine: Options, name: str, copied: bool) -> None:
    assert_matches_sync(make_space_env_fns(CUSTOM_SPACES[name], 2), shared_memory=False, copy=copied, **engine)


def build_by_name(fns: list[Any], **options: Any) -> Any:
    return vecenv.AsyncVectorEnv(fns, shared_memory=True, **options)


def build_by_position(fns: list[Any], **options: Any) -> Any:
    return vecenv.AsyncVectorEnv(fns, True, **options)


def build_with_make_vec(fns: list[Any], **options: Any) -> Any:
    return vecenv.make_vec(fns[0], 2, backend="process", vector_kwargs={"shared_memory": True, **options})


@pytest.mark.parametrize("build", [build_by_name, build_by_position, build_with_make_vec])
def test_explicit_shared_memory_refuses_a_custom_space(engine: Options, build: Any) -> None:
    with pytest.raises(ValueError, match=r"shared_memory=True.*CustomSpace.*leave `shared_memory` out") as caught:
        build(make_space_env_fns(CustomSpace(), 2), **engine)
    assert isinstance(caught.value.__cause__, CustomSpaceError)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_custom_space_is_pickled_if_shared_memory_is_not_given(num_workers: int) -> None:
    fns = make_space_env_fns(CustomSpace(), 2)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert_matches_sync(fns, num_workers=num_workers)
    texts = [str(warning.message) for warning in caught]
    assert sum("pickled" in text for text in texts) <= 1, texts
    assert any("cannot lie in shared memory" in text for text in texts) == bool(num_workers)
    with open_engine(fns, num_workers=0) as envs:
        assert envs.shared_memory is True
        assert envs.observations is None


def test_custom_action_space_accepts_one_action_per_environment(engine: Options) -> None:
    fns = [lambda i=i: SpaceEnv(spaces.Discrete(5), CustomSpace(), env_id=i) for i in range(3)]
    with open_engine(fns, **engine) as envs:
        assert isinstance(envs.action_space, spaces.Tuple)
        envs.reset(seed=1)
        assert envs.step(("up", "down", "left"))[4]["action"].tolist() == ["str:'up'", "str:'down'", "str:'left'"]
        assert envs.step(envs.action_space.sample())[0] in envs.observation_space


class BoxSubclass(spaces.Box):
    pass


def test_subclass_of_box_is_treated_as_a_box(engine: Options, shared_memory: bool) -> None:
    assert_matches_sync(make_space_env_fns(BoxSubclass(-1, 1, (3,), np.float32), 2), shared_memory=shared_memory, **engine)


class PointSpace(spaces.Space):
    """A custom space of two float64 numbers."""

    def __init__(self) -> None:
        super().__init__((2,), np.float64)

    def sample(self, mask: Any = None, probability: Any = None) -> np.ndarray:
        return self.np_random.random(2)

    def contains(self, x: Any) -> bool:
        return isinstance(x, np.ndarray) and x.shape == (2,)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, PointSpace)

    __hash__ = None  # type: ignore[assignment]


class RegisteredSpace(PointSpace):
    """A custom space with functions that :func:`registered_space` registers."""


@pytest.fixture(scope="module")
def registered_space() -> RegisteredSpace:
    """Register all functions of :class:`RegisteredSpace` with Gymnasium, and return such a space."""
    from gymnasium.vector.utils import (
        batch_space,
        concatenate,
        create_empty_array,
        create_shared_memory,
        read_from_shared_memory,
        write_to_shared_memory,
    )

    @create_shared_memory.register(RegisteredSpace)
    def _(space: Any, n: int = 1, ctx: Any = None) -> Any:
        return mmap.mmap(-1, 16 * n)

    @read_from_shared_memory.register(RegisteredSpace)
    def _(space: Any, shared_memory: Any, n: int = 1) -> Any:
        return np.frombuffer(shared_memory, dtype=np.float64).reshape(n, 2)

    @write_to_shared_memory.register(RegisteredSpace)
    def _(space: Any, index: int, value: Any, shared_memory: Any) -> None:
        np.frombuffer(shared_memory, dtype=np.float64).reshape(-1, 2)[index] = value

    @batch_space.register(RegisteredSpace)
    def _(space: Any, n: int = 1) -> Any:
        return spaces.Box(0, 1, (n, 2), np.float64)

    @concatenate.register(RegisteredSpace)
    def _(space: Any, items: Any, out: Any) -> Any:
        return np.stack(list(items), out=out)

    @create_empty_array.register(RegisteredSpace)
    def _(space: Any, n: int = 1, fn: Any = np.zeros) -> Any:
        return fn((n, 2), dtype=np.float64)

    return RegisteredSpace()


def test_custom_space_registered_with_gymnasium_works_in_shared_memory(
    registered_space: RegisteredSpace, closes: Any
) -> None:
    fns = make_space_env_fns(registered_space, 2)
    reference = closes(SyncVectorEnv(fns))
    with open_engine(fns, context="fork") as envs:
        assert_identical(np.array(envs.reset(seed=1)[0]), reference.reset(seed=1)[0])
        assert_identical(np.array(envs.step([0, 0])[0]), reference.step([0, 0])[0])


WRAPS: dict[str, tuple[Callable[[Any], spaces.Space], Callable[[Any, Any], Any]]] = {
    # A function that wraps the custom space, and one that wraps a point and a number.
    "alone": (lambda space: space, lambda point, number: point),
    "in a dict": (
        lambda space: spaces.Dict({"number": spaces.Discrete(9), "point": space}),
        lambda point, number: {"number": number, "point": point},
    ),
    "in a tuple": (lambda space: spaces.Tuple([space, spaces.Discrete(9)]), lambda point, number: (point, number)),
}


@pytest.mark.parametrize("kind", WRAPS)
def test_rows_of_custom_spaces_in_shared_memory_are_those_of_their_envs(
    registered_space: RegisteredSpace, kind: str
) -> None:
    wrap_space, wrap = WRAPS[kind]
    observations = [wrap(np.full(2, float(row)), row) for row in range(3)]
    fns = [make_returning_env_fns(wrap_space(registered_space), each, each)[0] for each in observations]
    with ready_engine(fns, context="fork", num_workers=1, on_failure="restart") as envs:
        envs.send([0, 0], [1, 2])
        received = envs.recv(count=2)[0]
        assert_identical(received, wrap(np.array([[1.0, 1.0], [2.0, 2.0]]), np.array([1, 2])))


# --- observations that environments return -------------------------------------------------------

BOX4 = spaces.Box(-10, 10, (4,), np.float32)
CASTS: dict[str, tuple[spaces.Space, Any]] = {
    "float64 into float32": (BOX4, np.arange(4, dtype=np.float64) / 3),
    "int64 into float32": (BOX4, np.arange(4)),
    "int64 that float32 rounds": (BOX4, np.full(4, 2**24 + 1)),
    "int that a float32 scalar rounds": (spaces.Box(0, 1, (), np.float32), 2**24 + 1),
    "a list": (BOX4, [0.5, 1.5, 2.5, 3.5]),
    "not contiguous": (BOX4, np.arange(8, dtype=np.float32)[::2]),
    "big-endian": (BOX4, np.arange(4, dtype=">f4")),
    "read-only": (BOX4, np.broadcast_to(np.float32(1), (4,))),
    "int into Discrete": (spaces.Discrete(5), 3),
    "int32 into Discrete": (spaces.Discrete(5), np.int32(3)),
    "0-d array into Discrete": (spaces.Discrete(5), np.array(3)),
    "float into Box of shape ()": (spaces.Box(0, 1, (), np.float32), 0.5),
    "int8 into MultiBinary": (spaces.MultiBinary(3), np.array([1, 0, 1], np.int8)),
    "list into MultiDiscrete": (spaces.MultiDiscrete([3, 3]), [2, 1]),
    "int32 into int64": (spaces.Box(-9, 9, (2,), np.int64), np.array([1, -2], np.int32)),
    "int64 into int32": (spaces.Box(-9, 9, (2,), np.int32), np.array([1, -2])),
    "Fortran order": (spaces.Box(-9, 9, (2, 3), np.float32), np.asfortranarray(np.arange(6.0).reshape(2, 3))),
    "nan and infinities": (BOX4, np.array([np.nan, np.inf, -np.inf, -0.0], np.float32)),
    "out of bounds": (BOX4, np.full(4, 99, np.float32)),
    "float16 into float16": (spaces.Box(-1, 1, (3,), np.float16), np.array([0.5, -1, 0.25], np.float16)),
    "long long into int64": (spaces.Box(-9, 9, (2,), np.int64), np.array([1, -2], np.longlong)),
    "bools into int8": (spaces.MultiBinary(3), np.array([True, False, True])),
    "a buffer that is not an array": (BOX4, array.array("f", [0.5, 1.5, 2.5, 3.5])),
    "an array of one number": (spaces.Box(0, 1, (1,), np.float32), np.array([0.5], np.float32)),
}


@pytest.mark.sampled(10)
@pytest.mark.parametrize(("engine", "shared_memory", "name"), each_pair(VALUE_ENGINES, MEMORIES, list(CASTS)))
def test_observations_are_cast_to_the_space_like_sync_vector_env(engine: Options, shared_memory: bool, name: str) -> None:
    space, observation = CASTS[name]
    assert_matches_sync(make_returning_env_fns(space, observation, observation), 1, shared_memory=shared_memory, **engine)


def test_extra_observation_keys_are_ignored(engine: Options, shared_memory: bool) -> None:
    space = spaces.Dict({"a": spaces.Discrete(3)})
    fns = make_returning_env_fns(space, {"a": 2, "b": 1}, {"a": 1})
    with ready_engine(fns, shared_memory=shared_memory, **engine) as envs:
        assert envs.step([0, 0])[0]["a"].tolist() == [1, 2]


DICT = spaces.Dict({"a": BOX4, "b": spaces.Tuple((spaces.Discrete(3), spaces.MultiBinary(2)))})
GOOD = {"a": np.ones(4, np.float32), "b": (1, np.ones(2, np.int8))}
MISFITS: dict[str, tuple[spaces.Space, Any, Any, tuple[str, ...]]] = {
    # The space, an observation that does not fit, one that fits (None: a sample), and texts that the error contains.
    "too long": (BOX4, np.zeros(5, np.float32), None, ("(5,)", "(4,)")),
    "too short": (BOX4, np.zeros(3, np.float32), None, ("(3,)", "(4,)")),
    "one number for four": (BOX4, np.zeros(1, np.float32), None, ("(1,)", "(4,)")),
    "a number": (BOX4, 1.0, None, ("()", "(4,)")),
    "same size, other shape": (BOX4, np.zeros((2, 2), np.float32), None, ("(2, 2)", "(4,)")),
    "one dimension more": (BOX4, np.zeros((1, 4), np.float32), None, ("(1, 4)", "(4,)")),
    "an array for a Discrete": (spaces.Discrete(5), np.array([2]), None, ("(1,)", "()")),
    "in a dict": (DICT, GOOD | {"a": np.zeros(5, np.float32)}, GOOD, ("a", "(5,)", "(4,)")),
    "in a tuple in a dict": (DICT, GOOD | {"b": (1, np.ones(3, np.int8))}, GOOD, ("b", "(3,)", "(2,)")),
    "a key is missing": (DICT, {"a": np.ones(4, np.float32)}, GOOD, ("b",)),
    "an array for a dict": (DICT, np.ones(4), GOOD, ()),
    "a tuple too short": (DICT, GOOD | {"b": (1,)}, GOOD, ("b",)),
    "a tuple too long": (DICT, GOOD | {"b": (1, np.ones(2, np.int8), 3)}, GOOD, ("b",)),
    "a tuple with text too long": (
        spaces.Tuple((spaces.Text(5), BOX4)),
        ("a", BOX4.low, 3),
        ("a", BOX4.low),
        ("tuple of 2",),
    ),
    "None": (BOX4, None, None, ()),
    "text for numbers": (BOX4, "text", None, ()),
}


@pytest.mark.sampled(8)
@pytest.mark.parametrize(("engine", "shared_memory", "name"), each_pair(VALUE_ENGINES, MEMORIES, list(MISFITS)))
def test_observation_that_does_not_fit_its_space_raises_with_its_path(
    engine: Options, shared_memory: bool, name: str
) -> None:
    space, observation, good, expected_texts = MISFITS[name]
    fns = make_returning_env_fns(space, observation, good)
    with ready_engine(fns, shared_memory=shared_memory, **engine) as envs:
        with raises_and_warns((ValueError, TypeError, KeyError)) as (caught, _):
            envs.step([0, 0])
        text = str(caught.value) + "\n".join(getattr(caught.value, "__notes__", []))
        for expected_text in ("env 1", *expected_texts):
            assert expected_text in text
        assert_identical(envs.reset(seed=1)[0], SyncVectorEnv(fns).reset(seed=1)[0])


@pytest.mark.parametrize(
    ("space", "observation"),
    [
        (spaces.Box(0, 9, (2,), np.int64), np.array([2.7, 1.2])),
        (spaces.Box(0, 255, (2,), np.uint8), np.array([300, 1])),
        (spaces.Box(0, 255, (2,), np.uint8), [300, 1]),
        (spaces.Discrete(5), 2.7),
    ],
    ids=["float-into-int", "int-array-into-uint8", "int-list-into-uint8", "float-into-discrete"],
)
def test_numbers_that_cannot_be_cast_raise_like_sync_vector_env(
    engine: Options, shared_memory: bool, space: spaces.Space, observation: Any, closes: Any
) -> None:
    fns = make_returning_env_fns(space, observation)
    reference = closes(SyncVectorEnv(fns))
    reference.reset(seed=1)
    with pytest.raises((ValueError, TypeError, OverflowError)):
        reference.step([0, 0])
    with (
        ready_engine(fns, shared_memory=shared_memory, **engine) as envs,
        raises_and_warns((ValueError, TypeError, OverflowError)),
    ):
        envs.step([0, 0])


# the functions turn the space, or the value, of one leaf into those of a container
CONTAINERS: dict[str, tuple[Callable[[spaces.Space], spaces.Space], Callable[[Any], Any]]] = {
    "alone": (lambda space: space, lambda value: value),
    "with text in a dict": (
        lambda space: spaces.Dict(leaf=space, text=spaces.Text(5)),
        lambda value: {"leaf": value, "text": "a"},
    ),
    "with text in a tuple": (lambda space: spaces.Tuple((spaces.Text(5), space)), lambda value: ("a", value)),
}
WRONG_NUMBERS: dict[str, tuple[spaces.Space, Any]] = {
    "int64 for int8": (spaces.Box(-5, 5, (2,), np.int8), np.array([300, 1])),
    "list for int8": (spaces.Box(-5, 5, (2,), np.int8), [300, 1]),
    "uint16 for uint8": (spaces.Box(0, 255, (2,), np.uint8), np.array([300, 1], np.uint16)),
    "a number for int8": (spaces.Box(-5, 5, (), np.int8), np.int64(300)),
    "int for uint8": (spaces.Box(0, 255, (), np.uint8), 300),
    "negative int for uint64": (spaces.Box(0, 255, (), np.uint64), -1),
    "huge int for int64": (spaces.Box(-5, 5, (), np.int64), 10**30),
    "object for int64": (spaces.Box(-5, 5, (1,), np.int64), np.array([2.7], dtype=object)),
    "object scalar for int64": (spaces.Box(-5, 5, (), np.int64), np.array(2.7, dtype=object)),
    "object for uint8": (spaces.Box(0, 255, (2,), np.uint8), np.array([300, 1], dtype=object)),
    "int64 for float16": (spaces.Box(-5, 5, (2,), np.float16), np.array([10**9, 1])),
}


@pytest.mark.parametrize(
    ("engine", "shared_memory", "container", "name"),
    each_pair(VALUE_ENGINES, MEMORIES, list(CONTAINERS), list(WRONG_NUMBERS)),
)
def test_number_that_the_dtype_cannot_hold_raises_in_every_container(
    engine: Options, shared_memory: bool, container: str, name: str
) -> None:
    contain_space, contain_value = CONTAINERS[container]
    space, value = WRONG_NUMBERS[name]
    good = contain_value(space.sample())
    fns = make_returning_env_fns(contain_space(space), contain_value(value), good)
    with ready_engine(fns, shared_memory=shared_memory, **engine) as envs:
        with raises_and_warns(ObservationError, match="env 1: observation"):
            envs.step([0, 0])
        assert_identical(envs.reset()[0], SyncVectorEnv(fns).reset()[0])


@pytest.mark.parametrize(
    ("container", "value"),
    [
        *((container, np.array([1e39, 0.5])) for container in CONTAINERS),
        *((container, 1e39) for container in CONTAINERS),
        ("alone", np.array([1e39, 0.5], dtype=object)),
    ],
)
def test_overflow_of_float32_becomes_infinite_with_one_warning(engine: Options, container: str, value: Any) -> None:
    contain_space, contain_value = CONTAINERS[container]
    space = spaces.Box(-1, 1, np.shape(value), np.float32)
    fns = make_returning_env_fns(contain_space(space), contain_value(value), contain_value(np.zeros_like(space.low)))
    with ready_engine(fns, **engine) as envs:
        with pytest.warns(UserWarning, match="env 1: observation.* float64 values became infinite") as caught:
            (observed,) = (leaf for leaf in get_leaves(envs.step([0, 0])[0]) if isinstance(leaf, np.ndarray))
        assert_identical(observed[1], np.where(np.asarray(value) == 1e39, np.inf, 0.5).astype(np.float32)[()])
        assert len(caught) == 1


def test_reset_that_returns_a_wrong_shape_raises(engine: Options, shared_memory: bool) -> None:
    fns = [lambda n=n: ReturningEnv([(np.zeros(n, np.float32), {})], [], BOX4) for n in (4, 5)]
    with open_engine(fns, shared_memory=shared_memory, **engine) as envs, raises_and_warns(ValueError):
        envs.reset(seed=1)


@pytest.mark.parametrize(
    "result",
    [np.zeros(4, np.float32), (np.zeros(4, np.float32),), None, 3],
    ids=["array", "tuple of one", "None", "int"],
)
def test_reset_that_does_not_return_two_values_raises(engine: Options, result: Any) -> None:
    good = (np.zeros(4, np.float32), {})
    fns = [lambda: ReturningEnv([good], []), lambda: ReturningEnv([result, good], [])]
    with open_engine(fns, **engine) as envs, raises_and_warns((ValueError, TypeError)):
        envs.reset(seed=1)


# --- foreign byte order --------------------------------------------------------------------------

FOREIGN_BYTE_ORDER: dict[str, spaces.Space] = {
    "a number": spaces.Box(-9, 9, (), ">f4"),
    "one axis": spaces.Box(-9, 9, (3,), ">f4"),
    "one axis of integers": spaces.Box(-9, 9, (4,), ">i2"),
    "an empty axis": spaces.Box(-9, 9, (0,), ">f4"),
    "two axes": spaces.Box(-9, 9, (2, 2), ">f8"),
    "multi-discrete": spaces.MultiDiscrete(np.array([3, 4]), dtype=">i8"),
    "in a dict": spaces.Dict({"a": spaces.Box(-9, 9, (3,), ">f4"), "b": spaces.Box(-9, 9, (2,), np.float32)}),
    "in a tuple": spaces.Tuple((spaces.Box(0, 9, (3,), ">u4"), spaces.Discrete(4))),
}


@pytest.mark.parametrize(
    ("engine", "shared_memory", "mode", "name", "copied"),
    each_pair(VALUE_ENGINES, MEMORIES, ["NextStep", "SameStep"], list(FOREIGN_BYTE_ORDER), {"copied": True, "views": False}),
)
def test_spaces_in_foreign_byte_order_equal_sync_vector_env(
    engine: Options, shared_memory: bool, mode: str, name: str, copied: bool
) -> None:
    fns = make_space_env_fns(FOREIGN_BYTE_ORDER[name])
    assert_matches_sync(fns, autoreset_mode=mode, copy=copied, shared_memory=shared_memory, **engine)


@pytest.mark.parametrize("value", [np.arange(3, dtype=">f4"), np.arange(3, dtype="f4"), [0, 1, 2], np.arange(3)], ids=repr)
def test_values_are_written_in_foreign_byte_order_or_refused(value: Any) -> None:
    tree = fixed_tree(spaces.Box(-9, 9, (3,), ">f4"))
    assert tree is not None
    rows = np.full((2, 3), 7, ">f4")
    assert make_observation_writer(tree, [rows], 0, lambda *_: None)(1, value) is WRITTEN
    assert rows.tolist() == [[7, 7, 7], [0, 1, 2]]
    with pytest.raises(ObservationError, match=r"expected shape \(3,\)"):
        make_observation_writer(tree, [rows], 0, lambda *_: None)(1, np.arange(4))


@pytest.mark.parametrize(("dtype", "value", "text"), [("u1", 300, "300"), ("i4", 2.75, "2.75"), ("u1", np.nan, "nan")])
def test_error_names_the_value_that_the_dtype_cannot_hold(dtype: str, value: Any, text: str) -> None:
    tree = fixed_tree(spaces.Box(0, 9, (3,), np.dtype(dtype)))
    assert tree is not None
    write = make_observation_writer(tree, [np.zeros((2, 3), dtype)], 0, lambda *_: None)
    match = rf"got an array of shape \(3,\) \(.*\) with {text}, which the space's dtype u?int"
    with pytest.raises(ObservationError, match=match):
        write(1, np.array([1, value, value]))


@pytest.mark.parametrize(
    ("observation", "text"),
    [
        (None, r"env 1: observation: got NoneType None, expected shape \(3,\) \(float32\)"),
        (np.array(["a", "b", "c"]), r"env 1: observation: got an array of shape \(3,\) \(<U1\), expected float32: could"),
        (["a", "b", "c"], r"env 1: observation: got list \['a', 'b', 'c'\], expected float32: could not convert"),
    ],
    ids=["None", "array of text", "list of text"],
)
def test_non_numeric_observation_is_refused(observation: Any, text: str) -> None:
    tree = fixed_tree(spaces.Box(-9, 9, (3,), np.float32))
    assert tree is not None
    with pytest.raises(ObservationError, match=text):
        make_observation_writer(tree, [np.zeros((2, 3), np.float32)], 0, lambda *_: None)(1, observation)


class OwnDict(spaces.Dict):
    """A space of dicts with a ``concatenate`` of its own, which ignores the spaces of their values."""


@concatenate.register(OwnDict)
def _(space: Any, items: Any, out: Any) -> Any:
    return [item["own"] for item in items]


PICKLED_SPACES = {**ALL_SPACES, "custom": CustomSpace(), "same-length": SameLengthSpace(), "own": OwnDict(ALL_SPACES)}
VALUES_OF_ANY_KIND = [
    *(space.sample() for space in ALL_SPACES.values()), None, "abc", 1, 2.5, True, 10**30, 1j, (), {}, [[1], [2, 3]], ["1"],
    {"own": 1}, *(np.zeros(3, dtype) for dtype in ("?", "u1", "i8", "f2", "f8", ">f4", "c8", "U1", "M8[s]", object)),
]  # fmt: skip


@pytest.mark.filterwarnings("ignore:overflow")
@pytest.mark.parametrize("name", PICKLED_SPACES)
def test_observations_to_pickle_are_refused_exactly_if_concatenate_refuses_or_changes_them(name: str) -> None:
    space = spaces.Dict({"text": spaces.Text(9), "parts": spaces.Tuple((PICKLED_SPACES[name],))})
    out: Any = create_empty_array(space, n=1, fn=np.zeros)
    write = make_reply_writer(space, 0, lambda *_: None, 2, copies=False)
    for value in VALUES_OF_ANY_KIND:
        observation = {"text": "a", "parts": (value,)}
        try:
            concatenate(space, [observation], out)
        except Exception as reason:
            with pytest.raises(ObservationError) as refused:
                write(1, observation)
            assert str(refused.value).endswith(f"({reason})")
        else:
            try:
                assert write(1, observation) is observation
            except ObservationError as refusal:
                assert re.search(r"cannot hold|\(expected a tuple of \d\)", str(refusal))


class UnsendableObservation:
    """An observation that cannot be pickled or, with ``can_be_pickled``, not be unpickled."""

    def __init__(self, can_be_pickled: bool) -> None:
        self.can_be_pickled = can_be_pickled

    def __reduce__(self) -> Any:
        if not self.can_be_pickled:
            raise ValueError("not a number")
        return int, ("not a number",)


def make_unsendable_env_fns(can_be_pickled: bool) -> list[Any]:
    """Return functions for two environments. The first returns an unsendable observation in its first step."""
    observations = [[UnsendableObservation(can_be_pickled), "third"], ["second", "third"]]
    steps = [[(observation, 1.0, False, False, {"a": "b"}) for observation in each] for each in observations]
    return [lambda each=each: ReturningEnv([("first", {})], each, CustomSpace()) for each in steps]


@pytest.mark.parametrize("can_be_pickled", [False, True])
@pytest.mark.parametrize("num_workers", [1, 2])
def test_row_keeps_its_last_observation_if_the_next_one_cannot_be_sent(num_workers: int, can_be_pickled: bool) -> None:
    fns = make_unsendable_env_fns(can_be_pickled)
    with ready_engine(fns, shared_memory=False, num_workers=num_workers) as envs:
        with pytest.raises(Exception, match="not a number"):
            envs.step([0, 0])
        assert envs.reset(options={"reset_mask": np.array([False, True])})[0] == ("first", "first")
        assert envs.step([0, 0])[0] == ("third", "third")


@pytest.mark.parametrize("can_be_pickled", [False, True])
@pytest.mark.parametrize("num_workers", [1, 2])
def test_recv_returns_only_rows_with_observations_that_could_be_sent(num_workers: int, can_be_pickled: bool) -> None:
    fns = make_unsendable_env_fns(can_be_pickled)
    with ready_engine(fns, shared_memory=False, num_workers=num_workers) as envs:
        envs.send(np.zeros(2, int), [0, 1])
        with pytest.raises(Exception, match="not a number") as caught:
            envs.recv(count=2)
        assert caught.value.envs == (0,)
        observations, *_, infos = envs.recv(count=1)
        assert observations == ("second",)
        assert infos["env_id"].tolist() == [1]
        envs.send(np.zeros(2, int), [0, 1])
        assert envs.recv(count=2)[0] == ("third", "third")


@pytest.mark.parametrize("num_workers", [0, 1, 2])
def test_first_masked_reset_of_pickled_observations_is_refused_before_an_environment_is_reset(num_workers: int) -> None:
    with open_engine(counters(2), shared_memory=False, num_workers=num_workers) as envs:
        with pytest.raises(ValueError, match="no observation of env 1 yet"):
            envs.reset(options={"reset_mask": np.array([True, False])})
        assert envs.stats()["resets"] == 0
        assert envs.get_attr("episodes") == (0, 0)
        envs.reset_async(env_id=[1])
        envs.recv(count=1)
        assert envs.reset(options={"reset_mask": np.array([True, False])})[0].shape == (2, 4)
