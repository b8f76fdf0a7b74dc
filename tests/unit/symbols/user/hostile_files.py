"""ELF files of a few MB that are crafted to exhaust memory when read."""

import lzma
import struct
import zlib
from array import array

_SECTION = struct.Struct("<IIQQQQIIQQ")
_PROGRAM = struct.Struct("<IIQQQQQQ")
TEXT = 0x1000
CODE = (b".text", 8, 6, TEXT, b"", 0, 0)
CIE = struct.pack("<II4sBBBBB3x", 16, 0, b"\1zR\0", 1, 0x78, 16, 1, 0x1B)


def make_elf(sections, search=None):
    """Returns an ELF file with sections (name, type, flags, address, content, link, entry size).

    ``search`` is the section that a PT_GNU_EH_FRAME segment points to.
    """
    names, rows, body = b"\0", [(0,) * 10], bytearray(64 + 2 * _PROGRAM.size)
    result = 0, 0, 0
    for name, kind, flags, address, content, link, entry_size in [
        *sections, (b".shstrtab", 3, 0, 0, b"", 0, 0)
    ]:  # fmt: skip
        body += bytes(-len(body) % 8)
        at = len(names)
        names += name + b"\0"
        if name == b".shstrtab":
            content = names  # noqa: PLW2901 - known at the end
        if name == search:
            result = len(body), address, len(content)
        size = len(content)
        rows.append((at, kind, flags, address, len(body), size, link, 0, 1, entry_size))
        body += content
    body += bytes(-len(body) % 8)
    body[:64] = struct.pack(
        "<16sHHIQQQIHHHHHH", b"\x7fELF\2\1\1", 3, 62, 1, 0, 64, len(body), 0, 64, _PROGRAM.size,
        2, 64, len(rows), len(rows) - 1,
    )  # fmt: skip
    offset, address, size = result
    programs = _PROGRAM.pack(1, 4, offset, address, address, size, size, 8)
    kind = 0x6474E550 if search else 0  # PT_NULL
    programs += _PROGRAM.pack(kind, 4, offset, address, address, size, size, 4)
    body[64 : 64 + len(programs)] = programs
    for row in rows:
        body += _SECTION.pack(*row)
    return bytes(body)


def make_symbols(count, name=b"f%06x"):
    """Returns unsorted symbol entries for 16-byte functions, and the functions' names."""
    width = len(name % 0) + 1
    rows = array("Q", bytes(24 * count))
    heads = array("I", bytes(8 * count))
    heads[::2] = array("I", range(0, width * count, width))
    heads[1::2] = array("I", [1 << 16 | 0x12]) * count
    rows[::3] = array("Q", heads.tobytes())
    rows[1::3] = array("Q", (TEXT + index * 7919 % count * 16 for index in range(count)))
    rows[2::3] = array("Q", [16]) * count
    return rows.tobytes(), b"".join(name % index + b"\0" for index in range(count))


def with_symbols(entries, names, kind=2, flags=0):
    """Returns a program with a symbol table."""
    table = b".symtab", kind, flags, 0, entries, 3, 24
    return make_elf([CODE, table, (b".strtab", 3, 0, 0, names, 0, 0)])


def symbols(count, kind=2):
    return with_symbols(*make_symbols(count), kind)


def good():
    """Returns a small program with ``good_000000`` as its first function."""
    return with_symbols(*make_symbols(3, b"good_%06x"))


def versions():
    """Returns a program whose string table contains two million versioned names (``a@b``)."""
    entries, names = make_symbols(2)
    return with_symbols(entries, names + b"a@b\0" * (2 << 20))


def compressed():
    """Returns a program with a compressed symbol table."""
    entries, names = make_symbols(200_000)
    entries = entries * 6
    packed = struct.pack("<IIQQ", 1, 0, len(entries), 8) + zlib.compress(entries, 1)
    return with_symbols(packed, names, flags=0x800)


def frames():
    """Returns a program with a search table whose rows all point to the same unwind entry."""
    count = 3 << 20
    entry = struct.pack("<IIiI", 12, len(CIE) + 4, 0, 1)
    at = 1 << 30
    pairs = array("i", bytes(8 * count))
    pairs[::2] = array("i", range(count))
    pairs[1::2] = array("i", [at - TEXT + len(CIE)]) * count
    header = struct.pack("<4siI", bytes([1, 0x1B, 3, 0x3B]), 0, count) + pairs.tobytes()
    return make_elf(
        [(b".eh_frame_hdr", 1, 2, TEXT, header, 0, 0),
         (b".eh_frame", 1, 2, at, CIE + entry, 0, 0)],
        b".eh_frame_hdr",
    )  # fmt: skip


def unsorted_frames():
    """Returns a program with minimal unwind entries and no search table."""
    count = 700_000
    backs = range(len(CIE) + 4, len(CIE) + 4 + 16 * count, 16)
    entries = b"".join(struct.pack("<IIiI", 12, back, 0, 1) for back in backs)
    return make_elf([(b".eh_frame", 1, 2, TEXT, CIE + entries, 0, 0)])


