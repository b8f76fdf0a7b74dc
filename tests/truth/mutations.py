"""Breaks the unwinder in many ways, one at a time, and checks that the comparison detects each.

``python -m tests.truth.mutations [NAME…]`` exits with 1 if a mutation is not detected.
"""
# ruff: noqa: T201 - a command prints for its user and runs compilers

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

from otel_kprofiler.errors import SamplerError
from otel_kprofiler.model import StackEnd
from tests.truth import dumps
from tests.truth.compare import Report, compare
from tests.truth.reference import Maps
from tests.truth.sources import copy_sources

PROGRAM = Path(__file__).with_name("programs")
_HZ, _STACKS, _WARMING = 997, 300, 150
_COMPLETE = 0.98


class Mutation(NamedTuple):
    """A change to a source file, at the first occurrence of ``old``."""

    name: str
    file: str
    old: str
    new: str


_FRAMES, _WALK, _MAPPINGS = "unwind_eh_frame.bpf.h", "unwind.bpf.h", "unwind_mappings.bpf.h"
_CALLS = "call_sites.bpf.h"
MUTATIONS = (
    Mutation("search: the entry after", _FRAMES, "] <= relative)", "] < relative - 4096)"),
    Mutation(
        "row: one too far",
        _FRAMES,
        "> w->target)\n\t\t\t\t\treturn",
        "> w->target + 8)\n\t\t\t\t\treturn",
    ),
    Mutation(
        "advance_loc: wrong amount",
        _FRAMES,
        "w->location += value * w->code_align",
        "w->location += value * w->code_align + 1",
    ),
    Mutation("advance_loc1: ignored", _FRAMES, "? x & 0xff\n", "? 0\n"),
    Mutation(
        "offset: unscaled",
        _FRAMES,
        "(s64)raw * w->data_align);\n\t\t\t\tlength",
        "(s64)raw);\n\t\t\t\tlength",
    ),
    Mutation("restore: ignored", _FRAMES, "restore_rule(w, c, value);", ""),
    Mutation("def_cfa_offset: ignored", _FRAMES, "w->row.cfa_offset = value;\n\t\t\tif", "if"),
    Mutation(
        "def_cfa_register: ignored",
        _FRAMES,
        "set_cfa(w, x & 0xff, w->row.cfa_offset)",
        "(x & 0xff) >= MAX_COLUMNS",
    ),
    Mutation(
        "def_cfa: offset lost",
        _FRAMES,
        "set_cfa(w, x & 0xff, value)",
        "set_cfa(w, x & 0xff, value & 31)",
    ),
    Mutation("def_cfa_expression: not followed", _WALK, "*cfa = w->pair[0] + (s64)row->post;", ""),
    Mutation("PLT: one word short", _WALK, "\t\t*cfa += 8;\n", ""),
    Mutation(
        "expression: refused",
        _FRAMES,
        "op == DW_CFA_expression && base_register",
        "0 && base_register",
    ),
    Mutation(
        "remember_state: not saved", _FRAMES, "w->state[depth & (MAX_STATES - 1)] = w->row;", ""
    ),
    Mutation("restore_state: ignored", _FRAMES, "w->row = w->state[depth & (MAX_STATES - 1)];", ""),
    Mutation("undefined: like same value", _FRAMES, "? UNDEFINED : SAME", "? SAME : SAME"),
    Mutation("CIE: initial rows lost", _FRAMES, "w->row = w->initial;\n\tlength", "length"),
    Mutation(
        "CIE: another's is kept",
        _FRAMES,
        "w->cie_at != cie || w->cie_serial != m->serial",
        "!w->cie_serial",
    ),
    Mutation("restore_extended: ignored", _FRAMES, "restore_rule(w, c, x & 0x7f);", ";"),
    Mutation("offset_extended: unscaled", _FRAMES, "offset *= w->data_align;", ""),
    Mutation(
        "def_cfa_offset_sf: unscaled",
        _FRAMES,
        "w->row.cfa_offset = offset * w->data_align;",
        "w->row.cfa_offset = offset;",
    ),
    Mutation(
        "states: one at a time",
        _FRAMES,
        "w->state[depth & (MAX_STATES - 1)] = w->row;",
        "w->state[0] = w->row;",
    ),
    Mutation(
        "callers: at their return address",
        _WALK,
        "find_rule(address - !w->leaf)",
        "find_rule(address)",
    ),
    Mutation("frame pointer: not restored", _WALK, "\tw->fp = fp;\n", ""),
    Mutation("stack pointer: not advanced", _WALK, "\tw->sp = cfa;\n", "\tw->sp = cfa - 8;\n"),
    Mutation(
        "signals: stepped over as calls",
        _WALK,
        "take_block(w, SIGNAL_BLOCK);\n\tw->leaf = 1;",
        "take_block(w, SIGNAL_BLOCK);\n\tw->leaf = 0;",
    ),
    Mutation("system calls at the end of functions", _WALK, "&& after_syscall(c, w->pc))", "&& 0)"),
    Mutation("preserved registers: not followed", _WALK, "if (words != STILL_THERE)", "if (0)"),
    Mutation(
        "preserved registers: taken for what they are in a callee",
        _WALK,
        "if (place && at) {",
        "if (0) {",
    ),
    Mutation(
        "restore: preserved registers stay",
        _FRAMES,
        "preserved[place] = from->",
        "preserved[0] = from->",
    ),
    Mutation("other stacks: must lie above", _WALK, "row->cfa_kind < CFA_ELSEWHERE &&", "1 &&"),
    Mutation("frame pointers: no first instructions", _CALLS, "== 0xe5894855ULL << 8", "== 1"),
    Mutation("frame pointers: no second instructions", _CALLS, "== 0xe5894855 ? 1", "== 1 ? 1"),
    Mutation("frame pointers: no last instructions", _CALLS, "== 0xc300 ||", "== 1 ||"),
    Mutation(
        "mappings: another segment's shift", _MAPPINGS, "m->bias - header->text[i].delta", "m->bias"
    ),
    Mutation(
        "mappings: file offset ignored",
        _MAPPINGS,
        "m->bias = vma_word(w, c->vma_start) - pages * c->page_bytes;",
        "m->bias = vma_word(w, c->vma_start);",
    ),
)


