"""Cases of environments that may share a process."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import os
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import gymnasium as gym
import numpy as np

from planning.cases.registry import CASES, CLEAN, SHARES, UNKNOWN, BaseEnv, BulletBallEnv, EnvFns, case


@case(CLEAN)
def pybullet_own_client():
    class BallEnv(BulletBallEnv):
        def __init__(self):
            import pybullet
            from pybullet_utils.bullet_client import BulletClient

            self.p = BulletClient(pybullet.DIRECT)

        def close(self):
            self.p.disconnect()

    return [BallEnv] * 4


@case(CLEAN)
def signal_in_trainer_thread():  # outside of the main thread, the caller steps no environments anyway
    import signal

    class SignalHandlingEnv(BaseEnv):
        def step(self, action):
            signal.signal(signal.SIGUSR1, signal.SIG_DFL)
            return super().step(action)

    return [SignalHandlingEnv] * 4


@case(CLEAN)
def class_counter_not_observed():
    class CountingEnv(BaseEnv):
        total = 0

        def observe(self):
            type(self).total += 1
            return super().observe()

    return [CountingEnv] * 4


@case(CLEAN)
def harmless_cache():
    cache = {}

    class CachingEnv(BaseEnv):
        def observe(self):
            return np.array([cache.setdefault(self.t, self.t * 2.0)])

    return [CachingEnv] * 4


@case(CLEAN)
def draws_with_own_generators():
    return CASES["draws_from_global_generators"][1]()


@case(CLEAN)
def seeds_numpy_in_reset_with_own_generators():
    return CASES["seeds_numpy_in_reset"][1]()


GYMNASIUM_IDS = (
    "CartPole-v1", "Pendulum-v1", "MountainCarContinuous-v0", "Acrobot-v1", "Ant-v5", "HalfCheetah-v5", "Humanoid-v5",
    "LunarLander-v3", "BipedalWalker-v3", "FrozenLake-v1", "Blackjack-v1", "Taxi-v4", "CliffWalking-v1", "CarRacing-v3",
)  # fmt: skip
RENDERED_IDS = ("CartPole-v1", "FrozenLake-v1", "LunarLander-v3", "Taxi-v4", "Blackjack-v1")


def gymnasium_case(env_id: str, **kwargs: Any) -> tuple[Any, Callable[[], EnvFns]]:
    return CLEAN, lambda: [functools.partial(gym.make, env_id, **kwargs)] * 4


CASES.update({env_id: gymnasium_case(env_id) for env_id in GYMNASIUM_IDS})
CASES.update({f"{env_id} rgb_array": gymnasium_case(env_id, render_mode="rgb_array") for env_id in RENDERED_IDS})


def make_atari_env_fns(**kwargs):
    def build_env():
        import ale_py

        gym.register_envs(ale_py)
        return gym.make("ALE/Pong-v5", **kwargs)

    return [build_env] * 4


CASES["ALE/Pong-v5 sticky"] = CLEAN, make_atari_env_fns
CASES["ALE/Pong-v5"] = CLEAN, lambda: make_atari_env_fns(repeat_action_probability=0.0)
CASES["ALE/Pong-v5 rgb_array"] = CLEAN, lambda: make_atari_env_fns(render_mode="rgb_array")


def make_minigrid_env_fns(env_id="MiniGrid-Empty-5x5-v0"):
    def build_env():
        import minigrid  # noqa: F401

        return gym.make(env_id)

    return [build_env] * 4


CASES["MiniGrid-Empty-5x5-v0"] = CLEAN, make_minigrid_env_fns
CASES["MiniGrid-Dynamic-Obstacles-6x6-v0"] = CLEAN, lambda: make_minigrid_env_fns("MiniGrid-Dynamic-Obstacles-6x6-v0")


@case(CLEAN)
def two_kinds_of_environments():
    return [lambda: gym.make("CartPole-v1")] * 2 + [lambda: gym.make("CartPole-v1", render_mode="rgb_array")] * 2


@case(CLEAN)
def record_episode_statistics():
    return [lambda: gym.wrappers.RecordEpisodeStatistics(gym.make("CartPole-v1", max_episode_steps=2))] * 4


@case(CLEAN)
def clock_and_pid_in_info():
    class ClockEnv(BaseEnv):
        def step(self, action):
            return *super().step(action)[:4], {"t": round(time.perf_counter(), 3), "pid": os.getpid(), "id": id(self)}

    return [ClockEnv] * 4


@case(CLEAN)
def unseeded_space_sample():
    class SamplingEnv(BaseEnv):
        def __init__(self):
            self.observation_space = gym.spaces.Box(-1, 1, (3,))

        def observe(self):
            return self.observation_space.sample()

    return [SamplingEnv] * 4


@case(CLEAN)
def counts_episodes_across_resets():
    class EpisodeCountingEnv(BaseEnv):
        def __init__(self):
            self.episodes = 0

        def reset(self, **kwargs):
            self.episodes += 1
            return super().reset(**kwargs)

        def observe(self):
            return np.array([float(self.episodes)])

    return [EpisodeCountingEnv] * 4


@case(CLEAN)
def helper_thread():
    import queue
    import threading

    class ThreadEnv(BaseEnv):
        def __init__(self):
            self.tasks, self.results = queue.Queue(), queue.Queue()
            self.thread = threading.Thread(target=self.work, daemon=True)
            self.thread.start()

        def work(self):
            while (task := self.tasks.get()) is not None:
                self.results.put(task * 2)

        def observe(self):
            self.tasks.put(self.t)
            return np.array([float(self.results.get())])

        def close(self):
            self.tasks.put(None)
            self.thread.join()

    return [ThreadEnv] * 4


@case(CLEAN)
def child_process():
    class ChildProcessEnv(BaseEnv):
        def __init__(self):
            code = "import sys\nfor line in sys.stdin: print(int(line) * 2, flush=True)"
            pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
            self.child = subprocess.Popen([sys.executable, "-c", code], text=True, **pipes)

        def observe(self):
            self.child.stdin.write(f"{self.t}\n")
            self.child.stdin.flush()
            return np.array([float(self.child.stdout.readline())])

        def close(self):
            self.child.stdin.close()
            self.child.wait()

    return [ChildProcessEnv] * 4


@case(CLEAN)
def pettingzoo_as_gym():
    def build_env():
        from pettingzoo.classic import rps_v2

        class SingleAgentEnv(gym.Env):
            def __init__(self):
                self.env = rps_v2.parallel_env(max_cycles=5)
                self.agent = self.env.possible_agents[0]
                self.observation_space = self.env.observation_space(self.agent)
                self.action_space = self.env.action_space(self.agent)

            def reset(self, *, seed=None, options=None):
                super().reset(seed=seed)
                observations, infos = self.env.reset(seed=seed)
                return observations[self.agent], infos[self.agent]

            def step(self, action):
                other_action = int(self.np_random.integers(3))
                results = self.env.step(dict(zip(self.env.possible_agents, (action, other_action), strict=True)))
                return tuple(part[self.agent] for part in results)

        return SingleAgentEnv()

    return [build_env] * 4


@case(CLEAN)
def slow_steps():
    class SlowEnv(BaseEnv):
        def observe(self):
            time.sleep(0.03)
            return super().observe()

    return [SlowEnv] * 4


@case(CLEAN)
def draws_with_jax():
    import jax
    import jax.numpy as jnp

    class JaxEnv(BaseEnv):
        def reset(self, *, seed=None, options=None):
            self.key = jax.random.key(seed if seed is not None else 0)
            return super().reset(seed=seed)

        def observe(self):
            self.key, key = jax.random.split(self.key)
            return np.asarray(jnp.sin(jax.random.normal(key, (1,))), np.float64)

    return [JaxEnv] * 4


@case(CLEAN)
def single_environment():
    return [lambda: gym.make("CartPole-v1")]


@case(CLEAN)
def event_loop_per_environment():
    import asyncio

    class EventLoopEnv(BaseEnv):
        def __init__(self):
            self.loop = asyncio.new_event_loop()

        def observe(self):
            return np.array([self.loop.run_until_complete(self.observe_later())])

        async def observe_later(self):
            await asyncio.sleep(0)
            return float(self.t)

    return [EventLoopEnv] * 4


@case(CLEAN)
def gym_trading_env_package_with_own_generators():
    return CASES["gym_trading_env_package"][1]()


def package_case(module, env_id, **kwargs):
    def build_env():
        importlib.import_module(module)
        return gym.make(env_id, **kwargs)

    def make_env_fns():
        if importlib.util.find_spec(module) is None:
            raise ModuleNotFoundError(module)
        return [build_env] * 4

    return CLEAN, make_env_fns


CASES["highway-v0"] = package_case("highway_env", "highway-v0")
CASES["parking-v0"] = package_case("highway_env", "parking-v0")
CASES["PandaReach-v3"] = package_case("panda_gym", "PandaReach-v3")
CASES["FlappyBird-v0"] = package_case("flappy_bird_gymnasium", "FlappyBird-v0")
CASES["FlappyBird-v0 rgb_array"] = package_case("flappy_bird_gymnasium", "FlappyBird-v0", render_mode="rgb_array")


@case(CLEAN)
def ignores_seeds():
    class UnseededEnv(BaseEnv):
        def reset(self, *, seed=None, options=None):
            self.rng = np.random.default_rng()
            self.t = 0
            return np.array([0.0]), {}

        def observe(self):
            return self.rng.normal(size=1)

    return [UnseededEnv] * 4


@case((CLEAN, UNKNOWN, SHARES))  # the order depends on memory addresses, so another environment may change it
def set_order_by_address():
    class Item:
        pass

    class SetOrderEnv(BaseEnv):
        def __init__(self):
            self.items = {Item(): i for i in range(9)}

        def observe(self):
            first_item = next(iter(set(self.items)))
            return np.array([float(self.items[first_item])])

    return [SetOrderEnv] * 4


@case(CLEAN)
def cache_of_seeded_layouts():
    @functools.lru_cache(8)
    def layout(seed):
        return np.random.default_rng(seed).normal(size=3)

    class CachingEnv(BaseEnv):
        observation_space = gym.spaces.Box(-9, 9, (3,))

        def reset(self, *, seed=None, options=None):
            super().reset(seed=seed)
            self.layout = layout(int(self.np_random.integers(5)))
            return self.layout.copy(), {}

        def observe(self):
            return self.layout + self.t

    return [CachingEnv] * 4


@case(CLEAN)
def uninitialized_array_in_info():
    class UninitializedInfoEnv(BaseEnv):
        def step(self, action):
            return *super().step(action)[:4], {"scratch": np.empty(1000)}

    return [UninitializedInfoEnv] * 4


@case(CLEAN)
def raises_in_second_reset():
    class RaisingEnv(BaseEnv):
        def reset(self, *, seed=None, options=None):
            if seed is None:
                raise RuntimeError("a seed is needed")
            return super().reset(seed=seed)

    return [RaisingEnv] * 4


@case(CLEAN)
def raises_in_step():
    class RaisingEnv(BaseEnv):
        def step(self, action):
            if self.t == 5:
                raise RuntimeError("no more")
            return super().step(action)

    return [RaisingEnv] * 4
