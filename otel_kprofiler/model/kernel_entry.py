"""Classifies kernel entries (system call, interrupt and so on) by function name.

Sources of names: arch/x86/entry, arch/x86/include/asm/syscall_wrapper.h,
arch/arm64/kernel/entry-common.c and include/linux/syscalls.h in Linux 4.18 to 6.18. System call
wrappers are often inlined or end in a tail call, so ``ksys_read`` or ``__do_sys_clone`` may appear
instead of ``__x64_sys_read``.
"""

import re
from typing import Final

from otel_kprofiler.model.stack import KERNEL_SIDE, STACK_OK, Stack

USER_MODE: Final = "user mode"
UNKNOWN_ENTRY: Final = "unknown entry"
UNNAMED_CALL: Final = "system call without a name"

_SYSTEM_CALL: Final = re.compile(
    r"(?:__(?:x64|ia32|x32|arm64|arm|s390x?|riscv|loongarch|powerpc)_(?:compat_)?sys_"
    r"|__(?:se|do)_(?:compat_)?sys_|(?:compat_)?sys_|ksys_)(\w+)"
)
_ALIASES: Final = {"mmap_pgoff": "mmap", "fadvise64_64": "fadvise64"}
_GATES: Final = re.compile(
    r"entry_SYSCALL_\w+|entry_SYSENTER_\w+|entry_INT80_\w+|(?:do|x64|ia32|x32)_(?:int80_)?sys\w*call"
    r"\w*|do_(?:int80_syscall|fast_syscall|SYSENTER)_32|invoke_syscall|do_el0_svc\w*|el0_svc\w*"
    r"|asm_int80_emulation"
)
_ENTRIES: Final = {
    "page fault": r"(?:asm_)?exc_page_fault|(?:__)?do_page_fault|do_user_addr_fault|page_fault"
    r"|async_page_fault|el[01]_(?:da|ia|abort|pc)|do_mem_abort|do_translation_fault",
    "soft interrupt": r"__do_softirq|handle_softirqs|run_ksoftirqd|do_softirq\w*|__softirqentry\w*",
    "interrupt": r"(?:asm_)?sysvec_\w+|(?:asm_)?common_interrupt|apic_timer_interrupt"
    r"|smp_\w+_interrupt|ret_from_intr|do_IRQ|(?:asm_)?exc_nmi|el[01](?:[th]_64|[th]_32)?_(?:irq|fiq)"
    r"(?:_handler)?|el[01]_interrupt|gic_handle_irq",
    "exception": r"asm_exc_\w+|exc_\w+|el[01]_(?:undef|dbg|brk64|watchpt|bti|fpsimd_acc)",
    "kernel thread": r"kthread",
    "start of a thread": r"ret_from_fork\w*|schedule_tail",
    "idle": r"do_idle|cpu_startup_entry|rest_init",
}
_ENTRY: Final = re.compile("|".join(f"({pattern})" for pattern in _ENTRIES.values()))
_NAMES: Final = tuple(_ENTRIES)


def find_entry(stack: Stack) -> str:
    """Returns the innermost kernel entry in a stack.

    An interrupt during a system call counts as an interrupt. Returned values: system call names
    (``read``), ``interrupt``, ``soft interrupt``, ``page fault``, ``exception``, ``kernel thread``,
    ``start of a thread``, ``idle``, or a constant of this module.
    """
    sides = [side for side in stack.sides if side.kind is KERNEL_SIDE]
    names = [
        line.function for side in reversed(sides) for frame in reversed(side.frames)
        for line in reversed(frame.lines)
    ]  # fmt: skip
    if not any(side.frames for side in sides):
        return USER_MODE if all(side.status == STACK_OK for side in sides) else UNKNOWN_ENTRY
    entry, in_call = UNKNOWN_ENTRY, False
    for full_name in names:
        name = full_name.partition(".")[0]  # without compiler suffixes such as .isra.0
        call = _SYSTEM_CALL.fullmatch(name)
        if call and (in_call or entry == UNKNOWN_ENTRY):
            entry, in_call = _ALIASES.get(call[1], call[1]), False
        elif _GATES.fullmatch(name):
            entry, in_call = UNNAMED_CALL, True
        elif match := _ENTRY.fullmatch(name):
            entry, in_call = _NAMES[(match.lastindex or 1) - 1], False
    return entry
