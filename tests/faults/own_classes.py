"""A program with environments that raise and return instances of its own classes: ``own_classes.py METHOD ENGINE``.

It prints a line for each value: ``name: True`` if it arrives as an instance of the program's class, not of a copy of it.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import gymnasium
import numpy as np

RAISE, RAISE_LAMBDA, RETURN_VALUE = 1, 2, 3  # actions; 0 does nothing


class MyError(Exception):
    count = 0


class ErrorWithLambda(Exception):
    def __init__(self, *args: object) -> None:
        super().__init__(*args)
        self.function = lambda: 1


class MyValue:
    pass


class MySpace(gymnasium.spaces.Box):
    """A space that equals only instances of this class."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, MySpace) and super().__eq__(other)

    __hash__ = None  # type: ignore[assignment]


def my_function() -> None:
    pass


class MyEnv(gymnasium.Env[Any, Any]):
    observation_space = MySpace(0, 1, (1,))
    action_space = gymnasium.spaces.Discrete(10)
    thing: Any = None

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        return np.zeros(1, np.float32), {}

    def step(self, action: Any) -> Any:
        if action == RAISE:
            raise MyError("by name")
        if action == RAISE_LAMBDA:
            raise ErrorWithLambda("by value")
        info = {"thing": MyValue()} if action == RETURN_VALUE else {}
        return np.zeros(1, np.float32), 0.0, False, False, info

    def get_own(self, name: str) -> Any:
        return {"thing": MyValue(), "class": MyValue, "function": my_function}[name]

    def raise_own_error(self) -> None:
        raise MyError("in a call")

    def has_own_thing(self) -> bool:
        thing = self.thing[0] if isinstance(self.thing, tuple) else self.thing  # a tuple also has a lambda
        return isinstance(thing, MyValue)


class UnbuildableEnv(MyEnv):
    def __init__(self) -> None:
        raise MyError("while it is built")


def raises_class(error_class: type[Exception], call: Any, *args: Any) -> bool:
    """True if the call raises the class of this program; print any other error."""
    try:
        call(*args)
    except error_class:
        return True
    except Exception as error:
        print(type(error), error)
    return False


def check_classes(method: str, engine: str) -> Iterator[tuple[str, bool]]:
    """Yield the name of each check, and True if the value is an instance of the class in this program."""
    import vecenv

    if engine == "gymnasium":
        envs: Any = gymnasium.vector.AsyncVectorEnv([MyEnv, MyEnv], context=method)
    else:
        envs = vecenv.AsyncVectorEnv([MyEnv, MyEnv], context=method, worker_options=vecenv.WorkerOptions(dummy_env=False))
    yield "space", isinstance(envs.single_observation_space, MySpace)
    envs.reset(seed=1)
    yield "info", isinstance(envs.step(np.array([0, RETURN_VALUE]))[4]["thing"][1], MyValue)
    yield "result", isinstance(envs.call("get_own", "thing")[0], MyValue)
    yield "class", envs.call("get_own", "class")[0] is MyValue
    yield "function", envs.call("get_own", "function")[0] is my_function
    envs.set_attr("thing", MyValue())
    yield "attribute", envs.call("has_own_thing") == (True, True)
    MyError.count = 7
    if engine == "vecenv":  # Gymnasium's engine cannot be used after the first error
        envs.set_attr("thing", [(MyValue(), lambda: 1), MyValue()])
        yield "attribute beside a lambda", envs.call("has_own_thing") == (True, True)
        yield "error in a call", raises_class(MyError, envs.call, "raise_own_error")
        yield "error that holds a lambda", raises_class(ErrorWithLambda, envs.step, np.array([0, RAISE_LAMBDA]))
        envs.reset(seed=1)
    yield "error", raises_class(MyError, envs.step, np.array([0, RAISE]))
    yield "class of the error is untouched", MyError.count == 7
    if engine == "vecenv":
        envs.close()

        def start(count: int, **options: Any) -> None:
            vecenv.AsyncVectorEnv([UnbuildableEnv] * count, context=method, **options)

        without_dummy = vecenv.WorkerOptions(dummy_env=False)
        yield "error at the start", raises_class(MyError, lambda: start(1, worker_options=without_dummy))
        yield "error in the probe", raises_class(MyError, lambda: start(2, num_workers="auto"))
        envs = vecenv.AsyncVectorEnv([MyEnv, MyEnv], context=method)
        results = vecenv.evaluate(envs, lambda observations: np.full(len(observations), RAISE, np.int64), 2)
        yield "error in an evaluation", all(isinstance(result.error, MyError) for result in results)
        envs.close()
    else:
        envs.close(terminate=True)


if __name__ == "__main__":
    gymnasium.logger.min_level = gymnasium.logger.ERROR + 1
    for name, is_own in check_classes(*sys.argv[1:]):
        print(f"{name}: {is_own}", flush=True)
