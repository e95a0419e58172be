"""``FunctionalVectorEnv``, and the spaces of JAX environments."""

from __future__ import annotations

import copy
import gc
import itertools
import os
import pickle
import subprocess
import sys
import textwrap
from typing import Any

import gymnasium as gym
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.vector import AutoresetMode
from jax.random import key as new_key
from jax_envs import Counter

from vecenv.jax import FunctionalVectorEnv, bridge, jax_space
from vecenv.jax.env import EnvState

# --- ``FunctionalVectorEnv`` over :class:`Counter` ------------------------------------------------

PUSH = np.full((5, 1), 0.6, np.float32)
SLOW = pytest.mark.slow


def run_steps(env: FunctionalVectorEnv, steps: int, key: Any = None, action: Any = PUSH) -> list[EnvState]:
    """Return the states after a reset and after each of ``steps`` equal steps, as numpy arrays."""
    state = env.reset(new_key(0) if key is None else key)
    states = [state]
    for _ in range(steps):
        state = env.step(state, action)
        states.append(state)
    return [jax.tree.map(np.asarray, state) for state in states]


# -- the fields of a state -----------------------------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.parametrize("mode", list(AutoresetMode))
def test_next_obs_is_the_successor_even_at_the_end_of_an_episode(make_counters: Any, mode: AutoresetMode) -> None:
    states = run_steps(make_counters(autoreset_mode=mode), 25)
    ended = 0
    for before, after in itertools.pairwise(states):
        moved = after.next_obs["position"][:, 0] - before.obs["position"][:, 0]
        assert ((moved > 0.59) & (moved < 0.62) | ~after.valid).all()
        done = after.done & after.valid
        ended += done.sum()
        # the reward of a last step is the position that it reached, not the start of the next episode
        np.testing.assert_array_equal(after.reward[after.valid], after.next_obs["position"][after.valid, 0])
        assert (after.next_obs["step"][done] == after.last_length[done]).all()
    assert ended >= 5


@pytest.mark.long
@pytest.mark.parametrize("mode", list(AutoresetMode))
def test_episode_statistics_equal_sums_over_steps(make_counters: Any, mode: AutoresetMode) -> None:
    """Statistics cover the current episode, and those named ``last_*`` the most recent finished episode."""
    total, discounted, length, ended = np.zeros(5), np.zeros(5), np.zeros(5, int), 0
    last = np.zeros((3, 5))
    for state in run_steps(make_counters(autoreset_mode=mode, discount=0.5), 25)[1:]:
        total += np.where(state.valid, state.reward, 0)
        discounted += np.where(state.valid, 0.5**length * state.reward, 0)
        length += state.valid
        done = np.asarray(state.done & state.valid)
        last[:, done] = np.stack([total, discounted, length])[:, done]
        np.testing.assert_allclose(state.last_return, last[0], rtol=1e-5)
        np.testing.assert_allclose(state.last_discounted_return, last[1], rtol=1e-5)
        np.testing.assert_array_equal(state.last_length, last[2])
        begins = done if mode is AutoresetMode.SAME_STEP else np.zeros(5, bool)
        if mode is AutoresetMode.NEXT_STEP:
            begins = ~np.asarray(state.valid)
        for sums in (total, discounted, length):
            sums[begins] = 0
        np.testing.assert_allclose(state.episode_return, total, rtol=1e-5)
        np.testing.assert_allclose(state.discounted_return, discounted, rtol=1e-5)
        np.testing.assert_array_equal(state.steps, length)
        np.testing.assert_array_equal(state.first, begins)
        ended += done.sum()
    assert ended >= 5


@pytest.mark.long
def test_termination_and_truncation_can_coincide() -> None:
    env = FunctionalVectorEnv(Counter(), 3, "Disabled", max_episode_steps=2)
    state = env.step(env.reset(new_key(0)), np.array([[0.0], [2.0], [2.0]], np.float32))
    assert state.truncated.tolist() == [False, False, False]
    state = env.step(state, np.array([[0.0], [0.0], [2.0]], np.float32))
    assert state.truncated.tolist() == [True, True, True]
    assert state.terminated.tolist() == [False, False, True]


