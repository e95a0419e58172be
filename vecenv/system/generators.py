"""Gives each environment its own states of the random generators that all code in a process shares.

The results of an environment that draws from ``random``, ``numpy.random`` or torch's default generator depend on the other
environments in its process. :mod:`vecenv.link.own_generators` wraps an environment and swaps its states in for each call
to it. Most environments never draw, and some steps take only 5 us, so a call must cost little more than two assignments
until the first draw:

- numpy takes the lock of its bit generator before it draws, seeds, or reads its state. Until then a *trap* replaces the bit
  generator. Taking the trap's lock installs the environment's own bit generator for the rest of the call.
- ``random``'s functions are methods of one hidden object. Its class is replaced by one that delegates to the environment's
  own ``random.Random``; the two functions written in C are replaced in all modules that have imported them.
- torch offers no such hook. If it has been imported, its state is swapped whenever another environment is called.

A signal handler may raise after any call and at any jump (see :mod:`vecenv.front.guard`). So numpy, ``random`` and torch are
changed only inside :func:`~vecenv.system.signals.deferred_signals` (except by :func:`begin_worker`), and a change that a
handler prevented is repeated.
"""

from __future__ import annotations

import _random
import hashlib
import operator
import random
import secrets
import sys
from collections.abc import Callable
from typing import Any, Final, Literal, TypeAlias

import numpy as np

from vecenv.system.shared_generators import seed_process, torch_generator, torch_state
from vecenv.system.signals import deferred_signals

GeneratorsOption: TypeAlias = Literal["shared", "own"]

_NUMPY: Final[Any] = np.random
_HIDDEN_RANDOM: Final[Any] = random._inst  # the functions of ``random`` are its methods
_GET_BIT_GENERATOR: Final[Any] = _NUMPY.get_bit_generator  # may return the trap; its replacement in numpy.random never does
_WRITTEN_IN_C: Final = {"random": random.random, "getrandbits": random.getrandbits}
is_imported: Final = sys.modules.__contains__


class Generators:
    """The generator states of one environment. Each state is created when it is first needed.

    Attributes:
        entropy: The source of the states until a reset has a seed.
        seed: The seed of the latest reset that had one.
        episode: The number of resets after that one.
        numpy: The bit generator.
        gauss: The second of a pair of normal numbers, which ``RandomState`` keeps for the next draw of one.
        python: The ``random.Random`` that replaces the generator of ``random``.
        torch: The state of torch's default generator.
    """

    __slots__ = ("entropy", "episode", "gauss", "numpy", "python", "seed", "torch")

    def __init__(self) -> None:
        self.entropy = secrets.randbits(128)
        self.seed: int | None = None
        self.episode = 0
        self._clear()

    def _clear(self) -> None:
        self.numpy: Any = None
        self.gauss: float | None = None
        self.python: random.Random | None = None
        self.torch: bytes | None = None

    def begin(self, seed: Any) -> None:
        """Begin the episode of a reset with this seed.

        Without a seed, the states are derived from the latest seed and the number of resets since. If no reset has had a
        seed, they are kept, because the environment may have seeded the generators itself.
        """
        if seed is not None:
            self.seed, self.episode = _seed_as_int(seed), 0
        elif self.seed is not None:
            self.episode += 1
        else:
            return
        switch.swap_out(self)
        self._clear()

    def _sequence(self, number: int) -> np.random.SeedSequence:
        return np.random.SeedSequence(self.entropy if self.seed is None else self.seed, spawn_key=(self.episode, number))

    def _integer(self, number: int) -> int:
        return int.from_bytes(self._sequence(number).generate_state(4).tobytes(), "little")

    def get_bit_generator(self) -> Any:
        """Return the bit generator; create it if there is none."""
        self.numpy = self.numpy or _BitGenerator(self._sequence(0))
        return self.numpy

    def get_python(self) -> random.Random:
        """Return the generator that ``random`` draws from; create it if there is none."""
        self.python = self.python or random.Random(self._integer(1))
        return self.python

    def _initial_torch_state(self) -> bytes:
        return torch_state(sys.modules["torch"].Generator().manual_seed(self._integer(2) >> 65))

    def set_torch_state(self, generator: Any) -> None:
        """Set torch's ``generator`` to the stored state, which is created if there is none."""
        state = self._initial_torch_state() if self.torch is None else self.torch
        generator.set_state(sys.modules["torch"].frombuffer(bytearray(state), dtype=sys.modules["torch"].uint8))

    def state(self) -> dict[str, Any]:
        """Return all states, for pickling."""
        switch.swap_out(self)
        return {
            "entropy": self.entropy, "seed": self.seed, "episode": self.episode, "gauss": self.gauss,
            "numpy": None if self.numpy is None else self.numpy.state,
            "python": None if self.python is None else self.python.getstate(),
            "torch": None if self.torch is None or self.torch == self._initial_torch_state() else self.torch,
        }  # fmt: skip

    def load(self, state: dict[str, Any]) -> None:
        """Restore the states that :meth:`state` returned."""
        switch.swap_out(self)
        self._clear()
        self.entropy, self.seed, self.episode = state["entropy"], state["seed"], state["episode"]
        if state["numpy"] is not None:
            kind = state["numpy"]["bit_generator"]
            self.numpy = _BitGenerator(0) if kind == "MT19937" else getattr(np.random, kind)(0)
            self.numpy.state = state["numpy"]
        self.gauss, self.torch = state["gauss"], state["torch"]
        if state["python"] is not None:
            self.python = random.Random(0)
            self.python.setstate(state["python"])


