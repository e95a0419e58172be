"""``vecenv.install`` and ``vecenv run`` replace Gymnasium's engines with vecenv's."""

from __future__ import annotations

import abc
import functools
import gc
import inspect
import pickle
import re
import sys
import textwrap
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import cloudpickle
import gymnasium
import numpy as np
import pytest
from envs import counters
from gymnasium.vector import AsyncVectorEnv as EarlyAsync
from gymnasium.vector import SyncVectorEnv as EarlySync
from programs import run_python

import vecenv
from vecenv import patching

ASYNC, SYNC = EarlyAsync, EarlySync  # kept, because install() also replaces EarlyAsync and EarlySync in this module
IS_GENERIC = len(getattr(EarlyAsync, "__parameters__", ())) == 2  # since Gymnasium 1.4
CARTPOLE = functools.partial(gymnasium.make, "CartPole-v1")


@pytest.fixture(autouse=True)
def uninstall_afterwards() -> Iterator[None]:
    yield
    vecenv.uninstall()


# --- install ------------------------------------------------------------------------------------


def test_install_makes_gymnasiums_constructors_build_vecenvs_engine() -> None:
    vecenv.install(num_workers=2, copy=False)
    module = sys.modules[__name__]
    assert gymnasium.vector.AsyncVectorEnv is gymnasium.vector.async_vector_env.AsyncVectorEnv is module.EarlyAsync
    assert issubclass(gymnasium.vector.AsyncVectorEnv, vecenv.AsyncVectorEnv)
    assert gymnasium.vector.SyncVectorEnv is SYNC
    for build in (
        lambda: module.EarlyAsync([CARTPOLE] * 4),
        lambda: gymnasium.make_vec("CartPole-v1", 4, vectorization_mode="async"),
    ):
        envs: Any = build()
        try:
            assert type(envs.unwrapped).__name__ == "AsyncVectorEnv"
            assert isinstance(envs.unwrapped, vecenv.AsyncVectorEnv)
            assert isinstance(envs.unwrapped, gymnasium.vector.AsyncVectorEnv)
            assert (envs.unwrapped.num_workers, envs.unwrapped.copy) == (2, False)
            envs.reset(seed=1)
        finally:
            envs.close()


def test_positional_arguments_override_options_of_install(closes: Any) -> None:
    vecenv.install(num_workers=0, shared_memory=False, copy=False, context="spawn")
    envs: Any = closes(gymnasium.vector.AsyncVectorEnv(counters(2), True, copy=True, num_workers=1))
    assert (envs.shared_memory, envs.copy, envs.context, envs.num_workers) == (True, True, "spawn", 1)


def test_options_of_install_apply_to_sync_vector_envs(closes: Any) -> None:
    vecenv.install(sync=True, copy=False, autoreset_mode="SameStep")
    envs: Any = closes(gymnasium.vector.SyncVectorEnv(counters(2)))
    assert (envs.copy, envs.autoreset_mode.value) == (False, "SameStep")
    envs = closes(gymnasium.vector.SyncVectorEnv(counters(2), True, autoreset_mode="Disabled"))
    assert (envs.copy, envs.autoreset_mode.value) == (True, "Disabled")


def test_second_install_replaces_the_options_and_uninstall_restores_the_classes() -> None:
    vecenv.install(num_workers=1, copy=False)
    vecenv.install(on_failure="restart")
    assert patching.DEFAULTS == {"on_failure": "restart"}
    vecenv.uninstall()
    vecenv.uninstall()
    module = sys.modules[__name__]
    assert gymnasium.vector.AsyncVectorEnv is gymnasium.vector.async_vector_env.AsyncVectorEnv is module.EarlyAsync is ASYNC
    assert gymnasium.vector.SyncVectorEnv is SYNC
    assert not patching.DEFAULTS


