"""The effect of a change on the engine's own time: two versions of it in one process, by turns.

    python bench/versions.py HEAD~1                  # this checkout against another revision
    python bench/versions.py /path/to/a/checkout --env CartPole-v1 --num-envs 1 8 64 --num-workers 0 2 --call step recv

Differences of one or two percent are lost between processes: where each one's memory happens to lie is worth as much. So
both versions are imported into the same process, each with environments of its own, take turns of a few milliseconds in
random order, and a ratio is formed within each pair of turns. Its median is taken over some hundred pairs (over those in
which either version was first, and the mean of the two), and again over several processes, half of which import the other
version first; the minimum and maximum are printed too.

``--call recv`` is rounds of ``recv()`` and ``send()`` with half the environments in a batch, ``--call recv_all`` with all
of them, and ``--num-workers each`` is one process per environment. Worker processes
(``--num-workers``) are forked while ``sys.modules`` holds the modules of their own version and no others, as it does in
every turn; each lists the files of its code before the first turn. Those of the version that is not playing sleep,
as its turn ended with nothing in flight, and the next one begins with a pause that is longer than they spin.

Without worker processes a version against a copy of itself gives 1.00 within 0.005, also while others use all cores. With
them the machine has to be quiet: while others used it at times, six processes gave 0.984 to 1.006, and one 0.97 to 1.05.
"""

from __future__ import annotations

import argparse
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

TURN = 0.003  # seconds; short compared with changes of the machine's speed, and long compared with a reading of the clock
PAUSE = 0.0005  # seconds before a turn; three times as long as an idle worker spins
ROOT = Path(__file__).resolve().parents[1]


