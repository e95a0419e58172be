"""``JaxVectorEnv`` is a Gymnasium vector env, and equals ``SyncVectorEnv`` over the same environment bit for bit."""

from __future__ import annotations

import copy
import gc
import importlib
import sys
from typing import Any, ClassVar

import gymnasium as gym
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gymnasium.error import ClosedEnvironmentError, ResetNeeded
from gymnasium.vector import AutoresetMode, VectorEnv
from jax_envs import Counter, Jumanji, NewGymnax, OldGymnax, Switch, sync

from vecenv.backends.jax_native import JaxVectorEnv, make_jax_vec
from vecenv.errors import StaleStateError
from vecenv.jax import FunctionalVectorEnv, GymEnv, adapt, available_envs
from vecenv.testing.contract import VectorEnvContract, assert_identical, assert_same_trajectory

MODES = list(AutoresetMode)


@pytest.mark.long
class TestContractOverCounter(VectorEnvContract):
    """Dict observations, nested infos, random start states, random steps, ends of both kinds."""

    _compiled: ClassVar[dict[Any, FunctionalVectorEnv]] = {}

    def build(self) -> Any:
        return Counter()

    def make(self, num_envs: int = 3, autoreset_mode: Any = AutoresetMode.NEXT_STEP, **kwargs: Any) -> Any:
        key = (type(self), num_envs, autoreset_mode)
        if key not in self._compiled:
            self._compiled[key] = FunctionalVectorEnv(self.build(), num_envs, autoreset_mode)
        return JaxVectorEnv(self._compiled[key], **kwargs)


@pytest.mark.long
class TestContractOverSwitch(TestContractOverCounter):
    """Discrete actions and observations, no infos."""

    def build(self) -> Any:
        return Switch()


@pytest.mark.slow
@pytest.mark.timeout(600)
class TestContractOverPendulum(TestContractOverCounter):
    """Real physics."""

    def build(self) -> Any:
        pytest.importorskip("brax", reason="needs Brax")
        return adapt("inverted_pendulum", backend="spring", max_episode_steps=20)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("mode", [AutoresetMode.NEXT_STEP, AutoresetMode.SAME_STEP])
def test_thousands_of_episodes_of_real_physics_leave_nothing(pendulum: Any, mode: AutoresetMode) -> None:
    psutil = pytest.importorskip("psutil", reason="needs psutil")
    envs = JaxVectorEnv(pendulum, 64, autoreset_mode=mode, max_episode_steps=5)
    still = np.zeros(envs.action_space.shape, np.float32)

    def measure() -> tuple[int, int, int]:
        gc.collect()
        return psutil.Process().memory_info().rss, len(jax.live_arrays()), envs.functional._step._cache_size()

    observations, _ = envs.reset(seed=0)
    starts = [row.tobytes() for row in observations]
    begins = np.zeros(64, bool)
    for step in range(800):
        if step == 200:
            before = measure()
        observations, _, terminated, truncated, _ = envs.step(still)
        ended = terminated | truncated
        starts += [row.tobytes() for row in observations[begins if mode is AutoresetMode.NEXT_STEP else ended]]
        begins = ended
    memory, arrays, programs = (now - earlier for now, earlier in zip(measure(), before, strict=True))
    assert len(starts) > 8000
    assert len(set(starts)) == len(starts)
    assert memory < 4 << 20  # one state kept a step would make it 24 MB
    assert (arrays, programs) == (0, 0)
    envs.close()


# -- against SyncVectorEnv -----------------------------------------------------------------------------------------


def assert_equals_sync(env: Any, limit: int | None, steps: int, mode: AutoresetMode, num_envs: int = 3) -> None:
    single = GymEnv(env, max_episode_steps=limit, lanes=num_envs)
    envs = JaxVectorEnv(env, num_envs, autoreset_mode=mode, max_episode_steps=limit)
    reference = sync(single, num_envs, autoreset_mode=mode)
    assert_same_trajectory(envs, reference, steps, seed=3)
    envs.close()
    reference.close()


@pytest.mark.long
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("env", [Counter(), Switch(), NewGymnax(), OldGymnax(), Jumanji()], ids=lambda e: type(e).__name__)
def test_small_environments_equal_sync_vector_env(env: Any, mode: AutoresetMode) -> None:
    assert_equals_sync(adapt(env), None, 60, mode)


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
def test_inverted_pendulum_equals_sync_vector_env(pendulum: Any, mode: AutoresetMode) -> None:
    assert_equals_sync(pendulum, 20, 60, mode)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("mode", MODES)
def test_ant_equals_sync_vector_env(mode: AutoresetMode) -> None:
    pytest.importorskip("brax", reason="needs Brax")
    assert_equals_sync(adapt("ant", backend="spring"), 15, 60, mode)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("mode", MODES)
