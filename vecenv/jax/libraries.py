"""Environments of Brax, MuJoCo Playground, gymnax, jumanji and Gymnasium's ``FuncEnv`` as :class:`~vecenv.jax.JaxEnv`.

No name is in both Brax and Playground, so ``make_env`` needs only a name. The adapters hide these peculiarities:

* Brax and Playground: actions are in [-1, 1]; ``step`` rescales them where the actuators' range differs (0.4 in
  ``humanoid``, 3 in ``inverted_pendulum``, 2 in ``pusher``). ``done`` is termination; wrappers apply the time limit.
  ``info["time_out"]`` equals ``done`` in some environments, so it does not indicate a time limit. Some wrappers modify the
  ``info`` dict of their input state, so the adapter copies it.
* gymnax: ``step`` autoresets, and so computes a reset at every step; ``step_env`` does not.
* jumanji: ``last`` with a discount of 0 is termination, any other ``last`` is truncation.
"""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import importlib
import importlib.util
import inspect
import os
import subprocess
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import gymnasium as gym
import jax
import jax.numpy as jnp
import numpy as np
from gymnasium import spaces

from vecenv.errors import how_to_install
from vecenv.jax.env import Adapter, Array, FrameSkip, JaxEnv, Limited, PyTree, Rescaled, Start, Stepped, default_key
from vecenv.jax.interop import clip_to_dtype
from vecenv.system.signals import raise_if_from_handler

__all__ = [
    "BraxAdapter", "FuncAdapter", "GymnaxAdapter", "JumanjiAdapter", "adapt", "available_envs", "differentiability",
    "make_env", "require_gradient",
]  # fmt: skip


def adapt(
    env: Any, *, rescale: str | tuple[Any, Any] | None = None, max_episode_steps: int | None = None, **env_kwargs: Any
) -> JaxEnv:
    """Convert an environment of Brax, MuJoCo Playground, gymnax, jumanji or Gymnasium's ``FuncEnv`` to a :class:`JaxEnv`.

    Args:
        env: The environment; or a name in Brax or Playground; or a pair ``(env, params)`` of gymnax or a
            ``FuncEnv``; or a ``JaxEnv``, which is returned unchanged. Brax's and Playground's training wrappers around an
            environment are recognised: an ``AutoResetWrapper`` is removed (vecenv resets rows itself), the limit of
            an ``EpisodeWrapper`` and its action repeat are adopted, and wrappers that batch are refused.
        rescale: ``(low, high)`` declares ``Box(low, high)`` and maps actions linearly onto the native bounds;
            ``"actuator"`` uses the control range of the physics model's actuators for ``low`` and ``high``.
        max_episode_steps: Time limit in steps, which replaces the environment's own; -1 for none.
        **env_kwargs: Passed to the library together with a name, such as ``backend="spring"``.

    Raises:
        gymnasium.error.NameNotFound: No installed library has the name; close matches are listed.
        TypeError: The object is not of a supported kind, or keyword arguments were given without a name.
        ValueError: The environment cannot be unwrapped; ``rescale`` is invalid, or given for actions that are not a bounded
            Box, or ``"actuator"`` without a physics model.
        Exception: Given a name, also the errors of :func:`make_env`.
    """
    if isinstance(env, str):
        env = make_env(env, **env_kwargs)
    elif env_kwargs:
        raise TypeError(f"{sorted(env_kwargs)} can only be given together with a name, not with {env!r}.")
    result: JaxEnv = env if isinstance(env, JaxEnv) and not isinstance(env, type) else choose_adapter(env)
    if max_episode_steps is not None:
        result = Limited(result, max_episode_steps)
    if rescale is not None:
        if isinstance(rescale, str) and rescale != "actuator":
            raise ValueError(f"{getattr(result, 'name', env)}: rescale must be (low, high) or 'actuator', got {rescale!r}.")
        low, high = actuator_range(result) if isinstance(rescale, str) else rescale
        result = Rescaled(result, low, high)
    return result


def differentiability(env: Any) -> str:
    """Return the kind of derivative that a step of ``env`` has with respect to its action.

    Args:
        env: A ``JaxEnv``, any input of :func:`vecenv.jax.adapt`, or a vector env over one.

    Returns:
        ``"reverse"``: any derivative, including ``jax.grad``; ``"forward"``: ``jax.jvp`` only; ``"zero"``: the derivative is
        0 for every action; ``"none"``: there is no derivative.
    """
    return adapt(getattr(env, "single_env", env)).differentiable


