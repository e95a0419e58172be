"""Section 1.2: the constructor, its arguments, and its failures in their order."""

from __future__ import annotations

import functools
import inspect
import multiprocessing
import os
import re
import typing
import warnings
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from envs import CounterEnv, CustomSpace, Options, SpaceEnv, counters, opened
from gymnasium import spaces
from gymnasium.vector import AutoresetMode
from gymnasium.vector.utils import batch_space

import vecenv
from vecenv.front.arguments import HAS_MAX_CONCURRENCY
from vecenv.planning.options import EngineOptions

checks_workers = pytest.mark.skipif(
    not HAS_MAX_CONCURRENCY, reason="Gymnasium before 1.4 does not look at the worker's arguments"
)


def box_env(low: float = 0.0, high: float = 1.0, shape: tuple[int, ...] = (2,), dtype: Any = np.float32) -> Any:
    return lambda: SpaceEnv(spaces.Box(low, high, shape, dtype))


def action_env(space: spaces.Space) -> Any:
    return lambda: SpaceEnv(spaces.Box(0, 1, (2,)), space)


def test_the_arguments_have_gymnasiums_names_order_and_defaults() -> None:
    stock = inspect.signature(gymnasium.vector.AsyncVectorEnv.__init__).parameters
    ours = inspect.signature(vecenv.AsyncVectorEnv.__init__).parameters
    shared = list(ours.values())[: len(stock)]
    assert [(p.name, p.kind, p.default) for p in shared] == [(p.name, p.kind, p.default) for p in stock.values()]


def test_all_further_arguments_are_keyword_only() -> None:
    stock = inspect.signature(gymnasium.vector.AsyncVectorEnv.__init__).parameters
    ours = inspect.signature(vecenv.AsyncVectorEnv.__init__).parameters
    further = [parameter for name, parameter in ours.items() if name not in stock]
    assert {"num_workers", "start_timeout"} <= {parameter.name for parameter in further}
    by_position = {parameter.name for parameter in further if parameter.kind is not inspect.Parameter.KEYWORD_ONLY}
    assert by_position <= {"max_concurrency"}, "Gymnasium has it from 1.4 on"


def test_a_misspelt_option_is_refused_with_the_one_that_is_like_it() -> None:
    with pytest.raises(TypeError, match=r"AsyncVectorEnv has no option 'num_worker'\. Did you mean 'num_workers'\?"):
        vecenv.AsyncVectorEnv(counters(1), num_worker=1)  # type: ignore[call-arg]


def test_a_subclass_may_have_options_of_its_own() -> None:
    class Named(vecenv.AsyncVectorEnv[Any, Any]):
        def __init__(self, env_fns: Any, *, label: str, **options: Any) -> None:
            super().__init__(env_fns, **options)
            self.label = label

    envs = Named(counters(1), label="mine")
    assert envs.label == "mine"
    envs.close()


def test_all_of_gymnasiums_arguments_may_be_given_by_position() -> None:
    with opened(counters(2)) as by_name:
        by_name.reset(seed=1)
    envs: Any = vecenv.AsyncVectorEnv(counters(2), False, False, "fork", False, None, "same", AutoresetMode.DISABLED, 1)
    assert envs.shared_memory is False
    assert envs.autoreset_mode is AutoresetMode.DISABLED
    assert envs.max_concurrency == 1
    envs.close()


@pytest.mark.parametrize("mode", AutoresetMode)
def test_the_autoreset_mode_may_be_given_by_its_text(mode: AutoresetMode) -> None:
    with opened(counters(2), autoreset_mode=mode.value, num_workers=0) as envs:
        assert envs.autoreset_mode is mode
        assert envs.metadata["autoreset_mode"] is mode


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"autoreset_mode": "x"}, ValueError, "'x' is not a valid AutoresetMode: wanted one of 'NextStep', 'SameStep', "),
        ({"context": "forkservr"}, ValueError, "cannot find context for 'forkservr': wanted None or one of 'fork', "),
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
            {"worker": lambda a, b: None}, ValueError, "A custom `worker` must accept 8 arguments.", marks=checks_workers
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
    ],
)
def test_a_wrong_argument_is_refused_with_gymnasiums_text(
    options: dict[str, Any], error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=re.escape(text)):
        vecenv.AsyncVectorEnv(counters(2), **options)


