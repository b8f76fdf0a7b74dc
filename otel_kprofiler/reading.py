"""Reads files and streams up to a size limit."""

from typing import Final, Protocol

_CHUNK_BYTES: Final = 16 << 20


class Readable(Protocol):
    """A binary file or stream."""

    def read(self, size: int, /) -> bytes:
        """Returns up to ``size`` bytes.

        The result is empty only at the end of the file or stream.
        """


def read_up_to(stream: Readable, limit: int) -> bytes:
    """Returns the rest of a stream, at most ``limit`` bytes. Raises ``OSError``.

    In CPython, ``read(limit)`` on a buffered reader allocates ``limit`` bytes before it reads. On a
    host with less memory, this allocation fails, even if the file is small.
    """
    chunks = []
    while limit and (chunk := stream.read(min(limit, _CHUNK_BYTES))):
        chunks.append(chunk)
        limit -= len(chunk)
    return b"".join(chunks)
