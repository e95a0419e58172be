"""The output, files and errors of vecenv's commands."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from functools import partial
from pathlib import Path

import gymnasium
import pytest
from gymnasium.vector import SyncVectorEnv
from programs import python_output, run_python

from vecenv import tools
from vecenv.errors import how_to_install
from vecenv.tools import benchmark, cli, runners

BENCH_INSTALL = how_to_install("bench")
TINY = ["--num-envs", "2", "--seconds", "0.05", "--repeats", "2"]


def run_vecenv(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return run_python("-m", "vecenv", *arguments, cwd=cwd)


def test_progress_without_a_terminal_prints_one_line_per_round_to_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    stages = ["checking the environment", "starting vecenv (1 of 2)", "starting the bare loop (2 of 2)"]
    with tools.progress_bar() as progress:
        for stage in stages:
            progress(stage, 0, 0)
        for completed in range(4):
            progress(f"round {completed // 2 + 1} of 2", completed, 4)
    output = capsys.readouterr()
    assert (output.out, output.err) == ("", "round 1 of 2\nround 2 of 2\n")


@pytest.mark.long
def test_bench_prints_json_and_writes_json_and_plot(tmp_path: Path) -> None:
    result = run_vecenv("bench", "CartPole-v1", *TINY, "--json", "--engines", "workers,gym-async,bare-loop", cwd=tmp_path)
    assert result.returncode == 0, result.stdout + result.stderr
    report = json.loads(result.stdout)
    assert json.loads((tmp_path / "bench-results" / "CartPole-v1-2.json").read_text()) == report
    assert (tmp_path / "bench-results" / "CartPole-v1-2.png").read_bytes().startswith(b"\x89PNG")
    assert "1 engine equals SyncVectorEnv over 256 steps" in report["check"]
    rows_by_name = {row["name"]: row for row in report["rows"]}
    assert list(rows_by_name) == ["workers", "gym-async", "bare-loop"]
    assert rows_by_name["workers"]["ratios"]["gym-async"]["count"] == 2
    assert rows_by_name["bare-loop"]["ratios"]["bare-loop"]["median"] == 1.0
    assert "Traceback" not in result.stderr


TINY_ENV = """
import gymnasium
import numpy as np

