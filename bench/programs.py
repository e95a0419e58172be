"""Runs unmodified published programs with Gymnasium's and vecenv's engines, and compares results and times.

    git clone https://github.com/vwxyzjn/cleanrl SOURCES/cleanrl      # and the others that `python -m bench list` names
    python -m bench programs --sources SOURCES cleanrl-ppo skrl-ppo
    python -m bench programs --sources SOURCES --python /another/environment/bin/python --rounds 5

This repository does not contain the programs. ``python program.py`` and ``python -m vecenv run program.py`` run with the
same arguments and seeds, each in an empty folder, or in its repository if it must. In both runs ``bench/watched.py`` starts
the program, and computes a checksum of all actions, observations, rewards and flags. Except for times, the scalars that a
program writes for TensorBoard must be equal too. The requirements of the programs must be installed for ``--python``.

Wall time covers the whole program, including imports. Processor time is that of the program and its workers; it varies less
on a busy machine.
"""

from __future__ import annotations

import json
import os
import re
import statistics
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from vecenv.tools.benchmark import Summary

ROOT = Path(__file__).resolve().parent.parent
TIME_SCALARS = re.compile(r"sps|time|fps|second|speed|perf", re.IGNORECASE)  # names of scalars that differ from run to run


@dataclass(frozen=True)
class Program:
    """A published program and its command line.

    Attributes:
        repository: Its repository on GitHub; the last part is also the name of its folder in ``--sources``.
        command: A file in the repository or a module (``-m name``), and its arguments.
        vector_env: A description, for the table, of the vector environment that the program builds.
        watch: Arguments of ``bench/watched.py``.
        sync: True if the program builds a SyncVectorEnv, which ``vecenv run`` replaces only with ``--sync``.
        in_repository: True if the program must run in the root of its repository.
        configuration: A settings file, a text in it, and a replacement of the text. ``{settings}`` in ``command`` stands
            for the path of the changed copy.
    """

    repository: str
    command: str
    vector_env: str
    watch: str = ""
    sync: bool = False
    in_repository: bool = False
    configuration: tuple[str, str, str] | None = None


_SAC = "--env-id Hopper-v5 --num-envs 4 --learning-starts 100 --total-timesteps 320 --seed 3"
_SKRL = "examples/gymnasium/torch_gymnasium_pendulum_ppo.py --num_envs 8 --headless --seed 3"
_SLM = "-m slm_lab.cli.main slm_lab/spec/benchmark/ppo/ppo_mujoco.json ppo_mujoco dev -s env=HalfCheetah-v5 -s max_frame=3e4"
_DEVICE = "\n    name: HalfCheetah-v5", "\n    name: HalfCheetah-v5\n    device: cpu\n    torch_compile: False"
PROGRAMS: dict[str, Program] = {
    "cleanrl-ppo": Program(
        "vwxyzjn/cleanrl", "cleanrl/ppo.py --total-timesteps 2048 --seed 3", "SyncVectorEnv, CartPole-v1, 4", sync=True,
    ),
    "cleanrl-sac": Program(
        "vwxyzjn/cleanrl", f"cleanrl/sac_continuous_action.py {_SAC}", "SyncVectorEnv, Hopper-v5, 4", sync=True,
    ),
    "gymnasium-a2c": Program(
        "Farama-Foundation/Gymnasium", "docs/tutorials/training_agents/vector_a2c.py",
        "make_vec and SyncVectorEnv, LunarLander-v3, 10", "--stop 400 --seed 1", sync=True,
    ),
    "skrl-ppo": Program(
        "Toni-SM/skrl", _SKRL, 'make_vec(..., vectorization_mode="sync"), Pendulum-v1, 8', "--stop 1060", sync=True,
    ),
    "agilerl-ppo": Program(
        "AgileRL/AgileRL", "demos/single_agent/demo_on_policy.py", "AsyncVectorEnv, LunarLander-v3, 16",
        "--stop 80 --seed 2",
    ),
    "agilerl-dqn": Program(
        "AgileRL/AgileRL", "demos/single_agent/demo_off_policy.py", "AsyncVectorEnv, LunarLander-v3, 16",
        "--stop 200 --seed 2",
    ),
    "rl-games-ppo": Program(  # its settings files require a GPU
        "Denys88/rl_games", "runner.py --train --file {settings} --num_actors 8 --seed 3",
        "AsyncVectorEnv, HalfCheetah-v5, 8", "--stop 260",
        configuration=("rl_games/configs/mujoco/halfcheetah.yaml", *_DEVICE),
    ),
    "slm-lab-ppo": Program(
        "kengz/SLM-Lab", _SLM, 'make_vec(..., vectorization_mode="async") by spawn, HalfCheetah-v5, 16',
        "--stop 140 --seed 2", in_repository=True,
    ),
    "hands-on-a2c": Program(
        "PacktPublishing/Deep-Reinforcement-Learning-Hands-On-Third-Edition", "Chapter12/02_pong_a2c.py --use-async -n x",
        "AsyncVectorEnv, PongNoFrameskip-v4, 50", "--import ale_py --stop 12 --seed 2",
    ),
}  # fmt: skip


