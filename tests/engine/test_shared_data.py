"""``vecenv.share``: one copy of read-only data for all workers, whatever starts them."""

from __future__ import annotations

import contextlib
import functools
import gc
import os
import pickle
import signal
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import psutil
import pytest
from gymnasium.vector import SyncVectorEnv

import vecenv

START_METHODS = ["fork", "forkserver", "spawn"]
MIB = 2**20


class Market(gym.Env):
    """Observes four prices after the other; action 1 writes into them, 2 ends the process."""

    observation_space = gym.spaces.Box(-np.inf, np.inf, (4,), np.float64)
    action_space = gym.spaces.Discrete(3)

    def __init__(self, prices: Any) -> None:
        self.prices = prices["close"] if isinstance(prices, dict) else prices
        self.at = 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        super().reset(seed=seed)
        self.at = int(self.np_random.integers(100))
        return self.prices[self.at : self.at + 4].copy(), {}

    def step(self, action: int) -> Any:
        if action == 1:
            self.prices[0] = 0.0
        if action == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        self.at += 1
        return self.prices[self.at : self.at + 4].copy(), float(self.prices[self.at]), self.at % 50 == 0, False, {}

    def own_memory(self) -> float:
        """MiB that only this process has."""
        return psutil.Process().memory_full_info().uss / MIB


def makers(prices: Any, count: int = 4) -> list[Any]:
    return [functools.partial(Market, prices)] * count


@pytest.fixture(scope="module")
def prices() -> np.ndarray:
    return np.random.default_rng(0).normal(size=64 * MIB // 8)


@pytest.mark.parametrize("context", START_METHODS)
def test_workers_have_no_copy_and_step_the_same(context: str, prices: np.ndarray) -> None:
    shared = vecenv.share({"close": prices, "volume": np.arange(3)})
    assert shared["close"].flags.writeable is False
    oracle = SyncVectorEnv(makers(prices))
    envs = vecenv.AsyncVectorEnv(makers(shared), num_workers=2, context=context)
    with contextlib.closing(vecenv.AsyncVectorEnv(makers(prices[:1000].copy()), num_workers=2, context=context)) as without:
        least = min(without.call("own_memory"))
    try:
        np.testing.assert_array_equal(envs.reset(seed=1)[0], oracle.reset(seed=1)[0])
        for _ in range(60):
            for got, wanted in zip(envs.step(np.zeros(4, np.int64))[:4], oracle.step([0] * 4)[:4], strict=True):
                np.testing.assert_array_equal(got, wanted)
        assert max(envs.call("own_memory")) < least + 8  # of 64
    finally:
        envs.close()


@pytest.mark.parametrize("context", START_METHODS)
def test_an_environment_cannot_write_and_its_worker_restarts_with_the_data(context: str, prices: np.ndarray) -> None:
    shared = vecenv.share(prices[:10_000])
    with contextlib.closing(vecenv.AsyncVectorEnv(makers(shared, 2), context=context, on_failure="restart")) as envs:
        envs.reset(seed=1)
        for action in (1, 2):
            *_, truncated, infos = envs.step(np.array([0, action]))
            assert infos["restarted"].tolist() == truncated.tolist() == [False, True]
            envs.step(np.zeros(2, np.int64))
        assert "read-only" in str(envs.errors[0].error)
        assert envs.errors[0].env == 1
    np.testing.assert_array_equal(shared, prices[:10_000])


def test_spare_workers_and_a_probe_have_it(prices: np.ndarray) -> None:
    shared = vecenv.share(prices[:10_000])
    for options in ({"spare_workers": 1}, {"num_workers": "auto"}):
        with contextlib.closing(vecenv.AsyncVectorEnv(makers(shared, 2), context="spawn", **options)) as envs:
            envs.reset(seed=1)
            for _ in range(60):
                envs.step(np.zeros(2, np.int64))


def test_every_shape_and_kind_of_view_arrives(prices: np.ndarray) -> None:
    data = {
        "rows": np.arange(24.0).reshape(4, 6), "columns": np.asfortranarray(np.arange(24).reshape(4, 6)),
        "none": np.zeros((3, 0)), "one": np.array(5), "days": np.array(["2026-01-01", "NaT"], "M8[D]"),
        "records": np.array([(1, 2.5)], [("a", "i4"), ("b", "f8")]), "letters": np.array([b"ab", b"c"]),
        "steps": np.arange(20)[::3],
    }  # fmt: skip
    shared = vecenv.share(data)
    views = [shared["rows"][1:, ::-2], shared["columns"].T[2:], shared["rows"][:, 3], shared["steps"][::-1]]
    views = [*shared.values(), *views]
    plain = [np.array(view) for view in views]

    def make(views: list[Any] = views) -> Any:
        return Views(views)

    with contextlib.closing(vecenv.AsyncVectorEnv([make] * 2, num_workers=1, context="spawn")) as envs:
        for came in envs.get_attr("copies"):
            for got, wanted in zip(came, plain, strict=True):
                assert got.dtype == wanted.dtype
                np.testing.assert_array_equal(got, wanted)
        assert envs.get_attr("shared") == (True, True)
    for array in views:  # by other ways it is copied
        np.testing.assert_array_equal(pickle.loads(pickle.dumps(array)), array)


class Views(Market):
    """Has views of shared arrays."""

    def __init__(self, views: list[Any]) -> None:
        super().__init__(np.zeros(200))
        self.views = views

    @property
    def copies(self) -> list[Any]:
        return [np.array(view) for view in self.views]

    @property
    def shared(self) -> bool:
        return all(not view.flags.writeable for view in self.views)


def test_it_is_freed_with_its_last_array(prices: np.ndarray) -> None:
    def blocks() -> int:
        with open("/proc/self/maps") as maps:
            mapped = sum("memfd:vecenv" in line for line in maps)
        return mapped + sum("memfd:vecenv" in os.readlink(path) for path in Path("/proc/self/fd").iterdir() if path.exists())

    gc.collect()
    before = blocks()
    shared = vecenv.share(prices[:1000])
    part = shared[3:5]
    del shared
    assert blocks() == before + 3  # a mapping, the descriptor, and the one that mmap holds
    with contextlib.closing(vecenv.AsyncVectorEnv(makers(part.repeat(100), 1), context="spawn")):
        pass
    np.testing.assert_array_equal(part, prices[3:5])
    del part
    gc.collect()
    assert blocks() == before


def test_what_cannot_be_shared_is_named() -> None:
    with pytest.raises(TypeError, match=r"share\(\): 'x' got list, wanted a NumPy array or a dict of arrays"):
        vecenv.share({"x": [1, 2]})
    with pytest.raises(TypeError, match=r"share\(\) got int, wanted a NumPy array"):
        vecenv.share(3)  # type: ignore[type-var]
    with pytest.raises(TypeError, match=r"share\(\) got an array of dtype object"):
        vecenv.share(np.array([object()]))
    assert vecenv.share({}) == {}
    shared = vecenv.share(np.zeros(3))
    with pytest.raises(ValueError, match="read-only"):
        shared[0] = 1
    with pytest.raises(ValueError, match="WRITEABLE"):
        shared.flags.writeable = True
    too_much = np.lib.stride_tricks.as_strided(np.zeros(1), (2**45,), (0,))
    with pytest.raises(vecenv.errors.ArenaError, match=r"share\(\) needs .* bytes of shared memory"):
        vecenv.share(too_much)
