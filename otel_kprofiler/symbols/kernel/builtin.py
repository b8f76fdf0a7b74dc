"""Finds modules built into vmlinux, using ``modules.builtin.ranges`` or ``/proc/kallmodsyms``.

``modules.builtin.ranges`` (Linux 6.12 and later, scripts/generate_builtin_ranges.awk) consists of
lines ``section start-end module...`` with offsets from the start of a section in vmlinux. A line
``section offset-offset = symbol`` is the section's anchor: the section starts at the symbol's
address minus the offset. The address of a section without an anchor is unknown.

``/proc/kallmodsyms`` (out-of-tree, in Oracle's kernels) consists of lines ``address [size] type
name [module]...``. A type such as ``b`` is also a hexadecimal digit, so only the number of fields
before the first bracket shows whether a size is present. The sizes show where functions end;
``/proc/kallsyms`` contains no sizes.
"""

from __future__ import annotations

import sys
from array import array
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import islice
from typing import Final, NamedTuple

from otel_kprofiler.host import HostFiles
from otel_kprofiler.symbols.kernel.build import MAX_PAD_BYTES, TEXT_TYPES
from otel_kprofiler.symbols.kernel.read import read_pieces
from otel_kprofiler.symbols.kernel.table import SymbolTable

KALLMODSYMS: Final = "/proc/kallmodsyms"
OSRELEASE: Final = "/proc/sys/kernel/osrelease"

_ADDRESS_LIMIT = 1 << 64
_REACH = 0xFFFF_FFFF  # offsets are stored in 32 bits
_MAX_LINE_BYTES = 1 << 16
_MAX_SECTIONS = 64  # a kernel has about ten
_MAX_CHECKED = 1024  # maximum number of sized functions to check
_MAX_HOMONYMS = 16  # maximum number of symbols tried per anchor name


class BuiltinRange(NamedTuple):
    """The code ``[start, end)`` of an object file, and the modules that contain the file."""

    start: int
    end: int
    modules: tuple[str, ...]


class BuiltinSection(NamedTuple):
    """A section of vmlinux. All offsets are relative to the section's start."""

    anchor: str
    anchor_offset: int
    ranges: list[BuiltinRange]


class BuiltinRanges:
    """Finds built-in modules by runtime address. Immutable; occupies 12 bytes per range.

    Where two ranges overlap, the one with the higher start takes precedence. Ranges more than 4 GiB
    above the first are dropped.
    """

    __slots__ = ("_base", "_ends", "_owners", "_sets", "_starts")

    def __init__(self, ranges: Iterable[BuiltinRange] = ()) -> None:
        ordered = sorted(ranges)
        self._base = ordered[0].start if ordered else 0
        sets: dict[tuple[str, ...], int] = {}
        self._starts, self._ends, self._owners = array("I"), array("I"), array("I")
        for start, end, modules in ordered:
            if start < end <= self._base + _REACH:
                self._starts.append(start - self._base)
                self._ends.append(end - self._base)
                self._owners.append(sets.setdefault(modules, len(sets)))
        self._sets = tuple(sets)

    def __len__(self) -> int:
        return len(self._starts)

    def find(self, address: int) -> tuple[str, ...]:
        """Returns the built-in modules, if any, that contain an address in vmlinux."""
        offset = address - self._base
        index = bisect_right(self._starts, offset) - 1
        if index < 0 or offset >= self._ends[index]:
            return ()
        return self._sets[self._owners[index]]

    def size_bytes(self) -> int:
        """Returns the memory used by the ranges."""
        return sum(map(sys.getsizeof, (self._starts, self._ends, self._owners, self._sets))) + sum(
            sys.getsizeof(modules) + sum(map(sys.getsizeof, modules)) for modules in self._sets
        )


NO_BUILTIN: Final = BuiltinRanges()


def parse_builtin_ranges(data: bytes) -> tuple[Mapping[str, BuiltinSection], int]:
    """Returns the sections in ``modules.builtin.ranges``, and the number of malformed lines.

    The kernel's script ends a range at the next object file, even if that file has a lower address.
    A range whose end is below its start becomes empty.
    """
    sections: dict[str, BuiltinSection] = {}
    bad = 0
    for line in data.decode("utf-8", "backslashreplace").splitlines():
        name, *fields = line.split()[:64] or [""]
        bounds = fields[0].split("-") if len(fields) >= 2 else []
        numbers = [int(text, 16) for text in bounds if _is_hex(text)]
        full = name not in sections and len(sections) == _MAX_SECTIONS
        if full or len(numbers) != 2 or len(bounds) != 2 or max(numbers) > _REACH:
            bad += 1
            continue
        start, end = numbers
        section = sections.setdefault(name, BuiltinSection("", 0, []))
        if fields[1] == "=":
            if len(fields) != 3 or start != end or section.anchor:
                bad += 1
            else:
                sections[name] = section._replace(anchor=fields[2], anchor_offset=start)
        else:
            section.ranges.append(BuiltinRange(start, max(start, end), tuple(fields[1:])))
    return sections, bad


