"""Dumps stacks that the BPF program unwinds, with the registers and memory that it used."""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import platform
import struct
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple, Self

from otel_kprofiler.bpf import (
    PROCESSORS,
    PROGRAMS,
    VMLINUX_BTF,
    KernelTypes,
    LibbpfLoader,
    ObjectSpec,
    RingMemory,
    RingReader,
    find_kernel_offsets,
    pack_unwind_config,
    record_spans,
    update_map,
)
from otel_kprofiler.clock import SystemTime
from otel_kprofiler.host import (
    COUNT_SW_CPU_CLOCK,
    DISABLED,
    Access,
    PerfAttributes,
    attach_program,
    disable_event,
    enable_event,
    open_perf_event,
)
from otel_kprofiler.model import UserStack, parse_user_stack, user_stack_bytes
from otel_kprofiler.unwinding import Limits, MapSizes, TableMaps, TableStore
from tests.truth.reference import Memory
from tests.truth.sources import compile_program
from tests.truth.tables import GoOffsets

SOURCE = Path(__file__).with_name("dump.bpf.c")
_RING_BYTES = 1 << 25
_REQUEST_BYTES = 1 << 16
_HEAD = struct.Struct("=QQQQIIIIIIIIQQQ")
_BLOCK_BYTES = 512
_STACK_BYTES = 1536
_PAGE_BYTES = 4096
_STACK_PAGES = 24


class StackDump(NamedTuple):
    """The registers and stack captured at an interrupt.

    Attributes:
        registers: the registers, indexed by DWARF number.
        stacks: copies of the thread's stack, from the stack pointer's page up, and of the
            goroutine's stack.
        goroutine: the goroutine's registers, as in :class:`Dump`.
        cold_ns, warm_ns: the durations of the first walk and of a repeated walk, in nanoseconds.
        work: the number of work units that the first walk used.
        pointers_ns, pointers: the duration of the kernel's frame-pointer walk, and its frames.
    """

    stack: UserStack
    registers: tuple[int, ...]
    stacks: Sequence[Memory]
    goroutine: tuple[int, int] | None
    cold_ns: int
    warm_ns: int
    work: int
    pointers_ns: int
    pointers: int


def build(folder: Path, sources: Path = PROGRAMS) -> Path:
    return compile_program(SOURCE, sources, folder / "dump.bpf.o")


class Dumps:
    """Context manager that samples one process at a time.

    Args:
        top_of_stack: whether to locate the registers as on kernels without ``bpf_task_pt_regs``.
        answering: whether to load the requested tables.
        forgetting: whether to start each walk without cached rules and mappings.
    """

    def __init__(
        self,
        built: Path,
        *,
        top_of_stack: bool = False,
        max_work: int = 1_000_000,
        limits: Limits | None = None,
        answering: bool = True,
        forgetting: bool = False,
    ) -> None:
        cpus = os.cpu_count() or 1
        self._top_of_stack = top_of_stack
        self._forgetting = forgetting
        name = "dump_stack_5_10" if top_of_stack else "dump_stack"
        entries = {
            "rules": cpus, "files": 4096, "tables": 1024, "table_used": 1024,
            "file_requests": _REQUEST_BYTES, "ring": _RING_BYTES,
        }  # fmt: skip
        with contextlib.ExitStack() as undo:
            self._object = LibbpfLoader().load(ObjectSpec(SOURCE, built, (name,), entries))
            undo.callback(self._object.close)
            map_fd = self._object.map_fd
            types = KernelTypes(Path(VMLINUX_BTF).read_bytes())
            self._fsbase = types.offset("task_struct", "thread", "fsbase") or 0
            kernel = find_kernel_offsets(types)
            assert kernel is not None
            processor = PROCESSORS[platform.machine()]
            self._places = [place for place in processor.interrupt.at if place is not None]
            self._sp = processor.sp_column
            packed = pack_unwind_config(
                processor, kernel, page_bytes=mmap.PAGESIZE, max_work=max_work
            )
            update_map(map_fd("unwind_config"), bytes(4), packed)
            maps = TableMaps(map_fd, MapSizes(4096, 1024, _REQUEST_BYTES))
            self.tables = TableStore(
                maps, Access(), limits or Limits(1 << 28, 1 << 27), SystemTime().boot_ns
            )
            undo.callback(self.tables.close)
            if answering:
                self.tables.start()
            self._ring = RingReader(RingMemory(map_fd("ring"), _RING_BYTES), _RING_BYTES)
            undo.callback(self._ring.close)
            self._program_fd = self._object.program_fd(name)
            self._cpus = range(cpus)
            self.close = undo.pop_all().close

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def take(
        self, pid: int, hz: int, count: int, *, go: GoOffsets | None = None, timeout_s: float = 60
    ) -> list[StackDump]:
        """Samples a process at least ``count`` times, or until the time limit is reached."""
        config = struct.pack(
            "=9I", pid, 127, self._top_of_stack, self._forgetting, self._fsbase,
            *((go.g_m, go.g_stack, go.g_sched, go.m_curg) if go else (0, 0, 0, 0)),
        )  # fmt: skip
        update_map(self._object.map_fd("dump_config"), bytes(4), config)
        while self._ring.take().data:  # drops samples from the previous process
            pass
        results: list[StackDump] = []
        with self._running(hz):
            end = time.monotonic() + timeout_s
            while len(results) < count and time.monotonic() < end:
                time.sleep(0.02)
                results += self._drain()
        return results

    @contextlib.contextmanager
    def _running(self, hz: int) -> Iterator[None]:
        attributes = PerfAttributes(
            COUNT_SW_CPU_CLOCK, sample_period=1_000_000_000 // hz, flags=DISABLED
        )
        events = []
        try:
            for cpu in self._cpus:
                try:
                    events.append(open_perf_event(attributes, cpu=cpu))
                except OSError as error:
                    if error.errno != errno.ENODEV:  # a test has taken the CPU offline
                        raise
            for fd in events:
                attach_program(fd, self._program_fd)
                enable_event(fd)
            yield
        finally:
            for fd in events:
                disable_event(fd)
                os.close(fd)

    def _drain(self) -> Iterator[StackDump]:
        data = self._ring.take().data
        for start, _ in record_spans(data):
            head = _HEAD.unpack_from(data, start)
            _, cold_ns, warm_ns, pointers_ns, _, _, pages, work, pointers, *other = head
            block = data[start + _HEAD.size :][:_BLOCK_BYTES]
            registers = tuple(struct.unpack_from("=Q", block, place)[0] for place in self._places)
            at = start + _HEAD.size + _BLOCK_BYTES
            stack = parse_user_stack(data[at : at + user_stack_bytes(data, at)])
            memory = data[at + _STACK_BYTES :][: _STACK_PAGES * _PAGE_BYTES]
            stacks = [Memory(registers[self._sp] & -_PAGE_BYTES, memory[: pages * _PAGE_BYTES])]
            at += _STACK_BYTES + len(memory)
            other_pages, switched, _, base, *goroutine = other
            for _ in range(other_pages):
                stacks.append(Memory(base, data[at : at + _PAGE_BYTES]))
                at += _PAGE_BYTES
                base += _PAGE_BYTES if switched else -_PAGE_BYTES
            yield StackDump(
                stack, registers, stacks, (goroutine[0], goroutine[1]) if switched else None,
                cold_ns, warm_ns, work, pointers_ns, pointers,
            )  # fmt: skip
