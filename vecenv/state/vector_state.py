"""The state of a whole vector environment: snapshots of all rows, counters, seeds of restarts and generators of spaces."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from gymnasium.vector import AutoresetMode

from vecenv.errors import SnapshotMismatch
from vecenv.front.driver import Counters
from vecenv.state.codecs import Codec, rule_for
from vecenv.state.snapshots import FORMAT, Snapshot, Snapshots, StateDict, parse_snapshots
from vecenv.system.signals import raise_if_from_handler

Counts = tuple[int, int, int]
"""Steps, resets and restarts."""


class VectorState(NamedTuple):
    """The content of a ``state_dict()``.

    Attributes:
        snapshots: One per row.
        counts: Steps, resets and restarts.
        seeds: The source of the seeds of restarts.
        generators: Pairs of a space and the parsed state of its generators, or of a space and ``None`` if it had none.
    """

    snapshots: list[Snapshot]
    counts: Counts
    seeds: np.random.SeedSequence
    generators: list[tuple[Any, Any]]

    def load(self, counters: Counters, failures: Any) -> None:
        """Load the counts and the generators, but not the snapshots and the seeds."""
        steps, resets, failures.restarts = self.counts
        counters.load(steps, resets)
        self.load_generators()

    def load_generators(self) -> None:
        """Load the generators of the spaces."""
        for space, state in self.generators:
            if state is not None:
                _space_codec(space).load(space, state)


def pack_state(
    snapshots: Sequence[Snapshot], mode: AutoresetMode, counts: Counts, seeds: np.random.SeedSequence, spaces: Sequence[Any]
) -> dict[str, Any]:
    """Return the dict for ``state_dict()``."""
    return StateDict(
        format=FORMAT, num_envs=len(snapshots), autoreset_mode=mode.name, snapshots=Snapshots(snapshots), counters=counts,
        seeds=seeds.state, spaces=[_space_codec(space).save(space) for space in spaces],
    )  # fmt: skip


def require_entries(state: Any, own: Mapping[str, Any], *names: str) -> None:
    """Raise if a ``state_dict()`` lacks an entry, or if one differs from its value in ``own``.

    Raises:
        SnapshotMismatch: An entry is missing or differs; the text names it.
    """
    for key in (*own, *names):
        if not isinstance(state, Mapping) or key not in state:
            raise SnapshotMismatch(f"this is not a state_dict() of a vector environment: it has no {key!r}")
    for key, value in own.items():
        if not np.array_equal(state[key], value):  # a damaged entry may be an array
            raise SnapshotMismatch(f"the saved {key} is {state[key]!r}, and that of this vector environment {value!r}")


def read_state(state: Any, num_envs: int, mode: AutoresetMode, spaces: Sequence[Any]) -> VectorState:
    """Parse the result of :func:`pack_state`.

    Raises:
        SnapshotMismatch: The state does not fit, or is damaged.
    """
    own = {"format": FORMAT, "num_envs": num_envs, "autoreset_mode": mode.name}
    require_entries(state, own, "snapshots", "counters", "seeds", "spaces")
    snapshots = parse_snapshots(state["snapshots"], range(num_envs))
    parse_rest = partial(_parse_counts_seeds_and_spaces, state, spaces)
    try:
        return VectorState(snapshots, *parse_rest())
    except Exception as error:
        raise_if_from_handler(error, parse_rest)
        text = f"the counters, seeds or spaces of this state_dict() do not fit: {type(error).__name__}: {error}"
        raise SnapshotMismatch(text) from error


def _parse_counts_seeds_and_spaces(
    state: Mapping[str, Any], spaces: Sequence[Any]
) -> tuple[Counts, np.random.SeedSequence, list[Any]]:
    generators = [
        (space, saved if saved is None else _space_codec(space).prepare(space, saved))
        for space, saved in zip(spaces, state["spaces"], strict=True)
    ]
    steps, resets, restarts = map(_parse_count, state["counters"])
    return (steps, resets, restarts), np.random.SeedSequence(**state["seeds"]), generators


def _space_codec(space: Any) -> Codec:
    codec = rule_for(type(space))
    assert isinstance(codec, Codec)
    return codec


def _parse_count(number: Any) -> int:
    """Return a count, or raise ValueError."""
    if isinstance(number, bool) or not isinstance(number, int) or number < 0:
        raise ValueError(f"{number!r} is not a count")
    return number
