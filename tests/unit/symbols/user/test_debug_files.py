"""Debug files that match a binary are found where debuggers search for them."""

import os
import struct
import zlib

import pytest

from otel_kprofiler.elf import FileSource, read_elf
from otel_kprofiler.host import Access
from otel_kprofiler.symbols.user import debug_files as module
from otel_kprofiler.symbols.user.debug_files import (
    BuildIdDirectories,
    DebugLink,
    DebugLinkDirectories,
    WantedDebugFile,
    find_alternate,
    parse_debug_link,
    want_debug_file,
)
from tests.unit.symbols.user.elf_programs import build, functions_of, symbols_of, tool

pytestmark = pytest.mark.system


class Program:
    """A stripped program and its debug file."""

    def __init__(self, folder, *options):
        self.whole = build(folder, "whole", *options)
        self.debug = os.path.join(folder, "program.debug")
        self.path = os.path.join(folder, "program")
        tool("objcopy", "--only-keep-debug", self.whole, self.debug)
        tool("objcopy", "-S", f"--add-gnu-debuglink={self.debug}", self.whole, self.path)

    def want(self, path, root=""):
        with open(self.path, "rb") as file:
            source = FileSource(file.fileno(), os.fstat(file.fileno()).st_size)
            return want_debug_file(source, read_elf(source), path, root)

    def put(self, root, path):
        target = f"{root}{path}"
        os.makedirs(os.path.dirname(target), exist_ok=True)
        with open(self.debug, "rb") as file, open(target, "wb") as copy:
            copy.write(file.read())
        return target


@pytest.fixture(scope="module")
def with_id(tmp_path_factory):
    return Program(tmp_path_factory.mktemp("id"))


@pytest.fixture(scope="module")
def without_id(tmp_path_factory):
    return Program(tmp_path_factory.mktemp("no-id"), "-Wl,--build-id=none")


def paths(finder, wanted):
    results = []
    for one in finder.find(wanted):
        results.append(one.path)
        one.close()
    return results


def id_path(build_id):
    return f"/usr/lib/debug/.build-id/{build_id[:2]}/{build_id[2:]}.debug"


def test_a_debug_link_written_by_objcopy_is_parsed(without_id):
    with open(without_id.debug, "rb") as file:
        link = DebugLink("program.debug", zlib.crc32(file.read()))
    assert without_id.want("/bin/p").debug_link == link
    assert without_id.want("/bin/p").build_id is None


def test_build_ids_are_looked_up_in_the_process_root_then_on_the_host(with_id, tmp_path):
    wanted = with_id.want("/bin/p", "/proc/7/root")
    finder = BuildIdDirectories(Access(str(tmp_path)), ["/opt/debug", "/usr/lib/debug"])
    assert paths(finder, wanted) == []
    here = id_path(wanted.build_id)
    with_id.put(tmp_path, here)
    with_id.put(tmp_path, f"/proc/7/root{here}")
    with_id.put(tmp_path, here.replace("/usr/lib", "/opt"))
    assert paths(finder, wanted) == [
        f"/proc/7/root{here}", here.replace("/usr/lib", "/opt"), here,
    ]  # fmt: skip


def test_debug_files_are_searched_for_by_name_and_checksum(without_id, tmp_path):
    places = ["/bin/program.debug", "/bin/.debug/program.debug", "/usr/lib/debug/bin/program.debug"]
    for place in places:
        without_id.put(tmp_path, f"/proc/7/root{place}")
    finder = DebugLinkDirectories(Access(str(tmp_path)))
    assert paths(finder, without_id.want("/bin/p")) == []
    wanted = without_id.want("/bin/p", "/proc/7/root")
    assert paths(finder, wanted) == [f"/proc/7/root{place}" for place in places]
    with open(f"{tmp_path}/proc/7/root{places[0]}", "ab") as file:
        file.write(b"\0")
    assert len(paths(finder, wanted)) == 2, "another checksum"


def test_a_file_found_by_name_must_have_the_programs_build_id(with_id, without_id, tmp_path):
    finder = DebugLinkDirectories(Access(str(tmp_path)))
    with_id.put(tmp_path, "/bin/program.debug")
    wanted = with_id.want("/bin/p")
    assert paths(finder, wanted) == ["/bin/program.debug"]
    assert paths(finder, wanted._replace(build_id="00" * 20)) == []
    without_id.put(tmp_path, "/bin/program.debug")
    assert paths(finder, wanted) == []


