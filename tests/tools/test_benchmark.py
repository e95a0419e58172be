"""``vecenv bench``: rates, comparisons of trajectories, failing candidates, and output."""

from __future__ import annotations

import itertools
import math
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium.vector import SyncVectorEnv
from observe import WAIT_SECONDS, still_running

pytest.importorskip("rich")
pytest.importorskip("matplotlib")

from bench import train
from vecenv.tools import WRONG, CliError, benchmark, runners
from vecenv.tools.benchmark import Report, ResultRow, Summary
from vecenv.tools.runners import (
    BareLockstep,
    BareLoop,
    BareLoops,
    BarePipes,
    Candidate,
    Step,
    VectorRunner,
    digest,
    first_difference,
)

CARTPOLE = partial(runners.make_env, "CartPole-v1")
SHORT: dict[str, Any] = {"seconds": 0.05, "repeats": 2}


@pytest.fixture(scope="module", autouse=True)
def open_fonts(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Make matplotlib open its font files, which stay open, before the first test that draws."""
    benchmark.draw_bars(make_report(ResultRow("a", "a", "vecenv", [1.0])), tmp_path_factory.mktemp("fonts") / "bars.png")


def make_report(*rows: ResultRow) -> Report:
    machine: dict[str, Any] = {"cpu": "a processor", "usable_cores": 2, "python": "3", "gymnasium": "1"}
    machine["row_writer"] = "compiled"
    return Report("CartPole-v1", 64, 1.0, 3, "fine", machine, list(rows))


# --- figures ------------------------------------------------------------------------------------


def test_summary_omits_missing_samples() -> None:
    summary = Summary.from_samples([4.0, math.nan, 1.0, 2.0])
    assert summary is not None
    assert (summary.median, summary.minimum, summary.maximum, summary.count) == (2.0, 1.0, 4.0, 3)
    assert Summary.from_samples([math.nan]) is None


def test_ratio_compares_rates_of_the_same_round() -> None:
    rows = ResultRow("a", "a", "vecenv", [10.0, 40.0, 30.0]), ResultRow("b", "b", "other", [5.0, 10.0, 10.0])
    ratio = make_report(*rows).ratio("a", "b")
    assert ratio is not None
    assert (ratio.minimum, ratio.median, ratio.maximum) == (2.0, 3.0, 4.0)


def test_run_for_returns_the_rate_of_completed_work() -> None:
    calls = []

    def step() -> int:
        calls.append(1)
        time.sleep(0.0005)
        return 3

    started_at = time.perf_counter()
    rate = runners.run_for(step, 0.05)
    assert 3 * len(calls) / (time.perf_counter() - started_at) <= rate <= 3 * len(calls) / 0.05


class CountingEnv(gymnasium.Env[np.ndarray, np.int64]):
    """An environment with episodes of three steps. The reward is the number of resets."""

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


def test_bare_loop_resets_ended_episodes_and_counts_resets_as_steps() -> None:
    loop = BareLoop(CountingEnv, range(2), 2)
    assert loop.step(32) == 64
    assert loop.envs[0].resets == 1 + 32 // 4  # type: ignore[attr-defined]  # an episode is three steps and a reset


def test_shares_contain_each_environment_once() -> None:
    assert runners._shares(5, 3) == [range(1), range(1, 3), range(3, 5)]
    assert runners._shares(1, 8) == [range(1)]


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("kind", "shares"),
    [
        (BarePipes, [range(1), range(1, 2), range(2, 3)]),
        (BareLoops, [range(2), range(2, 3)]),
        (BareLockstep, [range(3)]),
        (BareLockstep, [range(1), range(1, 3)]),
    ],
)
def test_bare_runners_step_each_environment_once_and_restore_the_affinity(kind: Any, shares: Any) -> None:
    before = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else None
    runner = kind(CARTPOLE, 3, shares)
    try:
        assert runner._step() == 3
        time.sleep(0.05)  # meanwhile BareLockstep stops polling and sleeps; the next step must wake it up
        assert runner.run(0.05) > 0
    finally:
        runner.close()
    assert before is None or os.sched_getaffinity(0) == before


# --- trajectories -------------------------------------------------------------------------------


def test_digest_distinguishes_types_shapes_and_bits() -> None:
    values = [
        np.zeros(2, np.float32), np.zeros(2, np.float64), np.zeros((2, 1), np.float32), np.array([0.0, -0.0], np.float32),
        np.array([None, 1], object), {"a": 1}, {"a": 1.0}, {"a": True}, {"a": {"b": 1}}, (1, 2),
    ]  # fmt: skip
    assert len({digest(value) for value in values}) == len(values)
    assert digest({"a": 1, "b": 2}) == digest({"b": 2, "a": 1})


def collect_trajectory() -> list[Step]:
    return VectorRunner(partial(SyncVectorEnv, [CARTPOLE] * 2)).trajectory(30)


def test_first_difference_names_step_and_environment() -> None:
    reference = collect_trajectory()
    assert first_difference(reference, collect_trajectory()) is None
    assert any(step["termination"].any() for step in reference), "no episode has ended, so autoreset was not tested"
    changes: dict[str, tuple[int, Any]] = {
        "at step 3, env 1: reward 0.5 instead of 1.0": (3, {"reward": np.array([1.0, 0.5])}),
        "at the reset, env 1: a different observation": (0, {"observation": [reference[0]["observation"][0], b""]}),
        "at step 7: different infos": (7, {"infos": b"others"}),
    }
    for text, (step, change) in changes.items():
        other = [*reference[:step], {**reference[step], **change}, *reference[step + 1 :]]
        assert first_difference(reference, other) == text


class WrongRewards(SyncVectorEnv):
    """An engine that adds 1 to the rewards of its fifth step."""

    calls = 0

    def step(self, actions: Any) -> Any:
        observations, rewards, *rest = super().step(actions)
        self.calls += 1
        return (observations, rewards + (self.calls == 5), *rest)


@pytest.mark.long
def test_engine_with_wrong_trajectory_raises_before_timing() -> None:
    build = partial(VectorRunner, partial(WrongRewards, [CARTPOLE] * 2))
    candidate = Candidate("wrong", "a wrong engine", build, "vecenv", checked=True)
    with pytest.raises(CliError, match=r"a wrong engine differs .* at step 5, env 0: reward 2.0") as error:
        benchmark.compare("CartPole-v1", CARTPOLE, 2, [candidate], **SHORT)
    assert error.value.code == WRONG


class UnseededEnv(CountingEnv):
    """An environment with results that do not depend on its seed."""

    def step(self, action: np.int64) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        return np.array([os.getpid() % 99], np.float32), time.perf_counter(), False, False, {}


@pytest.mark.long
def test_environment_that_ignores_its_seed_is_reported() -> None:
    candidate = replace(runners.gymnasium_candidate("same", "SyncVectorEnv", UnseededEnv, 1), checked=True)
    report = benchmark.compare("unseeded", UnseededEnv, 1, [candidate], **SHORT)
    assert report.check.startswith("not comparable")
    assert report.rows[0].summary


def test_failing_environment_raises_before_engines_start(monkeypatch: pytest.MonkeyPatch) -> None:
    stages: list[str] = []

    def fail(*_: Any) -> Any:
        raise CliError("it always fails")

    monkeypatch.setattr(benchmark, "_run_reference", fail)
    monkeypatch.setattr(benchmark, "started", lambda *_: pytest.fail("engines were started"))
    candidates = runners.default_candidates(CARTPOLE, 2, 1)
    with pytest.raises(CliError, match="it always fails"):
        benchmark.compare("x", CARTPOLE, 2, candidates, progress=lambda stage, *_: stages.append(stage))
    assert stages == ["checking the environment in SyncVectorEnv"]


# --- candidates that fail -----------------------------------------------------------------------


class WorkingRunner:
    """A runner with a constant rate."""

    def run(self, seconds: float) -> float:
        return 10.0

    def close(self) -> None:
        pass


class ExitingRunner(WorkingRunner):
    """A runner that exits in its third run."""

    runs = 0

    def run(self, seconds: float) -> float:
        self.runs += 1
        if self.runs == 3:  # the warm-up and one round succeed
            os._exit(7)
        return super().run(seconds)


class RaisingRunner(WorkingRunner):
    """A runner that raises when it is built."""

    def __init__(self) -> None:
        raise ValueError("no such thing\nand more")


class UnavailableRunner(WorkingRunner):
    """A runner of a library that is not installed."""

    def __init__(self) -> None:
        raise runners.Unavailable("nothing is installed")


@pytest.mark.long
def test_failing_candidate_does_not_affect_other_rows() -> None:
    runner_classes = WorkingRunner, ExitingRunner, RaisingRunner, UnavailableRunner
    candidates = [Candidate(each.__name__, each.__name__, each) for each in runner_classes]
    report = benchmark.compare("none", CARTPOLE, 1, candidates, seconds=0.0, repeats=3)
    rows = {row.name: row for row in report.rows}
    assert rows["WorkingRunner"].rates == [10.0] * 3
    assert rows["ExitingRunner"].failed == "process exited with exit code 7"
    assert rows["RaisingRunner"].failed == "ValueError: no such thing"
    assert "Traceback" in rows["RaisingRunner"].log
    assert rows["UnavailableRunner"].missing == "nothing is installed"
    assert report.to_dict()["rows"][1]["rates"] == [10.0, None, None]


class HangingRunner(WorkingRunner):
    """A runner that hangs in ``run``."""

    def run(self, seconds: float) -> float:
        time.sleep(60)
        return 0.0


@pytest.mark.long
def test_call_to_a_hanging_candidate_times_out() -> None:
    with benchmark.started([Candidate("hangs", "hangs", HangingRunner)]) as (host,):
        assert host.call("run", 0.0, timeout=0.2) is None
        assert host.failed == "no reply within 0 s"
        assert math.isnan(host.rate(0.1))


class RunnerWithProcesses(WorkingRunner):
    """A runner that starts processes and does not end them."""

    def __init__(self) -> None:
        commands = [subprocess.Popen(["sleep", "60"], start_new_session=own_session) for own_session in (False, True)]
        self.pids = [command.pid for command in commands]

    def describe(self) -> str:
        return " ".join(map(str, self.pids))

    def run(self, seconds: float) -> float:
        os.kill(os.getpid(), signal.SIGKILL)
        return 0.0


@pytest.mark.long
@pytest.mark.skipif(sys.platform == "win32", reason="sessions and signals of POSIX")
@pytest.mark.parametrize("killed", [False, True])
def test_processes_of_a_candidate_end_with_it(killed: bool) -> None:
    with benchmark.started([Candidate("processes", "processes", RunnerWithProcesses)]) as (host,):
        pids = [int(pid) for pid in host.description.split()]
        assert still_running(pids, 0.0) == pids
        if killed:
            assert host.call("run", 0.0) is None
            assert host.failed.startswith("process killed by SIGKILL")
    assert not still_running(pids, WAIT_SECONDS)


# --- candidates with many processes ---------------------------------------------------------------


@pytest.mark.long
def test_candidate_with_many_processes_runs_only_while_it_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runners, "usable_cores", lambda: 2)
    with benchmark.started([replace(runners.bound_candidate("bare-pipes", CARTPOLE, 2, 2), processes=17)]) as (host,):
        assert not host.running
        assert host.rate(0.05) > 0
        assert host.running
        host.suspend()
        assert not host.running
        assert host.usable


def test_candidates_with_many_processes_start_one_after_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runners, "usable_cores", lambda: 2)
    names = [[c.name for c in group] for group in benchmark._start_order(runners.default_candidates(CARTPOLE, 64, 2))]
    assert names[0] == ["auto"]
    assert names[2:] == [["per-env"], ["gym-async"], ["bare-pipes"]]
    assert not any(c.has_many_processes for c in runners.default_candidates(CARTPOLE, 8, 2))


# --- output -------------------------------------------------------------------------------------

ROWS = (
    ResultRow("auto", "vecenv, auto", "vecenv", [1_234_567.0, 1_334_567.0, 1_134_567.0]),
    ResultRow(
        "gym-async", "Gymnasium AsyncVectorEnv", "gymnasium", [math.nan] * 3, failed="its process was killed by SIGKILL"
    ),
    ResultRow("bare-loop", "bare loop, 2 processes", "bound", [2_345_678.0, 2_145_678.0, 2_545_678.0]),
    ResultRow("sb3", "another library", "other", [math.nan] * 3, missing="it is not installed"),
)
TABLE = """\
Trajectories: fine.
CartPole-v1, 64 environments: 3 interleaved rounds, samples of 1 s
engine                      steps/s      min - max  x Async  of bare loop
vecenv, auto              1,234,567  1.13M - 1.33M        -         0.526
Gymnasium AsyncVectorEnv     failed
bare loop, 2 processes    2,345,678  2.15M - 2.55M        -         1.000
another library            left out
a processor, 2 usable cores; Python 3, Gymnasium 1, row writer compiled
The bare loop is the upper bound: independent processes that only step environments.
Gymnasium AsyncVectorEnv failed: its process was killed by SIGKILL
another library left out: it is not installed
"""


@pytest.mark.parametrize("width", [80, 140])
def test_table_does_not_depend_on_the_width_of_the_terminal(
    width: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    benchmark.print_report(make_report(*ROWS))
    assert [line.rstrip() for line in capsys.readouterr().out.splitlines()] == TABLE.splitlines()


@pytest.mark.parametrize(
    ("rate", "expected"),
    [(12.3, "12.3"), (999, "999"), (999.7, "1.00k"), (1234, "1.23k"), (58_946, "58.9k"), (308_817, "309k"), (1e6, "1.00M")],
)
def test_format_rate_shortens_large_rates(rate: float, expected: str) -> None:
    assert benchmark.format_rate(rate) == expected


def test_plot_marks_dead_rows_and_its_labels_do_not_overlap(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    figures: list[Any] = []
    new_figure = benchmark.new_figure

    def record_figure(*size: Any) -> Any:
        figures.append(new_figure(*size))
        return figures[-1]

    monkeypatch.setattr(benchmark, "new_figure", record_figure)
    benchmark.draw_bars(make_report(*ROWS), tmp_path / "bars.png")
    (axes,) = figures[0].axes
    assert [label.get_text() for label in axes.get_yticklabels()] == [row.label for row in ROWS[2::-1]]
    assert [note.get_text().strip() for note in axes.texts] == ["2.35M", "failed", "1.23M"]
    boxes = [label.get_window_extent() for label in axes.get_xticklabels() if label.get_text()]
    assert all(left.x1 < right.x0 for left, right in itertools.pairwise(boxes))


def test_reports_without_rates_can_be_drawn(tmp_path: Path) -> None:
    row = ResultRow("auto", "vecenv, auto", "vecenv", [math.nan], failed="it raised")
    benchmark.draw_bars(make_report(row), tmp_path / "bars.png")
    benchmark.draw_scale([make_report(row)], tmp_path / "scale.png")


def test_shares_of_training_time_are_drawn(tmp_path: Path) -> None:
    report = make_report(ResultRow("a", "a", "vecenv", [100.0, 200.0]))
    train.draw_shares(report, {"a": {"environments": 0.5, "policy": 0.2, "learning": 0.3}}, tmp_path / "shares.png")
    assert (tmp_path / "shares.png").stat().st_size > 1000


@pytest.mark.long
def test_all_engines_of_vecenv_equal_sync_vector_env_and_have_rates(tmp_path: Path) -> None:
    candidates = [c for c in runners.default_candidates(CARTPOLE, 3, 2) if c.kind in ("vecenv", "bound")]
    assert [c.name for c in candidates[-2:]] == ["bare-lockstep", "bare-loop"]
    report = benchmark.compare("CartPole-v1", CARTPOLE, 3, candidates, **SHORT)
    assert [row.failed for row in report.rows] == [None] * len(candidates)
    assert "engines equal SyncVectorEnv over 256 steps of 3 environments" in report.check
    assert all(row.missing or len(row.rates) == 2 for row in report.rows)
    smaller_report = replace(report, num_envs=1, rows=report.rows[:1])
    benchmark.draw_bars(report, tmp_path / "bars.png")
    benchmark.draw_scale([smaller_report, report], tmp_path / "scale.png")
    for name in ("bars.png", "scale.png"):
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")
