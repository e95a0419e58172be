"""Saving and loading: where it can be done it is exact, and where not it is refused by name."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from gymnasium.error import AlreadyPendingCallError

from vecenv.errors import SnapshotMismatch
from vecenv.testing import assert_identical

from .backends import ROWS, Backend
from .calls import call, host


def went_on(envs: Any, backend: Backend, steps: int = 12) -> list[Any]:
    return [[host(part) for part in envs.step(backend.actions(ROWS))[:4]] for _ in range(steps)]


@call("`save`, `load`: all rows")
def test_rows_go_on_as_those_that_were_saved(backend: Backend, envs: Any, refusable: Any) -> None:
    with refusable(envs, "snapshots"):
        envs.reset(seed=3)
        went_on(envs, backend, 3)
        kept = envs.save()
        assert len(kept) == ROWS
        wanted = went_on(envs, backend)
        envs.load(pickle.loads(pickle.dumps(kept)))
        assert_identical(went_on(envs, backend), wanted)


@call("`save(env_id=)`, `load(env_id=)`: one into others")
def test_one_row_is_loaded_into_others(backend: Backend, envs: Any, refusable: Any) -> None:
    with refusable(envs, "snapshots"):
        envs.reset(seed=3)
        [first] = envs.save([0])
        seen = host(envs.load(first, [1, 3]))
        pairs: list[Any] = []
        _leaves(seen, pairs)
        assert pairs
        for leaf in pairs:
            assert_identical(leaf[0], leaf[1])


def _leaves(tree: Any, found: list[Any]) -> None:
    if isinstance(tree, dict):
        for value in tree.values():
            _leaves(value, found)
    else:
        found.append(tree)


@call("`freeze`, `thaw`: one into others")
def test_a_frozen_row_goes_on_in_others(backend: Backend, envs: Any, refusable: Any) -> None:
    with refusable(envs, "freezing"):
        envs.reset(seed=3)
        [frozen] = envs.freeze([0])
        seen = host(envs.thaw(frozen, [1, 3])[0])
        pairs: list[Any] = []
        _leaves(seen, pairs)
        for leaf in pairs:
            assert_identical(leaf[0], leaf[1])
        envs.step(backend.actions(ROWS))


@call("`state_dict`, `load_state_dict`")
def test_all_of_it_is_one_dict(backend: Backend, envs: Any, refusable: Any) -> None:
    with refusable(envs, "snapshots"):
        envs.reset(seed=3)
        state = pickle.loads(pickle.dumps(envs.state_dict()))
        wanted = went_on(envs, backend)
        envs.load_state_dict(state)
        assert_identical(went_on(envs, backend), wanted)


@call("`load`: what does not fit")
def test_what_does_not_fit_is_refused(backend: Backend, envs: Any, refusable: Any) -> None:
    with refusable(envs, "snapshots"):
        envs.reset(seed=3)
        kept = envs.save()
        for wrong in (kept[:2], [*kept[:3], 7], [*kept[:3], b"xy"]):
            with pytest.raises(SnapshotMismatch):
                envs.load(wrong)
        with pytest.raises(ValueError, match="env_id"):
            envs.save([ROWS])
        envs.step(backend.actions(ROWS))


@call("`save`, `load`: a step is pending")
def test_nothing_is_saved_while_a_step_is_pending(backend: Backend, build: Callable[..., Any], refusable: Any) -> None:
    envs = build()
    with refusable(envs, "snapshots"):
        envs.reset(seed=3)
        kept = envs.save()
        envs.step_async(backend.actions(ROWS))
        for method in (envs.save, envs.state_dict, lambda: envs.load(kept)):
            with pytest.raises(AlreadyPendingCallError):
                method()
        assert np.asarray(envs.step_wait()[2]).shape[0] == ROWS
