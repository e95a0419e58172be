"""A snapshot is exact, or refused by name: tables of environments that differ, and of hidden state."""

from __future__ import annotations

import cmath
import copy
import functools
import importlib.util
import itertools
import math
import random
from collections.abc import Callable
from contextlib import closing
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


def pendulum(**arguments: Any) -> Any:
    return gymnasium.make("Pendulum-v1", **arguments)


def hopper(field: str = "", factor: float = 0.5) -> Any:
    env: Any = gymnasium.make("Hopper-v5")
    *path, name = field.split(".")
    owner = functools.reduce(getattr, path, env.unwrapped.model)
    if isinstance(value := getattr(owner, name or "nq"), np.ndarray):
        value[...] = value * factor + factor
    elif name:
        setattr(owner, name, type(value)(value + 5))
    return env


def atari(game: str = "pong", **arguments: Any) -> Any:
    import ale_py

    return ale_py.env.AtariEnv(game=game, frameskip=4, full_action_space=True, **arguments)


class Draws(kept_envs.Counts):
    """An environment that returns a function of a value that it keeps."""

    def __init__(self, kept: Any, draw: Callable[[Any], float]) -> None:
        super().__init__()
        self.kept, self.draw = kept, draw

    def more(self, action: int) -> float:
        return float(self.draw(self.kept))


def from_random_state(bits: Any) -> Any:
    return Draws(np.random.RandomState(bits(3)), lambda kept: kept.rand())


def from_module(module: Any) -> Any:
    return Draws(module, lambda kept: kept.sqrt(4).real)


def local_class(factor: int) -> Any:
    class Local(kept_envs.Counts):
        def more(self, action: int) -> float:
            return factor * action

    return Local()


class Scaled(gymnasium.Wrapper[Any, Any, Any, Any]):
    """A wrapper that does not record its arguments: they are attributes, which are part of the state."""

    def __init__(self, factor: float) -> None:
        super().__init__(pendulum())
        self.factor = factor

    def step(self, action: Any) -> Any:
        observation, reward, *rest = self.env.step(action)
        return observation, reward * self.factor, *rest


def with_inner_space(bound: float) -> Any:
    """Return an environment with spaces that differ in one of 2,000 bounds, which their repr does not show."""
    env = wrappers.OrderEnforcing(pendulum())
    high = np.ones(2000, np.float32)
    high[1000] = bound
    env.inner = spaces.Box(-high, high)
    return env


def frames(padding: str) -> Any:
    return wrappers.FrameStackObservation(pendulum(), 3, padding_type=padding)


def scaled_rewards(factor: float) -> Any:
    return wrappers.TransformReward(pendulum(), lambda reward: reward * factor)


def pairs(function: Callable[..., Any], *values: Any) -> tuple[EnvFn, EnvFn]:
    one, other = (functools.partial(function, value) for value in values)
    return one, other


OTHERS: dict[str, tuple[tuple[EnvFn, EnvFn], str]] = {
    "time limit": (pairs(lambda steps: pendulum(max_episode_steps=steps), 5, 9), r"TimeLimit.max_episode_steps=5, .*=9"),
    "frames": (pairs(lambda n: wrappers.FrameStackObservation(pendulum(), n), 3, 4), r"shape \(3, 3\)"),
    "padding": (
        pairs(frames, "zero", "reset"), "'zero', .*'reset'",
    ),
    "sticky": (pairs(lambda chance: wrappers.StickyAction(pendulum(), chance), 0.1, 0.6), "repeat_action_probability=0.1"),
    "epsilon": (pairs(lambda eps: wrappers.NormalizeObservation(pendulum(), eps), 1e-8, 1.0), "epsilon=1e-08"),
    "captured": (pairs(scaled_rewards, 2, 3), r"TransformReward.func=.*factor=2.*factor=3"),
    "code": (
        pairs(lambda f: wrappers.TransformReward(pendulum(), f), lambda r: r * 2, lambda r: r + 2),
        "TransformReward.func",
    ),
    "in C": (pairs(lambda f: wrappers.TransformReward(pendulum(), f), np.tanh, np.sin), "func=ufunc tanh"),
    "class": (pairs(local_class, 1, 2), "class Local"),
    "inner space": (pairs(with_inner_space, 1.0, 2.0), "OrderEnforcing.inner"),
    "registered": (pairs(lambda g: pendulum(g=g), 9.0, 3.0), r"g=9.0, and this one with g=3.0"),
    "bits": (pairs(from_random_state, np.random.MT19937, np.random.PCG64), "PCG64, that of the snapshot a MT19937"),
    "module": (pairs(from_module, math, cmath), "module math, and here it is module cmath"),
}  # fmt: skip
if importlib.util.find_spec("mujoco") is not None:
    for field in ("opt.viscosity", "opt.wind", "opt.disableflags", "actuator_ctrlrange", "geom_rgba", "body_mass"):
        OTHERS[field] = pairs(hopper, "", field), rf"HopperEnv.data: its MjModel is different: {field} differ"
