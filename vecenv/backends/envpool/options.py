"""Checks of arguments: each returns the value in the form that is used, or raises before anything has happened."""

from __future__ import annotations

import difflib
import math
import operator
from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np
from gymnasium.vector import AutoresetMode

__all__ = ["check_env_config", "check_options"]

_END: Final = 2**31
_MOST_THREADS: Final = 4096

# EnvPool's C++ takes any integer for these, and what is out of range ends the process or never returns. The last number is
# up to where no trial is needed (see `trial`).
_RANGES: Final = {
    "frame_skip": (1, _END - 1, _END),  # slow
    "stack_num": (1, 256, 32),
    "frame_stack": (1, 256, 32),
    "img_height": (1, 4096, 1024),
    "img_width": (1, 4096, 1024),
    "noop_max": (1, 10_000, 1000),
    "mode": (-1, _END - 1, _END),  # the emulator refuses those that a game does not have
    "difficulty": (-1, _END - 1, _END),
    "render_width": (1, 8192, 8192),  # drawing is always tried first
    "render_height": (1, 8192, 8192),
    "render_camera_id": (-1, _END - 1, _END),
}
_SHARES: Final = ("repeat_action_probability",)  # from 0 to 1
# Which game it is. EnvPool ends the process for a name it does not know.
_NAMES: Final = ("task", "env_name", "scenario", "task_name", "hand_task", "adroit_task")
# Families whose switches (options that are true or false) were all tried.
_SWITCHED: Final = (
    "atari",
    "box2d",
    "classic_control",
    "toy_text",
    "mujoco.dmc",
    "mujoco.gym",
    "mujoco.metaworld",
    "vizdoom",
)


def check_options(
    num_envs: Any,
    batch_size: Any,
    num_threads: Any,
    max_episode_steps: Any,
    render_mode: Any,
    mode: AutoresetMode,
) -> tuple[int, int]:
    """``num_envs`` and ``batch_size`` as integers, if all of these make sense.

    Raises:
        TypeError: Not an integer where one is needed.
        ValueError: Out of range; names the accepted values.
    """
    num_envs = _positive("num_envs", num_envs)
    batch_size = num_envs if batch_size is None else _positive("batch_size", batch_size)
    if num_envs % batch_size:
        fit = [size for size in range(1, num_envs + 1) if num_envs % size == 0]
        raise ValueError(f"batch_size must divide num_envs={num_envs} (one of {fit}), got {batch_size}")
    if num_threads is not None and _positive("num_threads", num_threads) > _MOST_THREADS:
        raise ValueError(
            f"num_threads must be from 1 to {_MOST_THREADS}, got {num_threads}; more threads than there are environments in "
            "a batch, or cores, have nothing to do"
        )
    if max_episode_steps is not None:
        _positive("max_episode_steps", max_episode_steps)
    if render_mode not in (None, "rgb_array"):
        raise ValueError(f"render_mode must be 'rgb_array' or None, got {render_mode!r}")
    if mode is AutoresetMode.SAME_STEP and batch_size < num_envs:
        raise ValueError(
            "same-step autoreset needs all environments in one batch (batch_size=None): with first-ready batches, rows "
            "that wait for their resets would leave batches short. Use next-step autoreset"
        )
    return num_envs, batch_size


def _integer(name: str, value: Any) -> int:
    try:
        return operator.index(value)
    except TypeError:
        raise TypeError(f"{name} must be an integer, got {type(value).__name__}") from None


def _positive(name: str, value: Any) -> int:
    number = _integer(name, value)
    if not 1 <= number < _END:
        raise ValueError(f"{name} must be from 1 to 2**31 - 1, got {number}")
    return number


def check_env_config(
    task_id: str,
    family: str,
    defaults: Mapping[str, Any],
    registered: Mapping[str, Sequence[str]],
    env_config: Mapping[str, Any],
) -> dict[str, Any]:
    """Hold a task's options against what is known of them.

    Args:
        task_id: EnvPool's, for error texts.
        family: As ``"atari"``.
        defaults: The task's configuration without any of them.
        registered: For options that name a game, the names that EnvPool has.
        env_config: The options.

    Returns:
        Those that are neither the default nor known to be harmless.

    Raises:
        TypeError: Not a number, or not a name, where one is needed.
        ValueError: Out of range, or no such name; says what is accepted.
    """
    unknown = {}
    whose = f"EnvPool's {task_id!r}"
    for key, value in env_config.items():
        default = defaults.get(key)
        if key in _RANGES:
            low, high, harmless = _RANGES[key]
            if not low <= _integer(f"{whose}: {key}", value) <= high:
                raise ValueError(f"{whose}: {key} must be from {low} to {high}, got {value}")
            tried = value <= harmless
        elif key in _NAMES:
            tried = value == default
            _check_name(whose, key, value, registered.get(key, ()), default)
        else:
            if any(math.isnan(number) for number in _floats(value)):
                raise ValueError(f"{whose}: {key} must be a number, got {value!r}")
            if key in _SHARES and not 0 <= value <= 1:
                raise ValueError(f"{whose}: {key} must be from 0 to 1, got {value!r}")
            tried = key in _SHARES or (isinstance(value, bool) and isinstance(default, bool) and family in _SWITCHED)
        if not tried and value != default:
            unknown[key] = value
    return unknown


def _check_name(whose: str, key: str, value: Any, names: Sequence[str], default: Any) -> None:
    if not isinstance(value, str):
        raise TypeError(f"{whose}: {key} must be a string, got {type(value).__name__}")
    if value != default and value not in names:
        close = difflib.get_close_matches(value, names, n=5, cutoff=0.6)
        hint = f"did you mean {' or '.join(map(repr, close))}? " if close else ""
        raise ValueError(
            f"{whose}: there is no {key} {value!r}: {hint}Accepted: {', '.join(names)}; {default!r} is the default"
        )


def _floats(value: Any) -> list[float]:
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, (tuple, list)):
        return [number for entry in value for number in _floats(entry)]
    return [float(value)] if isinstance(value, (float, np.floating)) else []
