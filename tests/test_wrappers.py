"""``vecenv.wrappers.RecordEpisodeStatistics`` with ``step`` and with first-ready batches."""

from __future__ import annotations

import pickle
import sys
import time
from collections.abc import Sequence
from functools import partial
from typing import Any

import gymnasium.wrappers.vector
import numpy as np
import pytest
from envs import CounterEnv, counters, open_engine
from gymnasium.vector import AutoresetMode

import vecenv
from vecenv.front import arguments
from vecenv.wrappers import RecordEpisodeStatistics

MODES = pytest.mark.parametrize("mode", AutoresetMode)


def cartpoles(num_envs: int) -> list[Any]:
    return [lambda: gymnasium.make("CartPole-v1")] * num_envs


def returns_and_lengths(infos: dict[str, Any]) -> Any:
    """Return the returns and lengths of the episodes in ``infos``, and the mask of the rows that have them."""
    statistics = infos.get("episode", {})
    values = {key: statistics[key].tolist() for key in ("r", "l") if statistics}
    return values, infos.get("_episode", np.zeros(0)).tolist()


@pytest.mark.sampled(3)
@MODES
@pytest.mark.parametrize("engine", [{"num_workers": 0}, {"num_workers": 2}], ids=["in-process", "two-workers"])
def test_step_gives_the_same_statistics_as_gymnasiums_wrapper(mode: AutoresetMode, engine: dict[str, Any]) -> None:
    # not over SyncVectorEnv, which removes the mask from the options, so that Gymnasium's wrapper would reset all rows
    if mode is AutoresetMode.SAME_STEP and tuple(map(int, gymnasium.__version__.split(".")[:2])) < (1, 4):
        pytest.skip("Gymnasium's wrapper counts one step too few")
    with (
        open_engine(cartpoles(3), autoreset_mode=mode, num_workers=0) as reference,
        open_engine(cartpoles(3), autoreset_mode=mode, **engine) as envs,
    ):
        theirs = gymnasium.wrappers.vector.RecordEpisodeStatistics(reference)
        ours = RecordEpisodeStatistics(envs)
        assert isinstance(ours, gymnasium.wrappers.vector.RecordEpisodeStatistics)
        for each in (theirs, ours):
            each.reset(seed=5)
        for step in range(120):
            actions = np.array([step % 2, step % 3 == 0, 1], np.int64)
            results = [each.step(actions) for each in (theirs, ours)]
            assert returns_and_lengths(results[0][4]) == returns_and_lengths(results[1][4])
            if mode is AutoresetMode.DISABLED and (over := results[0][2] | results[0][3]).any():
                for each in (theirs, ours):
                    each.reset(options={"reset_mask": over.copy()})
        assert ours.episode_count == theirs.episode_count > 5
        assert list(ours.return_queue) == list(theirs.return_queue)
        assert list(ours.length_queue) == list(theirs.length_queue)
        assert len(ours.time_queue) == ours.episode_count


def expected_episodes(rewards: Sequence[float], over: Sequence[bool], mode: AutoresetMode) -> list[tuple[float, int]]:
    """Return (return, length) of each episode in the results of one environment. The first result is that of a reset."""
    episodes, total, length, is_reset = [], 0.0, 0, True
    for reward, ended in zip(rewards, over, strict=True):
        if is_reset:
            total, length, is_reset = 0.0, 0, False
            continue
        total, length = total + reward, length + 1
        if ended:
            episodes.append((total, length))
            total, length, is_reset = 0.0, 0, mode is AutoresetMode.NEXT_STEP
    return episodes


def make_engines(mode: AutoresetMode) -> list[Any]:
    fns = counters(6, lengths=(2, 5, 3))
    envs: list[Any] = [vecenv.AsyncVectorEnv(fns, autoreset_mode=mode, batch_size=2, num_workers=3)]
    if mode is AutoresetMode.NEXT_STEP:
        from vecenv.backends import EnvPoolVectorEnv

        envs.append(EnvPoolVectorEnv("CartPole-v1", 6, batch_size=2, num_threads=1, autoreset_mode=mode, seed=3))
    return envs


