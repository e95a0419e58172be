"""``make_openrl`` accepts the arguments of OpenRL's ``AsyncVectorEnv`` and supports the calls of its programs and tests."""

from __future__ import annotations

import functools
import queue
from typing import Any, ClassVar

import gymnasium as gym
import numpy as np
import pytest
from agent_games import open_games
from gymnasium import spaces
from gymnasium.error import AlreadyPendingCallError, NoAsyncCallError
from test_agents_stacked import StackedGame

import vecenv
from vecenv.multi_agent import MultiAgentVecEnv, list_of_dicts, make_openrl


class IdentityEnv:
    """A copy of OpenRL's ``IdentityEnv`` with one agent. The reward is 1 if the action equals the observation."""

    agent_num = 1
    observation_space = action_space = spaces.Discrete(2)

    def __init__(self) -> None:
        self.metadata: dict[str, Any] = {"name": "IdentityEnv"}

    def reset(self, seed: int | None = None, options: Any = None) -> Any:
        self.rng = np.random.default_rng(seed)
        self.target = self.rng.integers(2)
        return np.eye(2)[[self.target]]

    def step(self, actions: Any) -> Any:
        reward = float(actions[0] == self.target)
        self.target = self.rng.integers(2)
        return np.eye(2)[[self.target]], [[reward]], [False], {"target": int(self.target)}

    def render(self, mode: str = "human") -> None:
        pass

    def close(self) -> None:
        pass


def assert_env_name(env: Any, env_name: str) -> None:
    assert env.metadata["name"] == env_name


def test_calls_from_the_tests_of_openrl_succeed() -> None:
    env = make_openrl([IdentityEnv] * 2, shared_memory=True)
    assert env._env_name == "IdentityEnv"
    env.exec_func(assert_env_name, indices=None, env_name="IdentityEnv")
    env.call("render")
    env.set_attr("metadata", {"name": "IdentityEnvNew"})
    env.exec_func(assert_env_name, indices=None, env_name="IdentityEnvNew")
    env.close()
    assert env.closed


def test_send_and_fetch_return_the_shapes_of_openrl(closes: Any) -> None:
    space = spaces.Discrete(2)
    env = closes(make_openrl([IdentityEnv] * 3, space, space, num_workers=0))
    env.reset_send(seed=1)
    with pytest.raises(AlreadyPendingCallError):
        env.step_send(np.zeros((3, 1, 1), int))
    obs, infos = env.reset_fetch()
    assert obs.shape == (3, 1, 2)  # one-hot, while MultiAgentVecEnv returns a number
    assert env.envs.single_observation_space == space
    assert infos == [{**info, "active_masks": 1.0} for info in infos]
    env.step_send(obs.argmax(axis=-1)[..., None])
    obs, rewards, dones, infos = env.step_fetch()
    assert rewards.tolist() == [[[1.0]]] * 3
    assert (dones.shape, dones.dtype) == ((3, 1), np.bool_)
    assert [info["target"] for info in infos] == obs.argmax(axis=-1)[:, 0].tolist()
    assert type(infos[0]["target"]) is int
    np.testing.assert_array_equal(env.observations, obs)
    with pytest.raises(NoAsyncCallError):
        env.step_fetch()
    env.exec_func_send(lambda env, plus: env.agent_num + plus, [0, 2], 4)
    assert env.exec_func_fetch() == (5, None, 5)
    assert (env.unwrapped, env.metadata["name"], len(env.env_fns)) == (env, "IdentityEnv", 3)
    assert (env.processes, env.parent_pipes, env.seed(3)) == ([], [], None)


@pytest.mark.parametrize("values", [4, 5])
def test_step_returns_four_or_five_values_like_its_environments(values: int, closes: Any) -> None:
    env = closes(make_openrl([functools.partial(StackedGame, values)] * 2, num_workers=0))
    env.reset(seed=0)
    steps = [env.step(np.zeros((2, 2, 1), int)) for _ in range(5)]
    assert {len(step) for step in steps} == {values}
    assert [step[2][0].tolist() for step in steps] == [[False] * 2, [True, False], [True, False], [True] * 2, [False] * 2]
    if values == 5:
        assert not any(step[3].any() for step in steps)
    last = steps[3][-1][0]
    assert last["final_info"]["score"] == 4
    assert last["final_observation"][:, 0].tolist() == [0, 14]
    assert last["score"] == 0


