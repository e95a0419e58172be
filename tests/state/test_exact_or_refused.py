"""A snapshot is exact or raises an error that names the reason: tables of different environments and of hidden state."""

from __future__ import annotations

import cmath
import copy
import datetime
import decimal
import enum
import functools
import importlib.util
import itertools
import math
import random
import re
import threading
from collections import deque
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import gymnasium
import kept_envs
import numpy as np
import pytest
from gymnasium import spaces, wrappers
from gymnasium.utils import EzPickle

import vecenv
from vecenv.errors import NotRestorable, SnapshotMismatch
from vecenv.state.describe import describe
from vecenv.testing import assert_identical

EnvFn = Callable[[], Any]


def make_pendulum(**arguments: Any) -> Any:
    return gymnasium.make("Pendulum-v1", **arguments)


def make_hopper(field: str = "", factor: float = 0.5) -> Any:
    env: Any = gymnasium.make("Hopper-v5")
    *path, name = field.split(".")
    owner = functools.reduce(getattr, path, env.unwrapped.model)
    if isinstance(value := getattr(owner, name or "nq"), np.ndarray):
        value[...] = value * factor + factor
    elif name:
        setattr(owner, name, type(value)(value + 5))
    return env


def make_atari(game: str = "pong", **arguments: Any) -> Any:
    import ale_py

    return ale_py.env.AtariEnv(game=game, frameskip=4, full_action_space=True, **arguments)


class KeptValueEnv(kept_envs.CountingEnv):
    """An environment with the value ``kept``, of which each observation contains a function."""

    def __init__(self, kept: Any, draw: Callable[[Any], float]) -> None:
        super().__init__()
        self.kept, self.draw = kept, draw

    def extra(self, action: int) -> float:
        return float(self.draw(self.kept))


def make_random_state_env(bits: Any) -> Any:
    return KeptValueEnv(np.random.RandomState(bits(3)), lambda kept: kept.rand())


def make_module_env(module: Any) -> Any:
    return KeptValueEnv(module, lambda kept: kept.sqrt(4).real)


def make_local_class_env(factor: int) -> Any:
    class Local(kept_envs.CountingEnv):
        def extra(self, action: int) -> float:
            return factor * action

    return Local()


class ScaledReward(gymnasium.Wrapper[Any, Any, Any, Any]):
    """A wrapper that does not record its argument, which is an attribute and so part of the state."""

    def __init__(self, factor: float) -> None:
        super().__init__(make_pendulum())
        self.factor = factor

    def step(self, action: Any) -> Any:
        observation, reward, *rest = self.env.step(action)
        return observation, reward * self.factor, *rest


def make_env_with_space(bound: float) -> Any:
    """Return an environment with a space of 2,000 bounds, one of which is ``bound``; the repr does not show it."""
    env = wrappers.OrderEnforcing(make_pendulum())
    high = np.ones(2000, np.float32)
    high[1000] = bound
    env.extra_space = spaces.Box(-high, high)
    return env


def make_frame_stack(padding: str) -> Any:
    return wrappers.FrameStackObservation(make_pendulum(), 3, padding_type=padding)


def make_scaled_rewards(factor: float) -> Any:
    return wrappers.TransformReward(make_pendulum(), lambda reward: reward * factor)


def bind_each(function: Callable[..., Any], *values: Any) -> tuple[EnvFn, EnvFn]:
    one, other = (functools.partial(function, value) for value in values)
    return one, other


