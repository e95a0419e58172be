"""Saving and loading: restored state, damaged files, and programs that resume or search."""

from __future__ import annotations

import contextlib
import functools
import os
import pickle
import random
import re
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
from gymnasium.error import AlreadyPendingCallError
from gymnasium.wrappers import FrameStackObservation, NormalizeObservation, RecordEpisodeStatistics, TimeLimit

import vecenv
from vecenv.errors import EnvFailed, NotRestorable, SnapshotMismatch, WorkerDied
from vecenv.testing import assert_identical

# --- ``save``, ``load`` and state dicts of process engines: exact, complete, refused if they do not fit

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


def wrapped_cartpole() -> Any:
    """Return CartPole under wrappers that have state."""
    env: Any = RecordEpisodeStatistics(gymnasium.make("CartPole-v1"))
    return TimeLimit(FrameStackObservation(NormalizeObservation(env), 3), 30)


def engine(env_fn: Any = wrapped_cartpole, mode: str = "NextStep", **options: Any) -> Any:
    return contextlib.closing(vecenv.AsyncVectorEnv([env_fn] * ROWS, autoreset_mode=mode, **options))


def advanced(envs: Any, mode: str, actions: Any) -> Any:
    """Make a step and, in Disabled mode, reset the finished rows."""
    step = envs.step(actions)
    again = None
    if mode == "Disabled" and (over := step[4].get("env_done", step[2] | step[3])).any():
        again = envs.reset(options={"reset_mask": over})
    return (*step[:4], without_clock(step[4])), again


def without_clock(infos: Any) -> Any:
    """Remove ``episode``, which holds the time by the clock."""
    if isinstance(infos, dict):
        return {key: without_clock(value) for key, value in infos.items() if key not in ("episode", "_episode")}
    return infos


@pytest.mark.sampled(4)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", ENGINES)
def test_another_engine_continues_like_the_first(name: str, mode: str) -> None:
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


def test_state_dict_is_complete() -> None:
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


def test_shared_arrays_stay_shared() -> None:
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
    "none": (lambda kept: None, r"load\(\) needs snapshots from save"),
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
def test_foreign_snapshots_are_refused_before_any_change(case: str) -> None:
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


def test_first_save_verifies_unless_verify_is_false() -> None:
    with engine(kept_envs.InC, num_workers=2) as envs:
        envs.reset(seed=0)
        with pytest.raises(NotRestorable, match=r"kept_envs.InC cannot be saved: .* continues differently"):
            envs.save()
        assert len(envs.save(verify=False)) == ROWS
        envs.step(np.zeros(ROWS, np.int64))


def test_failed_row_is_not_saved_and_load_recovers_it() -> None:
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


class FaultyByAction(gymnasium.Wrapper[Any, Any, Any, Any]):
    """An environment that raises at action 8, and kills its worker at 9."""

    def __init__(self) -> None:
        super().__init__(kept_envs.Counts())
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
def test_restarted_row_continues_from_a_loaded_snapshot(fault: int, lost: list[int], mode: str) -> None:
    with (
        engine(FaultyByAction, mode, num_workers=2, on_failure="restart") as envs,
        engine(FaultyByAction, mode, num_workers=0) as twin,
    ):
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


def test_live_rows_can_be_saved_while_another_worker_is_dead() -> None:
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
        with pytest.raises(EnvFailed, match="envs 2-3 failed earlier"):
            envs.exec_func(process_of, [1, 2])
        assert_identical(envs.load(kept[:1], [0]), kept[0].observation[None])
        with pytest.raises(EnvFailed):
            envs.load(kept)
        assert_identical(envs.save([0])[0].observation, kept[0].observation)
        envs.reset(seed=1, options={"reset_mask": np.array([False, False, True, True])})
        assert_identical(envs.load(kept), np.stack([one.observation for one in kept]))


def test_rate_counts_only_steps_of_this_engine() -> None:
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


# --- Damaged or foreign snapshots raise SnapshotMismatch, and nothing changes --------------------

ACTIONS = np.array([1, 2])


