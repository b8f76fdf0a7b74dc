"""Files and streams are read up to a size limit."""

import io

import pytest

from otel_kprofiler.reading import read_up_to
from tests.commands import run_python

MEMORY = 1 << 30


class Trickle(io.BytesIO):
    """A stream whose reads return at most three bytes, as reads from a pipe may."""

    def read(self, size=-1, /):
        return super().read(min(size, 3))


@pytest.mark.parametrize("limit", [0, 1, 3, 9, 10, 1000])
@pytest.mark.parametrize("stream", [io.BytesIO, Trickle])
def test_a_stream_is_read_up_to_the_limit(stream, limit):
    content = b"0123456789"
    reader = stream(content)
    assert read_up_to(reader, limit) == content[:limit]
    assert reader.tell() == min(limit, len(content))


@pytest.mark.system
def test_a_small_file_can_be_read_even_if_the_limit_exceeds_the_available_memory(tmp_path):
    file = tmp_path / "small"
    file.write_bytes(b"content")
    program = f"""
import resource, sys
from otel_kprofiler.reading import read_up_to
resource.setrlimit(resource.RLIMIT_AS, ({MEMORY}, {MEMORY}))
with open(sys.argv[1], "rb") as file:
    print(read_up_to(file, {4 * MEMORY}))
"""
    assert run_python(program, file) == "b'content'\n"
