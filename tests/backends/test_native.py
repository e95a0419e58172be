"""Native vector environments: their results, and the contract of every backend.

ALE reloads its game for every environment that is built or seeded, which takes a quarter of a second. Therefore its contract
tests are marked slow, and other tests use :class:`CountingVectorEnv` where possible.
"""

from __future__ import annotations

import contextlib
import copy
import importlib.util
import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.error import ClosedEnvironmentError, ResetNeeded
from gymnasium.vector import AutoresetMode, SyncVectorEnv, VectorEnv
from gymnasium.vector.utils import batch_space
from signals import Alarm, signal_handler

import vecenv
from vecenv.backends import NativeVectorEnv, native
from vecenv.testing import VectorEnvContract, assert_identical

needs_ale = pytest.mark.skipif(importlib.util.find_spec("ale_py") is None, reason="ale_py is not installed")
if importlib.util.find_spec("ale_py") is not None:
    import ale_py

    gymnasium.register_envs(ale_py)

SMALL_FRAMES: dict[str, Any] = {
    "img_height": 24, "img_width": 24, "stack_num": 2, "max_num_frames_per_episode": 160, "noop_max": 5,
}  # fmt: skip
CARTPOLE = "gymnasium.envs.classic_control.cartpole:CartPoleVectorEnv"


class CountingVectorEnv(VectorEnv[Any, Any, Any]):
    """A fake library that counts steps. Episodes of environment ``i`` have ``length + i`` steps; it resets in the last one.

    ``step`` waits for ``gate``. ``received`` records the arguments of all calls. Final observations are a batch, like ALE's.
    """

    def __init__(self, num_envs: int = 3, length: int = 4, **extra: Any) -> None:
        self.num_envs, self.length, self.extra = num_envs, length, extra
        self.single_observation_space = spaces.Dict(count=spaces.Box(0, 100, (2,), np.float32))
        self.single_action_space = extra.pop("action_space", spaces.Discrete(5))
        self.observation_space = batch_space(self.single_observation_space, num_envs)
        self.action_space = batch_space(self.single_action_space, num_envs)
        self.metadata = {"autoreset_mode": AutoresetMode.SAME_STEP}
        self.gate = threading.Event()
        self.gate.set()
        self.received: list[Any] = []
        self.error: Exception | None = None
        self._counts = np.zeros((num_envs, 2), dtype=np.float32)

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        self.received.append((seed, options))
        self._counts[...] = 0
        return {"count": self._counts}, {}

    def step(self, actions: Any) -> Any:
        self.received.append(actions)
        assert self.gate.wait(30)
        if self.error is not None:
            raise self.error
        self._counts += 1
        terminated = np.arange(self.num_envs) + self.length == self._counts[:, 0]
        infos: dict[str, Any] = {"half": self._counts[:, 0] / 2, "one for all": 7, "deep": {"word": ["a"] * self.num_envs}}
        if terminated.any():
            infos["final_obs"] = {"count": self._counts.copy()}
        self._counts[terminated] = 0
        return {"count": self._counts}, np.ones(self.num_envs, np.int32), terminated, np.zeros_like(terminated), infos


@pytest.fixture
def make_counting(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., NativeVectorEnv]]:
    """Yield a function that builds a vector environment over :class:`CountingVectorEnv` with the given features."""
    with contextlib.ExitStack() as stack:

        def build(features: Any = (), copy: bool = True, **options: Any) -> NativeVectorEnv:
            name = f"{CountingVectorEnv.__module__}.{CountingVectorEnv.__qualname__}"
            monkeypatch.setitem(native._LIBRARIES, name, features)
            library = CountingVectorEnv(**options)
            envs = stack.enter_context(contextlib.closing(NativeVectorEnv(library, copy=copy)))
            stack.callback(library.gate.set)
            return envs

        yield build


@pytest.fixture
def vector_only_id() -> Iterator[str]:
    """Register an id that has only a vector entry point."""
    name = "OnlyVector-v0"
    gymnasium.register(name, vector_entry_point=CARTPOLE, max_episode_steps=30)
    yield name
    for registered in (name, f"vecenv/{name}"):
        gymnasium.registry.pop(registered, None)


# --- the contract ---------------------------------------------------------------------------------------------------


