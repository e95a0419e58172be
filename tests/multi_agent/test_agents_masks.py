"""Multi-agent environments: masks and flags, infos, nested observations, and agents as rows."""

from __future__ import annotations

import copy
import functools
import time
from typing import Any, ClassVar

import gymnasium
import numpy as np
import pytest
from agent_games import RandomGame, ScriptedGame, open_games
from failing import reset_until_ready
from gymnasium import spaces
from gymnasium.error import ResetNeeded
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import iterate
from plain_loop import is_identical, select_agent

import vecenv
from vecenv.errors import StepTimeout
from vecenv.front.arguments import HAS_MAX_CONCURRENCY
from vecenv.front.infos import info_rows
from vecenv.multi_agent import FlattenAgents, MultiAgentVecEnv, list_of_dicts
from vecenv.testing import VectorEnvContract, assert_identical

# --- Masks and flags of agents, and the ends of episodes ----------------------------------------

T, F = True, False


def make_fns(n: int = 2, **kwargs: Any) -> list[Any]:
    return [functools.partial(ScriptedGame, **kwargs)] * n


def run_steps(envs: MultiAgentVecEnv, steps: int) -> list[Any]:
    """Return the results of some steps with the action 0 for every agent."""
    return [envs.step(np.zeros((envs.num_envs, envs.num_agents), np.int64)) for _ in range(steps)]


def test_missing_last_observation_is_padding() -> None:
    with open_games(make_fns(1, without_last_observation=("a",)), pad_value=-3, num_workers=0) as envs:
        results = run_steps(envs, 2)
    assert results[1][0][0, 0].tolist() == [-3, -3]
    assert results[1][2][0, 0]
    assert results[1][-1]["transition_mask"][0, 0]


@pytest.mark.parametrize("mode", AutoresetMode)
def test_episode_end_any_truncates_the_other_agents(mode: AutoresetMode) -> None:
    with open_games(make_fns(2), episode_end="any", autoreset_mode=mode, num_workers=0) as envs:
        results = run_steps(envs, 2)
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


def test_step_of_a_finished_env_without_autoreset_raises() -> None:
    fns = [*make_fns(1, lives={"a": (0, 1)}), *make_fns(1, lives={"a": (0, 3)})]
    with open_games(fns, autoreset_mode=AutoresetMode.DISABLED, num_workers=0) as envs:
        (result,) = run_steps(envs, 1)
        with pytest.raises(ResetNeeded, match="env 0"):
            run_steps(envs, 1)
        options = {"reset_mask": result[-1]["env_done"]}
        obs, infos = envs.reset(options=options)
        assert list(options) == ["reset_mask"]
        assert obs[:, 0, 0].tolist() == [100, 101]
        assert not infos["transition_mask"].any()
        run_steps(envs, 1)
        with pytest.raises(ResetNeeded, match="env 0"):
            envs.send(np.zeros((1, 1), np.int64), [0])


def test_step_before_the_first_reset_raises() -> None:
    with MultiAgentVecEnv(make_fns(2), num_workers=0) as envs:
        with pytest.raises(ResetNeeded, match="envs 0-1"):
            run_steps(envs, 1)
        envs.reset(options={"reset_mask": np.array([True, False])})
        with pytest.raises(ResetNeeded, match="of env 1"):
            run_steps(envs, 1)


def test_step_passes_only_actions_of_live_agents_to_the_environment() -> None:
    with open_games(make_fns(1), layout="agents", num_workers=0) as envs:
        for _ in range(2):
            envs.step({"a": [1], "b": [2], "c": np.array([[3]])})
        envs.step({"b": [2], "c": [3]})  # a is dead, so its action may be missing
        envs.step({"a": [99], "b": [2], "c": [3]})  # or invalid
        (received,) = envs.get_attr("actions")
    assert received == [{"a": 1, "b": 2, "c": 3}] * 2 + [{"b": 2, "c": 3}] * 2


@pytest.mark.parametrize("source", ["obs", "info"])
@pytest.mark.parametrize("layout", ["stack", "agents"])
def test_action_masks_from_observations_and_infos_have_the_same_form(source: str, layout: str) -> None:
    game = functools.partial(RandomGame, masks=source, births=True, strict=False)
    reference = game()
    with MultiAgentVecEnv([game] * 2, layout=layout, num_workers=0) as envs:
        obs, infos = envs.reset(seed=4)
        observations, _ = reference.reset(seed=4)
        mask = infos["action_mask"]
        assert mask.dtype == np.bool_
        assert mask.shape == (2, 3, 4)
        for index, agent in enumerate(envs.possible_agents):
            allowed = reference.allowed[agent] if agent in observations else np.ones(4, np.bool_)
            assert np.array_equal(mask[0, index], allowed)
        assert "_action_mask" not in infos
        if source == "obs":
            observed_mask = obs["action_mask"] if layout == "stack" else obs["agent_0"]["action_mask"]
            assert observed_mask.dtype == np.int8


