"""Infos: the merged dict of all environments, and ``infos_by_row``."""

from __future__ import annotations

import enum
import warnings
from collections import Counter, OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import pytest
from envs import CounterEnv, Options, ReturningEnv, assert_matches_sync, info_env_fn, open_engine, ready_engine
from gymnasium.vector import SyncVectorEnv, VectorEnv, VectorWrapper
from hypothesis import given, settings
from hypothesis import strategies as st

import vecenv
from vecenv.errors import InfoError
from vecenv.front.infos import InfoMerger, info_rows
from vecenv.link.infos import InfoReader, InfoWriter, _flatten
from vecenv.shm import INFO_BYTES
from vecenv.testing import assert_identical

# --- infos of single environments are merged into one dict of arrays, by the rules of ``VectorEnv._add_info``
#
# The rules have quirks on which programs rely: for example, the first environment that has a key decides its dtype. So
# the expected values come from Gymnasium's function.


class Colour(enum.IntEnum):
    RED = 1


class TextEnum(str, enum.Enum):  # noqa: UP042 - a StrEnum is formatted as its value, also in the name of its mask
    A = "a"


class UnreadableInfo(Mapping[str, int]):
    """An info that raises when it is read."""

    def __getitem__(self, key: str) -> int:
        return 1

    def __iter__(self) -> Iterator[str]:
        raise RuntimeError("the keys cannot be read")

    def __len__(self) -> int:
        return 1


def merge_like_gymnasium(infos: list[dict[Any, Any]]) -> dict[Any, Any]:
    """Merge one info per environment with Gymnasium's function."""
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
    "only in some infos": [{}, {"a": 1}, {}],
    "different keys": [{"a": 1}, {"b": 2.5}, {"c": "x"}],
    "keys that are not strings": [{3: 1, (1, 2): 2.0, None: "x"}, {3: 2}, {}],
    "dict": [{"d": {"a": 1, "b": 2.0}}, {"d": {"a": 2}}, {}],
    "dict in dict": [{"d": {"e": {"f": 1}}}, {"d": {"e": {"g": np.ones(2)}}}, {"d": {}}],
    "empty dict": [{"d": {}}, {}, {"d": {}}],
    "empty dict first": [{"d": {}}, {"d": {"a": 1}}, {}],
    "episode statistics of RecordEpisodeStatistics": [{"episode": {"r": 1.5, "l": 10, "t": 0.25}}, {}, {}],
    "final_obs from an environment": [{"final_obs": np.ones(2)}, {}, {"final_obs": "anything"}],
    "final_obs inside a dict": [{"d": {"final_obs": 1}}, {"d": {"final_obs": {"x": 2}}}, {}],
    "order of first appearance": [{"z": 1, "a": 2}, {"m": 3, "z": 4}, {"a": 5}],
    "int then bool": [{"a": 5}, {"a": True}, {"a": False}],
    "float then int": [{"a": 0.5}, {"a": 5}, {"a": True}],
    "None then int": [{"a": None}, {"a": 5}, {"a": 2.5}],
    "str then array": [{"a": "x"}, {"a": np.ones(2)}, {}],
    "number then 0-d array": [{"a": 1.0}, {"a": np.array(2.0)}, {}],
    "key that looks like a mask": [{"a": 1, "_a": 7}, {"a": 2}, {}],
    "unsigned beyond int64": [{"a": np.uint64(2**63 + 1)}] * 3,
    "equal keys of different types": [{1: 5}, {True: 6, "d": {0: 1}}, {1.0: 7, "d": {False: 2}}],
    "a number and its text as keys": [{1: 5}, {"1": 6}, {1: 7}],
    "a text key and an equal key of an enum": [{"a": 5}, {TextEnum.A: 6}, {"a": 7}],
    "numbers that rounding would change": [
        {"a": 0.1, "b": -0.0, "c": 5e-324, "d": 1.7976931348623157e308, "e": 2**53 + 1, "f": -(2**63)}
    ]
    * 3,
    "hundreds of keys and a large array": [
        {f"key {index}": float(index) for index in range(300)} | {"big": np.arange(300_000, dtype=np.float64)}
    ]
    * 3,
    "int32 then int": [{"a": np.int32(1)}, {"a": 2**31 - 1}, {}],
}