class TestCartPole(VectorEnvContract):
    """The contract over Gymnasium's CartPole, which has one generator, no masked resets, and only next-step autoreset."""

    autoreset_modes = (AutoresetMode.NEXT_STEP,)
    supports_reset_mask = False
    gives_final_observations = False

    def make(self, num_envs: int = 3, autoreset_mode: AutoresetMode = AutoresetMode.NEXT_STEP, **kwargs: Any) -> Any:
        options = {"autoreset_mode": autoreset_mode}
        return vecenv.make_vec("CartPole-v1", num_envs, "native", vector_kwargs=options, **kwargs)


@needs_ale
@pytest.mark.slow
class TestAtari(VectorEnvContract):
    autoreset_modes = (AutoresetMode.NEXT_STEP, AutoresetMode.SAME_STEP)

    def make(self, num_envs: int = 3, autoreset_mode: AutoresetMode = AutoresetMode.NEXT_STEP, **kwargs: Any) -> Any:
        options = {"autoreset_mode": autoreset_mode}
        return vecenv.make_vec("ALE/Breakout-v5", num_envs, "native", vector_kwargs=options, **SMALL_FRAMES, **kwargs)


# --- the same results as from Gymnasium -----------------------------------------------------------------------------


@needs_ale
@pytest.mark.parametrize(
    ("game", "mode", "steps", "options"),
    [
        ("ALE/Breakout-v5", AutoresetMode.SAME_STEP, 45, SMALL_FRAMES),
        *(
            pytest.param(game, mode, 300, {"max_num_frames_per_episode": 400}, marks=pytest.mark.slow)
            for game in ("ALE/Breakout-v5", "ALE/Pong-v5")
            for mode in (AutoresetMode.NEXT_STEP, AutoresetMode.SAME_STEP)
        ),
    ],
)
def test_frames_rewards_and_flags_equal_ale(game: str, mode: AutoresetMode, steps: int, options: dict[str, Any]) -> None:
    reference = gymnasium.make_vec(game, 2, vectorization_mode="vector_entry_point", autoreset_mode=mode, **options)
    envs = vecenv.make_vec(game, 2, "native", vector_kwargs={"autoreset_mode": mode}, **options)
    with contextlib.closing(envs), contextlib.closing(reference):
        frames, infos = reference.reset(seed=7)
        actual = envs.reset(seed=7)
        assert_identical(actual[0], frames, "frames of the reset")
        assert_same_infos(actual[1], infos)
        ends = 0
        reference.action_space.seed(1)
        for t in range(steps):
            actions = reference.action_space.sample()
            frames, rewards, terminations, truncations, infos = reference.step(actions.copy())
            actual = envs.step(actions)
            assert_identical(actual[0], frames, f"frames of step {t}")
            assert_identical(actual[1], rewards.astype(np.float64), f"rewards of step {t}")
            assert_identical(actual[2], terminations, f"terminations of step {t}")
            assert_identical(actual[3], truncations, f"truncations of step {t}")
            done = terminations | truncations
            final = infos.pop("final_obs", None)
            assert ("final_obs" in actual[4]) == (final is not None) == bool(mode is AutoresetMode.SAME_STEP and done.any())
            if final is not None:
                assert_identical(actual[4].pop("_final_obs"), done, "_final_obs")
                assert actual[4].pop("final_info") == {}
                assert_identical(actual[4].pop("_final_info"), done, "_final_info")
                for row, last in enumerate(actual[4].pop("final_obs")):
                    assert (last is not None) == done[row]
                    if last is not None:
                        assert_identical(last, final[row], f"final frames of env {row}")
            assert_same_infos(actual[4], infos)
            ends += int(done.sum())
        assert ends


def assert_same_infos(actual: dict[str, Any], expected: dict[str, Any]) -> None:
    assert set(actual) == {*expected, *(f"_{key}" for key in expected)}
    for key, value in expected.items():
        assert_identical(actual[key], np.array(value), key)
        assert actual[f"_{key}"].all()


def test_cartpole_trajectory_equals_gymnasium() -> None:
    reference = gymnasium.make_vec("CartPole-v1", 5, vectorization_mode="vector_entry_point")
    with contextlib.closing(vecenv.make_vec("CartPole-v1", 5, "native")) as envs:
        options = {"low": -0.1, "high": 0.0}
        assert_identical(envs.reset(seed=3, options=options), reference.reset(seed=3, options=options))
        for _ in range(60):
            actions = reference.action_space.sample()
            actual, expected = envs.step(actions), reference.step(actions)
            assert_identical(actual[0], expected[0])
            assert_identical(actual[1], expected[1].astype(np.float64))
            assert_identical(actual[2:4], expected[2:4])


