"""The backends of the contract: functions that build them, valid actions, and known gaps."""

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
from fake_vector_env import FakeVectorEnv

import vecenv
from vecenv.wrappers import ActionChunks

from .games import PAUSE, SlowCartPole, TwoPlayerGame

ROWS = 4


@dataclass(frozen=True, eq=False)
class Backend:
    """A backend of the contract, which is a column of its table.

    Args:
        name: The name for ``pytest -k`` and in the table.
        make: Builds a vector environment of :data:`ROWS` rows with random first observations.
        make_slow: Builds a vector environment with steps of about a tenth of a second. It may have more rows.
        actions: Returns the given number of valid actions.
        misshapen_actions: Returns the given number of actions, each of a wrong shape.
        options_applied: Returns ``True`` if the observations show that the environments received the options
            ``{"low": 0.02, "high": 0.03}``.
        slow_actions: Like ``actions``, for ``make_slow``, if its actions differ.
        needs: Modules that must be installed. Otherwise the backend's tests are skipped.
        folder: If the backend starts threads that never end: the folder with which its tests run, one of
            ``PERMANENT_THREAD_FOLDERS`` in tests/conftest.py.
        context: Returns a context that is open while this backend is tested.
        expensive: True if building takes long. Tests that leave no request pending then share one vector
            environment.
        steps: The number of steps that an environment makes per action.
        known_gaps: Call -> the reason why its test is expected to fail with this backend.
    """

    name: str
    make: Callable[[], Any]
    make_slow: Callable[[], Any]
    actions: Callable[[int], Any] = lambda n: np.arange(n) % 2
    misshapen_actions: Callable[[int], Any] = lambda n: np.zeros((n, 3), np.int64)
    options_applied: Callable[[Any], bool] = lambda values: bool(((values >= 0.02) & (values <= 0.03)).all())
    slow_actions: Callable[[int], Any] | None = None
    needs: tuple[str, ...] = ()
    folder: str = ""
    context: Callable[[], Any] = contextlib.nullcontext
    expensive: bool = False
    steps: int = 1
    known_gaps: Mapping[str, str] = field(default_factory=dict)


# -- worker processes, and this process ------------------------------------------------------------------------------

_CARTPOLE = functools.partial(gymnasium.make, "CartPole-v1")


def _process_backend(name: str, **options: Any) -> Backend:
    def build(env_fn: Any) -> Any:
        return vecenv.AsyncVectorEnv([env_fn] * ROWS, **options)

    return Backend(name, functools.partial(build, _CARTPOLE), functools.partial(build, SlowCartPole))


def _make_chunks(env_fn: Any) -> Any:
    return vecenv.AsyncVectorEnv([functools.partial(_make_chunked_env, env_fn)] * ROWS, num_workers=2)


def _make_chunked_env(env_fn: Any) -> Any:
    return ActionChunks(env_fn(), 2)


# -- Ray -----------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _ray_cluster() -> Iterator[None]:
    import ray

    os.environ.update({"RAY_USAGE_STATS_ENABLED": "0", "RAY_raylet_start_wait_time_s": "240"})
    memory = 200 * 1024 * 1024
    ray.init(address="local", num_cpus=32, include_dashboard=False, object_store_memory=memory, log_to_driver=False)
    try:
        yield
    finally:
        ray.shutdown()


def _make_ray(env_fn: Any) -> Any:
    from vecenv.backends import RayVectorEnv

    return RayVectorEnv([env_fn] * ROWS, num_hosts=2, workers_per_host=1, placement="PACK")


# -- EnvPool -------------------------------------------------------------------------------------------------------


def _make_envpool(task: str, **options: Any) -> Any:
    from vecenv.backends import EnvPoolVectorEnv

    return EnvPoolVectorEnv(task, ROWS, num_threads=1, **options)


_make_slow_envpool = functools.partial(_make_envpool, "HalfCheetah-v4", frame_skip=8000)


def _zero_cheetah_actions(n: int) -> Any:
    return np.zeros((n, 6))


def _make_envpool_players(num_envs: int = ROWS, batch_size: int = 2) -> Any:
    return vecenv.MultiAgentVecEnv.from_envpool("SparrowMahjong-v1", num_envs, batch_size=batch_size, num_threads=1)


# -- JAX -----------------------------------------------------------------------------------------------------------


@functools.cache
def _make_walk(work: int) -> Any:
    from vecenv.jax import FunctionalVectorEnv

    from .jax_env import Walk

    return FunctionalVectorEnv(Walk(work), ROWS)


def _make_jax(to: str, work: int = 0) -> Any:
    from vecenv.backends import JaxVectorEnv

    return JaxVectorEnv(_make_walk(work), to=to)


