"""Fixtures that open files for tests of symbol readers."""

import os

import pytest

from otel_kprofiler.elf import FileSource
from otel_kprofiler.host import CacheDirectory


@pytest.fixture
def opened():
    """Returns a function that opens files as sources, which are closed after the test."""
    fds = []

    def open_source(path):
        fds.append(os.open(path, os.O_RDONLY))
        return FileSource(fds[-1], os.fstat(fds[-1]).st_size)

    yield open_source
    for fd in fds:
        os.close(fd)


@pytest.fixture
def cache(tmp_path):
    directory = CacheDirectory(str(tmp_path / "cache"), 1 << 26)
    yield directory
    directory.close()
