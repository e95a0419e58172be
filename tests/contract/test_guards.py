"""Calls from other threads, forks and signal handlers; ``stats``, capabilities, and ``close``."""

from __future__ import annotations

import contextlib
import gc
import math
import os
import re
import signal
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import gymnasium
import pytest
from forks import run_in_fork
from gymnasium.error import AlreadyPendingCallError, ClosedEnvironmentError
from interruption import Interruption
from signals import signal_handler

import vecenv
from vecenv.errors import BusyError, ForkedError
from vecenv.front.capabilities import STATS_KEYS, Capabilities

from .backends import ROWS, Backend
from .calls import call, count_in_flight, differs, to_numpy


def common_calls(envs: Any, actions: Any) -> Iterator[Callable[[], Any]]:
    """Yield functions that make the calls that every backend has."""
    yield from (envs.reset, envs.reset_async, envs.reset_wait, envs.step_wait, envs.recv)
    yield lambda: envs.step(actions)
    yield lambda: envs.step_async(actions)
    yield lambda: envs.send(actions, range(envs.num_envs))


def slow_step(envs: Any, actions: Any) -> Any:
    """Step and wait for the results. On JAX, ``step`` returns before they are ready, so this waits with a timeout."""
    if not envs.capabilities.runs_jax:
        return envs.step(actions)
    envs.step_async(actions)
    return envs.step_wait(timeout=60)


def append_slow_step(results: list[Any], envs: Any, actions: Any) -> None:
    results.append(slow_step(envs, actions))


@call("a call from a second thread")
def test_call_from_a_second_thread_is_refused(backend: Backend, build: Callable[..., Any]) -> None:
    """Each call is made during a slow step of another thread, and again during the next one if the step has ended first."""
    refused = 0
    for _ in range(20):
        envs = build(backend.make_slow)
        actions = (backend.slow_actions or backend.actions)(envs.num_envs)
        calls = list(common_calls(envs, actions))
        envs.reset()
        results: list[Any] = []
        thread = threading.Thread(target=append_slow_step, args=(results, envs, actions))
        thread.start()
        time.sleep(0.02)
        outcomes = []
        for make_call in calls[refused:]:
            try:
                make_call()
            except Exception as error:
                outcome = f"{type(error).__name__}: {error}"
            else:
                outcome = "not refused"
            if results:
                break
            outcomes.append(outcome)
        thread.join()
        assert results, "the other thread's step raised"
        expected = rf"BusyError: another thread is in a call on this {type(envs).__name__}; `\w+` was refused"
        assert [outcome for outcome in outcomes if not re.fullmatch(expected, outcome)] == []
        refused += len(outcomes)
        if refused == len(calls):
            break
    else:
        pytest.fail("the other thread's steps did not last long enough")
    assert issubclass(BusyError, RuntimeError)
    envs.step(actions)


@call("a call in a forked child")
@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_forked_child_is_refused_and_the_parent_continues(backend: Backend, envs: Any) -> None:
    actions = backend.actions(ROWS)

    def check() -> None:
        name = type(envs).__name__
        expected = rf"this {name} belongs to another process \(pid {os.getppid()}\); a forked child cannot use "
        for make_call in common_calls(envs, actions):
            with pytest.raises(ForkedError, match=rf"^{expected}.+: build a new one in the child$"):
                make_call()
        envs.close()
        assert envs.closed

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Python warns about a fork in a process with threads
        assert run_in_fork(check) == 0
    envs.step(actions)


@call("a call after `close()`")
def test_every_call_after_close_raises(backend: Backend, build: Callable[..., Any]) -> None:
    envs = build()
    envs.reset()
    envs.close()
    for make_call in common_calls(envs, backend.actions(ROWS)):
        with pytest.raises(ClosedEnvironmentError) as caught:
            make_call()
        assert str(caught.value) == f"Trying to operate on `{type(envs).__name__}`, after a call to `close()`."


@call("`stats()`")
def test_stats_have_common_keys_and_stay_after_close(backend: Backend, build: Callable[..., Any]) -> None:
    envs = build()
    envs.reset()
    envs.step(backend.actions(ROWS))
    before = envs.stats()
    assert set(STATS_KEYS) <= set(before)
    assert all(isinstance(value, float) for value in before.values())
    counts = {"steps": ROWS * backend.steps, "resets": ROWS, "restarts": 0, "errors": 0, "in_flight": 0}
    for key, expected in counts.items():
        assert before[key] == expected or math.isnan(before[key])
    envs.close()
    after = envs.stats()
    assert set(after) == set(before)
    time.sleep(0.01)
    assert envs.stats() == pytest.approx(after, nan_ok=True)


