"""Access to the single environments of a vector environment, for libraries that use them one by one.

Workers import this module to run its functions on their environments, so it must import none of these libraries.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterable
from operator import methodcaller
from typing import Any

from gymnasium import Env
from gymnasium.error import AlreadyPendingCallError
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.wrappers.vector import NormalizeObservation

from vecenv.errors import envs_text
from vecenv.front.capabilities import capabilities_of, raise_unsupported, wrappers_around
from vecenv.front.driver import drop_pending_and_retry
from vecenv.multi_agent.adapter import class_name, has_wrapper
from vecenv.multi_agent.views import FlattenAgents

AnyEnv = Env[Any, Any]
AnyVectorEnv = VectorEnv[Any, Any, Any]


def require_settings(envs: Any, client: str, modes: Collection[AutoresetMode], *, any_arrays: bool = False) -> AutoresetMode:
    """Return the autoreset mode, or raise for settings that would give a client wrong rows.

    With ``any_arrays``, JAX and torch arrays are also accepted.

    Raises:
        TypeError: ``envs`` is not a Gymnasium vector environment.
        ValueError: The autoreset mode is not in ``modes``, ``copy=False`` lets the next step overwrite observations,
            arrays are not NumPy arrays, or a wrapper or the engine has no masked resets, for clients that reset rows
            themselves.
    """
    if not isinstance(envs, VectorEnv):
        advice = "; use envs.flatten_agents()" if hasattr(envs, "flatten_agents") else ""
        text = f"{client} needs a Gymnasium vector environment, such as one from vecenv.make_vec, got {envs!r}"
        raise TypeError(text + advice)
    mode = envs.metadata.get("autoreset_mode")
    if mode not in modes:
        accepted = " or ".join(repr(each.value) for each in modes)
        raise ValueError(
            f"{client} needs autoreset_mode={accepted}, got {getattr(mode, 'value', mode)!r}: build the environments with "
            f"vecenv.make_vec(..., vector_kwargs={{'autoreset_mode': {next(iter(modes)).value!r}}})"
        )
    resets_rows = AutoresetMode.DISABLED in modes and envs.num_envs > 1
    if resets_rows and any(isinstance(wrapper, NormalizeObservation) for wrapper in wrappers_around(envs)):
        raise ValueError(
            f"{client} resets environments one by one, which NormalizeObservation refuses: remove it, and normalise with "
            f"{client} itself, or in each environment with gymnasium.wrappers.NormalizeObservation"
        )
    inner: Any = envs.unwrapped
    if resets_rows and mode is not AutoresetMode.SAME_STEP and not _has_masked_resets(inner):
        same_step = "autoreset_mode='SameStep', " if AutoresetMode.SAME_STEP in modes else ""
        raise ValueError(
            f"{client} resets environments as their episodes end, but {type(inner).__name__} has no resets with a "
            f"reset_mask: it needs {same_step}another backend or, with EnvPool, batch_size=None"
        )
    if getattr(inner, "copy", True) is False:
        raise ValueError(f"{client} needs copy=True: it keeps observations that copy=False would overwrite in the next step")
    target_library = _target_library(envs)
    if target_library and not (any_arrays or target_library == "numpy"):
        raise ValueError(f"{client} needs numpy arrays, but a wrapper converts them to {target_library}: remove the wrapper")
    if not target_library and not any_arrays and getattr(inner, "to", "numpy") != "numpy":
        raise ValueError(f"{client} needs to='numpy', got to={inner.to!r}")
    return AutoresetMode(mode)


def _has_masked_resets(base: Any) -> bool:
    """False if a vector environment without wrappers refuses a ``reset_mask`` or ignores it; True if that is unknown."""
    if (capabilities := capabilities_of(base)) is not None:
        return capabilities.reset_mask
    # Gymnasium's own, such as CartPoleVectorEnv, ignore masks
    return not any(each.__module__.startswith("gymnasium.envs.") for each in type(base).__mro__)


def require_row_steps(envs: AnyVectorEnv, purpose: str) -> None:
    """Raise ``ValueError`` if a vector environment has no ``recv``, and so cannot step single rows.

    Args:
        envs: The vector environment.
        purpose: The beginning of the error text, such as ``"wait_num steps single rows"``.
    """
    if hasattr(type(envs), "recv"):
        return
    inner = envs.unwrapped
    advice = str(inner) if hasattr(type(inner), "recv") else "a vector environment from vecenv.make_vec"
    raise ValueError(f"{purpose}, which {type(envs).__name__} cannot do: pass {advice}")


def send_alone(envs: Any, actions: Any, rows: Any) -> None:
    """Begin a step of some rows. The next ``recv`` returns their results, because no other rows may be in flight.

    Raises:
        AlreadyPendingCallError: Rows of an earlier step, which failed or was interrupted, are still in flight.
    """
    require_none_in_flight(envs, "step", rows)
    envs.send(actions, rows)


def require_none_in_flight(envs: Any, method: str, rows: Any) -> None:
    """Raise like :func:`send_alone`. Another step would return the results of these rows; a masked reset would drop them."""
    with contextlib.suppress(NotImplementedError):  # EnvPool reports only the number of rows; its environments do not fail
        if in_flight := getattr(envs, "in_flight", rows[:0]).tolist():
            raise AlreadyPendingCallError(
                f"Calling `{method}` for {envs_text(rows.tolist())} with {envs_text(in_flight)} still in flight after a "
                "step that failed or was interrupted: reset all environments.",
                "send",
            )


def reset_all(envs: Any, seed: Any = None, options: Any = None) -> tuple[Any, Any]:
    """Reset all environments, or those of a reset mask in ``options``, for a library that cannot receive a pending step.

    After a failure, a timeout or a Ctrl-C, the result of a step may still be pending. A reset that raises for this reason is
    repeated after that result was received and dropped.

    Raises:
        StepTimeout: The pending result is still not ready; it stays pending.
    """
    result: tuple[Any, Any] = drop_pending_and_retry(envs, lambda: envs.reset(seed=seed, options=options))
    return result


def agents_per_env(envs: AnyVectorEnv) -> int:
    """Return the number of rows per environment: the number of its agents in a ``FlattenAgents``, otherwise 1.

    With several, ``infos["env_done"]`` marks the rows of ended environments. An agent that ended before its environment
    has rows of padding, and cannot be reset alone.
    """
    inner = envs.unwrapped
    return inner.num_agents if isinstance(inner, FlattenAgents) else 1


def _target_library(envs: AnyVectorEnv) -> str:
    """Return the array library of the outermost of Gymnasium's converting wrappers, or ``""`` if there is none."""
    for wrapper in wrappers_around(envs):
        if (target := getattr(wrapper, "_target_xp", None)) is not None:
            return str(target.__name__).rpartition("compat.")[2]
    return ""


