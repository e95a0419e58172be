"""Chooses the number of workers by timing a few steps of one environment.

If environments may share a process, the choice depends on the duration of a step, and on the share of it spent waiting (for
a remote simulator, a socket, a sleep). Steps that compute need one process per core, one of which may be the caller. Steps
that wait need more processes than cores. Steps that take less time than waking another process are fastest in the caller
alone.

The constants below are the costs of passing a batch to workers and back, measured with ``python -m bench micro``. They are
multiplied by two factors: the time that Python takes on this machine relative to the measured one, and the slowdown while
other processes compute, because two usable cores may be hardware threads of one core.
"""

from __future__ import annotations

import math
import multiprocessing
import threading
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Final

import gymnasium

from vecenv.planning.independence import SHARES_STATE, Independence
from vecenv.planning.options import check_option
from vecenv.planning.probe import EnvProbe
from vecenv.planning.trial import SLOW_STEP_SECONDS, StepTimes
from vecenv.system.cores import usable_cores
from vecenv.system.spawning import explain_unsupported_processes, require_processes

__all__ = ["Plan", "caller_share", "choose", "plan", "plan_batches", "workers_and_share"]

# Costs of a batch in seconds, apart from the environments' own steps.
PER_ENV_SECONDS: Final = 0.5e-6  # passing the action in, and the observation, reward and flags out
IN_PROCESS_SECONDS: Final = 6.5e-6  # a batch in this process
WITH_CALLER_SECONDS: Final = 15e-6  # a batch of which the caller steps a share, while workers spin on cores of their own
SENDING_SECONDS: Final = 1.5e-6  # part of WITH_CALLER_SECONDS in which the caller sends requests while workers already step
BY_WORKERS_SECONDS: Final = 28e-6  # a batch by one worker per core
WAKE_SECONDS: Final = 12e-6  # per worker, if there are more workers than cores: a sleep and a wake-up

RECEIVING_SECONDS: Final = 50e-6  # receiving a first-ready batch and sending its next actions, with cold caches
PER_MESSAGE_SECONDS: Final = 6e-6  # in addition, per message of that batch

_MIN_WAITING_SHARE: Final = 0.3  # the share of waiting above which more processes than cores are considered
_MAX_SAFETY_COST: Final = 1.1  # relative cost up to which workers are preferred, because the program survives their crashes


@dataclass(frozen=True, slots=True)
class Plan:
    """A choice of workers and the reasons for it; ``str`` formats it as a report.

    Attributes:
        num_envs: The number of environments.
        num_workers: The number of worker processes; with 0, the calling process steps all environments.
        caller_share: The number of environments that the calling process steps beside its workers; 0 without workers.
        reason: The reason for the choice, in a sentence.
        probe: The step times of an environment.
        cores: The number of usable cores.
        estimates: Expected seconds per batch, for every choice that was compared.
        batch_size: With ``batch_size="auto"``, the number of environments that ``recv`` returns; ``num_envs`` for lock-step.
        rows_at_once: With ``batch_size="auto"``, the maximum number of environments in one message; ``None``: no limit.
        batch_reason: The reason for the batch size, in a sentence.
        independence: The verdict on whether environments may share a process.
    """

    num_envs: int
    num_workers: int
    caller_share: int
    reason: str
    probe: StepTimes
    cores: int
    estimates: dict[str, float] = field(default_factory=dict)
    batch_size: int | None = None
    rows_at_once: int | None = None
    batch_reason: str = ""
    independence: Independence = field(default_factory=Independence)

    @property
    def use_caller(self) -> bool:
        """True if the calling process steps a share of the environments beside its workers."""
        return self.caller_share > 0

    def __str__(self) -> str:
        times, independence = self.probe, self.independence
        lines = [f"Plan for {self.num_envs} environments on {self.cores} usable cores:"]
        if independence.steps:
            environments = f"{independence.builds} environment{'s' * (independence.builds != 1)}"
            tried = f"{environments}, {independence.steps} steps in all"
            lines.append(f"  tried in temporary processes: {tried}")
            lines.append(f"  environments in one process: {independence}")
        if times.failure:
            lines.append(f"  no step could be timed: {times.failure}")
        else:
            waiting = f"{times.waits:.0%} of it waiting ({times.steps} steps measured)"
            lines.append(f"  a step takes {times.step * 1e6:.1f} us, {waiting}")
            pace, busy = times.pace, times.pace * times.crowding
            slower = f"{pace:.1f} times as long as on the reference machine, {busy:.1f} with all cores busy"
            lines.append(f"  Python takes {slower}")
        for name, seconds in sorted(self.estimates.items(), key=lambda entry: entry[1]):
            lines.append(f"  {name:<28} {self.num_envs / seconds:>12,.0f} steps per second expected")
        own = "1 environment" if self.caller_share == 1 else f"{self.caller_share} environments"
        share = f" (the caller steps {own} itself)" if self.use_caller else ""
        lines.append(f"num_workers={self.num_workers}, use_caller={self.use_caller}{share}: {self.reason}")
        if self.batch_size is not None:
            lines.append(f"batch_size={self.batch_size}: {self.batch_reason}")
        return "\n".join(lines)


