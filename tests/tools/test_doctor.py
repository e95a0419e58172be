"""``vecenv doctor`` on this machine, and on machines that are worse."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import resource
import sys
import tomllib
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from vecenv.shm import arena
from vecenv.tools import doctor
from vecenv.tools.doctor import Finding, examine, main

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
    import subprocess

    subprocess.run([sys.executable, "-c", program], check=True, timeout=250)


def test_json_says_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    code = main(as_json=True)
    report = json.loads(capsys.readouterr().out)
    assert [one["name"] for one in report["findings"]] == [one.name for one in examine()]
    assert set(report["findings"][0]) == {"name", "value", "verdict", "advice"}
    assert (report["verdict"] == "bad") == (code == 1)


def test_print(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """No library is needed, and lines are wrapped at the width of the terminal."""
    monkeypatch.setenv("COLUMNS", "60")
    assert main() in (0, 1)
    shown = capsys.readouterr().out
    assert all(one.name in shown for one in examine())
    assert max(map(len, shown.splitlines())) <= 60


def test_the_exit_code_is_1_only_for_bad(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(doctor, "examine", lambda: [Finding("a", "b", "warn", "c")])
    assert main() == 0
    monkeypatch.setattr(doctor, "examine", lambda: [Finding("a", "b", "warn", "c"), Finding("d", "e", "bad", "f")])
    assert main() == 1
    assert main(as_json=True) == 1
    monkeypatch.setattr(doctor, "examine", lambda: [Finding("a", "b")])
    assert main() == 0
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
