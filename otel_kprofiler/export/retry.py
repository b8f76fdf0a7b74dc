"""When to try again: the one retry policy of all exporters that talk to a receiver.

What may be retried is the OTLP specification's ("OTLP/gRPC response", "OTLP/HTTP response",
"Throttling"); how long to wait is exponential back-off with jitter, with the names and the
arithmetic of the Collector's ``retry_on_failure``, but never less than the receiver asked for.
"""

from __future__ import annotations

import enum
import math
import random
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from otel_kprofiler.model import LossCause

MAX_SERVER_DELAY_S = 300.0
"""Upper bound of a delay that a receiver may impose, so that none can silence us for ever."""


class Verdict(enum.Enum):
    """What a receiver's answer asks for."""

    ACCEPTED = "accepted"
    RETRY = "retry"
    REFUSED = "refused"


class Answer(NamedTuple):
    """What one attempt came to.

    Attributes:
        verdict: what the answer asks for.
        status: the answer's kind in one word: a gRPC code, an HTTP status, an error's name.
        message: the receiver's or the library's explanation.
        rejected_profiles: profiles that the receiver left out of an accepted request.
        delay_s: how long the receiver asked to wait before the next attempt.
    """

    verdict: Verdict
    status: str
    message: str = ""
    rejected_profiles: int = 0
    delay_s: float | None = None


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """How often and how long to try.

    Attributes:
        enabled: False for a single attempt.
        initial_interval_s: wait before the second attempt, before jitter; > 0.
        multiplier: growth of the wait from attempt to attempt; >= 1.
        randomization_factor: a wait is spread evenly over ± this share; 0…1.
        max_interval_s: upper bound of a wait before jitter.
        max_elapsed_time_s: time for all attempts and waits of one batch; 0 means no end.
    """

    enabled: bool = True
    initial_interval_s: float = 1.0
    multiplier: float = 1.5
    randomization_factor: float = 0.5
    max_interval_s: float = 30.0
    max_elapsed_time_s: float = 300.0

    def interval_s(self, failures: int) -> float:
        """Wait after the given number of failed attempts (>= 1), with jitter."""
        # The exponent is bounded because a float overflows after some 1,700 failures.
        grown = self.initial_interval_s * self.multiplier ** min(failures - 1, 64)
        spread = self.randomization_factor * random.uniform(-1, 1)  # noqa: S311
        return min(grown, self.max_interval_s) * (1 + spread)


def attempt_until_settled(
    attempt: Callable[[float], Answer],
    *,
    policy: RetryPolicy,
    timeout_s: float,
    stop: threading.Event,
) -> tuple[Answer, LossCause | None]:
    """Attempt until the receiver accepts or refuses, time runs out, or ``stop`` is set.

    Args:
        attempt: sends once; is given the seconds that it may take.
        policy: how long to go on.
        timeout_s: upper bound for one attempt.
        stop: ends a wait at once when set.

    Returns:
        The last answer, and the cause of the loss unless it was accepted.
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
        if answer.verdict is Verdict.ACCEPTED:
            return answer, None
        if answer.verdict is Verdict.REFUSED:
            return answer, LossCause.REJECTED
        if stop.is_set():
            return answer, LossCause.SHUTDOWN
        failures += 1
        wait = policy.interval_s(failures)
        left = left_s()
        if not policy.enabled or (wait >= left and answer.delay_s is None):
            return answer, LossCause.RETRIES_EXHAUSTED
        if answer.delay_s is not None:
            # A throttling receiver is left alone for as long as this batch may take, even if
            # no attempt fits in then: the next batch must not arrive any sooner.
            wait = min(max(wait, min(answer.delay_s, MAX_SERVER_DELAY_S)), max(left, 0))
        if stop.wait(wait):
            return answer, LossCause.SHUTDOWN
        allowance = min(timeout_s, left_s())
        if allowance <= 0:
            return answer, LossCause.RETRIES_EXHAUSTED
