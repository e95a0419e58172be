"""Environments that change settings of their process, or depend on its name, number or environment variables."""

from __future__ import annotations

import contextlib
import os
import random
import sys
import tempfile
from typing import Any, ClassVar

import gymnasium as gym
import numpy as np

from planning.cases.registry import CASES, CHANGES, SHARES, UNKNOWN, Base, case


@case(SHARES)
def working_directory():
    class Solver(Base):
        def __init__(self):
            self.folder = tempfile.mkdtemp()
            os.chdir(self.folder)

        def reset(self, **kwargs):
            with open("state.txt", "w") as f:
                f.write("0")
            return super().reset(**kwargs)

        def observe(self):
            with open("state.txt") as f:
                t = int(f.read()) + 1
            with open("state.txt", "w") as f:
                f.write(str(t))
            return np.array([float(t)])

    return [Solver] * 4


@case(SHARES)
def rank_from_process_name():
    import multiprocessing

    class Ported(Base):
        def __init__(self):
            self.rank = multiprocessing.current_process().name.rpartition("-")[2]

        def observe(self):
            return np.array([float(self.rank) if self.rank.isdigit() else -1.0])

    return [Ported] * 4


@case(SHARES)
def rank_from_process_identity():
    import multiprocessing

    class Ported(Base):
        def observe(self):
            return np.array([float((multiprocessing.current_process()._identity or (0,))[0])])

    return [Ported] * 4


@case(CHANGES)
def numpy_errors_leak():
    class Strict(Base):
        def reset(self, **kwargs):
            np.seterr(all="raise")
            return super().reset(**kwargs)

    return [Strict] * 4


@case(SHARES)
def current_figure():
    class Plot(Base):
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

    return [Plot] * 4


@case(SHARES)
def environment_variable_in_init():
    class Display(Base):
        def __init__(self, i):
            os.environ["SIM_PORT"] = str(5000 + i)

        def observe(self):
            return np.array([float(os.environ["SIM_PORT"])])

    return [lambda i=i: Display(i) for i in range(4)]


@case(SHARES)
def environment_variable_not_observed():
    class Display(Base):
        def __init__(self, i):
            os.environ["SIM_PORT"] = str(5000 + i)

    return [lambda i=i: Display(i) for i in range(4)]


@case(CHANGES)
def environment_variable_same_for_all():
    class Display(Base):
        def __init__(self):
            os.environ["SIM_MODE"] = "fast"

    return [Display] * 4


@case(SHARES)
def signal_handler_per_environment():
    import signal

    class Guarded(Base):
        def __init__(self):
            signal.signal(signal.SIGUSR1, self.stop)

        def stop(self, *_):
            self.t = -1

    return [Guarded] * 4


@case(CHANGES)
def umask_same_for_all():
    class Private(Base):
        def __init__(self):
            os.umask(0o077)

    return [Private] * 4


@case(SHARES)
def numpy_errors_in_some_environments():
    strict = CASES["numpy_errors_leak"][1]()[0]
    return [Base, Base, strict, strict]


@case(CHANGES)
def several_settings():
    import decimal
    import socket
    import warnings

    class Set(Base):
        def __init__(self):
            decimal.getcontext().prec = 7
            socket.setdefaulttimeout(3)
            warnings.simplefilter("error")
            sys.path.insert(0, "/nowhere")

    return [Set] * 4


@case(SHARES)
def pygame_window():
    os.environ["SDL_VIDEODRIVER"] = "dummy"
    return [lambda: gym.make("CartPole-v1", render_mode="human")] * 4


@case(SHARES)
def torch_dtype_by_kind():
    import torch

    class Double(Base):
        def __init__(self):
            torch.set_default_dtype(torch.float64)

        def observe(self):
            return torch.ones(1).numpy()

    class Single(Base):
        def observe(self):
            return torch.ones(1).numpy()

    return [Single, Double]


@case(SHARES)
def unseeded_and_working_directory():
    class Noisy(Base):
        def __init__(self):
            self.rng = random.Random()
            os.chdir(tempfile.mkdtemp())

        def observe(self):
            return np.array([self.rng.random()])

    return [Noisy] * 4


@case(UNKNOWN)
def rank_from_process_id():
    class Ported(Base):
        def observe(self):
            return np.array([float(os.getpid())])

    return [Ported] * 4


@case(CHANGES)  # pyplot keeps its figures in a list of the process
def own_pyplot_figures():
    class Plot(Base):
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

    return [Plot] * 4


@case(SHARES)
def alarm_per_environment():
    import signal

    class Timed(Base):
        def step(self, action):
            signal.signal(signal.SIGALRM, signal.SIG_IGN)
            signal.setitimer(signal.ITIMER_REAL, 60)
            return super().step(action)

    return [Timed] * 4


@case(SHARES)
def jax_x64_by_kind():
    import jax
    import jax.numpy as jnp

    class Single(Base):
        observation_space = gym.spaces.Box(-9, 9, (3,), np.float64)

        def observe(self):
            return np.asarray(jnp.arange(3.0) / 3)

    class Double(Single):
        def __init__(self):
            jax.config.update("jax_enable_x64", True)

    return [Single, Double]


@case(SHARES)
def stdout_per_environment():
    class Quiet(Base):
        def __init__(self):
            import io

            sys.stdout = io.StringIO()

    return [Quiet] * 4


@case(SHARES)
def thread_hook_per_environment():
    import threading

    class Hooked(Base):
        def __init__(self):
            threading.excepthook = self.hook

        def hook(self, *_):
            pass

    return [Hooked] * 4


@case(CHANGES)
def locale_and_logging():
    import locale
    import logging

    class Local(Base):
        def __init__(self):
            locale.setlocale(locale.LC_ALL, "C.UTF-8")
            logging.basicConfig(level=10)

    return [Local] * 4


@case(SHARES)
def file_named_after_process_id():
    class Filed(Base):
        def reset(self, **kwargs):
            with open(f"{tempfile.gettempdir()}/independence-{os.getpid()}", "w") as f:
                f.write("0")
            return super().reset(**kwargs)

        def observe(self):
            with open(f"{tempfile.gettempdir()}/independence-{os.getpid()}", "r+") as f:
                t = int(f.read()) + 1
                f.seek(0)
                f.write(str(t))
            return np.array([float(t)])

        def close(self):
            with contextlib.suppress(FileNotFoundError):
                os.remove(f"{tempfile.gettempdir()}/independence-{os.getpid()}")

    return [Filed] * 4
