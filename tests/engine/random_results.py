"""Generates random results of ``env.step``, and checks that the compiled and the Python writer store the same data.

``python random_results.py FILE COUNT SEED`` generates COUNT results, and stores each with the compiled writer, a module in
FILE, and with the Python writer. It prints how many results the compiled writer refused, wrote without an info, and wrote
with an info.
"""

from __future__ import annotations

import array
import collections
import fractions
import importlib.util
import math
import os
import random
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import gymnasium
import numpy as np
from gymnasium import spaces
from gymnasium.vector import AutoresetMode

import vecenv.worker.row_writer
from vecenv.link.envs import Expected, WorkerPlan
from vecenv.link.infos import BY_PICKLE, NO_INFO, Schema
from vecenv.link.messages import Outcome
from vecenv.shm.layout import Layout, SharedArrays, fixed_tree
from vecenv.worker.rows import EnvRows

ROWS = 4
SPACES: list[spaces.Space[Any]] = [
    spaces.Box(-1, 1, (3,), np.float32), spaces.Box(0, 255, (4, 3, 2), np.uint8), spaces.Box(-1, 1, (2, 2), np.float64),
    spaces.Box(-1, 1, (), np.float32), spaces.MultiBinary(5), spaces.MultiDiscrete([3, 4]), spaces.Discrete(4),
    spaces.Box(-1, 1, (3,), np.dtype(">f4")), spaces.Box(-1, 1, (0,), np.float32), spaces.Box(-9, 9, (1,), np.float16),
    spaces.Dict(a=spaces.Box(-1, 1, (2,)), b=spaces.Discrete(3)),
]  # fmt: skip
DTYPES = ["f2", "f4", "f8", ">f4", ">f8", "u1", "i1", "i2", "i4", "i8", ">i8", "u8", "?", "c16", "O", "U3", "M8[s]"]
SCALAR_TYPES = [
    np.bool_, np.int8, np.int16, np.int32, np.int64, np.uint8, np.uint16, np.uint32, np.uint64, np.float16, np.float32,
    np.float64, np.longdouble, np.complex64,
]  # fmt: skip


class ArraySubclass(np.ndarray[Any, Any]):
    pass


class FloatSubclass(float):
    pass


class IntSubclass(int):
    pass


class DictSubclass(dict[Any, Any]):
    pass


class StepResult(NamedTuple):
    """A named tuple with the five values of a step."""

    observation: Any
    reward: Any
    terminated: Any
    truncated: Any
    info: Any


