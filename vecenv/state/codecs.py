"""The rules, by class, for objects that are not saved by copying their attributes: codecs, refusals, objects that stay.

Library classes are registered by name, so that vecenv imports only libraries that the environment has imported.
"""

from __future__ import annotations

import math
import pickle
import random
import re
import sys
import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, Final, TypeVar

import gymnasium
import numpy as np

from vecenv.errors import NotRestorable, SnapshotMismatch
from vecenv.system.signals import call_with_fallback


@dataclass(frozen=True, slots=True)
class Codec:
    """Functions that save the content of an object, and load it into another object, which keeps its identity.

    Attributes:
        save: Object -> a state that can be pickled; ``None``: there is nothing to save.
        load: (object, state): loads the state into the object; safe to repeat.
        prepare: (object, state) -> state for ``load``; raises for a state that does not fit, and changes nothing.
        make: State -> a new object, used if there is none to load into; must raise for a state of another kind.
    """

    save: Callable[[Any], Any]
    load: Callable[[Any, Any], None]
    prepare: Callable[[Any, Any], Any] = lambda obj, state: state
    make: Callable[[Any], Any] | None = None


@dataclass(frozen=True, slots=True)
class Refused:
    """The rule for objects that cannot be saved, with the reason."""

    reason: str


@dataclass(frozen=True, slots=True)
class _Stays:
    """The rule for objects that are not saved, because they are shared or do not affect the results of steps."""


STAYS: Final = _Stays()

Rule = Codec | Refused | _Stays

_T = TypeVar("_T")
_BY_NAME: dict[str, Rule] = {}
_CACHES: Final[list[dict[type, Any]]] = []


class _Cache(dict[type, _T]):
    def __init__(self, function: Callable[[type], _T]) -> None:
        self._function = function

    def __missing__(self, kind: type) -> _T:
        return self.setdefault(kind, self._function(kind))


def cached_by_class(function: Callable[[type], _T]) -> Callable[[type], _T]:
    """Cache a function's result for each class until another rule is registered. A cached call costs one dict lookup."""
    _CACHES.append(_Cache(function))
    return _CACHES[-1].__getitem__


def registered_name(kind: type) -> str:
    """Return the name under which a class is registered: module and qualified name."""
    module = "__main__" if kind.__module__ == "__mp_main__" else kind.__module__  # the main program, imported by a worker
    return f"{module}.{kind.__qualname__}"


def register(cls: type | str, save: Callable[[Any], Any], load: Callable[[Any, Any], None]) -> None:
    """Register functions that save and load objects of a class, and of classes derived from it.

    Call it in every process that has environments with such objects: in the module that defines the class, or in ``env_fn``.

    Args:
        cls: The class of an environment, of a wrapper, or of any object in them; or its name, ``"module.QualifiedName"``.
        save: Object -> a state that can be pickled.
        load: (object, state): restores the state in an object of that class. vecenv may call it twice with the same state.
    """
    register_rule(cls if isinstance(cls, str) else registered_name(cls), Codec(save, load))


def register_rule(name: str, rule: Rule) -> None:
    """Register the rule for the class with this name."""
    _BY_NAME[name] = rule
    for cache in _CACHES:
        cache.clear()


@cached_by_class
def rule_for(kind: type) -> Rule | None:
    """Return the rule for objects of a class; ``None`` if their attributes are saved instead."""
    if callable(getattr(kind, "take_snapshot", None)) and callable(getattr(kind, "restore_snapshot", None)):
        check = _check_snapshot if hasattr(kind, "check_snapshot") else lambda obj, state: state
        return Codec(lambda obj: obj.take_snapshot(), lambda obj, state: obj.restore_snapshot(state), check)
    names = map(registered_name, kind.__mro__)
    return next((_BY_NAME[name] for name in names if name in _BY_NAME), None)


def _check_snapshot(obj: Any, state: Any) -> Any:
    """Return the state. The object's method ``check_snapshot(state)`` raises ``SnapshotMismatch`` if it does not fit."""
    obj.check_snapshot(state)
    return state


def make_from_state(state: Any) -> Any:
    """Return a new object with this state; ``None`` if no codec can make one."""
    for rule in _BY_NAME.values():
        make = rule.make if isinstance(rule, Codec) else None
        if make is not None and (found := call_with_fallback(partial(make, state), lambda _: None, Exception)) is not None:
            return found
    return None


