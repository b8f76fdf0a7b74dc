"""CPython code objects, as described by the BPF program."""

import sys
import threading
from collections.abc import Callable, Iterator
from typing import Final, NamedTuple

MAX_CODE_BYTES: Final = 16 * 1024 * 1024
_OBJECT_BYTES: Final = 512
"""Size, in bytes, of a code description's objects and dict entries, excluding strings."""


class PythonCode(NamedTuple):
    """A code object, as read when it was first sampled.

    Attributes:
        id: code id in samples; unique within a recording.
        process: process id in the initial pid namespace.
        address: runtime address of the code object.
        image: number that distinguishes programs that have run with the same pid.
        file: source file (``co_filename``).
        function: qualified name (``co_qualname``).
        first_line: 1-based number of the first line (``co_firstlineno``); 0 if unknown.
        first_traceable: index of the first instruction of the function body, in code units
            (``_co_firsttraceable``).
        line_table: ``co_linetable``; empty if it could not be read completely.
    """

    id: int
    process: int
    address: int
    image: int
    file: str
    function: str
    first_line: int
    first_traceable: int
    line_table: bytes

    @property
    def size_bytes(self) -> int:
        """Returns the approximate size of the description in memory."""
        texts = sys.getsizeof(self.file) + sys.getsizeof(self.function)
        return _OBJECT_BYTES + texts + len(self.line_table)


class KnownCodes:
    """Keeps descriptions of code objects by id; evicts the oldest first.

    Processes that run the same program have equal code objects, whose descriptions share strings
    and line tables.

    Thread-safe; :meth:`get` is lock-free. ``on_dropped`` is called for each evicted description,
    without holding the lock, so that the BPF program can describe the code object again.
    """

    def __init__(
        self,
        max_bytes: int = MAX_CODE_BYTES,
        on_dropped: Callable[[PythonCode], None] | None = None,
    ) -> None:
        self._max_bytes = max_bytes
        self.on_dropped = on_dropped
        self._codes: dict[int, PythonCode] = {}
        self._by_table: dict[bytes, PythonCode] = {}  # the newest description with each line table
        self._lock = threading.Lock()
        self._bytes = 0
        self._version = 0
        self._dropped = 0

    @property
    def version(self) -> int:
        """Returns a number that is incremented whenever a description is added."""
        return self._version

    @property
    def dropped(self) -> int:
        """Returns the number of evicted descriptions."""
        return self._dropped

    @property
    def size_bytes(self) -> int:
        """Returns the approximate memory used by all descriptions, without regard to sharing."""
        return self._bytes

    def __len__(self) -> int:
        return len(self._codes)

    def __iter__(self) -> Iterator[PythonCode]:
        """Returns the current descriptions, oldest first."""
        with self._lock:
            return iter(tuple(self._codes.values()))

    def get(self, code_id: int) -> PythonCode | None:
        """Returns the description with this id; None if it was never added, or was evicted."""
        return self._codes.get(code_id)

    def add(self, code: PythonCode) -> None:
        """Add a description. A description that alone exceeds the limit is dropped immediately."""
        with self._lock:
            if old := self._codes.get(code.id):
                self._remove(old)
            self._codes[code.id] = self._share(code)
            self._bytes += code.size_bytes
            dropped = []
            while self._bytes > self._max_bytes:
                dropped.append(next(iter(self._codes.values())))
                self._remove(dropped[-1])
            self._dropped += len(dropped)
            self._version += 1
        if self.on_dropped:
            for evicted in dropped:
                self.on_dropped(evicted)

    def _share(self, code: PythonCode) -> PythonCode:
        """Returns an equal description, with the strings and the line table of an earlier one."""
        earlier = self._by_table.get(code.line_table)
        if earlier:
            code = code._replace(line_table=earlier.line_table)
            if (earlier.file, earlier.function) == (code.file, code.function):
                code = code._replace(file=earlier.file, function=earlier.function)
        self._by_table[code.line_table] = code
        return code

    def _remove(self, code: PythonCode) -> None:
        del self._codes[code.id]
        self._bytes -= code.size_bytes
        if self._by_table.get(code.line_table) is code:
            del self._by_table[code.line_table]