@call('`stats()["in_flight"]`')
def test_stats_count_pending_rows_as_in_flight(backend: Backend, envs: Any) -> None:
    def count_steps_and_resets() -> tuple[float, float]:
        return envs.stats()["steps"] - before["steps"], envs.stats()["resets"] - before["resets"]

    before = envs.stats()
    envs.send(backend.actions(ROWS), range(ROWS))
    assert count_in_flight(envs) == ROWS
    assert count_steps_and_resets() == pytest.approx((0, 0), nan_ok=True), "steps count when their rows are received"
    while count_in_flight(envs):
        envs.recv()
    assert count_steps_and_resets() == pytest.approx((ROWS * backend.steps, 0), nan_ok=True)

    def begin_step() -> None:
        envs.step_async(backend.actions(ROWS))

    for begin, finish in ((envs.reset_async, envs.reset_wait), (envs.reset_async, envs.recv), (begin_step, envs.step_wait)):
        counts = count_steps_and_resets()
        begin()
        assert count_in_flight(envs) == ROWS
        assert count_steps_and_resets() == pytest.approx(counts, nan_ok=True)
        while count_in_flight(envs):
            finish()
    assert count_steps_and_resets() == pytest.approx((2 * ROWS * backend.steps, 2 * ROWS), nan_ok=True)


@call("`capabilities`: missing ones are refused")
def test_missing_capabilities_are_refused_with_the_reason(backend: Backend, envs: Any) -> None:
    capabilities = envs.capabilities
    assert isinstance(capabilities, Capabilities)
    assert str(capabilities).startswith(f"{capabilities.backend}: ")
    for call_env in (
        lambda: envs.call("reset_twice"), lambda: envs.call_async("x"), lambda: envs.get_attr("spec"),
        lambda: envs.set_attr("mine", 1), lambda: envs.exec_func(id), lambda: envs.exec_func_send(id),
    ):  # fmt: skip
        if not capabilities.attributes:
            with pytest.raises(NotImplementedError, match=rf"^{type(envs).__name__} cannot `\w+`: .+"):
                call_env()
    if capabilities.attributes:
        envs.set_attr("mine", list(range(ROWS)))
        assert envs.get_attr("mine") == tuple(range(ROWS))
        assert len(envs.exec_func(id)) == ROWS
    if not capabilities.first_ready:
        envs.send(backend.actions(ROWS), range(ROWS))
        with pytest.raises(NotImplementedError, match=rf"^{type(envs).__name__} cannot .*: .+"):
            envs.recv(count=1)
        envs.recv()
    assert count_in_flight(envs) == 0


@call("`close()`: twice, and with a result pending")
def test_close_works_twice_and_with_a_pending_result(backend: Backend, build: Callable[..., Any]) -> None:
    for begin in (
        lambda envs: envs.step_async(backend.actions(ROWS)), lambda envs: envs.reset_async(),
        lambda envs: envs.send(backend.actions(ROWS), range(ROWS)), lambda envs: None,
    )[: 1 if backend.expensive else None]:  # fmt: skip
        envs = build()
        envs.reset()
        begin(envs)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Gymnasium warns that the pending result is lost
            envs.close()
        assert envs.closed
        envs.close()
        envs.close(timeout=1.0, terminate=True)


class ClosingInterruption(Interruption):
    """An interruption that calls ``close`` at the chosen line, like a signal handler, and does not raise."""

    def __init__(self, envs: Any, moment: int) -> None:
        super().__init__("line", moment)
        self._envs = envs

    def _reach_moment(self, frame: Any, event: str) -> None:
        self._left -= 1
        if self._left < 0 and not self.fired:
            self.fired, self.where = True, f"{frame.f_code.co_filename}:{frame.f_lineno}"
            self._envs.close()