# -- generators ----------------------------------------------------------------------------------------------------


def _save_generator(generator: np.random.Generator) -> Any:
    bits: Any = generator.bit_generator
    seeds = getattr(bits, "seed_seq", None)
    return bits.state, seeds.state if isinstance(seeds, np.random.SeedSequence) else None


def _prepare_generator(generator: np.random.Generator, state: Any) -> Any:
    saved, found = state[0]["bit_generator"], type(generator.bit_generator).__name__
    if saved != found:
        raise SnapshotMismatch(f"its generator is {saved}, and the environment's is {found}")
    return state


def _load_generator(generator: np.random.Generator, state: Any) -> None:
    bits: Any = generator.bit_generator
    bit_state, seeds = state
    if seeds is not None and repr(bits.seed_seq.state) != repr(seeds):  # not by `!=`, because the entropy may be an array
        bits.__init__(np.random.SeedSequence(**seeds))  # it then spawns the same child seeds
    bits.state = bit_state


def _make_generator(state: Any) -> np.random.Generator:
    generator = np.random.Generator(getattr(np.random, state[0]["bit_generator"])(0))
    _load_generator(generator, state)
    return generator


def _require_own(generator: Any, shared: Any, name: str) -> None:
    if generator is shared:
        raise NotRestorable(f"it is the generator of {name}, which all environments of a process share")


def _save_random_state(generator: Any) -> Any:
    _require_own(generator, np.random.mtrand._rand, "numpy.random")
    return generator.get_state(legacy=False)


def _prepare_random_state(generator: Any, state: Any) -> Any:
    saved, found = state["bit_generator"], generator.get_state(legacy=False)["bit_generator"]
    if saved != found:
        raise SnapshotMismatch(f"its generator is {saved}, and the environment's is {found}")
    np.random.RandomState(getattr(np.random, saved)(0)).set_state(state)
    return state


def _make_random_state(state: Any) -> Any:
    generator = np.random.RandomState(getattr(np.random, state["bit_generator"])(0))
    generator.set_state(state)
    return generator


def _save_python_random(generator: random.Random) -> Any:
    _require_own(generator, random._inst, "the module random")
    if own := vars(generator).keys() - {"gauss_next"}:
        raise NotRestorable(f"the generator {type(generator).__name__} has attributes of its own: {', '.join(sorted(own))}")
    return generator.getstate()


def _prepare_python_random(generator: random.Random, state: Any) -> Any:
    random.Random().setstate(state)
    return state


def _make_python_random(state: Any) -> Any:
    generator = random.Random()
    generator.setstate(state)
    return generator


register_rule(
    "numpy.random._generator.Generator", Codec(_save_generator, _load_generator, _prepare_generator, _make_generator)
)
register_rule(
    "numpy.random.mtrand.RandomState",
    Codec(_save_random_state, lambda one, state: one.set_state(state), _prepare_random_state, _make_random_state),
)
register_rule(
    "random.Random",
    Codec(_save_python_random, lambda one, state: one.setstate(state), _prepare_python_random, _make_python_random),
)
register_rule("random.SystemRandom", Refused("the operating system's random numbers cannot be repeated"))


def _save_torch(generator: Any) -> Any:
    _require_own(generator, sys.modules["torch"].default_generator, "torch")
    return generator.get_state().cpu().numpy()


def _load_torch(generator: Any, state: Any) -> None:
    import torch

    generator.set_state(torch.from_numpy(state))


register_rule("torch._C.Generator", Codec(_save_torch, _load_torch))

# -- spaces: only their generators ---------------------------------------------------------------------------------


def _spaces_in(space: Any) -> Iterator[Any]:
    """Yield a space, and all spaces inside it, at any depth."""
    yield space
    for value in vars(space).values():
        inner = value.values() if isinstance(value, Mapping) else value if isinstance(value, list | tuple) else (value,)
        for subspace in inner:
            if isinstance(subspace, gymnasium.Space):
                yield from _spaces_in(subspace)


@cached_by_class
def _may_contain_spaces(kind: type) -> bool:
    simple = kind.__name__ in ("Box", "Discrete", "MultiDiscrete", "MultiBinary", "Text")
    return not (simple and kind.__module__.startswith("gymnasium."))


