"""``python -m bench train``: every way to step gives the learner rows that are transitions of its environments."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest

from vecenv.tools import benchmark

pytest.importorskip("flax")
pytest.importorskip("optax")
from bench import train

CARTPOLE = partial(benchmark.make_env, "CartPole-v1")
WAYS: dict[str, Any] = {
    "all": partial(train.Training, partial(train._vecenv, CARTPOLE, 4, None, num_workers=2)),
    "halves": partial(train.Training, partial(train._vecenv, CARTPOLE, 4, 2, num_workers=2)),
    "gymnasium": partial(train.Training, partial(train._gymnasium, "SyncVectorEnv", CARTPOLE, 4)),
    "bridge": partial(train.Bridged, CARTPOLE, 4, 2),
}


def noted(seen: list[dict[str, np.ndarray]], learn: Any, rows: Any, last: Any) -> None:
    seen.append({name: np.asarray(field) for name, field in rows.items()})
    learn(rows, last)


@pytest.mark.long
@pytest.mark.parametrize(
    "way", [pytest.param(way, marks=[] if way == "bridge" else pytest.mark.slow) for way in WAYS]
)
def test_rows_are_transitions(way: str) -> None:
    """CartPole moves by 0.02 times the velocity it had; the row after one that has weight and does not end goes on."""
    training = WAYS[way]()
    seen: list[dict[str, np.ndarray]] = []
    learn = training.learner.learn
    try:
        before = training.learner.params
        training.learner.learn = partial(noted, seen, learn)
        counted = [training._step() for _ in range(2)]
        shares = training.run(0.01) and training.shares()
    finally:
        training.close()
    assert counted == [rows["weight"].sum() for rows in seen[:2]]
    assert sum(shares.values()) == pytest.approx(1)
    changed = training.learner.jax.tree.map(lambda a, b: bool((a != b).any()), before, training.learner.params)
    assert any(training.learner.jax.tree.leaves(changed))
    for rows in seen:
        observations, on = rows["observation"], rows["weight"] & ~rows["done"]
        assert observations.shape == (train.ROLLOUT, 4, 4)
        assert 0.5 < on.mean() < 1
        moved = observations[:-1, :, 0] + 0.02 * observations[:-1, :, 1]
        np.testing.assert_allclose(observations[1:, :, 0][on[:-1]], moved[on[:-1]], atol=1e-6)
        assert (rows["reward"][rows["weight"]] == 1).all()
        assert (rows["log_prob"] <= 0).all()
