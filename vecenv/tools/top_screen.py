"""The live screen of ``vecenv top``: summaries that are always there, and below them as many workers as there is room for.

The summaries of all programs stand first. Their workers are one list, which the keys sort and move. Drawing is a function of
the rows, the view and the size, so that tests need no terminal.
"""

from __future__ import annotations

import contextlib
import os
import select
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Literal

from vecenv.tools.top import HEADINGS, HOW_TO_PUBLISH, ProgramRow, Watcher, WorkerRow, cells, summary

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

__all__ = ["View", "draw", "show"]

_ORDERS: Final[dict[str, Callable[[WorkerRow], Any]]] = {
    "worker": lambda worker: 0,
    "steps/s": lambda worker: -worker.steps_per_second,
    "waiting": lambda worker: -worker.waiting,
    "slowest env": lambda worker: -(worker.slowest_env_seconds or 0.0),
    "restarts": lambda worker: -worker.restarts,
    "state": lambda worker: worker.state,
}
_MOVES: Final = {b"\x1b[A": -1, b"k": -1, b"\x1b[B": 1, b"j": 1}
_PAGES: Final = {b"\x1b[5~": -1, b"\x1b[6~": 1, b" ": 1}


@dataclass
class View:
    """What the keys have chosen: the order of the workers, and the first one that is shown."""

    order: str = "worker"
    first: int = 0
    room: int = 1  # workers that the latest picture had room for
    ended: bool = False

    def press(self, keys: bytes) -> None:
        """Follow what was typed: ``s`` sorts by the next column, arrows and pages move, ``q`` ends."""
        while keys:
            key = next((known for known in (*_MOVES, *_PAGES) if keys.startswith(known)), keys[:1])
            keys = keys[len(key) :]
            self.first += _MOVES.get(key, 0) + _PAGES.get(key, 0) * self.room
            if key == b"s":
                names = list(_ORDERS)
                self.order, self.first = names[(names.index(self.order) + 1) % len(names)], 0
            self.ended |= key == b"q"


def draw(rows: Sequence[ProgramRow], left_out: Sequence[str], view: View, height: int) -> RenderableType:
    """Everything that fits into ``height`` lines; the view is moved to where there are workers."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    if not rows:
        return Group(Text(f"Nothing to show: {HOW_TO_PUBLISH}."), *(Text(f"Left out: {word}.") for word in left_out))
    head = [Text(line, no_wrap=True, overflow="ellipsis", style="bold") for row in rows for line in summary(row)]
    head += [Text(f"Left out: {word}.", style="dim", no_wrap=True, overflow="ellipsis") for word in left_out]
    workers = [(row.pid, worker) for row in rows for worker in row.workers]
    workers.sort(key=lambda pair: _ORDERS[view.order](pair[1]))
    view.room = max(1, height - len(head) - 2)
    view.first = max(0, min(view.first, len(workers) - view.room))
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
    for heading in (*(["program"] if len(rows) > 1 else []), *HEADINGS):
        justify: Literal["left", "right"] = "left" if heading in ("state", "envs") else "right"
        table.add_column(heading, justify=justify, no_wrap=True)
    for pid, worker in workers[view.first : view.first + view.room]:
        table.add_row(*([str(pid)] if len(rows) > 1 else []), *cells(worker))
    last = min(view.first + view.room, len(workers))
    keys = f"workers {view.first + 1}-{last} of {len(workers)} by {view.order}; keys: s sort, arrows and pages move, q end"
    return Group(*head, table, Text(keys, style="dim", no_wrap=True, overflow="ellipsis"))


def _nothing_typed(seconds: float) -> bytes:
    time.sleep(seconds)
    return b""


@contextlib.contextmanager
def _typed() -> Iterator[Callable[[float], bytes]]:
    """A function that waits for some seconds and returns what was typed; the terminal is as before afterwards."""
    try:
        import termios
        import tty

        terminal = sys.stdin.fileno()
        before = termios.tcgetattr(terminal)
    except (ImportError, OSError, ValueError, termios.error):
        yield _nothing_typed
        return
    try:
        tty.setcbreak(terminal, termios.TCSADRAIN)  # what was typed while this started is kept
        yield lambda seconds: os.read(terminal, 64) if select.select([terminal], [], [], seconds)[0] else b""
    finally:
        termios.tcsetattr(terminal, termios.TCSADRAIN, before)


def show(watcher: Watcher, console: Console, interval: float) -> None:
    """Show the workers and renew them every ``interval`` seconds, until ``q`` or Ctrl-C."""
    from rich.live import Live

    view, rows = View(), watcher.read()

    def picture() -> RenderableType:
        return draw(rows, watcher.left_out, view, console.height)

    with _typed() as wait, Live(picture(), console=console, screen=True, auto_refresh=False) as live:
        due = time.monotonic() + interval
        while not view.ended:
            keys = wait(max(due - time.monotonic(), 0.0))
            view.press(keys)
            if time.monotonic() >= due:
                rows, due = watcher.read(), time.monotonic() + interval
            live.update(picture(), refresh=True)
