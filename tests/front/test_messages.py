"""Tests of errors for common mistakes: they contain the wrong value, the expected one, and what to do."""

from __future__ import annotations

import contextlib
import importlib.util
import re
import sys
from types import SimpleNamespace
from typing import Any, ClassVar

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces

import vecenv
from vecenv import WorkerOptions
from vecenv.errors import envs_text, format_seconds, how_to_install


def test_envs_text_joins_consecutive_rows() -> None:
    rows = ([3], range(4, 8), [9, 4, 5], [], (0, 2))
    assert [envs_text(part) for part in rows] == ["env 3", "envs 4-7", "envs 4-5, 9", "envs none", "envs 0, 2"]
    assert envs_text([4, 5, 9], 5) == "env 5, of envs 4-5, 9"


def test_format_seconds_omits_zero_decimals_and_uses_the_singular() -> None:
    assert [format_seconds(seconds) for seconds in (1.0, 60.0, 0.5)] == ["1 second", "60 seconds", "0.5 seconds"]


class BasicEnv(gym.Env[Any, Any]):
    observation_space = spaces.Box(-1, 1, (2,))
    action_space: Any = spaces.Box(-1, 1, (1,))

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        return np.zeros(2, np.float32), {}

    def step(self, action: Any) -> Any:
        return np.zeros(2, np.float32), float(np.sum(action)), False, False, {}


class OldResetEnv(BasicEnv):
    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        return np.zeros(2, np.float32)


class OldStepEnv(BasicEnv):
    def step(self, action: Any) -> Any:
        return np.zeros(2, np.float32), 0.0, False, {}


class OneValueEnv(BasicEnv):
    def step(self, action: Any) -> Any:
        return (np.zeros(2, np.float32),)


class NoResultEnv(BasicEnv):
    def step(self, action: Any) -> Any:
        return None


class OldSecondResetEnv(BasicEnv):
    resets = 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self.resets += 1
        return (np.zeros(2, np.float32), {}) if self.resets == 1 else np.zeros(2, np.float32)

    def step(self, action: Any) -> Any:
        return np.zeros(2, np.float32), 0.0, True, False, {}


class WideEnv(BasicEnv):
    observation_space = spaces.Box(-1, 1, (3,))


class LargeRangeEnv(BasicEnv):
    observation_space = spaces.Box(-2, 2, (2,))


class NotAnEnv:
    """A class that is not an environment."""


class EnvWithoutClose:
    observation_space, action_space = BasicEnv.observation_space, BasicEnv.action_space
    reset, step = BasicEnv.reset, BasicEnv.step


class EnvWithoutMetadata(EnvWithoutClose):
    def close(self) -> None: ...


class Game:
    """A game with the interface of PettingZoo: spaces are methods."""

    possible_agents = ("left", "right")

    def observation_space(self, agent: str) -> Any: ...

    def action_space(self, agent: str) -> Any: ...


with_both_engines = pytest.mark.parametrize("num_workers", [0, 2], ids=["in-process", "two-workers"])


@with_both_engines
@pytest.mark.parametrize(
    ("actions", "error", "text"),
    [
        (0, TypeError, "actions: got int 0, expected a batch of 3, one per environment; nothing was sent"),
        (None, TypeError, "actions: got NoneType None, expected a batch of 3, one per environment; nothing was sent"),
        (np.array(0.5), TypeError, "actions: got a scalar, expected a batch of 3, one per environment; nothing was sent"),
        (np.zeros(3, np.float32), ValueError, "actions: got shape (3,), expected (3, 1); nothing was sent"),
        (np.zeros((3, 2)), ValueError, "actions: got shape (3, 2), expected (3, 1); nothing was sent"),
        (np.zeros((2, 1)), ValueError, "actions: got 2, expected 3, one per environment; nothing was sent"),
    ],
)
def test_invalid_actions_are_refused(num_workers: int, actions: Any, error: type[Exception], text: str) -> None:
    with contextlib.closing(vecenv.AsyncVectorEnv([BasicEnv] * 3, num_workers=num_workers)) as envs:
        envs.reset()
        for submit in (envs.step, lambda actions: envs.send(actions, np.arange(3))):
            with pytest.raises(error, match=re.escape(text)):
                submit(actions)
        for valid_actions in ([[0.5], (0.5,), np.array([0.5])], [0.5, 0.5, 0.5]):  # Gymnasium's tests pass such lists
            assert envs.step(valid_actions)[1].tolist() == [0.5] * 3


