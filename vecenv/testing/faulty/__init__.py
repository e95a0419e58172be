"""Environments that go wrong on purpose, to test an engine, or your own training loop, against what really
happens.

A fault is a function. It is handed what the environment was about to return (``(observation, info)`` or the
five values of a step) and does one bad thing: it kills the process, raises, hangs, or hands back something
else. :data:`FAULTS` gives each of them a name, and :class:`FaultyEnv` sets one off inside any environment at
a chosen step, reset, seed or action::

    envs = vecenv.AsyncVectorEnv(
        [lambda: FaultyEnv(gymnasium.make("CartPole-v1"), "segfault", step=1000)] * 8, on_failure="restart"
    )

Faults are real: ``segfault`` reads address zero, ``hold_gil`` deadlocks in C, ``kill`` sends SIGKILL. Nothing
is simulated, because a simulated crash is reported by code that a real crash never reaches. So do not call
them in a process you need.

:class:`WitnessEnv` is the honest counterpart: its observations say which environment, life, episode and step
they belong to, and carry a checksum, so that a shifted, repeated or torn row cannot pass for a right one.
"""

from __future__ import annotations

from vecenv.testing.faulty.envs import (
    FaultyConstructor,
    FaultyEnv,
    NestedEnv,
    UnloadableConstructor,
    UnpicklableConstructor,
    WitnessEnv,
)  # fmt: skip
from vecenv.testing.faulty.faults import (
    FAULTS,
    FOREVER,
    HUGE_INFO_BYTES,
    LEAK_BYTES,
    EvilElsewhereError,
    EvilError,
    Fault,
    KeywordOnlyError,
    TwoArgumentsError,
    UnpicklableError,
    UnprintableError,
)  # fmt: skip

__all__ = [
    "FAULTS",
    "FOREVER",
    "HUGE_INFO_BYTES",
    "LEAK_BYTES",
    "EvilElsewhereError",
    "EvilError",
    "Fault",
    "FaultyConstructor",
    "FaultyEnv",
    "KeywordOnlyError",
    "NestedEnv",
    "TwoArgumentsError",
    "UnloadableConstructor",
    "UnpicklableConstructor",
    "UnpicklableError",
    "UnprintableError",
    "WitnessEnv",
]
