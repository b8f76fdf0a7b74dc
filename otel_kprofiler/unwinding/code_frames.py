"""Generates ``.eh_frame`` for x86-64 code without it, such as musl, from its instructions.

:func:`make` runs in a child process that imports only a few modules of this package. The child
receives files, and replies with the number of pairs, the pairs and the frames. Each file is sent
with these arguments:

ADDRESS ORIGIN STARTS GAPS PARTS

- ADDRESS: address of the new ``.eh_frame``.
- ORIGIN: base for the pairs in the search table.
- STARTS: addresses of the program's entry point and, if known, ``main``, separated by a comma.
- GAPS: the code without unwind rules, as start:end,…
- PARTS: ranges of the file, as name=offset:size:address,… The names are ``pairs`` (the existing
  pairs), ``text`` and ``data`` (segments), and section names.
"""

import mmap
import re
import struct
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Final

from otel_kprofiler.unwinding.code_flow import Flow
from otel_kprofiler.unwinding.code_state import OUTERMOST, UNKNOWN, State
from otel_kprofiler.unwinding.frame_writing import (
    BY_RSP,
    CIE_REST,
    NO_CALLER,
    NO_RULE,
    RBP_KEPT,
    RBP_LOST,
    SIGRETURN,
    Segment,
    make_program,
    pack_entry,
    pack_number,
    pack_tables,
)

# D: the rules are derived from code
_CIE: Final = struct.pack("<II28s", 32, 0, b"\1zRD\0" + CIE_REST)
_BY_RBP: Final = b"\x0c\6"  # def_cfa rbp
_FP_SAVED: Final = b"\x86"  # offset rbp
_CALLED: Final = b"\xd0"  # restore rip
_CALL_OR_JUMP: Final = re.compile(rb"[\xe8\xe9](?=(.{4}))", re.DOTALL)
_CALL_BYTES: Final = 5
_MAX_ROWS: Final = 64
_WORD: Final = 8

_SYMBOL: Final = struct.Struct("<IBxHQ8x")
_RELOCATION: Final = struct.Struct("<QQq")
_FUNCTION: Final = 2  # STT_FUNC
_GLOB_DAT, _JUMP_SLOT, _RELATIVE = 6, 7, 8  # R_X86_64_*
_ENDLESS: Final = frozenset(
    b"exit _exit _Exit quick_exit abort thrd_exit pthread_exit longjmp siglongjmp _longjmp"
    b" __longjmp_chk __stack_chk_fail __assert_fail __libc_start_main __fortify_fail __chk_fail"
    b" _Unwind_Resume __cxa_throw __cxa_rethrow err errx verr verrx".split()
)
"""C and C++ library functions that do not return."""

Gap = tuple[int, int]
Parts = Mapping[str, Sequence[Segment]]


class Symbols:
    """Finds function start addresses in a file, and imported functions that do not return."""

    def __init__(self, file: bytes | mmap.mmap, parts: Parts) -> None:
        self._file, self._parts = file, parts

    def functions(self) -> Iterator[int]:
        """Yields the addresses of functions in the symbol tables."""
        for name in (".dynsym", ".symtab"):
            for _, info, section, address in _SYMBOL.iter_unpack(self._read(name, _SYMBOL.size)):
                if info & 15 == _FUNCTION and section:
                    yield address

    def endless_slots(self) -> Iterator[int]:
        """Yields the GOT slots of imported functions that never return."""
        symbols, names = self._read(".dynsym", _SYMBOL.size), self._read(".dynstr", 1)
        for address, info, _ in self._relocations():
            at = (info >> 32) * _SYMBOL.size
            if info & 0xFFFFFFFF in (_GLOB_DAT, _JUMP_SLOT) and at < len(symbols):
                start = _SYMBOL.unpack_from(symbols, at)[0]
                if names[start : max(start, names.find(b"\0", start))] in _ENDLESS:
                    yield address

    def pointers(self) -> Iterator[int]:
        """Yields values in data sections that may be function addresses."""
        for _, info, addend in self._relocations():
            if info & 0xFFFFFFFF == _RELATIVE:
                yield addend
        for segment in self._parts.get("data", ()):
            words = self._file[segment.offset : segment.offset + segment.size & -_WORD]
            yield from memoryview(words[: len(words) & -_WORD]).cast("Q")

    def _relocations(self) -> Iterator[tuple[int, int, int]]:
        for name in (".rela.dyn", ".rela.plt"):
            yield from _RELOCATION.iter_unpack(self._read(name, _RELOCATION.size))

    def _read(self, name: str, row_bytes: int) -> bytes:
        for part in self._parts.get(name, ()):
            return self._file[part.offset : part.offset + part.size - part.size % row_bytes]
        return b""


def follow(
    file: bytes | mmap.mmap, parts: Parts, starts: Sequence[int], gaps: Sequence[Gap]
) -> Flow:
    """Analyzes code in ``gaps``, which lack unwind rules, and the functions that this code calls.

    ``starts`` contains the addresses of the program's entry point (0 if there is none) and of
    ``main``, if known.
    """
    symbols = Symbols(file, parts)
    texts = [(text.address, file[text.offset : text.offset + text.size]) for text in parts["text"]]

    bounds = _join_gaps(gaps)
    first, last = (bounds[0], bounds[-1]) if bounds else (0, 0)

    def within(addresses: Iterable[int]) -> set[int]:
        return {at for at in addresses if first <= at < last and bisect_right(bounds, at) & 1}

    # Code in a non-PIE executable may contain absolute addresses as immediate operands.
    is_fixed = min(part.address for part in (*parts["text"], *parts.get("data", ()))) > 0

    def references(flow: Flow) -> Iterator[int]:
        yield from flow.references()
        if is_fixed:
            yield from flow.absolutes()

    flow = Flow(texts, gaps, starts[0], frozenset(symbols.endless_slots()))
    flow.add_functions(within({*starts, *symbols.functions()}))
    flow.add_functions(within(references(flow)))
    flow.add_candidates(within(_called(texts, bounds)))
    flow.add_candidates(within({*symbols.pointers(), *flow.absolutes()}))
    flow.add_functions(within(references(flow)))
    flow.add_rest()
    return flow


