"""Codecs by class: how to save and load objects for which a copy of their attributes is not enough.

Libraries that an environment may use are named by strings, so that nothing is imported that the environment does not import.
"""

from __future__ import annotations

import math
import pickle
import random
import re
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any, Final, TypeVar

import numpy as np

from vecenv.errors import NotRestorable, SnapshotMismatch
from vecenv.system.uninterrupted import contained


@dataclass(frozen=True, slots=True)
class Codec:
    """Saves the content of an object, and loads it into another object, which keeps its identity.

    Attributes:
        save: Object -> a state that can be pickled; ``None``: there is nothing to save.
        load: (object, state): load it. It may be called again.
        open: (object, state) -> state as ``load`` takes it; refuses a state that does not fit, and touches nothing.
        make: State -> a new object, where there is none to load into; raises any exception for another kind's state.
    """

    save: Callable[[Any], Any]
    load: Callable[[Any, Any], None]
    open: Callable[[Any, Any], Any] = lambda thing, state: state
    make: Callable[[Any], Any] | None = None


@dataclass(frozen=True, slots=True)
class Refused:
    """Objects that cannot be saved, and why."""

    why: str


@dataclass(frozen=True, slots=True)
class _Stays:
    """Objects that are shared, or that no step changes: they stay where they are."""


STAYS: Final = _Stays()

How = Codec | Refused | _Stays

_T = TypeVar("_T")
_BY_NAME: dict[str, How] = {}
_CACHES: Final[list[dict[type, Any]]] = []


class _Cache(dict[type, _T]):
    def __init__(self, function: Callable[[type], _T]) -> None:
        self._function = function

    def __missing__(self, kind: type) -> _T:
        return self.setdefault(kind, self._function(kind))


def by_class(function: Callable[[type], _T]) -> Callable[[type], _T]:
    """Ask a function once for each class, until another codec is registered. A look-up costs what one in a dict does."""
    _CACHES.append(_Cache(function))
    return _CACHES[-1].__getitem__


def name_of(kind: type) -> str:
    """The name under which a class is registered: module and qualified name."""
    return f"{kind.__module__}.{kind.__qualname__}"


def register(cls: type | str, save: Callable[[Any], Any], load: Callable[[Any, Any], None]) -> None:
    """Say how objects of a class, and of classes derived from it, are saved and loaded.

    Call it in every process that has such environments: in the module that makes them, or in ``env_fn``.

    Args:
        cls: A class, or its ``"module.QualifiedName"``. An environment's, a wrapper's, or that of anything they hold.
        save: Object -> a state that can be pickled.
        load: (object, state): puts the state back into an object of that class. It may be called twice with the same state.
    """
    put(cls if isinstance(cls, str) else name_of(cls), Codec(save, load))


def put(name: str, how: How) -> None:
    """Register a class by its name."""
    _BY_NAME[name] = how
    for known in _CACHES:
        known.clear()


@by_class
def how_of(kind: type) -> How | None:
    """How objects of a class are saved; ``None``: as any other object."""
    if callable(getattr(kind, "take_snapshot", None)) and callable(getattr(kind, "restore_snapshot", None)):
        return Codec(lambda thing: thing.take_snapshot(), lambda thing, state: thing.restore_snapshot(state))
    names = map(name_of, kind.__mro__)
    return next((_BY_NAME[name] for name in names if name in _BY_NAME), None)


def made(state: Any) -> Any:
    """A new object of a state, where there is none to load into; ``None``: no codec can make one."""
    for how in _BY_NAME.values():
        make = how.make if isinstance(how, Codec) else None
        if make is not None and (found := contained(partial(make, state), lambda _: None, Exception)) is not None:
            return found
    return None


# -- generators ----------------------------------------------------------------------------------------------------


def _save_generator(generator: np.random.Generator) -> Any:
    bits: Any = generator.bit_generator
    seeds = getattr(bits, "seed_seq", None)
    return bits.state, seeds.state if isinstance(seeds, np.random.SeedSequence) else None


def _open_generator(generator: np.random.Generator, state: Any) -> Any:
    wanted, found = state[0]["bit_generator"], type(generator.bit_generator).__name__
    if wanted != found:
        raise SnapshotMismatch(f"its generator is a {found}, that of the snapshot a {wanted}")
    return state