@pytest.mark.long
def test_finished_rows_are_unchanged_by_steps_in_disabled_mode(make_counters: Any) -> None:
    states = run_steps(make_counters(autoreset_mode="Disabled"), 12)
    finished = next(state for state in states if state.done.all())
    last = states[-1]
    for name in ("terminated", "truncated", "steps", "episode_return", "last_return", "last_length"):
        np.testing.assert_array_equal(getattr(last, name), getattr(finished, name))
    np.testing.assert_array_equal(last.obs["position"], finished.obs["position"])
    jax.tree.map(np.testing.assert_array_equal, last.inner, finished.inner)
    assert not last.valid.any()
    assert not last.reward.any()


@pytest.mark.long
def test_max_episode_steps_of_minus_one_is_no_limit() -> None:
    env = FunctionalVectorEnv(Counter(), 5, max_episode_steps=-1)
    assert env.max_episode_steps is None
    states = run_steps(env, 12, action=np.zeros((5, 1), np.float32))
    assert not any(state.truncated.any() for state in states)


# -- starts --------------------------------------------------------------------------------------------------------


def get_starts(env: FunctionalVectorEnv, steps: int, key: Any = None) -> list[list[float]]:
    """Return, for each row, the first position of each of its episodes."""

    def step(state: Any, _: Any) -> Any:
        state = env.step(state, PUSH[:1].repeat(env.num_envs, 0))
        return state, (state.first, state.obs["position"][..., 0])

    state = env.reset(new_key(0) if key is None else key)
    _, (first, position) = jax.jit(lambda s: jax.lax.scan(step, s, None, length=steps))(state)
    first, position = np.asarray(first), np.asarray(position)
    initial = np.asarray(state.obs["position"])[:, 0]
    return [[float(initial[row]), *position[first[:, row], row].tolist()] for row in range(env.num_envs)]


@pytest.mark.long
def test_fresh_resets_give_each_episode_a_different_start() -> None:
    env = FunctionalVectorEnv(Counter(), 50)
    all_starts = [start for row in get_starts(env, 120) for start in row]
    assert len(all_starts) > 1000
    assert len(set(all_starts)) == len(all_starts)


def test_cached_resets_give_each_episode_of_a_row_the_same_start(make_counters: Any) -> None:
    for row in get_starts(make_counters(reset="cached"), 40):
        assert len(row) > 4
        assert len(set(row)) == 1


@pytest.mark.long
def test_pool_resets_limit_the_starts_of_each_row_to_pool_size(make_counters: Any) -> None:
    rows = get_starts(make_counters(reset="pool", pool_size=3), 200)
    assert all(len(set(row)) == 3 for row in rows)
    assert len({start for row in rows for start in row}) == 15


@pytest.mark.long
@pytest.mark.parametrize("reset", [pytest.param("fresh", marks=SLOW), pytest.param("cached", marks=SLOW), "pool"])
def test_starts_of_a_row_do_not_depend_on_the_number_of_rows(reset: str) -> None:
    few = FunctionalVectorEnv(Counter(), 3, reset=reset)
    many = FunctionalVectorEnv(Counter(), 20, reset=reset)
    assert get_starts(few, 40) == get_starts(many, 40)[:3]


def test_reset_accepts_raw_and_typed_keys(make_counters: Any) -> None:
    env = make_counters()
    typed = env.reset(jax.random.key(3)).obs["position"]
    np.testing.assert_array_equal(env.reset(jax.random.PRNGKey(3)).obs["position"], typed)
    rows = jax.vmap(jax.random.key)(jnp.arange(5))
    np.testing.assert_array_equal(env.reset(rows).inner.key, jax.random.key_data(rows))
    for wrong in (rows[:4], jax.random.key(3, impl="rbg")):
        with pytest.raises(ValueError, match="one key or"):
            env.reset(wrong)


@pytest.mark.long
def test_stagger_spreads_the_first_truncations() -> None:
    env = FunctionalVectorEnv(Counter(), 64, max_episode_steps=20, stagger=True)
    states = run_steps(env, 21, action=np.zeros((64, 1), np.float32))
    first_truncation = np.argmax([state.truncated for state in states], axis=0)
    assert len(set(first_truncation.tolist())) > 10
    assert first_truncation.max() <= 20
    last_states = {i: states[t] for i, t in enumerate(first_truncation)}
    assert all(state.last_length[i] == first_truncation[i] for i, state in last_states.items())
    with pytest.raises(ValueError, match="stagger"):
        FunctionalVectorEnv(Counter(), 2, max_episode_steps=-1, stagger=True)


