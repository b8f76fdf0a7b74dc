"""Reads the loaded BPF programs with bpf(2).

Formats: include/uapi/linux/bpf.h (``union bpf_attr``, ``struct bpf_prog_info``,
``struct bpf_func_info``). Symbol names follow ``bpf_get_prog_name`` in kernel/bpf/core.c.
"""

import ctypes
import errno
import os
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final, NamedTuple

from otel_kprofiler.bpf import ProgramBtf, bpf_call, parse_program_btf
from otel_kprofiler.model import Ksymbol, ModuleKind
from otel_kprofiler.tracking.ksymbol_records import PROGRAM_PREFIX

# enum bpf_cmd
_PROG_GET_NEXT_ID: Final = 11
_PROG_GET_FD_BY_ID: Final = 13
_OBJ_GET_INFO_BY_FD: Final = 15
_BTF_GET_FD_BY_ID: Final = 19

_NAME_BYTES: Final = 511  # KSYM_NAME_LEN - 1
_FUNC_INFO: Final = struct.Struct("=II")  # instruction, BTF type
_LINE_INFO: Final = struct.Struct("=IIII")  # instruction, file name, text, line and column
_USUAL_FUNCTIONS: Final = 8
_BTF_KEPT: Final = 64


class _IdAttributes(ctypes.Structure):
    """``union bpf_attr`` for BPF_*_GET_*_ID."""

    _fields_ = (("id", ctypes.c_uint32), ("next_id", ctypes.c_uint32), ("flags", ctypes.c_uint32))


class _InfoAttributes(ctypes.Structure):
    """``union bpf_attr`` for BPF_OBJ_GET_INFO_BY_FD."""

    _fields_ = (("fd", ctypes.c_uint32), ("size", ctypes.c_uint32), ("info", ctypes.c_uint64))


class _ProgramInfo(ctypes.Structure):
    """``struct bpf_prog_info`` up to ``attach_btf_id``; older kernels fill only a prefix."""

    _fields_ = (
        ("type", ctypes.c_uint32),
        ("id", ctypes.c_uint32),
        ("tag", ctypes.c_uint8 * 8),
        ("jited_bytes", ctypes.c_uint32),
        ("xlated_bytes", ctypes.c_uint32),
        ("jited", ctypes.c_uint64),
        ("xlated", ctypes.c_uint64),
        ("load_time", ctypes.c_uint64),
        ("created_by_uid", ctypes.c_uint32),
        ("nr_map_ids", ctypes.c_uint32),
        ("map_ids", ctypes.c_uint64),
        ("name", ctypes.c_char * 16),
        ("ifindex", ctypes.c_uint32),
        ("gpl", ctypes.c_uint32),
        ("netns_dev", ctypes.c_uint64),
        ("netns_ino", ctypes.c_uint64),
        ("nr_ksyms", ctypes.c_uint32),
        ("nr_lengths", ctypes.c_uint32),
        ("ksyms", ctypes.c_uint64),
        ("lengths", ctypes.c_uint64),
        ("btf_id", ctypes.c_uint32),
        ("func_info_bytes", ctypes.c_uint32),
        ("func_info", ctypes.c_uint64),
        ("nr_func_info", ctypes.c_uint32),
        ("nr_lines", ctypes.c_uint32),
        ("lines", ctypes.c_uint64),
        ("jited_lines", ctypes.c_uint64),
        ("nr_jited_lines", ctypes.c_uint32),
        ("line_bytes", ctypes.c_uint32),
        ("jited_line_bytes", ctypes.c_uint32),
        ("nr_tags", ctypes.c_uint32),
        ("tags", ctypes.c_uint64),
        ("run_time", ctypes.c_uint64),
        ("run_count", ctypes.c_uint64),
        ("recursion_misses", ctypes.c_uint64),
        ("verified_insns", ctypes.c_uint32),
        ("attach_btf_obj_id", ctypes.c_uint32),
    )


class HiddenAddressesError(OSError):
    """Raised if the kernel lists programs, but hides their addresses (no CAP_SYSLOG)."""


class ProgramFacts(NamedTuple):
    """A program's data from BPF_OBJ_GET_INFO_BY_FD. The tuples have an entry for each function."""

    type: int
    id: int
    tag: str
    name: str
    load_time_ns: int
    btf_id: int
    starts: tuple[int, ...]
    lengths: tuple[int, ...]
    tags: tuple[str, ...]
    types: tuple[int, ...]


