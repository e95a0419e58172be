"""README.md and docs/: Python blocks run as written; shell blocks and links refer to existing options, extras and files."""

from __future__ import annotations

import ast
import importlib.util
import os
import re
import shlex
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path
from typing import Any

import pytest

from vecenv.tools import cli

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("**/*.md"))]
BLOCK = re.compile(r"^```(\w*)[^\n]*\n(.*?)^```", re.DOTALL | re.MULTILINE)
SHELL_LANGUAGES = ("sh", "bash", "console")  # their commands are checked, but not run
UNTESTED_LANGUAGES = ("text", "bibtex", "")
COMPILES_JAX = re.compile(r"JaxVectorEnv|\badapt\(|vecenv\.torch\b|backend=\"(brax|playground)\"")  # 20 s or longer
RUN_SECONDS, COMPILE_SECONDS = 250.0, 800.0  # limits for a busy machine; the second for an empty cache of compiled programs
MISSING_LIBRARY = re.compile(
    r"^(?:ModuleNotFoundError: No module named '([\w.]+)'|ImportError: .*(?:vecenv\[|pip install (?=torch))([\w-]+).*)\s*\Z",
    re.MULTILINE,
)
# extra -> a module that is importable if the extra is installed, where the names differ
MODULES_OF_EXTRAS = {
    "jax": "jaxlib", "playground": "mujoco_playground", "multi-agent": "pettingzoo", "sb3": "stable_baselines3",
    "clients": "torchrl",
}  # fmt: skip
# compiled JAX programs are kept from one test run to the next, as in tests/jax/conftest.py
CACHE = {
    "JAX_COMPILATION_CACHE_DIR": str(Path(tempfile.gettempdir()) / "vecenv-test-jax-cache"),
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.2",
}


def block_params(languages: tuple[str, ...], pages: list[Path]) -> list[Any]:
    """Return the fenced blocks in these languages as parameters named by file and line."""
    found = []
    for page in pages:
        text = page.read_text()
        for match in BLOCK.finditer(text):
            if match.group(1) in languages:
                name = f"{page.relative_to(ROOT)}:{text.count(chr(10), 0, match.start()) + 1}"
                marks = []
                if COMPILES_JAX.search(match.group(2)):
                    marks += [pytest.mark.slow, pytest.mark.timeout(COMPILE_SECONDS + 10)]
                if page.name != "README.md":
                    marks.append(pytest.mark.long)
                if re.search(r"\bray\b|Ray", match.group(2)):
                    # in one process, because a block would connect to the cluster of a block that runs at the same time
                    marks += [pytest.mark.ray, pytest.mark.xdist_group("ray")]
                found.append(pytest.param(match.group(2), id=name, marks=marks))
    return found


def is_installed(module: str) -> bool:
    """True if a module can be imported. RLlib is a part of Ray that needs the packages of ``ray[rllib]``."""
    package = "pyarrow" if module.startswith("ray.rllib") else module.partition(".")[0]
    return importlib.util.find_spec(package) is not None


def imported_modules(block: str) -> list[str]:
    """Return the modules that a block imports, inside functions too."""
    nodes = list(ast.walk(ast.parse(block)))
    names = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    return names + [node.module for node in nodes if isinstance(node, ast.ImportFrom) and node.module]


@pytest.mark.parametrize("block", block_params(("python",), PAGES))
def test_block_runs(block: str, tmp_path: Path) -> None:
    """Each block runs in its own process, because JAX and torch start threads. It is skipped if its library is missing."""
    for module in imported_modules(block):
        if not is_installed(module):
            pytest.skip(f"needs {module}")
    script = tmp_path / "block.py"
    script.write_text(block)
    command = [sys.executable, "-W", "error::ResourceWarning", str(script)]
    environment = {**CACHE, **os.environ}
    limit = COMPILE_SECONDS if COMPILES_JAX.search(block) else RUN_SECONDS
    result = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=limit, check=False
    )
    if result.returncode and (missing := MISSING_LIBRARY.search(result.stderr)):
        module = missing.group(1) or MODULES_OF_EXTRAS.get(missing.group(2), missing.group(2))
        if not is_installed(module):
            pytest.skip(f"needs {module}")
    assert result.returncode == 0, result.stderr[-3000:]


