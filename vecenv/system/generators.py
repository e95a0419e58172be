"""Gives each environment its own states of the generators that all code of a process shares.

Environments draw from ``random``, ``numpy.random`` and torch's default generator, and then the results of one depend on
which others are in its process. :class:`Generators` are the states of one environment, and an :class:`InUse` block puts them
in place for a call into it. Most environments never draw, and a step of some takes 5 us, so a call costs two assignments
until one does:

- numpy takes the lock of its bit generator before it draws, seeds, or is asked for its state. Between draws a *trap* stands
  in place of a bit generator: taking its lock puts the right one in place, which then stays for the call.
- ``random``'s functions are methods of one hidden object. It gets a class whose methods ask the environment's own
  ``random.Random``; the two that are written in C are replaced where modules have them.
- torch cannot tell. Where it has been imported, its state is exchanged whenever another environment gets its turn.

The same traps tell which environment draws where all share one state (:func:`watch`).
"""

from __future__ import annotations

import _random
import hashlib
import operator
import random
import secrets
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from operator import length_hint
from typing import Any, Final, Literal, TypeAlias

import numpy as np

GeneratorsOption: TypeAlias = Literal["shared", "own"]

_NUMPY: Final[Any] = np.random
_HIDDEN: Final[Any] = random._inst  # whose methods the functions of ``random`` are
_WRITTEN_IN_C: Final = {"random": random.random, "getrandbits": random.getrandbits}


def _torch_generator() -> Any:
    """torch's default generator; ``None`` where torch has not been imported, or not to its end."""
    return getattr(sys.modules.get("torch"), "default_generator", None)


def _torch_state(generator: Any) -> bytes:
    state: bytes = generator.get_state().numpy().tobytes()
    return state


class Generators:
    """The states of one environment. Each is made when it is first drawn from.

    Attributes:
        seed: Of the latest reset that had one.
        episode: The number of resets since.
        numpy: A bit generator; beside it ``gauss``, the second of a pair of normal numbers, which its ``RandomState`` keeps.
        python: The state of ``random``, in an object of its own.
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

    def _begin_anew(self) -> None:
        self._clear()
        if _process.torch_of is self:
            _process.torch_of = None

    def begin(self, seed: Any) -> None:
        """An episode begins, by a reset with this seed.

        Without one, the states follow from the last seed and the number of resets since. Where there was none either, they
        go on: the environment may have seeded them itself.
        """
        if seed is not None:
            self.seed, self.episode = _number(seed), 0
        elif self.seed is not None:
            self.episode += 1
        else:
            return
        self._begin_anew()

    def _sequence(self, which: int) -> np.random.SeedSequence:
        return np.random.SeedSequence(self.entropy if self.seed is None else self.seed, spawn_key=(self.episode, which))

    def _integer(self, which: int) -> int:
        return int.from_bytes(self._sequence(which).generate_state(4).tobytes(), "little")

    def of_numpy(self) -> Any:
        """The bit generator, made if there is none."""
        self.numpy = self.numpy or _BitGenerator(self._sequence(0))
        return self.numpy

    def of_python(self) -> random.Random:
        """What ``random`` draws from, made if there is none."""
        self.python = self.python or random.Random(self._integer(1))
        return self.python

    def _fresh_torch(self) -> bytes:
        return _torch_state(sys.modules["torch"].Generator().manual_seed(self._integer(2) >> 65))

    def put_torch(self, generator: Any) -> None:
        """Put the state of torch's generator in place, made if there is none."""
        state = self._fresh_torch() if self.torch is None else self.torch
        generator.set_state(sys.modules["torch"].frombuffer(bytearray(state), dtype=sys.modules["torch"].uint8))

    def state(self) -> dict[str, Any]:
        """All of it, to be pickled; ``used``: something was drawn. Not to be asked within a turn."""
        _process.leave()
        if _process.torch_of is self:
            self.torch = _torch_state(_torch_generator())
        states = {
            "numpy": None if self.numpy is None else self.numpy.state,
            "python": None if self.python is None else self.python.getstate(),
            "torch": None if self.torch is None or self.torch == self._fresh_torch() else self.torch,
        }
        used = any(state is not None for state in states.values())
        return {
            "used": used, "entropy": self.entropy, "seed": self.seed, "episode": self.episode, "gauss": self.gauss, **states,
        }  # fmt: skip

    def load(self, state: dict[str, Any]) -> None:
        """Go on from what :meth:`state` gave. It may be done again."""
        _process.leave()
        self._begin_anew()
        self.entropy, self.seed, self.episode = state["entropy"], state["seed"], state["episode"]
        if state["numpy"] is not None:
            kind = state["numpy"]["bit_generator"]
            self.numpy = _BitGenerator(0) if kind == "MT19937" else getattr(np.random, kind)(0)
            self.numpy.state = state["numpy"]
        self.gauss, self.torch = state["gauss"], state["torch"]
        if state["python"] is not None:
            self.python = random.Random(0)
            self.python.setstate(state["python"])


