"""Tests of ``AsyncVectorEnv``: its arguments, errors and their order, custom workers, and ``gymnasium.make_vec``."""

from __future__ import annotations

import inspect
import multiprocessing
import os
import re
import typing
import warnings
from contextlib import closing
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from envs import CounterEnv, CustomSpace, Options, SpaceEnv, counters, open_engine, ready_engine
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.async_vector_env import _async_worker
from gymnasium.vector.utils import batch_space

import vecenv
from vecenv import WorkerOptions
from vecenv.aio import Pool
from vecenv.front.arguments import HAS_MAX_CONCURRENCY
from vecenv.multi_agent import MultiAgentVecEnv
from vecenv.planning.options import EngineOptions

# --- the class, and the attributes that Gymnasium's wrappers use ----------------------------------


def test_class_is_a_gymnasium_vector_env() -> None:
    assert issubclass(vecenv.AsyncVectorEnv, VectorEnv)
    assert issubclass(vecenv.AsyncVectorEnv, gymnasium.vector.AsyncVectorEnv)
    assert vecenv.AsyncVectorEnv.__name__ == "AsyncVectorEnv"


def test_public_methods_are_not_inherited() -> None:
    """Gymnasium's class is the base class, but its methods wait for the pipes of its own workers."""
    base_class = gymnasium.vector.AsyncVectorEnv
    inherited = {name for name in vars(base_class) if getattr(vecenv.AsyncVectorEnv, name) is getattr(base_class, name)}
    assert {name for name in inherited if not name.startswith("__")} == {
        "_poll_pipe_envs", "_assert_is_running", "_raise_if_errors",
    }  # fmt: skip


def test_overridden_step_wait_and_close_extras_are_called() -> None:
    """A subclass that was written for Gymnasium's class also works with ours as its base class."""

    class DoubledRewards(vecenv.AsyncVectorEnv):
        def step_wait(self, timeout: float | None = None) -> Any:
            observations, rewards, *rest = super().step_wait(timeout)
            return (observations, rewards * 2, *rest)

        def close_extras(self, timeout: float | None = None, terminate: bool = False) -> None:
            self.was_closed = True
            super().close_extras(timeout=timeout, terminate=terminate)

    envs: Any = DoubledRewards(counters(2))
    try:
        envs.reset(seed=1)
        assert isinstance(envs, gymnasium.vector.AsyncVectorEnv)
        assert envs.step([0, 0])[1].tolist() == [0.002, 2.002]
    finally:
        envs.close()
    assert envs.was_closed


def test_subclass_may_have_positional_arguments_of_its_own() -> None:
    class Named(vecenv.AsyncVectorEnv):
        def __init__(self, env_fn: Any, num_envs: int, gamma: float, frame_skip: int, seed: int, name: str) -> None:
            super().__init__([env_fn] * num_envs, num_workers=0)
            self.name = name

    with closing(Named(CounterEnv, 2, 0.9, 4, 0, "eval")) as envs:
        assert (type(envs), envs.num_envs, envs.name) == (Named, 2, "eval")


def test_subclass_cannot_pass_a_custom_worker_to_its_base_class() -> None:
    class WithWorker(vecenv.AsyncVectorEnv):
        def __init__(self) -> None:
            super().__init__(counters(2), worker=reward_scaling_worker)

    with pytest.raises(ValueError, match="`worker` must be a function"):
        WithWorker()


@pytest.mark.parametrize("is_interrupted", [False, True])
def test_overridden_close_extras_needs_no_arguments(is_interrupted: bool) -> None:
    class ClosingViewer(vecenv.AsyncVectorEnv):
        num_interruptions = int(is_interrupted)

        def close_extras(self) -> None:
            if self.num_interruptions:
                self.num_interruptions -= 1
                raise KeyboardInterrupt
            super().close_extras()

    envs: Any = ClosingViewer(counters(2))
    try:
        if is_interrupted:
            with pytest.raises(KeyboardInterrupt):
                envs.close()
        envs.close()
        assert envs.closed
        assert multiprocessing.active_children() == []
    finally:
        vecenv.AsyncVectorEnv.close_extras(envs)


def test_class_accepts_type_arguments() -> None:
    assert vecenv.AsyncVectorEnv[np.ndarray, np.ndarray] is not None


def test_subclass_with_type_arguments_can_be_used(closes: Any) -> None:
    class Subclass(vecenv.AsyncVectorEnv[np.ndarray, np.ndarray]):
        pass

    envs: Any = closes(Subclass(counters(2), num_workers=0))
    assert envs.reset(seed=1)[0].shape == (2, 4)
    assert "Subclass" in repr(envs)


