"""Measures encoding time and wire size per sample, and the cost of validation and decoding."""

from __future__ import annotations

import gzip
import lzma
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

from benchmarks.rows import Row
from otel_kprofiler.model import (
    KERNEL_SIDE,
    ON_CPU,
    USER_SIDE,
    AddressRange,
    AttributeForm,
    Attributes,
    BuildId,
    FileId,
    Form,
    Frame,
    Line,
    Module,
    ModuleKind,
    Profile,
    RawFrames,
    Resource,
    ResourceSamples,
    Side,
    Stack,
    Unresolved,
    Window,
    WindowSample,
)
from otel_kprofiler.otlp import check_payload, decode_windows, encode_window

DATA = Path(__file__).parent.parent / "tests/data/otlp/mixed-load.txt.xz"
"""A recording made with perf: five seconds at 99 Hz on two CPUs under a mixed load.

The file lists the frames (``k RVA NAME`` or ``u OFFSET FILE``), then the samples: nanoseconds since
the previous sample, CPU, process id, thread id minus process id, indices of frames, thread name.
"""

START_NS = 1_750_000_000_123_456_789
TEXT = 0xFFFFFFFF81000000
VMLINUX = Module(
    name="vmlinux",
    kind=ModuleKind.VMLINUX,
    build_id=BuildId("764949bb2f4f95ba7df2d509b6f99945f1280080"),
    file_id=FileId("f99945f128008c497a95ba7df2d509b6"),
    base=TEXT,
    ranges=(AddressRange(TEXT, TEXT + 0x1800000, "_text"),),
)
HOST: Attributes = {
    "host.name": "build-host-17",
    "host.arch": "amd64",
    "host.id": "7f0b3e0c9d5a4f6c8e1d2b3a4c5d6e7f",
    "os.type": "linux",
    "os.version": "6.12.117-generic",
}


def mixed_load_window(*, user: bool) -> Window:
    """Returns the recorded samples as one window. User frames have random-looking addresses."""
    with lzma.open(DATA, "rt") as file:
        frame_lines, sample_lines = file.read().split("\n\n")
    rows = [line.split(" ", 2) for line in frame_lines.split("\n")]
    chance = random.Random(17)
    kernel = {
        index: Frame(
            VMLINUX,
            int(address, 16),
            (Line(name),) if name else (),
            0x17 if name else 0,
            KERNEL_SIDE,
            None if name else Unresolved.NO_SYMBOL,
        )
        for index, (kind, address, name) in enumerate(rows)
        if kind == "k"
    }
    placed: dict[tuple[str, str], int] = {}
    stacks: dict[tuple[int | None, ...], Stack] = {}
    groups: dict[str, tuple[Resource, dict[tuple[Stack, int, str, int], list[int]]]] = {}
    now = START_NS
    for line in sample_lines.split("\n"):
        step, cpu, pid, thread, indices, comm = line.split(" ", 5)
        now += int(step) + chance.randrange(1000) - 500
        numbers = [int(index) for index in indices.split(",")] if indices != "-" else []
        frames = [kernel[index] for index in numbers if index in kernel]
        addresses = []
        for index in numbers if user else ():
            if index not in kernel:
                _, offset, file = rows[index]
                base = placed.setdefault(
                    (pid, file), 0x7F0000000000 + chance.randrange(2**27) * 4096
                )
                address = base + int(offset, 16) % 2**24 if file != "?" else int(offset, 16)
                addresses.append(address)
        sides = [Side(KERNEL_SIDE, tuple(frames))]
        if user:
            raw = RawFrames(USER_SIDE, tuple(addresses), Unresolved.USER_ADDRESS)
            sides.append(Side(USER_SIDE, raw))
        stack = stacks.setdefault(
            (*map(id, frames), None, *addresses),
            Stack(tuple(sides)),
        )
        if pid not in groups:
            started = f"2025-06-15T15:06:{40 + len(groups) % 20}.{int(pid) % 1000:03}Z"
            attributes = {
                **HOST,
                "process.pid": int(pid),
                "process.creation.time": started,
                "process.executable.name": comm,
                "process.executable.path": f"/usr/bin/{comm}",
            }
            groups[pid] = (Resource(attributes), {})
        key = (stack, int(pid) + int(thread), comm, int(cpu))
        groups[pid][1].setdefault(key, []).append(now)
    return Window(
        START_NS - 1_000_000,
        START_NS + 5_000_000_000,
        [
            Profile(
                ON_CPU,
                1_000_000_000 // 99,
                [
                    ResourceSamples(
                        resource,
                        [
                            WindowSample(stack, tid, comm, cpu, None, times)
                            for (stack, tid, comm, cpu), times in samples.items()
                        ],
                    )
                    for resource, samples in groups.values()
                ],
            )
        ],
    )


