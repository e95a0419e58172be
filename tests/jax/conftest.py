"""Skips the whole folder if JAX is not installed, and caches compiled programs on disk between runs."""

from __future__ import annotations

import importlib.util
import os
import tempfile
from pathlib import Path
from typing import Any

import pytest

# not `jax`, because find_spec() could find this folder, tests/jax
HAS_JAX = importlib.util.find_spec("jaxlib") is not None

if HAS_JAX:
    import jax

    # physics programs take seconds to compile, and later runs compile the same programs
    _CACHE = os.environ.get("JAX_COMPILATION_CACHE_DIR", str(Path(tempfile.gettempdir()) / "vecenv-test-jax-cache"))
    jax.config.update("jax_compilation_cache_dir", _CACHE)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.2)


class SkippedModule(pytest.Module):
    """A test module that is not imported."""

    def collect(self) -> Any:
        pytest.skip("needs JAX: pip install 'vecenv[jax]'", allow_module_level=True)


def pytest_pycollect_makemodule(module_path: Path, parent: Any) -> Any:
    return None if HAS_JAX else SkippedModule.from_parent(parent, path=module_path)


@pytest.fixture(scope="session")
def pendulum() -> Any:
    """Return Brax's inverted_pendulum with the spring backend, which compiles faster than any other physics environment."""
    pytest.importorskip("brax", reason="needs Brax: pip install 'vecenv[brax]'")
    from vecenv.jax import adapt

    return adapt("inverted_pendulum", backend="spring")


@pytest.fixture(scope="session")
def make_counters() -> Any:
    """Return a function that builds a vector of :class:`Counter` environments, or reuses one that has the same options."""
    from jax_envs import Counter

    from vecenv.jax import FunctionalVectorEnv

    cache: dict[Any, FunctionalVectorEnv] = {}

    def make(num_envs: int = 5, **options: Any) -> FunctionalVectorEnv:
        key = (num_envs, *sorted(options.items()))
        if key not in cache:
            cache[key] = FunctionalVectorEnv(Counter(), num_envs, **options)
        return cache[key]

    return make


@pytest.fixture(scope="session")
def asymmetric_env() -> Any:
    """Return a Playground environment with different observations for the actor and the critic, in a dict.

    It is a cart-pole with the interface of the locomotion environments, which would need a download of model files.
    """
    playground = pytest.importorskip("mujoco_playground", reason="needs MuJoCo Playground: pip install 'vecenv[playground]'")
    env = playground.registry.load("CartpoleBalance", config_overrides={"impl": "jax"})

    class Asymmetric(type(env)):  # type: ignore[misc]
        def _get_obs(self, data: Any, info: Any) -> Any:
            state = super()._get_obs(data, info)
            return {"state": state[:2], "privileged_state": state}

    env.__class__ = Asymmetric
    return env