def require_gradient(env: Any, mode: str = "reverse") -> None:
    """Raise unless a step of ``env`` has a derivative in ``mode`` that is not 0 for every action.

    Args:
        env: As for :func:`differentiability`.
        mode: ``"reverse"`` for ``jax.grad``, ``"forward"`` for ``jax.jvp``.

    Raises:
        ValueError: It has none; the message names the remedy if there is one.
    """
    single = adapt(getattr(env, "single_env", env))
    kind = single.differentiable
    if kind == "reverse" or (kind == "forward" and mode == "forward"):
        return
    advice = getattr(single, "gradient_advice", lambda: "")()
    derivative = {"none": "no derivative", "zero": "a derivative of 0"}.get(kind, "no reverse-mode derivative (jax.grad)")
    raise ValueError(f"A step of {getattr(single, 'name', single)} has {derivative} with respect to its action. {advice}")


_MODULES = {"brax": "brax.envs", "playground": "mujoco_playground"}


def available_envs(library: str | None = None) -> dict[str, tuple[str, ...]]:
    """Return the names that :func:`make_env` and ``JaxVectorEnv`` accept, by installed library.

    Args:
        library: ``"brax"`` or ``"playground"``; ``None``: all that are installed.

    Raises:
        ValueError: ``library`` is unknown.
        ImportError: ``library`` is not installed, or a library cannot be imported.
    """
    return {name: _env_names(name) for name in _choose_libraries(library)}


def _choose_libraries(library: str | None) -> list[str]:
    if library is not None:
        return [library]
    return [name for name, module in _MODULES.items() if importlib.util.find_spec(module.split(".")[0])]


def make_env(name: str, library: str | None = None, **kwargs: Any) -> Any:
    """Build a named environment of Brax or Playground.

    Args:
        name: The name, such as ``"ant"`` (Brax) or ``"CartpoleBalance"`` (Playground).
        library: ``"brax"`` or ``"playground"``; ``None``: the one that has the name.
        **kwargs: For Brax, arguments of the environment's class (``backend="spring"``); for Playground, ``config`` and
            ``config_overrides``. Playground runs on MJX's JAX implementation unless one of these selects another: its own
            default, warp, compiles for half a minute on a CPU and has no gradient.

    Raises:
        gymnasium.error.NameNotFound: No library has the name; close matches are listed.
        TypeError: The environment refuses a keyword argument.
        ValueError: ``library`` is unknown, or the environment refuses the value of a keyword argument.
        FileNotFoundError: A Playground environment needs model files that could not be fetched.
        ImportError: ``library`` is not installed, or a library cannot be imported and no other has the name.
    """
    for candidate in _choose_libraries(library):
        try:
            names = _env_names(candidate)
        except ImportError:  # raised again below, unless another library has the name
            continue
        if name in names:
            return _BUILDERS[candidate](name, **kwargs)
    raise gym.error.NameNotFound(_describe_unknown_name(name, library))


def _env_names(library: str) -> tuple[str, ...]:
    if library not in _MODULES:
        raise ValueError(f"Unknown library {library!r}; the libraries are {sorted(_MODULES)}.")
    try:
        module = importlib.import_module(_MODULES[library])
    except ImportError as error:
        if library in _choose_libraries(None):
            raise ImportError(f"{library} is installed but cannot be imported: {error}") from error
        raise ImportError(f"{library} is not installed: {how_to_install(library)}. ({error})") from error
    return tuple(module._envs) if library == "brax" else tuple(module.registry.ALL_ENVS)


def _describe_unknown_name(name: str, library: str | None) -> str:
    known = available_envs(library)
    if not known:
        return f"No environment {name!r}, because neither brax nor playground is installed: {how_to_install('brax')}."
    by_lower_case = {each.lower(): each for names in known.values() for each in names}
    close = [by_lower_case[match] for match in difflib.get_close_matches(name.lower(), by_lower_case, 3, 0.5)]
    hint = f" Did you mean {', '.join(close)}?" if close else ""
    return f"No environment {name!r} in {' or '.join(known)}.{hint} vecenv.jax.available_envs() lists them all."


