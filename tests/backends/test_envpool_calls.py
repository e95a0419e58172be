"""Calls in and out of order: first-ready batches, timeouts, forks, the end."""

from __future__ import annotations

import copy
import gc
import os
import pickle
import subprocess
import sys
import textwrap
import threading
import time
from contextlib import closing
from typing import Any

import numpy as np
import pytest
from forks import in_a_fork
from gymnasium.error import (
    AlreadyPendingCallError,
    ClosedEnvironmentError,
    NoAsyncCallError,
    ResetNeeded,
)
from gymnasium.vector import AutoresetMode

pytest.importorskip("envpool")

from vecenv.backends import EnvPoolVectorEnv
from vecenv.errors import ForkedError, StepTimeout

from .conftest import Make, zeros
from .pool_doubles import SlowPool

# --- first-ready batches ------------------------------------------------------------------------


def test_any_numbers_may_be_sent_at_a_time(make: Make) -> None:
    envs = make(6, batch_size=3, num_threads=2)
    rng = np.random.default_rng(0)
    envs.reset_async()
    idle: set[int] = set()
    counts = np.zeros(6, dtype=int)
    for _ in range(300):
        flying = 6 - len(idle)
        if flying >= 3 and (not idle or rng.random() < 0.5):
            ids = envs.recv()[4]["env_id"].tolist()
            counts[ids] += 1
            idle |= set(ids)
        else:
            chosen = rng.permutation(sorted(idle))[: rng.integers(1, len(idle) + 1)]
            envs.send(zeros(len(chosen)), chosen)
            idle -= set(chosen.tolist())
        assert envs.stats()["in_flight"] == 6 - len(idle)
        for wrong in sorted(set(range(6)) - idle)[:1]:
            with pytest.raises(AlreadyPendingCallError, match=rf"envs \[{wrong}\], which are still in flight"):
                envs.send(zeros(1 + len(idle)), [*idle, wrong])
    assert (counts > 10).all()


@pytest.mark.parametrize("received", range(4))
@pytest.mark.parametrize("sent", range(3))
def test_a_reset_of_all_lets_everything_in_flight_finish_first(make: Make, received: int, sent: int) -> None:
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


def test_lockstep_takes_one_call_at_a_time_of_any_environments(make: Make) -> None:
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
    kept, _ = envs.reset(options={"reset_mask": np.array([True, False, False, False])})
    np.testing.assert_array_equal(kept[[3, 1]], observations)


def test_same_step_resets_work_through_recv_too(make: Make) -> None:
    envs = make(3, autoreset_mode="SameStep", max_episode_steps=2)
    envs.reset()
    for _ in range(2):
        envs.send(zeros(2), [2, 0])
        infos = envs.recv()[4]
    assert infos["_final_obs"].tolist() == [True, True]
    assert infos["elapsed_step"].tolist() == [0, 0]
    assert infos["final_info"]["elapsed_step"].tolist() == [2, 2]


def test_actions_and_indices_are_copied_before_send_returns(make: Make) -> None:
    """EnvPool reads them in its own threads, later."""
    envs, same = make(64, batch_size=32), make(64, batch_size=32)
    for one in (envs, same):
        one.reset()
    actions, ids = zeros(64), np.arange(64, dtype=np.int32)
    envs.send(actions, ids)
    actions[:], ids[:] = 1, 0
    same.send(zeros(64))
    rows = [{}, {}]
    for found, one in zip(rows, (envs, same), strict=True):
        for _ in range(2):
            observations, *_, infos = one.recv()
            found |= dict(zip(infos["env_id"].tolist(), observations.tolist(), strict=True))
    assert rows[0] == rows[1]


# --- recv(count=) -------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 6, 8])
def test_any_count_of_rows_can_be_received_and_the_others_are_kept(make: Make, count: int) -> None:
    lockstep = make(8)
    stream = [(lockstep.reset()[0], *np.zeros((3, 8))), *(lockstep.step(zeros(8))[:4] for _ in range(30))]
    envs = make(8, batch_size=4, num_threads=2)
    envs.reset_async()
    seen = [0] * 8
    while min(seen) < 20 and max(seen) < 30:
        *parts, infos = envs.recv(count=count)
        ids = infos["env_id"].tolist()
        assert len(set(ids)) == count
        assert {len(part) for part in parts} == {count}
        assert envs.stats()["in_flight"] == 8 - count
        for row, i in enumerate(ids):
            for part, wanted in zip(parts, stream[seen[i]], strict=True):
                np.testing.assert_array_equal(part[row], wanted[i])
            seen[i] += 1
        envs.send(zeros(count))


