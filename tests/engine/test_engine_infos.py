"""How infos of single environments become those of the vector."""

from __future__ import annotations

import enum
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import pytest
from envs import Options, info_env, opened, started
from gymnasium.vector import SyncVectorEnv, VectorEnv
from hypothesis import given, settings
from hypothesis import strategies as st

from vecenv.link.infos import InfoReader, InfoWriter, add_info
from vecenv.shm import INFO_BYTES
from vecenv.testing import assert_identical

# --- Section 1.7: infos of single environments become one dict of arrays, by the rules of ``VectorEnv._add_info``
# The rules have quirks (the first environment that has a key decides its dtype). They are Gymnasium's,
# programs live with them, and the tests take the answers from Gymnasium's own function.


class Colour(enum.IntEnum):
    RED = 1


class Name(str, enum.Enum):  # noqa: UP042 - a StrEnum is formatted as its value, and so is its mask
    A = "a"


class Unreadable(Mapping[str, int]):
    """An info that raises when it is looked at."""

    def __getitem__(self, key: str) -> int:
        return 1

    def __iter__(self) -> Iterator[str]:
        raise RuntimeError("no keys today")

    def __len__(self) -> int:
        return 1


def merged(infos: list[dict[Any, Any]]) -> dict[Any, Any]:
    """What Gymnasium makes of these infos, one for each environment."""
    reference: Any = VectorEnv()
    reference.num_envs = len(infos)
    result: dict[Any, Any] = {}
    for index, info in enumerate(infos):
        result = reference._add_info(result, info, index)
    return result


