"""Environments with OpenRL's interface (``agent_num``, stacked arrays), and the view that ``to_openrl`` returns."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest
from agent_games import RandomGame, ScriptedGame
from gymnasium import spaces
from gymnasium.vector import AutoresetMode

from vecenv.multi_agent import MultiAgentVecEnv


class StackedGame:
    """A game of two agents. Agent 0 is done after two steps, agent 1 after four.

    Args:
        values: The number of values that ``step`` returns, 4 or 5.
        with_info: ``reset`` returns an info.
        resets_itself: The game resets itself at the end of an episode, and ``has_auto_reset`` is true.
        masks: Infos have ``action_masks``.
    """

    agent_num = 2
    env_name = "stacked"
    metadata: dict[str, Any] = {"render_modes": ["rgb_array"]}  # noqa: RUF012
    render_mode = "rgb_array"

    def __init__(
        self,
        values: int = 5,
        with_info: bool = True,
        resets_itself: bool = False,
        masks: bool = False,
    ) -> None:
        self.values, self.with_info, self.has_auto_reset = values, with_info, resets_itself
        self.masks = masks
        self.observation_space = spaces.Box(-99, 99, (1,), np.float32)
        self.action_space = spaces.Discrete(3)
        self.resets: list[Any] = []

    def _observe(self) -> Any:
        return np.array([[self.time], [self.time + 10]], np.float32)

    def _info(self) -> dict[str, Any]:
        info: dict[str, Any] = {"score": self.time}
        if self.masks:
            info["action_masks"] = np.array([[1, 0, 1], [0, 1, 1]])
        return info

    def reset(self, seed: int | None = None) -> Any:
        self.resets.append(seed)
        self.time = 0
        return (self._observe(), self._info()) if self.with_info else self._observe()

    def step(self, actions: Any) -> Any:
        assert actions.shape == (2,)
        self.time += 1
        done = np.array([self.time >= 2, self.time >= 4])
        rewards = np.array([[1.0], [2.0]])
        obs, info = self._observe(), self._info()
        if self.has_auto_reset and done.all():
            self.time = 0
            info = {**info, "final_observation": obs}
            obs = self._observe()
        if self.values == 4:
            return obs, rewards, done, info
        return obs, rewards, done, np.zeros(2, np.bool_), info

    def render(self) -> Any:
        return np.full((2, 3, 3), self.time, np.uint8)

    def close(self) -> None:
        pass


@pytest.mark.sampled(8)
@pytest.mark.parametrize("values", [4, 5])
@pytest.mark.parametrize("with_info", [True, False])
@pytest.mark.parametrize("resets_itself", [True, False])
@pytest.mark.parametrize("mode", AutoresetMode)
def test_every_stacked_game_variant_steps(values: int, with_info: bool, resets_itself: bool, mode: AutoresetMode) -> None:
    env_fn = functools.partial(StackedGame, values, with_info, resets_itself)
    with MultiAgentVecEnv([env_fn] * 2, autoreset_mode=mode, num_workers=0) as envs:
        assert envs.possible_agents == ["agent_0", "agent_1"]
        assert envs.agent_num == 2
        assert envs.env_name == "stacked"
        obs, _ = envs.reset(seed=5)
        assert obs[..., 0].tolist() == [[0, 10]] * 2
        results = [envs.step(np.ones((2, 2, 1), np.int64)) for _ in range(4)]
        *_, truncations, infos = results[-1]
        assert [result[1][0].tolist() for result in results] == [[1, 2], [1, 2], [0, 2], [0, 2]]
        assert [result[2][0].tolist() for result in results] == [
            [False, False],
            [True, False],
            [False, False],
            [False, True],
        ]
        assert not truncations.any()
        assert infos["env_done"].all()
        last = infos["final_obs"] if mode is AutoresetMode.SAME_STEP else results[-1][0]
        assert last[..., 0].tolist() == [[0, 14]] * 2
        if mode is AutoresetMode.NEXT_STEP:
            obs, *_ = envs.step(np.ones((2, 2), np.int64))
        elif mode is AutoresetMode.DISABLED:
            obs, _ = envs.reset()
        else:
            obs = results[-1][0]
        assert obs[..., 0].tolist() == [[0, 10]] * 2
        assert [len(resets) for resets in envs.get_attr("resets")] == [1 if resets_itself else 2] * 2


def make_openrl_view(env_fn: Any, n: int = 2, **options: Any) -> Any:
    return MultiAgentVecEnv([env_fn] * n, **{"autoreset_mode": "SameStep", "num_workers": 0, **options}).to_openrl()


def test_to_openrl_returns_the_shapes_of_openrl(closes: Any) -> None:
    envs = closes(make_openrl_view(functools.partial(StackedGame, 4, masks=True)))
    obs, infos = envs.reset(seed=3)
    assert obs.shape == (2, 2, 1)
    assert isinstance(infos, list)
    assert envs.get_attr("resets") == ([3], [3 + 10086])
    for info in infos:
        assert info["action_masks"].tolist() == [[True, False, True], [False, True, True]]
        assert info["active_masks"].tolist() == [[1], [1]]
    results = []
    for _ in range(5):
        actions = envs.random_action(infos)
        assert actions.shape == (2, 2, 1)
        assert all(infos[i]["action_masks"][a, actions[i, a, 0]] for i in range(2) for a in range(2))
        obs, rewards, dones, infos = envs.step(actions)
        assert rewards.shape == (2, 2, 1)
        assert dones.shape == (2, 2)
        results.append((dones[0].tolist(), infos[0]["active_masks"][:, 0].tolist()))
        if dones.all():
            assert infos[0]["final_observation"][:, 0].tolist() == [0, 14]
            assert infos[0]["final_info"]["score"] == 4
        assert infos[0]["score"] == obs[0, 1, 0] - 10
    assert results == [
        ([False, False], [1, 1]), ([True, False], [0, 1]), ([True, False], [0, 1]), ([True, True], [1, 1]),
        ([False, False], [1, 1]),
    ]  # fmt: skip
    assert (envs.agent_num, envs.parallel_env_num, envs.env_name) == (2, 2, "stacked")


def test_render_returns_a_grid_or_a_single_frame(closes: Any) -> None:
    envs = closes(make_openrl_view(StackedGame, 3))
    envs.reset(seed=0)
    assert envs.render().shape == envs.render("rgb_array").shape == (4, 6, 3)
    assert envs.render("single_rgb_array").shape == (2, 3, 3)
    assert envs.render("group_rgb_array").shape == (4, 6, 3)
    assert envs.render("group_human") is None
    with pytest.raises(ValueError, match="group_rgb_array"):
        envs.render("sideways")


def test_to_openrl_of_parallel_environments_steps_and_resets_them(closes: Any) -> None:
    envs = closes(make_openrl_view(functools.partial(RandomGame, masks="info", infos=True)))
    _, infos = envs.reset(seed=0)
    ends = 0
    for _ in range(20):
        _, _, dones, infos = envs.step(envs.random_action(infos))
        ends += int(dones.all(axis=1).sum())
    assert ends > 2
    envs.call_send("state")
    assert len(envs.call_fetch()) == 2
    assert envs.exec_func(lambda env: env.time, [1])[0] is None


def test_to_openrl_needs_the_stack_layout_and_same_step_mode() -> None:
    with MultiAgentVecEnv([ScriptedGame], num_workers=0) as envs, pytest.raises(ValueError, match="SAME_STEP"):
        envs.to_openrl()
    with (
        MultiAgentVecEnv([ScriptedGame], layout="agents", autoreset_mode="SameStep", num_workers=0) as envs,
        pytest.raises(ValueError, match="'agents'"),
    ):
        envs.to_openrl()
