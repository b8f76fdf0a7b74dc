"""The size of requests that a receiver takes, learned from its refusals."""

from __future__ import annotations

import math
import time
from typing import Final

MIN_LEARNED_BYTES: Final = 64 * 1024
"""Windows are encoded in requests of this size at least, whatever receivers refuse. Each batch is
divided further if need be."""
TRY_LARGER_S: Final = 60
"""Seconds after which a larger request shows whether the receiver takes more again."""


class RequestSize:
    """Learns the size of requests that a receiver takes. Not thread-safe.

    Args:
        configured: the limit of a request in bytes before compression; None for no limit.

    Attributes:
        encoded: limit of later windows' requests.
        aim: size to which batches are divided before they are sent.
        takes_nothing: whether the receiver took no sample of two batches in a row, or of the first.
    """

    def __init__(self, configured: int | None) -> None:
        self._configured = configured
        self._learned_s = -math.inf
        self._has_accepted = False  # since it refused all of a batch
        self.forget()

    def forget(self) -> None:
        """Return to the configured size."""
        self.encoded = self.aim = self._configured
        self.takes_nothing = False

    def begin_batch(self) -> None:
        """Forget what was learned long ago."""
        if time.monotonic() - self._learned_s >= TRY_LARGER_S:
            self.forget()

    def accept(self, size: int) -> None:
        """Note that a request was accepted, larger than expected or not."""
        self.takes_nothing, self._has_accepted = False, True
        if self.aim is not None and size > self.aim:
            self.forget()

    def refuse(self, size: int, limit: int) -> int:
        """Note that a request was refused for its size.

        Args:
            size: of the request, in bytes.
            limit: the largest request that the receiver says it takes; 0 if it does not say.

        Returns:
            The aim of a division.
        """
        aim = limit if 0 < limit < size else max(size // 2, 1)
        if self.aim is None or aim < self.aim:
            self.aim = aim
            self._learned_s = time.monotonic()
        least = min(MIN_LEARNED_BYTES, self._configured or MIN_LEARNED_BYTES)
        self.encoded = max(self.aim, least)
        return aim

    def refuse_all(self) -> None:
        """Note that of a batch not even a single sample was accepted.

        If the batch before had accepted samples, the reason may lie in this batch. Batches of the
        next minute do not prolong that minute.
        """
        if not self._has_accepted and not self.takes_nothing:
            self.takes_nothing = True
            self._learned_s = time.monotonic()
        self._has_accepted = False
