"""``assert_isolated``: does anything that an environment does not hold itself reach its results?

An environment runs alone, and another of its kind does the same while others are stepped between its steps and while the
generators that all code shares are put elsewhere. Where the two differ, they run again with one disturbance at a time, to
tell which it was; what is seen to change in classes and modules is named.
"""

from __future__ import annotations

import copy
import random
import sys
from collections.abc import Callable
from typing import Any, Final

import numpy as np

from vecenv.state.proof import Shared, first_line_of, stepped, timeless
from vecenv.state.snapshots import kind_of
from vecenv.system.uninterrupted import Noted, by_handler
from vecenv.trajectories import STEP_FIELDS, assert_identical

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
    trial = _Trial(env_fn, steps, seed)
    alone = trial.said()
    if (differs := trial.differs(alone, trial.said())) is not None:
        raise AssertionError(trial.text(differs, _again(trial), "a second one, alone, with the same seed and actions"))
    everything = ("others", *_GENERATORS)
    if (differs := trial.differs(alone, trial.said(everything))) is None:
        return
    for one in (*_GENERATORS, "others"):
        if (own := trial.differs(alone, trial.said((one,)))) is not None:
            if one == "others":
                raise AssertionError(trial.text(own, trial.shared(), "beside others of its kind"))
            advice = " (draw from self.np_random, or use generators='own')"
            raise AssertionError(trial.text(own, [_GENERATORS[one]], f"where something else has drawn from it{advice}"))
    raise AssertionError(trial.text(differs, trial.shared(), "beside others, with shared generators put elsewhere"))


def _again(trial: _Trial) -> list[str]:
    """What made one go differently the second time, alone."""
    fixed = trial.differs(trial.said(fixed=True), trial.said(fixed=True)) is None
    drawn = [_GENERATORS[name] for name in trial.drawn()]
    return drawn if fixed and drawn else trial.shared()


class _Trial:
    """Environments that are to do the same."""

    def __init__(self, env_fn: Callable[[], Any], steps: int, seed: int) -> None:
        self._env_fn, self._steps, self._seed = env_fn, steps, seed
        self._name = ""
        self._shared: Shared | None = None
        self._drawn: set[str] = set()

    def said(self, disturbances: tuple[str, ...] = (), *, fixed: bool = False) -> dict[str, Any]:
        """What one says, while ``disturbances`` happen between its steps; ``fixed``: shared generators are seeded before."""
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
                return self._recorded(envs[0], envs[1:], [space.sample() for _ in range(self._steps)], disturbances)
        finally:
            ended = _states()
            self._drawn |= {name for name in kept if repr(began[name]) != repr(ended[name])}
            _put_back(kept)
            for env in envs:
                env.close()

    def _recorded(self, env: Any, others: list[Any], actions: list[Any], disturbances: tuple[str, ...]) -> dict[str, Any]:
        said: dict[str, Any] = {}
        elsewhere = tuple(name for name in _GENERATORS if name in disturbances)
        over = True
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
            if over:
                answer = env.reset(seed=self._seed) if number == 0 else env.reset()
                said[f"reset before step {number}"] = copy.deepcopy(answer)
                over = False
                _put_elsewhere(elsewhere, number + 2000)
            step = stepped(env, action)
            if self._shared is not None:
                self._shared.look()
            parts = zip(("exception",) if len(step) == 1 else STEP_FIELDS, timeless(step), strict=True)
            said.update((f"step {number}, {field}", copy.deepcopy(value)) for field, value in parts)
            over = len(step) == 1 or bool(step[2] or step[3])
        return said

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
        self.said(("others",))
        assert self._shared is not None
        return [name for name in self._shared.look() if "generator" not in name.partition(".")[0]]

    def text(self, differs: str, what: list[str], when: str) -> str:
        reasons = ", ".join(what[:4])
        cause = f"{reasons or 'something outside (a clock, an unseeded generator)'} reaches its results"
        return f"{self._name} is not isolated: {cause}. It goes differently {when}: {differs}"


def _torch() -> Any:
    return getattr(sys.modules.get("torch"), "default_generator", None)


def _states() -> dict[str, Any]:
    numbers: Any = np.random.get_state(legacy=False)
    numbers["state"] = {name: np.asarray(value).tolist() for name, value in numbers["state"].items()}
    torch = _torch()
    return {"random": random.getstate(), "numpy": numbers, "torch": None if torch is None else torch.get_state().tolist()}


def _put_back(states: dict[str, Any]) -> None:
    random.setstate(states["random"])
    numbers = states["numpy"]
    key = {name: np.asarray(value, np.uint32) if name == "key" else value for name, value in numbers["state"].items()}
    np.random.set_state({**numbers, "state": key})
    if states["torch"] is not None:
        torch = sys.modules["torch"]
        torch.default_generator.set_state(torch.tensor(states["torch"], dtype=torch.uint8))


def _put_elsewhere(names: tuple[str, ...], seed: int) -> None:
    if "random" in names:
        random.seed(seed)
    if "numpy" in names:
        np.random.seed(seed)
    if "torch" in names and (torch := _torch()) is not None:
        torch.manual_seed(seed)
