"""OTLP attribute names, from the semantic conventions or of the form ``otel_kprofiler.*``."""

from collections.abc import Callable
from typing import Final

SCHEMA_URL: Final = "https://opentelemetry.io/schemas/1.44.0"
"""Version of the semantic conventions."""

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
BUILD_ID_HTLHASH: Final = "process.executable.build_id.htlhash"

UNIT: Final = "systemd.unit.name"
"""On Resources: the systemd unit, named as in the Collector's systemd receiver."""
USER_UNIT: Final = "otel_kprofiler.systemd.user_unit.name"
"""On Resources: the unit of the user's service manager (``systemd --user``)."""
KERNEL_THREAD: Final = "otel_kprofiler.kernel_thread"
"""On Resources for kernel threads: their common name, such as ``kworker`` for ``kworker/0:1``."""
PROGRAM: Final = "otel_kprofiler.program"
"""Attribute on an interpreter's Resource: the script, module or class being run."""
ENDED_PROCESSES: Final = "otel_kprofiler.ended_processes"
"""True on the shared Resource for waits of processes that exited before they were sampled."""

MODULE_KIND: Final = "otel_kprofiler.module.kind"
"""On mappings of kernel code without a file: ``bpf`` or ``ool`` (out-of-line pages)."""
MODULE_BUILTIN: Final = "otel_kprofiler.module.builtin"
"""On locations in vmlinux: the built-in module; an array if several modules share the code."""
UNRESOLVED: Final = "otel_kprofiler.unresolved"
"""On unnamed locations: why the name is missing, as a lower-case ``Unresolved`` member."""
FUNCTION_START: Final = "otel_kprofiler.function.start"
"""On locations in unnamed functions with known bounds: the start address (an integer)."""
FOUND_BY: Final = "otel_kprofiler.frame.found_by"
"""On locations not found from unwind tables alone: the method used, as in ``Frame.found_by``."""
LOCAL_ROOT: Final = "otel_kprofiler.local_root_span.name"
"""On samples with a span link: the topmost span's method and route, or otherwise its name."""
KERNEL_ENTRY: Final = "otel_kprofiler.kernel.entry"
"""On a self-profiling service's kernel samples: the system call, ``interrupt`` or other entry."""
STACK_STATUS: Final = "otel_kprofiler.{}_stack.status"
"""On samples: why a stack is incomplete. ``{}`` is the stack's type, such as ``user``."""
BPF_PROGRAM: Final = tuple(
    f"otel_kprofiler.bpf.program.{name}"
    for name in ("id", "type", "tag", "load_time_boot_ns", "attached_to")
)
"""Attributes on a BPF program's mapping: the known fields of ``BpfProgram``."""

DEVELOPMENT_VERSION_HEADER: Final = "otlp-profiles-development-version"
"""Request header with the version of the profiles schema, in decimal; a missing header means 1.
Receivers reject unknown versions without decoding the request (OTLP specification, "Profiles
development version")."""
DEVELOPMENT_VERSION: Final = "1"
"""Supported schema version: 1 until the first incompatible change to ``v1development``."""
WINDOW_PREFIX: Final = "otel_kprofiler.window."
WINDOW_SAMPLES: Final = "otel_kprofiler.window.samples"
"""On the first profile of each kind in a request: number of samples of that kind in the window."""
WINDOW_TAKEN: Final = "otel_kprofiler.window.taken"
"""Attribute on a profile: number of samples that the BPF program took in this window."""
WINDOW_LOST: Final = "otel_kprofiler.window.lost."
"""Prefix of profile attributes whose names end in a loss cause. The value is the number of samples
that did not reach the window."""
STREAM_PREFIX: Final = "otel_kprofiler.stream."
STREAM_ID: Final = "otel_kprofiler.stream.id"
"""Attribute on a profile: id of a sampler run, whose counts start at 0 and never decrease."""
STREAM_SAMPLES: Final = "otel_kprofiler.stream.samples"
"""Attribute on a profile: number of the stream's samples up to and including this window."""
STREAM_TAKEN: Final = "otel_kprofiler.stream.taken"
"""Attribute on a profile: number of samples taken by the BPF program since the stream started."""
STREAM_LOST: Final = "otel_kprofiler.stream.lost."
"""Prefix of profile attributes whose names end in a loss cause. The value is the number of samples
that will not reach this receiver."""
STREAM_MISSED: Final = "otel_kprofiler.stream.missed"
"""Attribute on a profile: number of timer ticks without a sample on busy CPUs; absent if 0."""
EARLIER_PREFIX: Final = "otel_kprofiler.earlier."
EARLIER_SAMPLES: Final = "otel_kprofiler.earlier.samples"
"""Attribute on a profile: number of samples from earlier streams that were in the spool."""
EARLIER_LOST: Final = "otel_kprofiler.earlier.lost."
"""Prefix of the names of profile attributes; the loss cause follows. The value is the number of
lost samples from earlier streams."""
STREAM_UNKNOWN_SINCE: Final = "otel_kprofiler.stream.unknown_since_unix_ns"
"""Attribute on a profile: Unix time since which a killed run's number of samples is unknown."""

