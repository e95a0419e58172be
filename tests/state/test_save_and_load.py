"""``save``, ``load`` and the like of process engines: exact, whole, refused where they do not fit."""

from __future__ import annotations

import contextlib
import functools
import os
import pickle
import signal
from dataclasses import replace
from typing import Any

import gymnasium
import kept_envs
import numpy as np
import pytest
from gymnasium.error import AlreadyPendingCallError
from gymnasium.wrappers import FrameStackObservation, NormalizeObservation, RecordEpisodeStatistics, TimeLimit

import vecenv
from vecenv.errors import EnvFailed, NotRestorable, SnapshotMismatch, WorkerDied
from vecenv.testing import assert_identical

MODES = ("NextStep", "SameStep", "Disabled")
ENGINES: dict[str, dict[str, Any]] = {
    "in process": {"num_workers": 0},
    "two workers": {"num_workers": 2},
    "caller's share": {"num_workers": 1, "use_caller": True},
    "first ready": {"num_workers": 2, "batch_size": 2},
    "no shared memory": {"num_workers": 2, "shared_memory": False},
    "restart": {"num_workers": 2, "on_failure": "restart"},
}
ROWS = 4


def worn() -> Any:
    """CartPole under wrappers that have state."""
    env: Any = RecordEpisodeStatistics(gymnasium.make("CartPole-v1"))
    return TimeLimit(FrameStackObservation(NormalizeObservation(env), 3), 30)


def engine(env_fn: Any = worn, mode: str = "NextStep", **options: Any) -> Any:
    return contextlib.closing(vecenv.AsyncVectorEnv([env_fn] * ROWS, autoreset_mode=mode, **options))


def advanced(envs: Any, mode: str, actions: Any) -> Any:
    """A step, and in Disabled mode the reset of what ended."""
    step = envs.step(actions)
    again = None
    if mode == "Disabled" and (over := step[4].get("env_done", step[2] | step[3])).any():
        again = envs.reset(options={"reset_mask": over})
    return (*step[:4], without_clock(step[4])), again


def without_clock(infos: Any) -> Any:
    """``episode`` holds the time by the clock."""
    if isinstance(infos, dict):
        return {key: without_clock(value) for key, value in infos.items() if key not in ("episode", "_episode")}
    return infos


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", ENGINES)
def test_another_engine_goes_on_as_the_first(name: str, mode: str) -> None:
    with engine(mode=mode, **ENGINES[name]) as envs, engine(mode=mode, num_workers=0) as other:
        envs.reset(seed=1)
        other.reset(seed=9)
        envs.action_space.seed(5)
        for _ in range(23):
            advanced(envs, mode, envs.action_space.sample())
        kept = pickle.loads(pickle.dumps(envs.save(verify=mode == "NextStep")))
        seen = other.load(kept)
        assert_identical(seen, envs.observations.copy() if name != "no shared memory" else seen)
        for number in range(40):
            actions = envs.action_space.sample()
            assert_identical(advanced(other, mode, actions), advanced(envs, mode, actions), f"step {number}")


def test_a_state_dict_is_all_of_it() -> None:
    with engine(num_workers=2) as envs:
        envs.reset(seed=1)
        envs.action_space.seed(3)
        for _ in range(10):
            envs.step(envs.action_space.sample())
        kept = pickle.loads(pickle.dumps(envs.state_dict()))
        counted = envs.stats()["steps"]
        actions = [envs.action_space.sample() for _ in range(40)]
        wanted = [advanced(envs, "NextStep", one) for one in actions]
        envs.load_state_dict(kept)
        assert envs.stats()["steps"] == counted
        assert_identical([envs.action_space.sample() for _ in range(40)], actions)
        assert_identical([advanced(envs, "NextStep", one) for one in actions], wanted)


