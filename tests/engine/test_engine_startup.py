"""How workers start, where they run, with which variables, and what the fork server has imported before them."""

from __future__ import annotations

import math
import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from envs import CounterEnv, Options, SpaceEnv, assert_as_sync, counters, opened, raises_logged, started
from gymnasium import spaces
from gymnasium.spaces import Box, Discrete
from gymnasium.vector import SyncVectorEnv

import vecenv
from vecenv.errors import StartupTimeout, VecEnvError, WorkerDied
from vecenv.link.observations import direct_rows
from vecenv.shm import Layout, fixed_tree
from vecenv.system.cores import usable_cores
from vecenv.system.spawning import too_late
from vecenv.testing import assert_identical

# --- How workers start, where they run, and what the fork server has imported before them -------

binds = pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="this system cannot bind processes")


# --- Start-up: all workers at once, every failure with its cause, and nothing left running ------


def only_in_a_worker(do: Any) -> Any:
    """A function that builds a :class:`CounterEnv` in this process, and elsewhere does what it is told."""
    here = os.getpid()

    def build() -> gymnasium.Env:
        if os.getpid() != here:
            do()
        return CounterEnv()

    return build


def explode() -> None:
    raise RuntimeError("no display")


@pytest.mark.parametrize("bad", [0, 1, 2])
def test_an_env_fn_that_raises_in_a_worker_gives_its_own_exception_and_the_index(process_engine: Options, bad: int) -> None:
    fns = counters(3)
    fns[bad] = only_in_a_worker(explode)
    with pytest.raises(RuntimeError, match="no display") as caught:
        vecenv.AsyncVectorEnv(fns, **process_engine)
    assert f"env {bad}" in str(caught.value) + "\n".join(getattr(caught.value, "__notes__", []))
    assert "explode" in str(caught.value.__cause__)
    assert multiprocessing.active_children() == []


def test_the_lowest_index_is_raised_when_several_env_fns_raise(process_engine: Options) -> None:
    def other() -> None:
        raise ValueError("another")

    fns = [*counters(1), only_in_a_worker(explode), only_in_a_worker(other)]
    with pytest.raises(RuntimeError, match="no display"):
        vecenv.AsyncVectorEnv(fns, **process_engine)


def test_an_env_fn_that_exits_is_an_error_and_not_the_end_of_the_program(process_engine: Options) -> None:
    with pytest.raises(VecEnvError, match=r"\b2\b"):
        vecenv.AsyncVectorEnv([*counters(2), only_in_a_worker(lambda: sys.exit(3))], **process_engine)
    with pytest.raises(VecEnvError):
        vecenv.AsyncVectorEnv([*counters(2), only_in_a_worker(lambda: os._exit(4))], **process_engine)
    assert multiprocessing.active_children() == []


def test_a_start_that_hangs_ends_at_start_timeout(process_engine: Options) -> None:
    begin = time.monotonic()
    with pytest.raises(StartupTimeout) as caught:
        vecenv.AsyncVectorEnv([*counters(2), only_in_a_worker(lambda: time.sleep(60))], start_timeout=0.5, **process_engine)
    assert time.monotonic() - begin < 70
    assert isinstance(caught.value, TimeoutError)
    assert isinstance(caught.value, multiprocessing.TimeoutError)
    assert multiprocessing.active_children() == []