def _build_brax(name: str, **kwargs: Any) -> Any:
    envs = importlib.import_module("brax.envs")
    env_class = envs._envs[name]
    signatures = [inspect.signature(vars(cls)["__init__"]) for cls in env_class.__mro__[:-1] if "__init__" in vars(cls)]
    if unknown := sorted(kwargs.keys() - {parameter for each in signatures for parameter in each.parameters}):
        raise TypeError(f"Brax's {name} has no arguments {unknown}.")  # Brax may ignore unknown arguments
    try:
        return envs.get_environment(name, **kwargs)
    except ValueError as error:
        raise ValueError(f"Brax's {name} refuses {_format_kwargs(kwargs)}: {error}") from error


def _build_playground(name: str, *, config: Any = None, config_overrides: Any = None, **unknown: Any) -> Any:
    if unknown:
        raise TypeError(
            f"Playground's {name} accepts only config= and config_overrides=, got {sorted(unknown)}: pass settings in "
            "config_overrides, as in {'impl': 'jax'}."
        )
    playground = importlib.import_module("mujoco_playground")
    overrides = dict(config_overrides or {})
    if config is None and "impl" in playground.registry.get_default_config(name):
        overrides.setdefault("impl", "jax")
    try:
        return playground.registry.load(name, config=config, config_overrides=overrides)
    except (subprocess.CalledProcessError, FileNotFoundError) as error:
        raise FileNotFoundError(_describe_missing_files(name, error)) from error
    except (KeyError, AttributeError) as error:
        raise ValueError(f"Playground's {name} refuses {_format_kwargs(overrides)}: {error}.") from error


def _describe_missing_files(name: str, error: Exception) -> str:
    source = importlib.import_module("mujoco_playground._src.mjx_env")
    return (
        f"Playground's {name} needs robot models that are not part of its package and could not be fetched ({error}). "
        f"Clone github.com/google-deepmind/mujoco_menagerie, commit {getattr(source, 'MENAGERIE_COMMIT_SHA', '?')}, into "
        f"{getattr(source, 'MENAGERIE_PATH', '?')}. The environments of its dm_control suite need no such files."
    )


def _format_kwargs(kwargs: dict[str, Any]) -> str:
    return ", ".join(f"{key}={value!r}" for key, value in kwargs.items()) or "its arguments"


_BUILDERS: dict[str, Callable[..., Any]] = {"brax": _build_brax, "playground": _build_playground}


_BATCHING_WRAPPERS = {"VmapWrapper", "EvalWrapper", "DomainRandomizationVmapWrapper", "BraxDomainRandomizationVmapWrapper"}
_AUTORESET_WRAPPERS = {"AutoResetWrapper", "BraxAutoResetWrapper"}
_EPISODE_WRAPPERS = {"EpisodeWrapper"}
_JAX_ENV_MEMBERS = ("step", "single_observation_space", "single_action_space", "max_episode_steps", "differentiable")


def choose_adapter(env: Any) -> JaxEnv:
    """Return the adapter for an environment object, chosen by its methods.

    Raises:
        TypeError: The object is a class, or of an unsupported kind, or its spaces have no counterpart in Gymnasium.
        ValueError: A wrapper around the environment batches, resets or truncates, and cannot be removed.
    """
    env, params = env if isinstance(env, tuple) and len(env) == 2 else (env, None)
    if isinstance(env, type):
        raise TypeError(f"expected an environment, got the class {env.__name__}: write {env.__name__}(...)")
    if hasattr(env, "step_env") and hasattr(env, "reset_env"):
        return GymnaxAdapter(env, params)
    if callable(getattr(env, "reset", None)) and hasattr(env, "observation_spec") and hasattr(env, "action_spec"):
        return JumanjiAdapter(env)
    if all(callable(getattr(env, name, None)) for name in ("initial", "transition", "observation", "terminal")):
        return FuncAdapter(env, params)
    if all(hasattr(env, name) for name in ("reset", "step", "observation_size", "action_size")):
        return _unwrap(env)
    missing = [name for name in _JAX_ENV_MEMBERS if not hasattr(env, name)]
    if callable(getattr(env, "init", None)) and missing:
        raise TypeError(f"{type(env).__name__} lacks {', '.join(missing)}: see vecenv.jax.JaxEnv")
    raise TypeError(
        f"{type(env).__module__}.{type(env).__name__} is not a kind of JAX environment that vecenv supports. These are Brax "
        "and MuJoCo Playground (reset(key), step(state, action), observation_size, action_size), gymnax (reset_env, "
        "step_env), jumanji (observation_spec, action_spec), gymnasium.functional.FuncEnv (initial, transition), and any "
        "object with all members of vecenv.jax.JaxEnv (init(key), step(state, action, key), single_observation_space, "
        "single_action_space, max_episode_steps, differentiable)."
    )


