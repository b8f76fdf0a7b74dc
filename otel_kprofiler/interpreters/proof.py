"""Verifies a CPython layout against this process, reading memory as the BPF program does.

Nearly all the memory belongs to the calling thread, and does not change during a read. The links
between thread states change when a thread starts or exits, so they are read until two reads agree.
"""

import contextlib
import ctypes
import opcode
import os
import sys
import threading
from collections.abc import Callable, Iterator
from types import CodeType, FrameType
from typing import Final, NamedTuple

from otel_kprofiler.bpf import PYTHON_CFRAME, PYTHON_IS_ENTRY, PythonLayout, PythonProcess
from otel_kprofiler.interpreters.refusal import InterpreterRefused, Refusal

_MAX_FRAMES: Final = 100_000
_TRIES: Final = 100
"""Maximum number of attempts to find the calling thread's state, at 50 µs each."""
_MAX_INTERPRETERS: Final = 10_000
_IS_THREADS: Final = 8
"""The ``bound_gilstate`` bit of a thread's status; see python_thread.bpf.h."""
_TYPE, _SIZE, _STATE, _DATA = 8, 16, 32, 32  # offsets in objects
_POINTER_MASK: Final = ~3
_OWNER_GENERATOR: Final = 1
_ENCODINGS: Final = {1: "latin-1", 2: "utf-16-le", 4: "utf-32-le"}
_NAMES: Final = ("plain", "caf\xe9", "\u043f\u0440\u0438", "\U00020000")
"""Names stored as ASCII, and with 1, 2 and 4 bytes per character."""
_MAX_LENGTH: Final = 1000
_RESUME: Final = opcode.opmap["RESUME"]


class _Piece(ctypes.Structure):
    _fields_ = (("at", ctypes.c_void_p), ("size", ctypes.c_size_t))


class OwnMemory:
    """Reads this process's memory with process_vm_readv(2), which fails at unmapped addresses."""

    def __init__(self) -> None:
        # A PyDLL holds the GIL, so no other thread starts or exits during the call.
        self._call = ctypes.PyDLL(None, use_errno=True).process_vm_readv
        self._pid = os.getpid()
        self._target, self._local, self._remote = ctypes.c_uint64(), _Piece(), _Piece()
        self._pieces = ctypes.byref(self._local), 1, ctypes.byref(self._remote), 1, 0
        self._local.at = ctypes.addressof(self._target)

    def read(self, at: int, size: int = 8) -> int:
        """Reads an unsigned number of up to 8 bytes.

        During the call, this method's frame is the thread's newest frame. Raises ``OSError`` if the
        address is unmapped, or the kernel refuses the read.
        """
        self._target.value = 0
        self._remote.at, self._local.size, self._remote.size = at, size, size
        if self._call(self._pid, *self._pieces) != size:
            raise OSError(ctypes.get_errno(), f"{os.strerror(ctypes.get_errno())} at {at:#x}")
        return self._target.value

    def read_bytes(self, at: int, size: int) -> bytes:
        """Reads bytes one by one. Raises the same exceptions as :meth:`read`."""
        return b"".join(self.read(at + place, 1).to_bytes() for place in range(size))


class _Frame(NamedTuple):
    """A frame in memory; ``offset`` is in bytes, from the code object to the instruction."""

    address: int
    code: int
    offset: int
    from_c: bool
    in_generator: bool


class _Look(NamedTuple):
    """A thread's frames, as read from memory and as reported by Python, innermost first."""

    found: list[_Frame]
    expected: list[tuple[CodeType, int]]


def prove(layout: PythonLayout, process: PythonProcess) -> None:
    """Verify that the BPF program would read this process correctly. Takes a few milliseconds.

    Raises :class:`InterpreterRefused` if memory differs from what Python reports, or is unreadable.
    """
    waiting = threading.Lock()
    waiting.acquire()  # a second thread is needed to verify the links between thread states
    other = threading.Thread(target=waiting.acquire, name="kprofiler-proof", daemon=True)
    other.start()
    try:
        Proof(layout, process, OwnMemory()).prove()
    except OSError as error:
        raise InterpreterRefused(Refusal.NOT_PROVED, str(error)) from error
    finally:
        waiting.release()
        other.join()


