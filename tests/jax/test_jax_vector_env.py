"""``JaxVectorEnv``: results, seeds, chunks, array types, errors, evaluations and snapshots."""

from __future__ import annotations

import collections
import contextlib
import copy
import importlib
import logging
import pickle
import signal
import sys
from collections.abc import Callable
from typing import Any, ClassVar

import gymnasium as gym
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from contract.jax_env import Walk
from forks import run_in_fork
from gymnasium.error import AlreadyPendingCallError, ClosedEnvironmentError, ResetNeeded
from gymnasium.vector import AutoresetMode, VectorEnv
from jax_envs import Counter, FakeGymnaxEnv, FakeJumanjiEnv, GymEnv, Switch, make_sync
from signals import Alarm, signal_handler

import vecenv
from vecenv.backends import JaxVectorEnv, jax_native
from vecenv.errors import ForkedError, SnapshotMismatch, StaleStateError, StepTimeout
from vecenv.jax import FunctionalVectorEnv, adapt, available_envs
from vecenv.jax.interop import seed_keys
from vecenv.state.snapshots import Snapshot
from vecenv.testing.contract import VectorEnvContract, assert_identical, assert_same_trajectory

# --- ``JaxVectorEnv`` equals ``SyncVectorEnv`` over the same environment bit for bit --------------

MODES = list(AutoresetMode)
PUSH = np.full((5, 1), 0.6, np.float32)


@pytest.mark.long
class TestContractOverCounter(VectorEnvContract):
    """The contract with dict observations, nested infos, random starts and steps, terminations and truncations."""

    _compiled: ClassVar[dict[Any, FunctionalVectorEnv]] = {}

    def build(self) -> Any:
        return Counter()

    def make(self, num_envs: int = 3, autoreset_mode: Any = AutoresetMode.NEXT_STEP, **kwargs: Any) -> Any:
        key = (type(self), num_envs, autoreset_mode)
        if key not in self._compiled:
            self._compiled[key] = FunctionalVectorEnv(self.build(), num_envs, autoreset_mode)
        return JaxVectorEnv(self._compiled[key], **kwargs)


# -- against SyncVectorEnv -----------------------------------------------------------------------------------------


def make_brax_env(name: str) -> Any:
    pytest.importorskip("brax", reason="needs Brax")
    return adapt(name, backend="spring")


def make_library_env(library: str, name: str, reason: str) -> Any:
    return adapt(pytest.importorskip(library, reason=reason).make(name))


NO_GYMNAX = "needs gymnax, which requires an older Gymnasium: nox -s gymnax"
SMALL_ENVS: list[Any] = [Counter, Switch, FakeGymnaxEnv, FakeJumanjiEnv]
LIBRARY_ENVS = {  # name -> (function that builds an environment, time limit)
    "inverted_pendulum": (lambda get_asymmetric_env: make_brax_env("inverted_pendulum"), 20),
    "ant": (lambda get_asymmetric_env: make_brax_env("ant"), 15),
    "playground": (lambda get_asymmetric_env: adapt(get_asymmetric_env()), 15),
    "gymnax": (lambda get_asymmetric_env: make_library_env("gymnax", "CartPole-v1", NO_GYMNAX), 15),
    "jumanji": (lambda get_asymmetric_env: make_library_env("jumanji", "Snake-v1", "needs jumanji"), 15),
}


def assert_equals_sync(env: Any, limit: int | None, mode: AutoresetMode) -> None:
    envs = JaxVectorEnv(env, 3, autoreset_mode=mode, max_episode_steps=limit)
    reference = make_sync(GymEnv(env, max_episode_steps=limit, lanes=3), 3, autoreset_mode=mode)
    assert_same_trajectory(envs, reference, 60, seed=3)
    envs.close()
    reference.close()


@pytest.mark.long
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("env", SMALL_ENVS)
def test_small_environments_equal_sync_vector_env(env: Any, mode: AutoresetMode) -> None:
    assert_equals_sync(adapt(env()), None, mode)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", LIBRARY_ENVS)
def test_library_environments_equal_sync_vector_env(request: Any, name: str, mode: AutoresetMode) -> None:
    make, limit = LIBRARY_ENVS[name]
    assert_equals_sync(make(lambda: request.getfixturevalue("asymmetric_env")), limit, mode)