def test_files_that_are_not_debug_files_are_ignored(with_id, tmp_path):
    wanted = with_id.want("/bin/p")
    target = f"{tmp_path}{id_path(wanted.build_id)}"
    finder = BuildIdDirectories(Access(str(tmp_path)))
    os.makedirs(os.path.dirname(target))
    os.mkfifo(target)
    assert paths(finder, wanted) == [], "an open for reading would block"
    os.remove(target)
    for content in (b"", b"\x7fELF", os.urandom(5000)):
        with open(target, "wb") as file:
            file.write(content)
        assert paths(finder, wanted) == []
    with open(with_id.debug, "rb") as file:
        content = file.read()
    with open(target, "wb") as file:
        file.write(content[:600])
    assert paths(finder, wanted) == []


def test_a_search_for_a_debug_file_leaves_no_descriptor_open(with_id, tmp_path):
    finder = BuildIdDirectories(Access(str(tmp_path)))
    wanted = with_id.want("/bin/p")
    with_id.put(tmp_path, id_path(wanted.build_id))
    before = set(os.listdir("/proc/self/fd"))
    next(finder.find(wanted)).close()
    assert len(paths(finder, wanted)) == 1
    assert paths(finder, wanted._replace(build_id="ab" * 20)) == []
    assert set(os.listdir("/proc/self/fd")) <= before


def test_symbols_from_a_debug_file_match_the_unstripped_program(with_id, without_id, tmp_path):
    for program, finder in (
        (with_id, BuildIdDirectories(Access(str(tmp_path)))),
        (without_id, DebugLinkDirectories(Access(str(tmp_path)))),
    ):
        wanted = program.want("/bin/p")
        program.put(tmp_path, id_path(wanted.build_id or "ab" * 20))
        program.put(tmp_path, "/bin/program.debug")
        (result,) = finder.find(wanted)
        table, whole = functions_of(program.path, result), functions_of(program.whole)
        result.close()
        assert table.find("hidden")
        for start, size, *_ in symbols_of(program.whole).values():
            for address in range(start, start + min(size, 64)):
                assert table.lookup(address) == whole.lookup(address)


@pytest.mark.parametrize("content", [
    b"", b"\0\0\0\0\0\0\0\0", b"abc\0", b"abc\0\1\2\3", b"../x\0\0\0\0\1\2\3\4",
    b"..\0\0\1\2\3\4", b".\0\0\0\1\2\3\4", b"/etc/passwd\0\1\2\3\4",
])  # fmt: skip
def test_malformed_debug_links_are_ignored(content):
    assert parse_debug_link(content) is None


def test_a_debug_link_is_padded_to_four_bytes():
    for name in (b"a", b"ab", b"abc", b"abcd"):
        content = name.ljust((len(name) // 4 + 1) * 4, b"\0") + struct.pack("<I", 7)
        assert parse_debug_link(content) == DebugLink(name.decode(), 7)


def test_checksums_of_huge_files_are_not_computed(without_id, tmp_path, monkeypatch):
    without_id.put(tmp_path, "/bin/program.debug")
    monkeypatch.setattr(module, "MAX_SUMMED_BYTES", 100)
    assert paths(DebugLinkDirectories(Access(str(tmp_path))), without_id.want("/bin/p")) == []


@pytest.mark.parametrize("absolute", [True, False])
def test_a_dwz_file_shared_by_debug_files_is_located(with_id, tmp_path, absolute):
    common = Program(tmp_path, "-DCOMMON=1", "-Wl,--build-id=0x" + "ab" * 20)
    name = "/usr/lib/debug/.dwz/common" if absolute else "../../.dwz/common"
    link = tmp_path / "link"
    link.write_bytes(name.encode() + b"\0" + bytes.fromhex("ab" * 20))
    changed = os.path.join(tmp_path, "with-link")
    tool("objcopy", "--add-section", f".gnu_debugaltlink={link}", with_id.debug, changed)
    with_id_changed = Program.__new__(Program)
    with_id_changed.debug = changed
    wanted = with_id.want("/bin/p")
    with_id_changed.put(tmp_path, id_path(wanted.build_id))
    files = Access(str(tmp_path))
    (debug,) = BuildIdDirectories(files).find(wanted)
    assert find_alternate(debug, files) is None
    common.put(tmp_path, "/usr/lib/debug/.dwz/common")
    alternate = find_alternate(debug, files)
    assert os.path.normpath(alternate.path) == "/usr/lib/debug/.dwz/common"
    assert alternate.elf.build_id == "ab" * 20
    alternate.close()
    with_id.put(tmp_path, "/usr/lib/debug/.dwz/common")
    assert find_alternate(debug, files) is None, "another build id"
    common.put(tmp_path, id_path("ab" * 20))
    by_id = find_alternate(debug, files)
    assert by_id.path == id_path("ab" * 20)
    by_id.close()
    debug.close()


def test_no_directory_is_searched_for_the_debug_file_of_a_program_without_a_path(without_id):
    wanted = WantedDebugFile("[vdso]", "", None, DebugLink("a", 1))
    assert paths(DebugLinkDirectories(Access()), wanted) == []