class RaisesOnce(StackedGame):
    """A game of five values; the first step of all its environments raises."""

    errors: ClassVar[list[Exception]] = []

    def step(self, actions: Any) -> Any:
        if self.errors:
            raise self.errors.pop()
        return super().step(actions)


def test_failure_in_the_first_step_does_not_change_the_number_of_values(closes: Any) -> None:
    RaisesOnce.errors.append(RuntimeError("once"))
    env = closes(make_openrl([functools.partial(RaisesOnce, 5)] * 2, num_workers=0, on_failure="restart"))
    env.reset(seed=0)
    assert [len(env.step(np.zeros((2, 2, 1), int))) for _ in range(3)] == [5] * 3


class TruncatedInsteadOfDone(StackedGame):
    """A game that truncates its agents and never sets ``done``."""

    def step(self, actions: Any) -> Any:
        obs, rewards, done, _, info = super().step(actions)
        return obs, rewards, np.zeros_like(done), done, info


def test_truncations_and_dones_stay_separate(closes: Any) -> None:
    env = closes(make_openrl([TruncatedInsteadOfDone] * 2, num_workers=0))
    env.reset(seed=0)
    steps = [env.step(np.zeros((2, 2, 1), int)) for _ in range(4)]
    assert not any(step[2].any() for step in steps)
    assert [step[3][0].tolist() for step in steps] == [[False] * 2, [True, False], [True, False], [True] * 2]


class TimeLimitInInfo(StackedGame):
    """A game with ``TimeLimit.truncated`` in its info, like Gym before 0.26."""

    def step(self, actions: Any) -> Any:
        *rest, info = super().step(actions)
        return *rest, {**info, "TimeLimit.truncated": True}


def test_time_limit_truncated_in_an_info_is_a_truncation() -> None:
    with open_games([functools.partial(TimeLimitInInfo, 4)], num_workers=0) as envs:
        steps = [envs.step(np.zeros((1, 2, 1), int)) for _ in range(4)]
    assert not any(step[2].any() for step in steps)
    assert [step[3][0].tolist() for step in steps] == [[False] * 2, [True, False], [False] * 2, [False, True]]


def test_gymnasium_environment_has_one_agent_and_equals_sync_vector_env(closes: Any) -> None:
    env = closes(make_openrl([lambda: gym.make("CartPole-v1", render_mode="rgb_array")] * 2, num_workers=0))
    reference = closes(gym.vector.SyncVectorEnv([lambda: gym.make("CartPole-v1")] * 2, autoreset_mode="SameStep"))
    assert (env.agent_num, env.env_name) == (1, "CartPole-v1")
    obs, _ = env.reset(seed=3)
    expected, _ = reference.reset(seed=[3, 3 + 10086])  # 10086 is OpenRL's distance between the seeds of two environments
    for step in range(30):
        np.testing.assert_array_equal(obs[:, 0], expected)
        actions = np.full((2, 1, 1), step % 5 == 0, int)
        obs, rewards, terminated, truncated, infos = env.step(actions)
        expected, _, ended, _, _ = reference.step(actions[:, 0, 0])
        assert (rewards.shape, truncated.shape) == ((2, 1, 1), (2, 1))
        np.testing.assert_array_equal(terminated[:, 0], ended)
        assert [("final_observation" in info) for info in infos] == ended.tolist()
    assert env.env_is_wrapped(gym.wrappers.TimeLimit) == [True, True]
    assert env.env_is_wrapped(gym.wrappers.ClipReward, indices=1) == [False]
    assert env.exec_func(lambda env: env.spec.id) == ("CartPole-v1",) * 2
    assert env.get_attr("spec")[0].id == "CartPole-v1"