class RandomResults:
    """A generator of random results of ``env.step`` and their parts. Equal seeds give equal results."""

    def __init__(self, space: spaces.Space[Any], seed: int) -> None:
        self.space = space
        self.rng = random.Random(seed)
        self.info_builders: list[Callable[[], Any]] = [dict]

    def observation(self) -> Any:
        if not isinstance(self.space, spaces.Box | spaces.MultiBinary | spaces.MultiDiscrete):
            return self.rng.choice([1, np.int64(1), {"a": np.ones(2, np.float32), "b": 2}, np.ones(2, np.float32), None])
        shape, dtype = self.space.shape, self.space.dtype
        plain = self.numbers(shape, dtype)
        if self.rng.random() < 0.8:
            return plain
        other_dtype = self.rng.choice(DTYPES)
        wide = self.numbers((*shape[:-1], 2 * shape[-1]) if shape else (), dtype)
        unaligned = np.frombuffer(b"x" + plain.tobytes(), dtype, plain.size, offset=1).reshape(shape)
        variants: list[Callable[[], Any]] = [
            lambda: self.numbers(shape, other_dtype),
            lambda: self.numbers((*shape, 1), dtype), lambda: self.numbers((), dtype),
            lambda: self.numbers(self.rng.choice([(2,), (3,), (4,), (2, 3), (1, 3), (24,)]), dtype),
            lambda: wide[..., ::2] if shape else wide, lambda: wide[..., : shape[-1]] if shape else wide,
            lambda: plain[..., ::-1] if shape else plain, lambda: plain.T, lambda: np.asfortranarray(plain),
            lambda: plain.astype(plain.dtype.newbyteorder()), lambda: plain.view(ArraySubclass), lambda: np.ma.array(plain),
            plain.tolist, lambda: memoryview(plain), plain.tobytes, lambda: array.array("f", range(3)), lambda: unaligned,
            lambda: np.broadcast_to(plain[..., :1], shape) if shape and shape[-1] else plain, lambda: None, lambda: "text",
            lambda: plain.view(np.dtype(dtype, metadata={"unit": "m"})), lambda: self.make_read_only(plain), lambda: 0.5,
        ]  # fmt: skip
        return self.rng.choice(variants)()

    @staticmethod
    def make_read_only(values: Any) -> Any:
        values.flags.writeable = False
        return values

    def numbers(self, shape: tuple[int, ...], dtype: Any) -> Any:
        values = [self.rng.choice([0, 1, 0.5, 200, -3]) for _ in range(math.prod(shape))]
        if np.dtype(dtype).kind in "uib":
            values = [abs(int(value)) % 100 for value in values]
        return np.array(values, "f8").reshape(shape).astype(dtype)

    def reward(self) -> Any:
        number = self.rng.choice([0.0, -0.0, 1.5, -1.0, math.nan, math.inf, 1e-320, 1e300])
        variants: list[Callable[[], Any]] = [
            lambda: np.float64(number), lambda: np.float32(number), lambda: np.float16(1.5), lambda: 3, lambda: -1,
            lambda: 2**self.rng.choice([53, 63, 64, 1100]) + 1, lambda: True, lambda: np.True_, lambda: np.int32(4),
            lambda: np.array(2.5), lambda: np.array([2.5]), lambda: np.array([1.0, 2.0]), lambda: None, lambda: "1.5",
            lambda: FloatSubclass(2.5), lambda: IntSubclass(7), lambda: fractions.Fraction(1, 3),
            lambda: np.longdouble(1.25), lambda: 1j, lambda: np.array(3, ">i4"), object,
        ]  # fmt: skip
        return number if self.rng.random() < 0.7 else self.rng.choice(variants)()

    def flag(self) -> Any:
        if self.rng.random() < 0.85:
            return self.rng.choice([False, False, np.False_])
        return self.rng.choice([
            True, np.True_, 0, 1, None, "", 0.0, IntSubclass(0), np.array(False), np.array([True]), np.zeros(0),
            np.zeros(2, "?"),
        ])  # fmt: skip

    def info(self) -> Any:
        if self.rng.random() < 0.2:
            self.info_builders.append(self.make_info_builder())
        index = -1 if self.rng.random() < 0.9 else self.rng.randrange(len(self.info_builders))
        return self.info_builders[index]()

    def make_info_builder(self) -> Callable[[], Any]:
        """Return a function that builds infos with the same keys and, in most cases, with values of the same types."""
        if self.rng.random() < 0.1:
            values = [None, [], 0, "info", {"final_obs": 1}, {"x": 1, "_x": 2}, {1.0: 2}, {(1, 2): 3}, {"x": {}}, {"x": [1]}]
            chosen = self.rng.choice(values)
            return lambda: chosen
        if self.rng.random() < 0.1:
            return lambda: self.rng.choice([DictSubclass, collections.OrderedDict])(x=1)

        keys: list[Any] = ["reward", "lives", "distance", "x y", 1, 0, "1", "", "é", IntSubclass(3), True]
        chosen_keys = self.rng.sample(keys, self.rng.randint(0, 6))
        if self.rng.random() < 0.05:
            chosen_keys = [f"k{i}" for i in range(self.rng.choice([100, 511, 512, 513, 600]))]
        only_numbers = self.rng.random() < 0.8 or len(chosen_keys) > 6
        value_builders = [self.make_value_builder(only_numbers) for _ in chosen_keys]

        def build_info() -> Any:
            # decoded, so that the keys of two infos are equal, but not the same objects
            new_keys = [str(key.encode(), "utf8") if type(key) is str else key for key in chosen_keys]
            return {key: build() for key, build in zip(new_keys, value_builders, strict=True)}

        return build_info

    def make_value_builder(self, only_numbers: bool) -> Callable[[], Any]:
        rng = self.rng

        def number() -> Any:
            return rng.choice([0, 1, -1, 2.5, 100])

        if only_numbers:
            return rng.choice([
                lambda: float(number()), lambda: int(number()), lambda: number() > 0, lambda: np.float64(number()),
                lambda: np.float32(number()),
            ])  # fmt: skip
        kind, shape, dtype = map(rng.choice, (SCALAR_TYPES, [(), (1,), (3,), (2, 2), (0,)], DTYPES[:13]))
        return rng.choice([
            lambda: kind(abs(number())), lambda: self.numbers(shape, dtype), lambda: self.numbers(shape, dtype),
            lambda: self.numbers((4,), dtype)[:: rng.choice([1, 2, -1])], lambda: rng.choice([1, 1, 2**63, -(2**70)]),
            lambda: self.numbers((3,), rng.choice(["f4", "f4", ">f4", "f8"])), lambda: FloatSubclass(1),
            lambda: IntSubclass(2), lambda: self.numbers((3,), "f4").view(ArraySubclass),
            lambda: rng.choice([1.5, 2, True, None, "text"]),
            lambda: {"deep": float(number())}, lambda: self.numbers((rng.choice([2, 3]),), "f8"), lambda: (1, 2),
        ])  # fmt: skip

    def result(self) -> Any:
        if self.rng.random() < 0.4 and has_compiled_writer(self.space):
            return self.numbers(self.space.shape, self.space.dtype), 1.5, False, False, self.info_builders[-1]()
        values = self.observation(), self.reward(), self.flag(), self.flag(), self.info()
        if self.rng.random() < 0.93:
            return values
        conversions = [list, StepResult._make, iter, str, lambda values: values[:4], lambda values: (*values, 0)]
        return self.rng.choice(conversions)(values)