def test_a_count_that_will_never_come_is_refused(make: Make) -> None:
    envs = make(6, batch_size=3)
    envs.reset()
    envs.send(zeros(4), [0, 1, 2, 3])
    with pytest.raises(NoAsyncCallError, match="for 5 environments with 4 environments in flight"):
        envs.recv(count=5)
    with pytest.raises(NoAsyncCallError, match="whole batches of 3, and 0 rows are ready"):
        envs.recv(count=4)
    assert len(envs.recv(count=2)[1]) == 2
    with pytest.raises(NoAsyncCallError, match="whole batches of 3, and 1 rows are ready"):
        envs.recv(count=2)
    assert len(envs.recv(count=1)[1]) == 1
    assert envs.stats()["in_flight"] == 1
    full = make(8, batch_size=4)
    full.reset_async()
    full.send(zeros(7), full.recv(count=7)[4]["env_id"])
    with pytest.raises(NoAsyncCallError, match=r"for 7 environments with 8 .* whole batches of 4, and 1 rows are ready"):
        full.recv(count=7)
    assert len(full.recv(count=5)[1]) == 5


def test_a_count_that_came_too_late_is_the_next_one(make: Make) -> None:
    envs, same = make(4, batch_size=1), make(4)
    envs.reset()
    same.reset()
    SlowPool(envs, 0.2)
    envs.send(zeros(4), np.arange(4))
    with pytest.raises(StepTimeout):
        envs.recv(0.3, count=4)  # one or two of the four are there by now
    wanted = same.step(zeros(4))[0]
    for count in (1, 3):
        observations, *_, infos = envs.recv(10.0, count=count)
        np.testing.assert_array_equal(observations, wanted[infos["env_id"]])
    assert envs.stats()["in_flight"] == 0


def test_an_env_id_that_the_caller_changes_is_not_whom_send_means(make: Make) -> None:
    envs = make(4, batch_size=2)
    envs.reset_async()
    ids = envs.recv()[4]["env_id"]
    mine = ids.tolist()
    ids[:] = 0
    envs.send(zeros(2))
    with pytest.raises(AlreadyPendingCallError, match=str(mine[0])):
        envs.send(zeros(1), mine[:1])


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning", "ignore:.*fork.*:RuntimeWarning")
def test_a_child_forked_in_the_middle_of_another_threads_call_is_told_that_it_was_forked(make: Make) -> None:
    envs = make(2)
    envs.reset()
    SlowPool(envs, 0.5)
    thread = threading.Thread(target=envs.step, args=(zeros(2),))
    thread.start()
    time.sleep(0.1)

    def check() -> None:
        for call in (envs.step, envs.send):
            with pytest.raises(ForkedError):
                call(zeros(2))
        envs.close()  # the pool's destructor would crash here
        mine = EnvPoolVectorEnv("CartPole-v1", 2)
        mine.reset()
        mine.close()

    assert in_a_fork(check) == 0
    thread.join()


# --- phases -------------------------------------------------------------------------------------


def test_without_autoreset_an_episode_that_is_over_is_not_stepped(make: Make) -> None:
    envs = make(2, autoreset_mode=AutoresetMode.DISABLED, max_episode_steps=1)
    envs.reset()
    envs.step(zeros(2))
    envs.reset(options={"reset_mask": np.array([True, False])})
    with pytest.raises(ResetNeeded, match=r"envs \[1\]"):
        envs.step(zeros(2))
    envs.send(zeros(1), [0])
    envs.recv()
    envs.reset()
    envs.step(zeros(2))


# --- timeouts -----------------------------------------------------------------------------------


def test_step_wait_can_be_called_again_after_a_timeout(make: Make) -> None:
    envs, same = make(4, autoreset_mode="SameStep", max_episode_steps=1), make(4, max_episode_steps=1)
    envs.reset()
    same.reset()
    SlowPool(envs, 0.1)  # the step takes two round trips
    envs.step_async(zeros(4))
    timeouts = 0
    while True:
        try:
            result = envs.step_wait(timeout=0.03)
            break
        except StepTimeout:
            timeouts += 1
    assert timeouts >= 3
    np.testing.assert_array_equal(np.stack(result[4]["final_obs"]), same.step(zeros(4))[0])
    np.testing.assert_array_equal(result[0], same.step(zeros(4))[0])


