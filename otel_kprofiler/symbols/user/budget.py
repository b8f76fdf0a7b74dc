"""Memory for the symbols of files: it is asked for before it is taken."""

from __future__ import annotations

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
"""Memory of a decompressor, besides what it reads and writes."""
_KEY: Final = "max_user_symbol_megabytes"


class ReadingBudget:
    """Memory for what is held while files are read, one file at a time. Thread-safe.

    Whoever is about to take memory asks for it, by an estimate from sizes that the file gives.

    Args:
        limit_bytes: for one file, and so for all that are being read; no limit by default.

    Attributes:
        limit_bytes: the limit.
        make_space: is called before more memory is taken, so that finished tables leave it.
    """

    def __init__(self, limit_bytes: int = _UNBOUNDED) -> None:
        self.limit_bytes = limit_bytes
        self.make_space: Callable[[], None] = lambda: None
        self._changed = threading.Condition()
        self._reader: int | None = None  # the thread that reads a file
        self._held = 0
        self._mine = _Mine()

    @property
    def held_bytes(self) -> int:
        """Bytes that reading holds now."""
        return self._held

    @property
    def left_bytes(self) -> int:
        """Bytes that can be taken."""
        return self.limit_bytes - self._held

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Wait until no other file is read; what was taken is given back at the end."""
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
        """Let others read: a thread has read its file, or is left behind with what it holds."""
        with self._changed:
            if self._reader == thread:
                self._reader = None
                self._changed.notify_all()

    def take(self, count_bytes: int, purpose: str) -> None:
        """Ask for memory that is held until the file was read, or given back.

        Args:
            count_bytes: how much.
            purpose: what it is for, as a reason names it.

        Raises:
            ElfError: it is more than is left.
        """
        with self._changed:
            if count_bytes > self.left_bytes:
                raise ElfError(
                    ElfProblem.TOO_LARGE,
                    f"{purpose}: reading takes {_mib(self._held + count_bytes)} MiB, the limit is "
                    f"{self.limit_bytes >> 20}, three quarters of {_KEY}; raise it",
                )
            self._held += count_bytes
            self._mine.held += count_bytes
        self.make_space()

    def give_back(self, count_bytes: int) -> None:
        """Return memory that is not held any more."""
        with self._changed:
            self._held -= count_bytes
            self._mine.held -= count_bytes

    @contextmanager
    def hold(self, count_bytes: int, purpose: str) -> Iterator[None]:
        """Take memory for a while. Raises as :meth:`take`."""
        self.take(count_bytes, purpose)
        try:
            yield
        finally:
            self.give_back(count_bytes)

    def read_content(self, source: Source, section: Section, limit: int) -> bytes:
        """The content of a section, which is taken.

        Raises:
            ElfError: it has more than ``limit`` bytes, is damaged, or exceeds what is left.
        """
        purpose = section.name.decode("ascii", "backslashreplace") or "a section"
        if section.kind == SHT_NOBITS:
            return b""
        if not section.flags & SHF_COMPRESSED:
            self.take(section.size, purpose)
            return read_content(source, section, limit)
        unpacked = unpacked_size(source, section)
        # Packed, also without its header; unpacked in parts and joined, and the window.
        with self.hold(2 * section.size + 4 * unpacked + _WINDOW_BYTES, purpose):
            content = read_content(source, section, limit)
        self.take(len(content), purpose)
        return content


class _Mine(threading.local):
    """Bytes that the calling thread holds."""

    held = 0


def _mib(count_bytes: int) -> int:
    return -(-count_bytes >> 20)
