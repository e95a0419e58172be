"""If a worker fails or a time limit is exceeded, only the episode that caused it has an error."""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from envs import open_engine
from gymnasium import spaces
from gymnasium.error import AlreadyPendingCallError
from gymnasium.vector import VectorWrapper
from walks import SEED, Walk, choose_actions, expected_results, make_walk_fns, summarize

import vecenv
from vecenv.backends import EnvPoolVectorEnv
from vecenv.errors import WorkerDied

pytestmark = pytest.mark.filterwarnings("ignore:.*:UserWarning")


class SlowWalk(Walk):
    """A walk that pauses in every call. ``lengths`` are the lengths of the episodes in the order of their seeds."""

    def __init__(self, build_time: float = 0.0, pause: float = 0.0, lengths: tuple[int, ...] = (), **kwargs: Any) -> None:
        time.sleep(build_time)
        super().__init__(pause=pause, **kwargs)
        self.lengths = lengths

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        time.sleep(self.pause)
        result = super().reset(seed=seed, options=options)
        if self.lengths:
            self.length = self.lengths[(seed or 0) - SEED]
        return result


def test_evaluate_warns_about_failed_episodes() -> None:
    walk = functools.partial(Walk, faults={SEED + 1: "raise", SEED + 3: "raise"})
    text = "2 of 4 episodes failed, the first is episode 1 with ArithmeticError: .*; mean and std leave them out"
    with open_engine([walk] * 2, num_workers=1) as envs, pytest.warns(UserWarning, match=text):
        vecenv.evaluate(envs, choose_actions, 4, seed=SEED)


class RaisingInResetWalk(Walk):
    """A walk that raises in a reset with the seed of episode 4."""

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        if seed == SEED + 4:
            raise ArithmeticError(f"walk {seed} failed")
        return super().reset(seed=seed, options=options)


@pytest.mark.parametrize("on_failure", ["raise", "restart"])
def test_evaluate_after_the_death_of_an_idle_worker_has_all_results(on_failure: Any) -> None:
    with open_engine(make_walk_fns(4), num_workers=2, on_failure=on_failure) as envs:
        envs.reset(seed=0)
        os.kill(envs.processes[1].pid, signal.SIGKILL)
        time.sleep(0.1)
        assert summarize(vecenv.evaluate(envs, choose_actions, 6, seed=SEED)) == expected_results(6)


@pytest.mark.long
@pytest.mark.parametrize("fault", ["hang", "die"])
def test_failure_causes_one_restart_even_if_a_process_starts_slowly(fault: str, tmp_path: Path) -> None:
    """The other worker returns results while the replacement of the failed one starts."""
    kwargs: dict[str, Any] = {"pause": 0.02, "faults": {SEED + 7: f"{fault} once"}, "folder": str(tmp_path)}
    slow = functools.partial(SlowWalk, 1.0 if fault == "die" else 0.1, **kwargs)
    with open_engine([slow] * 4, num_workers=2, on_failure="restart", step_timeout=0.5) as envs:
        assert summarize(vecenv.evaluate(envs, choose_actions, 20, seed=SEED)) == expected_results(20)
        assert envs.stats()["restarts"] == 1


@pytest.mark.long
def test_step_timeout_of_a_reset_excludes_the_start_of_the_process() -> None:
    slow = functools.partial(SlowWalk, 1.0, faults={SEED + 5: "hang"})
    with open_engine([slow] * 2, num_workers=1, step_timeout=0.5) as envs:
        results = vecenv.evaluate(envs, choose_actions, 12, seed=SEED, retries=0)
    assert [result.index for result in results if result.error is not None] == [5]
    assert max(result.attempts for result in results if result.index != 5) <= 2


@pytest.mark.long
def test_end_of_an_episode_does_not_shorten_the_timeout_of_another() -> None:
    """The last step of episode 2 waits for the last step of episode 1 in the same worker."""
    with open_engine([functools.partial(SlowWalk, pause=0.5, lengths=(1, 2, 1))] * 2, num_workers=1) as envs:
        results = vecenv.evaluate(envs, choose_actions, 3, seed=SEED, timeout=0.75)
    assert [(result.error, result.attempts) for result in results] == [(None, 1)] * 3


