"""Attribute names on the wire: OpenTelemetry semantic conventions unless marked as ours."""

from __future__ import annotations

from typing import Final

SCHEMA_URL: Final = "https://opentelemetry.io/schemas/1.44.0"
"""Version of the semantic conventions that these names follow."""

FRAME_TYPE: Final = "profile.frame.type"
FRAME_TYPES: Final = frozenset({
    "beam", "cpython", "dotnet", "go", "jvm", "kernel", "luajit",
    "native", "perl", "php", "ruby", "rust", "v8js",
})  # fmt: skip
"""Well-known values of ``profile.frame.type``."""

THREAD_NAME: Final = "thread.name"
THREAD_ID: Final = "thread.id"
CPU: Final = "cpu.logical_number"

BUILD_ID_GNU: Final = "process.executable.build_id.gnu"
BUILD_ID_GO: Final = "process.executable.build_id.go"
BUILD_ID_HTLHASH: Final = "process.executable.build_id.htlhash"

UNIT: Final = "systemd.unit.name"
"""As the Collector's systemd receiver: the unit of the system's systemd."""
USER_UNIT: Final = "otel_kprofiler.systemd.user_unit.name"
"""Ours: the unit of a user's systemd."""
KERNEL_THREAD: Final = "otel_kprofiler.kernel_thread"
"""Ours, on Resources of kernel threads: what threads of the same purpose have in common, such as
``kworker`` of ``kworker/0:1``."""
PROGRAM: Final = "otel_kprofiler.program"
"""On Resources of interpreters: the script, module or class that they were started to run."""
ENDED_PROCESSES: Final = "otel_kprofiler.ended_processes"
"""Ours, on the Resource of all processes that waited, and ended before they had a sample."""

MODULE_KIND: Final = "otel_kprofiler.module.kind"
"""Ours, on mappings of kernel code that no file backs: ``bpf`` or ``ool`` (out-of-line pages)."""
MODULE_BUILTIN: Final = "otel_kprofiler.module.builtin"
"""Ours, on locations in vmlinux: the module whose code is built in; an array if several share
it."""
UNRESOLVED: Final = "otel_kprofiler.unresolved"
"""Ours, on locations without a name, or with one that is made up: the reason, as the lower-case
name of an ``Unresolved``."""
FUNCTION_START: Final = "otel_kprofiler.function.start"
"""Ours, on locations whose function has bounds, but no name: the address at which it starts, an
integer."""
FOUND_BY: Final = "otel_kprofiler.frame.found_by"
"""Ours, on locations that were found in a way that is not proof: ``frame_pointer`` or ``guess``."""
LOCAL_ROOT: Final = "otel_kprofiler.local_root_span.name"
"""Ours, on samples with a link: method and route, else name, of the topmost span of the process in
this trace."""
KERNEL_ENTRY: Final = "otel_kprofiler.kernel.entry"
"""Ours, on samples of services that were taken in the kernel: the system call (``read``),
``interrupt``, ``page fault`` or other way in."""
STACK_STATUS: Final = "otel_kprofiler.{}_stack.status"
"""Ours, on samples with an incomplete side, named by it: ``truncated`` or the name of an errno."""
BPF_PROGRAM: Final = tuple(
    f"otel_kprofiler.bpf.program.{name}"
    for name in ("id", "type", "tag", "load_time_boot_ns", "attached_to")
)
"""Ours, on mappings of BPF programs, where known: the fields of ``BpfProgram``."""