@pytest.mark.long
def test_workers_start_side_by_side() -> None:
    begin = time.monotonic()
    with opened([only_in_a_worker(lambda: time.sleep(2.0))] * 4):
        assert time.monotonic() - begin < 7


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"num_workers": -1}, ()),
        ({"num_workers": 1.5}, ()),
        ({"num_workers": "many"}, ("auto",)),
        ({"on_failure": "shrug"}, ("raise", "restart")),
        ({"on_failure": None}, ("raise", "restart")),
        ({"restart_limit": -1}, ()),
        ({"restart_period": -1.0}, ()),
        ({"restart_period": 0.0}, ()),
        ({"step_timeout": -1.0}, ()),
        ({"step_timeout": math.nan}, ()),
        ({"start_timeout": 0}, ()),
        ({"start_timeout": -1}, ()),
        ({"threads_per_worker": 0}, ()),
        ({"strict": "yes"}, ()),
        ({"dummy_env": "no"}, ()),
        ({"worker": print, "on_failure": "restart"}, ("on_failure",)),
    ],
    ids=str,
)
def test_an_option_without_a_meaning_is_refused_before_anything_is_built(options: Options, words: tuple[str, ...]) -> None:
    """By its name, and with what is accepted."""

    def never() -> gymnasium.Env:
        raise AssertionError("built too early")

    with pytest.raises((ValueError, TypeError)) as caught:
        vecenv.AsyncVectorEnv([never, never], **options)
    for word in (next(iter(options)), *words):
        assert word in str(caught.value)


# -- where spaces come from ---------------------------------------------------------------------------------------------


def not_here() -> gymnasium.Env:
    """An environment that must not be built where the tests run."""
    assert multiprocessing.parent_process() is not None, "built in the caller"
    return CounterEnv()


def of_size(size: int) -> Any:
    def build() -> gymnasium.Env:
        assert multiprocessing.parent_process() is not None, "built in the caller"
        return SpaceEnv(spaces.Box(0.0, float(size), (2,), np.float32))

    return build


class Unsendable(spaces.Discrete):
    def __reduce__(self) -> Any:
        raise TypeError("this space stays where it is")


def unsendable() -> gymnasium.Env:
    env = CounterEnv()
    env.action_space = Unsendable(5)
    return env


@pytest.mark.long
@pytest.mark.parametrize("context", ["fork", "spawn", "forkserver"])
def test_without_a_dummy_env_spaces_come_from_another_process(context: str) -> None:
    with opened([not_here] * 3, dummy_env=False, context=context, num_workers=2) as envs:
        here = CounterEnv()
        assert envs.single_observation_space == here.observation_space
        assert envs.single_action_space == here.action_space
        assert envs.observation_space.shape == (3, *here.observation_space.shape)
        assert envs.metadata == {**here.metadata, "autoreset_mode": envs.autoreset_mode}
        assert envs.render_mode == here.render_mode
        assert envs.reset(seed=1)[0] in envs.observation_space


def test_a_process_that_steps_one_env_anyway_tells_its_spaces_too() -> None:
    with opened([not_here] * 2, num_workers="auto", step_timeout=30.0) as envs:  # a timeout rules out steps in the caller
        assert envs.plan is not None
        assert envs.reset(seed=1)[0] in envs.observation_space


def test_without_a_dummy_env_different_spaces_are_gathered_elsewhere() -> None:
    with opened([of_size(1), of_size(2)], dummy_env=False, observation_mode="different") as envs:
        assert envs.observation_space.high.tolist() == [[1, 1], [2, 2]]


def test_what_building_elsewhere_raises_arrives_as_itself() -> None:
    with pytest.raises(RuntimeError, match="no display") as caught:
        vecenv.AsyncVectorEnv([only_in_a_worker(explode)], dummy_env=False)
    assert "explode" in str(caught.value.__cause__)
    with pytest.raises(WorkerDied, match="exit code 4"):
        vecenv.AsyncVectorEnv([only_in_a_worker(lambda: os._exit(4))], dummy_env=False)
    with pytest.raises(StartupTimeout):
        vecenv.AsyncVectorEnv([only_in_a_worker(lambda: time.sleep(60))], dummy_env=False, start_timeout=0.5)
    assert multiprocessing.active_children() == []


def test_spaces_that_cannot_travel_are_an_error_only_where_none_may_be_built_here() -> None:
    with pytest.raises(TypeError, match="stays where it is"):
        vecenv.AsyncVectorEnv([unsendable] * 2, dummy_env=False)
    # by fork, the default up to Python 3.13: whatever else starts a worker sends the spaces to it
    with opened([unsendable] * 2, num_workers="auto", step_timeout=30.0, context="fork") as envs:
        assert type(envs.single_action_space) is Unsendable


