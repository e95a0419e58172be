"""Vectors of environments with agents are saved and loaded: who is there and acts, and the environments inside."""

from __future__ import annotations

import functools
import pickle
from typing import Any

import numpy as np
import pytest
from agent_games import RandomGame

import vecenv
from vecenv.testing import assert_identical

GAMES = {
    "births and masks": functools.partial(RandomGame, births=True, masks="obs", strict=False),
    "masks in infos": functools.partial(RandomGame, masks="info", infos=True, strict=False),
    "all equal": functools.partial(RandomGame, together=True, strict=False),
}


def allowed(infos: Any) -> Any:
    """An action that is not forbidden, for each agent."""
    if "action_mask" in infos:
        return np.argmax(infos["action_mask"], axis=-1)
    return np.ones(infos["agent_mask"].shape, np.int64)


@pytest.mark.parametrize("options", [{"num_workers": 2}, {"num_workers": 0}], ids=str)
@pytest.mark.parametrize("mode", ["NextStep", "SameStep"])
@pytest.mark.parametrize("game", GAMES)
def test_games_go_on_as_those_that_were_saved(game: str, mode: str, options: dict[str, Any]) -> None:
    make = functools.partial(vecenv.MultiAgentVecEnv, [GAMES[game]] * 3, autoreset_mode=mode)
    envs, other = make(**options), make(num_workers=1)
    try:
        _, infos = envs.reset(seed=4)
        other.reset(seed=77)
        for _ in range(9):
            *_, infos = envs.step(allowed(infos))
        kept = pickle.loads(pickle.dumps(envs.save()))
        other.load(kept)
        assert_identical(other.agent_mask, envs.agent_mask)
        for number in range(30):
            wanted = envs.step(allowed(infos))
            assert_identical(other.step(allowed(infos)), wanted, f"step {number}")
            infos = wanted[4]
    finally:
        envs.close()
        other.close()
