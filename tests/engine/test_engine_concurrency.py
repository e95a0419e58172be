"""Concurrency: ``max_concurrency``, several environments in one worker, ``env_threads``; and what is sent to workers."""

from __future__ import annotations

import functools
import itertools
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from envs import (
    CounterEnv,
    Options,
    OverlapEnv,
    RaisingEnv,
    SleepingEnv,
    assert_matches_sync,
    counters,
    open_engine,
    raises_and_warns,
    ready_engine,
)
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from programs import python_output
from sampling import each_once
from signals import signal_handler

import vecenv
from vecenv.errors import EnvError, StepTimeout, WorkerDied
from vecenv.testing import assert_identical

# --- ``max_concurrency``: the maximum number of environments that are inside ``reset`` or ``step`` at once


@pytest.mark.parametrize("limit", [1, 2])
def test_max_concurrency_limits_resets_and_steps(every_engine: Options, limit: int, tmp_path: Path) -> None:
    fns = [functools.partial(OverlapEnv, tmp_path, index) for index in range(4)]
    with open_engine(fns, max_concurrency=limit, **every_engine) as envs:
        _, infos = envs.reset(seed=1)
        assert infos["inside"].max() <= limit
        for _ in range(2):
            infos = envs.step(np.zeros(4))[4]
            assert infos["inside"].max() <= limit


@pytest.mark.parametrize("limit", [1, 2])
def test_max_concurrency_limits_first_ready_batches(every_engine: Options, limit: int, tmp_path: Path) -> None:
    fns = [functools.partial(OverlapEnv, tmp_path, index) for index in range(4)]
    with open_engine(fns, max_concurrency=limit, batch_size=1, **every_engine) as envs:
        envs.reset_async(seed=1)
        env_ids = []
        for _ in range(12):
            infos = envs.recv(timeout=20)[4]
            assert infos["inside"] <= limit
            env_ids += infos["env_id"].tolist()
            envs.send(np.zeros(1), infos["env_id"])
    assert set(env_ids) == {0, 1, 2, 3}


class ShortOverlapEnv(OverlapEnv):
    """An :class:`OverlapEnv` with short steps for all actions, for the trial of an environment."""

    def __init__(self, folder: Path, env_id: int = 0) -> None:
        super().__init__(folder, env_id)
        self.action_space = spaces.Box(0.0, 1e-3, (), np.float64)


@pytest.mark.parametrize("limit", [1, 2])
def test_max_concurrency_includes_envs_of_the_calling_process(limit: int, tmp_path: Path) -> None:
    fns = [functools.partial(ShortOverlapEnv, tmp_path, index) for index in range(6)]
    with ready_engine(fns, max_concurrency=limit, num_workers=2, use_caller=True) as envs:
        insides = [envs.reset()[1]["inside"], *[envs.step(np.zeros(6))[4]["inside"] for _ in range(3)]]
        envs.send(np.zeros(6), range(6))
        for _ in range(30):
            infos = envs.recv(20.0, count=2)[4]
            insides.append(infos["inside"])
            envs.send(np.zeros(2), infos["env_id"])
        assert max(inside.max() for inside in insides) == limit


def test_max_concurrency_limits_a_reset_during_steps_that_it_drops(tmp_path: Path) -> None:
    fns = [functools.partial(OverlapEnv, tmp_path, index) for index in range(4)]
    with ready_engine(fns, max_concurrency=2) as envs:
        envs.send(np.zeros(2), env_id=[2, 3])
        _, infos = envs.reset(seed=1)
        assert infos["inside"].max() <= 2


def test_steps_overlap_without_max_concurrency(tmp_path: Path) -> None:
    fns = [functools.partial(OverlapEnv, tmp_path, index) for index in range(3)]
    with ready_engine(fns) as envs:
        assert max(envs.step(np.zeros(3))[4]["inside"].max() for _ in range(5)) > 1