def test_gymnasium_environment_has_action_masks_and_common_infos() -> None:
    class MaskedEnv(gym.Env[Any, Any]):
        observation_space, action_space = spaces.Box(0, 1, (1,)), spaces.Discrete(3)

        def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
            super().reset(seed=seed)
            return np.zeros(1, np.float32), {"action_mask": np.array([0, 1, 0]), "level": 2}

        def step(self, action: Any) -> Any:
            assert action == 1
            return np.ones(1, np.float32), 1.0, False, True, {"action_mask": np.array([1, 0, 0]), "level": 3}

    with MultiAgentVecEnv([MaskedEnv] * 2, num_workers=0) as envs:
        _, infos = envs.reset()
        assert infos["action_mask"].tolist() == [[[False, True, False]]] * 2
        assert infos["common"]["level"].tolist() == [2, 2]
        _, _, _, truncations, infos = envs.step(np.ones((2, 1), int))
        assert truncations.all()
        assert infos["env_done"].all()


class RaisesInStep(IdentityEnv):
    def step(self, actions: Any) -> Any:
        raise ValueError(f"got action {actions.tolist()}")


def test_error_queue_contains_each_failure_once(closes: Any) -> None:
    env = closes(make_openrl([IdentityEnv, RaisesInStep, RaisesInStep], num_workers=0))
    env.reset(seed=0)
    assert env.error_queue.empty()
    with pytest.raises(ValueError, match="got action"):
        env.step(np.ones((3, 1, 1), int))
    assert env.error_queue.qsize() == 2
    queued = [env.error_queue.get(), env.error_queue.get_nowait()]
    found = [(index, kind, str(value)) for index, kind, value in queued]
    assert found == [(index, ValueError, "got action [1]") for index in (1, 2)]
    with pytest.raises(queue.Empty):
        env.error_queue.get()
    assert env.reset()[0].shape == (3, 1, 2)  # OpenRL's class hangs in a reset after a failure


class RaisesInStepFour(StackedGame):
    """A game that raises in the step that ends its first episode."""

    def step(self, actions: Any) -> Any:
        if self.time == 3:
            raise ValueError("step 4")
        return super().step(actions)


def test_agent_of_a_new_episode_is_not_done_if_the_last_step_was_lost(closes: Any) -> None:
    """The step that ends the episode of env 0 is lost, because env 1 raises in it. An agent had died before that step."""
    env = closes(make_openrl([StackedGame, RaisesInStepFour], num_workers=0))
    env.reset(seed=0)
    actions = np.zeros((2, 2, 1), int)
    assert [env.step(actions)[2][0].tolist() for _ in range(3)] == [[False] * 2, [True, False], [True, False]]
    with pytest.raises(ValueError, match="step 4"):
        env.step(actions)
    env.reset(options={"reset_mask": np.array([False, True])})
    assert [env.step(actions)[2][0].tolist() for _ in range(3)] == [[False] * 2, [True, False], [True, False]]


def test_make_openrl_accepts_auto_reset_and_render_mode(closes: Any) -> None:
    env = closes(make_openrl([StackedGame] * 2, render_mode="single_rgb_array", auto_reset=False, num_workers=0))
    env.reset(seed=0)
    assert env.render().shape == (2, 3, 3)
    for _ in range(4):
        *_, infos = env.step(np.zeros((2, 2, 1), int))
    assert "final_observation" not in infos[0]
    with pytest.raises(gym.error.ResetNeeded):
        env.step(np.zeros((2, 2, 1), int))
    env.reset(options={"reset_mask": np.ones(2, bool)})
    env.step(np.zeros((2, 2, 1), int))


def test_reset_of_the_openrl_view_accepts_a_list_of_options(closes: Any) -> None:
    env = closes(make_openrl([StackedGame] * 2, num_workers=0))
    assert env.reset(seed=0, options=[{}, None])[0].shape[:2] == (2, 2)
    assert env.step(np.zeros((2, 2, 1), int))[0].shape[:2] == (2, 2)


def test_make_openrl_with_invalid_arguments_raises() -> None:
    with pytest.raises(RuntimeError, match=r"observation space different from `Discrete\(3\)`"):
        make_openrl([IdentityEnv], spaces.Discrete(3), num_workers=0)
    with pytest.raises(TypeError, match="`worker` must be None"):
        make_openrl([IdentityEnv], worker=print)  # type: ignore[arg-type]


def test_async_vector_env_with_the_positional_spaces_of_openrl_raises() -> None:
    with pytest.raises(TypeError, match="`shared_memory` must be True or False"):
        vecenv.AsyncVectorEnv([IdentityEnv], spaces.Discrete(2))  # type: ignore[arg-type, list-item]


