"""Runs a child process that reads many files, one after another."""

from __future__ import annotations

import errno
import os
import select
import socket
import struct
import subprocess
import time
from collections.abc import Sequence
from typing import Final

from otel_kprofiler.host.child_cpu import MeteredChild

LENGTH: Final = struct.Struct("<Q")
"""Format of a reply's size in bytes, which precedes the reply on standard output."""
MAX_REQUEST_BYTES: Final = 1 << 16
_CHUNK_BYTES: Final = 1 << 16
_RECEIVED: Final = b"\x04"
"""Returned in place of standard error for a complete reply, to indicate success."""


class ServedChild(MeteredChild):
    """A child that receives files over a socket on standard input, and replies to each request.

    The child exits if the socket is closed. It also exits if it cannot read a file. ``cpu_ns`` is
    the CPU time that the child spent on its last file.

    Args:
        command: command of the child, which reads requests of at most ``MAX_REQUEST_BYTES``, each
            with a descriptor.
        owner: the user whose files the child reads.
    """

    serves_files = True

    def __init__(self, command: Sequence[str], owner: int) -> None:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        stdin, pipe = theirs.fileno(), subprocess.PIPE
        try:
            super().__init__(command, stdin=stdin, stdout=pipe, stderr=pipe, cwd="/")
        except BaseException:
            self._socket.close()
            raise
        finally:
            theirs.close()
        self.command, self.owner = command, owner
        self.idle_since_s = 0.0
        self._is_killed = False
        self._request = b"", -1
        self._earlier_ns = 0
        self._reply, self._errors = bytearray(), bytearray()

    def prepare(self, words: Sequence[str], fd: int) -> None:
        """Set the next request. If it is too long, kill the child and raise ``OSError``."""
        request = " ".join(words).encode()
        if len(request) > MAX_REQUEST_BYTES:
            self.end()
            raise OSError(errno.E2BIG, os.strerror(errno.E2BIG))
        self._earlier_ns = super()._read_clock() if self.is_idle else 0
        self._request, self.is_idle = (request, fd), False

    def begin(self) -> None:
        """Send the request. If the child has exited, :meth:`communicate` returns its status."""
        request, fd = self._request
        try:
            socket.send_fds(self._socket, [request], [fd])
        except ConnectionError:
            pass  # the child has exited
        except OSError:
            self.kill()
            raise

    @property
    def earlier_cpu_s(self) -> float:
        """Returns the CPU time that the child spent on earlier files, in seconds."""
        return self._earlier_ns / 1e9

    def communicate(
        self,
        input: bytes | None = None,  # noqa: A002 - the name in Popen
        timeout: float | None = None,
    ) -> tuple[bytes, bytes]:
        """Wait for the reply, or for the child to exit without a reply.

        On success, returns the reply and a marker byte. On failure, returns empty bytes and the
        child's standard error. Raises ``TimeoutExpired``.
        """
        until_s = None if timeout is None else time.monotonic() + timeout
        outputs = {
            pipe.fileno(): (pipe, data)
            for pipe, data in ((self.stdout, self._reply), (self.stderr, self._errors))
            if pipe is not None and not pipe.closed
        }
        ready = select.poll()  # select(2) supports no descriptor above 1023
        for fd in outputs:
            ready.register(fd, select.POLLIN)
        while outputs:
            left_s = _left_s(until_s)
            if not (events := ready.poll(None if left_s is None else left_s * 1e3)):
                raise subprocess.TimeoutExpired(self.args, timeout or 0)
            for fd, _ in events:
                pipe, data = outputs[fd]
                if chunk := os.read(fd, _CHUNK_BYTES):
                    data += chunk
                else:
                    ready.unregister(fd)
                    del outputs[fd]
                    pipe.close()
            if self._is_complete():
                return self._take_reply(), _RECEIVED
        self.wait(_left_s(until_s))
        self._socket.close()
        return b"", bytes(self._errors)

    def _is_complete(self) -> bool:
        if self._is_killed or len(self._reply) < LENGTH.size:
            return False
        size: int = LENGTH.unpack_from(self._reply)[0]
        return len(self._reply) >= LENGTH.size + size

    def _take_reply(self) -> bytes:
        self.read_cpu_time()
        reply = bytes(self._reply[LENGTH.size :])
        self._reply.clear()
        self.is_idle, self.idle_since_s = True, time.monotonic()
        return reply

    def _read_clock(self) -> int:
        return super()._read_clock() - self._earlier_ns

    def kill(self) -> None:
        """Kill the child, and ignore any later reply."""
        self._is_killed = True
        super().kill()

    def end(self) -> None:
        """Kill the child, and reap it."""
        self.is_idle = False
        self.kill()
        self.communicate()


def _left_s(until_s: float | None) -> float | None:
    return None if until_s is None else max(0.0, until_s - time.monotonic())
