"""Tests of saving and loading: restored state, damaged snapshots, and programs that resume or search."""

from __future__ import annotations

import contextlib
import copy
import functools
import os
import pickle
import random
import re
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import gymnasium
import kept_envs
import numpy as np
import pytest
from gymnasium.error import AlreadyPendingCallError, ResetNeeded
from gymnasium.wrappers import FrameStackObservation, NormalizeObservation, RecordEpisodeStatistics, TimeLimit

import vecenv
from vecenv.errors import EnvFailed, NotRestorable, SnapshotMismatch, WorkerDied
from vecenv.testing import FaultyEnv, assert_identical

# --- ``save``, ``load`` and state dicts of process engines are exact and complete, or raise -------

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


def make_wrapped_cartpole() -> Any:
    """Return CartPole in wrappers that have state."""
    env: Any = RecordEpisodeStatistics(gymnasium.make("CartPole-v1"))
    return TimeLimit(FrameStackObservation(NormalizeObservation(env), 3), 30)


def open_envs(env_fn: Any = make_wrapped_cartpole, mode: str = "NextStep", **options: Any) -> Any:
    return contextlib.closing(vecenv.AsyncVectorEnv([env_fn] * ROWS, autoreset_mode=mode, **options))


def advance(envs: Any, mode: str, actions: Any) -> Any:
    """Take a step and, in Disabled mode, reset the rows that ended. Return both results (the reset's may be ``None``)."""
    step = envs.step(actions)
    reset = None
    ended = step[4].get("env_done", step[2] | step[3])
    if mode == "Disabled" and ended.any():
        reset = envs.reset(options={"reset_mask": ended})
    return (*step[:4], remove_episode_times(step[4])), reset


def remove_episode_times(infos: Any) -> Any:
    """Return the infos without ``episode``, which contains times."""
    if isinstance(infos, dict):
        return {key: remove_episode_times(value) for key, value in infos.items() if key not in ("episode", "_episode")}
    return infos


@pytest.mark.sampled(4)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", ENGINES)
def test_loaded_snapshots_continue_like_the_saved_engine(name: str, mode: str) -> None:
    with open_envs(mode=mode, **ENGINES[name]) as envs, open_envs(mode=mode, num_workers=0) as other:
        envs.reset(seed=1)
        other.reset(seed=9)
        envs.action_space.seed(5)
        for _ in range(23):
            step, reset = advance(envs, mode, envs.action_space.sample())
        expected = copy.deepcopy((reset or step)[0])
        snapshots = pickle.loads(pickle.dumps(envs.save(verify=mode == "NextStep")))
        assert_identical(other.load(snapshots), expected)
        for number in range(40):
            actions = envs.action_space.sample()
            assert_identical(advance(other, mode, actions), advance(envs, mode, actions), f"step {number}")


@pytest.mark.parametrize("saved_mode", ["NextStep", "Disabled"])
def test_ended_episode_stays_ended_after_load(saved_mode: str) -> None:
    make = functools.partial(open_envs, kept_envs.CountingEnv, num_workers=0)
    with make(saved_mode) as saved, make("Disabled") as envs:
        saved.reset(seed=1)
        actions = np.array([2] + [0] * (ROWS - 1))  # the first episode ends first
        while not (ended := saved.step(actions)[2]).any():
            pass
        snapshots = saved.save()
        assert ["reset due" in repr(snapshot) for snapshot in snapshots] == ended.tolist()
        envs.load(snapshots)
        with pytest.raises(ResetNeeded, match=f"env {np.flatnonzero(ended)[0]} was stepped after the end"):
            envs.step(actions)
        envs.load(snapshots)
        envs.reset(options={"reset_mask": ended})
        envs.step(actions)