def _unwrap(env: Any) -> JaxEnv:
    """Remove the outer training wrappers, and adopt the time limit and the action repeat of an episode wrapper."""
    limit, skip, layer = None, 1, env
    while type(layer).__name__ in _AUTORESET_WRAPPERS | _EPISODE_WRAPPERS:
        if type(layer).__name__ in _EPISODE_WRAPPERS:
            skip = int(layer.action_repeat)
            limit = int(layer.episode_length)
        layer = layer.env
    inner = layer
    while "env" in vars(inner):
        if type(inner).__name__ in _BATCHING_WRAPPERS | _AUTORESET_WRAPPERS | _EPISODE_WRAPPERS:
            raise ValueError(
                f"{type(inner).__name__} batches, resets or truncates environments, which vecenv does itself. Pass the "
                "environment without it: brax.envs.get_environment(name), or mujoco_playground.registry.load(name)."
            )
        inner = inner.env
    adapter: JaxEnv = BraxAdapter(layer)
    if limit is not None:
        adapter = Limited(adapter, limit)
    return FrameSkip(adapter, skip) if skip > 1 else adapter


class BraxAdapter(Adapter):
    """An adapter for Brax and MuJoCo Playground: ``reset(key) -> State``, ``step(State, action) -> State``.

    ``info`` holds the environment's metrics and the numeric entries of its own ``info``, except ``rng`` and ``key``.
    """

    def __init__(self, env: Any) -> None:
        self.env = env
        self._base = getattr(env, "unwrapped", env)
        self.name = type(self._base).__name__
        self.is_playground = hasattr(self._base, "mjx_model")
        _, obs = jax.eval_shape(self.init, default_key(0))
        self.single_observation_space = space_like(obs)
        self.single_action_space = spaces.Box(-1.0, 1.0, (int(env.action_size),), np.float32)
        config = getattr(self._base, "_config", None)
        self.max_episode_steps = int(config.episode_length) if config and "episode_length" in config else 1000
        with contextlib.suppress(AttributeError, ZeroDivisionError, TypeError):
            self.frames_per_second = round(1.0 / float(self._base.dt))

    def init(self, key: Array) -> Start:
        state = self.env.reset(key)
        return state, to_plain_tree(state.obs)

    def step(self, state: PyTree, action: PyTree, key: Array) -> Stepped:
        if self.is_playground:  # in 64-bit mode its `lax.scan` needs float64 actions, but those of the space are float32
            action = jnp.asarray(action, jnp.result_type(float))
        state = self.env.step(jax.tree.map(lambda leaf: leaf, state), action)  # a copy: wrappers modify info
        info = {**_select_numeric(state.info), **_select_numeric(state.metrics)}
        return state, to_plain_tree(state.obs), state.reward, state.done > 0, jnp.zeros((), bool), info

    def gradient_advice(self) -> str:
        if getattr(self._base, "backend", None) == "mjx":
            return (
                "MJX solves contacts in a while loop, which has no reverse mode unless it runs exactly once: "
                "env.sys = env.sys.tree_replace({'opt.iterations': 1, 'opt.ls_iterations': 4}), or use the backend "
                "'spring', 'positional' or 'generalized'; jax.jvp works without either."
            )
        if self.is_playground:
            return (
                "Playground is differentiable with config_overrides={'impl': 'jax'} and one solver iteration "
                "(env.mjx_model.opt.iterations == 1); its warp kernels have no derivative at all."
            )
        return super().gradient_advice()

    def render(self, state: PyTree) -> np.ndarray[Any, Any]:
        rendered_state = state if self.is_playground else state.pipeline_state

        def draw() -> np.ndarray[Any, Any]:
            return np.asarray(self._base.render([rendered_state])[0])

        try:
            return draw()
        except Exception as error:
            raise_if_from_handler(error, draw)
            raise RuntimeError(
                f"{self.name} could not be rendered ({error}). MuJoCo needs OpenGL; on a machine without a display, set "
                f"MUJOCO_GL=egl before Python starts (it is {os.environ.get('MUJOCO_GL', 'unset')})."
            ) from error

    @property
    def model(self) -> PyTree:
        return self._base.mjx_model if self.is_playground else self._base.sys

    @contextlib.contextmanager
    def using(self, model: PyTree) -> Iterator[None]:
        name = "_mjx_model" if self.is_playground else "sys"
        before = getattr(self._base, name)
        setattr(self._base, name, model)
        try:
            yield
        finally:
            setattr(self._base, name, before)


