"""Layouts of CPython that the program needs to read frames: structs of python_types.bpf.h."""

from __future__ import annotations

import struct
from typing import NamedTuple

PYTHON_CFRAME = 1
"""The current frame is in a struct on the C stack, ``_PyCFrame`` (3.11, 3.12)."""
PYTHON_IS_ENTRY = 2
"""Frames say whether C entered them (3.11); later, others lie between them and their callers."""


class PythonLayout(NamedTuple):
    """Where a build of CPython has what is read (``struct python_layout``); offsets in bytes.

    Attributes:
        flags: ``PYTHON_CFRAME``, ``PYTHON_IS_ENTRY``.
        interpreters_head: the first interpreter, in ``_PyRuntime``.
        interpreter_next: the next one, in an interpreter.
        interpreter_threads: the first thread state, in an interpreter.
        thread_bytes: of a thread state, all that is read.
        thread_previous: the state before it in the list, in a thread state.
        thread_next: the state after it in the list, in a thread state.
        thread_interpreter: the interpreter, in a thread state.
        thread_native: the thread's gettid(2), in a thread state.
        thread_status: bits; that of value 8 is set if its thread used this state last (3.13 on),
            in a thread state; 0 if there are none.
        thread_frame: the current frame, or ``_PyCFrame``, in a thread state.
        thread_chunk: the chunk of memory with the newest frames, in a thread state; followed by the
            end of its used part and the end of the chunk.
        cframe_frame: the current frame, in a ``_PyCFrame``.
        frame_bytes: of a frame, what comes before its variables.
        frame_code: the code object, in a frame; the lowest two bits may be set.
        frame_previous: the frame that called it.
        frame_instruction: the instruction that runs, or ran last.
        frame_owner: who has its memory, a byte: 1 for generators.
        frame_entry: whether C entered it, a byte, with ``PYTHON_IS_ENTRY``.
        frame_header: bytes of a frame before its variables; 0 if ``code_frame_words`` covers all.
        entry_owner: lowest owner of frames that are entries from C, not functions.
        generator_state_back: bytes from a generator's state, a byte, to its frame.
        generator_executing: the state of one that runs.
        code_bytes: of a code object, what comes before its instructions.
        code_traceable: index of the first instruction of the function itself, 32 bits.
        code_frame_words: words of its frames, 32 bits; 0 if only the following two are known.
        code_stack_words: words of the stack in its frames, 32 bits.
        code_variables: words of variables in its frames, 32 bits.
        code_version: distinguishes code objects, 32 bits; 0 if there is none.
        code_first_line: 32 bits.
        code_file: a string.
        code_name: the qualified name, a string.
        code_table: the line table, bytes.
        string_ascii: the characters of a string that is ASCII.
        string_other: those of another one.
        string_kind_shift: where a string's state has the bytes of a character, three bits.
        string_ascii_shift: where it says that the string is ASCII, one bit.
    """

    flags: int
    interpreters_head: int
    interpreter_next: int
    interpreter_threads: int
    thread_bytes: int
    thread_previous: int
    thread_next: int
    thread_interpreter: int
    thread_native: int
    thread_status: int
    thread_frame: int
    thread_chunk: int
    cframe_frame: int
    frame_bytes: int
    frame_code: int
    frame_previous: int
    frame_instruction: int
    frame_owner: int
    frame_entry: int
    frame_header: int
    entry_owner: int
    generator_state_back: int
    generator_executing: int
    code_bytes: int
    code_traceable: int
    code_frame_words: int
    code_stack_words: int
    code_variables: int
    code_version: int
    code_first_line: int
    code_file: int
    code_name: int
    code_table: int
    string_ascii: int
    string_other: int
    string_kind_shift: int
    string_ascii_shift: int

    def pack(self) -> bytes:
        """The struct: words of 64 bits."""
        return struct.pack(f"={len(self)}Q", *self)


class PythonProcess(NamedTuple):
    """Addresses in a process that runs CPython (part of ``struct python_process``).

    Attributes:
        runtime_at: of ``_PyRuntime``.
        code_type: of ``PyCode_Type``.
        eval_start: of ``_PyEval_EvalFrameDefault``, the interpreter's loop.
        eval_bytes: of it that run before its frame is the current one; 0: that is never seen.
        image_tag: distinguishes stacks of the process's present program.
    """

    runtime_at: int
    code_type: int
    eval_start: int
    eval_bytes: int
    image_tag: int = 0
