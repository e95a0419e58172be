"""First-ready batches: ``reset_async``, ``send`` and ``recv`` return the same results as a plain loop over each environment.

``faults/test_restart.py`` tests environments that are late, raise or die.
"""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections.abc import Callable
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from envs import Options, killable_engine, open_engine, ready_engine
from gymnasium import spaces
from gymnasium.error import AlreadyPendingCallError
from gymnasium.vector import AutoresetMode
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import vecenv
from vecenv.errors import StepTimeout, WorkerDied
from vecenv.link.channel import Channel


class StepCountEnv(gymnasium.Env[Any, Any]):
    """An environment with observations (row, episode, step), the reward action + step, and infos with changing keys."""

    observation_space = spaces.Box(-1, 1e6, (3,), np.float64)
    action_space = spaces.Discrete(1000)

    def __init__(self, row: int, length: int, pause: float = 0.0) -> None:
        self.row, self.length, self.pause = row, length, pause
        self.episode, self.t = -1, 0

    def _observation(self) -> np.ndarray[Any, Any]:
        return np.array([self.row, self.episode, self.t], np.float64)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.episode, self.t = self.episode + 1, 0
        return self._observation(), {"seed": -1 if seed is None else seed}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        if self.pause:
            time.sleep(self.pause)
        self.t += 1
        info: dict[str, Any] = {"t": self.t}
        if self.t % 3 == 0:
            info = {"t": self.t, "name": f"env{self.row}", "x": np.arange(2.0) + self.t}
        if self.t % 4 == 0:
            info = {"by pickle": frozenset([self.t])}
        if self.t % 5 == 0:
            info = {}
        return self._observation(), float(action) + self.t, self.t >= self.length, False, info


class TotalStepsEnv(gymnasium.Env[Any, Any]):
    """An environment that counts its steps, over all episodes."""

    observation_space = spaces.Box(0, 1, (1,), np.float32)
    action_space = spaces.Discrete(2)
    steps = 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        return np.zeros(1, np.float32), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.steps += 1
        return np.zeros(1, np.float32), 0.0, False, False, {}


def make_env_fns(lengths: list[int], **kwargs: Any) -> list[Callable[[], StepCountEnv]]:
    return [partial(StepCountEnv, row, length, **kwargs) for row, length in enumerate(lengths)]


class PlainLoop:
    """A plain loop over one environment with autoreset, which returns the expected results."""

    def __init__(self, env: StepCountEnv, mode: AutoresetMode) -> None:
        self.env, self.mode, self.reset_due = env, mode, False

    def reset(self, seed: int | None) -> tuple[Any, ...]:
        observation, info = self.env.reset(seed=seed)
        return observation, 0.0, False, False, info

    def step(self, action: int) -> tuple[Any, ...]:
        if self.reset_due:
            self.reset_due = False
            observation, info = self.env.reset()
            return observation, 0.0, False, False, info
        observation, reward, terminated, truncated, info = self.env.step(action)
        if terminated or truncated:
            if self.mode is AutoresetMode.NEXT_STEP:
                self.reset_due = True
            elif self.mode is AutoresetMode.SAME_STEP:
                first_observation, reset_info = self.env.reset()
                info = {"final_info": info, "final_obs": observation, **reset_info}
                observation = first_observation
        return observation, reward, terminated, truncated, info


def select_info(infos: dict[str, Any], position: int) -> dict[str, Any]:
    """Return the info at one position of a batch from a dict of arrays with masks."""
    info = {}
    for key, value in infos.items():
        if key.startswith("_") or not infos[f"_{key}"][position]:
            continue
        info[key] = select_info(value, position) if isinstance(value, dict) else value[position]
    return info


def assert_same_info(info: dict[str, Any], expected: dict[str, Any]) -> None:
    assert set(info) == set(expected)
    for key, value in expected.items():
        if isinstance(value, dict):
            assert_same_info(info[key], value)
        else:
            np.testing.assert_array_equal(info[key], value)