def test_playground_with_dict_observations_equals_sync_vector_env(asymmetric: Any, mode: AutoresetMode) -> None:
    assert_equals_sync(adapt(asymmetric), 15, 60, mode)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("mode", MODES)
def test_gymnax_equals_sync_vector_env(mode: AutoresetMode) -> None:
    gymnax = pytest.importorskip(
        "gymnax", reason="needs gymnax, which asks for an older Gymnasium: nox -s gymnax"
    )
    assert_equals_sync(adapt(gymnax.make("CartPole-v1")), 15, 60, mode)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("mode", MODES)
def test_jumanji_equals_sync_vector_env(mode: AutoresetMode) -> None:
    jumanji = pytest.importorskip("jumanji", reason="needs jumanji")
    assert_equals_sync(adapt(jumanji.make("Snake-v1")), 15, 60, mode)


@pytest.mark.long
def test_the_time_limit_is_that_of_gymnasiums_own_wrapper() -> None:
    ours = JaxVectorEnv(Counter(), 3, max_episode_steps=4)
    single = GymEnv(Counter(), max_episode_steps=-1)
    limited = [lambda: gym.wrappers.TimeLimit(single.twin(), 4)] * 3
    reference = gym.vector.SyncVectorEnv(limited)
    assert_same_trajectory(ours, reference, 40, seed=3)


# -- seeds, masks --------------------------------------------------------------------------------------------------


def trajectory(envs: Any, steps: int, row: int) -> list[Any]:
    """Row ``row`` under the same actions in every row and every vector."""
    return [copy.deepcopy(envs.step(np.full((envs.num_envs, 1), 0.4, np.float32))[0]["place"][row]) for _ in range(steps)]


@pytest.mark.long
def test_a_row_does_not_depend_on_how_many_there_are(counters: Any) -> None:
    few, many = JaxVectorEnv(counters(3)), JaxVectorEnv(counters(9))
    few.reset(seed=10)
    many.reset(seed=8)
    assert_identical(trajectory(few, 30, 0), trajectory(many, 30, 2))


def test_reset_without_a_seed_goes_on_to_the_next_episode(counters: Any) -> None:
    one, other = JaxVectorEnv(counters()), JaxVectorEnv(counters())
    first, _ = one.reset(seed=1)
    second, _ = one.reset()
    assert not np.array_equal(first["place"], second["place"])
    other.reset(seed=1)
    assert_identical(other.reset()[0], second)
    assert one.np_random_seed == (1, 2, 3, 4, 5)


def test_resets_without_any_seed_differ(counters: Any) -> None:
    one, other = JaxVectorEnv(counters()), JaxVectorEnv(counters())
    assert not np.array_equal(one.reset()[0]["place"], other.reset()[0]["place"])


def test_some_seeds_may_be_none(counters: Any) -> None:
    envs, again = JaxVectorEnv(counters()), JaxVectorEnv(counters())
    envs.reset(seed=0)
    mixed, _ = envs.reset(seed=[7, None, None, None, 8])
    fresh, _ = again.reset(seed=[7, 1, 2, 3, 8])
    assert_identical(mixed["place"][[0, 4]], fresh["place"][[0, 4]])
    assert (mixed["place"][1:4] != fresh["place"][1:4]).all()


def test_large_seeds_differ_from_their_low_halves(counters: Any) -> None:
    envs = JaxVectorEnv(counters())
    low, _ = envs.reset(seed=3)
    high, _ = envs.reset(seed=3 + 2**32)
    assert (low["place"] != high["place"]).all()


@pytest.mark.parametrize("seed", [-1, 2**64, "3"])
def test_what_is_no_seed_is_refused(counters: Any, seed: Any) -> None:
    with pytest.raises((gym.error.Error, TypeError)):
        JaxVectorEnv(counters()).reset(seed=seed)


def test_the_first_reset_cannot_be_partial(counters: Any) -> None:
    with pytest.raises(ResetNeeded, match="first reset"):
        JaxVectorEnv(counters()).reset(options={"reset_mask": np.array([True, False, False, False, False])})


# -- state, chunks, warmup -----------------------------------------------------------------------------------------


def test_a_state_is_a_checkpoint_that_can_be_returned_to_many_times(counters: Any) -> None:
    envs = JaxVectorEnv(counters())
    envs.reset(seed=0)
    trajectory(envs, 5, 0)
    kept = envs.state
    once = trajectory(envs, 20, 1)
    for _ in range(2):
        envs.state = kept
        assert_identical(trajectory(envs, 20, 1), once)


def test_a_state_survives_a_trip_through_numpy_and_into_another_vector(counters: Any) -> None:
    envs, other = JaxVectorEnv(counters()), JaxVectorEnv(counters())
    envs.reset(seed=0)
    saved = jax.tree.map(np.asarray, envs.state)
    once = trajectory(envs, 20, 1)
    other.state = saved
    assert_identical(trajectory(other, 20, 1), once)