def _number(seed: Any) -> int:
    try:
        return abs(operator.index(seed))
    except TypeError:  # the environment's own affair
        return int.from_bytes(hashlib.sha256(repr(seed).encode()).digest(), "little")


class InUse:
    """``with InUse(generators):`` they are what is drawn from. ``begins``: an episode begins, with this seed."""

    __slots__ = ("_before", "_begins", "_generators", "_seed")

    def __init__(self, generators: Generators, seed: Any = None, begins: bool = False) -> None:
        self._generators, self._seed, self._begins = generators, seed, begins

    def __enter__(self) -> None:
        self._before = _process.current
        if self._begins:
            if _process.inside is not None:
                _process.leave()
            self._generators.begin(self._seed)
        _process.hand_to(self._generators)

    def __exit__(self, *_: object) -> None:
        _process.current = self._before  # whatever interrupts what follows
        _process.hand_to(self._before)


class RowGenerators:
    """The generators of the rows of one worker.

    A turn for each step would take a twentieth of CartPole's. So there are none until one of these environments draws in a
    step. How far the loop over the rows has come tells whose step that was, and the rest of them get their turns.

    Attributes:
        each: Of each row.
    """

    def __init__(self, count: int) -> None:
        self.each = [Generators() for _ in range(count)]
        self._draw = False
        self._message: tuple[list[Any], Sequence[int], Any] | None = None
        self._before: Generators | RowGenerators = _process.outside
        install()

    def steps(self, steps: list[Any], where: Sequence[int], walk: Any) -> list[Any]:
        """What a message is to call, to be followed by :meth:`done`.

        Args:
            steps: What it would call without generators.
            where: Which rows these are of.
            walk: The iterator over these rows that the loop goes by.
        """
        self._before = _process.current
        if self._draw or "torch" in sys.modules:
            return [_in_turns(step, self.each[k]) for step, k in zip(steps, where, strict=True)]
        steps = list(steps)
        self._message = steps, where, walk
        _process.hand_to(self)
        return steps

    def running(self) -> Generators:
        """Of the row whose environment is the first to draw; the rows behind it get their turns."""
        assert self._message is not None
        steps, where, walk = self._message
        at = len(steps) - length_hint(walk)
        self._draw = True
        steps[at:] = [_in_turns(step, self.each[k]) for step, k in zip(steps[at:], where[at:], strict=True)]
        return self.each[where[at - 1]]

    def done(self) -> None:
        """The message is done, or was interrupted."""
        self._message = None
        _process.current = self._before
        _process.hand_to(self._before)


def _in_turns(step: Callable[[Any], Any], generators: Generators) -> Callable[[Any], Any]:
    def stepped(action: Any) -> Any:
        with InUse(generators):
            return step(action)

    return stepped


# -- what stands in for numpy's bit generator -------------------------------------------------------------------------------


class _BitGenerator(np.random.MT19937):
    """numpy's usual one. While ``brief``, its ``RandomState`` reads and writes only its own part of the state: a tenth of a
    millisecond less."""

    brief = False

    @property
    def state(self) -> Any:
        return {"bit_generator": "MT19937", "state": {}} if _BitGenerator.brief else np.random.MT19937.state.__get__(self)

    @state.setter
    def state(self, value: Any) -> None:
        if not _BitGenerator.brief:
            np.random.MT19937.state.__set__(self, value)  # type: ignore[attr-defined]


