"""The rooms of ``docs/architecture.md``: imports run down only and in no circles, lazy ones and types included."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import vecenv

PACKAGE = Path(vecenv.__file__).parent
PAGE = PACKAGE.parent / "docs" / "architecture.md"

FLOORS = (
    ("vecenv", "__main__"), ("tools",), ("adapters", "torch"), ("make", "patching"), ("wrappers",),
    ("aio",), ("evaluating",), ("multi_agent",),
    ("backends",), ("jax.rollouts",), ("jax.bridging", "jax.host"), ("jax",), ("engine",),
    ("planning",), ("recording",), ("worker",),
    ("link",), ("testing",), ("state",), ("front",), ("shm",), ("system",), ("errors", "trajectories", "lazy", "_version"),
)  # fmt: skip
"""From the roof to the ground."""

MODULES = {
    ".".join(("vecenv", *file.relative_to(PACKAGE).with_suffix("").parts)).removesuffix(".__init__"): file
    for file in PACKAGE.rglob("*.py")
}


def imported(module: str) -> Iterator[str]:
    """Modules of the package that a module names in an import, wherever that stands in it."""
    for node in ast.walk(ast.parse(MODULES[module].read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.partition(".")[0] == "vecenv")
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{module}: relative imports are not used"
            if (node.module or "").partition(".")[0] == "vecenv":
                for alias in node.names:
                    inner = f"{node.module}.{alias.name}"
                    yield inner if inner in MODULES else str(node.module)


IMPORTS = {module: {other for other in imported(module) if other != module} for module in MODULES}


def floor_of(module: str) -> int:
    """How far down a module lives; the longest name that fits."""
    path = module.removeprefix("vecenv.")
    fits = [
        (len(room), floor)
        for floor, rooms in enumerate(FLOORS)
        for room in rooms
        if path == room or path.startswith(f"{room}.")
    ]
    assert fits, f"{module} is in no room: tests/test_architecture.py and docs/architecture.md say which there are"
    return max(fits)[1]


def test_imports_run_down_only() -> None:
    upward = [
        f"{module} imports {other}"
        for module, others in IMPORTS.items()
        for other in others
        if floor_of(other) < floor_of(module)
    ]
    assert not upward, "\n".join(upward)


def test_no_backend_knows_another() -> None:
    def backend(module: str) -> str:
        return module.split(".")[2] if module.startswith("vecenv.backends.") else ""

    sideways = [
        f"{module} imports {other}"
        for module, others in IMPORTS.items()
        for other in others
        if backend(module) and backend(other) and backend(other) != backend(module)
    ]
    assert not sideways, "\n".join(sideways)


def test_there_are_no_circles() -> None:
    done: set[str] = set()

    def visit(module: str, path: list[str]) -> None:
        assert module not in path, " -> ".join([*path[path.index(module) :], module])
        if module not in done:
            for other in sorted(IMPORTS.get(module, ())):
                visit(other, [*path, module])
            done.add(module)

    for module in sorted(MODULES):
        visit(module, [])


def test_the_page_names_every_room() -> None:
    named = set(re.findall(r"`([\w/]+?)/?(?:\.py)?`", PAGE.read_text().partition("## The life of a step")[0]))
    rooms = {room.replace(".", "/") for rooms in FLOORS for room in rooms} - {"vecenv", "__main__", "_version", "jax"}
    assert rooms <= named, rooms - named


def test_files_and_functions_can_be_read_in_one_sitting() -> None:
    long = []
    for module, file in MODULES.items():
        source = file.read_text()
        if (lines := len(source.splitlines())) > 800:
            long.append(f"{module} has {lines} lines")
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and node.end_lineno is not None:
                length = node.end_lineno - node.lineno + 1 - len((ast.get_docstring(node) or "").splitlines())
                if length > 60 and f"{module}.{node.name}" not in LONG_FUNCTIONS:
                    long.append(f"{module}.{node.name} has {length} lines")
    assert not long, "\n".join(long)


LONG_FUNCTIONS = {
    "vecenv.worker.rows.step",  # the step loop, where a call costs what a look-up costs elsewhere
}