class Sized(kept_envs.Counts):
    """An environment that is built with a size, without a spec that would record it."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.observation_space = gymnasium.spaces.Box(-1e12, 1e12, (size,), np.float64)

    def more(self, action: int) -> float:
        return float(self.observation_space.shape[0])  # type: ignore[index]

    def reset(self, **arguments: Any) -> Any:
        super().reset(**arguments)
        return np.zeros(self.observation_space.shape), {}

    def step(self, action: Any) -> Any:
        observation, *rest = super().step(action)
        return np.full(self.observation_space.shape, observation[0]), *rest


def damageable(env_fn: Callable[[], Any] = kept_envs.Generators, num_workers: int = 0) -> Any:
    return closing(vecenv.AsyncVectorEnv([env_fn] * 2, num_workers=num_workers))


def reset_engine(envs: Any) -> Any:
    envs.reset(seed=2)
    envs.action_space.seed(3)
    envs.step(ACTIONS)
    return envs


def damaged_bytes(whole: bytes, every: bool) -> Any:
    """Yield (place, damaged bytes): each byte once, or many bits anywhere."""
    rng = random.Random(5)
    for number in range(len(whole) if every else 10_000):
        place = number if every else rng.randrange(len(whole))
        bit = 1 << rng.randrange(8)
        yield place, whole[:place] + bytes([whole[place] ^ (rng.randrange(1, 256) if every else bit)]) + whole[place + 1 :]


@pytest.mark.long
@pytest.mark.parametrize("every", [True, False], ids=["every byte", "10,000 bits"])
@pytest.mark.parametrize("what", ["save", "state_dict"])
def test_damaged_bytes_are_never_loaded(what: str, every: bool) -> None:
    with damageable(kept_envs.Counts) as envs, damageable(kept_envs.Counts) as twin:
        reset_engine(envs)
        reset_engine(twin)
        save, load = (envs.save, envs.load) if what == "save" else (envs.state_dict, envs.load_state_dict)
        whole = pickle.dumps(save())
        wanted = envs.load(pickle.loads(whole)) if what == "save" else envs.load_state_dict(pickle.loads(whole))
        inside = whole.index(b"_unsealed") + 24  # where the sealed bytes begin
        framing = 0
        for place, spoilt in damaged_bytes(whole, every):
            try:
                found = pickle.loads(spoilt)
            except SnapshotMismatch:
                continue
            except Exception:  # of the few bytes of pickle's own around the sealed ones
                framing += 1
                assert place <= inside or place >= len(whole) - 8, f"byte {place} of {len(whole)}"
                continue
            try:
                result = load(found)
            except SnapshotMismatch:
                continue
            assert_identical(result, wanted, f"byte {place} of {len(whole)}")  # a byte without a meaning
        for _ in range(30):
            assert_identical(envs.step(ACTIONS), twin.step(ACTIONS))
        assert framing < 200 or not every


@pytest.mark.parametrize("part", ["body", "rest"])
def test_each_byte_of_a_snapshot_has_a_checksum(part: str) -> None:
    with damageable(kept_envs.Counts) as envs:
        reset_engine(envs)
        one = envs.save()[0]
    for _, spoilt in damaged_bytes(getattr(one, part), every=True):
        with pytest.raises(SnapshotMismatch):
            replace(one, **{part: spoilt}).require_whole()


SPOILT: dict[str, Callable[[Any], Any]] = {
    "another body": lambda one: replace(one, body=pickle.dumps("nothing")),
    "another rest": lambda one: replace(one, rest=pickle.dumps(None)),
    "no rest": lambda one: replace(one, rest=None),
    "text for checksums": lambda one: replace(one, checksums=("a", "b")),
    "another body, with its checksum": lambda one: type(one).of(one.row.kind, pickle.dumps(["x"])),
    "no kind": lambda one: type(one).of(None, one.body),
    "another observation": lambda one: one.having(observation=np.zeros((3, 3))),
    "no observation": lambda one: one.having(observation=None),
}
STATES: dict[str, dict[str, Any]] = {
    "text in counters": {"counters": ("a", "b", "c")},
    "too few counters": {"counters": (1, 2)},
    "negative counters": {"counters": (-1, 2, 0)},
    "counters": {"counters": None},
    "seeds": {"seeds": {"entropy": "x"}},
    "no seeds": {"seeds": None},
    "too few spaces": {"spaces": [None]},
    "spaces": {"spaces": ["x", "y", "z", "w"]},
    "another generator": {"spaces": [[({"bit_generator": "MT19937"}, None)], None, None, None]},
    "snapshots": {"snapshots": None},
}


@pytest.mark.sampled(8)
@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize("case", SPOILT)
def test_damaged_snapshot_is_refused_and_the_engine_continues(case: str, num_workers: int) -> None:
    with damageable(num_workers=num_workers) as envs:
        reset_engine(envs)
        kept = envs.save(verify=False)
        wanted = [envs.step(ACTIONS) for _ in range(2)]
        envs.load(kept)
        with pytest.raises(SnapshotMismatch):
            envs.load([kept[0], SPOILT[case](kept[1])])
        assert_identical([envs.step(ACTIONS) for _ in range(2)], wanted)


@pytest.mark.sampled(5)
@pytest.mark.parametrize("case", STATES)
def test_damaged_state_dict_is_refused_and_the_engine_continues(case: str) -> None:
    with damageable() as envs:
        reset_engine(envs)
        state = envs.state_dict(verify=False)
        wanted = envs.step(ACTIONS), envs.action_space.sample()
        envs.load_state_dict(state)
        with pytest.raises(SnapshotMismatch):
            envs.load_state_dict({**state, **STATES[case]})
        assert_identical((envs.step(ACTIONS), envs.action_space.sample()), wanted)


@pytest.mark.parametrize("num_workers", [0, 1])
def test_environment_of_another_size_is_refused_before_any_change(num_workers: int) -> None:
    with damageable(lambda: Sized(2)) as small, damageable(lambda: Sized(3), num_workers=num_workers) as large:
        kept = reset_engine(small).save(verify=False)
        reset_engine(large)
        own = large.save(verify=False)
        wanted = large.step(ACTIONS)
        large.load(own)
        with pytest.raises(SnapshotMismatch, match=r"\(2,\).*\(3,\)"):
            large.load(kept)
        assert_identical(large.step(ACTIONS), wanted)


# --- ``examples/ppo.py --resume``: killed at any moment and resumed, it prints the same numbers ----

RESUMED = Path(__file__).parents[2] / "examples" / "ppo.py"
STEPS = 1280
OPTIONS = [
    "--num-envs=4", "--rollout=32", f"--steps={STEPS}", "--epochs=1", "--minibatches=1", "--hidden=8", "--backend=serial",
    "--target=inf", "--resume",
]  # fmt: skip


def start_run(folder: Path) -> subprocess.Popen[bytes]:
    command = [sys.executable, str(RESUMED), *OPTIONS, str(folder / "run"), "--out", str(folder / "out")]
    nothing = subprocess.DEVNULL
    return subprocess.Popen(command, env={**os.environ, "JAX_PLATFORMS": "cpu"}, stdout=nothing, stderr=nothing)


def outcome(folder: Path) -> dict[str, Any]:
    """Return all results of the run, without those that need its environments (their statistics contain times)."""
    with (folder / "run" / "ppo.pickle").open("rb") as file:
        state = pickle.load(file)
    del state["envs"]
    return dict(state)


def steps_of(folder: Path) -> int:
    """Return the number of steps at the checkpoint; 0: there is none."""
    try:
        return int(outcome(folder)["steps"])
    except FileNotFoundError:
        return 0


@pytest.mark.long
@pytest.mark.timeout(600)
def test_killed_run_resumes_like_an_undisturbed_one(tmp_path: Path) -> None:
    """A run is stopped in the middle, its files are copied as SIGKILL would leave them; it and the copy continue."""
    for number in range(3):
        whole, copy = tmp_path / f"whole {number}", tmp_path / f"copy {number}"
        run = start_run(whole)
        while not steps_of(whole) and run.poll() is None:
            time.sleep(0.002)
        run.send_signal(signal.SIGSTOP)
        shutil.copytree(whole, copy)
        run.send_signal(signal.SIGCONT)
        if steps_of(copy) < STEPS:
            break
        run.wait()  # it was over before it was stopped
    resumed = start_run(copy)
    assert [run.wait(), resumed.wait()] == [0, 0]
    assert 0 < steps_of(whole) == STEPS
    assert_identical(outcome(copy), outcome(whole))


STATE_PAGE = Path(__file__).parents[2] / "docs" / "state.md"
INTERRUPTED = """
import os, signal, vecenv
made, step = [], vecenv.AsyncVectorEnv.step
def interrupted(self, actions):
    made.append(actions)
    if len(made) == 1000:
        os.kill(os.getpid(), signal.SIGINT)
    return step(self, actions)