_BitGenerator.__name__ = "MT19937"  # which is looked for in a state


def _gauss(put: float | None = None) -> float | None:
    """The normal number that the global ``RandomState`` has drawn already; put one there before, if there is one to put."""
    _BitGenerator.brief = isinstance(_NUMPY.get_bit_generator(), _BitGenerator)
    try:
        if put is not None:
            _NUMPY.set_state({**_NUMPY.get_state(legacy=False), "has_gauss": 1, "gauss": put})
        state: Any = _NUMPY.get_state(legacy=False)
    finally:
        _BitGenerator.brief = False
    return state["gauss"] if state["has_gauss"] else None


def _put(bit_generator: Any, gauss: float | None) -> None:
    """Let the global ``RandomState`` draw from there."""
    _NUMPY.set_bit_generator(bit_generator)
    if gauss is not None:
        _gauss(put=gauss)


class _Trap(np.random.MT19937):
    """Stands where nothing has been drawn yet, and is its own lock, which ``RandomState`` takes before it does anything.

    Versions of numpy that take no lock for some of it ask the other methods.
    """

    def __init__(self) -> None:
        super().__init__(0)
        self._held: list[Any] = []
        self._is_being_set = False

    def set(self) -> None:
        """Put it in place."""
        self._is_being_set = True  # some versions of numpy take its lock for that
        try:
            _NUMPY.set_bit_generator(self)
        finally:
            self._is_being_set = False

    @property
    def lock(self) -> Any:  # type: ignore[override]
        return self

    def acquire(self, *_: Any) -> bool:
        if not self._is_being_set:
            lock = _process.touched().lock
            lock.acquire()
            self._held.append(lock)
        return True

    def release(self) -> None:
        if not self._is_being_set:
            self._held.pop().release()

    __enter__ = acquire

    def __exit__(self, *_: object) -> None:
        self.release()

    @property
    def state(self) -> Any:
        return _process.touched().state

    @state.setter
    def state(self, value: Any) -> None:
        _process.touched()
        _NUMPY.set_state(value)

    def _legacy_seeding(self, seed: Any) -> None:
        _process.touched()._legacy_seeding(seed)


# -- what stands in for the functions of random -----------------------------------------------------------------------------


class _Asks(_random.Random):
    """The part that is written in C, asked of what is to be drawn from."""


def _asking(method: Callable[..., Any]) -> Callable[..., Any]:
    return lambda self, *args: method(_process.python(), *args)


for _name in ("random", "getrandbits", "seed", "getstate", "setstate"):
    setattr(_Asks, _name, _asking(getattr(_random.Random, _name)))


class _Stand(random.Random, _Asks):  # in this order: what random.Random asks of its base is asked of _Asks
    """The class of the hidden object, while environments have states of their own."""

    @property
    def gauss_next(self) -> Any:
        return vars(_process.python())["gauss_next"]

    @gauss_next.setter
    def gauss_next(self, value: Any) -> None:
        vars(_process.python())["gauss_next"] = value


# -- the process ------------------------------------------------------------------------------------------------------------