@dataclass
class Run:
    """One run of a program: its seconds, its exit code, and its results."""

    wall: float
    processor: float
    status: int
    figures: dict[str, Any]
    scalars: dict[str, list[list[Any]]] = field(default_factory=dict)
    last_line: str = ""


def read_scalars(folder: Path) -> dict[str, list[list[Any]]]:
    """Return the steps and values of all TensorBoard scalars in a folder by name, except for times."""
    scalars: dict[str, list[list[Any]]] = {}
    for file in sorted(folder.rglob("events.out.tfevents.*")):
        data, offset = file.read_bytes(), 0
        while offset + 12 <= len(data):  # a record: its length, a checksum, the event, and a checksum
            (length,) = struct.unpack_from("<Q", data, offset)
            event = dict(parse_fields(data[offset + 12 : offset + 12 + length]))  # 2: step, 5: summary
            for _, value in parse_fields(event.get(5, b"")):
                parts = dict(parse_fields(value))  # 1: name, 2: number, 8: tensor
                if 1 in parts and not TIME_SCALARS.search(name := parts[1].decode()):
                    scalar = struct.unpack("<f", parts[2])[0] if 2 in parts else parts.get(8, b"").hex()
                    scalars.setdefault(name, []).append([event.get(2, 0), repr(scalar)])
            offset += 16 + length
    return scalars


def parse_fields(message: bytes) -> Iterator[tuple[int, Any]]:
    """Yield the number and value of each field of a protocol buffer; values other than varints are bytes."""
    offset = 0

    def read_varint() -> int:
        nonlocal offset
        value = shift = 0
        while True:
            byte = message[offset]
            offset += 1
            value |= (byte & 127) << shift
            shift += 7
            if byte < 128:
                return value

    while offset < len(message):
        key = read_varint()
        number, wire_type = key >> 3, key & 7
        if wire_type == 0:  # a varint
            yield number, read_varint()
            continue
        fixed_sizes = {1: 8, 5: 4}
        size = fixed_sizes[wire_type] if wire_type in fixed_sizes else read_varint()
        yield number, message[offset : offset + size]
        offset += size


def run_once(program: Program, sources: Path, python: str, ours: bool) -> Run:
    """Run a program once, with vecenv's engine if ``ours`` is true, otherwise with Gymnasium's."""
    checkout = sources / program.repository.rpartition("/")[2]
    command = program.command.split()
    if command[0] == "-m":
        command[0] = "--module"
    elif not (checkout / command[0]).is_file():
        raise SystemExit(f"no {checkout / command[0]}: git clone https://github.com/{program.repository} {checkout}")
    else:
        command[0] = str((checkout / command[0]).resolve())
    with tempfile.TemporaryDirectory(prefix="vecenv-program-") as folder:
        report, log, settings = (Path(folder) / name for name in ("report.json", "log", "settings.yaml"))
        if program.configuration:
            file, old, new = program.configuration
            settings.write_text((checkout / file).read_text().replace(old, new))
            command = [str(settings) if argument == "{settings}" else argument for argument in command]
        launcher = ["-m", "vecenv", "run", *(["--sync"] if program.sync else [])] if ours else []
        watched = [str(ROOT / "bench" / "watched.py"), "--report", str(report), *program.watch.split(), *command]
        path = os.pathsep.join(filter(None, (str(ROOT), str(checkout.resolve()), os.environ.get("PYTHONPATH"))))
        environment = os.environ | {"PYTHONPATH": path, "MPLBACKEND": "Agg"}
        start = time.monotonic()
        with log.open("wb") as output:
            process = subprocess.Popen(
                [python, *launcher, *watched], cwd=checkout if program.in_repository else folder, env=environment,
                stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT,
            )  # fmt: skip
            _, status, used = os.wait4(process.pid, 0)
            process.returncode = os.waitstatus_to_exitcode(status)
        wall = time.monotonic() - start
        lines = log.read_text(errors="replace").splitlines()
        figures = json.loads(report.read_text()) if report.exists() else {}
        if process.returncode:
            print("\n".join(lines[-20:]), file=sys.stderr)
        scalars = read_scalars(Path(folder))
    return Run(wall, used.ru_utime + used.ru_stime, process.returncode, figures, scalars, lines[-1] if lines else "")


