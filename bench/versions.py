"""Measures how a change affects the speed of the engine, with two versions in the same process.

    python bench/versions.py HEAD~1                  # this checkout against another revision
    python bench/versions.py /path/to/a/checkout --env CartPole-v1 --num-envs 1 8 64 --num-workers 0 2 --call step recv
    python bench/versions.py HEAD --here generators=own   # the cost of an option
    python bench/versions.py HEAD --env ale_py:ALE/Pong-v5 --here copy=False

Separate processes cannot show differences of one or two percent, because the addresses of their memory have an effect of
the same size. So the program imports both versions into one process, each with its own environments. They run alternately
for a few milliseconds, in random order, and each pair of samples gives a ratio. The result of a process is the geometric
mean of two medians: over the pairs that began with one version, and over those that began with the other. The program prints
the median, minimum and maximum over several processes, half of which import the other version first.

``--call recv`` measures rounds of ``recv()`` and ``send()`` with half the environments in a batch, ``--call recv_all`` with
all of them. ``--num-workers each`` is one process per environment. While a version runs, and when it forks its workers,
``sys.modules`` contains only its own modules. Before the first sample, each worker lists the files of its code, so that none
runs code of the other version. During a sample the workers of the other version sleep: nothing is in flight there, and each
sample begins with a pause that is longer than idle workers poll.

Without worker processes, a version compared with a copy of itself gives 1.00 within 0.005, even while other programs use all
cores. With worker processes the machine must be idle: with some load, results of six processes were between 0.984 and 1.006,
and those of one process between 0.97 and 1.05.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import functools
import importlib
import itertools
import json
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import gymnasium
import numpy as np
from gymnasium.vector.utils import batch_space

SAMPLE_SECONDS = 0.003  # shorter than changes of the machine's speed, and much longer than reading the clock
PAUSE_SECONDS = 0.0005  # three times as long as idle workers poll
ROOT = Path(__file__).resolve().parents[1]


def main() -> None:
    """Measure each case in several processes, and print one line per case."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("other", help="a folder with another vecenv/, or a revision of this repository")
    parser.add_argument("--env", default="CartPole-v1")
    parser.add_argument("--num-envs", type=int, nargs="+", default=[1, 2, 8])
    parser.add_argument("--num-workers", type=_number_or_each, nargs="+", default=[0])
    parser.add_argument("--call", choices=["step", "recv", "recv_all"], nargs="+", default=["step"])
    parser.add_argument("--pairs", type=int, default=600, help="pairs of samples in each process")
    parser.add_argument("--processes", type=int, default=6)
    parser.add_argument(
        "--here", nargs="*", default=[], metavar="NAME=VALUE", help="options of the engine, only for this checkout"
    )
    parser.add_argument("--seed", type=int, help=argparse.SUPPRESS)  # for the processes that measure
    options = parser.parse_args()
    if options.seed is not None:
        print(json.dumps(measure(ROOT, Path(options.other).resolve(), options)))
        return
    # imported here, because the processes that measure must import only the two versions
    from vecenv.tools import progress_bar

    with tempfile.TemporaryDirectory() as folder, progress_bar() as progress:
        other = options.other if (Path(options.other) / "vecenv").is_dir() else _extract_revision(options.other, folder)
        for workers, call, count in itertools.product(options.num_workers, options.call, options.num_envs):
            case = f"{options.env} x {count}, {workers} workers, {call}"
            case_options = ["--num-envs", str(count), "--num-workers", str(workers), "--call", call]
            arguments = ["--env", options.env, *case_options, "--pairs", str(options.pairs), "--here", *options.here]
            samples = []
            for seed in range(options.processes):
                progress(case, seed, options.processes)
                command = [sys.executable, __file__, other, *arguments, "--seed", str(seed)]
                samples.append(json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout))
            ratios = [ratio for ratio, _ in samples]
            batch = statistics.median(batch for _, batch in samples)
            print(
                f"{case}: a batch takes {batch:.2f} us in {options.other}, "
                f"and here {statistics.median(ratios):.4f} of that ({min(ratios):.4f} - {max(ratios):.4f})",
                flush=True,
            )


def _number_or_each(text: str) -> int | str:
    return text if text == "each" else int(text)


def _parse_option(text: str) -> tuple[str, Any]:
    """Parse ``NAME=VALUE``. The value is a Python literal, or else a string."""
    name, _, value = text.partition("=")
    try:
        return name, ast.literal_eval(value)
    except (ValueError, SyntaxError):
        return name, value


def _extract_revision(revision: str, folder: str) -> str:
    """Extract the package at a revision into a folder, with this checkout's compiled row writer; return the folder."""
    archive = subprocess.run(["git", "-C", str(ROOT), "archive", revision, "vecenv"], check=False, stdout=subprocess.PIPE)
    if archive.returncode:
        raise SystemExit(f"{revision!r} is neither a folder with vecenv/ nor a revision of this repository")
    subprocess.run(["tar", "x", "-C", folder], input=archive.stdout, check=True)
    source, target = ROOT / "vecenv/worker", Path(folder, "vecenv/worker")
    if (target / "_row_writer.c").exists():
        if (target / "_row_writer.c").read_bytes() != (source / "_row_writer.c").read_bytes():
            raise SystemExit(f"{revision!r} has a different row writer in C: build it in a checkout, and pass its folder")
        for compiled in source.glob("_row_writer.*.so"):
            shutil.copy(compiled, target)
    return folder


