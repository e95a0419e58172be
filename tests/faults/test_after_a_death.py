"""What is handed out after a failure is of what there is now, or was handed out last: nothing that a dead worker wrote."""

from __future__ import annotations

import functools
import os
import signal
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.vector import AutoresetMode
from observe import FAULTS, Launch

from vecenv.errors import WorkerDied

pytestmark = FAULTS

GO, DIE, RAISE = 0, 1, 2
COUNT = 4
ENGINES = {
    "whole": ({}, "raise"),
    "masked": ({}, "raise"),
    "by name": ({}, "raise"),
    "received row by row": ({}, "raise"),
    "whole, caller's share": ({"use_caller": True}, "raise"),
    "masked, caller's share": ({"use_caller": True}, "raise"),
    "whole, pickled": ({"shared_memory": False}, "raise"),
    "whole, restart": ({}, "restart"),
    "masked, restart": ({}, "restart"),
}


class Talkative(gym.Env):
    """Each step ends the episode and has an info; only the last environment's resets have one, so that there are columns."""

    def __init__(self, index: int) -> None:
        self.index = index
        self.observation_space = gym.spaces.Box(0, 10**6, (3,), np.int64)
        self.action_space = gym.spaces.Discrete(3)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        return np.full(3, seed or 1, np.int64), {"fresh": seed or 1} if self.index == COUNT - 1 else {}

    def step(self, action: int) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        if action == DIE:
            os.kill(os.getpid(), signal.SIGKILL)
        return np.full(3, 77, np.int64), 1.0, True, False, {"stale": 77}


def reset(envs: Any, how: str) -> tuple[Any, dict[str, Any], list[int]]:
    """Reset with seeds 10, 11, ...: observations, infos, and the environments they are of."""
    if how == "masked":
        mask = np.array([True, False, False, True])
        observations, infos = envs.reset(seed=10, options={"reset_mask": mask})
        return observations[mask], {key: value[mask] for key, value in infos.items()}, [0, 3]
    if how == "by name":
        envs.reset_async([10, 11, 13], env_id=[0, 1, 3])
    elif how == "received row by row":
        envs.reset_async(10)
    else:
        return *envs.reset(seed=10), list(range(COUNT))
    observations, *_, infos = envs.recv(count=3 if how == "by name" else COUNT)
    ids = infos.pop("env_id").tolist()
    del infos["_env_id"]
    return observations, infos, ids


@pytest.mark.parametrize("mode", list(AutoresetMode), ids=lambda mode: mode.name)
@pytest.mark.parametrize("engine", ENGINES)
def test_a_reset_has_no_infos_of_the_worker_that_died(launch: Launch, engine: str, mode: AutoresetMode) -> None:
    """Environment 0 has stepped, and its sibling kills their worker: the next reset knows of no step."""
    options, on_failure = ENGINES[engine]
    how = engine.partition(",")[0]
    env_fns = [functools.partial(Talkative, index) for index in range(COUNT)]
    envs = launch(env_fns, num_workers=1 if "use_caller" in options else 2, autoreset_mode=mode,
                  on_failure=on_failure, **options)  # fmt: skip
    envs.reset(seed=1)
    victim = envs.worker_rows[-1 if "use_caller" in options else 0]
    actions = [DIE if index == victim[-1] else GO for index in range(COUNT)]
    if on_failure == "raise":
        with pytest.raises(WorkerDied):
            envs.step(actions)
    else:
        _, _, _, truncations, infos = envs.step(actions)
        assert truncations[list(victim)].all()
        assert "stale" not in infos or not infos["_stale"][list(victim)].any()
    observations, infos, ids = reset(envs, how)
    seeds = [10 + index for index in ids]
    assert observations[:, 0].tolist() == seeds
    assert set(infos) == {"fresh", "_fresh"}
    assert infos["_fresh"].tolist() == [index == COUNT - 1 for index in ids]
    assert infos["fresh"].tolist() == [seed if index == COUNT - 1 else 0 for index, seed in zip(ids, seeds, strict=True)]


