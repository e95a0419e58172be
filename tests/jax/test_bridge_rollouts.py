"""Rollouts over bridges: lanes, dtypes, and trajectories."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import gymnasium as gym
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from bridge_envs import SPACES, CallLogVectorEnv, flatten, make_fns
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from jax.random import key as new_key
from sampling import each_pair

import vecenv
import vecenv.jax as vj

# --- Rollouts and evaluations over bridged environments ----------------------------------------

NUM_ENVS, MAX_STEPS = 4, 15


@vj.stateless
def policy(params: Any, obs: Any, key: Any) -> Any:
    """Return random actions of ``Discrete(5, start=-2)``."""
    action = jax.random.randint(key, (obs.shape[0],), -2, 3) * params
    return action, {"obs": obs[:, 0]}


def make_constant_policy(env: vj.Bridge) -> Any:
    """Return a policy with constant actions for :class:`CallLogVectorEnv`."""
    return vj.stateless(lambda params, obs, key: (jnp.zeros((env.num_envs, 1)) + params, {}))


@pytest.mark.long
def test_rollouts_make_one_host_call_per_step() -> None:
    def get_host_calls(run: Any, episode_length: int = 0) -> str:
        with vj.bridge(CallLogVectorEnv(episode_length=episode_length)) as env:
            program = jax.jit(lambda key: run(env, make_constant_policy(env), 1.0, env.reset(key), (), new_key(8)))
            jax.block_until_ready(program(new_key(7)))
            jax.effects_barrier()
            assert env.envs.calls[0] == "R"
            return env.envs.calls[1:]

    def rollout(*args: Any) -> Any:
        return vj.rollout(*args, 6)[1].token  # the trajectory is unused, which must not remove steps

    assert get_host_calls(rollout) == "S" * 6
    assert get_host_calls(lambda *args: vj.eval_rollout_episode(*args, 6)) == "S" * 6
    assert get_host_calls(lambda *args: vj.eval_rollout_episode(*args, 6), episode_length=3) == "S" * 3
    assert get_host_calls(lambda *args: vj.fast_eval_rollout_episode(*args, 6)) == "S" * 6
    assert get_host_calls(lambda *args: vj.fast_eval_rollout_episode(*args, 6), episode_length=3) == "S" * 3
    # two episodes of three steps in each row, with a reset between them
    assert get_host_calls(lambda *args: vj.fast_eval_rollout_episode(*args, 6, 4), episode_length=3) == "S" * 7


@pytest.mark.long
def test_evaluations_in_lanes_equal_separate_evaluations() -> None:
    keys, scales = jax.random.split(new_key(7), 2), jnp.array([1, 0])

    def evaluate(env: vj.Bridge, key: Any, scale: Any) -> Any:
        args = (env, policy, scale, env.reset(key), (), new_key(8), MAX_STEPS)
        # env_steps differs, because all lanes stop together
        fast = dataclasses.replace(vj.fast_eval_rollout_episode(*args)[0], env_steps=0)
        whole = vj.eval_rollout_episode(env, policy, scale, env.reset(key), (), new_key(8), MAX_STEPS)[1]
        return fast, dataclasses.replace(whole, env_steps=0)

    with vj.bridge(SyncVectorEnv(make_fns(2 * NUM_ENVS)), lanes=2) as env:
        together = jax.jit(jax.vmap(lambda key, scale: evaluate(env, key, scale)))(keys, scales)
    for lane in range(2):
        with vj.bridge(SyncVectorEnv(make_fns(NUM_ENVS))) as env:
            alone = jax.jit(lambda key, scale, env=env: evaluate(env, key, scale))(keys[lane], scales[lane])
        lane_results = jax.tree.map(lambda leaf, lane=lane: leaf[lane], together)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), lane_results, alone)


@pytest.mark.long
def test_evaluations_in_lanes_stop_when_all_lanes_have_finished() -> None:
    with vj.bridge(CallLogVectorEnv(4, episode_length=3), lanes=2) as env:

        def evaluate(key: Any) -> Any:
            fast, state = vj.fast_eval_rollout_episode(env, make_constant_policy(env), 1.0, env.reset(key), (), key, 9)
            whole = vj.eval_rollout_episode(env, make_constant_policy(env), 1.0, env.reset(key), (), key, 6)[1]
            return fast, whole, state.steps

        fast, whole, steps = jax.jit(jax.vmap(evaluate))(jax.random.split(new_key(7), 2))
        assert env.envs.calls == "RSSSRSSS"
    assert fast.finished.all()
    assert whole.finished.all()
    assert steps.tolist() == [[3, 3]] * 2


def test_rollouts_with_wrong_arguments_raise() -> None:
    with vj.bridge(SyncVectorEnv(make_fns(NUM_ENVS), autoreset_mode=AutoresetMode.DISABLED), {"left": np.int32}) as env:
        state = env.reset(new_key(7))
        with pytest.raises(ValueError, match=r"'speed'.*'steps'.*'left'"):
            vj.rollout(env, policy, 1, state, (), new_key(8), 2, ("speed",))
        with pytest.raises(ValueError, match=r"no fields \['speed'\]; there are .*'done'"):
            vj.eval_rollout_episode(env, policy, 1, state, (), new_key(8), 2, keep=("reward", "speed"))
        with pytest.raises(ValueError, match="num_episodes must be positive, got 0"):
            vj.fast_eval_rollout_episode(env, policy, 1, state, (), new_key(8), 2, 0)


# --- Trajectories through the bridge equal a plain loop over ``SyncVectorEnv`` ------------------

STEPS = 17
ROWS = 3
INFOS = {
    "score": np.float32,
    "left": jax.ShapeDtypeStruct((), jnp.int32),
    "deep": {"pair": jax.ShapeDtypeStruct((2,), jnp.float32)},
}
ENGINES: dict[str, Any] = {
    "sync": SyncVectorEnv,
    "gymnasium-async": lambda fns, autoreset_mode: gym.vector.AsyncVectorEnv(
        fns, context="forkserver", autoreset_mode=autoreset_mode
    ),
    "vecenv": lambda fns, autoreset_mode: vecenv.AsyncVectorEnv(
        fns, context="forkserver", autoreset_mode=autoreset_mode, num_workers=2
    ),
    "vecenv-in-process": lambda fns, autoreset_mode: vecenv.AsyncVectorEnv(
        fns, autoreset_mode=autoreset_mode, num_workers=0
    ),
    "wrapped": lambda fns, autoreset_mode: gym.wrappers.vector.RecordEpisodeStatistics(
        SyncVectorEnv(fns, autoreset_mode=autoreset_mode)
    ),
}


def get_seeds(key: Any, n: int = ROWS) -> list[int]:
    """Return the seeds that a bridge derives from a key."""
    return [int(bits) >> 1 for bits in jax.random.bits(key, (n,), jnp.uint32)]


def sample_actions(space: gym.Space[Any]) -> list[Any]:
    space.seed(3)
    return [space.sample() for _ in range(STEPS)]


def stack(rows: list[Any]) -> Any:
    return jax.tree.map(lambda *leaves: np.stack(leaves), *rows)


def iter_expected(fns: Any, mode: AutoresetMode, actions: list[Any]) -> Iterator[dict[str, Any]]:
    """Yield the results of each step of a plain loop, with the masks and counts that ``EnvState`` has."""
    envs = SyncVectorEnv(fns, autoreset_mode=mode)
    disabled = mode is AutoresetMode.DISABLED
    obs_leaves = flatten(envs.reset(seed=get_seeds(new_key(7)))[0])
    done, terminated, truncated = np.zeros(ROWS, bool), np.zeros(ROWS, bool), np.zeros(ROWS, bool)
    length, total, last_length, last_total = np.zeros(ROWS, int), np.zeros(ROWS), np.zeros(ROWS, int), np.zeros(ROWS)
    for action in actions:
        was_done = done.copy()
        if disabled:  # SyncVectorEnv would also step the finished rows
            row_actions = list(gym.vector.utils.iterate(envs.action_space, action))
            infos, reward = {}, np.zeros(ROWS)
            obs_leaves = [leaf.copy() for leaf in obs_leaves]
            for i in np.flatnonzero(~done):
                observation, reward[i], terminated[i], truncated[i], _ = envs.envs[i].step(row_actions[i])
                for leaf, value in zip(obs_leaves, flatten(observation), strict=True):
                    leaf[i] = value
        else:
            obs, reward, terminated, truncated, infos = envs.step(action)
            obs_leaves = [leaf.copy() for leaf in flatten(obs)]
        successor = [leaf.copy() for leaf in obs_leaves]
        done = terminated | truncated
        if mode is AutoresetMode.SAME_STEP and done.any():
            for i in np.flatnonzero(done):
                for leaf, value in zip(successor, flatten(infos["final_obs"][i]), strict=True):
                    leaf[i] = value
        valid = ~was_done if mode is not AutoresetMode.SAME_STEP else np.ones(ROWS, bool)
        first = {AutoresetMode.NEXT_STEP: was_done, AutoresetMode.SAME_STEP: done}.get(mode, np.zeros(ROWS, bool))
        length, total = length + valid, total + np.where(valid, reward, 0)
        if mode is AutoresetMode.NEXT_STEP:
            length, total = np.where(was_done, 0, length), np.where(was_done, 0, total)
        ended = done & valid
        last_length, last_total = np.where(ended, length, last_length), np.where(ended, total, last_total)
        if mode is AutoresetMode.SAME_STEP:
            length, total = np.where(done, 0, length), np.where(done, 0, total)
        yield {
            "obs": obs_leaves, "next_obs": successor, "reward": reward,
            "terminated": terminated.copy(), "truncated": truncated.copy(),
            "valid": valid, "first": first, "steps": length, "episode_return": total, "last_length": last_length,
            "last_return": last_total, "infos": infos,
        }  # fmt: skip
    envs.close()


def assert_equals_loop(states: Any, fns: Any, mode: AutoresetMode, actions: list[Any]) -> int:
    """Assert that a stacked trajectory equals the plain loop, and return the number of episodes that ended."""
    ended = reported = 0
    for t, expected in enumerate(iter_expected(fns, mode, actions)):
        state = jax.tree.map(lambda leaf, t=t: leaf[t], states)
        for name in ("obs", "next_obs"):
            for found, leaf in zip(flatten(getattr(state, name)), expected[name], strict=True):
                np.testing.assert_array_equal(found, leaf, err_msg=f"{name} at {t}")
        for name in ("terminated", "truncated", "valid", "first", "steps", "last_length"):
            np.testing.assert_array_equal(getattr(state, name), expected[name], err_msg=f"{name} at {t}")
        for name in ("reward", "episode_return", "last_return"):
            np.testing.assert_allclose(getattr(state, name), expected[name], rtol=1e-6, err_msg=f"{name} at {t}")
        ended += int((expected["terminated"] | expected["truncated"]).sum())
        if mode is not AutoresetMode.DISABLED:
            reported += assert_infos_equal(state.info, expected["infos"], mode)
    assert reported > 3 * ROWS or mode is AutoresetMode.DISABLED
    return ended


def assert_infos_equal(found: Any, expected: dict[str, Any], mode: AutoresetMode) -> int:
    """Compare infos with those of the loop, or with ``final_info`` where an episode ended. Return the number of values."""
    reported = 0
    for i in range(ROWS):
        infos = expected
        if mode is AutoresetMode.SAME_STEP and infos.get("_final_info", np.zeros(ROWS, bool))[i]:
            infos = infos["final_info"]
        deep = (found["deep"], infos.get("deep", {}), "pair")
        for found_infos, source, key in ((found, infos, "score"), (found, infos, "left"), deep):
            present = bool(source.get(f"_{key}", np.zeros(ROWS, bool))[i])
            assert found_infos[f"_{key}"][i] == present, (i, key)
            np.testing.assert_allclose(found_infos[key][i], source[key][i] if present else 0, rtol=1e-6)
            reported += present
    return reported


def run_actions(env: vj.Bridge, actions: list[Any], split: bool = False) -> Any:
    def body(state: Any, action: Any) -> Any:
        state = env.recv(env.send(state, action)) if split else env.step(state, action)
        return state, state

    states = jax.jit(lambda state, actions: jax.lax.scan(body, state, actions))(env.reset(new_key(7)), stack(actions))[1]
    return jax.tree.map(np.asarray, states)


@pytest.mark.long
@pytest.mark.parametrize(("engine", "mode", "split"), each_pair(ENGINES, AutoresetMode, [False, True]))
def test_trajectories_equal_a_plain_loop(engine: Any, mode: AutoresetMode, split: bool) -> None:
    fns = make_fns(ROWS)
    with vj.bridge(engine(fns, autoreset_mode=mode), INFOS) as env:
        actions = sample_actions(env.action_space)
        assert assert_equals_loop(run_actions(env, actions, split), fns, mode, actions) >= ROWS


@pytest.mark.long
def test_reset_is_determined_by_the_key() -> None:
    with vj.bridge(SyncVectorEnv(make_fns(ROWS))) as env:
        raw = jax.random.key_data(new_key(7))
        typed, untyped, other = env.reset(new_key(7)).obs, env.reset(raw).obs, env.reset(jax.random.key(8)).obs
    np.testing.assert_array_equal(typed, untyped)
    assert not np.array_equal(typed, other)


@pytest.mark.long
def test_discounted_return_equals_the_sum_of_discounted_rewards() -> None:
    with vj.bridge(SyncVectorEnv(make_fns(ROWS)), discount=0.5) as env:
        states = run_actions(env, sample_actions(env.action_space))
    totals = np.zeros(ROWS)
    for t in range(STEPS):
        first, exponent = np.asarray(states.first[t]), np.asarray(states.steps[t]) - 1
        totals = np.where(first, 0, totals + 0.5 ** np.maximum(exponent, 0) * np.asarray(states.reward[t]))
        np.testing.assert_allclose(states.discounted_return[t], totals, rtol=1e-5)


@pytest.mark.long
@pytest.mark.parametrize("engine", ["sync", "vecenv", "gymnasium-async"])
def test_reset_mask_resets_only_the_masked_rows(engine: str) -> None:
    fns = make_fns(ROWS)
    with vj.bridge(ENGINES[engine](fns, autoreset_mode=AutoresetMode.DISABLED)) as env:
        action = jnp.asarray(sample_actions(env.action_space)[0])
        state = env.reset(new_key(7))
        while not bool(state.done.any()):
            state = env.step(state, action)
        before, done, key = state, np.asarray(state.done), jax.random.key(11)
        state = jax.jit(env.reset_mask)(state, state.done, key)
        single = make_fns(1)[0]()
        for i in range(ROWS):
            if done[i]:
                np.testing.assert_array_equal(state.obs[i], single.reset(seed=get_seeds(key)[i])[0])
                assert state.first[i]
                assert not state.done[i]
                assert state.steps[i] == 0
            else:
                np.testing.assert_array_equal(state.obs[i], before.obs[i])
                assert state.steps[i] == before.steps[i]
            assert state.last_length[i] == before.last_length[i]
        after = env.step(state, action)
        assert after.valid.all()
        assert after.steps.tolist() == (state.steps + 1).tolist()
        unchanged = env.reset_mask(after, jnp.zeros(ROWS, bool), key)
        np.testing.assert_array_equal(unchanged.obs, after.obs)


@pytest.mark.long
@pytest.mark.parametrize("name", list(SPACES))
@pytest.mark.parametrize("engine", ["sync", "vecenv"])
def test_trajectories_of_every_space_equal_a_plain_loop(name: str, engine: str) -> None:
    for fns in (make_fns(ROWS, name, "discrete"), make_fns(ROWS, "box", name)):
        with vj.bridge(ENGINES[engine](fns, autoreset_mode=AutoresetMode.SAME_STEP), INFOS) as env:
            actions = sample_actions(env.action_space)
            assert assert_equals_loop(run_actions(env, actions), fns, AutoresetMode.SAME_STEP, actions) >= ROWS


def test_bridge_over_small_batches_of_envpool_names_the_batch_size_when_an_episode_has_ended() -> None:
    pytest.importorskip("envpool", reason="needs EnvPool: pip install 'vecenv[envpool]'")
    envs = vecenv.backends.EnvPoolVectorEnv("CartPole-v1", 4, batch_size=2, seed=0, autoreset_mode="Disabled")
    with vj.bridge(envs) as env:
        state, actions = env.reset(jax.random.key(0)), jnp.zeros(4, jnp.int32)
        while not state.done.any():
            state = env.step(state, actions)
        assert not state.done.all()
        with pytest.raises(NotImplementedError, match="with this batch_size"):
            env.step(state, actions)


@pytest.mark.long
def test_bridge_over_envpool_marks_valid_rows_and_resets_masked_rows() -> None:
    pytest.importorskip("envpool", reason="needs EnvPool: pip install 'vecenv[envpool]'")
    for mode in AutoresetMode:
        envs = vecenv.backends.EnvPoolVectorEnv("CartPole-v1", ROWS, autoreset_mode=mode)
        with vj.bridge(envs, info_spec={"elapsed_step": np.int32}) as env:
            state = env.reset(new_key(7))
            for _ in range(40):
                before, state = state, env.step(state, jnp.zeros(ROWS, jnp.int32))
                assert (np.asarray(state.valid) == ~np.asarray(before.done)).all() or mode is AutoresetMode.SAME_STEP
            assert (state.last_length > 5).all()
            assert (state.last_length == state.last_return).all()
            assert bool(state.done.all()) or mode is not AutoresetMode.DISABLED
            if mode is AutoresetMode.DISABLED:
                state = env.reset_mask(state, jnp.array([True, False, True]), new_key(7))
                assert state.done.tolist() == [False, True, False]
                state = env.step(state, jnp.zeros(ROWS, jnp.int32))
                assert state.valid.tolist() == [True, False, True]


@pytest.mark.parametrize("mode", [AutoresetMode.NEXT_STEP, AutoresetMode.SAME_STEP])
def test_statistics_of_a_vector_wrapper_are_reported_where_an_episode_ended(mode: AutoresetMode) -> None:
    envs = gym.wrappers.vector.RecordEpisodeStatistics(SyncVectorEnv(make_fns(ROWS), autoreset_mode=mode))
    with vj.bridge(envs, info_spec={"episode": {"r": np.float32, "l": np.int32}}) as env:
        states = run_actions(env, sample_actions(env.action_space))
    episode = states.info["episode"]
    assert states.done.sum() >= ROWS
    np.testing.assert_array_equal(episode["_r"], states.done)
    np.testing.assert_array_equal(episode["_l"], states.done)
    np.testing.assert_array_equal(episode["l"], np.where(states.done, states.last_length, 0))
    np.testing.assert_allclose(episode["r"], np.where(states.done, states.last_return, 0), rtol=1e-5)


def test_reset_accepts_a_key_that_is_a_constant_of_the_program(closes: Any) -> None:
    fns = make_fns(ROWS)
    sync = closes(SyncVectorEnv(fns))
    expected_observations, _ = sync.reset(seed=get_seeds(new_key(7)))
    env = closes(vj.bridge(SyncVectorEnv(fns)))

    @jax.jit
    def program(scale: Any) -> Any:
        return jax.tree.map(lambda leaf: leaf * scale, env.reset(new_key(7)).obs)

    for leaf, expected in zip(flatten(vj.run(program, 1)), flatten(expected_observations), strict=True):
        np.testing.assert_array_equal(leaf, expected)


# --- Dtypes: JAX's 32-bit and 64-bit modes, and the conversion of float64 and int64 --------------


class Float64Env(gym.Env[Any, Any]):
    """An environment with float64 and int64 in observations, actions and infos."""

    observation_space = gym.spaces.Dict(
        {"x": gym.spaces.Box(-np.inf, np.inf, (2,), np.float64), "n": gym.spaces.Box(0, 2**40, (1,), np.int64)}
    )
    action_space = gym.spaces.Box(-1, 1, (2,), np.float64)

    def __init__(self, number: int = 7) -> None:
        self.number = number

    def _observation(self) -> Any:
        return {"x": np.array([1 / 3, np.inf]), "n": np.array([self.number])}

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        return self._observation(), {}

    def step(self, action: Any) -> Any:
        assert action.dtype == np.float64
        action += 1.0  # environments may modify their actions
        return self._observation(), 1 / 3, False, False, {"third": 1 / 3}


@pytest.mark.long
@pytest.mark.parametrize("x64", [False, True])
def test_dtypes_follow_the_32_or_64_bit_mode_of_jax(x64: bool) -> None:
    with jax.enable_x64(x64), vj.bridge(SyncVectorEnv([Float64Env] * 2), {"third": np.float64}) as env:
        program = jax.jit(lambda s, a: jax.lax.scan(lambda s, _: (env.step(s, a), None), s, None, length=3)[0])
        state = program(env.reset(jax.random.key(0)), jnp.zeros((2, 2)))
        dtype = np.float64 if x64 else np.float32
        assert state.obs["x"].dtype == state.reward.dtype == state.info["third"].dtype == dtype
        assert state.obs["n"].dtype == (np.int64 if x64 else np.int32)
        assert state.token.dtype == state.steps.dtype == np.int32
        assert state.reward[0] == dtype(1 / 3)
        assert state.obs["x"][0].tolist() == [float(dtype(1 / 3)), np.inf]
        assert state.steps.tolist() == [3, 3]


def test_float64_keep_needs_the_64_bit_mode() -> None:
    with vj.bridge(SyncVectorEnv([Float64Env]), float64="keep") as env:
        with pytest.raises(ValueError, match="jax_enable_x64"):
            env.reset(new_key(0))
        with jax.enable_x64(True):
            assert env.reset(jax.random.key(0)).obs["x"].dtype == np.float64


@pytest.mark.long
def test_integer_that_overflows_in_32_bit_mode_raises() -> None:
    with vj.bridge(SyncVectorEnv([lambda: Float64Env(2**40)])) as env:
        with pytest.raises(OverflowError, match="64-bit mode"):
            env.reset(new_key(0))
        with jax.enable_x64(True):
            assert env.reset(jax.random.key(0)).obs["n"][0, 0] == 2**40


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
def test_integer_info_that_overflows_raises(dtype: Any) -> None:
    class ScoreEnv(Float64Env):
        score = 8

        def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
            return self._observation(), {"score": self.score}

    with vj.bridge(SyncVectorEnv([ScoreEnv]), {"score": dtype}) as env:
        assert env.reset(new_key(0)).info["score"].tolist() == [8]
        ScoreEnv.score = 2**40
        with pytest.raises(OverflowError, match="does not fit into int32"):
            env.reset(new_key(0))


@pytest.mark.long
def test_step_with_an_integer_that_overflows_needs_a_reset() -> None:
    inner = Float64Env()
    with vj.bridge(SyncVectorEnv([lambda: inner])) as env:
        state = env.reset(new_key(0))
        inner.number = 2**40
        with pytest.raises(OverflowError, match="64-bit mode"):
            env.step(state, jnp.zeros((1, 2)))
        with pytest.raises(vecenv.errors.StaleStateError, match="an earlier call failed: call reset"):
            env.step(state, jnp.zeros((1, 2)))


@pytest.mark.long
def test_seeds_are_the_same_in_32_and_64_bit_mode() -> None:
    observations = []
    for x64 in (False, True):
        with jax.enable_x64(x64), vj.bridge(SyncVectorEnv(make_fns(2))) as env:
            observations.append(np.asarray(env.reset(jax.random.key(5)).obs))
    np.testing.assert_array_equal(*observations)


# --- ``lanes``: separate environments for each lane of a ``vmap``, with one host call per step ---


def make_three_keys() -> Any:
    return jax.random.split(jax.random.key(3), 3)


@pytest.mark.long
def test_scan_under_vmap_makes_one_host_call_per_step() -> None:
    with vj.bridge(CallLogVectorEnv(6), lanes=3) as env:
        assert env.num_envs == 2
        assert env.action_space.shape == (2, 1)

        @jax.jit
        @jax.vmap
        def program(key: Any) -> Any:
            state = env.reset(key)
            return jax.lax.scan(lambda s, _: (env.step(s, jnp.zeros((2, 1))), None), state, None, length=4)[0]

        state = program(make_three_keys())
        assert env.envs.calls == "RSSSS"
        assert state.steps.tolist() == [[4, 4]] * 3
        assert state.obs.shape == (3, 2, 1)


@pytest.mark.long
@pytest.mark.parametrize("mode", list(AutoresetMode))
def test_lanes_equal_separate_bridges(mode: AutoresetMode) -> None:
    actions = jnp.asarray(np.random.default_rng(0).integers(-2, 3, (3, 12, 2)))

    def step_all(env: vj.Bridge, key: Any, actions: Any) -> Any:
        def body(state: Any, action: Any) -> Any:
            state = env.recv(env.send(state, action))
            return state, state

        return jax.lax.scan(body, env.reset(key), actions)[1].replace(token=None)

    with vj.bridge(SyncVectorEnv(make_fns(6), autoreset_mode=mode), lanes=3) as env:
        together = jax.jit(jax.vmap(lambda key, actions: step_all(env, key, actions)))(make_three_keys(), actions)
    for lane in range(3):
        with vj.bridge(SyncVectorEnv(make_fns(2), autoreset_mode=mode)) as env:
            program = jax.jit(lambda key, actions, env=env: step_all(env, key, actions))
            alone = program(make_three_keys()[lane], actions[lane])
        lane_results = jax.tree.map(lambda leaf, lane=lane: leaf[lane], together)
        jax.tree.map(np.testing.assert_array_equal, alone, lane_results)


@pytest.mark.long
def test_reset_mask_in_lanes_resets_only_the_masked_rows() -> None:
    with vj.bridge(SyncVectorEnv(make_fns(6), autoreset_mode=AutoresetMode.DISABLED), lanes=3) as env:
        state = jax.vmap(env.reset)(make_three_keys())
        for _ in range(6):
            state = jax.vmap(env.step, in_axes=(0, None))(state, jnp.zeros(2, jnp.int32))  # one action for all lanes
        assert state.done.all()
        mask = jnp.array([[True, False], [False, False], [True, True]])
        state = jax.vmap(env.reset_mask)(state, mask, make_three_keys())
        np.testing.assert_array_equal(state.done, ~mask)


@pytest.mark.long
def test_gradients_under_vmap_treat_steps_as_constants() -> None:
    with vj.bridge(CallLogVectorEnv(6), lanes=3) as env:
        states = jax.vmap(env.reset)(make_three_keys())

        def loss(weight: Any, state: Any) -> Any:
            def body(state: Any, _: Any) -> Any:
                state = env.step(state, jnp.full((2, 1), weight))
                return state, weight * state.reward.sum()

            return jax.lax.scan(body, state, None, length=3)[1].sum()

        gradients = jax.jit(jax.vmap(jax.grad(loss)))(jnp.arange(3.0), states)
        assert env.envs.calls == "RSSS"
        assert gradients.tolist() == [18.0] * 3


@pytest.mark.long
def test_lanes_of_nested_vmaps_equal_those_of_a_flat_vmap() -> None:
    keys = jax.random.split(jax.random.key(4), 6)

    def step_once(env: vj.Bridge, key: Any, action: Any) -> Any:
        state = env.step(env.reset(key), jnp.full(2, action))
        return state.replace(token=None)

    actions = jnp.array([-2, -1, 0, 1, 2, 0])
    with vj.bridge(SyncVectorEnv(make_fns(12)), lanes=6) as env:
        flat = jax.jit(jax.vmap(lambda key, action: step_once(env, key, action)))(keys, actions)
        program = jax.jit(jax.vmap(jax.vmap(lambda key, action: step_once(env, key, action))))
        nested = program(keys.reshape(2, 3), actions.reshape(2, 3))
        with pytest.raises(ValueError, match=r"vmap over 6 lanes; it is called under jax.vmap over 3. .* make 6 .* lanes=3"):
            jax.vmap(env.reset)(keys[:3])
    assert nested.obs.shape[:3] == (2, 3, 2)
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(a.reshape(6, *a.shape[2:]), b), nested, flat)


@pytest.mark.long
def test_wrong_use_of_lanes_raises_with_advice() -> None:
    keys = jax.random.split(jax.random.key(3), 6)
    advice = r" For 6 lanes of 2, make 12 .* bridge\(\.\.\., lanes=6\)"
    calls = {  # text of the error -> call, argument
        r"must be called under jax.vmap over 3 lanes": (lambda env: env.reset, keys[0]),
        r"must be called under jax.vmap over 3 lanes\.": (lambda env: jax.jit(env.reset), keys[0]),
        r"lanes=3; it is called under jax.vmap over 2": (lambda env: jax.vmap(env.reset), keys[:2]),
        r"lanes=3; it is called under jax.vmap over 4 times 3": (
            lambda env: jax.vmap(jax.vmap(env.reset)), jax.random.split(keys[0], (4, 3)),
        ),
        rf"lanes=3; it is called under jax.vmap over 6\.{advice}": (lambda env: jax.vmap(env.reset), keys),
    }  # fmt: skip
    with vj.bridge(CallLogVectorEnv(6), lanes=3) as env:
        for text, (call, argument) in calls.items():
            with pytest.raises(ValueError, match=text):
                call(env)(argument)
        states = jax.vmap(env.reset)(keys[:3])  # the bridge is unchanged
        with pytest.raises(ValueError, match=r"under jax.vmap over the lanes"):
            env.step(states, jnp.zeros((2, 1)))
        assert env.envs.calls == "R"
    with vj.bridge(SyncVectorEnv(make_fns(12)), lanes=6) as env:  # what the error above advises
        assert jax.vmap(env.reset)(keys).obs.shape[:2] == (6, 2)
