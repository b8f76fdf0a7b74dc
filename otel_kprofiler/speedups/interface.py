"""Types of the C functions."""

from collections.abc import Callable, Mapping
from mmap import mmap
from typing import Any, Protocol, TypeVar

from otel_kprofiler.speedups.pure import StackT

SampleT = TypeVar("SampleT")
KindT = TypeVar("KindT")
SideT = TypeVar("SideT")


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


class StackFinder(Protocol):
    """Finds the stacks of samples in caches."""

    def __call__(  # noqa: PLR0917 - the C function has only positional parameters
        self,
        samples: list[SampleT],
        states: tuple[Callable[[SampleT], object], ...],
        recent: dict[tuple[Any, ...], StackT],
        earlier: dict[tuple[Any, ...], StackT],
        sides: Mapping[KindT, tuple[Mapping[Any, object], int | None]],
        side_type: type[SideT],
        make: Callable[[tuple[SideT, ...]], StackT],
        stacks: list[StackT | None],
        /,
    ) -> int:
        """Appends the stack of each sample to ``stacks``; None if it leaves the stack.

        Returns the size of the raw stacks that it adds to ``recent``. A stack's key contains the
        outcomes of collecting it, the raw frames, and the sample's ``states``.

        Args:
            recent: stacks by key. Stacks in ``earlier``, and new stacks, are added.
            sides: where to find each kind of sides. A pair with an integer contains the cached
                sides by raw frames, status, and the item of the key at this index, or None if the
                index is -1. A pair with None contains, for each value of the mappings in a user
                stack, the cache of its words and the ``files``; see :meth:`FrameCache.find`. Leaves
                kinds without a pair, cached sides that are not exactly of ``side_type``, and user
                stacks that are malformed or have a frame that is neither found nor made.
            side_type: a named tuple of a side's kind, frames and status, False, and a tuple.
            make: makes a stack from sides, leaf first.
        """


class SampleGrouper(Protocol):
    """Groups equal samples."""

    def __call__(
        self, samples: list[SampleT], stacks: list[StackT], at: int, groups: Any, /
    ) -> tuple[int, int]:
        """Adds samples from ``samples[at]`` on, and returns the index of the first that it leaves.

        Also returns the number of new groups. Leaves samples with a context, labels or a wait, and
        new groups with a provisional stack. ``groups`` is that of a window.
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
