"""``vecenv.EpisodePrefetcher``: the results of a row depend only on its seed and on the number of its episode."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from functools import partial
from typing import Any

import gymnasium
import numpy as np
import psutil
import pytest
from sampling import each_once
from signals import Alarm, interrupt_at, signal_handler
from without_spares import Walk, derive_seed, make_reference

import vecenv
from vecenv import MultiAgentVecEnv
from vecenv.errors import InfoError, SnapshotMismatch
from vecenv.testing import assert_identical
from vecenv.wrappers import prefetch

MODES = ["NextStep", "SameStep"]


def make_prefetcher(env_fn: Any, num_envs: int = 3, **options: Any) -> Any:
    return vecenv.make_vec(env_fn, num_envs, vector_kwargs={"context": "fork", "spare_workers": 2, **options})


def spare_places(envs: Any) -> list[int]:
    """Return the places (rows of the inner engine) of environments that currently run no episode of a row."""
    return [place for place in range(envs.envs.num_envs) if place not in envs.places]


def play(envs: Any, steps: int, seed: int | None = 7, action_seed: int = 1) -> list[Any]:
    """Return the results of a reset, if there is a seed, and of some steps."""
    rng = np.random.default_rng(action_seed)
    results = [] if seed is None else [envs.reset(seed=seed)]
    return results + [envs.step(rng.integers(0, 3, envs.num_envs)) for _ in range(steps)]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("spares", [1, pytest.param(3, marks=pytest.mark.long), pytest.param(7, marks=pytest.mark.long)])
def test_results_equal_those_without_spares(mode: str, spares: int, closes: Any) -> None:
    reference = play(make_reference([Walk] * 3, autoreset_mode=mode), 40)
    envs = closes(make_prefetcher(Walk, autoreset_mode=mode, spare_workers=spares))
    assert_identical(play(envs, 40), reference)


@pytest.mark.long
@pytest.mark.parametrize("mode", MODES)
def test_duration_of_resets_does_not_change_results(mode: str, closes: Any) -> None:
    reference = play(make_reference([Walk] * 3, autoreset_mode=mode), 30)
    envs = closes(make_prefetcher(partial(Walk, reset=0.02, uneven=True), autoreset_mode=mode))
    for _ in range(2):  # twice, because a prefetched reset may be running when the caller resets
        assert_identical(play(envs, 30), reference)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("mode", MODES)
def test_resets_by_the_caller_continue_the_episode_count(mode: str, closes: Any) -> None:
    envs, reference = closes(make_prefetcher(Walk, autoreset_mode=mode)), make_reference([Walk] * 3, autoreset_mode=mode)
    assert_identical(play(envs, 9), play(reference, 9))
    for arguments in (
        {}, {"options": {"reset_mask": np.array([True, False, True])}}, {"options": {"scale": 3.0}},
        {"seed": [4, 5, 6], "options": {"reset_mask": np.array([False, True, False])}}, {"seed": [1, 1, 1]},
    ):  # fmt: skip
        options = dict(arguments.get("options", {})) or None  # a copy, because a reset may remove the mask
        assert_identical(envs.reset(**arguments), reference.reset(seed=arguments.get("seed"), options=options))
        assert_identical(play(envs, 8, seed=None), play(reference, 8, seed=None))


@pytest.mark.long
@pytest.mark.parametrize("options", [{"shared_memory": False}, {"copy": False}, {"context": "forkserver"}])
@pytest.mark.parametrize("mode", MODES)
def test_results_with_every_transport_equal_those_without_spares(options: dict[str, Any], mode: str) -> None:
    if "context" in options and mode == "NextStep":  # so that each start method runs with one mode
        options = {"context": "spawn"}
    reference = play(make_reference([Walk] * 2, autoreset_mode=mode), 12)
    envs = make_prefetcher(Walk, 2, **{"autoreset_mode": mode, "spare_workers": 1, **options})
    rng = np.random.default_rng(1)
    assert_identical(envs.reset(seed=7), reference[0])
    for expected in reference[1:]:
        assert_identical(envs.step(rng.integers(0, 3, 2)), expected)
    envs.close()


@pytest.mark.long
def test_resets_without_a_seed_begin_different_episodes(closes: Any) -> None:
    envs = closes(make_prefetcher(Walk))
    first, second = (envs.reset()[0].copy() for _ in range(2))
    assert not (first[:, 1] == second[:, 1]).any()
    assert not (envs.reset()[0][:, 1] == first[:, 1]).any()


# -- waiting times ------------------------------------------------------------------------------------------------------


def measure_waiting_time(envs: Any, steps: int) -> float:
    """Take some steps. Return the total time by which they exceeded 0.1 s, because rows waited for resets."""
    rng = np.random.default_rng(1)
    envs.reset(seed=7)
    time.sleep(0.5)
    durations = []
    for _ in range(steps):
        started = time.perf_counter()
        envs.step(rng.integers(0, 3, envs.num_envs))
        durations.append(time.perf_counter() - started)
    return sum(max(duration - 0.1, 0.0) for duration in durations)


@pytest.mark.long
@pytest.mark.parametrize("mode", MODES)
def test_steps_do_not_wait_for_prefetched_resets(mode: str, closes: Any) -> None:
    env_fn = partial(Walk, reset=0.4, lengths=(4, 5))
    envs = make_prefetcher(env_fn, 2, spare_workers=2, autoreset_mode=mode)
    assert measure_waiting_time(envs, 5) < 0.25
    envs.close()
    engine = closes(vecenv.AsyncVectorEnv([env_fn] * 2, context="fork", autoreset_mode=mode))
    assert measure_waiting_time(engine, 5) > 0.25, "the resets of the environment are too fast for this test"


@pytest.mark.long
def test_row_waits_only_for_the_rest_of_a_prefetched_reset(closes: Any) -> None:
    envs = closes(make_prefetcher(partial(Walk, reset=0.6, lengths=(4, 5)), 1, spare_workers=1))
    envs.reset(seed=7)
    time.sleep(0.4)
    started = time.perf_counter()
    for _ in range(5):
        envs.step(np.zeros(1, np.int64))
    assert time.perf_counter() - started < 0.5


class QuickResetEnv(Walk):
    """An environment that resets quickly if it receives options. ``started`` is the time at which the latest reset began."""

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[np.ndarray, dict[str, Any]]:
        self.started = time.monotonic()
        usual_duration = self._reset
        if options:
            self._reset = 0.0
        try:
            return super().reset(seed=seed, options=options)
        finally:
            self._reset = usual_duration


@pytest.mark.long
def test_busy_spare_prefetches_the_new_episode_later(closes: Any) -> None:
    """While the spare resets for the next episode, the caller's second reset replaces that episode with another."""
    envs = closes(make_prefetcher(partial(QuickResetEnv, reset=0.3, lengths=(40, 41)), 1, spare_workers=1))
    for seed in (7, 8):
        envs.reset(seed=seed, options={"quick": True})
    for _ in range(39):
        envs.step(np.zeros(1, np.int64))
        time.sleep(0.05)
    last_step_started = time.monotonic()
    assert envs.step(np.zeros(1, np.int64))[2].all()
    envs.step(np.zeros(1, np.int64))
    assert envs.get_attr("started")[0] < last_step_started


