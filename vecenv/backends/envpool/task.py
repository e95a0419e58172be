"""Which task: finding EnvPool, its task ids, what a task's configuration may hold, and its spaces.

Nothing here builds an environment: a pool's specification is enough for the spaces, and cheap. EnvPool reports wrong
configurations by assertions without text or by errors of the C++ binding; here they become errors that name what is right.
"""

from __future__ import annotations

import difflib
import importlib
import sys
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import gymnasium
import numpy as np
import numpy.typing as npt
from gymnasium import spaces
from gymnasium.envs.registration import EnvSpec
from gymnasium.error import UnregisteredEnv

from vecenv.backends.envpool import trial
from vecenv.backends.envpool.options import check_env_config
from vecenv.errors import how_to_install

__all__ = ["NO_LIMIT", "Task", "family_of", "import_envpool", "quietly", "said_by", "task_ids"]

NO_LIMIT = 2**31 - 1
"""The ``max_episode_steps`` that EnvPool never reaches."""

# Keys of EnvPool's configuration that are arguments of EnvPoolVectorEnv, or none of the user's business.
_RESERVED = {
    "env_seed": "pass seed= with one seed for each environment",
    "gym_reset_return_info": "infos are always returned",
    "render_env_id": "render() draws every environment",
    "max_num_players": "it belongs to the task",
}
_OWN_KEYS = frozenset(
    {"num_envs", "batch_size", "num_threads", "thread_affinity_offset", "seed", "max_episode_steps", "base_path", *_RESERVED}
)
_MAKE_KEYS = frozenset({"from_pixels", "render_width", "render_height", "render_camera_id"})


def import_envpool() -> Any:
    """The ``envpool`` module.

    Raises:
        ImportError: It is not installed, or its binaries do not load; says what to install.
    """
    try:
        return importlib.import_module("envpool")
    except (ImportError, OSError) as error:  # OSError: its asset packages are missing
        version = ".".join(map(str, sys.version_info[:2]))
        raise ImportError(
            f"the EnvPool backend needs the package 'envpool': {how_to_install('envpool')}. EnvPool has wheels for Linux "
            f"(x86_64, aarch64), macOS (arm64) and Windows (amd64): 1.2.5 for Python 3.11 to 3.14, later ones for 3.12 and "
            f"up; this is Python {version} on {sys.platform}. ({type(error).__name__}: {error})"
        ) from error


def _registered() -> dict[str, tuple[str, str, dict[str, Any]]]:
    import_envpool()
    registered: dict[str, Any] = importlib.import_module("envpool.registration").registry.specs
    return registered


def family_of(task_id: str) -> str:
    """The family of a task, as ``"atari"`` or ``"mujoco.gym"``.

    Raises:
        UnregisteredEnv: EnvPool has no such task; names the closest ones.
    """
    registered = _registered()
    if not isinstance(task_id, str):
        raise TypeError(f"task_id must be a string, got {type(task_id).__name__}")
    if task_id not in registered:
        close = difflib.get_close_matches(task_id, registered, n=5, cutoff=0.6)
        hint = f"did you mean {' or '.join(map(repr, close))}?" if close else "see EnvPoolVectorEnv.task_ids()"
        raise UnregisteredEnv(f"EnvPool {_version()} has no task {task_id!r}: {hint}")
    return registered[task_id][0].removeprefix("envpool.")


def task_ids(family: str | None = None) -> list[str]:
    """The task ids that the installed EnvPool knows, in alphabetical order.

    Args:
        family: Only of this family, as ``"atari"``, ``"classic_control"``, ``"mujoco.dmc"``; ``"mujoco"`` means all of
            MuJoCo's. ``None``: all.

    Raises:
        ImportError: EnvPool is not installed.
        ValueError: There is no such family; lists them.
    """
    families = {name: where.removeprefix("envpool.") for name, (where, _, _) in _registered().items()}
    if family is None:
        return sorted(families)
    chosen = sorted(name for name, of in families.items() if of == family or of.startswith(f"{family}."))
    if not chosen:
        raise ValueError(f"EnvPool has no family {family!r}; it has {', '.join(sorted(set(families.values())))}")
    return chosen


