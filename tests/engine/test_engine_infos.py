"""The merging of infos of single environments into those of the vector environment."""

from __future__ import annotations

import enum
import warnings
from collections import Counter, OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import pytest
from envs import CounterEnv, Options, ReturningEnv, assert_as_sync, info_env, open_engine, ready_engine
from gymnasium.vector import SyncVectorEnv, VectorEnv, VectorWrapper
from hypothesis import given, settings
from hypothesis import strategies as st

import vecenv
from vecenv.errors import InfoError
from vecenv.front.infos import InfoMerger, info_rows
from vecenv.link.infos import InfoReader, InfoWriter, _flatten
from vecenv.shm import INFO_BYTES
from vecenv.testing import assert_identical

# --- section 1.7: infos of single environments become one dict of arrays, by the rules of ``VectorEnv._add_info``
# The rules have quirks (the first environment that has a key decides its dtype). They are Gymnasium's,
# programs rely on them, and the tests take the expected values from Gymnasium's own function.


class Colour(enum.IntEnum):
    RED = 1


class Name(str, enum.Enum):  # noqa: UP042 - a StrEnum is formatted as its value, and so is its mask
    A = "a"


class Unreadable(Mapping[str, int]):
    """An info that raises when it is read."""

    def __getitem__(self, key: str) -> int:
        return 1

    def __iter__(self) -> Iterator[str]:
        raise RuntimeError("no keys today")

    def __len__(self) -> int:
        return 1


def merged(infos: list[dict[Any, Any]]) -> dict[Any, Any]:
    """Return the infos merged by Gymnasium, from one for each environment."""
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
    "int then bool": [{"a": 5}, {"a": True}, {"a": False}],
    "float then int": [{"a": 0.5}, {"a": 5}, {"a": True}],
    "None then int": [{"a": None}, {"a": 5}, {"a": 2.5}],
    "str then array": [{"a": "x"}, {"a": np.ones(2)}, {}],
    "number column then array of one": [{"a": 1.0}, {"a": np.array(2.0)}, {}],
    "key that looks like a mask": [{"a": 1, "_a": 7}, {"a": 2}, {}],
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


@pytest.mark.sampled(16)
@pytest.mark.parametrize("name", CASES)
def test_infos_are_batched_as_gymnasium_does(engine: Options, name: str) -> None:
    infos = CASES[name]
    wanted = merged(infos)
    with open_engine([info_env([info], [info]) for info in infos], **engine) as envs:
        for _ in range(2):
            assert_identical(envs.reset(seed=1)[1], wanted, "reset")
            assert_identical(envs.step([0, 0, 0])[4], wanted, "step")


# --- values that Gymnasium would cast, cut, broadcast or refuse stay as they are


def array(values: Any, dtype: Any = object) -> np.ndarray[Any, Any]:
    """Return an array of these values, by default an object array."""
    if dtype is not object:
        return np.array(values, dtype)
    column = np.full(len(values), None, dtype=object)
    for row, value in enumerate(values):
        column[row] = value
    return column


