"""The vector environment over JAX-native environments, evaluation of policies in it, and its snapshots."""

from __future__ import annotations

import copy
import importlib
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
from forks import in_a_fork
from gymnasium.error import AlreadyPendingCallError, ClosedEnvironmentError, ResetNeeded
from gymnasium.vector import AutoresetMode, VectorEnv
from jax_envs import Counter, GymEnv, Gymnax, Jumanji, Switch, sync
from signals import Alarm, handled

import vecenv
from vecenv.backends import JaxVectorEnv
from vecenv.errors import ForkedError, SnapshotMismatch, StaleStateError, StepTimeout
from vecenv.jax import FunctionalVectorEnv, adapt, available_envs
from vecenv.jax.interop import seed_keys
from vecenv.state.snapshots import Snapshot
from vecenv.testing.contract import VectorEnvContract, assert_identical, assert_same_trajectory

# --- ``JaxVectorEnv`` is a Gymnasium vector env, and equals ``SyncVectorEnv`` over the same environment bit for bit

MODES = list(AutoresetMode)
PUSH = np.full((5, 1), 0.6, np.float32)


@pytest.mark.long
class TestContractOverCounter(VectorEnvContract):
    """Dict observations, nested infos, random start states, random steps, and both kinds of ends."""

    _compiled: ClassVar[dict[Any, FunctionalVectorEnv]] = {}

    def build(self) -> Any:
        return Counter()

    def make(self, num_envs: int = 3, autoreset_mode: Any = AutoresetMode.NEXT_STEP, **kwargs: Any) -> Any:
        key = (type(self), num_envs, autoreset_mode)
        if key not in self._compiled:
            self._compiled[key] = FunctionalVectorEnv(self.build(), num_envs, autoreset_mode)
        return JaxVectorEnv(self._compiled[key], **kwargs)


# -- against SyncVectorEnv -----------------------------------------------------------------------------------------


def brax(name: str) -> Any:
    pytest.importorskip("brax", reason="needs Brax")
    return adapt(name, backend="spring")


def of(library: str, name: str, why: str) -> Any:
    return adapt(pytest.importorskip(library, reason=why).make(name))


NO_GYMNAX = "needs gymnax, which asks for an older Gymnasium: nox -s gymnax"
SMALL: list[Any] = [Counter, Switch, Gymnax, Jumanji]
REAL = {  # the environment, and its time limit
    "inverted_pendulum": (lambda asymmetric: brax("inverted_pendulum"), 20),
    "ant": (lambda asymmetric: brax("ant"), 15),
    "playground": (lambda asymmetric: adapt(asymmetric()), 15),
    "gymnax": (lambda asymmetric: of("gymnax", "CartPole-v1", NO_GYMNAX), 15),
    "jumanji": (lambda asymmetric: of("jumanji", "Snake-v1", "needs jumanji"), 15),
}


def assert_equals_sync(env: Any, limit: int | None, mode: AutoresetMode) -> None:
    envs = JaxVectorEnv(env, 3, autoreset_mode=mode, max_episode_steps=limit)
    reference = sync(GymEnv(env, max_episode_steps=limit, lanes=3), 3, autoreset_mode=mode)
    assert_same_trajectory(envs, reference, 60, seed=3)
    envs.close()
    reference.close()


@pytest.mark.long
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("env", SMALL)
def test_small_environments_equal_sync_vector_env(env: Any, mode: AutoresetMode) -> None:
    assert_equals_sync(adapt(env()), None, mode)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", REAL)
def test_real_environments_equal_sync_vector_env(request: Any, name: str, mode: AutoresetMode) -> None:
    make, limit = REAL[name]
    assert_equals_sync(make(lambda: request.getfixturevalue("asymmetric")), limit, mode)


