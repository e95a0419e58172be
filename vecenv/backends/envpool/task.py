"""EnvPool's tasks: finding them, checking their options, and building pools.

Spaces come from a pool's specification, which is cheap, so environments are built only when they are needed. EnvPool reports
invalid configurations by assertions without text, by errors of the C++ binding, or not at all. This module raises errors
that name the valid values before anything is built.

Tasks have hundreds of options that C++ does not check: depending on other options, a value may end the process,
overwrite memory or make a reset hang. Common values are known to be harmless (:data:`_RANGES` and the constants after it).
Any other configuration is first tried once in a separate process, where it is built, reset and, unless its actions are
dicts, stepped. This takes a second or two. Before the first frame of a MuJoCo task is drawn, drawing is tried there too,
because without an OpenGL library MuJoCo ends the process with ``exit(1)``.
"""

from __future__ import annotations

import ctypes
import difflib
import functools
import importlib
import math
import operator
import os
import pickle
import subprocess
import sys
import tempfile
import warnings
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

import gymnasium
import numpy as np
import numpy.typing as npt
from gymnasium import spaces
from gymnasium.envs.registration import EnvSpec
from gymnasium.error import UnregisteredEnv
from gymnasium.vector import AutoresetMode

from vecenv.errors import how_to_install
from vecenv.front.arguments import parse_seeds
from vecenv.shm.arena import available_memory

Seed: TypeAlias = int | Sequence[int | None] | None

_INT32_END: Final = 2**31
_NO_LIMIT: Final = _INT32_END - 1  # the ``max_episode_steps`` that EnvPool never reaches
_MAX_THREADS: Final = 4096

# EnvPool's C++ accepts any integer for these, and values out of range end the process or hang. Each entry is
# (minimum, maximum, the largest value that needs no trial).
_RANGES: Final = {
    "frame_skip": (1, _INT32_END - 1, _INT32_END),  # large values are slow but harmless
    "stack_num": (1, 256, 32),
    "frame_stack": (1, 256, 32),
    "img_height": (1, 4096, 1024),
    "img_width": (1, 4096, 1024),
    "noop_max": (1, 10_000, 1000),
    "mode": (-1, _INT32_END - 1, _INT32_END),  # the emulator refuses values that a game does not have
    "difficulty": (-1, _INT32_END - 1, _INT32_END),
    "render_width": (1, 8192, 8192),  # MuJoCo's drawing is always tried in a separate process first
    "render_height": (1, 8192, 8192),
    "render_camera_id": (-1, _INT32_END - 1, _INT32_END),
}
_PROBABILITIES: Final = ("repeat_action_probability",)  # from 0 to 1
# The options that name the game. For an unknown name, EnvPool ends the process.
_GAME_OPTIONS: Final = ("task", "env_name", "scenario", "task_name", "hand_task", "adroit_task")
# Families that ignore ``max_episode_steps``, except in Sokoban, and tasks of toy_text that do so (EnvPool 1.2.5). With a
# limit, they would only report later terminations as truncations.
_UNLIMITED_FAMILIES: Final = ("highway", "jumanji", "pgx")
_UNLIMITED_TASKS: Final = ("Catch-", "CliffWalking")
# The families in which all boolean options (switches) were tested.
_SWITCH_FAMILIES: Final = (
    "atari", "box2d", "classic_control", "toy_text", "mujoco.dmc", "mujoco.gym", "mujoco.metaworld", "vizdoom",
)  # fmt: skip

# Keys of EnvPool's configuration that cannot be set, each with advice; then all keys that are no options of a task.
_RESERVED = {
    "env_type": "remove it; the interface is always Gymnasium's",
    "env_seed": "pass seed= with one seed per environment",
    "gym_reset_return_info": "infos are always returned",
    "render_env_id": "render() draws every environment",
    "max_num_players": "it belongs to the task",
    "thread_affinity_offset": "pin the whole program instead, for example with taskset",
}
_OWN_KEYS = frozenset({"num_envs", "batch_size", "num_threads", "seed", "max_episode_steps", "base_path", *_RESERVED})
_RENDER_OPTIONS = frozenset({"from_pixels", "render_width", "render_height", "render_camera_id"})  # of EnvPool's make()


