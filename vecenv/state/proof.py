"""Proves that an environment can be saved, on environments of its own, never on those of a user.

One environment is stepped, saved, and stepped further, across the end of an episode. Then a third one is stepped, so that
whatever environments share has changed. Then the state is loaded into another environment and back into the first; both have
to continue bit for bit as the first did.
"""

from __future__ import annotations

import copy
import random
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from types import ModuleType
from typing import Any, Final

import numpy as np

from vecenv.errors import NotRestorable, VecEnvError
from vecenv.state.capture import capture_state, layers_of, prepare_restore
from vecenv.state.snapshots import kind_of
from vecenv.system.generators import Generators, InUse, install, uninstall
from vecenv.system.uninterrupted import Noted, by_handler
from vecenv.trajectories import STEP_FIELDS, assert_identical

__all__ = ["Shared", "first_line_of", "prove", "stepped"]

_STEPS: Final = 64  # after the state was saved, if no episode ends before
_MANY: Final = 8  # rounds, where environments are seen to share something: it may be equal by chance
_AFTER: Final = 8  # after the end of the episode
_BRANCHES: Final = 80  # more loads: what differs in one of ten is missed once in four thousand (0.9 ** 80)
_BRANCH: Final = 2  # steps after each of them
_SECONDS: Final = 20.0  # and no more loads after that time


def prove(env_fn: Callable[[], Any], *, steps: int = _STEPS, seed: int = 0, own_generators: bool = False) -> None:
    """Prove that an environment continues from a saved state exactly as it would have continued.

    Three environments are built, stepped with random actions and closed; the global generators of Python and numpy are left
    as they were.

    Args:
        env_fn: Builds the environment.
        steps: How many steps are compared, at most, before the episode is ended by a reset; more follow.
        seed: Of resets and actions.
        own_generators: They draw from generators of their own, which are a part of the state (``generators="own"``).

    Raises:
        NotRestorable: It does not, or cannot be saved: names it, what differed first, and where, if that is known.
    """
    shared = random.getstate(), np.random.get_state()
    envs: list[Any] = []
    if own_generators:
        install()
    try:
        with Noted():
            _tried(env_fn, envs, steps, seed, own_generators)
    finally:
        if own_generators:
            uninstall()
        random.setstate(shared[0])
        np.random.set_state(shared[1])
        for env in envs:
            env.close()


def _tried(env_fn: Callable[[], Any], envs: list[Any], steps: int, seed: int, own_generators: bool) -> None:
    try:
        envs += [env_fn(), env_fn(), env_fn()]
    except Exception as error:
        if by_handler(error):
            raise
        raise NotRestorable(
            f"the proof needs more environments of {getattr(env_fn, '__name__', env_fn)!s}, and one could not be built: "
            f"{type(error).__name__}: {error} (verify=False saves without proof)"
        ) from error
    name = kind_of(envs[0]).env_id
    try:
        rounds, shares = 0, False
        while rounds < (_MANY if shares else 2):
            proof = _Proof(envs, steps, seed + 17 * rounds, rounds, own_generators)
            proof.hold()
            rounds, shares = rounds + 1, shares or proof.shares
        proof.look_often()
    except VecEnvError as error:
        raise NotRestorable(f"{name} cannot be saved: {error}") from error