WAIT_STATE: Final = "otel_kprofiler.wait.state"
"""On wait samples: state of the thread, as the lower-case name of a ``WaitState``."""
WAIT_CAUSE: Final = "otel_kprofiler.wait.cause"
"""Attribute on a wait: its cause, as the ``label`` of a ``WaitCause``."""
WAIT_IS_ENDED: Final = "otel_kprofiler.wait.is_ended"
"""Attribute on a wait: false if it was in progress at the end of the window; otherwise absent."""
WAKER_PID: Final = "otel_kprofiler.wait.waker.process.pid"
"""Attribute on a wait: the waker's process id, if known; 0 for an interrupt on an idle CPU."""
WAKER_TID: Final = "otel_kprofiler.wait.waker.thread.id"
WAKER_NAME: Final = "otel_kprofiler.wait.waker.thread.name"

WAIT_TOTAL: Final = "otel_kprofiler.wait.total_ns."
"""Prefix of wait-profile attribute names; the wait state follows. The value is the exact off-CPU
time, in nanoseconds, that the Resource's threads spent in the named state during the window. Absent
if the time is 0."""
WAIT_SWITCHES: Final = "otel_kprofiler.wait.switches"
"""Attribute on a profile: number of the Resource's waits that completed in this window."""
WAIT_BELOW: Final = "otel_kprofiler.wait.below_ns"
"""Attribute on a profile: off-CPU time spent in waits too short to sample; absent if 0."""
WAIT_THRESHOLD: Final = "otel_kprofiler.wait.threshold_ns"
"""Attribute on a request's first wait profile: minimum duration of always-sampled waits, as of the
window's end. Shorter waits are sampled with a probability proportional to their duration."""

LOCK_WAITS: Final = "otel_kprofiler.lock.waits."
"""Attribute prefix, followed by a lock type from ``LOCK_TYPES`` or ``other``. Only a request's
first lock wait profile has these attributes. The value is the exact number of waits that completed
in the window. With ``uncounted`` instead of a lock type, the value is the number of waits whose
start or end was not observed."""
LOCK_TOTAL: Final = "otel_kprofiler.lock.total_ns."
"""Prefix like :data:`LOCK_WAITS`. The value is the total time of the waits, in nanoseconds."""

SAMPLE_ATTRIBUTES: Final = frozenset({THREAD_NAME, THREAD_ID, CPU, LOCAL_ROOT})
"""Sample attributes with a predefined meaning. All other sample attributes, except
``otel_kprofiler.*``, are labels."""

INTEGER_ATTRIBUTES: Final = frozenset(
    {"process.pid", "process.parent_pid", "process.user.id", "process.vpid", THREAD_ID, CPU}
)
"""Attributes that the conventions define as integers."""

TYPED_INTEGERS: Final = INTEGER_ATTRIBUTES | {WAKER_PID, WAKER_TID}
"""Integer attributes of resources and samples, for converting values that are stored as strings."""
BOOLEAN_ATTRIBUTES: Final = frozenset({WAIT_IS_ENDED})


def describe_request(get: Callable[[str], object]) -> str:
    """Returns a request's method and route, such as ``GET /orders/{id}``; empty if it has no route.

    ``get`` returns the value of a span attribute, given its name in the HTTP semantic conventions.
    """
    route = get("http.route")
    if not route or not isinstance(route, str):
        return ""
    method = get("http.request.method") or get("http.method")
    if method == "_OTHER":
        method = "HTTP"  # span names contain HTTP if the method is unknown
    return f"{method} {route}" if method else route
