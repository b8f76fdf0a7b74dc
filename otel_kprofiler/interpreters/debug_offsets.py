"""Parses ``_Py_DebugOffsets``, which holds offsets for debuggers in CPython 3.13 and later.

The struct is at the start of ``_PyRuntime``, so it can be read from the interpreter's file. The
struct is declared in Include/internal/pycore_runtime.h (3.13) and pycore_debug_offsets.h (3.14 and
later). Only new minor versions of CPython insert members.
"""

import struct
from collections.abc import Iterator, Mapping
from typing import Final

COOKIE: Final = b"xdebugpy"
VERSION_AT: Final = len(COOKIE)
MAX_BYTES: Final = 1024

# Members up to the last member used here. /N marks a member that Python 3.N added.
_MEMBERS: Final = """
runtime: size finalizing interpreters_head
interpreter: size id next threads_head threads_main/14 gc modules sysdict builtins gil gil_state
    gil_enabled gil_locked gil_holder code_generation/14 tlbc_generation/14
thread: size prev next interpreter current_frame base_frame/15 last_profiled_frame/15
    last_profiled_frame_seq/15 thread_id native_thread_id datastack_chunk status holds_gil/15
    gil_requested/15 current_exception/15 exc_state/15 exc_value/15
frame: size previous executable instr_ptr localsplus owner stackpointer/14 tlbc_index/14
code: size filename name qualname linetable firstlineno argcount localsplusnames localspluskinds
    co_code_adaptive co_tlbc/14
object: size type
type: size name repr flags basicsize/15 dictoffset/15 heap_size/15 heap_cached_keys/15
tuple: size items length
list: size items length
set: size/14 used/14 table/14 mask/14
dict: size keys values
float: size value
long: size tag digits
bytes: size length data
string: size state length ascii_size compact_size/15
gc: size collecting frame/15 generation_stats_size/15 generation_stats/15
generator: size/14 name/14 iframe/14 frame_state/14
"""


def _parse_members(minor: int) -> Iterator[str]:
    part = ""
    for word in _MEMBERS.split():
        name, _, since = word.partition("/")
        if name.endswith(":"):
            part = name.removesuffix(":")
        elif not since or int(since) <= minor:
            yield f"{part}.{name}"


def parse_debug_offsets(data: bytes, minor: int) -> Mapping[str, int]:
    """Returns offsets and sizes by name, such as ``frame.previous``; ``free_threaded`` is 0 or 1.

    ``data`` is the beginning of ``_PyRuntime``. ``minor`` is 13 for CPython 3.13. Raises
    ``ValueError`` if the data is not a ``_Py_DebugOffsets``.
    """
    names = ("version", "free_threaded", *_parse_members(minor))
    words = struct.Struct(f"<{len(names)}Q")
    if not data.startswith(COOKIE) or len(data) < len(COOKIE) + words.size:
        raise ValueError("the file has no _Py_DebugOffsets")
    return dict(zip(names, words.unpack_from(data, len(COOKIE)), strict=True))