# --- threads, forks, the end --------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning", "ignore:.*fork.*:RuntimeWarning")
def test_a_forked_child_that_never_touches_it_ends_well() -> None:
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


def test_it_cannot_be_copied_or_pickled(make: Make) -> None:
    envs = make(2)
    for copied in (pickle.dumps, copy.copy, copy.deepcopy):
        with pytest.raises(TypeError, match="build one where it is to be used"):
            copied(envs)


def threads_beyond(before: set[str]) -> set[str]:
    """This process's threads that were not there before. Those that were may end at any time: they are other tests'."""
    return set(os.listdir("/proc/self/task")) - before


@pytest.mark.skipif(not os.path.isdir("/proc/self/task"), reason="counts threads in /proc")
@pytest.mark.parametrize("batch_size", [8, 4])
def test_close_ends_all_threads(make: Make, batch_size: int) -> None:
    make(8).reset()
    before = threads_beyond(set())
    envs = make(8, batch_size=batch_size, num_threads=3)
    assert not threads_beyond(before), "nothing is built before the first reset"
    envs.reset()
    envs.send(zeros(8), np.arange(8))
    envs.recv(timeout=10.0)
    assert len(threads_beyond(before)) >= 4, "three of the pool's, and one helper"
    envs.reset(seed=3) if batch_size == 8 else envs.reset()
    envs.close()
    assert not threads_beyond(before)
    for call in (envs.render, envs.xla):
        with pytest.raises(ClosedEnvironmentError, match="after a call to `close"):
            call()


def test_a_failed_construction_leaves_nothing_to_close() -> None:
    with pytest.raises(ValueError, match="batch_size"):
        EnvPoolVectorEnv("CartPole-v1", 4, batch_size=3)
    gc.collect()


def test_the_repr_states_the_state(make: Make) -> None:
    envs = make(4, batch_size=2)
    assert repr(envs) == "EnvPoolVectorEnv(CartPole-v1, num_envs=4, batch_size=2, phase=DEFAULT)"
    envs.reset_async()
    assert "phase=WAITING_RESET" in repr(envs)
    envs.close()
    assert "phase=CLOSED" in repr(envs)


# --- pictures and compiled code -----------------------------------------------------------------


def test_render_gives_one_frame_an_environment(make: Make) -> None:
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


def test_a_task_that_cannot_be_drawn_says_so(make: Make) -> None:
    envs = make(2, "FrozenLake-v1", render_mode="rgb_array")
    envs.reset()
    with pytest.raises(RuntimeError, match="EnvPool cannot draw 'FrozenLake-v1'"):
        envs.render()


@pytest.mark.long
@pytest.mark.parametrize("options", [{"render_mode": "rgb_array"}, {"from_pixels": True}], ids=["frames", "pixels"])
def test_mujoco_is_drawn_or_refused_but_never_ends_the_interpreter(options: dict[str, Any]) -> None:
    """In an interpreter of its own: Mesa, where it draws, keeps threads until the process ends."""
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
        print("went on")
    """)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "went on\n"), done.stderr


def test_xla_steps_inside_jit_and_the_pool_is_taken_back_by_reset(make: Make) -> None:
    pytest.importorskip("jax.numpy")
    import jax

    envs, same = make(4), make(4)
    with pytest.raises(ResetNeeded):
        envs.xla()
    envs.reset()
    same.reset()
    handle, _, _, step = envs.xla()
    actions = jax.numpy.zeros(4, dtype=jax.numpy.int32)
    try:
        _, (observations, *_) = jax.jit(step)(handle, actions)
    except Exception as error:
        pytest.skip(f"EnvPool's own XLA functions do not run here: {type(error).__name__}")
    np.testing.assert_array_equal(observations, same.step(zeros(4))[0])
    for call in (envs.recv, lambda: envs.step(zeros(4)), lambda: envs.send(zeros(4))):
        with pytest.raises(RuntimeError, match="reset"):
            call()
    assert envs.reset()[0].shape == (4, 4)
    envs.step(zeros(4))


def test_an_episode_that_only_the_time_limit_ends_is_truncated_and_not_terminated() -> None:
    with closing(EnvPoolVectorEnv("Pendulum-v1", 2, max_episode_steps=5)) as envs:
        envs.reset(seed=1)
        flags = [tuple(flag.tolist() for flag in envs.step(np.zeros((2, 1), np.float32))[2:4]) for _ in range(5)]
    assert flags == [([False] * 2, [False] * 2)] * 4 + [([False] * 2, [True] * 2)]