class RandomResultEnv(gymnasium.Env[Any, Any]):
    """An environment that returns random results. Sometimes the observation is the environment's own row of the batch."""

    action_space = spaces.Discrete(2)

    def __init__(self, space: spaces.Space[Any], seed: int) -> None:
        self.observation_space, self.generator = space, RandomResults(space, seed)
        self.row: Any = None

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        return self.observation_space.sample() if self.row is None else self.row.copy(), self.generator.info()

    def step(self, action: Any) -> Any:
        result = self.generator.result()
        if self.row is not None and type(result) is tuple and self.generator.rng.random() < 0.05:
            self.row[...] = self.generator.numbers(self.row.shape, self.row.dtype)
            result = self.row, *result[1:]
        return result


class WriterRun:
    """Environments with random results, and the shared arrays in which one of the two writers stores them."""

    def __init__(self, space: spaces.Space[Any], mode: AutoresetMode, seed: int, *, pure: bool) -> None:
        os.environ["VECENV_PURE"] = "1" if pure else "0"
        observation_tree, action_tree = fixed_tree(space), fixed_tree(RandomResultEnv.action_space, "action")
        final = mode is AutoresetMode.SAME_STEP
        layout = Layout.for_spaces(observation_tree, action_tree, ROWS, 1, final=final, spare_batches=1)
        self.arrays: SharedArrays = layout.view(bytearray(layout.size))
        plan = WorkerPlan(layout, mode, Expected("same", space, RandomResultEnv.action_space))
        self.envs = [RandomResultEnv(space, seed + k) for k in range(ROWS)]
        self.rows = EnvRows([lambda env=env: env for env in self.envs], 0, 0, plan, self.arrays)  # type: ignore[misc]
        assert any(self.rows._write_results) != (pure or not has_compiled_writer(space)), "the wrong writer is in use"
        self.counts = [0, 0, 0]  # results that the compiled writer refused, wrote without an info, and wrote with one
        self.record_sizes = {NO_INFO: 0, BY_PICKLE: 0}  # in bytes, by the number of the schema
        if not pure and has_compiled_writer(space):
            self.rows._batch_writers = [
                writer._replace(write_results=[self.make_counting_writer(write) for write in writer.write_results])
                for writer in self.rows._batch_writers
            ]
            self.rows._use_current_batch()
        self.rows.build()
        if has_compiled_writer(space):
            for env, row in zip(self.envs, self.arrays.observations[0], strict=True):  # type: ignore[index]
                env.row = row
        self.failed_rows: list[int] = list(range(ROWS))

    def make_counting_writer(self, write: Callable[[Any], int]) -> Callable[[Any], int]:
        def write_and_count(result: Any) -> int:
            status = write(result)
            self.counts[status] += 1
            return status

        return write_and_count

    def advance(self) -> Any:
        """Rebuild the rows that failed, step all rows, and return a description of each outcome."""
        outcomes = []
        if self.failed_rows:
            outcome = self.rows.rebuild(self.failed_rows, [None] * len(self.failed_rows), None, reset_due=False)
            outcomes.append(self.describe_outcome(outcome))
        self.arrays.current[0] = not self.arrays.current[0]  # the batch and its spare alternate
        outcome = self.rows.step(None, [0] * ROWS)
        self.failed_rows = [failure.env for failure in outcome.failures if failure.fatal]
        return [*outcomes, self.describe_outcome(outcome)]

    def describe_outcome(self, outcome: Outcome) -> Any:
        """Return the stored bytes and the contents of an outcome as values that can be compared."""
        arrays = self.arrays
        self.record_sizes.update((number, Schema(definition).size) for number, definition in outcome.schemas.items())
        names = "rewards", "terminations", "truncations", "info_schemas", "final"
        stored = [getattr(arrays, name).tobytes() for name in names]
        stored += [leaf.tobytes() for leaves in (arrays.observations or (), *arrays.spare_observations) for leaf in leaves]
        sizes = [self.record_sizes[schema_number] for schema_number in arrays.info_schemas.tolist()]
        stored += [record[:size].tobytes() for size, record in zip(sizes, arrays.infos, strict=True)]
        # without addresses of objects, which differ
        failures = [(failure.env, re.sub("0x[0-9a-f]+", "0x", failure.text), failure.fatal) for failure in outcome.failures]
        fields = "infos", "observations", "finals", "results", "schemas", "warnings"
        contents = [repr(getattr(outcome, field)) for field in fields]
        return stored, failures, contents, outcome.columns


