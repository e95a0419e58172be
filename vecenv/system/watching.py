"""Noticing that a child has ended where there are no pidfds.

``multiprocessing`` notices by the end of a pipe, which whoever the child forked holds as well: a helper that an environment
left behind would hide the end of its worker, and a step would wait for ever. So a thread asks the system about each child
now and then, and rings a bell that can be polled: a pipe of ours with a byte in it.
"""

from __future__ import annotations

import contextlib
import os
import select
import threading
from typing import Any, Final, NamedTuple

from vecenv.system.holdings import Descriptor, Holdings

__all__ = ["Patrol"]

_ROUND_SECONDS: Final = 0.05  # between two questions, and so the longest that an end stays hidden


class _Post(NamedTuple):
    """One child that is watched. Nobody but the thread closes the rope, so that it never writes into another file."""

    process: Any
    sentinel: int
    bell: Descriptor
    rope: Descriptor


class Patrol:
    """A thread that lives while there is somebody to watch."""

    def __init__(self) -> None:
        self._holdings = Holdings(self)
        self._owner = os.getpid()
        self._posts: dict[int, _Post] = {}  # by their bells
        self._thread: threading.Thread | None = None
        self._starting_or_ending = threading.Lock()

    def watch(self, process: Any, sentinel: int) -> int:
        """A descriptor that is readable once this process of ``multiprocessing``'s has ended.

        Raises:
            OSError: Too few descriptors are left.
        """
        if process._popen.method == "forkserver":  # the server waits for it, and says so through the sentinel
            return sentinel
        bell, rope = self._holdings.pipe()
        with self._starting_or_ending:
            self._posts[bell.number] = _Post(process, sentinel, bell, rope)
            if self._thread is None:
                self._thread = threading.Thread(target=self._walk, name="vecenv-watch", daemon=True)
                self._thread.start()
        return bell.number

    def forget(self, descriptor: int) -> None:
        """Stop watching. Idempotent; a descriptor that is not of :meth:`watch`'s own making is left alone."""
        post = self._posts.pop(descriptor, None)
        if post is not None:
            post.bell.close()
            if os.getpid() != self._owner:  # a fork of ours, in which no thread walks
                post.rope.close()

    def close(self) -> None:
        """Forget everybody; the thread has ended then."""
        for number in list(self._posts):
            self.forget(number)
        thread = self._thread
        if thread is not None and os.getpid() == self._owner:
            thread.join(4 * _ROUND_SECONDS)

    def _walk(self) -> None:
        watched: list[_Post] = []
        while True:
            with self._starting_or_ending:
                posts = list(self._posts.values())
                kept = set(map(id, posts))
                for post in watched:
                    if id(post) not in kept:
                        post.rope.close()
                watched = [post for post in posts if post.rope.number >= 0]
                if not watched:
                    self._thread = None
                    return
            poll = select.poll()
            for post in watched:
                poll.register(post.sentinel, select.POLLIN)
            ended = {descriptor for descriptor, _ in poll.poll(_ROUND_SECONDS * 1000)}
            for post in watched:
                if post.sentinel in ended or _has_ended(post.process):
                    with contextlib.suppress(OSError):  # the bell is gone: it was forgotten meanwhile
                        os.write(post.rope.number, b".")
                    post.rope.close()


def _has_ended(process: Any) -> bool:
    """As the system knows it; no pipe is asked."""
    try:
        if process.exitcode is not None:
            return True
        os.kill(process.pid, 0)
    except (ProcessLookupError, ValueError):  # reaped by somebody else; closed
        return True
    return False
