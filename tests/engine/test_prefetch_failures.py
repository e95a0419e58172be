"""``vecenv.EpisodePrefetcher`` after failures, interruptions and refused calls: it behaves like ``AsyncVectorEnv``."""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from signals import Alarm, interrupt_at, signal_handler
from without_spares import Walk, make_reference

import vecenv
from vecenv.engine import state_changes
from vecenv.testing import assert_identical
from vecenv.wrappers import prefetch


def make_prefetcher(env_fn: Any, num_envs: int = 3, **options: Any) -> Any:
    return vecenv.make_vec(env_fn, num_envs, vector_kwargs={"context": "fork", "spare_workers": 2, **options})


class FaultyWalk(Walk):
    """A walk in which action 1 raises, and action 2 takes a second."""

    def step(self, action: Any) -> Any:
        if action == 1:
            raise ArithmeticError("action 1")
        time.sleep(float(action == 2))
        return super().step(0)


def test_failure_before_a_timeout_is_raised_by_the_next_wait(closes: Any) -> None:
    envs = closes(make_prefetcher(FaultyWalk, 2))
    envs.reset(seed=1)
    envs.step_async(np.array([1, 2]))
    with pytest.raises(vecenv.errors.StepTimeout):
        envs.step_wait(timeout=0.3)
    with pytest.raises(ArithmeticError, match="action 1"):
        envs.step_wait()
    envs.reset(options={"reset_mask": np.array([True, False])})
    assert len(envs.step(np.zeros(2, np.int64))[0]) == 2


def test_failure_before_a_timeout_of_a_reset_is_raised_by_recv(closes: Any) -> None:
    envs = closes(make_prefetcher(lambda: Walk(reset=0.5, raises=1), 2, step_timeout=10.0))
    envs.reset(seed=5)
    envs.reset_async(seed=[2, 1])
    with pytest.raises(vecenv.errors.StepTimeout):
        envs.reset_wait(timeout=0.2)
    with pytest.raises(ValueError, match="no such level"):
        envs.recv(count=2)
    assert envs.recv(count=1)[-1]["env_id"].tolist() == [0]


def test_each_failure_is_raised_by_one_recv(closes: Any) -> None:
    envs = closes(make_prefetcher(FaultyWalk))
    envs.reset(seed=1)
    for row, action in enumerate([1, 1, 0]):
        envs.send(np.array([action]), [row])
    time.sleep(0.3)  # until all have been stepped
    for in_flight in (3, 2):
        assert len(envs.in_flight) == in_flight
        with pytest.raises(ArithmeticError, match="action 1"):
            envs.recv(count=in_flight)
    assert envs.recv(count=1)[-1]["env_id"].tolist() == [2]
    with pytest.raises(gymnasium.error.NoAsyncCallError):
        envs.recv(count=1)


class FailingResets(Walk):
    """A walk with resets that take 0.3 seconds, and then fail if the seed was derived."""

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        result = super().reset(seed=seed, options=options)
        time.sleep(0.3)
        if seed is not None and seed > 100:
            raise ValueError("no such level")
        return result


def test_spare_prefetches_again_after_a_failure_in_an_outdated_reset(closes: Any) -> None:
    """The caller's second reset replaces the episode that the spare is beginning."""
    envs = closes(make_prefetcher(FailingResets, 1, spare_workers=1))
    for seed in (1, 2):
        envs.reset_async(seed=seed, env_id=[0])
        envs.recv()
    envs.get_attr("level")  # waits for the spare
    failures = len(envs.errors)
    envs.step(np.zeros(1, np.int64))
    envs.get_attr("level")
    assert len(envs.errors) == failures + 1


@pytest.mark.parametrize("fault", ["raised", "died"])
def test_state_can_be_saved_and_loaded_after_a_spare_has_failed(fault: str, closes: Any) -> None:
    envs = closes(make_prefetcher(FailingResets if fault == "raised" else Walk, 2))
    envs.reset(seed=1)
    if fault == "died":
        envs.get_attr("level")  # waits for the spares
        envs.processes[2].kill()
        envs.processes[2].join()
    state = envs.state_dict(verify=False)
    expected = envs.step(np.ones(2, np.int64))
    envs.load_state_dict(state)
    assert_identical(envs.step(np.ones(2, np.int64)), expected)