@pytest.mark.long
def test_reset_mask_continues_the_random_stream_unless_a_key_is_given(make_counters: Any) -> None:
    env = make_counters()
    state = env.step(env.reset(new_key(0)), PUSH)
    mask = np.array([True, False, True, False, False])
    after = env.reset_mask(state, mask)
    assert after.inner.episode.tolist() == [1, 0, 1, 0, 0]
    assert after.first.tolist() == [True, False, True, False, False]
    assert after.steps.tolist() == [0, 1, 0, 1, 1]
    np.testing.assert_array_equal(after.obs["position"][~mask], state.obs["position"][~mask])
    restarted = env.reset_mask(state, mask, new_key(0))
    np.testing.assert_array_equal(restarted.obs["position"][mask], env.reset(new_key(0)).obs["position"][mask])
    np.testing.assert_array_equal(restarted.reward[~mask], state.reward[~mask])
    for wrong in (np.ones(4, bool), np.ones(5)):
        with pytest.raises(ValueError, match="bool"):
            env.reset_mask(state, wrong)


# -- options -------------------------------------------------------------------------------------------------------


@pytest.mark.long
def test_frame_skip_sums_rewards_and_stops_at_the_end() -> None:
    single = FunctionalVectorEnv(Counter(), 1, "Disabled", max_episode_steps=-1)
    skipping = FunctionalVectorEnv(Counter(), 1, "Disabled", max_episode_steps=-1, frame_skip=4)
    push = np.ones((1, 1), np.float32)
    rewards = [float(state.reward[0]) for state in run_steps(single, 4, action=push)[1:]]
    state = skipping.step(skipping.reset(new_key(0)), push)
    assert state.terminated.tolist() == [True]
    frames = int(state.obs["step"][0])
    assert frames == 3  # three pushes lead from below 1 to beyond 3, which ends the episode
    assert abs(float(state.reward[0]) - sum(rewards[:frames])) < 0.1
    assert state.steps.tolist() == [1]


def test_environment_with_jax_spaces_can_be_built_inside_and_outside_of_a_program() -> None:
    class Sampling(Counter):
        single_action_space = jax_space(Counter.single_action_space)

    def get_position() -> Any:
        env = FunctionalVectorEnv(Sampling(), 2)
        return env.step(env.reset(new_key(0)), jnp.ones((2, 1))).info["position"]

    np.testing.assert_allclose(get_position(), jax.jit(get_position)(), rtol=1e-6)


def test_frame_skip_accepts_flags_and_rewards_of_any_dtype() -> None:
    class FloatFlags(Counter):
        def step(self, state: Any, action: Any, key: Any) -> Any:
            state, obs, _, terminated, truncated, info = super().step(state, action, key)
            return state, obs, 1, jnp.float32(terminated), jnp.float32(truncated), info

    env = FunctionalVectorEnv(FloatFlags(), 5, frame_skip=2)
    state = env.step(env.reset(new_key(0)), PUSH)
    assert state.reward.tolist() == [2] * 5
    assert not state.done.any()


def test_frame_skip_divides_the_time_limit_of_the_environment() -> None:
    """Brax's action repeat divides it too. The option ``max_episode_steps`` limits calls of ``step`` instead."""
    env = FunctionalVectorEnv(Counter(), 5, frame_skip=4)
    assert env.max_episode_steps == 2  # ceil(7 / 4)
    assert [s.truncated.all() for s in run_steps(env, 2, action=0 * PUSH)] == [False, False, True]
    assert FunctionalVectorEnv(Counter(), 5, max_episode_steps=7, frame_skip=4).max_episode_steps == 7


@pytest.mark.long
def test_micro_batches_do_not_change_results() -> None:
    whole, parts = FunctionalVectorEnv(Counter(), 7), FunctionalVectorEnv(Counter(), 7, micro_batch=3)
    action = np.full((7, 1), 0.6, np.float32)
    for expected, found in zip(run_steps(whole, 20, action=action), run_steps(parts, 20, action=action), strict=True):
        jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5), found, expected)


