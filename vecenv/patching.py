"""Replaces Gymnasium's vector environments with vecenv's, in programs that cannot be edited."""

from __future__ import annotations

import abc
import inspect
import sys
import time
import weakref
from collections.abc import Iterator, Mapping
from types import CodeType, FunctionType, ModuleType
from typing import Any, Final

import numpy as np
from gymnasium.core import ActType, ObsType
from gymnasium.vector import VectorEnv

from vecenv.engine.vector_env import AsyncVectorEnv
from vecenv.front.arguments import GymnasiumAsync, GymnasiumSync, check_option_names
from vecenv.link.messages import summary

__all__ = ["DEFAULTS", "REPORT", "PatchReport", "install", "uninstall"]

_SIGNATURE: Final = inspect.signature(AsyncVectorEnv.__init__)
_SYNC_SIGNATURE: Final = inspect.signature(GymnasiumSync.__init__)
_OPTIONS: Final = [name for name in _SIGNATURE.parameters if name not in ("self", "env_fns", "worker")]

DEFAULTS: dict[str, Any] = {}
"""Values for arguments that the program omits."""


class PatchReport:
    """Statistics of the vector environments that were built in place of Gymnasium's in this process.

    Attributes:
        engines, environments: The numbers of vector environments and of environments that were built.
        steps: Environment steps of vector environments that were closed or garbage-collected.
        restarts, failures: The restarts and failures of these vector environments.
        began: ``time.monotonic()`` at the end of the first construction; ``None`` before.
        kept: Names of classes that still derive from Gymnasium's, because they use its internals.
        refused: The error of the latest construction that failed, in one line.
    """

    def __init__(self) -> None:
        self.engines = self.environments = 0
        self.steps = self.restarts = self.failures = 0.0
        self.began: float | None = None
        self.kept: list[str] = []
        self.refused = ""
        self._open: weakref.WeakSet[Any] = weakref.WeakSet()

    def record_opened(self, envs: _AsyncReplacement) -> None:
        """Count a new vector environment."""
        if self.began is None:
            self.began = time.monotonic()
        self.engines += 1
        self.environments += envs.num_envs
        self._open.add(envs)
        envs._reported = False

    def record_ended(self, envs: _AsyncReplacement) -> None:
        """Add the statistics of a vector environment once: when it is closed or collected, or for the final report."""
        if not envs._reported:
            envs._reported = True  # a flag, because garbage collection removes objects from `_open`
            self._open.discard(envs)
            stats = envs.stats()
            self.steps += stats["steps"]
            self.restarts += stats["restarts"]
            self.failures += stats["errors"]

    def __str__(self) -> str:
        for envs in list(self._open):
            self.record_ended(envs)
        more = ""
        if self.kept:
            more = f"; these still derive from Gymnasium's class, as they use its internals: {', '.join(self.kept)}"
        if self.began is None and self.refused:
            return f"no vector environment could be built: {self.refused}{more}"
        if self.began is None:
            sync = "" if GymnasiumSync in _REPLACED else "; --sync replaces SyncVectorEnv too"
            sb3 = ""
            if "stable_baselines3" in sys.modules:
                sb3 = "; Stable-Baselines3's classes are not replaced: use vecenv.adapters.as_sb3"
            return f"no vector environment was built by vecenv in this process{sync}{sb3}{more}"
        seconds = max(time.monotonic() - self.began, 1e-9)
        failed = f"{self.failures:.0f} failure{'s' * (self.failures != 1)}" if self.failures else "nothing failed"
        restarts = f", {self.restarts:.0f} restart{'s' * (self.restarts != 1)}" if self.restarts else ""
        span = f"{seconds:.1f} s from construction to exit"
        rate = f"{self.steps:,.0f} steps in {span}, {self.steps / seconds:,.0f} per second"
        environments = f"{self.environments} environment{'s' * (self.environments != 1)}"
        built = f"{self.engines} vector environment{'s' if self.engines > 1 else ''} of {environments}"
        return f"{built}: {rate}; {failed}{restarts}{more}"


