"""Settings for the user-stack unwinder: kernel struct offsets, and processor properties.

The structs mirror ``programs/unwind_types.bpf.h``; change both files together.
"""

import mmap
import struct
from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

from otel_kprofiler.bpf.btf import KernelTypes

MAX_COLUMNS: Final = 64
MAX_BLOCK_BYTES: Final = 512
MAX_PRESERVED: Final = 15
VMA_BYTES: Final = 256
"""Number of bytes that the BPF program reads from a ``vm_area_struct``."""
_WORD: Final = 8
_ALL_BITS: Final = (1 << 64) - 1

A64_CALLS: Final = 1
LINK_REGISTER: Final = 2
KEEP_MAPPINGS: Final = 4
RB_TREE: Final = 8

_CONFIG: Final = struct.Struct("=5Q38I")
_BLOCK: Final = struct.Struct(f"={4 + MAX_COLUMNS}H")
CONFIG_BYTES: Final = _CONFIG.size + 2 * _BLOCK.size + MAX_COLUMNS
DEFAULT_MAX_WORK: Final = 5000
"""Default limit on unwinding steps per stack: 125 µs with cold caches (docs/unwinding.md)."""


class RegisterBlock(NamedTuple):
    """Byte offsets of the registers in a block of memory that the kernel fills.

    ``at`` contains the offsets by DWARF register number; None for registers not in the block.
    """

    size: int
    sp_at: int
    fp_at: int
    pc_at: int
    at: Sequence[int | None]

    def pack(self) -> bytes:
        """Packs ``struct register_block``."""
        at = [MAX_BLOCK_BYTES if place is None else place for place in self.at]
        at += [MAX_BLOCK_BYTES] * (MAX_COLUMNS - len(at))
        return _BLOCK.pack(self.size, self.sp_at, self.fp_at, self.pc_at, *at)


class Processor(NamedTuple):
    """Processor properties that unwinding depends on; see ``struct unwind_config``.

    Attributes:
        flags: any of ``A64_CALLS`` and ``LINK_REGISTER``, combined.
        address_mask: address bits in a return address. Pointer authentication uses the remaining
            bits of the return address.
        sigreturn: first eight bytes of a signal trampoline.
        syscall: encoding of the system call instruction.
        goexit: code in Go's ``runtime.goexit`` around the address to which goroutines return; empty
            if unknown.
        goexit_mask: bits of ``goexit`` that are compared.
        goexit_back: number of bytes in ``goexit`` before the return address.
        sigreturn_bytes: number of bytes in a signal trampoline up to the end of its system call.
        signal_at: in a signal trampoline, offset of the ``signal`` block from the stack pointer.
        sp_column: DWARF register number of the stack pointer.
        ra_column: DWARF register number of the return address.
        mode_at: offset of the processor mode in ``pt_regs``.
        user_mask: mode bits that equal ``user_value`` in user mode.
        narrow_mask: mode bits that equal ``narrow_value`` in 32-bit code.
        interrupt: registers that an interrupt saves in ``pt_regs``.
        signal: registers in the frame that the kernel pushes for a signal.
        preserved: DWARF numbers of callee-saved registers except sp and fp; up to MAX_PRESERVED.
    """

    flags: int
    address_mask: int
    sigreturn: bytes
    syscall: bytes
    goexit: bytes
    goexit_mask: bytes
    goexit_back: int
    sigreturn_bytes: int
    signal_at: int
    sp_column: int
    fp_column: int
    ra_column: int
    mode_at: int
    user_mask: int
    user_value: int
    narrow_mask: int
    narrow_value: int
    interrupt: RegisterBlock
    signal: RegisterBlock
    preserved: Sequence[int]


