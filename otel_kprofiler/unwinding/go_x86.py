"""Generates unwind rows for Go functions on x86-64 from frame sizes and machine code.

A call pushes the return address, and the function then pushes rbp. Functions that switch stacks are
recognized by their code (``runtime/asm_amd64.s``, ``runtime/sys_linux_amd64.s``).
"""

import re
from typing import Final

from otel_kprofiler.unwinding.frame_writing import (
    BY_RSP,
    CIE_REST,
    NO_CALLER,
    NO_RULE,
    RBP_LOST,
    SIGRETURN,
    Rows,
    make_program,
    pack_number,
)
from otel_kprofiler.unwinding.go_steps import PUSH, StepMaker, change_frame
from otel_kprofiler.unwinding.go_table import TOP_FRAME, WRITES_SP, Function, Shape, Sizes, Table

_STEPS: Final = StepMaker()
_ON_OTHER_STACK: Final = b"\x0f\2\x76\x10"  # def_cfa_expression: breg6 16

_BY_R12: Final = b"\x0f\2\x7c"  # def_cfa_expression: breg12 with a one-byte offset
_MAX_BYTE: Final = 0x3F

_PROLOGUE: Final = b"\x55\x48\x89\xe5"  # push %rbp; mov %rsp, %rbp
_KEEP_SP: Final = b"\x49\x89\xe4"  # mov %rsp, %r12
_RESTORE_SP: Final = b"\x4c\x89\xe4"  # mov %r12, %rsp
_LOAD_BYTES: Final = 4
_LOADS: Final = tuple(
    bytes([0x48 | high, 0x8B, 0x60 | base, 0x38])  # mov 56(base), %rsp: g.sched.sp
    for high in (0, 1)
    for base in (0, 1, 2, 3, 5, 6, 7)
)
_CALL_OF_C: Final = re.compile(
    rb"\x55\x48\x89\xe5"  # push %rbp; mov %rsp, %rbp
    rb"(?>.*?\x48\x89\xe2)"  # mov %rsp, %rdx
    rb"(?>.*?\x48\x8b\x66\x38)(?P<switched>)"  # mov 56(%rsi), %rsp: g.sched.sp of g0
    rb"(?>.*?\x48\x89\x7c\x24(?P<goroutine>[\x08-\x3f])"  # mov %rdi, GOROUTINE(%rsp)
    rb"\x48\x8b\x7f\x08\x48\x29\xd7"  # mov 8(%rdi), %rdi: the stack's end; sub %rdx, %rdi
    rb"\x48\x89(?P<store>\x3c\x24|\x7c\x24.))(?P<kept>)"  # mov %rdi, DEPTH(%rsp)
    rb"(?>.*?\x48\x89\xf4)(?P<back>)"  # mov %rsi, %rsp
    rb"(?>.*?\x48\x83\xec.)(?P<left>)"  # sub $N, %rsp: nosave path, for callers on a system stack
    rb"(?>.*?\x48\x89\xf4)(?P<left_back>)",
    re.DOTALL,
)
"""Matches the machine code of asmcgocall."""
_BY_GOROUTINE: Final = b"\x0f\x0c\x77%c\x06\x23\x08\x06\x77%c\x06\x1c\x23\x10"
"""def_cfa_expression: breg7 GOROUTINE; deref; plus_uconst 8; deref; breg7 DEPTH; deref; minus;
plus_uconst 16."""
_PARTS: Final = ("switched", "kept", "back", "left", "left_back")
_BY_RBP: Final = b"\x0c\6\x10"  # def_cfa rbp 16


def make_rows(sizes: Sizes, saves: bool) -> Rows:
    """Generates the unwind rows for a function.

    ``saves`` states whether the caller's rbp is saved at the top of each frame. If ``saves`` is
    False, the location of the caller's rbp is unknown.
    """
    rows, at, now = [(0, b"" if saves else RBP_LOST)], 0, 0
    for end, size in sizes:
        if size != now:
            rows.append((at, change_frame(now, size, saves=saves)))
            now = size
        at = end
    return rows


def make_switch(code: bytes, rows: Rows, behind: bytes) -> Rows:
    """Generates the rows for a function that switches to the stack of ``m.g0``.

    ``rows`` (in code order) are derived from the frame sizes alone. ``behind`` is the unwind rule
    after the switch.
    """
    at = _find_load(code, 0)
    if at < 0:
        return [(0, NO_RULE)]
    rows = [row for row in rows if row[0] < at] + [(at, behind)]
    if behind == _ON_OTHER_STACK:
        back = _find_load(code, at)
        if back < 0 or not code.startswith(_PROLOGUE):
            return [(0, NO_RULE)]
        rows.append((back, NO_RULE))
    return rows