def test_loaded_state_has_the_generators_of_the_spaces(closes: Any) -> None:
    envs = closes(make_prefetcher(Walk, 2))
    envs.reset(seed=1)
    envs.action_space.seed(5)
    state = envs.state_dict()
    expected = [envs.action_space.sample().tolist() for _ in range(20)]
    envs.load_state_dict(state)
    assert [envs.action_space.sample().tolist() for _ in range(20)] == expected


def test_pending_step_is_not_dropped_if_only_an_earlier_wait_was_interrupted(closes: Any) -> None:
    envs = closes(make_prefetcher(FaultyWalk, 2))
    envs.reset(seed=1)
    envs.send(np.array([2, 2]))
    with signal_handler(signal.SIGALRM, Alarm):
        signal.setitimer(signal.ITIMER_REAL, 0.3)
        with pytest.raises(Alarm):
            envs.recv()
    envs.recv()
    envs.step_async(np.zeros(2, np.int64))
    with pytest.raises(gymnasium.error.AlreadyPendingCallError):
        envs.reset()
    envs.step_wait()


class DictWalk(Walk):
    """A walk with actions of two parts."""

    def __init__(self) -> None:
        super().__init__(lengths=(2, 3))
        self.action_space = gymnasium.spaces.Dict(  # type: ignore[assignment]
            a=gymnasium.spaces.Discrete(3), b=gymnasium.spaces.Tuple([gymnasium.spaces.Discrete(3)] * 2)
        )

    def step(self, action: Any) -> Any:
        return super().step(action["a"])


@pytest.mark.parametrize("num_ended", [1, 2])
def test_invalid_actions_change_nothing_if_rows_have_ended(num_ended: int, closes: Any) -> None:
    envs, zeros = closes(make_prefetcher(DictWalk, 2)), np.zeros(2, np.int64)
    envs.reset(seed=1)
    valid = {"a": zeros, "b": (zeros, zeros)}
    for _ in range(2):  # until the episodes of these rows have ended
        envs.send({"a": zeros[:num_ended], "b": (zeros[:num_ended],) * 2}, range(num_ended))
        envs.recv(count=num_ended)
    for actions in (
        {"a": zeros}, {"a": zeros, "b": (zeros,)}, {"a": zeros[:1], "b": (zeros, zeros)}, {"a": zeros, "b": (zeros,) * 3},
    ):  # fmt: skip
        with pytest.raises(ValueError, match="nothing was sent"):
            envs.step(actions)
    with pytest.raises(ValueError, match="nothing was sent"):
        envs.step(None)
    assert envs.step(valid)[0][:num_ended, 0].tolist() == [0.0] * num_ended


def test_actions_from_an_iterator_step_if_a_row_has_ended(closes: Any) -> None:
    envs = closes(make_prefetcher(Walk, 2))
    envs.reset(seed=1)
    while not envs.step(iter(np.ones(2, np.int64)))[2].any():
        pass
    envs.step(iter(np.ones(2, np.int64)))


@pytest.mark.sampled(1)
@pytest.mark.parametrize("method", ["step", "reset", "set_attr"])
def test_reset_recovers_after_an_interruption_inside_the_engine(method: str, closes: Any) -> None:
    envs, reference = closes(make_prefetcher(Walk, 2)), make_reference([Walk] * 2)
    calls = {
        "step": lambda: envs.step(np.ones(2, np.int64)), "reset": envs.reset, "set_attr": lambda: envs.set_attr("x", 1),
    }  # fmt: skip
    reset_needed = 0
    event, fired = 1, True
    while fired and event < 1000:
        assert_identical(envs.reset(seed=event), reference.reset(seed=event), f"event {event}")
        assert_identical(envs.step(np.ones(2, np.int64)), reference.step(np.ones(2, np.int64)))
        with signal_handler(signal.SIGUSR2, Alarm):
            fired, result = interrupt_at(event, calls[method], state_changes.__file__)
        assert not fired or result is None, f"event {event}: the interruption was not raised"
        reset_needed += "RESET_NEEDED" in repr(envs)
        event += 5
    assert event > 15
    assert reset_needed > 0