def test_load_state_dict_restores_rows_statistics_and_generators() -> None:
    with open_envs(num_workers=2) as envs:
        envs.reset(seed=1)
        envs.action_space.seed(3)
        for _ in range(10):
            envs.step(envs.action_space.sample())
        state = pickle.loads(pickle.dumps(envs.state_dict()))
        steps = envs.stats()["steps"]
        all_actions = [envs.action_space.sample() for _ in range(40)]
        expected = [advance(envs, "NextStep", actions) for actions in all_actions]
        envs.load_state_dict(state)
        assert envs.stats()["steps"] == steps
        assert_identical([envs.action_space.sample() for _ in range(40)], all_actions)
        assert_identical([advance(envs, "NextStep", actions) for actions in all_actions], expected)


def test_loaded_environment_shares_its_arrays_like_the_saved_one() -> None:
    with open_envs(kept_envs.ArraysEnv, num_workers=0) as envs:
        envs.reset(seed=1)
        snapshots = envs.save(verify=False)
        envs.load(snapshots[0])
        for env in envs.call("unwrapped"):
            assert env.alias is env.sums is env.in_dict["sums"][0]
            assert (env.zero_dim.shape, env.big_endian.dtype.str, type(env.number)) == ((), ">i2", np.float32)
        first, second = envs.call("unwrapped")[:2]
        assert not np.shares_memory(first.sums, second.sums)


@pytest.mark.parametrize("name", ["in process", "two workers"])
def test_environments_saved_before_their_first_reset_are_loaded_as_new(name: str) -> None:
    with open_envs(**ENGINES[name]) as envs, open_envs(num_workers=0) as other:
        snapshots, state = envs.save(), envs.state_dict()
        assert [snapshot.row.used for snapshot in snapshots] == [False] * ROWS
        assert envs.load(snapshots) is None
        assert other.load_state_dict(state) is None
        assert_identical(other.reset(seed=3), envs.reset(seed=3))


def test_save_and_load_with_rows_in_flight_raise() -> None:
    with open_envs(kept_envs.CountingEnv, num_workers=2, batch_size=2) as envs:
        envs.reset(seed=1)
        snapshots = envs.save()
        envs.send(np.array([1]), [2])
        for call in (envs.save, functools.partial(envs.load, snapshots), envs.state_dict):
            with pytest.raises(AlreadyPendingCallError, match="1 environments are in flight"):
                call()
        envs.recv(count=1)
        envs.load(snapshots)


def make_cartpole(length: int) -> Any:
    env = gymnasium.make("CartPole-v1")
    return TimeLimit(env, length) if length else env


UNSUITABLE: dict[str, tuple[Any, str]] = {
    "too few": (lambda snapshots: snapshots[:3], "3 snapshots for 4 environments"),
    "none": (lambda snapshots: None, r"load\(\) needs snapshots from save"),
    "bytes": (lambda snapshots: [*snapshots[:3], b"xy"], r"snapshots\[3\] is a bytes"),
    "truncated": (
        lambda snapshots: [*snapshots[:3], replace(snapshots[3], body=snapshots[3].body[:-9])],
        r"\[3\]: its bytes are damaged",
    ),
    "format": (lambda snapshots: [replace(snapshot, format=99) for snapshot in snapshots], "its format is 99"),
    "version": (
        lambda snapshots: [*snapshots[:3], with_gymnasium_version(snapshots[3], "0.1")],
        "the snapshot does not fit: it was saved with gymnasium 0.1",
    ),
    "environment": (lambda snapshots: save_new(lambda: gymnasium.make("Acrobot-v1")), "it is of Acrobot-v1, and "),
    "arguments": (
        lambda snapshots: save_new(lambda: gymnasium.make("CartPole-v1", sutton_barto_reward=True)),
        "sutton_barto_reward=True",
    ),
    "wrappers": (
        lambda snapshots: save_new(lambda: make_cartpole(9)), "stack is TimeLimit / TimeLimit / .*environment's is Ti",
    ),
}  # fmt: skip


def with_gymnasium_version(snapshot: Any, version: str) -> Any:
    return snapshot.having(kind=replace(snapshot.row.kind, versions=(("gymnasium", version),)))


