"""Wrong answers of environments and wrong calls of programs: rows 25 to 29 and 39 to 46 of ``docs/faults.md``."""

from __future__ import annotations

import functools
import gc
import multiprocessing
import os
import re
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.error import AlreadyPendingCallError, ClosedEnvironmentError
from observe import CHEAP, FAULTS, PATIENCE, remaining, report, wait_for
from vandals import Announce, Ledger, Pause, crew, vandal, witness

from vecenv.errors import BusyError, EnvError, EnvFailed, ForkedError, ObservationError
from vecenv.testing.faulty import HUGE_INFO_BYTES, WitnessEnv

pytestmark = FAULTS

Launch = Callable[..., Any]


def worker_pids(envs: Any) -> list[int]:
    return [worker.pid for worker in envs._pool.workers]


class Floats(gym.Env):
    """float32 observations, in a dictionary, so that a field has a name."""

    observation_space = gym.spaces.Dict({"camera": gym.spaces.Box(-1, 1, (4,), np.float32)})
    action_space = gym.spaces.Discrete(2)

    def __init__(self, bad: str | None = None) -> None:
        self.bad = bad

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict]:
        return {"camera": np.zeros(4, np.float32)}, {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict]:
        value: Any = {
            None: np.ones(4, np.float32),
            "shape": np.ones(5, np.float32),
            "scalar": np.float32(1),
            "reshaped": np.ones((2, 2), np.float32),
            "none": None,
            "dtype": np.full(4, 1e300),
        }[self.bad]
        return {"camera": value}, 0.0, False, False, {}


# --- wrong answers ------------------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.parametrize("kind", ["shape", "scalar", "reshaped", "none"])
def test_bad_observation(launch: Launch, kind: str) -> None:
    """Environment, field, what came and what was wanted; never a broadcast, never a NaN."""
    envs = launch([Floats, Floats, Floats, functools.partial(Floats, kind)], num_workers=2)
    envs.reset(seed=1)
    with pytest.raises(ObservationError) as caught:
        envs.step([0] * 4)
    text = report(caught.value)
    assert re.search(r"\benv 3\b", text), text
    assert "camera" in text
    assert re.search(r"\(4,\)", text), text
    got = {"shape": r"\(5,\)", "scalar": r"\(\)|scalar|float", "reshaped": r"\(2, 2\)", "none": r"None|\(\)"}[kind]
    assert re.search(got, text), text
    with pytest.raises(EnvFailed):
        envs.step([0] * 4)
    envs.reset(seed=2)


@pytest.mark.long
def test_bad_observation_dtype(launch: Launch) -> None:
    """float64 numbers that float32 turns into infinity: one warning in the caller, with environment and field."""
    envs = launch([Floats, Floats, Floats, functools.partial(Floats, "dtype")], num_workers=2)
    envs.reset(seed=1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):
            envs.step([0] * 4)
    texts = [str(warning.message) for warning in caught]
    assert len(texts) == 1, texts
    assert re.search(r"\benv 3\b", texts[0]), texts
    assert "camera" in texts[0]
    assert "float64" in texts[0]
    assert "float32" in texts[0]


@pytest.mark.long
def test_bad_observation_dtype_strict(launch: Launch) -> None:
    """With ``strict=True`` the same is an error, and the environment is rebuilt by the next reset."""
    envs = launch([Floats, Floats, Floats, functools.partial(Floats, "dtype")], num_workers=2, strict=True)
    envs.reset(seed=1)
    with pytest.raises(ObservationError, match=r"env 3: .*camera.*float64 values became infinite .*float32"):
        envs.step([0] * 4)
    envs.reset(seed=1)


@CHEAP
def test_too_few_values(launch: Launch, tmp_path: Path) -> None:
    """A step of four values, as Gym once had it: a ValueError that says whose."""
    envs = launch(crew(2, {1: vandal(1, "too_few_values", step=1)}))
    envs.reset(seed=1)
    with pytest.raises(ValueError, match=r"values to unpack|five|5") as caught:
        envs.step([0, 0])
    assert re.search(r"\benv 1\b", report(caught.value))


