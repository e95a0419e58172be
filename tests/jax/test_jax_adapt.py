"""Tests of ``adapt``: the spaces, ends of episodes, time limits and environment names of each library, and errors."""

from __future__ import annotations

import dataclasses
import importlib
import signal
import subprocess
from types import SimpleNamespace
from typing import Any

import gymnasium as gym
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.random import key as new_key
from jax_envs import Box, Counter, FakeGymnaxEnv, FakeJumanjiEnv, Switch
from signals import Alarm, signal_handler

from vecenv.backends import JaxVectorEnv
from vecenv.jax import FunctionalVectorEnv, JaxEnv, adapt, available_envs, differentiability, make_env, require_gradient


@pytest.fixture
def brax() -> Any:
    return pytest.importorskip("brax.envs", reason="needs Brax: pip install 'vecenv[brax]'")


@pytest.fixture
def playground() -> Any:
    return pytest.importorskip("mujoco_playground", reason="needs MuJoCo Playground")


# -- Brax ----------------------------------------------------------------------------------------------------------


_BRAX_ENVS = (
    "ant", "halfcheetah", "hopper", "humanoid", "humanoidstandup", "pusher", "reacher", "walker2d",
)  # fmt: skip


@pytest.mark.long
@pytest.mark.parametrize("name", ["inverted_pendulum", *(pytest.param(n, marks=pytest.mark.slow) for n in _BRAX_ENVS)])
def test_brax_action_space_is_minus_one_to_one(brax: Any, name: str) -> None:
    """Brax rescales the actions if the range of the actuators differs, so the action space does not depend on it."""
    env = brax.get_environment(name, backend="spring")
    assert adapt(env).single_action_space == gym.spaces.Box(-1, 1, (env.action_size,), np.float32)
    limits = np.abs(np.asarray(env.sys.actuator.ctrl_range))
    assert (limits == 1).all() == (name not in {"humanoid", "humanoidstandup", "inverted_pendulum", "pusher"})


@pytest.mark.long
def test_brax_adapter_steps_like_brax(brax: Any, pendulum: Any) -> None:
    env = pendulum.env
    state, obs = jax.jit(pendulum.init)(jax.random.PRNGKey(3))
    original = jax.jit(env.reset)(jax.random.PRNGKey(3))
    np.testing.assert_array_equal(obs, original.obs)
    action = jnp.array([0.5])
    _, obs, reward, terminated, truncated, info = jax.jit(pendulum.step)(state, action, new_key(0))
    original = jax.jit(env.step)(original, action)
    np.testing.assert_array_equal(obs, original.obs)
    assert float(reward) == float(original.reward)
    assert bool(terminated) == bool(original.done)
    assert not truncated
    assert set(info) == {"time_out"}
    assert isinstance(pendulum, JaxEnv)
    assert adapt(pendulum) is pendulum


@pytest.mark.slow
def test_rescale_changes_the_action_space_but_not_the_results(brax: Any, pendulum: Any) -> None:
    actuator = adapt(pendulum, rescale="actuator")
    assert actuator.single_action_space == gym.spaces.Box(-3, 3, (1,), np.float32)
    halved = adapt(pendulum, rescale=(0.0, [0.5]))
    assert halved.single_action_space == gym.spaces.Box(0, 0.5, (1,), np.float32)
    state, _ = pendulum.init(jax.random.PRNGKey(0))
    step = jax.jit(pendulum.step)
    results = [step(state, jnp.array([0.5]), new_key(0)), actuator.step(state, jnp.array([1.5]), new_key(0))]
    results.append(halved.step(state, jnp.array([0.375]), new_key(0)))
    for other in results[1:]:
        np.testing.assert_allclose(other[1], results[0][1], atol=1e-6)
    with pytest.raises(ValueError, match="bounded"):
        adapt(Switch(), rescale=(0, 1))


def test_adapt_with_an_unknown_rescale_raises() -> None:
    with pytest.raises(ValueError, match=r"Counter: rescale must be \(low, high\) or 'actuator', got 'min-max'"):
        adapt(Counter(), rescale="min-max")


@pytest.mark.parametrize("env", [FakeGymnaxEnv(), Counter()])
def test_rescale_to_actuators_needs_a_physics_model(env: Any) -> None:
    with pytest.raises(ValueError, match=rf"{type(env).__name__} has no physics model .*: pass rescale=\(low, high\)"):
        adapt(env, rescale="actuator")