def main() -> None:
    """Parse, measure, print a line for each case."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("other", help="a folder with another vecenv/ in it, or a revision of this repository")
    parser.add_argument("--env", default="CartPole-v1")
    parser.add_argument("--num-envs", type=int, nargs="+", default=[1, 2, 8])
    parser.add_argument("--num-workers", type=_number_or_each, nargs="+", default=[0])
    parser.add_argument("--call", choices=["step", "recv", "recv_all"], nargs="+", default=["step"])
    parser.add_argument("--pairs", type=int, default=600, help="pairs of turns in each process")
    parser.add_argument("--processes", type=int, default=6)
    parser.add_argument("--seed", type=int, help=argparse.SUPPRESS)  # set in the processes that measure
    options = parser.parse_args()
    if options.seed is not None:
        print(json.dumps(measure(ROOT, Path(options.other).resolve(), options)))
        return
    from vecenv.tools import progress_bar  # not above: a process that measures has the two versions, and no third

    with tempfile.TemporaryDirectory() as folder, progress_bar() as progress:
        other = options.other if (Path(options.other) / "vecenv").is_dir() else _checkout(options.other, folder)
        for workers, call, count in itertools.product(options.num_workers, options.call, options.num_envs):
            case = f"{options.env} x {count}, {workers} workers, {call}"
            which = ["--num-envs", str(count), "--num-workers", str(workers), "--call", call]
            rest = ["--env", options.env, *which, "--pairs", str(options.pairs)]
            samples = []
            for seed in range(options.processes):
                progress(case, seed, options.processes)
                command = [sys.executable, __file__, other, *rest, "--seed", str(seed)]
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


def _checkout(revision: str, folder: str) -> str:
    archive = subprocess.run(["git", "-C", str(ROOT), "archive", revision, "vecenv"], check=False, stdout=subprocess.PIPE)
    if archive.returncode:
        raise SystemExit(f"{revision!r} is neither a folder with vecenv/ in it nor a revision")
    subprocess.run(["tar", "x", "-C", folder], input=archive.stdout, check=True)
    source, target = ROOT / "vecenv/worker", Path(folder, "vecenv/worker")
    if (target / "_row_writer.c").exists():
        if (target / "_row_writer.c").read_bytes() != (source / "_row_writer.c").read_bytes():
            raise SystemExit(f"{revision!r} has another row writer in C: build it in a checkout, and pass its folder")
        for built in source.glob("_row_writer.*.so"):
            shutil.copy(built, target)
    return folder


def measure(here: Path, other: Path, options: argparse.Namespace) -> tuple[float, float]:
    """Return the ratio of this checkout to the other, and the median microseconds of a batch of the other version."""
    chance = random.Random(options.seed)
    players = {folder: Player(folder, options) for folder in ([other, here] if options.seed % 2 else [here, other])}
    tries = [player.turn(10) for _ in range(10) for player in players.values()]
    batches = max(10, round(TURN / min(tries)))
    ratios: dict[bool, list[float]] = {True: [], False: []}  # by whether this checkout's turn was the first of the pair
    times = []
    firsts = [True, False] * max(1, options.pairs // 2)
    chance.shuffle(firsts)
    for first in firsts:
        took = {folder: players[folder].turn(batches) for folder in ([here, other] if first else [other, here])}
        ratios[first].append(took[here] / took[other])
        times.append(took[other] * 1e6)
    for player in players.values():
        player.close()
    ratio = statistics.geometric_mean([statistics.median(found) for found in ratios.values()])
    return ratio, statistics.median(times)


class Player:
    """One version with its own environments.

    Its modules are in ``sys.modules`` while it is used, and only then: for late imports, for pickling and
    unpickling, and for the workers that are forked.
    """

    def __init__(self, folder: Path, options: argparse.Namespace) -> None:
        self._folder = folder
        self._modules: dict[str, ModuleType] = {}
        call, workers, num_envs = options.call[0], options.num_workers[0], options.num_envs[0]
        self._workers, self._receives = None if workers == "each" else workers, call != "step"
        size = max(1, num_envs // 2) if call == "recv" else num_envs
        self._batches = np.arange(num_envs // size * size).reshape(-1, size)  # the rows that are sent when a turn begins
        env_fns = [functools.partial(gymnasium.make, options.env)] * num_envs
        with self._in_place():
            sys.path.insert(0, str(folder))
            try:
                engine = importlib.import_module("vecenv").AsyncVectorEnv
            finally:
                sys.path.remove(str(folder))
            self._envs = engine(env_fns, num_workers=self._workers, batch_size=size, context="fork")
            self._envs.reset(seed=0)
            space = batch_space(self._envs.single_action_space, size)
            space.seed(options.seed)
            self._actions = space.sample()
            wrong = {file for files in self._envs.exec_func(_files) for file in files if not self._owns(file)}
        if wrong:
            raise SystemExit(f"code of {folder / 'vecenv'} was wanted, and there is {', '.join(sorted(wrong))}")

    def _owns(self, file: str) -> bool:
        return Path(file).resolve().is_relative_to(self._folder / "vecenv")

    @contextlib.contextmanager
    def _in_place(self) -> Iterator[None]:
        sys.modules.update(self._modules)
        try:
            yield
        finally:
            self._modules = _loaded()
            for name in self._modules:
                del sys.modules[name]

    def turn(self, batches: int) -> float:
        """Return the seconds per batch, over that many of them after a few that are not timed."""
        play = self._receive if self._receives else self._step
        with self._in_place():
            if self._workers != 0:
                time.sleep(PAUSE)
            if self._receives:
                for rows in self._batches:
                    self._envs.send(self._actions, rows)
            play(max(2, batches // 10))
            began = time.perf_counter()
            play(batches)
            took = time.perf_counter() - began
            if self._receives:
                for _ in self._batches:
                    self._envs.recv()
        return took / batches

    def _step(self, batches: int) -> None:
        step, actions = self._envs.step, self._actions
        for _ in range(batches):
            step(actions)

    def _receive(self, batches: int) -> None:
        send, recv, actions = self._envs.send, self._envs.recv, self._actions
        for _ in range(batches):
            send(actions, recv()[4]["env_id"])

    def close(self) -> None:
        """End its workers."""
        with self._in_place():
            self._envs.close()


def _loaded() -> dict[str, ModuleType]:
    return {name: module for name, module in sys.modules.items() if name.partition(".")[0] == "vecenv"}


def _files(env: Any) -> set[str]:
    """Return the files of the calling engine: those of all its modules, and of the functions on the stack."""
    files = {str(module.__file__) for name, module in sys.modules.items() if name.partition(".")[0] == "vecenv"}
    frame = sys._getframe(1)
    while frame is not None:
        if str(frame.f_globals.get("__name__")).partition(".")[0] == "vecenv":
            files.add(frame.f_code.co_filename)
        frame = frame.f_back
    return files


if __name__ == "__main__":
    main()
