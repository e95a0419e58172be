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
_SHARED_COUNT = [0]


class CountingEnv(gymnasium.Env[Any, Any]):
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
        return np.array([self.total + self.extra(int(action))], np.float64), 0.5, self.total > 40, False, {}

    def extra(self, action: int) -> float:
        """Return the number that is added to the count in the observation."""
        return 0.0


class _Noise:
    __slots__ = ("generator",)

    def __init__(self) -> None:
        self.generator = np.random.default_rng(1)


class SlotsEnv(CountingEnv):
    """An environment with a generator in an object with ``__slots__``."""

    def __init__(self) -> None:
        super().__init__()
        self.noise = _Noise()

    def extra(self, action: int) -> float:
        return self.noise.generator.random()


class AddressEnv(CountingEnv):
    """An environment with addresses in its state: in another one, a reset raises after a load."""

    def __init__(self) -> None:
        super().__init__()
        self.names = {id(self): "own"}

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        return super().reset(seed=seed)[0], {"name": self.names[id(self)]}


class StateInClass(CountingEnv):
    """Environments that share an attribute of their class."""

    last: ClassVar[int] = 0

    def extra(self, action: int) -> float:
        previous, StateInClass.last = StateInClass.last, action
        return previous


class StateInModule(CountingEnv):
    """Environments that share a counter of the module."""

    def extra(self, action: int) -> float:
        _SHARED_COUNT[0] += 1
        return _SHARED_COUNT[0]


class StateInGlobalGenerator(CountingEnv):
    """Environments that share numpy's generator."""

    def extra(self, action: int) -> float:
        return float(np.random.rand())


class JaxKeysEnv(CountingEnv):
    """An environment that draws from both kinds of JAX keys."""

    def __init__(self) -> None:
        import jax

        super().__init__()
        self.jax = jax
        self.draw = jax.jit(lambda key: jax.random.uniform(key, ()))
        self.key, self.raw = jax.random.key(1), jax.random.PRNGKey(2)

    def extra(self, action: int) -> float:
        self.key, subkey = self.jax.random.split(self.key)
        self.raw, raw_subkey = self.jax.random.split(self.raw)
        return float(self.draw(subkey)) + float(self.draw(raw_subkey))


class StateInLibc(CountingEnv):
    """An environment that draws from the generator of the C library."""

    def extra(self, action: int) -> float:
        return float(_LIBC.rand() % 1000)


class RarelyShownState(CountingEnv):
    """An environment with the previous action in a closure, which changes about one observation in ten."""

    def __init__(self) -> None:
        super().__init__()
        previous = 0

        def exchange(action: int) -> int:
            nonlocal previous
            result, previous = previous, action
            return result

        self.exchange = exchange

    def extra(self, action: int) -> float:
        previous = self.exchange(action)
        return previous if self.np_random.random() < 0.15 else 0.0  # it is another action in two of three cases


class StateInClosure(CountingEnv):
    """An environment with a counter in a closure."""

    def __init__(self) -> None:
        super().__init__()
        count = 0

        def tick() -> int:
            nonlocal count
            count += 1
            return count

        self.tick = tick

    def extra(self, action: int) -> float:
        return self.tick()


class StateInGeneratorFrame(CountingEnv):
    """An environment with its state in the frame of a running generator."""

    def __init__(self) -> None:
        super().__init__()
        self.numbers = (number for number in range(10**9))

    def extra(self, action: int) -> float:
        return next(self.numbers)


class StateBehindSocket(CountingEnv):
    """An environment with its state at the other end of a socket."""

    def __init__(self) -> None:
        super().__init__()
        self.connection = socket.socket()

    def close(self) -> None:
        self.connection.close()


class RandomConstructorEnv(CountingEnv):
    """An environment with a constructor that draws from the global generator of ``random``."""

    def __init__(self) -> None:
        super().__init__()
        self.factor = random.random()

    def extra(self, action: int) -> float:
        return self.factor * action


