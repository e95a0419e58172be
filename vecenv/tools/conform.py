"""``vecenv conform``: which of Gymnasium's promises an engine keeps, which it breaks, and which it refuses.

The checks of :mod:`vecenv.testing.conformity` run in a process of their own, which is replaced where an engine hangs or ends
it. So an engine that is broken is a row of the table and never an error of this command.
"""

from __future__ import annotations

import argparse
import contextlib
import inspect
import json
import multiprocessing
import os
import pickle
import signal
import textwrap
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from multiprocessing.connection import Connection
from typing import Any, Final

from gymnasium.vector import AutoresetMode

from vecenv.system.helper_process import HelperProcess
from vecenv.testing.conformity import CHECKS, COUNT, Check, as_gymnasium, makers, program
from vecenv.tools import WRONG, CliError, did_you_mean, module_named

__all__ = ["Promise", "conform", "main"]

KEPT, BROKEN, REFUSED = "kept", "broken", "refused"
_ONLY: Final = "its only mode is "
_SECONDS: Final = 20.0  # for one check
_START: Final = 120.0  # for the imports before the first


@dataclass
class Promise:
    """What an engine does about one promise.

    Attributes:
        name, about, known: Of the check.
        modes: Autoreset mode -> ``"kept"``, ``"broken"`` or ``"refused"``.
        why: Autoreset mode -> what was wrong, or why it is refused.
        program: What shows it, where it is broken.
    """

    name: str
    about: str
    known: str
    modes: dict[str, str] = field(default_factory=dict)
    why: dict[str, str] = field(default_factory=dict)
    program: str = ""

    @property
    def state(self) -> str:
        """Of all modes together."""
        for state in (BROKEN, KEPT):
            if state in self.modes.values():
                return state
        return REFUSED


def conform(engine: str, modes: Sequence[AutoresetMode], *, faults: bool = False) -> list[Promise]:
    """Ask an engine about every promise.

    Args:
        engine: ``"module:name"`` of what builds it: from functions that build environments, or from their number.
        modes: Autoreset modes to ask about.
        faults: Also about environments that fail.

    Raises:
        CliError: There is no such module or name.
    """
    functions = _takes_functions(engine_named(engine))
    todo = [
        (number, mode)
        for mode in modes
        for number, check in enumerate(CHECKS)
        if mode in check.modes and (faults or not check.fault)
    ]
    rows = {number: Promise(CHECKS[number].name, CHECKS[number].about, CHECKS[number].known) for number, _ in todo}
    done = 0
    while done < len(todo):
        for state, why in _answers(engine, todo[done:]):
            number, mode = todo[done]
            only = why.startswith(_ONLY)  # it need not be built for the other checks of this mode
            alike = [other for other in todo[done:] if other[1] is mode] if only else [todo[done]]
            for other, _ in alike:
                rows[other].modes[mode.name], rows[other].why[mode.name] = state, why
            if state == BROKEN and not rows[number].program:
                rows[number].program = program(CHECKS[number], engine, mode, functions=functions)
            done += len(alike)
            if only or state == BROKEN or CHECKS[number].fault:  # what is left of it may hang when it is closed
                break
    if rows and all(row.state == REFUSED for row in rows.values()):
        why = next(iter(next(iter(rows.values())).why.values()))
        raise CliError(f"{engine} could not be built: {why}; it gets functions that build environments, or num_envs=")
    return list(rows.values())


def _answers(engine: str, todo: Sequence[tuple[int, AutoresetMode]]) -> Iterator[tuple[str, str]]:
    """What a process says of these, in order, until it hangs or ends: that is its last answer."""
    helper = HelperProcess(
        multiprocessing.get_context("spawn"), _answer, (engine, todo), name="vecenv-conform", daemon=False
    )
    try:
        helper.start()
        for position in range(len(todo)):
            limit = _SECONDS + (_START if position == 0 else 0.0)
            if not helper.wait(time.monotonic() + limit):
                yield BROKEN, f"it hangs: no answer within {limit:.0f} seconds"
                return
            try:
                message = helper.receive()
            except EOFError:
                message = b""
            if not message:
                code = helper.exit_code() or 0
                yield BROKEN, "the program ended: " + (f"exit code {code}" if code >= 0 else signal.Signals(-code).name)
                return
            yield pickle.loads(message)
    finally:
        helper.end()


# -- in the process -------------------------------------------------------------------------------------------------------


def _answer(pipe: Connection, engine: str, todo: Sequence[tuple[int, AutoresetMode]]) -> None:
    multiprocessing.set_start_method(None, force=True)  # a program's default, not that of a spawned process
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for output in (1, 2):  # what engines print
        os.dup2(nowhere, output)
    for number, mode in todo:
        built: list[Any] = []
        pipe.send(_ask(CHECKS[number], engine, mode, built))
        for envs in built:
            with contextlib.suppress(BaseException):
                envs.close()


