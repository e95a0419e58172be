"""Skips the whole folder if JAX is not installed, and caches compiled programs on disk between runs."""

from __future__ import annotations

import importlib.util
import os
import tempfile
from pathlib import Path
from typing import Any

import pytest

# jaxlib, because this folder could be found as a package with the name jax
HAS_JAX = importlib.util.find_spec("jaxlib") is not None

if HAS_JAX:
    import jax

    # physics programs take seconds to compile and are the same in every run
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
    """Return Brax's inverted_pendulum with the spring backend, the physics environment that is fastest to compile."""
    pytest.importorskip("brax", reason="needs Brax: pip install 'vecenv[brax]'")
    from vecenv.jax import adapt

    return adapt("inverted_pendulum", backend="spring")


@pytest.fixture(scope="session")
def counters() -> Any:
    """``counters(**options)`` returns a vector of five :class:`Counter` environments, the same for equal options."""
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
def asymmetric() -> Any:
    """Return a Playground environment with dict observations, one for the actor and one for the critic.

    It is the cart-pole in the form of the locomotion environments, which themselves need a download of model files.
    """
    playground = pytest.importorskip("mujoco_playground", reason="needs MuJoCo Playground")
    env = playground.registry.load("CartpoleBalance", config_overrides={"impl": "jax"})

    class Asymmetric(type(env)):  # type: ignore[misc]
        def _get_obs(self, data: Any, info: Any) -> Any:
            state = super()._get_obs(data, info)
            return {"state": state[:2], "privileged_state": state}

    env.__class__ = Asymmetric
    return env
