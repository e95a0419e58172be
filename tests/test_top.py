"""Figures of running programs: what is published, what another process reads, and that nothing stays behind."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
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
    for _ in range(2000):
        envs.step(envs.action_space.sample())
    seconds = time.monotonic() - began
    (row,) = watcher.read()
    assert (row.name, row.pid, row.num_envs, row.restarts, row.errors) == ("CartPole-v1", os.getpid(), 4, 0, 0)
    assert row.resets == envs.stats()["resets"]
    assert [worker.envs for worker in row.workers] == [(0, 1), (2, 3)]
    assert [worker.pid for worker in row.workers] == [process.pid for process in envs.processes]
    assert [worker.state for worker in row.workers] == ["stepping"] * 2
    steps = [worker.steps_per_second for worker in row.workers]
    assert steps[0] == pytest.approx(steps[1], rel=0.05)  # each may be a millisecond behind
    assert 0.3 * 8000 / seconds < row.steps_per_second <= 8000 / seconds
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


# A session leader that opens a terminal gets it as its own, and so Ctrl-C from it.
IN_TERMINAL = "import os, sys; os.open(os.ttyname(0), os.O_RDWR); os.execv(sys.executable, [sys.executable, *sys.argv[1:]])"
SHOW, HIDE, ENTER, LEAVE = (f"\x1b[?{code}" for code in ("25h", "25l", "1049h", "1049l"))  # cursor, screen


class Terminal:
    """A terminal of 100 by 30, and a command in it; ``text`` is all that was drawn."""

    def __init__(self, command: list[str]) -> None:
        import pty
        import termios

        self._screen, inside = pty.openpty()
        termios.tcsetwinsize(inside, (30, 100))
        self._inside, self._settings = inside, termios.tcgetattr(inside)
        self.text = ""
        self.command = subprocess.Popen(
            [sys.executable, "-c", IN_TERMINAL, *command],
            stdin=inside, stdout=inside, stderr=inside, start_new_session=True, env={**os.environ, "TERM": "xterm"},
        )  # fmt: skip

    def read_until(self, seen: Callable[[str], bool], seconds: float = 30.0) -> None:
        deadline = time.monotonic() + seconds
        while not seen(self.text) and time.monotonic() < deadline:
            if select.select([self._screen], [], [], 0.05)[0]:
                self.text += os.read(self._screen, 1 << 16).decode()
        assert seen(self.text), self.text

    def press_ctrl_c(self) -> None:
        os.write(self._screen, b"\x03")

    def is_as_before(self) -> bool:
        import termios

        return termios.tcgetattr(self._inside) == self._settings

    def close(self) -> None:
        self.command.kill()
        self.command.wait()
        os.close(self._screen)
        os.close(self._inside)


@pytest.fixture
def live() -> Iterator[Terminal]:
    """``vecenv top`` of this program, renewed every 0.2 seconds."""
    terminal = Terminal(["-m", "vecenv", "top", "--pid", str(os.getpid()), "--interval", "0.2"])
    yield terminal
    terminal.close()


@pytest.mark.parametrize("how", ["Ctrl-C", "SIGTERM"])
def test_a_live_table_is_renewed_and_gives_the_terminal_back(live: Terminal, how: str) -> None:
    with contextlib.closing(make()) as envs:
        envs.publish_stats("shown live")
        envs.reset(seed=0)
        live.read_until(lambda text: text.count("shown live: 4 environments") >= 3)
        for process in envs.processes:
            assert str(process.pid) in live.text
        envs.close()
        live.read_until(lambda text: "Nothing to show" in text)
    live.press_ctrl_c() if how == "Ctrl-C" else live.command.terminate()
    live.read_until(lambda text: LEAVE in text)
    assert live.command.wait(timeout=10) == 0
    assert "Traceback" not in live.text
    assert live.text.index(ENTER) < live.text.index("shown live") < live.text.rindex(LEAVE)
    assert live.text.rindex(HIDE) < live.text.rindex(SHOW)
    assert live.is_as_before()


def test_a_card_costs_next_to_nothing() -> None:
    envs = make()
    envs.publish_stats()
    began = time.process_time()
    for _ in range(1000):
        envs._card.update()
    assert time.process_time() - began < 0.1  # a microsecond each
    envs.close()


def test_nothing_to_show_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    from vecenv import cli

    assert cli.main(["top", "--once", "--interval", "0.01", "--pid", str(os.getpid())]) == cli.WRONG
    assert "envs.publish_stats(), or when run with VECENV_TOP=1" in capsys.readouterr().err
    assert cli.main(["top", "--json", "--interval", "0.01", "--pid", str(os.getpid())]) == cli.WRONG
    assert json.loads(capsys.readouterr().out) == {"programs": []}
    assert cli.main(["top"]) == cli.USAGE
    assert "--once or --json" in capsys.readouterr().err
