"""Small environments with predictable outputs, and helpers that all tests of the engine share.

:class:`CounterEnv` counts steps and episodes, :class:`EchoEnv` returns its actions, :class:`ScriptedEnv` values from lists.
All classes are defined at module level, so that they can be pickled by name for every start method.
"""

from __future__ import annotations

import copy
import functools
import os
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.spaces import GraphInstance
from gymnasium.vector import SyncVectorEnv, VectorWrapper
from gymnasium.vector.utils import concatenate

import vecenv
from vecenv.testing import assert_same_trajectory

EnvFn = Callable[[], gymnasium.Env]
Options = dict[str, Any]

# Options of AsyncVectorEnv by the name of the configuration. Tests of returned values use only VALUE_ENGINES, because one
# process per environment takes long to start.
ENGINES: dict[str, Options] = {
    "in-process": {"num_workers": 0},
    "two-workers": {"num_workers": 2},
    "process-per-env": {"num_workers": None},
}
PROCESS_ENGINES = {name: options for name, options in ENGINES.items() if name != "in-process"}
VALUE_ENGINES = {name: options for name, options in ENGINES.items() if name != "process-per-env"}


@contextmanager
def open_engine(env_fns: Sequence[EnvFn], **kwargs: Any) -> Iterator[vecenv.AsyncVectorEnv]:
    """Yield an AsyncVectorEnv that is closed at the end, with ``terminate=True`` if the test fails, to prevent hangs."""
    envs: Any = vecenv.AsyncVectorEnv(env_fns, **kwargs)
    _open_engines_log_failures.append(kwargs.get("num_workers") is None and not kwargs.get("use_caller"))
    try:
        yield envs
    except BaseException:
        envs.close(terminate=True)
        raise
    finally:
        _open_engines_log_failures.pop()
    envs.close()


class FixedBatchSize(vecenv.AsyncVectorEnv[Any, Any]):
    """A vector environment that asserts that its ``batch_size`` is assigned only once."""

    def __setattr__(self, name: str, value: Any) -> None:
        assert name != "batch_size" or "batch_size" not in self.__dict__
        super().__setattr__(name, value)


@contextmanager
def ready_engine(env_fns: Sequence[EnvFn], **kwargs: Any) -> Iterator[vecenv.AsyncVectorEnv]:
    """Yield an AsyncVectorEnv as :func:`open_engine` does, reset with seed 1."""
    with open_engine(env_fns, **kwargs) as envs:
        envs.reset(seed=1)
        yield envs


@contextmanager
def killable_engine(env_fns: Sequence[EnvFn], **kwargs: Any) -> Iterator[vecenv.AsyncVectorEnv]:
    """Yield an AsyncVectorEnv as :func:`open_engine` does, closed with ``terminate=True`` because environments may hang."""
    with open_engine(env_fns, **kwargs) as envs:
        yield envs
        envs.close(terminate=True)


class GymnasiumInfoMerger(VectorWrapper):  # type: ignore[type-arg]
    """A wrapper that lets Gymnasium merge the infos of single environments."""

    def reset(self, **kwargs: Any) -> Any:
        observations, infos = vecenv.infos_by_row(self.env).reset(**kwargs)
        return observations, self._merged(infos)

    def step(self, actions: Any) -> Any:
        *results, infos = vecenv.infos_by_row(self.env).step(actions)
        return (*results, self._merged(infos))

    def _merged(self, infos: list[Any]) -> dict[str, Any]:
        merged: dict[str, Any] = {}
        for index, info in enumerate(infos):
            merged = self.env._add_info(merged, info, index)
        return merged