MISMATCHES: dict[str, tuple[tuple[EnvFn, EnvFn], str]] = {
    "time limit": (
        bind_each(lambda steps: make_pendulum(max_episode_steps=steps), 5, 9), r"TimeLimit.max_episode_steps=5, .*=9",
    ),
    "frames": (bind_each(lambda n: wrappers.FrameStackObservation(make_pendulum(), n), 3, 4), r"shape \(3, 3\)"),
    "padding": (
        bind_each(make_frame_stack, "zero", "reset"), "'zero', .*'reset'",
    ),
    "sticky": (
        bind_each(lambda chance: wrappers.StickyAction(make_pendulum(), chance), 0.1, 0.6), "repeat_action_probability=0.1",
    ),
    "epsilon": (bind_each(lambda eps: wrappers.NormalizeObservation(make_pendulum(), eps), 1e-8, 1.0), "epsilon=1e-08"),
    "captured": (bind_each(make_scaled_rewards, 2, 3), r"TransformReward.func=.*factor=2.*factor=3"),
    "code": (
        bind_each(lambda f: wrappers.TransformReward(make_pendulum(), f), lambda r: r * 2, lambda r: r + 2),
        "TransformReward.func",
    ),
    "in C": (bind_each(lambda f: wrappers.TransformReward(make_pendulum(), f), np.tanh, np.sin), "func=ufunc tanh"),
    "class": (bind_each(make_local_class_env, 1, 2), "class Local"),
    "space": (bind_each(make_env_with_space, 1.0, 2.0), "OrderEnforcing.extra_space"),
    "registered": (bind_each(lambda g: make_pendulum(g=g), 9.0, 3.0), r"g=9.0, and this one with g=3.0"),
    "bits": (bind_each(make_random_state_env, np.random.MT19937, np.random.PCG64), "PCG64, that of the snapshot a MT19937"),
    "module": (bind_each(make_module_env, math, cmath), "module math, and here it is module cmath"),
}  # fmt: skip
if importlib.util.find_spec("mujoco") is not None:
    for field in ("opt.viscosity", "opt.wind", "opt.disableflags", "actuator_ctrlrange", "geom_rgba", "body_mass"):
        MISMATCHES[field] = bind_each(make_hopper, "", field), rf"HopperEnv.data: its MjModel is different: {field} differ"
if importlib.util.find_spec("ale_py") is not None:
    MISMATCHES |= {
        "game": (bind_each(make_atari, "pong", "breakout"), "AtariEnv.game='pong'"),
        "mode": (bind_each(lambda mode: make_atari(mode=mode), 0, 1), "AtariEnv.mode=0"),
        "emulator": (bind_each(lambda chance: make_atari(repeat_action_probability=chance), 0.0, 0.5), "probability=0.0"),
    }


def reset_engine(env_fn: EnvFn, count: int = 1, steps: int = 4) -> Any:
    envs = vecenv.AsyncVectorEnv([env_fn] * count, num_workers=0)
    envs.reset(seed=1)
    envs.action_space.seed(0)
    for _ in range(steps):
        envs.step(envs.action_space.sample())
    return closing(envs)


@pytest.mark.sampled(
    "time limit",
    "frames",
    "padding",
    "sticky",
    "epsilon",
    "captured",
    "code",
    "in C",
    "class",
    "space",
    "registered",
    "bits",
    "module",
    "opt.viscosity",
    "geom_rgba",
    "body_mass",
)
@pytest.mark.parametrize("case", MISMATCHES)
def test_load_into_a_different_environment_names_the_difference(case: str) -> None:
    (env_fn, other_fn), text = MISMATCHES[case]
    with reset_engine(env_fn) as envs, reset_engine(other_fn) as different, reset_engine(env_fn) as same:
        kept = envs.save(verify=False)
        with pytest.raises(SnapshotMismatch, match=text):
            different.load(kept)
        same.load(kept)
        actions = envs.action_space.sample()
        assert_identical(same.step(actions)[:4], envs.step(actions)[:4])


def test_load_names_an_emulator_setting_changed_after_construction() -> None:
    pytest.importorskip("ale_py")
    with reset_engine(make_atari) as envs, reset_engine(make_atari) as target:
        target.exec_func(lambda env: env.unwrapped.ale.setFloat("repeat_action_probability", 0.5))
        with pytest.raises(SnapshotMismatch, match=r"its emulator has repeat_action_probability 0.25, and this one 0.5"):
            target.load(envs.save(verify=False))


def test_load_restores_constructor_arguments_kept_as_attributes() -> None:
    twice, thrice = functools.partial(ScaledReward, 2.0), functools.partial(ScaledReward, 3.0)
    with reset_engine(twice) as envs, reset_engine(thrice) as target:
        target.load(envs.save())
        for _ in range(3):
            actions = envs.action_space.sample()
            assert_identical(target.step(actions)[:4], envs.step(actions)[:4])


