"""Calls a policy for the ready environments, with the optional arguments that its signature names.

The signature is read before anything runs, so an unknown required parameter is an immediate error. Batches of observations
and actions are split and joined according to their spaces; states of recurrent policies are trees of arrays.
"""

from __future__ import annotations

import contextlib
import inspect
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final

import numpy as np
from gymnasium import Space, spaces

from vecenv.evaluating.episodes import Attempt, Episode
from vecenv.link.messages import note_once

ARRAYS: Final = ("numpy", "torch", "jax")
BATCHES: Final = ("ready", "padded", "single")
_ATTEMPT_ARGUMENTS: Final[dict[str, Callable[[Sequence[Attempt]], Any]]] = {
    "rows": lambda attempts: np.array([attempt.row for attempt in attempts], np.intp),
    "begins": lambda attempts: np.array([attempt.begins for attempt in attempts], np.bool_),
    "episodes": lambda attempts: np.array([attempt.index for attempt in attempts], np.intp),
    "rngs": lambda attempts: [attempt.rng for attempt in attempts],
}
_DTYPE_NOTE: Final = (
    "a torch module receives tensors of the observation space's dtype: for a float32 network on float64 observations pass"
    " `lambda o: policy(o.float())` with arrays='torch'"
)
_OPTIONAL_ARGUMENTS: Final = (*_ATTEMPT_ARGUMENTS, "infos", "state")


class PolicyCaller:
    """A callable that calls a policy with observations, and with the optional arguments for which it has parameters.

    Args:
        policy: The policy, a callable or a torch module.
        envs: The vector environment.
        arrays: The library of observations: ``"numpy"``, ``"torch"`` or ``"jax"``; ``None``: tensors for a torch module,
            unchanged observations for other policies.
        device: The device of tensors.
        batch: ``"ready"``, ``"padded"`` or ``"single"``; see :func:`vecenv.evaluate`.
        initial_state: The state at the beginning of one episode, for a policy with a parameter ``state``.

    Raises:
        TypeError, ValueError: An argument is invalid, or the policy requires an unknown parameter.
    """

    def __init__(self, policy: Any, envs: Any, *, arrays: str | None, device: Any, batch: str, initial_state: Any) -> None:
        if not callable(policy):
            raise TypeError(f"policy must be callable, as policy(observations) -> actions; got {policy!r}")
        if batch not in BATCHES:
            raise ValueError(f"batch must be one of {BATCHES}, got {batch!r}")
        if arrays is not None and arrays not in ARRAYS:
            raise ValueError(f"arrays must be one of {ARRAYS} or None, got {arrays!r}")
        self._is_module = module = _is_module(policy)
        self._parameters = _optional_parameters(policy.forward if module else policy)
        if ("state" in self._parameters) != (initial_state is not None):
            if initial_state is None:
                raise TypeError("a policy with a parameter `state` needs initial_state=, the first state of one episode")
            raise TypeError("initial_state= needs a policy with a parameter `state`")
        self._policy: Callable[..., Any] = policy
        self._observation_space, self._action_space = envs.single_observation_space, envs.single_action_space
        self._num_envs = envs.num_envs
        if module and device is None:
            device = next((parameter.device for parameter in policy.parameters()), None)
        self._convert, self._context = _make_conversion(arrays or ("torch" if module else None), device)
        self._batch = batch
        self._initial_state = initial_state
        self._states: list[Any] = [initial_state] * self._num_envs

    def __call__(self, observations: Any, attempts: Sequence[Attempt], infos: Sequence[Any]) -> Any:
        """Return one action per attempt, in the same order. Arrays of torch and JAX become numpy arrays.

        Args:
            observations: One row per attempt.
            attempts: The attempts, in the order of the rows.
            infos: The latest info of each attempt; only read if :attr:`takes_infos`.

        Raises:
            ValueError, TypeError: The policy did not return one action per row.
        """
        if self._batch != "single":
            actions = self._call_policy(observations, attempts, infos)
        else:
            space, single_actions = self._observation_space, []
            for index, attempt in enumerate(attempts):
                row = take_rows(space, observations, [index])
                action = self._call_policy(row, [attempt], infos[index : index + 1])
                # a copy, because the policy may return the same array at each call
                single_actions.append(take_rows(self._action_space, action, [0]))
            actions = join_rows(self._action_space, single_actions)
        for attempt in attempts:
            attempt.begins = False
        return actions

    @property
    def takes_infos(self) -> bool:
        """True if the policy has a parameter ``infos``."""
        return "infos" in self._parameters

    def _call_policy(self, observations: Any, attempts: Sequence[Attempt], infos: Sequence[Any]) -> Any:
        count, parameters = len(attempts), self._parameters
        if padding := self._num_envs - count if self._batch == "padded" else 0:
            observations = take_rows(self._observation_space, observations, [*range(count), *[0] * padding])
            padding_attempts = [Attempt(Episode(), -1, self._num_envs, np.random.default_rng(0)) for _ in range(padding)]
            attempts, infos = [*attempts, *padding_attempts], [*infos, *({} for _ in range(padding))]
        arguments: dict[str, Any] = {name: get(attempts) for name, get in _ATTEMPT_ARGUMENTS.items() if name in parameters}
        if "infos" in parameters:
            arguments["infos"] = list(infos)
        if "state" in parameters:
            states = [self._initial_state if attempt.begins else self._states[attempt.row] for attempt in attempts]
            arguments["state"] = map_leaves(_stack, *states)
        with self._context():
            try:
                actions = self._policy(self._convert(observations), **arguments)
            except RuntimeError as error:
                if self._is_module and "dtype" in str(error):
                    note_once(error, _DTYPE_NOTE)
                raise
        if "state" in parameters:
            actions = self._store_states(actions, attempts[:count])
        return self._check_actions(to_numpy(actions), count + padding, count)

    def _store_states(self, returned: Any, attempts: Sequence[Attempt]) -> Any:
        """Store copies of the states that a recurrent policy returned, and return its actions.

        The policy may return the same arrays at each call, for other rows.
        """
        if not isinstance(returned, tuple) or len(returned) != 2:
            raise TypeError(f"a policy with a parameter `state` must return (actions, state), got {type(returned).__name__}")
        for position, attempt in enumerate(attempts):
            self._states[attempt.row] = map_leaves(partial(_copy_row, position), returned[1])
        return returned[0]

    def _check_actions(self, actions: Any, expected: int, count: int) -> Any:
        """Return the first ``count`` of ``expected`` actions; raise if there are more or fewer."""
        space = self._action_space
        try:
            found = count_rows(space, actions)
        except (TypeError, KeyError, IndexError) as error:
            raise TypeError(
                f"the policy received {expected} observations and did not return a batch of {expected} actions of {space}: "
                f"{actions!r}; nothing was sent"
            ) from error
        if found - {expected}:
            raise ValueError(
                f"the policy received {expected} observations and returned {min(found - {expected})} actions; "
                "nothing was sent"
            )
        return actions if expected == count else take_rows(space, actions, range(count))


