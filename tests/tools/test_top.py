"""``publish_stats`` and ``vecenv top``: published values, other programs, files, and the screen."""

from __future__ import annotations

import contextlib
import errno
import gc
import io
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from signals import signal_handler

import vecenv
from vecenv import tools
from vecenv.engine import published
from vecenv.errors import WorkerDied
from vecenv.tools import top

pytestmark = pytest.mark.skipif(not published.is_supported(), reason="Linux only")

PROGRAM = """
import sys, time
import vecenv

if __name__ == "__main__":
    envs = vecenv.make_vec("CartPole-v1", 4, vector_kwargs={"num_workers": 2, "context": sys.argv[1]})
    if sys.argv[2] == "call":
        envs.publish_stats("the program")
    envs.reset(seed=0)
    print("ready", flush=True)
    while True:
        envs.step(envs.action_space.sample())
        time.sleep(0.001)
"""


def read_rows() -> list[top.ProgramRow]:
    return top.Watcher(os.getpid()).read()


def make_envs(count: int = 4, **options: Any) -> Any:
    return vecenv.make_vec("CartPole-v1", count, vector_kwargs={"num_workers": 2, **options})


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Set and return the folder in which this process and its children publish their files."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    return tmp_path / "vecenv"


def step_for(envs: Any, seconds: float) -> int:
    """Step for ``seconds``, and return the number of steps."""
    count, deadline = 0, time.monotonic() + seconds
    while time.monotonic() < deadline:
        envs.step(envs.action_space.sample())
        count += 1
    return count


@pytest.mark.long
def test_published_stats_match_the_program_and_close_removes_the_file(folder: Path) -> None:
    envs = make_envs(batch_size=4)
    assert read_rows() == [], "statistics were published before the call of publish_stats()"
    envs.publish_stats()
    envs.reset(seed=0)
    watcher = top.Watcher(os.getpid())
    watcher.read()
    started_at = time.monotonic()
    step_count = step_for(envs, 1.2)  # long enough for two writes of the file
    seconds = time.monotonic() - started_at
    (row,) = watcher.read()
    assert (row.name, row.pid, row.num_envs, row.restarts, row.errors) == ("CartPole-v1", os.getpid(), 4, 0, 0)
    assert 0 < row.resets <= envs.stats()["resets"]
    assert [worker.envs for worker in row.workers] == [(0, 1), (2, 3)]
    assert [worker.pid for worker in row.workers] == [process.pid for process in envs.processes]
    assert {worker.state for worker in row.workers} <= {"stepping", "waiting"}
    steps = [worker.steps_per_second for worker in row.workers]
    assert steps[0] == pytest.approx(steps[1], rel=0.05)  # each file may be a millisecond old
    assert 0.1 < row.steps_per_second / (4 * step_count / seconds) < 10
    for worker in row.workers:
        assert 0.0 < worker.waiting <= 1.0
        assert worker.slowest_env is None or worker.envs[0] <= worker.slowest_env <= worker.envs[1]
    assert 0.0 <= row.waiting <= 1.0
    time.sleep(1.6)
    (idle_row,) = watcher.read()
    assert len(idle_row.workers) == 2
    assert {worker.state for worker in idle_row.workers} <= {"idle", "busy"}  # "busy" if the machine is
    assert idle_row.steps_per_second == 0.0
    assert idle_row.seconds_since_result > 1.5
    envs.close()
    assert read_rows() == []
    assert list(folder.iterdir()) == []
    with pytest.raises(vecenv.make.gymnasium.error.ClosedEnvironmentError):
        envs.publish_stats()


def test_stats_include_first_ready_steps_and_the_callers_share(closes: Any) -> None:
    envs = closes(make_envs(use_caller=True, num_workers=1, batch_size=2))
    envs.publish_stats("first name")
    envs.publish_stats("second name")
    envs.reset_async(seed=0)
    deadline = time.monotonic() + 0.7
    while time.monotonic() < deadline:
        *_, infos = envs.recv()
        envs.send(envs.action_space.sample()[:2], infos["env_id"])
    (row,) = read_rows()
    assert row.name == "second name"
    assert sorted(worker.kind for worker in row.workers) == ["caller", "process"]
    assert all(worker.state in ("stepping", "waiting", "idle", "busy") for worker in row.workers)
    assert row.steps_per_second > 0


