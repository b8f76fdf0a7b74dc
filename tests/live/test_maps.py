"""Mappings of real processes are listed, and looked up by address."""

import ctypes
import errno
import mmap
import os
import platform
import random
import subprocess
import sys

import pytest
from elftools.elf.elffile import ELFFile
from samplers import spawned
from unwind_maps import compile_c

from otel_kprofiler.elf import FileSource, ImageSource, find_address, read_elf
from otel_kprofiler.host import (
    Access,
    ProcessMaps,
    find_vdso,
    maps,
    parse_mappings,
    read_maps,
    read_release,
)
from otel_kprofiler.symbols.user.build import read_functions

pytestmark = pytest.mark.live

REPORTS = """
    #include <stdio.h>
    #include <unistd.h>
    int main(void) { printf("%p\\n", (void *)main); fflush(stdout); return pause(); }
"""


def find_all(pid, addresses):
    process = ProcessMaps(pid)
    try:
        return [process.find(address) for address in addresses]
    finally:
        process.close()


@pytest.fixture
def without_query(monkeypatch):
    def refuse(*_):
        raise OSError(errno.ENOTTY, "as on older kernels")

    monkeypatch.setattr(maps.fcntl, "ioctl", refuse)


@pytest.fixture
def odd_mappings(tmp_path):
    """Maps a file with a newline in its name, a deleted file, and an anonymous file."""
    paths = [tmp_path / "a\nb \\ c", tmp_path / "gone"]
    kept = []
    for path in paths:
        path.write_bytes(bytes(4096))
        with open(path, "r+b") as file:
            kept.append(mmap.mmap(file.fileno(), 4096))
    paths[1].unlink()
    held = os.memfd_create("held")
    os.truncate(held, 4096)
    kept.append(mmap.mmap(held, 4096))
    os.close(held)
    yield [str(path) for path in paths] + ["/memfd:held"]
    while kept:
        kept.pop().close()


def check_every_mapping(odd_mappings):
    rows = list(parse_mappings(read_maps(Access(), "self")))
    seen = {row.path: row.deleted for row in rows}
    assert [seen[path] for path in odd_mappings] == [False, True, True]
    result = find_all(os.getpid(), [random.randrange(row.start, row.end) for row in rows])
    same = [
        one is not None
        and (one.mapping.path, one.mapping.file_offset) == (row.path, row.file_offset)
        for one, row in zip(result, rows, strict=True)
    ]
    # The heap and unnamed memory may have grown; no other mapping may change.
    assert all(match or not row.inode for match, row in zip(same, rows, strict=True))
    for one, row in zip(result, rows, strict=True):
        if row.inode:
            assert one.mapping == row
    assert find_all(os.getpid(), [0, -1, 1 << 64, (1 << 47) - 1]) == [None] * 4
    return result


@pytest.mark.skipif(read_release(Access()) < (6, 11), reason="the kernel has no PROCMAP_QUERY")
def test_each_mapping_is_found_by_address(odd_mappings):
    reported = 0
    for mapping, build_id in filter(None, check_every_mapping(odd_mappings)):
        if mapping.path.startswith("/") and mapping.is_executable and not mapping.deleted:
            with open(mapping.path, "rb") as file:
                size = os.fstat(file.fileno()).st_size
                assert read_elf(FileSource(file.fileno(), size)).build_id == build_id
            reported += build_id is not None
    assert reported


def test_each_mapping_is_found_in_proc_maps_on_older_kernels(odd_mappings, without_query):
    assert all(
        result.build_id is None for result in filter(None, check_every_mapping(odd_mappings))
    )


@pytest.mark.parametrize("query", [True, False])
def test_no_mappings_are_returned_for_a_process_that_exited_or_execed(query, request):
    if not query:
        request.getfixturevalue("without_query")
    code = "import os; os.read(0, 1); os.execvp('cat', ['cat'])"
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        before = ProcessMaps(process.pid)
        row = next(parse_mappings(read_maps(Access(), process.pid)))
        assert before.find(row.start).mapping == row
        process.stdin.write(b"\ncat\n")
        process.stdin.flush()
        assert process.stdout.readline() == b"cat\n"
        assert before.find(row.start) is None
        after = ProcessMaps(process.pid)
        (row,) = [
            row
            for row in parse_mappings(read_maps(Access(), process.pid))
            if row.path.endswith("/cat") and row.is_executable
        ]
        assert after.find(row.start).mapping == row
    assert after.find(row.start) is None
    before.close()
    after.close()
    with pytest.raises(OSError):
        ProcessMaps(process.pid)


@pytest.mark.parametrize(
    "flags",
    [
        ("-pie", "-fPIE", "-Wl,--section-start=.text=0x123000"),
        ("-no-pie", "-Wl,--section-start=.text=0x12345000"),
        ("-no-pie", "-Wl,-z,noseparate-code"),
    ],
)
def test_a_file_offset_maps_to_an_address_in_its_segment(tmp_path, flags):
    path = compile_c(tmp_path / "reports", REPORTS, *flags)
    with open(path, "rb") as file:
        elf = read_elf(FileSource(file.fileno(), os.fstat(file.fileno()).st_size))
        (main,) = ELFFile(file).get_section_by_name(".symtab").get_symbol_by_name("main")
    with spawned(path, stdout=subprocess.PIPE) as process:
        runtime = int(process.stdout.readline(), 16)
        ((mapping, _),) = find_all(process.pid, [runtime])
    offset = runtime - mapping.start + mapping.file_offset
    assert find_address(elf.texts, offset) == main["st_value"] != offset
    assert find_address(elf.texts, elf.texts[-1].offset + elf.texts[-1].size) is None


def test_the_vdso_is_an_elf_file_with_the_functions_of_this_kernel():
    code = find_vdso(Access())
    if code is None:
        pytest.skip("the kernel has no vDSO")
    elf = read_elf(ImageSource(code))
    assert [text.address for text in elf.texts] == [0]
    functions = read_functions(ImageSource(code), elf)
    names = {"x86_64": "__vdso_clock_gettime", "aarch64": "__kernel_clock_gettime"}
    (clock,) = functions.find(names[platform.machine()])
    assert functions.lookup(clock.end - 1).start == clock.start
    libc = ctypes.CDLL(None)
    libc.getauxval.restype = ctypes.c_ulong
    image = libc.getauxval(33)  # AT_SYSINFO_EHDR
    assert ctypes.string_at(image, 64) == code[:64]
