"""The packages of ``docs/architecture.md`` import only from lower layers and without cycles.

Imports inside functions and for type checkers count too.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import vecenv

PACKAGE = Path(vecenv.__file__).parent
PAGE = PACKAGE.parent / "docs" / "architecture.md"

LAYERS = (
    ("vecenv", "__main__"), ("tools",), ("adapters", "torch"), ("make", "patching"), ("wrappers",),
    ("aio",), ("evaluating",), ("multi_agent",),
    ("backends",), ("jax.rollouts",), ("jax.bridging", "jax.host"), ("jax",), ("engine",),
    ("freezing",), ("planning",), ("recording",), ("worker",),
    ("link",), ("testing",), ("state",), ("front",), ("shm",), ("system",), ("errors", "trajectories", "lazy", "_version"),
)  # fmt: skip
"""The layers, from the top to the bottom."""

MODULES = {
    ".".join(("vecenv", *file.relative_to(PACKAGE).with_suffix("").parts)).removesuffix(".__init__"): file
    for file in PACKAGE.rglob("*.py")
}


def imported_modules(module: str) -> Iterator[str]:
    """Yield the modules of the package that a module imports, inside functions too."""
    for node in ast.walk(ast.parse(MODULES[module].read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.partition(".")[0] == "vecenv")
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{module}: relative imports are not used"
            if (node.module or "").partition(".")[0] == "vecenv":
                for alias in node.names:
                    inner = f"{node.module}.{alias.name}"
                    yield inner if inner in MODULES else str(node.module)


IMPORTS = {module: {other for other in imported_modules(module) if other != module} for module in MODULES}


def layer_number(module: str) -> int:
    """Return the number of a module's layer, counted from the top. The longest listed prefix decides."""
    path = module.removeprefix("vecenv.")
    matches = [
        (len(package), number)
        for number, packages in enumerate(LAYERS)
        for package in packages
        if path == package or path.startswith(f"{package}.")
    ]
    assert matches, f"{module} is in no layer: add it in tests/test_architecture.py and docs/architecture.md"
    return max(matches)[1]


def test_modules_import_only_from_their_own_layer_and_lower_ones() -> None:
    upward = [
        f"{module} imports {other}"
        for module, others in IMPORTS.items()
        for other in others
        if layer_number(other) < layer_number(module)
    ]
    assert not upward, "\n".join(upward)


def test_backends_do_not_import_each_other() -> None:
    def backend(module: str) -> str:
        return module.split(".")[2] if module.startswith("vecenv.backends.") else ""

    found = [
        f"{module} imports {other}"
        for module, others in IMPORTS.items()
        for other in others
        if backend(module) and backend(other) and backend(other) != backend(module)
    ]
    assert not found, "\n".join(found)


INTERNAL_IMPORTERS = {
    # module -> the reason why it imports other modules of `engine` or `worker` than `engine.vector_env`
    "vecenv.backends.ray.failures": "it reports failures of hosts to observers like those of workers",
    "vecenv.freezing": "a frozen copy is a worker, which the engine thaws",
    "vecenv.recording.replay": "it runs a worker in this process",
    "vecenv.tools.benchmark": "it reports whether the row writer is compiled",
    "vecenv.tools.top": "it reads the statistics that engines publish",
}


def test_other_packages_import_only_the_vector_environment_from_the_engine() -> None:
    """Modules outside of ``engine`` and ``worker`` import only ``engine.vector_env`` from them, except for those listed."""
    inner = ("vecenv.engine.", "vecenv.worker.")
    importers = {
        module
        for module, others in IMPORTS.items()
        for other in others
        if not module.startswith(inner) and other.startswith(inner) and other != "vecenv.engine.vector_env"
    }
    assert importers == set(INTERNAL_IMPORTERS)


FOREIGN_ATTRIBUTES = {"_action_spec", "_envs", "_popen", "_reset", "_send"}
"""Attributes of other libraries' objects that have the same names as attributes of vecenv."""


def test_no_package_reads_private_attributes_of_another_one() -> None:
    def package(module: str) -> str:
        return ".".join(module.split(".")[: 3 if module.startswith("vecenv.backends.") else 2])

    trees = {module: ast.parse(file.read_text()) for module, file in MODULES.items()}
    owners: dict[str, set[str]] = {}
    for module, tree in trees.items():
        for node in ast.walk(tree):
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
                owners.setdefault(node.name, set()).add(package(module))
            elif isinstance(node, (ast.Attribute, ast.Name)) and isinstance(node.ctx, ast.Store):
                owners.setdefault(node.attr if isinstance(node, ast.Attribute) else node.id, set()).add(package(module))
    foreign_reads = [
        f"{module}:{node.lineno} reads {ast.unparse(node)}, of {', '.join(sorted(owners[node.attr]))}"
        for module, tree in trees.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load)
        if node.attr.startswith("_") and not node.attr.startswith("__") and node.attr not in FOREIGN_ATTRIBUTES
        if not (isinstance(node.value, ast.Name) and node.value.id in ("self", "cls"))
        if node.attr in owners and package(module) not in owners[node.attr]
    ]
    assert not foreign_reads, "\n".join(foreign_reads)


def test_there_are_no_import_cycles() -> None:
    visited: set[str] = set()

    def visit(module: str, path: list[str]) -> None:
        assert module not in path, " -> ".join([*path[path.index(module) :], module])
        if module not in visited:
            for other in sorted(IMPORTS.get(module, ())):
                visit(other, [*path, module])
            visited.add(module)

    for module in sorted(MODULES):
        visit(module, [])


def test_architecture_page_names_every_package() -> None:
    names_on_page = set(re.findall(r"`([\w/]+?)/?(?:\.py)?`", PAGE.read_text().partition("## The life of a step")[0]))
    packages = {name.replace(".", "/") for layer in LAYERS for name in layer} - {"vecenv", "__main__", "_version", "jax"}
    assert packages <= names_on_page, packages - names_on_page


def test_files_and_functions_are_within_their_length_limits() -> None:
    too_long = []
    for module, file in MODULES.items():
        source = file.read_text()
        if (lines := len(source.splitlines())) > 800:
            too_long.append(f"{module} has {lines} lines")
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and node.end_lineno is not None:
                length = node.end_lineno - node.lineno + 1 - len((ast.get_docstring(node) or "").splitlines())
                if length > 60 and f"{module}.{node.name}" not in LONG_FUNCTIONS:
                    too_long.append(f"{module}.{node.name} has {length} lines")
    assert not too_long, "\n".join(too_long)


LONG_FUNCTIONS = {
    "vecenv.worker.rows.step",  # the step loop, in which function calls are a measurable cost
}
