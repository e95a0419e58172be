"""Public names that load their module on first use (PEP 562)."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any


def lazy(
    package: str,
    names_by_module: Mapping[str, Sequence[str]],
    modules: Sequence[str] = (),
    needs: Mapping[str, str] | None = None,
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return the functions ``__getattr__`` and ``__dir__`` of a package.

    Args:
        package: The name of the package, which defines ``__all__``.
        names_by_module: Module in the package -> public names that it contains. No public name may equal the name of a
            module of the package, because importing the module would hide it.
        modules: Modules of the package that are public names too.
        needs: Library -> error text if it is not installed; ``{name}`` in it stands for the public name.
    """
    names = vars(sys.modules[package])
    module_of = {name: module for module, public_names in names_by_module.items() for name in public_names}

    def load(name: str) -> Any:
        if name in modules:
            return importlib.import_module(f"{package}.{name}")
        if name not in module_of:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        try:
            module = importlib.import_module(f"{package}.{module_of[name]}")
        except ModuleNotFoundError as error:
            if (text := (needs or {}).get(error.name or "")) is None:
                raise
            raise ImportError(text.format(name=name)) from error
        names[name] = getattr(module, name)
        return names[name]

    def list_names() -> list[str]:
        return sorted({*names["__all__"], *module_of, *modules, *(name for name in names if name.startswith("__"))})

    return load, list_names
