"""The protocol of resolvers whose frames can be found in caches."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol, runtime_checkable

from otel_kprofiler.model import Frame
from otel_kprofiler.speedups import FrameCache


@runtime_checkable
class KnownFrames(Protocol):
    """A resolver of user stacks whose cached frames can be found without the resolver.

    Attributes:
        tables: the cached frames; see :class:`~otel_kprofiler.speedups.interface.StackFinder`.
    """

    tables: Mapping[bytes, tuple[FrameCache[Frame], object]]

    def count_found(self, words: int) -> None:
        """Limit the number of cached frames, counting words whose frames have been found."""
