"""The bridge uses the features that a vector env's capabilities announce, and no others."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from bridge_envs import CallLog, faulty, tracks
from envs import FixedBatchSize
from gymnasium.vector import AutoresetMode, VectorWrapper

import vecenv
import vecenv.jax as vj
from vecenv.errors import StepTimeout
from vecenv.front.capabilities import Capabilities
from vecenv.jax.host import Requests

SEED = 0


class Engine(CallLog):
    """An engine of another library, with given capabilities; rows are sent and received."""

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
        self.sent = np.asarray(env_id)

    def recv(self, timeout: float | None = None, *, count: int | None = None) -> Any:
        self.log.append(f"r{count}")
        rows, k = self.sent, len(self.sent)
        flags = np.zeros(k, bool)
        infos = {"env_id": rows, "_env_id": np.ones(k, bool)}
        return self.observations[rows], np.arange(k, dtype=float), flags, flags.copy(), infos


@pytest.mark.parametrize(
    ("capabilities", "log"),
    [
        (Capabilities("theirs"), ["s", "r2"]),
        (Capabilities("theirs", first_ready=False), ["S"]),
        (None, ["S"]),
    ],
    ids=str,
)
def test_some_rows_are_sent_only_to_capable_engines(capabilities: Capabilities | None, log: list[str]) -> None:
    envs = Engine(capabilities)
    requests = Requests(envs, 1.0)
    rows = np.array([0, 2])
    requests.begin(np.zeros((3, 1), np.float32), rows, np.zeros((2, 1), np.float32))
    answered, _ = requests.finish()
    assert envs.log == log
    assert answered.tolist() == ([0, 1, 2] if log == ["S"] else [0, 2])


@pytest.mark.long
@pytest.mark.parametrize("wrapped", [False, True])
def test_engines_that_cannot_seed_rows_get_no_seeds(wrapped: bool) -> None:
    engine = Engine(Capabilities("theirs", masked_seeds=False))
    with vj.bridge(VectorWrapper(engine) if wrapped else engine) as env:
        env.reset_mask(env.reset(jax.random.key(SEED)), jnp.array([True, False, False]), jax.random.key(SEED))
    assert engine.seeds[0] is not None
    assert engine.seeds[1:] == [None]


def test_engines_with_the_runs_jax_capability_are_refused() -> None:
    can = Capabilities("theirs", in_this_process=True, runs_jax=True)
    for envs in (Engine(can), VectorWrapper(Engine(can))):
        with pytest.raises(ValueError, match=r"Engine runs JAX in this process.*FunctionalVectorEnv"):
            vj.bridge(envs)


@pytest.mark.long
@pytest.mark.parametrize("batch_size", [None, 2])
def test_only_unfinished_rows_are_stepped(batch_size: int | None) -> None:
    envs = FixedBatchSize(tracks(4), num_workers=0, autoreset_mode="Disabled", batch_size=batch_size)
    with vj.bridge(envs) as env:
        state, done, stepped = env.reset(jax.random.key(SEED)), np.zeros(4, bool), 0
        while not done.all():
            state = env.step(state, jnp.zeros(4, jnp.int32))
            stepped += int((~done).sum())
            done |= np.asarray(state.done)
        assert envs.stats()["steps"] == stepped
        assert envs.stats()["resets"] == 4


@pytest.mark.long
@pytest.mark.parametrize(
    ("mode", "engines", "given"),
    [("Disabled", 0.3, {}), ("NextStep", 0.3, {}), ("NextStep", 200, {"timeout": 0.3}), ("Disabled", 200, {"timeout": 0.3})],
)
def test_timeout_is_the_given_one_or_the_engines(mode: str, engines: Any, given: Any) -> None:
    """This holds in a step, and in the reset after it, which waits once more for the pending step."""
    fns = faulty("stuck")
    hang = vecenv.AsyncVectorEnv(fns, num_workers=2, context="forkserver", autoreset_mode=mode, step_timeout=engines)
    with vj.bridge(hang, **given) as env:
        action = jnp.zeros(2, jnp.int32)
        state = env.step(env.step(env.reset(jax.random.key(SEED)), action), action)
        with pytest.raises(StepTimeout, match=r"0\.3 second"):
            env.step(state, action)
        with pytest.raises(StepTimeout, match=r"0\.3 second"):
            env.reset(jax.random.key(SEED))
        hang.close(terminate=True)


@pytest.mark.long
def test_hanging_row_is_restarted_by_the_engine() -> None:
    envs = vecenv.AsyncVectorEnv(
        faulty("stuck"), num_workers=2, context="forkserver", on_failure="restart", step_timeout=5.0
    )
    with vj.bridge(envs) as env:
        action = jnp.zeros(2, jnp.int32)
        state = env.step(env.step(env.reset(jax.random.key(SEED)), action), action)
        state = env.step(state, action)
        assert state.truncated.any()  # the row that hung