@pytest.mark.parametrize("in_list", [False, True])
@pytest.mark.parametrize("make", [kept_envs.GeneratorsEnv, kept_envs.SnapshotMethodsEnv])
def test_load_restores_the_environment_selected_by_a_wrapper_or_save_raises(make: Any, in_list: bool) -> None:
    env_fn = functools.partial(kept_envs.SwitchingWrapper, make, in_list)

    def play(envs: Any) -> list[Any]:
        steps = [envs.step(np.array([action])) for action in (1, 2, 0)]
        others = [envs.reset(options={"which": which}) for which in (1, 0)]
        return [*steps, *others, envs.step(np.array([2]))]

    with reset_engine(env_fn) as envs, reset_engine(env_fn) as target:
        envs.reset(seed=3, options={"which": 1})
        envs.step(np.array([2]))
        target.reset(seed=4, options={"which": 0})
        if in_list and make is kept_envs.SnapshotMethodsEnv:  # load() can restore only the selected one
            text = r"no object at SwitchingWrapper.candidates\[0\] can load the saved state"
            with pytest.raises(NotRestorable, match=text):
                envs.save()
            return
        kept, expected = envs.save(), play(envs)
        for one in (envs, target):
            one.load(kept)
            assert_identical(play(one), expected)


# -- verification of the first save -------------------------------------------------------------------------------------

GLOBAL_COUNT = {"steps": 0}
COUNTER = itertools.count()
GENERATOR = np.random.default_rng(0)


class MaybeHiddenCount(kept_envs.CountingEnv):
    """An environment that counts its steps in an attribute or, if ``hidden``, in a global dict."""

    def __init__(self, hidden: bool) -> None:
        super().__init__()
        self.hidden, self.steps = hidden, 0

    def reset(self, **arguments: Any) -> Any:
        self.steps = GLOBAL_COUNT["steps"] = 0
        return super().reset(**arguments)

    def extra(self, action: int) -> float:
        self.steps += 1
        GLOBAL_COUNT["steps"] += 1
        return GLOBAL_COUNT["steps"] if self.hidden else self.steps


class RandomWithAttribute(random.Random):
    memory = 0.0

    def random(self) -> float:
        self.memory += 1
        return self.memory + super().random()


def hide_every_fourth() -> Any:
    return MaybeHiddenCount(next(COUNTER) % 4 == 3)


def make_env_fn(make: Callable[[], Any], draw: Callable[[Any], float]) -> EnvFn:
    return lambda: KeptValueEnv(make(), draw)