class CheckedWalk(Walk):
    """A walk that refuses a negative speed."""

    @property
    def speed(self) -> float:
        return 1.0

    @speed.setter
    def speed(self, speed: float) -> None:
        if speed < 0:
            raise ArithmeticError("negative speed")


def test_envs_can_be_stepped_after_they_refused_an_attribute(closes: Any) -> None:
    envs = closes(make_prefetcher(CheckedWalk, 2))
    envs.reset(seed=1)
    with pytest.raises(ArithmeticError, match="negative speed"):
        envs.set_attr("speed", -1.0)
    assert len(envs.step(np.zeros(2, np.int64))[0]) == 2


class TextWalk(Walk):
    """A walk with pickled observations, which do not fit the space after action 1."""

    def __init__(self) -> None:
        super().__init__()
        parts = {"text": gymnasium.spaces.Text(5), "position": self.observation_space}
        self.observation_space = gymnasium.spaces.Dict(parts)  # type: ignore[assignment]

    def reset(self, **arguments: Any) -> Any:
        position, info = super().reset(**arguments)
        return {"text": "abc", "position": position}, info

    def step(self, action: Any) -> Any:
        position, *others = super().step(0)
        return {"text": "abc", "position": position[:2] if action == 1 else position}, *others


def test_errors_of_a_call_name_its_rows(closes: Any) -> None:
    """Rows have moved. A call that raises fails no environment."""
    envs = closes(make_prefetcher(Walk, 2))
    envs.reset(seed=1)
    while envs.places == [0, 1]:
        envs.step(np.zeros(2, np.int64))
    with pytest.raises(AttributeError) as caught:
        envs.exec_func(lambda env: env.missing, [1])
    place = envs.places[1]
    assert f"'env {place}' is place {place} of 4, which ran an episode of env 1" in caught.value.__notes__
    with pytest.raises(AttributeError) as caught:
        envs.call("missing")
    assert caught.value.envs == (0, 1)
    first, *others = envs.errors
    assert first.env == 1
    assert sorted(record.env for record in others) == [0, 1]


def test_observation_that_does_not_fit_fails_only_its_row(closes: Any) -> None:
    envs = closes(make_prefetcher(TextWalk))
    envs.reset(seed=1)
    envs.send(np.array([0, 1, 0]))
    with pytest.raises(vecenv.errors.ObservationError, match="env 1"):
        envs.recv()
    assert sorted(envs.recv(count=2)[-1]["env_id"]) == [0, 2]
    envs.send(np.zeros(2, np.int64))
    envs.recv(count=2)
    envs.reset(options={"reset_mask": np.array([False, True, False])})
    assert len(envs.step(np.zeros(3, np.int64))[1]) == 3


@pytest.mark.parametrize("count", [1, 2])
def test_no_row_is_lost_if_fewer_are_received_after_an_interruption(count: int, closes: Any) -> None:
    envs = closes(make_prefetcher(partial(Walk, lengths=(5, 6))))
    pending = 0
    event, fired = 1, True
    while fired and event < 200:
        envs.reset(seed=1)
        envs.send(np.zeros(3, np.int64))
        with signal_handler(signal.SIGUSR2, Alarm):
            fired, _ = interrupt_at(event, envs.recv, prefetch.__file__)
        with contextlib.suppress(gymnasium.error.ResetNeeded):
            for in_flight in range(len(envs.in_flight), 0, -count):
                assert len(envs.in_flight) == in_flight
                envs.recv(count=min(count, in_flight))
                pending += 1
        event += 1
    assert 10 < event < 200
    assert pending


class StartedWalk(Walk):
    """A walk that can be stepped without a reset."""

    def __init__(self) -> None:
        super().__init__(lengths=(3, 4))
        self.reset()


