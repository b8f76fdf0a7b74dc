"""Value types that every layer shares; imports nothing else of the package.

Addresses of different kinds are different types, ranges are half-open
``[start, end)``, times are integers in nanoseconds. All values here are immutable
and safe to share between threads.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Final, NamedTuple, NewType

KernelAddress = NewType("KernelAddress", int)
"""A runtime address in the kernel's half of the address space."""
UserAddress = NewType("UserAddress", int)
"""A runtime address in a process."""
Rva = NewType("Rva", int)
"""An address relative to the base of its module (``_text`` or the ``.text`` section)."""
Svma = NewType("Svma", int)
"""An address in an ELF file's own address space (what ``st_value`` holds)."""
FileOffset = NewType("FileOffset", int)
"""An offset in a file."""

BuildId = NewType("BuildId", str)
"""A GNU build id as lower-case hexadecimal text."""
FileId = NewType("FileId", str)
"""The 128-bit file id that is sent as ``process.executable.build_id.htlhash``: 32 hex digits."""

StackStatus = NewType("StackStatus", int)
"""Outcome of collecting one stack: one of the constants below, or a negative ``errno``."""
STACK_OK: Final = StackStatus(0)
STACK_TRUNCATED: Final = StackStatus(1)
"""More frames than the limit: the outermost ones are missing."""
STACK_NOT_COLLECTED: Final = StackStatus(2)
"""Not asked for (by configuration), so there is nothing to miss."""

MAX_FRAMES: Final = 127
"""Frames per side of a stack (the kernel's default ``kernel.perf_event_max_stack``)."""


class SpanLink(NamedTuple):
    """The span that was current in the sampled thread: 16 and 8 bytes, not all zero."""

    trace_id: bytes
    span_id: bytes


class RawSample(NamedTuple):
    """One interrupt, as the kernel program recorded it.

    Attributes:
        time_ns: ``CLOCK_BOOTTIME`` of the interrupt.
        cpu: logical CPU.
        tgid: process id in the initial pid namespace; 0 is the idle task.
        tid: thread id in the initial pid namespace.
        start_time_ns: ``CLOCK_BOOTTIME`` at which the process started, None if unknown.
        cgroup_id: cgroup v2 id (inode number), 0 or 1 on hosts that use cgroup v1.
        comm: thread name, at most 15 bytes, without the trailing zeros.
        kernel_stack: runtime addresses as native-endian 64-bit words, leaf first.
        user_stack: likewise, of the process.
        kernel_status: outcome of collecting ``kernel_stack``.
        user_status: outcome of collecting ``user_stack``.
        link: the span that was current in the thread, if one was published.
    """

    time_ns: int
    cpu: int
    tgid: int
    tid: int
    start_time_ns: int | None
    cgroup_id: int
    comm: bytes
    kernel_stack: bytes
    user_stack: bytes
    kernel_status: StackStatus
    user_status: StackStatus
    link: SpanLink | None


class ModuleKind(enum.Enum):
    """What a module is."""

    VMLINUX = "vmlinux"
    LOADED = "module"
    BPF = "bpf"
    OUT_OF_LINE = "ool"
    """Code pages that the kernel makes at run time: ftrace trampolines, kprobe slots."""
    USER = "user"


class RangeSource(enum.Enum):
    """Where the executable ranges of a module were taken from, best first."""

    SECTIONS = "sections"
    """/sys/module/NAME/sections: exact."""
    SYMBOLS = "symbols"
    """/proc/modules for the base and the module's text symbols for the extent."""
    KERNEL = "kernel"
    """``_text`` … ``_etext`` of the kernel itself, or a length that the kernel reported."""


class AddressRange(NamedTuple):
    """A named half-open range of runtime addresses, such as an executable section."""

    start: int
    end: int
    name: str


class BpfProgram(NamedTuple):
    """A loaded BPF program, beyond the names of its functions.

    Attributes:
        id: number of the program, not used again before billions of loads.
        type: such as ``kprobe`` or ``xdp``, empty if unknown.
        tag: hash of its instructions, 16 hexadecimal digits.
        load_time_ns: boot time at which it was loaded, 0 if unknown.
        attached_to: what it runs at (a tracepoint, a function), empty if unknown.
    """

    id: int
    type: str
    tag: str
    load_time_ns: int
    attached_to: str = ""


