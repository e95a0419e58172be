"""Tests that a save or a load is exact, or raises an error that names the reason.

The cases are in three tables: pairs of environments that differ, hidden state that cannot be saved, and state that is saved
exactly.
"""

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
from signals import Alarm

import vecenv
from vecenv.errors import NotRestorable, SnapshotMismatch
from vecenv.state.describe import describe
from vecenv.testing import assert_identical

EnvFn = Callable[[], Any]


def make_pendulum(**arguments: Any) -> Any:
    return gymnasium.make("Pendulum-v1", **arguments)


def make_hopper(changed_field: str = "") -> Any:
    """Return a Hopper environment. If a field of its model is named, such as ``opt.wind``, it has another value."""
    env: Any = gymnasium.make("Hopper-v5")
    if changed_field:
        *path, name = changed_field.split(".")
        owner = functools.reduce(getattr, path, env.unwrapped.model)
        value = getattr(owner, name)
        if isinstance(value, np.ndarray):
            value[...] = value * 0.5 + 0.5
        else:
            setattr(owner, name, type(value)(value + 5))
    return env


def make_atari(game: str = "pong", **arguments: Any) -> Any:
    import ale_py

    return ale_py.env.AtariEnv(game=game, frameskip=4, full_action_space=True, **arguments)


class KeptValueEnv(kept_envs.CountingEnv):
    """An environment that keeps a value. Its observations contain the results of ``draw(kept)``."""

    def __init__(self, kept: Any, draw: Callable[[Any], float]) -> None:
        super().__init__()
        self.kept, self.draw = kept, draw

    def observation_offset(self, action: int) -> float:
        return float(self.draw(self.kept))


def make_random_state_env(bit_generator: Any) -> Any:
    return KeptValueEnv(np.random.RandomState(bit_generator(3)), lambda kept: kept.rand())


def make_module_env(module: Any) -> Any:
    return KeptValueEnv(module, lambda kept: kept.sqrt(4).real)


def make_local_class_env(factor: int) -> Any:
    class LocalEnv(kept_envs.CountingEnv):
        def observation_offset(self, action: int) -> float:
            return factor * action

    return LocalEnv()


class ScaledReward(gymnasium.Wrapper[Any, Any, Any, Any]):
    """A wrapper that keeps its argument only in an attribute, which is therefore a part of the state."""

    def __init__(self, factor: float) -> None:
        super().__init__(make_pendulum())
        self.factor = factor

    def step(self, action: Any) -> Any:
        observation, reward, *rest = self.env.step(action)
        return observation, reward * self.factor, *rest


def make_env_with_space(bound: float) -> Any:
    """Return an environment with a Box of 2,000 elements, one of which has other bounds, ``-bound`` and ``bound``.

    The repr of the space omits this element.
    """
    env = wrappers.OrderEnforcing(make_pendulum())
    high = np.ones(2000, np.float32)
    high[1000] = bound
    env.extra_space = spaces.Box(-high, high)
    return env


def make_frame_stack(padding: str) -> Any:
    return wrappers.FrameStackObservation(make_pendulum(), 3, padding_type=padding)


def make_scaled_rewards(factor: float) -> Any:
    return wrappers.TransformReward(make_pendulum(), lambda reward: reward * factor)


def bind_pair(function: Callable[[Any], Any], first: Any, second: Any) -> tuple[EnvFn, EnvFn]:
    """Return two functions without arguments, which call ``function`` with one value each."""
    return functools.partial(function, first), functools.partial(function, second)


