"""``vecenv.evaluate`` over EnvPool: in waves, since it seeds all environments at once."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

pytest.importorskip("envpool", reason="needs EnvPool, which is not installed")

import vecenv


def balance(observations: Any) -> Any:
    return (observations[:, 2] > 0).astype(np.int32)


@pytest.mark.parametrize("batch_size", [None, 2])
def test_results_are_the_same_for_every_number_of_environments(batch_size: int | None) -> None:
    found = []
    for num_envs in (2, 6):
        settings = {"batch_size": batch_size, "num_threads": 1}
        envs = vecenv.make_vec("CartPole-v1", num_envs, "envpool", vector_kwargs=settings)
        results = vecenv.evaluate(envs, balance, 7, seed=50)
        found.append([(each.index, each.seed, each.episode_return, each.length, each.terminated) for each in results])
        envs.close()
    assert found[0] == found[1]
    assert [each[1] for each in found[0]] == list(range(50, 57))
    assert len({each[3] for each in found[0]}) > 3


def test_seeds_that_it_does_not_have_are_refused() -> None:
    envs = vecenv.make_vec("CartPole-v1", 2, "envpool", vector_kwargs={"num_threads": 1})
    with pytest.raises(NotImplementedError, match="cannot give an episode the seed 2147483648: EnvPool's seeds are below"):
        vecenv.evaluate(envs, balance, [vecenv.Episode(seed=2**31)])
    envs.close()