# Word offsets into struct pt_regs (arch/x86/include/uapi/asm/ptrace.h):
# r15 r14 r13 r12 bp bx r11 r10 r9 r8 ax cx dx si di orig_ax ip cs flags sp ss
# DWARF numbers (System V ABI): ax dx cx bx si di bp sp r8-r15 ip
_X86_INTERRUPT: Final = (10, 12, 11, 5, 13, 14, 4, 19, 9, 8, 7, 6, 3, 2, 1, 0, 16)
# struct sigcontext: r8-r15 di si bp bx dx ax cx sp ip
_X86_SIGNAL: Final = (13, 12, 14, 11, 9, 8, 10, 15, 0, 1, 2, 3, 4, 5, 6, 7, 16)

X86_64: Final = Processor(
    flags=0,
    address_mask=_ALL_BITS,
    sigreturn=bytes.fromhex("48c7c00f0000000f"),  # mov $15, %rax; first byte of syscall
    syscall=bytes.fromhex("0f05"),
    goexit=bytes.fromhex("90e8"),  # nop; call: the return address is after the nop
    goexit_mask=bytes.fromhex("ffff"),
    goexit_back=1,
    sigreturn_bytes=9,
    signal_at=40,  # ucontext: flags, link, stack (3 words), then sigcontext
    sp_column=7,
    fp_column=6,
    ra_column=16,
    mode_at=17 * _WORD,
    user_mask=3,
    user_value=3,
    narrow_mask=0xFFFF,
    narrow_value=0x23,  # __USER32_CS
    interrupt=RegisterBlock(
        21 * _WORD, 19 * _WORD, 4 * _WORD, 16 * _WORD, [_WORD * at for at in _X86_INTERRUPT]
    ),
    signal=RegisterBlock(
        17 * _WORD, 15 * _WORD, 10 * _WORD, 16 * _WORD, [_WORD * at for at in _X86_SIGNAL]
    ),
    preserved=(3, 12, 13, 14, 15),
)

_A64_INTERRUPT: Final = tuple(_WORD * number for number in range(32))  # x0-x30, sp
# struct sigcontext: fault_address, then the fields of pt_regs
_A64_SIGNAL: Final = tuple(_WORD * (number + 1) for number in range(32))

AARCH64: Final = Processor(
    flags=A64_CALLS | LINK_REGISTER,
    address_mask=(1 << 48) - 1,  # covers user addresses, unless mmap(2) is passed a higher hint
    sigreturn=bytes.fromhex("681180d2010000d4"),  # mov x8, #139; svc #0
    syscall=bytes.fromhex("010000d4"),
    goexit=bytes.fromhex("e00300aa00000094"),  # mov x0, x0; bl: return address between them
    goexit_mask=bytes.fromhex("ffffffff000000fc"),
    goexit_back=4,
    sigreturn_bytes=8,
    signal_at=128 + 176,  # size of siginfo, plus offset of uc_mcontext
    sp_column=31,
    fp_column=29,
    ra_column=30,
    mode_at=33 * _WORD,
    user_mask=0xF,
    user_value=0,
    narrow_mask=0x10,  # PSR_MODE32_BIT
    narrow_value=0x10,
    interrupt=RegisterBlock(34 * _WORD, 31 * _WORD, 29 * _WORD, 32 * _WORD, _A64_INTERRUPT),
    signal=RegisterBlock(34 * _WORD, 32 * _WORD, 30 * _WORD, 33 * _WORD, _A64_SIGNAL),
    preserved=range(19, 29),
)

PROCESSORS: Final[Mapping[str, Processor]] = {"x86_64": X86_64, "aarch64": AARCH64}
"""Properties of each processor architecture, keyed by ``platform.machine()``."""

_LEAST_THREAD_BYTES: Final = 16384
"""Minimum THREAD_SIZE (page_64_types.h, arm64's memory.h), which grows with arm64's page size."""


class KernelOffsets(NamedTuple):
    """Offsets in the kernel's structs, in the order of ``struct unwind_config``."""

    flags: int
    stack_top_registers: int
    offsets: tuple[int, ...]