@pytest.mark.long
def test_adapt_removes_training_wrappers(brax: Any) -> None:
    wrapped = brax.create("inverted_pendulum", episode_length=90, action_repeat=3, backend="spring")
    env = adapt(wrapped)
    assert env.max_episode_steps == 30
    assert "FrameSkip" in type(env).__name__
    assert adapt(brax.get_environment("inverted_pendulum", backend="spring")).max_episode_steps == 1000
    assert adapt(wrapped, max_episode_steps=-1).max_episode_steps is None
    for unsuitable in (
        brax.create("inverted_pendulum", batch_size=4, backend="spring"),
        brax.Wrapper(wrapped),
        brax.Wrapper(brax.wrappers.training.EpisodeWrapper(brax.get_environment("inverted_pendulum"), 90, 3)),
    ):
        with pytest.raises(ValueError, match=r"batches, resets or truncates environments.*without it"):
            adapt(unsuitable)


def test_brax_fast_has_zero_gradients(brax: Any) -> None:
    env = adapt("fast")
    assert env.differentiable == "zero"
    for argument in (env, "fast", brax.get_environment("fast")):
        with pytest.raises(ValueError, match="a derivative of 0"):
            require_gradient(argument)


def test_brax_dict_observations_have_a_dict_space(brax: Any) -> None:
    env = adapt("fast", asymmetric_obs=True, obs_mode="dict_state")
    assert set(env.single_observation_space) == {"state", "privileged_state"}  # type: ignore[call-overload]
    state = FunctionalVectorEnv(env, 3).reset(new_key(0))
    assert state.obs["privileged_state"].shape == (3, 4)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("backend", ["generalized", "positional", "spring", "mjx"])
def test_all_brax_backends_step(brax: Any, backend: str) -> None:
    env = FunctionalVectorEnv(adapt("inverted_pendulum", backend=backend), 4, "SameStep", max_episode_steps=5)
    state = env.reset(new_key(0))
    for _ in range(12):
        state = env.step(state, np.zeros((4, 1), np.float32))
    assert state.last_length.tolist() == [5] * 4
    assert np.isfinite(state.obs).all()


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_gradient_error_for_mjx_names_the_options_that_enable_gradients(brax: Any) -> None:
    env = adapt("inverted_pendulum", backend="mjx")
    assert differentiability(env) == "forward"
    require_gradient(env, "forward")
    with pytest.raises(ValueError, match=r"'opt\.iterations': 1"):
        require_gradient(env)
    fixed = brax.get_environment("inverted_pendulum", backend="mjx")
    fixed.sys = fixed.sys.tree_replace({"opt.iterations": 1, "opt.ls_iterations": 4})
    assert differentiability(fixed) == "reverse"


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_randomize_gives_each_row_its_own_model(brax: Any) -> None:
    def randomize(sys: Any, keys: Any) -> Any:
        gear = jax.vmap(lambda key: jax.random.uniform(key, sys.actuator.gear.shape, minval=0.5, maxval=1.5))(keys)
        axes = jax.tree.map(lambda _: None, sys).tree_replace({"actuator.gear": 0})
        return sys.tree_replace({"actuator.gear": gear * sys.actuator.gear}), axes

    adapted = adapt("inverted_pendulum", backend="spring")
    env = FunctionalVectorEnv(adapted, 4, max_episode_steps=5, randomize=randomize)
    plain = FunctionalVectorEnv(adapted, 4, max_episode_steps=5)
    keys = jnp.broadcast_to(jax.random.key(1), (4,))
    state, plain_state = env.reset(new_key(0)), plain.reset(new_key(0))
    assert len(set(np.asarray(state.inner.model[0]).ravel().tolist())) == 4
    for _ in range(3):
        actions = np.ones((4, 1), np.float32)
        state, plain_state = env.step(state, actions), plain.step(plain_state, actions)
    assert not np.allclose(state.obs, plain_state.obs, rtol=1e-3)
    models = env.reset(keys).inner.model[0]
    np.testing.assert_array_equal(models[0], models[3])
    with pytest.raises(ValueError, match="no physics model"):
        FunctionalVectorEnv(Counter(), 2, randomize=randomize)