@pytest.mark.parametrize(("fault", "key"), [("unpicklable_info", "lock"), ("evil_info", "evil")])
def test_bad_info(launch: Launch, fault: str, key: str) -> None:
    """An info that cannot travel is named: environment and key. An evil one never reaches the caller alive."""
    envs = launch(crew(4, {3: vandal(3, fault, step=1)}), num_workers=2)
    envs.reset(seed=1)
    pids = worker_pids(envs)
    with pytest.raises(Exception, match=r".") as caught:
        envs.step([0] * 4)
    text = report(caught.value)
    assert re.search(r"\benv 3\b", text), text
    assert re.search(rf"\b{key}\b", text), text
    assert worker_pids(envs) == pids
    envs.reset(seed=2)


@pytest.mark.long
def test_big_infos(launch: Launch) -> None:
    """100 MiB from each of three environments at once, in one step: nobody waits for the other to read first."""
    envs = launch([vandal(index, "huge_info", step=1) for index in range(3)])
    ledger = Ledger(3, length=10)
    ledger.reset(envs.reset(seed=1))
    answer = envs.step([1, 2, 3])
    ledger.step([1, 2, 3], answer)
    assert [len(blob) for blob in answer[-1]["blob"]] == [HUGE_INFO_BYTES] * 3
    del answer
    ledger.step([1, 2, 3], envs.step([1, 2, 3]))


@pytest.mark.long
def test_big_both_ways(launch: Launch) -> None:
    """Arguments and results that both exceed what a pipe holds."""
    envs = launch(crew(4), num_workers=2)
    envs.reset(seed=1)
    blob = bytes(range(256)) * (2**16)  # 16 MiB
    assert all(answer == blob for answer in envs.call("echo", blob))
    assert envs.call("echo", 1) == (1,) * 4


def test_stdio(launch: Launch, method: str, capfd: pytest.CaptureFixture[str]) -> None:
    """What an environment prints is printed; what it reads is empty; neither has to do with the protocol."""
    envs = launch([vandal(index, "stdio", step={1, 2}) for index in range(2)])
    ledger = Ledger(2, length=10)
    ledger.reset(envs.reset(seed=1))
    for step in range(4):
        answer = envs.step([step, step])
        ledger.step([step, step], answer)
        if step < 2:
            assert answer[-1]["stdin"].tolist() == ["", ""]
    envs.close()
    shown = capfd.readouterr()
    if method == "forkserver":
        return  # its standard output is that of the moment when the fork server was started: another test's
    assert shown.out.count("an environment writes") == 4
    assert shown.out.count("an environment prints") == 4
    assert shown.err.count("an environment complains") == 4


# --- wrong calls --------------------------------------------------------------------------------


@pytest.mark.parametrize("actions", [[], [1], [1, 1, 1], [1, 1, 1, 1, 1], np.ones((4, 2), np.int64)[:3]])
def test_short_actions(launch: Launch, actions: Any) -> None:
    """A wrong number of actions is refused before any environment has stepped."""
    envs = launch(crew(4), num_workers=2)
    ledger = Ledger(4, length=10)
    ledger.reset(envs.reset(seed=1))
    for call in (envs.step, envs.step_async):
        with pytest.raises(ValueError, match=r"(?i)action"):
            call(actions)
    ledger.step([1, 2, 3, 4], envs.step([1, 2, 3, 4]))


def _fail() -> None:
    raise ZeroDivisionError("in a function")


def test_call_errors_do_not_kill(launch: Launch) -> None:
    """Whatever goes wrong in a call, every environment is the same as before."""
    envs = launch(crew(4), num_workers=2)
    ledger = Ledger(4, length=10)
    ledger.reset(envs.reset(seed=1))
    ledger.step([1, 2, 3, 4], envs.step([1, 2, 3, 4]))
    pids = worker_pids(envs)
    wrong: list[tuple[Any, Callable[[], Any]]] = [
        (AttributeError, lambda: envs.call("nosuch")),
        (AttributeError, lambda: envs.get_attr("nosuch")),
        (TypeError, lambda: envs.call("echo")),
        (ValueError, lambda: envs.call("do", "raises", only=2)),
        (EnvError, lambda: envs.call("do", "sys_exit", only=2)),
        (ValueError, lambda: envs.call("reset")),
        (ValueError, lambda: envs.set_attr("secret", [1])),
        (ZeroDivisionError, lambda: envs.exec_func(lambda env: 1 / 0)),
        (Exception, lambda: envs.call("echo", threading.Lock())),  # cannot go there
        (Exception, lambda: envs.call("do", "unpicklable_info")),  # cannot come back
        (Exception, lambda: envs.call("do", "evil_info")),  # must not come back
    ]
    for expected, call in wrong:
        with pytest.raises(expected):
            call()
        assert worker_pids(envs) == pids
        assert envs.get_attr("witness_id") == (0, 1, 2, 3)
    ledger.step([1, 2, 3, 4], envs.step([1, 2, 3, 4]))


