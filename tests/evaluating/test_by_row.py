"""``vecenv.evaluate`` on engines that answer row by row: what a plain loop gives, however many environments there are."""

from __future__ import annotations

import math
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from envs import opened
from gymnasium.vector import AutoresetMode
from in_time import InTime, least_time
from walks import ENGINES, SEED, choose, numbers, walks, wanted

import vecenv
from vecenv.errors import WorkerDied
from vecenv.front.driver import dropping_pending


@pytest.mark.parametrize("mode", AutoresetMode)
@pytest.mark.parametrize("num_envs", [1, 3, 8])
def test_results_are_those_of_a_plain_loop(num_envs: int, mode: AutoresetMode) -> None:
    with opened(walks(num_envs), num_workers=0, autoreset_mode=mode) as envs:
        for count in (10, 1, 3):
            assert numbers(vecenv.evaluate(envs, choose, count, seed=SEED)) == wanted(count)


@pytest.mark.parametrize("engine", list(ENGINES.values())[1:], ids=list(ENGINES)[1:])
def test_results_are_the_same_in_processes(engine: dict[str, Any]) -> None:
    with opened(walks(3), **engine) as envs:
        results = vecenv.evaluate(envs, choose, 10, seed=SEED)
        assert numbers(results) == wanted(10)
        assert envs.stats()["steps"] == sum(each.length for each in results)
        assert all(each.attempts == 1 and each.seconds > 0 and not each.frames for each in results)
        assert envs.reset(seed=1)[0].shape == (3, 3), "it is as good as new"


@pytest.mark.slow
@pytest.mark.parametrize("mode", AutoresetMode)
@pytest.mark.parametrize("engine", ENGINES.values(), ids=ENGINES)
@pytest.mark.parametrize("num_envs", [2, 3, 8, 64])
def test_no_number_of_environments_changes_a_bit(num_envs: int, engine: dict[str, Any], mode: AutoresetMode) -> None:
    with opened(walks(num_envs, longest=1000), autoreset_mode=mode, **engine) as envs:
        for count in (40, 5):
            results = vecenv.evaluate(envs, choose, count, seed=SEED)
            assert numbers(results) == wanted(count, longest=1000)
        assert max(each.length for each in results) > 100


@pytest.mark.parametrize("mode", AutoresetMode)
def test_there_are_as_many_steps_as_the_lengths_add_up_to(mode: AutoresetMode, tmp_path: Path) -> None:
    with opened(walks(4, marks=str(tmp_path)), num_workers=2, autoreset_mode=mode) as envs:
        results = vecenv.evaluate(envs, choose, 11, seed=SEED)
        made = envs.stats()["steps"]
    assert (tmp_path / "steps").stat().st_size == sum(each.length for each in results) == made


@pytest.mark.parametrize("num_envs", [1, 3, 8, pytest.param(64, marks=pytest.mark.long)])
def test_no_environment_waits_while_there_are_episodes(num_envs: int) -> None:
    """In counted time: within a tenth of what the best schedule takes, with episodes that raise or die in the middle."""
    count = 22 * num_envs
    faults = {SEED + 2: "raise", SEED + 7: "raise", SEED + 11: "raise", SEED + 2 * num_envs: "raise"}
    envs = InTime(num_envs, faults=faults)
    results = vecenv.evaluate(envs, choose, count, seed=SEED, retries=0)
    assert [each.index for each in results] == list(range(count))
    assert {each.seed for each in results if each.error is not None} == set(faults)
    assert {type(each.error) for each in results} == {type(None), ArithmeticError, WorkerDied}
    for each, plain in zip(numbers(results), wanted(count), strict=True):
        assert each == plain or each[1] in faults
    assert envs.steps == sum(each.length for each in results)
    assert envs.now <= 1.1 * least_time(results, num_envs)


@pytest.mark.parametrize("num_envs", [1, 3, 8, 64])
def test_as_many_steps_in_any_number_of_environments(num_envs: int) -> None:
    with opened(walks(num_envs), num_workers=0) as envs:
        results = vecenv.evaluate(envs, choose, 70, seed=SEED)
        assert envs.stats()["steps"] == sum(each.length for each in results)
        assert numbers(results) == wanted(70)


def test_every_episode_has_its_own_seed_and_options() -> None:
    episodes = [vecenv.Episode(7, {"start": 5.0}), vecenv.Episode(), vecenv.Episode(options={"start": -1.0})]
    with opened(walks(2), num_workers=0) as envs:
        results = vecenv.evaluate(envs, lambda seen: np.zeros(len(seen), int), episodes, seed=20)
    assert [each.seed for each in results] == [7, 21, 22]
    assert [each.options for each in results] == [{"start": 5.0}, None, {"start": -1.0}]
    assert [each.episode_return / each.length for each in results] == [5.0, 0.0, -1.0], "the sum of what never moves"