def test_install_does_not_change_vecenvs_own_references() -> None:
    vecenv.install(sync=True)
    from vecenv.front import arguments

    assert arguments.GymnasiumAsync.__module__.startswith("gymnasium.")
    assert arguments.GymnasiumSync.__module__.startswith("gymnasium.")
    assert arguments.GymnasiumAsync in vecenv.AsyncVectorEnv.__mro__


def test_install_with_unknown_option_raises_and_replaces_nothing() -> None:
    before = gymnasium.vector.AsyncVectorEnv
    with pytest.raises(TypeError, match=r"install\(\) has no option 'nun_workers'. Did you mean 'num_workers'\?"):
        vecenv.install(nun_workers=2)
    with pytest.raises(TypeError, match=r"install\(\) has no option 'worker'"):
        vecenv.install(worker=print)
    assert gymnasium.vector.AsyncVectorEnv is before


def test_isinstance_and_issubclass_accept_both_engines() -> None:
    original = ASYNC(counters(2))
    vecenv.install(num_workers=0)
    theirs: Any = gymnasium.vector.AsyncVectorEnv

    class Subclass(theirs):  # type: ignore[misc]
        pass

    ours, derived = vecenv.AsyncVectorEnv(counters(2), num_workers=0), Subclass(counters(2))
    try:
        for envs in (original, ours, derived):
            assert isinstance(envs, theirs)
        assert not isinstance(ours, Subclass)
        assert not isinstance(original, Subclass)
        assert issubclass(ASYNC, theirs)
        assert not issubclass(SYNC, theirs)
        assert derived.num_workers == 0
    finally:
        for envs in (original, ours, derived):
            envs.close()


@pytest.mark.parametrize("name", ["AsyncVectorEnv", "SyncVectorEnv"])
def test_installed_classes_have_gymnasiums_vector_env_as_a_base(name: str) -> None:
    """skrl's ``wrap_env`` requires a base class with a name that begins with ``gymnasium.``."""
    assert gymnasium.vector.VectorEnv in getattr(gymnasium.vector, name).__bases__
    vecenv.install(sync=True)
    assert gymnasium.vector.VectorEnv in getattr(gymnasium.vector, name).__bases__


def test_installed_classes_keep_signature_pickling_and_generic_aliases() -> None:
    signatures = inspect.signature(ASYNC), inspect.signature(SYNC)
    names = [(kind.__module__, kind.__qualname__) for kind in (ASYNC, SYNC)]
    vecenv.install(sync=True, num_workers=0)
    kinds: list[Any] = [gymnasium.vector.AsyncVectorEnv, gymnasium.vector.SyncVectorEnv]
    assert [(kind.__module__, kind.__qualname__) for kind in kinds] == names
    for kind, signature in zip(kinds, signatures, strict=True):
        assert pickle.loads(pickle.dumps(kind)) is cloudpickle.loads(cloudpickle.dumps(kind)) is kind
        assert list(inspect.signature(kind).parameters)[: len(signature.parameters)] == list(signature.parameters)
        if IS_GENERIC:
            alias = kind[np.ndarray, np.ndarray]
            assert typing.get_origin(alias) is kind
            envs = alias(counters(2))
            assert isinstance(envs, kind)
            envs.close()

            class Subclass(alias):  # type: ignore[misc, valid-type]
                pass

            assert issubclass(Subclass, vecenv.AsyncVectorEnv)
            with pytest.raises(TypeError, match="Too many arguments"):
                kind[int, int, int]

    def annotated(envs: gymnasium.vector.AsyncVectorEnv) -> gymnasium.vector.SyncVectorEnv:  # type: ignore[type-arg, empty-body]
        ...

    assert list(typing.get_type_hints(annotated).values()) == kinds
    envs = gymnasium.make_vec("CartPole-v1", 2, vectorization_mode=gymnasium.VectorizeMode.ASYNC)
    assert type(envs) is gymnasium.vector.async_vector_env.AsyncVectorEnv is kinds[0]
    envs.close()