def check_and_remove_expected(batch: tuple[Any, ...], expected: dict[int, tuple[Any, ...]]) -> None:
    """Assert that the rows of a batch have their results in ``expected``, and remove these from ``expected``."""
    observations, rewards, terminations, truncations, infos = batch
    rows = infos["env_id"].tolist()
    assert observations.shape == (len(rows), 3)
    assert rewards.dtype == np.float64
    for position, row in enumerate(rows):
        observation, reward, terminated, truncated, expected_info = expected.pop(row)
        np.testing.assert_array_equal(observations[position], observation)
        assert rewards[position] == reward
        assert (terminations[position], truncations[position]) == (terminated, truncated)
        info = select_info(infos, position)
        assert info.pop("env_id") == row
        assert_same_info(info, expected_info)


@pytest.mark.parametrize(
    "context", [pytest.param("fork", marks=pytest.mark.long), pytest.param("forkserver", marks=pytest.mark.slow)]
)
@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_results_with_random_options_and_order_equal_a_plain_loop(context: str, data: st.DataObject) -> None:
    """Engine options are combined at random. Random numbers of idle rows are sent in random order."""
    lengths = data.draw(st.lists(st.integers(1, 6), min_size=1, max_size=7), "lengths")
    mode = data.draw(st.sampled_from(AutoresetMode), "mode")
    engine: dict[str, Any] = {
        "batch_size": data.draw(st.integers(1, len(lengths)), "batch_size"),
        "num_workers": data.draw(st.sampled_from([None, 0, 1, 2, 3, "auto"]), "num_workers"),
        "shared_memory": data.draw(st.booleans(), "shared_memory"),
        "copy": data.draw(st.booleans(), "copy"),
        "max_concurrency": data.draw(st.sampled_from([None, None, 1, 2, 3]), "max_concurrency"),
        "on_failure": data.draw(st.sampled_from(["raise", "restart"]), "on_failure"),
    }
    if engine["num_workers"] != 0 and engine["on_failure"] == "raise":
        engine["use_caller"] = data.draw(st.booleans(), "use_caller")
    fns = make_env_fns(lengths, pause=data.draw(st.sampled_from([0.0, 0.001]), "pause"))
    loops = [PlainLoop(fn(), mode) for fn in fns]
    try:
        envs = vecenv.AsyncVectorEnv(fns, autoreset_mode=mode, context=context, **engine)
    except ValueError:  # some options exclude each other, or there are more workers than environments
        assume(False)
    # the order of ready rows depends on timing, and draws from hypothesis must not depend on it
    rng = random.Random(data.draw(st.integers(0, 2**32), "rng"))
    driver = envs._driver
    # without workers, the driver has no exchange, and ignores the attribute
    getattr(driver, "exchange", driver).rows_at_once = data.draw(st.sampled_from([None, 1, 2]), "rows_at_once")
    with closing(envs):
        envs.reset_async(seed=5)
        expected = {row: loop.reset(5 + row) for row, loop in enumerate(loops)}
        idle: list[int] = []
        for iteration in range(50):
            sent = idle  # all, if there are too few rows in flight for a batch
            if len(expected) >= engine["batch_size"]:
                batch = envs.recv(timeout=20)
                check_and_remove_expected(batch, expected)
                received, ended = batch[-1]["env_id"], batch[2]
                if mode is AutoresetMode.DISABLED and ended.any():  # reset these rows while others are in flight
                    envs.reset_async(seed=iteration, env_id=received[ended])
                    expected |= {row: loops[row].reset(iteration + row) for row in received[ended].tolist()}
                    received = received[~ended]
                idle += received.tolist()
                rng.shuffle(idle)
                sent = idle[: rng.randint(0, len(idle))]
            if not sent:
                continue
            idle = idle[len(sent) :]
            actions = np.array([rng.randint(0, 99) for _ in sent])
            envs.send(actions if rng.random() < 0.7 else actions.tolist(), sent)
            for row, action in zip(sent, actions, strict=True):
                expected[row] = loops[row].step(int(action))