# -- calls on environments ----------------------------------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.parametrize("mode", MODES)
def test_calls_reach_the_current_environment_of_a_row(mode: str, closes: Any) -> None:
    envs, reference = closes(make_prefetcher(Walk, autoreset_mode=mode)), make_reference([Walk] * 3, autoreset_mode=mode)
    assert_identical(envs.reset(seed=7), reference.reset(seed=7))
    for _ in range(12):
        assert_identical(envs.step(np.ones(3, np.int64)), reference.step(np.ones(3, np.int64)))
        steps_left = reference.get_attr("steps_left")
        assert_identical(envs.get_attr("steps_left"), steps_left)
        assert_identical(envs.exec_func(lambda env: env.unwrapped.steps_left, [1]), (None, steps_left[1], None))


@pytest.mark.long
@pytest.mark.parametrize("mode", MODES)
def test_set_attr_applies_to_prefetched_episodes(mode: str, closes: Any) -> None:
    envs, reference = closes(make_prefetcher(Walk, autoreset_mode=mode)), make_reference([Walk] * 3, autoreset_mode=mode)
    assert_identical(play(envs, 4), play(reference, 4))
    envs.set_attr("level", 5.0)
    for env in reference.envs:
        env.unwrapped.level = 5.0
    assert_identical(play(envs, 20, seed=None), play(reference, 20, seed=None))


@pytest.mark.long
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("on_failure", ["raise", "restart"])
@pytest.mark.parametrize("victims", ["spares", "rows", "all", "an environment that raises"])
@pytest.mark.parametrize("when", ["before", "after"])
def test_set_attr_applies_to_rebuilt_environments(mode: str, on_failure: str, victims: str, when: str, closes: Any) -> None:
    """Environments fail before or after the attribute is set. Afterwards any environment may run an episode of any row."""
    env_raises = victims == "an environment that raises"
    env_fn = partial(Walk, raises=third_seed(1)) if env_raises else Walk
    options = {"on_failure": vecenv.Restart(100)} if on_failure == "restart" else {}
    envs = closes(make_prefetcher(env_fn, autoreset_mode=mode, **options))
    reference = make_reference([Walk] * 3, autoreset_mode=mode)

    def cause_failures() -> None:
        if env_raises:
            envs.reset(seed=7)
            with contextlib.suppress(ValueError):
                for _ in range(30):
                    envs.step(np.ones(3, np.int64))
        else:
            places = {"spares": spare_places(envs), "rows": envs.places, "all": range(envs.envs.num_envs)}[victims]
            for place in list(places):
                os.kill(envs.envs.processes[place].pid, signal.SIGKILL)
            time.sleep(0.1)
            for _ in places:
                with contextlib.suppress(vecenv.errors.WorkerDied):
                    envs.reset(seed=3)
        envs.reset(seed=3)

    envs.reset(seed=1)
    if when == "before":
        cause_failures()
    envs.set_attr("level", 2.0)
    envs.set_attr("level", 5.0)
    if when == "after":
        cause_failures()
    for env in reference.envs:
        env.unwrapped.level = 5.0
    assert_identical(play(envs, 30, seed=8), play(reference, 30, seed=8))


