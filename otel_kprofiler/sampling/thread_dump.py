"""Takes a snapshot of thread states and stacks with a BPF task iterator.

The program (dump.bpf.c) runs in the process that reads its output, so nothing is attached to the
dumped threads, and nothing stops or wakes them.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import itertools
import logging
import os
import re
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Final, NamedTuple

from otel_kprofiler.bpf import (
    DUMP_OBJECT,
    DUMP_ROW_BYTES,
    DUMP_SOURCE,
    ON_A_CPU,
    VMLINUX_BTF,
    DumpRow,
    KernelTypes,
    LoadedObject,
    Loader,
    MemoryLayoutMap,
    ObjectSpec,
    PythonMaps,
    PythonOffsets,
    RingMemory,
    RingReader,
    ThreadContexts,
    find_task_offsets,
    link_iterator,
    open_iterator,
    pack_memory_layout,
    parse_dump_rows,
    parse_records,
    python_map_entries,
    update_map,
)
from otel_kprofiler.errors import HostError, KernelFeatureError, SamplerError
from otel_kprofiler.host import (
    ReferableFiles,
    parse_mappings,
    read_maps,
    read_possible_cpus,
)
from otel_kprofiler.model import KnownCodes, KnownFiles, RawSample, WaitState
from otel_kprofiler.sampling.loading import load_spec
from otel_kprofiler.sampling.program_config import pack_config
from otel_kprofiler.sampling.python_frames import (
    PYTHON_SUFFIX,
    open_python,
    plan_python,
    python_ring_bytes,
)
from otel_kprofiler.sampling.sampler import SamplerConfig
from otel_kprofiler.sampling.target_maps import TargetMaps, target_map_entries
from otel_kprofiler.sampling.thread_contexts import (
    context_map_entries,
    open_contexts,
    plan_contexts,
)
from otel_kprofiler.sampling.unwinder import UnwindPlan, map_entries, open_tables, plan_unwinding

if TYPE_CHECKING:
    from otel_kprofiler.unwinding import TableStore

_DUMP: Final = ("kprofiler_dump", "kprofiler_dump_5_10")
"""The names of the iterator programs. Programs that require newer kernels come first."""
_FIND_MEMORY: Final = "kprofiler_find_memory"
_RING_BYTES: Final = 4 << 20
_ROWS_AT_ONCE: Final = 256
"""Number of threads read per batch; their stacks fill at most a third of the ring."""
_MOST_LINKS: Final = 16
_PREEMPT_S: Final = 0.2
"""Time limit for reading running threads, in seconds."""
_FIRST: Final = bytes(4)
_PAGE_BITS: Final = 12
_MOST_PHYSICAL_BITS: Final = 52
_GIB: Final = 1 << 30
_HOLES_GIB: Final = 64
"""Maximum total size, in GiB, of holes in the physical address space, such as device registers."""

_log = logging.getLogger(__name__)


class ThreadReading(NamedTuple):
    """One row per target thread, and the threads' stacks by thread id.

    The stack of a running thread is missing if the thread could not be preempted.
    """

    rows: list[DumpRow]
    samples: dict[int, RawSample]


class ThreadReader:
    """Reads the threads of the processes in ``config.target_pids``. Not thread-safe.

    Requires CAP_BPF, CAP_PERFMON and a kernel with BTF. The loader must be libbpf. Rates in
    ``config`` are ignored. ``user_files`` receives the files that user stacks refer to, and
    ``python_codes`` receives the code objects of Python frames.

    Raises:
        HostError: the kernel refuses the BPF program or lacks a feature.
        SamplerError: the verifier rejects the program.

    Attributes:
        python: processes whose Python frames are read; None if disabled or not supported.
        contexts: processes whose thread contexts are read.
        tables: unwind tables; None if user stacks cannot be read.
        user_problem: why user stacks cannot be read; empty if they can be read.
    """

    def __init__(
        self,
        config: SamplerConfig,
        *,
        access: ReferableFiles,
        loader: Loader,
        user_files: KnownFiles,
        python_codes: KnownCodes,
    ) -> None:
        # Do not preload tables, because listing a process's mapped files takes its mmap_lock, which
        # a stuck thread may hold forever.
        self.config = config = replace(config, max_preload_s=0)
        self._files = access
        self.python: PythonMaps | None = None
        self.tables: TableStore | None = None
        self.user_problem = ""
        types = self._read_types()
        plan = plan_unwinding(config, lambda: types, loader.name)
        offsets, _ = plan_python(config, lambda: types, loader.name)
        thread_pointer = plan_contexts(lambda: types)
        cpus = read_possible_cpus(access)
        with contextlib.ExitStack() as undo:
            self._program, self._name, has_python = self._load(
                loader, plan, offsets, thread_pointer, cpus
            )
            undo.callback(self._program.close)
            self._ring = RingReader(
                RingMemory(self._program.map_fd("ring"), _RING_BYTES), _RING_BYTES
            )
            undo.callback(self._ring.close)
            if offsets and has_python:
                self.python = open_python(offsets, config, self._program, cpus, python_codes)
                undo.callback(self.python.close)
                self.python.limit(config.python_frames)
            self.contexts: ThreadContexts = undo.enter_context(
                contextlib.closing(open_contexts(thread_pointer, self._program))
            )
            self.stack_limit = 8 * config.max_frames
            packed = pack_config(
                config,
                offsets=find_task_offsets(types),
                thread_pointer=thread_pointer,
                wakeup_bytes=_RING_BYTES,
                stack_limit=self.stack_limit,
                regular_since_ns=0,
            )
            TargetMaps(self._program.map_fd).change(
                config, lambda: update_map(self._program.map_fd("config"), _FIRST, packed)
            )
            if plan is not None:
                self._find_memory()
                self.tables = open_tables(plan, config, self._program, access, user_files)
                undo.callback(self.tables.close)
                for path in _list_paths(access, config.target_pids):
                    self.tables.places.add(path)
            else:
                self.user_problem = "this kernel or processor has no unwinder"
            self._close = undo.pop_all().close

    def read(self) -> ThreadReading:
        """Read each target thread once. Raises ``OSError`` if the kernel rejects the iterator."""
        os.sched_yield()  # updates the scheduler's clock
        reading = self._collect(self._iterate(self._name))
        running = [row for row in reading.rows if row.flags & ON_A_CPU]
        if running:
            self._preempt(running, reading)
        return reading

    def _preempt(self, running: Sequence[DumpRow], reading: ThreadReading) -> None:
        """Read running threads while preempting them, so that their stacks are stable."""
        allowed = os.sched_getaffinity(0)
        until_s = time.monotonic() + _PREEMPT_S
        left = {row.tid: row for row in running if row.cpu in allowed}
        try:
            while left and time.monotonic() < until_s:
                for tid, row in list(left.items()):
                    os.sched_setaffinity(0, {row.cpu})
                    again = self._read_thread(tid)
                    now = next((other for other in again.rows if other.tid == tid), None)
                    sample = again.samples.get(tid)
                    if now is None or sample is not None:
                        del left[tid]
                    else:
                        left[tid] = now  # the thread may now be on another CPU
                    if now and sample and now.wait_state is WaitState.RUNNABLE:
                        reading.samples[tid] = sample
        except OSError as error:  # the CPU went offline, or the kernel is older than 6.1
            _log.debug("running threads cannot be sampled: %s", error)
        finally:
            os.sched_setaffinity(0, allowed)

    def _read_thread(self, tid: int) -> ThreadReading:
        program_fd = self._program.program_fd(self._name)
        return self._collect(_read(link_iterator(program_fd, tid=tid)))

    def _collect(self, pieces: Iterable[bytes]) -> ThreadReading:
        rows, samples = bytearray(), dict[int, RawSample]()
        for piece in pieces:
            rows += piece
            data, _ = self._ring.take()
            if self.python is not None:
                self.python.receive()
            for sample in parse_records(data, self.stack_limit):
                samples[sample.tid] = sample
        return ThreadReading(parse_dump_rows(bytes(rows)), samples)

    def close(self) -> None:
        """Unload the program and stop reading tables; idempotent."""
        self._close()

    def _iterate(self, name: str, *, only_own: bool = False) -> Iterator[bytes]:
        """Runs a BPF iterator over the targets' threads or, before Linux 6.1, over all threads."""
        program_fd = self._program.program_fd(name)
        pids = (os.getpid(),) if only_own else self.config.target_pids
        try:
            if len(pids) <= _MOST_LINKS:
                for pid in pids:
                    yield from _read(link_iterator(program_fd, pid))  # empty if pid has exited
                return
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.E2BIG):
                raise
            # before 6.1, an iterator cannot be restricted to a process
        yield from _read(link_iterator(program_fd))

    def _read_types(self) -> KernelTypes:
        try:
            return KernelTypes(self._files.read_bytes(VMLINUX_BTF))
        except (OSError, ValueError) as error:
            raise KernelFeatureError(
                "reading a process's threads needs BTF, which this kernel lacks",
                hint="use a kernel built with CONFIG_DEBUG_INFO_BTF",
            ) from error

    def _load(
        self,
        loader: Loader,
        plan: UnwindPlan | None,
        offsets: PythonOffsets | None,
        thread_pointer: int,
        cpus: int,
    ) -> tuple[LoadedObject, str, bool]:
        """Load the most capable program that this kernel accepts."""
        suffixes = (PYTHON_SUFFIX, "") if offsets else ("",)
        choices = list(itertools.product(suffixes, _DUMP))
        for suffix, name in choices:
            python_ring = python_ring_bytes(self.config) if suffix else 0
            entries = {
                **target_map_entries(self.config),
                "cpu_lines": cpus,
                "ring": _RING_BYTES,
                **context_map_entries(thread_pointer),
                **map_entries(plan, cpus),
                **python_map_entries(cpus, python_ring),
            }
            programs: tuple[str, ...] = (name + suffix,)
            if plan:
                programs += (_FIND_MEMORY,)
            spec = ObjectSpec(DUMP_SOURCE, DUMP_OBJECT, programs, entries)
            try:
                return load_spec(spec, self._files, loader), name + suffix, bool(suffix)
            except SamplerError as error:  # the kernel lacks a helper
                if (suffix, name) == choices[-1]:
                    raise
                _log.debug("the kernel rejected %s: %s\n%s", name + suffix, error, error.log)
        raise AssertionError("unreachable: the last attempt returns or raises")

    def _find_memory(self) -> None:
        """Find the kernel's direct map of physical memory by searching for a known random word."""
        proof = ctypes.c_uint64.from_buffer_copy(os.urandom(8))
        packed = pack_memory_layout(
            read_physical_mask(self._files), ctypes.addressof(proof), proof.value
        )
        update_map(self._program.map_fd("memory_layout"), _FIRST, packed)
        layout = MemoryLayoutMap(self._program.map_fd("memory_layout"))
        most = read_memory_gib(self._files) + _HOLES_GIB
        with contextlib.closing(layout):
            while not layout.is_found and layout.tried < most:
                tried = layout.tried
                for _ in self._iterate(_FIND_MEMORY, only_own=True):
                    pass
                if layout.tried == tried:
                    break
            if not layout.is_found:
                self.user_problem = "the kernel's direct map of memory was not found"