def caller_share(num_envs: int, workers: int, step: float) -> int:
    """Return the number of environments with which the caller finishes at the same time as its workers.

    The caller does most of its sending and collecting while no environment is stepped. Only the rest of that work,
    ``SENDING_SECONDS``, reduces its share.
    """
    even = num_envs / (workers + 1)
    reduction = SENDING_SECONDS / max(step + PER_ENV_SECONDS, 1e-9) * workers / (workers + 1)
    return min(max(round(even - reduction), 1), max(num_envs - workers, 1))


def choose(
    times: StepTimes, num_envs: int, cores: int, *, use_caller: bool | None = None, independence: Independence | None = None,
    cause: str = "use_caller=False",
) -> Plan:  # fmt: skip
    """Choose the fastest way to step ``num_envs`` such environments, or a safer one that is nearly as fast.

    Environments that may not share a process get one each. Where no worker is possible, this process steps all of them,
    unless ``use_caller`` is ``False``.

    Args:
        times: The step times of one environment.
        num_envs: Number of environments.
        cores: Number of usable cores.
        use_caller: ``False``: only worker processes, because restarts and timeouts must be able to kill a process. ``None``:
            worker processes if they are less than a tenth slower, because the program then survives a crash of an
            environment. ``True``: the fastest choice. Outside of the main thread, or if environments change process
            settings: like ``False``.
        independence: The verdict on whether environments may share a process; ``None``: assume that they may.
        cause: The options from which ``use_caller=False`` follows.
    """
    independence = independence or Independence()
    make_plan = partial(Plan, num_envs, probe=times, cores=cores, independence=independence)
    if (obstacle := explain_unsupported_processes()) is not None and use_caller is not False:
        return make_plan(num_workers=0, caller_share=0, reason=f"in this process: {obstacle}")
    if not independence.may_share:
        doubt = "" if independence.verdict == SHARES_STATE else "they may not be independent: "
        reason = f"one process per environment, because {doubt}{independence.reason}"
        return make_plan(num_workers=num_envs, caller_share=0, reason=reason)
    if times.slow:
        reason = f"one process per environment: steps take over {SLOW_STEP_SECONDS * 1e3:.0f} ms, so sharing gains little"
        return make_plan(num_workers=num_envs, caller_share=0, reason=reason)
    if times.failure:
        reason = "the environment failed while it was tried, so it is kept out of your program's process"
        return make_plan(num_workers=min(cores, num_envs), caller_share=0, reason=reason)
    exclusion = ""
    if independence.changes or threading.current_thread() is not threading.main_thread():
        thread = "this is not the main thread, which environments may need for signal handlers and event loops"
        cause = independence.changes[0] if independence.changes else thread
        use_caller, exclusion = False, f"; no environment runs in your program's process, because {cause}"
    choices = _estimate_choices(times, num_envs, cores, processes_only=use_caller is False)
    estimates = {name: choice[0] for name, choice in choices.items()}
    best = min(choices.values())
    safest = min(choice for choice in choices.values() if not choice[2])
    prefers_safest = bool(best[2]) and use_caller is None and safest[0] < best[0] * _MAX_SAFETY_COST
    _, processes, share = safest if prefers_safest else best
    reason = "it uses every usable core"
    if processes == 0:
        reason = f"a batch of {num_envs} such steps takes less time here than in another process"
        share = 0
    elif processes > cores:
        reason = f"steps that wait {times.waits:.0%} of their time overlap in more processes than cores"
    elif exclusion:
        reason = "one worker per usable core"
    elif use_caller is False:
        reason = f"one process per usable core, because of {cause}"
    elif prefers_safest:
        reason = "nearly the fastest, and a crash of an environment does not end the program"
    if share or not processes:
        reason += "; a crash of an environment that the caller steps ends the program"
    reason += exclusion
    return make_plan(num_workers=processes, caller_share=share, reason=reason, estimates=estimates)


