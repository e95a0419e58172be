"""Comparisons with ``SyncVectorEnv`` for random and real environments, and tests of ``VectorEnvContract``."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import gymnasium
import numpy as np
import pytest
from envs import NestedDictEnv, assert_matches_sync, counters, open_engine, scripted_env_fns
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv, VectorEnv
from gymnasium.wrappers import vector as wrappers
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sampling import each_once
from strategies import Move, Vector, any_spaces, boxes, discretes, fixed_spaces, moves, seed_arguments, vectors

import vecenv
from vecenv.testing import VectorEnvContract, assert_identical, assert_same_trajectory

# --- AsyncVectorEnv and SyncVectorEnv return the same results for the same environments, seeds and actions
# ``SyncVectorEnv`` is the reference because it is short and serial. Observations, rewards, flags and infos are compared
# bit for bit after every call. ``assert_equal_results`` avoids one intended difference: with ``AutoresetMode.DISABLED``,
# ``SyncVectorEnv`` refuses to step an environment after the end of its episode, so such environments are reset first.


# few examples, which may be slow and large, because every example starts processes
few_examples = settings(
    max_examples=5,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.large_base_example],
)


def _parse_num_workers(name: str, num_envs: int) -> int | None:
    """Return the value of ``num_workers`` for the name of a case.

    Names are needed because the number of environments is known only when the test runs.
    """
    return {"0": 0, "1": 1, "2": 2, "num_envs": num_envs, "None": None}[name]


def _as_list(actions: Any) -> Any:
    """Convert an array of actions to a list. Return a tuple or a dict of actions unchanged."""
    return actions.tolist() if isinstance(actions, np.ndarray) else actions


def assert_equal_results(envs: Any, reference: Any, first_seed: Any, plan: list[Move], action_seed: int) -> None:
    """Make the same calls to both vector environments, and compare all results."""
    action_space = copy.deepcopy(reference.action_space)
    action_space.seed(action_seed)
    autoreset_disabled = reference.autoreset_mode is AutoresetMode.DISABLED
    ended = np.zeros(reference.num_envs, dtype=np.bool_)

    def reset_both(seed: Any, mask: np.ndarray | None = None) -> None:
        options = [None if mask is None else {"reset_mask": mask.copy()} for _ in range(2)]
        result = envs.reset(seed=copy.copy(seed), options=options[0])
        expected = reference.reset(seed=copy.copy(seed), options=options[1])
        assert_identical(result, expected, f"reset(seed={seed}, mask={mask})")
        ended[slice(None) if mask is None else mask] = False

    reset_both(first_seed)
    for t, move in enumerate(plan):
        if move.kind == "reset":
            reset_both(move.seed, None if move.mask is None else np.array(move.mask))
            continue
        if autoreset_disabled and ended.any():
            reset_both(None, ended.copy())
        actions = action_space.sample()
        if move.as_list:
            actions = _as_list(actions)
        result, expected = envs.step(copy.deepcopy(actions)), reference.step(copy.deepcopy(actions))
        names = "observations", "rewards", "terminations", "truncations", "infos"
        for name, values, expected_values in zip(names, result, expected, strict=True):
            assert_identical(values, expected_values, f"move {t}: {name}")
        ended[:] = expected[2] | expected[3]


def assert_random_calls_match_sync(data: st.DataObject, vector: Vector, mode: AutoresetMode, **options: Any) -> None:
    """Draw calls, and compare spaces and results of an engine with those of a ``SyncVectorEnv``."""
    num_envs = len(vector.env_fns)
    plan = data.draw(moves(num_envs), label="plan")
    first_seed = data.draw(seed_arguments(num_envs), label="first seed")
    action_seed = data.draw(st.integers(0, 2**16), label="action seed")
    reference = SyncVectorEnv(vector.env_fns, autoreset_mode=mode)
    try:
        with open_engine(vector.env_fns, autoreset_mode=mode, **options) as envs:
            assert envs.single_observation_space == reference.single_observation_space
            assert envs.observation_space == reference.observation_space
            assert envs.action_space == reference.action_space
            assert_equal_results(envs, reference, first_seed, plan, action_seed)
    finally:
        reference.close()


@pytest.mark.sampled("compiled-0-shared-copy-AutoresetMode.NEXT_STEP")
@pytest.mark.parametrize(
    ("num_workers", "shared_memory", "copy_results", "mode"),
    each_once(
        ["0", "1", "2", "num_envs"], {"shared": True, "pickled": False}, {"copy": True, "no-copy": False}, AutoresetMode
    ),
)
@few_examples
@given(data=st.data(), vector=vectors())
def test_results_of_random_environments_equal_sync_vector_env(
    num_workers: str,
    shared_memory: bool,
    copy_results: bool,
    mode: AutoresetMode,
    data: st.DataObject,
    vector: Vector,
) -> None:
    assert_random_calls_match_sync(
        data,
        vector,
        mode,
        num_workers=_parse_num_workers(num_workers, len(vector.env_fns)),
        shared_memory=shared_memory,
        copy=copy_results,
    )


@pytest.mark.long
@pytest.mark.parametrize("shared_memory", [True, False])
@pytest.mark.parametrize("num_workers", ["0", "2", "None"])
@settings(few_examples, max_examples=10)
@given(data=st.data(), vector=vectors(any_spaces, any_spaces), mode=st.sampled_from(AutoresetMode))
def test_values_of_all_gymnasium_spaces_arrive_unchanged(
    num_workers: str, shared_memory: bool, data: st.DataObject, vector: Vector, mode: AutoresetMode
) -> None:
    workers = _parse_num_workers(num_workers, len(vector.env_fns))
    assert_random_calls_match_sync(data, vector, mode, num_workers=workers, shared_memory=shared_memory)


@pytest.mark.long
@pytest.mark.parametrize("mode", AutoresetMode)
@settings(few_examples, max_examples=50)
@given(data=st.data(), vector=vectors(boxes(), discretes))
def test_many_random_examples_in_process_equal_sync_vector_env(
    mode: AutoresetMode, data: st.DataObject, vector: Vector
) -> None:
    assert_random_calls_match_sync(data, vector, mode, num_workers=0, copy=data.draw(st.booleans(), label="copy"))


@pytest.mark.long
@pytest.mark.parametrize("num_workers", ["0", "2", "None"])
@settings(few_examples, max_examples=15)
@given(data=st.data(), vector=vectors(discretes, discretes, min_envs=2, wild=True))
def test_infos_of_changing_types_are_returned_unchanged(num_workers: str, data: st.DataObject, vector: Vector) -> None:
    """Infos are compared by row, because Gymnasium either cannot merge such infos, or changes them.

    The test ends with the first episode, because single environments are not reset automatically.
    """
    single_envs = [env_fn() for env_fn in vector.env_fns]
    workers = _parse_num_workers(num_workers, len(vector.env_fns))
    actions = [get_legal_action(vector)] * len(vector.env_fns)
    with open_engine(vector.env_fns, num_workers=workers) as envs:
        by_row = vecenv.infos_by_row(envs)
        assert_identical(list(by_row.reset(seed=1)[1]), [env.reset(seed=1 + k)[1] for k, env in enumerate(single_envs)])
        for t in range(5):
            *_, terminations, truncations, infos = by_row.step(actions)
            assert_identical(list(infos), [env.step(np.int64(actions[0]))[4] for env in single_envs], f"step {t}")
            if (terminations | truncations).any():
                break


def get_legal_action(vector: Vector) -> Any:
    """Return an action of the action space, which must be Discrete."""
    return vector.action_space.start


@pytest.mark.long
@pytest.mark.parametrize(("context", "mode"), each_once(["fork", "spawn", "forkserver"], AutoresetMode))
@settings(few_examples, max_examples=1)
@given(data=st.data(), vector=vectors(fixed_spaces, fixed_spaces, min_envs=3, max_envs=3))
def test_start_method_does_not_change_results(
    context: str, mode: AutoresetMode, data: st.DataObject, vector: Vector
) -> None:
    assert_random_calls_match_sync(data, vector, mode, num_workers=2, context=context)


# --- real environments: trajectories equal those of SyncVectorEnv, also with each of Gymnasium's vector wrappers
# There is one environment of each kind: a small Box, continuous actions, Discrete observations, a Tuple, MuJoCo with
# ten numbers in every info, images, and nested dicts.


def make_env(env_id: str, **kwargs: Any) -> gymnasium.Env:
    if env_id.startswith("ALE/"):
        import ale_py

        gymnasium.register_envs(ale_py)
    return gymnasium.make(env_id, **kwargs)


def real_env_fn(env_id: str, **kwargs: Any) -> Callable[[], gymnasium.Env]:
    return functools.partial(make_env, env_id, **kwargs)


REAL_ENV_FNS: dict[str, Callable[[], gymnasium.Env]] = {
    "CartPole-v1": real_env_fn("CartPole-v1"),
    "Pendulum-v1": real_env_fn("Pendulum-v1", max_episode_steps=9),
    "FrozenLake-v1": real_env_fn("FrozenLake-v1"),
    "Blackjack-v1": real_env_fn("Blackjack-v1"),
    "Ant-v5": real_env_fn("Ant-v5", max_episode_steps=8),
    "ALE/Pong-v5": real_env_fn("ALE/Pong-v5", max_episode_steps=9),
    "NestedDict": NestedDictEnv,
}
SLOW_TO_BUILD = {"Ant-v5", "ALE/Pong-v5"}


@pytest.mark.sampled(
    "python-CartPole-v1-AutoresetMode.NEXT_STEP",
    "python-Pendulum-v1-AutoresetMode.SAME_STEP",
    "python-FrozenLake-v1-AutoresetMode.DISABLED",
    "python-Blackjack-v1-AutoresetMode.NEXT_STEP",
    "python-Ant-v5-AutoresetMode.SAME_STEP",
    "python-NestedDict-AutoresetMode.NEXT_STEP",
    "python-CartPole-v1-AutoresetMode.DISABLED",
)
@pytest.mark.parametrize(
    ("name", "mode"),
    [
        pytest.param(name, mode, marks=pytest.mark.long if name in SLOW_TO_BUILD and mode.value != "SameStep" else ())
        for name in REAL_ENV_FNS
        for mode in AutoresetMode
    ],
)
def test_trajectories_equal_those_of_sync_vector_env(name: str, mode: AutoresetMode) -> None:
    steps = 15 if name in SLOW_TO_BUILD else 60
    # FrozenLake returns {"prob": 1} at resets and {"prob": 0.333} in steps; Gymnasium merges the two into integers, 1 and 0
    merges_inexactly = name == "FrozenLake-v1"
    fns = [REAL_ENV_FNS[name]] * 3
    assert_matches_sync(fns, steps, autoreset_mode=mode, merge_by_gymnasium=merges_inexactly, num_workers=2)


@pytest.mark.sampled(5)
@pytest.mark.parametrize(
    "options",
    [
        {"num_workers": 0},
        {"num_workers": None},
        {"shared_memory": False, "num_workers": 2},
        {"copy": False, "num_workers": 2},
    ],
    ids=["in-process", "process-per-env", "pickled", "no-copy"],
)
@pytest.mark.parametrize("name", ["CartPole-v1", "Blackjack-v1", "Ant-v5", "NestedDict"])
def test_trajectories_in_every_configuration_equal_sync_vector_env(name: str, options: dict[str, Any]) -> None:
    assert_matches_sync([REAL_ENV_FNS[name]] * 2, 15, autoreset_mode="SameStep", **options)


# -- wrappers ------------------------------------------------------------------------------------------------

WrapFn = Callable[[VectorEnv], VectorEnv]
ALL_MODES = tuple(AutoresetMode)
NOT_SAME_STEP = (AutoresetMode.NEXT_STEP, AutoresetMode.DISABLED)


def _double(x: Any) -> Any:
    return x * 2


def _unbounded_box(*, single: bool) -> spaces.Box:
    return spaces.Box(-np.inf, np.inf, (4,) if single else (3, 4), np.float32)


# name -> environment, modes that the wrapper supports, function that applies the wrapper
WRAPPERS: dict[str, tuple[str, tuple[AutoresetMode, ...], WrapFn]] = {
    "RecordEpisodeStatistics": ("CartPole-v1", ALL_MODES, wrappers.RecordEpisodeStatistics),
    "DictInfoToList": ("Ant-v5", ALL_MODES, wrappers.DictInfoToList),
    "TransformObservation": (
        "CartPole-v1",
        NOT_SAME_STEP,
        lambda e: wrappers.TransformObservation(e, _double, _unbounded_box(single=False), _unbounded_box(single=True)),
    ),
    "VectorizeTransformObservation": (
        "CartPole-v1",
        NOT_SAME_STEP,
        lambda e: wrappers.VectorizeTransformObservation(
            e, gymnasium.wrappers.TransformObservation, func=_double, observation_space=_unbounded_box(single=True)
        ),
    ),
    "FilterObservation": ("NestedDict", NOT_SAME_STEP, lambda e: wrappers.FilterObservation(e, ["camera", "mode"])),
    "FlattenObservation": ("NestedDict", NOT_SAME_STEP, wrappers.FlattenObservation),
    "GrayscaleObservation": ("ALE/Pong-v5", NOT_SAME_STEP, wrappers.GrayscaleObservation),
    "ResizeObservation": ("ALE/Pong-v5", NOT_SAME_STEP, lambda e: wrappers.ResizeObservation(e, (84, 84))),
    "ReshapeObservation": ("CartPole-v1", NOT_SAME_STEP, lambda e: wrappers.ReshapeObservation(e, (2, 2))),
    "RescaleObservation": ("Pendulum-v1", NOT_SAME_STEP, lambda e: wrappers.RescaleObservation(e, 0.0, 1.0)),
    "DtypeObservation": ("CartPole-v1", NOT_SAME_STEP, lambda e: wrappers.DtypeObservation(e, np.float64)),
    "NormalizeObservation": ("CartPole-v1", (AutoresetMode.NEXT_STEP,), wrappers.NormalizeObservation),
    "TransformAction": ("Pendulum-v1", ALL_MODES, lambda e: wrappers.TransformAction(e, _double)),
    "VectorizeTransformAction": (
        "Pendulum-v1",
        ALL_MODES,
        lambda e: wrappers.VectorizeTransformAction(
            e, gymnasium.wrappers.TransformAction, func=_double, action_space=spaces.Box(-4, 4, (1,), np.float32)
        ),
    ),
    "ClipAction": ("Pendulum-v1", ALL_MODES, wrappers.ClipAction),
    "RescaleAction": ("Pendulum-v1", ALL_MODES, lambda e: wrappers.RescaleAction(e, -1.0, 1.0)),
    "TransformReward": ("CartPole-v1", ALL_MODES, lambda e: wrappers.TransformReward(e, _double)),
    "VectorizeTransformReward": (
        "CartPole-v1",
        ALL_MODES,
        lambda e: wrappers.VectorizeTransformReward(e, gymnasium.wrappers.TransformReward, func=_double),
    ),
    "ClipReward": ("Pendulum-v1", ALL_MODES, lambda e: wrappers.ClipReward(e, -2.0, 2.0)),
    "NormalizeReward": ("Pendulum-v1", ALL_MODES, wrappers.NormalizeReward),
    "several": (
        "CartPole-v1",
        (AutoresetMode.NEXT_STEP,),
        lambda e: wrappers.NormalizeReward(wrappers.NormalizeObservation(wrappers.RecordEpisodeStatistics(e))),
    ),
}


def remove_durations(infos: Any) -> Any:
    """Remove the durations of episodes, which never repeat, from the infos of RecordEpisodeStatistics."""
    if isinstance(infos, list):
        return [remove_durations(info) for info in infos]
    if "episode" in infos:
        infos["episode"].pop("t", None)
    return infos


class OptionKeepingSyncVectorEnv(SyncVectorEnv):
    """A ``SyncVectorEnv`` that does not remove ``reset_mask`` from the caller's options, because wrappers read it later."""

    def reset(self, *, seed: Any = None, options: dict[str, Any] | None = None) -> Any:
        return super().reset(seed=seed, options=None if options is None else dict(options))


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "mode"),
    [(name, mode) for name, (_, modes, _) in WRAPPERS.items() for mode in modes],
    ids=lambda value: getattr(value, "name", value),
)
def test_results_of_wrapped_engine_equal_those_of_wrapped_sync_vector_env(
    name: str, mode: AutoresetMode, closes: Any
) -> None:
    env, _, wrap = WRAPPERS[name]
    fns = [REAL_ENV_FNS[env]] * 3
    reference = closes(wrap(OptionKeepingSyncVectorEnv(fns, autoreset_mode=mode)))
    with open_engine(fns, autoreset_mode=mode, num_workers=2) as inner:
        envs = wrap(inner)
        assert envs.observation_space == reference.observation_space
        assert envs.action_space == reference.action_space
        reference.action_space.seed(5)
        assert_identical(envs.reset(seed=3), reference.reset(seed=3), "reset")
        for t in range(12 if env in SLOW_TO_BUILD else 30):
            actions = reference.action_space.sample()
            result, expected = envs.step(actions), reference.step(actions)
            assert_identical(result[:4], expected[:4], f"step {t}")
            assert_identical(remove_durations(result[4]), remove_durations(expected[4]), f"infos of step {t}")
            dones = expected[2] | expected[3]
            if mode is AutoresetMode.DISABLED and dones.any():
                result, expected = (each.reset(options={"reset_mask": dones.copy()}) for each in (envs, reference))
                assert_identical(result, expected, f"reset after step {t}")
        envs.close()
        assert inner.closed


