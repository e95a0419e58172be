"""``MultiAgentVecEnv``: calls, attributes, restarts, spaces and nested observations."""

from __future__ import annotations

import functools
import os
import signal
import time
from typing import Any

import numpy as np
import pytest
from agent_games import RandomGame, ScriptedGame, open_games
from gymnasium import spaces
from gymnasium.error import ResetNeeded
from gymnasium.vector import AutoresetMode
from signals import Alarm, signal_handler
from test_agents_stacked import StackedGame
from test_rllib_game import TurnsGame

from vecenv.multi_agent import MultiAgentVecEnv, StackedAgents
from vecenv.multi_agent.views import ActionMasks

# --- Calls, attributes, restarts and spaces ------------------------------------------------------

WORKERS = pytest.mark.parametrize("num_workers", [0, 2])


@WORKERS
def test_calls_and_attributes_apply_to_the_environments(num_workers: int) -> None:
    with open_games([RandomGame] * 3, num_workers=num_workers) as envs:
        assert [state.tolist() for state in envs.call("state")] == [[0, 3]] * 3
        assert envs.get_attr("length") == (6, 6, 6)
        envs.set_attr("length", [3, 4, 5])
        assert envs.get_attr("length") == (3, 4, 5)
        factor = 10
        assert envs.exec_func(lambda env, plus: env.length * factor + plus, [0, 2], 1) == (31, None, 51)
        envs.call_send("render")
        assert [frame.shape for frame in envs.call_fetch(timeout=10)] == [(4, 6, 3)] * 3
        assert len(envs.render()) == 3
        assert envs.render_mode == "rgb_array"
        assert envs.metadata["name"] == "random_game_v0"
        with pytest.raises(TypeError, match="callable that takes an environment"):
            envs.exec_func(3)  # type: ignore[arg-type]
        assert envs.stats()["resets"] == 3
        assert "random_game_v0, agents=3, layout='stack', num_envs=3" in repr(envs)


def test_interrupted_exec_func_is_dropped_by_the_next_call() -> None:
    with open_games([RandomGame] * 2, num_workers=2) as envs, signal_handler(signal.SIGALRM, Alarm):
        signal.setitimer(signal.ITIMER_REAL, 0.1)
        with pytest.raises(Alarm):
            envs.exec_func(lambda env: time.sleep(0.5))
        assert envs.exec_func(lambda env: env.length) == (6, 6)


