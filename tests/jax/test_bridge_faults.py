"""Errors of environments and programs are raised unchanged, and the bridge stays usable."""

from __future__ import annotations

import gc
import logging
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
import warnings
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gymnasium as gym
import jax
import jax.numpy as jnp
import numpy as np
import psutil
import pytest
from bridge_envs import CallLogVectorEnv, make_faulty_fns, make_fns
from gymnasium.error import AlreadyPendingCallError, ClosedEnvironmentError, NoAsyncCallError
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from jax.random import key as new_key
from jax_envs import Counter
from signals import Alarm, signal_handler

import vecenv
import vecenv.jax as vj
from vecenv.errors import ObservationError, StaleStateError, StepTimeout, WorkerDied

HERE = Path(__file__).parent


@pytest.fixture(autouse=True)
def disable_callback_log(monkeypatch: pytest.MonkeyPatch) -> None:
    """Disable JAX's log of errors in ``io_callback``, because pytest's copy would keep the test's environments alive."""
    monkeypatch.setattr(logging.getLogger("jax._src.callback"), "disabled", True)


@pytest.fixture
def log_bridge() -> Iterator[vj.Bridge]:
    """Yield a bridge over a vector environment that logs its calls."""
    with vj.bridge(CallLogVectorEnv()) as env:
        yield env


def make_async(fns: Any, **options: Any) -> vecenv.AsyncVectorEnv:
    return vecenv.AsyncVectorEnv(fns, context="forkserver", num_workers=2, **options)


def compile_five_steps(env: vj.Bridge) -> Any:
    """Return a compiled program of five steps."""
    action = jnp.zeros(env.action_space.shape, jnp.int32)
    return jax.jit(lambda state: jax.lax.scan(lambda s, _: (env.step(s, action), None), state, None, length=5)[0])


def make_zero_actions(env: vj.Bridge) -> Any:
    return jnp.zeros(env.action_space.shape, jax.dtypes.canonicalize_dtype(env.action_space.dtype))


# -- states ----------------------------------------------------------------------------------------------------------


@pytest.mark.long
def test_second_step_of_a_state_raises(log_bridge: vj.Bridge) -> None:
    state = log_bridge.reset(new_key(0))
    newest = log_bridge.step(state, jnp.zeros((2, 1)))
    with pytest.raises(StaleStateError, match="used before"):
        log_bridge.step(state, jnp.zeros((2, 1)))
    with pytest.raises(StaleStateError, match="used before"):
        vj.run(jax.jit(log_bridge.step), state, jnp.zeros((2, 1)))
    assert log_bridge.envs.calls == "RS"
    log_bridge.step(newest, jnp.zeros((2, 1)))  # the errors did not change the bridge


@pytest.mark.long
def test_step_with_a_state_of_an_earlier_reset_or_another_bridge_raises(log_bridge: vj.Bridge) -> None:
    old, new = log_bridge.reset(new_key(0)), log_bridge.reset(new_key(0))
    with pytest.raises(StaleStateError, match="earlier reset"):
        log_bridge.step(old, jnp.zeros((2, 1)))
    with vj.bridge(CallLogVectorEnv()) as other, pytest.raises(StaleStateError, match="before the first reset"):
        other.step(new, jnp.zeros((2, 1)))
    with vj.bridge(CallLogVectorEnv()) as other:
        other.reset(new_key(0))
        with pytest.raises(StaleStateError, match="another bridge"):
            other.step(new, jnp.zeros((2, 1)))


@pytest.mark.long
@pytest.mark.parametrize("wrapped", [False, True], ids=["plain", "wrapped"])
def test_step_after_a_reset_by_another_bridge_raises(wrapped: bool) -> None:
    envs = CallLogVectorEnv()
    wrapped_envs = gym.wrappers.vector.ClipReward(envs, -1.0, 1.0) if wrapped else envs
    first, second = vj.bridge(envs), vj.bridge(wrapped_envs)
    old = first.step(first.reset(new_key(0)), make_zero_actions(first))
    new = second.reset(new_key(0))
    calls = str(envs.calls)
    with pytest.raises(StaleStateError, match="another bridge over the same vector env has reset them"):
        first.step(old, make_zero_actions(first))
    assert str(envs.calls) == calls
    assert second.step(new, make_zero_actions(second)).valid.all()
    restarted = first.reset(new_key(0))
    with pytest.raises(StaleStateError, match="another bridge over the same vector env"):
        second.step(new, make_zero_actions(second))
    newest = first.step(restarted, make_zero_actions(first))
    assert newest.valid.all()
    second.reset(new_key(0))
    del second, new
    gc.collect()
    with pytest.raises(StaleStateError, match="another bridge"):  # even after the other bridge was deleted
        first.step(newest, make_zero_actions(first))
    first.close()


