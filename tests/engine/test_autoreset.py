"""Episodes: what happens when one ends, what the next one is given, and workers that have reset before one is needed."""

from __future__ import annotations

import contextlib
import time
from functools import partial
from typing import Any

import gymnasium
import numpy as np
import psutil
import pytest
from envs import Options, ReturningEnv, ReusingEnv, assert_as_sync, counters, describe, opened, raises_logged, started
from gymnasium import spaces
from gymnasium.vector import AutoresetMode
from spare_twins import Walk, derived_seed, twin

import vecenv
from vecenv.multi_agent import MultiAgentVecEnv
from vecenv.testing import assert_identical

# --- Section 1.6: what happens when an episode ends, in each of the three modes -----------------

ZEROS = np.zeros(4, dtype=np.float32)


EPISODES: dict[str, Options] = {
    "of one step": {"lengths": (1,)},
    "of one step, without infos": {"lengths": (1,), "infos": False},
    "of different lengths": {"lengths": (1, 3, 2)},
    "that are truncated": {"lengths": (2, 3), "truncates": True},
}


@pytest.mark.parametrize("mode", AutoresetMode)
@pytest.mark.parametrize("kind", EPISODES)
def test_episodes_end_and_begin_as_in_sync_vector_env(
    engine: Options, shared_memory: bool, kind: str, mode: AutoresetMode
) -> None:
    """Each environment by itself: they begin in different episodes."""
    lengths = EPISODES[kind]["lengths"]
    fns = [counters(3, **{**EPISODES[kind], "lengths": lengths[row % len(lengths) :] + lengths})[row] for row in range(3)]
    assert_as_sync(fns, 12, autoreset_mode=mode, shared_memory=shared_memory, **engine)


def test_a_reset_info_may_override_what_is_reported_as_final(engine: Options) -> None:
    def build() -> ReturningEnv:
        return ReturningEnv([(ZEROS, {"final_info": {"mine": 1}})], [(ZEROS + 1, 1.0, True, False, {"theirs": 2})])

    with started([build] * 2, autoreset_mode="SameStep", **engine) as envs:
        infos = envs.step([0, 0])[4]
        assert infos["final_info"]["mine"].tolist() == [1, 1]
        assert "theirs" not in infos["final_info"]


def test_final_observations_stay_as_they_were_when_later_episodes_end(engine: Options) -> None:
    with started(counters(2, lengths=(1,)), autoreset_mode="SameStep", **engine) as envs:
        first = envs.step([0, 0])[4]["final_obs"]
        kept = [array.copy() for array in first]
        for _ in range(3):
            envs.step([0, 0])
        np.testing.assert_array_equal(np.stack(first), np.stack(kept))
        first[0][:] = 0  # a wrapper may overwrite it


def test_an_environment_that_reuses_its_arrays_still_gives_the_right_final_observation(
    engine: Options, shared_memory: bool
) -> None:
    with started([ReusingEnv] * 2, autoreset_mode="SameStep", shared_memory=shared_memory, **engine) as envs:
        envs.step([0, 0])
        observations, _, _, _, infos = envs.step([0, 0])
        assert observations[:, 1:3].tolist() == [[0, 2], [0, 2]]
        assert [final[1:3].tolist() for final in infos["final_obs"]] == [[2, 1], [2, 1]]
        assert infos["final_info"]["steps"].tolist() == [2, 2]


def test_disabled_mode_never_resets_and_passes_steps_after_the_end_through(engine: Options, shared_memory: bool) -> None:
    options = {"autoreset_mode": "Disabled", "shared_memory": shared_memory, **engine}
    with started(counters(2, lengths=(2,)), **options) as envs:
        for t in range(1, 5):
            observations, _, terminations, _, infos = envs.step([0, 0])
            assert observations[:, 1:3].tolist() == [[t, 1], [t, 1]]
            assert terminations.tolist() == [t >= 2] * 2
            assert set(infos) == {"steps", "_steps"}


class Reuses(gymnasium.Env[Any, Any]):
    """Hands out the same objects in every info, and its reset writes into them."""

    observation_space = action_space = spaces.Discrete(3)

    def __init__(self) -> None:
        self.array, self.inner = np.zeros(2), {"list": [0]}

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[int, dict[str, Any]]:
        self.array[:], self.inner["list"][0] = 7.0, 7
        return 0, {"array": self.array, "inner": self.inner}

    def step(self, action: Any) -> tuple[int, float, bool, bool, dict[str, Any]]:
        self.array[:], self.inner["list"][0] = 3.0, 3
        return 1, 0.0, bool(action), False, {"array": self.array, "inner": self.inner}


