"""Checks whether environments may share a process, by running two of them at a time in temporary processes.

Every run happens in a fork of the probe's process, which has built no environment, so all runs start from the same state.

1. The first environment runs alone, in a process named like its worker. It is also described and timed there.
2. In another process, a second environment first runs alone. Then the first is built too, and their calls alternate, with
   the same seeds and actions as before. Finally the second is closed, and the first runs again.
3. If an environment returned different values than it did alone, it runs alone twice more, with delays and with its objects
   at other addresses. Values that differ between its runs alone (clocks, process ids) are not compared; unless they are
   infos, the verdict is then :data:`CANNOT_TELL` at best.
4. The process settings after these runs are compared with each other and with those at the start.

Repeated runs make exactly the same calls: two phases of up to three steps per environment. `MAX_STEPS` limits the steps of
all runs together.

The probe misses effects that need more steps or the end of a long episode, and state of C libraries that affects no returned
value. If two functions return the same object and were not tried together, only a worker that calls both detects it.
"""

from __future__ import annotations

import math
import multiprocessing
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final

from vecenv.link.envs import same_object_error
from vecenv.link.messages import PackedError
from vecenv.planning.trial import (
    ChildEnd,
    Record,
    StepTimes,
    TriedEnv,
    run_in_child,
    run_phases,
)
from vecenv.system.process_settings import ONE_PER_PROCESS, Settings, read_settings
from vecenv.system.shared_generators import GENERATORS, find_draws, read_states
from vecenv.system.supervision import describe_exit

INDEPENDENT: Final = "independent"
SHARES_STATE: Final = "shares state"
CANNOT_TELL: Final = "cannot tell"
NOT_CHECKED: Final = "not checked"