def test_action_mask_none_leaves_the_masks_in_the_infos() -> None:
    game = functools.partial(RandomGame, masks="info")
    with MultiAgentVecEnv([game] * 2, action_mask=None, num_workers=0) as envs:
        _, infos = envs.reset(seed=4)
        assert infos["action_mask"].dtype == np.int8
        assert infos["_action_mask"].all()


def test_action_masks_of_different_sizes_are_a_dict_by_agent() -> None:
    class DifferentMasksGame(ScriptedGame):
        def reset(self, seed: int | None = None, options: Any = None) -> Any:
            observations, infos = super().reset(seed, options)
            for size, agent in enumerate(self.agents, 2):
                infos[agent]["action_masks"] = [1] * size
            return observations, infos

    with MultiAgentVecEnv([DifferentMasksGame] * 2, num_workers=0) as envs:
        _, infos = envs.reset(seed=0)
        assert {agent: mask.shape for agent, mask in infos["action_mask"].items()} == {"a": (2, 2), "b": (2, 3), "c": (2, 4)}


@pytest.mark.parametrize("layout", ["stack", "agents"])
@pytest.mark.parametrize("mask_space", [spaces.MultiBinary((2, 5)), spaces.Dict({"x": spaces.MultiBinary(3)})], ids=repr)
def test_masks_of_other_shapes_stay_in_the_observations(mask_space: Any, layout: str) -> None:
    class GridMaskGame(ScriptedGame):
        def observation_space(self, agent: Any) -> spaces.Space[Any]:
            return spaces.Dict({"action_mask": mask_space})

        def _observe(self, agents: list[Any]) -> dict[Any, Any]:
            return {agent: self.observation_space(agent).sample() for agent in agents}

    with MultiAgentVecEnv([GridMaskGame] * 2, num_workers=0, layout=layout) as envs:
        obs, infos = envs.reset(seed=0)
        assert obs in envs.observation_space
        assert "action_mask" not in infos


def test_state_option_adds_state_and_final_state_to_the_infos() -> None:
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


class NestedStateGame(ScriptedGame):
    """A game of two steps with a state of a Dict space, in which one part is a tuple."""

    state_space = spaces.Dict({"time": spaces.Discrete(9), "pair": spaces.Tuple((spaces.Discrete(9), spaces.Discrete(9)))})

    def __init__(self) -> None:
        super().__init__({"a": (0, 2), "b": (0, 2)})

    def state(self) -> Any:
        return {"time": self.time, "pair": (self.time, 1)}


@pytest.mark.parametrize("mode", AutoresetMode)
def test_rows_of_agents_have_nested_states(mode: AutoresetMode) -> None:
    with open_games([NestedStateGame] * 2, state=True, autoreset_mode=mode, num_workers=0) as envs:
        rows = envs.flatten_agents()
        for _ in range(2):
            infos = rows.step(rows.action_space.sample())[-1]
        time = 0 if mode is AutoresetMode.SAME_STEP else 2
        assert infos["state"]["time"].tolist() == [time] * 4
        assert infos["state"]["pair"].tolist() == [(time, 1)] * 4
        assert infos["_state"].all()
        if mode is AutoresetMode.SAME_STEP:
            assert infos["final_state"]["pair"].tolist() == [(2, 1)] * 4


def test_reward_dtype_is_the_dtype_of_rewards() -> None:
    with open_games(make_fns(1), reward_dtype=np.float32, num_workers=0) as envs:
        assert run_steps(envs, 1)[0][1].dtype == np.float32


def test_agent_mask_is_a_copy_of_the_latest_mask() -> None:
    with MultiAgentVecEnv(make_fns(1), num_workers=0) as envs:
        assert not envs.agent_mask.any()
        envs.reset(seed=0)
        run_steps(envs, 2)
        mask = envs.agent_mask
        assert mask.tolist() == [[F, T, T]]
        mask[:] = False
        assert envs.agent_mask.any()


# --- Infos of agents and of environments, as arrays with masks and as lists ---------------------