@pytest.mark.long
@pytest.mark.parametrize("shape", [pytest.param((), marks=SLOW), pytest.param((1, 2, 3), marks=SLOW), (2, 3)])
def test_batch_of_any_shape_equals_a_flat_batch(shape: tuple[int, ...]) -> None:
    env = FunctionalVectorEnv(Counter(), shape)
    flat = FunctionalVectorEnv(Counter(), int(np.prod(shape)))
    state, reference = env.reset(new_key(0)), flat.reset(new_key(0))
    for _ in range(10):
        state = env.step(state, np.full((*shape, 1), 0.6, np.float32))
        reference = flat.step(reference, np.full((flat.num_envs, 1), 0.6, np.float32))
    assert state.reward.shape == shape
    assert state.obs["position"].shape == (*shape, 2)
    np.testing.assert_allclose(state.obs["position"].reshape(-1, 2), reference.obs["position"], rtol=1e-6)


@pytest.mark.long
def test_vmap_over_calls_equals_separate_calls(make_counters: Any) -> None:
    env = make_counters()
    keys = jax.random.split(new_key(0), 2)
    state = jax.vmap(env.reset)(keys)
    for _ in range(9):
        state = jax.vmap(env.step, (0, None))(state, PUSH)
    alone = run_steps(env, 9, keys[1])[-1]
    np.testing.assert_allclose(state.obs["position"][1], alone.obs["position"], rtol=1e-6)


_SHARDED_PROGRAM = """
    import jax, numpy as np
    from jax_envs import Counter
    from vecenv.jax import FunctionalVectorEnv
    action = np.full((6, 1), 0.6, np.float32)
    one, two = FunctionalVectorEnv(Counter(), 6), FunctionalVectorEnv(Counter(), 6, devices=jax.devices()[:2])
    a, b = one.reset(jax.random.key(0)), two.reset(jax.random.key(0))
    for _ in range(12):
        a, b = one.step(a, action), two.step(b, action)
    assert len(b.reward.sharding.device_set) == 2, b.reward.sharding
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-6), a, b)
    b = two.reset_mask(b, np.arange(6) % 2 == 0)
    try:
        FunctionalVectorEnv(Counter(), 5, devices=jax.devices()[:2])
    except ValueError as error:
        assert "divided equally" in str(error)
    print("equal on", len(jax.devices()), "devices")
"""


@pytest.mark.slow
def test_rows_on_two_devices_equal_rows_on_one() -> None:
    here = os.path.dirname(__file__)
    environ = dict(os.environ, XLA_FLAGS="--xla_force_host_platform_device_count=2", JAX_PLATFORMS="cpu")
    environ["PYTHONPATH"] = os.pathsep.join([here, *filter(None, sys.path)])
    process = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(_SHARDED_PROGRAM)],
        env=environ,
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert process.stdout.strip() == "equal on 2 devices", process.stderr[-2000:]


@pytest.mark.long
def test_a_thousand_episodes_leak_no_arrays_and_compile_nothing(make_counters: Any) -> None:
    env = make_counters(autoreset_mode="SameStep")
    state = env.reset(new_key(0))
    for _ in range(20):
        state = env.step(state, PUSH)
    compiled = env._step._cache_size()
    gc.collect()
    arrays = len(jax.live_arrays())
    for _ in range(1200):  # five rows, and at most 7 steps per episode
        state = env.step(state, PUSH)
    gc.collect()
    assert int(state.inner.episode.sum()) > 1000
    assert env._step._cache_size() == compiled
    assert len(jax.live_arrays()) <= arrays


