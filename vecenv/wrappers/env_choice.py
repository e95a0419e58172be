"""An environment that switches between several others when it is reset."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Any, Final

import gymnasium
import numpy as np

from vecenv.errors import SnapshotMismatch, suggest_names
from vecenv.state.capture import capture_state, prepare_restore
from vecenv.state.snapshots import describe_kind

__all__ = ["ChosenEnv", "EnvChoice"]

_SHARED_ATTRIBUTES: Final = ("observation_space", "action_space", "metadata", "render_mode")

EnvFactory = Callable[..., gymnasium.Env[Any, Any]]


class EnvChoice:
    """An ``env_fn`` for an environment that switches between several others when it is reset.

    ``reset(options={"env": name})`` builds the environment of that name, or reuses it, and resets it with the other options.
    Without the option ``"env"``, the current environment is reset; at the start, that is the first of ``factories``. All
    environments must have the spaces of the first, which is built to read them. Methods and attributes are those of the
    current environment.

    Args:
        factories: Name -> function that builds the environment. It gets the arguments of the call, as in
            ``make_vec(EnvChoice(...), render_mode="rgb_array")``.
        keep: The maximum number of environments that each :class:`ChosenEnv` keeps open, at least 1. Before another one is
            built, the least recently used one is closed.

    Raises:
        TypeError: ``factories`` is not a dict of functions by name, or ``keep`` is not an integer.
        ValueError: There are no factories, or ``keep`` is below 1.
    """

    def __init__(self, factories: Mapping[str, EnvFactory], keep: int = 1) -> None:
        if not isinstance(factories, Mapping):
            raise TypeError(f"EnvChoice: expected a dict of functions by name, got {factories!r}")
        if not factories:
            raise ValueError("EnvChoice: the dict of factories is empty")
        for name, factory in factories.items():
            if not isinstance(name, str) or not callable(factory):
                raise TypeError(f"EnvChoice: expected a dict of functions by name, got {name!r}: {factory!r}")
        if isinstance(keep, bool) or not isinstance(keep, int):
            raise TypeError(f"EnvChoice: keep must be a positive integer, got {keep!r}")
        if keep < 1:
            raise ValueError(f"EnvChoice: keep must be a positive integer, got {keep!r}")
        self.factories, self.keep = dict(factories), keep
        self._shared: dict[str, dict[str, Any]] = {}  # arguments of a call -> attributes of the environments built with them

    def __call__(self, **kwargs: Any) -> ChosenEnv:
        """Build an environment. The first call with given arguments builds the first of ``factories`` to read its spaces."""
        shared = self._shared.get(repr(kwargs), {})
        env = ChosenEnv(self.factories, self.keep, kwargs, shared)
        if not shared:
            self._shared[repr(kwargs)] = {name: copy.deepcopy(getattr(env, name)) for name in _SHARED_ATTRIBUTES}
        return env

    def __repr__(self) -> str:
        return f"EnvChoice({len(self.factories)} environments, keep={self.keep})"


class ChosenEnv(gymnasium.Env[Any, Any]):
    """The environment that :class:`EnvChoice` builds.

    Attributes:
        env_choices: The names of the environments, in the order of ``factories``.
        env_name: The name of the current one.
    """

    def __init__(
        self, factories: dict[str, EnvFactory], keep: int, kwargs: dict[str, Any], shared: Mapping[str, Any]
    ) -> None:
        self.env_choices = tuple(factories)
        self.env_name = self.env_choices[0]
        self._factories, self._keep, self._kwargs = factories, keep, kwargs
        # in a dict: as attributes, these environments would be saved in snapshots as well
        self._open: dict[str, gymnasium.Env[Any, Any]] = {}  # the least recently used first
        if not shared:
            first = self._open[self.env_name] = factories[self.env_name](**kwargs)
            shared = {name: getattr(first, name) for name in _SHARED_ATTRIBUTES}
        for name, value in shared.items():
            setattr(self, name, copy.deepcopy(value))

    @property
    def current(self) -> gymnasium.Env[Any, Any]:
        """The current environment; it is built if it is not open."""
        return self._open[self.env_name] if self.env_name in self._open else self._choose(self.env_name)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Choose the environment named by ``options["env"]``, and reset it with the other options.

        Without a seed, the current environment's generator, if it was seeded, seeds another one, so that one seed determines
        all episodes.

        Raises:
            ValueError: There is no environment of that name, or its spaces differ from those of the first one.
        """
        other_options = dict(options or {})
        name = other_options.pop("env", self.env_name)
        if seed is None and name != self.env_name and name in self.env_choices and self.env_name in self._open:
            # not `np_random`, which creates a generator with a random seed, if there is none
            generator = getattr(self._open[self.env_name].unwrapped, "_np_random", None)
            if isinstance(generator, np.random.Generator):
                seed = int.from_bytes(generator.bytes(4), "little") >> 1
        env = self._choose(name)
        return env.reset(seed=seed, options=other_options or None)

    def step(self, action: Any) -> Any:
        return self.current.step(action)

    def render(self) -> Any:
        return self.current.render()

    def close(self) -> None:
        with ExitStack() as stack:  # closes the others even if one raises
            for env in self._open.values():
                stack.callback(env.close)
            self._open.clear()

    def _choose(self, name: str) -> gymnasium.Env[Any, Any]:
        """Make an environment the current one, and build it if it is not open."""
        if name not in self.env_choices:
            raise ValueError(f"EnvChoice: there is no environment {name!r}{suggest_names(name, self.env_choices)}")
        env = self._open.pop(name, None)
        if env is None:
            while len(self._open) >= self._keep:
                self._open.pop(next(iter(self._open))).close()
            env = self._factories[name](**self._kwargs)
            try:
                self._require_same_spaces(name, env)
            except ValueError:
                env.close()
                raise
        self._open[name] = env
        self.env_name = name
        return env

    def _require_same_spaces(self, name: str, env: gymnasium.Env[Any, Any]) -> None:
        """Raise if the spaces of an environment differ from those of the first one."""
        for kind in ("observation_space", "action_space"):
            space, expected = getattr(env, kind), getattr(self, kind)
            if space != expected:
                first = self.env_choices[0]
                raise ValueError(f"EnvChoice: the {kind} of {name!r} is {space}, that of {first!r} is {expected}")

    # -- the attributes of the current environment --------------------------------------------------------------------

    def get_wrapper_attr(self, name: str) -> Any:
        is_own = name not in ("spec", "metadata") and hasattr(self, name)
        return getattr(self, name) if is_own else self.current.get_wrapper_attr(name)

    def has_wrapper_attr(self, name: str) -> bool:
        return hasattr(self, name) or self.current.has_wrapper_attr(name)

    def set_wrapper_attr(self, name: str, value: Any, *, force: bool = True) -> bool:
        """Set an attribute of the current environment only."""
        return self.current.set_wrapper_attr(name, value, force=force)

    @property
    def np_random(self) -> Any:
        return self.current.np_random

    @np_random.setter
    def np_random(self, generator: Any) -> None:
        self.current.np_random = generator

    @property
    def np_random_seed(self) -> Any:
        return self.current.np_random_seed

    # -- snapshots ----------------------------------------------------------------------------------------------------

    def take_snapshot(self) -> Any:
        """Return the name, the kind and the state of the current environment."""
        env = self.current
        return self.env_name, describe_kind(env), capture_state(env)

    def check_snapshot(self, state: Any) -> None:
        """Raise ``SnapshotMismatch`` if no environment has this name, or if it is open and the state does not fit."""
        name, _, _ = state
        if name not in self._factories:
            raise SnapshotMismatch(f"it was saved in {name!r}, which this EnvChoice does not offer")
        if name in self._open:
            _prepare_restore(self._open[name], state)

    def restore_snapshot(self, state: Any) -> None:
        """Continue from a state that :meth:`take_snapshot` returned, after :meth:`check_snapshot`.

        Raises:
            SnapshotMismatch: The state does not fit.
            ValueError: The environment had to be built, and its spaces differ from those of the first one.
        """
        _prepare_restore(self._choose(state[0]), state)()


def _prepare_restore(env: gymnasium.Env[Any, Any], state: Any) -> Callable[[], None]:
    """Return a function that restores a state of :meth:`ChosenEnv.take_snapshot`, or raise ``SnapshotMismatch``."""
    _, kind, body = state
    if difference := kind.differs_from(describe_kind(env)):
        raise SnapshotMismatch(difference)
    return prepare_restore(env, body)
