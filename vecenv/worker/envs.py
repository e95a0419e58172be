"""Environments of some rows: built, checked, closed, and what stands in for ``step`` where one is not to be stepped."""

from __future__ import annotations

import contextlib
import os
import pickle
import re
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Final

import gymnasium
import numpy as np
from gymnasium.spaces.utils import is_space_dtype_shape_equiv

from vecenv.errors import EnvError, EnvFailed, ObservationError
from vecenv.link.messages import Failure, Outcome, dumps_by_value, summary
from vecenv.shm.layout import Array, Tree
from vecenv.system import generators

__all__ = ["Envs", "Expected"]


@dataclass(frozen=True, slots=True)
class Expected:
    """The spaces every environment must have; ``mode`` is the ``observation_mode`` of the vector environment."""

    mode: Any
    observation_space: gymnasium.Space[Any]
    action_space: gymnasium.Space[Any]

    def __reduce__(self) -> tuple[Any, ...]:
        """A spawned worker's environments have come by value, and so have to be the classes of their spaces."""
        return _expected, (dumps_by_value((self.mode, self.observation_space, self.action_space)),)

    def mismatch(self, env: gymnasium.Env[Any, Any]) -> tuple[str, str] | None:
        """``(which, got)`` if a space of ``env`` does not go with the others."""
        if isinstance(self.mode, str) and self.mode == "same":
            fits = env.observation_space == self.observation_space
        else:
            fits = is_space_dtype_shape_equiv(env.observation_space, self.observation_space)
        if not fits:
            return "observation" if self._batches(env.observation_space) else "shape", repr(env.observation_space)
        if env.action_space != self.action_space:
            return "action", repr(env.action_space)
        return None

    def _batches(self, space: gymnasium.Space[Any]) -> bool:
        """Whether some mode can batch a space with the others, or it is not known."""
        with contextlib.suppress(Exception):  # of a space's own class
            return is_space_dtype_shape_equiv(space, self.observation_space)
        return True


def _expected(blob: bytes) -> Expected:
    return Expected(*pickle.loads(blob))


_NEEDED: Final = ("reset", "step", "close", "observation_space", "action_space")


def made_by(env_fn: Callable[[], Any], env: int) -> Any:
    """What ``env_fns[env]`` builds.

    Raises:
        TypeError: Nothing came back, or something that is no environment.
    """
    made = env_fn()
    if made is None:
        raise TypeError(f"env_fns[{env}]() gave None, wanted an environment: is a `return` missing?")
    if isinstance(made, gymnasium.Env):
        return made
    if hasattr(made, "possible_agents"):
        raise TypeError(f"env_fns[{env}]() gave an environment of PettingZoo: vecenv.MultiAgentVecEnv takes these")
    if missing := [name for name in _NEEDED if not hasattr(made, name)]:
        raise TypeError(f"env_fns[{env}]() gave a {type(made).__name__} without {missing[0]}, wanted a gymnasium.Env")
    return made


def _counted(returned: Any) -> str:
    """What was returned, in words."""
    if isinstance(returned, (tuple, list)):
        return f"{len(returned)} value{'s' * (len(returned) != 1)}"
    return f"one {type(returned).__name__}"


_NO_TURN: Final = nullcontext()
_UNPACKED: Final = {  # what Python says where five values are wanted -> what there was
    r"not enough values to unpack \(expected 5, got (\d)\)": r"\1 values",
    r"too many values to unpack": "more than 5 values",
    r"cannot unpack non-iterable (\S+) object": r"one \1",
}