CASES: dict[str, list[dict[Any, Any]]] = {
    "nothing": [{}, {}, {}],
    "int": [{"a": 1}, {"a": 2}, {"a": 3}],
    "float": [{"a": 0.5}, {"a": float("nan")}, {"a": float("inf")}],
    "bool": [{"a": True}, {"a": False}, {"a": True}],
    "numpy numbers": [{"a": np.float32(1), "b": np.int8(2), "c": np.uint64(3)}] * 3,
    "float16 and longdouble": [{"a": np.float16(1), "b": np.longdouble(2)}] * 3,
    "complex number of numpy": [{"a": np.complex64(1 + 2j)}] * 3,
    "np.bool_ becomes an object": [{"a": np.True_}] * 3,
    "np.str_ becomes an object": [{"a": np.str_("x")}] * 3,
    "IntEnum becomes an object": [{"a": Colour.RED}] * 3,
    "str": [{"a": "x"}, {"a": "a longer one"}, {"a": ""}],
    "None": [{"a": None}, {"a": None}, {}],
    "list and tuple": [{"a": [1, 2], "b": (1,)}, {"a": [], "b": ()}, {"a": [3], "b": (4, 5)}],
    "complex": [{"a": 1j}, {}, {"a": 2j}],
    "bytes": [{"a": b"x"}] * 3,
    "array": [{"a": np.arange(3)}, {"a": np.arange(3) + 1}, {"a": np.arange(3) + 2}],
    "array float32": [{"a": np.ones((2, 2), np.float32)}, {}, {"a": np.zeros((2, 2), np.float32)}],
    "array 0-d": [{"a": np.array(1.5)}, {"a": np.array(2.5)}, {}],
    "array empty": [{"a": np.zeros((0, 3))}] * 3,
    "array of objects": [{"a": np.array([None, "x"], dtype=object)}] * 3,
    "array of strings": [{"a": np.array(["ab", "c"])}, {"a": np.array(["de", "fghi"])}, {}],
    "array of bools": [{"a": np.array([True, False])}] * 3,
    "structured array": [{"a": np.zeros(2, dtype=[("x", "f4"), ("y", "i8")])}] * 3,
    "datetime array": [{"a": np.array(["2020-01-01"], dtype="M8[D]")}] * 3,
    "some only": [{}, {"a": 1}, {}],
    "different keys": [{"a": 1}, {"b": 2.5}, {"c": "x"}],
    "keys that are not strings": [{3: 1, (1, 2): 2.0, None: "x"}, {3: 2}, {}],
    "dict": [{"d": {"a": 1, "b": 2.0}}, {"d": {"a": 2}}, {}],
    "dict in dict": [{"d": {"e": {"f": 1}}}, {"d": {"e": {"g": np.ones(2)}}}, {"d": {}}],
    "empty dict": [{"d": {}}, {}, {"d": {}}],
    "empty dict first": [{"d": {}}, {"d": {"a": 1}}, {}],
    "episode as RecordEpisodeStatistics gives it": [{"episode": {"r": 1.5, "l": 10, "t": 0.25}}, {}, {}],
    "final_obs from an environment": [{"final_obs": np.ones(2)}, {}, {"final_obs": "anything"}],
    "final_obs inside a dict": [{"d": {"final_obs": 1}}, {"d": {"final_obs": {"x": 2}}}, {}],
    "order of first appearance": [{"z": 1, "a": 2}, {"m": 3, "z": 4}, {"a": 5}],
    "int then float is cut off": [{"a": 1}, {"a": 2.7}, {"a": -2.7}],
    "bool then int": [{"a": True}, {"a": 5}, {"a": 0}],
    "int then bool": [{"a": 5}, {"a": True}, {"a": False}],
    "float then int": [{"a": 0.5}, {"a": 5}, {"a": True}],
    "None then int": [{"a": None}, {"a": 5}, {"a": 2.5}],
    "int then text that is a number": [{"a": 1}, {"a": "2"}, {}],
    "short strings then long": [{"a": np.array(["ab"])}, {"a": np.array(["abcdef"])}, {}],
    "int array then float array": [{"a": np.array([1, 2])}, {"a": np.array([1.7, 2.7])}, {}],
    "array then scalar": [{"a": np.zeros(3)}, {"a": 5}, {}],
    "array then smaller that broadcasts": [{"a": np.zeros(3)}, {"a": np.array([7.0])}, {}],
    "str then array": [{"a": "x"}, {"a": np.ones(2)}, {}],
    "number column then array of one": [{"a": 1.0}, {"a": np.array(2.0)}, {}],
    "dict then int": [{"d": {"a": 1}}, {"d": 5}, {}],
    "key that looks like a mask": [{"a": 1, "_a": 7}, {"a": 2}, {}],
    "mask name first": [{"_a": 7, "a": 1}, {}, {}],
    "big unsigned": [{"a": np.uint64(2**63 + 1)}] * 3,
    "keys that are equal and of different types": [{1: 5}, {True: 6, "d": {0: 1}}, {1.0: 7, "d": {False: 2}}],
    "a number and its text as keys": [{1: 5}, {"1": 6}, {1: 7}],
    "a key and an equal one of an enum": [{"a": 5}, {Name.A: 6}, {"a": 7}],
    "every bit": [{"a": 0.1, "b": -0.0, "c": 5e-324, "d": 1.7976931348623157e308, "e": 2**53 + 1, "f": -(2**63)}] * 3,
    "hundreds of keys and a large array": [
        {f"key {index}": float(index) for index in range(300)} | {"big": np.arange(300_000, dtype=np.float64)}
    ]
    * 3,
    "int32 then int": [{"a": np.int32(1)}, {"a": 2**31 - 1}, {}],
}


@pytest.mark.parametrize("name", CASES)
def test_infos_are_batched_as_gymnasium_does(engine: Options, name: str) -> None:
    infos = CASES[name]
    wanted = merged(infos)
    with opened([info_env([info], [info]) for info in infos], **engine) as envs:
        for _ in range(2):
            assert_identical(envs.reset(seed=1)[1], wanted, "reset")
            assert_identical(envs.step([0, 0, 0])[4], wanted, "step")


BAD_CASES: dict[str, list[Any]] = {
    "int then None": [{"a": 1}, {"a": None}, {}],
    "int then text": [{"a": 1}, {"a": "x"}, {}],
    "int too big": [{"a": 2**70}, {}, {}],
    "int too big for the column": [{"a": np.int8(1)}, {"a": 300}, {}],
    "array shapes differ": [{"a": np.zeros(3)}, {"a": np.zeros(4)}, {}],
    "int then dict": [{"a": 1}, {"a": {"b": 1}}, {}],
    "array then dict": [{"a": np.zeros(2)}, {"a": {"b": 1}}, {}],
    "number then array": [{"a": 1.0}, {"a": np.zeros(2)}, {}],
    "nested": [{"d": {"a": 1}}, {"d": {"a": None}}, {}],
    "None instead of a dict": [{}, None, {}],
    "a list instead of a dict": [{}, [1, 2], {}],
}


