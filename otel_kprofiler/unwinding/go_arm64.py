"""Generates unwind table rows for Go functions on arm64 from frame sizes and machine code.

A function with a frame stores the return address, x30, at the new stack pointer, and the caller's
frame pointer, x29, below it (``cmd/internal/obj/arm64/obj7.go``). Compiled functions always use the
same instructions for these stores. In assembly functions, this module checks every instruction that
may change x29, x30 or the stack pointer. After an unrecognized change, it generates no more rules
for the function. Functions that switch stacks are recognized by their code
(``runtime/asm_arm64.s``, ``runtime/sys_linux_arm64.s``, ``runtime/preempt_arm64.s``).
"""

import struct
from typing import Final, NamedTuple

from otel_kprofiler.unwinding.arm64_code import CIE_REST, FP, LINK, NO_RULE, SP, WORD, find_changes
from otel_kprofiler.unwinding.frame_writing import Rows, make_program, pack_number
from otel_kprofiler.unwinding.go_table import (
    IN_ASSEMBLY,
    TOP_FRAME,
    WRITES_SP,
    Function,
    Shape,
    Sizes,
    Table,
    parse_sizes,
)

_NO_CALLER: Final = b"\7\x1e"  # undefined x30
_CFA_OFFSET: Final = b"\x0e"  # def_cfa_offset
_BY_SP: Final = b"\x0c\x1f"  # def_cfa sp
_BY_FP: Final = b"\x0f\2\x8d"  # def_cfa_expression: breg29 with a one-byte offset
_MAX_BYTE: Final = 0x3F
_LINK_SAVED, _LINK_KEPT = b"\x9e", b"\xde"  # offset x30; restore x30
_FP_SAVED, _FP_KEPT, _FP_LOST = b"\x9d", b"\xdd", b"\7\x1d"  # offset, restore, undefined x29
_SLOT: Final = 8

_MAX_PUSH: Final = 0xF0
"""Maximum size of a frame that is allocated by a single store instruction."""
_MAX_ADD: Final = 1 << 12
"""Minimum size of a frame that may be freed by two instructions. The table records only the second
instruction."""
_PUSH: Final = 0xF8000FFE  # str x30, [sp, #-N]!
_STORE_LINK: Final = 0xF80003FE  # stur x30, [sp, #-N]
_DROP_SP: Final = 0xD10003FF  # sub sp, sp, #N
_FIND_SLOT: Final = 0xD10003FB  # sub x27, sp, #N
_STORE_AT_SLOT: Final = WORD.pack(0xF900037E)  # str x30, [x27]
_STORE_FP: Final = WORD.pack(0xF81F83FD)  # stur x29, [sp, #-8]
_SET_FP: Final = WORD.pack(0xD10023FD)  # sub x29, sp, #8
_STORE_BOTH: Final = WORD.pack(0xA93FFA9D)  # stp x29, x30, [x20, #-8]
_SET_SP: Final = WORD.pack(0x9100029F)  # mov sp, x20
_KEEP_SP: Final = WORD.pack(0x910003F4)  # mov x20, sp
_KEEP_LINK: Final = WORD.pack(0xAA1E03E3)  # mov x3, x30; then bl morestack, which restores x30
_KEEP_GOROUTINE: Final = struct.pack(
    "<7I",
    0x910003ED,  # mov x13, sp
    0xD10041AD,  # sub x13, x13, #16
    0x910001BF,  # mov sp, x13
    0xF90003E4,  # str x4, [sp]
    0xF9400484,  # ldr x4, [x4, #8]: end of the goroutine's stack
    0xCB020084,  # sub x4, x4, x2
    0xF90007E4,  # str x4, [sp, #8]
)
_FIND_GOROUTINE: Final = struct.pack(
    "<5I",
    0xF9400785,  # ldr x5, [x28, #8]
    0xF94007E6,  # ldr x6, [sp, #8]
    0xCB0600A5,  # sub x5, x5, x6
    0xAA0903E0,  # mov x0, x9
    0x910000BF,  # mov sp, x5
)
_LEAVE: Final = struct.pack("<2I", 0xD10041AD, 0x910001BF)  # sub x13, x13, #16; mov sp, x13
_RETURN: Final = struct.pack("<2I", 0xF94007E2, 0x9100005F)  # ldr x2, [sp, #8]; mov sp, x2
_TAKEN: Final = (WORD.pack(0x910003E2), WORD.pack(0xAA1C03E4))  # mov x2, sp; mov x4, x28
_BY_GOROUTINE: Final = bytes.fromhex("0f0c 8f00 06 2308 06 8f08 06 1c 2310")
"""def_cfa_expression: breg31 0; deref; plus_uconst 8; deref; breg31 8; deref; minus; plus_uconst
16."""
_PUSHED_BYTES: Final = 16
"""Size of the frame in which a signal handler saves x30 to inject a call (signal_arm64.go)."""

