"""Builds unwind tables, one file at a time, in a child process that is started only once.

The process imports only a few modules of this package.
"""

from __future__ import annotations

import functools
import os
import socket
import struct
from importlib import import_module
from typing import Final

from otel_kprofiler.unwinding.frame_writing import limit_memory, make_tables, write_all

_LENGTH: Final = struct.Struct("<Q")
"""Format of a reply's size, as in host/served_child.py."""
_MAX_REQUEST_BYTES: Final = 1 << 16


def main() -> None:
    """Map each file received over the socket on standard input, and write its unwind tables.

    Each request contains the name of a module of this package, the arguments of its function
    ``make``, and the file's descriptor. Each response is the size of the tables, followed by the
    tables. Returns when the socket is closed. For errors, see ``make_tables``.
    """
    limit_memory()
    with socket.socket(fileno=0) as requests:
        while True:
            request, fds, *_ = socket.recv_fds(requests, _MAX_REQUEST_BYTES, 1)
            if not request:
                return
            name, *words = request.decode().split()
            try:
                make = import_module(f"{__package__}.{name}").make
                tables = make_tables(fds[0], functools.partial(make, words))
            finally:
                os.close(fds[0])
            write_all(_LENGTH.pack(len(tables)) + tables)
