"""With ``generators="own"``, environments draw the same numbers from their process's generators as if they ran alone."""

from __future__ import annotations

import copy
import functools
import gc
import os
import pickle
import random
import re
import signal
import sys
import types
import warnings
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from random import getrandbits
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium.vector import AutoresetMode
from programs import python_output
from sampling import each_once
from signals import Alarm, interrupt_at, signal_handler

import vecenv
from vecenv.errors import SnapshotMismatch
from vecenv.link import own_generators
from vecenv.system import generators as system_generators
from vecenv.testing import assert_identical

pytestmark = pytest.mark.timeout(120)
MODES = list(AutoresetMode)


class DrawingEnv(gymnasium.Env[Any, Any]):
    """An environment that draws from all generators in every call, from step ``first_draw`` on.

    With ``seeds``, a reset seeds the generators. One of its draws is a single normal number: NumPy generates two and keeps
    the second, which is part of the generator's state.
    """

    observation_space = gymnasium.spaces.Box(-np.inf, np.inf, (6,), np.float64)
    action_space = gymnasium.spaces.Discrete(2)

    def __init__(self, *, first_draw: int = 0, seeds: bool = False) -> None:
        self.first_draw, self.seeds, self.steps = first_draw, seeds, 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.steps = 0
        if self.seeds and seed is not None:
            np.random.seed(seed)
            random.seed(seed)
        return self.draw_all(), {}

    def draw_all(self) -> Any:
        if self.steps < self.first_draw:
            return np.zeros(6)
        state = np.random.get_state()
        np.random.seed(1)  # like libraries that seed a generator and then restore its state
        seeded_number = np.random.rand()
        np.random.set_state(state)
        numbers = [np.random.normal(), random.random(), random.gauss(0, 1), getrandbits(20), random.randint(0, 9)]
        return np.array([*numbers, seeded_number])

    def step(self, action: Any) -> Any:
        self.steps += 1
        if action == 7:
            os.kill(os.getpid(), signal.SIGKILL)
        ended = self.steps >= self.first_draw and np.random.rand() < 0.1
        reward = random.random() if self.steps >= self.first_draw else 0.0
        return self.draw_all(), reward, bool(ended), False, {"steps": self.steps}

    def draw(self) -> float:
        return float(np.random.rand() + random.random())


def run_alone(env_fn: Callable[[], Any], seed: int, steps: int, mode: AutoresetMode) -> Iterator[Any]:
    """Yield the results of one environment in a plain loop, with its generators seeded as in ``docs/workers.md``."""
    states_before = random.getstate(), np.random.get_state()
    episode = 0

    def begin_episode(env: Any, **kwargs: Any) -> Any:
        sequences = [np.random.SeedSequence(seed, spawn_key=(episode, index)) for index in range(2)]
        np.random.set_state(np.random.MT19937(sequences[0]).state)
        random.seed(int.from_bytes(sequences[1].generate_state(4).tobytes(), "little"))
        return env.reset(**kwargs)[0]

    try:
        env = env_fn()
        yield begin_episode(env, seed=seed), 0.0, False
        reset_due = False
        for _ in range(steps):
            if reset_due:
                episode += 1
                yield begin_episode(env), 0.0, False
                reset_due = False
                continue
            observation, reward, ended, _, _ = env.step(0)
            if ended and mode is AutoresetMode.SAME_STEP:
                episode += 1
                observation = begin_episode(env)
            else:
                reset_due = ended
            yield observation, reward, ended
    finally:
        random.setstate(states_before[0])
        np.random.set_state(states_before[1])


def step_and_collect(envs: Any, steps: int, seed: int | None = 3) -> list[Any]:
    """Reset, unless ``seed`` is ``None``, and step. In disabled mode, rows are reset by mask when their episodes end.

    Returns:
        (observations, rewards, terminations) of the first reset, if any, and of each step.
    """
    count = envs.num_envs
    results = [(envs.reset(seed=seed)[0], np.zeros(count), np.zeros(count, bool))] if seed is not None else []
    ended = np.zeros(count, bool)
    for _ in range(steps):
        if ended.any() and envs.autoreset_mode is AutoresetMode.DISABLED:
            envs.reset(options={"reset_mask": ended})
        observations, rewards, ended, _, _ = envs.step(np.zeros(count, int))
        results.append((observations, rewards, ended))
    return results