class IndexedSequence:
    """A sequence without ``__iter__``. ``iter`` accepts it, because it has ``__getitem__``."""

    def __len__(self) -> int:
        return 3

    def __getitem__(self, index: int) -> Any:
        return [[0.5], [1.0], [0.25]][index]


@with_both_engines
def test_actions_without_iter_are_accepted_as_by_gymnasium(num_workers: int) -> None:
    with contextlib.closing(vecenv.AsyncVectorEnv([BasicEnv] * 3, num_workers=num_workers)) as envs:
        envs.reset()
        assert envs.step(IndexedSequence())[1].tolist() == [0.5, 1.0, 0.25]


@with_both_engines
@pytest.mark.parametrize(
    ("env_class", "call", "text"),
    [
        (OldResetEnv, "reset", "env 0: reset returned one ndarray, expected (observation, info)"),
        (OldStepEnv, "step", "env 0: step returned 4 values, expected (observation, reward, terminated, truncated, info)"),
        (OneValueEnv, "step", "env 0: step returned 1 value, expected (observation, reward, terminated, truncated, info)"),
        (
            NoResultEnv, "step",
            "env 0: step returned one NoneType, expected (observation, reward, terminated, truncated, info)",
        ),
        (OldSecondResetEnv, "two steps", "env 0: reset returned one ndarray, expected (observation, info)"),
    ],
)  # fmt: skip
def test_invalid_return_values_are_refused(num_workers: int, env_class: Any, call: str, text: str) -> None:
    with contextlib.closing(vecenv.AsyncVectorEnv([env_class] * 2, num_workers=num_workers)) as envs:
        if call == "reset":
            with pytest.raises(TypeError, match=re.escape(text)):
                envs.reset()
            return
        envs.reset()
        if call == "two steps":
            envs.step(np.zeros((2, 1)))
        with pytest.raises(TypeError, match=re.escape(text)):
            envs.step(np.zeros((2, 1)))


@pytest.mark.parametrize(
    "options",
    [{"num_workers": 0}, {"worker_options": WorkerOptions(dummy_env=False)}, {"num_workers": "auto"}],
    ids=str,
)
@pytest.mark.parametrize(
    ("env_fn", "text"),
    [
        (NotAnEnv, "env_fns[0]() returned NotAnEnv, which has no `reset`: expected a gymnasium.Env"),
        (EnvWithoutClose, "env_fns[0]() returned EnvWithoutClose, which has no `close`: expected a gymnasium.Env"),
        (EnvWithoutMetadata, "env_fns[0]() returned EnvWithoutMetadata, which has no `metadata`: expected a gymnasium.Env"),
        (Game, "env_fns[0]() returned a PettingZoo environment: use vecenv.MultiAgentVecEnv instead"),
    ],
)
def test_non_environments_are_refused(env_fn: Any, text: str, options: dict[str, Any]) -> None:
    with pytest.raises(TypeError, match=re.escape(text)):
        vecenv.AsyncVectorEnv([env_fn] * 2, **options)


def test_duck_typed_environment_is_accepted() -> None:
    class DuckTypedEnv:
        observation_space, action_space = BasicEnv.observation_space, BasicEnv.action_space
        reset, step = BasicEnv.reset, BasicEnv.step
        metadata: ClassVar[dict[str, Any]] = {}
        render_mode = spec = None

        def close(self) -> None: ...

        @property
        def unwrapped(self) -> Any:
            return self

    with contextlib.closing(vecenv.AsyncVectorEnv([DuckTypedEnv] * 2, num_workers=0)) as envs:
        envs.reset()
        envs.step(np.zeros((2, 1)))


