"""Limits the memory used while symbols are read.

The loader limits the memory of finished tables.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

from otel_kprofiler.elf import (
    SHF_COMPRESSED,
    SHT_NOBITS,
    ElfError,
    ElfProblem,
    Section,
    Source,
    read_content,
    unpacked_size,
)

_UNBOUNDED: Final = 1 << 62
_WINDOW_BYTES: Final = 8 << 20
"""Memory used by a decompressor, excluding its input and output."""
_KEY: Final = "max_user_symbol_megabytes"


class ReadingBudget:
    """Budget for memory held while files are read, one file at a time. Thread-safe.

    Before allocating memory, a reader reserves an amount estimated from sizes in the file.

    Attributes:
        limit_bytes: limit on reserved memory, and thus on the memory for a single file; no limit by
            default.
        make_space: called after a reservation, to evict finished tables.
    """

    def __init__(self, limit_bytes: int = _UNBOUNDED) -> None:
        self.limit_bytes = limit_bytes
        self.make_space: Callable[[], None] = lambda: None
        self._changed = threading.Condition()
        self._reader: int | None = None  # the thread that is reading a file
        self._held = 0
        self._mine = _Mine()

    @property
    def held_bytes(self) -> int:
        """Returns the number of reserved bytes."""
        return self._held

    @property
    def left_bytes(self) -> int:
        """Returns the number of bytes that can still be reserved."""
        return self.limit_bytes - self._held

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Context manager that prevents other threads from reading files.

        Reservations are released at the end of the context.
        """
        thread = threading.get_ident()
        with self._changed:
            self._changed.wait_for(lambda: self._reader is None)
            self._reader = thread
        try:
            yield
        finally:
            self.give_back(self._mine.held)
            self.pass_turn(thread)

    def pass_turn(self, thread: int) -> None:
        """End a thread's turn, after its file was read or the thread was abandoned.

        An abandoned thread keeps its reservations.
        """
        with self._changed:
            if self._reader == thread:
                self._reader = None
                self._changed.notify_all()

    def take(self, count_bytes: int, purpose: str) -> None:
        """Reserve memory until the file has been read or :meth:`give_back` is called.

        Raises ``ElfError`` if not enough memory is left, with a message that names the ``purpose``.
        """
        with self._changed:
            if count_bytes > self.left_bytes:
                needed_mib = -(-(self._held + count_bytes) >> 20)
                raise ElfError(
                    ElfProblem.TOO_LARGE,
                    f"reading {purpose} requires {needed_mib} MiB in total, but "
                    f"the limit is {self.limit_bytes >> 20} MiB, three quarters of {_KEY}; "
                    f"raise {_KEY}",
                )
            self._held += count_bytes
            self._mine.held += count_bytes
        self.make_space()

    def give_back(self, count_bytes: int) -> None:
        """Release reserved memory."""
        with self._changed:
            self._held -= count_bytes
            self._mine.held -= count_bytes

    @contextmanager
    def hold(self, count_bytes: int, purpose: str) -> Iterator[None]:
        """Reserve memory until the context exits. Raises the same exceptions as :meth:`take`."""
        self.take(count_bytes, purpose)
        try:
            yield
        finally:
            self.give_back(count_bytes)

    def read_content(self, source: Source, section: Section, limit: int) -> bytes:
        """Reads the content of a section, and reserves the memory that holds it.

        Raises ``ElfError`` if the section is longer than ``limit`` bytes, is malformed, or exceeds
        the budget.
        """
        purpose = section.name.decode("ascii", "backslashreplace") or "a section"
        if section.kind == SHT_NOBITS:
            return b""
        if not section.flags & SHF_COMPRESSED:
            self.take(section.size, purpose)
            return read_content(source, section, limit)
        unpacked = unpacked_size(source, section)
        # Reserves memory for the compressed section with and without its header, the decompressed
        # parts, the joined result, and the decompressor's window.
        with self.hold(2 * section.size + 4 * unpacked + _WINDOW_BYTES, purpose):
            content = read_content(source, section, limit)
        self.take(len(content), purpose)
        return content


class _Mine(threading.local):
    held = 0