@pytest.mark.long
def test_max_concurrency_does_not_limit_calls() -> None:
    with ready_engine([SleepingEnv] * 3, max_concurrency=1) as envs:
        begin = time.monotonic()
        envs.call("sleep", 2.0)
        assert time.monotonic() - begin < 5


@pytest.mark.parametrize("mode", AutoresetMode)
def test_max_concurrency_does_not_change_results(every_engine: Options, mode: AutoresetMode) -> None:
    assert_matches_sync(counters(4, lengths=(2, 3)), autoreset_mode=mode, max_concurrency=1, **every_engine)


def test_failed_env_does_not_block_others_at_max_concurrency() -> None:
    fns = [functools.partial(RaisingEnv, 0, ValueError("x"), "step", 1), *counters(3)[1:]]
    with ready_engine(fns, max_concurrency=1) as envs:
        with raises_and_warns(ValueError):
            envs.step([0, 0, 0])
        envs.reset(seed=1)
        assert envs.call("steps") == (0, 0, 0)


class WaitsForSecondEnv(OverlapEnv):
    """An environment that waits in a step, up to 0.5 s, until two are inside. Infos contain the largest number inside."""

    def step(self, action: Any) -> Any:
        with self._inside():
            deadline = time.monotonic() + 0.5
            most_inside = 0
            while most_inside < 2 and time.monotonic() < deadline:
                time.sleep(0.001)
                most_inside = max(most_inside, len(list(self.folder.iterdir())))
            time.sleep(0.01)
            observation, reward, terminated, truncated, info = CounterEnv.step(self, action)
        return observation, reward, terminated, truncated, info | {"most_inside": most_inside}


def test_two_envs_run_at_once_if_max_concurrency_is_2(tmp_path: Path) -> None:
    fns = [functools.partial(WaitsForSecondEnv, tmp_path, index) for index in range(4)]
    with ready_engine(fns, max_concurrency=2) as envs:
        assert envs.step(np.zeros(4))[4]["most_inside"].max() == 2


@pytest.mark.sampled(1)
@pytest.mark.parametrize("limit", [4, 100])
def test_max_concurrency_above_num_envs_has_no_effect(limit: int) -> None:
    assert_matches_sync(counters(2), max_concurrency=limit)


def test_large_pickled_reply_does_not_block_others() -> None:
    """The next worker may step while a worker waits until its reply is read."""

    class LargeObservationEnv(CounterEnv):
        def __init__(self) -> None:
            super().__init__()
            self.observation_space = spaces.Box(0, 255, (256, 256, 3), np.uint8)

        def _observe(self) -> np.ndarray:
            return np.full((256, 256, 3), self.steps, np.uint8)

    with open_engine([LargeObservationEnv] * 4, max_concurrency=1, shared_memory=False) as envs:
        envs.reset_async(seed=1)
        assert envs.reset_wait(timeout=20)[0].shape == (4, 256, 256, 3)
        assert (envs.step([0] * 4)[0] == 1).all()


class TimedEnv(SleepingEnv):
    """An environment that reports when a step began and ended, by ``time.monotonic()``."""

    def step(self, action: Any) -> Any:
        began = time.monotonic()
        *result, info = super().step(action)
        return *result, {**info, "began": began, "ended": time.monotonic()}


@pytest.mark.parametrize(("on_failure", "by_row"), [("raise", False), ("restart", True)])
def test_time_limits_of_steps_exclude_the_wait_for_max_concurrency(on_failure: str, by_row: bool) -> None:
    """The time limit of a step begins when the step begins, not when it is sent."""
    with ready_engine([SleepingEnv] * 4, max_concurrency=1, step_timeout=1.0, on_failure=on_failure) as envs:
        if by_row:
            envs.send([0.3] * 4, range(4))
            rewards = envs.recv(count=4)[1]
        else:
            rewards = envs.step([0.3] * 4)[1]
        assert rewards.shape == (4,)
        assert not envs.errors
        assert envs.stats()["restarts"] == 0


