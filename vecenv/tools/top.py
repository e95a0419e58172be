"""``vecenv top``: the workers of running programs, as a live table or as one snapshot.

Rates are computed from two readings of the file that a program writes (:mod:`vecenv.engine.published`), and a worker's
state from these and from the kernel's. The programs receive no requests, so a program that hangs is visible too. Drawing
depends only on the arguments of :func:`draw`, so that tests need no terminal.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import select
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal

from vecenv.engine.published import BadFile, PublishedStats, PublishedWorker, find_files, is_supported, process_state
from vecenv.tools import WRONG, CliError, require

if TYPE_CHECKING:
    from rich.console import RenderableType

_HOW_TO_PUBLISH: Final = "a program shows its workers here after envs.publish_stats(), or when run with VECENV_TOP=1"
_MAX_NAME_LENGTH: Final = 80
_LATE_SECONDS: Final = 1.5  # after this time without a result, a note is shown and rates are 0
_WAITING_SHARE: Final = 0.95  # share of the time outside environments above which a stepping worker counts as waiting
_HEADINGS: Final = ("worker", "pid", "state", "envs", "steps/s", "waiting", "slowest env", "restarts")
_COLOURS: Final = {"stepping": "green", "busy": "yellow", "stopped": "red", "dead": "red"}


@dataclass(frozen=True, slots=True)
class WorkerRow:
    """The activity of one worker between two readings.

    Attributes:
        index, pid: The worker's index and process id; for environments in the caller, the program's process id.
        kind: ``"process"`` or ``"caller"``.
        state: ``"stepping"``: it finished steps; ``"waiting"``: it finished steps, in less than a twentieth of the time;
            ``"busy"``: it is computing, but finished no step; ``"idle"``; ``"unknown"``: idle or hanging (its
            program sleeps too, and has had no result for 1.5 seconds); ``"stopped"`` (by SIGSTOP); ``"dead"``.
        envs: The indices of its first and last environments.
        steps_per_second: The steps of all its environments; 0 if the program has had no result for 1.5 seconds.
        waiting: The share of the time that its finished steps did not take, 0 to 1.
        slowest_env: The environment that took longest in the worker's latest sampled step; ``None`` before the first sample.
        slowest_env_seconds: The duration of that step.
        restarts: The number of times its process was replaced since the program began to publish.
    """

    index: int
    pid: int
    kind: str
    state: str
    envs: tuple[int, int]
    steps_per_second: float
    waiting: float
    slowest_env: int | None
    slowest_env_seconds: float | None
    restarts: int


@dataclass(frozen=True, slots=True)
class ProgramRow:
    """One vector environment of a running program.

    Attributes:
        name, pid, num_envs: The program, and its number of environments.
        steps_per_second: The steps of all workers.
        waiting: The share of the time that the program waited for its workers, 0 to 1; 0 after 1.5 seconds without a result.
        seconds_since_result: Seconds since the program received a result, overestimated by up to half a second.
        resets, restarts, errors: Counts, as in ``envs.stats()``.
        workers: One row per worker.
    """

    name: str
    pid: int
    num_envs: int
    steps_per_second: float
    waiting: float
    seconds_since_result: float
    resets: int
    restarts: int
    errors: int
    workers: list[WorkerRow]


class Watcher:
    """A reader of the statistics of running programs; each :meth:`read` covers the time since the previous one.

    Args:
        pid: Read only this program; ``None``: all.

    Attributes:
        left_out: The reason for each file that cannot be read.
    """

    def __init__(self, pid: int | None = None) -> None:
        self.left_out: list[str] = []
        self._pid = pid
        self._latest: dict[Path, tuple[PublishedStats | None, PublishedStats]] = {}  # the two latest distinct readings

    def read(self) -> list[ProgramRow]:
        """Return a row for each published vector environment.

        If it was not in the previous reading, its rates cover the time since it was built.
        """
        now: dict[Path, tuple[PublishedStats | None, PublishedStats]] = {}
        self.left_out = []
        for path in find_files():
            pid = int(path.name.partition("-")[0])
            if self._pid not in (None, pid):
                continue
            with contextlib.suppress(OSError):  # the file was removed
                try:
                    stats = PublishedStats.read(path)
                except BadFile as error:
                    self.left_out.append(f"a file of pid {pid}: {error}")
                    continue
                before, latest = self._latest.get(path, (None, None))
                now[path] = (before if latest is not None and latest.at == stats.at else latest), stats
        self._latest = now
        return [_program_row(before, stats) for before, stats in now.values()]


def _program_row(before: PublishedStats | None, now: PublishedStats) -> ProgramRow:
    seconds_since_result = max(time.monotonic() - now.at, 0.0)
    may_hang = False
    if seconds_since_result > _LATE_SECONDS:  # no progress since that result, so the rates are 0
        before, state = now, process_state(now.pid)
        may_hang = state is not None and state[0] in "SD"
    seconds = max(now.at - (before.at if before else now.began), 1e-9)
    earlier = {worker.index: worker for worker in before.workers} if before else {}
    workers = [_worker_row(worker, earlier.get(worker.index), seconds, may_hang) for worker in now.workers]
    return ProgramRow(
        now.name, now.pid, now.num_envs, steps_per_second=sum(worker.steps_per_second for worker in workers),
        waiting=_share(now.time_waiting - (before.time_waiting if before else 0.0), seconds),
        seconds_since_result=seconds_since_result,
        resets=now.resets, restarts=now.restarts, errors=now.errors, workers=workers,
    )  # fmt: skip


def _worker_row(worker: PublishedWorker, before: PublishedWorker | None, seconds: float, may_hang: bool) -> WorkerRow:
    steps = worker.steps - (before.steps if before else 0.0)
    waiting = 1.0 - _share(worker.seconds - (before.seconds if before else 0.0), seconds)
    known = worker.slowest_env >= 0
    return WorkerRow(
        worker.index, worker.pid, worker.kind,
        _state(worker, stepped=steps > 0, waiting=waiting, may_hang=may_hang),
        envs=(worker.first, worker.last), steps_per_second=max(steps, 0.0) / seconds, waiting=waiting,
        slowest_env=worker.slowest_env if known else None,
        slowest_env_seconds=worker.slowest_seconds if known else None, restarts=worker.restarts,
    )  # fmt: skip


def _share(part: float, whole: float) -> float:
    return min(max(part / whole, 0.0), 1.0)


def _state(worker: PublishedWorker, *, stepped: bool, waiting: float, may_hang: bool) -> str:
    state = process_state(worker.pid)
    if state is None or state[0] in "ZX" or state[1] != worker.started:
        return "dead"
    if state[0] in "Tt":
        return "stopped"
    if stepped:
        return "stepping" if waiting < _WAITING_SHARE else "waiting"
    if worker.kind == "process" and state[0] == "R":
        return "busy"
    return "unknown" if may_hang else "idle"


# --- the display ------------------------------------------------------------------------------------

_ORDERS: Final[dict[str, Callable[[WorkerRow], Any]]] = {
    "worker": lambda worker: 0,  # sorting is stable, so this keeps the order of the workers
    "steps/s": lambda worker: -worker.steps_per_second,
    "waiting": lambda worker: -worker.waiting,
    "slowest env": lambda worker: -(worker.slowest_env_seconds or 0.0),
    "restarts": lambda worker: -worker.restarts,
    "state": lambda worker: worker.state,
}
_MOVES: Final = {b"\x1b[A": (-1, 0), b"\x1b[B": (1, 0), b"\x1b[5~": (0, -1), b"\x1b[6~": (0, 1)}
"""Arrow and page keys -> the number of rows and pages to scroll."""


@dataclass
class View:
    """The user's choices: the order of the workers, and the first visible one."""

    order: str = "worker"
    first: int = 0
    num_visible: int = 1  # the number of workers that fitted into the latest display
    ended: bool = False

    def press(self, keys: bytes) -> None:
        """Process keys: ``s`` sorts by the next column, arrow and page keys scroll, ``q`` quits."""
        for key in re.findall(rb"\x1b\[\d?.|.", keys, re.DOTALL):
            rows, pages = _MOVES.get(key, (0, 0))
            self.first += rows + pages * self.num_visible
            if key == b"s":
                names = list(_ORDERS)
                self.order, self.first = names[(names.index(self.order) + 1) % len(names)], 0
            self.ended |= key == b"q"


