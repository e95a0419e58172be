"""``python -m bench`` and the programs in ``bench/`` run, and write their measurements."""

from __future__ import annotations

import importlib.util
import json
import re
import shutil
import struct
import sys
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from programs import python_output, run_python

pytest.importorskip("rich")
pytest.importorskip("matplotlib")
from bench import many_cores, micro, programs, ray_rate, size, tables, train, workloads
from vecenv.tools import runners

BENCH = Path(programs.__file__).parent
TINY = "--seconds 0.05 --repeats 1"
PROGRAMS = {
    # program -> small settings, and a text in its output
    "aio.py": ("--kinds wait --workers 1 --num-envs 2 --seconds 0.1 --repeats 1 --only pool first bare", "wait, 1 workers"),
    "bridge_cost.py": ("--length 4 --steps 4 --repeats 1", "scan"),
    "chunks.py": ("CartPole-v1 --num-envs 2 --workers 1 --horizons 2 --rounds 1 --seconds 0.05", "CartPole"),
    "conformity.py": ("--only nothing", "promise"),
    "envpool_rate.py": ("--task CartPole-v1 --num-envs 2 --seconds 0.05 --repeats 1 --against process", "CartPole-v1"),
    "first_ready_cost.py": ("CartPole-v1 --num-envs 2 --workers 1 --rounds 1 --seconds 0.05", "us per environment step"),
    "jax_cost.py": ("--help", "--limit"),  # without --help, it compiles for three minutes
    "many_cores.py": ("--costs 1 1 1 --envs-per-worker 2", "per worker"),
    "multi_agent_rate.py": ("--help", "--game"),  # needs SuperSuit, which no extra installs
    "ray_rate.py": ("--help", "--rounds"),  # needs a Ray cluster, like the tests in tests/distributed
    "state.py": ("--tries 1 --only CartPole", "CartPole"),
    "tasks.py": (
        "--tasks 2 --episodes 1 --build 0 --step 0.001 --lengths 2 3 --num-envs 2 --workers 1 --rounds 1",
        "EnvChoice",
    ),
    "torchrl_rate.py": ("--help", "usage"),
    "versions.py": (". --num-envs 1 --num-workers 0 --pairs 2 --processes 2", "CartPole"),
    "watched.py": ("", ""),  # test_compare_reports_equal_different_and_failed_programs runs it
    "__main__.py": ("list", "program  cleanrl-ppo            https://github.com/vwxyzjn/cleanrl"),
}
COMMANDS = {
    # command of `python -m bench` -> small settings, and a text in its output
    "compare": ("--workloads empty --num-envs 2 --engines workers,gym-async,bare-loop", "of bare loop"),
    "micro": ("round-trip", "bare ping-pong, spinning"),
    "waits": ("--workloads free-resets --num-envs 4 --engines per-env,deadline,threads", "vecenv, those ready within 2 ms"),
    "episodes": ("--num-envs 2 --engines evaluate,batches,gym-sync", "vecenv.evaluate"),
    "goals": ("round-trip --quick", "round-trip: "),
    "train": ("--workloads minigrid --num-envs 5 --engines workers,halves", "vecenv, first-ready halves"),
}


def test_all_programs_of_the_folder_are_tested() -> None:
    main_guard = re.compile(r"^if __name__ == ", re.MULTILINE)
    assert {path.name for path in BENCH.glob("*.py") if main_guard.search(path.read_text())} == set(PROGRAMS)


def bench_output(*command: str) -> str:
    return python_output(*command, cwd=BENCH.parent)


@pytest.mark.long
@pytest.mark.parametrize("name", [name for name, (settings, _) in PROGRAMS.items() if settings])
def test_program_prints_the_expected_text(name: str) -> None:
    if name.startswith("torchrl") and importlib.util.find_spec("torchrl") is None:
        pytest.skip("TorchRL is not installed (pip install -e '.[clients]')")
    settings, text = PROGRAMS[name]
    assert text in bench_output(*(["-m", "bench"] if name == "__main__.py" else [f"bench/{name}"]), *settings.split())