def save_new(env_fn: Any) -> Any:
    """Return snapshots of new environments."""
    with open_envs(env_fn, num_workers=0) as envs:
        envs.reset(seed=0)
        return envs.save(verify=False)


@pytest.mark.parametrize("case", UNSUITABLE)
def test_load_of_unsuitable_snapshots_raises_and_changes_nothing(case: str) -> None:
    make_unsuitable, text = UNSUITABLE[case]
    env_fn = functools.partial(make_cartpole, 0)
    with open_envs(env_fn, num_workers=2) as envs, open_envs(env_fn, num_workers=0) as reference:
        for engine in (envs, reference):
            engine.reset(seed=3)
            engine.step(np.array([0, 1, 0, 1]))
        snapshots = envs.save(verify=False)
        for engine in (envs, reference):
            engine.step(np.array([1, 1, 0, 1]))
        with pytest.raises(SnapshotMismatch, match=text):
            envs.load(make_unsuitable(list(snapshots)))
        for number in range(30):
            actions = np.array([0, 1, 1, 0]) ^ (number & 1)
            assert_identical(envs.step(actions), reference.step(actions))


def test_first_save_verifies_unless_verify_is_false() -> None:
    with open_envs(kept_envs.LibcGeneratorEnv, num_workers=2) as envs:
        envs.reset(seed=0)
        with pytest.raises(NotRestorable, match=r"kept_envs.LibcGeneratorEnv cannot be saved: .* continues differently"):
            envs.save()
        assert len(envs.save(verify=False)) == ROWS
        envs.step(np.zeros(ROWS, np.int64))


def test_save_of_a_failed_row_raises_and_load_restores_the_row() -> None:
    def make_env() -> Any:
        env = kept_envs.CountingEnv()
        env.action_space = gymnasium.spaces.Discrete(10)
        return env

    with open_envs(make_env, num_workers=2) as envs:
        envs.reset(seed=0)
        envs.step(np.array([1, 2, 1, 2]))
        snapshots = envs.save(verify=False)
        envs.exec_func(setattr, [1], "observation_offset", None)
        with pytest.raises(TypeError):
            envs.step(np.zeros(ROWS, np.int64))
        with pytest.raises(EnvFailed):
            envs.save()
        envs.load(snapshots)
        assert envs.step(np.ones(ROWS, np.int64))[0].ravel().tolist() == [4, 5, 4, 5]


class FaultyByAction(gymnasium.Wrapper[Any, Any, Any, Any]):
    """An environment that raises at action 8 and kills its worker at action 9."""

    def __init__(self) -> None:
        super().__init__(kept_envs.CountingEnv())
        self.action_space = gymnasium.spaces.Discrete(10)

    def step(self, action: Any) -> Any:
        if action == 8:
            raise ConnectionError("this action raises")
        if action == 9:
            os.kill(os.getpid(), signal.SIGKILL)
        return self.env.step(action)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("fault", "lost"), [(8, [2]), (9, [2, 3])])
def test_load_into_restarted_rows_continues_exactly(fault: int, lost: list[int], mode: str) -> None:
    with (
        open_envs(FaultyByAction, mode, num_workers=2, on_failure="restart") as envs,
        open_envs(FaultyByAction, mode, num_workers=0) as reference,
    ):
        envs.reset(seed=1)
        for _ in range(3):
            envs.step(np.ones(ROWS, np.int64))
        snapshots = envs.save(verify=False)
        reference.load(snapshots)
        envs.step(np.ones(ROWS, np.int64))
        actions = np.ones(ROWS, np.int64)
        actions[2] = fault
        *_, infos = envs.step(actions)
        restarted = np.flatnonzero(infos["restarted"])
        assert restarted.tolist() == lost
        observations = envs.load([snapshots[row] for row in restarted], env_id=restarted)
        assert_identical(list(observations), [snapshots[row].observation for row in restarted])
        for number in range(3):
            result, expected = envs.step(np.full(ROWS, number)), reference.step(np.full(ROWS, number))
            for field in range(4):
                assert_identical(result[field][lost], expected[field][lost], f"step {number}, field {field}")


