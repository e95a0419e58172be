"""``EnvPoolVectorEnv``: first-ready batches, order of calls, timeouts, invalid input, evaluation, and the contract."""

from __future__ import annotations

import copy
import gc
import os
import pickle
import re
import signal
import subprocess
import sys
import textwrap
import threading
import time
from contextlib import closing
from typing import Any, ClassVar

import numpy as np
import pytest
from forks import run_in_fork
from gymnasium.error import AlreadyPendingCallError, ClosedEnvironmentError, NoAsyncCallError, ResetNeeded, UnregisteredEnv
from gymnasium.spaces import Box, Dict, Discrete
from gymnasium.vector import AutoresetMode
from signals import Alarm, signal_handler

import vecenv
from vecenv.backends import EnvPoolVectorEnv
from vecenv.backends.envpool import task
from vecenv.backends.envpool.rows import ActionChecker
from vecenv.errors import ForkedError, StepTimeout
from vecenv.testing import VectorEnvContract

from .conftest import Make, zeros
from .pool_doubles import slow_down

pytest.importorskip("envpool")


# --- first-ready batches ------------------------------------------------------------------------


def test_any_number_of_rows_can_be_sent_at_a_time(make: Make) -> None:
    envs = make(6, batch_size=3, num_threads=2)
    rng = np.random.default_rng(0)
    envs.reset_async()
    idle: set[int] = set()
    counts = np.zeros(6, dtype=int)
    for _ in range(300):
        in_flight = 6 - len(idle)
        if in_flight >= 3 and (not idle or rng.random() < 0.5):
            ids = envs.recv()[4]["env_id"].tolist()
            counts[ids] += 1
            idle |= set(ids)
        else:
            chosen = rng.permutation(sorted(idle))[: rng.integers(1, len(idle) + 1)]
            envs.send(zeros(len(chosen)), chosen)
            idle -= set(chosen.tolist())
        assert envs.stats()["in_flight"] == 6 - len(idle)
        if busy := sorted(set(range(6)) - idle):
            with pytest.raises(AlreadyPendingCallError, match=f"env {busy[0]}, still in flight"):
                envs.send(zeros(1 + len(idle)), [*idle, busy[0]])
    assert (counts > 10).all()


@pytest.mark.sampled(6)
@pytest.mark.parametrize("received", range(4))
@pytest.mark.parametrize("sent", range(3))
def test_full_reset_waits_for_rows_in_flight(make: Make, received: int, sent: int) -> None:
    envs = make(6, batch_size=2, num_threads=2)
    envs.reset_async()
    ids: list[int] = []
    for _ in range(received):
        ids += envs.recv()[4]["env_id"].tolist()
    if chosen := ids[:sent]:
        envs.send(zeros(len(chosen)), chosen)
    if not received:
        envs.reset_wait()
    observations, infos = envs.reset()
    assert observations.shape == (6, 4)
    assert infos["env_id"].tolist() == list(range(6))
    assert (infos["elapsed_step"] == 0).all()
    assert envs.stats()["in_flight"] == 0
    assert (envs.step(zeros(6))[4]["elapsed_step"] == 1).all()


def test_full_reset_discards_the_remaining_rows_of_a_batch(make: Make) -> None:
    envs = make(8, batch_size=4)
    envs.reset()
    envs.send(zeros(8), np.arange(8))
    ids = envs.recv(count=7)[4]["env_id"]  # one row of the second batch is left, and its environment is idle
    envs.send(zeros(5), ids[:5])
    assert (envs.reset()[1]["elapsed_step"] == 0).all()
    assert envs.stats()["in_flight"] == 0
    assert (envs.step(zeros(8))[4]["elapsed_step"] == 1).all()


def test_lockstep_pool_accepts_one_call_at_a_time(make: Make) -> None:
    envs = make(4)
    envs.reset()
    envs.send(zeros(2), [3, 1])
    with pytest.raises(AlreadyPendingCallError, match="recv"):
        envs.send(zeros(1), [0])
    with pytest.raises(AlreadyPendingCallError):
        envs.step(zeros(4))
    with pytest.raises(NoAsyncCallError, match="without any prior call to `step_async`"):
        envs.step_wait()
    observations, _, _, _, infos = envs.recv()
    assert infos["env_id"].tolist() == [3, 1]
    assert infos["elapsed_step"].tolist() == [1, 1]
    with pytest.raises(NoAsyncCallError):
        envs.recv()
    after, _ = envs.reset(options={"reset_mask": np.array([True, False, False, False])})
    np.testing.assert_array_equal(after[[3, 1]], observations)


def test_recv_returns_final_observations_of_same_step_resets(make: Make) -> None:
    envs = make(3, autoreset_mode="SameStep", max_episode_steps=2)
    envs.reset()
    for _ in range(2):
        envs.send(zeros(2), [2, 0])
        infos = envs.recv()[4]
    assert infos["_final_obs"].tolist() == [True, True]
    assert infos["elapsed_step"].tolist() == [0, 0]
    assert infos["final_info"]["elapsed_step"].tolist() == [2, 2]


