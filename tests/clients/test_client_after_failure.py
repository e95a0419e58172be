"""After any failure a client's next reset of all environments goes on, whatever was pending."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from typing import Any

import gymnasium as gym
import numpy as np
import pytest

import vecenv
from vecenv.errors import StepTimeout

COUNT, FAULTY = 4, 1
FINE, RAISES, DIES, LATE = range(4)
SECONDS = 3.0
"""How late an environment is: later than ``step_timeout``, and there before a reset has waited twice."""


class Faulty(gym.Env[Any, Any]):
    """Counts its steps, and fails as its action says."""

    observation_space = gym.spaces.Box(0, 1e6, (1,))
    action_space = gym.spaces.Discrete(4)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.steps = 0
        return np.zeros(1, np.float32), {}

    def step(self, action: Any) -> Any:
        if action == RAISES:
            raise ValueError("the lid is stuck")
        if action == DIES:
            os.kill(os.getpid(), signal.SIGKILL)
        if action == LATE:
            time.sleep(SECONDS)
        self.steps += 1
        return np.full(1, self.steps, np.float32), 1.0, False, False, {}


class Sb3:
    """What a program that uses Stable-Baselines3 does with environments."""

    def __init__(self, envs: Any) -> None:
        pytest.importorskip("stable_baselines3", reason="needs Stable-Baselines3: pip install 'vecenv[clients]'")
        from vecenv.adapters import as_sb3

        self.envs = as_sb3(envs)
        self.close = self.envs.close

    def reset(self) -> Any:
        return self.envs.reset()

    def step(self, actions: Any) -> Any:
        return self.envs.step(actions)[0]


class TorchRL:
    """What a program that uses TorchRL does."""

    def __init__(self, envs: Any) -> None:
        pytest.importorskip("torchrl", reason="needs TorchRL: pip install 'vecenv[clients]'")
        from vecenv.adapters import as_torchrl

        self.envs = as_torchrl(envs, categorical_action_encoding=True)
        self.close = self.envs.close

    def reset(self) -> Any:
        self.data = self.envs.reset()
        return self.data["observation"].numpy()

    def step(self, actions: Any) -> Any:
        import torch

        return self.envs.step(self.data.set("action", torch.from_numpy(actions)))["next", "observation"].numpy()


class Tianshou:
    """What a program that uses Tianshou does."""

    wait_num: int | None = None

    def __init__(self, envs: Any) -> None:
        pytest.importorskip("tianshou", reason="needs Tianshou: pip install 'vecenv[clients]'")
        from vecenv.adapters import as_tianshou

        self.envs = as_tianshou(envs, self.wait_num)
        self.close = self.envs.close

    def reset(self) -> Any:
        return self.envs.reset()[0]

    def step(self, actions: Any) -> Any:
        return self.envs.step(actions, np.arange(COUNT))[0]


class TianshouAsync(Tianshou):
    """The same in asynchronous mode: a step of all is fetched in two parts."""

    wait_num = 2

    def step(self, actions: Any) -> Any:
        found = np.zeros((COUNT, 1), np.float32)
        for given in (actions, None):
            observations, *_, infos = self.envs.step(given, np.arange(COUNT))
            found[[info["env_id"] for info in infos]] = observations
        return found


CLIENTS = [Sb3, TorchRL, Tianshou, TianshouAsync]


def engine(on_failure: str, **options: Any) -> Any:
    return vecenv.AsyncVectorEnv(
        [Faulty] * COUNT, num_workers=COUNT, context="forkserver", on_failure=on_failure, step_timeout=SECONDS / 2, **options
    )


@pytest.mark.long
@pytest.mark.parametrize("fault", [RAISES, DIES, LATE], ids=["raises", "dies", "late"])
@pytest.mark.parametrize("on_failure", ["raise", "restart"])
@pytest.mark.parametrize("client", CLIENTS)
def test_the_next_reset_goes_on(client: Callable[[Any], Any], on_failure: str, fault: int) -> None:
    envs = client(engine(on_failure))
    envs.reset()
    actions = np.where(np.arange(COUNT) == FAULTY, fault, FINE)
    if on_failure == "raise":
        with pytest.raises({RAISES: ValueError, DIES: vecenv.errors.WorkerDied, LATE: StepTimeout}[fault]):
            envs.step(actions)
    else:
        envs.step(actions)
    for patience in (2, 1, 0):  # a reset waits for an environment that is late, and may say again that it is
        try:
            observations = envs.reset()
            break
        except StepTimeout:
            assert fault == LATE
            assert patience
    assert observations.tolist() == [[0.0]] * COUNT
    assert envs.step(np.zeros(COUNT, np.int64)).tolist() == [[1.0]] * COUNT
    envs.close()


@pytest.mark.parametrize("client", CLIENTS)
def test_what_was_interrupted_is_dropped_by_the_next_reset(client: Callable[[Any], Any]) -> None:
    class Pressed(Exception):
        pass

    def press(*_: Any) -> None:
        raise Pressed

    envs = client(engine("raise"))
    envs.reset()
    before = signal.signal(signal.SIGALRM, press)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.3)
        with pytest.raises(Pressed):
            envs.step(np.where(np.arange(COUNT) == FAULTY, LATE, FINE))
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    for patience in (2, 1, 0):
        try:
            assert envs.reset().tolist() == [[0.0]] * COUNT
            break
        except StepTimeout:
            assert patience
    assert envs.step(np.zeros(COUNT, np.int64)).tolist() == [[1.0]] * COUNT
    envs.close()


def test_tianshou_resets_the_one_that_failed_and_keeps_what_the_others_did() -> None:
    venv = TianshouAsync(engine("raise")).envs
    venv.reset()
    actions = np.where(np.arange(COUNT) == FAULTY, RAISES, FINE)
    with pytest.raises(ValueError, match="stuck"):
        all(venv.step(given, np.arange(COUNT)) for given in (actions, None))
    assert FAULTY in venv.ready_id
    observations, _ = venv.reset([FAULTY])
    assert observations.tolist() == [[0.0]]
    while venv.waiting_id:
        observations, *_, infos = venv.step(None)
        assert observations.tolist() == [[1.0]] * len(infos)
    observations, *_ = venv.step(np.zeros(1, np.int64), [FAULTY])
    assert observations.tolist() == [[1.0]]
    venv.close()
