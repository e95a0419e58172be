"""Tests of ``ActionChunks``: its results equal those of single steps, bit for bit, in every engine."""

from __future__ import annotations

import copy
import functools
import os
import pickle
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from envs import CounterEnv, EchoEnv, counters, open_engine, scripted_env_fns
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from gymnasium.vector.utils import concatenate, create_empty_array

import vecenv
from vecenv.testing import assert_identical
from vecenv.wrappers import ActionChunks, RecordEpisodeStatistics

HORIZON = 4
ALL_MODES = pytest.mark.parametrize("mode", AutoresetMode, ids=lambda mode: mode.name)


def chunked_env_fn(env_fn: Callable[[], Any], horizon: int = HORIZON, **kwargs: Any) -> Callable[[], Any]:
    """Return a function that builds an environment with the wrapper."""
    return functools.partial(_make_chunked_env, env_fn, horizon, kwargs)


def _make_chunked_env(env_fn: Callable[[], Any], horizon: int, kwargs: dict[str, Any]) -> ActionChunks:
    return ActionChunks(env_fn(), horizon, **kwargs)


class ReferenceLoop:
    """A reference that steps one environment action by action and implements the autoreset modes."""

    def __init__(self, env: Any, mode: AutoresetMode, seed: int) -> None:
        self.env, self.mode, self.has_ended = env, mode, False
        self.env.reset(seed=seed)

    def step(self, actions: Any) -> tuple[Any, ...]:
        """Execute actions until the episode ends.

        Returns:
            The last observation, the sum of rewards, the flags, the last info, the rewards of the executed actions, and the
            final observation if an automatic reset has replaced it.
        """
        if self.has_ended:
            self.has_ended = False
            observation, info = self.env.reset()
            if self.mode is AutoresetMode.NEXT_STEP:
                return copy.deepcopy(observation), 0.0, False, False, info, [], None
        rewards = []
        for action in actions:
            observation, reward, terminated, truncated, info = self.env.step(action)
            rewards.append(float(reward))
            if terminated or truncated:
                break
        final_observation, has_ended = None, terminated or truncated
        if has_ended and self.mode is AutoresetMode.SAME_STEP:
            final_observation = copy.deepcopy(observation)
            observation, _ = self.env.reset()
        else:
            self.has_ended = has_ended
        total = functools.reduce(float.__add__, rewards, 0.0)  # sum() rounds differently since Python 3.12
        return copy.deepcopy(observation), total, terminated, truncated, info, rewards, final_observation


ENV_FNS: dict[str, Callable[[], Any]] = {
    "CartPole": functools.partial(gymnasium.make, "CartPole-v1"),
    "Pendulum": functools.partial(gymnasium.make, "Pendulum-v1", max_episode_steps=10),
    "MountainCar": functools.partial(gymnasium.make, "MountainCar-v0", max_episode_steps=7),
    "HalfCheetah": functools.partial(gymnasium.make, "HalfCheetah-v5", max_episode_steps=9),
    "nested": scripted_env_fns(1)[0],
}


@pytest.mark.sampled(6)
@pytest.mark.filterwarnings("ignore:.*:UserWarning")
@ALL_MODES
@pytest.mark.parametrize("name", ENV_FNS)
def test_chunks_equal_single_steps(name: str, mode: AutoresetMode) -> None:
    env_fn = ENV_FNS[name]
    for engine in ({"num_workers": 0}, {"num_workers": 2}):
        with open_engine([chunked_env_fn(env_fn)] * 3, autoreset_mode=mode, **engine) as envs:
            loops = [ReferenceLoop(env_fn(), mode, 5 + row) for row in range(3)]
            envs.reset(seed=5)
            envs.action_space.seed(1)
            num_ended = 0
            for _ in range(12):
                chunks = envs.action_space.sample()
                observations, rewards, terminations, truncations, infos = envs.step(chunks)
                for row, loop in enumerate(loops):
                    expected = loop.step(chunks[row])
                    results = _select_row(observations, row), rewards[row], terminations[row], truncations[row]
                    assert_identical(results, (expected[0], np.float64(expected[1]), *map(np.bool_, expected[2:4])))
                    _check_infos(infos, row, *expected[4:])
                ended = terminations | truncations
                num_ended += ended.sum()
                if mode is AutoresetMode.DISABLED and ended.any():
                    envs.reset(options={"reset_mask": ended})
                    for row in np.flatnonzero(ended):
                        loops[row].env.reset()
                        loops[row].has_ended = False
            assert num_ended > 3
            for loop in loops:
                loop.env.close()


