"""Provides bounded caches that are thread-safe without locks."""

from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class BoundedCache(dict[K, V]):
    """A cache that computes missing values, and keeps at most ``limit`` values. Thread-safe.

    If ``weigh`` is given, ``max_weight`` also limits the total weight of the keys. Values belong to
    a young or an old generation. When the young generation reaches half of the limit, it replaces
    the old one. A hit in the old generation moves the value to the young one. If two threads
    compute the same value at the same time, the cache keeps only one of the results.

    Attributes:
        old: the old generation. The dictionary itself is the young one.
    """

    __slots__ = ("_compute", "_half", "_half_weight", "_weigh", "_weight", "old")

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
        self.old: dict[K, V] = {}

    def __missing__(self, key: K) -> V:
        value = self.old.get(key)
        return self._keep(key, self._compute(key) if value is None else value)

    def find(self, key: K) -> V | None:
        """Returns the value for a key; None if it is not cached."""
        value = self.get(key)
        if value is None and (value := self.old.get(key)) is not None:
            self._keep(key, value)
        return value

    def _keep(self, key: K, value: V) -> V:
        weight = self._weigh(key) if self._weigh else 0
        if len(self) >= self._half or (self and self._weight + weight > self._half_weight > 0):
            self._age()
        self._weight += weight
        return self.setdefault(key, value)

    def add_weight(self, weight: int) -> None:
        """Count values that were added to the young generation without calling this object."""
        self._weight += weight
        if len(self) >= self._half or self._weight > self._half_weight > 0:
            self._age()

    def _age(self) -> None:
        self.old = dict(self)
        self.clear()
        self._weight = 0


class KeptValues(Generic[K, V]):
    """A thread-safe cache shared by many objects, with a limit on the values' total weight."""

    def __init__(self, max_weight: int) -> None:
        self._max_weight = self._left = max_weight
        self._values: dict[K, V] = {}

    def get(self, key: K) -> V | None:
        """Returns the value for a key; None if it was evicted or never stored."""
        return self._values.get(key)

    def put(self, key: K, value: V, weight: int) -> None:
        """Store a value. If the total weight exceeds the limit, evict all other values."""
        self._left -= weight
        if self._left < 0:
            self._values = {}
            self._left = self._max_weight - weight
        self._values[key] = value
