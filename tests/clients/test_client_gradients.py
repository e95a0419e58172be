"""Gradients through ``TensorDictEnv``: ten steps of physics against finite differences, and flat memory."""

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
from cart_env import Cart

import vecenv.torch


@pytest.fixture
def double() -> Iterator[None]:
    """Run JAX in 64 bits."""
    config: Any = jax.config
    before = config.read("jax_enable_x64")
    config.update("jax_enable_x64", True)
    yield
    config.update("jax_enable_x64", before)


def outcome(env: Any, actions: Any, mask: Any) -> Any:
    """Return rewards and observations of the last steps, with a reset of the rows under ``mask`` after the second step."""
    env.set_seed(0)
    state = env.reset()
    for t, action in enumerate(actions):
        stepped = env.step(state.clone().set("action", action))
        state = env.step_mdp(stepped)
        if t == 1:
            state = env.reset(state.set("_reset", mask))
    return state["observation"].sum() + stepped["next", "reward"].sum()


def build_three(name: str) -> Any:
    """Build three rows of an environment of Brax (``"reacher-spring"``) or Playground."""
    if "-" not in name:
        pytest.importorskip("mujoco_playground", reason="needs MuJoCo Playground: pip install playground")
        return vecenv.torch.TensorDictEnv(name, (3,), requires_grad=True)
    pytest.importorskip("brax", reason="needs Brax: pip install 'vecenv[brax]'")
    env, _, backend = name.partition("-")
    return vecenv.torch.TensorDictEnv(env, (3,), backend=backend, requires_grad=True)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.usefixtures("double")
@pytest.mark.parametrize("name", ["reacher-spring", "reacher-positional", "reacher-generalized", "ant-spring"])
def test_ten_steps_of_physics_against_finite_differences(name: str) -> None:
    compare(build_three(name), torch.float64, 1e-6, rel=1e-4, within=1e-6)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_ten_steps_of_playground_against_finite_differences() -> None:
    compare(build_three("CartpoleBalance"), torch.float32, 1e-2, rel=5e-2, within=5e-3)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.usefixtures("double")
def test_ten_steps_of_playground_in_64_bits() -> None:
    compare(build_three("CartpoleBalance"), torch.float64, 1e-6, rel=1e-4, within=1e-6)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.usefixtures("double")
def test_ten_steps_of_an_ant_in_random_directions() -> None:
    """Differences of 1e-3 disagree in places, because the outcome jumps in between, for example where a contact begins."""
    env = build_three("ant-spring")
    generator = torch.Generator().manual_seed(0)
    actions = (torch.rand(10, 3, 8, dtype=torch.float64, generator=generator) * 0.4 - 0.2).requires_grad_()
    for masked in (False, True):
        mask = torch.tensor([[masked], [False], [False]])
        found = torch.autograd.grad(outcome(env, actions, mask), actions)[0]
        for _ in range(3):
            direction = torch.randn(actions.shape, dtype=torch.float64, generator=generator)
            direction /= direction.norm()
            wanted = float((found * direction).sum())
            for step in (1e-5, 1e-6):
                with torch.no_grad():
                    up = outcome(env, actions + step * direction, mask)
                    down = outcome(env, actions - step * direction, mask)
                assert float((up - down) / (2 * step)) == pytest.approx(wanted, rel=1e-6, abs=1e-7)


def compare(env: Any, dtype: torch.dtype, step: float, rel: float, within: float) -> None:
    """Compare some entries of the gradient with central differences of ``step``, with and without a reset in the middle."""
    generator = torch.Generator().manual_seed(0)
    width = env.action_spec.shape[-1]
    actions = (torch.rand(10, 3, width, dtype=dtype, generator=generator) * 0.4 - 0.2).requires_grad_()
    for masked in (False, True):
        mask = torch.tensor([[masked], [False], [False]])
        value = outcome(env, actions, mask)
        found = torch.autograd.grad(value, actions)[0]
        assert value.dtype == dtype
        assert found.isfinite().all()
        assert bool(found[:2, 0].any()) is not masked  # a reset cuts off what came before it, in its row only
        assert found[:2, 1:].any()
        for t, row, axis in [(0, 1, 0), (1, 2, width - 1), (5, 0, 0), (9, 2, width - 1)]:
            moved = actions.detach().clone()
            moved[t, row, axis] += step
            up = outcome(env, moved, mask)
            moved[t, row, axis] -= 2 * step
            down = outcome(env, moved, mask)
            wanted = float((up - down) / (2 * step))
            assert float(found[t, row, axis]) == pytest.approx(wanted, rel=rel, abs=within), (masked, t, row)


@pytest.mark.long
def test_memory_is_flat_over_a_thousand_steps_with_a_backward_every_fifty() -> None:
    env = vecenv.torch.TensorDictEnv(Cart(), (16,))
    policy = torch.nn.Linear(2, 1)
    env.set_seed(0)
    state = env.reset()
    library: Any = jax
    alive: list[int] = []
    used: list[int] = []
    for t in range(1000):
        state.set("action", policy(state["observation"]).tanh())
        stepped, state = env.step_and_maybe_reset(state)
        if t % 50 == 49:
            loss = stepped["next", "reward"].sum()
            loss.backward()
            state = state.detach()
            del loss, stepped
            gc.collect()
            alive.append(len(library.live_arrays()))
            used.append(psutil.Process().memory_info().rss)
    assert policy.weight.grad is not None
    assert policy.weight.grad.abs().sum() > 0
    assert len(set(alive[1:])) == 1  # what the forward passes stored for the backward passes is free
    assert used[-1] - used[4] < 4 << 20
