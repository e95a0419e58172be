"""The generators that all code of a process shares, ``random``'s, ``numpy.random``'s and torch's: a state an environment.

Environments draw from them, and then what one says depends on which others are in its process. :class:`Generators` are the
states of one environment, and :meth:`Generators.turn` puts them in place for a call into it. Most environments never draw,
and a step of some takes 5 us, so a call costs two assignments until one does:

- numpy takes the lock of its bit generator before it draws, seeds, or is asked for its state. Between draws a bit generator
  stands there whose lock first puts the right one in place (:mod:`~vecenv.system.stand_ins`); that stays for the call.
- ``random``'s functions are methods of one hidden object. That gets a class whose methods ask the environment's own
  ``random.Random``; the two that are written in C are replaced where modules have them.
- torch says nothing. Where it has been imported, its state is exchanged whenever another environment gets its turn.

The same looks tell which environment draws where all share one state: :mod:`vecenv.system.draws`.
"""

from __future__ import annotations

import hashlib
import operator
import random
import secrets
import sys
from collections.abc import Callable, Sequence
from operator import length_hint
from typing import Any, Final, Literal, TypeAlias

import numpy as np

from vecenv.system.stand_ins import HIDDEN, NUMPY, Brief, Stand, Trap, gauss_of, put

__all__ = ["PROCESS", "Generators", "GeneratorsOption", "Own", "Turn", "become_worker", "install", "uninstall"]

GeneratorsOption: TypeAlias = Literal["shared", "own"]

_NUMPY, _PYTHON, _TORCH = "numpy.random", "random", "torch"


class Generators:
    """The states of one environment. Each is made when it is first drawn from.

    Attributes:
        seed: Of the latest reset that had one.
        episode: The number of resets since.
        numpy: A bit generator, and what its ``RandomState`` knows beside it: the second of a pair of normal numbers.
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
        self.torch: Any = None
        if PROCESS.torch_of is self:
            PROCESS.torch_of = None

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
        if self.numpy is not None or self.python is not None or self.torch is not None or PROCESS.torch_of is self:
            self._clear()

    def _sequence(self, which: int) -> np.random.SeedSequence:
        return np.random.SeedSequence(self.entropy if self.seed is None else self.seed, spawn_key=(self.episode, which))

    def _integer(self, which: int) -> int:
        return int.from_bytes(self._sequence(which).generate_state(4).tobytes(), "little")

    def of_numpy(self) -> Any:
        """The bit generator, made if there is none."""
        self.numpy = self.numpy or Brief(self._sequence(0))
        return self.numpy

    def of_python(self) -> random.Random:
        """What ``random`` draws from, made if there is none."""
        if self.python is None:
            self.python = random.Random(self._integer(1))
        return self.python

    def of_torch(self, torch: Any) -> Any:
        """The state of torch's generator, made if there is none."""
        if self.torch is None:
            return torch.Generator().manual_seed(self._integer(2) >> 65).get_state()
        if isinstance(self.torch, bytes):
            self.torch = torch.frombuffer(bytearray(self.torch), dtype=torch.uint8)
        return self.torch

    def _have_drawn(self) -> bool:
        if self.torch is None or self.numpy is not None or self.python is not None:
            return self.numpy is not None or self.python is not None
        torch, now, self.torch = sys.modules[_TORCH], self.torch, None  # torch's is there where nothing was drawn, too
        fresh, self.torch = self.of_torch(torch), now
        return bool((self.of_torch(torch) != fresh).any())

    def turn(self, seed: Any = None, *, begins: bool = False) -> Turn:
        """``with generators.turn():`` they are what is drawn from. ``begins``: an episode begins, with this seed."""
        return Turn(self, seed, begins)

    def around(self, steps: Sequence[Callable[[Any], Any]], k: int) -> Callable[[Any], Any]:
        """What calls ``steps[k]`` in a turn."""
        process, own = PROCESS, steps[k]

        def step(action: Any) -> Any:
            before = process.current
            if not process.idle:
                process.prepare(self)
            process.current = self
            try:
                return own(action)
            finally:
                process.current = before
                if not process.idle:
                    process.prepare(before)

        return step

    def state(self) -> dict[str, Any]:
        """All of it, to be pickled. Not to be asked within a turn."""
        PROCESS.leave()
        if PROCESS.torch_of is self:
            self.torch = sys.modules["torch"].default_generator.get_state()
        return {
            "used": self._have_drawn(),
            "entropy": self.entropy,
            "seed": self.seed,
            "episode": self.episode,
            "numpy": None if self.numpy is None else self.numpy.state,
            "gauss": self.gauss,
            "python": None if self.python is None else self.python.getstate(),
            "torch": self.torch if self.torch is None or isinstance(self.torch, bytes) else self.torch.numpy().tobytes(),
        }

    def load(self, state: dict[str, Any]) -> None:
        """Go on from what :meth:`state` gave. It may be done again."""
        PROCESS.leave()
        self._clear()
        self.entropy, self.seed, self.episode = state["entropy"], state["seed"], state["episode"]
        if state["numpy"] is not None:
            kind = state["numpy"]["bit_generator"]
            self.numpy = Brief(0) if kind == "MT19937" else getattr(np.random, kind)(0)
            self.numpy.state = state["numpy"]
        self.gauss, self.torch = state["gauss"], state["torch"]
        if state["python"] is not None:
            self.python = random.Random(0)
            self.python.setstate(state["python"])


