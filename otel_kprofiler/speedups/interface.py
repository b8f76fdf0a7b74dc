"""Types of the C functions."""

from collections.abc import Callable, Mapping
from mmap import mmap
from typing import Protocol, TypeVar

from otel_kprofiler.speedups.pure import FrameCache, FrameT

SampleT = TypeVar("SampleT")
KindT = TypeVar("KindT")


class SampleParser(Protocol):
    """Parses samples of running threads and events."""

    def __call__(  # noqa: PLR0917 - the C function has only positional parameters
        self,
        chunk: bytes,
        at: int,
        samples: list[SampleT],
        shared: dict[bytes, bytes],
        kinds: dict[int, KindT],
        collect: Callable[[int, int, int], object],
        stack_limit: int,
        sample_type: type[SampleT],
        /,
    ) -> int:
        """Parses records from ``chunk[at]`` on, and returns the offset of the first that it leaves.

        Leaves wait and lock records, records with spans or contexts, and malformed records. The
        other arguments are those of the code in ``bpf/layout.py`` that parses any record.
        """


class UserFrameFinder(Protocol):
    """Finds the frames of user stacks whose files are known."""

    def __call__(
        self, raw: bytes, tables: Mapping[bytes, tuple[FrameCache[FrameT], object]], /
    ) -> tuple[FrameT, ...] | None:
        """Returns the frames of a user stack, leaf first; None if it leaves the stack.

        Leaves malformed stacks, and those with a frame that is neither found nor made.

        Args:
            tables: the cache of the words, and the ``files``, for each value of the mappings in a
                stack; see :meth:`FrameCache.find`.
        """


class SampleEncoder(Protocol):
    """Encodes the samples of a profile as protobuf."""

    def __call__(self, times: dict[bytes, bytes], /) -> bytes:
        """Returns samples without values, given each sample's other fields and timestamps."""


class GoFrameMaker(Protocol):
    """Adds the unwind entries of x86-64 Go functions."""

    def __call__(  # noqa: PLR0917 - the C function has only positional parameters
        self,
        table: bytes | mmap,
        file: bytes | mmap,
        trampoline: bytes,
        layout: tuple[int, int, int, int, int, int, int],
        index: int,
        segments: tuple[tuple[int, int, int], ...],
        apart: tuple[int, ...],
        frames: bytearray,
        pairs: bytearray,
        /,
    ) -> int:
        """Returns the index of the first function that it leaves.

        Leaves functions whose unwind rules depend on their code, and malformed data.

        Args:
            trampoline: code of functions that get no entry.
            layout: offsets of the rows in ``table``, their number, the offset of the frame sizes;
                the addresses of the code and of ``frames``; the size of ``frames`` after which to
                stop; the flags of functions to leave.
            segments: up to ``MAX_SEGMENTS`` parts of the file that do not overlap, each with its
                offset, size and address.
            apart: names of functions to leave, up to eight.
            pairs: the start and the entry of each function, as 64-bit addresses.
        """


class PairPacker(Protocol):
    """Packs a search table from the pairs of :class:`GoFrameMaker`."""

    def __call__(self, pairs: bytes | bytearray, origin: int, /) -> bytes | None:
        """Returns None if the pairs are not sorted, or too far from ``origin``."""