def test_every_vector_wrapper_of_gymnasium_is_tested_or_listed_here() -> None:
    exempt = {
        "RecordVideo",  # tested below
        "HumanRendering",  # opens a window
        *("ArrayConversion", "JaxToNumpy", "JaxToTorch", "NumpyToTorch"),  # for arrays of other libraries
    }
    assert set(wrappers.__all__) <= set(WRAPPERS) | exempt


@pytest.mark.long
@pytest.mark.parametrize("mode", [AutoresetMode.NEXT_STEP, AutoresetMode.DISABLED])
def test_record_video_writes_one_video(tmp_path: Path, mode: AutoresetMode) -> None:
    pytest.importorskip("moviepy")
    fns = [real_env_fn("CartPole-v1", render_mode="rgb_array", max_episode_steps=6)] * 2
    with open_engine(fns, autoreset_mode=mode, num_workers=2) as inner:
        envs = wrappers.RecordVideo(inner, str(tmp_path), step_trigger=lambda step: step == 0, video_length=5)
        envs.reset(seed=1)
        for _ in range(8):
            _, _, terminations, truncations, _ = envs.step(np.array([0, 1]))
            dones = terminations | truncations
            if mode is AutoresetMode.DISABLED and dones.any():
                envs.reset(options={"reset_mask": dones})
        envs.close()
    videos = list(tmp_path.glob("*.mp4"))
    assert len(videos) == 1
    assert videos[0].stat().st_size > 1000