# --- reset ----------------------------------------------------------------------------------------------------------


def test_library_with_seeds_per_row_receives_31_bit_seeds(make_counting: Any) -> None:
    envs = make_counting({"rows"})
    mask = np.array([True, False, True])
    options: dict[str, Any] = {"reset_mask": mask}
    with pytest.raises(ResetNeeded):
        envs.reset(options=options)
    with pytest.raises(ValueError, match=r"no reset options except 'reset_mask', got \['lives'\]"):
        envs.reset(options={"lives": 3})
    for wrong in ([1.5, 2, 3], ["1", 2, 3]):
        with pytest.raises(TypeError):
            envs.reset(seed=wrong)
    assert envs.library.received == []
    for seed, reset_options, expected in (
        (4, None, [4, 5, 6]),
        ([2**31 + 5, None, np.int64(7)], None, [5, -1, 7]),
        (None, None, [-1, -1, -1]),
        (9, options, [9, 11]),
    ):
        envs.reset(seed=seed, options=reset_options)
        seeds, received_options = envs.library.received[-1]
        assert seeds.tolist() == expected
        assert received_options is None or received_options["reset_mask"].tolist() == mask.tolist()
    assert list(options) == ["reset_mask"]


def test_library_with_one_generator_accepts_consecutive_seeds(make_counting: Any) -> None:
    envs = make_counting()
    mask = np.array([True, False, True])
    for arguments, text in (
        ({"seed": [1, 5, 2]}, r"backend 'native': .*CountingVectorEnv resets all environments with one seed"),
        ({"seed": [1, None, None]}, r"backend 'native': .*CountingVectorEnv resets all environments with one seed"),
        (
            {"options": {"reset_mask": mask}},
            r"NativeVectorEnv cannot reset 2 of 3 environments: .*CountingVectorEnv returns all",
        ),
    ):
        with pytest.raises(NotImplementedError, match=text):
            envs.reset(**arguments)
    assert envs.library.received == []
    options_for_all = {"reset_mask": np.ones(3, np.bool_), "custom": 1}
    for seed, options in ((4, None), ([4, 5, 6], options_for_all), (None, {}), ([None] * 3, None)):
        envs.reset(seed=seed, options=options)
    assert envs.library.received == [(4, None), (4, {"custom": 1}), (None, None), (None, None)]
    assert set(options_for_all) == {"reset_mask", "custom"}


def test_options_may_be_changed_before_the_result_of_a_reset(make_counting: Any) -> None:
    envs = make_counting()
    options = {"goals": [1]}
    envs.reset_async(options=options)
    options["goals"].append(2)
    envs.reset_wait()
    assert envs.library.received == [(None, {"goals": [1]})]


# --- step, actions --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("actions", "error", "text"),
    [
        ([0, 1], ValueError, r"actions: got shape \(2,\), expected \(3,\)"),
        ([0, 1, 5], ValueError, "3 actions of"),
        ([0, -1, 2], ValueError, "3 actions of"),
        (np.array([0, 1, 2**63 + 1], dtype=np.uint64), ValueError, "3 actions of"),
        ([0.0, 1.0, 2.0], TypeError, "dtype int64, got float64"),
        ([None, 1, 2], TypeError, "dtype int64, got object"),
    ],
)
def test_invalid_actions_raise_before_the_library_is_called(make_counting: Any, actions: Any, error: Any, text: str) -> None:
    envs = make_counting()
    envs.reset()
    for call in (envs.step, envs.step_async, envs.send):
        with pytest.raises(error, match=text):
            call(actions)
    assert len(envs.library.received) == 1
    assert envs.step([0, 1, 2])[1].tolist() == [1.0, 1.0, 1.0]