@pytest.mark.sampled(16)
@pytest.mark.parametrize("name", CASES)
def test_infos_are_merged_as_in_gymnasium(engine: Options, name: str) -> None:
    infos = CASES[name]
    expected = merge_like_gymnasium(infos)
    with open_engine([info_env_fn([info], [info]) for info in infos], **engine) as envs:
        for _ in range(2):
            assert_identical(envs.reset(seed=1)[1], expected, "reset")
            assert_identical(envs.step([0, 0, 0])[4], expected, "step")


# --- values that Gymnasium would cast, truncate, broadcast or refuse are kept unchanged


def make_column(values: Any, dtype: Any = object) -> np.ndarray[Any, Any]:
    """Return these values as a column, by default an object array."""
    if dtype is not object:
        return np.array(values, dtype)
    column = np.full(len(values), None, dtype=object)
    for row, value in enumerate(values):
        column[row] = value  # one by one, because np.array(values, object) would split lists and arrays
    return column


TWO_ZEROS, THREE_ONES = np.zeros(2), np.ones(3)
FIVE_SECONDS, SEVEN_MS = np.timedelta64(5, "s"), np.timedelta64(7, "ms")
MIXED_VALUES: dict[str, tuple[list[Any], Any, bool]] = {
    # The value of key "a" in each environment, the expected column, and True if a warning is expected, because Gymnasium
    # would silently return another column.
    "int then float": ([1, 2.7, -2.7], make_column([1, 2.7, -2.7], float), True),
    "an int that no float can hold, then float": ([2**53 + 1, 0.5], make_column([2**53 + 1, 0.5]), True),
    "bool then int": ([True, 5, 0], make_column([True, 5, 0]), True),
    "int then text that is a number": ([1, "2"], make_column([1, "2"]), True),
    "short text then long": ([np.array(["ab"]), np.array(["abcdef"])], make_column([["ab"], ["abcdef"]], "U6"), True),
    "int array then float array": ([np.array([1, 2]), np.array([1.7, 2.7])], make_column([[1, 2], [1.7, 2.7]], float), True),
    "array then number": ([THREE_ONES, 5], make_column([THREE_ONES, 5]), True),
    "array then a smaller one": ([THREE_ONES, np.array([7.0])], make_column([THREE_ONES, np.array([7.0])]), True),
    "float32 then float": ([np.float32(0.1), 0.1], make_column([float(np.float32(0.1)), 0.1], float), True),
    "int8 then int": ([np.int8(1), 300], make_column([1, 300], int), False),
    "dict then int": ([{"a": 1}, 5], make_column([{"a": 1}, 5]), False),
    "int then dict": ([5, {"a": 1}], make_column([5, {"a": 1}]), False),
    "None then dict": ([None, {"a": 1}], make_column([None, {"a": 1}]), False),
    "int then None": ([1, None], make_column([1, None]), False),
    "int then text": ([1, "x"], make_column([1, "x"]), False),
    "int then list": ([1, [1, [2]]], make_column([1, [1, [2]]]), False),
    "an int beyond 64 bits": ([2**70, 1], make_column([2**70, 1]), False),
    "an int beyond int64": ([2**63, 1], make_column([2**63, 1]), False),
    "arrays of different shapes": ([TWO_ZEROS, THREE_ONES], make_column([TWO_ZEROS, THREE_ONES]), False),
    "number then array": ([1.0, TWO_ZEROS], make_column([1.0, TWO_ZEROS]), False),
    "time spans": ([FIVE_SECONDS, SEVEN_MS], make_column([FIVE_SECONDS, SEVEN_MS]), False),
    "array then dict": ([TWO_ZEROS, {"a": 1}], make_column([TWO_ZEROS, {"a": 1}]), False),
}


