"""Each call means on EnvPool what it means on the process engine; what EnvPool cannot do is said in the one way there is."""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from forks import in_a_fork
from gymnasium.error import AlreadyPendingCallError, NoAsyncCallError
from gymnasium.vector import VectorEnv

pytest.importorskip("envpool")

import gymnasium

from vecenv import AsyncVectorEnv
from vecenv.errors import BusyError, ForkedError, StepTimeout
from vecenv.front.capabilities import FIGURES

from .conftest import Make, zeros
from .pool_doubles import SlowPool

# --- recv(count=) -------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 6, 8])
def test_any_count_of_rows_can_be_received_and_the_others_are_kept(make: Make, count: int) -> None:
    lockstep = make(8)
    stream = [lockstep.reset()[0], *(lockstep.step(zeros(8))[0] for _ in range(30))]
    envs = make(8, batch_size=4, num_threads=2)
    envs.reset_async()
    seen = [0] * 8
    while min(seen) < 20 and max(seen) < 30:
        observations, rewards, terminations, truncations, infos = envs.recv(count=count)
        ids = infos["env_id"].tolist()
        assert len(set(ids)) == count
        assert {len(array) for array in (observations, rewards, terminations, truncations)} == {count}
        assert envs.stats()["in_flight"] == 8 - count
        for row, i in enumerate(ids):
            np.testing.assert_array_equal(observations[row], stream[seen[i]][i])
            seen[i] += 1
        envs.send(zeros(count))