def assert_matches_sync(
    env_fns: Sequence[EnvFn],
    steps: int = 6,
    autoreset_mode: Any = "NextStep",
    merge_by_gymnasium: bool = False,
    **options: Any,
) -> None:
    """Assert that spaces and trajectory equal those of a ``SyncVectorEnv`` with the same environments, bit for bit.

    With ``merge_by_gymnasium``, Gymnasium merges the infos of both, because it truncates some numbers and vecenv does not.
    """
    reference: Any = SyncVectorEnv(env_fns, autoreset_mode=autoreset_mode)
    try:
        with open_engine(env_fns, autoreset_mode=autoreset_mode, **options) as envs:
            for name in ("single_observation_space", "observation_space", "single_action_space", "action_space", "metadata"):
                assert getattr(envs, name) == getattr(reference, name)
            assert_same_trajectory(GymnasiumInfoMerger(envs) if merge_by_gymnasium else envs, reference, steps, seed=1)
    finally:
        reference.close()


_open_engines_log_failures: list[bool] = []
"""For each open engine, True if it logs failures as Gymnasium does: engines with one process per environment do."""


@contextmanager
def raises_and_warns(
    error: type[BaseException] | tuple[type[BaseException], ...], match: str | None = None, failures: int = 1
) -> Iterator[tuple[pytest.ExceptionInfo[BaseException], list[str]]]:
    """Check that the block raises an exception, and that the engine logs the warnings that Gymnasium would log.

    An engine with one process per environment logs two warnings for each of ``failures`` environments and one at the end.
    Other engines log none. Yields the exception, and a list that contains the texts of the warnings after the block.
    """
    texts: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with pytest.raises(error, match=match) as info:
            yield info, texts
    texts += [str(warning.message) for warning in caught]
    assert len(texts) == (2 * failures + 1 if _open_engines_log_failures[-1] else 0), texts


def describe(value: Any) -> str:
    """Return the type, dtype, shape and content of a value as text. Only identical values have equal texts."""
    if isinstance(value, np.ndarray):
        return f"ndarray:{value.dtype}:{value.shape}:{value.tobytes().hex()}"
    if isinstance(value, np.generic):
        return f"{type(value).__name__}:{value.tobytes().hex()}"
    if isinstance(value, GraphInstance):
        return "Graph(" + ", ".join(map(describe, value)) + ")"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key!r}: {describe(part)}" for key, part in value.items()) + "}"
    if isinstance(value, tuple | list):
        return f"{type(value).__name__}({', '.join(map(describe, value))})"
    return f"{type(value).__name__}:{value!r}"


class CounterEnv(gymnasium.Env):
    """A counter with observations ``[env_id, steps, episodes, seed]`` (int64); the seed is -1 after a reset without one.

    Episode ``k`` lasts ``lengths[k % len(lengths)]`` steps and is truncated if ``truncates`` is true, else terminated. The
    reward is ``env_id + steps / 1000``. Reset infos contain the arguments of the reset, and step infos the number of steps.
    """

    metadata = {"render_modes": ["rgb_array"], "render_fps": 30}  # noqa: RUF012

    def __init__(
        self,
        env_id: int = 0,
        lengths: Sequence[int] = (3,),
        truncates: bool = False,
        render_mode: str | None = None,
        infos: bool = True,
    ) -> None:
        self.env_id = env_id
        self.lengths = tuple(lengths)
        self.truncates = truncates
        self.render_mode = render_mode
        self.infos = infos
        self.observation_space = spaces.Box(-1, 2**40, (4,), np.int64)
        self.action_space = spaces.Discrete(5)
        self.steps = 0
        self.episodes = 0
        self.seed = -1
        self.note = "unset"
        self.closed_file: Path | None = None

    def _observe(self) -> np.ndarray:
        return np.array([self.env_id, self.steps, self.episodes, self.seed], dtype=np.int64)

    def reset(self, **kwargs: Any) -> tuple[np.ndarray, dict[str, Any]]:
        super().reset(seed=kwargs.get("seed"))
        seed = kwargs.get("seed")
        self.seed = -1 if seed is None else int(seed)
        self.steps = 0
        self.episodes += 1
        return self._observe(), {"reset_kwargs": describe(kwargs)} if self.infos else {}

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        self.steps += 1
        over = self.steps >= self.lengths[(self.episodes - 1) % len(self.lengths)]
        reward = self.env_id + self.steps / 1000
        info = {"steps": self.steps} if self.infos else {}
        return self._observe(), reward, over and not self.truncates, over and self.truncates, info

    def render(self) -> np.ndarray:
        return np.full((2, 2, 3), self.env_id * 10 + self.steps, dtype=np.uint8)

    def add(self, number: int, *, scale: int = 1) -> int:
        return self.env_id + number * scale

    def fail(self, error: Exception) -> None:
        raise error

    def sleep(self, seconds: float) -> int:
        time.sleep(seconds)
        return self.env_id

    def pid(self) -> int:
        return os.getpid()

    def close(self) -> None:
        if self.closed_file is not None:
            with self.closed_file.open("a") as file:
                file.write(f"{self.env_id}\n")