@pytest.mark.long
def test_reset_during_the_step_of_another_bridge_drops_the_step() -> None:
    envs = make_async(make_fns(2))
    with vj.bridge(envs) as first:
        pending = first.send(first.reset(new_key(0)), make_zero_actions(first))
        second = vj.bridge(envs)
        state = second.reset(new_key(0))
        with pytest.raises(StaleStateError, match="another bridge"):
            first.recv(pending)
        assert second.step(state, make_zero_actions(second)).steps.tolist() == [1, 1]


@pytest.mark.long
def test_pending_state_allows_only_recv(log_bridge: vj.Bridge) -> None:
    state = log_bridge.reset(new_key(0))
    with pytest.raises(NoAsyncCallError):
        log_bridge.recv(state)
    pending = log_bridge.send(state, jnp.zeros((2, 1)))
    with pytest.raises(AlreadyPendingCallError):
        log_bridge.step(pending, jnp.zeros((2, 1)))
    with pytest.raises(AlreadyPendingCallError):
        log_bridge.send(pending, jnp.zeros((2, 1)))
    assert log_bridge.recv(pending).reward.tolist() == [2.0, 2.0]


def test_reset_drops_a_pending_step() -> None:
    with vj.bridge(make_async(make_fns(2))) as env:
        env.send(env.reset(new_key(0)), jnp.zeros(2, jnp.int32))
        state = env.reset(new_key(0))
        assert env.step(state, jnp.zeros(2, jnp.int32)).steps.tolist() == [1, 1]


# -- exceptions ------------------------------------------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.filterwarnings("ignore::UserWarning")  # the engine's report of the error
def test_run_raises_the_error_of_an_environment_and_reset_recovers() -> None:
    with vj.bridge(make_async(make_faulty_fns("raise"))) as env:
        state, program = env.reset(new_key(0)), compile_five_steps(env)
        with pytest.raises(ZeroDivisionError, match="in step 3"):
            vj.run(program, state)
        assert float(jax.jit(lambda x: x + 1)(1.0)) == 2.0  # other programs still run
        with pytest.raises(StaleStateError, match="an earlier call failed"):
            env.step(state, jnp.zeros(2, jnp.int32))
        state = env.reset(new_key(0))
        state = env.step(state, jnp.zeros(2, jnp.int32))
        assert state.steps.tolist() == [1, 1]


@pytest.mark.long
def test_error_without_run_is_a_jax_error_with_the_same_text() -> None:
    with vj.bridge(SyncVectorEnv(make_faulty_fns("raise"))) as env:
        state = env.reset(new_key(0))
        with pytest.raises(jax.errors.JaxRuntimeError, match="ZeroDivisionError: in step 3"):
            jax.block_until_ready(compile_five_steps(env)(state))
        env.step(env.reset(new_key(0)), jnp.zeros(2, jnp.int32))  # the bridge is usable again


@pytest.mark.long
def test_worker_death_is_raised_and_the_next_reset_replaces_the_worker() -> None:
    with vj.bridge(make_async(make_faulty_fns("die"))) as env:
        state, program = env.reset(new_key(0)), compile_five_steps(env)
        with pytest.raises(WorkerDied) as caught:
            vj.run(program, state)
        assert caught.value.envs == (1,)
        env.envs.env_fns = make_fns(2)
        state = env.step(env.reset(new_key(0)), jnp.zeros(2, jnp.int32))
        assert state.steps.tolist() == [1, 1]