def test_the_final_info_is_that_of_the_end_also_where_the_reset_writes_into_it(engine: Options) -> None:
    with started([Reuses] * 2, autoreset_mode=AutoresetMode.SAME_STEP, **engine) as envs:
        infos = envs.step([1, 0])[4]
        assert infos["final_info"]["array"][0].tolist() == [3.0, 3.0]
        assert infos["final_info"]["inner"]["list"][0] == [3]
        assert infos["array"].tolist() == [[7.0, 7.0], [3.0, 3.0]]


# --- ``set_next_options``: what the episodes that autoreset begins are given --------------------


def given(infos: dict[str, Any], row: int) -> Any:
    """What the reset of a row was given, described; ``None`` if it had none."""
    return infos["reset_kwargs"][row] if "reset_kwargs" in infos and infos["_reset_kwargs"][row] else None


def resets(envs: Any, steps: int) -> list[list[Any]]:
    """What the resets of each row were given in so many steps."""
    found: list[list[Any]] = [[] for _ in range(envs.num_envs)]
    for _ in range(steps):
        infos = envs.step(np.zeros(envs.num_envs, np.int64))[4]
        for row, own in enumerate(found):
            if (kwargs := given(infos, row)) is not None:
                own.append(kwargs)
    return found


def of(options: Any, seed: int | None = None) -> str:
    return describe({"seed": seed, "options": options})


PLAIN = describe({})


@pytest.mark.parametrize(("mode", "steps"), [("NextStep", 7), ("SameStep", 5)])
def test_the_next_episode_of_each_row_has_its_own_and_later_ones_none(engine: Options, mode: str, steps: int) -> None:
    with started(counters(3, lengths=(2,)), autoreset_mode=mode, **engine) as envs:
        options = [{"level": 1}, None, {"level": 3}]
        envs.set_next_options(options, seed=[None, 5, 6])
        options[0]["level"] = 99  # type: ignore[index]
        assert resets(envs, steps) == [[of({"level": 1}), PLAIN], [of(None, 5), PLAIN], [of({"level": 3}, 6), PLAIN]]


def test_one_dict_is_for_all_and_an_int_seeds_them_in_order(engine: Options) -> None:
    with started(counters(3, lengths=(2,)), **engine) as envs:
        envs.set_next_options({"level": 4}, seed=20)
        assert resets(envs, 3) == [[of({"level": 4}, 20)], [of({"level": 4}, 21)], [of({"level": 4}, 22)]]


def test_some_rows_are_named_and_the_others_keep_what_they_have(engine: Options) -> None:
    with started(counters(3, lengths=(2,)), **engine) as envs:
        envs.set_next_options({"level": 1})
        envs.set_next_options([{"level": 2}, {"level": 0}], env_id=[2, 0])
        envs.reset(options={"level": "reset"})
        assert resets(envs, 3) == [[of({"level": 0})], [of({"level": 1})], [of({"level": 2})]], "a reset has its own"
        envs.set_next_options({"level": 1})
        envs.set_next_options(env_id=[1])
        assert resets(envs, 3) == [[of({"level": 1})], [PLAIN], [of({"level": 1})]]


def test_rows_that_come_one_by_one_have_them_too(engine: Options) -> None:
    with started(counters(2, lengths=(1,)), **engine) as envs:
        envs.set_next_options([{"level": 0}, {"level": 1}])
        for _ in range(2):
            envs.send(np.zeros(1, np.int64), [1])
            infos = envs.recv(count=1)[4]
        assert given(infos, 0) == of({"level": 1})


