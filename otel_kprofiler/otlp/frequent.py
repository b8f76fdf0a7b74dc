"""Assigns one-byte indices to a request's most frequent locations."""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from operator import invert
from typing import Final

from otel_kprofiler.model import Frame, RawFrames, Stack
from otel_kprofiler.otlp.dictionary import Dictionary

_ONE_BYTE_INDICES: Final = 127
"""Number of entries with one-byte indices, not counting the zero entry."""
_STACKS_COUNTED: Final = 64
"""Minimum number of stacks, selected at regular intervals, in which frames are counted."""
_STACKS_AT_ONCE: Final = 16
_ADDRESS_BITS: Final = 64


def intern_frequent(
    dictionary: Dictionary, stacks: Sequence[Stack], pause: Callable[[], None]
) -> None:
    """Intern the most frequent frames and raw addresses, before any locations are added."""
    stacks = list(dict.fromkeys(stacks[:: max(1, len(stacks) // _STACKS_COUNTED)]))
    raw = _RawAddresses()
    uses: Counter[int | Frame] = Counter()
    for start in range(0, len(stacks), _STACKS_AT_ONCE):
        pause()
        some = stacks[start : start + _STACKS_AT_ONCE]
        counted: list[Frame] = []
        addresses: list[Iterable[int]] = []
        for stack in some:
            for side in stack.sides:
                if isinstance(side.frames, RawFrames):
                    addresses.append(raw.keys(side.frames))
                else:
                    counted += side.frames
        uses.update(counted)
        uses.update(chain.from_iterable(addresses))
    if len(uses) <= _ONE_BYTE_INDICES:
        return
    for key in sorted(uses, key=uses.__getitem__, reverse=True)[:_ONE_BYTE_INDICES]:
        if isinstance(key, Frame):
            dictionary.frame(key)
        else:
            raw.intern(key, dictionary)
        pause()


class _RawAddresses:
    """Represents raw addresses, each with its frame type and reason, as negative numbers."""

    def __init__(self) -> None:
        self._numbers: dict[tuple[object, ...], int] = {}
        self._examples: list[RawFrames] = []

    def keys(self, frames: RawFrames) -> Iterable[int]:
        number = self._numbers.setdefault((frames.side, frames.reason), len(self._examples))
        if number == len(self._examples):
            self._examples.append(frames)
        if number == 0:  # most requests have only this frame type and reason
            return map(invert, frames.addresses)
        return map((-1 - (number << _ADDRESS_BITS)).__sub__, frames.addresses)

    def intern(self, key: int, dictionary: Dictionary) -> None:
        number, address = divmod(-1 - key, 1 << _ADDRESS_BITS)
        dictionary.raw_locations(self._examples[number])[address]