def test_ray_rate_plots_only_the_rows_of_efficiency(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        ray_rate.main(["cost", "--plot", "cost.svg"])
    assert "--plot draws only the rows of `efficiency`" in capsys.readouterr().err


@pytest.mark.long
@pytest.mark.parametrize("name", COMMANDS)
def test_command_prints_its_table_and_no_candidate_dies(name: str, tmp_path: Path) -> None:
    settings, text = COMMANDS[name]
    output = bench_output("-m", "bench", name, *settings.split(), *TINY.split(), "--out", str(tmp_path))
    assert text in output
    assert " failed" not in output
    assert list(tmp_path.glob("*.json"))


@pytest.mark.long
def test_micro_prints_one_json_document_for_all_parts(tmp_path: Path) -> None:
    output = bench_output("-m", "bench", "micro", "infos", "batch-2", "--json", *TINY.split(), "--out", str(tmp_path))
    assert len(json.loads(output)) == 2


@pytest.mark.long
def test_error_names_unknown_engines_and_no_results_are_written(tmp_path: Path) -> None:
    result = run_python("-m", "bench", "waits", *f"--engines foo {TINY} --out {tmp_path}".split(), cwd=BENCH.parent)
    assert (result.returncode, result.stderr.splitlines()[-1]) == (1, "python -m bench: --engines: no engine is named foo")
    assert not list(tmp_path.iterdir())


def test_conformity_refuses_to_write_an_incomplete_table() -> None:
    result = run_python("-m", "bench.conformity", "--write", "--only", "nothing", cwd=BENCH.parent)
    assert result.returncode == 2
    assert "--write needs all engines and checks" in result.stderr


@pytest.mark.long
def test_reported_memory_covers_all_processes(tmp_path: Path) -> None:
    settings = f"waits --workloads long-resets --num-envs 2 --engines per-env,free {TINY} --out {tmp_path}"
    memory = re.findall(r"memory, long-resets +(\S+) .* in (\d) processes", bench_output("-m", "bench", *settings.split()))
    assert memory == [("per-env", "3"), ("free", "3")]


@pytest.mark.parametrize("module", ["mujoco", "ale_py", "Box2D"])
def test_workloads_without_their_library_are_not_listed_as_installed(module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    needed_by = {"mujoco": ["HalfCheetah-v5", "Ant-v5"], "ale_py": ["ALE/Pong-v5"], "Box2D": ["LunarLander-v3"]}
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == module else "found")
    monkeypatch.setitem(workloads.WORKLOADS, workloads.MINIGRID, workloads.WORKLOADS["empty"])
    missing = [name for name in workloads.WORKLOADS if name not in workloads.installed_workloads()]
    assert missing == needed_by[module]


@pytest.mark.skipif(shutil.which("cc") is None and shutil.which("gcc") is None, reason="counting copies needs a C compiler")
def test_step_copies_large_observations_once() -> None:
    counts = micro.count_copies()
    assert counts["copy=False"] == pytest.approx(1.0, abs=0.01)
    assert counts["copy=True"] == pytest.approx(1.0, abs=0.01)


def test_many_cores_measures_costs_of_batch_worker_and_row(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(many_cores, "caller_seconds", lambda workers, rows, seconds, size: 40 + 8 * workers + 2 * rows)
    assert many_cores.measure_costs(1) == (40, 8, 2)


def test_partner_of_an_interrupted_ping_pong_ends_without_an_error() -> None:
    program = """
from bench.micro import MESSAGE, PingPong
class Interrupted(PingPong):
    def _step(self):
        self._socket.send(MESSAGE)
        raise KeyboardInterrupt
try:
    Interrupted(False).run(1.0)
except KeyboardInterrupt:
    print("interrupted")
except OSError:
    print("the partner has returned")
"""
    assert bench_output("-c", program) == "interrupted\n"


# --- tables -----------------------------------------------------------------------------------------


def make_report(env: str, **rates_by_row: list[float | None]) -> dict[str, Any]:
    rows = [{"name": name, "rates": rates, "steps_per_second": {"median": rates[0]}} for name, rates in rates_by_row.items()]
    return {"env": env, "num_envs": 8, "unit": "steps/s", "machine": {"usable_cores": 2}, "rows": rows}


@pytest.fixture(scope="module")
def open_fonts(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Make matplotlib open its font files, which stay open, before the first test that draws."""
    tables.draw_gains([make_report("CartPole-v1", auto=[1.0])], tmp_path_factory.mktemp("fonts") / "gains.svg")


@pytest.mark.usefixtures("open_fonts")
def test_write_tables_updates_each_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pages = {name: tmp_path / name for name in ("README.md", "bench/RESULTS.md", "docs/benchmarks.md")}
    for name, page in pages.items():
        page.parent.mkdir(exist_ok=True)
        shutil.copyfile(tables.ROOT / name, page)
    monkeypatch.setattr(tables, "ROOT", tmp_path)
    compare_reports = [
        make_report(env, **{"gym-async": [1.0, 2.0, 4.0], "gym-sync": [2.0, 2.0, 2.0], "auto": [6.0, 4.0, None]})
        for env in tables.GAINS
    ]
    wait_reports = [make_report("long-resets", **{"gym-async": [10.0], "deadline": [125.0]})]
    for name, reports in (("compare", compare_reports), ("waits", wait_reports), ("episodes", wait_reports)):
        (tmp_path / f"{name}.json").write_text(json.dumps(reports))
    tables.write_tables(tmp_path)
    texts = {name: page.read_text() for name, page in pages.items()}
    # the medians of the ratios 6 and 2, and of 3 and 2
    assert "| CartPole-v1 | 4 | 2.5 |" in texts["README.md"]
    assert "| ALE/Pong-v5 | 4 | 2.5 |" in texts["README.md"]
    gains = "4 times `AsyncVectorEnv` and 2.5 times `SyncVectorEnv` on CartPole-v1, 4 and 2.5 times on Ant-v5, 4 and"
    assert gains in texts["README.md"]
    assert "| Ant-v5 | 4 (2 - 6) | 1 (0.5 - 2) | - | - |" in texts["docs/benchmarks.md"]
    assert texts["bench/RESULTS.md"].count("| long-resets, 8 | 10 | 12 |") == 2
    assert "| CartPole-v1, 8 | 1 | 1 | 4 |" in texts["bench/RESULTS.md"]


# --- published programs -----------------------------------------------------------------------------

TRAINING_PROGRAM = """
import argparse, random
import gymnasium
import numpy as np

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int)
parser.add_argument("--file")
parser.add_argument("--unseeded", action="store_true")
options = parser.parse_args()
if options.file:
    options.steps = int(open(options.file).read())
generator = random.Random(None if options.unseeded else 3)
if __name__ == "__main__":
    envs = gymnasium.vector.AsyncVectorEnv([lambda: gymnasium.make("CartPole-v1")] * 3)
    envs.reset(seed=1)
    for step in range(options.steps):
        envs.step(np.array([generator.randrange(2) for _ in range(3)]))
    envs.close()
"""


@pytest.fixture
def sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Replace the published programs by four variants of a small one, and return the folder of their repository."""
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "trains.py").write_text(TRAINING_PROGRAM)
    (tmp_path / "own" / "steps.yaml").write_text("1000000")

    def program(command: str, **options: Any) -> programs.Program:
        return programs.Program("somebody/own", f"trains.py {command}", "AsyncVectorEnv, CartPole-v1, 3", **options)

    programs_by_name = {
        "same": program("--file {settings}", configuration=("steps.yaml", "1000000", "40")),
        "other": program("--steps 40 --unseeded"),
        "stopped": program("--steps 1000000", watch="--stop 5"),
        "fails": program("--no-such-option"),
    }
    monkeypatch.setattr(programs, "PROGRAMS", programs_by_name)
    return tmp_path


@pytest.mark.long
def test_compare_reports_equal_different_and_failed_programs(sources: Path, capfd: pytest.CaptureFixture[str]) -> None:
    out = sources / "results"
    names = ["same", "other", "stopped", "fails"]
    programs.compare(names, sources, sys.executable, 1, out)
    rows = dict(zip(names, capfd.readouterr().out.splitlines()[2:], strict=True))
    assert rows["same"].startswith("| somebody/own `trains.py` | AsyncVectorEnv, CartPole-v1, 3 | 40 x 3 | yes | ")
    assert "| 40 x 3 | NO | " in rows["other"]
    assert "| 5 x 3 | yes | " in rows["stopped"]
    assert rows["fails"].startswith("| fails | failed: ")
    runs = json.loads((out / "program-same.json").read_text())
    plain, ours = (runs[kind][0]["figures"] for kind in ("plain", "ours"))
    assert plain["engines"] == ["gymnasium: AsyncVectorEnv"]
    assert ours["engines"] == ["vecenv: AsyncVectorEnv"]
    assert plain["rewards"] == ours["rewards"] > 0


def test_missing_program_error_names_the_clone_command(sources: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    missing = programs.Program("somebody/else", "main.py", "nothing")
    with pytest.raises(SystemExit, match=r"no .*else/main\.py: git clone https://github\.com/somebody/else "):
        programs.run_once(missing, sources, sys.executable, ours=False)


def test_read_scalars_omits_speeds(tmp_path: Path) -> None:
    def encode_field(number: int, value: bytes) -> bytes:  # of a Protocol Buffers message
        return bytes([number << 3 | 2, len(value)]) + value

    data = b""
    for step, name, value in ((1, b"losses/value", 0.5), (1, b"charts/SPS", 99.0), (300, b"losses/value", 0.25)):
        scalar = encode_field(1, name) + b"\x15" + struct.pack("<f", value)
        step_field = b"\x10" + (bytes([step]) if step < 128 else bytes([step & 127 | 128, step >> 7]))
        event = b"\x09" + struct.pack("<d", 1e9) + step_field + encode_field(5, encode_field(1, scalar))
        data += struct.pack("<QI", len(event), 0) + event + struct.pack("<I", 0)
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "events.out.tfevents.1").write_bytes(data)
    assert programs.read_scalars(tmp_path) == {"losses/value": [[1, "0.5"], [300, "0.25"]]}


# --- sizes ------------------------------------------------------------------------------------------

SOURCE = '''"""A docstring
of two lines."""

# a comment
TEXT = """two lines
of code"""


class Odd:
    """A docstring."""

    value = 1  # code, and a comment

    def method(self):
        """Another docstring."""

        return [

            self.value,
        ]
'''


def test_code_lines_exclude_docstrings_comments_and_blank_lines() -> None:
    assert size.count_code_lines(SOURCE) == len(["TEXT", "of code", "class", "value", "def", "return", "self.value", "]"])


def test_measure_counts_all_sizes(tmp_path: Path) -> None:
    for folder in ("vecenv", "tests", "docs", "bench"):
        (tmp_path / folder).mkdir()
    (tmp_path / "vecenv" / "one.py").write_text("class A: ...\nclass Flight: ...\n# nobody asks\n" + "x = 1\n" * 800)
    (tmp_path / "vecenv" / "two.py").write_text("class A: ...\ndef long():\n" + "    x = 1\n" * 60)
    (tmp_path / "tests" / "test_a.py").write_text("a = 1\n\n")
    (tmp_path / "docs" / "a.md").write_text("three words here\n")
    assert list(size.measure(tmp_path).values()) == [2 + 800 + 1 + 61, 2, 1, 1, 1, 3, 1, 1, 1, 0]


@pytest.mark.long
def test_show_prints_all_sizes_as_text_or_json(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    figures = {**size.measure(), **size.measure_step()}
    for part in ("measure", "measure_step"):
        monkeypatch.setattr(size, part, lambda: figures)
    size.show()
    names = [line[:38].rstrip() for line in capsys.readouterr().out.splitlines()]
    size.show(as_json=True)
    assert json.loads(capsys.readouterr().out) == figures
    assert names == list(figures)
    assert len(names) == 12
    assert 10 < figures["Python calls of a step, caller's side"] < 100
    assert 5 < figures["files on the path of a step"] < 40


# --- training runs ----------------------------------------------------------------------------------

CARTPOLE = partial(runners.make_env, "CartPole-v1")
TRAININGS: dict[str, Any] = {
    "all": partial(train.Training, partial(train._make_vecenv_stepper, CARTPOLE, 4, None, num_workers=2)),
    "halves": partial(train.Training, partial(train._make_vecenv_stepper, CARTPOLE, 4, 2, num_workers=2)),
    "gymnasium": partial(train.Training, partial(train._make_gymnasium_stepper, "SyncVectorEnv", CARTPOLE, 4)),
    "bridge": partial(train.BridgeTraining, CARTPOLE, 4, 2),
}


def record_and_learn(recorded: list[dict[str, np.ndarray]], learn: Any, rows: Any, last: Any) -> None:
    recorded.append({name: np.asarray(field) for name, field in rows.items()})
    learn(rows, last)


@pytest.mark.long
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name == "bridge" else pytest.mark.slow) for name in TRAININGS]
)
def test_training_learns_from_transitions(name: str) -> None:
    """From a row with weight to the next one, CartPole moves by 0.02 times its velocity, unless the row is done."""
    pytest.importorskip("flax")
    pytest.importorskip("optax")
    training = TRAININGS[name]()
    recorded: list[dict[str, np.ndarray]] = []
    learn = training.learner.learn
    try:
        before = training.learner.params
        training.learner.learn = partial(record_and_learn, recorded, learn)
        step_counts = [training._step() for _ in range(2)]
        shares = training.run(0.01) and training.shares()
    finally:
        training.close()
    assert step_counts == [rows["weight"].sum() for rows in recorded[:2]]
    assert sum(shares.values()) == pytest.approx(1)
    changed = training.learner.jax.tree.map(lambda a, b: bool((a != b).any()), before, training.learner.params)
    assert any(training.learner.jax.tree.leaves(changed))
    for rows in recorded:
        observations, continues = rows["observation"], rows["weight"] & ~rows["done"]
        assert observations.shape == (train.ROLLOUT_STEPS, 4, 4)
        assert 0.5 < continues.mean() < 1
        next_positions = observations[:-1, :, 0] + 0.02 * observations[:-1, :, 1]
        np.testing.assert_allclose(observations[1:, :, 0][continues[:-1]], next_positions[continues[:-1]], atol=1e-6)
        assert (rows["reward"][rows["weight"]] == 1).all()
        assert (rows["log_prob"] <= 0).all()