class _Proof:
    """One state, saved once and loaded twice."""

    def __init__(self, envs: list[Any], steps: int, seed: int, round_: int, own_generators: bool) -> None:
        self._generators = {id(env): Generators() for env in envs} if own_generators else {}
        self._first, self._second, self._third = envs
        self._steps, self._seed, self._round = steps, seed, round_
        self.shares = False
        self._space = copy.deepcopy(self._first.action_space)
        self._space.seed(seed)

    def hold(self) -> None:
        """Save, continue, load, and continue again.

        Raises:
            NotRestorable: The two differ.
        """
        first, second = self._first, self._second
        shared = Shared(first)
        self._run(first, self._seed, 7 + 14 * (self._round % 3))
        self._run(second, self._seed + 1, 5)
        if self._round:  # in the middle of what follows the end of an episode
            self._reset(first)
            self._run(first, None, 3)
        shared.look()
        branch = self._branch(self._steps + _AFTER)
        shared.look()
        self._run(self._third, self._seed + 2, 9)
        changed = shared.look()
        self.shares = bool(changed)
        for env, which in ((second, "another environment"), (first, "the same environment")):
            self._compare(env, which, branch, changed)

    def look_often(self) -> None:
        """Save again and again, and compare the first steps after each load: this finds what differs in one of ten.

        Raises:
            NotRestorable: As of :meth:`hold`.
        """
        until = time.monotonic() + _SECONDS
        for number in range(_BRANCHES):
            self._run(self._first, None, 1 + number % 3)
            self._run(self._second, None, 1 + number % 2)  # what is not loaded differs from the first one
            self._compare(self._second, "another environment", self._branch(_BRANCH), [])
            if time.monotonic() > until:
                break

    def _branch(self, steps: int) -> tuple[bytes, Any, list[Any], dict[str, Any]]:
        """The state of the first environment and of its own generators, the actions that follow, and what they give."""
        first = self._first
        state, drawing = capture_state(first), self._generators[id(first)].state() if self._generators else None
        actions = [self._space.sample() for _ in range(steps)]
        return state, drawing, actions, self._recorded(first, actions)

    def _compare(self, env: Any, which: str, branch: tuple[bytes, Any, list[Any], Any], changed: list[str]) -> None:
        state, drawing, actions, wanted = branch
        prepare_restore(env, state)()
        if drawing is not None:
            self._generators[id(env)].load(drawing)
        try:
            assert_identical(self._recorded(env, actions), wanted, "after")
        except AssertionError as error:
            why = f"loaded into {which}, it goes on differently: {first_line_of(str(error))}"
            raise NotRestorable(why + _hint(changed, env)) from None

    def _run(self, env: Any, seed: int | None, steps: int) -> None:
        if seed is not None:
            self._reset(env, seed)
        for _ in range(steps):
            _, over = self._step(env, self._space.sample())
            if over:
                self._reset(env)

    def _reset(self, env: Any, seed: int | None = None) -> Any:
        with self._turn(env, seed, begins=True):
            return env.reset() if seed is None else env.reset(seed=seed)

    def _turn(self, env: Any, seed: int | None = None, *, begins: bool = False) -> AbstractContextManager[None]:
        own = self._generators.get(id(env))
        return nullcontext() if own is None else InUse(own, seed, begins)

    def _step(self, env: Any, action: Any) -> tuple[dict[str, Any], bool]:
        with self._turn(env):
            return stepped(env, action)

    def _recorded(self, env: Any, actions: list[Any]) -> dict[str, Any]:
        """What an environment returns for these actions: until an episode has ended or was cut off, and some steps more."""
        said: dict[str, Any] = {}
        ended = -1
        for number, action in enumerate(actions):
            fields, over = self._step(env, action)
            said.update((f"step {number}, {field}", value) for field, value in fields.items())
            if over or number == self._steps - 1:
                said[f"reset after step {number}"] = copy.deepcopy(self._reset(env))
                ended = number if ended < 0 else ended
            if 0 <= ended <= number - _AFTER:
                break
        return said


def stepped(env: Any, action: Any) -> tuple[dict[str, Any], bool]:
    """A step, within a ``Noted``: copies of what it gives, by field, and whether the episode is over.

    Times of the clock are left out (``RecordEpisodeStatistics``). Where an environment refuses an action (some are masked),
    it is the text of the exception.
    """
    try:
        *others, info = env.step(copy.deepcopy(action))
    except Exception as error:
        if by_handler(error):  # in the calling process: a time limit, for instance
            raise
        return {"exception": f"{type(error).__name__}: {error}"}, True
    if isinstance(info, Mapping) and isinstance(episode := info.get("episode"), Mapping):
        info = {**info, "episode": {key: value for key, value in episode.items() if key != "t"}}
    fields = dict(zip(STEP_FIELDS, copy.deepcopy([*others, info]), strict=True))
    return fields, bool(others[2] or others[3])


def first_line_of(text: str) -> str:
    return " ".join(text.split())[:300]


class Shared:
    """What environments of a kind may share: global generators, attributes of classes and of modules."""

    def __init__(self, env: Any) -> None:
        self._places: dict[str, Mapping[str, Any]] = {}
        for layer in layers_of(env):
            for kind in type(layer).__mro__:
                if kind.__module__.partition(".")[0] not in ("builtins", "abc", "typing", "gymnasium"):
                    self._places[kind.__name__] = vars(kind)
                    module = sys.modules.get(kind.__module__)
                    if isinstance(module, ModuleType):
                        self._places[module.__name__] = vars(module)
        self._before = self._look()
        self._changed: dict[str, None] = {}

    def _look(self) -> dict[str, str]:
        seen = {
            f"{place}.{name}": text
            for place, names in self._places.items()
            for name, value in names.items()
            if not name.startswith("__") and (text := _plain_text(value))
        }
        seen["the generator of the module random"] = str(hash(random.getstate()))
        numbers: Any = np.random.get_state()
        seen["numpy's global generator"] = str((numbers[1].tobytes(), *numbers[2:]))
        return seen

    def look(self) -> list[str]:
        """Look again; the names of everything that has changed at any look."""
        now = self._look()
        self._changed.update((name, None) for name, text in self._before.items() if now.get(name) != text)
        return list(self._changed)


def _plain_text(value: Any) -> str:
    if isinstance(value, bool | int | float | str | bytes):
        return repr(value)
    if isinstance(value, np.ndarray):
        return str((value.dtype, value.shape, value.tobytes()))
    if isinstance(value, list | dict | set | tuple) and len(value) < 1000:
        try:
            return repr(value)
        except Exception as error:
            if by_handler(error):
                raise
            return ""
    if isinstance(value, np.random.Generator):
        return repr(value.bit_generator.state)
    return ""


def _hint(changed: list[str], env: Any) -> str:
    if changed:
        return f" (environments share {', '.join(changed[:4])}, which its steps change)"
    kept = [
        f"{type(layer).__name__}.{name}"
        for layer in layers_of(env)
        for name, value in vars(layer).items()
        if getattr(value, "__closure__", None) or type(type(value)).__name__.startswith(("pybind11", "nb_type", "Boost"))
    ]
    return f" (what may hide it: {', '.join(kept[:4])})" if kept else ""
