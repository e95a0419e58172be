"""``worker_affinity``: workers stay on the cores that they are given; and how many cores there are to use."""

from __future__ import annotations

import os
import signal
from typing import Any

import numpy as np
import pytest
from envs import counters, opened

from vecenv.system.cores import usable_cores

pytestmark = pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="this system cannot bind processes")


def cores(env: Any) -> set[int]:
    return os.sched_getaffinity(0)


@pytest.mark.parametrize("context", ["fork", "spawn"])
def test_workers_stay_on_their_cores(context: str) -> None:
    mine = sorted(os.sched_getaffinity(0))
    given = [mine[-1], mine]
    with opened(counters(4), num_workers=2, context=context, worker_affinity=given, on_failure="restart") as envs:
        envs.reset(seed=1)
        for _ in range(2):
            assert envs.exec_func(cores) == ({mine[-1]}, {mine[-1]}, set(mine), set(mine))
            for _ in range(50):
                envs.step(np.zeros(4, np.int64))
            os.kill(envs.processes[0].pid, signal.SIGKILL)
            envs.step(np.zeros(4, np.int64))


@pytest.mark.parametrize("wrong", [3, [0], [0, []], [0, "x"], [0, 10_000], "01"], ids=str)
def test_what_are_no_cores_of_each_worker_is_refused(wrong: Any) -> None:
    with pytest.raises(ValueError, match=r"`worker_affinity(\[1\])?` must be .*, got "):
        opened(counters(2), num_workers=2, worker_affinity=wrong).__enter__()


def test_slurms_number_counts_where_it_is_smaller(monkeypatch: pytest.MonkeyPatch) -> None:
    usable = usable_cores()
    for given, wanted in (("1", 1), ("100000", usable), ("", usable), ("2(x2)", usable)):
        monkeypatch.setenv("SLURM_CPUS_PER_TASK", given)
        assert usable_cores() == wanted
