"""The build hook, which compiles ``vecenv/worker/_row_writer.c`` if there is a C compiler, and otherwise continues without.

A wheel with compiled code works with all versions of CPython on its platform, because the code uses the stable ABI. A wheel
without compiled code works on every platform. In an editable installation, the compiled file is in the source tree.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

SOURCE = Path("vecenv", "worker", "_row_writer.c")
COMPILED = SOURCE.with_suffix(".abi3.so")


class CompileRowWriter(BuildHookInterface):  # type: ignore[type-arg]
    """A build hook that adds the compiled row writer to a wheel, or to the source tree of an editable installation."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile the row writer before the files are packed."""
        root = Path(self.root)
        self._folder = tempfile.TemporaryDirectory()
        compiled = Path(self._folder.name, COMPILED.name)
        problem = compile_extension(root / SOURCE, compiled)
        if problem:
            self.app.display_warning(f"vecenv is built without its compiled row writer, and works without it: {problem}")
        if version == "editable":
            if problem:
                (root / COMPILED).unlink(missing_ok=True)
            else:
                replace_file(compiled, root / COMPILED)
        elif not problem:
            build_data["force_include"][str(compiled)] = COMPILED.as_posix()
            build_data["pure_python"] = False
            platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
            build_data["tag"] = f"cp311-abi3-{platform}"

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        """Remove the temporary folder of the compilation."""
        self._folder.cleanup()


def replace_file(source: Path, target: Path) -> None:
    """Replace ``target`` with a copy of ``source`` in one step, because another process may be loading it."""
    temporary = target.with_name(f"{target.name}.{os.getpid()}")
    temporary.write_bytes(source.read_bytes())
    temporary.replace(target)


def compiler_command() -> list[str]:
    """Return the command of the C compiler."""
    return shlex.split(os.environ.get("CC") or sysconfig.get_config_var("CC") or "cc")


def compile_extension(source: Path, target: Path, *flags: str) -> str:
    """Compile an extension module from one C file. Return an empty string, or the reason why that is impossible."""
    if sys.implementation.name != "cpython" or sysconfig.get_config_var("Py_GIL_DISABLED") or os.name != "posix":
        return "the compiled code needs CPython with the GIL, on Linux or macOS"
    link = ["-bundle", "-undefined", "dynamic_lookup"] if sys.platform == "darwin" else ["-shared"]
    paths = sysconfig.get_paths()
    include = [f"-I{paths[name]}" for name in ("include", "platinclude")]
    command = [*compiler_command(), "-O2", "-fPIC", *link, *flags, *include, str(source), "-o", str(target)]
    try:
        completed = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    return f"{shlex.join(command)} failed:\n{completed.stderr}" if completed.returncode else ""
