"""Builds unwind tables, one file at a time, in a child process that is started only once.

Runs in child processes, so it imports only a few modules of this package.
"""

from __future__ import annotations

import functools
import mmap
import os
import socket
import struct
from collections.abc import Callable
from typing import Final

from otel_kprofiler.unwinding.frame_writing import limit_memory, make_tables, write_all

_LENGTH: Final = struct.Struct("<Q")
"""Format of a reply's size, as in host/served_child.py."""
_MAX_REQUEST_BYTES: Final = 1 << 16


def serve_tables(make: Callable[[list[str], mmap.mmap], bytes]) -> None:
    """Map each file received over the socket on standard input, and write its unwind tables.

    Each request contains arguments for ``make`` and the file's descriptor. Each response is the
    size of the tables, followed by the tables. Returns when the socket is closed. For errors, see
    ``make_tables``.
    """
    limit_memory()
    with socket.socket(fileno=0) as requests:
        while True:
            request, fds, *_ = socket.recv_fds(requests, _MAX_REQUEST_BYTES, 1)
            if not request:
                return
            try:
                tables = make_tables(fds[0], functools.partial(make, request.decode().split()))
            finally:
                os.close(fds[0])
            write_all(_LENGTH.pack(len(tables)) + tables)