_WITHOUT: Final[Rows] = [(0, NO_RULE)]


def make_rows(
    sizes: Sizes,
    frame: int,
    pushed: int = 0,
    *,
    keeps_link: bool = False,
    fp_lost: bool = False,
) -> Rows:
    """Generates the unwind rows for a function.

    Args:
        sizes: frame sizes, by code offset.
        frame: size of the first frame, in which x30 and x29 are saved; 0 if neither is saved.
        pushed: CFA minus the stack pointer at function entry, in bytes.
        keeps_link: whether the return address also remains in x30.
        fp_lost: whether the caller's x29 is unknown where the function has no frame.
    """
    slot = frame + pushed
    saved = _LINK_SAVED + pack_number(slot // _SLOT) if frame and not keeps_link else _LINK_KEPT
    fp_saved = _FP_SAVED + pack_number(slot // _SLOT + 1) if frame else b""
    fp_kept = (_FP_LOST if fp_lost else _FP_KEPT) if frame else b""
    first = (_FP_LOST if fp_lost else b"") + (_CFA_OFFSET + pack_number(pushed) if pushed else b"")
    rows, at, now = [(0, first)], 0, 0
    for end, size in sizes:
        if size != now:
            if now - size >= _MAX_ADD or (not frame and size - now >= _MAX_ADD):
                rows.append((at - WORD.size, NO_RULE))
            code = _BY_SP + pack_number(size + pushed)
            if not size:
                rows.append((at, code + _LINK_KEPT + fp_kept))
            elif not frame or len(rows) > 1 or size > _MAX_PUSH:
                rows.append((at, code + saved + fp_saved))
            else:  # the next instruction stores x29
                rows += [(at, code + saved), (at + WORD.size, fp_saved)]
            now = size
        at = end
    return rows


class Arm64:
    """Generates the unwind rows for a table's functions."""

    QUANTUM: Final = 4
    # DW_CFA_undefined for x19 to x28
    CIE_REST: Final = CIE_REST + b"".join(b"\7%c" % n for n in range(19, 29))
    SIGRETURN: Final = bytes.fromhex("681180d2010000d4")  # mov x8, #139; svc #0
    SPECIAL: Final = TOP_FRAME | WRITES_SP | IN_ASSEMBLY
    SPECIAL_NAMES: Final = (b"runtime.sigpanic",)

    def __init__(self, table: Table) -> None:
        # has a caller, although its TOP_FRAME flag is set
        self._handler = table.number(b"runtime.sigtramp")
        self._pushed = {
            table.number(b"runtime.sigpanic"): _PUSHED_BYTES,
            table.number(b"runtime.cgocallback"): 0,  # its frame layout is the same on both stacks
        }
        self._makers = {
            table.number(b"runtime.systemstack"): _make_systemstack,
            table.number(b"runtime.mcall"): _make_mcall,
            table.number(b"runtime.morestack"): _make_jump,
            table.number(b"gogo"): _make_jump,
            table.number(b"gosave_systemstack_switch"): _make_jump,
            table.number(b"runtime.asyncPreempt"): _make_preemption,
            table.number(b"runtime.asmcgocall"): _make_call_of_c,
        }

    def make_packed_shape(self, packed: bytes) -> Shape | None:
        """Returns the result of :meth:`make_shape` for packed sizes; None if they are malformed."""
        try:
            return self.make_shape(parse_sizes(packed, 0, self.QUANTUM))
        except (IndexError, ValueError):
            return None

    def make_shape(self, sizes: Sizes) -> Shape:
        """Returns the prologue and CFA program of functions with the given frame sizes."""
        size, first = sizes[-1][0], sizes[0][0]
        frame = next((depth for _, depth in sizes if depth), 0)
        if min(depth for _, depth in sizes) < 0 or frame % _SLOT or sizes[0][1]:
            return Shape(size, 0, b"", b"")
        if not frame:
            return Shape(size, 0, b"", make_program(make_rows(sizes, 0), self.QUANTUM))
        if frame > _MAX_PUSH:
            saving, at = _STORE_BOTH + _SET_SP + _SET_FP, first - 8
        else:
            push = WORD.pack(_PUSH | (-frame & 0x1FF) << 12)
            saving, at = push + _STORE_FP + _SET_FP, first - 4
        program = make_program(make_rows(sizes, frame), self.QUANTUM)
        return Shape(size, max(at, 0), saving, program)

    def make_rows(self, function: Function, sizes: Sizes, code: bytes) -> Rows:
        """Generates the unwind rows of any function."""
        name, frame = function.name, self._find_frame(sizes, code)
        if function.flags & TOP_FRAME and name != self._handler:
            return [(0, _NO_CALLER)]
        if name in self._makers:
            return self._makers[name](sizes, frame, code)
        if name in self._pushed:
            return make_rows(sizes, frame, self._pushed[name]) if frame else _WITHOUT
        left, back = _find_detour(code) if function.flags & WRITES_SP else (0, 0)
        proof = _check(sizes, frame, code, left, back)
        if proof is None or (back and proof.fp_lost):
            return _WITHOUT
        if back:
            return _insert_by_fp(sizes, frame, left, back)
        return make_rows(sizes, frame, keeps_link=proof.keeps_link, fp_lost=proof.fp_lost)

    def _find_frame(self, sizes: Sizes, code: bytes) -> int:
        """Returns the size of the function's first frame; 0 if unusual code sets up the frame."""
        shape = self.make_shape(sizes)
        end = shape.saving_at + len(shape.saving)
        if not shape.saving or code[shape.saving_at : end] != shape.saving:
            return 0
        return next(depth for _, depth in sizes if depth)


class _Proof(NamedTuple):
    """Facts proven from a function's code.

    Attributes:
        keeps_link: whether x30 never changes, so that it always contains the return address.
        fp_lost: whether the function may change x29 without having saved it.
    """

    keeps_link: bool
    fp_lost: bool


def _check(sizes: Sizes, frame: int, code: bytes, left: int, back: int) -> _Proof | None:
    """Returns facts about x30 and x29; None if the frame sizes are insufficient to find callers.

    Between ``left`` and ``back``, the stack pointer may change, but x29 must not.
    """
    if any(size < 0 or size % _SLOT for _, size in sizes):
        return None
    ends, keeps_link, fp_lost = {end for end, _ in sizes}, True, False
    for at, register in find_changes(code):
        is_saved = frame and next((size for end, size in sizes if at <= end), 0)
        is_away = left < at <= back
        if register == SP and at not in ends and not is_away:
            return None
        if register == LINK and code[at - 8 : at - 4] != _KEEP_LINK:
            keeps_link = False
            if not is_saved:
                return None
        if register == FP and is_away:
            return None
        fp_lost = fp_lost or (register == FP and not is_saved)
    return _Proof(keeps_link, fp_lost)


def _find(code: bytes, word: bytes, start: int) -> int:
    for at in range(start, len(code) - 3, WORD.size):
        if code[at : at + WORD.size] == word:
            return at + WORD.size
    return 0


def _find_detour(code: bytes) -> tuple[int, int]:
    """Returns the range in which a function keeps its stack pointer in x20; (0, 0) if not found.

    A function with such a range calls the vDSO on a different stack. C code preserves x20 and x29.
    """
    left = _find(code, _KEEP_SP, 0)
    back = _find(code, _SET_SP, left) if left else 0
    return (left, back) if back else (0, 0)


def _find_switch(code: bytes, start: int) -> int:
    """Returns the end of the next instruction that sets sp to g.sched.sp; 0 if there is none."""
    words = [word for (word,) in WORD.iter_unpack(code[: len(code) & -WORD.size])]
    for index in range(start // WORD.size + 1, len(words)):
        register = words[index - 1] & 31
        load, move = 0xF9401F80 | register, 0x9100001F | register << 5
        if (words[index - 1], words[index]) == (load, move):  # ldr xN, [x28, #56]; mov sp, xN
            return (index + 1) * WORD.size
    return 0


def _insert_by_fp(sizes: Sizes, frame: int, left: int, back: int) -> Rows:
    """Generates the rows for a function that switches stacks at ``left``, and back at ``back``."""
    offset = frame + _SLOT
    rows = make_rows(sizes, frame)
    after = [row for row in rows if left < row[0]]
    size = next((size for end, size in sizes if left < end), 0)
    if not frame or size != frame or offset > _MAX_BYTE or any(at <= back for at, _ in after):
        return _WITHOUT
    return [
        *(row for row in rows if row[0] <= left),
        (left, _BY_FP + bytes([offset])),
        (back, _BY_SP + pack_number(frame)),
        *after,
    ]


def _make_systemstack(sizes: Sizes, frame: int, code: bytes) -> Rows:
    left = _find_switch(code, 0)
    back = _find_switch(code, left) if left else 0
    ends = {end for end, _ in sizes}
    changes = [(at, register) for at, register in find_changes(code) if at not in (left, back)]
    if not back or any(left < at <= back and register == FP for at, register in changes):
        return _WITHOUT
    # If no stack switch is needed, the function drops its frame before a tail call. The table of
    # frame sizes does not record this.
    last = min((at for at, register in changes if register == SP and at not in ends), default=0)
    if last and last < back:
        return _WITHOUT
    rows = _insert_by_fp(sizes, frame, left, back)
    return [*(row for row in rows if row[0] < last), (last, NO_RULE)] if last else rows


def _make_call_of_c(sizes: Sizes, frame: int, code: bytes) -> Rows:
    """Generates the unwind rows for asmcgocall; see ``make_call_of_c`` in go_x86.py."""
    switched = _find_switch(code, 0)
    is_taken = all(_find(code[:switched], word, 0) for word in _TAKEN)
    kept = code.find(_KEEP_GOROUTINE, switched) + len(_KEEP_GOROUTINE)
    back = code.find(_FIND_GOROUTINE, kept) + len(_FIND_GOROUTINE)
    left = code.find(_LEAVE, back) + len(_LEAVE)
    returned = code.find(_RETURN, left) + len(_RETURN)
    ends = {end for end, _ in sizes}
    moves = [at for at, register in find_changes(code) if register == SP and at not in ends]
    places = [switched, kept - 4 * WORD.size, back, left, returned]
    if frame != _PUSHED_BYTES or not is_taken or moves != places:
        return _WITHOUT
    rows = make_rows(sizes, frame)
    slot = _LINK_SAVED + pack_number(frame // _SLOT) + _FP_SAVED + pack_number(frame // _SLOT + 1)
    return [
        *(row for row in rows if row[0] < switched),
        (switched, NO_RULE),
        (kept, _BY_GOROUTINE + slot),
        (back, _BY_SP + pack_number(frame)),
        *(row for row in rows if back < row[0] < left),
        (left, _BY_SP + pack_number(frame + _PUSHED_BYTES)),
        (returned, _BY_SP + pack_number(frame)),
        *(row for row in rows if returned < row[0]),
    ]


def _make_jump(_sizes: Sizes, _frame: int, code: bytes) -> Rows:
    """Generates the rows for a frameless function that jumps to another stack or aborts.

    The rows end after the first instruction that changes x30 or sp, or before this instruction if
    it is a call, because the row for a call also applies while the callee runs.
    """
    for at, register in find_changes(code):
        if register != FP:
            return [(0, b""), (at - WORD.size if register == LINK else at, NO_RULE)]
    return _WITHOUT


def _make_mcall(sizes: Sizes, frame: int, code: bytes) -> Rows:
    left = _find_switch(code, 0)
    rows = _make_jump(sizes, frame, code)
    return [*rows, (left, _NO_CALLER)] if left else rows


def _make_preemption(sizes: Sizes, _frame: int, code: bytes) -> Rows:
    """Generates the rows of asyncPreempt, whose epilogue also pops the signal handler's frame."""
    (first, start), (end, frame) = [*sizes, (0, 0)][:2]
    changes = [at for at, register in find_changes(code[:end]) if register == SP]
    drop = WORD.pack(_DROP_SP | frame << 10) + _STORE_FP
    store = WORD.pack(_STORE_LINK | (-frame & 0x1FF) << 12)
    large_store = WORD.pack(_FIND_SLOT | frame << 10) + _STORE_AT_SLOT
    is_known = code[: first + WORD.size] in {store + drop, large_store + drop}
    if start or not is_known or changes != [first, end]:
        return _WITHOUT
    slot = (frame + _PUSHED_BYTES) // _SLOT
    return [
        (0, _CFA_OFFSET + pack_number(_PUSHED_BYTES)),
        (first, _CFA_OFFSET + pack_number(slot * _SLOT) + _LINK_SAVED + pack_number(slot)),
        (first + WORD.size, _FP_SAVED + pack_number(slot + 1)),
        (end, NO_RULE),
    ]
