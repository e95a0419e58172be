"""Sessions of ``nox``: the tests with every supported version of Python, and checks that need only one version."""

import nox

nox.options.sessions = ["tests", "lint", "docs"]
nox.options.reuse_existing_virtualenvs = True

TORCH = "torch==2.13.0"  # pinned, so that an extra index can provide its CPU build
TEST_LIBRARIES = (
    "mpe2>=1",
    "pymunk>=6.2",
    "array-api-compat>=1.7",
    "hatchling>=1.27",
    "editables>=0.5",
)  # from the extra `test`
RLLIB_TESTS = ("tests/clients/test_client_rllib.py",)
GYMNAX_TESTS = ("tests/jax/test_jax_vector_env.py", "tests/jax/test_jax_adapt.py", "-k", "gymnax", "-m", "slow or not slow")
TEST_TOOLS = (
    "pytest>=8,<9.2", "pytest-timeout>=2.3", "pytest-repeat>=0.9", "pytest-xdist>=3.7", "hypothesis>=6.100", "psutil>=5.9",
)  # fmt: skip


@nox.session(python=["3.11", "3.12", "3.13", "3.14"])
def tests(session: nox.Session) -> None:
    """Run the default tests. Arguments after ``--`` go to pytest."""
    session.install("-e", ".[test]")
    session.run("pytest", *session.posargs)


@nox.session(python="3.12")
def newest(session: nox.Session) -> None:
    """Run the default tests with the newest version of every dependency. ``.ci/run`` includes a part of this session."""
    session.install("--upgrade", "--upgrade-strategy", "eager", "-e", ".[test]")
    session.run("pytest", *session.posargs)


@nox.session(python="3.11")
@nox.parametrize("version", ["1.1.1", "1.2.2", "1.3.0"])
def gymnasium(session: nox.Session, version: str) -> None:
    """Run the default tests with older versions of Gymnasium. The session ``tests`` uses the newest one."""
    session.install("-e", ".[test]", f"gymnasium=={version}")
    session.run("pytest", *session.posargs)


@nox.session(python="3.11")
def lowest(session: nox.Session) -> None:
    """Run the default tests with the lowest version of each core dependency that pyproject.toml allows.

    The session installs only extras that support a NumPy that old. JAX does not, so its tests are skipped.
    """
    dependencies = nox.project.load_toml("pyproject.toml")["project"]["dependencies"]
    lowest_versions = [dependency.partition(",")[0].replace(">=", "==") for dependency in dependencies]
    session.install(*lowest_versions, *TEST_TOOLS, "-e", ".[bench,envpool,multi-agent]", *TEST_LIBRARIES)
    session.run("pytest", *session.posargs)


@nox.session(python="3.11")
def rllib(session: nox.Session) -> None:
    """Run the RLlib tests with RLlib installed as a user installs it, and the version of Gymnasium that Ray pins."""
    session.install("-e", ".[rllib]", TORCH, *TEST_TOOLS)
    session.run("pytest", "-n", "0", *(session.posargs or RLLIB_TESTS))


@nox.session(python="3.11")
def gymnax(session: nox.Session) -> None:
    """Run the tests of gymnax's environments with the newest Gymnasium that gymnax supports."""
    session.install("-e", ".[gymnax]", *TEST_TOOLS)
    session.run("pytest", "-n", "0", *(session.posargs or GYMNAX_TESTS))


@nox.session(python="3.11")
def lint(session: nox.Session) -> None:
    """Check style, prose and types as ``.ci/run`` does."""
    session.install("-e", ".[test,lint]")
    session.run("ruff", "check", ".")
    session.run("ruff", "format", "--check", ".")
    session.run("python", ".ci/prose.py")
    session.run("mypy")
    session.run("mypy", "tests/typed_programs.py")


@nox.session(python="3.11")
def docs(session: nox.Session) -> None:
    """Build the documentation in ``site/``. Any warning is an error."""
    session.install("-e", ".[docs]")
    session.run("mkdocs", "build", "--strict")