@pytest.mark.long
def test_max_episode_steps_equals_the_time_limit_wrapper() -> None:
    envs = JaxVectorEnv(Counter(), 3, max_episode_steps=4)
    single = GymEnv(Counter(), max_episode_steps=-1)
    limited = [lambda: gym.wrappers.TimeLimit(single.clone(), 4)] * 3
    reference = gym.vector.SyncVectorEnv(limited)
    assert_same_trajectory(envs, reference, 40, seed=3)


# -- seeds, masks --------------------------------------------------------------------------------------------------


@pytest.fixture
def make(make_counters: Any) -> Callable[..., JaxVectorEnv]:
    """Return a function that builds a vector of :class:`Counter` environments and resets it with ``seed``."""

    def build(num_envs: int = 5, *, mode: Any = "NextStep", seed: int | None = 0, **options: Any) -> JaxVectorEnv:
        envs = JaxVectorEnv(make_counters(num_envs, autoreset_mode=mode), **options)
        if seed is not None:
            envs.reset(seed=seed)
        return envs

    return build


def collect_positions(envs: Any, steps: int, row: int) -> list[Any]:
    """Step all rows with the same action, and return the positions of one row."""
    return [copy.deepcopy(envs.step(np.full((envs.num_envs, 1), 0.4, np.float32))[0]["position"][row]) for _ in range(steps)]


def test_reset_without_a_seed_starts_the_next_episode(make: Any) -> None:
    one, other, another = make(seed=1), make(seed=1), make(seed=None)
    second = one.reset()[0]
    assert_identical(other.reset()[0], second)
    assert one.np_random_seed == (1, 2, 3, 4, 5)
    assert not np.array_equal(make(seed=None).reset()[0]["position"], another.reset()[0]["position"])


def test_reset_accepts_seeds_for_masked_rows_and_large_seeds(make: Any) -> None:
    envs = make(seed=0)
    envs.reset(seed=10, options={"reset_mask": np.array([True, False, True, False, False])})
    assert envs.np_random_seed == (10, 1, 12, 3, 4)
    low, high = envs.reset(seed=3)[0], envs.reset(seed=3 + 2**32)[0]
    assert (low["position"] != high["position"]).all()
    for wrong in (-1, 2**64):
        with pytest.raises(gym.error.Error, match="Seed must be"):
            envs.reset(seed=wrong)


@pytest.mark.parametrize(
    "call",
    [
        lambda e: e.step(PUSH),
        lambda e: e.state,
        lambda e: e.step_chunk(PUSH[None]),
        lambda e: e.save(),
        lambda e: e.reset(seed=3, options={"reset_mask": np.arange(5) < 2}),
    ],
)
def test_calls_before_the_first_full_reset_raise(make: Any, call: Any) -> None:
    envs = make(seed=None)
    with pytest.raises(ResetNeeded):
        call(envs)
    assert envs.np_random_seed == (None,) * 5
    envs.reset(seed=0)


def test_rows_without_a_loaded_state_need_a_reset(make: Any) -> None:
    other = make(seed=3)
    saved, envs = other.save(), make(seed=None, render_mode="rgb_array")
    envs.load([saved[0], saved[2]], [0, 2])
    for call in (
        lambda: envs.step(PUSH),
        lambda: envs.save([0, 1, 3, 4]),
        lambda: envs.state,
        lambda: envs.render([1, 3, 4]),
    ):
        with pytest.raises(ResetNeeded, match=r"no state was loaded into envs 1, 3-4\."):
            call()
    assert len(envs.save([2])) == len(envs.render([0])) == 1
    envs.reset(seed=3, options={"reset_mask": np.array([False, True, False, True, True])})
    assert_identical(envs.step(PUSH)[0], other.step(PUSH)[0])


# -- state, chunks, warmup -----------------------------------------------------------------------------------------


def test_state_can_be_set_repeatedly_and_in_another_vector_env(make: Any) -> None:
    envs, other = make(), make(seed=None)
    collect_positions(envs, 5, 0)
    state, numpy_state = envs.state, jax.tree.map(np.asarray, envs.state)
    expected = collect_positions(envs, 20, 1)
    for _ in range(2):
        envs.state = state
        assert_identical(collect_positions(envs, 20, 1), expected)
    other.state = numpy_state
    assert_identical(collect_positions(other, 20, 1), expected)


