"""Checks the English of the documentation and the code.

``python .ci/prose.py`` applies the rules of proselint and of this project (:data:`STYLE`) to README, docs, CHANGELOG,
CONTRIBUTING and SECURITY, and only the latter to the docstrings of the package and to all strings of its command line. In
:data:`PLAIN_FOLDERS`, it checks that docstrings do not begin with a noun clause, that few of them remark that a function
may be called again, and that docstrings and comments use the terms of the glossary. With arguments, it checks only these
files. Code and links are not checked. A finding is printed as ``file:line: rule: advice``.
"""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
from pathlib import Path

from proselint.config import DEFAULT
from proselint.registry import CheckRegistry
from proselint.registry.checks import Check, types
from proselint.tools import LintFile

ROOT = Path(__file__).parents[1]
DISABLED_CHECKS = {
    "typography": "quotes are straight, as in the code",
    "annotations": "the documentation explains what a TODO-like word in a program means",
    "spelling": "names in other libraries mix British and American spelling",
}
"""Checks of proselint that do not suit this documentation, with reasons."""

_RATES = (
    r"(?:process(?:es)?|cores?|descriptors?|rows?|seeds?|lines?|one|players?|environments?|steps?|times|bytes|threads?|workers?"
    r"|calls?|microseconds|nothing|memory)"
)
_PER = (
    r"(?:environment|worker|row|core|node|host|step|second|minute|player|agent|episode|round|sample|process|machine|answer"
    r"|lane|year)"
)
STYLE = {
    # rule -> (pattern, advice)
    "rate": (rf"\b{_RATES} an? {_PER}\b", "write 'per': one process per environment"),
    "each": (r"\ba (?:core|process|worker|thread) each\b", "write 'one core per worker'"),
    "persons": (r"\b(?:whoever|somebody|nobody|everybody|anybody)(?:'s)?\b", "name the thing: a process is no person"),
    "quantity": (r"\bso many\b", "write 'that many', or the number"),
    "else": (r"\ball else\b", "write 'everything else', or name it"),
    "along": (r"\btakes? (?:the program |it |them |everything )?along\b", "say what ends: 'ends the program'"),
    "start": (r"(?:\A|\n)(?:CODE)\n\n+(?-i:[a-z])", "a sentence must not begin in a code block"),
}
"""The rules of this project, in the form that proselint expects."""

PLAIN_FOLDERS = ("vecenv", "tests", "bench", "examples")
"""The folders whose docstrings and comments follow the rules below."""
NOUN_CLAUSE = re.compile(r"(What|Which|Whose|How|Whether|Where|As|Once|Likewise)\b")
INTERFACE_REMARK = re.compile(r"\b(?:idempotent|(?:may|can|has to|is to) be (?:called|repeated) (?:again|until))\b", re.I)
MAX_REMARKS = 2
"""If more functions of a module need remarks like these, the interface should be simpler."""
SYNONYMS = re.compile(
    r"\b(whose|said|says|told|tells?|asked|asks?|saw|heard|hears?|whoever|nobody|somebody|everybody|handed over|given out"
    r"|let go of|see to|sees to|seen to|sees off)\b",
    re.IGNORECASE,
)
"""Words that the glossary in docs/architecture.md replaces: a worker replies, a request is submitted."""


def register() -> None:
    """Register the rules of this project with proselint."""
    CheckRegistry().register_many(
        tuple(
            Check(types.Existence((pattern,), types.Padding.RAW), path=f"vecenv.{name}", message=advice)
            for name, (pattern, advice) in STYLE.items()
        )
    )