if importlib.util.find_spec("ale_py") is not None:
    OTHERS |= {
        "game": (pairs(atari, "pong", "breakout"), "AtariEnv.game='pong'"),
        "mode": (pairs(lambda mode: atari(mode=mode), 0, 1), "AtariEnv.mode=0"),
        "emulator": (pairs(lambda chance: atari(repeat_action_probability=chance), 0.0, 0.5), "probability=0.0"),
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
    "inner space",
    "registered",
    "bits",
    "module",
    "opt.viscosity",
    "geom_rgba",
    "body_mass",
)
@pytest.mark.parametrize("case", OTHERS)
def test_load_names_what_differs_from_the_saved_environment(case: str) -> None:
    (one, other), text = OTHERS[case]
    with reset_engine(one) as envs, reset_engine(other) as target, reset_engine(one) as same:
        kept = envs.save(verify=False)
        with pytest.raises(SnapshotMismatch, match=text):
            target.load(kept)
        same.load(kept)
        actions = envs.action_space.sample()
        assert_identical(same.step(actions)[:4], envs.step(actions)[:4])


def test_load_names_a_setting_of_the_emulator_that_was_changed_later() -> None:
    pytest.importorskip("ale_py")
    with reset_engine(atari) as envs, reset_engine(atari) as target:
        target.exec_func(lambda env: env.unwrapped.ale.setFloat("repeat_action_probability", 0.5))
        with pytest.raises(SnapshotMismatch, match=r"its emulator has repeat_action_probability 0.25, and this one 0.5"):
            target.load(envs.save(verify=False))


def test_arguments_that_are_attributes_are_loaded_with_the_state() -> None:
    with reset_engine(functools.partial(Scaled, 2.0)) as envs, reset_engine(functools.partial(Scaled, 3.0)) as target:
        target.load(envs.save())
        for _ in range(3):
            actions = envs.action_space.sample()
            assert_identical(target.step(actions)[:4], envs.step(actions)[:4])


@pytest.mark.parametrize("in_list", [False, True])
@pytest.mark.parametrize("make", [kept_envs.Generators, kept_envs.Offers])
def test_the_environment_that_a_wrapper_has_selected_is_saved_or_refused(make: Any, in_list: bool) -> None:
    env_fn = functools.partial(kept_envs.Switches, make, in_list)

    def play(envs: Any) -> list[Any]:
        steps = [envs.step(np.array([action])) for action in (1, 2, 0)]
        others = [envs.reset(options={"which": which}) for which in (1, 0)]
        return [*steps, *others, envs.step(np.array([2]))]

    with reset_engine(env_fn) as envs, reset_engine(env_fn) as target:
        envs.reset(seed=3, options={"which": 1})
        envs.step(np.array([2]))
        target.reset(seed=4, options={"which": 0})
        if in_list and make is kept_envs.Offers:  # neither can be built anew: in the target the first one is the layer
            with pytest.raises(NotRestorable, match=r"no object at Switches.inner\[0\] can load the saved state"):
                envs.save()
            return
        kept, wanted = envs.save(), play(envs)
        for one in (envs, target):
            one.load(kept)
            assert_identical(play(one), wanted)


# -- findings of the proof ---------------------------------------------------------------------------------------------

HIDDEN = {"steps": 0}
COUNTER = itertools.count()
GENERATOR = np.random.default_rng(0)