class Slips(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Raises if it is told to."""

    def __init__(self) -> None:
        super().__init__(counters(1, lengths=(3,))[0]())

    def step(self, action: Any) -> Any:
        if action == 1:
            raise ArithmeticError("it slipped")
        return super().step(action)


def test_what_failed_forgets_them(engine: Options) -> None:
    with started([Slips, counters(2, lengths=(3,))[1]], **engine) as envs:
        envs.set_next_options({"level": 1})
        with raises_logged(ArithmeticError):
            envs.step([1, 0])
        envs.reset(options={"reset_mask": np.array([True, False])})
        assert resets(envs, 4) == [[of(None)], [of({"level": 1})]]


def test_without_autoreset_there_is_no_next_episode() -> None:
    refused = pytest.raises(ValueError, match="autoreset_mode=DISABLED begins no episodes")
    with opened(counters(2), autoreset_mode="Disabled", num_workers=0) as envs, refused:
        envs.set_next_options({"level": 1})


def test_a_snapshot_knows_what_the_next_episode_is_given(engine: Options) -> None:
    with started(counters(3, lengths=(2,)), **engine) as envs:
        envs.set_next_options([{"level": 1}, None, None], seed=[None, 5, None])
        kept = envs.save()
        envs.set_next_options({"level": 9})
        envs.load(kept)
        assert resets(envs, 3) == [[of({"level": 1})], [of(None, 5)], [PLAIN]]


# --- Environments that are reset ahead of time: what a row sees depends on its seed and on the number of the episode alone

MODES = ["NextStep", "SameStep"]


def spared(env_fn: Any, num_envs: int = 3, **options: Any) -> vecenv.AsyncVectorEnv:
    return vecenv.AsyncVectorEnv([env_fn] * num_envs, context="fork", **{"spare_workers": 2, **options})


def play(envs: Any, steps: int, seed: int | None = 7, draws: int = 1) -> list[Any]:
    """All that comes of a reset and some steps."""
    rng = np.random.default_rng(draws)
    seen = [] if seed is None else [envs.reset(seed=seed)]
    return seen + [envs.step(rng.integers(0, 3, envs.num_envs)) for _ in range(steps)]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("spares", [1, pytest.param(3, marks=pytest.mark.long), pytest.param(7, marks=pytest.mark.long)])
def test_it_gives_what_resets_without_spares_give(mode: str, spares: int, closes: Any) -> None:
    same = play(twin([Walk] * 3, autoreset_mode=mode), 40)
    envs = closes(spared(Walk, autoreset_mode=mode, spare_workers=spares))
    assert_identical(play(envs, 40), same)


@pytest.mark.long
@pytest.mark.parametrize("mode", MODES)
def test_how_long_resets_take_changes_nothing(mode: str, closes: Any) -> None:
    same = play(twin([Walk] * 3, autoreset_mode=mode), 30)
    envs = closes(spared(partial(Walk, reset=0.02, uneven=True), autoreset_mode=mode))
    for _ in range(2):  # and what is being reset when they begin anew is no part of it
        assert_identical(play(envs, 30), same)


@pytest.mark.parametrize("mode", MODES)
def test_resets_by_the_caller_go_on_counting(mode: str, closes: Any) -> None:
    envs, same = closes(spared(Walk, autoreset_mode=mode)), twin([Walk] * 3, autoreset_mode=mode)
    assert_identical(play(envs, 9), play(same, 9))
    for about in (
        {}, {"options": {"reset_mask": np.array([True, False, True])}}, {"options": {"scale": 3.0}},
        {"seed": [4, 5, 6], "options": {"reset_mask": np.array([False, True, False])}}, {"seed": [1, 1, 1]},
    ):  # fmt: skip
        options = dict(about.get("options", {})) or None
        assert_identical(envs.reset(**about), same.reset(seed=about.get("seed"), options=options))
        assert_identical(play(envs, 8, seed=None), play(same, 8, seed=None))


@pytest.mark.long
@pytest.mark.parametrize("options", [{"shared_memory": False}, {"copy": False}, {"context": "forkserver"}])
@pytest.mark.parametrize("mode", MODES)
def test_however_observations_travel(options: dict[str, Any], mode: str) -> None:
    if "context" in options and mode == "NextStep":
        options = {"context": "spawn"}
    same = play(twin([Walk] * 2, autoreset_mode=mode), 12)
    envs = vecenv.AsyncVectorEnv(
        [Walk] * 2, **{"context": "fork", "autoreset_mode": mode, "spare_workers": 1, **options}
    )  # fmt: skip
    rng = np.random.default_rng(1)
    assert_identical(envs.reset(seed=7), same[0])
    for wanted in same[1:]:
        assert_identical(envs.step(rng.integers(0, 3, 2)), wanted)
    envs.close()


@pytest.mark.long
def test_without_a_seed_episodes_differ_each_time(closes: Any) -> None:
    envs = closes(spared(Walk))
    first, second = (envs.reset()[0].copy() for _ in range(2))
    assert not (first[:, 1] == second[:, 1]).any()
    assert not (envs.reset()[0][:, 1] == first[:, 1]).any()


# -- the point of it ----------------------------------------------------------------------------------------------------


def waited(envs: Any, steps: int) -> float:
    """Seconds in which rows waited for a reset: what steps took beyond the usual."""
    rng = np.random.default_rng(1)
    envs.reset(seed=7)
    time.sleep(0.5)
    spent = []
    for _ in range(steps):
        began = time.perf_counter()
        envs.step(rng.integers(0, 3, envs.num_envs))
        spent.append(time.perf_counter() - began)
    return sum(max(seconds - 0.1, 0.0) for seconds in spent)


@pytest.mark.long
@pytest.mark.parametrize("mode", MODES)
def test_no_step_waits_for_a_reset_that_was_made_ahead(mode: str, closes: Any) -> None:
    env_fn = partial(Walk, reset=0.4, lengths=(4, 5))
    envs = spared(env_fn, 2, spare_workers=2, autoreset_mode=mode)
    assert waited(envs, 5) < 0.25
    envs.close()
    plain = closes(vecenv.AsyncVectorEnv([env_fn] * 2, context="fork", autoreset_mode=mode))
    assert waited(plain, 5) > 0.25, "the environment does not show it"


@pytest.mark.long
def test_the_row_waits_for_what_is_left_of_a_reset(closes: Any) -> None:
    envs = closes(spared(partial(Walk, reset=0.6, lengths=(4, 5)), 1, spare_workers=1))
    envs.reset(seed=7)
    time.sleep(0.4)
    began = time.perf_counter()
    for _ in range(5):
        envs.step(np.zeros(1, np.int64))
    assert time.perf_counter() - began < 0.5


class QuickWhereAsked(Walk):
    """Resets with options do not wait; ``began`` is when the latest did."""

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[np.ndarray, dict[str, Any]]:
        self.began = time.monotonic()
        usual, self._reset = self._reset, 0.0 if options else self._reset
        try:
            return super().reset(seed=seed, options=options)
        finally:
            self._reset = usual


@pytest.mark.long
def test_one_that_was_busy_is_told_once_it_has_time(closes: Any) -> None:
    """It begins an episode that a reset by the caller makes needless: what it is to begin instead it learns afterwards."""
    envs = closes(spared(partial(QuickWhereAsked, reset=0.3, lengths=(40, 41)), 1, spare_workers=1))
    for seed in (7, 8):
        envs.reset(seed=seed, options={"quick": True})
    for _ in range(39):
        envs.step(np.zeros(1, np.int64))
        time.sleep(0.05)
    before_the_end = time.monotonic()
    assert envs.step(np.zeros(1, np.int64))[2].all()
    envs.step(np.zeros(1, np.int64))
    assert envs.get_attr("began")[0] < before_the_end


# -- calls on environments ----------------------------------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.parametrize("mode", MODES)
def test_calls_reach_the_environment_that_has_the_row_now(mode: str, closes: Any) -> None:
    envs, same = closes(spared(Walk, autoreset_mode=mode)), twin([Walk] * 3, autoreset_mode=mode)
    assert_identical(envs.reset(seed=7), same.reset(seed=7))
    for _ in range(12):
        assert_identical(envs.step(np.ones(3, np.int64)), same.step(np.ones(3, np.int64)))
        assert_identical(envs.get_attr("left"), same.get_attr("left"))
        assert_identical(envs.exec_func(lambda env: env.unwrapped.left, [1]), (None, same.get_attr("left")[1], None))


@pytest.mark.long
@pytest.mark.parametrize("mode", MODES)
def test_an_attribute_holds_for_episodes_that_had_begun_ahead(mode: str, closes: Any) -> None:
    envs, same = closes(spared(Walk, autoreset_mode=mode)), twin([Walk] * 3, autoreset_mode=mode)
    assert_identical(play(envs, 4), play(same, 4))
    envs.set_attr("level", 5.0)
    for env in same.envs:
        env.unwrapped.level = 5.0
    assert_identical(play(envs, 20, seed=None), play(same, 20, seed=None))


@pytest.mark.long
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("on_failure", ["raise", "restart"])
@pytest.mark.parametrize("victims", ["spares", "rows", "all", "an environment that raises"])
@pytest.mark.parametrize("when", ["before", "after"])
def test_an_attribute_holds_in_what_is_built_later(mode: str, on_failure: str, victims: str, when: str, closes: Any) -> None:
    """Workers die, before or after the attribute is set, and any environment may run any row's episode then."""
    raising = victims.startswith("an env")
    kind = partial(Walk, raises=third_seed(1)) if raising else Walk
    options = {"on_failure": "restart", "restart_limit": 100} if on_failure == "restart" else {}
    envs, same = closes(spared(kind, autoreset_mode=mode, **options)), twin([Walk] * 3, autoreset_mode=mode)

    def fail() -> None:
        if raising:
            envs.reset(seed=7)
            with contextlib.suppress(ValueError):
                for _ in range(30):
                    envs.step(np.ones(3, np.int64))
        else:
            chosen = {"spares": envs._pool.spares, "rows": envs._pool.workers, "all": envs._pool.all_workers()}[victims]
            for worker in list(chosen):
                worker.signal(9)
            time.sleep(0.1)
            for _ in chosen:
                with contextlib.suppress(vecenv.errors.WorkerDied):
                    envs.reset(seed=3)
        envs.reset(seed=3)

    envs.reset(seed=1)
    if when == "before":
        fail()
    envs.set_attr("level", 2.0)
    envs.set_attr("level", 5.0)
    if when == "after":
        fail()
    for env in same.envs:
        env.unwrapped.level = 5.0
    assert_identical(play(envs, 30, seed=8), play(same, 30, seed=8))


def told_of(infos: dict[str, Any], at: int) -> dict[str, Any]:
    """What an environment itself says in its info."""
    return {key: infos[key][at] for key in ("length", "left", "name") if key in infos and infos[f"_{key}"][at]}


class RowByRow:
    """What rows say that are sent and received in an order of their own, and what they say in a twin."""

    def __init__(self, env_fn: Any, num_envs: int, **options: Any) -> None:
        self.envs = spared(env_fn, num_envs, **options)
        self.twins = [twin([env_fn] * num_envs) for _ in range(num_envs)]  # one a row: each has a pace of its own
        self.chance = np.random.default_rng(3)
        self.n = num_envs
        self.due: dict[int, Any] = {}

    def expect(self, row: int, said: tuple[Any, ...]) -> None:
        *values, infos = said
        told = told_of(infos, row)
        self.due[row] = [value[row] for value in values], told

    def reset(self, **about: Any) -> None:
        self.envs.reset(**about)
        for one in self.twins:
            one.reset(**about)

    def reset_rows(self, rows: list[int], **about: Any) -> None:
        self.envs.reset_async(env_id=rows, **about)
        mask, zeros = np.isin(np.arange(self.n), rows), np.zeros(self.n)
        for row in rows:
            observation, infos = self.twins[row].reset(**(about or {"options": {"reset_mask": mask}}))
            self.expect(row, (observation, zeros, zeros > 0, zeros > 0, infos))

    def send(self, rows: list[int]) -> None:
        actions = self.chance.integers(0, 3, len(rows))
        self.envs.send(actions, np.array(rows))
        for row, action in zip(rows, actions, strict=True):
            self.expect(row, self.twins[row].step(np.full(self.n, action)))

    def recv(self, count: int) -> list[int]:
        *values, infos = self.envs.recv(count=count)
        rows = infos["env_id"].tolist()
        for position, row in enumerate(rows):
            wanted, told = self.due.pop(row)
            assert_identical([value[position] for value in values], wanted)
            assert told_of(infos, position) == told
        return rows


@pytest.mark.parametrize("spares", [1, 3])
def test_rows_that_are_received_first_see_the_same_episodes(spares: int) -> None:
    both = RowByRow(partial(Walk, reset=0.002, step=0.001, uneven=True), 4, spare_workers=spares)
    with contextlib.closing(both.envs):
        assert both.envs.capabilities.first_ready
        both.reset(seed=7)
        both.send([0, 1, 2, 3])
        for _ in range(150):
            both.send(both.recv(int(both.chance.integers(1, 4))))
        both.send(both.recv(len(both.due)))
        both.recv(4)
        actions = np.array([1, 0, 2, 1])
        both.envs.step(actions)  # and a batch of all goes on from there


def test_rows_are_reset_one_by_one() -> None:
    both = RowByRow(Walk, 3)
    with contextlib.closing(both.envs):
        both.reset(seed=7)
        both.send([0, 1, 2])
        for turn in range(60):
            rows = both.recv(2)
            if turn % 5 == 0:
                both.reset_rows(rows[:1])
                both.send(rows[1:])
            elif turn % 7 == 0:
                both.reset_rows(rows, seed=turn)
            else:
                both.send(rows)


def test_a_reset_of_all_may_be_received_row_by_row() -> None:
    both = RowByRow(Walk, 3, batch_size=2)
    with contextlib.closing(both.envs):
        both.reset(seed=3)
        both.envs.reset_async(seed=7)
        for row, one in enumerate(both.twins):
            observation, infos = one.reset(seed=7)
            zeros = np.zeros(3)
            both.expect(row, (observation, zeros, zeros > 0, zeros > 0, infos))
        rows = [row for _ in range(3) for row in both.recv(1)]
        for _ in range(40):  # and the episodes that follow are those of that seed
            both.send(rows)
            rows = both.recv(3)


def test_a_reset_of_some_rows_ends_no_episode_of_others() -> None:
    """Also while a row is in flight, and where the last step before the latest reset of all ended an episode."""
    envs, same = spared(Walk, 2, spare_workers=1), twin([Walk] * 2)
    envs.reset(seed=7)
    while not envs.step(np.ones(2, np.int64))[2][1]:
        pass
    assert_identical(envs.reset(seed=9), same.reset(seed=9))
    envs.send(np.ones(1, np.int64), np.array([0]))
    envs.reset(options={"reset_mask": np.array([True, False])})
    for field, wanted in zip(envs.step(np.ones(2, np.int64))[:4], same.step(np.ones(2, np.int64))[:4], strict=True):
        assert_identical(field[1], wanted[1])
    envs.close()


@pytest.mark.parametrize("mode", MODES)
def test_snapshots_take_the_seeds_of_later_episodes_along(mode: str) -> None:
    with contextlib.closing(spared(Walk, autoreset_mode=mode)) as envs:
        play(envs, 11)
        snapshots, whole = envs.save(), envs.state_dict()
        went_on = play(envs, 30, seed=None, draws=2)
        envs.load(snapshots)
        assert_identical(play(envs, 30, seed=None, draws=2), went_on)
        envs.load_state_dict(whole)
        assert_identical(play(envs, 30, seed=None, draws=2), went_on)
        play(envs, 3)
        envs.load([snapshots[1]] * 3)
        for observations, rewards, *_ in play(envs, 30, seed=None):
            assert len({row.tobytes() for row in observations[:, 1:]}) == len(set(rewards)) == 1
    with contextlib.closing(spared(Walk, spare_workers=1, autoreset_mode=mode)) as others:
        others.load(snapshots)
        assert_identical(play(others, 30, seed=None, draws=2), went_on)
    plain = vecenv.AsyncVectorEnv([Walk] * 3, context="fork", autoreset_mode=mode)
    with contextlib.closing(plain), contextlib.closing(spared(Walk, autoreset_mode=mode)) as envs:
        plain.reset(seed=5)
        envs.load(plain.save())  # seeds of its own from the next episode on
        play(envs, 30, seed=None)


def test_what_cannot_be_right_is_refused_by_name(closes: Any) -> None:
    envs = closes(spared(Walk, 2, spare_workers=1, autoreset_mode="SameStep"))
    envs.reset(seed=1)
    assert not envs.capabilities.first_ready
    mask = np.array([True, False])
    for call, words in (
        (lambda: envs.set_attr("level", [1.0, 2.0]), "one value for each row"),
        (lambda: envs.set_next_options({"scale": 2.0}), "set_next_options"),
        (lambda: envs.send(np.zeros(2, np.int64)), "send to some"),
        (envs.recv, "receive those"), (lambda: envs.reset_async(env_id=[0]), "send to some"),
    ):  # fmt: skip
        with pytest.raises(NotImplementedError, match=words):
            call()
    envs.reset_async(seed=1)
    with pytest.raises(NotImplementedError, match="receive those"):
        envs.recv()
    envs.reset_wait()
    assert envs.reset(options={"reset_mask": mask})[0].shape == (2, 3)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"num_workers": 1}, "num_workers=None"), ({"num_workers": "auto"}, "num_workers=None"),
        ({"num_workers": 0}, "num_workers=None"), ({"use_caller": True}, "calling process"),
        ({"batch_size": 1, "autoreset_mode": "SameStep"}, "NEXT_STEP"),
        ({"max_concurrency": 1}, "while all the others step"), ({"autoreset_mode": "Disabled"}, "begins by itself"),
        ({"spare_workers": -1}, "from 0 on"), ({"spare_workers": True}, "from 0 on"),
        ({"env_threads": 2}, "one environment"),
    ],
)  # fmt: skip
def test_options_that_do_not_go_with_it(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=f"spare_workers.*{words}"):
        spared(Walk, **options)


