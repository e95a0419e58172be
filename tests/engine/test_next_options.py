"""``set_next_options``: what the episodes that autoreset begins are given."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
import pytest
from envs import Options, counters, describe, opened, raises_logged, started


def given(infos: dict[str, Any], row: int) -> Any:
    """What the reset of a row was given, described; ``None`` if it had none."""
    return infos["reset_kwargs"][row] if "reset_kwargs" in infos and infos["_reset_kwargs"][row] else None


def resets(envs: Any, steps: int) -> list[list[Any]]:
    """What the resets of each row were given in so many steps."""
    found: list[list[Any]] = [[] for _ in range(envs.num_envs)]
    for _ in range(steps):
        infos = envs.step(np.zeros(envs.num_envs, np.int64))[4]
        for row, own in enumerate(found):
            if (kwargs := given(infos, row)) is not None:
                own.append(kwargs)
    return found


def of(options: Any, seed: int | None = None) -> str:
    return describe({"seed": seed, "options": options})


PLAIN = describe({})


@pytest.mark.parametrize(("mode", "steps"), [("NextStep", 7), ("SameStep", 5)])
def test_the_next_episode_of_each_row_has_its_own_and_later_ones_none(engine: Options, mode: str, steps: int) -> None:
    with started(counters(3, lengths=(2,)), autoreset_mode=mode, **engine) as envs:
        options = [{"level": 1}, None, {"level": 3}]
        envs.set_next_options(options, seed=[None, 5, 6])
        options[0]["level"] = 99  # type: ignore[index]
        assert resets(envs, steps) == [[of({"level": 1}), PLAIN], [of(None, 5), PLAIN], [of({"level": 3}, 6), PLAIN]]


def test_one_dict_is_for_all_and_an_int_seeds_them_in_order(engine: Options) -> None:
    with started(counters(3, lengths=(2,)), **engine) as envs:
        envs.set_next_options({"level": 4}, seed=20)
        assert resets(envs, 3) == [[of({"level": 4}, 20)], [of({"level": 4}, 21)], [of({"level": 4}, 22)]]


def test_some_rows_are_named_and_the_others_keep_what_they_have(engine: Options) -> None:
    with started(counters(3, lengths=(2,)), **engine) as envs:
        envs.set_next_options({"level": 1})
        envs.set_next_options([{"level": 2}, {"level": 0}], env_id=[2, 0])
        envs.reset(options={"level": "reset"})
        assert resets(envs, 3) == [[of({"level": 0})], [of({"level": 1})], [of({"level": 2})]], "a reset has its own"
        envs.set_next_options({"level": 1})
        envs.set_next_options(env_id=[1])
        assert resets(envs, 3) == [[of({"level": 1})], [PLAIN], [of({"level": 1})]]


def test_rows_that_come_one_by_one_have_them_too(engine: Options) -> None:
    with started(counters(2, lengths=(1,)), **engine) as envs:
        envs.set_next_options([{"level": 0}, {"level": 1}])
        for _ in range(2):
            envs.send(np.zeros(1, np.int64), [1])
            infos = envs.recv(count=1)[4]
        assert given(infos, 0) == of({"level": 1})


class Slips(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Raises if it is told to."""

    def __init__(self) -> None:
        super().__init__(counters(1, lengths=(3,))[0]())

    def step(self, action: Any) -> Any:
        if action == 1:
            raise ArithmeticError("it slipped")
        return super().step(action)


def test_what_failed_forgets_them(engine: Options) -> None:
    with started([Slips, counters(2, lengths=(3,))[1]], **engine) as envs:
        envs.set_next_options({"level": 1})
        with raises_logged(ArithmeticError):
            envs.step([1, 0])
        envs.reset(options={"reset_mask": np.array([True, False])})
        assert resets(envs, 4) == [[of(None)], [of({"level": 1})]]


def test_without_autoreset_there_is_no_next_episode() -> None:
    refused = pytest.raises(ValueError, match="autoreset_mode=DISABLED begins no episodes")
    with opened(counters(2), autoreset_mode="Disabled", num_workers=0) as envs, refused:
        envs.set_next_options({"level": 1})


def test_a_snapshot_knows_what_the_next_episode_is_given(engine: Options) -> None:
    with started(counters(3, lengths=(2,)), **engine) as envs:
        envs.set_next_options([{"level": 1}, None, None], seed=[None, 5, None])
        kept = envs.save()
        envs.set_next_options({"level": 9})
        envs.load(kept)
        assert resets(envs, 3) == [[of({"level": 1})], [of(None, 5)], [PLAIN]]
