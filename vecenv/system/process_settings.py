"""The settings that all environments of a process share: a long list of them, and a guard that checks a few in workers.

The probe compares the long list between processes (:mod:`vecenv.planning.independence`). In a worker with several
environments, :class:`SettingsGuard` checks those in its ``NAMES`` at runtime. Neither covers the state of C libraries, the
settings of tensorflow, or most of those of jax.
"""

from __future__ import annotations

import decimal
import gc
import hashlib
import importlib
import locale
import logging
import os
import signal
import socket
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any, Final, TypeAlias

import numpy as np

from vecenv.system.generators import switch
from vecenv.system.shared_generators import GENERATORS, SharedStates, find_draws, read_states

Settings: TypeAlias = dict[str, tuple[Any, ...]]
"""Name -> a value that processes can compare and, for an object, its id."""

ONE_PER_PROCESS: Final = ("pygame's window", "the interval timer")
_WATCHED_SIGNALS: Final = ("SIGINT", "SIGTERM", "SIGALRM", "SIGUSR1", "SIGUSR2", "SIGCHLD")
_WATCHED_CALLS: Final = frozenset({"os.chdir", "os.putenv", "os.unsetenv"})


def read_settings(modules: Iterable[str] = ()) -> Settings:
    """Import ``modules``, and then return the settings of this process."""
    for name in modules:
        with suppress(Exception):
            importlib.import_module(name)
    policy = getattr(sys.modules.get("asyncio.events"), "_event_loop_policy", None)
    if type(policy).__name__ == "_UnixDefaultEventLoopPolicy":  # the default, created at its first use
        policy = None
    os.umask(umask := os.umask(0o22))
    settings: Settings = {f"environment variable {key}": (value,) for key, value in os.environ.items()}
    signals = signal.valid_signals()
    settings |= {f"handler of signal {int(number)}": _identify(signal.getsignal(number)) for number in signals}
    settings |= {
        "decimal context": (repr([getattr(decimal.getcontext(), name) for name in ("prec", "rounding", "traps")]),),
        "event loop policy": _identify(policy),
        "garbage collection": (gc.isenabled(),),
        "locale": (locale.setlocale(locale.LC_ALL),),
        "numpy error handling": (repr(np.geterr()),),
        "numpy print options": (repr(np.get_printoptions()),),
        "recursion limit": (sys.getrecursionlimit(),),
        "root logger": (repr([type(handler) for handler in logging.root.handlers]),),
        "socket timeout": (socket.getdefaulttimeout(),),
        "sys.excepthook": _identify(sys.excepthook),
        "sys.path": (repr(sys.path),),
        "sys.stderr": _identify(sys.stderr),
        "sys.stdout": _identify(sys.stdout),
        "threading.excepthook": _identify(threading.excepthook),
        "umask": (umask,),
        "warning filters": (repr(warnings.filters),),
        "working directory": (_working_directory(),),
    }
    settings |= {GENERATORS[name]: (hashlib.blake2b(state).hexdigest(),) for name, state in read_states().items()}
    return settings | _read_library_settings()


def _read_library_settings() -> Settings:
    """Return the settings of loaded libraries, and of the interval timer if it runs."""
    settings: Settings = {}
    torch: Any = sys.modules.get("torch")
    if hasattr(torch, "get_rng_state"):
        settings["torch's settings"] = (f"{torch.get_default_dtype()}, {torch.get_num_threads()} threads",)
    config: Any = getattr(sys.modules.get("jax"), "config", None)
    if hasattr(config, "jax_enable_x64"):
        settings["jax_enable_x64"] = (config.jax_enable_x64,)
    if signal.getitimer(signal.ITIMER_REAL)[0]:
        settings["the interval timer"] = ("running",)
    pyplot: Any = sys.modules.get("matplotlib.pyplot")
    if hasattr(pyplot, "get_fignums") and pyplot.get_fignums():
        settings["pyplot's figures"] = (tuple(pyplot.get_fignums()),)
    display: Any = sys.modules.get("pygame.display")
    if hasattr(display, "get_surface") and display.get_surface():
        settings["pygame's window"] = ("open",)
    return settings


def _working_directory() -> str:
    """Return the working directory, or an empty string if it was deleted."""
    try:
        return os.getcwd()
    except FileNotFoundError:
        return ""


