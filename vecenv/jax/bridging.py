"""The bridge: any Gymnasium vector env as functions of an :class:`~vecenv.jax.EnvState`, for use inside compiled programs.

Each step is one call into the host, answered by :mod:`vecenv.jax.host`. The call's first argument and first result is
``state.token``, an integer that is new after every call. It orders the calls where the effects of JAX do not, and lets the
host refuse a state that was stepped before. The program itself computes everything that follows from a step's results
(counts, returns, masks).

A call has to be made exactly once and in the order of the program. JAX offers three callbacks, and none of them promises
this. ``pure_callback`` may be dropped, merged, hoisted and repeated; unordered ``io_callback`` is reordered; ordered
``io_callback`` costs some 80 us, because it makes JAX arrays of its arguments inside the callback, and the copy of an
argument beyond 100 kB is queued on the very thread pool that the callback blocks: with as many callbacks at once as there
are cores, nothing moves any more.

So there are two transports with the same meaning. ``"primitive"`` is a primitive of our own with the same ordered effect,
lowered to the same XLA call, whose host function gets numpy arrays and nothing else. It leans on names that JAX does
not promise to keep, all of them in :func:`private_parts`, hence a self-test before its first use. ``"io_callback"`` is
JAX's, with large arguments cut into pieces that are copied on the spot.

Neither is safe from being hoisted out of a differentiated ``scan`` when its arguments do not change from step to step
(jax-ml/jax#16637): a caller must pass something that does, such as a count.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import itertools
import math
import multiprocessing.context
import re
import sys
import threading
import traceback
import types
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final

import gymnasium as gym
import jax
import jax.numpy as jnp
import jaxlib.version
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
from vecenv.link.observations import flat_of

__all__ = ["TRANSPORTS", "Bridge", "HostCallFailed", "bridge", "host_call", "primitive_problem", "run"]

_FLOAT64 = ("cast", "keep")
TRANSPORTS = ("auto", "primitive", "io_callback")
_PIECE = 1 << 15  # bytes; JAX copies arguments on the spot up to about 100 kB

struct: Any = jax.ShapeDtypeStruct  # which has no types


# -- calls into the host -----------------------------------------------------------------------------------------------


def host_call(function: Callable[..., Sequence[Any]], results: Sequence[Any], args: Sequence[Any], transport: str) -> Any:
    """Call ``function(*arrays)`` on the host, once, after every earlier host call of the program.

    Args:
        function: Is given numpy arrays, which may be read-only, and returns one array of the exact shape and dtype for each
            of ``results``; they are copied. It must touch nothing of JAX: what it waits for may be waiting for it.
        results: Shapes and dtypes.
        args: Arrays. A call has no derivative: ``stop_gradient`` what may carry one.
        transport: From :func:`choose_transport`.
    """
    if transport == "primitive":
        shapes = tuple(jax.core.ShapedArray(result.shape, result.dtype) for result in results)
        return _primitive().bind(*args, function=function, results=shapes)
    pieces = [_cut(arg) for arg in args]
    parts = [(len(cut), arg.shape) for cut, arg in zip(pieces, args, strict=True)]

    def of_whole(*pieces: Any) -> tuple[Any, ...]:
        left = iter([np.asarray(piece) for piece in pieces])  # JAX's, and ready: the first thing done is a copy
        whole = []
        for count, shape in parts:
            taken = list(itertools.islice(left, count))
            whole.append(taken[0] if count == 1 else np.concatenate(taken).reshape(shape))
        return tuple(function(*whole))

    return list(io_callback(of_whole, tuple(results), *itertools.chain(*pieces), ordered=True))


def _cut(arg: Any) -> list[Any]:
    """An argument in pieces small enough for JAX to copy on the spot."""
    flat = jnp.reshape(arg, -1)
    count = max(1, _PIECE // flat.dtype.itemsize)
    return [arg] if flat.size <= count else [flat[start : start + count] for start in range(0, flat.size, count)]


def choose_transport(wanted: str) -> str:
    """``"primitive"`` or ``"io_callback"``: what ``wanted`` amounts to here.

    Raises:
        ValueError: No such transport.
        RuntimeError: ``"primitive"`` was asked for and does not work with this version of JAX or on this device.
    """
    if wanted not in TRANSPORTS:
        raise ValueError(f"transport must be one of {TRANSPORTS}, got {wanted!r}.")
    if wanted == "io_callback":
        return wanted
    problem = primitive_problem(jax.default_backend())
    if problem is None:
        return "primitive"
    if wanted == "primitive":
        raise RuntimeError(
            f"The transport 'primitive' does not work here ({problem}); 'io_callback' does the same, more slowly."
        )
    return "io_callback"


# -- transport: a primitive of our own -------------------------------------------------------------------------------


@functools.cache
def primitive_problem(platform: str) -> str | None:
    """Why the transport ``"primitive"`` cannot be used on a platform, or ``None`` if a test program ran as it should."""
    if platform == "tpu":
        return "TPUs take host callbacks by another way"
    log: list[int] = []

    def count(index: Any) -> tuple[Any, ...]:
        log.append(int(index))
        return (np.asarray(index + 1),)

    def program(start: Any) -> Any:
        shape = struct((), jnp.int32)
        return jax.lax.scan(lambda i, _: (host_call(count, [shape], [i], "primitive")[0], None), start, None, length=3)[0]

    try:
        private_parts()  # looks for what is needed, outside of any program
        with jax.disable_jit(False), jax.ensure_compile_time_eval():
            last = int(jax.jit(program)(np.int32(0)))
    except Exception as error:  # whatever a version that moved things around may raise
        return f"{type(error).__name__}: {error}"
    return None if (last, log) == (3, [0, 1, 2]) else f"three calls in a row were executed as {log}"


TESTED: Final = "0.10.2"
"""The version of JAX that vecenv's own tests run with."""


