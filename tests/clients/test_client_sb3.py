"""``as_sb3`` returns the same results as SB3's ``DummyVecEnv`` over the same environments and seeds."""

from __future__ import annotations

import contextlib
import functools
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from client_envs import NoOpWrapper, assert_equal, make_cartpole, make_full_env_fns
from dying_agents import DyingAgents, make_agent_rows
from gymnasium.error import AlreadyPendingCallError

sb3 = pytest.importorskip("stable_baselines3", reason="needs Stable-Baselines3: pip install 'vecenv[clients]'")

from stable_baselines3.common.evaluation import evaluate_policy  # noqa: E402
from stable_baselines3.common.monitor import Monitor  # noqa: E402
from stable_baselines3.common.vec_env import DummyVecEnv, VecEnv, VecMonitor, VecNormalize  # noqa: E402

import vecenv  # noqa: E402
from vecenv.adapters import as_sb3  # noqa: E402
from vecenv.testing import FaultyEnv  # noqa: E402

SAME_STEP = {"autoreset_mode": "SameStep"}


def make_venv(env_fns: list[Any], num_workers: int = 2, **options: Any) -> VecEnv:
    options = {**SAME_STEP, **options}
    return as_sb3(vecenv.AsyncVectorEnv(env_fns, num_workers=num_workers, context="forkserver", **options))


@pytest.mark.parametrize("nested", [True, False], ids=["Dict", "Box"])
@pytest.mark.parametrize(("num_workers", "mode"), [(0, "SameStep"), (2, "SameStep"), (2, "NextStep"), (2, "Disabled")])
def test_results_equal_dummy_vec_env(nested: bool, num_workers: int, mode: str) -> None:
    ours = make_venv(make_full_env_fns(3, nested=nested), num_workers, autoreset_mode=mode)
    theirs = DummyVecEnv(make_full_env_fns(3, nested=nested))
    results: list[Any] = []
    for venv in (ours, theirs):
        venv.seed(7)
        venv.set_options({"start": 5})
    assert_equal(ours.reset(), theirs.reset())
    assert_equal(ours.reset_infos, theirs.reset_infos)
    rng = np.random.default_rng(0)
    endings = set()
    for _ in range(150):
        actions = rng.integers(4, size=3)
        actual, expected = ours.step(actions), theirs.step(actions)
        assert_equal(actual, expected)
        assert_equal(ours.reset_infos, theirs.reset_infos)
        endings |= {(bool(done), info["TimeLimit.truncated"]) for done, info in zip(actual[2], actual[3], strict=True)}
        results.append((actual, expected))
    assert_equal(*zip(*results, strict=True))  # arrays of earlier steps have not changed
    assert endings == {(False, False), (True, False), (True, True)}
    for venv in (ours, theirs):  # the second reset has no options, because the first has used them
        venv.seed(8)
    assert_equal(ours.reset(), theirs.reset())
    assert_equal(ours.reset_infos, theirs.reset_infos)
    ours.close()
    theirs.close()


def test_results_under_vec_monitor_and_vec_normalize_equal_dummy_vec_env() -> None:
    def wrap(venv: VecEnv) -> VecEnv:
        return VecNormalize(VecMonitor(venv), norm_obs_keys=["position"])

    ours, theirs = wrap(make_venv(make_full_env_fns(4))), wrap(DummyVecEnv(make_full_env_fns(4)))
    episodes: list[list[tuple[float, int]]] = [[], []]
    for venv in (ours, theirs):
        venv.seed(1)
    assert_equal(ours.reset(), theirs.reset())
    for step in range(100):
        actions = np.full(4, step % 4)
        actual, expected = ours.step(actions), theirs.step(actions)
        for results, venv_episodes in zip((actual, expected), episodes, strict=True):
            for info in results[3]:
                if "episode" in info:
                    statistics = info.pop("episode")
                    venv_episodes.append((float(statistics["r"]), int(statistics["l"])))
        assert_equal(actual, expected)
    assert episodes[0] == episodes[1]
    assert len(episodes[0]) > 20
    ours.close()
    theirs.close()


