"""Cases that share objects, generators or a library in their process, and some for which no verdict is possible."""

from __future__ import annotations

import functools
import importlib.util
import os
import random
import time
from typing import ClassVar

import gymnasium as gym
import numpy as np

from planning.cases.registry import SAME_OBJECT, SHARES, UNKNOWN, BaseEnv, BulletBallEnv, case


@case(SHARES)
def default_client():
    class Library:
        worlds: ClassVar[list[float]] = []

    class RobotEnv(BaseEnv):
        def __init__(self):
            Library.worlds.append(0.0)

        def reset(self, **kwargs):
            Library.worlds[0] = 0.0
            return super().reset(**kwargs)

        def observe(self):
            Library.worlds[0] += 1
            return np.array([Library.worlds[0]])

    return [RobotEnv] * 4


@case(SHARES)
def pybullet_default_client():
    class BallEnv(BulletBallEnv):
        def __init__(self):
            import pybullet

            self.p = pybullet
            pybullet.connect(pybullet.DIRECT)

    return [BallEnv] * 4


@case(SAME_OBJECT)
def same_instance():
    instance = BaseEnv()
    return [lambda: instance for _ in range(4)]


@case(SAME_OBJECT)
def same_instance_in_wrappers():
    instance = gym.make("CartPole-v1").unwrapped
    return [lambda: gym.wrappers.TimeLimit(instance, 100) for _ in range(4)]


@case(SHARES)
def class_counter_as_rank():
    class CountingEnv(BaseEnv):
        count = 0

        def __init__(self):
            self.rank = CountingEnv.count
            CountingEnv.count += 1

        def observe(self):
            return np.array([float(self.rank)])

    return [CountingEnv] * 4


@case(SHARES)
def class_counter_of_steps():
    class CountingEnv(BaseEnv):
        total = 0

        def observe(self):
            type(self).total += 1
            return np.array([float(self.total)])

    return [CountingEnv] * 4


@case(SHARES)
def class_attribute_set_by_first_instance():
    class PortEnv(BaseEnv):
        port = None

        def __init__(self, i):
            PortEnv.port = PortEnv.port or 5000 + i

        def observe(self):
            return np.array([float(PortEnv.port)])

    return [lambda i=i: PortEnv(i) for i in range(4)]


@case(SHARES)
def class_attribute_set_by_last_instance():
    class PortEnv(BaseEnv):
        def __init__(self, i):
            PortEnv.port = 5000 + i

        def observe(self):
            return np.array([float(PortEnv.port)])

    return [lambda i=i: PortEnv(i) for i in range(4)]


RNG = np.random.default_rng(0)


@case(SHARES)
def module_generator():
    class NoisyEnv(BaseEnv):
        def observe(self):
            return RNG.normal(size=1)

    return [NoisyEnv] * 4


@case(SHARES)
def module_generator_unseeded():
    rng = np.random.default_rng()

    class NoisyEnv(BaseEnv):
        def observe(self):
            return rng.normal(size=1)

    return [NoisyEnv] * 4


@case(SHARES)
def module_generator_seeded_in_reset():
    holder = {}

    class NoisyEnv(BaseEnv):
        def reset(self, *, seed=None, options=None):
            if seed is not None:
                holder["rng"] = np.random.default_rng(seed)
            return super().reset(seed=seed)

        def observe(self):
            return holder["rng"].normal(size=1)

    return [NoisyEnv] * 4


@case(SHARES)
def list_in_closure():
    shared = []

    class ListEnv(BaseEnv):
        def observe(self):
            shared.append(1)
            return np.array([float(len(shared))])

    return [ListEnv] * 4


@case(SHARES)
def mutable_default_argument():
    class LevelEnv(BaseEnv):
        def __init__(self, state={"x": 0}):  # noqa: B006  # the mistake of this case
            self.state = state

        def reset(self, **kwargs):
            self.state["x"] = 0
            return super().reset(**kwargs)

        def observe(self):
            self.state["x"] += 1
            return np.array([float(self.state["x"])])

    return [LevelEnv] * 4


@case(SHARES)
def draws_from_global_generators():
    class DrawingEnv(BaseEnv):
        def observe(self):
            return np.array([np.random.normal() + random.random()])

    return [DrawingEnv] * 4


@case(SHARES)
def seeds_numpy_in_reset():
    class DrawingEnv(BaseEnv):
        def reset(self, *, seed=None, options=None):
            np.random.seed(seed)
            return super().reset(seed=seed)

        def observe(self):
            return np.array([np.random.normal()])

    return [DrawingEnv] * 4


@case(SHARES)
def draws_from_torch():
    import torch

    class NoisyEnv(BaseEnv):
        def observe(self):
            return torch.randn(1).numpy()

    return [NoisyEnv] * 4


@case(SHARES)
def closing_ends_the_library():
    library = {"open": 0}

    class LibraryEnv(BaseEnv):
        def __init__(self):
            library["open"] = 1

        def observe(self):
            if not library["open"]:
                raise RuntimeError("library not initialised")
            return super().observe()

        def close(self):
            library["open"] = 0

    return [LibraryEnv] * 4


