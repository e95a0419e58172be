"""A process for each candidate, which plays the part of the training program.

One that dies, hangs, prints or changes its own CPU affinity does so in its own process and session. The
parent asks one question at a time and always with a timeout. A host is a
:class:`~vecenv.system.helper_process.HelperProcess`: it dies with the parent, also while it builds an engine, and ending it
ends everything that grew there.
"""

from __future__ import annotations

import math
import multiprocessing
import os
import pickle
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

from vecenv.system.helper_process import HelperProcess
from vecenv.tools.benchmark.runners import Runner

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
            the mere existence of that many address spaces slows down what runs beside them.
        settle: Seconds to leave the machine alone after its turn, for engines whose idle workers still spin.
        environ: Environment variables that its hosts, and only they, start with.
        processes: How many a host of it starts, as far as that is known before.
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
    processes: int = 0


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
    """One process, one runner, one question at a time. To be ended in any case, also if :meth:`start` failed."""

    def __init__(self, build: Callable[[], Runner], environ: Mapping[str, str], log: Path) -> None:
        args = (cloudpickle.dumps(build), dict(environ), str(log), multiprocessing.get_start_method())
        context = multiprocessing.get_context("spawn")
        self._helper = HelperProcess(context, _host_main, args, name="vecenv-bench-host", daemon=False)

    def start(self) -> None:
        self._helper.start()

    @property
    def process(self) -> Any:
        """The host itself, while it has not been ended."""
        return self._helper.process

    def ask(self, method: str, *arguments: Any) -> None:
        try:
            self._helper.pipe.send((method, arguments))
        except ConnectionError:
            raise HostFailed(self._obituary()) from None

    def answer(self, timeout: float) -> Any:
        if not self._helper.wait(time.monotonic() + timeout):
            raise HostFailed(f"gave no answer within {timeout:.0f} s")
        try:
            message = self._helper.receive()
        except EOFError:
            message = b""
        if not message:  # it has ended, though something that it started may hold its pipe
            raise HostFailed(self._obituary())
        status, value = pickle.loads(message)
        if status == "unavailable":
            raise Unavailable(value)
        if status == "failed":
            raise HostFailed(value)
        return value

    def _obituary(self) -> str:
        if not self._helper.has_ended(1.0):
            return "it closed its pipe"
        code = self._helper.exit_code()
        if code is not None and code < 0:
            return f"its process was killed by {signal.Signals(-code).name}"
        return f"its process ended with exit code {code}"

    def ask_to_close(self) -> None:
        with suppress(ConnectionError):
            self._helper.pipe.send(("close", ()))

    def close(self, timeout: float = 10.0) -> None:
        """Wait so long for it to close what it runs, then end it with all that grew there."""
        try:
            if self._helper.process is not None:
                self._helper.has_ended(timeout)
        finally:
            self._helper.end()


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
            try:
                for host in self.hosts:
                    host.start()
            except BaseException:
                self.end()
                raise

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
        """Let its hosts close what they run, all at once, and end them."""
        try:
            for host in self.hosts:
                host.ask_to_close()
            while self.hosts:
                self.hosts[-1].close()
                self.hosts.pop()
        finally:
            self.end()

    def end(self) -> None:
        """End its hosts as they are."""
        while self.hosts:
            self.hosts[-1].close(timeout=0.0)
            self.hosts.pop()


def _start_order(candidates: Sequence[Candidate]) -> list[list[Candidate]]:
    """Who starts together: those that measure something themselves, the others, and then each crowd for itself."""
    together = [c for c in candidates if not c.crowd]
    return [[c for c in together if c.alone], [c for c in together if not c.alone], *([c] for c in candidates if c.crowd)]


@contextmanager
def started(candidates: Sequence[Candidate], progress: Progress | None = None) -> Iterator[list[Live]]:
    """All candidates alive at once, but for crowds, which were started once and rest; nothing is left afterwards.

    After an exception, Ctrl-C among them, hosts are ended at once and not asked.
    """
    with tempfile.TemporaryDirectory(prefix="vecenv-bench-") as folder:
        lives: list[Live] = []
        try:
            for group in _start_order(candidates):
                first = len(lives)
                for candidate in group:
                    lives.append(Live(candidate, Path(folder)))  # noqa: PERF401 - one may fail, all must end
                for live in lives[first:]:
                    if progress:
                        progress(f"starting {live.candidate.label} ({lives.index(live) + 1} of {len(candidates)})", 0, 0)
                    live.ready()
                    live.rest()
            order = [candidate.name for candidate in candidates]
            yield sorted(lives, key=lambda live: order.index(live.candidate.name))
            for live in lives:
                live.close()
        finally:
            for live in lives:
                live.end()
