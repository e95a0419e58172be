"""``vecenv.torch.TensorDictEnv``: specs, rollouts that branch, gradients with reset masks, and copies."""

from __future__ import annotations

import copy
import pickle
from contextlib import nullcontext
from typing import Any

import pytest

pytest.importorskip("torchrl", reason="needs TorchRL: pip install 'vecenv[clients]'")
pytest.importorskip("jaxlib", reason="needs JAX: pip install 'vecenv[jax]'")

import cart_env
import jax
import torch
from tensordict import TensorDict
from torchrl.envs.utils import check_env_specs

import vecenv
import vecenv.torch
from vecenv.adapters import as_torchrl
from vecenv.testing import assert_identical


class AcceleratingEnv(cart_env.PositionEnv):
    """An environment where a push has more effect at larger positions. Episodes end above position 2 or after six steps."""

    max_episode_steps = 6

    def move(self, position: Any, push: Any) -> Any:
        return position * (1 + 0.1 * push) + push

    def is_over(self, position: Any) -> Any:
        return position > 2


class NoGradientEnv(AcceleratingEnv):
    """An environment without a gradient."""

    differentiable = "none"


def tensordict_after_step(env: Any, state: Any, action: Any) -> Any:
    """Return the TensorDict after a step, ready for the next step."""
    return env.step_mdp(env.step(state.clone().set("action", action)))


@pytest.mark.parametrize("batch", [(), (3,), (2, 2)])
def test_check_env_specs_passes_for_every_batch_shape(batch: Any) -> None:
    env = vecenv.torch.TensorDictEnv(AcceleratingEnv(), batch)
    check_env_specs(env)
    data = env.rollout(9, break_when_any_done=False)
    assert data.batch_size == (*batch, 9)
    assert data["next", "done"].any()
    assert data["state", "floats"].shape[:-1] == (*batch, 9)


