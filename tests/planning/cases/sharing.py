"""Environments that share objects, generators or a library in their process, and some for which no verdict is possible."""

from __future__ import annotations

import functools
import importlib.util
import os
import random
import time
from typing import ClassVar

import gymnasium as gym
import numpy as np

from planning.cases.registry import SAME_OBJECT, SHARES, UNKNOWN, Base, BulletBall, case


@case(SHARES)
def default_client():
    class Library:
        worlds: ClassVar[list[float]] = []

    class Robot(Base):
        def __init__(self):
            Library.worlds.append(0.0)

        def reset(self, **kwargs):
            Library.worlds[0] = 0.0
            return super().reset(**kwargs)

        def observe(self):
            Library.worlds[0] += 1
            return np.array([Library.worlds[0]])

    return [Robot] * 4


@case(SHARES)
def pybullet_default_client():
    class Ball(BulletBall):
        def __init__(self):
            import pybullet

            self.p = pybullet
            pybullet.connect(pybullet.DIRECT)

    return [Ball] * 4


@case(SAME_OBJECT)
def same_instance():
    instance = Base()
    return [lambda: instance for _ in range(4)]


@case(SAME_OBJECT)
def same_instance_in_wrappers():
    instance = gym.make("CartPole-v1").unwrapped
    return [lambda: gym.wrappers.TimeLimit(instance, 100) for _ in range(4)]


@case(SHARES)
def class_counter_as_rank():
    class Counted(Base):
        count = 0

        def __init__(self):
            self.rank = Counted.count
            Counted.count += 1

        def observe(self):
            return np.array([float(self.rank)])

    return [Counted] * 4


@case(SHARES)
def class_counter_of_steps():
    class Counted(Base):
        total = 0

        def observe(self):
            type(self).total += 1
            return np.array([float(self.total)])

    return [Counted] * 4


@case(SHARES)
def class_attribute_set_by_first_instance():
    class Port(Base):
        port = None

        def __init__(self, i):
            Port.port = Port.port or 5000 + i

        def observe(self):
            return np.array([float(Port.port)])

    return [lambda i=i: Port(i) for i in range(4)]


@case(SHARES)
def class_attribute_set_by_last_instance():
    class Port(Base):
        def __init__(self, i):
            Port.port = 5000 + i

        def observe(self):
            return np.array([float(Port.port)])

    return [lambda i=i: Port(i) for i in range(4)]


RNG = np.random.default_rng(0)


@case(SHARES)
def module_generator():
    class Noisy(Base):
        def observe(self):
            return RNG.normal(size=1)

    return [Noisy] * 4


@case(SHARES)
def module_generator_unseeded():
    rng = np.random.default_rng()

    class Noisy(Base):
        def observe(self):
            return rng.normal(size=1)

    return [Noisy] * 4


@case(SHARES)
def module_generator_seeded_in_reset():
    holder = {}

    class Noisy(Base):
        def reset(self, *, seed=None, options=None):
            if seed is not None:
                holder["rng"] = np.random.default_rng(seed)
            return super().reset(seed=seed)

        def observe(self):
            return holder["rng"].normal(size=1)

    return [Noisy] * 4


@case(SHARES)
def list_in_closure():
    shared = []

    class Listed(Base):
        def observe(self):
            shared.append(1)
            return np.array([float(len(shared))])

    return [Listed] * 4


@case(SHARES)
def mutable_default_argument():
    class Level(Base):
        def __init__(self, state={"x": 0}):  # noqa: B006  # the mistake itself
            self.state = state

        def reset(self, **kwargs):
            self.state["x"] = 0
            return super().reset(**kwargs)

        def observe(self):
            self.state["x"] += 1
            return np.array([float(self.state["x"])])

    return [Level] * 4


def draws():
    class Drawing(Base):
        def observe(self):
            return np.array([np.random.normal() + random.random()])

    return [Drawing] * 4


case(SHARES)(draws)


@case(SHARES)
def seeds_numpy_in_reset():
    class Drawing(Base):
        def reset(self, *, seed=None, options=None):
            np.random.seed(seed)
            return super().reset(seed=seed)

        def observe(self):
            return np.array([np.random.normal()])

    return [Drawing] * 4


@case(SHARES)
def draws_from_torch():
    import torch

    class Noisy(Base):
        def observe(self):
            return torch.randn(1).numpy()

    return [Noisy] * 4


@case(SHARES)
def closing_ends_the_library():
    library = {"open": 0}

    class LibraryUser(Base):
        def __init__(self):
            library["open"] = 1

        def observe(self):
            if not library["open"]:
                raise RuntimeError("library not initialised")
            return super().observe()

        def close(self):
            library["open"] = 0

    return [LibraryUser] * 4


