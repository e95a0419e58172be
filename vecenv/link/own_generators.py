"""A wrapper that gives an environment its own states of the random generators that all code in a process shares."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import gymnasium

from vecenv.link.envs import build_env
from vecenv.system.generators import Generators, is_imported, switch


class OwnGenerators(gymnasium.Wrapper[Any, Any, Any, Any]):
    """A wrapper that runs an environment with its own states of the shared generators.

    ``get_wrapper_attr`` and ``set_wrapper_attr`` skip it, so they find only the environment's attributes.

    Args:
        env: The environment.
        generators: The states; ``None``: new ones.
    """

    def __init__(self, env: Any, generators: Generators | None = None) -> None:
        if isinstance(env, gymnasium.Env):
            super().__init__(env)
        else:  # an object with the methods of an environment
            self.env, self._cached_spec = env, None
            self._action_space = self._observation_space = self._metadata = None
        self._generators = generators or Generators()
        weakref.finalize(self, switch.uninstall, self._generators).atexit = False  # for an environment that is never closed
        switch.install(self._generators)

    def step(self, action: Any) -> Any:
        """Step the environment."""
        previous = switch.active
        try:  # `_run`, inlined to save 0.2 us
            switch.active = own = self._generators
            if switch.in_use or is_imported("torch"):
                switch.swap_in(own)
            return self.env.step(action)
        finally:
            switch.active = previous
            if switch.in_use and previous is not switch.skip_restoring:
                try:
                    switch.swap_in(previous)
                except BaseException:  # from a signal handler, which may have interrupted `swap_in`
                    switch.swap_in(previous)
                    raise

    def reset(self, **arguments: Any) -> Any:
        """Begin an episode of the generators (:meth:`Generators.begin`), and reset the environment."""
        self._generators.begin(arguments.get("seed"))
        return _run(self._generators, self.env.reset, **arguments)

    def render(self) -> Any:
        return _run(self._generators, self.env.render)

    def close(self) -> None:
        """Close the environment. Closing the last one gives the process its own generators back."""
        try:
            _run(self._generators, self.env.close)
        finally:
            switch.uninstall(self._generators)

    def run(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Call ``function(env, ...)`` with the wrapped environment."""
        return _run(self._generators, function, self.env, *args, **kwargs)

    def seed_generators(self, seed: int) -> None:
        """Seed the generators as a reset would, without resetting the environment."""
        self._generators.begin(seed)

    def get_wrapper_attr(self, name: str) -> Any:
        value = _run(self._generators, self.env.get_wrapper_attr, name)
        return functools.partial(_run, self._generators, value) if callable(value) else value

    def set_wrapper_attr(self, name: str, *args: Any, **kwargs: Any) -> Any:
        return _run(self._generators, self.env.set_wrapper_attr, name, *args, **kwargs)

    def has_wrapper_attr(self, name: str) -> bool:
        return self.env.has_wrapper_attr(name)

    @property
    def spec(self) -> Any:  # type: ignore[override]
        return self.env.spec

    def take_snapshot(self) -> dict[str, Any]:
        """Return the states of the generators, for a snapshot of the environment."""
        return self._generators.state()

    def restore_snapshot(self, state: dict[str, Any]) -> None:
        """Continue from the states that :meth:`take_snapshot` returned."""
        self._generators.load(state)


def with_own_generators(env_fns: Sequence[Callable[[], Any]]) -> list[Callable[[], Any]]:
    """Return functions that build the environments in :class:`OwnGenerators`. A repeated function is wrapped once."""
    wrapped = {id(env_fn): functools.partial(_build, env_fn) for env_fn in env_fns}
    return [wrapped[id(env_fn)] for env_fn in env_fns]


def _build(env_fn: Callable[[], Any]) -> Any:
    """Call ``env_fn`` with generator states of its own, and wrap its environment. Return any other result unchanged."""
    generators = Generators()
    try:
        switch.install(generators)
        env = _run(generators, env_fn)
        try:
            build_env(lambda: env, 0)
        except TypeError:
            switch.uninstall(generators)
            return env  # the worker will report that it is not an environment
        return OwnGenerators(env, generators)
    except BaseException:
        switch.uninstall(generators)
        raise


def run_with_own_generators(function: Callable[..., Any], env: Any, /, *args: Any, **kwargs: Any) -> Any:
    """Call ``function(env, ...)``, through :meth:`OwnGenerators.run` if ``env`` is wrapped."""
    return env.run(function, *args, **kwargs) if isinstance(env, OwnGenerators) else function(env, *args, **kwargs)


def _run(generators: Generators, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """Call a function with the states of ``generators`` in place."""
    previous = switch.active
    try:
        switch.active = generators
        switch.swap_in(generators)
        return function(*args, **kwargs)
    finally:
        switch.active = previous
        if previous is not switch.skip_restoring:
            try:
                switch.swap_in(previous)
            except BaseException:  # from a signal handler, which may have interrupted `swap_in`
                switch.swap_in(previous)
                raise
