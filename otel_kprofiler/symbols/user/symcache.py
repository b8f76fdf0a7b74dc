"""Reads SymCaches, each with the source lines and inlined functions for one file.

The format is version 9 of symbolic's ``symbolic-symcache`` (``src/v9/raw.rs`` in
https://github.com/getsentry/symbolic), which consists of 32-bit little-endian words. The data is
read in place, so a lookup touches only a few pages of the mapped file.
"""

import bisect
import itertools
import posixpath
import struct
from typing import Final, NamedTuple

from otel_kprofiler.model import Line
from otel_kprofiler.symbols.cache import KeptValues
from otel_kprofiler.symbols.user.demangle import demangle

VERSION: Final = 9
_HEADER: Final = struct.Struct("<4sI32x4x5I16x")
_FILE: Final = struct.Struct("<3I12x")
_FUNCTION: Final = struct.Struct("<I12x")
_LOCATION: Final = struct.Struct("<4I")
_RANGE_BYTES: Final = 4
_ALIGNMENT: Final = 8
_NONE: Final = (1 << 32) - 1
_MAX_INLINED: Final = 1000
"""Maximum number of functions read at one address, in case the file is corrupt. Compilers inline
far fewer functions."""
_MAX_KEPT_CHARACTERS: Final = 2 << 20
"""Maximum number of characters in the cache of names, and in the cache of paths."""
_ENTRY_CHARACTERS: Final = 200
"""Memory used by an entry, excluding its text, in units of characters."""
_MAX_STRING_BYTES: Final = 8192
"""Longer names and paths are truncated to limit the size of the cache."""


class _Name(NamedTuple):
    function: str
    system_name: str


_NUMBERS: Final = itertools.count()
_NAMES: Final = KeptValues[tuple[int, int], _Name](_MAX_KEPT_CHARACTERS)
_PATHS: Final = KeptValues[tuple[int, int], str](_MAX_KEPT_CHARACTERS)


class SymCache:
    """Source lines and inlined functions in one file. Thread-safe.

    Args:
        data: the content of the SymCache. A lookup stops at a corrupt entry.
        base: SVMA of the first segment, to which the addresses in ``data`` are relative.
        is_partial: whether ``data`` lacks DWARF that is in other files.

    Raises:
        ValueError: the data is not a version 9 SymCache, or its tables are truncated.
    """

    def __init__(self, data: memoryview | bytes, base: int, *, is_partial: bool = False) -> None:
        self.is_partial = is_partial
        view = memoryview(data)
        if len(view) < _HEADER.size:
            raise ValueError("the data is shorter than its header")
        magic, version, *counts = _HEADER.unpack_from(view)
        if magic != b"SYMC" or version != VERSION:
            raise ValueError(f"unsupported format: magic {magic!r}, version {version}")
        sizes = (_FILE.size, _FUNCTION.size, _LOCATION.size, _RANGE_BYTES, 1)
        parts, at = [], _HEADER.size
        for count, size in zip(counts, sizes, strict=True):
            at += -at % _ALIGNMENT
            parts.append(view[at : at + count * size])
            at += count * size
        if at > len(view) or counts[2] < counts[3]:
            raise ValueError("it is truncated")
        self._files, self._functions, self._locations, ranges, self._strings = parts
        self._starts = ranges.cast("I")
        self._first = counts[2] - counts[3]
        self._base = base
        self._number = next(_NUMBERS)

    def lookup(self, svma: int) -> tuple[Line, ...]:
        """Returns the functions at an address, innermost inlined first.

        Returns an empty tuple if no function covers the address, or its file is unknown.
        """
        at = bisect.bisect_right(self._starts, svma - self._base) - 1
        if at < 0 or svma - self._base >> 32:
            return ()
        lines: list[Line] = []
        index = self._first + at
        while index != _NONE and len(lines) < _MAX_INLINED:
            try:
                file, line, function, index = _LOCATION.unpack_from(
                    self._locations, index * _LOCATION.size
                )
            except struct.error:  # the table is corrupt
                break
            if function == _NONE:  # no function at this address
                break
            lines.append(Line(*self._name(function), self._path(file), line))
        if len(lines) == 1 and not lines[0].file:
            return ()
        return tuple(lines)

    @property
    def nbytes(self) -> int:
        """Returns 0, because the data is mapped from a file."""
        return 0

    def close(self) -> None:
        """Does nothing, because the data is released after the last lookup."""

    def _name(self, index: int) -> _Name:
        name = _NAMES.get((self._number, index))
        if name is None:
            try:
                (offset,) = _FUNCTION.unpack_from(self._functions, index * _FUNCTION.size)
            except struct.error:
                offset = _NONE
            linked = self._string(offset)
            readable = demangle(linked)
            name = _Name(readable or "?", linked if linked != readable else "")
            size = len(readable) + len(linked)
            _NAMES.put((self._number, index), name, size + _ENTRY_CHARACTERS)
        return name

    def _path(self, index: int) -> str:
        path = _PATHS.get((self._number, index))
        if path is None:
            try:
                offsets = _FILE.unpack_from(self._files, index * _FILE.size)
            except struct.error:
                offsets = ()
            path = posixpath.join("", *map(self._string, offsets))
            path = posixpath.normpath(path) if path else ""
            _PATHS.put((self._number, index), path, len(path) + _ENTRY_CHARACTERS)
        return path

    def _string(self, offset: int) -> str:
        """Reads a string with a LEB128 length prefix."""
        length = shift = 0
        while offset < len(self._strings):
            byte = self._strings[offset]
            offset += 1
            length |= (byte & 0x7F) << shift
            shift += 7
            if byte < 0x80:
                end = offset + min(length, _MAX_STRING_BYTES)
                return bytes(self._strings[offset:end]).decode("utf-8", "replace")
            if shift > 32:
                break
        return ""
