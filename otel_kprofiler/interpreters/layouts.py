"""Provides the layouts of threads, frames, code objects and strings, by CPython version.

CPython 3.11 and 3.12 do not publish offsets. On 64-bit machines, all releases of a minor version
share the offsets below. Since CPython 3.13, ``_Py_DebugOffsets`` contains most offsets. Missing
offsets are computed from adjacent members, or hard-coded. Hard-coded offsets are used only if
adjacent members have the expected offsets.
"""

from collections.abc import Mapping
from typing import Final, NamedTuple

from otel_kprofiler.bpf import PYTHON_CFRAME, PYTHON_IS_ENTRY, PythonLayout
from otel_kprofiler.interpreters.debug_offsets import parse_debug_offsets
from otel_kprofiler.interpreters.refusal import InterpreterRefused, Refusal

FIRST_MINOR, LAST_MINOR = 11, 15
MAX_OFFSET: Final = 1 << 20
MAX_THREAD_BYTES, MAX_FRAME_BYTES, MAX_CODE_BYTES = 511, 128, 240
"""Sizes of the largest reads by the BPF program, in bytes; see python_types.bpf.h."""


class Version(NamedTuple):
    """A CPython version; ``level`` is 0xF for releases, and less for pre-releases."""

    major: int
    minor: int
    micro: int
    level: int = 0xF

    def __str__(self) -> str:
        """Formats the version, such as 3.12.1."""
        return f"{self.major}.{self.minor}.{self.micro}"


def parse_version(word: int) -> Version:
    """Parses ``PY_VERSION_HEX``."""
    return Version(word >> 24 & 0xFF, word >> 16 & 0xFF, word >> 8 & 0xFF, word >> 4 & 0xF)


_CODE: Final = {"code_file": 112, "code_name": 128, "code_table": 136}
_STRING_STATE: Final = {"string_kind_shift": 2, "string_ascii_shift": 6}  # bits 0 and 1: interned
_SINCE_3_12: Final = {
    **_CODE,
    **_STRING_STATE,
    "thread_previous": 0,
    "frame_entry": 0,
    "frame_header": 0,
    "entry_owner": 3,
    "generator_state_back": 5,
    "code_frame_words": 76,
    "code_stack_words": 64,
    "code_variables": 72,
    "code_version": 92,
    "code_first_line": 68,
    "string_ascii": 40,
    "string_other": 56,
}
_V3_11: Final = PythonLayout(
    **_CODE,
    **_STRING_STATE,
    flags=PYTHON_CFRAME | PYTHON_IS_ENTRY,
    interpreters_head=40,
    interpreter_next=0,
    interpreter_threads=16,
    thread_bytes=320,
    thread_previous=0,
    thread_next=8,
    thread_interpreter=16,
    thread_native=160,
    thread_status=0,
    thread_frame=56,
    thread_chunk=296,
    cframe_frame=8,
    frame_bytes=72,
    frame_code=32,
    frame_previous=48,
    frame_instruction=56,
    frame_owner=69,
    frame_entry=68,
    frame_header=72,
    entry_owner=255,
    generator_state_back=5,
    generator_executing=0,
    code_bytes=184,
    code_traceable=168,
    code_frame_words=0,
    code_stack_words=68,
    code_variables=76,
    code_version=0,
    code_first_line=72,
    string_ascii=48,
    string_other=72,
)
_V3_12: Final = PythonLayout(
    **_SINCE_3_12,
    flags=PYTHON_CFRAME,
    interpreters_head=40,
    interpreter_next=0,
    interpreter_threads=72,
    thread_bytes=256,
    thread_next=8,
    thread_interpreter=16,
    thread_native=144,
    thread_status=0,
    thread_frame=56,
    thread_chunk=232,
    cframe_frame=0,
    frame_bytes=72,
    frame_code=0,
    frame_previous=8,
    frame_instruction=56,
    frame_owner=70,
    generator_executing=0,
    code_bytes=192,
    code_traceable=176,
)
_GENERATOR_EXECUTING: Final = {13: 0, 14: 0, 15: 4}
_BESIDE: Final = {
    "thread.prev": 0,
    "code.argcount": 52,
    "code.firstlineno": 68,
    "code.filename": 112,
    "code.qualname": 128,
    "code.linetable": 136,
    "object.type": 8,
    "bytes.length": 16,
    "bytes.data": 32,
    "string.length": 16,
    "string.state": 32,
    "string.ascii_size": 40,
}
"""Expected published offsets, which confirm the hard-coded offsets of adjacent members."""