@pytest.mark.parametrize("num_workers", [0, 2])
def test_infos_of_agents_have_an_agent_axis_unlike_common_infos(num_workers: int) -> None:
    game = functools.partial(RandomGame, infos=True, end_together=True, length=20)
    with MultiAgentVecEnv([game] * 2, num_workers=num_workers) as envs:
        envs.reset(seed=1)
        infos = envs.step(envs.action_space.sample())[-1]
    assert infos["time"].tolist() == [[1, 1, 1], [1, 1, 1]]
    assert infos["time"].dtype == np.int64
    assert infos["vector"].shape == (2, 3, 2)
    assert infos["word"].dtype == object
    assert infos["word"].tolist() == [[None, "t1", None]] * 2
    assert infos["_word"].tolist() == [[False, True, False]] * 2
    assert infos["common"]["score"].tolist() == [0.5, 0.5]
    assert infos["common"]["weather"].tolist() == [1, 1]
    assert infos["common"]["_score"].tolist() == [True, True]
    assert "agents" not in infos


def test_same_step_mode_has_final_infos() -> None:
    game = functools.partial(RandomGame, infos=True, length=3)
    with MultiAgentVecEnv([game] * 2, autoreset_mode="SameStep", num_workers=0) as envs:
        envs.reset(seed=1)
        for t in range(1, 10):
            infos = envs.step(envs.action_space.sample())[-1]
            if infos["env_done"].any():
                row = int(np.flatnonzero(infos["env_done"])[0])
                assert infos["_final_info"][row]
                assert infos["final_info"]["common"]["score"][row] == t * 0.5
                assert infos["final_info"]["time"][row][infos["final_info"]["_time"][row]].tolist().count(t) > 0
                assert infos["time"][row].tolist() == [0, 0, 0]
                return
    pytest.fail("no episode ended")


class FixedInfosGame(ScriptedGame):
    """A game of two agents with the same infos in each reset."""

    def __init__(self, a: dict[Any, Any], b: dict[Any, Any]) -> None:
        super().__init__({"a": (0, 5), "b": (0, 5)})
        self.infos = {"a": a, "b": b}

    def reset(self, seed: int | None = None, options: Any = None) -> Any:
        return super().reset(seed, options)[0], self.infos


class InfosWithStateGame(RandomGame):
    def _infos(self, agents: list[str]) -> dict[str, Any]:
        return {agent: {"state": 7, "final_state": 8} for agent in agents}


def batch_infos(a: dict[Any, Any], b: dict[Any, Any], n: int = 2) -> dict[str, Any]:
    with MultiAgentVecEnv([functools.partial(FixedInfosGame, a, b)] * n, num_workers=0) as envs:
        return envs.reset(seed=0)[1]


def test_info_array_has_a_dtype_that_fits_all_agents() -> None:
    infos = batch_infos({"x": 1}, {"x": 2.5})
    assert infos["x"].dtype == np.float64
    assert infos["x"].tolist() == [[1.0, 2.5]] * 2


def test_infos_with_arrays_of_different_shapes_are_object_arrays() -> None:
    infos = batch_infos({"x": np.zeros(2)}, {"x": np.zeros(3)})
    assert infos["x"].dtype == object
    assert [value.shape for value in infos["x"][0]] == [(2,), (3,)]


def test_nested_infos_have_masks_at_every_level() -> None:
    infos = batch_infos({"d": {"x": 1}}, {})
    assert infos["d"]["x"].tolist() == [[1, 0]] * 2
    assert infos["d"]["_x"].tolist() == [[True, False]] * 2
    assert infos["_d"].tolist() == [[True, False]] * 2


def test_reserved_info_keys_have_a_trailing_underscore() -> None:
    infos = batch_infos({"env_done": 5}, {"agent_mask": 6})
    assert infos["agent_mask"].all()
    assert infos["agent_mask_"].tolist() == [[0, 6]] * 2
    assert infos["env_done_"].tolist() == [[5, 0]] * 2
    assert infos["_env_done_"].tolist() == [[True, False]] * 2


def test_info_state_of_an_agent_stays_apart_from_the_state_of_the_environment() -> None:
    game = functools.partial(InfosWithStateGame, length=2)
    with MultiAgentVecEnv([game] * 2, num_workers=0, state=True, autoreset_mode="SameStep") as envs:
        rows = envs.flatten_agents()
        rows.reset(seed=0)
        for _ in range(2):
            *_, infos = rows.step(rows.action_space.sample())
            assert infos["state"].shape == (6, 2)
            assert infos["state_"].tolist() == [7] * 6
        assert infos["_final_info"].all()
        assert infos["final_state"].shape == (6, 2)


