"""Decompresses the responses of receivers."""

import zlib
from typing import Final

_ENCODINGS: Final = ("gzip", "x-gzip", "deflate")
_WINDOW_BITS: Final = 47
"""Accepts gzip and zlib with any window size (zlib manual, inflateInit2)."""


def inflate(content: bytes, encoding: str, max_bytes: int) -> bytes:
    """Returns decompressed content.

    ``encoding`` is a content coding in lower case (RFC 9110, section 8.4.1). Raises ``ValueError``
    if it is not supported, or if the content is malformed, truncated, or larger than ``max_bytes``.
    """
    if encoding not in _ENCODINGS:
        raise ValueError(f"it has the unsupported content encoding {encoding[:20]!r}")
    inflater = zlib.decompressobj(_WINDOW_BITS)
    try:
        result = inflater.decompress(content, max_bytes + 1)
    except zlib.error:
        raise ValueError(f"it is not valid {encoding} data") from None
    if len(result) > max_bytes:
        raise ValueError(f"it exceeds {max_bytes} bytes")
    if not inflater.eof:
        raise ValueError(f"its {encoding} data is truncated")
    return result
