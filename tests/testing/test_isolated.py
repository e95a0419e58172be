"""Tests of ``assert_isolated``: it fails for environments that share state, and names that state."""

from __future__ import annotations

import functools
import random
import re
from typing import Any

import gymnasium
import numpy as np
import pytest

from vecenv.testing import assert_isolated, assert_restorable

pytestmark = pytest.mark.timeout(120)
RNG = np.random.default_rng(0)
COUNTS = {"steps": 0}


class IsolatedEnv(gymnasium.Env[Any, Any]):
    observation_space = gymnasium.spaces.Box(-9, 9, (1,), np.float64)
    action_space = gymnasium.spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.begin_episode(seed)
        return np.array([self.next_value()]), {}

    def begin_episode(self, seed: int | None) -> None:
        pass

    def next_value(self) -> float:
        return float(self.np_random.random())

    def step(self, action: Any) -> Any:
        return np.array([self.next_value()]), 0.0, self.np_random.random() < 0.1, False, {}


class NumpyGlobalEnv(IsolatedEnv):
    def next_value(self) -> float:
        return float(np.random.normal())


class PythonGlobalEnv(IsolatedEnv):
    def next_value(self) -> float:
        return random.random()


class GlobalSeedEnv(IsolatedEnv):
    def begin_episode(self, seed: int | None) -> None:
        np.random.seed(seed if seed is not None else 1)

    def next_value(self) -> float:
        return float(np.random.rand())


class ConstructorDrawEnv(IsolatedEnv):
    def __init__(self) -> None:
        self.mass = np.random.rand()

    def next_value(self) -> float:
        return self.mass


class ClassStateEnv(IsolatedEnv):
    total_steps = 0

    def next_value(self) -> float:
        type(self).total_steps += 1
        return float(self.total_steps % 7)


class ClassStatePerEpisodeEnv(ClassStateEnv):
    def begin_episode(self, seed: int | None) -> None:
        type(self).total_steps = 0


class ModuleStateEnv(IsolatedEnv):
    def next_value(self) -> float:
        COUNTS["steps"] += 1
        return float(COUNTS["steps"] % 7)


class ModuleGeneratorEnv(IsolatedEnv):
    def next_value(self) -> float:
        return float(RNG.random())


class MazegeneratorEnv(IsolatedEnv):
    mazes = 0

    def next_value(self) -> float:
        MazegeneratorEnv.mazes += 1
        return float(self.mazes % 7)


class UnusedDrawEnv(IsolatedEnv):
    def begin_episode(self, seed: int | None) -> None:
        np.random.rand()


@pytest.mark.parametrize(
    ("env_fn", "state"),
    [
        (NumpyGlobalEnv, "numpy.random's global generator"),
        (PythonGlobalEnv, "the generator of Python's module random"),
        (GlobalSeedEnv, "numpy.random's global generator"),
        (ConstructorDrawEnv, "numpy.random's global generator"),
        (ClassStateEnv, "total_steps"),
        (ClassStatePerEpisodeEnv, "total_steps"),
        (ModuleStateEnv, "COUNTS"),
        (ModuleGeneratorEnv, "RNG"),
        (MazegeneratorEnv, "MazegeneratorEnv.mazes"),
    ],
)
def test_error_names_the_shared_state(env_fn: Any, state: str) -> None:
    pattern = rf"{env_fn.__name__} is not isolated: its results depend on .*{re.escape(state)}"
    with pytest.raises(AssertionError, match=pattern):
        assert_isolated(env_fn)


@pytest.mark.parametrize("env_fn", [IsolatedEnv, UnusedDrawEnv, functools.partial(gymnasium.make, "CartPole-v1")])
def test_isolated_environments_pass_and_global_generators_are_restored(env_fn: Any) -> None:
    before = random.getstate(), np.random.get_state()[1].tolist()  # type: ignore[index, union-attr]
    assert_isolated(env_fn)
    assert before == (random.getstate(), np.random.get_state()[1].tolist())  # type: ignore[index, union-attr]


@pytest.mark.parametrize("check", [assert_isolated, assert_restorable])
def test_seed_may_be_a_numpy_integer(check: Any) -> None:
    check(functools.partial(gymnasium.make, "CartPole-v1"), seed=np.int64(3), steps=np.int64(8))


class OldStepEnv(IsolatedEnv):
    def step(self, action: Any) -> Any:
        return super().step(action)[:4]


@pytest.mark.parametrize("check", [assert_isolated, assert_restorable])
def test_environments_with_a_step_of_old_gym_are_refused(check: Any) -> None:
    with pytest.raises(ValueError, match=r"step\(\) must return 5 values, got 4"):
        check(OldStepEnv)


@pytest.mark.parametrize("steps", [0, -1])
def test_check_without_steps_is_refused(steps: int) -> None:
    with pytest.raises(ValueError, match="`steps` must be a positive int"):
        assert_isolated(PythonGlobalEnv, steps=steps)


def test_generators_are_restored_if_an_environment_cannot_be_built() -> None:
    def raise_runtime_error() -> Any:
        random.seed(1)
        raise RuntimeError("no simulator")

    before = random.getstate()
    with pytest.raises(RuntimeError, match="no simulator"):
        assert_isolated(raise_runtime_error)
    assert random.getstate() == before


def test_first_environment_is_closed_if_the_second_cannot_be_built() -> None:
    built: list[Any] = []

    class SingleInstanceEnv(IsolatedEnv):
        def __init__(self) -> None:
            self.closed = False
            if built and not built[-1].closed:
                raise RuntimeError("the device is in use")
            built.append(self)

        def close(self) -> None:
            random.random()
            self.closed = True

    before = random.getstate()
    for check in (assert_isolated, assert_restorable):
        with pytest.raises(Exception, match="the device is in use"):
            check(SingleInstanceEnv)
        assert built.pop().closed
        assert random.getstate() == before


@pytest.mark.long
@pytest.mark.parametrize(("env_id", "module"), [("Ant-v5", "mujoco"), ("ALE/Pong-v5", "ale_py")])
def test_environments_of_simulators_pass(env_id: str, module: str) -> None:
    pytest.importorskip(module)
    if module == "ale_py":
        import ale_py

        gymnasium.register_envs(ale_py)
    assert_isolated(functools.partial(gymnasium.make, env_id))