def test_max_concurrency_limits_steps_after_an_interrupted_call() -> None:
    """The call waits behind the step of env 2, which waits for that of env 0."""
    options: Options = {"num_workers": 2, "max_concurrency": 1}
    with signal_handler(signal.SIGALRM, TimeoutError), ready_engine([TimedEnv] * 4, **options) as envs:
        envs.send([0.4, 0.0], [0, 2])
        signal.setitimer(signal.ITIMER_REAL, 0.1)
        with pytest.raises(TimeoutError):
            envs.exec_func(TimedEnv.sleep, [3], 0.0)
        infos = envs.recv(20.0, count=2)[4]
    (first, second) = np.argsort(infos["env_id"])
    assert infos["began"][second] >= infos["ended"][first]


def test_hanging_env_is_reported_while_others_wait_for_max_concurrency() -> None:
    with ready_engine([SleepingEnv] * 3, max_concurrency=1, step_timeout=0.5) as envs:
        envs.step_async([0.1, 100.0, 0.0])
        with pytest.raises(StepTimeout, match="env") as caught:
            envs.step_wait()
        assert caught.value.envs == (1,)
        envs.abandon([1, 2])  # the step of env 2 has not begun, so it is not abandoned
        with pytest.raises(WorkerDied) as died:
            envs.step_wait()
        assert died.value.envs == (1,)
        envs.reset(options={"reset_mask": np.array([False, True, False])})
        assert envs.get_attr("steps") == (1, 0, 1)


def test_hanging_env_is_reported_if_an_interrupted_call_waits_behind_it() -> None:
    """The dropped call to env 3 is behind the step of env 4, which waits for the hanging one of env 2."""
    options: Options = {"num_workers": 3, "max_concurrency": 1, "step_timeout": 0.5}
    with signal_handler(signal.SIGALRM, TimeoutError), ready_engine([SleepingEnv] * 6, **options) as envs:
        envs.send([0.3, 100.0, 0.0], [0, 2, 4])
        signal.setitimer(signal.ITIMER_REAL, 0.1)
        with pytest.raises(TimeoutError):
            envs.exec_func(SleepingEnv.sleep, [3], 0.0)
        assert envs.recv(20.0, count=1)[4]["env_id"].tolist() == [0]
        signal.setitimer(signal.ITIMER_REAL, 20.0)  # ends the wait if the timeout does not
        with pytest.raises(StepTimeout) as caught:
            envs.recv(count=1)
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        assert caught.value.envs == (2,)


@pytest.mark.parametrize(
    ("interrupted", "args", "method"),
    [("step", ([100.0, 0.0],), "step_wait"), ("exec_func", (SleepingEnv.sleep, [0], 100.0), "reset_wait")],
)
def test_timeout_of_a_reset_after_an_interrupted_call_names_the_method_to_call(
    interrupted: str, args: Any, method: str
) -> None:
    """The reset waits for an interrupted step, which ``step_wait`` can fetch. It drops an interrupted call."""
    options: Options = {"num_workers": 2, "max_concurrency": 1, "step_timeout": 0.5}
    with signal_handler(signal.SIGALRM, TimeoutError), ready_engine([SleepingEnv] * 2, **options) as envs:
        signal.setitimer(signal.ITIMER_REAL, 0.1)
        with pytest.raises(TimeoutError):
            getattr(envs, interrupted)(*args)
        with pytest.raises(StepTimeout, match=f"call `{method}` again") as caught:
            envs.reset()
        assert caught.value.envs == (0,)
        envs.abandon(caught.value.envs)
        with pytest.raises(WorkerDied):
            getattr(envs, method)()


