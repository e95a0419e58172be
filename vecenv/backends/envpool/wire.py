"""Talking to a pool so that neither Ctrl-C nor a timeout loses an answer.

Python runs a signal handler between two of its own instructions, so an answer that a C++ function has returned can be lost
before the next instruction stores it; and while C++ waits, no handler runs at all. Hence two habits:

* what must happen together is done by C code in one instruction (:func:`together`, and ``list.extend`` over a ``starmap``);
* a wait with a time limit is done by one helper thread, which puts the answer where the direct call would have put it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import starmap
from operator import call
from queue import Empty, SimpleQueue
from threading import Thread
from typing import Any

from vecenv.backends.envpool.helpers import join, watch

__all__ = ["ONCE", "Receiver", "together"]

ONCE: tuple[tuple[()]] = ((),)
"""``list.extend(starmap(f, ONCE))`` calls ``f()`` once and keeps the result, in one instruction."""


def together(*calls: tuple[Any, ...]) -> None:
    """Call C functions one after the other, with no chance for a signal handler in between.

    Args:
        *calls: Function and arguments, each a tuple. The functions must be implemented in C.
    """
    list(starmap(call, calls))


class Receiver:
    """Receives answers of one pool, with or without a limit on the wait.

    Without a limit, ``recv`` is called directly. With one, a helper thread calls it; whatever it gets goes where it was to
    go even if nobody waits for it any more, and until then every later wait is for that same call.

    Args:
        recv: The pool's.
        waited: Seconds that were spent waiting before.
    """

    def __init__(self, recv: Callable[[], Any], waited: float) -> None:
        self._recv = recv
        self._asked: list[None] = []  # one entry while the helper is in recv()
        self._requests: SimpleQueue[list[Any] | None] = SimpleQueue()
        self._answered: SimpleQueue[bool] = SimpleQueue()
        self._thread: Thread | None = None
        self._helper: Thread | None = None  # the latest thread there was; one that was left behind is still of interest
        self.waited = waited
        """Seconds spent waiting in :meth:`receive`."""

    def receive(self, wire: list[Any], length: int, deadline: float | None) -> bool:
        """Wait until ``wire`` has ``length`` entries, one more than it had with nothing received.

        Args:
            wire: Where answers go; the same until the answer that is waited for is there.
            length: The length to wait for.
            deadline: Of ``time.monotonic()``; ``None`` waits as long as it takes.

        Returns:
            Whether it has.
        """
        while True:
            asked = bool(self._asked)  # read before the wire: the helper writes to the wire first
            if len(wire) >= length:
                return True
            if not asked:
                if deadline is None:
                    began = time.perf_counter()
                    wire.extend(starmap(self._recv, ONCE))
                    self.waited += time.perf_counter() - began
                    return True
                self._start()
                together((self._asked.append, None), (self._requests.put, wire))
            began = time.perf_counter()
            try:
                # a token may be that of an earlier answer: look at the wire again in any case
                self._answered.get(timeout=None if deadline is None else max(0.0, deadline - time.monotonic()))
            except Empty:
                return len(wire) >= length
            finally:
                self.waited += time.perf_counter() - began

    def close(self, timeout: float = 5.0) -> None:
        """End the helper thread. One that is stuck in a hanging environment is left behind; it ends with the process."""
        thread, self._thread = self._thread, None
        if thread is not None:
            self._requests.put(None)
            join(thread, timeout)

    @property
    def thread_inside(self) -> Thread | None:
        """The helper thread, while it is in ``recv``."""
        return self._helper if self._asked else None

    def _start(self) -> None:
        if self._thread is None or not self._thread.is_alive():
            self._thread = self._helper = Thread(target=self._help, name="vecenv-envpool-recv", daemon=True)
            watch(self)
            self._thread.start()

    def _help(self) -> None:
        while (wire := self._requests.get()) is not None:
            wire.extend(starmap(self._recv, ONCE))
            self._asked.clear()
            self._answered.put(True)