@pytest.mark.sampled(8)
@pytest.mark.parametrize("name", MIXED_VALUES)
def test_values_that_do_not_fit_one_column_are_kept_unchanged(engine: Options, name: str) -> None:
    values, column, warned = MIXED_VALUES[name]
    with ready_engine([info_env_fn([{"a": value, "d": {"a": value}}, {}]) for value in values], **engine) as envs:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            infos = envs.step([0] * len(values))[4]
            assert envs.step([0] * len(values))[4] == {}
        mask = np.ones(len(values), np.bool_)
        assert_identical(infos, {"a": column, "_a": mask, "d": {"a": column, "_a": mask}, "_d": mask})
        texts = [str(warning.message) for warning in caught if "infos[" in str(warning.message)]
        assert len(texts) == (2 if warned else 0), texts
        if warned:
            assert "infos['a']: env " in texts[0]
            assert "infos['d']['a']: env " in texts[1]


@pytest.mark.filterwarnings("ignore:.*infos")
def test_column_warning_is_issued_once_and_names_env_and_key(engine: Options) -> None:
    with ready_engine([info_env_fn([{"a": value}] * 4) for value in (1, 2, 2.5)], **engine) as envs:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for _ in range(4):
                assert envs.step([0] * 3)[4]["a"].tolist() == [1, 2, 2.5]
        texts = [str(warning.message) for warning in caught]
        assert len(texts) == 1
        assert "infos['a']: env 2 returned 2.5, but the first value, from env 0, has dtype int64" in texts[0]


def test_key_that_equals_the_mask_of_another_is_dropped_with_a_warning(engine: Options) -> None:
    with ready_engine([info_env_fn([{"_a": 0, "a": 1}])] * 2, **engine) as envs:
        with pytest.warns(UserWarning, match=r"infos\['_a'\] of env 0 is dropped: that key is the mask of another key"):
            infos = envs.step([0, 0])[4]
        mask = np.ones(2, np.bool_)
        assert_identical(infos, {"_a": mask, "__a": mask, "a": np.ones(2, int)})


NOT_DICTS: dict[str, Any] = {"None": None, "a list": [1, 2]}


@pytest.mark.parametrize("name", NOT_DICTS)
@pytest.mark.parametrize("call", ["step", "reset", "recv"])
def test_info_that_is_not_a_dict_raises_with_the_complete_result(engine: Options, call: str, name: str) -> None:
    infos = [{"a": 1}, NOT_DICTS[name], {"a": 3}]
    fns = [info_env_fn([{}] if call == "reset" else [info, {}], [info]) for info in infos]  # later infos are empty
    with open_engine(fns, **engine) as envs:
        if call != "reset":
            vecenv.infos_by_row(envs).reset(seed=1)
        if call == "recv":
            envs.send([0, 0, 0])
        calls: dict[str, Any] = {"step": lambda: envs.step([0] * 3), "reset": envs.reset, "recv": lambda: envs.recv(count=3)}
        with pytest.raises(InfoError, match=r"env 1 returned an info that is not a dict but") as caught:
            calls[call]()
        assert isinstance(caught.value, AttributeError)  # as in Gymnasium
        assert sorted(map(repr, caught.value.result[4])) == sorted(map(repr, infos))  # recv may return any order
        assert caught.value.result[0].shape[0] == 3
        assert envs._state.value == "default"
        assert not envs.errors
        assert envs.step([0, 0, 0])[4] == {}


@pytest.mark.parametrize("mode", ["NextStep", "SameStep"])
def test_info_that_is_not_a_dict_restarts_its_env(mode: str) -> None:
    env_fns = [info_env_fn([info, {}], [{}]) for info in ({"a": 1}, None)]
    with ready_engine(env_fns, num_workers=1, on_failure="restart", autoreset_mode=mode) as envs:
        infos = envs.step([0, 0])[4]
        assert infos["restarted"].tolist() == [False, True]
        assert infos["a"].tolist() == [1, 0]
        assert "env 1 (worker 0, " in str(envs.errors[-1])
        assert "InfoError: info: got None, expected a dict" in str(envs.errors[-1])


def test_arrays_too_large_for_a_record_are_not_copied() -> None:
    values: list[Any] = []
    assert _flatten({"a": 1, "b": np.zeros(INFO_BYTES + 1, np.uint8)}, values) is None
    assert values == [1]


