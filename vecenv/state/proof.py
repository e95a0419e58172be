"""The proof that an environment can be saved. It steps scratch environments, never the user's own.

The first scratch environment is stepped, saved, and stepped further, across the end of an episode. The state is then loaded
into the second one and back into the first. Both must continue bit for bit as the first did. Steps of the third one in
between reveal state that environments share.

This covers the environments that ``env_fn`` builds. A user's environment may still differ from them: ``env_fn`` may count
its calls, or the user may have called ``set_attr``. So :meth:`Proof.check` also loads the state of the user's environment
into two scratch environments, which must continue identically.
"""

from __future__ import annotations

import copy
import operator
import random
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from types import ModuleType
from typing import Any, Final

import gymnasium
import numpy as np

from vecenv.errors import NotRestorable, SnapshotMismatch, VecEnvError
from vecenv.state.capture import capture_state, find_layers, prepare_restore, reachable_objects
from vecenv.state.codecs import registered_name
from vecenv.state.snapshots import describe_kind
from vecenv.system.shared_generators import read_states, restore_states
from vecenv.system.signals import raised_by_handler, watched_handlers
from vecenv.trajectories import STEP_FIELDS, assert_identical

__all__ = ["Proof", "SharedState", "open_proof", "prove", "step_env", "to_one_line"]

_MAX_STEPS: Final = 64  # steps after saving the state, unless an episode ends earlier
_SHARING_ROUNDS: Final = 8  # rounds for environments that share state: with fewer, the results may be equal by chance
_STEPS_AFTER_END: Final = 8  # steps after the end of the episode
_NUM_BRANCHES: Final = 80  # further loads: a difference that follows one load in ten is missed once in 4,600 (0.9 ** 80)
_BRANCH_STEPS: Final = 2  # steps after each of these loads
_MAX_SECONDS: Final = 20.0  # after that time, no more of these loads are tested
_CHECK_STEPS: Final = 16  # steps from the state of an environment that is not a scratch one
_NEVER_SHARED: Final = frozenset({"mujoco._structs.MjData", "ale_py._ale_py.ALEInterface"})


def prove(env_fn: Callable[[], Any], *, steps: int = _MAX_STEPS, seed: int = 0) -> None:
    """Prove that an environment continues from a loaded state exactly as the saved one continued.

    Three environments are built, take about a thousand random steps in total, and are closed. The global
    generators of Python, NumPy and torch are restored.

    Args:
        env_fn: A function that builds the environment.
        steps: Maximum number of steps that are compared before a reset ends the episode; a few more steps follow.
        seed: Seed of resets and actions.

    Raises:
        NotRestorable: The environment continues differently, or cannot be saved. The text names the environment, the first
            difference, and its cause if known.
    """
    with open_proof(env_fn, steps=steps, seed=operator.index(seed)) as proof:
        proof.run()


@contextmanager
def open_proof(env_fn: Callable[[], Any], **options: Any) -> Iterator[Proof]:
    """Build the scratch environments of a :class:`Proof`, and close them at the end. For the options, see :func:`prove`."""
    shared, level = read_states(), gymnasium.logger.min_level
    with ExitStack() as scratch:
        scratch.callback(restore_states, shared)  # runs last
        try:
            gymnasium.logger.min_level = gymnasium.logger.ERROR  # warnings about scratch environments would mislead the user
            with watched_handlers():
                yield Proof([_build(env_fn, scratch) for _ in range(3)], **options)
        finally:
            gymnasium.logger.min_level = level


def _build(env_fn: Callable[[], Any], scratch: ExitStack) -> Any:
    """Build an environment that ``scratch`` closes."""
    try:
        env = env_fn()
        scratch.callback(env.close)
        return env
    except Exception as error:
        if raised_by_handler(error):
            raise
        raise NotRestorable(
            f"the proof needs more environments from {getattr(env_fn, '__name__', env_fn)!s}, and one could not be built: "
            f"{type(error).__name__}: {error} (verify=False saves without proof)"
        ) from error