def test_rows_of_one_batch_can_be_received_in_parts(make: Make) -> None:
    envs = make(4, batch_size=4 // 2)
    envs.reset_async()
    first = envs.recv(count=1)[4]["env_id"].tolist()
    with pytest.raises(AlreadyPendingCallError, match="still in flight"):
        envs.send(zeros(4), np.arange(4))
    rest = envs.recv(count=3)[4]["env_id"].tolist()
    assert sorted(first + rest) == [0, 1, 2, 3]
    assert envs.stats()["in_flight"] == 0


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


def test_with_all_environments_in_a_batch_a_call_is_answered_as_a_whole(make: Make) -> None:
    envs = make(4)
    envs.reset()
    envs.send(zeros(2), [3, 1])
    with pytest.raises(NoAsyncCallError, match="for 3 environments with 2"):
        envs.recv(count=3)
    with pytest.raises(NotImplementedError, match="EnvPoolVectorEnv cannot `recv` 1 of 2 environments: with"):
        envs.recv(count=1)
    assert envs.recv(count=2)[4]["env_id"].tolist() == [3, 1]


@pytest.mark.parametrize("batch_size", [4, 2])
@pytest.mark.parametrize(
    ("count", "error"), [(0, ValueError), (5, ValueError), (-1, ValueError), (1.0, TypeError), ("2", TypeError)]
)
def test_a_count_without_a_meaning_is_refused(make: Make, batch_size: int, count: Any, error: type[Exception]) -> None:
    envs = make(4, batch_size=batch_size)
    envs.reset_async()
    with pytest.raises(error, match="count must be"):
        envs.recv(count=count)
    assert envs.stats()["in_flight"] == 4


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


@pytest.mark.parametrize("batch_size", [4, 2])
def test_the_answer_to_a_step_is_not_received(make: Make, batch_size: int) -> None:
    envs = make(4, batch_size=batch_size)
    envs.reset()
    envs.step_async(zeros(4))
    with pytest.raises(AlreadyPendingCallError, match="step_wait"):
        envs.recv()
    assert len(envs.step_wait()[1]) == 4


# --- infos --------------------------------------------------------------------------------------


@pytest.mark.parametrize(("num_envs", "batch_size"), [(4, 4), (4, 2), (4, 1)])
def test_every_info_has_its_mask_and_env_id_is_an_index(make: Make, num_envs: int, batch_size: int) -> None:
    envs = make(num_envs, batch_size=batch_size)
    envs.reset()
    envs.send(zeros(num_envs), np.arange(num_envs))
    received = envs.recv()[4]
    assert received["env_id"].dtype == np.intp
    assert received["_env_id"].all()
    assert "reset" not in received
    envs.reset()
    for infos in (received, envs.step(zeros(num_envs))[4], envs.reset()[1]):
        for key, value in infos.items():
            if not key.startswith("_"):
                assert infos[f"_{key}"].shape == value.shape[:1]
                assert infos[f"_{key}"].dtype == np.bool_
        assert infos["env_id"].dtype == np.intp


def test_an_env_id_that_the_caller_changes_is_not_whom_send_means(make: Make) -> None:
    envs = make(4, batch_size=2)
    envs.reset_async()
    ids = envs.recv()[4]["env_id"]
    mine = ids.tolist()
    ids[:] = 0
    envs.send(zeros(2))
    with pytest.raises(AlreadyPendingCallError, match=str(mine[0])):
        envs.send(zeros(1), mine[:1])


# --- reset --------------------------------------------------------------------------------------


@pytest.mark.parametrize("batch_size", [3, 1])
def test_what_a_reset_cannot_do_is_refused_by_name_and_the_options_stay_as_they_are(make: Make, batch_size: int) -> None:
    envs = make(3, batch_size=batch_size)
    envs.reset()
    mask = np.array([True, False, False])
    options: dict[str, Any] = {"low": 1, "reset_mask": mask}
    for env_id in (None, [0]):
        with pytest.raises(ValueError, match=r"takes no reset options but 'reset_mask', got \['low'\]"):
            envs.reset_async(options=options, env_id=env_id)
    with pytest.raises(ValueError, match="give one"):
        envs.reset_async(options={"reset_mask": mask}, env_id=[0])
    with pytest.raises(NotImplementedError, match="EnvPoolVectorEnv cannot seed some environments only: EnvPool seeds"):
        envs.reset_async(seed=[4], env_id=[0])
    assert options == {"low": 1, "reset_mask": mask}
    assert envs.stats()["in_flight"] == 0


def test_seeds_are_read_as_everywhere(make: Make) -> None:
    envs = make(2)
    assert_same_first = [envs.reset(seed=seed)[0].tolist() for seed in (7, np.int64(7), [7, 8], (7, 8), np.array([7, 8]))]
    assert all(first == assert_same_first[0] for first in assert_same_first)
    for wrong, error in (([1], ValueError), ("12", TypeError), (1.5, TypeError), ([1, "x"], TypeError), (-1, ValueError)):
        with pytest.raises(error):
            envs.reset(seed=wrong)


# --- the same texts as of the process engine ----------------------------------------------------


@pytest.fixture
def processes() -> Iterator[AsyncVectorEnv[Any, Any]]:
    envs = AsyncVectorEnv([lambda: gymnasium.make("CartPole-v1")] * 2, num_workers=1)
    yield envs
    envs.close()


def refusal(call: Callable[[], Any], error: type[Exception], envs: VectorEnv[Any, Any, Any]) -> str:
    """The text, without the class and the pid."""
    with pytest.raises(error) as raised:
        call()
    return str(raised.value).replace(type(envs).__name__, "").replace("workers", "threads")


class LateActions:
    """Actions that somebody waits for within a call."""

    def __init__(self, entered: threading.Event, go: threading.Event) -> None:
        self._entered, self._go = entered, go

    def __array__(self, *_: Any, **__: Any) -> Any:
        self._entered.set()
        self._go.wait(20)
        return zeros(2)

    def __iter__(self) -> Any:
        return iter(self.__array__())

    def __len__(self) -> int:
        return len(self.__array__())


def test_a_second_thread_hears_the_same(make: Make, processes: Any) -> None:
    texts = []
    for envs in (make(2), processes):
        envs.reset()
        go, entered = threading.Event(), threading.Event()
        thread = threading.Thread(target=envs.step, args=(LateActions(entered, go),))
        thread.start()
        assert entered.wait(20)
        for name in ("step", "send", "recv", "reset", "reset_async"):
            arguments = (zeros(2),) if name in ("step", "send") else ()
            texts.append(refusal(functools.partial(getattr(envs, name), *arguments), BusyError, envs))
        go.set()
        thread.join()
    assert texts[:5] == texts[5:]


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning", "ignore:.*fork.*:RuntimeWarning")
def test_a_child_forked_in_the_middle_of_another_threads_call_is_told_that_it_was_forked(make: Make) -> None:
    envs = make(2)
    envs.reset()
    SlowPool(envs, 0.5)
    thread = threading.Thread(target=envs.step, args=(zeros(2),))
    thread.start()
    time.sleep(0.1)

    def check() -> None:
        with pytest.raises(ForkedError):
            envs.step(zeros(2))
        with pytest.raises(ForkedError):
            envs.send(zeros(2))

    assert in_a_fork(check) == 0
    thread.join()


# --- capabilities and figures -------------------------------------------------------------------


def test_capabilities_tell_what_is_refused(make: Make) -> None:
    whole, some = make(4).capabilities, make(4, batch_size=2).capabilities
    assert whole.backend == some.backend == "envpool"
    assert (whole.reset_mask, whole.first_ready) == (True, False)
    assert (some.reset_mask, some.first_ready) == (False, True)
    for one in (whole, some):
        assert not any((one.attributes, one.masked_seeds, one.reset_options, one.restarts))


def test_stats_have_the_keys_of_every_backend_and_stay_after_close(make: Make) -> None:
    envs = make(4)
    assert envs.stats().keys() >= set(FIGURES)
    envs.reset(seed=1)
    envs.step(zeros(4))
    envs.reset(seed=2)
    before = envs.stats()
    assert np.isnan(before["step_time_mean"])
    assert before["errors"] == before["restarts"] == before["bytes_pickled"] == 0
    assert before["wait_fraction"] > 0
    envs.close()
    after = envs.stats()
    time.sleep(0.01)
    assert envs.stats() == pytest.approx(after, nan_ok=True)
    assert (after["steps"], after["resets"], after["pools"]) == (4, 8, 2)


def test_looking_at_the_figures_changes_nothing(make: Make) -> None:
    envs = make(4, batch_size=2)
    envs.reset_async()
    envs.recv()
    held = list(envs._driver.taken[1])
    assert envs.stats()["in_flight"] == 2
    assert envs._driver.taken[1] == held != []
