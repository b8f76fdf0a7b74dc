"""Windows for reports: two processes, both sides of a stack, inlines and gaps."""

import pytest

from otel_kprofiler.model import (
    ON_CPU,
    STACK_OK,
    STACK_TRUNCATED,
    AddressRange,
    BuildId,
    FileId,
    Frame,
    FrameKind,
    Line,
    Module,
    ModuleKind,
    ProfileKind,
    Resource,
    ResourceSamples,
    Stack,
    Unresolved,
    Window,
    WindowSample,
)

BASE = 0xFFFFFFFF81000000
VMLINUX = Module(
    "vmlinux", ModuleKind.VMLINUX, BuildId("ab" * 20), FileId("cd" * 16), BASE,
    (AddressRange(BASE, BASE + 0x1000000, "text"),),
)  # fmt: skip
EXT4 = Module("ext4", ModuleKind.LOADED, None, FileId("ef" * 16), 0xFFFFFFFFC0000000)


def kernel(name, address, module=VMLINUX, kind=FrameKind.KERNEL):
    return Frame(module, address, (Line(name),), 4, kind)


READ = kernel("vfs_read", 0x100)
ENTRY = kernel("do_syscall_64", 0x200)
EXT4_READ = Frame(
    EXT4, 0x10, (Line("inlined", file="fs/x.h", line=3), Line("ext4_read", file="fs/f.c", line=9)),
    1, FrameKind.MODULE,
)  # fmt: skip
GAP = Frame(VMLINUX, 0x300, (), 0, FrameKind.KERNEL, Unresolved.NO_SYMBOL)
BPF = kernel("bpf_prog_1_x", 0x0, None, FrameKind.BPF)
USER = Frame(None, 0x401000, (), 0, FrameKind.USER, Unresolved.USER_ADDRESS)


@pytest.fixture
def windows():
    """Ten samples: 6 + 1 of ``dd`` (pid 7) and 3 of a process that nobody could look up."""
    deep = Stack((EXT4_READ, READ, ENTRY, USER), STACK_OK, STACK_OK)
    cut = Stack((GAP, BPF, READ, READ), STACK_TRUNCATED)
    missing = Stack((), -14)
    dd = Resource({"process.pid": 7, "process.executable.name": "dd"})
    gone = Resource({"process.pid": 8})
    return [
        Window(ON_CPU, 1000, 5_000, 15_000, [
            ResourceSamples(dd, [
                WindowSample(deep, 7, "dd", 0, None, [5_000, 9_000, 7_000]),
                WindowSample(deep, 71, "helper", 1, None, [6_000]),
            ]),
            ResourceSamples(gone, [WindowSample(cut, 8, "a;b\n", 1, None, [5_500, 8_000, 9_500])]),
        ], taken=7),
        Window(ON_CPU, 1000, 15_000, 25_000, [
            ResourceSamples(dd, [
                WindowSample(deep, 7, "dd", 0, None, [15_000, 16_000]),
                WindowSample(missing, 7, "dd", 0, None, [17_000]),
            ]),
        ], taken=3),
    ]  # fmt: skip


@pytest.fixture
def off_cpu():
    """Three waits of ``dd`` on one CPU, each with the time that it took."""
    read, entry = Stack((READ, ENTRY)), Stack((ENTRY,))
    return [
        Window(ProfileKind("off_cpu", "nanoseconds"), 0, 5_000, 15_000, [
            ResourceSamples(Resource({"process.pid": 7, "process.executable.name": "dd"}), [
                WindowSample(read, 7, "dd", 0, None, [5_000, 7_000], [70, 20]),
                WindowSample(entry, 7, "dd", 0, None, [6_000], [10]),
            ]),
        ]),
    ]  # fmt: skip


@pytest.fixture
def hostile():
    """A process, a module and a function whose names are made to do harm."""
    module = Module("m\x1b]0;x\x07\udcfe", ModuleKind.USER, None, FileId("12" * 16), 0)
    lines = (Line("f\ud800\x1b[2J\u202e\r\n\x9b", file="/tmp/\udcff.c", line=1),)
    stack = Stack((Frame(module, 0x10, lines, 1, FrameKind.USER),))
    resource = Resource({"process.pid": 7, "process.executable.name": "p\udcff\x1b[2J"})
    sample = WindowSample(stack, 7, "t\udc80\x1b[2J\u202e", 0, None, [5_000])
    return [Window(ON_CPU, 1000, 5_000, 15_000, [ResourceSamples(resource, [sample])], taken=1)]
