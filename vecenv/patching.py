"""Replaces Gymnasium's vector environments by vecenv's, for programs that build those and are not to be edited."""

from __future__ import annotations

import inspect
import mmap
import os
import sys
import time
import weakref
from collections.abc import Iterator, Mapping, Sequence
from types import CodeType, FunctionType, ModuleType
from typing import Any, Final

import numpy as np
from gymnasium.core import ActType, ObsType
from gymnasium.vector import AutoresetMode, VectorEnv

from vecenv.engine.vector_env import AsyncVectorEnv
from vecenv.front.arguments import GymnasiumAsync, GymnasiumSync, check_names

__all__ = ["DEFAULTS", "REPORT", "PatchReport", "install", "uninstall"]

_SIGNATURE: Final = inspect.signature(AsyncVectorEnv.__init__)
_OPTIONS: Final = [name for name in _SIGNATURE.parameters if name not in ("self", "env_fns", "worker")]

DEFAULTS: dict[str, Any] = {}
"""Arguments for constructions that do not give them."""


class PatchReport:
    """Counts the vector environments that were built in the place of Gymnasium's.

    Attributes:
        engines, environments: How many were built.
        steps: Environment steps made by those that were closed or dropped.
        restarts, failures: Of those.
        began: When the first was built (``time.monotonic()``).
        kept: Names of classes that stay derived from Gymnasium's, because they use its private parts.
    """

    _SLOTS: Final = 512

    def __init__(self) -> None:
        self._pid = os.getpid()
        # Forked children write here how many vector environments and environments they build, each into the slot of its pid.
        self._children = np.frombuffer(mmap.mmap(-1, self._SLOTS * 16), np.int64).reshape(self._SLOTS, 2)
        self.engines = self.environments = 0
        self.steps = self.restarts = self.failures = 0.0
        self.began: float | None = None
        self.kept: list[str] = []
        self._open: weakref.WeakSet[Any] = weakref.WeakSet()

    def opened(self, envs: _Instead) -> None:
        """One more was built."""
        if os.getpid() != self._pid:
            self._children[os.getpid() % self._SLOTS] += (1, envs.num_envs)
            return
        if self.began is None:
            self.began = time.monotonic()
        self.engines += 1
        self.environments += envs.num_envs
        self._open.add(envs)
        envs._reported = False

    def ended(self, envs: _Instead) -> None:
        """Add the figures of one that is closed, or dropped, or still open at the end; once for each."""
        if not envs._reported:
            envs._reported = True  # `_open` does not tell: the garbage collector takes out what it collects
            self._open.discard(envs)
            figures = envs.stats()
            self.steps += figures["steps"]
            self.restarts += figures["restarts"]
            self.failures += figures["errors"]

    def __str__(self) -> str:
        for envs in list(self._open):
            self.ended(envs)
        more = f"; still Gymnasium's, as it reaches into that class: {', '.join(self.kept)}" if self.kept else ""
        if self._loaded_anew():
            more += "; the program loaded gymnasium.vector anew, and what it made of that is Gymnasium's"
        engines, environments = self._children.sum(axis=0).tolist()
        if engines:
            built = f"{_vector_environments(engines, environments)} in child processes, which do not report their steps"
            more = f"; and {built}{more}" if self.engines else f"{built}{more}"
        if self.began is None:
            return more if engines else f"no vector environment of vecenv's was made{more}" if more else self._never()
        seconds = max(time.monotonic() - self.began, 1e-9)
        failed = f"{self.failures:.0f} failures" if self.failures else "nothing failed"
        restarts = f", {self.restarts:.0f} restarts" if self.restarts else ""
        rate = f"{self.steps:,.0f} steps in {seconds:.1f} s, {self.steps / seconds:,.0f} per second"
        return f"{_vector_environments(self.engines, self.environments)}: {rate}; {failed}{restarts}{more}"

    def _never(self) -> str:
        text = "no vector environment was replaced: the program never called gymnasium.vector.AsyncVectorEnv"
        if GymnasiumSync not in _REPLACED:
            text += "; --sync replaces SyncVectorEnv too"
        if os.times().children_user:
            text += "; processes that it started anew (spawn, forkserver, subprocess) have Gymnasium's, whatever they called"
        return text

    @staticmethod
    def _loaded_anew() -> bool:
        """Whether the name ``AsyncVectorEnv`` is now a class that is neither ours nor the one that was replaced."""
        modules = (sys.modules.get(name) for name in ("gymnasium.vector", GymnasiumAsync.__module__))
        found = [vars(module).get("AsyncVectorEnv") for module in modules if module is not None]
        return any(kind not in (None, _Instead, GymnasiumAsync) for kind in found)