class PairGame(gym.Env):  # type: ignore[type-arg]
    """A game of two agents with tuples as observations, infos of mixed types, and episodes of two steps."""

    agent_num = 2
    action_space = spaces.Discrete(2)
    metadata = {"name": "pair"}  # noqa: RUF012
    observation_space = spaces.Tuple((spaces.Box(-9, 9, (3,), np.float32), spaces.Box(-9, 9, (1,), np.float32)))

    def __init__(self, index: int = 0) -> None:
        self.info = INFOS[index]
        self.t = 0

    def _observation(self) -> Any:
        return np.full((2, 3), self.t, np.float32), np.full((2, 1), self.t, np.float32)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self.t = 0
        return self._observation(), {}

    def step(self, action: Any) -> Any:
        self.t += 1
        terminated = np.array([self.t >= 2] * 2)
        return self._observation(), np.ones((2, 1)), terminated, np.zeros_like(terminated), dict(self.info)


INFOS: list[dict[str, Any]] = [
    {"score": 1, "nested": {"a": 1, "_a": None}, "action_masks": np.array([[1, 0], [1, 1]])},
    {"score": 1.5, "nested": {"a": [2]}, "action_masks": np.array([[1, 1], [0, 1]])},
    {"score": None, "lap": np.int8(3), "action_masks": np.array([[1, 1], [1, 1]])},
]
ADDED_KEYS = {  # infos that the vector environment adds to those of PairGame
    "agent_mask", "_agent_mask", "transition_mask", "env_done", "env_terminated", "active_masks", "final_observation",
}  # fmt: skip


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("num_workers", [0, 2])
def test_step_returns_mixed_infos_final_infos_and_tuple_observations(num_workers: int) -> None:
    envs = make_openrl([functools.partial(PairGame, index) for index in range(3)], num_workers=num_workers)
    try:
        envs.reset()
        actions = np.zeros((3, 2, 1), int)
        first, last = envs.step(actions)[-1], envs.step(actions)[-1]
        for expected, info, final in zip(INFOS, first, last, strict=True):
            env_info = {key: value for key, value in info.items() if key not in ADDED_KEYS}
            assert env_info["action_masks"].tolist() == (expected["action_masks"] != 0).tolist()
            assert repr({**env_info, "action_masks": expected["action_masks"]}) == repr(expected)
            assert repr(final["final_info"]) == repr(expected)
            assert [part.tolist() for part in final["final_observation"]] == [[[2.0] * 3] * 2, [[2.0]] * 2]
    finally:
        envs.close()


def test_list_of_dicts_contains_the_final_tuple_observation() -> None:
    with MultiAgentVecEnv([PairGame] * 3, autoreset_mode="SameStep", num_workers=0) as envs:
        envs.reset()
        for _ in range(2):
            infos = envs.step(np.zeros((3, 2), int))[4]
        assert [part.shape for part in list_of_dicts(infos)[1]["final_obs"]] == [(2, 3), (2, 1)]


def test_view_has_the_attributes_and_error_messages_of_openrl() -> None:
    view = make_openrl([PairGame] * 2, num_workers=0)
    try:
        assert view.shared_memory is True
        assert view.copy is True
        assert view.exec_func(lambda env: env.t, indices=[]) == (None, None)
        assert view.exec_func(lambda env: env.t, indices=[1]) == (None, 0)
        for method in ("reset_fetch", "step_fetch", "call_fetch", "exec_func_fetch"):
            with pytest.raises(NoAsyncCallError, match=f"`{method}` without any prior call to `{method[:-5]}send`"):
                getattr(view, method)()
        view.reset()
        view.step_send(np.zeros((2, 2, 1), int))
        with pytest.raises(AlreadyPendingCallError, match="Calling `step_send` while waiting"):
            view.step_send(np.zeros((2, 2, 1), int))
        view.step_fetch()
        view.close_extras(timeout=5.0, terminate=True)
        assert view.closed
    finally:
        view.close()


def test_environments_with_different_spaces_raise_runtime_error_like_openrl() -> None:
    class WideGame(PairGame):
        observation_space = spaces.Tuple((PairGame.observation_space[0],) * 2)

    with pytest.raises(RuntimeError, match="all environments must have the same agents and spaces:\nenv 1: agent 'agent_0'"):
        make_openrl([PairGame, WideGame], num_workers=0)
