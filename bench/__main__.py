"""Runs the benchmarks, which only a source checkout contains: python -m bench COMMAND."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Callable, Iterable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from bench import goals, micro, programs, size, suites, tables, train, waits
from bench.engines import SamplingOptions
from bench.programs import PROGRAMS
from bench.train import TRAININGS
from bench.waits import WAITS
from bench.workloads import WORKLOADS
from vecenv.system.cores import usable_cores
from vecenv.tools import progress_bar
from vecenv.tools.benchmark import Report, draw_bars, draw_scale, print_report, print_scale
from vecenv.tools.runners import Unavailable

MICRO: dict[str, Callable[[SamplingOptions], Report]] = {
    "round-trip": micro.compare_round_trips,
    **{f"batch-{n}": partial(micro.compare_batches, num_envs=n) for n in (2, 8, 64)},
    "infos": micro.compare_infos,
    "copies": micro.compare_copies,
}


def _parse_numbers(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of numbers, such as 8,64") from None


def _name_parser(known: Iterable[str]) -> Callable[[str], str]:
    """Return a parser of an argument that must be one of the known names."""
    names = list(known)

    def parse(name: str) -> str:
        if name not in names:
            raise argparse.ArgumentTypeError(f"{name!r} is unknown; choose from {', '.join(names)}")
        return name

    return parse


def _names_parser(known: Iterable[str] | None = None) -> Callable[[str], list[str]]:
    """Return a parser of names that are separated by commas. Without ``known``, it accepts any names."""
    parse_name = str if known is None else _name_parser(known)
    return lambda text: [parse_name(part.strip()) for part in text.split(",") if part.strip()]


def _build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    sampling = argparse.ArgumentParser(add_help=False)
    sampling.add_argument("--seconds", type=float, default=0.5, help="seconds per sample (default: 0.5)")
    sampling.add_argument("--repeats", type=int, default=7, help="number of interleaved rounds (default: 7)")
    sampling.add_argument(
        "--workers", type=int, default=usable_cores(), help="worker processes (default: one per usable core)"
    )
    json_flag = argparse.ArgumentParser(add_help=False)
    json_flag.add_argument("--json", action="store_true", help="print JSON instead of tables")
    out = argparse.ArgumentParser(add_help=False)
    out.add_argument("--out", type=Path, default=Path("bench-results"), help="folder for results (default: bench-results)")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def add_command(
        name: str, run: Callable[..., None], text: str, *parents: argparse.ArgumentParser
    ) -> Callable[..., argparse.Action]:
        """Add a command with the options of ``parents``; return a function that adds an option to it."""
        command = commands.add_parser(name, help=text, parents=list(parents))
        command.set_defaults(run=run, takes_samples=sampling in parents)
        return command.add_argument

    def add_comparison(
        name: str, run: Callable[..., None], text: str, num_envs: int | list[int], workloads: Iterable[str] = ()
    ) -> None:
        add_option = add_command(name, run, text, sampling, json_flag, out)
        if workloads:
            names_help = "separated by commas (default: all)"
            add_option("--workloads", type=_names_parser(workloads), default=list(workloads), help=names_help)
        if isinstance(num_envs, int):
            add_option("--num-envs", type=int, default=num_envs, help=f"number of environments (default: {num_envs})")
        else:
            numbers_help = f"numbers of environments, separated by commas (default: {','.join(map(str, num_envs))})"
            add_option("--num-envs", type=_parse_numbers, default=num_envs, help=numbers_help)
        add_option("--engines", type=_names_parser(), help="engines to measure, separated by commas (default: all)")

    add_command("list", _list, "list the workloads, parts and programs that can be selected")
    add_comparison("compare", _compare, "engines side by side on each workload", [64], WORKLOADS)
    text = "throughput and memory over the number of environments"
    add_option = add_command("sweep", _sweep, text, sampling, json_flag, out)
    add_option("--workload", default="CartPole-v1", choices=WORKLOADS)
    text = "numbers of environments, separated by commas (default: 1,8,64,256,1024)"
    add_option("--num-envs", type=_parse_numbers, default=[1, 8, 64, 256, 1024], help=text)
    add_option("--engines", type=_names_parser(), help="engines to measure, separated by commas (default: all)")
    add_option = add_command("micro", _micro, "single costs, such as a round trip or a copy", sampling, json_flag, out)
    add_option("parts", nargs="*", type=_name_parser(MICRO), metavar="PART", help=f"{', '.join(MICRO)} (default: all)")
    add_comparison("waits", _waits, "environments that wait: long resets, uneven steps, services, simulators", 16, WAITS)
    add_comparison("episodes", _episodes, "a list of episodes: vecenv.evaluate and loops over batches", 8)
    add_comparison("train", _train, "training runs: frames per second, and how their time is divided", 16, TRAININGS)
    add_option = add_command("goals", _goals, "measure rows of the first table in bench/RESULTS.md", sampling, out)
    names_help = f"{', '.join(goals.PARTS)} (default: all)"
    add_option("parts", nargs="*", type=_name_parser(goals.PARTS), metavar="PART", help=names_help)
    add_option("--quick", action="store_true", help="tiny settings that test the program; tables ignore the results")
    add_option = add_command(
        "programs", _programs, "published training programs, with Gymnasium's engine and with vecenv's", out
    )
    add_option(
        "names", nargs="*", type=_name_parser(PROGRAMS), metavar="PROGRAM", help=f"{', '.join(PROGRAMS)} (default: all)"
    )
    add_option("--sources", type=Path, required=True, help="a folder with a checkout of each program's repository")
    add_option("--python", default=sys.executable, help="a Python with the programs' requirements (default: this one)")
    add_option("--rounds", type=int, default=3, help="runs of each program with each engine (default: 3)")
    add_command("size", _size, "sizes of the package and of the code that a step runs", json_flag)
    text = "measure the figures in README.md and in the first two tables of docs/benchmarks.md, then do the same as `table`"
    add_command("figures", _figures, text, sampling, out)
    text = "update README.md, bench/RESULTS.md and docs/benchmarks.md with the results in the folder --out"
    add_command("table", _table, text, out)
    return parser


def _to_json(reports: list[Report]) -> str:
    return json.dumps([report.to_dict() for report in reports], indent=1)


def _write_reports(arguments: argparse.Namespace, reports: list[Report], stem: str) -> None:
    """Write reports to files. Print them as tables, unless JSON is to be printed."""
    arguments.out.mkdir(parents=True, exist_ok=True)
    (arguments.out / f"{stem}.json").write_text(_to_json(reports) + "\n")
    if len(reports) == 1:
        draw_bars(reports[0], arguments.out / f"{stem}.png")
    if not arguments.json:
        for report in reports:
            print_report(report)
        print(f"Written: {arguments.out / stem}.json")


def _output_reports(arguments: argparse.Namespace, reports: list[Report], stem: str) -> None:
    """Write reports to files, and print them as tables or JSON. Warn about unknown ``--engines``; exit if none is known."""
    measured = {row.name for report in reports for row in report.rows}
    unknown = [name for name in arguments.engines or () if name not in measured]
    if unknown:
        text = f"--engines: no engine is named {' or '.join(unknown)}"
        if not measured:
            raise SystemExit(f"python -m bench: {text}")
        print(text, file=sys.stderr)
    _write_reports(arguments, reports, stem)
    if arguments.json:
        print(_to_json(reports))


def _list(arguments: argparse.Namespace, sampling: SamplingOptions) -> None:
    for kind, workloads in (("workload", WORKLOADS), ("waits", WAITS), ("train", TRAININGS)):
        for workload in workloads.values():
            print(f"{kind:8} {workload.name:12} {workload.description}")
    print("micro   ", ", ".join(MICRO))
    print("goals   ", ", ".join(goals.PARTS))
    for name, program in PROGRAMS.items():
        print(f"program  {name:22} https://github.com/{program.repository}")


def _compare(arguments: argparse.Namespace, sampling: SamplingOptions) -> None:
    reports: list[Report] = []
    for workload in arguments.workloads:
        for num_envs in arguments.num_envs:
            try:
                reports += suites.compare_engines(workload, num_envs, arguments.workers, sampling, arguments.engines)
            except Unavailable as error:
                print(f"{workload} is omitted: {error}", file=sys.stderr)
    _output_reports(arguments, reports, "compare")


def _sweep(arguments: argparse.Namespace, sampling: SamplingOptions) -> None:
    suites.raise_descriptor_limit()
    memory: dict[int, dict[str, suites.Memory]] = {num_envs: {} for num_envs in arguments.num_envs}
    reports, reports_by_size = [], []
    for num_envs in arguments.num_envs:
        options = arguments.workers, sampling, arguments.engines, memory[num_envs]
        parts = suites.compare_engines(arguments.workload, num_envs, *options)
        reports += parts
        reports_by_size.append(suites.merge_reports(parts))
    stem = f"sweep-{arguments.workload.replace('/', '_')}"
    _output_reports(arguments, reports, stem)
    draw_scale(reports_by_size, arguments.out / f"{stem}-scale.png")
    if not arguments.json:
        print_scale(reports_by_size)
    for num_envs, name, used in _write_memory(arguments.out / f"{stem}-memory.json", memory):
        if not arguments.json:
            mib_per_env = (used.trainer + used.workers) / num_envs / 2**20
            print(f"memory, {num_envs:5} envs, {name:12} {mib_per_env:8.2f} MiB per env, {used.processes} child processes")


def _write_memory(path: Path, memory: dict[Any, dict[str, suites.Memory]]) -> list[tuple[Any, str, suites.Memory]]:
    """Write the memory of all engines in all cases to a file; return (case, name of the engine, memory) for each of them."""
    contents = {case: {name: asdict(used) for name, used in by_name.items()} for case, by_name in memory.items()}
    path.write_text(json.dumps(contents, indent=1) + "\n")
    return [(case, name, used) for case, by_name in memory.items() for name, used in by_name.items()]


def _micro(arguments: argparse.Namespace, sampling: SamplingOptions) -> None:
    reports = []
    for part in arguments.parts or MICRO:
        report = MICRO[part](sampling)
        reports.append(report)
        _write_reports(arguments, [report], f"micro-{part}")
        if arguments.json:
            continue
        if part == "copies":
            for name, times in micro.copying_times(report).items():
                text = f"copying takes {times.median:.2f} times as long as one memcpy" if times else "not measured"
                print(f"{name}: {text}")
            for name, count in micro.count_copies().items():
                print(f"{name}: each byte is copied {count:.2f} times on average")
        if part.startswith("batch-"):
            for name, overhead in micro.batch_overhead(report).items():
                text = "not measured"
                if overhead:
                    microseconds = f"{overhead.median:.1f} us ({overhead.lower:.1f} - {overhead.upper:.1f})"
                    text = f"{microseconds} per batch more than the bare loop"
                print(f"{report.num_envs} environments, {name}: {text}")
    if arguments.json:
        print(_to_json(reports))


def _waits(arguments: argparse.Namespace, sampling: SamplingOptions) -> None:
    suites.raise_descriptor_limit()
    memory: dict[str, dict[str, suites.Memory]] = {workload: {} for workload in arguments.workloads}
    options = arguments.num_envs, arguments.workers, sampling, arguments.engines
    reports = [waits.compare_waits(workload, *options, memory[workload]) for workload in arguments.workloads]
    _output_reports(arguments, reports, "waits")
    for workload, name, used in _write_memory(arguments.out / "waits-memory.json", memory):
        if not arguments.json:
            mib = (used.trainer + used.workers) / 2**20
            print(f"memory, {workload:12} {name:20} {mib:8.1f} MiB in {1 + used.processes} processes")


def _episodes(arguments: argparse.Namespace, sampling: SamplingOptions) -> None:
    _output_reports(arguments, [waits.compare_episodes(arguments.num_envs, sampling, arguments.engines)], "episodes")


def _train(arguments: argparse.Namespace, sampling: SamplingOptions) -> None:
    suites.raise_descriptor_limit()
    reports = []
    for name in arguments.workloads:
        report, shares = train.compare_trainings(name, arguments.num_envs, arguments.workers, sampling, arguments.engines)
        train.draw_shares(report, shares, arguments.out / f"train-{name}-shares.png")
        reports.append(report)
        if not arguments.json:
            for row, parts in shares.items():
                print(f"{name}, {row}: " + ", ".join(f"{part} {share:.0%}" for part, share in parts.items()))
    _output_reports(arguments, reports, "train")


def _goals(arguments: argparse.Namespace, sampling: SamplingOptions) -> None:
    settings = goals.Settings(arguments.workers, sampling, arguments.quick)
    for part in arguments.parts or goals.PARTS:
        goals.run(part, settings, arguments.out)


def _programs(arguments: argparse.Namespace, sampling: SamplingOptions) -> None:
    programs.compare(arguments.names or list(PROGRAMS), arguments.sources, arguments.python, arguments.rounds, arguments.out)


def _size(arguments: argparse.Namespace, sampling: SamplingOptions) -> None:
    size.show(as_json=arguments.json)


def _figures(arguments: argparse.Namespace, sampling: SamplingOptions) -> None:
    """Measure the figures in README.md and in the first two tables of docs/benchmarks.md, and write all tables."""
    options = {"num-envs": 64, "seconds": arguments.seconds, "repeats": arguments.repeats, "workers": arguments.workers}
    command = [sys.executable, "-m", "vecenv", "bench", "CartPole-v1", "--out", str(arguments.out)]
    subprocess.run([*command, *(f"--{name}={value}" for name, value in options.items())], check=True)
    arguments.workloads, arguments.num_envs, arguments.engines, arguments.json = list(WORKLOADS), [8], None, False
    _compare(arguments, sampling)
    tables.write_tables(arguments.out)


def _table(arguments: argparse.Namespace, sampling: SamplingOptions) -> None:
    tables.write_tables(arguments.out)


def main() -> int:
    arguments = _build_parser().parse_args()
    with progress_bar() as progress:
        sampling = {}
        if arguments.takes_samples:
            sampling = {"seconds": arguments.seconds, "repeats": arguments.repeats, "progress": progress}
        try:
            arguments.run(arguments, sampling)
        except Unavailable as error:
            raise SystemExit(f"python -m bench: {error}") from None
    return 0


if __name__ == "__main__":
    sys.exit(main())
