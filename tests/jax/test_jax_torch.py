"""``vecenv.torch``: gradients over several steps equal those of JAX, and tensors are writeable."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gymnasium.spaces import Box
from jax_envs import Switch

torch = pytest.importorskip("torch", reason="needs torch: pip install torch")

import vecenv.torch  # noqa: E402
from vecenv.backends.jax_native import JaxVectorEnv  # noqa: E402
from vecenv.jax import FunctionalVectorEnv, adapt  # noqa: E402
from vecenv.jax.env import Adapter  # noqa: E402


def get_jax_gradient(env: Any, actions: Any, compute_loss: Any) -> Any:
    """Return the loss of the last state, and its gradient with respect to the actions."""
    from vecenv.jax.interop import seed_keys

    def loss(actions: Any) -> Any:
        state = env.begin(jnp.asarray(seed_keys(range(env.num_envs))))
        for action in actions:
            state = env.step(state, action)
        return compute_loss(state)

    return jax.jit(jax.value_and_grad(loss))(jnp.asarray(actions))


def get_torch_gradient(env: Any, actions: Any, compute_loss: Any) -> Any:
    """Return the same as :func:`get_jax_gradient`, computed by PyTorch, and the last state."""
    tensor = torch.tensor(actions, requires_grad=True)
    differentiable = vecenv.torch.differentiable(env)
    state = differentiable.reset(seed=0)
    for t in range(len(actions)):
        state = differentiable.step(state, tensor[t])
    value = compute_loss(state)
    value.backward()
    return value.detach().numpy(), tensor.grad.numpy(), state


def sample_actions(env: Any, steps: int) -> Any:
    return np.random.default_rng(0).uniform(-0.5, 0.5, (steps, *env.action_space.shape)).astype(np.float32)


@pytest.mark.parametrize("mode", ["NextStep", "SameStep", "Disabled"])
def test_gradients_over_steps_and_resets_equal_those_of_jax(make_counters: Any, mode: str) -> None:
    env = make_counters(autoreset_mode=mode)
    actions = sample_actions(env, 12)
    expected = get_jax_gradient(env, actions, lambda s: jnp.mean(s.obs["position"] ** 2) + s.episode_return.sum())
    found = get_torch_gradient(env, actions, lambda s: (s.obs["position"] ** 2).mean() + s.episode_return.sum())
    np.testing.assert_allclose(found[0], expected[0], rtol=1e-6)
    np.testing.assert_allclose(found[1], expected[1], rtol=1e-5, atol=1e-7)
    assert np.abs(found[1]).max() > 0.1


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_gradients_of_ant_equal_those_of_jax_for_every_action() -> None:
    """Only the last action would have a gradient if the cotangents of nested parts of the state were lost."""
    pytest.importorskip("brax", reason="needs Brax")
    env = FunctionalVectorEnv(adapt("ant", backend="spring"), 3, "SameStep")
    actions = sample_actions(env, 3)
    expected = get_jax_gradient(env, actions, lambda s: s.reward.sum())
    found = get_torch_gradient(env, actions, lambda s: s.reward.sum())
    np.testing.assert_allclose(found[1], expected[1], rtol=1e-4, atol=1e-6)
    assert (np.abs(found[1]).max((1, 2)) > 1e-2).all()


def test_infos_are_differentiable_and_flags_are_not(make_counters: Any) -> None:
    env = make_counters()
    _, grad, state = get_torch_gradient(env, sample_actions(env, 2), lambda s: s.info["position"].sum())
    np.testing.assert_allclose(grad, 1.0)
    assert state.terminated.dtype == torch.bool
    assert state.steps.tolist() == [2] * 5
    assert state.obs["step"].tolist() == [2] * 5
    assert not state.detach().packed.requires_grad
    with pytest.raises(AttributeError, match="speed"):
        state.speed  # noqa: B018


def test_gradients_are_correct_after_overwritten_actions_and_a_second_backward(make_counters: Any) -> None:
    env = vecenv.torch.differentiable(make_counters())
    start = torch.full((5, 1), 0.3, requires_grad=True)
    action = start * 1.0
    state = env.step(env.reset(0), action)
    action.data.fill_(9.0)
    loss = (state.reward**2).sum()
    loss.backward(retain_graph=True)
    gradient = start.grad.clone()
    loss.backward()
    assert torch.equal(start.grad, 2 * gradient)
    assert torch.allclose(gradient, 2 * state.reward.detach()[:, None])


def test_bfloat16_actions_have_gradients(make_counters: Any) -> None:
    env = vecenv.torch.differentiable(make_counters())
    action = torch.full((5, 1), 0.5, dtype=torch.bfloat16, requires_grad=True)
    env.step(env.reset(0), action).reward.sum().backward()
    reference = torch.full((5, 1), 0.5, requires_grad=True)
    env.step(env.reset(0), reference).reward.sum().backward()
    assert torch.equal(action.grad.float(), reference.grad.bfloat16().float())


def test_wrap_and_unwrap_preserve_states(make_counters: Any) -> None:
    functional = make_counters()
    env = vecenv.torch.differentiable(JaxVectorEnv(functional))
    state = functional.reset(jax.random.key(0))
    unwrapped = env.unwrap(env.wrap(state))
    jax.tree.map(np.testing.assert_array_equal, state, unwrapped)
    a, b = env.step(env.wrap(state), torch.zeros(5, 1)), functional.step(state, np.zeros((5, 1), np.float32))
    np.testing.assert_allclose(a.obs["position"], b.obs["position"])


def test_deepcopy_of_differentiable_steps_the_same_environments(make_counters: Any) -> None:
    functional = make_counters()
    for env in (functional, JaxVectorEnv(functional)):
        differentiable = vecenv.torch.differentiable(env)
        duplicate = copy.deepcopy(differentiable)
        a, b = (each.step(each.reset(0), torch.zeros(5, 1)) for each in (differentiable, duplicate))
        assert torch.equal(a.packed, b.packed)


def test_differentiable_with_wrong_arguments_raises(make_counters: Any) -> None:
    with pytest.raises(ValueError, match="no derivative"):
        vecenv.torch.differentiable(Switch(), 2)
    with pytest.raises(ValueError, match="already has its options"):
        vecenv.torch.differentiable(make_counters(), 3)
    env = vecenv.torch.differentiable(make_counters())
    with pytest.raises(ValueError, match="shape"):
        env.step(env.reset(0), torch.zeros(4, 1))


@pytest.mark.parametrize("mode", ["NextStep", "SameStep", "Disabled"])
def test_torch_results_equal_numpy_results_and_are_writeable(make_counters: Any, mode: str) -> None:
    counters = make_counters(autoreset_mode=mode)
    host, device = JaxVectorEnv(counters), JaxVectorEnv(counters, to="torch")
    host.reset(seed=0)
    observations, _ = device.reset(seed=0)
    observations["position"].fill_(7.0)
    for number in range(10):
        actions = torch.full((5, 1), 0.6)
        expected = host.step(actions.numpy())
        found = device.step(actions if number % 2 else actions.numpy())  # both libraries' arrays are valid actions
        actions.fill_(-5.0)
        for one, other in zip(expected[:4], found[:4], strict=True):
            jax.tree.map(lambda x, y: np.testing.assert_array_equal(x, y.numpy()), one, other)
        for tensor in (found[0]["position"], found[1]):
            tensor.fill_(7.0)
    assert found[2].dtype == torch.bool
    chunk = device.step_chunk(torch.zeros(3, 5, 1))
    assert chunk[0]["position"].shape == (3, 5, 2)


@pytest.mark.long
def test_differentiable_by_name_has_options_and_copyable_states() -> None:
    pytest.importorskip("brax", reason="needs Brax")
    env = vecenv.torch.differentiable("inverted_pendulum", 2, backend="spring", max_episode_steps=5)
    assert env.functional.max_episode_steps == 5
    state = env.reset(seed=0)
    for duplicate in (copy.deepcopy(state), pickle.loads(pickle.dumps(state))):
        assert torch.equal(duplicate.packed, state.packed)
        assert torch.equal(duplicate.integers, state.integers)
        assert duplicate.done.tolist() == [False, False]
        assert torch.equal(duplicate.inner.key.view(torch.int32), state.inner.key.view(torch.int32))
    with pytest.raises(ValueError, match=r"expected a tensor of shape \[.*\], got"):
        env.state(state.packed, state.packed)


class Slow(Adapter):
    """An environment with slow steps; the reward is the sum of its 4,096 actions."""

    name = "slow"
    single_observation_space = Box(-9, 9, (1,), np.float32)
    single_action_space = Box(-1, 1, (4096,), np.float32)

    def init(self, key: Any) -> Any:
        return jnp.zeros((64, 64)), jnp.zeros(1)

    def step(self, state: Any, action: Any, key: Any) -> Any:
        after = jax.lax.fori_loop(0, 3000, lambda _, matrix: jnp.tanh(matrix @ matrix + 1e-3), state)
        return after, jnp.zeros(1), action.sum() + 0 * after.sum(), False, False, {}


@pytest.mark.parametrize("to", ["numpy", "jax", "torch"])
def test_writing_into_action_tensors_during_a_step_does_not_change_it(to: str) -> None:
    envs = JaxVectorEnv(Slow(), 8, to=to)
    envs.reset(seed=0)
    envs.step(torch.zeros(8, 4096))  # compiles
    actions = torch.zeros(8, 4096)
    envs.step_async(actions)
    actions[:] = 1
    assert np.asarray(envs.step_wait()[1]).tolist() == [0.0] * 8
    envs.close()