class Proof:
    """Reads this process's memory, and compares it with what Python reports."""

    def __init__(self, layout: PythonLayout, process: PythonProcess, memory: OwnMemory) -> None:
        self._layout = layout
        self._process = process
        self._memory = memory
        self._read = memory.read

    def prove(self) -> None:
        """Compare memory with what Python reports. Raises ``InterpreterRefused`` on a mismatch."""
        thread = self._find_thread()

        def look() -> _Look:
            expected = []
            frame: FrameType | None = sys._getframe(1)  # noqa: SLF001 - documented, despite its name
            while frame is not None:
                expected.append((frame.f_code, frame.f_lasti))
                frame = frame.f_back
            return _Look(self._walk(thread), expected)

        for situation, from_c in _SITUATIONS.items():
            seen = situation(look)
            _require(
                [frame.from_c for frame in seen.found[:2]] == [from_c, False], "entries from C"
            )
            frames = [(frame.code, frame.offset) for frame in seen.found]
            _require(frames == [(id(code), last) for code, last in seen.expected], "frames")
            _require(seen.found[0].in_generator == (situation is _resumed), "owner of a frame")
        generator = _generate(look)
        frame = next(generator).found[0].address
        state = self._read(frame - self._layout.generator_state_back, 1)
        _require(state != self._layout.generator_executing, "state of a suspended generator")
        self._compare_codes([*map(_make_code, _NAMES), _generate.__code__])

    def _find_thread(self) -> int:
        """Finds the calling thread's state in the interpreter's list.

        Threads that start or exit change the list, so only repeated mismatches rule out the layout.
        """
        for _ in range(_TRIES - 1):
            with contextlib.suppress(InterpreterRefused, OSError):
                return self._look_up_thread()
        return self._look_up_thread()

    def _look_up_thread(self) -> int:
        layout, read = self._layout, self._read
        thread = _call_api("PyThreadState_Get")
        interpreter = read(self._process.runtime_at + layout.interpreters_head)
        for _ in range(_MAX_INTERPRETERS):
            if interpreter == _call_api("PyInterpreterState_Get"):
                break
            interpreter = read(interpreter + layout.interpreter_next)
        _require(read(thread + layout.thread_native) == threading.get_native_id(), "thread id")
        _require(read(thread + layout.thread_interpreter) == interpreter, "interpreter")
        status = read(thread + layout.thread_status, 4) if layout.thread_status else _IS_THREADS
        _require(bool(status & _IS_THREADS), "status of a thread")
        first = read(interpreter + layout.interpreter_threads)
        _require(read(first + layout.thread_interpreter) == interpreter, "first thread")
        _require(not read(first + layout.thread_previous), "order of threads")
        previous = read(thread + layout.thread_previous)
        after = read(thread + layout.thread_next)
        link = read(previous + layout.thread_next) if previous else first
        _require(link == thread, "order of threads")
        _require(bool(previous or after), "threads")
        _require(not after or read(after + layout.thread_previous) == thread, "order of threads")
        return thread

    def _walk(self, thread: int) -> list[_Frame]:
        """Walks the frames outwards, skipping those of this method and its caller."""
        layout, read = self._layout, self._read
        at = read(thread + layout.thread_frame)
        if layout.flags & PYTHON_CFRAME:
            at = read(at + layout.cframe_frame)
        top = read(thread + layout.thread_chunk + 8)
        size = self._frame_bytes(id(OwnMemory.read.__code__))
        _require(at + size == top, "size of frames")
        frames: list[_Frame] = []
        for _ in range(_MAX_FRAMES):
            if not at:
                break
            owner = read(at + layout.frame_owner, 1)
            if owner >= layout.entry_owner:
                _require(bool(frames), "the newest frame")
                frames[-1] = frames[-1]._replace(from_c=True)
            else:
                frames.append(self._read_frame(at, in_generator=owner == _OWNER_GENERATOR))
            at = read(at + layout.frame_previous)
        return frames[3:]

    def _read_frame(self, at: int, *, in_generator: bool) -> _Frame:
        layout, read = self._layout, self._read
        code = read(at + layout.frame_code) & _POINTER_MASK
        offset = read(at + layout.frame_instruction) - code - layout.code_bytes
        is_entry = layout.flags & PYTHON_IS_ENTRY and read(at + layout.frame_entry, 1)
        if in_generator:
            state = read(at - layout.generator_state_back, 1)
            _require(state == layout.generator_executing, "state of a generator")
        return _Frame(at, code, offset, bool(is_entry), in_generator)

    def _frame_bytes(self, code: int) -> int:
        layout, read = self._layout, self._read
        if layout.code_frame_words:
            return 8 * read(code + layout.code_frame_words, 4)
        words = read(code + layout.code_stack_words, 4) + read(code + layout.code_variables, 4)
        return layout.frame_header + 8 * words

    def _compare_codes(self, codes: list[CodeType]) -> None:
        layout, read = self._layout, self._read
        for code in codes:
            at, units = id(code), code.co_code[::2]
            table = read(at + layout.code_table)
            _require(read(at + _TYPE) == self._process.code_type, "type of code objects")
            _require(read(at + _SIZE) == len(units), "size of code objects")
            _require(read(at + layout.code_first_line, 4) == code.co_firstlineno, "first line")
            first = units.index(_RESUME)
            _require(read(at + layout.code_traceable, 4) == first, "first traceable instruction")
            _require(self._string(at + layout.code_file) == code.co_filename, "file")
            _require(self._string(at + layout.code_name) == code.co_qualname, "name")
            _require(read(table + _SIZE) == len(code.co_linetable), "size of a line table")
            content = self._memory.read_bytes(table + _DATA, len(code.co_linetable))
            _require(content == code.co_linetable, "line table")
        if layout.code_version:
            versions = {read(id(code) + layout.code_version, 4) for code in codes}
            _require(len(versions) == len(codes), "versions of code objects")

    def _string(self, pointer: int) -> str:
        layout, read = self._layout, self._read
        at = read(pointer)
        length, state = read(at + _SIZE), read(at + _STATE, 4)
        width = state >> layout.string_kind_shift & 7
        is_ascii = state >> layout.string_ascii_shift & 1
        _require(width in _ENCODINGS and length < _MAX_LENGTH, "strings")
        start = at + (layout.string_ascii if is_ascii else layout.string_other)
        return self._memory.read_bytes(start, length * width).decode(_ENCODINGS[width], "replace")


def _call_api(name: str) -> int:
    function = getattr(ctypes.pythonapi, name)
    function.restype = ctypes.c_void_p
    return int(function())


def _require(holds: bool, what: str) -> None:
    if not holds:
        raise InterpreterRefused(Refusal.NOT_PROVED, what)


def _call(look: Callable[[], _Look]) -> _Look:
    return look()


def _generate(look: Callable[[], _Look]) -> Iterator[_Look]:
    yield look()


def _plain(look: Callable[[], _Look]) -> _Look:
    return _call(look)


def _called_by_c(look: Callable[[], _Look]) -> _Look:
    return next(map(_call, (look,)))


def _resumed(look: Callable[[], _Look]) -> _Look:
    return next(_generate(look))


_SITUATIONS: Final = {_plain: False, _called_by_c: True, _resumed: True}
"""Maps each function that calls its argument to whether C code makes the call."""


def _make_code(name: str) -> CodeType:
    """Returns the code object of the method ``Class.NAME`` in ``NAME.py``."""
    code = compile(f"class Class:\n  def {name}(self): pass", f"{name}.py", "exec")
    for _ in range(2):
        code = next(constant for constant in code.co_consts if isinstance(constant, CodeType))
    return code