def _jax_backend(to: str) -> Backend:
    return Backend(
        f"jax-to-{to}",
        functools.partial(_make_jax, to),
        functools.partial(_make_jax, to, work=200),
        actions=lambda n: np.full((n, 1), 0.5, np.float32),
        misshapen_actions=lambda n: np.zeros((n, 2), np.float32),
        needs=("jaxlib",),
        folder="jax",
    )


# -- libraries' own vector environments ----------------------------------------------------------------------------


def _make_ale(**options: Any) -> Any:
    import ale_py

    gymnasium.register_envs(ale_py)
    return vecenv.make_vec("ALE/SpaceInvaders-v5", ROWS, "native", img_height=24, img_width=24, stack_num=2, **options)


class SlowCartPoleVectorEnv(gymnasium.envs.classic_control.cartpole.CartPoleVectorEnv):
    """Gymnasium's own CartPole vector environment, with steps of at least :data:`PAUSE` seconds."""

    def step(self, action: Any) -> Any:
        time.sleep(PAUSE)
        return super().step(action)


def _make_slow_native() -> Any:
    from vecenv.backends import NativeVectorEnv

    return NativeVectorEnv(SlowCartPoleVectorEnv(ROWS))


# -- several agents ------------------------------------------------------------------------------------------------


def _make_multi_agent(pause: float = 0.0) -> Any:
    return vecenv.MultiAgentVecEnv([functools.partial(TwoPlayerGame, pause)] * ROWS, num_workers=2)


def _zero_moves(n: int) -> Any:
    return np.zeros((n, 2), np.int64)


# -- known gaps ------------------------------------------------------------------------------------------------------

_INFOS_WITHOUT_MASKS = {"infos: masks": "infos that MultiAgentVecEnv always has (agent_mask, env_done, ...) have no masks"}
_WHOLE_BATCHES = {"`recv`: one row in flight": "EnvPool returns whole batches, and no capability reports it"}

# -- the table -----------------------------------------------------------------------------------------------------

BACKENDS = (
    _process_backend("two-workers", num_workers=2),
    _process_backend("one-process-each", num_workers=None),
    _process_backend("worker-and-caller", num_workers=1, use_caller=True),
    _process_backend("in-process", num_workers=0),
    _process_backend("first-ready", num_workers=2, batch_size=2),
    Backend(
        "multi-agent",
        _make_multi_agent,
        functools.partial(_make_multi_agent, PAUSE),
        _zero_moves,
        lambda n: np.zeros((n, 5), np.int64),
        known_gaps=_INFOS_WITHOUT_MASKS,
    ),
    Backend(
        "envpool",
        functools.partial(_make_envpool, "CartPole-v1"),
        _make_slow_envpool,
        slow_actions=_zero_cheetah_actions,
        needs=("envpool",),
        folder="backends",
    ),
    Backend(
        "envpool-first-ready",
        functools.partial(_make_envpool, "CartPole-v1", batch_size=2),
        functools.partial(_make_slow_envpool, batch_size=2),
        slow_actions=_zero_cheetah_actions,
        needs=("envpool",),
        folder="backends",
        known_gaps=_WHOLE_BATCHES,
    ),
    Backend(
        "envpool-players",
        _make_envpool_players,
        functools.partial(_make_envpool_players, num_envs=6_000, batch_size=3_000),
        lambda n: np.zeros((n, 3), np.int64),
        lambda n: np.zeros((n, 2), np.int64),
        needs=("envpool",),
        folder="backends",
        known_gaps={**_WHOLE_BATCHES, **_INFOS_WITHOUT_MASKS},
    ),
    Backend(
        "native",
        functools.partial(vecenv.make_vec, "CartPole-v1", ROWS, "native"),
        _make_slow_native,
        folder="backends",
    ),
    Backend(
        "native-ale",
        _make_ale,
        functools.partial(_make_ale, frameskip=2000),
        lambda n: np.zeros(n, np.int64),
        needs=("ale_py",),
        folder="backends",
        expensive=True,
    ),
    Backend(
        "ray",
        functools.partial(_make_ray, _CARTPOLE),
        functools.partial(_make_ray, SlowCartPole),
        needs=("ray",),
        folder="distributed",
        context=_ray_cluster,
        expensive=True,
    ),
    _jax_backend("numpy"),
    _jax_backend("jax"),
    Backend("fake", functools.partial(FakeVectorEnv, ROWS), functools.partial(FakeVectorEnv, ROWS, delay=PAUSE)),
)

CONFIGURATIONS = (
    Backend(
        "chunks",
        functools.partial(_make_chunks, _CARTPOLE),
        functools.partial(_make_chunks, SlowCartPole),
        lambda n: np.repeat(np.arange(n)[:, np.newaxis] % 2, 2, axis=1),
        steps=2,
    ),
)
"""More backends to test, without a column in the table: backends of the table with other environments."""