@pytest.mark.parametrize("mode", [AutoresetMode.NEXT_STEP, AutoresetMode.SAME_STEP])
def test_statistics_of_first_ready_batches_equal_the_received_rows(mode: AutoresetMode) -> None:
    for envs in make_engines(mode):
        recorded: Any = RecordEpisodeStatistics(envs)
        recorded.reset_async()
        received: dict[int, list[tuple[float, bool]]] = {row: [] for row in range(6)}
        reported: dict[int, list[tuple[float, int]]] = {row: [] for row in range(6)}
        for _ in range(200):
            _, rewards, terminations, truncations, infos = recorded.recv(timeout=60)
            rows = infos["env_id"]
            for i, row in enumerate(rows.tolist()):
                received[row].append((float(rewards[i]), bool(terminations[i] or truncations[i])))
                if infos.get("_episode", np.zeros(len(rows)))[i]:
                    reported[row].append((float(infos["episode"]["r"][i]), int(infos["episode"]["l"][i])))
            recorded.send(np.ones(len(rows), np.int64), env_id=rows)
        expected = {}
        for row, steps in received.items():
            row_rewards, over = zip(*steps, strict=True)
            expected[row] = expected_episodes(row_rewards, over, mode)
        assert reported == expected
        assert recorded.episode_count == sum(map(len, expected.values())) > 20
        recorded.close()


def test_reset_of_single_environments_restarts_their_statistics() -> None:
    """Environments are reset in the middle of an episode, and, without autoreset, at its end."""
    with open_engine(counters(3, lengths=(4,)), autoreset_mode=AutoresetMode.DISABLED, num_workers=0) as envs:
        recorded: Any = RecordEpisodeStatistics(envs)
        recorded.reset(seed=1)
        recorded.step([0, 0, 0])
        recorded.reset_async(env_id=[1])
        assert recorded.recv(count=1)[4].get("_episode") is None
        recorded.reset(options={"reset_mask": np.array([False, False, True])})
        for _ in range(3):
            *_, infos = recorded.step([0, 0, 0])
        assert infos["_episode"].tolist() == [True, False, False]
        assert infos["episode"]["l"].tolist() == [4, 0, 0]
        recorded.reset_async(env_id=[0])
        recorded.recv(count=1)
        *_, infos = recorded.step([0, 0, 0])
        assert infos["episode"]["l"].tolist() == [0, 4, 4]


@pytest.mark.sampled(3)
@MODES
@pytest.mark.parametrize("engine", [{"num_workers": 0}, {"num_workers": 2}], ids=["in-process", "two-workers"])
def test_loaded_statistics_continue_from_the_saved_ones(mode: AutoresetMode, engine: dict[str, Any]) -> None:
    def play(recorded: Any, steps: range) -> list[Any]:
        reported = []
        for step in steps:
            *_, terminations, truncations, infos = recorded.step(np.array([step % 2, step % 3 == 0, 1], np.int64))
            reported.append(returns_and_lengths(infos))
            if mode is AutoresetMode.DISABLED and (over := terminations | truncations).any():
                recorded.reset(options={"reset_mask": over})
        return reported

    with (
        open_engine(cartpoles(3), autoreset_mode=mode, **engine) as envs,
        open_engine(cartpoles(3), autoreset_mode=mode, num_workers=0) as other_envs,
    ):
        recorded: Any = RecordEpisodeStatistics(envs)
        recorded.reset(seed=5)
        play(recorded, range(25))
        state, snapshots = pickle.loads(pickle.dumps((recorded.state_dict(verify=False), recorded.save(verify=False))))
        expected = play(recorded, range(25, 90))
        resumed: Any = RecordEpisodeStatistics(other_envs)
        resumed.load_state_dict(state)
        assert play(resumed, range(25, 90)) == expected
        assert list(resumed.return_queue) == list(recorded.return_queue)
        assert resumed.episode_count == recorded.episode_count > 5
        resumed.load(snapshots)
        assert play(resumed, range(25, 90)) == expected
        resumed.load(snapshots[2], env_id=[0])
        assert resumed.episode_lengths.tolist()[0] == snapshots[2].row.beside["episode"][1]
        with pytest.warns(UserWarning, match="counts from here: the state was saved without it"):
            recorded.load(envs.save(verify=False))
        assert recorded.episode_lengths.tolist() == [0, 0, 0]