def _load_generator(generator: np.random.Generator, state: Any) -> None:
    bits: Any = generator.bit_generator
    numbers, seeds = state
    if seeds is not None and bits.seed_seq.state != seeds:
        bits.__init__(np.random.SeedSequence(**seeds))  # it spawns what the other would
    bits.state = numbers


def _make_generator(state: Any) -> np.random.Generator:
    generator = np.random.Generator(getattr(np.random, state[0]["bit_generator"])(0))
    _load_generator(generator, state)
    return generator


def _simple(kind: Callable[[], Any], save: Callable[[Any], Any], load: Callable[[Any, Any], None]) -> Codec:
    """The codec of generators that a load fills wholly, a new one too."""

    def make(state: Any) -> Any:
        generator = kind()
        load(generator, state)
        return generator

    return Codec(save, load, make=make)


put("numpy.random._generator.Generator", Codec(_save_generator, _load_generator, _open_generator, _make_generator))
put(
    "numpy.random.mtrand.RandomState",
    _simple(np.random.RandomState, lambda r: r.get_state(legacy=False), lambda r, state: r.set_state(state)),
)
put("random.Random", _simple(random.Random, lambda r: r.getstate(), lambda r, state: r.setstate(state)))
put("random.SystemRandom", Refused("the operating system's random numbers cannot be repeated"))


def _save_torch(generator: Any) -> Any:
    return generator.get_state().cpu().numpy()


def _load_torch(generator: Any, state: Any) -> None:
    import torch

    generator.set_state(torch.from_numpy(state))


put("torch._C.Generator", Codec(_save_torch, _load_torch))

# -- spaces: only their generators ---------------------------------------------------------------------------------


def _spaces_in(space: Any) -> Iterator[Any]:
    """A space, and what a Dict or a Tuple is made of."""
    yield space
    inner = getattr(space, "spaces", ())
    for one in inner.values() if hasattr(inner, "values") else inner:
        yield from _spaces_in(one)


def save_space(space: Any) -> Any:
    """The generators of a space; ``None``: it has none yet, as most spaces of environments."""
    if getattr(space, "_np_random", None) is None and not hasattr(space, "spaces"):
        return None
    each = [getattr(one, "_np_random", None) for one in _spaces_in(space)]
    return [own and _save_generator(own) for own in each] if any(each) else None


def _load_space(space: Any, state: Any) -> None:
    for one, own in zip(_spaces_in(space), state, strict=True) if state is not None else ():
        if own is None:
            continue
        if getattr(one, "_np_random", None) is None:
            one._np_random = _make_generator(own)
        else:
            _load_generator(one._np_random, own)


def _open_space(space: Any, state: Any) -> Any:
    """Refuse a state that is not one of the generators of such a space."""
    for one, own in zip(_spaces_in(space), state, strict=True) if state is not None else ():
        if own is not None:
            _open_generator(np.random.Generator(np.random.PCG64(0)) if one._np_random is None else one._np_random, own)
            _make_generator(own)
    return state


put("gymnasium.spaces.space.Space", Codec(save_space, _load_space, _open_space))

# -- simulators and emulators --------------------------------------------------------------------------------------

_MODEL = (
    "body_mass", "body_inertia", "body_pos", "geom_size", "geom_friction", "geom_pos", "dof_damping", "dof_armature",
    "dof_frictionloss", "jnt_range", "jnt_stiffness", "actuator_gainprm", "actuator_biasprm", "actuator_gear", "qpos_spring",
    "geom_solref", "geom_solimp", "hfield_data",
)  # fmt: skip
"""The numbers that programs change to vary physics from environment to environment."""


def _model_of(data: Any) -> Any:
    model = data.model
    options = model.opt.timestep, model.opt.gravity.tobytes(), model.opt.integrator, model.opt.iterations
    return (model.nq, model.nv, model.nbuffer, options, *(getattr(model, name).tobytes() for name in _MODEL))


def _save_physics(data: Any) -> Any:
    import mujoco

    return mujoco.__version__, _model_of(data), pickle.dumps(data, pickle.HIGHEST_PROTOCOL)


_LATEST: list[tuple[bytes, Any]] = []
"""The state that was read last: programs often load one state into many environments, and MuJoCo takes milliseconds to read
the model each time."""


def _read_physics(blob: bytes) -> Any:
    for known, data in _LATEST:
        if known == blob:
            return data
    data = pickle.loads(blob)
    _LATEST[:] = [(blob, data)]
    return data


