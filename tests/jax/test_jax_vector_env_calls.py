"""What each call of ``JaxVectorEnv`` means: the same as of ``vecenv.AsyncVectorEnv``, or a refusal that says why not."""

from __future__ import annotations

import math
import multiprocessing
import threading
from collections.abc import Callable
from typing import Any

import gymnasium as gym
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gymnasium.error import AlreadyPendingCallError, ClosedEnvironmentError, NoAsyncCallError, ResetNeeded
from jax_envs import Counter

from vecenv.backends.jax_native import JaxVectorEnv
from vecenv.errors import BusyError, ForkedError, StepTimeout
from vecenv.front.capabilities import FIGURES
from vecenv.trajectories import assert_identical

ACTIONS = np.full((5, 1), 0.4, np.float32)


@pytest.fixture
def pair(counters: Any) -> tuple[JaxVectorEnv, JaxVectorEnv]:
    """Two that have been reset alike."""
    one, other = JaxVectorEnv(counters()), JaxVectorEnv(counters())
    assert_identical(one.reset(seed=0), other.reset(seed=0))
    return one, other


# -- reset ---------------------------------------------------------------------------------------------------------


def test_other_reset_options_are_refused_by_name_and_change_nothing(pair: Any) -> None:
    one, other = pair
    for options in ({"start": 1}, {"start": 1, "reset_mask": np.ones(5, bool)}):
        with pytest.raises(ValueError, match=r"no reset options but 'reset_mask', got \['start'\]"):
            one.reset(options=options)
    one.reset(options={})
    other.reset()
    assert_identical(one.step(ACTIONS), other.step(ACTIONS))


def test_a_masked_reset_changes_the_seeds_of_its_own_rows_only(pair: Any) -> None:
    envs, _ = pair
    envs.reset(seed=10, options={"reset_mask": np.array([True, False, True, False, False])})
    assert envs.np_random_seed == (10, 1, 12, 3, 4)


def test_reset_async_and_reset_wait_are_a_reset(pair: Any) -> None:
    one, other = pair
    one.reset_async(5)
    assert one.stats()["in_flight"] == 5
    assert_identical(one.reset_wait(timeout=60), other.reset(seed=5))
    one.reset_send(seed=6)
    assert_identical(one.reset_fetch(), other.reset(seed=6))


@pytest.mark.parametrize("env_id", [None, range(5)])
def test_a_reset_can_be_received(pair: Any, env_id: Any) -> None:
    one, other = pair
    wanted, _ = other.reset(seed=5)
    one.reset_async(seed=5, env_id=env_id)
    if env_id is not None:
        with pytest.raises(NoAsyncCallError, match="reset_wait"):
            one.reset_wait()
    observations, rewards, terminated, truncated, infos = one.recv()
    assert_identical(observations, wanted)
    assert_identical((rewards, terminated, truncated), (np.zeros(5), np.zeros(5, bool), np.zeros(5, bool)))
    assert set(infos) == {"env_id", "_env_id"}
    with pytest.raises(NoAsyncCallError):
        one.recv()
    assert_identical(one.step(ACTIONS), other.step(ACTIONS))


def test_a_reset_of_some_is_not_enough_for_recv(pair: Any) -> None:
    envs, _ = pair
    envs.reset_async(options={"reset_mask": np.arange(5) < 2})
    with pytest.raises(NoAsyncCallError, match="`recv` for 5 environments, but only 2 are in flight"):
        envs.recv()
    envs.reset_wait()


def test_a_reset_drops_what_was_sent(pair: Any) -> None:
    one, other = pair
    one.send(ACTIONS)
    assert_identical(one.reset(seed=3), other.reset(seed=3))
    with pytest.raises(NoAsyncCallError):
        one.recv()
    assert_identical(one.step(ACTIONS), other.step(ACTIONS))


def test_a_refused_reset_leaves_seeds_and_phase_as_they_were(counters: Any) -> None:
    envs = JaxVectorEnv(counters())
    with pytest.raises(ResetNeeded, match="first reset"):
        envs.reset(seed=3, options={"reset_mask": np.arange(5) < 2})
    assert envs.np_random_seed == (None,) * 5
    envs.reset(seed=0)


# -- steps in two halves -------------------------------------------------------------------------------------------