def test_base_class_attributes_have_their_defaults() -> None:
    with open_engine(counters(2), num_workers=0) as envs:
        assert envs.spec is None
        assert envs.render_mode is None
        assert envs.closed is False
        assert envs.num_envs == 2
        assert envs.unwrapped is envs
        assert envs._np_random is None
        assert envs._np_random_seed is None
        assert callable(envs._add_info)


def test_spaces_equal_those_of_one_env_and_their_batched_spaces(every_engine: Options) -> None:
    env = CounterEnv()
    with open_engine(counters(3), **every_engine) as envs:
        assert envs.single_observation_space == env.observation_space
        assert envs.single_action_space == env.action_space
        assert envs.observation_space == batch_space(env.observation_space, 3)
        assert envs.action_space == batch_space(env.action_space, 3)


def test_seeded_action_space_samples_equal_sync_vector_env(closes: Any) -> None:
    reference = closes(gymnasium.vector.SyncVectorEnv(counters(3)))
    with open_engine(counters(3), num_workers=0) as envs:
        envs.action_space.seed(5)
        reference.action_space.seed(5)
        for _ in range(5):
            np.testing.assert_array_equal(envs.action_space.sample(), reference.action_space.sample())


def test_metadata_is_a_copy_with_the_autoreset_mode() -> None:
    CounterEnv.metadata.pop("autoreset_mode", None)  # Gymnasium before 1.4 writes it into the metadata of the class
    with open_engine(counters(2), num_workers=0, autoreset_mode="SameStep") as envs:
        assert envs.metadata["autoreset_mode"] is AutoresetMode.SAME_STEP
        assert envs.metadata["render_modes"] == ["rgb_array"]
        assert envs.metadata["render_fps"] == 30
    assert "autoreset_mode" not in CounterEnv.metadata


def test_repr_names_class_num_envs_and_spec() -> None:
    with open_engine(counters(2), num_workers=0) as envs:
        assert repr(envs).startswith("AsyncVectorEnv(")
        assert "num_envs=2" in repr(envs)
        envs.spec = gymnasium.spec("CartPole-v1")
        assert repr(envs).startswith("AsyncVectorEnv(CartPole-v1, num_envs=2")


def test_constructor_arguments_are_available_as_attributes(every_engine: Options) -> None:
    env_fns = counters(3)
    with open_engine(env_fns, shared_memory=False, copy=False, daemon=False, max_concurrency=2, **every_engine) as envs:
        assert envs.env_fns is env_fns
        assert envs.shared_memory is False
        assert envs.copy is False
        assert envs.context is None
        assert envs.daemon is False
        assert envs.worker is None
        assert envs.observation_mode == "same"
        assert envs.autoreset_mode is AutoresetMode.NEXT_STEP
        assert envs.max_concurrency == 2


@pytest.mark.parametrize("name", ["observations", "processes", "parent_pipes", "error_queue", "_state"])
def test_public_and_private_attributes_of_gymnasiums_class_exist(name: str) -> None:
    with open_engine(counters(2)) as envs:
        assert hasattr(envs, name)


def test_default_is_one_named_process_per_environment() -> None:
    with open_engine(counters(3)) as envs:
        assert len(envs.processes) == 3
        assert len(set(envs.call("pid"))) == 3
        names = [process.name for process in envs.processes]
        assert all("AsyncVectorEnv" in name for name in names)
        assert [name.rsplit("-", 1)[1] for name in names] == ["0", "1", "2"]


# --- the constructor, its arguments, and the order of its errors ----------------------------------

requires_worker_check = pytest.mark.skipif(
    not HAS_MAX_CONCURRENCY, reason="Gymnasium before 1.4 does not check the worker's arguments"
)


def observation_env_fn(space: spaces.Space) -> Any:
    return lambda: SpaceEnv(space)


def box_env_fn(low: float = 0.0, high: float = 1.0, shape: tuple[int, ...] = (2,), dtype: Any = np.float32) -> Any:
    return observation_env_fn(spaces.Box(low, high, shape, dtype))


def action_env_fn(space: spaces.Space) -> Any:
    return lambda: SpaceEnv(spaces.Box(0, 1, (2,)), space)


def test_arguments_have_gymnasiums_names_order_and_defaults() -> None:
    expected = list(inspect.signature(gymnasium.vector.AsyncVectorEnv.__init__).parameters.values())
    first = list(inspect.signature(vecenv.AsyncVectorEnv.__init__).parameters.values())[: len(expected)]
    assert [(p.name, p.kind, p.default) for p in first] == [(p.name, p.kind, p.default) for p in expected]