def test_an_observation_mode_without_spaces_is_refused_as_the_installed_gymnasium_does() -> None:
    wrong: Any = (1, 2)
    with pytest.raises((TypeError, AssertionError)) as theirs:
        gymnasium.vector.SyncVectorEnv(counters(2), observation_mode=wrong)
    with pytest.raises(theirs.type):
        vecenv.AsyncVectorEnv(counters(2), observation_mode=wrong)


@checks_workers
def test_a_worker_with_too_few_arguments_is_refused_because_of_a_type_error() -> None:
    with pytest.raises(ValueError, match="8 arguments") as caught:
        vecenv.AsyncVectorEnv(counters(2), worker=lambda index: None)
    assert isinstance(caught.value.__cause__, TypeError)


@pytest.mark.parametrize("value", [True, 1, np.int64(1), 5])
def test_max_concurrency_may_be_any_positive_integer(value: Any) -> None:
    with opened(counters(2), max_concurrency=value) as envs:
        assert envs.max_concurrency == value
        envs.reset(seed=1)


def test_arguments_are_checked_before_any_environment_is_built() -> None:
    def explode() -> gymnasium.Env:
        raise AssertionError("built too early")

    with pytest.raises(ValueError, match="AutoresetMode"):
        vecenv.AsyncVectorEnv([explode], autoreset_mode="x", max_concurrency=0)
    with pytest.raises(ValueError, match="max_concurrency"):
        vecenv.AsyncVectorEnv([explode], max_concurrency=0, worker=lambda: None)
    if HAS_MAX_CONCURRENCY:  # before, Gymnasium did not look at the worker
        with pytest.raises(ValueError, match="worker"):
            vecenv.AsyncVectorEnv([explode], worker=lambda: None)


def test_no_environments_are_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"AsyncVectorEnv needs at least one env_fn, got \[\]"):
        vecenv.AsyncVectorEnv([])


@pytest.mark.parametrize(
    ("env_fns", "wanted"),
    [
        ("CartPole-v1", r"got the id 'CartPole-v1', which vecenv\.make_vec\('CartPole-v1', 8\) takes$"),
        (CounterEnv, r"got <class '.*CounterEnv'>; one function is \[function\] \* 8$"),
        (["CartPole-v1"], r"env_fns\[0\] is 'CartPole-v1'$"),
        ([CounterEnv, CounterEnv()], r"env_fns\[1\] is the environment .*CounterEnv.*, built already$"),
        (3, r"got 3$"),
    ],
    ids=["an id", "one function", "a list of ids", "an environment", "a number"],
)
def test_what_builds_no_environments_is_refused_and_says_what_to_write(env_fns: Any, wanted: str) -> None:
    begin = re.escape("AsyncVectorEnv wants a sequence of functions that build one environment each, as [")
    with pytest.raises(TypeError, match=f"^{begin}.*; {wanted}"):
        vecenv.AsyncVectorEnv(env_fns)


def test_editors_see_all_arguments() -> None:
    class Mine(vecenv.AsyncVectorEnv[Any, Any]):
        def __init__(self, count: int) -> None:
            super().__init__(counters(count))

    whole = list(inspect.signature(vecenv.AsyncVectorEnv.__init__).parameters)
    assert list(inspect.signature(vecenv.AsyncVectorEnv).parameters) == whole[1:]
    assert list(inspect.signature(Mine).parameters) == ["count"]
    public = {*vecenv.__all__, *vecenv._MODULES, *sum(vecenv._HOMES.values(), ())} - {"__version__"}
    assert [name for name in dir(vecenv) if not name.startswith("__")] == sorted(public)


def test_a_generator_of_functions_is_a_type_error() -> None:
    with pytest.raises(TypeError):
        vecenv.AsyncVectorEnv(fn for fn in counters(2))  # type: ignore[arg-type]


def test_a_tuple_of_functions_works() -> None:
    with opened(tuple(counters(2)), num_workers=0) as envs:
        assert envs.num_envs == 2


