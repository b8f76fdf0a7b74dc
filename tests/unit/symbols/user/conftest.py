"""Files whose symbols tests read."""

import os

import pytest

from otel_kprofiler.elf import FileSource


@pytest.fixture
def opened():
    """Opens files as sources; closes them when the test ends."""
    fds = []

    def open_source(path):
        fds.append(os.open(path, os.O_RDONLY))
        return FileSource(fds[-1], os.fstat(fds[-1]).st_size)

    yield open_source
    for fd in fds:
        os.close(fd)