def test_setting_the_state_of_other_environments_raises(make: Any) -> None:
    other = JaxVectorEnv(Walk(), 5)
    other.reset(seed=0)
    envs = make()
    expected = np.asarray(envs.state.obs["position"])
    for target in (envs, JaxVectorEnv(envs.functional)):
        with pytest.raises(ValueError, match="belongs to other environments"):
            target.state = other.state
    assert_identical(np.asarray(envs.state.obs["position"]), expected)
    other.close()


def test_use_of_a_donated_state_raises(make: Any) -> None:
    envs = make()
    state = envs.state
    envs.functional.step_donating(state, PUSH)
    with pytest.raises(StaleStateError, match="copy"):
        envs.state = state
    for step in (envs.functional.step, envs.functional.step_donating):
        with pytest.raises(StaleStateError, match="donated"):
            step(state, PUSH)
    with pytest.raises(StaleStateError, match="donated"):
        envs.functional.reset_mask(state, np.ones(envs.num_envs, np.bool_))


@pytest.mark.long
@pytest.mark.parametrize("to", ["numpy", "jax"])
def test_step_chunk_equals_single_steps(make: Any, to: str) -> None:
    one, many = make(), make(to=to)
    actions = np.random.default_rng(0).uniform(-1, 2, (30, 5, 1)).astype(np.float32)
    chunk = many.step_chunk(actions)
    for t in range(30):
        step = one.step(actions[t])
        for found, expected in zip(chunk[:4], step[:4], strict=True):
            jax.tree.map(lambda x, y, t=t: np.testing.assert_array_equal(x[t], y), found, expected)
    assert not chunk[4]["valid"].all()
    step = many.step(actions[0])
    np.testing.assert_array_equal(np.asarray(step[0]["position"]), one.step(actions[0])[0]["position"])


def test_step_chunk_returns_observations_with_the_dtypes_of_the_space() -> None:
    with contextlib.closing(JaxVectorEnv(Switch(), 2)) as envs:
        envs.reset(seed=0)
        observations, rewards, *_, infos = envs.step_chunk(np.ones((3, 2), np.int64))
    assert (observations.dtype, infos["next_obs"].dtype, rewards.dtype) == (np.int64, np.int64, np.float64)
    assert observations.tolist() == infos["next_obs"].tolist() == [[1, 1]] * 3


@pytest.mark.long
def test_warmup_returns_compile_times_and_changes_no_state() -> None:
    envs = JaxVectorEnv(Counter(), 2)
    observations, _ = envs.reset(seed=4)
    seconds = envs.warmup(chunk=3)
    assert set(seconds) == {"reset", "step", "step_chunk(3)"}
    assert all(value > 0 for value in seconds.values())
    assert_identical(jax.tree.map(np.asarray, envs.state.obs["position"]), observations["position"])
    assert envs.np_random_seed == (4, 5)
    assert (envs.stats()["steps"], envs.stats()["resets"]) == (0, 2)


def test_render_returns_frames_of_the_given_rows(make: Any) -> None:
    envs = make(render_mode="rgb_array")
    envs.step(PUSH)
    frames = envs.render([0, 3])
    assert [frame.tolist() for frame in frames] == [np.full((2, 2, 3), 1).tolist()] * 2
    assert len(envs.render()) == 5
    for wrong in (5, -1):
        with pytest.raises(ValueError, match=rf"indices must be within 0\.\.4, got \[0, {wrong}\]"):
            envs.render([0, wrong])
    assert make().render() is None


# -- the three kinds of arrays -------------------------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.parametrize("mode", MODES)
def test_jax_arrays_equal_numpy_arrays(make: Any, mode: AutoresetMode) -> None:
    host, device = make(mode=mode), make(mode=mode, to="jax")
    first = device.reset(seed=0)[0]["position"]
    first_copy = np.array(first)
    for _ in range(12):
        expected, found = host.step(PUSH), device.step(jnp.asarray(PUSH))
        for one, other in zip(expected[:4], found[:4], strict=True):
            jax.tree.map(np.testing.assert_array_equal, one, jax.tree.map(np.asarray, other))
        infos = found[4]
        assert isinstance(infos["position"], jax.Array)
        if "_position" in expected[4]:
            np.testing.assert_array_equal(expected[4]["_position"], infos["_position"])
        if "final_obs" in expected[4]:
            for row in np.flatnonzero(expected[4]["_final_obs"]):
                final = jax.tree.map(lambda x, row=row: np.asarray(x)[row], infos["final_obs"])
                jax.tree.map(np.testing.assert_array_equal, expected[4]["final_obs"][row], final)
    np.testing.assert_array_equal(first, first_copy)  # steps do not write into returned arrays


