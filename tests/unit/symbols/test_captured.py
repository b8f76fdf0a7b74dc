"""Captured files can be read in all formats, corruption is reported, and the examples work."""

import gzip
import lzma
import os
import tarfile
import threading
from pathlib import Path

import pytest
import zstandard

from otel_kprofiler.errors import KProfilerError
from otel_kprofiler.model import (
    ON_CPU,
    STACK_OK,
    USER_SIDE,
    FrameSource,
    RangeSource,
    RawSample,
    StackEnd,
    Unresolved,
    pack_user_stack,
)
from otel_kprofiler.symbols import CapturedFiles, KernelSymbolizer
from tests.examples import examples
from tests.ksymbol_records import ksymbol, program

EXAMPLES = examples("symbols.md")
COMPRESS = {
    ".xz": lzma.compress,
    ".gz": gzip.compress,
    ".zst": zstandard.ZstdCompressor(write_checksum=True).compress,
}
NAMES = {
    "kallsyms": "kallsyms.xz",
    "modules": "proc_modules",
    "sys_module": "sys_module.tar.xz",
    "notes": "sys_kernel_notes",
}


@pytest.fixture
def copies(modules_folder):
    return {what: modules_folder / name for what, name in NAMES.items()}


@pytest.fixture(scope="module")
def few_sections(modules_folder, tmp_path_factory):
    """Creates an archive with only one module, which can be read much faster."""
    path = tmp_path_factory.mktemp("few") / "sys_module.tar.xz"
    with (
        tarfile.open(modules_folder / NAMES["sys_module"]) as whole,
        tarfile.open(path, "w:xz") as few,
    ):
        for member in whole:
            if Path(member.name).parts[1] == "ext4":
                few.addfile(member, whole.extractfile(member))
    return path


@pytest.fixture
def small_copies(copies, few_sections):
    return {**copies, "sys_module": few_sections}


def options(copies):
    return [word for what, path in copies.items() for word in (f"--{what.replace('_', '-')}", path)]


@pytest.mark.parametrize("suffix", [*COMPRESS, ""])
def test_copies_of_kernel_files_may_be_compressed(tmp_path, small_copies, suffix):
    compress = COMPRESS.get(suffix, bytes)
    given = {}
    for what, path in small_copies.items():
        data = path.read_bytes()
        data = lzma.decompress(data) if path.suffix == ".xz" else data
        given[what] = tmp_path / (path.name.removesuffix(".xz") + suffix)
        given[what].write_bytes(compress(data))
    given["kallsyms"] = given["kallsyms"].rename(tmp_path / "renamed")
    symbolizer = KernelSymbolizer.from_files(**given)
    assert_same(symbolizer, KernelSymbolizer.from_files(**small_copies))
    assert symbolizer.reload(5) is symbolizer.snapshot, "copies do not change"


def assert_same(symbolizer, expected):
    assert symbolizer.snapshot.modules == expected.snapshot.modules
    assert symbolizer.find("ext4_", prefix=True) == expected.find("ext4_", prefix=True) != ()


def test_a_copy_of_kallsyms_can_be_read_from_a_pipe(tmp_path, copies, modules):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    data = lzma.decompress(copies["kallsyms"].read_bytes())
    writer = threading.Thread(target=pipe.write_bytes, args=(data,))
    writer.start()
    symbolizer = KernelSymbolizer.from_files(**{**copies, "kallsyms": pipe})
    writer.join()
    assert_same(symbolizer, modules)


@pytest.mark.parametrize("what", [*NAMES, "version", "builtin_ranges", "kallmodsyms"])
def test_a_mistyped_path_is_an_error(tmp_path, small_copies, symbolize, what):
    missing = tmp_path / "no_such_file"
    with pytest.raises(FileNotFoundError, match="no_such_file"):
        KernelSymbolizer.from_files(**{**small_copies, what: missing})
    wrong = tmp_path if what != "sys_module" else small_copies["modules"]
    with pytest.raises(NotADirectoryError if what == "sys_module" else IsADirectoryError):
        KernelSymbolizer.from_files(**{**small_copies, what: wrong})
    if what != "version":
        status, _, notes = symbolize(*options({**small_copies, what: missing}), "vfs_read")
        assert status == 3
        assert f"cannot read {missing}: No such file" in notes.replace("\n", "")
        notes = symbolize(*options({**small_copies, what: wrong}), "vfs_read")[2]
        assert ("pass the copied file itself" in notes) is (what != "sys_module")