@pytest.mark.long
def test_time_limit_equals_gymnasiums_wrapper() -> None:
    ours = JaxVectorEnv(Counter(), 3, max_episode_steps=4)
    single = GymEnv(Counter(), max_episode_steps=-1)
    limited = [lambda: gym.wrappers.TimeLimit(single.twin(), 4)] * 3
    reference = gym.vector.SyncVectorEnv(limited)
    assert_same_trajectory(ours, reference, 40, seed=3)


# -- seeds, masks --------------------------------------------------------------------------------------------------


@pytest.fixture
def make(counters: Any) -> Callable[..., JaxVectorEnv]:
    """``make(num_envs=5, mode=..., seed=..., **options)``: over :class:`Counter`, reset if a seed is given."""

    def build(num_envs: int = 5, *, mode: Any = "NextStep", seed: int | None = 0, **options: Any) -> JaxVectorEnv:
        envs = JaxVectorEnv(counters(num_envs, autoreset_mode=mode), **options)
        if seed is not None:
            envs.reset(seed=seed)
        return envs

    return build


def trajectory(envs: Any, steps: int, row: int) -> list[Any]:
    """Return row ``row`` of a trajectory with the same actions in every row and every vector."""
    return [copy.deepcopy(envs.step(np.full((envs.num_envs, 1), 0.4, np.float32))[0]["place"][row]) for _ in range(steps)]


def test_reset_without_a_seed_starts_the_next_episode(make: Any) -> None:
    one, other, another = make(seed=1), make(seed=1), make(seed=None)
    second = one.reset()[0]
    assert_identical(other.reset()[0], second)
    assert one.np_random_seed == (1, 2, 3, 4, 5)
    assert not np.array_equal(make(seed=None).reset()[0]["place"], another.reset()[0]["place"])


def test_seeds_per_row_and_large_seeds(make: Any) -> None:
    envs = make(seed=0)
    envs.reset(seed=10, options={"reset_mask": np.array([True, False, True, False, False])})
    assert envs.np_random_seed == (10, 1, 12, 3, 4)
    low, high = envs.reset(seed=3)[0], envs.reset(seed=3 + 2**32)[0]
    assert (low["place"] != high["place"]).all()
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
def test_calls_that_need_a_full_reset_raise(make: Any, call: Any) -> None:
    envs = make(seed=None)
    with pytest.raises(ResetNeeded):
        call(envs)
    assert envs.np_random_seed == (None,) * 5
    envs.reset(seed=0)


def test_environments_beside_those_loaded_before_the_first_reset_need_a_reset(make: Any) -> None:
    other = make(seed=3)
    saved, envs = other.save(), make(seed=None, render_mode="rgb_array")
    envs.load([saved[0], saved[2]], [0, 2])
    calls = lambda: envs.step(PUSH), lambda: envs.save([0, 1, 3, 4]), lambda: envs.state, lambda: envs.render([1, 3, 4])
    for call in calls:
        with pytest.raises(ResetNeeded, match=r"no state was loaded into envs 1, 3-4\."):
            call()
    assert len(envs.save([2])) == len(envs.render([0])) == 1
    envs.reset(seed=3, options={"reset_mask": np.array([False, True, False, True, True])})
    assert_identical(envs.step(PUSH)[0], other.step(PUSH)[0])


# -- state, chunks, warmup -----------------------------------------------------------------------------------------


def test_state_is_a_reusable_checkpoint_for_any_vector(make: Any) -> None:
    envs, other = make(), make(seed=None)
    trajectory(envs, 5, 0)
    kept, saved = envs.state, jax.tree.map(np.asarray, envs.state)
    once = trajectory(envs, 20, 1)
    for _ in range(2):
        envs.state = kept
        assert_identical(trajectory(envs, 20, 1), once)
    other.state = saved
    assert_identical(trajectory(other, 20, 1), once)


def test_state_with_deleted_arrays_is_refused(make: Any) -> None:
    envs = make()
    state = envs.state
    envs.functional.step_donating(state, PUSH)
    with pytest.raises(StaleStateError, match="copy"):
        envs.state = state
    for step in (envs.functional.step, envs.functional.step_donating):
        with pytest.raises(StaleStateError, match="donated"):
            step(state, PUSH)