@WORKERS
@pytest.mark.parametrize("receive", ["step_wait", "recv", "reset_wait", "results_by_row"])
def test_reset_is_needed_if_the_conversion_of_a_result_is_interrupted(
    num_workers: int, receive: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def raise_keyboard_interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    with open_games([RandomGame] * 2, num_workers=num_workers) as envs:
        actions = np.zeros((2, 3), np.int64)
        if receive == "reset_wait":
            envs.reset_async(seed=1)
        elif receive == "recv":
            envs.send(actions, [0, 1])
        else:
            envs.step_async(actions)
        with monkeypatch.context() as patch:
            patch.setattr(ActionMasks, "add", raise_keyboard_interrupt)
            with pytest.raises(KeyboardInterrupt):
                getattr(envs, receive)(*(["step_wait"] if receive == "results_by_row" else []))
        with pytest.raises(ResetNeeded, match="its result is lost"):
            envs.step_async(actions)
        envs.reset(seed=1)
        envs.step(actions)


def test_set_attr_sets_an_attribute_where_it_exists_or_on_the_game() -> None:
    class Wrapper:
        def __init__(self) -> None:
            self.env = ScriptedGame()
            self.level = 1

        def __getattr__(self, name: str) -> Any:
            return getattr(self.__dict__["env"], name)

    with MultiAgentVecEnv([Wrapper], num_workers=0) as envs:
        envs.set_attr("level", 2)
        envs.set_attr("speed", 3.0)
        envs.set_attr("new", 4)
        (attributes,) = envs.exec_func(lambda env: (env.level, env.env.speed, env.env.new, "speed" in vars(env)))
        assert attributes == (2, 3.0, 4, False)


class FaultyUntilFlagExists(ScriptedGame):
    """A game that creates the file ``flag`` in its third step and then exits, hangs or raises, unless the file exists."""

    def __init__(self, fault: str, flag: str) -> None:
        super().__init__({"a": (0, 2), "b": (0, 9)})
        self.fault, self.flag = fault, flag

    def step(self, actions: Any) -> Any:
        if self.time == 2 and not os.path.exists(self.flag):
            open(self.flag, "w").close()
            if self.fault == "exit":
                os._exit(3)
            if self.fault == "hang":
                time.sleep(60)
            raise ValueError("out of luck")
        return super().step(actions)


@pytest.mark.parametrize("mode", AutoresetMode)
@pytest.mark.parametrize("fault", ["exit", "raise", pytest.param("hang", marks=pytest.mark.long)])
def test_restart_truncates_all_live_agents(mode: AutoresetMode, fault: str, tmp_path: Any) -> None:
    healthy = functools.partial(ScriptedGame, {"a": (0, 2), "b": (0, 9)})
    fns = [healthy, functools.partial(FaultyUntilFlagExists, fault, str(tmp_path / "flag"))]
    options = {"step_timeout": 2.0} if fault == "hang" else {}
    with open_games(fns, autoreset_mode=mode, on_failure="restart", num_workers=2, **options) as envs:
        actions = np.zeros((2, 2), np.int64)
        for _ in range(2):
            envs.step(actions)
        obs, rewards, terminations, truncations, infos = envs.step(actions)
        assert rewards.tolist() == [[0, 1], [0, 0]]
        assert not terminations.any()
        assert truncations.tolist() == [[False, False], [False, True]]
        assert infos["transition_mask"].tolist() == [[False, True], [False, True]]
        assert infos["env_done"].tolist() == [False, True]
        assert infos["_restarted"].tolist() == [False, True]
        assert infos["final_obs"][1].tolist() == [[102, 102], [102, 102]]
        assert infos["agent_mask"][1].all() == (mode is AutoresetMode.SAME_STEP)
        if mode is AutoresetMode.SAME_STEP:
            assert obs[1].tolist() == [[100, 100]] * 2
        _, reset_infos = envs.reset(options={"reset_mask": np.array([True, False])})
        assert reset_infos["agent_mask"].tolist() == [[True, True], infos["agent_mask"][1].tolist()]
        assert envs.agent_mask.tolist() == reset_infos["agent_mask"].tolist()
        if mode is AutoresetMode.DISABLED:
            envs.reset(options={"reset_mask": infos["env_done"]})
        obs, _, _, _, infos = envs.step(actions)
        start = 100 if mode is AutoresetMode.NEXT_STEP else 101
        assert obs[1].tolist() == [[start, start]] * 2
        assert infos["agent_mask"][1].all()
        assert envs.stats()["restarts"] == 1


class TurnsUntilAnError(ScriptedGame):
    """A turn-based game: ``c`` leaves in the first step, and ``d`` joins in the eighth. It raises in the third if ``fails``.

    Observations have masks of two actions for ``a`` and of three for the others; only the action ``time % 2`` is allowed.
    """

    def __init__(self, fails: bool = True) -> None:
        super().__init__({"a": (0, 9), "b": (0, 9), "c": (0, 1), "d": (8, 9)})
        self.fails = fails

    @property
    def agents_to_act(self) -> tuple[str, ...]:
        return (self.agents[self.time % 2],) if self.agents else ()

    def observation_space(self, agent: str) -> spaces.Space[Any]:
        return spaces.Dict({"action_mask": spaces.MultiBinary(2 if agent == "a" else 3)})

    def action_space(self, agent: str) -> spaces.Space[Any]:
        return spaces.Discrete(2 if agent == "a" else 3)

    def _observe(self, agents: list[str]) -> dict[str, Any]:
        return {agent: {"action_mask": np.eye(2 if agent == "a" else 3, dtype=np.int8)[self.time % 2]} for agent in agents}

    def step(self, actions: Any) -> Any:
        if self.fails and self.time == 2:
            raise ValueError("out of luck")
        return super().step(actions)


@pytest.mark.parametrize("mode", AutoresetMode)
def test_restart_of_a_turn_based_game_also_truncates_agents_that_wait(mode: AutoresetMode) -> None:
    options: dict[str, Any] = {"autoreset_mode": mode, "on_failure": "restart", "num_workers": 0}
    with open_games([TurnsUntilAnError], **options) as envs:
        actions = dict.fromkeys("abcd", np.zeros(1, np.int64))
        for _ in range(2):
            envs.step(actions)
        _, rewards, terminations, truncations, infos = envs.step(actions)
        assert infos["_restarted"].tolist() == infos["env_done"].tolist() == [True]
        assert truncations.tolist() == [[True, True, False, False]]
        assert infos["transition_mask"].tolist() == [[True, False, False, False]]
        assert not rewards.any()
        assert not terminations.any()


@pytest.mark.parametrize("mode", AutoresetMode)
def test_masks_of_a_healthy_game_are_current_after_a_reset_of_the_failed_one(mode: AutoresetMode) -> None:
    games = [functools.partial(TurnsUntilAnError, fails) for fails in (False, True)]
    with open_games(games, autoreset_mode=mode, num_workers=0) as envs:
        actions = dict.fromkeys("abcd", np.zeros(2, np.int64))
        for _ in range(2):
            envs.step(actions)
        with pytest.raises(ValueError, match="out of luck"):
            envs.step(actions)
        _, infos = envs.reset(options={"reset_mask": np.array([False, True])})
        assert infos["agent_mask"].tolist() == [[False, True, False, False], [True, False, False, False]]
        assert infos["action_mask"]["a"].tolist() == [[True, True], [True, False]]
        assert infos["action_mask"]["b"].tolist() == [[False, True, False], [True] * 3]
        assert envs.step(actions)[4]["transition_mask"].tolist() == infos["agent_mask"].tolist()


class FaultyAtTime(ScriptedGame):
    """A game that raises in the step at ``fault_time``."""

    def __init__(self, fault_time: int) -> None:
        super().__init__({"a": (0, 9), "b": (0, 9)})
        self.fault_time = fault_time

    def step(self, actions: Any) -> Any:
        if self.time == self.fault_time:
            raise ValueError("out of luck")
        return super().step(actions)


def test_agents_of_an_episode_that_begins_in_a_failed_step_act_after_the_reset_of_the_failed_game() -> None:
    healthy = functools.partial(ScriptedGame, {"a": (0, 3), "b": (0, 3)})
    with open_games([healthy, functools.partial(FaultyAtTime, 3)], num_workers=0) as envs:
        actions = np.zeros((2, 2), np.int64)
        for _ in range(3):
            *_, infos = envs.step(actions)
        assert infos["env_done"].tolist() == [True, False]
        with pytest.raises(ValueError, match="out of luck"):
            envs.step(actions)  # begins the next episode of the first game
        _, infos = envs.reset(options={"reset_mask": np.array([False, True])})
        assert infos["agent_mask"].all()


def test_batches_of_every_layout_are_in_its_spaces() -> None:
    game = functools.partial(RandomGame, 4, different_spaces=True)
    groups = {"x": ["agent_0", "agent_2"], "y": ["agent_3", "agent_1"]}
    for layout in ("agents", groups):
        with MultiAgentVecEnv([game] * 2, layout=layout, num_workers=0) as envs:
            obs, _ = envs.reset(seed=0)
            assert obs in envs.observation_space
            obs, *_ = envs.step(envs.action_space.sample())
            assert obs in envs.observation_space
            assert list(envs.single_observation_space) == list(envs.single_action_space) == list(obs)
    with MultiAgentVecEnv([RandomGame] * 2, num_workers=0) as envs:
        obs, _ = envs.reset(seed=0)
        assert obs.shape == (2, 3, 3)
        assert obs in envs.observation_space
        assert envs.action_space.shape == (2, 3)
        assert envs.agent_index == {"agent_0": 0, "agent_1": 1, "agent_2": 2}
        assert envs.num_agents == envs.agent_num == 3
        assert envs.groups == {}


def test_agents_with_integer_names_can_step() -> None:
    lives = {7: (0, 3), 2: (0, 3)}
    for layout in ("stack", "agents"):
        with open_games([functools.partial(ScriptedGame, lives)] * 2, layout=layout, num_workers=0) as envs:
            actions: Any = np.zeros((2, 2), np.int64) if layout == "stack" else {7: [0, 0], 2: [0, 0]}
            assert envs.step(actions)[1].tolist() == [[1, 1]] * 2


def test_seeds_of_next_episodes_have_the_stride_of_reset() -> None:
    with open_games([ScriptedGame] * 3, seed_stride=10, autoreset_mode="SameStep", num_workers=0) as envs:
        envs.set_next_options(seed=1)
        envs.set_next_options(seed=np.int64(5), env_id=[2, 0])
        for _ in range(6):
            envs.step(np.zeros((3, 3), int))
        assert [seeds[-1] for seeds in envs.get_attr("seeds")] == [5, 11, 25]


def test_attributes_of_the_engine_are_available() -> None:
    env_fns = [ScriptedGame] * 2
    envs = MultiAgentVecEnv(env_fns, num_workers=2, step_timeout=60)
    assert len(envs.processes) == len(envs.parent_pipes) == len(envs.worker_rows) == 2
    assert (envs.step_timeout, envs.env_fns, envs.in_flight.tolist()) == (60, env_fns, [])
    envs.reset_async(env_id=[0])
    envs.abandon([0])
    assert envs.closed is False
    envs.close()
    assert envs.closed is True


# --- Nested observations, and ``exec_func`` of environments with ``agent_num`` --------------------

LEAF = spaces.Box(-99, 99, (2,), np.float32)
NESTED_SPACES: dict[str, spaces.Space[Any]] = {
    "tuple": spaces.Tuple([LEAF, spaces.Discrete(5)]),
    "tuple of one": spaces.Tuple([LEAF]),
    "tuple with a dict": spaces.Tuple([LEAF, spaces.Dict({"deep": LEAF})]),
    "dict in a dict": spaces.Dict({"near": LEAF, "far": spaces.Dict({"deep": LEAF, "place": spaces.Discrete(5)})}),
    "tuple in a dict": spaces.Dict({"both": spaces.Tuple([LEAF, LEAF])}),
}


def make_value(space: spaces.Space[Any], time: int) -> Any:
    """Return a value as OpenRL's environments do: each leaf has an axis of agents, and ``Discrete`` is one-hot."""
    if isinstance(space, spaces.Dict):
        return {key: make_value(inner, time) for key, inner in space.spaces.items()}
    if isinstance(space, spaces.Tuple):
        return tuple(make_value(inner, time) for inner in space.spaces)
    if isinstance(space, spaces.Discrete):
        return np.eye(5)[[time, time + 1]]
    return np.array([[time, 0], [time, 1]], np.float32)


class NestedGame:
    """A game of two agents that observe the time, in a nested space."""

    agent_num = 2
    metadata: dict[str, Any] = {}  # noqa: RUF012

    def __init__(self, kind: str, with_info: bool) -> None:
        self.observation_space, self.with_info = NESTED_SPACES[kind], with_info
        self.action_space = spaces.Discrete(2)

    def reset(self, seed: int | None = None) -> Any:
        self.time = 0
        observation = make_value(self.observation_space, 0)
        return (observation, {}) if self.with_info else observation

    def step(self, actions: Any) -> Any:
        self.time += 1
        return make_value(self.observation_space, self.time), np.zeros((2, 1)), np.zeros(2, bool), {}

    def close(self) -> None:
        pass


def assert_batch_at(space: spaces.Space[Any], batch: Any, time: int) -> None:
    """Assert that a batch of three games contains the observations at ``time``."""
    if isinstance(space, spaces.Dict):
        for key, inner in space.spaces.items():
            assert_batch_at(inner, batch[key], time)
    elif isinstance(space, spaces.Tuple):
        assert isinstance(batch, tuple)
        for inner, part in zip(space.spaces, batch, strict=True):
            assert_batch_at(inner, part, time)
    elif isinstance(space, spaces.Discrete):
        assert batch.tolist() == [[time, time + 1]] * 3
    else:
        assert batch.tolist() == [[[time, 0], [time, 1]]] * 3


@pytest.mark.sampled(5)
@pytest.mark.parametrize("with_info", [True, False])
@pytest.mark.parametrize("kind", NESTED_SPACES)
def test_nested_observations_are_batched_by_leaf(kind: str, with_info: bool) -> None:
    with MultiAgentVecEnv([functools.partial(NestedGame, kind, with_info)] * 3, num_workers=0) as envs:
        space = NESTED_SPACES[kind]
        obs, _ = envs.reset(seed=1)
        assert_batch_at(space, obs, 0)
        obs, *_ = envs.step(np.zeros((3, 2), np.int64))
        assert_batch_at(space, obs, 1)
        assert envs.observation_space.contains(obs)


def set_length(env: Any, length: int) -> str:
    env.length = length
    return type(env).__name__


@pytest.mark.parametrize("env_fn", [StackedGame, lambda: StackedAgents(StackedGame()), TurnsGame])
@pytest.mark.parametrize("num_workers", [0, 1])
def test_changes_by_exec_func_are_visible_to_later_calls(env_fn: Any, num_workers: int) -> None:
    with MultiAgentVecEnv([env_fn] * 2, num_workers=num_workers) as envs:
        assert envs.exec_func(set_length, None, 7) == ("TurnsGame" if env_fn is TurnsGame else "StackedGame",) * 2
        assert envs.exec_func(lambda env: vars(env)["length"]) == (7, 7)
        assert envs.get_attr("length") == (7, 7)
        envs.set_attr("metadata", {"name": "another"})
        assert envs.exec_func(lambda env: env.metadata) == ({"name": "another"},) * 2
        if env_fn is TurnsGame:
            return
        assert envs.get_attr("observation_space") == (spaces.Box(-99, 99, (1,), np.float32),) * 2
        assert envs.get_attr("possible_agents") == (["agent_0", "agent_1"],) * 2
