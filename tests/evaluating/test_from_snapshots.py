"""``vecenv.evaluate`` of episodes that begin with a snapshot in place of a reset."""

from __future__ import annotations

import os
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from double import DoubleVectorEnv
from envs import counters, opened
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from walks import ENGINES, LONGEST, SEED, Walk, begun, choose, numbers, walks, wanted_from

import vecenv
from vecenv.errors import SnapshotMismatch, WorkerDied


@pytest.mark.parametrize("mode", AutoresetMode)
@pytest.mark.parametrize("num_envs", [1, 3, 8])
def test_results_are_those_of_a_plain_loop_that_went_there(num_envs: int, mode: AutoresetMode) -> None:
    snapshots, starts = begun(10)
    with opened(walks(num_envs, longest=LONGEST), num_workers=0, autoreset_mode=mode) as envs:
        for count in (10, 1):
            results = vecenv.evaluate(envs, choose, snapshots[:count], seed=SEED)
            assert numbers(results) == wanted_from(starts[:count])


@pytest.mark.parametrize("engine", list(ENGINES.values())[1:], ids=list(ENGINES)[1:])
def test_results_are_the_same_in_processes_and_nothing_is_stepped_in_vain(engine: dict[str, Any]) -> None:
    snapshots, starts = begun(9)
    with opened(walks(3, longest=LONGEST), **engine) as envs:
        results = vecenv.evaluate(envs, choose, snapshots, seed=SEED)
        assert numbers(results) == wanted_from(starts)
        assert envs.stats()["steps"] == sum(each.length for each in results)
        assert all(each.attempts == 1 for each in results)


def test_some_begin_with_a_reset_and_some_with_one_snapshot() -> None:
    [snapshot], [start] = begun(1)
    episodes = [snapshot, vecenv.Episode(), vecenv.Episode(snapshot=snapshot), vecenv.Episode(seed=SEED + 9)] * 2
    with opened(walks(3, longest=LONGEST), num_workers=2) as envs:
        results = vecenv.evaluate(envs, choose, episodes, seed=SEED)
        resets = [vecenv.Episode(SEED + 9 if at % 4 == 3 else None) for at in range(8)]
        plain = vecenv.evaluate(envs, choose, resets, seed=SEED)
    assert [each.seed for each in results] == [None, SEED + 1, None, SEED + 9, None, SEED + 5, None, SEED + 9]
    from_there = wanted_from([start] * 8)
    assert numbers(results) == [from_there[at] if at % 2 == 0 else numbers(plain)[at] for at in range(8)]


@pytest.mark.parametrize("num_envs", [1, 3, 8])
@pytest.mark.parametrize("fault", ["raise", "die"])
def test_what_fails_goes_on_from_its_snapshot_again(num_envs: int, fault: str, tmp_path: Path) -> None:
    """The fault comes in the middle of a walk: once, and the third walk always."""
    starts = begun(7)[1]
    before = [at for at, (own, steps) in enumerate(starts) if steps <= _length(own) // 2]
    assert len(before) > 3, "or nothing fails after its snapshot"
    always = before[2]
    faults = {starts[at][0]: fault if at == always else f"{fault} once" for at in before}
    snapshots = begun(7, faults=faults, marks=str(tmp_path))[0]
    with opened(walks(num_envs, longest=LONGEST), num_workers=min(num_envs, 2)) as envs:
        results = vecenv.evaluate(envs, choose, snapshots, seed=SEED)
    assert isinstance(results[always].error, WorkerDied if fault == "die" else ArithmeticError)
    assert {each.attempts for at, each in enumerate(results) if at in before} >= {2}
    plain = wanted_from(starts)
    assert all(at == always or each == plain[at] for at, each in enumerate(numbers(results)))


def _length(seed: int) -> int:
    walk = Walk(longest=LONGEST)
    walk.reset(seed=seed)
    return walk.length


def test_rows_that_had_failed_before_come_back() -> None:
    snapshots, starts = begun(4)
    with opened(walks(3, longest=LONGEST), num_workers=2) as envs:
        envs.reset(seed=SEED)
        os.kill(envs.exec_func(lambda env: os.getpid(), [0])[0], signal.SIGKILL)
        with pytest.raises(WorkerDied):
            envs.step([0] * 3)
        assert numbers(vecenv.evaluate(envs, choose, snapshots, seed=SEED)) == wanted_from(starts)


def test_frames_begin_where_the_snapshot_was_taken() -> None:
    snapshots, starts = begun(3)
    with opened(walks(2, longest=LONGEST, render_mode="rgb_array"), num_workers=2) as envs:
        filmed = vecenv.evaluate(envs, choose, snapshots, seed=SEED, frames=[1])
    assert [int(frame[0, 0, 0]) for frame in filmed[1].frames] == [*range(starts[1][1], starts[1][1] + filmed[1].length + 1)]


def test_a_wrapper_hands_it_on() -> None:
    snapshots, starts = begun(4)
    with opened(walks(2, longest=LONGEST), num_workers=0) as inner:
        envs = vecenv.wrappers.RecordEpisodeStatistics(inner)
        assert numbers(vecenv.evaluate(envs, choose, snapshots, seed=SEED))[0][:4] == wanted_from(starts)[0][:4]


def test_what_is_wrong_is_named_before_anything_runs() -> None:
    [snapshot], _ = begun(1)
    with opened(walks(2, longest=LONGEST), num_workers=0) as envs:
        fresh = envs.save(verify=False)[0]
        envs.reset(seed=[SEED, SEED])
        while not any(np.any(flags[:1]) for flags in envs.step([0, 0])[2:4]):
            pass
        over = envs.save([0], verify=False)[0]
        damaged = replace(snapshot, body=snapshot.body[:-1])
        for episodes, error, says in (
            ([snapshot, damaged], SnapshotMismatch, r"episodes\[1\].snapshot: its bytes are damaged"),
            ([vecenv.Episode(seed=1, snapshot=snapshot)], ValueError, r"episodes\[0\] has a snapshot, so there is no reset"),
            ([vecenv.Episode(snapshot="state")], TypeError, r"episodes\[0\].snapshot must be one of those"),  # type: ignore[arg-type]
            ([fresh], ValueError, r"episodes\[0\].snapshot was taken before the first reset"),
            ([over], ValueError, r"episodes\[0\].snapshot was taken when its episode was over"),
            (snapshot, TypeError, "a list of vecenv.Episode or snapshots"),
        ):
            with pytest.raises(error, match=says):
                vecenv.evaluate(envs, choose, episodes, seed=SEED)  # type: ignore[arg-type]
    words = r"episodes\[1\].snapshot: .*Walk"
    with opened(counters(2), num_workers=0) as others, pytest.raises(SnapshotMismatch, match=words):
        vecenv.evaluate(others, choose, [vecenv.Episode(), snapshot], seed=SEED)
    for unable in (SyncVectorEnv(walks(2)), DoubleVectorEnv(2)):
        with pytest.raises(NotImplementedError, match="cannot begin episodes with snapshots"):
            vecenv.evaluate(unable, choose, [snapshot])
        unable.close()
