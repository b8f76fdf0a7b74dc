"""Stores a module's symbols in a compact, immutable, sorted table.

Besides the characters of its name, a symbol uses about five bytes: an offset, the length of the
name, and its share of checkpoints and padding flags. An entry without a name is an *end*: no
address between it and the next entry has a name.
"""

from __future__ import annotations

import sys
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator
from itertools import pairwise
from typing import Final, NamedTuple

from otel_kprofiler.symbols.kernel.names import is_marker

MAX_FUNCTION_BYTES: Final = 64 * 1024
"""Code within this distance of a symbol's start is always named after the symbol. The largest
function in Linux is about 20 KiB long. Addresses beyond this distance may be in a gap, such as
after the last BPF program.
"""
_GROUP_BITS = 5  # one checkpoint per 32 names
_GROUP_MASK = (1 << _GROUP_BITS) - 1
_UNDERSCORE = 0x5F
_NO_LONG: Final[dict[int, int]] = {}  # shared by all tables
_LONG = 255  # length byte for names of 255 bytes or more; a dictionary stores their lengths


class Symbol(NamedTuple):
    """A symbol at the runtime addresses ``[start, end)``.

    ``end`` is an upper bound if no other symbol follows closely.
    """

    name: str
    start: int
    end: int


class Addresses:
    """Stores ascending addresses: the lower 32 bits, and each change in the upper 32 bits."""

    def __init__(self) -> None:
        self._low = array("I")
        # Index and upper 32 bits of each address whose upper bits differ from those before it.
        self._highs: list[tuple[int, int]] = []

    def __len__(self) -> int:
        return len(self._low)

    def add(self, values: array[int]) -> None:
        """Append unsigned 64-bit integers."""
        start, end = 0, len(values)
        while start < end:
            high = values[start] >> 32
            if not self._highs or self._highs[-1][1] != high:
                self._highs.append((len(self._low), high))
            stop = bisect_left(values, (high + 1) << 32, start) if values[-1] >> 32 != high else end
            halves = memoryview(values[start:stop]).cast("B").cast("I")
            self._low.frombytes(halves[sys.byteorder == "big" :: 2].tobytes())
            start = stop

    def offsets(self) -> tuple[int, int, array[int]]:
        """Returns a base address, the number of lower addresses, and the offsets of the rest."""
        if not self._highs:
            return 0, 0, array("I")
        if len(self._highs) == 1:
            return self._highs[0][1] << 32, 0, _exact(self._low)
        addresses = array("Q")
        for (start, high), (stop, _) in pairwise([*self._highs, (len(self._low), 0)]):
            addresses.extend((high << 32) + low for low in self._low[start:stop])
        first = bisect_left(addresses, addresses[-1] - 0xFFFF_FFFF)
        base = addresses[first]
        return base, first, array("I", [address - base for address in addresses[first:]])


class Entries(NamedTuple):
    """The columns of a table, sorted by address, with the preferred alias last.

    Attributes:
        lengths: length of each name; 255 if the length is in ``long_lengths``, 0 for an end entry.
        names: all names, concatenated.
        padded: one byte per entry, which is 1 if ``__pfx_`` padding precedes the entry.
        long_lengths: lengths of names with 255 bytes or more, by index.
        pad: size of the padding before a function, in bytes; 0 if functions have no padding.
    """

    addresses: Addresses
    lengths: bytes
    names: bytes
    padded: bytes
    long_lengths: dict[int, int]
    pad: int