def test_an_exception_of_the_first_function_reaches_the_caller_unchanged(every_engine: Options) -> None:
    def explode() -> gymnasium.Env:
        raise RuntimeError("no licence")

    with pytest.raises(RuntimeError, match=r"^no licence$"):
        vecenv.AsyncVectorEnv([explode, *counters(2)], **every_engine)


def test_one_environment_is_built_here_to_be_asked_and_then_closed(tmp_path: Path, process_engine: Options) -> None:
    built, closed = tmp_path / "built", tmp_path / "closed"
    built.mkdir()

    def build() -> gymnasium.Env:
        (built / f"{os.getpid()}-{len(list(built.iterdir()))}").touch()
        env = CounterEnv(7)
        env.closed_file = closed
        return env

    with opened([build], **process_engine):
        here = [path for path in built.iterdir() if path.name.startswith(f"{os.getpid()}-")]
        assert len(here) == 1
        assert len(list(built.iterdir())) == 2
        assert closed.read_text() == "7\n"


def test_different_observation_spaces_build_every_environment_here_once() -> None:
    here: list[int] = []

    def build(index: int) -> Any:
        def env_fn() -> gymnasium.Env:
            here.append(index)
            return SpaceEnv(spaces.Box(0, 1 + index, (2,), np.float32))

        return env_fn

    with opened([build(0), build(1)], observation_mode="different", context="fork") as envs:
        assert here == [0, 0, 1]
        assert envs.single_observation_space == spaces.Box(0, 1, (2,), np.float32)


def test_observation_spaces_that_differ_are_batched_in_mode_different(every_engine: Options) -> None:
    fns = [box_env(0, 1), box_env(-5, 5), box_env(0, 9)]
    with opened(fns, observation_mode="different", **every_engine) as envs:
        oracle = gymnasium.vector.SyncVectorEnv(fns, observation_mode="different")
        assert envs.observation_space == oracle.observation_space
        assert envs.single_observation_space == oracle.single_observation_space
        observations, _ = envs.reset(seed=1)
        assert observations in envs.observation_space
        np.testing.assert_array_equal(observations, oracle.reset(seed=1)[0])
        oracle.close()


def test_a_pair_of_spaces_is_used_as_it_is_batched_first(every_engine: Options) -> None:
    single = spaces.Box(-9, 9, (2,), np.float32)
    batched = batch_space(single, 2)
    with opened([box_env(0, 1), box_env(0, 2)], observation_mode=(batched, single), **every_engine) as envs:
        assert envs.observation_space is batched
        assert envs.single_observation_space is single
        assert envs.reset(seed=1)[0] in batched


def test_observation_spaces_that_differ_are_refused_in_mode_same(every_engine: Options, shared_memory: bool) -> None:
    with pytest.raises(
        RuntimeError,
        match=r"the sub-environments observation spaces are not equivalent\. .*"
        r"If this is intentional, use `observation_mode='different'` instead\.",
    ):
        vecenv.AsyncVectorEnv([box_env(0, 1), box_env(0, 2)], shared_memory=shared_memory, **every_engine)


@pytest.mark.parametrize("shape", [(3,), (2, 1)])
def test_shapes_that_differ_are_refused_in_every_mode(every_engine: Options, shape: tuple[int, ...]) -> None:
    single = spaces.Box(0, 1, (2,), np.float32)
    with pytest.raises(RuntimeError, match="do not share a common shape and dtype"):
        vecenv.AsyncVectorEnv(
            [box_env(), box_env(shape=shape)], observation_mode=(batch_space(single, 2), single), **every_engine
        )


def test_action_spaces_that_differ_are_refused(every_engine: Options) -> None:
    with pytest.raises(RuntimeError, match=r"Some environments have an action space different from `Discrete\(2\)`"):
        vecenv.AsyncVectorEnv([action_env(spaces.Discrete(2)), action_env(spaces.Discrete(3))], **every_engine)


