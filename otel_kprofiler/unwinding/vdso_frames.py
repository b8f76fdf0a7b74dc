"""Builds unwind tables for the arm64 vDSO, which has none, from its machine code.

In Linux 6.1 and 6.12, the functions that read clocks do not change the registers that hold the
return address, the frame pointer and the stack pointer (``arch/arm64/kernel/vdso``).
"""

from typing import Final

from otel_kprofiler.elf import MACHINES, ElfFile, Source, find_offset, find_symbols, read_sections
from otel_kprofiler.unwinding.arm64_code import CIE_REST, NO_RULE, WORD, find_changes
from otel_kprofiler.unwinding.frame_writing import PAIR, make_program, pack_cie, pack_entry
from otel_kprofiler.unwinding.table import Tables

_FUNCTIONS: Final = tuple(
    b"__kernel_" + name
    for name in (b"clock_gettime", b"gettimeofday", b"clock_getres", b"getrandom")
)
_CIE: Final = pack_cie(b"zRD", CIE_REST)  # D: derived from code


def make_vdso_tables(source: Source, elf: ElfFile) -> Tables | None:
    """Generates tables; None if the machine is not arm64 or the vDSO has no supported function.

    For functions that change x29, x30 or sp, the entry contains no rule. Raises
    ``ElfError`` if the vDSO is malformed.
    """
    if elf.machine != MACHINES["aarch64"]:
        return None
    origin, frames, pairs = elf.texts[0], bytearray(_CIE), []
    for start, size in sorted(
        find_symbols(source, read_sections(source, elf), _FUNCTIONS).values()
    ):
        code = source.read(find_offset(elf.texts, start, size), size)
        keeps = not any(find_changes(code))
        program = make_program([(0, b"" if keeps else NO_RULE)], WORD.size)
        at = len(frames)
        frames += pack_entry(at + 4, start, origin.address + at, size, program)
        pairs.append(PAIR.pack(start - origin.address, at))
    if not pairs:
        return None
    empty = origin._replace(size=0)
    return Tables(origin.address, None, len(pairs), empty, b"".join(pairs), bytes(frames))