DEVELOPMENT_VERSION_HEADER: Final = "otlp-profiles-development-version"
"""Request metadata with the version of the profiles schema, over gRPC and HTTP.

OTLP specification, "Profiles development version": a positive decimal; absent means 1. Receivers
refuse versions that they do not know, before they decode.
"""
DEVELOPMENT_VERSION: Final = "1"
"""The version that this package encodes and decodes, of ``v1development`` before its first
incompatible change."""
WINDOW_PREFIX: Final = "otel_kprofiler.window."
"""Prefix of the following attributes that describe one window."""
WINDOW_SAMPLES: Final = "otel_kprofiler.window.samples"
"""Ours, on the first profile of a request: samples of the window, in all its requests."""
WINDOW_TAKEN: Final = "otel_kprofiler.window.taken"
"""Attribute of a profile: samples that the eBPF program took since the previous window."""
WINDOW_LOST: Final = "otel_kprofiler.window.lost."
"""Attribute of a profile, followed by a cause: samples lost before they reached the window."""
STREAM_PREFIX: Final = "otel_kprofiler.stream."
"""Prefix of the attributes with counts of a stream."""
STREAM_ID: Final = "otel_kprofiler.stream.id"
"""Attribute of a profile: one run of the sampler, whose counts start at 0 and never decrease."""
STREAM_SAMPLES: Final = "otel_kprofiler.stream.samples"
"""Attribute of a profile: samples of all windows of the stream, including this one."""
STREAM_TAKEN: Final = "otel_kprofiler.stream.taken"
"""Attribute of a profile: samples that the eBPF program took since the stream began."""
STREAM_LOST: Final = "otel_kprofiler.stream.lost."
"""Attribute of a profile, followed by a cause: samples that this receiver will never get."""
STREAM_MISSED: Final = "otel_kprofiler.stream.missed"
"""Attribute of a profile: timer ticks without a sample on CPUs that were not idle, if any."""
EARLIER_PREFIX: Final = "otel_kprofiler.earlier."
"""Prefix of the attributes with counts of earlier streams."""
EARLIER_SAMPLES: Final = "otel_kprofiler.earlier.samples"
"""Attribute of a profile: samples of all earlier streams that were in the spool."""
EARLIER_LOST: Final = "otel_kprofiler.earlier.lost."
"""Attribute of a profile, followed by a cause: samples of these that were lost so far."""
STREAM_UNKNOWN_SINCE: Final = "otel_kprofiler.stream.unknown_since_unix_ns"
"""Attribute of a profile: the previous run was killed; what it took after this time is unknown."""

WAIT_STATE: Final = "otel_kprofiler.wait.state"
"""Ours, on samples of waits: state of the thread, as the lower-case name of a ``WaitState``."""
WAIT_CAUSE: Final = "otel_kprofiler.wait.cause"
"""Attribute of a wait: its cause, as the value of a ``WaitCause``."""
WAIT_IS_ENDED: Final = "otel_kprofiler.wait.is_ended"
"""Attribute of a wait: false if it went on when the window ended; absent on others."""
WAKER_PID: Final = "otel_kprofiler.wait.waker.process.pid"
"""Attribute of a wait: process of the thread that ended it, if known; 0 for an idle CPU's
interrupt."""
WAKER_TID: Final = "otel_kprofiler.wait.waker.thread.id"
WAKER_NAME: Final = "otel_kprofiler.wait.waker.thread.name"

WAIT_TOTAL: Final = "otel_kprofiler.wait.total_ns."
"""Ours, on each profile of waits, followed by a state: nanoseconds that the threads of the resource
were off the CPU in this window, without sampling error; absent if 0."""
WAIT_SWITCHES: Final = "otel_kprofiler.wait.switches"
"""Attribute of a profile: waits of the resource that ended in this window."""
WAIT_BELOW: Final = "otel_kprofiler.wait.below_ns"
"""Attribute of a profile: the part of the totals in waits too short to be sampled, if any."""
WAIT_THRESHOLD: Final = "otel_kprofiler.wait.threshold_ns"
"""Attribute of the first profile of waits of a request: duration from which each wait is sampled
when the window ends; shorter ones by chance, in proportion."""

SAMPLE_ATTRIBUTES: Final = frozenset({THREAD_NAME, THREAD_ID, CPU, LOCAL_ROOT})
"""Attributes of samples with a meaning of their own; others are labels, unless they are ours."""

INTEGER_ATTRIBUTES: Final = frozenset(
    {"process.pid", "process.parent_pid", "process.user.id", "process.vpid", THREAD_ID, CPU}
)
"""Attributes whose value the conventions define as an integer."""

TYPED_INTEGERS: Final = INTEGER_ATTRIBUTES | {WAKER_PID, WAKER_TID}
"""Attributes of resources and samples that are integers, for stores that keep texts."""
BOOLEAN_ATTRIBUTES: Final = frozenset({WAIT_IS_ENDED})
"""Attributes of samples that are true or false."""