def test_make_vec_has_them_too_and_says_where_there_are_none() -> None:
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


def test_environments_that_differ_are_refused() -> None:
    with pytest.raises(ValueError, match=r"env_fns\[1\] is not like"):
        vecenv.AsyncVectorEnv([partial(Walk, lengths=(1, row + 2)) for row in range(3)], spare_workers=1)


# -- failures -----------------------------------------------------------------------------------------------------------


def third_seed(row: int) -> int:
    return derived_seed(7 + row, row, 2)


@pytest.mark.long
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("how", "error"), [("raises", ValueError), ("dies", vecenv.errors.WorkerDied)])
def test_a_reset_ahead_that_fails_is_the_rows_failure(mode: str, how: str, error: type[Exception], closes: Any) -> None:
    """It comes when the row would have reset, whenever it happened; a reset brings everything back."""
    envs = closes(spared(partial(Walk, **{how: third_seed(1)}), autoreset_mode=mode))
    same = twin([Walk] * 3, autoreset_mode=mode)
    for _ in range(2):
        assert_identical(envs.reset(seed=7), same.reset(seed=7))
        ends = 0
        while ends < 2:
            wanted = same.step(np.ones(3, np.int64))
            ends += int(wanted[2][1])
            if ends == 2 and mode == "SameStep":
                break  # the step in which its second episode begins
            assert_identical(envs.step(np.ones(3, np.int64)), wanted)
        with pytest.raises(error, match="no such level" if how == "raises" else r"env 1\b"):
            envs.step(np.ones(3, np.int64))
        with pytest.raises(vecenv.errors.EnvFailed):
            envs.step(np.zeros(3, np.int64))


