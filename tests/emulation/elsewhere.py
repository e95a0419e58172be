"""The package as it is on another system: ``VECENV_EMULATE=macos PYTHONPATH=tests/emulation pytest ...``, or ``windows``.

Modules of ``vecenv`` get builtins of their own, and with them an ``import`` and an ``open`` that give what the other system
has: ``os`` without ``memfd_create``, ``select`` without ``epoll``, no ``/proc``. Tests and all other libraries keep the real
thing, so that a test can still look into ``/proc`` for what the package left there. The start methods are those of the other
system for everybody; ``VECENV_EMULATE_START=forkserver`` makes another one the default, for a quick look.

What is emulated is what is *missing*. How the other system does what both have (its pipes, its scheduler, its signals) is
not, and nothing here stands in for a run on a real one.
"""

from __future__ import annotations

import builtins
import contextlib
import ctypes
import errno
import io
import os
import pathlib
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from types import ModuleType
from typing import Any

_LINUX_ONLY = {
    "os": {
        "memfd_create", "MFD_CLOEXEC", "MFD_ALLOW_SEALING", "pidfd_open", "sched_getaffinity", "sched_setaffinity", "waitid",
        "posix_fallocate", "eventfd", "eventfd_read", "eventfd_write", "pipe2", "getrandom", "splice", "O_TMPFILE",
    },
    "select": {"epoll", "EPOLLIN", "EPOLLOUT"},
    "signal": {"pidfd_send_signal", "SIGRTMIN", "SIGRTMAX", "sigtimedwait", "sigwaitinfo"},
    "fcntl": {
        "F_ADD_SEALS", "F_GET_SEALS", "F_SEAL_SHRINK", "F_SEAL_GROW", "F_SEAL_SEAL", "F_SEAL_WRITE", "F_SETSIG", "F_GETSIG",
    },
}  # fmt: skip
_POSIX_ONLY = {
    "os": {
        "fork", "forkpty", "register_at_fork", "setsid", "getpgrp", "getpgid", "setpgid", "killpg", "getuid", "geteuid",
        "sysconf", "statvfs", "set_blocking", "pread", "pwrite", "mkfifo", "getloadavg", "wait", "WNOHANG", "uname",
        "O_CLOEXEC", "O_NONBLOCK", "O_ASYNC",
    },
    "select": {"poll", "POLLIN", "POLLOUT", "POLLHUP"},
    "signal": {
        "SIGALRM", "SIGKILL", "SIGUSR1", "SIGUSR2", "SIGCHLD", "SIGHUP", "SIGSTOP", "SIGCONT", "SIGQUIT", "SIGBUS",
        "SIG_BLOCK", "SIG_UNBLOCK", "SIG_SETMASK", "pthread_sigmask", "pthread_kill", "alarm", "setitimer", "siginterrupt",
        "sigwait",
    },
    "faulthandler": {"register", "unregister"},
}  # fmt: skip


@dataclass(frozen=True)
class World:
    """Another system.

    Attributes:
        platform: Its ``sys.platform``.
        missing: By module, names that it has not.
        without: Modules that it has not.
        hidden: Paths that it has not, with all below them.
    """

    platform: str
    missing: dict[str, set[str]]
    without: set[str] = field(default_factory=set)
    hidden: tuple[str, ...] = ("/proc", "/sys/fs/cgroup", "/dev/shm")


WORLDS = {
    "macos": World("darwin", _LINUX_ONLY),
    "windows": World(
        "win32",
        {module: _LINUX_ONLY.get(module, set()) | _POSIX_ONLY.get(module, set()) for module in {*_LINUX_ONLY, *_POSIX_ONLY}},
        {"fcntl", "resource", "termios", "tty", "pty", "pwd", "grp"},
        ("/proc", "/sys/fs/cgroup", "/dev/shm", "/dev/fd"),
    ),
}


def install(name: str) -> None:
    """From now on modules that are imported are those of this world."""
    sys.meta_path.insert(0, _Finder(Stage(WORLDS[name])))  # type: ignore[arg-type]


class Without(ModuleType):
    """A module that looks like another one, but for some names."""

    def __init__(self, real: ModuleType, missing: set[str], instead: dict[str, Any]) -> None:
        super().__init__(real.__name__)
        self.__dict__.update(instead)
        self._real, self._missing = real, missing

    def __getattr__(self, name: str) -> Any:
        if name in self._missing:
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}, as on the system that is emulated")
        return getattr(self._real, name)

    def __dir__(self) -> list[str]:
        return sorted(set(dir(self._real)) - self._missing)