@pytest.mark.parametrize("name", BAD_CASES)
def test_what_gymnasium_cannot_batch_raises_the_same_and_the_engine_goes_on(engine: Options, name: str) -> None:
    if name == "int too big for the column" and np.lib.NumpyVersion(np.__version__) < "2.0.0":
        pytest.skip("NumPy 1 lets the integer wrap around, and warns")
    infos = BAD_CASES[name]
    with pytest.raises(Exception) as wanted:
        merged(infos)
    fns = [info_env([{}, info, {}]) for info in infos]
    with started(fns, **engine) as envs:
        envs.step([0, 0, 0])
        with pytest.raises(type(wanted.value)):
            envs.step([0, 0, 0])
        assert envs._state.value == "default"
        assert envs.step([0, 0, 0])[4] == {}
        assert envs.reset(seed=1)[1] == {}


@pytest.mark.parametrize("name", ["int then None", "array shapes differ", "int then dict", "nested"])
def test_an_error_in_batching_names_the_environment_and_the_key(engine: Options, name: str) -> None:
    with started([info_env([info]) for info in BAD_CASES[name]], **engine) as envs:
        with pytest.raises(Exception) as caught:
            envs.step([0, 0, 0])
        text = str(caught.value) + "\n".join(getattr(caught.value, "__notes__", []))
        assert "env 1" in text or "environment 1" in text
        assert "'a'" in text or "`a`" in text


@pytest.mark.parametrize("num_workers", [0, 1])
def test_an_info_is_not_told_again_after_a_message_about_another_row(num_workers: int) -> None:
    with started([info_env([{"a": 1}, {}]), info_env([{}, {"b": 2}])], num_workers=num_workers) as envs:
        for rows, keys in (([0], {"a", "env_id"}), ([1], {"env_id"}), ([0, 1], {"b", "env_id"})):
            envs.send([0] * len(rows), rows)
            assert {key.removeprefix("_") for key in envs.recv(count=len(rows))[4]} == keys


def test_infos_are_fresh_and_writeable_at_every_step(engine: Options) -> None:
    info = {"a": 1, "b": np.ones(2), "d": {"e": 2.0}, "o": "x"}
    with started([info_env([info], [info])] * 3, **engine) as envs:
        first = envs.step([0, 0, 0])[4]
        wanted = merged([info] * 3)
        first["new"] = 1
        for array in (first["a"], first["_a"], first["b"], first["o"], first["d"]["e"], first["d"]["_e"]):
            assert array.flags.writeable
            array[...] = 0
        second = envs.step([0, 0, 0])[4]
        assert_identical(second, wanted)
        third = envs.step([0, 0, 0])[4]
        for key in ("a", "_a", "b", "o"):
            assert not np.shares_memory(second[key], third[key])


@pytest.mark.parametrize("mode", ["NextStep", "SameStep"])
def test_infos_that_come_and_go_over_time_equal_those_of_sync_vector_env(engine: Options, mode: str, closes: Any) -> None:
    """Columns of numbers that were there ten times must not be invented when they are absent once."""
    rng = np.random.default_rng(0)

    def random_info() -> dict[str, Any]:
        every: dict[str, Any] = {
            "x": float(rng.random()),
            "n": int(rng.integers(9)),
            "flag": bool(rng.random() < 0.5),
            "v": rng.random(3).astype(np.float32),
            "word": str(rng.random()),
            "d": {"y": float(rng.random()), "z": int(rng.integers(9))},
        }
        steady = rng.random() < 0.7
        return every if steady else {key: value for key, value in every.items() if rng.random() < 0.5}

    fns = [info_env([random_info() for _ in range(30)], [random_info() for _ in range(3)]) for _ in range(4)]
    oracle = closes(SyncVectorEnv(fns, autoreset_mode=mode))
    with opened(fns, autoreset_mode=mode, **engine) as envs:
        assert_identical(envs.reset(seed=1), oracle.reset(seed=1))
        for t in range(30):
            mine, theirs = envs.step([0] * 4), oracle.step([0] * 4)
            assert_identical(mine, theirs, f"step {t}")
            # The order of keys is that of their first appearance, as wrappers that print infos show it.
            assert list(mine[4]) == list(theirs[4])
            if t == 15:
                assert_identical(envs.reset(seed=1), oracle.reset(seed=1))


