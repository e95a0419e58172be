"""Errors about mistakes of environments and callers name the environments and agents."""

from __future__ import annotations

import collections
import contextlib
import functools
import re
from decimal import Decimal
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from agent_games import AllFlagGame, FaultyGame, RandomGame, ScriptedGame, open_games
from gymnasium import spaces

import vecenv
from vecenv.multi_agent import MultiAgentVecEnv
from vecenv.multi_agent.adapter import AgentsEnv

WORKERS = pytest.mark.parametrize("num_workers", [0, 2])


@WORKERS
def test_constructor_names_all_environments_with_different_agents_or_spaces(num_workers: int) -> None:
    def make_other_space() -> Any:
        return ScriptedGame(observation_size=5)

    def make_other_agents() -> Any:
        return ScriptedGame({"a": (0, 1), "x": (0, 1)})

    def make_other_order() -> Any:
        return ScriptedGame({"c": (0, 1), "b": (0, 1), "a": (0, 1)})

    env_fns = [ScriptedGame, make_other_space, ScriptedGame, make_other_agents, make_other_order, object]
    with pytest.raises(ValueError, match="same agents and spaces") as caught:
        MultiAgentVecEnv(env_fns, num_workers=num_workers)
    text = str(caught.value)
    for agent in "abc":
        assert f"env 1: agent '{agent}': observation_space" in text
    assert "env 3: possible_agents are ['a', 'x'] (missing ['b', 'c'], unexpected ['x'])" in text
    assert "env 4" in text
    assert "another order" in text
    assert "env 5" in text
    assert "env 2" not in text


@pytest.mark.parametrize("as_list", [False, True])
def test_step_with_a_dict_of_actions_names_the_suitable_layout(as_list: bool) -> None:
    with contextlib.closing(MultiAgentVecEnv([ScriptedGame] * 2, num_workers=0, layout="stack")) as envs:
        envs.reset(seed=1)
        actions: Any = dict.fromkeys(envs.possible_agents, 0)
        text = re.escape("layout 'stack' takes an array [env, agent] of shape (2, 3), with agents in the order of envs.")
        with pytest.raises(ValueError, match=rf"{text}.*layout='agents' takes a dict; nothing was sent"):
            envs.step([actions] * 2 if as_list else actions)
        envs.step(np.zeros((2, 3), int))


class EnvWithoutAgents:
    def close(self) -> None:
        pass


@pytest.mark.parametrize("env_class", [EnvWithoutAgents, object])
def test_constructor_with_an_environment_without_agents_raises(env_class: Any) -> None:
    with pytest.raises(TypeError, match=r"possible_agents.*from_aec"):
        MultiAgentVecEnv([env_class], num_workers=0)


class GameWithoutClose(ScriptedGame):
    @property
    def close(self) -> Any:
        raise AttributeError("close")


def test_environments_without_close_can_be_saved_and_closed(caplog: pytest.LogCaptureFixture) -> None:
    with open_games([GameWithoutClose] * 2, num_workers=0) as envs:
        envs.reset(seed=1)
        envs.load(envs.save())
    assert not caplog.records


class TurnBasedGame(ScriptedGame):
    def agent_iter(self) -> Any:
        raise NotImplementedError


def test_constructor_with_a_turn_based_environment_names_from_aec() -> None:
    with pytest.raises(TypeError, match=r"is turn based \(AEC\): write vecenv\.multi_agent\.from_aec"):
        MultiAgentVecEnv([TurnBasedGame], num_workers=0)


def repeat_step(envs: MultiAgentVecEnv, actions: Any, times: int) -> None:
    for _ in range(times):
        envs.step(actions)