@pytest.mark.parametrize("mode", [AutoresetMode.NEXT_STEP, AutoresetMode.SAME_STEP])
def test_episode_statistics_add_up_over_many_episodes(mode: AutoresetMode) -> None:
    with open_engine([real_env_fn("CartPole-v1")] * 4, autoreset_mode=mode, num_workers=2) as inner:
        envs: Any = wrappers.RecordEpisodeStatistics(inner)
        envs.action_space.seed(1)
        envs.reset(seed=1)
        for _ in range(150):
            envs.step(envs.action_space.sample())
        assert envs.episode_count > 10
        # The reward of CartPole is 1 in every step, so the return of an episode is its length.
        assert list(envs.return_queue) == list(envs.length_queue)


@pytest.mark.long
def test_frame_stack_in_workers_equals_sync_vector_env() -> None:
    def build_env() -> gymnasium.Env:
        env = gymnasium.wrappers.GrayscaleObservation(make_env("ALE/Pong-v5", frameskip=4))
        return gymnasium.wrappers.FrameStackObservation(gymnasium.wrappers.ResizeObservation(env, (84, 84)), 4)

    assert_matches_sync([build_env] * 2, 5)


# --- ``VectorEnvContract`` with several configurations of the engine, and with faulty vector environments
# ``FAULTS`` lists each fault with the test of the contract that must fail, and the arguments of that test.


