"""The BPF maps for Python frames: processes, layouts, code descriptions and counters."""

import contextlib
import mmap
import os
import select
import struct
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Final, NamedTuple

from otel_kprofiler.bpf.btf import KernelTypes
from otel_kprofiler.bpf.map_calls import delete_from_map, update_map
from otel_kprofiler.bpf.mapped_words import MappedWords
from otel_kprofiler.bpf.python import PythonLayout, PythonProcess
from otel_kprofiler.bpf.python_codes import CodeParser, ProcessSeen, Program
from otel_kprofiler.bpf.ring import RingMemory, RingReader
from otel_kprofiler.forks import LockedForForks, ProcessLock
from otel_kprofiler.model import KnownCodes, PythonCode

MAX_PYTHON_PROCESSES: Final = 4096
_MAX_LAYOUTS: Final = 64
_THREADS: Final = 8192
_TOLD: Final = 16384  # maximum number of reported processes
_OTHER_PROGRAMS: Final = 4096
_OTHER_PROGRAM_NS: Final = 60 * 10**9
_OWN_THREADS: Final = 1024  # entries needed for spans, even without Python frames
_CODES: Final = 16384
_CONFIG: Final = struct.Struct("=13Q")
_PROCESS: Final = struct.Struct("=7Q")
_CODE_KEY: Final = struct.Struct("=QQ")
_PROGRAM: Final = struct.Struct("=3Q")
_TIME: Final = struct.Struct("=Q")
_FIRST: Final = bytes(4)

_LINE_BYTES: Final = 256
_LINE_WORDS: Final = _LINE_BYTES // 8
PYTHON_OUTCOMES: Final = (
    "complete", "truncated", "other_image", "interpreters", "no_thread", "threads", "no_frame",
    "entering", "unrooted", "unreadable", "not_code", "outside", "not_running", "unused",
    "not_adjacent", "described", "ring_full", "code_unreadable", "too_many", "no_table",
)  # fmt: skip
"""``enum python_outcomes``: outcomes of reading stacks and, from ``described`` on, code objects."""


class PythonOffsets(NamedTuple):
    """Offsets in the kernel's structs (``struct python_config``)."""

    number_bytes: int
    task_exec_id: int
    task_pid: int
    pid_level: int
    pid_numbers: int
    task_mm: int
    mm_code_pages: int
    mm_exe: int
    file_inode: int
    inode_super: int
    inode_number: int
    super_device: int


_MEMBERS: Final = (
    ("task_struct", "self_exec_id"),
    ("task_struct", "thread_pid"),
    ("pid", "level"),
    ("pid", "numbers"),
    ("task_struct", "mm"),
    ("mm_struct", "exec_vm"),
    ("mm_struct", "exe_file"),
    ("file", "f_inode"),
    ("inode", "i_sb"),
    ("inode", "i_ino"),
    ("super_block", "s_dev"),
)


def find_python_offsets(types: KernelTypes) -> PythonOffsets | None:
    """Returns the struct offsets for reading Python frames; None if a member is missing."""
    offsets = [types.offset(*member) for member in _MEMBERS]
    number_bytes = types.size("upid")
    if types.offset("upid", "nr") != 0 or number_bytes is None or None in offsets:
        return None
    return PythonOffsets(number_bytes, *(offset for offset in offsets if offset is not None))


def python_map_entries(possible_cpus: int, ring_bytes: int) -> dict[str, int]:
    """Returns the maps' ``max_entries``; ``ring_bytes`` is 0 if Python frames are disabled."""
    if not ring_bytes:
        names = ("python_processes", "processes_told", "other_programs", "codes", "python_lines")
        others = {"python_threads": _OWN_THREADS, "python_codes": mmap.PAGESIZE}
        return dict.fromkeys(names, 1) | others
    return {
        "python_processes": MAX_PYTHON_PROCESSES,
        "processes_told": _TOLD,
        "other_programs": _OTHER_PROGRAMS,
        "python_threads": _THREADS,
        "codes": _CODES,
        "python_lines": possible_cpus,
        "python_codes": ring_bytes,
    }