@pytest.mark.long
@pytest.mark.parametrize("on_failure", ["raise", "restart"])
def test_policy_that_takes_longer_than_the_timeout_fails_no_episode(on_failure: Any) -> None:
    """While the policy decides for the first ready environment, the others finish, but exceed the timeout."""

    def choose_slowly(observations: Any, rngs: Any, begins: Any) -> Any:
        time.sleep(1.2 * any(begins))
        return choose_actions(observations, rngs)

    quick_first = [functools.partial(SlowWalk, pause=0.05 * row) for row in range(3)]
    with open_engine(quick_first, num_workers=3, on_failure=on_failure) as envs:
        results = vecenv.evaluate(envs, choose_slowly, 3, seed=SEED, retries=0, timeout=1.0)
    assert [(result.error, result.attempts) for result in results] == [(None, 1)] * 3


@pytest.mark.long
@pytest.mark.parametrize("max_concurrency", [None, 2])
def test_slow_policy_does_not_hide_an_environment_that_hangs(max_concurrency: int | None) -> None:
    """The other environments always have a result when the policy returns."""
    ends: list[int] = []

    def choose_slowly(observations: Any, rngs: Any) -> Any:
        time.sleep(0.1)
        return choose_actions(observations, rngs)

    walk = functools.partial(Walk, faults={SEED: "hang"})
    with open_engine([walk] * 3, num_workers=3, max_concurrency=max_concurrency) as envs:
        vecenv.evaluate(
            envs, choose_slowly, 12, seed=SEED, retries=0, timeout=0.5, on_episode=lambda result: ends.append(result.index)
        )
    assert 0 in ends[:-4]


@pytest.mark.long
@pytest.mark.parametrize("on_failure", ["raise", "restart"])
def test_timeout_excludes_the_time_in_which_max_concurrency_holds_requests(on_failure: Any) -> None:
    """A step takes 0.3 seconds, and four in sequence take 1.2 seconds. The timeout still ends the hanging episode."""
    slow = functools.partial(SlowWalk, pause=0.3, longest=1, faults={SEED + 3: "hang"})
    with open_engine([slow] * 4, max_concurrency=1, on_failure=on_failure) as envs:
        results = vecenv.evaluate(envs, choose_actions, 6, seed=SEED, retries=0, timeout=1.0)
    assert [result.index for result in results if result.error is not None] == [3]
    assert [result.attempts for result in results] == [1] * 6


@pytest.mark.long
@pytest.mark.parametrize("on_failure", ["raise", "restart"])
def test_timeout_excludes_requests_that_max_concurrency_holds_during_the_policy(on_failure: Any) -> None:
    """A call of the policy takes longer than the limits of all rows together."""

    def choose_slowly(observations: Any, rngs: Any) -> Any:
        time.sleep(3.2)
        return choose_actions(observations, rngs)

    slow = functools.partial(SlowWalk, pause=0.05, longest=1)
    with open_engine([slow] * 3, max_concurrency=1, on_failure=on_failure) as envs:
        results = vecenv.evaluate(envs, choose_slowly, 3, seed=SEED, retries=0, timeout=1.0)
    assert [(result.error, result.attempts) for result in results] == [(None, 1)] * 3


@pytest.mark.parametrize(
    ("env_fn", "error"),
    [
        (functools.partial(Walk, faults={SEED + 4: "raise"}), ArithmeticError),
        (functools.partial(Walk, faults={SEED + 4: "die"}), WorkerDied),
        (RaisingInResetWalk, ArithmeticError),
    ],
)
@pytest.mark.parametrize("num_envs", [2, 6])
def test_failure_behind_a_wrapper_raises_despite_restarts(num_envs: int, env_fn: Any, error: type[Exception]) -> None:
    with open_engine([env_fn] * num_envs, num_workers=2, on_failure="restart") as envs:
        with pytest.raises(error):
            vecenv.evaluate(VectorWrapper(envs), choose_actions, 6, seed=SEED)
        envs.reset()
        # the earlier failure is not raised again
        assert len(vecenv.evaluate(VectorWrapper(envs), choose_actions, 4, seed=SEED)) == 4
        assert np.all(np.isfinite(vecenv.evaluate(VectorWrapper(envs), choose_actions, 4, seed=SEED).returns))


