"""The docstrings of exported classes and functions list their parameters, and no others."""

from __future__ import annotations

import importlib
import inspect
import re
from typing import Any

import pytest

MODULES = ("vecenv", "vecenv.adapters", "vecenv.aio", "vecenv.backends", "vecenv.multi_agent", "vecenv.wrappers")


CALLED = {"vecenv.AsyncVectorEnv", "vecenv.FlightRecorder", "vecenv.Restart", "vecenv.WorkerOptions", "vecenv.aio.Pool"}
"""Classes that users instantiate. Other classes without a section ``Args`` are built by vecenv, or have no parameters."""


def exported() -> dict[str, Any]:
    found = {}
    for module in map(importlib.import_module, MODULES):
        for name in module.__all__:
            try:
                kind = getattr(module, name)
            except ImportError:  # its library is not installed
                continue
            if inspect.isfunction(kind) or (isinstance(kind, type) and not issubclass(kind, Exception)):
                found[f"{module.__name__}.{name}"] = kind
    return found


def listed(text: str) -> set[str]:
    """Return the names in the section ``Args`` of a docstring."""
    section = re.search(r"\n *Args:\n(.*?)(?:\n\n *[A-Z]\w+:\n|\n\n\S|\Z)", inspect.cleandoc(text), re.DOTALL)
    entries = re.findall(r"^ {4}(\*{0,2}\w[*\w, ]*):", section[1], re.MULTILINE) if section else []
    return {name.strip(" *") for entry in entries for name in entry.split(",")}


def is_called(name: str, kind: Any) -> bool:
    return name in CALLED or not isinstance(kind, type) or bool(listed(kind.__doc__ or ""))


@pytest.mark.parametrize("name", [name for name, kind in exported().items() if is_called(name, kind)])
def test_every_parameter_is_documented(name: str) -> None:
    kind = exported()[name]
    documented = listed(kind.__doc__ or "")
    parameters = {each for each in inspect.signature(kind).parameters if not each.startswith("_")}
    assert documented == parameters or (not documented and len(parameters) == 1)