@case(UNKNOWN)
def clock_in_observation():
    class Clock(Base):
        def observe(self):
            return np.array([time.perf_counter()])

    return [Clock] * 4


@case(UNKNOWN)
def unseeded_python_generator():
    class Noisy(Base):
        def __init__(self):
            self.rng = random.Random()

        def observe(self):
            return np.array([self.rng.random()])

    return [Noisy] * 4


@case(SHARES)
def one_instance_per_process():
    held = []

    class Licensed(Base):
        def __init__(self):
            if held:
                raise RuntimeError("one simulator per process")
            held.append(1)

        def close(self):
            held.clear()

    return [Licensed] * 4


# These two share state only after more steps than the check makes, so it misses them.
@case(SHARES)
def shares_after_20_steps():
    shared = []

    class Late(Base):
        def observe(self):
            if self.t > 20:
                shared.append(1)
            return np.array([float(len(shared))])

    return [Late] * 4


@case(SHARES)
def shares_after_30_step_episode():
    class Curriculum(Base):
        level, ends = 0, 30

        def step(self, action):
            results = super().step(action)
            Curriculum.level += results[2]
            return np.array([float(Curriculum.level)]), *results[1:]

    return [Curriculum] * 4


@case(SHARES)
def unseeded_class_space_sample():
    class Sampled(Base):
        observation_space = gym.spaces.Box(-1, 1, (3,))

        def observe(self):
            return self.observation_space.sample()

    return [Sampled] * 4


@case(SHARES)  # the real package draws the start of an episode from numpy.random
def gym_trading_env_package():
    def build():
        import gym_trading_env  # noqa: F401
        import pandas as pd

        close = np.cumsum(np.random.default_rng(0).normal(size=200)) + 100
        columns = {"open": close, "close": close, "high": close + 1, "low": close - 1, "volume": 1.0}
        columns["feature_a"] = np.gradient(close)
        frame = pd.DataFrame(columns, index=pd.date_range("2024", periods=200))
        return gym.make("TradingEnv", df=frame, positions=[-1, 0, 1], verbose=0, windows=5)

    if importlib.util.find_spec("gym_trading_env") is None:
        raise ModuleNotFoundError("gym_trading_env")
    return [build] * 4


@case(UNKNOWN)
def simulation_in_real_time():
    import threading

    class Live(Base):
        def __init__(self):
            self.now, self.open = 0, True
            threading.Thread(target=self.run, daemon=True).start()

        def run(self):
            while self.open:
                self.now += 1
                time.sleep(0.0003)

        def observe(self):
            time.sleep(0.001)
            return np.array([float(self.now)])

        def close(self):
            self.open = False

    return [Live] * 4


@case(SHARES)
def cached_array_is_changed_in_place():

    @functools.lru_cache(8)
    def layout():
        return np.zeros(3)

    class Cached(Base):
        observation_space = gym.spaces.Box(-9, 9, (3,))

        def reset(self, **kwargs):
            super().reset(**kwargs)
            self.layout = layout()
            self.layout[:] = 0
            return self.layout.copy(), {}

        def observe(self):
            self.layout += 1
            return self.layout.copy()

    return [Cached] * 4


@case(SHARES)
def shared_simulator_object():
    class Simulator:
        x = 0

    simulator = Simulator()

    class Remote(Base):
        def reset(self, **kwargs):
            simulator.x = 0
            return super().reset(**kwargs)

        def observe(self):
            simulator.x += 1
            return np.array([float(simulator.x)])

    return [Remote] * 4


@case(SHARES)
def crashes_with_second_instance():
    alive = []

    class Fragile(Base):
        def __init__(self):
            alive.append(self)
            if len(alive) > 1:
                os.kill(os.getpid(), 9)

        def close(self):
            alive.clear()

    return [Fragile] * 4


@case(UNKNOWN)
def crashes_always():
    class Fragile(Base):
        def step(self, action):
            os.kill(os.getpid(), 9)

    return [Fragile] * 4


@case(UNKNOWN)
def hangs():
    class Hangs(Base):
        def step(self, action):
            time.sleep(1000)

    return [Hangs] * 4


@case(SAME_OBJECT)
def pool_of_two_objects():
    pool = [Base(), Base()]
    return [lambda i=i: pool[i % 2] for i in range(4)]


@case(SHARES)
def info_counts_all_steps():
    class Counted(Base):
        total = 0

        def step(self, action):
            Counted.total += 1
            return *super().step(action)[:4], {"total": Counted.total}

    return [Counted] * 4