class _EngineContract(VectorEnvContract):
    options: ClassVar[dict[str, Any]] = {}

    def make(self, num_envs: int = 3, autoreset_mode: AutoresetMode = AutoresetMode.NEXT_STEP, **kwargs: Any) -> VectorEnv:
        options = {"autoreset_mode": autoreset_mode, **self.options, **kwargs}
        return vecenv.AsyncVectorEnv(scripted_env_fns(num_envs), **options)


@pytest.mark.long
class TestProcessPerEnv(_EngineContract):
    pass


class TestInProcess(_EngineContract):
    options: ClassVar[dict[str, Any]] = {"num_workers": 0}


class TestShortEpisodesWithoutAutoreset(VectorEnvContract):
    autoreset_modes = (AutoresetMode.DISABLED,)

    def make(self, num_envs: int = 3, autoreset_mode: AutoresetMode = AutoresetMode.DISABLED, **kwargs: Any) -> VectorEnv:
        fns = [functools.partial(gymnasium.make, "Blackjack-v1")] * num_envs
        return vecenv.AsyncVectorEnv(fns, autoreset_mode=autoreset_mode, num_workers=0, **kwargs)


@pytest.mark.long
class TestWithoutSharedMemory(_EngineContract):
    options: ClassVar[dict[str, Any]] = {"num_workers": 2, "shared_memory": False}