two, three = np.zeros(2), np.ones(3)
KEPT: dict[str, tuple[list[Any], Any, bool]] = {
    # values of key "a" of each environment, the column, and whether Gymnasium's column would be another without an error
    "int then float": ([1, 2.7, -2.7], array([1, 2.7, -2.7], float), True),
    "an int that no float can hold, then float": ([2**53 + 1, 0.5], array([2**53 + 1, 0.5]), True),
    "bool then int": ([True, 5, 0], array([True, 5, 0]), True),
    "int then text that is a number": ([1, "2"], array([1, "2"]), True),
    "short text then long": ([np.array(["ab"]), np.array(["abcdef"])], array([["ab"], ["abcdef"]], "U6"), True),
    "int array then float array": ([np.array([1, 2]), np.array([1.7, 2.7])], array([[1, 2], [1.7, 2.7]], float), True),
    "array then number": ([three, 5], array([three, 5]), True),
    "array then a smaller one": ([three, np.array([7.0])], array([three, np.array([7.0])]), True),
    "float32 then float": ([np.float32(0.1), 0.1], array([float(np.float32(0.1)), 0.1], float), True),
    "int8 then int": ([np.int8(1), 300], array([1, 300], int), False),
    "dict then int": ([{"a": 1}, 5], array([{"a": 1}, 5]), False),
    "int then dict": ([5, {"a": 1}], array([5, {"a": 1}]), False),
    "None then dict": ([None, {"a": 1}], array([None, {"a": 1}]), False),
    "int then None": ([1, None], array([1, None]), False),
    "int then text": ([1, "x"], array([1, "x"]), False),
    "int then list": ([1, [1, [2]]], array([1, [1, [2]]]), False),
    "an int beyond 64 bits": ([2**70, 1], array([2**70, 1]), False),
    "an int beyond int64": ([2**63, 1], array([2**63, 1]), False),
    "arrays of different shapes": ([two, three], array([two, three]), False),
    "number then array": ([1.0, two], array([1.0, two]), False),
    "array then dict": ([two, {"a": 1}], array([two, {"a": 1}]), False),
}


@pytest.mark.sampled(8)
@pytest.mark.parametrize("name", KEPT)
def test_values_that_do_not_fit_one_column_are_kept(engine: Options, name: str) -> None:
    values, column, warned = KEPT[name]
    with ready_engine([info_env([{"a": value, "d": {"a": value}}, {}]) for value in values], **engine) as envs:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            infos = envs.step([0] * len(values))[4]
            assert envs.step([0] * len(values))[4] == {}
        mask = np.ones(len(values), np.bool_)
        assert_identical(infos, {"a": column, "_a": mask, "d": {"a": column, "_a": mask}, "_d": mask})
        texts = [str(warning.message) for warning in caught if "infos[" in str(warning.message)]
        assert len(texts) == (2 if warned else 0), texts
        assert not warned or ("infos['a']: env " in texts[0] and "infos['d']['a']: env " in texts[1])


@pytest.mark.filterwarnings("ignore:.*infos")
def test_a_warning_about_a_column_is_given_once_and_names_the_environment_and_the_key(engine: Options) -> None:
    with ready_engine([info_env([{"a": value}] * 4) for value in (1, 2, 2.5)], **engine) as envs:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for _ in range(4):
                assert envs.step([0] * 3)[4]["a"].tolist() == [1, 2, 2.5]
        texts = [str(warning.message) for warning in caught]
        assert len(texts) == 1
        assert "infos['a']: env 2 returned 2.5, but the first value, from env 0, has dtype int64" in texts[0]


def test_a_key_that_is_the_mask_of_another_is_dropped_with_a_warning(engine: Options) -> None:
    with ready_engine([info_env([{"_a": 0, "a": 1}])] * 2, **engine) as envs:
        with pytest.warns(UserWarning, match=r"infos\['_a'\] of env 0 is dropped: that key is the mask of another key"):
            infos = envs.step([0, 0])[4]
        mask = np.ones(2, np.bool_)
        assert_identical(infos, {"_a": mask, "__a": mask, "a": np.ones(2, int)})


NO_DICTS: dict[str, Any] = {"None": None, "a list": [1, 2], "an object that cannot be read": Unreadable()}


@pytest.mark.parametrize("name", ["None", "a list"])
@pytest.mark.parametrize("call", ["step", "reset", "recv"])
def test_an_info_that_is_no_dict_raises_after_the_rows_were_delivered(engine: Options, call: str, name: str) -> None:
    value = NO_DICTS[name]
    fns = [info_env([{}] if call == "reset" else [info, {}], [info]) for info in ({"a": 1}, value, {"a": 3})]
    with open_engine(fns, **engine) as envs:
        if call != "reset":
            vecenv.infos_by_row(envs).reset(seed=1)
        if call == "recv":
            envs.send([0, 0, 0])
        calls: dict[str, Any] = {"step": lambda: envs.step([0] * 3), "reset": envs.reset, "recv": lambda: envs.recv(count=3)}
        with pytest.raises(InfoError, match=r"env 1 returned an info that is not a dict but") as caught:
            calls[call]()
        assert isinstance(caught.value, AttributeError)  # as in Gymnasium
        assert sorted(map(repr, caught.value.result[4])) == sorted(map(repr, [{"a": 1}, value, {"a": 3}]))
        assert caught.value.result[0].shape[0] == 3
        assert envs._state.value == "default"
        assert not envs.errors
        assert envs.step([0, 0, 0])[4] == {}