@functools.cache
def private_parts() -> tuple[Any, Any, Any]:
    """The parts of JAX that are not public: the effect of an ordered callback, how one is lowered, and how it is sharded.

    Raises:
        ImportError: One is missing or has other arguments in the installed version, which the message names.
    """
    try:
        from jax._src.callback import _callback_op_sharding as callback_sharding
        from jax.interpreters import mlir

        emit_python_callback: Any = mlir.emit_python_callback
        inspect.signature(callback_sharding).bind("axis_context", "sharding", "avals_out")
        inspect.signature(emit_python_callback).bind(
            "ctx", "callback", "token", "operands", "operand_avals", "result_avals", has_side_effect=True,
            returns_token=True, sharding=None,
        )  # fmt: skip
        mlir.TokenSet, mlir.register_lowering  # noqa: B018
    except (ImportError, AttributeError, TypeError) as error:
        raise ImportError(
            f"vecenv's fast host calls need parts of JAX that are not public, and jax {jax.__version__} with jaxlib "
            f"{jaxlib.version.__version__} has them no longer, or changed ({error}). They were tested with jax {TESTED}; "
            "transport='io_callback' works with every version."
        ) from error
    with jax.disable_jit(False):
        traced: Any = jax.make_jaxpr(lambda: io_callback(lambda: np.int32(0), struct((), np.int32), ordered=True))()
    (effect,) = traced.effects
    return effect, emit_python_callback, callback_sharding


@functools.cache
def _primitive() -> Any:
    from jax.interpreters import mlir

    ordered, emit_python_callback, callback_sharding = private_parts()
    primitive: Any = Primitive("vecenv_host_call")
    primitive.multiple_results = True
    primitive.def_effectful_abstract_eval(lambda *_, function, results: (list(results), {ordered}))

    def lower(ctx: Any, *args: Any, function: Any, results: Any) -> Any:
        called, token, _ = emit_python_callback(
            ctx, lambda *arrays: tuple(function(*arrays)), ctx.tokens_in.get(ordered), list(args), ctx.avals_in,
            ctx.avals_out, has_side_effect=True, returns_token=True,
            sharding=callback_sharding(ctx.module_context.axis_context, None, ctx.avals_out),
        )  # fmt: skip
        ctx.set_tokens_out(ctx.tokens_in.update_tokens(mlir.TokenSet({ordered: token})))
        return called

    def alone(*args: Any, **params: Any) -> Any:
        """A call outside of any program, as a program of its own: also under ``disable_jit``, which would come back here."""
        with jax.disable_jit(False):
            return jax.jit(lambda *arrays: primitive.bind(*arrays, **params))(*args)

    mlir.register_lowering(primitive, lower, cacheable=False)
    primitive.def_impl(alone)
    return primitive