@pytest.mark.parametrize("build", [action_env, SpaceEnv], ids=["action", "observation"])
def test_spaces_that_differ_are_both_named_and_the_environment(every_engine: Options, build: Any) -> None:
    fns = [functools.partial(build, spaces.Discrete(number)) for number in (2, 2, 7)]
    if build is action_env:
        fns = [fn() for fn in fns]
    with pytest.raises(RuntimeError) as caught:
        vecenv.AsyncVectorEnv(fns, **every_engine)
    text = str(caught.value) + "".join(getattr(caught.value, "__notes__", []))
    assert "Discrete(2)" in text
    assert "Discrete(7)" in text
    assert re.search(r"\b2\b", text.replace("Discrete(2)", "")), text


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_custom_space_is_pickled_where_gymnasium_asks_for_another_option(num_workers: int) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        envs = vecenv.AsyncVectorEnv([lambda: SpaceEnv(CustomSpace())] * 2, num_workers=num_workers)
    assert sum("pickled" in str(warning.message) for warning in caught) == num_workers  # Python 3.12 warns of forks, too
    oracle = gymnasium.vector.SyncVectorEnv([lambda: SpaceEnv(CustomSpace())] * 2)
    assert envs.reset(seed=1)[0] == oracle.reset(seed=1)[0]
    assert envs.step([0, 0])[0] == oracle.step([0, 0])[0]
    envs.close()


def test_the_context_is_the_default_one_unless_asked_otherwise() -> None:
    before = multiprocessing.get_start_method(allow_none=True)
    multiprocessing.set_start_method("forkserver", force=True)
    try:
        with opened(counters(2), num_workers=1) as envs:
            assert type(envs.processes[0]).__name__ == "ForkServerProcess"
    finally:
        multiprocessing.set_start_method(before, force=True)


@pytest.mark.parametrize("daemon", [True, False])
def test_daemon_is_what_was_asked_for(daemon: bool) -> None:
    with opened(counters(2), daemon=daemon) as envs:
        assert all(process.daemon is daemon for process in envs.processes)


def test_mpi_variables_do_not_reach_the_workers_and_stay_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "1")
    monkeypatch.setenv("PMI_SIZE", "2")

    class Peek(CounterEnv):
        def variables(self) -> list[str]:
            return [name for name in os.environ if name.startswith(("OMPI_", "PMI_"))]

    with opened([Peek, Peek]) as envs:
        assert envs.call("variables") == ([], [])
    assert os.environ["OMPI_COMM_WORLD_RANK"] == "1"
    assert os.environ["PMI_SIZE"] == "2"


def test_classes_over_the_engine_know_its_options() -> None:
    """``EngineOptions`` is the signature once more, for type checkers; without what those classes set or refuse."""
    hints = typing.get_type_hints(vecenv.AsyncVectorEnv.__init__)
    refused = {"spare_workers"}
    theirs = set(hints) - {"env_fns", "worker", "observation_mode", "autoreset_mode", "return"} - refused
    assert {name: hints[name] for name in theirs} == typing.get_type_hints(EngineOptions)


def test_spaces_in_openrls_places_are_refused_by_name() -> None:
    space = spaces.Discrete(2)
    with pytest.raises(TypeError, match=r"`shared_memory` must be True or False, got Discrete\(2\).*make_openrl"):
        vecenv.AsyncVectorEnv(counters(1), space, space, num_workers=0)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"`copy` must be True or False, got None"):
        vecenv.AsyncVectorEnv(counters(1), True, None, num_workers=0)  # type: ignore[arg-type]
    envs = vecenv.AsyncVectorEnv(counters(1), np.True_, 1, num_workers=0)  # type: ignore[arg-type]
    assert envs.num_envs == 1
    envs.close()


@pytest.mark.parametrize(
    "options", [{"num_workers": 2}, {"num_workers": 0}, {"num_workers": "auto"}, {"dummy_env": False}], ids=str
)
def test_a_function_that_forgot_its_return_is_named(options: dict[str, Any]) -> None:
    with pytest.raises(TypeError, match=r"env_fns\[0\]\(\) gave None, wanted an environment: is a `return` missing"):
        vecenv.AsyncVectorEnv([lambda: None] * 2, **options)  # type: ignore[list-item, return-value]
