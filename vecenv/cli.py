"""The command line: ``vecenv bench | doctor | plan``, and ``python -m vecenv`` the same.

Every command says what is wrong in one line instead of a traceback, and takes ``--json``. Exit codes: 0 all
is well; 1 an engine gave wrong answers, or ``doctor`` found a problem; 2 the command was called wrongly, or
lacks something it needs; 3 something died while it was measured; 130 interrupted.
"""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import importlib
import importlib.util
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from vecenv import __version__

if TYPE_CHECKING:
    from vecenv.benchmark import Candidate, EnvFn, Progress, Report

__all__ = ["main"]

WRONG, USAGE, DIED, INTERRUPTED = 1, 2, 3, 130


class CliError(Exception):
    """Ends the command with one line on stderr and this exit code."""

    def __init__(self, message: str, code: int = USAGE) -> None:
        super().__init__(message)
        self.code = code


class _Parser(argparse.ArgumentParser):
    """Names close matches for a mistyped option or command."""

    def error(self, message: str) -> NoReturn:
        known = self._known()
        for word in re.findall(r"(?:arguments|choice):\s*'?([\w-]+)", message):
            message += _did_you_mean(word, known)
        super().error(message)

    def _known(self) -> list[str]:
        """Options and commands, those of the commands included: a stray option is reported by the outer parser."""
        known: list[str] = []
        for action in self._actions:
            known += action.option_strings
            if isinstance(action, argparse._SubParsersAction):
                for name, parser in action.choices.items():
                    known += [name, *parser._known()]
        return list(dict.fromkeys(known))


def _did_you_mean(word: str, known: Sequence[str]) -> str:
    close = difflib.get_close_matches(word, known, n=3, cutoff=0.5)
    return f"; did you mean {' or '.join(close)}?" if close else ""


def _positive(kind: type[Any]) -> Callable[[str], Any]:
    def parse(text: str) -> Any:
        try:
            value = kind(text)
        except ValueError:
            value = 0
        if not 0 < value < float("inf"):
            raise argparse.ArgumentTypeError(f"wants a positive {'number' if kind is float else 'integer'}, got {text!r}")
        return value

    return parse


