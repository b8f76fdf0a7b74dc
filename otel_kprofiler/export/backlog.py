"""Holds the waiting batches of a sending queue, in order, and their totals."""

from collections import deque
from collections.abc import Iterator, Sequence
from itertools import takewhile
from typing import NamedTuple

from otel_kprofiler.export.ledger import LossesByKind
from otel_kprofiler.export.recovery import Stored
from otel_kprofiler.model import Batch, SampleCounts


class Held(NamedTuple):
    """A waiting batch, in memory or in the spool.

    Attributes:
        samples: number of samples that have been neither exported nor lost, by kind.
        batches: the batch or its undelivered parts; empty if they are in the spool.
        lost: number of the batch's samples lost so far, by kind and cause.
        carried: whether the batch is from an earlier run.
    """

    number: int
    samples: SampleCounts
    size: int
    batches: tuple[Batch, ...]
    stored: Stored | None
    lost: list[LossesByKind]
    carried: bool = False


class Backlog:
    """Waiting batches, oldest first. Not thread-safe.

    A spool may hold a hundred thousand batches, so that only :meth:`remove` takes longer if there
    are more batches.
    """

    def __init__(self) -> None:
        self._held: deque[Held] = deque()
        self._samples = SampleCounts()
        self._size = 0

    def __len__(self) -> int:
        return len(self._held)

    def __iter__(self) -> Iterator[Held]:
        return iter(self._held)

    @property
    def first(self) -> Held | None:
        """Returns the oldest batch; None if there is no batch."""
        return self._held[0] if self._held else None

    def totals(self) -> tuple[SampleCounts, int, int]:
        """Returns the number of samples by kind, the number of batches, and their size in bytes."""
        return self._samples.copy(), len(self._held), self._size

    def stored(self) -> Iterator[Stored]:
        """Returns the batches in the spool, oldest first."""
        return (held.stored for held in self._held if held.stored)

    def stored_through(self, number: int) -> list[Held]:
        """Returns the batches whose numbers in the spool do not exceed ``number``."""
        earlier = takewhile(
            lambda held: not held.stored or held.stored.number <= number, self._held
        )
        return [held for held in earlier if held.stored]

    def append(self, held: Held) -> None:
        """Add the newest batch."""
        self._held.append(held)
        self._count(held)

    def appendleft(self, held: Held) -> None:
        """Put the oldest batch back."""
        self._held.appendleft(held)
        self._count(held)

    def popleft(self) -> Held:
        """Remove the oldest batch, and return it."""
        held = self._held.popleft()
        self._discount(held)
        return held

    def remove(self, dropped: Sequence[Held]) -> None:
        """Remove batches, which may be anywhere in the backlog."""
        numbers = {held.number for held in dropped}
        kept = []
        while numbers:
            held = self._held.popleft()
            if held.number in numbers:
                numbers.remove(held.number)
                self._discount(held)
            else:
                kept.append(held)
        self._held.extendleft(reversed(kept))

    def _count(self, held: Held) -> None:
        self._samples.update(held.samples)
        self._size += held.size

    def _discount(self, held: Held) -> None:
        self._samples.subtract(held.samples)
        self._size -= held.size
