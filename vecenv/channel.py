"""One end of the byte stream between the caller and one worker.

A socket pair per worker, never shared, so that order and end-of-file mean something. :meth:`Channel.receive` never blocks
and keeps a half-read message for the next call, so that a deadline, a Ctrl-C or a large payload that arrives piece by piece
loses nothing. Sending from the caller's side never blocks either while the worker has something to say: it drains first.

Waiting is the caller's business (:mod:`vecenv.pool`); a worker waits with :meth:`Channel.wait`, which spins on the
non-blocking read for a while if a core is free for that, and then sleeps.
"""

from __future__ import annotations

import os
import select
import time
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
    """A framed, non-blocking message stream over one end of a socket pair.

    Args:
        connection: A duplex ``multiprocessing`` connection. It stays owned by the channel; it is what travels to a worker
            at its start, because it can be pickled while a process is being spawned.
    """

    def __init__(self, connection: Connection[Any, Any]) -> None:
        self.connection = connection
        self.fd = connection.fileno()
        os.set_blocking(self.fd, False)
        self.bytes_pickled = 0
        self._partial = bytearray()
        self._inbox: deque[Message] = deque()
        self._poll = select.poll()
        self._poll.register(self.fd, select.POLLIN)

    def receive(self) -> Message | None:
        """The next whole message, or ``None`` if it is not there yet. Raises :class:`ChannelClosed` at end of file."""
        return self._inbox.popleft() if self._inbox else self._read()

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
        """Send one message. While the stream is full, take in what the other side sends, so that two writers never lock."""
        data = encode(word, seq, payload)
        if payload is not None:
            self.bytes_pickled += len(data)
        try:
            sent = os.write(self.fd, data)
        except BlockingIOError:
            sent = 0
        except OSError as error:
            raise ChannelClosed from error
        if sent < len(data):
            self._send_rest(memoryview(data)[sent:])

    def _send_rest(self, rest: memoryview) -> None:
        both = select.poll()
        both.register(self.fd, select.POLLIN | select.POLLOUT)
        while rest:
            ready = both.poll(_STALLED_MS)
            if not ready:
                raise ChannelClosed("the other side has read nothing for a minute")
            events = ready[0][1]
            if events & select.POLLIN and (message := self._read()) is not None:
                self._inbox.append(message)
            if events & select.POLLOUT:
                try:
                    rest = rest[os.write(self.fd, rest) :]
                except BlockingIOError:
                    continue
                except OSError as error:
                    raise ChannelClosed from error
            elif events & (select.POLLERR | select.POLLHUP):
                raise ChannelClosed

    def wait(self, patience: Patience) -> Message:
        """Block until a message is there; ``patience`` says how long to poll without sleeping first."""
        message = self.receive()
        if message is None and (spin := patience.budget()):
            deadline = time.perf_counter() + spin
            while message is None and time.perf_counter() < deadline:
                message = self.receive()
        while message is None:
            self._poll.poll()
            message = self.receive()
        return message

    def close(self) -> None:
        """Close this end. Idempotent."""
        if not self.connection.closed:
            self.connection.close()