@dataclass(frozen=True, slots=True)
class Module:
    """Something that code belongs to: vmlinux, a loaded module, a BPF program, a user object.

    Attributes:
        name: ``vmlinux``, the module's name without path and suffix, or the BPF symbol.
        kind: what it is.
        build_id: GNU build id, None if it has none or it cannot be read.
        file_id: 128-bit id derived from the build id (see ``docs/symbols.md``).
        base: runtime address that RVAs are relative to: ``_text`` for vmlinux, the address
            of the ``.text`` section for a module, the start of the image for BPF.
        ranges: executable ranges without init sections, sorted by start.
        range_source: how ``ranges`` were found.
        generation: grows by one for each module seen, so that a reload is another module.
        program: the BPF program that the code belongs to, if it is known.
    """

    name: str
    kind: ModuleKind
    build_id: BuildId | None
    file_id: FileId
    base: int
    ranges: tuple[AddressRange, ...] = ()
    range_source: RangeSource = RangeSource.KERNEL
    generation: int = 0
    program: BpfProgram | None = None


class Unresolved(enum.Enum):
    """Why a frame has no function name; the value is what users read."""

    HIDDEN = "kernel symbols are hidden from this process"
    NO_SYMBOL = "the address lies between the symbols of its module"
    NO_SYMBOL_TABLE = "no symbol table for the module"
    UNMAPPED = "no module is known at the address"
    NOT_YET_KNOWN = "the module was just loaded and its symbols are not read yet"
    MODULE_GONE = "the module at the address was unloaded about that time, or before"
    RECORDS_LOST = "the kernel's records of what was loaded at the address were lost"
    FREED_INIT = "the code was freed when the kernel had started"
    USER_ADDRESS = "user frames are exported as raw addresses"

    __hash__ = object.__hash__  # that of Enum is Python code, which each frame would run


class FrameKind(enum.Enum):
    """Which colour a frame has in a flame graph."""

    KERNEL = "kernel"
    MODULE = "module"
    BPF = "bpf"
    USER = "user"


class Line(NamedTuple):
    """One function at an address, inlined or physical.

    Attributes:
        function: name for people.
        system_name: the linker's name, when it differs (``foo.isra.0``); else empty.
        file: source file, empty if unknown.
        line: 1-based source line, 0 if unknown.
    """

    function: str
    system_name: str = ""
    file: str = ""
    line: int = 0


class CodeSymbol(NamedTuple):
    """Kernel code outside of vmlinux and modules: a BPF function, a trampoline, a probe page.

    Attributes:
        start: runtime address.
        length: bytes, 0 if unknown.
        name: the kernel's, as in kallsyms.
        kind: ``BPF`` or ``OUT_OF_LINE``.
        since_ns: boot time at which it was loaded, 0 if unknown.
        program_id: BPF program that it is a function of, 0 if none or unknown.
    """

    start: int
    length: int
    name: str
    kind: ModuleKind
    since_ns: int = 0
    program_id: int = 0


class CodeAction(enum.Enum):
    """What has happened to code outside of vmlinux and modules."""

    ADDED = "added"
    REMOVED = "removed"
    PROGRAMS_READ = "programs_read"
    """All BPF functions there are were read; trampolines and pages were not looked at."""
    ALL_READ = "all_read"
    """All that there is was read."""
    LOST = "lost"
    """Changes were missed, and what is there is not known until it is read again."""


class CodeChange(NamedTuple):
    """One change of code outside of vmlinux and modules, or what was there when it was read.

    Attributes:
        time_ns: boot time; of a reading its beginning, of a loss the last time before it.
        action: what happened.
        symbols: which were added, removed or there.
        until_ns: of a loss, the boot time at which it was noticed.
    """

    time_ns: int
    action: CodeAction
    symbols: tuple[CodeSymbol, ...] = ()
    until_ns: int = 0


class CodeBatch(NamedTuple):
    """Changes in the order of time, and the boot time up to which there will be no others."""

    changes: Sequence[CodeChange]
    complete_until_ns: int


class CodeDetails(NamedTuple):
    """More about one function of a BPF program.

    Attributes:
        program: the program.
        lines: source lines as (offset in the function, file, line), ascending.
    """

    program: BpfProgram
    lines: tuple[tuple[int, str, int], ...] = ()


