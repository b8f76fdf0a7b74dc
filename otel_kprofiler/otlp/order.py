"""Orders a request's locations so that the request is small and compresses well."""

from collections import Counter
from collections.abc import Callable, Iterable
from heapq import nlargest
from operator import invert, itemgetter
from typing import Final

from otel_kprofiler.model import Frame, RawFrames, Stack
from otel_kprofiler.otlp.dictionary import Dictionary
from otel_kprofiler.speedups import find_kind

_ONE_BYTE_INDICES: Final = 127
"""Number of entries with one-byte indices, not counting the zero entry."""
_ADDRESS_BITS: Final = 64
_FRAMES_BETWEEN_PAUSES: Final = 64
_COUNT: Final = itemgetter(1)
_ADDRESS: Final = itemgetter(Frame._fields.index("address"))


def intern_in_order(
    dictionary: Dictionary, stacks: Iterable[Stack], pause: Callable[[], None]
) -> None:
    """Intern the locations of stacks, before any other location is added.

    The most frequent locations have one-byte indices. The other locations are sorted by module and
    address, because compression removes what adjacent entries have in common.
    """
    raw, frame_tokens = _RawAddresses(), dictionary.frame_tokens
    raw_uses: Counter[int] = Counter()
    for stack in dict.fromkeys(stacks):
        if not frame_tokens.count(stack.sides):
            for side in stack.sides:
                if isinstance(side.frames, RawFrames):
                    raw_uses.update(raw.keys(side.frames))
        pause()
    limit = _ONE_BYTE_INDICES + 1
    uses: list[tuple[int | Frame, int]] = [*frame_tokens.most_used(limit), *raw_uses.items()]
    most_used = nlargest(limit, uses, key=_COUNT)
    if len(most_used) == limit:
        groups: dict[tuple[object, ...], list[Frame]] = {}
        for key, _ in most_used[:-1]:
            if isinstance(key, Frame):
                groups.setdefault(find_kind(key), []).append(key)
            else:
                raw.intern(key, dictionary)
        _add_groups(dictionary, groups, pause)
    groups = {}
    frame_tokens.group(groups)
    _add_groups(dictionary, groups, pause)
    for key in sorted(raw_uses, reverse=True):  # keys decrease as addresses increase
        raw.intern(key, dictionary)
        pause()


def _add_groups(
    dictionary: Dictionary,
    groups: dict[tuple[object, ...], list[Frame]],
    pause: Callable[[], None],
) -> None:
    for frames in groups.values():
        frames.sort(key=_ADDRESS)
        for at in range(0, len(frames), _FRAMES_BETWEEN_PAUSES):
            dictionary.add_frames(frames[at : at + _FRAMES_BETWEEN_PAUSES])
            pause()


class _RawAddresses:
    """Represents raw addresses, each with its frame type and reason, as negative numbers."""

    def __init__(self) -> None:
        self._numbers: dict[tuple[object, ...], int] = {}
        self._examples: list[RawFrames] = []

    def keys(self, frames: RawFrames) -> Iterable[int]:
        """Returns the numbers of all addresses."""
        number = self._numbers.setdefault((frames.side, frames.reason), len(self._examples))
        if number == len(self._examples):
            self._examples.append(frames)
        if number == 0:  # most requests have only this frame type and reason
            return map(invert, frames.addresses)
        return map((-1 - (number << _ADDRESS_BITS)).__sub__, frames.addresses)

    def intern(self, key: int, dictionary: Dictionary) -> None:
        """Intern the location of the address that a number represents."""
        number, address = divmod(-1 - key, 1 << _ADDRESS_BITS)
        dictionary.raw_locations(self._examples[number])[address]
