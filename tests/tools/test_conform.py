"""``vecenv conform`` accepts correct engines, and reports the promise that an incorrect engine breaks."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from envs import NestedDictEnv
from gymnasium.vector import AutoresetMode, SyncVectorEnv, VectorEnv

import vecenv.tools.conform
from vecenv.testing.conformity import CHECKS, Check, make_program
from vecenv.tools import CliError
from vecenv.tools.cli import main
from vecenv.tools.conform import conform

HERE = Path(__file__).parent


@pytest.fixture(autouse=True)
def add_folder_to_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(HERE)


def states_by_check(engine: str, **options: Any) -> dict[str, str]:
    return {row.name: row.state for row in conform(engine, **options)}


@pytest.mark.parametrize(
    "engine",
    [
        pytest.param("gymnasium.vector:SyncVectorEnv", marks=pytest.mark.long),
        pytest.param("vecenv:AsyncVectorEnv", marks=pytest.mark.long),
        pytest.param("chunked_engine:make_chunked", marks=pytest.mark.long),
    ],
)
def test_correct_engine_breaks_no_promise(engine: str) -> None:
    states = states_by_check(engine, faults=True)
    assert len(states) == len(CHECKS)
    assert "broken" not in states.values(), states
    if not engine.startswith("gymnasium"):
        assert set(states.values()) == {"kept"}


BROKEN_PROMISES = {
    # engine in broken_engines.py -> the check that reports it
    "ReusesArrays": "arrays of an earlier step do not change",
    "WrongFinalObservation": "same-step: final observation and info",
    "ReportsOnlyTerminations": "termination is not truncation",
    "SwapsActions": "actions and rewards belong to this step",
    "SameSeedForAll": "an int seeds environment i with seed + i",
    "ResetsTwice": "each episode is reset once",
    "InfosWithoutMasks": "every info has a mask",
    "IgnoresMasks": "a masked reset leaves the others alone",
    "CountsResetsAsSteps": "next-step: the step after an end resets",
    "WithoutStep": "step: observations, rewards, flags and infos",
    "ExitsInStep": "actions and rewards belong to this step",
    "make_resets_in_same_step": "next-step: a reset has reward 0",
    "make_without_final_observations": "same-step: an end has a final observation",
}


@pytest.mark.long
@pytest.mark.parametrize(
    "engine",
    [pytest.param(name, marks=[pytest.mark.slow] if i % 3 else []) for i, name in enumerate(BROKEN_PROMISES)],
)
def test_broken_promise_is_reported_with_a_program_that_fails(engine: str, tmp_path: Path) -> None:
    rows = {row.name: row for row in conform(f"broken_engines:{engine}")}
    row = rows[BROKEN_PROMISES[engine]]
    assert row.state == "broken"
    assert any(row.why.values())
    if engine == "ExitsInStep":
        assert "process exited with exit code 3" in row.why.values()
    lines_after_imports = row.program.split("\n\n", 1)[1].strip().splitlines()
    assert len(lines_after_imports) <= 16
    program = tmp_path / "program.py"
    program.write_text(f"import sys\nsys.path.insert(0, {str(HERE)!r})\n{row.program}")
    result = subprocess.run([sys.executable, program], capture_output=True, text=True, check=False)
    assert result.returncode != 0
    assert "unexpected keyword argument" not in result.stderr


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.name)
def test_program_of_a_kept_promise_succeeds(check: Check) -> None:
    """The programs themselves contain no errors, such as undefined names."""
    engine = "vecenv:AsyncVectorEnv" if check.fault else "gymnasium.vector:SyncVectorEnv"
    text = make_program(check, engine, f"{engine.partition(':')[2]}(make_env_fns(3), autoreset_mode={check.modes[0]})")
    names: dict[str, Any] = {}
    try:
        exec(compile(text, check.name, "exec"), names)
    finally:
        for envs in names.values():
            if isinstance(envs, VectorEnv):
                envs.close()


@pytest.mark.long
def test_first_check_of_a_process_has_extra_time_for_imports(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vecenv.tools.conform, "_CHECK_SECONDS", 1.0)
    rows = conform("broken_engines:make_after_slow_import", [AutoresetMode.DISABLED])
    assert "no reply" not in str([row.why for row in rows])


@pytest.mark.slow
def test_hanging_engine_is_reported_with_its_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vecenv.tools.conform, "_CHECK_SECONDS", 1.0)
    monkeypatch.setattr(vecenv.tools.conform, "_START_SECONDS", 5.0)
    rows = conform("broken_engines:Hangs", [AutoresetMode.NEXT_STEP])
    assert {row.name: row.state for row in rows}["reset: observations and infos"] == "kept"
    assert any("no reply within 1 s" in why for row in rows for why in row.why.values())


@pytest.mark.long
def test_engine_that_hangs_while_it_is_built_is_built_once_per_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vecenv.tools.conform, "_CHECK_SECONDS", 1.0)
    monkeypatch.setattr(vecenv.tools.conform, "_START_SECONDS", 0.0)
    with pytest.raises(CliError, match="broken_engines:HangsInConstructor could not be built: no reply within 1 s"):
        conform("broken_engines:HangsInConstructor")


def test_masked_reset_check_accepts_structured_observations() -> None:
    check = next(check for check in CHECKS if check.name == "a masked reset leaves the others alone")
    check.run(SyncVectorEnv([NestedDictEnv] * 3))


def test_engine_with_short_episodes_breaks_no_promise() -> None:
    states = states_by_check("broken_engines:make_short_episodes", modes=[AutoresetMode.DISABLED])
    assert states["arrays of an earlier step do not change"] == "kept"
    assert "broken" not in states.values(), states


def test_engine_with_its_own_environments_runs_only_applicable_checks() -> None:
    rows = {row.name: row for row in conform("broken_engines:make_own_environments")}
    assert rows["spaces are batched"].state == "kept"
    assert rows["seeds reach each environment"].state == "refused"
    assert "it builds its own environments" in rows["seeds reach each environment"].why.values()


def test_command_prints_rows_programs_and_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["conform", "broken_engines:SwapsActions", "--modes", "NextStep"]) == 1
    output = capsys.readouterr().out
    assert "actions and rewards belong to this step" in output
    assert "an environment got another's action" in output
    assert "Documented: " in output
    assert "envs = SwapsActions(make_env_fns(num_envs" not in output
    assert "envs = SwapsActions(make_env_fns(3), autoreset_mode=AutoresetMode.NEXT_STEP)" in output
    assert main(["conform", "gymnasium.vector:SyncVectorEnv", "--modes", "SameStep, Disabled", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["engine"] == "gymnasium.vector:SyncVectorEnv"
    assert {row["state"] for row in report["rows"]} == {"kept"}
    assert not any(row["draws"] for row in report["rows"])


def test_command_warns_about_an_engine_that_uses_a_global_generator(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["conform", "broken_engines:UsesGlobalGenerator", "--modes", "Disabled"]) == 0
    assert "Warning: broken_engines:UsesGlobalGenerator draws from the generator of numpy.random" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["gymnasium.vector"], "is not of the form MODULE:NAME"),
        ([":X"], "'' is not the full name of a module"),
        ([".engines:X"], "'.engines' is not the full name of a module"),
        (["no_such_module_here:X"], "cannot import 'no_such_module_here'"),
        (["gymnasium.vector:SyncVectorEn"], "'gymnasium.vector' has no callable 'SyncVectorEn'"),
        (["broken_engines:needs_an_argument"], "could not be built: TypeError"),
        (["broken_engines:raises_in_constructor"], "could not be built: RuntimeError: no licence"),
        (
            ["broken_engines:make_own_environments", "--modes", "SameStep"],
            "was not checked: its only mode is AutoresetMode.NEXT_STEP, which --modes excludes",
        ),
        (["gymnasium.vector:SyncVectorEnv", "--modes", "sometimes"], "--modes: 'sometimes' is not a valid AutoresetMode"),
    ],
)
def test_wrong_usage_exits_with_2_and_an_error(arguments: list[str], text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["conform", *arguments]) == 2
    assert text in capsys.readouterr().err
