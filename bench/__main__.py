"""``python -m bench``: all measurements of the suite, from a source checkout."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from bench import goals, micro, programs, size, suites, tables, train, waits
from bench.engines import Pace
from bench.programs import PROGRAMS
from bench.train import TRAININGS
from bench.waits import WAITS
from bench.workloads import WORKLOADS
from vecenv.system.cores import usable_cores
from vecenv.tools import progress_bar
from vecenv.tools.benchmark import Report, draw_bars, draw_scale, print_report, print_scale
from vecenv.tools.runners import Unavailable

MICRO: dict[str, Callable[[Pace], Report]] = {
    "round-trip": micro.round_trip,
    **{f"batch-{n}": partial(micro.batch, num_envs=n) for n in (2, 8, 64)},
    "infos": micro.infos,
    "copies": micro.copies,
}


def _parse_numbers(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no list of numbers, such as 8,64") from None


def _name_parser(known: Iterable[str]) -> Callable[[str], str]:
    """Return a function that checks that an argument is one of the known names."""
    names = list(known)

    def parse(name: str) -> str:
        if name not in names:
            raise argparse.ArgumentTypeError(f"{name!r} is unknown; choose from {', '.join(names)}")
        return name

    return parse


def _names_parser(known: Iterable[str] | None = None) -> Callable[[str], list[str]]:
    """Return a function that parses names, separated by commas; without ``known``, any names."""
    check = str if known is None else _name_parser(known)
    return lambda text: [check(part.strip()) for part in text.split(",") if part.strip()]


def _build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    pace = argparse.ArgumentParser(add_help=False)
    pace.add_argument("--seconds", type=float, default=0.5, help="length of one sample (default: 0.5)")
    pace.add_argument("--repeats", type=int, default=7, help="interleaved rounds (default: 7)")
    pace.add_argument("--workers", type=int, default=usable_cores(), help="worker processes (default: the usable cores)")
    printed = argparse.ArgumentParser(add_help=False)
    printed.add_argument("--json", action="store_true", help="print JSON instead of tables")
    out = argparse.ArgumentParser(add_help=False)
    out.add_argument("--out", type=Path, default=Path("bench-results"), help="folder for results (default: bench-results)")
    commands = parser.add_subparsers(dest="command", required=True, metavar="PART")

    def add(name: str, run: Callable[..., None], text: str, *parents: argparse.ArgumentParser) -> Callable[..., Any]:
        command = commands.add_parser(name, help=text, parents=list(parents))
        command.set_defaults(run=run, paced=pace in parents)
        return command.add_argument

    def add_comparison(
        name: str, run: Callable[..., None], text: str, num_envs: int | list[int], workloads: Iterable[str] = ()
    ) -> None:
        option = add(name, run, text, pace, printed, out)
        if workloads:
            names_help = "separated by commas (default: all)"
            option("--workloads", type=_names_parser(workloads), default=list(workloads), help=names_help)
        parse = int if isinstance(num_envs, int) else _parse_numbers
        shown = num_envs if isinstance(num_envs, int) else ",".join(map(str, num_envs))
        option("--num-envs", type=parse, default=num_envs, help=f"number of environments (default: {shown})")
        option("--engines", type=_names_parser(), help="engines to measure, separated by commas (default: all)")

    add("list", _list, "the names that the other parts accept")
    add_comparison("compare", _compare, "engines side by side on each workload", [64], WORKLOADS)
    option = add("sweep", _sweep, "throughput and memory over the number of environments", pace, printed, out)
    option("--workload", default="CartPole-v1", choices=WORKLOADS)
    text = "numbers of environments, separated by commas (default: 1,8,64,256,1024)"
    option("--num-envs", type=_parse_numbers, default=[1, 8, 64, 256, 1024], help=text)
    option("--engines", type=_names_parser(), help="engines to measure, separated by commas (default: all)")
    option = add("micro", _micro, "one cost at a time", pace, printed, out)
    option("parts", nargs="*", type=_name_parser(MICRO), metavar="PART", help=f"{', '.join(MICRO)} (default: all)")
    add_comparison("waits", _waits, "environments that wait: long resets, uneven steps, services, simulators", 16, WAITS)
    add_comparison("episodes", _episodes, "a list of episodes: vecenv.evaluate and loops over batches", 8)
    add_comparison("train", _train, "training runs: frames per second, and shares of the time", 16, TRAININGS)
    option = add("goals", _goals, "measure rows of the first table in bench/RESULTS.md", pace, out)
    parts = goals.PARTS
    option("parts", nargs="*", type=_name_parser(parts), metavar="PART", help=f"{', '.join(parts)} (default: all)")
    option("--quick", action="store_true", help="tiny settings, to test the program; tables ignore the results")
    option = add("programs", _programs, "published training programs, with Gymnasium's engine and with vecenv's", out)
    option("names", nargs="*", type=_name_parser(PROGRAMS), metavar="PROGRAM", help=f"{', '.join(PROGRAMS)} (default: all)")
    option("--sources", type=Path, required=True, help="a folder with a checkout of each program's repository")
    option("--python", default=sys.executable, help="a Python with the programs' requirements (default: this one)")
    option("--rounds", type=int, default=3, help="pairs of runs of each program (default: 3)")
    add("size", _size, "size of the package, and of the code that a step runs", printed)
    text = "measure the figures of README.md and of the first tables of docs/benchmarks.md, and write them"
    add("figures", _figures, text, pace, out)
    add("table", _table, "write the results into README.md, bench/RESULTS.md and docs/benchmarks.md", out)
    return parser


def _to_json(reports: list[Report]) -> str:
    return json.dumps([report.to_dict() for report in reports], indent=1)


def _write_reports(arguments: argparse.Namespace, reports: list[Report], stem: str) -> None:
    """Write reports to files, and print them unless JSON is printed."""
    arguments.out.mkdir(parents=True, exist_ok=True)
    (arguments.out / f"{stem}.json").write_text(_to_json(reports) + "\n")
    if len(reports) == 1:
        draw_bars(reports[0], arguments.out / f"{stem}.png")
    if not arguments.json:
        for report in reports:
            print_report(report)
        print(f"Written: {arguments.out / stem}.json")


def _output_reports(arguments: argparse.Namespace, reports: list[Report], stem: str) -> None:
    """Write reports to files, and print them as tables or JSON. Name the values of ``--engines`` that no report has."""
    measured = {row.name for report in reports for row in report.rows}
    if unknown := [name for name in arguments.engines or () if name not in measured]:
        text = f"--engines: no engine is named {' or '.join(unknown)}"
        if not measured:
            raise SystemExit(f"python -m bench: {text}")
        print(text, file=sys.stderr)
    _write_reports(arguments, reports, stem)
    if arguments.json:
        print(_to_json(reports))


def _list(arguments: argparse.Namespace, pace: Pace) -> None:
    for kind, workloads in (("workload", WORKLOADS), ("waits", WAITS), ("train", TRAININGS)):
        for workload in workloads.values():
            print(f"{kind:8} {workload.name:12} {workload.text}")
    print("micro   ", ", ".join(MICRO))
    print("goals   ", ", ".join(goals.PARTS))
    for name, program in PROGRAMS.items():
        print(f"program  {name:22} https://github.com/{program.repository}")


def _compare(arguments: argparse.Namespace, pace: Pace) -> None:
    reports: list[Report] = []
    for workload in arguments.workloads:
        for num_envs in arguments.num_envs:
            try:
                reports += suites.side_by_side(workload, num_envs, arguments.workers, pace, arguments.engines)
            except Unavailable as error:
                print(f"{workload} is left out: {error}", file=sys.stderr)
    _output_reports(arguments, reports, "compare")


def _sweep(arguments: argparse.Namespace, pace: Pace) -> None:
    suites.raise_descriptor_limit()
    memory: dict[int, dict[str, suites.Memory]] = {}
    reports, sizes = [], []
    for num_envs in arguments.num_envs:
        memory_by_name = memory[num_envs] = {}
        options = arguments.workers, pace, arguments.engines, memory_by_name
        parts = suites.side_by_side(arguments.workload, num_envs, *options)
        reports += parts
        sizes.append(suites.merge(parts))
    stem = f"sweep-{arguments.workload.replace('/', '_')}"
    _output_reports(arguments, reports, stem)
    draw_scale(sizes, arguments.out / f"{stem}-scale.png")
    if not arguments.json:
        print_scale(sizes)
    for num_envs, name, used in _save_memory(arguments, stem, memory):
        mib_per_env = (used.trainer + used.workers) / num_envs / 2**20
        print(f"memory, {num_envs:5} envs, {name:12} {mib_per_env:8.2f} MiB per env, {used.processes} processes")


def _save_memory(arguments: argparse.Namespace, stem: str, memory: dict[Any, dict[str, suites.Memory]]) -> Iterator[Any]:
    """Write the memory of all rows to a file. Yield the case, name and memory of each row, or nothing with ``--json``."""
    kept = {case: {name: asdict(used) for name, used in by_name.items()} for case, by_name in memory.items()}
    (arguments.out / f"{stem}-memory.json").write_text(json.dumps(kept, indent=1) + "\n")
    if not arguments.json:
        yield from ((case, name, used) for case, by_name in memory.items() for name, used in by_name.items())


def _micro(arguments: argparse.Namespace, pace: Pace) -> None:
    reports = []
    for part in arguments.parts or MICRO:
        report = MICRO[part](pace)
        reports.append(report)
        _write_reports(arguments, [report], f"micro-{part}")
        if arguments.json:
            continue
        if part == "copies":
            for name, times in micro.copying_times(report).items():
                print(f"{name}: {times.median:.2f} times the duration of one memcpy" if times else f"{name}: not measured")
            for name, count in micro.count_copies().items():
                print(f"{name}: every byte is copied {count:.2f} times")
        if part.startswith("batch-"):
            for name, spent in micro.batch_overhead(report).items():
                text = f"{spent.median:.1f} us ({spent.lower:.1f} - {spent.upper:.1f})" if spent else "not measured"
                print(f"{report.num_envs} environments, {name}: {text} per batch, beyond the bare loop in as many processes")
    if arguments.json:
        print(_to_json(reports))


def _waits(arguments: argparse.Namespace, pace: Pace) -> None:
    suites.raise_descriptor_limit()
    memory: dict[str, dict[str, suites.Memory]] = {workload: {} for workload in arguments.workloads}
    common = arguments.num_envs, arguments.workers, pace, arguments.engines
    reports = [waits.waits(workload, *common, memory[workload]) for workload in arguments.workloads]
    _output_reports(arguments, reports, "waits")
    for workload, name, used in _save_memory(arguments, "waits", memory):
        whole = (used.trainer + used.workers) / 2**20
        print(f"memory, {workload:12} {name:20} {whole:8.1f} MiB in {1 + used.processes} processes")


def _episodes(arguments: argparse.Namespace, pace: Pace) -> None:
    _output_reports(arguments, [waits.episodes(arguments.num_envs, pace, arguments.engines)], "episodes")


def _train(arguments: argparse.Namespace, pace: Pace) -> None:
    suites.raise_descriptor_limit()
    reports = []
    for name in arguments.workloads:
        report, shares = train.train(name, arguments.num_envs, arguments.workers, pace, arguments.engines)
        train.draw_shares(report, shares, arguments.out / f"train-{name}-shares.png")
        reports.append(report)
        for row, parts in {} if arguments.json else shares.items():
            print(f"{name}, {row}: " + ", ".join(f"{part} {share:.0%}" for part, share in parts.items()))
    _output_reports(arguments, reports, "train")


def _goals(arguments: argparse.Namespace, pace: Pace) -> None:
    settings = goals.Settings(arguments.workers, pace, arguments.quick)
    for part in arguments.parts or goals.PARTS:
        goals.run(part, settings, arguments.out)


def _programs(arguments: argparse.Namespace, pace: Pace) -> None:
    programs.compare(arguments.names or list(PROGRAMS), arguments.sources, arguments.python, arguments.rounds, arguments.out)


def _size(arguments: argparse.Namespace, pace: Pace) -> None:
    size.show(as_json=arguments.json)


def _figures(arguments: argparse.Namespace, pace: Pace) -> None:
    """Measure the figures of README.md and of the first two tables of docs/benchmarks.md, and write them there."""
    options = {"num-envs": 64, "seconds": arguments.seconds, "repeats": arguments.repeats, "workers": arguments.workers}
    command = [sys.executable, "-m", "vecenv", "bench", "CartPole-v1", "--out", str(arguments.out)]
    subprocess.run([*command, *(f"--{name}={value}" for name, value in options.items())], check=True)
    arguments.workloads, arguments.num_envs, arguments.engines, arguments.json = list(WORKLOADS), [8], None, False
    _compare(arguments, pace)
    tables.write_tables(arguments.out)


def _table(arguments: argparse.Namespace, pace: Pace) -> None:
    tables.write_tables(arguments.out)


def main() -> int:
    arguments = _build_parser().parse_args()
    with progress_bar() as progress:
        pace = {}
        if arguments.paced:
            pace = {"seconds": arguments.seconds, "repeats": arguments.repeats, "progress": progress}
        try:
            arguments.run(arguments, pace)
        except Unavailable as error:
            raise SystemExit(f"python -m bench: {error}") from None
    return 0


if __name__ == "__main__":
    sys.exit(main())