@pytest.mark.long
def test_reset_that_waits_for_an_interrupted_call_kills_no_worker() -> None:
    options: Options = {"num_workers": 2, "max_concurrency": 1, "step_timeout": 2.0, "on_failure": "restart"}
    with signal_handler(signal.SIGALRM, TimeoutError), ready_engine([SleepingEnv] * 2, **options) as envs:
        envs.step([0.0, 0.0])
        envs.call_async("sleep", 8.0)
        signal.setitimer(signal.ITIMER_REAL, 0.1)
        with pytest.raises(TimeoutError):
            envs.call_wait()
        with pytest.raises(StepTimeout, match="call `call_wait` again"):
            envs.reset()
        assert envs.call_wait() == (0, 0)
        assert envs.get_attr("steps") == (1, 1)
        assert envs.stats()["restarts"] == 0


class DiesInStep(SleepingEnv):
    """An environment that creates a file and ends its process in every step. If the file exists, resets take 0.6 s."""

    def __init__(self, file: Path) -> None:
        super().__init__()
        self.file = file

    def reset(self, **kwargs: Any) -> Any:
        time.sleep(0.6 if self.file.exists() else 0.0)
        return super().reset(**kwargs)

    def step(self, action: Any) -> Any:
        self.file.touch()
        os._exit(1)


@pytest.mark.long
def test_time_limits_of_rebuilds_exclude_the_wait_for_max_concurrency(tmp_path: Path) -> None:
    fns = [functools.partial(DiesInStep, tmp_path / str(env)) for env in range(4)]
    options: Options = {"step_timeout": 1.0, "worker_options": vecenv.WorkerOptions(start_timeout=1.0)}
    with ready_engine(fns, max_concurrency=1, on_failure="restart", **options) as envs:
        assert envs.step([0.0] * 4)[3].all()
        assert envs.stats()["restarts"] == 4


# --- several environments in one worker: the results are the same, and errors name environments, not workers


@pytest.mark.sampled("1-1", "5-3", "2-5")
@pytest.mark.parametrize(
    ("num_envs", "num_workers"),
    [(1, 1), (3, 1), (3, 2), (4, 2), (5, 2), (5, 3), (7, 3), (7, 4), (8, 3), (4, 4), (2, 5), (3, None)],
)
def test_environments_are_split_into_contiguous_even_shares(num_envs: int, num_workers: int | None) -> None:
    """There are at most as many workers as environments. ``None`` starts one worker per environment."""
    with open_engine(counters(num_envs), num_workers=num_workers) as envs:
        pids = envs.call("pid")
        num_workers = min(num_workers or num_envs, num_envs)
        assert len(envs.processes) == envs.num_workers == num_workers
        assert len(set(pids)) == num_workers
        assert os.getpid() not in pids
        boundaries = sum(pid != next_pid for pid, next_pid in itertools.pairwise(pids))
        assert boundaries == num_workers - 1, "the environments of a worker are not contiguous"
        sizes = [pids.count(pid) for pid in set(pids)]
        assert max(sizes) - min(sizes) <= 1
        assert envs.reset(seed=1)[0][:, 0].tolist() == list(range(num_envs))


@pytest.mark.sampled("1-AutoresetMode.NEXT_STEP-True")
@pytest.mark.parametrize(("num_workers", "mode", "shared_memory"), each_once([1, 2, 3, 5], AutoresetMode, [True, False]))
def test_results_of_uneven_shares_equal_sync_vector_env(
    num_workers: int, mode: AutoresetMode, shared_memory: bool, closes: Any
) -> None:
    fns = [functools.partial(CounterEnv, index, lengths=(1 + index, 2)) for index in range(5)]
    reference = closes(SyncVectorEnv(fns, autoreset_mode=mode))
    rng = np.random.default_rng(num_workers)
    with open_engine(fns, num_workers=num_workers, autoreset_mode=mode, shared_memory=shared_memory) as envs:
        assert_identical(envs.reset(seed=9), reference.reset(seed=9))
        for t in range(12):
            actions = rng.integers(5, size=5)
            result, expected = envs.step(actions), reference.step(actions)
            assert_identical(result, expected, f"step {t}")
            mask = expected[2] | expected[3] if mode is AutoresetMode.DISABLED else rng.random(5) < 0.2
            if mask.any():
                result, expected = (
                    vector_env.reset(seed=t, options={"reset_mask": mask.copy()}) for vector_env in (envs, reference)
                )
                assert_identical(result, expected, f"reset after step {t}")