@CHEAP
def test_set_attr_errors_do_not_kill(launch: Launch) -> None:
    """An attribute that refuses to be set raises, and no more."""
    envs = launch(crew(4), num_workers=2)
    ledger = Ledger(4, length=10)
    ledger.reset(envs.reset(seed=1))
    with pytest.raises(AttributeError):
        envs.set_attr("unwrapped", 3)
    with pytest.raises(Exception, match=r"."):
        envs.set_attr("secret", threading.Lock())
    envs.set_attr("secret", [5, 6, 7, 8])
    assert envs.get_attr("secret") == (5, 6, 7, 8)
    ledger.step([1, 2, 3, 4], envs.step([1, 2, 3, 4]))


# --- close, threads, forks ----------------------------------------------------------------------


@pytest.mark.parametrize("when", ["twice", "thread", "pending", "during_step", "both_at_once"])
def test_close_anytime(launch: Launch, when: str, tmp_path: Path) -> None:
    """Close is the one call that is always allowed."""
    slow = {1: vandal(1, Announce(tmp_path / "begun", "sleep"), step=1)}
    envs = launch(crew(2, slow))
    envs.reset(seed=1)
    pids = worker_pids(envs)
    ends: list[BaseException | None] = []

    def attempt(call: Callable[[], Any]) -> None:
        try:
            call()
        except Exception as error:
            ends.append(error)
        else:
            ends.append(None)

    if when == "twice":
        envs.close()
        envs.close()
        envs.close(terminate=True)
    elif when == "thread":
        other = threading.Thread(target=attempt, args=(envs.close,))
        other.start()
        other.join(10)
        assert ends == [None]
    elif when == "pending":
        envs.step_async([0, 0])
        envs.close(timeout=0.2)
    elif when == "during_step":
        other = threading.Thread(target=attempt, args=(lambda: envs.step([0, 0]),))
        other.start()
        wait_for(tmp_path / "begun")
        envs.close(timeout=0.2)
        other.join(5)
        assert not other.is_alive(), "a step that was interrupted by close() must come back"
        assert len(ends) == 1
        assert ends[0] is not None
    else:
        others = [threading.Thread(target=attempt, args=(envs.close,)) for _ in range(4)]
        for other in others:
            other.start()
        for other in others:
            other.join(10)
        assert ends == [None] * 4
    assert envs.closed
    assert not remaining(pids, PATIENCE)
    for call in (lambda: envs.step([0, 0]), envs.reset, lambda: envs.call("echo", 1)):
        with pytest.raises(ClosedEnvironmentError):
            call()
    envs.close()


def test_two_callers(launch: Launch, tmp_path: Path) -> None:
    """While one thread is in ``step``, another is told so; the first gets its own answer."""
    envs = launch(crew(2, {1: vandal(1, Announce(tmp_path / "begun", Pause(0.4)), step=1)}))
    ledger = Ledger(2, length=10)
    ledger.reset(envs.reset(seed=1))
    answers: list[Any] = []
    other = threading.Thread(target=lambda: answers.append(envs.step([1, 2])))
    other.start()
    wait_for(tmp_path / "begun")
    for call in (lambda: envs.step([0, 0]), envs.reset, lambda: envs.call("echo", 1)):
        with pytest.raises(BusyError):
            call()
    other.join(10)
    ledger.step([1, 2], answers[0])
    ledger.step([3, 4], envs.step([3, 4]))


