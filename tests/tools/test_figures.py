"""Figures in sentences equal those of the tables, which programs have written."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
BENCHMARKS = (ROOT / "docs" / "benchmarks.md").read_text()
HEADLINE = re.compile(r"([\d.]+) and ([\d.]+) times on (\S+?-v\d)")
WORKERS = (ROOT / "docs" / "workers.md").read_text()


def cells(page: str, first: str) -> list[str]:
    """Return the first row of a table that begins with ``first``, without that cell."""
    row = next(line for line in page.splitlines() if line.startswith(f"| {first} |"))
    return [cell.strip() for cell in row.strip().strip("|").split("|")][1:]


def number(text: str) -> float:
    return float(re.split(r"[ (]", text.replace(",", ""))[0])


def test_the_headline_and_both_tables_have_the_same_gains() -> None:
    line = README.split("<!-- headline: end -->")[0].replace(" times `AsyncVectorEnv`", "").replace("`SyncVectorEnv` ", "")
    gains = {name: (float(over_async), float(over_sync)) for over_async, over_sync, name in HEADLINE.findall(line)}
    assert set(gains) == {"CartPole-v1", "Ant-v5", "ALE/Pong-v5"}
    for name, (over_async, over_sync) in gains.items():
        assert number(cells(README, name)[0]) == number(cells(BENCHMARKS, name)[0]) == over_async
        assert number(cells(README, name)[1]) == over_sync


def test_gains_of_trainings_equal_the_table() -> None:
    ant, pong = re.findall(r"PPO was ([\d.]+) times as fast on Ant-v5 and ([\d.]+) times on Pong", README)[0]
    assert float(ant) == number(training("Ant-v5"))
    assert float(pong) == number(training("Pong, 84 x 84, four frames"))


def training(name: str) -> str:
    return cells(BENCHMARKS.split("## Training runs")[1], name)[0]


def test_waiting_steps_are_as_slow_as_in_the_readme() -> None:
    (slower,) = re.findall(r'there `"auto"` was about (\d+)% slower', README)
    measured = 100 * (1 - number(cells(BENCHMARKS, "steps that wait (log-normal, sleeping)")[0]))
    assert abs(float(slower) - measured) <= 5


def test_slowdown_of_one_process_per_environment() -> None:
    assert "more than five times slower" in re.sub(r"\s+", " ", WORKERS)
    assert number(cells(BENCHMARKS, "vecenv, auto")[0]) > 5 * number(cells(BENCHMARKS, "vecenv, one process per env")[0])
