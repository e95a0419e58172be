"""Section 1.10: calls into the environments, and the functions that run in the workers."""

from __future__ import annotations

import functools
import re
import threading
from collections.abc import Callable
from typing import Any

import gymnasium
import numpy as np
import pytest
from envs import CounterEnv, Options, counters, opened, started
from gymnasium.error import AlreadyPendingCallError


def limited() -> gymnasium.Env:
    return gymnasium.make("CartPole-v1", max_episode_steps=7)


def test_call_returns_one_result_for_each_environment_in_order(every_engine: Options) -> None:
    with opened(counters(3), **every_engine) as envs:
        assert envs.call("add", 5) == (5, 6, 7)
        assert envs.call("add", 5, scale=2) == (10, 11, 12)
        assert envs.call("env_id") == (0, 1, 2)
        assert envs.call("env_id", "arguments", of="an attribute are ignored") == (0, 1, 2)
        assert envs.get_attr("env_id") == (0, 1, 2)


def test_the_name_of_a_call_may_also_be_a_keyword_argument_of_the_function(every_engine: Options) -> None:
    class Named(CounterEnv):
        def greet(self, *, name: str) -> str:
            return f"{name} {self.env_id}"

    with opened([functools.partial(Named, 0), functools.partial(Named, 1)], **every_engine) as envs:
        envs.call_async("greet", name="hello")
        assert envs.call_wait() == ("hello 0", "hello 1")


def test_call_finds_what_wrappers_and_inner_environments_have(every_engine: Options) -> None:
    with opened([limited] * 2, **every_engine) as envs:
        assert envs.get_attr("_max_episode_steps") == (7, 7)
        assert envs.get_attr("gravity") == (9.8, 9.8)


def test_values_of_any_kind_come_back(every_engine: Options) -> None:
    class Holder(CounterEnv):
        def give(self, value: Any) -> Any:
            return value

    with opened([Holder] * 2, **every_engine) as envs:
        for value in (None, "x", {"a": [1, 2]}, np.arange(3), (1, 2), CounterEnv):
            results = envs.call("give", value)
            assert len(results) == 2
            assert repr(results[0]) == repr(value)


@pytest.mark.parametrize("name", ["reset", "step", "close", "_setattr", "_check_spaces"])
def test_the_names_of_the_engines_own_commands_are_refused(every_engine: Options, name: str) -> None:
    with opened(counters(2), **every_engine) as envs:
        text = f"Trying to call function `{name}` with `call`, use `{name}` directly instead."
        with pytest.raises(ValueError, match=re.escape(text)):
            envs.call(name)
        assert envs.call("env_id") == (0, 1)


def fail_in_the_second(env: Any) -> None:
    if env.unwrapped.env_id == 1:
        raise ValueError("only here")


def test_an_error_in_a_call_is_raised_as_itself_and_kills_nobody(every_engine: Options) -> None:
    wrong: list[tuple[Any, Callable[[Any], Any], str]] = [
        (AttributeError, lambda envs: envs.get_attr("nosuch"), "nosuch"),
        (KeyError, lambda envs: envs.call("fail", KeyError("lost")), "lost"),
        (TypeError, lambda envs: envs.call("add"), "number"),
        ((TypeError, AttributeError), lambda envs: envs.call("add", threading.Lock()), "lock"),
        (ValueError, lambda envs: envs.exec_func(fail_in_the_second), "only here"),
    ]
    with started(counters(3), **every_engine) as envs:
        envs.step([0, 0, 0])
        for error, call, text in wrong:
            with pytest.raises(error, match=text) as caught:
                call(envs)
            assert envs._state.value == "default"
        assert "env 1" in str(caught.value) + "".join(caught.value.__notes__)
        assert envs.step([0, 0, 0])[0][:, 1:3].tolist() == [[2, 1]] * 3
        assert envs.call("env_id") == (0, 1, 2)


def test_set_attr_gives_a_list_or_tuple_one_by_one_and_everything_else_whole(every_engine: Options) -> None:
    with opened(counters(2), **every_engine) as envs:
        envs.set_attr("note", ["a", "b"])
        assert envs.get_attr("note") == ("a", "b")
        envs.set_attr("note", ("c", "d"))
        assert envs.get_attr("note") == ("c", "d")
        for whole in ("xy", {"a": 1, "b": 2}, 3.5, None):
            envs.set_attr("note", whole)
            assert envs.get_attr("note") == (whole, whole)
        envs.set_attr("note", np.array([1, 2]))
        assert [note.tolist() for note in envs.get_attr("note")] == [[1, 2], [1, 2]]
        envs.set_attr("note", [[1], [2]])
        assert envs.get_attr("note") == ([1], [2])


@pytest.mark.parametrize("values", [["a"], ["a", "b", "c"], (), []], ids=len)
def test_set_attr_refuses_a_list_of_another_length(every_engine: Options, values: Any) -> None:
    with opened(counters(2), **every_engine) as envs:
        text = f"Got `{len(values)}` values for 2 environments."
        with pytest.raises(ValueError, match=re.escape(text)):
            envs.set_attr("note", values)
        assert envs.get_attr("note") == ("unset", "unset")


