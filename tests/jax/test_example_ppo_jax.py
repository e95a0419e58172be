"""``examples/ppo_jax.py`` runs on both backends and, in a slow test, learns."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from jax_envs import FlatCounter
from programs import EXAMPLES, import_program

for library in ("flax", "optax", "rich", "matplotlib"):
    pytest.importorskip(library, reason="needs the packages of the examples: pip install 'vecenv[examples]'")

EXAMPLE = EXAMPLES / "ppo_jax.py"


@pytest.fixture(scope="module")
def ppo(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    with import_program(EXAMPLE) as module:
        picture = tmp_path_factory.mktemp("warm") / "curve.png"
        module.Curve(1).draw(picture, "", "", 0.0, "")  # before the first test, because matplotlib keeps font files open
        yield module


SHORT_RUN = ["--steps", "512", "--num-envs", "4", "--rollout", "32", "--epochs", "1", "--episodes", "4"]
BRAX = pytest.param(["--backend", "brax"], marks=[pytest.mark.slow, pytest.mark.timeout(1200)])  # compiles for a minute
TWO_WORKERS = pytest.param(["--workers", "2"], marks=pytest.mark.slow)
OPTIONS = [TWO_WORKERS, ["--workers", "1"], BRAX]


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize("options", OPTIONS, ids=" ".join)
def test_short_run_prints_its_score_and_draws_a_plot(
    ppo: Any, options: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if "brax" in options:
        pytest.importorskip("brax", reason="needs Brax: pip install 'vecenv[brax]'")
    check_short_run(ppo, options, tmp_path, capsys)


@pytest.mark.long
@pytest.mark.timeout(600)
def test_short_run_with_a_jax_environment_draws_a_plot(
    ppo: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """``FlatCounter`` replaces Brax, because it compiles quickly."""
    monkeypatch.setattr(ppo.vj, "adapt", lambda env_id, backend: FlatCounter())
    check_short_run(ppo, ["--backend", "brax"], tmp_path, capsys)


def check_short_run(ppo: Any, options: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert ppo.main([*SHORT_RUN, *options, "--out", str(tmp_path)]) >= 1
    output = capsys.readouterr().out
    steps, picture = re.search(r"of 4 episodes after (\d+) steps and \S+ s; (\S+)\n\Z", output).groups()
    assert 0 < int(steps) <= 512
    assert Path(picture).parent == tmp_path
    assert Path(picture).read_bytes().startswith(b"\x89PNG")


def test_advantages_equal_a_plain_loop(ppo: Any) -> None:
    """The last step of an episode uses the value of its successor if truncated, or 0 if terminated, and ends the sum."""
    generator = np.random.default_rng(0)
    reward, value, next_value = generator.normal(size=(3, 6, 2))
    terminated, truncated = np.zeros((2, 6, 2), bool)
    terminated[2, 0] = truncated[3, 1] = truncated[4, 0] = True
    trajectory = SimpleNamespace(reward=reward, terminated=jnp.array(terminated), truncated=jnp.array(truncated))
    found = ppo.advantages(trajectory, value, next_value, 0.9, 0.8)
    for i in range(2):
        expected = 0.0
        for t in reversed(range(6)):
            successor = 0.0 if terminated[t, i] else next_value[t, i]
            done = terminated[t, i] or truncated[t, i]
            expected = reward[t, i] + 0.9 * successor - value[t, i] + (0.0 if done else 0.9 * 0.8 * expected)
            np.testing.assert_allclose(found[t, i], expected, rtol=1e-5)


def test_unknown_backend_exits_with_the_valid_names(ppo: Any) -> None:
    with pytest.raises(SystemExit, match=r"must be one of \['brax', 'process'\], got 'ray'"):
        ppo.main(["--backend", "ray"])


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(("options", "minimum_score"), [([], 475), (["--backend", "brax"], 950)])
def test_full_run_reaches_the_minimum_score(ppo: Any, options: list[str], minimum_score: float, tmp_path: Path) -> None:
    if "brax" in options:
        pytest.importorskip("brax", reason="needs Brax: pip install 'vecenv[brax]'")
    assert ppo.main([*options, "--out", str(tmp_path)]) >= minimum_score