@CHEAP
def test_two_callers_racing(launch: Launch) -> None:
    """Four threads that step as fast as they can: every call either steps everybody once or nobody."""
    envs = launch(crew(2, length=10**9))
    envs.reset(seed=1)
    ticks: list[list[int]] = []
    refused: list[Exception] = []

    def race() -> None:
        for _ in range(50):
            try:
                observations, rewards, *_ = envs.step([1, 1])
            except (BusyError, AlreadyPendingCallError) as error:
                refused.append(error)
            else:
                rows = [WitnessEnv.read(row) for row in observations]
                assert rewards.tolist() == [row["tick"] * (1 + 1 / 1024) for row in rows]
                ticks.append([row["tick"] for row in rows])

    threads = [threading.Thread(target=race) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(15)
    assert len(ticks) + len(refused) == 200
    assert sorted(ticks) == [[tick, tick] for tick in range(1, len(ticks) + 1)]


def test_used_after_fork(launch: Launch) -> None:
    """A forked child is told that the engine is not its own; whatever it does, the owner's workers stay."""
    envs = launch(crew(2))
    ledger = Ledger(2, length=10)
    ledger.reset(envs.reset(seed=1))
    pids = worker_pids(envs)
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:  # nothing of pytest may run in here
        told = b""
        try:
            for call in (lambda: envs.step([0, 0]), envs.reset, lambda: envs.call("echo", 1)):
                try:
                    call()
                    told += b"-"
                except ForkedError:
                    told += b"F"
                except BaseException:
                    told += b"?"
            try:
                envs.close()
                told += b"c"
            except ForkedError:
                told += b"c"
            except BaseException:
                told += b"?"
            del envs
            gc.collect()
        finally:
            os.write(writer, told)
            os._exit(0)
    os.close(writer)
    os.waitpid(child, 0)
    told = os.read(reader, 100)
    os.close(reader)
    assert told == b"FFFc"
    assert worker_pids(envs) == pids
    for step in range(3):
        ledger.step([step, 1], envs.step([step, 1]))


@pytest.mark.parametrize("method", ["fork"], indirect=True)
def test_children_of_the_trainer_do_not_end_its_workers(launch: Launch) -> None:
    """A process that multiprocessing forks from the trainer runs its exit handlers; the engine's are not among them."""
    envs = launch(crew(2))
    ledger = Ledger(2, length=10)
    ledger.reset(envs.reset(seed=1))
    process = multiprocessing.get_context("fork").Process(target=gc.collect)
    process.start()
    process.join(10)
    process.close()
    for step in range(3):
        ledger.step([step, 1], envs.step([step, 1]))


# --- memory that outlives -----------------------------------------------------------------------


def test_views(launch: Launch) -> None:
    """``copy=False``: the same writeable array every time; it may be kept and touched after ``close``."""
    envs = launch(crew(2, length=10**9), copy=False)
    first, _ = envs.reset(seed=1)
    second = envs.step([1, 1])[0]
    third = envs.step([1, 1])[0]
    assert first is second
    assert second is third
    assert third.flags.writeable
    assert WitnessEnv.read(first[1])["tick"] == 2, "documented: it changes under the caller"
    kept = third[1]
    copied = third.copy()
    envs.close()
    del envs
    gc.collect()
    assert np.array_equal(third, copied)
    kept[:] = 7
    assert third[1, 0] == 7


@CHEAP
def test_copies_do_not_change(launch: Launch) -> None:
    """``copy=True``, the default: what was returned stays what it was."""
    envs = launch(crew(2, length=10**9))
    rows = [envs.reset(seed=1)[0], *(envs.step([1, 1])[0] for _ in range(5))]
    envs.close()
    assert [[WitnessEnv.read(row)["tick"] for row in batch] for batch in rows] == [[tick, tick] for tick in range(6)]


# --- options ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "accepted"),
    [
        ({"on_failure": "ignore"}, ("raise", "restart")),
        ({"on_failure": None}, ("raise", "restart")),
        ({"restart_limit": -1}, ("restart_limit",)),
        ({"restart_period": -1.0}, ("restart_period",)),
        ({"restart_period": 0.0}, ("restart_period",)),
        ({"step_timeout": -1.0}, ("step_timeout",)),
        ({"start_timeout": -1.0}, ("start_timeout",)),
        ({"start_timeout": 0}, ("start_timeout",)),
        ({"num_workers": -1}, ("num_workers",)),
        ({"num_workers": "many"}, ("num_workers", "auto")),
        ({"worker": print, "on_failure": "restart"}, ("worker", "on_failure")),
    ],
    ids=lambda value: "-".join(map(str, value)) if isinstance(value, dict) else "",
)
def test_impossible_options_are_refused(options: dict[str, Any], accepted: tuple[str, ...]) -> None:
    """In the constructor, with the accepted values in the message, before anything starts."""
    from vecenv import AsyncVectorEnv

    with pytest.raises((ValueError, TypeError)) as caught:
        AsyncVectorEnv([witness(0)], **options)
    for word in accepted:
        assert word in str(caught.value)
