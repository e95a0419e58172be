"""A process for each candidate, which plays the part of the training program.

One that dies, hangs, prints or changes its own CPU affinity does so in its own process and session. The
parent asks one question at a time and always with a timeout; ending a host ends everything that grew in its
session.
"""

from __future__ import annotations

import math
import multiprocessing
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import cloudpickle

from vecenv.benchmark.runners import Runner

Progress = Callable[[str, int, int], None]  # what is being done, how much of it is done, of how much

START_TIMEOUT = 300.0
WARM_UP = 0.3  # seconds: caches, allocators, and the first reset


class HostFailed(Exception):
    """A candidate died, hung or raised; the text is one line for its row of the table."""


class Unavailable(Exception):
    """A candidate that cannot exist here: a library or an option is missing. Not a failure."""


@dataclass(frozen=True)
class Candidate:
    """Something to measure.

    Attributes:
        name: Its short name, for options and JSON.
        label: What the table calls it.
        builds: One callable a host; each is pickled, called in its host and returns a runner. The limit has
            one host a core, everything else has a single one.
        kind: ``"vecenv"``, ``"gymnasium"``, ``"other"`` or ``"limit"``: its colour in the plots.
        checked: Its trajectories must equal those of ``SyncVectorEnv``.
        alone: It measures something itself while it starts, and is started before all others for that.
        crowd: It has many more processes than there are cores, and lives only while it is measured: on a virtual machine
            the mere existence of so many address spaces slows down whoever runs beside them.
        settle: Seconds to leave the machine alone after its turn, for engines whose idle workers still spin.
        environ: Environment variables that its hosts, and only they, start with.
    """

    name: str
    label: str
    builds: tuple[Callable[[], Runner], ...]
    kind: str = "other"
    checked: bool = False
    alone: bool = False
    crowd: bool = False
    settle: float = 0.0
    environ: Mapping[str, str] = field(default_factory=dict)


def _one_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def _host_main(pipe: Any, blob: bytes, environ: Mapping[str, str], log: str, start_method: str) -> None:
    os.environ.update(environ)
    multiprocessing.set_start_method(start_method, force=True)  # a program's default, not that of a spawned process
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.close(output)
    if hasattr(os, "setsid"):  # Ctrl-C is the parent's business, and one signal can end all that grew here
        os.setsid()
    runner = None
    try:
        runner = cloudpickle.loads(blob)()
        pipe.send(("ok", runner.describe() if hasattr(runner, "describe") else ""))
        while True:
            method, arguments = pipe.recv()
            if method == "close":
                break
            pipe.send(("ok", getattr(runner, method)(*arguments)))
    except EOFError:  # the parent is gone
        pass
    except (Unavailable, NotImplementedError) as error:
        pipe.send(("unavailable", str(error) or type(error).__name__))
    except BaseException as error:
        sys.excepthook(type(error), error, error.__traceback__)
        pipe.send(("failed", _one_line(error)))
    finally:
        pipe.close()
        if runner is not None:
            runner.close()


class _Host:
    """One process, one runner, one question at a time."""

    def __init__(self, build: Callable[[], Runner], environ: Mapping[str, str], log: Path) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self.process = context.Process(
            target=_host_main,
            args=(theirs, cloudpickle.dumps(build), dict(environ), str(log), multiprocessing.get_start_method()),
            daemon=False,
        )
        self.process.start()
        theirs.close()

    def ask(self, method: str, *arguments: Any) -> None:
        try:
            self._pipe.send((method, arguments))
        except OSError:
            raise HostFailed(self._obituary()) from None

    def answer(self, timeout: float) -> Any:
        try:
            if not self._pipe.poll(timeout):
                raise HostFailed(f"gave no answer within {timeout:.0f} s")
            status, value = self._pipe.recv()
        except (EOFError, OSError):
            raise HostFailed(self._obituary()) from None
        if status == "unavailable":
            raise Unavailable(value)
        if status == "failed":
            raise HostFailed(value)
        return value

    def _obituary(self) -> str:
        self.process.join(1.0)
        code = self.process.exitcode
        if code is not None and code < 0:
            return f"its process was killed by {signal.Signals(-code).name}"
        return f"its process ended with exit code {code}"

    def close(self, timeout: float = 10.0) -> None:
        with suppress(OSError):
            self._pipe.send(("close", ()))
        self.process.join(timeout)
        if hasattr(os, "killpg"):  # what is left of its session, in case it could not close properly
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self.process.pid or 0, signal.SIGKILL)
        elif self.process.is_alive():
            self.process.kill()
        self.process.join()
        self.process.close()
        self._pipe.close()