NUMPY, PYTHON = "it is the generator of numpy.random", "it is the generator of the module random"
REFUSED: dict[str, tuple[list[EnvFn], str]] = {
    "in one row of two": (
        [functools.partial(MaybeHiddenCount, hidden) for hidden in (False, True)], r"differently: .*\.GLOBAL_COUNT",
    ),
    "in every fourth environment": ([hide_every_fourth] * 4, "continues differently"),
    "numpy's": (
        [make_env_fn(lambda: np.random.mtrand._rand, lambda kept: kept.rand())], NUMPY,  # type: ignore[attr-defined]
    ),
    "Python's": ([make_env_fn(lambda: random._inst, lambda kept: kept.random())], PYTHON),  # type: ignore[attr-defined]
    "by a method": ([make_env_fn(lambda: np.random.rand, lambda kept: kept())], NUMPY),
    "by a function": ([make_env_fn(lambda: random.random, lambda kept: kept())], PYTHON),
    "shared": (
        [make_env_fn(lambda: [GENERATOR], lambda kept: kept[0].random())], r"kept\[0\] \(Generator\) is the same object",
    ),
    "with attribute": (
        [make_env_fn(RandomWithAttribute, lambda kept: kept.random())],
        "RandomWithAttribute has attributes of its own: memory",
    ),
    "a thread in a list": (
        [make_env_fn(lambda: [threading.Thread()], lambda kept: 0.0)],
        r"KeptValueEnv\.kept\[0\] \(Thread\): a thread cannot be restored",
    ),
}  # fmt: skip
EXACT: dict[str, EnvFn] = {
    "own counter": functools.partial(MaybeHiddenCount, False),
    "Generator": make_env_fn(lambda: np.random.default_rng(1), lambda kept: kept.random()),
    "PCG64": make_env_fn(lambda: np.random.PCG64(1), lambda kept: kept.random_raw() % 1000),
    **{
        type(space).__name__: make_env_fn(functools.partial(copy.deepcopy, space), lambda kept: len(repr(kept.sample())))
        for space in (
            spaces.Sequence(spaces.Discrete(999)), spaces.Graph(spaces.Discrete(999), None),
            spaces.OneOf([spaces.Discrete(999), spaces.Discrete(9)]),
        )
    },
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_save_with_hidden_state_names_the_state(case: str) -> None:
    env_fns, text = REFUSED[case]
    state = GENERATOR.bit_generator.state
    with closing(vecenv.AsyncVectorEnv(env_fns, num_workers=0)) as envs:
        envs.reset(seed=1)
        with pytest.raises(NotRestorable, match=text):
            envs.save()
    assert GENERATOR.bit_generator.state == state  # the verification draws from no generator of a user's environment


@pytest.mark.parametrize("case", EXACT)
def test_load_into_one_row_continues_exactly_beside_others(case: str) -> None:
    with reset_engine(EXACT[case], 2) as envs:
        kept = envs.save()
        actions = [envs.action_space.sample() for _ in range(20)]
        expected = [envs.step(one)[:4] for one in actions]
        for row in range(2):
            envs.load(kept[row], [row])
            for one, step in zip(actions, expected, strict=True):
                assert_identical([field[row] for field in envs.step(one)[:4]], [field[row] for field in step])


def test_save_verifies_each_environment_once_and_again_after_set_attr() -> None:
    built: list[bool] = []

    def make(hidden: bool) -> Any:
        built.append(hidden)
        return MaybeHiddenCount(hidden)

    with closing(vecenv.AsyncVectorEnv([functools.partial(make, False)] * 3, num_workers=0)) as envs:
        envs.reset(seed=1)
        built.clear()
        for call, number in ((lambda: envs.save([1]), 3), (envs.save, 3), (envs.save, 0), (envs.state_dict, 0)):
            call()
            assert len(built) == number  # scratch environments, shared by rows with equal functions
            built.clear()
        envs.set_attr("hidden", True)
        with pytest.raises(NotRestorable, match="continues differently"):
            envs.save()


class AddsAttributes(kept_envs.CountingEnv):
    """An environment that adds attributes in some actions, with results that depend on one of them."""

    def extra(self, action: int) -> float:
        if action == 0:
            self.kept = gymnasium.spec("CartPole-v1")
        elif action == 1:
            self.cache = 100.0
        return getattr(self, "cache", 0.0)


class AddsToStatistics(wrappers.RecordEpisodeStatistics):
    """A subclass of a wrapper that has a codec; action 1 adds an attribute."""

    def step(self, action: Any) -> Any:
        if action == 1:
            self.cache = 100.0
        observation, reward, *others = super().step(action)
        return (observation, reward + getattr(self, "cache", 0.0), *others)


@pytest.mark.parametrize("env_fn", [AddsAttributes, lambda: AddsToStatistics(kept_envs.CountingEnv())])
def test_load_removes_attributes_that_the_snapshot_lacks(env_fn: EnvFn) -> None:
    with reset_engine(env_fn, 2, steps=0) as envs:
        envs.step(np.array([0, 1]))
        envs.load(envs.save([0]), [1])
        observations, rewards, *_ = envs.step(np.array([2, 2]))
    assert observations[0] == observations[1]
    assert rewards[0] == rewards[1]


class ReplacesObject(kept_envs.CountingEnv):
    """An environment that replaces an object, in an attribute or an item of a dict, at action 0."""

    def __init__(self, first: Any, make_second: Callable[[], Any], in_dict: bool) -> None:
        super().__init__()
        self.make_second, self.in_dict = make_second, in_dict
        self.kept = {"part": first} if in_dict else first

    def extra(self, action: int) -> float:
        if action == 0:
            self.kept = {"part": self.make_second()} if self.in_dict else self.make_second()
        return 0.0


SPEC = gymnasium.spec("CartPole-v1")


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ((5, lambda: SPEC, False), r"its ReplacesObject\.kept is .* of class int"),
        ((5, lambda: SPEC, True), r"its ReplacesObject\.kept\['part'\] is .* of class int"),
        ((spaces.Discrete(2), lambda: spaces.Discrete(3), False), r"its ReplacesObject\.kept are Discrete\(3\)"),
    ],
)
def test_load_raises_if_an_object_without_saved_state_was_replaced(arguments: Any, text: str) -> None:
    with reset_engine(functools.partial(ReplacesObject, *arguments), 2, steps=0) as envs:
        envs.save(verify=False)
        envs.step(np.array([0, 1]))
        saved = envs.save([0], verify=False)
        with pytest.raises(SnapshotMismatch, match=text):
            envs.load(saved, [1])