@pytest.mark.parametrize("on_failure", ["raise", "restart"])
def test_load_raises_if_a_worker_dies_after_its_reply(monkeypatch: pytest.MonkeyPatch, on_failure: str) -> None:
    with open_envs(kept_envs.CountingEnv, num_workers=2, on_failure=on_failure) as envs:
        envs.reset(seed=1)
        snapshots = envs.save(verify=False)
        envs.step(np.ones(ROWS, np.int64))
        engine, wait = envs._driver, envs._driver.pool.wait
        worker = engine.pool.processes[0]

        def wait_for_reply_and_death(deadline: float | None) -> Any:
            if 0 in engine.failure_log.failed and worker.death is None:  # not during the check before the load
                assert select.select([worker.channel.fd], [], [], 10)[0]
                os.kill(worker.pid, signal.SIGKILL)
                while not worker.has_ended():
                    time.sleep(0.001)
            return wait(deadline)

        monkeypatch.setattr(engine.pool, "wait", wait_for_reply_and_death)
        envs.send(np.array([1]), [3])
        with pytest.raises(EnvFailed, match=r"env 0 failed earlier .*died") as caught:
            envs.load([snapshots[0], snapshots[2]], env_id=[0, 2])
        assert (caught.value.envs, caught.value.loaded_rows) == ((0,), (2,))
        assert envs.recv(count=1)[4]["env_id"].tolist() == [3]
        envs.reset(options={"reset_mask": np.array([True, True, False, False])})
        assert_identical(envs.load(snapshots), np.stack([snapshot.observation for snapshot in snapshots]))


def test_save_and_load_of_live_rows_work_after_another_worker_died() -> None:
    def get_pid(env: Any) -> int:
        return os.getpid()

    with open_envs(num_workers=2) as envs:
        envs.reset(seed=0)
        snapshots = envs.save()
        pid = envs.exec_func(get_pid, [3])[3]
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(WorkerDied):
            envs.step(np.zeros(ROWS, np.int64))
        assert pid not in envs.exec_func(get_pid, [0, 1])
        with pytest.raises(EnvFailed, match="envs 2-3 failed earlier"):
            envs.exec_func(get_pid, [1, 2])
        assert_identical(envs.load(snapshots[:1], [0]), snapshots[0].observation[None])
        with pytest.raises(EnvFailed):
            envs.load(snapshots)
        assert_identical(envs.save([0])[0].observation, snapshots[0].observation)
        envs.reset(seed=1, options={"reset_mask": np.array([False, False, True, True])})
        assert_identical(envs.load(snapshots), np.stack([snapshot.observation for snapshot in snapshots]))


def test_error_of_a_worker_that_dies_in_the_verification_names_verify() -> None:
    def build() -> Any:
        return FaultyEnv(gymnasium.make("CartPole-v1"), "segfault", step=2)

    with closing(vecenv.AsyncVectorEnv([build], num_workers=1)) as envs:
        envs.reset(seed=0)
        with pytest.raises(WorkerDied, match="died during save") as caught:
            envs.save()
        assert "verify=False" in "".join(caught.value.__notes__)
        envs.reset(seed=0)
        envs.save(verify=False)


class RaiseAfterUseEnv(kept_envs.CountingEnv):
    """An environment that raises in ``close()`` once it has been stepped."""

    def close(self) -> None:
        if self.total:
            raise OSError("the device is gone")


@pytest.mark.parametrize("num_workers", [0, 1])
def test_save_with_environments_that_raise_in_close_only_warns(num_workers: int) -> None:
    with open_envs(RaiseAfterUseEnv, num_workers=num_workers) as envs:
        envs.reset(seed=1)
        with pytest.warns(UserWarning, match=r"a copy of envs 0-3, built for a save, raised in close\(\): OSError"):
            assert len(envs.save()) == ROWS
        envs.step(np.zeros(ROWS, int))


def test_steps_per_second_excludes_steps_of_a_loaded_state() -> None:
    with open_envs(num_workers=0) as envs:
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