def test_additional_arguments_are_keyword_only() -> None:
    gymnasium_parameters = inspect.signature(gymnasium.vector.AsyncVectorEnv.__init__).parameters
    our_parameters = inspect.signature(vecenv.AsyncVectorEnv.__init__).parameters
    additional = [parameter for name, parameter in our_parameters.items() if name not in gymnasium_parameters]
    assert {"num_workers", "worker_options"} <= {parameter.name for parameter in additional}
    by_position = {parameter.name for parameter in additional if parameter.kind is not inspect.Parameter.KEYWORD_ONLY}
    assert by_position <= {"max_concurrency"}  # Gymnasium has this parameter from 1.4 on


def test_subclass_may_add_options(closes: Any) -> None:
    class LabelledVecEnv(vecenv.AsyncVectorEnv[Any, Any]):
        def __init__(self, env_fns: Any, *, label: str, **options: Any) -> None:
            super().__init__(env_fns, **options)
            self.label = label

    envs = closes(LabelledVecEnv(counters(1), label="mine"))
    assert envs.label == "mine"


def test_gymnasiums_arguments_are_accepted_by_position() -> None:
    envs: Any = vecenv.AsyncVectorEnv(counters(2), False, False, "fork", False, None, "same", AutoresetMode.DISABLED, 1)
    assert envs.shared_memory is False
    assert envs.autoreset_mode is AutoresetMode.DISABLED
    assert envs.max_concurrency == 1
    envs.close()


@pytest.mark.parametrize("mode", AutoresetMode)
def test_autoreset_mode_accepts_its_string_value(mode: AutoresetMode) -> None:
    with open_engine(counters(2), autoreset_mode=mode.value, num_workers=0) as envs:
        assert envs.autoreset_mode is mode
        assert envs.metadata["autoreset_mode"] is mode


def reward_scaling_worker(index: int, env_fn: Any, *rest: Any) -> None:
    """Run Gymnasium's worker with a wrapper that multiplies rewards by 100."""

    def build() -> gymnasium.Env:
        return gymnasium.wrappers.TransformReward(env_fn(), lambda reward: reward * 100)

    _async_worker(index, build, *rest)


OPTIONS_FOR_ENVS_IN_CALLER: list[Options] = [{"num_workers": 0}, {"use_caller": True}]
OPTIONS_WITHOUT_CUSTOM_WORKER: list[Options] = [{"num_workers": 1}, {"use_caller": True}, {"on_failure": "restart"}]
WORKER_VARIABLES: Options = {"worker_options": WorkerOptions(env={"A": "1"})}
BATCH_SIZE_TEXT = "`batch_size` must be None, 'auto' or an int within 1..2"
PRELOAD_TEXT = "WorkerOptions(preload) must be a list of module names"


def preload_options(modules: Any) -> Options:
    return {"worker_options": WorkerOptions(preload=modules)}


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"autoreset_mode": "x"}, ValueError, "'x' is not a valid AutoresetMode: expected one of 'NextStep', 'SameStep', "),
        ({"context": "forkservr"}, ValueError, "cannot find context for 'forkservr': expected None or one of 'fork', "),
        (
            {"max_concurrency": 1.5},
            ValueError,
            "`max_concurrency` must be an integer or None, got <class 'float'>.",
        ),
        (
            {"max_concurrency": "2"},
            ValueError,
            "`max_concurrency` must be an integer or None, got <class 'str'>.",
        ),
        ({"max_concurrency": 0}, ValueError, "`max_concurrency` must be a positive or None, got 0."),
        ({"max_concurrency": -1}, ValueError, "`max_concurrency` must be a positive or None, got -1."),
        pytest.param(
            {"worker": lambda a, b: None},
            ValueError,
            "A custom `worker` must accept 8 arguments.",
            marks=requires_worker_check,
        ),
        (
            {"observation_mode": "x"},
            ValueError,
            "Invalid `observation_mode`, expected: 'same' or 'different' or tuple",
        ),
        ({"observation_mode": ["a", "b"]}, ValueError, "Invalid `observation_mode`"),
        ({"observation_mode": (1, 2, 3)}, ValueError, "Invalid `observation_mode`"),
        (
            {"observation_mode": (1, 2)},
            TypeError,
            "Expected both elements of observation_mode to be Spaces, got",
        ),
        ({"context": "zz"}, ValueError, "cannot find context for 'zz'"),
        # options that Gymnasium's class lacks, or errors with a different text
        ({"spares": 1}, TypeError, "AsyncVectorEnv has no option 'spares'. Write spare_workers=k, an option of"),
        ({"num_worker": 1}, TypeError, "AsyncVectorEnv has no option 'num_worker'. Did you mean 'num_workers'?"),
        ({"nworkers": 2}, TypeError, "AsyncVectorEnv has no option 'nworkers'. Did you mean 'num_workers'?"),
        ({"n_workers": 2}, TypeError, "AsyncVectorEnv has no option 'n_workers'. Did you mean 'num_workers'?"),
        ({"workers": 2}, TypeError, "AsyncVectorEnv has no option 'workers'. Did you mean 'num_workers'?"),
        ({"env_fns": []}, ValueError, "AsyncVectorEnv needs at least one env_fn, got []"),
        ({"env_fns": (fn for fn in counters(2))}, TypeError, "; got <generator object"),
        ({"env_fns": [lambda: 3] * 2}, TypeError, "env_fns[0]() returned int, which has no `reset`: expected"),
        *(
            ({"worker": reward_scaling_worker, **option}, ValueError, "cannot be combined with a custom")
            for option in OPTIONS_WITHOUT_CUSTOM_WORKER
        ),
        *(({"batch_size": wrong}, ValueError, BATCH_SIZE_TEXT) for wrong in (0, -1, 3, 1.5, "2", True)),
        (
            {**preload_options(["numpy"]), "context": "fork"},
            ValueError,
            "WorkerOptions(preload) needs context='forkserver', got",
        ),
        ({**preload_options("numpy"), "context": "forkserver"}, ValueError, f"{PRELOAD_TEXT}, got 'numpy'"),
        ({**preload_options([3]), "context": "forkserver"}, ValueError, f"{PRELOAD_TEXT}, got [3]"),
        *(
            ({**WORKER_VARIABLES, **kwargs}, ValueError, "`worker_options` needs worker processes")
            for kwargs in OPTIONS_FOR_ENVS_IN_CALLER
        ),
        ({"use_caller": "yes"}, ValueError, "`use_caller` must be None, True or False, got 'yes'"),
        ({"generators": "mine"}, ValueError, "`generators` must be 'shared' or 'own', got 'mine'"),
        (
            {"num_workers": 1, "env_threads": 2, "generators": "own"},
            ValueError,
            "`generators` must be 'shared' with env_threads",
        ),
        ({"worker": print, "generators": "own"}, ValueError, "`generators`"),
    ],
)
def test_wrong_argument_is_refused_with_an_error_that_names_it(options: Options, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=re.escape(text)):
        vecenv.AsyncVectorEnv(**{"env_fns": counters(2), **options})


