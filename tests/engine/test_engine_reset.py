"""Section 1.4: reset, its seeds, its options, and resets of some environments only."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
from envs import CounterEnv, Options, counters, describe, opened, started
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from gymnasium.wrappers.vector import RecordEpisodeStatistics
from sampling import each_once

from vecenv.testing import assert_identical

SEED = 3  # column of the seed in a CounterEnv's observation


def assert_gymnasium_says_the_same(error: BaseException, **given: Any) -> None:
    """The installed version refuses it in the same words, and who catches its exception catches ours."""
    oracle = SyncVectorEnv(counters(3))
    with pytest.raises((ValueError, TypeError, AssertionError)) as caught:
        oracle.reset(**given)
    oracle.close()
    assert isinstance(error, caught.type)
    assert str(error) == str(caught.value)


@pytest.mark.parametrize(
    ("seed", "wanted"),
    [
        (None, [-1, -1, -1]),
        (7, [7, 8, 9]),
        (0, [0, 1, 2]),
        (True, [1, 2, 3]),
        ([5, 3, 1], [5, 3, 1]),
        ((5, 3, 1), [5, 3, 1]),
        ([5, None, 1], [5, -1, 1]),
        ([None, None, None], [-1, -1, -1]),
        ([4, 4, 4], [4, 4, 4]),
    ],
)
def test_every_environment_gets_its_seed(engine: Options, seed: Any, wanted: list[int]) -> None:
    with opened(counters(3), **engine) as envs:
        assert envs.reset(seed=seed)[0][:, SEED].tolist() == wanted


@pytest.mark.parametrize("seed", [[], [1], [1, 2], [1, 2, 3, 4], (1,)], ids=str)
def test_a_list_of_seeds_must_have_one_for_each_environment(engine: Options, seed: Any) -> None:
    with opened(counters(3), **engine) as envs:
        text = f"If seeds are passed as a list the length must match num_envs=3 but got length={len(seed)}."
        with pytest.raises(ValueError, match=re.escape(text)) as caught:
            envs.reset(seed=seed)
        assert_gymnasium_says_the_same(caught.value, seed=seed)
        assert envs.reset(seed=1)[0][:, SEED].tolist() == [1, 2, 3]


@pytest.mark.parametrize(
    "seed", ["abc", 1.5, {"a": 1, "b": 2, "c": 3}.keys(), object()], ids=lambda seed: type(seed).__name__
)
def test_a_seed_of_another_type_never_gives_a_wrong_answer(engine: Options, seed: Any) -> None:
    with opened(counters(3), **engine) as envs:
        with pytest.raises(Exception):  # noqa: B017 - Gymnasium's depends on where it is noticed
            envs.reset(seed=seed)
        assert envs.reset(seed=1)[0][:, SEED].tolist() == [1, 2, 3]


def test_an_environment_sees_exactly_seed_and_options(engine: Options) -> None:
    with opened(counters(2), **engine) as envs:
        _, infos = envs.reset()
        assert infos["reset_kwargs"].tolist() == [describe({"seed": None, "options": None})] * 2
        _, infos = envs.reset(seed=3, options={"level": 2})
        assert infos["reset_kwargs"].tolist() == [
            describe({"seed": 3, "options": {"level": 2}}),
            describe({"seed": 4, "options": {"level": 2}}),
        ]
        _, infos = envs.reset(options={})
        assert infos["reset_kwargs"].tolist() == [describe({"seed": None, "options": {}})] * 2


def test_an_environment_sees_exactly_its_own_options(engine: Options) -> None:
    with opened(counters(3), **engine) as envs:
        options = [{"level": 1}, None, {}]
        _, infos = envs.reset(seed=3, options=options)
        assert infos["reset_kwargs"].tolist() == [
            describe({"seed": 3 + row, "options": own}) for row, own in enumerate(options)
        ]
        envs.reset_async(env_id=[2, 0], seed=[7, None], options=({"level": 5}, {"level": 6}))
        _, _, _, _, infos = envs.recv(count=2)
        seen = dict(zip(infos["env_id"].tolist(), infos["reset_kwargs"].tolist(), strict=True))
        assert seen[2] == describe({"seed": 7, "options": {"level": 5}})
        assert seen[0] == describe({"seed": None, "options": {"level": 6}})
        with pytest.raises(ValueError, match=re.escape("options has 3 dicts, wanted 2: one for each environment")):
            envs.reset_async(env_id=[2, 0], options=options)


def test_a_mask_may_be_written_to_while_its_reset_is_pending(engine: Options) -> None:
    with started(counters(2), **engine) as envs:
        mask = np.array([True, False])
        envs.reset_async(options={"reset_mask": mask})
        mask[:] = [False, True]
        assert envs.reset_wait()[1]["_reset_kwargs"].tolist() == [True, False]


def test_a_first_reset_of_some_gives_zeros_for_the_others_in_shared_memory(engine: Options) -> None:
    with opened(counters(2), **engine) as envs:
        observations, _ = envs.reset(seed=1, options={"reset_mask": np.array([False, True])})
        assert observations.tolist() == [[0, 0, 0, 0], [1, 0, 1, 2]]


WRONG_MASKS = [
    ([True, False, True], TypeError, "must be a numpy array, got <class 'list'>"),
    (None, TypeError, "must be a numpy array, got <class 'NoneType'>"),
    (np.ones(4, dtype=np.bool_), ValueError, "must have shape `(3,)`, got (4,)"),
    (np.ones((3, 1), dtype=np.bool_), ValueError, "must have shape `(3,)`, got (3, 1)"),
    (np.ones((), dtype=np.bool_), ValueError, "must have shape `(3,)`, got ()"),
    (np.array([1, 0, 1]), TypeError, "must have `dtype=np.bool_`, got int64"),
    (np.array([1.0, 0.0, 1.0]), TypeError, "must have `dtype=np.bool_`, got float64"),
    (np.zeros(3, dtype=np.bool_), ValueError, "must contain a boolean array"),
]


@pytest.mark.parametrize(
    ("mode", "wrong"), each_once(AutoresetMode, {text: (mask, error, text) for mask, error, text in WRONG_MASKS})
)
def test_a_wrong_mask_is_refused_before_anything_is_sent(
    engine: Options, mode: AutoresetMode, wrong: tuple[Any, type[Exception], str]
) -> None:
    mask, error, text = wrong
    with started(counters(3), autoreset_mode=mode, **engine) as envs:
        with pytest.raises(error, match=re.escape(text)) as caught:
            envs.reset(options={"reset_mask": mask})
        assert_gymnasium_says_the_same(caught.value, options={"reset_mask": mask})
        observations, *_ = envs.step([0, 0, 0])
        assert observations[:, 1:3].tolist() == [[1, 1]] * 3


@pytest.mark.parametrize("copied", [True, False], ids=["copy", "no-copy"])
@pytest.mark.parametrize("mode", AutoresetMode)
def test_a_long_series_of_resets_of_some_equals_sync_vector_env(
    engine: Options, shared_memory: bool, mode: AutoresetMode, copied: bool
) -> None:
    """In the middle of episodes, at their ends and where an autoreset is due; all that comes back, and what it was given."""
    rng = np.random.default_rng(0)
    fns = [lambda i=i: CounterEnv(i, lengths=(1 + i, 2, 4)) for i in range(4)]
    oracle = SyncVectorEnv(fns, autoreset_mode=mode)
    with opened(fns, autoreset_mode=mode, shared_memory=shared_memory, copy=copied, **engine) as envs:
        assert_identical(envs.reset(seed=1), oracle.reset(seed=1))
        ended = np.zeros(4, dtype=np.bool_)
        for t in range(25):
            mask = rng.random(4) < 0.4
            if mode is AutoresetMode.DISABLED:
                mask |= ended
            if t % 8 == 7:
                assert_identical(envs.reset(), oracle.reset(), f"reset before step {t}")
            elif mask.any():
                mask.flags.writeable = False
                more = {"level": t} if t % 2 else {}
                both = [one.reset(seed=t, options={"reset_mask": mask, **more}) for one in (envs, oracle)]
                assert_identical(*both, f"reset of some before step {t}")
            actions = rng.integers(5, size=4)
            mine, theirs = envs.step(actions), oracle.step(actions)
            assert_identical(mine, theirs, f"step {t}")
            ended = theirs[2] | theirs[3]
    oracle.close()


@pytest.mark.parametrize("mode", list(AutoresetMode))
def test_episode_statistics_of_unmasked_envs_survive_a_masked_reset(mode: AutoresetMode) -> None:
    """The caller's dict keeps its mask: Gymnasium's wrapper looks for it after the reset."""
    with started(counters(2, lengths=(9,)), num_workers=2, autoreset_mode=mode) as inner:
        envs = RecordEpisodeStatistics(inner)
        envs.reset(seed=1)
        envs.step(np.zeros(2, np.int64))
        envs.reset(options={"reset_mask": np.array([True, False])})
        assert envs.episode_lengths.tolist() == [0, 1]