@pytest.mark.parametrize("num_workers", [0, 2])
def test_calls_with_indices_reach_single_environments(num_workers: int) -> None:
    venv = make_venv(make_full_env_fns(3, wrapped=True), num_workers)
    venv.reset()
    assert venv.get_attr("level") == [0, 0, 0]
    venv.set_attr("level", 5, indices=1)
    venv.set_attr("level", 7, indices=[-1])
    assert venv.get_attr("level") == [0, 5, 7]
    assert venv.get_attr("level", [2, 0, 2]) == [7, 0, 7]
    assert venv.get_attr("level", []) == []
    assert venv.step(np.zeros(3, int))[1].tolist() == [0.0, 5.0, 7.0]  # set on the environment inside its wrapper
    assert venv.env_method("add", 1, twice=True) == [2, 7, 9]
    assert venv.env_method("add", 1, indices=(2, 1)) == [8, 6]
    assert venv.has_attr("level")
    assert not venv.has_attr("levle")
    with pytest.raises(AttributeError, match="levle"):
        venv.get_attr("levle")
    for call_env in (
        lambda: venv.get_attr("level", 3),
        lambda: venv.set_attr("level", 1, indices=[0, 3]),
        lambda: venv.env_method("add", 1, indices=[-4]),
    ):
        with pytest.raises(IndexError, match=r"indices must be from -3 to 2, got \[.*(3|-4)\]"):
            call_env()
    with pytest.raises(ValueError, match="intended failure"):
        venv.env_method("fail", indices=0)
    venv.step(np.zeros(3, int))  # the failed calls have not affected the environments
    venv.close()


def test_spare_environments_without_same_step_mode_cause_a_warning() -> None:
    with pytest.warns(UserWarning, match="the spare environments are never used: pass autoreset_mode='SameStep'"):
        as_sb3(vecenv.make_vec(make_full_env_fns(1, wrapped=True)[0], 2, spare_workers=1)).close()


def test_set_attr_of_all_rows_reaches_spare_environments() -> None:
    venv = as_sb3(vecenv.make_vec(make_full_env_fns(1, wrapped=True)[0], 3, spare_workers=2, autoreset_mode="SameStep"))
    venv.reset()
    venv.set_attr("level", 5)
    ended = sum(venv.step(np.zeros(3, int))[2].sum() for _ in range(30))
    assert ended > 5
    assert venv.get_attr("level") == [5, 5, 5]
    with pytest.raises(NotImplementedError, match="any environment may run the episodes of any row"):
        venv.set_attr("level", 5, indices=[0])
    with pytest.raises(IndexError, match=r"indices must be from -3 to 2"):
        venv.set_attr("level", 5, indices=[0, 1, 3])
    venv.close()


def test_repr_shows_the_adapted_vector_environment() -> None:
    venv = make_venv(make_full_env_fns(2), num_workers=0)
    assert repr(venv) == f"SB3VecEnv({venv.vector_env!r})"
    assert "SB3VecEnv(AsyncVectorEnv(num_envs=2" in repr(venv)
    venv.close()


def test_env_is_wrapped_finds_the_wrappers() -> None:
    venv = make_venv(make_full_env_fns(2, wrapped=True))
    assert venv.env_is_wrapped(NoOpWrapper) == [True, True]
    assert venv.env_is_wrapped(gym.Wrapper, indices=[1]) == [True]
    assert venv.env_is_wrapped(Monitor) == [False, False]
    venv.close()
    venv = make_venv([functools.partial(_make_monitored_env)] * 2)
    assert venv.env_is_wrapped(Monitor) == [True, True]
    with pytest.warns(UserWarning, match="already wrapped with a `Monitor`"):
        VecMonitor(venv)
    venv.close()


def _make_monitored_env() -> Any:
    return Monitor(make_cartpole())