class SlotsEnv(kept_envs.CountingEnv):
    """An environment with an attribute in ``__slots__``."""

    __slots__ = ("height",)


class DocumentedSlots:
    """A class with a private attribute, which ``__slots__`` documents."""

    __slots__ = {"__bound": "The bound."}

    def __init__(self, bound: float) -> None:
        self.__bound = bound


class EzPickledBound(kept_envs.CountingEnv, EzPickle):
    """An environment that records its constructor's argument by ``EzPickle``."""

    def __init__(self, bound: Any) -> None:
        EzPickle.__init__(self, bound)
        super().__init__()


def test_file_that_an_environment_creates_after_the_save_does_not_prevent_a_load(tmp_path: Path) -> None:
    log, level = tmp_path / "log", tmp_path / "level"
    level.write_text("1")
    env_fn = functools.partial(EzPickledBound, str(log))
    with reset_engine(env_fn) as envs, reset_engine(functools.partial(EzPickledBound, str(level))) as others:
        saved, saved_level = envs.save(verify=False), others.save(verify=False)
        log.write_text("a line")
        with reset_engine(env_fn) as same:
            same.load(saved)
            envs.load(same.save(verify=False))
            log.unlink()
        with reset_engine(env_fn) as same:
            same.load(saved)
        level.write_text("2")
        with (
            reset_engine(functools.partial(EzPickledBound, str(level))) as changed,
            pytest.raises(SnapshotMismatch, match="made with"),
        ):
            changed.load(saved_level)


def test_slots_of_arguments_are_compared_and_slots_of_environments_raise() -> None:
    with reset_engine(SlotsEnv) as envs, pytest.raises(NotRestorable, match=r"attributes in __slots__.*: height"):
        envs.save(verify=False)
    with (
        reset_engine(lambda: EzPickledBound(DocumentedSlots(1.0))) as envs,
        reset_engine(lambda: EzPickledBound(DocumentedSlots(2.0))) as others,
    ):
        envs.load(saved := envs.save())
        with pytest.raises(SnapshotMismatch, match="made with"):
            others.load(saved)


def test_describe_local_class_is_unchanged_by_copying_an_object() -> None:
    kind = type(make_local_class_env(2))
    before = describe(kind)
    copy.copy(kind())
    assert describe(kind) == before


@pytest.mark.parametrize("name", ["__firstlineno__", "__static_attributes__", "__annotate_func__", "__annotations_cache__"])
def test_describe_local_class_is_independent_of_what_newer_pythons_add(name: str) -> None:
    kind: Any = type(make_local_class_env(2))
    before = describe(kind)
    setattr(kind, name, ("x",))
    assert describe(kind) == before


class Operation(enum.Enum):
    NEGATE = (lambda x: -x,)


def test_describe_enum_member_has_no_address() -> None:
    assert " at 0x" not in describe(Operation.NEGATE)


def _object_array(middle: Any) -> Any:
    array = np.zeros(2000, object)
    array[1000] = middle
    return array


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (_object_array(1), _object_array(2)),
        (np.array([DocumentedSlots(1.0)]), np.array([DocumentedSlots(2.0)])),
        (re.compile("a" * 300 + "b"), re.compile("a" * 300 + "c")),
        (range(10), range(20)),
        (slice(1), slice(2)),
        (bytearray(b"a"), bytearray(b"b")),
        (deque([1]), deque([2])),
        (deque([1], 3), deque([1], 4)),
        (datetime.date(2020, 1, 1), datetime.date(2020, 1, 2)),
        (decimal.Decimal(1), decimal.Decimal(2)),
    ],
    ids=lambda value: type(value).__name__,
)
def test_descriptions_of_different_values_differ(one: Any, other: Any) -> None:
    assert describe(one) == describe(copy.deepcopy(one))
    assert describe(one) != describe(other)


def test_describe_file_that_cannot_be_read_names_its_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "level.json"
    path.write_text("{}")
    assert str(path) not in describe(path)

    def refuse(*args: Any) -> Any:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("builtins.open", refuse)
    assert describe(path) == f"file {str(path)!r}"
