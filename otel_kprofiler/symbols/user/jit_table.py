"""Indexes the runtime-generated code of a process by address and time.

Code memory is reused, so a name is valid for an address only during one time interval. A new
function replaces all functions that it overlaps.
"""

from array import array
from bisect import bisect_left, bisect_right
from collections import deque
from typing import Final, NamedTuple

MAX_BYTES: Final = 8 << 20
"""Memory limit for a process's table, which suffices for 60,000 functions with 64-byte names."""
MAX_FORMER: Final = 1024
"""Maximum number of replaced functions to keep."""
MAX_FORMER_BYTES: Final = 1 << 20
"""Memory limit for replaced functions, including their lines; the oldest functions are evicted."""
MAX_CODE_BYTES: Final = 1 << 30
_ROW_BYTES: Final = 96  # per function, excluding its name: five arrays, two lists, an object
_FOREVER: Final = (1 << 64) - 1


class JitCode(NamedTuple):
    """A runtime-generated function ``[start, end)``; ``lines`` are packed source lines, if any."""

    start: int
    end: int
    name: bytes
    lines: bytes = b""


class _Former(NamedTuple):
    code: JitCode
    since_ns: int
    until_ns: int


class JitTable:
    """The runtime-generated functions in one process. Not thread-safe.

    Unnamed rows mark addresses at which functions have been replaced or removed.

    Attributes:
        has_dropped: whether functions were dropped because of the memory limit.
        nbytes: approximate memory used by current functions.
    """

    def __init__(self) -> None:
        self._starts = array("Q")
        self._sizes = array("I")
        self._since = array("Q")
        self._until = array("Q")
        self._seen = array("Q")
        self._names: list[bytes] = []
        self._lines: list[bytes] = []
        self._former: deque[_Former] = deque()
        self._former_bytes = 0
        self._last_end_ns = -1  # latest ``until_ns`` of a replaced function
        self.has_dropped = False
        self.nbytes = 0

    def add(self, code: JitCode, *, since_ns: int, seen_ns: int, gone_ns: int) -> None:
        """Add a function, replacing all functions that overlap it.

        The function has existed since boottime ``since_ns``; its entry was read at ``seen_ns``.
        ``gone_ns`` is the latest boottime at which the overlapped functions are known to have
        existed.
        """
        first, last = self._overlapped(code)
        if self._is_only(code, first, last) and since_ns <= self._until[first]:
            self._until[first] = _FOREVER
            return
        left = self._starts[first] if first < last else code.start
        right = self._end(last - 1) if first < last else code.end
        self._remove(first, last, gone_ns)
        if right > code.end:
            self._insert(first, JitCode(code.end, right, b""), 0, _FOREVER)
        self._insert(first, code, since_ns, seen_ns)
        if left < code.start:
            self._insert(first, JitCode(left, code.start, b""), 0, _FOREVER)

    def is_first(self, code: JitCode) -> bool:
        """Returns whether no other function has ever been added at this function's addresses."""
        first, last = self._overlapped(code)
        return not self.has_dropped and (first == last or self._is_only(code, first, last))

    def end_all(self, gone_ns: int) -> None:
        """Mark all functions as removed after ``gone_ns``, unless they are added again."""
        self._end_rows(range(len(self._seen)), gone_ns)

    def end_in(self, start: int, end: int, gone_ns: int) -> None:
        """Mark the functions that overlap ``[start, end)`` as removed; see :meth:`end_all`."""
        self._end_rows(range(*self._overlapped(JitCode(start, end, b""))), gone_ns)

    def _end_rows(self, rows: range, gone_ns: int) -> None:
        for index in rows:
            if self._seen[index] <= gone_ns:
                self._until[index] = min(self._until[index], gone_ns)
            else:
                self._names[index] = b""

    def lookup(self, address: int, at_ns: int) -> JitCode | None:
        """Returns the function that occupied an address at the given time; None if unknown."""
        index = self._find(address)
        if index >= 0 and self._since[index] <= at_ns <= self._until[index]:
            return self._code(index)
        if at_ns <= self._last_end_ns:
            for code, since_ns, until_ns in reversed(self._former):
                if code.start <= address < code.end and since_ns <= at_ns <= until_ns:
                    return code
        return None

    def has_code_at(self, address: int) -> bool:
        """Returns whether an address belongs to a current or removed function."""
        index = bisect_right(self._starts, address) - 1
        return index >= 0 and address < self._end(index)

    def last_at(self, address: int) -> JitCode | None:
        """Returns the latest function at an address; None if the function was removed."""
        index = self._find(address)
        is_there = index >= 0 and self._until[index] == _FOREVER
        return self._code(index) if is_there else None

    def _find(self, address: int) -> int:
        index = bisect_right(self._starts, address) - 1
        is_named = index >= 0 and address < self._end(index) and self._names[index]
        return index if is_named else -1

    def _end(self, index: int) -> int:
        return self._starts[index] + self._sizes[index]

    def _code(self, index: int) -> JitCode:
        return JitCode(
            self._starts[index], self._end(index), self._names[index], self._lines[index]
        )

    def _overlapped(self, code: JitCode) -> tuple[int, int]:
        first = bisect_right(self._starts, code.start)
        if first and code.start < self._end(first - 1):
            first -= 1
        return first, bisect_left(self._starts, code.end, first)

    def _is_only(self, code: JitCode, first: int, last: int) -> bool:
        return last - first == 1 and self._code(first) == code

    def _insert(self, index: int, code: JitCode, since_ns: int, seen_ns: int) -> None:
        if self.nbytes + _size(code) > MAX_BYTES:
            self.has_dropped = True
            return
        self.nbytes += _size(code)
        self._starts.insert(index, code.start)
        self._sizes.insert(index, code.end - code.start)
        self._since.insert(index, since_ns)
        self._until.insert(index, _FOREVER)
        self._seen.insert(index, seen_ns)
        self._names.insert(index, code.name)
        self._lines.insert(index, code.lines)

    def _remove(self, first: int, last: int, gone_ns: int) -> None:
        for index in range(first, last):
            code = self._code(index)
            self.nbytes -= _size(code)
            if code.name and self._seen[index] <= gone_ns:
                until_ns = min(self._until[index], gone_ns)
                self._keep_former(_Former(code, self._since[index], until_ns))
        columns = (self._starts, self._sizes, self._since, self._until, self._seen,
                   self._names, self._lines)  # fmt: skip
        for column in columns:
            del column[first:last]

    def _keep_former(self, former: _Former) -> None:
        self._last_end_ns = max(self._last_end_ns, former.until_ns)
        self._former.append(former)
        self._former_bytes += _size(former.code)
        while len(self._former) > MAX_FORMER or self._former_bytes > MAX_FORMER_BYTES:
            self._former_bytes -= _size(self._former.popleft().code)


def _size(code: JitCode) -> int:
    return _ROW_BYTES + len(code.name) + len(code.lines)
