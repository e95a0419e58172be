"""The build hook: compiles ``vecenv/worker/_row_writer.c`` if there is a C compiler, and continues without it otherwise.

A wheel with compiled code serves all versions of CPython on its platform, because the code uses the stable ABI. A wheel
without it serves every platform. An editable installation has the compiled file in the source tree.
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
        built = Path(self._folder.name, COMPILED.name)
        problem = compile_extension(root / SOURCE, built)
        if problem:
            self.app.display_warning(f"vecenv is built without its compiled row writer, and works without it: {problem}")
        if version == "editable":
            if problem:
                (root / COMPILED).unlink(missing_ok=True)
            else:
                replace_file(built, root / COMPILED)
        elif not problem:
            build_data["force_include"][str(built)] = COMPILED.as_posix()
            build_data["pure_python"] = False
            platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
            build_data["tag"] = f"cp311-abi3-{platform}"

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        """Remove the temporary folder of the compilation."""
        self._folder.cleanup()


def replace_file(built: Path, target: Path) -> None:
    """Replace a file in one step, because another process may be loading it."""
    temporary = target.with_name(f"{target.name}.{os.getpid()}")
    temporary.write_bytes(built.read_bytes())
    temporary.replace(target)


def compiler() -> list[str]:
    """Return the command of the C compiler."""
    return shlex.split(os.environ.get("CC") or sysconfig.get_config_var("CC") or "cc")


def compile_extension(source: Path, target: Path, *flags: str) -> str:
    """Compile a module of one C file. Return an empty string, or the reason why it is not possible."""
    if sys.implementation.name != "cpython" or sysconfig.get_config_var("Py_GIL_DISABLED") or os.name != "posix":
        return "it is for CPython with its global lock, on Linux and macOS"
    link = ["-bundle", "-undefined", "dynamic_lookup"] if sys.platform == "darwin" else ["-shared"]
    paths = sysconfig.get_paths()
    include = [f"-I{paths[name]}" for name in ("include", "platinclude")]
    command = [*compiler(), "-O2", "-fPIC", *link, *flags, *include, str(source), "-o", str(target)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    return f"{shlex.join(command)} failed:\n{done.stderr}" if done.returncode else ""