def test_actions_and_indices_are_copied_before_send_returns(make: Make) -> None:
    """EnvPool's threads read the arrays later."""
    envs, reference = make(64, batch_size=32), make(64, batch_size=32)
    envs.reset()
    reference.reset()
    actions, ids = zeros(64), np.arange(64, dtype=np.int32)
    envs.send(actions, ids)
    actions[:], ids[:] = 1, 0
    reference.send(zeros(64))

    def receive_all(envs: EnvPoolVectorEnv) -> dict[int, list[float]]:
        observations_by_env = {}
        for _ in range(2):
            observations, *_, infos = envs.recv()
            observations_by_env |= dict(zip(infos["env_id"].tolist(), observations.tolist(), strict=True))
        return observations_by_env

    assert receive_all(envs) == receive_all(reference)


# --- recv(count=) -------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 6, 8])
def test_recv_of_any_count_keeps_the_other_rows(make: Make, count: int) -> None:
    lockstep = make(8)
    expected_results = [(lockstep.reset()[0], *np.zeros((3, 8))), *(lockstep.step(zeros(8))[:4] for _ in range(30))]
    envs = make(8, batch_size=4, num_threads=2)
    envs.reset_async()
    received = [0] * 8
    while min(received) < 20 and max(received) < 30:
        *parts, infos = envs.recv(count=count)
        ids = infos["env_id"].tolist()
        assert len(set(ids)) == count
        assert {len(part) for part in parts} == {count}
        assert envs.stats()["in_flight"] == 8 - count
        for row, i in enumerate(ids):
            for part, expected in zip(parts, expected_results[received[i]], strict=True):
                np.testing.assert_array_equal(part[row], expected[i])
            received[i] += 1
        envs.send(zeros(count))


def test_recv_of_an_impossible_count_raises(make: Make) -> None:
    envs = make(6, batch_size=3)
    envs.reset()
    envs.send(zeros(4), [0, 1, 2, 3])
    with pytest.raises(NoAsyncCallError, match="for 5 environments, but only 4 are in flight and 0 are ready"):
        envs.recv(count=5)
    with pytest.raises(NoAsyncCallError, match=r"4 are in flight and 0 are ready, .* whole batches of 3"):
        envs.recv(count=4)
    assert len(envs.recv(count=2)[1]) == 2
    with pytest.raises(NoAsyncCallError, match=r"1 are in flight and 1 are ready, .* whole batches of 3"):
        envs.recv(count=2)
    assert len(envs.recv(count=1)[1]) == 1
    assert envs.stats()["in_flight"] == 1
    full = make(8, batch_size=4)
    full.reset_async()
    full.send(zeros(7), full.recv(count=7)[4]["env_id"])
    with pytest.raises(NoAsyncCallError, match=r"for 7 .* 7 are in flight and 1 are ready, .* whole batches of 4"):
        full.recv(count=7)
    assert len(full.recv(count=5)[1]) == 5


def test_recv_with_an_infinite_wait_returns_all_rows_that_whole_batches_contain(make: Make) -> None:
    envs = make(6, batch_size=3)
    envs.reset()
    envs.send(zeros(4), [0, 1, 2, 3])
    assert len(envs.recv(count=4, at_least=1, within=float("inf"))[1]) == 3


def test_recv_after_a_timeout_returns_the_late_rows(make: Make) -> None:
    envs, reference = make(4, batch_size=1), make(4)
    envs.reset()
    reference.reset()
    slow_down(envs, 0.2)
    envs.send(zeros(4), np.arange(4))
    with pytest.raises(StepTimeout):
        envs.recv(0.3, count=4)  # one or two of the four rows have arrived by then
    expected = reference.step(zeros(4))[0]
    for count in (1, 3):
        observations, *_, infos = envs.recv(10.0, count=count)
        np.testing.assert_array_equal(observations, expected[infos["env_id"]])
    assert envs.stats()["in_flight"] == 0


def test_next_send_ignores_changes_of_received_env_ids(make: Make) -> None:
    envs = make(4, batch_size=2)
    envs.reset_async()
    ids = envs.recv()[4]["env_id"]
    sent = ids.tolist()
    ids[:] = 0
    envs.send(zeros(2))
    with pytest.raises(AlreadyPendingCallError, match=str(sent[0])):
        envs.send(zeros(1), sent[:1])


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning", "ignore:.*fork.*:RuntimeWarning")
def test_call_in_a_child_forked_during_another_threads_call_raises(make: Make) -> None:
    envs = make(2)
    envs.reset()
    slow_down(envs, 0.5)
    thread = threading.Thread(target=envs.step, args=(zeros(2),))
    thread.start()
    time.sleep(0.1)

    def check_calls() -> None:
        for call in (envs.step, envs.send):
            with pytest.raises(ForkedError):
                call(zeros(2))
        envs.close()  # without the pool's destructor, which would crash here
        new = EnvPoolVectorEnv("CartPole-v1", 2)
        new.reset()
        new.close()

    assert run_in_fork(check_calls) == 0
    thread.join()