def measure(here: Path, other: Path, options: argparse.Namespace) -> tuple[float, float]:
    """Return the ratio of this checkout's time to the other's, and the other's median microseconds per batch."""
    rng = random.Random(options.seed)
    engine_options = {here: dict(map(_parse_option, options.here)), other: {}}
    import_order = [other, here] if options.seed % 2 else [here, other]
    versions = {folder: Version(folder, options, engine_options[folder]) for folder in import_order}
    trial_seconds = [version.measure(10) for _ in range(10) for version in versions.values()]
    batches = max(10, round(SAMPLE_SECONDS / min(trial_seconds)))
    ratios: dict[Path, list[float]] = {here: [], other: []}  # by the version that ran first
    microseconds = []
    first_versions = [here, other] * max(1, options.pairs // 2)
    rng.shuffle(first_versions)
    for first in first_versions:
        order = [here, other] if first == here else [other, here]
        seconds = {folder: versions[folder].measure(batches) for folder in order}
        ratios[first].append(seconds[here] / seconds[other])
        microseconds.append(seconds[other] * 1e6)
    for version in versions.values():
        version.close()
    ratio = statistics.geometric_mean([statistics.median(samples) for samples in ratios.values()])
    return ratio, statistics.median(microseconds)


class Version:
    """One version of the engine with its own environments.

    ``sys.modules`` contains its modules only during its calls, because these import, pickle, unpickle and fork.
    """

    def __init__(self, folder: Path, options: argparse.Namespace, engine_options: dict[str, Any]) -> None:
        self._folder = folder
        self._modules: dict[str, ModuleType] = {}
        call, workers, num_envs = options.call[0], options.num_workers[0], options.num_envs[0]
        self._workers, self._uses_recv = None if workers == "each" else workers, call != "step"
        size = max(1, num_envs // 2) if call == "recv" else num_envs
        self._row_batches = np.arange(num_envs // size * size).reshape(-1, size)  # sent at the beginning of a sample
        env_fns = [functools.partial(gymnasium.make, options.env)] * num_envs
        with self._modules_loaded():
            sys.path.insert(0, str(folder))
            try:
                engine = importlib.import_module("vecenv").AsyncVectorEnv
            finally:
                sys.path.remove(str(folder))
            self._envs = engine(env_fns, num_workers=self._workers, batch_size=size, context="fork", **engine_options)
            self._envs.reset(seed=0)
            space = batch_space(self._envs.single_action_space, size)
            space.seed(options.seed)
            self._actions = space.sample()
            files = set().union(*self._envs.exec_func(_loaded_files))
        foreign_files = sorted(file for file in files if not self._contains(file))
        if foreign_files:
            raise SystemExit(f"expected only code of {folder / 'vecenv'}, got {', '.join(foreign_files)}")

    def _contains(self, file: str) -> bool:
        return Path(file).resolve().is_relative_to(self._folder / "vecenv")

    @contextlib.contextmanager
    def _modules_loaded(self) -> Iterator[None]:
        sys.modules.update(self._modules)
        try:
            yield
        finally:
            self._modules = _loaded_modules()
            for name in self._modules:
                del sys.modules[name]

    def measure(self, batches: int) -> float:
        """Return the seconds per batch, measured over ``batches`` after a warm-up."""
        run_batches = self._run_recv if self._uses_recv else self._run_step
        with self._modules_loaded():
            if self._workers != 0:
                time.sleep(PAUSE_SECONDS)
            if self._uses_recv:
                for rows in self._row_batches:
                    self._envs.send(self._actions, rows)
            run_batches(max(2, batches // 10))
            start = time.perf_counter()
            run_batches(batches)
            seconds = time.perf_counter() - start
            if self._uses_recv:
                for _ in self._row_batches:
                    self._envs.recv()
        return seconds / batches

    def _run_step(self, batches: int) -> None:
        step, actions = self._envs.step, self._actions
        for _ in range(batches):
            step(actions)

    def _run_recv(self, batches: int) -> None:
        send, recv, actions = self._envs.send, self._envs.recv, self._actions
        for _ in range(batches):
            send(actions, recv()[4]["env_id"])

    def close(self) -> None:
        with self._modules_loaded():
            self._envs.close()


def _loaded_modules() -> dict[str, ModuleType]:
    return {name: module for name, module in sys.modules.items() if name.partition(".")[0] == "vecenv"}


def _loaded_files(env: Any) -> set[str]:
    """Return the files of all loaded modules of vecenv, and of vecenv's functions on the stack."""
    files = {str(module.__file__) for name, module in sys.modules.items() if name.partition(".")[0] == "vecenv"}
    frame = sys._getframe(1)
    while frame is not None:
        if str(frame.f_globals.get("__name__")).partition(".")[0] == "vecenv":
            files.add(frame.f_code.co_filename)
        frame = frame.f_back
    return files


if __name__ == "__main__":
    main()