MISMATCHES: dict[str, tuple[tuple[EnvFn, EnvFn], str]] = {
    "time limit": (
        bind_pair(lambda steps: make_pendulum(max_episode_steps=steps), 5, 9), r"TimeLimit.max_episode_steps=5, .*=9",
    ),
    "frame count": (bind_pair(lambda n: wrappers.FrameStackObservation(make_pendulum(), n), 3, 4), r"shape \(3, 3\)"),
    "padding": (
        bind_pair(make_frame_stack, "zero", "reset"), "'zero', .*'reset'",
    ),
    "sticky": (
        bind_pair(lambda chance: wrappers.StickyAction(make_pendulum(), chance), 0.1, 0.6), "repeat_action_probability=0.1",
    ),
    "epsilon": (bind_pair(lambda eps: wrappers.NormalizeObservation(make_pendulum(), eps), 1e-8, 1.0), "epsilon=1e-08"),
    "closure variable": (bind_pair(make_scaled_rewards, 2, 3), r"TransformReward.func=.*factor=2.*factor=3"),
    "code of a lambda": (
        bind_pair(lambda f: wrappers.TransformReward(make_pendulum(), f), lambda r: r * 2, lambda r: r + 2),
        "TransformReward.func",
    ),
    "C function": (bind_pair(lambda f: wrappers.TransformReward(make_pendulum(), f), np.tanh, np.sin), "func=ufunc tanh"),
    "local class": (bind_pair(make_local_class_env, 1, 2), "class LocalEnv"),
    "space": (bind_pair(make_env_with_space, 1.0, 2.0), "OrderEnforcing.extra_space"),
    "argument of make()": (bind_pair(lambda g: make_pendulum(g=g), 9.0, 3.0), r"g=9.0, and this one with g=3.0"),
    "bit generator": (
        bind_pair(make_random_state_env, np.random.MT19937, np.random.PCG64), "MT19937, and the environment's is PCG64",
    ),
    "module": (bind_pair(make_module_env, math, cmath), "module math, but here it is module cmath"),
}  # fmt: skip
if importlib.util.find_spec("mujoco") is not None:
    for field in ("opt.viscosity", "opt.wind", "opt.disableflags", "actuator_ctrlrange", "geom_rgba", "body_mass"):
        MISMATCHES[field] = bind_pair(make_hopper, "", field), rf"HopperEnv.data: its MjModel differs in {field}"
if importlib.util.find_spec("ale_py") is not None:
    MISMATCHES |= {
        "game": (bind_pair(make_atari, "pong", "breakout"), "AtariEnv.game='pong'"),
        "mode": (bind_pair(lambda mode: make_atari(mode=mode), 0, 1), "AtariEnv.mode=0"),
        "emulator": (bind_pair(lambda chance: make_atari(repeat_action_probability=chance), 0.0, 0.5), "probability=0.0"),
    }


def open_stepped_engine(env_fn: EnvFn, count: int = 1, steps: int = 4) -> Any:
    """Return a context manager with an engine after a reset and some random steps."""
    envs = vecenv.AsyncVectorEnv([env_fn] * count, num_workers=0)
    envs.reset(seed=1)
    envs.action_space.seed(0)
    for _ in range(steps):
        envs.step(envs.action_space.sample())
    return closing(envs)


@pytest.mark.sampled(
    "time limit",
    "frame count",
    "padding",
    "sticky",
    "epsilon",
    "closure variable",
    "code of a lambda",
    "C function",
    "local class",
    "space",
    "argument of make()",
    "bit generator",
    "module",
    "opt.viscosity",
    "geom_rgba",
    "body_mass",
)
@pytest.mark.parametrize("case", MISMATCHES)
def test_load_into_a_different_environment_names_the_difference(case: str) -> None:
    (env_fn, different_env_fn), text = MISMATCHES[case]
    with (
        open_stepped_engine(env_fn) as envs,
        open_stepped_engine(different_env_fn) as different,
        open_stepped_engine(env_fn) as same,
    ):
        snapshots = envs.save(verify=False)
        with pytest.raises(SnapshotMismatch, match=text):
            different.load(snapshots)
        same.load(snapshots)
        actions = envs.action_space.sample()
        assert_identical(same.step(actions)[:4], envs.step(actions)[:4])


def test_load_names_an_emulator_setting_changed_after_construction() -> None:
    pytest.importorskip("ale_py")
    with open_stepped_engine(make_atari) as envs, open_stepped_engine(make_atari) as target:
        target.exec_func(lambda env: env.unwrapped.ale.setFloat("repeat_action_probability", 0.5))
        with pytest.raises(SnapshotMismatch, match=r"its emulator has repeat_action_probability 0.25, and this one 0.5"):
            target.load(envs.save(verify=False))


def test_load_restores_constructor_arguments_kept_as_attributes() -> None:
    env_fn, different_env_fn = bind_pair(ScaledReward, 2.0, 3.0)
    with open_stepped_engine(env_fn) as envs, open_stepped_engine(different_env_fn) as target:
        target.load(envs.save())
        for _ in range(3):
            actions = envs.action_space.sample()
            assert_identical(target.step(actions)[:4], envs.step(actions)[:4])