# --- finished episodes --------------------------------------------------------------------------


def test_step_of_a_finished_episode_without_autoreset_raises(make: Make) -> None:
    envs = make(2, autoreset_mode=AutoresetMode.DISABLED, max_episode_steps=1)
    envs.reset()
    envs.step(zeros(2))
    envs.reset(options={"reset_mask": np.array([True, False])})
    with pytest.raises(ResetNeeded, match="env 1"):
        envs.step(zeros(2))
    envs.send(zeros(1), [0])
    envs.recv()
    envs.reset()
    envs.step(zeros(2))


# --- timeouts -----------------------------------------------------------------------------------


def test_step_wait_can_be_called_again_after_a_timeout(make: Make) -> None:
    envs, reference = make(4, autoreset_mode="SameStep", max_episode_steps=1), make(4, max_episode_steps=1)
    envs.reset()
    reference.reset()
    slow_down(envs, 0.1)  # the step takes two round trips
    envs.step_async(zeros(4))
    timeouts = 0
    while True:
        try:
            result = envs.step_wait(timeout=0.03)
            break
        except StepTimeout:
            timeouts += 1
    assert timeouts >= 3
    np.testing.assert_array_equal(np.stack(result[4]["final_obs"]), reference.step(zeros(4))[0])
    np.testing.assert_array_equal(result[0], reference.step(zeros(4))[0])


# --- forks, copies, close -----------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning", "ignore:.*fork.*:RuntimeWarning")
def test_forked_child_that_makes_no_calls_exits_cleanly() -> None:
    program = """
    import os, sys
    from vecenv.backends import EnvPoolVectorEnv
    envs = EnvPoolVectorEnv("CartPole-v1", 4, num_threads=2)
    envs.reset()
    pid = os.fork()
    if pid == 0:
        sys.exit(0)  # runs all destructors
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    envs.step([0, 0, 0, 0])
    envs.close()
    sys.exit(code)
    """
    assert subprocess.run([sys.executable, "-c", textwrap.dedent(program)], timeout=250, check=False).returncode == 0


def test_copy_and_pickle_raise(make: Make) -> None:
    envs = make(2)
    for make_copy in (pickle.dumps, copy.copy, copy.deepcopy):
        with pytest.raises(TypeError, match="cannot be copied or pickled"):
            make_copy(envs)


def find_new_threads(before: set[str]) -> set[str]:
    """Return the threads of this process that are not in ``before``. Ends of other tests' threads do not matter."""
    return set(os.listdir("/proc/self/task")) - before


@pytest.mark.skipif(not os.path.isdir("/proc/self/task"), reason="counts threads in /proc")
@pytest.mark.parametrize("batch_size", [8, 4])
def test_close_ends_all_threads(make: Make, batch_size: int) -> None:
    make(8).reset()
    before = find_new_threads(set())
    envs = make(8, batch_size=batch_size, num_threads=3)
    assert not find_new_threads(before), "threads were started before the first reset"
    envs.reset()
    envs.send(zeros(8), np.arange(8))
    envs.recv(timeout=10.0)
    assert len(find_new_threads(before)) >= 4, "expected three threads of the pool, and one helper"
    envs.reset(seed=3 if batch_size == 8 else None)
    envs.close()
    assert not find_new_threads(before)
    for call in (envs.render, envs.xla):
        with pytest.raises(ClosedEnvironmentError, match="after a call to `close"):
            call()


def test_failed_construction_leaves_nothing_to_close() -> None:
    with pytest.raises(ValueError, match="batch_size"):
        EnvPoolVectorEnv("CartPole-v1", 4, batch_size=3)
    gc.collect()


def test_repr_shows_the_state(make: Make) -> None:
    envs = make(4, batch_size=2)
    assert repr(envs) == "EnvPoolVectorEnv(CartPole-v1, num_envs=4, batch_size=2, phase=DEFAULT)"
    envs.reset_async()
    assert "phase=WAITING_RESET" in repr(envs)
    envs.close()
    assert "phase=CLOSED" in repr(envs)


# --- rendering and compiled code ----------------------------------------------------------------