@pytest.mark.long
@pytest.mark.parametrize("to", ["numpy", "jax"])
def test_chunk_equals_that_many_steps(make: Any, to: str) -> None:
    one, many = make(), make(to=to)
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
    assert (envs.stats()["steps"], envs.stats()["resets"]) == (0, 2)


def test_render_draws_the_chosen_environments(make: Any) -> None:
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
    first = device.reset(seed=0)[0]["place"]
    kept = np.array(first)
    for _ in range(12):
        mine, theirs = host.step(PUSH), device.step(jnp.asarray(PUSH))
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
    np.testing.assert_array_equal(first, kept)  # steps do not write into returned arrays


@pytest.mark.long
def test_wrappers_of_gymnasium_give_masks_of_jax_and_find_them_after_the_reset(make: Any) -> None:
    envs = make(3, mode="Disabled", to="jax")
    for _ in range(2):
        envs.step(np.ones((3, 1), np.float32))
    observations, _ = envs.reset(options={"reset_mask": jnp.array([False, True, False])})
    assert observations["step"].tolist() == [2, 0, 2]
    with pytest.raises(TypeError, match=r"dtype=np\.bool_"):
        envs.reset(options={"reset_mask": jnp.ones(3)})
    counted = gym.wrappers.vector.RecordEpisodeStatistics(make())
    counted.reset(seed=0)
    counted.step(PUSH)
    counted.reset(options={"reset_mask": np.arange(5) < 2})
    assert counted.episode_lengths.tolist() == [0, 0, 1, 1, 1]


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
def test_wrong_actions_are_refused_before_anything_is_stepped(make: Any, actions: Any, error: Any, text: str) -> None:
    envs = make()
    with pytest.raises(error) as caught:
        envs.step(actions)
    assert text in str(caught.value)
    assert np.asarray(envs.state.steps).tolist() == [0] * 5


@pytest.mark.long
def test_doubles_and_lists_are_valid_floats_but_not_choices(make: Any) -> None:
    one, other = make(), make()
    assert_identical(one.step([[0.5]] * 5), other.step(np.full((5, 1), 0.5)))
    envs = JaxVectorEnv(Switch(), 2)
    envs.reset(seed=0)
    with pytest.raises(TypeError, match="float64"):
        envs.step(np.zeros(2))
    assert envs.step([0, 1])[0].tolist() == [0, 1]


@pytest.mark.parametrize("generator", ["threefry2x32", "rbg", "unsafe_rbg"])
def test_seeds_are_keys_of_the_default_generator(generator: str) -> None:
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
def test_invalid_options_are_refused_and_close_works(
    counters: Any, options: Any, error: Any, text: str
) -> None:
    envs = JaxVectorEnv.__new__(JaxVectorEnv)
    with pytest.raises(error, match=text):
        envs.__init__(Counter(), **options)  # type: ignore[misc]
    envs.close()
    assert repr(envs) == "JaxVectorEnv(closed)"
    with pytest.raises(ValueError, match="already has its options"):
        JaxVectorEnv(counters(), 3)
    with pytest.raises(ValueError, match="library='brax'"):
        JaxVectorEnv(counters(), library="brax")


@pytest.mark.parametrize("missing", ["jax", "torch"])
def test_gradients_in_torch_name_the_missing_package(missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "vecenv.torch", raising=False)
    monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(ImportError, match=rf"but {missing} is not installed: pip install -e '.\[jax\]' torch"):
        importlib.import_module("vecenv.torch")


def test_tensors_without_torch_are_refused_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(ImportError, match="pip install torch"):
        JaxVectorEnv(Counter(), to="torch")


# -- its own calls are guarded like those of every backend (tests/contract) ----------------------------------------

