"""``bridge(envs, rewind=...)``: states that were used can be used again."""

from __future__ import annotations

import logging
from typing import Any

import gymnasium as gym
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gymnasium.vector import SyncVectorEnv
from jax.random import key as new_key

import vecenv
import vecenv.jax as vj
from vecenv.errors import StaleStateError
from vecenv.testing import assert_identical

ROWS = 3


class Draws(gym.Env[Any, Any]):
    """Adds the action to what it draws; ends after five steps."""

    observation_space = gym.spaces.Box(-1e6, 1e6, (2,), np.float32)
    action_space = gym.spaces.Discrete(9)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.seen = np.array([0, self.np_random.random()], np.float32)
        return self.seen.copy(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        if action == 8:
            raise ConnectionError("told to")
        self.seen += np.array([1, action + self.np_random.random()], np.float32)
        return self.seen.copy(), float(self.seen[1]), bool(self.seen[0] >= 5), False, {}


def draws(mode: str = "NextStep", workers: int = 0) -> Any:
    return vecenv.AsyncVectorEnv([Draws] * ROWS, autoreset_mode=mode, num_workers=workers, context="forkserver")


def plain(state: vj.EnvState) -> Any:
    return {name: value for name, value in vars(jax.device_get(state)).items() if name not in ("token", "inner")}


def actions(number: int) -> Any:
    return jnp.full(ROWS, number, jnp.int32)


@pytest.mark.long
@pytest.mark.parametrize("mode", ["NextStep", "SameStep", "Disabled"])
def test_a_state_that_was_used_goes_on_as_it_went(mode: str) -> None:
    with vj.bridge(draws(mode), rewind=40) as env:

        def go_on(state: vj.EnvState, number: int) -> vj.EnvState:
            if mode == "Disabled" and bool(state.done.all()):
                state = env.reset_mask(state, state.done, new_key(1))
            return env.step(state, actions(number % 3))

        states = [env.reset(new_key(0))]
        for number in range(9):
            states.append(go_on(states[-1], number))
        for place in (3, 0, 4, 8, 5, 4):
            assert_identical(plain(go_on(states[place], place)), plain(states[place + 1]), str(place))
        branch = env.step(env.step(states[2], actions(7)), actions(1))
        assert not np.array_equal(branch.obs, states[4].obs)
        assert_identical(plain(env.step(env.step(states[2], actions(7)), actions(1))), plain(branch))


@pytest.mark.long
def test_inside_a_compiled_program_and_from_a_step_that_is_underway() -> None:
    def search(state: vj.EnvState) -> Any:
        """Each action from the same state, and then the best of them."""
        one = lambda _, action: (None, env.step(state, jnp.full(ROWS, action)).reward)  # noqa: E731
        found = jax.lax.scan(one, None, jnp.arange(4))[1]
        return env.step(state, jnp.argmax(found, 0)), found

    with vj.bridge(draws(workers=2), rewind=2) as env:
        state = env.reset(new_key(0))
        best, found = vj.run(jax.jit(search), state)
        assert_identical(np.asarray(best.reward), np.asarray(found).max(0))
        env.send(best, actions(1))
        again = env.step(state, actions(3))  # what was begun is waited for, and forgotten
        assert_identical(np.asarray(again.reward), np.asarray(found)[3])


@pytest.mark.long
def test_states_that_are_not_kept_are_refused_and_the_environments_stay() -> None:
    with vj.bridge(draws(), rewind=2) as env:
        first = env.reset(new_key(0))
        second = env.step(first, actions(1))
        third = env.step(second, actions(1))
        with pytest.raises(StaleStateError, match=r"used before .* none of the 2 that rewind keeps"):
            env.step(first, actions(1))
        wanted = plain(env.step(second, actions(1)))
        assert_identical(wanted, plain(third))
        env.reset(new_key(0))
        with pytest.raises(StaleStateError, match=r"earlier reset .* none of the 2"):
            env.step(second, actions(1))


@pytest.mark.long
def test_after_a_failure_an_earlier_state_is_a_way_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logging.getLogger("jax._src.callback"), "disabled", True)
    with vj.bridge(draws(workers=2), rewind=True) as env:
        first = env.reset(new_key(0))
        wanted = env.step(first, actions(1))
        with pytest.raises(ConnectionError):
            env.step(wanted, actions(8))
        assert_identical(plain(env.step(first, actions(1))), plain(wanted))


def test_it_is_refused_where_nothing_can_be_saved() -> None:
    with pytest.raises(NotImplementedError, match="SyncVectorEnv cannot save them"):
        vj.bridge(SyncVectorEnv([Draws]), rewind=True)
    with pytest.raises(ValueError, match="rewind must be"):
        vj.bridge(SyncVectorEnv([Draws]), rewind=-1)
