"""The bridge: any Gymnasium vector env as functions of an :class:`~vecenv.jax.EnvState`, for use in compiled programs.

Each call of a bridge is one host call, executed by :mod:`vecenv.jax.host`. It takes ``state.token`` as its first argument
(a reset takes none) and returns a new token as its first result. The token orders calls where JAX's effects do not, and the
host refuses a stale one. Counts, returns and ``valid`` are computed in the program.

Only the ordered ``io_callback`` runs exactly once and in program order: ``pure_callback`` may be dropped, merged, hoisted or
repeated, and the unordered ``io_callback`` reordered. The ordered one costs about 80 us per call, because it converts the
arguments to JAX arrays inside the callback. JAX queues the copy of an argument larger than 100 kB on the thread pool that
the callback blocks, so large arguments are split into pieces.

JAX may hoist a callback with constant arguments out of a differentiated ``scan`` (jax-ml/jax#16637). The token, which is new
in every call, prevents that. A reset has no token, so its key must depend on the step there.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
import multiprocessing.context
import re
import threading
import traceback
import types
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import gymnasium as gym
import jax
import jax.numpy as jnp
import numpy as np
from gymnasium.error import ClosedEnvironmentError
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space
from jax.custom_batching import custom_vmap
from jax.experimental import io_callback
from jax.extend.core import Primitive

from vecenv.errors import VecEnvError
from vecenv.front.arguments import GymnasiumSync
from vecenv.front.capabilities import capabilities_of
from vecenv.jax.env import Array, EnvState, PyTree
from vecenv.jax.functional import action_spec, check_action
from vecenv.jax.host import CallbackHost, InfoColumns
from vecenv.jax.interop import jax_space
from vecenv.link.observations import flatten

__all__ = ["Bridge", "HostCallFailed", "bridge", "host_call", "run"]

_FLOAT64_OPTIONS = ("cast", "keep")
_PIECE_BYTES = 1 << 15  # JAX copies arguments of up to about 100 kB immediately

struct: Any = jax.ShapeDtypeStruct  # annotated as Any because it has no type hints


# -- calls into the host -----------------------------------------------------------------------------------------------


def host_call(function: Callable[..., Sequence[Any]], results: Sequence[Any], args: Sequence[Any]) -> Any:
    """Call ``function(*arrays)`` on the host, once, after every earlier host call of the program.

    Args:
        function: Takes NumPy arrays, which may be read-only, and returns one array for each of ``results``, with exactly its
            shape and dtype; JAX copies them. It must not use JAX, which may be waiting for this call.
        results: The shape and dtype of each returned array.
        args: Arrays. A call has no derivative: apply ``stop_gradient`` to arguments that may carry one.
    """
    split_args = [_split(arg) for arg in args]
    counts_and_shapes = [(len(pieces), arg.shape) for pieces, arg in zip(split_args, args, strict=True)]

    def join_and_call(*pieces: Any) -> tuple[Any, ...]:
        remaining = iter([np.asarray(piece) for piece in pieces])  # does not block: JAX begins the callback by copying them
        arrays = []
        for count, shape in counts_and_shapes:
            own_pieces = list(itertools.islice(remaining, count))
            arrays.append(own_pieces[0] if count == 1 else np.concatenate(own_pieces).reshape(shape))
        return tuple(function(*arrays))

    return list(io_callback(join_and_call, tuple(results), *itertools.chain(*split_args), ordered=True))


def _split(arg: Any) -> list[Any]:
    """Split an argument into pieces that are small enough for JAX to copy immediately."""
    flat = jnp.reshape(arg, -1)
    piece_size = max(1, _PIECE_BYTES // flat.dtype.itemsize)
    if flat.size <= piece_size:
        return [arg]
    return [flat[start : start + piece_size] for start in range(0, flat.size, piece_size)]


# -- exceptions ------------------------------------------------------------------------------------------------------


class HostCallFailed(VecEnvError, RuntimeError):
    """A substitute for an exception that passes through XLA, which keeps only the text."""


def _host_function(method: weakref.WeakMethod[Any], *args: Any) -> Callable[..., Sequence[Any]]:
    """Wrap a bound method for compiled programs. It is referenced weakly, because JAX's caches keep callbacks indefinitely.

    An exception is stored in the attribute ``failure`` of the method's object, where :func:`_original_errors` finds it.
    """

    def call(*arrays: Any) -> Sequence[Any]:
        bound = method()
        if bound is None:
            raise HostCallFailed("the environments of this program were garbage-collected: keep a reference to the bridge")
        try:
            return bound(*args, *arrays)  # type: ignore[no-any-return]
        except BaseException as error:  # including KeyboardInterrupt: XLA would keep only its text
            substitute = _substitute_error(bound.__self__, error)
        # Raised outside the handler, without references to the environments: JAX logs the exception, and a log record may
        # be kept for a long time.
        del bound, arrays
        raise substitute

    return call


def _substitute_error(owner: Any, error: BaseException) -> HostCallFailed:
    number = next(_failure_numbers)
    with _lock:
        owner.failure = (number, error)
        _failed_owners[number] = owner
    text = "".join(traceback.format_exception(error))
    return HostCallFailed(f"[vecenv host call {number}] {type(error).__name__}: {error}\n\n{text}")


_failure_numbers = itertools.count(1)
_lock = threading.Lock()
_failed_owners: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
_CALL_NUMBER = re.compile(r"\[vecenv host call (\d+)\]")


@contextlib.contextmanager
def _original_errors() -> Iterator[None]:
    """Replace JAX's error with the exception that was raised in the host call."""
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        original = _take_original_error(error)
        if original is None:
            raise
    else:
        return
    raise original