@pytest.mark.parametrize("num_workers", [0, 1])
def test_info_is_not_returned_again_when_another_row_steps(num_workers: int) -> None:
    with ready_engine([info_env_fn([{"a": 1}, {}]), info_env_fn([{}, {"b": 2}])], num_workers=num_workers) as envs:
        for rows, keys in (([0], {"a", "env_id"}), ([1], {"env_id"}), ([0, 1], {"b", "env_id"})):
            envs.send([0] * len(rows), rows)
            assert {key.removeprefix("_") for key in envs.recv(count=len(rows))[4]} == keys


def test_infos_are_new_writeable_arrays_at_every_step(engine: Options) -> None:
    info = {"a": 1, "b": np.ones(2), "d": {"e": 2.0}, "o": "x"}
    with ready_engine([info_env_fn([info], [info])] * 3, **engine) as envs:
        first = envs.step([0, 0, 0])[4]
        expected = merge_like_gymnasium([info] * 3)
        first["new"] = 1
        for array in (first["a"], first["_a"], first["b"], first["o"], first["d"]["e"], first["d"]["_e"]):
            assert array.flags.writeable
            array[...] = 0
        second = envs.step([0, 0, 0])[4]
        assert_identical(second, expected)
        third = envs.step([0, 0, 0])[4]
        for key in ("a", "_a", "b", "o"):
            assert not np.shares_memory(second[key], third[key])


class SharedInfoEnv(CounterEnv):
    """An environment that writes its observation into a given info and returns it. Environments may share an info."""

    def __init__(self, env_id: int, info: dict[str, Any]) -> None:
        super().__init__(env_id, lengths=(2, 3))
        self.info = info

    def write_and_add_info(self, results: Sequence[Any]) -> Any:
        """Write the observation into the info, and return the results with this info."""
        observation = results[0]
        self.info["text"] = self.info["inner"]["text"] = self.info["ordered"]["text"] = str(observation)
        self.info["array"][:] = self.info["inner"]["array"][:] = self.info["objects"][:] = observation
        return *results[:-1], self.info

    def reset(self, **kwargs: Any) -> Any:
        return self.write_and_add_info(super().reset(**kwargs))

    def step(self, action: Any) -> Any:
        return self.write_and_add_info(super().step(action))


@pytest.mark.parametrize("mode", ["NextStep", "SameStep"])
@pytest.mark.parametrize("kwargs", [{"num_workers": 0}, {"num_workers": 1}, {"num_workers": 1, "use_caller": True}], ids=str)
def test_infos_overwritten_in_place_equal_sync_vector_env(kwargs: Options, mode: str) -> None:
    """Infos keep the values of their step, although the next environment writes into the same dicts and arrays."""
    info = {"array": np.zeros(4), "objects": np.zeros(4, object), "inner": {"array": np.zeros(4)}, "ordered": OrderedDict()}
    assert_matches_sync([partial(SharedInfoEnv, row, info) for row in range(3)], 6, autoreset_mode=mode, **kwargs)


@pytest.mark.parametrize("num_workers", [0, 1])
def test_dict_subclasses_keep_their_class(num_workers: int) -> None:
    info = {"inner": OrderedDict(text="a", array=np.zeros(2)), "counts": Counter("aab")}
    with open_engine([info_env_fn([info])], num_workers=num_workers) as envs:
        by_row = vecenv.infos_by_row(envs)
        by_row.reset()
        (returned,) = by_row.step(np.array([0]))[4]
    assert (type(returned["inner"]), type(returned["counts"])) == (OrderedDict, Counter)
    assert returned["counts"] == info["counts"]
    assert returned["inner"]["array"] is not info["inner"]["array"]


@pytest.mark.parametrize("mode", ["NextStep", "SameStep"])
def test_infos_with_changing_keys_equal_sync_vector_env(engine: Options, mode: str, closes: Any) -> None:
    """A column of numbers must not be returned in a step without that key, although many earlier steps had it."""
    rng = np.random.default_rng(0)

    def random_info() -> dict[str, Any]:
        values: dict[str, Any] = {
            "x": float(rng.random()),
            "n": int(rng.integers(9)),
            "flag": bool(rng.random() < 0.5),
            "v": rng.random(3).astype(np.float32),
            "word": str(rng.random()),
            "d": {"y": float(rng.random()), "z": int(rng.integers(9))},
        }
        if rng.random() < 0.7:
            return values
        return {key: value for key, value in values.items() if rng.random() < 0.5}

    fns = [info_env_fn([random_info() for _ in range(30)], [random_info() for _ in range(3)]) for _ in range(4)]
    reference = closes(SyncVectorEnv(fns, autoreset_mode=mode))
    with open_engine(fns, autoreset_mode=mode, **engine) as envs:
        assert_identical(envs.reset(seed=1), reference.reset(seed=1))
        for t in range(30):
            result, expected_result = envs.step([0] * 4), reference.step([0] * 4)
            assert_identical(result, expected_result, f"step {t}")
            # keys must also have the same order, because wrappers print infos
            assert list(result[4]) == list(expected_result[4])
            if t == 15:
                assert_identical(envs.reset(seed=1), reference.reset(seed=1))