MAX_STEPS: Final = 64
PHASE_STEPS: Final = 3
_FIRST_PHASE_ARGS: Final = (PHASE_STEPS, PHASE_STEPS // 2, 0.02)  # of TriedEnv.phase(): steps, reset_at, seconds
_MIN_SECONDS: Final = 5.0  # all runs after the first may take this together, plus ten times the duration of the first
_DELAYS: Final = (0.002, 0.003)  # seconds, in two runs, because the values of one may agree by chance


@dataclass(frozen=True, slots=True)
class Independence:
    """The verdict on whether environments may share a process, and its cost.

    Attributes:
        verdict: ``"independent"``, ``"shares state"``, ``"cannot tell"`` or ``"not checked"``.
        reason: A reason for a verdict other than independent; see :meth:`IndependenceCheck.result`.
        changes: Descriptions of the process settings that all environments change in the same way. Such environments may
            share a worker, but not the caller's process.
        steps, builds: The numbers of steps that the probe made and of environments that it built.
    """

    verdict: str = NOT_CHECKED
    reason: str = ""
    changes: tuple[str, ...] = ()
    steps: int = 0
    builds: int = 0

    def __str__(self) -> str:
        return "; ".join([self.verdict, *([self.reason] if self.reason else []), *self.changes])

    @property
    def may_share(self) -> bool:
        """True if several environments may run in one process."""
        return self.verdict in (INDEPENDENT, NOT_CHECKED)


def choose_pairs(env_fns: Sequence[Callable[[], Any]]) -> list[int]:
    """Return the indices of the environments to pair with env 0: env 1, and the first one of a kind different from both."""
    kinds = [getattr(env_fn, "__code__", env_fn) for env_fn in env_fns]
    others = [index for index, kind in enumerate(kinds) if index > 1 and all(kind is not known for known in kinds[:2])]
    return [*range(1, min(len(kinds), 2)), *others[:1]]


@dataclass(slots=True)
class Run:
    """The results of one run of an environment in a child process.

    Attributes:
        record: The calls, with digests of the values that they returned.
        phase_args: The arguments of :meth:`TriedEnv.phase` that repeat a phase exactly.
        phase_end: The index in ``record`` of the first call after the first phase.
        settings: The process settings after the run; in a process with two environments, those before the other one was
            built or closed.
        modules: Modules imported during the run; empty for the one that was built first in a process with two.
        steps: The number of steps, including timed ones.
        times: The step times, if they were measured.
    """

    record: Record
    phase_args: tuple[int, int, float]
    phase_end: int
    settings: Settings
    modules: list[str]
    steps: int
    times: StepTimes | None = None


class _Undecided(Exception):
    """An error that prevents a verdict; its text gives the reason."""


class IndependenceCheck:
    """A check of environments in children of this process. The process itself must not have built any environment.

    Args:
        env_fns: Functions that build the first environment and those to try together with it.
        indices: The environments' indices.
        own_generators: True if each environment has random generators of its own.
    """

    def __init__(self, env_fns: Sequence[Callable[[], Any]], indices: Sequence[int], own_generators: bool) -> None:
        self.steps = self.builds = 0
        self._env_fns, self._indices, self._own_generators = env_fns, indices, own_generators
        self._start = read_settings()
        self._verdict, self._reasons, self._changes = INDEPENDENT, list[str](), list[str]()
        self._deadline = 0.0

    def result(self, *, checked: bool = True) -> Independence:
        """Return the verdict so far. Its reason is the first one that contains advice, or else the first one."""
        reason = min(self._reasons, key=lambda reason: "generators='own'" not in reason, default="")
        verdict = self._verdict if checked else NOT_CHECKED
        return Independence(verdict, reason, tuple(self._changes), self.steps, self.builds)

    def try_first(self, describe: Callable[[Any], None]) -> Run | PackedError | ChildEnd:
        """Run the first environment alone and time its steps. Call ``describe(env)`` before its first reset.

        The time is not limited here: the process that started this one ends it after its time limit.
        """
        started = time.monotonic()
        self._deadline = math.inf
        runs = self._run(partial(_run_alone, self._env_fns[0], self._indices[0], 0, describe=describe), 0)
        self._deadline = time.monotonic() + _MIN_SECONDS + 10 * (time.monotonic() - started)
        return runs[0] if isinstance(runs, list) else runs

    def compare(self, alone: Run) -> PackedError | None:
        """Determine whether the first environment may share a process with the others, for :meth:`result` to return.

        Returns:
            An error if two functions returned the same object, else ``None``.
        """
        if len(self._env_fns) == 1:
            self._compare_settings(alone, alone, alone)
        for position in range(1, len(self._env_fns)):
            if self._verdict == INDEPENDENT:
                try:
                    if (error := self._compare_pair(alone, position)) is not None:
                        return error
                except _Undecided as reason:
                    self._add_reason(CANNOT_TELL, str(reason))
        return None

    def _add_reason(self, verdict: str, reason: str) -> None:
        """Record a verdict other than independent; ``SHARES_STATE`` takes precedence over ``CANNOT_TELL``."""
        self._verdict = SHARES_STATE if SHARES_STATE in (verdict, self._verdict) else verdict
        self._reasons.append(reason)

    def _run(self, function: Callable[[], Iterator[list[Run]]], steps: int) -> list[Run] | PackedError | ChildEnd:
        if self.steps + steps > MAX_STEPS:
            raise _Undecided(f"{MAX_STEPS} steps were not enough to decide")
        runs: list[Run] | PackedError | ChildEnd = run_in_child(function, seconds=self._deadline - time.monotonic())
        if isinstance(runs, list):
            self.steps, self.builds = self.steps + sum(run.steps for run in runs), self.builds + len(runs)
        return runs

    def _run_alone(self, position: int, phase_args: tuple[int, int, float], delay: float = 0.0) -> Run:
        """Run one environment alone again."""
        function = partial(_run_alone, self._env_fns[position], self._indices[position], min(position, 1), phase_args, delay)
        runs = self._run(function, 2 * phase_args[0])
        if not isinstance(runs, list):
            raise _Undecided(_describe_failure(runs))
        return runs[0]

    def _compare_pair(self, alone: Run, position: int) -> PackedError | None:
        env_fns, indices = (self._env_fns[0], self._env_fns[position]), (self._indices[0], self._indices[position])
        both = self._run(partial(_run_together, env_fns, indices, alone.phase_args), 4 * PHASE_STEPS)
        if isinstance(both, PackedError) and _SAME_OBJECT in both.summary:
            return both
        if not isinstance(both, list):
            died = isinstance(both, ChildEnd) and both.exitcode is not None
            shares = died or (isinstance(both, PackedError) and _CANNOT_COEXIST in both.summary)
            self._add_reason(SHARES_STATE if shares else CANNOT_TELL, _describe_failure(both))
            return None
        first, other = both
        before, during = other.record[1 : other.phase_end], other.record[other.phase_end :]
        if _find_difference(before, during):  # the first caused it, or only the other's own earlier resets did
            self._compare_records(position, self._run_alone(position, other.phase_args), other.record)
        if self._verdict != SHARES_STATE:
            self._compare_records(0, alone, first.record)
        self._compare_settings(alone, other, first)
        return None

    def _compare_records(self, position: int, alone: Run, record: Record) -> None:
        """Compare the values that an environment returned alone and together with another one."""
        if not _find_difference(alone.record, record):
            return
        ignored: set[str] = set()
        for delay in _DELAYS:
            repeated = self._run_alone(position, alone.phase_args, delay).record
            while difference := _find_difference(alone.record, repeated, ignored):
                ignored.add(difference[2])
        name, difference = f"environment {self._indices[position]}", _find_difference(alone.record, record, ignored)
        if difference is None:
            if values := sorted(value for value in ignored if not value.startswith("info")):
                text = f"{name} returns different values in repeated runs with the same seed: {', '.join(values[:3])}"
                self._add_reason(CANNOT_TELL, text)
            return
        number, call, value = difference
        where = f"(first: {value} of {call}, call {number})"
        cause = "closing another environment" if not position and number >= alone.phase_end else "another environment"
        self._add_reason(SHARES_STATE, f"{cause} in its process changes what {name} returns {where}")

    def _compare_settings(self, alone: Run, other: Run, both: Run) -> None:
        """Compare the settings left by the first environment alone, by the other alone, and by both in a shared process."""
        start, alone_settings = self._start, alone.settings
        names = sorted(
            name for name in {**start, **other.settings, **alone_settings}
            if not start.get(name) == other.settings.get(name) == alone_settings.get(name)
        )  # fmt: skip
        after_imports = start
        if names and not isinstance(found := run_in_child(
            _read_settings, both.modules + alone.modules, seconds=self._deadline - time.monotonic()
        ), PackedError | ChildEnd):  # fmt: skip
            after_imports = found
        for name in names:
            old, other_value, first_value, shared_value = (
                each.get(name, (None,)) for each in (start, other.settings, alone_settings, both.settings)
            )
            if after_imports.get(name, (None,)) != old or (self._own_generators and name in GENERATORS.values()):
                continue  # changed by an import, once per process; or a generator of which each environment has its own
            if name in GENERATORS.values():
                advice = "which all environments of a process share; generators='own' gives each its own"
                self._add_reason(SHARES_STATE, f"they draw from {name}, {advice}")
            elif name in ONE_PER_PROCESS:
                self._add_reason(SHARES_STATE, f"they use {name}, and a process has only one")
            elif other_value[0] != first_value[0]:
                self._add_reason(SHARES_STATE, f"they set {name} to different values: {other_value[0]}, {first_value[0]}")
            elif shared_value[1:] != other_value[1:] or (
                name == "pyplot's figures" and shared_value == other_value and both is not alone
            ):
                self._add_reason(SHARES_STATE, f"they replace each other's {name}")
            else:
                self._changes.append(f"they change {name} from {old[0]} to {other_value[0]}")


_SAME_OBJECT: Final = "the same object"
_CANNOT_COEXIST: Final = "cannot be built in the same process as another one"


def _describe_failure(failure: PackedError | ChildEnd) -> str:
    if isinstance(failure, PackedError):
        return failure.summary.removeprefix("RuntimeError: ")
    if failure.exitcode is None:
        return "trying them took too long"
    return f"a process that tried environments died: {describe_exit(failure.exitcode)}"


def _find_difference(first: Record, second: Record, ignored: set[str] | frozenset[str] = frozenset()) -> Any:
    """Return the number and name of the first call with a differing value, and that value's name, or ``None``."""
    for number, ((call, first_values), (_, second_values)) in enumerate(zip(first, second, strict=False)):
        for name in {**first_values, **second_values}:
            if name not in ignored and first_values.get(name) != second_values.get(name):
                return number, call, name
    return None


# -- in the children ----------------------------------------------------------------------------------------------------


def _name_process(index: int) -> set[str]:
    """Name this process like the worker of one environment, and return the names of loaded modules."""
    process: Any = multiprocessing.current_process()
    process.name, process._identity = f"Worker<AsyncVectorEnv>-{index}", (index + 1,)
    return set(sys.modules)


def _read_settings(modules: list[str]) -> Iterator[Settings]:
    yield read_settings(modules)


def _run_alone(
    env_fn: Callable[[], Any], index: int, seed: int, phase_args: tuple[int, int, float] = _FIRST_PHASE_ARGS,
    delay: float = 0.0, *, describe: Callable[[Any], None] | None = None,
) -> Iterator[list[Run]]:  # fmt: skip
    """Run an environment alone. With ``describe``, as in the first run, also time its steps."""
    modules = _name_process(index)
    tried = TriedEnv(env_fn, index, seed, padding=int(delay * 2e6))
    states = read_states()
    if describe is not None:
        describe(tried.env)
    run_phases(tried.phase(*phase_args, delay=delay))
    phase_end, slow = len(tried.record), describe is not None and tried.is_slow
    if not slow:
        run_phases(tried.phase(*tried.phase_args, delay=delay))
    record, settings, steps, times = tried.record[:], read_settings(), len(tried.step_seconds), None
    if describe is not None:
        times = replace(tried.times(), draws=tuple(find_draws(states)))
        steps += 0 if slow else times.steps
    loaded = [name for name in sys.modules if name not in modules]
    yield [Run(record, tried.phase_args, phase_end, settings, loaded, steps, times)]
    tried.env.close()


def _run_together(
    env_fns: tuple[Callable[[], Any], Callable[[], Any]], indices: tuple[int, int], phase_args: tuple[int, int, float]
) -> Iterator[list[Run]]:
    """Run the second environment alone, then both together, then the first alone after the second is closed.

    Yields:
        The runs of the first and of the second environment.
    """
    modules = _name_process(indices[1])
    other = TriedEnv(env_fns[1], indices[1], 1)
    run_phases(other.phase(*_FIRST_PHASE_ARGS))
    other_args, phase_end, other_settings = other.phase_args, len(other.record), read_settings()
    try:
        first = TriedEnv(env_fns[0], indices[0], 0)
    except Exception as error:
        raise RuntimeError(f"an environment {_CANNOT_COEXIST}: {error!r}") from error
    if getattr(first.env, "unwrapped", first.env) is getattr(other.env, "unwrapped", other.env):
        raise same_object_error(indices, first.env)
    run_phases(other.phase(*other_args), first.phase(*phase_args))
    settings = read_settings()
    other.call("close", other.env.close)
    run_phases(first.phase(*phase_args))
    loaded = [name for name in sys.modules if name not in modules]
    yield [
        Run(first.record, phase_args, 0, settings, loaded, len(first.step_seconds)),
        Run(other.record, other_args, phase_end, other_settings, [], len(other.step_seconds)),
    ]
    first.env.close()