class PythonMaps(LockedForForks):
    """Registers Python processes, and receives descriptions of their code objects. Thread-safe.

    ``codes`` receives described code objects. A code object dropped from ``codes`` is described
    again the next time it is sampled. ``ring_bytes`` is the size of the description ring. The
    loaded object owns the descriptors that ``map_fd`` returns. Raises ``OSError`` if a map cannot
    be mapped into memory.
    """

    def __init__(
        self,
        map_fd: Callable[[str], int],
        offsets: PythonOffsets,
        cpus: int,
        ring_bytes: int,
        codes: KnownCodes,
    ) -> None:
        self._map_fd = map_fd
        self._offsets = offsets
        self._codes = codes
        self._layouts: dict[PythonLayout, int] = {}
        self._registered: set[int] = set()
        self._lock = ProcessLock()
        self._is_open = True
        self._last_counts: Mapping[str, int] = {}
        self._parser = CodeParser()
        self._seen: deque[ProcessSeen] = deque(maxlen=_TOLD)
        with contextlib.ExitStack() as undo:
            self._lines = MappedWords(map_fd("python_lines"), cpus * _LINE_WORDS)
            undo.callback(self._lines.close)
            self._ring = RingReader(RingMemory(map_fd("python_codes"), ring_bytes), ring_bytes)
            undo.callback(self._ring.close)
            # If another thread receives the record, this event wakes the thread waiting for it.
            self._received = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
            undo.callback(os.close, self._received)
            self._arrivals = undo.enter_context(select.epoll())
            self._arrivals.register(map_fd("python_codes"), select.EPOLLIN)
            self._arrivals.register(self._received, select.EPOLLIN)
            codes.on_dropped = self._forget
            self._close = undo.pop_all().close

    def limit(self, max_frames: int) -> None:
        """Set the maximum number of Python frames read per stack (0 to 127). Raises ``OSError``."""
        update_map(self._map_fd("python_config"), _FIRST, _CONFIG.pack(max_frames, *self._offsets))

    def fileno(self) -> int:
        """Returns a descriptor for poll(2) that becomes readable when new processes are seen."""
        return self._arrivals.fileno()

    def take_seen(self) -> list[ProcessSeen]:
        """Returns unregistered processes sampled since the last call.

        Each process is returned once, and again after it executes another program or maps more
        code. A process that keeps mapping code is returned at increasing intervals of up to 40 s.
        """
        self.receive()
        with self._lock:
            if self._seen and self._is_open:
                os.eventfd_read(self._received)
            seen = list(self._seen)
            self._seen.clear()
        return seen

    def register(
        self, tgid: int, layout: PythonLayout, process: PythonProcess, image: int = 0
    ) -> bool:
        """Start reading a process's Python frames, and return whether the map had a free slot.

        After execve(2), no Python frames are read until the next registration. ``tgid`` is the
        process id, as in samples. ``image`` identifies the program that the process must be running
        (:meth:`take_seen`); 0 accepts the program of the process's next sample. Raises ``OSError``.
        """
        with self._lock:
            index = self._layouts.get(layout, len(self._layouts))
            is_full = len(self._registered) >= MAX_PYTHON_PROCESSES
            if not self._is_open or index >= _MAX_LAYOUTS or is_full:
                return False
            if layout not in self._layouts:
                update_map(
                    self._map_fd("python_layouts"), index.to_bytes(4, "little"), layout.pack()
                )
                self._layouts[layout] = index
            value = _PROCESS.pack(
                index,
                process.image_tag,
                process.runtime_at,
                process.code_type,
                process.eval_start,
                process.eval_bytes,
                image,
            )
            update_map(self._map_fd("python_processes"), tgid.to_bytes(4, "little"), value)
            self._registered.add(tgid)
            return True

    def release(self, tgid: int) -> bool:
        """Stop reading a process's Python frames, and return whether it was registered."""
        with self._lock:
            if not self._is_open or tgid not in self._registered:
                return False
            self._registered.remove(tgid)
            delete_from_map(self._map_fd("python_processes"), tgid.to_bytes(4, "little"))
            return True

    def pass_over(self, program: Program) -> None:
        """Ignore, for a minute, all processes that run ``program``. Raises ``OSError``."""
        until_ns = time.clock_gettime_ns(time.CLOCK_BOOTTIME) + _OTHER_PROGRAM_NS
        with self._lock:
            if self._is_open:
                key, value = _PROGRAM.pack(*program), _TIME.pack(until_ns)
                update_map(self._map_fd("other_programs"), key, value)

    def receive(self) -> None:
        """Receive the descriptions in the ring.

        After the call, all code objects in samples written before the call have descriptions.
        """
        with self._lock:
            if not self._is_open:
                return
            for record in self._parser.parse(self._ring.take().data):
                if isinstance(record, ProcessSeen):
                    self._seen.append(record)
                    os.eventfd_write(self._received, 1)
                else:
                    self._codes.add(record)

    def counts(self) -> Mapping[str, int]:
        """Returns the nonzero counters by outcome (:data:`PYTHON_OUTCOMES`), even after closing."""
        with self._lock:
            if not self._is_open:
                return self._last_counts
            words = memoryview(self._lines.copy()).cast("Q")
        totals = [sum(words[place::_LINE_WORDS]) for place in range(len(PYTHON_OUTCOMES))]
        return {name: count for name, count in zip(PYTHON_OUTCOMES, totals, strict=True) if count}

    def _forget(self, code: PythonCode) -> None:
        """Make the BPF program describe a code object again."""
        with self._lock, contextlib.suppress(OSError):  # the entry may have been evicted
            if self._is_open:
                key = _CODE_KEY.pack(code.image, code.address)
                delete_from_map(self._map_fd("codes"), key)

    def close(self) -> None:
        """Unmap the maps, and reject further processes. Leaves the descriptors open. Idempotent."""
        with self._lock:
            if self._is_open:
                self._last_counts = self.counts()
                self._is_open = False
                self._codes.on_dropped = None
                self._close()