@with_both_engines
def test_spaces_that_no_mode_can_batch_are_refused(num_workers: int) -> None:
    with pytest.raises(RuntimeError, match="Their shapes or dtypes differ: no mode can batch these") as caught:
        vecenv.AsyncVectorEnv([BasicEnv, WideEnv], num_workers=num_workers)
    assert "observation_mode='different'" not in str(caught.value)  # with this mode, the call would also fail
    with pytest.raises(RuntimeError, match="If this is intentional, use `observation_mode='different'` instead"):
        vecenv.AsyncVectorEnv([BasicEnv, LargeRangeEnv], num_workers=num_workers)
    with pytest.raises(ValueError, match="the observation spaces of these environments cannot be batched: "):
        vecenv.AsyncVectorEnv([BasicEnv, WideEnv], num_workers=0, observation_mode="different")


def test_how_to_install_suggests_a_checkout_first() -> None:
    assert how_to_install("ray").startswith("pip install -e '.[ray]' in a checkout")


@pytest.mark.parametrize(("env_id", "installed"), [("ALE/Nosuch-v5", True), ("NosuchNoFrameskip-v4", False)])
def test_unknown_atari_id_suggests_importing_ale_py(env_id: str, installed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    original = importlib.util.find_spec

    def find_spec(name: str, *arguments: Any) -> Any:
        if name == "ale_py":
            return SimpleNamespace() if installed else None
        return original(name, *arguments)

    monkeypatch.setattr(importlib.util, "find_spec", find_spec)
    text = f"`import ale_py`, or 'ale_py:{env_id}'" if installed else "registered by `import ale_py`: pip install"
    with pytest.raises(gym.error.UnregisteredEnv, match=re.escape(text)):
        vecenv.make_vec(env_id, 2)


def test_errors_explain_swapped_arguments_and_those_of_other_libraries() -> None:
    with pytest.raises(TypeError, match=r"got a list: write vecenv\.AsyncVectorEnv\(env_fns\)"):
        vecenv.make_vec([gym.Env] * 2)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"no option 'num_envs'\. Pass that many functions: \[env_fn\] \* num_envs\."):
        vecenv.MultiAgentVecEnv([gym.Env], num_envs=2)
    with pytest.raises(TypeError, match=r"AsyncVectorEnv takes a sequence of functions .*; got \{'a': "):
        vecenv.AsyncVectorEnv({"a": BasicEnv})  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"'CartPole-v1' has no option 'n_envs'\. Did you mean 'num_envs'"):
        vecenv.make_vec("CartPole-v1", n_envs=2)
    with contextlib.closing(vecenv.make_vec("CartPole-v1", 2, "serial")) as envs:
        with pytest.raises(TypeError, match=r"evaluate\(envs, policy, episodes\).* are the first two swapped"):
            vecenv.evaluate(lambda observations: [0, 0], envs, 3)  # type: ignore[call-overload]
        with pytest.raises(TypeError, match="`images` must be an iterable of frames"):
            vecenv.write_video(envs, "video.gif")  # type: ignore[arg-type]


@pytest.mark.skipif(sys.version_info >= (3, 15), reason="EnvPool does not support this Python")
def test_error_about_an_unknown_task_suggests_only_similar_names() -> None:
    pytest.importorskip("envpool")
    with pytest.raises(gym.error.UnregisteredEnv, match=r"no task 'Foo-v1': see EnvPoolVectorEnv.task_ids"):
        vecenv.make_vec("Foo-v1", 2, "envpool")
    with pytest.raises(gym.error.UnregisteredEnv, match="did you mean 'CartPole-v1'"):
        vecenv.make_vec("CardPole-v1", 2, "envpool")