def _select_row(observations: Any, row: int) -> Any:
    if isinstance(observations, dict):
        return {key: _select_row(part, row) for key, part in observations.items()}
    return observations[row]


def _check_infos(
    infos: dict[str, Any], row: int, info: dict[str, Any], rewards: list[float], final_observation: Any
) -> None:
    if final_observation is not None:
        assert_identical(infos["final_obs"][row], final_observation)
        infos = infos["final_info"]
    if not rewards:
        assert "chunk_steps" not in infos or not infos["_chunk_steps"][row]
        return
    assert infos["chunk_steps"][row] == len(rewards)
    assert infos["chunk_rewards"][row].tolist() == rewards + [0.0] * (HORIZON - len(rewards))
    for key, value in info.items():
        if isinstance(value, float | np.ndarray):
            np.testing.assert_array_equal(infos[key][row], value)


ARRAY_SPACES: dict[str, tuple[spaces.Space[Any], spaces.Space[Any]]] = {
    "box": (spaces.Box(-1, 2, (2, 3), np.float32), spaces.Box(-1, 2, (3, 2, 3), np.float32)),
    "number": (spaces.Box(-1, 2, (), np.float64), spaces.Box(-1, 2, (3,), np.float64)),
    "discrete": (spaces.Discrete(5, start=-2), spaces.MultiDiscrete([5] * 3, start=[-2] * 3)),
    "multi-discrete": (
        spaces.MultiDiscrete([2, 9], start=[1, 0], dtype=np.int32),
        spaces.MultiDiscrete([[2, 9]] * 3, start=[[1, 0]] * 3, dtype=np.int32),
    ),
    "multi-binary": (spaces.MultiBinary((2, 2)), spaces.MultiBinary((3, 2, 2))),
}
_TUPLE_SPACES: dict[str, spaces.Space[Any]] = {
    "dict": spaces.Dict({"a": spaces.Discrete(3), "b": spaces.Box(0, 1, (2,))}),
    "tuple": spaces.Tuple((spaces.Discrete(3), spaces.Text(4))),
    "text": spaces.Text(5),
    "sequence": spaces.Sequence(spaces.Discrete(3)),
    "graph": spaces.Graph(spaces.Box(0, 1, (2,)), spaces.Discrete(2)),
    "one-of": spaces.OneOf((spaces.Discrete(3), spaces.Box(0, 1, (2,)))),
}
ACTION_SPACES = {**ARRAY_SPACES, **{name: (space, spaces.Tuple([space] * 3)) for name, space in _TUPLE_SPACES.items()}}


def _batch_items(space: spaces.Space[Any], items: list[Any]) -> Any:
    return concatenate(space, items, create_empty_array(space, len(items)))


@pytest.mark.sampled(8)
@pytest.mark.parametrize("variable", [False, True], ids=["whole", "variable"])
@pytest.mark.parametrize("name", ACTION_SPACES)
def test_actions_of_a_chunk_equal_those_of_single_steps(name: str, variable: bool) -> None:
    space, expected = ACTION_SPACES[name]
    space = copy.deepcopy(space)
    space.seed(3)
    actions = [space.sample() for _ in range(3)]
    reference = SyncVectorEnv([functools.partial(EchoEnv, space)])
    reference.reset(seed=1)
    for action in actions[: 2 if variable else 3]:
        reference.step(_batch_items(space, [action]))
    for engine in ({"num_workers": 0}, {"num_workers": 2}):
        with open_engine([chunked_env_fn(functools.partial(EchoEnv, space), 3, variable=variable)] * 2, **engine) as envs:
            chunk_space = spaces.Dict({"actions": expected, "steps": spaces.Discrete(3, start=1)}) if variable else expected
            assert envs.single_action_space == chunk_space
            chunk = np.stack(actions).astype(expected.dtype) if name in ARRAY_SPACES else tuple(actions)
            envs.reset(seed=1)
            row_action = {"actions": chunk, "steps": np.int64(2)} if variable else chunk
            *_, infos = envs.step(_batch_items(envs.single_action_space, [row_action] * 2))
            assert infos["chunk_steps"].tolist() == ([2, 2] if variable else [3, 3])
            assert envs.call("history") == reference.call("history") * 2