@pytest.mark.parametrize("mode", ["NextStep", "SameStep"])
def test_row_without_a_reset_begins_another_episode(mode: str, closes: Any) -> None:
    envs = closes(make_prefetcher(StartedWalk, 2, autoreset_mode=mode))
    envs.reset(seed=1, options={"reset_mask": np.array([True, False])})
    terminations = [envs.step(np.zeros(2, np.int64))[2].tolist() for _ in range(7)]
    assert terminations.count([True, True]) == 2


def test_calls_during_another_call_raise_busy_error(closes: Any) -> None:
    envs, errors = closes(make_prefetcher(FaultyWalk, 2)), []
    envs.reset(seed=1)

    def call_again(*_: object) -> None:
        for call in (lambda: envs.step(np.zeros(2, np.int64)), envs.reset, lambda: envs.get_attr("level"), envs.recv):
            try:
                call()
            except Exception as error:
                errors.append(type(error))

    timer = threading.Timer(0.6, call_again)
    timer.start()
    with signal_handler(signal.SIGALRM, call_again):
        signal.setitimer(signal.ITIMER_REAL, 0.3)
        assert len(envs.step(np.array([2, 2]))[0]) == 2
    timer.join()
    assert errors == [vecenv.errors.BusyError] * 8
    assert len(envs.step(np.zeros(2, np.int64))[0]) == 2


@pytest.mark.parametrize("on_failure", ["raise", "restart"])
def test_set_attr_restarts_a_dead_spare(on_failure: str, closes: Any) -> None:
    envs = closes(make_prefetcher(Walk, 2, on_failure=on_failure))
    envs.reset(seed=1)
    envs.get_attr("level")  # waits for the spares
    envs.processes[2].kill()
    envs.processes[2].join()
    with pytest.raises(vecenv.errors.WorkerDied):
        envs.set_attr("level", 2.0)
    envs.set_attr("level", 2.0)
    for _ in range(20):
        observations, *_, infos = envs.step(np.ones(2, np.int64))
        assert "restarted" not in infos
    assert observations[:, 2].tolist() == [2.0, 2.0]


class MovedWalk(Walk):
    """A walk that refuses another level after action 1."""

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "level" and "position" in self.__dict__ and self.position[0] > 0:
            raise ArithmeticError("it has moved")
        super().__setattr__(name, value)


