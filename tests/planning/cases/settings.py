"""Cases that change settings of their process, or depend on its name, number or environment variables."""

from __future__ import annotations

import contextlib
import os
import random
import sys
import tempfile
from typing import Any, ClassVar

import gymnasium as gym
import numpy as np

from planning.cases.registry import CASES, CHANGES, SHARES, UNKNOWN, BaseEnv, case


@case(SHARES)
def working_directory():
    class SolverEnv(BaseEnv):
        def __init__(self):
            self.folder = tempfile.mkdtemp()
            os.chdir(self.folder)

        def reset(self, **kwargs):
            with open("state.txt", "w") as file:
                file.write("0")
            return super().reset(**kwargs)

        def observe(self):
            with open("state.txt") as file:
                steps = int(file.read()) + 1
            with open("state.txt", "w") as file:
                file.write(str(steps))
            return np.array([float(steps)])

    return [SolverEnv] * 4


@case(SHARES)
def rank_from_process_name():
    import multiprocessing

    class RankEnv(BaseEnv):
        def __init__(self):
            self.rank = multiprocessing.current_process().name.rpartition("-")[2]

        def observe(self):
            return np.array([float(self.rank) if self.rank.isdigit() else -1.0])

    return [RankEnv] * 4


@case(SHARES)
def rank_from_process_identity():
    import multiprocessing

    class RankEnv(BaseEnv):
        def observe(self):
            return np.array([float((multiprocessing.current_process()._identity or (0,))[0])])

    return [RankEnv] * 4


@case(CHANGES)
def numpy_errors_same_for_all():
    class StrictEnv(BaseEnv):
        def reset(self, **kwargs):
            np.seterr(all="raise")
            return super().reset(**kwargs)

    return [StrictEnv] * 4


@case(SHARES)
def current_figure():
    class PlottingEnv(BaseEnv):
        metadata: ClassVar[Any] = {"render_modes": ["rgb_array"], "render_fps": 5}
        render_mode = "rgb_array"

        def reset(self, **kwargs):
            import matplotlib

            matplotlib.use("agg")
            import matplotlib.pyplot as plt

            plt.figure(1)
            plt.clf()
            return super().reset(**kwargs)

        def step(self, action):
            import matplotlib.pyplot as plt

            plt.plot([0, self.t])
            return super().step(action)

        def render(self):
            import matplotlib.pyplot as plt

            return np.full((2, 2, 3), len(plt.gca().lines), np.uint8)

    return [PlottingEnv] * 4


@case(SHARES)
def environment_variable_in_init():
    class DisplayEnv(BaseEnv):
        def __init__(self, i):
            os.environ["SIM_PORT"] = str(5000 + i)

        def observe(self):
            return np.array([float(os.environ["SIM_PORT"])])

    return [lambda i=i: DisplayEnv(i) for i in range(4)]


@case(SHARES)
def environment_variable_not_observed():
    class DisplayEnv(BaseEnv):
        def __init__(self, i):
            os.environ["SIM_PORT"] = str(5000 + i)

    return [lambda i=i: DisplayEnv(i) for i in range(4)]


@case(CHANGES)
def environment_variable_same_for_all():
    class DisplayEnv(BaseEnv):
        def __init__(self):
            os.environ["SIM_MODE"] = "fast"

    return [DisplayEnv] * 4


@case(SHARES)
def signal_handler_per_environment():
    import signal

    class SignalHandlingEnv(BaseEnv):
        def __init__(self):
            signal.signal(signal.SIGUSR1, self.stop)

        def stop(self, *_):
            self.t = -1

    return [SignalHandlingEnv] * 4


@case(CHANGES)
def umask_same_for_all():
    class UmaskEnv(BaseEnv):
        def __init__(self):
            os.umask(0o077)

    return [UmaskEnv] * 4


@case(SHARES)
def numpy_errors_in_some_environments():
    strict_env_fn = CASES["numpy_errors_same_for_all"][1]()[0]
    return [BaseEnv, BaseEnv, strict_env_fn, strict_env_fn]


