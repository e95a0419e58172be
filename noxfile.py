"""``nox``: the tests on every supported Python, and the checks that need one Python only."""

import nox

nox.options.sessions = ["tests", "lint", "docs"]
nox.options.reuse_existing_virtualenvs = True


@nox.session(python=["3.11", "3.12", "3.13"])
def tests(session: nox.Session) -> None:
    """The whole default run; arguments after ``--`` go to pytest."""
    session.install("-e", ".[test]")
    session.run("pytest", *session.posargs)


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
