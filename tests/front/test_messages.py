"""Errors for common mistakes state what came, what was expected, and what to do."""

from __future__ import annotations

import contextlib
import importlib.util
import re
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces

import vecenv
from vecenv import WorkerOptions
from vecenv.errors import envs_text, format_seconds, how_to_install


def test_environments_and_durations_have_one_form() -> None:
    rows = ([3], range(4, 8), [9, 4, 5], [], (0, 2))
    assert [envs_text(part) for part in rows] == ["env 3", "envs 4-7", "envs 4-5, 9", "envs none", "envs 0, 2"]
    assert envs_text([4, 5, 9], 5) == "env 5, of envs 4-5, 9"
    assert [format_seconds(seconds) for seconds in (1.0, 60.0, 0.5)] == ["1 second", "60 seconds", "0.5 seconds"]


class Plain(gym.Env[Any, Any]):
    observation_space = spaces.Box(-1, 1, (2,))
    action_space: Any = spaces.Box(-1, 1, (1,))

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        return np.zeros(2, np.float32), {}

    def step(self, action: Any) -> Any:
        return np.zeros(2, np.float32), float(np.sum(action)), False, False, {}


class OldReset(Plain):
    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        return np.zeros(2, np.float32)


class OldStep(Plain):
    def step(self, action: Any) -> Any:
        return np.zeros(2, np.float32), 0.0, False, {}


class NoStep(Plain):
    def step(self, action: Any) -> Any:
        return None


class OldAutoreset(Plain):
    resets = 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self.resets += 1
        return (np.zeros(2, np.float32), {}) if self.resets == 1 else np.zeros(2, np.float32)

    def step(self, action: Any) -> Any:
        return np.zeros(2, np.float32), 0.0, True, False, {}


class Wide(Plain):
    observation_space = spaces.Box(-1, 1, (3,))


class Large(Plain):
    observation_space = spaces.Box(-2, 2, (2,))


class Thing:
    """A class that is not an environment."""


class Unclosed:
    observation_space, action_space = Plain.observation_space, Plain.action_space
    reset, step = Plain.reset, Plain.step


class Undescribed(Unclosed):
    def close(self) -> None: ...


class Game:
    """A game like PettingZoo's: spaces are methods."""

    possible_agents = ("left", "right")

    def observation_space(self, agent: str) -> Any: ...

    def action_space(self, agent: str) -> Any: ...


ENGINES = pytest.mark.parametrize("workers", [0, 2], ids=["in process", "two workers"])


@ENGINES
@pytest.mark.parametrize(
    ("actions", "kind", "text"),
    [
        (0, TypeError, "actions: got int 0, expected 3, one per environment; nothing was sent"),
        (None, TypeError, "actions: got NoneType None, expected 3, one per environment; nothing was sent"),
        (np.array(0.5), TypeError, "actions: got a scalar, expected 3, one per environment; nothing was sent"),
        (np.zeros(3, np.float32), ValueError, "actions: got shape (3,), expected (3, 1); nothing was sent"),
        (np.zeros((3, 2)), ValueError, "actions: got shape (3, 2), expected (3, 1); nothing was sent"),
        (np.zeros((2, 1)), ValueError, "actions: got 2, expected 3, one per environment; nothing was sent"),
    ],
)
def test_actions(workers: int, actions: Any, kind: type[Exception], text: str) -> None:
    with contextlib.closing(vecenv.AsyncVectorEnv([Plain] * 3, num_workers=workers)) as envs:
        envs.reset()
        for begin in (envs.step, lambda wrong: envs.send(wrong, np.arange(3))):
            with pytest.raises(kind, match=re.escape(text)):
                begin(actions)
        for handed_on in ([[0.5], (0.5,), np.array([0.5])], [0.5, 0.5, 0.5]):  # lists, as Gymnasium's own tests require
            assert envs.step(handed_on)[1].tolist() == [0.5] * 3


class Indexed:
    """A sequence with ``__getitem__`` only, which ``iter`` accepts."""

    def __len__(self) -> int:
        return 3

    def __getitem__(self, index: int) -> Any:
        return [[0.5], [1.0], [0.25]][index]


@ENGINES
def test_sequence_without_iter_is_accepted_as_by_gymnasium(workers: int) -> None:
    with contextlib.closing(vecenv.AsyncVectorEnv([Plain] * 3, num_workers=workers)) as envs:
        envs.reset()
        assert envs.step(Indexed())[1].tolist() == [0.5, 1.0, 0.25]