class Envs:
    """Environments ``first .. first + len(env_fns) - 1`` of the batch; see :class:`vecenv.worker.rows.EnvRows`.

    Args:
        env_fns: What builds them.
        first: Index of the first one.
        observation_tree: Structure of an observation of fixed size, else ``None``.
        leaves: Where their observations lie in shared memory.
        expected: The spaces to check every environment against; ``None``: no check.
        interrupts: A ``KeyboardInterrupt`` is the person's at the keyboard.
    """

    def __init__(
        self,
        env_fns: Sequence[Callable[[], gymnasium.Env[Any, Any]]],
        first: int,
        observation_tree: Tree | None,
        leaves: list[Array],
        expected: Expected | None,
        interrupts: bool,
    ) -> None:
        count = len(env_fns)
        self.first = first
        self.count = count
        self.forked: list[bool] = []  # not empty in a copy of the worker that an environment forked; see leave_if_forked()
        self.envs: list[gymnasium.Env[Any, Any] | None] = [None] * count
        self._env_fns = list(env_fns)
        self._expected = expected
        self._interrupts = interrupts
        self._observation_tree = observation_tree
        self._observation_leaves = leaves
        self._steps: list[Callable[[Any], Any]] = [self._step_failed(k) for k in range(count)]
        self._used = [False] * count
        self._next: dict[int, tuple[Any, Any]] = {}  # row -> seed and options of the next episode that autoreset begins
        self._offered: list[Any] = [None] * count  # what an environment with an observation_buffer writes into
        self.generators: generators.RowGenerators | None = None  # of rows that have their own
        self._building: int | None = None
        self.warnings: list[tuple[str, str]] = []

    @property
    def env_fns(self) -> list[Callable[[], gymnasium.Env[Any, Any]]]:
        """What builds the environments."""
        return self._env_fns

    @property
    def span(self) -> str:
        """Which environments, in words."""
        return f"{self.first}-{self.first + self.count - 1}"

    def use_generators(self, option: generators.GeneratorsOption) -> None:
        """Before environments are built: let each row have its own, or note which rows draw from those of the process."""
        if option == "own":
            self.generators = generators.RowGenerators(self.count)
        elif not self._interrupts:
            generators.watch(self.saw)

    def saw(self, generator: str) -> None:
        """An environment draws from a generator of the process: there is a warning about it."""
        row = f"env {self.first + self._running}" if self._running is not None else f"one of envs {self.span}"
        env = next((env for env in self.envs[self._running or 0 :] if env is not None), None)
        name = getattr(getattr(env, "spec", None), "id", None) or (type(env.unwrapped).__name__ if env is not None else "it")
        self.warnings.append((
            "generators",
            f"{row} ({name}) draws from the generator of {generator}, which everything in its process shares: what it says "
            "depends on which environments are beside it, so that the same seeds may give other results with another number "
            "of workers, and vecenv.evaluate other results with another number of environments. generators='own' gives each "
            "environment its own",
        ))  # fmt: skip

    @property
    def _running(self) -> int | None:
        """The row whose environment runs just now, if that can be told."""
        return self._building

    def _turn(self, k: int, seed: Any = None, *, begins: bool = False) -> AbstractContextManager[None]:
        """Around every call into an environment but ``step``; ``begins``: it is a reset, with this seed."""
        return _NO_TURN if self.generators is None else generators.InUse(self.generators.each[k], seed, begins)

    def build(self) -> tuple[list[Failure], list[tuple[int, str, str]]]:
        """Build all environments; what raised, and (env, which space, its repr) for spaces that do not match."""
        failures: list[Failure] = []
        mismatches: list[tuple[int, str, str]] = []
        for k in range(self.count):
            try:
                env = self._build(k)
                wrong = self._expected.mismatch(env) if self._expected is not None else None
            except BaseException as error:
                self._let_through(error)
                failures.append(Failure(self.first + k, error))
                continue
            if wrong is not None:
                mismatches.append((self.first + k, *wrong))
        return failures, mismatches

    def _build(self, k: int) -> gymnasium.Env[Any, Any]:
        self._building = k
        try:
            with self._turn(k):
                env: gymnasium.Env[Any, Any] = made_by(self._env_fns[k], self.first + k)
                self.envs[k] = env
                self._steps[k] = env.step
                self._used[k] = False
                self._offer(k, env)
        finally:
            self._building = None
        return env

    def _offer(self, k: int, env: gymnasium.Env[Any, Any]) -> None:
        """Let an environment that can write its observations in place do so."""
        # looked up on the class so that an environment's __getattr__ cannot pretend to have one
        offered = getattr(type(env.unwrapped), "observation_buffer", None)
        if callable(offered) and self._observation_tree is not None:
            views = [leaf[k : k + 1].reshape(leaf.shape[1:]) for leaf in self._observation_leaves]
            self._offered[k] = self._observation_tree.build(iter(views))
            offered(env.unwrapped, self._offered[k])

    def _env(self, k: int) -> gymnasium.Env[Any, Any]:
        env = self.envs[k]
        if env is None:
            raise EnvFailed(f"env {self.first + k} failed earlier; reset() builds it anew")
        return env

    # What stands in for a row's `env.step` when the row is not to be stepped.

    def _step_failed(self, k: int) -> Callable[[Any], Any]:
        def step(_: Any) -> Any:
            return self._env(k)

        return step

    def _step_by_reset(self, k: int) -> Callable[[Any], Any]:
        """The step after an episode's end in next-step mode: ignores its action and resets."""

        def step(_: Any) -> Any:
            env = self._env(k)
            self._steps[k] = env.step
            observation, info = self._begin_next(k)
            return observation, 0.0, False, False, info

        step.resets_first = True  # type: ignore[attr-defined]
        return step

    def _first_step(self, k: int, pending: bool) -> Callable[[Any], Any]:
        """The step of a row that was just reset; ``pending``: it is to begin with an automatic reset."""
        return self._step_by_reset(k) if pending else self._env(k).step

    def _reset(self, k: int, seed: Any, options: Any) -> tuple[Any, Any]:
        """The reset that was asked for, of an environment that is built anew if it had failed."""
        env = self.envs[k] or self._build(k)
        with self._turn(k, seed, begins=True):
            return self._both(k, env.reset(seed=seed, options=None if options is None else dict(options)))

    def _begin_next(self, k: int) -> tuple[Any, Any]:
        """The reset of autoreset, with what was set for it."""
        seed, options = self._next.pop(k, (None, None))
        given = {}
        if seed is not None or options is not None:
            given = {"seed": seed, "options": None if options is None else dict(options)}
        env = self._env(k)
        if self.generators is None:  # without a context, which would cost 0.4 us an episode
            return self._both(k, env.reset(**given))
        with self._turn(k, seed, begins=True):
            return self._both(k, env.reset(**given))

    def _both(self, k: int, returned: Any) -> tuple[Any, Any]:
        """What a reset has returned, if that is what it has to be: an array of two numbers could be taken apart, too."""
        if isinstance(returned, (tuple, list)) and len(returned) == 2:
            return returned[0], returned[1]
        raise TypeError(f"env {self.first + k}: reset returned {_counted(returned)}, wanted (observation, info)")

    def _is_pending(self, k: int) -> bool:
        """Whether the row's next step begins with an automatic reset."""
        return getattr(self._steps[k], "resets_first", False) is True

    def leave_if_forked(self) -> None:
        """End a copy of the worker, which an environment forked and which has come back here.

        It is not the worker, and what it has to say, however late, must not get into the rows.
        """
        if self.forked:
            os._exit(0)

    def _let_through(self, error: BaseException) -> None:
        if self._interrupts and isinstance(error, KeyboardInterrupt):
            raise error

    def _named(self, k: int, error: BaseException) -> BaseException:
        """What is said of an environment that raised ``error``: it, unless that is the person's at the keyboard, or was
        raised where the five values of a step were taken apart."""
        where = error.__traceback__
        if isinstance(error, (TypeError, ValueError)) and where is not None and where.tb_next is None:
            for text, got in _UNPACKED.items():
                if found := re.match(text, str(error)):
                    wanted = "(observation, reward, terminated, truncated, info)"
                    return TypeError(f"env {self.first + k}: step returned {found.expand(got)}, wanted {wanted}")
        if self._interrupts and isinstance(error, KeyboardInterrupt):
            return EnvError(f"env {self.first + k} was interrupted: {summary(error)}")
        return error

    def _number(self, k: int, name: str, value: Any, kind: type[np.float64] | type[np.bool_]) -> Any:
        """A reward or flag that is no plain Python one: converted as Gymnasium does, an array of one squeezed."""
        if isinstance(value, (np.bool_, np.floating, np.integer, int)):
            return kind(value)
        try:
            array = np.array(value, dtype=kind)
            if array.size == 1:
                return kind(array.reshape(())[()])
            problem: Exception | None = None
        except (ValueError, TypeError) as error:
            problem = error
        raise ObservationError(
            f"env {self.first + k}: {name}: got {type(value).__name__} {value!r}, wanted one {np.dtype(kind)}"
        ) from problem

    def close(self) -> Outcome:
        """Close all environments, whatever any of them raises."""
        out = Outcome()
        for k, env in enumerate(self.envs):
            if env is None:
                continue
            self.envs[k] = None
            try:
                with self._turn(k):
                    env.close()
            except BaseException as error:
                self._let_through(error)
                out.failures.append(Failure(self.first + k, error))
        if self.generators is not None:
            self.generators = None
            generators.uninstall()
        return out

    def forget(self) -> None:
        """Let go of everything, the shared memory first of all; nothing can be asked of it any more."""
        self.__dict__.clear()