class SingleEnvs:
    """The environments of a vector environment, accessed by index, in any process.

    Some environments are not accessible: those that are not Python objects (EnvPool's, JAX-native ones), and those of vector
    environments without vecenv's capabilities. They count as unwrapped. Their only attributes are those that the vector
    environment has for all: ``render_mode``, ``spec``, ``metadata``, ``action_space`` and ``observation_space``.
    """

    def __init__(self, envs: AnyVectorEnv) -> None:
        self._num_envs = envs.num_envs
        self._inner: Any = envs.unwrapped
        capabilities = capabilities_of(self._inner)
        self._are_accessible = capabilities is not None and capabilities.attributes
        self._shared_attributes = {
            "render_mode": envs.render_mode,
            "spec": envs.spec,
            "metadata": envs.metadata,
            "action_space": envs.single_action_space,
            "observation_space": envs.single_observation_space,
        }

    def get(self, name: str, rows: Iterable[int]) -> list[Any]:
        """Return an attribute of each row's environment, from the outermost wrapper that has it.

        Raises:
            AttributeError: An environment has no such attribute.
        """
        if not self._are_accessible and name in self._shared_attributes:
            return [self._shared_attributes[name] for _ in rows]
        return self._run(name, methodcaller("get_wrapper_attr", name), rows)

    def set(self, name: str, value: Any, rows: Iterable[int]) -> None:
        """Set an attribute where it exists, or on the outermost wrapper if it does not exist."""
        if not hasattr(self._inner, "spares"):
            self._run(name, methodcaller("set_wrapper_attr", name, value), rows)
        elif len(set(self._parse_rows(rows))) == self._num_envs:
            self._inner.set_attr(name, value)  # in spares too
        else:
            reason = "with spare workers, any environment may run the episodes of any row"
            raise_unsupported(self._inner, "set an attribute in some rows", reason)

    def call(self, name: str, rows: Iterable[int], *args: Any, **kwargs: Any) -> list[Any]:
        """Call a method of each row's environment, on the outermost wrapper that has it.

        Raises:
            AttributeError: An environment has no such method.
            Exception: Raised by the method.
        """
        return self._run(name, _call, rows, name, args, kwargs)

    def is_wrapped(self, wrapper: type[Any], rows: Iterable[int]) -> list[bool]:
        """Return a bool per row: True if its environment has a wrapper of this class or a subclass."""
        if not self._are_accessible:
            return [False for _ in rows]
        return self._run("", has_wrapper, rows, class_name(wrapper))

    def _run(self, name: str, function: Callable[..., Any], rows: Iterable[int], *args: Any) -> list[Any]:
        """Run a function on some environments; ``name`` is the attribute that it uses, for the error text."""
        if isinstance(self._inner, FlattenAgents):
            raise AttributeError(
                f"rows are agents and have no attribute {name!r}: use call(), get_attr() or set_attr() of the "
                "MultiAgentVecEnv, which reach its environments"
            )
        if capabilities_of(self._inner) is None:
            raise AttributeError(
                f"{type(self._inner).__name__} does not give access to single environments, so {name!r} cannot be used: "
                "build the environments with vecenv.make_vec or vecenv.AsyncVectorEnv"
            )
        if not self._are_accessible:
            raise AttributeError(
                f"the environments of {type(self._inner).__name__} are not Python objects: they have no attribute {name!r}"
            )
        indices = self._parse_rows(rows)
        if not indices:
            return []
        results = self._inner.exec_func(function, sorted(set(indices)), *args)
        return [results[index] for index in indices]

    def _parse_rows(self, rows: Iterable[int]) -> list[int]:
        rows, valid = list(rows), range(self._num_envs)
        try:
            return [valid[row] for row in rows]  # negative indices count from the end, as in a list
        except IndexError:
            raise IndexError(f"indices must be from {-len(valid)} to {len(valid) - 1}, got {rows}") from None


def _call(env: AnyEnv, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return env.get_wrapper_attr(name)(*args, **kwargs)
