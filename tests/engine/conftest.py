"""Fixtures for engine options and for the two writers of results, and the choice of cases for the default run."""

from __future__ import annotations

import zlib
from pathlib import Path
from typing import Any

import pytest
import random_results
from envs import ENGINES, PROCESS_ENGINES, VALUE_ENGINES, Options
from sampling import sample_parameter

from vecenv.worker import row_writer

# Modules that test the data that workers store. By default, each test runs with one of the two writers; its cases with the
# other one are marked `slow`.
TESTED_WITH_BOTH_WRITERS = (
    "test_autoreset", "test_engine_infos", "test_engine_observations", "test_engine_step", "test_oracle",
)  # fmt: skip

# Files with many cases that hardly depend on the engine. By default, each case runs with one engine; with the other engines,
# it is marked `slow`.
ONE_ENGINE_PER_CASE = ("test_engine_step.py", "test_engine_infos.py")
HERE = Path(__file__).parent


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Choose the engines of the default run.

    Cases with other engines are marked ``slow`` in the files of :data:`ONE_ENGINE_PER_CASE`. In other files, they are marked
    ``long``, and the choice depends on the fixture:

    * ``engine``: each engine is chosen for some cases of a test, and each case runs with at least one engine.
    * ``process_engine``: each case runs with one engine, and the next test begins with the next engine.
    * ``every_engine``: as ``process_engine``, and also with the in-process engine.
    """
    own_items = [item for item in items if item.path.parent == HERE and isinstance(item, pytest.Function)]
    candidates = [item for item in own_items if not item.get_closest_marker("slow") and hasattr(item, "callspec")]
    for name in ("engine", "every_engine"):
        sample_parameter([item for item in candidates if item.path.name in ONE_ENGINE_PER_CASE], name)
    other_items = [item for item in candidates if item.path.name not in ONE_ENGINE_PER_CASE]
    sample_parameter(other_items, "engine", mark="long")
    for name in ("every_engine", "process_engine"):
        process_items = [item for item in other_items if item.callspec.params.get(name) != ENGINES["in-process"]]
        sample_parameter(process_items, name, all_values=False, mark="long")


@pytest.fixture(params=ENGINES.values(), ids=list(ENGINES))
def every_engine(request: pytest.FixtureRequest) -> Options:
    """Options for tests of behaviour that depends on worker processes."""
    return request.param


@pytest.fixture(params=PROCESS_ENGINES.values(), ids=list(PROCESS_ENGINES))
def process_engine(request: pytest.FixtureRequest) -> Options:
    """Options for tests of features that only worker processes have."""
    return request.param


@pytest.fixture(params=VALUE_ENGINES.values(), ids=list(VALUE_ENGINES))
def engine(request: pytest.FixtureRequest) -> Options:
    """Options for tests of returned values. They omit one process per environment, which takes long to start."""
    return request.param


@pytest.fixture(params=[True, False], ids=["shared", "pickled"])
def shared_memory(request: pytest.FixtureRequest) -> bool:
    return request.param


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if metafunc.module.__name__ in TESTED_WITH_BOTH_WRITERS:
        writers = ["compiled", "python"]
        # By name, so that each writer is the default of about half of the tests. `hash` differs between xdist's processes.
        if zlib.crc32(metafunc.function.__name__.encode()) % 2:
            writers.reverse()
        metafunc.parametrize("writer", [writers[0], pytest.param(writers[1], marks=pytest.mark.slow)], indirect=True)


@pytest.fixture(autouse=True)
def writer(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Select the writer of step results, in the modules of :data:`TESTED_WITH_BOTH_WRITERS`."""
    name = getattr(request, "param", None)
    if name == "compiled":
        request.getfixturevalue("compiled_writer")
    elif name == "python":
        monkeypatch.setenv("VECENV_PURE", "1")


@pytest.fixture(scope="session")
def compiled_module(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Compile the extension module from the sources of this checkout, or skip the test if there is no compiler."""
    build = pytest.importorskip("hatch_build")
    target = tmp_path_factory.mktemp("compiled") / "_row_writer.abi3.so"
    if problem := build.compile_extension(Path(row_writer.__file__).with_name("_row_writer.c"), target, "-Wall", "-Werror"):
        pytest.skip(problem)
    return random_results.load_compiled_writer(target)


@pytest.fixture
def compiled_writer(compiled_module: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Make workers use the compiled module, and return it."""
    monkeypatch.setattr(row_writer, "_module", compiled_module)
    monkeypatch.delenv("VECENV_PURE", raising=False)
    return compiled_module