def test_render_returns_one_frame_per_environment(make: Make) -> None:
    envs = make(3, render_mode="rgb_array")
    with pytest.raises(ResetNeeded):
        envs.render()
    envs.reset()
    frames = envs.render()
    assert isinstance(frames, tuple)
    assert len(frames) == 3
    assert all(frame.dtype == np.uint8 and frame.ndim == 3 and frame.shape[2] == 3 for frame in frames)
    envs.send(zeros(3), np.arange(3))
    with pytest.raises(RuntimeError, match="3 environments are in flight"):
        envs.render()
    plain = make(3)
    plain.reset()
    assert plain.render() is None


def test_render_of_a_task_without_frames_raises(make: Make) -> None:
    envs = make(2, "FrozenLake-v1", render_mode="rgb_array")
    envs.reset()
    with pytest.raises(RuntimeError, match="EnvPool cannot render 'FrozenLake-v1'"):
        envs.render()


@pytest.mark.long
@pytest.mark.parametrize("options", [{"render_mode": "rgb_array"}, {"from_pixels": True}], ids=["frames", "pixels"])
def test_render_of_mujoco_does_not_crash_the_interpreter(options: dict[str, Any]) -> None:
    """The program runs in a separate interpreter, because Mesa keeps threads until the process ends."""
    program = textwrap.dedent(f"""
        from vecenv.backends import EnvPoolVectorEnv
        envs = EnvPoolVectorEnv("InvertedPendulum-v4", 2, num_threads=2, **{options!r})
        try:
            pixels = envs.reset()[0]
            pixels = envs.render() or pixels
        except RuntimeError as error:
            assert "libegl1" in str(error), error
        else:
            assert len(pixels) == 2
        envs.close()
        print("continued")
    """)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "continued\n"), done.stderr


def test_send_after_a_masked_reset_steps_all_environments_by_default(make: Make) -> None:
    envs = make(4)
    envs.reset()
    envs.send(zeros(2), [0, 1])
    envs.recv()
    envs.reset(options={"reset_mask": np.arange(4) == 2})
    envs.send(zeros(4))
    assert envs.recv()[4]["env_id"].tolist() == [0, 1, 2, 3]


def test_xla_steps_inside_jit_until_reset(make: Make) -> None:
    pytest.importorskip("jax.numpy")
    import jax

    envs, reference = make(4), make(4)
    with pytest.raises(ResetNeeded):
        envs.xla()
    envs.reset()
    reference.reset()
    handle, _, _, step = envs.xla()
    actions = jax.numpy.zeros(4, dtype=jax.numpy.int32)
    try:
        _, (observations, *_) = jax.jit(step)(handle, actions)
    except Exception as error:
        pytest.skip(f"EnvPool's own XLA functions do not run here: {type(error).__name__}")
    np.testing.assert_array_equal(observations, reference.step(zeros(4))[0])
    for call in (envs.recv, lambda: envs.step(zeros(4)), lambda: envs.send(zeros(4))):
        with pytest.raises(RuntimeError, match="reset"):
            call()
    assert envs.reset()[0].shape == (4, 4)
    envs.step(zeros(4))


@pytest.mark.parametrize("batch_size", [None, 2])
def test_xla_is_refused_while_a_call_is_pending(make: Make, batch_size: int | None) -> None:
    envs = make(4, batch_size=batch_size)
    envs.reset()
    envs.send(zeros(2), [3, 1])
    with pytest.raises(AlreadyPendingCallError, match="2 environments are in flight"):
        envs.xla()
    assert sorted(envs.recv()[4]["env_id"].tolist()) == [1, 3]
    envs.step_async(zeros(4))
    with pytest.raises(AlreadyPendingCallError, match="pending call to `step`"):
        envs.xla()
    envs.step_wait()


def test_time_limit_of_the_program_during_xla_is_raised(make: Make) -> None:
    envs, signals = make(4), [signal.SIGUSR2]
    envs.reset()
    pool_xla = envs._driver.pool.xla

    def interrupt() -> Any:
        if signals:
            signal.raise_signal(signals.pop())
        return pool_xla()

    envs._driver.pool.xla = interrupt
    with signal_handler(signal.SIGUSR2, Alarm), pytest.raises(Alarm):
        envs.xla()
    envs.step(zeros(4))


def test_time_limit_truncates_without_terminating() -> None:
    with closing(EnvPoolVectorEnv("Pendulum-v1", 2, max_episode_steps=5)) as envs:
        envs.reset(seed=1)
        flags = [tuple(flag.tolist() for flag in envs.step(np.zeros((2, 1), np.float32))[2:4]) for _ in range(5)]
    assert flags == [([False] * 2, [False] * 2)] * 4 + [([False] * 2, [True] * 2)]


# --- calls that crash the interpreter or read wrong memory on raw EnvPool -----------------------

