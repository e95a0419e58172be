"""What a policy is given, what it may return, and what is refused before anything runs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import gymnasium
import numpy as np
import pytest
from envs import opened
from gymnasium import spaces
from gymnasium.error import AlreadyPendingCallError
from walks import SEED, Walk, choose, numbers, walks, wanted

import vecenv
from vecenv.evaluating.episodes import EpisodeResults


class Nested(gymnasium.Wrapper[Any, Any, Any, Any]):
    """A walk whose observations and actions are dicts and tuples."""

    def __init__(self) -> None:
        super().__init__(Walk())
        self.observation_space = spaces.Dict({"seen": Walk.observation_space, "two": spaces.Tuple((spaces.Discrete(99),))})
        self.action_space = spaces.Dict({"go": Walk.action_space, "say": spaces.Tuple((spaces.Text(3),))})

    def reset(self, **how: Any) -> Any:
        observation, info = self.env.reset(**how)
        return self._both(observation), info

    def step(self, action: Any) -> Any:
        assert action["say"] == ("yes",)
        observation, *others = self.env.step(action["go"])
        return self._both(observation), *others

    def _both(self, observation: Any) -> Any:
        return {"seen": observation, "two": (int(observation[1]),)}


@pytest.mark.parametrize("batch", ["ready", "padded", "single"])
def test_parts_of_observations_and_actions_belong_together(batch: str) -> None:
    def policy(observations: Any, rngs: Any) -> Any:
        assert (observations["two"][0] == observations["seen"][:, 1]).all()
        return {"go": choose(observations["seen"], rngs), "say": (("yes",) * len(rngs),)}

    with opened([Nested] * 3, num_workers=0) as envs:
        assert numbers(vecenv.evaluate(envs, policy, 7, seed=SEED, batch=batch)) == wanted(7)


def test_a_policy_is_told_what_it_names() -> None:
    told: dict[int, list[Any]] = {}

    def policy(observations: Any, *, begins: Any, rows: Any, episodes: Any, infos: Any) -> Any:
        assert len(observations) == len(begins) == len(rows) == len(episodes) == len(infos) <= 3
        assert len(set(rows.tolist())) == len(rows)
        for episode, *each in zip(episodes.tolist(), begins.tolist(), rows.tolist(), infos, strict=True):
            told.setdefault(episode, []).append(each)
        return np.zeros(len(observations), int)

    with opened(walks(3), num_workers=2) as envs:
        results = vecenv.evaluate(envs, policy, 6, seed=SEED)
    for result in results:
        begins, rows, infos = zip(*told[result.index], strict=True)
        assert list(begins) == [True] + [False] * (result.length - 1)
        assert len(set(rows)) == 1
        assert infos[0] == {"reset": True}
        assert [info["t"] for info in infos[1:]] == list(range(1, result.length))


def remembering(observations: Any, state: Any) -> Any:
    """Actions from all that was seen in an episode so far."""
    sums = state["sums"][0] + observations[:, 2]
    return (np.abs(sums * 7).astype(int) % 7), {"sums": (sums,), "calls": state["calls"] + 1}


@pytest.mark.parametrize("batch", ["ready", "padded", "single"])
def test_a_recurrent_policy_keeps_a_state_for_each_row(batch: str) -> None:
    state = {"sums": (np.float64(0),), "calls": np.zeros((), int)}
    found = []
    for num_envs, engine in ((1, {"num_workers": 0}), (3, {"num_workers": 0}), (5, {"num_workers": 2})):
        with opened(walks(num_envs), **engine) as envs:
            results = vecenv.evaluate(envs, remembering, 9, seed=SEED, initial_state=state, batch=batch)
        found.append(numbers(results))
    assert found[0] == found[1] == found[2]
    assert len({each[2] for each in found[0]}) == 9


def test_a_policy_that_is_compiled_always_gets_as_many_rows() -> None:
    sizes = set()

    def policy(observations: Any, rows: Any, rngs: Any) -> Any:
        sizes.add(len(observations))
        assert all(list(rows).count(row) == 1 for row in range(3) if row in rows), "3 stands for none"
        return choose(observations, rngs)

    with opened(walks(3), num_workers=0) as envs:
        assert numbers(vecenv.evaluate(envs, policy, 7, seed=SEED, batch="padded")) == wanted(7)
    assert sizes == {3}


@pytest.mark.parametrize(
    ("options", "error", "says"),
    [
        ({"episodes": 0}, ValueError, "no episode to run"),
        ({"episodes": []}, ValueError, "no episode to run"),
        ({"episodes": -1}, ValueError, "episodes must not be negative"),
        ({"episodes": 1.5}, TypeError, "episodes must be how many, or a list of vecenv.Episode, got 1.5"),
        ({"episodes": "ten"}, TypeError, "episodes must be how many"),
        ({"episodes": [vecenv.Episode(1), 2]}, TypeError, r"episodes\[1\] must be a vecenv.Episode, got 2"),
        ({"episodes": [vecenv.Episode(seed=-4)]}, ValueError, r"episodes\[0\].seed must not be negative, got -4"),
        ({"episodes": [vecenv.Episode(seed=True)]}, TypeError, r"episodes\[0\].seed must be an integer, got True"),
        ({"episodes": [vecenv.Episode(options=[1])]}, TypeError, r"episodes\[0\].options must be a dict"),  # type: ignore[arg-type]
        ({"episodes": [vecenv.Episode(options={"reset_mask": 1})]}, ValueError, "reset_mask"),
        ({"seed": "0"}, TypeError, "seed must be an integer, got '0'"),
        ({"seed": -1}, ValueError, "seed must not be negative, got -1"),
        ({"retries": -1}, ValueError, "retries must be an integer from 0 on, got -1"),
        ({"retries": True}, ValueError, "retries"),
        ({"timeout": "1"}, TypeError, "timeout"),
        ({"timeout": 1.0}, NotImplementedError, "the calling process steps some"),
        ({"on_episode": 3}, TypeError, "on_episode must be callable, got 3"),
        ({"frames": [4]}, ValueError, r"frames must be places of episodes, from 0 to 3; got \[4\]"),
        ({"frames": [1]}, ValueError, "frames need render_mode='rgb_array', got None"),
        ({"policy": None}, TypeError, "policy must be callable"),
        ({"policy": lambda: 0}, TypeError, "must take the observations"),
        ({"policy": lambda seen, hidden: 0}, TypeError, "policy wants 'hidden'"),
        ({"policy": lambda seen, state: 0}, TypeError, "goes with initial_state=.* is not given"),
        ({"initial_state": 0.0}, TypeError, "goes with initial_state=.* is given"),
        ({"batch": "whole"}, ValueError, "batch must be one of"),
        ({"arrays": "cupy"}, ValueError, "arrays must be one of"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_what_is_wrong_is_named_before_anything_runs(options: dict[str, Any], error: type[Exception], says: str) -> None:
    given = {"policy": lambda seen: np.zeros(len(seen), int), "episodes": 4, **options}
    with opened(walks(2), num_workers=0) as envs:
        with pytest.raises(error, match=says):
            vecenv.evaluate(envs, **given)
        assert envs.stats()["resets"] == envs.stats()["in_flight"] == 0


@pytest.mark.parametrize(
    ("actions", "error", "says"),
    [
        (lambda count: np.zeros(count + 1, int), ValueError, "given 3 observations and returned 4 actions"),
        (lambda count: np.zeros(count - 1, int), ValueError, "given 3 observations and returned 2 actions"),
        (lambda count: 1, TypeError, "returned no batch of 3 actions of Discrete"),
        (lambda count: None, TypeError, "returned no batch of 3 actions of Discrete"),
    ],
)
def test_a_wrong_number_of_actions_is_named_before_a_step(actions: Any, error: type[Exception], says: str) -> None:
    with opened(walks(3), num_workers=0) as envs:
        with pytest.raises(error, match=says):
            vecenv.evaluate(envs, lambda seen: actions(len(seen)), 4)
        assert envs.stats()["steps"] == envs.stats()["in_flight"] == 0


def test_what_a_policy_raises_ends_the_evaluation_and_a_reset_brings_all_back() -> None:
    def policy(observations: Any, begins: Any) -> Any:
        if not begins.any():
            raise KeyError("policy")
        return np.zeros(len(observations), int)

    with opened(walks(3), num_workers=2) as envs:
        with pytest.raises(KeyError, match="policy"):
            vecenv.evaluate(envs, policy, 9, seed=SEED)
        envs.reset(seed=1)
        assert numbers(vecenv.evaluate(envs, choose, 5, seed=SEED)) == wanted(5)


def test_rows_that_are_in_flight_are_not_touched() -> None:
    with opened(walks(3), num_workers=0) as envs:
        envs.reset(seed=1)
        envs.send([0], [2])
        with pytest.raises(AlreadyPendingCallError, match=r"Calling `evaluate` while envs \[2\] are in flight"):
            vecenv.evaluate(envs, choose, 1, seed=SEED)
        assert envs.recv(count=1)[4]["env_id"].tolist() == [2]
        envs.step_async([0] * 3)
        with pytest.raises(AlreadyPendingCallError):
            vecenv.evaluate(envs, choose, 1, seed=SEED)
        envs.step_wait()


def test_what_is_no_vector_environment_is_refused() -> None:
    with pytest.raises(TypeError, match=r"wants a Gymnasium vector environment, as vecenv\.make_vec builds"):
        vecenv.evaluate(Walk(), choose, 3)  # type: ignore[arg-type]


def test_results_have_figures_and_a_short_repr() -> None:
    with opened(walks(3), num_workers=0) as envs:
        results = vecenv.evaluate(envs, choose, 7, seed=SEED)
    returns = [each.episode_return for each in results]
    assert results.returns.tolist() == returns
    assert results.lengths.tolist() == [each.length for each in results]
    assert (results.mean, results.std) == (np.mean(returns), np.std(returns))
    assert len(repr(results)) < 100
    assert repr(results).startswith("EpisodeResults(7 episodes, mean=")
    failed = EpisodeResults([*results, replace(results[0], episode_return=float("nan"), error=RuntimeError())])
    assert (failed.mean, failed.std) == (results.mean, results.std), "episodes that failed have no return"
    assert "8 episodes, 1 failed" in repr(failed)
    assert np.isnan(EpisodeResults(failed[-1:]).mean)


def test_swapped_arguments_are_named() -> None:
    with opened(walks(1), num_workers=0) as envs, pytest.raises(TypeError, match=r"envs=.*choose.*policy=Async.*swapped\?"):
        vecenv.evaluate(choose, envs, 3)  # type: ignore[arg-type]
