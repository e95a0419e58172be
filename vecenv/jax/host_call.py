"""Calls from a compiled program into the host, each made exactly once and in the order of the program.

JAX offers three callbacks, and none of them promises this. ``pure_callback`` may be dropped, merged, hoisted and repeated;
unordered ``io_callback`` is reordered; ordered ``io_callback`` costs some 80 us, because it makes JAX arrays of its
arguments inside the callback, and the copy of an argument beyond 100 kB is queued on the very thread pool that the
callback blocks: with as many callbacks at once as there are cores, nothing moves any more.

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
import re
import threading
import traceback
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, TypeAlias

import jax
import jax.numpy as jnp
import jaxlib.version
import numpy as np
from jax.custom_batching import custom_vmap
from jax.experimental import io_callback
from jax.extend.core import Primitive

from vecenv.errors import VecEnvError
from vecenv.jax.env import Array

__all__ = [
    "TRANSPORTS", "HostCallFailed", "call_in_lanes", "choose_transport", "host_call", "host_function", "original_errors",
    "run", "struct",
]  # fmt: skip

TRANSPORTS = ("auto", "primitive", "io_callback")
_PIECE = 1 << 15  # bytes; JAX copies arguments on the spot up to about 100 kB

Results = Sequence[jax.ShapeDtypeStruct]
struct: Any = jax.ShapeDtypeStruct  # which has no types


def host_call(function: Callable[..., Sequence[Any]], results: Results, args: Sequence[Any], transport: str) -> list[Any]:
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
        return _primitive().bind(*args, function=function, results=shapes)  # type: ignore[no-any-return]
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


def host_function(method: weakref.WeakMethod[Any], *args: Any) -> Callable[..., Sequence[Any]]:
    """A method of a host object in the form that programs keep it: without keeping the object.

    JAX's caches hold a program's callbacks for as long as it pleases them, so this refers to the object weakly. What the
    method raises is left on the object, where :func:`original_errors` finds it.

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
def original_errors() -> Iterator[None]:
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
    owner: Any = _failed.pop(int(mark[1]), None) if mark else None
    if owner is None or owner.failure is None or mark is None or owner.failure[0] != int(mark[1]):
        return None
    original: BaseException = owner.failure[1]
    owner.failure = None
    return original


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
    with original_errors():
        return wait(function(*args, **kwargs))


Call: TypeAlias = Callable[[list[Any], Sequence[Array]], list[Array]]  # (results, arrays) -> arrays


def call_in_lanes(call: Call, results: list[Any], args: list[Array], lanes: int | None, num_envs: int) -> list[Array]:
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

        def alone(*args: Array) -> list[Array]:
            if lanes is None or (sizes and left == 1):
                return call(wide, args)
            unmapped: list[Array] = _unmapped().bind(
                *args, lanes=lanes, sizes=sizes, num_envs=num_envs, results=tuple(wide)
            )
            return unmapped

        def mapped(size: int, batched: list[bool], *args: Array) -> tuple[list[Array], list[bool]]:
            if lanes is None:
                raise ValueError(
                    f"A bridge cannot be called under jax.vmap: there is one of each of its {num_envs} environments. Build "
                    f"{size} times as many and bridge(..., lanes={size}) them, or keep the environments out of vmap and map "
                    "the policy."
                )
            if left % size:
                called = f"it is called under jax.vmap over {_over((size, *sizes))}"
                raise ValueError(f"This bridge has lanes={lanes}; {called}. {_advice((size, *sizes), num_envs)}")
            every = [
                arg if is_batched else jnp.broadcast_to(arg, (size, *arg.shape))
                for arg, is_batched in zip(args, batched, strict=True)
            ]
            return under((size, *sizes))(*every), [True] * len(results)

        call_or_map: Any = custom_vmap(alone)
        call_or_map.def_vmap(mapped)
        return call_or_map

    return under(())(*args)  # type: ignore[no-any-return]


def _over(sizes: tuple[int, ...]) -> str:
    return " times ".join(map(str, sizes))


def _advice(sizes: tuple[int, ...], num_envs: int) -> str:
    """What to do to have that many lanes; a bridge cannot get more, because each lane's environments are made before."""
    wanted = math.prod(sizes)
    return f"For {wanted} lanes of {num_envs}, make {wanted * num_envs} environments and bridge(..., lanes={wanted}) them."


@functools.cache
def _unmapped() -> Any:
    """Stands for a call in one lane. It has shapes and no meaning: every other lane's environments would be missing."""
    from jax.interpreters import mlir

    primitive: Any = Primitive("vecenv_one_lane")
    primitive.multiple_results = True
    primitive.def_abstract_eval(lambda *_, results, **__: [jax.core.ShapedArray(r.shape, r.dtype) for r in results])

    def refuse(*_: Any, lanes: int, sizes: tuple[int, ...], num_envs: int, results: Any) -> Any:
        short = f"; it is called under jax.vmap over {_over(sizes)}. {_advice(sizes, num_envs)}" if sizes else "."
        raise ValueError(f"A bridge with lanes={lanes} must be called under jax.vmap over {lanes} lanes{short}")

    primitive.def_impl(refuse)
    mlir.register_lowering(primitive, refuse)
    return primitive