def test_exception_of_a_signal_handler_during_render_is_raised(monkeypatch: pytest.MonkeyPatch, pendulum: Any) -> None:
    def render(_: Any) -> Any:
        if signals:
            signal.raise_signal(signals.pop())
        return [np.zeros((2, 2, 3), np.uint8)]

    signals = [signal.SIGUSR2]
    monkeypatch.setattr(pendulum.env.unwrapped, "render", render)
    with signal_handler(signal.SIGUSR2, Alarm), pytest.raises(Alarm):
        pendulum.render(SimpleNamespace(pipeline_state=None))


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_render_returns_a_frame_or_names_missing_packages(brax: Any, pendulum: Any) -> None:
    state, _ = pendulum.init(jax.random.PRNGKey(0))
    try:
        frame = pendulum.render(state)
    except RuntimeError as error:
        assert "MUJOCO_GL" in str(error)
        pytest.skip("needs OpenGL; only the message was checked")
    assert frame.dtype == np.uint8
    assert frame.shape[2] == 3


# -- Playground ----------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_playground_adapter_steps_like_playground(playground: Any, asymmetric_env: Any) -> None:
    env = adapt(asymmetric_env)
    assert env.max_episode_steps == 1000
    assert set(env.single_observation_space) == {"state", "privileged_state"}  # type: ignore[call-overload]
    state, obs = jax.jit(env.init)(jax.random.PRNGKey(3))
    original = jax.jit(asymmetric_env.reset)(jax.random.PRNGKey(3))
    np.testing.assert_array_equal(obs["privileged_state"], original.obs["privileged_state"])
    _, obs, _, _, _, info = jax.jit(env.step)(state, jnp.array([0.5]), new_key(0))
    original = jax.jit(asymmetric_env.step)(original, jnp.array([0.5]))
    np.testing.assert_array_equal(obs["state"], original.obs["state"])
    assert "reward/upright" in info
    assert "rng" not in info


def test_playground_implementation_is_jax_by_default(playground: Any) -> None:
    assert make_env("CartpoleBalance")._config.impl == "jax"
    with pytest.raises(TypeError, match=r"config_overrides=, got \['impl'\]"):
        make_env("CartpoleBalance", impl="jax")
    with pytest.raises(ValueError, match="speed"):
        make_env("CartpoleBalance", config_overrides={"speed": 3})


