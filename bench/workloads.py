"""The environments of the benchmarks: real ones, and synthetic ones that isolate one cost each.

Empty steps show the engine's own cost, large observations the cost of copies, nested observations that of many arrays, busy
steps how evenly the work is divided among cores, and sleeping steps the cost of waiting for the slowest environment.
"""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

from vecenv.tools.runners import EnvFn, Unavailable, make_env


class EmptyEnv(gymnasium.Env[np.ndarray, np.int64]):
    """An environment with empty steps, a constant observation and endless episodes."""

    def __init__(self, shape: tuple[int, ...] = (4,), dtype: str = "float32") -> None:
        high = 255 if dtype == "uint8" else 1
        self.observation_space = spaces.Box(0, high, shape, np.dtype(dtype).type)
        self.action_space = spaces.Discrete(2)
        self._observation = np.ones(shape, dtype)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[np.ndarray, dict[str, Any]]:
        super().reset(seed=seed)
        return self._observation, {}

    def step(self, action: np.int64) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        return self._observation, 0.0, False, False, {}


class BusyEnv(EmptyEnv):
    """An environment with ``iterations`` of a loop in each step, so that its work does not depend on the load."""

    def __init__(self, iterations: int) -> None:
        super().__init__()
        self._iterations = iterations

    def step(self, action: np.int64) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        for _ in range(self._iterations):
            pass
        return super().step(action)


class WaitingEnv(EmptyEnv):
    """An environment with steps and resets that wait.

    Args:
        step: Seconds per step, or a range to draw them from.
        reset: Seconds per reset.
        length: Steps per episode, or a range (without its end) to draw their number from; ``None``: endless.
        shape, dtype: The shape and dtype of observations.
    """

    def __init__(
        self, step: float | tuple[float, float], reset: float = 0.0, length: int | tuple[int, int] | None = None,
        shape: tuple[int, ...] = (4,), dtype: str = "float32",
    ) -> None:  # fmt: skip
        super().__init__(shape, dtype)
        self._step, self._reset, self._length = step, reset, length

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[np.ndarray, dict[str, Any]]:
        result = super().reset(seed=seed)
        if self._reset:
            time.sleep(self._reset)
        length = self._length
        self._steps_left = int(self.np_random.integers(*length)) if isinstance(length, tuple) else length
        return result

    def step(self, action: np.int64) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        if self._step:
            time.sleep(self.np_random.uniform(*self._step) if isinstance(self._step, tuple) else self._step)
        if self._steps_left is None:
            return self._observation, 1.0, False, False, {}
        self._steps_left -= 1
        return self._observation, 1.0, self._steps_left <= 0, False, {}


class LogNormalWaitingEnv(EmptyEnv):
    """An environment with steps that wait for log-normal times. The observation is the actual duration in seconds."""

    def __init__(self, mean: float = 0.01, sigma: float = 1.0) -> None:
        super().__init__((1,))
        self.observation_space = spaces.Box(0, np.inf, (1,), np.float32)
        self._observation = np.zeros(1, np.float32)
        self._mu, self._sigma = np.log(mean) - sigma**2 / 2, sigma

    def step(self, action: np.int64) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        start = time.perf_counter()
        time.sleep(self.np_random.lognormal(self._mu, self._sigma))
        return np.array([time.perf_counter() - start], np.float32), 0.0, False, False, {}


class NestedEnv(EmptyEnv):
    """An environment with nested observations as in robotics: six leaves on three levels."""

    def __init__(self) -> None:
        box = partial(spaces.Box, -1, 1, dtype=np.float32)
        self.observation_space = spaces.Dict(
            camera=spaces.Box(0, 255, (32, 32, 3), np.uint8),
            body=spaces.Dict(position=box((3,)), velocity=box((3,)), joints=spaces.Dict(angle=box((8,)), torque=box((8,)))),
            goal=spaces.Discrete(10),
        )
        self.action_space = box((8,))
        self.observation_space.seed(0)
        self._observation: Any = self.observation_space.sample()


class DropInfos(gymnasium.Wrapper[Any, Any, Any, Any]):
    """A wrapper that replaces the infos of an environment with empty dicts. The environment still computes them."""

    def reset(self, **options: Any) -> tuple[Any, dict[str, Any]]:
        observation, _ = self.env.reset(**options)
        return observation, {}

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        observation, reward, terminated, truncated, _ = self.env.step(action)
        return observation, reward, terminated, truncated, {}


