"""Gradients of ten steps of ``TensorDictEnv`` equal finite differences, and backward passes do not leak memory."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import psutil
import pytest

pytest.importorskip("torchrl", reason="needs TorchRL: pip install 'vecenv[clients]'")
pytest.importorskip("jaxlib", reason="needs JAX: pip install 'vecenv[jax]'")

import jax
import torch
from cart_env import PositionEnv

import vecenv.torch


@pytest.fixture
def jax_64_bits() -> Iterator[None]:
    """Run JAX in 64 bits during the test."""
    config: Any = jax.config
    before = config.read("jax_enable_x64")
    config.update("jax_enable_x64", True)
    yield
    config.update("jax_enable_x64", before)


def sum_last_results(env: Any, actions: Any, mask: Any) -> Any:
    """Return the sum of the last observations and rewards. The rows of ``mask`` are reset after the second step."""
    env.set_seed(0)
    state = env.reset()
    for t, action in enumerate(actions):
        stepped = env.step(state.clone().set("action", action))
        state = env.step_mdp(stepped)
        if t == 1:
            state = env.reset(state.set("_reset", mask))
    return state["observation"].sum() + stepped["next", "reward"].sum()


def build_three_rows(name: str) -> Any:
    """Build three rows of an environment of Playground, or of one of Brax with its backend, such as ``"ant-spring"``."""
    if "-" not in name:
        pytest.importorskip("mujoco_playground", reason="needs MuJoCo Playground: pip install playground")
        return vecenv.torch.TensorDictEnv(name, (3,), requires_grad=True)
    pytest.importorskip("brax", reason="needs Brax: pip install 'vecenv[brax]'")
    env, _, backend = name.partition("-")
    return vecenv.torch.TensorDictEnv(env, (3,), backend=backend, requires_grad=True)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.usefixtures("jax_64_bits")
@pytest.mark.parametrize("name", ["reacher-spring", "reacher-positional", "reacher-generalized", "ant-spring"])
def test_gradient_of_ten_brax_steps_equals_finite_differences(name: str) -> None:
    assert_gradient_equals_differences(build_three_rows(name), torch.float64, 1e-6, rel=1e-4, abs_tol=1e-6)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_gradient_of_ten_playground_steps_equals_finite_differences() -> None:
    assert_gradient_equals_differences(build_three_rows("CartpoleBalance"), torch.float32, 1e-2, rel=5e-2, abs_tol=5e-3)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.usefixtures("jax_64_bits")
def test_gradient_of_ten_playground_steps_in_64_bits_equals_finite_differences() -> None:
    assert_gradient_equals_differences(build_three_rows("CartpoleBalance"), torch.float64, 1e-6, rel=1e-4, abs_tol=1e-6)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.usefixtures("jax_64_bits")
def test_gradient_of_ten_ant_steps_equals_differences_in_random_directions() -> None:
    """The steps are small, because over a step of 1e-3 the result can jump, for example where a contact begins."""
    env = build_three_rows("ant-spring")
    generator = torch.Generator().manual_seed(0)
    actions = (torch.rand(10, 3, 8, dtype=torch.float64, generator=generator) * 0.4 - 0.2).requires_grad_()
    for masked in (False, True):
        mask = torch.tensor([[masked], [False], [False]])
        gradient = torch.autograd.grad(sum_last_results(env, actions, mask), actions)[0]
        for _ in range(3):
            direction = torch.randn(actions.shape, dtype=torch.float64, generator=generator)
            direction /= direction.norm()
            expected = float((gradient * direction).sum())
            for step in (1e-5, 1e-6):
                with torch.no_grad():
                    up = sum_last_results(env, actions + step * direction, mask)
                    down = sum_last_results(env, actions - step * direction, mask)
                assert float((up - down) / (2 * step)) == pytest.approx(expected, rel=1e-6, abs=1e-7)


def assert_gradient_equals_differences(env: Any, dtype: torch.dtype, step: float, rel: float, abs_tol: float) -> None:
    """Compare some entries of the gradient with central differences, with and without a reset of row 0 after two steps."""
    generator = torch.Generator().manual_seed(0)
    width = env.action_spec.shape[-1]
    actions = (torch.rand(10, 3, width, dtype=dtype, generator=generator) * 0.4 - 0.2).requires_grad_()
    for masked in (False, True):
        mask = torch.tensor([[masked], [False], [False]])
        value = sum_last_results(env, actions, mask)
        gradient = torch.autograd.grad(value, actions)[0]
        assert value.dtype == dtype
        assert gradient.isfinite().all()
        assert bool(gradient[:2, 0].any()) is not masked  # no gradient flows through the reset of row 0
        assert gradient[:2, 1:].any()
        for t, row, axis in [(0, 1, 0), (1, 2, width - 1), (5, 0, 0), (9, 2, width - 1)]:
            shifted = actions.detach().clone()
            shifted[t, row, axis] += step
            up = sum_last_results(env, shifted, mask)
            shifted[t, row, axis] -= 2 * step
            down = sum_last_results(env, shifted, mask)
            expected = float((up - down) / (2 * step))
            assert float(gradient[t, row, axis]) == pytest.approx(expected, rel=rel, abs=abs_tol), (masked, t, row)


@pytest.mark.long
def test_thousand_steps_with_backward_passes_do_not_leak_memory() -> None:
    env = vecenv.torch.TensorDictEnv(PositionEnv(), (16,))
    policy = torch.nn.Linear(2, 1)
    env.set_seed(0)
    state = env.reset()
    untyped_jax: Any = jax
    live_arrays: list[int] = []
    used_bytes: list[int] = []
    for t in range(1000):
        state.set("action", policy(state["observation"]).tanh())
        stepped, state = env.step_and_maybe_reset(state)
        if t % 50 == 49:
            loss = stepped["next", "reward"].sum()
            loss.backward()
            state = state.detach()
            del loss, stepped
            gc.collect()
            live_arrays.append(len(untyped_jax.live_arrays()))
            used_bytes.append(psutil.Process().memory_info().rss)
    assert policy.weight.grad is not None
    assert policy.weight.grad.abs().sum() > 0
    assert len(set(live_arrays[1:])) == 1  # the values stored for the backward passes are freed
    assert used_bytes[-1] - used_bytes[4] < 4 << 20  # less than 4 MiB
