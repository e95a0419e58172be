"""Fixtures that run every test of this folder with every backend; ``--contract-table`` prints the results.

By default each test runs with a third of :data:`ALTERNATING_BACKENDS`, and the next test with the next third; the other
cases are ``long``. So are all cases of :data:`SLOWEST`, and those of JAX's backends outside of :data:`FILE_OF_JAX`,
because JAX compiles its programs again in each file.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from . import table
from .backends import BACKENDS, CONFIGURATIONS, Backend
from .calls import call_name

# backends with slow tests, ordered so that each third, which is every third entry, contains different kinds
ALTERNATING_BACKENDS = (
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
    help_text = "print the table of the calls that each backend supports, or write it into PAGE"
    parser.addoption("--contract-table", nargs="?", const="", metavar="PAGE", help=help_text)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark two thirds of each test's :data:`ALTERNATING_BACKENDS` as ``long``, unless a table is requested."""
    if config.getoption("contract_table", default=None) is not None:
        return
    tests: dict[tuple[Path, str], dict[str, pytest.Item]] = {}
    for item in items:
        if item.path.parent == HERE and isinstance(item, pytest.Function) and hasattr(item, "callspec"):
            name = getattr(item.callspec.params.get("backend"), "name", "")
            if name in ALTERNATING_BACKENDS:
                tests.setdefault((item.path, item.originalname), {})[item.callspec.id] = item
    for number, cases in enumerate(tests.values()):
        if len(cases) <= THIRDS:  # these backends were selected with -k or by id
            continue
        for item in cases.values():
            backend = item.callspec.params["backend"]
            excluded = backend.name in SLOWEST or (backend.folder == "jax" and item.path.name != FILE_OF_JAX)
            if excluded or ALTERNATING_BACKENDS.index(backend.name) % THIRDS != number % THIRDS:
                item.add_marker(pytest.mark.long)


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    page = config.getoption("contract_table", default=None)
    if page is not None:
        result = table.build_table(terminalreporter.stats)
        terminalreporter.section("contract")
        terminalreporter.write_line(result)
        if page:
            table.replace_table(Path(page), result)


def _backend_param(backend: Backend) -> Any:
    ray = [pytest.mark.ray, pytest.mark.xdist_group("ray")] if backend.name == "ray" else []
    return pytest.param(backend, id=backend.name, marks=[*ray, pytest.mark.timeout(240)])


@pytest.fixture(scope="package", params=map(_backend_param, (*BACKENDS, *CONFIGURATIONS)))
def backend(request: pytest.FixtureRequest) -> Iterator[Backend]:
    """Yield one backend after another, each inside its context."""
    backend: Backend = request.param
    for module in backend.needs:
        pytest.importorskip(module, reason=f"{backend.name} needs {module}, which is not installed")
    with backend.context():
        yield backend


@pytest.fixture(scope="package")
def shared_envs(backend: Backend) -> Iterator[Any]:
    """Yield a vector environment that tests of an expensive backend share, or ``None`` for other backends."""
    envs = backend.make() if backend.expensive else None
    if envs is not None:
        envs.reset()  # starts permanent threads before the first test, which must not leave new ones behind
    yield envs
    if envs is not None:
        envs.close()


@pytest.fixture(autouse=True)
def record_call(request: pytest.FixtureRequest, record_property: Callable[[str, object], None]) -> None:
    """Record the call and the backend of a test. Mark the test as an expected failure if it is a known gap."""
    if "backend" not in request.fixturenames:
        return
    backend: Backend = request.getfixturevalue("backend")
    call = call_name(request.function)
    record_property("backend", backend.name)
    record_property("call", call)
    if call in backend.known_gaps:
        request.applymarker(pytest.mark.xfail(strict=True, reason=backend.known_gaps[call]))


@pytest.fixture
def build(backend: Backend) -> Iterator[Callable[..., Any]]:
    """Yield a function that builds a vector environment, by default with ``backend.make``, and closes it at the end."""
    with contextlib.ExitStack() as stack:

        def make(factory: Callable[[], Any] | None = None) -> Any:
            envs = (factory or backend.make)()
            stack.callback(envs.close, terminate=True)
            return envs

        yield make


@pytest.fixture
def envs(shared_envs: Any, build: Callable[..., Any]) -> Iterator[Any]:
    """Yield a vector environment that is reset, and either new or shared. Tests must leave it without pending requests."""
    usable = shared_envs is not None and not shared_envs.closed and not shared_envs.stats()["in_flight"]
    envs = shared_envs if usable else build()
    envs.reset()
    yield envs
    if envs is shared_envs and not envs.closed:
        with contextlib.suppress(Exception):  # if this fails, the next test builds a new one
            while envs.stats()["in_flight"]:
                envs.recv(timeout=20, count=1)


@pytest.fixture
def unless_refused(record_property: Callable[[str, object], None]) -> Callable[..., Any]:
    """Return a context manager for calls that a backend may refuse: ``with unless_refused(envs, capability):``.

    A call is refused with a ``NotImplementedError`` that names the backend, if ``envs.capabilities`` lacks the capability.
    """

    @contextlib.contextmanager
    def accept_refusal(envs: Any, capability: str) -> Iterator[None]:
        try:
            yield
        except NotImplementedError as error:
            supported = getattr(envs.capabilities, capability, True)
            assert supported is False, f"refused, but envs.capabilities.{capability} is not False: {error}"
            names = type(envs).__name__, f"'{envs.capabilities.backend}'"
            assert any(name in str(error) for name in names), error
            record_property("refused", True)

    return accept_refusal