@pytest.mark.long
def test_reset_mask_can_be_a_jax_array_and_stays_in_the_options(make: Any) -> None:
    envs = make(3, mode="Disabled", to="jax")
    for _ in range(2):
        envs.step(np.ones((3, 1), np.float32))
    observations, _ = envs.reset(options={"reset_mask": jnp.array([False, True, False])})
    assert observations["step"].tolist() == [2, 0, 2]
    with pytest.raises(TypeError, match=r"dtype=np\.bool_"):
        envs.reset(options={"reset_mask": jnp.ones(3)})
    wrapped = gym.wrappers.vector.RecordEpisodeStatistics(make())
    wrapped.reset(seed=0)
    wrapped.step(PUSH)
    wrapped.reset(options={"reset_mask": np.arange(5) < 2})
    assert wrapped.episode_lengths.tolist() == [0, 0, 1, 1, 1]


def test_statistics_count_an_episode_once_if_steps_follow_its_end() -> None:
    envs = vecenv.wrappers.RecordEpisodeStatistics(JaxVectorEnv(Walk(), 2, autoreset_mode="Disabled", max_episode_steps=3))
    envs.reset(seed=0)
    for _ in range(5):  # the last two do not change the environments
        envs.step(np.zeros((2, 1), np.float32))
    assert list(envs.length_queue) == [3, 3]
    envs.reset(options={"reset_mask": np.array([True, False])})
    for _ in range(3):
        *_, infos = envs.step(np.zeros((2, 1), np.float32))
    assert infos["_episode"].tolist() == [True, False]
    assert list(envs.length_queue) == [3, 3, 3]
    envs.close()


# -- bad input -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("actions", "error", "text"),
    [
        (np.zeros((4, 1), np.float32), ValueError, "(4, 1)"),
        (np.zeros((5, 2), np.float32), ValueError, "(5, 1)"),
        (np.zeros(5, np.float32), ValueError, "shape (5,)"),
        (np.zeros((5, 1), complex), TypeError, "complex128"),
        (np.full((5, 1), "x"), TypeError, "float32"),
        ([[0.0]] * 4, ValueError, "(4, 1)"),
    ],
)
def test_step_with_wrong_actions_raises_and_steps_nothing(make: Any, actions: Any, error: Any, text: str) -> None:
    envs = make()
    with pytest.raises(error) as caught:
        envs.step(actions)
    assert text in str(caught.value)
    assert np.asarray(envs.state.steps).tolist() == [0] * 5


@pytest.mark.long
def test_lists_are_valid_actions_and_float64_is_valid_only_for_box_spaces(make: Any) -> None:
    one, other = make(), make()
    assert_identical(one.step([[0.5]] * 5), other.step(np.full((5, 1), 0.5)))
    envs = JaxVectorEnv(Switch(), 2)
    envs.reset(seed=0)
    with pytest.raises(TypeError, match="float64"):
        envs.step(np.zeros(2))
    assert envs.step([0, 1])[0].tolist() == [0, 1]


class DictActionWalk(Walk):
    single_action_space = gym.spaces.Dict(b=gym.spaces.Discrete(2), a=Walk.single_action_space)

    def step(self, state: Any, action: Any, key: Any) -> Any:
        return super().step(state, action["a"], key)


def test_step_accepts_an_ordered_dict_of_actions() -> None:
    functional = FunctionalVectorEnv(DictActionWalk(), 2)
    one, other = JaxVectorEnv(functional), JaxVectorEnv(functional)
    one.reset(seed=0)
    other.reset(seed=0)
    actions = {"a": np.full((2, 1), 0.5, np.float32), "b": np.zeros(2, np.int64)}
    assert_identical(one.step(collections.OrderedDict(actions)), other.step(actions))
    one.close()
    other.close()


