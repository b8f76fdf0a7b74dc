"""Loads and runs real BPF programs for tests, and finds their symbols in kallsyms."""

import contextlib
import ctypes
import errno
import os
import platform
import struct
import subprocess
import sys
import tempfile
from pathlib import Path

from otel_kprofiler.bpf.btf import parse_program_btf
from otel_kprofiler.bpf.call import bpf_call
from otel_kprofiler.host import PerfAttributes, attach_program, enable_event
from tests.commands import COMMAND
from tests.live.samplers import spawned
from tests.waiting import wait_until

_PROG_LOAD = 5
_PROG_TEST_RUN = 10
_RAW_TRACEPOINT_OPEN = 17
_TASK_FD_QUERY = 20
_TRACEPOINT = 5
_XDP = 6
_TRACING = 26
_TRACE_FENTRY = 24
_PERF_TYPE_TRACEPOINT = 2
_PERF_EVENT_OPEN = {"x86_64": 298, "aarch64": 241}
_MOVE = struct.Struct("<BBhi")  # struct bpf_insn: code, registers, off, imm

_CHURN = """
import os, sys, time
folder, seconds, name = sys.argv[1:]
sys.path.insert(0, folder)
from programs import load
number, due, end = 0, time.monotonic(), time.monotonic() + float(seconds)
while time.monotonic() < end:
    for _ in range(20):
        os.close(load(number, name=name))
        number += 1
    due += 0.02
    time.sleep(max(0, due - time.monotonic()))
print(number)
"""


class _LoadAttributes(ctypes.Structure):
    _fields_ = (
        ("type", ctypes.c_uint32),
        ("count", ctypes.c_uint32),
        ("code", ctypes.c_uint64),
        ("license", ctypes.c_uint64),
        ("log", ctypes.c_uint32 * 2),
        ("log_buffer", ctypes.c_uint64),
        ("kernel_version", ctypes.c_uint32),
        ("flags", ctypes.c_uint32),
        ("name", ctypes.c_char * 16),
        ("device", ctypes.c_uint32),
        ("attach_type", ctypes.c_uint32),
        ("types", ctypes.c_uint32 * 9),
        ("attach_btf_id", ctypes.c_uint32),
    )


class _RunAttributes(ctypes.Structure):
    _fields_ = (
        ("fd", ctypes.c_uint32),
        ("result", ctypes.c_uint32),
        ("sizes", ctypes.c_uint32 * 2),
        ("data_in", ctypes.c_uint64),
        ("data_out", ctypes.c_uint64),
        ("repeat", ctypes.c_uint32),
        ("duration", ctypes.c_uint32),
        ("context", ctypes.c_uint64 * 3),
        ("flags", ctypes.c_uint64 * 2),
    )


def instructions(number: int, functions: int = 1, spin: int = 0) -> bytes:
    """Returns a program with several functions, the first with a loop of ``spin`` iterations."""
    last = functions - 1
    # The first function counts down, calls every other function, and returns XDP_PASS.
    body = [_MOVE.pack(0xB7, 0x06, 0, number)]  # r6 = number
    if spin:
        body += [
            _MOVE.pack(0xB7, 0x07, 0, spin),  # r7 = spin
            _MOVE.pack(0x07, 0x07, 0, -1),  # r7 -= 1
            _MOVE.pack(0x55, 0x07, -2, 0),  # if r7 != 0 goto the previous line
        ]
    length = len(body) + last + 2
    for index in range(last):
        target = length + 2 * index  # every subprogram has two instructions
        body.append(_MOVE.pack(0x85, 0x10, 0, target - len(body) - 1))  # call
    body += [_MOVE.pack(0xB7, 0x00, 0, 2), _MOVE.pack(0x95, 0, 0, 0)]  # r0 = 2; exit
    for index in range(last):
        body += [_MOVE.pack(0xB7, 0x00, 0, number + index), _MOVE.pack(0x95, 0, 0, 0)]
    return b"".join(body)


def load(number: int = 0, *, name: str = "kprof_test", functions: int = 1, spin: int = 0) -> int:
    return _load(_XDP, instructions(number, functions, spin), name)


def _load(kind: int, code: bytes, name: str, **more: int) -> int:
    license_text = b"GPL\0"
    attributes = _LoadAttributes(
        kind,
        len(code) // 8,
        ctypes.cast(code, ctypes.c_void_p).value,
        ctypes.cast(license_text, ctypes.c_void_p).value,
        name=name.encode(),
        **more,
    )
    return bpf_call(_PROG_LOAD, attributes)


def churn_command(seconds: float, name: str) -> list[str]:
    """Returns a command that loads and unloads 1,000 programs per second and prints the total."""
    return [sys.executable, "-c", _CHURN, str(Path(__file__).parent), str(seconds), name]


