"""The command ``vecenv conform``: checks which of Gymnasium's promises an engine keeps, breaks or refuses.

The checks of :mod:`vecenv.testing.conformity` run in a separate process, which is replaced if an engine hangs or ends it. So
a hang or a crash is a result in the table, and never an error of this command.
"""

from __future__ import annotations

import argparse
import contextlib
import inspect
import json
import textwrap
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any, Final

from gymnasium.vector import AutoresetMode, VectorEnv

from vecenv.front.arguments import parse_autoreset_mode
from vecenv.system.shared_generators import describe_draws, find_draws, read_states
from vecenv.testing.conformity import CHECKS, NUM_ENVS, as_gymnasium, make_env_fns, make_program
from vecenv.tools import WRONG, CliError, import_module_or_exit
from vecenv.tools.benchmark import started
from vecenv.tools.runners import Candidate

KEPT, BROKEN, REFUSED = "kept", "broken", "refused"
_ONLY_MODE_PREFIX: Final = "its only mode is "
_CHECK_SECONDS: Final = 20.0  # for one check
_START_SECONDS: Final = 120.0  # added for the first check of a process: imports and compilation


@dataclass
class Result:
    """The result of one check, by autoreset mode.

    Attributes:
        name, about, known: As in :class:`~vecenv.testing.conformity.Check`.
        modes: Name of a mode -> ``"kept"``, ``"broken"`` or ``"refused"``.
        why: Name of a mode -> the error or the reason for the refusal; empty if kept.
        program: A program that shows a broken promise.
        draws: The shared generators that the engine, or environments in its process, drew from.
    """

    name: str
    about: str
    known: str
    modes: dict[str, str] = field(default_factory=dict)
    why: dict[str, str] = field(default_factory=dict)
    program: str = ""
    draws: list[str] = field(default_factory=list)

    @property
    def state(self) -> str:
        """``"broken"`` if broken in any mode, else ``"kept"`` if kept in any, else ``"refused"``."""
        for state in (BROKEN, KEPT):
            if state in self.modes.values():
                return state
        return REFUSED


def conform(engine: str, modes: Sequence[AutoresetMode] = tuple(AutoresetMode), *, faults: bool = False) -> list[Result]:
    """Check an engine against every promise.

    Args:
        engine: ``"module:name"`` of a class or function, which is called with functions that build environments, or with
            ``num_envs=``, and with ``autoreset_mode=`` if it accepts that.
        modes: Autoreset modes to check.
        faults: Also run the checks that involve a failure.

    Raises:
        CliError: The engine does not exist, could not be built, or has none of the modes; or Python runs with ``-O``.
    """
    if not __debug__:
        raise CliError("the checks are assert statements, which -O and PYTHONOPTIMIZE remove: run Python without them")
    build = import_engine(engine)
    rows: dict[int, Result] = {}
    with started([Candidate("engine", engine, partial(CheckRunner, engine))]) as (host,):
        for mode in modes:
            refusal = ""  # why the engine cannot be built in this mode; if set, it is not built again
            limit = _CHECK_SECONDS + _START_SECONDS
            for number, check in enumerate(CHECKS):
                if mode not in check.modes or (check.fault and not faults):
                    continue
                row = rows.setdefault(number, Result(check.name, check.about, check.known))
                reply = (REFUSED, refusal, []) if refusal else host.call("run_check", number, mode, timeout=limit)
                if reply is None and number == 0:  # this check only reads attributes, so building the engine has failed
                    refusal = str(host.failed)
                    reply = REFUSED, refusal, []
                limit = _CHECK_SECONDS
                state, why, draws = reply or (BROKEN, str(host.failed), [])
                row.draws += [name for name in draws if name not in row.draws]
                row.modes[mode.name], row.why[mode.name] = state, why
                if state == BROKEN and not row.program:
                    row.program = make_program(check, engine, _build_expression(engine, build, mode))
                if why.startswith(_ONLY_MODE_PREFIX):
                    refusal = why
                if refusal or state == BROKEN or check.fault:  # closing the engine may hang
                    host.kill()
                    limit = _CHECK_SECONDS + _START_SECONDS
            host.kill()  # closing the engines may hang
    if rows and all(row.state == REFUSED for row in rows.values()):
        why = next(iter(next(iter(rows.values())).why.values()))
        if why.startswith(_ONLY_MODE_PREFIX):
            raise CliError(f"{engine} was not checked: {why}, which --modes excludes")
        raise CliError(f"{engine} could not be built: {why}; it must accept functions that build environments, or num_envs=")
    return list(rows.values())


# -- in the process -------------------------------------------------------------------------------------------------------


class CheckRunner:
    """A runner of the checks in a separate process, which :func:`conform` replaces if an engine hangs or ends it."""

    def __init__(self, engine: str) -> None:
        self._engine = engine
        self._built: list[Any] = []

    def run_check(self, number: int, mode: AutoresetMode) -> tuple[str, str, list[str]]:
        """Run a check and return its state, the reason, and the shared generators that were drawn from.

        The engines of the previous check are closed first.
        """
        self.close()
        check = CHECKS[number]
        try:
            engine = import_engine(self._engine)
            if check.needs_reporting_envs and not _takes_functions(engine):
                return REFUSED, "it builds its own environments", []
            while len(self._built) < check.num_engines:
                self._built.append(_build(engine, mode))
            if (only_mode := self._built[0].metadata.get("autoreset_mode", mode)) != mode:
                return REFUSED, f"{_ONLY_MODE_PREFIX}{only_mode}", []
        except Exception as error:
            return REFUSED, _describe_error(error), []
        except BaseException as error:
            return BROKEN, _describe_error(error), []
        states, state, why = read_states(), KEPT, ""
        try:
            check.run(*self._built)
        except BaseException as error:
            state = REFUSED if isinstance(error, NotImplementedError) else BROKEN
            why = _describe_error(error)
        return state, why, find_draws(states)

    def close(self) -> None:
        while self._built:
            with contextlib.suppress(BaseException):
                self._built.pop().close()


