"""Looks up a binary's functions by address or name in compact, immutable tables.

A function uses thirteen bytes plus the length of its name, or eight bytes if it has no name.
"""

import sys
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from mmap import mmap
from operator import add, le
from typing import Final, NamedTuple

from otel_kprofiler.symbols.user.columns import (
    MIN_MAPPED_BYTES,
    NamedCode,
    bisect_by,
    find_all,
    move_to_file,
    sample,
)

MAX_NAME_BYTES: Final = 1 << 16
"""Longer names are truncated. Real names are at most a few hundred bytes long."""
MAX_SPAN_BYTES: Final = 1 << 32
"""Maximum size of a function. Functions farther than this from the first function are dropped."""


MAX_DEPTH: Final = 16
MAX_NESTED: Final = 1 << 16
"""Limits on the depth and number of nested functions, as a defense against hostile files."""
MAX_RANKED: Final = 64
"""Maximum number of names that are ranked for one function. Further names are ignored."""
MAX_KEPT: Final = 1024
"""Maximum number of functions whose ranked names are cached, at about 200 bytes each."""
_MAX_RANKED_BYTES: Final = 1024  # longer names are not ranked


class Function(NamedTuple):
    """A function at the SVMAs ``[start, end)``.

    ``name`` is the linkage name without a symbol version; empty if only the bounds are known.
    """

    start: int
    end: int
    name: str


Alias = tuple[int, int, bytes, int]
"""One of several names for a function: rank, length, name, and row in the name table."""


def make_alias(rank: int, names: bytes | bytearray | mmap, at: int, row: int) -> Alias:
    """Creates an alias from the name at an offset in ``names``; a lower rank is better."""
    name = bytes(names[at : at + _MAX_RANKED_BYTES].partition(b"\0")[0])
    return rank, len(name), name, row


def sort_aliases(aliases: Iterable[Alias]) -> list[Alias]:
    """Sorts names with the same start address, best first.

    Exported names precede the library's internal names: ``write`` before ``__write``, and ``puts``
    before ``_IO_puts``.
    """
    ranked = sorted(aliases)
    best = ranked[0][2] if ranked else b""
    if best.startswith(b"_"):
        ranked.sort(key=lambda alias: not best.endswith(b"_" + alias[2]))
    return ranked


class Bounds(NamedTuple):
    """Unnamed functions from unwind information, sorted by start address.

    Attributes:
        base: SVMA that the starts are relative to.
        starts: each function's start, relative to the base; may be negative.
        samples: the result of :func:`sample` for ``starts``; empty if ``starts`` is in memory.
    """

    base: int
    starts: Sequence[int]
    sizes: Sequence[int]
    samples: list[int] = []  # noqa: RUF012 - never changed

    def around(self, svma: int) -> tuple[int, int] | None:
        """Returns the function ``[start, end)`` that contains an address; None if not found."""
        starts, offset = self.starts, svma - self.base
        following = bisect_by(self.samples, starts, offset)
        if not following:
            return None
        start = starts[following - 1]
        end = start + self.sizes[following - 1]
        if not start <= offset < end:
            return None
        if following < len(starts):
            end = min(end, starts[following])
        return self.base + start, self.base + end

    def next_start(self, svma: int) -> int | None:
        """Returns the start of the first function above an address; None if no function follows."""
        at = bisect_right(self.starts, svma - self.base)
        return self.base + self.starts[at] if at < len(self.starts) else None


NO_BOUNDS: Final = Bounds(0, array("I"), array("I"))


