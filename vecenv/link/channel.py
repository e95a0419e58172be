"""The two byte streams between the caller and one worker.

Two pipes a worker, one each way, never shared, so that order and end-of-file mean something. Pipes and not a socket pair,
because they cost half as much a round trip (5 against 9 us on one core here).

The caller's end (:class:`CallerEnd`) never blocks, and never loses its place: a read puts what it took into a list, and a
write notes how much it wrote, in one call of C each, so that no exception can fall between. What was read stays there until
whoever reads it has put it where it belongs and says so (:meth:`CallerEnd.drop`). The worker's end (:class:`WorkerEnd`) may
block, which saves system calls: the caller drains while it sends, so that a worker's blocking write always ends.

Waiting is the caller's business (:mod:`vecenv.waiting`); a worker waits with :meth:`WorkerEnd.wait`, which spins on the
non-blocking read for a while if a core is free for that, and then sleeps.
"""

from __future__ import annotations

import os
import select
from collections.abc import Sequence
from multiprocessing import reduction
from os import read, write
from typing import Any, Final

from vecenv.link.protocol import HEADER, LENGTH, PAYLOAD, encode
from vecenv.system.cores import SpinPolicy
from vecenv.system.descriptors import DescriptorOwner

__all__ = ["CallerEnd", "ChannelClosed", "Ends", "Message", "WorkerEnd", "write_once"]

Message = tuple[int, int, bytes | None]  # word, sequence number, pickled payload

_HEAD: Final = HEADER.size
_FULL_HEAD: Final = _HEAD + LENGTH.size
_CHUNK: Final = 1 << 20
_SHORT: Final = (_HEAD,)


class ChannelClosed(Exception):
    """The other side is gone."""


def missing(data: bytes | bytearray) -> int:
    """How many bytes the message at the beginning of ``data`` still lacks."""
    have = len(data)
    if have < _HEAD:
        return _HEAD - have
    if data[0] < PAYLOAD:
        return 0
    if have < _FULL_HEAD:
        return _FULL_HEAD - have
    (length,) = LENGTH.unpack_from(data, _HEAD)
    return max(_FULL_HEAD + int(length) - have, 0)


def decode(data: bytes | bytearray) -> Message:
    """The whole message that is ``data``."""
    word, seq = HEADER.unpack_from(data)
    if word < PAYLOAD:
        return word, seq, None
    return word & ~PAYLOAD, seq, bytes(memoryview(data)[_FULL_HEAD:])


def write_once(written: list[int], descriptors: Sequence[int], messages: Any) -> None:
    """Write each message to its descriptor, and add to ``written`` how much of it was taken: one call of C.

    Raises:
        BlockingIOError: A pipe is full; those before it were written.
        OSError: The other side of one is gone; likewise.
    """
    written.extend(map(os.write, descriptors, messages))


class Ends:
    """A worker's ends, on their way to it: they can be pickled while its process is being spawned."""

    def __init__(self, reader: int, writer: int) -> None:
        self.reader, self.writer = reader, writer

    def __reduce__(self) -> tuple[Any, ...]:
        return _attach, (reduction.DupFd(self.reader), reduction.DupFd(self.writer))


def _attach(reader: Any, writer: Any) -> Ends:
    return Ends(reader.detach(), writer.detach())