def test_observation_mode_without_spaces_raises_as_in_the_installed_gymnasium() -> None:
    wrong_mode: Any = (1, 2)
    with pytest.raises((TypeError, AssertionError)) as expected:
        gymnasium.vector.SyncVectorEnv(counters(2), observation_mode=wrong_mode)
    with pytest.raises(expected.type):
        vecenv.AsyncVectorEnv(counters(2), observation_mode=wrong_mode)


@requires_worker_check
def test_worker_with_too_few_arguments_raises_value_error_with_a_cause() -> None:
    with pytest.raises(ValueError, match="8 arguments") as caught:
        vecenv.AsyncVectorEnv(counters(2), worker=lambda index: None)
    assert isinstance(caught.value.__cause__, TypeError)


@pytest.mark.parametrize("value", [True, 1, np.int64(1), 5])
def test_max_concurrency_accepts_any_positive_integer(value: Any) -> None:
    with open_engine(counters(2), max_concurrency=value) as envs:
        assert envs.max_concurrency == value
        envs.reset(seed=1)


def test_arguments_are_checked_before_any_environment_is_built() -> None:
    def fail_to_build() -> gymnasium.Env:
        raise AssertionError("built too early")

    with pytest.raises(ValueError, match="AutoresetMode"):
        vecenv.AsyncVectorEnv([fail_to_build], autoreset_mode="x", max_concurrency=0)
    with pytest.raises(ValueError, match="max_concurrency"):
        vecenv.AsyncVectorEnv([fail_to_build], max_concurrency=0, worker=lambda: None)
    if HAS_MAX_CONCURRENCY:  # before 1.4, Gymnasium did not check the worker
        with pytest.raises(ValueError, match="worker"):
            vecenv.AsyncVectorEnv([fail_to_build], worker=lambda: None)


@pytest.mark.parametrize(
    ("env_fns", "expected"),
    [
        ("CartPole-v1", r"got the id 'CartPole-v1': use vecenv\.make_vec\('CartPole-v1', 8\) instead$"),
        (CounterEnv, r"got <class '.*CounterEnv'>; for copies of one environment, write \[function\] \* 8$"),
        (["CartPole-v1"], r"env_fns\[0\] is 'CartPole-v1'$"),
        ([CounterEnv, CounterEnv()], r"env_fns\[1\] is an environment, .*CounterEnv.*, not a function$"),
        (3, r"got 3$"),
    ],
    ids=["an id", "one function", "a list of ids", "an environment", "a number"],
)
def test_invalid_env_fns_are_refused_with_advice(env_fns: Any, expected: str) -> None:
    start = re.escape("AsyncVectorEnv takes a sequence of functions that each build one environment: [")
    with pytest.raises(TypeError, match=f"^{start}.*; {expected}"):
        vecenv.AsyncVectorEnv(env_fns)


