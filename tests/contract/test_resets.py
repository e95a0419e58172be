"""Resets with seeds, masks and options; ``save``, ``load``, ``freeze`` and ``thaw``."""

from __future__ import annotations

import pickle
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from gymnasium.error import AlreadyPendingCallError, NoAsyncCallError

from vecenv.errors import SnapshotMismatch
from vecenv.front.arguments import RESET_MASK_NAME
from vecenv.testing import assert_identical

from .backends import ROWS, Backend
from .calls import call, copy_rows, count_in_flight, differs, to_numpy

# --- ``reset`` and ``reset_async``: seeds, masks, options, and resets of some rows --------------

MASK = np.array([True, False, True, False])
MASKED_ROWS, OTHER_ROWS = np.flatnonzero(MASK), np.flatnonzero(~MASK)


@call("`reset(seed=)`: None, an int, consecutive ints")
def test_equal_seeds_give_equal_observations(envs: Any) -> None:
    first = to_numpy(envs.reset(seed=7))
    assert differs(envs.reset(), first)
    for seed in (np.int64(7), [7, 8, 9, 10]):
        assert_identical(to_numpy(envs.reset(seed=seed)), first)
    assert differs(envs.reset(seed=1000), first)


@call("`reset(seed=[...])`: one or None for each row")
def test_each_row_has_its_own_seed(envs: Any, unless_refused: Any) -> None:
    first = envs.reset(seed=7)
    with unless_refused(envs, "row_seeds"):
        second = envs.reset(seed=[7, 500, None, 10])
        assert_identical(copy_rows(second, [0, 3]), copy_rows(first, [0, 3]))
        assert differs(copy_rows(second, [1]), copy_rows(first, [1]))


@call("`reset(seed=)`: invalid seeds")
def test_invalid_seeds_are_refused_before_anything_is_sent(envs: Any) -> None:
    for wrong, error in (
        ([1], ValueError), ([], ValueError), (range(5), ValueError), ("1234", TypeError), (1.5, TypeError),
        (object(), TypeError),
    ):  # fmt: skip
        for begin in (envs.reset, envs.reset_async):
            with pytest.raises(error, match="seed"):
                begin(seed=wrong)
    assert count_in_flight(envs) == 0
    with pytest.raises(NoAsyncCallError):
        envs.reset_wait()


@call('`options["reset_mask"]`')
def test_reset_mask_resets_only_its_rows_and_is_not_changed(backend: Backend, envs: Any, unless_refused: Any) -> None:
    before = copy_rows(envs.step(backend.actions(ROWS))[0], range(ROWS))
    mask = MASK.copy()
    options = {"reset_mask": mask}
    with unless_refused(envs, "reset_mask"):
        after = envs.reset(options=options)[0]
        assert_identical(copy_rows(after, OTHER_ROWS), copy_rows(before, OTHER_ROWS))
        assert differs(copy_rows(after, MASKED_ROWS), copy_rows(before, MASKED_ROWS))
        envs.reset_async(options=options)
        with pytest.raises((NoAsyncCallError, NotImplementedError)):
            envs.recv(count=ROWS)
        envs.reset_wait()  # the refused call has changed nothing
    assert list(options) == ["reset_mask"]
    assert options["reset_mask"] is mask
    assert mask.tolist() == MASK.tolist()
    envs.step(backend.actions(ROWS))


@call('`options["reset_mask"]` and `seed`')
def test_masked_reset_with_a_seed_seeds_only_the_masked_rows(envs: Any, unless_refused: Any) -> None:
    before = to_numpy(envs.reset()[0])
    with unless_refused(envs, "masked_seeds"):
        after = to_numpy(envs.reset(seed=7, options={"reset_mask": MASK.copy()})[0])
        expected = envs.reset(seed=7)[0]
        assert_identical(copy_rows(after, MASKED_ROWS), copy_rows(expected, MASKED_ROWS))
        assert_identical(copy_rows(after, OTHER_ROWS), copy_rows(before, OTHER_ROWS))
    assert count_in_flight(envs) == 0


@call('`options["reset_mask"]`: invalid masks')
def test_invalid_masks_are_refused_before_anything_is_sent(backend: Backend, envs: Any) -> None:
    for wrong, error in (
        ([True] * ROWS, TypeError), (None, TypeError), (np.ones(ROWS, np.int8), TypeError),
        (np.ones(ROWS + 1, np.bool_), ValueError), (np.ones((ROWS, 1), np.bool_), ValueError),
        (np.zeros(ROWS, np.bool_), ValueError),
    ):  # fmt: skip
        options = {"reset_mask": wrong}
        with pytest.raises(error, match=re.escape(f"{RESET_MASK_NAME} must")):
            envs.reset(options=options)
        assert list(options) == ["reset_mask"]
    assert count_in_flight(envs) == 0
    envs.step(backend.actions(ROWS))