def test_render_tiles_frames_like_dummy_vec_env() -> None:
    ours, theirs = (
        make_venv(make_full_env_fns(3, render_mode="rgb_array")),
        DummyVecEnv(make_full_env_fns(3, render_mode="rgb_array")),
    )
    for venv in (ours, theirs):
        venv.seed(0)
        venv.reset()
        venv.step(np.zeros(3, int))
    assert ours.render_mode == "rgb_array"
    assert ours.metadata["render_fps"] == theirs.metadata["render_fps"]
    np.testing.assert_array_equal(ours.render(), theirs.render())
    ours.close()
    theirs.close()
    without_mode = make_venv(make_full_env_fns(1))
    with pytest.warns(UserWarning, match="render"):
        assert without_mode.render() is None
    without_mode.close()


@pytest.mark.parametrize("mode", ["SameStep", "NextStep"])
def test_ppo_learns_the_same_as_over_dummy_vec_env(mode: str) -> None:
    def weights(venv: VecEnv) -> np.ndarray:
        model = sb3.PPO("MlpPolicy", VecMonitor(venv), n_steps=64, batch_size=128, n_epochs=2, seed=3, device="cpu")
        model.learn(1024)
        venv.close()
        assert len(model.ep_info_buffer) > 10
        return np.concatenate([value.detach().numpy().ravel() for value in model.policy.parameters()])

    env_fns = [functools.partial(make_cartpole, 30)] * 4  # PPO bootstraps from the last observation of truncated episodes
    np.testing.assert_array_equal(weights(make_venv(env_fns, autoreset_mode=mode)), weights(DummyVecEnv(env_fns)))


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_ppo_learns_cartpole() -> None:
    envs = vecenv.make_vec("CartPole-v1", 8, vector_kwargs=SAME_STEP)
    model = sb3.PPO(
        "MlpPolicy", VecMonitor(as_sb3(envs)), n_steps=32, batch_size=256, n_epochs=20, gamma=0.98, gae_lambda=0.8,
        learning_rate=lambda remaining: 1e-3 * remaining, clip_range=lambda remaining: 0.2 * remaining, seed=1, device="cpu",
    )  # fmt: skip
    model.learn(100_000)
    mean, _ = evaluate_policy(model, model.get_env(), n_eval_episodes=20)
    envs.close()
    assert mean >= 475


def test_pending_step_is_dropped_by_reset() -> None:
    ours, theirs = make_venv(make_full_env_fns(2)), make_venv(make_full_env_fns(2), num_workers=0)
    for venv in (ours, theirs):
        venv.seed(0)
        venv.reset()
    ours.step_async(np.zeros(2, int))
    theirs.step(np.zeros(2, int))
    assert_equal(ours.reset(), theirs.reset())
    ours.close()
    ours.close()
    theirs.close()