def counters(n: int, **kwargs: Any) -> list[EnvFn]:
    """Return ``n`` functions that build a :class:`CounterEnv`, with env ids from 0."""
    return [functools.partial(CounterEnv, env_id=index, **kwargs) for index in range(n)]


class EchoEnv(gymnasium.Env):
    """An environment that records its actions. ``info["action"]`` is the latest one as a text of :func:`describe`."""

    def __init__(self, action_space: spaces.Space, mutate: bool = False) -> None:
        self.action_space = copy.deepcopy(action_space)
        self.observation_space = spaces.Discrete(1000)
        self.mutate = mutate
        self.actions: list[Any] = []

    def reset(self, **kwargs: Any) -> tuple[int, dict[str, Any]]:
        super().reset(seed=kwargs.get("seed"))
        return 0, {}

    def step(self, action: Any) -> tuple[int, float, bool, bool, dict[str, Any]]:
        info: dict[str, Any] = {"action": describe(action)}
        if isinstance(action, np.ndarray):
            info |= {"writeable": action.flags.writeable, "owns": action.flags.owndata}
        self.actions.append(action)
        if self.mutate:
            action[...] = 0
        return len(self.actions), 0.0, False, False, info

    def history(self) -> list[str]:
        return [describe(action) for action in self.actions]


