"""Builds Go tables in all formats, and compiles real Go programs."""

import shutil
import struct
import subprocess
from itertools import groupby
from operator import itemgetter
from typing import NamedTuple

import pytest

from otel_kprofiler.elf import ElfFile, ImageSource, Section
from otel_kprofiler.model import Segment
from otel_kprofiler.symbols.user.go import GoTable
from tests.wire import pack_varint

PROGRAM = """
package main

import (
	"fmt"
	"os"
	"sort"
	"strings"
)

func inner(x int) int { return x*3 + len(os.Args) }
func part(x int) int { return inner(x) + inner(x+1) }

type List[T any] struct{ items []T }

//go:noinline
func (l *List[T]) add(item T) { l.items = append(l.items, item) }

//go:noinline
func outer(n int) int {
	sum := 0
	for i := 0; i < n; i++ {
		sum += part(i) % 7
	}
	return sum
}

func main() {
	list := List[string]{}
	for i := 0; i < 10; i++ {
		list.add(strings.Repeat("x", outer(i)%5))
	}
	sort.Strings(list.items)
	fmt.Println(list.items)
}
"""


def build_go(path, *options):
    if not shutil.which("go"):
        pytest.skip("go is not installed")
    source = path.with_suffix(".go")
    source.write_text(PROGRAM)
    subprocess.run(["go", "build", *options, "-o", path, source], check=True, cwd=path.parent)
    return path


class GoFunction(NamedTuple):
    """A function's name and size, and the size, file and line of each instruction range."""

    name: str
    size: int
    places: tuple[tuple[int, int, int], ...]  # size, file, line


def pc_table(steps):
    """Builds a pc table from (size, value) pairs. Successive pairs with equal values are merged."""
    written, before = b"", -1
    for value, run in groupby(steps, key=itemgetter(1)):
        size, delta = sum(size for size, _ in run), value - before
        before = value
        written += pack_varint(delta << 1 if delta >= 0 else -delta * 2 - 1) + pack_varint(size)
    return written + b"\0"


MAGIC = {16: 0xFFFFFFFA, 18: 0xFFFFFFF0, 20: 0xFFFFFFF1}
TEXT, TABLE_AT = 0x401000, 0x1000


def make_table(version, functions, files=("a.go", "b.go")):
    """Builds a table for consecutive functions, the first of which starts at ``TEXT``."""
    names = b"\0".join(function.name.encode() for function in functions) + b"\0"
    files_text = b"\0".join(map(str.encode, files)) + b"\0"
    unit = b"".join(struct.pack("<I", files_text.index(name.encode() + b"\0")) for name in files)
    word = "<I" if version >= 18 else "<Q"
    base = 0 if version >= 18 else TEXT
    pc_tables, structs, starts, start, name_at = b"\0", b"", [], base, 0
    head = (2 * len(functions) + 1) * struct.calcsize(word)
    head += -head % 8
    for function in functions:
        tables = []
        for part in (1, 2):
            tables.append(len(pc_tables))
            pc_tables += pc_table([(place[0], place[part]) for place in function.places])
        starts += [start, head + len(structs)]
        structs += struct.pack(word, start)
        structs += struct.pack("<8I", name_at, 0, 0, 0, *tables, 0, 0)
        structs += bytes(8 if version in {16, 20} else 4) if version != 16 else bytes(4)
        structs += bytes(-len(structs) % 8)
        name_at += len(function.name.encode()) + 1
        start += function.size
    index = b"".join(struct.pack(word, value) for value in [*starts, start])
    parts = [names, unit, files_text, pc_tables, index.ljust(head, b"\0") + structs]
    at, offsets = 8 + 8 * (7 if version == 16 else 8), []
    for part in parts:
        offsets.append(at)
        at += len(part)
    words = [len(functions), len(files), *[0] * (version >= 18), *offsets]
    return (
        struct.pack("<IHBB", MAGIC[version], 0, 1, 8)
        + struct.pack(f"<{len(words)}Q", *words)
        + b"".join(parts)
        + bytes(64)
    )


def open_table(table, version):
    """Opens a file that contains a Go function table followed by its ``moduledata``."""
    names = struct.unpack_from("<Q", table, 8 + 8 * (2 if version == 16 else 3))[0]
    module = [0] * 41
    module[0], module[1], module[22] = TABLE_AT, TABLE_AT + names, TEXT
    data = struct.pack("<41Q", *(value & (1 << 64) - 1 for value in module))
    section = Section(b".gopclntab", 1, 2, TABLE_AT, 0, len(table), 0, 0, 1, 0)
    more = Section(b".go.module", 1, 3, 0x9000, len(table), len(data), 0, 0, 1, 0)
    loads = (Segment(0, len(table) + len(data), TABLE_AT),)
    elf = ElfFile(loads, loads, None, None, 0, (0, 0, 0), 62)
    return GoTable(ImageSource(table + data), elf, [section, more], section)