def _import_envpool() -> Any:
    """Import ``envpool``; the error names the package to install if it is missing or its binaries do not load."""
    try:
        return importlib.import_module("envpool")
    except (ImportError, OSError) as error:  # OSError: EnvPool's asset packages are missing
        version = ".".join(map(str, sys.version_info[:2]))
        raise ImportError(
            f"the EnvPool backend needs the package 'envpool': {how_to_install('envpool')}. EnvPool has wheels for Linux "
            f"(x86_64, aarch64), macOS (arm64) and Windows (amd64): 1.2.5 for Python 3.11 to 3.14, later ones for 3.12 and "
            f"up; this is Python {version} on {sys.platform}. ({type(error).__name__}: {error})"
        ) from error


def _registry() -> dict[str, tuple[str, str, dict[str, Any]]]:
    """Return EnvPool's registry: task id -> (module, spec class, options)."""
    _import_envpool()
    registered: dict[str, Any] = importlib.import_module("envpool.registration").registry.specs
    return registered


def family_of(task_id: str) -> str:
    """Return the family of a task, such as ``"atari"`` or ``"mujoco.gym"``.

    Raises:
        TypeError: ``task_id`` is not a string.
        UnregisteredEnv: EnvPool has no such task; the message names the closest ones.
    """
    registered = _registry()
    if not isinstance(task_id, str):
        raise TypeError(f"task_id must be a string, got {type(task_id).__name__}")
    if task_id not in registered:
        hint = _suggest(task_id, registered).rstrip() or "see EnvPoolVectorEnv.task_ids()"
        version = getattr(_import_envpool(), "__version__", "(version unknown)")
        raise UnregisteredEnv(f"EnvPool {version} has no task {task_id!r}: {hint}")
    return registered[task_id][0].removeprefix("envpool.")


def task_ids(family: str | None = None) -> list[str]:
    """Return the task ids of the installed EnvPool, in alphabetical order.

    Args:
        family: Only tasks of this family, such as ``"atari"``, ``"classic_control"``, ``"mujoco.dmc"``; ``"mujoco"`` means
            all of MuJoCo's. ``None``: all tasks.

    Raises:
        ImportError: EnvPool is not installed.
        ValueError: There is no such family; the message lists them.
    """
    families = {name: module.removeprefix("envpool.") for name, (module, _, _) in _registry().items()}
    if family is None:
        return sorted(families)
    selected = sorted(name for name, found in families.items() if found == family or found.startswith(f"{family}."))
    if not selected:
        raise ValueError(f"EnvPool has no family {family!r}; it has {', '.join(sorted(set(families.values())))}")
    return selected


