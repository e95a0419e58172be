"""``vecenv doctor``: what decides reliability on this machine, and what to do about what is not right.

Every fact is one :class:`Finding`, made by one small function that looks at one thing and changes nothing. Nothing is
imported to find out whether it is installed, and no start method is fixed by asking for it. What a system does not have
(``/proc``, control groups, ``resource``) is a finding too, not an error. What is for worker processes only is left out
where there can be none. The findings are printed without any library, since one of them is that libraries are missing.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json
import multiprocessing
import os
import platform
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

from vecenv.engine.handles import DESCRIPTORS, SPARE_DESCRIPTORS
from vecenv.errors import how_to_install
from vecenv.shm.arena import available_memory, memory_limits
from vecenv.system.cores import usable_cores
from vecenv.system.spawning import why_no_processes
from vecenv.tools import fitted

if sys.platform != "win32":
    import resource

Verdict = Literal["ok", "warn", "bad", "none"]

MIB: Final = 2**20
GIB: Final = 2**30
LEAST_MEMORY: Final = 8 * MIB
"""Memory that a forked Python process takes for itself at the very least."""
FLEETS: Final = (64, 256, 1024)
_TORCH_FIRST: Final = "install torch, in its CPU build where there is no GPU (docs/clients.md)"
_BACKENDS: Final = {
    # distribution -> what brings it, and what for
    "envpool": (how_to_install("envpool"), "EnvPool's C++ threads"),
    "jax": ("pip install jax", "engines inside jit, environments on an accelerator"),
    "brax": ("pip install brax", "Brax environments"),
    "playground": ("pip install playground", "MuJoCo Playground environments"),
    "ray": ("pip install ray", "several machines"),
    "torch": (_TORCH_FIRST, "gradients for PyTorch"),
    "stable-baselines3": (f"{_TORCH_FIRST}, then pip install stable-baselines3", "the SB3 adapter"),
    "tianshou": (f"{_TORCH_FIRST}, then pip install tianshou", "the Tianshou adapter"),
    "torchrl": (f"{_TORCH_FIRST}, then pip install torchrl", "the TorchRL adapter"),
    "pettingzoo": ("pip install pettingzoo", "multi-agent environments"),
}
_BENCH: Final = ("rich", "matplotlib", "pillow", "psutil")
"""Of the extra ``bench``: what the commands need. The rest of it are environments."""
_NEEDED: Final = ("gymnasium", "numpy", "cloudpickle")


@dataclass(frozen=True, slots=True)
class Finding:
    """One fact about this machine.

    Attributes:
        name: What was looked at.
        value: What was found.
        verdict: ``"ok"``; ``"warn"``: works, and will cost something; ``"bad"``: vecenv will not work well
            here; ``"none"``: optional, and not there.
        advice: What to do about it; empty if nothing.
    """

    name: str
    value: str
    verdict: Verdict = "ok"
    advice: str = ""


def examine() -> list[Finding]:
    """Look at everything. Starts no process and takes milliseconds."""
    findings: list[Finding] = []
    for look in _LOOKS:
        try:
            findings.extend(look())
        except Exception as error:  # a machine odd enough to break one look still deserves the others
            name = look.__name__.strip("_").replace("_", " ")
            findings.append(Finding(name, f"could not be examined: {type(error).__name__}: {error}", "warn"))
    return findings


def main(as_json: bool = False) -> int:
    """Print the findings.

    Args:
        as_json: One JSON object instead of a table: ``{"verdict": ..., "findings": [...]}``.

    Returns:
        The exit code: 1 if any verdict is ``"bad"``, else 0.
    """
    findings = examine()
    verdicts = {finding.verdict for finding in findings}
    worst: Verdict = "bad" if "bad" in verdicts else "warn" if "warn" in verdicts else "ok"
    if as_json:
        print(json.dumps({"verdict": worst, "findings": [dataclasses.asdict(f) for f in findings]}, indent=2))
    else:
        width = max(len(finding.name) for finding in findings)
        for finding in findings:
            mark = "-" if finding.verdict == "none" else finding.verdict
            print(fitted(f"{mark:<4}  {finding.name:<{width}}  {finding.value}"))
            if finding.advice:
                print(fitted(f"      {'':<{width}}  -> {finding.advice}"))
        bad, warn = (sum(finding.verdict == verdict for finding in findings) for verdict in ("bad", "warn"))
        fine = "Everything that vecenv relies on works here."
        print(f"{bad} bad, {warn} to think about." if bad or warn else fine)
    return 1 if worst == "bad" else 0


# --- the looks ----------------------------------------------------------------------------------


def _python() -> Iterator[Finding]:
    python, system = f"{platform.python_implementation()} {platform.python_version()}", platform.system()
    gil = getattr(sys, "_is_gil_enabled", lambda: True)()
    yield Finding("python", f"{python} on {system} {platform.release()}{'' if gil else ', free-threaded'}")


def _workers() -> Iterator[Finding]:
    why = why_no_processes()
    if why is not None:
        advice = "num_workers=0 and \"auto\" step environments in this process; backend='envpool' has threads"
        yield Finding("workers", f"no processes: {why}", "bad", advice)
    elif sys.platform == "linux":
        yield Finding("workers", "processes")
    else:
        advice = (
            "what only Linux has is missing: the stack of a worker that hangs, the end of helpers in sessions of their own, "
            "workers that poll, each on a core of its own"
        )
        yield Finding("workers", "processes, by what every POSIX system has", "warn", advice)


def _start_methods() -> Iterator[Finding]:
    methods = multiprocessing.get_all_start_methods()
    default = multiprocessing.get_start_method(allow_none=True) or methods[0]  # asking must not decide
    yield Finding("start methods", f"{', '.join(sorted(methods))}; default {default}")


def _system_calls() -> Iterator[Finding]:
    if why_no_processes() is not None:  # there is no other process to share with or to wait for
        return
    lost = "shared memory falls back to an unlinked file in /dev/shm, bounded by its size, or else among temporary files"
    forbidden = Finding("memfd", "refused", "bad", "the sandbox forbids memfd_create; allow the system call")
    yield _system_call(
        "memfd_create", lambda: os.memfd_create("vecenv-doctor", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING), lost, forbidden
    )
    lost = "deaths are looked for 20 times per second; signals go to process ids"
    forbidden = Finding("pidfd", "refused", "warn", f"{lost}; Linux 5.3 or a laxer sandbox would have it")
    yield _system_call("pidfd_open", lambda: os.pidfd_open(os.getpid()), lost, forbidden)


def _system_call(function: str, call: Callable[[], int], lost: str, refused: Finding) -> Finding:
    if not hasattr(os, function):
        return Finding(refused.name, "not available", "warn", lost)
    try:
        os.close(call())
    except OSError as error:
        return dataclasses.replace(refused, value=f"refused: {error}")
    return Finding(refused.name, "works")


def _dev_shm() -> Iterator[Finding]:
    """Memory comes from ``memfd`` where there is that."""
    if why_no_processes() is not None or hasattr(os, "memfd_create"):
        return
    try:
        state = os.statvfs("/dev/shm")
    except (OSError, AttributeError):
        yield Finding("/dev/shm", "does not exist", "warn", "shared memory is in temporary files")
        return
    size, free = (blocks * state.f_frsize for blocks in (state.f_blocks, state.f_bavail))
    advice = "observations live here; in Docker, run with --shm-size or --ipc=host"
    yield _graded("/dev/shm", f"{_bytes(size)}, {_bytes(free)} free", free, advice, bad=0, warn=256 * MIB)


def _graded(name: str, value: str, there: float, advice: str, *, bad: float, warn: float) -> Finding:
    """A finding by how much of something there is: bad below one bound, a warning below another."""
    if there >= warn:
        return Finding(name, value)
    return Finding(name, value, "bad" if there < bad else "warn", advice)


def _memory() -> Iterator[Finding]:
    free, limits = _free_memory(), list(memory_limits())
    if free is None:
        yield Finding("memory", "not known on this system")
        return
    value = f"{_bytes(free)} available"
    advice = "a worker process needs 50 to 300 MB of its own; the kernel kills a process when memory runs out"
    if limits:
        group, left, limit = min(limits, key=lambda limit: limit[1])
        value += f"; control group {group} leaves {_bytes(left)} of {_bytes(limit)}"
        advice = "raise the memory limit of the container or job, or use fewer workers"
    yield _graded("memory", value, free, advice, bad=256 * MIB, warn=GIB)


def _free_memory() -> int | None:
    """What the system and all control groups leave; ``None`` where it is not known."""
    known = [number for number in (available_memory(), *(limit[1] for limit in memory_limits())) if number is not None]
    return min(known, default=None)


def _open_files() -> Iterator[Finding]:
    if sys.platform == "win32":
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        yield Finding("open files", "unlimited")
        return
    used = _open_files_for(0)
    needs = {workers: _open_files_for(workers) for workers in FLEETS}
    value = f"limit {soft}, {used - SPARE_DESCRIPTORS} in use: about {max((soft - used) // DESCRIPTORS, 0)} workers; "
    value += ", ".join(f"{workers} need {need}" for workers, need in needs.items())
    highest = "no limit" if hard == resource.RLIM_INFINITY else str(hard)
    advice = f"raise it with `ulimit -n {2 * needs[FLEETS[-1]]}` (possible up to: {highest}), or use fewer workers"
    yield _graded("open files", value, soft, advice, bad=needs[FLEETS[0]], warn=needs[FLEETS[1]])


def _open_files_for(workers: int) -> int:
    """How many this process needs with that many workers, those that are open now included."""
    return len(os.listdir("/dev/fd")) - 1 + workers * DESCRIPTORS + SPARE_DESCRIPTORS


def _processes() -> Iterator[Finding]:
    found = _process_limit()
    if found is None:
        yield Finding("processes", "no limit")
        return
    advice = f"every worker is a process, and its threads count as well; the limit is {found[1]}"
    yield _graded("processes", f"at most {found[0]}", found[0], advice, bad=FLEETS[0], warn=FLEETS[1])


def _process_limit() -> tuple[int, str] | None:
    """The lowest limit of processes, and where it is set."""
    limits: list[tuple[int, str]] = []
    if sys.platform != "win32":
        soft = resource.getrlimit(resource.RLIMIT_NPROC)[0]
        if soft != resource.RLIM_INFINITY and os.getuid() != 0:  # root is not held to it
            limits.append((soft, "ulimit -u"))
    group = _read("/sys/fs/cgroup/pids.max").strip() or _read("/sys/fs/cgroup/pids/pids.max").strip()
    kernel = _read("/proc/sys/kernel/pid_max").strip()
    for number, where in (
        (group, "the control group's pids.max, `docker run --pids-limit`"),
        (kernel, "the kernel's, `sysctl kernel.pid_max`"),
    ):
        if number.isdigit():
            limits.append((int(number), where))
    return min(limits, default=None)


def shortage(processes: int, workers: int = 0) -> str | None:
    """Why this machine cannot hold that many processes at once, or ``None`` if nothing is known against it.

    Args:
        processes: All of them.
        workers: The most that are workers of one program, which needs open files for each.
    """
    limit = _process_limit()
    if limit is not None and processes > limit[0]:
        return f"{processes} processes are more than the {limit[0]} that can be ({limit[1]})"
    if sys.platform != "win32":
        soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        need = _open_files_for(workers)
        if soft != resource.RLIM_INFINITY and need > soft:
            return f"{workers} workers of one program need {need} open files, and the limit is {soft} (ulimit -n)"
    free = _free_memory()
    if free is not None and processes * LEAST_MEMORY > free:
        need_text = f"{processes} processes need {_bytes(processes * LEAST_MEMORY)} of memory or more"
        return f"{need_text}, and {_bytes(free)} are available"
    return None


def _cores() -> Iterator[Finding]:
    usable, there = usable_cores(), os.cpu_count() or 1
    value = f"{usable} of {there} usable"
    if usable == 1:
        advice = "more than one worker only takes turns here; num_workers=0 is faster for anything but sleeping environments"
        yield Finding("cores", value, "warn", advice)
    elif usable < there:
        advice = "libraries that count cores start too many threads: threads_per_worker=1 keeps theirs in bounds"
        yield Finding("cores", f"{value} (affinity or a quota of the control group)", "ok", advice)
    else:
        yield Finding("cores", value)


def _packages() -> Iterator[Finding]:
    for name in _NEEDED:
        version = _version(name)
        if version is None:
            yield Finding(name, "not installed", "bad", f"pip install {name}")
        else:
            yield Finding(name, version)
    for name, (command, purpose) in _BACKENDS.items():
        version = _version(name)
        if version is None:
            yield Finding(name, "not installed", "none", f"for {purpose}: {command}")
        else:
            yield Finding(name, f"{version} ({purpose})")
    versions = {name: _version(name) for name in _BENCH}
    missing = [name for name, version in versions.items() if version is None]
    purpose = "vecenv bench, watch and top"
    if missing:
        yield Finding("extra bench", f"without {', '.join(missing)}", "none", f"for {purpose}: {how_to_install('bench')}")
    else:
        yield Finding("extra bench", f"{', '.join(f'{name} {version}' for name, version in versions.items())} ({purpose})")


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


_LOOKS: tuple[Callable[[], Iterator[Finding]], ...] = (
    *(_python, _workers, _start_methods, _system_calls, _dev_shm, _memory, _open_files, _processes, _cores, _packages),
)


def _read(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""


def _bytes(number: int) -> str:
    return f"{number / GIB:.1f} GiB" if number >= GIB else f"{number / MIB:.0f} MiB"
