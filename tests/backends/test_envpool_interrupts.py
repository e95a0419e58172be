"""Ctrl-C at any moment: nothing hangs, and no step returns the result of another.

Each interruption of :func:`interruption.moments` raises at another moment. Afterwards there are three possibilities: the
call sent nothing; its result is pending, and equals the expected one bit for bit; or a reset is needed, and succeeds.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import numpy as np
import pytest
from gymnasium.error import NoAsyncCallError, ResetNeeded

pytest.importorskip("envpool")

from interruption import KINDS, Interruption, moments
from sampling import each_once, each_pair
from signals import default_sigint_handler

from vecenv.backends import EnvPoolVectorEnv
from vecenv.backends.envpool import drivers
from vecenv.testing import assert_identical

from .conftest import Make, zeros
from .pool_doubles import slow_down


@pytest.fixture(autouse=True)
def use_default_sigint_handler() -> Iterator[None]:
    with default_sigint_handler():
        yield


def count_in_flight(envs: EnvPoolVectorEnv) -> int:
    return int(envs.stats()["in_flight"])


def needs_reset(envs: EnvPoolVectorEnv) -> bool:
    """True if the interruption lost the result, because it occurred during a change of the driver's state."""
    try:
        envs.render()  # returns None without a render mode
    except ResetNeeded:
        return True
    return False


MODES = {
    "next step": {},
    "same step, a reset in every step": {"autoreset_mode": "SameStep", "max_episode_steps": 1},
    "next step, short episodes": {"max_episode_steps": 3},
    "first ready": {"batch_size": 2},
}


@pytest.mark.parametrize(("mode", "kind"), each_once(list(MODES), KINDS))
def test_interrupted_step_was_not_sent_or_is_pending(make: Make, mode: str, kind: str) -> None:
    envs, reference = make(**MODES[mode]), make(**{**MODES[mode], "batch_size": None})
    envs.reset()
    reference.reset()
    lost = 0
    for interruption in moments(kind, least=20):
        expected, result = reference.step(zeros(4)), None
        with interruption:
            result = envs.step(zeros(4))
        if result is None and needs_reset(envs):
            lost += 1
            assert_identical(envs.reset(seed=lost), reference.reset(seed=lost))
            continue
        if result is None and not count_in_flight(envs):
            with pytest.raises(NoAsyncCallError):
                envs.step_wait()
            result = envs.step(zeros(4))
        elif result is None:
            result = envs.step_wait()
        assert_identical(result, expected)
        with pytest.raises(NoAsyncCallError):
            envs.step_wait()
    assert lost < 60
    assert 0 <= reference.stats()["steps"] - envs.stats()["steps"] <= 4 * lost
    assert envs.stats()["resets"] == reference.stats()["resets"]


@pytest.mark.sampled(6)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("num_envs", "batch_size", "count", "timeout"),
    [
        *((4, batch_size, None, timeout) for batch_size in (4, 2) for timeout in (None, 30.0)),
        *((6, 2, count, None) for count in (1, 3)),  # a pool returns two rows at once; the next recv returns the surplus
    ],
)
def test_interrupted_send_and_recv_lose_no_rows(
    make: Make, num_envs: int, batch_size: int, count: int | None, timeout: float | None, kind: str
) -> None:
    envs, reference = make(num_envs, batch_size=batch_size), make(num_envs)
    envs.reset()
    stream = [reference.reset()[0]]
    received = [0] * num_envs
    rows = count or batch_size
    envs.send(zeros(num_envs), np.arange(num_envs))
    lost, steps_at_reset = 0, 0.0
    for interruption in moments(kind, least=20):
        result = None
        with interruption:
            result = envs.recv(timeout, count=count)
        if result is None and needs_reset(envs):
            lost += 1
            stream, received = [reference.reset(seed=lost)[0]], [0] * num_envs
            assert_identical(envs.reset(seed=lost)[0], stream[0])
            steps_at_reset = envs.stats()["steps"]
            envs.send(zeros(num_envs), np.arange(num_envs))
            continue
        observations, *_, infos = result or envs.recv(timeout, count=count)
        ids = infos["env_id"].tolist()
        assert len(set(ids)) == rows
        for row, i in enumerate(ids):
            received[i] += 1
            while len(stream) <= received[i]:
                stream.append(reference.step(zeros(num_envs))[0])
            np.testing.assert_array_equal(observations[row], stream[received[i]][i])
        assert count_in_flight(envs) == num_envs - rows
        assert envs.stats()["steps"] - steps_at_reset == sum(received)
        # if recv was interrupted, also interrupt the send, at another moment in every round
        with Interruption(interruption.kind, interruption._left % 40 if interruption.fired else 10**6):
            envs.send(zeros(rows))  # to the environments of the latest recv
        if count_in_flight(envs) < num_envs:
            envs.send(zeros(rows), infos["env_id"])
    assert lost < 60
    if batch_size < num_envs:
        envs.reset()
        assert count_in_flight(envs) == 0