@call("`close()` by a signal handler in the middle of a call")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("moments", [(20,), pytest.param((3, 8, 30, 45, 60, 90), marks=pytest.mark.long)])
def test_close_during_a_call_ends_the_call(
    backend: Backend, build: Callable[..., Any], moments: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The call raises, or returns its result. It must not wait for the watchdog's next check, after 1,000 seconds."""
    monkeypatch.setattr("vecenv.engine.watchdog.CHECK_INTERVAL_SECONDS", [1000.0])
    calls = {"step": lambda envs: envs.step(backend.actions(ROWS)), "reset": lambda envs: envs.reset()}
    for moment in moments:
        for name, make_call in list(calls.items())[: len(moments)]:
            envs = build()
            envs.reset()
            raised: Any = None
            with ClosingInterruption(envs, moment) as closing:
                try:
                    make_call(envs)
                except Exception as error:
                    raised = error
            if closing.fired:
                message = f"{name}, closed at {closing}: {raised!r}"
                assert raised is None or isinstance(raised, ClosedEnvironmentError), message
                assert envs.closed
                with pytest.raises(ClosedEnvironmentError):
                    make_call(envs)
            envs.close()


@call("`close(timeout, terminate)`")
def test_close_accepts_timeout_and_terminate(backend: Backend, build: Callable[..., Any]) -> None:
    for options in ({"timeout": 30}, {"terminate": True}, {"timeout": 0.0, "terminate": True}):
        envs = build()
        with pytest.raises(TypeError, match="timeout"):
            envs.close(timeout="soon")
        with pytest.raises(TypeError, match="time_out"):
            envs.close(time_out=30)
        envs.reset()  # the invalid calls have not closed it
        envs.close(**options)
        assert envs.closed
        if backend.expensive:
            break


@call("`close()`: descriptors")
@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="lists descriptors in /proc")
def test_close_frees_descriptors_before_it_returns(backend: Backend, build: Callable[..., Any]) -> None:
    def count_descriptors() -> int:
        if backend.name != "ray":
            return len(os.listdir("/proc/self/fd"))
        count = 0
        for name in os.listdir("/proc/self/fd"):  # Ray opens sockets at any time, so only vecenv's files are counted
            with contextlib.suppress(OSError):
                count += os.path.basename(os.readlink(f"/proc/self/fd/{name}")).startswith(("vecenv", "memfd:vecenv"))
        return count

    def build_step_and_close() -> Any:
        envs = backend.make()
        envs.reset()
        envs.step(backend.actions(ROWS))
        envs.close()
        return envs

    build_step_and_close()  # the first time also creates permanent resources
    gc.collect()
    before = count_descriptors()
    gc.disable()  # close() must free descriptors without a garbage collection
    try:
        envs = build_step_and_close()
        after = count_descriptors()
    finally:
        gc.enable()
    assert envs.closed
    assert after == before


@call("a subclass that overrides `step_async`, `step_wait`, `reset_async` or `reset_wait`")
def test_overridden_async_and_wait_methods_are_called(backend: Backend, build: Callable[..., Any]) -> None:
    """``step`` and ``reset`` call them, even if a subclass calls ``super().step`` and ``super().reset``."""
    envs = build()
    called: list[str] = []

    def recording_method(name: str) -> Callable[..., Any]:
        def record_call(self: Any, *args: Any, **kwargs: Any) -> Any:
            called.append(name)
            return getattr(base, name)(self, *args, **kwargs)

        return record_call

    def forwarding_method(name: str) -> Callable[..., Any]:
        def call_super(self: Any, *args: Any, **kwargs: Any) -> Any:
            return getattr(base, name)(self, *args, **kwargs)

        return call_super

    base = type(envs)
    overridable = "step_async", "step_wait", "reset_async", "reset_wait"
    for names in ((name,) for name in overridable) if not backend.expensive else (overridable,):
        for others in ((), ("step", "reset")):
            methods = {name: recording_method(name) for name in names} | {name: forwarding_method(name) for name in others}
            envs.__class__ = type("Subclass", (base,), methods)
            called.clear()
            assert len(envs.reset()) == 2
            assert len(envs.step(backend.actions(ROWS))) == 5
            assert called == [name for name in ("reset_async", "reset_wait", "step_async", "step_wait") if name in names]
            assert count_in_flight(envs) == 0
    if isinstance(envs, vecenv.AsyncVectorEnv):
        overridable = "call_async", "call_wait", "exec_func_send", "exec_func_fetch"
        envs.__class__ = type("Subclass", (base,), {name: recording_method(name) for name in overridable})
        called.clear()
        assert len(envs.call("spec")) == len(envs.exec_func(id)) == ROWS
        assert called == list(overridable)
    envs.__class__ = base


ABSENT_NAMES = {"multi-agent": {"unwrapped", "np_random", "np_random_seed", "close_extras", "submissions"}}
"""Names of ``AsyncVectorEnv`` that ``MultiAgentVecEnv``, which is not a ``VectorEnv``, does not have."""
ABSENT_NAMES["envpool-players"] = ABSENT_NAMES["multi-agent"]


