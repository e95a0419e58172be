"""Tests of observers: they receive resets, steps, calls, results and failures, and their own exceptions hide no failure."""

from __future__ import annotations

import copy
import functools
import logging
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from envs import ENGINES, CounterEnv, counters, open_engine
from fake_vector_env import FakeVectorEnv
from gymnasium.error import AlreadyPendingCallError

import vecenv
from vecenv.errors import WorkerDied
from vecenv.front.infos import info_rows
from vecenv.testing import FaultyEnv


class EventLog(vecenv.Observer):
    """An observer that lists all events with their arguments. It lists dropped rows only if ``logs_drops`` is true."""

    logs_drops = False

    def __init__(self) -> None:
        self.events: list[Any] = []

    def pop_events(self) -> list[Any]:
        events, self.events = self.events, []
        return events

    def on_reset(self, rows: Any, seeds: Any, options: Any) -> None:
        self.events.append(("reset", list(rows), list(seeds), copy.deepcopy(options)))

    def on_step(self, rows: Any, actions: Any) -> None:
        self.events.append(("step", None if rows is None else list(rows), np.array(actions).tolist()))

    def on_dropped(self, rows: Any, *, submitted: Any) -> None:
        if self.logs_drops:
            self.events.append(("dropped", list(rows), list(submitted)))

    def on_call(self, rows: Any, name: str, arguments: Any) -> None:
        self.events.append((name, list(rows), arguments))

    def on_result(self, rows: Any, result: Any) -> None:
        self.events.append(("result", None if rows is None else list(rows), result))

    def on_failure(self, rows: Any, error: Exception, *, worker_died: bool) -> str:
        self.events.append(("failure", sorted(rows), type(error), worker_died))
        return f"noted for {sorted(rows)}"


@contextmanager
def logged_engine(env_fns: Any, **options: Any) -> Iterator[tuple[Any, EventLog]]:
    """Yield an engine after a reset, and the log of all later events."""
    log = EventLog()
    with open_engine(env_fns, **options) as envs:
        envs.add_observer(log)
        envs.reset(seed=5)
        log.pop_events()
        yield envs, log


def info_rows_without_env_ids(infos: dict[str, Any], count: int) -> list[dict[str, Any]]:
    """Return one info per row, without the environment ids that the engine adds."""
    return info_rows({key: value for key, value in infos.items() if key not in ("env_id", "_env_id")}, count)


def names_and_rows(events: list[Any]) -> list[Any]:
    return [event[:2] for event in events]


def assert_same_objects(observed: Any, result: Any) -> None:
    """Check that an observer received the arrays that the caller received, not copies of them."""
    for observed_array, array in zip(observed[:4], result[:4], strict=True):
        assert observed_array is array


def make_faulty_env(fault: str, step: int) -> Any:
    return FaultyEnv(CounterEnv(), fault, step=step)


@pytest.mark.parametrize("engine", ENGINES)
def test_observer_receives_each_call_and_its_result(engine: str) -> None:
    log = EventLog()
    with open_engine(counters(3), **ENGINES[engine]) as envs:
        envs.add_observer(log)
        result: Any = envs.reset(seed=5, options={"a": 1})
        assert log.events[0] == ("reset", [0, 1, 2], [5, 6, 7], {"a": 1})
        assert log.events[1][2][0] is result[0]
        assert names_and_rows(log.pop_events()[1:]) == [("result", None)]

        result = envs.step(np.array([0, 1, 0]))
        submitted, (_, rows, observed) = log.pop_events()
        assert submitted == ("step", None, [0, 1, 0])
        assert rows is None
        assert_same_objects(observed, result)
        assert observed[4].rows() == info_rows_without_env_ids(result[4], 3)

        envs.step([1, 1, 0])  # actions may also be a list
        assert log.pop_events()[0] == ("step", None, [1, 1, 0])

        envs.reset(seed=[None, 9, None], options={"reset_mask": np.array([False, True, False])})
        assert log.pop_events()[0] == ("reset", [1], [9], {})