def _is_module(policy: Any) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(policy, torch.nn.Module)


def _optional_parameters(policy: Any) -> frozenset[str]:
    """Return the names of a policy's parameters that are in ``_OPTIONAL_ARGUMENTS`` and can be passed by name.

    Raises:
        TypeError: The policy has no parameter for the observations, or requires another that cannot be passed.
    """
    try:
        parameters = list(inspect.signature(policy).parameters.values())
    except (TypeError, ValueError):  # a function written in C
        return frozenset()
    positional = [each for each in parameters if each.kind in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD)]
    if not positional and not any(each.kind is each.VAR_POSITIONAL for each in parameters):
        raise TypeError(f"policy must take the observations as its first argument: {policy!r}")
    variadic = inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD
    named = [each for each in parameters if each not in positional[:1] and each.kind not in variadic]
    for each in named:
        if each.default is each.empty and (each.name not in _OPTIONAL_ARGUMENTS or each.kind is each.POSITIONAL_ONLY):
            raise TypeError(
                f"evaluate cannot pass the policy's parameter {each.name!r}: besides the observations, it passes only "
                f"these, by name: {', '.join(_OPTIONAL_ARGUMENTS)}"
            )
    by_name = [each.name for each in named if each.kind is not each.POSITIONAL_ONLY]
    return frozenset(name for name in by_name if name in _OPTIONAL_ARGUMENTS)


