"""Threads, forks, stats, capabilities, and ``close``."""

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
from forks import in_a_fork
from gymnasium.error import AlreadyPendingCallError, ClosedEnvironmentError
from interruption import Interruption
from signals import handled

import vecenv
from vecenv.errors import BusyError, ForkedError
from vecenv.front.capabilities import STATS_KEYS, Capabilities

from .backends import ROWS, Backend
from .calls import call, differs, host, in_flight


def calls_on(envs: Any, actions: Any) -> Iterator[Callable[[], Any]]:
    """Return the calls that every backend has."""
    yield from (envs.reset, envs.reset_async, envs.reset_wait, envs.step_wait, envs.recv)
    yield lambda: envs.step(actions)
    yield lambda: envs.step_async(actions)
    yield lambda: envs.send(actions, range(envs.num_envs))


def slow_step(envs: Any, actions: Any) -> Any:
    """Make a step that ends when its results are ready; on JAX only one with a timeout does."""
    if not envs.capabilities.runs_jax:
        return envs.step(actions)
    envs.step_async(actions)
    return envs.step_wait(timeout=60)


@call("a second thread")
def test_a_second_thread_is_refused(backend: Backend, build: Callable[..., Any]) -> None:
    """While another thread is in a slow step, calls are refused; one that came after that step is repeated in the next."""
    refused = 0
    for _ in range(20):
        envs = build(backend.make_slow)
        actions = (backend.slow_actions or backend.actions)(envs.num_envs)
        calls = list(calls_on(envs, actions))
        envs.reset()
        done: list[Any] = []
        thread = threading.Thread(target=lambda envs=envs, actions=actions, done=done: done.append(slow_step(envs, actions)))
        thread.start()
        time.sleep(0.02)
        texts = []
        for one in calls[refused:]:
            try:
                one()
            except Exception as error:
                text = f"{type(error).__name__}: {error}"
            else:
                text = "not refused"
            if done:
                break
            texts.append(text)
        thread.join()
        assert done, "the other thread's step raised"
        wanted = rf"BusyError: another thread is in a call on this {type(envs).__name__}; `\w+` was refused"
        assert [text for text in texts if not re.fullmatch(wanted, text)] == []
        refused += len(texts)
        if refused == len(calls):
            break
    else:
        pytest.fail("no step of another thread lasted long enough")
    assert issubclass(BusyError, RuntimeError)
    envs.step(actions)


@call("a forked child")
@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_forked_child_is_refused_and_the_parent_continues(backend: Backend, envs: Any) -> None:
    actions = backend.actions(ROWS)

    def check() -> None:
        wanted = rf"this {type(envs).__name__} belongs to another process \(pid {os.getppid()}\); a forked child cannot use "
        for one in calls_on(envs, actions):
            with pytest.raises(ForkedError, match=rf"^{wanted}.+: build a new one in the child$"):
                one()
        envs.close()
        assert envs.closed

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # threads and forks do not go together, which this test is about
        assert in_a_fork(check) == 0
    envs.step(actions)


@call("after `close()`")
def test_every_call_after_close_raises(backend: Backend, build: Callable[..., Any]) -> None:
    envs = build()
    envs.reset()
    envs.close()
    for one in calls_on(envs, backend.actions(ROWS)):
        with pytest.raises(ClosedEnvironmentError) as caught:
            one()
        assert str(caught.value) == f"Trying to operate on `{type(envs).__name__}`, after a call to `close()`."


@call("`stats()`")
def test_figures_have_the_same_keys_and_stay_after_close(backend: Backend, build: Callable[..., Any]) -> None:
    envs = build()
    envs.reset()
    envs.step(backend.actions(ROWS))
    before = envs.stats()
    assert set(STATS_KEYS) <= set(before)
    assert all(isinstance(value, float) for value in before.values())
    for key, wanted in (("steps", ROWS * backend.steps), ("resets", ROWS), ("restarts", 0), ("errors", 0), ("in_flight", 0)):
        assert before[key] == wanted or math.isnan(before[key])
    envs.close()
    after = envs.stats()
    assert set(after) == set(before)
    time.sleep(0.01)
    assert envs.stats() == pytest.approx(after, nan_ok=True)