def save_space(space: Any) -> Any:
    """Return the states of a space's generators, or ``None`` if it has none yet (the usual case)."""
    if getattr(space, "_np_random", None) is None and not _may_contain_spaces(type(space)):
        return None
    generators = [getattr(subspace, "_np_random", None) for subspace in _spaces_in(space)]
    return [generator and _save_generator(generator) for generator in generators] if any(generators) else None


def _load_space(space: Any, state: Any) -> None:
    for subspace, saved in zip(_spaces_in(space), state, strict=True) if state is not None else ():
        if saved is None:
            continue
        if getattr(subspace, "_np_random", None) is None:
            subspace._np_random = _make_generator(saved)
        else:
            _load_generator(subspace._np_random, saved)


def _prepare_space(space: Any, state: Any) -> Any:
    """Return the state. Raise if it does not fit the generators of the space."""
    for subspace, saved in zip(_spaces_in(space), state, strict=True) if state is not None else ():
        if saved is not None:
            own = subspace._np_random
            _prepare_generator(np.random.Generator(np.random.PCG64(0)) if own is None else own, saved)
            _make_generator(saved)
    return state


register_rule("gymnasium.spaces.space.Space", Codec(save_space, _load_space, _prepare_space))

# -- MuJoCo ----------------------------------------------------------------------------------------------------------


def model_bytes(model: Any) -> bytes:
    """Return the whole content of a MuJoCo model: options, physics and appearance."""
    import mujoco

    buffer = np.empty(mujoco.mj_sizeModel(model), np.uint8)
    mujoco.mj_saveModel(model, None, buffer)
    return buffer.tobytes()


def _iter_values(obj: Any, name: str) -> Iterator[tuple[str, Any]]:
    """Yield the name and the bytes of each value in a model and in its nested structures."""
    for key in dir(obj):
        value = None if key.startswith("_") or key == "signature" else getattr(obj, key, None)
        if isinstance(value, int | float | str | bytes | np.ndarray):
            yield f"{name}{key}", np.asarray(value).tobytes()
        elif type(value).__module__ == "mujoco._structs":
            yield from _iter_values(value, f"{name}{key}.")


def _save_physics(data: Any) -> Any:
    import mujoco

    return mujoco.__version__, pickle.dumps(data, pickle.HIGHEST_PROTOCOL)


_LATEST_PHYSICS: list[tuple[bytes, Any, bytes]] = []
"""A cache of the latest state that was read: its pickle, its ``MjData`` and the bytes of its model. Programs often load one
state into many environments, and MuJoCo takes milliseconds to read the model each time."""


def _read_physics(blob: bytes) -> tuple[Any, bytes]:
    for latest_blob, data, model in _LATEST_PHYSICS:
        if latest_blob == blob:
            return data, model
    data = pickle.loads(blob)
    model = model_bytes(data.model)
    _LATEST_PHYSICS[:] = [(blob, data, model)]
    return data, model


def _prepare_physics(data: Any, state: Any) -> Any:
    import mujoco

    version, blob = state
    if version != mujoco.__version__:
        raise SnapshotMismatch(f"it was simulated with MuJoCo {version}, and this is {mujoco.__version__}")
    saved, model = _read_physics(blob)
    if model != model_bytes(data.model):
        here = dict(_iter_values(data.model, ""))
        names = [name for name, value in _iter_values(saved.model, "") if here.get(name) != value]
        raise SnapshotMismatch(f"its MjModel differs in {', '.join(names[:8]) or 'its structure'}")
    return saved


def _load_physics(data: Any, state: Any) -> None:
    import mujoco

    mujoco.mj_copyData(data, data.model, state)


register_rule("mujoco._structs.MjData", Codec(_save_physics, _load_physics, _prepare_physics))
register_rule("mujoco._structs.MjModel", STAYS)

# -- Atari emulators, with the action that a sticky emulator repeats ------------------------------------------------
#
# `cloneState(include_rng=True)` contains the console, the game and the generator, but not the previous action, which the
# emulator repeats with probability `repeat_action_probability`. ALE does not expose this action, and it depends on past
# draws, so it is found by trial. First the generator is set to repeat always, and the emulator plays some frames of the
# unknown action. Then it is set to repeat never, and the emulator plays as many frames of each known action. The action
# with equal frames is the previous one, or equivalent to it. Finally the emulator's own state is restored; its screen is
# one frame ahead until the next step.