# -- exceptions ------------------------------------------------------------------------------------------------------


class HostCallFailed(VecEnvError, RuntimeError):
    """Stands in for an exception on its way through XLA, which keeps nothing of it but the text."""


def _host_function(method: weakref.WeakMethod[Any], *args: Any) -> Callable[..., Sequence[Any]]:
    """A method of a host object in the form that programs keep it: without keeping the object.

    JAX's caches hold a program's callbacks for as long as it pleases them, so this refers to the object weakly. What the
    method raises is left on the object, where :func:`_original_errors` finds it.

    Args:
        method: A weak reference to a bound method; its object gets the attribute ``failure``.
        args: Passed before the arrays.
    """

    def call(*arrays: Any) -> Sequence[Any]:
        bound = method()
        if bound is None:
            raise HostCallFailed("the environments of this program are gone: keep a reference to the bridge")
        try:
            return bound(*args, *arrays)  # type: ignore[no-any-return]
        except BaseException as error:  # Ctrl-C too: XLA would make a text of it
            failed = _stand_in(bound.__self__, error)
        # Raised out here, with nothing of the environments in reach: JAX logs it, and logs are kept.
        del bound, arrays
        raise failed

    return call


def _stand_in(owner: Any, error: BaseException) -> HostCallFailed:
    number = next(_numbers)
    with _lock:
        owner.failure = (number, error)
        _failed[number] = owner
    text = "".join(traceback.format_exception(error))
    return HostCallFailed(f"[vecenv host call {number}] {type(error).__name__}: {error}\n\n{text}")


_numbers = itertools.count(1)
_lock = threading.Lock()
_failed: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
_MARK = re.compile(r"\[vecenv host call (\d+)\]")


@contextlib.contextmanager
def _original_errors() -> Iterator[None]:
    """Within the block, an exception raised on the host by a compiled program arrives as itself, not as JAX's error."""
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        original = _original(error)
        if original is None:
            raise
    else:
        return
    raise original


def _original(error: BaseException) -> BaseException | None:
    mark = _MARK.search(str(error))
    number = int(mark[1]) if mark else 0
    owner: Any = _failed.pop(number, None)
    if owner is None or owner.failure is None or owner.failure[0] != number:
        return None
    (_, original), owner.failure = owner.failure, None
    return original  # type: ignore[no-any-return]