@pytest.mark.parametrize("in_list", [False, True])
@pytest.mark.parametrize("env_class", [kept_envs.GeneratorsEnv, kept_envs.SnapshotMethodsEnv])
def test_load_restores_the_environment_selected_by_a_wrapper_or_save_raises(env_class: Any, in_list: bool) -> None:
    env_fn = functools.partial(kept_envs.SwitchingWrapper, env_class, in_list)

    def step_and_reset(envs: Any) -> list[Any]:
        steps = [envs.step(np.array([action])) for action in (1, 2, 0)]
        resets = [envs.reset(options={"which": which}) for which in (1, 0)]
        return [*steps, *resets, envs.step(np.array([2]))]

    with open_stepped_engine(env_fn) as envs, open_stepped_engine(env_fn) as target:
        envs.reset(seed=3, options={"which": 1})
        envs.step(np.array([2]))
        target.reset(seed=4, options={"which": 0})
        if in_list and env_class is kept_envs.SnapshotMethodsEnv:  # load() could restore only the selected environment
            text = r"no object at SwitchingWrapper.candidates\[0\] can load the saved state"
            with pytest.raises(NotRestorable, match=text):
                envs.save()
            return
        snapshots, expected = envs.save(), step_and_reset(envs)
        for engine in (envs, target):
            engine.load(snapshots)
            assert_identical(step_and_reset(engine), expected)


# -- verification of the first save -------------------------------------------------------------------------------------

GLOBAL_COUNT = {"steps": 0}
NUM_BUILT = itertools.count()
GENERATOR = np.random.default_rng(0)


class StepCountEnv(kept_envs.CountingEnv):
    """An environment that counts its steps in an attribute or, if ``hidden``, in a global dict."""

    def __init__(self, hidden: bool) -> None:
        super().__init__()
        self.hidden, self.steps = hidden, 0

    def reset(self, **arguments: Any) -> Any:
        self.steps = GLOBAL_COUNT["steps"] = 0
        return super().reset(**arguments)

    def observation_offset(self, action: int) -> float:
        self.steps += 1
        GLOBAL_COUNT["steps"] += 1
        return GLOBAL_COUNT["steps"] if self.hidden else self.steps


class CountingRandom(random.Random):
    num_drawn = 0.0

    def random(self) -> float:
        self.num_drawn += 1
        return self.num_drawn + super().random()


def make_env_with_every_fourth_count_hidden() -> Any:
    return StepCountEnv(next(NUM_BUILT) % 4 == 3)


def make_env_fn(make: Callable[[], Any], draw: Callable[[Any], float]) -> EnvFn:
    return lambda: KeptValueEnv(make(), draw)