def _version() -> str:
    return str(getattr(import_envpool(), "__version__", "(version unknown)"))


@dataclass(frozen=True)
class Task:
    """A task with its configuration, checked: everything about a pool that is known before it is built.

    Attributes:
        id: EnvPool's task id.
        family: As ``"atari"``.
        pool_config: What ``envpool.make_gymnasium`` gets besides the id and the seeds.
        config: The whole configuration as EnvPool completed it.
        state_keys: Names of the arrays that a pool returns.
        state_specs: What they are, by name; a shape that begins with -1 is that of an array of players.
        action_keys: Names of the arrays that a pool takes.
        action_dtypes: Their dtypes.
        observation_space: Of one environment, with bounds repaired.
        action_space: Of one environment.
        max_num_players: More than one: rows are those of players.
        env_spec: What Gymnasium would have in its registry.
    """

    id: str
    family: str
    pool_config: dict[str, Any]
    config: dict[str, Any]
    state_keys: tuple[str, ...]
    state_specs: Mapping[str, Any]
    action_keys: tuple[str, ...]
    action_dtypes: tuple[npt.DTypeLike, ...]
    observation_space: gymnasium.Space[Any]
    action_space: gymnasium.Space[Any]
    max_num_players: int
    env_spec: EnvSpec | None

    @classmethod
    def of(
        cls,
        task_id: str,
        *,
        num_envs: int,
        batch_size: int,
        num_threads: int,
        thread_affinity_offset: int,
        max_episode_steps: int | None,
        render_mode: str | None,
        env_config: Mapping[str, Any],
    ) -> Task:
        """Look a task up and complete its configuration.

        Raises:
            UnregisteredEnv: No such task.
            TypeError: Unknown configuration keys, or values of the wrong type.
            ValueError: Values that EnvPool refuses, or that end a process.
            ImportError: EnvPool, or a system library that this family needs, is missing.
        """
        family = family_of(task_id)
        accepted, defaults = _check_keys(task_id, env_config)
        if unknown := check_env_config(task_id, family, defaults, _names_in(family), env_config):
            trial.require(task_id, unknown, env_config)
        config: dict[str, Any] = {
            "num_envs": num_envs, "batch_size": batch_size, "num_threads": num_threads,
            "thread_affinity_offset": thread_affinity_offset, **env_config,
        }  # fmt: skip
        given = {"max_episode_steps": max_episode_steps, "render_mode": render_mode}
        config |= {key: value for key, value in given.items() if value is not None}
        spec = _make_spec(task_id, config, accepted)
        completed = dict(zip(spec._config_keys, spec._config_values, strict=True))
        limit = int(completed.get("max_episode_steps", NO_LIMIT))
        return cls(
            id=task_id,
            family=family,
            pool_config=config,
            config=completed,
            **said_by(spec, completed),
            env_spec=_gymnasium_spec(task_id, limit, completed.get("reward_threshold"), env_config),
        )

    def build(self, seeds: list[int]) -> Any:
        """A new pool: its environments and threads exist when this returns.

        Args:
            seeds: One for each environment, within int32.
        """
        return quietly(lambda: import_envpool().make_gymnasium(self.id, seed=seeds, **self.pool_config))


def said_by(spec: Any, config: Mapping[str, Any]) -> dict[str, Any]:
    """What a pool's specification, of this configuration, says of a :class:`Task`; bounds of spaces are repaired."""
    return {
        "state_keys": tuple(spec._state_keys),
        "state_specs": dict(spec.state_array_spec),
        "action_keys": tuple(spec._action_keys),
        "action_dtypes": tuple(array[0] for array in spec._action_spec),
        "observation_space": _repaired(quietly(lambda: spec.observation_space)),
        "action_space": _action_space(quietly(lambda: spec.action_space)),
        "max_num_players": int(config.get("max_num_players", 1)),
    }