def test_same_step_reset_info_that_is_not_a_dict_keeps_the_final_info(engine: Options) -> None:
    zeros = np.zeros(4, np.float32)
    resets, steps = [(zeros, {"b": 2}), (zeros, None)], [(zeros, 1.0, True, False, {"a": 1})] * 2
    with ready_engine([partial(ReturningEnv, resets=resets, steps=steps)] * 2, autoreset_mode="SameStep", **engine) as envs:
        text = "is not a dict but a NoneType; with same-step autoreset it is dropped"
        with pytest.warns(UserWarning, match=text) as caught:
            infos = [envs.step([0, 0])[4] for _ in range(2)]
        assert len(caught) == 1
        for info in infos:
            assert info["final_info"]["a"].tolist() == [1, 1]
            assert [final.tolist() for final in info["final_obs"]] == [[0.0] * 4] * 2


def test_column_with_changing_types_equals_gymnasium_at_every_step(engine: Options) -> None:
    steps: list[dict[str, Any]] = [*({"a": value} for value in (1.5, 2, True, np.float32(0.1), "x", 1.5)), {}]
    with ready_engine([info_env_fn(steps)] * 2, **engine) as envs:
        for info in steps:
            assert_identical(envs.step([0, 0])[4], merge_like_gymnasium([info] * 2))


def test_key_keeps_its_type_after_an_equal_key_of_another_type(engine: Options, closes: Any) -> None:
    infos_over_time: list[dict[Any, Any]] = [
        {1: 5}, {True: 6}, {1.0: 7}, {"d": {0: 1}}, {"d": {False: 2}}, {"a": 1}, {TextEnum.A: 2},
    ]  # fmt: skip
    fns = [info_env_fn(infos_over_time), info_env_fn(infos_over_time[1:] + infos_over_time[:1])]
    reference = closes(SyncVectorEnv(fns))
    reference.reset(seed=1)
    with ready_engine(fns, **engine) as envs:
        for t in range(2 * len(infos_over_time)):
            result, expected_result = envs.step([0, 0])[4], reference.step([0, 0])[4]
            assert_identical(result, expected_result, f"step {t}")
            # the texts of the keys, because 1, True and 1.0 are equal
            assert list(map(repr, result)) == list(map(repr, expected_result)), f"step {t}"
            if "d" in expected_result:
                assert list(map(repr, result["d"])) == list(map(repr, expected_result["d"]))


@pytest.mark.parametrize("num_workers", [0, 1])
def test_unreadable_info_raises_with_its_env_and_the_next_step_succeeds(num_workers: int) -> None:
    with ready_engine([info_env_fn([info, {}]) for info in ({}, UnreadableInfo())], num_workers=num_workers) as envs:
        with pytest.raises((RuntimeError, InfoError)) as caught:
            envs.step([0, 0])
        text = str(caught.value) + "".join(getattr(caught.value, "__notes__", []))
        assert "env 1: its info of type UnreadableInfo cannot be read" in text
        assert envs.step([0, 0])[4] == {}


@pytest.mark.parametrize("other_values", [{}, {"text": "not a column"}])
@pytest.mark.parametrize("num_workers", [0, 1])
def test_info_that_contains_itself_raises_with_its_env(num_workers: int, other_values: dict[str, Any]) -> None:
    info = {**other_values}
    info["info"] = info
    with ready_engine([info_env_fn([{}]), info_env_fn([info])], num_workers=num_workers) as envs:
        with pytest.raises(RecursionError, match="info: it contains itself") as caught:
            envs.step([0, 0])
        assert "env 1," in caught.value.__notes__[0]


