"""Runs an unmodified program, and records a checksum of its vector environments' results and the time their methods take.

    python bench/watched.py --report plain.json train.py --seed 1
    python -m vecenv run bench/watched.py --report ours.json train.py --seed 1

It measures the calls of ``gymnasium.vector.AsyncVectorEnv`` and ``SyncVectorEnv``, or of the classes that replace them, and
computes one checksum of all actions, observations, rewards and flags. Two runs with equal checksums had equal networks too,
because the actions depend on every update.

``--stop N`` ends the program with ``SystemExit`` at its N-th step, for programs that take hours. ``--seed N`` is for
programs that have no seed or derive it from the time: it seeds ``random``, NumPy and PyTorch, ignores the program's calls
that seed them, and seeds every vector environment at its first reset unless the program passes a seed. ``--import NAME``
first imports a plugin, such as ``ale_py``, for programs that expect Gymnasium to import its plugins, as old versions did.
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


class Statistics:
    """The statistics of all vector environments of the program together."""

    def __init__(self, stop: int | None, seed: int | None) -> None:
        self.stop, self.seed = stop, seed
        self.engines: list[str] = []
        self.environments = self.calls = self.steps = self.checksum = 0
        self.init_seconds = self.reset_seconds = self.step_seconds = self.close_seconds = 0.0
        self.rewards = 0.0
        self.depth = 0  # 1 during a recorded call: calls within it, such as of a base class's method, are not recorded

    def add_to_checksum(self, *values: Any) -> None:
        """Add arrays, and nested dicts, tuples and lists of arrays, to the checksum."""
        for value in values:
            if isinstance(value, dict):
                self.add_to_checksum(*(value[key] for key in sorted(value)))
            elif isinstance(value, tuple | list) and not all(isinstance(item, int | float | np.generic) for item in value):
                self.add_to_checksum(*value)
            else:
                array = np.ascontiguousarray(value)
                self.checksum = zlib.crc32(repr((array.dtype.str, array.shape)).encode(), self.checksum)
                data = repr(array.tolist()).encode() if array.dtype.hasobject else array.view(np.uint8).data
                self.checksum = zlib.crc32(data, self.checksum)

    def figures(self) -> dict[str, Any]:
        """Return the statistics for the report."""
        return {name: value for name, value in vars(self).items() if name not in ("stop", "seed", "depth")}


def record_calls(statistics: Statistics, cls: Any) -> None:
    """Replace the methods of a class of vector environments with wrappers that record their calls."""

    def wrap(name: str, field: str, on_result: Callable[..., None]) -> None:
        original = getattr(cls, name)

        @functools.wraps(original)
        def method(self: Any, *args: Any, **kwargs: Any) -> Any:
            if statistics.depth:
                return original(self, *args, **kwargs)
            if name == "reset" and statistics.seed is not None and not vars(self).get("_was_reset_before"):
                self._was_reset_before = True
                args, kwargs = (), {"seed": statistics.seed} | kwargs
            statistics.depth += 1
            start = time.perf_counter()
            try:
                result = original(self, *args, **kwargs)
            finally:
                statistics.depth -= 1
                setattr(statistics, field, getattr(statistics, field) + time.perf_counter() - start)
            on_result(self, result, *args)
            return result

        setattr(cls, name, method)

    def on_init(envs: Any, _: None, *args: Any) -> None:
        statistics.engines.append(f"{type(envs).__mro__[1].__module__.partition('.')[0]}: {type(envs).__name__}")
        statistics.environments += envs.num_envs

    def on_reset(envs: Any, result: Any, *args: Any) -> None:
        statistics.add_to_checksum(result[0])

    def on_step(envs: Any, result: Any, actions: Any, *args: Any) -> None:
        is_nested = isinstance(actions, dict | tuple | list)
        statistics.add_to_checksum(actions if is_nested else np.asarray(actions), *result[:4])
        statistics.rewards += float(np.sum(result[1]))
        statistics.calls += 1
        statistics.steps += envs.num_envs
        if statistics.calls == statistics.stop:
            sys.exit(0)

    wrap("__init__", "init_seconds", on_init)
    wrap("reset", "reset_seconds", on_reset)
    wrap("step", "step_seconds", on_step)
    wrap("close", "close_seconds", lambda *args: None)


def seed_everything(seed: int) -> None:
    """Seed the global generators, and make later calls that seed them have no effect."""
    import torch

    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    random.seed = np.random.seed = lambda *args, **kwargs: None
    torch.manual_seed = lambda *args, **kwargs: torch.default_generator


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--report", type=Path, required=True, help="write the figures to this file")
    parser.add_argument("--stop", type=int, metavar="N")
    parser.add_argument("--seed", type=int, metavar="N")
    parser.add_argument("--import", dest="imports", action="append", default=[], metavar="NAME")
    parser.add_argument("--module", action="store_true", help="PROGRAM is the name of a module")
    parser.add_argument("program", nargs=argparse.REMAINDER, metavar="PROGRAM ...")
    arguments = parser.parse_args()
    statistics = Statistics(arguments.stop, arguments.seed)
    for name in arguments.imports:
        gymnasium.register_envs(importlib.import_module(name))
    if arguments.seed is not None:
        seed_everything(arguments.seed)
    for cls in (gymnasium.vector.AsyncVectorEnv, gymnasium.vector.SyncVectorEnv):
        record_calls(statistics, cls)
    report = arguments.report.resolve()
    atexit.register(lambda: report.write_text(json.dumps(statistics.figures()) + "\n"))
    sys.argv = arguments.program
    if arguments.module:
        sys.path[0] = ""
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    else:
        sys.path[0] = str(Path(sys.argv[0]).resolve().parent)
        runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