vecenv.AsyncVectorEnv.step = interrupted
"""


@pytest.mark.long
def test_program_that_saves_on_ctrl_c_resumes_undisturbed(tmp_path: Path) -> None:
    """The program is the one in ``docs/state.md``."""
    blocks = re.findall(r"```python\n(.*?)```", STATE_PAGE.read_text(), re.DOTALL)
    (program,) = (block for block in blocks if "SIGINT" in block)

    def run_program(source: str, folder: str) -> str:
        (tmp_path / folder).mkdir(exist_ok=True)
        script = tmp_path / folder / "program.py"
        script.write_text(source)
        command = [sys.executable, str(script)]
        return subprocess.run(command, cwd=script.parent, capture_output=True, text=True, timeout=250, check=True).stdout

    whole = run_program(program, "whole")
    assert run_program(INTERRUPTED + program, "broken") == "saved; run it again to go on\n"
    assert run_program(program, "broken") == whole != ""
    assert not (tmp_path / "broken" / "run.pickle").exists()


# --- ``examples/tree_search.py``: branching from snapshots gives the tree of replaying, with fewer steps

TREE_SEARCH = Path(__file__).parents[2] / "examples" / "tree_search.py"


@pytest.mark.long
def test_searches_agree_and_snapshots_need_fewer_steps() -> None:
    options = ["CartPole-v1", "--moves=20", "--expansions=4", "--horizon=8", "--num-workers=2"]
    options.append("--by=snapshots,replay,frozen")
    ran = subprocess.run([sys.executable, TREE_SEARCH, *options], check=True, capture_output=True, text=True, timeout=300)
    output = ran.stdout
    by_snapshots, by_replay, by_copies = (int(steps.replace(",", "")) for steps in re.findall(r"([\d,]+) steps of", output))
    assert re.search(r"snapshots +20 moves, score 20:", output)
    assert output.count("the same moves") == 2
    assert by_snapshots <= 20 * 4 * 9 * 2 < by_replay
    assert by_copies == by_snapshots