NUMPY_TEXT, PYTHON_TEXT = "it is the generator of numpy.random", "it is the generator of the module random"
HIDDEN_STATES: dict[str, tuple[list[EnvFn], str]] = {
    "in one of two rows": (
        [functools.partial(StepCountEnv, hidden) for hidden in (False, True)], r"differently: .*\.GLOBAL_COUNT",
    ),
    "in every fourth environment": ([make_env_with_every_fourth_count_hidden] * 4, "continues differently"),
    "generator of numpy.random": (
        [make_env_fn(lambda: np.random.mtrand._rand, lambda kept: kept.rand())], NUMPY_TEXT,  # type: ignore[attr-defined]
    ),
    "generator of random": (
        [make_env_fn(lambda: random._inst, lambda kept: kept.random())], PYTHON_TEXT,  # type: ignore[attr-defined]
    ),
    "numpy.random.rand": ([make_env_fn(lambda: np.random.rand, lambda kept: kept())], NUMPY_TEXT),
    "random.random": ([make_env_fn(lambda: random.random, lambda kept: kept())], PYTHON_TEXT),
    "generator of this module": (
        [make_env_fn(lambda: [GENERATOR], lambda kept: kept[0].random())], r"kept\[0\] \(Generator\) is the same object",
    ),
    "generator with an attribute": (
        [make_env_fn(CountingRandom, lambda kept: kept.random())],
        "CountingRandom has attributes of its own: num_drawn",
    ),
    "a thread in a list": (
        [make_env_fn(lambda: [threading.Thread()], lambda kept: 0.0)],
        r"KeptValueEnv\.kept\[0\] \(Thread\): a thread cannot be restored",
    ),
}  # fmt: skip
EXACT_ENV_FNS: dict[str, EnvFn] = {
    "attribute": functools.partial(StepCountEnv, False),
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


@pytest.mark.parametrize("case", HIDDEN_STATES)
def test_save_with_hidden_state_names_the_state(case: str) -> None:
    env_fns, text = HIDDEN_STATES[case]
    state = GENERATOR.bit_generator.state
    with closing(vecenv.AsyncVectorEnv(env_fns, num_workers=0)) as envs:
        envs.reset(seed=1)
        with pytest.raises(NotRestorable, match=text):
            envs.save()
    assert GENERATOR.bit_generator.state == state  # scratch environments must not draw from the generator of a real one


@pytest.mark.parametrize("case", EXACT_ENV_FNS)
def test_load_into_one_row_continues_exactly_beside_other_rows(case: str) -> None:
    with open_stepped_engine(EXACT_ENV_FNS[case], 2) as envs:
        snapshots = envs.save()
        all_actions = [envs.action_space.sample() for _ in range(20)]
        expected = [envs.step(actions)[:4] for actions in all_actions]
        for row in range(2):
            envs.load(snapshots[row], [row])
            for actions, step in zip(all_actions, expected, strict=True):
                assert_identical([field[row] for field in envs.step(actions)[:4]], [field[row] for field in step])


def test_save_verifies_each_environment_once_and_again_after_set_attr() -> None:
    built: list[bool] = []

    def make(hidden: bool) -> Any:
        built.append(hidden)
        return StepCountEnv(hidden)

    with closing(vecenv.AsyncVectorEnv([functools.partial(make, False)] * 3, num_workers=0)) as envs:
        envs.reset(seed=1)
        built.clear()
        calls = ((lambda: envs.save([1]), 3), (envs.save, 3), (envs.save, 0), (envs.state_dict, 0))
        for call, num_scratch_envs in calls:  # rows with equal functions share scratch environments
            call()
            assert len(built) == num_scratch_envs
            built.clear()
        envs.set_attr("hidden", True)
        with pytest.raises(NotRestorable, match="continues differently"):
            envs.save()


class AddAttributesEnv(kept_envs.CountingEnv):
    """An environment that adds an attribute at action 0 or 1. The one added at action 1 changes observations."""

    def observation_offset(self, action: int) -> float:
        if action == 0:
            self.kept = gymnasium.spec("CartPole-v1")
        elif action == 1:
            self.cache = 100.0
        return getattr(self, "cache", 0.0)


class AddAttributeWrapper(wrappers.RecordEpisodeStatistics):
    """A subclass of a wrapper that has a codec. Action 1 adds an attribute, which changes rewards."""

    def step(self, action: Any) -> Any:
        if action == 1:
            self.cache = 100.0
        observation, reward, *others = super().step(action)
        return (observation, reward + getattr(self, "cache", 0.0), *others)


@pytest.mark.parametrize("env_fn", [AddAttributesEnv, lambda: AddAttributeWrapper(kept_envs.CountingEnv())])
def test_load_removes_attributes_that_the_snapshot_lacks(env_fn: EnvFn) -> None:
    with open_stepped_engine(env_fn, 2, steps=0) as envs:
        envs.step(np.array([0, 1]))
        envs.load(envs.save([0]), [1])
        observations, rewards, *_ = envs.step(np.array([2, 2]))
    assert observations[0] == observations[1]
    assert rewards[0] == rewards[1]


class ReplaceObjectEnv(kept_envs.CountingEnv):
    """An environment that replaces the object in an attribute, or in a dict, at action 0."""

    def __init__(self, first: Any, make_second: Callable[[], Any], in_dict: bool) -> None:
        super().__init__()
        self.make_second, self.in_dict = make_second, in_dict
        self.kept = {"part": first} if in_dict else first

    def observation_offset(self, action: int) -> float:
        if action == 0:
            self.kept = {"part": self.make_second()} if self.in_dict else self.make_second()
        return 0.0


SPEC = gymnasium.spec("CartPole-v1")


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ((5, lambda: SPEC, False), r"its ReplaceObjectEnv\.kept is .* of class int"),
        ((5, lambda: SPEC, True), r"its ReplaceObjectEnv\.kept\['part'\] is .* of class int"),
        ((spaces.Discrete(2), lambda: spaces.Discrete(3), False), r"its ReplaceObjectEnv\.kept are Discrete\(3\)"),
    ],
)
def test_load_raises_if_an_object_without_saved_state_was_replaced(arguments: Any, text: str) -> None:
    with open_stepped_engine(functools.partial(ReplaceObjectEnv, *arguments), 2, steps=0) as envs:
        envs.save(verify=False)
        envs.step(np.array([0, 1]))
        saved = envs.save([0], verify=False)
        with pytest.raises(SnapshotMismatch, match=text):
            envs.load(saved, [1])