# -- bad input -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"num_envs": 0}, "num_envs"),
        ({"num_envs": (-2, -3)}, "num_envs"),
        ({"devices": []}, "among 0 devices"),
        ({"reset": "stale"}, "'fresh', 'cached', 'pool'"),
        ({"pool_size": 0}, "pool_size"),
        ({"micro_batch": 0}, "micro_batch"),
        ({"max_episode_steps": 0}, "max_episode_steps"),
        ({"frame_skip": 0}, "frame_skip"),
        ({"frame_skip": 1.5}, "frame_skip must be an integer of at least 1, got 1.5"),
        ({"autoreset_mode": "Never"}, "AutoresetMode"),
    ],
)
def test_constructor_with_options_out_of_range_raises(options: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        FunctionalVectorEnv(Counter(), **options)


@pytest.mark.parametrize("num_envs", [2.0, "2", (2, 1.5)])
def test_constructor_with_num_envs_that_is_not_an_integer_raises(num_envs: Any) -> None:
    with pytest.raises(TypeError, match="num_envs must be an integer or a tuple of integers"):
        FunctionalVectorEnv(Counter(), num_envs)


def test_step_with_a_wrong_state_raises(make_counters: Any) -> None:
    env = make_counters()
    state = env.reset(new_key(0))
    for wrong in (None, state.obs, state.replace(inner=None)):
        with pytest.raises(TypeError, match="EnvState"):
            env.step(wrong, PUSH)
    with pytest.raises(ValueError, match=r"\(3,\)"):
        env.step(make_counters(3).reset(new_key(0)), PUSH)


class WrongResult(Counter):
    """A :class:`Counter` with a wrong part in the result of ``step``."""

    name = "WrongResult"

    def __init__(self, fault: str) -> None:
        self.fault = fault

    def step(self, state: Any, action: Any, key: Any) -> Any:
        state, obs, reward, terminated, truncated, info = super().step(state, action, key)
        if self.fault == "structure":
            state = {**state, "more": 1}
        elif self.fault == "shape":
            obs = {**obs, "position": jnp.zeros(3)}
        elif self.fault == "reward":
            reward = jnp.zeros(2)
        elif self.fault == "count":
            return state, obs, reward, terminated, truncated
        return state, obs, reward, terminated, truncated, info


@pytest.mark.parametrize(
    ("fault", "text"),
    [
        ("structure", "different structure"), ("shape", r"\['position'\] of shape \(3,\)"),
        ("reward", r"reward of shape \(2,\)"), ("count", r"WrongResult: step returned 5 values; expected \(state, obs,"),
    ],
)  # fmt: skip
def test_step_raises_if_the_environment_returns_a_wrong_result(fault: str, text: str) -> None:
    env = FunctionalVectorEnv(WrongResult(fault), 5)
    with pytest.raises(ValueError, match=text):
        env.step(env.reset(new_key(0)), PUSH)


# --- Spaces, which sample with a key in compiled programs --------------------------------------

SPACES: list[spaces.Space[Any]] = [
    spaces.Box(-2.0, 3.0, (2,), np.float32),
    spaces.Box(np.array([-np.inf, 0.0, -np.inf]), np.array([np.inf, np.inf, 4.0]), dtype=np.float32),
    spaces.Box(0, 255, (3,), np.uint8),
    spaces.Box(-5, 5, (2,), np.int64),
    spaces.Discrete(4, start=-1),
    spaces.MultiDiscrete([2, 5]),
    spaces.MultiBinary(6),
]
SPACES.append(spaces.Dict({"a": spaces.Tuple(SPACES[:2]), "b": spaces.Discrete(3)}))


@pytest.mark.sampled("Box(0, 255, (3,), uint8)", "Discrete(4, start=-1)")
@pytest.mark.parametrize("space", SPACES, ids=str)
def test_samples_with_keys_cover_the_space(space: Any) -> None:
    converted = jax_space(space)
    samples = jax.jit(jax.vmap(converted.sample))(jax.random.split(jax.random.key(1), 300))
    rows = [jax.tree.map(lambda leaf, i=i: np.asarray(leaf)[i], samples) for i in range(300)]
    assert all(jax.jit(converted.contains)(row) for row in rows[:3])
    # without its 64-bit mode, JAX has no int64
    is_int64 = isinstance(space, spaces.Box) and space.dtype == np.int64
    assert all(is_int64 or space.contains(cast_to_space(space, row)) for row in rows)
    if isinstance(space, spaces.Box) and space.dtype.kind in "iu":
        assert np.asarray(samples).max() >= space.high.max() - 5
        assert np.asarray(samples).min() <= space.low.min() + 5
    if isinstance(space, spaces.Discrete):
        assert set(np.asarray(samples).tolist()) == {-1, 0, 1, 2}


_INT32, _MAX = np.iinfo(np.int32), np.finfo(np.float32).max


@pytest.mark.parametrize(
    ("space", "maximum"),
    [
        (spaces.Box(0, 255, (9,), np.uint8), 255),
        (spaces.Box(_INT32.max - 1, _INT32.max, (9,), np.int32), _INT32.max),
        (spaces.Box(2**32 - 2, 2**32 - 1, (9,), np.uint32), 2**32 - 1),
        (spaces.Box(_INT32.min, _INT32.max, (9,), np.int32), None),
        (spaces.Box(-np.inf, 3, (9,), np.int64), 3),
        (spaces.MultiDiscrete([100] * 9, dtype=np.int8, start=[28] * 9), 127),
        (spaces.Discrete(3, start=_INT32.max - 2), _INT32.max),
        (spaces.Box(-_MAX, _MAX, (9,), np.float32), None),
    ],
    ids=str,
)
def test_samples_reach_the_bounds_at_the_limits_of_a_dtype(space: Any, maximum: int | None) -> None:
    converted = jax_space(space)
    samples = jax.vmap(converted.sample)(jax.random.split(jax.random.key(0), 300))
    assert np.isfinite(samples).all()
    assert len(np.unique(samples)) > 1
    for row in np.asarray(samples)[:20]:
        assert converted.contains(jnp.asarray(row))
        assert space.contains(cast_to_space(space, row))
    assert maximum is None or np.asarray(samples).max() == maximum


@pytest.mark.parametrize("space", [spaces.Box(0, 2**40, (3,), np.int64), spaces.Discrete(2**40)], ids=str)
def test_sample_with_bounds_beyond_the_integers_of_jax_raises(space: Any) -> None:
    with pytest.raises(OverflowError, match=r"do not fit JAX's int32. Enable JAX's 64-bit mode"):
        jax_space(space).sample(jax.random.key(0))
    assert jax_space(space).contains(jnp.full(space.shape, _INT32.max))
    assert not jax_space(space).contains(jnp.full(space.shape, -1))


def cast_to_space(space: Any, row: Any) -> Any:
    if isinstance(space, spaces.Dict):
        return {key: cast_to_space(inner, row[key]) for key, inner in space.spaces.items()}
    if isinstance(space, spaces.Tuple):
        return tuple(cast_to_space(inner, part) for inner, part in zip(space.spaces, row, strict=True))
    return np.int64(row) if isinstance(space, spaces.Discrete) else np.asarray(row, space.dtype)


def test_contains_is_false_for_values_outside_of_the_space() -> None:
    box, choice = jax_space(SPACES[0]), jax_space(SPACES[4])
    contains = jax.jit(box.contains)
    assert contains(jnp.array([0.0, 3.0]))
    assert not contains(jnp.array([0.0, 3.1]))
    assert not contains(jnp.zeros(3))
    assert not jax_space(SPACES[3]).contains(jnp.zeros(2))  # floats are not integers
    assert [bool(choice.contains(jnp.asarray(i))) for i in range(-2, 4)] == [False, True, True, True, True, False]
    nested = jax_space(SPACES[-1])
    assert not nested.contains({"b": jnp.asarray(0)})
    assert not jax_space(SPACES[6]).contains(jnp.full(6, 2))


@pytest.mark.parametrize("space", SPACES, ids=str)
def test_jax_space_behaves_like_the_original_outside_of_programs(space: Any) -> None:
    converted = jax_space(space)
    for equal in (space, pickle.loads(pickle.dumps(converted)), copy.deepcopy(converted)):
        assert converted == equal
    converted.seed(3)
    space = copy.deepcopy(space)
    space.seed(3)
    sample, expected = converted.sample(), space.sample()
    assert jax.tree.all(jax.tree.map(np.array_equal, sample, expected))
    assert converted.contains(sample)


def test_sample_without_a_key_in_a_program_raises() -> None:
    env = FunctionalVectorEnv(Counter(), 3)
    for space in (env.single_action_space, env.action_space, env.single_observation_space["position"]):
        with pytest.raises(ValueError, match="would become a constant"):
            jax.jit(lambda key, space=space: space.sample())(jax.random.key(0))
    draw: Any = jax.jit(env.action_space.sample)
    assert not np.array_equal(draw(jax.random.key(0)), draw(jax.random.PRNGKey(1)))
    assert draw(jax.random.key(0)).shape == (3, 1)


def test_spaces_of_a_bridge_sample_with_keys(closes: Any) -> None:
    env = closes(bridge(gym.vector.SyncVectorEnv([lambda: gym.make("CartPole-v1")] * 2)))
    samples = jax.jit(env.action_space.sample)(jax.random.key(0))
    env.step(env.reset(jax.random.key(0)), samples)
    with pytest.raises(ValueError, match="pass a key"):
        jax.jit(env.single_action_space.sample)()


def test_jax_space_returns_a_custom_space_unchanged() -> None:
    class CustomBox(spaces.Box):
        pass

    space = CustomBox(0, 1, (1,))
    assert jax_space(space) is space
