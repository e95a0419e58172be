"""Checks whether environments may share a process, by running two of them at a time in temporary processes.

Every run happens in a fork of the probe's process, which has built no environment, so all runs start from the same state.

1. The first environment runs alone, in a process named like its worker. It is also described and timed there.
2. In another process, a second environment first runs alone. Then the first is built too, and their calls alternate, with
   the same seeds and actions as before. Finally the second is closed, and the first runs again.
3. If an environment returned other values than alone, it runs alone twice more, with delays and with its objects at other
   addresses. Values that differ between its runs alone (clocks, process ids) are ignored.
4. The process settings after these runs are compared with each other and with those at the start.

Repeated runs make exactly the same calls: two phases of up to three steps per environment. `MAX_STEPS` limits the steps of
all runs together.

The probe misses effects that need more steps or the end of a long episode, and state of C libraries that affects no
returned value. If two functions other than those tried return the same object, only a worker that calls both detects it.
"""

from __future__ import annotations

import math
import multiprocessing
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Final

from vecenv.link.envs import same_object_error
from vecenv.link.messages import PackedError
from vecenv.planning.trial import (
    ChildEnd,
    Record,
    StepTimes,
    TriedEnv,
    play,
    run_in_child,
    try_to_time,
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
_PHASE_SECONDS: Final = 0.02
_MIN_SECONDS: Final = 5.0  # all further runs together may take this, plus ten times the duration of the first run
_DELAYS: Final = (0.002, 0.003)  # in two runs, because the values of one may agree by chance


@dataclass(frozen=True, slots=True)
class Independence:
    """The verdict on whether environments may share a process, and its cost.

    Attributes:
        verdict: ``"independent"``, ``"shares state"``, ``"cannot tell"`` or ``"not checked"``.
        reason: The first reason for a verdict other than independent.
        changes: Process settings that all environments change in the same way: they may share a worker, but not your
            program's process.
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
        plan: The arguments of :meth:`TriedEnv.phase` that repeat them.
        end: The number of the first call after the first phase.
        settings: Settings of the process after the run.
        modules: Modules imported during the run.
        steps, builds: The numbers of steps and of environments in that child.
        times: The step times, if they were measured.
        other_record: In a shared process: the record of the other environment.
        other_plan: In a shared process: the arguments that repeat the other environment's calls.
        before, during: The other environment's calls before and after the first was built.
        other_settings: Settings of the process before the first was built.
    """

    record: Record
    plan: tuple[int, int]
    end: int
    settings: Settings
    modules: list[str]
    steps: int
    builds: int = 1
    times: StepTimes | None = None
    other_record: Record = field(default_factory=list)
    other_plan: tuple[int, int] = (0, 0)
    before: Record = field(default_factory=list)
    during: Record = field(default_factory=list)
    other_settings: Settings = field(default_factory=dict)


class _Undecided(Exception):
    """An error that prevents a verdict; its text gives the reason."""


class IndependenceCheck:
    """A check of environments in children of this process. The process itself must not have built any environment.

    Args:
        env_fns: Functions that build the first environment and those to try together with it.
        indices: The environments' indices.
        own_generators: True if each environment has random generators of its own.
        close_seconds: Time limit for the first environment's ``close()``.
    """

    def __init__(
        self, env_fns: Sequence[Callable[[], Any]], indices: Sequence[int], own_generators: bool, close_seconds: float
    ) -> None:
        self.steps = self.builds = 0
        self._env_fns, self._indices = env_fns, indices
        self._own_generators, self._close_seconds = own_generators, close_seconds
        self._start = read_settings()
        self._verdict, self._reasons, self._changes = INDEPENDENT, list[str](), list[str]()
        self._deadline = 0.0

    def result(self, *, checked: bool = True) -> Independence:
        """Return the verdict so far."""
        advice_first = [reason for reason in self._reasons if "generators='own'" in reason] + self._reasons
        reason = next(iter(advice_first), "")
        return Independence(
            self._verdict if checked else NOT_CHECKED, reason, tuple(self._changes), self.steps, self.builds
        )

    def try_first(self, describe: Callable[[Any], None]) -> Run | PackedError | ChildEnd:
        """Run the first environment alone and time its steps. Call ``describe(env)`` before its first reset.

        The time is not limited here: the caller ends this process after its time limit.
        """
        opened: list[Any] = []

        def close() -> None:
            opened[0].close()

        function = partial(_run_alone, self._env_fns[0], self._indices[0], 0, describe=describe, opened=opened)
        started = time.monotonic()
        run: Run | PackedError | ChildEnd
        run = run_in_child(function, seconds=math.inf, close=close, close_seconds=self._close_seconds)
        self._deadline = time.monotonic() + _MIN_SECONDS + 10 * (time.monotonic() - started)
        if isinstance(run, Run):
            self.steps, self.builds = run.steps, 1
        return run

    def compare(self, alone: Run) -> PackedError | None:
        """Determine whether the first environment may share a process with the others, for :meth:`result` to return.

        Returns:
            An error if two functions returned the same object, else ``None``.
        """
        if len(self._env_fns) == 1:
            self._compare_settings(alone, alone, alone.settings, alone.settings)
        for place in range(1, len(self._env_fns)):
            if self._verdict == INDEPENDENT:
                try:
                    if (error := self._compare_pair(alone, place)) is not None:
                        return error
                except _Undecided as reason:
                    self._add_reason(CANNOT_TELL, str(reason))
        return None

    def _add_reason(self, verdict: str, reason: str) -> None:
        """Record a verdict other than independent; ``SHARES_STATE`` takes precedence over ``CANNOT_TELL``."""
        self._verdict = SHARES_STATE if SHARES_STATE in (verdict, self._verdict) else verdict
        self._reasons.append(reason)

    def _run(self, function: Callable[..., Run], steps: int) -> Run | PackedError | ChildEnd:
        if self.steps + steps > MAX_STEPS:
            raise _Undecided(f"{MAX_STEPS} steps were not enough to decide")
        run: Run | PackedError | ChildEnd = run_in_child(function, seconds=self._deadline - time.monotonic())
        if isinstance(run, Run):
            self.steps, self.builds = self.steps + run.steps, self.builds + run.builds
        return run

    def _run_alone(self, place: int, name: int, plan: tuple[int, int], delay: float = 0.0) -> Run:
        """Run one environment alone again, under the process name of environment ``name``."""
        function = partial(_run_alone, self._env_fns[place], self._indices[name], min(place, 1), plan, delay)
        run = self._run(function, 2 * plan[0])
        if not isinstance(run, Run):
            raise _Undecided(_describe_failure(run))
        return run

    def _compare_pair(self, alone: Run, place: int) -> PackedError | None:
        env_fns, indices = (self._env_fns[0], self._env_fns[place]), (self._indices[0], self._indices[place])
        both = self._run(partial(_run_together, env_fns, indices, alone.plan), 4 * PHASE_STEPS)
        if isinstance(both, PackedError) and _SAME_OBJECT in both.summary:
            return both
        if not isinstance(both, Run):
            died = isinstance(both, ChildEnd) and both.exitcode is not None
            shares = died or (isinstance(both, PackedError) and _CANNOT_COEXIST in both.summary)
            self._add_reason(SHARES_STATE if shares else CANNOT_TELL, _describe_failure(both))
            return None
        if _find_difference(both.before, both.during):  # due to the first, or only to its own earlier resets: run it alone
            first = self._run_alone(place, place, both.other_plan)
            self._compare_records(place, 0, first, both.other_record)
        if self._verdict != SHARES_STATE:
            self._compare_records(0, place, alone, both.record)
        self._compare_settings(alone, both, both.other_settings, both.settings)
        return None

    def _compare_records(self, place: int, other: int, alone: Run, record: Record) -> None:
        """Compare the values that an environment returned alone and together with another one."""
        if not _find_difference(alone.record, record):
            return
        ignored: set[str] = set()
        for delay in _DELAYS:
            again = self._run_alone(place, place, alone.plan, delay).record
            while difference := _find_difference(alone.record, again, ignored):
                ignored.add(difference[2])
        name, difference = f"environment {self._indices[place]}", _find_difference(alone.record, record, ignored)
        if difference is None:
            if values := sorted(value for value in ignored if not value.startswith("info")):
                self._add_reason(CANNOT_TELL, f"{name} returns other values with the same seed: {', '.join(values[:3])}")
            return
        number, call, value = difference
        where = f"(first: {value} of {call}, call {number})"
        if not place:
            renamed = self._run_alone(0, other, alone.plan).record
            if not _find_difference(record, renamed, ignored):
                self._add_reason(SHARES_STATE, f"{name} depends on the name of its process {where}")
                return
        cause = "closing another environment" if not place and number >= alone.end else "another environment"
        self._add_reason(SHARES_STATE, f"{cause} in its process changes what {name} returns {where}")

    def _compare_settings(self, alone: Run, both: Run, other: Settings, shared: Settings) -> None:
        """Compare the settings left by the first environment alone, by the other alone, and by both in a shared process."""
        start, own = self._start, alone.settings
        names = sorted(name for name in {**start, **other, **own} if not start.get(name) == other.get(name) == own.get(name))
        imported = start
        if names and not isinstance(found := run_in_child(
            read_settings, both.modules + alone.modules, seconds=self._deadline - time.monotonic()
        ), PackedError | ChildEnd):  # fmt: skip
            imported = found
        for name in names:
            old, other_value, first_value, shared_value = (each.get(name, (None,)) for each in (start, other, own, shared))
            if imported.get(name, (None,)) != old or (self._own_generators and name in GENERATORS.values()):
                continue  # changed by an import, once per process; or each environment has its own
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
    return f"a process that tried environments {describe_exit(failure.exitcode)}"


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


def _run_alone(
    env_fn: Callable[[], Any], index: int, place: int, plan: tuple[int, int] | None = None, delay: float = 0.0,
    *, describe: Callable[[Any], None] | None = None, opened: list[Any] | None = None,
) -> Run:  # fmt: skip
    """Run an environment alone. In the first run, ``plan`` is ``None`` and steps are timed."""
    modules = _name_process(index)
    tried = TriedEnv(env_fn, index, place, padding=int(delay * 2e6))
    states = read_states()
    if opened is not None:
        opened.append(tried.env)
    if describe is not None:
        describe(tried.env)
    if plan is not None:
        play(tried.phase(*plan, delay=delay))
    else:
        play(tried.phase(PHASE_STEPS, PHASE_STEPS // 2, _PHASE_SECONDS))
    end, slow = len(tried.record), plan is None and tried.is_slow
    if not slow:
        play(tried.phase(*tried.plan, delay=delay))
    record, settings, steps = tried.record, read_settings(), len(tried.step_seconds)
    times = None
    if plan is None and slow:
        times = tried.slow_times()
    elif plan is None:
        times = StepTimes.failed(tried.failure) if tried.failure else try_to_time(tried.env)
        steps += times.steps
    else:
        tried.call("close", tried.env.close)
    if times is not None:
        times = replace(times, draws=tuple(find_draws(states)))
    loaded = [name for name in sys.modules if name not in modules]
    return Run(record, tried.plan, end, settings, loaded, steps, times=times)


def _run_together(
    env_fns: tuple[Callable[[], Any], Callable[[], Any]], indices: tuple[int, int], plan: tuple[int, int]
) -> Run:
    """Run the second environment alone, then both together, then the first alone after the second is closed."""
    modules = _name_process(indices[1])
    other = TriedEnv(env_fns[1], indices[1], 1)
    play(other.phase(PHASE_STEPS, PHASE_STEPS // 2, _PHASE_SECONDS))
    other_plan, end, other_settings = other.plan, len(other.record), read_settings()
    try:
        first = TriedEnv(env_fns[0], indices[0], 0)
    except Exception as error:
        raise RuntimeError(f"an environment {_CANNOT_COEXIST}: {error!r}") from error
    if getattr(first.env, "unwrapped", first.env) is getattr(other.env, "unwrapped", other.env):
        raise same_object_error(indices, first.env)
    play(other.phase(*other_plan), first.phase(*plan))
    settings, during = read_settings(), other.record[end:]
    other.call("close", other.env.close)
    play(first.phase(*plan))
    first.call("close", first.env.close)
    loaded = [name for name in sys.modules if name not in modules]
    steps = len(first.step_seconds) + len(other.step_seconds)
    return Run(
        first.record, plan, 0, settings, loaded, steps, 2, other_record=other.record, other_plan=other_plan,
        before=other.record[1:end], during=during, other_settings=other_settings,
    )  # fmt: skip
