"""``python -m bench programs``: a program of somebody else's, with Gymnasium's engine and with vecenv's, by turns."""

from __future__ import annotations

import json
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from bench import programs

TRAINS = """
import argparse, random
import gymnasium
import numpy as np

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int)
parser.add_argument("--file")
parser.add_argument("--luck", action="store_true")
given = parser.parse_args()
if given.file:
    given.steps = int(open(given.file).read())
chance = random.Random(None if given.luck else 3)
if __name__ == "__main__":
    envs = gymnasium.vector.AsyncVectorEnv([lambda: gymnasium.make("CartPole-v1")] * 3)
    envs.reset(seed=1)
    for step in range(given.steps):
        envs.step(np.array([chance.randrange(2) for _ in range(3)]))
    envs.close()
"""


@pytest.fixture
def sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "trains.py").write_text(TRAINS)
    (tmp_path / "own" / "steps.yaml").write_text("1000000")

    def program(*words: str, **options: Any) -> programs.Program:
        return programs.Program("somebody/own", ("trains.py", *words), "AsyncVectorEnv, CartPole-v1, 3", **options)

    known = {
        "same": program("--file", "{settings}", configuration=("steps.yaml", "1000000", "40")),
        "other": program("--steps", "40", "--luck"),
        "stopped": program("--steps", "1000000", watch=("--stop", "5")),
        "fails": program("--no-such-option"),
    }
    monkeypatch.setattr(programs, "PROGRAMS", known)
    return tmp_path


@pytest.mark.long
def test_programs_that_are_equal_and_such_as_are_not(sources: Path, capfd: pytest.CaptureFixture[str]) -> None:
    out = sources / "results"
    programs.compare(["same", "other", "stopped", "fails"], sources, sys.executable, 1, out)
    rows = dict(zip(("same", "other", "stopped", "fails"), capfd.readouterr().out.splitlines()[2:], strict=True))
    assert rows["same"].startswith("| somebody/own `trains.py` | AsyncVectorEnv, CartPole-v1, 3 | 40 x 3 | yes | ")
    assert "| 40 x 3 | NO | " in rows["other"]
    assert "| 5 x 3 | yes | " in rows["stopped"]
    assert rows["fails"].startswith("| fails | failed: ")
    kept = json.loads((out / "program-same.json").read_text())
    engines = [kept[kind][0]["figures"]["engines"] for kind in ("plain", "ours")]
    assert engines == [["gymnasium: AsyncVectorEnv"], ["vecenv: AsyncVectorEnv"]]
    assert kept["plain"][0]["figures"]["rewards"] == kept["ours"][0]["figures"]["rewards"] > 0


def test_a_program_that_is_not_there_is_named(sources: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    missing = programs.Program("somebody/else", ("main.py",), "nothing")
    with pytest.raises(SystemExit, match=r"no .*else/main\.py: git clone https://github\.com/somebody/else "):
        programs.live(missing, sources, sys.executable, ours=False)


def test_scalars_of_tensorboard_are_read_without_those_that_are_times(tmp_path: Path) -> None:
    def part(number: int, value: bytes) -> bytes:
        return bytes([number << 3 | 2, len(value)]) + value

    data = b""
    for step, name, value in ((1, b"losses/value", 0.5), (1, b"charts/SPS", 99.0), (300, b"losses/value", 0.25)):
        scalar = part(1, name) + b"\x15" + struct.pack("<f", value)
        step_field = b"\x10" + (bytes([step]) if step < 128 else bytes([step & 127 | 128, step >> 7]))
        written = b"\x09" + struct.pack("<d", 1e9) + step_field + part(5, part(1, scalar))
        data += struct.pack("<QI", len(written), 0) + written + struct.pack("<I", 0)
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "events.out.tfevents.1").write_bytes(data)
    assert programs.scalars(tmp_path) == {"losses/value": [[1, "0.5"], [300, "0.25"]]}


@pytest.mark.long
def test_bench_list_names_them() -> None:
    checkout = Path(programs.__file__).parents[1]
    command = [sys.executable, "-m", "bench", "list"]
    listed = subprocess.run(command, cwd=checkout, capture_output=True, text=True, check=True).stdout
    for name, program in programs.PROGRAMS.items():
        assert f"program  {name:22} https://github.com/{program.repository}\n" in listed
