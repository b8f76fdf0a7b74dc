"""The maps by which the program reads Python frames: processes, layouts, descriptions, counts."""

from __future__ import annotations

import contextlib
import mmap
import struct
import threading
from collections.abc import Callable, Mapping
from typing import Final, NamedTuple

from otel_kprofiler.bpf.btf import find_member_offsets
from otel_kprofiler.bpf.loader import delete_from_map, update_map
from otel_kprofiler.bpf.python import PythonLayout, PythonProcess
from otel_kprofiler.bpf.python_codes import CodeParser
from otel_kprofiler.bpf.ring import RingMemory, RingReader
from otel_kprofiler.model import KnownCodes, PythonCode

MAX_PYTHON_PROCESSES: Final = 4096
_MAX_LAYOUTS: Final = 64
_THREADS: Final = 8192
_OWN_THREADS: Final = 1024  # of a service, whose spans are found without frames, too
_CODES: Final = 16384
_CONFIG: Final = struct.Struct("=6Q")
_PROCESS: Final = struct.Struct("=7Q")
_CODE_KEY: Final = struct.Struct("=QQ")
_FIRST: Final = bytes(4)
_WORD_BYTES: Final = 8

_LINE_BYTES: Final = 256
_LINE_WORDS: Final = _LINE_BYTES // 8
PYTHON_OUTCOMES: Final = (
    "complete", "truncated", "other_image", "interpreters", "no_thread", "threads", "no_frame",
    "entering", "unrooted", "unreadable", "not_code", "outside", "not_running", "unused",
    "not_adjacent", "described", "ring_full", "code_unreadable", "too_many", "no_table",
)  # fmt: skip
"""What came of stacks, from ``described`` on of code objects: ``enum python_outcomes``."""


class PythonOffsets(NamedTuple):
    """Offsets in the kernel's structs (``struct python_config``)."""

    task_exec_id: int
    task_pid: int
    pid_level: int
    pid_numbers: int
    number_bytes: int


def find_python_offsets(btf: bytes) -> PythonOffsets | None:
    """What the program must know of a kernel, from its BTF; None if it has other structs."""
    task = find_member_offsets(btf, "task_struct", ("self_exec_id", "thread_pid"))
    pid = find_member_offsets(btf, "pid", ("level", "numbers"))
    number = find_member_offsets(btf, "upid", ("nr", "ns"))
    if task is None or pid is None or number != (0, _WORD_BYTES):
        return None
    return PythonOffsets(task[0], task[1], pid[0], pid[1], 2 * _WORD_BYTES)


def python_map_entries(possible_cpus: int, ring_bytes: int) -> dict[str, int]:
    """Sizes of the maps; a ring of 0 bytes: no frames are read."""
    if not ring_bytes:
        names = ("python_processes", "codes", "python_lines")
        others = {"python_threads": _OWN_THREADS, "python_codes": mmap.PAGESIZE}
        return dict.fromkeys(names, 1) | others
    return {
        "python_processes": MAX_PYTHON_PROCESSES,
        "python_threads": _THREADS,
        "codes": _CODES,
        "python_lines": possible_cpus,
        "python_codes": ring_bytes,
    }


class PythonMaps:
    """Registers processes, and receives the descriptions of their code objects. Thread-safe.

    Args:
        map_fd: gives the descriptor of a map by name. They belong to the loaded object.
        offsets: of the running kernel.
        cpus: number of possible CPUs.
        ring_bytes: size of the ring of descriptions.
        codes: receives the descriptions. What it drops is described again when it is seen again.

    Raises:
        OSError: a map cannot be mapped.
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
        self._lock = threading.RLock()
        self._is_open = True
        self._last_counts: Mapping[str, int] = {}
        self._parser = CodeParser()
        size = cpus * _LINE_BYTES
        with contextlib.ExitStack() as undo:
            self._lines = mmap.mmap(
                map_fd("python_lines"),
                -(-size // mmap.PAGESIZE) * mmap.PAGESIZE,
                mmap.MAP_SHARED,
                mmap.PROT_READ,
            )
            undo.callback(self._lines.close)
            self._words = memoryview(self._lines)[:size].cast("Q")
            undo.callback(self._words.release)
            self._ring = RingReader(RingMemory(map_fd("python_codes"), ring_bytes), ring_bytes)
            undo.callback(self._ring.close)
            codes.on_dropped = self._forget
            self._close = undo.pop_all().close

    def limit(self, max_frames: int) -> None:
        """Read this many frames of a stack, 0 to 127; 0: none at all.

        Raises:
            OSError: the kernel refused.
        """
        update_map(self._map_fd("python_config"), _FIRST, _CONFIG.pack(max_frames, *self._offsets))

    def register(self, tgid: int, layout: PythonLayout, process: PythonProcess) -> bool:
        """Read the frames of a process from now on; False if there is no room for it.

        It is known by the program that it runs when it is next sampled: after another execve(2) it
        has no Python frames, until it is registered again.

        Args:
            tgid: process id as samples have it.
            layout: of its interpreter.
            process: its addresses.

        Raises:
            OSError: the kernel refused.
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
                0,
            )
            update_map(self._map_fd("python_processes"), tgid.to_bytes(4, "little"), value)
            self._registered.add(tgid)
            return True

    def release(self, tgid: int) -> bool:
        """Read no more frames of a process; whether it was registered."""
        with self._lock:
            if not self._is_open or tgid not in self._registered:
                return False
            self._registered.remove(tgid)
            delete_from_map(self._map_fd("python_processes"), tgid.to_bytes(4, "little"))
            return True

    def receive(self) -> None:
        """Take the descriptions that are in the ring.

        Samples that were complete before have the descriptions of all of their code objects.
        """
        with self._lock:
            if not self._is_open:
                return
            data = self._ring.take().data
            for code in self._parser.parse(data):
                self._codes.add(code)

    def counts(self) -> Mapping[str, int]:
        """What came of stacks and descriptions by :data:`PYTHON_OUTCOMES`, but for zeros.

        Also after :meth:`close`.
        """
        with self._lock:
            if not self._is_open:
                return self._last_counts
            words = self._words.tolist()
        totals = [sum(words[place::_LINE_WORDS]) for place in range(len(PYTHON_OUTCOMES))]
        return {name: count for name, count in zip(PYTHON_OUTCOMES, totals, strict=True) if count}

    def _forget(self, code: PythonCode) -> None:
        """Let the program describe a code object again."""
        with self._lock, contextlib.suppress(OSError):  # the map may have evicted it
            if self._is_open:
                key = _CODE_KEY.pack(code.image, code.address)
                delete_from_map(self._map_fd("codes"), key)

    def before_fork(self) -> None:
        """Take the lock, which another thread might otherwise hold forever in the child."""
        self._lock.acquire()

    def after_fork(self) -> None:
        """Release the lock."""
        self._lock.release()

    def close(self) -> None:
        """Unmap, and accept no more processes; the owner of the maps closes them. Idempotent."""
        with self._lock:
            if self._is_open:
                self._last_counts = self.counts()
                self._is_open = False
                self._codes.on_dropped = None
                self._close()
