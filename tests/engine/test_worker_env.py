"""``worker_env``: environment variables of the workers, there before anything is imported in them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import gymnasium
import pytest
from envs import counters, opened, started

import vecenv
from vecenv.system.spawning import too_late

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
