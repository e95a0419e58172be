"""``lanes``: environments of their own for every lane of a ``vmap``, stepped by one host call."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from bridge_envs import Logged, tracks
from gymnasium.vector import AutoresetMode, SyncVectorEnv

import vecenv.jax as vj


def three_keys() -> Any:
    return jax.random.split(jax.random.key(3), 3)


@pytest.mark.long
def test_a_mapped_scan_is_one_host_call_a_step(transport: str) -> None:
    with vj.bridge(Logged(6), transport=transport, lanes=3) as env:
        assert env.num_envs == 2
        assert env.action_space.shape == (2, 1)

        @jax.jit
        @jax.vmap
        def program(key: Any) -> Any:
            state = env.reset(key)
            return jax.lax.scan(lambda s, _: (env.step(s, jnp.zeros((2, 1))), None), state, None, length=4)[0]

        state = program(three_keys())
        assert env.envs.calls == "RSSSS"
        assert state.steps.tolist() == [[4, 4]] * 3
        assert state.obs.shape == (3, 2, 1)


@pytest.mark.long
@pytest.mark.parametrize("mode", list(AutoresetMode))
def test_every_lane_is_a_bridge_of_its_own(transport: str, mode: AutoresetMode) -> None:
    actions = jnp.asarray(np.random.default_rng(0).integers(-2, 3, (3, 12, 2)))

    def roll(env: vj.Bridge, key: Any, actions: Any) -> Any:
        def body(state: Any, action: Any) -> Any:
            state = env.recv(env.send(state, action))
            return state, state

        return jax.lax.scan(body, env.reset(key), actions)[1].replace(token=None)

    with vj.bridge(SyncVectorEnv(tracks(6), autoreset_mode=mode), transport=transport, lanes=3) as env:
        together = jax.jit(jax.vmap(lambda key, actions: roll(env, key, actions)))(three_keys(), actions)
    for lane in range(3):
        with vj.bridge(SyncVectorEnv(tracks(2), autoreset_mode=mode), transport=transport) as env:
            alone = jax.jit(lambda key, actions, env=env: roll(env, key, actions))(three_keys()[lane], actions[lane])
        mine = jax.tree.map(lambda leaf, lane=lane: leaf[lane], together)
        jax.tree.map(np.testing.assert_array_equal, alone, mine)


@pytest.mark.long
def test_reset_mask_in_lanes() -> None:
    with vj.bridge(SyncVectorEnv(tracks(6), autoreset_mode=AutoresetMode.DISABLED), lanes=3) as env:
        state = jax.vmap(env.reset)(three_keys())
        for _ in range(6):
            state = jax.vmap(env.step, in_axes=(0, None))(state, jnp.zeros(2, jnp.int32))  # one action for all lanes
        assert state.done.all()
        mask = jnp.array([[True, False], [False, False], [True, True]])
        state = jax.vmap(env.reset_mask)(state, mask, three_keys())
        np.testing.assert_array_equal(state.done, ~mask)


@pytest.mark.long
def test_gradients_pass_over_mapped_steps(transport: str) -> None:
    with vj.bridge(Logged(6), transport=transport, lanes=3) as env:
        states = jax.vmap(env.reset)(three_keys())

        def loss(weight: Any, state: Any) -> Any:
            def body(state: Any, _: Any) -> Any:
                state = env.step(state, jnp.full((2, 1), weight))
                return state, weight * state.reward.sum()

            return jax.lax.scan(body, state, None, length=3)[1].sum()

        gradients = jax.jit(jax.vmap(jax.grad(loss)))(jnp.arange(3.0), states)
        assert env.envs.calls == "RSSS"
        assert gradients.tolist() == [18.0] * 3


@pytest.mark.long
def test_lanes_may_be_axes_of_nested_maps(transport: str) -> None:
    keys = jax.random.split(jax.random.key(4), 6)

    def roll(env: vj.Bridge, key: Any, action: Any) -> Any:
        state = env.step(env.reset(key), jnp.full(2, action))
        return state.replace(token=None)

    actions = jnp.array([-2, -1, 0, 1, 2, 0])
    with vj.bridge(SyncVectorEnv(tracks(12)), transport=transport, lanes=6) as env:
        flat = jax.jit(jax.vmap(lambda key, action: roll(env, key, action)))(keys, actions)
        program = jax.jit(jax.vmap(jax.vmap(lambda key, action: roll(env, key, action))))
        nested = program(keys.reshape(2, 3), actions.reshape(2, 3))
        with pytest.raises(ValueError, match=r"vmap over 6 lanes; it is called under jax.vmap over 3. .* make 6 .* lanes=3"):
            jax.vmap(env.reset)(keys[:3])
    assert nested.obs.shape[:3] == (2, 3, 2)
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(a.reshape(6, *a.shape[2:]), b), nested, flat)


@pytest.mark.long
def test_wrong_use_of_lanes_is_refused_and_the_error_says_how_to_have_them() -> None:
    keys = jax.random.split(jax.random.key(3), 6)
    make = r" For 6 lanes of 2, make 12 .* bridge\(\.\.\., lanes=6\)"
    wrong = {  # how it is called -> what the error says
        r"must be called under jax.vmap over 3 lanes": (lambda env: env.reset, keys[0]),
        r"must be called under jax.vmap over 3 lanes\.": (lambda env: jax.jit(env.reset), keys[0]),
        r"lanes=3; it is called under jax.vmap over 2": (lambda env: jax.vmap(env.reset), keys[:2]),
        r"lanes=3; it is called under jax.vmap over 4 times 3": (
            lambda env: jax.vmap(jax.vmap(env.reset)), jax.random.split(keys[0], (4, 3)),
        ),
        rf"lanes=3; it is called under jax.vmap over 6\.{make}": (lambda env: jax.vmap(env.reset), keys),
    }  # fmt: skip
    with vj.bridge(Logged(6), lanes=3) as env:
        for words, (call, argument) in wrong.items():
            with pytest.raises(ValueError, match=words):
                call(env)(argument)
        states = jax.vmap(env.reset)(keys[:3])  # the bridge is as it was
        with pytest.raises(ValueError, match=r"under jax.vmap over the lanes"):
            env.step(states, jnp.zeros((2, 1)))
        assert env.envs.calls == "R"
    with vj.bridge(SyncVectorEnv(tracks(12)), lanes=6) as env:  # as the error said
        assert jax.vmap(env.reset)(keys).obs.shape[:2] == (6, 2)
