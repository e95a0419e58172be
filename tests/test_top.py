"""Figures of running programs: what is published, what another process reads, and that nothing stays behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

import vecenv
from vecenv import published, top
from vecenv.errors import WorkerDied

pytestmark = pytest.mark.skipif(not published.available(), reason="cards are made of memfd: Linux only")

PROGRAM = """
import sys, time
import vecenv

if __name__ == "__main__":
    envs = vecenv.make_vec("CartPole-v1", 4, vector_kwargs={"num_workers": 2, "context": sys.argv[1]})
    if sys.argv[2] == "asks":
        envs.publish_stats("the program")
    envs.reset(seed=0)
    print("ready", flush=True)
    while True:
        envs.step(envs.action_space.sample())
        time.sleep(0.001)
"""


def rows() -> list[top.ProgramRow]:
    return top.Watcher(os.getpid()).read()


def make(count: int = 4, **options: Any) -> Any:
    return vecenv.make_vec("CartPole-v1", count, vector_kwargs={"num_workers": 2, **options})


def test_counts_are_those_of_the_program() -> None:
    envs = make(batch_size=4)
    assert rows() == [], "nobody asked"
    envs.publish_stats()
    envs.reset(seed=0)
    watcher = top.Watcher(os.getpid())
    watcher.read()
    began = time.monotonic()
    for _ in range(50):
        envs.step(envs.action_space.sample())
    seconds = time.monotonic() - began
    (row,) = watcher.read()
    assert (row.name, row.pid, row.num_envs, row.restarts, row.errors) == ("CartPole-v1", os.getpid(), 4, 0, 0)
    assert row.resets == envs.stats()["resets"]
    assert [worker.envs for worker in row.workers] == [(0, 1), (2, 3)]
    assert [worker.pid for worker in row.workers] == [process.pid for process in envs.processes]
    assert [worker.state for worker in row.workers] == ["stepping"] * 2
    steps = [worker.steps_per_second for worker in row.workers]
    assert steps[0] == pytest.approx(steps[1])
    assert 0.3 * 200 / seconds < row.steps_per_second <= 200 / seconds
    for worker in row.workers:
        assert 0.0 < worker.waiting <= 1.0
        assert worker.slowest_env is None or worker.envs[0] <= worker.slowest_env <= worker.envs[1]
    assert 0.0 <= row.waiting <= 1.0
    (still,) = watcher.read()
    assert [worker.state for worker in still.workers if worker.state != "busy"] == ["idle"] * 2
    assert still.steps_per_second == 0.0
    envs.close()
    assert rows() == []
    with pytest.raises(vecenv.make.gymnasium.error.ClosedEnvironmentError):
        envs.publish_stats()


def test_first_ready_steps_and_the_callers_share_count_too() -> None:
    envs = make(use_caller=True, num_workers=1, batch_size=2)
    envs.publish_stats("again")
    envs.publish_stats("both")
    envs.reset_async(seed=0)
    for _ in range(20):
        *_, infos = envs.recv()
        envs.send(envs.action_space.sample()[:2], infos["env_id"])
    (row,) = rows()
    assert row.name == "both"
    assert sorted(worker.kind for worker in row.workers) == ["caller", "process"]
    assert all(worker.state in ("stepping", "idle", "busy") for worker in row.workers)
    assert row.steps_per_second > 0
    envs.close()


def test_stopped_dead_and_replaced_workers_are_told_apart() -> None:
    envs = make()
    envs.publish_stats()
    envs.reset()
    first, second = (process.pid for process in envs.processes)
    os.kill(first, signal.SIGSTOP)
    os.kill(second, signal.SIGKILL)
    deadline = time.monotonic() + 5
    states: list[str] = []
    while time.monotonic() < deadline and states != ["stopped", "dead"]:
        states = [worker.state for worker in rows()[0].workers]
    assert states == ["stopped", "dead"]
    os.kill(first, signal.SIGCONT)
    with pytest.raises(WorkerDied):
        envs.step(envs.action_space.sample())
    envs.reset()
    (row,) = rows()
    assert [worker.restarts for worker in row.workers] == [0, 1]
    assert [worker.pid for worker in row.workers] == [process.pid for process in envs.processes]
    assert row.workers[1].pid != second
    assert row.errors == 1
    envs.close()


@pytest.mark.parametrize(("context", "asks"), [("fork", "asks"), ("forkserver", "environment")])
def test_another_process_sees_who_asked_and_a_kill_leaves_nothing(context: str, asks: str, tmp_path: Path) -> None:
    script = tmp_path / "program.py"
    script.write_text(PROGRAM)
    environment = {**os.environ, "VECENV_TOP": "1" if asks == "environment" else "0"}
    command = [sys.executable, str(script), context, asks]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as program:
        try:
            assert program.stdout is not None
            assert program.stdout.readline() == "ready\n"
            shown = [sys.executable, "-m", "vecenv", "top", "--pid", str(program.pid), "--interval", "0.3"]
            done = subprocess.run([*shown, "--json"], capture_output=True, text=True, timeout=60, check=False)
            assert done.returncode == 0, done.stderr
            (row,) = json.loads(done.stdout)["programs"]
            assert row["name"] == ("the program" if asks == "asks" else "CartPole-v1")
            assert [worker["state"] for worker in row["workers"]] == ["stepping"] * 2
            assert row["steps_per_second"] > 0
            table = subprocess.run([*shown, "--once"], capture_output=True, text=True, timeout=60, check=False)
            assert table.returncode == 0, table.stderr
            assert f"4 environments, pid {program.pid}" in table.stdout
            assert "slowest env" in table.stdout
        finally:
            program.kill()
    deadline = time.monotonic() + 10
    watcher = top.Watcher(program.pid)
    while (left := watcher.read()) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert left == []


def test_a_card_costs_next_to_nothing() -> None:
    envs = make()
    envs.publish_stats()
    began = time.perf_counter()
    for _ in range(1000):
        envs._card.update()
    assert time.perf_counter() - began < 0.1  # a microsecond each, and a busy machine
    envs.close()


def test_nothing_to_show_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    from vecenv import cli

    assert cli.main(["top", "--once", "--interval", "0.01", "--pid", str(os.getpid())]) == cli.WRONG
    assert "envs.publish_stats(), or when run with VECENV_TOP=1" in capsys.readouterr().err
    assert cli.main(["top", "--json", "--interval", "0.01", "--pid", str(os.getpid())]) == cli.WRONG
    assert json.loads(capsys.readouterr().out) == {"programs": []}
    assert cli.main(["top"]) == cli.USAGE
    assert "--once or --json" in capsys.readouterr().err
