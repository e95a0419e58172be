"""``make_vec`` and ``register``: ids, specs, functions, backends, and errors for wrong names and arguments."""

from __future__ import annotations

import functools
import importlib.util
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import gymnasium
import numpy as np
import pytest
from gymnasium.envs.classic_control.cartpole import CartPoleEnv
from gymnasium.envs.registration import EnvSpec, registry
from gymnasium.error import UnregisteredEnv
from gymnasium.vector import AutoresetMode
from gymnasium.wrappers import FlattenObservation
from programs import python_output

import vecenv.make
from vecenv import AsyncVectorEnv
from vecenv.make import make_vec, register
from vecenv.testing import assert_identical

needs_envpool = pytest.mark.skipif(importlib.util.find_spec("envpool") is None, reason="needs envpool")


@pytest.fixture
def make() -> Iterator[Callable[..., Any]]:
    """Yield ``make_vec``. What it builds is closed at the end of the test."""
    built: list[Any] = []

    def make_and_keep(*args: Any, **kwargs: Any) -> Any:
        built.append(make_vec(*args, **kwargs))
        return built[-1]

    yield make_and_keep
    for envs in built:
        envs.close()


def cartpole(**kwargs: Any) -> gymnasium.Env[Any, Any]:
    return gymnasium.make("CartPole-v1", **kwargs)


def trajectory(envs: Any, steps: int = 30) -> list[Any]:
    envs.action_space.seed(0)
    return [envs.reset(seed=3), *(envs.step(envs.action_space.sample()) for _ in range(steps))]


# --- backends -----------------------------------------------------------------------------------


@pytest.mark.sampled("id-process", "spec-serial", "fn-serial")
@pytest.mark.parametrize("backend", ["process", "serial"])
@pytest.mark.parametrize("environment", ["CartPole-v1", gymnasium.spec("CartPole-v1"), cartpole], ids=["id", "spec", "fn"])
def test_trajectories_equal_gymnasiums(make: Callable[..., Any], backend: str, environment: Any, closes: Any) -> None:
    envs = make(environment, 3, backend, vector_kwargs={"num_workers": 1} if backend == "process" else None)
    reference = closes(gymnasium.make_vec("CartPole-v1", num_envs=3, vectorization_mode="sync"))
    assert isinstance(envs, AsyncVectorEnv)
    assert_identical(trajectory(envs), trajectory(reference))


def test_serial_backend_starts_no_process(make: Callable[..., Any]) -> None:
    assert make("CartPole-v1", 2, "serial").num_workers == 0
    with pytest.raises(ValueError, match="num_workers is for backend='process'"):
        make("CartPole-v1", 2, "serial", vector_kwargs={"num_workers": 2})


@pytest.fixture
def engine_class(monkeypatch: pytest.MonkeyPatch) -> Mock:
    """Replace ``AsyncVectorEnv`` in ``make_vec`` by a mock, which records its options, and return the mock."""
    engine_class = Mock()
    monkeypatch.setattr(vecenv.make, "AsyncVectorEnv", engine_class)
    monkeypatch.setattr(vecenv.make, "engine_options", lambda: ("num_workers", "context"))
    return engine_class


def test_default_number_of_workers_is_auto(engine_class: Mock) -> None:
    make_vec("CartPole-v1", 2)
    make_vec("CartPole-v1", 2, vector_kwargs={"num_workers": None})
    assert [call.kwargs["num_workers"] for call in engine_class.call_args_list] == ["auto", None]