def select_own_info(infos: dict[str, Any], index: int) -> dict[str, Any]:
    """Return the info at ``index`` of a batch, without the keys that vecenv adds."""
    return {key: infos[key][index] for key in ("length", "steps_left", "name") if key in infos and infos[f"_{key}"][index]}


class RaisingEnv(Walk):
    """An environment that raises for action 1."""

    def step(self, action: Any) -> Any:
        if action == 1:
            raise ArithmeticError("action 1")
        return super().step(action)


class RowByRowChecker:
    """A checker that sends and receives rows of a prefetcher, and compares the results with those without spares."""

    def __init__(self, env_fn: Any, num_envs: int, **options: Any) -> None:
        self.envs = make_prefetcher(env_fn, num_envs, **options)
        mode = options.get("autoreset_mode", "NextStep")
        # one reference per row, because each row advances at its own pace
        self.references = [make_reference([env_fn] * num_envs, autoreset_mode=mode) for _ in range(num_envs)]
        self.rng = np.random.default_rng(3)
        self.num_envs = num_envs
        self.expected: dict[int, Any] = {}  # row in flight -> its values and info

    def expect(self, row: int, result: tuple[Any, ...]) -> None:
        *values, infos = result
        info = select_own_info(infos, row)
        self.expected[row] = [value[row] for value in values], info

    def expect_reset(self, row: int, observations: Any, infos: Any) -> None:
        zeros, no_flags = np.zeros(self.num_envs), np.zeros(self.num_envs, np.bool_)
        self.expect(row, (observations, zeros, no_flags, no_flags, infos))

    def reset(self, **arguments: Any) -> None:
        self.envs.reset(**arguments)
        for reference in self.references:
            reference.reset(**arguments)

    def reset_async(self, **arguments: Any) -> None:
        """Begin a reset of all rows, which ``recv`` returns."""
        self.envs.reset_async(**arguments)
        for row, reference in enumerate(self.references):
            self.expect_reset(row, *reference.reset(**arguments))

    def reset_rows(self, rows: list[int], **arguments: Any) -> None:
        self.envs.reset_async(env_id=rows, **arguments)
        mask = np.isin(np.arange(self.num_envs), rows)
        for row in rows:
            self.expect_reset(row, *self.references[row].reset(**(arguments or {"options": {"reset_mask": mask}})))

    def send(self, rows: list[int]) -> None:
        actions = self.rng.integers(0, 3, len(rows))
        self.envs.send(actions, np.array(rows))
        for row, action in zip(rows, actions, strict=True):
            self.expect(row, self.references[row].step(np.full(self.num_envs, action)))

    def recv(self, count: int) -> list[int]:
        *values, infos = self.envs.recv(count=count)
        rows = infos["env_id"].tolist()
        for position, row in enumerate(rows):
            expected, info = self.expected.pop(row)
            assert_identical([value[position] for value in values], expected)
            assert select_own_info(infos, position) == info
        return rows


@pytest.mark.sampled("NextStep-1")
@pytest.mark.parametrize(("mode", "spares"), each_once(MODES, [1, 3]))
def test_results_of_first_ready_rows_equal_those_without_spares(spares: int, mode: str) -> None:
    walk = partial(Walk, reset=0.002, step=0.001, uneven=True)
    checker = RowByRowChecker(walk, 4, spare_workers=spares, autoreset_mode=mode)
    with contextlib.closing(checker.envs):
        assert checker.envs.capabilities.first_ready
        checker.reset(seed=7)
        checker.send([0, 1, 2, 3])
        for _ in range(150):
            checker.send(checker.recv(int(checker.rng.integers(1, 4))))
        checker.send(checker.recv(len(checker.expected)))
        checker.recv(4)
        checker.envs.step(np.array([1, 0, 2, 1]))  # afterwards, all rows can be stepped at once


def test_rows_can_be_reset_one_by_one() -> None:
    checker = RowByRowChecker(Walk, 3)
    with contextlib.closing(checker.envs):
        checker.reset(seed=7)
        checker.send([0, 1, 2])
        for index in range(60):
            rows = checker.recv(2)
            if index % 5 == 0:
                checker.reset_rows(rows[:1])
                checker.send(rows[1:])
            elif index % 7 == 0:
                checker.reset_rows(rows, seed=index)
            else:
                checker.send(rows)


def test_full_reset_can_be_received_row_by_row() -> None:
    checker = RowByRowChecker(Walk, 3, batch_size=2)
    with contextlib.closing(checker.envs):
        checker.reset(seed=3)
        checker.reset_async(seed=7)
        rows = [row for _ in range(3) for row in checker.recv(1)]
        for _ in range(40):  # several episodes, with seeds that depend on the seed of this reset
            checker.send(rows)
            rows = checker.recv(3)