# --- Damaged or unsuitable snapshots raise SnapshotMismatch, and nothing changes -----------------

ACTIONS = np.array([1, 2])


class SizedEnv(kept_envs.CountingEnv):
    """An environment with observations of a given size. It has no spec, which would record the size."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.observation_space = gymnasium.spaces.Box(-1e12, 1e12, (size,), np.float64)

    def observation_offset(self, action: int) -> float:
        return float(self.observation_space.shape[0])  # type: ignore[index]

    def reset(self, **arguments: Any) -> Any:
        super().reset(**arguments)
        return np.zeros(self.observation_space.shape), {}

    def step(self, action: Any) -> Any:
        observation, *rest = super().step(action)
        return np.full(self.observation_space.shape, observation[0]), *rest


def open_pair(env_fn: Callable[[], Any] = kept_envs.GeneratorsEnv, num_workers: int = 0) -> Any:
    return closing(vecenv.AsyncVectorEnv([env_fn] * 2, num_workers=num_workers))


def reset_and_step(envs: Any) -> Any:
    envs.reset(seed=2)
    envs.action_space.seed(3)
    envs.step(ACTIONS)
    return envs


def iter_damaged(intact: bytes, every_byte: bool) -> Any:
    """Yield (position, damaged bytes), with each byte changed in turn, or each of 10,000 random bits flipped in turn."""
    rng = random.Random(5)
    for number in range(len(intact) if every_byte else 10_000):
        position = number if every_byte else rng.randrange(len(intact))
        difference = rng.randrange(1, 256) if every_byte else 1 << rng.randrange(8)
        yield position, intact[:position] + bytes([intact[position] ^ difference]) + intact[position + 1 :]


@pytest.mark.long
@pytest.mark.parametrize("every_byte", [True, False], ids=["every byte", "10,000 bits"])
@pytest.mark.parametrize("method", ["save", "state_dict"])
def test_load_of_damaged_bytes_raises_or_has_the_result_of_the_intact_ones(method: str, every_byte: bool) -> None:
    with open_pair(kept_envs.CountingEnv) as envs, open_pair(kept_envs.CountingEnv) as reference:
        reset_and_step(envs)
        reset_and_step(reference)
        save, load = (envs.save, envs.load) if method == "save" else (envs.state_dict, envs.load_state_dict)
        intact = pickle.dumps(save())
        expected = load(pickle.loads(intact))
        sealed_start = intact.index(b"_unsealed") + 24  # after the rest of this name and the opcodes before the sealed bytes
        num_pickle_errors = 0
        for position, damaged in iter_damaged(intact, every_byte):
            try:
                unpickled = pickle.loads(damaged)
            except SnapshotMismatch:
                continue
            except Exception:  # raised by pickle itself, for one of its few bytes around the sealed ones
                num_pickle_errors += 1
                assert position <= sealed_start or position >= len(intact) - 8, f"byte {position} of {len(intact)}"
                continue
            try:
                result = load(unpickled)
            except SnapshotMismatch:
                continue
            assert_identical(result, expected, f"byte {position} of {len(intact)}")  # this byte has no effect
        for _ in range(30):
            assert_identical(envs.step(ACTIONS), reference.step(ACTIONS))
        assert num_pickle_errors < 200 or not every_byte


@pytest.mark.parametrize("part", ["body", "rest"])
def test_require_whole_raises_for_each_damaged_byte(part: str) -> None:
    with open_pair(kept_envs.CountingEnv) as envs:
        reset_and_step(envs)
        snapshot = envs.save()[0]
    for _, damaged in iter_damaged(getattr(snapshot, part), every_byte=True):
        with pytest.raises(SnapshotMismatch):
            replace(snapshot, **{part: damaged}).require_whole()


DAMAGED_SNAPSHOTS: dict[str, Callable[[Any], Any]] = {
    "another body": lambda snapshot: replace(snapshot, body=pickle.dumps("nothing")),
    "another rest": lambda snapshot: replace(snapshot, rest=pickle.dumps(None)),
    "no rest": lambda snapshot: replace(snapshot, rest=None),
    "text for checksums": lambda snapshot: replace(snapshot, checksums=("a", "b")),
    "another body, with its checksum": lambda snapshot: type(snapshot).of(snapshot.row.kind, pickle.dumps(["x"])),
    "no kind": lambda snapshot: type(snapshot).of(None, snapshot.body),
    "another observation": lambda snapshot: snapshot.having(observation=np.zeros((3, 3))),
    "no observation": lambda snapshot: snapshot.having(observation=None),
}
DAMAGED_STATES: dict[str, dict[str, Any]] = {
    "text in counters": {"counters": ("a", "b", "c")},
    "too few counters": {"counters": (1, 2)},
    "negative counters": {"counters": (-1, 2, 0)},
    "no counters": {"counters": None},
    "text in seeds": {"seeds": {"entropy": "x"}},
    "no seeds": {"seeds": None},
    "too few spaces": {"spaces": [None]},
    "text in spaces": {"spaces": ["x", "y", "z", "w"]},
    "another generator": {"spaces": [[({"bit_generator": "MT19937"}, None)], None, None, None]},
    "no snapshots": {"snapshots": None},
    "an array of num_envs": {"num_envs": np.array([2, 2])},
}


@pytest.mark.sampled(8)
@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize("case", DAMAGED_SNAPSHOTS)
def test_load_of_a_damaged_snapshot_raises_and_changes_nothing(case: str, num_workers: int) -> None:
    with open_pair(num_workers=num_workers) as envs:
        reset_and_step(envs)
        snapshots = envs.save(verify=False)
        expected = [envs.step(ACTIONS) for _ in range(2)]
        envs.load(snapshots)
        with pytest.raises(SnapshotMismatch):
            envs.load([snapshots[0], DAMAGED_SNAPSHOTS[case](snapshots[1])])
        assert_identical([envs.step(ACTIONS) for _ in range(2)], expected)


@pytest.mark.sampled(5)
@pytest.mark.parametrize("case", DAMAGED_STATES)
def test_load_of_a_damaged_state_dict_raises_and_changes_nothing(case: str) -> None:
    with open_pair() as envs:
        reset_and_step(envs)
        state = envs.state_dict(verify=False)
        expected = envs.step(ACTIONS), envs.action_space.sample()
        envs.load_state_dict(state)
        with pytest.raises(SnapshotMismatch):
            envs.load_state_dict({**state, **DAMAGED_STATES[case]})
        assert_identical((envs.step(ACTIONS), envs.action_space.sample()), expected)


@pytest.mark.parametrize("num_workers", [0, 1])
def test_load_of_a_snapshot_of_another_shape_raises_and_changes_nothing(num_workers: int) -> None:
    with open_pair(lambda: SizedEnv(2)) as small, open_pair(lambda: SizedEnv(3), num_workers=num_workers) as large:
        snapshots = reset_and_step(small).save(verify=False)
        reset_and_step(large)
        own_snapshots = large.save(verify=False)
        expected = large.step(ACTIONS)
        large.load(own_snapshots)
        with pytest.raises(SnapshotMismatch, match=r"\(2,\).*\(3,\)"):
            large.load(snapshots)
        assert_identical(large.step(ACTIONS), expected)


# --- ``examples/ppo.py --resume`` has the same results after a kill at any moment ---------------

PPO = Path(__file__).parents[2] / "examples" / "ppo.py"
STEPS = 1280
OPTIONS = [
    "--num-envs=4", "--rollout=32", f"--steps={STEPS}", "--epochs=1", "--minibatches=1", "--hidden=8", "--backend=serial",
    "--target=inf", "--resume",
]  # fmt: skip


def start_run(folder: Path) -> subprocess.Popen[bytes]:
    command = [sys.executable, str(PPO), *OPTIONS, str(folder / "run"), "--out", str(folder / "out")]
    env = {**os.environ, "JAX_PLATFORMS": "cpu"}
    return subprocess.Popen(command, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def read_results(folder: Path) -> dict[str, Any]:
    """Return the checkpoint of a run, but without the state of its environments, which contains times of episodes."""
    with (folder / "run" / "ppo.pickle").open("rb") as file:
        state = pickle.load(file)
    del state["envs"]
    return dict(state)


def count_steps(folder: Path) -> int:
    """Return the number of steps at the checkpoint, 0 without a checkpoint."""
    try:
        return int(read_results(folder)["steps"])
    except FileNotFoundError:
        return 0


@pytest.mark.long
@pytest.mark.timeout(600)
def test_run_resumed_after_a_kill_equals_an_uninterrupted_run(tmp_path: Path) -> None:
    """A stopped run leaves its files as a SIGKILL would. It continues, and another run resumes from a copy of the files."""
    for number in range(3):
        original, copied = tmp_path / f"original {number}", tmp_path / f"copied {number}"
        run = start_run(original)
        while not count_steps(original) and run.poll() is None:
            time.sleep(0.002)
        run.send_signal(signal.SIGSTOP)
        shutil.copytree(original, copied)
        run.send_signal(signal.SIGCONT)
        if count_steps(copied) < STEPS:
            break
        run.wait()
    else:
        pytest.skip("each run ended before it could be stopped")
    resumed = start_run(copied)
    assert [run.wait(), resumed.wait()] == [0, 0]
    assert count_steps(original) == STEPS
    assert_identical(read_results(copied), read_results(original))


STATE_PAGE = Path(__file__).parents[2] / "docs" / "state.md"
INTERRUPT_PROGRAM = """
import os, signal, vecenv
num_steps, step = 0, vecenv.AsyncVectorEnv.step
def interrupt_1000th_step(self, actions):
    global num_steps
    num_steps += 1
    if num_steps == 1000:
        os.kill(os.getpid(), signal.SIGINT)
    return step(self, actions)