def _read(link: int) -> Iterator[bytes]:
    """Runs an iterator through its BPF link, yields its output in chunks, and closes the link."""
    try:
        reader = open_iterator(link)
    finally:
        os.close(link)
    try:
        while True:
            try:
                piece = os.read(reader, _ROWS_AT_ONCE * DUMP_ROW_BYTES)
            except BlockingIOError:  # the kernel skipped a million other threads
                continue
            if not piece:
                return
            yield piece
    finally:
        os.close(reader)


def _list_paths(files: ReferableFiles, pids: Iterable[int]) -> list[str]:
    """Returns the paths to this process's mapped files, and to the executables for ``pids``.

    Files in the directories of these paths can be opened by inode if a memory map cannot be read.
    """
    paths = [mapping.path for mapping in parse_mappings(read_maps(files, os.getpid()))]
    for pid in pids:
        with contextlib.suppress(OSError):  # the process has exited, or is a kernel thread
            paths.append(files.read_link(f"/proc/{pid}/exe"))
    return [path for path in paths if path.startswith("/")]


def read_physical_mask(files: ReferableFiles) -> int:
    """Returns the bits of a page table entry that hold the physical address.

    With memory encryption, the bit that marks an encrypted page is above these bits, and is
    excluded.
    """
    cpus = files.read_bytes("/proc/cpuinfo")
    match = re.search(rb"^address sizes\s*:\s*(\d+) bits physical", cpus, re.MULTILINE)
    bits = int(match[1]) if match else _MOST_PHYSICAL_BITS
    return (1 << bits) - (1 << _PAGE_BITS)


def read_memory_gib(files: ReferableFiles) -> int:
    """Returns this host's memory size in GiB, rounded up."""
    match = re.search(rb"^MemTotal:\s*(\d+) kB", files.read_bytes("/proc/meminfo"), re.MULTILINE)
    if not match:
        raise HostError("cannot read the memory size: /proc/meminfo has no MemTotal")
    return -(-int(match[1]) * 1024 // _GIB)