@pytest.mark.parametrize("has_infos", [True, False])
@pytest.mark.parametrize("num_workers", [0, 1])
def test_rows_are_received_in_the_order_in_which_they_finish(num_workers: int, has_infos: bool) -> None:
    env_fns = make_env_fns([9, 9, 9]) if has_infos else [TotalStepsEnv] * 3
    with ready_engine(env_fns, num_workers=num_workers) as envs:
        envs.send([1], [2])
        envs.send([1, 1], [0, 1])
        assert envs.recv(timeout=20, count=3)[4]["env_id"].tolist() == [2, 0, 1]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_pickled_infos_are_returned_once(num_workers: int) -> None:
    """Infos that do not fit columns are pickled, and so are final observations."""
    fns = make_env_fns([9, 5])
    loops = [PlainLoop(fn(), AutoresetMode.SAME_STEP) for fn in fns]
    with open_engine(fns, autoreset_mode="SameStep", num_workers=num_workers, batch_size=1, shared_memory=False) as envs:
        envs.reset_async(seed=5)
        expected = {row: loop.reset(5 + row) for row, loop in enumerate(loops)}
        for _ in range(11):
            for _ in fns:
                check_and_remove_expected(envs.recv(timeout=20), expected)
            envs.send([1, 2], [0, 1])
            expected = {row: loop.step(1 + row) for row, loop in enumerate(loops)}


@pytest.mark.parametrize("num_workers", [0, 2, 6])
def test_send_assigns_actions_to_rows_in_any_order(num_workers: int) -> None:
    fns = make_env_fns([9] * 6)
    loops = [PlainLoop(fn(), AutoresetMode.NEXT_STEP) for fn in fns]
    with closing(vecenv.AsyncVectorEnv(fns, num_workers=num_workers, batch_size=6)) as envs:
        envs.reset_async(seed=5)
        check_and_remove_expected(envs.recv(timeout=20), {row: loop.reset(5 + row) for row, loop in enumerate(loops)})
        order, actions = [5, 2, 4, 0, 3, 1], np.arange(6) * 10
        for sent in (actions, actions.tolist()):
            envs.send(sent, order)
            expected = {row: loops[row].step(int(action)) for row, action in zip(order, actions, strict=True)}
            check_and_remove_expected(envs.recv(timeout=20), expected)


@pytest.mark.long
@pytest.mark.parametrize(
    ("engine", "batch_size"),
    [({"num_workers": 3}, 3), ({"num_workers": 2, "use_caller": True}, 1), ({"num_workers": 1, "use_caller": True}, 2)],
    ids=["workers", "two-and-the-caller", "one-and-the-caller"],
)
def test_recv_returns_every_env_within_60_batches(engine: Options, batch_size: int) -> None:
    """Each pause is long enough for every worker to finish its messages, also on a busy machine.

    So an environment that many batches lack was ready, but not chosen.
    """
    envs = vecenv.AsyncVectorEnv(make_env_fns([9] * 8), batch_size=batch_size, **engine)
    longest_gap: dict[int, int] = {}
    last_batch: dict[int, int] = dict.fromkeys(range(8), 0)
    try:
        envs.reset_async()
        for batch_number in range(240):
            time.sleep(0.003)
            *_, infos = envs.recv(timeout=20)
            for row in infos["env_id"].tolist():
                longest_gap[row] = max(longest_gap.get(row, 0), batch_number - last_batch[row])
                last_batch[row] = batch_number
            envs.send(np.zeros(batch_size, np.int64))
    finally:
        envs.close()
    assert set(longest_gap) == set(range(8))
    assert max(longest_gap.values()) < 60, longest_gap


