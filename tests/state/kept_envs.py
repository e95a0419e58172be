"""Environments that keep state in unusual places, for tests of saving and loading."""

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
    """An environment that adds up its actions, each plus one. An episode ends when the sum exceeds 40."""

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
        return np.array([self.total + self.observation_offset(int(action))], np.float64), 0.5, self.total > 40, False, {}

    def observation_offset(self, action: int) -> float:
        """Return a number that is added to the sum in the observation."""
        return 0.0


class _Noise:
    __slots__ = ("generator",)

    def __init__(self) -> None:
        self.generator = np.random.default_rng(1)


class SlotsEnv(CountingEnv):
    """An environment that keeps a generator in an object with ``__slots__``."""

    def __init__(self) -> None:
        super().__init__()
        self.noise = _Noise()

    def observation_offset(self, action: int) -> float:
        return self.noise.generator.random()


class AddressEnv(CountingEnv):
    """An environment with its ``id()`` in its state. If another one loads that state, its next reset raises."""

    def __init__(self) -> None:
        super().__init__()
        self.names = {id(self): "own"}

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        return super().reset(seed=seed)[0], {"name": self.names[id(self)]}


class ClassStateEnv(CountingEnv):
    """An environment that keeps the last action in an attribute of its class, which all instances share."""

    last_action: ClassVar[int] = 0

    def observation_offset(self, action: int) -> float:
        previous, ClassStateEnv.last_action = ClassStateEnv.last_action, action
        return previous


class ModuleStateEnv(CountingEnv):
    """An environment that counts in a variable of the module, which all instances share."""

    def observation_offset(self, action: int) -> float:
        _SHARED_COUNT[0] += 1
        return _SHARED_COUNT[0]


class GlobalGeneratorEnv(CountingEnv):
    """An environment that draws from NumPy's global generator."""

    def observation_offset(self, action: int) -> float:
        return float(np.random.rand())


class JaxKeysEnv(CountingEnv):
    """An environment with both kinds of JAX keys: typed ones, and arrays of numbers."""

    def __init__(self) -> None:
        import jax

        super().__init__()
        self.jax = jax
        self.draw = jax.jit(lambda key: jax.random.uniform(key, ()))
        self.key, self.raw_key = jax.random.key(1), jax.random.PRNGKey(2)

    def observation_offset(self, action: int) -> float:
        self.key, subkey = self.jax.random.split(self.key)
        self.raw_key, raw_subkey = self.jax.random.split(self.raw_key)
        return float(self.draw(subkey)) + float(self.draw(raw_subkey))


class LibcGeneratorEnv(CountingEnv):
    """An environment that draws from the generator of the C library."""

    def observation_offset(self, action: int) -> float:
        return float(_LIBC.rand() % 1000)


class RarelyVisibleStateEnv(CountingEnv):
    """An environment that keeps the previous action in a closure, and rarely adds it to an observation.

    After a load into another environment, about one observation in ten is wrong.
    """

    def __init__(self) -> None:
        super().__init__()
        previous = 0

        def exchange(action: int) -> int:
            nonlocal previous
            result, previous = previous, action
            return result

        self.exchange = exchange

    def observation_offset(self, action: int) -> float:
        previous = self.exchange(action)
        return previous if self.np_random.random() < 0.15 else 0.0  # both had the same action in one of three cases


class ClosureStateEnv(CountingEnv):
    """An environment that counts steps in a closure."""

    def __init__(self) -> None:
        super().__init__()
        count = 0

        def increment() -> int:
            nonlocal count
            count += 1
            return count

        self.increment = increment

    def observation_offset(self, action: int) -> float:
        return self.increment()


class GeneratorFrameEnv(CountingEnv):
    """An environment that keeps state in the frame of a generator."""

    def __init__(self) -> None:
        super().__init__()
        self.numbers = (number for number in range(10**9))

    def observation_offset(self, action: int) -> float:
        return next(self.numbers)


class _Matrix:
    """A matrix that is compared element by element, like those of SciPy."""

    def __eq__(self, other: object) -> Any:
        return np.ones(2, np.bool_)

    __hash__ = None  # type: ignore[assignment]


class MatrixInfoEnv(CountingEnv):
    """An environment with infos that cannot be compared."""

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        *results, _ = super().step(action)
        return (*results, {"matrix": _Matrix()})  # type: ignore[return-value]


