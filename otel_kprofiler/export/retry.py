"""Retries exports to a receiver with backoff and a time limit.

The OTLP specification defines which responses are retryable ("OTLP/gRPC response", "OTLP/HTTP
response", "Throttling"). Delays grow exponentially, with jitter, and use the settings of the
Collector's ``retry_on_failure``. A delay that the receiver requests is honored, up to five minutes.
"""

import enum
import math
import random
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, NamedTuple

from otel_kprofiler.model import LossCause

MAX_SERVER_DELAY_S = 300.0
"""Maximum delay that a receiver may request, in seconds."""


class Verdict(enum.Enum):
    """How to proceed after a receiver's response."""

    ACCEPTED = "accepted"
    RETRY = "retry"
    REFUSED = "refused"
    TOO_LARGE = "too_large"
    """The request was rejected for its size, but parts of it may be accepted."""


_UNIMPLEMENTED: Final = frozenset({"UNIMPLEMENTED", "404"})

_SETTLED: Final = {
    Verdict.ACCEPTED: None,
    Verdict.REFUSED: LossCause.REJECTED,
    Verdict.TOO_LARGE: LossCause.TOO_LARGE,
}
"""Verdicts after which a batch is not retried, with the cause of loss (None if delivered)."""


class Answer(NamedTuple):
    """The result of one attempt to send a batch.

    Attributes:
        status: a gRPC code, an HTTP status, or an error's name.
        message: the receiver's or the library's explanation.
        rejected_profiles: number of profiles that the receiver rejected from an accepted request.
        delay_s: minimum wait that the receiver requested before the next attempt, in seconds.
        unreadable: why the response to an accepted request could not be read; empty if it was read.
        max_bytes: maximum request size reported by the receiver; 0 if not reported.
    """

    verdict: Verdict
    status: str
    message: str = ""
    rejected_profiles: int = 0
    delay_s: float | None = None
    unreadable: str = ""
    max_bytes: int = 0

    @property
    def reason(self) -> str:
        """Returns the message with the status; without a message, the status alone."""
        return f"{self.message} ({self.status})" if self.message else self.status

    @property
    def is_unimplemented(self) -> bool:
        """Returns whether the receiver lacks the gRPC method or HTTP path."""
        return self.status in _UNIMPLEMENTED


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """Limits on how often and how long an export is retried.

    Attributes:
        enabled: whether to retry; False for a single attempt.
        initial_interval_s: wait before the second attempt, in seconds, excluding jitter; > 0.
        multiplier: factor by which the wait grows with each attempt; >= 1.
        randomization_factor: jitter, as a fraction of the wait in either direction; 0…1.
        max_interval_s: maximum wait, in seconds, excluding jitter.
        max_elapsed_time_s: time limit on all attempts and waits per batch; 0 means no limit.
    """

    enabled: bool = True
    initial_interval_s: float = 1.0
    multiplier: float = 1.5
    randomization_factor: float = 0.5
    max_interval_s: float = 30.0
    max_elapsed_time_s: float = 300.0

    def interval_s(self, failures: int) -> float:
        """Returns the wait in seconds, with jitter, after the given number of failures (>= 1)."""
        # Without the limit, the product would overflow after about 1,700 failures.
        grown = self.initial_interval_s * self.multiplier ** min(failures - 1, 64)
        spread = self.randomization_factor * random.uniform(-1, 1)  # noqa: S311
        return min(grown, self.max_interval_s) * (1 + spread)


def attempt_until_settled(
    attempt: Callable[[float], Answer],
    *,
    policy: RetryPolicy,
    timeout_s: float,
    stop: threading.Event,
    hurry: threading.Event | None = None,
) -> tuple[Answer, LossCause | None]:
    """Retry until the receiver accepts or rejects the batch, time runs out, or ``stop`` is set.

    ``attempt`` sends the batch once; its argument is a timeout in seconds, at most ``timeout_s``.
    ``hurry`` ends one wait, unless the receiver set the wait; set it together with ``stop``.
    Returns the last response and, unless the batch was accepted, the cause of the loss.
    """
    started = time.monotonic()
    failures = 0

    def left_s() -> float:
        if not policy.max_elapsed_time_s:
            return math.inf
        return started + policy.max_elapsed_time_s - time.monotonic()

    allowance = min(timeout_s, left_s())
    while True:
        answer = attempt(allowance)
        if answer.verdict in _SETTLED:
            return answer, _SETTLED[answer.verdict]
        if stop.is_set():
            return answer, LossCause.SHUTDOWN
        failures += 1
        wait = policy.interval_s(failures)
        left = left_s()
        if not policy.enabled or (wait >= left and answer.delay_s is None):
            return answer, LossCause.RETRIES_EXHAUSTED
        if answer.delay_s is not None:
            # Wait until this batch's deadline, even if no further attempt is possible. Otherwise,
            # the next batch would be sent to a throttling receiver too early.
            wait = min(max(wait, min(answer.delay_s, MAX_SERVER_DELAY_S)), max(left, 0))
        if hurry and answer.delay_s is None:
            hurry.wait(wait)
            hurry.clear()
            wait = 0.0
        if stop.wait(wait):
            return answer, LossCause.SHUTDOWN
        allowance = min(timeout_s, left_s())
        if allowance <= 0:
            return answer, LossCause.RETRIES_EXHAUSTED
