"""If a client's library is not installed, the error of its adapter or example names the install command."""

from __future__ import annotations

import pytest
from programs import check_help, check_missing_library, run_python


@pytest.mark.parametrize(
    ("adapter", "library", "extra"),
    [
        ("as_sb3", "stable_baselines3", "sb3"),
        ("as_sb3", "torch", ""),
        ("as_tianshou", "tianshou", "clients"),
        ("as_torchrl", "torchrl", "clients"),
        ("as_rllib", "ray", "rllib"),
    ],
)
def test_adapter_without_its_library_names_the_install_command(adapter: str, library: str, extra: str) -> None:
    program = f"""
import sys

class HidingFinder:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == {library!r}:
            raise ModuleNotFoundError("No module named {library!r}", name={library!r})

sys.meta_path.insert(0, HidingFinder())
import vecenv
assert {adapter!r} in dir(vecenv.adapters)
assert "torch" not in sys.modules
vecenv.adapters.{adapter}
"""
    result = run_python("-c", program)
    last_line = result.stderr.strip().splitlines()[-1]
    command = "pip install torch (CPU build: pytorch.org)"  # the extras would install CUDA too
    if library != "torch":
        command = f"pip install -e '.[{extra}]' in a checkout, or pip install 'vecenv[{extra}]' from a release"
    assert last_line == f"ImportError: vecenv.adapters.{adapter} needs {library}, not installed here: {command}"


def test_unknown_adapter_raises_attribute_error() -> None:
    import vecenv

    with pytest.raises(AttributeError, match="no attribute 'as_sb4'"):
        _ = vecenv.adapters.as_sb4


@pytest.mark.parametrize(
    ("program", "library", "extra"),
    [
        ("sb3_ppo", "torch", "sb3"),
        ("sb3_ppo", "stable_baselines3", "sb3"),
        ("tianshou_ppo", "tianshou", "clients"),
        ("torchrl_collect", "torchrl", "clients"),
        ("torchrl_gradient", "torch", "clients"),
        ("rllib_vector", "ray", "rllib"),
        ("cleanrl_ppo", "torch", "clients"),
        ("openrl_spread", "torch", "clients,multi-agent"),
    ],
)
def test_example_without_its_library_names_the_install_command(program: str, library: str, extra: str) -> None:
    check_missing_library(program, library, extra)


PROGRAMS = [
    "sb3_ppo", "tianshou_ppo", "torchrl_collect", "torchrl_gradient", "rllib_vector", "cleanrl_ppo", "openrl_spread",
]  # fmt: skip


@pytest.mark.parametrize("program", PROGRAMS)
def test_example_help_shows_the_command_and_defaults(program: str) -> None:
    if program == "rllib_vector":
        pytest.importorskip("ray.rllib.algorithms.ppo", reason="needs RLlib: docs/clients.md", exc_type=ImportError)
    check_help(program, "--num-envs", "default: ")
