"""Trajectories through the bridge are those of a plain Python loop over ``SyncVectorEnv``."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import gymnasium as gym
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from bridge_envs import SPACES, leaves, tracks
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from jax.random import key as new_key
from sampling import each_pair

import vecenv
import vecenv.jax as vj

T = 17
N = 3
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


def seeds_of(key: Any, n: int = N) -> list[int]:
    return [int(word) >> 1 for word in jax.random.bits(key, (n,), jnp.uint32)]


def actions_of(space: gym.Space[Any]) -> list[Any]:
    space.seed(3)
    return [space.sample() for _ in range(T)]


def stack(rows: list[Any]) -> Any:
    return jax.tree.map(lambda *leaves: np.stack(leaves), *rows)


def expected(fns: Any, mode: AutoresetMode, actions: list[Any]) -> Iterator[dict[str, Any]]:
    """The plain loop, with the masks and counts of EnvState worked out row by row."""
    envs = SyncVectorEnv(fns, autoreset_mode=mode)
    disabled = mode is AutoresetMode.DISABLED
    obs_leaves = leaves(envs.reset(seed=seeds_of(new_key(7)))[0])
    over, terminated, truncated = np.zeros(N, bool), np.zeros(N, bool), np.zeros(N, bool)
    length, total, last_length, last_total = np.zeros(N, int), np.zeros(N), np.zeros(N, int), np.zeros(N)
    for action in actions:
        before = over.copy()
        if disabled:  # step by hand those that go on
            rows, infos, reward = list(gym.vector.utils.iterate(envs.action_space, action)), {}, np.zeros(N)
            obs_leaves = [leaf.copy() for leaf in obs_leaves]
            for i in np.flatnonzero(~over):
                one, reward[i], terminated[i], truncated[i], _ = envs.envs[i].step(rows[i])
                for leaf, value in zip(obs_leaves, leaves(one), strict=True):
                    leaf[i] = value
        else:
            obs, reward, terminated, truncated, infos = envs.step(action)
            obs_leaves = [leaf.copy() for leaf in leaves(obs)]
        successor = [leaf.copy() for leaf in obs_leaves]
        over = terminated | truncated
        if mode is AutoresetMode.SAME_STEP and over.any():
            for i in np.flatnonzero(over):
                for leaf, value in zip(successor, leaves(infos["final_obs"][i]), strict=True):
                    leaf[i] = value
        valid = ~before if mode is not AutoresetMode.SAME_STEP else np.ones(N, bool)
        first = {AutoresetMode.NEXT_STEP: before, AutoresetMode.SAME_STEP: over}.get(mode, np.zeros(N, bool))
        length, total = length + valid, total + np.where(valid, reward, 0)
        if mode is AutoresetMode.NEXT_STEP:
            length, total = np.where(before, 0, length), np.where(before, 0, total)
        newly = over & valid
        last_length, last_total = np.where(newly, length, last_length), np.where(newly, total, last_total)
        if mode is AutoresetMode.SAME_STEP:
            length, total = np.where(over, 0, length), np.where(over, 0, total)
        yield {
            "obs": obs_leaves, "next_obs": successor, "reward": reward,
            "terminated": terminated.copy(), "truncated": truncated.copy(),
            "valid": valid, "first": first, "steps": length, "episode_return": total, "last_length": last_length,
            "last_return": last_total, "infos": infos,
        }  # fmt: skip
    envs.close()


def check(states: Any, fns: Any, mode: AutoresetMode, actions: list[Any]) -> int:
    """Compare a stacked trajectory with the plain loop; how many episodes ended."""
    ended = told = 0
    for t, want in enumerate(expected(fns, mode, actions)):
        state = jax.tree.map(lambda leaf, t=t: leaf[t], states)
        for name in ("obs", "next_obs"):
            for got, leaf in zip(leaves(getattr(state, name)), want[name], strict=True):
                np.testing.assert_array_equal(got, leaf, err_msg=f"{name} at {t}")
        for name in ("terminated", "truncated", "valid", "first", "steps", "last_length"):
            np.testing.assert_array_equal(getattr(state, name), want[name], err_msg=f"{name} at {t}")
        for name in ("reward", "episode_return", "last_return"):
            np.testing.assert_allclose(getattr(state, name), want[name], rtol=1e-6, err_msg=f"{name} at {t}")
        ended += int((want["terminated"] | want["truncated"]).sum())
        if mode is not AutoresetMode.DISABLED:
            told += check_infos(state.info, want["infos"], mode)
    assert told > 3 * N or mode is AutoresetMode.DISABLED
    return ended


def check_infos(found: Any, wanted: dict[str, Any], mode: AutoresetMode) -> int:
    """With masks, and from ``final_info`` where an episode ended; how many numbers there were."""
    told = 0
    for i in range(N):
        infos = wanted
        if mode is AutoresetMode.SAME_STEP and infos.get("_final_info", np.zeros(N, bool))[i]:
            infos = infos["final_info"]
        deep = (found["deep"], infos.get("deep", {}), "pair")
        for place, source, key in ((found, infos, "score"), (found, infos, "left"), deep):
            there = bool(source.get(f"_{key}", np.zeros(N, bool))[i])
            assert place[f"_{key}"][i] == there, (i, key)
            np.testing.assert_allclose(place[key][i], source[key][i] if there else 0, rtol=1e-6)
            told += there
    return told


def roll(env: vj.Bridge, actions: list[Any], split: bool = False) -> Any:
    def body(state: Any, action: Any) -> Any:
        state = env.recv(env.send(state, action)) if split else env.step(state, action)
        return state, state

    states = jax.jit(lambda state, actions: jax.lax.scan(body, state, actions))(env.reset(new_key(7)), stack(actions))[1]
    return jax.tree.map(np.asarray, states)


@pytest.mark.long
@pytest.mark.parametrize(("engine", "mode", "split"), each_pair(ENGINES, AutoresetMode, [False, True]))
def test_trajectories_are_those_of_a_plain_loop(engine: Any, mode: AutoresetMode, split: bool, transport: str) -> None:
    fns = tracks(N)
    with vj.bridge(engine(fns, autoreset_mode=mode), INFOS, transport=transport) as env:
        actions = actions_of(env.action_space)
        assert check(roll(env, actions, split), fns, mode, actions) >= N


@pytest.mark.long
def test_the_same_key_gives_the_same_trajectory_and_another_key_another() -> None:
    with vj.bridge(SyncVectorEnv(tracks(N))) as env:
        raw = jax.random.key_data(new_key(7))
        one, two, three = env.reset(new_key(7)).obs, env.reset(raw).obs, env.reset(jax.random.key(8)).obs
    np.testing.assert_array_equal(one, two)
    assert not np.array_equal(one, three)


@pytest.mark.long
def test_discounted_returns() -> None:
    with vj.bridge(SyncVectorEnv(tracks(N)), discount=0.5) as env:
        states = roll(env, actions_of(env.action_space))
    totals = np.zeros(N)
    for t in range(T):
        begins, before = np.asarray(states.first[t]), np.asarray(states.steps[t]) - 1
        totals = np.where(begins, 0, totals + 0.5 ** np.maximum(before, 0) * np.asarray(states.reward[t]))
        np.testing.assert_allclose(states.discounted_return[t], totals, rtol=1e-5)


@pytest.mark.long
@pytest.mark.parametrize("engine", ["sync", "vecenv", "gymnasium-async"])
def test_reset_mask_restarts_some_and_leaves_the_others(engine: str, transport: str) -> None:
    fns = tracks(N)
    with vj.bridge(ENGINES[engine](fns, autoreset_mode=AutoresetMode.DISABLED), transport=transport) as env:
        action = jnp.asarray(actions_of(env.action_space)[0])
        state = env.reset(new_key(7))
        while not bool(state.done.any()):
            state = env.step(state, action)
        before, done, key = state, np.asarray(state.done), jax.random.key(11)
        state = jax.jit(env.reset_mask)(state, state.done, key)
        single = tracks(1)[0]()
        for i in range(N):
            if done[i]:
                np.testing.assert_array_equal(state.obs[i], single.reset(seed=seeds_of(key)[i])[0])
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
        none = env.reset_mask(after, jnp.zeros(N, bool), key)
        np.testing.assert_array_equal(none.obs, after.obs)


@pytest.mark.long
@pytest.mark.parametrize("name", list(SPACES))
@pytest.mark.parametrize("engine", ["sync", "vecenv"])
def test_observations_and_actions_of_every_space(name: str, engine: str) -> None:
    for fns in (tracks(N, name, "discrete"), tracks(N, "box", name)):
        with vj.bridge(ENGINES[engine](fns, autoreset_mode=AutoresetMode.SAME_STEP), INFOS) as env:
            actions = actions_of(env.action_space)
            assert check(roll(env, actions), fns, AutoresetMode.SAME_STEP, actions) >= N


@pytest.mark.long
def test_envpool() -> None:
    pytest.importorskip("envpool", reason="needs EnvPool: pip install 'vecenv[envpool]'")
    for mode in AutoresetMode:
        envs = vecenv.backends.EnvPoolVectorEnv("CartPole-v1", N, autoreset_mode=mode)
        with vj.bridge(envs, info_spec={"elapsed_step": np.int32}) as env:
            state = env.reset(new_key(7))
            for _ in range(40):
                before, state = state, env.step(state, jnp.zeros(N, jnp.int32))
                assert (np.asarray(state.valid) == ~np.asarray(before.done)).all() or mode is AutoresetMode.SAME_STEP
            assert (state.last_length > 5).all()
            assert (state.last_length == state.last_return).all()
            assert bool(state.done.all()) or mode is not AutoresetMode.DISABLED
            if mode is AutoresetMode.DISABLED:
                state = env.reset_mask(state, jnp.array([True, False, True]), new_key(7))
                assert state.done.tolist() == [False, True, False]
                state = env.step(state, jnp.zeros(N, jnp.int32))
                assert state.valid.tolist() == [True, False, True]


def test_a_key_may_be_a_constant_of_the_program(transport: str) -> None:
    fns = tracks(N)
    sync = SyncVectorEnv(fns)
    expected_observations, _ = sync.reset(seed=seeds_of(new_key(7)))
    env = vj.bridge(SyncVectorEnv(fns), transport=transport)

    @jax.jit
    def program(scale: Any) -> Any:
        return jax.tree.map(lambda leaf: leaf * scale, env.reset(new_key(7)).obs)

    for leaf, wanted in zip(leaves(vj.run(program, 1)), leaves(expected_observations), strict=True):
        np.testing.assert_array_equal(leaf, wanted)
    env.close()
    sync.close()