# tests/contract tests the actions that are invalid for every backend
INTEGER_DTYPES = (np.int8, np.int16, np.int32, np.int64)
CRASHING_ACTIONS = [
    # (task, actions for two environments, class of the error, part of its text)
    *(
        (task_id, np.array([0, wrong], dtype), ValueError, "envs [1]")
        for task_id, wrong in (
            ("CartPole-v1", 7),
            ("CartPole-v1", -1),
            ("Taxi-v3", 99),
            ("FrozenLake-v1", 9),
            ("MiniGrid-Empty-5x5-v0", 99),
        )
        for dtype in INTEGER_DTYPES
    ),
    ("Pong-v5", [0, 99], ValueError, "from 0 to 5"),
    ("HighwayFast-v0", np.array([2**32, 0], np.uint64), ValueError, "envs [0]"),
    ("HighwayFast-v0", np.array([2**32, 0]), ValueError, "envs [0]"),
    ("HighwayFast-v0", np.array([2**64 - 1, 0], np.uint64), ValueError, "envs [0]"),
    ("Pendulum-v1", np.zeros((2, 3), np.float32), ValueError, "(2, 1)"),
    ("Ant-v4", np.zeros(2), ValueError, "(2, 8)"),
    *(
        ("CartPole-v1", np.array(wrong), TypeError, "must be integers")
        for wrong in ([0.0, 0.0], ["a", "a"], [None, None], [False, False], [0j, 0])
    ),
    ("CartPole-v1", [[0], [0, 1]], ValueError, "actions"),
    ("CartPole-v1", {"action": 0}, (ValueError, TypeError), "actions"),
    ("CartPole-v1", np.full(4, 9, np.int32)[::2], ValueError, "envs [0, 1]"),
    ("CartPole-v1", np.full(2, 9, ">i4"), ValueError, "envs [0, 1]"),
]


@pytest.mark.parametrize(("task_id", "actions", "error", "text"), CRASHING_ACTIONS)
def test_actions_that_crash_raw_envpool_raise(make: Make, task_id: str, actions: Any, error: Any, text: str) -> None:
    envs = make(2, task_id)
    envs.reset()
    for _ in range(2):  # the second time after a valid step
        with pytest.raises(error, match=re.escape(text)):
            envs.step(actions)
        envs.step(envs.action_space.sample())


@pytest.mark.long
def test_invalid_integer_actions_of_a_box_raise(make: Make) -> None:
    envs = make(2, "BinPack-v2")
    envs.reset()
    high = envs.action_space.high  # type: ignore[attr-defined]
    for wrong, error, text in ((high + 1, ValueError, r"envs \[0, 1\]"), (high - high - 1, ValueError, "envs"),
                               (high * 0.5, TypeError, "integers")):  # fmt: skip
        with pytest.raises(error, match=text):
            envs.step(wrong)


def test_indices_beyond_32_bits_raise(make: Make) -> None:
    envs = make(batch_size=2)
    envs.reset()
    for wrong in (np.array([2**31], np.int64), np.array([2**32], np.uint64)):
        for call in (lambda ids: envs.send(zeros(1), ids), lambda ids: envs.reset_async(env_id=ids)):
            with pytest.raises(ValueError, match=r"0\.\.3"):
                call(wrong)


def test_unusual_action_arrays_are_accepted(make: Make) -> None:
    wide = np.zeros((8, 3), np.float32)
    wide.flags.writeable = False
    for envs, arrays in ((make(4, "Pendulum-v1"), (wide[::2, 1:2], np.zeros((4, 1), ">f8"))),
                        (make(), (np.zeros(8, np.int64)[::2], np.zeros(4, ">i4")))):  # fmt: skip
        envs.reset()
        for actions in arrays:
            envs.step(actions)


@pytest.mark.long
def test_close_while_environments_step_succeeds(make: Make) -> None:
    for batch_size in (4, 2):
        envs = make(4, "Ant-v4", batch_size=batch_size)
        envs.reset()
        envs.send(np.zeros((4, 8)), np.arange(4))
        envs.close()


