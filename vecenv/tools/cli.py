"""The command line: ``vecenv run | bench | doctor | plan | conform | replay | watch | top``, and ``python -m vecenv``.

A command says what is wrong in one line instead of a traceback, and takes ``--json``. Exit codes: 0 all is well; 1 an
engine gave wrong answers, ``doctor`` found a problem, or ``top`` found no program; 2 the command was called wrongly, or
lacks something it needs; 3 something died while it was measured; 130 interrupted.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import re
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from vecenv._version import __version__
from vecenv.planning.plan import plan as make_plan
from vecenv.system.cores import usable_cores
from vecenv.system.spawning import why_no_processes
from vecenv.tools import doctor, run
from vecenv.tools.usage import (
    DIED,
    INTERRUPTED,
    USAGE,
    WRONG,
    CliError,
    did_you_mean,
    fitted,
    hint_of_arguments,
    one_line,
    require,
    resolve,
)

if TYPE_CHECKING:
    from vecenv.tools.benchmark import Candidate, Progress
    from vecenv.tools.runners import EnvFn

__all__ = ["INTERRUPTED", "USAGE", "WRONG", "main"]

Command = Callable[[argparse.Namespace], "int | Callable[[], None]"]


class _Parser(argparse.ArgumentParser):
    """Names close matches for a mistyped option or command; options are written out, since a shortened one may be a typo."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(allow_abbrev=False, **settings)

    def error(self, message: str) -> NoReturn:
        known = self._known()
        for word in re.findall(r"(?:arguments|choice):\s*'?([\w-]+)", message):
            message += did_you_mean(word, [name for name in known if name.startswith("-") == word.startswith("-")])
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


