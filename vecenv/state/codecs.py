"""The codecs that come with the package."""

from __future__ import annotations

import pickle
import random
import time
from typing import Any

import numpy as np

from vecenv.errors import SnapshotMismatch
from vecenv.state.registry import STAYS, Codec, Refused, put

__all__ = ["save_space"]

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


def _load_legacy(generator: np.random.RandomState, state: Any) -> None:
    generator.set_state(state)


def _make_legacy(state: Any) -> np.random.RandomState:
    generator = np.random.RandomState()
    generator.set_state(state)
    return generator


def _make_random(state: Any) -> random.Random:
    generator = random.Random()
    generator.setstate(state)
    return generator


put("numpy.random._generator.Generator", Codec(_save_generator, _load_generator, _open_generator, _make_generator))
put("numpy.random.mtrand.RandomState", Codec(lambda r: r.get_state(legacy=False), _load_legacy, make=_make_legacy))
put("random.Random", Codec(lambda r: r.getstate(), lambda r, state: r.setstate(state), make=_make_random))
put("random.SystemRandom", Refused("the operating system's random numbers cannot be repeated"))


def _save_torch(generator: Any) -> Any:
    return generator.get_state().cpu().numpy()


def _load_torch(generator: Any, state: Any) -> None:
    import torch

    generator.set_state(torch.from_numpy(state))


put("torch._C.Generator", Codec(_save_torch, _load_torch))

# -- spaces: only their generators ---------------------------------------------------------------------------------


def save_space(space: Any) -> Any:
    """The generators of a space; ``None``: it has none yet, as most have that belong to an environment."""
    own = getattr(space, "_np_random", None)
    state = None if own is None else _save_generator(own)
    inner = getattr(space, "spaces", None)
    inside = None
    if inner is not None:
        each = inner.values() if hasattr(inner, "values") else inner
        inside = [save_space(one) for one in each]
    return None if state is None and not (inside and any(inside)) else (state, inside)


def _load_space(space: Any, state: Any) -> None:
    if state is None:
        return
    own, inside = state
    if own is not None:
        if getattr(space, "_np_random", None) is None:
            space._np_random = _make_generator(own)
        else:
            _load_generator(space._np_random, own)
    if inside is not None:
        inner = space.spaces
        for one, its in zip(inner.values() if hasattr(inner, "values") else inner, inside, strict=True):
            _load_space(one, its)


def _open_space(space: Any, state: Any) -> Any:
    """Refuse what is no state of the generators of such a space."""
    if state is None:
        return None
    own, inside = state
    if own is not None:
        _open_generator(np.random.Generator(np.random.PCG64(0)) if space._np_random is None else space._np_random, own)
        _make_generator(own)
    if inside is not None:
        inner = space.spaces
        for one, its in zip(inner.values() if hasattr(inner, "values") else inner, inside, strict=True):
            _open_space(one, its)
    return state


put("gymnasium.spaces.space.Space", Codec(save_space, _load_space, _open_space))

# -- simulators and emulators --------------------------------------------------------------------------------------

_MODEL = (
    "body_mass", "body_inertia", "body_pos", "geom_size", "geom_friction", "geom_pos", "dof_damping", "dof_armature",
    "dof_frictionloss", "jnt_range", "jnt_stiffness", "actuator_gainprm", "actuator_biasprm", "actuator_gear", "qpos_spring",
    "geom_solref", "geom_solimp", "hfield_data",
)  # fmt: skip
"""What programs that vary physics from environment to environment vary."""


def _model_of(data: Any) -> Any:
    model = data.model
    options = model.opt.timestep, model.opt.gravity.tobytes(), model.opt.integrator, model.opt.iterations
    return (model.nq, model.nv, model.nbuffer, options, *(getattr(model, name).tobytes() for name in _MODEL))


def _save_physics(data: Any) -> Any:
    import mujoco

    return mujoco.__version__, _model_of(data), pickle.dumps(data, pickle.HIGHEST_PROTOCOL)


_LATEST: list[tuple[bytes, Any]] = []
"""What was read last: one start often goes into many rows, and MuJoCo reads the model each time, for milliseconds."""


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

# -- what stays ----------------------------------------------------------------------------------------------------

for _name in (
    "gymnasium.envs.registration.EnvSpec", "gymnasium.envs.registration.WrapperSpec",
    "gymnasium.envs.mujoco.mujoco_rendering.MujocoRenderer", "gymnasium.envs.mujoco.mujoco_rendering.BaseRender",
    "pygame.surface.Surface", "pygame.Surface", "pygame.time.Clock", "pygame.font.Font", "pygame.freetype.Font",
    "builtins.module",
):  # fmt: skip
    put(_name, STAYS)

# -- what is refused -----------------------------------------------------------------------------------------------

for _name, _why in {
    "socket.socket": "a socket's other end cannot be taken back",
    "subprocess.Popen": "a process cannot be taken back",
    "multiprocessing.process.BaseProcess": "a process cannot be taken back",
    "multiprocessing.connection._ConnectionBase": "a pipe's other end cannot be taken back",
    "threading.Thread": "a thread cannot be taken back",
    "_io._IOBase": "an open file cannot be taken back",
    "Box2D.Box2D.b2World": "Box2D keeps contacts and joint impulses where nobody outside can read or write them",
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
