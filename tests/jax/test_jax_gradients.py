"""Gradients through steps, rollouts and resets equal finite differences."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.random import key as new_key
from jax_envs import Counter, Switch

from vecenv.jax import FunctionalVectorEnv, adapt, differentiability, require_gradient, rollout, stateless, truncated_bptt

linear_policy = stateless(lambda params, obs, key: (jnp.tanh(obs @ params["w"][:, None]), {}))
constant_policy = stateless(lambda params, obs, key: (jnp.broadcast_to(params, (5, 1)), {}))


def assert_gradient(function: Any, argument: Any, step: float, rtol: float) -> None:
    """Assert that reverse-mode, forward-mode and numeric derivatives along one direction are equal."""
    direction = jax.tree.map(lambda x: jnp.cos(jnp.arange(x.size, dtype=x.dtype)).reshape(x.shape), argument)
    function = jax.jit(function)
    leaves, directions = map(jax.tree.leaves, (jax.grad(function)(argument), direction))
    reverse = sum(jnp.vdot(leaf, along) for leaf, along in zip(leaves, directions, strict=True))
    forward = jax.jvp(function, (argument,), (direction,))[1]
    shifted = [jax.tree.map(lambda x, d, size=size: x + size * d, argument, direction) for size in (step, -step)]
    numeric = (function(shifted[0]) - function(shifted[1])) / (2 * step)
    np.testing.assert_allclose(reverse, forward, rtol=1e-3)
    np.testing.assert_allclose(reverse, numeric, rtol=rtol)
    assert abs(float(numeric)) > 1e-3


@pytest.mark.long
@pytest.mark.parametrize("mode", ["NextStep", "SameStep", "Disabled"])
@pytest.mark.parametrize("checkpoint", [False, True])
def test_gradients_of_rollouts_with_resets_equal_finite_differences(make_counters: Any, mode: str, checkpoint: bool) -> None:
    env = make_counters(autoreset_mode=mode)

    def loss(push: Any) -> Any:
        state = env.reset(new_key(0))
        trajectory, _, _ = rollout(env, constant_policy, push, state, (), new_key(1), 20, checkpoint=checkpoint)
        return jnp.mean(trajectory.next_obs["position"] ** 2)

    assert_gradient(loss, jnp.float32(0.55), 1e-3, 1e-2)


@pytest.mark.long
def test_gradients_do_not_pass_through_a_reset(make_counters: Any) -> None:
    env = make_counters(autoreset_mode="SameStep")

    def position(push: Any, steps: int) -> Any:
        state = env.reset(new_key(0))
        for t in range(steps):
            state = env.step(state, jnp.full((5, 1), push if t == 0 else 1.9))
        return state.obs["position"][0, 0], state.first[0]

    slope, was_reset = jax.grad(position, has_aux=True)(1.9, 1)
    assert (float(slope), bool(was_reset)) == (1.0, False)
    slope, was_reset = jax.grad(position, has_aux=True)(1.9, 2)
    assert (float(slope), bool(was_reset)) == (0.0, True)


class CliffEnv(Counter):
    """An environment with episodes that end beyond position 1. Without ``fence``, rewards and derivatives are nan there."""

    def __init__(self, fence: bool) -> None:
        self.fence = fence

    def step(self, state: Any, action: Any, key: Any) -> Any:
        distance = 1.0 - state["x"] - 1e-3 * action[0]
        distance = jnp.sqrt(jnp.where(distance > 0, distance, 1.0) if self.fence else distance)
        new_state = {"x": state["x"] + 0.2 + 0.3 * action[0], "t": state["t"] + 1}
        return new_state, self._obs(new_state), distance, new_state["x"] > 1, False, {"left": distance}


@pytest.mark.long
@pytest.mark.parametrize("mode", ["NextStep", "SameStep", "Disabled"])
@pytest.mark.parametrize("frame_skip", [1, 3])
def test_gradients_exclude_values_beyond_the_end_of_an_episode(mode: str, frame_skip: int) -> None:
    def get_slope(fence: bool) -> Any:
        env = FunctionalVectorEnv(CliffEnv(fence), 5, mode, frame_skip=frame_skip)

        def loss(push: Any) -> Any:
            state = env.reset(new_key(0))
            trajectory, _, _ = rollout(env, constant_policy, push, state, (), new_key(1), 12, extras=("left",))
            return jnp.mean((trajectory.reward + trajectory.env_extras["left"]) * trajectory.valid)

        return jax.jit(jax.grad(loss))(jnp.float32(0.1))

    expected = get_slope(True)
    assert abs(expected) > 0.1
    np.testing.assert_allclose(get_slope(False), expected, rtol=1e-5)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_gradients_of_inverted_pendulum_equal_finite_differences(pendulum: Any) -> None:
    env = FunctionalVectorEnv(pendulum, 4, "SameStep", max_episode_steps=20)

    def loss(params: Any) -> Any:
        trajectory, _, _ = rollout(env, linear_policy, params, env.reset(new_key(0)), (), new_key(1), 32)
        return jnp.mean(jnp.sum(trajectory.next_obs**2, -1))

    assert_gradient(loss, {"w": jnp.array([0.1, -0.2, 0.3, 0.05])}, 1e-3, 2e-2)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_gradients_of_ant_in_double_precision_equal_finite_differences() -> None:
    pytest.importorskip("brax", reason="needs Brax")
    before = jax.config.read("jax_enable_x64")
    jax.config.update("jax_enable_x64", True)
    try:
        env = FunctionalVectorEnv(adapt("ant", backend="spring"), 3, "SameStep")
        policy = stateless(lambda actions, obs, key: (actions, {}))

        def loss(action: Any) -> Any:
            trajectory, _, _ = rollout(env, policy, action, env.reset(new_key(0)), (), new_key(1), 3)
            return jnp.mean(trajectory.reward)

        assert_gradient(loss, 0.1 * jnp.ones((3, 8), jnp.float64), 1e-6, 1e-6)
    finally:
        jax.config.update("jax_enable_x64", before)


class _PlaygroundState(NamedTuple):
    obs: Any
    reward: Any
    done: Any
    info: dict[str, Any]
    metrics: dict[str, Any]


class ScanningEnv:
    """An environment with Playground's interface. Its step runs a scan that replaces the carry with the action."""

    mjx_model = None
    observation_size = action_size = 1

    @property
    def unwrapped(self) -> ScanningEnv:
        return self

    def reset(self, key: Any) -> _PlaygroundState:
        zero = jnp.zeros((), float)
        return _PlaygroundState(jnp.zeros(1, float), zero, zero, {}, {})

    def step(self, state: _PlaygroundState, action: Any) -> _PlaygroundState:
        obs, _ = jax.lax.scan(lambda carry, _: (action, None), state.obs, (), 2)
        return state._replace(obs=obs, reward=obs.sum())


