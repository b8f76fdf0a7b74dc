"""Builds ring-buffer records in the form that the sampler writes."""

import struct

_HEADER = struct.Struct("<8Q4I2H3hHI16s2I")


def pack_record(
    time_ns,
    frames=(),
    *,
    kind=1,
    value=1,
    start_ns=1,
    cgroup=2,
    trace=0,
    span=0,
    tgid=3,
    tid=4,
    exec_id=0,
    owner=0xFFFFFFFF,
    stack_start=0,
    cpu=0,
    kernel=None,
    user=-32768,
    python=-32768,
    phase=0,
    labels=0,
    comm=b"comm",
    context=b"",
    holder=0,
):
    """Returns a record without its length. By default, all frames are kernel frames."""
    kernel = 8 * len(frames) if kernel is None else kernel
    return _HEADER.pack(
        time_ns, start_ns, cgroup, trace >> 64, trace & (1 << 64) - 1, span, value,
        stack_start, tgid, tid, exec_id, owner, cpu, kind, kernel, user, python, phase, labels,
        comm, len(context), holder,
    ) + struct.pack(f"<{len(frames)}Q", *frames) + context  # fmt: skip


def in_ring(record):
    """Returns a record as in the ring: prefixed with its length, and padded to 8 bytes."""
    return struct.pack("<II", len(record), 0) + record + bytes(-len(record) % 8)