@dataclass(frozen=True)
class Task:
    """The description of a task and its checked configuration, available before a pool is built.

    Attributes:
        id: EnvPool's task id, or the class name of a given pool.
        family: The family of the task, such as ``"atari"``, or the module of a given pool's class.
        pool_config: The arguments of ``envpool.make_gymnasium`` besides the id and the seeds; of a given pool, ``config``.
        config: The whole configuration, with EnvPool's defaults.
        state_keys: Names of the arrays that a pool returns.
        state_specs: Their specifications by name. The shape of an array with a row per player begins with -1.
        action_keys: Names of the arrays that a pool receives.
        action_dtypes: Their dtypes.
        observation_space: The observation space of one environment, with bounds repaired.
        action_space: The action space of one environment.
        max_num_players: The maximum number of players per environment; above one, some arrays have a row per player.
        env_spec: The equivalent of an entry in Gymnasium's registry; ``None`` for a given pool.
        make: A function that builds a pool from one seed per environment.
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
    make: Callable[[list[int]], Any]

    @classmethod
    def from_id(cls, task_id: str, env_config: Mapping[str, Any], **pool: Any) -> Task:
        """Look up a task and complete its configuration.

        Args:
            task_id: EnvPool's task id.
            env_config: The task's options, which are checked here.
            pool: ``num_envs``, ``batch_size``, ``num_threads``, ``max_episode_steps`` and ``render_mode``, as checked by
                :func:`check_options`; ``None`` means EnvPool's default.

        Raises:
            UnregisteredEnv: There is no such task.
            TypeError: A configuration key is unknown, or a value has the wrong type.
            ValueError: EnvPool refuses a value, or a value would end the process.
            ImportError: EnvPool, or a system library that this family needs, is missing.
            NotImplementedError: The task ignores ``max_episode_steps``.
        """
        family, name = family_of(task_id), task_id.rpartition("/")[2]
        is_unlimited = family in _UNLIMITED_FAMILIES and not name.startswith("Sokoban")
        if pool.get("max_episode_steps") is not None and (is_unlimited or name.startswith(_UNLIMITED_TASKS)):
            raise NotImplementedError(f"EnvPool's {task_id!r} ignores max_episode_steps: leave it out")
        defaults = _check_keys(task_id, env_config)
        _require_harmless(task_id, family, defaults, env_config)
        config = {**env_config, **{key: value for key, value in pool.items() if value is not None}}
        fields = _describe_spec(_make_spec(task_id, config))
        return cls(
            id=task_id, family=family, pool_config=config, **fields,
            env_spec=_gymnasium_spec(task_id, fields["config"], env_config),
            make=lambda seeds: _import_envpool().make_gymnasium(task_id, seed=seeds, **config),
        )  # fmt: skip

    @classmethod
    def from_pool(cls, pool: Any) -> Task:
        """Describe a pool that EnvPool built.

        Raises:
            TypeError: It is not an EnvPool pool.
        """
        spec: Any = getattr(pool, "spec", None)
        if not all(hasattr(pool, name) for name in ("_send", "_recv", "_reset")) or not hasattr(spec, "_config_keys"):
            raise TypeError(f"expected a pool built by envpool.make(), got {pool!r}")
        fields, spec_type, pool_type = _describe_spec(spec), type(spec), type(pool)
        config = fields["config"]
        _POOLS.add(pool)
        return cls(
            id=pool_type.__name__, family=pool_type.__module__, pool_config=config, **fields, env_spec=None,
            make=lambda seeds: pool_type(spec_type(tuple({**config, "env_seed": seeds}.values()))),
        )  # fmt: skip

    def build(self, seeds: list[int]) -> Any:
        """Build a new pool, including its environments and threads.

        Args:
            seeds: One per environment, within int32.
        """
        if self.pool_config.get("from_pixels"):
            self.require_drawable()
        pool = _without_bound_warnings(lambda: self.make(seeds))
        _POOLS.add(pool)
        return pool

    def require_drawable(self) -> None:
        """Raise unless frames can be drawn without ending the process.

        Raises:
            RuntimeError: A trial process could not draw a frame.
        """
        if not self.family.startswith("mujoco."):
            return
        render_options = {key: value for key, value in self.pool_config.items() if key in _RENDER_OPTIONS}
        options = {**render_options, "render_mode": "rgb_array"}
        if (trial_failure := _run_trial(self.id, pickle.dumps(sorted(options.items())), draw=True)) is not None:
            raise RuntimeError(
                f"{self.id!r} cannot be rendered on this machine: a process that tried it ended with {trial_failure}. "
                "MuJoCo tasks need an OpenGL library: on Debian and Ubuntu, apt install libegl1 libgl1"
            )


def _describe_spec(spec: Any) -> dict[str, Any]:
    """Return the fields of :class:`Task` that a pool's specification determines, with the bounds of spaces repaired."""
    config = dict(zip(spec._config_keys, spec._config_values, strict=True))
    return {
        "config": config,
        "state_keys": tuple(spec._state_keys),
        "state_specs": dict(spec.state_array_spec),
        "action_keys": tuple(spec._action_keys),
        "action_dtypes": tuple(array[0] for array in spec._action_spec),
        "observation_space": _repair_bounds(_without_bound_warnings(lambda: spec.observation_space)),
        "action_space": _action_space(_without_bound_warnings(lambda: spec.action_space)),
        "max_num_players": int(config.get("max_num_players", 1)),
    }


def _make_spec(task_id: str, config: Mapping[str, Any]) -> Any:
    try:
        return _without_bound_warnings(lambda: _import_envpool().make_spec(task_id, **config))
    except ImportError as error:
        raise ImportError(f"EnvPool cannot load the family of {task_id!r}: {error}") from error
    except (TypeError, AssertionError, ValueError, RuntimeError) as error:
        kind = TypeError if isinstance(error, TypeError) else ValueError
        raise kind(f"EnvPool refuses the configuration of {task_id!r}: {error or dict(config)}") from error