class SlotsEnv(kept_envs.CountingEnv):
    """An environment with an attribute in ``__slots__``."""

    __slots__ = ("height",)


class DocumentedSlots:
    """A class with a private attribute and a dict as ``__slots__``, which documents it."""

    __slots__ = {"__bound": "The bound."}

    def __init__(self, bound: float) -> None:
        self.__bound = bound


class EzPickledArgumentEnv(kept_envs.CountingEnv, EzPickle):
    """An environment that records the argument of its constructor with ``EzPickle``."""

    def __init__(self, argument: Any) -> None:
        EzPickle.__init__(self, argument)
        super().__init__()


def test_load_accepts_a_file_created_after_the_save_but_no_changed_file(tmp_path: Path) -> None:
    log, level = tmp_path / "log", tmp_path / "level"
    level.write_text("1")
    log_env_fn, level_env_fn = bind_pair(EzPickledArgumentEnv, str(log), str(level))
    with open_stepped_engine(log_env_fn) as log_envs, open_stepped_engine(level_env_fn) as level_envs:
        log_snapshots, level_snapshots = log_envs.save(verify=False), level_envs.save(verify=False)
        log.write_text("a line")
        with open_stepped_engine(log_env_fn) as envs:
            envs.load(log_snapshots)
            log_envs.load(envs.save(verify=False))
            log.unlink()
        with open_stepped_engine(log_env_fn) as envs:
            envs.load(log_snapshots)
        level.write_text("2")
        with open_stepped_engine(level_env_fn) as envs, pytest.raises(SnapshotMismatch, match="made with"):
            envs.load(level_snapshots)


def test_slots_of_arguments_are_compared_and_slots_of_environments_raise() -> None:
    with open_stepped_engine(SlotsEnv) as envs, pytest.raises(NotRestorable, match=r"attributes in __slots__.*: height"):
        envs.save(verify=False)
    with (
        open_stepped_engine(lambda: EzPickledArgumentEnv(DocumentedSlots(1.0))) as envs,
        open_stepped_engine(lambda: EzPickledArgumentEnv(DocumentedSlots(2.0))) as different,
    ):
        snapshots = envs.save()
        envs.load(snapshots)
        with pytest.raises(SnapshotMismatch, match="made with"):
            different.load(snapshots)


class Metres(float):
    """A number with a unit."""


class Name(str):
    """A text with a class of its own."""


@pytest.mark.parametrize(("one", "other"), [(Metres(1), Metres(2)), (Name("hill"), Name("valley"))])
def test_arguments_of_classes_derived_from_numbers_and_texts_are_compared(one: Any, other: Any) -> None:
    with (
        open_stepped_engine(lambda: EzPickledArgumentEnv(one)) as envs,
        open_stepped_engine(lambda: EzPickledArgumentEnv(other)) as different,
    ):
        snapshots = envs.save(verify=False)
        envs.load(snapshots)
        with pytest.raises(SnapshotMismatch, match="made with"):
            different.load(snapshots)


def test_describe_local_class_is_unchanged_by_copying_an_object() -> None:
    local_class = type(make_local_class_env(2))
    before = describe(local_class)
    copy.copy(local_class())
    assert describe(local_class) == before


@pytest.mark.parametrize("name", ["__firstlineno__", "__static_attributes__", "__annotate_func__", "__annotations_cache__"])
def test_describe_local_class_ignores_attributes_that_newer_pythons_add(name: str) -> None:
    local_class: Any = type(make_local_class_env(2))
    before = describe(local_class)
    setattr(local_class, name, ("x",))
    assert describe(local_class) == before


class Operation(enum.Enum):
    NEGATE = (lambda x: -x,)


def test_describe_enum_member_has_no_address() -> None:
    assert " at 0x" not in describe(Operation.NEGATE)


def make_object_array(middle_value: Any) -> Any:
    array = np.zeros(2000, object)
    array[1000] = middle_value
    return array


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (make_object_array(1), make_object_array(2)),
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

    def raise_permission_error(*args: Any) -> Any:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("builtins.open", raise_permission_error)
    assert describe(path) == f"file {str(path)!r}"


def test_exception_of_a_signal_handler_while_a_file_is_described_is_raised(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "level.json"
    path.write_text("{}")

    def raise_alarm(*args: Any) -> Any:
        raise Alarm

    monkeypatch.setattr("builtins.open", raise_alarm)
    with pytest.raises(Alarm):
        describe(path)