@pytest.mark.sampled(4)
@pytest.mark.parametrize("value", [np.arange(3), "two", None, 2.5], ids=repr)
def test_own_info_named_like_that_of_action_chunks_may_be_anything(engine: Options, value: Any) -> None:
    with ready_engine([info_env_fn([{"chunk_steps": value}] * 2)] * 2, **engine) as envs:
        assert envs.step([0, 0])[4]["_chunk_steps"].all()
        assert_identical(vecenv.infos_by_row(envs).step([0, 0])[4], [{"chunk_steps": value}] * 2)
        assert envs.stats()["steps"] == 4


def test_info_keys_are_ordered_by_first_appearance() -> None:
    infos: list[dict[str, Any]] = [{"b": 1, "z": 2}, {"a": 3, "b": 1}, {}, {"y": 1, "b": 2, "a": 5}, {"c": {"e": 1, "d": 1}}]
    for _ in range(len(infos)):
        infos = infos[1:] + infos[:1]
        expected = merge_like_gymnasium(infos)
        with ready_engine([info_env_fn([info]) for info in infos], num_workers=0) as envs:
            assert list(envs.step([0] * 5)[4]) == list(expected)


@pytest.mark.long
def test_thousands_of_key_combinations_are_not_all_cached() -> None:
    rng, rows = np.random.default_rng(0), 12
    schemas, records = np.zeros(rows, np.uint64), np.zeros((rows, INFO_BYTES), np.uint8)
    writer, reader = InfoWriter(schemas, records), InfoReader(schemas, records)
    combinations = set()
    for t in range(2400):
        # bit k of a row's key set stands for the key k in its info; in every third step, all rows have the same keys
        key_sets = np.repeat(rng.integers(1, 64), rows) if t % 3 == 0 else rng.integers(0, 64, rows)
        infos: list[dict[str, Any]] = [
            {f"k{k}": t + row if k % 2 else np.full(k, t, np.float32) for k in range(6) if key_set >> k & 1}
            for row, key_set in enumerate(key_sets.tolist())
        ]
        for row, info in enumerate(infos):
            if info:
                assert writer.write(row, info)
            else:
                schemas[row] = 0
        definitions: dict[int, Any] = {}
        writer.add_new_definitions(definitions)
        reader.learn(definitions)
        combinations.add(frozenset(key_sets.tolist()))
        assert_identical(reader.read(None, rows, {}, {}), merge_like_gymnasium(infos))
    assert len(combinations) > 1400
    sizes = {name: len(cache) for name, cache in vars(reader).items() if isinstance(cache, dict)}
    assert sizes["_plans"] <= 256, sizes
    assert max(sizes.values()) <= 4096, sizes
    assert sum(len(cache) for cache in vars(writer).values() if isinstance(cache, dict)) <= 2 * 64


@pytest.mark.long
def test_caches_stay_small_if_keys_never_repeat() -> None:
    rows = 3
    schemas, records = np.zeros(rows, np.uint64), np.zeros((rows, INFO_BYTES), np.uint8)
    writer, reader = InfoWriter(schemas, records), InfoReader(schemas, records)
    for t in range(5000):
        infos = [{f"k{t}": t, "x": 1.5}, {"x": 2.5}, {f"k{t + row}": 1 for row in range(2)}]
        pickled = {row: info for row, info in enumerate(infos) if not writer.write(row, info)}
        definitions: dict[int, Any] = {}
        writer.add_new_definitions(definitions)
        reader.learn(definitions)
        assert_identical(reader.read(None, rows, pickled, {}), merge_like_gymnasium(infos))
    sizes = [len(cache) for owner in (writer, reader) for cache in vars(owner).values() if isinstance(cache, dict)]
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
    check = given(lists)(assert_values_in_merged_dict)
    settings(max_examples=examples, deadline=None)(check)()


def assert_values_in_merged_dict(infos: list[dict[str, Any]]) -> None:
    merged_infos = InfoMerger().merge(infos, range(len(infos)))
    for row, (info, row_info) in enumerate(zip(infos, info_rows(merged_infos, len(infos)), strict=True)):
        assert info.keys() == row_info.keys()
        for key, value in info.items():
            np.testing.assert_equal(row_info[key], value, f"env {row}")


