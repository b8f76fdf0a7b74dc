"""Breaks the unwinder in many ways, one at a time; the comparison must detect each change.

``python -m tests.truth.mutations [NAME…]`` exits with 1 if a mutation is not detected.
"""
# ruff: noqa: T201 - a command prints for its user and runs compilers

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

from otel_kprofiler.errors import SamplerError
from otel_kprofiler.model import StackEnd
from tests.truth import dumps
from tests.truth.compare import Report, compare
from tests.truth.reference import Maps
from tests.truth.sources import Mutation, copy_sources

PROGRAM = Path(__file__).with_name("programs")
_HZ, _STACKS, _WARMING = 997, 300, 150
_COMPLETE = 0.98


_CHANGES = {
    "unwind_eh_frame.bpf.h": {
        "search: the entry after": ("] <= relative)", "] < relative - 4096)"),
        "row: one too far": (
            "> w->target)\n\t\t\t\t\treturn",
            "> w->target + 8)\n\t\t\t\t\treturn",
        ),
        "advance_loc: wrong amount": (
            "w->location += value * w->code_align",
            "w->location += value * w->code_align + 1",
        ),
        "advance_loc1: ignored": ("? x & 0xff\n", "? 0\n"),
        "offset: unscaled": (
            "(s64)raw * w->data_align);\n\t\t\t\tlength",
            "(s64)raw);\n\t\t\t\tlength",
        ),
        "restore: ignored": ("restore_rule(w, c, value);", ""),
        "def_cfa_offset: ignored": ("w->row.cfa_offset = value;\n\t\t\tif", "if"),
        "def_cfa_register: ignored": (
            "set_cfa(w, x & 0xff, w->row.cfa_offset)",
            "(x & 0xff) >= MAX_COLUMNS",
        ),
        "def_cfa: offset lost": ("set_cfa(w, x & 0xff, value)", "set_cfa(w, x & 0xff, value & 31)"),
        "expression: refused": ("op == DW_CFA_expression && base_register", "0 && base_register"),
        "remember_state: not saved": ("w->state[depth & (MAX_STATES - 1)] = w->row;", ""),
        "restore_state: ignored": ("w->row = w->state[depth & (MAX_STATES - 1)];", ""),
        "undefined: like same value": ("? UNDEFINED : SAME", "? SAME : SAME"),
        "CIE: initial rows lost": ("w->row = w->initial;\n\tlength", "length"),
        "CIE: another's is kept": (
            "w->cie_at != cie || w->cie_serial != m->serial",
            "!w->cie_serial",
        ),
        "restore_extended: ignored": ("restore_rule(w, c, x & 0x7f);", ";"),
        "offset_extended: unscaled": ("offset *= w->data_align;", ""),
        "def_cfa_offset_sf: unscaled": (
            "w->row.cfa_offset = offset * w->data_align;",
            "w->row.cfa_offset = offset;",
        ),
        "states: one at a time": (
            "w->state[depth & (MAX_STATES - 1)] = w->row;",
            "w->state[0] = w->row;",
        ),
        "restore: preserved registers stay": ("preserved[place] = from->", "preserved[0] = from->"),
    },
    "unwind.bpf.h": {
        "def_cfa_expression: not followed": ("*cfa = w->pair[0] + (s64)row->post;", ""),
        "PLT: one word short": ("\t\t*cfa += 8;\n", ""),
        "callers: at their return address": ("find_rule(address - !w->leaf)", "find_rule(address)"),
        "frame pointer: not restored": ("\tw->fp = fp;\n", ""),
        "stack pointer: not advanced": ("\tw->sp = cfa;\n", "\tw->sp = cfa - 8;\n"),
        "signals: stepped over as calls": (
            "take_block(w, SIGNAL_BLOCK);\n\tw->leaf = 1;",
            "take_block(w, SIGNAL_BLOCK);\n\tw->leaf = 0;",
        ),
        "system calls at the end of functions": ("&& after_syscall(c, w->pc))", "&& 0)"),
        "preserved registers: not followed": ("if (words != STILL_THERE)", "if (0)"),
        "preserved registers: taken for what they are in a callee": (
            "if (place && at) {",
            "if (0) {",
        ),
        "other stacks: must lie above": ("row->cfa_kind < CFA_ELSEWHERE &&", "1 &&"),
    },
    "unwind_mappings.bpf.h": {
        "mappings: another segment's shift": ("m->bias - header->text[i].delta", "m->bias"),
        "mappings: file offset ignored": (
            "m->bias = vma_word(w, c->vma_start) - pages * c->page_bytes;",
            "m->bias = vma_word(w, c->vma_start);",
        ),
    },
    "call_sites.bpf.h": {
        "frame pointers: no first instructions": ("== 0xe5894855ULL << 8", "== 1"),
        "frame pointers: no second instructions": ("== 0xe5894855 ? 1", "== 1 ? 1"),
        "frame pointers: no last instructions": ("== 0xc300 ||", "== 1 ||"),
    },
}
"""The text to replace and its replacement, by source file and mutation name."""
MUTATIONS = [
    Mutation(name, file, old, new)
    for file, changes in _CHANGES.items()
    for name, (old, new) in changes.items()
]


def run(folder: Path, mutation: Mutation | None, program: Path) -> Report | str:
    """Runs the comparison on a mutated program; returns the error if the verifier rejects it."""
    built = dumps.build(folder, copy_sources(folder, mutation))
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