def test_signature_shows_all_arguments_and_dir_all_public_names() -> None:
    class Subclass(vecenv.AsyncVectorEnv[Any, Any]):
        def __init__(self, count: int) -> None:
            super().__init__(counters(count))

    all_parameters = list(inspect.signature(vecenv.AsyncVectorEnv.__init__).parameters)
    assert list(inspect.signature(vecenv.AsyncVectorEnv).parameters) == all_parameters[1:]
    assert list(inspect.signature(Subclass).parameters) == ["count"]
    public = {*vecenv.__all__, *vecenv._MODULES, *sum(vecenv._NAMES_BY_MODULE.values(), ())} - {"__version__"}
    assert [name for name in dir(vecenv) if not name.startswith("__")] == sorted(public)


def test_env_fns_may_be_a_tuple() -> None:
    with open_engine(tuple(counters(2)), num_workers=0) as envs:
        assert envs.num_envs == 2


def test_exception_of_the_first_env_fn_is_raised_unchanged(every_engine: Options) -> None:
    def fail_to_build() -> gymnasium.Env:
        raise RuntimeError("no licence")

    with pytest.raises(RuntimeError, match=r"^no licence$"):
        vecenv.AsyncVectorEnv([fail_to_build, *counters(2)], **every_engine)


def test_caller_builds_one_env_for_its_spaces_and_closes_it(tmp_path: Path, process_engine: Options) -> None:
    built, closed = tmp_path / "built", tmp_path / "closed"
    built.mkdir()

    def build() -> gymnasium.Env:
        (built / f"{os.getpid()}-{len(list(built.iterdir()))}").touch()
        env = CounterEnv(7)
        env.closed_file = closed
        return env

    with open_engine([build], **process_engine):
        built_in_caller = [path for path in built.iterdir() if path.name.startswith(f"{os.getpid()}-")]
        assert len(built_in_caller) == 1
        assert len(list(built.iterdir())) == 2
        assert closed.read_text() == "7\n"


def test_observation_mode_different_builds_every_env_once_in_the_caller() -> None:
    built_in_caller: list[int] = []

    def make_env_fn(index: int) -> Any:
        def build() -> gymnasium.Env:
            built_in_caller.append(index)  # workers append to their own copies
            return SpaceEnv(spaces.Box(0, 1 + index, (2,), np.float32))

        return build

    with open_engine([make_env_fn(0), make_env_fn(1)], observation_mode="different", context="fork") as envs:
        assert built_in_caller == [0, 1]
        assert envs.single_observation_space == spaces.Box(0, 1, (2,), np.float32)


def test_observation_mode_different_batches_different_spaces(every_engine: Options) -> None:
    fns = [box_env_fn(0, 1), box_env_fn(-5, 5), box_env_fn(0, 9)]
    with open_engine(fns, observation_mode="different", **every_engine) as envs:
        reference = gymnasium.vector.SyncVectorEnv(fns, observation_mode="different")
        assert envs.observation_space == reference.observation_space
        assert envs.single_observation_space == reference.single_observation_space
        observations, _ = envs.reset(seed=1)
        assert observations in envs.observation_space
        np.testing.assert_array_equal(observations, reference.reset(seed=1)[0])
        reference.close()


def test_observation_mode_uses_a_given_pair_of_spaces(every_engine: Options) -> None:
    single = spaces.Box(-9, 9, (2,), np.float32)
    batched = batch_space(single, 2)
    with open_engine([box_env_fn(0, 1), box_env_fn(0, 2)], observation_mode=(batched, single), **every_engine) as envs:
        assert envs.observation_space is batched
        assert envs.single_observation_space is single
        assert envs.reset(seed=1)[0] in batched


def test_observation_mode_same_refuses_different_spaces(every_engine: Options, shared_memory: bool) -> None:
    with pytest.raises(
        RuntimeError,
        match=r"the sub-environments observation spaces are not equivalent\. .*"
        r"If this is intentional, use `observation_mode='different'` instead\.",
    ):
        vecenv.AsyncVectorEnv([box_env_fn(0, 1), box_env_fn(0, 2)], shared_memory=shared_memory, **every_engine)


@pytest.mark.parametrize("shape", [(3,), (2, 1)])
def test_different_shapes_are_refused_even_with_a_pair_of_spaces(every_engine: Options, shape: tuple[int, ...]) -> None:
    single = spaces.Box(0, 1, (2,), np.float32)
    with pytest.raises(RuntimeError, match="do not share a common shape and dtype"):
        vecenv.AsyncVectorEnv(
            [box_env_fn(), box_env_fn(shape=shape)], observation_mode=(batch_space(single, 2), single), **every_engine
        )