def test_a_state_whose_arrays_are_gone_is_refused(counters: Any) -> None:
    envs = JaxVectorEnv(counters())
    envs.reset(seed=0)
    state = envs.state
    envs.functional.step_donating(state, np.zeros((5, 1), np.float32))
    with pytest.raises(StaleStateError, match="copy"):
        envs.state = state
    with pytest.raises(StaleStateError, match="donated"):
        envs.functional.step(state, np.zeros((5, 1), np.float32))
    with pytest.raises(StaleStateError, match="donated"):
        envs.functional.step_donating(state, np.zeros((5, 1), np.float32))


@pytest.mark.long
@pytest.mark.parametrize("to", ["numpy", "jax"])
def test_a_chunk_is_so_many_steps(counters: Any, to: str) -> None:
    one, many = JaxVectorEnv(counters()), JaxVectorEnv(counters(), to=to)
    one.reset(seed=0)
    many.reset(seed=0)
    actions = np.random.default_rng(0).uniform(-1, 2, (30, 5, 1)).astype(np.float32)
    chunk = many.step_chunk(actions)
    for t in range(30):
        step = one.step(actions[t])
        for mine, theirs in zip(chunk[:4], step[:4], strict=True):
            jax.tree.map(lambda x, y, t=t: np.testing.assert_array_equal(x[t], y), mine, theirs)
    assert not chunk[4]["valid"].all()
    step = many.step(actions[0])
    np.testing.assert_array_equal(np.asarray(step[0]["place"]), one.step(actions[0])[0]["place"])


@pytest.mark.long
def test_warmup_reports_compile_times_and_changes_nothing() -> None:
    envs = JaxVectorEnv(Counter(), 2)
    observations, _ = envs.reset(seed=4)
    seconds = envs.warmup(chunk=3)
    assert set(seconds) == {"reset", "step", "step_chunk(3)"}
    assert all(value > 0 for value in seconds.values())
    assert_identical(jax.tree.map(np.asarray, envs.state.obs["place"]), observations["place"])
    assert envs.np_random_seed == (4, 5)


def test_render_draws_the_chosen_environments(counters: Any) -> None:
    envs = JaxVectorEnv(counters(), render_mode="rgb_array")
    envs.reset(seed=0)
    envs.step(np.zeros((5, 1), np.float32))
    frames = envs.render([0, 3])
    assert frames is not None
    assert [frame.tolist() for frame in frames] == [np.full((2, 2, 3), 1).tolist()] * 2
    assert len(envs.render() or ()) == 5
    assert JaxVectorEnv(counters()).render() is None


# -- the three kinds of arrays -------------------------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.parametrize("mode", MODES)
def test_jax_arrays_hold_what_numpy_arrays_hold(counters: Any, mode: AutoresetMode) -> None:
    host, device = JaxVectorEnv(counters(autoreset_mode=mode)), JaxVectorEnv(counters(autoreset_mode=mode), to="jax")
    host.reset(seed=0)
    assert isinstance(device.reset(seed=0)[0]["place"], jax.Array)
    for _ in range(12):
        actions = np.full((5, 1), 0.6, np.float32)
        mine, theirs = host.step(actions), device.step(jnp.asarray(actions))
        for one, other in zip(mine[:4], theirs[:4], strict=True):
            jax.tree.map(np.testing.assert_array_equal, one, jax.tree.map(np.asarray, other))
        infos = theirs[4]
        assert isinstance(infos["place"], jax.Array)
        if "_place" in mine[4]:
            np.testing.assert_array_equal(mine[4]["_place"], infos["_place"])
        if "final_obs" in mine[4]:
            for row in np.flatnonzero(mine[4]["_final_obs"]):
                final = jax.tree.map(lambda x, row=row: np.asarray(x)[row], infos["final_obs"])
                jax.tree.map(np.testing.assert_array_equal, mine[4]["final_obs"][row], final)


def test_earlier_jax_observations_stay_as_they_were(counters: Any) -> None:
    envs = JaxVectorEnv(counters(), to="jax")
    first, _ = envs.reset(seed=0)
    kept = np.array(first["place"])
    for _ in range(3):
        envs.step(np.ones((5, 1), np.float32))
    np.testing.assert_array_equal(first["place"], kept)


def test_infos_can_be_switched_off(counters: Any) -> None:
    envs = JaxVectorEnv(counters(autoreset_mode="SameStep"), infos=False)
    envs.reset(seed=0)
    seen = [set(envs.step(np.ones((5, 1), np.float32))[4]) for _ in range(5)]
    assert set().union(*seen) == {"final_obs", "_final_obs", "final_info", "_final_info"}