def test_step_async_and_step_wait_are_a_step(pair: Any) -> None:
    one, other = pair
    for begin, finish in ((one.step_async, one.step_wait), (one.step_send, one.step_fetch)):
        begin(ACTIONS)
        assert one.stats()["in_flight"] == 5
        assert_identical(finish(timeout=60), other.step(ACTIONS))


@pytest.mark.parametrize("env_id", [None, np.arange(5)])
def test_send_and_recv_are_a_step_that_says_of_whom(pair: Any, env_id: Any) -> None:
    one, other = pair
    for count in (None, 5):
        one.send(ACTIONS, env_id)
        *results, infos = one.recv(timeout=60, count=count)
        assert infos["env_id"].dtype == np.intp
        assert_identical(infos.pop("env_id"), np.arange(5))
        assert_identical(infos.pop("_env_id"), np.ones(5, bool))
        assert_identical((*results, infos), other.step(ACTIONS))


@pytest.mark.parametrize("to", ["jax"])
def test_received_infos_say_of_whom_on_the_device_too(counters: Any, to: str) -> None:
    envs = JaxVectorEnv(counters(), to=to)
    envs.reset(seed=0)
    envs.send(ACTIONS)
    infos = envs.recv()[4]
    assert_identical((infos["env_id"], infos["_env_id"]), (np.arange(5), np.ones(5, bool)))


def test_some_environments_cannot_be_sent_to_or_received(pair: Any) -> None:
    envs, _ = pair
    for call in (
        lambda: envs.send(ACTIONS[:2], env_id=[0, 1]),
        lambda: envs.send(ACTIONS, env_id=[1, 0, 2, 3, 4]),
        lambda: envs.reset_async(env_id=[3]),
        lambda: envs.recv(count=2),
    ):
        with pytest.raises(NotImplementedError, match=r"JaxVectorEnv cannot .* environments: "):
            call()
    for wrong in ([5], [0, 0], []):
        with pytest.raises(ValueError, match="env_id"):
            envs.send(ACTIONS, env_id=wrong)
    with pytest.raises(ValueError, match="count"):
        envs.recv(count=6)
    assert envs.stats()["in_flight"] == 0


ASYNC, SENT = "step_async", "send"
OUT_OF_ORDER: list[tuple[str | None, Callable[[Any], Any], type[Exception], str]] = [
    (None, lambda e: e.step_wait(), NoAsyncCallError, "Calling `step_wait` without any prior call to `step_async`."),
    (None, lambda e: e.reset_wait(), NoAsyncCallError, "Calling `reset_wait` without any prior call to `reset_async`."),
    (None, lambda e: e.recv(), NoAsyncCallError, "Calling `recv` for 5 environments, but only 0 are in flight"),
    (ASYNC, lambda e: e.step(ACTIONS), AlreadyPendingCallError, "Calling `step_async` while waiting for a pending call to"),
    (ASYNC, lambda e: e.send(ACTIONS), AlreadyPendingCallError, "Calling `send` while waiting for a pending call to"),
    (
        ASYNC,
        lambda e: e.reset(),
        AlreadyPendingCallError,
        "Calling `reset_async` while waiting for a pending call to `step`",
    ),
    (ASYNC, lambda e: e.recv(), AlreadyPendingCallError, "Calling `recv` while waiting for a pending call to `step`"),
    (ASYNC, lambda e: e.reset_wait(), NoAsyncCallError, "Calling `reset_wait` without any prior call to `reset_async`."),
    (
        ASYNC,
        lambda e: e.state,
        AlreadyPendingCallError,
        "Calling `state` while waiting for a pending call to `step` to complete: call `step_wait()` first.",
    ),
    (ASYNC, lambda e: e.render(), AlreadyPendingCallError, "Calling `render` while waiting for a pending call to `step`"),
    (SENT, lambda e: e.step_wait(), NoAsyncCallError, "Calling `step_wait` without any prior call to `step_async`."),
    (SENT, lambda e: e.reset_wait(), NoAsyncCallError, "Calling `reset_wait` without any prior call to `reset_async`."),
    (SENT, lambda e: e.send(ACTIONS), AlreadyPendingCallError, "Calling `send` for envs 0..4, which are still in flight"),
    (SENT, lambda e: e.step(ACTIONS), AlreadyPendingCallError, "Calling `step_async` for envs 0..4, which are still in"),
    (
        SENT,
        lambda e: e.reset_async(env_id=range(5)),
        AlreadyPendingCallError,
        "`reset_async` for envs 0..4, which are still",
    ),
    (SENT, lambda e: e.warmup(), AlreadyPendingCallError, "Calling `warmup` for envs 0..4, which are still in flight"),
    (SENT, lambda e: e.step_chunk(ACTIONS[None]), AlreadyPendingCallError, "Calling `step_chunk` for envs 0..4, which are"),
]