@pytest.mark.long
@pytest.mark.parametrize("split", [False, True])
def test_slow_step_raises_after_the_timeout(split: bool) -> None:
    with vj.bridge(make_async(make_faulty_fns("pause")), timeout=0.5) as env:
        state, action = env.reset(new_key(0)), jnp.zeros(2, jnp.int32)
        state = env.step(env.step(state, action), action)
        started_at = time.monotonic()
        with pytest.raises(StepTimeout):
            vj.run(jax.jit(lambda s: env.recv(env.send(s, action)) if split else env.step(s, action)), state)
        assert time.monotonic() - started_at < 60
        with pytest.raises(StepTimeout):  # the step is still pending
            env.reset(new_key(0))
        time.sleep(2.5)  # longer than the pause, together with the two timeouts above
        state = env.step(env.reset(new_key(0)), action)
        assert state.steps.tolist() == [1, 1]


@pytest.mark.long
def test_reset_of_gymnasium_workers_after_a_timeout_raises() -> None:
    envs = gym.vector.AsyncVectorEnv(make_faulty_fns("pause"), context="forkserver")
    with vj.bridge(envs, timeout=0.5) as env:
        state, program = env.reset(new_key(0)), compile_five_steps(env)
        with pytest.raises(multiprocessing.TimeoutError):
            vj.run(program, state)
        with pytest.raises(RuntimeError, match="may return late results"):
            env.reset(new_key(0))
        envs.close(terminate=True)


@pytest.mark.long
@pytest.mark.parametrize("inputs_ready", [True, False])
def test_ctrl_c_during_run_raises_keyboard_interrupt(inputs_ready: bool) -> None:
    """Inputs that are not ready make no difference, because ``run`` waits for them before it starts the program."""
    with vj.bridge(make_async(make_faulty_fns("pause"))) as env:
        action = jnp.zeros(2, jnp.int32)
        state = env.step(env.step(env.reset(new_key(0)), action), action)
        program = jax.jit(lambda state, x: env.step(state, action + (x[0, 0] > 1e30)))
        matrix = jnp.ones((700, 700))
        if inputs_ready:
            jax.block_until_ready(matrix)
        else:
            matrix = jax.jit(lambda x: jax.lax.fori_loop(0, 10, lambda _, y: y @ x / 700.0, x))(matrix)
        timer = threading.Timer(1.0, lambda: os.kill(os.getpid(), signal.SIGINT))
        timer.start()
        with pytest.raises(KeyboardInterrupt):
            vj.run(program, state, matrix)
        timer.join()
        state = env.step(env.reset(new_key(0)), action)  # waits for the pending result
        assert state.steps.tolist() == [1, 1]


@pytest.mark.parametrize(
    ("call", "method"),
    [("step", "step_async"), ("step", "step_wait"), ("reset", "reset_async"), ("reset after send", "step_wait")],
)
def test_time_limit_in_a_call_of_the_engine_is_raised_and_a_reset_recovers(call: str, method: str) -> None:
    signals = [signal.SIGUSR2]
    with vj.bridge(make_async(make_fns(2))) as env, signal_handler(signal.SIGUSR2, Alarm):
        original, action, state = getattr(env.envs, method), jnp.zeros(2, jnp.int32), env.reset(new_key(0))

        def interrupt(*arguments: Any, **options: Any) -> Any:
            if signals and method.endswith("wait"):
                signal.raise_signal(signals.pop())
            result = original(*arguments, **options)
            if signals:
                signal.raise_signal(signals.pop())
            return result

        with pytest.MonkeyPatch.context() as patches:
            patches.setattr(env.envs, method, interrupt)
            if call == "reset after send":
                env.send(state, action)
            with pytest.raises(Alarm):
                env.step(state, action) if call == "step" else env.reset(new_key(0))
        assert env.step(env.reset(new_key(0)), action).steps.tolist() == [1, 1]


def test_run_raises_other_exceptions_unchanged(log_bridge: vj.Bridge) -> None:
    def fail() -> None:
        raise KeyError("missing")

    with pytest.raises(KeyError, match="missing"):
        vj.run(fail)
    assert vj.run(lambda x: x + 1, 1) == 2


# -- bad input -------------------------------------------------------------------------------------------------------


