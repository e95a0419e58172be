"""Assertions that values and trajectories are the same, bit for bit.

They do not use ``assert``, which ``python -O`` removes, because vecenv itself uses them to verify snapshots.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from gymnasium.spaces import GraphInstance
from gymnasium.vector import AutoresetMode, VectorEnv

__all__ = ["STEP_FIELDS", "AnyVectorEnv", "Step", "assert_identical", "assert_same_steps", "assert_same_trajectory", "reset"]

AnyVectorEnv = VectorEnv[Any, Any, Any]
Step = tuple[Any, npt.NDArray[np.float64], npt.NDArray[np.bool_], npt.NDArray[np.bool_], dict[str, Any]]
STEP_FIELDS: Final = ("observations", "rewards", "terminations", "truncations", "infos")


def assert_identical(actual: Any, expected: Any, where: str = "value") -> None:
    """Assert that two nested values are the same, bit for bit.

    Arrays, including those of JAX and torch, must agree in dtype, shape and bytes (so that ``nan`` equals ``nan`` and
    ``-0.0`` differs from ``0.0``), object arrays entry by entry, containers in type, length and keys (in any order),
    anything else in type and value (a Python ``nan`` equals ``nan``, and ``-0.0`` equals ``0.0``).

    Args:
        actual: Arrays, NumPy or Python scalars, strings, or dicts, tuples, lists and deques of them.
        expected: The reference value.
        where: Name of the value in the message of the ``AssertionError``.
    """
    _require_equal(type(actual), type(expected), where, "type")
    if isinstance(expected, GraphInstance):
        for field in ("nodes", "edges", "edge_links"):
            assert_identical(getattr(actual, field), getattr(expected, field), f"{where}.{field}")
    elif isinstance(expected, Mapping):
        if set(actual) != set(expected):
            raise AssertionError(f"{where}: keys {list(actual)}, expected {list(expected)}")
        for key, value in expected.items():
            assert_identical(actual[key], value, f"{where}[{key!r}]")
    elif isinstance(expected, tuple | list | deque):
        _require_equal(len(actual), len(expected), where, "length")
        for index, value in enumerate(expected):
            assert_identical(actual[index], value, f"{where}[{index}]")
    elif isinstance(expected, np.ndarray):
        _require_equal(actual.dtype, expected.dtype, where, "dtype")
        _require_equal(actual.shape, expected.shape, where, "shape")
        if expected.dtype.hasobject:
            for position in np.ndindex(expected.shape):
                at = ", ".join(map(str, position))
                assert_identical(actual[position], expected[position], f"{where}[{at}]")
        elif value_bytes(actual) != value_bytes(expected):
            raise AssertionError(f"{where}: got\n{actual!r}\nexpected\n{expected!r}")
    elif isinstance(expected, np.generic):
        _require_equal(actual.dtype, expected.dtype, where, "dtype")
        if value_bytes(actual) != value_bytes(expected):
            raise AssertionError(f"{where}: {actual!r}, expected {expected!r}")
    elif hasattr(expected, "detach"):  # torch tensors
        _require_equal(actual.dtype, expected.dtype, where, "dtype")
        assert_identical(_tensor_to_array(actual), _tensor_to_array(expected), where)
    elif hasattr(expected, "__array__"):  # JAX arrays
        assert_identical(np.asarray(actual), np.asarray(expected), where)
    elif not (actual == expected or (isinstance(expected, float) and actual != actual and expected != expected)):
        raise AssertionError(f"{where}: {actual!r}, expected {expected!r}")


def _require_equal(actual: Any, expected: Any, where: str, kind: str) -> None:
    if actual != expected:
        raise AssertionError(f"{where}: {kind} {actual}, expected {expected}")


def _tensor_to_array(tensor: Any) -> npt.NDArray[Any]:
    tensor = tensor.detach().cpu()
    return np.asarray(tensor.float() if str(tensor.dtype) == "torch.bfloat16" else tensor)


def value_bytes(array: npt.NDArray[Any] | np.generic) -> bytes:
    """Return the bytes of the values, without the padding of an 80-bit long double, which is arbitrary."""
    if array.dtype.char in "gG" and np.finfo(np.longdouble).nmant == 63:
        parts = np.ascontiguousarray(array).view(np.uint8).reshape(-1, np.dtype(np.longdouble).itemsize)
        return parts[:, :10].tobytes()
    return array.tobytes()


def assert_same_trajectory(
    actual: AnyVectorEnv,
    expected: AnyVectorEnv,
    steps: int,
    *,
    seed: int | Sequence[int | None] | None = 0,
    action_seed: int = 0,
) -> None:
    """Assert that two vector environments produce the same trajectory, bit for bit.

    Both are reset with ``seed`` and stepped ``steps`` times with the same random actions. Under ``AutoresetMode.DISABLED``,
    the environments that ended are reset with ``options["reset_mask"]`` before the next step.

    Args:
        actual: The vector environment to check, with the same autoreset mode. Its observations may be views of changing
            memory, because they are compared before the next call.
        expected: The reference, usually a :class:`gymnasium.vector.SyncVectorEnv` over the same environments.
        steps: Number of steps.
        seed: Seed of the first reset, as for ``VectorEnv.reset``.
        action_seed: Seed of the actions.
    """
    action_space = copy.deepcopy(expected.action_space)
    action_space.seed(action_seed)
    _require_equal(actual.metadata["autoreset_mode"], expected.metadata["autoreset_mode"], "metadata", "autoreset mode")
    assert_identical(reset(actual, seed), reset(expected, seed), "reset")
    assert_same_steps(actual, expected, steps, action_space.sample)


def assert_same_steps(actual: AnyVectorEnv, expected: AnyVectorEnv, steps: int, sample: Callable[[], Any]) -> None:
    """Assert that the next steps are the same, with actions from ``sample``; see :func:`assert_same_trajectory`."""
    disabled = expected.metadata["autoreset_mode"] is AutoresetMode.DISABLED
    for t in range(steps):
        actions = sample()
        actual_step, expected_step = actual.step(actions), expected.step(copy.deepcopy(actions))
        for name, actual_value, expected_value in zip(STEP_FIELDS, actual_step, expected_step, strict=True):
            assert_identical(actual_value, expected_value, f"step {t}: {name}")
        dones = expected_step[2] | expected_step[3]
        if disabled and dones.any():
            actual_reset = actual.reset(options={"reset_mask": dones.copy()})
            expected_reset = expected.reset(options={"reset_mask": dones.copy()})
            assert_identical(actual_reset, expected_reset, f"masked reset after step {t}")


def reset(envs: AnyVectorEnv, seed: Any = None) -> Any:
    """Reset with any seed that Gymnasium accepts; the annotation of ``VectorEnv.reset`` allows only an int or ``None``."""
    return envs.reset(seed=seed)
