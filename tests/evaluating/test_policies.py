"""Evaluations of policies: in batches, row by row, in lock-step, and from snapshots."""

from __future__ import annotations

import math
import os
import signal
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from envs import counters, open_engine, ready_engine
from fake_vector_env import FakeVectorEnv
from gymnasium import spaces
from gymnasium.error import AlreadyPendingCallError
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from signals import Alarm
from simulated_time import SimulatedVectorEnv, find_minimum_time
from walks import (
    ENGINES,
    LONGEST,
    SEED,
    Walk,
    choose_actions,
    expected_results,
    expected_results_from,
    make_walk_fns,
    save_midway,
    summarize,
)

import vecenv
from vecenv.errors import SnapshotMismatch, WorkerDied
from vecenv.evaluating.episodes import EpisodeResults
from vecenv.front.driver import drop_pending_and_retry

# --- arguments and results of a policy, and errors before anything runs --------------------------


class NestedSpacesWalk(gymnasium.Wrapper[Any, Any, Any, Any]):
    """A walk with observations and actions that are dicts and tuples."""

    def __init__(self) -> None:
        super().__init__(Walk())
        self.observation_space = spaces.Dict({"all": Walk.observation_space, "time": spaces.Tuple((spaces.Discrete(99),))})
        self.action_space = spaces.Dict({"go": Walk.action_space, "say": spaces.Tuple((spaces.Text(3),))})

    def reset(self, **kwargs: Any) -> Any:
        observation, info = self.env.reset(**kwargs)
        return self._nest(observation), info

    def step(self, action: Any) -> Any:
        assert action["say"] == ("yes",)
        observation, *others = self.env.step(action["go"])
        return self._nest(observation), *others

    def _nest(self, observation: Any) -> Any:
        return {"all": observation, "time": (int(observation[1]),)}


@pytest.mark.parametrize("batch", ["ready", "padded", "single"])
def test_evaluate_with_nested_spaces_equals_a_plain_loop(batch: str) -> None:
    def policy(observations: Any, rngs: Any) -> Any:
        assert (observations["time"][0] == observations["all"][:, 1]).all()
        return {"go": choose_actions(observations["all"], rngs), "say": (("yes",) * len(rngs),)}

    with open_engine([NestedSpacesWalk] * 3, num_workers=0) as envs:
        assert summarize(vecenv.evaluate(envs, policy, 7, seed=SEED, batch=batch)) == expected_results(7)


def test_policy_receives_arguments_by_parameter_name() -> None:
    received: dict[int, list[Any]] = {}

    def policy(observations: Any, *, begins: Any, rows: Any, episodes: Any, infos: Any) -> Any:
        assert len(observations) == len(begins) == len(rows) == len(episodes) == len(infos) <= 3
        assert len(set(rows.tolist())) == len(rows)
        for episode, *arguments in zip(episodes.tolist(), begins.tolist(), rows.tolist(), infos, strict=True):
            received.setdefault(episode, []).append(arguments)
        return np.zeros(len(observations), int)

    with open_engine(make_walk_fns(3), num_workers=2) as envs:
        results = vecenv.evaluate(envs, policy, 6, seed=SEED)
    for result in results:
        begins, rows, infos = zip(*received[result.index], strict=True)
        assert list(begins) == [True] + [False] * (result.length - 1)
        assert len(set(rows)) == 1
        assert infos[0] == {"reset": True}
        assert [info["t"] for info in infos[1:]] == list(range(1, result.length))


def test_optional_positional_only_parameters_keep_their_defaults() -> None:
    def policy(observations: Any, rows: Any = "default", /) -> Any:
        assert rows == "default"
        return np.zeros(len(observations), int)

    with open_engine(make_walk_fns(2), num_workers=0) as envs:
        assert len(vecenv.evaluate(envs, policy, 2, seed=SEED)) == 2


def choose_by_history(observations: Any, state: Any) -> Any:
    """Return actions that depend on all earlier observations of the episode."""
    sums = state["sums"][0] + observations[:, 2]
    return (np.abs(sums * 7).astype(int) % 7), {"sums": (sums,), "calls": state["calls"] + 1}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("batch", ["ready", "padded", "single"])
def test_recurrent_policy_has_a_state_for_each_episode(batch: str) -> None:
    state = {"sums": (np.float64(0),), "calls": np.zeros((), int)}
    found = []
    for num_envs, engine in ((1, {"num_workers": 0}), (3, {"num_workers": 0}), (5, {"num_workers": 2})):
        with open_engine(make_walk_fns(num_envs), **engine) as envs:
            results = vecenv.evaluate(envs, choose_by_history, 9, seed=SEED, initial_state=state, batch=batch)
        found.append(summarize(results))
    assert found[0] == found[1] == found[2]
    assert len({episode_return for _, _, episode_return, *_ in found[0]}) == 9


class ReusingPolicy:
    """A policy with the results of ``choose_by_history``, which returns the same arrays at each call."""

    def __init__(self) -> None:
        self.actions, self.sums = np.zeros(5, int), np.zeros((5, 1))

    def __call__(self, observations: Any, state: Any) -> Any:
        count = len(observations)
        self.sums[:count] = state + observations[:, 2:3]
        self.actions[:count] = np.abs(self.sums[:count, 0] * 7).astype(int) % 7
        return self.actions[:count], self.sums[:count]


@pytest.mark.parametrize("batch", ["ready", "padded", "single"])
def test_policy_that_reuses_its_arrays_gives_the_same_results(batch: str) -> None:
    fresh: dict[str, Any] = {"initial_state": {"sums": (np.float64(0),), "calls": np.zeros((), int)}}
    with open_engine(make_walk_fns(5), num_workers=2) as envs:
        results = vecenv.evaluate(envs, ReusingPolicy(), 9, seed=SEED, initial_state=np.zeros(1), batch=batch)
        assert summarize(results) == summarize(vecenv.evaluate(envs, choose_by_history, 9, seed=SEED, **fresh))