def make_wrapped(wrapper: Callable[[Any], Any], env_id: str) -> Any:
    return wrapper(make_env(env_id))


MINIGRID = "MiniGrid-DoorKey-8x8-v0"


def make_minigrid(env_id: str) -> gymnasium.Env[Any, Any]:
    """Build a MiniGrid environment with image observations, ``(7, 7, 3)`` uint8.

    Raises:
        Unavailable: minigrid is not installed.
    """
    try:
        import minigrid
        from minigrid.wrappers import ImgObsWrapper
    except ImportError as error:
        raise Unavailable(f"minigrid is not installed ({error})") from None
    gymnasium.register_envs(minigrid)
    return ImgObsWrapper(gymnasium.make(env_id))


def _require(module: str, env_fn: EnvFn) -> EnvFn:
    """Return ``env_fn``, which needs a module.

    Raises:
        Unavailable: ``module`` is not installed.
    """
    if importlib.util.find_spec(module) is None:
        raise Unavailable(f"{module} is not installed")
    return env_fn


@cache
def count_iterations(microseconds: float) -> int:
    """Return the number of iterations of an empty loop that an idle core does in this time, by the fastest of 50 runs."""
    iterations = 20_000

    def time_loop() -> float:
        start = time.perf_counter()
        for _ in range(iterations):
            pass
        return time.perf_counter() - start

    return max(1, round(iterations * microseconds * 1e-6 / min(time_loop() for _ in range(50))))


def _make_busy_env_fn(microseconds: float) -> EnvFn:
    return partial(BusyEnv, count_iterations(microseconds))


@dataclass(frozen=True)
class Workload:
    """A named environment of the benchmarks.

    Attributes:
        prepare: Returns the function that builds the environment, or raises ``Unavailable``.
        description: A short description, which also names the workload in tables of training runs.
    """

    name: str
    prepare: Callable[[], EnvFn]
    description: str


def _registered_workload(env_id: str, description: str, module: str = "gymnasium") -> Workload:
    """Return the workload of a registered environment that needs ``module``."""
    return Workload(env_id, partial(_require, module, partial(make_env, env_id)), description)


WORKLOADS = {
    workload.name: workload
    for workload in (
        _registered_workload("CartPole-v1", "classic control, short episodes, a few microseconds per step"),
        _registered_workload("Pendulum-v1", "classic control, continuous actions"),
        _registered_workload("HalfCheetah-v5", "MuJoCo, 40 microseconds per step, four numeric info keys", "mujoco"),
        _registered_workload("LunarLander-v3", "Box2D physics", "Box2D"),
        Workload(MINIGRID, partial(_require, "minigrid", partial(make_minigrid, MINIGRID)), "a grid world, (7, 7, 3)"),
        _registered_workload("Ant-v5", "MuJoCo, nine numeric info keys per step", "mujoco"),
        _registered_workload("ALE/Pong-v5", "Atari, observations (210, 160, 3) uint8", "ale_py"),
        Workload("empty", lambda: EmptyEnv, "an empty step, observations (4,) float32"),
        Workload("images", lambda: partial(EmptyEnv, (84, 84, 4), "uint8"), "an empty step, (84, 84, 4) uint8"),
        Workload("nested", lambda: NestedEnv, "an empty step, nested Dict observations with six leaves"),
        Workload("busy-10us", lambda: _make_busy_env_fn(10), "10 microseconds of computing"),
        Workload("busy-100us", lambda: _make_busy_env_fn(100), "100 microseconds of computing"),
        Workload("busy-1000us", lambda: _make_busy_env_fn(1000), "1 millisecond of computing"),
        Workload("sleeping", lambda: LogNormalWaitingEnv, "sleeps, log-normal times, mean 10 ms, sigma 1"),
    )
}


def installed_workloads() -> tuple[str, ...]:
    """Return the names of the workloads that can be built with the installed packages."""

    def is_available(workload: Workload) -> bool:
        try:
            workload.prepare()
        except Unavailable:
            return False
        return True

    return tuple(name for name, workload in WORKLOADS.items() if is_available(workload))