def _vector_environments(engines: int, environments: int) -> str:
    return f"{engines} vector environment{'s' if engines > 1 else ''} of {environments} environments"


REPORT = PatchReport()


def _functions(names: Mapping[str, Any]) -> Iterator[FunctionType]:
    for value in names.values():
        parts = (value.fget, value.fset) if isinstance(value, property) else (getattr(value, "__func__", value),)
        yield from (inspect.unwrap(part) for part in parts if isinstance(part, FunctionType))


def _names(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)


def _inside(theirs: type[Any]) -> frozenset[str]:
    """The names of Gymnasium's class that a subclass may use although they are no interface."""
    bodies = [vars(theirs), vars(VectorEnv)]
    used = {name for body in bodies for function in _functions(body) for name in _names(function.__code__)}
    private = {name for name in used.union(*bodies) if name.startswith("_") and not name.startswith("__")}
    public = {"parent_pipes", "processes", "error_queue", "observations"} if theirs is GymnasiumAsync else {"envs"}
    return frozenset(private | public)


def _reaches(body: Mapping[str, Any], inside: frozenset[str]) -> bool:
    used = {name for function in _functions(body) for name in _names(function.__code__)}
    return not inside.isdisjoint(used.union(body))


class _StandsFor(type):
    """``isinstance`` and ``issubclass`` hold for instances of Gymnasium's class too, which had this name before.

    A subclass whose methods use private parts of Gymnasium's class, its pipes or the methods that it calls itself
    (``_add_info``), is derived from Gymnasium's class: ours does not have these parts, or does not call them.
    """

    def __new__(cls, name: str, bases: tuple[type[Any], ...], body: dict[str, Any], **keywords: Any) -> Any:
        theirs = {base: vars(base)["stands_for"] for base in bases if "stands_for" in vars(base)}
        if body.get("__module__") != __name__ and any(_reaches(body, _inside(kind)) for kind in theirs.values()):
            REPORT.kept.append(name)
            return type(name, tuple(theirs.get(base, base) for base in bases), body, **keywords)
        return super().__new__(cls, name, bases, body, **keywords)

    def __instancecheck__(cls, instance: Any) -> bool:
        return super().__instancecheck__(instance) or isinstance(instance, cls.__dict__.get("stands_for", ()))

    def __subclasscheck__(cls, subclass: type[Any]) -> bool:
        return super().__subclasscheck__(subclass) or issubclass(subclass, cls.__dict__.get("stands_for", ()))


class _Instead(  # type: ignore[misc, override]
    AsyncVectorEnv[ObsType, ActType], VectorEnv[ObsType, ActType, np.ndarray], metaclass=_StandsFor
):
    """:class:`vecenv.AsyncVectorEnv`, with :data:`DEFAULTS` for arguments that are not given.

    ``VectorEnv`` is a base by inheritance already. It is named for libraries that read ``__bases__`` to recognise
    Gymnasium's API (skrl).
    """

    stands_for: type[Any] = GymnasiumAsync
    _reported = True

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        given = _SIGNATURE.bind_partial(self, *args, **kwargs).arguments
        options: dict[str, Any] = {name: value for name, value in DEFAULTS.items() if name not in given} | kwargs
        super().__init__(*args, **options)
        REPORT.opened(self)

    def close(self, **kwargs: Any) -> None:
        super().close(**kwargs)
        REPORT.ended(self)

    def __del__(self) -> None:
        if not self.__dict__.get("closed", True) and not self._pool.abandoned:
            REPORT.ended(self)
        super().__del__()