@call("`options`: other keys")
def test_other_options_reach_the_environments_or_the_error_names_them(
    backend: Backend, envs: Any, record_property: Callable[[str, object], None]
) -> None:
    options = {"low": 0.02, "high": 0.03}
    if envs.capabilities.reset_options:
        assert backend.options_applied(np.asarray(envs.reset(options=options)[0]))
    else:
        for wrong in (options, {**options, "reset_mask": np.ones(ROWS, np.bool_)}):
            with pytest.raises(ValueError, match=r"reset options.*'low'"):
                envs.reset(options=wrong)
        assert count_in_flight(envs) == 0
        record_property("refused", True)
    assert options == {"low": 0.02, "high": 0.03}
    envs.reset(options={})
    envs.step(backend.actions(ROWS))


@call("`options=[...]`: one or None for each row")
def test_each_row_has_its_own_options(backend: Backend, envs: Any, unless_refused: Any) -> None:
    options = [{"low": 0.02, "high": 0.03}, None, {"low": 0.02, "high": 0.03}, {}]
    with unless_refused(envs, "row_options"):
        after = np.asarray(envs.reset(seed=7, options=options)[0])
        assert backend.options_applied(after[MASKED_ROWS])
        assert not backend.options_applied(after[OTHER_ROWS])
        for wrong, error in ((options[:3], ValueError), ([*options[:3], 1], TypeError), ("abcd", TypeError)):
            with pytest.raises(error, match=r"options"):
                envs.reset(options=wrong)
        with pytest.raises(ValueError, match=r"options\[1\] has 'reset_mask'"):
            envs.reset(options=[None, {"reset_mask": MASK}, None, None])
    with unless_refused(envs, "row_options"):  # one for each row of `env_id`
        envs.reset_async(env_id=[3, 1], options=options[:2])
        observations, *_, infos = envs.recv(count=2)
        assert backend.options_applied(copy_rows(observations, np.flatnonzero(infos["env_id"] == 3)))
        assert not backend.options_applied(copy_rows(observations, np.flatnonzero(infos["env_id"] == 1)))
    assert options == [{"low": 0.02, "high": 0.03}, None, {"low": 0.02, "high": 0.03}, {}]
    assert count_in_flight(envs) == 0
    envs.step(backend.actions(ROWS))


@call("`set_next_options`")
def test_next_options_are_accepted_and_invalid_ones_refused(backend: Backend, envs: Any, unless_refused: Any) -> None:
    options = [{"low": 0.02, "high": 0.03}, {}]
    with unless_refused(envs, "attributes"):
        assert envs.set_next_options(options, env_id=[2, 0], seed=[4, None]) is None
        envs.set_next_options({"low": 0.02, "high": 0.03}, seed=7)
        for wrong, error in ((options, ValueError), (3, TypeError), ({"reset_mask": MASK}, ValueError)):
            with pytest.raises(error, match="options"):
                envs.set_next_options(wrong)
        for wrong, error in (([1], ValueError), ("1", TypeError)):
            with pytest.raises(error, match="seed"):
                envs.set_next_options(seed=wrong)
        with pytest.raises(ValueError, match="env_id"):
            envs.set_next_options(env_id=[ROWS])
        envs.step_async(backend.actions(ROWS))
        with pytest.raises(AlreadyPendingCallError, match="set_next_options"):
            envs.set_next_options()
        envs.step_wait()
        envs.set_next_options()
    assert options == [{"low": 0.02, "high": 0.03}, {}]
    assert count_in_flight(envs) == 0
    envs.step(backend.actions(ROWS))


@call("`reset_async`, `reset_wait`")
def test_reset_async_and_reset_wait_equal_reset(backend: Backend, envs: Any) -> None:
    with pytest.raises(NoAsyncCallError, match="`reset_wait` without any prior call to `reset_async`"):
        envs.reset_wait()
    first = to_numpy(envs.reset(seed=7)[0])
    envs.reset_async(seed=7)
    for make_call in (envs.reset, envs.reset_async, lambda: envs.step(backend.actions(ROWS))):
        with pytest.raises(AlreadyPendingCallError, match="Calling `"):
            make_call()
    with pytest.raises(NoAsyncCallError):
        envs.step_wait()
    assert_identical(to_numpy(envs.reset_wait()[0]), first)


@call("`reset_async(env_id=)`, `recv`")
def test_recv_returns_the_rows_of_reset_async(backend: Backend, envs: Any, unless_refused: Any) -> None:
    envs.step(backend.actions(ROWS))
    with unless_refused(envs, "first_ready"):
        envs.reset_async(env_id=[3, 1])
        with pytest.raises(AlreadyPendingCallError):
            envs.reset_async(env_id=[1])
        with pytest.raises(NoAsyncCallError):
            envs.reset_wait()
        with pytest.raises(NoAsyncCallError, match="`recv` for 3 environments"):
            envs.recv(count=3)
        observations, rewards, terminations, truncations, infos = envs.recv(count=2)
        assert sorted(infos["env_id"].tolist()) == [1, 3]
        assert len(copy_rows(rewards, [0, 1])) == len(rewards) == 2
        assert not any(np.asarray(part).any() for part in (rewards, terminations, truncations))
        assert differs(copy_rows(observations, [0]), copy_rows(observations, [1]))
    assert count_in_flight(envs) == 0
    envs.step(backend.actions(ROWS))