@pytest.mark.parametrize(("before", "call", "error", "text"), OUT_OF_ORDER)
def test_calls_out_of_order_are_refused_and_the_answer_stays_owed(
    pair: Any, before: str | None, call: Callable[[Any], Any], error: type[Exception], text: str
) -> None:
    one, other = pair
    if before is not None:
        getattr(one, before)(ACTIONS)
    with pytest.raises(error) as caught:
        call(one)
    assert text in str(caught.value)
    if before is not None:
        answer = one.step_wait() if before == ASYNC else one.recv()
        assert_identical(answer[:4], other.step(ACTIONS)[:4])


class Slow(Counter):
    def step(self, state: Any, action: Any, key: Any) -> Any:
        work = jax.lax.fori_loop(0, 300, lambda _, m: jnp.tanh(m @ m), jnp.ones((300, 300)) * action[0])
        return super().step({**state, "x": state["x"] + 0 * work[0, 0]}, action, key)


@pytest.mark.long
def test_an_answer_that_is_late_stays_owed() -> None:
    envs = JaxVectorEnv(Slow(), 2)
    envs.reset(seed=0)
    still = np.zeros((2, 1), np.float32)
    for begin, finish in (("send", "recv"), ("step_async", "step_wait")):
        getattr(envs, begin)(still)
        for timeout in (0.0, -1, np.float32(0)):
            with pytest.raises(StepTimeout, match=f"`{finish}` has timed out.*\n.*still owed"):
                getattr(envs, finish)(timeout=timeout)
        with pytest.raises(TypeError, match="timeout"):
            getattr(envs, finish)(timeout="1")
        assert envs.stats()["in_flight"] == 2
        assert len(getattr(envs, finish)(timeout=60)) == 5
    assert envs.stats()["wait_fraction"] > 0


class Raising(Counter):
    """Raises in the step after the one that put it beyond 1.5."""

    def step(self, state: Any, action: Any, key: Any) -> Any:
        def look(x: Any) -> Any:
            if x > 1.5:
                raise ZeroDivisionError("beyond")
            return x

        x = jax.pure_callback(look, jax.ShapeDtypeStruct((), jnp.float32), state["x"], vmap_method="sequential")
        return super().step({**state, "x": x}, action, key)


@pytest.mark.long
def test_an_environment_that_raises_leaves_a_vector_that_can_be_reset() -> None:
    envs = JaxVectorEnv(Raising(), 2)
    envs.reset(seed=0)
    envs.step(np.full((2, 1), 2, np.float32))
    with pytest.raises((RuntimeError, ValueError), match="beyond"):  # JAX says it in either
        envs.step(np.zeros((2, 1), np.float32))
    with pytest.raises(ResetNeeded):
        envs.step(np.zeros((2, 1), np.float32))
    envs.reset(seed=0)
    assert envs.step(np.zeros((2, 1), np.float32))[4]["deep"]["step"].tolist() == [1, 1]


# -- who may call --------------------------------------------------------------------------------------------------

CALLS: list[Callable[[Any], Any]] = [
    lambda e: e.reset(), lambda e: e.reset_async(), lambda e: e.reset_wait(), lambda e: e.step(ACTIONS),
    lambda e: e.step_async(ACTIONS), lambda e: e.step_wait(), lambda e: e.send(ACTIONS), lambda e: e.recv(),
    lambda e: e.state, lambda e: e.step_chunk(ACTIONS[None]), lambda e: e.warmup(), lambda e: e.render(),
]  # fmt: skip


def test_a_second_thread_is_refused(pair: Any) -> None:
    envs, _ = pair
    inside, go_on = threading.Event(), threading.Event()

    class Waiting:
        """Actions that take their time to become an array."""

        def __array__(self, *args: Any, **kwargs: Any) -> Any:
            inside.set()
            assert go_on.wait(60)
            return ACTIONS

    thread = threading.Thread(target=lambda: envs.step(Waiting()))
    thread.start()
    assert inside.wait(60)
    try:
        for call in CALLS:
            with pytest.raises(BusyError, match="another thread is in a call on this JaxVectorEnv"):
                call(envs)
    finally:
        go_on.set()
        thread.join(60)
    assert envs.stats()["steps"] == 5
    envs.step(ACTIONS)


