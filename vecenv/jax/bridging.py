"""The bridge: any Gymnasium vector env as functions of an :class:`~vecenv.jax.EnvState`, for use inside compiled programs.

Each step is one host call, made by :mod:`vecenv.jax.host_call` and answered by :mod:`vecenv.jax.host`. The call's first
argument and first result is ``state.token``, an integer that is new after every call. It orders the calls where the effects
of JAX do not, and lets the host refuse a state that was stepped before. The program itself computes everything that follows
from a step's results (counts, returns, masks).
"""

from __future__ import annotations

import multiprocessing.context
import sys
import types
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import gymnasium as gym
import jax
import jax.numpy as jnp
import numpy as np
from gymnasium.error import ClosedEnvironmentError
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space

from vecenv.front.arguments import GymnasiumSync
from vecenv.front.capabilities import capabilities_of
from vecenv.jax.env import Array, EnvState, PyTree
from vecenv.jax.functional import action_spec, check_action
from vecenv.jax.host import CallbackHost, InfoColumns
from vecenv.jax.host_call import call_in_lanes, choose_transport, host_call, host_function, original_errors, struct
from vecenv.jax.interop import jax_space
from vecenv.link.observations import flat_of

__all__ = ["Bridge", "bridge"]

Struct: TypeAlias = Any  # jax.ShapeDtypeStruct

_FLOAT64 = ("cast", "keep")