@pytest.mark.skipif(sys.platform != "linux", reason="frozen copies need Linux")
def test_thawed_rows_continue_the_statistics_of_the_frozen_one() -> None:
    with open_engine(counters(2, lengths=(5,)), num_workers=None) as engine:
        envs: Any = RecordEpisodeStatistics(engine)
        play_two_steps(envs)
        with envs.freeze([0])[0] as frozen:
            envs.step(np.zeros(2, np.int64))
            envs.thaw(frozen, into=[1])
            assert play_until_the_end(envs) == [5, 0]
            envs.thaw(frozen, into=[0, 1])
            assert play_until_the_end(envs) == [5, 5]


@pytest.mark.long
@pytest.mark.skipif(sys.platform != "linux", reason="frozen copies need Linux")
def test_copy_frozen_without_the_wrapper_warns_and_counts_from_the_thaw() -> None:
    with open_engine(counters(2, lengths=(5,)), num_workers=None) as engine:
        envs: Any = RecordEpisodeStatistics(engine)
        play_two_steps(envs)
        with engine.freeze([0])[0] as frozen, pytest.warns(UserWarning, match="counts from here"):
            envs.thaw(frozen, into=[0, 1])
        assert play_until_the_end(envs) == [3, 3]


def test_automatic_reset_after_load_does_not_count_as_a_step() -> None:
    """The state is saved without the wrapper, after an episode and before its automatic reset."""
    with open_engine(counters(2, lengths=(2,)), num_workers=0) as envs:
        envs.reset(seed=1)
        for _ in range(2):
            envs.step([0, 0])
        recorded: Any = RecordEpisodeStatistics(envs)
        recorded.load(envs.save(verify=False))
        for _ in range(3):
            *_, infos = recorded.step([0, 0])
        assert infos["episode"]["l"].tolist() == [2, 2]


def test_step_async_and_step_wait_record_statistics() -> None:
    with open_engine(counters(2, lengths=(2,)), num_workers=2) as envs:
        recorded: Any = RecordEpisodeStatistics(envs, stats_key="mine", buffer_length=1)
        started = time.perf_counter()
        recorded.reset_async(seed=1)
        recorded.reset_wait()
        for _ in range(2):
            recorded.step_async([0, 0])
            *_, infos = recorded.step_wait(timeout=60)
        assert infos["mine"]["l"].tolist() == [2, 2]
        assert len(recorded.length_queue) == 1
        assert (infos["mine"]["t"] > 0).all()
        assert (infos["mine"]["t"] <= time.perf_counter() - started).all()


def test_other_attributes_come_from_the_wrapped_vector_environment() -> None:
    with open_engine(counters(2), num_workers=2, batch_size=1) as envs:
        recorded: Any = RecordEpisodeStatistics(envs)
        assert recorded.capabilities is not None
        assert (recorded.batch_size, recorded.num_workers) == (1, 2)
        assert recorded.call("get_wrapper_attr", "steps") == (0, 0)
        with pytest.raises(AttributeError, match="no attribute '_nothing'"):
            _ = recorded._nothing
        with pytest.raises(AttributeError, match="nothing"):
            _ = recorded.nothing


def test_info_with_the_key_of_the_statistics_raises() -> None:
    class AddsEpisodeInfo(gymnasium.Wrapper):
        def step(self, action: Any) -> Any:
            return (*super().step(action)[:4], {"episode": 1})

    with open_engine([lambda: AddsEpisodeInfo(gymnasium.make("CartPole-v1", max_episode_steps=1))], num_workers=0) as envs:
        recorded = RecordEpisodeStatistics(envs)
        recorded.reset(seed=1)
        with pytest.raises(ValueError, match="infos already have a key 'episode': set another stats_key"):
            recorded.step(np.array([0]))


class SlowResetEnv(CounterEnv):
    """A counter with episodes of five steps. A reset with options takes some time and may raise."""

    def __init__(self, env_id: int) -> None:
        super().__init__(env_id, lengths=(5,))

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        if options:
            time.sleep(options["seconds"])
            if options["raises"] == self.env_id:
                raise options.get("error", ArithmeticError)("this reset raises")
        return super().reset(seed=seed, options=None)


def play_two_steps(envs: Any) -> None:
    envs.reset(seed=1)
    for _ in range(2):
        envs.step(np.zeros(2, np.int64))


def play_until_the_end(envs: Any) -> Any:
    infos: dict[str, Any] = {}
    while "episode" not in infos:
        *_, infos = envs.step(np.zeros(2, np.int64))
    return infos["episode"]["l"].tolist()