@pytest.mark.parametrize("mode", ["NextStep", "SameStep"])
def test_an_info_that_is_no_dict_is_a_failure_with_restarts(mode: str) -> None:
    env_fns = [info_env([info, {}], [{}]) for info in ({"a": 1}, None)]
    with ready_engine(env_fns, num_workers=1, on_failure="restart", autoreset_mode=mode) as envs:
        infos = envs.step([0, 0])[4]
        assert infos["restarted"].tolist() == [False, True]
        assert infos["a"].tolist() == [1, 0]
        assert "env 1 (worker 0, " in str(envs.errors[-1])
        assert "InfoError: info: got None, expected a dict" in str(envs.errors[-1])


def test_arrays_that_no_record_holds_are_not_copied() -> None:
    values: list[Any] = []
    assert _flatten({"a": 1, "b": np.zeros(INFO_BYTES + 1, np.uint8)}, values) is None
    assert values == [1]


@pytest.mark.parametrize("num_workers", [0, 1])
def test_info_is_not_repeated_after_a_message_about_another_row(num_workers: int) -> None:
    with ready_engine([info_env([{"a": 1}, {}]), info_env([{}, {"b": 2}])], num_workers=num_workers) as envs:
        for rows, keys in (([0], {"a", "env_id"}), ([1], {"env_id"}), ([0, 1], {"b", "env_id"})):
            envs.send([0] * len(rows), rows)
            assert {key.removeprefix("_") for key in envs.recv(count=len(rows))[4]} == keys


def test_infos_are_fresh_and_writeable_at_every_step(engine: Options) -> None:
    info = {"a": 1, "b": np.ones(2), "d": {"e": 2.0}, "o": "x"}
    with ready_engine([info_env([info], [info])] * 3, **engine) as envs:
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


class Shares(CounterEnv):
    """An environment that writes its number and step into one info, and returns that; others may return the same one."""

    def __init__(self, env_id: int, info: dict[str, Any]) -> None:
        super().__init__(env_id, lengths=(2, 3))
        self.info = info

    def share(self, results: Sequence[Any]) -> Any:
        observation = results[0]
        self.info["text"] = self.info["inner"]["text"] = self.info["ordered"]["text"] = str(observation)
        self.info["array"][:] = self.info["inner"]["array"][:] = self.info["objects"][:] = observation
        return *results[:-1], self.info

    def reset(self, **kwargs: Any) -> Any:
        return self.share(super().reset(**kwargs))

    def step(self, action: Any) -> Any:
        return self.share(super().step(action))


@pytest.mark.parametrize("mode", ["NextStep", "SameStep"])
@pytest.mark.parametrize("kwargs", [{"num_workers": 0}, {"num_workers": 1}, {"num_workers": 1, "use_caller": True}], ids=str)
def test_an_info_that_is_written_again_equals_that_of_sync_vector_env(kwargs: Options, mode: str) -> None:
    """Dicts and arrays in an info are those of its own step, although the next environment writes into the same objects."""
    info = {"array": np.zeros(4), "objects": np.zeros(4, object), "inner": {"array": np.zeros(4)}, "ordered": OrderedDict()}
    assert_as_sync([partial(Shares, row, info) for row in range(3)], 6, autoreset_mode=mode, **kwargs)


