"""An engine with environments that execute chunks of actions, for ``vecenv conform``. It keeps all promises."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import gymnasium
import numpy as np
from gymnasium.wrappers import TransformAction

import vecenv
from vecenv.wrappers import ActionChunks

_HORIZON = 3


def make_chunked(env_fns: Sequence[Callable[[], Any]], autoreset_mode: Any) -> vecenv.AsyncVectorEnv:
    return vecenv.AsyncVectorEnv([functools.partial(_make_env, fn) for fn in env_fns], autoreset_mode=autoreset_mode)


def _make_env(env_fn: Callable[[], Any]) -> gymnasium.Env[Any, Any]:
    env = env_fn()
    return TransformAction(ActionChunks(env, _HORIZON, variable=True), _make_chunk, env.action_space)


def _make_chunk(action: Any) -> dict[str, Any]:
    """Return a chunk of this action and invalid ones, of which only the first is executed."""
    return {"actions": np.array([action, *[999] * (_HORIZON - 1)]), "steps": 1}