@pytest.mark.long
def test_only_readable_pipes_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """With one worker per environment, reading every pipe for every reply would take longer than the steps."""
    envs = vecenv.AsyncVectorEnv(make_env_fns([1000] * 16, pause=0.005), batch_size=1)
    receive_calls = 0
    receive = Channel.receive

    def count_and_receive(channel: Channel) -> Any:
        nonlocal receive_calls
        receive_calls += 1
        return receive(channel)

    try:
        envs.reset_async()
        for _ in range(16):
            envs.recv(timeout=20)
        envs.send(np.zeros(16, np.int64), range(16))
        monkeypatch.setattr(Channel, "receive", count_and_receive)
        for _ in range(100):
            envs.recv(timeout=20)
            envs.send(np.zeros(1, np.int64))
    finally:
        monkeypatch.undo()
        envs.close()
    assert 85 <= receive_calls <= 150


class LargeDataEnv(gymnasium.Env[Any, Any]):
    """An environment with actions and observations larger than the buffer of a pipe. An action is the duration of a step."""

    observation_space = spaces.Text(10**6)
    action_space = spaces.Box(0, 1, (200_000,), np.float64)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        return "", {}

    def step(self, action: Any) -> tuple[str, float, bool, bool, dict[str, Any]]:
        time.sleep(action[0])
        return "a" * 10**6, float(action[0]), False, False, {}


@pytest.mark.long
@pytest.mark.parametrize("num_workers", [1, 8], ids=["with-spinning", "without-spinning"])
def test_replies_read_while_sending_are_kept(num_workers: int) -> None:
    """Requests and replies exceed the buffer of a pipe, and a worker does not read while it writes.

    So the caller has to read the whole reply to the first request before it has sent all of the second.
    """
    with open_engine([LargeDataEnv] * (2 * num_workers), num_workers=num_workers, batch_size=1) as envs:
        envs.reset_async()
        for _ in range(2 * num_workers):
            envs.recv(timeout=20)
        envs.send([np.full(200_000, 0.0)], [0])  # in a list, which is pickled
        time.sleep(0.2)  # until the worker writes its reply
        envs.send([np.full(200_000, 1.0)], [1])
        results = [envs.recv(timeout=0.7), envs.recv(timeout=20)]
    received = [(infos["env_id"].tolist(), rewards.tolist()) for _, rewards, *_, infos in results]
    assert received == [([0], [0.0]), ([1], [1.0])]
    assert [len(observations[0]) for observations, *_ in results] == [10**6] * 2


def test_fast_environments_do_not_wait_for_slow_ones() -> None:
    fns = [*make_env_fns([1000] * 3), partial(StepCountEnv, 3, 1000, pause=2.0)]
    with killable_engine(fns, batch_size=1) as envs:
        envs.reset_async()
        for _ in range(4):
            envs.recv(timeout=20)
        envs.send(np.zeros(4, np.int64), [0, 1, 2, 3])
        for _ in range(30):  # 30 batches, while one environment is inside one step
            *_, infos = envs.recv(timeout=1)
            assert infos["env_id"][0] != 3
            envs.send(np.zeros(1, np.int64), infos["env_id"])


def test_reset_after_dropped_steps_is_received_without_their_rewards() -> None:
    """The workers execute the dropped steps while the caller waits for the reset."""
    with open_engine([partial(StepCountEnv, row, 1, pause=0.1) for row in range(2)], num_workers=2) as envs:
        envs.reset(seed=1)
        envs.send([1, 1])
        envs.reset_async(seed=2)
        observations, rewards, terminations, truncations, _ = envs.recv()
    assert observations[:, 1:].tolist() == [[1, 0]] * 2
    assert (rewards.tolist(), terminations.tolist(), truncations.tolist()) == ([0.0, 0.0], [False] * 2, [False] * 2)