@call("every public name of `AsyncVectorEnv`")
def test_every_public_name_exists_or_is_refused(backend: Backend, envs: Any) -> None:
    """``getattr`` works, or raises an error with the backend and the reason; then ``hasattr`` is false."""
    engine = vecenv.AsyncVectorEnv([lambda: gymnasium.make("CartPole-v1")], num_workers=0)
    names = {name for name in {*dir(engine), *vars(engine)} if not name.startswith("_")}
    engine.close()
    assert len(names) > 60
    refused = rf"^({type(envs).__name__}|.*'{envs.capabilities.backend}').* cannot `\w+`: .+"
    for name in sorted(names - ABSENT_NAMES.get(backend.name, set())):
        try:
            getattr(envs, name)
        except NotImplementedError as error:
            assert re.match(refused, str(error)), error
            assert not hasattr(envs, name)
    for call_method in (lambda: envs.abandon([0]), lambda: envs.publish_stats("contract")):
        try:
            call_method()
        except NotImplementedError as error:
            assert re.match(refused, str(error)) or "publish_stats() needs" in str(error), error
    assert envs.in_flight.tolist() == []
    assert list(envs.errors) == list(envs.error_queue)
    envs.send(backend.actions(ROWS), range(ROWS))
    assert sorted(envs.in_flight) == list(range(ROWS))
    while count_in_flight(envs):
        envs.recv()


@call("a call within a call, by a signal handler")
def test_call_within_a_call_is_refused(backend: Backend, build: Callable[..., Any]) -> None:
    """Every nested call raises the same error, and the outer step is not affected."""
    errors: list[Any] = []

    def handler(number: int, frame: Any) -> None:
        for nested_call in nested_calls:
            try:
                errors.append(nested_call())
            except Exception as error:
                errors.append(error)

    with signal_handler(signal.SIGALRM, handler):
        for seconds in (0.02, 0.01, 0.005, 0.02, 0.01, 0.005, 0.002):  # try again if the signal misses the step
            envs = build(backend.make_slow)
            actions = (backend.slow_actions or backend.actions)(envs.num_envs)
            envs.reset()
            nested_calls = list(common_calls(envs, actions))
            errors.clear()
            steps = envs.stats()["steps"]
            signal.setitimer(signal.ITIMER_REAL, seconds)
            with contextlib.suppress(AlreadyPendingCallError):  # if the handler's calls are made before the step
                result = slow_step(envs, actions)
            signal.setitimer(signal.ITIMER_REAL, 0)
            if all(type(error) is BusyError for error in errors) and errors:
                break
            envs.close()
        assert len(result) == 5
        assert [type(error) for error in errors] == [BusyError] * len(nested_calls)
    expected = rf"a call on this {type(envs).__name__} is under way in this thread; `\w+` was refused"
    assert [str(error) for error in errors if not re.fullmatch(expected, str(error))] == []
    assert envs.stats()["steps"] == pytest.approx(steps + envs.num_envs * backend.steps, nan_ok=True)
    assert count_in_flight(envs) == 0
    envs.step(actions)


@call("`reset` after an interrupted wait")
def test_reset_after_an_interrupted_wait_drops_the_pending_call(backend: Backend, build: Callable[..., Any]) -> None:
    envs = build(backend.make_slow)
    actions = (backend.slow_actions or backend.actions)(envs.num_envs)
    timeout = 60 if envs.capabilities.runs_jax else None  # on JAX, only a wait with a timeout waits for the results
    first = to_numpy(envs.reset(seed=3)[0])
    interrupted = 0
    with signal_handler(signal.SIGALRM, KeyboardInterrupt):
        for begin, wait in (
            (lambda: envs.step_async(actions), lambda: envs.step_wait(timeout)),
            (lambda: envs.send(actions, range(envs.num_envs)), lambda: envs.recv(timeout)),
            (envs.reset_async, lambda: envs.reset_wait(timeout)),
        ):
            begin()
            signal.setitimer(signal.ITIMER_REAL, 0.02)
            with contextlib.suppress(KeyboardInterrupt):
                wait()
                interrupted -= 1
            interrupted += 1
            signal.setitimer(signal.ITIMER_REAL, 0)
            envs.reset()
            assert count_in_flight(envs) == 0
            assert len(envs.step(actions)[1]) == envs.num_envs
    assert interrupted
    assert not differs(to_numpy(envs.reset(seed=3)[0]), first)
