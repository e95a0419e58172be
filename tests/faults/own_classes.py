"""A program with environments that raise, return and receive instances of its own classes: ``own_classes.py METHOD ENGINE``.

It prints a line ``name: True`` for each value that arrives as an instance of the program's class, and not of a copy of it.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import gymnasium
import numpy as np


class MyError(Exception):
    count = 0


class HoldsALambda(Exception):
    def __init__(self, *args: object) -> None:
        super().__init__(*args)
        self.function = lambda: 1


class Thing:
    pass


class MySpace(gymnasium.spaces.Box):
    def __eq__(self, other: object) -> bool:
        return isinstance(other, MySpace) and super().__eq__(other)

    __hash__ = None  # type: ignore[assignment]


def function() -> None:
    pass


class Env(gymnasium.Env[Any, Any]):
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
            raise HoldsALambda("by value")
        return np.zeros(1, np.float32), 0.0, False, False, {"thing": Thing()} if action == 3 else {}

    def give(self, name: str) -> Any:
        return {"thing": Thing(), "class": Thing, "function": function}[name]

    def raises(self) -> None:
        raise MyError("in a call")

    def knows(self) -> bool:
        return isinstance(self.thing[0] if isinstance(self.thing, tuple) else self.thing, Thing)


class Unbuildable(Env):
    def __init__(self) -> None:
        raise MyError("while it is built")


def catches(kind: type[Exception], call: Any, *args: Any) -> bool:
    try:
        call(*args)
    except kind:
        return True
    except Exception as error:
        print(type(error), error)
    return False


def findings(engine: str, method: str) -> Iterator[tuple[str, bool]]:
    import vecenv

    if engine == "gymnasium":
        envs: Any = gymnasium.vector.AsyncVectorEnv([Env, Env], context=method)
    else:
        envs = vecenv.AsyncVectorEnv([Env, Env], context=method, worker_options=vecenv.WorkerOptions(dummy_env=False))
    yield "space", isinstance(envs.single_observation_space, MySpace)
    envs.reset(seed=1)
    yield "info", isinstance(envs.step(np.array([0, 3]))[4]["thing"][1], Thing)
    yield "result", isinstance(envs.call("give", "thing")[0], Thing)
    yield "class", envs.call("give", "class")[0] is Thing
    yield "function", envs.call("give", "function")[0] is function
    envs.set_attr("thing", Thing())
    yield "attribute", envs.call("knows") == (True, True)
    MyError.count = 7
    if engine == "vecenv":  # Gymnasium's ends with the first error
        envs.set_attr("thing", [(Thing(), lambda: 1), Thing()])
        yield "attribute beside a lambda", envs.call("knows") == (True, True)
        yield "error in a call", catches(MyError, envs.call, "raises")
        yield "error that holds a lambda", catches(HoldsALambda, envs.step, np.array([0, 2]))
        envs.reset(seed=1)
    yield "error", catches(MyError, envs.step, np.array([0, 1]))
    yield "class of the error is untouched", MyError.count == 7
    if engine == "vecenv":
        envs.close()
        start = vecenv.AsyncVectorEnv
        elsewhere = {"worker_options": vecenv.WorkerOptions(dummy_env=False)}
        yield "error at the start", catches(MyError, lambda: start([Unbuildable], context=method, **elsewhere))
        yield "error of a trial", catches(MyError, lambda: start([Unbuildable] * 2, context=method, num_workers="auto"))
        again = vecenv.AsyncVectorEnv([Env, Env], context=method)
        results = vecenv.evaluate(again, lambda observations: np.ones(len(observations), np.int64), 2)
        yield "error in an evaluation", all(isinstance(result.error, MyError) for result in results)
        again.close()
    else:
        envs.close(terminate=True)


if __name__ == "__main__":
    gymnasium.logger.min_level = gymnasium.logger.ERROR + 1
    for name, found in findings(sys.argv[2], sys.argv[1]):
        print(f"{name}: {found}", flush=True)