class Tiny(gymnasium.Env):
    observation_space = gymnasium.spaces.Box(0, 1, (2,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return np.zeros(2, np.float32), {}

    def step(self, action):
        print("a step")
        return np.ones(2, np.float32), 1.0, bool(self.np_random.random() < 0.1), False, {}

class Broken(Tiny):
    def step(self, action):
        raise ZeroDivisionError("broken on purpose")

gymnasium.register("Tiny-v0", Tiny)
"""


@pytest.mark.long
def test_bench_accepts_environments_from_modules_in_the_current_folder(tmp_path: Path) -> None:
    (tmp_path / "tiny_envs.py").write_text(TINY_ENV)
    for name, engines in (("Tiny-v0", "workers"), ("Tiny", "bare-loop")):
        result = run_vecenv("bench", f"tiny_envs:{name}", *TINY, "--engines", engines, cwd=tmp_path)
        assert result.returncode == 0, result.stdout + result.stderr
        assert "a step" not in result.stdout
        assert "tiny_envs:Tiny" in result.stdout
    assert (tmp_path / "bench-results" / "tiny_envs_Tiny-v0-2.json").exists()


@pytest.mark.long
def test_bench_of_a_failing_environment_prints_its_exception_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "tiny_envs.py").write_text(TINY_ENV)
    result = run_vecenv("bench", "tiny_envs:Broken", *TINY, "--engines", "workers", cwd=tmp_path)
    assert result.returncode == tools.USAGE
    assert result.stderr.strip().endswith(
        "the environment fails in Gymnasium's SyncVectorEnv: ZeroDivisionError: broken on purpose"
    )
    assert "Traceback" not in result.stderr


def test_ctrl_c_during_imports_ends_the_command_without_a_traceback(tmp_path: Path) -> None:
    interrupted = "import os, signal, time\nos.kill(os.getpid(), signal.SIGINT)\ntime.sleep(60)\n"
    for library in ("numpy", "gymnasium"):
        (tmp_path / f"{library}.py").write_text(interrupted)
    result = run_vecenv("plan", cwd=tmp_path)
    assert (result.returncode, result.stdout, result.stderr) == (tools.INTERRUPTED, "", "vecenv: interrupted\n")


@pytest.mark.slow
def test_scale_measures_and_plots_several_numbers_of_environments(tmp_path: Path) -> None:
    engines = ["--engines", "workers-1,workers-2,bare-loop"]
    result = run_vecenv("bench", *TINY, "--workers", "2", "--scale", *engines, "--out", "o", cwd=tmp_path)
    assert result.returncode == 0, result.stdout + result.stderr
    for row in ("vecenv, 1 worker", "vecenv, 2 workers", "bare loop, 2 processes"):
        assert row in result.stdout
    reports = json.loads((tmp_path / "o" / "CartPole-v1-2-scale.json").read_text())
    assert [report["num_envs"] for report in reports] == [1, 2]
    assert (tmp_path / "o" / "CartPole-v1-2-scale.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.long
def test_bench_with_wrong_trajectories_exits_with_code_1(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    other_env = partial(runners.make_env, "CartPole-v0")
    build = partial(runners.VectorRunner, partial(SyncVectorEnv, [other_env] * 2))
    candidate = runners.Candidate("wrong", "a wrong engine", build, "vecenv", checked=True)
    monkeypatch.setattr(runners, "default_candidates", lambda *_, **__: [candidate])
    assert cli.main(["bench", "Acrobot-v1", *TINY, "--out", str(tmp_path)]) == tools.WRONG
    error = capsys.readouterr().err
    assert "WRONG RESULTS, nothing was timed: a wrong engine differs from SyncVectorEnv at the reset" in error
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["bench", "CartPol-v1"], "'CartPol-v1': Environment `CartPol` doesn't exist."),
        (["bench", "ALE/Pongo-v5"], "Similar registered ids: ALE/Pong-v5"),
        (["bench", "nosuch_module:Env-v0"], "cannot import 'nosuch_module'"),
        (["bench", "json:Env-v0"], "'json:Env-v0': Environment `Env` doesn't exist."),
        (["plan", "sys:path"], "'sys:path': Environment `path` doesn't exist."),
        (["bench", "--engines", "worker"], "no engine 'worker'. The engines are: auto,"),
        (["bench", "--engines", ","], "no engine ''. The engines are: auto,"),
        (["plan", "CartPol-v1"], "CartPol-v1"),
        (["plan", "train.py"], "For a function in that file: train:function."),
        (["bench", "train.py:make"], "No module named 'train' (the module in train.py is 'train')"),
        (["bench", "gymnasium:make"], "gymnasium:make needs arguments (id): name a function that builds an environment"),
    ],
)
def test_wrong_name_of_an_environment_or_engine_prints_one_error_line(
    arguments: list[str], text: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    assert cli.main(arguments) == tools.USAGE
    error = capsys.readouterr().err
    assert error.startswith("vecenv: ")
    assert text in error
    assert len(error.splitlines()) == 1


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("x = 1 +", "cannot import 'broken': it raised SyntaxError: invalid syntax"),
        ("import sys; sys.exit(0)", "cannot import 'broken': it raised SystemExit: 0"),
    ],
)
def test_module_that_raises_when_it_is_imported_exits_with_2_and_one_line(source: str, text: str, tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text(source)
    result = run_vecenv("plan", "broken:make", cwd=tmp_path)
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr.startswith(f"vecenv: {text}")
    assert len(result.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["bench", "--num-envs", "0"], "must be a positive integer, got '0'"),
        (["bench", "--seconds", "inf"], "must be a positive number up to 1,000,000, got 'inf'"),
        (["bench", "--num-env", "3"], "unrecognized arguments: --num-env"),
        (["run", "--seed", "1", "train.py"], "unrecognized arguments: --seed; the program's own options follow its name"),
        (["plan", "--seed", "1", "CartPole-v1"], "usage: vecenv plan"),
        (["benhc"], "invalid choice: 'benhc'"),
        (["top", "--interval", "0"], "must be a positive number up to 1,000,000, got '0'"),
        (["top", "--interval", "1e12"], "must be a positive number up to 1,000,000, got '1e12'"),
        ([], "required: COMMAND"),
    ],
)
def test_wrong_usage_exits_with_code_2(arguments: list[str], text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_info:
        cli.main(arguments)
    assert exit_info.value.code == tools.USAGE
    assert text in capsys.readouterr().err


@pytest.mark.parametrize(
    ("library", "arguments", "install"),
    [
        ("rich", ["bench"], BENCH_INSTALL),
        ("matplotlib", ["bench", "--json"], BENCH_INSTALL),
        ("ale_py", ["bench", "ALE/Pong-v5"], BENCH_INSTALL),
        ("ale_py", ["plan", "ALE/Pong-v5"], BENCH_INSTALL),
        ("rich", ["top", "--once"], "pip install rich"),
    ],
)
def test_missing_library_error_names_its_install_command(
    library: str, arguments: list[str], install: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == library]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, library, None)
    assert cli.main(arguments) == tools.USAGE
    error = capsys.readouterr().err
    assert re.fullmatch(rf"vecenv: .*needs {library}: {re.escape(install)}\n", error)


def test_json_output_of_plan_and_top_needs_no_optional_library(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("rich", "matplotlib", "PIL", "psutil", "moviepy"):
        monkeypatch.setitem(sys.modules, name, None)
    for arguments in (["plan", "CartPole-v1"], ["top", "--interval", "0.01"]):
        assert cli.main([*arguments, "--json"]) in (0, tools.WRONG)
        assert json.loads(capsys.readouterr().out)


@pytest.mark.parametrize("command", [[], ["run"], ["bench"], ["plan"], ["conform"], ["replay"], ["top"]])
def test_help_shows_examples_and_exit_codes_and_exits_with_0(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_info:
        cli.main([*command, "--help"])
    assert exit_info.value.code == 0
    text = capsys.readouterr().out
    assert "--help" in text
    assert "Try: vecenv " in re.sub(r"\s+", " ", text)
    assert ("\nExit codes: " in text) == bool(command)


def test_commands_work_without_docstrings() -> None:
    assert "replay" in python_output("-OO", "-m", "vecenv", "--help")
    plan = python_output("-OO", "-m", "vecenv", "plan", "CartPole-v1", "--num-envs", "2")
    assert plan.startswith("Plan for 2 environments")


def test_conform_without_assert_statements_is_refused() -> None:
    result = run_python("-O", "-m", "vecenv", "conform", "gymnasium.vector:SyncVectorEnv")
    assert result.returncode == 2
    assert result.stderr.startswith("vecenv: the checks are assert statements, which -O and PYTHONOPTIMIZE remove")


@pytest.mark.parametrize("option", ["--num-workers", "--workers"])
def test_bench_accepts_both_options_for_the_number_of_workers(option: str) -> None:
    assert cli._build_parser().parse_args(["bench", option, "3"]).workers == 3


def test_unwritable_results_folder_is_rejected_before_measuring(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    assert cli.main(["bench", *TINY, "--out", str(tmp_path / "file")]) == tools.USAGE
    assert "cannot write the results" in capsys.readouterr().err


def test_os_error_of_the_measurement_is_not_reported_as_one_of_the_results_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*arguments: object, **options: object) -> None:
        raise OSError("too many open files")

    monkeypatch.setattr(benchmark, "compare", fail)
    with pytest.raises(OSError, match="too many open files"):
        cli.main(["bench", *TINY, "--out", str(tmp_path)])


def test_id_without_a_version_means_the_newest_and_keeps_its_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Worker processes need the name of the module, because they must import it before they build the environment."""
    (tmp_path / "registers_newest.py").write_text(
        "import gymnasium\n"
        "for version in (1, 3):\n"
        '    gymnasium.register(f"Newest-v{version}", "gymnasium.envs.classic_control:CartPoleEnv")\n'
    )
    monkeypatch.syspath_prepend(tmp_path)
    try:
        assert runners.resolve("registers_newest:Newest").args == ("registers_newest:Newest-v3",)
        assert runners.resolve("CartPole").args == ("CartPole-v1",)
    finally:
        for version in (1, 3):
            gymnasium.registry.pop(f"Newest-v{version}", None)
