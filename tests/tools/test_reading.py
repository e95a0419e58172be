"""What ``vecenv bench`` shows reads well at 80 columns, and pictures show what died."""

from __future__ import annotations

import importlib
import itertools
import math
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("rich")
pytest.importorskip("matplotlib")

from vecenv.tools.benchmark import plots, tables
from vecenv.tools.benchmark.compare import Report, Row, short_rate


def report(*rows: Row) -> Report:
    about: dict[str, Any] = {"cpu": "a processor", "usable_cores": 2, "python": "3", "gymnasium": "1"}
    return Report("CartPole-v1", 64, 1.0, 3, "fine", about, list(rows))


ROWS = (
    Row("auto", "vecenv, auto", "vecenv", [1_234_567.0, 1_334_567.0, 1_134_567.0]),
    Row("gym-async", "Gymnasium AsyncVectorEnv", "gymnasium", [math.nan] * 3, failed="its process was killed by SIGKILL"),
    Row("limit", "the limit: bare loop, 2 processes", "limit", [2_345_678.0, 2_145_678.0, 2_545_678.0]),
)


@pytest.fixture(scope="module", autouse=True)
def fonts() -> None:
    """matplotlib keeps the files of its fonts open from the first picture on."""
    axes = plots.new_figure(2.0, 2.0).subplots()
    axes.set_title("a", fontsize=8)
    axes.figure.canvas.draw()


@pytest.mark.parametrize("by", ["COLUMNS", "WIDTH"])
@pytest.mark.parametrize("width", [80, 120, 140])
def test_each_row_is_one_line(
    width: int, by: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In a pipe at the width that COLUMNS says, as ``doctor`` and ``plan``, or at one of its own."""
    monkeypatch.delenv("COLUMNS", raising=False)
    if by == "COLUMNS":
        monkeypatch.setenv("COLUMNS", str(width))
    else:
        monkeypatch.setattr(tables, "WIDTH", width)
    tables.print_report(report(*ROWS))
    shown = capsys.readouterr().out.splitlines()
    assert max(map(len, shown)) <= width
    for row in ROWS:
        (line,) = (line for line in shown if line.strip("│ ").startswith(row.label) and "died:" not in line)
        if row.failed:
            assert line.strip("│ ").endswith("died")
        else:
            assert ("1,234,567" in line) == (row.name == "auto")
            assert "0.526" in line or "1.000" in line
    assert "Gymnasium AsyncVectorEnv died: its process was killed by SIGKILL" in shown
    assert "Where they do, the machine was busy: measure again." in " ".join("\n".join(shown).split())


@pytest.mark.parametrize(
    ("rate", "shown"),
    [(12.34, "12.3"), (999, "999"), (1234, "1.23k"), (58_946, "58.9k"), (308_817, "309k"), (1_250_000, "1.25M")],
)
def test_short_rates(rate: float, shown: str) -> None:
    assert short_rate(rate) == shown


def test_a_picture_names_the_rows_that_died_and_its_labels_do_not_touch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    figures: list[Any] = []
    make = plots.new_figure
    monkeypatch.setattr(plots, "new_figure", lambda *size: figures.append(make(*size)) or figures[-1])
    assert plots.draw_bars(report(*ROWS), tmp_path / "bars.png")
    (axes,) = figures[0].axes
    assert [label.get_text() for label in axes.get_yticklabels()] == [row.label for row in ROWS[::-1]]
    assert [note.get_text().strip() for note in axes.texts] == ["2,345,678", "died", "1,234,567"]
    boxes = [label.get_window_extent() for label in axes.get_xticklabels() if label.get_text()]
    assert all(left.x1 < right.x0 for left, right in itertools.pairwise(boxes))


def test_there_is_no_picture_of_nothing(tmp_path: Path) -> None:
    dead = Row("auto", "vecenv, auto", "vecenv", [math.nan], failed="it raised")
    assert not plots.draw_bars(report(dead), tmp_path / "bars.png")
    assert not plots.draw_scale([report(dead)], tmp_path / "scale.png")
    assert not list(tmp_path.iterdir())


def test_an_environment_that_fails_is_known_before_any_engine_is_started(monkeypatch: pytest.MonkeyPatch) -> None:
    compare = importlib.import_module("vecenv.tools.benchmark.compare")  # the package has a function of that name
    asked: list[str] = []

    def reference(*_: Any) -> Any:
        raise compare.HostFailed("it always fails")

    monkeypatch.setattr(compare, "_reference", reference)
    monkeypatch.setattr(compare, "started", lambda *_: pytest.fail("engines were started"))
    from vecenv.tools.benchmark import default_candidates

    rows = default_candidates(lambda: None, 2, 1)
    with pytest.raises(compare.HostFailed, match="it always fails"):
        compare.compare("x", lambda: None, 2, rows, progress=lambda *said: asked.append(said[0]))
    assert asked == ["checking the environment in SyncVectorEnv"]