@pytest.mark.long
class TestNestedObservationsAndActionsInTwoWorkers(VectorEnvContract):
    def make(self, num_envs: int = 3, autoreset_mode: AutoresetMode = AutoresetMode.NEXT_STEP, **kwargs: Any) -> VectorEnv:
        fns = [functools.partial(NestedDictEnv, index) for index in range(num_envs)]
        return vecenv.AsyncVectorEnv(fns, autoreset_mode=autoreset_mode, num_workers=2, **kwargs)


# -- faulty vector environments ------------------------------------------------------------------------------


class FaultyVectorEnv(gymnasium.vector.VectorWrapper):
    """A vector environment with a fault: ``change`` gets the environment and each result of ``step``, which it modifies."""

    def __init__(self, envs: Any, change: Callable[[Any, list[Any]], None]) -> None:
        super().__init__(envs)
        self.change = change

    def step(self, actions: Any) -> Any:
        result = list(self.env.step(actions))
        self.change(self, result)
        return tuple(result)


class SeedIgnoringVectorEnv(gymnasium.vector.VectorWrapper):
    latest_seed = 0

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        SeedIgnoringVectorEnv.latest_seed += 100
        return self.env.reset(seed=SeedIgnoringVectorEnv.latest_seed, options=options)


class MaskIgnoringVectorEnv(gymnasium.vector.VectorWrapper):
    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        return self.env.reset(seed=seed)