def place_ranges(
    sections: Mapping[str, BuiltinSection], core: SymbolTable
) -> tuple[list[BuiltinRange], list[str]]:
    """Returns ranges of runtime addresses, and the names of sections that do not match the kernel.

    ``modules.builtin.ranges`` does not identify its kernel build, but the ranges of the matching
    build start at symbol addresses. Rejects a section if fewer than three quarters of its ranges
    start at symbols. Skips sections whose anchor is not code, and extends an empty range to the end
    of the symbol at its start.
    """
    placed: list[BuiltinRange] = []
    misfits = []
    for name, section in sections.items():
        bases = [
            core.address(index) - section.anchor_offset
            for index in islice(core.find(section.anchor.encode()), _MAX_HOMONYMS)
        ]
        fitting = (base for base in bases if _fits(base, section.ranges, core))
        base = next(fitting, None)
        if base is not None:
            placed += [
                BuiltinRange(
                    base + start,
                    base + end if start < end else _symbol_end(base + start, core),
                    modules,
                )
                for start, end, modules in section.ranges
            ]
        elif bases:
            misfits.append(name)
    return placed, misfits


def _fits(base: int, ranges: list[BuiltinRange], core: SymbolTable) -> bool:
    fitting = sum(_starts_symbol(base + part.start, core) for part in ranges)
    return fitting * 4 >= len(ranges) * 3


def _symbol_end(address: int, core: SymbolTable) -> int:
    symbol = core.lookup(address)
    return core.symbol_at(symbol[1]).end if symbol else address


def _starts_symbol(address: int, core: SymbolTable) -> bool:
    if core.names_at(address):
        return True
    symbol = core.lookup(address)
    return symbol is not None and address < symbol[1] <= address + MAX_PAD_BYTES  # in padding


class KallModSyms(NamedTuple):
    """The code of vmlinux, according to kallmodsyms.

    Attributes:
        ranges: code ranges of built-in modules. Adjacent ranges of the same modules are merged. A
            symbol without a size extends to the symbol on the next line.
        sizes: alternating addresses and sizes; omits functions listed without a size.
        bad: the number of malformed lines.
    """

    ranges: list[BuiltinRange]
    sizes: array[int]
    bad: int


def parse_kallmodsyms(pieces: Iterable[bytes], start: int, end: int) -> KallModSyms:
    """Parses the lines whose symbols are at addresses in ``[start, end)``."""
    merged: list[BuiltinRange] = []
    sizes = array("Q")
    bad = 0
    waiting: tuple[int, tuple[str, ...]] | None = None
    for line in _lines(pieces):
        head, bracket, tail = line.partition(b"[")
        fields = head.split()
        if len(fields) not in (3, 4) or not _is_hex(fields[0]) or len(fields[-2]) != 1:
            bad += 1
            continue
        address, size = int(fields[0], 16), fields[1] if len(fields) == 4 else b"0"
        if not _is_hex(size):
            bad += 1
            continue
        if waiting is not None and address > waiting[0]:
            _merge(merged, BuiltinRange(waiting[0], min(address, end), waiting[1]))
            waiting = None
        if fields[-2] not in TEXT_TYPES or not start <= address < end:
            continue
        if int(size, 16):
            sizes.extend((address, min(int(size, 16), end - address)))
        if not bracket:
            continue
        modules = _modules(tail)
        if not modules:
            bad += 1
        elif int(size, 16):
            _merge(merged, BuiltinRange(address, min(address + int(size, 16), end), modules))
        else:
            waiting = address, modules
    if waiting is not None:
        _merge(merged, BuiltinRange(waiting[0], end, waiting[1]))
    return KallModSyms(merged, sizes, bad)