def _make_conversion(arrays: str | None, device: Any) -> tuple[Callable[[Any], Any], Callable[[], Any]]:
    """Return a function that converts observations, and the context in which to call the policy."""
    if arrays == "torch":
        import torch

        to_tensor = _except_text(partial(torch.as_tensor, device=device))
        return lambda batch: map_leaves(to_tensor, to_numpy(batch)), torch.no_grad
    if arrays == "jax":
        import jax.numpy

        return partial(map_leaves, _except_text(jax.numpy.asarray)), contextlib.nullcontext
    return to_numpy if arrays == "numpy" else lambda batch: batch, contextlib.nullcontext


def _except_text(convert: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Return a conversion of leaves that leaves strings unchanged: torch and JAX have no arrays of text."""
    return lambda leaf: leaf if isinstance(leaf, str) else convert(leaf)


def map_parts(function: Callable[..., Any], space: Space[Any], *batches: Any) -> Any:
    """Apply a function to batches of a space, once for each part of the space that is neither Dict nor Tuple."""
    if isinstance(space, spaces.Dict):
        return {key: map_parts(function, part, *(batch[key] for batch in batches)) for key, part in space.spaces.items()}
    if isinstance(space, spaces.Tuple):
        return tuple(map_parts(function, part, *(batch[i] for batch in batches)) for i, part in enumerate(space.spaces))
    return function(*batches)


def take_rows(space: Space[Any], batch: Any, positions: Sequence[int]) -> Any:
    """Select rows of a batch of a space, in the same structure."""

    def take(part: Any) -> Any:
        if isinstance(part, tuple | list):
            return tuple(part[position] for position in positions)
        return part[np.asarray(positions, np.intp)]

    return map_parts(take, space, batch)


def join_rows(space: Space[Any], batches: Sequence[Any]) -> Any:
    """Concatenate batches of a space."""

    def join(*parts: Any) -> Any:
        if all(hasattr(part, "shape") for part in parts):
            return _array_module(parts[0]).concatenate(parts)
        return tuple(item for part in parts for item in part)

    return map_parts(join, space, *batches)


def count_rows(space: Space[Any], batch: Any) -> set[int]:
    """Return the numbers of rows of all parts of a batch, as a set; in a valid batch they are equal.

    Raises:
        TypeError, KeyError, IndexError: ``batch`` is not a batch of the space, or lacks a part.
    """
    found: set[int] = set()
    map_parts(lambda part: found.add(len(part)), space, batch)
    return found


def to_numpy(batch: Any) -> Any:
    """Convert the torch and JAX arrays in a tree to numpy; other leaves stay unchanged."""

    def convert(leaf: Any) -> Any:
        if hasattr(leaf, "detach"):
            tensor = leaf.detach().cpu()
            return (tensor.float() if str(tensor.dtype) == "torch.bfloat16" else tensor).numpy()  # NumPy has no bfloat16
        return np.asarray(leaf) if hasattr(leaf, "__array__") and not isinstance(leaf, np.generic) else leaf

    return map_leaves(convert, batch)


def map_leaves(function: Callable[..., Any], tree: Any, *others: Any) -> Any:
    """Apply a function to the leaves of trees of dicts, lists, tuples and ``None`` with the same structure."""
    if tree is None:
        return None
    if isinstance(tree, dict):
        return {key: map_leaves(function, value, *(other[key] for other in others)) for key, value in tree.items()}
    if isinstance(tree, tuple | list):
        parts = [map_leaves(function, *each) for each in zip(tree, *others, strict=True)]
        return type(tree)(*parts) if hasattr(tree, "_fields") else type(tree)(parts)
    return function(tree, *others)


def _copy_row(position: int, leaf: Any) -> Any:
    """Return a copy of a row of an array."""
    row = leaf[position]
    return row.clone() if hasattr(row, "clone") else row.copy() if isinstance(row, np.ndarray) else row


def _stack(*leaves: Any) -> Any:
    """Stack leaves along a new first axis."""
    tensor = next((leaf for leaf in leaves if hasattr(leaf, "detach")), None)
    if tensor is None:
        return _array_module(leaves[0]).stack(leaves)
    import torch

    # the policy returned tensors, but the state of an episode that begins may be a NumPy array
    return torch.stack([torch.as_tensor(leaf, device=tensor.device) for leaf in leaves])


def _array_module(leaf: Any) -> Any:
    """Return the module with the functions for an array: ``torch``, ``jax.numpy`` or ``numpy``."""
    if hasattr(leaf, "detach"):
        import torch

        return torch
    if type(leaf).__module__.partition(".")[0] in ("jax", "jaxlib"):
        import jax.numpy

        return jax.numpy
    return np