def test_rows_can_step_while_others_are_still_resetting() -> None:
    checker = RowByRowChecker(partial(Walk, reset=0.002, uneven=True), 4, batch_size=2)
    with contextlib.closing(checker.envs):
        checker.reset_async(seed=7)
        with pytest.raises(TypeError):
            checker.envs.recv("soon")
        with pytest.raises(gymnasium.error.AlreadyPendingCallError):
            checker.envs.send(np.zeros(1, np.int64), [0])
        for _ in range(40):
            checker.send(checker.recv(2))
        checker.recv(4)
        checker.envs.reset_async(options={"reset_mask": np.array([True, False, True, False])})
        assert checker.envs.recv(count=1)[-1]["env_id"] in (0, 2)
        checker.envs.send(np.zeros(2, np.int64), [1, 3])
        assert set(checker.envs.recv(count=3)[-1]["env_id"]) > {1, 3}


def test_masked_reset_ends_no_episode_of_other_rows() -> None:
    """One row is in flight, and the other ended an episode in the last step before the full reset."""
    envs, reference = make_prefetcher(Walk, 2, spare_workers=1), make_reference([Walk] * 2)
    envs.reset(seed=7)
    while not envs.step(np.ones(2, np.int64))[2][1]:
        pass
    assert_identical(envs.reset(seed=9), reference.reset(seed=9))
    envs.send(np.ones(1, np.int64), np.array([0]))
    envs.reset(options={"reset_mask": np.array([True, False])})
    for field, expected in zip(envs.step(np.ones(2, np.int64))[:4], reference.step(np.ones(2, np.int64))[:4], strict=True):
        assert_identical(field[1], expected[1])
    envs.close()


@pytest.mark.parametrize("mode", ["NextStep", pytest.param("SameStep", marks=pytest.mark.long)])
def test_snapshots_contain_the_seeds_of_later_episodes(mode: str) -> None:
    with contextlib.closing(make_prefetcher(Walk, autoreset_mode=mode)) as envs:
        play(envs, 11)
        snapshots, state = envs.save(), envs.state_dict()
        expected = play(envs, 30, seed=None, action_seed=2)
        envs.load(snapshots)
        assert_identical(play(envs, 30, seed=None, action_seed=2), expected)
        envs.load_state_dict(state)
        assert_identical(play(envs, 30, seed=None, action_seed=2), expected)
        play(envs, 3)
        envs.load([snapshots[1]] * 3)
        for observations, rewards, *_ in play(envs, 30, seed=None):  # all rows are equal
            assert len({row.tobytes() for row in observations[:, 1:]}) == len(set(rewards)) == 1
    with contextlib.closing(make_prefetcher(Walk, spare_workers=1, autoreset_mode=mode)) as other_envs:
        other_envs.load(snapshots)
        assert_identical(play(other_envs, 30, seed=None, action_seed=2), expected)
    engine = vecenv.AsyncVectorEnv([Walk] * 3, context="fork", autoreset_mode=mode)
    with contextlib.closing(engine), contextlib.closing(make_prefetcher(Walk, autoreset_mode=mode)) as envs:
        engine.reset(seed=5)
        envs.load(engine.save())  # these snapshots contain no seeds of later episodes
        play(envs, 30, seed=None)
        assert_identical(envs.load_state_dict(engine.state_dict()), engine.load_state_dict(envs.state_dict()))
        play(envs, 5, seed=None)
        assert engine.stats()["steps"] == 0
        engine.load_state_dict(envs.state_dict([0, 2]), [1, 2])
        assert engine.stats()["steps"] == envs.stats()["steps"] > 0
        for row, loaded_row in ((0, 1), (2, 2)):
            assert_identical(envs.observations[row], engine.observations[loaded_row])


class NoneInfoEnv(Walk):
    """An environment with an info of ``None`` for action 2, and in every second reset."""

    resets = 0

    def reset(self, **arguments: Any) -> Any:
        self.resets += 1
        return super().reset(**arguments)[0], {} if self.resets % 2 else None

    def step(self, action: Any) -> Any:
        *results, _ = super().step(0)
        return (*results, None if action == 2 else {})


@pytest.mark.filterwarnings("ignore:.*it is dropped")
@pytest.mark.parametrize("mode", MODES)
def test_info_that_is_none_is_in_the_result_of_the_error_or_in_final_infos(mode: str, closes: Any) -> None:
    envs = closes(make_prefetcher(NoneInfoEnv, 2, spare_workers=1, autoreset_mode=mode))
    reference = closes(make_prefetcher(Walk, 2, spare_workers=1, autoreset_mode=mode))
    envs.reset(seed=1)
    reference.reset(seed=1)
    final_infos, errors = [], 0
    for actions in [[0, 2], [2, 2], [2, 2], [0, 0]] * 8:
        try:
            *results, infos = envs.step(np.array(actions))
            final_infos += list(infos.get("final_info", ()))
        except InfoError as error:
            *results, infos = error.result
            assert None in infos
            errors += 1
        assert_identical(results, list(reference.step(np.zeros(2, np.int64))[:4]))
    assert errors
    assert (None in final_infos) == (mode == "SameStep")