_count, _number = _positive(int), _positive(float)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns its exit code."""
    arguments = _build_parser().parse_args(argv)
    try:
        code: int | Callable[[], None] = arguments.run(arguments)
        sys.stdout.flush()
    except CliError as error:
        print(f"vecenv: {error}", file=sys.stderr)
        return error.code
    except KeyboardInterrupt:
        print("vecenv: interrupted", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:  # | head
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    if callable(code):
        code()  # the user's program: what it raises is its own
        return 0
    return code


def _build_parser() -> _Parser:
    parser = _Parser(
        prog="vecenv",
        description="A fast, fault-tolerant vector environment engine for Gymnasium.",
        epilog="Try: vecenv bench CartPole-v1 --num-envs 64",
    )
    parser.add_argument("--version", action="version", version=f"vecenv {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND", parser_class=_Parser)

    def add(name: str, command: Command, **texts: Any) -> Callable[..., Any]:
        its = commands.add_parser(name, **texts)
        its.set_defaults(run=command)
        return its.add_argument

    run.add_options(
        add(
            "run",
            run.prepare,
            help="run a program as it stands, with vecenv in the place of Gymnasium's AsyncVectorEnv",
            description="Runs a Python program in which gymnasium.vector.AsyncVectorEnv, and "
            'gymnasium.make_vec(..., vectorization_mode="async"), are vecenv\'s. Options are for arguments that the '
            "program does not give. Arguments, exit code and tracebacks are the program's own.",
            epilog="Try: vecenv run --on-failure restart train.py --seed 1",
        )
    )
    _add_bench(add)
    option = add(
        "doctor",
        _doctor,
        help="look at this machine: what works, what is missing, what to do about it",
        description="Checks Python, libraries, cores, memory and limits, and says what to do about what is not well.",
    )
    option("--json", action="store_true", help="print the findings as JSON")
    option = add(
        "plan",
        _plan,
        help="how many workers? steps one real environment for a moment and says why",
        description="Times one environment in a process of its own, and prints the steps per second expected of each way "
        "to step a vector of them, and which one num_workers='auto' takes.",
    )
    option("env_id", metavar="ENV_ID", help="as for bench")
    option("--num-envs", type=_count, default=64, metavar="N", help="environments (default: 64)")
    option("--json", action="store_true", help="print the plan as JSON")
    _add_conform(add)
    _add_replay(add)
    _add_watch(add)
    option = add(
        "top",
        _top,
        help="a live table of the workers of running programs",
        description="Shows the workers of every program of this user that publishes its figures: one that has called "
        "envs.publish_stats(), or was started with VECENV_TOP=1. Keys: s sorts by the next column, arrows and pages "
        "move, q or Ctrl-C ends.",
        epilog="Exit codes: 0 shown; 1 with --json or --once: no program publishes anything; 2 wrong usage.",
    )
    option("--pid", type=_count, metavar="PID", help="only this program")
    option("--interval", type=_number, default=1.0, metavar="S", help="seconds between two readings (default: 1)")
    option("--once", action="store_true", help="print one table and end")
    option("--json", action="store_true", help="print one snapshot as JSON and end")
    return parser


def _doctor(arguments: argparse.Namespace) -> int:
    return doctor.main(as_json=arguments.json)


def _plan(arguments: argparse.Namespace) -> int:
    env_fn = resolve(arguments.env_id)
    try:
        plan = make_plan(env_fn, arguments.num_envs)
    except Exception as error:
        text = one_line(error)
        raise CliError(f"{arguments.env_id} cannot be measured: {text}{hint_of_arguments(text)}") from None
    print(json.dumps(dataclasses.asdict(plan), indent=1, default=str) if arguments.json else fitted(str(plan)))
    return 0


def _add_conform(add: Callable[..., Callable[..., Any]]) -> None:
    option = add(
        "conform",
        _conform,
        help="which promises of Gymnasium's vector interface an engine keeps",
        description="Asks an engine about each promise of Gymnasium's documentation, and shows a short program for each "
        "that is broken. MODULE:ENGINE is called with functions that build environments, or, where it has an argument "
        "num_envs, with their number; and with autoreset_mode where it takes that.",
        epilog="Exit codes: 0 nothing is broken; 1 something is; 2 wrong usage. "
        "Try: vecenv conform gymnasium.vector:AsyncVectorEnv",
    )
    option("engine", metavar="MODULE:ENGINE", help="what builds the engine")
    option("--modes", default="all", metavar="MODES", help="autoreset modes with commas between (default: all)")
    option("--faults", action="store_true", help="also with exceptions, kills and timeouts")
    option("--json", action="store_true", help="print the rows as JSON")


def _conform(arguments: argparse.Namespace) -> int:
    from vecenv.tools import conform

    modes = conform.parse_modes(arguments.modes)
    rows = conform.conform(arguments.engine, modes, faults=arguments.faults)
    return conform.show(arguments.engine, rows, as_json=arguments.json)


def _add_replay(add: Callable[..., Callable[..., Any]]) -> None:
    option = add(
        "replay",
        _replay,
        help="let an environment fail again, by the file that record_failures= has left",
        description="Builds the environment, resets it by its seed and options, repeats its actions, and says whether it "
        "fails as it did. FILE holds a pickle, which can do anything: replay only files of your own.",
        epilog="Exit codes: 0 it happened again; 1 it did not; 2 it cannot be replayed, or wrong usage. "
        "Try: vecenv replay failures/CartPole-v1-env3-episode17-step412.vecenv",
    )
    option("file", type=Path, metavar="FILE", help="what was recorded")
    option("--from-snapshot", action="store_true", help="begin with the latest snapshot, and not with the reset")
    option("--until", type=_count, metavar="N", help="stop before step N of the episode")
    option("--pdb", action="store_true", help="open the debugger where the environment raises, or at --until")
    option("--frames", type=Path, metavar="OUT.gif", help="write what the environment shows")
    option("--yes", action="store_true", help="do not ask whether the file is your own")
    option("--json", action="store_true", help="print the result as JSON")


def _replay(arguments: argparse.Namespace) -> int:
    from vecenv.tools import replay

    return replay.main(arguments)


def _top(arguments: argparse.Namespace) -> int:
    from vecenv.tools import top

    return top.main(arguments)


# --- watch ------------------------------------------------------------------------------------------


def _add_watch(add: Callable[..., Callable[..., Any]]) -> None:
    option = add(
        "watch",
        _watch,
        help="write a short video of some environments side by side",
        description="Steps some environments, tiles their frames into one image, and writes a GIF or an MP4.",
        epilog="A policy is a function of yours: it gets a batch of observations and returns a batch of actions.",
    )
    option("env_id", metavar="ENV_ID", help="as for bench")
    option("--policy", metavar="MODULE:FUNCTION", help="what acts (default: at random)")
    option("--out", type=Path, metavar="FILE", help=".gif, or .mp4 by moviepy (default: ENV_ID.gif)")
    option("--num-envs", type=_count, default=4, metavar="N", help="environments (default: 4)")
    option("--steps", type=_count, default=200, metavar="N", help="of each environment (default: 200)")
    option("--backend", default="process", help="as for make_vec: process, envpool, ... (default: process)")
    option("--seed", type=int, metavar="S", help="of the environments and of the random policy")
    option("--json", action="store_true", help="print what was written as JSON")


def _watch(arguments: argparse.Namespace) -> int:
    require("watch", "rich", "PIL")
    if arguments.backend in ("process", "serial"):
        resolve(arguments.env_id)
    from vecenv.tools import watch
    from vecenv.tools.report import progress_bar

    path = arguments.out or Path(re.sub(r"[^\w.-]+", "_", arguments.env_id) + ".gif")
    names = ("policy", "backend", "num_envs", "steps", "seed")
    options = {name: getattr(arguments, name) for name in names}
    try:
        with progress_bar() as progress:
            written = watch.record(arguments.env_id, path, progress=progress, **options)
    except OSError as error:
        raise CliError(f"cannot write {path}: {error}") from None
    except (ValueError, TypeError, ImportError) as error:
        first = (str(error).strip().splitlines() or [repr(error)])[0]
        raise CliError(f"{first}{watch.hint_of_rendering(arguments.env_id, error)}") from None
    except Exception as error:
        raise CliError(f"{arguments.env_id} cannot be shown: {one_line(error)}") from None
    if arguments.json:
        print(json.dumps(dataclasses.asdict(written), indent=1))
    else:
        size = " x ".join(str(pixels) for pixels in written.size)
        print(f"Written: {written.file}, {written.frames} frames of {size}, {written.seconds:g} s")
    return 0


# --- bench ------------------------------------------------------------------------------------------


def _add_bench(add: Callable[..., Callable[..., Any]]) -> None:
    option = add(
        "bench",
        _bench,
        help="measure the engine on an environment, beside Gymnasium's engines and the bare loop (upper bound)",
        description="First checks that the engine's trajectories equal SyncVectorEnv's for the same seeds "
        "and actions, then measures all engines in interleaved rounds. Prints a table and writes JSON and "
        "a PNG. The defaults take about two minutes.",
        epilog="Exit codes: 0 measured; 1 an engine's trajectories differ from SyncVectorEnv's; "
        "2 wrong usage; 3 a row died while it was measured.",
    )
    option(
        "env_id",
        nargs="?",
        default="CartPole-v1",
        metavar="ENV_ID",
        help="a registered id, module:Env-v0 (the module registers it), or module:name, a class or function "
        "of yours that builds an environment without arguments; default: CartPole-v1",
    )
    option("--num-envs", type=_count, default=64, metavar="N", help="environments (default: 64)")
    option("--workers", type=_count, default=usable_cores(), metavar="W", help="processes (default: the usable cores)")
    option("--seconds", type=_number, metavar="S", help="length of one sample (default: 1; with --scale 0.4)")
    option("--repeats", type=_count, metavar="R", help="interleaved rounds (default: 7; with --scale 3)")
    option("--engines", metavar="NAMES", help="only these rows, separated by commas (default: all)")
    option("--scale", action="store_true", help="throughput over the number of environments and workers, drawn")
    option("--out", type=Path, default=Path("bench-results"), metavar="DIR", help="default: bench-results")
    option("--json", action="store_true", help="print the results as JSON instead of a table")


def _bench(arguments: argparse.Namespace) -> int:
    require("bench", "rich", "matplotlib")
    from vecenv.tools import benchmark, report

    if (why := why_no_processes()) is not None:
        raise CliError(f"vecenv bench compares engines in processes of their own: {why}")
    env_fn = resolve(arguments.env_id)
    measure = _measure_scale if arguments.scale else _measure_once
    try:
        reports = measure(arguments, env_fn)
    except benchmark.Interrupted as stop:
        if not arguments.json:
            report.print_report(stop.report)
        raise
    except benchmark.TrajectoryMismatch as error:
        raise CliError(f"WRONG RESULTS, nothing was timed: {error}", WRONG) from None
    except benchmark.HostFailed as error:
        raise CliError(f"{arguments.env_id}: {error}{hint_of_arguments(str(error))}") from None
    except OSError as error:
        raise CliError(f"cannot write the results to {arguments.out}: {error}") from None
    return DIED if any(row.failed for each in reports for row in each.rows) else 0


def _measure_once(arguments: argparse.Namespace, env_fn: EnvFn) -> list[Any]:
    from vecenv.tools import benchmark, report

    rows = _choose(benchmark.default_candidates(env_fn, arguments.num_envs, arguments.workers), arguments)
    settings: dict[str, Any] = {"seconds": arguments.seconds or 1.0, "repeats": arguments.repeats or 7}
    with report.progress_bar() as progress:
        found = benchmark.compare(arguments.env_id, env_fn, arguments.num_envs, rows, progress=progress, **settings)
    _show(arguments, "", found.to_dict(), partial(report.draw_bars, found), partial(report.print_report, found))
    return [found]


def _measure_scale(arguments: argparse.Namespace, env_fn: EnvFn) -> list[Any]:
    from vecenv.tools import benchmark, report

    sizes, workers = _doubling(arguments.num_envs), _doubling(arguments.workers)
    largest = _choose(benchmark.scale_candidates(env_fn, arguments.num_envs, workers), arguments)
    names = {candidate.name for candidate in largest}  # some need more than one environment
    settings: dict[str, Any] = {"seconds": arguments.seconds or 0.4, "repeats": arguments.repeats or 3}
    found = []
    with report.progress_bar() as bar:
        for turn, size in enumerate(sizes):
            rows = [row for row in benchmark.scale_candidates(env_fn, size, workers) if row.name in names]
            progress = partial(_with_size, bar, size, turn, len(sizes))
            found.append(benchmark.compare(arguments.env_id, env_fn, size, rows, progress=progress, **settings))
    everything = [each.to_dict() for each in found]
    _show(arguments, "-scale", everything, partial(report.draw_scale, found), partial(report.print_scale, found))
    return found


def _doubling(top: int) -> list[int]:
    """1, 2, 4 and so on, up to and with ``top``."""
    return [1 << k for k in range(top.bit_length()) if 1 << k < top] + [top]


def _with_size(progress: Progress, size: int, turn: int, turns: int, stage: str, done: int, total: int) -> None:
    """One bar for all sizes: it fills once."""
    progress(f"{size} environments ({turn + 1} of {turns}): {stage}", turn * total + done, turns * total)


def _show(
    arguments: argparse.Namespace, suffix: str, values: Any, draw: Callable[[Path], bool], show: Callable[[], None]
) -> None:
    """Write what was measured as JSON and as a picture, and print it."""
    name = re.sub(r"[^\w.-]+", "_", arguments.env_id)
    table, picture = (arguments.out / f"{name}-{arguments.num_envs}{suffix}.{kind}" for kind in ("json", "png"))
    text = json.dumps(values, indent=1)
    table.write_text(text + "\n")
    drawn = draw(picture)
    if arguments.json:
        print(text)
    else:
        show()
        print(f"Written: {table}{f', {picture}' if drawn else ''}")


def _choose(candidates: list[Candidate], arguments: argparse.Namespace) -> list[Candidate]:
    """The rows of ``--engines``. Those that this machine cannot hold are refused before anything is started."""
    if arguments.engines is not None:
        known = {candidate.name: candidate for candidate in candidates}
        wanted = [name.strip() for name in arguments.engines.split(",") if name.strip()]
        for name in wanted:
            if name not in known:
                close = did_you_mean(name, list(known)) or "."
                raise CliError(f"no engine {name!r}{close} There are: {', '.join(known)}")
        if not wanted:
            raise CliError(f"--engines names no engine. There are: {', '.join(known)}")
        candidates = [candidate for candidate in candidates if candidate.name in wanted]
    crowds = [candidate.processes + 1 for candidate in candidates if candidate.crowd]
    others = sum(candidate.processes + 1 for candidate in candidates if not candidate.crowd)
    most = max((candidate.processes for candidate in candidates), default=0)
    reason = doctor.shortage(others + max(crowds, default=0), most)
    if reason is not None:
        greedy = [candidate.name for candidate in candidates if candidate.crowd]
        rest = [candidate.name for candidate in candidates if not candidate.crowd]
        advice = f", or leave out {', '.join(greedy)} (--engines {','.join(rest)})" if greedy and rest else ""
        raise CliError(f"{reason}; take fewer environments or workers{advice}")
    arguments.out.mkdir(parents=True, exist_ok=True)
    return candidates
