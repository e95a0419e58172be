"""Commands: the command line, the doctor, and what conforms."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import resource
import subprocess
import sys
import tomllib
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import gymnasium
import pytest
from gymnasium.vector import SyncVectorEnv

from vecenv import tools
from vecenv.errors import how_to_install
from vecenv.shm import arena
from vecenv.tools import cli, doctor, runners
from vecenv.tools.doctor import Finding, examine

# --- The command line: what it prints, what it writes, how it fails -----------------------------

BENCH = how_to_install("bench")
TINY = ["--num-envs", "2", "--seconds", "0.05", "--repeats", "2"]


def run(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "vecenv", *arguments]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=250, check=False)


def test_plan_wraps_at_the_width_of_the_terminal_and_keeps_every_word(monkeypatch: pytest.MonkeyPatch) -> None:
    text = "Plan:\n  " + "a step of 1.5 us, " * 12 + "measured\n  1 + caller          84,937 steps per second"
    monkeypatch.delenv("COLUMNS", raising=False)
    monkeypatch.setattr("shutil.get_terminal_size", lambda **given: os.terminal_size(given["fallback"]))
    assert tools.fitted(text) == text  # no terminal: a file or a pipe gets whole lines
    monkeypatch.undo()
    monkeypatch.setenv("COLUMNS", "60")
    fitted = tools.fitted(text).splitlines()
    assert max(map(len, fitted)) <= 60
    assert " ".join(fitted).split() == text.split()
    assert fitted[-1] == text.splitlines()[-1]


@pytest.mark.long
def test_bench_prints_json_and_writes_json_and_picture(tmp_path: Path) -> None:
    done = run("bench", "CartPole-v1", *TINY, "--json", "--engines", "workers,gym-async,bare-loop", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    printed = json.loads(done.stdout)
    assert json.loads((tmp_path / "bench-results" / "CartPole-v1-2.json").read_text()) == printed
    assert (tmp_path / "bench-results" / "CartPole-v1-2.png").read_bytes().startswith(b"\x89PNG")
    assert "1 engine equals SyncVectorEnv over 256 steps" in printed["check"]
    by_name = {row["name"]: row for row in printed["rows"]}
    assert list(by_name) == ["workers", "gym-async", "bare-loop"]
    assert by_name["workers"]["ratios"]["gym-async"]["count"] == 2
    assert by_name["bare-loop"]["ratios"]["bare-loop"]["median"] == 1.0
    assert "Traceback" not in done.stderr


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
        print("chatter")
        return np.ones(2, np.float32), 1.0, bool(self.np_random.random() < 0.1), False, {}

class Broken(Tiny):
    def step(self, action):
        raise ZeroDivisionError("broken on purpose")

gymnasium.register("Tiny-v0", Tiny)
"""


@pytest.mark.long
def test_bench_takes_environments_from_modules_in_the_current_folder(tmp_path: Path) -> None:
    (tmp_path / "tiny_envs.py").write_text(TINY_ENV)
    for name, engines in (("Tiny-v0", "workers"), ("Tiny", "bare-loop")):
        done = run("bench", f"tiny_envs:{name}", *TINY, "--engines", engines, cwd=tmp_path)
        assert done.returncode == 0, done.stdout + done.stderr
        assert "chatter" not in done.stdout
        assert "tiny_envs:Tiny" in done.stdout
    assert (tmp_path / "bench-results" / "tiny_envs_Tiny-v0-2.json").exists()


@pytest.mark.long
def test_bench_of_a_broken_environment_names_its_error(tmp_path: Path) -> None:
    (tmp_path / "tiny_envs.py").write_text(TINY_ENV)
    done = run("bench", "tiny_envs:Broken", *TINY, "--engines", "workers", cwd=tmp_path)
    assert done.returncode == tools.USAGE
    assert done.stderr.strip().endswith(
        "the environment fails in Gymnasium's SyncVectorEnv too: ZeroDivisionError: broken on purpose"
    )
    assert "Traceback" not in done.stderr


@pytest.mark.long
@pytest.mark.parametrize("command", ["bench", "plan", "watch"])
def test_an_environment_that_wants_arguments_says_what_to_write(command: str, tmp_path: Path) -> None:
    functions = "\ndef needs(path):\n    return Tiny()\n\ndef plain():\n    return Tiny()\n"
    (tmp_path / "tiny_envs.py").write_text(TINY_ENV + functions)
    done = run(command, f"tiny_envs:{'plain' if command == 'watch' else 'needs'}", cwd=tmp_path)
    assert done.returncode == tools.USAGE
    last = done.stderr.strip().splitlines()[-1]
    advice = "let tiny_envs:plain take that" if command == "watch" else "write a function in that module that gives them"
    assert advice in last
    assert not list(tmp_path.glob("bench-results/*"))


