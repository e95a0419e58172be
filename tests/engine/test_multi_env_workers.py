"""Several environments in one worker: the same answers, and every text speaks of environments, not of
workers.
"""

from __future__ import annotations

import functools
import itertools
import os
import threading

import numpy as np
import pytest
from envs import CounterEnv, RaisingEnv, counters, opened, raises_logged, started
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from sampling import each_once

from vecenv.testing import assert_identical


@pytest.mark.parametrize(
    ("num_envs", "num_workers"),
    [(1, 1), (3, 1), (3, 2), (4, 2), (5, 2), (5, 3), (7, 3), (7, 4), (8, 3), (4, 4), (2, 5), (3, None)],
)
def test_environments_are_shared_out_in_contiguous_and_even_parts(num_envs: int, num_workers: int | None) -> None:
    """To as many as there are environments at most; ``None`` is one for each."""
    with opened(counters(num_envs), num_workers=num_workers) as envs:
        pids = envs.call("pid")
        num_workers = min(num_workers or num_envs, num_envs)
        assert len(envs.processes) == envs.num_workers == num_workers
        assert len(set(pids)) == num_workers
        assert os.getpid() not in pids
        changes = sum(one != other for one, other in itertools.pairwise(pids))
        assert changes == num_workers - 1, "each worker's environments are neighbours"
        sizes = [pids.count(pid) for pid in set(pids)]
        assert max(sizes) - min(sizes) <= 1
        assert envs.reset(seed=1)[0][:, 0].tolist() == list(range(num_envs))


@pytest.mark.parametrize(("num_workers", "mode", "shared_memory"), each_once([1, 2, 3, 5], AutoresetMode, [True, False]))
def test_uneven_shares_give_the_answers_of_sync_vector_env(
    num_workers: int, mode: AutoresetMode, shared_memory: bool
) -> None:
    fns = [functools.partial(CounterEnv, index, lengths=(1 + index, 2)) for index in range(5)]
    oracle = SyncVectorEnv(fns, autoreset_mode=mode)
    rng = np.random.default_rng(num_workers)
    with opened(fns, num_workers=num_workers, autoreset_mode=mode, shared_memory=shared_memory) as envs:
        assert_identical(envs.reset(seed=9), oracle.reset(seed=9))
        for t in range(12):
            actions = rng.integers(5, size=5)
            mine, theirs = envs.step(actions), oracle.step(actions)
            assert_identical(mine, theirs, f"step {t}")
            mask = theirs[2] | theirs[3] if mode is AutoresetMode.DISABLED else rng.random(5) < 0.2
            if mask.any():
                both = [one.reset(seed=t, options={"reset_mask": mask.copy()}) for one in (envs, oracle)]
                assert_identical(*both, f"reset after step {t}")
    oracle.close()


def test_zero_means_this_process_and_this_thread() -> None:
    class Where(CounterEnv):
        def thread(self) -> int:
            return threading.get_ident()

    with opened([Where] * 3, num_workers=0) as envs:
        assert envs.call("pid") == (os.getpid(),) * 3
        assert envs.call("thread") == (threading.get_ident(),) * 3
        assert len(envs.processes) == 0
        assert envs.num_workers == 0


def test_auto_chooses_for_itself_and_says_what() -> None:
    with opened(counters(4), num_workers="auto") as envs:
        assert isinstance(envs.num_workers, int)
        assert 0 <= envs.num_workers <= 4
        assert envs.reset(seed=1)[0][:, 0].tolist() == [0, 1, 2, 3]


def test_the_repr_tells_how_many_workers_there_are() -> None:
    with opened(counters(4), num_workers=2) as envs:
        assert "num_envs=4" in repr(envs)
        assert "workers=2" in repr(envs)


def test_calls_and_frames_come_in_the_order_of_environments() -> None:
    with started(counters(5, render_mode="rgb_array"), num_workers=2) as envs:
        assert envs.call("add", 1) == (1, 2, 3, 4, 5)
        assert [int(frame[0, 0, 0]) for frame in envs.render()] == [0, 10, 20, 30, 40]
        envs.set_attr("note", list("abcde"))
        assert envs.get_attr("note") == tuple("abcde")
        assert envs.exec_func(lambda env: env.env_id, [0, 4]) == (0, None, None, None, 4)


@pytest.mark.parametrize("bad", range(5))
def test_a_failing_environment_does_not_stop_its_siblings_and_is_named_by_its_own_index(bad: int) -> None:
    fns = counters(5, lengths=(9,))
    fns[bad] = functools.partial(RaisingEnv, bad, ValueError("x"), "step", 2)
    with started(fns, num_workers=2) as envs:
        envs.step([0] * 5)
        with raises_logged(ValueError) as (caught, _):
            envs.step([0] * 5)
        assert f"env {bad}" in "\n".join(caught.value.__notes__)
        others = [index for index in range(5) if index != bad]
        steps = envs.exec_func(lambda env: env.steps, others)
        assert [steps[index] for index in others] == [2] * 4
        observations, _ = envs.reset(seed=1)
        assert observations[:, 2].tolist() == [1 if index == bad else 2 for index in range(5)]


def test_several_failures_in_one_worker_are_all_reported() -> None:
    fns = [functools.partial(RaisingEnv, index, ValueError(f"x{index}"), "step", 1) for index in range(4)]
    with started([*counters(1), *fns[1:]], num_workers=1) as envs:
        with raises_logged(ValueError, match="x1", failures=3) as (caught, _):
            envs.step([0] * 4)
        notes = "\n".join(caught.value.__notes__)
        assert [index for index in range(4) if f"env {index}" in notes] == [1, 2, 3]
        envs.reset(seed=1)
