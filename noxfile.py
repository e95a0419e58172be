"""``nox``: the tests on every supported Python, and the checks that need one Python only."""

from pathlib import Path

import nox

nox.options.sessions = ["tests", "lint", "docs"]
nox.options.reuse_existing_virtualenvs = True


@nox.session(python=["3.11", "3.12", "3.13"])
def tests(session: nox.Session) -> None:
    """The whole default run; arguments after ``--`` go to pytest."""
    session.install("-e", ".[test]")
    session.run("pytest", *session.posargs)


@nox.session(python="3.11")
def macos(session: nox.Session) -> None:
    """What a Mac has, emulated: faults, contract and engine without what only Linux has, new interpreters for workers."""
    session.install("-e", ".[test]")
    folders = ("tests/faults", "tests/contract", "tests/engine", "tests/system")
    session.run("pytest", *(session.posargs or folders), env=_elsewhere("macos"))


@nox.session(python="3.11")
def windows(session: nox.Session) -> None:
    """What Windows has, emulated: the contract in one process, and what is refused. It knows no forks."""
    session.install("-e", ".[test]")
    chosen = ("tests/contract", "-k", "(in-process or double) and not forked_child")
    session.run("pytest", *(session.posargs or chosen), env=_elsewhere("windows"))
    session.run("pytest", "-m", "long", "tests/system/test_platforms.py")


def _elsewhere(world: str) -> dict[str, str]:
    return {"VECENV_EMULATE": world, "PYTHONPATH": str(Path(__file__).parent / "tests" / "emulation")}


@nox.session(python="3.11")
def lint(session: nox.Session) -> None:
    """Style and types, as ``.ci/run`` checks them."""
    session.install("-e", ".[test,lint]")
    session.run("ruff", "check", ".")
    session.run("mypy")
    session.run("mypy", "tests/typed_programs.py")


@nox.session(python="3.11")
def docs(session: nox.Session) -> None:
    """The documentation site, into site/; any warning is an error."""
    session.install("-e", ".[docs]")
    session.run("mkdocs", "build", "--strict")