def test_step_with_wrong_actions_raises_during_tracing() -> None:
    with vj.bridge(SyncVectorEnv(make_fns(2, action="dict"))) as env:
        state = env.reset(new_key(0))
        valid = {"a": jnp.zeros((2, 2)), "z": jnp.zeros(2, jnp.int32)}
        for wrong, error, text in (
            (jnp.zeros(2), ValueError, "structured like"),
            ({"a": jnp.zeros((2, 2))}, ValueError, "structured like"),
            ({**valid, "a": jnp.zeros((3, 2))}, ValueError, r"actions\['a'\]: got shape \(3, 2\)"),
            ({**valid, "z": jnp.zeros(2)}, TypeError, r"actions\['z'\] has dtype float32"),
        ):
            with pytest.raises(error, match=text):
                jax.eval_shape(env.step, state, wrong)
        env.step(state, valid)


@pytest.mark.long
def test_infos_that_differ_from_their_spec_raise() -> None:
    for spec, text in (
        ({"score": jax.ShapeDtypeStruct((2,), jnp.float32)}, r"info\['score'\] of env 0: got float64\[\].*float32\[2\]"),
        ({"start": np.int32}, r"info\['start'\] of env 0: got float64"),
        ({"start": {"deep": np.float32}}, "expected a dict"),
    ):
        with vj.bridge(SyncVectorEnv(make_fns(2)), info_spec=spec) as env, pytest.raises(ObservationError, match=text):
            vj.run(compile_five_steps(env), env.reset(new_key(0)))


def test_bridge_with_invalid_options_raises() -> None:
    envs = SyncVectorEnv(make_fns(4))
    for error, text, options in (
        (ValueError, "float64 must be one of", {"float64": "drop"}),
        (ValueError, "timeout must be positive", {"timeout": 0.0}),
        (ValueError, "equal groups", {"lanes": 3}),
        (TypeError, "info_spec", {"info_spec": {"a": "nonsense"}}),
        (TypeError, "must be str", {"info_spec": {3: np.float32}}),
        (ValueError, "underscore", {"info_spec": {"_a": np.float32}}),
        (TypeError, "numbers or bools", {"info_spec": {"a": object}}),
        (TypeError, "dict with names as keys", {"info_spec": np.float32}),
    ):
        with pytest.raises(error, match=text):
            vj.bridge(envs, **options)
    with pytest.raises(TypeError, match="VectorEnv"):
        vj.bridge(make_fns(1)[0]())
    envs.single_observation_space = gym.spaces.Text(5)
    with pytest.raises(TypeError, match="observations of fixed size"):
        vj.bridge(envs)
    envs.close()


@pytest.mark.long
def test_calls_with_wrong_states_or_masks_raise(log_bridge: vj.Bridge) -> None:
    state, action, mask = log_bridge.reset(new_key(0)), jnp.zeros((2, 1)), jnp.ones(2, bool)
    stacked = jax.tree.map(lambda x: jnp.stack([x] * 3), state)
    with vj.bridge(SyncVectorEnv(make_fns(2), autoreset_mode=AutoresetMode.DISABLED)) as env:
        for error, text, call in (
            (TypeError, "got tuple", lambda: log_bridge.step((), action)),  # type: ignore[arg-type]
            (TypeError, "JAX-native", lambda: log_bridge.step(state.replace(token=None), action)),
            (ValueError, r"batch shape \(3, 2\)", lambda: log_bridge.step(stacked, action)),
            (ValueError, "DISABLED", lambda: log_bridge.reset_mask(state, mask, new_key(0))),
            (ValueError, r"mask must be bool\[2\], got bool\[3\]",
             lambda: env.reset_mask(env.reset(new_key(0)), jnp.ones(3, bool), new_key(0))),
        ):  # fmt: skip
            with pytest.raises(error, match=text):
                call()


@pytest.mark.long
def test_calls_after_close_raise() -> None:
    env = vj.bridge(CallLogVectorEnv())
    state = env.reset(new_key(0))
    program = jax.jit(env.step)
    program.lower(state, jnp.zeros((2, 1))).compile()
    state = program(state, jnp.zeros((2, 1)))
    env.close()
    env.close()  # does nothing
    with pytest.raises(ClosedEnvironmentError):
        env.step(state, jnp.zeros((2, 1)))
    with pytest.raises(ClosedEnvironmentError):
        vj.run(program, state, jnp.zeros((2, 1)))
    with pytest.raises(ClosedEnvironmentError):
        vj.bridge(env.envs)
    assert "closed" in repr(env)


