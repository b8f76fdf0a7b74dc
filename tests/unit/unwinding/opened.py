"""Requests and open files for tests of the queues."""

import os

from otel_kprofiler.elf import ElfFile, FileSource
from otel_kprofiler.host import FileRequest, OpenedFile
from otel_kprofiler.model import FileKey
from otel_kprofiler.unwinding.loading import Code
from otel_kprofiler.unwinding.requests import Opened


def request(inode, tgid=1):
    return FileRequest(FileKey(inode, 1, 2), 0x1000, 0x2000, 0, tgid, tgid, 0, 0)


def opened(inode, tgid=1):
    fd = os.open(os.devnull, os.O_RDONLY)
    file = OpenedFile(fd, os.fstat(fd), os.devnull, "path", os.devnull)
    elf = ElfFile((), (), None, None, 0, (0, 0, 0), 0)
    return Opened(request(inode, tgid), Code(FileSource(fd, 0), elf, file))


def is_open(fd):
    try:
        os.fstat(fd)
    except OSError:
        return False
    return True
