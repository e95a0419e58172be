"""Decides how many workers step the environments, from the times of a few steps of one of them.

Two numbers decide: how long a step takes, and how much of that is waiting (for a simulator elsewhere, a socket, a sleep).
Steps that compute need one process per core, one of which may be the caller. Steps that wait need more processes than cores.
Steps that end before another process could wake up need no other process at all. The constants below are the costs of
handing a batch over, measured with ``python -m bench micro``. They are multiplied by how slow this machine is, and by how
much slower it is while other processes compute: two usable cores may be two threads of one.
"""

from __future__ import annotations

import functools
import math
import multiprocessing
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Final

import gymnasium

from vecenv.planning.options import check_option
from vecenv.planning.probe import EnvProbe, StepTimes
from vecenv.system.cores import usable_cores
from vecenv.system.spawning import require_processes, why_no_processes

__all__ = ["Plan", "caller_share", "choose", "in_batches", "plan", "workers_and_share"]

# Seconds. What a batch costs apart from the environments' own steps.
PER_ENV: Final = 0.5e-6  # action in, observation, reward and flags out
IN_PROCESS: Final = 6.5e-6  # a batch in this process
WITH_CALLER: Final = 15e-6  # the caller's share, and workers that spin on cores of their own
HANDING_OUT: Final = 1.5e-6  # of which the caller is busy while its workers step already
BY_WORKERS: Final = 28e-6  # as many workers as cores
WAKE: Final = 12e-6  # each worker more than cores: a sleep and a wake-up

RECEIVING: Final = 50e-6  # a first-ready batch, received and sent again by a caller whose caches are cold ...
PER_MESSAGE: Final = 6e-6  # ... and each message of it

_WAITS: Final = 0.3  # from this share of waiting on, more processes than cores are considered
_SAFETY: Final = 1.1  # the most that worker processes may cost, for a program that survives a crash of an environment