class LateCheckingVectorEnv(gymnasium.vector.VectorWrapper):
    """A vector environment that checks the number of actions only after the step."""

    def step(self, actions: Any) -> Any:
        result = self.env.step(np.resize(actions, (self.num_envs, 2)))
        if len(actions) != self.num_envs:
            raise ValueError("wrong number of actions")
        return result


def _cast_rewards_to_float32(envs: Any, result: list[Any]) -> None:
    result[1] = result[1].astype(np.float32)


def _cast_terminations_to_int(envs: Any, result: list[Any]) -> None:
    result[2] = result[2].astype(np.int64)


def _reuse_reward_array(envs: Any, result: list[Any]) -> None:
    envs.reused = getattr(envs, "reused", result[1])
    envs.reused[:] = result[1]
    result[1] = envs.reused


def _reuse_observation_array(envs: Any, result: list[Any]) -> None:
    envs.reused = getattr(envs, "reused", result[0])
    envs.reused["x"][:] = result[0]["x"]
    result[0] = envs.reused


def _make_rewards_two_dimensional(envs: Any, result: list[Any]) -> None:
    result[1] = result[1][:, None]


def _remove_info_masks(envs: Any, result: list[Any]) -> None:
    for key in [key for key in result[4] if key.startswith("_")]:
        del result[4][key]


def _replace_infos_with_a_list(envs: Any, result: list[Any]) -> None:
    result[4] = [{}] * envs.num_envs


def _randomize_observations(envs: Any, result: list[Any]) -> None:
    result[0]["x"] = np.random.default_rng().random(result[0]["x"].shape, dtype=np.float32)


def _set_all_rewards_to_one(envs: Any, result: list[Any]) -> None:
    result[1] = np.ones_like(result[1])


def _remove_final_observations(envs: Any, result: list[Any]) -> None:
    result[4].pop("final_obs", None)


def _add_final_observations_to_all_rows(envs: Any, result: list[Any]) -> None:
    if "final_obs" in result[4]:
        result[4]["final_obs"][:] = [envs.single_observation_space.sample() for _ in range(envs.num_envs)]
        result[4]["_final_obs"][:] = True