def best_of(runs: int, work: Callable[[], object]) -> float:
    times = []
    for _ in range(runs):
        start = time.process_time()
        work()
        times.append(time.process_time() - start)
    return min(times)


GO_BYTES = {"raw": 110, "gzip": 38}
"""The bytes per sample that opentelemetry-ebpf-profiler needs for kernel and user stacks."""

KERNEL_ONLY_BYTES = {"raw": 60, "gzip": 25}
"""Target size, in bytes per sample, of samples with only a kernel stack."""


def wire_sizes(window: Window, attributes: AttributeForm = AttributeForm.INLINE) -> dict[str, int]:
    payload = encode_window(window, attributes=attributes).batches[0].payload
    return {"raw": len(payload), "gzip": len(gzip.compress(payload, 6))}


def rows(quick: bool) -> Iterator[Row]:
    """Yields results for kernel stacks only, and then for kernel and user stacks."""
    runs = 5 if quick else 25
    for user in (False, True):
        window = mixed_load_window(user=user)
        count = window.sample_count
        sides = "kernel + user stacks" if user else "kernel stacks only"
        for what, measured in ((sides, window), (f"{sides}, peer's resources", like_peer(window))):
            for name, size in wire_sizes(measured).items():
                limit = 0.9 * GO_BYTES[name] if user else KERNEL_ONLY_BYTES[name]
                yield Row(
                    f"wire bytes per sample, {what}, {name}",
                    f"{size / count:.1f} B",
                    f"opentelemetry-ebpf-profiler {GO_BYTES[name]} B" if user else "",
                    size / count / GO_BYTES[name] if user else None,
                    f"<= {limit:.1f}",
                )
        for name, size in wire_sizes(window, AttributeForm.REFERENCES).items():
            yield Row(
                f"wire bytes per sample, {sides}, attributes by reference, {name}",
                f"{size / count:.1f} B",
                "attributes in place",
                size / wire_sizes(window)[name],
            )
        processes = len(window.profiles[0].resources)
        size, shared = (wire_sizes(each)["raw"] for each in (window, one_process(window)))
        yield Row(
            f"raw bytes, {sides}, {count / processes:.0f} samples per process",
            f"{shared / count:.1f} B per sample + {(size - shared) / processes:.0f} B per process",
        )
        spent = best_of(runs, lambda window=window: encode_window(window, max_bytes=4_000_000))
        yield Row(f"encode, {sides}", f"{spent / count * 1e6:.1f} µs per sample")
    payload = encode_window(window).batches[0].payload
    for what, work in (
        ("encode as JSON", lambda: encode_window(window, form=Form.JSON)),
        ("decode", lambda: decode_windows(payload)),
        ("check", lambda: check_payload(payload)),
    ):
        other = best_of(max(3, runs // 5), work)
        row = f"{other / count * 1e6:.1f} µs per sample"
        yield Row(f"{what}, kernel + user stacks", row, "encode as protobuf", other / spent)


def like_peer(window: Window) -> Window:
    """Returns the window with only the resource attributes that the peer sends."""
    keys = ("process.pid", "process.executable.name", "process.executable.path")
    (profile,) = window.profiles
    groups = [
        ResourceSamples(
            Resource({key: group.resource.attributes[key] for key in keys}), group.samples
        )
        for group in profile.resources
    ]
    return replace(window, profiles=[replace(profile, resources=groups)])


def one_process(window: Window) -> Window:
    (profile,) = window.profiles
    group = ResourceSamples(profile.resources[0].resource, [one for _, one in profile.samples])
    return replace(window, profiles=[replace(profile, resources=[group])])