@pytest.mark.long
@pytest.mark.timeout(900)  # each case starts a process that imports EnvPool, which takes several seconds
@pytest.mark.parametrize(
    ("task_id", "options", "text"),
    [
        *(("Pong-v5", {"noop_max": wrong}, "noop_max must be from 1 to 10000") for wrong in (0, -1, 2**31 - 1)),
        *(("Pong-v5", {"stack_num": wrong}, "stack_num must be from 1 to 256") for wrong in (0, -1)),
        ("Pong-v5", {"img_height": 0}, "img_height must be from 1 to 4096, got 0"),
        *(("Pong-v5", {"img_width": wrong}, "img_width must be from 1 to 4096") for wrong in (0, 10**6)),
        ("Pong-v5", {"frame_skip": 0}, "frame_skip must be from 1"),
        ("Pong-v5", {"repeat_action_probability": 1.5}, "must be a number from 0 to 1, got 1.5"),
        ("Pong-v5", {"repeat_action_probability": "0.25"}, "_probability must be a number from 0 to 1, got '0.25'"),
        ("Pong-v5", {"repeat_action_probability": float("nan")}, "must be a number"),
        ("Pong-v5", {"task": "brakeout"}, "did you mean 'breakout'"),
        ("AcrobotSwingup-v1", {"task_name": "swim"}, "task_name"),
        ("MiniGrid-Empty-5x5-v0", {"env_name": ""}, "Accepted: "),
        ("HandReach-v0", {"hand_task": "x"}, "Accepted: manipulate, reach"),
        ("CartPole-v1", {"num_threads": 10**6}, "num_threads must be from 1 to 4096"),
        ("BabyAI-ActionObjDoor-v0", {"num_cols": 0}, "num_cols=0: EnvPool does not check these options"),
        ("Go9x9-v1", {"board_size": 1}, "Check failed: size_ > 1"),
        ("Go9x9-v1", {"history_length": 0}, "history_length=0"),
        ("Exit-v0", {"policy_frequency": 0}, "policy_frequency=0"),
        ("AdroitHandDoor-v1", {"obs_dim": 5}, "Unexpected Adroit observation size"),
        ("Highway-v0", {"observation_vehicles_count": -1}, "a process that tried"),
    ],
    ids=str,
)
def test_options_that_crash_raw_envpool_raise(task_id: str, options: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=re.escape(text)):
        EnvPoolVectorEnv(task_id, 1, **options)


@pytest.mark.long
def test_unusual_valid_options_are_accepted(make: Make) -> None:
    pong = make(1, "Pong-v5", noop_max=1, stack_num=1, img_height=1, img_width=100, frame_skip=1, task="pong")
    assert pong.observation_space.shape == (1, 1, 1, 100)
    for envs in (pong, make(1, "Highway-v0", vehicles_count=20), make(num_threads=16)):
        envs.reset()
        envs.step(envs.action_space.sample())


# --- errors of the constructor ------------------------------------------------------------------


def test_unknown_task_raises_with_similar_names() -> None:
    with pytest.raises(UnregisteredEnv, match=r"no task 'CartPole-v9': did you mean .*'CartPole-v1'"):
        EnvPoolVectorEnv("CartPole-v9")
    with pytest.raises(UnregisteredEnv, match="task_ids"):
        EnvPoolVectorEnv("qqqq")
    with pytest.raises(TypeError, match="string"):
        EnvPoolVectorEnv(7)  # type: ignore[arg-type]


