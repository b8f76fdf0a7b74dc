"""ELF files for modules and vmlinux are read, compressed or not, and corruption is reported."""

import gzip
import json
import lzma
import struct

import pytest
import zstandard

from otel_kprofiler.cli.symbolize import command
from otel_kprofiler.errors import KProfilerError
from otel_kprofiler.model import Unresolved
from otel_kprofiler.symbols import ElfSymbols, KernelSymbolizer, make_file_id
from otel_kprofiler.symbols.kernel import elf_functions, elf_image
from tests.commands import invoke

ET_REL, ET_EXEC = 1, 2
CODE, DATA = 6, 2
NOTE = struct.pack("<III4s20s", 4, 20, 3, b"GNU\0", bytes(range(20)))
BUILD_ID = bytes(range(20)).hex()


def make_elf(kind, sections, symbols):
    """Returns a file with sections (name, flags, address, size, alignment) and symbols.

    Symbols are (name, section, value, size, binding). Sections are numbered from 1.
    """
    names, strings = bytearray(b"\0"), bytearray(b"\0")
    headers, body = [bytes(64)], bytearray(64)

    def add(name, type_, content, size, *, flags=0, address=0, alignment=1, link=0):
        start = len(names)
        names.extend(name.encode() + b"\0")
        headers.append(struct.pack(
            "<IIQQQQIIQQ", start, type_, flags, address, len(body), size, link, 0, alignment,
            24 if type_ == 2 else 0,
        ))  # fmt: skip
        body.extend(content)

    for name, flags, address, size, alignment in sections:
        add(name, 8, b"", size, flags=flags, address=address, alignment=alignment)
    add(".note.gnu.build-id", 7, NOTE, len(NOTE), flags=DATA, alignment=4)
    table = bytearray(24)
    for name, section, value, size, binding in symbols:
        table += struct.pack("<IBBHQQ", len(strings), binding << 4 | 2, 0, section, value, size)
        strings.extend(name.encode() + b"\0")
    add(".symtab", 2, bytes(table), len(table), alignment=8, link=len(headers) + 1)
    add(".strtab", 3, bytes(strings), len(strings))
    names.extend(b".shstrtab\0")
    headers.append(struct.pack(
        "<IIQQQQIIQQ", len(names) - 10, 3, 0, 0, len(body), len(names), 0, 0, 1, 0
    ))  # fmt: skip
    body.extend(names)
    head = b"\x7fELF\x02\x01\x01" + bytes(9) + struct.pack(
        "<HHIQQQIHHHHHH", kind, 62, 1, 0, 0, len(body), 0, 64, 0, 0, 64, len(headers),
        len(headers) - 1,
    )  # fmt: skip
    body[:64] = head
    return bytes(body) + b"".join(headers)


MODULE = make_elf(
    ET_REL,
    [
        (".text", CODE, 0, 0x95, 16),
        (".init.text", CODE, 0, 0x40, 16),
        (".data", DATA, 0, 0x40, 32),
        (".text.unlikely", CODE, 0, 0x10, 1),
        (".exit.text", CODE, 0, 0x20, 64),
    ],
    [
        ("__pfx_first", 1, 0x00, 16, 0),
        ("first", 1, 0x10, 0x20, 1),
        ("alias_of_first", 1, 0x10, 0x20, 2),
        ("second.isra.0", 1, 0x40, 0x55, 0),
        ("init_module", 2, 0x00, 0x10, 1),
        ("data", 3, 0x00, 0x10, 1),
        ("second.cold", 4, 0x00, 0x10, 0),
        ("cleanup_module", 5, 0x10, 0x10, 1),
        ("leave", 5, 0x10, 0x10, 0),
    ],
)


@pytest.fixture
def module(tmp_path):
    path = tmp_path / "snd-test.ko"
    path.write_bytes(MODULE)
    return path


@pytest.mark.parametrize(
    ("rva", "name", "section"),
    [
        (0x00, "first", ".text"),  # padding after first
        (0x10, "first", ".text"),
        (0x2F, "first", ".text"),
        (0x30, None, ""),  # after the end of `first`
        (0x40, "second", ".text"),
        (0x94, "second", ".text"),
        (0x95, "second", ".text.unlikely"),  # split off by the compiler
        (0xA5, None, ""),
        (0xC0, None, ""),  # start of the 64-byte-aligned section, before its first function
        (0xD0, "leave", ".exit.text"),
        (0xE0, None, ""),
        (1 << 63, None, ""),
    ],
)
def test_module_sections_except_init_are_laid_out_in_header_order(module, rva, name, section):
    match = ElfSymbols(str(module)).find(rva)
    assert (match and match.line.function) == name
    assert not match or match.section == section