def make_engine(count: int = 5, env_fn: Callable[[], Any] = DrawingEnv, **options: Any) -> Any:
    if "spare_workers" in options:  # an option of make_vec only
        return vecenv.make_vec(env_fn, count, vector_kwargs={"generators": "own", **options})
    return vecenv.AsyncVectorEnv([env_fn] * count, generators="own", **options)


def run_engine(steps: int = 40, **options: Any) -> list[Any]:
    envs = make_engine(**options)
    try:
        return step_and_collect(envs, steps)
    finally:
        envs.close()


DRAWS_FROM_STEP_7 = functools.partial(DrawingEnv, first_draw=7)
SEEDS_GENERATORS = functools.partial(DrawingEnv, seeds=True)


@pytest.mark.parametrize("env_fn", [DrawingEnv, DRAWS_FROM_STEP_7, SEEDS_GENERATORS], ids=["always", "late", "seeds"])
@pytest.mark.parametrize("mode", [AutoresetMode.NEXT_STEP, AutoresetMode.SAME_STEP])
def test_results_of_rows_equal_those_of_envs_that_run_alone(mode: AutoresetMode, env_fn: Any) -> None:
    results = run_engine(env_fn=env_fn, num_workers=0, autoreset_mode=mode, count=3)
    for row in range(3):
        expected = list(run_alone(env_fn, 3 + row, 40, mode))
        row_results = [tuple(part[row] for part in step) for step in results]
        assert_identical(row_results, list(map(to_numpy_scalars, expected)), f"row {row}")


def to_numpy_scalars(step: Any) -> Any:
    observation, reward, ended = step
    return observation, np.float64(reward), np.bool_(ended)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("mode", "env_fn", "options"),
    each_once(
        MODES,
        {"always": DrawingEnv, "late": DRAWS_FROM_STEP_7},
        {"2": {"num_workers": 2}, "caller": {"num_workers": 2, "use_caller": True}, "1": {"num_workers": 1}},
    ),
)
def test_number_of_workers_does_not_change_results(mode: AutoresetMode, env_fn: Any, options: Any) -> None:
    expected = run_engine(env_fn=env_fn, num_workers=0, autoreset_mode=mode)
    assert_identical(run_engine(env_fn=env_fn, autoreset_mode=mode, **options), expected)


@pytest.mark.long
@pytest.mark.parametrize("context", ["fork", "spawn", "forkserver"])
@pytest.mark.parametrize("num_workers", [2, 4, None])
def test_start_methods_do_not_change_results(context: Any, num_workers: Any) -> None:
    expected = run_engine(num_workers=0, env_fn=SEEDS_GENERATORS)
    assert_identical(run_engine(num_workers=num_workers, context=context, env_fn=SEEDS_GENERATORS), expected)


def test_draws_of_the_caller_and_of_its_envs_do_not_affect_each_other() -> None:
    expected = run_engine(num_workers=0)
    np.random.seed(1)
    random.seed(1)
    np.random.normal()
    bit_generator = np.random.get_bit_generator()  # type: ignore[attr-defined]
    random_function = random.random
    envs = make_engine(num_workers=0)
    results = [(envs.reset(seed=3)[0], np.zeros(5), np.zeros(5, bool))]
    after_reset = [np.random.normal(), random.random(), getrandbits(8)]
    between_steps = []
    for _ in range(40):
        results.append(envs.step(np.zeros(5, int))[:3])
        between_steps += [np.random.normal(), random.gauss(0, 1)]
    envs.close()
    assert_identical(results, expected)
    assert np.random.get_bit_generator() is bit_generator  # type: ignore[attr-defined]
    assert random.random is random_function
    after_close = [np.random.normal(), random.random()]
    # the same draws without environments
    np.random.seed(1)
    random.seed(1)
    np.random.normal()
    assert after_reset == [np.random.normal(), random.random(), getrandbits(8)]
    assert between_steps == [number for _ in range(40) for number in (np.random.normal(), random.gauss(0, 1))]
    assert after_close == [np.random.normal(), random.random()]


