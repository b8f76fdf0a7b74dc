"""Encodes sample counts as attributes on the first profile of each kind in a request.

Window counts cover all requests for a window: the number of samples that the BPF program took, the
number lost before reaching the window, and the number in the window. Stream counts are the
corresponding numbers since sampling started, except that the stream's loss count also includes
samples lost in transit to this receiver. After a stream's last request, a receiver can verify that
nothing is missing: received samples plus the stream's losses outside the kernel must equal
``stream.samples``.
"""

from collections.abc import Mapping
from typing import NamedTuple

from otel_kprofiler.model import (
    AttributeValue,
    LockTotal,
    LockTotals,
    LossCause,
    Losses,
    Profile,
    StreamTotals,
)
from otel_kprofiler.otlp.conventions import (
    EARLIER_LOST,
    EARLIER_SAMPLES,
    LOCK_TOTAL,
    LOCK_WAITS,
    STREAM_ID,
    STREAM_LOST,
    STREAM_MISSED,
    STREAM_SAMPLES,
    STREAM_TAKEN,
    STREAM_UNKNOWN_SINCE,
    WAIT_THRESHOLD,
    WINDOW_LOST,
    WINDOW_SAMPLES,
    WINDOW_TAKEN,
)
from otel_kprofiler.otlp.values import as_integer


def account_attributes(profile: Profile) -> dict[str, AttributeValue]:
    """Returns the counts of a profile's sample kind as attributes; empty if nothing was counted."""
    totals = profile.totals
    if totals is None and not profile.taken:
        return {}
    attributes: dict[str, AttributeValue] = {
        WINDOW_SAMPLES: profile.sample_count,
        WINDOW_TAKEN: profile.taken,
        **_losses(WINDOW_LOST, profile.lost),
    }
    if totals is not None:
        attributes[STREAM_ID] = totals.stream_id
        attributes[STREAM_SAMPLES] = totals.samples
        attributes[STREAM_TAKEN] = totals.taken
        if totals.missed:
            attributes[STREAM_MISSED] = totals.missed
        attributes |= _losses(STREAM_LOST, totals.lost)
        if totals.earlier_samples:
            attributes[EARLIER_SAMPLES] = totals.earlier_samples
        attributes |= _losses(EARLIER_LOST, totals.earlier_lost)
        if totals.unknown_since_unix_ns:
            attributes[STREAM_UNKNOWN_SINCE] = totals.unknown_since_unix_ns
    if profile.threshold_ns:
        attributes[WAIT_THRESHOLD] = profile.threshold_ns
    for name, total in profile.locks.items():
        attributes[LOCK_WAITS + name] = total.waits
        attributes[LOCK_TOTAL + name] = total.total_ns
    return attributes


class WindowAccount(NamedTuple):
    """Counts, losses and totals for a sample kind in a window.

    The fields have the same meaning as in :class:`otel_kprofiler.model.Profile`.
    """

    taken: int
    lost: Losses
    totals: StreamTotals | None
    threshold_ns: int
    locks: LockTotals


def parse_account(attributes: Mapping[str, AttributeValue]) -> WindowAccount:
    """Parses the attributes that :func:`account_attributes` returns."""
    totals = None
    if STREAM_ID in attributes:
        totals = StreamTotals(
            stream_id=str(attributes[STREAM_ID]),
            samples=as_integer(attributes.get(STREAM_SAMPLES)),
            taken=as_integer(attributes.get(STREAM_TAKEN)),
            lost=_parse_losses(STREAM_LOST, attributes),
            earlier_samples=as_integer(attributes.get(EARLIER_SAMPLES)),
            earlier_lost=_parse_losses(EARLIER_LOST, attributes),
            unknown_since_unix_ns=as_integer(attributes.get(STREAM_UNKNOWN_SINCE)),
            missed=as_integer(attributes.get(STREAM_MISSED)),
        )
    lost = _parse_losses(WINDOW_LOST, attributes)
    taken = as_integer(attributes.get(WINDOW_TAKEN))
    threshold_ns = as_integer(attributes.get(WAIT_THRESHOLD))
    locks = {
        key.removeprefix(LOCK_WAITS): LockTotal(
            as_integer(waits), as_integer(attributes.get(LOCK_TOTAL + key.removeprefix(LOCK_WAITS)))
        )
        for key, waits in attributes.items()
        if key.startswith(LOCK_WAITS)
    }
    return WindowAccount(taken, lost, totals, threshold_ns, locks)


def _losses(prefix: str, lost: Losses) -> dict[str, AttributeValue]:
    return {prefix + cause.value: count for cause, count in lost.items() if count}


def _parse_losses(prefix: str, attributes: Mapping[str, AttributeValue]) -> Losses:
    return {
        cause: as_integer(attributes[prefix + cause.value])
        for cause in LossCause
        if prefix + cause.value in attributes
    }