def test_what_was_one_array_is_one_array_again() -> None:
    with engine(kept_envs.Arrays, num_workers=0) as envs:
        envs.reset(seed=1)
        kept = envs.save(verify=False)
        envs.load(kept[0])
        for env in envs.call("unwrapped"):
            assert env.same is env.sums is env.held["sums"][0]
            assert (env.single.shape, env.big_end.dtype.str, type(env.number)) == ((), ">i2", np.float32)
        first, second = envs.call("unwrapped")[:2]
        assert not np.shares_memory(first.sums, second.sums)


def test_rows_in_flight_are_refused() -> None:
    with engine(kept_envs.Counts, num_workers=2, batch_size=2) as envs:
        envs.reset(seed=1)
        kept = envs.save()
        envs.send(np.array([1]), [2])
        for call in (envs.save, functools.partial(envs.load, kept), envs.state_dict):
            with pytest.raises(AlreadyPendingCallError, match="1 environments are in flight"):
                call()
        envs.recv(count=1)
        envs.load(kept)


def longer(length: int) -> Any:
    env = gymnasium.make("CartPole-v1")
    return TimeLimit(env, length) if length else env


BAD: dict[str, tuple[Any, str]] = {
    "too few": (lambda kept: kept[:3], "3 snapshots for 4 environments"),
    "none": (lambda kept: None, "load wants what save"),
    "bytes": (lambda kept: [*kept[:3], b"xy"], r"snapshots\[3\] is a bytes"),
    "truncated": (lambda kept: [*kept[:3], replace(kept[3], body=kept[3].body[:-9])], r"\[3\]: its bytes are damaged"),
    "format": (lambda kept: [replace(one, format=99) for one in kept], "its format is 99"),
    "version": (
        lambda kept: [*kept[:3], kept[3].having(kind=replace(kept[3].row.kind, versions=(("gymnasium", "0.1"),)))],
        "the snapshot does not fit: it was saved with gymnasium 0.1",
    ),
    "environment": (lambda kept: of_another(lambda: gymnasium.make("Acrobot-v1")), "it is of Acrobot-v1, and "),
    "arguments": (
        lambda kept: of_another(lambda: gymnasium.make("CartPole-v1", sutton_barto_reward=True)), "sutton_barto_reward=True",
    ),
    "wrappers": (lambda kept: of_another(lambda: longer(9)), "stack is TimeLimit / TimeLimit / .*environment's is Ti"),
}  # fmt: skip


def of_another(env_fn: Any) -> Any:
    with engine(env_fn, num_workers=0) as envs:
        envs.reset(seed=0)
        return envs.save(verify=False)


@pytest.mark.parametrize("case", BAD)
def test_what_does_not_fit_is_refused_before_anything_is_touched(case: str) -> None:
    spoil, text = BAD[case]
    with engine(lambda: longer(0), num_workers=2) as envs, engine(lambda: longer(0), num_workers=0) as twin:
        for one in (envs, twin):
            one.reset(seed=3)
            one.step(np.array([0, 1, 0, 1]))
        kept = envs.save(verify=False)
        for one in (envs, twin):
            one.step(np.array([1, 1, 0, 1]))
        with pytest.raises(SnapshotMismatch, match=text):
            envs.load(spoil(list(kept)))
        for number in range(30):
            actions = np.array([0, 1, 1, 0]) ^ (number & 1)
            assert_identical(envs.step(actions), twin.step(actions))


def test_the_first_save_says_what_is_not_exact_and_verify_false_does_not_look() -> None:
    with engine(kept_envs.InC, num_workers=2) as envs:
        envs.reset(seed=0)
        with pytest.raises(NotRestorable, match=r"kept_envs.InC cannot be saved: .* goes on differently"):
            envs.save()
        assert len(envs.save(verify=False)) == ROWS
        envs.step(np.zeros(ROWS, np.int64))