def test_num_workers_0_steps_in_the_calling_thread() -> None:
    class ThreadEnv(CounterEnv):
        def thread_id(self) -> int:
            return threading.get_ident()

    with open_engine([ThreadEnv] * 3, num_workers=0) as envs:
        assert envs.call("pid") == (os.getpid(),) * 3
        assert envs.call("thread_id") == (threading.get_ident(),) * 3
        assert len(envs.processes) == 0
        assert envs.num_workers == 0


def test_auto_starts_at_most_one_worker_per_environment() -> None:
    with open_engine(counters(4), num_workers="auto") as envs:
        assert isinstance(envs.num_workers, int)
        assert 0 <= envs.num_workers <= 4
        assert envs.reset(seed=1)[0][:, 0].tolist() == [0, 1, 2, 3]


def test_repr_shows_the_number_of_workers() -> None:
    with open_engine(counters(4), num_workers=2) as envs:
        assert "num_envs=4" in repr(envs)
        assert "workers=2" in repr(envs)


def test_results_of_calls_and_render_are_in_environment_order() -> None:
    with ready_engine(counters(5, render_mode="rgb_array"), num_workers=2) as envs:
        assert envs.call("add", 1) == (1, 2, 3, 4, 5)
        assert [int(frame[0, 0, 0]) for frame in envs.render()] == [0, 10, 20, 30, 40]
        envs.set_attr("note", list("abcde"))
        assert envs.get_attr("note") == tuple("abcde")
        assert envs.exec_func(lambda env: env.env_id, [0, 4]) == (0, None, None, None, 4)


@pytest.mark.parametrize("failing", range(5))
def test_failing_environment_is_named_and_its_siblings_are_stepped(failing: int) -> None:
    fns = counters(5, lengths=(9,))
    fns[failing] = functools.partial(RaisingEnv, failing, ValueError("x"), "step", 2)
    with ready_engine(fns, num_workers=2) as envs:
        envs.step([0] * 5)
        with raises_and_warns(ValueError) as (caught, _):
            envs.step([0] * 5)
        assert f"env {failing}" in "\n".join(caught.value.__notes__)
        others = [index for index in range(5) if index != failing]
        steps = envs.exec_func(lambda env: env.steps, others)
        assert [steps[index] for index in others] == [2] * 4
        observations, _ = envs.reset(seed=1)
        assert observations[:, 2].tolist() == [1 if index == failing else 2 for index in range(5)]


def test_several_failures_in_one_worker_are_all_reported() -> None:
    fns = [functools.partial(RaisingEnv, index, ValueError(f"x{index}"), "step", 1) for index in range(4)]
    with ready_engine([*counters(1), *fns[1:]], num_workers=1) as envs:
        with raises_and_warns(ValueError, match="x1", failures=3) as (caught, _):
            envs.step([0] * 4)
        notes = "\n".join(caught.value.__notes__)
        assert [index for index in range(4) if f"env {index}" in notes] == [1, 2, 3]
        envs.reset(seed=1)


# --- ``env_threads``: environments of one worker run in several threads. Results are identical to those of one thread

BARRIER = threading.Barrier(4)  # shared by the environments of one worker; each process has its own copy


class WaitsForFour(gymnasium.Wrapper[Any, Any, Any, Any]):
    """An environment with steps and resets that wait until four environments of its worker are inside."""

    def __init__(self, index: int, length: int = 3) -> None:
        super().__init__(counters(8, lengths=(length,))[index]())

    def reset(self, **kwargs: Any) -> Any:
        BARRIER.wait(60)
        return super().reset(**kwargs)

    def step(self, action: Any) -> Any:
        BARRIER.wait(60)
        return super().step(action)


