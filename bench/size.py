"""Measures the sizes of this package and of the code that a step runs: ``python -m bench size``.

Code lines exclude docstrings, comments and blank lines. Only classes, functions, methods and attributes in ``vecenv/`` can
have unusual names (:data:`UNUSUAL_NAMES`); local variables do not count. The path of a step consists of the files in
``vecenv/`` with functions that run in the caller or in a worker during one ``step`` of two workers.
"""

from __future__ import annotations

import ast
import io
import json
import re
import sys
import tokenize
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from types import FrameType
from typing import Any

from bench.workloads import EmptyEnv

__all__ = [
    "LIMITS",
    "MAX_FILE_LINES",
    "MAX_FUNCTION_LINES",
    "UNUSUAL_NAMES",
    "count_code_lines",
    "measure",
    "measure_step",
    "show",
]

ROOT = Path(__file__).parents[1]
MAX_FILE_LINES, MAX_FUNCTION_LINES = 800, 60  # with comments; lines of functions do not include docstrings
LIMITS = {
    "code lines in vecenv/": 20_000,
    "files in vecenv/": 120,
    "code lines in tests/": 24_000,
    "words of prose in docs/*.md": 20_000,
    "Python calls of a step, caller's side": 22,
    "files on the path of a step": 9,
}
"""The upper limits of figures. The limit of all others is 0, except for ``bench/``, which has none."""

UNUSUAL_NAMES = frozenset({
    "Flight", "Part", "Owed", "owed", "Round", "land", "landed", "lose", "found", "verdict", "calm", "after", "AS_IT_IS",
    "Telling", "tell", "told", "Answering", "Reading", "one_call", "guarded", "_told", "_blame", "everybody", "everyone",
    "gather_any", "take_in", "Workplace", "Keeping", "KeptRows", "Book", "Wish", "Key", "Turn", "AheadRows", "Ward",
    "Patrol", "bell", "rope", "Holdings", "Patience", "resting_until", "Together", "Once", "say_it_was_closed", "Trial",
    "scout", "Scouted", "Described", "Probe", "works", "over", "cut", "_wary",
})  # fmt: skip
"""Names that must not return, because there is a common technical term for each."""
_PUBLIC_NAMES = {  # unusual names that belong to the public API, by file
    "aio/pool.py": {"over"}, "backends/envpool/vector_env.py": {"over"}, "planning/independence.py": {"verdict"},
}  # fmt: skip
_FENCED = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
_PERSONS = re.compile(r"\b(?:whoever|nobody|somebody|everybody|anybody)\b", re.IGNORECASE)
_NON_CODE_TOKENS = {
    tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENCODING, tokenize.ENDMARKER,
}  # fmt: skip
_DOCUMENTABLE = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def count_code_lines(source: str) -> int:
    """Return the number of lines with code, without docstrings, comments and blank lines."""
    docstring_lines: set[int] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, _DOCUMENTABLE) and ast.get_docstring(node, clean=False) is not None:
            docstring_lines.update(range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1))
    code_lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in _NON_CODE_TOKENS:
            code_lines.update(range(token.start[0], token.end[0] + 1))
    return len(code_lines - docstring_lines)


