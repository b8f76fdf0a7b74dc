"""Compares samples taken by a user without capabilities with samples taken by ``record``.

With ``perf_event_paranoid`` set to 2, unprivileged users can sample only their own processes in
user mode, with frame-pointer call chains.
"""

import ctypes
import mmap
import os
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final, NamedTuple

from benchmarks.bench_unwinding import drain
from benchmarks.rows import Row
from otel_kprofiler.host.perf import COUNT_SW_CPU_CLOCK, PerfAttributes, open_perf_event
from otel_kprofiler.model import STACK_OK
from otel_kprofiler.sampling import EbpfSampler, SamplerConfig

PYTHON: Final = "import json\nwhile True: json.loads(json.dumps(list(range(2000))))"
FILES: Final = "import os\nwhile True:\n for _ in os.walk('/usr/lib'): pass"
LOADS: Final[Mapping[str, tuple[str, ...]]] = {
    "Python": (sys.executable, "-c", PYTHON),
    "gzip": ("sh", "-c", "exec gzip -c < /dev/zero > /dev/null"),
    "openssl": ("openssl", "speed", "-seconds", "600", "sha256"),
    "files": (sys.executable, "-c", FILES),
    "dd": ("dd", "if=/dev/urandom", "of=/dev/null", "bs=64k"),
}
WITH_FRAME_POINTERS: Final = b"""
volatile unsigned x;
__attribute__((noinline)) void leaf(void) { for (int i = 0; i < 1000; i++) x += i; x++; }
int main(void) { for (;;) leaf(); }
"""
NOBODY: Final = 65534
PERIOD_NS: Final = 1_000_000
# include/uapi/linux/perf_event.h
_SAMPLE_CALLCHAIN: Final = 1 << 5
_EXCLUDE_KERNEL, _EXCLUDE_HV = 1 << 5, 1 << 6
_RECORD_SAMPLE: Final = struct.pack("=I", 9)
_DATA_HEAD: Final = 1024
_RING_BYTES: Final = 256 * mmap.PAGESIZE
_NEAR_BYTES: Final = 256
"""Maximum distance between ``__libc_start_main`` and the unexported function that calls main()."""


class Seen(NamedTuple):
    """A process's number of samples, and how many of them have a complete user stack."""

    samples: int
    whole: int


def see_without_capabilities(pid: int, seconds: float) -> Seen:
    """Samples a process as its unprivileged owner, using only perf events."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.setgroups([])
            os.setgid(NOBODY)
            os.setuid(NOBODY)
            os.write(writer, struct.pack("=QQ", *_sample_chains(pid, seconds)))
        finally:
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as file:
        answer = file.read()
    os.waitpid(child, 0)
    if not answer:
        raise RuntimeError("perf events are not permitted: is kernel.perf_event_paranoid above 2?")
    return Seen(*struct.unpack("=QQ", answer))


def _sample_chains(pid: int, seconds: float) -> Seen:
    caller = _find_caller_of_main(pid)
    attributes = PerfAttributes(
        COUNT_SW_CPU_CLOCK,
        sample_period=PERIOD_NS,
        sample_type=_SAMPLE_CALLCHAIN,
        flags=_EXCLUDE_KERNEL | _EXCLUDE_HV,
    )
    event = open_perf_event(attributes, pid=pid)
    ring = mmap.mmap(event, mmap.PAGESIZE + _RING_BYTES)
    samples = whole = tail = 0
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        time.sleep(0.01)
        head, _ = struct.unpack_from("=QQ", ring, _DATA_HEAD)
        while tail < head:
            record = _take(ring, tail)
            tail += len(record)
            if record[:4] == _RECORD_SAMPLE:
                samples += 1
                whole += struct.unpack_from("=Q", record, len(record) - 8)[0] in caller
        struct.pack_into("=Q", ring, _DATA_HEAD + 8, tail)
    return Seen(samples, whole)


def _find_caller_of_main(pid: int) -> range:
    start = ctypes.cast(ctypes.CDLL(None)["__libc_start_main"], ctypes.c_void_p).value or 0
    at = start - _find_libc("self") + _find_libc(str(pid))
    return range(at - _NEAR_BYTES, at + _NEAR_BYTES)


def _find_libc(process: str) -> int:
    lines = Path(f"/proc/{process}/maps").read_text().splitlines()
    return next(int(line.partition("-")[0], 16) for line in lines if "/libc.so" in line)


def _take(ring: mmap.mmap, tail: int) -> bytes:
    """Returns the record at a ring position; the record may wrap around to the ring's start."""
    at = mmap.PAGESIZE + tail % _RING_BYTES
    (size,) = struct.unpack_from("=H", ring, at + 6)  # records are 8-byte aligned
    first = ring[at : at + size]
    return first + ring[mmap.PAGESIZE : mmap.PAGESIZE + size - len(first)]


def see_with_capabilities(pid: int, seconds: float) -> Seen:
    sampler = EbpfSampler(SamplerConfig(samples_per_second=999, stacks="both", target_pids=(pid,)))
    sampler.start()
    try:
        ends = drain(sampler, seconds)
    finally:
        sampler.close()
    return Seen(ends.total(), ends[STACK_OK])


def share_in_kernel(pid: int) -> float:
    """Returns the fraction of a process's CPU time that was spent in the kernel (proc(5))."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    user, kernel = map(int, fields[11:13])
    return kernel / max(1, user + kernel)


def rows(quick: bool) -> Iterator[Row]:
    """Yields, for each load, the percentages of kernel time and of complete stacks by method."""
    seconds = 2.0 if quick else 5.0
    with tempfile.TemporaryDirectory() as directory:
        os.chmod(directory, 0o755)
        program = os.path.join(directory, "program")
        source = ["gcc", "-O2", "-fno-omit-frame-pointer", "-x", "c", "-o", program, "-"]
        subprocess.run(source, input=WITH_FRAME_POINTERS, check=True)
        for name, command in {**LOADS, "C with frame pointers": (program,)}.items():
            yield from _see(name, command, seconds)


def _see(name: str, command: Sequence[str], seconds: float) -> Iterator[Row]:
    with subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        user=NOBODY, group=NOBODY, extra_groups=[], cwd="/",
    ) as process:  # fmt: skip
        try:
            time.sleep(1)
            without = see_without_capabilities(process.pid, seconds)
            with_them = see_with_capabilities(process.pid, seconds)
            kernel = share_in_kernel(process.pid)
        finally:
            process.kill()
    yield Row(f"{name}: time in the kernel, which it does not show", f"{kernel:.1%}")
    shares = [seen.whole / max(1, seen.samples) for seen in (without, with_them)]
    yield Row(
        f"{name}: user stacks that frame pointers make whole",
        f"{shares[0]:.1%} of {without.samples}",
        f"unwind tables {shares[1]:.1%} of {with_them.samples}",
    )
