"""Statistics of an unedited program: what its vector environments returned, and how long it waited for them.

    python bench/watched.py --report plain.json train.py --seed 1
    python -m vecenv run bench/watched.py --report ours.json train.py --seed 1

Around ``AsyncVectorEnv`` and ``SyncVectorEnv`` of ``gymnasium.vector``, whichever classes have these names, calls are timed,
and what goes in (actions) and comes out (observations, rewards, flags) is summed up in one checksum. Two runs with equal
checksums were one run, number for number: after the first update of the networks, actions are what the losses made of them.
The program itself is not edited.

``--stop N`` ends it by ``SystemExit`` at its N-th step, for programs that take hours. ``--seed N`` is for programs without a
seed of their own, or seeded with the time of day: it seeds ``random``, NumPy and PyTorch, ignores the program's own seeds,
and seeds every vector environment at its first reset. ``--import NAME`` comes first, for programs from the days when
Gymnasium imported plugins by itself (``ale_py``).
"""

from __future__ import annotations

import argparse
import atexit
import functools
import importlib
import json
import random
import runpy
import sys
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np


class Watch:
    """Statistics of all vector environments of the program together."""

    def __init__(self, stop: int | None, seed: int | None) -> None:
        self.stop, self.seed = stop, seed
        self.engines: list[str] = []
        self.environments = self.calls = self.steps = self.checksum = 0
        self.making = self.resetting = self.stepping = self.closing = 0.0
        self.rewards = 0.0
        self.depth = 0  # a method that calls its base class's is one call

    def take(self, *values: Any) -> None:
        """Add arrays, and values that consist of arrays, to the checksum."""
        for value in values:
            if isinstance(value, dict):
                self.take(*(value[key] for key in sorted(value)))
            elif isinstance(value, tuple | list) and not all(isinstance(item, int | float | np.generic) for item in value):
                self.take(*value)
            else:
                array = np.ascontiguousarray(value)
                self.checksum = zlib.crc32(repr((array.dtype.str, array.shape)).encode(), self.checksum)
                data = repr(array.tolist()).encode() if array.dtype.hasobject else array.view(np.uint8).data
                self.checksum = zlib.crc32(data, self.checksum)

    def figures(self) -> dict[str, Any]:
        """Return the statistics for the report; times in seconds."""
        return {name: value for name, value in vars(self).items() if name not in ("stop", "seed", "depth")}


def around(watch: Watch, cls: Any) -> None:
    """Watch a class of vector environments."""

    def outermost(name: str, field: str, seen: Callable[..., None]) -> None:
        theirs = getattr(cls, name)

        @functools.wraps(theirs)
        def method(self: Any, *args: Any, **kwargs: Any) -> Any:
            if watch.depth:
                return theirs(self, *args, **kwargs)
            if name == "reset" and watch.seed is not None and not vars(self).get("_was_reset_before"):
                self._was_reset_before = True
                args, kwargs = (), {"seed": watch.seed} | kwargs
            watch.depth += 1
            begin = time.perf_counter()
            try:
                result = theirs(self, *args, **kwargs)
            finally:
                watch.depth -= 1
                setattr(watch, field, getattr(watch, field) + time.perf_counter() - begin)
            seen(self, result, *args)
            return result

        setattr(cls, name, method)

    def made(envs: Any, _: None, *args: Any) -> None:
        watch.engines.append(f"{type(envs).__mro__[1].__module__.partition('.')[0]}: {type(envs).__name__}")
        watch.environments += envs.num_envs

    def was_reset(envs: Any, result: Any, *args: Any) -> None:
        watch.take(result[0])

    def stepped(envs: Any, result: Any, actions: Any, *args: Any) -> None:
        watch.take(np.asarray(actions) if not isinstance(actions, dict | tuple | list) else actions, *result[:4])
        watch.rewards += float(np.sum(result[1]))
        watch.calls += 1
        watch.steps += envs.num_envs
        if watch.calls == watch.stop:
            sys.exit(0)

    outermost("__init__", "making", made)
    outermost("reset", "resetting", was_reset)
    outermost("step", "stepping", stepped)
    outermost("close", "closing", lambda *args: None)


def seed_everything(seed: int) -> None:
    """Seed the global generators, and keep later calls from seeding them again."""
    import torch

    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    random.seed = np.random.seed = lambda *args, **kwargs: None
    torch.manual_seed = lambda *args, **kwargs: torch.default_generator


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--report", type=Path, required=True, help="where the figures go")
    parser.add_argument("--stop", type=int, metavar="N")
    parser.add_argument("--seed", type=int, metavar="N")
    parser.add_argument("--import", dest="imports", action="append", default=[], metavar="NAME")
    parser.add_argument("--module", action="store_true", help="PROGRAM is a module")
    parser.add_argument("program", nargs=argparse.REMAINDER, metavar="PROGRAM ...")
    arguments = parser.parse_args()
    watch = Watch(arguments.stop, arguments.seed)
    for name in arguments.imports:
        gymnasium.register_envs(importlib.import_module(name))
    if arguments.seed is not None:
        seed_everything(arguments.seed)
    for cls in (gymnasium.vector.AsyncVectorEnv, gymnasium.vector.SyncVectorEnv):
        around(watch, cls)
    report = arguments.report.resolve()
    atexit.register(lambda: report.write_text(json.dumps(watch.figures()) + "\n"))
    sys.argv = arguments.program
    if arguments.module:
        sys.path[0] = ""
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    else:
        sys.path[0] = str(Path(sys.argv[0]).resolve().parent)
        runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