class InPlace(Talkative):
    """Writes its observation into the batch itself, and may end in the middle of that."""

    def observation_buffer(self, buffer: Any) -> None:
        self.buffer = buffer

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        self.buffer[...] = seed or 1
        return self.buffer, {}

    def step(self, action: int) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.buffer[:1] = 77
        if action == RAISE:
            raise ValueError("half-way")
        if action == DIE:
            os.kill(os.getpid(), signal.SIGKILL)
        self.buffer[1:] = 77
        return self.buffer, 1.0, False, False, {}


@pytest.mark.parametrize(("fault", "error"), [(DIE, WorkerDied), (RAISE, ValueError)], ids=["death", "exception"])
@pytest.mark.parametrize("on_failure", ["raise", "restart"])
def test_a_half_written_observation_is_not_handed_out(
    launch: Launch, on_failure: str, fault: int, error: type[Exception]
) -> None:
    """A reset of others leaves the environment out that failed while it wrote: its last whole observation, or zeros."""
    envs = launch([functools.partial(InPlace, index) for index in range(COUNT)], num_workers=2, on_failure=on_failure)
    envs.reset(seed=[5, 6, 7, 8])
    if on_failure == "raise":
        with pytest.raises(error):
            envs.step([GO, fault, GO, GO])
        whole = [0, 0, 0]
    else:
        envs.send([fault, GO], [1, 2])  # and nobody receives it
        whole = [6, 6, 6]
    observations, _ = envs.reset(seed=20, options={"reset_mask": np.array([False, False, True, True])})
    assert observations[2:].tolist() == [[22] * 3, [23] * 3]
    assert observations[1].tolist() == whole


class Unlike(Talkative):
    """No two observations are alike. A reset fails, once, where there is a file of the name that its options give."""

    def observe(self) -> Any:
        return np.frombuffer(os.urandom(24), np.int64) >> 44

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        if options and (path := Path(options["fail"])).exists():
            path.unlink()
            raise ValueError("once")
        return self.observe(), {}

    def step(self, action: int) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        super().step(action)
        if action == RAISE:
            raise ValueError("it was told to")
        return self.observe(), 1.0, False, False, {}


@pytest.mark.parametrize("mode", list(AutoresetMode), ids=lambda mode: mode.name)
@pytest.mark.parametrize("shared_memory", [True, False], ids=["shared", "pickled"])
@pytest.mark.parametrize("by_row", [True, False], ids=["first ready", "lock-step"])
def test_the_last_observation_of_a_row_that_is_lost_is_the_one_that_was_handed_out_last(
    launch: Launch, by_row: bool, shared_memory: bool, mode: AutoresetMode, tmp_path: Path
) -> None:
    """Rows fail again and again, by death, by an exception, and in a reset."""
    envs = launch([functools.partial(Unlike, index) for index in range(2)], autoreset_mode=mode, on_failure="restart",
                  shared_memory=shared_memory)  # fmt: skip
    latest = list(envs.reset(seed=1)[0])

    def take(answer: tuple[Any, ...]) -> None:
        observations, infos = answer[0], answer[-1]
        ids = infos["env_id"].tolist() if by_row else [0, 1]
        for at, index in enumerate(ids):
            if "final_obs" in infos and infos["_final_obs"][at]:
                assert infos["final_obs"][at].tolist() == latest[index].tolist()
            latest[index] = observations[at]

    def step(actions: list[int]) -> list[tuple[Any, ...]]:
        if not by_row:
            return [envs.step(actions)]
        envs.send(actions, [0, 1])
        return [envs.recv(count=1), envs.recv(count=1)]

    for number, actions in enumerate([[GO, DIE], [GO, DIE], [DIE, GO], [RAISE, RAISE], [RAISE, DIE], [GO, GO], [DIE, GO]]):
        answers = step(actions)
        restarted = sum(int(answer[-1]["_restarted"].sum()) for answer in answers if "restarted" in answer[-1])
        assert restarted == sum(action != GO for action in actions)
        for answer in answers:
            take(answer)
        if number == 2:
            (tmp_path / "fail").touch()
            options = {"fail": str(tmp_path / "fail")}
            if by_row:
                envs.reset_async(options=options, env_id=[0])
                take(envs.recv(count=1))
            else:
                take(envs.reset(options={**options, "reset_mask": np.array([True, False])}))
            assert not (tmp_path / "fail").exists()
        elif mode is AutoresetMode.NEXT_STEP:
            for answer in step([GO, GO]):
                take(answer)