def make_layout(version: Version, runtime: bytes) -> PythonLayout:
    """Returns the layout of a CPython build.

    ``runtime`` contains the first bytes of ``_PyRuntime``, read from the file or from memory.
    Raises :class:`InterpreterRefused` if the layout is unknown.
    """
    is_final = version.level >= 0xC  # release candidates no longer change the layout
    if version.major != 3 or not FIRST_MINOR <= version.minor <= LAST_MINOR or not is_final:
        raise InterpreterRefused(Refusal.UNKNOWN_VERSION, str(version))
    if version.minor == 11:
        return _V3_11
    if version.minor == 12:
        return _V3_12
    try:
        offsets = parse_debug_offsets(runtime, version.minor)
    except ValueError as error:
        raise InterpreterRefused(Refusal.OTHER_LAYOUT, str(error)) from error
    return _from_offsets(version, offsets)


def _from_offsets(version: Version, offsets: Mapping[str, int]) -> PythonLayout:
    if parse_version(offsets["version"]) != version:
        raise InterpreterRefused(
            Refusal.OTHER_LAYOUT, f"the offsets in the file are for version {offsets['version']:#x}"
        )
    if offsets["free_threaded"]:
        raise InterpreterRefused(Refusal.FREE_THREADED)
    for name, expected in _BESIDE.items():
        if offsets[name] != expected:
            raise InterpreterRefused(Refusal.OTHER_LAYOUT, f"{name} at {offsets[name]}")
    layout = PythonLayout(
        **_SINCE_3_12,
        flags=0,
        interpreters_head=offsets["runtime.interpreters_head"],
        interpreter_next=offsets["interpreter.next"],
        interpreter_threads=offsets["interpreter.threads_head"],
        thread_bytes=offsets["thread.datastack_chunk"] + 24,
        thread_next=offsets["thread.next"],
        thread_interpreter=offsets["thread.interpreter"],
        thread_native=offsets["thread.native_thread_id"],
        thread_status=offsets["thread.status"],
        thread_frame=offsets["thread.current_frame"],
        thread_chunk=offsets["thread.datastack_chunk"],
        cframe_frame=0,
        frame_bytes=offsets["frame.localsplus"],
        frame_code=offsets["frame.executable"],
        frame_previous=offsets["frame.previous"],
        frame_instruction=offsets["frame.instr_ptr"],
        frame_owner=offsets["frame.owner"],
        generator_executing=_GENERATOR_EXECUTING[version.minor],
        code_bytes=offsets["code.co_code_adaptive"],
        code_traceable=offsets["code.co_code_adaptive"] - 16,
    )
    _check(layout)
    return layout


def _check(layout: PythonLayout) -> None:
    """Reject a layout with offsets outside the memory that the BPF program reads."""
    in_thread = max(
        layout.thread_native, layout.thread_status, layout.thread_frame, layout.thread_interpreter
    )
    in_frame = max(layout.frame_code, layout.frame_previous, layout.frame_instruction)
    if (
        max(layout) > MAX_OFFSET
        or not in_thread < layout.thread_chunk < MAX_THREAD_BYTES - 24
        or not in_frame <= layout.frame_bytes - 8 <= MAX_FRAME_BYTES - 8
        or not layout.frame_owner < layout.frame_bytes
        or not layout.code_table < layout.code_traceable < MAX_CODE_BYTES
    ):
        raise InterpreterRefused(Refusal.OTHER_LAYOUT, "an offset is out of bounds")
