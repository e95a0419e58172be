"""``preload``: the fork server imports modules once, for all workers."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
from envs import counters

import vecenv

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


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        ({"preload": ["numpy"], "context": "fork"}, "`preload` needs context='forkserver', got 'fork'"),
        ({"preload": "numpy", "context": "forkserver"}, "`preload` must be a list of names of modules, got 'numpy'"),
        ({"preload": [3], "context": "forkserver"}, r"`preload` must be a list of names of modules, got \[3\]"),
    ],
)
def test_bad_options(wrong: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        vecenv.AsyncVectorEnv(counters(2), **wrong)
