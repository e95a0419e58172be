"""A program with environments that raise and return instances of its own classes: ``own_classes.py METHOD ENGINE``.

It prints a line ``name: True`` for each value that arrives as an instance of the program's class, not of a copied class.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import gymnasium
import numpy as np


class MyError(Exception):
    count = 0


class ErrorWithLambda(Exception):
    def __init__(self, *args: object) -> None:
        super().__init__(*args)
        self.function = lambda: 1


class MyValue:
    pass


class MySpace(gymnasium.spaces.Box):
    def __eq__(self, other: object) -> bool:
        return isinstance(other, MySpace) and super().__eq__(other)

    __hash__ = None  # type: ignore[assignment]


def function() -> None:
    pass


class MyEnv(gymnasium.Env[Any, Any]):
    observation_space = MySpace(0, 1, (1,))
    action_space = gymnasium.spaces.Discrete(10)
    thing: Any = None

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        return np.zeros(1, np.float32), {}

    def step(self, action: Any) -> Any:
        if action == 1:
            raise MyError("by name")
        if action == 2:
            raise ErrorWithLambda("by value")
        return np.zeros(1, np.float32), 0.0, False, False, {"thing": MyValue()} if action == 3 else {}

    def get_own(self, name: str) -> Any:
        return {"thing": MyValue(), "class": MyValue, "function": function}[name]

    def raise_own_error(self) -> None:
        raise MyError("in a call")

    def has_own_thing(self) -> bool:
        return isinstance(self.thing[0] if isinstance(self.thing, tuple) else self.thing, MyValue)


class UnbuildableEnv(MyEnv):
    def __init__(self) -> None:
        raise MyError("while it is built")


def raises_class(kind: type[Exception], call: Any, *args: Any) -> bool:
    try:
        call(*args)
    except kind:
        return True
    except Exception as error:
        print(type(error), error)
    return False


def check_classes(engine: str, method: str) -> Iterator[tuple[str, bool]]:
    """Yield the name of each check, and True if the value is an instance of the class in this program."""
    import vecenv

    if engine == "gymnasium":
        envs: Any = gymnasium.vector.AsyncVectorEnv([MyEnv, MyEnv], context=method)
    else:
        envs = vecenv.AsyncVectorEnv([MyEnv, MyEnv], context=method, worker_options=vecenv.WorkerOptions(dummy_env=False))
    yield "space", isinstance(envs.single_observation_space, MySpace)
    envs.reset(seed=1)
    yield "info", isinstance(envs.step(np.array([0, 3]))[4]["thing"][1], MyValue)
    yield "result", isinstance(envs.call("get_own", "thing")[0], MyValue)
    yield "class", envs.call("get_own", "class")[0] is MyValue
    yield "function", envs.call("get_own", "function")[0] is function
    envs.set_attr("thing", MyValue())
    yield "attribute", envs.call("has_own_thing") == (True, True)
    MyError.count = 7
    if engine == "vecenv":  # Gymnasium's engine cannot be used after the first error
        envs.set_attr("thing", [(MyValue(), lambda: 1), MyValue()])
        yield "attribute beside a lambda", envs.call("has_own_thing") == (True, True)
        yield "error in a call", raises_class(MyError, envs.call, "raise_own_error")
        yield "error that holds a lambda", raises_class(ErrorWithLambda, envs.step, np.array([0, 2]))
        envs.reset(seed=1)
    yield "error", raises_class(MyError, envs.step, np.array([0, 1]))
    yield "class of the error is untouched", MyError.count == 7
    if engine == "vecenv":
        envs.close()
        start = vecenv.AsyncVectorEnv
        in_workers = {"worker_options": vecenv.WorkerOptions(dummy_env=False)}
        yield "error at the start", raises_class(MyError, lambda: start([UnbuildableEnv], context=method, **in_workers))
        probed = {"num_workers": "auto"}
        yield "error in the probe", raises_class(MyError, lambda: start([UnbuildableEnv] * 2, context=method, **probed))
        second = vecenv.AsyncVectorEnv([MyEnv, MyEnv], context=method)
        results = vecenv.evaluate(second, lambda observations: np.ones(len(observations), np.int64), 2)
        yield "error in an evaluation", all(isinstance(result.error, MyError) for result in results)
        second.close()
    else:
        envs.close(terminate=True)


if __name__ == "__main__":
    gymnasium.logger.min_level = gymnasium.logger.ERROR + 1
    for name, found in check_classes(sys.argv[2], sys.argv[1]):
        print(f"{name}: {found}", flush=True)