class SymbolTable:
    """Symbols by address and by name; immutable, hence thread-safe.

    The last symbol of a section covers at most ``max_function`` bytes.
    """

    __slots__ = (
        "_checkpoints",
        "_lengths",
        "_long",
        "_max_function",
        "_names",
        "_offsets",
        "_pad",
        "_padded",
        "base",
        "dropped",
    )

    def __init__(self, entries: Entries, *, max_function: int = MAX_FUNCTION_BYTES) -> None:
        self.base, first, self._offsets = entries.addresses.offsets()
        self.dropped = first
        """Number of entries dropped because they are more than 4 GiB below the last entry."""
        self._lengths = entries.lengths[first:]
        skipped = sum(entries.lengths[:first])
        self._long = _NO_LONG
        if entries.long_lengths:
            long = entries.long_lengths.items()
            skipped += sum(length - _LONG for index, length in long if index < first)
            self._long = {index - first: length for index, length in long if index >= first}
        self._names = entries.names
        self._checkpoints = self._make_checkpoints(skipped)
        self._pad = entries.pad
        self._padded = _bitmap(entries.padded[first:]) if entries.pad else b""
        self._max_function = max_function

    def __len__(self) -> int:
        return len(self._offsets)

    def size_bytes(self) -> int:
        """Returns the memory used by the table."""
        parts = (self._offsets, self._lengths, self._names, self._checkpoints, self._padded)
        return sum(map(sys.getsizeof, parts)) + 128 * len(self._long)

    def lookup(self, address: int, section: tuple[int, int] = (0, 0)) -> tuple[bytes, int] | None:
        """Returns the name and start of the function at an address; None in a gap.

        The padding before a function is part of the function. ``section`` is the section ``[start,
        end)`` that contains the address. A function extends to the next symbol in the section.
        If no symbol follows, the function has at most ``max_function`` bytes.
        """
        offset = address - self.base
        offsets = self._offsets
        index = bisect_right(offsets, offset)
        pad = self._pad
        if (
            pad
            and index < len(offsets)
            and offsets[index] - offset <= pad
            and self._padded[index >> 3] >> (index & 7) & 1
        ):
            index = bisect_right(offsets, offsets[index])
        index -= 1
        if index < 0:
            return None
        start = offsets[index]
        lengths = self._lengths
        length = lengths[index]
        if not length:
            return None
        if offset - start >= self._max_function and not self._is_followed(index, section):
            return None
        if self._long:
            name = self.name(index)
        else:  # self.name(), inlined because this runs for every new address
            group = index >> _GROUP_BITS
            at = self._checkpoints[group] + sum(lengths[group << _GROUP_BITS : index])
            name = self._names[at : at + length]
        if name[0] == _UNDERSCORE and is_marker(name):
            return None
        return name, self.base + start

    def _is_followed(self, index: int, section: tuple[int, int]) -> bool:
        """Returns whether the section contains another entry after the given one.

        Linker markers do not count, because they start a page, and a hole may precede them.
        """
        start, end = section
        following = index + 1
        return (
            following < len(self._offsets)
            and start <= self.address(index)
            and self.address(following) < end
            and not is_marker(self.name(following))
        )

    def name(self, index: int) -> bytes:
        """Returns the name of an entry; empty for an end entry."""
        group = index >> _GROUP_BITS
        lengths = self._lengths
        start = self._checkpoints[group] + sum(lengths[index & ~_GROUP_MASK : index])
        length = lengths[index]
        if self._long:
            for other in range(index & ~_GROUP_MASK, index):
                if lengths[other] == _LONG:
                    start += self._long[other] - _LONG
            if length == _LONG:
                length = self._long[index]
        return self._names[start : start + length]

    def address(self, index: int) -> int:
        """Returns the address of an entry."""
        return self.base + self._offsets[index]

    def symbol(self, index: int) -> Symbol:
        """Returns an entry as a :class:`Symbol`.

        The symbol ends at the next entry's padding or start, but at most ``max_function`` bytes
        after its start.
        """
        start = self._offsets[index]
        following = bisect_right(self._offsets, start)
        end = start + self._max_function
        if following < len(self._offsets):
            pad = self._pad if self._is_padded(following) else 0
            end = min(end, self._offsets[following] - pad)
        name = self.name(index).decode("utf-8", "backslashreplace")
        return Symbol(name, self.base + start, self.base + end)

    def symbol_at(self, start: int) -> Symbol:
        """Returns the symbol that starts at an address, under its preferred name."""
        return self.symbol(bisect_right(self._offsets, start - self.base) - 1)

    def names_at(self, address: int) -> tuple[bytes, ...]:
        """Returns all names of the symbol that starts at an address, the preferred name first."""
        offset = address - self.base
        span = range(bisect_left(self._offsets, offset), bisect_right(self._offsets, offset))
        return tuple(dict.fromkeys(name for i in reversed(span) if (name := self.name(i))))

    def with_ends(self, ends: Iterable[int], *, missing: bool = False) -> SymbolTable:
        """Returns a copy in which the code between each end and the next symbol has no name.

        If an end is inside padding, all of the padding is removed. With ``missing``, each end also
        removes the padding before the next function, because the padding may belong to a missing
        function.
        """
        pending = sorted(set(ends), reverse=True)
        addresses, lengths, padded = array("Q"), bytearray(), bytearray()
        long: dict[int, int] = {}

        def end_at(address: int) -> None:
            if lengths and lengths[-1] and addresses[-1] < address:
                addresses.append(address)
                lengths.append(0)
                padded.append(0)

        for index, length in enumerate(self._lengths):
            start, is_padded = self.address(index), self._is_padded(index)
            first = start - self._pad if is_padded else start
            while pending and pending[-1] < start:
                end = pending.pop()
                end_at(first if addresses and addresses[-1] < first < end else end)
                is_padded = is_padded and not missing and end <= first
            if length == _LONG:
                long[len(addresses)] = self._long[index]
            addresses.append(start)
            lengths.append(length)
            padded.append(is_padded)
        last = addresses[-1] if addresses else 0
        end_at(min((end for end in pending if end > last), default=last))
        names = self._names[self._checkpoints[0] :] if self._checkpoints[0] else self._names
        columns = Addresses()
        columns.add(addresses)
        entries = Entries(columns, bytes(lengths), names, bytes(padded), long, self._pad)
        return SymbolTable(entries, max_function=self._max_function)

    def last_function(self, start: int, end: int) -> int | None:
        """Returns the start of the last function in ``[start, end)``; None if there is none."""
        first = bisect_left(self._offsets, start - self.base)
        past = bisect_left(self._offsets, end - self.base, first)
        index = next((at for at in range(past - 1, first - 1, -1) if self._lengths[at]), None)
        return None if index is None else self.address(index)

    def find(self, name: bytes, *, prefix: bool = False) -> Iterator[int]:
        """Yields the indices of entries with this name or prefix, sorted by address.

        An empty prefix matches all names.
        """
        if prefix and not name:
            yield from (index for index in range(len(self._lengths)) if self._lengths[index])
            return
        at = self._names.find(name, self._checkpoints[0])
        while name and at >= 0:
            index = self._named_at(at)
            if index >= 0 and (prefix or self._length(index) == len(name)):
                yield index
            at = self._names.find(name, at + 1)

    def find_address(self, name: bytes) -> int | None:
        """Returns the address of the first symbol with this name; None if there is none."""
        index = next(self.find(name), None)
        return None if index is None else self.address(index)

    def _length(self, index: int) -> int:
        length = self._lengths[index]
        return self._long[index] if length == _LONG else length

    def _named_at(self, at: int) -> int:
        """Returns the index of the entry whose name starts at an offset; -1 if there is none."""
        group = bisect_right(self._checkpoints, at) - 1
        position = self._checkpoints[group]
        for index in range(group << _GROUP_BITS, len(self._lengths)):
            if position >= at and self._lengths[index]:
                return index if position == at else -1
            position += self._length(index)
        return -1

    def _is_padded(self, index: int) -> bool:
        return bool(self._pad and self._padded[index >> 3] >> (index & 7) & 1)

    def _make_checkpoints(self, first: int) -> array[int]:
        step = _GROUP_MASK + 1
        sums = [sum(self._lengths[i : i + step]) for i in range(0, len(self._lengths), step)]
        for index, length in self._long.items():
            sums[index >> _GROUP_BITS] += length - _LONG
        checkpoints = array("I", [first])
        total = first
        for group in sums[:-1]:
            total += group
            checkpoints.append(total)
        return _exact(checkpoints)


def _exact(values: array[int]) -> array[int]:
    """Copies an array, without its spare capacity (up to a sixteenth of its size)."""
    return array(values.typecode, values)


def _bitmap(flags: bytes) -> bytes:
    """Packs eight flags into each byte, the first flag in the lowest bit."""
    digits = flags[::-1].translate(bytes([0x30, 0x31]) + bytes(254))
    return int(digits or b"0", 2).to_bytes((len(flags) + 7) // 8, "little")