class CallerEnd:
    """A framed message stream over the caller's ends of two pipes.

    Args:
        holdings: Who holds the descriptors.
    """

    def __init__(self, holdings: DescriptorOwner) -> None:
        self._in, self._their_out = holdings.pipe()
        self._their_in, self._out = holdings.pipe()
        self.fd, self.out = self._in.number, self._out.number
        self.theirs = Ends(self._their_in.number, self._their_out.number)
        os.set_blocking(self.fd, False)
        os.set_blocking(self.out, False)
        self.bytes_pickled = 0
        self.raw: list[bytes] = []  # read, and not dropped ...
        self._counted = 0, 0  # ... of which so many chunks are so many bytes
        self._reading, self._writing = (self.fd,), (self.out,)
        poll = select.poll()
        poll.register(self.fd, select.POLLIN)
        self.poll = poll.poll

    def started(self) -> None:
        """The worker has its ends: ours of them can go."""
        self._their_in.close()
        self._their_out.close()

    def read(self) -> Message | None:
        """The next whole message, or ``None`` if it is not there yet. It is the next one until :meth:`drop`.

        Raises:
            ChannelClosed: End of file.
        """
        # Handlers that return stand on one line: what a tracer raises before the `return` of a handler leaves the
        # interpreter with the handled exception, and its frames with all that they hold, until the thread ends.
        raw = self.raw
        if not raw:
            try:
                raw.extend(map(read, self._reading, _SHORT))
            except BlockingIOError: return None  # noqa: E701 - see above
            except OSError as error:
                raise ChannelClosed from error
        head = raw[0]
        if len(head) == _HEAD and head[0] < PAYLOAD:  # nearly always
            return head[0], int.from_bytes(head[1:], "little"), None
        while True:
            if raw[-1] == b"":
                raw.pop()
                raise ChannelClosed
            lacking = self._lacking()
            if not lacking:
                return decode(b"".join(raw))
            try:
                raw.extend(map(read, self._reading, (min(lacking, _CHUNK),)))
            except BlockingIOError: return None  # noqa: E701 - see above
            except OSError as error:
                raise ChannelClosed from error

    def _lacking(self) -> int:
        """How many bytes the message that has begun lacks."""
        head = b""
        for chunk in self.raw:
            head += chunk
            if len(head) >= _FULL_HEAD:
                break
        if len(head) < _FULL_HEAD or head[0] < PAYLOAD:
            return missing(head)
        (length,) = LENGTH.unpack_from(head, _HEAD)
        chunks, have = self._counted
        if chunks < len(self.raw):
            have += sum(map(len, self.raw[chunks:]))
            self._counted = len(self.raw), have
        return _FULL_HEAD + int(length) - have

    def take(self, expected: bytes) -> bool:
        """Whether the next message is this one, a few bytes without a payload; reads once at most."""
        raw = self.raw
        if not raw:
            try:
                raw.extend(map(os.read, self._reading, _SHORT))
            except BlockingIOError: return False  # noqa: E701 - see `read`
            except OSError as error:
                raise ChannelClosed from error
        return len(raw) == 1 and raw[0] == expected

    def drop(self) -> None:
        """The message that :meth:`read` gave is where it belongs."""
        self._counted = 0, 0
        self.raw.clear()

    def write(self, data: bytes, written: list[int]) -> bool:
        """Write what is left of a message, of which ``written`` tells; false if the pipe is full.

        Raises:
            ChannelClosed: The other side is gone.
        """
        try:
            if not written:
                written.extend(map(write, self._writing, (data,)))  # as `write_once` does
            while (sent := sum(written)) < len(data):
                write_once(written, (self.out,), (memoryview(data)[sent:],))
        except BlockingIOError:
            return False
        except OSError as error:
            raise ChannelClosed from error
        return True

    @property
    def closed(self) -> bool:
        return self.fd < 0

    def fileno(self) -> int:
        """The reading end."""
        return self.fd

    def forget(self) -> None:
        """In a forked child: close the copies of the ends that are the caller's alone."""
        self._in.close()
        self._out.close()

    def close(self) -> None:
        """Close all that is ours. Idempotent."""
        self._reading = self._writing = (-1,)
        self.fd = self.out = -1
        self.started()
        self._in.close()
        self._out.close()


class WorkerEnd:
    """The same stream at its other end, in the worker.

    Args:
        ends: Its two descriptors.
        blocks: Reading and writing may block. Otherwise reading spins and polls.
    """

    def __init__(self, ends: Ends, blocks: bool = False) -> None:
        self.blocks = blocks
        self._in, self._out = ends.reader, ends.writer
        os.set_blocking(self._in, blocks)
        os.set_blocking(self._out, True)
        poll = select.poll()
        poll.register(self._in, select.POLLIN)
        self.poll = poll.poll

    def send(self, word: int, seq: int, payload: bytes | None = None) -> None:
        """Send one message, however long the caller takes to read it: it is gone when the pipe says so.

        Raises:
            ChannelClosed: The caller is gone.
        """
        data = encode(word, seq, payload)
        try:
            sent = os.write(self._out, data)
            while sent < len(data):
                sent += os.write(self._out, memoryview(data)[sent:])
        except OSError as error:
            raise ChannelClosed from error

    def wait(self, patience: SpinPolicy) -> Message:
        """Block until a message is there; ``patience`` says how long to poll without sleeping first."""
        if not self.blocks and not patience.spin(self.poll):
            self.poll()
        try:
            data = os.read(self._in, _HEAD)
        except OSError:  # nothing is there yet, or nothing will be: looked at below
            data = b""
        if len(data) == _HEAD and data[0] < PAYLOAD:  # nearly always
            return data[0], int.from_bytes(data[1:], "little"), None
        whole = bytearray(data or self._read(_HEAD))
        while lacking := missing(whole):
            whole += self._read(min(lacking, _CHUNK))
        return decode(whole)

    def _read(self, size: int) -> bytes:
        while True:
            try:
                data = os.read(self._in, size)
            except BlockingIOError:
                self.poll()
                continue
            except OSError as error:
                raise ChannelClosed from error
            if not data:
                raise ChannelClosed
            return data