@pytest.mark.parametrize("generator", ["threefry2x32", "rbg", "unsafe_rbg"])
def test_seed_keys_equals_keys_of_the_default_generator(generator: str) -> None:
    with jax.default_prng_impl(generator):
        for seed in (0, 5, 2**32 - 1):
            np.testing.assert_array_equal(seed_keys([seed])[0], jax.random.key_data(jax.random.key(seed)))
        assert len({*map(tuple, seed_keys([5, 5 + 2**32, 6]).tolist())}) == 3


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"to": "cupy"}, ValueError, "'numpy', 'jax' or 'torch'"),
        ({"num_envs": 0}, ValueError, "num_envs"),
        ({"backend": "spring"}, TypeError, "backend"),
        ({"render_mode": "human"}, ValueError, "render_mode"),
    ],
)
def test_close_after_a_failed_constructor_works(make_counters: Any, options: Any, error: Any, text: str) -> None:
    envs = JaxVectorEnv.__new__(JaxVectorEnv)
    with pytest.raises(error, match=text):
        envs.__init__(Counter(), **options)  # type: ignore[misc]
    envs.close()
    assert repr(envs) == "JaxVectorEnv(closed)"
    with pytest.raises(ValueError, match="already has its options"):
        JaxVectorEnv(make_counters(), 3)
    with pytest.raises(ValueError, match="library='brax'"):
        JaxVectorEnv(make_counters(), library="brax")


@pytest.mark.parametrize("missing", ["jax", "torch"])
def test_import_of_vecenv_torch_names_the_missing_package(missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "vecenv.torch", raising=False)
    monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(ImportError, match=rf"but {missing} is not installed: pip install -e '.\[jax\]' torch"):
        importlib.import_module("vecenv.torch")


def test_constructor_with_tensors_without_torch_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(ImportError, match="pip install torch"):
        JaxVectorEnv(Counter(), to="torch")


# -- calls that only JaxVectorEnv has are guarded like all others (see tests/contract) -------------------------------------

JAX_ONLY_CALLS: dict[str, Callable[[Any], Any]] = {
    "state": lambda e: e.state, "step_chunk": lambda e: e.step_chunk(PUSH[None]), "warmup": lambda e: e.warmup(),
    "render": lambda e: e.render(),
}  # fmt: skip


@pytest.mark.parametrize("begin", ["step_async", "send"])
def test_jax_only_calls_during_a_pending_step_raise_and_change_nothing(make: Any, begin: str) -> None:
    one, other = make(render_mode="rgb_array"), make()
    getattr(one, begin)(PUSH)
    text = "while waiting for a pending call to `step`" if begin == "step_async" else "while 5 environments are in flight"
    for name, call in JAX_ONLY_CALLS.items():
        with pytest.raises(AlreadyPendingCallError, match=f"Calling `{name}` {text}"):
            call(one)
    result = one.step_wait() if begin == "step_async" else one.recv()
    assert_identical(result[:4], other.step(PUSH)[:4])


@pytest.mark.filterwarnings("ignore:os.fork:RuntimeWarning", "ignore:.*fork.*:DeprecationWarning")
def test_jax_only_calls_in_a_forked_child_and_after_close_raise(make: Any) -> None:
    envs = make(render_mode="rgb_array")

    def assert_calls_raise(error: type[Exception]) -> None:
        for call in JAX_ONLY_CALLS.values():
            with pytest.raises(error):
                call(envs)

    assert run_in_fork(lambda: assert_calls_raise(ForkedError)) == 0
    envs.step(PUSH)
    envs.close()
    assert_calls_raise(ClosedEnvironmentError)
    assert "closed" in repr(envs)


def test_capabilities_and_stats_after_a_chunk(make: Any) -> None:
    envs = make()
    expected = "jax: timeouts, row_seeds, reset_mask, masked_seeds, snapshots, in_this_process, runs_jax"
    assert str(envs.capabilities) == expected
    envs.step_chunk(np.broadcast_to(PUSH, (3, 5, 1)))
    assert (envs.stats()["steps"], envs.stats()["resets"]) == (15, 5)
    assert 0 <= envs.stats()["wait_fraction"] < 1


class SlowCounter(Counter):
    def step(self, state: Any, action: Any, key: Any) -> Any:
        work = jax.lax.fori_loop(0, 300, lambda _, m: jnp.tanh(m @ m), jnp.ones((300, 300)) * action[0])
        return super().step({**state, "x": state["x"] + 0 * work[0, 0]}, action, key)


@pytest.mark.long
def test_waiting_for_the_device_counts_as_step_time() -> None:
    envs = JaxVectorEnv(SlowCounter(), 2)
    envs.reset(seed=0)
    envs.step_async(PUSH[:2])
    with pytest.raises(StepTimeout, match="`step_wait` has timed out"):
        envs.step_wait(timeout=0.0)
    envs.step_wait(timeout=60)
    assert envs.stats()["wait_fraction"] > 0


