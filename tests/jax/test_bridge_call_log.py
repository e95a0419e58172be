"""The host calls of compiled programs, with a test for each way in which JAX may drop, merge, hoist, repeat or reorder them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from bridge_envs import CallLog
from jax.random import key as new_key

import vecenv.jax as vj
from vecenv.errors import StaleStateError
from vecenv.jax.bridging import host_call

ACTION = np.zeros((2, 1), np.float32)


@pytest.fixture
def env() -> Iterator[vj.Bridge]:
    with vj.bridge(CallLog()) as env:
        yield env


def calls(env: vj.Bridge) -> str:
    jax.effects_barrier()
    return str(env.envs.calls)


def test_bridge_uses_no_private_part_of_jax() -> None:
    package = Path(vj.__file__).parent.parent
    named = [
        file.name
        for file in package.rglob("*.py")
        if re.search(r"jax\._src|DO_NOT_USE|\b(jax|jnp|dtype)\._[a-z]", file.read_text())
    ]
    assert not named


@pytest.mark.long
def test_without_compilation_every_call_is_made_once_and_in_order(env: vj.Bridge) -> None:
    def program(key: Any) -> Any:
        return scanned(env, env.reset(key), 3)

    compiled = vj.run(jax.jit(program), new_key(0))
    made = calls(env)
    env.envs.log.clear()
    with jax.disable_jit():
        plain = vj.run(program, new_key(0))
    assert calls(env) == made
    for one, other in zip(
        jax.tree.leaves(plain.replace(token=None)), jax.tree.leaves(compiled.replace(token=None)), strict=True
    ):
        np.testing.assert_array_equal(one, other)


@pytest.mark.long
def test_a_used_state_is_refused_without_compilation_too() -> None:
    with jax.disable_jit(), vj.bridge(CallLog()) as env:
        state = env.reset(new_key(0))
        env.step(state, ACTION)
        with pytest.raises(StaleStateError):
            env.step(state, ACTION)


def scanned(env: vj.Bridge, state: Any, length: int = 5) -> Any:
    return jax.lax.scan(lambda state, _: (env.step(state, ACTION), None), state, None, length=length)[0]


def twice(env: vj.Bridge, state: Any) -> Any:
    inner = jax.jit(env.step)
    one = inner(state, ACTION)
    return one.reward, inner(one, ACTION).reward


def ordered(env: vj.Bridge, state: Any) -> Any:
    state = env.step(env.step(state, ACTION), ACTION + 1)
    return state.obs, env.reset(jax.random.key(1)).obs


def sent(env: vj.Bridge, state: Any) -> Any:
    def body(state: Any, _: Any) -> Any:
        pending = env.send(state, ACTION)
        return env.recv(pending), pending.reward

    return jax.lax.scan(body, state, None, length=3)[1]


def branch(env: vj.Bridge, state: Any, go: bool) -> Any:
    return jax.lax.cond(go, lambda s: env.step(s, ACTION), lambda s: s, state).steps


def looped(env: vj.Bridge, state: Any) -> Any:
    return jax.lax.while_loop(lambda s: s.steps[0] < 5, lambda s: env.step(s, ACTION), state).steps


def returns(env: vj.Bridge, state: Any) -> Any:
    """Return two rows of rewards 2, 3, 4, 5, and the gradient of their sum by a weight that is not part of the actions."""

    def total(weight: Any) -> Any:
        action = jax.lax.stop_gradient(jnp.full((2, 1), weight))

        def body(carry: Any, _: Any) -> Any:
            total, state = carry
            state = env.step(state, action)
            return (total + weight * state.reward.sum(), state), None

        return jax.lax.scan(body, (0.0, state), None, length=4)[0][0]

    return jax.value_and_grad(total)(2.0)


def constant(env: vj.Bridge, state: Any) -> Any:
    return jax.grad(lambda w: (w * env.step(state, jnp.full((2, 1), w)).reward).sum())(3.0)


def mapped(env: vj.Bridge, state: Any) -> Any:
    return jax.vmap(lambda weight: weight * env.step(state, ACTION).reward)(jnp.arange(3.0))[2]


PROGRAMS: dict[str, tuple[Any, str, Any]] = {
    # possible transformations by JAX: the program, the calls after the reset, the results
    "a step whose results are unused": (lambda env, state: (env.step(state, ACTION), 0)[1], "S", 0),
    "a step of which only the count is read": (lambda env, state: env.step(state, ACTION).steps, "S", [1, 1]),
    "a reset whose observations are unused": (lambda env, state: env.reset(new_key(0)).steps, "R", [0, 0]),
    "the same step twice": (twice, "SS", ([2, 2], [3, 3])),
    "a scan with a constant action": (lambda env, state: scanned(env, state).steps, "SSSSS", [5, 5]),
    "... of which only the token is read": (lambda env, state: scanned(env, state).token[1], "SSSSS", 5),
    "a while loop": (looped, "SSSSS", [5, 5]),
    "calls in the order of the program": (ordered, "SSR", ([[3], [3]], [[4], [4]])),
    "a differentiated rollout": (returns, "SSSS", (56, 28)),
    "an action with a gradient is a constant": (constant, "S", 4),
    "a branch that is not taken": (lambda env, state: branch(env, state, False), "", [0, 0]),
    "a branch that is taken": (lambda env, state: branch(env, state, True), "S", [1, 1]),
    "a map over something else": (mapped, "S", [4, 4]),
    "send and recv": (sent, "SSS", [[0, 0], [2, 2], [3, 3]]),
}


@pytest.mark.long
@pytest.mark.parametrize("name", PROGRAMS)
def test_every_call_of_a_program_is_made_once_and_in_order(env: vj.Bridge, name: str) -> None:
    program, made, wanted = PROGRAMS[name]
    assert calls(env) == ""  # construction calls nothing
    state = env.reset(new_key(0))
    compiled = jax.jit(lambda state: program(env, state)).lower(state).compile()
    assert calls(env) == "R"  # nor do tracing and compiling
    found = compiled(state)
    assert calls(env) == "R" + made
    assert jax.tree.map(lambda leaf: np.asarray(leaf).tolist(), found) == wanted


def test_a_rematerialised_step_is_refused(env: vj.Bridge) -> None:
    state = env.reset(new_key(0))
    step = jax.checkpoint(lambda weight, state: (weight * env.step(state, ACTION).reward).sum())
    with pytest.raises(NotImplementedError, match="Effects not supported"):
        jax.jit(jax.grad(step))(1.0, state)
    assert calls(env) == "R"


@pytest.mark.long
def test_vmap_without_lanes_is_refused_while_tracing(env: vj.Bridge) -> None:
    state = env.reset(new_key(0))
    many = jax.tree.map(lambda leaf: jnp.stack([leaf] * 3), state)
    with pytest.raises(ValueError, match="lanes=3"):
        jax.vmap(env.step)(many, jnp.zeros((3, 2, 1)))
    with pytest.raises(ValueError, match="lanes=3"):
        jax.jit(jax.vmap(env.reset))(jax.random.split(new_key(0), 3))
    assert calls(env) == "R"


@pytest.mark.long
@pytest.mark.parametrize("loop", ["cond", "while"])
def test_a_mapped_condition_around_a_step_is_refused(env: vj.Bridge, loop: str) -> None:
    state = env.reset(new_key(0))

    def cond(go: Any) -> Any:
        return jax.lax.cond(go, lambda s: env.step(s, ACTION).reward, lambda s: s.reward, state)

    def loops(go: Any) -> Any:
        return jax.lax.while_loop(lambda c: c[0], lambda c: (~c[0], env.step(c[1], ACTION)), (go, state))[1].reward

    with pytest.raises(Exception, match="not supported in vmap"):  # JAX has no class for it
        jax.vmap({"cond": cond, "while": loops}[loop])(jnp.array([False, False]))
    assert calls(env) == "R"


def test_large_arguments_are_complete() -> None:
    """Arguments beyond 32 KiB, which are split into pieces, are covered, too."""
    arrived: list[Any] = []

    def keep(*arrays: Any) -> list[Any]:
        arrived.extend(np.array(array) for array in arrays)
        return [np.zeros((), np.float32)]

    large, small = np.arange(40_000, dtype=np.float32).reshape(2, 20_000), np.arange(3)
    result: Any = jax.ShapeDtypeStruct((), np.float32)
    jax.block_until_ready(jax.jit(lambda *arrays: host_call(keep, [result], arrays))(large, small))
    np.testing.assert_array_equal(arrived[0], large)
    np.testing.assert_array_equal(arrived[1], small)


@pytest.mark.long
def test_results_of_environments_are_copied(env: vj.Bridge) -> None:
    """The vector env writes into the same array every time."""
    one = env.reset(new_key(0))
    two = env.step(one, ACTION)
    env.envs.observations[:] = -1
    assert (one.obs[0, 0], two.obs[0, 0]) == (1.0, 2.0)


@pytest.mark.long
def test_sharded_program_makes_every_step_once() -> None:
    with vj.bridge(CallLog()) as env:
        devices = jax.devices()
        mesh = jax.sharding.Mesh(devices, ("rows",))
        action = jax.device_put(jnp.zeros((2, 1)), jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec()))
        state = jax.jit(env.step)(env.reset(new_key(0)), action)
        assert state.steps.tolist() == [1, 1]
        assert calls(env) == "RS"
