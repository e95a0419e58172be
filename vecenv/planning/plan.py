"""How many workers? Step one real environment for a moment, in a process of its own, and count.

What matters is how long a step takes and how much of that is waiting (for a simulator elsewhere, a socket, a sleep). A step
that computes wants as many processes as there are cores, one of which may be the caller itself; a step that waits wants more
processes than cores; and a step that is over before another process could be woken wants no other process at all. The costs
of handing a batch over that the choice rests on are the constants below, measured with ``python -m bench micro``, times how
slow this machine is, and how much slower while others compute too: two usable cores may be two threads of one.
"""

from __future__ import annotations

import functools
import math
import multiprocessing
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Final

import gymnasium

from vecenv.planning.scout import Probe, probe
from vecenv.system.cores import usable_cores
from vecenv.system.spawning import require_processes, why_no_processes

__all__ = ["Plan", "caller_share", "choose", "in_batches", "plan"]

# Seconds. What a batch costs apart from the environments' own steps.
PER_ENV: Final = 0.5e-6  # action in, observation, reward and flags out
IN_PROCESS: Final = 6.5e-6  # a batch in this process
WITH_CALLER: Final = 15e-6  # the caller's share, and workers that spin on cores of their own
HANDING_OUT: Final = 1.5e-6  # of which the caller is busy while its workers step already
BY_WORKERS: Final = 28e-6  # as many workers as cores
WAKE: Final = 12e-6  # each worker more than cores: a sleep and a wake-up

RECEIVING: Final = 50e-6  # a first-ready batch, taken in and sent again by a caller whose caches are cold ...
PER_MESSAGE: Final = 6e-6  # ... and each message of it

_WAITS: Final = 0.3  # from this share of waiting on, more processes than cores are considered
_SAFETY: Final = 1.1  # what may be paid for worker processes, which a crash of an environment does not leave


@dataclass(frozen=True, slots=True)
class Plan:
    """A choice of workers, with its reasons; ``print`` it.

    Attributes:
        num_envs: For how many environments.
        num_workers: Worker processes; 0: none.
        use_caller: The calling process steps a share itself.
        caller_share: How many environments that share is.
        reason: Why, in a sentence.
        probe: What was measured.
        cores: Usable cores.
        estimates: Expected seconds a batch of every choice that was weighed.
        batch_size: With ``batch_size="auto"``: how many environments ``recv`` returns; ``num_envs``: a lock-step.
        rows_at_once: With ``batch_size="auto"``: ``send`` asks a worker for at most that many in one message.
        batch_reason: Why, in a sentence.
    """

    num_envs: int
    num_workers: int
    use_caller: bool
    caller_share: int
    reason: str
    probe: Probe
    cores: int
    estimates: dict[str, float]
    batch_size: int | None = None
    rows_at_once: int | None = None
    batch_reason: str = ""

    def __str__(self) -> str:
        probed = self.probe
        lines = [f"Plan for {self.num_envs} environments on {self.cores} usable cores:"]
        if probed.failure:
            lines.append(f"  no step could be timed: {probed.failure}")
        else:
            timed = f"{probed.waits:.0%} of it waiting ({probed.steps} steps measured)"
            busy = f"{probed.pace * probed.crowding:.1f} while another process computes"
            lines.append(f"  a step takes {probed.step * 1e6:.1f} us, {timed}")
            slower = f"{probed.pace:.1f} times as long as on the machine the estimates were made on"
            lines.append(f"  Python takes {slower}, {busy}")
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