def test_actions_of_other_dtypes_are_cast_or_raise(make_counting: Any) -> None:
    box = make_counting(action_space=spaces.Box(-1, 1, (2,), np.float32))
    box.reset()
    box.step(np.full((3, 2), 0.1))
    assert box.library.received[-1].dtype == np.float32
    for wrong in (np.full((3, 2), 1.5), np.full((3, 2), np.nan), np.zeros((3, 1))):
        with pytest.raises(ValueError, match=r"3 actions of Box|got shape"):
            box.step(wrong)
    uint8_box = make_counting(action_space=spaces.Box(0, 9, (1,), np.uint8))
    uint8_box.reset()
    uint8_box.step([[1], [2], [3]])
    assert_identical(uint8_box.library.received[-1], np.array([[1], [2], [3]], np.uint8))
    for number in (-1, 256, 257):
        with pytest.raises(ValueError, match="3 actions of Box"):
            uint8_box.step([[1], [2], [number]])
    dict_space = make_counting(action_space=spaces.Dict(a=spaces.Discrete(2), b=spaces.Box(0, 1, (1,), np.float32)))
    dict_space.reset()
    actions = dict_space.action_space.sample()
    dict_space.step(actions)
    assert dict_space.library.received[-1] is not actions
    with pytest.raises(ValueError, match="3 actions of Dict"):
        dict_space.step({"a": actions["a"]})


# --- results --------------------------------------------------------------------------------------------------------


def test_every_info_is_an_array_with_its_mask(make_counting: Any) -> None:
    envs = make_counting()
    envs.reset()
    infos = envs.step([0, 0, 0])[4]
    all_rows = np.ones(3, np.bool_)
    expected = {
        "half": np.full(3, 0.5, np.float32),
        "one for all": np.full(3, 7),
        "deep": {"word": np.array(["a"] * 3), "_word": all_rows},
    }
    assert_identical(infos, {**expected, **{f"_{key}": all_rows for key in expected}})


def test_infos_of_any_key_and_shape_are_arrays_with_masks(make_counting: Any) -> None:
    envs = make_counting()
    envs.reset()
    ragged, mask = [[1], [1, 2], [1, 2, 3]], np.array([True, False, True])
    step = envs.library.step
    library_infos = {"ragged": ragged, 1: np.arange(3), "deep": {"x": 5}, "_deep": mask}
    envs.library.step = lambda actions: (*step(actions)[:4], library_infos)
    infos = envs.step([0, 0, 0])[4]
    assert infos["ragged"].dtype == object
    assert infos["ragged"].tolist() == ragged
    assert infos[1].tolist() == [0, 1, 2]
    assert infos["_1"].all()
    assert infos["deep"]["_x"].tolist() == mask.tolist()


def test_final_observations_have_gymnasiums_format(make_counting: Any) -> None:
    envs = make_counting()
    envs.reset()
    for _ in range(3):
        assert not [key for key in envs.step([0, 0, 0])[4] if "final" in key]
    observations, _, terminations, _, infos = envs.step([0, 0, 0])
    assert terminations.tolist() == infos["_final_obs"].tolist() == infos["_final_info"].tolist() == [True, False, False]
    assert observations["count"][:, 0].tolist() == [0, 4, 4]
    assert infos["final_obs"][0]["count"].tolist() == [4, 4]
    assert infos["final_obs"][1:].tolist() == [None, None]
    assert infos["final_info"] == {}


def test_observations_are_copies_unless_copy_is_false(make_counting: Any) -> None:
    envs, shared = make_counting(), make_counting(copy=False)
    assert (envs.copy, shared.copy) == (True, False)
    first, same = envs.reset()[0], shared.reset()[0]
    copied = copy.deepcopy(first)
    assert_identical(envs.step([0, 0, 0])[0]["count"], first["count"] + 1)
    assert_identical(first, copied)
    assert shared.step([0, 0, 0])[0]["count"] is same["count"]


def test_autoreset_mode_does_not_leak_into_the_next_vector_environment() -> None:
    class WithoutMetadata(CountingVectorEnv):
        def __init__(self) -> None:
            super().__init__()
            del self.metadata

    before = dict(VectorEnv.metadata)
    VectorEnv.metadata["autoreset_mode"] = AutoresetMode.DISABLED  # ALE changes the dict of the class in this way
    try:
        with contextlib.closing(NativeVectorEnv(WithoutMetadata())) as envs:
            assert envs.metadata["autoreset_mode"] is AutoresetMode.NEXT_STEP
    finally:
        VectorEnv.metadata.clear()
        VectorEnv.metadata.update(before)


# --- step_async and step_wait ---------------------------------------------------------------------------------------