def test_without_a_seed_the_results_say_which_it_was() -> None:
    with opened(walks(2), num_workers=0) as envs:
        first = vecenv.evaluate(envs, choose, 3)
        assert numbers(vecenv.evaluate(envs, choose, 3, seed=first[0].seed)) == numbers(first)
        assert vecenv.evaluate(envs, choose, 3)[0].seed != first[0].seed


def test_results_are_told_as_they_come_and_listed_in_order() -> None:
    told: list[Any] = []
    with opened(walks(3), num_workers=0) as envs:
        results = vecenv.evaluate(envs, choose, 7, seed=SEED, on_episode=told.append)
    assert [each.index for each in results] == list(range(7))
    assert sorted(told, key=lambda each: each.index) == results
    assert told != results, "the shortest are done first"


def test_an_evaluation_goes_through_the_statistics_of_a_wrapper() -> None:
    with opened(walks(3), num_workers=0) as envs:
        counted = vecenv.wrappers.RecordEpisodeStatistics(envs)
        results = vecenv.evaluate(counted, choose, 5, seed=SEED)
    for each, plain in zip(results, wanted(5), strict=True):
        statistics = each.info.pop("episode")
        assert (statistics["l"], statistics["r"]) == (each.length, pytest.approx(each.episode_return))
        assert each.info == plain[6]


def test_other_wrappers_see_every_observation() -> None:
    with opened(walks(3), num_workers=0) as envs:
        scaled: Any = gymnasium.wrappers.vector.TransformObservation(envs, lambda seen: seen * 0 + 1)
        seen: list[Any] = []

        def policy(observations: Any) -> Any:
            seen.append(observations)
            return np.zeros(len(observations), int)

        results = vecenv.evaluate(scaled, policy, 4, seed=SEED)
    assert all((each == 1).all() for each in seen)
    assert [each.length for each in results] == [each[3] for each in wanted(4)]


def test_frames_of_chosen_episodes() -> None:
    with opened(walks(2, render_mode="rgb_array"), num_workers=1) as envs:
        results = vecenv.evaluate(envs, choose, 5, seed=SEED, frames=[1, 4])
    assert numbers(results) == wanted(5)
    for each in results:
        pictures = range(each.length + 1) if each.index in (1, 4) else ()
        assert [int(frame[0, 0, 0]) for frame in each.frames] == list(pictures)


def test_frames_are_taken_beside_a_worker_that_was_dead_before() -> None:
    with opened(walks(2, render_mode="rgb_array"), num_workers=2) as envs:
        envs.reset(seed=1)
        os.kill(envs.processes[1].pid, signal.SIGKILL)
        with pytest.raises(WorkerDied):
            envs.step(np.zeros(2, int))
        results = vecenv.evaluate(envs, choose, 5, seed=SEED, frames=[0])
    assert numbers(results) == wanted(5)
    assert len(results[0].frames) == results[0].length + 1


def test_progress_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("tqdm")
    with opened(walks(2), num_workers=0) as envs:
        vecenv.evaluate(envs, choose, 5, seed=SEED, progress=True)
    assert "5/5" in capsys.readouterr().err


# -- failures -------------------------------------------------------------------------------------------------------


def with_faults(faults: dict[int, str], tmp_path: Path, num_envs: int, count: int, **how: Any) -> list[Any]:
    """Results of walks that go wrong; all others have to be those of a plain loop."""
    engine = how.pop("engine", {"num_workers": 2})
    with opened(walks(num_envs, faults=faults, marks=str(tmp_path)), **engine) as envs:
        results = vecenv.evaluate(envs, choose, count, seed=SEED, **how)
    assert [each.index for each in results] == list(range(count))
    for each, plain in zip(numbers(results), wanted(count), strict=True):
        if faults.get(each[1], "once").endswith("once"):
            assert each == plain
    return results