def packed(content):
    """Returns a program with a compressed debug file in ``.gnu_debugdata``."""
    return make_elf([CODE, (b".gnu_debugdata", 1, 0, 0, content, 0, 0)])


def packed_zeros():
    """Returns a program with a compressed debug file that consists of zeros."""
    return packed(lzma.compress(bytes(60 << 20), preset=0))


def packed_streams():
    """Returns a program with a debug file of concatenated streams that decompress to 10 GB."""
    return packed(lzma.compress(bytes(64 << 20), preset=0) * 160)


def packed_with_a_dictionary():
    """Returns a program with a debug file that declares a 1 GB dictionary."""
    filters = [{"id": lzma.FILTER_LZMA2, "preset": 0, "dict_size": 8 << 20}]
    whole = bytearray(lzma.compress(good(), filters=filters))
    # A block header, which ends with its CRC32 (xz file format 1.1.0, sections 3.1 and 5.3.1).
    size = (whole[12] + 1) * 4
    at = whole.index(b"\x21\x01", 12) + 2
    whole[at] = 36  # a 1 GiB dictionary
    whole[12 + size - 4 : 12 + size] = zlib.crc32(whole[12 : 12 + size - 4]).to_bytes(4, "little")
    return packed(bytes(whole))


def packed_symbols():
    """Returns a program with a compressed debug file that contains a symbol table."""
    entries, names = make_symbols(100_000, b"f%06d")
    return packed(lzma.compress(with_symbols(entries * 2, names), preset=0))


def stubs():
    """Returns a program with the maximum number of PLT stubs, with long names."""
    count = (1 << 20) // 8
    sections = [
        CODE,
        (b".dynsym", 11, 0, 0, bytes(24) + struct.pack("<IBBHQQ", 1, 0x12, 0, 0, 0, 0), 2 + 1, 24),
        (b".dynstr", 3, 0, 0, b"\0" + b"n" * 1000 + b"\0", 0, 0),
    ]
    relocations = array("Q", bytes(24 * 5 * count))
    slots = range(0x9000_0000, 0x9000_0000 + 8 * 5 * count, 8)
    relocations[::3] = array("Q", slots)
    relocations[1::3] = array("Q", [1 << 32 | 7]) * (5 * count)
    for number, name in enumerate((b".plt", b".plt.sec", b".plt.got", b".plt.bnd", b".iplt")):
        start = 0x1000_0000 * (number + 1)
        distance = slots[number * count] - start - 6
        jump = b"\xff\x25" + struct.pack("<I", distance) + bytes(2)
        sections.append((name, 1, 6, start, jump * count, 0, 8))
    sections.append((b".rela.plt", 4, 0, 0, relocations.tobytes(), 0, 24))
    return make_elf(sections)


def go():
    """Returns a Go program with a runtime table of many functions that share one struct."""
    count = 3 << 20
    starts = array("I", bytes(4 * (2 * count + 1)))
    starts[::2] = array("I", range(count + 1))
    starts[1::2] = array("I", [4]) * count
    header_bytes = 8 + 8 * 8
    words = (count, 0, 0, header_bytes, header_bytes, header_bytes, header_bytes, header_bytes + 8)
    table = struct.pack("<IHBB8Q", 0xFFFFFFF1, 0, 1, 8, *words) + b"f\0\0\0\0\0\0\0"
    return make_elf([CODE, (b".gopclntab", 1, 2, 0x2000, table + starts.tobytes(), 0, 0)])


GO_FUNCTIONS = 200_000


def go_lines():
    """Returns a Go program with many functions, all of which have line numbers."""
    count, address, header_bytes = GO_FUNCTIONS, 0x2000, 8 + 8 * 8
    starts = array("I", bytes(4 * (2 * count + 1)))
    starts[::2] = array("I", range(count + 1))
    starts[1::2] = array("I", [4]) * count  # all functions share the struct at offset 4
    words = (count, 0, 0, *[header_bytes] * 4, header_bytes + 8)
    table = struct.pack("<IHBB8Q", 0xFFFFFFF1, 0, 1, 8, *words) + b"-f\0".ljust(8, b"\0")
    module = [address, address + header_bytes, *[0] * 39]
    module[22] = TEXT
    return make_elf(
        [CODE, (b".gopclntab", 1, 2, address, table + starts.tobytes(), 0, 0),
         (b".go.module", 1, 3, 1 << 28, struct.pack("<41Q", *module), 0, 0)]
    )  # fmt: skip


KINDS = {
    "symbols": lambda: symbols(1_390_000),
    "symbols-within-the-limit": lambda: symbols(350_000),
    "dynamic-symbols": lambda: symbols(1_390_000, 11),
    "versions": versions,
    "compressed": compressed,
    "frames": frames,
    "unsorted-frames": unsorted_frames,
    "packed-zeros": packed_zeros,
    "packed-streams": packed_streams,
    "packed-dictionary": packed_with_a_dictionary,
    "packed-symbols": packed_symbols,
    "stubs": stubs,
    "go": go,
}