def _find_load(code: bytes, start: int) -> int:
    """Returns the end of the next instruction that loads rsp; -1 if not found."""
    loads = [at for load in _LOADS if (at := code.find(load, start)) >= 0]
    return min(loads) + _LOAD_BYTES if loads else -1


def make_detour(sizes: Sizes, rows: Rows, left: int, back: int) -> Rows:
    """Generates rows for a function that calls the vDSO on another stack, with rsp saved in r12.

    ``rows`` (in code order) are derived from the frame sizes alone. ``left`` is the end of the
    instruction that saves rsp, and ``back`` is the end of the instruction that restores it.
    """
    size = next((size for end, size in sizes if left < end), 0) + 8
    if size > _MAX_BYTE:
        return [(0, NO_RULE)]
    returned = next((end for end, size in sizes if not size and end > back), back)
    return [
        *(row for row in rows if row[0] < left),
        (left, _BY_R12 + bytes([size])),
        (back, BY_RSP + pack_number(size)),
        *(row for row in rows if back < row[0] < returned),
        (returned, NO_RULE),  # the fallback if there is no vDSO
    ]


def make_call_of_c(code: bytes, rows: Rows) -> Rows:
    """Generates the rows for asmcgocall, which calls C on the stack of ``m.g0``.

    C code may call back into Go, and the runtime may then move the goroutine's stack. Because the
    stack may move, asmcgocall saves the goroutine and the distance between asmcgocall's frame and
    the end of the goroutine's stack.
    """
    parts = _CALL_OF_C.match(code)
    if not parts:
        return [(0, NO_RULE)]
    depth = parts["goroutine"][0] - 8
    if parts["store"] != (b"\x7c\x24%c" % depth if depth else b"\x3c\x24"):
        return [(0, NO_RULE)]
    switched, kept, back, left, left_back = map(parts.end, _PARTS)
    by_rsp = BY_RSP + pack_number(16)
    return [
        *(row for row in rows if row[0] < switched),
        (switched, _ON_OTHER_STACK),
        (kept, _BY_GOROUTINE % (depth + 8, depth)),
        (back, by_rsp),
        *(row for row in rows if back < row[0] < left),
        (left, _BY_RBP),
        (left_back, by_rsp),
        *(row for row in rows if left_back < row[0]),
    ]


class X86:
    """Generates the unwind rows for a table's functions."""

    QUANTUM: Final = 1
    CIE_REST: Final = CIE_REST
    SIGRETURN: Final = SIGRETURN
    SPECIAL: Final = TOP_FRAME | WRITES_SP
    SPECIAL_NAMES: Final[tuple[bytes, ...]] = ()

    def __init__(self, table: Table) -> None:
        self._handler = table.number(b"runtime.sigtramp")  # has a caller despite TOP_FRAME
        self._switches = {
            table.number(b"runtime.mcall"): NO_CALLER,  # the callee never returns
            table.number(b"runtime.systemstack"): _ON_OTHER_STACK,
        }
        self._call_of_c = table.number(b"runtime.asmcgocall")
        self._called_by_c = table.number(b"runtime.cgocallback")  # same frame layout on both stacks

    @staticmethod
    def make_packed_shape(packed: bytes) -> Shape | None:
        """Returns the shape for the given packed frame sizes; None if the sizes are rare."""
        return _STEPS.find(packed)

    def make_shape(self, sizes: Sizes) -> Shape:
        """Returns the shape of functions with the given frame sizes."""
        size, depths = sizes[-1][0], [depth for _, depth in sizes]
        if min(depths) < 0:
            return Shape(size, 0, b"", b"")
        program = make_program(make_rows(sizes, saves=not depths[0]))
        pushes = any(depths) and not depths[0]
        return Shape(size, sizes[0][0] - 1, PUSH if pushes else b"", program)

    def make_rows(self, function: Function, sizes: Sizes, code: bytes) -> Rows | None:
        """Generates a function's rows; None if the function needs no entry."""
        depths = [depth for _, depth in sizes]
        if min(depths) < 0:
            return None  # the function pops its return address
        push = sizes[0][0] - 1
        saves = not any(depths) or (not depths[0] and code[push : push + 1] == PUSH)
        rows = make_rows(sizes, saves)
        if function.flags & self.SPECIAL and function.name != self._handler:
            return self._special_rows(function, sizes, code, rows)
        return rows

    def _special_rows(self, function: Function, sizes: Sizes, code: bytes, rows: Rows) -> Rows:
        if function.flags & TOP_FRAME:
            return [(0, NO_CALLER)]
        if function.name == self._called_by_c:
            return rows
        if function.name == self._call_of_c:
            return make_call_of_c(code, rows)
        left, back = code.find(_KEEP_SP), code.find(_RESTORE_SP)
        if 0 <= left < back:
            return make_detour(sizes, rows, left + len(_KEEP_SP), back + len(_RESTORE_SP))
        return make_switch(code, rows, self._switches.get(function.name, NO_RULE))
