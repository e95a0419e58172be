"""Section 1.10: calls into the environments, and the functions that run in the workers."""

from __future__ import annotations

import contextlib
import functools
import re
import threading
from typing import Any

import gymnasium
import numpy as np
import pytest
from envs import ENGINES, CounterEnv, counters, opened
from gymnasium.error import AlreadyPendingCallError

engines = pytest.mark.parametrize("engine", ENGINES.values(), ids=list(ENGINES))


def limited() -> gymnasium.Env:
    return gymnasium.make("CartPole-v1", max_episode_steps=7)


@engines
def test_call_returns_one_result_for_each_environment_in_order(engine: dict[str, Any]) -> None:
    with opened(counters(3), **engine) as envs:
        assert envs.call("add", 5) == (5, 6, 7)
        assert envs.call("add", 5, scale=2) == (10, 11, 12)
        assert envs.call("env_id") == (0, 1, 2)
        assert envs.call("env_id", "arguments", of="an attribute are ignored") == (0, 1, 2)
        assert envs.get_attr("env_id") == (0, 1, 2)


@engines
def test_the_name_of_a_call_may_also_be_a_keyword_argument_of_the_function(engine: dict[str, Any]) -> None:
    class Named(CounterEnv):
        def greet(self, *, name: str) -> str:
            return f"{name} {self.env_id}"

    with opened([functools.partial(Named, 0), functools.partial(Named, 1)], **engine) as envs:
        envs.call_async("greet", name="hello")
        assert envs.call_wait() == ("hello 0", "hello 1")


@engines
def test_call_finds_what_wrappers_and_inner_environments_have(engine: dict[str, Any]) -> None:
    with opened([limited] * 2, **engine) as envs:
        assert envs.get_attr("_max_episode_steps") == (7, 7)
        assert envs.get_attr("gravity") == (9.8, 9.8)


@engines
def test_values_of_any_kind_come_back(engine: dict[str, Any]) -> None:
    class Holder(CounterEnv):
        def give(self, value: Any) -> Any:
            return value

    with opened([Holder] * 2, **engine) as envs:
        for value in (None, "x", {"a": [1, 2]}, np.arange(3), (1, 2), CounterEnv):
            results = envs.call("give", value)
            assert len(results) == 2
            assert repr(results[0]) == repr(value)


@engines
@pytest.mark.parametrize("name", ["reset", "step", "close", "_setattr", "_check_spaces"])
def test_the_names_of_the_engines_own_commands_are_refused(engine: dict[str, Any], name: str) -> None:
    with opened(counters(2), **engine) as envs:
        text = f"Trying to call function `{name}` with `call`, use `{name}` directly instead."
        with pytest.raises(ValueError, match=re.escape(text)):
            envs.call(name)
        assert envs.call("env_id") == (0, 1)


@engines
def test_an_error_in_a_call_is_raised_as_itself_and_kills_nobody(engine: dict[str, Any]) -> None:
    with opened(counters(3), **engine) as envs:
        envs.reset(seed=1)
        envs.step([0, 0, 0])
        with pytest.raises(AttributeError, match="nosuch"):
            envs.get_attr("nosuch")
        with pytest.raises(KeyError, match="lost"):
            envs.call("fail", KeyError("lost"))
        with pytest.raises(TypeError):
            envs.call("add")
        assert envs.step([0, 0, 0])[0][:, 1:3].tolist() == [[2, 1]] * 3
        assert envs.call("env_id") == (0, 1, 2)


@engines
def test_an_error_in_a_call_of_one_environment_says_which(engine: dict[str, Any]) -> None:
    def fail_in_the_second(env: Any) -> int:
        if env.unwrapped.env_id == 1:
            raise ValueError("only here")
        return env.unwrapped.env_id

    with opened(counters(3), **engine) as envs:
        with pytest.raises(ValueError, match="only here") as caught:
            envs.exec_func(fail_in_the_second)
        assert "env 1" in str(caught.value) + "".join(caught.value.__notes__)
        assert envs.call("env_id") == (0, 1, 2)


@engines
def test_arguments_that_cannot_be_pickled_are_refused_here_or_handed_over(engine: dict[str, Any]) -> None:
    lock = threading.Lock()
    with opened(counters(2), **engine) as envs:
        with contextlib.suppress(TypeError, AttributeError):
            envs.call("add", lock)
        assert envs._state.value == "default"
        assert envs.call("env_id") == (0, 1)


@engines
def test_set_attr_gives_a_list_or_tuple_one_by_one_and_everything_else_whole(engine: dict[str, Any]) -> None:
    with opened(counters(2), **engine) as envs:
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


@engines
@pytest.mark.parametrize("values", [["a"], ["a", "b", "c"], (), []], ids=len)
def test_set_attr_refuses_a_list_of_another_length(engine: dict[str, Any], values: Any) -> None:
    with opened(counters(2), **engine) as envs:
        text = f"Got `{len(values)}` values for 2 environments."
        with pytest.raises(ValueError, match=re.escape(text)):
            envs.set_attr("note", values)
        assert envs.get_attr("note") == ("unset", "unset")


@engines
def test_set_attr_reaches_the_layer_that_has_the_attribute(engine: dict[str, Any]) -> None:
    with opened([limited] * 2, **engine) as envs:
        envs.set_attr("gravity", [1.0, 2.0])
        assert envs.exec_func(lambda env: env.unwrapped.gravity) == (1.0, 2.0)
        envs.set_attr("_max_episode_steps", 3)
        envs.reset(seed=1)
        envs.step([0, 1])
        envs.step([1, 0])
        assert envs.step([0, 1])[3].all()


