"""The two byte streams between the caller and one worker.

Each worker has two pipes, one per direction. As no other process shares them, messages keep their order, and end-of-file
means that the other side is gone. A round trip over a socket pair takes longer: on one core, 9 instead of 5 us.

The caller's end (:class:`Channel`) never blocks. The worker's end (:class:`WorkerEnd`) may block, which saves system calls.
Its blocking writes always end, because the caller reads replies even while its own messages do not fit into the pipe.
"""

from __future__ import annotations

import os
import select
from os import read, write
from typing import Final, TypeAlias

from vecenv.link.messages import FULL_HEAD, HEAD, PAYLOAD, Message, decode, encode, missing_bytes
from vecenv.system.cores import SpinPolicy
from vecenv.system.descriptors import Descriptor, DescriptorOwner

_CHUNK_BYTES: Final = 1 << 20
_HEAD_SIZES: Final = (HEAD,)
Ends: TypeAlias = tuple[Descriptor, Descriptor]
"""A worker's descriptors, for reading and for writing. They are pickled while its process is being started."""


class ChannelClosed(Exception):
    """The other side has closed its end of the pipe."""


class Channel:
    """The caller's end of the two pipes to one worker. It returns whole messages, and queues those to be sent.

    Reads and writes never block. A signal handler can raise after any call and at any jump (see :mod:`vecenv.front.guard`),
    so a system call and the store that records its effect happen inside one call into C: ``list.extend(map(read, ...))``.
    Bytes are therefore neither lost nor sent twice, and other modules need no precautions.

    Args:
        owner: Owner of the descriptors.

    Attributes:
        fd, out: The descriptor numbers of the reading and the writing end; -1 after :meth:`close`.
        worker_ends: The worker's ends.
        bytes_pickled: Bytes of pickled payloads received.
        poll: ``poll(0)`` returns a non-empty list if there is something to read or the worker has closed its end.
    """

    def __init__(self, owner: DescriptorOwner) -> None:
        self._reader, worker_writer = owner.pipe()
        worker_reader, self._writer = owner.pipe()
        self.fd, self.out = self._reader.number, self._writer.number
        self.worker_ends: Ends = worker_reader, worker_writer
        os.set_blocking(self.fd, False)
        os.set_blocking(self.out, False)
        self.bytes_pickled = 0
        self._read_fds, self._write_fds = (self.fd,), (self.out,)
        self._chunks: list[bytes] = []  # the received parts of the incoming message
        self._counted = 0, 0  # the number of these chunks that have been counted, and their total size
        self._outgoing: tuple[bytes, list[int]] = b"", []  # bytes to send, and the number that each write accepted
        poll = select.poll()
        poll.register(self.fd, select.POLLIN)
        self.poll = poll.poll

    def receive(self) -> bytes | None:
        """Return the next message, or ``None`` if it has not arrived in full.

        Raises:
            ChannelClosed: The worker has closed its end, or :meth:`close` was called.
        """
        chunks = self._chunks
        try:
            if not chunks:
                chunks.extend(map(read, self._read_fds, _HEAD_SIZES))
                head = chunks[0]
                if len(head) == HEAD and head[0] < PAYLOAD:  # no payload, as in nearly all messages
                    self._chunks = []
                    return head
            while missing := self._count_missing():
                if not chunks[-1]:  # the end of the pipe
                    raise ChannelClosed
                chunks.extend(map(read, self._read_fds, (min(missing, _CHUNK_BYTES),)))
        except BlockingIOError:
            return None
        except TimeoutError:  # from a signal handler, not from the pipe
            raise
        except OSError as error:
            raise ChannelClosed from error
        message = b"".join(chunks)
        self.bytes_pickled += max(len(message) - FULL_HEAD, 0)
        self._counted = 0, 0  # first: counts that outlive their chunks would be applied to the next message
        self._chunks = []
        return message

    def _count_missing(self) -> int:
        """Return the number of missing bytes of the incoming message. Count each chunk once: there can be thousands."""
        num_counted, size = self._counted
        size += sum(map(len, self._chunks[num_counted:]))
        self._counted = len(self._chunks), size
        head = b""
        for chunk in self._chunks:
            head += chunk
            if len(head) >= FULL_HEAD:
                break
        return missing_bytes(head, size)

    def queue(self, data: bytes) -> None:
        """Queue a message after unsent bytes; :meth:`flush` writes it."""
        unsent, accepted = self._outgoing
        self._outgoing = unsent[sum(accepted) :] + data, []

    def flush(self) -> bool:
        """Write queued bytes; return ``False`` if the pipe is full. After an interruption, the next call continues.

        Raises:
            ChannelClosed: The worker has closed its end, or :meth:`close` was called.
        """
        data, accepted = self._outgoing
        try:
            if not accepted:
                accepted.extend(map(write, self._write_fds, (data,)))
            while (sent := sum(accepted)) < len(data):
                accepted.extend(map(write, self._write_fds, (memoryview(data)[sent:],)))
        except BlockingIOError:
            return False
        except TimeoutError:  # from a signal handler, not from the pipe
            raise
        except OSError as error:
            raise ChannelClosed from error
        return True

    @property
    def closed(self) -> bool:
        return self.fd < 0

    def close_worker_ends(self) -> None:
        """Close the caller's copies of the worker's ends, after the worker has received its own."""
        for end in self.worker_ends:
            end.close()

    def close_own_ends(self) -> None:
        """Close the caller's ends. A forked child calls this to close the copies that it inherited."""
        self._reader.close()
        self._writer.close()

    def close(self) -> None:
        """Close all ends. Idempotent."""
        self._read_fds = self._write_fds = (-1,)
        self.fd = self.out = -1
        self.close_worker_ends()
        self.close_own_ends()


class WorkerEnd:
    """The worker's end of the two pipes.

    Args:
        ends: The two descriptors.
        blocks: True if reads may block; otherwise the worker spins and polls before it reads. Writes always block.
    """

    def __init__(self, ends: Ends, blocks: bool = False) -> None:
        self.blocks = blocks
        self._ends = ends
        self._in, self._out = (end.number for end in ends)
        os.set_blocking(self._in, blocks)
        os.set_blocking(self._out, True)
        poll = select.poll()
        poll.register(self._in, select.POLLIN)
        self.poll = poll.poll

    def close(self) -> None:
        """Close the worker's two descriptors."""
        for end in self._ends:
            end.close()

    def send(self, code: int, seq: int, payload: bytes | None = None) -> None:
        """Send one message; block until the pipe has accepted all of it.

        Raises:
            ChannelClosed: The caller has closed its end.
        """
        data = encode(code, seq, payload)
        try:
            sent = os.write(self._out, data)
            while sent < len(data):
                sent += os.write(self._out, memoryview(data)[sent:])
        except OSError as error:
            raise ChannelClosed from error

    def wait(self, spin_policy: SpinPolicy) -> Message:
        """Wait for a message and return it. Unless reads block, ``spin_policy`` determines how long to poll before sleeping.

        Raises:
            ChannelClosed: The caller has closed its end.
        """
        if not self.blocks and not spin_policy.spin(self.poll):
            self.poll()
        try:
            data = os.read(self._in, HEAD)
        except OSError:  # nothing has arrived yet, or the pipe is broken: read again below
            data = b""
        if len(data) == HEAD and data[0] < PAYLOAD:  # no payload, as in nearly all messages
            return data[0], int.from_bytes(data[1:], "little"), None
        received = bytearray(data or self._read(HEAD))
        while missing := missing_bytes(received):
            received += self._read(min(missing, _CHUNK_BYTES))
        return decode(received)

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
