"""``assert_isolated`` checks that nothing outside an environment reaches its results.

An environment runs alone, and another of its kind does the same while others are stepped between its steps and while the
generators that all code shares are put elsewhere. Where the two differ, they run again with one disturbance at a time, to
tell which it was; what is seen to change in classes and modules is named.
"""

from __future__ import annotations

import copy
import pickle
import random
import sys
from collections.abc import Callable
from typing import Any, Final

import numpy as np

from vecenv.state.proof import Shared, first_line_of, stepped
from vecenv.state.snapshots import kind_of
from vecenv.system.uninterrupted import Noted, by_handler
from vecenv.trajectories import assert_identical

__all__ = ["assert_isolated"]

_GENERATORS: Final = {
    "random": "the generator of Python's module random",
    "numpy": "numpy.random's global generator",
    "torch": "torch's default generator",
}


def assert_isolated(env_fn: Callable[[], Any], *, steps: int = 64, seed: int = 0) -> None:
    """Assert that environments of a kind do not reach each other, and draw from nothing but generators of their own.

    What passes says the same for the same seeds, whatever is beside it in its process. What does not draw in ``steps`` steps
    with random actions passes, too. The shared generators are left as they were.

    Args:
        env_fn: Builds the environment; called some times.
        steps: How many, resets at the ends of episodes included.
        seed: Of the first reset, and of actions.

    Raises:
        AssertionError: Its results depend on something outside: names the generator, the attribute of a class or module, and
            what differs first.
    """
    runs = _Comparison(env_fn, steps, seed)
    alone = runs.results()
    if (differs := runs.differs(alone, runs.results())) is not None:
        raise AssertionError(runs.text(differs, _again(runs), "a second one, alone, with the same seed and actions"))
    everything = ("others", *_GENERATORS)
    if (differs := runs.differs(alone, runs.results(everything))) is None:
        return
    for one in (*_GENERATORS, "others"):
        if (own := runs.differs(alone, runs.results((one,)))) is not None:
            if one == "others":
                raise AssertionError(runs.text(own, runs.shared(), "beside others of its kind"))
            advice = " (draw from self.np_random, or use generators='own')"
            raise AssertionError(runs.text(own, [_GENERATORS[one]], f"where something else has drawn from it{advice}"))
    raise AssertionError(runs.text(differs, runs.shared(), "beside others, with shared generators put elsewhere"))


def _again(runs: _Comparison) -> list[str]:
    """What made one go differently the second time, alone."""
    fixed = runs.differs(runs.results(fixed=True), runs.results(fixed=True)) is None
    drawn = [_GENERATORS[name] for name in runs.drawn()]
    return drawn if fixed and drawn else runs.shared()


class _Comparison:
    """Environments that are to do the same."""

    def __init__(self, env_fn: Callable[[], Any], steps: int, seed: int) -> None:
        self._env_fn, self._steps, self._seed = env_fn, steps, seed
        self._name = ""
        self._shared: Shared
        self._drawn: set[str] = set()

    def results(self, disturbances: tuple[str, ...] = (), *, fixed: bool = False) -> dict[str, Any]:
        """The results of one run with ``disturbances`` between its steps; ``fixed``: shared generators are seeded first."""
        kept = _states()
        if fixed:
            _put_elsewhere(tuple(_GENERATORS), 0)
        began = _states()
        envs = [self._env_fn()]
        try:
            self._name = kind_of(envs[0]).env_id
            self._shared = Shared(envs[0])
            space = copy.deepcopy(envs[0].action_space)
            space.seed(self._seed)
            if "others" in disturbances:
                envs += [self._env_fn(), self._env_fn()]
            with Noted():
                return self._run(envs[0], envs[1:], [space.sample() for _ in range(self._steps)], disturbances)
        finally:
            ended = _states()
            self._drawn |= {name for name in kept if began[name] != ended[name]}
            _put_back(kept)
            for env in envs:
                env.close()

    def _run(self, env: Any, others: list[Any], actions: list[Any], disturbances: tuple[str, ...]) -> dict[str, Any]:
        results: dict[str, Any] = {}
        elsewhere = tuple(name for name in _GENERATORS if name in disturbances)
        ended = True
        for number, action in enumerate(actions):
            _put_elsewhere(elsewhere, number)
            for place, other in enumerate(others):
                try:
                    if number % 7 == 0:
                        other.reset(seed=self._seed + 100 + number + place)
                    other.step(copy.deepcopy(action))
                except Exception as error:
                    if by_handler(error):
                        raise
            _put_elsewhere(elsewhere, number + 1000)
            if ended:
                answer = env.reset(seed=self._seed) if number == 0 else env.reset()
                results[f"reset before step {number}"] = copy.deepcopy(answer)
                ended = False
                _put_elsewhere(elsewhere, number + 2000)
            fields, ended = stepped(env, action)
            self._shared.look()
            results.update((f"step {number}, {field}", value) for field, value in fields.items())
        return results

    def differs(self, one: dict[str, Any], other: dict[str, Any]) -> str | None:
        """What differs first; ``None``: nothing."""
        try:
            assert_identical(list(other.items()), list(one.items()), "it")
        except AssertionError:
            for (name, value), (same, wanted) in zip(other.items(), one.items(), strict=False):
                try:
                    assert_identical((name, value), (same, wanted), name)
                except AssertionError as error:
                    return first_line_of(str(error))
            return "it makes another number of resets"
        return None

    def drawn(self) -> list[str]:
        """The shared generators that were drawn from or seeded."""
        return [name for name in _GENERATORS if name in self._drawn]

    def shared(self) -> list[str]:
        """What environments of this kind are seen to change outside of themselves."""
        self.results(("others",))
        return [name for name in self._shared.look() if "generator" not in name.partition(".")[0]]

    def text(self, differs: str, what: list[str], when: str) -> str:
        reasons = ", ".join(what[:4])
        cause = f"{reasons or 'something outside (a clock, an unseeded generator)'} reaches its results"
        return f"{self._name} is not isolated: {cause}. It goes differently {when}: {differs}"


def _torch() -> Any:
    return getattr(sys.modules.get("torch"), "default_generator", None)


def _states() -> dict[str, bytes]:
    """The shared generators' states, as bytes that can be compared."""
    torch = _torch()
    states = random.getstate(), np.random.get_state(legacy=False), None if torch is None else torch.get_state().numpy()
    return {name: pickle.dumps(state) for name, state in zip(_GENERATORS, states, strict=True)}


def _put_back(states: dict[str, bytes]) -> None:
    numbers, normals, torchs = (pickle.loads(state) for state in states.values())
    random.setstate(numbers)
    np.random.set_state(normals)
    if torchs is not None:
        _torch().set_state(sys.modules["torch"].from_numpy(torchs))


def _put_elsewhere(names: tuple[str, ...], seed: int) -> None:
    torch = _torch()
    seeds = random.seed, np.random.seed, None if torch is None else torch.manual_seed
    for name, put in zip(_GENERATORS, seeds, strict=True):
        if name in names and put is not None:
            put(seed)