def run(folder: Path, mutation: Mutation | None, program: Path) -> Report | str:
    """Runs the comparison with a mutation; returns the verifier's message if it is rejected."""
    include = copy_sources(folder, mutation)
    built = dumps.build(folder, include)
    for arguments in (["signals", "threads"], ["rules"]):
        process = subprocess.Popen([program, *arguments])
        try:
            with dumps.Dumps(built) as dumper:
                dumper.take(process.pid, _HZ, _WARMING)
                report = compare(dumper.take(process.pid, _HZ, _STACKS), Maps(process.pid))
        except SamplerError as error:
            return f"rejected by the verifier: {error}"
        finally:
            process.kill()
            process.wait()
        if not is_true(report):
            break
    return report


def is_true(report: Report | str) -> bool:
    if isinstance(report, str):
        return False
    return not report.wrong and report.ends[StackEnd.COMPLETE] >= _COMPLETE * report.total


def main(names: list[str]) -> int:
    unnoticed = 0
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        program = folder / "walk"
        sources = [PROGRAM / "walk.cpp", PROGRAM / "rules.S"]
        flags = ["-O2", "-fomit-frame-pointer", "-no-pie"]
        subprocess.run(["g++", *flags, *sources, "-o", program, "-lpthread"], check=True)
        if not is_true(run(folder, None, program)):
            print("a stack is wrong even without a mutation")
            return 1
        for mutation in MUTATIONS:
            if names and not any(name in mutation.name for name in names):
                continue
            report = run(folder, mutation, program)
            noticed = not is_true(report)
            unnoticed += not noticed
            print("noticed  " if noticed else "UNNOTICED", mutation.name, flush=True)
            print("   ", report if isinstance(report, str) else report.describe())
    return 1 if unnoticed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