@pytest.mark.long
@pytest.mark.parametrize(("batch_size", "kind"), each_pair([4, 2], KINDS))
def test_interrupted_reset_is_pending_or_can_be_repeated(make: Make, batch_size: int, kind: str) -> None:
    """A reset with a seed builds a new pool. The test repeats an interrupted reset if it was not submitted."""
    envs, reference = make(batch_size=batch_size), make()
    for seed in (5, None):
        for interruption in moments(kind, least=20):
            expected, result = reference.reset(seed=seed), None
            with interruption:
                result = envs.reset(seed=seed)
            if result is None and envs._driver.pool is not None and needs_reset(envs):
                expected, result = reference.reset(seed=seed), envs.reset(seed=seed)
            elif result is None and count_in_flight(envs):
                result = envs.reset_wait()
            elif result is None:
                with pytest.raises((ResetNeeded, NoAsyncCallError)):
                    envs.reset_wait()
                result = envs.reset(seed=seed)
            assert_identical(result, expected)
            assert_identical(envs.step(zeros(4)), reference.step(zeros(4)))


@pytest.mark.parametrize(("mode", "kind"), each_once(list(MODES), KINDS))
def test_interrupted_reset_after_an_interrupted_step_can_be_repeated(make: Make, mode: str, kind: str) -> None:
    envs = make(**MODES[mode])
    envs.reset()
    for interruption in moments(kind, least=20):
        envs.step_async(zeros(4))
        with Interruption(kind, 0, within=(drivers.__file__,)):
            envs.step_wait()
        result = None
        with interruption:
            result = envs.reset()
        _, infos = result or envs.reset()
        assert infos["elapsed_step"].tolist() == [0] * 4
        assert count_in_flight(envs) == 0


@pytest.mark.parametrize("kind", KINDS)
def test_interrupted_masked_reset_is_pending_or_can_be_repeated(make: Make, kind: str) -> None:
    options = {"autoreset_mode": "Disabled", "max_episode_steps": 2}
    envs, reference = make(**options), make(**options)
    envs.reset()
    reference.reset()
    mask = np.array([True, False, True, False])
    for interruption in moments(kind, least=20):
        assert_identical(envs.step(zeros(4)), reference.step(zeros(4)))
        expected, result = reference.reset(options={"reset_mask": mask}), None
        with interruption:
            result = envs.reset(options={"reset_mask": mask})
        if result is None and needs_reset(envs):
            assert_identical(envs.reset(seed=3), reference.reset(seed=3))
            continue
        if result is None:
            result = envs.reset_wait() if count_in_flight(envs) else envs.reset(options={"reset_mask": mask})
        assert_identical(result, expected)
        assert_identical(envs.reset(options={"reset_mask": ~mask}), reference.reset(options={"reset_mask": ~mask}))


# --- real signals -------------------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.parametrize("timeout", [None, 30.0])
@pytest.mark.parametrize("batch_size", [4, 2])
def test_ctrl_c_during_recv_loses_no_rows(make: Make, batch_size: int, timeout: float | None) -> None:
    """The signal interrupts a wait for results, and the next calls return them."""
    envs, reference = make(4, batch_size=batch_size), make(4)
    envs.reset()
    reference.reset()
    slow_down(envs, 0.4)  # longer than the delay of the signal, even on a busy machine
    for _ in range(3):
        envs.send(zeros(4), np.arange(4))
        rows: dict[int, list[float]] = {}
        interrupts = 0
        timer = threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGINT))
        timer.start()
        while len(rows) < 4:
            try:
                observations, *_, infos = envs.recv(timeout)
                rows |= dict(zip(infos["env_id"].tolist(), observations.tolist(), strict=True))
            except KeyboardInterrupt:
                interrupts += 1
        timer.join()
        assert interrupts == 1
        expected = reference.step(zeros(4))[0]
        assert [rows[i] for i in range(4)] == expected.tolist()