class Stage:
    """What modules of the package find when they look around."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.builtins = {**vars(builtins), "__import__": self._import, "open": self._refusing(builtins.open)}
        self._modules: dict[str, Without] = {}

    def _import(self, name: str, globals: Any = None, locals: Any = None, fromlist: Any = (), level: int = 0) -> Any:
        if level == 0 and name.partition(".")[0] in self.world.without:
            raise ModuleNotFoundError(f"No module named {name!r}, as on the system that is emulated", name=name)
        module = builtins.__import__(name, globals, locals, fromlist, level)
        if level or not isinstance(module, ModuleType):
            return module
        if module.__name__ not in self._modules:
            instead = self._instead(module.__name__)
            missing = self.world.missing.get(module.__name__, set())
            if not instead and not missing:
                return module
            self._modules[module.__name__] = Without(module, missing, instead)
        return self._modules[module.__name__]

    def _instead(self, name: str) -> dict[str, Any]:
        """Names of a module that are there and do something else."""
        hides = self._refusing
        if name == "sys":
            return {"platform": self.world.platform}
        if name == "os":
            functions = ("open", "listdir", "scandir", "stat", "statvfs", "readlink", "access")
            there = [function for function in functions if function not in self.world.missing["os"]]
            tests = {test: self._false(getattr(os.path, test)) for test in ("exists", "lexists", "isdir", "isfile")}
            found: dict[str, Any] = {function: hides(getattr(os, function)) for function in there}
            found["path"] = Without(os.path, set(), tests)
            if self.world.platform == "win32":
                found["unlink"] = found["remove"] = _unlink_unless_open
            return found
        if name == "io":
            return {"FileIO": hides(io.FileIO), "open": hides(io.open)}
        if name == "pathlib":
            return {"Path": self._path()}
        if name == "ctypes":
            return {"CDLL": _dll_of(self.world)}
        return {}

    def _is_hidden(self, path: Any) -> bool:
        if not isinstance(path, (str, bytes, os.PathLike)):
            return False
        text = os.path.normpath(os.fsdecode(path))
        return any(text == place or text.startswith(f"{place}/") for place in self.world.hidden)

    def _refusing(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def refuse(path: Any = ".", *args: Any, **kwargs: Any) -> Any:
            if self._is_hidden(path):
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
            return function(path, *args, **kwargs)

        return refuse

    def _false(self, function: Callable[..., Any]) -> Callable[..., Any]:
        return lambda path: not self._is_hidden(path) and function(path)

    def _path(self) -> type[pathlib.Path]:
        refuse = self._refusing(lambda path: None)

        class Path(type(pathlib.Path())):  # type: ignore[misc]
            def open(self, *args: Any, **kwargs: Any) -> Any:
                refuse(self)
                return super().open(*args, **kwargs)

            def stat(self, **kwargs: Any) -> Any:
                refuse(self)
                return super().stat(**kwargs)

            def iterdir(self) -> Iterator[pathlib.Path]:
                refuse(self)
                return super().iterdir()

        return Path


def _dll_of(world: World) -> type[ctypes.CDLL]:
    class CDLL(ctypes.CDLL):
        def __init__(self, name: str | None, *args: Any, **kwargs: Any) -> None:
            if name is None and world.platform == "win32":
                raise TypeError("LoadLibrary() argument 1 must be str, not None")
            super().__init__(name, *args, **kwargs)  # type: ignore[arg-type]

        def __getattr__(self, name: str) -> Any:
            if name == "prctl":
                raise AttributeError("dlsym: symbol not found, as on the system that is emulated")
            return super().__getattr__(name)

    return CDLL


def _unlink_unless_open(path: Any, **kwargs: Any) -> None:
    """Windows refuses to delete what is open."""
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if os.readlink(f"/proc/self/fd/{name}") == os.path.realpath(path):
                raise PermissionError(errno.EACCES, "The process cannot access the file: it is being used", path) from None
    os.unlink(path, **kwargs)


class _Finder:
    """Finds the modules that are to see the other world, and leaves all others to others."""

    def __init__(self, stage: Stage) -> None:
        self._stage = stage

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name.partition(".")[0] != "vecenv" and name != "multiprocessing.context":
            return None
        spec = PathFinder.find_spec(name, path, target)
        if spec is not None and isinstance(spec.loader, SourceFileLoader):
            spec.loader = _Loader(name, spec.loader.path, self._stage)
        return spec


class _Loader(SourceFileLoader):
    def __init__(self, name: str, path: str, stage: Stage) -> None:
        super().__init__(name, path)
        self._stage = stage

    def exec_module(self, module: ModuleType) -> None:
        module.__dict__["__builtins__"] = self._stage.builtins
        super().exec_module(module)
        default = os.environ.get("VECENV_EMULATE_START")
        if default and module.__name__ == "multiprocessing.context":
            module._default_context = module.DefaultContext(module._concrete_contexts[default])