class ProgramReader:
    """Reads programs, and caches them by id; not thread-safe.

    The kernel reuses an id only after using all other 31-bit ids, so a cached program that is still
    listed need not be read again.
    """

    def __init__(self) -> None:
        self._known: dict[int, tuple[Ksymbol, ...]] = {}
        self._btf: dict[int, ProgramBtf] = {}
        self._arrays = _Arrays(_USUAL_FUNCTIONS)

    def read(self) -> list[Ksymbol]:
        """Reads the functions in all loaded programs.

        Raises:
            HiddenAddressesError: the kernel hides the functions' addresses.
            OSError: the kernel denied access (``EPERM`` without CAP_SYS_ADMIN) or is too old.
        """
        programs: dict[int, tuple[Ksymbol, ...]] = {}
        for number in iterate_ids():
            symbols = self._known.get(number)
            if symbols is None:
                facts = find_facts(number, self._arrays)
                if facts is None:
                    continue
                names = self._function_names(facts)
                symbols = tuple(
                    Ksymbol(start, length, name, ModuleKind.BPF, facts.load_time_ns, facts.id)
                    for start, length, name in zip(facts.starts, facts.lengths, names, strict=True)
                )
            programs[number] = symbols
        self._known = programs
        return [symbol for symbols in programs.values() for symbol in symbols]

    def _function_names(self, facts: ProgramFacts) -> list[str]:
        btf = self._find_btf(facts.btf_id) if facts.types else None
        names = []
        for index in range(len(facts.starts)):
            # The first function's symbol contains the program's tag, not the function's own tag.
            tag = facts.tags[index] if 0 < index < len(facts.tags) else facts.tag
            if btf is not None and index < len(facts.types):
                function = btf.functions.get(facts.types[index], "")
            else:
                function = "F" if index else facts.name
            name = f"{PROGRAM_PREFIX}{tag}" + (f"_{function}" if function else "")
            names.append(name[:_NAME_BYTES])
        return names

    def _find_btf(self, number: int) -> ProgramBtf | None:
        btf = self._btf.get(number)
        if btf is None:
            data = find_btf(number)
            if data is None:
                return None
            while len(self._btf) >= _BTF_KEPT:
                del self._btf[next(iter(self._btf))]
            btf = self._btf[number] = parse_program_btf(data)
        return btf


class _Arrays:
    """The query struct, and the buffers for a program with up to ``capacity`` functions."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._starts = (ctypes.c_uint64 * capacity)()
        self._lengths = (ctypes.c_uint32 * capacity)()
        self._tags = (ctypes.c_uint64 * capacity)()
        self._functions = (ctypes.c_uint64 * capacity)()
        question = _ProgramInfo()
        question.nr_ksyms = question.nr_lengths = question.nr_tags = capacity
        question.nr_func_info, question.func_info_bytes = capacity, _FUNC_INFO.size
        question.ksyms = ctypes.addressof(self._starts)
        question.lengths = ctypes.addressof(self._lengths)
        question.tags = ctypes.addressof(self._tags)
        question.func_info = ctypes.addressof(self._functions)
        self._question = bytes(question)
        self._info = _ProgramInfo()

    def read(self, fd: int) -> tuple[ProgramFacts, int]:
        """Returns a program's data, and the ``capacity`` required to read all of it."""
        info, capacity = self._info, self.capacity
        ctypes.memmove(ctypes.addressof(info), self._question, len(self._question))
        read_info(fd, info)
        compiled = info.jited_bytes > 0  # an interpreted program has no machine code
        if compiled and not info.ksyms:
            raise HiddenAddressesError(
                errno.EPERM, "the kernel hides the addresses of BPF programs"
            )
        count = min(info.nr_ksyms, info.nr_lengths, capacity) if compiled else 0
        tags = bytes(self._tags)
        facts = ProgramFacts(
            info.type,
            info.id,
            bytes(info.tag).hex(),
            info.name.decode("utf-8", "backslashreplace"),
            info.load_time,
            info.btf_id,
            tuple(self._starts[:count]),
            tuple(self._lengths[:count]),
            tuple(tags[i * 8 : i * 8 + 8].hex() for i in range(min(info.nr_tags, capacity))),
            tuple(
                type_id
                for _, type_id in _FUNC_INFO.iter_unpack(
                    bytes(self._functions)[: 8 * min(info.nr_func_info, capacity)]
                )
            ),
        )
        return facts, max(info.nr_ksyms, info.nr_lengths, info.nr_tags, info.nr_func_info)