_ALE_SETTINGS: Final = (
    ("getFloat", "repeat_action_probability"), ("getInt", "frame_skip"), ("getBool", "color_averaging"),
    ("getInt", "max_num_frames_per_episode"), ("getBool", "truncate_on_loss_of_life"),
    ("getFloat", "continuous_action_threshold"), ("getInt", "reward_min"), ("getInt", "reward_max"),
)  # fmt: skip
_MAX_MISS_PROBABILITY: Final = 1e-9
"""The maximum probability that the previous action is repeated for more frames than are compared."""
_GENERATOR_PATTERN: Final = re.compile(rb"\d+(?: \d+){623,624}")
"""A Mersenne Twister as text: 624 words, and the position if the C++ standard library writes it."""
_WORD_DRAWING_MIN: Final = b"0"
_WORD_DRAWING_MAX: Final = b"316513203"
"""A word for which the generator draws 2**32 - 1. :data:`_WORD_DRAWING_MIN` is the one for 0."""


_ROM_CHECKSUMS: Final[dict[str, int]] = {}
"""Path -> checksum of each ROM that has been read."""


def _ale_settings(ale: Any) -> dict[str, Any]:
    path = ale.getString("rom_file")
    if path not in _ROM_CHECKSUMS:
        _ROM_CHECKSUMS[path] = zlib.crc32(Path(path).read_bytes())
    settings = {name: getattr(ale, getter)(name) for getter, name in _ALE_SETTINGS}
    return {"game": (Path(path).stem, _ROM_CHECKSUMS[path]), **settings}


def _save_ale(ale: Any) -> Any:
    state = ale.cloneState(include_rng=True)
    return sys.modules["ale_py"].__version__, _ale_settings(ale), state, _find_previous_action(ale, state)


def _prepare_ale(ale: Any, state: Any) -> Any:
    version, settings, emulator, previous = state
    if version != (own_version := sys.modules["ale_py"].__version__):
        raise SnapshotMismatch(f"it was played with ALE {version}, and this is {own_version}")
    for name, value in _ale_settings(ale).items():
        if settings[name] != value:
            raise SnapshotMismatch(f"its emulator has {name} {settings[name]}, and this one {value}")
    return emulator, previous, None if previous is None else _with_constant_draws(emulator, _WORD_DRAWING_MAX)


def _load_ale(ale: Any, state: Any) -> None:
    emulator, previous, never_repeating = state
    if previous is not None:
        ale.restoreState(never_repeating)
        ale.act(*previous)
    ale.restoreState(emulator)


def _find_previous_action(ale: Any, state: Any) -> Any:
    """Return the (action, strength) that the emulator repeats, or an equivalent one; ``None`` if it repeats none."""
    sticky = ale.getFloat("repeat_action_probability")
    if sticky <= 0:
        return None
    if ale.getBool("color_averaging"):
        raise NotRestorable("ALE blends each frame with the previous one (color_averaging), which it does not expose")
    frames = 1 if sticky >= 1 else math.ceil(math.log(_MAX_MISS_PROBABILITY, sticky) / max(1, ale.getInt("frame_skip")))
    always_repeating = _with_constant_draws(state, _WORD_DRAWING_MIN)
    never_repeating = _with_constant_draws(state, _WORD_DRAWING_MAX)
    legal = ale.getLegalActionSet()
    minimal = ale.getMinimalActionSet()
    full_strength = [(action, 1.0) for action in (*minimal, *(other for other in legal if other not in minimal))]

    def reproduces_frames(action: Any) -> bool:
        ale.restoreState(never_repeating)
        return all(_play_frame(ale, *action) == frame for frame in expected)

    try:
        ale.restoreState(always_repeating)
        # the frames of the unknown action come first, because the actions that are tried next replace it
        expected = [_play_frame(ale, legal[0]) for _ in range(frames)]
        weaker = _iter_weaker_actions(ale, never_repeating, expected[0], full_strength)
        found = next(filter(reproduces_frames, chain(full_strength, weaker)), None)
        if found is None:
            raise NotRestorable("ALE does not expose the previous action, and no legal action has the same effect")
        ale.restoreState(never_repeating)
        ale.act(*found)
    finally:
        ale.restoreState(state)
    return found