@pytest.mark.long
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("how", ["raises", "dies"])
def test_a_reset_ahead_that_fails_is_restarted(mode: str, how: str, closes: Any) -> None:
    """The row says that it was restarted; the others go on as if nothing had happened, and so does it, an episode later."""
    envs = closes(spared(partial(Walk, **{how: third_seed(1)}), autoreset_mode=mode, on_failure="restart"))
    same = twin([Walk] * 3, autoreset_mode=mode)
    assert_identical(envs.reset(seed=7), same.reset(seed=7))
    restarted = 0
    for _ in range(60):
        found, wanted = envs.step(np.ones(3, np.int64)), same.step(np.ones(3, np.int64))
        for field in range(4):
            assert_identical(found[field][[0, 2]], wanted[field][[0, 2]])
        if "restarted" in found[4]:
            restarted += int(found[4]["restarted"][1])
            assert (found[1][1], found[3][1]) == (0.0, True)
    assert restarted == envs.stats()["restarts"] == 1


@pytest.mark.parametrize("mode", MODES)
def test_a_row_that_is_rebuilt_begins_no_second_episode(mode: str, closes: Any) -> None:
    """What was rebuilt was reset: nothing that was begun ahead of time takes its place in the same step."""
    envs = closes(spared(Slips, autoreset_mode=mode, on_failure="restart"))
    envs.reset(seed=7)
    before = [worker.pid for worker in envs._pool.workers]
    *_, truncations, infos = envs.step([0, 1, 0])
    assert truncations.tolist() == infos["_restarted"].tolist() == [False, True, False]
    assert [worker.pid for worker in envs._pool.workers] == before


@pytest.mark.long
def test_a_reset_of_all_brings_dead_spares_back(closes: Any) -> None:
    envs = closes(spared(Walk, 2))
    envs.reset(seed=3)
    for worker in envs._pool.spares:
        worker.signal(9)
    time.sleep(0.2)
    assert_identical(play(envs, 20), play(twin([Walk] * 2), 20))


@pytest.mark.long
def test_it_ends_while_a_reset_is_made_ahead() -> None:
    envs = spared(partial(Walk, reset=0.3), 2)
    envs.reset(seed=3)
    pids = [worker.pid for worker in envs._pool.all_workers()]
    began = time.perf_counter()
    envs.close()
    assert time.perf_counter() - began < 5
    assert len(pids) == 4
    assert not any(psutil.pid_exists(pid) for pid in pids)

