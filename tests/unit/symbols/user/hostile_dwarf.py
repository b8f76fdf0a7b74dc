"""ELF files of a few MB whose DWARF is crafted to take excessive memory or time to convert."""

import struct
import zlib

from tests.unit.symbols.user.hostile_files import CODE, TEXT, make_elf, make_symbols
from tests.wire import pack_varint as uleb

# DWARF 5, sections 7.5.4 to 7.5.6 and 7.22.
COMPILE_UNIT, SUBPROGRAM, INLINED = 0x11, 0x2E, 0x1D
NAME, STMT_LIST, LOW_PC, HIGH_PC, RANGES, ABSTRACT_ORIGIN = 0x03, 0x10, 0x11, 0x12, 0x55, 0x31
ADDR, DATA4, REF4, STRP, INDIRECT, SEC_OFFSET = 0x01, 0x06, 0x13, 0x0E, 0x16, 0x17
COMPRESSED = 0x800
SPAN = 0x100_0000


def abbreviations(*rows):
    """Returns an abbreviation table; each row is (tag, has children, attribute and form, …)."""
    out = b""
    for code, (tag, has_children, *attributes) in enumerate(rows, 1):
        out += uleb(code) + uleb(tag) + bytes([has_children])
        out += b"".join(uleb(name) + uleb(form) for name, form in attributes) + bytes(2)
    return out + b"\0"


ABBREVIATIONS = abbreviations(
    (COMPILE_UNIT, 1, (STMT_LIST, SEC_OFFSET), (LOW_PC, ADDR), (HIGH_PC, DATA4)),
    (SUBPROGRAM, 0, (NAME, STRP), (LOW_PC, ADDR), (HIGH_PC, DATA4)),
    (SUBPROGRAM, 0, (NAME, STRP), (RANGES, SEC_OFFSET)),
    (INLINED, 1, (ABSTRACT_ORIGIN, REF4), (LOW_PC, ADDR), (HIGH_PC, DATA4)),
    (SUBPROGRAM, 1, (NAME, STRP), (LOW_PC, ADDR), (HIGH_PC, DATA4)),
    (SUBPROGRAM, 0, (ABSTRACT_ORIGIN, REF4), (LOW_PC, ADDR), (HIGH_PC, DATA4)),
    (SUBPROGRAM, 0, (NAME, INDIRECT), (LOW_PC, ADDR), (HIGH_PC, DATA4)),
)
UNIT = b"\1" + struct.pack("<IQI", 0, TEXT, SPAN)
FIRST = 11 + len(UNIT)
"""The offset of a unit's first child entry."""


def unit(entries):
    body = struct.pack("<HIB", 4, 0, 8) + UNIT + entries + b"\0"
    return struct.pack("<I", len(body)) + body


def function(index, name=0):
    """Returns the DWARF entry for a 16-byte function."""
    return b"\2" + struct.pack("<IQI", name, TEXT + 16 * index, 16)


def lines(program=b"", files=b"a.c\0\0\0\0"):
    """Returns a DWARF 4 line table. Opcodes from 13 on are special and emit a row."""
    head = (
        bytes([1, 1, 1, 0xFB, 14, 13, 0, 1, 1, 1, 1, 0, 0, 0, 1, 0, 0, 1]) + b"\0" + files + b"\0"
    )
    start = b"\0\x09\x02" + struct.pack("<Q", TEXT)
    body = struct.pack("<HI", 4, len(head)) + head + start + program + b"\0\1\1"
    return struct.pack("<I", len(body)) + body


def dwarf(info, lines=None, strings=b"f\0", abbreviations=ABBREVIATIONS, others=()):
    """Returns a program with three functions and the given DWARF sections."""
    entries, names = make_symbols(3)
    return make_elf(
        [
            CODE,
            (b".symtab", 2, 0, 0, entries, 3, 24),
            (b".strtab", 3, 0, 0, names, 0, 0),
            (b".debug_info", 1, 0, 0, info, 0, 0),
            (b".debug_abbrev", 1, 0, 0, abbreviations, 0, 0),
            (b".debug_line", 1, 0, 0, globals()["lines"]() if lines is None else lines, 0, 0),
            (b".debug_str", 1, 0, 0, strings, 0, 0),
            *others,
        ]
    )