def test_set_attr_reaches_the_layer_that_has_the_attribute(every_engine: Options) -> None:
    with opened([limited] * 2, **every_engine) as envs:
        envs.set_attr("gravity", [1.0, 2.0])
        assert envs.exec_func(lambda env: env.unwrapped.gravity) == (1.0, 2.0)
        envs.set_attr("_max_episode_steps", 3)
        envs.reset(seed=1)
        envs.step([0, 1])
        envs.step([1, 0])
        assert envs.step([0, 1])[3].all()


def test_set_attr_changes_what_the_next_step_does(every_engine: Options) -> None:
    with started(counters(2, lengths=(9,)), **every_engine) as envs:
        envs.set_attr("steps", [3, 5])
        assert envs.step([0, 0])[0][:, 1].tolist() == [4, 6]


def test_render_gives_a_tuple_of_frames(every_engine: Options) -> None:
    with opened(counters(3, render_mode="rgb_array"), **every_engine) as envs:
        assert envs.render_mode == "rgb_array"
        envs.reset(seed=1)
        envs.step([0, 0, 0])
        frames = envs.render()
        assert isinstance(frames, tuple)
        assert [int(frame[0, 0, 0]) for frame in frames] == [1, 11, 21]
        assert frames[0].shape == (2, 2, 3)
        assert frames[0].dtype == np.uint8


def test_np_random_and_its_seed_are_those_of_the_environments_and_read_only(every_engine: Options) -> None:
    with opened(counters(2), **every_engine) as envs:
        envs.reset(seed=42)
        assert envs.np_random_seed == (42, 43)
        generators = envs.np_random
        assert all(isinstance(generator, np.random.Generator) for generator in generators)
        assert generators[1].random() == gymnasium.utils.seeding.np_random(43)[0].random()
        envs.reset(seed=None)
        assert envs.np_random_seed == (42, 43)
        with pytest.raises(AttributeError):
            envs.np_random = generators
        with pytest.raises(AttributeError):
            envs.np_random_seed = (1, 2)


def test_np_random_is_a_copy_where_environments_live_elsewhere() -> None:
    with opened(counters(2)) as envs:
        envs.reset(seed=42)
        assert envs.np_random[0].random() == envs.np_random[0].random()


# -- exec_func -----------------------------------------------------------------------------------------------


def test_exec_func_runs_a_function_of_every_environment(every_engine: Options) -> None:
    offset = 10

    def closure(env: Any, factor: int, *, plus: int = 0) -> int:
        return (env.unwrapped.env_id + offset) * factor + plus

    with opened(counters(3), **every_engine) as envs:
        assert envs.exec_func(lambda env: env.env_id) == (0, 1, 2)
        assert envs.exec_func(closure, None, 2) == (20, 22, 24)
        assert envs.exec_func(closure, None, 2, plus=1) == (21, 23, 25)


def test_exec_func_runs_in_the_chosen_and_gives_none_for_the_others(every_engine: Options) -> None:
    with opened(counters(4), **every_engine) as envs:
        assert envs.exec_func(lambda env: env.env_id, [1, 3]) == (None, 1, None, 3)
        assert envs.exec_func(lambda env: env.env_id, [3, 0]) == (0, None, None, 3)
        assert envs.exec_func(lambda env: env.env_id, (2,)) == (None, None, 2, None)
        assert envs.exec_func(lambda env: env.env_id, np.array([2])) == (None, None, 2, None)
        envs.exec_func(lambda env: setattr(env, "note", "touched"), [1])
        assert envs.get_attr("note") == ("unset", "touched", "unset", "unset")


@pytest.mark.parametrize("indices", [[4], [-5], [0, 9], ["a"], [0.5]], ids=str)
def test_exec_func_refuses_indices_of_environments_that_are_not_there(every_engine: Options, indices: Any) -> None:
    with opened(counters(4), **every_engine) as envs:
        with pytest.raises((ValueError, IndexError, TypeError)):
            envs.exec_func(lambda env: setattr(env, "note", "touched"), indices)
        assert envs.get_attr("note") == ("unset",) * 4


def test_exec_func_may_be_sent_and_fetched(every_engine: Options) -> None:
    with opened(counters(2), **every_engine) as envs:
        envs.exec_func_send(lambda env: env.env_id + 1)
        with pytest.raises(AlreadyPendingCallError):
            envs.step_async([0, 0])
        with pytest.raises(AlreadyPendingCallError):
            envs.exec_func_send(lambda env: 1)
        assert envs.exec_func_fetch() == (1, 2)
        assert envs.reset(seed=1)[0][:, 0].tolist() == [0, 1]


def test_exec_func_can_step_and_change_the_environment_itself(every_engine: Options) -> None:
    with started(counters(2, lengths=(9,)), **every_engine) as envs:
        assert [result[1] for result in envs.exec_func(lambda env: env.step(0))] == [0.001, 1.001]
        assert envs.step([0, 0])[0][:, 1].tolist() == [2, 2]