class CommonInfosGame(ScriptedGame):
    """A game with common infos only, as many as agents."""

    def step(self, actions: Any) -> Any:
        *results, _ = super().step(actions)
        return *results, {"score": 0, "positions": np.zeros(2)}


def test_common_infos_of_an_ordinary_step_are_kept() -> None:
    with open_games([lambda: CommonInfosGame({"a": (0, 9), "b": (0, 9)})] * 2, num_workers=0) as envs:
        for _ in range(4):
            infos = envs.step(np.zeros((2, 2), np.int64))[-1]
            assert infos["common"]["score"].tolist() == [0, 0]
            assert infos["common"]["positions"].tolist() == [[0, 0]] * 2


def test_list_of_dicts_equals_the_batched_infos() -> None:
    game = functools.partial(RandomGame, infos=True, length=3)
    with MultiAgentVecEnv([game] * 2, autoreset_mode="SameStep", num_workers=0) as envs:
        envs.reset(seed=1)
        for _ in range(10):
            infos = envs.step(envs.action_space.sample())[-1]
            dicts = list_of_dicts(infos)
            assert len(dicts) == 2
            for row, info in enumerate(dicts):
                assert info["env_done"] == infos["env_done"][row]
                assert np.array_equal(info["agent_mask"], infos["agent_mask"][row])
                assert ("final_obs" in info) == bool(infos["env_done"][row])
                assert ("final_info" in info) == bool(infos["env_done"][row])
                assert info["common"]["score"] == infos["common"]["score"][row]
                assert np.array_equal(info["time"], infos["time"][row])
                assert np.array_equal(info["_time"], infos["_time"][row])


@pytest.mark.parametrize("mode", AutoresetMode)
def test_infos_by_row_equal_list_of_dicts(mode: AutoresetMode) -> None:
    fns = [functools.partial(RandomGame, count=3, infos=True)] * 3
    options: dict[str, Any] = {"autoreset_mode": mode, "num_workers": 0}
    with open_games(fns, **options) as envs, open_games(fns, **options) as others:
        by_row = vecenv.infos_by_row(envs)
        for _ in range(2 if mode is AutoresetMode.DISABLED else 12):
            actions = envs.action_space.sample()
            expected = list_of_dicts(others.step(actions)[4])
            for info, other in zip(by_row.step(actions)[4], expected, strict=True):
                np.testing.assert_equal(info, other)


def test_single_agent_wrapper_raises_and_names_flatten_agents() -> None:
    with open_games(make_fns(1), num_workers=0) as envs, pytest.raises(TypeError, match=r"wrap envs\.flatten_agents\(\)"):
        vecenv.wrappers.RecordEpisodeStatistics(envs)  # type: ignore[arg-type]


def test_list_of_dicts_omits_masks_of_environments() -> None:
    class NestedInfosGame(RandomGame):
        def _infos(self, agents: list[str]) -> dict[str, Any]:
            common = {"pose": {"x": 1, "joint": {"y": 2.0}}} if self.options else {}
            return {"common": common, "agent_0": {"pose": {"x": self.options["x"]}} if self.options else {}}

    with MultiAgentVecEnv([NestedInfosGame] * 2, num_workers=0) as envs:
        _, infos = envs.reset(seed=1, options=[{"x": 5}, None])
        first, second = list_of_dicts(infos)
    assert first["common"] == {"pose": {"x": 1, "joint": {"y": 2.0}}}
    assert first["pose"]["x"].tolist() == [5, 0, 0]
    assert first["pose"]["_x"].tolist() == first["_pose"].tolist() == [True, False, False]
    assert second.keys() == {"agent_mask", "transition_mask"}


# --- Observations and actions in dicts and tuples, in every layout, and their errors --------------

LAYOUTS = pytest.mark.parametrize("layout", ["stack", "agents", {"one": ["c", "a"], "two": ["b"]}], ids=str)


