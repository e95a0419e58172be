"""``python -m bench``: every measurement of the suite, from a source checkout."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path

from bench import goals, micro, plots, programs, size, suites, tables, train, waits
from bench.programs import PROGRAMS
from bench.train import TRAININGS
from bench.waits import WAITS
from bench.workloads import WORKLOADS
from vecenv.system.cores import usable_cores
from vecenv.tools.benchmark import Report
from vecenv.tools.report import draw_bars, draw_scale, print_report, print_scale, progress_bar

MICRO: dict[str, Callable[[suites.Pace], Report]] = {
    "round-trip": micro.round_trip,
    **{f"batch-{n}": partial(micro.batch, num_envs=n) for n in (2, 8, 64)},
    "reset": micro.reset,
    "call": micro.call,
    "infos": micro.infos,
    "copies": micro.copies,
}


def _numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def _names(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    pace = argparse.ArgumentParser(add_help=False)
    pace.add_argument("--seconds", type=float, default=0.5, help="length of one sample (default: 0.5)")
    pace.add_argument("--repeats", type=int, default=7, help="interleaved rounds (default: 7)")
    pace.add_argument("--workers", type=int, default=usable_cores(), help="default: the usable cores")
    pace.add_argument("--out", type=Path, default=Path("bench-results"), help="default: bench-results")
    pace.add_argument("--json", action="store_true", help="print JSON instead of tables")
    commands = parser.add_subparsers(dest="command", required=True, metavar="PART")

    command = commands.add_parser("list", help="workloads, micro-benchmarks and goals")
    command.set_defaults(run=_list)

    command = commands.add_parser("compare", parents=[pace], help="all engines side by side on some workloads")
    command.add_argument("--workloads", type=_names, default=list(WORKLOADS), help="separated by commas (default: all)")
    command.add_argument("--num-envs", type=_numbers, default=[64], help="separated by commas (default: 64)")
    command.add_argument("--engines", type=_names, help="only these rows (default: all)")
    command.set_defaults(run=_compare)

    command = commands.add_parser("sweep", parents=[pace], help="throughput and memory over the number of environments")
    command.add_argument("--workload", default="CartPole-v1", choices=WORKLOADS)
    command.add_argument("--num-envs", type=_numbers, default=[1, 8, 64, 256, 1024])
    command.add_argument("--engines", type=_names, help="only these rows (default: all)")
    command.set_defaults(run=_sweep)

    command = commands.add_parser("micro", parents=[pace], help="one cost at a time")
    command.add_argument("parts", nargs="*", metavar="PART", help=f"of {', '.join(MICRO)} (default: all)")
    command.set_defaults(run=_micro)

    command = commands.add_parser("waits", parents=[pace], help="long resets, uneven steps, services, simulators")
    command.add_argument("--workloads", type=_names, default=list(WAITS), help="separated by commas (default: all)")
    command.add_argument("--num-envs", type=int, default=16)
    command.add_argument("--engines", type=_names, help="only these rows (default: all)")
    command.set_defaults(run=_waits)

    command = commands.add_parser("episodes", parents=[pace], help="a list of episodes: evaluate, and batch after batch")
    command.add_argument("--num-envs", type=int, default=8)
    command.add_argument("--engines", type=_names, help="only these rows (default: all)")
    command.set_defaults(run=_episodes)

    command = commands.add_parser("train", parents=[pace], help="whole trainings: frames per second, where time goes")
    command.add_argument("--workloads", type=_names, default=list(TRAININGS), help="separated by commas (default: all)")
    command.add_argument("--num-envs", type=int, default=16)
    command.add_argument("--engines", type=_names, help="only these rows (default: all)")
    command.set_defaults(run=_train)

    command = commands.add_parser("busy", parents=[pace], help="with and without spinning, quiet and disturbed")
    command.add_argument("--workload", default="CartPole-v1", choices=WORKLOADS)
    command.add_argument("--num-envs", type=int, default=64)
    command.set_defaults(run=_busy)

    command = commands.add_parser("goals", parents=[pace], help="measure rows of the table in bench/README.md")
    command.add_argument("parts", nargs="*", metavar="PART", help=f"of {', '.join(goals.PARTS)} (default: all)")
    command.add_argument("--quick", action="store_true", help="tiny settings, to see that it runs; never written down")
    command.set_defaults(run=_goals)

    command = commands.add_parser("programs", help="published programs: Gymnasium's engine and vecenv's")
    command.add_argument("names", nargs="*", metavar="PROGRAM", help=f"of {', '.join(PROGRAMS)} (default: all)")
    command.add_argument("--sources", type=Path, required=True, help="a folder with a checkout of each program's repository")
    command.add_argument("--python", default=sys.executable, help="with the programs' requirements (default: this one)")
    command.add_argument("--rounds", type=int, default=3, help="pairs of runs of each program (default: 3)")
    command.add_argument("--out", type=Path, default=Path("bench-results"), help="default: bench-results")
    command.set_defaults(run=_programs)

    command = commands.add_parser("size", help="how large the package is, and how much of it is in words of its own")
    command.add_argument("--json", action="store_true", help="print JSON instead of a table")
    command.set_defaults(run=_size)

    command = commands.add_parser("table", help="write what was measured into bench/README.md and docs/benchmarks.md")
    command.add_argument("--out", type=Path, default=Path("bench-results"))
    command.set_defaults(run=_table)
    return parser


def _show(arguments: argparse.Namespace, reports: list[Report], stem: str) -> None:
    arguments.out.mkdir(parents=True, exist_ok=True)
    everything = json.dumps([report.to_dict() for report in reports], indent=1)
    (arguments.out / f"{stem}.json").write_text(everything + "\n")
    if len(reports) == 1:
        draw_bars(reports[0], arguments.out / f"{stem}.png")
    elif reports:
        plots.draw_matrix(reports, arguments.out / f"{stem}.png")
    if arguments.json:
        print(everything)
    else:
        for report in reports:
            print_report(report)
        print(f"Written: {arguments.out / stem}.json and .png")


def _list(arguments: argparse.Namespace, pace: suites.Pace) -> None:
    for workload in WORKLOADS.values():
        print(f"workload {workload.name:12} {workload.text}")
    for workload in WAITS.values():
        print(f"waits    {workload.name:12} {workload.text}")
    for workload in TRAININGS.values():
        print(f"train    {workload.name:12} {workload.text}")
    print("micro   ", ", ".join(MICRO))
    print("goals   ", ", ".join(goals.PARTS))
    for name, program in PROGRAMS.items():
        print(f"program  {name:22} https://github.com/{program.repository}")


def _compare(arguments: argparse.Namespace, pace: suites.Pace) -> None:
    reports = [
        report
        for workload in arguments.workloads
        for num_envs in arguments.num_envs
        for report in suites.side_by_side(workload, num_envs, arguments.workers, pace, arguments.engines)
    ]
    _show(arguments, reports, "compare")


def _sweep(arguments: argparse.Namespace, pace: suites.Pace) -> None:
    suites.raise_descriptor_limit()
    memory: dict[int, dict[str, suites.Memory]] = {}
    reports, sizes = [], []
    for num_envs in arguments.num_envs:
        found = memory[num_envs] = {}
        parts = suites.side_by_side(arguments.workload, num_envs, arguments.workers, pace, arguments.engines, found)
        reports += parts
        sizes.append(suites.merged(parts))
    stem = f"sweep-{arguments.workload.replace('/', '_')}"
    _show(arguments, reports, stem)
    draw_scale(sizes, arguments.out / f"{stem}-scale.png")
    plots.draw_memory(memory, arguments.out / f"{stem}-memory.png")
    kept = {n: {name: asdict(used) for name, used in by_name.items()} for n, by_name in memory.items()}
    (arguments.out / f"{stem}-memory.json").write_text(json.dumps(kept, indent=1) + "\n")
    if arguments.json:
        return
    print_scale(sizes)
    for num_envs, by_name in memory.items():
        for name, used in by_name.items():
            each = (used.trainer + used.workers) / num_envs / 2**20
            print(f"memory, {num_envs:5} envs, {name:12} {each:8.2f} MiB an env, {used.processes} processes")


def _micro(arguments: argparse.Namespace, pace: suites.Pace) -> None:
    for part in arguments.parts or MICRO:
        report = MICRO[part](pace)
        _show(arguments, [report], f"micro-{part}")
        if part == "copies":
            for name, times in micro.copying_times(report).items():
                print(f"{name}: takes as long as {times.median:.2f} x memcpy" if times else f"{name}: not measured")
            for name, count in micro.counted_copies().items():
                print(f"{name}: every byte is copied {count:.2f} times")
        if part.startswith("batch-"):
            for name, spent in micro.outside_the_steps(report).items():
                text = f"{spent.median:.1f} us ({spent.lower:.1f} - {spent.upper:.1f})" if spent else "not measured"
                print(f"{report.num_envs} environments, {name}: {text} a batch beyond the bare loop in as many processes")


def _busy(arguments: argparse.Namespace, pace: suites.Pace) -> None:
    reports = list(suites.busy(arguments.workload, arguments.num_envs, arguments.workers, pace))
    _show(arguments, reports, "busy")
    for report in reports:
        for label, gain in suites.gain_of_spinning(report).items():
            text = f"{gain.median:.2f} ({gain.minimum:.2f} - {gain.maximum:.2f})" if gain else "not measured"
            print(f"{report.env}: {label}: {text} of its rate without spinning")


def _waits(arguments: argparse.Namespace, pace: suites.Pace) -> None:
    suites.raise_descriptor_limit()
    memory: dict[str, dict[str, suites.Memory]] = {workload: {} for workload in arguments.workloads}
    how = arguments.num_envs, arguments.workers, pace, arguments.engines
    reports = [waits.waits(workload, *how, memory[workload]) for workload in arguments.workloads]
    _show(arguments, reports, "waits")
    kept = {workload: {name: asdict(used) for name, used in by_name.items()} for workload, by_name in memory.items()}
    (arguments.out / "waits-memory.json").write_text(json.dumps(kept, indent=1) + "\n")
    if arguments.json:
        return
    for workload, by_name in memory.items():
        for name, used in by_name.items():
            whole = (used.trainer + used.workers) / 2**20
            print(f"memory, {workload:12} {name:20} {whole:8.1f} MiB in {1 + used.processes} processes")


def _episodes(arguments: argparse.Namespace, pace: suites.Pace) -> None:
    _show(arguments, [waits.episodes(arguments.num_envs, pace, arguments.engines)], "episodes")


def _train(arguments: argparse.Namespace, pace: suites.Pace) -> None:
    suites.raise_descriptor_limit()
    reports = []
    for name in arguments.workloads:
        report, shares = train.train(name, arguments.num_envs, arguments.workers, pace, arguments.engines)
        train.draw_shares(report, shares, arguments.out / f"train-{name}-shares.png")
        reports.append(report)
        for row, parts in {} if arguments.json else shares.items():
            print(f"{name}, {row}: " + ", ".join(f"{part} {share:.0%}" for part, share in parts.items()))
    _show(arguments, reports, "train")


def _goals(arguments: argparse.Namespace, pace: suites.Pace) -> None:
    settings = goals.Settings(arguments.workers, pace, arguments.quick)
    for part in arguments.parts or goals.PARTS:
        goals.run(part, settings, arguments.out)


def _programs(arguments: argparse.Namespace, pace: suites.Pace) -> None:
    programs.compare(arguments.names or list(PROGRAMS), arguments.sources, arguments.python, arguments.rounds, arguments.out)


def _size(arguments: argparse.Namespace, pace: suites.Pace) -> None:
    size.show(as_json=arguments.json)


def _table(arguments: argparse.Namespace, pace: suites.Pace) -> None:
    tables.write_tables(arguments.out)


def main() -> int:
    parser = _parser()
    arguments = parser.parse_args()
    lists = {
        "compare": list(WORKLOADS), "waits": list(WAITS), "train": list(TRAININGS), "micro": list(MICRO),
        "goals": list(goals.PARTS), "programs": list(PROGRAMS),
    }  # fmt: skip
    known = lists.get(arguments.command, [])
    chosen = [getattr(arguments, name, None) for name in ("parts", "workloads", "names")]
    for name in next(filter(None, chosen), ()):
        if name not in known:
            parser.error(f"no {name!r}; there are: {', '.join(known)}")
    with progress_bar() as progress:
        pace = {}
        if arguments.command not in ("list", "size", "table", "programs"):
            pace = {"seconds": arguments.seconds, "repeats": arguments.repeats, "progress": progress}
        arguments.run(arguments, pace)
    return 0


if __name__ == "__main__":
    sys.exit(main())
