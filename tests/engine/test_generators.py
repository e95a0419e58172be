"""With ``generators="own"``, environments that draw from the generators of their process get the same numbers as alone."""

from __future__ import annotations

import functools
import gc
import os
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

    It draws single normal numbers, of which NumPy generates two at a time. With ``seeds``, a reset seeds the generators.
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
        np.random.seed(1)
        kept = np.random.rand()
        np.random.set_state(state)
        numbers = [np.random.normal(), random.random(), random.gauss(0, 1), getrandbits(20), random.randint(0, 9)]
        return np.array([*numbers, kept])

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
    """Yield the results of one environment in a plain loop, seeded as in ``docs/workers.md``; nothing else draws."""
    outside = random.getstate(), np.random.get_state()
    episode = 0

    def begin_episode(env: Any, **kwargs: Any) -> Any:
        sequences = [np.random.SeedSequence(seed, spawn_key=(episode, which)) for which in range(2)]
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
        random.setstate(outside[0])
        np.random.set_state(outside[1])


def collect_results(envs: Any, steps: int, seed: int | None = 3) -> list[Any]:
    """Return (observations, rewards, terminations) of a reset, unless ``seed`` is ``None``, and of steps.

    In disabled mode, rows are reset by mask when their episodes end.
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
    if "spare_workers" in options:
        return vecenv.make_vec(env_fn, count, vector_kwargs={"generators": "own", **options})
    return vecenv.AsyncVectorEnv([env_fn] * count, generators="own", **options)


def run_engine(steps: int = 40, **options: Any) -> list[Any]:
    envs = make_engine(**options)
    try:
        return collect_results(envs, steps)
    finally:
        envs.close()


DRAWS_FROM_STEP_7 = functools.partial(DrawingEnv, first_draw=7)
SEEDS_GENERATORS = functools.partial(DrawingEnv, seeds=True)


@pytest.mark.parametrize("env_fn", [DrawingEnv, DRAWS_FROM_STEP_7, SEEDS_GENERATORS], ids=["always", "late", "seeds"])
@pytest.mark.parametrize("mode", [AutoresetMode.NEXT_STEP, AutoresetMode.SAME_STEP])
def test_rows_equal_envs_that_run_alone(mode: AutoresetMode, env_fn: Any) -> None:
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
        MODES, {"always": DrawingEnv, "late": DRAWS_FROM_STEP_7},
        {"2": {"num_workers": 2}, "caller": {"num_workers": 2, "use_caller": True}, "1": {"num_workers": 1}},
    ),
)
def test_number_of_workers_does_not_change_results(mode: AutoresetMode, env_fn: Any, options: Any) -> None:
    plain = run_engine(env_fn=env_fn, num_workers=0, autoreset_mode=mode)
    assert_identical(run_engine(env_fn=env_fn, autoreset_mode=mode, **options), plain)


@pytest.mark.long
@pytest.mark.parametrize("context", ["fork", "spawn", "forkserver"])
@pytest.mark.parametrize("workers", [2, 4, None])
def test_start_methods_do_not_change_results(context: Any, workers: Any) -> None:
    expected = run_engine(num_workers=0, env_fn=SEEDS_GENERATORS)
    assert_identical(run_engine(num_workers=workers, context=context, env_fn=SEEDS_GENERATORS), expected)


def test_callers_draws_are_independent() -> None:
    plain = run_engine(num_workers=0)
    np.random.seed(1)
    random.seed(1)
    np.random.normal()
    bit_generator = np.random.get_bit_generator()  # type: ignore[attr-defined]
    function = random.random
    envs = make_engine(num_workers=0)
    results = [(envs.reset(seed=3)[0], np.zeros(5), np.zeros(5, bool))]
    drawn = [np.random.normal(), random.random(), getrandbits(8)]
    for _ in range(40):
        results.append(envs.step(np.zeros(5, int))[:3])
        drawn += [np.random.normal(), random.gauss(0, 1)]
    envs.close()
    assert_identical(results, plain)
    assert np.random.get_bit_generator() is bit_generator  # type: ignore[attr-defined]
    assert random.random is function
    rest = [np.random.normal(), random.random()]
    np.random.seed(1)
    random.seed(1)
    np.random.normal()
    assert drawn[:3] == [np.random.normal(), random.random(), getrandbits(8)]
    assert drawn[3:] == [number for _ in range(40) for number in (np.random.normal(), random.gauss(0, 1))]
    assert rest == [np.random.normal(), random.random()]


class ModuleDrawingEnv(DrawingEnv):
    """An environment that draws only by functions of the modules."""

    def draw_all(self) -> Any:
        return np.array([np.random.normal(), random.random(), random.gauss(0, 1)])


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # a signal in a finalizer
def test_signal_at_any_point_does_not_change_draws(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(system_generators._Switch, "_replace_references", lambda self: None)  # takes 10 ms each time
    original = np.random.get_bit_generator(), random.random  # type: ignore[attr-defined]
    outside = random.getstate(), np.random.get_state()
    (build,) = own_generators.with_own_generators([ModuleDrawingEnv])
    later = next(run_alone(ModuleDrawingEnv, 5, 0, AutoresetMode.NEXT_STEP))[0]
    event, fired = 0, True

    def run_episode() -> None:
        with closing(build()) as env:
            env.reset(seed=1)
            env.step(0)

    try:
        while fired and event < 900:
            event += 1
            random.seed(7)
            np.random.seed(7)
            np.random.normal()  # NumPy generates two numbers and keeps the second
            with signal_handler(signal.SIGUSR2, Alarm):
                fired, _ = interrupt_at(event, run_episode, own_generators.__file__, system_generators.__file__)
            expected = np.random.RandomState(7).normal(size=3).tolist()[1:], random.Random(7).random()
            assert ([np.random.normal(), np.random.normal()], random.random()) == expected, f"event {event}"
            if event % 8 == 0:
                with closing(build()) as env:
                    assert_identical(env.reset(seed=5)[0], later, f"event {event}")
        assert 100 < event < 900
        gc.collect()  # frees environments that an interruption left open
        assert (np.random.get_bit_generator(), random.random) == original  # type: ignore[attr-defined]
    finally:
        random.setstate(outside[0])
        np.random.set_state(outside[1])


def test_calls_and_first_ready_rows_use_their_own_generators() -> None:
    results = []
    for workers in (0, 2):
        envs = make_engine(4, num_workers=workers, batch_size=4)
        envs.reset(seed=5)
        draws = envs.call("draw"), envs.exec_func(DrawingEnv.draw, [1, 3])
        for rows in ([0, 2], [1], [3], [0]):
            envs.send(np.zeros(len(rows), int), rows)
            envs.recv(count=len(rows))
        results.append((draws, collect_results(envs, 20, None), envs.call("draw")))
        envs.close()
    assert_identical(results[1], results[0])


def test_saved_generators_continue_in_another_engine() -> None:
    envs = make_engine(num_workers=0)
    collect_results(envs, 13)
    kept = envs.save()
    expected = collect_results(envs, 30, None)
    envs.load(kept)
    assert_identical(collect_results(envs, 30, None), expected)
    state = envs.state_dict()
    envs.close()
    with closing(make_engine(num_workers=2)) as other:
        other.reset(seed=99)
        other.load(kept)
        assert_identical(collect_results(other, 30, None), expected)
        other.load_state_dict(state)
    with (
        closing(vecenv.AsyncVectorEnv([DrawingEnv] * 5, num_workers=0)) as with_shared_generators,
        pytest.raises(SnapshotMismatch, match="own"),
    ):
        with_shared_generators.load(kept)


def test_killed_worker_continues_from_its_snapshot(closes: Any) -> None:
    envs = closes(make_engine(4, num_workers=2, on_failure="restart", autoreset_mode="SameStep"))
    collect_results(envs, 9)
    kept = envs.save()
    expected = collect_results(envs, 12, None)
    *_, infos = envs.step(np.array([7, 0, 7, 0]))
    assert infos["restarted"].all()
    envs.load(kept)
    assert_identical(collect_results(envs, 12, None), expected)


def test_killed_worker_gives_the_same_results_after_a_reset(closes: Any) -> None:
    expected = run_engine(num_workers=0)
    envs = closes(make_engine(num_workers=2, on_failure="restart"))
    collect_results(envs, 5)
    envs.step(np.array([7, 0, 0, 0, 7]))
    assert_identical(collect_results(envs, 40), expected)


@pytest.mark.parametrize("mode", ["NextStep", pytest.param("SameStep", marks=pytest.mark.long)])
def test_spare_workers_do_not_change_results(mode: str) -> None:
    assert_identical(
        run_engine(spare_workers=3, count=3, autoreset_mode=mode),
        run_engine(spare_workers=1, count=3, autoreset_mode=mode),
    )


@pytest.mark.sampled("late")
@pytest.mark.parametrize("env_fn", [DrawingEnv, DRAWS_FROM_STEP_7], ids=["always", "late"])
def test_evaluate_returns_the_same_for_every_number_of_environments(env_fn: Any) -> None:
    evaluations = []
    for count, workers in ((1, 0), (3, 1), (4, 2), (4, 4)):
        with closing(make_engine(count, env_fn, num_workers=workers)) as envs:
            results = vecenv.evaluate(envs, lambda seen: np.zeros(len(seen), int), episodes=12, seed=1)
        evaluations.append([(result.episode_return, result.length) for result in results])
    assert evaluations.count(evaluations[0]) == 4
    assert len({episode_return for episode_return, _ in evaluations[0]}) == 12


PROBING_OPTIONS: list[dict[str, Any]] = [
    {"num_workers": "auto"}, {"num_workers": 2, "use_caller": True}, {"batch_size": "auto"},
]  # fmt: skip
"""Options with which an environment is probed before workers start."""


@pytest.mark.sampled("{'num_workers': 2, 'use_caller': True}")
@pytest.mark.parametrize("options", PROBING_OPTIONS, ids=str)
def test_evaluate_warns_if_results_depend_on_shared_generators(options: Any) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with closing(vecenv.AsyncVectorEnv([DrawingEnv] * 3, **options)) as envs:
            vecenv.evaluate(envs, lambda observations: np.zeros(len(observations), int), episodes=4, seed=1)
    texts = [str(one.message) for one in caught]
    assert sum("generators='own'" in text and "DrawingEnv" in text for text in texts) == 1, texts
    assert sum("results of evaluate depend on" in text for text in texts) == 1, texts


@pytest.mark.sampled(1)
@pytest.mark.parametrize("options", PROBING_OPTIONS, ids=str)
def test_warning_names_the_environment_and_the_generator(options: Any) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        vecenv.AsyncVectorEnv([DrawsInStepEnv] * 4, **options).close()
    [text] = [str(one.message) for one in caught if "generators" in str(one.message)]
    assert re.search(r"env \d \(DrawsInStepEnv\) draws from the generator of numpy\.random.*generators='own'", text)


def test_own_generators_give_no_warning() -> None:
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
@pytest.mark.parametrize("workers", [0, 2, "auto"])
def test_environments_that_do_not_draw_give_no_warning(workers: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        envs = vecenv.AsyncVectorEnv([functools.partial(gymnasium.make, "CartPole-v1")] * 4, num_workers=workers)
        envs.reset(seed=1)
        for _ in range(40):
            envs.step(np.ones(4, int))
        envs.save()  # saving verifies snapshots, which compares the state of all generators
        envs.close()


class NestedEngineEnv(DrawsInStepEnv):
    """An environment that builds an engine in its reset. It draws nothing in the reset."""

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        with closing(vecenv.AsyncVectorEnv([functools.partial(gymnasium.make, "CartPole-v1")], context="fork")) as envs:
            envs.reset(seed=seed)
        return super().reset()


def test_engine_inside_an_environment_gives_no_warning() -> None:
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
        self._own = np.random.RandomState(0)

    def manual_seed(self, seed: int) -> FakeTorchGenerator:
        self._own = np.random.RandomState(seed % 2**32)
        return self

    def get_state(self) -> Any:
        _, key, position, *_ = self._own.get_state()
        state = np.append(key, np.uint32(position)).view(np.uint8)
        return types.SimpleNamespace(numpy=lambda: state)

    def set_state(self, state: Any) -> None:
        words = np.asarray(state).view(np.uint32)
        self._own.set_state(("MT19937", words[:-1], int(words[-1])))

    def rand(self) -> float:
        return float(self._own.rand())


@pytest.fixture
def torch(monkeypatch: pytest.MonkeyPatch) -> types.SimpleNamespace:
    """Install a replacement for the parts of torch that generators need, because the real package is large."""
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
def test_torch_generator_has_a_state_per_environment(torch: types.SimpleNamespace, first_draw: int) -> None:
    env_fn = functools.partial(TorchDrawingEnv, first_draw=first_draw)
    before = torch.default_generator.get_state().numpy().tobytes()
    plain = run_engine(env_fn=env_fn, num_workers=0)
    assert torch.default_generator.get_state().numpy().tobytes() == before
    assert_identical(run_engine(env_fn=env_fn, num_workers=2, context="fork"), plain)
    two_rows = [tuple(part[:2] for part in step) for step in plain]
    assert_identical(two_rows, run_engine(env_fn=env_fn, num_workers=0, count=2))
    with closing(make_engine(3, env_fn, num_workers=0)) as envs:
        collect_results(envs, 13)
        kept = envs.save()
        expected = collect_results(envs, 20, None)
        envs.load(kept)
        assert_identical(collect_results(envs, 20, None), expected)


@pytest.mark.parametrize("drawn", [True, False])
def test_snapshot_contains_the_state_of_torch(torch: types.SimpleNamespace, drawn: bool) -> None:
    """A snapshot contains torch's state even if nothing was drawn from it."""
    env_fn = TorchDrawingEnv if drawn else functools.partial(TorchDrawingEnv, first_draw=1000)
    with closing(make_engine(2, env_fn, num_workers=0)) as envs:
        envs.reset(seed=1)
        assert (envs.local_envs[0].take_snapshot()["torch"] is not None) == drawn


def test_draw_from_torch_warns(torch: types.SimpleNamespace) -> None:
    with warnings.catch_warnings(record=True) as results:
        warnings.simplefilter("always")
        vecenv.AsyncVectorEnv([TorchDrawingEnv] * 2, num_workers="auto", context="fork").close()
    assert sum("and torch, which everything in its process shares" in str(one.message) for one in results) == 1


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
