"""The bridge uses only features that the capabilities of the vector environment list."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from bridge_envs import CallLogVectorEnv, RandomEnv, make_faulty_fns, make_fns
from envs import FixedBatchSize
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, VectorWrapper

import vecenv
import vecenv.jax as vj
from vecenv.errors import StepTimeout
from vecenv.front.capabilities import Capabilities
from vecenv.jax.host import Requests

SEED = 0


class ForeignVectorEnv(CallLogVectorEnv):
    """A vector environment like one of another library, with the given capabilities and with ``send`` and ``recv``."""

    def __init__(self, capabilities: Capabilities | None, mode: AutoresetMode = AutoresetMode.DISABLED) -> None:
        super().__init__(3)
        self.metadata = {"autoreset_mode": mode}
        if capabilities is not None:
            self.capabilities = capabilities
        self.seeds: list[Any] = []

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        self.seeds.append(seed)
        return super().reset(seed=seed, options=options)

    def reset_async(self, seed: Any = None, options: Any = None) -> None:
        self.result: Any = self.reset(seed=seed, options=options)

    def step_async(self, actions: Any) -> None:
        self.result = self.step(actions)

    def step_wait(self, timeout: float | None = None) -> Any:
        return self.result

    reset_wait = step_wait

    def send(self, actions: Any, env_id: Any = None) -> None:
        self.log.append("s")
        self.sent_rows = np.asarray(env_id)

    def recv(self, timeout: float | None = None, *, count: int | None = None) -> Any:
        self.log.append(f"r{count}")
        rows, k = self.sent_rows, len(self.sent_rows)
        flags = np.zeros(k, bool)
        infos = {"env_id": rows, "_env_id": np.ones(k, bool)}
        return self.observations[rows], np.arange(k, dtype=float), flags, flags.copy(), infos


@pytest.mark.parametrize(
    ("capabilities", "log"),
    [
        (Capabilities("foreign"), ["s", "r2"]),
        (Capabilities("foreign", first_ready=False), ["S"]),
        (None, ["S"]),
    ],
    ids=str,
)
def test_rows_are_sent_separately_only_with_first_ready(capabilities: Capabilities | None, log: list[str]) -> None:
    envs = ForeignVectorEnv(capabilities)
    requests = Requests(envs, 1.0)
    rows = np.array([0, 2])
    requests.begin(np.zeros((3, 1), np.float32), rows, np.zeros((2, 1), np.float32))
    received, _ = requests.finish()
    assert envs.log == log
    assert received.tolist() == ([0, 1, 2] if log == ["S"] else [0, 2])


@pytest.mark.long
@pytest.mark.parametrize("wrapped", [False, True])
def test_reset_mask_without_masked_seeds_passes_no_seeds(wrapped: bool) -> None:
    engine = ForeignVectorEnv(Capabilities("foreign", masked_seeds=False))
    with vj.bridge(VectorWrapper(engine) if wrapped else engine) as env:
        env.reset_mask(env.reset(jax.random.key(SEED)), jnp.array([True, False, False]), jax.random.key(SEED))
    assert engine.seeds[0] is not None
    assert engine.seeds[1:] == [None]


def test_bridge_over_a_vector_env_that_runs_jax_raises() -> None:
    capabilities = Capabilities("foreign", in_this_process=True, runs_jax=True)
    for envs in (ForeignVectorEnv(capabilities), VectorWrapper(ForeignVectorEnv(capabilities))):
        with pytest.raises(ValueError, match=r"ForeignVectorEnv runs JAX in this process.*FunctionalVectorEnv"):
            vj.bridge(envs)


@pytest.mark.long
@pytest.mark.parametrize("batch_size", [None, 2])
def test_finished_rows_are_not_stepped_in_disabled_mode(batch_size: int | None) -> None:
    envs = FixedBatchSize(make_fns(4), num_workers=0, autoreset_mode="Disabled", batch_size=batch_size)
    with vj.bridge(envs) as env:
        state, done, expected_steps = env.reset(jax.random.key(SEED)), np.zeros(4, bool), 0
        while not done.all():
            state = env.step(state, jnp.zeros(4, jnp.int32))
            expected_steps += int((~done).sum())
            done |= np.asarray(state.done)
        assert envs.stats()["steps"] == expected_steps
        assert envs.stats()["resets"] == 4


class OptionsEnv(RandomEnv):
    """An environment that records the options of its resets."""

    def __init__(self) -> None:
        super().__init__()
        self.options: list[Any] = []

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        self.options.append(options)
        return super().reset(seed=seed, options=options)


@pytest.mark.parametrize("wrap", [lambda envs: envs, VectorWrapper], ids=["bare", "wrapped"])
def test_masked_resets_have_no_options(wrap: Any) -> None:
    envs = vecenv.AsyncVectorEnv([OptionsEnv] * 2, num_workers=0, autoreset_mode="Disabled")
    with vj.bridge(wrap(envs)) as env:
        state = env.reset(jax.random.key(SEED))
        env.reset_mask(state, jnp.array([True, False]), jax.random.key(SEED))
        assert envs.get_attr("options") == ([None, None], [None])


class DyingAgents:
    """A game in which agent 1 dies in step 2, and agent 0 in step ``length``. Agents observe the time; rewards are 1."""

    possible_agents = (0, 1)

    def __init__(self, length: int) -> None:
        self.length = length
        self.time, self.agents = 0, list(self.possible_agents)

    def observation_space(self, agent: int) -> Any:
        return spaces.Discrete(99)

    def action_space(self, agent: int) -> Any:
        return spaces.Discrete(2)

    def reset(self, seed: Any = None, options: Any = None) -> Any:
        self.time, self.agents = 0, list(self.possible_agents)
        return dict.fromkeys(self.agents, np.int64(0)), {}

    def step(self, actions: Any) -> Any:
        self.time += 1
        before, ends = self.agents, {0: self.length, 1: 2}
        self.agents = [agent for agent in before if self.time < ends[agent]]
        terminated = {agent: agent not in self.agents for agent in before}
        return dict.fromkeys(before, np.int64(self.time)), dict.fromkeys(before, 1.0), terminated, {}, {}


@pytest.mark.parametrize("padding_done", [True, False])
def test_agent_that_dies_early_stays_finished_until_its_game_is_reset_in_disabled_mode(padding_done: bool) -> None:
    games = [functools.partial(DyingAgents, 3), functools.partial(DyingAgents, 5)]
    envs = vecenv.MultiAgentVecEnv(games, num_workers=0, autoreset_mode="Disabled").flatten_agents(padding_done=padding_done)
    with vj.bridge(envs) as env:
        state = env.reset(jax.random.key(SEED))
        for _ in range(6):
            state = env.step(state, jnp.zeros(4, jnp.int32))
        assert state.obs.tolist() == [3, 2, 5, 2]
        assert state.last_return.tolist() == [3.0, 2.0, 5.0, 2.0]
        state = env.reset_mask(state, state.done & (jnp.arange(4) < 2), jax.random.key(SEED))
        assert env.step(state, jnp.zeros(4, jnp.int32)).obs.tolist() == [1, 1, 5, 2]


@pytest.mark.long
@pytest.mark.parametrize(
    ("mode", "step_timeout", "options"),
    [("Disabled", 0.3, {}), ("NextStep", 0.3, {}), ("NextStep", 200, {"timeout": 0.3}), ("Disabled", 200, {"timeout": 0.3})],
)
def test_timeout_of_the_bridge_or_the_engine_limits_steps_and_resets(mode: str, step_timeout: Any, options: Any) -> None:
    """A reset waits for the pending step, so it times out too until the hanging worker is abandoned."""
    envs = vecenv.AsyncVectorEnv(
        make_faulty_fns("hang"), num_workers=2, context="forkserver", autoreset_mode=mode, step_timeout=step_timeout
    )
    with vj.bridge(envs, **options) as env:
        action = jnp.zeros(2, jnp.int32)
        state = env.step(env.step(env.reset(jax.random.key(SEED)), action), action)
        with pytest.raises(StepTimeout, match=r"0\.3 second"):
            env.step(state, action)
        with pytest.raises(StepTimeout, match=r"0\.3 second") as caught:
            env.reset(jax.random.key(SEED))
        assert "bridge.envs.abandon(error.envs), then bridge.reset(key)" in caught.value.__notes__[0]
        envs.abandon(caught.value.envs)
        assert env.reset(jax.random.key(SEED)).first.all()


@pytest.mark.long
def test_step_with_a_hanging_row_returns_after_its_restart() -> None:
    envs = vecenv.AsyncVectorEnv(
        make_faulty_fns("hang"), num_workers=2, context="forkserver", on_failure="restart", step_timeout=5.0
    )
    with vj.bridge(envs) as env:
        action = jnp.zeros(2, jnp.int32)
        state = env.step(env.step(env.reset(jax.random.key(SEED)), action), action)
        state = env.step(state, action)
        assert state.truncated.any()  # the row that hung