@pytest.mark.parametrize(
    ("what", "suffix"),
    [*(("kallsyms", suffix) for suffix in COMPRESS), *((what, ".xz") for what in list(NAMES)[1:])],
)
def test_a_corrupt_copy_of_kernel_files_is_reported_without_a_traceback(
    tmp_path, small_copies, symbolize, what, suffix
):
    name = f"copy.tar{suffix}" if what == "sys_module" else f"copy{suffix}"
    packed = COMPRESS[suffix](os.urandom(5000))
    for damaged in (packed[: len(packed) // 2], packed[:20] + bytes(100) + packed[120:]):
        copy = tmp_path / name
        copy.write_bytes(damaged)
        with pytest.raises(KProfilerError, match=name):
            KernelSymbolizer.from_files(**{**small_copies, what: copy})
        status, _, notes = symbolize(*options({**small_copies, what: copy}), "vfs_read")
        assert status == 1
        assert name in notes.replace("\n", "")


@pytest.mark.parametrize("keep", [0, 1, 300, 512, 5000])
def test_a_corrupt_archive_is_reported_without_a_traceback(tmp_path, copies, keep):
    archive = tmp_path / "sys_module.tar"
    whole = lzma.decompress(copies["sys_module"].read_bytes())
    archive.write_bytes(whole[:keep] + b"?" * 700 if keep else b"")
    with pytest.raises(KProfilerError, match=r"sys_module\.tar is not a readable tar archive"):
        KernelSymbolizer.from_files(**{**copies, "sys_module": archive})


def test_an_impossible_size_in_an_archive_is_reported_without_a_traceback(tmp_path, copies):
    """The size is negative or exceeds the maximum file offset, but the checksum matches."""
    header = bytearray(tarfile.TarInfo("sys/module").tobuf())
    header[124:136] = b"\xff" + bytes(11)
    header[148:156] = b"%06o\0 " % sum(header[:148] + b" " * 8 + header[156:])
    archive = tmp_path / "sys_module.tar.xz"
    archive.write_bytes(lzma.compress(bytes(header) + bytes(1024)))
    with pytest.raises(KProfilerError, match=r"sys_module\.tar\.xz"):
        KernelSymbolizer.from_files(**{**copies, "sys_module": archive})


def test_concatenated_xz_streams_are_read(tmp_path, copies, modules):
    whole = lzma.decompress(copies["kallsyms"].read_bytes())
    parts = lzma.compress(whole[:1000]), bytes(8), lzma.compress(whole[1000:])
    copy = tmp_path / "kallsyms.xz"
    copy.write_bytes(b"".join(parts))
    assert_same(KernelSymbolizer.from_files(**{**copies, "kallsyms": copy}), modules)
    copy.write_bytes(b"".join(parts)[:-1])
    with pytest.raises(KProfilerError, match="it is truncated"):
        KernelSymbolizer.from_files(**{**copies, "kallsyms": copy})


def test_symbolize_reports_malformed_lines_in_copies_of_kernel_files(tmp_path, copies, symbolize):
    cut = tmp_path / "kallsyms"
    cut.write_bytes(lzma.decompress(copies["kallsyms"].read_bytes())[:-5])
    listed = tmp_path / "proc_modules"
    listed.write_bytes(copies["modules"].read_bytes() + b"malformed\n")
    status, _, notes = symbolize(*options({**copies, "kallsyms": cut, "modules": listed}), "_text")
    assert status == 0
    assert "note: /proc/kallsyms: the last line is truncated" in notes
    assert "note: /proc/modules: 1 malformed lines skipped" in notes
    assert KernelSymbolizer.from_files(kallsyms=cut, modules=listed).snapshot.bad_lines == 2
    assert symbolize(*options(copies), "_text")[2] == ""
    notes = symbolize("--kallsyms", copies["kallsyms"], "_text")[2]
    assert notes == "", "copies that were not given are no problem"


def test_the_first_problems_of_a_kind_are_listed_and_the_rest_counted(tmp_path, copies, symbolize):
    _, _, notes = symbolize(*options({**copies, "sys_module": tmp_path}), "_text")
    assert len(notes.splitlines()) == 11
    assert "note: 116 more" in notes


CAPTURED, RECORDED = EXAMPLES["Captured files and recorded events"]
(RESOLVER,) = EXAMPLES["Custom side resolvers"]


def test_the_example_resolver_in_the_docs_resolves_addresses_only_in_the_given_process():
    def sample(tgid):
        frames = ((0x5000, None, FrameSource.REGISTERS), (0x6001, None, FrameSource.FRAME_POINTER))
        stacks = (pack_user_stack(StackEnd.COMPLETE, frames),)
        return RawSample(
            ON_CPU, 1, 10, 0, tgid, tgid, 1, 0, b"", ((USER_SIDE, STACK_OK),), stacks, None
        )

    given = {"pid": 7, "names": {0x5000: "compiled", 0x6000: "caller"}, "sample": sample(7)}
    exec(RESOLVER, given)
    other = given["stacks"].resolve(sample(8))
    assert [frame.function for frame in given["stack"].frames] == ["compiled", "caller"]
    assert [frame.function for frame in other.frames] == ["", ""]
    assert [frame.address for frame in other.frames] == [0x5000, 0x6000]


def test_the_captured_files_example_works(modules_folder, monkeypatch, capsys):
    monkeypatch.chdir(modules_folder)
    results = {}
    exec(CAPTURED, results)
    assert results["leaf"].address - results["caller"].address in {0, 1}
    assert capsys.readouterr().out


def test_the_recorded_events_example_resolves_names_by_time(modules_folder, monkeypatch, capsys):
    monkeypatch.chdir(modules_folder)
    address = 0xFFFF_FFFF_C900_1000
    first, second = "bpf_prog_0123456789abcdef_first", "bpf_prog_fedcba9876543210_second"
    records = b"".join((
        ksymbol(address, first, time_ns=1000), program(1, first[9:25], time_ns=0),
        ksymbol(address, first, removed=True, time_ns=2000),
        ksymbol(address, second, time_ns=20_000_000), program(2, second[9:25], time_ns=0),
    ))  # fmt: skip
    given = {"records": records, "end_ns": 30_000_000, "address": address + 8, "time_ns": 1500}
    exec(RECORDED, given)
    out = capsys.readouterr().out.splitlines()
    assert out[0] == str((first,))
    assert first in out[1]
    symbolizer = given["symbolizer"]
    assert symbolizer.explain(address + 8).names == (second,)
    assert symbolizer.explain(address + 8, time_ns=25_000_000).names == (second,)
    between = symbolizer.explain(address + 8, time_ns=15_000_000)
    assert between.frame.unresolved is Unresolved.UNMAPPED
    assert symbolizer.explain(address + 8, time_ns=500).names == ()


def test_an_address_is_explained_with_the_symbols_loaded_at_the_given_time(tmp_path):
    copy = tmp_path / "kallsyms"
    line = "ffffffff81000000 T _text\nffffffff81000000 T {}\nffffffff81001000 T _etext\n"
    copy.write_text(line.format("before"))
    symbolizer = KernelSymbolizer.live(CapturedFiles({"/proc/kallsyms": copy}))
    copy.write_text(line.format("after"))
    symbolizer.reload(1000)
    address = 0xFFFF_FFFF_8100_0004
    assert symbolizer.explain(address).names[0] == "after"
    assert symbolizer.explain(address, time_ns=999).names[0] == "before"
    assert symbolizer.explain(address, time_ns=1000).names[0] == "after"


def test_an_archive_of_sys_module_is_equivalent_to_the_extracted_directory(tmp_path, small_copies):
    with tarfile.open(small_copies["sys_module"]) as archive:
        for member in archive:
            if member.isfile():
                path = tmp_path.joinpath(*Path(member.name).parts[1:])
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(archive.extractfile(member).read())
    extracted = KernelSymbolizer.from_files(**{**small_copies, "sys_module": tmp_path})
    (ext4,) = (module for module in extracted.snapshot.modules if module.name == "ext4")
    assert ext4.range_source is RangeSource.SECTIONS
    assert_same(extracted, KernelSymbolizer.from_files(**small_copies))