def test_different_action_spaces_are_refused(every_engine: Options) -> None:
    with pytest.raises(RuntimeError, match=r"Some environments have an action space different from `Discrete\(2\)`"):
        vecenv.AsyncVectorEnv([action_env_fn(spaces.Discrete(2)), action_env_fn(spaces.Discrete(3))], **every_engine)


@pytest.mark.parametrize("make_env_fn", [action_env_fn, observation_env_fn], ids=["action", "observation"])
def test_error_about_different_spaces_names_both_and_the_env(every_engine: Options, make_env_fn: Any) -> None:
    fns = [make_env_fn(spaces.Discrete(number)) for number in (2, 2, 7)]
    with pytest.raises(RuntimeError) as caught:
        vecenv.AsyncVectorEnv(fns, **every_engine)
    text = str(caught.value) + "".join(getattr(caught.value, "__notes__", []))
    assert "Discrete(2)" in text
    assert "Discrete(7)" in text
    assert re.search(r"\b2\b", text.replace("Discrete(2)", "")), f"the index of the env is missing: {text}"


@pytest.mark.parametrize("num_workers", [0, 1])
def test_custom_observation_space_is_pickled_with_a_warning(num_workers: int) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        envs = vecenv.AsyncVectorEnv([lambda: SpaceEnv(CustomSpace())] * 2, num_workers=num_workers)
    # other warnings are about forks, from Python 3.12 on
    assert sum("pickled" in str(warning.message) for warning in caught) == num_workers
    reference = gymnasium.vector.SyncVectorEnv([lambda: SpaceEnv(CustomSpace())] * 2)
    assert envs.reset(seed=1)[0] == reference.reset(seed=1)[0]
    assert envs.step([0, 0])[0] == reference.step([0, 0])[0]
    envs.close()


def test_context_defaults_to_the_global_start_method() -> None:
    before = multiprocessing.get_start_method(allow_none=True)
    multiprocessing.set_start_method("forkserver", force=True)
    try:
        with open_engine(counters(2), num_workers=1) as envs:
            assert type(envs.processes[0]).__name__ == "ForkServerProcess"
    finally:
        multiprocessing.set_start_method(before, force=True)


@pytest.mark.parametrize("daemon", [True, False])
def test_daemon_option_applies_to_every_process(daemon: bool) -> None:
    with open_engine(counters(2), daemon=daemon) as envs:
        assert all(process.daemon is daemon for process in envs.processes)


def test_mpi_variables_are_hidden_from_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "1")
    monkeypatch.setenv("PMI_SIZE", "2")

    class VariablesEnv(CounterEnv):
        def mpi_variables(self) -> list[str]:
            return [name for name in os.environ if name.startswith(("OMPI_", "PMI_"))]

    with open_engine([VariablesEnv, VariablesEnv]) as envs:
        assert envs.call("mpi_variables") == ([], [])
    assert os.environ["OMPI_COMM_WORLD_RANK"] == "1"
    assert os.environ["PMI_SIZE"] == "2"


def test_engine_options_repeat_the_constructor_signature() -> None:
    """``EngineOptions`` lists the options of classes that use the engine. They set or refuse the arguments that it omits."""
    hints = typing.get_type_hints(vecenv.AsyncVectorEnv.__init__)
    shared = set(hints) - {"env_fns", "worker", "observation_mode", "autoreset_mode", "return"}
    assert {name: hints[name] for name in shared} == typing.get_type_hints(EngineOptions)


def test_spaces_passed_by_position_as_in_openrl_are_refused(closes: Any) -> None:
    space = spaces.Discrete(2)
    with pytest.raises(TypeError, match=r"`shared_memory` must be True or False, got Discrete\(2\)"):
        vecenv.AsyncVectorEnv(counters(1), space, space, num_workers=0)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"`copy` must be True or False, got None"):
        vecenv.AsyncVectorEnv(counters(1), True, None, num_workers=0)  # type: ignore[arg-type]
    envs = closes(vecenv.AsyncVectorEnv(counters(1), np.True_, 1, num_workers=0))  # type: ignore[arg-type]
    assert envs.num_envs == 1


@pytest.mark.parametrize(
    "options",
    [{"num_workers": 2}, {"num_workers": 0}, {"num_workers": "auto"}, {"worker_options": WorkerOptions(dummy_env=False)}],
    ids=str,
)
def test_error_names_the_env_fn_that_returns_none(options: dict[str, Any]) -> None:
    with pytest.raises(TypeError, match=r"env_fns\[0\]\(\) returned None instead of an environment: is a `return` missing"):
        vecenv.AsyncVectorEnv([lambda: None] * 2, **options)  # type: ignore[list-item, return-value]