def test_cfi_preambles_and_long_functions_are_named_as_in_a_running_kernel(tmp_path):
    path = tmp_path / "cfi.ko"
    path.write_bytes(make_elf(
        ET_REL,
        [(".text", CODE, 0, 0x6_0000, 16), (".text.more", CODE, 0, 0x10, 16)],
        [
            ("__cfi_f", 1, 0, 16, 0), ("f", 1, 0x10, 0x10, 1), ("__cfi_check", 1, 0x20, 0x10, 0),
            ("long", 1, 0x1_0000, 0x2_0000, 1), ("last", 1, 0x4_0000, 0x2_0000, 1),
            ("more", 2, 0, 0x10, 1),
        ],
    ))  # fmt: skip
    symbols = ElfSymbols(str(path))
    results = {
        rva: (match := symbols.find(rva)) and match.line.function
        for rva in (0, 0xF, 0x10, 0x20, 0x30, 0x2_FFFF, 0x3_0000, 0x5_FFFF, 0x6_0000)
    }
    assert results == {
        0: "f", 0xF: "f", 0x10: "f", 0x20: "__cfi_check", 0x30: None, 0x2_FFFF: "long",
        0x3_0000: None, 0x5_FFFF: "last", 0x6_0000: "more",
    }  # fmt: skip


def test_the_file_id_matches_the_running_module(module):
    symbols = ElfSymbols(str(module))
    assert (symbols.name, symbols.build_id) == ("snd_test", BUILD_ID)
    assert symbols.file_id == make_file_id(BUILD_ID)
    assert symbols.find(0x41).line.system_name == "second.isra.0"
    assert symbols.find(0x10).names == ("first", "alias_of_first")


@pytest.mark.parametrize(
    ("suffix", "pack"),
    [
        ("xz", lzma.compress),
        ("gz", gzip.compress),
        ("zst", zstandard.ZstdCompressor().compress),
        ("debug", bytes),
    ],
)
def test_compressed_modules_yield_the_same_symbols(tmp_path, suffix, pack):
    path = tmp_path / f"snd-test.ko.{suffix}"
    path.write_bytes(pack(MODULE))
    symbols = ElfSymbols(str(path))
    assert (symbols.name, symbols.find(0x10).line.function) == ("snd_test", "first")


def test_rvas_in_vmlinux_are_relative_to_text(tmp_path):
    base = 0xFFFF_FFFF_8100_0000
    path = tmp_path / "vmlinux-6.12"
    path.write_bytes(make_elf(
        ET_EXEC,
        [(".text", CODE, base, 0x100, 16), (".init.text", CODE, base + 0x1000, 0x10, 16)],
        [
            ("_stext", 1, base + 0x20, 0, 1), ("_text", 1, base, 0, 1),
            ("vfs_read", 1, base + 0x40, 0x10, 1), ("start", 2, base + 0x1000, 0x10, 1),
        ],
    ))  # fmt: skip
    symbols = ElfSymbols(str(path))
    assert symbols.name == "vmlinux"
    assert [symbols.find(rva) and symbols.find(rva).line.function
            for rva in (0x10, 0x40, 0x50, 0x1004)] == [None, "vfs_read", None, "start"]  # fmt: skip


def test_symbols_for_a_stripped_file_are_read_from_the_installed_debug_file(tmp_path, monkeypatch):
    stripped = tmp_path / "m.ko"
    stripped.write_bytes(MODULE.replace(b".symtab", b".sumtab"))
    with pytest.raises(KProfilerError, match="has no symbols"):
        ElfSymbols(str(stripped))
    debug = tmp_path / ".build-id" / BUILD_ID[:2] / f"{BUILD_ID[2:]}.debug"
    debug.parent.mkdir(parents=True)
    debug.write_bytes(MODULE)
    monkeypatch.setattr(
        elf_functions, "find_debug_file", lambda key: elf_image.find_debug_file(key, str(tmp_path))
    )
    symbols = ElfSymbols(str(stripped))
    assert (symbols.name, symbols.find(0x10).line.function) == ("m", "first")