def test_masks_are_recognized_by_the_text_of_their_keys() -> None:
    keys = [-1, None, 2.5, (1, 2), "_²", "_٣", "_03", 3]
    info = dict.fromkeys(keys, 1)
    assert info_rows(InfoMerger().merge([info, {}], [0, 1]), 2) == [info, {}]
    assert info_rows({"_²": np.array([1])}, 1) == [{"_²": 1}]


INFOS_OF_THREE_ROWS: list[list[Any]] = [
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


@pytest.mark.parametrize("infos", INFOS_OF_THREE_ROWS, ids=repr)
def test_infos_by_row_returns_the_infos_as_environments_returned_them(engine: Options, infos: list[Any]) -> None:
    with open_engine([info_env_fn([info, info], [info]) for info in infos], **engine) as envs:
        by_row = vecenv.infos_by_row(envs)
        assert repr(by_row.reset(seed=1)[1]) == repr(infos)
        assert repr(by_row.step([0, 0, 0])[4]) == repr(infos)
        by_row.send([0, 0, 0])
        *_, received, env_ids = by_row.recv(count=3)
        assert repr(received) == repr([infos[row] for row in env_ids])
        received[0] = env_ids[:] = 0  # the caller may overwrite both


@pytest.mark.filterwarnings("ignore:.*infos")
def test_infos_by_row_includes_changes_by_wrappers(closes: Any) -> None:
    class DoublingWrapper(VectorWrapper):  # type: ignore[type-arg]
        def step(self, actions: Any) -> Any:
            *results, infos = super().step(actions)
            infos["a"] *= 2
            del infos["gone"]
            infos["new"] = np.arange(3)
            return (*results, infos)

    infos = [{"a": np.int8(row), "x": value, "gone": 1} for row, value in enumerate((1, 1.5, (2,)))]
    envs = closes(DoublingWrapper(vecenv.AsyncVectorEnv([info_env_fn([info]) for info in infos], num_workers=2)))
    by_row = vecenv.infos_by_row(envs)
    by_row.reset(seed=1)
    received = by_row.step(np.zeros(3, int))[4]
    assert repr(received) == repr([{"x": info["x"], "a": np.int8(2 * row), "new": row} for row, info in enumerate(infos)])


def test_infos_by_row_accepts_a_subclass_that_overrides_the_beginning_of_calls(closes: Any) -> None:
    class CountsCalls(vecenv.AsyncVectorEnv[Any, Any]):
        calls = 0

        def reset_async(self, *args: Any, **kwargs: Any) -> None:
            self.calls += 1
            super().reset_async(*args, **kwargs)

        def step_async(self, actions: Any) -> None:
            self.calls += 1
            super().step_async(actions)

    envs = closes(CountsCalls([info_env_fn([{"a": 1}], [{"b": 2}])] * 2, num_workers=0))
    by_row = vecenv.infos_by_row(envs)
    assert by_row.reset(seed=1)[1] == [{"b": 2}] * 2
    assert by_row.step([0, 0])[4] == [{"a": 1}] * 2
    assert envs.calls == 2


def test_infos_by_row_accepts_sync_vector_env(closes: Any) -> None:
    sync_envs = closes(SyncVectorEnv([info_env_fn([{"a": 1, "b": {"c": 0.5}}, {}])] * 2))
    vecenv.infos_by_row(sync_envs).reset(seed=1)
    assert vecenv.infos_by_row(sync_envs).step([0, 0])[4] == [{"a": 1, "b": {"c": 0.5}}] * 2


def test_error_about_a_removed_option_names_its_replacement() -> None:
    text = r"AsyncVectorEnv has no option 'ragged_infos'\. It was removed: .*infos_by_row"
    with pytest.raises(TypeError, match=text):
        vecenv.make_vec("CartPole-v1", 2, vector_kwargs={"ragged_infos": True})
    with pytest.raises(TypeError, match=text):
        vecenv.AsyncVectorEnv([info_env_fn([])], ragged_infos=True)  # type: ignore[call-arg]
