"""CPython's layouts for the BPF program that reads frames (structs of python_types.bpf.h)."""

from __future__ import annotations

import struct
from typing import NamedTuple

PYTHON_CFRAME = 1
"""The current frame is in a struct on the C stack, ``_PyCFrame`` (3.11, 3.12)."""
PYTHON_IS_ENTRY = 2
"""Frames have a flag for entry from C (3.11). Later versions insert entry frames instead."""


class PythonLayout(NamedTuple):
    """Offsets in objects of a build of CPython (``struct python_layout``), in bytes.

    Attributes:
        flags: ``PYTHON_CFRAME``, ``PYTHON_IS_ENTRY``.
        interpreters_head: the first interpreter, in ``_PyRuntime``.
        interpreter_next: the next interpreter, in an interpreter.
        interpreter_threads: the first thread state, in an interpreter.
        thread_bytes: number of bytes that are read from a thread state.
        thread_previous: the previous thread state, in a thread state.
        thread_next: the next thread state, in a thread state.
        thread_interpreter: the interpreter, in a thread state.
        thread_native: the thread's gettid(2), in a thread state.
        thread_status: status bits, in a thread state; 0 if it has none. From 3.13 on, bit 3 is set
            if this is the state that the thread used last.
        thread_frame: the current frame, or ``_PyCFrame``, in a thread state.
        thread_chunk: the chunk of memory with the newest frames, in a thread state; the next two
            words are the end of the chunk's used part and the end of the chunk.
        cframe_frame: the current frame, in a ``_PyCFrame``.
        frame_bytes: number of bytes that are read from a frame, up to its variables.
        frame_code: the code object, in a frame; the lowest two bits may be set.
        frame_previous: the caller's frame, in a frame.
        frame_instruction: the current or last instruction, in a frame.
        frame_owner: the owner of a frame's memory, one byte; 1 for generators.
        frame_entry: whether the frame was entered from C, one byte; used with ``PYTHON_IS_ENTRY``.
        frame_header: bytes of a frame before its variables; 0 if ``code_frame_words`` includes
            them.
        entry_owner: lowest owner value in entry frames, which belong to no function.
        generator_state_back: bytes from a generator's state (one byte) to its frame.
        generator_executing: the state of a running generator.
        code_bytes: number of bytes of a code object up to its instructions.
        code_traceable: index of the first instruction of the function itself, 32 bits.
        code_frame_words: size of the code's frames in words, 32 bits; 0 if the code object has only
            the next two sizes.
        code_stack_words: size of the stack in the code's frames, in words, 32 bits.
        code_variables: size of the variables in the code's frames, in words, 32 bits.
        code_version: distinguishes code objects, 32 bits; 0 if there is none.
        code_first_line: first line of the function (``co_firstlineno``), 32 bits.
        code_file: reference to the file name, a string.
        code_name: reference to the qualified name, a string.
        code_table: reference to the line table, bytes.
        string_ascii: the characters of an ASCII string.
        string_other: the characters of another string.
        string_kind_shift: lowest bit of the field with the bytes per character in a string's state,
            three bits.
        string_ascii_shift: number of the flag for ASCII strings in a string's state, one bit.
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
        """Packs the struct: 64-bit words."""
        return struct.pack(f"={len(self)}Q", *self)


class PythonProcess(NamedTuple):
    """Addresses in a process that runs CPython (part of ``struct python_process``).

    Attributes:
        runtime_at: address of ``_PyRuntime``.
        code_type: address of ``PyCode_Type``.
        eval_start: address of ``_PyEval_EvalFrameDefault``, the evaluation loop.
        eval_bytes: length of the loop's prologue, which runs before its frame is the current frame;
            0 if there is none.
        image_tag: distinguishes stacks of the process's current program.
    """

    runtime_at: int
    code_type: int
    eval_start: int
    eval_bytes: int
    image_tag: int = 0
