"""A program that removes the names that another system lacks, and prints how the package behaves as a line of JSON.

The variable ``IMITATED_SYSTEM`` is ``windows`` or ``macos``. Names are removed from the standard library before the package
is imported, here and in every process that imports this file again. This proves only that the package uses none of these
names; other differences between the systems remain untested.
"""

from __future__ import annotations

import functools
import json
import multiprocessing.connection
import multiprocessing.pool
import os
import runpy
import select
import signal
import subprocess  # noqa: F401 - its import needs the names
import sys
import warnings
from typing import Any

import cloudpickle  # noqa: F401 - its import needs the names
import gymnasium
import numpy as np

LINUX_ONLY = {
    os: "memfd_create MFD_CLOEXEC MFD_ALLOW_SEALING pidfd_open sched_getaffinity sched_setaffinity posix_fallocate eventfd",
    select: "epoll",
    signal: "pidfd_send_signal SIGRTMIN SIGRTMAX",
}
POSIX_ONLY = {
    os: "fork forkpty register_at_fork setsid getpgrp getpgid setpgid killpg getuid geteuid sysconf statvfs set_blocking "
    "pread pwrite mkfifo getloadavg wait waitid WNOHANG uname O_CLOEXEC O_NONBLOCK O_ASYNC",
    select: "poll",
    signal: "SIGALRM SIGKILL SIGUSR1 SIGUSR2 SIGCHLD SIGHUP SIGSTOP SIGCONT SIGQUIT SIGBUS pthread_sigmask pthread_kill "
    "alarm setitimer siginterrupt sigwait",
}


def imitate_system(system: str) -> None:
    """Remove the names that ``system`` lacks, and set its ``sys.platform`` and start method."""
    for missing in (LINUX_ONLY, POSIX_ONLY) if system == "windows" else (LINUX_ONLY,):
        for module, names in missing.items():
            for name in names.split():
                vars(module).pop(name, None)
    if system == "windows":
        sys.modules["fcntl"] = sys.modules["resource"] = None  # type: ignore[assignment]
        multiprocessing.get_all_start_methods = lambda: ["spawn"]  # type: ignore[method-assign, assignment]
    multiprocessing.set_start_method("spawn", force=True)
    sys.platform = {"windows": "win32", "macos": "darwin"}[system]


imitate_system(os.environ["IMITATED_SYSTEM"])

import vecenv  # noqa: E402
from vecenv.system import cores, supervision  # noqa: E402

make_cartpole = functools.partial(gymnasium.make, "CartPole-v1")
OPTIONS: dict[str, dict[str, Any]] = {
    "default": {},
    "two workers": {"num_workers": 2},
    "auto with restarts": {"num_workers": "auto", "on_failure": "restart"},
    "auto with a timeout": {"num_workers": "auto", "step_timeout": 1.0},
    "use_caller": {"num_workers": 0, "use_caller": True},
    "dummy_env": {"num_workers": 0, "worker_options": vecenv.WorkerOptions(dummy_env=False)},
    "no workers": {"num_workers": 0},
    "auto": {"num_workers": "auto"},
}


def try_steps(build: Any) -> str | list[Any]:
    """Return the error text, or the number of workers and the sum of the observations of a reset and ten steps."""
    try:
        envs = build()
    except NotImplementedError as error:
        return str(error)
    try:
        total = float(np.sum(envs.reset(seed=5)[0]))
        for step in range(10):
            total += float(np.sum(envs.step(np.array([step % 2] * 3))[0]))
        return [envs.num_workers, total]
    finally:
        envs.close()


def describe_plan(**options: Any) -> str:
    try:
        return str(vecenv.plan(make_cartpole, 3, **options))
    except NotImplementedError as error:
        return str(error)


def print_report() -> None:
    warnings.simplefilter("ignore")
    report = {
        "engines": {
            name: try_steps(functools.partial(vecenv.AsyncVectorEnv, [make_cartpole] * 3, **options))
            for name, options in OPTIONS.items()
        },
        "make_vec": try_steps(lambda: vecenv.make_vec("CartPole-v1", 3)),
        "serial": try_steps(lambda: vecenv.make_vec("CartPole-v1", 3, backend="serial")),
        "plan": describe_plan(),
        "isolated plan": describe_plan(use_caller=False),
        "spins": [cores.placements(1)[1], *(placement.spin for placement in cores.placements(1)[0])],
        "stack signals": supervision.STACK_SIGNALS,
    }
    print(json.dumps(report))


if __name__ == "__main__":
    if sys.argv[1:]:  # arguments of the command line of the package
        sys.argv[0] = "vecenv"
        runpy.run_module("vecenv", run_name="__main__")
    else:
        print_report()