class CopyingEnv(gymnasium.Env[Any, Any]):
    """An environment that draws from copies of the global generators, and then from these."""

    observation_space = gymnasium.spaces.Box(0.0, 1.0, (5,), np.float64)
    action_space = gymnasium.spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        numpy_generator, python_generator = np.random.mtrand._rand, random._inst  # type: ignore[attr-defined]
        drawn = [copy.deepcopy(numpy_generator).random_sample(), pickle.loads(pickle.dumps(numpy_generator)).random_sample()]
        drawn += [np.random.random_sample(), copy.deepcopy(python_generator).random(), random.random()]
        return np.array(drawn), {}


@pytest.mark.parametrize("num_workers", [0, 1])
def test_copies_of_global_generators_draw_as_the_environments_own(num_workers: int, closes: Any) -> None:
    envs = closes(vecenv.AsyncVectorEnv([CopyingEnv] * 2, num_workers=num_workers, generators="own"))
    first, second = envs.reset(seed=1)[0]
    for drawn in (first, second):
        assert drawn[0] == drawn[1] == drawn[2]
        assert drawn[3] == drawn[4]
    assert first[0] != second[0]
    assert first[3] != second[3]


class BitGeneratorEnv(CopyingEnv):
    """An environment with a ``Generator`` that draws from the bit generator of ``numpy.random``."""

    observation_space = gymnasium.spaces.Box(0.0, 1.0, (1,), np.float64)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        return np.random.Generator(np.random.get_bit_generator()).random(1), {}  # type: ignore[attr-defined]


@pytest.mark.parametrize("num_workers", [0, 1, 2])
def test_bit_generator_of_numpy_is_the_environments_own(num_workers: int, closes: Any) -> None:
    original = np.random.get_bit_generator()  # type: ignore[attr-defined]
    envs = closes(vecenv.AsyncVectorEnv([BitGeneratorEnv] * 2, num_workers=num_workers, generators="own"))
    drawn = envs.reset(seed=1)[0]
    assert drawn[0] != drawn[1]
    assert envs.reset(seed=1)[0].tolist() == drawn.tolist()
    envs.close()
    assert np.random.get_bit_generator() is original  # type: ignore[attr-defined]


class ModuleDrawingEnv(DrawingEnv):
    """An environment that calls functions of the modules only by their full names, such as ``random.random``."""

    def draw_all(self) -> Any:
        return np.array([np.random.normal(), random.random(), random.gauss(0, 1)])


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # a signal in a finalizer
def test_signal_at_any_point_does_not_change_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    # it takes 10 ms each time, and replaces functions that modules have imported: the environment has none of these
    monkeypatch.setattr(system_generators._Switch, "_replace_references", lambda self: None)
    original = np.random.get_bit_generator(), random.random  # type: ignore[attr-defined]
    states_before = random.getstate(), np.random.get_state()
    (build,) = own_generators.with_own_generators([ModuleDrawingEnv])
    first_observation = next(run_alone(ModuleDrawingEnv, 5, 0, AutoresetMode.NEXT_STEP))[0]
    event, was_interrupted = 0, True

    def run_episode() -> None:
        with closing(build()) as env:
            env.reset(seed=1)
            env.step(0)

    try:
        while was_interrupted and event < 900:
            event += 1
            random.seed(7)
            np.random.seed(7)
            np.random.normal()  # NumPy generates two numbers and keeps the second
            with signal_handler(signal.SIGUSR2, Alarm):
                was_interrupted, _ = interrupt_at(event, run_episode, own_generators.__file__, system_generators.__file__)
            expected = np.random.RandomState(7).normal(size=3).tolist()[1:], random.Random(7).random()
            assert ([np.random.normal(), np.random.normal()], random.random()) == expected, f"event {event}"
            if event % 8 == 0:
                with closing(build()) as env:
                    assert_identical(env.reset(seed=5)[0], first_observation, f"event {event}")
        assert 100 < event < 900
        gc.collect()  # frees environments that an interruption left open
        assert (np.random.get_bit_generator(), random.random) == original  # type: ignore[attr-defined]
    finally:
        random.setstate(states_before[0])
        np.random.set_state(states_before[1])