class Proof:
    """Three scratch environments, and their comparison."""

    def __init__(self, envs: list[Any], *, steps: int = _MAX_STEPS, seed: int = 0) -> None:
        self._first, self._second, self._third = envs
        self._steps, self._seed = steps, seed
        self._kind = describe_kind(self._first)
        self._space = copy.deepcopy(self._first.action_space)

    def run(self) -> None:
        """Compare the scratch environments with each other.

        Raises:
            NotRestorable: They differ, share a generator, simulator or emulator, or cannot be saved.
        """
        try:
            self._require_unshared(self._second, "another environment")
            rounds, shares = 0, False
            while rounds < (_SHARING_ROUNDS if shares else 2):
                shares = self._run_round(rounds) or shares
                rounds += 1
            self._test_many_loads()
        except VecEnvError as error:
            raise NotRestorable(f"{self._kind.env_id} cannot be saved: {error}") from error

    def check(self, env: Any, state: bytes, *, over: bool = False) -> None:
        """Require that scratch environments continue identically from the state of another environment.

        Args:
            env: The environment, which does not change.
            state: Its state.
            over: True if its episode has ended.

        Raises:
            NotRestorable: The environment is of another kind, or shares a generator, simulator or emulator with a scratch
                one; or the state does not fit the scratch environments, or these continue differently.
        """
        try:
            self._require_unshared(env, "the environments that its env_fn builds")
            if difference := describe_kind(env).differs_from(self._kind):
                raise NotRestorable(f"its env_fn builds environments of another kind: {difference}")
            self._space.seed(self._seed)
            self._load_state(self._first, state, "an environment from its env_fn")
            actions = [self._space.sample() for _ in range(_CHECK_STEPS)]
            if over:
                self._reset(self._first)
            expected = self._record_results(self._first, actions)
            self._reset(self._third, self._seed)
            self._compare(self._second, "another environment", (state, actions, expected), [], over=over)
        except VecEnvError as error:
            raise NotRestorable(f"{self._kind.env_id} cannot be saved: {error}") from error

    def _require_unshared(self, env: Any, others: str) -> None:
        """Raise if an environment shares a generator, or an object of a class in ``_NEVER_SHARED``, with the first one."""
        own, other = (reachable_objects(find_layers(one)) for one in (self._first, env))
        for key in own.keys() & other.keys():
            obj, path = other[key]
            is_generator = isinstance(obj, np.random.Generator | np.random.RandomState | random.Random)
            if is_generator or registered_name(type(obj)) in _NEVER_SHARED:
                raise NotRestorable(f"{path} ({type(obj).__name__}) is the same object as in {others}")

    def _run_round(self, number: int) -> bool:
        """Save, continue, load, and continue again. Return ``True`` if state that they may share changed.

        Raises:
            NotRestorable: The results differ.
        """
        first, second, seed = self._first, self._second, self._seed + 17 * number
        self._space.seed(seed)
        shared = SharedState(first)
        self._step_randomly(first, seed, 7 + 14 * (number % 3))
        self._step_randomly(second, seed + 1, 5)
        if number:  # later rounds save shortly after a reset
            self._reset(first)
            self._step_randomly(first, None, 3)
        shared.find_changes()
        branch = self._record_branch(self._steps + _STEPS_AFTER_END)
        shared.find_changes()
        self._step_randomly(self._third, seed + 2, 9)
        changed = shared.find_changes()
        for env, target in ((second, "another environment"), (first, "the same environment")):
            self._compare(env, target, branch, changed)
        return bool(changed)

    def _test_many_loads(self) -> None:
        """Save and load repeatedly, and compare the first steps: some differences occur only after one load in ten."""
        until = time.monotonic() + _MAX_SECONDS
        for number in range(_NUM_BRANCHES):
            self._step_randomly(self._first, None, 1 + number % 3)
            # steps of its own, so that any state that a load misses differs between the two
            self._step_randomly(self._second, None, 1 + number % 2)
            self._compare(self._second, "another environment", self._record_branch(_BRANCH_STEPS), [], alone=True)
            if time.monotonic() > until:
                break

    def _record_branch(self, steps: int) -> tuple[bytes, list[Any], dict[str, Any]]:
        """Return the state of the first environment, the next actions, and their results."""
        state = capture_state(self._first)
        actions = [self._space.sample() for _ in range(steps)]
        return state, actions, self._record_results(self._first, actions)

    def _load_state(self, env: Any, state: bytes, target: str) -> None:
        try:
            prepare_restore(env, state)()
        except SnapshotMismatch as error:
            raise NotRestorable(f"loaded into {target}, it continues differently: {error}") from error

    def _compare(
        self, env: Any, target: str, branch: tuple[bytes, list[Any], Any], changed: list[str], *, over: bool = False,
        alone: bool = False,
    ) -> None:  # fmt: skip
        """Load a state, and compare the results of the same actions. ``alone``: without steps of the third environment."""
        state, actions, expected = branch
        self._load_state(env, state, target)
        if over:
            self._reset(env)
        results = self._record_results(env, actions, interleaved=None if alone else self._third)
        try:
            assert_identical(results, expected, "after")
        except AssertionError as error:
            text = f"loaded into {target}, it continues differently: {to_one_line(str(error))}"
            raise NotRestorable(text + _describe_cause(changed, env)) from None
        except ValueError as error:  # from `==` of objects such as sparse matrices
            if raised_by_handler(error):
                raise
            raise NotRestorable(f"its results cannot be compared: ValueError: {error}") from error

    def _step_randomly(self, env: Any, seed: int | None, steps: int) -> None:
        if seed is not None:
            self._reset(env, seed)
        for _ in range(steps):
            _, over = step_env(env, self._space.sample())
            if over:
                self._reset(env)

    def _reset(self, env: Any, seed: int | None = None) -> Any:
        try:
            return env.reset() if seed is None else env.reset(seed=seed)
        except Exception as error:
            if raised_by_handler(error):
                raise
            raise NotRestorable(f"the reset of a scratch environment raised {type(error).__name__}: {error}") from error

    def _record_results(self, env: Any, actions: list[Any], interleaved: Any = None) -> dict[str, Any]:
        """Return the results of these actions, up to a few steps after an episode ends, or is ended by a reset.

        ``interleaved`` is an environment that is stepped in between.
        """
        results: dict[str, Any] = {}
        end_step = -1
        for number, action in enumerate(actions):
            if interleaved is not None:
                self._step_randomly(interleaved, None, 1)
            fields, over = step_env(env, action)
            results.update((f"step {number}, {field}", value) for field, value in fields.items())
            if over or number == self._steps - 1:
                results[f"reset after step {number}"] = copy.deepcopy(self._reset(env))
                end_step = number if end_step < 0 else end_step
            if 0 <= end_step <= number - _STEPS_AFTER_END:
                break
        return results


