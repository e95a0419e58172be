"""Tests of the optional compiled writer: it stores the same data as the Python writer, or refuses a result."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import random_results
from gymnasium import spaces

from vecenv.link.infos import InfoWriter, Places
from vecenv.shm.layout import INFO_BYTES, Layout, fixed_tree
from vecenv.worker import row_writer

NUMPY_OBJECTS = (np.ndarray, np.float32, np.float64, np.False_)  # arguments of the compiled module's ``Row``


def assert_writers_agree(monkeypatch: pytest.MonkeyPatch, count: int, seed: int) -> None:
    """Store ``count`` random results with both writers, and compare the data."""
    monkeypatch.setenv("VECENV_PURE", "")  # the comparison changes it; monkeypatch restores it after the test
    refused, written, with_info = random_results.compare_writers(count, seed)
    assert min(refused, written, with_info) > count / 30, "one of the three cases hardly occurred"


@pytest.mark.usefixtures("compiled_writer")
@pytest.mark.filterwarnings("ignore")
def test_both_writers_store_the_same_random_results(monkeypatch: pytest.MonkeyPatch) -> None:
    assert_writers_agree(monkeypatch, 3000, int.from_bytes(os.urandom(3), "little"))


@pytest.mark.slow
@pytest.mark.usefixtures("compiled_writer")
@pytest.mark.filterwarnings("ignore")
def test_both_writers_store_the_same_100_000_random_results(monkeypatch: pytest.MonkeyPatch) -> None:
    assert_writers_agree(monkeypatch, 100_000, 1)


@pytest.mark.slow
@pytest.mark.linux
def test_sanitizers_find_no_error_in_the_compiled_code(tmp_path: Path) -> None:
    """Random results are stored under AddressSanitizer and UBSan, with a separate allocation for each Python object."""
    build = pytest.importorskip("hatch_build")
    module, compiler = tmp_path / "sanitized.so", build.compiler_command()
    flags = ["-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-g"]
    if problem := build.compile_extension(Path(row_writer.__file__).with_name("_row_writer.c"), module, *flags):
        pytest.skip(problem)
    asan = subprocess.run([*compiler, "-print-file-name=libasan.so"], capture_output=True, text=True, check=True)
    environ = {**os.environ, "LD_PRELOAD": asan.stdout.strip(), "ASAN_OPTIONS": "detect_leaks=0", "PYTHONMALLOC": "malloc"}
    environ["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
    command = [sys.executable, "-W", "ignore", random_results.__file__, str(module), "20000", "2"]
    process = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=280, check=False)
    assert process.returncode == 0, process.stderr[-5000:]
    assert min(map(int, process.stdout.split())) > 1000, "one of the three cases hardly occurred"


def test_compiled_writer_leaks_no_references(compiled_writer: Any) -> None:
    dtype, key = np.dtype([("a", "f4")]), "".join(["a", "key"])
    info = {key: np.float64(2), "array": np.zeros(3), "flag": True, "other": np.int16(2)}
    good = (np.ones(4, dtype), np.float32(1), False, np.False_, info)
    watched = [dtype, key, info, *info.values(), *good, *NUMPY_OBJECTS, compiled_writer.Row]
    offsets_and_sizes = (0, 8), (8, 24), (32, 1), (33, 2)
    places = tuple((*item, *where) for item, where in zip(info.items(), offsets_and_sizes, strict=True))

    def use_every_function() -> None:
        kinds = ((4, dtype), (1, "f8"), (1, "?"), (1, "?"), (1, "u8"), (64, "u1"))
        row = compiled_writer.Row(tuple(np.zeros(size, kind) for size, kind in kinds), NUMPY_OBJECTS)
        for _ in range(3):
            row.learn(7, ())
            assert row.write(good) == 0
            row.learn(7, places)
            assert [row.write(result) for result in (good, (*good[:4], {}), good[:4], None)] == [2, 1, 0, 0]
            with pytest.raises(TypeError):
                row.learn(7, (*places, (key, info[key], 0, "8")))
            assert row.write(good) == 0
        for cells in ((1,) * 6, (np.zeros(1),), 1):
            with pytest.raises(TypeError):
                compiled_writer.Row(cells, NUMPY_OBJECTS)

    use_every_function()
    counts_before = [sys.getrefcount(each) for each in watched]
    for _ in range(10):
        use_every_function()
    assert [sys.getrefcount(each) for each in watched] == counts_before


@pytest.mark.parametrize(
    ("infos", "learned"),
    [
        ([{"x": 1}, {"x": 2}, {"x": 3}], [{"x": 2}]),
        ([{"x": 1}, {"x": 2}, {"y": 3}, {"x": 4}, {"x": 5}], [{"x": 2}]),  # an episode ends
        ([{"x": 1}, {"x": 2}, {"x": 1.5}, {"x": 2.5}, {"x": 3.5}], [{"x": 2}, {"x": 2.5}]),
        ([{"x": 1}, {"y": 2}] * 3, []),
        ([{"x": {"y": 1}}] * 3, []),
        ([{"x": "text"}] * 3, []),
        ([{"x": np.zeros(2, np.int8), "y": True}] * 3, [{"x": np.zeros(2, np.int8), "y": True}]),
    ],
)
def test_repeated_infos_are_learned(infos: list[Any], learned: list[Any]) -> None:
    """The learned example contains copies, because an environment may change its arrays in place, even their shapes."""
    calls: list[tuple[int, Places]] = []
    schemas, records = np.zeros(1, np.uint64), np.zeros((1, INFO_BYTES), np.uint8)
    writer = InfoWriter(schemas, records, [lambda number, places: calls.append((number, places))])
    numbers = []
    for info in infos:
        writer.write(0, info)
        numbers.append(schemas[0])
    assert repr([{key: value for key, value, _, _ in places} for _, places in calls]) == repr(learned)
    assert {number for number, _ in calls} <= set(numbers)
    own_arrays = {id(value) for info in infos for value in info.values() if isinstance(value, np.ndarray)}
    assert not own_arrays & {id(value) for _, places in calls for _, value, _, _ in places}


def count_compiled_rows(*shape: int) -> int:
    """Return the number of compiled writers that are made for two rows with observations of this shape."""
    box = fixed_tree(spaces.Box(-1, 1, shape))
    layout = Layout.for_spaces(box, None, 4, 1, final=False)
    arrays = layout.view(bytearray(layout.size))
    return len(row_writer.make_compiled_rows(box.leaf, [leaf[1:3] for leaf in arrays.observations], arrays, slice(1, 3)))


@pytest.mark.parametrize(("value", "expected"), [("", 2), ("0", 2), ("1", 0), ("yes", 0)])
@pytest.mark.usefixtures("compiled_writer")
def test_vecenv_pure_selects_the_python_writer(value: str, expected: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VECENV_PURE", value)
    assert count_compiled_rows(3) == expected
    assert row_writer.is_compiled() == bool(expected)


@pytest.mark.usefixtures("compiled_writer")
def test_python_writer_is_used_for_scalar_observations() -> None:
    assert count_compiled_rows() == 0


@pytest.mark.parametrize("incompatible_name", [None, "INTERFACE", "fields"])
def test_python_writer_is_used_if_the_compiled_module_is_missing_or_incompatible(
    incompatible_name: str | None, compiled_writer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A module is incompatible if it was built from other sources, or for another memory layout of NumPy's arrays."""
    contents = {name: getattr(compiled_writer, name) for name in ("INTERFACE", "Row", "fields")}
    incompatible = {"INTERFACE": 0, "fields": lambda array: (array.ctypes.data, 2, id(array.dtype), 0)}
    compatible_module = SimpleNamespace(**contents)
    monkeypatch.setitem(sys.modules, row_writer.MODULE, compatible_module)  # type: ignore[arg-type]
    assert row_writer.load() is compatible_module
    if incompatible_name is None:
        module = None
    else:
        module = SimpleNamespace(**{**contents, incompatible_name: incompatible[incompatible_name]})
    monkeypatch.setitem(sys.modules, row_writer.MODULE, module)  # type: ignore[arg-type]
    assert row_writer.load() is None
    monkeypatch.setattr(row_writer, "_module", None)
    assert count_compiled_rows(3) == 0
