"""Host calls of compiled programs run once and in order, although JAX may drop, merge, hoist, repeat or reorder calls."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from bridge_envs import CallLogVectorEnv
from jax.random import key as new_key

import vecenv.jax as vj
from vecenv.errors import StaleStateError
from vecenv.jax.bridging import host_call

ACTION = np.zeros((2, 1), np.float32)


@pytest.fixture
def env() -> Iterator[vj.Bridge]:
    with vj.bridge(CallLogVectorEnv()) as env:
        yield env


def get_calls(env: vj.Bridge) -> str:
    """Return the calls of the vector environment after all host calls have finished."""
    jax.effects_barrier()
    return str(env.envs.calls)


def test_package_uses_no_private_names_of_jax() -> None:
    package = Path(vj.__file__).parent.parent
    files = [
        file.name
        for file in package.rglob("*.py")
        if re.search(r"jax\._src|DO_NOT_USE|\b(jax|jnp|dtype)\._[a-z]", file.read_text())
    ]
    assert not files


@pytest.mark.long
def test_host_calls_without_compilation_run_once_and_in_order(env: vj.Bridge) -> None:
    def program(key: Any) -> Any:
        return scan_steps(env, env.reset(key), 3)

    compiled = vj.run(jax.jit(program), new_key(0))
    calls = get_calls(env)
    env.envs.log.clear()
    with jax.disable_jit():
        uncompiled = vj.run(program, new_key(0))
    assert get_calls(env) == calls
    leaves, compiled_leaves = (jax.tree.leaves(state.replace(token=None)) for state in (uncompiled, compiled))
    for leaf, compiled_leaf in zip(leaves, compiled_leaves, strict=True):
        np.testing.assert_array_equal(leaf, compiled_leaf)


@pytest.mark.long
def test_step_of_a_used_state_without_compilation_raises() -> None:
    with jax.disable_jit(), vj.bridge(CallLogVectorEnv()) as env:
        state = env.reset(new_key(0))
        env.step(state, ACTION)
        with pytest.raises(StaleStateError):
            env.step(state, ACTION)


def discard_step(env: vj.Bridge, state: Any) -> Any:
    env.step(state, ACTION)
    return 0


def scan_steps(env: vj.Bridge, state: Any, length: int = 5) -> Any:
    return jax.lax.scan(lambda state, _: (env.step(state, ACTION), None), state, None, length=length)[0]


def step_twice(env: vj.Bridge, state: Any) -> Any:
    inner = jax.jit(env.step)
    first = inner(state, ACTION)
    return first.reward, inner(first, ACTION).reward


def step_and_reset(env: vj.Bridge, state: Any) -> Any:
    state = env.step(env.step(state, ACTION), ACTION + 1)
    return state.obs, env.reset(jax.random.key(1)).obs


def send_and_recv(env: vj.Bridge, state: Any) -> Any:
    def body(state: Any, _: Any) -> Any:
        pending = env.send(state, ACTION)
        return env.recv(pending), pending.reward

    return jax.lax.scan(body, state, None, length=3)[1]


def step_if(env: vj.Bridge, state: Any, condition: bool) -> Any:
    return jax.lax.cond(condition, lambda s: env.step(s, ACTION), lambda s: s, state).steps


def step_in_while_loop(env: vj.Bridge, state: Any) -> Any:
    return jax.lax.while_loop(lambda s: s.steps[0] < 5, lambda s: env.step(s, ACTION), state).steps


def differentiate_returns(env: vj.Bridge, state: Any) -> Any:
    """Return the weighted sum of all rewards, and its gradient with respect to the weight.

    The weight is 2, and the rewards are 2, 3, 4 and 5 in both rows.
    """

    def total(weight: Any) -> Any:
        action = jax.lax.stop_gradient(jnp.full((2, 1), weight))

        def body(carry: Any, _: Any) -> Any:
            total, state = carry
            state = env.step(state, action)
            return (total + weight * state.reward.sum(), state), None

        return jax.lax.scan(body, (0.0, state), None, length=4)[0][0]

    return jax.value_and_grad(total)(2.0)


def differentiate_action(env: vj.Bridge, state: Any) -> Any:
    return jax.grad(lambda w: (w * env.step(state, jnp.full((2, 1), w)).reward).sum())(3.0)


def step_in_vmap(env: vj.Bridge, state: Any) -> Any:
    return jax.vmap(lambda weight: weight * env.step(state, ACTION).reward)(jnp.arange(3.0))[2]


PROGRAMS: dict[str, tuple[Any, str, Any]] = {
    # case -> the program, the calls after the reset, and the results
    "a step with unused results": (discard_step, "S", 0),
    "a step of which only the count is used": (lambda env, state: env.step(state, ACTION).steps, "S", [1, 1]),
    "a reset with unused observations": (lambda env, state: env.reset(new_key(0)).steps, "R", [0, 0]),
    "the same step twice": (step_twice, "SS", ([2, 2], [3, 3])),
    "a scan with a constant action": (lambda env, state: scan_steps(env, state).steps, "SSSSS", [5, 5]),
    "a scan of which only the token is used": (lambda env, state: scan_steps(env, state).token[1], "SSSSS", 5),
    "a while loop": (step_in_while_loop, "SSSSS", [5, 5]),
    "two steps and a reset": (step_and_reset, "SSR", ([[3], [3]], [[4], [4]])),
    "a differentiated rollout": (differentiate_returns, "SSSS", (56, 28)),
    "a differentiated action": (differentiate_action, "S", 4),
    "a branch that is not taken": (lambda env, state: step_if(env, state, False), "", [0, 0]),
    "a branch that is taken": (lambda env, state: step_if(env, state, True), "S", [1, 1]),
    "a vmap over a factor of the rewards": (step_in_vmap, "S", [4, 4]),
    "send and recv": (send_and_recv, "SSS", [[0, 0], [2, 2], [3, 3]]),
}


@pytest.mark.long
@pytest.mark.parametrize("name", PROGRAMS)
def test_host_calls_of_a_program_run_once_and_in_order(env: vj.Bridge, name: str) -> None:
    program, calls, expected = PROGRAMS[name]
    assert get_calls(env) == ""  # the constructor makes no host call
    state = env.reset(new_key(0))
    compiled = jax.jit(lambda state: program(env, state)).lower(state).compile()
    assert get_calls(env) == "R"  # tracing and compiling make no host call
    found = compiled(state)
    assert get_calls(env) == "R" + calls
    assert jax.tree.map(lambda leaf: np.asarray(leaf).tolist(), found) == expected


def test_gradient_of_a_checkpointed_step_raises(env: vj.Bridge) -> None:
    state = env.reset(new_key(0))
    step = jax.checkpoint(lambda weight, state: (weight * env.step(state, ACTION).reward).sum())
    with pytest.raises(NotImplementedError, match="Effects not supported"):
        jax.jit(jax.grad(step))(1.0, state)
    assert get_calls(env) == "R"


@pytest.mark.long
def test_vmap_without_lanes_raises_during_tracing(env: vj.Bridge) -> None:
    state = env.reset(new_key(0))
    stacked = jax.tree.map(lambda leaf: jnp.stack([leaf] * 3), state)
    with pytest.raises(ValueError, match="lanes=3"):
        jax.vmap(env.step)(stacked, jnp.zeros((3, 2, 1)))
    with pytest.raises(ValueError, match="lanes=3"):
        jax.jit(jax.vmap(env.reset))(jax.random.split(new_key(0), 3))
    assert get_calls(env) == "R"


@pytest.mark.long
@pytest.mark.parametrize("loop", ["cond", "while"])
def test_step_in_a_conditional_or_loop_under_vmap_raises(env: vj.Bridge, loop: str) -> None:
    state = env.reset(new_key(0))

    def step_if(condition: Any) -> Any:
        return jax.lax.cond(condition, lambda s: env.step(s, ACTION).reward, lambda s: s.reward, state)

    def step_while(condition: Any) -> Any:
        return jax.lax.while_loop(lambda c: c[0], lambda c: (~c[0], env.step(c[1], ACTION)), (condition, state))[1].reward

    with pytest.raises(Exception, match="not supported in vmap"):  # JAX raises no specific class
        jax.vmap({"cond": step_if, "while": step_while}[loop])(jnp.array([False, False]))
    assert get_calls(env) == "R"


def test_host_call_receives_large_arguments_completely() -> None:
    """Arguments of more than 32 KiB are split into pieces."""
    received: list[Any] = []

    def receive(*arrays: Any) -> list[Any]:
        received.extend(np.array(array) for array in arrays)
        return [np.zeros((), np.float32)]

    large, small = np.arange(40_000, dtype=np.float32).reshape(2, 20_000), np.arange(3)
    result: Any = jax.ShapeDtypeStruct((), np.float32)
    jax.block_until_ready(jax.jit(lambda *arrays: host_call(receive, [result], arrays))(large, small))
    np.testing.assert_array_equal(received[0], large)
    np.testing.assert_array_equal(received[1], small)


@pytest.mark.long
def test_states_do_not_share_memory_with_the_vector_env(env: vj.Bridge) -> None:
    """The vector environment returns the same array from every call."""
    first = env.reset(new_key(0))
    second = env.step(first, ACTION)
    env.envs.observations[:] = -1
    assert (first.obs[0, 0], second.obs[0, 0]) == (1.0, 2.0)


@pytest.mark.long
def test_sharded_program_makes_one_host_call_per_step() -> None:
    with vj.bridge(CallLogVectorEnv()) as env:
        devices = jax.devices()
        mesh = jax.sharding.Mesh(devices, ("rows",))
        action = jax.device_put(jnp.zeros((2, 1)), jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec()))
        state = jax.jit(env.step)(env.reset(new_key(0)), action)
        assert state.steps.tolist() == [1, 1]
        assert get_calls(env) == "RS"