@engines
def test_set_attr_changes_what_the_next_step_does(engine: dict[str, Any]) -> None:
    with opened(counters(2, lengths=(9,)), **engine) as envs:
        envs.reset(seed=1)
        envs.set_attr("steps", [3, 5])
        assert envs.step([0, 0])[0][:, 1].tolist() == [4, 6]


@engines
def test_render_gives_a_tuple_of_frames(engine: dict[str, Any]) -> None:
    with opened(counters(3, render_mode="rgb_array"), **engine) as envs:
        assert envs.render_mode == "rgb_array"
        envs.reset(seed=1)
        envs.step([0, 0, 0])
        frames = envs.render()
        assert isinstance(frames, tuple)
        assert [int(frame[0, 0, 0]) for frame in frames] == [1, 11, 21]
        assert frames[0].shape == (2, 2, 3)
        assert frames[0].dtype == np.uint8


@engines
def test_np_random_and_its_seed_are_those_of_the_environments_and_read_only(engine: dict[str, Any]) -> None:
    with opened(counters(2), **engine) as envs:
        envs.reset(seed=42)
        assert envs.np_random_seed == (42, 43)
        generators = envs.np_random
        assert all(isinstance(generator, np.random.Generator) for generator in generators)
        assert generators[0].random() == gymnasium.utils.seeding.np_random(42)[0].random()
        with pytest.raises(AttributeError):
            envs.np_random = generators
        with pytest.raises(AttributeError):
            envs.np_random_seed = (1, 2)


def test_np_random_is_a_copy_where_environments_live_elsewhere() -> None:
    with opened(counters(2)) as envs:
        envs.reset(seed=42)
        assert envs.np_random[0].random() == envs.np_random[0].random()


# -- exec_func -----------------------------------------------------------------------------------------------


@engines
def test_exec_func_runs_a_function_of_every_environment(engine: dict[str, Any]) -> None:
    offset = 10

    def closure(env: Any, factor: int, *, plus: int = 0) -> int:
        return (env.unwrapped.env_id + offset) * factor + plus

    with opened(counters(3), **engine) as envs:
        assert envs.exec_func(lambda env: env.env_id) == (0, 1, 2)
        assert envs.exec_func(closure, None, 2) == (20, 22, 24)
        assert envs.exec_func(closure, None, 2, plus=1) == (21, 23, 25)


@engines
def test_exec_func_runs_in_the_chosen_and_gives_none_for_the_others(engine: dict[str, Any]) -> None:
    with opened(counters(4), **engine) as envs:
        assert envs.exec_func(lambda env: env.env_id, [1, 3]) == (None, 1, None, 3)
        assert envs.exec_func(lambda env: env.env_id, [3, 0]) == (0, None, None, 3)
        assert envs.exec_func(lambda env: env.env_id, (2,)) == (None, None, 2, None)
        assert envs.exec_func(lambda env: env.env_id, np.array([2])) == (None, None, 2, None)
        envs.exec_func(lambda env: setattr(env, "note", "touched"), [1])
        assert envs.get_attr("note") == ("unset", "touched", "unset", "unset")


@engines
@pytest.mark.parametrize("indices", [[4], [-5], [0, 9], ["a"], [0.5]], ids=str)
def test_exec_func_refuses_indices_of_environments_that_are_not_there(engine: dict[str, Any], indices: Any) -> None:
    with opened(counters(4), **engine) as envs:
        with pytest.raises((ValueError, IndexError, TypeError)):
            envs.exec_func(lambda env: setattr(env, "note", "touched"), indices)
        assert envs.get_attr("note") == ("unset",) * 4


@engines
def test_exec_func_may_be_sent_and_fetched(engine: dict[str, Any]) -> None:
    with opened(counters(2), **engine) as envs:
        envs.exec_func_send(lambda env: env.env_id + 1)
        with pytest.raises(AlreadyPendingCallError):
            envs.step_async([0, 0])
        with pytest.raises(AlreadyPendingCallError):
            envs.exec_func_send(lambda env: 1)
        assert envs.exec_func_fetch() == (1, 2)
        assert envs.reset(seed=1)[0][:, 0].tolist() == [0, 1]


@engines
def test_exec_func_can_step_and_change_the_environment_itself(engine: dict[str, Any]) -> None:
    with opened(counters(2, lengths=(9,)), **engine) as envs:
        envs.reset(seed=1)
        assert [result[1] for result in envs.exec_func(lambda env: env.step(0))] == [0.001, 1.001]
        assert envs.step([0, 0])[0][:, 1].tolist() == [2, 2]


# -- the second set of names ---------------------------------------------------------------------------------


@engines
def test_send_and_fetch_are_the_same_as_async_and_wait(engine: dict[str, Any]) -> None:
    with opened(counters(2), **engine) as envs:
        envs.reset_send(seed=3)
        assert envs.reset_fetch()[0][:, 3].tolist() == [3, 4]
        envs.step_send([0, 0])
        assert envs.step_fetch()[0][:, 1].tolist() == [1, 1]
        envs.call_send("add", 1)
        assert envs.call_fetch() == (1, 2)


@engines
def test_the_two_sets_of_names_can_be_mixed(engine: dict[str, Any]) -> None:
    with opened(counters(2), **engine) as envs:
        envs.reset_send(seed=3)
        assert envs.reset_wait()[0][:, 3].tolist() == [3, 4]
        envs.step_async([0, 0])
        with pytest.raises(AlreadyPendingCallError):
            envs.step_send([0, 0])
        assert envs.step_fetch(timeout=5)[0][:, 1].tolist() == [1, 1]
        envs.call_send("env_id")
        assert envs.call_wait() == (0, 1)
