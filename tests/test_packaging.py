"""The wheel and the source distribution: their contents, requirements and metadata."""

from __future__ import annotations

import email
import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from collections.abc import Iterator
from email.message import Message
from pathlib import Path

import pytest
from programs import run_python

import vecenv

ROOT = Path(__file__).resolve().parent.parent
REQUIRED = {"gymnasium", "numpy", "cloudpickle"}
COMPILED = "vecenv/worker/_row_writer.abi3.so"
NO_COMPILER = "/nonexistent/cc"
needs_compiler = pytest.mark.skipif(
    shutil.which(os.environ.get("CC") or "cc") is None or os.name != "posix", reason="needs a C compiler"
)

pytestmark = pytest.mark.skipif(not (ROOT / "pyproject.toml").exists(), reason="not a source tree")


def build_distribution(kind: str, source: Path, folder: Path, **environ: str) -> Path:
    """Build a wheel or a source distribution with hatchling, as ``python -m build`` does in a new environment."""
    pytest.importorskip("hatchling", reason="needs hatchling")
    command = [sys.executable, "-m", "hatchling", "build", "--target", kind, "--directory", str(folder)]
    result = subprocess.run(
        command, cwd=source, env={**os.environ, **environ}, capture_output=True, text=True, timeout=250, check=False
    )
    assert result.returncode == 0, result.stderr
    assert ("without its compiled row writer" in result.stderr) == (kind == "wheel" and "CC" in environ), result.stderr
    (built,) = folder.glob("*.whl" if kind == "wheel" else "*.tar.gz")
    return built


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_distribution("wheel", ROOT, tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_distribution("sdist", ROOT, tmp_path_factory.mktemp("sdist"))


@pytest.fixture(scope="module")
def metadata(wheel: Path) -> Message:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        return email.message_from_bytes(archive.read(name))


def package_files() -> set[str]:
    """Return the package's files in this tree, without the compiled file."""
    files = (ROOT / "vecenv").rglob("*")
    return {str(path.relative_to(ROOT)) for path in files if path.is_file() and "__pycache__" not in path.parts} - {COMPILED}


def wheel_files(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return set(archive.namelist())


@pytest.mark.long
@needs_compiler
def test_wheel_contains_exactly_the_package(wheel: Path) -> None:
    """The tag in its name is that of a wheel for Python 3.11 and all later versions."""
    assert re.search(r"-cp311-abi3-(linux|macosx)_\w+\.whl$", wheel.name)
    files = {name for name in wheel_files(wheel) if ".dist-info/" not in name}
    assert files == package_files() | {COMPILED}
    assert "vecenv/py.typed" in files
    assert any(name.endswith("licenses/LICENSE") for name in wheel_files(wheel))


@pytest.mark.long
def test_wheel_built_without_a_compiler_is_for_every_platform(sdist: Path, tmp_path: Path) -> None:
    """A compiled file that an earlier build has left in the source tree is not included."""
    tree = extract(sdist, tmp_path)
    (tree / COMPILED).write_bytes(b"")
    wheel = build_distribution("wheel", tree, tmp_path / "wheel", CC=NO_COMPILER)
    assert wheel.name.endswith("-py3-none-any.whl")
    assert {name for name in wheel_files(wheel) if ".dist-info/" not in name} == package_files()


@pytest.mark.long
@pytest.mark.parametrize("compiler", [pytest.param(None, marks=needs_compiler), NO_COMPILER, ""])
def test_editable_installation_has_the_compiled_file_if_there_is_a_compiler(
    compiler: str | None, sdist: Path, tmp_path: Path
) -> None:
    """The test calls pip's build hook; with ``""``, no compiler is on the PATH. The file of an earlier build is removed."""
    tree = extract(sdist, tmp_path)
    (tree / COMPILED).write_bytes(b"")
    environ = {**os.environ, "CC": compiler or "cc"}
    if compiler == "":
        environ["PATH"] = str(tmp_path)
    program = f"from hatchling.build import build_editable; build_editable({str(tmp_path)!r})"
    subprocess.run([sys.executable, "-c", program], cwd=tree, env=environ, timeout=250, check=True)
    assert (tree / COMPILED).exists() == (compiler is None)
    (wheel,) = tmp_path.glob("*.whl")
    assert COMPILED not in wheel_files(wheel)
    program = "from vecenv.worker import row_writer; print(row_writer.__file__, row_writer.is_compiled())"
    command = [sys.executable, "-c", program]
    result = subprocess.run(command, cwd=tree, env=environ, capture_output=True, text=True, check=True)
    assert result.stdout.split() == [str(tree / "vecenv" / "worker" / "row_writer.py"), str(compiler is None)]


def extract(sdist: Path, folder: Path) -> Path:
    """Extract a source distribution and return the folder of its sources."""
    with tarfile.open(sdist) as archive:
        archive.extractall(folder / "sdist", **({"filter": "data"} if hasattr(tarfile, "data_filter") else {}))
    (tree,) = (folder / "sdist").iterdir()
    return tree


@pytest.mark.long
def test_wheel_built_from_the_source_distribution_has_the_same_files(wheel: Path, sdist: Path, tmp_path: Path) -> None:
    tree = extract(sdist, tmp_path)
    names = {path.name for path in tree.iterdir()}
    files = {"README.md", "LICENSE", "CHANGELOG.md", "CITATION.cff", "pyproject.toml"}
    assert names >= {"vecenv", "tests", "docs", "bench"} | files
    assert not {path.suffix for path in tree.rglob("*")} & {".pyc", ".json", ".mp4", ".TXT"}, "unexpected files"
    assert wheel_files(build_distribution("wheel", tree, tmp_path / "wheel")) == wheel_files(wheel)


def test_package_requires_only_three_others(metadata: Message) -> None:
    required = [line for line in metadata.get_all("Requires-Dist", []) if "extra ==" not in line]
    assert {re.split(r"[<>=!~ ;\[]", line)[0] for line in required} == REQUIRED


def test_metadata_has_the_version_license_and_python_versions_but_no_urls(metadata: Message) -> None:
    """The version equals that of the package and CITATION.cff. The repository's owner is not known, so there are no URLs."""
    assert metadata["Name"] == "vecenv"
    assert metadata["License-Expression"] == "MIT"
    assert metadata["Version"] == vecenv.__version__
    assert f"version: {vecenv.__version__}\n" in (ROOT / "CITATION.cff").read_text()
    assert metadata["Requires-Python"] == ">=3.11"
    for minor in (11, 12, 13):
        assert f"Programming Language :: Python :: 3.{minor}" in metadata.get_all("Classifier", [])
    assert metadata.get_payload().startswith("# vecenv")
    assert metadata.get_all("Project-URL") is None


def test_extras_refer_to_existing_extras() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for names in re.findall(r"vecenv\[([\w,-]+)\]", str(extras)):
        assert set(names.split(",")) <= set(extras)


def test_changelog_has_the_format_of_keep_a_changelog() -> None:
    """Version 1.1.0 of the format: unreleased changes first, then versions with their dates."""
    text = (ROOT / "CHANGELOG.md").read_text()
    titles = re.findall(r"^## (.*)$", text, re.MULTILINE)
    assert titles[0] == "[Unreleased]"
    assert all(re.fullmatch(r"\[\d+\.\d+\.\d+\] - \d{4}-\d{2}-\d{2}", title) for title in titles[1:])
    sections = set(re.findall(r"^### (.*)$", text, re.MULTILINE))
    assert sections <= {"Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"}


# --- an installation with only the three required packages ------------------------------------------------------------


def distributions_with_requirements(names: set[str]) -> Iterator[importlib.metadata.Distribution]:
    """Yield the installed distributions of these names and of all their requirements."""
    remaining, seen = sorted(names), set()
    while remaining:
        name = re.sub(r"[-_.]+", "-", remaining.pop()).lower()
        if name in seen:
            continue
        seen.add(name)
        distribution = importlib.metadata.distribution(name)
        yield distribution
        remaining += [re.split(r"[<>=!~ ;\[(]", line)[0] for line in distribution.requires or [] if ";" not in line]


@pytest.fixture(scope="module")
def minimal_install(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the files of the wheel and links to its requirements, like a new installation with pip."""
    folder = tmp_path_factory.mktemp("minimal")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
    for distribution in distributions_with_requirements(REQUIRED):
        top_level_names = {file.parts[0] for file in distribution.files or []} - {"..", "__pycache__"}
        for name in top_level_names:
            (folder / name).symlink_to(distribution.locate_file(name))
    return folder


def run_installed(minimal_install: Path, program: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Run a program in isolated mode (-I), with the packages of ``minimal_install`` instead of this environment's (-S)."""
    return run_python("-I", "-S", "-c", f"import sys; sys.path.insert(0, {str(minimal_install)!r})\n{program}", cwd=cwd)


ENGINE_PROGRAM = """
import gymnasium, numpy, vecenv

class Tiny(gymnasium.Env):
    observation_space = gymnasium.spaces.Box(0, 9, (2,), numpy.float32)
    action_space = gymnasium.spaces.Discrete(2)
    def reset(self, *, seed=None, options=None):
        return numpy.zeros(2, numpy.float32), {}
    def step(self, action):
        return numpy.full(2, action, numpy.float32), 1.0, False, False, {"n": 1}

for options in ({}, {"num_workers": 2}, {"num_workers": "auto"}, {"num_workers": 0}):
    envs = vecenv.AsyncVectorEnv([Tiny] * 4, **options)
    envs.reset(seed=1)
    print(envs.step([0, 1, 0, 1])[0][:, 0].tolist())
    envs.close()
assert vecenv.__file__.startswith(sys.path[0]), vecenv.__file__
optional = {"rich", "matplotlib", "psutil", "jax", "torch", "envpool", "pettingzoo", "pytest"}
print(sorted(optional & set(sys.modules)))
"""


@pytest.mark.long
def test_engine_works_with_only_the_required_packages(minimal_install: Path, tmp_path: Path) -> None:
    result = run_installed(minimal_install, ENGINE_PROGRAM, tmp_path)
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines() == ["[0.0, 1.0, 0.0, 1.0]"] * 4 + ["[]"]


@pytest.mark.long
@pytest.mark.parametrize(
    ("arguments", "codes", "text"),
    [
        (["--version"], (0,), f"vecenv {vecenv.__version__}"),
        (["bench"], (2,), "pip install 'vecenv[bench]'"),
    ],
)
def test_command_line_works_or_names_the_extra_of_missing_packages(
    arguments: list[str], codes: tuple[int, ...], text: str, minimal_install: Path, tmp_path: Path
) -> None:
    program = f"from vecenv.tools.cli import main\nsys.exit(main({arguments!r}))"
    result = run_installed(minimal_install, program, tmp_path)
    assert result.returncode in codes, result.stderr
    assert text in result.stdout + result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.sampled(
    "vecenv.make_vec('CartPole-v1', 2, 'envpool')-envpool", "vecenv.backends.JaxVectorEnv('ant', 2)-brax|jax"
)
@pytest.mark.parametrize(
    ("expression", "extra"),
    [
        ("vecenv.make_vec('CartPole-v1', 2, 'envpool')", "envpool"),
        ("vecenv.make_vec('ant', 2, 'brax')", "brax"),
        ("vecenv.make_vec('CartpoleBalance', 2, 'playground')", "playground"),
        ("vecenv.backends.EnvPoolVectorEnv('CartPole-v1', 2)", "envpool"),
        ("vecenv.backends.JaxVectorEnv('ant', 2)", "brax|jax"),
        ("vecenv.jax.adapt('ant')", "brax|jax"),
    ],
)
def test_missing_library_error_names_its_extra(expression: str, extra: str, minimal_install: Path, tmp_path: Path) -> None:
    result = run_installed(minimal_install, f"import vecenv\n{expression}", tmp_path)
    last = result.stderr.strip().splitlines()[-1] if result.stderr else ""
    assert re.search(rf"^ImportError: .*pip install '?vecenv\[({extra})\]", last), result.stderr