@dataclass(frozen=True, slots=True)
class Frame:
    """One entry of a stack.

    Attributes:
        module: what the code belongs to, None if unknown.
        address: RVA in ``module``, or the runtime address when ``module`` is None. Already
            adjusted: the leaf is exact, a caller is its return address minus one.
        lines: functions at the address, innermost inlined one first; empty when unresolved.
        offset: distance in bytes from the start of the physical function, 0 if unresolved.
        kind: where the code runs.
        unresolved: why ``lines`` is empty, None when it is not.
        builtin: modules that the code of ``vmlinux`` would be in, were it not built in; several
            where they share an object file, mostly none.
    """

    module: Module | None
    address: int
    lines: tuple[Line, ...]
    offset: int
    kind: FrameKind
    unresolved: Unresolved | None = None
    builtin: tuple[str, ...] = ()

    @property
    def function(self) -> str:
        """Name of the physical function, empty when unresolved."""
        return self.lines[-1].function if self.lines else ""


@dataclass(frozen=True, slots=True, eq=False)
class Stack:
    """A resolved stack, leaf first: kernel frames, then user frames.

    Compared by identity: a symbolizer returns the same object for the same stack as long as
    the symbols are the same, which makes grouping samples a dictionary look-up.

    Attributes:
        leading: frames up to ``user_addresses``.
        kernel_status: outcome of collecting the kernel side.
        user_status: outcome of collecting the user side.
        user_addresses: the rest, which are raw addresses of the process, adjusted as those of
            frames are. Few are seen twice, so that no :class:`Frame` is made of each.
    """

    leading: tuple[Frame, ...]
    kernel_status: StackStatus = STACK_OK
    user_status: StackStatus = STACK_NOT_COLLECTED
    user_addresses: Sequence[int] = ()

    @property
    def frames(self) -> tuple[Frame, ...]:
        """All frames, leaf first."""
        return self.leading + tuple(map(_user_frame, self.user_addresses))


def _user_frame(address: int) -> Frame:
    return Frame(None, address, (), 0, FrameKind.USER, Unresolved.USER_ADDRESS)


class ProcessKey(NamedTuple):
    """Identity of a process; the start time tells apart two users of one pid."""

    tgid: int
    start_time_ns: int | None


AttributeScalar = str | bool | int | float
AttributeValue = AttributeScalar | tuple[AttributeScalar, ...]
"""Values that OpenTelemetry attributes may have here."""
Attributes = Mapping[str, AttributeValue]


@dataclass(frozen=True, slots=True, eq=False)
class Resource:
    """Attributes of what produced samples (an OpenTelemetry Resource); compared by identity."""

    attributes: Attributes
    schema_url: str = ""


class ProfileKind(NamedTuple):
    """What the values of a profile mean (OTLP ``sample_type`` and ``period_type``)."""

    sample_type: str
    sample_unit: str
    period_type: str = ""
    period_unit: str = ""


ON_CPU: Final = ProfileKind("samples", "count", "cpu", "nanoseconds")
"""Periodic samples of what runs on a CPU; each counts 1."""


class WindowSample(NamedTuple):
    """Samples of one window that are equal but for their time.

    Attributes:
        stack: the resolved stack.
        tid: thread id.
        thread_name: thread name (``comm``).
        cpu: logical CPU.
        link: current span of the thread, if known.
        timestamps_unix_ns: when each was taken; never empty, in the order of arrival.
        values: value of each timestamp, in the unit of the profile's kind; empty if all are 1.
    """

    stack: Stack
    tid: int
    thread_name: str
    cpu: int
    link: SpanLink | None
    timestamps_unix_ns: Sequence[int]
    values: Sequence[int] = ()

    @property
    def weight(self) -> int:
        """Sum of the values, in the unit of the profile's kind."""
        return sum(self.values) if self.values else len(self.timestamps_unix_ns)


class ResourceSamples(NamedTuple):
    """All samples of one resource in a window; empty where the account alone is to be told."""

    resource: Resource
    samples: Sequence[WindowSample]


class LossCause(enum.Enum):
    """Why a sample that was taken did not reach a receiver (closed list)."""

    RING_FULL = "ring_full"
    """The ring buffer between kernel and user space was full."""
    QUEUE_FULL = "queue_full"
    """The sending queue was full and the oldest batch was dropped."""
    SPOOL_FULL = "spool_full"
    """The spool on disk was full and its oldest segment was dropped."""
    SPOOL_AGED = "spool_aged"
    """It waited in the spool for longer than ``max_age``."""
    SPOOL_DAMAGED = "spool_damaged"
    """It was in the spool, but cannot be read any more."""
    REJECTED = "rejected"
    """The receiver refused the data, and said that it must not be sent again."""
    RETRIES_EXHAUSTED = "retries_exhausted"
    """The receiver could not be reached for as long as the retry policy allows."""
    TOO_LARGE = "too_large"
    """One sample alone is larger than the size limit of the exporter."""
    WRITE_FAILED = "write_failed"
    """An output file could not be written, such as for want of space."""
    NOT_OFFERED = "not_offered"
    """Its window was closed while the exporter was not configured, such as before a reload."""
    SHUTDOWN = "shutdown"
    """The time for shutting down ended before the data was delivered."""
    INTERNAL = "internal"
    """A defect of the profiler itself; it is logged with its traceback."""


