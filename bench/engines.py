"""Runners for the engines of other libraries, all of which are optional.

A missing library's row has no figures. Libraries that reset within the step, or leave the reset to the caller, do more
than ``num_envs`` units of work in a step when episodes end, because each reset counts. Here all of them fork their
processes. This does not affect the speed of steps, and saves the minutes that all processes would need to import torch.
"""

from __future__ import annotations

import contextlib
import importlib
import itertools
import tempfile
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from vecenv.tools.runners import (
    Candidate,
    EnvFn,
    Runner,
    Unavailable,
    default_candidates,
    run_for,
    sample_actions,
    vecenv_candidate,
)

SamplingOptions = dict[str, Any]
"""The options ``seconds``, ``repeats`` and ``progress`` of a comparison."""


def import_optional(module: str, package: str) -> Any:
    """Import a module.

    Raises:
        Unavailable: ``package``, which contains the module, is not installed.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise Unavailable(f"{package} is not installed ({error})") from None


class SteppingRunner:
    """A base class of runners that step ``envs`` repeatedly; subclasses define a step."""

    envs: Any

    def _step(self) -> int:
        """Step once; return the number of environment steps and resets."""
        raise NotImplementedError

    def run(self, seconds: float) -> float:
        return run_for(self._step, seconds)

    def close(self) -> None:
        self.envs.close()


def make_sb3_envs(env_fn: EnvFn, num_envs: int) -> Any:
    module = import_optional("stable_baselines3.common.vec_env", "stable-baselines3")
    return module.SubprocVecEnv([env_fn] * num_envs, start_method="fork")


class StableBaselines3(SteppingRunner):
    """``SubprocVecEnv``: one process per environment; resets within the step."""

    def __init__(self, env_fn: EnvFn, num_envs: int, workers: int) -> None:
        self.envs = make_sb3_envs(env_fn, num_envs)
        self._next_actions = itertools.cycle(sample_actions(self.envs.action_space, num_envs)).__next__
        self.envs.reset()

    def _step(self) -> int:
        dones = self.envs.step(self._next_actions())[2]
        return len(dones) + int(np.count_nonzero(dones))


class Tianshou(SteppingRunner):
    """``ShmemVectorEnv``: one process per environment, observations in shared memory; the caller resets."""

    def __init__(self, env_fn: EnvFn, num_envs: int, workers: int) -> None:
        module = import_optional("tianshou.env", "tianshou")
        self.envs = module.ShmemVectorEnv([env_fn] * num_envs)
        self._next_actions = itertools.cycle(sample_actions(self.envs.action_space[0], num_envs)).__next__
        self.envs.reset()

    def _step(self) -> int:
        _, _, terminated, truncated, _ = self.envs.step(self._next_actions())
        ended = np.flatnonzero(terminated | truncated)
        if len(ended):
            self.envs.reset(ended)
        return len(terminated) + len(ended)


def make_torchrl_env(env_fn: EnvFn) -> Any:
    from torchrl.envs import GymWrapper

    return GymWrapper(env_fn(), categorical_action_encoding=True)


class TorchRL(SteppingRunner):
    """``ParallelEnv``: one process per environment, all data in shared tensors; resets after the step."""

    def __init__(self, env_fn: EnvFn, num_envs: int, workers: int) -> None:
        module = import_optional("torchrl.envs", "torchrl")
        importlib.import_module("torch").set_num_threads(1)
        self.envs = module.ParallelEnv(num_envs, partial(make_torchrl_env, env_fn), mp_start_method="fork")
        self._state = self.envs.reset()
        self._next_actions = itertools.cycle([self.envs.action_spec.rand() for _ in range(64)]).__next__

    def _step(self) -> int:
        self._state.set("action", self._next_actions())
        stepped, self._state = self.envs.step_and_maybe_reset(self._state)
        done = stepped.get(("next", "done"))
        return int(done.numel()) + int(done.sum())


def _make_puffer_env(env_fn: EnvFn, buf: Any = None, seed: int = 0) -> Any:
    from pufferlib.emulation import GymnasiumPufferEnv

    return GymnasiumPufferEnv(env_fn(), buf=buf, seed=seed)


class PufferLib(SteppingRunner):
    """``vector.Multiprocessing``: one process per core, all of which poll shared flags; resets in the next step."""

    def __init__(self, env_fn: EnvFn, num_envs: int, workers: int) -> None:
        # in a temporary folder, because the import creates a link in the current one
        with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
            module = import_optional("pufferlib.vector", "pufferlib")
        if num_envs % workers:
            raise Unavailable(f"needs a multiple of {workers} environments")
        kwargs = {"num_envs": num_envs, "num_workers": workers, "batch_size": num_envs}
        self.envs = module.make(partial(_make_puffer_env, env_fn), backend=module.Multiprocessing, **kwargs)
        self._next_actions = itertools.cycle([self.envs.action_space.sample() for _ in range(64)]).__next__
        self.envs.reset(0)
        self._num_envs = num_envs

    def _step(self) -> int:
        self.envs.step(self._next_actions())
        return self._num_envs

    def run(self, seconds: float) -> float:
        rate = super().run(seconds)
        time.sleep(0.8)  # idle workers poll for another half second, and would slow down the next engine
        return rate


class PufferLibFewer(PufferLib):
    """PufferLib with one worker fewer, which leaves one core to the trainer."""

    def __init__(self, env_fn: EnvFn, num_envs: int, workers: int) -> None:
        if workers == 1:
            raise Unavailable("needs at least two workers")
        super().__init__(env_fn, num_envs, workers - 1)


OTHER_ENGINES: dict[str, tuple[str, Callable[[EnvFn, int, int], Runner]]] = {
    "sb3": ("Stable-Baselines3 SubprocVecEnv", StableBaselines3),
    "tianshou": ("Tianshou ShmemVectorEnv", Tianshou),
    "torchrl": ("TorchRL ParallelEnv", TorchRL),
    # two rows, because PufferLib's trainer polls too, so one worker fewer may be faster
    "pufferlib": ("PufferLib, one worker per core", PufferLib),
    "pufferlib-fewer": ("PufferLib, one worker fewer", PufferLibFewer),
}


def candidates(env_fn: EnvFn, num_envs: int, workers: int) -> list[Candidate]:
    """Return the candidates of ``vecenv bench`` and those of other libraries."""
    workers = min(workers, num_envs)
    others = [
        Candidate(name, label, partial(build, env_fn, num_envs, workers), kind="other")
        for name, (label, build) in OTHER_ENGINES.items()
    ]
    auto, *rows, bare_loop = default_candidates(env_fn, num_envs, workers)
    # for a comparison with engines that return the memory that their workers write to, such as PufferLib's
    view = vecenv_candidate("auto-view", "vecenv, auto, copy=False", env_fn, num_envs, num_workers="auto", copy=False)
    return [auto, view, *rows, *others, bare_loop]