@call('`stats()["in_flight"]`')
def test_rows_that_are_pending_are_in_flight(backend: Backend, envs: Any) -> None:
    def counted() -> tuple[float, float]:
        return envs.stats()["steps"] - before["steps"], envs.stats()["resets"] - before["resets"]

    before = envs.stats()
    envs.send(backend.actions(ROWS), range(ROWS))
    assert in_flight(envs) == ROWS
    assert counted() == pytest.approx((0, 0), nan_ok=True), "they count when they are received"
    while in_flight(envs):
        envs.recv()
    assert counted() == pytest.approx((ROWS * backend.steps, 0), nan_ok=True)
    stepping = lambda: envs.step_async(backend.actions(ROWS))  # noqa: E731
    for begin, finish in ((envs.reset_async, envs.reset_wait), (envs.reset_async, envs.recv), (stepping, envs.step_wait)):
        counts = counted()
        begin()
        assert in_flight(envs) == ROWS
        assert counted() == pytest.approx(counts, nan_ok=True)
        while in_flight(envs):
            finish()
    assert counted() == pytest.approx((2 * ROWS * backend.steps, 2 * ROWS), nan_ok=True)


@call("`capabilities`: what is False is refused")
def test_missing_capabilities_are_refused_with_the_reason(backend: Backend, envs: Any) -> None:
    can = envs.capabilities
    assert isinstance(can, Capabilities)
    assert str(can).startswith(f"{can.backend}: ")
    for reach in (
        lambda: envs.call("reset_twice"), lambda: envs.call_async("x"), lambda: envs.get_attr("spec"),
        lambda: envs.set_attr("mine", 1), lambda: envs.exec_func(id), lambda: envs.exec_func_send(id),
    ):  # fmt: skip
        if not can.attributes:
            with pytest.raises(NotImplementedError, match=rf"^{type(envs).__name__} cannot `\w+`: .+"):
                reach()
    if can.attributes:
        envs.set_attr("mine", list(range(ROWS)))
        assert envs.get_attr("mine") == tuple(range(ROWS))
        assert len(envs.exec_func(id)) == ROWS
    if not can.first_ready:
        envs.send(backend.actions(ROWS), range(ROWS))
        with pytest.raises(NotImplementedError, match=rf"^{type(envs).__name__} cannot .*: .+"):
            envs.recv(count=1)
        envs.recv()
    assert in_flight(envs) == 0


@call("`close()`: again, with an answer pending")
def test_it_can_be_closed_twice_and_in_the_middle(backend: Backend, build: Callable[..., Any]) -> None:
    for begin in (
        lambda envs: envs.step_async(backend.actions(ROWS)), lambda envs: envs.reset_async(),
        lambda envs: envs.send(backend.actions(ROWS), range(ROWS)), lambda envs: None,
    )[: 1 if backend.dear else None]:  # fmt: skip
        envs = build()
        envs.reset()
        begin(envs)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Gymnasium's warning about a result that was not fetched
            envs.close()
        assert envs.closed
        envs.close()
        envs.close(timeout=1.0, terminate=True)


