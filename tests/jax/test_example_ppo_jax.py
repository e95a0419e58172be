"""``examples/ppo_jax.py`` runs, briefly on both backends; and learns, behind the slow mark."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

for library in ("flax", "optax", "rich", "matplotlib"):
    pytest.importorskip(library, reason="needs what examples need: pip install 'vecenv[examples]'")

EXAMPLE = Path(__file__).parents[2] / "examples" / "ppo_jax.py"


@pytest.fixture(scope="module")
def ppo(tmp_path_factory: pytest.TempPathFactory) -> Any:
    spec = importlib.util.spec_from_file_location("ppo_jax", EXAMPLE)
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules["ppo_jax"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    picture = tmp_path_factory.mktemp("warm") / "curve.png"  # matplotlib keeps the fonts open that it draws with
    module.plot(module.parse(["--plot", str(picture)]), module.Result(0.0, [(0, 0.0)], 0.0))
    return module


BRIEF = ["--steps", "512", "--num-envs", "4", "--length", "32", "--epochs", "1", "--episodes", "4"]
OPTIONS = [["--workers", "2"], ["--workers", "1", "--overlap"], ["--backend", "brax"]]


@pytest.mark.parametrize("options", OPTIONS, ids=" ".join)
def test_a_brief_run_learns_something_and_draws_it(ppo: Any, options: list[str], tmp_path: Path) -> None:
    if "brax" in options:
        pytest.importorskip("brax", reason="needs Brax: pip install 'vecenv[brax]'")
    picture = tmp_path / "curve.png"
    result = ppo.learn(ppo.parse([*BRIEF, *options, "--plot", str(picture)]))
    assert result.mean_return >= 1
    assert result.curve[-1][0] <= 512
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_advantages_are_those_of_a_loop(ppo: Any) -> None:
    """Where an episode is cut its true successor counts; where it ends nothing does; and nothing crosses either."""
    generator = np.random.default_rng(0)
    reward, value, following = generator.normal(size=(3, 6, 2))
    terminated, truncated = np.zeros((2, 6, 2), bool)
    terminated[2, 0] = truncated[3, 1] = truncated[4, 0] = True
    trajectory = type("T", (), {"reward": reward, "terminated": jnp.array(terminated), "truncated": jnp.array(truncated)})
    found = ppo.advantages(trajectory, value, following, 0.9, 0.8)
    for i in range(2):
        later = 0.0
        for t in reversed(range(6)):
            successor = 0.0 if terminated[t, i] else following[t, i]
            over = terminated[t, i] or truncated[t, i]
            later = reward[t, i] + 0.9 * successor - value[t, i] + (0.0 if over else 0.72 * later)
            np.testing.assert_allclose(found[t, i], later, rtol=1e-5)


def test_an_unknown_backend_is_refused(ppo: Any, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        ppo.parse(["--backend", "ray"])
    assert "must be one of ['brax', 'process'], got 'ray'" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(("options", "enough"), [([], 475), (["--overlap"], 475), (["--backend", "brax"], 950)])
def test_it_learns(ppo: Any, options: list[str], enough: float, tmp_path: Path) -> None:
    if "brax" in options:
        pytest.importorskip("brax", reason="needs Brax: pip install 'vecenv[brax]'")
    assert ppo.learn(ppo.parse([*options, "--plot", str(tmp_path / "curve.png")])).mean_return >= enough