def _build(engine: Any, mode: AutoresetMode) -> Any:
    options = {"autoreset_mode": mode} if _takes_mode(engine) else {}
    envs = engine(make_env_fns(), **options) if _takes_functions(engine) else engine(num_envs=NUM_ENVS, **options)
    return as_gymnasium(envs)


def _build_expression(name: str, engine: Any, mode: AutoresetMode) -> str:
    """Return an expression that builds the engine as :func:`_build` does, for a program."""
    argument = f"make_env_fns({NUM_ENVS})" if _takes_functions(engine) else f"num_envs={NUM_ENVS}"
    expression = f"{name.partition(':')[2]}({argument}{f', autoreset_mode={mode}' if _takes_mode(engine) else ''})"
    return expression if isinstance(engine, type) and issubclass(engine, VectorEnv) else f"as_gymnasium({expression})"


def _parameters(engine: Any) -> Mapping[str, inspect.Parameter]:
    with contextlib.suppress(TypeError, ValueError):  # raised for some callables written in C
        return inspect.signature(engine).parameters
    return {}


def _takes_mode(engine: Any) -> bool:
    parameters = _parameters(engine)
    kinds = {parameter.kind for parameter in parameters.values()}
    return "autoreset_mode" in parameters or inspect.Parameter.VAR_KEYWORD in kinds


def _takes_functions(engine: Any) -> bool:
    """True if the engine takes functions that build environments instead of a number of environments."""
    return "num_envs" not in _parameters(engine)


def _describe_error(error: BaseException) -> str:
    """Format an error in one line; for an assertion without a message, its source line."""
    text = " ".join(str(error).split())
    if isinstance(error, AssertionError) and not text:
        frames = traceback.extract_tb(error.__traceback__)
        return (frames[-1].line or "").removeprefix("assert ")
    return text[:300] if isinstance(error, AssertionError) else f"{type(error).__name__}: {text[:300]}"


# -- the command ----------------------------------------------------------------------------------------------------------


def main(arguments: argparse.Namespace) -> int:
    """check which promises of Gymnasium's vector interface an engine keeps

    Checks each promise of Gymnasium's documentation, and prints a short program for each one that is broken.
    MODULE:ENGINE is called with a list of functions that build environments, or with num_envs= if it has that parameter. It
    also gets autoreset_mode= if it accepts that.

    Exit codes: 0 no promise is broken; 1 some are; 2 wrong usage, or the engine cannot be built.
    Try: vecenv conform gymnasium.vector:AsyncVectorEnv
    """
    rows = conform(arguments.engine, parse_modes(arguments.modes), faults=arguments.faults)
    counts = {state: sum(row.state == state for row in rows) for state in (KEPT, BROKEN, REFUSED)}
    if arguments.json:
        listed = [{**asdict(row), "state": row.state} for row in rows]
        print(json.dumps({"engine": arguments.engine, "rows": listed}, indent=1))
    else:
        _print_table(rows)
        print("\n" + ", ".join(f"{count} {state}" for state, count in counts.items()))
        if draws := sorted({name for row in rows for name in row.draws}):
            print(f"Warning: {describe_draws(arguments.engine, draws)}")
    return WRONG if counts[BROKEN] else 0


def _print_table(rows: Sequence[Result]) -> None:
    width = max(len(row.name) for row in rows)
    for row in rows:
        states = {
            state: [mode for mode, mode_state in row.modes.items() if mode_state == state] for state in row.modes.values()
        }
        details = "" if len(states) == 1 else "; ".join(f"{state}: {', '.join(modes)}" for state, modes in states.items())
        print(f"{row.name:{width}}  {row.state:8}{details}".rstrip())
    for row in rows:
        if row.state == BROKEN:
            mode = next(mode for mode, state in row.modes.items() if state == BROKEN)
            print(f"\n{row.name}: {row.why[mode]}\n  Documented: {row.about}")
            if row.known:
                print(f"  Known reports: {row.known}")
            print(textwrap.indent(row.program, "    "))


def import_engine(name: str) -> Any:
    """Import ``"module:name"``.

    Raises:
        CliError: There is no such module, or no such callable in it.
    """
    module, _, attribute = name.partition(":")
    if not attribute:
        raise CliError(f"{name!r} is not of the form MODULE:NAME, such as gymnasium.vector:AsyncVectorEnv")
    engine = getattr(import_module_or_exit(module), attribute, None)
    if not callable(engine):
        raise CliError(f"{module!r} has no callable {attribute!r}")
    return engine


def parse_modes(text: str) -> Sequence[AutoresetMode]:
    """Parse ``"all"``, or values of autoreset modes separated by commas.

    Raises:
        CliError: There is no such mode.
    """
    try:
        return list(AutoresetMode) if text == "all" else [parse_autoreset_mode(name.strip()) for name in text.split(",")]
    except ValueError as error:
        raise CliError(f"--modes: {error}") from None
