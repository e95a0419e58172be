"""The codec for Atari emulators, with the action that a sticky emulator repeats.

``cloneState(include_rng=True)`` has the console, the game and the generator, but not the previous action, which the emulator
repeats with ``repeat_action_probability``. No call of ALE reads it, and it depends on past draws. So an experiment finds it:
the generator in a state is set so that it repeats for ever, the emulator plays some frames of the unknown action from there,
and then the same frames of each action in turn. The action that plays them alike is the previous one, or continues exactly
as the previous one does. Then the emulator gets its own state again; its picture is one frame late until it steps.
"""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Any, Final

from vecenv.errors import NotRestorable, SnapshotMismatch
from vecenv.state.codecs import Codec, put

__all__: list[str] = []

_SETTINGS: Final = (
    ("getFloat", "repeat_action_probability"), ("getInt", "frame_skip"), ("getBool", "color_averaging"),
    ("getInt", "max_num_frames_per_episode"),
)  # fmt: skip
_MISSED: Final = 1e-9
"""The highest probability that the previous action is repeated for more frames than are compared."""
_GENERATOR: Final = re.compile(rb"\d+(?: \d+){623,624}")
"""A Mersenne Twister as text: 624 words and, where the standard library writes it, the place."""
_LOWEST: Final = b"0"
_HIGHEST: Final = b"316513203"
"""A word that gives 2**32 - 1, as :data:`_LOWEST` gives 0."""


def _settings(ale: Any) -> Any:
    return [getattr(ale, how)(name) for how, name in _SETTINGS], ale.getAvailableModes(), ale.getMinimalActionSet()


def _save(ale: Any) -> Any:
    state = ale.cloneState(include_rng=True)
    return sys.modules["ale_py"].__version__, _settings(ale), state, _previous_action(ale, state)


def _open(ale: Any, state: Any) -> Any:
    version, settings, emulator, previous = state
    if version != (here := sys.modules["ale_py"].__version__):
        raise SnapshotMismatch(f"it was played by ALE {version}, and this is {here}")
    if settings != (here := _settings(ale)):
        raise SnapshotMismatch(f"its emulator has other settings: {here[0]}, the snapshot {settings[0]}, or another game")
    return emulator, previous, None if previous is None else _drawing(emulator, _HIGHEST)


def _load(ale: Any, state: Any) -> None:
    emulator, previous, obeying = state
    if previous is not None:
        ale.restoreState(obeying)
        ale.act(*previous)
    ale.restoreState(emulator)


def _previous_action(ale: Any, state: Any) -> Any:
    """(action, strength) that the emulator repeats, or that continues exactly alike; ``None``: it repeats nothing."""
    sticky = ale.getFloat("repeat_action_probability")
    if sticky <= 0:
        return None
    if ale.getBool("color_averaging"):
        raise NotRestorable("ALE blends each frame with the one before (color_averaging), which it does not give away")
    frames = 1 if sticky >= 1 else math.ceil(math.log(_MISSED, sticky) / max(1, ale.getInt("frame_skip")))
    repeating, obeying = _drawing(state, _LOWEST), _drawing(state, _HIGHEST)
    every = ale.getLegalActionSet()
    likely = ale.getMinimalActionSet()
    whole = [(action, 1.0) for action in (*likely, *(other for other in every if other not in likely))]

    def goes_on_as(action: Any) -> bool:
        ale.restoreState(obeying)
        return all(_frame(ale, *action) == frame for frame in wanted)

    try:
        ale.restoreState(repeating)
        wanted = [_frame(ale, every[0]) for _ in range(frames)]  # of the unknown action: first, while it is there
        found = next(filter(goes_on_as, chain(whole, _weaker(ale, obeying, wanted[0], whole))), None)
        if found is None:
            raise NotRestorable("none of its actions goes on as its previous one does, which ALE does not give away")
        ale.restoreState(obeying)
        ale.act(*found)
    finally:
        ale.restoreState(state)
    return found


def _frame(ale: Any, action: Any, strength: float = 1.0) -> tuple[float, bytes]:
    """Reward and state after a frame."""
    return ale.act(action, strength), ale.cloneState(include_rng=False).serialize()


def _weaker(ale: Any, obeying: Any, wanted: tuple[float, bytes], whole: Sequence[tuple[Any, float]]) -> Iterator[Any]:
    """Actions that turn a paddle as far as one frame did: continuous actions have a strength."""
    for action, _ in whole:
        states = []
        for strength in (0.0, 0.5, 1.0):
            ale.restoreState(obeying)
            states.append(_frame(ale, action, strength)[1])
        if len({*map(len, states), len(wanted[1])}) > 1:
            continue
        for place in range(len(wanted[1]) - 3):
            here, none, half, full = (
                int.from_bytes(one[place : place + 4], "little", signed=True) for one in (wanted[1], *states)
            )
            if full != none and abs(full - none - 2 * (half - none)) < 3 and 0 < (here - none) / (full - none) < 1:
                yield action, (abs(here - none) + 0.5) / abs(full - none)


def _drawing(state: Any, word: bytes) -> Any:
    """A state with a generator that draws one number only."""
    whole = state.serialize()
    *_, found = [None, *_GENERATOR.finditer(whole)]  # the first one is the console's
    words = [word] * 624 + ([b"0"] if found and found[0].count(b" ") == 624 else [])
    room = len(found[0]) - sum(map(len, words)) - len(words) + 1 if found else -1
    if found is None or room < 0:
        raise NotRestorable("the state that this version of ALE gives has no generator that vecenv knows how to read")
    kind: Any = type(state)
    other = kind.__new__(kind)
    text = b" ".join(words[:-1]) + b" " * (room + 1) + words[-1]
    other.__setstate__(whole[: found.start()] + text + whole[found.end() :])
    return other


put("ale_py._ale_py.ALEInterface", Codec(_save, _load, _open))
