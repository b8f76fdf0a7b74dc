"""What the BPF program asks for: a file that it met in a stack and has no tables of."""

from __future__ import annotations

import os
import stat
import struct
from collections.abc import Iterator
from typing import Final, NamedTuple

from otel_kprofiler.bpf import record_spans
from otel_kprofiler.model import FileKey

_REQUEST: Final = struct.Struct("=QIIQQQIIQ")
"""``struct file_request`` of the program."""
_MINOR_BITS: Final = 20  # MKDEV, include/linux/kdev_t.h


VDSO: Final = FileKey(0, 0xFFFFFFFF, 0)
"""Stands for the kernel's vDSO, which is no file."""


class FileRequest(NamedTuple):
    """A mapping of a file, as it was at the interrupt.

    Attributes:
        key: the file.
        start: first runtime address of the mapping.
        end: behind its last one.
        file_offset: what ``start`` shows of the file, in bytes.
        tgid: a process that has it mapped.
        tid: the thread that was interrupted.
        size: of the file in bytes; 0 if not known.
    """

    key: FileKey
    start: int
    end: int
    file_offset: int
    tgid: int
    tid: int
    size: int


def parse_requests(chunk: bytes) -> Iterator[FileRequest]:
    """The requests in what was taken from their ring. Raises ``ValueError`` if it is damaged."""
    for start, end in record_spans(chunk):
        if end - start != _REQUEST.size:
            raise ValueError(f"a file request of {end - start} bytes")
        inode, device, generation, *rest = _REQUEST.unpack_from(chunk, start)
        yield FileRequest(FileKey(inode, device, generation), *rest)


def is_same_file(request: FileRequest, status: os.stat_result, *, mapped: bool = False) -> bool:
    """Whether a file is the requested one.

    Inode and size must be equal, and so must the device. Where the device of ``stat`` is not that
    of the inode, which is so on overlayfs and btrfs, it is an anonymous one (major 0). Then the
    size must be known, or the file have been reached by its very mapping.

    Args:
        request: names the file.
        status: of the file in question.
        mapped: it was opened by the range of the mapping in the process.
    """
    if not stat.S_ISREG(status.st_mode) or status.st_ino != request.key.inode:
        return False
    if request.size not in (0, status.st_size):
        return False
    major, minor = os.major(status.st_dev), os.minor(status.st_dev)
    if major << _MINOR_BITS | minor == request.key.device:
        return True
    return major == 0 and (mapped or request.size > 0)