def test_a_failed_row_is_not_saved_and_a_load_brings_it_back() -> None:
    def fragile() -> Any:
        env = kept_envs.Counts()
        env.action_space = gymnasium.spaces.Discrete(10)
        return env

    with engine(fragile, num_workers=2) as envs:
        envs.reset(seed=0)
        envs.step(np.array([1, 2, 1, 2]))
        kept = envs.save(verify=False)
        envs.exec_func(setattr, [1], "more", None)
        with pytest.raises(TypeError):
            envs.step(np.zeros(ROWS, np.int64))
        with pytest.raises(EnvFailed):
            envs.save()
        envs.load(kept)
        assert envs.step(np.ones(ROWS, np.int64))[0].ravel().tolist() == [4, 5, 4, 5]


class Falls(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Raises at action 8, and kills its worker at 9."""

    def __init__(self) -> None:
        super().__init__(kept_envs.Counts())
        self.action_space = gymnasium.spaces.Discrete(10)

    def step(self, action: Any) -> Any:
        if action == 8:
            raise ConnectionError("told to")
        if action == 9:
            os.kill(os.getpid(), signal.SIGKILL)
        return self.env.step(action)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("fault", "lost"), [(8, [2]), (9, [2, 3])])
def test_a_restarted_row_goes_on_from_a_loaded_snapshot(fault: int, lost: list[int], mode: str) -> None:
    with engine(Falls, mode, num_workers=2, on_failure="restart") as envs, engine(Falls, mode, num_workers=0) as twin:
        envs.reset(seed=1)
        for _ in range(3):
            envs.step(np.ones(ROWS, np.int64))
        kept = envs.save(verify=False)
        twin.load(kept)
        envs.step(np.ones(ROWS, np.int64))
        actions = np.ones(ROWS, np.int64)
        actions[2] = fault
        *_, infos = envs.step(actions)
        back = np.flatnonzero(infos["restarted"])
        assert back.tolist() == lost
        assert_identical(list(envs.load([kept[row] for row in back], env_id=back)), [kept[row].observation for row in back])
        for number in range(3):
            found, wanted = envs.step(np.full(ROWS, number)), twin.step(np.full(ROWS, number))
            for field in range(4):
                assert_identical(found[field][lost], wanted[field][lost], f"step {number}, field {field}")


def test_rows_of_the_living_are_saved_loaded_and_called_while_another_worker_is_dead() -> None:
    def process_of(env: Any) -> int:
        return os.getpid()

    with engine(num_workers=2) as envs:
        envs.reset(seed=0)
        kept = envs.save()
        pid = envs.exec_func(process_of, [3])[3]
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(WorkerDied):
            envs.step(np.zeros(ROWS, np.int64))
        assert envs.exec_func(process_of, [0, 1])[:2] != (pid, pid)
        with pytest.raises(EnvFailed, match=r"envs \[2, 3\] failed earlier"):
            envs.exec_func(process_of, [1, 2])
        assert_identical(envs.load(kept[:1], [0]), kept[0].observation[None])
        with pytest.raises(EnvFailed):
            envs.load(kept)
        assert_identical(envs.save([0])[0].observation, kept[0].observation)
        envs.reset(seed=1, options={"reset_mask": np.array([False, False, True, True])})
        assert_identical(envs.load(kept), np.stack([one.observation for one in kept]))


def test_the_rate_is_of_the_steps_that_were_made_here() -> None:
    with engine(num_workers=0) as envs:
        envs.reset(seed=0)
        envs.step(np.zeros(ROWS, np.int64))
        state = envs.state_dict()
        state["counters"] = (10**9, *state["counters"][1:])
        envs.load_state_dict(state)
        assert envs.stats()["steps"] == 10**9
        assert envs.stats()["steps_per_second"] < 10**6
        envs.load_state_dict(state)
        envs.step(np.zeros(ROWS, np.int64))
        assert envs.stats()["steps"] == 10**9 + ROWS
        assert 0 < envs.stats()["steps_per_second"] < 10**6