class NestedGame(ScriptedGame):
    """A game that records its nested observations and actions."""

    def __init__(self) -> None:
        super().__init__({"a": (0, 2), "b": (0, 4), "c": (1, 4)})
        self.rng = np.random.default_rng()

    def observation_space(self, agent: Any) -> Any:
        inner = spaces.Tuple([spaces.Box(-9, 9, (2, 2), np.float32), spaces.MultiBinary(3)])
        return spaces.Dict({"kind": spaces.Discrete(5, start=2), "parts": inner, "counts": spaces.MultiDiscrete([3, 4])})

    def action_space(self, agent: Any) -> Any:
        return spaces.Dict({"x": spaces.Discrete(4), "y": spaces.Tuple([spaces.Box(-1, 1, (2,), np.float32)])})

    def reset(self, seed: int | None = None, options: Any = None) -> Any:
        if seed is not None:
            self.rng = np.random.default_rng(seed)
        return super().reset(seed, options)

    def _observe(self, agents: list[Any]) -> dict[Any, Any]:
        observations = {}
        for agent in agents:
            space = self.observation_space(agent)
            space.seed(int(self.rng.integers(1000)))
            observations[agent] = space.sample()
        self.last_observations = copy.deepcopy(observations)
        return observations


def tuples_to_dicts(value: Any) -> Any:
    """Convert tuples to dicts, because ``is_identical`` compares dicts and arrays."""
    if isinstance(value, (dict, tuple)):
        pairs = value.items() if isinstance(value, dict) else enumerate(value)
        return {key: tuples_to_dicts(inner) for key, inner in pairs}
    return value


@LAYOUTS
@pytest.mark.parametrize("num_workers", [0, 2])
def test_nested_observations_and_actions_are_unchanged_in_every_layout(layout: Any, num_workers: int) -> None:
    with MultiAgentVecEnv([NestedGame] * 2, layout=layout, num_workers=num_workers) as envs:
        envs.action_space.seed(0)
        result: Any = envs.reset(seed=3)
        for _ in range(12):
            for row, last in enumerate(envs.get_attr("last_observations")):
                for agent, observation in last.items():
                    found = select_agent(envs, tuples_to_dicts(result[0]), row, agent)
                    assert is_identical(found, tuples_to_dicts(observation))
            acting = envs.agent_mask
            actions = envs.action_space.sample()
            result = envs.step(actions)
            received = envs.get_attr("actions")
            for row, column in zip(*np.nonzero(acting), strict=True):
                agent = envs.possible_agents[column]
                sent = select_agent(envs, tuples_to_dicts(actions), int(row), agent)
                assert is_identical(tuples_to_dicts(received[row][-1][agent]), sent)


def test_flatten_agents_accepts_nested_actions_and_rejects_wrong_ones(closes: Any) -> None:
    rows = closes(MultiAgentVecEnv([NestedGame] * 2, autoreset_mode="SameStep", num_workers=0).flatten_agents())
    obs, infos = rows.reset(seed=0)
    for _ in range(6):
        for row in np.flatnonzero(infos["agent_mask"]):  # the other rows are padding, which may be outside of the space
            observation = list(iterate(rows.observation_space, obs))[row]
            assert observation in rows.single_observation_space
        obs, *_, infos = rows.step(rows.action_space.sample())
    with pytest.raises(ValueError, match=r"actions: got ndarray, expected a dict with \['x', 'y'\]"):
        rows.step(np.zeros(6))
    with pytest.raises(ValueError, match=r"actions\['x'\]: got shape \(5,\), expected 6 rows"):
        rows.step({"x": np.zeros(5, np.int64), "y": (np.zeros((6, 2), np.float32),)})


def test_step_with_a_wrong_structure_raises() -> None:
    with open_games([NestedGame] * 2, num_workers=0) as envs:
        valid = envs.action_space.sample()
        with pytest.raises(ValueError, match=r"actions: got ndarray, expected a dict with \['x', 'y'\]"):
            envs.step(np.zeros((2, 3)))
        with pytest.raises(ValueError, match=r"got a dict with \['x'\]"):
            envs.step({"x": valid["x"]})
        with pytest.raises(ValueError, match=r"actions\['y'\]: got list, expected a tuple of 1"):
            envs.step({"x": valid["x"], "y": [valid["y"][0]]})
        with pytest.raises(ValueError, match=r"actions\['y'\]\[0\]: got shape \(2, 3\)"):
            envs.step({"x": valid["x"], "y": (valid["y"][0][..., 0],)})