class _InsteadOfSync(_Instead[ObsType, ActType], VectorEnv[ObsType, ActType, np.ndarray]):  # type: ignore[misc, override]
    """The same with the arguments of ``gymnasium.vector.SyncVectorEnv``, whose environments live in this process."""

    stands_for = GymnasiumSync

    def __init__(
        self,
        env_fns: Sequence[Any] | Iterator[Any],
        copy: bool = True,
        observation_mode: Any = "same",
        autoreset_mode: str | AutoresetMode = AutoresetMode.NEXT_STEP,
    ) -> None:
        if isinstance(env_fns, Iterator):  # `gymnasium.make_vec` gives one, before Gymnasium 1.4
            env_fns = list(env_fns)
        self._asks_for_shared_memory = False  # SyncVectorEnv's second argument is another
        super().__init__(env_fns, copy=copy, observation_mode=observation_mode, autoreset_mode=autoreset_mode)

    @property
    def envs(self) -> list[Any]:
        """The environments, where they are in this process.

        Raises:
            AttributeError: They are in worker processes.
        """
        local: list[Any] = list(self.local_envs)
        if len(local) < self.num_envs:
            raise AttributeError(
                "`envs` of a SyncVectorEnv that vecenv has replaced: the environments are in worker processes. Use call(), "
                "get_attr(), set_attr() or exec_func(), or leave SyncVectorEnv as it is (no --sync, install(sync=False))"
            )
        return local


_Instead.__init__.__signature__ = _SIGNATURE  # type: ignore[attr-defined]
for _class, _theirs in ((_Instead, GymnasiumAsync), (_InsteadOfSync, GymnasiumSync)):
    _class.__name__ = _class.__qualname__ = _theirs.__name__
    _class.__module__ = _theirs.__module__  # under this name it is pickled, and found while it is installed
_REPLACED: Final[set[type[Any]]] = set()


def install(*, sync: bool = False, **defaults: Any) -> None:
    """Replace ``gymnasium.vector.AsyncVectorEnv`` by :class:`vecenv.AsyncVectorEnv` in all loaded modules.

    Vector environments that are built from now on are ours, also by ``gymnasium.make_vec(..., vectorization_mode="async")``
    and by modules that have imported the class already. Classes that were derived from it before keep their base, so install
    first and import afterwards; so do classes whose methods use its private parts (``parent_pipes``, ``_add_info``, ...). A
    vector environment with a ``worker`` function is Gymnasium's, as always.

    Args:
        sync: Replace ``gymnasium.vector.SyncVectorEnv`` too.
        **defaults: Options of :class:`vecenv.AsyncVectorEnv` for constructions that do not give them, as
            ``num_workers="auto"``, ``on_failure="restart"``, ``copy=False``. A second call replaces all of them.

    Raises:
        TypeError: No such option; nothing was replaced.
    """
    check_names(defaults, _OPTIONS, "install()")
    uninstall()
    DEFAULTS.update(defaults)
    _put(GymnasiumAsync, _Instead)
    _REPLACED.add(GymnasiumAsync)
    if sync:
        _put(GymnasiumSync, _InsteadOfSync)
        _REPLACED.add(GymnasiumSync)


def uninstall() -> None:
    """Put Gymnasium's classes back. Vector environments that were built meanwhile stay as they are. Idempotent."""
    DEFAULTS.clear()
    _REPLACED.clear()
    _put(_Instead, GymnasiumAsync)
    _put(_InsteadOfSync, GymnasiumSync)


def _put(old: type[Any], new: type[Any]) -> None:
    for module in _modules():
        for name, value in list(vars(module).items()):
            if value is old:
                setattr(module, name, new)


def _modules() -> Iterator[ModuleType]:
    """All loaded modules but those of this package."""
    for name, module in list(sys.modules.items()):
        if isinstance(module, ModuleType) and name.partition(".")[0] != "vecenv":
            yield module