def test_unknown_option_raises_with_the_accepted_names() -> None:
    with pytest.raises(TypeError, match=r"no option 'frameskip'. Did you mean 'frame_skip'\? Accepted keys:.*episodic_life"):
        EnvPoolVectorEnv("Pong-v5", frameskip=4)
    with pytest.raises(TypeError, match=r"'env_seed' cannot be set here: pass seed="):
        EnvPoolVectorEnv("Pong-v5", env_seed=[1])
    with pytest.raises(TypeError, match=r"'env_type' cannot be set here: remove it"):
        EnvPoolVectorEnv("CartPole-v1", env_type="gymnasium")


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"frame_skip": "four"}, "'Pong-v5'"), ({"stack_num": "four"}, "stack_num must be an integer"),
        ({"task": 3}, "task must be a string"), ({"max_num_players": 2}, "belongs to the task"),
    ],
)  # fmt: skip
def test_option_of_a_wrong_type_raises_with_its_name(options: dict[str, Any], text: str) -> None:
    with pytest.raises(TypeError, match=text):
        EnvPoolVectorEnv("Pong-v5", 1, **options)


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"num_envs": 0}, ValueError, "num_envs must be from 1"),
        ({"num_envs": 2.0}, TypeError, "num_envs must be an integer"),
        ({"num_envs": 6, "batch_size": 4}, ValueError, r"must divide num_envs=6 \(one of \[1, 2, 3, 6\]\), got 4"),
        ({"num_envs": 6, "batch_size": 12}, ValueError, "must divide"),
        ({"num_envs": 6, "batch_size": 0}, ValueError, "batch_size"),
        ({"num_threads": 0}, ValueError, "num_threads"),
        ({"num_threads": 1.5}, TypeError, "num_threads"),
        ({"max_episode_steps": 0}, ValueError, "max_episode_steps must be from 1"),
        ({"max_episode_steps": -1}, ValueError, "max_episode_steps must be from 1"),
        ({"render_mode": "human"}, ValueError, "'rgb_array' or None"),
        ({"autoreset_mode": "x"}, ValueError, "not a valid AutoresetMode"),
        ({"num_envs": 4, "batch_size": 2, "autoreset_mode": "SameStep"}, ValueError, "one batch"),
        ({"num_envs": 2, "seed": [1]}, ValueError, "num_envs=2 but got length=1"),
        ({"seed": -1}, ValueError, "must not be negative"),
        ({"seed": 1.5}, TypeError, "seed must be an integer"),
        ({"num_envs": 2, "seed": [1, "a"]}, TypeError, "seed of env 1"),
    ],
    ids=str,
)
def test_constructor_with_invalid_options_raises(options: dict[str, object], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        EnvPoolVectorEnv("CartPole-v1", **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("task_id", ["CliffWalking-v1", "Game2048-v1", "Play2048-v1", "parking-v0"])
def test_time_limit_that_envpool_ignores_raises(task_id: str) -> None:
    with pytest.raises(NotImplementedError, match=f"{task_id}' ignores max_episode_steps"):
        EnvPoolVectorEnv(task_id, max_episode_steps=3)


@pytest.mark.long
def test_error_without_envpool_names_the_extra() -> None:
    program = """
import sys
sys.modules["envpool"] = None
from vecenv.backends import EnvPoolVectorEnv
try:
    EnvPoolVectorEnv("CartPole-v1")
except ImportError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=250, check=True)
    assert "pip install 'vecenv[envpool]'" in done.stdout
    assert "Python 3.11 to 3.14" in done.stdout


def test_importing_the_backend_does_not_import_envpool() -> None:
    program = "import sys, vecenv.backends.envpool; print('envpool' in sys.modules, 'jax' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=250, check=True)
    assert done.stdout.split() == ["False", "False"]


def test_task_ids_are_listed_by_family() -> None:
    assert "CartPole-v1" in EnvPoolVectorEnv.task_ids()
    assert "Pong-v5" in EnvPoolVectorEnv.task_ids("atari")
    assert set(EnvPoolVectorEnv.task_ids("mujoco.dmc")) < set(EnvPoolVectorEnv.task_ids("mujoco"))
    with pytest.raises(ValueError, match=r"no family 'mario'; it has atari, box2d"):
        EnvPoolVectorEnv.task_ids("mario")


# --- actions of spaces that no task of EnvPool 1.2.5 has -----------------------------------------


def test_dict_actions_are_checked_leaf_by_leaf() -> None:
    space = Dict({"go": Discrete(3, start=1), "arm": Dict({"push": Box(-1, 1, (2,), np.float32)})})
    check = ActionChecker(space, ["action.go", "action.arm.push"], [np.int32, np.float32])
    ids = np.arange(2, dtype=np.int32)
    actions = {"go": [1, 3], "arm": {"push": np.zeros((2, 2))}}
    go, push = check(actions, ids)
    assert (go.dtype, push.dtype) == (np.int32, np.float32)
    assert go.tolist() == [1, 3]
    with pytest.raises(ValueError, match=r"actions\['go'\] must be from 1 to 3; got \[0\] for envs \[1\]"):
        check({**actions, "go": [1, 0]}, ids)
    with pytest.raises(ValueError, match=r"actions\['arm.push'\]: got shape .*, expected \(2, 2\)"):
        check({**actions, "arm": {"push": np.zeros(2)}}, ids)
    with pytest.raises(TypeError, match=r"actions have no 'go'; they have \['arm'\]"):
        check({"arm": actions["arm"]}, ids)
    with pytest.raises(TypeError, match=r"actions\['arm'\] have no 'push'; they have \['pull'\]"):
        check({**actions, "arm": {"pull": 0}}, ids)
    with pytest.raises(TypeError, match="must be a dict"):
        check([1, 2], ids)
    assert [array.shape for array in check.dummy_actions(3)] == [(3,), (3, 2)]
    assert check.dummy_actions(1)[0].tolist() == [1]


def test_uncommon_options_are_tried_once(monkeypatch: pytest.MonkeyPatch) -> None:
    trials = []

    class SuccessfulTrial:
        returncode, stdout, stderr = 0, b"survived", b""

    def run_trial(*_: Any, **__: Any) -> type[SuccessfulTrial]:
        trials.append(1)
        return SuccessfulTrial

    monkeypatch.setattr(task.subprocess, "run", run_trial)
    task._run_trial.cache_clear()
    try:
        EnvPoolVectorEnv(
            "Pong-v5", 1, frame_skip=2, stack_num=2, noop_max=10, episodic_life=True, img_height=64, img_width=64
        )
        EnvPoolVectorEnv("FrozenLake-v1", 1, size=4)  # the default
        assert not trials
        for _ in range(2):
            EnvPoolVectorEnv("Ant-v4", 1, ctrl_cost_weight=0.25)
        assert len(trials) == 1
        EnvPoolVectorEnv("Ant-v4", 1, ctrl_cost_weight=0.125)
        assert len(trials) == 2
    finally:
        task._run_trial.cache_clear()


def test_options_with_a_hanging_trial_raise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(task, "_TRIAL_SECONDS", 0.01)
    task._run_trial.cache_clear()
    with pytest.raises(ValueError, match=r"cannot be built with ctrl_cost_weight=0.75: .* no result within 0.01 s"):
        EnvPoolVectorEnv("Ant-v4", 1, ctrl_cost_weight=0.75)
    task._run_trial.cache_clear()


def test_options_may_be_arrays(closes: Any) -> None:
    envs = closes(EnvPoolVectorEnv("MiniGrid-Empty-5x5-v0", agent_start_pos=np.array([2, 2])))
    assert envs.reset()[1]["agent_pos"].tolist() == [[2, 2]]


# --- ``vecenv.evaluate`` runs episodes in waves, because EnvPool seeds all environments at once --


def balance(observations: Any) -> Any:
    """Push CartPole towards the side to which the pole leans."""
    return (observations[:, 2] > 0).astype(np.int32)


@pytest.mark.parametrize("batch_size", [None, 2])
def test_evaluation_is_equal_for_every_number_of_environments(batch_size: int | None) -> None:
    episodes = []
    for num_envs in (2, 6):
        settings = {"batch_size": batch_size, "num_threads": 1}
        envs = vecenv.make_vec("CartPole-v1", num_envs, "envpool", vector_kwargs=settings)
        results = vecenv.evaluate(envs, balance, 7, seed=50)
        episodes.append([(one.index, one.seed, one.episode_return, one.length, one.terminated) for one in results])
        envs.close()
    assert episodes[0] == episodes[1]
    assert [seed for _, seed, _, _, _ in episodes[0]] == list(range(50, 57))
    assert len({length for _, _, _, length, _ in episodes[0]}) > 3


def test_evaluation_with_an_unsupported_seed_raises(closes: Any) -> None:
    envs = closes(vecenv.make_vec("CartPole-v1", 2, "envpool", vector_kwargs={"num_threads": 1}))
    with pytest.raises(NotImplementedError, match="cannot give an episode the seed 2147483648: EnvPool's seeds are below"):
        vecenv.evaluate(envs, balance, [vecenv.Episode(seed=2**31)])


# --- the contract of vector environments --------------------------------------------------------


class EnvPoolContract(VectorEnvContract):
    """The contract over EnvPool. Masked resets cannot have seeds, because EnvPool seeds an environment only to build it."""

    task_id: str
    options: ClassVar[dict[str, Any]] = {}
    seeds_masked_resets = False

    def make(
        self,
        num_envs: int = 3,
        autoreset_mode: AutoresetMode = AutoresetMode.NEXT_STEP,
        **kwargs: Any,
    ) -> EnvPoolVectorEnv:
        return EnvPoolVectorEnv(
            self.task_id, num_envs, autoreset_mode=autoreset_mode, num_threads=1, **self.options, **kwargs
        )

    def test_masked_reset_with_a_seed_raises_and_changes_nothing(self) -> None:
        self._skip_without("supports_reset_mask")
        with self.opened(3) as envs:
            envs.reset(seed=1)
            with pytest.raises(NotImplementedError, match="seed some environments only"):
                envs.reset(seed=9, options={"reset_mask": np.array([True, False, True])})
            self._check_step(envs, self.step(envs))


class TestClassicControl(EnvPoolContract):
    task_id = "CartPole-v1"


@pytest.mark.long
class TestTimeLimit(EnvPoolContract):
    task_id = "CartPole-v1"
    options: ClassVar[dict[str, Any]] = {"max_episode_steps": 11}


@pytest.mark.long
class TestFlatDictObservations(EnvPoolContract):
    task_id = "MiniGrid-Empty-5x5-v0"
    options: ClassVar[dict[str, Any]] = {"max_episode_steps": 20}


@pytest.mark.long
class TestNestedDictObservations(EnvPoolContract):
    task_id = "Maze-v0"


class TestFirstReady(EnvPoolContract):
    """A pool with small batches. ``step`` sends actions to all environments and collects all results."""

    task_id = "CartPole-v1"
    autoreset_modes = (AutoresetMode.NEXT_STEP, AutoresetMode.DISABLED)
    supports_reset_mask = False
    options: ClassVar[dict[str, Any]] = {"batch_size": 1}

    def test_reset_mask_error_names_the_alternative(self) -> None:
        with self.opened(3) as envs:
            envs.reset(seed=1)
            with pytest.raises(NotImplementedError, match="reset_async"):
                envs.reset(options={"reset_mask": np.array([False, True, False])})

    def test_reset_async_resets_finished_rows_without_autoreset(self) -> None:
        with self.opened(autoreset_mode=AutoresetMode.DISABLED) as envs:
            envs.reset(seed=1)
            for _ in range(3):
                _, _, terminations, truncations, _ = self.step_until_done(envs)
                finished = np.flatnonzero(terminations | truncations)
                envs.reset_async(env_id=finished)
                assert {int(envs.recv()[4]["env_id"][0]) for _ in finished} == set(finished.tolist())
