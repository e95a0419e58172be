"""Programs of ``bench/`` run, with settings so small that their figures mean nothing; a few only say their options."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).parents[2] / "bench"
PROGRAMS = {
    # program -> small settings, and what it prints
    "bridge_cost.py": ("--length 4 --steps 4 --repeats 1", "scan"),
    "envpool_rate.py": ("--task CartPole-v1 --num-envs 2 --seconds 0.05 --repeats 1", "CartPole-v1"),
    "envpool_row.py": ("--num-envs 2 --seconds 0.05 --repeats 1", "CartPole-v1"),
    "first_ready_cost.py": ("CartPole-v1 --num-envs 2 --workers 1 --rounds 1 --seconds 0.05", "us per environment step"),
    "jax_cost.py": ("--help", "--limit"),  # three minutes of compiling
    "many_cores.py": ("--costs 1 1 1 --each 2", "per worker"),
    "multi_agent_rate.py": ("--help", "--game"),  # it needs SuperSuit, which no extra brings
    "overlap_rate.py": ("--env-ms 1 --policy-ms 1 --envs 2 --workers 1 --length 2 --repeats 1", "halves"),
    "ray_rate.py": ("--help", "--rounds"),  # a cluster is started in tests/distributed
    "state.py": ("--tries 1 --only CartPole", "CartPole"),
    "torchrl_brax.py": ("--help", "usage"),
    "torchrl_rate.py": ("--help", "usage"),
    "versions.py": (". --num-envs 1 --num-workers 0 --pairs 2 --processes 2", "CartPole"),
    "watched.py": ("", ""),  # run by tests/tools/test_bench_programs.py, inside another program
    "__main__.py": ("list", "workload"),
}


def test_every_program_is_listed() -> None:
    found = {path.name for path in BENCH.glob("*.py") if re.search(r"^if __name__ == ", path.read_text(), re.MULTILINE)}
    assert found == set(PROGRAMS)


@pytest.mark.long
@pytest.mark.parametrize("name", [name for name, (settings, _) in PROGRAMS.items() if settings])
def test_a_program_runs(name: str) -> None:
    if name.startswith("torchrl") and importlib.util.find_spec("torchrl") is None:
        pytest.skip("TorchRL is not installed (pip install -e '.[clients]')")
    settings, wanted = PROGRAMS[name]
    program = ["-m", "bench"] if name == "__main__.py" else [f"bench/{name}"]
    command = [sys.executable, *program, *settings.split()]
    done = subprocess.run(command, cwd=BENCH.parent, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    assert wanted in done.stdout