NEXT, SAME, DISABLED = AutoresetMode.NEXT_STEP, AutoresetMode.SAME_STEP, AutoresetMode.DISABLED
SHAPES_TEST = "test_step_returns_five_values_of_the_right_shapes_and_dtypes"
FINAL_OBSERVATION_TEST = "test_same_step_autoreset_reports_the_final_observation_and_info"
FAULTS: list[tuple[Any, str, dict[str, Any]]] = [
    (_cast_rewards_to_float32, SHAPES_TEST, {"mode": NEXT, "num_envs": 3}),
    (_cast_terminations_to_int, SHAPES_TEST, {"mode": DISABLED, "num_envs": 1}),
    (_make_rewards_two_dimensional, SHAPES_TEST, {"mode": SAME, "num_envs": 3}),
    (_replace_infos_with_a_list, SHAPES_TEST, {"mode": NEXT, "num_envs": 3}),
    (_reuse_reward_array, "test_rewards_and_flags_are_fresh_arrays_at_every_step", {}),
    (_reuse_observation_array, "test_observations_of_an_earlier_step_do_not_change", {}),
    (_remove_info_masks, "test_every_info_has_a_mask_with_one_flag_for_each_environment", {"mode": NEXT}),
    (_randomize_observations, "test_the_same_seed_gives_the_same_trajectory", {"mode": NEXT}),
    (_randomize_observations, "test_seeding_again_starts_the_same_trajectory_again", {}),
    (_set_all_rewards_to_one, "test_next_step_autoreset_ignores_one_action_and_gives_zero_reward", {}),
    (_remove_final_observations, FINAL_OBSERVATION_TEST, {}),
    (_add_final_observations_to_all_rows, FINAL_OBSERVATION_TEST, {}),
    (SeedIgnoringVectorEnv, "test_an_integer_seed_gives_consecutive_seeds", {}),
    (SeedIgnoringVectorEnv, "test_a_masked_reset_gives_the_chosen_rows_their_own_seeds", {}),
    (MaskIgnoringVectorEnv, "test_a_masked_reset_does_not_change_the_other_rows", {"mode": NEXT}),
    (LateCheckingVectorEnv, "test_the_wrong_number_of_actions_is_refused_before_anything_happens", {"count": 2}),
]


@pytest.mark.parametrize(("fault", "test", "arguments"), FAULTS, ids=lambda value: getattr(value, "__name__", None))
def test_contract_detects_a_faulty_vector_env(fault: Any, test: str, arguments: dict[str, Any]) -> None:
    class Contract(_EngineContract):
        options: ClassVar[dict[str, Any]] = {"num_workers": 0}

        def make(self, *args: Any, **kwargs: Any) -> Any:
            inner = super().make(*args, **kwargs)
            return fault(inner) if isinstance(fault, type) else FaultyVectorEnv(inner, fault)

    with pytest.raises((AssertionError, KeyError)):
        getattr(Contract(), test)(**arguments)


def test_contract_fails_if_calls_work_after_close() -> None:
    class Contract(VectorEnvContract):
        def make(self, num_envs: int = 3, autoreset_mode: Any = AutoresetMode.NEXT_STEP, **kwargs: Any) -> Any:
            return SyncVectorEnv(scripted_env_fns(num_envs), autoreset_mode=autoreset_mode)

    with pytest.raises(pytest.fail.Exception):
        Contract().test_use_after_close_raises()


def test_contract_skips_unsupported_features_with_a_reason() -> None:
    class Contract(_EngineContract):
        options: ClassVar[dict[str, Any]] = {"num_workers": 0}
        autoreset_modes: ClassVar[tuple[AutoresetMode, ...]] = (AutoresetMode.NEXT_STEP,)
        honours_seeds: ClassVar[bool] = False

    with pytest.raises(pytest.skip.Exception, match="SAME_STEP"):
        Contract().test_same_step_autoreset_reports_the_final_observation_and_info()
    with pytest.raises(pytest.skip.Exception, match="honours_seeds"):
        Contract().test_seeding_again_starts_the_same_trajectory_again()


def test_contract_without_a_factory_raises() -> None:
    with pytest.raises(NotImplementedError, match="make"):
        VectorEnvContract().make()


# -- ``assert_same_trajectory`` ------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", AutoresetMode)
def test_assert_same_trajectory_detects_differences(mode: AutoresetMode) -> None:
    fns = counters(2, lengths=(3,))
    reference = SyncVectorEnv(fns, autoreset_mode=mode)
    envs: Any = vecenv.AsyncVectorEnv(fns, autoreset_mode=mode, num_workers=0)
    longer_episodes: Any = vecenv.AsyncVectorEnv(counters(2, lengths=(4,)), autoreset_mode=mode, num_workers=0)
    assert_same_trajectory(envs, reference, 20, seed=3)
    new_reference = SyncVectorEnv(fns, autoreset_mode=mode)
    with pytest.raises(AssertionError, match="step 2"):
        assert_same_trajectory(longer_episodes, new_reference, 20, seed=[1, 2])
    for each in (envs, longer_episodes, reference, new_reference):
        each.close()