OWN_CALLS: dict[str, Callable[[Any], Any]] = {
    "state": lambda e: e.state, "step_chunk": lambda e: e.step_chunk(PUSH[None]), "warmup": lambda e: e.warmup(),
    "render": lambda e: e.render(),
}  # fmt: skip


@pytest.mark.parametrize("begin", ["step_async", "send"])
def test_calls_of_its_own_are_refused_while_a_step_is_pending_and_change_nothing(make: Any, begin: str) -> None:
    one, other = make(render_mode="rgb_array"), make()
    getattr(one, begin)(PUSH)
    text = "while waiting for a pending call to `step`" if begin == "step_async" else "for envs 0-4, still"
    for name, call in OWN_CALLS.items():
        with pytest.raises(AlreadyPendingCallError, match=f"Calling `{name}` {text}"):
            call(one)
    result = one.step_wait() if begin == "step_async" else one.recv()
    assert_identical(result[:4], other.step(PUSH)[:4])


@pytest.mark.filterwarnings("ignore:os.fork:RuntimeWarning", "ignore:.*fork.*:DeprecationWarning")
def test_calls_of_its_own_are_refused_in_a_forked_child_and_after_close(make: Any) -> None:
    envs = make(render_mode="rgb_array")

    def refused_by(error: type[Exception]) -> None:
        for call in OWN_CALLS.values():
            with pytest.raises(error):
                call(envs)

    assert in_a_fork(lambda: refused_by(ForkedError)) == 0
    envs.step(PUSH)
    envs.close()
    refused_by(ClosedEnvironmentError)
    assert "closed" in repr(envs)


def test_capabilities_and_step_count_of_a_chunk(make: Any) -> None:
    envs = make()
    able = "jax: timeouts, row_seeds, reset_mask, masked_seeds, snapshots, in_this_process, runs_jax"
    assert str(envs.capabilities) == able
    envs.step_chunk(np.broadcast_to(PUSH, (3, 5, 1)))
    assert (envs.stats()["steps"], envs.stats()["resets"]) == (15, 5)
    assert 0 <= envs.stats()["wait_fraction"] < 1


class Slow(Counter):
    def step(self, state: Any, action: Any, key: Any) -> Any:
        work = jax.lax.fori_loop(0, 300, lambda _, m: jnp.tanh(m @ m), jnp.ones((300, 300)) * action[0])
        return super().step({**state, "x": state["x"] + 0 * work[0, 0]}, action, key)


@pytest.mark.long
def test_waiting_for_the_device_counts_as_step_time() -> None:
    envs = JaxVectorEnv(Slow(), 2)
    envs.reset(seed=0)
    envs.step_async(PUSH[:2])
    with pytest.raises(StepTimeout, match="`step_wait` has timed out"):
        envs.step_wait(timeout=0.0)
    envs.step_wait(timeout=60)
    assert envs.stats()["wait_fraction"] > 0


class Raising(Counter):
    """An environment that raises in the step after the one that moved it beyond 1.5."""

    def step(self, state: Any, action: Any, key: Any) -> Any:
        def look(x: Any) -> Any:
            if x > 1.5:
                raise ZeroDivisionError("beyond")
            return x

        x = jax.pure_callback(look, jax.ShapeDtypeStruct((), jnp.float32), state["x"], vmap_method="sequential")
        return super().step({**state, "x": x}, action, key)


@pytest.mark.long
def test_vector_can_be_reset_after_an_error() -> None:
    envs = JaxVectorEnv(Raising(), 2)
    envs.reset(seed=0)
    envs.step(np.full((2, 1), 2, np.float32))
    with pytest.raises((RuntimeError, ValueError), match="beyond"):  # JAX reports it as either
        envs.step(np.zeros((2, 1), np.float32))
    with pytest.raises(ResetNeeded):
        envs.step(np.zeros((2, 1), np.float32))
    envs.reset(seed=0)
    assert envs.step(np.zeros((2, 1), np.float32))[4]["deep"]["step"].tolist() == [1, 1]