class RaisingCounter(Counter):
    """An environment that raises in the step after its position has exceeded 1.5."""

    def step(self, state: Any, action: Any, key: Any) -> Any:
        def check_position(x: Any) -> Any:
            if x > 1.5:
                raise ZeroDivisionError("beyond")
            return x

        x = jax.pure_callback(check_position, jax.ShapeDtypeStruct((), jnp.float32), state["x"], vmap_method="sequential")
        return super().step({**state, "x": x}, action, key)


@pytest.mark.long
def test_reset_after_an_error_of_an_environment_recovers() -> None:
    envs = JaxVectorEnv(RaisingCounter(), 2)
    envs.reset(seed=0)
    envs.step(np.full((2, 1), 2, np.float32))
    with pytest.raises((RuntimeError, ValueError), match="beyond"):  # JAX raises one or the other
        envs.step(np.zeros((2, 1), np.float32))
    with pytest.raises(ResetNeeded):
        envs.step(np.zeros((2, 1), np.float32))
    envs.reset(seed=0)
    assert envs.step(np.zeros((2, 1), np.float32))[4]["deep"]["step"].tolist() == [1, 1]


@pytest.mark.long
@pytest.mark.parametrize("recovers_by", ["reset", "load"])
def test_error_that_was_raised_while_the_program_went_on_ends_with_reset_or_load(
    caplog: pytest.LogCaptureFixture, recovers_by: str
) -> None:
    caplog.set_level(logging.CRITICAL, "jax._src.callback")  # a log record would register a thread of JAX's pool
    envs = JaxVectorEnv(RaisingCounter(), 2, to="jax")
    envs.reset(seed=0)
    saved = envs.save()
    envs.step(jnp.zeros((2, 1)))  # compiles the step
    slow: Any = jax.jit(lambda x: jax.lax.fori_loop(0, 300, lambda _, y: jnp.tanh(y @ y), x)[:2, :1])
    slow(jnp.ones((400, 400))).block_until_ready()
    pushes = slow(jnp.ones((400, 400))) * 0 + 2  # not yet computed when the steps begin, so JAX queues them

    def step_twice() -> None:
        for _ in range(2):
            observations = envs.step(pushes)[0]
        np.asarray(observations["position"])

    with pytest.raises((RuntimeError, ValueError), match=r"beyond|Error dispatching"):
        step_twice()
    observations = envs.load(saved) if recovers_by == "load" else envs.reset(seed=0)[0]
    assert np.asarray(observations["step"]).tolist() == [0, 0]
    assert np.asarray(envs.step(jnp.zeros((2, 1)))[0]["step"]).tolist() == [1, 1]


# -- by name -------------------------------------------------------------------------------------------------------


@pytest.mark.long
def test_constructor_with_a_name_builds_the_environment(pendulum: Any) -> None:
    del pendulum  # requested only because it skips the test without Brax
    envs = JaxVectorEnv("inverted_pendulum", 2, library="brax", to="jax", backend="spring")
    assert isinstance(envs, VectorEnv)
    assert envs.num_envs == 2
    assert envs.functional.max_episode_steps == 1000
    assert envs.single_action_space == gym.spaces.Box(-1, 1, (1,), np.float32)
    assert "ant" in available_envs("brax")["brax"]
    assert repr(envs) == "JaxVectorEnv(InvertedPendulum, num_envs=2, to='jax', autoreset_mode=NEXT_STEP, before reset)"


# --- ``vecenv.evaluate`` over JAX-native environments, and with policies that are JAX functions --


@jax.jit
def policy(observations: Any) -> Any:
    return jnp.tanh(observations[:, :1]) * 0.5


@pytest.mark.sampled("jax")
@pytest.mark.parametrize("to", ["numpy", "jax"])
def test_evaluate_is_independent_of_the_number_of_rows(to: str) -> None:
    found = []
    for num_envs in (1, 3):
        envs = JaxVectorEnv(FunctionalVectorEnv(Walk(0), num_envs), to=to)
        results = vecenv.evaluate(envs, policy, 5, seed=3, batch="padded", arrays="jax")
        found.append([(result.index, result.seed, result.episode_return, result.length) for result in results])
        envs.close()
    assert found[0] == found[1]
    assert all(length > 1 for _, _, _, length in found[0])