@ENGINES
@pytest.mark.parametrize(
    ("kind", "call", "text"),
    [
        (OldReset, "reset", "env 0: reset returned one ndarray, expected (observation, info)"),
        (OldStep, "step", "env 0: step returned 4 values, expected (observation, reward, terminated, truncated, info)"),
        (NoStep, "step", "env 0: step returned one NoneType, expected (observation, reward, terminated, truncated, info)"),
        (OldAutoreset, "two steps", "env 0: reset returned one ndarray, expected (observation, info)"),
    ],
)
def test_returns_of_old_interfaces(workers: int, kind: Any, call: str, text: str) -> None:
    with contextlib.closing(vecenv.AsyncVectorEnv([kind] * 2, num_workers=workers)) as envs:
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
    ("made", "text"),
    [
        (Thing, "env_fns[0]() returned Thing, which has no `reset`: expected a gymnasium.Env"),
        (Unclosed, "env_fns[0]() returned Unclosed, which has no `close`: expected a gymnasium.Env"),
        (Undescribed, "env_fns[0]() returned Undescribed, which has no `metadata`: expected a gymnasium.Env"),
        (Game, "env_fns[0]() returned a PettingZoo environment: use vecenv.MultiAgentVecEnv instead"),
    ],
)
def test_non_environments_are_refused(made: Any, text: str, options: dict[str, Any]) -> None:
    with pytest.raises(TypeError, match=re.escape(text)):
        vecenv.AsyncVectorEnv([made] * 2, **options)


def test_duck_typed_environment_is_accepted() -> None:
    class Duck:
        observation_space, action_space, metadata, render_mode, spec = (
            Plain.observation_space,
            Plain.action_space,
            {},
            None,
            None,
        )
        reset, step = Plain.reset, Plain.step

        def close(self) -> None: ...

        @property
        def unwrapped(self) -> Any:
            return self

    with contextlib.closing(vecenv.AsyncVectorEnv([Duck] * 2, num_workers=0)) as envs:
        envs.reset()
        envs.step(np.zeros((2, 1)))


@ENGINES
def test_spaces_that_no_mode_can_batch(workers: int) -> None:
    with pytest.raises(RuntimeError, match="Their shapes or dtypes differ: no mode can batch these") as caught:
        vecenv.AsyncVectorEnv([Plain, Wide], num_workers=workers)
    assert "observation_mode='different'" not in str(caught.value)  # another advice that would fail, too
    with pytest.raises(RuntimeError, match="If this is intentional, use `observation_mode='different'` instead"):
        vecenv.AsyncVectorEnv([Plain, Large], num_workers=workers)
    with pytest.raises(ValueError, match="the observation spaces of these environments cannot be batched: "):
        vecenv.AsyncVectorEnv([Plain, Wide], num_workers=0, observation_mode="different")


def test_an_extra_is_installed_from_the_checkout_first() -> None:
    assert how_to_install("ray").startswith("pip install -e '.[ray]' in a checkout")


@pytest.mark.parametrize(("env_id", "installed"), [("ALE/Nosuch-v5", True), ("NosuchNoFrameskip-v4", False)])
def test_ids_of_atari(env_id: str, installed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    found = importlib.util.find_spec
    stand_in: Callable[..., Any] = lambda name, *rest: (  # noqa: E731
        (SimpleNamespace() if installed else None) if name == "ale_py" else found(name, *rest)
    )
    monkeypatch.setattr(importlib.util, "find_spec", stand_in)
    text = f"`import ale_py`, or 'ale_py:{env_id}'" if installed else r"registered by `import ale_py`: pip install"
    with pytest.raises(gym.error.UnregisteredEnv, match=text if not installed else re.escape(text)):
        vecenv.make_vec(env_id, 2)


def test_names_of_other_libraries_and_swapped_arguments() -> None:
    with pytest.raises(TypeError, match=r"got a list: write vecenv\.AsyncVectorEnv\(env_fns\)"):
        vecenv.make_vec([gym.Env] * 2)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"no option 'num_envs'\. Pass that many functions: \[env_fn\] \* num_envs\."):
        vecenv.MultiAgentVecEnv([gym.Env], num_envs=2)
    with pytest.raises(TypeError, match=r"AsyncVectorEnv takes a sequence of functions .*; got \{'a': "):
        vecenv.AsyncVectorEnv({"a": Plain})  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"'CartPole-v1' has no option 'n_envs'\. Did you mean 'num_envs'"):
        vecenv.make_vec("CartPole-v1", n_envs=2)
    with contextlib.closing(vecenv.make_vec("CartPole-v1", 2, "serial")) as envs:
        with pytest.raises(TypeError, match=r"evaluate\(envs, policy, episodes\).* are the first two swapped"):
            vecenv.evaluate(lambda observations: [0, 0], envs, 3)  # type: ignore[call-overload]
        with pytest.raises(TypeError, match="`images` must be an iterable of frames"):
            vecenv.write_video(envs, "video.gif")  # type: ignore[arg-type]


@pytest.mark.skipif(sys.version_info >= (3, 15), reason="no EnvPool")
def test_envpool_suggests_only_similar_names() -> None:
    pytest.importorskip("envpool")
    with pytest.raises(gym.error.UnregisteredEnv, match=r"no task 'Foo-v1': see EnvPoolVectorEnv.task_ids"):
        vecenv.make_vec("Foo-v1", 2, "envpool")
    with pytest.raises(gym.error.UnregisteredEnv, match="did you mean 'CartPole-v1'"):
        vecenv.make_vec("CardPole-v1", 2, "envpool")