def test_number_of_workers_does_not_change_draws_in_calls_and_first_ready_batches() -> None:
    results = []
    for num_workers in (0, 2):
        envs = make_engine(4, num_workers=num_workers, batch_size=4)
        envs.reset(seed=5)
        draws = envs.call("draw"), envs.exec_func(DrawingEnv.draw, [1, 3])
        for rows in ([0, 2], [1], [3], [0]):
            envs.send(np.zeros(len(rows), int), rows)
            envs.recv(count=len(rows))
        results.append((draws, step_and_collect(envs, 20, None), envs.call("draw")))
        envs.close()
    assert_identical(results[1], results[0])


def test_loaded_snapshots_restore_generators_also_in_another_engine() -> None:
    envs = make_engine(num_workers=0)
    step_and_collect(envs, 13)
    snapshots = envs.save()
    expected = step_and_collect(envs, 30, None)
    envs.load(snapshots)
    assert_identical(step_and_collect(envs, 30, None), expected)
    state = envs.state_dict()
    envs.close()
    with closing(make_engine(num_workers=2)) as other:
        other.reset(seed=99)
        other.load(snapshots)
        assert_identical(step_and_collect(other, 30, None), expected)
        other.load_state_dict(state)
    with (
        closing(vecenv.AsyncVectorEnv([DrawingEnv] * 5, num_workers=0)) as with_shared_generators,
        pytest.raises(SnapshotMismatch, match="own"),
    ):
        with_shared_generators.load(snapshots)


def test_results_after_a_restart_and_load_continue_from_the_snapshot(closes: Any) -> None:
    envs = closes(make_engine(4, num_workers=2, on_failure="restart", autoreset_mode="SameStep"))
    step_and_collect(envs, 9)
    snapshots = envs.save()
    expected = step_and_collect(envs, 12, None)
    *_, infos = envs.step(np.array([7, 0, 7, 0]))
    assert infos["restarted"].all()
    envs.load(snapshots)
    assert_identical(step_and_collect(envs, 12, None), expected)


def test_results_after_a_restart_and_reset_equal_those_without_a_restart(closes: Any) -> None:
    expected = run_engine(num_workers=0)
    envs = closes(make_engine(num_workers=2, on_failure="restart"))
    step_and_collect(envs, 5)
    envs.step(np.array([7, 0, 0, 0, 7]))
    assert_identical(step_and_collect(envs, 40), expected)


@pytest.mark.parametrize("mode", ["NextStep", pytest.param("SameStep", marks=pytest.mark.long)])
def test_number_of_spare_workers_does_not_change_results(mode: str) -> None:
    assert_identical(
        run_engine(spare_workers=3, count=3, autoreset_mode=mode),
        run_engine(spare_workers=1, count=3, autoreset_mode=mode),
    )


def choose_zeros(observations: Any) -> Any:
    return np.zeros(len(observations), int)


@pytest.mark.sampled("late")
@pytest.mark.parametrize("env_fn", [DrawingEnv, DRAWS_FROM_STEP_7], ids=["always", "late"])
def test_evaluate_returns_the_same_results_for_every_number_of_environments(env_fn: Any) -> None:
    evaluations = []
    for count, num_workers in ((1, 0), (3, 1), (4, 2), (4, 4)):
        with closing(make_engine(count, env_fn, num_workers=num_workers)) as envs:
            results = vecenv.evaluate(envs, choose_zeros, episodes=12, seed=1)
        evaluations.append([(result.episode_return, result.length) for result in results])
    assert evaluations.count(evaluations[0]) == 4
    assert len({episode_return for episode_return, _ in evaluations[0]}) == 12