@pytest.mark.parametrize("sent", [False, True])
def test_step_wait_can_be_repeated_after_an_interrupted_reset(sent: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    env_fns = [functools.partial(make_cartpole, 2), make_cartpole]
    ours, theirs = (make_venv(env_fns, autoreset_mode="NextStep") for _ in range(2))
    envs = ours.vector_env

    def interrupt(*, options: Any, **_: Any) -> None:
        if sent:
            envs.reset_async(options=options)
        raise KeyboardInterrupt

    for venv in (ours, theirs):
        venv.seed(0)
        venv.reset()
        venv.step(np.zeros(2, int))
    monkeypatch.setattr(envs, "reset", interrupt)
    with pytest.raises(KeyboardInterrupt):
        ours.step(np.zeros(2, int))
    with pytest.raises(AlreadyPendingCallError, match="pending call to `step`"):
        ours.step(np.zeros(2, int))
    monkeypatch.undo()
    (observations, *results), (expected_observations, *expected_results) = ours.step_wait(), theirs.step(np.zeros(2, int))
    assert_equal(results, expected_results)
    assert results[1].tolist() == [True, False]
    np.testing.assert_array_equal(observations[sent:], expected_observations[sent:])  # if sent, it was reset a second time
    np.testing.assert_array_less(np.abs(observations[0]), 0.05)
    monkeypatch.setattr(envs, "reset", interrupt)
    for _ in range(2):
        with contextlib.suppress(KeyboardInterrupt):
            ours.step(np.zeros(2, int))
    monkeypatch.undo()
    ours.reset()
    assert ours.step(np.zeros(2, int))[1].tolist() == [1.0, 1.0]
    ours.close()
    theirs.close()


@pytest.mark.parametrize("mode", ["SameStep", "NextStep"])
def test_restart_truncates_the_episode_and_marks_its_info(mode: str) -> None:
    venv = make_venv([make_cartpole, _make_faulty_env], on_failure="restart", autoreset_mode=mode)
    venv.seed(0)
    last = venv.reset()
    for _ in range(6):
        observations, rewards, dones, infos = venv.step(np.array([0, 1]))
        if dones[1]:
            break
        last = observations
    assert infos[1]["restarted"]
    assert infos[1]["TimeLimit.truncated"]
    assert rewards[1] == 0
    np.testing.assert_array_equal(infos[1]["terminal_observation"], last[1])
    assert "restarted" not in infos[0]
    venv.close()


def _make_faulty_env() -> Any:
    return FaultyEnv(make_cartpole(), "raises", step=4)


@pytest.mark.parametrize("mode", ["SameStep", "NextStep"])
def test_as_sb3_over_envpool_returns_terminal_observations(mode: str) -> None:
    pytest.importorskip("envpool", reason="needs EnvPool: pip install 'vecenv[envpool]'")
    envs = vecenv.make_vec("CartPole-v1", 4, "envpool", vector_kwargs={"autoreset_mode": mode})
    venv = VecMonitor(as_sb3(envs))
    venv.seed(0)
    observations = venv.reset()
    ended = 0
    for _ in range(100):
        before = observations
        observations, _, dones, infos = venv.step(np.zeros(4, int))
        for row in np.flatnonzero(dones):
            ended += 1
            last = infos[row]["terminal_observation"]
            # one step after the previous observation, and not the first one of the next episode
            assert 0 < np.abs(last - before[row]).max() < 1.0
            assert np.abs(observations[row]).max() <= 0.05
            assert infos[row]["episode"]["l"] == infos[row]["elapsed_step"]
    assert ended > 20
    assert venv.env_is_wrapped(Monitor) == [False] * 4
    assert not venv.has_attr("state")
    with pytest.raises(AttributeError, match="not Python objects"):
        venv.env_method("state")
    venv.close()


def test_environment_attributes_of_gymnasiums_vector_environments_are_refused() -> None:
    venv = as_sb3(gym.vector.SyncVectorEnv(make_full_env_fns(2)))
    assert not venv.has_attr("level")
    with pytest.raises(AttributeError, match="SyncVectorEnv does not give access to single environments, so 'level'"):
        venv.get_attr("level")
    venv.close()


def test_as_sb3_returns_the_results_of_gymnasiums_vector_wrappers() -> None:
    envs = gym.wrappers.vector.RecordEpisodeStatistics(vecenv.make_vec("CartPole-v1", 4, "serial"))
    venv = as_sb3(gym.wrappers.vector.TransformReward(envs, lambda rewards: 2 * rewards))
    venv.seed(0)
    venv.reset()
    lengths, steps = [], np.zeros(4, int)
    for _ in range(100):
        _, rewards, dones, infos = venv.step(np.zeros(4, int))
        assert rewards.tolist() == [2.0] * 4
        steps += 1
        for row in np.flatnonzero(dones):
            lengths.append((infos[row]["episode"]["l"], steps[row]))
            steps[row] = 0
    assert len(lengths) > 20
    assert all(reported == counted for reported, counted in lengths)
    assert venv.spec.id == "CartPole-v1"
    venv.close()


@pytest.mark.parametrize("padding_done", [True, False])
@pytest.mark.parametrize("mode", ["NextStep", "Disabled"])
def test_agents_that_die_at_different_times_have_equal_rows_in_every_mode(mode: str, padding_done: bool) -> None:
    envs, reference = (as_sb3(make_agent_rows(each, padding_done=padding_done)) for each in (mode, "SameStep"))
    for each in (envs, reference):
        each.seed(3)
    assert_equal(envs.reset(), reference.reset())
    ends: dict[bool, int] = {True: 0, False: 0}  # by "env_done"
    for _ in range(30):
        actual, expected = envs.step(np.ones(9, np.int64)), reference.step(np.ones(9, np.int64))
        assert_equal(actual[:3], expected[:3])
        for row, (info, expected_info) in enumerate(zip(actual[3], expected[3], strict=True)):
            if actual[2][row] or not info["env_done"]:
                assert_equal(info, expected_info)
            if actual[2][row] and info["transition_mask"]:  # the end of an agent, not of padding
                ends[info["env_done"]] += 1
                assert info["terminal_observation"].tolist() == [row % 3 + 1, info["life"]]
    assert min(ends.values()) > 10
    with pytest.raises(AttributeError, match=r"use call\(\).* of the MultiAgentVecEnv"):
        envs.env_method("observation_space", 1)
    for each in (envs, reference):
        each.close()


def test_unsupported_vector_environments_are_refused() -> None:
    envs = vecenv.make_vec("CartPole-v1", 2, "serial", vector_kwargs={**SAME_STEP, "copy": False})
    with pytest.raises(ValueError, match="copy=True"):
        as_sb3(envs)
    envs.close()
    with pytest.raises(TypeError, match="Gymnasium vector environment"):
        as_sb3(gym.make("CartPole-v1"))
    games = vecenv.MultiAgentVecEnv([DyingAgents] * 2, num_workers=0)
    with pytest.raises(TypeError, match=r"; use envs\.flatten_agents\(\)$"):
        as_sb3(games)
    games.close()
    envs = vecenv.make_vec("CartPole-v1", 2, "serial")
    envs.metadata["autoreset_mode"] = None
    with pytest.raises(ValueError, match="needs autoreset_mode='NextStep' or 'SameStep' or 'Disabled', got None"):
        as_sb3(envs)
    envs.close()


def test_vector_environments_without_masked_resets_are_refused() -> None:
    make_cartpole_batch = functools.partial(gym.make_vec, "CartPole-v1", vectorization_mode="vector_entry_point")
    wrapped = gym.wrappers.vector.TransformReward(make_cartpole_batch(2), abs)
    text = "Stable-Baselines3 resets .* but {} has no resets with a reset_mask: it needs autoreset_mode='SameStep', another"
    for envs in (make_cartpole_batch(2), wrapped, vecenv.make_vec("CartPole-v1", 2, "native")):
        with pytest.raises(ValueError, match=text.format(type(envs.unwrapped).__name__)):
            as_sb3(envs)
        envs.close()
    as_sb3(vecenv.make_vec("CartPole-v1", 1, "native")).close()  # a mask that selects all is no problem


def test_set_options_accepts_one_dict_per_environment() -> None:
    venv = make_venv(make_full_env_fns(2), num_workers=0)
    venv.set_options([{"start": 1}, {"start": 2}])
    venv.reset()
    assert [info["start"] for info in venv.reset_infos] == [1, 2]
    venv.set_options([{"start": 3}, {"start": 3}])
    venv.reset()
    assert [info["start"] for info in venv.reset_infos] == [3, 3]
    goals = [np.zeros(2), np.ones(2)]
    venv.set_options([{"start": 4, "goal": goal} for goal in goals])
    venv.reset()
    assert [info["start"] for info in venv.reset_infos] == [4, 4]
    for wrong in ([{"start": 1}], [{"start": 1}] * 3):
        venv.set_options(wrong)
        with pytest.raises(ValueError, match=r"options has . dicts, expected 2"):
            venv.reset()
    venv.close()