@pytest.mark.sampled(6)
@WORKERS
@pytest.mark.parametrize(
    ("fault", "error", "match"),
    [
        ("unknown agent", ValueError, r"env 1: unknown agents \['stranger'\].*\['a', 'b'\]"),
        ("unknown reward", ValueError, r"env 1: unknown agents \['stranger'\]"),
        ("wrong shape", vecenv.errors.ObservationError, r"env 1, agent 'b'.*shape \(7,\).*expected shape \(2,\)"),
        ("no observation", vecenv.errors.ObservationError, r"env 1, agent 'b': is alive, but has no observation"),
        ("no reward", vecenv.errors.ObservationError, r"env 1, agent 'b': reward is missing.*got rewards of \['a'\]"),
        ("no reward at its end", vecenv.errors.ObservationError, r"env 1, agent 'b': reward is missing"),
        ("text as reward", vecenv.errors.ObservationError, r"env 1, agent 'b': reward: got 'a lot'"),
        ("raises", ValueError, "out of luck"),
        ("four values", ValueError, "env 1: step must return five dicts, got a tuple of 4"),
        ("revival", ValueError, "env 1, agent 'a': came back"),
    ],
)
def test_step_names_all_environments_with_the_same_mistake(fault: str, error: Any, match: str, num_workers: int) -> None:
    fns = [
        functools.partial(ScriptedGame, {"a": (0, 9), "b": (0, 9)}),
        functools.partial(FaultyGame, fault),
        functools.partial(ScriptedGame, {"a": (0, 9), "b": (0, 9)}),
        functools.partial(FaultyGame, fault),
    ]
    with open_games(fns, num_workers=num_workers) as envs:
        actions = np.zeros((4, 2), np.int64)
        with pytest.raises(error, match=match) as caught:
            repeat_step(envs, actions, 4)
        notes = "\n".join(caught.value.__notes__)
        assert "env 1" in notes
        assert "also failed in the same way: env 3" in notes
        assert {record.env for record in envs.errors} == {1, 3}
        with pytest.raises(vecenv.errors.EnvFailed, match="envs 1, 3 failed"):
            envs.step(actions)
        envs.reset(seed=0)
        _, rewards, *_ = envs.step(actions)
        assert rewards.tolist() == [[1, 1]] * 4


class RequiredRewardsGame(ScriptedGame):
    """A game that omits optional values: the rewards of newborn agents, and the last results of agents that die."""

    def step(self, actions: dict[Any, Any]) -> Any:
        observations, rewards, terminations, truncations, infos = super().step(actions)
        for agent, (born, dies) in self.lives.items():
            if born == self.time and born:
                del rewards[agent]
            if dies == self.time:
                for values in (observations, rewards, terminations, truncations, infos):
                    values.pop(agent)
        return observations, rewards, terminations, truncations, infos


@WORKERS
def test_rewards_of_newborn_and_vanished_agents_are_optional(num_workers: int) -> None:
    lives = {"a": (0, 2), "b": (1, 4), "c": (0, 6)}
    with open_games([functools.partial(RequiredRewardsGame, lives)] * 2, num_workers=num_workers) as envs:
        rewards = [envs.step(np.zeros((2, 3), np.int64))[1][1].tolist() for _ in range(6)]
        assert rewards == [[1, 0, 1], [0, 1, 1], [0, 1, 1], [0, 0, 1], [0, 0, 1], [0, 0, 0]]


class DefaultdictRewardsGame(ScriptedGame):
    """A game that returns only the reward of ``a``, in a defaultdict, like PettingZoo's conversions."""

    def step(self, actions: dict[Any, Any]) -> Any:
        observations, rewards, *rest = super().step(actions)
        rewards_of_a = {agent: reward for agent, reward in rewards.items() if agent == "a"}
        return observations, collections.defaultdict(int, rewards_of_a), *rest


def test_missing_keys_of_a_defaultdict_are_rewards_of_zero() -> None:
    with open_games([DefaultdictRewardsGame], num_workers=0) as envs:
        assert [envs.step(np.zeros((1, 3), np.int64))[1].tolist() for _ in range(3)] == [
            [[1, 0, 0]],
            [[1, 0, 0]],
            [[0, 0, 0]],
        ]


@pytest.mark.sampled(5)
@WORKERS
@pytest.mark.parametrize("removes_agents", [True, False], ids=["agents-removed", "agents-listed"])
@pytest.mark.parametrize("last_values", [True, False], ids=["last-values", "no-last-values"])
@pytest.mark.parametrize("flags", [("terminations",), ("truncations",), ("terminations", "truncations")], ids="+".join)
def test_all_flag_ends_every_agent(
    flags: tuple[str, ...], last_values: bool, removes_agents: bool, num_workers: int
) -> None:
    all_flag_game = functools.partial(AllFlagGame, flags, last_values, removes_agents)
    fns = [all_flag_game, functools.partial(ScriptedGame, AllFlagGame(()).lives)]
    with open_games(fns, num_workers=num_workers) as envs:
        actions = np.zeros((2, 4), np.int64)
        assert envs.step(actions)[2].tolist() == [[True, False, False, False]] * 2
        envs.step(actions)
        _, rewards, terminations, truncations, infos = envs.step(actions)
        living = [False, True, True, False]  # a is dead, and d is not born
        no_agents = [False] * 4
        assert terminations.tolist() == [living if "terminations" in flags else no_agents, no_agents]
        assert truncations.tolist() == [living if "truncations" in flags else no_agents, no_agents]
        assert rewards[0].tolist() == ([0, 1, 1, 0] if last_values else [0] * 4)
        assert infos["agent_mask"].tolist() == [no_agents, living]
        envs.step(actions)  # resets env 0
        _, rewards, terminations, *_ = envs.step(actions)
        assert terminations.tolist() == [[True, False, False, False], no_agents]
        assert rewards.tolist() == [[1, 1, 1, 0], [0, 1, 1, 0]]