# options with which an environment is probed before workers start
PROBING_OPTIONS: list[dict[str, Any]] = [
    {"num_workers": "auto"}, {"num_workers": 2, "use_caller": True}, {"batch_size": "auto"},
]  # fmt: skip


@pytest.mark.sampled("{'num_workers': 2, 'use_caller': True}")
@pytest.mark.parametrize("options", PROBING_OPTIONS, ids=str)
def test_evaluate_warns_if_results_depend_on_shared_generators(options: Any) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with closing(vecenv.AsyncVectorEnv([DrawingEnv] * 3, **options)) as envs:
            vecenv.evaluate(envs, choose_zeros, episodes=4, seed=1)
    texts = [str(warning.message) for warning in caught]
    assert sum("generators='own'" in text and "DrawingEnv" in text for text in texts) == 1, texts
    assert sum("results of evaluate depend on" in text for text in texts) == 1, texts


@pytest.mark.sampled(1)
@pytest.mark.parametrize("options", PROBING_OPTIONS, ids=str)
def test_warning_names_the_environment_and_the_generator(options: Any) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        vecenv.AsyncVectorEnv([DrawsInStepEnv] * 4, **options).close()
    (text,) = [str(warning.message) for warning in caught if "generators" in str(warning.message)]
    assert re.search(r"env \d \(DrawsInStepEnv\) draws from the generator of numpy\.random.*generators='own'", text)


def test_own_generators_do_not_warn() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        make_engine(env_fn=DrawingEnv, num_workers="auto").close()


class DrawsInStepEnv(gymnasium.Env[Any, Any]):
    observation_space = gymnasium.spaces.Box(-9, 9, (1,), np.float64)
    action_space = gymnasium.spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        return np.zeros(1), {}

    def step(self, action: Any) -> Any:
        return np.full(1, np.random.rand()), 0.0, False, False, {}