def declared_extras() -> set[str]:
    return set(tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"])


@pytest.mark.parametrize("block", block_params(SHELL_LANGUAGES, [*PAGES, ROOT / "bench" / "README.md"]))
def test_shell_block_refers_to_existing_options_extras_and_files(block: str) -> None:
    for line in block.splitlines():
        arguments = shlex.split(line, comments=True)
        while arguments:
            end = arguments.index("&&") if "&&" in arguments else len(arguments)
            command, arguments = arguments[:end], arguments[end + 1 :]
            check_command(command)


def check_command(arguments: list[str]) -> None:
    """Check that options of vecenv, extras and files of a command exist."""
    while "=" in arguments[0]:  # NAME=value before the command
        arguments = arguments[1:]
    if arguments[0] == "$":
        arguments = arguments[1:]
    match arguments:
        case ["pip", "install", *_]:
            for names in re.findall(r"(?:vecenv|\.)\[([\w,-]+)\]", " ".join(arguments)):
                assert set(names.split(",")) <= declared_extras(), f"no extra {names!r} in pyproject.toml"
        case ["vecenv", *rest] | ["python", "-m", "vecenv", *rest]:
            try:
                cli._build_parser().parse_args(rest)
            except SystemExit as error:
                assert error.code == 0, f"not a command of vecenv: {shlex.join(arguments)}"  # --help exits with 0
        case ["python", "-m", "bench", *_] | ["nox", *_] | ["mkdocs", *_] | ["git", "clone", *_] | ["cd", *_]:
            pass
        case ["python" | "pytest", *rest]:
            for path in rest:
                if "/" in path or path.endswith(".py"):
                    assert (ROOT / path).exists(), f"no {path}"
        case _:
            pytest.fail(f"this test cannot check the command: {shlex.join(arguments)}")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_page_has_known_block_languages_and_working_links(page: Path) -> None:
    text = page.read_text()
    assert {language for language, _ in BLOCK.findall(text)} <= {"python", *SHELL_LANGUAGES, *UNTESTED_LANGUAGES}
    assert text.count("```") == 2 * len(BLOCK.findall(text)), "a block is indented or not closed"
    for target in re.findall(r"\]\(([^)\s]+)\)", BLOCK.sub("", text)):
        if not re.match(r"https?://|#", target):
            assert (page.parent / target.partition("#")[0]).exists(), f"nothing at {target}"


def test_log_of_a_crash_in_the_readme_equals_the_output_of_the_example() -> None:
    command = [sys.executable, str(ROOT / "examples" / "survive_a_crash.py")]
    result = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=120, check=True)
    (log,) = [text for language, text in BLOCK.findall((ROOT / "README.md").read_text()) if language == "text"]

    def sorted_lines_without_pids(text: str) -> list[str]:
        return sorted(re.sub(r"pid \d+", "pid", text).strip().splitlines())

    assert sorted_lines_without_pids(result.stdout) == sorted_lines_without_pids(log)


def test_readme_contains_the_commands_for_benchmark_and_tests() -> None:
    lines = (ROOT / "README.md").read_text().splitlines()
    assert 'pip install -e ".[bench]" && vecenv bench CartPole-v1 --num-envs 64' in lines
    assert 'pip install -e ".[test]" && pytest' in lines


# --- the site -------------------------------------------------------------------------------------------------------


def test_navigation_lists_every_page_once() -> None:
    names = re.findall(r"^\s+- (?:[^:\n]+: )?(\S+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)
    assert sorted(names) == sorted(str(page.relative_to(ROOT / "docs")) for page in PAGES[1:])


@pytest.mark.parametrize("page", sorted((ROOT / "docs" / "reference").glob("*.md")), ids=lambda page: page.name)
def test_names_in_the_reference_exist(page: Path) -> None:
    """Names are looked up in the source, so that no optional library is needed."""
    for name in re.findall(r"^::: (\S+)$", page.read_text(), re.MULTILINE):
        assert is_defined(name), f"no {name}"


def is_defined(name: str) -> bool:
    """True if a dotted name is a module, or if its module defines or imports it, even if only for type checkers."""
    parts = name.split(".")
    path = ROOT.joinpath(*parts)
    if path.with_suffix(".py").exists() or (path / "__init__.py").exists():
        return True
    parent = ROOT.joinpath(*parts[:-1])
    source = parent / "__init__.py" if parent.is_dir() else parent.with_suffix(".py")
    for node in ast.walk(ast.parse(source.read_text())):
        if isinstance(node, ast.ClassDef | ast.FunctionDef) and node.name == parts[-1]:
            return True
        if isinstance(node, ast.ImportFrom) and parts[-1] in {alias.asname or alias.name for alias in node.names}:
            return True
    return False


@pytest.mark.slow
def test_site_builds_without_warnings(tmp_path: Path) -> None:
    pytest.importorskip("mkdocs", reason="needs pip install 'vecenv[docs]'")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=110, check=False)
    assert result.returncode == 0, result.stderr[-3000:]