def attach_fentry(function: str, *, name: str = "kprof_fentry") -> tuple[int, int]:
    """Attaches an empty program to a kernel function, so that the kernel creates a trampoline.

    Returns the descriptors of the attachment and the program.
    """
    btf = parse_program_btf(Path("/sys/kernel/btf/vmlinux").read_bytes())
    code = _MOVE.pack(0xB7, 0x00, 0, 0) + _MOVE.pack(0x95, 0, 0, 0)
    target = next(n for n, text in btf.functions.items() if text == function)
    program = _load(_TRACING, code, name, attach_type=_TRACE_FENTRY, attach_btf_id=target)
    # union bpf_attr for BPF_RAW_TRACEPOINT_OPEN: name, program
    return bpf_call(_RAW_TRACEPOINT_OPEN, (ctypes.c_uint64 * 2)(0, program)), program


def attach_tracer(event: str, spin: int, cpu: int) -> list[int]:
    """Attaches a program that loops ``spin`` times to a tracepoint on one CPU.

    Returns the attachment and program descriptors. Raises ``OSError`` if tracefs cannot be mounted.
    """
    script = 'mount -t tracefs none "$1" && cat "$1/events/$2/id"'
    with tempfile.TemporaryDirectory() as folder:
        command = ["unshare", "-m", "sh", "-c", script, "sh", folder, event]
        listing = subprocess.run(command, capture_output=True, text=True, check=False)
    if listing.returncode:
        raise OSError(f"no tracepoint {event}: {listing.stderr.strip()}")
    attributes = bytearray(PerfAttributes(int(listing.stdout), sample_period=1).pack())
    struct.pack_into("=I", attributes, 0, _PERF_TYPE_TRACEPOINT)
    libc = ctypes.CDLL(None, use_errno=True)
    buffer = ctypes.create_string_buffer(bytes(attributes))
    number = ctypes.c_long(_PERF_EVENT_OPEN[platform.machine()])
    fd = libc.syscall(number, buffer, -1, cpu, -1, ctypes.c_ulong(0))
    if fd < 0:
        raise OSError(ctypes.get_errno(), "perf_event_open")
    program = _load(_TRACEPOINT, instructions(0, spin=spin), "slow_tracer")
    attach_program(fd, program)
    enable_event(fd)
    return [fd, program]


def run(fd: int, repeat: int) -> None:
    """Runs an XDP program ``repeat`` times, so that the kernel creates a dispatcher."""
    packet = bytes(64)
    attributes = _RunAttributes(fd, 0, (ctypes.c_uint32 * 2)(len(packet), 0), repeat=repeat)
    attributes.data_in = ctypes.cast(packet, ctypes.c_void_p).value
    while True:
        try:
            bpf_call(_PROG_TEST_RUN, attributes)
        except InterruptedError:  # any pending signal interrupts the run
            continue
        return


def kallsyms(*blocks: str) -> set[tuple[int, str]]:
    """Returns the addresses and names of symbols in the given modules, using a simple parser.

    The kernel iterates over its list by index, so a line is missing if an earlier symbol is
    unloaded during the read. If two consecutive reads are equal, no line is missing.
    """
    before = None
    while (result := _read_kallsyms(blocks or ("bpf",))) != before:
        before = result
    return result


def _read_kallsyms(blocks: tuple[str, ...]) -> set[tuple[int, str]]:
    results = set()
    for line in Path("/proc/kallsyms").read_text().splitlines():
        address, _, name, *block = line.split()
        if block and block[0].strip("[]") in blocks:
            results.add((int(address, 16), name))
    return results


def holds_sampler(pid: int) -> bool:
    """Returns whether a process is sampling, that is, has a BPF program on a perf event."""
    with contextlib.suppress(OSError):  # a descriptor may have been closed
        files = list(Path(f"/proc/{pid}/fd").iterdir())
        return any(
            file.readlink().name == "anon_inode:[perf_event]" and _has_program(pid, int(file.name))
            for file in files
        )
    return False


@contextlib.contextmanager
def recording(*words, **options):
    """Runs ``record`` during the block, and yields its process once sampling has started."""
    options = {"stderr": subprocess.PIPE, "text": True, **options}
    with spawned(*COMMAND, "record", *map(str, words), **options) as process:
        wait_until(lambda: holds_sampler(process.pid) or process.poll() is not None)
        assert process.poll() is None, process.communicate()
        yield process


def _has_program(pid: int, fd: int) -> bool:
    """Returns whether a BPF program is attached to a perf event that a process has open.

    The query fails with ``EOPNOTSUPP`` if a program is attached, and with another error otherwise
    (bpf_get_perf_event_info() in kernel/trace/bpf_trace.c).
    """
    try:
        bpf_call(_TASK_FD_QUERY, (ctypes.c_uint32 * 12)(pid, fd))
    except OSError as error:
        return error.errno == errno.EOPNOTSUPP
    return False


def close_all(fds: list[int]) -> None:
    while fds:
        os.close(fds.pop())