class _ProcessGenerators:
    """What is drawn from in this process just now.

    Attributes:
        outside: The process's own states. (That of ``random`` stays in the hidden object.)
        current: The states whose turn it is; ``RowGenerators``: one of these rows'.
        inside: The states whose numpy state is in place; ``None``: the trap is.
        original: The bit generator that the process had.
        torch_of: The states that torch's state is one of; ``None``: it is to be thrown away.
        alone: In this process there is nothing but environments.
        users: How many calls of :meth:`acquire` were not followed by :meth:`release`.
        seen: Called, once, with the name of the generator that is used.
        replaced: What modules had for the functions that are written in C.
    """

    def __init__(self) -> None:
        self.outside = Generators()
        self.current: Generators | RowGenerators = self.outside
        self.inside: Generators | None = None
        self.torch_of: Generators | None = None
        self.original: Any = None
        self.trap: Any = None
        self.alone = False
        self.users = 0
        self.seen: Callable[[str], None] | None = None
        self.replaced: list[tuple[dict[str, Any], str, Any]] = []

    def touched(self) -> Any:
        """numpy's generator is about to be used: put the bit generator there whose turn it is."""
        if self.current is self.outside and self.seen is not None:
            self.saw("numpy.random")
        if self.trap is not None and self.inside is None:
            self.inside = row = self.whose()
            _put(row.of_numpy(), row.gauss)
        return _NUMPY.get_bit_generator()

    def python(self) -> Any:
        """What ``random`` draws from."""
        if self.current is not self.outside:
            return self.whose().of_python()
        if self.seen is not None:
            self.saw("random")
        return _HIDDEN

    def whose(self) -> Generators:
        """The states whose turn it is."""
        if isinstance(self.current, RowGenerators):
            self.current = self.current.running()
        return self.current

    def saw(self, generator: str) -> None:
        """An environment uses it: that need not be looked for any more."""
        seen, self.seen = self.seen, None
        self.release()
        if seen is not None:
            seen(generator)

    def hand_to(self, row: Generators | RowGenerators) -> None:
        """From now on it is the turn of these: their states are put in place, or the trap.

        Where there is nothing but environments, a state stays until another environment has its turn.
        """
        if (row is not self.outside or not self.alone) and (
            # else the trap is there, as it is for most episodes of most environments, and nothing has to be put in place
            self.inside is not None or "torch" in sys.modules or _NUMPY.get_bit_generator() is not self.trap
        ):
            self._prepare(row)
        self.current = row

    def _prepare(self, row: Generators | RowGenerators) -> None:
        if row is not self.inside:
            self.leave()
        if self.inside is None and _NUMPY.get_bit_generator() is not self.trap:  # the process has put another one there
            self._take_outside()
        generator = _torch_generator()
        if generator is not None and isinstance(row, Generators) and self.torch_of is not row:
            if self.torch_of is not None:
                self.torch_of.torch = _torch_state(generator)
            self.torch_of = None
            row.put_torch(generator)
            self.torch_of = row

    def leave(self) -> None:
        """Keep numpy's state for the one whose it is, and set the trap. It may be done again after an interruption."""
        if self.inside is not None:
            now = _NUMPY.get_bit_generator()
            if now is not self.trap:
                self.inside.gauss = _gauss()
                self.inside.numpy = now
            self.trap.set()
            self.inside = None

    def _take_outside(self) -> None:
        """The bit generator that is in place is the process's own."""
        own = _NUMPY.get_bit_generator()
        state: Any = _NUMPY.get_state(legacy=False)
        self.original, self.outside.numpy = own, own
        if type(own) is np.random.MT19937:
            self.outside.numpy = _BitGenerator(0)
            self.outside.numpy.state = state
        self.outside.gauss = state["gauss"] if state["has_gauss"] else None
        self.trap.set()

    def acquire(self) -> None:
        """Set traps, or note one more that wants them."""
        self.users += 1
        if self.users > 1:
            return
        self.trap, self.torch_of, self.outside.torch = _Trap(), self.outside, None
        self._take_outside()
        _HIDDEN.__class__ = _Stand
        for name in _WRITTEN_IN_C:
            setattr(random, name, getattr(_HIDDEN, name))

    def replace_references(self) -> None:
        """Give modules that have imported a function of ``random`` that is written in C the one that asks."""
        asking = {id(function): getattr(random, name) for name, function in _WRITTEN_IN_C.items()}
        for module in list(sys.modules.values()):
            names: Any = getattr(module, "__dict__", None)
            for name, value in list(names.items()) if isinstance(names, dict) else ():
                if id(value) in asking:
                    self.replaced.append((names, name, value))
                    names[name] = asking[id(value)]

    def release(self) -> None:
        """One fewer wants the traps; with the last one all is as it was."""
        self.users -= 1
        if self.users:
            return
        self.leave()
        outside = self.outside
        if _NUMPY.get_bit_generator() is self.trap:
            if isinstance(outside.numpy, _BitGenerator):
                self.original.state = outside.numpy.state
                outside.numpy = self.original
            _put(outside.numpy, outside.gauss)
        self.trap = None
        generator = _torch_generator()
        if self.torch_of is not outside and generator is not None and outside.torch is not None:
            outside.put_torch(generator)
        self.torch_of = None
        _HIDDEN.__class__ = random.Random
        for name, function in _WRITTEN_IN_C.items():
            setattr(random, name, function)
        while self.replaced:
            names, name, value = self.replaced.pop()
            names[name] = value