class HiddenCountIfAsked(kept_envs.Counts):
    """An environment that counts its steps in a place that all environments share, if ``hidden``."""

    def __init__(self, hidden: bool) -> None:
        super().__init__()
        self.hidden, self.steps = hidden, 0

    def reset(self, **arguments: Any) -> Any:
        self.steps = HIDDEN["steps"] = 0
        return super().reset(**arguments)

    def more(self, action: int) -> float:
        self.steps += 1
        HIDDEN["steps"] += 1
        return HIDDEN["steps"] if self.hidden else self.steps


class WithMemory(random.Random):
    memory = 0.0

    def random(self) -> float:
        self.memory += 1
        return self.memory + super().random()


def every_fourth() -> Any:
    return HiddenCountIfAsked(next(COUNTER) % 4 == 3)


def holds(make: Callable[[], Any], draw: Callable[[Any], float]) -> EnvFn:
    return lambda: Draws(make(), draw)


REFUSED: dict[str, tuple[list[EnvFn], str]] = {
    "one row": ([functools.partial(HiddenCountIfAsked, hidden) for hidden in (False, True)], r"differently: .*\.HIDDEN"),
    "a counter": ([every_fourth] * 4, "continues differently"),
    "numpy's": ([holds(lambda: np.random.mtrand._rand, lambda kept: kept.rand())], "it is the generator of numpy.random"),  # type: ignore[attr-defined]
    "Python's": ([holds(lambda: random._inst, lambda kept: kept.random())], "it is the generator of the module random"),  # type: ignore[attr-defined]
    "by a method": ([holds(lambda: np.random.rand, lambda kept: kept())], "it is the generator of numpy.random"),
    "by a function": ([holds(lambda: random.random, lambda kept: kept())], "it is the generator of the module random"),
    "shared": ([holds(lambda: [GENERATOR], lambda kept: kept[0].random())], r"kept\[0\] \(Generator\) is the same object"),
    "with memory": ([holds(WithMemory, lambda kept: kept.random())], "WithMemory has attributes of its own: memory"),
}
EXACT: dict[str, EnvFn] = {
    "Perhaps": functools.partial(HiddenCountIfAsked, False),
    "Generator": holds(lambda: np.random.default_rng(1), lambda kept: kept.random()),
    "PCG64": holds(lambda: np.random.PCG64(1), lambda kept: kept.random_raw() % 1000),
    **{
        type(space).__name__: holds(functools.partial(copy.deepcopy, space), lambda kept: len(repr(kept.sample())))
        for space in (
            spaces.Sequence(spaces.Discrete(999)), spaces.Graph(spaces.Discrete(999), None),
            spaces.OneOf([spaces.Discrete(999), spaces.Discrete(9)]),
        )
    },
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_unsaved_state_is_refused_by_name(case: str) -> None:
    env_fns, text = REFUSED[case]
    state = GENERATOR.bit_generator.state
    with closing(vecenv.AsyncVectorEnv(env_fns, num_workers=0)) as envs:
        envs.reset(seed=1)
        with pytest.raises(NotRestorable, match=text):
            envs.save()
    assert GENERATOR.bit_generator.state == state  # the proof draws from no generator of a user's environment


@pytest.mark.parametrize("case", EXACT)
def test_saved_state_is_exact_beside_other_environments(case: str) -> None:
    with reset_engine(EXACT[case], 2) as envs:
        kept = envs.save()
        actions = [envs.action_space.sample() for _ in range(20)]
        wanted = [envs.step(one)[:4] for one in actions]
        for row in range(2):
            envs.load(kept[row], [row])
            for one, step in zip(actions, wanted, strict=True):
                assert_identical([field[row] for field in envs.step(one)[:4]], [field[row] for field in step])


def test_each_environment_is_proved_once_and_after_set_attr() -> None:
    built: list[bool] = []

    def make(hidden: bool) -> Any:
        built.append(hidden)
        return HiddenCountIfAsked(hidden)

    with closing(vecenv.AsyncVectorEnv([functools.partial(make, False)] * 3, num_workers=0)) as envs:
        envs.reset(seed=1)
        built.clear()
        for call, number in ((lambda: envs.save([1]), 3), (envs.save, 3), (envs.save, 0), (envs.state_dict, 0)):
            call()
            assert len(built) == number  # scratch environments, which rows of equal functions share
            built.clear()
        envs.set_attr("hidden", True)
        with pytest.raises(NotRestorable, match="continues differently"):
            envs.save()


class AddsAttributes(kept_envs.Counts):
    """An environment with attributes that some actions add, and with results that depend on one of them."""

    def more(self, action: int) -> float:
        if action == 0:
            self.kept = gymnasium.spec("CartPole-v1")
        elif action == 1:
            self.cache = 100.0
        return getattr(self, "cache", 0.0)


class AddsToStatistics(wrappers.RecordEpisodeStatistics):
    """A subclass of a wrapper with a codec, with an attribute that one action adds."""

    def step(self, action: Any) -> Any:
        if action == 1:
            self.cache = 100.0
        observation, reward, *others = super().step(action)
        return (observation, reward + getattr(self, "cache", 0.0), *others)


@pytest.mark.parametrize("env_fn", [AddsAttributes, lambda: AddsToStatistics(kept_envs.Counts())])
def test_load_removes_attributes_that_the_snapshot_lacks(env_fn: EnvFn) -> None:
    with reset_engine(env_fn, 2, steps=0) as envs:
        envs.step(np.array([0, 1]))
        envs.load(envs.save([0]), [1])
        observations, rewards, *_ = envs.step(np.array([2, 2]))
    assert observations[0] == observations[1]
    assert rewards[0] == rewards[1]


class Replaces(kept_envs.Counts):
    """An environment that one action gives another object, in an attribute or an item of a dict."""

    def __init__(self, first: Any, make_second: Callable[[], Any], in_dict: bool) -> None:
        super().__init__()
        self.make_second, self.in_dict = make_second, in_dict
        self.kept = {"part": first} if in_dict else first

    def more(self, action: int) -> float:
        if action == 0:
            self.kept = {"part": self.make_second()} if self.in_dict else self.make_second()
        return 0.0


SPEC = gymnasium.spec("CartPole-v1")


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ((5, lambda: SPEC, False), r"its Replaces\.kept is .* of class int"),
        ((5, lambda: SPEC, True), r"its Replaces\.kept\['part'\] is .* of class int"),
        ((spaces.Discrete(2), lambda: spaces.Discrete(3), False), r"its Replaces\.kept are Discrete\(3\)"),
    ],
)
def test_load_refuses_another_object_in_place_of_one_that_stays(arguments: Any, text: str) -> None:
    with reset_engine(functools.partial(Replaces, *arguments), 2, steps=0) as envs:
        envs.save(verify=False)
        envs.step(np.array([0, 1]))
        saved = envs.save([0], verify=False)
        with pytest.raises(SnapshotMismatch, match=text):
            envs.load(saved, [1])


class Slotted(kept_envs.Counts):
    """An environment with an attribute in ``__slots__``."""

    __slots__ = ("height",)


class Described:
    """A class with described attributes, one of them private."""

    __slots__ = {"__bound": "The bound."}

    def __init__(self, bound: float) -> None:
        self.__bound = bound


class Bounded(kept_envs.Counts, EzPickle):
    """An environment that records its constructor's argument."""

    def __init__(self, bound: Any) -> None:
        EzPickle.__init__(self, bound)
        super().__init__()


def test_attributes_in_slots_are_compared_and_those_of_an_environment_refused() -> None:
    with reset_engine(Slotted) as envs, pytest.raises(NotRestorable, match=r"attributes in __slots__.*: height"):
        envs.save(verify=False)
    with reset_engine(lambda: Bounded(Described(1.0))) as envs, reset_engine(lambda: Bounded(Described(2.0))) as others:
        envs.load(saved := envs.save())
        with pytest.raises(SnapshotMismatch, match="made with"):
            others.load(saved)


def test_description_of_a_local_class_does_not_change_when_an_object_is_copied() -> None:
    kind = type(local_class(2))
    before = describe(kind)
    copy.copy(kind())
    assert describe(kind) == before
