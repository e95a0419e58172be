"""One end of the two byte streams between the caller and one worker.

Two pipes a worker, one each way, never shared, so that order and end-of-file mean something. Pipes and not a socket pair,
because they cost half as much a round trip (5 against 9 us on one core here). :meth:`Channel.receive` never blocks
and keeps a half-read message for the next call, so that a deadline, a Ctrl-C or a large payload that arrives piece by piece
loses nothing. Sending from the caller's side never blocks either while the worker has something to say: it drains first.

Waiting is the caller's business (:mod:`vecenv.pool`); a worker waits with :meth:`Channel.wait`, which spins on the
non-blocking read for a while if a core is free for that, and then sleeps.
"""

from __future__ import annotations

import os
import select
from collections import deque
from multiprocessing.connection import Connection
from typing import Any

from vecenv.cores import Patience
from vecenv.protocol import HEADER, LENGTH, PAYLOAD, encode

__all__ = ["Channel", "ChannelClosed", "Message"]

Message = tuple[int, int, bytes | None]  # word, sequence number, pickled payload

_HEAD = HEADER.size
_FULL_HEAD = _HEAD + LENGTH.size
_CHUNK = 1 << 20
_STALLED_MS = 60_000  # a receiver that takes nothing for this long is as good as gone


class ChannelClosed(Exception):
    """The other side is gone."""


class Channel:
    """A framed message stream over the near ends of two pipes.

    In the caller it never blocks. In a worker it may, which saves system calls: the caller drains while it sends, so that
    a worker's blocking write always ends.

    Args:
        reader, writer: One-way ``multiprocessing`` connections. They stay owned by the channel; they are what travels to a
            worker at its start, because they can be pickled while a process is being spawned.
    """

    def __init__(self, reader: Connection[Any, Any], writer: Connection[Any, Any], blocks: bool = False) -> None:
        self.reader, self.writer = reader, writer
        self.blocks = blocks
        self.fd = reader.fileno()
        self._out = writer.fileno()
        os.set_blocking(self.fd, blocks)
        os.set_blocking(self._out, blocks)
        self.bytes_pickled = 0
        self._partial = bytearray()
        self._inbox: deque[Message] = deque()
        poll = select.poll()
        poll.register(self.fd, select.POLLIN)
        self.poll = poll.poll

    def receive(self) -> Message | None:
        """The next whole message, or ``None`` if it is not there yet. Raises :class:`ChannelClosed` at end of file."""
        return self._inbox.popleft() if self._inbox else self._read()

    def early(self) -> Message | None:
        """A message that came while one was sent, and of which polling the pipe would no longer tell."""
        return self._inbox.popleft() if self._inbox else None

    def _read(self) -> Message | None:
        if not self._partial:  # nearly always: five bytes or nothing
            try:
                data = os.read(self.fd, _HEAD)
            except BlockingIOError:
                return None
            except OSError as error:
                raise ChannelClosed from error
            if len(data) == _HEAD and data[0] < PAYLOAD:
                return data[0], int.from_bytes(data[1:], "little"), None
            if not data:
                raise ChannelClosed
            self._partial += data
        return self._receive_rest()

    def take(self, expected: bytes) -> bool:
        """Take in the next message if it is this one, a few bytes without a payload; any other stays to be received."""
        if self._partial or self._inbox:
            return False
        try:
            data = os.read(self.fd, _HEAD)
        except BlockingIOError:
            return False
        except OSError as error:
            raise ChannelClosed from error
        if data == expected:
            return True
        if not data:
            raise ChannelClosed
        self._partial += data
        return False

    def _receive_rest(self) -> Message | None:
        while True:
            missing = self._missing()
            if missing == 0:
                break
            try:
                data = os.read(self.fd, min(missing, _CHUNK))
            except BlockingIOError:
                return None
            except OSError as error:
                raise ChannelClosed from error
            if not data:
                raise ChannelClosed
            self._partial += data
        whole, self._partial = self._partial, bytearray()
        word, seq = HEADER.unpack_from(whole)
        if word < PAYLOAD:
            return word, seq, None
        self.bytes_pickled += len(whole)
        return word & ~PAYLOAD, seq, bytes(memoryview(whole)[_FULL_HEAD:])

    def _missing(self) -> int:
        """How many bytes the message that has begun still lacks."""
        have = len(self._partial)
        if have < _HEAD:
            return _HEAD - have
        if self._partial[0] < PAYLOAD:
            return 0
        if have < _FULL_HEAD:
            return _FULL_HEAD - have
        (length,) = LENGTH.unpack_from(self._partial, _HEAD)
        return _FULL_HEAD + int(length) - have

    def send(self, word: int, seq: int, payload: bytes | None = None) -> None:
        """Send one message. While the pipe is full, take in what the other side sends, so that two writers never lock."""
        data = encode(word, seq, payload)
        if payload is not None:
            self.bytes_pickled += len(data)
        self.ring(data)

    def ring(self, data: bytes) -> None:
        """Send a message that is encoded already."""
        try:
            sent = os.write(self._out, data)
        except BlockingIOError:
            sent = 0
        except OSError as error:
            raise ChannelClosed from error
        if sent < len(data):
            self._send_rest(memoryview(data)[sent:])

    def _send_rest(self, rest: memoryview) -> None:
        both = select.poll()
        both.register(self.fd, select.POLLIN)
        both.register(self._out, select.POLLOUT)
        while rest:
            ready = dict(both.poll(_STALLED_MS))
            if not ready:
                raise ChannelClosed("the other side has read nothing for a minute")
            if self.fd in ready and (message := self._read()) is not None:
                self._inbox.append(message)
            if self._out in ready:
                try:
                    rest = rest[os.write(self._out, rest) :]
                except BlockingIOError:
                    continue
                except OSError as error:
                    raise ChannelClosed from error

    def wait(self, patience: Patience) -> Message:
        """Block until a message is there; ``patience`` says how long to poll without sleeping first."""
        if self._inbox:
            return self._inbox.popleft()
        if self.blocks:
            message = self._read()
        else:
            if not patience.spin(self.poll):
                self.poll()
            message = self.receive()
        while message is None:
            self.poll()
            message = self.receive()
        return message

    def close(self) -> None:
        """Close both near ends. Idempotent."""
        for connection in (self.reader, self.writer):
            if not connection.closed:
                connection.close()