_process: Final[_ProcessGenerators] = _ProcessGenerators()


def install() -> None:
    """From now on environments may have generators of their own in this process, until :func:`uninstall`."""
    _process.acquire()
    _process.replace_references()


uninstall = _process.release


# -- which environment draws where all share one state --------------------------------------------------------------------


def watch(seen: Callable[[str], None]) -> None:
    """Call ``seen`` with the name of the first generator that is used, outside of all turns; once, and not for torch's."""
    if _process.seen is None:
        _process.acquire()
        _process.leave()
    _process.seen = seen


def watch_by(seen: Callable[[str], None]) -> None:
    """Have another function called by the watch, if there is one."""
    if _process.seen is not None:
        _process.seen = seen


def look_at_torch() -> None:
    """While there is a watch, in a worker: has torch's generator been drawn from since the last look?"""
    if _process.seen is not None and _process.alone and (generator := _torch_generator()) is not None:
        before, _process.outside.torch = _process.outside.torch, _torch_state(generator)
        if before is not None and before != _process.outside.torch:
            _process.saw("torch")


def unwatch() -> None:
    """End a :func:`watch`, if there is one."""
    if _process.seen is not None:
        _process.seen = None
        _process.release()


@contextmanager
def unwatched() -> Iterator[None]:
    """No :func:`watch` sees that the engine itself looks at generators."""
    seen = _process.seen
    unwatch()
    try:
        yield
    finally:
        if seen is not None:
            watch(seen)


# -- the states that workers begin with -----------------------------------------------------------------------------------


def stream_of_caller() -> bytes:
    """What the generators of this process stand at, in a few bytes; they stay as they are."""
    with unwatched():
        digest = hashlib.sha256(repr(random.getstate()).encode())
        numbers: Any = _NUMPY.get_state(legacy=False)
    for name, value in (*sorted(numbers["state"].items()), ("gauss", (numbers["has_gauss"], numbers["gauss"]))):
        digest.update(name.encode() + (value.tobytes() if isinstance(value, np.ndarray) else repr(value).encode()))
    if (generator := _torch_generator()) is not None:
        digest.update(_torch_state(generator))
    return digest.digest()


def begin_worker(stream: bytes, key: tuple[int, ...]) -> Callable[[], None]:
    """In a new worker process: give it states of its own, which follow from the caller's. Traps of the caller's go.

    Args:
        stream: Of the caller.
        key: Which worker it is, and how many there were in its place before.

    Returns:
        Seeds torch: to be called again where torch may have been imported since.
    """
    if _process.users:
        _process.users, _process.seen, _process.current = 1, None, _process.outside
        _process.release()
    _process.alone = True
    return seed_process(np.random.SeedSequence(int.from_bytes(stream, "little"), spawn_key=key))


def seed_process(sequence: np.random.SeedSequence) -> Callable[[], None]:
    """Seed the generators of this process; what it returns seeds torch, once that is imported."""
    numpy, python, torch = sequence.spawn(3)
    _NUMPY.set_bit_generator(type(_NUMPY.get_bit_generator())(numpy))
    random.seed(int.from_bytes(python.generate_state(8).tobytes(), "little"))
    seeds = [int(torch.generate_state(1, np.uint64)[0]) >> 1]

    def seed_torch() -> None:
        if seeds and (generator := _torch_generator()) is not None:
            generator.manual_seed(seeds.pop())

    seed_torch()
    return seed_torch