def _take_original_error(error: BaseException) -> BaseException | None:
    match = _CALL_NUMBER.search(str(error))
    number = int(match[1]) if match else 0
    owner: Any = _failed_owners.pop(number, None)
    if owner is None or owner.failure is None or owner.failure[0] != number:
        return None
    (_, original), owner.failure = owner.failure, None
    return original  # type: ignore[no-any-return]


def run(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Return the finished result of ``function(*args, **kwargs)``, and raise exceptions of bridged environments unchanged.

    A compiled program that steps environments can fail for the same reasons as the environments: a worker dies, a reply does
    not arrive, or the user presses Ctrl-C. JAX reports all of these as a ``JaxRuntimeError`` that contains only the text.
    This function raises ``WorkerDied``, ``StepTimeout``, ``KeyboardInterrupt``, or the environment's own exception instead.

    It first waits until the arguments are computed. A program with finished inputs calls the host in the thread that started
    it. Ctrl-C interrupts only the main thread, so start the program there.
    """
    wait: Any = jax.block_until_ready
    wait((args, kwargs))
    with _original_errors():
        return wait(function(*args, **kwargs))


# -- lanes -----------------------------------------------------------------------------------------------------------


def _call_in_lanes(call: Any, results: list[Any], args: list[Array], lanes: int | None, num_envs: int) -> list[Array]:
    """Return ``call(results, args)``; under ``vmap`` over ``lanes``, make one call with the mapped axes in front.

    Under nested ``vmap``, the product of the axis sizes must be ``lanes``. Anything else raises ``ValueError``, at the
    latest when the program is compiled.
    """
    # Without a batching rule, JAX would refuse, or make one host call per lane that does not identify the lane. The rule
    # makes the mapped axis an axis of the arrays. A call over too few lanes is refused only at compilation, because another
    # `vmap` may be applied until then.

    def build_call(sizes: tuple[int, ...]) -> Any:
        """Return the call under maps over ``sizes``, the outermost first."""
        remaining = (lanes or 1) // math.prod(sizes)
        batched_results = [struct((*sizes, *result.shape), result.dtype) for result in results]

        def call_unmapped(*args: Array) -> Any:
            if lanes is None or (sizes and remaining == 1):
                return call(batched_results, args)
            reason = f"; {_describe_mapping(sizes, num_envs)}" if sizes else "."
            problem = f"A bridge with lanes={lanes} must be called under jax.vmap over {lanes} lanes{reason}"
            return _unmapped_call_primitive().bind(*args, results=tuple(batched_results), problem=problem)

        def call_mapped(size: int, batched: list[bool], *args: Array) -> tuple[list[Array], list[bool]]:
            if lanes is None:
                raise ValueError(
                    f"A bridge cannot be called under jax.vmap: each of its {num_envs} environments exists only once. "
                    f"Build {size} times as many and pass them to bridge(..., lanes={size}), or keep the environments out "
                    "of vmap and map the policy."
                )
            if remaining % size:
                raise ValueError(f"This bridge has lanes={lanes}; {_describe_mapping((size, *sizes), num_envs)}")
            batched_args = [
                arg if is_batched else jnp.broadcast_to(arg, (size, *arg.shape))
                for arg, is_batched in zip(args, batched, strict=True)
            ]
            return build_call((size, *sizes))(*batched_args), [True] * len(results)

        call_or_map: Any = custom_vmap(call_unmapped)
        call_or_map.def_vmap(call_mapped)
        return call_or_map

    return build_call(())(*args)  # type: ignore[no-any-return]


def _describe_mapping(sizes: tuple[int, ...], num_envs: int) -> str:
    """Describe the axes that a bridge is mapped over, and the way to get that many lanes."""
    lanes, axes = math.prod(sizes), " times ".join(map(str, sizes))
    advice = f"make {lanes * num_envs} environments and pass them to bridge(..., lanes={lanes})."
    return f"it is called under jax.vmap over {axes}. For {lanes} lanes of {num_envs}, {advice}"


@functools.cache
def _unmapped_call_primitive() -> Any:
    """Return a primitive for a call that is mapped over too few lanes. It can be traced, but not compiled or run."""
    from jax.interpreters import mlir

    primitive: Any = Primitive("vecenv_unmapped_call")
    primitive.multiple_results = True
    primitive.def_abstract_eval(lambda *_, results, **__: [jax.core.ShapedArray(r.shape, r.dtype) for r in results])

    def refuse(*_: Any, results: Any, problem: str) -> Any:
        raise ValueError(problem)

    primitive.def_impl(refuse)
    mlir.register_lowering(primitive, refuse)
    return primitive


# -- the bridge --------------------------------------------------------------------------------------------------------


class Bridge:
    """A vector env as functions for compiled programs; ``bridge`` is another name for this class.

    ``reset``, ``step``, ``send``, ``recv`` and ``reset_mask`` may be called directly, or inside ``jit``, ``scan``,
    ``while_loop``, ``cond`` and ``grad``; under ``vmap`` only with ``lanes``. Each call is made exactly once, in program
    order. A state can be used once: the host refuses a second use, and any use after a later ``reset``, with
    ``StaleStateError``. Gradients do not flow through the environments.

    Calls outside of compiled programs, and :func:`vecenv.jax.run`, raise the environments' own exceptions. Any other
    compiled program fails with JAX's ``JaxRuntimeError``. After an exception of the environments, the next call must be
    ``reset``; after a ``StaleStateError``, the newest state can still be stepped.

    Args:
        envs: Any Gymnasium vector env, wrapped or not, that accepts a list of seeds and runs no JAX in this process. The
            bridge owns it from now on: do not step it, and close only the bridge. Start its workers by forkserver or spawn.
        info_spec: Infos to report in ``EnvState.info``: name -> shape and dtype for one environment
            (``jax.ShapeDtypeStruct``), or a dtype for a number, or a dict of these. Each comes with a mask ``_name``. Other
            infos are left out.
        discount: The discount factor of ``EnvState.discounted_return``.
        float64: The conversion of float64 observations and infos. ``"cast"``: to float32, except in JAX's 64-bit
            mode. ``"keep"``: no conversion; an error outside of that mode.
        timeout: Seconds that a step or a reset may take before it raises ``StepTimeout`` (``multiprocessing.TimeoutError``
            with Gymnasium's ``AsyncVectorEnv``). ``None``: no limit but the vector env's own ``step_timeout``, which may
            also restart a hanging worker. ``"auto"``: that limit, or 60 if there is none. Vector envs without ``step_wait``,
            such as ``SyncVectorEnv``, and vector wrappers have no limit but their own.
        lanes: The number of equal groups of environments, one for each lane of the ``jax.vmap`` around the calls.

    Raises:
        TypeError: ``envs`` is not a vector env; its spaces have no fixed size; ``info_spec`` is malformed.
        ValueError: An option has an invalid value, or ``envs`` runs JAX in this process or has no autoreset mode.
        ClosedEnvironmentError: ``envs`` is closed.

    Attributes:
        num_envs: The number of environments in one state; with ``lanes``, those of one lane.
        single_observation_space, single_action_space: The spaces of one environment, equal to the vector env's, with
            ``sample(key)``.
        observation_space, action_space: The spaces of ``num_envs`` environments; see :func:`~vecenv.jax.jax_space`.
        autoreset_mode: The vector env's.
        envs: The vector env.
        discount, lanes: The arguments.
    """

    def __init__(
        self, envs: VectorEnv[Any, Any, Any], info_spec: Mapping[str, Any] | None = None, discount: float = 1.0,
        float64: str = "cast", timeout: float | str | None = "auto", lanes: int | None = None,
    ) -> None:  # fmt: skip
        _check_options(envs, float64, timeout, lanes)
        _refuse_jax_in_process(envs)
        _warn_about_fork(envs)
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
        functions = self._reset, self._step, self._send, self._recv, self._reset_mask
        self._compiled = {function.__name__: jax.jit(function) for function in functions}

    # -- the interface -----------------------------------------------------------------------------------------------

    def reset(self, key: Array) -> EnvState:
        """Begin an episode in every environment.

        Args:
            key: ``jax.random.key(0)``, or a raw key. Environment i gets the seed
                ``jax.random.bits(key, (num_envs,), "uint32")[i] >> 1``.

        Returns:
            The state before the first step: ``reward`` 0, ``valid`` False, ``first`` True.
        """
        return self._run(self._reset, key)

    def step(self, state: EnvState, action: PyTree) -> EnvState:
        """Step every environment once.

        Args:
            state: The newest state; it cannot be used again.
            action: Leaves ``[num_envs, ...]`` as in the action space; other dtypes are cast as by NumPy's ``"same_kind"``.

        Raises:
            ValueError: Wrong shape or structure of the action or the state; ``vmap`` without ``lanes``.
            TypeError: Wrong dtype; ``state`` does not come from a bridge.
            StaleStateError: ``state`` is not the newest one, precedes an exception, or belongs to another bridge.
            AlreadyPendingCallError: ``state`` comes from :meth:`send`.
            ClosedEnvironmentError: The bridge is closed.
            Exception: An environment's own exception; ``WorkerDied``, ``StepTimeout``, ``KeyboardInterrupt``.
        """
        return self._run(self._step, self._check_state(state), self._check_action(action))

    def send(self, state: EnvState, action: PyTree) -> EnvState:
        """Begin a step without waiting for it: ``recv(send(state, action))`` equals ``step(state, action)``.

        The returned state is pending: its fields are those of ``state``, except ``token``, and only :meth:`recv` accepts it.
        The program can compute while the environments step; vector envs without ``step_wait`` and wrappers step in ``recv``.
        """
        return self._run(self._send, self._check_state(state), self._check_action(action))

    def recv(self, state: EnvState) -> EnvState:
        """Wait at most ``timeout`` seconds for the step that :meth:`send` began; other states raise ``NoAsyncCallError``."""
        return self._run(self._recv, self._check_state(state))

    def reset_mask(self, state: EnvState, mask: Array, key: Array) -> EnvState:
        """Begin a new episode in some environments and leave the others unchanged. Requires ``AutoresetMode.DISABLED``.

        Args:
            state: As for :meth:`step`.
            mask: ``bool[num_envs]``, the rows to reset.
            key: For the seeds of these rows, as in :meth:`reset`. EnvPool cannot seed only some rows; there, each row
                continues its own sequence.

        Raises:
            ValueError: The environments reset themselves; ``mask`` is not ``bool[num_envs]``.
        """
        if self.autoreset_mode is not AutoresetMode.DISABLED:
            raise ValueError(
                f"reset_mask is for environments that do not reset themselves (AutoresetMode.DISABLED); these are in "
                f"{self.autoreset_mode}."
            )
        state = self._check_state(state)
        if jnp.shape(mask) != (self.num_envs,) or jnp.result_type(mask) != jnp.bool_:
            raise ValueError(f"mask must be bool[{self.num_envs}], got {jnp.result_type(mask)}{list(jnp.shape(mask))}.")
        return self._run(self._reset_mask, state, jnp.asarray(mask), key)

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
            f"autoreset_mode={self.autoreset_mode.name}{closed})"
        )

    # -- guards ------------------------------------------------------------------------------------------------------

    def _run(self, function: Callable[..., EnvState], *args: Any) -> EnvState:
        """Run one of the functions below as part of the program being traced; outside of one, compile it and wait."""
        name = function.__name__
        if self._host.closed:
            raise ClosedEnvironmentError(f"Calling `{name.removeprefix('_')}` of a bridge that was closed.")
        if any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(args)):
            return function(*args)
        with _original_errors():
            state: EnvState = self._compiled[name](*args)
            if not isinstance(state.token, jax.core.Tracer):  # while a program is traced, even constants give a tracer
                state.token.block_until_ready()
        return state

    def _check_state(self, state: EnvState) -> EnvState:
        if not isinstance(state, EnvState) or state.token is None:
            kind = "a state of a JAX-native environment" if isinstance(state, EnvState) else type(state).__name__
            raise TypeError(f"A bridge needs the EnvState that its reset returned, got {kind}.")
        if jnp.shape(state.token) != (2,) or jnp.shape(state.reward) != (self.num_envs,):
            advice = f" With lanes={self.lanes}, call it under jax.vmap over the lanes." if self.lanes else ""
            raise ValueError(f"The state has batch shape {jnp.shape(state.reward)}, expected ({self.num_envs},).{advice}")
        return state

    def _check_action(self, action: PyTree) -> PyTree:
        return check_action(action, self._action_spec, (self.num_envs,), self.single_action_space)

    # -- the functions -----------------------------------------------------------------------------------------------

    def _reset(self, key: Array) -> EnvState:
        token, arrays = self._call("reset", self._draw_seeds(key))
        obs = self._host.observation_tree.build(arrays)
        return EnvState.at_start(obs, (self.num_envs,), self._infos.build(list(arrays)), token=token)

    def _step(self, state: EnvState, action: PyTree) -> EnvState:
        return self._state_after(state, *self._call("step", state.token, *self._action_leaves(action)))

    def _send(self, state: EnvState, action: PyTree) -> EnvState:
        token, _ = self._call("send", state.token, *self._action_leaves(action))
        return state.replace(token=token)

    def _recv(self, state: EnvState) -> EnvState:
        return self._state_after(state, *self._call("recv", state.token))

    def _reset_mask(self, state: EnvState, mask: Array, key: Array) -> EnvState:
        token, arrays = self._call("reset_mask", state.token, mask, self._draw_seeds(key))
        obs = self._host.observation_tree.build(arrays)
        state = state.replace(token=None).restarted(mask, obs, info=self._infos.build(list(arrays)))
        return state.replace(token=token)

    def _state_after(self, state: EnvState, token: Array, arrays: Iterator[Any]) -> EnvState:
        """Build the state that follows ``state`` from the results of a step."""
        build = self._host.observation_tree.build
        obs = build(arrays)
        reward, terminated, truncated = itertools.islice(arrays, 3)
        next_obs = build(arrays) if self.autoreset_mode is AutoresetMode.SAME_STEP else obs
        after = state.replace(token=None).advanced(
            self.autoreset_mode, self.discount, obs=obs, next_obs=next_obs, reward=reward, terminated=terminated,
            truncated=truncated, info=self._infos.build(list(arrays)),
        )  # fmt: skip
        return after.replace(token=token)

    # -- the host call -----------------------------------------------------------------------------------------------

    def _call(self, command: str, *args: Array) -> tuple[Array, Iterator[Any]]:
        """Make one host call, for all lanes together under ``vmap``; return the new token and the arrays of the reply."""
        # `call` must not capture `self`, because JAX keeps it as long as the program, possibly forever.
        method = weakref.WeakMethod(self._host.call)

        def call(results: list[Any], args: Sequence[Array]) -> Any:
            shapes = tuple((result.shape, np.dtype(result.dtype)) for result in results)
            return host_call(_host_function(method, command, shapes), results, args)

        results = [struct((2,), jnp.int32)]
        if command != "send":
            results += self._result_specs(stepped=command in ("step", "recv"))
        args_without_gradient = [jax.lax.stop_gradient(arg) for arg in args]
        token, *arrays = _call_in_lanes(call, results, args_without_gradient, self.lanes, self.num_envs)
        return token, iter(arrays)

    def _draw_seeds(self, key: Array) -> Array:
        return (jax.random.bits(key, (self.num_envs,), jnp.uint32) >> 1).astype(jnp.int32)

    def _action_leaves(self, action: PyTree) -> list[Array]:
        return [jnp.asarray(leaf) for leaf in flatten(self._host.action_tree, action)]

    def _result_specs(self, stepped: bool) -> list[Any]:
        """Return the shapes and JAX dtypes of the arrays that a step or a reset returns."""
        to_jax_dtype: Any = jax.dtypes.canonicalize_dtype
        columns: list[Any] = [*self._host.observation_tree.leaves(), *self._infos.columns]
        has_float64 = any(column.dtype == np.float64 for column in columns)
        if has_float64 and self._float64 == "keep" and to_jax_dtype(np.float64) != np.float64:
            raise ValueError(
                "float64='keep' needs JAX's 64-bit mode (jax.config.update('jax_enable_x64', True)); 'cast' gives float32."
            )
        return [struct((self.num_envs, *shape), to_jax_dtype(dtype)) for shape, dtype in self._host.specs(stepped)]


bridge = Bridge
"""The public name of the constructor: ``vecenv.jax.bridge(envs)``."""


def _check_options(envs: Any, float64: str, timeout: float | str | None, lanes: int | None) -> None:
    if not isinstance(envs, VectorEnv):
        hint = ": use envs.flatten_agents()" if hasattr(envs, "flatten_agents") else "."
        raise TypeError(f"bridge needs a gymnasium.vector.VectorEnv, got {type(envs).__name__}{hint}")
    if getattr(envs.unwrapped, "closed", False):
        raise ClosedEnvironmentError("bridge needs an open vector env, but this one is closed.")
    if float64 not in _FLOAT64_OPTIONS:
        raise ValueError(f"float64 must be one of {_FLOAT64_OPTIONS}, got {float64!r}.")
    if timeout not in (None, "auto") and (isinstance(timeout, str) or not timeout > 0):
        raise ValueError(f"timeout must be positive, None or 'auto', got {timeout!r}.")
    if lanes is not None and (lanes < 1 or envs.num_envs % lanes):
        raise ValueError(f"lanes={lanes}: {envs.num_envs} environments cannot be split into equal groups.")


def _refuse_jax_in_process(envs: VectorEnv[Any, Any, Any]) -> None:
    """Raise ``ValueError`` if ``envs``, or one of its environments, runs JAX in this process.

    Stepped inside a callback of a JAX program, they may queue computations behind that program, which waits for them.
    """
    base = envs.unwrapped
    capabilities = capabilities_of(base)
    local_envs = base.envs if isinstance(base, GymnasiumSync) else getattr(base, "local_envs", ())
    for layer in [base, *(layer for env in local_envs for layer in _layers(env))]:
        if not _uses_jax(layer) and not (layer is base and capabilities is not None and capabilities.runs_jax):
            continue
        advice = "Its environments need no bridge: use vecenv.jax.FunctionalVectorEnv."
        if layer is not base:
            advice = (
                "Run it in worker processes (vecenv.AsyncVectorEnv with context='forkserver' or 'spawn'), or without a "
                "bridge: vecenv.jax.FunctionalVectorEnv."
            )
        name = type(layer).__name__
        raise ValueError(f"{name} runs JAX in this process, so it would wait for the program that waits for it. {advice}")


def _warn_about_fork(envs: VectorEnv[Any, Any, Any]) -> None:
    """Warn about forked workers: in a forked process, locks that JAX's threads held are never released."""
    processes = getattr(envs.unwrapped, "processes", None) or ()
    fork = getattr(multiprocessing.context, "ForkProcess", None)
    if fork is not None and any(isinstance(process, fork) for process in processes):
        warnings.warn(
            f"The workers of {type(envs.unwrapped).__name__} were started by fork, and replacements will be, too. "
            "Forked workers may hang because of JAX's threads: build it with context='forkserver' (or 'spawn').",
            RuntimeWarning,
            stacklevel=3,
        )


def _layers(env: Any) -> Iterator[Any]:
    """Yield an environment and every environment that it wraps."""
    while env is not None:
        yield env
        env = getattr(env, "env", None) if isinstance(env, gym.Wrapper) else None


def _uses_jax(env: Any) -> bool:
    """True if an object holds JAX arrays or compiled functions, or the code of its class refers to a JAX module."""
    modules = [type(value).__module__ for value in getattr(env, "__dict__", {}).values()]
    if any(module.partition(".")[0] in ("jaxlib", "jax") for module in modules):
        return True
    functions = [
        function
        for cls in type(env).__mro__
        if cls.__module__.partition(".")[0] not in ("builtins", "gymnasium", "typing", "abc")
        for function in vars(cls).values()
        if isinstance(function, types.FunctionType)
    ]
    return any(_refers_to_jax(function.__code__, function.__globals__) for function in functions)


def _refers_to_jax(code: types.CodeType, names: dict[str, Any]) -> bool:
    modules = [found for name in code.co_names if isinstance(found := names.get(name), types.ModuleType)]
    return any(module.__name__.partition(".")[0] == "jax" for module in modules) or any(
        _refers_to_jax(part, names) for part in code.co_consts if isinstance(part, types.CodeType)
    )