def test_library_without_threads_steps_in_step_wait(make_counting: Any) -> None:
    envs = make_counting()
    envs.reset()
    envs.step_async([0, 1, 2])
    assert len(envs.library.received) == 1
    with pytest.raises(NotImplementedError, match=r"backend 'native': .*CountingVectorEnv steps in the caller's thread"):
        envs.step_wait(timeout=1.0)
    assert envs.step_wait()[0]["count"].tolist() == [[1, 1]] * 3


@pytest.mark.parametrize("features", [(), ("threads",)], ids=["without-threads", "with-threads"])
def test_library_error_is_raised_once_and_the_next_step_succeeds(make_counting: Any, features: Any) -> None:
    envs = make_counting(features)
    envs.reset()
    envs.library.error = OSError("no ROM")
    with pytest.raises(OSError, match="no ROM"):
        envs.step([0, 0, 0])
    envs.library.error = None
    assert envs.step([0, 0, 0])[0]["count"].tolist() == [[1, 1]] * 3
    assert envs.stats()["steps"] == 3, "the step that raised was counted"


@pytest.mark.parametrize("features", [(), ("threads",)], ids=["without-threads", "with-threads"])
def test_malformed_results_raise_once_and_the_next_step_succeeds(make_counting: Any, features: Any) -> None:
    envs = make_counting(features)
    envs.reset()
    step = envs.library.step
    envs.library.step = lambda actions: (step(actions)[0], ["not", "a", "number"], *step(actions)[2:])
    with pytest.raises(ValueError, match="could not convert"):
        envs.step([0, 0, 0])
    envs.library.step = step
    assert envs.step([0, 0, 0])[0]["count"].tolist() == [[3, 3]] * 3
    assert envs.reset()[0]["count"].tolist() == [[0, 0]] * 3


def test_interrupted_wait_leaves_the_result_pending(make_counting: Any) -> None:
    envs = make_counting({"threads"})
    envs.reset()
    envs.library.gate.clear()
    envs.step_async([0, 1, 2])
    timer = threading.Timer(0.1, signal.pthread_kill, (threading.main_thread().ident, signal.SIGINT))
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        envs.step_wait()
    timer.join()
    envs.library.gate.set()
    assert envs.step_wait()[0]["count"].tolist() == [[1, 1]] * 3


@pytest.mark.parametrize("error", [KeyboardInterrupt, Alarm])
@pytest.mark.parametrize("method", ["reset", "step"])
def test_call_of_the_library_is_never_repeated_after_an_interruption(make_counting: Any, method: str, error: Any) -> None:
    envs = make_counting()
    envs.reset()
    original = getattr(envs.library, method)

    def interrupt(*args: Any, **options: Any) -> Any:
        original(*args, **options)
        signal.raise_signal(signal.SIGUSR2)

    setattr(envs.library, method, interrupt)
    with signal_handler(signal.SIGUSR2, error), pytest.raises(error):
        envs.reset() if method == "reset" else envs.step([0, 0, 0])
    setattr(envs.library, method, original)
    for call in (getattr(envs, f"{method}_wait"), lambda: envs.step([0, 0, 0])):
        with pytest.raises(ResetNeeded, match="its result is lost"):
            call()
    envs.reset()
    assert envs.step([0, 0, 0])[0]["count"].tolist() == [[1, 1]] * 3


# --- threads, close, render -----------------------------------------------------------------------------------------


def wait_until_stepping(library: CountingVectorEnv) -> None:
    while len(library.received) < 2:
        time.sleep(0.001)


def test_close_waits_for_a_call_of_another_thread_until_its_timeout(make_counting: Any) -> None:
    envs = make_counting()
    envs.reset()
    library = envs.library
    library.gate.clear()
    errors: list[str] = []

    def step() -> None:
        with pytest.raises(ClosedEnvironmentError) as caught:
            envs.step([0, 0, 0])
        errors.append(str(caught.value))

    thread = threading.Thread(target=step)
    thread.start()
    wait_until_stepping(library)
    envs.close(timeout=0.05)
    assert envs.closed
    assert not library.closed  # the other thread's step still uses it, and closes it at its end
    library.gate.set()
    thread.join()
    assert errors
    assert library.closed
    assert envs.library is None