@pytest.mark.long
@pytest.mark.parametrize(
    ("to", "mode"), [("numpy", AutoresetMode.NEXT_STEP), ("jax", AutoresetMode.SAME_STEP), ("jax", AutoresetMode.DISABLED)]
)
def test_evaluate_from_snapshots_equals_whole_episodes(to: str, mode: AutoresetMode) -> None:
    """Each episode makes two steps before its snapshot, and the evaluation runs the remaining steps."""
    source = JaxVectorEnv(FunctionalVectorEnv(Walk(0), 5, autoreset_mode=mode), to=to)
    whole = vecenv.evaluate(source, policy, 5, seed=3, batch="padded", arrays="jax")
    observations, _ = source.reset(seed=3)
    before = np.zeros(5)
    for _ in range(2):
        observations, rewards, *flags, _ = source.step(np.asarray(policy(observations)))
        before += np.asarray(rewards)
        assert not np.any(flags), "walks must be longer than two steps"
    snapshots = source.save()
    source.close()
    for num_envs in (1, 3):
        envs = JaxVectorEnv(FunctionalVectorEnv(Walk(0), num_envs, autoreset_mode=mode), to=to)
        episodes = [*snapshots, vecenv.Episode(seed=whole[1].seed)]
        *rest, from_reset = vecenv.evaluate(envs, policy, episodes, seed=3, batch="padded", arrays="jax")
        assert [result.length + 2 for result in rest] == [result.length for result in whole]
        assert [result.seed for result in rest] == [None] * 5
        assert np.allclose([result.episode_return for result in rest] + before, [result.episode_return for result in whole])
        assert (from_reset.episode_return, from_reset.length) == (whole[1].episode_return, whole[1].length)
        envs.close()


# --- Snapshots of JAX-native environments ---------------------------------------------------------


class Constants:
    """Constants like the arrays that MJX keeps outside of the state: equal by content, but with an address in their repr."""

    def __init__(self, content: tuple[int, ...]) -> None:
        self.content = content

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Constants) and self.content == other.content

    def __hash__(self) -> int:
        return hash(self.content)


class WalkState:
    def __init__(self, position: Any, constants: Constants) -> None:
        self.position, self.constants = position, constants


jax.tree_util.register_pytree_node(
    WalkState, lambda node: ((node.position,), node.constants), lambda constants, leaves: WalkState(leaves[0], constants)
)


class ConstantsWalk(Walk):
    def init(self, key: Any) -> Any:
        position, observation = super().init(key)
        return WalkState(position, Constants((1, 2))), observation

    def step(self, state: Any, action: Any, key: Any) -> Any:
        position, *rest = super().step(state.position, action, key)
        return (WalkState(position, Constants((1, 2))), *rest)


def test_snapshot_with_constants_can_be_loaded_into_another_vector_env() -> None:
    one, other = (JaxVectorEnv(FunctionalVectorEnv(ConstantsWalk(), 2)) for _ in range(2))
    one.reset(seed=3)
    other.reset(seed=4)
    actions = jnp.full((2, 1), 0.5)
    one.step(actions)
    other.load(one.save())
    assert np.array_equal(one.step(actions)[0], other.step(actions)[0])
    one.close()
    other.close()


class KeyWalk(Walk):
    """A walk with a typed random key in its state."""

    def init(self, key: Any) -> Any:
        position, observation = super().init(key)
        return (position, jax.random.wrap_key_data(key)), observation

    def step(self, state: Any, action: Any, key: Any) -> Any:
        position, *rest = super().step(state[0], action + jax.random.uniform(state[1]), key)
        return ((position, jax.random.split(state[1])[0]), *rest)


def test_snapshot_restores_typed_random_keys() -> None:
    functional = FunctionalVectorEnv(KeyWalk(), 2)
    one, other = JaxVectorEnv(functional), JaxVectorEnv(functional)
    one.reset(seed=3)
    other.reset(seed=4)
    actions = jnp.full((2, 1), 0.5)
    one.step(actions)
    other.load(one.save())
    for _ in range(3):
        assert np.array_equal(one.step(actions)[0], other.step(actions)[0])
    one.close()
    other.close()


class ScaledWalk(Walk):
    """A walk with its speed as an attribute."""

    def __init__(self, speed: float) -> None:
        super().__init__()
        self.speed = speed

    def step(self, state: Any, action: Any, key: Any) -> Any:
        return super().step(state, action * self.speed, key)


