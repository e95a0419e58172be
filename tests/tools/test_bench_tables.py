"""``python -m bench table``: every table has its place in its page, and is written from what was measured."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from bench import tables


def report(env: str, **rates: list[float | None]) -> dict[str, Any]:
    rows = [{"name": name, "rates": each, "steps_per_second": {"median": each[0]}} for name, each in rates.items()]
    return {"env": env, "num_envs": 8, "unit": "steps/s", "rows": rows}


def test_each_table_is_written_into_its_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pages = {name: tmp_path / name for name in ("README.md", "bench/README.md", "docs/benchmarks.md")}
    for name, page in pages.items():
        page.parent.mkdir(exist_ok=True)
        shutil.copyfile(tables.ROOT / name, page)
    monkeypatch.setattr(tables, "ROOT", tmp_path)
    compared = [
        report(env, **{"gym-async": [1.0, 2.0, 4.0], "gym-sync": [2.0, 2.0, 2.0], "auto": [6.0, 4.0, None]})
        for env in tables.GAINS
    ]
    waited = [report("long-resets", **{"gym-async": [10.0], "deadline": [125.0]})]
    for name, reports in (("compare", compared), ("waits", waited), ("episodes", waited)):
        (tmp_path / f"{name}.json").write_text(json.dumps(reports))
    tables.write_tables(tmp_path)
    written = {name: page.read_text() for name, page in pages.items()}
    assert "| CartPole-v1 | 4 | 2.5 |" in written["README.md"]  # medians of 6 and 2, of 3 and 2
    assert "| Pong | 4 | 2.5 |" in written["README.md"]
    assert "| Ant-v5 | 4 (2 - 6) | 1 (0.5 - 2) | - | - |" in written["docs/benchmarks.md"]
    assert written["bench/README.md"].count("| long-resets, 8 | 10 | 12 |") == 2
    assert "| CartPole-v1, 8 | 1 | 1 | 4 |" in written["bench/README.md"]
