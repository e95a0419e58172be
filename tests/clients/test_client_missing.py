"""Where a client's library is not installed, its adapter says what installs it, and everything else works."""

from __future__ import annotations

import subprocess
import sys

import pytest


@pytest.mark.parametrize(
    ("adapter", "library", "extra"), [("as_sb3", "stable_baselines3", "sb3"), ("as_tianshou", "tianshou", "clients")]
)
def test_an_adapter_without_its_library_says_what_to_install(adapter: str, library: str, extra: str) -> None:
    program = f"""
import sys

class Hidden:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == {library!r}:
            raise ModuleNotFoundError("No module named {library!r}", name={library!r})

sys.meta_path.insert(0, Hidden())
import vecenv
assert {adapter!r} in dir(vecenv.adapters)
assert "torch" not in sys.modules
vecenv.adapters.{adapter}
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=100, check=False)
    last = done.stderr.strip().splitlines()[-1]
    wanted = f"vecenv.adapters.{adapter} needs {library}, not installed here: pip install 'vecenv[{extra}]'"
    assert last == f"ImportError: {wanted}"


def test_an_adapter_that_does_not_exist_is_an_attribute_error() -> None:
    import vecenv

    with pytest.raises(AttributeError, match="no attribute 'as_sb4'"):
        _ = vecenv.adapters.as_sb4
