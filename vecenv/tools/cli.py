"""The command line: ``vecenv run | bench | doctor | plan | watch | top``, and ``python -m vecenv`` the same.

Every command says what is wrong in one line instead of a traceback, and takes ``--json``. Exit codes: 0 all
is well; 1 an engine gave wrong answers, ``doctor`` found a problem, or ``top`` found no program; 2 the command
was called wrongly, or lacks something it needs; 3 something died while it was measured; 130 interrupted.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import re
import shutil
import signal
import sys
import textwrap
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NoReturn

from vecenv._version import __version__
from vecenv.planning.plan import plan as make_plan
from vecenv.tools.run import OPTIONS, Option
from vecenv.tools.usage import (
    INTERRUPTED,
    USAGE,
    WRONG,
    CliError,
    did_you_mean,
    hint_of_arguments,
    one_line,
    require,
    resolve,
)

__all__ = ["INTERRUPTED", "USAGE", "WRONG", "main"]


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


def _build_parser() -> _Parser:
    parser = _Parser(
        prog="vecenv",
        description="A fast, fault-tolerant vector environment engine for Gymnasium.",
        epilog="Try: vecenv bench CartPole-v1 --num-envs 64",
    )
    parser.add_argument("--version", action="version", version=f"vecenv {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND", parser_class=_Parser)
    for command in _COMMANDS:
        its = commands.add_parser(command.name, help=command.help, description=command.description, epilog=command.epilog)
        for names, settings in command.options:
            its.add_argument(*names, **settings)
        its.set_defaults(run=command.run)
    return parser


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


# --- the commands ---------------------------------------------------------------------------------


def _bench(arguments: argparse.Namespace) -> int:
    require("bench", "rich", "matplotlib")
    from vecenv.tools.benchmark import command

    return command.main(arguments)


def _doctor(arguments: argparse.Namespace) -> int:
    from vecenv.tools import doctor

    return doctor.main(as_json=arguments.json)


def _plan(arguments: argparse.Namespace) -> int:
    env_fn = resolve(arguments.env_id)
    try:
        plan = make_plan(env_fn, arguments.num_envs)
    except Exception as error:
        text = one_line(error)
        raise CliError(f"{arguments.env_id} cannot be measured: {text}{hint_of_arguments(text)}") from None
    if arguments.json:
        print(json.dumps(dataclasses.asdict(plan), indent=1, default=str))
    else:
        print(_fitted(str(plan)))
    return 0


def _fitted(text: str) -> str:
    """The lines of a text, wrapped between words at the width of the terminal; as they are where there is none."""
    width = shutil.get_terminal_size(fallback=(sys.maxsize, 0)).columns

    def fit(line: str) -> str:
        if len(line) <= width:
            return line
        margin = " " * (len(line) - len(line.lstrip()))
        wrapped = textwrap.wrap(
            line, max(width, 40), subsequent_indent=margin + "  ", break_long_words=False, break_on_hyphens=False
        )
        return "\n".join(wrapped)

    return "\n".join(map(fit, text.splitlines()))


def _watch(arguments: argparse.Namespace) -> int:
    require("watch", "rich", "PIL")
    if arguments.backend in ("process", "serial"):
        resolve(arguments.env_id)
    from vecenv.tools import watch
    from vecenv.tools.benchmark.tables import progress_bar

    path = arguments.out or Path(re.sub(r"[^\w.-]+", "_", arguments.env_id) + ".gif")
    names = ("policy", "backend", "num_envs", "steps", "seed", "fps", "width")
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


def _run(arguments: argparse.Namespace) -> Callable[[], None]:
    from vecenv.tools import run

    return run.prepare(arguments)


def _top(arguments: argparse.Namespace) -> int:
    from vecenv.engine import published
    from vecenv.tools import top

    if not published.available():
        raise CliError("vecenv top needs Linux; envs.stats() gives the figures in the program itself")
    watcher = top.Watcher(arguments.pid)
    if not arguments.json:
        require("top", "rich")
    if not arguments.json and not arguments.once:
        from rich.console import Console

        from vecenv.tools import top_screen

        if not Console().is_terminal:
            raise CliError("top shows a live table in a terminal; elsewhere: --once or --json")
        signal.signal(signal.SIGTERM, signal.default_int_handler)  # `timeout 9 vecenv top` gives the terminal back, too
        with contextlib.suppress(KeyboardInterrupt):  # the way to end it
            top_screen.show(watcher, Console(), arguments.interval)
        return 0
    watcher.read()
    time.sleep(arguments.interval)
    programs = watcher.read()
    for word in watcher.left_out:
        print(f"vecenv: left out: {word}", file=sys.stderr)
    if arguments.json:
        print(json.dumps(top.to_dict(programs), indent=1))
    elif programs:
        top.print_table(programs)
    else:
        who = "" if arguments.pid is None else f" of process {arguments.pid}"
        others = sorted({row.pid for row in top.Watcher().read()}) if who else []
        seen = f"; those that publish: {', '.join(map(str, others))}" if others else ""
        print(f"vecenv: nothing to show{who}: {top.HOW_TO_PUBLISH}{seen}", file=sys.stderr)
    return 0 if programs else WRONG


# --- what they take -------------------------------------------------------------------------------

@dataclass(frozen=True, slots=True)
class _Command:
    name: str
    run: Callable[[argparse.Namespace], int | Callable[[], None]]
    options: tuple[Option, ...]
    help: str
    description: str | None = None
    epilog: str | None = None


def _option(*names: str, **settings: Any) -> Option:
    """Arguments of ``ArgumentParser.add_argument``."""
    return names, settings


def _number_of_envs(default: int) -> Option:
    return _option("--num-envs", type=_count, default=default, metavar="N", help=f"environments (default: {default})")


def _json(what: str, more: str = "") -> Option:
    return _option("--json", action="store_true", help=f"print {what} as JSON{more}")


_count, _number = _positive(int), _positive(float)
_ENV_ID: Final = _option("env_id", metavar="ENV_ID", help="as for bench")

_COMMANDS: Final = (
    _Command(
        "run",
        _run,
        OPTIONS,
        help="run a program as it stands, with vecenv in the place of Gymnasium's AsyncVectorEnv",
        description="Runs a Python program in which gymnasium.vector.AsyncVectorEnv, and "
        'gymnasium.make_vec(..., vectorization_mode="async"), are vecenv\'s. Options are for arguments that the '
        "program does not give. Arguments, exit code and tracebacks are the program's own.",
        epilog="Try: vecenv run --on-failure restart train.py --seed 1",
    ),
    _Command(
        "bench",
        _bench,
        (
            _option(
                "env_id",
                nargs="?",
                default="CartPole-v1",
                metavar="ENV_ID",
                help="a registered id, module:Env-v0 (the module registers it), or module:name, a class or function "
                "of yours that builds an environment without arguments; default: CartPole-v1",
            ),
            _number_of_envs(64),
            _option("--workers", type=_count, metavar="W", help="worker processes (default: the usable cores)"),
            _option("--seconds", type=_number, metavar="S", help="length of one sample (default: 1; with --scale 0.4)"),
            _option("--repeats", type=_count, metavar="R", help="interleaved rounds (default: 7; with --scale 3)"),
            _option("--engines", metavar="NAMES", help="only these rows, separated by commas (default: all)"),
            _option("--scale", action="store_true", help="throughput over the number of environments and workers, drawn"),
            _option("--out", type=Path, default=Path("bench-results"), metavar="DIR", help="default: bench-results"),
            _json("the results", " instead of a table"),
            _option(
                "--suite",
                nargs=argparse.REMAINDER,
                metavar="...",
                help="run the whole suite of a source checkout (python -m bench) with everything that follows",
            ),
        ),
        help="measure the engine on an environment, beside Gymnasium's engines and the bare-loop limit",
        description="First checks that the engine's trajectories equal SyncVectorEnv's for the same seeds "
        "and actions, then measures all engines in interleaved rounds. Prints a table and writes JSON and "
        "a PNG. The defaults take about two minutes.",
        epilog="Exit codes: 0 measured; 1 an engine's trajectories differ from SyncVectorEnv's; "
        "2 wrong usage; 3 a row died while it was measured.",
    ),
    _Command(
        "doctor",
        _doctor,
        (_json("the findings"),),
        help="look at this machine: what works, what is missing, what to do about it",
    ),
    _Command(
        "plan",
        _plan,
        (_ENV_ID, _number_of_envs(64), _json("the plan")),
        help="how many workers? steps one real environment for a moment and says why",
    ),
    _Command(
        "watch",
        _watch,
        (
            _ENV_ID,
            _option("--policy", metavar="MODULE:FUNCTION", help="what acts (default: at random)"),
            _option("--out", type=Path, metavar="FILE", help=".gif, or .mp4 by moviepy (default: ENV_ID.gif)"),
            _number_of_envs(4),
            _option("--steps", type=_count, default=200, metavar="N", help="of each environment (default: 200)"),
            _option("--backend", default="process", help="as for make_vec: process, envpool, ... (default: process)"),
            _option("--seed", type=int, metavar="S", help="of the environments and of the random policy"),
            _option("--fps", type=_number, default=30.0, metavar="F", help="frames per second (default: 30)"),
            _option("--width", type=_count, default=800, metavar="W", help="pixels at most (default: 800)"),
            _json("what was written"),
        ),
        help="write a short video of some environments side by side",
        description="Steps some environments, tiles their frames into one image, and writes a GIF or an MP4.",
        epilog="A policy is a function of yours: it gets a batch of observations and returns a batch of actions.",
    ),
    _Command(
        "top",
        _top,
        (
            _option("--pid", type=_count, metavar="PID", help="only this program"),
            _option("--interval", type=_number, default=1.0, metavar="S", help="seconds between two readings (default: 1)"),
            _option("--once", action="store_true", help="print one table and end"),
            _json("one snapshot", " and end"),
        ),
        help="a live table of the workers of running programs",
        description="Shows the workers of every program of this user that publishes its figures: one that has called "
        "envs.publish_stats(), or was started with VECENV_TOP=1. Keys: s sorts by the next column, arrows and pages "
        "move, q or Ctrl-C ends.",
        epilog="Exit codes: 0 shown; 1 with --json or --once: no program publishes anything; 2 wrong usage.",
    ),
)