class FunctionTable:
    """Functions by address and by name; thread-safe, and immutable except for caches.

    An address in nested functions belongs to the innermost function. If several functions have the
    same start, the one with the best name is used. Addresses outside the functions in ``named`` are
    looked up in ``bounds``, which may contain all functions. Start addresses are relative to
    ``base`` (SVMA).
    """

    __slots__ = (
        "_base",
        "_bounds",
        "_names",
        "_names_at",
        "_nbytes",
        "_outer",
        "_ranked",
        "_ranks",
        "_samples",
        "_sizes",
        "_starts",
    )

    def __init__(self, base: int, named: NamedCode, bounds: Bounds = NO_BOUNDS) -> None:
        self._outer = _find_outer(named.starts, named.sizes)
        parts = (*named, bounds.starts, bounds.sizes)
        self._samples: list[int] = []
        self._nbytes = sum(map(sys.getsizeof, (*parts, self._outer))) + 64 * len(self._outer)
        if self._nbytes >= MIN_MAPPED_BYTES and named.names:
            self._samples, samples = sample(named.starts), sample(bounds.starts)
            named, (starts, sizes) = move_to_file(named, bounds.starts, bounds.sizes)
            bounds = Bounds(bounds.base, starts, sizes, samples)
        self._base = base
        self._starts, self._sizes, self._names_at, self._names, self._ranks = named
        self._bounds = bounds
        self._ranked: dict[int, list[int]] = {}

    def __len__(self) -> int:
        """Returns the number of names."""
        return len(self._starts)

    @property
    def nbytes(self) -> int:
        """Returns the size of the table in bytes, whether in memory or in a file."""
        return self._nbytes

    def lookup(self, svma: int) -> Function | None:
        """Returns the function that contains an address; None if there is no such function."""
        offset = svma - self._base
        starts, sizes = self._starts, self._sizes
        last = index = bisect_by(self._samples, starts, offset) - 1
        while index >= 0:
            if offset - starts[index] < sizes[index]:
                start = starts[index]
                if index and starts[index - 1] == start:
                    for row in self._ranked.get(start) or self._rank(start):
                        if offset - start < sizes[row]:
                            return self._function(row)
                return self._function(index)
            index = self._outer.get(index, -1)
        return self._bound(svma, last)

    def find(self, name: str) -> tuple[Function, ...]:
        """Finds functions and aliases by name, in address order."""
        wanted = name.encode("utf-8", "surrogateescape")
        if b"\0" in wanted or not wanted:
            return ()
        places = frozenset(find_all(self._names, wanted + b"\0"))
        if not places:
            return ()
        indices = [index for index, at in enumerate(self._names_at) if at in places]
        return tuple(dict.fromkeys(map(self._function, indices)))

    def find_containing(self, part: str) -> Iterator[Function]:
        """Finds functions whose names contain a string, in address order."""
        wanted = part.encode("utf-8", "surrogateescape")
        if self._names.find(wanted) < 0:
            return
        for row, at in enumerate(self._names_at):
            end = self._names.find(b"\0", at, at + MAX_NAME_BYTES)
            if self._names.find(wanted, at, end if end >= 0 else at + MAX_NAME_BYTES) >= 0:
                yield self._function(row)

    def names_at(self, start: int) -> tuple[str, ...]:
        """Returns all names of the functions that start at an SVMA, the best first."""
        return tuple(dict.fromkeys(map(self._name, self._rank(start - self._base))))

    def _rank(self, start: int) -> list[int]:
        first = bisect_left(self._starts, start)
        last = bisect_right(self._starts, start, first, min(first + MAX_RANKED, len(self)))
        aliases = sort_aliases(
            make_alias(self._ranks[row], self._names, self._names_at[row], row)
            for row in range(first, last)
        )
        if len(self._ranked) >= MAX_KEPT:
            self._ranked.clear()
        ranked = self._ranked[start] = [row for *_, row in aliases]
        return ranked

    def _function(self, index: int) -> Function:
        start = self._base + self._starts[index]
        return Function(start, start + self._sizes[index], self._name(index))

    def _name(self, index: int) -> str:
        names, at = self._names, self._names_at[index]
        end = names.find(b"\0", at, at + MAX_NAME_BYTES)
        if end < 0:
            end = at + MAX_NAME_BYTES
        return names[at:end].decode("utf-8", "backslashreplace")

    def _bound(self, svma: int, last: int) -> Function | None:
        """Returns the function in ``bounds`` at an address, clipped to exclude named functions.

        ``last`` is the index of the last named function that starts before the address.
        """
        around = self._bounds.around(svma)
        if around is None:
            return None
        start, end = around
        if last + 1 < len(self._starts):
            end = min(end, self._base + self._starts[last + 1])
        while last >= 0:
            start = max(start, self._base + self._starts[last] + self._sizes[last])
            last = self._outer.get(last, -1)
        return Function(start, end, "")


def _find_outer(starts: Sequence[int], sizes: Sequence[int]) -> Mapping[int, int]:
    """Maps the index of each nested function to the index of the function that contains it."""
    ends = array("Q", map(add, starts, sizes))
    if all(map(le, ends, islice(ends, 1, None))):
        return {}
    outer: dict[int, int] = {}
    open_ = array("I")  # enclosing functions, in descending order of their ends
    for index, end in enumerate(ends):
        while open_ and ends[open_[-1]] <= end:
            open_.pop()
        if open_ and len(open_) <= MAX_DEPTH and len(outer) < MAX_NESTED:
            outer[index] = open_[-1]
        open_.append(index)
    return outer