class GeneratorsEnv(CountingEnv):
    """An environment with generators of every kind, one of which two of its parts share."""

    def __init__(self) -> None:
        super().__init__()
        self.new = np.random.default_rng(np.random.SeedSequence().generate_state(4))  # the entropy is an array
        self.old = np.random.RandomState()
        self.python = random.Random()
        self.parts = [{"draws": self.new}, (self.new, [random.Random()])]

    def extra(self, action: int) -> float:
        child = self.new.spawn(1)[0] if action == 2 else self.new
        drawn = child.random() + self.old.rand() + self.python.random()
        return drawn + self.parts[0]["draws"].random() + self.parts[1][1][0].random()  # type: ignore[index, call-overload]


class EzPickledEnv(CountingEnv, EzPickle):
    """An environment that pickle would rebuild by its constructor, with a queue, a function and a part that refers to it."""

    def __init__(self, size: int = 3) -> None:
        CountingEnv.__init__(self)
        EzPickle.__init__(self, size)
        self.queue: deque[int] = deque(maxlen=size)
        self.double = lambda number: number * 2
        self.part = Part(self)

    def extra(self, action: int) -> float:
        self.queue.append(self.double(action))
        return sum(self.queue) + self.part.count()


class ArraysEnv(CountingEnv):
    """An environment with arrays of every kind, one of them in three attributes, and a numpy scalar."""

    def __init__(self) -> None:
        super().__init__()
        self.sums = np.zeros(3)
        self.same = self.sums
        self.in_dict = {"sums": (self.sums,)}
        self.fortran = np.zeros((2, 3), order="F")
        self.read_only = np.arange(3.0)
        self.read_only.flags.writeable = False
        self.zero_dim = np.array(7)
        self.structured = np.zeros(2, [("count", "i4"), ("share", "f8")])
        self.big_endian = np.zeros(2, ">i2")
        self.empty = np.zeros((0, 3), np.complex64)
        self.number = np.float32(0.1)

    def extra(self, action: int) -> float:
        self.sums[action] += self.number
        self.fortran[:, action] += 1
        self.zero_dim[...] = self.zero_dim + action
        self.structured["count"] += action
        self.big_endian += 1
        self.number *= np.float32(1.01)
        assert not self.read_only.flags.writeable
        assert self.fortran.flags.f_contiguous
        rest = self.structured["count"].sum() + self.big_endian.sum() + self.fortran.sum() + self.zero_dim + self.empty.size
        return float(self.same.sum() + self.in_dict["sums"][0].sum() + rest)


class Part(EzPickle):
    """A part with a reference to its environment."""

    def __init__(self, env: EzPickledEnv) -> None:
        EzPickle.__init__(self, env)
        self.env = env
        self.calls = 0

    def count(self) -> int:
        self.calls += 1
        return self.calls + len(self.env.queue)


class SnapshotMethodsEnv(StateInClosure):
    """An environment with hidden state, and with the two methods that save and restore it."""

    def __init__(self) -> None:
        super().__init__()
        self.numbers = iter(range(10**9))
        self.position = 0

    def extra(self, action: int) -> float:
        self.position += 1
        return next(self.numbers)

    def take_snapshot(self) -> Any:
        """Return the state."""
        return self.total, self.position

    def restore_snapshot(self, state: Any) -> None:
        """Continue from a state."""
        self.total, self.position = state
        self.numbers = iter(range(self.position, 10**9))


class SwitchingWrapper(gymnasium.Wrapper[Any, Any, Any, Any]):
    """A wrapper of two environments. A reset with the option ``which`` selects one of them.

    Args:
        make: A function that builds the environments.
        in_list: Keep the environments in a list, not in attributes.
    """

    def __init__(self, make: Callable[[], Any], in_list: bool) -> None:
        first, second = make(), make()
        if in_list:
            self.candidates = [first, second]
        else:
            self.first, self.second = first, second
        self.in_list = in_list
        super().__init__(first)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        if options is not None:
            self.env = self.candidates[options["which"]] if self.in_list else (self.first, self.second)[options["which"]]
        return self.env.reset(seed=seed)