def test_evaluate_with_environments_in_flight_is_refused_by_engine_wrapper_and_envpool() -> None:
    pytest.importorskip("envpool")
    with open_engine([Walk] * 2, num_workers=0) as envs:
        envs.reset(seed=SEED)
        envs.send(envs.action_space.sample())
        for wrapped in (envs, VectorWrapper(envs)):
            with pytest.raises(AlreadyPendingCallError, match="Calling `evaluate` with envs 0-1 in flight"):
                vecenv.evaluate(wrapped, choose_actions, 2, seed=SEED)
        assert sorted(envs.recv()[4]["env_id"].tolist()) == [0, 1]
    with contextlib.closing(EnvPoolVectorEnv("CartPole-v1", 4, batch_size=2)) as pool:
        pool.reset()
        pool.send(np.zeros(2, np.int64), [0, 1])
        with pytest.raises(AlreadyPendingCallError, match="Calling `evaluate` with environments in flight"):
            vecenv.evaluate(pool, lambda observations: np.zeros(len(observations), np.int64), 2, seed=SEED)
        assert sorted(pool.recv()[4]["env_id"].tolist()) == [0, 1]


class TextWalk(Walk):
    """A walk that raises with ``SEED``. Its pickled observations do not fit the space with the seed ``SEED + 1``."""

    def __init__(self) -> None:
        super().__init__(faults={SEED: "raise"})
        self.observation_space = spaces.Dict(  # type: ignore[assignment]
            {"text": spaces.Text(5), "number": spaces.Box(0, 1, (1,), np.float64)}
        )

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        _, info = super().reset(seed=seed, options=options)
        self.size = 2 if seed == SEED + 1 else 1
        return {"text": "a", "number": np.zeros(1)}, info

    def step(self, action: Any) -> Any:
        _, *others = super().step(action)
        return {"text": "a", "number": np.zeros(self.size)}, *others


def test_failed_episode_has_its_own_error_after_an_earlier_failure_of_the_environment() -> None:
    with open_engine([TextWalk], num_workers=1) as envs:
        results = vecenv.evaluate(envs, lambda observations: np.zeros(1, np.int64), 3, seed=SEED, retries=0)
    assert isinstance(results[0].error, ArithmeticError)
    assert isinstance(results[1].error, vecenv.errors.ObservationError)
    assert results[2].error is None


def test_failures_beyond_the_limit_of_restarts_end_only_their_episodes() -> None:
    """The failed episodes have the errors of their environments, not the one about the limit."""
    walk = functools.partial(Walk, faults={SEED + 1: "raise", SEED + 3: "die"})
    with open_engine([walk] * 4, num_workers=2, on_failure=vecenv.Restart(limit=0)) as envs:
        results = vecenv.evaluate(envs, choose_actions, 12, seed=SEED)
    errors = {result.index: type(result.error) for result in results if result.error is not None}
    assert errors == {1: ArithmeticError, 3: WorkerDied}
    others = [result for result in results if result.error is None]
    assert summarize(others) == [each for each in expected_results(12) if each[0] not in errors]


def test_worker_that_dies_during_the_policy_beyond_the_limit_of_restarts_repeats_its_episodes() -> None:
    """The death is noticed when the first row is sent again, because a call then fails."""
    killed: list[int] = []

    def act(observations: Any, rngs: list[np.random.Generator]) -> Any:
        if not killed:
            killed.append(envs.processes[0].pid)
            os.kill(killed[0], signal.SIGKILL)
            with contextlib.suppress(WorkerDied):
                envs.get_attr("spec")
        return choose_actions(observations, rngs)

    with open_engine(make_walk_fns(2), num_workers=1, on_failure=vecenv.Restart(limit=0)) as envs:
        assert summarize(vecenv.evaluate(envs, act, 6, seed=SEED)) == expected_results(6)


class TaskWalk(Walk):
    """A walk with a required reset option: the length of its episodes."""

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        assert options is not None
        result = super().reset(seed=seed)
        self.length = options["length"]
        return result


@pytest.mark.parametrize("num_workers", [0, 1])
def test_evaluate_after_a_failure_resets_only_with_the_options_of_episodes(num_workers: int) -> None:
    episodes = [vecenv.Episode(seed=SEED, options={"length": 3}), vecenv.Episode(seed=SEED + 1, options={"length": 4})]
    with open_engine([functools.partial(TaskWalk, faults={SEED + 1: "raise"})], num_workers=num_workers) as envs:
        for _ in range(2):
            results = vecenv.evaluate(envs, choose_actions, episodes)
            assert [result.length for result in results if result.error is None] == [3]