def test_playground_without_a_download_of_its_models_raises(
    playground: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    source = importlib.import_module("mujoco_playground._src.mjx_env")

    def fail_to_clone(*_: Any) -> None:
        raise subprocess.CalledProcessError(128, ["git", "clone"])

    monkeypatch.setattr(source, "_clone_with_progress", fail_to_clone)
    monkeypatch.setattr(source, "MENAGERIE_PATH", tmp_path / "menagerie")
    monkeypatch.setattr(source, "EXTERNAL_DEPS_PATH", tmp_path)
    with pytest.raises(FileNotFoundError, match="mujoco_menagerie, commit"):
        make_env("Go1JoystickFlatTerrain")


# -- names ---------------------------------------------------------------------------------------------------------


def test_adapt_with_an_unknown_name_suggests_close_matches(brax: Any, playground: Any) -> None:
    for unknown, suggestion in (
        ("antt", "ant"),
        ("inverted-pendulum", "inverted_pendulum"),
        ("cartpolebalance", "CartpoleBalance"),
    ):
        with pytest.raises(gym.error.NameNotFound, match=f"Did you mean.*{suggestion}"):
            adapt(unknown)
    with pytest.raises(gym.error.NameNotFound, match="in playground"):
        make_env("ant", "playground")
    with pytest.raises(ValueError, match="Unknown library 'gymnax'"):
        available_envs("gymnax")
    assert set(available_envs()) == {"brax", "playground"}
    assert len(available_envs("playground")["playground"]) > 50


def test_import_error_of_a_library_does_not_affect_the_names_of_another(
    brax: Any, playground: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    import_module = importlib.import_module
    for broken, known in (("mujoco_playground", "ant"), ("brax.envs", "CartpoleBalance")):

        def fail(name: str, broken: str = broken) -> Any:
            if name == broken:
                raise ImportError("libGL is missing")
            return import_module(name)

        monkeypatch.setattr(importlib, "import_module", fail)
        make_env(known)
        with pytest.raises(ImportError, match="is installed but cannot be imported: libGL is missing"):
            make_env("no such name")


@pytest.mark.long
def test_arguments_unknown_to_brax_raise(brax: Any) -> None:
    """Brax's own ``fast`` accepts any argument, although it uses only two."""
    with pytest.raises(TypeError, match=r"ant has no arguments \['gravity'\]"):
        adapt("ant", gravity=3)
    with pytest.raises(ValueError, match="refuses backend='bullet'"):
        adapt("ant", backend="bullet")
    with pytest.raises(TypeError, match="together with a name"):
        adapt(Counter(), backend="spring")
    for make in (adapt, make_env, JaxVectorEnv):
        with pytest.raises(TypeError, match=r"fast has no arguments \['from_pixels', 'nonsense', 'num_workers'\]"):
            make("fast", nonsense=1, num_workers=3, from_pixels=True, obs_mode="ndarray")


@pytest.mark.parametrize("value", [object(), 3, gym.spaces.Discrete(2), None])
def test_adapt_of_an_unsupported_object_raises(value: Any) -> None:
    with pytest.raises(TypeError, match=r"that vecenv supports\. These are Brax.* max_episode_steps, differentiable"):
        adapt(value)


def test_adapt_of_a_class_or_of_an_incomplete_object_names_the_mistake() -> None:
    with pytest.raises(TypeError, match=r"got the class Counter: write Counter\(\.\.\.\)"):
        adapt(Counter)
    incomplete = SimpleNamespace(init=Counter().init, step=Counter().step, max_episode_steps=3, single_action_space=None)
    with pytest.raises(TypeError, match="lacks single_observation_space, differentiable:"):
        adapt(incomplete)


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class BraxState:
    obs: Any
    reward: Any
    done: Any
    info: dict[str, Any]
    metrics: dict[str, Any]


class BraxLike:
    """An object with only the four members that the error message of ``adapt`` lists for Brax."""

    observation_size = action_size = 2

    def reset(self, rng: Any) -> BraxState:
        return BraxState(jax.random.uniform(rng, (2,)), jnp.zeros(()), jnp.zeros(()), {}, {})

    def step(self, state: BraxState, action: Any) -> BraxState:
        obs = state.obs + action
        return BraxState(obs, obs.sum(), jnp.zeros(()), {}, {})


def test_adapt_of_an_object_with_the_members_of_brax_steps_it() -> None:
    env = FunctionalVectorEnv(BraxLike(), 3)
    state = env.reset(new_key(0))
    np.testing.assert_allclose(env.step(state, jnp.ones((3, 2))).reward, (state.obs + 1).sum(1))


# -- gymnax, jumanji, FuncEnv --------------------------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.parametrize("env", [FakeGymnaxEnv(), (FakeGymnaxEnv(), FakeGymnaxEnv.default_params)])
def test_gymnax_time_limit_is_a_truncation(env: Any) -> None:
    vector = FunctionalVectorEnv(env, 4, "SameStep")
    assert vector.single_action_space == gym.spaces.Discrete(2)
    state = vector.reset(new_key(0))
    for _ in range(6):
        state = vector.step(state, np.array([0, 0, 1, 1]))
    assert state.truncated.tolist() == [True, True, False, False]
    assert state.last_length.tolist()[:2] == [6, 6]
    assert state.last_length[2] < 6


def test_gymnax_space_has_the_dtype_of_the_observations() -> None:
    class WrongDtype(FakeGymnaxEnv):
        def observation_space(self, params: Any) -> Any:
            return Box(0, 1, (1,), jnp.int32)

    envs = FunctionalVectorEnv(WrongDtype(), 2)
    assert envs.single_observation_space == gym.spaces.Box(0, 1, (1,), np.float32)
    assert np.asarray(envs.reset(new_key(0)).obs) in envs.observation_space


@pytest.mark.parametrize(
    ("bound", "dtype"), [(np.inf, np.int64), (np.float32(2**31), np.int32), (1e30, np.int8), (np.float32(2**64), np.uint64)]
)
def test_bounds_outside_of_an_integer_dtype_become_its_limits(bound: Any, dtype: Any) -> None:
    class Bounded(FakeGymnaxEnv):
        def action_space(self, params: Any) -> Any:
            return Box(-bound, bound, (2,), dtype)

    limits = np.iinfo(dtype)
    assert adapt(Bounded()).single_action_space == gym.spaces.Box(limits.min, limits.max, (2,), dtype)


def test_jumanji_last_step_is_a_termination_if_the_discount_is_0() -> None:
    vector = FunctionalVectorEnv(FakeJumanjiEnv(), 3, "Disabled")
    assert vector.single_action_space == gym.spaces.Discrete(3)
    assert set(vector.single_observation_space) == {"grid", "action_mask"}  # type: ignore[call-overload]
    state = vector.reset(new_key(0))
    for _ in range(6):
        state = vector.step(state, np.array([0, 2, 1]))
    assert state.terminated.tolist()[:2] == [False, True]
    assert state.truncated.tolist()[:2] == [True, False]
    assert state.obs["grid"].shape == (3, 2, 2)
    assert "moves" in state.info


NO_GYMNAX = "needs gymnax, which requires an older Gymnasium than vecenv: pip install gymnax six, then gymnasium again"


@pytest.mark.slow
@pytest.mark.parametrize(("name", "action"), [("CartPole-v1", 1), ("MountainCarContinuous-v0", [0.5]), ("Catch-bsuite", 2)])
def test_gymnax_adapter_steps_like_gymnax(name: str, action: Any) -> None:
    gymnax = pytest.importorskip("gymnax", reason=NO_GYMNAX)
    original, params = gymnax.make(name)
    adapted = adapt((original, params))
    init, step = jax.jit(adapted.init), jax.jit(adapted.step)
    state, obs = init(new_key(0))
    raw_obs, raw = jax.jit(original.reset_env)(new_key(0), params)
    np.testing.assert_array_equal(obs, raw_obs)
    assert np.asarray(obs) in adapted.single_observation_space
    action = np.asarray(action, adapted.single_action_space.dtype)
    assert action in adapted.single_action_space
    for i in range(5):  # rounding may differ, because the adapter compiles the parameters as constants
        key = jax.random.PRNGKey(i)
        state, obs, reward, terminated, truncated, _ = step(state, action, key)
        raw_obs, raw, raw_reward, raw_terminated, _ = jax.jit(original.step_env)(key, raw, action, params)
        np.testing.assert_allclose(obs, raw_obs, rtol=1e-6, atol=1e-7)
        np.testing.assert_allclose(reward, raw_reward, rtol=1e-6)
        assert bool(terminated) == bool(raw_terminated)
        assert bool(truncated) == bool(original.is_truncated(raw, params))


@pytest.mark.slow
def test_jumanji_adapter_steps_like_jumanji() -> None:
    jumanji = pytest.importorskip("jumanji", reason="needs jumanji")
    original = jumanji.make("Snake-v1")
    adapted = adapt(original)
    state, obs = jax.jit(adapted.init)(new_key(0))
    raw, timestep = jax.jit(original.reset)(new_key(0))
    ends = 0
    for _ in range(12):  # the snake moves into a wall
        assert set(obs) == set(timestep.observation._fields)
        assert jax.tree.map(np.asarray, obs) in adapted.single_observation_space
        for field, value in timestep.observation._asdict().items():
            np.testing.assert_array_equal(obs[field], value)
        action = jnp.int32(1)
        state, obs, reward, terminated, truncated, _ = jax.jit(adapted.step)(state, action, new_key(0))
        raw, timestep = jax.jit(original.step)(raw, action)
        assert float(reward) == float(timestep.reward)
        assert bool(terminated | truncated) == bool(timestep.last())
        assert bool(terminated) == bool(timestep.last() and timestep.discount == 0)
        ends += bool(timestep.last())
    assert ends


def test_step_with_rewards_of_several_agents_raises() -> None:
    class TwoRewards(FakeJumanjiEnv):
        def step(self, state: Any, action: Any) -> Any:
            state, timestep = super().step(state, action)
            return state, timestep._replace(reward=jnp.zeros(2))

    env = FunctionalVectorEnv(TwoRewards(), 2)
    with pytest.raises(ValueError, match="MultiToSingleWrapper"):
        env.step(env.reset(new_key(0)), np.zeros(2, int))


@pytest.mark.long
def test_gymnasium_func_env_keeps_every_transition() -> None:
    """Gymnasium's own vector environment loses the transitions of all other rows when a row resets."""
    cartpole = pytest.importorskip("gymnasium.envs.phys2d.cartpole", reason="needs Gymnasium's JAX environments")
    env = FunctionalVectorEnv(cartpole.CartPoleFunctional(), 4, max_episode_steps=30)
    assert env.single_action_space == gym.spaces.Discrete(2)
    state = env.reset(new_key(0))
    for t in range(40):
        before = state
        state = env.step(state, np.array([0, 1, t % 2, 1]))
        moved = np.abs(np.asarray(state.next_obs) - np.asarray(before.obs)).max(1) > 0
        assert moved.all()
        assert (state.reward[~state.valid] == 0).all()
    assert int(state.inner.episode.sum()) > 4


def test_make_env_without_libraries_names_the_command_that_installs_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(gym.error.NameNotFound, match=r"neither brax nor playground is installed: pip install .*brax"):
        make_env("ant")