class SpaceEnv(gymnasium.Env):
    """An environment that observes samples of a space, which depend on the seed. The initial seed is ``env_id``."""

    def __init__(
        self,
        observation_space: spaces.Space,
        action_space: spaces.Space | None = None,
        env_id: int = 0,
        lengths: Sequence[int] = (3,),
    ) -> None:
        self.observation_space = copy.deepcopy(observation_space)
        self.action_space = copy.deepcopy(action_space) if action_space is not None else spaces.Discrete(2)
        self.lengths = tuple(lengths)
        self.observation_space.seed(env_id)
        self.steps = 0
        self.episodes = 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        if seed is not None:
            self.observation_space.seed(seed)
            self.episodes = 0
        self.steps = 0
        self.episodes += 1
        return self.observation_space.sample(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.steps += 1
        over = self.steps >= self.lengths[(self.episodes - 1) % len(self.lengths)]
        return self.observation_space.sample(), float(self.steps), over, False, {"action": describe(action)}


class ScriptedEnv(SpaceEnv):
    """A :class:`SpaceEnv` with rewards, flags and infos from lists, each of which is repeated after its end.

    Args:
        truncates: Episode ``k`` is truncated if ``truncates[k]``, else terminated.
        rewards: Rewards of the steps, over all episodes.
        reset_infos: Infos of the resets.
        step_infos: Infos of the steps, over all episodes.
    """

    def __init__(
        self,
        observation_space: spaces.Space,
        action_space: spaces.Space | None = None,
        *,
        truncates: Sequence[bool] = (False,),
        rewards: Sequence[Any] = (1.0,),
        reset_infos: Sequence[dict[str, Any]] = ({},),
        step_infos: Sequence[dict[str, Any]] = ({},),
        **options: Any,
    ) -> None:
        super().__init__(observation_space, action_space, **options)
        self.truncates = truncates
        self.rewards = rewards
        self.reset_infos = reset_infos
        self.step_infos = step_infos
        self.total = 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        if seed is not None:
            self.total = 0
        observation, _ = super().reset(seed=seed, options=options)
        return observation, copy.deepcopy(self.reset_infos[(self.episodes - 1) % len(self.reset_infos)])

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        observation, _, over, _, echo = super().step(action)
        truncates = self.truncates[(self.episodes - 1) % len(self.truncates)]
        info = copy.deepcopy(self.step_infos[self.total % len(self.step_infos)]) | echo
        reward = self.rewards[self.total % len(self.rewards)]
        self.total += 1
        return observation, reward, over and not truncates, over and truncates, info


MIXED_INFOS: tuple[dict[str, Any], ...] = (
    {"a": 1.5, "d": {"b": 2}},
    {},
    {"a": 2, "word": "x", "d": {"c": np.arange(3)}},
    {"a": np.float32(1), "list": [1, 2]},
    {"late": True, "d": {"b": 2.5}},
)


def scripted_env_fns(n: int, rotate_infos: bool = True) -> list[EnvFn]:
    """Return ``n`` functions that build a :class:`ScriptedEnv` with nested observations and episodes of different lengths.

    The keys and types of the infos differ from step to step. With ``rotate_infos``, each environment begins at another
    position of :data:`MIXED_INFOS`.
    """
    box = spaces.Box(-1, 1, (2,), np.float32)
    env_fns: list[EnvFn] = []
    for index in range(n):
        begin = index % len(MIXED_INFOS) if rotate_infos else 0
        env_fn = functools.partial(
            ScriptedEnv,
            spaces.Dict({"x": box, "n": spaces.Discrete(5)}),
            box,
            env_id=index,
            lengths=(4 + index, 3),
            truncates=(False, True),
            reset_infos=({"level": index},),
            step_infos=MIXED_INFOS[begin:] + MIXED_INFOS[:begin],
        )
        env_fns.append(env_fn)
    return env_fns


class ReturningEnv(gymnasium.Env):
    """An environment that returns ``resets[k]`` from reset ``k`` and ``steps[t]`` from step ``t``; the last ones repeat."""

    def __init__(
        self,
        resets: Sequence[Any],
        steps: Sequence[Any],
        observation_space: spaces.Space | None = None,
        action_space: spaces.Space | None = None,
    ) -> None:
        default = spaces.Box(-np.inf, np.inf, (4,), np.float32)
        self.observation_space = default if observation_space is None else copy.deepcopy(observation_space)
        self.action_space = spaces.Discrete(5) if action_space is None else copy.deepcopy(action_space)
        self.resets, self.steps = resets, steps
        self.reset_count = self.step_count = 0

    def reset(self, **kwargs: Any) -> Any:
        super().reset(seed=kwargs.get("seed"))
        self.reset_count += 1
        return self.resets[min(self.reset_count, len(self.resets)) - 1]

    def step(self, action: Any) -> Any:
        self.step_count += 1
        return self.steps[min(self.step_count, len(self.steps)) - 1]


def info_env_fn(step_infos: Sequence[Any], reset_infos: Sequence[Any] = ({},)) -> EnvFn:
    """Return a function that builds an environment with these infos and constant other results."""
    zeros = np.zeros(4, dtype=np.float32)
    return functools.partial(
        ReturningEnv,
        resets=[(zeros, info) for info in reset_infos],
        steps=[(zeros, 1.0, False, False, info) for info in step_infos],
    )


class RaisingEnv(CounterEnv):
    """A :class:`CounterEnv` that raises ``error`` on the ``at``-th call of ``method`` ("reset" or "step")."""

    def __init__(self, env_id: int = 0, error: BaseException | None = None, method: str = "step", at: int = 1) -> None:
        super().__init__(env_id, lengths=(1000,))
        self.error, self.method, self.at = error, method, at
        self.calls = 0

    def _maybe_raise(self, method: str) -> None:
        if method == self.method and self.error is not None:
            self.calls += 1
            if self.calls == self.at:
                raise self.error

    def reset(self, **kwargs: Any) -> tuple[np.ndarray, dict[str, Any]]:
        self._maybe_raise("reset")
        return super().reset(**kwargs)

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        self._maybe_raise("step")
        return super().step(action)


class SleepingEnv(CounterEnv):
    """An environment with steps that last ``action`` seconds, and resets that last ``options["seconds"]``."""

    def __init__(self, env_id: int = 0) -> None:
        super().__init__(env_id, lengths=(1000,))
        self.action_space = spaces.Box(0.0, 100.0, (), np.float64)

    def reset(self, **kwargs: Any) -> tuple[np.ndarray, dict[str, Any]]:
        time.sleep((kwargs.get("options") or {}).get("seconds", 0.0))
        return super().reset(**kwargs)

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        time.sleep(float(action))
        return super().step(action)


class OverlapEnv(SleepingEnv):
    """An environment that reports how many environments are inside ``reset`` or ``step``, counted by files in ``folder``."""

    def __init__(self, folder: Path, env_id: int = 0) -> None:
        super().__init__(env_id)
        self.folder = folder

    @contextmanager
    def _inside(self) -> Iterator[int]:
        marker = self.folder / str(self.env_id)
        marker.touch()
        try:
            yield len(list(self.folder.iterdir()))
        finally:
            marker.unlink()

    def reset(self, **kwargs: Any) -> tuple[np.ndarray, dict[str, Any]]:
        with self._inside() as inside:
            time.sleep(0.02)
            observation, info = super().reset(**kwargs)
        return observation, info | {"inside": inside}

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        with self._inside() as inside:
            time.sleep(0.02)
            observation, reward, terminated, truncated, info = super().step(action)
        return observation, reward, terminated, truncated, info | {"inside": inside}


class ReusingEnv(CounterEnv):
    """An environment that returns the same observation array and info dict from every call, changed in place."""

    def __init__(self, env_id: int = 0, lengths: Sequence[int] = (2,)) -> None:
        super().__init__(env_id, lengths)
        self.array = np.zeros(4, dtype=np.int64)
        self.info: dict[str, Any] = {}

    def reset(self, **kwargs: Any) -> tuple[np.ndarray, dict[str, Any]]:
        self.array[:] = super().reset(**kwargs)[0]
        self.info.clear()
        self.info["steps"] = self.steps
        return self.array, self.info

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        observation, reward, terminated, truncated, info = super().step(action)
        self.array[:] = observation
        self.info.update(info)
        return self.array, reward, terminated, truncated, self.info


class NestedDictEnv(SpaceEnv):
    """An environment with nested Dict observations and actions, like those of a robot."""

    def __init__(self, env_id: int = 0) -> None:
        observation_space = spaces.Dict(
            {
                "camera": spaces.Box(0, 255, (4, 4, 3), np.uint8),
                "joints": spaces.Dict(
                    {
                        "position": spaces.Box(-1, 1, (3,), np.float32),
                        "velocity": spaces.Box(-10, 10, (3,), np.float64),
                    }
                ),
                "mode": spaces.Tuple((spaces.Discrete(3, start=-1), spaces.MultiBinary(4))),
            }
        )
        action_space = spaces.Dict(
            {
                "gripper": spaces.Discrete(2),
                "arm": spaces.Dict({"torque": spaces.Box(-1, 1, (3,), np.float32), "gear": spaces.MultiDiscrete([3, 2])}),
            }
        )
        super().__init__(observation_space, action_space, env_id, lengths=(4 + env_id, 2))


class CustomSpace(spaces.Space):
    """A space that Gymnasium does not support."""

    def __init__(self) -> None:
        super().__init__(None, None)

    def sample(self, mask: Any = None, probability: Any = None) -> str:
        return f"sample {self.np_random.integers(10)}"

    def contains(self, x: Any) -> bool:
        return isinstance(x, str)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, CustomSpace)

    __hash__ = None  # type: ignore[assignment]


