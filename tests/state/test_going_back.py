"""``restart_from="snapshot"``: what was lost goes on from the last snapshot of it, in place of a new episode."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import signal
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium.wrappers import RecordEpisodeStatistics, TimeLimit

import vecenv
from vecenv import state
from vecenv.multi_agent import MultiAgentVecEnv
from vecenv.testing import assert_identical

RAISE, DIE = 8, 9
ROWS = 4
MODES = ("NextStep", "SameStep", "Disabled")


class Draws(gymnasium.Env[Any, Any]):
    """Adds what it draws to what it did; falls when it is told to."""

    observation_space = gymnasium.spaces.Box(-1e9, 1e9, (2,), np.float64)

    def __init__(self) -> None:
        self.action_space = gymnasium.spaces.Discrete(10)
        self.seen = np.zeros(2)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.seen = np.array([0.0, self.np_random.random()])
        return self.seen.copy(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        if action == RAISE:
            raise ConnectionError("told to")
        if action == DIE:
            os.kill(os.getpid(), signal.SIGKILL)
        self.seen += action + 1, self.np_random.random()
        return self.seen.copy(), self.seen[1], self.seen[0] > 20, False, {}


def draws() -> Any:
    return TimeLimit(RecordEpisodeStatistics(Draws()), 12)


def engine(env_fn: Any = draws, **options: Any) -> Any:
    options = {"num_workers": 2, "on_failure": "restart", "restart_from": "snapshot", **options}
    return contextlib.closing(vecenv.AsyncVectorEnv([env_fn] * ROWS, **options))


def advance(envs: Any, count: int, action: int = 1) -> Any:
    for number in range(count):
        last = envs.step(np.full(ROWS, (action + number) % 3))
    return last


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("fault", "lost"), [(RAISE, [2]), (DIE, [2, 3])])
def test_a_row_that_was_lost_goes_on_from_its_snapshot(fault: int, lost: list[int], mode: str) -> None:
    with engine(autoreset_mode=mode) as envs, engine(autoreset_mode=mode, num_workers=0) as twin:
        envs.reset(seed=1)
        advance(envs, 3)
        kept = envs.save(verify=False)
        twin.load(kept)
        last = advance(envs, 2)[0]
        actions = np.ones(ROWS, np.int64)
        actions[2] = fault
        seen, rewards, terminated, truncated, infos = envs.step(actions)
        assert rewards[lost].tolist() == [0.0] * len(lost)
        assert not terminated.any()
        assert np.flatnonzero(truncated).tolist() == np.flatnonzero(infos["from_snapshot"]).tolist() == lost
        assert_identical(list(infos["final_obs"][lost]), list(last[lost]))
        was = np.array([kept[row].observation for row in lost])
        assert_identical(seen[lost], last[lost] if mode == "NextStep" else was)
        if mode == "NextStep":  # the next step tells where they are, as it tells of a reset
            beside = envs.save(lost, verify=False)
            seen, rewards, *_, infos = envs.step(np.zeros(ROWS, np.int64))
            assert_identical((seen[lost], rewards[lost]), (was, np.zeros(len(lost))))
            assert "from_snapshot" not in infos
            assert_identical(twin.load(beside, env_id=lost), last[lost])
            assert_identical(twin.step(np.zeros(ROWS, np.int64))[0][lost], was)
        for number in range(3):
            found, wanted = envs.step(np.full(ROWS, number)), twin.step(np.full(ROWS, number))
            for field in range(4):
                assert_identical(found[field][lost], wanted[field][lost], f"step {number}, field {field}")
        assert envs.stats()["restarts"] == 1


def test_the_latest_counts_whether_saved_or_loaded_and_a_reset_ends_it() -> None:
    with engine() as envs:
        envs.reset(seed=1)
        actions = np.array([RAISE, 0, 0, 0])
        assert "from_snapshot" not in envs.step(actions)[4]  # there is none yet
        envs.step(actions * 0)
        first = envs.state_dict(verify=False)["snapshots"]
        advance(envs, 2)
        second = envs.save([0], verify=False)
        envs.step(actions)
        assert_identical(envs.step(actions * 0)[0][0], second[0].observation)
        envs.load(first[0], env_id=[0])
        advance(envs, 1)
        envs.step(actions)
        assert_identical(envs.step(actions * 0)[0][0], first[0].observation)
        envs.reset(seed=2, options={"reset_mask": np.array([True, False, False, False])})
        assert "from_snapshot" not in envs.step(actions)[4]
        assert "from_snapshot" in envs.step(actions[::-1].copy())[4]


def test_a_snapshot_at_an_episodes_end_begins_the_next_episode() -> None:
    with engine() as envs, engine(num_workers=0) as twin:
        envs.reset(seed=1)
        while not envs.step(np.full(ROWS, 2))[2].all():
            pass
        twin.load(envs.save(verify=False))
        envs.step(np.zeros(ROWS, np.int64))
        envs.step(np.array([0, DIE, 0, 0]))
        assert_identical(envs.step(np.zeros(ROWS, np.int64))[0][:2], twin.step(np.zeros(ROWS, np.int64))[0][:2])


@pytest.mark.parametrize("shared_memory", [True, False])
def test_rows_that_come_one_by_one_go_on_from_their_snapshots(shared_memory: bool) -> None:
    with engine(batch_size=2, shared_memory=shared_memory) as envs:
        envs.reset(seed=1)
        kept = envs.save(verify=False)
        advance(envs, 2)
        envs.send(np.array([DIE, 1, 1, 1]), np.arange(ROWS))
        lost: list[int] = []
        for _ in range(2):
            *_, infos = envs.recv()
            lost += infos["env_id"][infos.get("_from_snapshot", [])].tolist()
        assert sorted(lost) == [0, 1]
        envs.send(np.zeros(2, np.int64), np.array([0, 1]))
        seen, rewards, *_, infos = envs.recv()
        assert_identical(list(seen), [kept[row].observation for row in infos["env_id"]])
        assert not rewards.any()


class Brittle:
    """Can be saved; cannot be loaded any more once the file is there."""


def brittle(path: str) -> Any:
    def load(thing: Any, number: Any) -> None:
        if os.path.exists(path):
            raise OSError("the licence has run out")

    state.register(Brittle, lambda thing: 1, load)
    env = draws()
    env.unwrapped.brittle = Brittle()
    return env


def test_a_snapshot_that_does_not_load_any_more_is_a_reset_and_a_warning(tmp_path: Any) -> None:
    path = str(tmp_path / "gone")
    with engine(functools.partial(brittle, path)) as envs:
        envs.reset(seed=1)
        advance(envs, 3)
        envs.save(verify=False)
        open(path, "w").close()
        with pytest.warns(UserWarning, match="env 1 cannot go on from its snapshot, and was reset: .*licence has run out"):
            answer = envs.step(np.array([0, RAISE, 0, 0]))
        assert answer[4]["_restarted"].tolist() == [False, True, False, False]
        assert "from_snapshot" not in answer[4]
        assert envs.step(np.zeros(ROWS, np.int64))[0][1, 0] == 0
        envs.step(np.ones(ROWS, np.int64))


def fatal(path: str) -> Any:
    def load(thing: Any, number: Any) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    state.register(Brittle, lambda thing: 1, load)
    env = draws()
    env.unwrapped.brittle = Brittle()
    return env


def test_a_snapshot_that_ends_its_worker_is_tried_once(tmp_path: Any, caplog: Any) -> None:
    with engine(functools.partial(fatal, ""), num_workers=4) as envs, caplog.at_level(logging.WARNING, "vecenv"):
        envs.reset(seed=1)
        envs.save(verify=False)
        answer = envs.step(np.array([0, RAISE, 0, 0]))
        assert answer[4]["_restarted"].tolist() == [False, True, False, False]
        assert "from_snapshot" not in answer[4]
        assert envs.stats()["restarts"] == 2


def test_it_is_refused_where_it_means_nothing() -> None:
    with pytest.raises(ValueError, match=r"restart_from.*'snapshot' where on_failure is 'restart'"):
        vecenv.AsyncVectorEnv([draws], restart_from="snapshot")
    with pytest.raises(ValueError, match=r"restart_from.*'reset', or 'snapshot'"):
        vecenv.AsyncVectorEnv([draws], on_failure="restart", restart_from="checkpoint")  # type: ignore[arg-type]
    with pytest.raises(NotImplementedError, match="MultiAgentVecEnv restarts by reset only"):
        MultiAgentVecEnv([draws], on_failure="restart", restart_from="snapshot")