class Turn:
    """See :meth:`Generators.turn`."""

    __slots__ = ("_before", "_begins", "_generators", "_seed")

    def __init__(self, generators: Generators, seed: Any, begins: bool) -> None:
        self._generators, self._seed, self._begins = generators, seed, begins

    def __enter__(self) -> None:
        process = PROCESS
        self._before = process.current
        if self._begins:
            if process.inside is not None:
                process.leave()
            self._generators.begin(self._seed)
        if not process.idle:
            process.prepare(self._generators)
        process.current = self._generators

    def __exit__(self, *_: object) -> None:
        PROCESS.current = self._before
        if not PROCESS.idle:
            PROCESS.prepare(self._before)


class Own:
    """The generators of the rows of one worker.

    A turn for each step would take a twentieth of CartPole's. So there are none until one of these environments draws in a
    step. Whose step that was is told by how far the loop over the rows has come, and the rest of them get theirs.

    Attributes:
        each: Of each row.
    """

    def __init__(self, count: int) -> None:
        self.each = [Generators() for _ in range(count)]
        self._draw = False
        self._message: tuple[list[Any], Sequence[int], Any] | None = None
        self._before: Generators | Own | None = None
        install()

    def steps(self, steps: list[Any], where: Sequence[int], walk: Any) -> list[Any]:
        """What a message is to call, to be followed by :meth:`done`.

        Args:
            steps: What it would call without generators.
            where: Which rows these are of.
            walk: The iterator over these rows that the loop goes by.
        """
        process = PROCESS
        self._before = process.current
        if self._draw or _TORCH in sys.modules:
            return [self.each[k].around(steps, at) for at, k in enumerate(where)]
        process.prepare(self)
        steps = list(steps)
        self._message = steps, where, walk
        process.current = self
        return steps

    def running(self) -> Generators:
        """One draws for the first time: of whose row the environment is."""
        assert self._message is not None
        steps, where, walk = self._message
        at = len(steps) - length_hint(walk)
        self._draw = True
        for later in range(at, len(steps)):
            steps[later] = self.each[where[later]].around(steps, later)
        return self.each[where[at - 1]]

    def done(self) -> None:
        """The message is done, or was interrupted."""
        self._message = None
        PROCESS.current = self._before
        if not PROCESS.idle:
            PROCESS.prepare(self._before)


def _number(seed: Any) -> int:
    try:
        return abs(operator.index(seed))
    except TypeError:  # the environment's own affair
        return int.from_bytes(hashlib.sha256(repr(seed).encode()).digest(), "little")


# -- the process ----------------------------------------------------------------------------------------------------


