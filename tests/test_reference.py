"""The docstrings of exported functions and classes list all of their parameters and no others."""

from __future__ import annotations

import importlib
import inspect
import re
from typing import Any

import pytest

MODULES = ("vecenv", "vecenv.adapters", "vecenv.aio", "vecenv.backends", "vecenv.multi_agent", "vecenv.wrappers")

BUILT_BY_USERS = {
    "vecenv.AsyncVectorEnv",
    "vecenv.FlightRecorder",
    "vecenv.Restart",
    "vecenv.WorkerOptions",
    "vecenv.aio.Pool",
}
"""Classes that need a section ``Args``, because users build them. vecenv builds the others, or they have no parameters."""


def exported_objects() -> dict[str, Any]:
    found = {}
    for module in map(importlib.import_module, MODULES):
        for name in module.__all__:
            try:
                member = getattr(module, name)
            except ImportError:  # its library is not installed
                continue
            if inspect.isfunction(member) or (isinstance(member, type) and not issubclass(member, Exception)):
                found[f"{module.__name__}.{name}"] = member
    return found


def documented_parameters(text: str) -> set[str]:
    """Return the names in the section ``Args`` of a docstring."""
    section = re.search(r"\n *Args:\n(.*?)(?:\n\n *[A-Z]\w+:\n|\n\n\S|\Z)", inspect.cleandoc(text), re.DOTALL)
    entries = re.findall(r"^ {4}(\*{0,2}\w[*\w, ]*):", section[1], re.MULTILINE) if section else []
    return {name.strip(" *") for entry in entries for name in entry.split(",")}


def needs_args_section(name: str, member: Any) -> bool:
    return name in BUILT_BY_USERS or not isinstance(member, type) or bool(documented_parameters(member.__doc__ or ""))


@pytest.mark.parametrize("name", [name for name, member in exported_objects().items() if needs_args_section(name, member)])
def test_docstring_lists_all_parameters_and_no_others(name: str) -> None:
    member = exported_objects()[name]
    documented = documented_parameters(member.__doc__ or "")
    parameters = {name for name in inspect.signature(member).parameters if not name.startswith("_")}
    assert documented == parameters or (not documented and len(parameters) == 1)