def _open_physics(data: Any, state: Any) -> Any:
    import mujoco

    version, model, blob = state
    if version != mujoco.__version__:
        raise SnapshotMismatch(f"it was simulated by MuJoCo {version}, and this is {mujoco.__version__}")
    if model != (here := _model_of(data)):
        names = ("nq", "nv", "nbuffer", "opt", *_MODEL)
        differ = [name for name, one, other in zip(names, model, here, strict=True) if one != other]
        raise SnapshotMismatch(f"its MjModel is another one: {', '.join(differ)} differ")
    return _read_physics(blob)


def _load_physics(data: Any, state: Any) -> None:
    import mujoco

    mujoco.mj_copyData(data, data.model, state)


put("mujoco._structs.MjData", Codec(_save_physics, _load_physics, _open_physics))
put("mujoco._structs.MjModel", STAYS)

# -- Atari emulators, with the action that a sticky emulator repeats ------------------------------------------------
#
# `cloneState(include_rng=True)` has the console, the game and the generator, but not the previous action, which the emulator
# repeats with `repeat_action_probability`. No call of ALE reads it, and it depends on past draws. So an experiment finds it:
# the generator in a state is set so that it always repeats, the emulator plays some frames of the unknown action from there,
# and then the same frames of each action in turn. The action that plays them alike is the previous one, or continues exactly
# as the previous one does. Then the emulator gets its own state again; its picture is one frame late until it steps.

_ALE_SETTINGS: Final = (
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


def _ale_settings(ale: Any) -> Any:
    return [getattr(ale, how)(name) for how, name in _ALE_SETTINGS], ale.getAvailableModes(), ale.getMinimalActionSet()


def _save_ale(ale: Any) -> Any:
    state = ale.cloneState(include_rng=True)
    return sys.modules["ale_py"].__version__, _ale_settings(ale), state, _previous_action(ale, state)


def _open_ale(ale: Any, state: Any) -> Any:
    version, settings, emulator, previous = state
    if version != (here := sys.modules["ale_py"].__version__):
        raise SnapshotMismatch(f"it was played by ALE {version}, and this is {here}")
    if settings != (here := _ale_settings(ale)):
        raise SnapshotMismatch(f"its emulator has other settings: {here[0]}, the snapshot {settings[0]}, or another game")
    return emulator, previous, None if previous is None else _drawing(emulator, _HIGHEST)


def _load_ale(ale: Any, state: Any) -> None:
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


put("ale_py._ale_py.ALEInterface", Codec(_save_ale, _load_ale, _open_ale))

# -- objects that stay ----------------------------------------------------------------------------------------------------

for _name in (
    "gymnasium.envs.registration.EnvSpec", "gymnasium.envs.registration.WrapperSpec",
    "gymnasium.envs.mujoco.mujoco_rendering.MujocoRenderer", "gymnasium.envs.mujoco.mujoco_rendering.BaseRender",
    "pygame.surface.Surface", "pygame.Surface", "pygame.time.Clock", "pygame.font.Font", "pygame.freetype.Font",
    "builtins.module",
):  # fmt: skip
    put(_name, STAYS)

# -- objects that are refused -----------------------------------------------------------------------------------------------

for _name, _why in {
    "socket.socket": "a socket's other end cannot be taken back",
    "subprocess.Popen": "a process cannot be taken back",
    "multiprocessing.process.BaseProcess": "a process cannot be taken back",
    "multiprocessing.connection._ConnectionBase": "a pipe's other end cannot be taken back",
    "threading.Thread": "a thread cannot be taken back",
    "_io._IOBase": "an open file cannot be taken back",
    "Box2D.Box2D.b2World": "Box2D keeps contacts and joint impulses where no program can read or write them",
    "envpool.python.envpool.EnvPoolMixin": "an EnvPool has no state that can be read",
    "stable_retro._retro.RetroEmulator": "it needs a codec: vecenv.state.register",
}.items():
    put(_name, Refused(_why))

# -- wrappers that look at the clock -------------------------------------------------------------------------------


def _save_statistics(layer: Any) -> Any:
    return {**vars(layer), "episode_start_time": time.perf_counter() - layer.episode_start_time}


def _load_statistics(layer: Any, state: Any) -> None:
    vars(layer).update(state, episode_start_time=time.perf_counter() - state["episode_start_time"])


put("gymnasium.wrappers.common.RecordEpisodeStatistics", Codec(_save_statistics, _load_statistics))
