"""An engine with environments that execute chunks of actions, of which one counts: it has to keep every promise, too."""

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


def chunked(env_fns: Sequence[Callable[[], Any]], autoreset_mode: Any) -> vecenv.AsyncVectorEnv:
    return vecenv.AsyncVectorEnv([functools.partial(_first_of_chunk, fn) for fn in env_fns], autoreset_mode=autoreset_mode)


def _first_of_chunk(env_fn: Callable[[], Any]) -> gymnasium.Env[Any, Any]:
    env = env_fn()
    return TransformAction(ActionChunks(env, _HORIZON, variable=True), _as_chunk, env.action_space)


def _as_chunk(action: Any) -> dict[str, Any]:
    """Return a chunk that begins with this action; if another were executed, the observation would show it."""
    return {"actions": np.array([action, *[999] * (_HORIZON - 1)]), "steps": 1}
