"""AsyncVectorEnv against SyncVectorEnv: the same environments, seeds and actions must give the same of
everything.

``SyncVectorEnv`` is the oracle because it is short, serial and shares nothing. Compared are observations,
rewards, flags and infos, bit for bit, after every call. Where the two are meant to differ, the drive below
steers around it: the serial one refuses to step an environment that has ended under
``AutoresetMode.DISABLED``, so such environments are reset first.
"""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
from envs import opened
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sampling import each_once, each_pair
from strategies import (
    Move,
    Vector,
    any_spaces,
    boxes,
    discretes,
    fixed_spaces,
    moves,
    seed_arguments,
    vectors,
)

from vecenv.testing import assert_identical

MIXED = (AttributeError, IndexError, ValueError)

# Every example starts processes; a slow one is the machine's affair, not the strategy's.
few = settings(
    max_examples=5,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.large_base_example],
)


def _workers(name: str, num_envs: int) -> int | None:
    return {"0": 0, "1": 1, "2": 2, "num_envs": num_envs, "None": None}[name]


def _as_list(space: Any, actions: Any) -> Any:
    """The same actions as Python lists, where a list is as good as an array."""
    return actions.tolist() if isinstance(actions, np.ndarray) else actions


def drive(envs: Any, oracle: Any, vector: Vector, first_seed: Any, plan: list[Move], action_seed: int) -> None:
    """Do the same to both, and compare all that comes back."""
    action_space = copy.deepcopy(oracle.action_space)
    action_space.seed(action_seed)
    disabled = oracle.autoreset_mode is AutoresetMode.DISABLED
    ended = np.zeros(oracle.num_envs, dtype=np.bool_)

    def reset(seed: Any, mask: np.ndarray | None = None) -> None:
        options = [None if mask is None else {"reset_mask": mask.copy()} for _ in range(2)]
        mine = envs.reset(seed=copy.copy(seed), options=options[0])
        theirs = oracle.reset(seed=copy.copy(seed), options=options[1])
        assert_identical(mine, theirs, f"reset(seed={seed}, mask={mask})")
        ended[slice(None) if mask is None else mask] = False

    reset(first_seed)
    for t, move in enumerate(plan):
        if move.kind == "reset":
            reset(move.seed, None if move.mask is None else np.array(move.mask))
            continue
        if disabled and ended.any():
            reset(None, ended.copy())
        actions = action_space.sample()
        if move.as_list:
            actions = _as_list(action_space, actions)
        mine, theirs = envs.step(copy.deepcopy(actions)), oracle.step(copy.deepcopy(actions))
        for name, one, other in zip(
            ("observations", "rewards", "terminations", "truncations", "infos"), mine, theirs, strict=True
        ):
            assert_identical(one, other, f"move {t}: {name}")
        ended[:] = theirs[2] | theirs[3]


def compare(data: st.DataObject, vector: Vector, mode: AutoresetMode, **options: Any) -> None:
    num_envs = len(vector.env_fns)
    plan = data.draw(moves(num_envs), label="plan")
    first_seed = data.draw(seed_arguments(num_envs), label="first seed")
    action_seed = data.draw(st.integers(0, 2**16), label="action seed")
    oracle = SyncVectorEnv(vector.env_fns, autoreset_mode=mode)
    try:
        with opened(vector.env_fns, autoreset_mode=mode, **options) as envs:
            assert envs.single_observation_space == oracle.single_observation_space
            assert envs.observation_space == oracle.observation_space
            assert envs.action_space == oracle.action_space
            drive(envs, oracle, vector, first_seed, plan, action_seed)
    finally:
        oracle.close()


@pytest.mark.parametrize(
    ("num_workers", "shared_memory", "copied", "mode"),
    each_pair(
        ["0", "1", "2", "num_envs"], {"shared": True, "pickled": False}, {"copy": True, "no-copy": False}, AutoresetMode
    ),
)
@few
@given(data=st.data(), vector=vectors())
def test_all_streams_equal_those_of_sync_vector_env(
    num_workers: str,
    shared_memory: bool,
    copied: bool,
    mode: AutoresetMode,
    data: st.DataObject,
    vector: Vector,
) -> None:
    compare(
        data,
        vector,
        mode,
        num_workers=_workers(num_workers, len(vector.env_fns)),
        shared_memory=shared_memory,
        copy=copied,
    )


@pytest.mark.long
@pytest.mark.parametrize("shared_memory", [True, False])
@pytest.mark.parametrize("num_workers", ["0", "2", "None"])
@settings(few, max_examples=10)
@given(data=st.data(), vector=vectors(any_spaces, any_spaces), mode=st.sampled_from(AutoresetMode))
def test_all_of_gymnasiums_spaces_travel_as_they_are(
    num_workers: str, shared_memory: bool, data: st.DataObject, vector: Vector, mode: AutoresetMode
) -> None:
    workers = _workers(num_workers, len(vector.env_fns))
    compare(data, vector, mode, num_workers=workers, shared_memory=shared_memory)


@pytest.mark.long
@pytest.mark.parametrize("mode", AutoresetMode)
@settings(few, max_examples=50)
@given(data=st.data(), vector=vectors(boxes(), discretes))
def test_in_this_process_with_many_more_examples(mode: AutoresetMode, data: st.DataObject, vector: Vector) -> None:
    compare(data, vector, mode, num_workers=0, copy=data.draw(st.booleans(), label="copy"))


@pytest.mark.long
@pytest.mark.parametrize("num_workers", ["0", "2", "None"])
@settings(few, max_examples=15)
@given(data=st.data(), vector=vectors(discretes, discretes, min_envs=2, wild=True))
def test_infos_that_change_their_kind_are_batched_or_refused_as_sync_vector_env_does(
    num_workers: str, data: st.DataObject, vector: Vector
) -> None:
    """Where the oracle raises, so must the engine, with the same type.

    Except where a dict meets an array: ``key in array`` compares with its entries, so that Gymnasium's
    error there is an AttributeError, an IndexError or a ValueError depending on what the array holds. Any will do.
    """
    oracle = SyncVectorEnv(vector.env_fns)
    workers = _workers(num_workers, len(vector.env_fns))
    actions = [space_start(vector)] * len(vector.env_fns)
    try:
        with opened(vector.env_fns, num_workers=workers) as envs:
            for t in range(5):
                results = []
                for vector_env in (envs, oracle):
                    try:
                        results.append(vector_env.step(actions) if t else vector_env.reset(seed=1))
                    except Exception as error:
                        results.append(error)
                mine, theirs = results
                if isinstance(theirs, Exception):
                    same = (type(theirs), *MIXED) if isinstance(theirs, MIXED) else type(theirs)
                    assert isinstance(mine, same), f"{mine!r} instead of {theirs!r}"
                    return
                assert_identical(mine, theirs, f"call {t}")
    finally:
        oracle.close()


def space_start(vector: Vector) -> Any:
    """Some legal action of a Discrete space."""
    return vector.action_space.start


@pytest.mark.long
@pytest.mark.parametrize(("context", "mode"), each_once(["fork", "spawn", "forkserver"], AutoresetMode))
@settings(few, max_examples=1)
@given(data=st.data(), vector=vectors(fixed_spaces, fixed_spaces, min_envs=3, max_envs=3))
def test_the_start_method_makes_no_difference(
    context: str, mode: AutoresetMode, data: st.DataObject, vector: Vector
) -> None:
    compare(data, vector, mode, num_workers=2, context=context)