vecenv.AsyncVectorEnv.step = interrupt_1000th_step
"""


@pytest.mark.long
def test_program_that_saves_on_ctrl_c_resumes_with_the_same_output(tmp_path: Path) -> None:
    """The program comes from ``docs/state.md``."""
    blocks = re.findall(r"```python\n(.*?)```", STATE_PAGE.read_text(), re.DOTALL)
    (program,) = (block for block in blocks if "SIGINT" in block)

    def run_program(source: str, folder: str) -> str:
        (tmp_path / folder).mkdir(exist_ok=True)
        script = tmp_path / folder / "program.py"
        script.write_text(source)
        command = [sys.executable, str(script)]
        return subprocess.run(command, cwd=script.parent, capture_output=True, text=True, timeout=250, check=True).stdout

    expected = run_program(program, "whole")
    assert run_program(INTERRUPT_PROGRAM + program, "interrupted") == "saved; run it again to go on\n"
    assert run_program(program, "interrupted") == expected != ""
    assert not (tmp_path / "interrupted" / "run.pickle").exists()


# --- ``examples/tree_search.py`` finds the same tree by snapshots and by replay -----------------

TREE_SEARCH = Path(__file__).parents[2] / "examples" / "tree_search.py"


@pytest.mark.long
def test_tree_search_by_snapshots_equals_replay_with_fewer_steps() -> None:
    options = ["CartPole-v1", "--moves=20", "--expansions=4", "--horizon=8", "--num-workers=2"]
    options.append("--by=snapshots,replay,frozen")
    command = [sys.executable, TREE_SEARCH, *options]
    output = subprocess.run(command, check=True, capture_output=True, text=True, timeout=300).stdout
    numbers = re.findall(r"([\d,]+) environment steps", output)
    with_snapshots, with_replay, with_copies = (int(number.replace(",", "")) for number in numbers)
    assert re.search(r"snapshots +20 moves, score 20:", output)
    assert output.count("the same moves") == 2
    assert with_snapshots <= 20 * 4 * 9 * 2 < with_replay
    assert with_copies == with_snapshots