class GymnaxAdapter(Adapter):
    """An adapter for gymnax: ``reset_env(key, params)``, ``step_env(key, state, action, params)``."""

    def __init__(self, env: Any, params: Any = None) -> None:
        self.env = env
        self.params = env.default_params if params is None else params
        self.name = str(getattr(env, "name", type(env).__name__))
        _, obs = jax.eval_shape(self.init, default_key(0))
        self.single_observation_space = _gymnax_space(env.observation_space(self.params), obs)
        self.single_action_space = _gymnax_space(env.action_space(self.params))

    def init(self, key: Array) -> Start:
        obs, state = self.env.reset_env(key, self.params)
        return state, to_plain_tree(obs)

    def step(self, state: PyTree, action: PyTree, key: Array) -> Stepped:
        obs, state, reward, terminated, info = self.env.step_env(key, state, action, self.params)
        truncated = self.env.is_truncated(state, self.params)
        return state, to_plain_tree(obs), reward, terminated, truncated, _select_numeric(info)

    def gradient_advice(self) -> str:
        return "gymnax stops gradients unless the environment came from env.with_transition_gradients()."


class JumanjiAdapter(Adapter):
    """An adapter for jumanji: ``reset(key) -> (state, TimeStep)``, ``step(state, action) -> (state, TimeStep)``."""

    def __init__(self, env: Any) -> None:
        self.env = env
        self.name = type(getattr(env, "unwrapped", env)).__name__
        self.single_observation_space = _jumanji_space(env.observation_spec)
        self.single_action_space = _jumanji_space(env.action_spec)

    def init(self, key: Array) -> Start:
        state, timestep = self.env.reset(key)
        return state, to_plain_tree(timestep.observation)

    def step(self, state: PyTree, action: PyTree, key: Array) -> Stepped:
        state, timestep = self.env.step(state, action)
        if timestep.reward.shape != ():
            raise ValueError(
                f"{self.name} returns a reward of shape {timestep.reward.shape}, one number per agent. Wrap it in "
                "jumanji.wrappers.MultiToSingleWrapper, which adds them up."
            )
        last, terminal = timestep.last(), timestep.discount == 0
        info = _select_numeric(timestep.extras or {})
        return state, to_plain_tree(timestep.observation), timestep.reward, last & terminal, last & ~terminal, info


class FuncAdapter(Adapter):
    """An adapter for ``FuncEnv``: ``initial``, ``transition``, ``observation``, ``reward``, ``terminal``."""

    def __init__(self, env: Any, params: Any = None) -> None:
        self.env = env
        self._params = {} if params is None else {"params": params}
        self.name = type(env).__name__
        self.single_observation_space = env.observation_space
        self.single_action_space = env.action_space

    def init(self, key: Array) -> Start:
        state = self.env.initial(key, **self._params)
        return state, to_plain_tree(self.env.observation(state, key, **self._params))

    def step(self, state: PyTree, action: PyTree, key: Array) -> Stepped:
        env, params = self.env, self._params
        after = env.transition(state, action, key, **params)
        reward = jnp.reshape(env.reward(state, action, after, key, **params), ())
        terminal = jnp.reshape(env.terminal(after, key, **params), ())
        info = _select_numeric(env.transition_info(state, action, after, **params))
        return after, to_plain_tree(env.observation(after, key, **params)), reward, terminal, jnp.zeros((), bool), info