class Bridge:
    """A vector env for use inside compiled programs, as pure-looking functions; ``bridge`` is another name for it.

    ``reset``, ``step``, ``send``, ``recv`` and ``reset_mask`` may be called as they are, or inside ``jit``, ``scan``,
    ``while_loop``, ``cond`` and ``grad``; under ``vmap`` with ``lanes``. Each call is made exactly once, in program order.
    A state can be used once: afterwards, and after the next ``reset``, the host refuses it with ``StaleStateError``.
    Nothing is differentiated through.

    Exceptions of the environments are raised as themselves by calls outside of compiled programs, and by
    :func:`vecenv.jax.run`. A program of one's own that is called without it fails with JAX's ``JaxRuntimeError``. After
    any of them the next call must be ``reset``.

    Args:
        envs: Any Gymnasium vector env: vecenv's over processes or EnvPool, Gymnasium's own, wrapped or not. It is the
            bridge's from now on: do not step it, and close the bridge instead. Workers should have been started by
            forkserver or spawn.
        info_spec: Infos to report in ``EnvState.info``: name -> shape and dtype for one environment
            (``jax.ShapeDtypeStruct``), or a dtype for a number, or a dict of these. Each comes with a mask ``_name``. Others
            are left out.
        discount: For ``EnvState.discounted_return``.
        float64: What becomes of float64 observations and infos. ``"cast"``: float32, or float64 in JAX's 64-bit mode.
            ``"keep"``: float64, and an error outside of that mode.
        transport: ``"primitive"``: fast, through parts of JAX that may change. ``"io_callback"``: JAX's own. ``"auto"``:
            the first if it passes a test here.
        timeout: Seconds that a step, and a reset, may take, after which they raise ``StepTimeout``; ``None`` waits for ever.
            ``"auto"``: the vector env's own ``step_timeout``, which may also restart what hangs, and 60 where it has none.
            Vector envs without ``step_wait``, as ``SyncVectorEnv``, step in this process, where nothing can end a wait.
        lanes: The number of equal groups of environments, to be used under ``jax.vmap`` over as many lanes.

    Raises:
        TypeError: ``envs`` is no vector env; its spaces have no fixed size; ``info_spec`` is no specification.
        ValueError: An option has no meaning, or the environments run JAX in this process.
        RuntimeError: ``transport="primitive"`` does not work here.

    Attributes:
        num_envs: Environments in one state (in one lane).
        single_observation_space, single_action_space: Of one environment, as the vector env has them, with ``sample(key)``.
        observation_space, action_space: Of ``num_envs``; see :func:`~vecenv.jax.jax_space`.
        autoreset_mode: The vector env's.
        envs: The vector env.
        transport: ``"primitive"`` or ``"io_callback"``.
        discount, lanes: As given.
    """

    def __init__(
        self, envs: VectorEnv[Any, Any, Any], info_spec: Mapping[str, Any] | None = None, discount: float = 1.0,
        float64: str = "cast", transport: str = "auto", timeout: float | str | None = "auto", lanes: int | None = None,
    ) -> None:  # fmt: skip
        _check_options(envs, float64, timeout, lanes)
        _refuse_jax_in_process(envs)
        _warn_of_fork(envs)
        self.envs = envs
        self.discount = float(discount)
        self.lanes = lanes
        self.num_envs = envs.num_envs // (lanes or 1)
        self._float64 = float64
        self._infos = InfoColumns(info_spec)
        self._host = CallbackHost(envs, self._infos, timeout)
        self.autoreset_mode = self._host.mode
        self.single_observation_space: gym.Space[Any] = jax_space(envs.single_observation_space)
        self.single_action_space: gym.Space[Any] = jax_space(envs.single_action_space)
        self._action_spec = action_spec(envs.single_action_space)
        self.observation_space: gym.Space[Any] = jax_space(batch_space(envs.single_observation_space, self.num_envs))
        self.action_space: gym.Space[Any] = jax_space(batch_space(envs.single_action_space, self.num_envs))
        self.transport = choose_transport(transport)
        self._functions: dict[str, Callable[..., EnvState]] = {
            "reset": self._reset, "step": self._step, "send": self._send, "recv": self._recv, "reset_mask": self._reset_mask,
        }  # fmt: skip
        self._compiled = {name: jax.jit(function) for name, function in self._functions.items()}

    # -- the interface -----------------------------------------------------------------------------------------------

    def reset(self, key: Array) -> EnvState:
        """Begin an episode in every environment. Environment i gets the seed ``jax.random.bits(key, (n,))[i] >> 1``.

        Args:
            key: ``jax.random.key(0)``, or a raw one.

        Returns:
            The state before the first step: ``reward`` 0, ``valid`` False, ``first`` True.
        """
        return self._run("reset", key)

    def step(self, state: EnvState, action: PyTree) -> EnvState:
        """One step of every environment.

        Args:
            state: The newest one; it cannot be used again.
            action: Leaves ``[num_envs, ...]`` as in the action space, of its dtype or one that casts to it within the kind.

        Raises:
            ValueError: Wrong shape or structure of the action or the state; ``vmap`` without ``lanes``.
            TypeError: Wrong dtype; ``state`` is no state of a bridge.
            StaleStateError: ``state`` is not the newest one, or is another bridge's.
            Exception: What an environment raised; ``WorkerDied``, ``StepTimeout``, ``KeyboardInterrupt``.
        """
        return self._run("step", self._checked(state), self._action(action))

    def send(self, state: EnvState, action: PyTree) -> EnvState:
        """Begin a step, and do not wait for it: ``recv(send(state, action))`` is ``step(state, action)``.

        The result is pending: everything in it is as in ``state``, and only :meth:`recv` takes it. What the program computes
        in between is computed while the environments step.
        """
        return self._run("send", self._checked(state), self._action(action))

    def recv(self, state: EnvState) -> EnvState:
        """Wait for the step that :meth:`send` began, at most ``timeout`` seconds."""
        return self._run("recv", self._checked(state))

    def reset_mask(self, state: EnvState, mask: Array, key: Array) -> EnvState:
        """Begin another episode in some environments; the others stay exactly as they are. For ``AutoresetMode.DISABLED``.

        Args:
            state: As for :meth:`step`.
            mask: ``bool[num_envs]``, the rows to reset.
            key: For their seeds, as in :meth:`reset`. EnvPool cannot seed some environments; they go on as they would.

        Raises:
            ValueError: The environments reset themselves; ``mask`` is not ``bool[num_envs]``.
        """
        if self.autoreset_mode is not AutoresetMode.DISABLED:
            raise ValueError(
                f"reset_mask is for environments that do not reset themselves (AutoresetMode.DISABLED); these are in "
                f"{self.autoreset_mode}."
            )
        state = self._checked(state)
        if jnp.shape(mask) != (self.num_envs,) or jnp.result_type(mask) != jnp.bool_:
            raise ValueError(f"mask must be bool[{self.num_envs}], got {jnp.result_type(mask)}{list(jnp.shape(mask))}.")
        return self._run("reset_mask", state, jnp.asarray(mask), key)

    def close(self) -> None:
        """Close the vector env; idempotent."""
        self._host.close()

    def __enter__(self) -> Bridge:
        return self

    def __exit__(self, *args: object) -> None:
        self.close()

    def __repr__(self) -> str:
        lanes = "" if self.lanes is None else f"lanes={self.lanes}, "
        closed = ", closed" if self._host.closed else ""
        return (
            f"{type(self).__name__}({self.envs!r}, {lanes}num_envs={self.num_envs}, "
            f"autoreset_mode={self.autoreset_mode.name}, transport={self.transport!r}{closed})"
        )

    # -- guards ------------------------------------------------------------------------------------------------------

    def _run(self, name: str, *args: Any) -> EnvState:
        """A function below, traced into the caller's program, or compiled and waited for if there is none."""
        if self._host.closed:
            raise ClosedEnvironmentError(f"Calling `{name}` of a bridge that was closed.")
        if any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(args)):
            return self._functions[name](*args)
        with original_errors():
            state: EnvState = self._compiled[name](*args)
            if not isinstance(state.token, jax.core.Tracer):  # arguments that are constants of a program being traced
                state.token.block_until_ready()
        return state

    def _checked(self, state: EnvState) -> EnvState:
        if not isinstance(state, EnvState) or state.token is None:
            kind = "a state of an environment on the device" if isinstance(state, EnvState) else type(state).__name__
            raise TypeError(f"A bridge takes the EnvState that its reset returned, not {kind}.")
        if jnp.shape(state.token) != (2,) or jnp.shape(state.reward) != (self.num_envs,):
            advice = f" With lanes={self.lanes}, call it under jax.vmap over the lanes." if self.lanes else ""
            raise ValueError(
                f"The state is of {jnp.shape(state.reward)} environments, this bridge of ({self.num_envs},).{advice}"
            )
        return state

    def _action(self, action: PyTree) -> PyTree:
        return check_action(action, self._action_spec, (self.num_envs,), self.single_action_space)

    # -- the functions -----------------------------------------------------------------------------------------------

    def _reset(self, key: Array) -> EnvState:
        token, *arrays = self._call("reset", self._results(stepped=False), [self._seeds(key)])
        obs, arrays = self._split_obs(arrays)
        return EnvState.at_start(obs, (self.num_envs,), self._infos.build(arrays), token=token)

    def _step(self, state: EnvState, action: PyTree) -> EnvState:
        arrays = self._call("step", self._results(stepped=True), [state.token, *self._action_leaves(action)])
        return self._after(state, arrays)

    def _send(self, state: EnvState, action: PyTree) -> EnvState:
        (token,) = self._call("send", [], [state.token, *self._action_leaves(action)])
        return state.replace(token=token)

    def _recv(self, state: EnvState) -> EnvState:
        return self._after(state, self._call("recv", self._results(stepped=True), [state.token]))

    def _reset_mask(self, state: EnvState, mask: Array, key: Array) -> EnvState:
        args = [state.token, mask, self._seeds(key)]
        token, *arrays = self._call("reset_mask", self._results(stepped=False), args)
        obs, arrays = self._split_obs(arrays)
        state = state.replace(token=None).restarted(mask, obs, info=self._infos.build(arrays))
        return state.replace(token=token)

    def _after(self, state: EnvState, arrays: list[Array]) -> EnvState:
        """The state after a step of ``state`` with these results."""
        token, *arrays = arrays
        obs, (reward, terminated, truncated, *arrays) = self._split_obs(arrays)
        next_obs = obs
        if self.autoreset_mode is AutoresetMode.SAME_STEP:
            next_obs, arrays = self._split_obs(arrays)
        after = state.replace(token=None).advanced(
            self.autoreset_mode, self.discount, obs=obs, next_obs=next_obs, reward=reward, terminated=terminated,
            truncated=truncated, info=self._infos.build(arrays),
        )  # fmt: skip
        return after.replace(token=token)

    # -- the host call -----------------------------------------------------------------------------------------------

    def _call(self, command: str, results: list[Struct], args: list[Array]) -> list[Array]:
        """One call of the host, of this state's rows or, under ``vmap`` over the lanes, of all lanes' at once."""

        # Not `self`: JAX keeps this function for as long as it keeps the program, which may be for ever.
        method, transport = weakref.WeakMethod(self._host.call), self.transport

        def call(results: list[Struct], args: Sequence[Array]) -> list[Array]:
            shapes = tuple((result.shape, np.dtype(result.dtype)) for result in results)
            return host_call(host_function(method, command, shapes), results, args, transport)

        args = [jax.lax.stop_gradient(arg) for arg in args]
        return call_in_lanes(call, [struct((2,), jnp.int32), *results], args, self.lanes, self.num_envs)

    def _seeds(self, key: Array) -> Array:
        return (jax.random.bits(key, (self.num_envs,), jnp.uint32) >> 1).astype(jnp.int32)

    def _action_leaves(self, action: PyTree) -> list[Array]:
        return [jnp.asarray(leaf) for leaf in flat_of(self._host.action_tree, action)]

    def _results(self, stepped: bool) -> list[Struct]:
        """Shapes and dtypes of what JAX gets for the arrays of a step or a reset."""
        seen: Any = jax.dtypes.canonicalize_dtype
        every: list[Any] = [*self._host.observation_tree.leaves(), *self._infos.columns]
        wide = any(each.dtype == np.float64 for each in every)
        if wide and self._float64 == "keep" and seen(np.float64) != np.float64:
            raise ValueError(
                "float64='keep' needs JAX's 64-bit mode (jax.config.update('jax_enable_x64', True)); 'cast' gives float32."
            )
        return [struct((self.num_envs, *shape), seen(dtype)) for shape, dtype in self._host.specs(stepped)]

    def _split_obs(self, arrays: list[Array]) -> tuple[PyTree, list[Array]]:
        left: Iterator[Any] = iter(arrays)
        return self._host.observation_tree.build(left), list(left)


