"""A bounded cache without locks, as fast as a dictionary on a hit."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import TypeVar

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class BoundedCache(dict[K, V]):
    """Computes missing values; keeps at most ``limit`` of them.

    With ``weigh``, the summed weight of the keys is also bounded by ``max_weight``.

    Two generations: when the young one reaches half of the limit, it replaces the old one. A hit
    in the old generation moves the value to the young one. Thread-safe: at worst, two threads
    compute the same value and one result is kept.
    """

    __slots__ = ("_compute", "_half", "_half_weight", "_old", "_weigh", "_weight")

    def __init__(
        self,
        limit: int,
        compute: Callable[[K], V],
        *,
        weigh: Callable[[K], int] | None = None,
        max_weight: int = 0,
    ) -> None:
        super().__init__()
        self._half = max(1, limit // 2)
        self._half_weight = max_weight // 2
        self._weigh = weigh
        self._weight = 0
        self._compute = compute
        self._old: dict[K, V] = {}

    def __missing__(self, key: K) -> V:
        value = self._old.get(key)
        if value is None:
            value = self._compute(key)
        weight = self._weigh(key) if self._weigh else 0
        if len(self) >= self._half or (self and self._weight + weight > self._half_weight > 0):
            self._old = dict(self)
            self.clear()
            self._weight = 0
        self._weight += weight
        return self.setdefault(key, value)