def test_chunk_reward_is_discounted() -> None:
    env = ActionChunks(CounterEnv(env_id=1, lengths=(3,)), 4, discount=0.5)
    env.reset(seed=0)
    _, reward, terminated, _, info = env.step([0, 0, 0, 0])
    assert reward == 1.001 + 0.5 * 1.002 + 0.25 * 1.003
    assert terminated
    assert info["chunk_rewards"].tolist() == [1.001, 1.002, 1.003, 0.0]


def test_all_observations_of_a_chunk_are_stacked() -> None:
    env_fn = chunked_env_fn(scripted_env_fns(1)[0], 3, observations="all")
    with open_engine([env_fn] * 2, num_workers=2, autoreset_mode="Disabled") as envs:
        single = scripted_env_fns(1)[0]()
        first, _ = single.reset(seed=1)
        observations, _ = envs.reset(seed=[1, 1])
        assert observations in envs.observation_space
        assert_identical(_select_row(observations, 0), _stack_observations([first] * 3))
        actions = envs.action_space.sample()
        actions[1] = actions[0]
        for num_steps in (3, 1):  # the episode has 4 steps, so the second chunk ends after one
            expected = [single.step(action)[0] for action in actions[0][:num_steps]]
            expected += [expected[-1]] * (3 - num_steps)
            observations, *_, infos = envs.step(actions)
            assert observations in envs.observation_space
            assert_identical(_select_row(observations, 1), _stack_observations(expected))
        assert infos["chunk_steps"].tolist() == [1, 1]


def _stack_observations(observations: list[Any]) -> Any:
    return {key: np.stack([observation[key] for observation in observations]) for key in observations[0]}


class RenderRecordingEnv(CounterEnv):
    """An environment that records the values of ``render``, a parameter of ``step`` in Isaac Lab."""

    def step(self, action: Any, render: bool = True) -> Any:  # type: ignore[override]
        self.__dict__.setdefault("rendered", []).append(render)
        return super().step(action)


def test_only_the_last_action_of_a_chunk_renders() -> None:
    env = ActionChunks(RenderRecordingEnv(lengths=(9,)), 3)
    env.reset(seed=0)
    env.step([0, 0, 0])
    env.step([0, 0, 0])
    assert env.unwrapped.__dict__["rendered"] == [False, False, True] * 2