# -- bad input -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("actions", "error", "words"),
    [
        (np.zeros((4, 1), np.float32), ValueError, "(4, 1)"),
        (np.zeros((5, 2), np.float32), ValueError, "(5, 1)"),
        (np.zeros(5, np.float32), ValueError, "shape (5,)"),
        (np.zeros((5, 1), complex), TypeError, "complex128"),
        (np.full((5, 1), "x"), TypeError, "float32"),
        ([[0.0]] * 4, ValueError, "(4, 1)"),
    ],
)
def test_wrong_actions_are_refused_before_anything_is_stepped(counters: Any, actions: Any, error: Any, words: str) -> None:
    envs = JaxVectorEnv(counters())
    envs.reset(seed=0)
    with pytest.raises(error) as caught:
        envs.step(actions)
    assert words in str(caught.value)
    assert np.asarray(envs.state.steps).tolist() == [0] * 5


@pytest.mark.long
def test_floats_are_no_discrete_actions() -> None:
    envs = JaxVectorEnv(Switch(), 2)
    envs.reset(seed=0)
    with pytest.raises(TypeError, match="float64"):
        envs.step(np.zeros(2))
    assert envs.step([0, 1])[0].tolist() == [0, 1]


def test_doubles_and_lists_are_taken_for_floats(counters: Any) -> None:
    one, other = JaxVectorEnv(counters()), JaxVectorEnv(counters())
    one.reset(seed=0)
    other.reset(seed=0)
    assert_identical(one.step([[0.5]] * 5), other.step(np.full((5, 1), 0.5)))


def test_step_before_reset_says_so(counters: Any) -> None:
    for call in (lambda e: e.step(np.zeros((5, 1))), lambda e: e.state, lambda e: e.step_chunk(np.zeros((2, 5, 1)))):
        with pytest.raises(ResetNeeded):
            call(JaxVectorEnv(counters()))


def test_every_call_after_close_says_so(counters: Any) -> None:
    envs = JaxVectorEnv(counters(), render_mode="rgb_array")
    envs.reset(seed=0)
    envs.close()
    for call in (lambda: envs.state, lambda: envs.send(0), envs.recv, envs.warmup, envs.render):
        with pytest.raises(ClosedEnvironmentError):
            call()
    assert "closed" in repr(envs)


def test_options_that_make_no_sense_are_refused(counters: Any) -> None:
    with pytest.raises(ValueError, match="'numpy', 'jax' or 'torch'"):
        JaxVectorEnv(Counter(), to="cupy")
    with pytest.raises(ValueError, match="num_envs"):
        JaxVectorEnv(Counter(), 0)
    with pytest.raises(TypeError, match="backend"):
        JaxVectorEnv(Counter(), 2, backend="spring")
    with pytest.raises(ValueError, match="options already"):
        JaxVectorEnv(counters(), 3)
    with pytest.raises(ValueError, match="render_mode"):
        JaxVectorEnv(Counter(), render_mode="human")


@pytest.mark.parametrize("missing", ["jax", "torch"])
def test_gradients_in_torch_say_what_to_install(missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "vecenv.torch", raising=False)
    monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(ImportError, match=rf"no {missing}: pip install 'vecenv\[jax\]' torch"):
        importlib.import_module("vecenv.torch")


def test_tensors_without_torch_are_refused_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(ImportError, match="pip install torch"):
        JaxVectorEnv(Counter(), to="torch")


# -- by name -------------------------------------------------------------------------------------------------------


@pytest.mark.long
def test_make_by_name(pendulum: Any) -> None:
    del pendulum  # only for its skip
    envs = make_jax_vec("inverted_pendulum", 2, library="brax", vector_kwargs={"to": "jax"}, backend="spring")
    assert isinstance(envs, VectorEnv)
    assert envs.num_envs == 2
    assert envs.functional.max_episode_steps == 1000
    assert envs.single_action_space == gym.spaces.Box(-1, 1, (1,), np.float32)
    assert "ant" in available_envs("brax")["brax"]
    assert repr(envs) == "JaxVectorEnv(InvertedPendulum, num_envs=2, to='jax', autoreset_mode=NEXT_STEP, before reset)"


@pytest.mark.long
def test_masks_of_jax_choose_rows_as_wrappers_that_convert_arrays_give_them() -> None:
    envs = JaxVectorEnv(Counter(), 3, to="jax", autoreset_mode="Disabled")
    envs.reset(seed=1)
    for _ in range(2):
        envs.step(np.ones((3, 1), np.float32))
    mask = jnp.array([False, True, False])
    observations, _ = envs.reset(options={"reset_mask": mask})
    assert observations["step"].tolist() == [2, 0, 2]
    with pytest.raises(TypeError, match=r"dtype=np\.bool_"):
        envs.reset(options={"reset_mask": jnp.ones(3)})
    envs.close()