@pytest.mark.sampled("0", "2")
@pytest.mark.parametrize("num_workers", [0, 2, "auto"])
def test_environments_that_do_not_draw_do_not_warn(num_workers: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        envs = vecenv.AsyncVectorEnv([functools.partial(gymnasium.make, "CartPole-v1")] * 4, num_workers=num_workers)
        envs.reset(seed=1)
        for _ in range(40):
            envs.step(np.ones(4, int))
        envs.save()  # verifies the snapshots, for which it compares the states of all generators
        envs.close()


class NestedEngineEnv(DrawsInStepEnv):
    """An environment that builds an engine in its reset. The reset itself draws nothing."""

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        with closing(vecenv.AsyncVectorEnv([functools.partial(gymnasium.make, "CartPole-v1")], context="fork")) as envs:
            envs.reset(seed=seed)
        return super().reset()


def test_engine_inside_an_environment_does_not_warn() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        envs = vecenv.AsyncVectorEnv([NestedEngineEnv] * 2, num_workers=1, context="fork", daemon=False)
        envs.reset(seed=1)
        envs.close()


@pytest.mark.filterwarnings("ignore:.*generators='own'")
@pytest.mark.parametrize("context", ["fork", pytest.param("forkserver", marks=pytest.mark.long)])
def test_workers_of_a_seeded_caller_differ_reproducibly(context: Any) -> None:
    results = []
    for _ in range(2):
        np.random.seed(4)
        random.seed(4)
        envs = vecenv.AsyncVectorEnv([DrawingEnv] * 3, context=context)
        assert np.random.rand() == np.random.RandomState(4).rand()
        assert random.random() == random.Random(4).random()
        observations, _ = envs.reset(seed=[0, 1, 2])
        envs.close()
        results.append(observations)
    assert_identical(results[1], results[0])
    assert all(len(set(column)) == 3 for column in results[0][:, :4].T)


class FakeTorchGenerator:
    """A replacement for torch's generator. Its state is an array of bytes."""

    def __init__(self) -> None:
        self._random_state = np.random.RandomState(0)

    def manual_seed(self, seed: int) -> FakeTorchGenerator:
        self._random_state = np.random.RandomState(seed % 2**32)
        return self

    def get_state(self) -> Any:
        _, key, position, *_ = self._random_state.get_state()
        state = np.append(key, np.uint32(position)).view(np.uint8)
        return types.SimpleNamespace(numpy=lambda: state)

    def set_state(self, state: Any) -> None:
        key_and_position = np.asarray(state).view(np.uint32)
        self._random_state.set_state(("MT19937", key_and_position[:-1], int(key_and_position[-1])))

    def rand(self) -> float:
        return float(self._random_state.rand())


@pytest.fixture
def torch(monkeypatch: pytest.MonkeyPatch) -> types.SimpleNamespace:
    """Install a replacement for the parts of torch that vecenv uses for generators, because the real package is large."""
    module = types.SimpleNamespace(
        Generator=FakeTorchGenerator, default_generator=FakeTorchGenerator(), uint8=np.uint8,
        frombuffer=np.frombuffer, set_num_threads=lambda threads: None,
    )  # fmt: skip
    monkeypatch.setitem(sys.modules, "torch", module)  # type: ignore[arg-type]
    return module


class TorchDrawingEnv(DrawingEnv):
    def draw_all(self) -> Any:
        if self.steps < self.first_draw:
            return np.zeros(6)
        return np.full(6, sys.modules["torch"].default_generator.rand())  # type: ignore[attr-defined]


@pytest.mark.sampled("0")
@pytest.mark.parametrize("first_draw", [0, 7])
def test_each_environment_has_its_own_state_of_torchs_generator(torch: types.SimpleNamespace, first_draw: int) -> None:
    env_fn = functools.partial(TorchDrawingEnv, first_draw=first_draw)
    before = torch.default_generator.get_state().numpy().tobytes()
    results = run_engine(env_fn=env_fn, num_workers=0)
    assert torch.default_generator.get_state().numpy().tobytes() == before
    assert_identical(run_engine(env_fn=env_fn, num_workers=2, context="fork"), results)
    two_rows = [tuple(part[:2] for part in step) for step in results]
    assert_identical(two_rows, run_engine(env_fn=env_fn, num_workers=0, count=2))
    with closing(make_engine(3, env_fn, num_workers=0)) as envs:
        step_and_collect(envs, 13)
        snapshots = envs.save()
        expected = step_and_collect(envs, 20, None)
        envs.load(snapshots)
        assert_identical(step_and_collect(envs, 20, None), expected)


@pytest.mark.parametrize("drawn", [True, False])
def test_snapshot_contains_the_state_of_torch_only_after_a_draw(torch: types.SimpleNamespace, drawn: bool) -> None:
    env_fn = TorchDrawingEnv if drawn else functools.partial(TorchDrawingEnv, first_draw=1000)
    with closing(make_engine(2, env_fn, num_workers=0)) as envs:
        envs.reset(seed=1)
        assert (envs.local_envs[0].take_snapshot()["torch"] is not None) == drawn


def test_draw_from_torch_warns(torch: types.SimpleNamespace) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        vecenv.AsyncVectorEnv([TorchDrawingEnv] * 2, num_workers="auto", context="fork").close()
    texts = [str(warning.message) for warning in caught]
    assert sum("and torch, which everything in its process shares" in text for text in texts) == 1, texts


def test_make_vec_forwards_generators() -> None:
    options = {"generators": "own", "num_workers": 0}
    with closing(vecenv.make_vec("CartPole-v1", 2, vector_kwargs=options)) as envs:
        assert envs.generators == "own"
        envs.reset(seed=0)


def test_vecenv_run_forwards_generators(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(
        "import gymnasium\n"
        "if __name__ == '__main__':\n"
        "    envs = gymnasium.vector.AsyncVectorEnv([lambda: gymnasium.make('CartPole-v1')] * 2)\n"
        "    print(envs.generators)\n"
        "    envs.close()\n"
    )
    output = python_output("-m", "vecenv", "run", "--generators", "own", "--num-workers", "0", program)
    assert output.split() == ["own"]
