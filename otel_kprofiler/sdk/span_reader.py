"""Follows pointers from a thread's state to its current span, as the sampler does.

:mod:`.span_path` uses this module to compare the path with the interpreter's view before the
sampler follows the path. The structs are those of CPython 3.11 to 3.14 (pycore_context.h,
Python/hamt.c, pycore_dict.h and Objects/dictobject.c). The BPF program (``python_span.bpf.h``)
reads the same fields as this module.
"""

import ctypes
import os
from collections.abc import Callable
from struct import Struct
from typing import Final

from otel_kprofiler.bpf import VALUES_BY_POINTER, VALUES_TAGGED, SpanPath

Read = Callable[[int, int], bytes]
"""A function that returns the requested number of bytes at an address, or raises ``OSError``."""

MAX_THREADS: Final = 1024
_MAX_LEVELS: Final = 8
_MAX_EQUAL_HASHES: Final = 8
_MAX_PROBES: Final = 32
_MAX_LOG2_SIZE: Final = 15
_GENERAL_KEYS: Final = 0
_UNICODE_KEYS: Final = 1
_TYPE_AT: Final = 8
_CONTEXT_HAMT_AT: Final = 24
_HAMT_ROOT_AT: Final = 16
_CHILDREN_AT: Final = 16
_ENTRIES_AT: Final = 32
_INDICES_AT: Final = 32
_VALUES_POINTER_AT: Final = -32
_DICT_POINTER_AT: Final = -24
_INLINE_VALUES_AT: Final = 16
_INLINE_VALUES_HEAD: Final = 8

_WORD: Final = Struct("=Q")
_PAIR: Final = Struct("=2Q")
_NODE: Final = Struct("=8xQQI4x")  # type, size, bitmap
_DICT: Final = Struct("=8xQ16xQQ")  # type, keys, values
_KEYS: Final = Struct("=8xBBB13xQ")  # dk_log2_size, dk_log2_index_bytes, dk_kind, dk_nentries


class _Span(ctypes.Structure):
    """``struct iovec``."""

    _fields_ = (("base", ctypes.c_void_p), ("length", ctypes.c_size_t))


def read_own_memory(address: int, size: int) -> bytes:
    """Reads this process's memory.

    Raises ``OSError`` if the address is unmapped, or seccomp forbids the read.
    """
    buffer = ctypes.create_string_buffer(size)
    to, source = _Span(ctypes.addressof(buffer), size), _Span(address & (1 << 64) - 1, size)
    read = _libc.process_vm_readv
    done = read(os.getpid(), ctypes.byref(to), 1, ctypes.byref(source), 1, 0)
    if done != size:
        number = ctypes.get_errno() if done < 0 else 14  # EFAULT
        raise OSError(number, f"cannot read {size} bytes at {address:#x}: {os.strerror(number)}")
    return buffer.raw


# Calls through PyDLL keep the GIL, so the list of thread states cannot change during a call.
_libc: Final = ctypes.PyDLL(None, use_errno=True)
_libc.process_vm_readv.argtypes = (
    ctypes.c_int, ctypes.c_void_p, ctypes.c_ulong, ctypes.c_void_p, ctypes.c_ulong, ctypes.c_ulong,
)  # fmt: skip
_libc.process_vm_readv.restype = ctypes.c_ssize_t