def test_statistics_begin_with_a_reset_that_timed_out() -> None:
    with open_engine([partial(SlowResetEnv, 0), partial(SlowResetEnv, 1)], num_workers=2, step_timeout=0.3) as engine:
        envs = RecordEpisodeStatistics(engine)
        play_two_steps(envs)
        with pytest.raises(vecenv.errors.StepTimeout):
            envs.reset(options={"seconds": 0.6, "raises": -1})
        envs.reset_wait(timeout=5)
        assert play_until_the_end(envs) == [5, 5]


@pytest.mark.parametrize("error", [ArithmeticError, ValueError])
@pytest.mark.parametrize("in_two_calls", [False, True])
def test_statistics_begin_with_a_reset_that_fails_in_another_row(in_two_calls: bool, error: type[Exception]) -> None:
    with open_engine([partial(SlowResetEnv, 0), partial(SlowResetEnv, 1)], num_workers=2) as engine:
        envs = RecordEpisodeStatistics(engine)
        play_two_steps(envs)
        options = {"seconds": 0.0, "raises": 1, "error": error}
        if in_two_calls:
            envs.reset_async(options=options)
        with pytest.raises(error, match="this reset raises"):
            envs.reset_wait() if in_two_calls else envs.reset(options=options)
        envs.reset(options={"reset_mask": np.array([False, True])})
        assert play_until_the_end(envs) == [5, 5]


@pytest.mark.parametrize("in_two_calls", [False, True])
def test_statistics_begin_with_a_reset_that_a_reset_of_another_row_drops(in_two_calls: bool) -> None:
    with open_engine(counters(2, lengths=(5,)), num_workers=2) as engine:
        envs = RecordEpisodeStatistics(engine)
        play_two_steps(envs)
        envs.reset_async(env_id=[0])
        options = {"reset_mask": np.array([False, True])}
        if in_two_calls:
            envs.reset_async(options=options)
            envs.reset_wait()
        else:
            envs.reset(options=options)
        assert play_until_the_end(envs) == [5, 5]


@pytest.mark.parametrize("error", [ValueError, arguments.AssertionValueError])  # of Gymnasium 1.4, and of older versions
def test_statistics_continue_after_a_refused_reset(error: type[ValueError], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arguments, "CompatValueError", error)
    with open_engine(counters(2, lengths=(5,)), num_workers=2) as engine:
        envs = RecordEpisodeStatistics(engine)
        play_two_steps(envs)
        with pytest.raises(ValueError, match="seed"):
            envs.reset(seed=[1, 2, 3])
        assert play_until_the_end(envs) == [5, 5]


class RaisingCounterEnv(CounterEnv):
    """A counter with episodes of four steps that raises for action 1, and has an info of ``None`` for action 2."""

    def __init__(self, env_id: int) -> None:
        super().__init__(env_id, lengths=(4,))

    def step(self, action: Any) -> Any:
        if action == 1:
            raise ArithmeticError("action 1")
        *result, info = super().step(action)
        return (*result, None if action == 2 else info)


def step_until_reported(envs: Any, row: int, episodes: int) -> tuple[int, list[tuple[float, int]]]:
    """Step one row until some episodes were reported. Return the number of steps, and the episodes as (return, length)."""
    reported: list[tuple[float, int]] = []
    steps = 0
    while len(reported) < episodes:
        envs.send(np.zeros(1, np.int64), [row])
        infos = envs.recv(count=1)[4]
        steps += 1
        if infos.get("_episode", [False])[0]:
            reported.append((round(infos["episode"]["r"][0], 3), infos["episode"]["l"][0]))
    return steps, reported


