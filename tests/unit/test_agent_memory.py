"""Unmapping unmodified pages keeps the agent's memory small."""

import pytest

from otel_kprofiler.agent.memory import find_clean_mappings
from tests.commands import run_python

pytestmark = pytest.mark.system

MAPPING = """{range} {permissions} 00001000 fe:00 {inode}                    /usr/lib/libx.so.1
Size:               1000 kB
Rss:                 800 kB
Private_Clean:       300 kB
Private_Dirty:       {dirty} kB
Shared_Dirty:          0 kB
Anonymous:           {anonymous} kB
Swap:                {swap} kB
VmFlags: rd ex mr mw me
"""


def mapping(number, **facts):
    facts = {"permissions": "r-xp", "inode": 7, "dirty": 0, "anonymous": 0, "swap": 0, **facts}
    return MAPPING.format(range=f"{number:x}000-{number + 1:x}000", **facts).encode()


def test_only_pages_that_are_identical_to_the_mapped_file_are_unmapped():
    smaps = b"".join(
        [
            mapping(1),
            mapping(2, permissions="r--p"),
            mapping(3, permissions="rwxp"),
            mapping(4, inode=0),  # generated at run time
            mapping(5, dirty=4),
            mapping(6, anonymous=4),  # copied on write to set a breakpoint
            mapping(7, permissions="r--p", swap=4),  # relocated data
            mapping(8, permissions="r--s"),
            mapping(9),
        ]
    )
    assert [start for start, _ in find_clean_mappings(smaps)] == [0x1000, 0x2000, 0x9000]


def test_imported_code_still_runs_after_startup_pages_are_unmapped():
    code = (
        "import hashlib, json\n"
        "from otel_kprofiler.agent.memory import read_resident_bytes, unmap_startup_pages\n"
        "before = read_resident_bytes()\n"
        "unmap_startup_pages()\n"
        "after = read_resident_bytes()\n"
        "assert after < before, (before, after)\n"
        "print(hashlib.sha256(json.dumps({}).encode()).hexdigest()[:8])\n"
    )
    assert run_python(code) == "44136fa3\n"
