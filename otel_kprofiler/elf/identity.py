"""Computes the hash that identifies a user-space binary in OTLP."""

import hashlib
from typing import Final

from otel_kprofiler.elf.source import Source
from otel_kprofiler.model import FileId

_PART_BYTES: Final = 4096
_HASH_BYTES: Final = 16


def hash_file(source: Source) -> FileId:
    """Returns the file id, ``process.executable.build_id.htlhash`` in OpenTelemetry's data model.

    The hash is the first 16 bytes of SHA-256 over the first and last 4096 bytes (which may
    overlap), and the length as 8 bytes, big-endian. Raises ``ElfError`` if the file cannot be read.
    """
    size = source.size
    part = min(_PART_BYTES, size)
    digest = hashlib.sha256(source.read(0, part))
    digest.update(source.read(size - part, part))
    digest.update(size.to_bytes(8, "big"))
    return FileId(digest.digest()[:_HASH_BYTES].hex())
