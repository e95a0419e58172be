"""Numbers in sentences of the documentation agree with those in the tables that ``python -m bench`` writes."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
BENCHMARKS = (ROOT / "docs" / "benchmarks.md").read_text()
HEADLINE = re.compile(r"([\d.]+) and ([\d.]+) times on (\S+?-v\d)")
WORKERS = (ROOT / "docs" / "workers.md").read_text()


def cells_after(page: str, first: str) -> list[str]:
    """Return the cells after the first one, in the first table row that begins with the cell ``first``."""
    row = next(line for line in page.splitlines() if line.startswith(f"| {first} |"))
    return [cell.strip() for cell in row.strip().strip("|").split("|")][1:]


def parse_number(text: str) -> float:
    """Return the number at the beginning of a cell such as ``1,234 (1,200 - 1,300)``."""
    return float(re.split(r"[ (]", text.replace(",", ""))[0])


def test_headline_and_both_tables_have_the_same_gains() -> None:
    headline = README.split("<!-- headline: end -->")[0]
    headline = headline.replace(" times `AsyncVectorEnv`", "").replace("`SyncVectorEnv` ", "")
    gains = {name: (float(over_async), float(over_sync)) for over_async, over_sync, name in HEADLINE.findall(headline)}
    assert set(gains) == {"CartPole-v1", "Ant-v5", "ALE/Pong-v5"}
    for name, (over_async, over_sync) in gains.items():
        assert parse_number(cells_after(README, name)[0]) == parse_number(cells_after(BENCHMARKS, name)[0]) == over_async
        assert parse_number(cells_after(README, name)[1]) == over_sync


def test_training_gains_in_the_readme_equal_the_table() -> None:
    ant, pong = re.findall(r"PPO was ([\d.]+) times as fast on Ant-v5 and ([\d.]+) times on Pong", README)[0]
    assert float(ant) == parse_number(training_gain("Ant-v5"))
    assert float(pong) == parse_number(training_gain("Pong, 84 x 84, four frames"))


def training_gain(name: str) -> str:
    return cells_after(BENCHMARKS.split("## Training runs")[1], name)[0]


def test_slowdown_of_waiting_steps_in_the_readme_agrees_with_the_table() -> None:
    (stated,) = re.findall(r'there `"auto"` was about (\d+)% slower', README)
    measured = 100 * (1 - parse_number(cells_after(BENCHMARKS, "steps that wait (log-normal, sleeping)")[0]))
    assert abs(float(stated) - measured) <= 5


def test_slowdown_of_one_process_per_environment_agrees_with_the_table() -> None:
    assert "more than five times slower" in re.sub(r"\s+", " ", WORKERS)
    auto, per_env = (cells_after(BENCHMARKS, f"vecenv, {engine}")[0] for engine in ("auto", "one process per env"))
    assert parse_number(auto) > 5 * parse_number(per_env)
