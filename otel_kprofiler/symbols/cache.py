"""A bounded cache without locks."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class HalvesCache(Generic[K, V]):
    """Keeps at most ``limit`` values: when the young half is full, the old half is dropped.

    A value that is used moves to the young half, so what is used often stays. Safe to use from
    several threads: each step is one dictionary operation, and the worst of a race is that a
    value is computed twice or dropped early.
    """

    __slots__ = ("_half", "_old", "_young")

    def __init__(self, limit: int) -> None:
        self._half = max(1, limit // 2)
        self._young: dict[K, V] = {}
        self._old: dict[K, V] = {}

    def __len__(self) -> int:
        return len(self._young) + len(self._old.keys() - self._young.keys())

    def get(self, key: K) -> V | None:
        """The value of a key, None if it is not there."""
        value = self._young.get(key)
        if value is None:
            value = self._old.get(key)
            if value is not None:
                return self.add(key, value)
        return value

    def add(self, key: K, value: V) -> V:
        """Keep a value; returns the one that is kept, which another thread may have added."""
        if len(self._young) >= self._half:
            self._old, self._young = self._young, {}
        return self._young.setdefault(key, value)
