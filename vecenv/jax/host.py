"""The host side of the JAX bridge: a Gymnasium vector env as a few functions of NumPy arrays.

This module does not import JAX: a host callback that reads a JAX array other than its argument can deadlock with the program
that waits for the callback.

Environments cannot go back: a program that stepped a state twice, or an old one, would silently get a transition from
another state. So every state carries a token, ``(epoch, count)``: the reset from which it descends, and the number of calls
since then. Every call except a reset passes the token of its state, which must be the newest.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import multiprocessing
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NamedTuple, TypeAlias

import gymnasium
import numpy as np
import numpy.typing as npt
from gymnasium.error import AlreadyPendingCallError, ClosedEnvironmentError, NoAsyncCallError
from gymnasium.vector import AutoresetMode, VectorEnv, VectorWrapper

from vecenv.errors import ObservationError, StaleStateError, StepTimeout
from vecenv.front.arguments import GymnasiumAsync, MaskOnlyOptions
from vecenv.front.capabilities import capabilities_of
from vecenv.front.driver import drop_pending_and_retry
from vecenv.link.observations import flatten
from vecenv.shm.layout import Tree, fixed_tree
from vecenv.system.signals import raised_by_handler, watched_handlers

Array: TypeAlias = npt.NDArray[Any]
ArraySpec: TypeAlias = tuple[tuple[int, ...], np.dtype[Any]]  # shape and dtype
Rows: TypeAlias = npt.NDArray[np.intp]
Stepped: TypeAlias = tuple[Any, Array, Array, Array, dict[str, Any]]

_DEFAULT_TIMEOUT_SECONDS: Final = 60.0
_FLAG_SPEC: Final[ArraySpec] = ((), np.dtype(np.bool_))
_epochs = itertools.count(1)  # shared by all bridges, so that the state of another bridge is recognised
_last_reset_by: weakref.WeakValueDictionary[int, CallbackHost] = weakref.WeakValueDictionary()
"""Id of an unwrapped vector env -> the host that reset it last. States of its other hosts are invalid."""


def _array_tree(space: gymnasium.Space[Any], name: str) -> Tree:
    """Return the tree of arrays of a space; raise ``TypeError`` if its values have no fixed size, which JAX needs."""
    if (tree := fixed_tree(space, name)) is None:
        kinds = "Box, Discrete, MultiDiscrete, MultiBinary, and Dict or Tuple of those"
        raise TypeError(f"The bridge needs {name}s of fixed size ({kinds}), got {space}.")
    return tree


class CallbackHost:
    """The host side of a bridge: executes calls on a vector env and checks their tokens.

    Args:
        envs: The vector env, as for :func:`vecenv.jax.bridge`.
        infos: The infos to report.
        timeout: Seconds to wait for a reply, ``None`` or ``"auto"``; see :func:`vecenv.jax.bridge`.

    Attributes:
        failure: The number of the last failed call in JAX's error text, and its exception, until that is raised.
    """

    def __init__(self, envs: VectorEnv[Any, Any, Any], infos: InfoColumns, timeout: float | str | None) -> None:
        self.envs = envs
        self.num_envs = envs.num_envs
        self.observation_tree = _array_tree(envs.single_observation_space, "observation")
        self.action_tree = _array_tree(envs.single_action_space, "action")
        self.failure: tuple[int, BaseException] | None = None
        self.closed = False
        self._infos = infos
        self._requests = Requests(envs, timeout)
        self.mode = self._requests.mode
        self._action_specs = [((self.num_envs, *leaf.shape), leaf.dtype) for leaf in self.action_tree.leaves()]
        self._epoch = self._count = 0
        self._invalid_reason: str | None = "before the first reset"  # why no state is current; `None` if one is
        self._pending: Rows | None = None  # the rows of the pending step
        self._ended = np.zeros(self.num_envs, np.bool_)  # DISABLED: rows that ended and have not been reset

    def call(self, command: str, results: Sequence[ArraySpec], *arrays: Array) -> list[Array]:
        """Execute a command on a token (none for a reset) and arrays. Return a new token and the resulting arrays.

        ``results`` lists the shape and dtype of each returned array, the token first.
        """
        if self.closed:
            raise ClosedEnvironmentError("The bridge was closed: its environments can no longer be used.")
        if command == "reset":
            values = self._reset(*arrays)
            self._epoch, self._count = next(_epochs), 0
        else:
            token, *arguments = arrays
            self._consume_token(token, pending=command == "recv")
            values = _COMMANDS[command](self, *arguments)
            self._count += 1
        token = np.empty(*results[0])
        token[..., 0], token[..., 1] = self._epoch, self._count
        converted = list(map(_convert, values, results[1:]))
        self._invalid_reason = None
        return [token, *converted]

    def close(self) -> None:
        """Close the environments; after an interruption, a second call closes the rest."""
        self.closed = True
        self.envs.close()

    # -- the calls -------------------------------------------------------------------------------------------------------

    def _reset(self, seeds: Array) -> list[Array]:
        self._invalid_reason = "because a reset failed"
        self._pending = None
        self._invalidate_other_host()
        arrays = self._reset_arrays(self._requests.reset(seeds.reshape(-1).tolist()))
        self._ended[:] = False
        return arrays

    def _reset_mask(self, mask: Array, seeds: Array) -> list[Array]:
        mask = mask.reshape(-1)
        if not mask.any():
            return self._zeros(stepped=False)
        seeded = seeds.reshape(-1).tolist() if self._requests.masked_seeds else None
        arrays = self._reset_arrays(self._requests.reset(seeded, mask.copy()))
        self._ended[mask] = False
        return arrays

    def _reset_arrays(self, results: tuple[Any, dict[str, Any]]) -> list[Array]:
        observations, infos = results
        return self._leaves(observations, self.num_envs) + self._infos.read(infos, self.num_envs)

    # -- a step ----------------------------------------------------------------------------------------------------------

    def _step(self, *actions: Array) -> list[Array]:
        self._send(*actions)
        return self._recv()

    def _send(self, *actions: Array) -> list[Array]:
        # copies, because arguments are read-only and environments may write to their actions
        specs = self._action_specs
        copies = [np.array(array, dtype).reshape(shape) for array, (shape, dtype) in zip(actions, specs, strict=True)]
        build, rows = self.action_tree.build, np.flatnonzero(~self._ended)
        if len(rows) == self.num_envs:
            self._requests.begin(build(iter(copies)))
        elif len(rows):
            self._requests.begin(build(iter(copies)), rows, build(array[rows] for array in copies))
        self._pending = rows
        return []

    def _recv(self) -> list[Array]:
        assert self._pending is not None
        rows, self._pending = self._pending, None
        if not len(rows):
            return self._zeros(stepped=True)
        stepped_rows, stepped = self._requests.finish()
        arrays, ended = self._step_arrays(stepped, len(stepped_rows)), np.asarray(stepped[2] | stepped[3])
        if len(rows) == self.num_envs:
            if self.mode is AutoresetMode.DISABLED:
                self._ended = ended
            return arrays
        requested = np.isin(stepped_rows, rows)  # the other rows were stepped as well; ignore their results
        merged = self._zeros(stepped=True)
        for target, values in zip(merged, arrays, strict=True):
            target[stepped_rows[requested]] = values[requested]
        self._ended[stepped_rows[requested]] = ended[requested]
        return merged

    def _step_arrays(self, stepped: Stepped, rows: int) -> list[Array]:
        """Return the arrays of a step: observations, rewards, flags, successors (in same-step mode), and infos."""
        observations, rewards, terminations, truncations, infos = stepped
        leaves = self._leaves(observations, rows)
        arrays = [*leaves, rewards, terminations, truncations]
        if self.mode is AutoresetMode.SAME_STEP:
            arrays += self._successors(leaves, terminations | truncations, infos)
        return arrays + self._infos.read(infos, rows)

    def _successors(self, leaves: list[Array], ended: Array, infos: dict[str, Any]) -> list[Array]:
        """Return ``leaves``, with the final observation in rows where an episode ended."""
        if not ended.any():
            return leaves
        if "final_obs" not in infos:
            raise ObservationError("an episode ended in same-step mode, but infos['final_obs'] is missing")
        successors = [leaf.copy() for leaf in leaves]
        for row in np.flatnonzero(ended).tolist():
            for leaf, value in zip(successors, flatten(self.observation_tree, infos["final_obs"][row]), strict=True):
                leaf[row] = value
        return successors

    def _leaves(self, observations: Any, rows: int) -> list[Array]:
        """Check a batch of observations and return its arrays."""
        exact = self.observation_tree.match(observations, rows)
        if exact is not None:
            return exact
        try:
            arrays = [np.asarray(array) for array in flatten(self.observation_tree, observations)]
        except (KeyError, IndexError, TypeError) as error:
            raise ObservationError(f"observations are not structured like {self.envs.single_observation_space}") from error
        for array, leaf in zip(arrays, self.observation_tree.leaves(), strict=True):
            if array.shape != (rows, *leaf.shape):
                raise ObservationError(f"{leaf.name}: got shape {array.shape}, expected {(rows, *leaf.shape)}")
        return arrays

    def specs(self, stepped: bool) -> list[ArraySpec]:
        """Return the shape (for one environment) and dtype of each array of a step or reset, without the token."""
        observations: list[ArraySpec] = [(leaf.shape, leaf.dtype) for leaf in self.observation_tree.leaves()]
        specs = [*observations]
        if stepped:
            specs += [((), np.dtype(np.float64)), _FLAG_SPEC, _FLAG_SPEC]
            specs += observations if self.mode is AutoresetMode.SAME_STEP else []
        for column in self._infos.columns:
            specs += [(column.shape, column.dtype), _FLAG_SPEC]
        return specs

    def _zeros(self, stepped: bool) -> list[Array]:
        return [np.zeros((self.num_envs, *shape), dtype) for shape, dtype in self.specs(stepped)]

    # -- several bridges over one vector env -----------------------------------------------------------------------------

    def _invalidate_other_host(self) -> None:
        """Invalidate the states of another bridge over the same vector env, because this one resets its environments."""
        envs_id = id(self.envs.unwrapped)  # independent of wrappers
        other_host = _last_reset_by.get(envs_id)
        if other_host is not None and other_host is not self:
            other_host._invalid_reason = "because another bridge over the same vector env has reset them"
            other_host._requests.drain()  # raises if a reply is late, before `_last_reset_by` changes
            other_host._pending = None
        _last_reset_by[envs_id] = self

    # -- the token -------------------------------------------------------------------------------------------------------

    def _consume_token(self, token: Array, pending: bool = False) -> None:
        """Check a token and use it up: the state is invalid afterwards, even if the call fails."""
        if self._invalid_reason is not None:
            raise StaleStateError(f"The environments cannot continue {self._invalid_reason}: call reset(key).")
        for epoch, count in token.reshape(-1, 2).tolist():
            if (epoch, count) != (self._epoch, self._count):
                problem = f"was used before (it is number {count} after its reset, the environments are at {self._count})"
                if epoch != self._epoch:
                    epochs = f"(epoch {epoch}, the environments are in {self._epoch})"
                    problem = f"belongs to another bridge or an earlier reset {epochs}"
                advice = "Step the newest one, and only once: environments cannot go back."
                raise StaleStateError(f"This state {problem}. {advice}")
        if pending and self._pending is None:
            raise NoAsyncCallError("Calling `recv` with a state that was not returned by `send`.", "recv")
        if self._pending is not None and not pending:
            raise AlreadyPendingCallError("This state was returned by `send`: pass it to `recv` first.", "send")
        self._invalid_reason = "because an earlier call failed"


_COMMANDS: dict[str, Callable[..., list[Array]]] = {  # the commands with a token
    "step": CallbackHost._step, "send": CallbackHost._send, "recv": CallbackHost._recv,
    "reset_mask": CallbackHost._reset_mask,
}  # fmt: skip


def _convert(array: Array, spec: ArraySpec) -> Array:
    shape, dtype = spec
    array = _cast(array, dtype)
    return array if array.shape == shape else array.reshape(shape)


def _cast(array: Array, dtype: np.dtype[Any]) -> Array:
    """Return an array in a dtype; raise ``OverflowError`` for an integer that does not fit."""
    if array.dtype == dtype:
        return array
    converted = array.astype(dtype)
    if array.dtype.kind in "iu" and not np.array_equal(converted, array):
        raise OverflowError(
            f"an integer from the environments does not fit into {dtype}: enable JAX's 64-bit mode, and name a wider dtype "
            "if the info_spec has this one"
        )
    return converted


class Requests:
    """An adapter that resets and steps a vector env through the calls that the env supports; at most one request is pending.

    If an env has ``step_async`` and ``step_wait``, it steps while the program computes, and a wait can time out. For other
    envs, and for wrappers, only ``reset`` and ``step`` are used, and a step runs when its result is fetched. An env of the
    first kind with the capabilities ``first_ready`` and ``reset_mask`` can step some rows; in all others, ended rows are
    reset and stepped too, and their results are ignored.

    Args:
        envs: The vector env.
        timeout: See :func:`vecenv.jax.bridge`.

    Raises:
        ValueError: The metadata of ``envs`` lacks an autoreset mode.

    Attributes:
        mode: The autoreset mode of the env.
        timeout: Seconds that a wait may take; ``None``: no limit except the env's own.
        masked_seeds: True if a reset of some rows accepts seeds.
    """

    def __init__(self, envs: VectorEnv[Any, Any, Any], timeout: float | str | None) -> None:
        self.envs: Any = envs
        mode = (envs.metadata or {}).get("autoreset_mode")
        if mode is None:
            raise ValueError(f"{envs} has no autoreset mode: metadata['autoreset_mode'] is missing.")
        self.mode = AutoresetMode(mode)
        capabilities = capabilities_of(envs)
        if timeout == "auto":  # without a timeout, an engine applies its own step_timeout
            timeout = _DEFAULT_TIMEOUT_SECONDS if capabilities is None or _own_timeout(envs) is None else None
        assert not isinstance(timeout, str)
        self.timeout = timeout
        self._is_async = hasattr(envs, "step_async") and not isinstance(envs, VectorWrapper)
        # EnvPool's batches have a fixed size; then it has no `reset_mask` either
        can_step_some = capabilities is not None and capabilities.first_ready and capabilities.reset_mask
        self._can_step_some = self._is_async and can_step_some
        inner = capabilities_of(envs.unwrapped)
        self.masked_seeds = inner is None or inner.masked_seeds
        self._all_rows = np.arange(envs.num_envs)
        self._rows_are_agents = hasattr(envs.unwrapped, "padding_done")  # of a FlattenAgents
        self._ended = np.zeros(envs.num_envs, np.bool_)  # DISABLED: rows of `envs` that cannot be stepped until a reset
        self._pending: Callable[..., Any] | None = None  # the function that waits for the pending reply
        self._is_partial = False  # True if the pending request is about some rows only
        self._interruption: BaseException | None = None  # after it, Gymnasium's engine may return late results

    def reset(self, seeds: list[int] | None, mask: npt.NDArray[np.bool_] | None = None) -> tuple[Any, dict[str, Any]]:
        """Reset all rows, or those that ``mask`` selects."""
        options = None if mask is None else MaskOnlyOptions(reset_mask=mask)
        self._ended[... if mask is None else mask] = False
        if not self._is_async:
            reset = functools.partial(self.envs.reset, seed=seeds, options=options)
            return drop_pending_and_retry(self.envs, reset)  # type: ignore[no-any-return]
        self.drain()
        self._pending = self.envs.reset_wait  # first, so that an exception between the two loses nothing
        self.envs.reset_async(seed=seeds, options=options)
        return self._wait()  # type: ignore[no-any-return]

    def begin(self, actions: Any, rows: Rows | None = None, row_actions: Any = None) -> None:
        """Begin a step of all rows, or of ``rows`` with ``row_actions``; the others have ended."""
        self._is_partial = rows is not None and self._can_step_some
        if rows is not None and not self._is_partial and self._ended.any():
            self.reset(None, self._ended.copy())
        if not self._is_async:
            self._pending = functools.partial(self.envs.step, actions)
            return
        self._require_in_sync()
        if rows is not None and self._is_partial:
            self._pending = functools.partial(self.envs.recv, count=len(rows))
            self.envs.send(row_actions, rows)
        else:
            self._pending = self.envs.step_wait
            self.envs.step_async(actions)

    def finish(self) -> tuple[Rows, Stepped]:
        """Wait for the step that :meth:`begin` began; return its rows (all, if the env cannot step some) and its results."""
        stepped: Stepped = self._wait()
        if self._is_partial:
            return np.asarray(stepped[4]["env_id"], np.intp), stepped
        if self.mode is AutoresetMode.DISABLED:
            self._ended = stepped[4]["env_done"] if self._rows_are_agents else stepped[2] | stepped[3]
        return self._all_rows, stepped

    def drain(self) -> None:
        """Wait for a pending reply and discard it."""
        self._require_in_sync()
        if self._pending is not None and self._is_async:
            with watched_handlers():
                try:
                    self._wait()
                except multiprocessing.TimeoutError:
                    raise
                except Exception as error:  # this result is not needed; if the failure persists, the next reset raises
                    if raised_by_handler(error):
                        raise
        self._pending = None

    def _wait(self) -> Any:
        """Wait for the reply. After an exception, :meth:`drain` waits for it, if it is still pending."""
        assert self._pending is not None
        try:
            results = self._pending(timeout=self.timeout) if self._is_async else self._pending()
        except (multiprocessing.TimeoutError, KeyboardInterrupt) as error:
            if isinstance(self.envs, GymnasiumAsync) and capabilities_of(self.envs) is None:
                self._interruption = error  # Gymnasium would return the late reply from the next call
            elif isinstance(error, StepTimeout) and error.envs:
                error.add_note("With a bridge: call bridge.envs.abandon(error.envs), then bridge.reset(key).")
            raise
        self._pending = None
        return results

    def _require_in_sync(self) -> None:
        if self._interruption is not None:
            name = type(self._interruption).__name__
            raise RuntimeError(
                f"Gymnasium's {type(self.envs).__name__} may return late results after a {name}: close it and build "
                "another, or use vecenv.AsyncVectorEnv."
            ) from self._interruption


def _own_timeout(envs: VectorEnv[Any, Any, Any]) -> float | None:
    """Return the seconds after which a vector env itself treats a step as hanging; ``None``: never."""
    with contextlib.suppress(NotImplementedError):  # from a backend without a timeout
        return getattr(envs, "step_timeout", None)
    return None


class InfoColumn(NamedTuple):
    """One number or array that an environment may report, by its path in the info dict."""

    path: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: np.dtype[Any]

    @property
    def name(self) -> str:
        return "info" + "".join(f"[{key!r}]" for key in self.path)


class InfoColumns:
    """The columns of an info specification: infos in a fixed structure, which compiled programs need.

    Environments may report any infos at any time. Each key with a shape or a dtype becomes a column with a mask ``_key``, as
    in Gymnasium's infos. Unspecified keys are ignored.

    Args:
        spec: Key -> a nested dict, anything with ``shape`` and ``dtype`` (``jax.ShapeDtypeStruct``), or a dtype,
            which stands for a scalar.

    Raises:
        TypeError: Any other value, a dtype other than numbers and bools, or a key that is not a str.
        ValueError: A key that begins with an underscore, which marks masks.
    """

    def __init__(self, spec: Mapping[str, Any] | None) -> None:
        self.columns: list[InfoColumn] = []
        self._collect(spec or {}, ())

    def _collect(self, spec: Any, path: tuple[str, ...]) -> None:
        if isinstance(spec, Mapping):
            for key, part in spec.items():
                if not isinstance(key, str):
                    raise TypeError(f"Keys of info_spec must be str, got {key!r}.")
                if key.startswith("_"):
                    raise ValueError(f"info_spec[{key!r}]: keys that begin with an underscore are reserved for masks.")
                self._collect(part, (*path, key))
            return
        if not path:
            raise TypeError(f"info_spec must be a dict with names as keys, got {type(spec).__name__}.")
        is_dtype = isinstance(spec, type | str | np.dtype)  # scalar types also have attributes named shape and dtype
        try:
            shape, dtype = () if is_dtype else tuple(spec.shape), np.dtype(spec if is_dtype else spec.dtype)
        except (TypeError, AttributeError) as error:
            expected = "a dtype or something with shape and dtype"
            raise TypeError(f"info_spec{list(path)} must be {expected}, got {spec!r}.") from error
        if dtype.kind not in "biuf":
            raise TypeError(f"info_spec{list(path)} must be numbers or bools, got {dtype}.")
        self.columns.append(InfoColumn(path, shape, dtype))

    def build(self, arrays: Sequence[Any]) -> dict[str, Any]:
        """Return ``arrays``, alternately columns and masks, as a dict with the structure of the specification."""
        built: dict[str, Any] = {}
        for column, values, mask in zip(self.columns, arrays[::2], arrays[1::2], strict=True):
            level = built
            for key in column.path[:-1]:
                level = level.setdefault(key, {})
            level[column.path[-1]], level["_" + column.path[-1]] = values, mask
        return built

    def read(self, infos: Mapping[str, Any], rows: int) -> list[Array]:
        """Return columns and masks of ``rows`` environments, alternately ``(rows, ...)`` and ``(rows,)``.

        In same-step mode, infos of the end of an episode (``final_info``) take precedence over those of the beginning of the
        next, and over those that a vector wrapper added.

        Raises:
            ObservationError: A value has another shape than specified, its dtype cannot be cast as ``"same_kind"``, or it is
                no dict where one is specified.
            OverflowError: An integer does not fit the specified dtype.
        """
        arrays: list[Array] = []
        final = infos.get("final_info") or {}
        for column in self.columns:
            values, mask = np.zeros((rows, *column.shape), column.dtype), np.zeros(rows, np.bool_)
            _fill(column, infos, values, mask)
            _fill(column, final, values, mask)
            arrays += [values, mask]
        return arrays


def _fill(column: InfoColumn, infos: Mapping[str, Any], values: Array, mask: Array) -> None:
    """Write the values of a column that are in ``infos``, and set their mask."""
    present = np.ones(len(mask), np.bool_)
    for key in column.path[:-1]:
        present &= infos.get(f"_{key}", True)  # Gymnasium's vector wrappers add a mask for the outermost key only
        infos = infos.get(key, {})
        if not isinstance(infos, Mapping):
            raise ObservationError(f"{column.name}: got {type(infos).__name__} at {key!r}, expected a dict.")
    *_, key = column.path
    if key not in infos:
        return
    reported = np.asarray(infos[key])
    cast: Callable[[Array], Array] = np.asarray  # NumPy rounds floats, but would wrap integers
    if column.dtype.kind in "iu":
        cast = functools.partial(_cast, dtype=column.dtype)
    present &= infos.get(f"_{key}", True)
    if reported.dtype != object and reported.shape == values.shape and _fits(reported, column):
        values[present] = cast(reported[present])
        mask |= present
        return
    for row in np.flatnonzero(present).tolist():
        value = np.asarray(reported[row] if reported.ndim else reported)
        if value.shape != column.shape or not _fits(value, column):
            raise ObservationError(
                f"{column.name} of env {row}: got {value.dtype}{list(value.shape)}, the info_spec has "
                f"{column.dtype}{list(column.shape)}."
            )
        values[row], mask[row] = cast(value), True


def _fits(values: Array, column: InfoColumn) -> bool:
    return np.can_cast(values.dtype, column.dtype, "same_kind")
