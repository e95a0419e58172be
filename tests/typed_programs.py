"""Programs for mypy in ``.ci/run``, which never run.

``assert_type`` checks the inferred type of an expression. ``type: ignore`` marks a call that mypy must reject.
"""

from __future__ import annotations

from typing import Any, assert_type

import gymnasium
import numpy as np
from gymnasium.vector import VectorEnv
from numpy.typing import NDArray

import vecenv
from vecenv import WorkerOptions
from vecenv.backends import EnvPoolVectorEnv, JaxVectorEnv, NativeVectorEnv, RayVectorEnv


def make_env() -> gymnasium.Env[Any, Any]:
    return gymnasium.make("CartPole-v1")


def make_vec_returns_the_type_of_the_backend(backend: str) -> None:
    assert_type(vecenv.make_vec("CartPole-v1", 8), vecenv.AsyncVectorEnv[Any, Any])
    assert_type(vecenv.make_vec(make_env, num_envs=8, backend="serial"), vecenv.AsyncVectorEnv[Any, Any])
    assert_type(vecenv.make_vec("CartPole-v1", 8, "envpool"), EnvPoolVectorEnv)
    assert_type(vecenv.make_vec("ant", 8, "brax"), JaxVectorEnv)
    assert_type(vecenv.make_vec("CartpoleBalance", num_envs=8, backend="playground"), JaxVectorEnv)
    assert_type(vecenv.make_vec(make_env, 8, backend="ray"), RayVectorEnv[Any, Any])
    assert_type(vecenv.make_vec("ALE/Pong-v5", 8, backend="native"), NativeVectorEnv)
    assert_type(vecenv.make_vec("CartPole-v1", 8, backend), VectorEnv[Any, Any, Any])


def first_ready_batches_are_typed(actions: Any) -> None:
    envs = vecenv.make_vec("CartPole-v1", 8, vector_kwargs={"batch_size": 4})
    envs.reset_async(seed=1)
    _, rewards, _, _, infos = envs.recv(timeout=10.0, count=4)
    envs.send(actions, env_id=infos["env_id"])
    print(rewards.mean(), envs.stats()["steps"], envs.capabilities.restarts, envs.plan)


def evaluate_returns_typed_results(policy: Any) -> None:
    results = vecenv.evaluate(vecenv.make_vec("CartPole-v1", 8), policy, episodes=3, seed=0, frames=[0])
    assert_type(results[0].episode_return, float)
    assert_type(results[0].error, Exception | None)
    assert_type(results[0].frames, tuple[NDArray[np.uint8], ...])
    vecenv.write_video(results[0].frames, "episode.gif")


def invalid_literals_and_options_are_rejected() -> None:
    vecenv.AsyncVectorEnv([make_env] * 2, num_workers="auto", on_failure="restart", context="spawn", use_caller=False)
    vecenv.AsyncVectorEnv([make_env] * 2, num_workers="all")  # type: ignore[arg-type]
    vecenv.AsyncVectorEnv([make_env] * 2, on_failure="retry")  # type: ignore[arg-type]
    vecenv.AsyncVectorEnv([make_env] * 2, context="thread")  # type: ignore[arg-type]
    variables = WorkerOptions(env={"MUJOCO_GL": "egl"})
    vecenv.MultiAgentVecEnv([make_env] * 2, num_workers=2, on_failure=vecenv.Restart(limit=5), worker_options=variables)
    vecenv.MultiAgentVecEnv([make_env] * 2, on_failure="retry")  # type: ignore[arg-type]
    vecenv.MultiAgentVecEnv([make_env] * 2, num_wrokers=2)  # type: ignore[call-arg]


def reset_accepts_options_for_all_or_for_each() -> None:
    variables = WorkerOptions(env={"CUDA_VISIBLE_DEVICES": lambda worker: worker % 4})
    envs = vecenv.AsyncVectorEnv([make_env] * 2, worker_options=variables)
    envs.reset(seed=1, options={"low": 0.0})
    envs.reset(seed=[1, None], options=[{"low": 0.0}, None])