def test_close_after_an_interrupted_close_closes_the_rest() -> None:
    class InterruptedVectorEnv(CallLogVectorEnv):
        closings = 0

        def close_extras(self, **kwargs: Any) -> None:
            self.closings += 1
            if self.closings == 1:
                raise KeyboardInterrupt

    env = vj.bridge(InterruptedVectorEnv())
    with pytest.raises(KeyboardInterrupt):
        env.close()
    assert not env.envs.closed
    env.close()
    assert env.envs.closed


# -- environments that run JAX in this process -----------------------------------------------------------------------


class JaxInResetEnv(gym.Env[Any, Any]):
    observation_space = action_space = gym.spaces.Box(-1, 1, (1,))

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        return np.asarray(jnp.zeros(1)), {}


class JaxAttributeEnv(gym.Env[Any, Any]):
    observation_space = action_space = gym.spaces.Box(-1, 1, (1,))

    def __init__(self) -> None:
        self.weights = jax.numpy.zeros(3)


@pytest.mark.parametrize("cls", [JaxInResetEnv, JaxAttributeEnv])
def test_bridge_over_environments_that_run_jax_in_this_process_raises(cls: type[gym.Env[Any, Any]]) -> None:
    def env_fn() -> gym.Env[Any, Any]:
        return gym.wrappers.TimeLimit(cls(), 5)

    with pytest.raises(ValueError, match=r"runs JAX in this process.*worker processes"):
        vj.bridge(SyncVectorEnv([env_fn]))
    for envs in (vecenv.AsyncVectorEnv([env_fn], num_workers=0), vecenv.backends.JaxVectorEnv(Counter(), 2)):
        with pytest.raises(ValueError, match=r"runs JAX in this process.*FunctionalVectorEnv"):
            vj.bridge(envs)
        envs.close()


# -- processes -------------------------------------------------------------------------------------------------------


@pytest.mark.long
def test_resets_reuse_processes_and_close_ends_them() -> None:
    envs = make_async(make_fns(2))
    with vj.bridge(envs) as env:
        pids = [process.pid for process in envs.processes]
        for _ in range(3):
            env.step(env.reset(new_key(0)), jnp.zeros(2, jnp.int32))
        assert pids == [process.pid for process in envs.processes]
        for pid in pids:
            assert "jaxlib" not in Path(f"/proc/{pid}/maps").read_text()
    assert not any(psutil.pid_exists(pid) for pid in pids)


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning")
def test_unreferenced_bridge_is_freed_and_its_processes_end() -> None:
    env: Any = vj.bridge(make_async(make_fns(2)))
    pids = [process.pid for process in env.envs.processes]
    reference = weakref.ref(env)
    program = compile_five_steps(env)
    jax.block_until_ready(program(env.reset(new_key(0))))
    del env, program
    gc.collect()
    assert reference() is None
    deadline = time.monotonic() + 5
    while any(psutil.pid_exists(pid) for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not any(psutil.pid_exists(pid) for pid in pids)


@pytest.mark.skipif("fork" not in multiprocessing.get_all_start_methods(), reason="needs fork")
def test_bridge_over_forked_workers_warns() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        warnings.simplefilter("ignore", DeprecationWarning)
        envs = vecenv.AsyncVectorEnv(make_fns(1), context="fork")
    with pytest.warns(RuntimeWarning, match="started by fork"):
        vj.bridge(envs).close()


@pytest.mark.long
def test_bridge_over_forkserver_workers_does_not_warn() -> None:
    code = (
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "import jax, jax.numpy as jnp\n"
        "import vecenv, vecenv.jax as vj\n"
        "from bridge_envs import make_fns\n"
        "if __name__ == '__main__':\n"
        "    jnp.ones(3) + 1\n"
        "    with vj.bridge(vecenv.AsyncVectorEnv(make_fns(2), context='forkserver')) as env:\n"
        "        env.step(env.reset(jax.random.key(0)), jnp.zeros(2, int))\n"
    )
    run = subprocess.run(
        [sys.executable, "-W", "error", "-c", code, str(HERE)], capture_output=True, text=True, timeout=250, check=False
    )
    assert run.returncode == 0, run.stderr[-2000:]
    assert "Warning" not in run.stderr