bridge = Bridge
"""The name by which programs build one: ``vecenv.jax.bridge(envs)``."""


def _check_options(envs: Any, float64: str, timeout: float | str | None, lanes: int | None) -> None:
    if not isinstance(envs, VectorEnv):
        raise TypeError(f"bridge takes a gymnasium.vector.VectorEnv, got {type(envs).__name__}.")
    if getattr(envs.unwrapped, "closed", False):
        raise ClosedEnvironmentError("bridge was given a vector env that is closed.")
    if float64 not in _FLOAT64:
        raise ValueError(f"float64 must be one of {_FLOAT64}, got {float64!r}.")
    if timeout not in (None, "auto") and (isinstance(timeout, str) or not timeout > 0):
        raise ValueError(f"timeout must be positive, None or 'auto', got {timeout!r}.")
    if lanes is not None and (lanes < 1 or envs.num_envs % lanes):
        raise ValueError(f"lanes={lanes}: {envs.num_envs} environments do not make so many equal groups.")


def _refuse_jax_in_process(envs: VectorEnv[Any, Any, Any]) -> None:
    """Refuse environments that run JAX in this process.

    They are stepped inside a callback of a JAX program, and what they compute may be queued behind that very program.

    Raises:
        ValueError: ``envs`` runs JAX, or holds an environment that does.
    """
    base = envs.unwrapped
    able = capabilities_of(base)
    own = base.envs if isinstance(base, GymnasiumSync) else getattr(base, "local_envs", ())
    for layer in [base, *(layer for env in own for layer in _layers(env))]:
        if not _uses_jax(layer) and not (layer is base and able is not None and able.runs_jax):
            continue
        cure = "Its environments need no bridge: use vecenv.jax.FunctionalVectorEnv."
        if layer is not base:
            cure = (
                "Run it in worker processes (vecenv.AsyncVectorEnv with context='forkserver' or 'spawn'), or without a "
                "bridge: vecenv.jax.FunctionalVectorEnv."
            )
        name = type(layer).__name__
        raise ValueError(f"{name} runs JAX in this process, and would wait for the program that waits for it. {cure}")