def draw(rows: Sequence[ProgramRow], left_out: Sequence[str], view: View | None = None, height: int = 0) -> RenderableType:
    """Return the summaries of all programs, followed by one table of their workers.

    Args:
        rows: The programs.
        left_out: The reason for each file that cannot be read.
        view: The user's choices; ``first`` is limited to the existing workers. ``None``: draw all workers.
        height: The number of available lines, with a view.
    """
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    def line(text: str, style: str = "") -> Text:  # no markup, because names come from the programs
        return Text(text, style, no_wrap=True, overflow="ellipsis")

    notes = [line(f"Left out: {note}.", "dim") for note in left_out]
    if not rows:
        return Group(Text(f"Nothing to show: {_HOW_TO_PUBLISH}."), *notes)
    header = [line(text, "bold") for row in rows for text in _summary_lines(row)] + notes
    workers = [(row.pid, worker) for row in rows for worker in row.workers]
    footer = []
    if view is not None:
        order, view.num_visible = view.order, max(1, height - len(header) - 2)
        view.first = max(0, min(view.first, len(workers) - view.num_visible))
        first, last = view.first, min(view.first + view.num_visible, len(workers))
        keys = f"workers {first + 1}-{last} of {len(workers)} by {order}; keys: s sort, arrows and pages scroll, q quit"
        workers = sorted(workers, key=lambda pair: _ORDERS[order](pair[1]))[first:last]
        footer = [line(keys, "dim")]
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
    show_pids = len(rows) > 1
    for heading in (*(["program"] if show_pids else []), *_HEADINGS):
        justify: Literal["left", "right"] = "left" if heading in ("state", "envs") else "right"
        table.add_column(heading, justify=justify, no_wrap=True)
    for pid, worker in workers:
        table.add_row(*([str(pid)] if show_pids else []), *_cells(worker))
    return Group(*header, table, *footer)