@pytest.mark.sampled(6)
@pytest.mark.parametrize("mode", ["NextStep", "SameStep"])
@pytest.mark.parametrize("steps", [1, 3, 4])
@pytest.mark.parametrize("cause", ["step", "reset", "reset_async"])
def test_episode_with_a_lost_result_is_not_reported(mode: str, steps: int, cause: str) -> None:
    """Another row raises in the same step, or a reset of another row drops the result."""
    options = {"reset_mask": np.array([True, False])}
    with open_engine([partial(RaisingCounterEnv, row) for row in range(2)], autoreset_mode=mode, num_workers=2) as engine:
        envs = RecordEpisodeStatistics(engine)
        envs.reset(seed=1)
        for _ in range(steps):
            envs.send(np.zeros(1, np.int64), [1])
            envs.recv(count=1)
        if cause == "step":
            with pytest.raises(ArithmeticError):
                envs.step(np.array([1, 0]))
            envs.reset(options=options)
        else:
            envs.send(np.zeros(1, np.int64), [1])
            if cause == "reset":
                envs.reset(options=options)
            else:
                envs.reset_async(options=options)
                envs.reset_wait()
        saved = envs.save()
        until_reported, reported = step_until_reported(envs, 1, 2)
        assert reported == [(4.01, 4)] * 2
        if mode == "NextStep" and steps == 4:  # the lost result was that of a reset
            assert until_reported == 4 + 5
        envs.load(saved)
        assert step_until_reported(envs, 1, 2) == (until_reported, reported)


def test_episode_with_an_info_that_cannot_be_merged_is_not_reported() -> None:
    with open_engine([partial(RaisingCounterEnv, row) for row in range(2)], num_workers=2) as engine:
        envs = RecordEpisodeStatistics(engine)
        envs.reset(seed=1)
        for row in range(2):
            envs.send(np.full(1, 2), [row])
            with pytest.raises(vecenv.errors.InfoError):
                envs.recv(count=1)
            assert step_until_reported(envs, row, 2)[1] == [(row * 4 + 0.01, 4)] * 2


class MisfitEnv(CounterEnv):
    """A counter with pickled observations and episodes of four steps. After action 1, one does not fit its space."""

    def __init__(self, env_id: int) -> None:
        super().__init__(env_id, lengths=(4,))
        self.observation_space = gymnasium.spaces.Dict(text=gymnasium.spaces.Text(5))  # type: ignore[assignment]

    def reset(self, **kwargs: Any) -> Any:
        super().reset(**kwargs)
        return {"text": "abc"}, {}

    def step(self, action: Any) -> Any:
        return {} if action == 1 else {"text": "abc"}, *super().step(action)[1:]


def test_episode_with_an_observation_that_does_not_fit_is_not_reported() -> None:
    first = {"reset_mask": np.array([True, False])}
    with open_engine([partial(MisfitEnv, row) for row in range(2)], num_workers=2) as engine:
        envs = RecordEpisodeStatistics(engine)
        envs.reset(seed=1)
        envs.send(np.array([1, 0]))
        with pytest.raises(vecenv.errors.ObservationError, match="env 0"):
            envs.recv(count=2)
        envs.recv(count=1)
        envs.reset(options=first)
        assert step_until_reported(envs, 0, 2)[1] == [(0.01, 4)] * 2
        envs.step(np.zeros(2, np.int64))
        with pytest.raises(vecenv.errors.ObservationError, match="env 0"):
            envs.step(np.array([1, 0]))
        envs.reset(options=first)
        for row in range(2):
            assert step_until_reported(envs, row, 2)[1] == [(row * 4 + 0.01, 4)] * 2


class UnloadableCounterEnv(CounterEnv):
    """A counter with episodes of five steps. Its state cannot be loaded if ``note`` was ``"bad"`` when it was saved."""

    def __init__(self, env_id: int) -> None:
        super().__init__(env_id, lengths=(5,))

    def take_snapshot(self) -> Any:
        return dict(self.__dict__)

    def restore_snapshot(self, state: Any) -> None:
        if state["note"] == "bad":
            raise ArithmeticError("bad state")
        self.__dict__.update(state)


@pytest.mark.parametrize("method", ["load", "load_state_dict"])
def test_statistics_of_rows_that_were_loaded_while_another_failed_continue_from_the_saved_ones(method: str) -> None:
    with open_engine([partial(UnloadableCounterEnv, row) for row in range(2)], num_workers=2) as engine:
        envs: Any = RecordEpisodeStatistics(engine)
        play_two_steps(envs)
        envs.set_attr("note", ["good", "bad"])
        saved = envs.save(verify=False) if method == "load" else envs.state_dict(verify=False)
        envs.step(np.zeros(2, np.int64))
        with pytest.raises(ArithmeticError, match="bad state"):
            getattr(envs, method)(saved)
        envs.reset(options={"reset_mask": np.array([False, True])})
        assert play_until_the_end(envs) == [5, 0]