class _Process:
    """What is drawn from in this process just now.

    Attributes:
        current: Whose turn it is; ``None``: no environment's; ``Own``: one's of these.
        idle: There is nothing to do before and after a turn.
        inside: Whose numpy state is in place; ``None``: the trap is.
        outside: The process's own states. (That of ``random`` stays in the hidden object.)
        torch_of: Whose state torch has; ``None``: it is to be thrown away.
        alone: In this process there is nothing but environments.
        users: How many want what is :func:`install`-ed.
        seen: Called, once, with the name of the generator that is used.
    """

    __slots__ = (
        "alone", "current", "idle", "inside", "original", "outside", "seen", "torch_of", "trap", "users",
    )  # fmt: skip

    def __init__(self) -> None:
        self.current: Generators | Own | None = None
        self.idle = False
        self.inside: Generators | None = None
        self.outside: Any = None
        self.torch_of: Generators | None = None
        self.original: Any = None
        self.trap: Any = None
        self.alone = False
        self.users = 0
        self.seen: Callable[[str], None] | None = None

    def touched(self) -> Any:
        """numpy's generator is about to be used: put the bit generator there whose turn it is."""
        if self.current is None and self.seen is not None:
            self.saw(_NUMPY)
            if self.trap is None:
                return NUMPY.get_bit_generator()
        row = self.outside if self.current is None else self.whose()
        if self.inside is None:
            self.inside, self.idle = row, False
            put(row.of_numpy(), row.gauss)
        return NUMPY.get_bit_generator()

    def python(self) -> Any:
        """What ``random`` draws from."""
        if self.current is not None:
            return self.whose().of_python()
        if self.seen is not None:
            self.saw(_PYTHON)
        return HIDDEN

    def whose(self) -> Generators:
        """Whose turn it is. It is some environment's."""
        if isinstance(self.current, Own):
            self.current = self.current.running()
        assert self.current is not None
        return self.current

    def saw(self, generator: str) -> None:
        """An environment uses it: that need not be looked for any more."""
        seen, self.seen = self.seen, None
        self.release()
        if seen is not None:
            seen(generator)

    def prepare(self, row: Generators | Own | None) -> None:
        """Before or after a turn: have the states in place of whoever has the turn from now on, or the trap.

        Where there is nothing but environments, a state stays until another environment has its turn.
        """
        if row is None and self.alone:
            return
        if not isinstance(row, Generators) or row is not self.inside:
            if isinstance(row, Generators) and row.numpy is not None and self.inside is not None and self.alone:
                self._keep()
                self.inside = row
                put(row.numpy, row.gauss)
            else:
                self.leave()
        if self.inside is None and NUMPY.get_bit_generator() is not self.trap:  # somebody has put another one there
            self._take_outside()
        torch = sys.modules.get(_TORCH)
        generator = getattr(torch, "default_generator", None)
        self.idle = generator is None and self.inside is None
        if row is None:
            row = self.outside
        if generator is not None and isinstance(row, Generators) and self.torch_of is not row:
            if self.torch_of is not None:
                self.torch_of.torch = generator.get_state()
            self.torch_of = None
            generator.set_state(row.of_torch(torch))
            self.torch_of = row

    def leave(self) -> None:
        """Keep numpy's state for the one whose it is, and set the trap. It may be done again after an interruption."""
        if self.inside is not None:
            self._keep()
            self.trap.set()
            self.inside = None

    def _keep(self) -> None:
        row, now = self.inside, NUMPY.get_bit_generator()
        if row is not None and now is not self.trap:
            gauss = gauss_of(now)
            row.numpy, row.gauss = now, gauss

    def _take_outside(self) -> None:
        """The bit generator that is in place is the process's own."""
        own = NUMPY.get_bit_generator()
        state: Any = NUMPY.get_state(legacy=False)
        self.original, self.outside.numpy = own, own
        if type(own) is np.random.MT19937:
            self.outside.numpy = Brief(0)
            self.outside.numpy.state = state
        self.outside.gauss = state["gauss"] if state["has_gauss"] else None
        self.trap.set()

    def acquire(self) -> None:
        """Set traps, or note one more who wants them."""
        self.users += 1
        if self.users > 1:
            return
        self.outside, self.trap, self.inside, self.idle = Generators(), Trap(self.touched), None, False
        self.torch_of = self.outside
        self._take_outside()
        Stand.set()

    def release(self) -> None:
        """Nobody, or one fewer, wants the traps."""
        self.users -= 1
        if self.users:
            return
        self.leave()
        outside = self.outside
        if NUMPY.get_bit_generator() is self.trap:
            own = outside.numpy
            if isinstance(own, Brief):
                own, self.original.state = self.original, own.state
            put(own, outside.gauss)
        self.trap, self.idle = None, False
        torch = sys.modules.get("torch")
        if self.torch_of is not outside and torch is not None and outside.torch is not None:
            torch.default_generator.set_state(outside.of_torch(torch))
        self.torch_of = None
        Stand.unset()


PROCESS: Final[_Process] = _Process()
Stand.asked = PROCESS.python


def install() -> None:
    """From now on environments may have generators of their own in this process, until :func:`uninstall`."""
    PROCESS.acquire()
    Stand.replace_references()


uninstall = PROCESS.release


def become_worker() -> None:
    """In a new worker process, where there is nothing but environments. Traps of the one that it was forked from go."""
    if PROCESS.users:
        PROCESS.users, PROCESS.seen, PROCESS.current = 1, None, None
        PROCESS.release()
    PROCESS.alone = True
