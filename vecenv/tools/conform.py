"""``vecenv conform``: which of Gymnasium's promises an engine keeps, which it breaks, and which it refuses.

The checks of :mod:`vecenv.testing.conformity` run in a process of their own, which is replaced where an engine hangs or ends
it. So an engine that is broken is a row of the table and never an error of this command.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import json
import os
import select
import signal
import subprocess
import sys
import textwrap
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Final

from gymnasium.vector import AutoresetMode

from vecenv.testing.conformity import CHECKS, COUNT, Check, as_gymnasium, makers, program
from vecenv.tools.usage import WRONG, CliError, did_you_mean

__all__ = ["Promise", "conform", "show"]

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


def conform(
    engine: str, modes: Sequence[AutoresetMode], *, faults: bool = False, heard: Callable[[int, int], None] | None = None
) -> list[Promise]:
    """Ask an engine about every promise.

    Args:
        engine: ``"module:name"`` of what builds it: from functions that build environments, or from their number.
        modes: Autoreset modes to ask about.
        faults: Also about environments that fail.
        heard: Is told how many were asked, and of how many.

    Raises:
        CliError: There is no such module or name.
    """
    functions = _takes_functions(engine_named(engine))
    todo = [
        (number, mode.name)
        for mode in modes
        for number, check in enumerate(CHECKS)
        if mode in check.modes and (faults or not check.fault)
    ]
    rows = {number: Promise(CHECKS[number].name, CHECKS[number].about, CHECKS[number].known) for number, _ in todo}
    done = 0
    while done < len(todo):
        for state, why in _answers(engine, todo[done:]):
            number, mode = todo[done]
            spoilt = state == BROKEN or CHECKS[number].fault
            rows[number].modes[mode], rows[number].why[mode] = state, why
            if state == BROKEN and not rows[number].program:
                rows[number].program = program(CHECKS[number], engine, AutoresetMode[mode], functions=functions)
            done += 1
            if heard is not None:
                heard(done, len(todo))
            if why.startswith(_ONLY):  # it need not be built for the other checks of this mode
                while done < len(todo) and todo[done][1] == mode:
                    rows[todo[done][0]].modes[mode], rows[todo[done][0]].why[mode] = state, why
                    done += 1
                break
            if spoilt:  # what is left of it may hang when it is closed: a new process goes on
                break
    if rows and all(row.state == REFUSED for row in rows.values()):
        why = next(iter(next(iter(rows.values())).why.values()))
        raise CliError(f"{engine} could not be built: {why}; it gets functions that build environments, or num_envs=")
    return list(rows.values())


def _answers(engine: str, todo: Sequence[tuple[int, str]]) -> Iterator[tuple[str, str]]:
    """What a process says of these, in order, until it hangs or ends: that is its last answer."""
    child = subprocess.Popen(
        [sys.executable, "-c", "from vecenv.tools.conform import _child; _child()"],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, start_new_session=True,
    )  # fmt: skip
    assert child.stdin is not None
    assert child.stdout is not None
    try:
        with contextlib.suppress(BrokenPipeError):
            child.stdin.write(json.dumps({"engine": engine, "todo": todo, "path": sys.path}).encode() + b"\n")
            child.stdin.flush()
        for position in range(len(todo)):
            limit = _SECONDS + (_START if position == 0 else 0.0)
            line = _line(child.stdout, limit)
            if line is None:
                yield BROKEN, f"it hangs: no answer within {limit:.0f} seconds"
                return
            if not line:
                code = child.wait()
                yield BROKEN, "the program ended: " + (f"exit code {code}" if code >= 0 else signal.Signals(-code).name)
                return
            yield tuple(json.loads(line))
    finally:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(child.pid, signal.SIGKILL)
        child.wait()
        child.stdin.close()
        child.stdout.close()


def _line(stream: Any, seconds: float) -> bytes | None:
    poll = select.poll()
    poll.register(stream, select.POLLIN)
    return stream.readline() if poll.poll(seconds * 1000) else None


# -- in the process -------------------------------------------------------------------------------------------------------


def _child() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # what engines print
    given = json.loads(sys.stdin.readline())
    sys.path[:] = given["path"]
    for number, mode in given["todo"]:
        engines: list[Any] = []
        said = _ask(CHECKS[number], given["engine"], AutoresetMode[mode], engines)
        answers.write(json.dumps(said) + "\n")
        answers.flush()
        for engine in engines:
            with contextlib.suppress(BaseException):
                engine.close()


def _ask(check: Check, name: str, mode: AutoresetMode, engines: list[Any]) -> tuple[str, str]:
    """What an engine does about a promise, and why. What was built is noted in ``engines``."""
    try:
        build = _builder(engine_named(name), check, mode)
        try:
            while len(engines) < check.engines:
                engines.append(build())
        except (NotImplementedError, TypeError, ValueError) as error:
            return REFUSED, _said(error)
        if engines[0].metadata.get("autoreset_mode", mode) != mode:
            return REFUSED, f"{_ONLY}{engines[0].metadata['autoreset_mode']}"
        check.run(*engines)
    except NotImplementedError as error:
        return REFUSED, _said(error)
    except _Refused as error:
        return REFUSED, str(error)
    except BaseException as error:
        return BROKEN, _said(error)
    return KEPT, ""


class _Refused(Exception):
    """The engine is not made for this check."""


def _builder(engine: Any, check: Check, mode: AutoresetMode) -> Callable[[], Any]:
    """What builds the engine for a check."""
    parameters = _parameters(engine)
    takes_functions = _takes_functions(engine)
    if check.needs_told and not takes_functions:
        raise _Refused("it brings its own environments")
    takes_mode = "autoreset_mode" in parameters or any(one.kind is one.VAR_KEYWORD for one in parameters.values())
    options = {"autoreset_mode": mode} if takes_mode else {}
    if not takes_functions:
        return lambda: as_gymnasium(engine(num_envs=COUNT, **options))
    return lambda: as_gymnasium(engine(makers(), **options))


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


# -- the table ------------------------------------------------------------------------------------------------------------


def show(engine: str, rows: Sequence[Promise], *, as_json: bool) -> int:
    """Print the table; the exit code."""
    if as_json:
        print(json.dumps({"engine": engine, "rows": [{**asdict(row), "state": row.state} for row in rows]}, indent=1))
    else:
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
    counts = {state: sum(row.state == state for row in rows) for state in (KEPT, BROKEN, REFUSED)}
    if not as_json:
        print("\n" + ", ".join(f"{count} {state}" for state, count in counts.items()))
    return WRONG if counts[BROKEN] else 0


def engine_named(name: str) -> Any:
    """What ``"module:name"`` is.

    Raises:
        CliError: There is none.
    """
    module, _, attribute = name.partition(":")
    if not attribute:
        raise CliError(f"{name!r} is no MODULE:NAME, such as gymnasium.vector:AsyncVectorEnv")
    if "" not in sys.path:
        sys.path.insert(0, "")
    try:
        found = importlib.import_module(module)
    except ImportError as error:
        raise CliError(f"cannot import {module!r}: {error}") from None
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