def test_subclass_that_uses_private_attributes_derives_from_gymnasiums_class(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patching, "REPORT", patching.PatchReport())
    vecenv.install(sync=True, num_workers=1)
    theirs: Any = gymnasium.vector.AsyncVectorEnv

    class UsesPipes(theirs):  # type: ignore[misc]
        """A subclass like RL-X's AsyncVectorEnvWithSkipping."""

        def step_async(self, actions: Any) -> None:
            for pipe, action in zip(self.parent_pipes, actions, strict=True):
                pipe.send(("step", action))
            self._state = gymnasium.vector.async_vector_env.AsyncState.WAITING_STEP

    class OverridesInfos(theirs):  # type: ignore[misc]
        """A subclass like those in evaluation scripts, for infos with varying shapes."""

        def _add_info(self, infos: dict[str, Any], info: dict[str, Any], row: int) -> dict[str, Any]:
            return super()._add_info(infos, info, row) | {"added": True}  # type: ignore[no-any-return]

    class UsesEnvs(gymnasium.vector.SyncVectorEnv):  # type: ignore[type-arg]
        """A subclass like MO-Gymnasium's MOSyncVectorEnv."""

        @property
        def first(self) -> Any:
            return (lambda: self.envs[0])()

    class UsesPublicCall(theirs):  # type: ignore[misc]
        def counts(self) -> Any:
            return self.call("get_wrapper_attr", "index")

    built: list[Any] = [kind(counters(2)) for kind in (UsesPipes, OverridesInfos, UsesEnvs, UsesPublicCall)]
    try:
        assert [isinstance(envs, vecenv.AsyncVectorEnv) for envs in built] == [False, False, False, True]
        assert all(isinstance(envs, theirs) for envs in built if not isinstance(envs, UsesEnvs))
        assert isinstance(built[2], gymnasium.vector.SyncVectorEnv)
        for envs in built:
            envs.reset(seed=1)
            assert envs.step(np.array([0, 0]))[1].tolist() == [0.001, 1.001]
        assert built[1].reset()[1]["added"]
        assert built[2].first is built[2].envs[0]
        text = "; these still derive from Gymnasium's class, as they use its internals: UsesPipes, OverridesInfos, UsesEnvs"
        assert text in str(patching.REPORT)
    finally:
        for envs in built:
            envs.close()


def test_subclass_with_an_abstract_base_class_can_be_defined_and_built(closes: Any) -> None:
    vecenv.install(num_workers=0)

    class Measured(abc.ABC):
        @abc.abstractmethod
        def measure(self) -> int: ...

    class Subclass(gymnasium.vector.AsyncVectorEnv, Measured):  # type: ignore[type-arg]
        def measure(self) -> int:
            return self.num_envs

    class UsesPipes(gymnasium.vector.AsyncVectorEnv, Measured):  # type: ignore[type-arg]
        def measure(self) -> int:
            return len(self.parent_pipes)

    envs: Any = closes(Subclass(counters(2)))
    assert isinstance(envs, vecenv.AsyncVectorEnv)
    assert isinstance(envs, Subclass)
    assert isinstance(envs, Measured)
    assert envs.measure() == 2
    assert issubclass(UsesPipes, ASYNC)
    assert not issubclass(UsesPipes, vecenv.AsyncVectorEnv)
    assert not issubclass(UsesPipes, Subclass)


def test_private_attributes_are_found_in_every_kind_of_method(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patching, "REPORT", patching.PatchReport())
    vecenv.install()
    theirs: Any = gymnasium.vector.AsyncVectorEnv

    def uses_pipes(envs: Any, *_: Any) -> Any:
        return envs.parent_pipes

    methods = [
        functools.cached_property(uses_pipes), property(None, None, uses_pipes), property(None, uses_pipes),
        functools.partialmethod(uses_pipes, 1), classmethod(uses_pipes),
    ]  # fmt: skip
    subclasses = [type("Subclass", (theirs,), {"method": method}) for method in methods]
    assert [vecenv.AsyncVectorEnv not in subclass.mro() for subclass in subclasses] == [True] * len(methods)


