"""One environment that may begin an episode before a call asks for it, and that moves from row to row.

The caller decides when the reset is made. Its result or error is kept until the row's own step or reset asks for it. So
the step of the row returns what the environment would have returned at that time.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from copy import deepcopy
from typing import Any

import cloudpickle

from vecenv.errors import NotRestorable
from vecenv.link.messages import Failure, Outcome
from vecenv.worker.keeping import SnapshotRows
from vecenv.worker.threads import Said

__all__ = ["SpareRows", "WithAttributes"]


class WithAttributes:
    """Builds an environment and sets what ``set_attr`` has set in all: it may run the episodes of any row.

    Args:
        env_fn: Builds it.
        attributes: Name -> value, pickled, in the order in which they were set. A change applies to what is built next.
    """

    def __init__(self, env_fn: Callable[[], Any], attributes: dict[str, bytes]) -> None:
        self._env_fn, self._attributes = env_fn, attributes

    def __call__(self) -> Any:
        env = self._env_fn()
        for name, value in self._attributes.items():
            env.set_wrapper_attr(name, pickle.loads(value))
        return env

    def __repr__(self) -> str:
        return repr(self._env_fn)

    def keep(self, name: str, value: Any) -> None:
        """This was set in what was built before."""
        blob = cloudpickle.dumps(value)
        self._attributes.pop(name, None)
        self._attributes[name] = blob


class SpareRows(SnapshotRows):
    """As :class:`SnapshotRows`, of one row."""

    _latest = 0  # preparation
    _kept: tuple[int, Said] | None = None
    """The seed of an episode that was begun and not asked for, and what its reset gave."""

    def set_attr(self, seq: int, name: str, values: Sequence[Any]) -> Outcome:
        outcome = super().set_attr(seq, name, values)
        if self.envs[0] is None or not outcome.failures:  # one that failed has it when it is built anew
            for env_fn in self._env_fns:
                if isinstance(env_fn, WithAttributes):
                    env_fn.keep(name, values[0])
        return outcome

    def follow(self, before: SnapshotRows) -> None:
        super().follow(before)
        if isinstance(before, SpareRows):
            self._latest, self._kept = before._latest, before._kept
        if self._kept is not None:
            self._steps[0] = self._step_by_kept

    def save(self, seq: int, ks: Sequence[int]) -> Outcome:
        if self._kept is not None:
            error = NotRestorable("a step that was interrupted has begun its next episode: step first")
            return Outcome(failures=[Failure(self.first, error, fatal=False)])
        return super().save(seq, ks)

    def load(self, seq: int, ks: Sequence[int]) -> Outcome:
        self._kept = None
        return super().load(seq, ks)

    def prepare(self, number: int, seed: int) -> None:
        """Begin an episode ahead of time, unless preparation ``number`` is the latest one."""
        if number == self._latest:
            return
        self._latest = number
        self._used[0] = True
        self._kept = seed, Said(lambda: self._begun(seed))
        self._steps[0] = self._step_by_kept

    def _begun(self, seed: int) -> tuple[Any, Any]:
        """A reset of the environment, which is built anew if it had failed; kept from what it may write into."""
        env = self.envs[0] or self._build(0)
        self._used[0] = True
        with self._turn(0, seed, begins=True):
            observation, info = env.reset(seed=seed)
        self.leave_if_forked()
        return deepcopy(observation), deepcopy(info)

    def _step_by_kept(self, _: Any) -> Any:
        """The step after an episode's end in next-step mode."""
        assert self._kept is not None
        (_, said), self._kept = self._kept, None
        observation, info = said()
        self._steps[0] = self._env(0).step
        return observation, 0.0, False, False, info

    def _reset_same_step(self, k: int, observation: Any, info: Any, out: Outcome) -> tuple[Any, Any]:
        """Only the end of the episode: the caller asks for the next one, in the worker that has begun it."""
        if self._put_final is not None and self._observation_tree is not None and self._observation_tree.exact(observation):
            self._put_final(k, observation)
            self._final[k] = True
            self._dirty = out.columns = True
        else:
            out.finals[self.first + k] = deepcopy(observation)
        return observation, {"final_info": deepcopy(info)}

    def _reset(self, k: int, seed: Any, options: Any) -> tuple[Any, Any]:
        kept, self._kept = self._kept, None
        if kept is not None and options is None and kept[0] == seed:
            answer: tuple[Any, Any] = kept[1]()
            return answer
        return super()._reset(k, seed, options)