def _play_frame(ale: Any, action: Any, strength: float = 1.0) -> tuple[float, bytes]:
    """Play one frame. Return the reward and the state after it."""
    return ale.act(action, strength), ale.cloneState(include_rng=False).serialize()


def _iter_weaker_actions(
    ale: Any, never_repeating: Any, expected: tuple[float, bytes], full_strength: Sequence[tuple[Any, float]]
) -> Iterator[Any]:
    """Yield actions with a strength between 0 and 1 that turn a paddle as far as in the frame ``expected``."""
    for action, _ in full_strength:
        states = []
        for strength in (0.0, 0.5, 1.0):
            ale.restoreState(never_repeating)
            states.append(_play_frame(ale, action, strength)[1])
        if len({*map(len, states), len(expected[1])}) > 1:
            continue
        for offset in range(len(expected[1]) - 3):
            target, none, half, full = (
                int.from_bytes(content[offset : offset + 4], "little", signed=True) for content in (expected[1], *states)
            )
            if full != none and abs(full - none - 2 * (half - none)) < 3 and 0 < (target - none) / (full - none) < 1:
                yield action, (abs(target - none) + 0.5) / abs(full - none)


def _with_constant_draws(state: Any, word: bytes) -> Any:
    """Return a copy of a state with a generator that always draws the same number."""
    content = state.serialize()
    *_, found = [None, *_GENERATOR_PATTERN.finditer(content)]  # the last match, because the console's generator comes first
    words = [word] * 624 + ([b"0"] if found and found[0].count(b" ") == 624 else [])
    padding = len(found[0]) - sum(map(len, words)) - len(words) + 1 if found else -1
    if found is None or padding < 0:
        raise NotRestorable("the state that this version of ALE returns has no generator in a format that vecenv can read")
    kind: Any = type(state)
    changed = kind.__new__(kind)
    text = b" ".join(words[:-1]) + b" " * (padding + 1) + words[-1]
    changed.__setstate__(content[: found.start()] + text + content[found.end() :])
    return changed


register_rule("ale_py._ale_py.ALEInterface", Codec(_save_ale, _load_ale, _prepare_ale))

# -- objects that stay ----------------------------------------------------------------------------------------------------

for _name in (
    "gymnasium.envs.registration.EnvSpec", "gymnasium.envs.registration.WrapperSpec",
    "gymnasium.envs.mujoco.mujoco_rendering.MujocoRenderer", "gymnasium.envs.mujoco.mujoco_rendering.BaseRender",
    "pygame.surface.Surface", "pygame.Surface", "pygame.time.Clock", "pygame.font.Font", "pygame.freetype.Font",
    "builtins.module",
):  # fmt: skip
    register_rule(_name, STAYS)

# -- objects that are refused -----------------------------------------------------------------------------------------------

for _name, _reason in {
    "socket.socket": "the other end of a socket cannot be restored",
    "subprocess.Popen": "a process cannot be restored",
    "multiprocessing.process.BaseProcess": "a process cannot be restored",
    "multiprocessing.connection._ConnectionBase": "the other end of a pipe cannot be restored",
    "threading.Thread": "a thread cannot be restored",
    "_io._IOBase": "an open file cannot be restored",
    "Box2D.Box2D.b2World": "Box2D keeps contacts and joint impulses where no program can read or write them",
    "envpool.python.envpool.EnvPoolMixin": "an EnvPool has no state that can be read",
    "stable_retro._retro.RetroEmulator": "it needs a codec: vecenv.state.register",
}.items():
    register_rule(_name, Refused(_reason))

# -- wrappers that read the clock ----------------------------------------------------------------------------------


def _save_statistics(layer: Any) -> Any:
    return {**vars(layer), "episode_start_time": time.perf_counter() - layer.episode_start_time}


def _load_statistics(layer: Any, state: Any) -> None:
    own = vars(layer)
    own.update(state, episode_start_time=time.perf_counter() - state["episode_start_time"])
    for name in own.keys() - state.keys():
        del own[name]


register_rule("gymnasium.wrappers.common.RecordEpisodeStatistics", Codec(_save_statistics, _load_statistics))