@case(CHANGES)
def several_settings():
    import decimal
    import socket
    import warnings

    class SettingsEnv(BaseEnv):
        def __init__(self):
            decimal.getcontext().prec = 7
            socket.setdefaulttimeout(3)
            warnings.simplefilter("error")
            sys.path.insert(0, "/nowhere")

    return [SettingsEnv] * 4


@case(SHARES)
def pygame_window():
    os.environ["SDL_VIDEODRIVER"] = "dummy"
    return [lambda: gym.make("CartPole-v1", render_mode="human")] * 4


@case(SHARES)
def torch_dtype_by_kind():
    import torch

    class DoubleEnv(BaseEnv):
        def __init__(self):
            torch.set_default_dtype(torch.float64)

        def observe(self):
            return torch.ones(1).numpy()

    class SingleEnv(BaseEnv):
        def observe(self):
            return torch.ones(1).numpy()

    return [SingleEnv, DoubleEnv]


@case(SHARES)
def unseeded_and_working_directory():
    class NoisyEnv(BaseEnv):
        def __init__(self):
            self.rng = random.Random()
            os.chdir(tempfile.mkdtemp())

        def observe(self):
            return np.array([self.rng.random()])

    return [NoisyEnv] * 4


@case(UNKNOWN)
def rank_from_process_id():
    class RankEnv(BaseEnv):
        def observe(self):
            return np.array([float(os.getpid())])

    return [RankEnv] * 4


@case(CHANGES)  # pyplot has one list of figures per process
def own_pyplot_figures():
    class PlottingEnv(BaseEnv):
        metadata: ClassVar[Any] = {"render_modes": ["rgb_array"], "render_fps": 5}
        render_mode = "rgb_array"

        def __init__(self):
            import matplotlib

            matplotlib.use("agg")
            import matplotlib.pyplot as plt

            self.figure, self.axes = plt.subplots(figsize=(1, 1))

        def render(self):
            self.axes.plot([0, self.t])
            self.figure.canvas.draw()
            return np.asarray(self.figure.canvas.buffer_rgba())[..., :3].copy()

    return [PlottingEnv] * 4


@case(SHARES)
def alarm_per_environment():
    import signal

    class AlarmEnv(BaseEnv):
        def step(self, action):
            signal.signal(signal.SIGALRM, signal.SIG_IGN)
            signal.setitimer(signal.ITIMER_REAL, 60)
            return super().step(action)

    return [AlarmEnv] * 4


@case(SHARES)
def jax_x64_by_kind():
    import jax
    import jax.numpy as jnp

    class SingleEnv(BaseEnv):
        observation_space = gym.spaces.Box(-9, 9, (3,), np.float64)

        def observe(self):
            return np.asarray(jnp.arange(3.0) / 3)

    class DoubleEnv(SingleEnv):
        def __init__(self):
            jax.config.update("jax_enable_x64", True)

    return [SingleEnv, DoubleEnv]


@case(SHARES)
def stdout_per_environment():
    class StdoutEnv(BaseEnv):
        def __init__(self):
            import io

            sys.stdout = io.StringIO()

    return [StdoutEnv] * 4


@case(SHARES)
def thread_hook_per_environment():
    import threading

    class HookEnv(BaseEnv):
        def __init__(self):
            threading.excepthook = self.hook

        def hook(self, *_):
            pass

    return [HookEnv] * 4


@case(CHANGES)
def locale_and_logging():
    import locale
    import logging

    class LocaleEnv(BaseEnv):
        def __init__(self):
            locale.setlocale(locale.LC_ALL, "C.UTF-8")
            logging.basicConfig(level=10)

    return [LocaleEnv] * 4


@case(SHARES)
def file_named_after_process_id():
    def get_path():
        return f"{tempfile.gettempdir()}/independence-{os.getpid()}"

    class FileEnv(BaseEnv):
        def reset(self, **kwargs):
            with open(get_path(), "w") as file:
                file.write("0")
            return super().reset(**kwargs)

        def observe(self):
            with open(get_path(), "r+") as file:
                steps = int(file.read()) + 1
                file.seek(0)
                file.write(str(steps))
            return np.array([float(steps)])

        def close(self):
            with contextlib.suppress(FileNotFoundError):
                os.remove(get_path())

    return [FileEnv] * 4