@pytest.mark.parametrize("num_workers", [0, 1])
def test_dicts_of_other_classes_keep_their_class(num_workers: int) -> None:
    info = {"inner": OrderedDict(text="a", array=np.zeros(2)), "counts": Counter("aab")}
    with open_engine([info_env([info])], num_workers=num_workers) as envs:
        by_row = vecenv.infos_by_row(envs)
        by_row.reset()
        (row,) = by_row.step(np.array([0]))[4]
    assert (type(row["inner"]), type(row["counts"])) == (OrderedDict, Counter)
    assert row["counts"] == info["counts"]
    assert row["inner"]["array"] is not info["inner"]["array"]


@pytest.mark.parametrize("mode", ["NextStep", "SameStep"])
def test_infos_that_come_and_go_over_time_equal_those_of_sync_vector_env(engine: Options, mode: str, closes: Any) -> None:
    """Columns of numbers that were there ten times must not be made up when they are absent once."""
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
    with open_engine(fns, autoreset_mode=mode, **engine) as envs:
        assert_identical(envs.reset(seed=1), oracle.reset(seed=1))
        for t in range(30):
            mine, theirs = envs.step([0] * 4), oracle.step([0] * 4)
            assert_identical(mine, theirs, f"step {t}")
            # the order of keys is that of their first appearance, as wrappers that print infos show it
            assert list(mine[4]) == list(theirs[4])
            if t == 15:
                assert_identical(envs.reset(seed=1), oracle.reset(seed=1))


def test_a_reset_within_a_step_whose_info_is_no_dict_keeps_the_end_of_the_episode(engine: Options) -> None:
    zeros = np.zeros(4, np.float32)
    resets, steps = [(zeros, {"b": 2}), (zeros, None)], [(zeros, 1.0, True, False, {"a": 1})] * 2
    with ready_engine([partial(ReturningEnv, resets=resets, steps=steps)] * 2, autoreset_mode="SameStep", **engine) as envs:
        text = "is not a dict but a NoneType; with same-step autoreset it is dropped"
        with pytest.warns(UserWarning, match=text) as seen:
            infos = [envs.step([0, 0])[4] for _ in range(2)]
        assert len(seen) == 1
        for info in infos:
            assert info["final_info"]["a"].tolist() == [1, 1]
            assert [final.tolist() for final in info["final_obs"]] == [[0.0] * 4] * 2


def test_a_float_column_that_later_holds_an_int_follows_gymnasium_step_by_step(
    engine: Options,
) -> None:
    steps: list[dict[str, Any]] = [*({"a": value} for value in (1.5, 2, True, np.float32(0.1), "x", 1.5)), {}]
    with ready_engine([info_env(steps)] * 2, **engine) as envs:
        for info in steps:
            assert_identical(envs.step([0, 0])[4], merged([info] * 2))


def test_a_key_that_changes_its_type_and_stays_equal_is_a_new_one(engine: Options, closes: Any) -> None:
    turns: list[dict[Any, Any]] = [{1: 5}, {True: 6}, {1.0: 7}, {"d": {0: 1}}, {"d": {False: 2}}, {"a": 1}, {Name.A: 2}]
    fns = [info_env(turns), info_env(turns[1:] + turns[:1])]
    oracle = closes(SyncVectorEnv(fns))
    oracle.reset(seed=1)
    with ready_engine(fns, **engine) as envs:
        for t in range(2 * len(turns)):
            mine, theirs = envs.step([0, 0])[4], oracle.step([0, 0])[4]
            assert_identical(mine, theirs, f"step {t}")
            assert [*map(repr, mine)] == [*map(repr, theirs)], f"step {t}"  # 1, True and 1.0 are equal
            if "d" in theirs:
                assert [*map(repr, mine["d"])] == [*map(repr, theirs["d"])]


@pytest.mark.parametrize("num_workers", [0, 1])
def test_an_info_that_cannot_be_read_names_its_environment_and_the_engine_continues(num_workers: int) -> None:
    with ready_engine([info_env([info, {}]) for info in ({}, Unreadable())], num_workers=num_workers) as envs:
        with pytest.raises((RuntimeError, InfoError)) as caught:
            envs.step([0, 0])
        text = str(caught.value) + "".join(getattr(caught.value, "__notes__", []))
        assert "env 1: its info, a Unreadable, cannot be read" in text
        assert envs.step([0, 0])[4] == {}