class HangingEnv(StepCountEnv):
    """An environment that hangs in its first step, or in its constructor after a death in its first step.

    Args:
        marker: A file that the first step creates.
        in_step: True if it hangs in the step.
    """

    def __init__(self, row: int, marker: Path, in_step: bool) -> None:
        super().__init__(row, 1000)
        self.marker, self.in_step = marker, in_step
        if not in_step and marker.exists():
            time.sleep(60)

    def step(self, action: Any) -> Any:
        if not self.marker.exists():
            self.marker.touch()
            if self.in_step:
                time.sleep(60)
            os.kill(os.getpid(), signal.SIGKILL)
        return super().step(action)


def receive_until(envs: Any, condition: Callable[[], bool]) -> None:
    """Step one row after the other, each result slower than the environments, until the condition is true."""
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)
        rows = envs.recv(count=1)[-1]["env_id"]
        if not condition():
            envs.send([0], rows)


@pytest.mark.parametrize("in_step", [True, pytest.param(False, marks=pytest.mark.long)], ids=["step", "restart"])
def test_hang_ends_although_others_are_always_ready(in_step: bool, tmp_path: Path) -> None:
    fns = [*make_env_fns([1000] * 2), partial(HangingEnv, 2, tmp_path / "marker", in_step)]
    options: Options = {"step_timeout": 1.0, "worker_options": vecenv.WorkerOptions(start_timeout=3.0)}
    with killable_engine(fns, num_workers=3, batch_size=1, on_failure="restart", **options) as envs:
        envs.reset(seed=1)
        envs.send([0] * 3)
        text = "env 2) died during step" if in_step else "env 2) died during its start"
        receive_until(envs, lambda: any(f"{text}: it hung" in record.traceback for record in envs.errors))


@pytest.mark.long
def test_recv_raises_for_a_hang_although_others_are_always_ready(tmp_path: Path) -> None:
    fns = [*make_env_fns([1000] * 2), partial(HangingEnv, 2, tmp_path / "marker", True)]
    with killable_engine(fns, num_workers=3, batch_size=1, step_timeout=3.0) as envs:
        envs.reset(seed=1)
        envs.send([0] * 3)
        with pytest.raises(StepTimeout, match=r"env 2.*no reply yet") as caught:
            receive_until(envs, lambda: False)
        assert caught.value.envs == (2,)
        envs.send([0], envs.recv(count=1)[-1]["env_id"])  # the others continue


class SlowToBuildAgain(StepCountEnv):
    """An environment that dies in its first step; building it again takes 4 s, and its next reset a moment."""

    def __init__(self, row: int, marker: Path) -> None:
        super().__init__(row, 1000)
        self.marker, self.is_slow = marker, marker.exists()
        time.sleep(4.0 * self.is_slow)

    def reset(self, **kwargs: Any) -> Any:
        time.sleep(0.3 * self.is_slow)
        return super().reset(**kwargs)

    def step(self, action: Any) -> Any:
        self.marker.touch()
        os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.long
def test_step_timeout_excludes_the_start_of_a_replacement_while_others_are_ready(tmp_path: Path) -> None:
    fns = [*make_env_fns([1000] * 2), partial(SlowToBuildAgain, 2, tmp_path / "marker")]
    with killable_engine(fns, num_workers=3, batch_size=1, step_timeout=3.0) as envs:
        envs.reset(seed=1)
        envs.send([0] * 3)
        with pytest.raises(WorkerDied):
            receive_until(envs, lambda: False)
        envs.reset_async(env_id=[2])
        receive_until(envs, lambda: 2 not in envs.in_flight)


class ReadsInFlight(StepCountEnv):
    """An environment that reads ``in_flight`` of ``envs`` in its steps."""

    envs: Any = None

    def step(self, action: Any) -> Any:
        *result, _ = super().step(action)
        return *result, {"in_flight": self.envs.in_flight.tolist()}