Losses = Mapping[LossCause, int]
"""Number of lost samples by cause; causes without losses are absent."""


class StreamTotals(NamedTuple):
    """Counts since a sampler was started, as they stood when a window was closed.

    Attributes:
        stream_id: random; one per start of a sampler.
        samples: samples in all windows so far, this one included.
        taken: samples that the kernel program took; ``samples`` and what was lost in the
            kernel, and those that wait for their window.
        lost: samples that were lost so far, by cause: in the kernel, and, once a window is
            encoded for one receiver, on the way to that.
        earlier_lost: likewise, of samples of earlier streams that waited for this receiver.
        unknown_since_unix_ns: when not 0, the run before was killed, and what it took after
            this time has left no trace.
        missed: samples that the kernel did not take, such as on a CPU that was inside another
            BPF program; not in ``taken``.
    """

    stream_id: str
    samples: int
    taken: int
    lost: Losses
    earlier_lost: Losses = MappingProxyType({})
    unknown_since_unix_ns: int = 0
    missed: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class Window:
    """One reporting interval of one kind of profile.

    Every timestamp of its samples lies in ``[start_unix_ns, end_unix_ns)``. A change of the
    sampling rate closes a window, so that ``period_ns`` holds for all of its samples.

    Attributes:
        kind: what is counted.
        period_ns: distance between two samples of a CPU; 0 when the kind has no period.
        start_unix_ns: start of the interval.
        end_unix_ns: end of the interval, exclusive.
        resources: the samples by resource; empty when nothing was sampled.
        taken: samples that the kernel program took in this window.
        lost: how many of those were lost before they reached the window, by cause.
        totals: the account of the whole stream, if it is known.
    """

    kind: ProfileKind
    period_ns: int
    start_unix_ns: int
    end_unix_ns: int
    resources: Sequence[ResourceSamples]
    taken: int = 0
    lost: Losses = field(default_factory=dict)
    totals: StreamTotals | None = None

    @property
    def sample_count(self) -> int:
        """Number of samples (timestamps) in the window."""
        return sum(
            len(sample.timestamps_unix_ns) for group in self.resources for sample in group.samples
        )

    @property
    def weight(self) -> int:
        """Sum of the values of all samples, in the unit of ``kind``."""
        return sum(sample.weight for group in self.resources for sample in group.samples)


class Form(enum.Enum):
    """Serialized form of a batch."""

    PROTOBUF = "protobuf"
    JSON = "json"


class AttributeForm(enum.Enum):
    """How keys and string values of resource and scope attributes are written."""

    INLINE = "inline"
    """In place. Every receiver reads it."""
    REFERENCES = "references"
    """As indices into the string table: smaller, but most receivers find empty keys."""


class Encoding(NamedTuple):
    """How windows are encoded for a receiver.

    Attributes:
        form: protobuf, or JSON by OTLP's mapping.
        max_bytes: upper limit of a request before compression; None for no limit.
        attributes: how resource and scope attributes are written.
    """

    form: Form = Form.PROTOBUF
    max_bytes: int | None = None
    attributes: AttributeForm = AttributeForm.INLINE


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """One encoded ``ExportProfilesServiceRequest``, self-contained.

    Attributes:
        payload: the encoded request.
        form: how ``payload`` is encoded.
        profile_samples: number of samples of each profile in it, in order.
        start_unix_ns: start of the window it belongs to.
        end_unix_ns: end of that window, exclusive.
    """

    payload: bytes
    form: Form
    profile_samples: tuple[int, ...]
    start_unix_ns: int
    end_unix_ns: int

    @property
    def sample_count(self) -> int:
        """Number of samples in the batch."""
        return sum(self.profile_samples)


class Level(enum.Enum):
    """How bad a finding is."""

    OK = "ok"
    INFO = "info"
    WARN = "warn"
    FAIL = "fail"


@dataclass(frozen=True, slots=True)
class Finding:
    """One check of the host: what was looked at, what is there, what is needed, how to fix it."""

    check: str
    level: Level
    observed: str
    required: str = ""
    fix: str = ""
