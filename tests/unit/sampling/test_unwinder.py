"""The user unwinder's settings depend on properties of the host."""

import os

import pytest

from otel_kprofiler.sampling.unwinder import find_address_bits

LINES = """\
00400000-00401000 r-xp 00000000 08:01 131 /usr/bin/program
{top:x}-{end:x} rw-p 00000000 00:00 0 [stack]
"""


class Files:
    """Access to a host with a single process's maps."""

    def __init__(self, folder, maps):
        self._maps = folder / "maps"
        if maps is not None:
            self._maps.write_text(maps)

    def open_fd(self, path):
        assert path == "/proc/self/maps"
        return os.open(self._maps, os.O_RDONLY)


@pytest.mark.parametrize("bits", [39, 42, 47, 48])
def test_the_number_of_address_bits_is_derived_from_the_stack_mapping(tmp_path, bits):
    end = (1 << bits) - 0x10000
    assert find_address_bits(Files(tmp_path, LINES.format(top=end - 0x21000, end=end))) == bits


@pytest.mark.parametrize("maps", [None, ""])
def test_addresses_are_assumed_to_have_64_bits_if_maps_cannot_be_read(tmp_path, maps):
    assert find_address_bits(Files(tmp_path, maps)) == 64