@pytest.mark.parametrize(
    ("one", "other", "text"),
    [
        (
            {"env": ScaledWalk(1.0)},
            {"env": ScaledWalk(2.0)},
            r"made with ScaledWalk.speed=1.0, and this one with ScaledWalk.speed=2.0",
        ),
        ({"max_episode_steps": 5}, {"max_episode_steps": 9}, r"max_episode_steps=5, and this one with max_episode_steps=9"),
    ],
)
def test_load_into_different_environments_names_the_difference(one: Any, other: Any, text: str) -> None:
    defaults = {"env": Walk(), "num_envs": 2}
    first, second = (JaxVectorEnv(FunctionalVectorEnv(**{**defaults, **options})) for options in (one, other))
    first.reset(seed=3)
    second.reset(seed=4)
    with pytest.raises(SnapshotMismatch, match=text):
        second.load(first.save())
    first.close()
    second.close()


class SignalOnUnpickling:
    """A number that raises a signal when it is first unpickled."""

    raised = False

    def __init__(self, number: Any) -> None:
        self.number = number

    def __reduce__(self) -> Any:
        return _unpickle_number, (self.number,)


def _unpickle_number(number: Any) -> Any:
    if not SignalOnUnpickling.raised:
        SignalOnUnpickling.raised = True
        signal.raise_signal(signal.SIGUSR2)
    return number


def test_interrupted_load_raises_and_can_be_repeated(closes: Any) -> None:
    envs = closes(JaxVectorEnv(FunctionalVectorEnv(Walk(), 2)))
    envs.reset(seed=3)
    snapshots = envs.save()
    (seed, leaves), row = pickle.loads(snapshots[1].body), snapshots[1].row
    snapshots = (snapshots[0], Snapshot.of(row.kind, pickle.dumps((SignalOnUnpickling(seed), leaves))))
    actions = jnp.full((2, 1), 0.5)
    expected = np.asarray(envs.step(actions)[0])
    with signal_handler(signal.SIGUSR2, Alarm), pytest.raises(Alarm):
        envs.load(snapshots)
    envs.load(snapshots)
    assert np.array_equal(envs.step(actions)[0], expected)


def test_changes_of_a_returned_dict_do_not_change_the_environments(make: Any) -> None:
    envs, reference = make(to="jax"), make(to="jax")
    for instance in (envs, reference):
        observations = instance.step(PUSH)[0]
        if instance is envs:
            del observations["position"]
    mask = np.arange(envs.num_envs) == 1
    expected = reference.reset(options={"reset_mask": mask})[0]
    assert_identical(envs.reset(options={"reset_mask": mask})[0], expected)


def test_reset_is_needed_after_an_interrupted_step_chunk(closes: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    envs, actions = closes(JaxVectorEnv(FunctionalVectorEnv(Walk(), 2))), np.full((3, 2, 1), 0.5, np.float32)
    observations, _ = envs.reset(seed=3)
    monkeypatch.setattr(jax_native, "to_numpy", interrupt)
    with pytest.raises(KeyboardInterrupt):
        envs.step_chunk(actions)
    monkeypatch.undo()
    for call in (lambda: envs.step_chunk(actions), lambda: envs.step(actions[0])):
        with pytest.raises(ResetNeeded):
            call()
    np.testing.assert_array_equal(envs.reset(seed=3)[0], observations)
    envs.step_chunk(actions)


@pytest.mark.parametrize("call", ["step", "step_chunk"])
def test_actions_overwritten_after_a_call_do_not_change_its_results(call: str) -> None:
    envs = JaxVectorEnv(Walk(), num_envs=20_000, to="jax")
    shape = (20_000, 1) if call == "step" else (16, 20_000, 1)

    def run_call(overwrite: bool) -> np.ndarray[Any, Any]:
        envs.reset(seed=0)
        memory = np.ones(int(np.prod(shape)) + 16, np.float32)
        start = -memory.ctypes.data % 64 // 4  # JAX shares only memory at a multiple of 64 bytes
        actions = memory[start : start + int(np.prod(shape))].reshape(shape)
        result = getattr(envs, call)(actions)
        if overwrite:
            actions[:] = -1
        return np.array(result[0])

    expected = run_call(overwrite=False)
    for _ in range(10):
        np.testing.assert_array_equal(run_call(overwrite=True), expected)