class SameLengthSpace(CustomSpace):
    """A custom space of arrays of any length. Those of a batch must have the same length."""


@concatenate.register(SameLengthSpace)
def _(space: Any, items: Any, out: Any) -> Any:
    return np.stack(list(items))


# spaces with values of a fixed size, which shared memory can hold
FIXED_SPACES: dict[str, spaces.Space] = {
    "box-float16": spaces.Box(-1, 1, (3,), np.float16),
    "box-float32": spaces.Box(-1, 1, (2, 3), np.float32),
    "box-float64": spaces.Box(-np.inf, np.inf, (2,), np.float64),
    "box-0d": spaces.Box(0, 1, (), np.float32),
    "box-empty": spaces.Box(0, 1, (0,), np.float32),
    "box-image": spaces.Box(0, 255, (4, 5, 3), np.uint8),
    "box-int8": spaces.Box(-128, 127, (3,), np.int8),
    "box-int16": spaces.Box(-5, 5, (3,), np.int16),
    "box-int32": spaces.Box(-5, 5, (3,), np.int32),
    "box-int64": spaces.Box(-(2**40), 2**40, (3,), np.int64),
    "box-uint16": spaces.Box(0, 60000, (3,), np.uint16),
    "box-uint32": spaces.Box(0, 10, (3,), np.uint32),
    "box-bounds": spaces.Box(np.array([-1, 0], np.float32), np.array([1, 5], np.float32)),
    "discrete": spaces.Discrete(5),
    "discrete-start": spaces.Discrete(5, start=-2),
    "multi-discrete": spaces.MultiDiscrete([2, 3, 4]),
    "multi-discrete-2d": spaces.MultiDiscrete(np.array([[2, 3], [4, 5]])),
    "multi-discrete-start": spaces.MultiDiscrete([2, 3], start=[5, -5]),
    "multi-binary": spaces.MultiBinary(4),
    "multi-binary-2d": spaces.MultiBinary((2, 3)),
    "tuple": spaces.Tuple((spaces.Discrete(3), spaces.Box(-1, 1, (2,), np.float32))),
    "tuple-nested": spaces.Tuple((spaces.Tuple((spaces.MultiBinary(2), spaces.Discrete(2))), spaces.Discrete(4))),
    "dict": spaces.Dict({"position": spaces.Box(-1, 1, (2,), np.float32), "key": spaces.Discrete(3)}),
    "dict-nested": spaces.Dict(
        {
            "outer": spaces.Dict({"inner": spaces.Tuple((spaces.Discrete(2), spaces.Box(0, 1, (3,), np.float64)))}),
            "flag": spaces.MultiBinary(2),
        }
    ),
}
# spaces with values of varying size or type
VARYING_SPACES: dict[str, spaces.Space] = {
    "text": spaces.Text(8, min_length=1),
    "text-charset": spaces.Text(5, charset="äöü€"),
    "one-of": spaces.OneOf((spaces.Discrete(3), spaces.Box(-1, 1, (2,), np.float32))),
    "sequence": spaces.Sequence(spaces.Box(-1, 1, (2,), np.float32)),
    "sequence-stacked": spaces.Sequence(spaces.Discrete(5), stack=True),
    "graph": spaces.Graph(spaces.Box(-1, 1, (2,), np.float32), spaces.Discrete(3)),
    "graph-without-edges": spaces.Graph(spaces.Discrete(4), None),
    "dict-with-text": spaces.Dict({"word": spaces.Text(6), "number": spaces.Box(-1, 1, (2,), np.float32)}),
    "tuple-with-one-of": spaces.Tuple((spaces.Discrete(3), spaces.OneOf((spaces.Discrete(2), spaces.Text(3))))),
    "dict-with-sequence": spaces.Dict({"items": spaces.Sequence(spaces.Discrete(3)), "n": spaces.Discrete(4)}),
    "dict-with-graph": spaces.Dict(
        {"map": spaces.Graph(spaces.Box(-1, 1, (1,), np.float32), None), "at": spaces.Discrete(4)}
    ),
}
ALL_SPACES = FIXED_SPACES | VARYING_SPACES