def _estimate_choices(
    times: StepTimes, num_envs: int, cores: int, *, processes_only: bool
) -> dict[str, tuple[float, int, int]]:
    """Return name -> (expected seconds per batch, worker processes, environments that the caller steps)."""
    waiting_step = max(times.step - times.cpu, 0.0)
    # Other users of the machine may cause part of the crowding. They slow down a single process as well, but not all the
    # time, so its expected slowdown is the square root of the factor.
    crowding = min(times.crowding, 2.0) if cores > 1 else 1.0
    single, crowded = times.pace * math.sqrt(crowding), times.pace * crowding
    single_step = waiting_step + times.cpu * math.sqrt(crowding) + PER_ENV_SECONDS * single
    computing_step = times.cpu * crowding + PER_ENV_SECONDS * crowded
    step = waiting_step + computing_step
    choices: dict[str, tuple[float, int, int]] = {}
    if not processes_only:
        choices["in this process"] = (IN_PROCESS_SECONDS * single + num_envs * single_step, 0, num_envs)
        if explain_unsupported_processes() is not None:
            return choices
        if cores > 1 and num_envs > 1:
            workers = min(cores - 1, num_envs - 1)
            share = caller_share(num_envs, workers, times.step / times.pace)
            slowest = max(SENDING_SECONDS * crowded + share * step, -(-(num_envs - share) // workers) * step)
            name = f"{workers} worker{'s' * (workers != 1)} + this process"
            choices[name] = (WITH_CALLER_SECONDS * crowded + slowest, workers, share)
    workers = min(cores, num_envs)
    choices[f"{workers} workers"] = (BY_WORKERS_SECONDS * crowded + -(-num_envs // workers) * step, workers, 0)
    for power in range(1, 6) if times.waits > _MIN_WAITING_SHARE and num_envs > cores else ():
        processes = min(num_envs, cores * 2**power)
        wake = WAKE_SECONDS * crowded
        computing = num_envs * computing_step / cores + processes * wake / cores
        seconds = BY_WORKERS_SECONDS * crowded + max(-(-num_envs // processes) * step, computing) + processes * wake / 4
        choices[f"{processes} workers"] = (seconds, processes, 0)
    return choices


def plan_batches(plan: Plan) -> Plan:
    """Return the plan with batches of half the environments, or of all (lock-step) if halves do not pay off.

    While the caller handles one half, the workers step the other, and a late environment delays only its own half. The cost
    is a second batch for the caller, which must take less time than the workers' steps meanwhile. A worker with two requests
    continues while the caller reads its first reply, but the caller then reads two replies and needs a core for itself.
    """
    times, count, workers = plan.probe, plan.num_envs, plan.num_workers
    half = max(count // 2, 1)
    if times.failure or count == 1 or not workers or plan.use_caller:
        reason = "no step could be timed" if times.failure else "no environment can be ahead of another"
        return replace(plan, batch_size=count, batch_reason=f"lock-step: {reason}")
    rows = -(-count // workers)  # the environments of one worker
    caller_has_core = times.waits > _MIN_WAITING_SHARE or plan.cores > workers
    half_seconds = -(-half // workers) * times.step
    cost, cost_of_two_messages = (
        (RECEIVING_SECONDS + PER_MESSAGE_SECONDS * min(workers * n // 2 or 1, half)) * times.pace for n in (1, 2)
    )
    reason = f"half of them are stepped in {half_seconds * 1e6:,.0f} us, and a batch costs the caller {cost * 1e6:,.0f} us"
    if half_seconds < (cost if caller_has_core else 2 * cost):
        return replace(plan, batch_size=count, batch_reason=f"lock-step: {reason}")
    rows_at_once = -(-rows // 2) if rows > 1 and caller_has_core and half_seconds >= cost_of_two_messages else None
    if rows_at_once:
        reason += (
            f"; {rows_at_once} of a worker's {rows} in one message, so that it continues while the caller reads the others"
        )
    return replace(plan, batch_size=half, rows_at_once=rows_at_once, batch_reason=f"halves: {reason}")


def workers_and_share(
    num_envs: int,
    num_workers: int | str | None,
    use_caller: bool | None,
    measure: Callable[[], tuple[StepTimes, Independence]],
    batch_size: int | str | None = None,
    cause: str = "use_caller=False",
) -> tuple[int, int, Plan | None]:
    """Return the numbers of worker processes and of environments that the caller steps, and the plan if one was made.

    ``measure`` probes environments; it is called only if the result depends on it. With ``num_workers="auto"`` the caller
    steps environments only in its main thread, and only if they may share its process. ``cause``: see :func:`choose`.
    """
    cores, share = usable_cores(), 0
    found: Plan | None = None
    if num_workers == "auto":
        times, independence = measure()
        found = choose(times, num_envs, cores, use_caller=use_caller, independence=independence, cause=cause)
        processes, share = found.num_workers, found.caller_share
    else:
        if num_workers is None:
            num_workers = max(cores - 1, 1) if use_caller else num_envs
        processes = min(int(num_workers), num_envs - 1 if use_caller else num_envs)
        if processes and use_caller:
            times, _ = measure()
            even = max(num_envs // (processes + 1), 1)
            share = even if times.failure else caller_share(num_envs, processes, times.step)
    if batch_size == "auto":
        times, independence = measure()
        if found is None:
            found = Plan(num_envs, processes, share, "as requested", times, cores, independence=independence)
        elif found.use_caller:  # while it steps environments, the caller cannot receive a batch
            halves = plan_batches(choose(times, num_envs, cores, use_caller=False, independence=independence))
            if halves.batch_size != num_envs:
                return halves.num_workers, 0, replace(halves, reason="first-ready batches need the caller to be free")
        found = plan_batches(found)
    return processes, share if processes else num_envs, found


def plan(
    env_fn: Callable[[], Any] | str, num_envs: int, *, context: str | None = None, use_caller: bool | None = None
) -> Plan:
    """Try environments, with at most 64 steps in all, and choose the workers for ``num_envs`` of them.

    Where worker processes are not possible, as on Windows, nothing is tried: the calling process steps all of them.

    Args:
        env_fn: A function that builds the environment, called in a temporary process, or an id in Gymnasium's registry.
        num_envs: The number of environments.
        context: The start method of that process.
        use_caller: ``False`` excludes choices in which the calling process steps environments itself; ``None`` excludes
            these if they are less than a tenth faster; ``True`` excludes none.

    Raises:
        NotImplementedError: ``use_caller=False`` where worker processes are not possible.
        ValueError: ``num_envs`` is not a positive int, or ``context`` is unknown.
        Exception: The environment cannot be built, or not in time.
    """
    check_option("num_envs", num_envs)
    if use_caller is False:
        require_processes("vecenv.plan with use_caller=False")
    if isinstance(env_fn, str):
        env_fn = partial(gymnasium.make, env_fn)
    times, independence = EnvProbe([env_fn] * num_envs, multiprocessing.get_context(context)).measure()
    return choose(times, num_envs, usable_cores(), use_caller=use_caller, independence=independence)