def test_invalid_arguments_are_refused_with_the_reason(closes: Any) -> None:
    envs = closes(make_prefetcher(Walk, 2, spare_workers=1, autoreset_mode="SameStep"))
    envs.reset(seed=1)
    mask = np.array([True, False])
    for call, text in (
        (lambda: envs.set_attr("level", [1.0, 2.0]), "one value per row"),
        (lambda: envs.set_next_options({"scale": 2.0}), "set_next_options"),
    ):
        with pytest.raises(NotImplementedError, match=text):
            call()
    for name in ("reset", "step", "close"):
        with pytest.raises(ValueError, match=f"Trying to call function `{name}` with `call`"):
            envs.call(name)
    with pytest.raises(SnapshotMismatch):
        envs.load(envs.save()[:1])
    with pytest.raises(SnapshotMismatch, match="it has no 'snapshots'"):
        envs.load_state_dict({name: value for name, value in envs.state_dict().items() if name != "snapshots"})
    with pytest.raises(TypeError, match=r"env 1: its seed must be an integer or None, got 2\.7"):
        envs.reset(seed=[1, 2.7])
    with pytest.raises(ValueError, match="got 1, expected 2"):
        envs.step(np.zeros(1, np.int64))
    assert envs.reset(options={"reset_mask": mask})[0].shape == (2, 3)


def test_refused_reset_can_be_followed_by_another(closes: Any) -> None:
    envs, reference = closes(make_prefetcher(Walk)), make_reference([Walk] * 3)
    assert_identical(play(envs, 5), play(reference, 5))
    mask, unpicklable = {"reset_mask": np.array([True, False, True])}, {"lock": threading.Lock()}
    envs.send(np.ones(3, np.int64), [0, 1, 2])
    with pytest.raises(TypeError, match="pickle"):
        envs.reset(options={**mask, **unpicklable})
    assert sorted(row for _ in range(3) for row in envs.recv(count=1)[-1]["env_id"]) == [0, 1, 2]
    reference.step(np.ones(3, np.int64))
    for arguments in ({"seed": -1}, {"seed": [0, 1, -1]}, {"seed": [0, 1, -1], "options": mask}):
        with pytest.raises(ValueError, match="seeds must not be negative, got -1"):
            envs.reset(**arguments)
    with pytest.raises(ValueError, match="seeds must not be negative, got -2"):
        envs.reset_async([-2], env_id=[1])
    for call in (
        lambda: envs.reset_async(None, unpicklable, env_id=[1]), lambda: envs.reset(options={**mask, **unpicklable}),
    ):  # fmt: skip
        with pytest.raises(TypeError, match="pickle"):
            call()
    assert_identical(play(envs, 20, seed=None), play(reference, 20, seed=None))
    with pytest.raises(TypeError, match="pickle"):
        envs.reset(options=unpicklable)
    for call in (envs.reset_wait, lambda: envs.step(np.ones(3, np.int64)), lambda: envs.reset(options=mask)):
        with pytest.raises(gymnasium.error.ResetNeeded, match="refused"):
            call()
    assert not envs.in_flight.size
    for seed in (None, 7):  # the refused reset did not advance the episode count
        assert_identical(envs.reset(seed=seed), reference.reset(seed=seed))
        assert_identical(play(envs, 20, seed=None), play(reference, 20, seed=None))


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"num_workers": 1}, "num_workers=None"), ({"num_workers": "auto"}, "num_workers=None"),
        ({"num_workers": 0}, "num_workers=None"), ({"use_caller": True}, "calling process"),
        ({"max_concurrency": 1}, "while all the others step"), ({"autoreset_mode": "Disabled"}, "begin by autoreset"),
        ({"spare_workers": -1}, "non-negative"), ({"spare_workers": True}, "non-negative"),
        ({"env_threads": 2}, "one environment"),
    ],
)  # fmt: skip
def test_incompatible_options_are_refused(options: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=f"spare_workers.*{text}"):
        make_prefetcher(Walk, **options)


@pytest.mark.parametrize("batch_size", [4, "auto"])
def test_invalid_batch_size_is_refused(batch_size: Any) -> None:
    with pytest.raises(ValueError, match=r"`batch_size` must be None or an int within 1\.\.3 with spare workers, got"):
        make_prefetcher(Walk, batch_size=batch_size)


def test_methods_under_their_other_names_concern_rows(closes: Any) -> None:
    envs = closes(make_prefetcher(Walk, 2))
    envs.reset_send(seed=1)
    assert len(envs.reset_fetch()[0]) == 2
    envs.step_send(np.zeros(2, np.int64))
    assert len(envs.step_fetch()[0]) == 2
    with pytest.raises(NotImplementedError, match="begin calls"):
        envs.call_send("level")