def _make_spec(task_id: str, config: Mapping[str, Any], accepted: list[str]) -> Any:
    try:
        return quietly(lambda: import_envpool().make_spec(task_id, **config))
    except ImportError as error:
        raise ImportError(f"EnvPool cannot load the family of {task_id!r}: {error}") from error
    except TypeError as error:
        raise TypeError(
            f"EnvPool refuses the configuration of {task_id!r}: {error}. Accepted keys: {', '.join(accepted)}"
        ) from error
    except (AssertionError, ValueError, RuntimeError) as error:
        raise ValueError(f"EnvPool refuses the configuration of {task_id!r}: {error or dict(config)}") from error


def _names_in(family: str) -> dict[str, list[str]]:
    """Option -> all texts that EnvPool's own tasks of a family have for it."""
    found: dict[str, set[str]] = {}
    for where, _, options in _registered().values():
        if where == f"envpool.{family}":
            for key, value in options.items():
                if isinstance(value, str):
                    found.setdefault(key, set()).add(value)
    return {key: sorted(values) for key, values in found.items()}


def _check_keys(task_id: str, env_config: Mapping[str, Any]) -> tuple[list[str], dict[str, Any]]:
    """The keys that may be in a task's configuration, and what it is without any; raises for any other key."""
    for key, advice in _RESERVED.items():
        if key in env_config:
            raise TypeError(f"{key!r} cannot be set here: {advice}")
    spec = _make_spec(task_id, {}, [])
    names = [key.replace(".", "_") for key in spec._config_keys]
    accepted = sorted((set(names) | _MAKE_KEYS) - _OWN_KEYS)
    for key in env_config:
        if key not in accepted:
            close = difflib.get_close_matches(key, [*accepted, *_OWN_KEYS - _RESERVED.keys()], n=1)
            hint = f" Did you mean {close[0]!r}?" if close else ""
            raise TypeError(f"EnvPool's {task_id!r} has no option {key!r}.{hint} Accepted keys: {', '.join(accepted)}")
    return accepted, dict(zip(names, spec._config_values, strict=True))


def quietly(build: Any) -> Any:
    """Call ``build`` without Gymnasium's warnings about the bounds that are repaired here."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*precision lowered by casting.*")
        return build()


def _repaired(space: gymnasium.Space[Any]) -> gymnasium.Space[Any]:
    """``space`` with infinite bounds where EnvPool means infinity and says the extremes of the floating-point type.

    EnvPool's default lower bound is the smallest *positive* number (``numeric_limits<T>::min()``), so that the observations
    of 51 dm_control tasks, and of others, would not be in their own space.
    """
    if isinstance(space, spaces.Dict):
        return spaces.Dict({key: _repaired(inner) for key, inner in space.spaces.items()})
    if not isinstance(space, spaces.Box) or not np.issubdtype(space.dtype, np.floating):
        return space
    limits = np.finfo(space.dtype)
    low, high = space.low.copy(), space.high.copy()
    low[(low == limits.tiny) | (low == limits.min)] = -np.inf
    high[high == limits.max] = np.inf
    return spaces.Box(low, high, space.shape, dtype=space.dtype.type)


def _action_space(space: gymnasium.Space[Any]) -> gymnasium.Space[Any]:
    """The part of a pool's action space that is the user's: of several named actions, not the environment ids."""
    if not isinstance(space, spaces.Dict):
        return _repaired(space)
    mine = {key: inner for key, inner in space.spaces.items() if key not in ("env_id", "players")}
    if len(mine) == 1 and isinstance(only := next(iter(mine.values())), spaces.Dict):
        mine = dict(only.spaces)
    return _repaired(spaces.Dict(mine))


def _gymnasium_spec(
    task_id: str, limit: int, reward_threshold: float | None, env_config: Mapping[str, Any]
) -> EnvSpec | None:
    try:
        return EnvSpec(
            task_id,
            reward_threshold=reward_threshold,
            max_episode_steps=limit if 0 < limit < NO_LIMIT else None,
            kwargs=dict(env_config),
        )
    except gymnasium.error.Error:  # a task id that Gymnasium's naming rules do not allow
        return None