# --- a custom ``worker`` uses Gymnasium's pipe protocol, so it runs in Gymnasium's class -----------


def test_results_with_a_custom_worker_are_those_of_the_worker(shared_memory: bool) -> None:
    with open_engine(counters(2), shared_memory=shared_memory, worker=reward_scaling_worker) as envs:
        assert isinstance(envs, VectorEnv)
        assert isinstance(envs, gymnasium.vector.AsyncVectorEnv)
        assert envs.worker is reward_scaling_worker
        observations, _ = envs.reset(seed=4)
        assert observations[:, 3].tolist() == [4, 5]
        np.testing.assert_allclose(envs.step([0, 0])[1], [0.1, 100.1])
        assert envs.call("env_id") == (0, 1)


def test_custom_worker_is_accepted_by_position(closes: Any) -> None:
    envs: Any = closes(vecenv.AsyncVectorEnv(counters(2), True, True, None, True, reward_scaling_worker))
    envs.reset(seed=1)


def test_max_concurrency_with_a_custom_worker_is_passed_to_gymnasium() -> None:
    """If Gymnasium's class lacks the option, it is refused instead of ignored."""
    if not HAS_MAX_CONCURRENCY:
        with pytest.raises(ValueError, match=r"`max_concurrency` cannot be combined with a custom `worker`"):
            vecenv.AsyncVectorEnv(counters(2), worker=reward_scaling_worker, max_concurrency=1)
        return
    with open_engine(counters(2), worker=reward_scaling_worker, max_concurrency=1) as envs:
        assert envs.max_concurrency == 1
        envs.reset(seed=4)
        np.testing.assert_allclose(envs.step([0, 0])[1], [0.1, 100.1])


# --- the interface that ``gymnasium.make_vec`` and the vector wrappers use ------------------------