class FaultyByAction(gymnasium.Wrapper[Any, Any, Any, Any]):
    """An environment that raises for action 1, kills its process for action 2 and hangs for action 3."""

    def step(self, action: Any) -> Any:
        if action == 1:
            raise ArithmeticError("action 1")
        if action == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        if action == 3:
            time.sleep(600)
        return super().step(action)


def make_faulty_env_fns(count: int) -> list[Any]:
    return [functools.partial(make_faulty_env, index) for index in range(count)]


def make_faulty_env(index: int) -> Any:
    return FaultyByAction(counters(8, lengths=(3 + index % 2,))[index]())


def test_stats_include_the_step_times_of_threads() -> None:
    with ready_engine([functools.partial(SleepingEnv, index) for index in range(2)], num_workers=1, env_threads=2) as envs:
        envs.step(np.array([0.02, 0.05]))
        assert envs.stats()["step_time_slowest_env"] >= 0.05
        assert envs.stats()["step_time_mean"] >= 0.025


def test_environments_of_a_worker_run_concurrently() -> None:
    with ready_engine([functools.partial(WaitsForFour, index) for index in range(8)], num_workers=2, env_threads=4) as envs:
        for _ in range(8):  # through two autoresets
            envs.step(np.zeros(8, np.int64))
        envs.send(np.zeros(4, np.int64), range(4))
        assert sorted(envs.recv(count=4)[4]["env_id"].tolist()) == [0, 1, 2, 3]


@pytest.mark.parametrize("threads", [2, 16])
@pytest.mark.parametrize("mode", AutoresetMode)
def test_results_in_threads_equal_sync_vector_env(mode: AutoresetMode, threads: int, closes: Any) -> None:
    reference = closes(SyncVectorEnv(make_faulty_env_fns(5), autoreset_mode=mode))
    with open_engine(make_faulty_env_fns(5), num_workers=2, env_threads=threads, autoreset_mode=mode) as envs:
        assert_identical(envs.reset(seed=3), reference.reset(seed=3))
        for t in range(12):
            actions = np.arange(4, 9)  # none of these actions causes a fault
            result = envs.step(actions)
            assert_identical(result, reference.step(actions))
            ended = result[2] | result[3]
            if ended.any() and mode is AutoresetMode.DISABLED:
                for vector_env in (envs, reference):
                    observations, _ = vector_env.reset(seed=[t] * 5, options={"reset_mask": ended.copy()})
                    assert_identical(observations[ended], envs.observations[ended])
        assert envs.stats()["step_time_slowest_env"] > 0


def test_environment_that_raises_does_not_affect_others() -> None:
    with ready_engine(make_faulty_env_fns(4), num_workers=1, env_threads=4) as envs:
        with raises_and_warns(ArithmeticError):
            envs.step(np.array([0, 1, 0, 0]))
        assert envs.observations[[0, 2, 3], 1].tolist() == [1, 1, 1]
        envs.reset(options={"reset_mask": np.array([False, True, False, False])})
        assert envs.step(np.zeros(4, np.int64))[0][:, 1].tolist() == [2, 1, 2, 2]


def test_death_of_a_worker_fails_all_its_environments() -> None:
    with ready_engine(make_faulty_env_fns(4), num_workers=2, env_threads=2) as envs:
        with pytest.raises(WorkerDied) as caught:
            envs.step(np.array([0, 0, 2, 0]))
        assert caught.value.envs == (2, 3)
        envs.reset(seed=1)
        assert envs.step(np.zeros(4, np.int64))[0][:, 1].tolist() == [1, 1, 1, 1]


def test_hanging_environment_is_reported_and_killed() -> None:
    with ready_engine(make_faulty_env_fns(4), num_workers=1, env_threads=4) as envs:
        envs.step_async(np.array([0, 3, 0, 0]))
        with pytest.raises(StepTimeout) as caught:
            envs.step_wait(timeout=0.5)
        assert f'{__file__}", line' in str(caught.value), "the line at which it hangs is missing"
        envs.close(terminate=True)
    with ready_engine(make_faulty_env_fns(2), num_workers=1, env_threads=2, on_failure="restart", step_timeout=1.0) as envs:
        *_, truncations, infos = envs.step(np.array([0, 3]))
        assert truncations.tolist() == infos["restarted"].tolist() == [True, True]