@dataclass
class Result:
    """The runs of one program with Gymnasium's engine (``plain``) and with vecenv's (``ours``), in pairs."""

    name: str
    plain: list[Run] = field(default_factory=list)
    ours: list[Run] = field(default_factory=list)

    def format_ratio(self, measure: Callable[[Run], float]) -> str:
        """Format the ratio of Gymnasium's value to vecenv's over all pairs: above 1, vecenv's is smaller."""
        summary = Summary.from_ratios(map(measure, self.plain), map(measure, self.ours))
        return summary.format() if summary else "-"

    def describe_equality(self) -> str:
        """Describe whether all runs with both engines had the same results."""
        runs = self.plain + self.ours
        if any(run.status for run in runs):
            return "failed"
        if len({json.dumps([run.figures[key] for key in ("checksum", "calls", "rewards")]) for run in runs}) > 1:
            checksums = {run.figures["checksum"] for run in self.plain}
            return "NO" if len(checksums) == 1 else "Gymnasium's runs differ too"
        scalars = runs[0].scalars
        if any(run.scalars != scalars for run in runs):
            return "steps yes, TensorBoard NO"
        count = sum(len(values) for values in scalars.values())
        return "yes" + (f", and {count:,} scalars of TensorBoard" if count else "")


def median_ms(runs: list[Run], key: str, per: str | None = None) -> float:
    """Return the median of a duration in milliseconds; with ``per``, divided by this figure of the run."""
    return 1e3 * statistics.median(run.figures[key] / (run.figures[per] if per else 1) for run in runs)


def format_row(result: Result) -> str:
    program, figures = PROGRAMS[result.name], result.ours[0].figures
    file = program.command.removeprefix("-m ").split()[0]
    construction = [median_ms(runs, "init_seconds") for runs in (result.plain, result.ours)]
    step = [median_ms(runs, "step_seconds", "calls") for runs in (result.plain, result.ours)]
    cells = [
        f"{program.repository} `{file}`",
        program.vector_env,
        f"{figures['calls']:,} x {figures['environments']}",
        result.describe_equality(),
        result.format_ratio(lambda run: run.wall),
        result.format_ratio(lambda run: run.processor),
        f"{construction[0]:,.0f} / {construction[1]:,.0f}",
        f"{step[0]:.2f} / {step[1]:.2f}",
    ]
    return f"| {' | '.join(cells)} |"


TABLE_HEADER = (
    "| program | vector environment | steps | equal | wall time | processor time | construction, ms | step, ms |\n"
    "|---|---|---:|---|---|---|---:|---:|"
)


def compare(names: list[str], sources: Path, python: str, rounds: int, out: Path) -> None:
    """Run each program with both engines in each round, and print the table. A failed program does not run again."""
    out.mkdir(parents=True, exist_ok=True)
    results = {name: Result(name) for name in names}
    for index in range(rounds):
        for name, result in results.items():
            if any(run.status for run in result.plain + result.ours):
                continue
            order = (False, True) if index % 2 == 0 else (True, False)
            for ours in order:
                runs = result.ours if ours else result.plain
                runs.append(run_once(PROGRAMS[name], sources, python, ours))
            (out / f"program-{name}.json").write_text(json.dumps(asdict(result), indent=1) + "\n")
            print(f"round {index + 1}, {name}: {result.describe_equality()}", file=sys.stderr, flush=True)
    print(TABLE_HEADER)
    for name, result in results.items():
        failed = [run.last_line for run in result.plain + result.ours if run.status]
        print(f"| {name} | failed: {failed[0]} |" if failed else format_row(result), flush=True)