def test_padded_batches_have_a_constant_number_of_rows() -> None:
    sizes = set()

    def policy(observations: Any, rows: Any, rngs: Any) -> Any:
        sizes.add(len(observations))
        assert all(list(rows).count(row) == 1 for row in range(3) if row in rows), "a row that is not padding is repeated"
        return choose_actions(observations, rngs)

    with open_engine(make_walk_fns(3), num_workers=0) as envs:
        assert summarize(vecenv.evaluate(envs, policy, 7, seed=SEED, batch="padded")) == expected_results(7)
    assert sizes == {3}


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"episodes": 0}, ValueError, "no episodes to run"),
        ({"episodes": []}, ValueError, "no episodes to run"),
        ({"episodes": -1}, ValueError, "episodes must not be negative"),
        ({"episodes": 1.5}, TypeError, "episodes must be a number, or a list of vecenv.Episode, got 1.5"),
        ({"episodes": "ten"}, TypeError, "episodes must be a number"),
        ({"episodes": [vecenv.Episode(1), 2]}, TypeError, r"episodes\[1\] must be a vecenv.Episode, got 2"),
        ({"episodes": [vecenv.Episode(seed=-4)]}, ValueError, r"episodes\[0\].seed must not be negative, got -4"),
        ({"episodes": [vecenv.Episode(seed=True)]}, TypeError, r"episodes\[0\].seed must be an integer, got True"),
        ({"episodes": [vecenv.Episode(options=[1])]}, TypeError, r"episodes\[0\].options must be a dict"),  # type: ignore[arg-type]
        ({"episodes": [vecenv.Episode(options={"reset_mask": 1})]}, ValueError, "reset_mask"),
        ({"seed": "0"}, TypeError, "seed must be an integer, got '0'"),
        ({"seed": -1}, ValueError, "seed must not be negative, got -1"),
        ({"retries": -1}, ValueError, "retries must be a non-negative integer, got -1"),
        ({"retries": True}, ValueError, "retries"),
        ({"timeout": "1"}, TypeError, "timeout"),
        ({"timeout": 0}, ValueError, "timeout must be None or a number of seconds above 0, got 0"),
        ({"timeout": -1.5}, ValueError, "timeout must be None or a number of seconds above 0, got -1.5"),
        ({"timeout": 1.0}, NotImplementedError, "the calling process steps some"),
        ({"on_episode": 3}, TypeError, "on_episode must be callable, got 3"),
        ({"frames": [4]}, ValueError, r"frames must be indices of episodes, from 0 to 3; got \[4\]"),
        ({"frames": True}, TypeError, r"frames must be indices of episodes, such as range\(3\); got True"),
        ({"frames": [1]}, ValueError, "frames need render_mode='rgb_array', got None"),
        ({"policy": None}, TypeError, "policy must be callable"),
        ({"policy": lambda: 0}, TypeError, "must take the observations"),
        ({"policy": lambda obs, hidden: 0}, TypeError, "cannot pass the policy's parameter 'hidden'"),
        ({"policy": lambda obs, state: 0}, TypeError, "parameter `state` needs initial_state="),
        ({"initial_state": 0.0}, TypeError, "initial_state= needs a policy with a parameter `state`"),
        ({"batch": "whole"}, ValueError, "batch must be one of"),
        ({"arrays": "cupy"}, ValueError, "arrays must be one of"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_evaluate_with_wrong_arguments_raises_before_anything_runs(
    options: dict[str, Any], error: type[Exception], text: str
) -> None:
    arguments = {"policy": lambda obs: np.zeros(len(obs), int), "episodes": 4, **options}
    with open_engine(make_walk_fns(2), num_workers=0) as envs:
        with pytest.raises(error, match=text):
            vecenv.evaluate(envs, **arguments)
        assert envs.stats()["resets"] == envs.stats()["in_flight"] == 0


@pytest.mark.parametrize(
    ("actions", "error", "text"),
    [
        (lambda count: np.zeros(count + 1, int), ValueError, "received 3 observations and returned 4 actions"),
        (lambda count: np.zeros(count - 1, int), ValueError, "received 3 observations and returned 2 actions"),
        (lambda count: 1, TypeError, "did not return a batch of 3 actions of Discrete"),
        (lambda count: None, TypeError, "did not return a batch of 3 actions of Discrete"),
    ],
)
def test_policy_with_a_wrong_number_of_actions_raises_before_a_step(actions: Any, error: type[Exception], text: str) -> None:
    with open_engine(make_walk_fns(3), num_workers=0) as envs:
        with pytest.raises(error, match=text):
            vecenv.evaluate(envs, lambda obs: actions(len(obs)), 4)
        assert envs.stats()["steps"] == envs.stats()["in_flight"] == 0


def test_error_of_a_policy_is_raised_and_a_reset_recovers() -> None:
    def policy(observations: Any, begins: Any) -> Any:
        if not begins.any():
            raise KeyError("policy")
        return np.zeros(len(observations), int)

    with open_engine(make_walk_fns(3), num_workers=2) as envs:
        with pytest.raises(KeyError, match="policy"):
            vecenv.evaluate(envs, policy, 9, seed=SEED)
        envs.reset(seed=1)
        assert summarize(vecenv.evaluate(envs, choose_actions, 5, seed=SEED)) == expected_results(5)


def test_evaluate_with_rows_in_flight_raises_and_keeps_the_rows() -> None:
    with ready_engine(make_walk_fns(3), num_workers=0) as envs:
        envs.send([0], [2])
        with pytest.raises(AlreadyPendingCallError, match="Calling `evaluate` with env 2 in flight"):
            vecenv.evaluate(envs, choose_actions, 1, seed=SEED)
        assert envs.recv(count=1)[4]["env_id"].tolist() == [2]
        envs.step_async([0] * 3)
        with pytest.raises(AlreadyPendingCallError):
            vecenv.evaluate(envs, choose_actions, 1, seed=SEED)
        envs.step_wait()


def test_evaluate_of_a_single_environment_raises() -> None:
    with pytest.raises(TypeError, match=r"needs a Gymnasium vector environment, such as one from vecenv\.make_vec"):
        vecenv.evaluate(Walk(), choose_actions, 3)  # type: ignore[arg-type]


def test_results_have_statistics_and_a_short_repr() -> None:
    with open_engine(make_walk_fns(3), num_workers=0) as envs:
        results = vecenv.evaluate(envs, choose_actions, 7, seed=SEED)
    returns = [result.episode_return for result in results]
    assert results.returns.tolist() == returns
    assert results.lengths.tolist() == [result.length for result in results]
    assert (results.mean, results.std) == (np.mean(returns), np.std(returns))
    assert len(repr(results)) < 100
    assert repr(results).startswith("EpisodeResults(7 episodes, mean=")
    failed = EpisodeResults([*results, replace(results[0], episode_return=float("nan"), error=RuntimeError())])
    assert (failed.mean, failed.std) == (results.mean, results.std), "the statistics include the failed episode"
    assert "8 episodes, 1 failed" in repr(failed)
    assert np.isnan(EpisodeResults(failed[-1:]).mean)


def test_evaluate_with_swapped_arguments_raises() -> None:
    match = r"envs=.*choose_actions.*policy=Async.*swapped\?"
    with open_engine(make_walk_fns(1), num_workers=0) as envs, pytest.raises(TypeError, match=match):
        vecenv.evaluate(choose_actions, envs, 3)  # type: ignore[arg-type]


# --- ``vecenv.evaluate`` on engines that step all environments together has the same results ------


@pytest.mark.sampled(4)
@pytest.mark.parametrize("mode", AutoresetMode)
@pytest.mark.parametrize("num_envs", [1, 3, 8])
def test_evaluate_with_sync_vector_env_equals_a_plain_loop(num_envs: int, mode: AutoresetMode, closes: Any) -> None:
    envs = closes(SyncVectorEnv(make_walk_fns(num_envs), autoreset_mode=mode))
    for count in (10, 1):
        assert summarize(vecenv.evaluate(envs, choose_actions, count, seed=SEED)) == expected_results(count)


def test_episodes_in_lock_step_have_their_own_options() -> None:
    episodes = [vecenv.Episode(options={"start": float(index % 3)}) for index in range(7)]
    envs = SyncVectorEnv(make_walk_fns(3))
    results = vecenv.evaluate(envs, lambda obs: np.zeros(len(obs), int), episodes, seed=SEED)
    envs.close()
    assert [result.episode_return / result.length for result in results] == [0, 1, 2, 0, 1, 2, 0]


@pytest.mark.parametrize("start", [1.0, np.array([1.0]), np.array([[1.0, 0.0], [0.0, 0.0]])], ids=["float", "one", "many"])
def test_episodes_in_lock_step_may_have_options_with_arrays(start: Any, closes: Any) -> None:
    class SummingWalk(Walk):
        def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
            return super().reset(seed=seed, options={"start": np.sum((options or {}).get("start", 0))})

    episodes = [vecenv.Episode(options={"start": start * index}) for index in range(5)]
    envs = closes(SyncVectorEnv([SummingWalk] * 3))
    results = vecenv.evaluate(envs, lambda obs: np.zeros(len(obs), int), episodes, seed=SEED)
    assert [result.episode_return / result.length for result in results] == [0, 1, 2, 3, 4]


def test_different_options_raise_if_all_environments_reset_together(closes: Any) -> None:
    wrap = gymnasium.wrappers.vector.NormalizeObservation
    episodes = [vecenv.Episode(options={"start": float(index)}) for index in range(2)]
    text = "NormalizeObservation cannot evaluate episodes with different options or env=: all environments are reset"
    two_rows, one_row = closes(wrap(SyncVectorEnv(make_walk_fns(2)))), closes(wrap(SyncVectorEnv(make_walk_fns(1))))
    with pytest.raises(NotImplementedError, match=text):
        vecenv.evaluate(two_rows, lambda obs: 1 / 0, episodes)
    for envs, possible in ((two_rows, episodes[:1] * 2), (one_row, episodes)):
        assert len(vecenv.evaluate(envs, lambda obs: np.zeros(len(obs), int), possible)) == 2


def test_policy_receives_the_latest_info_of_each_row(closes: Any) -> None:
    def policy(observations: Any, infos: Any, begins: Any) -> Any:
        for observation, info, begin in zip(observations, infos, begins, strict=True):
            if begin:
                assert info == {"reset": True}
            else:
                assert info["t"] == observation[1]
        return np.zeros(len(observations), int)

    envs = closes(SyncVectorEnv(make_walk_fns(3)))
    assert len(vecenv.evaluate(envs, policy, 8, seed=SEED)) == 8


@pytest.mark.parametrize("num_envs", [1, 3])
def test_evaluate_with_the_test_double_is_independent_of_num_envs(num_envs: int) -> None:
    results = []
    for count in (num_envs, 4):
        envs = FakeVectorEnv(count)
        results.append(summarize(vecenv.evaluate(envs, lambda obs: (obs[:, 0] % 5).astype(int), 7, seed=10)))
        envs.close()
    assert results[0] == results[1]
    assert {length for _, _, _, length, *_ in results[0]} == {3, 4, 5}


def test_evaluate_names_missing_features_of_a_backend(closes: Any) -> None:
    envs = FakeVectorEnv(2)
    for options, text in (
        ({"timeout": 1}, "FakeVectorEnv cannot end environments that hang"),
        ({"frames": [0]}, "FakeVectorEnv cannot render single environments"),
        ({"episodes": [vecenv.Episode(options={"a": 1})]}, "FakeVectorEnv cannot evaluate episodes with options"),
    ):
        arguments: dict[str, Any] = {"episodes": 3, **options}
        with pytest.raises(NotImplementedError, match=text):
            vecenv.evaluate(envs, lambda obs: np.zeros(len(obs), int), **arguments)
    envs.close()
    native = closes(vecenv.make_vec("CartPole-v1", 2, "native"))
    with pytest.raises(NotImplementedError, match="cannot seed each episode separately: its environments share"):
        vecenv.evaluate(native, lambda obs: np.zeros(len(obs), int), 3)


def test_evaluate_without_an_autoreset_mode_raises(closes: Any) -> None:
    envs = closes(SyncVectorEnv(make_walk_fns(2)))
    envs.metadata = {}
    with pytest.raises(NotImplementedError, match="SyncVectorEnv cannot be evaluated: its metadata has no autoreset mode"):
        vecenv.evaluate(envs, choose_actions, 3)


def test_evaluate_of_a_multi_agent_environment_raises(closes: Any) -> None:
    class Agents(SyncVectorEnv):
        possible_agents = ("a", "b")

    envs = closes(Agents([lambda: gymnasium.make("CartPole-v1")]))
    with pytest.raises(NotImplementedError, match=r"several agents.*pass envs.flatten_agents\(\)"):
        vecenv.evaluate(envs, choose_actions, 3)


# --- ``vecenv.evaluate`` on engines that return rows one by one has the results of a plain loop ----


@pytest.mark.sampled(4)
@pytest.mark.parametrize("mode", AutoresetMode)
@pytest.mark.parametrize("num_envs", [1, 3, 8])
def test_evaluate_equals_a_plain_loop_for_every_number_of_rows(num_envs: int, mode: AutoresetMode) -> None:
    with open_engine(make_walk_fns(num_envs), num_workers=0, autoreset_mode=mode) as envs:
        for count in (10, 1, 3):
            assert summarize(vecenv.evaluate(envs, choose_actions, count, seed=SEED)) == expected_results(count)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("engine", list(ENGINES.values())[1:], ids=list(ENGINES)[1:])
def test_evaluate_with_workers_equals_a_plain_loop(engine: dict[str, Any]) -> None:
    with open_engine(make_walk_fns(3), **engine) as envs:
        results = vecenv.evaluate(envs, choose_actions, 10, seed=SEED)
        assert summarize(results) == expected_results(10)
        assert envs.stats()["steps"] == sum(result.length for result in results)
        assert all(result.attempts == 1 and result.seconds > 0 and not result.frames for result in results)
        assert envs.reset(seed=1)[0].shape == (3, 3), "the engine is not usable after the evaluation"


@pytest.mark.slow
@pytest.mark.parametrize("mode", AutoresetMode)
@pytest.mark.parametrize("engine", ENGINES.values(), ids=ENGINES)
@pytest.mark.parametrize("num_envs", [2, 3, 8, 64])
def test_evaluate_equals_a_plain_loop_for_any_engine_and_num_envs(
    num_envs: int, engine: dict[str, Any], mode: AutoresetMode
) -> None:
    with open_engine(make_walk_fns(num_envs, longest=1000), autoreset_mode=mode, **engine) as envs:
        for count in (40, 5):
            results = vecenv.evaluate(envs, choose_actions, count, seed=SEED)
            assert summarize(results) == expected_results(count, longest=1000)
        assert max(result.length for result in results) > 100


@pytest.mark.parametrize("mode", AutoresetMode)
def test_evaluate_executes_no_more_steps_than_the_sum_of_lengths(mode: AutoresetMode, tmp_path: Path) -> None:
    with open_engine(make_walk_fns(4, folder=str(tmp_path)), num_workers=2, autoreset_mode=mode) as envs:
        results = vecenv.evaluate(envs, choose_actions, 11, seed=SEED)
        steps = envs.stats()["steps"]
    assert (tmp_path / "steps").stat().st_size == sum(result.length for result in results) == steps


@pytest.mark.parametrize("num_envs", [1, 3, 8, pytest.param(64, marks=pytest.mark.long)])
def test_evaluate_is_close_to_the_minimum_time(num_envs: int) -> None:
    """The simulated time is at most 1.1 times the lower bound, with episodes that raise or die in the middle."""
    count = 22 * num_envs
    faults = {SEED + 2: "raise", SEED + 7: "raise", SEED + 11: "raise", SEED + 2 * num_envs: "raise"}
    envs = SimulatedVectorEnv(num_envs, faults=faults)
    results = vecenv.evaluate(envs, choose_actions, count, seed=SEED, retries=0)
    assert [result.index for result in results] == list(range(count))
    assert {result.seed for result in results if result.error is not None} == set(faults)
    assert {type(result.error) for result in results} == {type(None), ArithmeticError, WorkerDied}
    for found, expected in zip(summarize(results), expected_results(count), strict=True):
        _, seed, *_ = found
        assert found == expected or seed in faults
    assert envs.steps == sum(result.length for result in results)
    assert envs.now <= 1.1 * find_minimum_time(results, num_envs)


@pytest.mark.parametrize("num_envs", [1, 3, 8, 64])
def test_evaluate_executes_the_same_steps_in_any_number_of_rows(num_envs: int) -> None:
    with open_engine(make_walk_fns(num_envs), num_workers=0) as envs:
        results = vecenv.evaluate(envs, choose_actions, 70, seed=SEED)
        assert envs.stats()["steps"] == sum(result.length for result in results)
        assert summarize(results) == expected_results(70)


def test_episodes_have_their_own_seeds_and_options() -> None:
    episodes = [vecenv.Episode(7, {"start": 5.0}), vecenv.Episode(), vecenv.Episode(options={"start": -1.0})]
    with open_engine(make_walk_fns(2), num_workers=0) as envs:
        results = vecenv.evaluate(envs, lambda obs: np.zeros(len(obs), int), episodes, seed=20)
    assert [result.seed for result in results] == [7, 21, 22]
    assert [result.options for result in results] == [{"start": 5.0}, None, {"start": -1.0}]
    # the reward is the sum of the walk, which actions of 0 do not change
    assert [result.episode_return / result.length for result in results] == [5.0, 0.0, -1.0]


def test_results_contain_the_random_seed_for_a_repetition() -> None:
    with open_engine(make_walk_fns(2), num_workers=0) as envs:
        first = vecenv.evaluate(envs, choose_actions, 3)
        assert summarize(vecenv.evaluate(envs, choose_actions, 3, seed=first[0].seed)) == summarize(first)
        assert vecenv.evaluate(envs, choose_actions, 3)[0].seed != first[0].seed


def test_on_episode_receives_results_as_they_finish() -> None:
    received: list[Any] = []
    with open_engine(make_walk_fns(3), num_workers=0) as envs:
        results = vecenv.evaluate(envs, choose_actions, 7, seed=SEED, on_episode=received.append)
    assert [result.index for result in results] == list(range(7))
    assert sorted(received, key=lambda result: result.index) == results
    assert received != results, "results were received in the order of their indices"


@pytest.mark.parametrize("mode", list(AutoresetMode))
@pytest.mark.parametrize("module", [gymnasium.wrappers.vector, vecenv.wrappers])
def test_evaluate_of_record_episode_statistics_has_its_infos(module: Any, mode: AutoresetMode) -> None:
    with open_engine(make_walk_fns(3), num_workers=0, autoreset_mode=mode) as envs:
        wrapped = module.RecordEpisodeStatistics(envs)
        results = vecenv.evaluate(wrapped, choose_actions, 5, seed=SEED)
    for result, expected in zip(results, expected_results(5), strict=True):
        statistics = result.info.pop("episode")
        assert (statistics["l"], statistics["r"]) == (result.length, pytest.approx(result.episode_return))
        assert result.info == expected[6]


def test_observation_wrappers_transform_the_observations_of_the_policy() -> None:
    with open_engine(make_walk_fns(3), num_workers=0) as envs:
        scaled: Any = gymnasium.wrappers.vector.TransformObservation(envs, lambda obs: obs * 0 + 1)
        received: list[Any] = []

        def policy(observations: Any) -> Any:
            received.append(observations)
            return np.zeros(len(observations), int)

        results = vecenv.evaluate(scaled, policy, 4, seed=SEED)
    assert all((observations == 1).all() for observations in received)
    assert [result.length for result in results] == [length for _, _, _, length, *_ in expected_results(4)]


def test_running_statistics_of_wrappers_are_not_updated_by_evaluate() -> None:
    with open_engine([lambda: gymnasium.make("CartPole-v1")] * 3, num_workers=0) as envs:
        inner = gymnasium.wrappers.vector.NormalizeReward(gymnasium.wrappers.vector.NormalizeObservation(envs))
        frozen = gymnasium.wrappers.vector.NormalizeReward(inner)
        frozen.update_running_mean = False
        normalized: Any = vecenv.wrappers.RecordEpisodeStatistics(frozen)
        normalized.reset(seed=0)
        for _ in range(20):
            normalized.step(np.array([0, 1, 0]))
        wrappers: Any = normalized.env, inner, inner.env

        def describe_statistics() -> list[str]:
            return [repr(vars(getattr(wrapper, "obs_rms", None) or wrapper.return_rms)) for wrapper in wrappers]

        before = describe_statistics()

        def policy(observations: Any) -> Any:
            return (observations[:, 2] > 0).astype(int)

        results = vecenv.evaluate(normalized, policy, 8, seed=SEED)
        assert vecenv.evaluate(normalized, policy, 8, seed=SEED).returns.tolist() == results.returns.tolist()
        assert describe_statistics() == before
        with pytest.raises(ZeroDivisionError):
            vecenv.evaluate(normalized, lambda observations: 1 / 0, 3)
        assert [wrapper.update_running_mean for wrapper in wrappers] == [False, True, True]


class CanvasWalk(Walk):
    """A walk that draws all frames into the same array."""

    def __init__(self) -> None:
        super().__init__(render_mode="rgb_array")
        self.canvas = np.zeros((2, 3, 3), np.uint8)

    def render(self) -> Any:
        self.canvas[:] = super().render()
        return self.canvas


def test_frames_differ_if_the_environment_draws_them_into_one_array() -> None:
    with open_engine([CanvasWalk], num_workers=0) as envs:
        (result,) = vecenv.evaluate(envs, choose_actions, 1, seed=SEED, frames=[0])
    assert [int(frame.flat[0]) for frame in result.frames] == list(range(result.length + 1))


def test_frames_are_rendered_for_the_requested_episodes() -> None:
    with open_engine(make_walk_fns(2, render_mode="rgb_array"), num_workers=1) as envs:
        results = vecenv.evaluate(envs, choose_actions, 5, seed=SEED, frames=[1, 4])
    assert summarize(results) == expected_results(5)
    for result in results:
        expected = range(result.length + 1) if result.index in (1, 4) else ()
        assert [int(frame[0, 0, 0]) for frame in result.frames] == list(expected)


def test_frames_are_rendered_after_an_earlier_death_of_a_worker() -> None:
    with ready_engine(make_walk_fns(2, render_mode="rgb_array"), num_workers=2) as envs:
        os.kill(envs.processes[1].pid, signal.SIGKILL)
        with pytest.raises(WorkerDied):
            envs.step(np.zeros(2, int))
        results = vecenv.evaluate(envs, choose_actions, 5, seed=SEED, frames=[0])
    assert summarize(results) == expected_results(5)
    assert len(results[0].frames) == results[0].length + 1


class UnrenderableWalk(Walk):
    """A walk that raises, or ends its worker, when the episode with one seed is rendered."""

    def __init__(self, seed: int, dies: bool) -> None:
        super().__init__(render_mode="rgb_array")
        self.unrenderable_seed, self.dies = seed, dies

    def render(self) -> Any:
        if self.np_random_seed == self.unrenderable_seed:
            if self.dies:
                os.kill(os.getpid(), signal.SIGKILL)
            raise ArithmeticError("this episode cannot be rendered")
        return super().render()


@pytest.mark.parametrize("dies", [False, True])
@pytest.mark.parametrize("on_failure", ["raise", "restart"])
def test_episode_that_cannot_be_rendered_fails_alone(dies: bool, on_failure: str) -> None:
    fns = [partial(UnrenderableWalk, SEED + 1, dies)] * 2
    with open_engine(fns, num_workers=1, on_failure=on_failure) as envs, pytest.warns(UserWarning, match="1 of 4 episodes"):
        results = vecenv.evaluate(envs, choose_actions, 4, seed=SEED, frames=[0, 1, 2])
    assert isinstance(results[1].error, WorkerDied if dies else ArithmeticError)
    assert [result.error is None for result in results] == [True, False, True, True]
    assert [result.attempts for result in results] == [1, 2, 1, 1]
    assert [len(result.frames) for result in results] == [results[0].length + 1, 0, results[2].length + 1, 0]


def test_progress_bar_shows_finished_episodes(capsys: pytest.CaptureFixture[str]) -> None:
    with open_engine(make_walk_fns(2), num_workers=0) as envs:
        vecenv.evaluate(envs, choose_actions, 5, seed=SEED, progress=True)
    assert "5/5" in capsys.readouterr().err


# -- failures -------------------------------------------------------------------------------------------------------


def evaluate_with_faults(faults: dict[int, str], tmp_path: Path, num_envs: int, count: int, **kwargs: Any) -> list[Any]:
    """Return the results of walks with faults. Check that walks that do not always fail have the results of a plain loop."""
    engine = kwargs.pop("engine", {"num_workers": 2})
    with open_engine(make_walk_fns(num_envs, faults=faults, folder=str(tmp_path)), **engine) as envs:
        results = vecenv.evaluate(envs, choose_actions, count, seed=SEED, **kwargs)
    assert [result.index for result in results] == list(range(count))
    for found, expected in zip(summarize(results), expected_results(count), strict=True):
        _, seed, *_ = found
        if faults.get(seed, "once").endswith("once"):
            assert found == expected
    return results


@pytest.mark.filterwarnings("ignore:.*:UserWarning")
@pytest.mark.parametrize("num_envs", [1, 4])
def test_failed_episode_is_retried_once_and_then_has_an_error(num_envs: int, tmp_path: Path) -> None:
    faults = {SEED + 2: "raise", SEED + 5: "raise once"}
    results = evaluate_with_faults(faults, tmp_path, num_envs, 8, engine={"num_workers": 0})
    failed, recovered = results[2], results[5]
    assert isinstance(failed.error, ArithmeticError)
    assert "walk 302 failed" in str(failed.error)
    assert math.isnan(failed.episode_return)
    assert (failed.attempts, failed.length) == (2, expected_results(3)[2][3] // 2)
    assert (recovered.attempts, recovered.error) == (2, None)


class ReusedInfoWalk(Walk):
    """A walk that returns the same list in every info."""

    def reset(self, **kwargs: Any) -> Any:
        observation, info = super().reset(**kwargs)
        self.history = getattr(self, "history", [])
        self.history.clear()
        return observation, info

    def step(self, action: Any) -> Any:
        *others, info = super().step(action)
        self.history.append(self.t)
        return *others, {**info, "history": self.history}


@pytest.mark.parametrize("make_engine", [partial(vecenv.AsyncVectorEnv, num_workers=0), SyncVectorEnv])
def test_info_of_a_result_keeps_its_lists_while_later_episodes_run(make_engine: Any) -> None:
    envs = make_engine([ReusedInfoWalk] * 2)
    results = vecenv.evaluate(envs, choose_actions, 6, seed=SEED)
    envs.close()
    assert [result.info["history"] for result in results] == [list(range(1, length + 1)) for length in results.lengths]


@pytest.mark.filterwarnings("ignore:.*:UserWarning")
@pytest.mark.parametrize(("num_envs", "retries"), [(4, 0), pytest.param(4, 1, marks=pytest.mark.long), (1, 1)])
def test_death_of_a_worker_does_not_affect_other_episodes(num_envs: int, retries: int, tmp_path: Path) -> None:
    faults = {SEED + 1: "die", **({SEED + 4: "die once"} if retries else {})}
    engine = {"num_workers": min(num_envs, 2)}
    results = evaluate_with_faults(faults, tmp_path, num_envs, 8, retries=retries, engine=engine)
    assert isinstance(results[1].error, WorkerDied)
    assert [result.index for result in results if result.error is not None] == [1]


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:.*:UserWarning")
def test_hanging_episode_is_ended_after_the_timeout(tmp_path: Path) -> None:
    results = evaluate_with_faults({SEED + 3: "hang", SEED + 5: "hang once"}, tmp_path, 4, 8, retries=1, timeout=0.5)
    assert isinstance(results[3].error, WorkerDied)
    text = str(results[3].error)
    assert "time.sleep(600)" in text or "_cause_fault" in text, "the error does not contain the stack"
    assert [result.index for result in results if result.error is not None] == [3]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*:UserWarning")
@pytest.mark.parametrize("on_failure", ["raise", "restart"])
@pytest.mark.parametrize("num_envs", [1, 3, 8, 64])
def test_each_kind_of_fault_fails_only_its_own_episode(num_envs: int, on_failure: str, tmp_path: Path) -> None:
    faults = {SEED + 2: "raise", SEED + 7: "die", SEED + 11: "hang", SEED + 13: "raise once", SEED + 17: "hang once"}
    faults[SEED + 19] = "die once"
    engine = {"num_workers": min(num_envs, 4), "on_failure": vecenv.Restart(1000) if on_failure == "restart" else "raise"}
    results = evaluate_with_faults(faults, tmp_path, num_envs, 30, timeout=0.5, retries=1, engine=engine)
    assert [result.index for result in results if result.error is not None] == [2, 7, 11]


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:.*:UserWarning")
def test_faults_with_on_failure_restart_fail_only_their_own_episodes(tmp_path: Path) -> None:
    faults = {SEED + 1: "raise", SEED + 2: "die", SEED + 5: "die once"}
    results = evaluate_with_faults(faults, tmp_path, 4, 8, engine={"num_workers": 2, "on_failure": vecenv.Restart(100)})
    assert [result.index for result in results if result.error is not None] == [1, 2]


class AlarmEnv(gymnasium.Env[Any, Any]):
    """An environment that raises a signal after ``steps_left`` steps, or in a reset with options."""

    observation_space = gymnasium.spaces.Box(0, 1, (1,))
    action_space = gymnasium.spaces.Discrete(2)

    def __init__(self, steps_left: int) -> None:
        self.steps_left = steps_left

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        if options:
            signal.raise_signal(signal.SIGUSR2)
        return np.zeros(1, np.float32), {}

    def step(self, action: Any) -> Any:
        self.steps_left -= 1
        if self.steps_left == 0:
            signal.raise_signal(signal.SIGUSR2)
        return np.zeros(1, np.float32), 1.0, self.steps_left % 7 == 0, False, {}


@pytest.fixture
def alarm_handler() -> Iterator[None]:
    def raise_alarm(number: int, frame: object) -> None:
        raise Alarm

    before = signal.signal(signal.SIGUSR2, raise_alarm)
    yield
    assert signal.signal(signal.SIGUSR2, before) is raise_alarm


@pytest.mark.usefixtures("alarm_handler")
@pytest.mark.parametrize("method", ["step", "reset"])
def test_exception_of_a_signal_handler_is_not_a_failure_of_an_episode(method: str) -> None:
    """If environments run in the calling process, a signal handler usually interrupts one of them."""
    raising = vecenv.Episode(options={"alarm": True})
    with open_engine([lambda: AlarmEnv(100 if method == "step" else 0)] * 2, num_workers=0) as envs:
        with pytest.raises(Alarm):
            vecenv.evaluate(envs, choose_zero_actions, 1000 if method == "step" else [raising] * 9, seed=1, retries=1)
        if method == "reset":
            envs.reset()  # drops the rows in flight
            assert len(vecenv.evaluate(envs, choose_zero_actions, 4, seed=1)) == 4


def choose_zero_actions(observations: Any) -> Any:
    return np.zeros(len(observations), int)


@pytest.mark.usefixtures("alarm_handler")
def test_exception_of_a_signal_handler_in_a_dropped_step_is_raised() -> None:
    with ready_engine([lambda: AlarmEnv(1)] * 2, num_workers=0) as envs:
        envs.step_async(np.zeros(2, int))
        with pytest.raises(Alarm):
            drop_pending_and_retry(envs, envs.reset)
        assert drop_pending_and_retry(envs, envs.reset)[0].shape == (2, 1)


# --- ``vecenv.evaluate`` of episodes that begin with a snapshot instead of a reset ----------------


@pytest.mark.sampled(4)
@pytest.mark.parametrize("mode", AutoresetMode)
@pytest.mark.parametrize("num_envs", [1, 3, 8])
def test_evaluate_from_snapshots_equals_a_plain_loop(num_envs: int, mode: AutoresetMode) -> None:
    snapshots, starts = save_midway(10)
    with open_engine(make_walk_fns(num_envs, longest=LONGEST), num_workers=0, autoreset_mode=mode) as envs:
        for count in (10, 1):
            results = vecenv.evaluate(envs, choose_actions, snapshots[:count], seed=SEED)
            assert summarize(results) == expected_results_from(starts[:count])


@pytest.mark.sampled(1)
@pytest.mark.parametrize("engine", list(ENGINES.values())[1:], ids=list(ENGINES)[1:])
def test_evaluate_from_snapshots_with_workers_equals_a_plain_loop(engine: dict[str, Any]) -> None:
    snapshots, starts = save_midway(9)
    with open_engine(make_walk_fns(3, longest=LONGEST), **engine) as envs:
        results = vecenv.evaluate(envs, choose_actions, snapshots, seed=SEED)
        assert summarize(results) == expected_results_from(starts)
        assert envs.stats()["steps"] == sum(result.length for result in results)
        assert all(result.attempts == 1 for result in results)


def test_episodes_with_resets_and_snapshots_can_be_mixed() -> None:
    [snapshot], [start] = save_midway(1)
    episodes = [snapshot, vecenv.Episode(), vecenv.Episode(snapshot=snapshot), vecenv.Episode(seed=SEED + 9)] * 2
    with open_engine(make_walk_fns(3, longest=LONGEST), num_workers=2) as envs:
        results = vecenv.evaluate(envs, choose_actions, episodes, seed=SEED)
        resets = [vecenv.Episode(SEED + 9 if index % 4 == 3 else None) for index in range(8)]
        plain = vecenv.evaluate(envs, choose_actions, resets, seed=SEED)
    assert [result.seed for result in results] == [None, SEED + 1, None, SEED + 9, None, SEED + 5, None, SEED + 9]
    from_snapshot, from_reset = expected_results_from([start] * 8), summarize(plain)
    assert summarize(results) == [from_snapshot[index] if index % 2 == 0 else from_reset[index] for index in range(8)]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("num_envs", [1, 3, 8])
@pytest.mark.parametrize("fault", ["raise", "die"])
def test_failed_episode_restarts_from_its_snapshot(num_envs: int, fault: str, tmp_path: Path) -> None:
    """Walks with a snapshot before their middle have a fault there. It occurs once, except in one walk that always fails."""
    starts = save_midway(7)[1]
    faulty = [index for index, (seed, steps) in enumerate(starts) if steps <= _get_walk_length(seed) // 2]
    assert len(faulty) > 3, "too few snapshots precede the middle of the walk"
    failing = faulty[2]
    faults = {starts[index][0]: fault if index == failing else f"{fault} once" for index in faulty}
    snapshots = save_midway(7, faults=faults, folder=str(tmp_path))[0]
    with open_engine(make_walk_fns(num_envs, longest=LONGEST), num_workers=min(num_envs, 2)) as envs:
        results = vecenv.evaluate(envs, choose_actions, snapshots, seed=SEED)
    assert isinstance(results[failing].error, WorkerDied if fault == "die" else ArithmeticError)
    assert 2 in {results[index].attempts for index in faulty}
    for index, (found, expected) in enumerate(zip(summarize(results), expected_results_from(starts), strict=True)):
        assert found == expected or index == failing


def _get_walk_length(seed: int) -> int:
    walk = Walk(longest=LONGEST)
    walk.reset(seed=seed)
    return walk.length


def test_evaluate_from_snapshots_recovers_failed_rows() -> None:
    snapshots, starts = save_midway(4)
    with open_engine(make_walk_fns(3, longest=LONGEST), num_workers=2) as envs:
        envs.reset(seed=SEED)
        os.kill(envs.exec_func(lambda env: os.getpid(), [0])[0], signal.SIGKILL)
        with pytest.raises(WorkerDied):
            envs.step([0] * 3)
        assert summarize(vecenv.evaluate(envs, choose_actions, snapshots, seed=SEED)) == expected_results_from(starts)


def test_frames_of_an_episode_begin_with_the_state_of_its_snapshot() -> None:
    snapshots, starts = save_midway(3)
    with open_engine(make_walk_fns(2, longest=LONGEST, render_mode="rgb_array"), num_workers=2) as envs:
        results = vecenv.evaluate(envs, choose_actions, snapshots, seed=SEED, frames=[1])
    first = starts[1][1]
    assert [int(frame[0, 0, 0]) for frame in results[1].frames] == [*range(first, first + results[1].length + 1)]


def test_evaluate_of_a_wrapper_begins_with_snapshots() -> None:
    snapshots, starts = save_midway(4)
    with open_engine(make_walk_fns(2, longest=LONGEST), num_workers=0) as inner:
        envs = vecenv.wrappers.RecordEpisodeStatistics(inner)
        results = vecenv.evaluate(envs, choose_actions, snapshots, seed=SEED)
    assert summarize(results)[0][:4] == expected_results_from(starts)[0][:4]


def test_evaluate_with_wrong_snapshots_raises_before_anything_runs() -> None:
    [snapshot], _ = save_midway(1)
    with open_engine(make_walk_fns(2, longest=LONGEST), num_workers=0) as envs:
        fresh = envs.save(verify=False)[0]
        envs.reset(seed=[SEED, SEED])
        done = False
        while not done:
            _, _, terminations, truncations, _ = envs.step([0, 0])
            done = terminations[0] or truncations[0]
        finished = envs.save([0], verify=False)[0]
        damaged = replace(snapshot, body=snapshot.body[:-1])
        for episodes, error, text in (
            ([snapshot, damaged], SnapshotMismatch, r"episodes\[1\].snapshot: its bytes are damaged"),
            ([vecenv.Episode(seed=1, snapshot=snapshot)], ValueError, r"episodes\[0\] begins with a snapshot, not with"),
            ([vecenv.Episode(snapshot="state")], TypeError, r"episodes\[0\].snapshot must be a snapshot from"),  # type: ignore[arg-type]
            ([fresh], ValueError, r"episodes\[0\].snapshot was taken before the first reset"),
            ([finished], ValueError, r"episodes\[0\].snapshot was taken when its episode was over"),
            (snapshot, TypeError, "a list of vecenv.Episode or snapshots"),
        ):
            with pytest.raises(error, match=text):
                vecenv.evaluate(envs, choose_actions, episodes, seed=SEED)  # type: ignore[arg-type]
    text = r"episodes\[1\].snapshot: .*Walk"
    with open_engine(counters(2), num_workers=0) as others, pytest.raises(SnapshotMismatch, match=text):
        vecenv.evaluate(others, choose_actions, [vecenv.Episode(), snapshot], seed=SEED)
    for envs in (SyncVectorEnv(make_walk_fns(2)), FakeVectorEnv(2)):
        with pytest.raises(NotImplementedError, match="cannot begin episodes with snapshots"):
            vecenv.evaluate(envs, choose_actions, [snapshot])
        envs.close()