def _warn_of_fork(envs: VectorEnv[Any, Any, Any]) -> None:
    """Warn of workers started by fork: a copy of a process in which JAX has threads may stop at any lock they held."""
    processes = getattr(envs.unwrapped, "processes", None) or ()
    fork = getattr(multiprocessing.context, "ForkProcess", None)
    if fork is not None and any(isinstance(process, fork) for process in processes):
        warnings.warn(
            f"The workers of {type(envs.unwrapped).__name__} were started by fork, and so will be those that replace "
            "them: next to JAX's threads that may hang. Build it with context='forkserver' (or 'spawn').",
            RuntimeWarning,
            stacklevel=3,
        )


def _layers(env: Any) -> Iterator[Any]:
    """An environment and what it wraps."""
    while env is not None:
        yield env
        env = getattr(env, "env", None) if isinstance(env, gym.Wrapper) else None


def _uses_jax(env: Any) -> bool:
    """Whether an object holds JAX arrays or compiled functions, or its class's code names a module of JAX."""
    held = getattr(env, "__dict__", {}).values()
    if any(isinstance(value, jax.Array) or type(value).__module__.partition(".")[0] in ("jaxlib", "jax") for value in held):
        return True
    for cls in type(env).__mro__:
        module = sys.modules.get(cls.__module__)
        if module is None or cls.__module__.partition(".")[0] in ("builtins", "gymnasium", "typing", "abc"):
            continue
        for function in vars(cls).values():
            if isinstance(function, types.FunctionType) and _names_jax(function.__code__, function.__globals__):
                return True
    return False


def _names_jax(code: types.CodeType, names: dict[str, Any]) -> bool:
    for name in code.co_names:
        found = names.get(name)
        if isinstance(found, types.ModuleType) and found.__name__.partition(".")[0] == "jax":
            return True
    return any(_names_jax(part, names) for part in code.co_consts if isinstance(part, types.CodeType))