class SpanReader:
    """Reads a thread's span like the sampler. Methods return 0 if nothing is found."""

    def __init__(self, path: SpanPath, read: Read = read_own_memory) -> None:
        self._path = path
        self._read = read

    def find_span_context(self, tid: int) -> int:
        """Returns the address of a thread's current span context."""
        path = self._path
        try:
            keys = self._find_otel_context(tid)
            span = self.find_in_dict(keys, path.span_key, path.span_key_hash) if keys else 0
            return self.find_context_of(span) if span else 0
        except OSError:
            return 0

    def find_labels(self, tid: int) -> int:
        """Returns the address of the ``int`` that holds a thread's current label set number."""
        path = self._path
        try:
            keys = self._find_otel_context(tid)
            return self.find_in_dict(keys, path.labels_key, path.labels_key_hash) if keys else 0
        except OSError:
            return 0

    def find_thread_state(self, tid: int) -> int:
        """Returns the address of a thread's state."""
        state = self._path.oldest_thread
        for _ in range(MAX_THREADS):
            if not state or self._word(state + self._path.tid_at) == tid:
                return state
            state = self._word(state)
        return 0

    def find_variable(self, node: int) -> int:
        """Returns the value of OpenTelemetry's context variable in a HAMT, given its root node."""
        path, hash_ = self._path, self._path.variable_hash
        for _ in range(_MAX_LEVELS):
            type_, size, bitmap = self._unpack(_NODE, node)
            if type_ == path.bitmap_type:
                bit = 1 << (hash_ & 31)
                place = (bitmap & (bit - 1)).bit_count()
                if not bitmap & bit:
                    return 0
                key, value = self._unpack(_PAIR, node + _ENTRIES_AT + 16 * place)
                if key:
                    return value if key == path.variable else 0
                node = value
            elif type_ == path.array_type:
                node = self._word(node + _CHILDREN_AT + 8 * (hash_ & 31))
                if not node:
                    return 0
            elif type_ == path.collision_type:
                return self._find_among_equals(node, size // 2)
            else:
                return 0
            hash_ >>= 5
        return 0

    def find_in_dict(self, keys: int, key: int, hash_: int) -> int:
        """Returns the value for a string key in a dictionary's combined table."""
        log2_size, log2_bytes, kind, entries = self._unpack(_KEYS, keys)
        if log2_size > _MAX_LOG2_SIZE or kind > _UNICODE_KEYS:
            return 0
        width = 1 if log2_size < 8 else 2
        mask = (1 << log2_size) - 1
        first = keys + _INDICES_AT + (1 << log2_bytes)
        step = 24 if kind == _GENERAL_KEYS else 16
        place = hash_ & mask
        for _ in range(_MAX_PROBES):
            raw = self._read(keys + _INDICES_AT + width * place, width)
            index = int.from_bytes(raw, "little", signed=True)
            if index == -1:
                return 0
            if 0 <= index < entries:
                candidate, value = self._unpack(_PAIR, first + step * index + step - 16)
                if candidate == key:
                    return value
            hash_ >>= 5
            place = (place * 5 + hash_ + 1) & mask
        return 0

    def find_context_of(self, span: int) -> int:
        """Returns the address of a span's context."""
        path, type_ = self._path, self._word(span + _TYPE_AT)
        for span_class in path.classes:
            if span_class.type == type_:
                break
        else:
            return 0
        values, head, dict_ = find_values(self._read, path.values_style, span)
        if not values:
            type_, keys, values = self._unpack(_DICT, dict_)
            if type_ != path.dict_type:
                return 0
            if not values:
                return self.find_in_dict(keys, path.attribute, path.attribute_hash)
            if keys != span_class.keys:
                return 0
        return self._word(values + head + 8 * span_class.place)

    def _find_otel_context(self, tid: int) -> int:
        """Returns the address of the dict keys of a thread's current OpenTelemetry context."""
        path = self._path
        state = self.find_thread_state(tid)
        context = self._word(state + path.context_at) if state else 0
        hamt = self._typed(context, path.context_type, _CONTEXT_HAMT_AT)
        root = self._typed(hamt, path.hamt_type, _HAMT_ROOT_AT)
        current = self.find_variable(root) if root else 0
        if not current:
            return 0
        type_, keys, values = self._unpack(_DICT, current)
        return 0 if type_ != path.otel_context_type or values else keys

    def _find_among_equals(self, node: int, size: int) -> int:
        for number in range(min(size, _MAX_EQUAL_HASHES)):
            key, value = self._unpack(_PAIR, node + _ENTRIES_AT + 16 * number)
            if key == self._path.variable:
                return value
        return 0

    def _typed(self, address: int, type_: int, at: int) -> int:
        """Returns the reference at offset ``at`` in an object; 0 if its type is not ``type_``."""
        if not address or self._word(address + _TYPE_AT) != type_:
            return 0
        return self._word(address + at)

    def _word(self, address: int) -> int:
        return read_word(self._read, address)

    def _unpack(self, layout: Struct, address: int) -> tuple[int, ...]:
        return layout.unpack(self._read(address, layout.size))


def read_word(read: Read, address: int) -> int:
    """Returns the word at an address, or raises ``OSError``."""
    word: int = _WORD.unpack(read(address, _WORD.size))[0]
    return word


def read_dict(read: Read, address: int) -> tuple[int, int, int]:
    """Returns a dictionary's type, keys and values (0 if combined), or raises ``OSError``."""
    type_, keys, values = _DICT.unpack(read(address, _DICT.size))
    return type_, keys, values


def find_values(read: Read, style: int, instance: int) -> tuple[int, int, int]:
    """Returns (values address, values header size, dictionary address) of an instance.

    The address of the values is 0 if they are in the dictionary. Raises ``OSError`` if a read
    fails.
    """
    dict_ = read_word(read, instance + _DICT_POINTER_AT)
    if style == VALUES_BY_POINTER:
        return read_word(read, instance + _VALUES_POINTER_AT), 0, dict_
    if style == VALUES_TAGGED:
        return (dict_ + 1 if dict_ & 1 else 0), 0, dict_
    inline = instance + _INLINE_VALUES_AT
    valid = read(inline, 4)[3]
    return (inline if valid else 0), _INLINE_VALUES_HEAD, dict_
