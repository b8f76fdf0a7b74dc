"""Determines a receiver's maximum request size from the requests that it rejects."""

import math
import time
from typing import Final

MIN_LEARNED_BYTES: Final = 64 * 1024
"""Minimum size limit for encoding windows, in bytes. Encoded batches may be split further."""
TRY_LARGER_S: Final = 60
"""Time, in seconds, after which a learned limit is forgotten and larger requests are tried."""


class RequestSize:
    """Determines the maximum request size of a receiver. Not thread-safe.

    Args:
        configured: size limit of an uncompressed request in bytes; None for no limit.

    Attributes:
        encoded: maximum size, in bytes, of requests encoded from later windows.
        aim: target size of the parts when batches are divided before sending, in bytes.
        takes_nothing: whether the receiver accepted no samples from two consecutive batches, or
            from the first batch.
    """

    def __init__(self, configured: int | None) -> None:
        self._configured = configured
        self._learned_s = -math.inf
        self._has_accepted = False  # whether samples have arrived since the last rejected batch
        self.forget()

    def forget(self) -> None:
        """Restore the configured size limit."""
        self.encoded = self.aim = self._configured
        self.takes_nothing = False

    def begin_batch(self) -> None:
        """Forget a size limit that was learned more than :data:`TRY_LARGER_S` seconds ago."""
        if time.monotonic() - self._learned_s >= TRY_LARGER_S:
            self.forget()

    def accept(self, size: int) -> None:
        """Forget the learned limit if an accepted request was larger."""
        self.takes_nothing, self._has_accepted = False, True
        if self.aim is not None and size > self.aim:
            self.forget()

    def refuse(self, size: int, limit: int) -> int:
        """Lower the size limit after the receiver has rejected a request as too large.

        ``limit`` is the maximum request size that the receiver reported; 0 if it reported no limit.
        Returns the maximum size of each part of the divided request, in bytes.
        """
        aim = limit if 0 < limit < size else max(size // 2, 1)
        if self.aim is None or aim < self.aim:
            self.aim = aim
            self._learned_s = time.monotonic()
        least = min(MIN_LEARNED_BYTES, self._configured or MIN_LEARNED_BYTES)
        self.encoded = max(self.aim, least)
        return aim

    def refuse_all(self) -> None:
        """Record that the receiver has rejected all parts of a batch as too large.

        If samples of the previous batch were accepted, the rejection may apply only to this batch.
        If no sample of the previous batch was accepted, batches are sent undivided for a minute.
        Further rejections do not extend this period.
        """
        if not self._has_accepted and not self.takes_nothing:
            self.takes_nothing = True
            self._learned_s = time.monotonic()
        self._has_accepted = False