@pytest.mark.parametrize(("modules", "context"), [((), None), (("jax",), "forkserver"), (("torch",), "forkserver")])
def test_forkserver_is_the_default_if_jax_or_torch_is_imported(
    engine_class: Mock, monkeypatch: pytest.MonkeyPatch, modules: tuple[str, ...], context: str | None
) -> None:
    for name in ("jax", "torch"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    for name in modules:
        monkeypatch.setitem(sys.modules, name, object())  # type: ignore[arg-type]
    make_vec("CartPole-v1", 2)
    make_vec("CartPole-v1", 2, vector_kwargs={"context": "spawn"})
    by_default, with_option = engine_class.call_args_list
    assert by_default.kwargs.get("context") == context
    assert with_option.kwargs["context"] == "spawn"


@needs_envpool
def test_envpool_backend_builds_an_envpool_engine(make: Callable[..., Any]) -> None:
    envs = make("CartPole-v1", 3, "envpool", vector_kwargs={"num_threads": 1}, max_episode_steps=7)
    wrapped = gymnasium.wrappers.vector.RecordEpisodeStatistics(envs)
    wrapped.reset(seed=0)
    for _ in range(7):
        truncated = wrapped.step(wrapped.action_space.sample())[3]
    assert truncated.all()
    assert envs.spec.id == "CartPole-v1"
    assert envs.spec.max_episode_steps == 7


# --- features of Gymnasium's make_vec ------------------------------------------------------------


def test_spec_equals_gymnasiums(make: Callable[..., Any], closes: Any) -> None:
    options: dict[str, Any] = {"autoreset_mode": AutoresetMode.SAME_STEP}
    arguments: dict[str, Any] = {"vector_kwargs": options, "max_episode_steps": 9, "render_mode": "rgb_array"}
    envs = make("CartPole-v1", 3, "serial", **arguments)
    reference = closes(gymnasium.make_vec("CartPole-v1", 3, vectorization_mode="sync", **arguments))
    assert envs.spec == reference.spec
    assert envs.render_mode == "rgb_array"
    assert "CartPole-v1" in repr(envs)
    from_spec = make(envs.spec, backend="serial")
    assert from_spec.num_envs == 3
    assert from_spec.metadata["autoreset_mode"] is AutoresetMode.SAME_STEP
    assert_identical(trajectory(from_spec), trajectory(envs))
    assert trajectory(envs)[9][3].all(), "max_episode_steps=9"


def test_wrappers_wrap_every_environment(make: Callable[..., Any]) -> None:
    envs = make("CartPole-v1", 2, "serial", wrappers=[lambda env: gymnasium.wrappers.TransformReward(env, lambda r: r * 7)])
    envs.reset(seed=0)
    assert envs.step(np.zeros(2, int))[1].tolist() == [7.0, 7.0]


def test_env_fn_receives_the_environment_options(make: Callable[..., Any]) -> None:
    envs = make(cartpole, 2, "serial", max_episode_steps=1)
    envs.reset(seed=0)
    assert envs.step(np.zeros(2, int))[3].all()


def test_module_in_front_of_an_id_is_imported(make: Callable[..., Any], tmp_path: Any, monkeypatch: Any) -> None:
    (tmp_path / "vecenv_made_up_module.py").write_text(
        "import gymnasium\n"
        "gymnasium.register('MadeUp-v0', entry_point='gymnasium.envs.classic_control:CartPoleEnv', max_episode_steps=3)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    try:
        envs = make("vecenv_made_up_module:MadeUp-v0", 2, "serial")
        assert envs.spec.id == "MadeUp-v0"
        assert trajectory(envs)[3][3].all()
    finally:
        registry.pop("MadeUp-v0", None)
    with pytest.raises(ModuleNotFoundError, match="no_such_module"):
        make_vec("no_such_module:CartPole-v1")


def test_kwargs_of_the_registration_reach_the_environment_unless_replaced(make: Callable[..., Any]) -> None:
    gymnasium.register("FromKwargs-v0", entry_point=cartpole, kwargs={"max_episode_steps": 2})  # type: ignore[arg-type]
    try:
        assert trajectory(make("FromKwargs-v0", 2, "serial"))[2][3].all()
        assert trajectory(make("FromKwargs-v0", 2, "serial", max_episode_steps=4))[4][3].all()
    finally:
        registry.pop("FromKwargs-v0", None)


# --- register ------------------------------------------------------------------------------------


@pytest.fixture
def unregister_names() -> Iterator[None]:
    yield
    for name in [name for name in registry if name.startswith("vecenv/")]:
        registry.pop(name)


@pytest.mark.usefixtures("unregister_names")
def test_gymnasiums_make_vec_builds_vecenvs_engine_for_a_registered_name(closes: Any) -> None:
    assert register("CartPole-v1", backend="serial") == "vecenv/CartPole-v1"
    assert register("CartPole-v1", backend="serial", vector_kwargs={"copy": False}, max_episode_steps=6)
    envs = gymnasium.make_vec("vecenv/CartPole-v1", num_envs=8)
    try:
        assert isinstance(envs, AsyncVectorEnv)
        assert envs.num_envs == 8
        assert envs.copy is False
        assert envs.spec is not None
        assert envs.spec.id == "vecenv/CartPole-v1"
        assert trajectory(envs)[6][3].all()
    finally:
        envs.close()
    longer = closes(gymnasium.make_vec("vecenv/CartPole-v1", num_envs=2, max_episode_steps=8))
    assert trajectory(longer)[8][3].all()


@needs_envpool
@pytest.mark.usefixtures("unregister_names")
def test_gymnasiums_make_vec_uses_the_backend_argument_or_the_registered_backend() -> None:
    from vecenv.backends import EnvPoolVectorEnv

    register("CartPole-v1", backend="envpool", vector_kwargs={"num_threads": 1})
    envs = gymnasium.make_vec("vecenv/CartPole-v1", num_envs=2)
    assert isinstance(envs, EnvPoolVectorEnv)
    envs.reset(seed=0)
    envs.close()
    register("CartPole-v1", backend="serial")
    envs = gymnasium.make_vec("vecenv/CartPole-v1", num_envs=2, backend="envpool")
    assert isinstance(envs, EnvPoolVectorEnv)
    envs.close()


@pytest.mark.usefixtures("unregister_names")
def test_backend_argument_overrides_the_registered_backend(closes: Any) -> None:
    name = register("CartPole-v1", backend="serial")
    assert closes(make_vec(name, 2)).num_workers == 0
    assert closes(make_vec(name, 2, "process", num_workers=1)).num_workers == 1


@pytest.mark.usefixtures("unregister_names")
def test_registered_name_may_begin_with_the_module_that_registers_it(
    closes: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "registers.py").write_text("import vecenv\nvecenv.register('CartPole-v1', num_workers=1)")
    monkeypatch.syspath_prepend(tmp_path)
    assert len(closes(make_vec("registers:vecenv/CartPole-v1", 2)).processes) == 1


@needs_envpool
@pytest.mark.usefixtures("unregister_names")
def test_options_beside_a_registered_name_are_those_of_its_backend(closes: Any) -> None:
    name = register("CartPole-v1", backend="envpool", batch_size=2)
    assert closes(make_vec(name, 4, batch_size=4)).batch_size == 4
    assert closes(make_vec(name, 4, "envpool")).batch_size == 2
    assert closes(make_vec(gymnasium.spec(name), 4, batch_size=1)).batch_size == 1


@pytest.mark.usefixtures("unregister_names")
def test_engine_option_in_gymnasiums_make_vec_raises_and_names_register() -> None:
    register("CartPole-v1")
    with pytest.raises(TypeError, match=r"'num_workers'\. .* pass it directly to vecenv\.make_vec or vecenv\.register\."):
        gymnasium.make_vec("vecenv/CartPole-v1", num_workers=2)


@pytest.mark.usefixtures("unregister_names")
def test_register_with_an_unknown_id_or_backend_raises() -> None:
    with pytest.raises(UnregisteredEnv):
        register("CartPole-v7")
    with pytest.raises(ValueError, match="no backend 'proces'"):
        register("CartPole-v1", backend="proces")


# --- wrong names and arguments -------------------------------------------------------------------


def test_unknown_id_with_a_library_namespace_names_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in registry if name.startswith("ALE/")]:
        monkeypatch.delitem(registry, name)
    with pytest.raises(UnregisteredEnv, match=r"ale_py"):
        make_vec("ALE/Pong-v5")


def test_unknown_id_is_reported_if_envpool_cannot_be_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", Mock())
    monkeypatch.setattr("vecenv.backends.envpool.task.task_ids", Mock(side_effect=ImportError("libQt5Core.so.5")))
    with pytest.raises(UnregisteredEnv, match=r"Similar registered ids: CartPole-v1"):
        make_vec("CartPol-v1")


def test_unknown_backend_suggests_a_similar_name_and_install_commands(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vecenv.make.Backend, "missing", lambda self: list(self.needs))
    text = (
        "there is no backend 'env_pool', did you mean 'envpool'? Backends: 'process', 'serial', 'envpool', 'brax', "
        "'playground', 'ray', 'native'. Not installed here: 'envpool', 'brax', 'playground', 'ray'; pip install -e "
        "'.[envpool,brax,playground,ray]' in a checkout, or pip install 'vecenv[envpool,brax,playground,ray]' from a release"
    )
    with pytest.raises(ValueError, match=f"^{re.escape(text)}$"):
        make_vec("CartPole-v1", backend="env_pool")


@pytest.mark.long
@pytest.mark.parametrize(
    ("backend", "module", "extra"),
    [("envpool", "envpool", "envpool"), ("brax", "jax", "brax"), ("playground", "mujoco_playground", "playground")],
)
def test_missing_library_error_names_the_install_command(backend: str, module: str, extra: str) -> None:
    program = f"""
import functools
import importlib.util
real = importlib.util.find_spec
importlib.util.find_spec = lambda name, *rest: None if name == {module!r} else real(name, *rest)
from vecenv.make import make_vec
try:
    make_vec("ant", 2, {backend!r})
except ImportError as error:
    print(error)
"""
    output = python_output("-c", program)
    assert module in output
    assert f"pip install 'vecenv[{extra}]'" in output


envpool_param = functools.partial(pytest.param, marks=needs_envpool)
HINT = "Did you mean"
VECTOR_ONLY_SPEC = EnvSpec("OnlyVector-v0", vector_entry_point="x:y")


@pytest.mark.parametrize(
    ("arguments", "kind", "text"),
    [
        ({"num_envs": 0}, ValueError, "`num_envs` must be a positive int, got 0"),
        ({"num_envs": "8"}, ValueError, "`num_envs` must be a positive int, got '8'"),
        ({"backend": ["process"]}, ValueError, "there is no backend"),
        ({"vector_kwargs": 3}, TypeError, "vector_kwargs must be a dict"),
        ({"wrappers": 3}, TypeError, "wrappers must be a sequence of functions"),
        ({"vector_kwargs": {"num_worker": 2}}, TypeError, f"'num_worker'. {HINT} 'num_workers'\\? Options: .*copy"),
        ({"sutton_barto": True}, TypeError, f"'CartPole-v1' has no option 'sutton_barto'. {HINT} 'sutton_barto_reward'\\?"),
        ({"zero_copy": False}, TypeError, "'zero_copy'. Remove it: "),
        ({"seed": 3}, TypeError, r"'seed'. Pass it to reset\(seed=\.\.\.\)"),
        ({"num_worker": 3}, TypeError, "Did you mean 'num_workers', an option of the vector environment"),
        ({"id_or_env_fn": CartPoleEnv, "num_worker": 3}, TypeError, "CartPoleEnv has no option 'num_worker'.*'num_workers'"),
        ({"env_kwargs": {"num_workers": 3}}, TypeError, "'num_workers'. It is an option of the vector environment"),
        ({"workers": 3}, TypeError, "'CartPole-v1' has no option 'workers'.*'num_workers', an option of the vector"),
        ({"num_workers": 2, "vector_kwargs": {"num_workers": 1}}, TypeError, "two values for 'num_workers': 1 and 2"),
        ({"env_kwargs": [3]}, TypeError, "env_kwargs must be a dict of options of the environment"),
        ({"id_or_env_fn": 7}, TypeError, "an id, an EnvSpec or a function"),
        ({"id_or_env_fn": VECTOR_ONLY_SPEC, "backend": "serial"}, gymnasium.error.Error, "no entry point"),
        ({"id_or_env_fn": "CartPool-v1"}, UnregisteredEnv, "CartPole-v1"),
        ({"id_or_env_fn": "CartPole-v9"}, UnregisteredEnv, "CartPole-v1"),
        ({"id_or_env_fn": "Nothing/CartPole-v1"}, UnregisteredEnv, "Nothing"),
        envpool_param({"id_or_env_fn": "Pong-v5"}, UnregisteredEnv, "backend='envpool'"),
        envpool_param({"id_or_env_fn": "Pong-v4", "backend": "envpool"}, UnregisteredEnv, "Pong-v5"),
        envpool_param(
            {"id_or_env_fn": "Pong-v5", "backend": "envpool", "frameskip": 4}, TypeError, f"{HINT} 'frame_skip'\\?"
        ),
        envpool_param({"id_or_env_fn": cartpole, "backend": "envpool"}, TypeError, "name of an environment"),
        envpool_param({"backend": "envpool", "wrappers": [FlattenObservation]}, ValueError, r"gymnasium\.wrappers\.vector"),
    ],
)
def test_error_names_the_wrong_argument(arguments: dict[str, Any], kind: type[Exception], text: str) -> None:
    with pytest.raises(kind, match=text):
        make_vec(**{"id_or_env_fn": "CartPole-v1", **arguments})


def test_register_checks_id_and_environment_options() -> None:
    with pytest.raises(TypeError, match="'CartPole-v1' has no option 'gravitee'"):
        register("CartPole-v1", gravitee=3)
    with pytest.raises(TypeError, match="register needs an id, got 3"):
        register(3)  # type: ignore[arg-type]


def test_ray_backend_receives_env_fns_and_options(monkeypatch: pytest.MonkeyPatch, closes: Any) -> None:
    received: dict[str, Any] = {}

    def fake_ray_engine(env_fns: Any, **options: Any) -> AsyncVectorEnv[Any, Any]:
        received.update(count=len(env_fns), options=options)
        return AsyncVectorEnv(env_fns, num_workers=0)

    monkeypatch.setattr(vecenv.make.Backend, "missing", lambda self: [])
    monkeypatch.setattr("vecenv.backends.RayVectorEnv", fake_ray_engine, raising=False)
    envs = closes(make_vec("CartPole-v1", 3, "ray", vector_kwargs={"num_hosts": 2}, max_episode_steps=7))
    assert received == {"count": 3, "options": {"num_hosts": 2}}
    assert envs.spec is not None
    assert envs.spec.id == "CartPole-v1"


def test_each_option_of_a_ray_host_is_an_option_of_make_vec(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vecenv.make.Backend, "missing", lambda self: [])
    with pytest.raises(ValueError, match="`observation_mode` must be 'same', 'different' or two spaces, got 'any'"):
        make_vec("CartPole-v1", 2, "ray", observation_mode="any")


def make_cartpole_ignoring_threads(**kwargs: Any) -> gymnasium.Env[Any, Any]:
    kwargs.pop("num_worker_threads", None)
    return CartPoleEnv(**kwargs)


@functools.wraps(CartPoleEnv)
def make_cartpole_with_extra_option(*args: Any, num_worker: int = 0, **kwargs: Any) -> gymnasium.Env[Any, Any]:
    return CartPoleEnv(*args, **kwargs)


@pytest.mark.long
def test_misspelled_engine_option_is_passed_to_env_fns_that_accept_any_kwargs(closes: Any) -> None:
    with pytest.raises(TypeError, match=r"unexpected keyword argument 'num_worker'"):
        make_vec(make_cartpole_ignoring_threads, 2, num_worker=2)
    closes(make_vec(make_cartpole_ignoring_threads, 2, "serial", num_worker_threads=2))
    closes(make_vec(make_cartpole_with_extra_option, 2, "serial", num_worker=2))


class EnvWithCopyOption(CartPoleEnv):
    """An environment with one option that the vector environment has too, and one that it does not have."""

    def __init__(self, copy: bool = True, gravity: float = 9.8) -> None:
        super().__init__()
        self.copies, self.gravity = copy, gravity


def test_options_reach_the_engine_or_the_environments_by_their_name(closes: Any) -> None:
    envs = closes(make_vec(EnvWithCopyOption, 4, num_workers=2, autoreset_mode="SameStep", gravity=1.0))
    assert (envs.num_workers, envs.autoreset_mode.value) == (2, "SameStep")
    assert envs.get_attr("gravity") == (1.0,) * 4
    with pytest.raises(TypeError, match=r"both .* have an option 'copy': .*vector_kwargs=\{'copy': ...\} or env_kwargs="):
        make_vec(EnvWithCopyOption, 2, copy=False)
    envs = closes(make_vec(EnvWithCopyOption, 2, num_workers=0, vector_kwargs={"copy": False}, env_kwargs={"copy": False}))
    assert envs.copy is False
    assert envs.get_attr("copies") == (False, False)


def test_registered_name_accepts_options_of_engine_and_environment(closes: Any) -> None:
    name = register("CartPole-v1", num_workers=0, max_episode_steps=6)
    envs = closes(make_vec(name, 2, autoreset_mode="SameStep"))
    assert (envs.num_workers, envs.autoreset_mode.value) == (0, "SameStep")
    envs.reset(seed=0)
    for step in range(6):
        truncations = envs.step(np.array([step % 2] * 2))[3]
    assert truncations.all()


class EnvWithArguments(CartPoleEnv):
    """An environment with options that have the names of arguments of ``make_vec``."""

    def __init__(self, backend: str = "", options: str = "", wrappers: str = "") -> None:
        super().__init__()
        self.arguments = backend, options, wrappers


@pytest.mark.usefixtures("unregister_names")
def test_registered_name_passes_all_options_to_the_environment(closes: Any) -> None:
    gymnasium.register("Arguments-v0", EnvWithArguments)
    try:
        name = register("Arguments-v0", backend="serial", env_kwargs={"backend": "spring", "options": "a", "wrappers": "b"})
        assert closes(gymnasium.make_vec(name, num_envs=1)).get_attr("arguments") == (("spring", "a", "b"),)
        envs = closes(make_vec(name, env_kwargs={"backend": "positional"}))
        assert envs.get_attr("arguments") == (("positional", "a", "b"),)
    finally:
        registry.pop("Arguments-v0")


def test_options_override_those_of_a_spec(closes: Any) -> None:
    spec = closes(make_vec("CartPole-v1", 2, num_workers=0, copy=False)).spec
    envs = closes(make_vec(spec, copy=True, autoreset_mode="SameStep"))
    assert (envs.num_envs, envs.num_workers, envs.copy) == (2, 0, True)
    assert envs.autoreset_mode is AutoresetMode.SAME_STEP
