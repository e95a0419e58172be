"""Fixtures that run every test of this folder with every backend; ``--contract-table`` prints the results.

By default a test runs with a third of :data:`ALTERNATE`, the next test with the next third; the rest is ``long``. JAX
compiles what it runs for each file, so its backends take part in one file only. Those of :data:`SLOWEST` are ``long``.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from . import table
from .backends import BACKENDS, CONFIGURATIONS, Backend
from .calls import name_of

# Those that take long, in an order in which every third one is of another kind.
ALTERNATE = (
    "first-ready",
    "multi-agent",
    "chunks",
    "envpool",
    "envpool-first-ready",
    "envpool-players",
    "native-ale",
    "jax-to-numpy",
    "jax-to-jax",
    "ray",
)
SLOWEST = ("native-ale",)
THIRDS = 3
FILE_OF_JAX = "test_steps.py"
HERE = Path(__file__).parent


def pytest_addoption(parser: pytest.Parser) -> None:
    help_text = "which backend keeps which part of the contract: print the table, or write it into PAGE"
    parser.addoption("--contract-table", nargs="?", const="", metavar="PAGE", help=help_text)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark as ``long`` two thirds of :data:`ALTERNATE` for each test, unless they are to be in the table."""
    if config.getoption("contract_table", default=None) is not None:
        return
    tests: dict[tuple[Path, str], dict[str, pytest.Item]] = {}
    for item in items:
        if item.path.parent == HERE and isinstance(item, pytest.Function) and hasattr(item, "callspec"):
            name = getattr(item.callspec.params.get("backend"), "name", "")
            if name in ALTERNATE:
                tests.setdefault((item.path, item.originalname), {})[item.callspec.id] = item
    for number, cases in enumerate(tests.values()):
        if len(cases) <= THIRDS:  # selected by name
            continue
        for item in cases.values():
            backend = item.callspec.params["backend"]
            elsewhere = backend.name in SLOWEST or (backend.folder == "jax" and item.path.name != FILE_OF_JAX)
            if elsewhere or ALTERNATE.index(backend.name) % THIRDS != number % THIRDS:
                item.add_marker(pytest.mark.long)


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    page = config.getoption("contract_table", default=None)
    if page is not None:
        found = table.table_of_reports(terminalreporter.stats)
        terminalreporter.section("contract")
        terminalreporter.write_line(found)
        if page:
            table.write(Path(page), found)


def _marked(backend: Backend) -> Any:
    ray = [pytest.mark.ray, pytest.mark.xdist_group("ray")] if backend.name == "ray" else []
    return pytest.param(backend, id=backend.name, marks=[*ray, pytest.mark.timeout(240)])


@pytest.fixture(scope="package", params=map(_marked, (*BACKENDS, *CONFIGURATIONS)))
def backend(request: pytest.FixtureRequest) -> Iterator[Backend]:
    """The backends, one after another."""
    backend: Backend = request.param
    for module in backend.needs:
        pytest.importorskip(module, reason=f"{backend.name} needs {module}, which is not installed")
    with backend.around():
        yield backend


@pytest.fixture(scope="package")
def shared(backend: Backend) -> Iterator[Any]:
    """Yield one for all tests of an expensive backend that leave it idle; else ``None``."""
    envs = backend.make() if backend.dear else None
    if envs is not None:
        envs.reset()  # threads that are started by the first call stay from now on
    yield envs
    if envs is not None:
        envs.close()


@pytest.fixture(autouse=True)
def recorded(request: pytest.FixtureRequest, record_property: Callable[[str, object], None]) -> None:
    """Record the call and backend of a test, and expect known gaps to fail."""
    if "backend" not in request.fixturenames:
        return
    backend: Backend = request.getfixturevalue("backend")
    call = name_of(request.function)
    record_property("backend", backend.name)
    record_property("call", call)
    if call in backend.not_yet:
        request.applymarker(pytest.mark.xfail(strict=True, reason=backend.not_yet[call]))


@pytest.fixture
def build(backend: Backend) -> Iterator[Callable[..., Any]]:
    """``build()`` or ``build(backend.make_slow)``: a fresh vector environment, closed at the end."""
    with contextlib.ExitStack() as stack:

        def make(factory: Callable[[], Any] | None = None) -> Any:
            envs = (factory or backend.make)()
            stack.callback(envs.close, terminate=True)
            return envs

        yield make


@pytest.fixture
def envs(shared: Any, build: Callable[..., Any]) -> Iterator[Any]:
    """Yield a vector environment that has been reset, fresh or equivalent. A test has to leave it idle."""
    mine = build() if shared is None or shared.closed or shared.stats()["in_flight"] else shared
    mine.reset()
    yield mine
    if mine is shared and not mine.closed:
        with contextlib.suppress(Exception):  # then the next one gets a fresh one
            while mine.stats()["in_flight"]:
                mine.recv(timeout=20, count=1)


@pytest.fixture
def refusable(record_property: Callable[[str, object], None]) -> Callable[..., Any]:
    """``with refusable(envs, capability):`` its body works; or it is refused, in agreement with ``envs.capabilities``.

    The body does not depend on that. A refusal names the backend and gives a reason.
    """

    @contextlib.contextmanager
    def block(envs: Any, capability: str) -> Iterator[None]:
        try:
            yield
        except NotImplementedError as error:
            can = getattr(envs.capabilities, capability, True)
            assert can is False, f"envs.capabilities say nothing of this: {capability!r}, {error}"
            names = type(envs).__name__, f"'{envs.capabilities.backend}'"
            assert any(name in str(error) for name in names), error
            record_property("refused", True)

    return block
