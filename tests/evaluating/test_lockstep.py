"""``vecenv.evaluate`` on engines whose environments step together: the same call, as far as their seeds allow."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
import pytest
from double import DoubleVectorEnv
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from walks import SEED, choose, numbers, walks, wanted

import vecenv


@pytest.mark.parametrize("mode", AutoresetMode)
@pytest.mark.parametrize("num_envs", [1, 3, 8])
def test_gymnasiums_own_gives_the_same(num_envs: int, mode: AutoresetMode) -> None:
    envs = SyncVectorEnv(walks(num_envs), autoreset_mode=mode)
    for count in (10, 1):
        assert numbers(vecenv.evaluate(envs, choose, count, seed=SEED)) == wanted(count)
    envs.close()


def test_each_episode_has_its_options_there_too() -> None:
    episodes = [vecenv.Episode(options={"start": float(index % 3)}) for index in range(7)]
    envs = SyncVectorEnv(walks(3))
    results = vecenv.evaluate(envs, lambda seen: np.zeros(len(seen), int), episodes, seed=SEED)
    envs.close()
    assert [each.episode_return / each.length for each in results] == [0, 1, 2, 0, 1, 2, 0]


def test_a_policy_sees_the_latest_info_of_each_row() -> None:
    def policy(observations: Any, infos: Any, begins: Any) -> Any:
        for seen, info, begun in zip(observations, infos, begins, strict=True):
            assert info == {"reset": True} if begun else info["t"] == seen[1]
        return np.zeros(len(observations), int)

    envs = SyncVectorEnv(walks(3))
    assert len(vecenv.evaluate(envs, policy, 8, seed=SEED)) == 8
    envs.close()


@pytest.mark.parametrize("num_envs", [1, 3])
def test_the_double_gives_the_same_for_every_number_of_rows(num_envs: int) -> None:
    with_rows = []
    for count in (num_envs, 4):
        envs = DoubleVectorEnv(count)
        with_rows.append(numbers(vecenv.evaluate(envs, lambda seen: (seen[:, 0] % 5).astype(int), 7, seed=10)))
        envs.close()
    assert with_rows[0] == with_rows[1]
    assert {each[3] for each in with_rows[0]} == {3, 4, 5}


def test_what_an_engine_cannot_do_is_refused_by_name() -> None:
    envs = DoubleVectorEnv(2)
    for options, says in (
        ({"timeout": 1}, "DoubleVectorEnv cannot end environments that hang"),
        ({"frames": [0]}, "DoubleVectorEnv cannot give frames"),
        ({"episodes": [vecenv.Episode(options={"a": 1})]}, "DoubleVectorEnv cannot evaluate episodes with options"),
    ):
        given: dict[str, Any] = {"episodes": 3, **options}
        with pytest.raises(NotImplementedError, match=says):
            vecenv.evaluate(envs, lambda seen: np.zeros(len(seen), int), **given)
    envs.close()
    native = vecenv.make_vec("CartPole-v1", 2, "native")
    with pytest.raises(NotImplementedError, match="cannot evaluate episodes with a seed each: its environments share"):
        vecenv.evaluate(native, lambda seen: np.zeros(len(seen), int), 3)
    native.close()


def test_games_of_several_agents_are_refused() -> None:
    class Agents(SyncVectorEnv):
        possible_agents = ("a", "b")

    envs = Agents([lambda: gymnasium.make("CartPole-v1")])
    with pytest.raises(NotImplementedError, match="cannot evaluate episodes of several agents"):
        vecenv.evaluate(envs, choose, 3)
    envs.close()
