"""What a change does to the engine's own time: two versions of it in one process, by turns.

    python bench/versions.py HEAD~1                  # this checkout against another revision
    python bench/versions.py /path/to/a/checkout --env CartPole-v1 --num-envs 1 2 8

Differences of one or two percent are lost between processes: where each one's memory happens to lie is worth as much. So
both versions are imported into the same process, each with environments of its own, take turns of 60 batches in random
order, and a ratio is formed within each pair of turns. Its median is taken over some thousand pairs, and again over several
processes, of which each imports the versions in an order of its own. Only without worker processes (``num_workers=0``):
those could not tell whose they are. A version against a copy of itself gives 1.00 within 0.004.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import gymnasium

TURN = 60  # batches; a turn is short beside a change of the machine's pace, and long beside a look at the clock
ROOT = Path(__file__).resolve().parents[1]


def main() -> None:
    """Parse, measure, print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("other", help="a folder with another vecenv/ in it, or a revision of this repository")
    parser.add_argument("--env", default="CartPole-v1")
    parser.add_argument("--num-envs", type=int, nargs="+", default=[1, 2, 8])
    parser.add_argument("--pairs", type=int, default=1500, help="pairs of turns in each process")
    parser.add_argument("--processes", type=int, default=6)
    parser.add_argument("--seed", type=int, help=argparse.SUPPRESS)  # set in the processes that measure
    options = parser.parse_args()
    if options.seed is not None:
        print(json.dumps(measure(ROOT, Path(options.other).resolve(), options)))
        return
    from vecenv.benchmark.tables import progress_bar  # not above: who measures has the two versions, and no third

    with tempfile.TemporaryDirectory() as folder, progress_bar() as progress:
        other = options.other if (Path(options.other) / "vecenv").is_dir() else _checkout(options.other, folder)
        for count in options.num_envs:
            rest = ["--env", options.env, "--num-envs", str(count), "--pairs", str(options.pairs)]
            samples = []
            for seed in range(options.processes):
                progress(f"{options.env} x {count}", seed, options.processes)
                command = [sys.executable, __file__, other, *rest, "--seed", str(seed)]
                samples.append(json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout))
            ratios = [ratio for ratio, _ in samples]
            batch = statistics.median(batch for _, batch in samples)
            print(
                f"{options.env} x {count}: a batch takes {batch:.2f} us in {options.other}, "
                f"and here {statistics.median(ratios):.4f} of that ({min(ratios):.4f} - {max(ratios):.4f})"
            )


def _checkout(revision: str, folder: str) -> str:
    archive = subprocess.run(["git", "-C", str(ROOT), "archive", revision, "vecenv"], check=False, stdout=subprocess.PIPE)
    if archive.returncode:
        raise SystemExit(f"{revision!r} is neither a folder with vecenv/ in it nor a revision")
    subprocess.run(["tar", "x", "-C", folder], input=archive.stdout, check=True)
    return folder


def measure(here: Path, other: Path, options: argparse.Namespace) -> tuple[float, float]:
    """The median ratio of the pairs, and the median time of a batch of the other version in microseconds."""
    chance = random.Random(options.seed)
    folders = [here, other]
    chance.shuffle(folders)
    env_fns = [functools.partial(gymnasium.make, options.env)] * options.num_envs[0]
    envs = {folder: _load(folder).AsyncVectorEnv(env_fns, num_workers=0) for folder in folders}
    for each in envs.values():
        each.reset(seed=0)
    actions = next(iter(envs.values())).action_space.sample()
    ratios, times = [], []
    for _ in range(options.pairs):
        chance.shuffle(folders)
        took = {folder: _turn(envs[folder], actions) for folder in folders}
        ratios.append(took[here] / took[other])
        times.append(took[other] / TURN * 1e6)
    for each in envs.values():
        each.close()
    return statistics.median(ratios), statistics.median(times)


def _load(folder: Path) -> ModuleType:
    for name in [name for name in sys.modules if name.partition(".")[0] == "vecenv"]:
        del sys.modules[name]
    sys.path.insert(0, str(folder))
    try:
        module = importlib.import_module("vecenv")
    finally:
        sys.path.remove(str(folder))
    if module.__file__ is None or Path(module.__file__).resolve().parent != folder / "vecenv":
        raise SystemExit(f"vecenv came from {module.__file__}, wanted it from {folder}")
    return module


def _turn(envs: Any, actions: Any) -> float:
    began = time.perf_counter()
    for _ in range(TURN):
        envs.step(actions)
    return time.perf_counter() - began


if __name__ == "__main__":
    main()