def test_invalid_thread_options_are_refused() -> None:
    for options, text in (
        ({"env_threads": 0, "num_workers": 1}, "`env_threads` must be a positive int, got 0"),
        ({"env_threads": 2, "num_workers": 0}, "`env_threads` needs worker processes"),
        ({"env_threads": 2, "use_caller": True}, "`env_threads` needs worker processes"),
        ({"env_threads": 2, "max_concurrency": 1}, "`max_concurrency` must be None with env_threads"),
        ({"env_threads": 2, "num_workers": "auto"}, "`num_workers` must be None or a positive int with env_threads"),
    ):
        with pytest.raises(ValueError, match=text):
            vecenv.AsyncVectorEnv(make_faulty_env_fns(2), **options)  # type: ignore[arg-type]


# --- functions and values that are sent to workers

PROGRAM_WITH_LATER_DEFINITIONS = """
import sys
import gymnasium as gym
import numpy as np
import vecenv

class Env(gym.Env):
    observation_space, action_space = gym.spaces.Box(0, 1, (1,)), gym.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        return np.zeros(1, np.float32), {}

    def step(self, action):
        return np.zeros(1, np.float32), 1.0, False, False, {}

def main():
    envs = vecenv.AsyncVectorEnv([Env, Env], num_workers=1, context=sys.argv[1])
    envs.reset(seed=0)
    exec("def function(env, x=1): return isinstance(env, Env), x", globals())
    print(envs.exec_func(function), envs.exec_func(function, None, 5))
    exec("def function(env): return 'new definition'", globals())
    print(envs.exec_func(function))
    exec("class Value: pass", globals())
    envs.set_attr("value", [Value(), Value()])
    print([type(value) is Value for value in envs.get_attr("value")])
    print(envs.step([0, 0])[1])
    envs.close()

if __name__ == "__main__":
    main()
"""


@pytest.mark.parametrize("context", ["fork", "forkserver", "spawn"])
def test_functions_defined_in_main_after_the_start_reach_workers(context: str, tmp_path: Path) -> None:
    """A later cell of a notebook may define a function for ``exec_func``, which a forked worker does not have."""
    program = tmp_path / "program.py"
    program.write_text(PROGRAM_WITH_LATER_DEFINITIONS)
    first, second, third, last = python_output(program, context).splitlines()
    assert first == "((True, 1), (True, 1)) ((True, 5), (True, 5))"
    assert second == "('new definition', 'new definition')"
    assert third == "[True, True]"
    assert last == "[1. 1.]"


class CannotBeUnpickled:
    """A value that can be pickled but not unpickled."""

    def __reduce__(self) -> Any:
        return int, ("not a number",)


def test_result_that_cannot_be_unpickled_raises() -> None:
    with ready_engine(counters(2), num_workers=1) as envs:
        with pytest.raises(EnvError, match="env 0: its result cannot be unpickled: ValueError"):
            envs.exec_func(lambda env: CannotBeUnpickled())
        envs.step(np.zeros(2, int))


def test_argument_that_cannot_be_unpickled_raises_and_workers_continue() -> None:
    with ready_engine(counters(3), num_workers=2) as envs:
        pids = [process.pid for process in envs.processes]
        for call in (
            lambda: envs.set_attr("value", CannotBeUnpickled()), lambda: envs.call("echo", CannotBeUnpickled()),
            lambda: envs.exec_func(lambda env, value: value, None, CannotBeUnpickled()),
        ):  # fmt: skip
            with pytest.raises(EnvError, match="env 0: the request cannot be unpickled in the worker: ValueError"):
                call()
        envs.step(np.zeros(3, int))
        assert [process.pid for process in envs.processes] == pids
