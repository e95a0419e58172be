"""Hypothesis strategies for spaces, infos, seeds, masks, calls, and lists of environments."""

from __future__ import annotations

import string
from dataclasses import dataclass
from typing import Any

import numpy as np
from envs import EnvFn, ScriptedEnv
from gymnasium import spaces
from hypothesis import strategies as st

FLOATS = (np.float16, np.float32, np.float64)
INTEGERS = (np.int8, np.int16, np.int32, np.int64, np.uint8, np.uint16, np.uint32)

shapes = st.lists(st.integers(0, 3), min_size=0, max_size=3).map(tuple)


@st.composite
def boxes(draw: st.DrawFn) -> spaces.Box:
    """Draw a box of any dtype with up to three dimensions; it may be empty or unbounded."""
    dtype = draw(st.sampled_from((*FLOATS, *INTEGERS, np.bool_)))
    shape = draw(shapes)
    if dtype is np.bool_:
        return spaces.Box(0, 1, shape, np.bool_)
    if dtype in FLOATS:
        low, high = draw(st.sampled_from([(-1.0, 1.0), (0.0, 100.0), (-np.inf, np.inf), (0.0, np.inf)]))
        return spaces.Box(low, high, shape, dtype)
    limits = np.iinfo(dtype)
    low = max(int(limits.min), draw(st.integers(-200, 0)))
    return spaces.Box(low, min(int(limits.max), draw(st.integers(1, 300))), shape, dtype)


@st.composite
def multi_discretes(draw: st.DrawFn) -> spaces.MultiDiscrete:
    sizes = draw(st.lists(st.integers(1, 6), min_size=1, max_size=3))
    starts = [draw(st.integers(-3, 3)) for _ in sizes]
    dtype = draw(st.sampled_from((np.int64, np.int32)))
    return spaces.MultiDiscrete(sizes, start=starts, dtype=dtype)


discretes = st.builds(spaces.Discrete, n=st.integers(1, 9), start=st.integers(-5, 5))
multi_binaries = st.builds(
    spaces.MultiBinary, st.one_of(st.integers(1, 4), st.lists(st.integers(1, 3), min_size=1, max_size=2))
)
flat_spaces = st.one_of(boxes(), discretes, multi_discretes(), multi_binaries)

texts = st.builds(
    spaces.Text,
    max_length=st.integers(1, 6),
    min_length=st.just(1),
    charset=st.sampled_from([string.ascii_lowercase, "01", "äß€ "]),
)
one_ofs = st.lists(flat_spaces, min_size=1, max_size=3).map(spaces.OneOf)
sequences = st.builds(spaces.Sequence, flat_spaces, stack=st.booleans())
graphs = st.builds(
    spaces.Graph,
    node_space=st.one_of(st.just(spaces.Box(-1, 1, (2,), np.float32)), discretes),
    edge_space=st.one_of(st.none(), discretes),
)
keys = st.text(string.ascii_lowercase, min_size=1, max_size=3)


def _nested(leaves: st.SearchStrategy[spaces.Space]) -> st.SearchStrategy[spaces.Space]:
    return st.recursive(
        leaves,
        lambda inner: st.one_of(
            st.dictionaries(keys, inner, min_size=1, max_size=3).map(spaces.Dict),
            st.lists(inner, min_size=1, max_size=3).map(spaces.Tuple),
        ),
        max_leaves=4,
    )


fixed_spaces = _nested(flat_spaces)
"""Spaces of fixed size, which shared memory can hold, nested in Dict and Tuple."""

any_spaces = _nested(st.one_of(flat_spaces, texts, one_ofs, sequences, graphs))
"""All of Gymnasium's spaces, nested in Dict and Tuple."""


# --- infos ----------------------------------------------------------------------------------------

small_arrays = st.builds(
    lambda shape, dtype, fill: np.full(shape, fill).astype(dtype),
    st.sampled_from([(), (1,), (3,), (2, 2)]),
    st.sampled_from([np.float32, np.float64, np.int64, np.uint8, np.bool_]),
    st.integers(0, 100),
)
_kinds: dict[str, st.SearchStrategy[Any]] = {
    "int": st.integers(-(2**31), 2**31),
    "float": st.floats(width=64),
    "bool": st.booleans(),
    "np.float32": st.floats(width=32).map(np.float32),
    "np.int64": st.integers(-1000, 1000).map(np.int64),
    "np.uint8": st.integers(0, 255).map(np.uint8),
    "np.bool_": st.booleans().map(np.bool_),
    "str": st.text("ab_0\0\né漢🙂", max_size=5),  # a short alphabet, because Hypothesis takes seconds to enumerate Unicode
    "none": st.none(),
    "list": st.lists(st.integers(0, 9), max_size=2),
    "tuple": st.tuples(st.integers(0, 9)),
    "complex": st.just(1 + 2j),
    "vector": st.lists(st.floats(width=32), min_size=3, max_size=3).map(lambda x: np.array(x, np.float32)),
    "matrix": st.integers(0, 9).map(lambda x: np.full((2, 2), x, np.int16)),
    "scalar array": st.integers(0, 9).map(lambda x: np.array(float(x))),
    "flags": st.lists(st.booleans(), min_size=2, max_size=2).map(np.array),
    "words": st.sampled_from(["a", "bc"]).map(lambda word: np.array([word, "xyz"])),
}
info_values = st.one_of(*_kinds.values(), small_arrays)


