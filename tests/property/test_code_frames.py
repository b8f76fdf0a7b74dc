"""Unwind rules derived from machine code never contradict the compiler's unwind rules."""

import bisect
import io
import itertools
from pathlib import Path

import pytest
from elftools.elf.elffile import ELFFile

from otel_kprofiler.elf import FileSource, read_elf, read_sections
from otel_kprofiler.model import Segment
from otel_kprofiler.unwinding.code_frames import follow
from otel_kprofiler.unwinding.code_state import OUTERMOST
from otel_kprofiler.unwinding.indexing import CODE_SECTIONS
from otel_kprofiler.unwinding.x86_code import Effect
from tests.further import further
from tests.truth.tables import ElfTables

_LIBRARIES = Path("/usr/lib/x86_64-linux-gnu")
FILES = (
    _LIBRARIES / "libz.so.1",
    *further(Path("/bin/bash"), _LIBRARIES / "libm.so.6", _LIBRARIES / "libssl.so.3"),
)
_SP, _FP, _RA = 7, 6, 16
_PREFIXES = bytes([0x2E, 0x40, 0x48, 0x66])
_LEAST_SHARE = 0.95


def follow_file(path):
    with path.open("rb") as file:
        source = FileSource(file.fileno(), path.stat().st_size)
        elf = read_elf(source)
        sections = {section.name.decode(): section for section in read_sections(source, elf)}
    parts = {"text": elf.texts, "data": [load for load in elf.loads if load not in elf.texts]}
    for name in CODE_SECTIONS:
        if name in sections:
            section = sections[name]
            parts[name] = [Segment(section.offset, section.size, section.address)]
    gaps = [(text.address, text.address + text.size) for text in elf.texts]
    return follow(path.read_bytes(), parts, [elf.entry], gaps)


def is_padding(code):
    code = code.lstrip(_PREFIXES)
    return code == b"\x90" or code.startswith(b"\x0f\x1f")


def instructions(flow, code, start, end):
    """Yields the addresses of a function's instructions, without unreachable padding."""
    at, ended = start, False
    while at < end:
        length, effect, _ = flow.instruction(at)
        if not (ended and is_padding(code[at : at + length])):
            ended = effect >= Effect.CALL and effect != Effect.BRANCH
            yield at
        at += max(length, 1)


def contradicts(state, row):
    """Returns whether a state's CFA or saved rbp location differs from the compiler's rule."""
    if state == OUTERMOST:
        return row.get(_RA) is None or row[_RA].type != "UNDEFINED"
    cfa, fp = row["cfa"], row.get(_FP)
    if cfa.expr is not None:  # in the PLT or in a realigned frame
        return False
    distance = {_SP: state.sp, _FP: state.fp}.get(cfa.reg)
    if distance is not None and distance != cfa.offset:
        return True
    return state.saved > 0 and fp is not None and fp.type == "OFFSET" and -fp.arg != state.saved


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_unwind_rules_derived_from_code_never_contradict_the_compilers_rules(path):
    if not path.exists():
        pytest.skip(f"not installed: {path}")
    flow = follow_file(path)
    data = path.read_bytes()
    elf = ELFFile(io.BytesIO(data))
    code = bytearray(max(s["p_vaddr"] + s["p_memsz"] for s in elf.iter_segments("PT_LOAD")))
    for part in elf.iter_segments("PT_LOAD"):
        code[part["p_vaddr"] : part["p_vaddr"] + part["p_filesz"]] = part.data()
    total, given, wrong = 0, 0, []
    for start, end, rows in ElfTables(io.BytesIO(data)).functions():
        starts = [row["pc"] for row in rows]
        for at in instructions(flow, code, start, end):
            total += 1
            state = flow.states.get(at)
            if state is None or (state != OUTERMOST and state.sp is state.fp is None):
                continue
            given += 1
            row = rows[bisect.bisect_right(starts, at) - 1]
            if contradicts(state, row):
                wrong.append((hex(at), state, row))
    assert not list(itertools.islice(wrong, 5))
    assert given > _LEAST_SHARE * total > 0
