"""A window that uses all features of the model."""

from __future__ import annotations

import errno

import pytest
from opentelemetry.proto.collector.profiles.v1development.profiles_service_pb2 import (
    ExportProfilesServiceRequest,
)

from otel_kprofiler.model import (
    KERNEL_SIDE,
    ON_CPU,
    STACK_TRUNCATED,
    USER_SIDE,
    AddressRange,
    BuildId,
    FileId,
    Frame,
    Line,
    Module,
    ModuleKind,
    Profile,
    Resource,
    ResourceSamples,
    SpanLink,
    Stack,
    StackStatus,
    Unresolved,
    Window,
    WindowSample,
)
from otel_kprofiler.otlp import check_payload, encode_window

START = 1_750_000_000_000_000_000
TEXT = 0xFFFFFFFF81000000


def module(name, kind, number, size=0x10000, build_id="ab" * 20):
    base = TEXT + number * 0x1000000
    return Module(
        name=name,
        kind=kind,
        build_id=BuildId(build_id) if build_id else None,
        file_id=FileId(f"{number:032x}"),
        base=base,
        ranges=(AddressRange(base, base + size, ".text"),) if size else (),
    )


VMLINUX = module("vmlinux", ModuleKind.VMLINUX, 1)
EXT4 = module("ext4", ModuleKind.LOADED, 2, build_id="cd" * 20)
BPF = module("bpf_prog_6deef7357e7b4530_probe", ModuleKind.BPF, 3, build_id=None)
OOL = module("[kprobe_insn_page]", ModuleKind.OUT_OF_LINE, 4, size=0, build_id=None)


def frame(owner, address, *names, side=KERNEL_SIDE, unresolved=None):
    lines = tuple(name if isinstance(name, Line) else Line(name) for name in names)
    return Frame(owner, address, lines, 0, side, unresolved)


SYSCALL = frame(VMLINUX, 0x40, "entry_SYSCALL_64_after_hwframe")
READ = frame(VMLINUX, 0x900, "vfs_read")
INLINED = frame(
    EXT4,
    0x1234,
    Line("ext4_inlined", file="fs/ext4/inode.c", line=12),
    Line("ext4_file_read", "ext4_file_read.isra.0", "fs/ext4/file.c", 345),
)
EXT4_READ = frame(EXT4, 0x88, "vfs_read")
PROGRAM = frame(BPF, 0x20, "bpf_prog_6deef7357e7b4530_probe")
SLOT = frame(OOL, 0x30, unresolved=Unresolved.NO_SYMBOL)
LOST = frame(None, 0xFFFFFFFFC0001234, unresolved=Unresolved.MODULE_GONE)
USER = frame(None, 0x7F1234567890, side=USER_SIDE, unresolved=Unresolved.USER_ADDRESS)
MAIN = frame(None, 0x55AA00001230, side=USER_SIDE, unresolved=Unresolved.USER_ADDRESS)

READING = Stack.from_frames((INLINED, READ, SYSCALL, USER, MAIN))
PROBING = Stack.from_frames(
    (SLOT, PROGRAM, EXT4_READ, READ, SYSCALL), {USER_SIDE: StackStatus(-errno.EFAULT)}
)
BROKEN = Stack.from_frames((LOST, SYSCALL), {KERNEL_SIDE: STACK_TRUNCATED})
NOTHING = Stack.from_frames((), {KERNEL_SIDE: StackStatus(-errno.ENOMEM)})
IN_USER = Stack.from_frames((USER, MAIN))

LABELS = (("region", "1"), ("tenant.id", "\x1bacme"))
LINK = SpanLink(bytes(range(16)), bytes(range(8)), "GET /cats/{id}")


def resource(pid, **more):
    return Resource(
        {
            "process.pid": pid,
            "process.creation.time": f"2025-06-15T15:06:{pid % 60:02}.123Z",
            "process.executable.name": "cat",
            "host.name": "box",
            "service.instances": ("a", "b"),
            "ratio": 0.5,
            "sampled": True,
            "empty": "",
            **more,
        },
        "https://opentelemetry.io/schemas/1.44.0",
    )


def times(*offsets):
    return [START + offset for offset in offsets]


@pytest.fixture
def window():
    first = [
        WindowSample(READING, 17, "cat", 0, None, times(5, 7, 9)),
        WindowSample(READING, 18, "cat/worker", 1, LINK, times(3), (), LABELS),
        WindowSample(PROBING, 17, "cat", 1, None, times(4, 4)),
        WindowSample(IN_USER, 17, "cat", 0, None, times(11)),
    ]
    second = [
        WindowSample(BROKEN, 42, "kworker/0:1", 0, None, times(0, 999)),
        WindowSample(NOTHING, 42, "kworker/0:1", 0, None, times(1)),
        WindowSample(READING, 42, "kworker/0:1", 0, None, times(2)),
    ]
    groups = [ResourceSamples(resource(17), first), ResourceSamples(resource(42), second)]
    return Window(START, START + 1000, [Profile(ON_CPU, 52_631_578, groups)])


class Mutable:
    """A request for tests to change, with shortcuts to parts of its message."""

    def __init__(self, window):
        payload = encode_window(window).batches[0].payload
        self.message = ExportProfilesServiceRequest.FromString(payload)
        self.dictionary = self.message.dictionary
        self.resource_profiles = self.message.resource_profiles

    def broken_rules(self):
        return {item.rule for item in check_payload(self.message.SerializeToString())}

    def scope(self, index=0):
        return self.resource_profiles[index].scope_profiles[0]

    def profile(self, index=0):
        return self.scope(index).profiles[0]

    def string(self, text):
        """Returns the index of a string, adding the string if it is missing."""
        table = self.dictionary.string_table
        if text not in table:
            table.append(text)
        return list(table).index(text)

    def attribute(self, key, **value):
        entry = self.dictionary.attribute_table.add(key_strindex=self.string(key))
        for field, content in value.items():
            setattr(entry.value, field, content)
        return len(self.dictionary.attribute_table) - 1

    def attribute_named(self, key):
        wanted = self.string(key)
        return next(e for e in self.dictionary.attribute_table if e.key_strindex == wanted)

    def set_text(self, key, text):
        self.attribute_named(key).value.string_value = text

    def label(self, key, **value):
        """Adds an attribute to the first sample."""
        self.profile().samples[0].attribute_indices.append(self.attribute(key, **value))

    def rename(self, string, new):
        self.dictionary.string_table[self.string(string)] = new

    def sample_stack(self, stack_index):
        samples = self.profile().samples
        samples.add(
            stack_index=stack_index,
            attribute_indices=samples[0].attribute_indices,
            timestamps_unix_nano=samples[0].timestamps_unix_nano,
        )

    def use_location(self, **fields):
        location = self.dictionary.location_table.add(**fields)
        self.dictionary.stack_table.add(location_indices=[len(self.dictionary.location_table) - 1])
        self.sample_stack(len(self.dictionary.stack_table) - 1)
        return location

    def location_where(self, wanted):
        return next(e for e in list(self.dictionary.location_table)[1:] if wanted(e))

    def kernel_location(self):
        return self.location_where(lambda e: e.lines and e.mapping_index)


@pytest.fixture
def mutable(window):
    return Mutable(window)
