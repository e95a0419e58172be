"""What is built and shipped: the wheel, the source distribution, what they need, and what they say about themselves."""

from __future__ import annotations

import email
import importlib.metadata
import re
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from collections.abc import Iterator
from email.message import Message
from pathlib import Path

import pytest

import vecenv

ROOT = Path(__file__).resolve().parent.parent
REQUIRED = {"gymnasium", "numpy", "cloudpickle"}

pytestmark = pytest.mark.skipif(not (ROOT / "pyproject.toml").exists(), reason="not a source tree")


def build(kind: str, source: Path, folder: Path) -> Path:
    """Build by the backend alone: ``python -m build`` calls the same, in an environment that it first installs."""
    pytest.importorskip("hatchling", reason="needs hatchling")
    command = [sys.executable, "-m", "hatchling", "build", "--target", kind, "--directory", str(folder)]
    done = subprocess.run(command, cwd=source, capture_output=True, text=True, timeout=250, check=False)
    assert done.returncode == 0, done.stderr
    (built,) = folder.glob("*.whl" if kind == "wheel" else "*.tar.gz")
    return built


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build("wheel", ROOT, tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build("sdist", ROOT, tmp_path_factory.mktemp("sdist"))


@pytest.fixture(scope="module")
def metadata(wheel: Path) -> Message:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        return email.message_from_bytes(archive.read(name))


def sources() -> set[str]:
    """The package's files in this tree."""
    files = (ROOT / "vecenv").rglob("*")
    return {str(path.relative_to(ROOT)) for path in files if path.is_file() and "__pycache__" not in path.parts}


def in_wheel(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return set(archive.namelist())


@pytest.mark.long
def test_the_wheel_holds_the_package_and_nothing_else(wheel: Path) -> None:
    assert wheel.name.endswith("-py3-none-any.whl")
    files = {name for name in in_wheel(wheel) if ".dist-info/" not in name}
    assert files == sources()
    assert "vecenv/py.typed" in files
    assert any(name.endswith("licenses/LICENSE") for name in in_wheel(wheel))


@pytest.mark.long
def test_a_wheel_of_the_source_distribution_is_the_same(wheel: Path, sdist: Path, tmp_path: Path) -> None:
    with tarfile.open(sdist) as archive:
        archive.extractall(tmp_path, filter="data")
    (tree,) = tmp_path.iterdir()
    names = {path.name for path in tree.iterdir()}
    files = {"README.md", "LICENSE", "CHANGELOG.md", "CITATION.cff", "pyproject.toml"}
    assert names >= {"vecenv", "tests", "docs", "bench"} | files
    assert not {path.suffix for path in tree.rglob("*")} & {".pyc", ".json", ".mp4", ".TXT"}, "something stray got in"
    assert in_wheel(build("wheel", tree, tmp_path / "wheel")) == in_wheel(wheel)


def test_only_three_packages_are_needed(metadata: Message) -> None:
    needed = [line for line in metadata.get_all("Requires-Dist", []) if "extra ==" not in line]
    assert {re.split(r"[<>=!~ ;\[]", line)[0] for line in needed} == REQUIRED


def test_the_metadata_is_true(metadata: Message) -> None:
    """No address is given that nobody owns; the version is the same wherever it is written."""
    assert metadata["Name"] == "vecenv"
    assert metadata["License-Expression"] == "MIT"
    assert metadata["Version"] == vecenv.__version__
    assert f"version: {vecenv.__version__}\n" in (ROOT / "CITATION.cff").read_text()
    assert metadata["Requires-Python"] == ">=3.11"
    for minor in (11, 12, 13):
        assert f"Programming Language :: Python :: 3.{minor}" in metadata.get_all("Classifier", [])
    assert metadata.get_payload().startswith("# vecenv")
    assert metadata.get_all("Project-URL") is None


def test_extras_are_made_of_extras_that_exist() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for wanted in re.findall(r"vecenv\[([\w,-]+)\]", str(extras)):
        assert set(wanted.split(",")) <= set(extras)


def test_the_changelog_keeps_its_form() -> None:
    """Keep a Changelog 1.1.0: what is unreleased first, then versions with their dates, the latest first."""
    text = (ROOT / "CHANGELOG.md").read_text()
    titles = re.findall(r"^## (.*)$", text, re.MULTILINE)
    assert titles[0] == "[Unreleased]"
    assert all(re.fullmatch(r"\[\d+\.\d+\.\d+\] - \d{4}-\d{2}-\d{2}", title) for title in titles[1:])
    parts = set(re.findall(r"^### (.*)$", text, re.MULTILINE))
    assert parts <= {"Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"}


# --- installed with the three packages and nothing else ---------------------------------------------------------------


def closure(names: set[str]) -> Iterator[importlib.metadata.Distribution]:
    """The distributions of these names and of everything they need, as installed here."""
    waiting, seen = sorted(names), set()
    while waiting:
        name = re.sub(r"[-_.]+", "-", waiting.pop()).lower()
        if name in seen:
            continue
        seen.add(name)
        distribution = importlib.metadata.distribution(name)
        yield distribution
        waiting += [re.split(r"[<>=!~ ;\[(]", line)[0] for line in distribution.requires or [] if ";" not in line]


@pytest.fixture(scope="module")
def bare(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the wheel's files, and links to what it requires: what a fresh ``pip install`` would make."""
    folder = tmp_path_factory.mktemp("bare")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
    for distribution in closure(REQUIRED):
        for top in {file.parts[0] for file in distribution.files or [] if file.parts[0] not in ("..", "__pycache__")}:
            (folder / top).symlink_to(distribution.locate_file(top))
    return folder


def run(bare: Path, program: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Isolated (-I) and without this environment's packages (-S)."""
    command = [sys.executable, "-I", "-S", "-c", f"import sys; sys.path.insert(0, {str(bare)!r})\n{program}"]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=250, check=False)


ENGINE = """
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
def test_the_engine_works_with_three_packages(bare: Path, tmp_path: Path) -> None:
    done = run(bare, ENGINE, tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["[0.0, 1.0, 0.0, 1.0]"] * 4 + ["[]"]


@pytest.mark.long
@pytest.mark.parametrize(
    ("arguments", "codes", "text"),
    [
        (["doctor"], (0, 1), "cores"),
        (["doctor", "--json"], (0, 1), "{"),
        (["--version"], (0,), f"vecenv {vecenv.__version__}"),
        (["bench"], (2,), "pip install 'vecenv[bench]'"),
    ],
)
def test_the_command_line_says_what_it_lacks(
    arguments: list[str], codes: tuple[int, ...], text: str, bare: Path, tmp_path: Path
) -> None:
    done = run(bare, f"from vecenv.tools.cli import main\nsys.exit(main({arguments!r}))", tmp_path)
    assert done.returncode in codes, done.stderr
    assert text in done.stdout + done.stderr
    assert "Traceback" not in done.stderr


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
def test_what_is_missing_is_named_with_its_extra(expression: str, extra: str, bare: Path, tmp_path: Path) -> None:
    done = run(bare, f"import vecenv\n{expression}", tmp_path)
    last = done.stderr.strip().splitlines()[-1] if done.stderr else ""
    assert re.search(rf"^ImportError: .*pip install '?vecenv\[({extra})\]", last), done.stderr