def test_a_float_column_that_later_holds_an_int_follows_gymnasium_step_by_step(
    engine: Options,
) -> None:
    steps: list[dict[str, Any]] = [*({"a": value} for value in (1.5, 2, True, np.float32(0.1), "x", 1.5)), {}]
    with started([info_env(steps)] * 2, **engine) as envs:
        for info in steps:
            assert_identical(envs.step([0, 0])[4], merged([info] * 2))


def test_a_key_that_changes_its_type_and_stays_equal_is_a_new_one(engine: Options, closes: Any) -> None:
    turns: list[dict[Any, Any]] = [{1: 5}, {True: 6}, {1.0: 7}, {"d": {0: 1}}, {"d": {False: 2}}, {"a": 1}, {Name.A: 2}]
    fns = [info_env(turns), info_env(turns[1:] + turns[:1])]
    oracle = closes(SyncVectorEnv(fns))
    oracle.reset(seed=1)
    with started(fns, **engine) as envs:
        for t in range(2 * len(turns)):
            mine, theirs = envs.step([0, 0])[4], oracle.step([0, 0])[4]
            assert_identical(mine, theirs, f"step {t}")
            assert [*map(repr, mine)] == [*map(repr, theirs)], f"step {t}"  # 1, True and 1.0 are equal
            if "d" in theirs:
                assert [*map(repr, mine["d"])] == [*map(repr, theirs["d"])]


@pytest.mark.parametrize("num_workers", [0, 1])
def test_an_info_that_cannot_be_looked_at_names_its_environment_and_the_engine_goes_on(num_workers: int) -> None:
    with started([info_env([info, {}]) for info in ({}, Unreadable())], num_workers=num_workers) as envs:
        with pytest.raises(RuntimeError, match="no keys today") as caught:
            envs.step([0, 0])
        assert "env 1: its info, a Unreadable, cannot be read" in caught.value.__notes__
        assert envs.step([0, 0])[4] == {}


def test_the_order_of_keys_is_that_of_the_environments() -> None:
    infos: list[dict[str, Any]] = [{"b": 1, "z": 2}, {"a": 3, "b": 1}, {}, {"y": 1, "b": 2, "a": 5}, {"c": {"e": 1, "d": 1}}]
    for _ in range(len(infos)):
        infos = infos[1:] + infos[:1]
        wanted = merged(infos)
        with started([info_env([info]) for info in infos], num_workers=0) as envs:
            assert list(envs.step([0] * 5)[4]) == list(wanted)


@pytest.mark.long
def test_thousands_of_combinations_of_keys_are_right_and_are_not_all_remembered() -> None:
    rng, rows = np.random.default_rng(0), 12
    schemas, records = np.zeros(rows, np.uint64), np.zeros((rows, INFO_BYTES), np.uint8)
    writer, reader = InfoWriter(schemas, records), InfoReader(schemas, records)
    combinations = set()
    for t in range(2400):
        alike = t % 3 == 0
        kinds = np.repeat(rng.integers(1, 64), rows) if alike else rng.integers(0, 64, rows)
        infos: list[dict[str, Any]] = [
            {f"k{bit}": t + row if bit % 2 else np.full(bit, t, np.float32) for bit in range(6) if kind >> bit & 1}
            for row, kind in enumerate(kinds.tolist())
        ]
        for row, info in enumerate(infos):
            if info:
                assert writer.write(row, info)
            else:
                schemas[row] = 0
        writer.send_new(told := {})
        reader.learn(told)
        combinations.add(frozenset(kinds.tolist()))
        assert_identical(reader.read(None, rows, {}, {}), merged(infos))
    assert len(combinations) > 1400
    caches = {name: len(value) for name, value in vars(reader).items() if isinstance(value, dict)}
    assert caches["_plans"] <= 256, caches
    assert max(caches.values()) <= 4096, caches
    assert sum(map(len, (value for value in vars(writer).values() if isinstance(value, dict)))) <= 2 * 64