def has_compiled_writer(space: spaces.Space[Any]) -> bool:
    """True if the compiled writer supports the space."""
    return isinstance(space, spaces.Box | spaces.MultiBinary | spaces.MultiDiscrete) and space.shape != ()


def load_compiled_writer(file: str | Path) -> Any:
    """Load a compiled module from a file."""
    spec = importlib.util.spec_from_file_location("vecenv.worker._row_writer", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def compare_writers(count: int, seed: int) -> list[int]:
    """Assert that both writers store the same data for random results of all spaces.

    Returns:
        The numbers of results that the compiled writer refused, wrote without an info, and wrote with an info.
    """
    counts = [0, 0, 0]
    cases = [(space, mode) for space in SPACES for mode in AutoresetMode]
    steps = math.ceil(count / (ROWS * len(cases)))
    for number, (space, mode) in enumerate(cases):
        compiled_run, python_run = (WriterRun(space, mode, seed + 1000 * number, pure=pure) for pure in (False, True))
        for step in range(steps):
            space.seed(step)  # resets return samples, which must be the same in both runs
            compiled = compiled_run.advance()
            space.seed(step)
            assert compiled == python_run.advance(), f"{space}, {mode}, seed {seed}, step {step}"
        counts = [sum(pair) for pair in zip(counts, compiled_run.counts, strict=True)]
        for run in (compiled_run, python_run):
            run.rows.close()
    return counts


if __name__ == "__main__":
    vecenv.worker.row_writer._module = load_compiled_writer(sys.argv[1])
    print(*compare_writers(int(sys.argv[2]), int(sys.argv[3])))