class Live:
    """A candidate with its hosts running. Once something went wrong, ``failed`` or ``missing`` says what."""

    def __init__(self, candidate: Candidate, folder: Path) -> None:
        self.candidate = candidate
        self.log = folder / f"{candidate.name}.log"
        self.failed: str | None = None
        self.missing: str | None = None
        self.description = ""
        self.hosts: list[_Host] = []
        self.start()

    @property
    def usable(self) -> bool:
        return self.failed is None and self.missing is None

    def start(self) -> None:
        """Start its hosts, unless they run."""
        if not self.hosts:
            self.hosts = [_Host(build, self.candidate.environ, self.log) for build in self.candidate.builds]

    def _wake(self) -> bool:
        """Start a crowd that rests, and wait for it; false if nothing had to be started."""
        if not self.usable or self.hosts:
            return False
        self.start()
        self.ready()
        return True

    def rest(self) -> None:
        """End the hosts of a crowd until they are needed again."""
        if self.candidate.crowd:
            self.close()

    def _answers(self, timeout: float) -> list[Any]:
        try:
            return [host.answer(timeout) for host in self.hosts]
        except HostFailed as error:
            self.failed = str(error)
        except Unavailable as error:
            self.missing = str(error)
        self.close()
        return []

    def ready(self) -> None:
        """Wait until every host has built its runner."""
        self.description = "; ".join(filter(None, self._answers(START_TIMEOUT)))

    def ask(self, method: str, *arguments: Any, timeout: float = 60.0) -> list[Any]:
        """Call a method of the runner in every host at once; one result a host, none if a host failed."""
        try:
            for host in self.hosts:
                host.ask(method, *arguments)
        except HostFailed as error:
            self.failed = str(error)
            self.close()
            return []
        return self._answers(timeout)

    def trajectory(self, steps: int) -> list[Any]:
        """The streams of its hosts; none if it failed."""
        self._wake()
        streams = self.ask("trajectory", steps, timeout=START_TIMEOUT) if self.usable else []
        self.rest()
        return streams

    def rate(self, seconds: float) -> float:
        """Units per second over one sample; NaN if the candidate failed."""
        if self._wake() and self.usable:
            self.ask("run", min(seconds, WARM_UP))
        if not self.usable:
            return math.nan
        samples = self.ask("run", seconds, timeout=60 + 10 * seconds)
        if self.candidate.settle:
            time.sleep(self.candidate.settle)
        return sum(sample.rate for sample in samples) if samples else math.nan

    def close(self) -> None:
        hosts, self.hosts = self.hosts, []
        for host in hosts:
            host.close()


@contextmanager
def started(candidates: Sequence[Candidate], progress: Progress | None = None) -> Iterator[list[Live]]:
    """All candidates alive at once, but for crowds, which were started once and rest; nothing is left afterwards."""
    with tempfile.TemporaryDirectory(prefix="vecenv-bench-") as folder:
        lives: list[Live] = []
        try:
            for alone in (True, False):
                first = len(lives)
                for candidate in candidates:
                    if candidate.alone is alone:
                        lives.append(Live(candidate, Path(folder)))  # noqa: PERF401 - one may fail, all must end
                for live in lives[first:]:
                    if progress:
                        progress(f"starting {live.candidate.label}", lives.index(live), len(candidates))
                    live.ready()
                    live.rest()
            order = [candidate.name for candidate in candidates]
            yield sorted(lives, key=lambda live: order.index(live.candidate.name))
        finally:
            for live in lives:
                live.close()
