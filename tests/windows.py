"""Builds, moves, writes and sends windows for tests."""

from otel_kprofiler.model import (
    KERNEL_SIDE,
    ON_CPU,
    FileId,
    Form,
    Frame,
    Line,
    Module,
    ModuleKind,
    Profile,
    Resource,
    ResourceSamples,
    Stack,
    Window,
    WindowSample,
)
from otel_kprofiler.otlp import check_payload, decode_windows, encode_window, read_profiles

VMLINUX = Module("vmlinux", ModuleKind.VMLINUX, None, FileId("cd" * 16), 0)
LIBC = Module("libc.so.6", ModuleKind.USER, None, FileId("ab" * 16), 0)


def make_frame(name, side=KERNEL_SIDE, module=VMLINUX) -> Frame:
    return Frame(module, 1, (Line(name),), 0, side)


def make_stack(*names) -> Stack:
    """Builds a stack of kernel functions, innermost first."""
    return Stack.from_frames(make_frame(name) for name in names)


def make_window(start, end, *groups, kind=ON_CPU, period_ns=10, **facts) -> Window:
    """Builds a window with one profile; see :func:`make_profile`. Times are Unix ns."""
    return Window(start, end, [make_profile(*groups, kind=kind, period_ns=period_ns, **facts)])


def make_profile(*groups, kind=ON_CPU, period_ns=10, **facts) -> Profile:
    """Builds a profile from groups of (process attributes, samples[, wait totals])."""
    resources = [ResourceSamples(Resource(attributes), *rest) for attributes, *rest in groups]
    return Profile(kind, period_ns, resources, **facts)


def timed_values(sample):
    """Returns an iterator over the timestamps of a sample, each with its value."""
    times = sample.timestamps_unix_ns
    return zip(times, sample.values or [1] * len(times), strict=True)


def move_window(window: Window, by_ns: int) -> Window:
    """Returns a window whose start, end and samples are moved by ``by_ns``."""
    moved = window.change_samples(
        lambda sample: sample._replace(
            timestamps_unix_ns=[time + by_ns for time in sample.timestamps_unix_ns]
        )
    )
    return Window(window.start_unix_ns + by_ns, window.end_unix_ns + by_ns, moved.profiles)


def encode(window: Window, form=Form.PROTOBUF) -> bytes:
    """Returns the payload for a window that fits into one batch."""
    (batch,) = encode_window(window, form=form).batches
    return batch.payload


def write_otlp(path, window: Window) -> str:
    """Writes a window to a file. Returns its path."""
    path.write_bytes(encode(window))
    return str(path)


def read_samples(path) -> list[tuple[Resource, WindowSample]]:
    """Returns the Resource and the sample, for each sample in a file."""
    return [pair for window in read_profiles(str(path)) for pair in window.samples]


def read_stacks(path):
    """Returns the stacks of a file's samples in time order."""
    stacks = [
        (time_ns, sample.stack)
        for _, sample in read_samples(path)
        for time_ns in sample.timestamps_unix_ns
    ]
    return [stack for _, stack in sorted(stacks, key=lambda timed: timed[0])]


def send(window: Window, form=Form.PROTOBUF) -> Window:
    """Encodes, validates and decodes a window, and returns the decoded window."""
    payload = encode(window, form)
    assert check_payload(payload) == []
    (decoded,) = decode_windows(payload)
    return decoded