# -- by name -------------------------------------------------------------------------------------------------------


@pytest.mark.long
def test_make_by_name(pendulum: Any) -> None:
    del pendulum  # only for its skip
    envs = JaxVectorEnv("inverted_pendulum", 2, library="brax", to="jax", backend="spring")
    assert isinstance(envs, VectorEnv)
    assert envs.num_envs == 2
    assert envs.functional.max_episode_steps == 1000
    assert envs.single_action_space == gym.spaces.Box(-1, 1, (1,), np.float32)
    assert "ant" in available_envs("brax")["brax"]
    assert repr(envs) == "JaxVectorEnv(InvertedPendulum, num_envs=2, to='jax', autoreset_mode=NEXT_STEP, before reset)"


# --- ``vecenv.evaluate`` over JAX-native environments, and with policies that are JAX functions --


@jax.jit
def stop_early(observations: Any) -> Any:
    return jnp.tanh(observations[:, :1]) * 0.5


@pytest.mark.sampled("jax")
@pytest.mark.parametrize("to", ["numpy", "jax"])
def test_results_are_the_same_for_every_number_of_rows(to: str) -> None:
    found = []
    for num_envs in (1, 3):
        envs = JaxVectorEnv(FunctionalVectorEnv(Walk(0), num_envs), to=to)
        results = vecenv.evaluate(envs, stop_early, 5, seed=3, batch="padded", arrays="jax")
        found.append([(each.index, each.seed, each.episode_return, each.length) for each in results])
        envs.close()
    assert found[0] == found[1]
    assert all(each[3] > 1 for each in found[0])


@pytest.mark.long
@pytest.mark.parametrize(
    ("to", "mode"), [("numpy", AutoresetMode.NEXT_STEP), ("jax", AutoresetMode.SAME_STEP), ("jax", AutoresetMode.DISABLED)]
)
def test_episode_continues_from_a_snapshot(to: str, mode: AutoresetMode) -> None:
    """Two steps of each episode are made before; the evaluation runs the remaining ones."""
    source = JaxVectorEnv(FunctionalVectorEnv(Walk(0), 5, autoreset_mode=mode), to=to)
    whole = vecenv.evaluate(source, stop_early, 5, seed=3, batch="padded", arrays="jax")
    observations, _ = source.reset(seed=3)
    before = np.zeros(5)
    for _ in range(2):
        observations, rewards, *over, _ = source.step(np.asarray(stop_early(observations)))
        before += np.asarray(rewards)
        assert not np.any(over), "the walks are too short for this"
    snapshots = source.save()
    source.close()
    for num_envs in (1, 3):
        envs = JaxVectorEnv(FunctionalVectorEnv(Walk(0), num_envs, autoreset_mode=mode), to=to)
        episodes = [*snapshots, vecenv.Episode(seed=whole[1].seed)]
        *rest, again = vecenv.evaluate(envs, stop_early, episodes, seed=3, batch="padded", arrays="jax")
        assert [each.length + 2 for each in rest] == [each.length for each in whole]
        assert [each.seed for each in rest] == [None] * 5
        assert np.allclose([each.episode_return for each in rest] + before, [each.episode_return for each in whole])
        assert (again.episode_return, again.length) == (whole[1].episode_return, whole[1].length)
        envs.close()


# --- Snapshots of JAX-native environments fit others of their kind, whatever their states contain


class Constants:
    """Constants compared by content and shown by address, like the arrays that MJX keeps outside the state."""

    def __init__(self, content: tuple[int, ...]) -> None:
        self.content = content

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Constants) and self.content == other.content

    def __hash__(self) -> int:
        return hash(self.content)


class Place:
    def __init__(self, place: Any, constants: Constants) -> None:
        self.place, self.constants = place, constants


jax.tree_util.register_pytree_node(
    Place, lambda node: ((node.place,), node.constants), lambda constants, leaves: Place(leaves[0], constants)
)