# --- fork, spawn and forkserver: the same answers, the same errors, and functions that exist only here travel all the same

methods = pytest.mark.parametrize("context", ["fork", "spawn", "forkserver"])


@methods
def test_one_environment_through_its_whole_life(context: str, closes: Any) -> None:
    """One start for many questions, because a start by spawn takes long."""

    class OnlyHere(CounterEnv):
        def step(self, action: Any) -> Any:
            if action == 4:
                raise ValueError("four")
            return super().step(action)

    offset = 5
    fns = [lambda i=i: OnlyHere(i + offset - 5, lengths=(2 + i,), render_mode="rgb_array") for i in range(3)]
    oracle = closes(SyncVectorEnv(fns))
    with opened(fns, context=context, num_workers=2) as envs:
        assert envs.context == context
        assert os.getpid() not in envs.call("pid")
        assert_same_trajectory_of_legal_actions(envs, oracle)
        assert envs.call("add", 2) == (2, 3, 4)
        assert envs.exec_func(lambda env: env.env_id + offset, [2]) == (None, None, 7)
        envs.set_attr("note", ["a", "b", "c"])
        assert envs.get_attr("note") == ("a", "b", "c")
        assert len(envs.render()) == 3
        envs.reset(seed=1)
        with raises_logged(ValueError, match="four"):
            envs.step([0, 4, 0])
        assert envs.reset(seed=3)[0][:, 3].tolist() == [3, 4, 5]


def assert_same_trajectory_of_legal_actions(envs: Any, oracle: Any) -> None:
    rng = np.random.default_rng(0)
    assert_identical(envs.reset(seed=1), oracle.reset(seed=1))
    for t in range(8):
        actions = rng.integers(4, size=3)
        assert_identical(envs.step(actions), oracle.step(actions), f"step {t}")
    mask = np.array([True, False, True])
    assert_identical(*[one.reset(seed=3, options={"reset_mask": mask.copy()}) for one in (envs, oracle)])


@methods
def test_real_environments_give_the_trajectories_of_sync_vector_env(context: str) -> None:
    fns = [lambda: gymnasium.make("CartPole-v1", max_episode_steps=9)] * 3
    assert_as_sync(fns, 30, autoreset_mode="SameStep", context=context, copy=False, num_workers=2)


def test_a_layout_that_travelled_has_the_dtype_objects_of_numpys_own_arrays() -> None:
    """Dtypes are compared for each observation, and with other, equal objects that takes longer."""
    layout = Layout.of(fixed_tree(Box(-1, 1, (4, 2), np.float32)), fixed_tree(Discrete(2), "action"), 3, 1, final=False)
    travelled = pickle.loads(pickle.dumps(layout))
    assert travelled == layout
    batch = travelled.view(bytearray(layout.size))
    for array in (*batch.observations, *batch.actions, batch.rewards, batch.terminations):
        assert array.dtype is np.zeros(1, array.dtype.str).dtype
    for row in direct_rows(travelled.observations.leaf, batch.observations[0]):
        assert row._dtype is batch.observations[0].dtype


# --- ``preload``: the fork server imports modules once, for all workers -------------------------

PROGRAM = """
import sys, gymnasium, vecenv

class Looks(gymnasium.Env):
    observation_space = gymnasium.spaces.Box(-1, 1, (2,))
    action_space = gymnasium.spaces.Discrete(2)
    def __init__(self):
        self.there = {name: name in sys.modules for name in ("tabnanny", "pyclbr")}
    def reset(self, *, seed=None, options=None):
        return self.observation_space.low, {}
    def step(self, action):
        return self.observation_space.low, 0.0, False, False, {}

if __name__ == "__main__":
    def there(**options):
        envs = vecenv.AsyncVectorEnv([Looks] * 2, context="forkserver", **options)
        found = envs.get_attr("there")
        envs.close()
        return [one["tabnanny"] for one in found], [one["pyclbr"] for one in found]
    print(there(preload=["tabnanny"]))
    print(there(preload=["pyclbr"]))  # too late
"""


