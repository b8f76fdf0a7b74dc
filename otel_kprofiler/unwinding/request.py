"""Parses the BPF program's requests for unwind tables."""

import struct
from collections.abc import Iterator
from typing import Final

from otel_kprofiler.bpf import record_spans
from otel_kprofiler.host import FileRequest
from otel_kprofiler.model import FileKey

_REQUEST: Final = struct.Struct("=QIIQQQIIQQ")
"""Format of the BPF program's ``struct file_request``."""


VDSO: Final = FileKey(0, 0xFFFFFFFF, 0)


def parse_requests(chunk: bytes) -> Iterator[FileRequest]:
    """Parses the records from the request ring. Raises ``ValueError`` if a record is malformed."""
    for start, end in record_spans(chunk):
        if end - start != _REQUEST.size:
            raise ValueError(f"a file request has {end - start} bytes instead of {_REQUEST.size}")
        yield from parse_rows(chunk[start:end])


def parse_rows(rows: bytes) -> Iterator[FileRequest]:
    """Parses consecutive requests. Raises ``struct.error`` if the last request is truncated."""
    for inode, device, generation, *rest in _REQUEST.iter_unpack(rows):
        yield FileRequest(FileKey(inode, device, generation), *rest)