REPORT = PatchReport()
_FUNCTION_ATTRIBUTES: Final = "fget", "fset", "fdel", "__func__", "func"
"""The attributes that hold the functions of properties, class and static methods, cached properties and partial methods."""


def _iter_functions(names: Mapping[str, Any]) -> Iterator[FunctionType]:
    for value in names.values():
        parts = (value, *(getattr(value, name, None) for name in _FUNCTION_ATTRIBUTES))
        yield from (inspect.unwrap(part) for part in parts if isinstance(part, FunctionType))


def _iter_names(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _iter_names(constant)


def _internal_names(gymnasium_class: type[Any]) -> frozenset[str]:
    """Return the names of the internal attributes of Gymnasium's class, which a subclass may use."""
    bodies = [vars(gymnasium_class), vars(VectorEnv)]
    used = {name for body in bodies for function in _iter_functions(body) for name in _iter_names(function.__code__)}
    private = {name for name in used.union(*bodies) if name.startswith("_") and not name.startswith("__")}
    public = {"parent_pipes", "processes", "error_queue", "observations"} if gymnasium_class is GymnasiumAsync else {"envs"}
    return frozenset(private | public)


def _uses_any(body: Mapping[str, Any], names: frozenset[str]) -> bool:
    used = {name for function in _iter_functions(body) for name in _iter_names(function.__code__)}
    return not names.isdisjoint(used.union(body))


class _ReplacementMeta(abc.ABCMeta):
    """A metaclass that makes instances of Gymnasium's class count as instances of its replacement.

    It derives from ``ABCMeta``, so that a subclass may have abstract base classes too.

    A subclass that uses or overrides internals of Gymnasium's class (its pipes, or hooks that it calls, such as
    ``_add_info``) still derives from Gymnasium's class, because vecenv's has no such attributes and calls no such hooks.
    """

    def __new__(cls, name: str, bases: tuple[type[Any], ...], body: dict[str, Any], **keywords: Any) -> Any:
        replaced = {base: vars(base)["replaced_class"] for base in bases if "replaced_class" in vars(base)}
        if body.get("__module__") != __name__ and any(_uses_any(body, _internal_names(kind)) for kind in replaced.values()):
            REPORT.kept.append(name)
            return type(name, tuple(replaced.get(base, base) for base in bases), body, **keywords)
        return super().__new__(cls, name, bases, body, **keywords)

    def __subclasscheck__(cls, subclass: type[Any]) -> bool:
        if (replaced_class := vars(cls).get("replaced_class")) is None:
            return super().__subclasscheck__(subclass)
        # ABCMeta would also check the subclasses of `cls`, but one of them replaces another class
        return type.__subclasscheck__(cls, subclass) or issubclass(subclass, replaced_class)


class _AsyncReplacement(  # type: ignore[misc]
    AsyncVectorEnv[ObsType, ActType], VectorEnv[ObsType, ActType, np.ndarray], metaclass=_ReplacementMeta
):
    """:class:`vecenv.AsyncVectorEnv`, with :data:`DEFAULTS` for omitted arguments.

    ``VectorEnv``, already an indirect base, is repeated as a direct one for libraries that recognise Gymnasium's API by
    ``__bases__`` (skrl).
    """

    replaced_class: type[Any] = GymnasiumAsync
    _reported = True

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        passed = _SIGNATURE.bind_partial(self, *args, **kwargs).arguments
        options: dict[str, Any] = {name: value for name, value in DEFAULTS.items() if name not in passed} | kwargs
        try:
            super().__init__(*args, **options)
        except Exception as error:
            REPORT.refused = summary(error)
            raise
        REPORT.record_opened(self)

    def close(self, **kwargs: Any) -> None:
        super().close(**kwargs)
        REPORT.record_ended(self)

    def __del__(self) -> None:
        if not self.__dict__.get("closed", True) and not self._pool.is_child_copy:
            REPORT.record_ended(self)
        super().__del__()


class _SyncReplacement(_AsyncReplacement[ObsType, ActType], VectorEnv[ObsType, ActType, np.ndarray]):  # type: ignore[misc]
    """A replacement with the arguments of ``gymnasium.vector.SyncVectorEnv``; :data:`DEFAULTS` may set others."""

    replaced_class = GymnasiumSync
    _refuses_finished = True

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        passed = _SYNC_SIGNATURE.bind(self, *args, **kwargs).arguments
        del passed["self"]
        if isinstance(passed["env_fns"], Iterator):  # `gymnasium.make_vec` passes an iterator before Gymnasium 1.4
            passed["env_fns"] = list(passed["env_fns"])
        self._requires_shared_memory = False  # `__new__` mistook the second argument, `copy`, for `shared_memory`
        super().__init__(**passed)

    @property
    def envs(self) -> list[Any]:
        """The environments, if they are in this process.

        Raises:
            AttributeError: Some or all are in worker processes.
        """
        local: list[Any] = list(self.local_envs)
        if len(local) < self.num_envs:
            raise AttributeError(
                "this SyncVectorEnv of vecenv has no `envs`, because the environments are in worker processes. Use call(), "
                "get_attr(), set_attr() or exec_func(), or keep Gymnasium's SyncVectorEnv (no --sync, install(sync=False))"
            )
        return local


_AsyncReplacement.__init__.__signature__ = _SIGNATURE  # type: ignore[attr-defined]
_SyncReplacement.__init__.__signature__ = _SYNC_SIGNATURE  # type: ignore[attr-defined]
for _class, _original in ((_AsyncReplacement, GymnasiumAsync), (_SyncReplacement, GymnasiumSync)):
    _class.__name__ = _class.__qualname__ = _original.__name__
    _class.__module__ = _original.__module__  # pickled under this name, which refers to it while it is installed
_REPLACED: Final[set[type[Any]]] = set()


def install(*, sync: bool = False, **defaults: Any) -> None:
    """Replace ``gymnasium.vector.AsyncVectorEnv`` with :class:`vecenv.AsyncVectorEnv` in all loaded modules.

    This applies to all vector environments that are built from now on, even by modules that have already imported the class
    and by ``gymnasium.make_vec(..., vectorization_mode="async")``. Classes derived from it earlier keep their base, so call
    this before you import them. Classes that use or override its internals (``parent_pipes``, ``_add_info``, ...) keep it
    too. With a ``worker`` function, Gymnasium's own class is still built.

    Args:
        sync: Replace ``gymnasium.vector.SyncVectorEnv`` too.
        **defaults: Options of :class:`vecenv.AsyncVectorEnv` for constructions that omit them, such as
            ``num_workers="auto"``, ``on_failure="restart"``, ``copy=False``. A second call replaces all of them.

    Raises:
        TypeError: There is no such option; nothing was replaced.
    """
    check_option_names(defaults, _OPTIONS, "install()")
    uninstall()
    DEFAULTS.update(defaults)
    _rebind(GymnasiumAsync, _AsyncReplacement)
    _REPLACED.add(GymnasiumAsync)
    if sync:
        _rebind(GymnasiumSync, _SyncReplacement)
        _REPLACED.add(GymnasiumSync)


def uninstall() -> None:
    """Restore Gymnasium's classes. Vector environments that exist already stay as they are. Idempotent."""
    DEFAULTS.clear()
    _REPLACED.clear()
    _rebind(_AsyncReplacement, GymnasiumAsync)
    _rebind(_SyncReplacement, GymnasiumSync)


def _rebind(old: type[Any], new: type[Any]) -> None:
    for module in _loaded_modules():
        for name, value in list(vars(module).items()):
            if value is old:
                setattr(module, name, new)


def _loaded_modules() -> Iterator[ModuleType]:
    """Yield all loaded modules except those of this package."""
    for name, module in list(sys.modules.items()):
        if isinstance(module, ModuleType) and name.partition(".")[0] != "vecenv":
            yield module