def choose(probed: Probe, num_envs: int, cores: int, *, isolate: bool | None = None) -> Plan:
    """The fastest way to step ``num_envs`` such environments, or one that is nearly as fast and safe; where there can be no
    processes, the only one.

    Args:
        probed: What was measured.
        num_envs: How many environments.
        cores: Usable cores.
        isolate: ``True``: only worker processes will do; restarts and timeouts need something that can be killed. ``None``:
            they are taken where that costs less than a tenth, because a crash of an environment does not end the program
            then. ``False``: whatever is fastest.
    """
    if probed.failure:
        workers = min(cores, num_envs)
        reason = "the environment failed while it was tried, so it is kept out of your program's process"
        return Plan(num_envs, workers, False, 0, reason, probed, cores, {})
    waiting_step = max(probed.step - probed.cpu, 0.0)
    # Who makes two cores slow each other down may as well be a neighbour on the same hardware, who slows a lone process down
    # too, and comes and goes; so a lone process is expected half way between the two.
    crowding = min(probed.crowding, 2.0) if cores > 1 else 1.0
    lonely, crowded = probed.pace * math.sqrt(crowding), probed.pace * crowding
    alone = waiting_step + probed.cpu * math.sqrt(crowding) + PER_ENV * lonely
    computing_step = probed.cpu * crowding + PER_ENV * crowded
    step = waiting_step + computing_step
    if (why := why_no_processes()) is not None and not isolate:
        seconds = IN_PROCESS * lonely + num_envs * alone
        return Plan(num_envs, 0, False, 0, f"in this process: {why}", probed, cores, {"in this process": seconds})
    choices: dict[str, tuple[float, int, int]] = {}  # name -> seconds a batch, processes, the caller's share
    if not isolate:
        choices["in this process"] = (IN_PROCESS * lonely + num_envs * alone, 0, num_envs)
        if cores > 1 and num_envs > 1:
            workers = min(cores - 1, num_envs - 1)
            share = caller_share(num_envs, workers, probed.step / probed.pace)
            slower = max(HANDING_OUT * crowded + share * step, -(-(num_envs - share) // workers) * step)
            choices[f"{workers} + caller"] = (WITH_CALLER * crowded + slower, workers, share)
    workers = min(cores, num_envs)
    choices[f"{workers} workers"] = (BY_WORKERS * crowded + -(-num_envs // workers) * step, workers, 0)
    if probed.waits > _WAITS:
        for processes in sorted({min(num_envs, cores * 2**power) for power in range(1, 6)}):
            waiting = -(-num_envs // processes) * step
            wake = WAKE * crowded
            computing = num_envs * computing_step / cores + processes * wake / cores
            expected = BY_WORKERS * crowded + max(waiting, computing) + processes * wake / 4
            choices[f"{processes} workers"] = (expected, processes, 0)
    best = min(choices.values())
    safest = min(choice for choice in choices.values() if not choice[2])
    safe = bool(best[2]) and isolate is None and safest[0] < best[0] * _SAFETY
    _, processes, share = safest if safe else best
    reason = "it steps on every usable core"
    if processes == 0:
        reason = f"a batch of {num_envs} such steps is over before another process pays"
    elif processes > cores:
        reason = f"steps that wait {probed.waits:.0%} of their time overlap in more processes than cores"
    elif isolate:
        reason = "restarts, timeouts, variables or isolate=True need processes, one per usable core"
    elif safe:
        reason = "nearly the fastest, and a crash of an environment does not end the program"
    if share:
        reason += "; a crash of an environment that the caller steps ends the program"
    estimates = {key: value[0] for key, value in choices.items()}
    use_caller = share > 0 and processes > 0
    return Plan(num_envs, processes, use_caller, share if use_caller else 0, reason, probed, cores, estimates)


def in_batches(whole: Plan) -> Plan:
    """A plan with what ``batch_size="auto"`` is: halves, or a lock-step where they would not pay.

    While the caller looks at one half, the workers step the other, and a late environment holds up its own half only. That
    costs the caller a batch more, which has to be little beside what a worker steps meanwhile. A worker that has been sent
    two messages goes on while the caller takes its answer in; these are two answers to take in, so the caller needs a free
    core.
    """
    probed, count, workers = whole.probe, whole.num_envs, whole.num_workers
    half = max(count // 2, 1)
    if probed.failure or count == 1 or not workers or whole.use_caller:
        why = "no step could be timed" if probed.failure else "no environment can be ahead of another"
        return replace(whole, batch_size=count, batch_reason=f"a lock-step: {why}")
    own = -(-count // workers)
    free = probed.waits > _WAITS or whole.cores > workers
    meanwhile = -(-half // workers) * probed.step
    once, twice = ((RECEIVING + PER_MESSAGE * min(workers * n // 2 or 1, half)) * probed.pace for n in (1, 2))
    times = f"half of them are stepped in {meanwhile * 1e6:,.0f} us, and a batch costs the caller {once * 1e6:,.0f} us"
    if meanwhile < (once if free else 2 * once):
        return replace(whole, batch_size=count, batch_reason=f"a lock-step: {times}")
    if own > 1 and free and meanwhile >= twice:
        split = -(-own // 2)
        reason = f"halves: {times}; {split} of a worker's {own} in one message, so that it goes on while others are taken in"
        return replace(whole, batch_size=half, rows_at_once=split, batch_reason=reason)
    return replace(whole, batch_size=half, batch_reason=f"halves: {times}")


def plan(
    env_fn: Callable[[], Any] | str, num_envs: int, *, context: str | None = None, isolate: bool | None = None
) -> Plan:
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
    if num_envs < 1:
        raise ValueError(f"`num_envs` must be an int from 1 on, got {num_envs!r}.")
    if isolate:
        require_processes("vecenv.plan with isolate=True")
    if isinstance(env_fn, str):
        env_fn = functools.partial(gymnasium.make, env_fn)
    return choose(probe(env_fn, multiprocessing.get_context(context)), num_envs, usable_cores(), isolate=isolate)