class SocketEnv(CountingEnv):
    """An environment that would keep state at the other end of a socket."""

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

    def observation_offset(self, action: int) -> float:
        return self.factor * action


class GeneratorsEnv(CountingEnv):
    """An environment with random generators of every kind. Two of its parts share one of them."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = np.random.default_rng(np.random.SeedSequence().generate_state(4))  # the entropy is an array
        self.random_state = np.random.RandomState()
        self.python_random = random.Random()
        self.parts = [{"generator": self.generator}, (self.generator, [random.Random()])]

    def observation_offset(self, action: int) -> float:
        child = self.generator.spawn(1)[0] if action == 2 else self.generator
        drawn = child.random() + self.random_state.rand() + self.python_random.random()
        return drawn + self.parts[0]["generator"].random() + self.parts[1][1][0].random()  # type: ignore[index, call-overload]


class EzPickledEnv(CountingEnv, EzPickle):
    """An environment that pickle would rebuild by a call of its constructor, which would lose its state.

    It has a queue, a function, and a part with a reference to the environment.
    """

    def __init__(self, size: int = 3) -> None:
        CountingEnv.__init__(self)
        EzPickle.__init__(self, size)
        self.queue: deque[int] = deque(maxlen=size)
        self.double = lambda number: number * 2
        self.part = Part(self)

    def observation_offset(self, action: int) -> float:
        self.queue.append(self.double(action))
        return sum(self.queue) + self.part.count()


class ArraysEnv(CountingEnv):
    """An environment with arrays of every kind and a NumPy scalar. Three attributes hold the same array."""

    def __init__(self) -> None:
        super().__init__()
        self.sums = np.zeros(3)
        self.alias = self.sums
        self.in_dict = {"sums": (self.sums,)}
        self.fortran = np.zeros((2, 3), order="F")
        self.read_only = np.arange(3.0)
        self.read_only.flags.writeable = False
        self.zero_dim = np.array(7)
        self.structured = np.zeros(2, [("count", "i4"), ("share", "f8")])
        self.big_endian = np.zeros(2, ">i2")
        self.empty = np.zeros((0, 3), np.complex64)
        self.number = np.float32(0.1)

    def observation_offset(self, action: int) -> float:
        self.sums[action] += self.number
        self.fortran[:, action] += 1
        self.zero_dim[...] = self.zero_dim + action
        self.structured["count"] += action
        self.big_endian += 1
        self.number *= np.float32(1.01)
        assert not self.read_only.flags.writeable
        assert self.fortran.flags.f_contiguous
        rest = self.structured["count"].sum() + self.big_endian.sum() + self.fortran.sum() + self.zero_dim + self.empty.size
        return float(self.alias.sum() + self.in_dict["sums"][0].sum() + rest)


class Part(EzPickle):
    """A part with a reference to its environment."""

    def __init__(self, env: EzPickledEnv) -> None:
        EzPickle.__init__(self, env)
        self.env = env
        self.calls = 0

    def count(self) -> int:
        self.calls += 1
        return self.calls + len(self.env.queue)


class SnapshotMethodsEnv(ClosureStateEnv):
    """An environment with state that cannot be captured, and with the two methods that save and restore it."""

    def __init__(self) -> None:
        super().__init__()
        self.numbers = iter(range(10**9))
        self.position = 0

    def observation_offset(self, action: int) -> float:
        self.position += 1
        return next(self.numbers)

    def take_snapshot(self) -> Any:
        return self.total, self.position

    def restore_snapshot(self, state: Any) -> None:
        self.total, self.position = state
        self.numbers = iter(range(self.position, 10**9))


class SwitchingWrapper(gymnasium.Wrapper[Any, Any, Any, Any]):
    """A wrapper of two environments. The reset option ``which`` selects one of them.

    Args:
        env_fn: A function that builds the environments.
        in_list: True if a list holds the environments, false if attributes do.
    """

    def __init__(self, env_fn: Callable[[], Any], in_list: bool) -> None:
        first, second = env_fn(), env_fn()
        if in_list:
            self.candidates = [first, second]
        else:
            self.first, self.second = first, second
        self.in_list = in_list
        super().__init__(first)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        if options is not None:
            candidates = self.candidates if self.in_list else [self.first, self.second]
            self.env = candidates[options["which"]]
        return self.env.reset(seed=seed)
