"""``examples/ppo_jax.py`` runs briefly on both backends, and learns (slow)."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from jax_envs import Flat
from programs import EXAMPLES, imported

for library in ("flax", "optax", "rich", "matplotlib"):
    pytest.importorskip(library, reason="needs what examples need: pip install 'vecenv[examples]'")

EXAMPLE = EXAMPLES / "ppo_jax.py"


@pytest.fixture(scope="module")
def ppo(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    with imported(EXAMPLE) as module:
        picture = tmp_path_factory.mktemp("warm") / "curve.png"
        module.Curve(1).draw(picture, "", "", 0.0, "")  # matplotlib keeps the files of its fonts open
        yield module


BRIEF = ["--steps", "512", "--num-envs", "4", "--rollout", "32", "--epochs", "1", "--episodes", "4"]
PHYSICS = pytest.param(["--backend", "brax"], marks=[pytest.mark.slow, pytest.mark.timeout(1200)])  # a minute of compiling
PLAIN = pytest.param(["--workers", "2"], marks=pytest.mark.slow)
OPTIONS = [PLAIN, ["--workers", "1"], PHYSICS]


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize("options", OPTIONS, ids=" ".join)
def test_brief_run_learns_and_draws_a_plot(
    ppo: Any, options: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if "brax" in options:
        pytest.importorskip("brax", reason="needs Brax: pip install 'vecenv[brax]'")
    brief_run(ppo, options, tmp_path, capsys)


@pytest.mark.long
@pytest.mark.timeout(600)
def test_brief_run_on_the_device(
    ppo: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The environment of this run is quick to compile."""
    monkeypatch.setattr(ppo.vj, "adapt", lambda env_id, backend: Flat())
    brief_run(ppo, ["--backend", "brax"], tmp_path, capsys)


def brief_run(ppo: Any, options: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert ppo.main([*BRIEF, *options, "--out", str(tmp_path)]) >= 1
    output = capsys.readouterr().out
    steps, picture = re.search(r"of 4 episodes after (\d+) steps and \S+ s; (\S+)\n\Z", output).groups()
    assert 0 < int(steps) <= 512
    assert Path(picture).parent == tmp_path
    assert Path(picture).read_bytes().startswith(b"\x89PNG")


def test_advantages_equal_a_loop(ppo: Any) -> None:
    """At a truncation the true successor counts; at a termination nothing does; no value crosses either."""
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


def test_an_unknown_backend_is_refused(ppo: Any) -> None:
    with pytest.raises(SystemExit, match=r"must be one of \['brax', 'process'\], got 'ray'"):
        ppo.main(["--backend", "ray"])


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(("options", "enough"), [([], 475), (["--backend", "brax"], 950)])
def test_it_learns(ppo: Any, options: list[str], enough: float, tmp_path: Path) -> None:
    if "brax" in options:
        pytest.importorskip("brax", reason="needs Brax: pip install 'vecenv[brax]'")
    assert ppo.main([*options, "--out", str(tmp_path)]) >= enough