def _seed_as_int(seed: Any) -> int:
    try:
        return abs(operator.index(seed))
    except TypeError:  # only the environment can interpret it
        return int.from_bytes(hashlib.sha256(repr(seed).encode()).digest(), "little")


# -- numpy's bit generator and its trap ------------------------------------------------------------------------------------


class _BitGenerator(np.random.MT19937):
    """The kind of bit generator that ``numpy.random``'s functions use by default.

    While ``brief`` is True, ``RandomState`` reads and writes only ``gauss`` and ``has_gauss``, not the rest of the state,
    which saves 0.1 ms.
    """

    brief = False

    @property
    def state(self) -> Any:
        return {"bit_generator": "MT19937", "state": {}} if _BitGenerator.brief else np.random.MT19937.state.__get__(self)

    @state.setter
    def state(self, value: Any) -> None:
        if not _BitGenerator.brief:
            np.random.MT19937.state.__set__(self, value)  # type: ignore[attr-defined]


_BitGenerator.__name__ = "MT19937"  # numpy compares it with the name in a state


def _access_gauss(new: float | None = None) -> float | None:
    """Set the normal number that the global ``RandomState`` keeps for the next draw to ``new``, if given, and return it."""
    _BitGenerator.brief = isinstance(_GET_BIT_GENERATOR(), _BitGenerator)
    try:
        if new is not None:
            _NUMPY.set_state({**_NUMPY.get_state(legacy=False), "has_gauss": 1, "gauss": new})
        state: Any = _NUMPY.get_state(legacy=False)
    finally:
        _BitGenerator.brief = False
    return state["gauss"] if state["has_gauss"] else None


class _Trap(np.random.MT19937):
    """A replacement for the bit generator until the first draw. It is also its own lock, which ``RandomState`` takes first.

    Some versions of numpy take no lock for some operations; these use ``state`` and ``_legacy_seeding`` instead.
    """

    def __init__(self) -> None:
        super().__init__(0)
        self._held_locks: list[Any] = []
        self._is_being_set = False  # True while numpy sets a bit generator, for which it takes the lock

    def set_bit_generator(self, bit_generator: Any, gauss: float | None = None) -> None:
        """Make numpy use this bit generator, or the trap. ``gauss``, if given, becomes its next normal number."""
        self._is_being_set = True
        try:
            _NUMPY.set_bit_generator(bit_generator)
        finally:
            self._is_being_set = False
        if gauss is not None:
            _access_gauss(gauss)

    @property
    def lock(self) -> Any:  # type: ignore[override]
        return self

    def acquire(self, *_: Any) -> bool:
        if self._is_being_set:
            return True
        num_held = len(self._held_locks)
        try:
            with deferred_signals():
                lock = switch.activate_numpy().lock
                lock.acquire()
                self._held_locks.append(lock)
        except BaseException:
            if len(self._held_locks) > num_held:
                self.release()
            raise
        return True

    def release(self) -> None:
        if not self._is_being_set:
            self._held_locks.pop().release()

    __enter__ = acquire

    def __exit__(self, *_: object) -> None:
        self.release()

    def active_bit_generator(self) -> Any:
        """Return the active bit generator. This method replaces ``numpy.random.get_bit_generator``."""
        with deferred_signals():
            return switch.activate_numpy()

    @property
    def state(self) -> Any:
        return self.active_bit_generator().state

    @state.setter
    def state(self, value: Any) -> None:
        self.active_bit_generator()
        _NUMPY.set_state(value)

    def _legacy_seeding(self, seed: Any) -> None:
        self.active_bit_generator()._legacy_seeding(seed)

    def __reduce__(self) -> Any:  # a copy of numpy's global RandomState draws from a copy of the active bit generator
        return self.active_bit_generator().__reduce__()