class InvalidGame(ScriptedGame):
    """A game with the given fault in its resets or steps."""

    def __init__(self, fault: str) -> None:
        super().__init__({"a": (0, 9), "b": (0, 9)})
        self.fault = fault

    def reset(self, seed: int | None = None, options: Any = None) -> Any:
        observations, infos = super().reset(seed, options)
        if self.fault == "no infos":
            return observations
        if self.fault == "list":
            return observations, [{}, {}]
        if self.fault == "mask":
            infos["a"] = {"action_mask": [[1, 0]]}
        if self.fault == "no observation":
            del observations["b"]
        return observations, infos

    def step(self, actions: Any) -> Any:
        observations, rewards, terminations, truncations, infos = super().step(actions)
        if self.fault == "large":
            observations["a"] = np.full(2, 1e300)
        if self.fault == "wrong name":
            rewards["agent_9"] = rewards.pop("b")
        return observations, rewards, terminations, truncations, infos


@pytest.mark.parametrize(
    ("fault", "error", "match"),
    [
        ("no infos", ValueError, r"env 0: reset must return \(observations, infos\), got dict"),
        ("list", ValueError, "env 0: infos must be a dict of agents"),
        ("mask", ValueError, "env 0, agent 'a': action_mask must be a 1-D array of 0s and 1s"),
        ("no observation", vecenv.errors.ObservationError, "env 0, agent 'b': is alive, but has no observation"),
    ],
)
def test_reset_with_an_invalid_result_raises(fault: str, error: Any, match: str) -> None:
    with MultiAgentVecEnv([lambda: InvalidGame(fault)], num_workers=0) as envs, pytest.raises(error, match=match):
        envs.reset(seed=0)


def test_reward_of_an_unknown_agent_raises_in_an_ordinary_step() -> None:
    text = r"unknown agents \['agent_9'\]"
    with open_games([lambda: InvalidGame("wrong name")], num_workers=0) as envs, pytest.raises(ValueError, match=text):
        envs.step(np.zeros((1, 2), np.int64))


def test_observation_that_overflows_its_dtype_warns() -> None:
    with open_games([lambda: InvalidGame("large")], num_workers=0) as envs:
        with pytest.warns(RuntimeWarning, match="env 0, agent 'a': observation.*became infinite"):
            obs, *_ = envs.step(np.zeros((1, 2), np.int64))
        assert np.isinf(obs[0, 0]).all()


# --- Agents as rows of a Gymnasium vector environment --------------------------------------------


def make_flat_env(env_fns: list[Any], padding_done: bool = True, **options: Any) -> FlattenAgents:
    return MultiAgentVecEnv(env_fns, **options).flatten_agents(padding_done=padding_done)


class TestFlattenAgentsOfOneAgent(VectorEnvContract):
    def make(self, num_envs: int = 3, autoreset_mode: AutoresetMode = AutoresetMode.NEXT_STEP, **kwargs: Any) -> VectorEnv:
        env_fn = functools.partial(RandomGame, 1, infos=True)
        return make_flat_env([env_fn] * num_envs, autoreset_mode=autoreset_mode, num_workers=0)


class TestFlattenAgentsThatDieAtDifferentTimes(VectorEnvContract):
    """The contract with agents that die at intervals of two steps. Padding is done when the last agent dies."""

    supports_reset_mask: ClassVar[bool] = False

    def make(self, num_envs: int = 3, autoreset_mode: AutoresetMode = AutoresetMode.NEXT_STEP, **kwargs: Any) -> VectorEnv:
        lives = {"a": (0, 2), "b": (0, 4), "c": (0, 6)} if num_envs == 3 else {"a": (0, 3)}
        return make_flat_env([functools.partial(ScriptedGame, lives)], autoreset_mode=autoreset_mode, num_workers=0)


def test_flatten_agents_shares_memory_with_the_batch() -> None:
    envs = MultiAgentVecEnv([ScriptedGame] * 2, num_workers=0, copy=False)
    rows = envs.flatten_agents()
    obs, _ = rows.reset(seed=0)
    batch, _ = envs.reset(seed=0)
    assert np.shares_memory(obs, batch)
    assert obs.shape == (6, 2)
    assert obs in rows.observation_space
    rows.close()
    assert envs.closed


@pytest.mark.parametrize("autoreset_mode", AutoresetMode)
@pytest.mark.parametrize("padding_done", [True, False])
def test_evaluate_of_flat_agents_returns_an_episode_per_agent(autoreset_mode: AutoresetMode, padding_done: bool) -> None:
    """Agents end separately but are reset together, and the last reset starts more episodes than are left."""
    rows = make_flat_env(make_fns(2), padding_done, autoreset_mode=autoreset_mode, num_workers=0)
    results = vecenv.evaluate(rows, lambda observations: np.zeros(len(observations), np.int64), 10, seed=0)
    assert results.lengths.tolist() == results.returns.tolist() == [2, 4, 6] * 3 + [2]
    rows.close()


