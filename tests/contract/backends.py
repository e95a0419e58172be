"""The backends of the contract: their factories, their actions, and known gaps."""

from __future__ import annotations

import contextlib
import functools
import os
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import gymnasium
import numpy as np
from double import DoubleVectorEnv

import vecenv
from vecenv.wrappers import ActionChunks

from .games import PAUSE, Game, SlowCartPole

ROWS = 4


@dataclass(frozen=True, eq=False)
class Backend:
    """One column of the contract.

    Args:
        name: Its name for ``pytest -k`` and in the table.
        make: Builds a vector environment of :data:`ROWS` rows with random first observations.
        make_slow: The same, perhaps with more rows; a step takes about a tenth of a second.
        actions: Returns that many valid actions.
        misfits: Returns that many actions, each of a wrong shape.
        low: True if observations show that ``options={"low": 0.02, "high": 0.03}`` were applied.
        slow_actions: The actions of ``make_slow``, if they differ.
        needs: Modules that the backend needs.
        folder: The folder of tests to run with, because of threads that stay (``THREADS_STAY`` in ``tests/conftest.py``).
        around: A context that is open while this backend is tested.
        dear: It takes long to build, so tests that end with an idle one share it.
        steps: Steps of its environment per action.
        not_yet: Call -> the reason why this backend breaks that part of the contract. The tests must fail there.
    """

    name: str
    make: Callable[[], Any]
    make_slow: Callable[[], Any]
    actions: Callable[[int], Any] = lambda n: np.arange(n) % 2
    misfits: Callable[[int], Any] = lambda n: np.zeros((n, 3), np.int64)
    low: Callable[[Any], bool] = lambda seen: bool(((seen >= 0.02) & (seen <= 0.03)).all())
    slow_actions: Callable[[int], Any] | None = None
    needs: tuple[str, ...] = ()
    folder: str = ""
    around: Callable[[], Any] = contextlib.nullcontext
    dear: bool = False
    steps: int = 1
    not_yet: Mapping[str, str] = field(default_factory=dict)


# -- processes, and the calling process ----------------------------------------------------------------------------

_CARTPOLE = functools.partial(gymnasium.make, "CartPole-v1")


def _engine(name: str, **options: Any) -> Backend:
    def build(env_fn: Any) -> Any:
        return vecenv.AsyncVectorEnv([env_fn] * ROWS, **options)

    return Backend(name, functools.partial(build, _CARTPOLE), functools.partial(build, SlowCartPole))


def _chunks(env_fn: Any) -> Any:
    return vecenv.AsyncVectorEnv([functools.partial(_in_chunks, env_fn)] * ROWS, num_workers=2)


def _in_chunks(env_fn: Any) -> Any:
    return ActionChunks(env_fn(), 2)


# -- Ray -----------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _cluster() -> Iterator[None]:
    import ray

    os.environ.update({"RAY_USAGE_STATS_ENABLED": "0", "RAY_raylet_start_wait_time_s": "240"})
    memory = 200 * 1024 * 1024
    ray.init(address="local", num_cpus=32, include_dashboard=False, object_store_memory=memory, log_to_driver=False)
    try:
        yield
    finally:
        ray.shutdown()


def _over_ray(env_fn: Any) -> Any:
    from vecenv.backends import RayVectorEnv

    return RayVectorEnv([env_fn] * ROWS, num_hosts=2, workers_per_host=1, placement="PACK")


# -- EnvPool -------------------------------------------------------------------------------------------------------


def _envpool(task: str, **options: Any) -> Any:
    from vecenv.backends import EnvPoolVectorEnv

    return EnvPoolVectorEnv(task, ROWS, num_threads=1, **options)


_slow_pool = functools.partial(_envpool, "HalfCheetah-v4", frame_skip=8000)


def _still_cheetah(n: int) -> Any:
    return np.zeros((n, 6))


def _players(num_envs: int = ROWS, batch_size: int = 2) -> Any:
    return vecenv.MultiAgentVecEnv.from_envpool("SparrowMahjong-v1", num_envs, batch_size=batch_size, num_threads=1)


# -- JAX -----------------------------------------------------------------------------------------------------------


@functools.cache
def _walks(work: int) -> Any:
    from vecenv.jax import FunctionalVectorEnv

    from .jax_env import Walk

    return FunctionalVectorEnv(Walk(work), ROWS)


def _jax(to: str, work: int = 0) -> Any:
    from vecenv.backends import JaxVectorEnv

    return JaxVectorEnv(_walks(work), to=to)


