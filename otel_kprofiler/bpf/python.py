"""CPython object layouts for the BPF program that reads frames (structs in python_types.bpf.h)."""

import struct
from typing import NamedTuple

PYTHON_CFRAME = 1
"""A struct on the C stack, ``_PyCFrame``, points to the current frame (CPython 3.11 and 3.12)."""
PYTHON_IS_ENTRY = 2
"""Frames entered from C are flagged (CPython 3.11). Later versions insert entry frames instead."""


class PythonLayout(NamedTuple):
    """Layout of the objects in a build of CPython (``struct python_layout``).

    Unless stated otherwise, a field is the offset, in bytes, of the described item in an object.
    The first part of the field's name is the object's type: interpreter, thread state (``thread``),
    ``_PyCFrame``, frame, code object or string.

    Attributes:
        flags: any of ``PYTHON_CFRAME`` and ``PYTHON_IS_ENTRY``, combined.
        interpreters_head: pointer to the first interpreter, in ``_PyRuntime``.
        interpreter_next: pointer to the next interpreter.
        interpreter_threads: pointer to the interpreter's first thread state.
        thread_bytes: number of bytes to read from a thread state.
        thread_previous: pointer to the previous thread state.
        thread_next: pointer to the next thread state.
        thread_interpreter: pointer to the interpreter.
        thread_native: thread id, as returned by gettid(2).
        thread_status: status bits; 0 if there are none. Since CPython 3.13, bit 3 marks the thread
            state that the thread used last.
        thread_frame: pointer to the current frame, or to ``_PyCFrame``.
        thread_chunk: pointer to the memory chunk with the newest frames. The next two words are the
            end of the chunk's used part and the end of the chunk.
        cframe_frame: pointer to the current frame.
        frame_bytes: number of bytes to read from a frame, up to its variables.
        frame_code: pointer to the code object; the lowest two bits of this pointer may be set.
        frame_previous: pointer to the caller's frame.
        frame_instruction: pointer to the current or last executed instruction.
        frame_owner: byte that identifies the owner of the frame's memory; 1 for a generator.
        frame_entry: byte that is set if the frame was entered from C; used with
            ``PYTHON_IS_ENTRY``.
        frame_header: size in bytes of the header before the variables; 0 if ``code_frame_words``
            includes the header.
        entry_owner: lowest owner value in entry frames, which belong to no function.
        generator_state_back: distance in bytes from a generator's state byte to the generator's
            frame.
        generator_executing: value of a generator's state while the generator runs.
        code_bytes: size in bytes of the header before the instructions.
        code_traceable: index of the first instruction that belongs to the function itself (32
            bits).
        code_frame_words: size of a frame in words (32 bits); 0 if the code object contains only
            ``code_stack_words`` and ``code_variables``.
        code_stack_words: size of a frame's stack in words (32 bits).
        code_variables: size of a frame's variables in words (32 bits).
        code_version: version (32 bits), which distinguishes code objects; 0 if there is none.
        code_first_line: first line of the function (``co_firstlineno``, 32 bits).
        code_file: pointer to the string object with the file name.
        code_name: pointer to the string object with the qualified name.
        code_table: pointer to the line table, a bytes object.
        string_ascii: characters of an ASCII string.
        string_other: characters of a non-ASCII string.
        string_kind_shift: position of the three-bit field in a string's state that holds the number
            of bytes per character.
        string_ascii_shift: position of the bit in a string's state that marks ASCII strings.
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
        """Packs the struct as 64-bit words."""
        return struct.pack(f"={len(self)}Q", *self)


class PythonProcess(NamedTuple):
    """Addresses in a process that runs CPython (part of ``struct python_process``).

    Attributes:
        runtime_at: address of ``_PyRuntime``.
        code_type: address of ``PyCode_Type``.
        eval_start: address of ``_PyEval_EvalFrameDefault``, the evaluation loop.
        eval_bytes: length of the loop's prologue, in which the new frame is not yet the current
            frame; 0 if there is none.
        image_tag: distinguishes the process's current program from its earlier programs.
    """

    runtime_at: int
    code_type: int
    eval_start: int
    eval_bytes: int
    image_tag: int = 0