@pytest.fixture
def patched_make_vec(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make ``gymnasium.make_vec`` build vecenv's class."""
    monkeypatch.setattr(gymnasium.vector, "AsyncVectorEnv", vecenv.AsyncVectorEnv)


@pytest.mark.usefixtures("patched_make_vec")
def test_make_vec_builds_vecenvs_class_and_assigns_the_spec(recwarn: pytest.WarningsRecorder) -> None:
    envs: Any = gymnasium.make_vec("CartPole-v1", num_envs=2, vectorization_mode="async")
    assert type(envs) is vecenv.AsyncVectorEnv
    assert envs.spec.id == "CartPole-v1"
    assert repr(envs).startswith("AsyncVectorEnv(CartPole-v1, num_envs=2")
    envs.reset(seed=1)
    envs.close()
    # From Python 3.12 on, a fork warns if there are other threads, and pytest-timeout has one.
    texts = [str(warning.message) for warning in recwarn]
    assert [text for text in texts if "multi-threaded" not in text] == []


@pytest.mark.usefixtures("patched_make_vec")
def test_make_vec_forwards_vector_kwargs() -> None:
    envs: Any = gymnasium.make_vec(
        "CartPole-v1",
        num_envs=4,
        vectorization_mode="async",
        vector_kwargs={"num_workers": 2, "autoreset_mode": "SameStep", "shared_memory": False},
        wrappers=(gymnasium.wrappers.TimeAwareObservation,),
    )
    assert envs.metadata["autoreset_mode"] is AutoresetMode.SAME_STEP
    assert envs.single_observation_space.shape == (5,)
    assert len(envs.processes) == 2
    assert envs.reset(seed=1)[0].shape == (4, 5)
    envs.close()


@pytest.mark.usefixtures("patched_make_vec")
def test_vector_env_rebuilt_from_its_spec_resets_identically(closes: Any) -> None:
    envs: Any = closes(gymnasium.make_vec("CartPole-v1", num_envs=2, vectorization_mode="async"))
    rebuilt: Any = closes(gymnasium.make_vec(envs.spec))
    np.testing.assert_array_equal(envs.reset(seed=1)[0], rebuilt.reset(seed=1)[0])


def test_wrapped_engine_provides_call_and_np_random_seed() -> None:
    with open_engine(counters(2), num_workers=0) as envs:
        wrapped: Any = gymnasium.wrappers.vector.RecordEpisodeStatistics(envs)
        assert wrapped.unwrapped.call("env_id") == (0, 1)
        assert wrapped.np_random_seed == envs.np_random_seed


def test_observation_wrappers_refuse_autoreset_modes_as_in_gymnasium() -> None:
    reference: Any = gymnasium.vector.SyncVectorEnv(counters(2), autoreset_mode="SameStep")
    with pytest.raises((AssertionError, ValueError)) as refused:
        gymnasium.wrappers.vector.FlattenObservation(reference)
    reference.close()
    with open_engine(counters(2), num_workers=0, autoreset_mode="SameStep") as envs, pytest.raises(refused.type):
        gymnasium.wrappers.vector.FlattenObservation(envs)
    with (
        open_engine(counters(2), num_workers=0, autoreset_mode="Disabled") as envs,
        pytest.raises((AssertionError, ValueError)),
    ):
        gymnasium.wrappers.vector.NormalizeObservation(envs)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_overwritten_final_observations_do_not_change_later_ones(num_workers: int) -> None:
    with ready_engine(counters(2, lengths=(1,)), num_workers=num_workers, autoreset_mode="SameStep") as envs:
        for _ in range(2):
            final = envs.step([0, 0])[4]["final_obs"]
            assert [observation[:2].tolist() for observation in final] == [[0, 1], [1, 1]]
            final[0][:] = -7
            final[1] = "anything"


@pytest.mark.parametrize(
    ("build", "error", "text"),
    [
        (lambda: MultiAgentVecEnv("simple_spread_v3"), TypeError, "got the id 'simple_spread_v3'"),
        (lambda: MultiAgentVecEnv([]), ValueError, "MultiAgentVecEnv needs at least one env_fn"),
        (lambda: MultiAgentVecEnv([3]), TypeError, "env_fns[0] is 3"),
        (lambda: MultiAgentVecEnv([print], num_worker=1), TypeError, "Did you mean 'num_workers'?"),
        (lambda: MultiAgentVecEnv([print], observation_mode="same"), TypeError, "has no option 'observation_mode'"),
        (lambda: Pool("CartPole-v1", 8), TypeError, "Pool(lambda: gymnasium.make(id), 8); got the id 'CartPole-v1'"),
        (lambda: Pool(print, 8, num_worker=1), TypeError, "Pool has no option 'num_worker'. Did you mean 'num_workers'?"),
    ],
    ids=range(7),
)
def test_multi_agent_vec_env_and_pool_refuse_wrong_arguments_with_advice(build: Any, error: Any, text: str) -> None:
    with pytest.raises(error, match=re.escape(text)):
        build()


EMPTY_ACTION_SPACES = [spaces.Tuple(()), spaces.Dict({}), spaces.Tuple((spaces.Dict({}), spaces.Tuple(())))]


@pytest.mark.parametrize("space", EMPTY_ACTION_SPACES, ids=str)
@pytest.mark.parametrize("num_workers", [2, 0])
def test_envs_with_empty_action_spaces_are_stepped(space: Any, num_workers: int) -> None:
    class NoActionEnv(CounterEnv):
        def __init__(self) -> None:
            super().__init__()
            self.action_space = space
            self.received: list[Any] = []

        def step(self, action: Any) -> Any:
            self.received.append(action)
            return super().step(0)

    with ready_engine([NoActionEnv] * 3, num_workers=num_workers) as envs:
        assert envs.step(envs.action_space.sample())[0][:, 1].tolist() == [1, 1, 1]
        envs.send(envs.action_space.sample(), [0, 2])
        assert sorted(envs.recv(count=2)[4]["env_id"].tolist()) == [0, 2]
        assert [len(received) for received in envs.get_attr("received")] == [2, 1, 2]


@pytest.mark.parametrize("seeds", [np.arange(4, 7), np.array([4, 5, 6], np.uint8), [np.int64(4), 5, np.int32(6)]], ids=repr)
def test_reset_accepts_arrays_and_lists_of_numpy_seeds(seeds: Any) -> None:
    with open_engine(counters(3), num_workers=1) as envs:
        assert envs.reset(seed=seeds)[0][:, 3].tolist() == [4, 5, 6]
        envs.reset_async(seed=seeds[:2], env_id=[0, 2])
        assert sorted(envs.recv(count=2)[0][:, 3].tolist()) == [4, 5]


class EnvWithoutUnwrapped:
    """An environment with only the methods and attributes that the engine uses."""

    observation_space, action_space = spaces.Box(-1, 1, (2,), np.float32), spaces.Discrete(2)
    metadata: typing.ClassVar[dict[str, Any]] = {}
    spec = render_mode = None

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        return np.zeros(2, np.float32), {}

    def step(self, action: Any) -> Any:
        return np.full(2, action, np.float32), float(action), False, False, {}

    def close(self) -> None:
        pass


@pytest.mark.parametrize("generators", ["shared", "own"])
@pytest.mark.parametrize("num_workers", [0, 2])
def test_environment_needs_no_unwrapped_attribute(num_workers: int, generators: Any) -> None:
    with open_engine([EnvWithoutUnwrapped] * 2, num_workers=num_workers, generators=generators) as envs:
        envs.reset(seed=1)
        assert envs.step([0, 1])[1].tolist() == [0, 1]