@pytest.mark.long
def test_keys_that_never_repeat_are_right_and_are_not_remembered() -> None:
    rows = 3
    schemas, records = np.zeros(rows, np.uint64), np.zeros((rows, INFO_BYTES), np.uint8)
    writer, reader = InfoWriter(schemas, records), InfoReader(schemas, records)
    for t in range(5000):
        infos = [{f"k{t}": t, "x": 1.5}, {"x": 2.5}, {f"k{t + row}": 1 for row in range(2)}]
        pickled = {row: info for row, info in enumerate(infos) if not writer.write(row, info)}
        writer.send_new(told := {})
        reader.learn(told)
        assert_identical(reader.read(None, rows, pickled, {}), merged(infos))
    sizes = [len(value) for holder in (writer, reader) for value in vars(holder).values() if isinstance(value, dict)]
    assert max(sizes) <= 256, sizes


# --- ``ragged_infos=True``: infos whose values do not go together become object arrays with masks


def stepped(infos: list[dict[str, Any]], **engine: Any) -> dict[str, Any]:
    with started([info_env([info]) for info in infos], **engine) as envs:
        return envs.step(envs.action_space.sample())[4]


def test_arrays_of_different_shapes_are_kept_as_they_are(engine: Options) -> None:
    infos = [{"actions": np.zeros((2, 3))}, {"actions": np.ones((4, 3))}, {}, {"actions": np.full(1, 7.0)}]
    said = stepped(infos, ragged_infos=True, **engine)
    assert said["actions"].dtype == object
    assert said["actions"].shape == (4,)
    assert said["_actions"].tolist() == [True, True, False, True]
    for row in (0, 1, 3):
        assert_identical(said["actions"][row], infos[row]["actions"])
    assert said["actions"][2] is None


def test_without_it_they_are_an_error_as_in_gymnasium(engine: Options) -> None:
    with pytest.raises(ValueError, match="broadcast"):
        stepped([{"actions": np.zeros((2, 3))}, {"actions": np.ones((4, 3))}], **engine)


@pytest.mark.parametrize(
    "values",
    [
        [1, 2.5],  # Gymnasium makes 2 of it
        [np.zeros(3), np.ones(1)],  # Gymnasium makes three of it
        [1, "text"],
        [{"a": 1}, 5],
        [5, {"a": 1}],
        [{"a": np.zeros(2)}, {"a": np.zeros(3)}],
        [np.zeros(2, np.int8), np.full(2, 0.5)],
        [1, [1, [2]]],
    ],
    ids=str,
)
def test_nothing_is_cast_broadcast_or_lost(values: list[Any]) -> None:
    said = stepped([{"key": value} for value in values], ragged_infos=True, num_workers=0)
    column = said["key"]
    if isinstance(column, dict):
        assert_identical([column["a"][row] for row in range(2)], [value["a"] for value in values])
    else:
        assert column.dtype == object
        for got, value in zip(column, values, strict=True):
            if isinstance(value, np.ndarray):
                assert_identical(got, value)
            else:
                assert got == value
    assert said["_key"].tolist() == [True, True]


def test_what_goes_together_is_as_ever() -> None:
    infos = [{"a": 1.5, "b": np.arange(3), "c": {"d": True}}, {"a": 2, "b": np.arange(3), "c": {}}]
    assert_identical(stepped(infos, ragged_infos=True, num_workers=0), stepped(infos, num_workers=0))


VALUES = st.one_of(
    st.booleans(), st.integers(-5, 5), st.floats(-1, 1), st.text(max_size=2),
    st.lists(st.floats(-1, 1), max_size=3).map(np.array),
    st.dictionaries(st.sampled_from("xy"), st.integers(0, 3), max_size=2),
)  # fmt: skip


@settings(deadline=None)
@given(st.lists(st.dictionaries(st.sampled_from("ab"), VALUES, max_size=2), min_size=1, max_size=5))
def test_every_value_can_be_had_back(infos: list[dict[str, Any]]) -> None:
    said: dict[str, Any] = {}
    for row, info in enumerate(infos):
        add_info(said, info, row, len(infos), row, ragged=True)

    def value(column: Any, row: int) -> Any:
        if isinstance(column, dict):
            return {key: value(column[key], row) for key in column if f"_{key}" in column and column[f"_{key}"][row]}
        return column[row]

    for row, info in enumerate(infos):
        for key, given_value in info.items():
            got = value(said[key], row)
            if isinstance(given_value, np.ndarray):
                assert isinstance(got, np.ndarray)
                assert_identical(np.asarray(got, given_value.dtype), given_value)
                assert np.shape(got) == given_value.shape
            else:
                assert got == given_value
        assert not any(said[f"_{key}"][row] for key in "ab" if key not in info and f"_{key}" in said)