def test_calls_after_close_raise_closed_environment_error(closes: Any) -> None:
    envs = closes(make_prefetcher(Walk))
    envs.reset(seed=1)
    envs.step_async(np.zeros(3, np.int64))
    envs.close()
    for call in (envs.step_wait, envs.reset_wait, envs.recv, envs.reset, lambda: envs.step(np.zeros(3, np.int64))):
        with pytest.raises(gymnasium.error.ClosedEnvironmentError, match="after a call to `close"):
            call()


def test_make_vec_accepts_spare_workers_or_refuses_them_with_the_reason() -> None:
    envs = vecenv.make_vec("CartPole-v1", 2, vector_kwargs={"spare_workers": 1, "context": "fork"})
    assert envs.num_workers == 2
    assert "spares=1" in repr(envs)
    assert envs.capabilities.spare_workers
    assert envs.reset(seed=1)[0].shape == (2, 4)
    envs.close()
    for backend in ("ray", "envpool", "brax", "native"):
        with pytest.raises((NotImplementedError, ImportError), match=f"backend '{backend}'"):
            vecenv.make_vec("CartPole-v1", 2, backend, vector_kwargs={"spare_workers": 1})
    with pytest.raises(ValueError, match="process of its own"):
        vecenv.make_vec("CartPole-v1", 2, "serial", vector_kwargs={"spare_workers": 1})
    with pytest.raises(NotImplementedError, match="MultiAgentVecEnv cannot have spare workers"):
        MultiAgentVecEnv([Walk], spare_workers=1)


def test_env_fns_that_differ_are_refused() -> None:
    with pytest.raises(ValueError, match=r"env_fns\[1\] differs from"):
        vecenv.EpisodePrefetcher.from_env_fns([partial(Walk, lengths=(1, row + 2)) for row in range(3)], 1)


def test_engine_refuses_spare_workers_and_names_the_wrapper() -> None:
    with pytest.raises(TypeError, match=r"vecenv\.EpisodePrefetcher\(vecenv\.AsyncVectorEnv"):
        vecenv.AsyncVectorEnv([Walk] * 2, spare_workers=1)  # type: ignore[call-arg]


def test_prefetcher_wraps_an_existing_engine() -> None:
    engine = vecenv.AsyncVectorEnv([Walk] * 4, context="fork", autoreset_mode="Disabled")
    with contextlib.closing(vecenv.EpisodePrefetcher(engine, 2, "SameStep")) as envs:
        assert_identical(play(envs, 12), play(make_reference([Walk] * 2, autoreset_mode="SameStep"), 12))
        envs.set_attr("level", 4.0)
        assert envs.get_attr("level") == (4.0, 4.0)
        for spares, mode, text in ((0, "NextStep", "spares"), (4, "NextStep", "spares"), (1, "Disabled", "autoreset_mode")):
            with pytest.raises(ValueError, match=text):
                vecenv.EpisodePrefetcher(engine, spares, mode)
    with (
        contextlib.closing(vecenv.AsyncVectorEnv([Walk] * 2, num_workers=0)) as resetting_engine,
        pytest.raises(ValueError, match="autoreset_mode='Disabled'"),
    ):
        vecenv.EpisodePrefetcher(resetting_engine, 1)


# -- failures -----------------------------------------------------------------------------------------------------------


def third_seed(row: int) -> int:
    """Return the seed of a row's third episode after ``reset(seed=7)``."""
    return derive_seed(7 + row, row, 2)


@pytest.mark.long
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("fault", "error"), [("raises", ValueError), ("dies", vecenv.errors.WorkerDied)])
def test_failed_prefetch_raises_when_its_row_would_be_reset(
    mode: str, fault: str, error: type[Exception], closes: Any
) -> None:
    """The error may have happened earlier. A full reset recovers the vector environment."""
    envs = closes(make_prefetcher(partial(Walk, **{fault: third_seed(1)}), autoreset_mode=mode))
    reference = make_reference([Walk] * 3, autoreset_mode=mode)
    for _ in range(2):
        assert_identical(envs.reset(seed=7), reference.reset(seed=7))
        ended = 0  # the number of episodes of row 1 that have ended
        while ended < 2:
            expected = reference.step(np.ones(3, np.int64))
            ended += int(expected[2][1])
            if ended == 2 and mode == "SameStep":
                break  # this step would also reset the row, so it raises
            assert_identical(envs.step(np.ones(3, np.int64)), expected)
        with pytest.raises(error, match="no such level" if fault == "raises" else r"env 1\b"):
            envs.step(np.ones(3, np.int64))
        with pytest.raises(vecenv.errors.EnvFailed):
            envs.step(np.zeros(3, np.int64))