def test_workers_have_what_the_fork_server_has_imported(tmp_path: Any) -> None:
    file = tmp_path / "program.py"
    file.write_text(PROGRAM)
    done = subprocess.run([sys.executable, file], capture_output=True, text=True, timeout=100, check=True)
    assert done.stdout.splitlines() == ["([True, True], [False, False])", "([True, True], [False, False])"]
    assert "`preload` comes too late: the fork server" in done.stderr


# --- ``worker_affinity``: workers stay on the cores that they are given; and how many cores there are to use


def cores(env: Any) -> set[int]:
    return os.sched_getaffinity(0)


@binds
@pytest.mark.parametrize("context", ["fork", "spawn"])
def test_workers_stay_on_their_cores(context: str) -> None:
    mine = sorted(os.sched_getaffinity(0))
    given = [mine[-1], mine]
    with started(counters(4), num_workers=2, context=context, worker_affinity=given, on_failure="restart") as envs:
        for _ in range(2):
            assert envs.exec_func(cores) == ({mine[-1]}, {mine[-1]}, set(mine), set(mine))
            for _ in range(50):
                envs.step(np.zeros(4, np.int64))
            os.kill(envs.processes[0].pid, signal.SIGKILL)
            envs.step(np.zeros(4, np.int64))


@binds
@pytest.mark.parametrize("wrong", [3, [0], [0, []], [0, "x"], [0, 10_000], "01"], ids=str)
def test_what_are_no_cores_of_each_worker_is_refused(wrong: Any) -> None:
    with pytest.raises(ValueError, match=r"`worker_affinity(\[1\])?` must be .*, got "):
        opened(counters(2), num_workers=2, worker_affinity=wrong).__enter__()


@binds
def test_slurms_number_counts_where_it_is_smaller(monkeypatch: pytest.MonkeyPatch) -> None:
    usable = usable_cores()
    for given, wanted in (("1", 1), ("100000", usable), ("", usable), ("2(x2)", usable)):
        monkeypatch.setenv("SLURM_CPUS_PER_TASK", given)
        assert usable_cores() == wanted


# --- ``worker_env``: environment variables of the workers, there before anything is imported in them

ANEW = [pytest.param(name, marks=pytest.mark.long) for name in ("spawn", "forkserver")]
METHODS = pytest.mark.parametrize("context", ["fork", *ANEW])


def seen(envs: Any, *names: str) -> list[tuple[str | None, ...]]:
    return [tuple(found) for found in envs.exec_func(lambda env: [os.environ.get(name) for name in names])]