@dataclass(frozen=True)
class InfoSchema:
    """The keys that an environment's infos may have, each with values of one kind."""

    leaves: dict[Any, str]
    nested: dict[str, InfoSchema]

    def infos(self) -> st.SearchStrategy[dict[Any, Any]]:
        parts: dict[Any, st.SearchStrategy[Any]] = {key: _kinds[kind] for key, kind in self.leaves.items()}
        parts |= {key: schema.infos() for key, schema in self.nested.items()}
        return st.fixed_dictionaries({}, optional=parts) if parts else st.just({})


@st.composite
def info_schemas(draw: st.DrawFn, depth: int = 2) -> InfoSchema:
    names = st.sampled_from(["a", "b", "c", "distance", "episode_stats", 3])
    leaves = draw(st.dictionaries(names, st.sampled_from(sorted(_kinds)), max_size=4))
    nested = {}
    if depth:
        nested = draw(st.dictionaries(st.sampled_from(["x", "y"]), info_schemas(depth=depth - 1), max_size=1))
    return InfoSchema(leaves, nested)


wild_infos = st.recursive(
    st.dictionaries(st.sampled_from(["a", "b"]), info_values, max_size=2),
    lambda inner: st.dictionaries(st.sampled_from(["a", "b"]), st.one_of(info_values, inner), max_size=2),
    max_leaves=4,
)
"""Infos with keys that have values of different kinds in different environments and steps."""


# --- environments and calls -----------------------------------------------------------------------

seeds = st.one_of(st.none(), st.integers(0, 2**31 - 1))


def seed_arguments(num_envs: int) -> st.SearchStrategy[Any]:
    """Return a strategy for arguments that ``reset(seed=...)`` accepts for this many environments."""
    return st.one_of(seeds, st.lists(seeds, min_size=num_envs, max_size=num_envs))


def masks(num_envs: int) -> st.SearchStrategy[np.ndarray]:
    """Return a strategy for boolean arrays of shape ``(num_envs,)`` with at least one True."""
    return st.lists(st.booleans(), min_size=num_envs, max_size=num_envs).filter(any).map(np.array)


@dataclass(frozen=True)
class Vector:
    """The arguments of one vector environment."""

    env_fns: list[EnvFn]
    observation_space: spaces.Space
    action_space: spaces.Space
    scripts: list[dict[str, Any]]


@st.composite
def vectors(
    draw: st.DrawFn,
    observation_spaces: st.SearchStrategy[spaces.Space] = fixed_spaces,
    action_spaces: st.SearchStrategy[spaces.Space] = fixed_spaces,
    min_envs: int = 1,
    max_envs: int = 4,
    wild: bool = False,
) -> Vector:
    """Draw several :class:`ScriptedEnv` with common spaces, each with its own episodes, rewards and infos."""
    observation_space, action_space = draw(observation_spaces), draw(action_spaces)
    schema = draw(info_schemas())
    rewards = st.one_of(st.floats(width=32), st.integers(-9, 9))
    infos = st.lists(wild_infos if wild else schema.infos(), min_size=1, max_size=3)
    scripts = [
        {
            "env_id": index,
            "lengths": draw(st.lists(st.integers(1, 5), min_size=1, max_size=3)),
            "truncates": draw(st.lists(st.booleans(), min_size=1, max_size=3)),
            "rewards": draw(st.lists(rewards, min_size=1, max_size=4)),
            "reset_infos": draw(infos),
            "step_infos": draw(infos),
        }
        for index in range(draw(st.integers(min_envs, max_envs)))
    ]

    def env_fn(script: dict[str, Any]) -> EnvFn:
        return lambda: ScriptedEnv(observation_space, action_space, **script)

    return Vector([env_fn(script) for script in scripts], observation_space, action_space, scripts)


@dataclass(frozen=True)
class Move:
    """One call: a step (``as_list``: with a list of actions), or a reset of some (``mask``) or all environments."""

    kind: str
    seed: Any = None
    mask: tuple[bool, ...] | None = None
    as_list: bool = False


def moves(num_envs: int, max_size: int = 10) -> st.SearchStrategy[list[Move]]:
    """Return a strategy for lists of calls: mostly steps, and some resets of all or some environments."""
    step = st.builds(Move, st.just("step"), as_list=st.booleans())
    seed = seed_arguments(num_envs)
    reset = st.builds(Move, st.just("reset"), seed=seed)
    mask_tuples = masks(num_envs).map(lambda mask: tuple(mask.tolist()))
    masked_reset = st.builds(Move, st.just("reset"), seed=seed, mask=mask_tuples)
    return st.lists(st.one_of(step, step, step, step, reset, masked_reset), min_size=1, max_size=max_size)
