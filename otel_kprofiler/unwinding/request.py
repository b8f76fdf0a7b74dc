"""Requests of the BPF program for the tables of a file that it met in a stack."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Final

from otel_kprofiler.bpf import record_spans
from otel_kprofiler.host import FileRequest
from otel_kprofiler.model import FileKey

_REQUEST: Final = struct.Struct("=QIIQQQIIQQ")
"""``struct file_request`` of the program."""


VDSO: Final = FileKey(0, 0xFFFFFFFF, 0)
"""Stands for the kernel's vDSO, which is not a file."""


def parse_requests(chunk: bytes) -> Iterator[FileRequest]:
    """The requests in what was taken from their ring. Raises ``ValueError`` if it is damaged."""
    for start, end in record_spans(chunk):
        if end - start != _REQUEST.size:
            raise ValueError(f"a file request of {end - start} bytes")
        yield from parse_rows(chunk[start:end])


def parse_rows(rows: bytes) -> Iterator[FileRequest]:
    """Requests one behind the other. Raises ``struct.error`` if the last one is not complete."""
    for inode, device, generation, *rest in _REQUEST.iter_unpack(rows):
        yield FileRequest(FileKey(inode, device, generation), *rest)
