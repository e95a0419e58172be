"""What is asked of environments that are Python objects, and so not of these."""

from __future__ import annotations

from typing import Any, NoReturn

from vecenv.front.capabilities import unable
from vecenv.front.guard import one_call

__all__ = ["NoAttributes"]


def _refused(name: str) -> Any:
    def refused(self: Any, *args: Any, **kwargs: Any) -> NoReturn:
        unable(self, name, "its environments are rows of one compiled function, without methods or attributes of their own")

    refused.__name__ = name
    refused.__qualname__ = f"NoAttributes.{name}"
    refused.__doc__ = "Raise :class:`NotImplementedError`: the environments are no Python objects."
    return one_call("JAX")(refused)


class NoAttributes:
    """The methods of ``AsyncVectorEnv`` that need Python objects."""

    call = _refused("call")
    call_async = call_send = _refused("call_async")
    call_wait = call_fetch = _refused("call_wait")
    exec_func = _refused("exec_func")
    exec_func_send = _refused("exec_func_send")
    exec_func_fetch = _refused("exec_func_fetch")
    get_attr = _refused("get_attr")
    set_attr = _refused("set_attr")