@call("`reset_async(env_id=, seed=)`")
def test_reset_async_with_seeds_seeds_the_rows_of_env_id(envs: Any, unless_refused: Any) -> None:
    with unless_refused(envs, "masked_seeds" if envs.capabilities.first_ready else "first_ready"):
        results = []
        for seed in (7, [10, 8]):
            envs.reset_async(seed=seed, env_id=[3, 1])
            results.append(envs.recv(count=2))
        expected = envs.reset(seed=7)[0]
        for observations, *_, infos in results:
            assert_identical(copy_rows(observations, [0, 1]), copy_rows(expected, infos["env_id"]))
        with pytest.raises(ValueError, match="length"):
            envs.reset_async(seed=[1, 2, 3], env_id=[3, 1])
    assert count_in_flight(envs) == 0


@call("`reset_async(env_id=)`: invalid rows")
def test_reset_async_with_an_invalid_env_id_or_with_both_env_id_and_mask_is_refused(envs: Any) -> None:
    for wrong in ([ROWS], [-1], [1, 1], [], [0.0], ["a"], 1):
        with pytest.raises(ValueError, match="env_id"):
            envs.reset_async(env_id=wrong)
    with pytest.raises(ValueError, match="pass one"):
        envs.reset_async(env_id=range(ROWS), options={"reset_mask": MASK.copy()})
    assert count_in_flight(envs) == 0


# --- saving and loading -------------------------------------------------------------------------


def run_steps(envs: Any, backend: Backend, steps: int = 12) -> list[Any]:
    return [[to_numpy(part) for part in envs.step(backend.actions(ROWS))[:4]] for _ in range(steps)]


@call("`save`, `load`: all rows")
def test_loaded_rows_continue_like_the_saved_ones(backend: Backend, envs: Any, unless_refused: Any) -> None:
    with unless_refused(envs, "snapshots"):
        envs.reset(seed=3)
        run_steps(envs, backend, 3)
        snapshots = envs.save()
        assert len(snapshots) == ROWS
        expected = run_steps(envs, backend)
        envs.load(pickle.loads(pickle.dumps(snapshots)))
        assert_identical(run_steps(envs, backend), expected)


@call("`save(env_id=)`, `load(env_id=)`: one row into others")
def test_one_row_is_loaded_into_others(backend: Backend, envs: Any, unless_refused: Any) -> None:
    with unless_refused(envs, "snapshots"):
        envs.reset(seed=3)
        [snapshot] = envs.save([0])
        loaded = envs.load(snapshot, [1, 3])
        assert_identical(copy_rows(loaded, [0]), copy_rows(loaded, [1]))


@call("`freeze`, `thaw`: one row into others")
def test_frozen_row_continues_in_others(backend: Backend, envs: Any, unless_refused: Any) -> None:
    with unless_refused(envs, "freezing"):
        envs.reset(seed=3)
        [frozen] = envs.freeze([0])
        thawed = envs.thaw(frozen, [1, 3])[0]
        assert_identical(copy_rows(thawed, [0]), copy_rows(thawed, [1]))
        envs.step(backend.actions(ROWS))


@call("`state_dict`, `load_state_dict`")
def test_loaded_state_dict_continues_like_the_saved_engine(backend: Backend, envs: Any, unless_refused: Any) -> None:
    with unless_refused(envs, "snapshots"):
        envs.reset(seed=3)
        state = pickle.loads(pickle.dumps(envs.state_dict()))
        expected = run_steps(envs, backend)
        envs.load_state_dict(state)
        assert_identical(run_steps(envs, backend), expected)
        some = envs.state_dict([0, 1])
        with pytest.raises(SnapshotMismatch):
            envs.load_state_dict(some)
        expected = copy_rows(envs.load(some["snapshots"], [3, 2]), [0, 1])
        assert_identical(copy_rows(envs.load_state_dict(some, [3, 2]), [0, 1]), expected)


@call("`load`: snapshots that do not fit")
def test_snapshots_that_do_not_fit_are_refused(backend: Backend, envs: Any, unless_refused: Any) -> None:
    with unless_refused(envs, "snapshots"):
        envs.reset(seed=3)
        snapshots = envs.save()
        for wrong in (snapshots[:2], [*snapshots[:3], 7], [*snapshots[:3], b"xy"]):
            with pytest.raises(SnapshotMismatch):
                envs.load(wrong)
        with pytest.raises(ValueError, match="env_id"):
            envs.save([ROWS])
        envs.step(backend.actions(ROWS))


@call("`save`, `load`: while a step is pending")
def test_save_and_load_are_refused_while_a_step_is_pending(
    backend: Backend, build: Callable[..., Any], unless_refused: Any
) -> None:
    envs = build()
    with unless_refused(envs, "snapshots"):
        envs.reset(seed=3)
        snapshots = envs.save()
        envs.step_async(backend.actions(ROWS))
        for make_call in (envs.save, envs.state_dict, lambda: envs.load(snapshots)):
            with pytest.raises(AlreadyPendingCallError):
                make_call()
        assert np.asarray(envs.step_wait()[2]).shape[0] == ROWS