@pytest.mark.sampled("True")
@pytest.mark.parametrize("x64", [False, True])
def test_observations_of_a_playground_environment_follow_jax_enable_x64(x64: bool) -> None:
    with jax.enable_x64(x64):
        env = FunctionalVectorEnv(adapt(ScanningEnv()), 3, "Disabled")
        assert differentiability(env) == "reverse"
        state = env.step(env.reset(new_key(0)), np.ones((3, 1), np.float32))
        assert state.obs.dtype == (np.float64 if x64 else np.float32)
        assert state.obs.sum() == 3


@pytest.mark.long
def test_truncated_bptt_returns_the_mean_gradient_of_its_pieces(make_counters: Any) -> None:
    env = make_counters(autoreset_mode="SameStep")
    state, push = env.reset(new_key(0)), jnp.float32(0.4)

    def loss(trajectory: Any) -> Any:
        return jnp.mean(trajectory.next_obs["position"])

    gradients = jax.jit(truncated_bptt(env, constant_policy, 4, loss), static_argnums=4)
    value, grads, last, _ = gradients(push, state, (), new_key(1), 5)
    values, slopes, current = [], [], state
    for piece in range(5):

        def piece_loss(push: Any, start: Any = current, piece: int = piece) -> Any:
            trajectory, end, _ = rollout(env, constant_policy, push, start, (), jax.random.fold_in(new_key(1), piece), 4)
            return loss(trajectory), end

        (piece_value, current), slope = jax.value_and_grad(piece_loss, has_aux=True)(push)
        values.append(piece_value)
        slopes.append(slope)
    np.testing.assert_allclose(value, np.mean(values), rtol=1e-5)
    np.testing.assert_allclose(grads, np.mean(slopes), rtol=1e-5)
    np.testing.assert_array_equal(last.steps, current.steps)
    with pytest.raises(ValueError, match="horizon"):
        truncated_bptt(env, constant_policy, 0, loss)


def test_probe_returns_the_kind_of_differentiability() -> None:
    class WhileLoopEnv(Counter):
        def step(self, state: Any, action: Any, key: Any) -> Any:
            state, obs, reward, *rest = super().step(state, action, key)
            reward = jax.lax.while_loop(lambda x: x < 5, lambda x: x + 1, reward)
            return (state, obs, reward, *rest)

    class SignEnv(Counter):
        def step(self, state: Any, action: Any, key: Any) -> Any:
            return super().step(state, jnp.sign(action) * (action > 0), key)

    class StopGradientEnv(Counter):
        def step(self, state: Any, action: Any, key: Any) -> Any:
            return super().step(state, jax.lax.stop_gradient(action), key)

    from vecenv.jax.env import probe

    assert [probe(env()) for env in (Counter, WhileLoopEnv, SignEnv, StopGradientEnv, Switch)] == [
        "reverse", "forward", "zero", "zero", "none",
    ]  # fmt: skip


def test_require_gradient_without_a_derivative_raises() -> None:
    env = FunctionalVectorEnv(Switch(), 2)
    assert differentiability(env) == "none"
    with pytest.raises(ValueError, match="Switch has no derivative"):
        require_gradient(env)
    with pytest.raises(ValueError, match="Switch has no derivative"):
        truncated_bptt(env, constant_policy, 4, lambda trajectory: trajectory.reward.sum())