def line_rows():
    """Returns a line program that emits a row for each byte."""
    return dwarf(unit(b"".join(map(function, range(3)))), lines(b"\x21\x20" * (8 << 20)))


def functions():
    """Returns DWARF with functions that have minimal entries."""
    return dwarf(unit(b"".join(map(function, range(600_000)))))


def ranges():
    """Returns DWARF with functions that share one list of many ranges."""
    count = 100_000
    pairs = b"".join(struct.pack("<QQ", 32 * at, 32 * at + 16) for at in range(count))
    some = (b"\3" + struct.pack("<II", 0, 0)) * count
    return dwarf(unit(some), others=[(b".debug_ranges", 1, 0, 0, pairs + bytes(16), 0, 0)])


def nesting():
    """Returns DWARF with deeply nested inlined functions."""
    count = 100_000
    inner = b"".join(
        b"\4" + struct.pack("<IQI", FIRST, TEXT, 0x80_0000 - at) for at in range(count)
    )
    outer = b"\5" + struct.pack("<IQI", 0, TEXT, 0x80_0000)
    return dwarf(unit(function(1 << 20) + outer + inner + bytes(count + 1)))


def origins():
    """Returns DWARF with functions whose abstract origins form a cycle."""
    count, size = 200_000, 17
    entries = b"".join(
        b"\6" + struct.pack("<IQI", FIRST + (at + 1) % count * size, TEXT + 16 * at, 16)
        for at in range(count)
    )
    return dwarf(unit(entries))


def names():
    """Returns DWARF with functions whose long names are suffixes of a single string."""
    entries = b"".join(function(at, at) for at in range(1000))
    return dwarf(unit(entries), strings=b"n" * (1 << 20) + b"\0")


def indirect():
    """Returns DWARF with a name that is reached through many nested indirect forms."""
    head = b"\7" + bytes([INDIRECT]) * (16 << 20) + bytes([STRP])
    return dwarf(unit(head + struct.pack("<IQI", 0, TEXT, 16)))


def many_abbreviations():
    """Returns DWARF with a table of unused abbreviations."""
    rows = b"".join(
        uleb(code) + bytes([SUBPROGRAM, 0, NAME, STRP, 0, 0]) for code in range(8, 2_000_000)
    )
    return dwarf(unit(function(0)), abbreviations=ABBREVIATIONS[:-1] + rows + b"\0")


def compressed():
    """Returns DWARF with a line table that decompresses to 256 MB."""
    packer = zlib.compressobj(1)
    part = bytes(1 << 20)
    packed = b"".join(packer.compress(part) for _ in range(256)) + packer.flush()
    content = struct.pack("<IIQQ", 1, 0, 256 << 20, 1) + packed
    whole = dwarf(unit(function(0)), others=[(b".debug_types", 1, COMPRESSED, 0, content, 0, 0)])
    return whole.replace(b".debug_line\0", b".debug_xxxx\0").replace(
        b".debug_types\0", b".debug_line\0\0"
    )


KINDS = {
    "line-rows": line_rows,
    "functions": functions,
    "ranges": ranges,
    "nesting": nesting,
    "origins": origins,
    "names": names,
    "indirect": indirect,
    "abbreviations": many_abbreviations,
    "compressed-lines": compressed,
}
LARGE = {"line-rows", "functions", "names", "abbreviations", "compressed-lines"}
"""The kinds of hostile DWARF that take more than 96 MB to convert."""
SLOW = {"ranges"}
"""The kinds of hostile DWARF that exceed the CPU time limit."""