def _defined_names(tree: ast.Module) -> Iterator[str]:
    """Yield the names of the classes, functions, methods, fields and attributes that a module defines."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.attr
        elif isinstance(node, ast.Module | ast.ClassDef):
            yield from (inner.name for inner in node.body if isinstance(inner, ast.ClassDef | ast.FunctionDef))
        if isinstance(node, ast.ClassDef):
            fields = (inner.target for inner in node.body if isinstance(inner, ast.AnnAssign))
            yield from (field.id for field in fields if isinstance(field, ast.Name))


def measure(root: Path = ROOT) -> dict[str, int]:
    """Return all figures of the source files by name."""
    sources = {path: path.read_text() for path in sorted((root / "vecenv").rglob("*.py"))}
    trees = {path: ast.parse(text) for path, text in sources.items()}
    nodes = [node for tree in trees.values() for node in ast.walk(tree)]
    functions = [node for node in nodes if isinstance(node, ast.FunctionDef)]
    classes = Counter(node.name for node in nodes if isinstance(node, ast.ClassDef))
    unusual_names = {
        name
        for path, tree in trees.items()
        for name in UNUSUAL_NAMES.intersection(_defined_names(tree))
        - _PUBLIC_NAMES.get(path.relative_to(root / "vecenv").as_posix(), set())
    }
    return {
        "code lines in vecenv/": sum(map(count_code_lines, sources.values())),
        "files in vecenv/": len(sources),
        f"files over {MAX_FILE_LINES} lines": sum(len(text.splitlines()) > MAX_FILE_LINES for text in sources.values()),
        f"functions over {MAX_FUNCTION_LINES} lines": sum(
            (node.end_lineno or 0) - node.lineno - len((ast.get_docstring(node) or "").splitlines()) >= MAX_FUNCTION_LINES
            for node in functions
        ),
        "code lines in tests/": sum(count_code_lines(path.read_text()) for path in (root / "tests").rglob("*.py")),
        "words of prose in docs/*.md": sum(
            len(_FENCED.sub("", path.read_text()).split()) for path in (root / "docs").glob("*.md")
        ),
        "class names defined twice": sum(count > 1 for count in classes.values()),
        "unusual names": len(unusual_names),
        "lines with whoever, nobody, somebody": sum(
            bool(_PERSONS.search(line)) for text in sources.values() for line in text.splitlines()
        ),
        "code lines in bench/": sum(count_code_lines(path.read_text()) for path in (root / "bench").glob("*.py")),
    }


class ProfiledEnv(EmptyEnv):
    """An environment that records the files of all code that its worker runs between the first two steps."""

    def __init__(self) -> None:
        super().__init__()
        self.files: set[str] = set()

    def step(self, action: Any) -> Any:
        sys.setprofile(None)
        if not self.files:
            frame: FrameType | None = sys._getframe()
            # the profiler does not report the calling functions, because they have already been called
            while frame is not None and frame.f_code.co_name != "main":
                self.files.add(frame.f_code.co_filename)
                frame = frame.f_back
            sys.setprofile(lambda frame, event, _: self.files.add(frame.f_code.co_filename) if event == "call" else None)
        return super().step(action)


def measure_step(root: Path = ROOT) -> dict[str, int]:
    """Return the number of Python calls that a ``step`` makes in the caller, and of files on its path."""
    import vecenv

    files: set[str] = set()
    called_files: list[str] = []
    call_counts = []
    with closing(vecenv.AsyncVectorEnv([ProfiledEnv] * 2, num_workers=2)) as envs:
        envs.reset(seed=0)
        actions = envs.action_space.sample()
        for _ in range(20):
            called_files.clear()
            sys.setprofile(
                lambda frame, event, _: called_files.append(frame.f_code.co_filename) if event == "call" else None
            )
            envs.step(actions)
            sys.setprofile(None)
            call_counts.append(len(called_files))
            files.update(called_files)
        files.update(envs.get_attr("files")[0])
    own_files = {file for file in files if Path(file).is_relative_to(root / "vecenv")}
    return {"Python calls of a step, caller's side": min(call_counts), "files on the path of a step": len(own_files)}


def show(*, as_json: bool = False) -> None:
    """Print all figures, as a table or as JSON."""
    figures = {**measure(), **measure_step()}
    if as_json:
        print(json.dumps(figures, indent=1))
        return
    for name, count in figures.items():
        limit = LIMITS.get(name, "" if name == "code lines in bench/" else 0)
        print(f"{name:38} {count:8,}" + (f"   at most {limit:,}" if isinstance(limit, int) else ""))