@pytest.mark.parametrize("first", [{}, {"text": "not a column"}])
@pytest.mark.parametrize("num_workers", [0, 1])
def test_info_that_contains_itself_is_a_failure_of_its_environment(num_workers: int, first: dict[str, Any]) -> None:
    info = {**first}
    info["info"] = info
    with ready_engine([info_env([{}]), info_env([info])], num_workers=num_workers) as envs:
        with pytest.raises(RecursionError, match="info: it contains itself") as caught:
            envs.step([0, 0])
        assert "env 1," in caught.value.__notes__[0]


def test_the_order_of_keys_is_that_of_the_environments() -> None:
    infos: list[dict[str, Any]] = [{"b": 1, "z": 2}, {"a": 3, "b": 1}, {}, {"y": 1, "b": 2, "a": 5}, {"c": {"e": 1, "d": 1}}]
    for _ in range(len(infos)):
        infos = infos[1:] + infos[:1]
        wanted = merged(infos)
        with ready_engine([info_env([info]) for info in infos], num_workers=0) as envs:
            assert list(envs.step([0] * 5)[4]) == list(wanted)


@pytest.mark.long
def test_thousands_of_key_combinations_are_not_all_cached() -> None:
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
        writer.add_new_definitions(told := {})
        reader.learn(told)
        combinations.add(frozenset(kinds.tolist()))
        assert_identical(reader.read(None, rows, {}, {}), merged(infos))
    assert len(combinations) > 1400
    caches = {name: len(value) for name, value in vars(reader).items() if isinstance(value, dict)}
    assert caches["_plans"] <= 256, caches
    assert max(caches.values()) <= 4096, caches
    assert sum(map(len, (value for value in vars(writer).values() if isinstance(value, dict)))) <= 2 * 64


@pytest.mark.long
def test_keys_that_never_repeat_are_not_cached() -> None:
    rows = 3
    schemas, records = np.zeros(rows, np.uint64), np.zeros((rows, INFO_BYTES), np.uint8)
    writer, reader = InfoWriter(schemas, records), InfoReader(schemas, records)
    for t in range(5000):
        infos = [{f"k{t}": t, "x": 1.5}, {"x": 2.5}, {f"k{t + row}": 1 for row in range(2)}]
        pickled = {row: info for row, info in enumerate(infos) if not writer.write(row, info)}
        writer.add_new_definitions(told := {})
        reader.learn(told)
        assert_identical(reader.read(None, rows, pickled, {}), merged(infos))
    sizes = [len(value) for holder in (writer, reader) for value in vars(holder).values() if isinstance(value, dict)]
    assert max(sizes) <= 256, sizes


# --- ``vecenv.infos_by_row``


VALUES = st.one_of(
    st.booleans(), st.integers(-5, 5), st.floats(-1, 1), st.text("ab_é", max_size=2),
    st.lists(st.floats(-1, 1), max_size=3).map(np.array),
    st.dictionaries(st.sampled_from("xy"), st.integers(0, 3), max_size=2),
)  # fmt: skip


@pytest.mark.filterwarnings("ignore:.*infos")
@pytest.mark.parametrize("examples", [30, pytest.param(100, marks=pytest.mark.long)])
def test_every_value_can_be_read_from_the_merged_dict(examples: int) -> None:
    lists = st.lists(st.dictionaries(st.sampled_from("ab"), VALUES, max_size=2), min_size=1, max_size=5)
    settings(max_examples=examples, deadline=None)(given(lists)(require_values_in_merged_dict))()


def require_values_in_merged_dict(infos: list[dict[str, Any]]) -> None:
    merged_infos = InfoMerger().merge(infos, range(len(infos)))
    for row, (info, split) in enumerate(zip(infos, info_rows(merged_infos, len(infos)), strict=True)):
        assert info.keys() == split.keys()
        for key, value in info.items():
            np.testing.assert_equal(split[key], value, f"env {row}")