def test_ctrl_c_while_libraries_are_imported_ends_at_once_and_quietly(tmp_path: Path) -> None:
    interrupted = "import os, signal, time\nos.kill(os.getpid(), signal.SIGINT)\ntime.sleep(60)\n"
    for library in ("numpy", "gymnasium"):
        (tmp_path / f"{library}.py").write_text(interrupted)
    done = run("doctor", cwd=tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (tools.INTERRUPTED, "", "vecenv: interrupted\n")


@pytest.mark.slow
def test_scale_draws_sizes_and_worker_counts(tmp_path: Path) -> None:
    engines = ["--engines", "workers-1,workers-2,bare-loop"]
    done = run("bench", *TINY, "--workers", "2", "--scale", *engines, "--out", "o", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    for row in ("vecenv, 1 worker", "vecenv, 2 workers", "bare loop, 2 processes"):
        assert row in done.stdout
    reports = json.loads((tmp_path / "o" / "CartPole-v1-2-scale.json").read_text())
    assert [report["num_envs"] for report in reports] == [1, 2]
    assert (tmp_path / "o" / "CartPole-v1-2-scale.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.long
def test_wrong_trajectories_end_with_code_1(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    longer = partial(runners.make_env, "CartPole-v0")  # ends after 200 steps, and rewards and observations are the same
    build = partial(runners.VectorRunner, partial(SyncVectorEnv, [longer] * 2))
    wrong = runners.Candidate("wrong", "a wrong engine", build, "vecenv", checked=True)
    monkeypatch.setattr(runners, "default_candidates", lambda *_, **__: [wrong])
    assert cli.main(["bench", "Acrobot-v1", *TINY, "--out", str(tmp_path)]) == tools.WRONG
    error = capsys.readouterr().err
    assert "WRONG RESULTS, nothing was timed: a wrong engine differs from SyncVectorEnv at the reset" in error
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["bench", "CartPol-v1"], "no environment 'CartPol-v1' is registered; did you mean CartPole-v1"),
        (["bench", "ALE/Pongo-v5"], "did you mean ALE/Pong-v5"),
        (["bench", "nosuch_module:Env-v0"], "cannot import 'nosuch_module'"),
        (["bench", "json:Env-v0"], "'json' has no 'Env-v0' and registers no environment of that name"),
        (["bench", "json:JSONDecode"], "did you mean JSONDecoder"),
        (["plan", "sys:path"], "which cannot be called to build an environment"),
        (["bench", "--engines", "worker"], "no engine 'worker'; did you mean workers? There are: auto,"),
        (["bench", "--engines", ","], "--engines names no engine"),
        (["plan", "CartPol-v1"], "CartPol-v1"),
        (["watch", "CartPol-v1"], "did you mean CartPole-v1"),
        (["watch", "CartPole-v1", "--out", "a.avi"], "a video is written as .gif or .mp4, got 'a.avi'"),
        (["watch", "CartPole-v1", "--policy", "nothing"], "a policy is written module:function, got 'nothing'"),
        (["watch", "CartPole-v1", "--policy", "nosuch_module:act"], "cannot import 'nosuch_module'"),
        (["watch", "CartPole-v1", "--policy", "json:act"], "'json' has no function 'act'"),
    ],
)
def test_wrong_names_say_which_names_there_are(
    arguments: list[str], text: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    assert cli.main(arguments) == tools.USAGE
    error = capsys.readouterr().err
    assert error.startswith("vecenv: ")
    assert text in error
    assert len(error.splitlines()) == 1


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["bench", "--num-envs", "0"], "wants a positive integer, got '0'"),
        (["bench", "--seconds", "inf"], "wants a positive number, got 'inf'"),
        (["bench", "--num_envs=3"], "did you mean --num-envs"),
        (["bench", "--num-env", "3"], "did you mean --num-envs"),
        (["benhc"], "did you mean bench?"),
        (["wacth", "CartPole-v1"], "did you mean watch?"),
        (["top", "--interval", "0"], "wants a positive number, got '0'"),
        ([], "required: COMMAND"),
    ],
)
def test_wrong_usage_ends_with_code_2(arguments: list[str], text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(arguments)
    assert ended.value.code == tools.USAGE
    assert text in capsys.readouterr().err


@pytest.mark.parametrize(
    ("library", "arguments", "install"),
    [
        ("rich", ["bench"], BENCH),
        ("matplotlib", ["bench", "--json"], BENCH),
        ("ale_py", ["bench", "ALE/Pong-v5"], BENCH),
        ("ale_py", ["plan", "ALE/Pong-v5"], BENCH),
        ("rich", ["watch", "CartPole-v1"], BENCH),
        ("PIL", ["watch", "CartPole-v1", "--json"], BENCH),
        ("moviepy", ["watch", "CartPole-v1", "--out", "a.mp4"], "pip install 'moviepy>=2'"),
        ("rich", ["top", "--once"], BENCH),
    ],
)
def test_a_missing_library_is_named_with_what_brings_it(
    library: str, arguments: list[str], install: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == library]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, library, None)
    assert cli.main(arguments) == tools.USAGE
    error = capsys.readouterr().err
    assert re.fullmatch(rf"vecenv: .*needs {library.replace('_', '[-_]')}[,:].* {re.escape(install)}\n", error)


