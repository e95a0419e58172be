"""Gradients against finite differences, through steps, rollouts and fresh starts."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.random import key as new_key
from jax_envs import Counter, Switch

from vecenv.jax import FunctionalVectorEnv, adapt, differentiability, require_gradient, rollout, stateless, truncated_bptt

linear = stateless(lambda params, obs, key: (jnp.tanh(obs @ params["w"][:, None]), {}))
steady = stateless(lambda params, obs, key: (jnp.broadcast_to(params, (5, 1)), {}))


def check(function: Any, at: Any, step: float, rtol: float) -> None:
    """Assert that reverse, forward and central differences agree along one direction."""
    direction = jax.tree.map(lambda x: jnp.cos(jnp.arange(x.size, dtype=x.dtype)).reshape(x.shape), at)
    function = jax.jit(function)
    reverse = sum(jnp.vdot(g, d) for g, d in zip(*map(jax.tree.leaves, (jax.grad(function)(at), direction)), strict=True))
    forward = jax.jvp(function, (at,), (direction,))[1]
    shifted = [jax.tree.map(lambda x, d, s=s: x + s * d, at, direction) for s in (step, -step)]
    numeric = (function(shifted[0]) - function(shifted[1])) / (2 * step)
    np.testing.assert_allclose(reverse, forward, rtol=1e-3)
    np.testing.assert_allclose(reverse, numeric, rtol=rtol)
    assert abs(float(numeric)) > 1e-3


@pytest.mark.long
@pytest.mark.parametrize("mode", ["NextStep", "SameStep", "Disabled"])
@pytest.mark.parametrize("checkpoint", [False, True])
def test_gradients_through_fresh_starts(counters: Any, mode: str, checkpoint: bool) -> None:
    env = counters(autoreset_mode=mode)

    def loss(push: Any) -> Any:
        trajectory, _, _ = rollout(env, steady, push, env.reset(new_key(0)), (), new_key(1), 20, checkpoint=checkpoint)
        return jnp.mean(trajectory.next_obs["place"] ** 2)

    check(loss, jnp.float32(0.55), 1e-3, 1e-2)


@pytest.mark.long
def test_restart_cuts_the_gradient(counters: Any) -> None:
    env = counters(autoreset_mode="SameStep")

    def place(push: Any, steps: int) -> Any:
        state = env.reset(new_key(0))
        for t in range(steps):
            state = env.step(state, jnp.full((5, 1), push if t < 1 else 1.9))
        return state.obs["place"][0, 0], state.first[0]

    slope, ends = jax.grad(place, has_aux=True)(1.9, 1)
    assert (float(slope), bool(ends)) == (1.0, False)
    slope, ends = jax.grad(place, has_aux=True)(1.9, 2)
    assert (float(slope), bool(ends)) == (0.0, True)


class Cliff(Counter):
    """An environment that ends at 1; beyond, a step has no value and no derivative, unless there is a ``fence``."""

    def __init__(self, fence: bool) -> None:
        self.fence = fence

    def step(self, state: Any, action: Any, key: Any) -> Any:
        left = 1.0 - state["x"] - 1e-3 * action[0]
        left = jnp.sqrt(jnp.where(left > 0, left, 1.0) if self.fence else left)
        moved = {"x": state["x"] + 0.2 + 0.3 * action[0], "t": state["t"] + 1}
        return moved, self._obs(moved), left, moved["x"] > 1, False, {"left": left}


@pytest.mark.long
@pytest.mark.parametrize("mode", ["NextStep", "SameStep", "Disabled"])
def test_values_beyond_the_end_never_reach_a_gradient(mode: str) -> None:
    def slope(fence: bool) -> Any:
        env = FunctionalVectorEnv(Cliff(fence), 5, mode)

        def loss(push: Any) -> Any:
            trajectory, _, _ = rollout(env, steady, push, env.reset(new_key(0)), (), new_key(1), 12, extras=("left",))
            return jnp.mean((trajectory.reward + trajectory.env_extras["left"]) * trajectory.valid)

        return jax.jit(jax.grad(loss))(jnp.float32(0.1))

    wanted = slope(True)
    assert abs(wanted) > 0.1
    np.testing.assert_allclose(slope(False), wanted, rtol=1e-5)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_inverted_pendulum_against_finite_differences(pendulum: Any) -> None:
    env = FunctionalVectorEnv(pendulum, 4, "SameStep", max_episode_steps=20)

    def loss(params: Any) -> Any:
        trajectory, _, _ = rollout(env, linear, params, env.reset(new_key(0)), (), new_key(1), 32)
        return jnp.mean(jnp.sum(trajectory.next_obs**2, -1))

    check(loss, {"w": jnp.array([0.1, -0.2, 0.3, 0.05])}, 1e-3, 2e-2)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_ant_in_double_precision_against_finite_differences() -> None:
    pytest.importorskip("brax", reason="needs Brax")
    before = jax.config.read("jax_enable_x64")
    jax.config.update("jax_enable_x64", True)
    try:
        env = FunctionalVectorEnv(adapt("ant", backend="spring"), 3, "SameStep")
        policy = stateless(lambda actions, obs, key: (actions, {}))

        def loss(action: Any) -> Any:
            trajectory, _, _ = rollout(env, policy, action, env.reset(new_key(0)), (), new_key(1), 3)
            return jnp.mean(trajectory.reward)

        check(loss, 0.1 * jnp.ones((3, 8), jnp.float64), 1e-6, 1e-6)
    finally:
        jax.config.update("jax_enable_x64", before)


class _Shown(NamedTuple):
    obs: Any
    reward: Any
    done: Any
    info: dict[str, Any]
    metrics: dict[str, Any]


class Scanned:
    """An environment with a step that scans over a carry which the action replaces, like Playground's."""

    mjx_model = None
    observation_size = action_size = 1

    @property
    def unwrapped(self) -> Scanned:
        return self

    def reset(self, key: Any) -> _Shown:
        zero = jnp.zeros((), float)
        return _Shown(jnp.zeros(1, float), zero, zero, {}, {})

    def step(self, state: _Shown, action: Any) -> _Shown:
        obs, _ = jax.lax.scan(lambda before, _: (action, None), state.obs, (), 2)
        return state._replace(obs=obs, reward=obs.sum())