def test_masks_are_recognized_by_the_text_of_their_keys() -> None:
    keys = [-1, None, 2.5, (1, 2), "_²", "_٣", "_03", 3]
    info = dict.fromkeys(keys, 1)
    assert info_rows(InfoMerger().merge([info, {}], [0, 1]), 2) == [info, {}]
    assert info_rows({"_²": np.array([1])}, 1) == [{"_²": 1}]


MIXTURES: list[list[Any]] = [
    [{"a": 1, "b": 2.5}, {"a": 2, "b": 0.5}, {}],
    [{"speed": 20}, {"speed": 20.5}, {"speed": np.float32(21.75)}],
    [{"hit": False}, {"hit": 2}, {"hit": np.True_}],
    [{"lap": 12}, {"lap": None}, None],
    [{"words": np.array(["a"])}, {"words": np.array(["abcdef"])}, {"_score": 1, "score": 2}],
    [{"seen": np.zeros(2)}, {"seen": np.zeros(3, np.uint8)}, {"seen": np.zeros((2, 0))}],
    [{(1, 2): 2}, {(1, 2): {"x": {}}}, {3: (1, [2])}],
    [{"d": {"e": {"f": 1}}, "n": np.int16(3)}, {"d": {"e": {"f": 1.5, "_f": 0}}}, {"d": {}}],
    [{"env_id": 7, "final_obs": 1, "players": {"env_id": 3}}, {"reset_mask": True}, {"final_info": 0}],
]


@pytest.mark.parametrize("infos", MIXTURES, ids=repr)
def test_infos_by_row_gives_what_environments_returned(engine: Options, infos: list[Any]) -> None:
    with open_engine([info_env([info, info], [info]) for info in infos], **engine) as envs:
        by_row = vecenv.infos_by_row(envs)
        assert repr(by_row.reset(seed=1)[1]) == repr(infos)
        assert repr(by_row.step([0, 0, 0])[4]) == repr(infos)
        by_row.send([0, 0, 0])
        *_, received, env_ids = by_row.recv(count=3)
        assert repr(received) == repr([infos[row] for row in env_ids])
        received[0] = env_ids[:] = 0  # the caller's own


def test_infos_by_row_has_what_wrappers_changed(closes: Any) -> None:
    class Doubling(VectorWrapper):  # type: ignore[type-arg]
        def step(self, actions: Any) -> Any:
            *results, infos = super().step(actions)
            infos["a"] *= 2
            del infos["gone"]
            infos["new"] = np.arange(3)
            return (*results, infos)

    infos = [{"a": np.int8(row), "x": value, "gone": 1} for row, value in enumerate((1, 1.5, (2,)))]
    envs = closes(Doubling(vecenv.AsyncVectorEnv([info_env([info]) for info in infos], num_workers=2)))
    by_row = vecenv.infos_by_row(envs)
    by_row.reset(seed=1)
    got = by_row.step(np.zeros(3, int))[4]
    assert repr(got) == repr([{"x": info["x"], "a": np.int8(2 * row), "new": row} for row, info in enumerate(infos)])
    foreign = closes(SyncVectorEnv([info_env([{"a": 1, "b": {"c": 0.5}}, {}])] * 2))
    vecenv.infos_by_row(foreign).reset(seed=1)
    assert vecenv.infos_by_row(foreign).step([0, 0])[4] == [{"a": 1, "b": {"c": 0.5}}] * 2


def test_removed_option_names_its_replacement() -> None:
    text = r"AsyncVectorEnv has no option 'ragged_infos'\. It was removed: .*infos_by_row"
    with pytest.raises(TypeError, match=text):
        vecenv.make_vec("CartPole-v1", 2, vector_kwargs={"ragged_infos": True})
    with pytest.raises(TypeError, match=text):
        vecenv.AsyncVectorEnv([info_env([])], ragged_infos=True)  # type: ignore[call-arg]