@METHODS
def test_each_worker_has_its_own(context: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VECENV_TEST_GONE", "here")
    before = dict(os.environ)
    variables = {"VECENV_TEST_DEVICE": lambda worker: worker + 4, "VECENV_TEST_GL": "egl", "VECENV_TEST_GONE": None}
    with opened(counters(4), num_workers=2, context=context, worker_env=variables) as envs:
        assert seen(envs, *variables) == [("4", "egl", None)] * 2 + [("5", "egl", None)] * 2
    assert dict(os.environ) == before


def test_a_worker_that_is_restarted_has_the_same() -> None:
    with started(counters(2), on_failure="restart", worker_env={"VECENV_TEST_DEVICE": str}) as envs:
        os.kill(envs.processes[1].pid, signal.SIGKILL)
        while not envs.stats()["restarts"]:
            envs.step([0, 0])
        assert seen(envs, "VECENV_TEST_DEVICE") == [("0",), ("1",)]


def test_no_environment_is_built_here_and_the_one_that_is_tried_has_worker_0s(tmp_path: Path) -> None:
    log = tmp_path / "log"

    def env_fn() -> Any:
        with log.open("a") as out:
            print(os.getpid(), os.environ.get("VECENV_TEST_DEVICE"), file=out)
        return gymnasium.make("CartPole-v1")

    with opened([env_fn] * 2, num_workers=2, worker_env={"VECENV_TEST_DEVICE": lambda worker: f"gpu{worker}"}):
        built = [line.split() for line in log.read_text().splitlines()]
    first, *others = [device for _, device in built]
    assert (first, sorted(others)) == ("gpu0", ["gpu0", "gpu1"])  # workers build side by side
    assert str(os.getpid()) not in {pid for pid, _ in built}


def test_auto_takes_processes() -> None:
    with opened(counters(2), num_workers="auto", worker_env={"VECENV_TEST_GL": "egl"}) as envs:
        assert envs.num_workers >= 1
        assert seen(envs, "VECENV_TEST_GL") == [("egl",)] * 2


@pytest.mark.parametrize("context", ["spawn", "forkserver"])
@pytest.mark.long
def test_the_main_module_is_imported_with_them(context: str, tmp_path: Path) -> None:
    """``NameWithVariables`` is why: what ``Process`` is given is unpickled after the main module has been imported."""
    (tmp_path / "simulator.py").write_text("""
import os
AT_IMPORT = os.environ.get("VECENV_TEST_DEVICE")
import gymnasium
def env_fn():
    env = gymnasium.make("CartPole-v1")
    env.unwrapped.at_import = AT_IMPORT
    return env
""")
    program = tmp_path / "program.py"
    program.write_text(f"""
import simulator, vecenv
if __name__ == "__main__":
    envs = vecenv.AsyncVectorEnv([simulator.env_fn] * 2, context={context!r}, worker_env={{"VECENV_TEST_DEVICE": str}})
    print(simulator.AT_IMPORT, *envs.get_attr("at_import"))
    envs.close()
""")
    path = str(Path(vecenv.__file__).parents[1])
    variables = {**os.environ, "PYTHONPATH": path}
    done = subprocess.run(
        [sys.executable, str(program)], capture_output=True, text=True, timeout=120, env=variables, check=False
    )
    assert done.stdout.split() == ["None", "0", "1"], done.stderr


@pytest.mark.parametrize(
    ("wrong", "error", "text"),
    [
        (["A"], TypeError, "`worker_env` must be a dict of environment variables, got list"),
        ({1: "a"}, TypeError, "a name that is no string: 1"),
        ({"A=B": "a"}, ValueError, "no environment variable can have: 'A=B'"),
        ({"": "a"}, ValueError, "no environment variable can have: ''"),
        ({"A": b"a"}, TypeError, r"`worker_env\['A'\]` must be .* got b'a'"),
        ({"A": True}, TypeError, r"`worker_env\['A'\]` must be .* got True"),
        ({"A": "a\0"}, ValueError, r"`worker_env\['A'\]` must not contain a null character"),
        ({"A": lambda worker: [worker]}, TypeError, r"`worker_env\['A'\]` must be .* got \[0\] for worker 0"),
    ],
)
def test_what_is_no_variable_is_refused_before_anything_is_built(wrong: Any, error: type[Exception], text: str) -> None:
    def never() -> Any:
        raise AssertionError("it was built")

    with pytest.raises(error, match=text):
        vecenv.AsyncVectorEnv([never], worker_env=wrong)


def test_a_function_that_raises_is_told_as_it_is_and_nothing_is_left() -> None:
    def no_third(worker: int) -> str:
        return {0: "a", 1: "b"}[worker]

    with pytest.raises(KeyError):
        vecenv.AsyncVectorEnv(counters(3), worker_env={"A": no_third})


def test_under_fork_what_was_imported_here_has_read_its_own(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "OpenGL", sys)
    monkeypatch.setenv("PYOPENGL_PLATFORM", "glx")
    with (
        pytest.warns(UserWarning, match=r"PYOPENGL_PLATFORM \(by OpenGL\).*context='spawn'"),
        opened(counters(1), context="fork", worker_env={"PYOPENGL_PLATFORM": "egl"}),
    ):
        pass
    assert too_late([{"PYOPENGL_PLATFORM": "glx"}]) == {}

