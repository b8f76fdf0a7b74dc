"""Converts waits and Resources' wait totals to OTLP attributes and back."""

from collections.abc import Mapping
from typing import Final

from otel_kprofiler.model import (
    AttributeValue,
    WaitCause,
    WaitState,
    WaitTotals,
    WindowWait,
    WindowWaker,
)
from otel_kprofiler.otlp.conventions import (
    WAIT_BELOW,
    WAIT_CAUSE,
    WAIT_IS_ENDED,
    WAIT_STATE,
    WAIT_SWITCHES,
    WAIT_TOTAL,
    WAKER_NAME,
    WAKER_PID,
    WAKER_TID,
)
from otel_kprofiler.otlp.values import as_integer, as_text

_STATES: Final = {state.label: state for state in WaitState}
_CAUSES: Final = {cause.label: cause for cause in WaitCause}


def wait_attributes(wait: WindowWait) -> dict[str, AttributeValue]:
    """Returns the attributes for a wait's samples."""
    attributes: dict[str, AttributeValue] = {WAIT_STATE: wait.state.label}
    if wait.cause:
        attributes[WAIT_CAUSE] = wait.cause.label
    if not wait.is_ended:
        attributes[WAIT_IS_ENDED] = False
    if wait.waker:
        attributes |= zip((WAKER_PID, WAKER_TID, WAKER_NAME), wait.waker, strict=True)
    return attributes


def parse_wait(attributes: Mapping[str, AttributeValue]) -> WindowWait | None:
    """Parses the attributes that :func:`wait_attributes` returns; None if the state is unknown."""
    state = _STATES.get(as_text(attributes.get(WAIT_STATE, "")))
    if state is None:
        return None
    cause, waker = None, None
    if WAIT_CAUSE in attributes:  # later versions may define more values
        cause = _CAUSES.get(as_text(attributes[WAIT_CAUSE]), WaitCause.OTHER)
    if WAKER_TID in attributes:
        waker = WindowWaker(
            as_integer(attributes.get(WAKER_PID)),
            as_integer(attributes[WAKER_TID]),
            as_text(attributes.get(WAKER_NAME, "")),
        )
    return WindowWait(state, cause, attributes.get(WAIT_IS_ENDED) is not False, waker)


def total_attributes(waits: WaitTotals | None) -> dict[str, AttributeValue]:
    """Returns a resource's wait totals as attributes of profiles; empty if ``waits`` is None."""
    if waits is None:
        return {}
    attributes: dict[str, AttributeValue] = {
        WAIT_TOTAL + state.label: waits.by_state[state]
        for state in WaitState
        if waits.by_state[state]
    }
    attributes[WAIT_SWITCHES] = waits.switches
    if waits.below_ns:
        attributes[WAIT_BELOW] = waits.below_ns
    return attributes


def parse_totals(attributes: Mapping[str, AttributeValue]) -> WaitTotals | None:
    """Parses the attributes that :func:`total_attributes` returns."""
    if WAIT_SWITCHES not in attributes:
        return None
    return WaitTotals(
        tuple([as_integer(attributes.get(WAIT_TOTAL + state.label)) for state in WaitState]),
        as_integer(attributes[WAIT_SWITCHES]),
        as_integer(attributes.get(WAIT_BELOW)),
    )