def worker_function(*args: Any) -> None:
    gymnasium.vector.async_vector_env._async_worker(*args)


def test_custom_worker_function_uses_gymnasiums_engine(closes: Any) -> None:
    vecenv.install(num_workers=2, on_failure="restart")
    envs: Any = closes(gymnasium.vector.AsyncVectorEnv(counters(2), worker=worker_function))
    assert len(envs.processes) == 2
    assert envs.reset(seed=1)[0].shape == (2, 4)
    assert envs.step([0, 0])[1].tolist() == [0.001, 1.001]


def test_install_with_sync_replaces_sync_vector_env() -> None:
    reference = SYNC([CARTPOLE] * 3, autoreset_mode="SameStep")
    vecenv.install(sync=True, num_workers=2)
    same_step = {"autoreset_mode": gymnasium.vector.AutoresetMode.SAME_STEP}
    envs: Any = gymnasium.make_vec("CartPole-v1", 3, vectorization_mode="sync", vector_kwargs=same_step)
    try:
        assert type(envs).__name__ == "SyncVectorEnv"
        assert isinstance(envs, gymnasium.vector.SyncVectorEnv)
        assert isinstance(reference, gymnasium.vector.SyncVectorEnv)
        assert np.array_equal(envs.reset(seed=3)[0], reference.reset(seed=3)[0])
        for _ in range(60):
            assert np.array_equal(envs.step([0, 1, 0])[0], reference.step([0, 1, 0])[0])
        with pytest.raises(AttributeError, match=r"this SyncVectorEnv of vecenv has no `envs`.*no --sync"):
            _ = envs.envs
        with pytest.raises(TypeError, match="num_workers"):
            gymnasium.vector.SyncVectorEnv([CARTPOLE], num_workers=2)  # type: ignore[call-arg]
    finally:
        envs.close()
        reference.close()
    vecenv.install(sync=True, num_workers=0)
    in_process: Any = gymnasium.vector.SyncVectorEnv(CARTPOLE for _ in range(2))  # type: ignore[arg-type]
    assert [env.spec.id for env in in_process.envs] == ["CartPole-v1"] * 2
    in_process.close()
    names = list(inspect.signature(SYNC.__init__).parameters)
    assert list(inspect.signature(gymnasium.vector.SyncVectorEnv.__init__).parameters) == names


# --- vecenv run ---------------------------------------------------------------------------------

PROGRAM = """
    import atexit, sys
    import gymnasium as gym
    from gymnasium.vector import AsyncVectorEnv

    def make():
        return gym.make("CartPole-v1")

    def bye():
        print("bye", make.__name__)

    if __name__ == "__main__":
        atexit.register(bye)
        print(sys.argv[1:], sys.modules["__main__"].make is make, __file__)
        envs = AsyncVectorEnv([make] * 3, context="spawn" if "spawn" in sys.argv else None)
        observations, _ = envs.reset(seed=5)
        total = observations.sum()
        for tick in range(120):
            observations, rewards, *_ = envs.step([tick % 2, 1, 0])
            total += observations.sum() + rewards.sum()
        print(repr(float(total)))
        if "raise" in sys.argv:
            raise RuntimeError("mine")
        if "exit" in sys.argv:
            sys.exit(7)
        envs.close()
"""


@pytest.fixture
def program(tmp_path: Path) -> Path:
    file = tmp_path / "my program.py"
    file.write_text(textwrap.dedent(PROGRAM))
    return file


REPORT = re.compile(
    r"vecenv run: gymnasium\.vector\.AsyncVectorEnv is vecenv's \((?P<options>[^\n]*)\)\n"
    r"(?P<auto>vecenv run: auto first tries environments in temporary processes for up to 64 steps\n)?(?P<stderr>.*)"
    r"vecenv run: 1 vector environment of 3 environments: 360 steps in [\d.]+ s from construction to exit, "
    r"[\d,]+ per second; nothing failed\n",
    re.DOTALL,
)