def _check_keys(task_id: str, env_config: Mapping[str, Any]) -> dict[str, Any]:
    """Check the keys of ``env_config``, and return the task's default configuration."""
    for key, advice in _RESERVED.items():
        if key in env_config:
            raise TypeError(f"{key!r} cannot be set here: {advice}")
    spec = _make_spec(task_id, {})
    names = [key.replace(".", "_") for key in spec._config_keys]
    accepted = sorted((set(names) | _RENDER_OPTIONS) - _OWN_KEYS)
    for key in env_config:
        if key not in accepted:
            close = difflib.get_close_matches(key, [*accepted, *_OWN_KEYS - _RESERVED.keys()], n=1)
            hint = f" Did you mean {close[0]!r}?" if close else ""
            raise TypeError(f"EnvPool's {task_id!r} has no option {key!r}.{hint} Accepted keys: {', '.join(accepted)}")
    return dict(zip(names, spec._config_values, strict=True))


def _without_bound_warnings(build: Any) -> Any:
    """Call ``build`` without Gymnasium's warnings about the bounds that :func:`_repair_bounds` replaces."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*precision lowered by casting.*")
        return build()


def _repair_bounds(space: gymnasium.Space[Any]) -> gymnasium.Space[Any]:
    """Replace EnvPool's stand-ins for infinite bounds, the extremes of the floating-point type, with infinity.

    Its default lower bound is the smallest *positive* one, which excludes observations of 51 dm_control tasks and others.
    """
    if isinstance(space, spaces.Dict):
        return spaces.Dict({key: _repair_bounds(inner) for key, inner in space.spaces.items()})
    if not isinstance(space, spaces.Box) or not np.issubdtype(space.dtype, np.floating):
        return space
    limits = np.finfo(space.dtype)
    low, high = space.low.copy(), space.high.copy()
    low[(low == limits.tiny) | (low == limits.min)] = -np.inf
    high[high == limits.max] = np.inf
    return spaces.Box(low, high, space.shape, dtype=space.dtype.type)


def _action_space(space: gymnasium.Space[Any]) -> gymnasium.Space[Any]:
    """Return the action space of one environment: that of the pool, without the ids of environments and players."""
    if not isinstance(space, spaces.Dict):
        return _repair_bounds(space)
    actions = {key: inner for key, inner in space.spaces.items() if key not in ("env_id", "players")}
    if len(actions) == 1 and isinstance(nested := next(iter(actions.values())), spaces.Dict):
        actions = dict(nested.spaces)
    return _repair_bounds(spaces.Dict(actions))


def _gymnasium_spec(task_id: str, config: Mapping[str, Any], env_config: Mapping[str, Any]) -> EnvSpec:
    limit = int(config.get("max_episode_steps", _NO_LIMIT))
    max_steps, threshold = limit if 0 < limit < _NO_LIMIT else None, config.get("reward_threshold")
    return EnvSpec(task_id, reward_threshold=threshold, max_episode_steps=max_steps, kwargs=dict(env_config))


# -- pools in a forked child ------------------------------------------------------------------------------------------


def _leak_pools_in_child() -> None:
    """Keep a forked child from running the destructors of pools, because it does not have their threads."""
    for pool in list(_POOLS):
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(pool))


_POOLS: weakref.WeakSet[Any] = weakref.WeakSet()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_leak_pools_in_child)


# -- arguments ---------------------------------------------------------------------------------------------------------


def check_options(
    num_envs: Any, batch_size: Any, num_threads: Any, max_episode_steps: Any, render_mode: Any, mode: AutoresetMode
) -> tuple[int, int]:
    """Check these options and return ``num_envs`` and ``batch_size`` as integers.

    Raises:
        TypeError: A value is not an integer where one is needed.
        ValueError: A value is out of range; the message names the accepted values.
    """
    num_envs = _parse_positive("num_envs", num_envs)
    batch_size = num_envs if batch_size is None else _parse_positive("batch_size", batch_size)
    if num_envs % batch_size:
        divisors = [size for size in range(1, num_envs + 1) if num_envs % size == 0]
        raise ValueError(f"batch_size must divide num_envs={num_envs} (one of {divisors}), got {batch_size}")
    if num_threads is not None and _parse_positive("num_threads", num_threads) > _MAX_THREADS:
        raise ValueError(
            f"num_threads must be from 1 to {_MAX_THREADS}, got {num_threads}; threads beyond the number of cores, or of "
            "environments in a batch, have nothing to do"
        )
    if max_episode_steps is not None:
        _parse_positive("max_episode_steps", max_episode_steps)
    if render_mode not in (None, "rgb_array"):
        raise ValueError(f"render_mode must be 'rgb_array' or None, got {render_mode!r}")
    if mode is AutoresetMode.SAME_STEP and batch_size < num_envs:
        raise ValueError(
            "same-step autoreset needs all environments in one batch (batch_size=None): rows that wait for their resets "
            "would leave first-ready batches short. Use next-step autoreset"
        )
    return num_envs, batch_size


def _parse_integer(name: str, value: Any, expected: str = "an integer") -> int:
    try:
        return operator.index(value)
    except TypeError:
        raise TypeError(f"{name} must be {expected}, got {type(value).__name__}") from None


def _parse_positive(name: str, value: Any) -> int:
    number = _parse_integer(name, value)
    if not 1 <= number < _INT32_END:
        raise ValueError(f"{name} must be from 1 to 2**31 - 1, got {number}")
    return number


def _require_harmless(task_id: str, family: str, defaults: Mapping[str, Any], env_config: Mapping[str, Any]) -> None:
    """Raise unless a task can be built with the options ``env_config`` without ending the process.

    ``defaults`` is its configuration without options. The error names the accepted values, or how the trial process ended.
    """
    title = f"EnvPool's {task_id!r}"
    harmless = {key: _check_option(title, family, key, value, defaults.get(key)) for key, value in env_config.items()}
    changed = [key for key in harmless if key not in defaults or not np.array_equal(env_config[key], defaults[key])]
    untested = {key: env_config[key] for key in changed if not harmless[key]}
    options = {key: value for key, value in env_config.items() if key not in _RENDER_OPTIONS}
    if untested and (trial_failure := _run_trial(task_id, pickle.dumps(sorted(options.items())), draw=False)) is not None:
        listed = ", ".join(f"{key}={value!r}" for key, value in untested.items())
        raise ValueError(
            f"{title} cannot be built with {listed}: EnvPool does not check these options, and a process that tried them "
            f"ended with {trial_failure}"
        )


def _check_option(title: str, family: str, key: str, value: Any, default: Any) -> bool:
    """Check one option; return True if its value is known to be harmless."""
    if key in _RANGES:
        low, high, harmless_limit = _RANGES[key]
        if not low <= _parse_integer(f"{title}: {key}", value) <= high:
            raise ValueError(f"{title}: {key} must be from {low} to {high}, got {value}")
        return bool(value <= harmless_limit)
    if key in _GAME_OPTIONS:
        if not isinstance(value, str):
            raise TypeError(f"{title}: {key} must be a string, got {type(value).__name__}")
        family_options = [options for module, _, options in _registry().values() if module == f"envpool.{family}"]
        names = sorted({options[key] for options in family_options if isinstance(options.get(key), str)})
        if value != default and value not in names:
            accepted = f"Accepted: {', '.join(names)}; {default!r} is the default"
            raise ValueError(f"{title}: there is no {key} {value!r}: {_suggest(value, names)}{accepted}")
        return False
    if isinstance(value, (float, np.floating)) and math.isnan(value):
        raise ValueError(f"{title}: {key} must be a number, got {value!r}")
    if key in _PROBABILITIES and not (isinstance(value, (int, float, np.number)) and 0 <= value <= 1):
        raise ValueError(f"{title}: {key} must be a number from 0 to 1, got {value!r}")
    return key in _PROBABILITIES or (isinstance(value, bool) and isinstance(default, bool) and family in _SWITCH_FAMILIES)


def _suggest(name: str, names: Collection[str]) -> str:
    """Return a hint with the most similar names, or an empty string."""
    # compare names without suffixes such as "-v5", which many of them share
    stems = {candidate.rpartition("-v")[0] or candidate: candidate for candidate in names}
    close = [stems[stem] for stem in difflib.get_close_matches(name.rpartition("-v")[0] or name, stems, n=5, cutoff=0.6)]
    return f"did you mean {' or '.join(map(repr, close))}? " if close else ""


# -- trials ------------------------------------------------------------------------------------------------------------

_TRIAL_PROGRAM: Final = """
import pickle, sys
path, task, options, memory, draw = pickle.load(sys.stdin.buffer)
sys.path[:] = path
sys.modules["jax"] = None  # EnvPool would import JAX, which takes a second
try:
    import resource
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if not draw:
        resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