_MEMBERS: Final = (
    ("task_struct", "mm"),
    ("task_struct", "stack"),
    ("mm_struct", "mm_mt", "ma_root"),
    ("mm_struct", "mmap_base"),
    ("mm_struct", "mm_lock_seq"),
    ("mm_struct", "context", "vdso"),
    ("mm_struct", "end_code"),
    ("vm_area_struct", "vm_start"),
    ("vm_area_struct", "vm_end"),
    ("vm_area_struct", "vm_mm"),
    ("vm_area_struct", "vm_flags"),
    ("vm_area_struct", "vm_pgoff"),
    ("vm_area_struct", "vm_file"),
    ("vm_area_struct", "vm_rb"),
    ("file", "f_inode"),
    ("inode", "i_ino"),
    ("inode", "i_sb"),
    ("inode", "i_generation"),
    ("inode", "i_size"),
    ("inode", "i_mtime_sec"),
    ("inode", "i_mtime_nsec"),
    ("super_block", "s_dev"),
)
_FORMER: Final = {
    # Before Linux 6.1, the mappings of a process were stored in a red-black tree.
    ("mm_struct", "mm_mt", "ma_root"): (("mm_struct", "mm_rb"),),
    # An inode's times were struct timespec64 before Linux 6.11, and had other names before 6.7.
    ("inode", "i_mtime_sec"): (("inode", "i_mtime", "tv_sec"), ("inode", "__i_mtime", "tv_sec")),
    ("inode", "i_mtime_nsec"): (("inode", "i_mtime", "tv_nsec"), ("inode", "__i_mtime", "tv_nsec")),
}
"""Names of struct members in older kernels."""
_OPTIONAL: Final = {("mm_struct", "mm_lock_seq"), ("vm_area_struct", "vm_rb")}


def find_kernel_offsets(
    types: KernelTypes, page_bytes: int = mmap.PAGESIZE
) -> KernelOffsets | None:
    """Returns the struct offsets for the unwinder; None if a member is missing."""
    flags, offsets = 0, []
    for member in _MEMBERS:
        offset = types.offset(*member)
        if member[1] == "mm_mt" and offset is None:
            flags |= RB_TREE
        if member[1] == "mm_lock_seq" and offset is not None:
            flags |= KEEP_MAPPINGS
        for former in _FORMER.get(member, ()):
            offset = types.offset(*former) if offset is None else offset
        if offset is None and member not in _OPTIONAL:
            return None
        if member[0] == "vm_area_struct" and (offset or 0) > VMA_BYTES - _WORD:
            return None
        offsets.append(offset or 0)
    registers = types.size("pt_regs") or 0
    thread_bytes = max(_LEAST_THREAD_BYTES, page_bytes)
    return KernelOffsets(flags, thread_bytes - registers, tuple(offsets))


def pack_unwind_config(
    processor: Processor,
    kernel: KernelOffsets,
    *,
    page_bytes: int,
    max_work: int,
    address_bits: int = 64,
) -> bytes:
    """Packs ``struct unwind_config``; ``max_work`` limits the unwinding steps per stack.

    User addresses have ``address_bits`` bits. If the kernel enables pointer authentication, it uses
    the upper address bits (Documentation/arch/arm64/pointer-authentication.rst): from bit 47 up
    with 16 KiB pages, and from bit 42 up with 64 KiB pages.
    """
    is_signing = processor.address_mask != _ALL_BITS
    unsigned = (1 << address_bits) - 1 if is_signing else _ALL_BITS
    goexit = processor.goexit, processor.goexit_mask
    words = (processor.sigreturn, processor.syscall, *goexit)
    return (
        _CONFIG.pack(
            processor.address_mask & unsigned,
            *(int.from_bytes(word, "little") for word in words),
            processor.flags | kernel.flags,
            max_work,
            len(processor.syscall),
            processor.goexit_back,
            processor.sigreturn_bytes,
            *processor[8:17],
            kernel.stack_top_registers,
            *kernel.offsets,
            page_bytes,
        )
        + processor.interrupt.pack()
        + processor.signal.pack()
        + _pack_preserved(processor.preserved)
    )


def _pack_preserved(columns: Sequence[int]) -> bytes:
    places = bytearray(MAX_COLUMNS)
    for place, column in enumerate(columns, 1):
        places[column] = place
    return bytes(places)