def _escape_name(name: str) -> str:
    """Shorten a name and escape characters that affect a terminal."""
    shortened = name if len(name) <= _MAX_NAME_LENGTH else name[: _MAX_NAME_LENGTH - 3] + "..."
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in shortened)


def _summary_lines(program: ProgramRow) -> tuple[str, str]:
    """Summarize a program in two lines that fit a narrow terminal."""
    share = f"waits for envs {program.waiting:.0%}"
    if program.seconds_since_result > _LATE_SECONDS:  # it is unknown whether the program waits or computes
        share = f"no result for {program.seconds_since_result:.1f} s"
    return (
        f"{_escape_name(program.name)}: {program.num_envs} environments, pid {program.pid}",
        f"{program.steps_per_second:,.0f} steps/s, {share}; {program.resets:,} resets, "
        f"{program.restarts:,} restarts, {program.errors:,} errors",
    )


def _cells(worker: WorkerRow) -> tuple[RenderableType, ...]:
    """Return the cells of a worker's line in the table."""
    from rich.text import Text

    first, last = worker.envs
    slowest = worker.slowest_env
    return (
        "caller" if worker.kind == "caller" else str(worker.index), str(worker.pid),
        Text(worker.state, style=_COLOURS.get(worker.state, "dim")), f"{first}" if first == last else f"{first}-{last}",
        f"{worker.steps_per_second:,.0f}", "-" if worker.state in ("busy", "unknown") else f"{worker.waiting:.0%}",
        "-" if slowest is None else f"{slowest}: {_format_seconds(worker.slowest_env_seconds or 0.0)}", str(worker.restarts),
    )  # fmt: skip


def _format_seconds(seconds: float) -> str:
    if seconds < 1e-3:
        return f"{seconds * 1e6:.0f} us"
    return f"{seconds * 1e3:.1f} ms" if seconds < 1 else f"{seconds:,.1f} s"


# --- the command ------------------------------------------------------------------------------------


def main(arguments: argparse.Namespace) -> int:
    """show a live table of the workers of running programs

    Shows every program of this user that publishes its statistics: one that called envs.publish_stats(), or was started with
    VECENV_TOP=1. Keys: s sorts by the next column, arrow and page keys scroll, q or Ctrl-C quits.

    Exit codes: 0 success; 1 no program publishes anything (with --once or --json); 2 wrong usage. Try: vecenv top --once
    """
    if not is_supported():
        raise CliError("vecenv top needs Linux; envs.stats() returns the statistics in the program itself")
    watcher = Watcher(arguments.pid)
    if not arguments.json:
        require("vecenv top", "rich", install="pip install rich")
        if not arguments.once:
            return _show(watcher, arguments.interval)
    watcher.read()
    time.sleep(arguments.interval)
    programs = watcher.read()
    for note in watcher.left_out:
        print(f"vecenv: left out: {note}", file=sys.stderr)
    if arguments.json:
        print(json.dumps({"programs": [asdict(row) for row in programs]}, indent=1))
    elif programs:
        from rich.console import Console

        Console(highlight=False).print(draw(programs, ()))
    else:
        print(f"vecenv: nothing to show: {_HOW_TO_PUBLISH}", file=sys.stderr)
    return 0 if programs else WRONG


def _show(watcher: Watcher, interval: float) -> int:
    """Show a table, updated every ``interval`` seconds, until ``q``, Ctrl-C or SIGTERM."""
    from rich.console import Console
    from rich.live import Live

    console = Console()
    if not (console.is_terminal and sys.stdin.isatty()):
        raise CliError("vecenv top shows a live table only in a terminal; elsewhere, use --once or --json")
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # `timeout 9 vecenv top` then restores the terminal too
    view, rows = View(), watcher.read()
    with (
        contextlib.suppress(KeyboardInterrupt),  # Ctrl-C ends the display
        _key_reader() as read_keys,
        Live(draw(rows, watcher.left_out, view, console.height), console=console, screen=True, auto_refresh=False) as live,
    ):
        next_read = time.monotonic() + interval
        while not view.ended:
            view.press(read_keys(max(next_read - time.monotonic(), 0.0)))
            if time.monotonic() >= next_read:
                rows, next_read = watcher.read(), time.monotonic() + interval
            live.update(draw(rows, watcher.left_out, view, console.height), refresh=True)
    return 0


@contextlib.contextmanager
def _key_reader() -> Iterator[Callable[[float], bytes]]:
    """Yield a function that returns the keys pressed within some seconds; restore the terminal afterwards."""
    import termios
    import tty

    terminal = sys.stdin.fileno()
    before = termios.tcgetattr(terminal)
    try:
        tty.setcbreak(terminal, termios.TCSADRAIN)  # unlike the default, this keeps keys that were typed earlier
        yield lambda seconds: os.read(terminal, 64) if select.select([terminal], [], [], seconds)[0] else b""
    finally:
        termios.tcsetattr(terminal, termios.TCSADRAIN, before)