def actuator_range(env: Any) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Return ``(low, high)``, each ``float32[action_size]``: the control range of the actuators of a physics model."""
    try:
        model = env.model
    except (AttributeError, ValueError):
        name = getattr(env, "name", type(env).__name__)
        raise ValueError(f"{name} has no physics model with actuators: pass rescale=(low, high).") from None
    limits = model.actuator.ctrl_range if hasattr(model, "actuator") else model.actuator_ctrlrange
    limits = np.asarray(limits, np.float32)
    return limits[:, 0], limits[:, 1]


def to_plain_tree(value: Any) -> PyTree:
    """Convert observations to dicts, tuples and arrays: named tuples and dataclasses become dicts of their fields."""
    if isinstance(value, Mapping):
        return {str(key): to_plain_tree(item) for key, item in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_asdict"):
        return to_plain_tree(value._asdict())
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: to_plain_tree(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, tuple | list):
        return tuple(to_plain_tree(item) for item in value)
    return value


def space_like(obs: PyTree) -> gym.Space[Any]:
    """Return the space of all observations with the shapes and dtypes of ``obs`` (arrays or ``ShapeDtypeStruct``)."""
    if isinstance(obs, dict):
        return spaces.Dict({key: space_like(value) for key, value in obs.items()})
    if isinstance(obs, tuple):
        return spaces.Tuple([space_like(value) for value in obs])
    dtype = np.dtype(obs.dtype)
    if dtype == np.bool_:
        return spaces.MultiBinary(obs.shape)
    if np.issubdtype(dtype, np.integer):
        bounds = np.iinfo(dtype)
        return spaces.Box(bounds.min, bounds.max, obs.shape, dtype.type)
    return spaces.Box(-np.inf, np.inf, obs.shape, dtype.type)


def _select_numeric(info: Mapping[str, Any]) -> dict[str, Any]:
    """Select the arrays and numbers of an info dict, at any depth. Leave out random keys and other objects."""
    numeric: dict[str, Any] = {}
    for key, value in info.items():
        if isinstance(value, Mapping):
            if inner := _select_numeric(value):
                numeric[str(key)] = inner
        elif key in ("rng", "key") or not isinstance(value, jax.Array | np.ndarray | float | int | bool):
            continue
        elif not jnp.issubdtype(jnp.result_type(value), jax.dtypes.prng_key):
            numeric[str(key)] = value
    return numeric


def _box(low: Any, high: Any, shape: Any, dtype: Any) -> gym.Space[Any]:
    dtype = np.dtype(dtype)
    if dtype == np.bool_:
        return spaces.MultiBinary(shape)
    low, high = (np.broadcast_to(np.asarray(x), shape) for x in (low, high))
    if np.issubdtype(dtype, np.integer):
        low, high = clip_to_dtype(low, dtype), clip_to_dtype(high, dtype)
    return spaces.Box(low.astype(dtype), high.astype(dtype), tuple(shape), dtype.type)


def _gymnax_space(space: Any, obs: PyTree = None) -> gym.Space[Any]:
    """Convert a gymnax space, with Boxes in the dtypes of ``obs``: ``Catch-bsuite`` declares int32 and returns float32."""
    kind = type(space).__name__
    if kind == "Discrete":
        return spaces.Discrete(int(space.n))
    if kind == "Box":
        return _box(space.low, space.high, space.shape, space.dtype if obs is None else obs.dtype)
    if kind == "Dict":
        return spaces.Dict({key: _gymnax_space(sub, obs and obs[key]) for key, sub in space.spaces.items()})
    if kind == "Tuple":
        return spaces.Tuple([_gymnax_space(sub, obs and obs[i]) for i, sub in enumerate(space.spaces)])
    raise TypeError(f"A gymnax space of class {kind} has no counterpart in Gymnasium.")


def _jumanji_space(spec: Any) -> gym.Space[Any]:
    if hasattr(spec, "num_values"):
        values = np.asarray(spec.num_values)
        return spaces.Discrete(int(values)) if values.ndim == 0 else spaces.MultiDiscrete(values)
    if hasattr(spec, "minimum"):
        return _box(spec.minimum, spec.maximum, spec.shape, spec.dtype)
    if hasattr(spec, "shape"):
        return space_like(spec)
    return spaces.Dict({key: _jumanji_space(value) for key, value in spec._specs.items()})