@pytest.mark.parametrize("fault", ["refuses", "dies"])
def test_attribute_that_fails_in_one_row_applies_to_the_next_episodes_of_others(
    fault: str, closes: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    envs, zeros = closes(make_prefetcher(MovedWalk, 2)), np.zeros(1, np.int64)
    envs.reset(seed=1)
    envs.step(np.array([int(fault == "refuses"), 0]))

    def kill_worker(*_: object) -> None:
        envs.processes[envs.places[0]].kill()
        envs.processes[envs.places[0]].join()

    if fault == "dies":  # after all environments have the attribute
        monkeypatch.setattr(envs._builder, "keep", kill_worker)
    with pytest.raises((ArithmeticError, vecenv.errors.WorkerDied)):
        envs.set_attr("level", 5.0)
    ended = False
    while not ended:
        envs.send(zeros, [1])
        ended = envs.recv(count=1)[2][0]
    envs.send(zeros, [1])
    assert envs.recv(count=1)[0][0, 2] == 5.0


class LoadedWalk(Walk):
    """A walk with a state that cannot be loaded if ``speed`` was negative when it was saved."""

    speed = 1.0

    def take_snapshot(self) -> Any:
        return dict(self.__dict__), self.np_random.bit_generator.state

    def restore_snapshot(self, state: Any) -> None:
        values, generator = state
        if values.get("speed", 1.0) < 0:
            raise ArithmeticError("negative speed")
        self.__dict__.update(values)
        self.np_random.bit_generator.state = generator


@pytest.mark.parametrize("on_failure", ["raise", "restart"])
def test_failure_while_one_row_is_loaded_concerns_only_that_row(on_failure: str, closes: Any) -> None:
    envs, zeros = closes(make_prefetcher(LoadedWalk, on_failure=on_failure)), np.zeros(3, np.int64)
    envs.reset(seed=1)
    snapshots = envs.save(verify=False)
    expected = [envs.step(zeros)[0][[0, 2]] for _ in range(12)]
    envs.exec_func(lambda env: setattr(env.unwrapped, "speed", -1.0), [1])
    (failing,) = envs.save([1], verify=False)
    envs.set_attr("speed", 1.0)
    with pytest.raises(vecenv.errors.SnapshotMismatch):
        envs.load(snapshots[:2])
    with pytest.raises(ArithmeticError, match="negative speed"):
        envs.load([snapshots[0], failing, snapshots[2]])
    if on_failure == "raise":
        with pytest.raises(vecenv.errors.EnvFailed, match="env 1 failed earlier"):
            envs.step(zeros)
        envs.reset(options={"reset_mask": np.array([False, True, False])})
    results = [envs.step(zeros) for _ in expected]
    assert_identical([result[0][[0, 2]] for result in results], expected)
    assert ("restarted" in results[0][4]) == (on_failure == "restart")


class RebuildableWalk(FaultyWalk):
    """A walk in which action 1 raises. It cannot be built while the file ``path`` exists."""

    def __init__(self, path: Path) -> None:
        if path.exists():
            raise ArithmeticError("no license")
        super().__init__()


def test_load_into_a_row_that_cannot_be_rebuilt_changes_nothing(closes: Any, tmp_path: Path) -> None:
    envs, reference = closes(make_prefetcher(partial(RebuildableWalk, tmp_path / "file"))), make_reference([Walk] * 3)
    assert_identical(envs.reset(seed=1), reference.reset(seed=1))
    snapshots, zeros = envs.save(verify=False), np.zeros(3, np.int64)
    with pytest.raises(ArithmeticError, match="action 1"):
        envs.step(np.array([0, 1, 0]))
    (tmp_path / "file").touch()
    with pytest.raises(ArithmeticError, match="no license") as caught:
        envs.load(snapshots)
    assert caught.value.envs == (1,)  # type: ignore[attr-defined]
    (tmp_path / "file").unlink()
    with pytest.raises(vecenv.errors.EnvFailed, match="env 1 failed earlier"):
        envs.step(zeros)
    reference.step(zeros)
    for _ in range(12):
        envs.send(zeros[:2], [0, 2])
        expected = reference.step(zeros)[0]
        received = [envs.recv(count=1) for _ in range(2)]
        assert_identical({result[4]["env_id"][0]: result[0][0] for result in received}, {0: expected[0], 2: expected[2]})


class HangingSpare(Walk):
    """A walk in which the first reset with a derived seed does not return."""

    def __init__(self, marker: Path) -> None:
        super().__init__(lengths=(100, 101))
        self._marker = marker

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        if seed not in (1, 2):
            with contextlib.suppress(FileNotFoundError):
                self._marker.unlink()
                time.sleep(1000)
        return super().reset(seed=seed, options=options)


@pytest.mark.parametrize("then", ["step", "call", "reset"])
def test_spare_that_hangs_is_killed_and_rows_continue(then: str, closes: Any, tmp_path: Path) -> None:
    marker = tmp_path / "marker"
    marker.touch()
    envs = closes(make_prefetcher(lambda: HangingSpare(marker), 2, step_timeout=0.5))
    envs.reset(seed=1)
    if then == "step":
        until = time.monotonic() + 1.0
        while time.monotonic() < until:
            envs.step(np.zeros(2, np.int64))
            time.sleep(0.05)
    elif then == "call":
        assert envs.call("level") == (1.0, 1.0)
    else:
        time.sleep(0.6)
        envs.reset(seed=1)
    for _ in range(20):
        assert len(envs.step(np.zeros(2, np.int64))[0]) == 2
    assert [record.env for record in envs.errors if isinstance(record.error, vecenv.errors.WorkerDied)] != []
