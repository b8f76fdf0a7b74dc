"""Source lines and inlined functions match those from llvm-symbolizer."""

import errno
import os
import posixpath
import random
import re
import struct
import subprocess
import sys
import tempfile
import time
import tracemalloc
from pathlib import Path

import pytest

from otel_kprofiler.elf import FileSource, read_elf
from otel_kprofiler.errors import DependencyError
from otel_kprofiler.host import (
    FIRST_HOLD_S,
    CpuRate,
    RefusedFiles,
    child_command,
    limited_children,
)
from otel_kprofiler.model import FileDetails, FileId, Line
from otel_kprofiler.symbols.user import convert_lines
from otel_kprofiler.symbols.user import lines as module
from otel_kprofiler.symbols.user.demangle import demangle
from otel_kprofiler.symbols.user.lines import ConversionLimits, SymbolicLines
from otel_kprofiler.symbols.user.lines_error import LinesError, LinesProblem
from otel_kprofiler.symbols.user.sources import SymbolSources
from otel_kprofiler.symbols.user.symcache import SymCache
from tests.fuse import mounted
from tests.public import copy_environment
from tests.unit.symbols.user import hostile_dwarf
from tests.unit.symbols.user.elf_programs import tool

pytestmark = pytest.mark.system

SOURCE = Path(__file__).parents[3] / "data" / "symbols" / "inlines.cc"
ADDRESSES = int(os.environ.get("KPROFILER_LINES", "300"))
PROGRAMS = {
    "pie": ["g++", "-O2", "-g", "-gdwarf-5"],
    "dwarf4": ["g++", "-O2", "-g", "-gdwarf-4", "-no-pie"],
    "clang": ["clang++-14", "-O2", "-g", "-gdwarf-5"],
}
if ADDRESSES > 300:
    PROGRAMS["static"] = ["g++", "-O2", "-g", "-gdwarf-4", "-static", "-no-pie"]
    PROGRAMS["static-pie"] = ["g++", "-O3", "-g", "-static-pie"]
    PROGRAMS["compressed"] = ["g++", "-O2", "-g", "-gz=zlib"]


@pytest.fixture(scope="module")
def build(tmp_path_factory):
    made = {}

    def build(name):
        if name not in made:
            made[name] = str(tmp_path_factory.mktemp("lines") / name)
            tool(*PROGRAMS[name], "-o", made[name], str(SOURCE))
        return made[name]

    return build