def test_np_random_and_np_random_seed_are_those_of_the_rows_and_cannot_be_set(closes: Any) -> None:
    envs = closes(make_prefetcher(Walk))
    envs.reset(seed=7)
    assert envs.np_random_seed == (7, 8, 9)
    while envs.places == [0, 1, 2]:
        envs.step(np.ones(3, np.int64))
    moved = [place >= 3 for place in envs.places]
    assert envs.np_random_seed == tuple(derive_seed(7 + row, row, 1) if moved[row] else 7 + row for row in range(3))
    generators = envs.np_random
    assert [type(generator) for generator in generators] == [np.random.Generator] * 3
    with pytest.raises(AttributeError):
        envs.np_random = generators


@pytest.mark.long
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("fault", ["raises", "dies"])
def test_failed_prefetch_is_restarted(mode: str, fault: str, closes: Any) -> None:
    """Only the row of the episode reports a restart, and only once. The other rows are not affected."""
    envs = closes(make_prefetcher(partial(Walk, **{fault: third_seed(1)}), autoreset_mode=mode, on_failure="restart"))
    reference = make_reference([Walk] * 3, autoreset_mode=mode)
    assert_identical(envs.reset(seed=7), reference.reset(seed=7))
    restarted = 0
    for _ in range(60):
        result, expected = envs.step(np.ones(3, np.int64)), reference.step(np.ones(3, np.int64))
        for field in range(4):
            assert_identical(result[field][[0, 2]], expected[field][[0, 2]])
        if "restarted" in result[4]:
            restarted += int(result[4]["restarted"][1])
            assert (result[1][1], result[3][1]) == (0.0, True)
            last = expected[4]["final_obs"][1] if mode == "SameStep" else result[0][1]
            assert_identical(result[4]["final_obs"][1], last)
    assert restarted == 1
    assert envs.stats()["restarts"] == 2  # the second attempt has another seed


@pytest.mark.parametrize("mode", MODES)
def test_restart_in_a_reset_by_the_caller_ends_no_episode(mode: str, closes: Any) -> None:
    envs = closes(make_prefetcher(partial(Walk, raises=8), autoreset_mode=mode, on_failure="restart"))
    _, infos = envs.reset(seed=7)
    assert infos["restarted"].tolist() == [False, True, False]
    assert "final_obs" not in infos
    *_, infos = envs.step(np.ones(3, np.int64))
    assert "steps_left" in infos
    assert infos["_steps_left"].all()
    assert "restarted" not in infos


@pytest.mark.sampled(1)
@pytest.mark.parametrize("mode", MODES)
def test_row_continues_with_its_next_episode_after_a_restart(mode: str, closes: Any) -> None:
    """The episode that the rebuilt environment has begun is skipped, because its seed depends on the failure."""
    envs = closes(make_prefetcher(RaisingEnv, autoreset_mode=mode, on_failure="restart"))
    envs.reset(seed=7)
    *_, truncations, infos = envs.step([0, 1, 0])
    assert truncations.tolist() == infos["_restarted"].tolist() == [False, True, False]
    if mode == "NextStep":
        assert "name" not in infos  # only resets have a name
        *_, truncations, infos = envs.step([0, 0, 0])
        assert not truncations.any()
    assert infos["name"][1] == f"walk {derive_seed(8, 1, 1)}"
    assert infos["_name"].tolist() == [False, True, False]
    assert "name" not in envs.step([0, 0, 0])[4]


@pytest.mark.parametrize("noticed_by", ["send", "abandon"])
def test_death_noticed_before_recv_is_reported_for_its_row(noticed_by: str, closes: Any) -> None:
    envs, actions = closes(make_prefetcher(Walk, 2, spare_workers=1)), np.ones(2, np.int64)
    envs.reset(seed=7)
    worker = envs.processes[envs.places[0]]
    os.kill(worker.pid, signal.SIGKILL if noticed_by == "send" else signal.SIGSTOP)
    if noticed_by == "send":
        worker.join()
    envs.send(actions, [0, 1])
    if noticed_by == "abandon":
        envs.abandon([0])
    with pytest.raises(vecenv.errors.WorkerDied) as caught:
        envs.recv(count=2)
    assert any("an episode of env 0" in note for note in caught.value.__notes__)
    assert envs.recv(count=1)[-1]["env_id"].tolist() == [1]
    with pytest.raises(vecenv.errors.EnvFailed, match="env 0"):
        envs.step(actions)
    envs.reset(options={"reset_mask": np.array([True, False])})
    assert len(envs.step(actions)[0]) == 2


def test_timeout_error_contains_rows_instead_of_places(closes: Any) -> None:
    envs = closes(make_prefetcher(Walk, 2, step_timeout=1.0))
    envs.reset(seed=7)
    while envs.places[1] == 1:  # until row 1 is at another place
        envs.step(np.ones(2, np.int64))
    pid = envs.processes[envs.places[1]].pid
    os.kill(pid, signal.SIGSTOP)
    try:
        envs.send(np.ones(1, np.int64), [1])
        for call in (lambda: envs.recv(0.1, count=1), envs.reset):
            with pytest.raises(vecenv.errors.StepTimeout) as caught:
                call()
            assert caught.value.envs == (1,)
            assert list(caught.value.where) == [1]
            assert caught.value.__notes__[-1] == "the numbers above are places; the envs without a reply are [1]"
    finally:
        os.kill(pid, signal.SIGCONT)
    envs.reset(seed=7)