def test_every_call_after_close_says_so(pair: Any) -> None:
    envs, _ = pair
    envs.step_async(ACTIONS)
    envs.close()
    for call in CALLS:
        with pytest.raises(ClosedEnvironmentError, match="`JaxVectorEnv`, after a call to `close"):
            call(envs)


def _use_in_child(envs: Any, answers: Any) -> None:
    said = []
    for call in CALLS:
        try:
            call(envs)
        except BaseException as error:
            said.append((type(error).__name__, str(error)))
    envs.close()
    answers.put((said, envs.closed))


@pytest.mark.filterwarnings("ignore:os.fork:RuntimeWarning", "ignore:.*fork.*:DeprecationWarning")
def test_every_call_in_a_forked_child_is_refused(pair: Any) -> None:
    envs, other = pair
    context = multiprocessing.get_context("fork")
    answers = context.SimpleQueue()
    child = context.Process(target=_use_in_child, args=(envs, answers))
    child.start()
    child.join(60)
    said, closed = answers.get()
    assert [name for name, _ in said] == [ForkedError.__name__] * len(CALLS)
    assert "a forked child cannot use its threads: build a new one in the child" in said[0][1]
    assert closed
    child.close()
    assert_identical(envs.step(ACTIONS), other.step(ACTIONS))


def test_one_that_could_not_be_built_is_closed() -> None:
    envs = JaxVectorEnv.__new__(JaxVectorEnv)
    with pytest.raises(ValueError, match="num_envs"):
        envs.__init__(Counter(), 0)  # type: ignore[misc]
    envs.close()
    assert repr(envs) == "JaxVectorEnv(closed)"


# -- what it can do, and what it did -------------------------------------------------------------------------------


def test_it_says_what_it_can_do(pair: Any) -> None:
    can = pair[0].capabilities
    assert str(can) == "jax: timeouts, row_seeds, reset_mask, masked_seeds, snapshots, in_this_process, runs_jax"
    assert pair[0].batch_size == 5


@pytest.mark.parametrize(
    "name",
    ["call", "call_async", "call_wait", "exec_func", "exec_func_send", "exec_func_fetch", "get_attr", "set_attr"],
)
def test_what_needs_python_objects_is_refused_by_name(pair: Any, name: str) -> None:
    with pytest.raises(NotImplementedError, match=f"^JaxVectorEnv cannot `{name}`: its environments are rows of"):
        getattr(pair[0], name)("gravity", 1.0)


def test_stats_count_what_was_done_and_stay_after_close(counters: Any) -> None:
    envs = JaxVectorEnv(counters())
    assert tuple(envs.stats()) == FIGURES
    envs.warmup()
    assert (envs.stats()["steps"], envs.stats()["resets"]) == (0, 0)
    envs.reset(seed=0)
    envs.reset(options={"reset_mask": np.arange(5) < 2})
    envs.step(ACTIONS)
    envs.step_chunk(np.broadcast_to(ACTIONS, (3, 5, 1)))
    envs.send(ACTIONS)
    stats = envs.stats()
    assert {key: stats[key] for key in ("steps", "resets", "in_flight", "restarts", "errors")} == {
        "steps": 20, "resets": 7, "in_flight": 5, "restarts": 0, "errors": 0
    }  # fmt: skip
    assert stats["steps_per_second"] > 0
    assert 0 <= stats["wait_fraction"] < 1
    assert math.isnan(stats["straggler_share"])
    envs.close()
    assert envs.stats() == pytest.approx(envs.stats(), nan_ok=True)
    assert envs.stats()["steps"] == 20


def test_a_wrapper_of_gymnasium_finds_the_mask_after_the_reset(counters: Any) -> None:
    envs = gym.wrappers.vector.RecordEpisodeStatistics(JaxVectorEnv(counters()))
    envs.reset(seed=0)
    envs.step(ACTIONS)
    envs.reset(options={"reset_mask": np.arange(5) < 2})
    assert envs.episode_lengths.tolist() == [0, 0, 1, 1, 1]
