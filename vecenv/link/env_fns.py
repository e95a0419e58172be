"""Functions that build environments, on their way to another process.

Each function travels once, and the environments that it builds there share it, as in a forked process. Of arrays in shared
memory (:func:`vecenv.share`) the descriptor travels, and not the data.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import cloudpickle

from vecenv.shm.shared import Place, SharedBlock, place_of

__all__ = ["PackedEnvFns"]


@dataclass(slots=True)
class PackedEnvFns:
    """Functions that build environments, pickled.

    Attributes:
        which: For each environment, which of ``functions`` builds it.
        functions: Each once.
        blocks: The shared memory that they use. It can be pickled while a process is started, which gets descriptors;
            anything else gets the data.
    """

    which: list[int] = field(default_factory=list)
    functions: list[bytes] = field(default_factory=list)
    blocks: list[SharedBlock] = field(default_factory=list)

    @classmethod
    def of(cls, envs: Iterable[int], env_fns: Sequence[Callable[[], Any]], why: str) -> PackedEnvFns:
        """Pickle what builds these environments.

        Args:
            envs: Their indices.
            env_fns: What builds each of them, in their order.
            why: What needs it pickled, for a note on the error.

        Raises:
            Exception: What pickling a function raised, with a note that says which.
        """
        packed = cls()
        numbers: dict[int, int] = {}
        for env, env_fn in zip(envs, env_fns, strict=True):
            if id(env_fn) not in numbers:
                file = io.BytesIO()
                try:
                    _FunctionPickler(file, packed.blocks).dump(env_fn)
                except Exception as error:
                    error.add_note(f"env_fns[{env}] ({env_fn!r}) cannot be pickled, which {why}")
                    raise
                numbers[id(env_fn)] = len(packed.functions)
                packed.functions.append(file.getvalue())
            packed.which.append(numbers[id(env_fn)])
        return packed

    def part(self, envs: range) -> PackedEnvFns:
        """What builds some of them, for a process of its own."""
        which = self.which[envs.start : envs.stop]
        numbers = sorted(set(which))
        return PackedEnvFns([numbers.index(number) for number in which], [self.functions[n] for n in numbers], self.blocks)

    def load(self, first: int, where: str, hint: str = "") -> list[Callable[[], Any]]:
        """The functions again.

        Args:
            first: Index of the first environment.
            where: Says in an error where this is; ``hint``: what to do.

        Raises:
            RuntimeError: One cannot be unpickled. Its ``env`` says which.
        """
        functions: list[Callable[[], Any]] = []
        for number, blob in enumerate(self.functions):
            try:
                functions.append(_FunctionUnpickler(io.BytesIO(blob), self.blocks).load())
            except BaseException as error:
                env = first + self.which.index(number)
                text = f"env_fns[{env}] could not be unpickled {where}: {type(error).__name__}: {error}{hint}"
                wrapped = RuntimeError(text)
                wrapped.env = env  # type: ignore[attr-defined]
                raise wrapped from error
        return [functions[number] for number in self.which]


class _FunctionPickler(cloudpickle.Pickler):  # type: ignore[misc]
    """Notes the blocks that it meets, and pickles in place of an array in one of them where it lies."""

    def __init__(self, file: io.BytesIO, blocks: list[SharedBlock]) -> None:
        super().__init__(file)
        self._blocks = blocks

    def persistent_id(self, value: Any) -> tuple[int, Place] | None:
        if (found := place_of(value)) is None:
            return None
        block, place = found
        if not any(block is known for known in self._blocks):
            self._blocks.append(block)
        return next(number for number, known in enumerate(self._blocks) if known is block), place


class _FunctionUnpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, blocks: list[SharedBlock]) -> None:
        super().__init__(file)
        self._blocks = blocks

    def persistent_load(self, known: tuple[int, Place]) -> Any:
        number, place = known
        return place.array(self._blocks[number])