def prose(text: str) -> str:
    """Replace code by the word CODE and remove links. Line numbers stay the same."""

    def replace_code(found: re.Match[str]) -> str:
        lines = found[0].count("\n")
        return "\n" * (lines - 1) + "CODE\n" if lines else " CODE "

    text = re.sub(r"^```.*?^```\n", replace_code, text, flags=re.MULTILINE | re.DOTALL)
    text = re.sub(r"^::: .*(?:\n    .*)*\n", replace_code, text, flags=re.MULTILINE)
    text = re.sub(r"<!--.*?-->", "", text)
    text = re.sub(r"``[^`\n]+``|`[^`\n]+`", "CODE", text)
    return re.sub(r"\]\([^)\n]*\)|https?://\S+", "]", text)


DOCUMENTED = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def visible_text(path: Path, *, every_text: bool) -> str:
    """Return the docstrings of a module on their original lines. With ``every_text``, include all other strings."""
    tree = ast.parse(path.read_text())
    lines = [""] * (path.read_text().count("\n") + 2)

    def add_string(node: ast.Constant) -> None:
        for number, line in enumerate(str(node.value).split("\n"), node.lineno - 1):
            lines[number] += f" {line}"

    for node in ast.walk(tree):
        if every_text:
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                add_string(node)
        elif isinstance(node, DOCUMENTED) and ast.get_docstring(node) is not None:
            add_string(node.body[0].value)  # type: ignore[attr-defined]
    text = re.sub(r":(?:attr|class|data|exc|func|meth|mod):`[^`]*`", "CODE", "\n".join(lines))
    return prose(text)


def python_files(path: Path) -> list[Path]:
    """Return the Python files in a folder and its subfolders, or the file itself."""
    return sorted(path.rglob("*.py")) if path.is_dir() else [path]


def plain_findings(path: Path) -> list[str]:
    """Return the findings about docstrings and comments in a Python file."""
    source = path.read_text()
    findings, remark_lines = [], []
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, DOCUMENTED):
            continue
        text = ast.get_docstring(node) or ""
        line = getattr(node, "lineno", 1)
        if NOUN_CLAUSE.match(text):
            findings.append(f"{path}:{line}: docstring: begin with a verb (a function) or a noun (a class)")
        if INTERFACE_REMARK.search(text):
            remark_lines.append(line)
    if len(remark_lines) > MAX_REMARKS:
        message = f"interface: {len(remark_lines)} functions remark that they may be called again"
        findings.append(f"{path}:{remark_lines[0]}: {message}")
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        is_docstring = token.type == tokenize.STRING and token.string.lstrip("rf").startswith('"""')
        if token.type == tokenize.COMMENT or is_docstring:
            for found in SYNONYMS.finditer(prose(token.string)):
                line = token.start[0] + token.string[: found.start()].count("\n")
                findings.append(f"{path}:{line}: glossary: replace {found[0]!r} with a term of the glossary")
    return findings


def main(arguments: list[str]) -> int:
    """Print the findings; return 1 if there are any."""
    register()
    pages = [Path(name) for name in arguments] or [
        *(ROOT / name for name in ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md")),
        *sorted((ROOT / "docs").rglob("*.md")),
        *sorted((ROOT / "vecenv").rglob("*.py")),
    ]
    all_rules = {name: on and name not in DISABLED_CHECKS for name, on in DEFAULT["checks"].items()} | {"vecenv": True}
    num_findings = 0
    for page in pages:
        is_code = page.suffix == ".py"
        text = visible_text(page, every_text="tools" in page.parts) if is_code else prose(page.read_text())
        checks = dict.fromkeys(DEFAULT["checks"], False) | {"vecenv": True} if is_code else all_rules
        for result in LintFile(str(page), text).lint({**DEFAULT, "checks": checks}):
            check = result.check_result
            print(f"{page}:{result.pos[0]}: {check.check_path}: {check.message}")
            num_findings += 1
    code_files = pages if arguments else [file for name in PLAIN_FOLDERS for file in python_files(ROOT / name)]
    for file in code_files:
        for finding in plain_findings(file) if file.suffix == ".py" else []:
            print(finding)
            num_findings += 1
    print(f"{num_findings} findings in {len(pages)} files", file=sys.stderr)
    return int(bool(num_findings))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