@case(UNKNOWN)
def clock_in_observation():
    class ClockEnv(BaseEnv):
        def observe(self):
            return np.array([time.perf_counter()])

    return [ClockEnv] * 4


@case(UNKNOWN)
def unseeded_python_generator():
    class NoisyEnv(BaseEnv):
        def __init__(self):
            self.rng = random.Random()

        def observe(self):
            return np.array([self.rng.random()])

    return [NoisyEnv] * 4


@case(SHARES)
def one_instance_per_process():
    licenses = []

    class LicensedEnv(BaseEnv):
        def __init__(self):
            if licenses:
                raise RuntimeError("one simulator per process")
            licenses.append(1)

        def close(self):
            licenses.clear()

    return [LicensedEnv] * 4


# The check misses the next two cases, because they share state only after more steps than it takes.
@case(SHARES)
def shares_after_20_steps():
    shared = []

    class LateSharingEnv(BaseEnv):
        def observe(self):
            if self.t > 20:
                shared.append(1)
            return np.array([float(len(shared))])

    return [LateSharingEnv] * 4


@case(SHARES)
def shares_after_30_step_episode():
    class CurriculumEnv(BaseEnv):
        level, episode_length = 0, 30

        def step(self, action):
            results = super().step(action)
            CurriculumEnv.level += results[2]
            return np.array([float(CurriculumEnv.level)]), *results[1:]

    return [CurriculumEnv] * 4


@case(SHARES)
def unseeded_class_space_sample():
    class SamplingEnv(BaseEnv):
        observation_space = gym.spaces.Box(-1, 1, (3,))

        def observe(self):
            return self.observation_space.sample()

    return [SamplingEnv] * 4


@case(SHARES)  # this package draws the start of an episode from numpy.random
def gym_trading_env_package():
    def build_env():
        import gym_trading_env  # noqa: F401
        import pandas as pd

        close = np.cumsum(np.random.default_rng(0).normal(size=200)) + 100
        columns = {"open": close, "close": close, "high": close + 1, "low": close - 1, "volume": 1.0}
        columns["feature_a"] = np.gradient(close)
        frame = pd.DataFrame(columns, index=pd.date_range("2024", periods=200))
        return gym.make("TradingEnv", df=frame, positions=[-1, 0, 1], verbose=0, windows=5)

    if importlib.util.find_spec("gym_trading_env") is None:
        raise ModuleNotFoundError("gym_trading_env")
    return [build_env] * 4


@case(UNKNOWN)
def simulation_in_real_time():
    import threading

    class RealTimeEnv(BaseEnv):
        def __init__(self):
            self.ticks, self.open = 0, True
            threading.Thread(target=self.run, daemon=True).start()

        def run(self):
            while self.open:
                self.ticks += 1
                time.sleep(0.0003)

        def observe(self):
            time.sleep(0.001)
            return np.array([float(self.ticks)])

        def close(self):
            self.open = False

    return [RealTimeEnv] * 4


@case(SHARES)
def cached_array_is_changed_in_place():
    @functools.lru_cache(8)
    def layout():
        return np.zeros(3)

    class CachingEnv(BaseEnv):
        observation_space = gym.spaces.Box(-9, 9, (3,))

        def reset(self, **kwargs):
            super().reset(**kwargs)
            self.layout = layout()
            self.layout[:] = 0
            return self.layout.copy(), {}

        def observe(self):
            self.layout += 1
            return self.layout.copy()

    return [CachingEnv] * 4


@case(SHARES)
def shared_simulator_object():
    class Simulator:
        time = 0

    simulator = Simulator()

    class SimulatorEnv(BaseEnv):
        def reset(self, **kwargs):
            simulator.time = 0
            return super().reset(**kwargs)

        def observe(self):
            simulator.time += 1
            return np.array([float(simulator.time)])

    return [SimulatorEnv] * 4


@case(SHARES)
def crashes_with_second_instance():
    alive = []

    class CrashingEnv(BaseEnv):
        def __init__(self):
            alive.append(self)
            if len(alive) > 1:
                os.kill(os.getpid(), 9)

        def close(self):
            alive.clear()

    return [CrashingEnv] * 4


@case(UNKNOWN)
def crashes_in_step():
    class CrashingEnv(BaseEnv):
        def step(self, action):
            os.kill(os.getpid(), 9)

    return [CrashingEnv] * 4


@case(UNKNOWN)
def hangs_in_step():
    class HangingEnv(BaseEnv):
        def step(self, action):
            time.sleep(1000)

    return [HangingEnv] * 4


@case(SAME_OBJECT)
def pool_of_two_objects():
    pool = [BaseEnv(), BaseEnv()]
    return [lambda i=i: pool[i % 2] for i in range(4)]


@case(SHARES)
def info_counts_all_steps():
    class CountingEnv(BaseEnv):
        total = 0

        def step(self, action):
            CountingEnv.total += 1
            return *super().step(action)[:4], {"total": CountingEnv.total}

    return [CountingEnv] * 4
