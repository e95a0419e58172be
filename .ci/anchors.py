"""Lists public members of exported classes that have no anchor in the built site: ``python .ci/anchors.py SITE``.

Members are methods and properties; the classes are those of :data:`MODULES`, except exceptions.
"""

from __future__ import annotations

import importlib
import inspect
import re
import sys
from pathlib import Path

MODULES = ("vecenv", "vecenv.aio", "vecenv.backends", "vecenv.multi_agent", "vecenv.wrappers")


def public_members(cls: type) -> set[str]:
    """Return the names of the public methods and properties that vecenv defines for a class, without aliases."""
    names = set()
    for base in cls.__mro__:
        if base.__module__.partition(".")[0] != "vecenv":
            continue
        for name, member in vars(base).items():
            function = member.fget if isinstance(member, property) else getattr(member, "__func__", member)
            # the qualified name of an alias, or of a method that forwards to another object, is different
            is_own = inspect.isfunction(function) and function.__qualname__ == f"{base.__name__}.{name}"
            if is_own and not name.startswith("_"):
                names.add(name)
    return names


def main() -> int:
    """Print ``class.member`` for each missing anchor; return 1 if there are any."""
    pages = "".join(page.read_text() for page in Path(sys.argv[1], "reference").rglob("*.html"))
    anchors = set(re.findall(r'id="(?:[\w.]+\.)?(\w+\.\w+)"', pages))
    missing = set()
    for module in map(importlib.import_module, MODULES):
        for name in module.__all__:
            exported = getattr(module, name)
            if isinstance(exported, type) and not issubclass(exported, Exception):
                missing |= {f"{exported.__name__}.{member}" for member in public_members(exported)} - anchors
    print(*sorted(missing), sep="\n")
    print(f"{len(missing)} public methods and properties without an anchor")
    return bool(missing)


if __name__ == "__main__":
    sys.exit(main())