def test_rows_are_in_flight_while_the_caller_steps_them() -> None:
    with open_engine([partial(ReadsInFlight, row, 9) for row in range(2)], num_workers=0) as envs:
        envs.reset(seed=1)
        ReadsInFlight.envs = envs
        envs.send([0, 0])
        infos = envs.recv()[-1]
    assert infos["in_flight"].tolist() == [[0, 1]] * 2


class BlocksUntilFile(StepCountEnv):
    """An environment with steps of 4 ms. With action 1, a step first waits until a file exists."""

    def __init__(self, row: int, file: str) -> None:
        super().__init__(row, 10**6, pause=0.004)
        self.file = file

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        while action == 1 and not os.path.exists(self.file):
            time.sleep(0.005)
        return super().step(action)


def test_half_of_a_workers_rows_is_received_while_the_other_half_steps(tmp_path: Path) -> None:
    """A worker has a message per half: the result of the first arrives while the second blocks."""
    file = tmp_path / "continue"
    env_fns = [partial(BlocksUntilFile, row, str(file)) for row in range(4)]
    envs = vecenv.AsyncVectorEnv(env_fns, num_workers=1, batch_size="auto")
    try:
        assert (envs.batch_size, envs.plan.batch_size, envs.plan.rows_at_once) == (2, 2, 2)
        assert "batch_size=2: halves" in str(envs.plan)
        envs.reset_async(seed=3)
        envs.recv(count=4, timeout=20)
        envs.send(np.array([0, 0, 0, 1]), [0, 1, 2, 3])
        assert envs.recv(timeout=20)[-1]["env_id"].tolist() == [0, 1]
        assert envs.stats()["in_flight"] == 2
        with pytest.raises(StepTimeout, match="envs 2-3"):
            envs.recv(timeout=0.05)
        envs.send(np.zeros(2, np.int64))  # to the rows of the latest recv, while the worker executes its other message
        file.touch()
        assert envs.recv(timeout=20)[-1]["env_id"].tolist() == [2, 3]
        observations, *_, infos = envs.recv(timeout=20)
        assert infos["env_id"].tolist() == [0, 1]
        assert observations[:, 2].tolist() == [2, 2]
    finally:
        file.touch()
        envs.close()


class RaisesOrBlocks(StepCountEnv):
    """An environment that raises for action 1. For action 2, its step waits until a file exists, or for 30 seconds."""

    def __init__(self, row: int, file: str) -> None:
        super().__init__(row, 10**6)
        self.file = file

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        if action == 1:
            raise ArithmeticError(f"env {self.row}")
        deadline = time.monotonic() + 30
        while action == 2 and not os.path.exists(self.file):
            if time.monotonic() > deadline:
                return (*super().step(action)[:4], {"late": True})
            time.sleep(0.005)
        return super().step(action)