@pytest.mark.parametrize(
    ("kwargs", "error", "text"),
    [
        ({"horizon": 0}, ValueError, "horizon must be a positive integer, got 0"),
        ({"horizon": 2.0}, TypeError, "horizon must be a positive integer, got 2.0"),
        ({"horizon": 2, "discount": 1.5}, ValueError, "discount must be from 0 to 1, got 1.5"),
        ({"horizon": 2, "observations": "first"}, ValueError, "observations must be 'last' or 'all', got 'first'"),
    ],
)
def test_invalid_arguments_are_refused(kwargs: dict[str, Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=f"ActionChunks: {text}"):
        ActionChunks(CounterEnv(), **kwargs)


def test_action_space_that_cannot_be_stacked_is_refused() -> None:
    env = CounterEnv()
    env.action_space = 5  # type: ignore[assignment]
    with pytest.raises(TypeError, match=r"ActionChunks: cannot stack the action space 5: expected a gymnasium"):
        ActionChunks(env, 2)


@pytest.mark.parametrize(
    ("variable", "chunk", "error", "text"),
    [
        (False, [0, 0], ValueError, "expected a chunk of 3 actions, got one of 2"),
        (False, np.zeros(4, int), ValueError, "expected a chunk of 3 actions, got one of 4"),
        (False, 1, TypeError, "expected a chunk of 3 actions, got 1"),
        (True, {"actions": [0, 0], "steps": 1}, ValueError, "expected a chunk of 3 actions, got one of 2"),
        (True, {"actions": [0, 0, 0], "steps": 0}, ValueError, "steps must be an integer from 1 to 3, got 0"),
        (True, {"actions": [0, 0, 0], "steps": 1.5}, ValueError, "steps must be an integer from 1 to 3, got 1.5"),
        (True, [0, 0, 0], TypeError, "expected a dict with 'actions' and 'steps'"),
    ],
)
def test_invalid_chunk_is_refused_before_its_first_step(variable: bool, chunk: Any, error: Any, text: str) -> None:
    env = ActionChunks(CounterEnv(lengths=(9,)), 3, variable=variable)
    env.reset(seed=0)
    with pytest.raises(error, match=f"ActionChunks: {text}"):
        env.step(chunk)
    assert env.unwrapped.steps == 0  # type: ignore[attr-defined]


def test_chunks_of_another_length_are_refused_before_a_message_is_sent() -> None:
    with open_engine([chunked_env_fn(ENV_FNS["Pendulum"])] * 2, num_workers=2) as envs:
        envs.reset(seed=1)
        with pytest.raises(ValueError, match=r"\(2, 3, 1\)"):
            envs.step(np.zeros((2, 3, 1), np.float32))
        envs.step(np.zeros((2, 4, 1), np.float32))


# -- with other features: statistics, calls, snapshots, replays, restarts, evaluation ------------------------------------


@pytest.mark.sampled(1)
@ALL_MODES
def test_statistics_count_environment_steps(mode: AutoresetMode) -> None:
    env_fns = [chunked_env_fn(fn) for fn in counters(2, lengths=(6, 3))]
    for first_ready in (False, True):
        with open_engine(env_fns, num_workers=2, autoreset_mode=mode) as envs:
            wrapped_envs: Any = RecordEpisodeStatistics(envs)
            wrapped_envs.reset(seed=1)
            lengths: list[int] = []
            for _ in range(4):  # episodes have 6 and 3 steps, so the chunks have 4, 2 and 3
                if first_ready:
                    wrapped_envs.send(np.zeros((2, 4), np.int64), [0, 1])
                    result = wrapped_envs.recv(count=2)
                else:
                    result = wrapped_envs.step(np.zeros((2, 4), np.int64))
                _, _, terminations, _, infos = result
                if "episode" in infos:
                    lengths += infos["episode"]["l"].tolist()
                if mode is AutoresetMode.DISABLED and terminations.any():
                    wrapped_envs.reset(options={"reset_mask": terminations})
            assert lengths == [6, 6, 3, 3]
            if mode is AutoresetMode.NEXT_STEP:  # an automatic reset counts as one step
                assert envs.stats()["steps"] == 2 * (4 + 2 + 1 + 3)
            else:
                assert envs.stats()["steps"] == 2 * (4 + 2 + 3 + 4)
            state = envs.state_dict(verify=False)
            steps = envs.stats()["steps"]
        with open_engine(env_fns, num_workers=0, autoreset_mode=mode) as other_envs:
            other_envs.load_state_dict(state)
            assert other_envs.stats()["steps"] == steps


def test_calls_attributes_and_snapshots_reach_the_environment() -> None:
    env_fns = [chunked_env_fn(functools.partial(gymnasium.make, "CartPole-v1", max_episode_steps=50))] * 2
    with open_engine(env_fns, num_workers=2) as envs, open_engine(env_fns, num_workers=0) as other_envs:
        envs.set_attr("label", [1, 2])
        assert envs.get_attr("label") == (1, 2)
        assert envs.get_attr("horizon") == (HORIZON, HORIZON)
        assert envs.exec_func(lambda env: type(env.unwrapped).__name__) == ("CartPoleEnv",) * 2
        envs.reset(seed=1)
        envs.action_space.seed(1)
        envs.step(envs.action_space.sample())
        snapshots = pickle.loads(pickle.dumps(envs.save()))
        other_envs.load(snapshots)
        for _ in range(6):
            actions = envs.action_space.sample()
            assert_identical(other_envs.step(actions), envs.step(actions))


class FailOnceEnv(CounterEnv):
    """An environment that raises or kills its process once. A file in ``folder`` records that it has done so."""

    def __init__(self, folder: str, fault: str) -> None:
        super().__init__(lengths=(7,))
        self.marker, self.fault = Path(folder) / fault, fault

    def step(self, action: Any) -> Any:
        if self.steps == 5 and not self.marker.exists():
            self.marker.touch()
            if self.fault == "die":
                os.kill(os.getpid(), signal.SIGKILL)
            raise ArithmeticError("in the middle of a chunk")
        return super().step(action)


@pytest.mark.filterwarnings("ignore:.*:UserWarning")
@pytest.mark.parametrize("fault", ["die", "raise"])
def test_failure_in_the_middle_of_a_chunk_restarts_the_environment(fault: str, tmp_path: Path) -> None:
    faulty = functools.partial(FailOnceEnv, str(tmp_path), fault)
    env_fns = [chunked_env_fn(faulty), chunked_env_fn(functools.partial(CounterEnv, lengths=(7,)))]
    with open_engine(env_fns, num_workers=2, on_failure="restart") as envs:
        envs.reset(seed=1)
        chunks = np.zeros((2, HORIZON), np.int64)
        envs.step(chunks)
        *_, infos = envs.step(chunks)
        assert infos["restarted"].tolist() == [True, False]
        assert infos["chunk_steps"].tolist()[1] == 3
        envs.step(chunks)  # both environments begin an episode
        assert envs.step(chunks)[4]["chunk_steps"].tolist() == [HORIZON, HORIZON]


@pytest.mark.filterwarnings("ignore:.*:UserWarning")
def test_replay_repeats_a_failure_in_a_chunk(tmp_path: Path) -> None:
    from vecenv.tools.cli import main

    env_fn = chunked_env_fn(functools.partial(FailOnceEnv, str(tmp_path), "raise"))
    with open_engine([env_fn] * 2, num_workers=1, record_failures=tmp_path / "files") as envs:
        envs.reset(seed=1)
        envs.step(np.zeros((2, HORIZON), np.int64))
        with pytest.raises(ArithmeticError, match="in the middle of a chunk"):
            envs.step(np.zeros((2, HORIZON), np.int64))
    (tmp_path / "raise").unlink()
    (file,) = (tmp_path / "files").iterdir()
    assert main(["replay", "--yes", str(file)]) == 0


@pytest.mark.sampled(1)
@pytest.mark.parametrize("engine_class", [vecenv.AsyncVectorEnv, SyncVectorEnv])
@ALL_MODES
def test_evaluation_counts_environment_steps(engine_class: Any, mode: AutoresetMode) -> None:
    envs = engine_class([chunked_env_fn(functools.partial(gymnasium.make, "CartPole-v1"))] * 3, autoreset_mode=mode)
    try:
        results = vecenv.evaluate(envs, lambda obs: np.repeat((obs[:, 2:3] > 0).astype(int), HORIZON, 1), 7, seed=3)
    finally:
        envs.close()
    env = gymnasium.make("CartPole-v1")
    for result in results:
        observation, _ = env.reset(seed=result.seed)
        length, has_ended = 0, False
        while not has_ended:
            action = int(observation[2] > 0)
            chunk_steps = 0
            while chunk_steps < HORIZON and not has_ended:
                observation, _, terminated, truncated, _ = env.step(action)
                has_ended = terminated or truncated
                chunk_steps += 1
            length += chunk_steps
        assert (result.length, result.episode_return) == (length, float(length))
        assert result.info["chunk_steps"] == chunk_steps
