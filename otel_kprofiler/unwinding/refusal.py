"""Reasons why a file's unwind tables are not used."""

import enum
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Final

from otel_kprofiler.elf import ElfError, ElfProblem
from otel_kprofiler.host import MappedFileError


class Refusal(enum.Enum):
    """The reason why tables are not used. Values are shown to users.

    Every ``FileProblem`` has a refusal of the same name.
    """

    GONE = "the process had exited, or unmapped the file, before it could be opened"
    FORBIDDEN = "this process may not open the file"
    NOT_SAME = "the file that could be opened is not the mapped file"
    CHANGED = "the file changed while it was being read"
    UNREADABLE = "the file could not be read"
    NOT_ELF = "not an ELF file for 64-bit code of this machine"
    DAMAGED_HEADERS = "the ELF headers are malformed"
    NO_TEXT = "the file has no executable segment"
    MANY_TEXTS = "the file has too many executable segments"
    NO_FRAMES = "the file has no .eh_frame"
    COMPRESSED = ".eh_frame is compressed or has no content in the file"
    ENCODING = "the pointers of .eh_frame_hdr are not encoded as linkers write them"
    OUT_OF_BOUNDS = "the tables point outside the file or .eh_frame"
    NOT_SORTED = "the search table is not sorted"
    TOO_LARGE = "the tables are larger than the limit for one file"
    NOT_INDEXED = "no search table could be built from .eh_frame"
    SLOW = "building the search table took more CPU time than the size of its input allows"
    MEMORY_IN_USE = "tables in use fill the memory allowed for tables"
    FAILED = "reading the file failed; see the log"
    NO_MEMORY = "the kernel had no memory for the tables"


NO_TABLE: Final = frozenset({Refusal.NOT_ELF, Refusal.NO_TEXT, Refusal.NO_FRAMES})
"""Reasons why a file has no table. The BPF program may follow frame pointers instead."""
MAY_PASS: Final = frozenset(
    {
        Refusal.GONE, Refusal.FORBIDDEN, Refusal.NOT_SAME, Refusal.CHANGED, Refusal.UNREADABLE,
        Refusal.MEMORY_IN_USE, Refusal.NO_MEMORY, Refusal.FAILED,
    }
)  # fmt: skip
"""Temporary failures, after which a retry may succeed."""
COSTLY: Final = frozenset({Refusal.MEMORY_IN_USE, Refusal.NO_MEMORY, Refusal.FAILED})
"""Temporary failures after which a table must be rebuilt. Retries occur at increasing intervals."""


class TableRefused(Exception):  # noqa: N818 - an outcome, which the store counts
    """Raised if the unwind tables for a file must not be used. ``detail`` is written to the log."""

    def __init__(self, refusal: Refusal, detail: str = "") -> None:
        super().__init__(f"{refusal.value} ({detail})" if detail else refusal.value)
        self.refusal, self.detail = refusal, detail


_REFUSALS: Final[Mapping[ElfProblem, Refusal]] = {
    ElfProblem.UNREADABLE: Refusal.UNREADABLE,
    ElfProblem.CHANGED: Refusal.CHANGED,
    ElfProblem.NOT_ELF: Refusal.NOT_ELF,
    ElfProblem.DAMAGED_HEADERS: Refusal.DAMAGED_HEADERS,
    ElfProblem.OUT_OF_BOUNDS: Refusal.OUT_OF_BOUNDS,
    ElfProblem.TOO_LARGE: Refusal.TOO_LARGE,
    ElfProblem.DAMAGED_SECTION: Refusal.DAMAGED_HEADERS,
    ElfProblem.NO_SECTION: Refusal.NO_FRAMES,
    ElfProblem.NOT_IN_FILE: Refusal.COMPRESSED,
}


@contextmanager
def refusing() -> Iterator[None]:
    """Context that converts errors from opening or parsing a file to :class:`TableRefused`."""
    try:
        yield
    except ElfError as error:
        raise TableRefused(_REFUSALS[error.problem], error.detail) from error
    except MappedFileError as error:
        raise TableRefused(Refusal[error.problem.name], error.detail) from error
