"""Every test of this folder runs with every backend; ``--contract-table`` shows which backend keeps what."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from . import table
from .backends import BACKENDS, Backend
from .calls import name_of


def pytest_addoption(parser: pytest.Parser) -> None:
    said = "which backend keeps which part of the contract: print the table, or write it into PAGE"
    parser.addoption("--contract-table", nargs="?", const="", metavar="PAGE", help=said)


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    page = config.getoption("contract_table", default=None)
    if page is not None:
        found = table.of_reports(terminalreporter.stats)
        terminalreporter.section("contract")
        terminalreporter.write_line(found)
        if page:
            table.write(Path(page), found)


def _marked(backend: Backend) -> Any:
    ray = [pytest.mark.ray, pytest.mark.xdist_group("ray")] if backend.name == "ray" else []
    return pytest.param(backend, id=backend.name, marks=[*ray, pytest.mark.timeout(240)])


@pytest.fixture(scope="package", params=map(_marked, BACKENDS))
def backend(request: pytest.FixtureRequest) -> Iterator[Backend]:
    """One after the other."""
    backend: Backend = request.param
    for module in backend.needs:
        pytest.importorskip(module, reason=f"{backend.name} needs {module}, which is not installed")
    with backend.around():
        yield backend


@pytest.fixture(scope="package")
def shared(backend: Backend) -> Iterator[Any]:
    """One for all tests of a backend that is dear, where they leave it idle; else ``None``."""
    envs = backend.make() if backend.dear else None
    if envs is not None:
        envs.reset()  # threads that are started by the first call are there from now on
    yield envs
    if envs is not None:
        envs.close()


@pytest.fixture(autouse=True)
def recorded(request: pytest.FixtureRequest, record_property: Callable[[str, object], None]) -> None:
    """Write down which call of which backend a test is about, and expect what is known not to hold yet."""
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

        def make(how: Callable[[], Any] | None = None) -> Any:
            envs = (how or backend.make)()
            stack.callback(envs.close, terminate=True)
            return envs

        yield make


@pytest.fixture
def envs(shared: Any, build: Callable[..., Any]) -> Iterator[Any]:
    """A vector environment that has been reset, fresh or as good as that. A test has to leave it idle."""
    mine = build() if shared is None or shared.closed or shared.stats()["in_flight"] else shared
    mine.reset()
    yield mine
    if mine is shared and not mine.closed:
        with contextlib.suppress(Exception):  # the next one gets a fresh one then
            while mine.stats()["in_flight"]:
                mine.recv(timeout=20, count=1)


@pytest.fixture
def refusable(record_property: Callable[[str, object], None]) -> Callable[..., Any]:
    """``with refusable(envs, capability):`` what is in it works; or it is refused, and ``envs.capabilities`` say so.

    The block learns nothing of it. A refusal names the backend and gives a reason.
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
