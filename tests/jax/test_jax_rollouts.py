"""Rollouts and evaluations against plain Python loops."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.random import key as new_key

from vecenv.jax import (
    eval_rollout_episode,
    fast_eval_rollout_episode,
    reset_carry,
    rollout,
    stateless,
)

policy = stateless(
    lambda params, obs, key: (params + 0.3 * jax.random.normal(key, (obs["place"].shape[0], 1)), {"seen": obs["step"]})
)
PARAMS = np.float32(0.5)


def loop(env: Any, steps: int) -> list[tuple[Any, Any, Any]]:
    """``(state, action, state after)`` of a Python loop under the same keys."""
    state, out = env.reset(new_key(0)), []
    for t in range(steps):
        _, action, _ = policy(PARAMS, (), state.obs, state.first, jax.random.fold_in(new_key(1), t))
        after = env.step(state, action)
        out.append((state, action, after))
        state = after
    return out


def first_episodes(env: Any, steps: int) -> list[dict[str, Any]]:
    rows = []
    for row in range(env.num_envs):
        rewards, finished = [], False
        for _, _, after in loop(env, steps):
            if not finished and after.valid[row]:
                rewards.append(float(after.reward[row]))
                finished = bool(after.done[row])
        rows.append({"episode_return": sum(rewards), "episode_length": len(rewards), "finished": finished})
    return rows


@pytest.mark.long
@pytest.mark.parametrize("mode", ["NextStep", "SameStep", "Disabled"])
def test_a_rollout_is_a_loop(counters: Any, mode: str) -> None:
    env = counters(autoreset_mode=mode)
    trajectory, state, carry = rollout(env, policy, PARAMS, env.reset(new_key(0)), (), new_key(1), 20, ("steps", "odd"))
    assert carry == ()
    for t, (before, action, after) in enumerate(loop(env, 20)):
        np.testing.assert_allclose(trajectory.action[t], action, rtol=1e-5)
        np.testing.assert_allclose(trajectory.obs["place"][t], before.obs["place"], rtol=1e-5)
        np.testing.assert_allclose(trajectory.next_obs["place"][t], after.next_obs["place"], rtol=1e-5)
        np.testing.assert_array_equal(trajectory.first[t], before.first)
        np.testing.assert_array_equal(trajectory.policy_extras["seen"][t], before.obs["step"])
        np.testing.assert_array_equal(trajectory.env_extras["steps"][t], after.steps)
        np.testing.assert_array_equal(trajectory.env_extras["odd"][t], after.info["odd"])
        for name in ("terminated", "truncated", "valid"):
            np.testing.assert_array_equal(getattr(trajectory, name)[t], getattr(after, name))
    np.testing.assert_array_equal(state.steps, after.steps)


@pytest.mark.long
def test_two_rollouts_in_a_row_are_one_long_one(counters: Any) -> None:
    env = counters()
    still = stateless(lambda params, obs, key: (jnp.full((5, 1), params), {}))
    whole, _, _ = rollout(env, still, PARAMS, env.reset(new_key(0)), (), new_key(1), 20)
    first, state, carry = rollout(env, still, PARAMS, env.reset(new_key(0)), (), new_key(1), 12)
    second, _, _ = rollout(env, still, PARAMS, state, carry, new_key(1), 8)
    jax.tree.map(lambda w, a, b: np.testing.assert_array_equal(w, np.concatenate([a, b])), whole, first, second)


@pytest.mark.long
@pytest.mark.parametrize("mode", ["NextStep", "SameStep"])
def test_a_recurrent_policy_forgets_where_an_episode_begins(counters: Any, mode: str) -> None:
    env = counters(autoreset_mode=mode)

    def counting(params: Any, carry: Any, obs: Any, first: Any, key: Any) -> Any:
        carry = reset_carry(first, carry, jnp.zeros((), jnp.int32)) + 1
        return carry, jnp.full((5, 1), params), {"memory": carry}

    trajectory, _, _ = rollout(env, counting, PARAMS, env.reset(new_key(0)), jnp.full(5, 99), new_key(1), 30)
    acting = ~(trajectory.terminated | trajectory.truncated)
    memory, step = trajectory.policy_extras["memory"], trajectory.obs["step"]
    begun = np.asarray(trajectory.first) | (np.asarray(step) > 0)
    np.testing.assert_array_equal(np.asarray(memory)[begun], np.asarray(step)[begun] + 1)
    assert acting.any()


def test_unknown_extras_are_refused(counters: Any) -> None:
    env = counters()
    with pytest.raises(ValueError, match=r"'speed'.*'steps'.*'odd'"):
        rollout(env, policy, PARAMS, env.reset(new_key(0)), (), new_key(1), 2, ("speed",))


@pytest.mark.long
@pytest.mark.parametrize("mode", ["NextStep", "SameStep", "Disabled"])
def test_all_evaluations_agree_with_a_plain_loop(counters: Any, mode: str) -> None:
    env = counters(autoreset_mode=mode)
    wanted = first_episodes(env, 12)
    state = env.reset(new_key(0))
    trajectory, metrics, _ = eval_rollout_episode(env, policy, PARAMS, state, (), new_key(1), 12)
    masked, plain, _ = eval_rollout_episode(env, policy, PARAMS, state, (), new_key(1), 12, early_stop=False)
    fast, _ = fast_eval_rollout_episode(env, policy, PARAMS, state, (), new_key(1), 12)
    longest = max(row["episode_length"] for row in wanted)
    assert int(metrics.env_steps) == int(fast.env_steps) == longest < 12
    for found in (metrics, plain, fast):
        np.testing.assert_allclose(found.episode_return, [row["episode_return"] for row in wanted], rtol=1e-5)
        assert found.episode_length.tolist() == [row["episode_length"] for row in wanted]
        assert found.finished.tolist() == [row["finished"] for row in wanted]
        assert (found.terminated | found.truncated).tolist() == found.finished.tolist()
    np.testing.assert_array_equal(trajectory.valid, masked.valid)
    np.testing.assert_array_equal(trajectory.valid.sum(0), metrics.episode_length)
    np.testing.assert_allclose(trajectory.reward.sum(0), metrics.episode_return, rtol=1e-5)


@pytest.mark.long
@pytest.mark.parametrize("mode", ["NextStep", "SameStep", "Disabled"])
def test_how_an_episode_ended_is_told_until_the_end_whether_or_not_the_evaluation_stops_early(
    counters: Any, mode: str
) -> None:
    env = counters(autoreset_mode=mode)
    args = (policy, PARAMS, env.reset(new_key(0)), (), new_key(1), 12)
    trajectories = [eval_rollout_episode(env, *args, early_stop=early)[0] for early in (True, False)]
    kept = ("reward", "done")
    trajectories += [eval_rollout_episode(env, *args, early_stop=early, keep=kept)[0] for early in (True, False)]
    trajectories += [jax.jit(lambda: eval_rollout_episode(env, *args)[0])()]
    lengths = np.array([row["episode_length"] for row in first_episodes(env, 12)])
    assert 1 < len(set(lengths)) <= max(lengths) < 12
    for trajectory in trajectories:
        np.testing.assert_array_equal(trajectory.done, np.arange(12)[:, None] >= lengths - 1)
        assert not (trajectory.reward * (np.arange(12)[:, None] >= lengths)).any()
        for name in ("terminated", "truncated"):
            np.testing.assert_array_equal(getattr(trajectory, name), getattr(trajectories[0], name))
    if mode == "Disabled":  # rows that ended stay as they are, so a rollout says the same
        np.testing.assert_array_equal(trajectories[0].done, rollout(env, *args)[0].done)


@pytest.mark.long
def test_an_evaluation_that_is_too_short_says_so(counters: Any) -> None:
    env = counters(discount=0.5)
    for metrics in (
        eval_rollout_episode(env, policy, PARAMS, env.reset(new_key(0)), (), new_key(1), 2)[1],
        fast_eval_rollout_episode(env, policy, PARAMS, env.reset(new_key(0)), (), new_key(1), 2)[0],
    ):
        assert not metrics.finished.any()
        assert metrics.episode_length.tolist() == [2] * 5
        first, second = (np.asarray(step[2].reward) for step in loop(env, 2))
        np.testing.assert_allclose(metrics.discounted_return, first + 0.5 * second, rtol=1e-5)


@pytest.mark.long
@pytest.mark.parametrize("mode", ["NextStep", "SameStep"])
def test_many_episodes_are_shared_out_evenly(counters: Any, mode: str) -> None:
    env = counters(autoreset_mode=mode)
    metrics, _ = fast_eval_rollout_episode(env, policy, PARAMS, env.reset(new_key(0)), (), new_key(1), 12, 13)
    assert metrics.finished.shape == (13,)
    assert metrics.finished.all()
    ended: list[list[tuple[float, int]]] = [[] for _ in range(5)]
    for _, _, after in loop(env, int(metrics.env_steps)):
        for row in range(5):
            if after.done[row] and after.valid[row]:
                ended[row].append((float(after.last_return[row]), int(after.last_length[row])))
    for index in range(13):
        total, length = ended[index % 5][index // 5]
        assert int(metrics.episode_length[index]) == length
        assert abs(float(metrics.episode_return[index]) - total) < 1e-4


@pytest.mark.long
def test_no_step_is_made_that_is_not_wanted(counters: Any) -> None:
    calls = []

    class Counted:
        discount = 1.0

        def step(self, state: Any, action: Any) -> Any:
            jax.debug.callback(lambda: calls.append(1), ordered=True)
            return counters().step(state, action)

    state = counters().reset(new_key(0))
    for run, expected in (
        (lambda: rollout(Counted(), policy, PARAMS, state, (), new_key(1), 6), 6),
        (lambda: eval_rollout_episode(Counted(), policy, PARAMS, state, (), new_key(1), 12), None),
        (lambda: fast_eval_rollout_episode(Counted(), policy, PARAMS, state, (), new_key(1), 12), None),
    ):
        calls.clear()
        result = jax.block_until_ready(run())
        jax.effects_barrier()
        wanted = expected or max(row["episode_length"] for row in first_episodes(counters(), 12))
        assert len(calls) == wanted
        del result


@pytest.mark.long
def test_evaluations_may_be_mapped_over_parameters(counters: Any) -> None:
    env = counters()
    state = env.reset(new_key(0))

    def evaluate(params: Any) -> Any:
        return eval_rollout_episode(env, policy, params, state, (), new_key(1), 12, early_stop=False)[1]

    together = jax.vmap(evaluate)(jnp.array([0.2, 0.9], jnp.float32))
    alone = evaluate(jnp.float32(0.9))
    np.testing.assert_array_equal(together.episode_length[1], alone.episode_length)


@pytest.mark.long
def test_a_step_function_is_enough_and_done_is_both_flags(counters: Any) -> None:
    env = counters()
    state = env.reset(new_key(0))
    whole, _, _ = rollout(env, policy, PARAMS, state, (), new_key(1), 12, ("done", "steps"))
    bare, _, _ = rollout(env.step, policy, PARAMS, state, (), new_key(1), 12, ("done", "steps"))
    jax.tree.map(np.testing.assert_array_equal, whole, bare)
    np.testing.assert_array_equal(whole.done, whole.terminated | whole.truncated)
    np.testing.assert_array_equal(whole.done, whole.env_extras["done"])
    assert whole.done.any()


@pytest.mark.long
def test_an_evaluation_keeps_what_was_asked_for(counters: Any) -> None:
    env = counters()
    args = (policy, PARAMS, env.reset(new_key(0)), (), new_key(1), 12)
    whole, metrics, _ = eval_rollout_episode(env, *args)
    part, again, _ = eval_rollout_episode(env.step, *args, keep=("reward", "done"))
    assert (part.obs, part.action, part.next_obs, part.valid) == (None,) * 4
    np.testing.assert_array_equal(part.reward, whole.reward)
    np.testing.assert_array_equal(part.done, whole.done)
    jax.tree.map(np.testing.assert_array_equal, metrics, again)


@pytest.mark.long
def test_under_disabled_more_episodes_come_by_resets(counters: Any) -> None:
    env = counters(autoreset_mode="Disabled")
    metrics, _ = fast_eval_rollout_episode(env, policy, PARAMS, env.reset(new_key(0)), (), new_key(1), 12, 13)
    once, _ = fast_eval_rollout_episode(env, policy, PARAMS, env.reset(new_key(0)), (), new_key(1), 12)
    assert metrics.finished.shape == (13,)
    assert metrics.finished.all()
    np.testing.assert_array_equal(metrics.episode_return[:5], once.episode_return)
    assert len(np.unique(metrics.episode_return)) == 13
    assert metrics.env_steps > once.env_steps