@pytest.mark.sampled("--num-workers 2 --record-failures kept---lr 3")
@pytest.mark.parametrize(
    ("options", "arguments"),
    [
        (["--num-workers", "2", "--record-failures", "kept"], ["--lr", "3"]),
        pytest.param(["--num-workers", "0"], ["exit", "-m", "--help"], marks=pytest.mark.long),
        (["--num-workers", "1", "--generators", "own", "--on-failure", "restart"], ["raise"]),
        pytest.param([], ["--seed=1"], marks=pytest.mark.long),
        pytest.param(["--num-workers", "each"], ["spawn"], marks=pytest.mark.long),
    ],
    ids=lambda arguments: " ".join(arguments) or "auto",
)
def test_run_gives_the_same_output_and_exit_code_as_python(options: list[str], arguments: list[str], program: Path) -> None:
    plain = run_python(program.name, *arguments, cwd=program.parent)
    result = run_python("-m", "vecenv", "run", *options, program.name, *arguments, cwd=program.parent)
    assert result.returncode == plain.returncode == {"raise": 1, "exit": 7}.get(arguments[0], 0), result.stderr
    assert result.stdout == plain.stdout
    match = REPORT.fullmatch(result.stderr)
    assert match, result.stderr
    if arguments == ["raise"]:
        assert match["stderr"].startswith(f'Traceback (most recent call last):\n  File "{program}", line 23, in <module>\n')
        assert match["stderr"].endswith("\nRuntimeError: mine\n")
        assert match["stderr"].count('File "') == 1  # no frames of vecenv
    else:
        assert match["stderr"] == ""
    assert ("generators='own'" in match["options"]) == ("own" in options)
    assert ("record_failures='kept'" in match["options"]) == ("kept" in options)
    assert (match["auto"] is not None) == ("--num-workers" not in options)


@pytest.mark.long
def test_run_of_a_module_gives_the_same_output_as_python(tmp_path: Path) -> None:
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "__main__.py").write_text("import sys; print(sys.argv, __name__, __spec__.name); sys.exit(3)")
    plain = run_python("-m", "deep", "a", "--b", cwd=tmp_path)
    result = run_python("-m", "vecenv", "run", "--quiet", "--num-workers", "2", "-m", "deep", "a", "--b", cwd=tmp_path)
    assert (result.returncode, result.stdout, result.stderr) == (plain.returncode, plain.stdout, "")
    assert result.returncode == 3


@pytest.mark.long
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere.py"], "vecenv: no such program: nowhere.py"),
        (["."], "vecenv: no such program: . has no __main__.py"),
        (["-m", "nowhere.module"], "vecenv: no module 'nowhere.module': ModuleNotFoundError: No module named 'nowhere'"),
        ([], "vecenv: no program given: vecenv run [options] PROGRAM ..., or vecenv run [options] -m MODULE ..."),
        (["--num-workers", "-1", "x.py"], "argument --num-workers: must be a non-negative int, 'auto' or 'each', got '-1'"),
        (["--context", "thread", "x.py"], "argument --context: invalid choice: 'thread'"),
    ],
    ids=str,
)
def test_usage_error_is_reported_without_traceback(arguments: list[str], message: str, tmp_path: Path) -> None:
    result = run_python("-m", "vecenv", "run", *arguments, cwd=tmp_path)
    assert result.returncode == 2
    assert message in result.stderr
    assert "Traceback" not in result.stderr
    assert "is vecenv's" not in result.stderr


