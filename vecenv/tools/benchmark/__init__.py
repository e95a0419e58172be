"""Measuring vector environments side by side.

Throughput on a shared machine drifts by tens of per cent within a minute, so figures taken one after
another say little about each other. Here every candidate is built first and stays alive; then each round
runs all of them for a moment, in a new random order, and a ratio is only ever formed between two samples of
one round. Each candidate lives in a process of its own, its *host*, which plays the part of the training
program: one that dies, hangs or pins itself to a core spoils no row but its own.

One unit of work is one ``env.step`` or ``env.reset``, and the units done in a second are called steps per
second throughout. The *limit* is the bare loop over the same environments and the same actions, run by as
many processes at once as there are usable cores, sharing nothing: no engine that starts from the same
environments can do more on this machine.

Before anything is timed, every vecenv candidate replays the trajectories of
``gymnasium.vector.SyncVectorEnv``: same seeds, same actions, equal to the last bit.
"""

from vecenv.tools.benchmark.candidates import (
    bare_lockstep_candidate,
    bare_pipes_candidate,
    default_candidates,
    gymnasium_candidate,
    limit_candidate,
    scale_candidates,
    vecenv_candidate,
)
from vecenv.tools.benchmark.compare import (
    Interrupted,
    Report,
    Row,
    Summary,
    TrajectoryMismatch,
    compare,
    machine,
    ratio,
)
from vecenv.tools.benchmark.hosts import Candidate, HostFailed, Live, Progress, Unavailable, started
from vecenv.tools.benchmark.plots import draw_bars, draw_scale
from vecenv.tools.benchmark.runners import (
    SEED,
    BareLockstep,
    BareLoop,
    BarePipes,
    EnvFn,
    FirstReadyRunner,
    Runner,
    Sample,
    Stream,
    VectorRunner,
    first_difference,
    make_env,
    run_for,
    sample_actions,
)

__all__ = [
    "SEED",
    "BareLockstep",
    "BareLoop",
    "BarePipes",
    "Candidate",
    "EnvFn",
    "FirstReadyRunner",
    "HostFailed",
    "Interrupted",
    "Live",
    "Progress",
    "Report",
    "Row",
    "Runner",
    "Sample",
    "Stream",
    "Summary",
    "TrajectoryMismatch",
    "Unavailable",
    "VectorRunner",
    "bare_lockstep_candidate",
    "bare_pipes_candidate",
    "compare",
    "default_candidates",
    "draw_bars",
    "draw_scale",
    "first_difference",
    "gymnasium_candidate",
    "limit_candidate",
    "machine",
    "make_env",
    "ratio",
    "run_for",
    "sample_actions",
    "scale_candidates",
    "started",
    "vecenv_candidate",
]