except (ImportError, ValueError, OSError):
    pass
import envpool
import numpy as np
pool = envpool.make_gymnasium(task, num_envs=2, num_threads=1, seed=1, **options)
pool.reset()
space = pool.action_space
if draw:
    pool.render()
elif not hasattr(space, "spaces"):
    for _ in range(32):
        pool.step(np.stack([space.sample(), space.sample()]))
print("survived", flush=True)
del pool
"""
_TRIAL_SECONDS: Final = 120.0
_TRIAL_MEMORY: Final = 16 << 30  # bytes of address space, most of it never used


@functools.cache
def _run_trial(task_id: str, options: bytes, *, draw: bool) -> str | None:
    """Build a task with these options in a separate process; return ``None`` if it survived, or a description of its end."""
    free_memory = available_memory()
    memory = _TRIAL_MEMORY if free_memory is None else min(_TRIAL_MEMORY, max(free_memory, 4 << 30))
    path = [os.path.abspath(entry) for entry in sys.path]
    payload = pickle.dumps((path, task_id, dict(pickle.loads(options)), memory, draw))
    try:
        with tempfile.TemporaryDirectory(prefix="vecenv-trial-") as folder:  # MuJoCo writes a log file after a failure
            done = subprocess.run(
                [sys.executable, "-c", _TRIAL_PROGRAM],
                input=payload, capture_output=True, timeout=_TRIAL_SECONDS, check=False, cwd=folder,
            )  # fmt: skip
    except subprocess.TimeoutExpired:
        return f"no result within {_TRIAL_SECONDS:g} s"
    if done.returncode == 0 and b"survived" in done.stdout:
        return None
    lines = [line.strip() for line in (done.stderr or done.stdout).decode(errors="replace").splitlines() if line.strip()]
    # C++ prints the error first, then a stack trace
    errors = [line for line in lines if "what():" in line or "Check failure" in line or line.startswith("F")] or lines[-1:]
    return f"exit code {done.returncode}" + (f" ({errors[0]})" if errors else "")


# -- seeds -------------------------------------------------------------------------------------------------------------


def spread_seeds(seed: Any, num_envs: int, rng: np.random.Generator) -> list[int]:
    """Return one seed per environment.

    Args:
        seed: An integer gives environment i the seed ``seed + i``; a sequence has one seed per environment, or ``None`` for
            a random one; ``None`` means random seeds for all. Seeds of 2**31 or more, which exceed EnvPool's range, are
            hashed into it by :class:`numpy.random.SeedSequence`.
        num_envs: Number of environments.
        rng: The source of random seeds.

    Returns:
        ``num_envs`` integers from 0 to 2**31 - 1.

    Raises:
        TypeError: A seed is not an integer.
        ValueError: A seed is negative, or the sequence has the wrong length.
    """
    return [_parse_seed(entry, i, rng) for i, entry in enumerate(parse_seeds(seed, num_envs))]


def _parse_seed(seed: Any, env: int, rng: np.random.Generator) -> int:
    """Check a seed and return it, hashed if it exceeds int32; return a random one for ``None``."""
    if seed is None:
        return int(rng.integers(_INT32_END))
    value = _parse_integer(f"the seed of env {env}", seed, "an integer or None")
    if value < 0:
        raise ValueError(f"the seed of env {env} is {value}; seeds must not be negative")
    return value if value < _INT32_END else int(np.random.SeedSequence(value).generate_state(1)[0] >> 1)


def config_seeds(config: Mapping[str, Any]) -> list[int]:
    """Return the seeds of the environments from a pool's configuration."""
    return list(config["env_seed"]) or [config["seed"] + i for i in range(config["num_envs"])]