def _ask(check: Check, name: str, mode: AutoresetMode, built: list[Any]) -> tuple[str, str]:
    """What an engine does about a promise, and why. What was built is noted in ``built``."""
    try:
        engine = engine_named(name)
        if check.needs_told and not _takes_functions(engine):
            return REFUSED, "it brings its own environments"
        try:
            while len(built) < check.engines:
                built.append(_build(engine, mode))
        except (NotImplementedError, TypeError, ValueError) as error:
            return REFUSED, _said(error)
        if built[0].metadata.get("autoreset_mode", mode) != mode:
            return REFUSED, f"{_ONLY}{built[0].metadata['autoreset_mode']}"
        check.run(*built)
    except NotImplementedError as error:
        return REFUSED, _said(error)
    except BaseException as error:
        return BROKEN, _said(error)
    return KEPT, ""


def _build(engine: Any, mode: AutoresetMode) -> Any:
    parameters = _parameters(engine)
    takes_mode = "autoreset_mode" in parameters or any(one.kind is one.VAR_KEYWORD for one in parameters.values())
    options = {"autoreset_mode": mode} if takes_mode else {}
    return as_gymnasium(engine(makers(), **options) if _takes_functions(engine) else engine(num_envs=COUNT, **options))


def _parameters(engine: Any) -> Mapping[str, inspect.Parameter]:
    with contextlib.suppress(TypeError, ValueError):  # one that is written in C
        return inspect.signature(engine).parameters
    return {}


def _takes_functions(engine: Any) -> bool:
    """It is called with functions that build environments, and not with their number."""
    return "num_envs" not in _parameters(engine)


def _said(error: BaseException) -> str:
    """An error in one line; of an assertion without words, the line."""
    text = " ".join(str(error).split())
    if isinstance(error, AssertionError) and not text:
        frames = traceback.extract_tb(error.__traceback__)
        return (frames[-1].line or "").removeprefix("assert ")
    return text[:300] if isinstance(error, AssertionError) else f"{type(error).__name__}: {text[:300]}"


# -- the command ----------------------------------------------------------------------------------------------------------


def main(arguments: argparse.Namespace) -> int:
    """which promises of Gymnasium's vector interface an engine keeps

    Asks an engine about each promise of Gymnasium's documentation, and shows a short program for each that is broken.
    MODULE:ENGINE is called with functions that build environments, or, where it has an argument num_envs, with their
    number; and with autoreset_mode where it takes that.

    Exit codes: 0 nothing is broken; 1 something is; 2 wrong usage. Try: vecenv conform gymnasium.vector:AsyncVectorEnv
    """
    rows = conform(arguments.engine, parse_modes(arguments.modes), faults=arguments.faults)
    counts = {state: sum(row.state == state for row in rows) for state in (KEPT, BROKEN, REFUSED)}
    if arguments.json:
        listed = [{**asdict(row), "state": row.state} for row in rows]
        print(json.dumps({"engine": arguments.engine, "rows": listed}, indent=1))
    else:
        _print_table(rows)
        print("\n" + ", ".join(f"{count} {state}" for state, count in counts.items()))
    return WRONG if counts[BROKEN] else 0


def _print_table(rows: Sequence[Promise]) -> None:
    width = max(len(row.name) for row in rows)
    for row in rows:
        states = {state: [mode for mode, its in row.modes.items() if its == state] for state in row.modes.values()}
        of = "" if len(states) == 1 else "; ".join(f"{state}: {', '.join(which)}" for state, which in states.items())
        print(f"{row.name:{width}}  {row.state:8}{of}".rstrip())
    for row in rows:
        if row.state == BROKEN:
            mode = next(mode for mode, state in row.modes.items() if state == BROKEN)
            print(f"\n{row.name}: {row.why[mode]}\n  Documented: {row.about}")
            if row.known:
                print(f"  Seen before: {row.known}")
            print(textwrap.indent(row.program, "    "))


def engine_named(name: str) -> Any:
    """What ``"module:name"`` is.

    Raises:
        CliError: There is none.
    """
    module, _, attribute = name.partition(":")
    if not attribute:
        raise CliError(f"{name!r} is no MODULE:NAME, such as gymnasium.vector:AsyncVectorEnv")
    found = module_named(module)
    if not callable(engine := getattr(found, attribute, None)):
        raise CliError(f"{module!r} has no {attribute!r} that can be called{did_you_mean(attribute, list(vars(found)))}")
    return engine


def parse_modes(text: str) -> list[AutoresetMode]:
    """``"all"``, or names or values of autoreset modes with commas between.

    Raises:
        CliError: There is no such mode.
    """
    if text == "all":
        return list(AutoresetMode)
    known = {**{mode.name.lower(): mode for mode in AutoresetMode}, **{mode.value.lower(): mode for mode in AutoresetMode}}
    try:
        return [known[word.strip().lower()] for word in text.split(",")]
    except KeyError as error:
        raise CliError(f"--modes: {error.args[0]!r} is none of {', '.join(mode.name for mode in AutoresetMode)}") from None