class Placed(Walk):
    def init(self, key: Any) -> Any:
        place, seen = super().init(key)
        return Place(place, Constants((1, 2))), seen

    def step(self, state: Any, action: Any, key: Any) -> Any:
        place, *rest = super().step(state.place, action, key)
        return (Place(place, Constants((1, 2))), *rest)


def test_state_with_constants_fits_another_engine() -> None:
    one, other = (JaxVectorEnv(FunctionalVectorEnv(Placed(), 2)) for _ in range(2))
    one.reset(seed=3)
    other.reset(seed=4)
    actions = jnp.full((2, 1), 0.5)
    one.step(actions)
    other.load(one.save())
    assert np.array_equal(one.step(actions)[0], other.step(actions)[0])
    one.close()
    other.close()


class Faster(Walk):
    """An environment with its speed as an attribute."""

    def __init__(self, speed: float) -> None:
        super().__init__()
        self.speed = speed

    def step(self, state: Any, action: Any, key: Any) -> Any:
        return super().step(state, action * self.speed, key)


@pytest.mark.parametrize(
    ("one", "other", "text"),
    [
        ({"env": Faster(1.0)}, {"env": Faster(2.0)}, r"made with Faster.speed=1.0, and this one with Faster.speed=2.0"),
        ({"max_episode_steps": 5}, {"max_episode_steps": 9}, r"max_episode_steps=5, and this one with max_episode_steps=9"),
    ],
)
def test_load_names_the_difference_between_environments(one: Any, other: Any, text: str) -> None:
    first, second = (JaxVectorEnv(FunctionalVectorEnv(**{"env": Walk(), "num_envs": 2, **more})) for more in (one, other))
    first.reset(seed=3)
    second.reset(seed=4)
    with pytest.raises(SnapshotMismatch, match=text):
        second.load(first.save())
    first.close()
    second.close()


class RaisesSignal:
    """A number that raises a signal the first time it is read."""

    rung = False

    def __init__(self, number: Any) -> None:
        self.number = number

    def __reduce__(self) -> Any:
        return _read, (self.number,)


def _read(number: Any) -> Any:
    if not RaisesSignal.rung:
        RaisesSignal.rung = True
        signal.raise_signal(signal.SIGUSR2)
    return number


def test_interrupted_load_raises_and_can_be_repeated(closes: Any) -> None:
    envs = closes(JaxVectorEnv(FunctionalVectorEnv(Walk(), 2)))
    envs.reset(seed=3)
    kept = envs.save()
    (seed, leaves), known = pickle.loads(kept[1].body), kept[1].row
    kept = (kept[0], Snapshot.of(known.kind, pickle.dumps((RaisesSignal(seed), leaves))))
    actions = jnp.full((2, 1), 0.5)
    wanted = np.asarray(envs.step(actions)[0])
    with handled(signal.SIGUSR2, Alarm), pytest.raises(Alarm):
        envs.load(kept)
    envs.load(kept)
    assert np.array_equal(envs.step(actions)[0], wanted)



@pytest.mark.parametrize("call", ["step", "step_chunk"])
def test_actions_may_be_overwritten_as_soon_as_a_call_returns(call: str) -> None:
    envs = JaxVectorEnv(Walk(), num_envs=20_000, to="jax")
    shape = (20_000, 1) if call == "step" else (16, 20_000, 1)

    def play(overwrites: bool) -> np.ndarray[Any, Any]:
        envs.reset(seed=0)
        memory = np.ones(int(np.prod(shape)) + 16, np.float32)
        first = -memory.ctypes.data % 64 // 4  # JAX shares memory that begins at a multiple of 64 bytes
        actions = memory[first : first + int(np.prod(shape))].reshape(shape)
        result = getattr(envs, call)(actions)
        if overwrites:
            actions[:] = -1
        return np.array(result[0])

    expected = play(overwrites=False)
    for _ in range(10):
        np.testing.assert_array_equal(play(overwrites=True), expected)
