"""What the host really executes, one test for each way in which JAX may drop, merge, hoist, repeat or reorder a callback."""

from __future__ import annotations

import importlib
import re
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from bridge_envs import Logged
from jax.random import key as new_key

import vecenv.jax as vj
from vecenv.errors import StaleStateError
from vecenv.jax.host_call import primitive_problem

ACTION = np.zeros((2, 1), np.float32)


@pytest.fixture(params=["primitive", "io_callback"])
def transport(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def env(transport: str) -> Iterator[vj.Bridge]:
    with vj.bridge(Logged(), transport=transport) as env:
        yield env


def calls(env: vj.Bridge) -> str:
    jax.effects_barrier()
    return str(env.envs.calls)


def test_the_fast_transport_passes_its_self_test() -> None:
    assert primitive_problem("cpu") is None
    with vj.bridge(Logged()) as env:
        assert env.transport == "primitive"


def test_the_fast_transport_is_left_alone_where_its_self_test_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vecenv.jax.host_call.primitive_problem", lambda platform: "a test says so")
    with vj.bridge(Logged()) as env:
        assert env.transport == "io_callback"
    with pytest.raises(RuntimeError, match="a test says so"):
        vj.bridge(Logged(), transport="primitive")


@pytest.fixture
def anew(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The parts of JAX that are not public are looked for again, and once more after the test."""
    from vecenv.jax import host_call

    def forget() -> None:
        sys.modules.pop("vecenv.jax.private", None)
        host_call._primitive.cache_clear()
        host_call.primitive_problem.cache_clear()

    forget()
    yield
    monkeypatch.undo()
    forget()


@pytest.mark.parametrize(
    ("module", "name", "instead"),
    [
        ("jax._src.callback", "_callback_op_sharding", None),
        ("jax._src.callback", "_callback_op_sharding", lambda axis_context: None),
        ("jax.interpreters.mlir", "emit_python_callback", None),
        ("jax.interpreters.mlir", "emit_python_callback", lambda ctx, callback: None),
        ("jax.interpreters.mlir", "TokenSet", None),
    ],
    ids=["gone", "changed", "emit gone", "emit changed", "tokens gone"],
)
def test_a_private_part_of_jax_that_is_gone_is_told_with_the_versions(
    anew: None, monkeypatch: pytest.MonkeyPatch, module: str, name: str, instead: Any
) -> None:
    from vecenv.jax import host_call

    place = importlib.import_module(module)
    if instead is None:
        monkeypatch.delattr(place, name)
    else:
        monkeypatch.setattr(place, name, instead)
    versions = rf"jax {re.escape(jax.__version__)} with jaxlib .* tested with jax [\d.]+"
    with pytest.raises(ImportError, match=versions):
        importlib.import_module("vecenv.jax.private")
    assert host_call.choose_transport("auto") == "io_callback"
    with pytest.raises(RuntimeError, match=versions):
        host_call.choose_transport("primitive")


def test_private_parts_of_jax_are_named_in_one_module() -> None:
    package = Path(vj.__file__).parent.parent
    named = [
        file.name
        for file in package.rglob("*.py")
        if re.search(r"jax\._src|DO_NOT_USE|\b(jax|jnp|dtype)\._[a-z]", file.read_text())
    ]
    assert named == ["private.py"]


@pytest.mark.long
def test_without_compilation_every_call_is_made_once_and_in_order(env: vj.Bridge) -> None:
    def program(key: Any) -> Any:
        return jax.lax.scan(lambda state, _: (env.step(state, ACTION), None), env.reset(key), None, length=3)[0]

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
def test_the_fast_transport_is_chosen_without_compilation_too() -> None:
    from vecenv.jax import host_call

    host_call.primitive_problem.cache_clear()
    with jax.disable_jit(), vj.bridge(Logged()) as env:
        assert env.transport == "primitive"
        state = env.reset(new_key(0))
        env.step(state, ACTION)
        with pytest.raises(StaleStateError):
            env.step(state, ACTION)


def test_construction_calls_nothing(env: vj.Bridge) -> None:
    assert calls(env) == ""


@pytest.mark.long
def test_tracing_and_compiling_call_nothing(env: vj.Bridge) -> None:
    state = env.reset(new_key(0))
    program = jax.jit(env.step)
    jax.eval_shape(env.step, state, ACTION)
    program.lower(state, ACTION).compile()
    assert calls(env) == "R"


@pytest.mark.long
def test_a_step_whose_results_are_unused_is_made(env: vj.Bridge) -> None:
    state = env.reset(new_key(0))

    @jax.jit
    def program(state: Any) -> Any:
        env.step(state, ACTION)
        return jnp.zeros(())

    program(state)
    assert calls(env) == "RS"


@pytest.mark.long
def test_a_step_of_which_only_the_count_is_read_is_made(env: vj.Bridge) -> None:
    steps = jax.jit(lambda state: env.step(state, ACTION).steps)(env.reset(new_key(0)))
    assert steps.tolist() == [1, 1]
    assert calls(env) == "RS"


def test_a_reset_whose_observations_are_unused_is_made(env: vj.Bridge) -> None:
    jax.jit(lambda key: env.reset(key).steps)(new_key(0))
    assert calls(env) == "R"


@pytest.mark.long
def test_the_same_step_twice_is_two_steps(env: vj.Bridge) -> None:
    inner = jax.jit(env.step)

    @jax.jit
    def program(state: Any) -> Any:
        one = inner(state, ACTION)
        two = inner(one, ACTION)
        return one.reward, two.reward

    one, two = program(env.reset(new_key(0)))
    assert (one[0], two[0]) == (2.0, 3.0)
    assert calls(env) == "RSS"


@pytest.mark.long
@pytest.mark.parametrize("read", ["everything", "token"])
def test_a_scan_with_a_constant_action_makes_every_step(env: vj.Bridge, read: str) -> None:
    @jax.jit
    def program(state: Any) -> Any:
        last = jax.lax.scan(lambda state, _: (env.step(state, ACTION), None), state, None, length=5)[0]
        return last if read == "everything" else last.token

    program(env.reset(new_key(0)))
    assert calls(env) == "RSSSSS"


@pytest.mark.long
def test_a_while_loop_makes_every_step(env: vj.Bridge) -> None:
    @jax.jit
    def program(state: Any) -> Any:
        return jax.lax.while_loop(lambda s: s.steps[0] < 5, lambda s: env.step(s, ACTION), state)

    assert program(env.reset(new_key(0))).steps.tolist() == [5, 5]
    assert calls(env) == "RSSSSS"


@pytest.mark.long
def test_calls_are_made_in_the_order_of_the_program(env: vj.Bridge) -> None:
    @jax.jit
    def program(one: Any, two: Any) -> Any:
        state = env.reset(one)
        state = env.step(env.step(state, ACTION), ACTION + 1)
        return state.obs, env.reset(two).obs

    obs, again = program(new_key(0), jax.random.key(1))
    assert calls(env) == "RSSR"
    assert (obs[0, 0], again[0, 0]) == (3.0, 4.0)


def _returns(env: vj.Bridge, weight: Any, state: Any) -> Any:
    action = jax.lax.stop_gradient(jnp.full((2, 1), weight))

    def body(carry: Any, _: Any) -> Any:
        total, state = carry
        state = env.step(state, action)
        return (total + weight * state.reward.sum(), state), None

    return jax.lax.scan(body, (0.0, state), None, length=4)[0][0]


@pytest.mark.long
def test_a_differentiated_rollout_makes_every_step_once(env: vj.Bridge) -> None:
    state = env.reset(new_key(0))
    value, gradient = jax.jit(jax.value_and_grad(lambda weight: _returns(env, weight, state)))(2.0)
    assert calls(env) == "RSSSS"
    assert (value, gradient) == (2.0 * 28.0, 28.0)  # two rows of rewards 2, 3, 4, 5


@pytest.mark.long
def test_an_action_with_a_gradient_is_taken_as_a_constant(env: vj.Bridge) -> None:
    state = env.reset(new_key(0))
    gradient = jax.grad(lambda w: (w * env.step(state, jnp.full((2, 1), w)).reward).sum())(3.0)
    assert calls(env) == "RS"
    assert gradient == 4.0


def test_a_rematerialised_step_is_refused(env: vj.Bridge) -> None:
    state = env.reset(new_key(0))
    step = jax.checkpoint(lambda weight, state: (weight * env.step(state, ACTION).reward).sum())
    with pytest.raises(NotImplementedError, match="Effects not supported"):
        jax.jit(jax.grad(step))(1.0, state)
    assert calls(env) == "R"


@pytest.mark.long
def test_a_branch_that_is_not_taken_makes_no_call(env: vj.Bridge) -> None:
    state = env.reset(new_key(0))
    program = jax.jit(lambda go, state: jax.lax.cond(go, lambda s: env.step(s, ACTION), lambda s: s, state))
    state = program(False, state)
    assert calls(env) == "R"
    program(True, state)
    assert calls(env) == "RS"


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
def test_vmap_over_something_else_is_one_call(env: vj.Bridge) -> None:
    state = env.reset(new_key(0))
    jax.vmap(lambda weight: weight * env.step(state, ACTION).reward)(jnp.arange(3.0))
    assert calls(env) == "RS"


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


@pytest.mark.long
def test_send_and_recv_are_one_step(env: vj.Bridge) -> None:
    @jax.jit
    def program(state: Any) -> Any:
        def body(state: Any, _: Any) -> Any:
            pending = env.send(state, ACTION)
            return env.recv(pending), pending.reward

        return jax.lax.scan(body, state, None, length=3)

    state, before = program(env.reset(new_key(0)))
    assert calls(env) == "RSSS"
    assert before[:, 0].tolist() == [0.0, 2.0, 3.0]
    assert state.reward.tolist() == [4.0, 4.0]


@pytest.mark.long
def test_what_environments_hand_out_is_copied(env: vj.Bridge) -> None:
    """The vector env writes into the same array every time."""
    one = env.reset(new_key(0))
    two = env.step(one, ACTION)
    env.envs.observations[:] = -1
    assert (one.obs[0, 0], two.obs[0, 0]) == (1.0, 2.0)


@pytest.mark.long
def test_a_sharded_program_makes_every_step_once(transport: str) -> None:
    with vj.bridge(Logged(), transport=transport) as env:
        devices = jax.devices()
        mesh = jax.sharding.Mesh(devices, ("rows",))
        action = jax.device_put(jnp.zeros((2, 1)), jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec()))
        state = jax.jit(env.step)(env.reset(new_key(0)), action)
        assert state.steps.tolist() == [1, 1]
        assert calls(env) == "RS"


@pytest.mark.slow
def test_a_host_call_costs_a_fraction_of_an_io_callback() -> None:
    """In a scan over small arrays, side by side; ``bench/bridge_cost.py`` has the microseconds."""
    from jax.experimental import io_callback

    from vecenv.jax.host_call import host_call

    array = np.zeros((8, 4), np.float32)
    result: Any = jax.ShapeDtypeStruct(array.shape, array.dtype)

    def program(call: Any) -> Any:
        return jax.jit(lambda x: jax.lax.scan(lambda x, _: (call(x), None), x, None, length=400)[0])

    mine = program(lambda x: host_call(lambda x: [array], [result], [x], "primitive")[0])
    jaxs = program(lambda x: io_callback(lambda x: array, result, x, ordered=True))
    times: dict[str, list[float]] = {"mine": [], "jaxs": []}
    for _ in range(7):
        for name, run in (("mine", mine), ("jaxs", jaxs)):
            start = time.perf_counter()
            jax.block_until_ready(run(array))
            times[name].append(time.perf_counter() - start)
    assert min(times["mine"]) < 0.4 * min(times["jaxs"])