@pytest.mark.filterwarnings("ignore:.*:UserWarning")
@pytest.mark.parametrize("num_envs", [1, 4])
def test_what_raises_is_begun_again_and_then_has_its_error(num_envs: int, tmp_path: Path) -> None:
    results = with_faults({SEED + 2: "raise", SEED + 5: "raise once"}, tmp_path, num_envs, 8, engine={"num_workers": 0})
    failed, healed = results[2], results[5]
    assert isinstance(failed.error, ArithmeticError)
    assert "walk 302 slipped" in str(failed.error)
    assert math.isnan(failed.episode_return)
    assert (failed.attempts, failed.length) == (2, wanted(3)[2][3] // 2)
    assert (healed.attempts, healed.error) == (2, None)


@pytest.mark.filterwarnings("ignore:.*:UserWarning")
@pytest.mark.parametrize(("num_envs", "retries"), [(4, 0), pytest.param(4, 1, marks=pytest.mark.long), (1, 1)])
def test_what_kills_its_worker_costs_the_others_nothing(num_envs: int, retries: int, tmp_path: Path) -> None:
    faults = {SEED + 1: "die", **({SEED + 4: "die once"} if retries else {})}
    engine = {"num_workers": min(num_envs, 2)}
    results = with_faults(faults, tmp_path, num_envs, 8, retries=retries, engine=engine)
    assert isinstance(results[1].error, WorkerDied)
    assert [each.index for each in results if each.error is not None] == [1]


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:.*:UserWarning")
def test_what_hangs_is_ended(tmp_path: Path) -> None:
    results = with_faults({SEED + 3: "hang", SEED + 5: "hang once"}, tmp_path, 4, 8, retries=1, timeout=0.5)
    assert isinstance(results[3].error, WorkerDied)
    assert "time.sleep(600)" in str(results[3].error) or "_go_wrong" in str(results[3].error), "it says where"
    assert [each.index for each in results if each.error is not None] == [3]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*:UserWarning")
@pytest.mark.parametrize("policy", ["raise", "restart"])
@pytest.mark.parametrize("num_envs", [1, 3, 8, 64])
def test_all_faults_in_any_number_of_environments(num_envs: int, policy: str, tmp_path: Path) -> None:
    faults = {SEED + 2: "raise", SEED + 7: "die", SEED + 11: "hang", SEED + 13: "raise once", SEED + 17: "hang once"}
    faults[SEED + 19] = "die once"
    engine = {"num_workers": min(num_envs, 4), "on_failure": policy, "restart_limit": 1000}
    results = with_faults(faults, tmp_path, num_envs, 30, timeout=0.5, retries=1, engine=engine)
    assert [each.index for each in results if each.error is not None] == [2, 7, 11]


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:.*:UserWarning")
def test_an_engine_that_restarts_by_itself_gives_the_same(tmp_path: Path) -> None:
    faults = {SEED + 1: "raise", SEED + 2: "die", SEED + 5: "die once"}
    results = with_faults(faults, tmp_path, 4, 8, engine={"num_workers": 2, "on_failure": "restart", "restart_limit": 100})
    assert [each.index for each in results if each.error is not None] == [1, 2]


class Late(Exception):
    """What a time limit raises."""


class Alarms(gymnasium.Env[Any, Any]):
    """Is hit by a time limit in one of its steps, or in a reset with options."""

    observation_space = gymnasium.spaces.Box(0, 1, (1,))
    action_space = gymnasium.spaces.Discrete(2)

    def __init__(self, left: int) -> None:
        self.left = left

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        if options:
            signal.raise_signal(signal.SIGUSR2)
        return np.zeros(1, np.float32), {}

    def step(self, action: Any) -> Any:
        self.left -= 1
        if self.left == 0:
            signal.raise_signal(signal.SIGUSR2)
        return np.zeros(1, np.float32), 1.0, self.left % 7 == 0, False, {}


@pytest.fixture
def limit() -> Iterator[None]:
    def late(number: int, frame: object) -> None:
        raise Late

    before = signal.signal(signal.SIGUSR2, late)
    yield
    assert signal.signal(signal.SIGUSR2, before) is late


@pytest.mark.usefixtures("limit")
@pytest.mark.parametrize("where", ["step", "reset"])
def test_a_time_limit_is_no_failure_of_an_episode(where: str) -> None:
    """In the calling process it falls into environments most of the time."""
    late = vecenv.Episode(options={"late": True})
    with opened([lambda: Alarms(100 if where == "step" else 0)] * 2, num_workers=0) as envs:
        with pytest.raises(Late):
            vecenv.evaluate(envs, still, 1000 if where == "step" else [late] * 9, seed=1, retries=1)
        if where == "reset":
            assert len(vecenv.evaluate(envs, still, 4, seed=1)) == 4


def still(seen: Any) -> Any:
    return np.zeros(len(seen), int)


@pytest.mark.usefixtures("limit")
def test_a_time_limit_comes_out_of_a_step_that_a_reset_drops() -> None:
    with opened([lambda: Alarms(1)] * 2, num_workers=0) as envs:
        envs.reset(seed=1)
        envs.step_async(np.zeros(2, int))
        with pytest.raises(Late):
            dropping_pending(envs, envs.reset)
        assert dropping_pending(envs, envs.reset)[0].shape == (2, 1)