def test_evaluate_without_autoreset_resets_the_games_that_end_first() -> None:
    """The games have two and four steps, and one agent of each ends a step earlier."""
    env_fns = [functools.partial(ScriptedGame, {"a": (0, last), "b": (0, last - 1)}) for last in (2, 4)]
    rows = make_flat_env(env_fns, autoreset_mode=AutoresetMode.DISABLED, num_workers=0)
    results = vecenv.evaluate(rows, lambda observations: np.zeros(len(observations), np.int64), 6, seed=0)
    assert results.lengths.tolist() == [2, 1, 4, 3, 2, 1]
    rows.close()


def test_final_infos_in_same_step_mode_equal_the_infos_in_disabled_mode() -> None:
    """An agent that dies before the others has a ``final_info`` with its masks, too."""
    game = functools.partial(RandomGame, infos=True)
    disabled = make_flat_env([game] * 2, num_workers=0, autoreset_mode="Disabled")
    same_step = make_flat_env([game] * 2, num_workers=0, autoreset_mode="SameStep")
    for rows in (disabled, same_step):
        rows.reset(seed=1)
    ends = []
    for _ in range(30):
        *_, terminations, truncations, expected = disabled.step(np.zeros(6, np.int64))
        infos = same_step.step(np.zeros(6, np.int64))[-1]
        ended = terminations | truncations
        final = infos.get("final_info", {})
        assert_identical(infos.get("_final_info", ended), ended)
        expected_rows, final_rows = info_rows(expected, 6), info_rows(final, 6)
        for row in np.flatnonzero(ended):
            assert_identical(final_rows[row], expected_rows[row])
            ends.append((expected_rows[row]["env_done"], expected_rows[row]["transition_mask"]))
        if expected["env_done"].any():
            disabled.reset(options={"reset_mask": expected["env_done"]})
    assert set(ends) == {(True, True), (True, False), (False, True)}
    for rows in (disabled, same_step):
        rows.close()


def test_flat_rows_equal_the_agent_axis_of_the_batch() -> None:
    game = functools.partial(RandomGame, infos=True, births=True)
    with MultiAgentVecEnv([game] * 2, num_workers=0) as envs:
        rows = make_flat_env([game] * 2, padding_done=False, num_workers=0)
        obs, _ = envs.reset(seed=1)
        flat_obs, _ = rows.reset(seed=1)
        rng = np.random.default_rng(0)
        for _ in range(20):
            assert_identical(flat_obs, obs.reshape(6, 3))
            actions = rng.integers(0, 4, 6)
            obs, *rest, infos = envs.step(actions.reshape(2, 3))
            flat_obs, *flat_rest, flat_infos = rows.step(actions)
            for array, flat_array in zip(rest, flat_rest, strict=True):
                assert_identical(flat_array, array.reshape(6))
            for key in {"agent_mask", "transition_mask", "time", "_time", "word"} & set(infos):
                assert_identical(flat_infos[key], infos[key].reshape(6))
            assert_identical(flat_infos["env_done"], np.repeat(infos["env_done"], 3))
            assert_identical(flat_infos["common"]["score"], np.repeat(infos["common"]["score"], 3))
        rows.close()


@pytest.mark.parametrize("mode", [AutoresetMode.NEXT_STEP, AutoresetMode.SAME_STEP])
def test_record_episode_statistics_has_an_episode_per_agent(mode: AutoresetMode) -> None:
    envs = make_flat_env([ScriptedGame] * 2, autoreset_mode=mode, num_workers=0)
    rows = gymnasium.wrappers.vector.RecordEpisodeStatistics(envs)
    rows.reset(seed=0)
    episodes: list[tuple[int, float, int]] = []
    for _ in range(21 if mode is AutoresetMode.NEXT_STEP else 18):
        infos = rows.step(np.zeros(6, np.int64))[-1]
        if "episode" in infos:
            statistics = infos["episode"]
            ended = np.flatnonzero(infos["_episode"]).tolist()
            episodes.extend((row % 3, float(statistics["r"][row]), int(statistics["l"][row])) for row in ended)
    rows.close()
    real = [episode for episode in episodes if episode[1] > 0]
    expected = {(0, 2.0, 2), (1, 4.0, 4), (2, 6.0, 6)}
    if mode is AutoresetMode.SAME_STEP and not HAS_MAX_CONCURRENCY:  # before Gymnasium 1.4, the wrapper omits first steps
        expected |= {(agent, total - 1, length - 1) for agent, total, length in expected}
    assert set(real) == expected
    assert len(real) == 18
    assert {agent for agent, total, _ in episodes if total == 0} == {0, 1}