@dataclass(frozen=True, slots=True)
class Plan:
    """A choice of workers, with its reasons; ``print`` it.

    Attributes:
        num_envs: For how many environments.
        num_workers: Worker processes; 0: none.
        caller_share: How many environments the calling process steps beside its workers.
        reason: Why, in a sentence.
        probe: What was measured.
        cores: Usable cores.
        estimates: Expected seconds per batch of every choice that was compared.
        batch_size: With ``batch_size="auto"``: how many environments ``recv`` returns; ``num_envs``: a lock-step.
        rows_at_once: With ``batch_size="auto"``: ``send`` asks a worker for at most that many in one message.
        batch_reason: Why, in a sentence.
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

    @property
    def use_caller(self) -> bool:
        """Whether the calling process steps a share beside its workers."""
        return self.caller_share > 0

    def __str__(self) -> str:
        times = self.probe
        lines = [f"Plan for {self.num_envs} environments on {self.cores} usable cores:"]
        if times.failure:
            lines.append(f"  no step could be timed: {times.failure}")
        else:
            waiting = f"{times.waits:.0%} of it waiting ({times.steps} steps measured)"
            lines.append(f"  a step takes {times.step * 1e6:.1f} us, {waiting}")
            both = f"{times.pace:.1f} times, {times.pace * times.crowding:.1f} times if another process computes"
            lines.append(f"  time that Python takes here, compared with the machine of the cost model: {both}")
        for name, seconds in sorted(self.estimates.items(), key=lambda entry: entry[1]):
            lines.append(f"  {name:<28} {self.num_envs / seconds:>12,.0f} steps per second expected")
        share = f" (the caller steps {self.caller_share} environments itself)" if self.use_caller else ""
        lines.append(f"num_workers={self.num_workers}, use_caller={self.use_caller}{share}: {self.reason}")
        if self.batch_size is not None:
            lines.append(f"batch_size={self.batch_size}: {self.batch_reason}")
        return "\n".join(lines)


def caller_share(num_envs: int, workers: int, step: float) -> int:
    """How many environments the caller steps so that it and its workers are done at the same time.

    Most of the caller's work, handing out actions and collecting the batch, is done while no environment is stepped; its
    share is smaller by as many steps as the rest takes.
    """
    even = num_envs / (workers + 1)
    less = HANDING_OUT / max(step + PER_ENV, 1e-9) * workers / (workers + 1)
    return min(max(round(even - less), 1), max(num_envs - workers, 1))


def choose(times: StepTimes, num_envs: int, cores: int, *, isolate: bool | None = None) -> Plan:
    """The fastest way to step ``num_envs`` such environments, or one that is nearly as fast and safe; without processes, the
    only one.

    Args:
        times: What was measured.
        num_envs: How many environments.
        cores: Usable cores.
        isolate: ``True``: only worker processes will do; restarts and timeouts need something that can be killed. ``None``:
            worker processes where they cost less than a tenth, because the program then survives a crash of an environment.
            ``False``: the fastest.
    """
    if times.failure:
        reason = "the environment failed while it was tried, so it is kept out of your program's process"
        return Plan(num_envs, min(cores, num_envs), 0, reason, times, cores)
    choices = _choices(times, num_envs, cores, isolate)
    estimates = {name: choice[0] for name, choice in choices.items()}
    best = min(choices.values())
    if (why := why_no_processes()) is not None and not isolate:
        return Plan(num_envs, 0, 0, f"in this process: {why}", times, cores, estimates)
    safest = min(choice for choice in choices.values() if not choice[2])
    safe = bool(best[2]) and isolate is None and safest[0] < best[0] * _SAFETY
    _, processes, share = safest if safe else best
    reason = "it steps on every usable core"
    if processes == 0:
        reason = f"a batch of {num_envs} such steps is over before another process pays"
        share = 0
    elif processes > cores:
        reason = f"steps that wait {times.waits:.0%} of their time overlap in more processes than cores"
    elif isolate:
        reason = "restarts, timeouts, variables or isolate=True need processes, one per usable core"
    elif safe:
        reason = "nearly the fastest, and a crash of an environment does not end the program"
    if share or not processes:
        reason += "; a crash of an environment that the caller steps ends the program"
    return Plan(num_envs, processes, share, reason, times, cores, estimates)


def _choices(times: StepTimes, num_envs: int, cores: int, isolate: bool | None) -> dict[str, tuple[float, int, int]]:
    """Name -> (expected seconds per batch, worker processes, environments that the caller steps)."""
    waiting_step = max(times.step - times.cpu, 0.0)
    # Two cores may slow each other down because of a neighbour on the same hardware, which slows a single process down as
    # well, and comes and goes; so a single process is expected half way between the two.
    crowding = min(times.crowding, 2.0) if cores > 1 else 1.0
    lonely, crowded = times.pace * math.sqrt(crowding), times.pace * crowding
    alone = waiting_step + times.cpu * math.sqrt(crowding) + PER_ENV * lonely
    computing_step = times.cpu * crowding + PER_ENV * crowded
    step = waiting_step + computing_step
    choices: dict[str, tuple[float, int, int]] = {}
    if not isolate:
        choices["in this process"] = (IN_PROCESS * lonely + num_envs * alone, 0, num_envs)
        if why_no_processes() is not None:
            return choices
        if cores > 1 and num_envs > 1:
            workers = min(cores - 1, num_envs - 1)
            share = caller_share(num_envs, workers, times.step / times.pace)
            slower = max(HANDING_OUT * crowded + share * step, -(-(num_envs - share) // workers) * step)
            name = f"{workers} worker{'s' * (workers != 1)} + this process"
            choices[name] = (WITH_CALLER * crowded + slower, workers, share)
    workers = min(cores, num_envs)
    choices[f"{workers} workers"] = (BY_WORKERS * crowded + -(-num_envs // workers) * step, workers, 0)
    for power in range(1, 6) if times.waits > _WAITS else ():
        processes = min(num_envs, cores * 2**power)
        wake = WAKE * crowded
        computing = num_envs * computing_step / cores + processes * wake / cores
        seconds = BY_WORKERS * crowded + max(-(-num_envs // processes) * step, computing) + processes * wake / 4
        choices[f"{processes} workers"] = (seconds, processes, 0)
    return choices


def in_batches(whole: Plan) -> Plan:
    """The same plan with ``batch_size="auto"``: halves, or a lock-step where halves would not pay.

    While the caller handles one half, the workers step the other, and a late environment delays its own half only. The
    caller has to handle one batch more for that, which must be short beside the steps of the workers meanwhile. A worker
    that was sent two messages goes on while the caller reads its first answer; that makes two answers to read, so the
    caller needs a free core.
    """
    times, count, workers = whole.probe, whole.num_envs, whole.num_workers
    half = max(count // 2, 1)
    if times.failure or count == 1 or not workers or whole.use_caller:
        why = "no step could be timed" if times.failure else "no environment can be ahead of another"
        return replace(whole, batch_size=count, batch_reason=f"a lock-step: {why}")
    own = -(-count // workers)
    free = times.waits > _WAITS or whole.cores > workers
    meanwhile = -(-half // workers) * times.step
    once, twice = ((RECEIVING + PER_MESSAGE * min(workers * n // 2 or 1, half)) * times.pace for n in (1, 2))
    reason = f"half of them are stepped in {meanwhile * 1e6:,.0f} us, and a batch costs the caller {once * 1e6:,.0f} us"
    if meanwhile < (once if free else 2 * once):
        return replace(whole, batch_size=count, batch_reason=f"a lock-step: {reason}")
    at_once = -(-own // 2) if own > 1 and free and meanwhile >= twice else None
    if at_once:
        reason += f"; {at_once} of a worker's {own} in one message, so that it goes on while others are taken in"
    return replace(whole, batch_size=half, rows_at_once=at_once, batch_reason=f"halves: {reason}")


def workers_and_share(
    num_envs: int,
    num_workers: int | str | None,
    use_caller: bool,
    isolate: bool | None,
    times: Callable[[], StepTimes],
    batch_size: int | str | None = None,
) -> tuple[int, int, Plan | None]:
    """How many worker processes, how many environments the caller steps itself, and the plan if one was made.

    ``times`` steps one environment for a moment; it is called only where the answer depends on it.
    """
    cores = usable_cores()
    if batch_size == "auto":
        processes, share, chosen = workers_and_share(num_envs, num_workers, use_caller, isolate, times)
        if chosen is None:
            chosen = Plan(num_envs, processes, share if processes else 0, "as asked for", times(), cores)
        elif chosen.use_caller:  # a caller that steps environments cannot receive a batch meanwhile
            halves = in_batches(choose(chosen.probe, num_envs, cores, isolate=True))
            if halves.batch_size != num_envs:
                return halves.num_workers, 0, replace(halves, reason="first-ready batches want a caller that is free")
        return processes, share, in_batches(chosen)
    if num_workers == "auto" and not use_caller:
        chosen = choose(times(), num_envs, cores, isolate=isolate)
        return chosen.num_workers, chosen.caller_share if chosen.num_workers else num_envs, chosen
    if num_workers is None or num_workers == "auto":
        processes = max(cores - 1, 1) if use_caller else num_envs
    else:
        processes = int(num_workers)
    processes = min(processes, num_envs - 1 if use_caller else num_envs)
    if not processes or not use_caller:
        return processes, 0 if processes else num_envs, None
    measured = times()
    if measured.failure:
        return processes, max(num_envs // (processes + 1), 1), None
    return processes, caller_share(num_envs, processes, measured.step), None


def plan(env_fn: Callable[[], Any] | str, num_envs: int, *, context: str | None = None, isolate: bool | None = None) -> Plan:
    """Measure one environment and say how to run ``num_envs`` of them here.

    Args:
        env_fn: Builds the environment, in a process of its own; or an id of Gymnasium's registry.
        num_envs: How many there will be.
        context: Start method of that process.
        isolate: ``True`` leaves out the choices in which the calling process steps environments itself, ``None`` those that
            are less than a tenth faster, ``False`` none.

    Where there can be no worker processes, as on Windows, the environment is measured in this one.

    Raises:
        NotImplementedError: ``isolate`` where there can be no worker processes.
    """
    check_option("num_envs", num_envs)
    if isolate:
        require_processes("vecenv.plan with isolate=True")
    if isinstance(env_fn, str):
        env_fn = functools.partial(gymnasium.make, env_fn)
    times = EnvProbe([env_fn], multiprocessing.get_context(context)).times()
    return choose(times, num_envs, usable_cores(), isolate=isolate)