@pytest.mark.parametrize("options", [{"num_workers": 1, "use_caller": True}, {"max_concurrency": 2}], ids=str)
def test_recv_of_all_rows_raises_without_waiting_for_the_others(
    options: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("vecenv.engine.watchdog.CHECK_INTERVAL_SECONDS", [600.0])  # a check would end the wait
    file = tmp_path / "continue"
    num_envs = 2 if "use_caller" in options else 3
    with killable_engine([partial(RaisesOrBlocks, row, str(file)) for row in range(num_envs)], **options) as envs:
        envs.reset(seed=1)
        envs.send(np.array([1, 2, 2][:num_envs]))
        with pytest.raises(ArithmeticError, match="env 0"):
            envs.recv()
        file.touch()
        *_, infos = envs.recv(count=num_envs - 1)
        assert sorted(infos["env_id"].tolist()) == list(range(1, num_envs))
        assert "late" not in infos


class UnpicklableInfoEnv(StepCountEnv):
    """An environment that returns an info that cannot be pickled for action 1. For action 2 it creates a file."""

    def __init__(self, row: int, file: Path) -> None:
        super().__init__(row, 10**6)
        self.file = file

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        if action == 2:
            self.file.touch()
        info = {"lock": threading.Lock()} if action == 1 else {}
        return (*super().step(action)[:4], info)


def test_recv_at_least_raises_an_error_that_arrives_after_enough_rows(tmp_path: Path) -> None:
    file = tmp_path / "all replies but the last are written"
    with ready_engine([partial(UnpicklableInfoEnv, row, file) for row in range(3)], num_workers=1) as envs:
        for row in range(3):
            envs.send([row], [row])
        deadline = time.monotonic() + 30
        while not file.exists() and time.monotonic() < deadline:
            time.sleep(0.001)
        with pytest.raises(TypeError, match="lock"):
            envs.recv(count=3, at_least=1)
        *_, infos = envs.recv(count=3)
        assert sorted(infos["env_id"].tolist()) == [0, 1, 2]


def test_recv_steps_the_callers_rows_at_once_while_workers_are_idle() -> None:
    with ready_engine(make_env_fns([50] * 4), num_workers=2, use_caller=True, batch_size=1) as envs:
        assert envs.worker_rows[0] == range(1)
        for _ in range(5):
            envs.send([1], [0])
            assert envs.recv(timeout=3)[-1]["env_id"].tolist() == [0]


def test_recv_steps_the_callers_rows_although_a_worker_always_has_a_result() -> None:
    with ready_engine(make_env_fns([50] * 2), num_workers=1, use_caller=True, batch_size=1) as envs:
        envs.send([1, 1], [0, 1])
        received = []
        for _ in range(4):
            time.sleep(0.05)  # in this time the worker replies
            received += envs.recv()[-1]["env_id"].tolist()
            envs.send([1], received[-1:])
        assert set(received) == {0, 1}


class ExitsLaterEnv(StepCountEnv):
    """An environment that returns from a step with action 3, and ends its process soon afterwards."""

    def step(self, action: Any) -> Any:
        if action == 3:
            threading.Timer(0.2, os._exit, [3]).start()
        return super().step(action)


@pytest.mark.parametrize("on_failure", ["raise", "restart"])
def test_result_written_before_a_worker_died_is_received(on_failure: Any) -> None:
    """The death is detected by a reset of another row of the worker, before the result is read."""
    env_fns = [partial(ExitsLaterEnv, row, 50) for row in range(3)]
    with ready_engine(env_fns, num_workers=1, batch_size=1, on_failure=on_failure) as envs:
        (process,) = envs.processes
        envs.send([3], [0])
        process.join(20)
        envs.reset_async(seed=5, env_id=[2])
        observations, _, _, truncations, infos = envs.recv(timeout=20)
        assert (infos["env_id"].tolist(), observations.tolist(), truncations.tolist()) == ([0], [[0, 0, 1]], [False])
        assert "restarted" not in infos
        assert envs.recv(timeout=20)[-1]["env_id"].tolist() == [2]


def test_batch_size_auto_without_workers_is_the_number_of_envs() -> None:
    with open_engine(make_env_fns([5] * 4), num_workers=0, batch_size="auto") as envs:
        assert envs.batch_size == 4
        assert "batch_size=4: lock-step: no environment can be ahead of another" in str(envs.plan)


@pytest.mark.parametrize("engine", [{"num_workers": 0}, {"num_workers": 1}, {"num_workers": 2, "use_caller": True}], ids=str)
def test_rows_that_are_reset_while_others_are_in_flight_begin_new_episodes(engine: Options) -> None:
    """The row is added to an int seed. A list has one seed per given row."""
    with open_engine(make_env_fns([50] * 4), **engine) as envs:
        envs.reset(seed=10)
        envs.send([1, 1], [0, 1])
        envs.reset_async(seed=20, env_id=[3, 2])
        with pytest.raises(AlreadyPendingCallError, match="env 1, "):
            envs.reset_async(env_id=[1])
        with pytest.raises(AlreadyPendingCallError, match="env 3, "):
            envs.send([1], [3])
        received = {}
        for count in (1, 3):
            observations, rewards, *_, infos = envs.recv(count=count)
            assert len(observations) == len(rewards) == len(infos["env_id"]) == count
            for position, row in enumerate(infos["env_id"].tolist()):
                seed_or_step = infos["seed"][position] if row >= 2 else infos["t"][position]
                received[row] = (observations[position].tolist(), rewards[position], seed_or_step)
        assert received == {
            0: ([0, 0, 1], 2.0, 1), 1: ([1, 0, 1], 2.0, 1), 2: ([2, 1, 0], 0.0, 22), 3: ([3, 1, 0], 0.0, 23),
        }  # fmt: skip
        envs.reset_async(seed=[7, 8], env_id=[2, 0])
        infos = envs.recv(count=2)[4]
        assert dict(zip(infos["env_id"].tolist(), infos["seed"].tolist(), strict=True)) == {2: 7, 0: 8}
        assert envs.step([0] * 4)[0].tolist() == [[0, 1, 1], [1, 0, 2], [2, 2, 1], [3, 1, 1]]
        assert envs.stats()["resets"] == 4 + 2 + 2


@pytest.mark.parametrize("engine", [{"num_workers": 0}, {"num_workers": 1, "use_caller": True}, {"num_workers": 2}], ids=str)
def test_step_dropped_by_a_reset_is_executed(engine: Options) -> None:
    with closing(vecenv.AsyncVectorEnv([TotalStepsEnv] * 4, batch_size=2, **engine)) as envs:
        envs.reset_async(seed=0)
        rows = envs.recv()[4]["env_id"]
        envs.send([1], rows[:1])
        envs.recv()
        envs.reset()
        assert sum(envs.get_attr("steps")) == 1


@pytest.mark.parametrize("rows", [3, 300])
def test_duplicate_rows_and_masks_are_refused(rows: int) -> None:
    with ready_engine(make_env_fns([5] * rows), num_workers=0) as envs:
        for wrong in ([*range(1, rows), 1], [rows, *range(1, rows)]):
            with pytest.raises(ValueError, match="env_id must"):
                envs.send(np.zeros(rows, np.int64), wrong)
        with pytest.raises(ValueError, match=r"env_id must .* got a mask: use np\.flatnonzero\(mask\)"):
            envs.send(np.zeros(rows, np.int64), np.ones(rows, np.bool_))
        envs.send(np.zeros(rows, np.int64), range(rows))
        assert sorted(envs.recv(count=rows)[4]["env_id"].tolist()) == list(range(rows))


class RaisesInSecondStep(StepCountEnv):
    """An environment that raises in its second step."""

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        if self.t == 1:
            raise ArithmeticError(f"the second step of env {self.row}")
        return super().step(action)


@pytest.mark.parametrize("fault", ["dies", "raises"])
def test_failed_env_is_rebuilt_by_its_own_reset(fault: str) -> None:
    env_class = RaisesInSecondStep if fault == "raises" else StepCountEnv
    with ready_engine([partial(env_class, row, 9) for row in range(3)], num_workers=3) as envs:
        envs.step([0] * 3)
        if fault == "dies":
            os.kill(envs.processes[1].pid, signal.SIGKILL)
        envs.send([0], [1])
        with pytest.raises((ArithmeticError, vecenv.errors.WorkerDied)):
            envs.recv(count=1)
        envs.reset_async(seed=[5], env_id=[1])
        observations, *_, infos = envs.recv(count=1)
        assert (observations[0].tolist(), infos["seed"][0], infos["env_id"][0]) == ([1, 0, 0], 5, 1)
        envs.send([0], [1])
        assert envs.recv(count=1)[0][0].tolist() == [1, 0, 1]