@pytest.mark.sampled("True")
@pytest.mark.parametrize("double", [False, True])
def test_playground_derivative_in_64_bits(double: bool) -> None:
    with jax.enable_x64(double):
        env = FunctionalVectorEnv(adapt(Scanned()), 3, "Disabled")
        assert differentiability(env) == "reverse"
        after = env.step(env.reset(new_key(0)), np.ones((3, 1), np.float32))
        assert after.obs.dtype == (np.float64 if double else np.float32)
        assert after.obs.sum() == 3


@pytest.mark.long
def test_truncated_gradients_are_the_mean_over_pieces(counters: Any) -> None:
    env = counters(autoreset_mode="SameStep")
    state, push = env.reset(new_key(0)), jnp.float32(0.4)

    def loss(trajectory: Any) -> Any:
        return jnp.mean(trajectory.next_obs["place"])

    gradients = jax.jit(truncated_bptt(env, steady, 4, loss), static_argnums=4)
    value, grads, after, _ = gradients(push, state, (), new_key(1), 5)
    values, slopes, here = [], [], state
    for piece in range(5):

        def piece_loss(push: Any, here: Any = here, piece: int = piece) -> Any:
            trajectory, end, _ = rollout(env, steady, push, here, (), jax.random.fold_in(new_key(1), piece), 4)
            return loss(trajectory), end

        (each, here), slope = jax.value_and_grad(piece_loss, has_aux=True)(push)
        values.append(each)
        slopes.append(slope)
    np.testing.assert_allclose(value, np.mean(values), rtol=1e-5)
    np.testing.assert_allclose(grads, np.mean(slopes), rtol=1e-5)
    np.testing.assert_array_equal(after.steps, here.steps)
    with pytest.raises(ValueError, match="horizon"):
        truncated_bptt(env, steady, 0, loss)


def test_probe_distinguishes_the_three_kinds() -> None:
    class Looping(Counter):
        def step(self, state: Any, action: Any, key: Any) -> Any:
            state, obs, reward, *rest = super().step(state, action, key)
            reward = jax.lax.while_loop(lambda x: x < 5, lambda x: x + 1, reward)
            return (state, obs, reward, *rest)

    class Blind(Counter):
        def step(self, state: Any, action: Any, key: Any) -> Any:
            return super().step(state, jnp.sign(action) * (action > 0), key)

    class Stopped(Counter):
        def step(self, state: Any, action: Any, key: Any) -> Any:
            return super().step(state, jax.lax.stop_gradient(action), key)

    from vecenv.jax.env import probe

    assert [probe(env()) for env in (Counter, Looping, Blind, Stopped, Switch)] == [
        "reverse", "forward", "zero", "zero", "none",
    ]  # fmt: skip


def test_missing_gradient_raises() -> None:
    env = FunctionalVectorEnv(Switch(), 2)
    assert differentiability(env) == "none"
    with pytest.raises(ValueError, match="Switch has no derivative"):
        require_gradient(env)
    with pytest.raises(ValueError, match="Switch has no derivative"):
        truncated_bptt(env, steady, 4, lambda trajectory: trajectory.reward.sum())
