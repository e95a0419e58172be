"""Rollouts and evaluations equal plain Python loops."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import bridge_envs
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from jax.random import key as new_key

from vecenv.jax import bridge, eval_rollout_episode, fast_eval_rollout_episode, reset_carry, rollout, stateless

MODES = ["NextStep", "SameStep", "Disabled"]
PARAMS = np.float32(0.5)


@pytest.fixture(params=["native", "bridge"])
def make(request: pytest.FixtureRequest, make_counters: Any) -> Iterator[Any]:
    """Yield a function that builds five environments, JAX-native or bridged."""
    bridges = []

    def build(mode: str, discount: float = 1.0) -> Any:
        if request.param == "native":
            return make_counters(autoreset_mode=mode, discount=discount)
        envs = SyncVectorEnv(bridge_envs.make_fns(5), autoreset_mode=AutoresetMode(mode))
        bridges.append(bridge(envs, {"left": np.int32}, discount))
        return bridges[-1]

    yield build
    for env in bridges:
        env.close()


def policy(params: Any, carry: Any, obs: Any, first: Any, key: Any) -> Any:
    """Return the carry, which counts the steps of the episode, and random actions."""
    carry = reset_carry(first, carry, jnp.zeros((), jnp.int32)) + 1
    if isinstance(obs, dict):
        return carry, params + 0.3 * jax.random.normal(key, (5, 1)), {"obs": obs["step"], "memory": carry}
    return carry, jax.random.randint(key, (5,), -2, 3), {"obs": obs[:, 0], "memory": carry}


INITIAL_CARRY = np.full(5, 99, np.int32)


def make_arguments(env: Any) -> tuple[Any, ...]:
    """Return the arguments that follow ``env`` in calls of rollouts and evaluations."""
    return policy, PARAMS, env.reset(new_key(0)), INITIAL_CARRY, new_key(1)


def run_loop(env: Any, steps: int) -> list[tuple[Any, Any, Any]]:
    """Return ``(state, action, next state)`` for each step of a Python loop with the same keys."""
    state, carry, transitions = env.reset(new_key(0)), INITIAL_CARRY, []
    for t in range(steps):
        carry, action, _ = policy(PARAMS, carry, state.obs, state.first, jax.random.fold_in(new_key(1), t))
        after = env.step(state, action)
        transitions.append((state, action, after))
        state = after
    return transitions


def find_first_episodes(steps: list[tuple[Any, Any, Any]]) -> list[tuple[float, int, bool]]:
    """Return, for each row, the return and the length of its first episode, and whether it ended."""
    rows = []
    for row in range(5):
        rewards, finished = [], False
        for _, _, after in steps:
            if not finished and after.valid[row]:
                rewards.append(float(after.reward[row]))
                finished = bool(after.done[row])
        rows.append((sum(rewards), len(rewards), finished))
    return rows


def assert_close(one: Any, other: Any, rtol: float = 1e-5) -> None:
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=rtol), one, other)


@pytest.mark.long
@pytest.mark.parametrize("mode", MODES)
def test_rollout_equals_a_plain_loop_and_resets_the_carry(make: Any, mode: str) -> None:
    env = make(mode)
    info = "odd" if hasattr(env, "single_env") else "left"
    program = jax.jit(lambda *args: rollout(env, policy, *args, 20, ("steps", "done", info)))
    trajectory, state, _ = program(*make_arguments(env)[1:])
    memory = np.zeros(5, int)
    for t, (before, action, after) in enumerate(run_loop(env, 20)):
        found = jax.tree.map(lambda leaf, t=t: leaf[t], trajectory)
        memory = np.where(before.first, 1, memory + 1)
        assert_close((found.action, found.obs, found.next_obs), (action, before.obs, after.next_obs))
        assert_close((found.first, found.reward, found.done), (before.first, after.reward, after.done))
        assert_close((found.terminated, found.truncated, found.valid), (after.terminated, after.truncated, after.valid))
        assert_close(found.env_extras, {"steps": after.steps, "done": after.done, info: after.info[info]})
        np.testing.assert_array_equal(found.policy_extras["memory"], memory)
        if mode != "SameStep":
            running = after.valid & ~after.done
            np.testing.assert_array_equal(memory[running], after.steps[running])
    np.testing.assert_array_equal(state.steps, after.steps)
    assert trajectory.terminated.any()
    assert trajectory.truncated.any()


@pytest.mark.long
@pytest.mark.parametrize("mode", MODES)
def test_evaluations_equal_a_plain_loop_without_extra_steps(make: Any, mode: str) -> None:
    env = make(mode, 0.5)
    expected = find_first_episodes(run_loop(env, 12))
    whole = jax.jit(lambda *args: eval_rollout_episode(env, policy, *args, 12))
    keep_two_fields = jax.jit(lambda *args: eval_rollout_episode(env.step, policy, *args, 12, keep=("reward", "done"))[0])
    trajectory, metrics, state = whole(*make_arguments(env)[1:])
    partial = keep_two_fields(*make_arguments(env)[1:])
    fast, last = jax.jit(lambda *args: fast_eval_rollout_episode(env, policy, *args, 12))(*make_arguments(env)[1:])
    returns, lengths, finished = (np.array(column) for column in zip(*expected, strict=True))
    assert 1 < len(set(lengths)) <= max(lengths) < 12
    assert int(metrics.env_steps) == int(fast.env_steps) == max(lengths)
    if state.token is not None:
        assert state.token[1] == last.token[1] == max(lengths)  # the number of calls since the reset
    for found in (metrics, fast):
        assert_close((found.episode_return, found.episode_length, found.finished), (returns, lengths, finished))
        assert (found.terminated | found.truncated).tolist() == found.finished.tolist()
    assert_close(metrics, fast)
    after_end = np.arange(12)[:, None] >= lengths
    weights = 0.5 ** np.arange(12)[:, None]
    np.testing.assert_array_equal(trajectory.valid, ~after_end)
    np.testing.assert_allclose(trajectory.reward.sum(0), returns, rtol=1e-5)
    np.testing.assert_allclose((weights * trajectory.reward).sum(0), metrics.discounted_return, rtol=1e-5)
    np.testing.assert_array_equal(trajectory.done, np.arange(12)[:, None] >= lengths - 1)  # done stays true afterwards
    assert (partial.obs, partial.action, partial.next_obs, partial.valid) == (None,) * 4
    assert_close((partial.reward, partial.done), (trajectory.reward, trajectory.done))


@pytest.mark.long
@pytest.mark.parametrize("mode", MODES)
def test_fast_eval_distributes_episodes_evenly_among_rows(make: Any, mode: str) -> None:
    """Without autoreset, the evaluation resets the rows that have episodes left."""
    env = make(mode)
    program = jax.jit(lambda *args: fast_eval_rollout_episode(env, policy, *args, 12, 13))
    (metrics, _), (again, _) = program(*make_arguments(env)[1:]), program(*make_arguments(env)[1:])
    assert metrics.finished.tolist() == [True] * 13
    assert_close(metrics, again)
    assert len(np.unique(metrics.episode_return)) == 13
    ended: list[list[tuple[float, int]]] = [[] for _ in range(5)]
    for _, _, after in run_loop(env, int(metrics.env_steps)):
        for row in np.flatnonzero(after.done & after.valid).tolist():
            ended[row].append((float(after.last_return[row]), int(after.last_length[row])))
    for index in range(13 if mode != "Disabled" else 5):  # without autoreset, the loop runs one episode per row
        total, length = ended[index % 5][index // 5]
        assert int(metrics.episode_length[index]) == length
        assert abs(float(metrics.episode_return[index]) - total) < 1e-4


@pytest.mark.parametrize("mode", MODES)
def test_fast_eval_finishes_episodes_that_take_max_steps(make_counters: Any, mode: str) -> None:
    """In next-step mode, the reset between two episodes of a row takes an additional step."""
    env = make_counters(autoreset_mode=mode)
    constant_policy = stateless(lambda params, obs, key: (jnp.zeros((5, 1)), {}))
    metrics, _ = fast_eval_rollout_episode(env, constant_policy, PARAMS, env.reset(new_key(0)), (), new_key(1), 7, 13)
    assert metrics.finished.all()
    assert metrics.episode_length.max() <= 7


@pytest.mark.long
def test_two_rollouts_equal_one_long_rollout(make_counters: Any) -> None:
    env = make_counters()
    constant_policy = stateless(lambda params, obs, key: (jnp.full((5, 1), params), {}))
    whole, _, _ = rollout(env, constant_policy, PARAMS, env.reset(new_key(0)), (), new_key(1), 20)
    first, state, carry = rollout(env, constant_policy, PARAMS, env.reset(new_key(0)), (), new_key(1), 12)
    second, _, _ = rollout(env, constant_policy, PARAMS, state, carry, new_key(1), 8)
    assert carry == ()
    jax.tree.map(lambda w, a, b: np.testing.assert_array_equal(w, np.concatenate([a, b])), whole, first, second)


@pytest.mark.long
def test_evaluation_with_too_few_steps_has_unfinished_episodes(make_counters: Any) -> None:
    env = make_counters(discount=0.5)
    whole = eval_rollout_episode(env, *make_arguments(env), 2)[1]
    fast = fast_eval_rollout_episode(env, *make_arguments(env), 2)[0]
    for metrics in (whole, fast):
        assert not metrics.finished.any()
        assert metrics.episode_length.tolist() == [2] * 5
        first, second = (np.asarray(step[2].reward) for step in run_loop(env, 2))
        np.testing.assert_allclose(metrics.discounted_return, first + 0.5 * second, rtol=1e-5)


@pytest.mark.long
def test_evaluations_under_vmap_equal_separate_evaluations(make_counters: Any) -> None:
    env = make_counters()
    _, _, *rest = make_arguments(env)

    def evaluate(params: Any) -> Any:
        whole = eval_rollout_episode(env, policy, params, *rest, 12)[1]
        return whole.episode_length, fast_eval_rollout_episode(env, policy, params, *rest, 12)[0].episode_length

    together = jax.vmap(evaluate)(jnp.array([0.2, 0.9], jnp.float32))
    for mapped, alone in zip(together, evaluate(jnp.float32(0.9)), strict=True):
        np.testing.assert_array_equal(mapped[1], alone)