def _identify(value: Any) -> tuple[str, int]:
    """Return the name and the id of a function or other object."""
    if isinstance(value, signal.Handlers):
        return value.name, id(value)
    return getattr(value, "__qualname__", type(value).__qualname__), id(value)


class SettingsGuard:
    """A check for settings that environments change while several of them share this process.

    A comparison takes 0.1 milliseconds, so it is due only at resets, once per second at most, and after changes of the
    working directory or of environment variables.

    Args:
        name_running: Returns the name of the running environment, or an empty string.
        seconds: The minimum time between two comparisons at resets.

    Attributes:
        due: True if a comparison has to follow the current request.
        first_reset: True until an environment has been reset for the first time.
        draws: Names of the shared generators that were drawn from between the last two comparisons; empty if modules were
            imported meanwhile.
    """

    NAMES: Final = (
        "working directory", "environment variables", "numpy error handling", "signal handlers", "warning filters",
        "decimal precision", "sys.stdout", "sys.stderr", "threading.excepthook", "interval timer", "socket timeout",
        "torch's default dtype", "pygame's window",
    )  # fmt: skip

    def __init__(self, name_running: Callable[[], str] = str, seconds: float = 1.0) -> None:
        self.due, self.first_reset = False, True
        self._name_running, self._seconds = name_running, seconds
        self._changed_by = ""
        self.draws: list[str] = []
        self._generators: SharedStates = {}
        self.restart()

    def watch_calls(self) -> None:
        """Make a comparison due after each change of the working directory or an environment variable.

        The hook cannot be removed.
        """

        def hook(event: str, _: Any) -> None:
            if event in _WATCHED_CALLS:
                self.due, self._changed_by = True, self._name_running()

        sys.addaudithook(hook)

    def on_reset(self) -> None:
        """Make a comparison due unless the last one was too recent."""
        if time.monotonic() >= self._next_check:
            self.due = True

    def restart(self) -> None:
        """Make the current settings the basis of the next comparison."""
        self._module_count, self._state = len(sys.modules), self._read()
        self._generators = {} if switch.users else read_states()  # with their own generators, environments share none
        self._next_check = time.monotonic() + self._seconds
        self.due, self._changed_by = False, ""

    def find_changes(self) -> list[tuple[str, str]]:
        """Return the settings that changed since the last comparison, each with the environment that changed it, if known.

        If modules were imported since, the changes are attributed to the imports and not returned.
        """
        before, module_count, changed_by = self._state, self._module_count, self._changed_by
        self.draws = [] if switch.users else find_draws(self._generators)
        self.restart()
        if len(sys.modules) != module_count:
            self.draws = []
            return []
        pairs = zip(self.NAMES, before, self._state, strict=True)
        return [(name, changed_by if name in self.NAMES[:2] else "") for name, old, new in pairs if old != new]

    @staticmethod
    def _read() -> tuple[Any, ...]:
        torch: Any = sys.modules.get("torch")
        display: Any = sys.modules.get("pygame.display")
        environ: Any = os.environ
        numbers = (getattr(signal, name) for name in _WATCHED_SIGNALS)
        return (
            _working_directory(), environ._data.copy(), np.geterr(), [signal.getsignal(number) for number in numbers],
            warnings.filters[:], decimal.getcontext().prec, sys.stdout, sys.stderr, threading.excepthook,
            signal.getitimer(signal.ITIMER_REAL)[0] > 0, socket.getdefaulttimeout(),
            torch.get_default_dtype() if hasattr(torch, "get_default_dtype") else None,
            bool(display.get_surface()) if hasattr(display, "get_surface") else None,
        )  # fmt: skip


def describe_shared_clients(num_envs: int) -> str:
    """Return a description of the problem if environments share a physics client of pybullet, or an empty string.

    Calls without ``physicsClientId`` go to the first client, so all bodies are in that one, although each environment has
    connected a client of its own. Call this after all environments have been reset.
    """
    bullet: Any = sys.modules.get("pybullet")
    if not hasattr(bullet, "getNumBodies"):
        return ""
    clients = [client for client in range(4 * num_envs) if bullet.isConnected(physicsClientId=client)]
    used = [client for client in clients if bullet.getNumBodies(physicsClientId=client)]
    if used != [0] or len(clients) < num_envs:
        return ""
    return f"pybullet has {len(clients)} physics clients in this process, but all bodies are in the first"