def test_first_reading_after_a_late_publish_stats_has_the_rates_since_construction(closes: Any) -> None:
    envs = closes(make_envs())
    envs.reset(seed=0)
    step_for(envs, 0.3)
    envs.publish_stats()
    (row,) = read_rows()
    assert 0.5 < row.steps_per_second / envs.stats()["steps_per_second"] < 2.0
    assert row.waiting < 1.0
    assert all(worker.waiting > 0.0 for worker in row.workers)


def test_timeout_error_of_a_signal_handler_while_the_file_is_written_is_raised_and_the_step_stays_pending(
    closes: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    envs = closes(make_envs())
    envs.publish_stats()
    envs.reset(seed=0)
    monkeypatch.setattr(published.json, "dump", lambda *_: signal.raise_signal(signal.SIGUSR1))
    envs._stats_file._due = 0.0
    with signal_handler(signal.SIGUSR1, TimeoutError), pytest.raises(TimeoutError):
        envs.step([0] * 4)
    monkeypatch.undo()
    assert envs.step_wait()[1].tolist() == [1.0] * 4


def test_publish_stats_that_cannot_write_leaves_no_file_and_keeps_the_earlier_one(
    folder: Path, closes: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise OSError(errno.ENOSPC, "the disk is full")

    envs = closes(make_envs())
    envs.publish_stats("first")
    files = list(folder.iterdir())
    written = files[0].read_text()
    monkeypatch.setattr(published.json, "dump", fail)
    with pytest.raises(OSError, match="the disk is full"):
        envs.publish_stats("second")
    monkeypatch.undo()
    assert list(folder.iterdir()) == files
    envs._stats_file._due = 0.0
    envs.reset(seed=0)
    assert list(folder.iterdir()) == files
    assert files[0].read_text() != written


def test_file_of_an_unclosed_vector_env_is_removed_when_it_is_collected(folder: Path) -> None:
    envs = make_envs()
    envs.publish_stats()
    assert len(list(folder.iterdir())) == 1
    with pytest.warns(ResourceWarning, match="unclosed AsyncVectorEnv"):  # noqa: PT031
        del envs
        gc.collect()
    assert list(folder.iterdir()) == []


def test_file_is_private_and_a_forked_child_does_not_remove_it(folder: Path, closes: Any) -> None:
    envs = closes(make_envs())
    envs.publish_stats()
    (file,) = folder.iterdir()
    assert (folder.stat().st_mode & 0o777, file.stat().st_mode & 0o777) == (0o700, 0o600)
    if (child := os.fork()) == 0:
        envs._stats_file.close()
        os._exit(0)
    os.waitpid(child, 0)
    assert len(read_rows()) == 1


def test_publish_stats_rejects_folder_open_to_others(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder.mkdir(mode=0o755)
    monkeypatch.setattr(published, "tempfile", SimpleNamespace(gettempdir=lambda: str(tmp_path / "temporary")))
    with contextlib.closing(make_envs()) as envs:
        with pytest.raises(OSError, match=r"publish_stats\(\) found no folder.*open to other users; set XDG_RUNTIME_DIR"):
            envs.publish_stats()
        (tmp_path / "temporary").mkdir()
        envs.publish_stats("elsewhere")
        assert [row.name for row in read_rows()] == ["elsewhere"]
        (tmp_path / "temporary").rename(tmp_path / "removed")
        for _ in range(2):
            with pytest.raises(OSError, match="found no folder"):
                envs.publish_stats()


def test_folder_open_to_others_causes_a_warning_if_an_environment_variable_publishes(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder
) -> None:
    folder.mkdir(mode=0o755)
    monkeypatch.setattr(published, "tempfile", SimpleNamespace(gettempdir=lambda: str(tmp_path / "temporary")))
    monkeypatch.setenv("VECENV_TOP", "1")
    with contextlib.closing(make_envs()) as envs:
        for seed in range(2):
            envs.reset(seed=seed)
    (warning,) = recwarn
    assert "VECENV_TOP=1 has no effect on this AsyncVectorEnv: publish_stats() found no folder" in str(warning.message)


@pytest.mark.parametrize("method", ["load", "load_state_dict"])
def test_environment_variable_publishes_a_resumed_run(method: str, monkeypatch: pytest.MonkeyPatch, closes: Any) -> None:
    envs, resumed = closes(make_envs()), closes(make_envs())
    envs.reset(seed=0)
    saved = envs.save(verify=False) if method == "load" else envs.state_dict(verify=False)
    monkeypatch.setenv("VECENV_TOP", "1")
    getattr(resumed, method)(saved)
    (row,) = read_rows()
    assert [worker.pid for worker in row.workers] == [process.pid for process in resumed.processes]


def test_watcher_removes_files_of_ended_processes(folder: Path) -> None:
    folder.mkdir(mode=0o700)
    own_state = published.process_state(os.getpid())
    assert own_state is not None
    namespace = os.stat("/proc/self/ns/pid").st_ino
    ended = (f"{os.getpid()}-1-0-{namespace}.json", f"4194304-7-0-{namespace}.json", f"4194304-7-1-{namespace}.new")
    running = f"{os.getpid()}-{own_state[1]}-7-{namespace}.new"
    in_another_container = f"4194304-7-0-{namespace + 1}.json"
    kept = running, in_another_container, "notes.txt"
    for name in (*ended, *kept):
        (folder / name).write_text("{}")
    assert read_rows() == []
    assert {path.name for path in folder.iterdir()} == set(kept)


def test_program_continues_if_the_file_cannot_be_written(folder: Path) -> None:
    with contextlib.closing(make_envs()) as envs:
        envs.publish_stats()
        envs.reset(seed=0)
        (file,) = folder.iterdir()
        file.unlink()
        folder.rmdir()
        step_for(envs, 0.6)


def test_stopped_dead_and_replaced_workers_are_distinguished(closes: Any) -> None:
    envs = closes(make_envs())
    envs.publish_stats()
    envs.reset()
    first, second = (process.pid for process in envs.processes)
    os.kill(first, signal.SIGSTOP)
    os.kill(second, signal.SIGKILL)
    deadline = time.monotonic() + 5
    states: list[str] = []
    while time.monotonic() < deadline and states != ["stopped", "dead"]:
        states = [worker.state for worker in read_rows()[0].workers]
    assert states == ["stopped", "dead"]
    os.kill(first, signal.SIGCONT)
    with pytest.raises(WorkerDied):
        envs.step(envs.action_space.sample())
    envs.reset()
    (row,) = read_rows()
    assert [worker.restarts for worker in row.workers] == [0, 1]
    assert [worker.pid for worker in row.workers] == [process.pid for process in envs.processes]
    assert row.workers[1].pid != second
    assert row.errors == 1


@pytest.mark.long
@pytest.mark.parametrize(("context", "published_by"), [("fork", "call"), ("forkserver", "environment")])
def test_top_shows_another_program_and_removes_its_file_after_a_kill(
    context: str, published_by: str, tmp_path: Path
) -> None:
    script = tmp_path / "program.py"
    script.write_text(PROGRAM)
    environment = {**os.environ, "VECENV_TOP": "1" if published_by == "environment" else "0"}
    command = [sys.executable, str(script), context, published_by]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as program:
        try:
            assert program.stdout is not None
            assert program.stdout.readline() == "ready\n"
            top_command = [sys.executable, "-m", "vecenv", "top", "--pid", str(program.pid), "--interval", "0.3"]
            result = subprocess.run([*top_command, "--json"], capture_output=True, text=True, timeout=250, check=False)
            assert result.returncode == 0, result.stderr
            (row,) = json.loads(result.stdout)["programs"]
            assert row["name"] == ("the program" if published_by == "call" else "CartPole-v1")
            assert {worker["state"] for worker in row["workers"]} <= {"stepping", "waiting"}
            assert row["steps_per_second"] > 0
            table = subprocess.run([*top_command, "--once"], capture_output=True, text=True, timeout=250, check=False)
            assert table.returncode == 0, table.stderr
            assert f"4 environments, pid {program.pid}" in table.stdout
            assert "slowest env" in table.stdout
        finally:
            program.kill()
    deadline = time.monotonic() + 10
    watcher = top.Watcher(program.pid)
    while (remaining := watcher.read()) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert remaining == []


# when a session leader opens a terminal, it becomes the leader's controlling terminal, which sends it Ctrl-C
IN_TERMINAL = "import os, sys; os.open(os.ttyname(0), os.O_RDWR); os.execv(sys.executable, [sys.executable, *sys.argv[1:]])"
SHOW_CURSOR, HIDE_CURSOR, ENTER_SCREEN, LEAVE_SCREEN = (f"\x1b[?{code}" for code in ("25h", "25l", "1049h", "1049l"))


class Terminal:
    """A terminal with 100 columns and 30 lines that runs a command. ``text`` is the complete output."""

    def __init__(self, command: list[str]) -> None:
        import pty
        import termios

        self._controller, terminal = pty.openpty()
        termios.tcsetwinsize(terminal, (30, 100))
        self._terminal, self._settings = terminal, termios.tcgetattr(terminal)
        self.text = ""
        self.command = subprocess.Popen(
            [sys.executable, "-c", IN_TERMINAL, *command],
            stdin=terminal, stdout=terminal, stderr=terminal, start_new_session=True, env={**os.environ, "TERM": "xterm"},
        )  # fmt: skip

    def read_until(self, is_complete: Callable[[str], bool], seconds: float = 30.0) -> None:
        deadline = time.monotonic() + seconds
        while not is_complete(self.text) and time.monotonic() < deadline:
            if select.select([self._controller], [], [], 0.05)[0]:
                self.text += os.read(self._controller, 1 << 16).decode()
        assert is_complete(self.text), self.text

    def send_ctrl_c(self) -> None:
        os.write(self._controller, b"\x03")

    def is_restored(self) -> bool:
        import termios

        return termios.tcgetattr(self._terminal) == self._settings

    def close(self) -> None:
        self.command.kill()
        self.command.wait()
        os.close(self._controller)
        os.close(self._terminal)


@pytest.fixture
def live_top(folder: Path) -> Iterator[Terminal]:
    """Yield a terminal with ``vecenv top`` for this program, at an interval of 0.2 seconds."""
    terminal = Terminal(["-m", "vecenv", "top", "--pid", str(os.getpid()), "--interval", "0.2"])
    yield terminal
    terminal.close()


@pytest.mark.long
@pytest.mark.parametrize("ending", ["Ctrl-C", "SIGTERM"])
def test_live_table_is_updated_and_the_terminal_is_restored_at_the_end(live_top: Terminal, ending: str) -> None:
    with contextlib.closing(make_envs()) as envs:
        envs.publish_stats("shown live")
        envs.reset(seed=0)
        live_top.read_until(lambda text: text.count("shown live: 4 environments") >= 3)
        for process in envs.processes:
            assert str(process.pid) in live_top.text
        envs.close()
        live_top.read_until(lambda text: "Nothing to show" in text)
    live_top.send_ctrl_c() if ending == "Ctrl-C" else live_top.command.terminate()
    live_top.read_until(lambda text: LEAVE_SCREEN in text)
    assert live_top.command.wait() == 0
    assert "Traceback" not in live_top.text
    assert live_top.text.index(ENTER_SCREEN) < live_top.text.index("shown live") < live_top.text.rindex(LEAVE_SCREEN)
    assert live_top.text.rindex(HIDE_CURSOR) < live_top.text.rindex(SHOW_CURSOR)
    assert live_top.is_restored()


def test_publishing_takes_less_than_100_microseconds_per_result(closes: Any) -> None:
    envs = closes(make_envs())
    envs.publish_stats()
    started_at = time.process_time()
    for _ in range(1000):
        envs._stats_file.on_result(None, ())
    assert time.process_time() - started_at < 0.1  # usually one microsecond per result


def test_worker_stats_match_the_workers_and_their_environments(closes: Any) -> None:
    envs = closes(make_envs(num_workers=1, use_caller=True))
    envs.reset(seed=0)
    for _ in range(20):
        envs.step(envs.action_space.sample())
    process, caller = envs.worker_stats()
    assert (process.in_this_process, caller.in_this_process) == (False, True)
    assert (process.pid, caller.pid) == (envs.processes[0].pid, os.getpid())
    assert sorted([*process.envs, *caller.envs]) == [0, 1, 2, 3]
    for each in (process, caller):
        assert 0 < each.steps <= 40 * len(each.envs)  # an estimate, because not every step is timed
        assert 0 < each.seconds < 20
    before = envs.stats()
    assert before["seconds"] > 0
    envs.close()
    with pytest.raises(vecenv.make.gymnasium.error.ClosedEnvironmentError):
        envs.worker_stats()


def test_top_without_programs_explains_how_to_publish(capsys: pytest.CaptureFixture[str]) -> None:
    from vecenv.tools import cli

    assert cli.main(["top", "--once", "--interval", "0.01", "--pid", str(os.getpid())]) == tools.WRONG
    assert "envs.publish_stats(), or when run with VECENV_TOP=1" in capsys.readouterr().err
    assert cli.main(["top", "--json", "--interval", "0.01", "--pid", str(os.getpid())]) == tools.WRONG
    assert json.loads(capsys.readouterr().out) == {"programs": []}
    assert cli.main(["top"]) == tools.USAGE
    assert "--once or --json" in capsys.readouterr().err


# --- the screen ------------------------------------------------------------------------------------


def make_program_row(workers: int, name: str = "a long training") -> top.ProgramRow:
    rows = [
        top.WorkerRow(i, 10_000 + i, "process", "stepping", (4 * i, 4 * i + 3), 1e3 + i, 0.4, 4 * i, 1e-3 * (i % 7), i % 3)
        for i in range(workers)
    ]
    return top.ProgramRow(name, 4711, 4 * workers, 41_234.0, 0.35, 0.0, 12, 7, 9, rows)


def draw_lines(rows: list[top.ProgramRow], view: top.View, width: int = 80, height: int = 24) -> list[str]:
    console = pytest.importorskip("rich.console").Console(file=io.StringIO(), width=width, height=height)
    with console.capture() as captured:
        console.print(top.draw(rows, [], view, height))
    return captured.get().splitlines()


@pytest.mark.parametrize("width", [80, 120])
def test_table_of_forty_workers_fits_the_screen_and_scrolls(width: int) -> None:
    view = top.View()
    screen = draw_lines([make_program_row(40)], view, width)
    assert len(screen) == 24
    assert screen[0].startswith("a long training: 160 environments, pid 4711")
    assert "41,234 steps/s, waits for envs 35%; 12 resets, 7 restarts, 9 errors" in screen[1]
    assert screen[3].split()[:4] == ["0", "10000", "stepping", "0-3"]
    assert "workers 1-20 of 40 by worker" in screen[-1]
    view.press(b"\x1b[6~\x1b[B")
    assert draw_lines([make_program_row(40)], view, width)[3].split()[0] == "20"  # the last page
    view.press(b"\x1b[A")
    assert draw_lines([make_program_row(40)], view, width)[3].split()[0] == "19"
    assert max(map(len, screen)) <= width


def test_program_without_results_shows_the_time_since_the_last_one() -> None:
    row = replace(make_program_row(2), steps_per_second=0.0, waiting=0.0, seconds_since_result=16.04)
    assert "0 steps/s, no result for 16.0 s; 12 resets, 7 restarts, 9 errors" in draw_lines([row], top.View())[1]


@pytest.mark.parametrize("state", ["busy", "unknown"])
def test_worker_that_may_be_inside_a_long_step_has_no_share_of_waiting(state: str) -> None:
    row = make_program_row(1)
    worker = replace(row.workers[0], state=state, steps_per_second=0.0, waiting=1.0)
    cells = draw_lines([replace(row, workers=[worker])], top.View())[3].split()
    assert cells[2:6] == [state, "0-3", "0", "-"]


def test_key_s_sorts_by_the_next_column_and_key_q_ends_the_view() -> None:
    view = top.View()
    for order, first in (("steps/s", "39"), ("waiting", "0"), ("slowest env", "6"), ("restarts", "2")):
        view.press(b"s")
        screen = draw_lines([make_program_row(40)], view)
        assert f"by {order}" in screen[-1]
        assert screen[3].split()[0] == first
    view.press(b"q")
    assert view.ended


def test_summaries_of_several_programs_are_above_the_table() -> None:
    screen = draw_lines([make_program_row(3), make_program_row(3, "another")], top.View())
    assert [line.partition(":")[0] for line in screen[:4:2]] == ["a long training", "another"]
    assert screen[4].split()[0] == "program"
    assert "workers 1-6 of 6" in screen[-1]


def test_mostly_waiting_worker_is_shown_as_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vecenv.tools.top.process_state", lambda pid: ("S", worker.started))
    worker = published.PublishedWorker.__new__(published.PublishedWorker)
    for name, value in (("pid", 1), ("started", 5), ("kind", "process")):
        object.__setattr__(worker, name, value)
    assert top._state(worker, stepped=True, waiting=0.5, may_hang=False) == "stepping"
    assert top._state(worker, stepped=True, waiting=0.99, may_hang=False) == "waiting"
    assert top._state(worker, stepped=False, waiting=1.0, may_hang=False) == "idle"


def test_worker_that_may_hang_is_not_shown_as_idle(closes: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """If no worker steps, the program may wait for a worker that hangs, or compute. Its process's state shows which."""
    envs = closes(make_envs())
    envs.publish_stats()
    envs.reset(seed=0)
    time.sleep(1.6)
    real = top.process_state
    monkeypatch.setattr(top, "process_state", lambda pid: ("S", real(pid)[1]))  # type: ignore[index]
    (row,) = read_rows()
    assert [worker.state for worker in row.workers] == ["unknown"] * 2
    worker_line = draw_lines([row], top.View())[-2]
    assert "unknown" in worker_line
    assert "%" not in worker_line


# --- untrusted files ------------------------------------------------------------------------------

WORKER = {
    "index": 0, "kind": "process", "pid": 1, "started": 5, "first": 0, "last": 1, "restarts": 0, "steps": 6.0,
    "seconds": 1.0, "slowest_env": 1, "slowest_seconds": 0.5,
}  # fmt: skip
STATS = {
    "format": 2, "name": "made up", "pid": os.getpid(), "num_envs": 2, "began": 1.0, "at": 3.0, "time_waiting": 1.0,
    "resets": 3, "restarts": 4, "errors": 5, "workers": [WORKER],
}  # fmt: skip


def write_stats_file(folder: Path, content: bytes | dict[str, Any], number: int = 50) -> Path:
    state = published.process_state(os.getpid())
    assert state is not None
    folder.mkdir(mode=0o700, exist_ok=True)
    file = folder / f"{os.getpid()}-{state[1]}-{number}-{os.stat('/proc/self/ns/pid').st_ino}.json"
    file.write_bytes(content if isinstance(content, bytes) else json.dumps(content).encode())
    return file


def test_file_with_additional_fields_is_shown(folder: Path) -> None:
    write_stats_file(folder, {**STATS, "pid": os.getpid(), "newer": "words", "workers": [{**WORKER, "newer": 1}]})
    (row,) = read_rows()
    assert (row.name, row.num_envs, row.resets, row.workers[0].slowest_env) == ("made up", 2, 3, 1)


INVALID_FILES: dict[str, Any] = {
    "a newer format": {**STATS, "format": 3},
    "no format": {**STATS, "format": None},
    "a number for a name": {**STATS, "name": 3},
    "too many environments": {**STATS, "num_envs": 10**30},
    "a time that is a string": {**STATS, "began": "now"},
    "an infinite time": {**STATS, "at": float("inf")},
    "a time that is NaN": {**STATS, "at": float("nan")},
    "a bool for a number": {**STATS, "resets": True},
    "workers that are not a list": {**STATS, "workers": {"index": 0}},
    "a worker that is not a dict": {**STATS, "workers": [7]},
    "a worker without fields": {**STATS, "workers": [{}]},
    "negative steps": {**STATS, "workers": [{**WORKER, "steps": -7.0}]},
    "an empty file": b"",
    "invalid JSON": b"no JSON",
    "deeply nested JSON": b"[" * 100_000,
    "invalid UTF-8": b"\xff\xfe",
    "a number": b"7",
    "a long number": b"9" * 6000,
    "zeros": bytes(20 << 20),
}


@pytest.mark.parametrize("name", INVALID_FILES)
def test_invalid_file_is_skipped_with_a_warning(name: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from vecenv.tools import cli

    watcher = top.Watcher(os.getpid())
    files = write_stats_file(folder, {**STATS, "name": "valid"}), write_stats_file(folder, INVALID_FILES[name], 51)
    assert [row.name for row in watcher.read()] == ["valid"]
    (warning,) = watcher.left_out
    assert warning.startswith(f"a file of pid {os.getpid()}: ")
    for option in ("--json", "--once"):
        assert cli.main(["top", option, "--interval", "0.01", "--pid", str(os.getpid())]) == 0
        out, err = capsys.readouterr()
        assert "valid" in out
        assert f"vecenv: left out: {warning}" in err
    for file in files:
        file.unlink()
    assert watcher.read() == []
    assert watcher.left_out == []


def test_pipe_in_the_folder_is_skipped_without_blocking(folder: Path) -> None:
    file = write_stats_file(folder, b"")
    file.unlink()
    os.mkfifo(file)
    watcher = top.Watcher()
    assert watcher.read() == []
    assert watcher.left_out == [f"a file of pid {os.getpid()}: it is not a file"]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("[red]x[/blue]", "[red]x[/blue]: 2 environments"),
        ("[/]", "[/]: 2 environments"),
        ("[link=file:///etc/passwd]x[/link]", "[link=file:///etc/passwd]x[/link]: 2"),
        ("\x1b[2J\x1b]0;title\x07", r"\x1b[2J\x1b]0;title\x07: 2"),
        ("two\nlines\rand\x9b31m", r"two\nlines\rand\x9b31m: 2"),
        ("\u202eright to left \ud800", r"\u202eright to left \ud800: 2"),
        ("x" * 5000, "x" * 77 + "...: 2"),
        ("CartPole-v1 \u00e9\u4e16", "CartPole-v1 \u00e9\u4e16: 2"),
    ],
)
def test_markup_and_control_characters_in_a_name_are_escaped(name: str, expected: str, folder: Path) -> None:
    console = pytest.importorskip("rich.console").Console(width=400, force_terminal=True, color_system=None)
    write_stats_file(folder, {**STATS, "name": name})
    rows = read_rows()
    assert rows[0].name == name
    with console.capture() as captured:
        console.print(top.draw(rows, ["a file of pid 1: [/] it is odd"]))
    text = captured.get()
    assert expected in text
    assert "Left out: a file of pid 1: [/] it is odd." in text
    for own_sequence in ("\x1b[0m", "\x1b[2m", "\x1b[3m"):
        text = text.replace(own_sequence, "")
    assert {char for char in text if char < " "} <= {"\n"}


def test_publish_stats_converts_the_name_to_text() -> None:
    with contextlib.closing(make_envs()) as envs:
        envs.publish_stats(Path("a/path"))
        assert [row.name for row in read_rows()] == ["a/path"]