@pytest.mark.long
def test_run_reports_that_no_vector_environment_was_built(tmp_path: Path) -> None:
    (tmp_path / "none.py").write_text("import gymnasium\nprint(gymnasium.vector.SyncVectorEnv.__module__)")
    result = run_python("-m", "vecenv", "run", "none.py", cwd=tmp_path)
    assert result.returncode == 0
    assert result.stdout == "gymnasium.vector.sync_vector_env\n"
    assert result.stderr.endswith(
        "vecenv run: no vector environment was built by vecenv in this process; --sync replaces SyncVectorEnv too\n"
    )
    result = run_python("-m", "vecenv", "run", "--sync", "none.py", cwd=tmp_path)
    assert result.stderr.endswith("vecenv run: no vector environment was built by vecenv in this process\n")


def test_report_names_the_adapter_if_stable_baselines3_is_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "stable_baselines3", raising=False)
    assert "as_sb3" not in str(patching.PatchReport())
    monkeypatch.setitem(sys.modules, "stable_baselines3", sys)
    assert str(patching.PatchReport()).endswith("Stable-Baselines3's classes are not replaced: use vecenv.adapters.as_sb3")


@pytest.mark.long
def test_run_reports_a_subclass_that_still_derives_from_gymnasiums_class(tmp_path: Path) -> None:
    (tmp_path / "derives.py").write_text(
        textwrap.dedent("""
        import gymnasium

        class Derived(gymnasium.vector.AsyncVectorEnv):
            def first_pipe(self):
                return self.parent_pipes[0]

        print([base.__module__ for base in Derived.__bases__])
    """)
    )
    result = run_python("-m", "vecenv", "run", "derives.py", cwd=tmp_path)
    assert result.stdout == "['gymnasium.vector.async_vector_env']\n"
    assert result.stderr.splitlines()[-1] == (
        "vecenv run: no vector environment was built by vecenv in this process; --sync replaces SyncVectorEnv too; "
        "these still derive from Gymnasium's class, as they use its internals: Derived"
    )


@pytest.mark.long
def test_run_of_a_program_with_a_syntax_error_prints_the_same_error_as_python(tmp_path: Path) -> None:
    (tmp_path / "bad.py").write_text("x = (\n")
    plain = run_python("bad.py", cwd=tmp_path)
    result = run_python("-m", "vecenv", "run", "--quiet", "bad.py", cwd=tmp_path)
    assert (result.returncode, result.stderr) == (1, plain.stderr)


def test_run_reports_the_number_of_failures_and_restarts(tmp_path: Path) -> None:
    (tmp_path / "fails.py").write_text(
        textwrap.dedent("""
        import gymnasium

        class Fails(gymnasium.Env):
            observation_space = action_space = gymnasium.spaces.Discrete(3)
            steps = 0
            def reset(self, *, seed=None, options=None):
                return 0, {}
            def step(self, action):
                self.steps += 1
                if self.steps == 3:
                    raise ValueError("not today")
                return 0, 0.0, False, False, {}

        if __name__ == "__main__":
            envs = gymnasium.vector.AsyncVectorEnv([Fails] * 2)
            envs.reset()
            for _ in range(4):
                envs.step([0, 0])
    """)
    )
    options = ["--num-workers", "1", "--on-failure", "restart"]
    result = run_python("-W", "ignore", "-m", "vecenv", "run", *options, "fails.py", cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    last = result.stderr.splitlines()[-1]
    assert re.search(r": 8 steps in .*; 2 failures, 2 restarts$", last), result.stderr


def test_report_includes_vector_environments_that_were_not_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some programs, such as AgileRL's demos, never close their environments."""
    monkeypatch.setattr(patching, "REPORT", patching.PatchReport())
    vecenv.install(num_workers=1)
    for in_a_cycle in (False, True):
        built: list[Any] = [gymnasium.vector.AsyncVectorEnv(counters(2))]
        built[0].reset(seed=1)
        built[0].step(np.array([0, 0]))
        drop = built.clear
        if in_a_cycle:  # only the garbage collector frees it
            built[0].itself = built[0]
            built.clear()
            drop = gc.collect
        with pytest.warns(ResourceWarning, match="unclosed AsyncVectorEnv"):
            drop()
    assert str(patching.REPORT).startswith("2 vector environments of 4 environments: 4 steps in ")