@pytest.mark.parametrize("engine", ENGINES)
def test_observer_receives_the_rows_of_send_reset_async_and_recv(engine: str) -> None:
    with logged_engine(counters(3), **ENGINES[engine]) as (envs, log):
        envs.send(np.array([1, 0]), [2, 0])
        envs.reset_async(seed=[7], options=[{"a": 1}], env_id=[1])
        assert log.pop_events() == [("step", [2, 0], [1, 0]), ("reset", [1], [7], [{"a": 1}])]
        result: Any = envs.recv(count=3)
        ((_, rows, observed),) = log.pop_events()
        assert sorted(rows) == [0, 1, 2]
        assert rows == result[4]["env_id"].tolist()
        assert_same_objects(observed, result)
        assert observed[4].rows() == info_rows_without_env_ids(result[4], 3)


def test_observer_receives_only_calls_that_may_change_environments() -> None:
    with logged_engine(counters(3), num_workers=2) as (envs, log):
        envs.call("get_wrapper_attr", "unwrapped")
        envs.set_attr("extra", [4, 5, 6])
        envs.exec_func(str, [2])
        envs.set_next_options({"a": 1}, seed=3, env_id=[1])
        snapshots = envs.save([0], verify=False)  # not reported, because it changes nothing
        envs.load(snapshots, [2])
    events = log.pop_events()
    assert names_and_rows(events) == [
        ("call", [0, 1, 2]), ("set_attr", [0, 1, 2]), ("exec_func", [2]), ("set_next_options", [1]), ("load", [2]),
    ]  # fmt: skip
    assert [event[2] for event in events] == [
        ("get_wrapper_attr", ("unwrapped",), {}), ("extra", [4, 5, 6]), (str, (), {}), ([(4, {"a": 1})],),
        (list(snapshots),),
    ]  # fmt: skip


def test_observer_receives_no_refused_calls() -> None:
    with logged_engine(counters(2), num_workers=1) as (envs, log):
        for actions in ([0], [0, 0, 0]):
            with pytest.raises(ValueError, match="nothing was sent"):
                envs.step(actions)
        with pytest.raises(ValueError, match="must match num_envs"):
            envs.reset(seed=[1, 2, 3])
        assert log.pop_events() == []


class SeedFiller(vecenv.Observer):
    """An observer that replaces each missing seed with 40 plus the row."""

    def on_reset(self, rows: Any, seeds: Any, options: Any) -> None:
        seeds[:] = [40 + row if seed is None else seed for row, seed in zip(rows, seeds, strict=True)]


class SeedInfoEnv(CounterEnv):
    """An environment that returns the seed of each reset in the info; -1 if there was none."""

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        observation, _ = super().reset(seed=seed, options=options)
        return observation, {"seed": -1 if seed is None else seed}


@pytest.mark.parametrize("engine", ENGINES)
def test_observer_may_fill_in_missing_seeds(engine: str) -> None:
    with open_engine([SeedInfoEnv] * 3, **ENGINES[engine]) as envs:
        envs.add_observer(SeedFiller())
        assert envs.reset(seed=[None, 3, None])[1]["seed"].tolist() == [40, 3, 42]
        mask = np.array([True, True, False])
        assert envs.reset(options={"reset_mask": mask})[1]["seed"].tolist()[:2] == [40, 41]
        envs.reset_async(env_id=[1])
        assert envs.recv(count=1)[4]["seed"].tolist() == [41]