@pytest.mark.long
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # a handler may run inside a finalizer
@pytest.mark.parametrize("mode", ["NextStep", "SameStep"])
def test_interrupts_at_random_moments_lose_no_step(make: Make, mode: str) -> None:
    """``step_wait`` finishes an interrupted step that was sent, and ``step`` repeats any other."""
    envs, reference = (make(8, autoreset_mode=mode, max_episode_steps=9) for _ in range(2))
    envs.reset()
    reference.reset()
    armed, stop = False, threading.Event()
    interrupts, steps = 0, 0

    def handler(number: int, frame: object) -> None:
        if armed:
            raise KeyboardInterrupt

    def send_signals() -> None:
        rng = np.random.default_rng(0)
        while not stop.wait(rng.uniform(0.0002, 0.002)):
            os.kill(os.getpid(), signal.SIGINT)

    signal.signal(signal.SIGINT, handler)
    thread = threading.Thread(target=send_signals)
    thread.start()
    try:
        deadline = time.monotonic() + 1.0
        while time.monotonic() < deadline:
            actions = np.full(8, steps % 2)
            expected, result = reference.step(actions), None
            while result is None:
                pending = count_in_flight(envs) > 0
                try:
                    armed = True
                    result = envs.step_wait() if pending else envs.step(actions)
                    armed = False
                except KeyboardInterrupt:
                    armed = False
                    interrupts += 1
            assert_identical(result, expected, f"step {steps}")
            steps += 1
    finally:
        stop.set()
        thread.join()
    assert steps > 100
    assert interrupts > 20


PROGRAM_WITH_A_TIMED_OUT_STEP = """
import sys, time
sys.modules["jax"] = None

class SlowShutdown:
    def __del__(self, sleep=time.sleep):
        sleep(4.0)  # during the shutdown of Python

keep = SlowShutdown()

import numpy as np
from vecenv.backends import EnvPoolVectorEnv
from vecenv.errors import StepTimeout

def make_ant(**options):
    envs = EnvPoolVectorEnv("Ant-v4", 2, num_threads=1, seed=0, **options)
    if envs.batch_size == 2:
        envs.reset()
    else:
        envs.reset_async()
        envs.recv(), envs.recv()
    return envs

started_at = time.monotonic()
make_ant(frame_skip=1000).step(np.zeros((2, 8)))
seconds_per_frame = (time.monotonic() - started_at) / 1000
envs = make_ant(frame_skip=max(100, int({seconds} / seconds_per_frame)), batch_size={batch_size})
try:
    if {batch_size} == 2:
        envs.step_async(np.zeros((2, 8)))
        envs.step_wait(timeout=0.001)
    else:
        envs.send(np.zeros((2, 8)), [0, 1])
        envs.recv(timeout=0.001)
except StepTimeout:
    print("timed out")
if {closes}:
    envs.close()
print("the end", flush=True)
"""


@pytest.mark.long
@pytest.mark.parametrize(
    ("seconds", "batch_size", "closes"),
    [
        pytest.param(0.5, 2, False, id="done soon", marks=pytest.mark.slow),
        pytest.param(3.0, 2, False, id="done late", marks=pytest.mark.slow),
        pytest.param(3.0, 1, False, id="first-ready"),
        pytest.param(7.5, 2, True, id="closed"),
    ],
)
def test_program_exits_cleanly_after_a_timed_out_step(seconds: float, batch_size: int, closes: bool) -> None:
    script = PROGRAM_WITH_A_TIMED_OUT_STEP.format(seconds=seconds, batch_size=batch_size, closes=closes)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=False)
    assert done.stdout.split("\n")[-2:] == ["the end", ""], done.stderr
    assert "timed out" in done.stdout
    assert (done.returncode, done.stderr) == (0, "")