class Closing(Interruption):
    """An interruption that closes at the chosen line, as a signal handler might, and raises nothing."""

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
def test_close_during_a_call_raises_in_the_call(
    backend: Backend, build: Callable[..., Any], moments: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The call may have its result already. It does not wait for the next check of the watchdog."""
    monkeypatch.setattr("vecenv.engine.watchdog.CHECK_INTERVAL_SECONDS", [1000.0])
    calls = {"step": lambda envs: envs.step(backend.actions(ROWS)), "reset": lambda envs: envs.reset()}
    for moment in moments:
        for name, one in list(calls.items())[: len(moments)]:
            envs = build()
            envs.reset()
            raised: Any = None
            with Closing(envs, moment) as closing:
                try:
                    one(envs)
                except Exception as error:
                    raised = error
            if closing.fired:
                where = f"{name}, closed at {closing}: {raised!r}"
                assert raised is None or isinstance(raised, ClosedEnvironmentError), where
                assert envs.closed
                with pytest.raises(ClosedEnvironmentError):
                    one(envs)
            envs.close()


@call("`close(timeout, terminate)`")
def test_close_accepts_timeout_and_terminate(backend: Backend, build: Callable[..., Any]) -> None:
    for options in ({"timeout": 30}, {"terminate": True}, {"timeout": 0.0, "terminate": True}):
        envs = build()
        with pytest.raises(TypeError, match="timeout"):
            envs.close(timeout="soon")
        with pytest.raises(TypeError, match="time_out"):
            envs.close(time_out=30)
        envs.reset()  # it was not closed
        envs.close(**options)
        assert envs.closed
        if backend.dear:
            break


@call("`close()`: descriptors")
@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="this system does not tell which descriptors there are")
def test_descriptors_are_free_when_close_returns(backend: Backend, build: Callable[..., Any]) -> None:
    def descriptors() -> int:
        if backend.name != "ray":
            return len(os.listdir("/proc/self/fd"))
        found = 0
        for name in os.listdir("/proc/self/fd"):  # a running Ray opens sockets at any time; these are ours
            with contextlib.suppress(OSError):
                found += os.path.basename(os.readlink(f"/proc/self/fd/{name}")).startswith(("vecenv", "memfd:vecenv"))
        return found

    def use() -> Any:
        envs = backend.make()
        envs.reset()
        envs.step(backend.actions(ROWS))
        envs.close()
        return envs

    use()  # create permanent resources first
    gc.collect()
    before = descriptors()
    gc.disable()  # at once, not at a collection
    try:
        envs = use()
        after = descriptors()
    finally:
        gc.enable()
    assert envs.closed
    assert after == before


@call("a subclass with `step_async`, `step_wait`, `reset_async` or `reset_wait` of its own")
def test_overridden_halves_are_used(backend: Backend, build: Callable[..., Any]) -> None:
    """``step`` and ``reset`` call them, whether called from outside or by ``super()``; nothing else changes."""
    envs = build()
    heard: list[str] = []

    def own(name: str) -> Callable[..., Any]:
        def half(self: Any, *args: Any, **kwargs: Any) -> Any:
            heard.append(name)
            return getattr(kind, name)(self, *args, **kwargs)

        return half

    def whole(name: str) -> Callable[..., Any]:
        def calls_super(self: Any, *args: Any, **kwargs: Any) -> Any:
            return getattr(kind, name)(self, *args, **kwargs)

        return calls_super

    kind = type(envs)
    halves = "step_async", "step_wait", "reset_async", "reset_wait"
    for names in ((name,) for name in halves) if not backend.dear else (halves,):
        for wholes in ((), ("step", "reset")):
            envs.__class__ = type("Own", (kind,), {**{name: own(name) for name in names},
                                                   **{name: whole(name) for name in wholes}})  # fmt: skip
            heard.clear()
            assert len(envs.reset()) == 2
            assert len(envs.step(backend.actions(ROWS))) == 5
            assert heard == [name for name in ("reset_async", "reset_wait", "step_async", "step_wait") if name in names]
            assert in_flight(envs) == 0
    if isinstance(envs, vecenv.AsyncVectorEnv):
        halves = "call_async", "call_wait", "exec_func_send", "exec_func_fetch"
        envs.__class__ = type("Own", (kind,), {name: own(name) for name in halves})
        heard.clear()
        assert len(envs.call("spec")) == len(envs.exec_func(id)) == ROWS
        assert heard == list(halves)
    envs.__class__ = kind


NOT_HERE = {"multi-agent": {"unwrapped", "np_random", "np_random_seed", "close_extras", "submissions"}}
"""Names of ``AsyncVectorEnv`` that ``MultiAgentVecEnv``, which is not a ``VectorEnv``, does not have."""
NOT_HERE["envpool-players"] = NOT_HERE["multi-agent"]


@call("every public name of `AsyncVectorEnv`")
def test_every_name_exists_or_is_refused(backend: Backend, envs: Any) -> None:
    """Reading a name works, or the error names the backend and the reason; ``hasattr`` works, too."""
    own = vecenv.AsyncVectorEnv([lambda: gymnasium.make("CartPole-v1")], num_workers=0)
    names = {name for name in {*dir(own), *vars(own)} if not name.startswith("_")}
    own.close()
    assert len(names) > 60
    refused = rf"^({type(envs).__name__}|.*'{envs.capabilities.backend}').* cannot `\w+`: .+"
    for name in sorted(names - NOT_HERE.get(backend.name, set())):
        try:
            getattr(envs, name)
        except NotImplementedError as error:
            assert re.match(refused, str(error)), error
            assert not hasattr(envs, name)
    for ask in (lambda: envs.abandon([0]), lambda: envs.publish_stats("contract")):
        try:
            ask()
        except NotImplementedError as error:
            assert re.match(refused, str(error)) or "publish_stats() needs" in str(error), error
    assert envs.in_flight.tolist() == []
    assert list(envs.errors) == list(envs.error_queue)
    envs.send(backend.actions(ROWS), range(ROWS))
    assert sorted(envs.in_flight) == list(range(ROWS))
    while in_flight(envs):
        envs.recv()


@call("a call within a call, by a signal handler")
def test_a_call_within_a_call_is_refused(backend: Backend, build: Callable[..., Any]) -> None:
    """Every call raises the same error, and the outer step is not affected."""
    errors: list[Any] = []

    def handler(number: int, frame: Any) -> None:
        for ask in asked:
            try:
                errors.append(ask())
            except Exception as error:
                errors.append(error)

    with handled(signal.SIGALRM, handler):
        for seconds in (0.02, 0.01, 0.005, 0.02, 0.01, 0.005, 0.002):  # if it came before the step or after it: once more
            envs = build(backend.make_slow)
            actions = (backend.slow_actions or backend.actions)(envs.num_envs)
            envs.reset()
            asked = list(calls_on(envs, actions))
            errors.clear()
            steps = envs.stats()["steps"]
            signal.setitimer(signal.ITIMER_REAL, seconds)
            with contextlib.suppress(AlreadyPendingCallError):  # of the handler's calls before the step
                result = slow_step(envs, actions)
            signal.setitimer(signal.ITIMER_REAL, 0)
            if all(type(one) is BusyError for one in errors) and errors:
                break
            envs.close()
        assert len(result) == 5
        assert [type(one) for one in errors] == [BusyError] * len(asked)
    wanted = rf"a call on this {type(envs).__name__} is under way in this thread; `\w+` was refused"
    assert [str(one) for one in errors if not re.fullmatch(wanted, str(one))] == []
    assert envs.stats()["steps"] == pytest.approx(steps + envs.num_envs * backend.steps, nan_ok=True)
    assert in_flight(envs) == 0
    envs.step(actions)


@call("`reset` after an interrupted wait")
def test_reset_drops_what_an_exception_interrupted(backend: Backend, build: Callable[..., Any]) -> None:
    envs = build(backend.make_slow)
    actions = (backend.slow_actions or backend.actions)(envs.num_envs)
    timeout = 60 if envs.capabilities.runs_jax else None  # on JAX, only a wait with a timeout lasts as long as the step
    first = host(envs.reset(seed=3)[0])
    interrupted = 0
    with handled(signal.SIGALRM, KeyboardInterrupt):
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
            assert in_flight(envs) == 0
            assert len(envs.step(actions)[1]) == envs.num_envs
    assert interrupted
    assert not differs(host(envs.reset(seed=3)[0]), first)
