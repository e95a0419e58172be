"""Who is there, who acted, whose episode is over: the rules of masks and flags, step by step."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest
from agent_games import RandomGame, Scripted, playing
from gymnasium.error import ResetNeeded
from gymnasium.vector import AutoresetMode

from vecenv.multi_agent import MultiAgentVecEnv

T, F = True, False


def scripted(n: int = 2, **kwargs: Any) -> list[Any]:
    return [functools.partial(Scripted, **kwargs)] * n


def play(envs: MultiAgentVecEnv, steps: int) -> list[Any]:
    return [envs.step(np.zeros((envs.num_envs, envs.num_agents), np.int64)) for _ in range(steps)]


def test_an_agent_without_a_last_observation_gets_padding_and_no_error() -> None:
    with playing(scripted(1, silent=("a",)), pad_value=-3, num_workers=0) as envs:
        results = play(envs, 2)
    assert results[1][0][0, 0].tolist() == [-3, -3]
    assert results[1][2][0, 0]
    assert results[1][-1]["transition_mask"][0, 0]


@pytest.mark.parametrize("mode", AutoresetMode)
def test_any_end_is_the_end_of_the_episode_where_asked(mode: AutoresetMode) -> None:
    with playing(scripted(2), episode_end="any", autoreset_mode=mode, num_workers=0) as envs:
        results = play(envs, 2)
        _, rewards, terminations, truncations, infos = results[-1]
        assert terminations.tolist() == [[T, F, F]] * 2
        assert truncations.tolist() == [[F, T, T]] * 2
        assert rewards.tolist() == [[1, 1, 1]] * 2
        assert infos["env_done"].all()
        assert infos["env_terminated"].all()
        assert infos["transition_mask"].all()
        assert infos["agent_mask"].all() == (mode is AutoresetMode.SAME_STEP)
        if mode is AutoresetMode.SAME_STEP:
            assert infos["final_obs"][0, :, 0].tolist() == [102, 102, 102]


def test_without_autoreset_a_finished_environment_asks_for_a_reset_and_others_go_on() -> None:
    fns = [*scripted(1, lives={"a": (0, 1)}), *scripted(1, lives={"a": (0, 3)})]
    with playing(fns, autoreset_mode=AutoresetMode.DISABLED, num_workers=0) as envs:
        (result,) = play(envs, 1)
        with pytest.raises(ResetNeeded, match=r"envs \[0\]"):
            play(envs, 1)
        options = {"reset_mask": result[-1]["env_done"]}
        obs, infos = envs.reset(options=options)
        assert list(options) == ["reset_mask"]
        assert obs[:, 0, 0].tolist() == [100, 101]
        assert not infos["transition_mask"].any()
        play(envs, 1)
        with pytest.raises(ResetNeeded, match=r"envs \[0\]"):
            envs.send(np.zeros((1, 1), np.int64), [0])


def test_a_step_before_the_first_reset_is_refused() -> None:
    with MultiAgentVecEnv(scripted(2), num_workers=0) as envs:
        with pytest.raises(ResetNeeded, match=r"\[0, 1\]"):
            play(envs, 1)
        envs.reset(options={"reset_mask": np.array([True, False])})
        with pytest.raises(ResetNeeded, match=r"\[1\]"):
            play(envs, 1)


def test_only_live_agents_actions_reach_the_environment() -> None:
    with playing(scripted(1), layout="agents", num_workers=0) as envs:
        for _ in range(2):
            envs.step({"a": [1], "b": [2], "c": np.array([[3]])})
        envs.step({"b": [2], "c": [3]})  # a is dead and may be left out
        envs.step({"a": [99], "b": [2], "c": [3]})
        (seen,) = envs.get_attr("actions")
    assert seen == [{"a": 1, "b": 2, "c": 3}] * 2 + [{"b": 2, "c": 3}] * 2


@pytest.mark.parametrize("where", ["obs", "info"])
@pytest.mark.parametrize("layout", ["stack", "agents"])
def test_action_masks_are_given_in_one_form_wherever_they_come_from(where: str, layout: str) -> None:
    game = functools.partial(RandomGame, masks=where, births=True, strict=False)
    alone = game()
    with MultiAgentVecEnv([game] * 2, layout=layout, num_workers=0) as envs:
        obs, infos = envs.reset(seed=4)
        wanted, _ = alone.reset(seed=4)
        mask = infos["action_mask"]
        assert mask.dtype == np.bool_
        assert mask.shape == (2, 3, 4)
        for index, agent in enumerate(envs.possible_agents):
            allowed = alone.allowed[agent] if agent in wanted else np.ones(4, np.bool_)
            assert np.array_equal(mask[0, index], allowed)
        assert "_action_mask" not in infos
        if where == "obs":
            observed = obs["action_mask"] if layout == "stack" else obs["agent_0"]["action_mask"]
            assert observed.dtype == np.int8


def test_action_masks_may_be_left_in_the_infos() -> None:
    game = functools.partial(RandomGame, masks="info")
    with MultiAgentVecEnv([game] * 2, action_mask=None, num_workers=0) as envs:
        _, infos = envs.reset(seed=4)
        assert infos["action_mask"].dtype == np.int8
        assert infos["_action_mask"].all()


def test_action_masks_of_different_sizes_are_a_dict_of_agents() -> None:
    class Sizes(Scripted):
        def reset(self, seed: int | None = None, options: Any = None) -> Any:
            observations, infos = super().reset(seed, options)
            for size, agent in enumerate(self.agents, 2):
                infos[agent]["action_masks"] = [1] * size
            return observations, infos

    with MultiAgentVecEnv([Sizes] * 2, num_workers=0) as envs:
        _, infos = envs.reset(seed=0)
        assert {agent: mask.shape for agent, mask in infos["action_mask"].items()} == {"a": (2, 2), "b": (2, 3), "c": (2, 4)}


def test_the_state_is_given_where_asked_and_the_last_one_too() -> None:
    game = functools.partial(RandomGame, length=4)
    with MultiAgentVecEnv([game] * 2, state=True, autoreset_mode="SameStep", num_workers=1) as envs:
        _, infos = envs.reset(seed=0)
        assert infos["state"].tolist() == [[0, 3], [0, 3]]
        assert envs.state_space.shape == (2,)
        for t in range(1, 8):
            infos = envs.step(envs.action_space.sample())[-1]
            if infos["env_done"].any():
                row = int(np.flatnonzero(infos["env_done"])[0])
                assert infos["final_state"][row].tolist() == [t, 0]
                assert infos["state"][row].tolist() == [0, 3]
                assert np.array_equal(infos["_final_state"], infos["env_done"])
                return
            assert infos["state"][:, 0].tolist() == [t, t]
    pytest.fail("no episode ended")


def test_rewards_have_the_dtype_that_was_asked_for() -> None:
    with playing(scripted(1), reward_dtype=np.float32, num_workers=0) as envs:
        assert play(envs, 1)[0][1].dtype == np.float32


def test_agent_mask_is_the_latest_one_and_a_copy() -> None:
    with MultiAgentVecEnv(scripted(1), num_workers=0) as envs:
        assert not envs.agent_mask.any()
        envs.reset(seed=0)
        play(envs, 2)
        mask = envs.agent_mask
        assert mask.tolist() == [[F, T, T]]
        mask[:] = False
        assert envs.agent_mask.any()