def test_agent_named_all_ends_alone() -> None:
    with open_games([functools.partial(ScriptedGame, {"__all__": (0, 1), "b": (0, 9)})], num_workers=0) as envs:
        assert envs.step(np.zeros((1, 2), np.int64))[2].tolist() == [[True, False]]


class RewardGame(ScriptedGame):
    """A game that returns ``reward`` for all agents from the second step on."""

    def __init__(self, reward: Any) -> None:
        super().__init__({"a": (0, 9), "b": (0, 9)})
        self.reward = reward

    def step(self, actions: dict[Any, Any]) -> Any:
        observations, rewards, *rest = super().step(actions)
        return observations, dict.fromkeys(rewards, self.reward) if self.time > 1 else rewards, *rest


@pytest.mark.sampled(12)
@pytest.mark.parametrize("general_path", [False, True], ids=["ordinary-path", "general-path"])
@pytest.mark.parametrize(
    ("reward", "expected"),
    [
        *((kind(2), 2.0) for kind in (float, int, np.float16, np.float32, np.longdouble, np.int8, np.uint64)),
        (True, 1.0), (np.True_, 1.0), (np.array([2.0]), 2.0), (np.array(2), 2.0),
        (Decimal(2), None), (Fraction(2), None), (None, None), ("2", None), (np.array([2.0, 2.0]), None),
        (np.array([2.0], object), None), (2j, None),
    ],
    ids=lambda value: f"{type(value).__name__}-{value}",
)  # fmt: skip
def test_both_code_paths_accept_the_same_rewards(
    reward: Any, expected: float | None, general_path: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if general_path:
        monkeypatch.setattr(AgentsEnv, "_apply_ordinary_step", lambda *_: False)
    with open_games([functools.partial(RewardGame, reward)], num_workers=0) as envs:
        envs.step(np.zeros((1, 2), np.int64))
        if expected is None:
            with pytest.raises(vecenv.errors.ObservationError, match=r"env 0, agent 'a': reward: got .*expected one number"):
                envs.step(np.zeros((1, 2), np.int64))
        else:
            assert envs.step(np.zeros((1, 2), np.int64))[1].tolist() == [[expected, expected]]


def test_stack_layout_of_unequal_spaces_names_possible_layouts() -> None:
    game = functools.partial(RandomGame, 4, different_spaces=True)
    with pytest.raises(ValueError, match="layout='stack' needs equal spaces") as caught:
        MultiAgentVecEnv([game], layout="stack", num_workers=0)
    text = str(caught.value)
    assert "'agent_1'" in text
    assert "layout='agents'" in text
    assert "{'group_0': ['agent_0', 'agent_2'], 'group_1': ['agent_1', 'agent_3']}" in text


@pytest.mark.parametrize(
    ("layout", "match"),
    [
        ({"g": ["agent_0"]}, "missing"),
        ({"g": ["agent_0", "agent_1", "agent_2", "agent_3"]}, r"group 'g' needs equal spaces.*'agent_1'"),
        ({"g": ["agent_0", "agent_0", "agent_2"], "h": ["agent_1", "agent_3"]}, r"named twice \['agent_0'\]"),
        ({"g": ["agent_0", "agent_2", "agent_9"], "h": ["agent_1", "agent_3"]}, r"unknown \['agent_9'\]"),
        ("rows", "must be 'auto', 'stack', 'agents'"),
    ],
)
def test_constructor_with_an_unsuitable_layout_raises(layout: Any, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        MultiAgentVecEnv([functools.partial(RandomGame, 4, different_spaces=True)], layout=layout, num_workers=0)


@pytest.mark.parametrize(
    ("options", "error", "match"),
    [
        ({"episode_end": "some"}, ValueError, "episode_end"),
        ({"action_mask": "yes"}, ValueError, "action_mask"),
        ({"reward_dtype": np.int64}, ValueError, "reward_dtype"),
        ({"seed_stride": 1.5}, ValueError, "seed_stride"),
        ({"worker": print}, TypeError, "worker"),
        ({"num_workers": -1}, ValueError, "num_workers"),
        ({"unknown": 1}, TypeError, "unknown"),
        ({"state": True}, ValueError, "state_space"),
    ],
)
def test_constructor_with_invalid_options_raises(options: dict[str, Any], error: Any, match: str) -> None:
    with pytest.raises(error, match=match):
        MultiAgentVecEnv([ScriptedGame], **{"num_workers": 0, **options})


def test_constructor_with_an_id_instead_of_functions_raises() -> None:
    create: Any = MultiAgentVecEnv
    with pytest.raises(TypeError, match=r"MultiAgentVecEnv takes a sequence of functions .*; got the id 'CartPole-v1'"):
        create("CartPole-v1", 2)


def test_constructor_without_environments_or_with_a_wrong_pad_value_raises() -> None:
    with pytest.raises(ValueError, match="at least one"):
        MultiAgentVecEnv([])
    with pytest.raises(ValueError, match="pad_value -1"):
        MultiAgentVecEnv([functools.partial(RandomGame, different_spaces=True)], pad_value=-1, num_workers=0)


def test_constructor_with_a_space_without_a_fixed_size_raises() -> None:
    class TextGame(ScriptedGame):
        def observation_space(self, agent: Any) -> Any:
            return spaces.Text(5)

    with pytest.raises(TypeError, match=r"agent 'a': observation space.*no fixed size"):
        MultiAgentVecEnv([TextGame], num_workers=0)


@pytest.mark.sampled(6)
@pytest.mark.parametrize(
    ("actions", "error", "match"),
    [
        (np.zeros((2, 2), np.int64), ValueError, r"got shape \(2, 2\), expected \(2, 3\)"),
        (np.zeros(6, np.int64), ValueError, r"expected \(2, 3\)"),
        (np.zeros((2, 3)), TypeError, "got float64, expected int64"),
        ([["a"] * 3] * 2, TypeError, "expected int64"),
        ([[1, 2], [3]], ValueError, "actions"),
    ],
    ids=["too few agents", "flat", "float", "text", "ragged"],
)
@WORKERS
def test_step_with_wrong_actions_raises_and_sends_nothing(actions: Any, error: Any, match: str, num_workers: int) -> None:
    with open_games([ScriptedGame] * 2, num_workers=num_workers) as envs:
        with pytest.raises(error, match=match):
            envs.step(actions)
        obs, *_ = envs.step(np.zeros((2, 3, 1), np.int64))
        assert obs[:, 0, 0].tolist() == [101, 101]


class ByteGame(ScriptedGame):
    def action_space(self, agent: Any) -> spaces.Space[Any]:
        return spaces.Box(0, 255, (1,), np.uint8)


def test_actions_that_do_not_fit_the_dtype_reach_the_game_unchanged() -> None:
    with open_games([ByteGame], num_workers=0) as envs:
        for number, dtype in ((300, np.int64), (-1, np.int64), (200, np.uint8)):
            envs.step(np.full((1, 3, 1), number))
            (actions,) = envs.exec_func(lambda env: env.actions[-1])
            assert all(action.tolist() == [number] for action in actions.values())
            assert {action.dtype for action in actions.values()} == {np.dtype(dtype)}


class InfoGame(ScriptedGame):
    def __init__(self, infos: list[Any]) -> None:
        super().__init__({"a": (0, 9), "b": (0, 9)})
        self.next_infos = infos

    def step(self, actions: dict[Any, Any]) -> Any:
        *results, infos = super().step(actions)
        return (*results, {**infos, "b": self.next_infos[self.time - 1]})


@pytest.mark.parametrize(
    ("infos", "match"),
    [
        ([{}, [1, 2]], r"env 0, agent 'b': info must be a dict, got \[1, 2\]"),
        ([{"action_mask": [1, 0]}, {"action_mask": [1]}], "env 0, agent 'b': action_mask has length 1.* first .* length 2"),
    ],
)
def test_invalid_info_names_the_agent(infos: list[Any], match: str) -> None:
    with open_games([functools.partial(InfoGame, infos)], num_workers=0) as envs:
        actions = np.zeros((1, 2), np.int64)
        envs.step(actions)
        with pytest.raises(ValueError, match=match):
            envs.step(actions)


def test_step_names_all_live_agents_without_actions() -> None:
    with open_games([ScriptedGame] * 2, layout="agents", num_workers=0) as envs:
        with pytest.raises(ValueError, match="agent 'b' in envs 0-1; agent 'c' in envs 0-1"):
            envs.step({"a": [0, 0]})
        with pytest.raises(ValueError, match=r"unknown keys \['x'\]"):
            envs.step({"a": [0, 0], "b": [0, 0], "c": [0, 0], "x": [0, 0]})
        with pytest.raises(TypeError, match="expected a dict"):
            envs.step(np.zeros((2, 3), np.int64))
        with pytest.raises(ValueError, match=r"actions\['b'\]: got shape \(3,\)"):
            envs.step({"a": [0, 0], "b": [0, 0, 0], "c": [0, 0]})


def test_reset_without_live_agents_raises() -> None:
    with (
        MultiAgentVecEnv([functools.partial(ScriptedGame, {"a": (1, 2)})], num_workers=0) as envs,
        pytest.raises(ValueError, match="env 0: there are no agents"),
    ):
        envs.reset(seed=0)
