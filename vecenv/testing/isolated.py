"""``assert_isolated``, which checks that nothing outside an environment affects its results.

Two environments, one after the other, do the same run alone. A third one repeats it while others are stepped between its
steps and the shared random generators are reseeded. If only its results differ, the run is repeated with one disturbance at
a time to find the cause. The error names the generators, or the changed attributes of classes and modules, if it finds any.
"""

from __future__ import annotations

import copy
import operator
import random
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import numpy as np

from vecenv.state.proof import SharedState, step_env, to_one_line
from vecenv.state.snapshots import describe_kind
from vecenv.system.shared_generators import GENERATORS, find_draws, read_states, restore_states, torch_generator
from vecenv.system.signals import raised_by_handler, watched_handlers
from vecenv.trajectories import assert_identical

__all__ = ["assert_isolated"]


def assert_isolated(env_fn: Callable[[], Any], *, steps: int = 64, seed: int = 0) -> None:
    """Assert that environments of one kind do not affect each other, and draw only from their own generators.

    An environment that passes returns the same results for the same seeds, independently of the rest of its process. The
    check misses draws that do not occur within ``steps`` steps with random actions. The shared generators are restored.

    Args:
        env_fn: A function that builds the environment; called several times.
        steps: The number of steps; ended episodes are followed by resets.
        seed: The seed of the first reset, and of the actions.

    Raises:
        AssertionError: The results depend on something outside the environment. The message has the first difference, and
            names the generators, or the changed attributes of classes and modules, if they are found.
        ValueError: ``steps`` is less than 1.
    """
    if operator.index(steps) < 1:
        raise ValueError(f"`steps` must be a positive int, got {steps!r}")
    comparison = _Comparison(env_fn, steps, operator.index(seed))
    reference_results = comparison.run()
    if (difference := comparison.find_difference(reference_results, comparison.run())) is not None:
        when = "in a second run, alone, with the same seed and actions"
        raise AssertionError(comparison.describe(difference, comparison.find_causes(), when))
    all_disturbances = ("others", *GENERATORS)
    if (difference := comparison.find_difference(reference_results, comparison.run(all_disturbances))) is None:
        return
    for name, description in GENERATORS.items():
        if (found := comparison.find_difference(reference_results, comparison.run((name,)))) is not None:
            advice = "draw from self.np_random, or use generators='own'; draws in a constructor have no seed"
            when = f"after other code has drawn from that generator ({advice})"
            raise AssertionError(comparison.describe(found, [description], when))
    found = comparison.find_difference(reference_results, comparison.run(("others",)))
    if found:
        when = "when other environments of its kind are stepped between its steps"
    else:
        when = "when other environments are stepped and the shared generators are reseeded between its steps"
    raise AssertionError(comparison.describe(found or difference, comparison.find_changed_attributes(), when))


class _Comparison:
    """Runs of environments of one kind, which should all return the same results."""

    def __init__(self, env_fn: Callable[[], Any], steps: int, seed: int) -> None:
        self._env_fn, self._steps, self._seed = env_fn, steps, seed
        self._name = ""
        self._shared: SharedState
        self._drawn: set[str] = set()

    def run(self, disturbances: tuple[str, ...] = (), *, seeded: bool = False) -> dict[str, Any]:
        """Run an environment with ``disturbances`` before its constructor and each call. Return its results by name.

        ``seeded`` seeds the shared generators first.
        """
        saved_states = read_states()
        if seeded:
            _reseed(tuple(GENERATORS), 0)
        first_states = read_states()
        with ExitStack() as cleanups:
            cleanups.callback(restore_states, saved_states)  # runs last
            try:
                _reseed(disturbances, 3000)
                env = self._build(cleanups)
                self._name = describe_kind(env).env_id
                self._shared = SharedState(env)
                space = copy.deepcopy(env.action_space)
                space.seed(self._seed)
                others = [self._build(cleanups), self._build(cleanups)] if "others" in disturbances else []
                with watched_handlers():
                    return self._take_steps(env, others, [space.sample() for _ in range(self._steps)], disturbances)
            finally:
                self._drawn.update(find_draws(first_states))

    def _build(self, cleanups: ExitStack) -> Any:
        env = self._env_fn()
        cleanups.callback(env.close)
        return env

    def _take_steps(self, env: Any, others: list[Any], actions: list[Any], disturbances: tuple[str, ...]) -> dict[str, Any]:
        """Step ``env``, with ``disturbances`` between its steps, and return all its results by name."""
        results: dict[str, Any] = {}
        ended = True
        for number, action in enumerate(actions):
            _reseed(disturbances, number)
            for index, other in enumerate(others):
                try:
                    if number % 7 == 0:
                        other.reset(seed=self._seed + 100 + number + index)
                    other.step(copy.deepcopy(action))
                except Exception as error:
                    if raised_by_handler(error):
                        raise
            _reseed(disturbances, number + 1000)
            if ended:
                result = env.reset(seed=self._seed) if number == 0 else env.reset()
                results[f"reset before step {number}"] = copy.deepcopy(result)
                ended = False
                _reseed(disturbances, number + 2000)
            fields, ended = step_env(env, action)
            self._shared.find_changes()
            results.update((f"step {number}, {field}", value) for field, value in fields.items())
        return results

    def find_difference(self, expected: dict[str, Any], actual: dict[str, Any]) -> str | None:
        """Describe the first difference; return ``None`` if there is none."""
        for (name, value), expected_item in zip(actual.items(), expected.items(), strict=False):
            try:
                assert_identical((name, value), expected_item, name)
            except AssertionError as error:
                return to_one_line(str(error))
        return None if len(actual) == len(expected) else "the number of resets is different"

    def find_causes(self) -> list[str]:
        """Return the causes of a difference between two runs of an environment alone."""
        equal_if_seeded = self.find_difference(self.run(seeded=True), self.run(seeded=True)) is None
        drawn = [description for name, description in GENERATORS.items() if name in self._drawn]
        return drawn if equal_if_seeded and drawn else self.find_changed_attributes()

    def find_changed_attributes(self) -> list[str]:
        """Return the attributes of classes and modules that the environments change in a run with others."""
        self.run(("others",))
        return [name for name in self._shared.find_changes() if not name.endswith("'s global generator")]

    def describe(self, difference: str, causes: list[str], when: str) -> str:
        """Return the error text for a difference."""
        names = ", ".join(causes[:4])
        cause = names or "something outside it (a clock, an unseeded generator)"
        return f"{self._name} is not isolated: its results depend on {cause}. They differ {when}: {difference}"


def _reseed(names: tuple[str, ...], seed: int) -> None:
    """Seed the shared generators that ``names`` contains."""
    torch = torch_generator()
    seed_functions = random.seed, np.random.seed, None if torch is None else torch.manual_seed
    for name, seed_generator in zip(GENERATORS, seed_functions, strict=True):
        if name in names and seed_generator is not None:
            seed_generator(seed)