def find_facts(number: int, arrays: _Arrays | None = None) -> ProgramFacts | None:
    """Read a program's data from the kernel; None if it was unloaded. Raises ``OSError``."""
    arrays = arrays or _Arrays(_USUAL_FUNCTIONS)
    with open_program(number) as fd:
        if fd is None:
            return None
        facts, most = arrays.read(fd)
        if most > arrays.capacity:
            facts, _ = _Arrays(most).read(fd)
    return facts


def iterate_ids(command: int = _PROG_GET_NEXT_ID) -> Iterator[int]:
    """Yields the ids of all programs, or of the BPF objects that ``command`` lists, in order.

    Raises ``OSError`` (``EPERM`` if CAP_SYS_ADMIN is missing).
    """
    attributes = _IdAttributes()
    while True:
        try:
            bpf_call(command, attributes)
        except FileNotFoundError:
            return
        yield attributes.next_id
        attributes.id = attributes.next_id


def read_info(fd: int, info: Any) -> None:
    """Fill a ctypes object using BPF_OBJ_GET_INFO_BY_FD. Raises ``OSError``."""
    attributes = _InfoAttributes(fd, ctypes.sizeof(info), ctypes.addressof(info))
    bpf_call(_OBJ_GET_INFO_BY_FD, attributes)


@contextmanager
def open_program(number: int) -> Iterator[int | None]:
    """Opens a descriptor for a program; None if the program was unloaded. Raises ``OSError``."""
    try:
        fd = bpf_call(_PROG_GET_FD_BY_ID, _IdAttributes(number))
    except FileNotFoundError:
        yield None
        return
    try:
        yield fd
    finally:
        os.close(fd)


def find_btf(number: int) -> bytes | None:
    """Returns the BTF data with an id; None if the data was unloaded or access was denied."""
    try:
        fd = bpf_call(_BTF_GET_FD_BY_ID, _IdAttributes(number))
    except OSError:
        return None
    try:
        size = _read_btf(fd, None)
        data = ctypes.create_string_buffer(size)
        _read_btf(fd, data)
        return data.raw
    finally:
        os.close(fd)


def _read_btf(fd: int, data: ctypes.Array[ctypes.c_char] | None) -> int:
    """Copy as much of the BTF as fits into ``data``, and return the full size."""
    info = (ctypes.c_uint64 * 2)(ctypes.addressof(data) if data else 0, len(data) if data else 0)
    read_info(fd, info)
    return info[1] & 0xFFFFFFFF


def read_source_lines(number: int, start: int, length: int) -> tuple[tuple[int, str, int], ...]:
    """Returns a function's source lines as (offset in bytes, file, line), sorted by offset.

    The result is empty if the program was unloaded, or was compiled without line information.
    ``number`` is the program's id, and ``length`` the size of the function's machine code in bytes.
    """
    with open_program(number) as fd:
        if fd is None:
            return ()
        info = _ask_lines(fd, 0)[0]
        count = min(info.nr_lines, info.nr_jited_lines)
        if not count:
            return ()
        info, places, entries = _ask_lines(fd, count)
        data = find_btf(info.btf_id)
    if data is None or not info.jited_lines:
        return ()
    btf = parse_program_btf(data)
    rows = zip(places, _LINE_INFO.iter_unpack(entries), strict=True)
    return tuple(
        sorted(
            (place - start, btf.text(file), line >> 10)
            for place, (_, file, _, line) in rows
            if start <= place < start + length
        )
    )


def _ask_lines(fd: int, count: int) -> tuple[_ProgramInfo, list[int], bytes]:
    places = (ctypes.c_uint64 * count)()
    entries = ctypes.create_string_buffer(_LINE_INFO.size * count)
    info = _ProgramInfo()
    info.nr_lines = info.nr_jited_lines = count
    info.line_bytes, info.jited_line_bytes = _LINE_INFO.size, 8
    info.lines, info.jited_lines = ctypes.addressof(entries), ctypes.addressof(places)
    read_info(fd, info)
    return info, places[:], entries.raw[: _LINE_INFO.size * count]