def test_what_is_read_by_programs_needs_no_library(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("rich", "matplotlib", "PIL", "psutil", "moviepy"):
        monkeypatch.setitem(sys.modules, name, None)
    for arguments in (["plan", "CartPole-v1"], ["doctor"], ["top", "--interval", "0.01"]):
        assert cli.main([*arguments, "--json"]) in (0, tools.WRONG)
        assert json.loads(capsys.readouterr().out)


@pytest.mark.parametrize("command", [[], ["bench"], ["doctor"], ["plan"], ["watch"], ["top"]])
def test_help_ends_well(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main([*command, "--help"])
    assert ended.value.code == 0
    assert "--help" in capsys.readouterr().out


def test_results_that_cannot_be_written_are_known_before_anything_is_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    assert cli.main(["bench", *TINY, "--out", str(tmp_path / "file")]) == tools.USAGE
    assert "cannot write the results" in capsys.readouterr().err


def test_doctor_speaks_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["doctor", "--json"]) in (0, 1)
    assert json.loads(capsys.readouterr().out)


@pytest.mark.long
def test_watch_writes_a_video_of_the_users_policy(tmp_path: Path) -> None:
    (tmp_path / "acting.py").write_text(
        "import numpy as np\n"
        "def act(observations):\n"
        "    assert observations.shape == (3, 4), observations.shape\n"
        "    return np.zeros(3, np.int64)\n"
    )
    options = ["--num-envs", "3", "--steps", "7", "--policy", "acting:act", "--seed", "1", "--json"]
    done = run("watch", "CartPole-v1", *options, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    printed = json.loads(done.stdout)
    assert (printed["file"], printed["frames"], printed["policy"]) == ("CartPole-v1.gif", 8, "acting:act")
    assert printed["size"][0] <= 800
    assert (tmp_path / "CartPole-v1.gif").read_bytes().startswith(b"GIF89a")
    assert "Traceback" not in done.stderr


@pytest.mark.long
def test_watch_of_something_that_cannot_be_drawn_says_so(tmp_path: Path) -> None:
    (tmp_path / "tiny_envs.py").write_text(TINY_ENV)
    done = run("watch", "tiny_envs:Tiny-v0", "--steps", "2", cwd=tmp_path)
    assert done.returncode == tools.USAGE
    assert "Traceback" not in done.stderr
    assert done.stderr.strip().splitlines()[-1].startswith("vecenv: ")
    assert list(tmp_path.glob("*.gif")) == []


def test_an_id_without_a_version_is_the_newest_and_keeps_its_module(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The processes that build it have not imported the module."""
    (tmp_path / "registers_newest.py").write_text(
        "import gymnasium\n"
        'for v in (1, 3):\n    gymnasium.register(f"Newest-v{v}", "gymnasium.envs.classic_control:CartPoleEnv")\n'
    )
    monkeypatch.syspath_prepend(tmp_path)
    try:
        assert runners.resolve("registers_newest:Newest").args == ("registers_newest:Newest-v3",)
        assert runners.resolve("CartPole").args == ("CartPole-v1",)
    finally:
        for version in (1, 3):
            gymnasium.registry.pop(f"Newest-v{version}", None)


# --- ``vecenv doctor`` on this machine, and on machines that are worse --------------------------

GIB = 2**30


def finding(name: str) -> Finding:
    """The one finding of this name."""
    (one,) = [found for found in examine() if found.name == name]
    return one


class Disk(NamedTuple):
    f_blocks: int
    f_bavail: int
    f_frsize: int = 4096


@pytest.fixture
def files(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """What files say; what is not in here does not exist."""
    contents: dict[str, str] = {}
    for module, name in ((doctor, "_read"), (arena, "kernel_file")):
        monkeypatch.setattr(module, name, lambda path: contents.get(str(path), ""))
    return contents


def test_a_finding_is_a_value() -> None:
    one = Finding("name", "value", "warn", "advice")
    assert dataclasses.astuple(one) == ("name", "value", "warn", "advice")
    with pytest.raises(dataclasses.FrozenInstanceError):
        one.value = "other"


def test_examine_covers_what_decides_reliability() -> None:
    findings = examine()
    names = [one.name for one in findings]
    assert len(names) == len(set(names))
    needed = ("python", "workers", "start methods", "memfd", "pidfd", "memory")
    assert {*needed, "open files", "processes", "cores", "gymnasium", "numpy"} <= set(names)
    assert {"envpool", "jax", "brax", "ray", "torch", "tianshou", "torchrl", "extra bench"} <= set(names)
    assert all(one.verdict in ("ok", "warn", "bad", "none") for one in findings)
    assert all(one.value for one in findings)
    assert all(one.advice for one in findings if one.verdict != "ok"), "whatever is not right comes with what to do"


@pytest.mark.long
def test_examining_changes_nothing() -> None:
    """No start method is fixed, nothing heavy is imported."""
    program = (
        "import multiprocessing, sys; from vecenv.tools.doctor import examine; examine();"
        "assert multiprocessing.get_start_method(allow_none=True) is None;"
        "assert not {'torch', 'jax', 'ray', 'brax', 'envpool', 'rich'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=250)


def test_json_says_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    code = doctor.main(as_json=True)
    report = json.loads(capsys.readouterr().out)
    assert [one["name"] for one in report["findings"]] == [one.name for one in examine()]
    assert set(report["findings"][0]) == {"name", "value", "verdict", "advice"}
    assert (report["verdict"] == "bad") == (code == 1)


def test_print(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """No library is needed, and lines are wrapped at the width of the terminal."""
    monkeypatch.setenv("COLUMNS", "60")
    assert doctor.main() in (0, 1)
    shown = capsys.readouterr().out
    assert all(one.name in shown for one in examine())
    assert max(map(len, shown.splitlines())) <= 60


def test_the_exit_code_is_1_only_for_bad(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(doctor, "examine", lambda: [Finding("a", "b", "warn", "c")])
    assert doctor.main() == 0
    monkeypatch.setattr(doctor, "examine", lambda: [Finding("a", "b", "warn", "c"), Finding("d", "e", "bad", "f")])
    assert doctor.main() == 1
    assert doctor.main(as_json=True) == 1
    monkeypatch.setattr(doctor, "examine", lambda: [Finding("a", "b")])
    assert doctor.main() == 0
    assert "Everything" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["memfd", "pidfd"])
def test_missing_and_forbidden_system_calls(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    call = {"memfd": "memfd_create", "pidfd": "pidfd_open"}[name]

    def refuse(*args: Any) -> int:
        raise PermissionError(1, "Operation not permitted")

    assert finding(name).verdict == "ok"
    monkeypatch.setattr(os, call, refuse)
    assert finding(name).verdict == {"memfd": "bad", "pidfd": "warn"}[name]
    assert "not permitted" in finding(name).value
    monkeypatch.delattr(os, call)
    assert finding(name).verdict == "warn"


def test_what_is_for_workers_is_left_out_where_there_can_be_none(monkeypatch: pytest.MonkeyPatch) -> None:
    assert finding("workers").verdict == "ok"
    monkeypatch.setattr(doctor, "why_no_processes", lambda: "nobody waits here")
    assert finding("workers").verdict == "bad"
    assert "nobody waits here" in finding("workers").value
    assert "num_workers=0" in finding("workers").advice
    assert not {"memfd", "pidfd", "/dev/shm"} & {one.name for one in examine()}


@pytest.mark.parametrize(("free", "verdict"), [(1, "warn"), (2**20, "ok")])
def test_dev_shm_matters_only_without_memfd(free: int, verdict: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "statvfs", lambda path: Disk(2**21, free))
    assert "/dev/shm" not in {one.name for one in examine()}
    monkeypatch.delattr(os, "memfd_create")
    one = finding("/dev/shm")
    assert one.verdict == verdict
    assert one.value.startswith("8.0 GiB")
    assert ("--shm-size" in one.advice) == (verdict == "warn")


@pytest.mark.parametrize(("available", "verdict"), [(8 * GIB, "ok"), (GIB // 2, "warn"), (GIB // 8, "bad"), (None, "ok")])
def test_memory(available: int | None, verdict: str, files: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "available_memory", lambda: available)
    one = finding("memory")
    assert one.verdict == verdict
    assert bool(one.advice) == (verdict != "ok")


@pytest.mark.parametrize("version", [1, 2])
def test_a_limit_of_any_control_group_around_counts(
    version: int, files: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The group's own limit is none; its parent's is tight."""
    monkeypatch.setattr(doctor, "available_memory", lambda: 8 * GIB)
    if version == 2:
        base, limit, usage = "/sys/fs/cgroup", "memory.max", "memory.current"
        files["/proc/self/cgroup"] = "0::/batch/job7\n"
        files[f"{base}/batch/job7/{limit}"] = "max\n"
    else:
        base, limit, usage = "/sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes"
        files["/proc/self/cgroup"] = "5:cpu,cpuacct:/x\n3:memory:/batch/job7\n"
        files[f"{base}/batch/job7/{limit}"] = "9223372036854771712\n"
    files[f"{base}/batch/job7/{usage}"] = "1000\n"
    files[f"{base}/batch/{limit}"] = f"{GIB}\n"
    files[f"{base}/batch/{usage}"] = f"{GIB // 2}\n"
    one = finding("memory")
    assert one.verdict == "warn"
    assert one.value == "512 MiB available; control group /batch leaves 512 MiB of 1.0 GiB"
    assert "limit" in one.advice


@pytest.mark.parametrize(("soft", "verdict"), [(64, "bad"), (1024, "warn"), (100_000, "ok"), (-1, "ok")])
def test_open_files(soft: int, verdict: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda which: (soft, 200_000))
    one = finding("open files")
    assert one.verdict == verdict
    assert ("ulimit -n" in one.advice) == (verdict != "ok")
    assert soft == -1 or "1024 need" in one.value


@pytest.mark.parametrize(("limit", "verdict"), [("32", "bad"), ("100", "warn"), ("4096", "ok"), ("max", "ok")])
def test_processes(limit: str, verdict: str, files: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda which: (-1, -1))
    files["/sys/fs/cgroup/pids.max"] = f"{limit}\n"
    assert finding("processes").verdict == verdict


@pytest.mark.parametrize(("usable", "verdict"), [(1, "warn"), (2, "ok"), (8, "ok")])
def test_cores(usable: int, verdict: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "usable_cores", lambda: usable)
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    one = finding("cores")
    assert one.verdict == verdict
    assert one.value.startswith(f"{usable} of 8")
    assert bool(one.advice) == (usable < 8)


def test_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_version", lambda name: None if name in ("ray", "numpy") else "1.2.3")
    assert finding("jax").value.startswith("1.2.3")
    assert (finding("ray").verdict, finding("ray").value) == ("none", "not installed")
    assert "pip install" in finding("ray").advice
    assert finding("numpy").verdict == "bad"
    monkeypatch.setattr(doctor, "_version", lambda name: None)
    assert "torch, in its CPU build" in finding("torchrl").advice
    assert finding("envpool").advice.startswith("for EnvPool's C++ threads: pip install -e '.[envpool]' in a checkout")
    bench = finding("extra bench")
    assert (bench.verdict, bench.value) == ("none", "without rich, matplotlib, pillow, psutil")
    assert "vecenv bench, watch and top" in bench.advice


def test_what_bench_needs_is_in_its_extra() -> None:
    extras = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert set(doctor._BENCH) <= {re.split(r"[>=\[]", wanted)[0] for wanted in extras["bench"]}
    assert set(re.findall(r"vecenv\[(\w+)", str(doctor._BACKENDS))) <= set(extras)


def test_one_broken_look_does_not_hide_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> Any:
        raise RuntimeError("no such thing here")

    monkeypatch.setattr(doctor, "usable_cores", broken)
    (odd,) = [one for one in examine() if "no such thing here" in one.value]
    assert (odd.name, odd.verdict) == ("cores", "warn")
    assert finding("memfd").verdict == "ok"

