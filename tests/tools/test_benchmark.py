"""The measuring core: what it counts, what it compares, and that one dead candidate spoils only its own row."""

from __future__ import annotations

import math
import os
import shutil
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium.vector import SyncVectorEnv

from bench import micro, train
from vecenv.tools import benchmark
from vecenv.tools.benchmark import BareLockstep, BarePipes, Candidate, Report, Row, Sample, Stream, Summary, VectorRunner
from vecenv.tools.benchmark.compare import _lock_step as lock_step
from vecenv.tools.benchmark.runners import digest

CARTPOLE = partial(benchmark.make_env, "CartPole-v1")
SHORT = {"seconds": 0.05, "repeats": 2}


@pytest.fixture(scope="module", autouse=True)
def fonts_are_open(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Matplotlib opens its fonts with the first picture and keeps them; that is not a leak of the test that draws first."""
    report = Report("none", 1, 1.0, 1, "", benchmark.machine(), [Row("a", "a", "vecenv", [1.0])])
    benchmark.draw_bars(report, tmp_path_factory.mktemp("fonts") / "bars.png")


# --- figures ------------------------------------------------------------------------------------


def test_summary_leaves_out_samples_that_were_never_taken() -> None:
    summary = Summary.of([4.0, math.nan, 1.0, 2.0])
    assert summary is not None
    assert (summary.median, summary.minimum, summary.maximum, summary.count) == (2.0, 1.0, 4.0, 3)
    assert Summary.of([math.nan]) is None


def test_ratio_is_formed_round_by_round() -> None:
    fast, slow = Row("a", "a", "vecenv", [10.0, 40.0, 30.0]), Row("b", "b", "other", [5.0, 10.0, 10.0])
    found = benchmark.ratio(fast, slow)
    assert found is not None
    assert (found.minimum, found.median, found.maximum) == (2.0, 3.0, 4.0)  # medians alone would give 3.0 as well, not 2.0


def test_run_for_counts_what_it_ran() -> None:
    calls = []

    def step() -> int:
        calls.append(1)
        time.sleep(0.0005)
        return 3

    sample = benchmark.run_for(step, 0.05)
    assert sample.units == 3 * len(calls)
    assert 0.05 <= sample.seconds < 30


class CountingEnv(gymnasium.Env[np.ndarray, np.int64]):
    """An episode of three steps; the reward is how often the env was reset."""

    observation_space = gymnasium.spaces.Box(0, 100, (1,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)
    resets = 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[np.ndarray, dict[str, Any]]:
        super().reset(seed=seed)
        self.resets, self.steps = self.resets + 1, 0
        return np.zeros(1, np.float32), {}

    def step(self, action: np.int64) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        self.steps += 1
        if self.steps > 3:
            raise RuntimeError("stepped after the end of an episode")
        return np.full(1, self.steps, np.float32), float(self.resets), self.steps == 3, False, {}


def test_bare_loop_resets_where_an_episode_has_ended_and_counts_it() -> None:
    loop = benchmark.BareLoop(CountingEnv, 0, 2, 2)
    units = loop._step()
    assert units == 64
    assert loop.envs[0].resets == 1 + units // 2 // 4  # three steps and a reset, over and over


class Computing(CountingEnv):
    """Resets take 10 ms."""

    def reset(self, **options: Any) -> Any:
        until = time.thread_time() + 0.01
        while time.thread_time() < until:
            pass
        return super().reset(**options)


class Sleeping(CountingEnv):
    def reset(self, **options: Any) -> Any:
        time.sleep(0.01)
        return super().reset(**options)


@pytest.mark.parametrize("kind", [Computing, Sleeping])
def test_turns_are_measured_from_the_seeds_on(kind: type[CountingEnv]) -> None:
    loop = benchmark.BareLoop(kind, 0, 1, 1)
    loop._step()
    turns = loop.turns(0.2)
    assert len(turns) > 7
    assert all(took > 0.009 for took in turns[3::4])  # three steps and a reset, over and over
    assert min(turns) < 0.009


def test_lock_step_reaches_what_the_longest_share_of_each_turn_leaves() -> None:
    class Limit:
        usable = True

        def __init__(self, *shares: list[float]) -> None:
            self.shares = shares
            self.candidate = replace(benchmark.limit_candidate(CARTPOLE, 2, 2), builds=(print,) * len(shares))

        def ask(self, method: str, seconds: float) -> list[list[float]]:
            assert method == "turns"
            return list(self.shares)

    assert lock_step([Limit([1.0, 3.0, 9.0], [3.0, 1.0])], 1.0) == pytest.approx(2 / 3)  # type: ignore[list-item]
    assert lock_step([Limit([1.0, 3.0], [1.0, 3.0])], 1.0) == 1.0  # type: ignore[list-item]
    assert lock_step([Limit([1.0, 3.0])], 1.0) is None  # type: ignore[list-item]
    assert lock_step([Limit([1.0], [])], 1.0) is None  # type: ignore[list-item]


def test_where_the_time_of_trainings_goes_is_drawn(tmp_path: Path) -> None:
    report = Report("PPO", 4, 1.0, 2, "", benchmark.machine(), [Row("a", "a", "vecenv", [100.0, 200.0])])
    train.draw_shares(report, {"a": {"environments": 0.5, "policy": 0.2, "learning": 0.3}}, tmp_path / "shares.png")
    assert (tmp_path / "shares.png").stat().st_size > 1000


def test_limit_uses_no_more_processes_than_environments_and_each_once() -> None:
    shares = [build.args[1:3] for build in benchmark.limit_candidate(CARTPOLE, 5, 3).builds]
    assert shares == [(0, 1), (1, 2), (3, 2)]
    assert len(benchmark.limit_candidate(CARTPOLE, 1, 8).builds) == 1


# --- trajectories -------------------------------------------------------------------------------


def test_digest_tells_types_shapes_and_bits_apart() -> None:
    values = [
        np.zeros(2, np.float32),
        np.zeros(2, np.float64),
        np.zeros((2, 1), np.float32),
        np.array([0.0, -0.0], np.float32),
        np.array([None, 1], object),
        {"a": 1},
        {"a": 1.0},
        {"a": True},
        {"a": {"b": 1}},
        (1, 2),
    ]
    assert len({digest(value) for value in values}) == len(values)
    assert digest({"a": 1, "b": 2}) == digest({"b": 2, "a": 1})


def stream() -> Stream:
    return VectorRunner(partial(SyncVectorEnv, [CARTPOLE] * 2)).trajectory(30)


def test_equal_engines_give_equal_streams_and_any_difference_is_named() -> None:
    reference = stream()
    assert benchmark.first_difference(reference, stream()) is None
    assert reference.terminations.any(), "no episode ended: nothing was checked about autoreset"

    other = stream()
    other.rewards[3, 1] = 0.5
    assert benchmark.first_difference(reference, other) == "at step 3, env 1: reward 0.5 instead of 1.0"
    other = stream()
    other.observations[0][1] = b""
    assert benchmark.first_difference(reference, other) == "at the reset, env 1: another observation"
    other = stream()
    assert other.infos is not None
    other.infos[7] = b""
    assert benchmark.first_difference(reference, other) == "at step 7: other infos"


class Late(SyncVectorEnv):
    """Gives every fifth step's rewards to the wrong environments."""

    calls = 0

    def step(self, actions: Any) -> Any:
        observations, rewards, *rest = super().step(actions)
        self.calls += 1
        return (observations, rewards + (self.calls == 5), *rest)


def late(name: str = "late") -> Candidate:
    return Candidate(name, "a wrong engine", (partial(VectorRunner, partial(Late, [CARTPOLE] * 2)),), "vecenv", True)


@pytest.mark.long
def test_engine_with_other_trajectories_is_refused_before_anything_is_timed() -> None:
    with pytest.raises(benchmark.TrajectoryMismatch, match=r"a wrong engine differs .* at step 5, env 0: reward 2.0"):
        benchmark.compare("CartPole-v1", CARTPOLE, 2, [late()], **SHORT)


class Unseeded(CountingEnv):
    """Takes no notice of its seed."""

    def step(self, action: np.int64) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        return np.array([os.getpid() % 99], np.float32), time.perf_counter(), False, False, {}


@pytest.mark.long
def test_environment_that_ignores_its_seed_is_not_blamed_on_the_engine() -> None:
    same = benchmark.gymnasium_candidate("same", "SyncVectorEnv", Unseeded, 1)
    candidate = Candidate("same", "same", same.builds, "vecenv", checked=True)
    report = benchmark.compare("unseeded", Unseeded, 1, [candidate], **SHORT)
    assert report.check.startswith("not comparable")
    assert report.rows[0].summary


# --- candidates that fail -----------------------------------------------------------------------


class Steady:
    def run(self, seconds: float) -> Sample:
        return Sample(10, 1.0)

    def close(self) -> None:
        pass


class Exits(Steady):
    turns = 0

    def run(self, seconds: float) -> Sample:
        self.turns += 1
        if self.turns == 3:  # the warm-up and one round are fine
            os._exit(7)
        return super().run(seconds)


class Raises(Steady):
    def __init__(self) -> None:
        raise ValueError("no such thing\nand more")


class Absent(Steady):
    def __init__(self) -> None:
        raise benchmark.Unavailable("nothing is installed")


@pytest.mark.long
def test_dead_candidate_spoils_only_its_own_row() -> None:
    kinds = (Steady, Exits, Raises, Absent)
    candidates = [Candidate(kind.__name__, kind.__name__, (kind,)) for kind in kinds]
    report = benchmark.compare("none", CARTPOLE, 1, candidates, seconds=0.0, repeats=3)
    rows = {row.name: row for row in report.rows}
    assert rows["Steady"].rates == [10.0] * 3
    assert rows["Exits"].failed == "its process ended with exit code 7"
    assert rows["Raises"].failed == "ValueError: no such thing"
    assert "Traceback" in rows["Raises"].log
    assert rows["Absent"].missing == "nothing is installed"
    kept = report.to_dict()["rows"]
    assert kept[1]["rates"] == [10.0, None, None]


class Hangs(Steady):
    def run(self, seconds: float) -> Sample:
        time.sleep(60)
        return super().run(seconds)


@pytest.mark.long
def test_candidate_that_hangs_is_given_up_and_ended() -> None:
    with benchmark.started([Candidate("hangs", "hangs", (Hangs,))]) as (live,):
        host = live.hosts[0]
        host.close = partial(host.close, timeout=0.1)  # type: ignore[method-assign]
        assert live.ask("run", 0.0, timeout=0.2) == []
        assert live.failed == "gave no answer within 0 s"
        assert math.isnan(live.rate(0.1))


@pytest.mark.long
def test_a_crowd_lives_only_while_it_is_measured() -> None:
    candidate = replace(benchmark.bare_pipes_candidate(CARTPOLE, 2), crowd=True)
    with benchmark.started([candidate]) as (live,):
        assert live.description == "bare pipes to 2 processes"
        assert not live.hosts
        assert live.rate(0.05) > 0
        assert live.hosts
        live.rest()
        assert not live.hosts
        assert live.usable


def test_engines_with_a_process_for_each_of_many_environments_are_crowds() -> None:
    crowds = [c.name for c in benchmark.default_candidates(CARTPOLE, 64, 2) if c.crowd]
    assert crowds == ["per-env", "gym-async", "bare-pipes"]
    assert not any(c.crowd for c in benchmark.default_candidates(CARTPOLE, 8, 2))


def test_bare_pipes_step_every_environment_once() -> None:
    pipes = BarePipes(CARTPOLE, 3)
    try:
        assert pipes._step() == 3
        assert pipes.run(0.05).units % 3 == 0
    finally:
        pipes.close()


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_bare_lockstep_steps_every_environment_once(workers: int) -> None:
    """The caller has a share; the process has its cores back afterwards."""
    before = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else None
    lockstep = BareLockstep(CARTPOLE, 3, workers)
    try:
        assert lockstep.describe() == f"bare lock-step of {workers} processes"
        assert lockstep._step() == 3
        time.sleep(0.05)  # longer than it polls: it sleeps then, and wakes for the next step
        assert lockstep.run(0.05).units % 3 == 0
    finally:
        lockstep.close()
    assert before is None or os.sched_getaffinity(0) == before


def test_bare_lockstep_is_a_row_beside_the_limit() -> None:
    names = [candidate.name for candidate in benchmark.default_candidates(CARTPOLE, 3, 8)]
    assert names[-2:] == ["bare-lockstep", "limit"]
    assert benchmark.default_candidates(CARTPOLE, 3, 8)[-2].label == "bare lock-step, 3 processes"


@pytest.mark.long
def test_unknown_option_leaves_the_row_out() -> None:
    candidate = benchmark.vecenv_candidate("odd", "odd", CARTPOLE, 1, frobnicate=True)
    with benchmark.started([candidate]) as (live,):
        assert live.missing == "this version of vecenv has no option 'frobnicate'"


# --- what an engine copies --------------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.skipif(shutil.which("cc") is None and shutil.which("gcc") is None, reason="counting copies needs a C compiler")
def test_observations_are_copied_once_into_shared_memory_and_once_out_of_it() -> None:
    counted = micro.counted_copies()
    assert counted["copy=False"] == pytest.approx(1.0, abs=0.01)
    assert counted["copy=True"] == pytest.approx(2.0, abs=0.01)


# --- the whole of it ----------------------------------------------------------------------------


@pytest.mark.long
def test_every_vecenv_row_equals_sync_and_is_measured(tmp_path: Path) -> None:
    candidates = [c for c in benchmark.default_candidates(CARTPOLE, 3, 2) if c.kind in ("vecenv", "limit")]
    report = benchmark.compare("CartPole-v1", CARTPOLE, 3, candidates, **SHORT)
    assert [row.failed for row in report.rows] == [None] * len(candidates)
    assert "engines equal SyncVectorEnv over 256 steps of 3 environments" in report.check
    assert all(row.missing or len(row.rates) == 2 for row in report.rows)
    benchmark.draw_bars(report, tmp_path / "bars.png")
    benchmark.draw_scale([report, smaller(report)], tmp_path / "scale.png")
    for name in ("bars.png", "scale.png"):
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")


def smaller(report: Report) -> Report:
    return Report(report.env, 1, report.seconds, report.repeats, report.check, report.machine, report.rows[:1])
