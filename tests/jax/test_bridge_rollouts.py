"""Rollouts and evaluations over bridged environments, where a step too many, too few or out of order cannot be undone."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from bridge_envs import Logged, tracks
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from jax.random import key as new_key

import vecenv
import vecenv.jax as vj

N, T = 4, 15


@vj.stateless
def policy(params: Any, obs: Any, key: Any) -> Any:
    """Random actions of ``Discrete(5, start=-2)``, of each row by itself."""
    action = jax.random.randint(key, (obs.shape[0],), -2, 3) * params
    return action, {"seen": obs[:, 0]}


def counting(params: Any, carry: Any, obs: Any, first: Any, key: Any) -> Any:
    """A policy that remembers how many steps its episode has had."""
    carry = vj.reset_carry(first, carry, jnp.zeros((), jnp.int32)) + 1
    return carry, jnp.zeros(obs.shape[0], jnp.int32), {"memory": carry}


def still(env: vj.Bridge) -> Any:
    """A policy for :class:`Logged`."""
    return vj.stateless(lambda params, obs, key: (jnp.zeros((env.num_envs, 1)) + params, {}))


@pytest.mark.long
def test_how_often_an_environment_is_called(transport: str) -> None:
    def after_reset(run: Any, episode: int = 0) -> str:
        with vj.bridge(Logged(episode=episode), transport=transport) as env:
            jax.block_until_ready(jax.jit(lambda key: run(env, still(env), 1.0, env.reset(key), (), new_key(8)))(new_key(7)))
            jax.effects_barrier()
            assert env.envs.calls[0] == "R"
            return env.envs.calls[1:]

    def rollout(*args: Any) -> Any:
        return vj.rollout(*args, 6)[1].token  # nothing of the trajectory is asked for

    assert after_reset(rollout) == "S" * 6
    assert after_reset(lambda *args: vj.eval_rollout_episode(*args, 6)) == "S" * 6
    assert after_reset(lambda *args: vj.eval_rollout_episode(*args, 6), episode=3) == "S" * 3
    assert after_reset(lambda *args: vj.fast_eval_rollout_episode(*args, 6)) == "S" * 6
    assert after_reset(lambda *args: vj.fast_eval_rollout_episode(*args, 6), episode=3) == "S" * 3
    assert after_reset(lambda *args: vj.fast_eval_rollout_episode(*args, 6, 4), episode=3) == "S" * 7  # one of them resets


@pytest.mark.long
def test_evaluations_in_lanes_are_those_of_each_lane_alone(transport: str) -> None:
    keys, scales = jax.random.split(new_key(7), 2), jnp.array([1, 0])

    def both(env: vj.Bridge, key: Any, scale: Any) -> Any:
        args = (env, policy, scale, env.reset(key), (), new_key(8), T)
        fast = dataclasses.replace(vj.fast_eval_rollout_episode(*args)[0], env_steps=0)  # the lanes stop together
        whole = vj.eval_rollout_episode(env, policy, scale, env.reset(key), (), new_key(8), T)[1]
        return fast, dataclasses.replace(whole, env_steps=0)

    with vj.bridge(SyncVectorEnv(tracks(2 * N)), transport=transport, lanes=2) as env:
        together = jax.jit(jax.vmap(lambda key, scale: both(env, key, scale)))(keys, scales)
    for lane in range(2):
        with vj.bridge(SyncVectorEnv(tracks(N)), transport=transport) as env:
            alone = jax.jit(lambda key, scale, env=env: both(env, key, scale))(keys[lane], scales[lane])
        mine = jax.tree.map(lambda leaf, lane=lane: leaf[lane], together)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), mine, alone)


@pytest.mark.long
def test_evaluations_in_lanes_stop_when_the_last_lane_is_ready(transport: str) -> None:
    with vj.bridge(Logged(4, episode=3), transport=transport, lanes=2) as env:

        def both(key: Any) -> Any:
            fast, state = vj.fast_eval_rollout_episode(env, still(env), 1.0, env.reset(key), (), key, 9)
            whole = vj.eval_rollout_episode(env, still(env), 1.0, env.reset(key), (), key, 6)[1]
            return fast, whole, state.steps

        fast, whole, steps = jax.jit(jax.vmap(both))(jax.random.split(new_key(7), 2))
        assert env.envs.calls == "RSSSRSSS"
    assert fast.finished.all()
    assert whole.finished.all()
    assert steps.tolist() == [[3, 3]] * 2


def test_wrong_arguments_are_refused() -> None:
    with vj.bridge(SyncVectorEnv(tracks(N), autoreset_mode=AutoresetMode.DISABLED), {"left": np.int32}) as env:
        state = env.reset(new_key(7))
        with pytest.raises(ValueError, match=r"'speed'.*'steps'.*'left'"):
            vj.rollout(env, policy, 1, state, (), new_key(8), 2, ("speed",))
        with pytest.raises(ValueError, match=r"no fields \['speed'\]; there are .*'done'"):
            vj.eval_rollout_episode(env, policy, 1, state, (), new_key(8), 2, keep=("reward", "speed"))
        with pytest.raises(ValueError, match="num_episodes must be positive, got 0"):
            vj.fast_eval_rollout_episode(env, policy, 1, state, (), new_key(8), 2, 0)


# -- overlap -------------------------------------------------------------------------------------------------------------


class Halves(Logged):
    """Writes into a log that both halves share: its name where a step begins, and in capitals where it is waited for."""

    def __init__(self, name: str, shared: list[str], num_envs: int = 2) -> None:
        super().__init__(num_envs)
        self.name, self.shared = name, shared

    def step_async(self, actions: Any) -> None:
        self.shared.append(self.name)
        self.actions = actions

    def step_wait(self, timeout: float | None = None) -> Any:
        self.shared.append(self.name.upper())
        return self.step(self.actions)

    def reset_async(self, *, seed: Any = None, options: Any = None) -> None:
        pass

    def reset_wait(self, timeout: float | None = None, seed: Any = None, options: Any = None) -> Any:
        return self.reset()


def overlapped(envs: Any, policy: Any, carry: Any, length: int, extras: Any = (), params: Any = 1) -> Any:
    states = tuple(env.reset(jax.random.fold_in(new_key(7), half)) for half, env in enumerate(envs))
    return vj.rollout(envs, policy, params, states, carry, new_key(8), length, extras, overlap=True)


@pytest.mark.long
@pytest.mark.parametrize(
    ("mode", "length"),
    [
        (AutoresetMode.NEXT_STEP, T),
        pytest.param(AutoresetMode.SAME_STEP, T, marks=pytest.mark.slow),
        (AutoresetMode.SAME_STEP, 1),
        pytest.param(AutoresetMode.DISABLED, T, marks=pytest.mark.slow),
    ],
)
def test_overlapped_halves_give_what_two_rollouts_give(mode: AutoresetMode, length: int) -> None:
    def start(count: int) -> vj.Bridge:
        envs = vecenv.AsyncVectorEnv(tracks(count), num_workers=0, autoreset_mode=mode)
        return vj.bridge(envs, {"left": np.int32})

    carries = tuple(jnp.full(count, 9, jnp.int32) for count in (3, 2))

    def acting(params: Any, carry: Any, obs: Any, first: Any, key: Any) -> Any:
        carry, _, extras = counting(params, carry, obs, first, key)
        _, action, more = policy(params, (), obs, first, key)
        return carry, action, extras | more

    with start(3) as one, start(2) as two:
        found, states, memory = jax.jit(lambda: overlapped((one, two), acting, carries, length, ("steps", "left")))()
        for half, (env, carry) in enumerate(zip((one, two), carries, strict=True)):
            key = jax.random.fold_in(new_key(8), half)
            alone, state, alone_memory = jax.jit(
                lambda reset, key, carry, env=env: vj.rollout(
                    env, acting, 1, env.reset(reset), carry, key, length, ("steps", "left")
                )
            )(jax.random.fold_in(new_key(7), half), key, carry)
            mine = jax.tree.map(lambda leaf, half=half: leaf[:, 3 * half : 3 + 2 * half], found)
            jax.tree.map(np.testing.assert_array_equal, mine, alone)
            np.testing.assert_array_equal(memory[half], alone_memory)
            jax.tree.map(np.testing.assert_array_equal, states[half].replace(token=None), state.replace(token=None))


@pytest.mark.long
def test_while_one_half_steps_the_other_acts(transport: str) -> None:
    log: list[str] = []
    with vj.bridge(Halves("a", log), transport=transport) as one, vj.bridge(Halves("b", log), transport=transport) as two:

        def acts(params: Any, obs: Any, key: Any) -> Any:
            return obs * params, {}

        run = jax.jit(lambda: overlapped((one, two), vj.stateless(acts), ((), ()), 4)[0])
        found = run()
    assert "".join(log) == "ab" + "AaBb" * 3 + "AB"  # between a and A, b's policy; between b and B, a's
    assert found.reward.shape == (4, 4)
    np.testing.assert_array_equal(found.action, found.obs)


def test_a_gradient_of_an_overlapped_rollout_steps_once(transport: str) -> None:
    log: list[str] = []
    with vj.bridge(Halves("a", log), transport=transport) as one, vj.bridge(Halves("b", log), transport=transport) as two:

        def loss(weight: Any) -> Any:
            return weight * overlapped((one, two), still(one), ((), ()), 4, params=weight)[0].reward.sum()

        gradient = jax.jit(jax.grad(loss))(1.0)
    assert "".join(log) == "ab" + "AaBb" * 3 + "AB"
    assert float(gradient) == 4 * sum(range(2, 6))


@pytest.mark.long
def test_what_cannot_be_overlapped_is_refused(counters: Any) -> None:
    native = counters()
    with vj.bridge(Logged()) as one, vj.bridge(Logged()) as two:
        acts, states = still(one), (one.reset(new_key(7)), two.reset(new_key(7)))

        def roll(env: Any, state: Any = states, carry: Any = ((), ()), length: int = 2, **options: Any) -> None:
            vj.rollout(env, acts, 1.0, state, carry, new_key(8), length, **{"overlap": True, **options})

        with pytest.raises(ValueError, match=r"takes a pair as env.*got Bridge"):
            roll(one)
        with pytest.raises(ValueError, match=r"takes a pair as state.*got EnvState"):
            roll((one, two), states[0])
        with pytest.raises(ValueError, match=r"takes a pair as carry.*got 0 of them"):
            roll((one, two), carry=())
        with pytest.raises(ValueError, match="got one twice"):
            roll((one, one))
        with pytest.raises(TypeError, match=r"send and recv.*FunctionalVectorEnv has none"):
            roll((native, counters(num_envs=3)))
        with pytest.raises(ValueError, match="length of at least 1, got 0"):
            roll((one, two), length=0)
        with pytest.raises(ValueError, match="checkpoint=False"):
            roll((one, two), checkpoint=True)
        with pytest.raises(ValueError, match="env and state: a pair is for overlap=True"):
            roll((one, two), overlap=False)
        with pytest.raises(ValueError, match="'speed'"):
            roll((one, two), extras=("speed",))
        scalar = vj.stateless(lambda params, obs, key: (jnp.zeros((2, 1)), {"heat": jnp.float32(1)}))
        with pytest.raises(ValueError, match=r"policy_extras\['heat'\] has no axis of rows"):
            jax.eval_shape(lambda: vj.rollout((one, two), scalar, 1.0, states, ((), ()), new_key(8), 2, overlap=True))
        assert one.envs.calls == two.envs.calls == "R"