def _jax_backend(to: str) -> Backend:
    return Backend(
        f"jax-to-{to}",
        functools.partial(_jax, to),
        functools.partial(_jax, to, 200),
        actions=lambda n: np.full((n, 1), 0.5, np.float32),
        misfits=lambda n: np.zeros((n, 2), np.float32),
        needs=("jaxlib",),
        folder="jax",
    )


# -- libraries' own vector environments ----------------------------------------------------------------------------


def _invaders(**options: Any) -> Any:
    import ale_py

    gymnasium.register_envs(ale_py)
    return vecenv.make_vec("ALE/SpaceInvaders-v5", ROWS, "native", img_height=24, img_width=24, stack_num=2, **options)


class SlowCartPoles(gymnasium.envs.classic_control.cartpole.CartPoleVectorEnv):
    """A CartPole with steps of at least :data:`PAUSE` seconds."""

    def step(self, action: Any) -> Any:
        time.sleep(PAUSE)
        return super().step(action)


def _slow_native() -> Any:
    from vecenv.backends import NativeVectorEnv

    return NativeVectorEnv(SlowCartPoles(ROWS))


# -- several agents ------------------------------------------------------------------------------------------------


def _agents(pause: float = 0.0) -> Any:
    return vecenv.MultiAgentVecEnv([functools.partial(Game, pause)] * ROWS, num_workers=2)


def _moves(n: int) -> Any:
    return np.zeros((n, 2), np.int64)


# -- known gaps ------------------------------------------------------------------------------------------------------

_OWN_MASKS = {"infos: masks": "the arrays that MultiAgentVecEnv always gives (agent_mask, env_done, ...) have no masks"}
_WHOLE_BATCHES = {"`recv`: one row in flight": "EnvPool answers in whole batches, and no capability says so"}

# -- the table -----------------------------------------------------------------------------------------------------

BACKENDS = (
    _engine("two-workers", num_workers=2),
    _engine("one-process-each", num_workers=None),
    _engine("callers-share", num_workers=1, use_caller=True),
    _engine("in-process", num_workers=0),
    _engine("first-ready", num_workers=2, batch_size=2),
    Backend(
        "multi-agent",
        _agents,
        functools.partial(_agents, PAUSE),
        _moves,
        lambda n: np.zeros((n, 5), np.int64),
        not_yet=_OWN_MASKS,
    ),
    Backend(
        "envpool",
        functools.partial(_envpool, "CartPole-v1"),
        _slow_pool,
        slow_actions=_still_cheetah,
        needs=("envpool",),
        folder="backends",
    ),
    Backend(
        "envpool-first-ready",
        functools.partial(_envpool, "CartPole-v1", batch_size=2),
        functools.partial(_slow_pool, batch_size=2),
        slow_actions=_still_cheetah,
        needs=("envpool",),
        folder="backends",
        not_yet=_WHOLE_BATCHES,
    ),
    Backend(
        "envpool-players",
        _players,
        functools.partial(_players, 6_000, 3_000),
        lambda n: np.zeros((n, 3), np.int64),
        lambda n: np.zeros((n, 2), np.int64),
        needs=("envpool",),
        folder="backends",
        not_yet={**_WHOLE_BATCHES, **_OWN_MASKS},
    ),
    Backend(
        "native",
        functools.partial(vecenv.make_vec, "CartPole-v1", ROWS, "native"),
        _slow_native,
        folder="backends",
    ),
    Backend(
        "native-ale",
        _invaders,
        functools.partial(_invaders, frameskip=2000),
        lambda n: np.zeros(n, np.int64),
        needs=("ale_py",),
        folder="backends",
        dear=True,
    ),
    Backend(
        "ray",
        functools.partial(_over_ray, _CARTPOLE),
        functools.partial(_over_ray, SlowCartPole),
        needs=("ray",),
        folder="distributed",
        around=_cluster,
        dear=True,
    ),
    _jax_backend("numpy"),
    _jax_backend("jax"),
    Backend("double", functools.partial(DoubleVectorEnv, ROWS), functools.partial(DoubleVectorEnv, ROWS, delay=PAUSE)),
)

CONFIGURATIONS = (
    Backend(
        "chunks",
        functools.partial(_chunks, _CARTPOLE),
        functools.partial(_chunks, SlowCartPole),
        lambda n: np.repeat(np.arange(n)[:, np.newaxis] % 2, 2, axis=1),
        steps=2,
    ),
)
"""Backends that keep the contract without a column in the table: one from above with other environments."""
