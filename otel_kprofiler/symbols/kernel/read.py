"""Reads ``/proc/kallsyms`` in a thread while another thread parses it.

The kernel formats the text line by line and returns at most one page per ``read(2)``. The C
library's ``fread`` reads 32 KiB in about 8 system calls without holding the GIL, so with two CPUs,
parsing adds almost no time to reading.
"""

import contextlib
import ctypes
import os
import queue
import threading
import time
from collections.abc import Callable, Generator
from typing import Final

PIECE_BYTES: Final = 32 * 1024
_WAITING_PIECES = 6

_libc = ctypes.CDLL(None, use_errno=True)
_libc.fdopen.argtypes = (ctypes.c_int, ctypes.c_char_p)
_libc.fdopen.restype = ctypes.c_void_p
_libc.fread.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t, ctypes.c_void_p)
_libc.fread.restype = ctypes.c_size_t
_libc.ferror.argtypes = (ctypes.c_void_p,)
_libc.fclose.argtypes = (ctypes.c_void_p,)


def read_pieces(
    descriptor: int, *, report_cpu_ns: Callable[[int], object] | None = None
) -> Generator[bytes, None, None]:
    """Yields a file's content in chunks, read ahead by a thread that closes the descriptor.

    At most 192 KiB are read ahead. At the end, ``report_cpu_ns`` is called with the CPU time of the
    reading thread, in nanoseconds. Raises ``OSError`` if the file cannot be read.
    """
    pieces: queue.Queue[bytes | OSError] = queue.Queue(_WAITING_PIECES)
    stop = threading.Event()
    thread = threading.Thread(
        target=_fill,
        args=(descriptor, pieces, stop, report_cpu_ns),
        name="kallsyms-reader",
        daemon=True,
    )
    thread.start()
    piece: bytes | OSError = b"?"
    try:
        while piece := pieces.get():
            if isinstance(piece, OSError):
                raise piece
            yield piece
    finally:
        stop.set()
        while isinstance(piece, bytes) and piece:
            piece = pieces.get()
        thread.join()


def _fill(
    descriptor: int,
    pieces: queue.Queue[bytes | OSError],
    stop: threading.Event,
    report_cpu_ns: Callable[[int], object] | None,
) -> None:
    stream = _libc.fdopen(descriptor, b"r")
    if not stream:
        number = ctypes.get_errno()
        with contextlib.suppress(OSError):  # the descriptor may be invalid
            os.close(descriptor)
        pieces.put(OSError(number, os.strerror(number)))
        return
    buffer = ctypes.create_string_buffer(PIECE_BYTES)
    size = PIECE_BYTES
    while size == PIECE_BYTES and not stop.is_set():
        size = _libc.fread(buffer, 1, PIECE_BYTES, stream)
        number = ctypes.get_errno()
        if size:
            pieces.put(ctypes.string_at(buffer, size))
    failed = _libc.ferror(stream)
    _libc.fclose(stream)
    if report_cpu_ns is not None:
        report_cpu_ns(time.thread_time_ns())
    pieces.put(OSError(number, os.strerror(number)) if failed else b"")
