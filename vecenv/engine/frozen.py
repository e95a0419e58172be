"""Frozen copies of environments, whatever they are made of: their processes, copied by ``fork``.

``freeze`` lets a worker copy itself. The copy waits, and shares with the worker all memory that neither writes to. ``thaw``
lets the copy copy itself in its turn, and that process takes the place of a row's own, as after a restart. So an environment
that keeps its state in C goes on exactly as it was.

Copies are no children of this process. They end with it all the same, by the lifeline of the workers, and each has a mark, a
black box and a pidfd of its own.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import select
import time
import weakref
from pathlib import Path
from typing import Any, Final

from vecenv.engine.handles import ProcessWorker
from vecenv.engine.pool import WorkerPool
from vecenv.engine.steps import Steps
from vecenv.errors import WorkerDied
from vecenv.front.arguments import milliseconds
from vecenv.link.channel import CallerEnd, ChannelClosed
from vecenv.system.copies import CopiedProcess
from vecenv.system.cores import Placement
from vecenv.system.descendants import new_token
from vecenv.system.supervision import BlackBox, ProcessWatch
from vecenv.system.uninterrupted import Uninterrupted
from vecenv.worker.main import CopyPlan, Ready

_READY: Final = 10.0  # seconds for a copy to be there, which takes milliseconds
_CLOSE: Final = 2.0  # seconds for the environment whose place is taken


class FrozenCopy:
    """A copy of a worker that is being made, or waits: its channel, black box, token, and its process once it is known."""

    def __init__(self, pool: WorkerPool) -> None:
        self.held = pool.holdings.child()
        self.channel = CallerEnd(self.held)
        pool.channels.add(self.channel)
        self.black_box = BlackBox(self.held)
        self.token = new_token()
        self.process: CopiedProcess | None = None
        self.owner = os.getpid()

    def plan(self, row: int | None = None, placement: Placement | None = None, seed: int | None = None) -> CopyPlan:
        """What it is to be given."""
        reader, writer = (end.number for end in self.channel.theirs)
        return CopyPlan(self.owner, reader, writer, self.black_box.number, self.token, row, placement, seed)

    def await_ready(self, method: str, name: str, made_by: ProcessWatch) -> CopiedProcess:
        """Its process, once it is there. It may be asked again.

        Args:
            method, name: Of the process.
            made_by: The process that makes it.

        Raises:
            WorkerDied: It is not there in time, or the process that makes it has ended.
        """
        if self.process is None:
            message, deadline = None, time.monotonic() + _READY
            poll = select.poll()
            poll.register(self.channel.fd, select.POLLIN)
            poll.register(made_by.descriptor, select.POLLIN)
            with contextlib.suppress(ChannelClosed):
                while (message := self.channel.read()) is None:
                    if self.channel.fd not in dict(poll.poll(milliseconds(deadline))):
                        break
            if message is None:
                raise WorkerDied(f"{name} could not be copied: its copy ended, or was not there within {_READY:.0f} seconds")
            ready: Ready = pickle.loads(message[2] or b"")
            self.process = CopiedProcess(ready.pid, method, name, self.held)
        self.channel.drop()  # from here on it is known, whatever interrupts this
        self.channel.started()
        return self.process

    def end(self) -> None:
        """End it. Idempotent."""
        if os.getpid() != self.owner:
            return
        if self.process is not None:
            self.process.kill()
            self.process.join(_CLOSE)
            self.process.exitcode  # noqa: B018 - reaps it, where this process adopts orphans
        self.channel.close()
        self.held.close()


class Frozen:
    """An environment as it was when it was frozen: a copy of its process, which waits. :meth:`close` ends it.

    It belongs to the vector environment that made it, on this machine and in this program, and cannot be pickled. It ends
    with that vector environment, with the last reference to it, or where it is used as a context manager, with the block.

    Attributes:
        env: The index of the environment that it is a copy of.
        observation: The last observation of that.
        info: What lay in shared memory of the latest info of that: numbers and arrays of keys that repeat.
        method: How its process was started.
        beside: What something around the vector environment knows of the environment.
    """

    beside: Any = None

    def __init__(self, engine: Steps, row: int) -> None:
        self.env = row
        self.observation = engine.store.row(row)
        self.info = engine._infos.one(row)
        worker = engine.pool.workers[row]
        assert isinstance(worker, ProcessWorker)
        self._copy, self._watch, self.method = FrozenCopy(engine.pool), worker.watch, str(worker.process._popen.method)
        self._engine = weakref.ref(engine)
        self._began = time.monotonic()
        weakref.finalize(self, self._copy.end)

    def begun(self) -> Frozen:
        """Once the copy is there."""
        self._copy.await_ready(self.method, f"vecenv-frozen-{self.env}", self._watch)
        return self

    @property
    def pid(self) -> int:
        """The process that waits."""
        return (self._copy.process and self._copy.process.pid) or 0

    @property
    def bytes(self) -> int:
        """Memory that only this copy has."""
        with contextlib.suppress(OSError):
            lines = Path(f"/proc/{self.pid}/smaps_rollup").read_text().splitlines()
            return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("Private_"))
        return 0

    @property
    def closed(self) -> bool:
        """It was ended by :meth:`close`, or with its vector environment."""
        return self._copy.channel.closed

    def for_thaw(self, engine: Steps) -> tuple[FrozenCopy, ProcessWatch]:
        """What is needed to copy it, unless it is closed, ended, or of another vector environment."""
        if self._engine() is not engine:
            raise ValueError(f"{self!r} is of another vector environment")
        if self.closed:
            raise ValueError(f"{self!r} cannot be thawed any more")
        copy = self._copy
        assert copy.process is not None
        watch = ProcessWatch(copy.process, copy.held)
        if watch.has_ended():
            text = f"the frozen copy of env {self.env} (pid {self.pid}) has ended, and cannot be thawed any more"
            raise WorkerDied(text, pid=self.pid, envs=[self.env], command="thaw")
        return copy, watch

    def close(self) -> None:
        """End the copy. What was thawed goes on. Idempotent."""
        with Uninterrupted():
            self._copy.end()

    def __enter__(self) -> Frozen:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __reduce__(self) -> Any:
        raise TypeError("a Frozen is a process of this program and cannot be pickled; save() gives what can be")

    def __repr__(self) -> str:
        age = time.monotonic() - self._began
        state = "closed" if self.closed else f"pid {self.pid}, {age:.1f} s old, {self.bytes / 2**20:.1f} MiB"
        return f"Frozen(env {self.env}, {state})"
