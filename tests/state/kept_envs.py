"""Environments that keep their state in unusual places, for the tests of saving and loading."""

from __future__ import annotations

import ctypes
import random
import socket
from collections import deque
from collections.abc import Callable
from typing import Any, ClassVar

import gymnasium
import numpy as np
from gymnasium.utils import EzPickle

_LIBC = ctypes.CDLL(None)
_DRAWN = [0]


class Counts(gymnasium.Env[Any, Any]):
    """An environment that counts actions; an episode ends at forty."""

    observation_space = gymnasium.spaces.Box(-1e12, 1e12, (1,), np.float64)

    def __init__(self) -> None:
        self.action_space = gymnasium.spaces.Discrete(3)
        self.total = 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.total = 0
        return np.array([0.0]), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.total += int(action) + 1
        return np.array([self.total + self.more(int(action))], np.float64), 0.5, self.total > 40, False, {}

    def more(self, action: int) -> float:
        """Return what a subclass adds to the count."""
        return 0.0


class ByClass(Counts):
    """Environments that share an attribute of their class."""

    last: ClassVar[int] = 0

    def more(self, action: int) -> float:
        before, ByClass.last = ByClass.last, action
        return before


class ByModule(Counts):
    """Environments that share a counter of the module."""

    def more(self, action: int) -> float:
        _DRAWN[0] += 1
        return _DRAWN[0]


class ByGlobalGenerator(Counts):
    """Environments that share numpy's generator."""

    def more(self, action: int) -> float:
        return float(np.random.rand())


class JaxKeys(Counts):
    """An environment that draws from both kinds of JAX keys."""

    def __init__(self) -> None:
        import jax

        super().__init__()
        self.jax = jax
        self.draw = jax.jit(lambda key: jax.random.uniform(key, ()))
        self.key, self.raw = jax.random.key(1), jax.random.PRNGKey(2)

    def more(self, action: int) -> float:
        self.key, one = self.jax.random.split(self.key)
        self.raw, other = self.jax.random.split(self.raw)
        return float(self.draw(one)) + float(self.draw(other))


class InC(Counts):
    """An environment with a counter in a library's memory."""

    def more(self, action: int) -> float:
        return float(_LIBC.rand() % 1000)


class Sticky(Counts):
    """An environment that keeps the previous action in a function's memory, and uses it in one step of ten."""

    def __init__(self) -> None:
        super().__init__()
        before = 0

        def sticks(action: int) -> int:
            nonlocal before
            shown, before = before, action
            return shown

        self.sticks = sticks

    def more(self, action: int) -> float:
        shown = self.sticks(action)
        return shown if self.np_random.random() < 0.15 else 0.0  # in two of three cases another one: one of ten


class InClosure(Counts):
    """An environment with a counter in a closure."""

    def __init__(self) -> None:
        super().__init__()
        count = 0

        def tick() -> int:
            nonlocal count
            count += 1
            return count

        self.tick = tick

    def more(self, action: int) -> float:
        return self.tick()


class InFrame(Counts):
    """An environment with a running generator function."""

    def __init__(self) -> None:
        super().__init__()
        self.numbers = (number for number in range(10**9))

    def more(self, action: int) -> float:
        return next(self.numbers)


class OverSocket(Counts):
    """An environment with its state at the other end of a socket."""

    def __init__(self) -> None:
        super().__init__()
        self.line = socket.socket()

    def close(self) -> None:
        self.line.close()


class Built(Counts):
    """An environment with a constructor that draws from global generators."""

    def __init__(self) -> None:
        super().__init__()
        self.factor = random.random()

    def more(self, action: int) -> float:
        return self.factor * action


class Generators(Counts):
    """An environment with generators of every kind, one of which two of its parts share."""

    def __init__(self) -> None:
        super().__init__()
        self.new = np.random.default_rng()
        self.old = np.random.RandomState()
        self.pythons = random.Random()
        self.parts = [{"draws": self.new}, (self.new, [random.Random()])]

    def more(self, action: int) -> float:
        child = self.new.spawn(1)[0] if action == 2 else self.new
        drawn = child.random() + self.old.rand() + self.pythons.random()
        return drawn + self.parts[0]["draws"].random() + self.parts[1][1][0].random()  # type: ignore[index, call-overload]


class Stepwise(Counts, EzPickle):
    """An environment that pickle would rebuild; it holds a queue, functions, and a part that refers back to it."""

    def __init__(self, size: int = 3) -> None:
        Counts.__init__(self)
        EzPickle.__init__(self, size)
        self.queue: deque[int] = deque(maxlen=size)
        self.rule = lambda number: number * 2
        self.part = Part(self)

    def more(self, action: int) -> float:
        self.queue.append(self.rule(action))
        return sum(self.queue) + self.part.seen()


class Arrays(Counts):
    """An environment with arrays of every kind, one of them under three names, and numpy scalars."""

    def __init__(self) -> None:
        super().__init__()
        self.sums = np.zeros(3)
        self.same = self.sums
        self.held = {"sums": (self.sums,)}
        self.turned = np.zeros((2, 3), order="F")
        self.fixed = np.arange(3.0)
        self.fixed.flags.writeable = False
        self.single = np.array(7)
        self.named = np.zeros(2, [("count", "i4"), ("share", "f8")])
        self.big_end = np.zeros(2, ">i2")
        self.none = np.zeros((0, 3), np.complex64)
        self.number = np.float32(0.1)

    def more(self, action: int) -> float:
        self.sums[action] += self.number
        self.turned[:, action] += 1
        self.single[...] = self.single + action
        self.named["count"] += action
        self.big_end += 1
        self.number *= np.float32(1.01)
        assert not self.fixed.flags.writeable
        assert self.turned.flags.f_contiguous
        whole = self.named["count"].sum() + self.big_end.sum() + self.turned.sum() + self.single + self.none.size
        return float(self.same.sum() + self.held["sums"][0].sum() + whole)


class Part(EzPickle):
    """A part with a reference to its environment."""

    def __init__(self, env: Stepwise) -> None:
        EzPickle.__init__(self, env)
        self.env = env
        self.looks = 0

    def seen(self) -> int:
        self.looks += 1
        return self.looks + len(self.env.queue)


class Offers(InClosure):
    """An environment with hidden state, which it offers by the pair of methods."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden = iter(range(10**9))
        self.place = 0

    def more(self, action: int) -> float:
        self.place += 1
        return next(self.hidden)

    def take_snapshot(self) -> Any:
        """Return the state."""
        return self.total, self.place

    def restore_snapshot(self, state: Any) -> None:
        """Continue from a state."""
        self.total, self.place = state
        self.hidden = iter(range(self.place, 10**9))


class Switches(gymnasium.Wrapper[Any, Any, Any, Any]):
    """A wrapper that selects one of two environments in its reset, by an option; without it, the current one remains.

    Args:
        make: A function that builds the environments.
        in_list: Keep them in a list, not in attributes.
    """

    def __init__(self, make: Callable[[], Any], in_list: bool) -> None:
        first, second = make(), make()
        if in_list:
            self.inner = [first, second]
        else:
            self.first, self.second = first, second
        self.in_list = in_list
        super().__init__(first)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        if options is not None:
            self.env = self.inner[options["which"]] if self.in_list else (self.first, self.second)[options["which"]]
        return self.env.reset(seed=seed)