def _build_parser() -> _Parser:
    parser = _Parser(
        prog="vecenv",
        description="A fast, fault-tolerant vector environment engine for Gymnasium.",
        epilog="Try: vecenv bench CartPole-v1 --num-envs 64",
    )
    parser.add_argument("--version", action="version", version=f"vecenv {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND", parser_class=_Parser)
    count, number = _positive(int), _positive(float)

    bench = commands.add_parser(
        "bench",
        help="measure the engine on an environment, beside Gymnasium's engines and the bare-loop limit",
        description="First checks that the engine's trajectories equal SyncVectorEnv's for the same seeds "
        "and actions, then measures all engines in interleaved rounds. Prints a table and writes JSON and "
        "a PNG. The defaults take about a minute and a half.",
        epilog="Exit codes: 0 measured; 1 an engine's trajectories differ from SyncVectorEnv's; "
        "2 wrong usage; 3 a row died while it was measured.",
    )
    bench.add_argument(
        "env_id",
        nargs="?",
        default="CartPole-v1",
        metavar="ENV_ID",
        help="a registered id, module:Env-v0 (the module registers it), module:Class; default: CartPole-v1",
    )
    bench.add_argument("--num-envs", type=count, default=64, metavar="N", help="environments (default: 64)")
    bench.add_argument("--workers", type=count, metavar="W", help="worker processes (default: the usable cores)")
    bench.add_argument("--seconds", type=number, metavar="S", help="length of one sample (default: 1; with --scale 0.4)")
    bench.add_argument("--repeats", type=count, metavar="R", help="interleaved rounds (default: 7; with --scale 3)")
    bench.add_argument("--engines", metavar="NAMES", help="only these rows, separated by commas (default: all)")
    bench.add_argument("--scale", action="store_true", help="throughput over the number of environments and workers, drawn")
    bench.add_argument("--out", type=Path, default=Path("bench-results"), metavar="DIR", help="default: bench-results")
    bench.add_argument("--json", action="store_true", help="print the results as JSON instead of a table")
    bench.add_argument(
        "--suite",
        nargs=argparse.REMAINDER,
        metavar="...",
        help="run the whole suite of a source checkout (python -m bench) with everything that follows",
    )
    bench.set_defaults(run=_bench)

    doctor = commands.add_parser("doctor", help="look at this machine: what works, what is missing, what to do about it")
    doctor.add_argument("--json", action="store_true", help="print the findings as JSON")
    doctor.set_defaults(run=_doctor)

    plan = commands.add_parser("plan", help="how many workers? steps one real environment for a moment and says why")
    plan.add_argument("env_id", metavar="ENV_ID", help="as for bench")
    plan.add_argument("--num-envs", type=count, default=64, metavar="N", help="environments (default: 64)")
    plan.add_argument("--json", action="store_true", help="print the plan as JSON")
    plan.set_defaults(run=_plan)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns its exit code."""
    arguments = _build_parser().parse_args(argv)
    try:
        code: int = arguments.run(arguments)
        sys.stdout.flush()
        return code
    except CliError as error:
        print(f"vecenv: {error}", file=sys.stderr)
        return error.code
    except KeyboardInterrupt:
        print("vecenv: interrupted", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:  # | head
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


# --- environments by name -------------------------------------------------------------------------


def _resolve(env_id: str) -> EnvFn:
    """The function that makes this environment; unknown ids name close matches."""
    import gymnasium

    from vecenv.benchmark import make_env

    module, _, name = env_id.rpartition(":")
    if module:
        if "" not in sys.path:
            sys.path.insert(0, "")  # a console script does not look into the current folder
        try:
            found = importlib.import_module(module)
        except ImportError as error:
            raise CliError(f"cannot import {module!r}, the module of {env_id!r}: {error}") from None
        if name in gymnasium.registry or callable(getattr(found, name, None)):
            return partial(make_env, env_id)
    elif name.startswith("ALE/"):
        if importlib.util.find_spec("ale_py") is None:
            raise CliError(f"{env_id} needs ale-py: pip install 'vecenv[bench]'")
        importlib.import_module("ale_py")
    if name not in gymnasium.registry:
        hint = _did_you_mean(name, list(gymnasium.registry))
        raise CliError(f"no environment {env_id!r} is registered{hint or '; other packages: module:Env-v0'}")
    return partial(make_env, env_id)


# --- bench ----------------------------------------------------------------------------------------


def _bench(arguments: argparse.Namespace) -> int:
    if arguments.suite is not None:
        return _suite(arguments.suite)
    for library in ("rich", "matplotlib"):
        if importlib.util.find_spec(library) is None:
            raise CliError(f"vecenv bench needs {library}: pip install 'vecenv[bench]'")
    from vecenv import benchmark
    from vecenv.cores import usable_cores

    env_fn = _resolve(arguments.env_id)
    measure = partial(_scale if arguments.scale else _main_job, arguments, env_fn)
    try:
        return measure(arguments.workers or usable_cores())
    except benchmark.TrajectoryMismatch as error:
        raise CliError(f"WRONG RESULTS, nothing was timed: {error}", WRONG) from None
    except benchmark.HostFailed as error:
        raise CliError(f"{arguments.env_id}: {error}") from None
    except OSError as error:
        raise CliError(f"cannot write the results to {arguments.out}: {error}") from None


def _suite(rest: list[str]) -> int:
    root = Path(__file__).resolve().parent.parent
    if not (root / "bench" / "__main__.py").exists():
        raise CliError("the suite is part of a source checkout, and this is an installed package")
    return subprocess.run([sys.executable, "-m", "bench", *rest], cwd=root, check=False).returncode


def _choose(candidates: list[Candidate], names: str | None) -> list[Candidate]:
    if names is None:
        return candidates
    known = {candidate.name: candidate for candidate in candidates}
    wanted = [name.strip() for name in names.split(",") if name.strip()]
    for name in wanted:
        if name not in known:
            raise CliError(f"no engine {name!r}{_did_you_mean(name, list(known)) or '.'} There are: {', '.join(known)}")
    if not wanted:
        raise CliError(f"--engines names no engine. There are: {', '.join(known)}")
    return [candidate for candidate in candidates if candidate.name in wanted]


def _file_stem(arguments: argparse.Namespace) -> Path:
    name = re.sub(r"[^\w.-]+", "_", arguments.env_id)
    stem: Path = arguments.out / f"{name}-{arguments.num_envs}"
    return stem


def _main_job(arguments: argparse.Namespace, env_fn: EnvFn, workers: int) -> int:
    from vecenv import benchmark
    from vecenv.benchmark import tables

    candidates = _choose(benchmark.default_candidates(env_fn, arguments.num_envs, workers), arguments.engines)
    arguments.out.mkdir(parents=True, exist_ok=True)
    with tables.progress_bar() as progress:
        report = benchmark.compare(
            arguments.env_id,
            env_fn,
            arguments.num_envs,
            candidates,
            seconds=arguments.seconds or 1.0,
            repeats=arguments.repeats or 7,
            progress=progress,
        )
    stem = _file_stem(arguments)
    files = [stem.with_name(f"{stem.name}.json"), stem.with_name(f"{stem.name}.png")]
    report.write(files[0])
    benchmark.draw_bars(report, files[1])
    if arguments.json:
        print(json.dumps(report.to_dict(), indent=1))
    else:
        tables.print_report(report)
        print(f"Written: {files[0]}, {files[1]}")
    return DIED if any(row.failed for row in report.rows) else 0


def _scale(arguments: argparse.Namespace, env_fn: EnvFn, workers: int) -> int:
    from vecenv import benchmark
    from vecenv.benchmark import tables

    reports: list[Report] = []
    arguments.out.mkdir(parents=True, exist_ok=True)
    with tables.progress_bar() as progress:
        for size in _doubling(arguments.num_envs):
            reports.append(  # noqa: PERF401
                benchmark.compare(
                    arguments.env_id,
                    env_fn,
                    size,
                    _choose(benchmark.scale_candidates(env_fn, size, _doubling(workers)), arguments.engines),
                    seconds=arguments.seconds or 0.4,
                    repeats=arguments.repeats or 3,
                    progress=partial(_with_size, progress, size),
                )
            )
    stem = _file_stem(arguments)
    files = [stem.with_name(f"{stem.name}-scale.json"), stem.with_name(f"{stem.name}-scale.png")]
    everything = json.dumps([report.to_dict() for report in reports], indent=1)
    files[0].write_text(everything + "\n")
    benchmark.draw_scale(reports, files[1])
    if arguments.json:
        print(everything)
    else:
        tables.print_scale(reports)
        print(f"Written: {files[0]}, {files[1]}")
    return DIED if any(row.failed for report in reports for row in report.rows) else 0


def _doubling(top: int) -> list[int]:
    """1, 2, 4 and so on, up to and with ``top``."""
    return [1 << k for k in range(top.bit_length()) if 1 << k < top] + [top]


def _with_size(progress: Progress, size: int, stage: str, done: int, total: int) -> None:
    progress(f"{size} environments: {stage}", done, total)


# --- doctor and plan ------------------------------------------------------------------------------


def _optional_module(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name != name:
            raise CliError(f"{name} needs {error.name}, which is not installed") from None
        raise CliError(f"this version of vecenv has no {name.rpartition('.')[2]}") from None


def _doctor(arguments: argparse.Namespace) -> int:
    return int(_optional_module("vecenv.doctor").main(as_json=arguments.json) or 0)


def _plan(arguments: argparse.Namespace) -> int:
    make_plan = _optional_module("vecenv.plan").plan
    env_fn = _resolve(arguments.env_id)
    try:
        plan = make_plan(env_fn, arguments.num_envs)
    except Exception as error:
        first = (str(error).strip().splitlines() or [""])[0]
        raise CliError(f"{arguments.env_id} cannot be measured: {type(error).__name__}: {first}") from None
    if arguments.json:
        print(json.dumps(dataclasses.asdict(plan), indent=1, default=str))
    else:
        print(plan)
    return 0
