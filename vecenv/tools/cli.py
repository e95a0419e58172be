"""The command line: ``vecenv run | bench | plan | conform | replay | top``, and ``python -m vecenv``.

A command is a function of the parsed arguments. Its docstring is its help: a line for the list of commands, a description,
and an epilog. Errors print a short message instead of a traceback, and every command except ``run`` takes ``--json``. Exit
codes, except those of a program under ``run``: 0 success; 1 a negative result, such as wrong results of an engine, a failure
that did not happen again, or no program for ``top``; 2 the command could not run: wrong usage, a missing library, or an
environment or file that cannot be used; 3 an engine failed while it was measured; 130 interrupted.
"""

from __future__ import annotations

import argparse
import dataclasses
import inspect
import json
import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from vecenv import tools
from vecenv._version import __version__
from vecenv.front.arguments import MAX_TIMEOUT_SECONDS
from vecenv.planning.plan import plan as make_plan
from vecenv.system.cores import usable_cores
from vecenv.system.spawning import explain_unsupported_processes
from vecenv.tools import benchmark, conform, replay, run, runners, top

_ENV_ID = (
    "a registered id; module:Env-v0, if importing the module registers it; or module:name, a class or function that builds "
    "an environment without arguments"
)


class _Parser(argparse.ArgumentParser):
    """A parser that reports unrecognized arguments of a command with that command's usage."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        parsed, unknown = super().parse_known_args(args, namespace)
        if unknown:
            if self.prog.endswith(" replay") and not any(text.startswith("-") for text in unknown):
                self.error(f"replay takes one FILE, got {len(unknown) + 1}")
            in_run = self.prog.endswith(" run")
            hint = "; the program's own options follow its name: vecenv run train.py --seed 1" if in_run else ""
            self.error(f"unrecognized arguments: {' '.join(unknown)}{hint}")
        return parsed, unknown


def _make_positive_parser(kind: type[Any]) -> Callable[[str], Any]:
    limit, accepted = (MAX_TIMEOUT_SECONDS, "number up to 1,000,000") if kind is float else (float("inf"), "integer")

    def parse(text: str) -> Any:
        try:
            value = kind(text)
        except ValueError:
            value = 0
        if not 0 < value <= limit:
            raise argparse.ArgumentTypeError(f"must be a positive {accepted}, got {text!r}")
        return value

    return parse


_positive_int, _positive_float = _make_positive_parser(int), _make_positive_parser(float)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    arguments = _build_parser().parse_args(argv)
    try:
        result: int | Callable[[], None] = arguments.run(arguments)
        sys.stdout.flush()
    except tools.CliError as error:
        print(f"vecenv: {error}", file=sys.stderr)
        return error.code
    except KeyboardInterrupt:
        print("vecenv: interrupted", file=sys.stderr)
        return tools.INTERRUPTED
    except BrokenPipeError:  # such as `vecenv bench | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    if callable(result):
        result()  # the user's program, outside `try`: its exceptions pass through unchanged
        return 0
    return result


def _build_parser() -> _Parser:
    parser = _Parser(
        prog="vecenv",
        allow_abbrev=False,
        description="A fast, fault-tolerant vector environment engine for Gymnasium.",
        epilog="Try: vecenv bench CartPole-v1 --num-envs 64",
    )
    parser.add_argument("--version", action="version", version=f"vecenv {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def add(name: str, command: Callable[[argparse.Namespace], Any], usage: str | None = None) -> Callable[..., Any]:
        documented = inspect.getdoc(command) or "\n\n\n\n"  # there are no docstrings under `python -OO`
        text, description, epilog = documented.split("\n\n")
        subparser = commands.add_parser(
            name, help=text, description=description, epilog=epilog, usage=usage, allow_abbrev=False
        )
        subparser.set_defaults(run=command)
        return subparser.add_argument

    run.add_options(add("run", run.main, "%(prog)s [options] PROGRAM ...\n       %(prog)s [options] -m MODULE ..."))
    _add_bench_options(add("bench", _bench))
    option = add("plan", _plan)
    option("env_id", metavar="ENV_ID", help=_ENV_ID)
    option("--num-envs", type=_positive_int, default=64, metavar="N", help="number of environments (default: 64)")
    option("--json", action="store_true", help="print the plan as JSON instead of text")
    option = add("conform", conform.main)
    option("engine", metavar="MODULE:ENGINE", help="the class or function that builds the engine")
    text = "autoreset modes to check, separated by commas, such as NextStep,SameStep (default: all)"
    option("--modes", default="all", help=text)
    option("--faults", action="store_true", help="also check exceptions, a killed worker and a timeout")
    option("--json", action="store_true", help="print the results as JSON instead of a table")
    option = add("replay", replay.main)
    option("file", type=Path, metavar="FILE", help="a file that record_failures= wrote")
    option("--from-snapshot", action="store_true", help="begin with the latest snapshot instead of a reset")
    option("--until", type=_positive_int, metavar="N", help="stop before step N of the episode")
    text = (
        "open the debugger where the environment raises, before step N, or before the step or reset in which it kills its "
        "process or hangs"
    )
    option("--pdb", action="store_true", help=text)
    text = "write the frames that the environment renders (GIF needs Pillow, MP4 needs moviepy)"
    option("--frames", type=Path, metavar="OUT.gif", help=text)
    option("--yes", action="store_true", help="do not ask whether the file is your own")
    option("--json", action="store_true", help="print the result as JSON instead of text")
    option = add("top", top.main)
    option("--pid", type=_positive_int, metavar="PID", help="show only the program with this process id")
    option("--interval", type=_positive_float, default=1.0, metavar="S", help="seconds between readings (default: 1)")
    option("--once", action="store_true", help="print one table and exit")
    option("--json", action="store_true", help="print one table as JSON and exit")
    return parser


def _plan(arguments: argparse.Namespace) -> int:
    """recommend a number of workers, based on a few steps of an environment

    Times a few steps of an environment in temporary processes. Prints the expected steps per second of several ways to run
    many such environments, and the way that num_workers="auto" chooses.

    Exit codes: 0 success; 2 the environment cannot be measured, or wrong usage. Try: vecenv plan CartPole-v1 --num-envs 8
    """
    env_fn = runners.resolve(arguments.env_id)
    try:
        plan = make_plan(env_fn, arguments.num_envs)
    except Exception as error:
        raise tools.CliError(f"{arguments.env_id} cannot be measured: {tools.one_line(error)}") from None
    print(json.dumps(dataclasses.asdict(plan), indent=1, default=str) if arguments.json else plan)
    return 0


# --- bench ------------------------------------------------------------------------------------------


def _add_bench_options(option: Callable[..., Any]) -> None:
    option("env_id", nargs="?", default="CartPole-v1", metavar="ENV_ID", help=f"{_ENV_ID} (default: CartPole-v1)")
    option("--num-envs", type=_positive_int, default=64, metavar="N", help="number of environments (default: 64)")
    text = "number of worker processes (default: the number of usable cores)"
    option("--num-workers", "--workers", dest="workers", type=_positive_int, default=usable_cores(), metavar="N", help=text)
    option("--seconds", type=_positive_float, metavar="S", help="seconds per sample (default: 1, or 0.4 with --scale)")
    option("--repeats", type=_positive_int, metavar="N", help="number of interleaved rounds (default: 7, or 3 with --scale)")
    text = "only these engines, separated by commas, such as auto,gym-sync (default: all; an unknown name lists them)"
    option("--engines", metavar="NAMES", help=text)
    option("--scale", action="store_true", help="measure 1, 2, 4, ... environments and workers, and plot the throughput")
    text = "folder for the results (default: bench-results)"
    option("--out", type=Path, default=Path("bench-results"), metavar="DIR", help=text)
    option("--json", action="store_true", help="print the results as JSON instead of a table")


def _bench(arguments: argparse.Namespace) -> int:
    """measure vecenv, Gymnasium's engines and a bare loop on an environment

    First checks that vecenv's trajectories equal SyncVectorEnv's for the same seeds and actions, then measures all
    engines in interleaved rounds. The bare loop, independent processes that only step environments, is the upper
    bound. Prints a table, or JSON with --json, and writes JSON and a PNG. The defaults take about two minutes.

    Exit codes: 0 success; 1 an engine's trajectories differ from SyncVectorEnv's; 2 wrong usage, a library is missing, or
    the environment fails; 3 an engine died, raised or hung. Try: vecenv bench CartPole-v1 --num-envs 64
    """
    tools.require("vecenv bench", "rich", "matplotlib")
    if (reason := explain_unsupported_processes()) is not None:
        raise tools.CliError(f"vecenv bench runs each engine in a separate process: {reason}")
    env_fn = runners.resolve(arguments.env_id)
    reports = _measure(arguments, env_fn)
    _write_and_print(arguments, reports)
    return tools.DIED if any(row.failed for report in reports for row in report.rows) else 0


def _measure(arguments: argparse.Namespace, env_fn: runners.EnvFn) -> list[benchmark.Report]:
    """Run one comparison, or with ``--scale`` one for each number of environments."""
    if arguments.scale:
        make_candidates = partial(runners.scale_candidates, env_fn, worker_counts=_powers_of_two(arguments.workers))
        sizes, seconds, repeats = _powers_of_two(arguments.num_envs), 0.4, 3
    else:
        make_candidates = partial(runners.default_candidates, env_fn, workers=arguments.workers)
        sizes, seconds, repeats = [arguments.num_envs], 1.0, 7
    names = _select_engines(make_candidates(num_envs=arguments.num_envs), arguments)  # small sizes lack some engines
    timing: dict[str, Any] = {"seconds": arguments.seconds or seconds, "repeats": arguments.repeats or repeats}
    reports = []
    with tools.progress_bar() as bar:
        for size in sizes:
            rows = [row for row in make_candidates(num_envs=size) if row.name in names]
            reports.append(benchmark.compare(arguments.env_id, env_fn, size, rows, progress=bar, **timing))
    return reports


def _powers_of_two(top: int) -> list[int]:
    """Return the powers of two below ``top``, and ``top``."""
    return [1 << k for k in range(top.bit_length()) if 1 << k < top] + [top]


def _write_and_print(arguments: argparse.Namespace, reports: list[benchmark.Report]) -> None:
    """Write the results as JSON and as a plot, and print them."""
    name = re.sub(r"[^\w.-]+", "_", arguments.env_id) + f"-{arguments.num_envs}" + ("-scale" if arguments.scale else "")
    json_path, plot_path = (arguments.out / f"{name}.{suffix}" for suffix in ("json", "png"))
    values = [report.to_dict() for report in reports]
    text = json.dumps(values if arguments.scale else values[0], indent=1)
    with _writing_to(arguments.out):
        json_path.write_text(text + "\n")
        benchmark.draw_scale(reports, plot_path) if arguments.scale else benchmark.draw_bars(reports[0], plot_path)
    if arguments.json:
        print(text)
        return
    benchmark.print_scale(reports) if arguments.scale else benchmark.print_report(reports[0])
    print(f"Written: {json_path}, {plot_path}")


@contextmanager
def _writing_to(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise tools.CliError(f"cannot write the results to {folder}: {error}") from None


def _select_engines(candidates: list[runners.Candidate], arguments: argparse.Namespace) -> set[str]:
    """Return the names of the engines to measure. Raise if one is unknown, or if this machine cannot run them.

    Create the output folder too, so that an unusable one is reported before the measurement.
    """
    from vecenv.tools.limits import shortage  # imported here, because it cannot be imported on Windows

    if arguments.engines is not None:
        known = [candidate.name for candidate in candidates]
        selected = {name.strip() for name in arguments.engines.split(",")}
        if unknown := selected - set(known):
            raise tools.CliError(f"no engine {min(unknown)!r}. The engines are: {', '.join(known)}")
        candidates = [candidate for candidate in candidates if candidate.name in selected]
    # + 1 for the host of each candidate; of those with many processes, only one runs at a time
    largest = max((candidate.processes + 1 for candidate in candidates if candidate.has_many_processes), default=0)
    others = sum(candidate.processes + 1 for candidate in candidates if not candidate.has_many_processes)
    if (reason := shortage(others + largest)) is not None:
        raise tools.CliError(f"{reason}; use fewer environments or workers, or only some --engines")
    with _writing_to(arguments.out):
        arguments.out.mkdir(parents=True, exist_ok=True)
    return {candidate.name for candidate in candidates}
