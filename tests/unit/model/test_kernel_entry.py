"""A sample's kernel entry is the system call, interrupt or exception in which it was taken."""

import pytest

from otel_kprofiler.model import (
    KERNEL_SIDE,
    STACK_TRUNCATED,
    USER_SIDE,
    Frame,
    Line,
    Stack,
    find_entry,
)


def frames(side, *names):
    """Returns frames with the given names, which are listed outermost first."""
    return tuple(Frame(None, 1, (Line(name),), 0, side) for name in reversed(names))


SYSCALL = ("entry_SYSCALL_64_after_hwframe", "do_syscall_64")
CASES = {
    "x86 wrapper": ("read", *SYSCALL, "__x64_sys_read", "ksys_read", "vfs_read"),
    "dispatch function": ("openat", *SYSCALL, "x64_sys_call", "__x64_sys_openat", "do_sys_openat2"),
    "wrapper inlined": ("read", *SYSCALL, "ksys_read", "vfs_read"),
    "suffix of a compiler": ("clone", *SYSCALL, "__do_sys_clone.constprop.0"),
    "alias": ("mmap", *SYSCALL, "ksys_mmap_pgoff"),
    "compat": ("ioctl", "entry_INT80_compat", "do_int80_syscall_32", "__ia32_compat_sys_ioctl"),
    "arm64": (
        "write", "el0t_64_sync", "el0t_64_sync_handler", "el0_svc", "do_el0_svc",
        "el0_svc_common.constprop.0", "invoke_syscall", "__arm64_sys_write", "ksys_write",
    ),
    "before the call": ("system call without a name", *SYSCALL, "syscall_exit_to_user_mode"),
    "interrupt of a call": (
        "interrupt", *SYSCALL, "__x64_sys_read", "asm_sysvec_apic_timer_interrupt",
        "sysvec_apic_timer_interrupt", "__irq_exit_rcu",
    ),
    "softirq after an interrupt": (
        "soft interrupt", "asm_common_interrupt", "common_interrupt", "__irq_exit_rcu",
        "handle_softirqs", "net_rx_action",
    ),
    "fault of a call": (
        "page fault", *SYSCALL, "__x64_sys_read", "asm_exc_page_fault", "exc_page_fault",
    ),
    "other exception": ("exception", "asm_exc_int3", "exc_int3"),
    "arm64 interrupt": ("interrupt", "el1h_64_irq", "el1h_64_irq_handler", "el1_interrupt"),
    "arm64 fault": ("page fault", "el0t_64_sync", "el0t_64_sync_handler", "el0_da"),
    "kernel thread": ("kernel thread", "ret_from_fork_asm", "ret_from_fork", "kthread", "kswapd"),
    "new thread": ("start of a thread", "ret_from_fork_asm", "ret_from_fork", "schedule_tail"),
    "idle": ("idle", "common_startup_64", "start_secondary", "cpu_startup_entry", "do_idle"),
    "function like a call": ("kernel thread", "ret_from_fork", "kthread", "sys_fillrect"),
    "cut": ("unknown entry", "vfs_read", "ext4_file_read_iter"),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_a_stack_is_classified_by_its_innermost_kernel_entry(case):
    expected, *names = CASES[case]
    user = frames(USER_SIDE, "main", "read")
    assert find_entry(Stack.from_frames(frames(KERNEL_SIDE, *names))) == expected
    assert find_entry(Stack.from_frames(frames(KERNEL_SIDE, *names) + user)) == expected


def test_user_mode_is_distinguished_from_failed_stack_captures():
    user = frames(USER_SIDE, "__x64_sys_read")
    assert find_entry(Stack.from_frames(user)) == "user mode"
    assert find_entry(Stack.from_frames(user, {USER_SIDE: STACK_TRUNCATED})) == "user mode"
    assert find_entry(Stack.from_frames(user, {KERNEL_SIDE: -14})) == "unknown entry"