# name -> the kind of fault, options of the engine, the rows that fail, and whether a worker dies
FAULTS = {
    "raises": ("raises", {"num_workers": 1}, [1], False),
    "raises in this process": ("raises", {"num_workers": 0}, [1], False),
    "kills a shared worker": ("kill", {"num_workers": 1}, [0, 1], True),
    "kills its own worker": ("kill", {}, [1], True),
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("fault", FAULTS)
def test_text_returned_by_on_failure_becomes_a_note(fault: str) -> None:
    kind, options, rows, worker_dies = FAULTS[fault]
    log = EventLog()
    with open_engine([CounterEnv, functools.partial(make_faulty_env, kind, 2)], **options) as envs:
        envs.add_observer(log)
        envs.reset(seed=5)
        envs.step([0, 0])
        log.pop_events()
        with pytest.raises(WorkerDied if worker_dies else ValueError, match=r"died|out of order") as caught:
            envs.step([0, 0])
        (record,) = envs.errors
        assert log.pop_events()[1:] == [("failure", rows, type(caught.value), worker_dies)]
        for error in (caught.value, record.error):
            assert error.__notes__.count(f"noted for {rows}") == 1
        envs.reset(seed=1)
        assert log.pop_events()[0][:2] == ("reset", [0, 1])


@pytest.mark.sampled(1)
@pytest.mark.parametrize("by_row", [False, True])
@pytest.mark.parametrize("kind", ["raises", "kill"])
def test_observer_receives_the_failure_and_the_reset_of_a_restart_before_the_result(
    kind: str, by_row: bool, caplog: pytest.LogCaptureFixture
) -> None:
    log = EventLog()
    fns = [CounterEnv, functools.partial(make_faulty_env, kind, 2)]
    with caplog.at_level(logging.WARNING, "vecenv"), open_engine(fns, on_failure="restart") as envs:
        envs.add_observer(log)
        envs.reset(seed=5)
        for _ in range(2):  # the second step fails
            log.pop_events()
            if by_row:
                envs.send([0, 0], [0, 1])
                result: Any = envs.recv(count=2)
                step_rows, result_rows = [0, 1], result[4]["env_id"].tolist()
                truncated = result[3][result_rows.index(1)]
            else:
                result = envs.step([0, 0])
                step_rows = result_rows = None
                truncated = result[3][1]
    assert truncated
    assert names_and_rows(log.pop_events()) == [
        ("step", step_rows), ("failure", [1]), ("reset", [1]), ("result", result_rows),
    ]  # fmt: skip
    assert "(noted for [1])" in caplog.text


class FailingObserver(vecenv.Observer):
    """An observer that raises in one method while ``raises`` is true."""

    def __init__(self, method: str) -> None:
        self.raises = True
        setattr(self, method, self._raise)

    def _raise(self, *_: Any, **__: Any) -> None:
        if self.raises:
            raise OSError("the disk is full")


@pytest.mark.sampled(1)
@pytest.mark.parametrize("on_failure", ["raise", "restart"])
def test_exception_in_on_failure_does_not_replace_the_failure(on_failure: Any) -> None:
    fns = [CounterEnv, functools.partial(make_faulty_env, "raises", 2)]
    with open_engine(fns, on_failure=on_failure, num_workers=1) as envs:
        envs.add_observer(FailingObserver("on_failure"))
        envs.reset(seed=5)
        envs.step([0, 0])
        if on_failure == "raise":
            with pytest.raises(ValueError, match="out of order"):
                envs.step([0, 0])
        else:
            assert envs.step([0, 0])[3].tolist() == [False, True]
        assert "FailingObserver.on_failure raised OSError: the disk is full" in envs.errors[0].error.__notes__
        envs.reset(seed=5)
        envs.step([0, 0])


@pytest.mark.parametrize("on_failure", ["raise", "restart"])
def test_object_returned_by_on_failure_becomes_a_note_as_text(on_failure: Any, caplog: pytest.LogCaptureFixture) -> None:
    class PathObserver(vecenv.Observer):
        def on_failure(self, rows: Any, error: Exception, *, worker_died: bool) -> Any:
            return Path("dumps", "7")

    with open_engine([functools.partial(make_faulty_env, "raises", 1)], on_failure=on_failure, num_workers=1) as envs:
        envs.add_observer(PathObserver())
        envs.reset(seed=5)
        if on_failure == "raise":
            with pytest.raises(ValueError, match="out of order"):
                envs.step([0])
        else:
            assert envs.step([0])[3].tolist() == [True]
            assert "(dumps/7)" in caplog.text
        assert "dumps/7" in envs.errors[0].error.__notes__
        assert "out of order" in str(envs.errors[0])


@pytest.mark.sampled(1)
@pytest.mark.parametrize("method", ["on_step", "on_result"])
def test_exception_in_an_observer_is_raised_and_loses_no_result(method: str) -> None:
    failing_observer = FailingObserver(method)
    with open_engine(counters(2), num_workers=1) as envs, open_engine(counters(2), num_workers=1) as reference:
        envs.reset(seed=5)
        reference.reset(seed=5)
        envs.add_observer(failing_observer)
        with pytest.raises(OSError, match="the disk is full"):
            envs.step([0, 1])
        failing_observer.raises = False
        result = envs.step([0, 1]) if method == "on_step" else envs.step_wait()
        np.testing.assert_array_equal(result[0], reference.step([0, 1])[0])


@pytest.mark.parametrize("error", [TypeError, ValueError, OSError])
def test_reset_drops_a_result_for_which_an_observer_raises(error: type[Exception]) -> None:
    """``reset`` itself raises the first two for wrong arguments, which do not interrupt a pending step."""

    class WrongObserver(vecenv.Observer):
        raises = True

        def on_result(self, rows: Any, result: Any) -> None:
            if self.raises:
                raise error("a mistake")

    observer = WrongObserver()
    with open_engine(counters(2), num_workers=1) as envs:
        envs.reset(seed=5)
        envs.step_async([0, 0])
        with pytest.raises(ValueError, match="seed"):
            envs.reset(seed=[1, 2, 3])
        with pytest.raises(AlreadyPendingCallError):
            envs.reset(seed=5)
        envs.add_observer(observer)
        with pytest.raises(error, match="a mistake"):
            envs.step_wait()
        observer.raises = False
        assert envs.reset(seed=5)[0][:, 3].tolist() == [5, 6]


class FailingAfterFailure(FailingObserver):
    """An observer that raises in the first ``on_reset`` of each restart, but not in the program's own resets."""

    def __init__(self) -> None:
        super().__init__("on_reset")
        self.raises = False

    def on_failure(self, rows: Any, error: Exception, *, worker_died: bool) -> None:
        self.raises = True


@pytest.mark.sampled(2)
@pytest.mark.parametrize("by_row", [False, True])
@pytest.mark.parametrize("kind", ["raises", "kill"])
def test_exception_in_on_reset_of_a_restart_is_raised_and_the_next_step_restarts(kind: str, by_row: bool) -> None:
    observer = FailingAfterFailure()

    def step() -> Any:
        if by_row:
            envs.send([0], [0])
            return envs.recv(5.0, count=1)
        return envs.step([0, 0])

    with open_engine([functools.partial(make_faulty_env, kind, 2)] * 2, on_failure="restart") as envs:
        envs.add_observer(observer)
        envs.reset(seed=5)
        step()
        with pytest.raises(OSError, match="the disk is full"):
            step()
        observer.raises = False
        assert step()[3].all()
        assert not step()[3].any()
        assert envs.stats()["restarts"] == (1 if by_row else 2)


@pytest.mark.parametrize("engine", ENGINES)
def test_observer_receives_the_steps_that_a_reset_drops(engine: str) -> None:
    """An observer raises after another one has received a step. The step is not submitted, and the next reset drops it."""
    failing_observer = FailingObserver("on_step")
    with logged_engine(counters(3), **ENGINES[engine]) as (envs, log):
        log.logs_drops = True
        envs.send(np.array([1]), [2])
        envs.add_observer(failing_observer)
        with pytest.raises(OSError, match="the disk is full"):
            envs.send(np.array([1]), [0])
        failing_observer.raises = False
        envs.reset_async(env_id=[1])
        assert names_and_rows(log.pop_events()) == [("step", [2]), ("step", [0]), ("dropped", [0, 1]), ("reset", [1])]
        envs.recv(count=1)
        log.pop_events()
        pending = envs.in_flight.tolist()
        envs.reset(seed=5)
        assert log.pop_events()[0] == ("dropped", [0, 1, 2], pending)


class EmptyObserver(vecenv.Observer):
    """An observer that overrides no method."""


def test_observer_methods_are_optional() -> None:
    with open_engine(counters(1), num_workers=0) as envs:
        envs.add_observer(EmptyObserver())
        envs.reset(seed=1)
        envs.step([0])


def test_backend_without_workers_refuses_observers() -> None:
    with closing(FakeVectorEnv(1)) as envs, pytest.raises(NotImplementedError, match="cannot `add_observer`"):
        envs.add_observer(EventLog())