def with_sizes(core: SymbolTable, sizes: array[int]) -> SymbolTable | None:
    """Returns the symbols with function ends added; None if the sizes are from another kernel.

    ``sizes`` contains alternating function addresses and sizes, sorted by address. If functions
    overlap, only the highest end is used.
    """
    if not sizes:
        return core
    starts = sizes[::2]
    some = starts[:: len(starts) // _MAX_CHECKED + 1]
    if sum(_starts_symbol(start, core) for start in some) * 4 < len(some) * 3:
        return None
    ends = []
    covered = 0
    following = [*starts[1:], _ADDRESS_LIMIT]
    for start, size, after in zip(starts, sizes[1::2], following, strict=True):
        covered = max(covered, start + size)
        if covered < after:
            ends.append(covered)
    return core.with_ends(ends)


def _modules(brackets: bytes) -> tuple[str, ...]:
    """Parses module names, as in ``a] [b]``. Ignores a trailing object file name in braces."""
    names = brackets.partition(b"{")[0].decode("utf-8", "backslashreplace").split()
    if not all(name.endswith("]") for name in names):
        return ()
    return tuple(name.strip("[]") for name in names if name.strip("[]"))


def _merge(ranges: list[BuiltinRange], part: BuiltinRange) -> None:
    last = ranges[-1] if ranges else None
    if (
        last
        and last.modules == part.modules
        and 0 <= part.start - last.start <= (last.end - last.start + MAX_PAD_BYTES)
    ):
        ranges[-1] = last._replace(end=max(last.end, part.end))
    else:
        ranges.append(part)


def _lines(pieces: Iterable[bytes]) -> Iterator[bytes]:
    rest = b""
    for piece in pieces:
        *lines, rest = (rest + piece).split(b"\n")
        yield from lines
        rest = rest[:_MAX_LINE_BYTES]
    if rest:
        yield rest


def _is_hex(text: str | bytes) -> bool:
    digits = text.encode("ascii", "replace") if isinstance(text, str) else text
    return 0 < len(digits) <= 16 and not digits.translate(None, b"0123456789abcdefABCDEF")


def find_release(files: HostFiles) -> str:
    """Returns the kernel release, as printed by ``uname -r``; empty if unknown."""
    for path in (OSRELEASE, "/proc/version"):
        try:
            words = files.read_bytes(path).decode("utf-8", "replace").split()
        except OSError:
            continue
        if words[:2] == ["Linux", "version"]:
            words = words[2:]
        if words and "/" not in words[0] and words[0] not in {".", ".."}:
            return words[0]
    return ""


def builtin_ranges_path(release: str) -> str:
    """Returns the path of a kernel's ``modules.builtin.ranges``."""
    return f"/lib/modules/{release or 'unknown'}/modules.builtin.ranges"


def read_builtin(
    files: HostFiles,
    core: SymbolTable,
    problems: list[str],
    ranges_of_build: BuiltinRanges | None = None,
) -> tuple[BuiltinRanges, SymbolTable]:
    """Returns the built-in modules, and ``core`` with the listed function sizes, if any.

    Uses ``ranges_of_build`` if given; otherwise, the first source that lists modules. On most
    kernels, no source is available. ``problems`` receives one sentence per unusable source.
    """
    if not len(core):
        return NO_BUILTIN, core
    ranges = ranges_of_build
    if ranges is None:
        path = builtin_ranges_path(find_release(files))
        with _reporting(path, problems) as report:
            ranges = _read_ranges(files, path, core, report)
    with _reporting(KALLMODSYMS, problems) as report:
        parsed = _read_kallmodsyms(files, core, report)
        ranges = ranges or BuiltinRanges(parsed.ranges)
        sized = with_sizes(core, parsed.sizes)
        if sized is None:
            report("does not match the running kernel")
        else:
            core = sized
    return ranges or NO_BUILTIN, core


@contextmanager
def _reporting(path: str, problems: list[str]) -> Iterator[Callable[[str], None]]:
    try:
        yield lambda text: problems.append(f"{path}: {text}")
    except FileNotFoundError:
        pass
    except OSError as error:
        problems.append(f"{path}: {error.strerror or error}")


def _read_ranges(
    files: HostFiles, path: str, core: SymbolTable, report: Callable[[str], None]
) -> BuiltinRanges | None:
    sections, bad = parse_builtin_ranges(files.read_bytes(path))
    ranges, misfits = place_ranges(sections, core)
    _report_bad_lines(bad, report)
    for name in misfits:
        report(f"{name} does not match the running kernel")
    return BuiltinRanges(ranges) if ranges else None


def _read_kallmodsyms(
    files: HostFiles, core: SymbolTable, report: Callable[[str], None]
) -> KallModSyms:
    code_end = core.symbol(len(core) - 1).end
    pieces = read_pieces(files.open_fd(KALLMODSYMS))
    parsed = parse_kallmodsyms(pieces, core.address(0), code_end)
    _report_bad_lines(parsed.bad, report)
    return parsed


def _report_bad_lines(lines: int, report: Callable[[str], None]) -> None:
    if lines:
        report(f"{lines} malformed lines skipped")
