"""Windows for reports: two processes, kernel and user frames, inlined functions and gaps."""

import pytest

from otel_kprofiler.model import (
    KERNEL_SIDE,
    STACK_TRUNCATED,
    USER_SIDE,
    AddressRange,
    BuildId,
    FileId,
    Frame,
    Line,
    Module,
    ModuleKind,
    ProfileKind,
    Stack,
    Unresolved,
    WindowSample,
)
from tests.windows import make_window

BASE = 0xFFFFFFFF81000000
VMLINUX = Module(
    "vmlinux", ModuleKind.VMLINUX, BuildId("ab" * 20), FileId("cd" * 16), BASE,
    (AddressRange(BASE, BASE + 0x1000000, "text"),),
)  # fmt: skip
EXT4 = Module("ext4", ModuleKind.LOADED, None, FileId("ef" * 16), 0xFFFFFFFFC0000000)

PROGRAM = Module("bpf_prog_1_x", ModuleKind.BPF, None, FileId("aa" * 16), 0xFFFFFFFFC1000000)


def kernel(name, address, module=VMLINUX):
    return Frame(module, address, (Line(name),), 4, KERNEL_SIDE)


READ = kernel("vfs_read", 0x100)
ENTRY = kernel("do_syscall_64", 0x200)
EXT4_READ = Frame(
    EXT4, 0x10, (Line("inlined", file="fs/x.h", line=3), Line("ext4_read", file="fs/f.c", line=9)),
    1, KERNEL_SIDE,
)  # fmt: skip
GAP = Frame(VMLINUX, 0x300, (), 0, KERNEL_SIDE, Unresolved.NO_SYMBOL)
BPF = kernel("bpf_prog_1_x", 0x0, PROGRAM)
USER = Frame(None, 0x401000, (), 0, USER_SIDE, Unresolved.USER_ADDRESS)

DD = {"process.pid": 7, "process.executable.name": "dd"}


@pytest.fixture
def windows():
    """Returns ten samples: 7 from ``dd`` (one without a stack) and 3 from an unnamed process."""
    deep = Stack.from_frames((EXT4_READ, READ, ENTRY, USER))
    cut = Stack.from_frames((GAP, BPF, READ, READ), {KERNEL_SIDE: STACK_TRUNCATED})
    missing = Stack.from_frames((), {KERNEL_SIDE: -14})
    first = [
        WindowSample(deep, 7, "dd", 0, None, [5_000, 9_000, 7_000]),
        WindowSample(deep, 71, "helper", 1, None, [6_000]),
    ]
    gone = {"process.pid": 8}, [WindowSample(cut, 8, "a;b\n", 1, None, [5_500, 8_000, 9_500])]
    second = [
        WindowSample(deep, 7, "dd", 0, None, [15_000, 16_000]),
        WindowSample(missing, 7, "dd", 0, None, [17_000]),
    ]
    return [
        make_window(5_000, 15_000, (DD, first), gone, period_ns=1000, taken=7),
        make_window(15_000, 25_000, (DD, second), period_ns=1000, taken=3),
    ]


@pytest.fixture
def off_cpu():
    """Returns three waits by ``dd`` on one CPU, each with its duration."""
    read, entry = Stack.from_frames((READ, ENTRY)), Stack.from_frames((ENTRY,))
    kind = ProfileKind("off_cpu", "off_cpu", "nanoseconds")
    waits = [
        WindowSample(read, 7, "dd", 0, None, [5_000, 7_000], [70, 20]),
        WindowSample(entry, 7, "dd", 0, None, [6_000], [10]),
    ]
    return [make_window(5_000, 15_000, (DD, waits), kind=kind, period_ns=0)]


@pytest.fixture
def hostile():
    module = Module("m\x1b]0;x\x07\udcfe", ModuleKind.USER, None, FileId("12" * 16), 0)
    lines = (Line("f\ud800\x1b[2J\u202e\r\n\x9b", file="/tmp/\udcff.c", line=1),)
    stack = Stack.from_frames((Frame(module, 0x10, lines, 1, USER_SIDE),))
    attributes = {"process.pid": 7, "process.executable.name": "p\udcff\x1b[2J"}
    sample = WindowSample(stack, 7, "t\udc80\x1b[2J\u202e", 0, None, [5_000])
    return [make_window(5_000, 15_000, (attributes, [sample]), period_ns=1000, taken=1)]