def _join_gaps(gaps: Iterable[Gap]) -> list[int]:
    """Returns the start and end of each gap, in order. Joins gaps that overlap or touch."""
    bounds: list[int] = []
    for start, end in sorted(gap for gap in gaps if gap[0] < gap[1]):
        if bounds and start <= bounds[-1]:
            bounds[-1] = max(bounds[-1], end)
        else:
            bounds += start, end
    return bounds


def _called(texts: Sequence[tuple[int, bytes]], bounds: Sequence[int]) -> Iterator[int]:
    """Yields the targets of calls and jumps (or bytes that look like them) outside gaps.

    ``bounds`` are the bounds of the gaps, from :func:`_join_gaps`.
    """
    for address, code in texts:
        at = 0
        while (match := _CALL_OR_JUMP.search(code, at)) is not None:
            place = address + match.start()
            index = bisect_right(bounds, place)
            if index & 1:
                at = bounds[index] - address
                continue
            at = match.start() + 1
            yield place + _CALL_BYTES + int.from_bytes(match[1], "little", signed=True)


class FrameMaker:
    """Generates ``.eh_frame`` entries that will be loaded at ``address``."""

    def __init__(self, flow: Flow, address: int) -> None:
        self._flow, self._address = flow, address
        self.frames = bytearray(_CIE)
        self.pairs: list[tuple[int, int]] = []

    def add(self, start: int, end: int) -> None:
        """Add entries for a range of code."""
        rows: list[tuple[int, State]] = []
        behind = start  # end of the last instruction whose state is known
        for at in range(start, end):
            state = self._flow.states.get(at)
            if state is not None:
                behind = at + self._flow.instruction(at)[0]
            elif at < behind:
                continue
            state = state or UNKNOWN
            if rows and rows[-1][1] == state:
                continue
            if len(rows) >= _MAX_ROWS:
                self._add_entry(rows, at)
                rows = []
            rows.append((at, state))
        if rows:
            self._add_entry(rows, end)

    def _add_entry(self, rows: Sequence[tuple[int, State]], end: int) -> None:
        start = rows[0][0]
        program = make_program([(at - start, _rule(state)) for at, state in rows])
        at = len(self.frames)
        address = self._address + at
        self.frames += pack_entry(at + 4, start, address, end - start, program)
        self.pairs.append((start, address))


def _rule(state: State) -> bytes:
    if state == OUTERMOST:
        return NO_CALLER
    if state.sp is not None and state.sp >= _WORD:
        rule = BY_RSP + pack_number(state.sp)
    elif state.fp is not None and state.fp > _WORD:
        rule = _BY_RBP + pack_number(state.fp)
    else:
        return NO_RULE
    if state.saved == 0:
        return _CALLED + rule + RBP_KEPT
    if state.saved > _WORD and state.saved % _WORD == 0:
        return _CALLED + rule + _FP_SAVED + pack_number(state.saved // _WORD)
    return _CALLED + rule + RBP_LOST


def cut_trampolines(code: bytes, start: int) -> Iterator[Gap]:
    """Yields ranges of code, except signal trampolines, which the BPF program recognizes.

    Also excludes the byte before a trampoline, where the BPF program looks up a handler's return
    address.
    """
    at = 0
    while (trampoline := code.find(SIGRETURN, at)) >= 0:
        yield start + at, start + max(at, trampoline - 1)
        at = trampoline + len(SIGRETURN)
    yield start + at, start + len(code)


def make_frames(
    file: bytes | mmap.mmap,
    parts: Parts,
    starts: Sequence[int],
    gaps: Sequence[Gap],
    address: int,
) -> FrameMaker:
    """Generates ``.eh_frame`` entries at ``address`` for all gaps. See :func:`follow`."""
    maker = FrameMaker(follow(file, parts, starts, gaps), address)
    for start, end in gaps:
        for text in parts["text"]:
            if text.address <= start and end <= text.address + text.size:
                at = start - text.address + text.offset
                for first, last in cut_trampolines(file[at : at + end - start], start):
                    maker.add(first, last)
    return maker


def make(words: list[str], file: mmap.mmap) -> bytes:
    """Build the tables for a received file."""
    address, origin = map(int, words[:2])
    starts = list(map(int, words[2].split(",")))
    gaps = [(int(start), int(end)) for start, end in (w.split(":") for w in words[3].split(","))]
    parts = {}
    for word in words[4:]:
        name, _, places = word.partition("=")
        parts[name] = [Segment(*map(int, place.split(":"))) for place in places.split(",") if place]
    maker = make_frames(file, parts, starts, gaps, address)
    pairs = b"".join(file[p.offset : p.offset + p.size] for p in parts.get("pairs", ()))
    return pack_tables(maker.pairs, bytes(maker.frames), pairs, origin)