def test_close_can_be_repeated_after_an_interruption(make_counting: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    envs = make_counting()
    library = envs.library

    def interrupt() -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(library, "close", interrupt)
        with pytest.raises(KeyboardInterrupt):
            envs.close()
    envs.close()
    assert library.closed
    assert envs.library is None


def test_render_calls_the_library(make_counting: Any) -> None:
    envs = make_counting()
    assert envs.render() is None
    envs.render_mode = "rgb_array"
    with pytest.raises(NotImplementedError):
        envs.render()


# --- make_vec, register ---------------------------------------------------------------------------------------------


def test_make_vec_uses_the_native_backend_if_requested_or_if_no_other_exists(vector_only_id: str) -> None:
    with contextlib.closing(vecenv.make_vec("CartPole-v1", 2)) as envs:
        assert type(envs) is vecenv.AsyncVectorEnv
    with contextlib.closing(vecenv.make_vec("CartPole-v1", 2, "native")) as envs:
        assert str(envs.plan).endswith("CartPoleVectorEnv: backend='native' was requested")
    with contextlib.closing(vecenv.make_vec(vector_only_id, 2)) as envs:
        assert str(envs.plan).endswith("CartPoleVectorEnv: OnlyVector-v0 has only a vector entry point")
        assert envs.library.max_episode_steps == 30
        assert repr(envs) == "NativeVectorEnv(OnlyVector-v0, num_envs=2)"
        with contextlib.closing(vecenv.make_vec(envs.spec)) as rebuilt:
            assert rebuilt.num_envs == 2
            assert_identical(rebuilt.reset(seed=1), envs.reset(seed=1))
    with pytest.raises(gymnasium.error.Error, match="backend='native'"):
        vecenv.make_vec(vector_only_id, 2, "serial")


def test_registered_names_build_their_environments(vector_only_id: str) -> None:
    name = vecenv.register(vector_only_id, max_episode_steps=9)
    for make in (gymnasium.make_vec, vecenv.make_vec):
        with contextlib.closing(make(name, num_envs=2)) as envs:
            assert type(envs) is NativeVectorEnv
            assert envs.library.max_episode_steps == 9
    name = vecenv.register("CartPole-v1", vector_kwargs={"num_workers": 0})
    try:
        with contextlib.closing(vecenv.make_vec(name, 2)) as envs:
            assert type(envs) is vecenv.AsyncVectorEnv
            with contextlib.closing(vecenv.make_vec(gymnasium.make_vec(name, num_envs=2).spec)) as rebuilt:
                assert type(rebuilt) is vecenv.AsyncVectorEnv
        with contextlib.closing(vecenv.make_vec(name, 2, vector_kwargs={"autoreset_mode": "SameStep"})) as envs:
            assert envs.metadata["autoreset_mode"] is AutoresetMode.SAME_STEP
            assert envs.num_workers == 0
    finally:
        gymnasium.registry.pop(name)


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ({"id_or_env_fn": "Acrobot-v1"}, gymnasium.error.Error, "no vector entry point"),
        ({"id_or_env_fn": SyncVectorEnv}, TypeError, "needs the name of an environment"),
        ({"wrappers": [lambda env: env]}, ValueError, "wrappers need Python environments"),
        ({"max_episode_step": 3}, TypeError, r"'CartPole-v1', backend 'native', has no option .*'max_episode_steps'\?"),
        ({"vector_kwargs": {"num_workers": 2}}, TypeError, "has no option 'num_workers'"),
        (
            {"vector_kwargs": {"autoreset_mode": "SameStep"}},
            NotImplementedError,
            r"'CartPole-v1' does not offer .*SAME_STEP, only",
        ),
        ({"vector_kwargs": {"autoreset_mode": "Often"}}, ValueError, "'Often' is not a valid AutoresetMode"),
        ({"num_envs": 0}, ValueError, "`num_envs` must be a positive int"),
    ],
)
def test_invalid_arguments_raise_with_their_name(arguments: dict[str, Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        vecenv.make_vec(**{"id_or_env_fn": "CartPole-v1", "num_envs": 2, "backend": "native", **arguments})


@needs_ale
@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"autoreset_mode": AutoresetMode.DISABLED}, NotImplementedError, "does not offer AutoresetMode.DISABLED"),
        ({"batch_size": 1}, NotImplementedError, "batch_size=1"),
        ({"frame_skip": 2}, TypeError, "Did you mean 'frameskip'"),
        ({"render_mode": "rgb_array"}, TypeError, "has no option 'render_mode'"),
    ],
)
def test_options_that_ale_does_not_support_raise(options: dict[str, Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        vecenv.make_vec("ALE/Pong-v5", 2, "native", **options)