class CommonGame(ScriptedGame):
    """A game with a common info named ``common``, the name of vecenv's dict of common infos."""

    def step(self, actions: dict[Any, Any]) -> Any:
        *results, infos = super().step(actions)
        return (*results, {**infos, "common": 7})


def test_flat_rows_have_a_common_info_named_common(closes: Any) -> None:
    rows = closes(MultiAgentVecEnv([CommonGame], num_workers=0).flatten_agents())
    rows.reset(seed=0)
    common = rows.step(np.zeros(3, np.int64))[-1]["common"]
    assert common["common"].tolist() == [7] * 3
    assert common["_common"].tolist() == [True] * 3


def test_padding_done_ends_padding_with_the_episode() -> None:
    for padding_done in (True, False):
        rows = make_flat_env([ScriptedGame], padding_done=padding_done, num_workers=0)
        rows.reset(seed=0)
        ends = [rows.step(np.zeros(3, np.int64))[2].tolist() for _ in range(6)]
        assert ends[1] == [True, False, False]
        assert ends[3] == [False, True, False]
        assert ends[5] == [padding_done, padding_done, True]
        rows.close()


def test_same_step_mode_has_the_last_observation_of_each_row(closes: Any) -> None:
    rows = closes(make_flat_env([ScriptedGame], autoreset_mode="SameStep", num_workers=0))
    rows.reset(seed=0)
    for t in range(1, 7):
        *_, terminations, _, infos = rows.step(np.zeros(3, np.int64))
        if terminations.any():
            assert np.array_equal(infos["_final_obs"], terminations)
        if t == 2:
            assert infos["final_obs"][0].tolist() == [102, 102]
        if t == 6:
            assert [value.tolist() for value in infos["final_obs"]] == [[0, 0], [0, 0], [106, 106]]


def test_reset_mask_of_flat_rows_selects_whole_environments(closes: Any) -> None:
    rows = closes(make_flat_env([ScriptedGame] * 2, num_workers=0))
    rows.reset(seed=0)
    rows.step(np.zeros(6, np.int64))
    with pytest.raises(ValueError, match=r"reset_mask.*env 1 "):
        rows.reset(options={"reset_mask": np.array([False] * 5 + [True])})
    mask = np.array([False] * 3 + [True] * 3)
    obs, infos = rows.reset(seed=[1, 2, 3, 4, 5, 6], options={"reset_mask": mask})
    assert obs[:, 0].tolist() == [101] * 3 + [100] * 3
    assert np.array_equal(infos["_agent_mask"], mask)
    assert rows.get_attr("seeds")[3] == [1, 4]
    with pytest.raises(ValueError, match="6"):
        rows.reset(seed=[1, 2])


def test_attributes_of_flat_rows_are_those_of_their_environments(closes: Any) -> None:
    rows = closes(make_flat_env([ScriptedGame] * 2, num_workers=0))
    rows.set_attr("speed", 2.0)
    assert rows.get_attr("speed") == (2.0,) * 6
    rows.set_attr("speed", [1, 2, 3, 4, 5, 6])
    assert rows.get_attr("speed") == (1, 1, 1, 4, 4, 4)
    assert rows.stats()["steps"] == 0
    assert "num_envs=6" in repr(rows)


def test_flatten_agents_of_another_layout_raises() -> None:
    with (
        MultiAgentVecEnv([ScriptedGame], layout="agents", num_workers=0) as envs,
        pytest.raises(ValueError, match="'agents'"),
    ):
        envs.flatten_agents()


class SlowGame(RandomGame):
    """A game with steps that take a second."""

    def step(self, actions: Any) -> Any:
        time.sleep(1.0)
        return super().step(actions)


def test_reset_after_a_step_timeout_drops_the_step(closes: Any) -> None:
    envs = closes(make_flat_env([functools.partial(SlowGame, 1)], num_workers=1, step_timeout=0.5))
    envs.reset(seed=3)
    first = envs.reset(seed=3)[0]
    with pytest.raises(StepTimeout):
        envs.step(np.zeros(1, np.int64))
    assert_identical(reset_until_ready(lambda: envs.reset(seed=3)[0]), first)