def step_env(env: Any, action: Any) -> tuple[dict[str, Any], bool]:
    """Call ``env.step``. Return copies of its results, and ``True`` if the episode ended.

    The wall-clock times of ``RecordEpisodeStatistics`` are left out. If the step raises, for example because the action is
    masked, the result is the text of the exception, and the episode counts as ended.

    The caller must be within :func:`watched_handlers`.
    """
    try:
        *others, info = env.step(copy.deepcopy(action))
    except Exception as error:
        if raised_by_handler(error):  # such as a time limit
            raise
        return {"exception": f"{type(error).__name__}: {error}"}, True
    if len(others) != 4:
        raise ValueError(f"step() must return 5 values, got {len(others) + 1}")
    if isinstance(info, Mapping) and isinstance(episode := info.get("episode"), Mapping):
        info = {**info, "episode": {key: value for key, value in episode.items() if key != "t"}}
    fields = dict(zip(STEP_FIELDS, copy.deepcopy([*others, info]), strict=True))
    return fields, bool(others[2] or others[3])


def to_one_line(text: str) -> str:
    """Return the beginning of a text, without line breaks."""
    return " ".join(text.split())[:300]


class SharedState:
    """The state that environments of a kind may share: attributes of classes and modules, generators of random and numpy."""

    def __init__(self, env: Any) -> None:
        self._namespaces: dict[str, Mapping[str, Any]] = {}
        for layer in find_layers(env):
            for cls in type(layer).__mro__:
                if cls.__module__.partition(".")[0] not in ("builtins", "abc", "typing", "gymnasium"):
                    self._namespaces[cls.__name__] = vars(cls)
                    module = sys.modules.get(cls.__module__)
                    if isinstance(module, ModuleType):
                        self._namespaces[module.__name__] = vars(module)
        self._before = self._read_values()
        self._changed: dict[str, None] = {}

    def _read_values(self) -> dict[str, str]:
        values = {
            f"{owner}.{name}": text
            for owner, names in self._namespaces.items()
            for name, value in names.items()
            if not name.startswith("__") and (text := _comparable_text(value))
        }
        values["random's global generator"] = str(hash(random.getstate()))
        state: Any = np.random.get_state()
        values["numpy's global generator"] = str((state[1].tobytes(), *state[2:]))
        return values

    def find_changes(self) -> list[str]:
        """Return the names of all values that have changed since the start, now or in an earlier call."""
        now = self._read_values()
        self._changed.update((name, None) for name, text in self._before.items() if now.get(name) != text)
        return list(self._changed)


def _comparable_text(value: Any) -> str:
    if isinstance(value, bool | int | float | str | bytes):
        return repr(value)
    if isinstance(value, np.ndarray):
        return str((value.dtype, value.shape, value.tobytes()))
    if isinstance(value, list | dict | set | tuple) and len(value) < 1000:
        try:
            return repr(value)
        except Exception as error:
            if raised_by_handler(error):
                raise
            return ""
    if isinstance(value, np.random.Generator):
        return repr(value.bit_generator.state)
    return ""


def _describe_cause(changed: list[str], env: Any) -> str:
    if changed:
        return f" (environments share state that steps change: {', '.join(changed[:4])})"
    suspects = [
        f"{type(layer).__name__}.{name}"
        for layer in find_layers(env)
        for name, value in vars(layer).items()
        if getattr(value, "__closure__", None) or type(type(value)).__name__.startswith(("pybind11", "nb_type", "Boost"))
    ]
    return f" (possible cause: {', '.join(suspects[:4])})" if suspects else ""