@pytest.mark.parametrize(
    "content", [b"", b"\x7fELF", b"text", MODULE[:70], lzma.compress(b"x" * 99)[:40]]
)
def test_the_error_for_a_file_that_is_not_an_elf_file_contains_its_path(tmp_path, content):
    path = tmp_path / "broken.ko"
    path.write_bytes(content)
    with pytest.raises(KProfilerError, match=r"broken\.ko"):
        ElfSymbols(str(path))


def run(*arguments, status=0, text=None):
    return invoke(command, *arguments, status=status, input=text).output


def test_symbolize_resolves_rvas_to_functions(module):
    assert run("--elf", module, "--rva", "0x14", "41") == (
        "snd_test+0x14  first+0x4  .text+0x14\nsnd_test+0x41  second+0x1  .text+0x41\n"
    )
    assert run("--elf", module, "-", text="14\n") == "snd_test+0x14  first+0x4  .text+0x14\n"
    assert run("--elf", module, "--rva", "30", status=1) == "snd_test+0x30  [no function]\n"


TEXT = 0xFFFF_FFFF_C000_0000


@pytest.fixture
def host(tmp_path):
    """Creates the files that describe a loaded module; returns the paths as keyword arguments."""
    lines = [(0x10, "first"), (0x40, "second.isra.0"), (0x95, "second.cold"), (0xD0, "leave")]
    (tmp_path / "kallsyms").write_text(
        "".join(f"{TEXT + at:x} t {name}\t[snd_test]\n" for at, name in lines)
    )
    (tmp_path / "modules").write_text(f"snd_test 4096 0 - Live {TEXT:#x}\n")
    for path, content in {
        "sections/.text": b"%#x" % TEXT,
        "sections/.text.unlikely": b"%#x" % (TEXT + 0x95),
        "sections/.exit.text": b"%#x" % (TEXT + 0xC0),
        "notes/.note.gnu.build-id": NOTE,
    }.items():
        file = tmp_path / "sys_module" / "snd_test" / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(content)
    return {name: tmp_path / name for name in ("kallsyms", "modules", "sys_module")}


def test_function_sizes_of_a_loaded_module_are_read_from_its_elf_file(host, module):
    """Without the file, functions would extend to the next symbol in kallsyms."""
    ends = [TEXT + rva for rva in (0x30, 0xA5, 0xE0)]
    bare, exact = (
        KernelSymbolizer.from_files(**host),
        KernelSymbolizer.from_files(**host, elf=[module]),
    )
    assert [bare.explain(end).frame.function for end in ends] == ["first", "second", "leave"]
    frames = [exact.explain(end - 1).frame for end in ends]
    assert [frame.function for frame in frames] == ["first", "second", "leave"]
    behind = [exact.explain(end).frame for end in ends]
    assert [frame.unresolved for frame in behind] == [Unresolved.NO_SYMBOL] * 3
    assert {frame.module.build_id for frame in behind} == {BUILD_ID}


def test_an_elf_file_that_matches_no_loaded_module_is_rejected(host, tmp_path):
    other = tmp_path / "other.ko"
    other.write_bytes(MODULE.replace(NOTE[-4:], b"abcd"))
    with pytest.raises(KProfilerError, match=r"other\.ko does not match any loaded module"):
        KernelSymbolizer.from_files(**host, elf=[other])


def test_symbolize_reads_function_sizes_from_a_module_file(host, module):
    copies = [f"--{name.replace('_', '-')}={path}" for name, path in host.items()]
    shown = run(*copies, "--elf", module, f"{TEXT + 0x2F:#x}", f"{TEXT + 0x30:#x}").splitlines()
    assert "first+0x1f" in shown[0]
    assert Unresolved.NO_SYMBOL.value in shown[1]


def test_several_elf_files_are_distinguished_by_build_id(tmp_path, module):
    other = tmp_path / "other.ko"
    other.write_bytes(MODULE.replace(NOTE[-4:], b"abcd"))
    both = "--elf", module, "--elf", other
    (result,) = (json.loads(run(*both, "--json", "--rva", f"{BUILD_ID}:14")),)
    assert (result["module"], result["function"], result["offset"]) == ("snd_test", "first", 4)
    assert "use FILE_ID:ADDR" in run(*both, "--rva", "14", status=2)
    assert "no file has this id" in run(*both, "--rva", "ab:14", status=1)