# -- the functions of random ------------------------------------------------------------------------------------------------


class _DelegatingBase(_random.Random):
    """The methods of ``random.Random`` written in C, delegated to the active generators."""


def _delegate(method: Callable[..., Any]) -> Callable[..., Any]:
    return lambda self, *args: method(switch.python(), *args)


for _name in ("random", "getrandbits", "seed", "getstate", "setstate"):
    setattr(_DelegatingBase, _name, _delegate(getattr(_random.Random, _name)))


class _DelegatingRandom(random.Random, _DelegatingBase):  # in this order, so that random.Random calls _DelegatingBase
    """The class of the hidden object of ``random`` while traps are set."""

    def __reduce__(self) -> Any:  # a copy draws from a generator of its own
        return random.Random, (), self.getstate()

    @property
    def gauss_next(self) -> Any:
        return vars(switch.python())["gauss_next"]

    @gauss_next.setter
    def gauss_next(self, value: Any) -> None:
        vars(switch.python())["gauss_next"] = value


# -- the process ------------------------------------------------------------------------------------------------------------


class _Switch:
    """The generator states of this process.

    All attributes except ``active`` are changed inside ``deferred_signals``, except by :func:`begin_worker`.

    Attributes:
        outside: The process's own states. (That of ``random`` stays in the hidden object.)
        active: The states to draw from.
        skip_restoring: States that are not swapped back in after a call. In a worker, where only environments draw, these
            are ``outside``: an environment's states stay in place until another one is called. ``None`` elsewhere.
        numpy_owner: The owner of the active numpy state; ``None`` while the trap is set, and without users.
        torch_owner: The owner of the active torch state; ``None`` once that state has been stored in its owner.
        in_use: If False, the trap is set and torch has the process's own state, or there are no users.
        original: The process's bit generator before the traps were set.
        trap: The trap; ``None`` without users.
        users: The states of the environments for which traps are set.
        replaced: (namespace of a module, name, function written in C) of each replaced reference.
    """

    __slots__ = (
        "active", "in_use", "numpy_owner", "original", "outside", "replaced", "skip_restoring", "torch_owner", "trap",
        "users",
    )  # fmt: skip

    def __init__(self) -> None:
        self.active = self.outside = Generators()
        self.skip_restoring: Generators | None = None
        self.numpy_owner: Generators | None = None
        self.torch_owner: Generators | None = self.outside
        self.in_use = False
        self.original: Any = None
        self.trap: Any = None
        self.users: set[Generators] = set()
        self.replaced: list[tuple[dict[str, Any], str, Any]] = []

    def activate_numpy(self) -> Any:
        """Replace the trap by the bit generator of the active states, and return it."""
        if self.trap is not None and self.numpy_owner is None:
            self.in_use = True
            self.numpy_owner = self.active
            self.trap.set_bit_generator(self.active.get_bit_generator(), self.active.gauss)
        return _GET_BIT_GENERATOR()

    def python(self) -> Any:
        """Return the generator that ``random`` draws from."""
        return _HIDDEN_RANDOM if self.active is self.outside else self.active.get_python()

    def swap_in(self, states: Generators) -> None:
        """Activate ``states``: torch's state, and numpy's bit generator or the trap."""
        numpy_differs = self.numpy_owner is not None and self.numpy_owner is not states
        if numpy_differs or (self.torch_owner is not states and self.users and is_imported("torch")):
            with deferred_signals():
                if numpy_differs:
                    self._store_numpy()
                    if states.numpy is not None and states is not self.outside:  # it has drawn, and probably will again
                        self.numpy_owner = states
                        self.trap.set_bit_generator(states.numpy, states.gauss)
                if (generator := torch_generator()) is not None and self.torch_owner is not states:
                    self._store_torch(generator)
                    states.set_torch_state(generator)
                    self.torch_owner = states
                self.in_use = self.numpy_owner is not None or self.torch_owner is not self.outside

    def swap_out(self, states: Generators) -> None:
        """Store the active numpy and torch states in ``states``, if they are its own."""
        if self.numpy_owner is not states and self.torch_owner is not states:
            return  # the usual case, without the cost of `deferred_signals`
        generator = torch_generator()
        with deferred_signals():
            if self.numpy_owner is states:
                self._store_numpy()
            if self.torch_owner is states and generator is not None:
                self._store_torch(generator)

    def _store_numpy(self) -> None:
        """Store numpy's state in its owner, and set the trap."""
        if self.numpy_owner is not None:
            now = _GET_BIT_GENERATOR()
            if now is not self.trap:
                self.numpy_owner.gauss, self.numpy_owner.numpy = _access_gauss(), now
            self.trap.set_bit_generator(self.trap)
            self.numpy_owner = None

    def _store_torch(self, generator: Any) -> None:
        if self.torch_owner is not None:
            self.torch_owner.torch, self.torch_owner = torch_state(generator), None

    def install(self, user: Generators) -> None:
        """Add the states of an environment to the users of the traps; set the traps for the first one."""
        with deferred_signals():
            if not self.users:
                self.trap, self.torch_owner, self.outside.torch = _Trap(), self.outside, None
                self._save_outside()
                _HIDDEN_RANDOM.__class__ = _DelegatingRandom
                for name in _WRITTEN_IN_C:
                    setattr(random, name, getattr(_HIDDEN_RANDOM, name))
                _NUMPY.get_bit_generator = self.trap.active_bit_generator
                self._replace_references()
            self.users.add(user)

    def _save_outside(self) -> None:
        """Store the process's own bit generator in ``outside``, and set the trap."""
        own = _GET_BIT_GENERATOR()
        state: Any = _NUMPY.get_state(legacy=False)
        self.original, self.outside.numpy = own, own
        if type(own) is np.random.MT19937:
            self.outside.numpy = _BitGenerator(0)
            self.outside.numpy.state = state
        self.outside.gauss = state["gauss"] if state["has_gauss"] else None
        self.trap.set_bit_generator(self.trap)

    def _replace_references(self) -> None:
        """Replace the functions written in C in all modules that have imported them."""
        delegating = {id(function): getattr(random, name) for name, function in _WRITTEN_IN_C.items()}
        for module in list(sys.modules.values()):
            names: Any = getattr(module, "__dict__", None)
            for name, value in list(names.items()) if isinstance(names, dict) else ():
                if id(value) in delegating:
                    self.replaced.append((names, name, value))
                    names[name] = delegating[id(value)]

    def uninstall(self, user: Generators) -> None:
        """Remove a user; after the last one, remove the traps, even if a signal handler raises."""
        try:
            self._uninstall(user)
        except BaseException:
            self._uninstall(user)
            raise

    def _uninstall(self, user: Generators) -> None:
        if user not in self.users:
            return
        with deferred_signals():
            self.users.discard(user)
            if self.numpy_owner is user:
                self._store_numpy()
            if not self.users:
                self.restore()

    def restore(self) -> None:
        """Remove the traps, and give the process its own generators back, in their current states."""
        self._store_numpy()
        outside = self.outside
        if _GET_BIT_GENERATOR() is self.trap:
            if isinstance(outside.numpy, _BitGenerator):
                self.original.state = outside.numpy.state
                outside.numpy = self.original
            self.trap.set_bit_generator(outside.numpy, outside.gauss)
        self.trap = None
        generator = torch_generator()
        if self.torch_owner is not outside and generator is not None and outside.torch is not None:
            outside.set_torch_state(generator)
        self.torch_owner, self.in_use = outside, False
        _HIDDEN_RANDOM.__class__ = random.Random
        for name, function in _WRITTEN_IN_C.items():
            setattr(random, name, function)
        _NUMPY.get_bit_generator = _GET_BIT_GENERATOR
        while self.replaced:
            names, name, value = self.replaced.pop()
            names[name] = value


switch: Final = _Switch()


def begin_worker(fingerprint: bytes, key: tuple[int, ...]) -> Callable[[], None]:
    """Give a new worker process its own generators, derived from the caller's, and remove the caller's traps.

    Args:
        fingerprint: The :func:`~vecenv.system.shared_generators.fingerprint` of the caller.
        key: The index of the worker, and the number of workers before it at this index.

    Returns:
        A function that seeds torch, unless torch has already been seeded. Call it after code that may have imported torch.
    """
    if switch.users:
        switch.users.clear()
        switch.active = switch.outside
        switch.restore()
    switch.skip_restoring = switch.outside
    return seed_process(np.random.SeedSequence(int.from_bytes(fingerprint, "little"), spawn_key=key))