def code_addresses(path, count):
    """Returns code addresses: return addresses minus one, and random addresses."""
    text = tool("objdump", "-d", "--no-show-raw-insn", "-j", ".text", path)
    if "static" in path:  # excludes the C library
        parts = re.split(r"^[0-9a-f]+ <(.*)>:$", text, flags=re.MULTILINE)[1:]
        own = re.compile("main$|_ZN5TableILi|_ZN12_GLOBAL__N_1(3top|4text)E")
        named = zip(parts[::2], parts[1::2], strict=True)
        text = "".join(code for name, code in named if own.match(name))
    found = re.findall(r"^ +([0-9a-f]+):\t(\S+)", text, re.MULTILINE)
    addresses = [int(address, 16) for address, _ in found]
    calls = [
        after - 1
        for (_, name), after in zip(found, addresses[1:], strict=False)
        if name.startswith("call")
    ]
    rng = random.Random(7)
    rng.shuffle(calls)
    chosen = calls[: count // 2]
    return chosen + [rng.randrange(addresses[0], addresses[-1]) for _ in range(count - len(chosen))]


def symbolize(path, addresses):
    """Runs llvm-symbolizer, and returns function, file and line, innermost first."""
    out = tool(
        "llvm-symbolizer-14", "--no-demangle", "--inlines", "-e", path,
        input="\n".join(map(hex, addresses)),
    )  # fmt: skip
    for block in out.strip().split("\n\n"):
        rows = block.split("\n")
        found = []
        for name, place in zip(rows[::2], rows[1::2], strict=True):
            file, line, _ = place.rsplit(":", 2)
            file = "" if file == "??" else posixpath.normpath(file)
            found.append(("" if name == "??" else demangle(name), file, int(line)))
        yield found


@pytest.mark.parametrize("name", PROGRAMS)
def test_lines_and_inlined_functions_match_llvm(name, build, cache, opened):
    path = build(name)
    table = SymbolicLines(cache).open(opened(path))
    addresses = code_addresses(path, ADDRESSES)
    inlined = compared = stale = 0
    for address, expected in zip(addresses, symbolize(path, addresses), strict=True):
        found = [(line.function, line.file, line.line) for line in table.lookup(address)]
        if not expected[-1][0]:  # padding, for which llvm reports lines
            assert not found, hex(address)
        elif len(expected) == 1 and not expected[0][2]:  # the function is only in the symbol table
            assert not found or found == expected, hex(address)
        elif found and found == expected[1:]:
            stale += 1  # the row only marks the end of the previous function
        else:
            assert found == expected, hex(address)
            compared += 1
            inlined += len(found) > 1
    assert compared > (0.4 if "static" in name else 0.8) * len(addresses)
    assert inlined > 50
    assert stale <= 0.005 * len(addresses)


def test_line_lookups_return_demangled_and_linkage_names(build, cache, opened):
    path = build("pie")
    table = SymbolicLines(cache).open(opened(path))
    rows = [line.split() for line in tool("nm", "--defined-only", path).splitlines()]
    starts = {name: int(start, 16) for start, _, name in rows}
    line = SOURCE.read_text().splitlines().index("int main(int count, char **words) {") + 1
    assert table.lookup(starts["main"])[-1]._replace(system_name="") == Line(
        "main", "", str(SOURCE), line
    )
    name = next(name for name in starts if name.startswith("_ZN5TableILi3EE3sumEl"))
    assert table.lookup(starts[name])[-1][:2] == ("Table<3>::sum(long)", name)
    assert table.lookup(0) == table.lookup(1 << 40) == table.lookup((1 << 64) - 1) == ()


def test_a_stripped_file_has_no_lines_but_its_debug_file_does(build, cache, opened, tmp_path):
    path, debug = str(tmp_path / "program"), str(tmp_path / "program.debug")
    tool("objcopy", "--only-keep-debug", build("dwarf4"), debug)
    tool("objcopy", "--strip-all", build("dwarf4"), path)
    whole = SymbolicLines(cache).open(opened(build("dwarf4")))
    lines = SymbolicLines(cache).open(opened(debug))
    stripped = SymbolicLines(cache).open(opened(path))
    for address in code_addresses(path, 100):
        assert lines.lookup(address) == whole.lookup(address)
        assert stripped.lookup(address) == ()


def test_converted_lines_are_cached_for_the_next_run(build, cache, opened, monkeypatch, tmp_path):
    source = opened(build("pie"))
    first = SymbolicLines(cache).open(source)
    (name,) = os.listdir(cache.path)
    assert os.stat(Path(cache.path, name)).st_mode & 0o777 == 0o600
    with monkeypatch.context() as patch:
        patch.setattr(limited_children, "MeteredChild", None)
        again = SymbolicLines(cache).open(source)
    addresses = code_addresses(build("pie"), 50)
    assert [again.lookup(at) for at in addresses] == [first.lookup(at) for at in addresses]
    for damage in (b"", b"KPLINES0" + bytes(100), b"KPLINES1" + bytes(100)):
        Path(cache.path, "damaged").write_bytes(damage)
        os.replace(Path(cache.path, "damaged"), Path(cache.path, name))
        repaired = SymbolicLines(cache).open(source)
        assert [repaired.lookup(at) for at in addresses] == [first.lookup(at) for at in addresses]
        assert os.stat(Path(cache.path, name)).st_size > 10_000


def test_lines_of_a_file_without_a_build_id_are_not_kept(build, cache, opened, tmp_path):
    path = str(tmp_path / "program")
    tool("objcopy", "--remove-section=.note.gnu.build-id", build("pie"), path)
    table = SymbolicLines(cache).open(opened(path))
    assert any(map(table.lookup, code_addresses(build("pie"), 50)))
    assert os.listdir(cache.path) == []


@pytest.mark.usefixtures("ignored_children")
def test_lines_are_read_even_if_the_kernel_discards_the_childs_status(build, opened):
    addresses = code_addresses(build("pie"), 20)
    assert any(map(SymbolicLines(None).open(opened(build("pie"))).lookup, addresses))


def test_lines_of_a_deleted_file_are_read_without_a_cache(build, opened, tmp_path):
    path = tmp_path / "deleted"
    path.write_bytes(Path(build("pie")).read_bytes())
    source = opened(path)
    path.unlink()
    table = SymbolicLines(None).open(source)
    assert any(table.lookup(address) for address in code_addresses(build("pie"), 20))


@pytest.mark.parametrize(
    ("limits", "cause"),
    [
        (ConversionLimits(file_bytes=1000), "the file is larger than"),
        (
            ConversionLimits(memory_bytes=17 << 20),
            "of a 1 MiB file takes more memory than the 17 MiB limit",
        ),
        (ConversionLimits(memory_bytes=1 << 20), "raise max_user_symbol_megabytes"),
        (ConversionLimits(result_bytes=1000), "cannot be converted"),
        (ConversionLimits(wall_s=0.0), "took over 0 s"),
    ],
)
def test_a_dwarf_conversion_that_exceeds_a_limit_fails(limits, cause, build, cache, opened):
    file = opened(build("pie"))
    started = time.monotonic()
    with pytest.raises(LinesError, match=cause):
        SymbolicLines(cache, limits).open(file)
    assert time.monotonic() - started < 60
    assert os.listdir(cache.path) == []


def test_dwarf_that_converts_too_slowly_for_its_size_is_rejected(cache, opened, tmp_path):
    """A range list shared by all functions is read again for each function."""
    path = tmp_path / "ranges"
    path.write_bytes(hostile_dwarf.ranges())
    rate = CpuRate(least_s=0.5, per_mib_s=0.2, most_s=60)
    expected = "converting the DWARF took more than 1 s of CPU for 3 MiB"
    with pytest.raises(LinesError, match=f"^{expected}$") as caught:
        SymbolicLines(cache, ConversionLimits(cpu=rate)).open(opened(path))
    assert caught.value.problem is LinesProblem.CPU_TIME
    assert os.listdir(cache.path) == []


def test_a_file_with_rejected_dwarf_is_not_converted_again_until_the_file_changes(
    build, cache, opened, tmp_path, monkeypatch
):
    path = tmp_path / "ranges"
    path.write_bytes(hostile_dwarf.ranges())
    lines = SymbolicLines(cache, ConversionLimits(cpu=CpuRate(1, 0, 1)))
    with pytest.raises(LinesError) as first:
        lines.open(opened(path))
    with monkeypatch.context() as without:
        without.setattr(limited_children, "MeteredChild", None)
        with pytest.raises(LinesError, match=f"^{first.value}$") as again:
            lines.open(opened(path))
    assert (first.value.problem, again.value.problem) == (LinesProblem.CPU_TIME,) * 2
    path.write_bytes(Path(build("pie")).read_bytes())
    assert any(map(lines.open(opened(path)).lookup, code_addresses(build("pie"), 20)))


def test_dwarf_conversion_is_retried_30_s_after_a_temporary_failure(build, cache, opened):
    now_s = 0.0
    lines = SymbolicLines(cache, ConversionLimits(wall_s=0.01))
    lines._refused = RefusedFiles(lambda: now_s)
    for _ in range(2):
        with pytest.raises(LinesError, match="took over"):
            lines.open(opened(build("pie")))
        lines._limits = ConversionLimits()
    now_s = FIRST_HOLD_S + 1
    assert any(map(lines.open(opened(build("pie"))).lookup, code_addresses(build("pie"), 20)))


def read_symbols(source, lines):
    details = FileDetails("pie", None, FileId("0" * 32))
    return SymbolSources(finders=(), lines=lines).read(source, read_elf(source), details)


@pytest.mark.parametrize(
    ("limits", "expected"),
    [
        (ConversionLimits(wall_s=0.01), (LinesProblem.TIME, True)),
        (ConversionLimits(result_bytes=1000), (LinesProblem.DAMAGED, False)),
    ],
)
def test_symbols_record_whether_their_source_lines_may_become_available_later(
    limits, expected, build, cache, opened
):
    lines = SymbolicLines(cache, limits)
    for _ in range(2):  # the second read uses the cached result
        symbols = read_symbols(opened(build("pie")), lines)
        assert (symbols.lines_problem, symbols.can_retry_lines) == expected


@pytest.mark.parametrize(
    "error",
    [
        LinesError("the disk is full", LinesProblem.NOT_KEPT, may_pass=True),
        OSError(errno.EMFILE, ""),
    ],
)
def test_source_lines_may_still_become_available_after_a_temporary_failure(error, build, opened):
    class Failing:
        def open(self, source, path, alternate=None):
            raise error

    symbols = read_symbols(opened(build("pie")), Failing())
    assert symbols.lines_problem is not None
    assert symbols.can_retry_lines


@pytest.mark.parametrize(
    ("most_bytes", "cause", "status"),
    [(1 << 20, "No space left", os.EX_TEMPFAIL), (1000, "File too large", 1)],
)
def test_a_full_disk_is_treated_as_a_temporary_failure(build, tmp_path, most_bytes, cause, status):
    output = "/dev/full" if status == os.EX_TEMPFAIL else tmp_path / "output"
    command = child_command(convert_lines.__name__, str(most_bytes))
    with open(build("pie"), "rb") as file, open(output, "wb") as out:
        ran = subprocess.run(command, stdin=file, stdout=out, stderr=subprocess.PIPE, text=True)
    assert (ran.returncode, cause in ran.stderr) == (status, True), ran.stderr


def test_a_frozen_file_system_does_not_delay_other_files(build, opened, tmp_path, monkeypatch):
    """The headers are in the page cache, so only the child blocks."""
    content = Path(build("pie")).read_bytes()
    with mounted(tmp_path / "fuse", {"file": content}) as fuse, open(fuse.point / "file") as file:
        source = FileSource(file.fileno(), len(content))
        os.posix_fadvise(source.fd, 0, 0, os.POSIX_FADV_RANDOM)  # no readahead
        module.hash_file(source)
        module.count_dwarf_bytes(source)
        lines = SymbolicLines(None)
        fuse.freeze("read")
        with pytest.raises(LinesError, match="is not responding") as caught:
            lines.open(source)
        assert caught.value.problem is LinesProblem.UNANSWERED
        with monkeypatch.context() as without:
            without.setattr(limited_children, "MeteredChild", None)
            with pytest.raises(LinesError, match="is not responding"):
                lines.open(source)
        assert lines.open(opened(build("pie"))).lookup(code_addresses(build("pie"), 1)[0])
        fuse.thaw()


def test_the_cpu_limit_is_based_on_the_decompressed_size_of_dwarf(build, opened, tmp_path):
    count = module.count_dwarf_bytes
    plain = count(opened(build("pie")))
    assert plain > 10_000
    for form in ("zlib", "zlib-gnu", "zstd"):
        tool("objcopy", f"--compress-debug-sections={form}", build("pie"), str(tmp_path / form))
        assert count(opened(tmp_path / form)) == pytest.approx(plain, rel=0.05)
    tool("objcopy", "--strip-debug", build("pie"), str(tmp_path / "stripped"))
    assert count(opened(tmp_path / "stripped")) == 0
    large = tmp_path / "large"
    large.write_bytes(hostile_dwarf.compressed())
    assert os.stat(large).st_size < 3 << 20
    assert 256 << 20 <= count(opened(large)) < 257 << 20


def test_lines_that_cannot_be_cached_are_not_written_to_a_temporary_file(build, cache, opened):
    """A temporary file might remain in memory for as long as the lines are used."""
    os.rmdir(cache.path)
    with pytest.raises(LinesError, match=f"cannot be kept in {cache.path}: No such file") as caught:
        SymbolicLines(cache).open(opened(build("pie")))
    assert (caught.value.problem, caught.value.may_pass) == (LinesProblem.NOT_KEPT, True)


def test_files_that_are_not_elf_are_rejected(cache, opened):
    for content in (SOURCE, "/dev/null"):
        with pytest.raises(LinesError, match="cannot be converted"):
            SymbolicLines(cache).open(opened(content))
    assert os.listdir(cache.path) == []


def test_the_error_for_a_missing_library_suggests_the_fix(monkeypatch):
    monkeypatch.setattr(module.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(DependencyError) as caught:
        SymbolicLines(None)
    assert "pip install 'otel-kprofiler[dwarf]'" in caught.value.hint


CONVERT = """
import os, sys; from otel_kprofiler.elf import FileSource
from otel_kprofiler.symbols.user.lines import SymbolicLines
fd = os.open(sys.argv[1], os.O_RDONLY)
SymbolicLines(None).open(FileSource(fd, os.fstat(fd).st_size))
print("symbolic" in sys.modules)
"""


def test_the_dwarf_library_is_not_loaded_into_the_calling_process(build):
    assert tool(sys.executable, "-c", CONVERT, build("pie")) == "False\n"


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, for a directory of another user")
def test_the_library_is_loaded_before_the_privileges_to_read_it_are_dropped(build):
    """Root may run a profiler that is installed in a user's private home directory."""
    with tempfile.TemporaryDirectory(dir="/tmp") as home:
        os.chmod(home, 0o755)
        words = copy_environment(Path(home)).words
        os.chown(home, 65534, 65534)
        os.chmod(home, 0o700)
        assert tool(*words, "-c", CONVERT, build("pie")) == "False\n"


def test_caching_names_across_files_uses_little_memory(cache, opened, tmp_path):
    count, longest = 300, 8000
    path = tmp_path / "program"
    functions = b"".join(hostile_dwarf.function(at, at) for at in range(count))
    strings = b"n" * (longest + count) + b"\0"
    rows = hostile_dwarf.lines(b"\1" + b"\xf2" * count)  # one row per 16 bytes
    path.write_bytes(hostile_dwarf.dwarf(hostile_dwarf.unit(functions), rows, strings))
    source = opened(path)
    tables = [SymbolicLines(cache).open(source) for _ in range(6)]
    tracemalloc.start()
    try:
        for table in tables:
            for at in range(3, count):  # the first three functions have symbols
                names = [line.function for line in table.lookup(hostile_dwarf.TEXT + 16 * at)]
                assert names == ["n" * min(longest + count - at, 8192)]
        kept_bytes, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert kept_bytes < 6 << 20  # for 14 million characters


def test_opening_a_corrupt_symcache_either_succeeds_or_reports_an_error(build, cache, opened):
    SymbolicLines(cache).open(opened(build("pie")))
    (name,) = os.listdir(cache.path)
    content = Path(cache.path, name).read_bytes()[24:]
    addresses = code_addresses(build("pie"), 40)
    rng = random.Random(3)
    for _ in range(300):
        data = bytearray(content)
        for _ in range(rng.randrange(1, 40)):
            at = rng.randrange(len(data) // 4) * 4 if rng.random() < 0.8 else rng.randrange(20) * 4
            value = rng.choice([0, 1, 0xFFFFFFFF, 0xFFFFFFFE, rng.randrange(5000), 0x80808080])
            struct.pack_into("<I", data, at, value)
        try:
            table = SymCache(bytes(data[: rng.choice([len(data)] * 9 + [len(data) // 2])]), 0)
        except ValueError:
            continue
        for address in addresses:
            assert len(table.lookup(address)) <= 1000