def test_interrupted_reset_keeps_the_seed_for_the_next_one(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    env = vecenv.torch.TensorDictEnv(AcceleratingEnv(), (3,))
    env.set_seed(4)
    expected = env.reset()["observation"]
    env.set_seed(4)
    with monkeypatch.context() as patches:
        patches.setattr(env.functional, "begin", interrupt)
        with pytest.raises(KeyboardInterrupt):
            env.reset()
    assert_identical(env.reset()["observation"], expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_assert_identical_compares_dtypes_and_bits_of_tensors(dtype: Any) -> None:
    value = torch.tensor([1.0, torch.nan, -0.0], dtype=dtype, requires_grad=True)
    assert_identical(value, value.clone())
    for other in (value.to(torch.float64), torch.tensor([1.0, torch.nan, 0.0], dtype=dtype)):
        with pytest.raises(AssertionError):
            assert_identical(value, other)


def test_empty_batch_raises() -> None:
    with pytest.raises(ValueError, match=r"batch_size must have at least one environment, got \(3, 0\)"):
        vecenv.torch.TensorDictEnv(AcceleratingEnv(), [3, 0])


def test_rollouts_can_branch_because_the_state_is_in_the_tensordict() -> None:
    env = vecenv.torch.TensorDictEnv(AcceleratingEnv(), (3,))
    env.set_seed(0)
    start = env.reset()
    push, pull = torch.full((3, 1), 0.4), torch.full((3, 1), -0.4)
    pushed = tensordict_after_step(env, start, push)
    pulled = tensordict_after_step(env, pushed, pull)
    repeated = tensordict_after_step(env, tensordict_after_step(env, start, push), pull)
    for key in ("observation", ("state", "floats"), ("state", "integers")):
        assert torch.equal(pulled[key], repeated[key])
    assert not torch.equal(tensordict_after_step(env, pushed, push)["observation"], pulled["observation"])
    state = env.state_of(pulled)
    assert state.steps.tolist() == [2, 2, 2]
    assert state.done.tolist() == [False] * 3
    assert torch.equal(state.inner.env, pulled["observation"][:, 0])
    converted = env.tensordict_of(copy.deepcopy(state))
    assert torch.equal(converted["observation"], pulled["observation"])
    env.set_seed(0)
    assert torch.equal(env.reset()["observation"], start["observation"])
    assert not torch.equal(env.reset()["observation"], start["observation"])


def sum_of_last_observations(env: Any, actions: Any, mask: Any) -> Any:
    """Return the sum of the last observations. The rows of ``mask`` are reset after the second step."""
    env.set_seed(0)
    state = env.reset()
    for t, action in enumerate(actions):
        state = tensordict_after_step(env, state, action)
        if t == 1:
            state = env.reset(state.set("_reset", mask))
    return state["observation"].sum()


def test_seed_for_a_reset_of_some_rows_raises() -> None:
    env = vecenv.torch.TensorDictEnv(AcceleratingEnv(), [2])
    state = env.reset(seed=1)
    with pytest.raises(ValueError, match="seed= is for resets of all environments"):
        env.reset(state.set("_reset", torch.tensor([True, False])), seed=2)


def test_reset_mask_keeps_the_gradient_of_the_other_rows() -> None:
    env = vecenv.torch.TensorDictEnv(AcceleratingEnv(), (3,))
    actions = (0.1 * torch.arange(12.0).reshape(4, 3, 1).sin()).requires_grad_()
    mask = torch.tensor([[True], [False], [False]])
    value = sum_of_last_observations(env, actions, mask)
    gradient = torch.autograd.grad(value, actions)[0]
    assert not gradient[:2, 0].any()
    assert (gradient[2:, 0].abs() > 1e-3).all()
    assert (gradient[:, 1:].abs() > 1e-3).all()
    without_reset = sum_of_last_observations(env, actions, torch.zeros_like(mask))
    assert torch.allclose(torch.autograd.grad(without_reset, actions)[0][:, 1:], gradient[:, 1:])
    step = 1e-2
    for index in [(0, 1, 0), (1, 2, 0), (3, 0, 0)]:
        shifted = actions.detach().clone()
        shifted[index] += step
        up = sum_of_last_observations(env, shifted, mask)
        shifted[index] -= 2 * step
        down = sum_of_last_observations(env, shifted, mask)
        assert float((up - down) / (2 * step)) == pytest.approx(float(gradient[index]), rel=2e-2)


def test_finished_rows_keep_their_observation_and_step_mask_excludes_rows() -> None:
    env = vecenv.torch.TensorDictEnv(AcceleratingEnv(), (2,))
    env.set_seed(1)
    data = env.rollout(6, lambda *_: torch.zeros(2, 1))  # with random actions, some episodes would end earlier
    last = data[:, -1]["next"].exclude("reward")
    assert last["truncated"].all()
    unchanged = env.step(last.clone().set("action", torch.ones(2, 1)))["next"]
    assert torch.equal(unchanged["observation"], last["observation"])
    assert not unchanged["reward"].any()
    start = env.reset()
    masked = start.clone().set("action", torch.ones(2, 1)).set("_step", torch.tensor([True, False]))
    stepped = env.step(masked)["next"]
    assert torch.equal(stepped["observation"][1], start["observation"][1])
    assert stepped["reward"][:, 0].bool().tolist() == [True, False]


class KeyInStateEnv(AcceleratingEnv):
    """An environment with a random key in its state, which determines its movement."""

    def init(self, key: Any) -> Any:
        position, observation = super().init(key)
        return (position, jax.random.wrap_key_data(key)), observation

    def step(self, state: Any, action: Any, key: Any) -> Any:
        position, own_key = state
        own_key, step_key = jax.random.split(own_key)
        position, *rest = super().step(position, action + jax.random.uniform(step_key), key)
        return ((position, own_key), *rest)


@pytest.mark.parametrize("env_class", [AcceleratingEnv, KeyInStateEnv])
def test_copied_and_pickled_environments_continue_like_the_original(env_class: Any) -> None:
    env = vecenv.torch.TensorDictEnv(env_class(), (2,), max_episode_steps=4)
    env.set_seed(5)
    env.reset()
    copied = copy.deepcopy(env)
    copies = [copied, pickle.loads(pickle.dumps(env)), pickle.loads(pickle.dumps(copied))]
    start = env.reset()
    expected = tensordict_after_step(env, start, torch.zeros(2, 1))["observation"]
    for other in copies:
        assert torch.equal(other.reset()["observation"], start["observation"])
        assert torch.equal(tensordict_after_step(other, start, torch.zeros(2, 1))["observation"], expected)


class SignEnv(AcceleratingEnv):
    """An environment that uses only the sign of an action, like Brax's ``fast``."""

    differentiable = "zero"

    def move(self, position: Any, push: Any) -> Any:
        return 0.5 * position + (push > 0)


@pytest.mark.parametrize("requires_grad", [True, None])
def test_zero_gradient_warns_only_if_a_gradient_is_required(requires_grad: bool | None) -> None:
    expected: Any = pytest.warns(UserWarning, match="gradient of 0 for every action") if requires_grad else nullcontext()
    with expected:
        env = vecenv.torch.TensorDictEnv(SignEnv(), (2,), requires_grad=requires_grad)
    action = torch.ones(2, 1, requires_grad=True)
    reward = env.step(TensorDict({"action": action}, [2]))["next", "reward"]
    reward.sum().backward()
    assert (action.grad is None) == (requires_grad is None)
    assert action.grad is None or action.grad.count_nonzero() == 0
    with pytest.raises(ValueError, match="has a derivative of 0"):
        vecenv.torch.differentiable(SignEnv(), 2)


def test_names_and_arguments_of_torchrls_brax_env_are_accepted() -> None:
    pytest.importorskip("brax")
    env = vecenv.torch.TensorDictEnv("fast", (2,), from_pixels=False)
    assert "fast" in env.available_envs
    assert set(pytest.importorskip("torchrl.envs").BraxEnv.available_envs) <= set(vecenv.torch.TensorDictEnv.available_envs)
    with pytest.raises(NotImplementedError, match="from_pixels=True"):
        vecenv.torch.TensorDictEnv("fast", (2,), from_pixels=True)


def test_required_but_missing_gradient_and_wrong_options_are_refused() -> None:
    with pytest.raises(ValueError, match="no derivative"):
        vecenv.torch.TensorDictEnv(NoGradientEnv(), (2,), requires_grad=True)
    without_gradient = vecenv.torch.TensorDictEnv(NoGradientEnv(), (2,))
    disabled_gradient = vecenv.torch.TensorDictEnv(AcceleratingEnv(), (2,), requires_grad=False)
    for env in (without_gradient, disabled_gradient):
        action = torch.zeros(2, 1, requires_grad=True)
        value = env.step(TensorDict({"action": action}, [2]))["next", "observation"].sum()
        assert torch.autograd.grad(value, action, allow_unused=True, materialize_grads=True)[0].count_nonzero() == 0
    with pytest.raises(TypeError, match="not options of an existing environment"):
        vecenv.torch.TensorDictEnv(AcceleratingEnv(), backend="spring")
    with pytest.raises(ValueError, match="resets its rows itself"):
        vecenv.torch.TensorDictEnv(vecenv.jax.FunctionalVectorEnv(AcceleratingEnv(), 2), (2,))
    with pytest.raises(ValueError, match=r"already has its options.*'discount': 0.9"):
        vecenv.torch.TensorDictEnv(vecenv.jax.FunctionalVectorEnv(AcceleratingEnv(), 2, "Disabled"), (2,), discount=0.9)


@pytest.mark.long
@pytest.mark.parametrize(
    ("to", "mode"),
    [("numpy", "SameStep"), ("jax", "SameStep"), ("torch", "SameStep"), ("torch", "NextStep"), ("jax", "Disabled")],
)
def test_as_torchrl_accepts_environments_on_the_device(to: str, mode: str) -> None:
    env = as_torchrl(vecenv.backends.JaxVectorEnv(AcceleratingEnv(), 3, to=to, autoreset_mode=mode))
    check_env_specs(env)
    data = env.rollout(14, break_when_any_done=False)
    position, next_position = data["observation"][..., 0], data["next", "observation"][..., 0]
    push = data["action"][..., 0]
    assert data["next", "done"].sum() > 5
    assert torch.allclose(next_position, position * (1 + 0.1 * push) + push, atol=1e-5)
    env.close()