def play_until_failure(envs: Any, *, kill: bool) -> None:
    while True:
        envs.step(np.ones(3, np.int64))
        if kill and envs.places[1] != 1:
            envs.exec_func(exit_process, [1])


def exit_process(env: Any) -> None:
    os._exit(1)


@pytest.mark.parametrize("fault", ["raises", "dies", "dies in a call"])
def test_errors_contain_rows_instead_of_places(fault: str, closes: Any, tmp_path: Any) -> None:
    """Row 1 is usually not at place 1 when it fails. If the test ends its worker, it never is."""
    options = {fault: third_seed(1)} if fault in ("raises", "dies") else {}
    envs = closes(make_prefetcher(partial(Walk, **options), record_failures=str(tmp_path)))
    envs.reset(seed=7)
    with pytest.raises((ValueError, vecenv.errors.WorkerDied)) as caught:
        play_until_failure(envs, kill=fault == "dies in a call")
    place, error, record = envs.places[1], caught.value, envs.errors[-1]
    assert f"'env {place}' is place {place} of 5, which ran an episode of env 1" in error.__notes__
    assert error.envs == (1,)
    if fault != "raises":
        assert record.error.envs == (1,)
        assert list(error.where) == list(record.error.where) == [1]
    assert (record.env, record.worker) == (1, place)
    for call in (lambda: envs.step(np.ones(3, np.int64)), lambda: envs.get_attr("level"), envs.save):
        if fault != "dies in a call":
            with pytest.raises(vecenv.errors.EnvFailed, match="env 1 failed"):
                call()
    assert envs.reset(seed=7)[0].shape == (3, 3)


def test_observations_and_last_received_are_indexed_by_row(closes: Any) -> None:
    envs = closes(make_prefetcher(Walk, 2))
    envs.reset(seed=7)
    while envs.places[0] == 0 or envs.places[1] == 1:
        observations, *_ = envs.step(np.ones(2, np.int64))
    assert_identical(envs.observations, observations)
    envs.send(np.ones(1, np.int64), [1])
    envs.recv(count=1)
    assert_identical(envs.last_received, np.array([1]))
    for call in (envs.reset, lambda: envs.step(np.ones(2, np.int64))):
        call()
        assert_identical(envs.last_received, np.array([0, 1]))
        envs.send(np.ones(1, np.int64), [1])
        envs.recv(count=1)
    for call in (lambda: envs.call_async("render"), envs.call_wait, lambda: envs.exec_func_send(print)):
        with pytest.raises(NotImplementedError, match="use call"):
            call()
    envs.close()
    for call in (lambda: envs.step(np.ones(2, np.int64)), envs.reset, lambda: envs.get_attr("level")):
        with pytest.raises(gymnasium.error.ClosedEnvironmentError):
            call()


@pytest.mark.long
def test_full_reset_restarts_dead_spares(closes: Any) -> None:
    envs = closes(make_prefetcher(Walk, 2))
    envs.reset(seed=3)
    for place in spare_places(envs):
        os.kill(envs.envs.processes[place].pid, signal.SIGKILL)
    time.sleep(0.2)
    assert_identical(play(envs, 20), play(make_reference([Walk] * 2), 20))


@pytest.mark.long
def test_close_during_a_prefetch_ends_all_workers() -> None:
    envs = make_prefetcher(partial(Walk, reset=0.3), 2)
    envs.reset(seed=3)
    pids = [process.pid for process in envs.envs.processes]
    started = time.perf_counter()
    envs.close()
    assert time.perf_counter() - started < 5
    assert len(pids) == 4
    assert not any(psutil.pid_exists(pid) for pid in pids)


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("mode", "stride"), [("NextStep", 5), ("SameStep", 7)])
def test_interrupted_step_is_pending_or_needs_a_reset(mode: str, stride: int, closes: Any) -> None:
    """After every interruption, a full reset makes the results correct again."""
    envs = closes(make_prefetcher(Walk, autoreset_mode=mode))
    pending = reset_needed = 0
    event, fired = 1, True
    while fired and event < 3000:
        reference = make_reference([Walk] * 3, autoreset_mode=mode)
        assert_identical(envs.reset(seed=event), reference.reset(seed=event), f"event {event}")
        with signal_handler(signal.SIGUSR2, Alarm):
            for _ in range(3):
                expected = reference.step(np.ones(3, np.int64))
                fired, result = interrupt_at(event, lambda: envs.step(np.ones(3, np.int64)), prefetch.__file__)
                if fired:
                    break
                assert_identical(result, expected, f"event {event}")
        if fired:
            try:
                assert_identical(envs.step_wait(), expected, f"event {event}")
                pending += 1
            except gymnasium.error.ResetNeeded:
                reset_needed += 1
            except gymnasium.error.NoAsyncCallError:  # the step was not submitted, or its result had been returned
                pass
        event += stride
    assert 50 < event < 3000
    assert pending > 0
    assert reset_needed > 0
