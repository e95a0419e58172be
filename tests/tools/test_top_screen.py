"""The live screen of ``vecenv top`` at the size of a small terminal."""

from __future__ import annotations

import io

import pytest

pytest.importorskip("rich")

from rich.console import Console

from vecenv.tools.top import ProgramRow, WorkerRow, _state
from vecenv.tools.top_screen import View, draw


def program(workers: int, name: str = "a long training") -> ProgramRow:
    rows = [
        WorkerRow(i, 10_000 + i, "process", "stepping", (4 * i, 4 * i + 3), 1e3 + i, 0.4, 4 * i, 1e-3 * (i % 7), i % 3)
        for i in range(workers)
    ]
    return ProgramRow(name, 4711, 4 * workers, 41_234.0, 0.35, 0.0, 12, 7, 9, rows)


def lines(rows: list[ProgramRow], view: View, width: int = 80, height: int = 24) -> list[str]:
    console = Console(file=io.StringIO(), width=width, height=height, force_terminal=False)
    with console.capture() as captured:
        console.print(draw(rows, [], view, height))
    return captured.get().splitlines()


@pytest.mark.parametrize("width", [80, 120])
def test_forty_workers_fit_with_their_summary_and_can_be_scrolled(width: int) -> None:
    view = View()
    shown = lines([program(40)], view, width)
    assert len(shown) == 24
    assert shown[0].startswith("a long training: 160 environments, pid 4711")
    assert "41,234 steps/s, waits for envs 35%; 12 resets, 7 restarts, 9 errors" in shown[1]
    assert shown[3].split()[:4] == ["0", "10000", "stepping", "0-3"]
    assert "workers 1-20 of 40 by worker" in shown[-1]
    view.press(b"\x1b[6~\x1b[B")
    assert lines([program(40)], view, width)[3].split()[0] == "20"  # no further than to the last
    view.press(b"\x1b[A")
    assert lines([program(40)], view, width)[3].split()[0] == "19"
    assert max(map(len, shown)) <= width


def test_workers_are_sorted_by_the_next_column() -> None:
    view = View()
    for order, first in (("steps/s", "39"), ("waiting", "0"), ("slowest env", "6"), ("restarts", "2")):
        view.press(b"s")
        shown = lines([program(40)], view)
        assert f"by {order}" in shown[-1]
        assert shown[3].split()[0] == first
    view.press(b"q")
    assert view.ended


def test_several_programs_have_their_summaries_first() -> None:
    shown = lines([program(3), program(3, "another")], View())
    assert [line.partition(":")[0] for line in shown[:4:2]] == ["a long training", "another"]
    assert shown[4].split()[0] == "program"
    assert "workers 1-6 of 6" in shown[-1]


def test_a_worker_that_steps_and_mostly_waits_is_said_to_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vecenv.tools.top.process_state", lambda pid: ("S", worker.started))
    from vecenv.engine.published import PublishedWorker

    worker = PublishedWorker.__new__(PublishedWorker)
    for name, value in (("pid", 1), ("started", 5), ("kind", "process")):
        object.__setattr__(worker, name, value)
    assert _state(worker, stepped=True, waiting=0.5) == "stepping"
    assert _state(worker, stepped=True, waiting=0.99) == "waiting"
    assert _state(worker, stepped=False, waiting=1.0) == "idle"
