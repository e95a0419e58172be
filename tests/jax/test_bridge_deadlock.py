"""Programs with host calls finish with few cores, many threads, large arguments, and inputs that are not ready.

A plain ``io_callback`` hangs in half of these cases, for example with 1 MiB of arguments and one thread per core.
"""

from __future__ import annotations

import itertools
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
KIB, MIB = 1 << 10, 1 << 20
# A hang never ends, so a long timeout detects it too, and does not fail on a busy machine.
pytestmark = pytest.mark.timeout(400)
HARDEST = {(1, 1, MIB), (2, 2, MIB), (2, 4, MIB)}  # (cores, threads, bytes of an action)


def make_cases() -> list[Any]:
    cases = itertools.product((1, 2), (1, 2, 4), (KIB, MIB))
    return [pytest.param(*case, marks=[] if case in HARDEST else [pytest.mark.slow]) for case in cases]


def run_on_cores(cores: int, *arguments: str, timeout: float = 300) -> subprocess.CompletedProcess[str]:
    available = sorted(os.sched_getaffinity(0))
    if len(available) < cores:
        pytest.skip(f"needs {cores} cores")
    command = ["taskset", "-c", ",".join(map(str, available[:cores])), sys.executable, *arguments]
    root = str(HERE.parent.parent)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(HERE), root]), "JAX_PLATFORMS": "cpu"}
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=timeout, check=False)


needs_taskset = pytest.mark.skipif(shutil.which("taskset") is None, reason="needs taskset")


@pytest.mark.long
@needs_taskset
@pytest.mark.parametrize(("cores", "threads", "action_bytes"), make_cases())
def test_programs_with_host_calls_finish(cores: int, threads: int, action_bytes: int) -> None:
    process = run_on_cores(cores, str(HERE / "bridge_deadlock.py"), str(threads), str(action_bytes))
    assert process.stdout.strip() == "done", process.stdout[-500:] + process.stderr[-3000:]


PROGRAM_WITH_A_LATER_COMPUTATION = """
import faulthandler; faulthandler.dump_traceback_later(240, exit=True)
import jax, jax.numpy as jnp, numpy as np
import vecenv.jax as vj
from bridge_envs import CallLogVectorEnv
with vj.bridge(CallLogVectorEnv()) as env:
    program = jax.jit(lambda s, x: env.step(s, jnp.full((2, 1), x[0, 0])))
    slow = jax.jit(lambda x: jax.lax.fori_loop(0, 20, lambda _, y: y @ x / 300.0, x))
    state = env.reset(jax.random.key(0))
    for _ in range(5):
        state = program(state, slow(jnp.ones((300, 300))))
        env.later = slow(jnp.ones((300, 300)))  # dispatched after the program
    jax.block_until_ready(state)
print("done")
"""


@pytest.mark.long
@needs_taskset
def test_host_call_does_not_wait_for_a_later_computation() -> None:
    process = run_on_cores(1, "-c", PROGRAM_WITH_A_LATER_COMPUTATION)
    assert process.stdout.strip() == "done", process.stderr[-3000:]


def test_host_module_does_not_import_jax() -> None:
    text = (HERE.parent.parent / "vecenv" / "jax" / "host.py").read_text()
    assert "import jax" not in text
    assert "from jax" not in text
