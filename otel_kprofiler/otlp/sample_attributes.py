"""Parses sample attributes, from OTLP or as strings from a store."""

from __future__ import annotations

import errno
from collections.abc import Mapping
from typing import Final, NamedTuple

from otel_kprofiler.model import (
    COARSE,
    LOCK_HOLDER_ID,
    LOCK_HOLDER_NAME,
    LOCK_TYPE,
    SIDES,
    STACK_TRUNCATED,
    TRUNCATED_STACKS,
    AttributeValue,
    LabelSet,
    SideKind,
    StackStatus,
    WindowWait,
)
from otel_kprofiler.otlp import conventions as names
from otel_kprofiler.otlp.values import as_integer, as_text
from otel_kprofiler.otlp.wait_attributes import parse_wait

_MAX_LABELS: Final = 100
_TRUNCATED: Final = {end.name.lower(): status for status, end in TRUNCATED_STACKS.items()}
_ERRNO_NUMBERS: Final = {name: number for number, name in errno.errorcode.items()}


def parse_status(text: str) -> StackStatus:
    """Parse the status of an incomplete stack; the inverse of ``status_text``."""
    if text == "truncated":
        return STACK_TRUNCATED
    if text in _TRUNCATED:
        return _TRUNCATED[text]
    if text in _ERRNO_NUMBERS:
        return StackStatus(-_ERRNO_NUMBERS[text])
    return StackStatus(as_integer(text) or -errno.EIO)


class SampleAttributes(NamedTuple):
    """The attributes of a sample.

    Attributes:
        statuses: collection statuses of incomplete kernel, user and Python stacks.
        thread_name: thread name (``comm``).
        local_root: name of the process's topmost span in the trace; empty if unknown.
        labels: other string attributes, excluding ``otel_kprofiler.*`` attributes that are not
            labels.
        wait: details of a wait; None for samples of other kinds.
    """

    statuses: tuple[tuple[SideKind, StackStatus], ...]
    tid: int
    thread_name: str
    cpu: int
    local_root: str
    labels: LabelSet
    wait: WindowWait | None


def read_sample_attributes(attributes: Mapping[str, AttributeValue]) -> SampleAttributes:
    """Parse the attributes of a sample. Numbers may be encoded as strings."""
    statuses = tuple(
        [
            (side, parse_status(as_text(attributes[key])))
            for side in SIDES
            if (key := names.STACK_STATUS.format(side.name)) in attributes
        ]
    )
    return SampleAttributes(
        statuses,
        as_integer(attributes.get(names.THREAD_ID)),
        as_text(attributes.get(names.THREAD_NAME, "")),
        as_integer(attributes.get(names.CPU)),
        as_text(attributes.get(names.LOCAL_ROOT, "")),
        _labels(attributes),
        parse_wait(attributes),
    )


_OWN_LABELS: Final = frozenset({COARSE, LOCK_TYPE, LOCK_HOLDER_ID, LOCK_HOLDER_NAME})


def _labels(attributes: Mapping[str, AttributeValue]) -> LabelSet:
    labels = [
        (key, value)
        for key, value in attributes.items()
        if isinstance(value, str)
        and key not in names.SAMPLE_ATTRIBUTES
        and (key in _OWN_LABELS or not key.startswith("otel_kprofiler."))
    ]
    return tuple(sorted(labels)[:_MAX_LABELS])