def run(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """``function(*args, **kwargs)``, waited for, with exceptions of bridged environments as they were raised.

    A compiled program that steps environments can fail as environments do: a worker dies, a reply does not come, or the user
    presses Ctrl-C. JAX reports all of these as a ``JaxRuntimeError`` with the text in it; here they are ``WorkerDied``,
    ``StepTimeout``, ``KeyboardInterrupt``, or whatever the environment raised.

    The arguments are waited for first. A program whose inputs are ready calls the host from the thread that started it,
    and only there can Ctrl-C reach it.
    """
    wait: Any = jax.block_until_ready
    wait((args, kwargs))
    with _original_errors():
        return wait(function(*args, **kwargs))


# -- lanes -----------------------------------------------------------------------------------------------------------


def _call_in_lanes(call: Any, results: list[Any], args: list[Array], lanes: int | None, num_envs: int) -> list[Array]:
    """``call(results, args)``; mapped over ``lanes``, once, with those axes in front of every result and argument.

    JAX would map a host call by making one for each lane, with nothing to say whose environments it is about, or refuse it.
    So the call comes with a rule: the mapped axis becomes one more axis of its arrays. ``jax.vmap`` may be nested: the lanes
    are then the product of its axes.

    Raises:
        ValueError: It is mapped and ``lanes`` is ``None``; it is mapped over axes whose product cannot be ``lanes``. Where
            it is not mapped, or not over enough, the error comes when the program is compiled.
    """

    def under(sizes: tuple[int, ...]) -> Any:
        """The call under maps over ``sizes``, the outermost first."""
        left = (lanes or 1) // math.prod(sizes)
        wide = [struct((*sizes, *result.shape), result.dtype) for result in results]

        def alone(*args: Array) -> Any:
            if lanes is None or (sizes and left == 1):
                return call(wide, args)
            short = f"; {_called_under(sizes, num_envs)}" if sizes else "."
            problem = f"A bridge with lanes={lanes} must be called under jax.vmap over {lanes} lanes{short}"
            return _unmapped().bind(*args, results=tuple(wide), problem=problem)

        def mapped(size: int, batched: list[bool], *args: Array) -> tuple[list[Array], list[bool]]:
            if lanes is None:
                raise ValueError(
                    f"A bridge cannot be called under jax.vmap: there is one of each of its {num_envs} environments. Build "
                    f"{size} times as many and bridge(..., lanes={size}) them, or keep the environments out of vmap and map "
                    "the policy."
                )
            if left % size:
                raise ValueError(f"This bridge has lanes={lanes}; {_called_under((size, *sizes), num_envs)}")
            every = [
                arg if is_batched else jnp.broadcast_to(arg, (size, *arg.shape))
                for arg, is_batched in zip(args, batched, strict=True)
            ]
            return under((size, *sizes))(*every), [True] * len(results)

        call_or_map: Any = custom_vmap(alone)
        call_or_map.def_vmap(mapped)
        return call_or_map

    return under(())(*args)  # type: ignore[no-any-return]


def _called_under(sizes: tuple[int, ...], num_envs: int) -> str:
    """What a bridge is mapped over, and how to get that many lanes: each lane's environments are made beforehand."""
    wanted, over = math.prod(sizes), " times ".join(map(str, sizes))
    advice = f"make {wanted * num_envs} environments and bridge(..., lanes={wanted}) them."
    return f"it is called under jax.vmap over {over}. For {wanted} lanes of {num_envs}, {advice}"


@functools.cache
def _unmapped() -> Any:
    """Stands for a call in one lane. It has shapes and no meaning: every other lane's environments would be missing."""
    from jax.interpreters import mlir

    primitive: Any = Primitive("vecenv_one_lane")
    primitive.multiple_results = True
    primitive.def_abstract_eval(lambda *_, results, **__: [jax.core.ShapedArray(r.shape, r.dtype) for r in results])

    def refuse(*_: Any, results: Any, problem: str) -> Any:
        raise ValueError(problem)

    primitive.def_impl(refuse)
    mlir.register_lowering(primitive, refuse)
    return primitive


# -- the bridge --------------------------------------------------------------------------------------------------------


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
        functions = self._reset, self._step, self._send, self._recv, self._reset_mask
        self._compiled = {function.__name__: jax.jit(function) for function in functions}

    # -- the interface -----------------------------------------------------------------------------------------------

    def reset(self, key: Array) -> EnvState:
        """Begin an episode in every environment. Environment i gets the seed ``jax.random.bits(key, (n,))[i] >> 1``.

        Args:
            key: ``jax.random.key(0)``, or a raw one.

        Returns:
            The state before the first step: ``reward`` 0, ``valid`` False, ``first`` True.
        """
        return self._run(self._reset, key)

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
        return self._run(self._step, self._checked(state), self._action(action))

    def send(self, state: EnvState, action: PyTree) -> EnvState:
        """Begin a step, and do not wait for it: ``recv(send(state, action))`` is ``step(state, action)``.

        The result is pending: everything in it is as in ``state``, and only :meth:`recv` takes it. What the program computes
        in between is computed while the environments step.
        """
        return self._run(self._send, self._checked(state), self._action(action))

    def recv(self, state: EnvState) -> EnvState:
        """Wait for the step that :meth:`send` began, at most ``timeout`` seconds."""
        return self._run(self._recv, self._checked(state))

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
            f"autoreset_mode={self.autoreset_mode.name}, transport={self.transport!r}{closed})"
        )

    # -- guards ------------------------------------------------------------------------------------------------------

    def _run(self, function: Callable[..., EnvState], *args: Any) -> EnvState:
        """A function below, traced into the caller's program, or compiled and waited for if there is none."""
        name = function.__name__
        if self._host.closed:
            raise ClosedEnvironmentError(f"Calling `{name.removeprefix('_')}` of a bridge that was closed.")
        if any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(args)):
            return function(*args)
        with _original_errors():
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
        token, arrays = self._call("reset", self._seeds(key))
        obs = self._host.observation_tree.build(arrays)
        return EnvState.at_start(obs, (self.num_envs,), self._infos.build(list(arrays)), token=token)

    def _step(self, state: EnvState, action: PyTree) -> EnvState:
        return self._after(state, *self._call("step", state.token, *self._action_leaves(action)))

    def _send(self, state: EnvState, action: PyTree) -> EnvState:
        token, _ = self._call("send", state.token, *self._action_leaves(action))
        return state.replace(token=token)

    def _recv(self, state: EnvState) -> EnvState:
        return self._after(state, *self._call("recv", state.token))

    def _reset_mask(self, state: EnvState, mask: Array, key: Array) -> EnvState:
        token, arrays = self._call("reset_mask", state.token, mask, self._seeds(key))
        obs = self._host.observation_tree.build(arrays)
        state = state.replace(token=None).restarted(mask, obs, info=self._infos.build(list(arrays)))
        return state.replace(token=token)

    def _after(self, state: EnvState, token: Array, arrays: Iterator[Any]) -> EnvState:
        """The state after a step of ``state`` with these results."""
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
        """One call of the host, of this state's rows or, under ``vmap`` over the lanes, of all lanes' at once.

        Returns:
            The new token, and the arrays of the answer.
        """
        # Not `self`: JAX keeps this function for as long as it keeps the program, which may be for ever.
        method, transport = weakref.WeakMethod(self._host.call), self.transport

        def call(results: list[Any], args: Sequence[Array]) -> Any:
            shapes = tuple((result.shape, np.dtype(result.dtype)) for result in results)
            return host_call(_host_function(method, command, shapes), results, args, transport)

        results = [struct((2,), jnp.int32)]
        if command != "send":
            results += self._results(stepped=command in ("step", "recv"))
        fixed = [jax.lax.stop_gradient(arg) for arg in args]
        token, *arrays = _call_in_lanes(call, results, fixed, self.lanes, self.num_envs)
        return token, iter(arrays)

    def _seeds(self, key: Array) -> Array:
        return (jax.random.bits(key, (self.num_envs,), jnp.uint32) >> 1).astype(jnp.int32)

    def _action_leaves(self, action: PyTree) -> list[Array]:
        return [jnp.asarray(leaf) for leaf in flat_of(self._host.action_tree, action)]

    def _results(self, stepped: bool) -> list[Any]:
        """Shapes and dtypes of what JAX gets for the arrays of a step or a reset."""
        seen: Any = jax.dtypes.canonicalize_dtype
        every: list[Any] = [*self._host.observation_tree.leaves(), *self._infos.columns]
        wide = any(each.dtype == np.float64 for each in every)
        if wide and self._float64 == "keep" and seen(np.float64) != np.float64:
            raise ValueError(
                "float64='keep' needs JAX's 64-bit mode (jax.config.update('jax_enable_x64', True)); 'cast' gives float32."
            )
        return [struct((self.num_envs, *shape), seen(dtype)) for shape, dtype in self._host.specs(stepped)]


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
