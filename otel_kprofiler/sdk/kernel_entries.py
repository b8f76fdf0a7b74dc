"""Adds the entry into the kernel to samples of a service, as an attribute."""

from __future__ import annotations

from otel_kprofiler.model import (
    UNKNOWN_ENTRY,
    USER_MODE,
    LabelSet,
    Window,
    WindowSample,
    find_entry,
)
from otel_kprofiler.otlp import KERNEL_ENTRY
from otel_kprofiler.sdk.pacing import Pacer


def name_entries(window: Window) -> Window:
    """Returns the window with system call, interrupt or other entry on each kernel sample.

    As ``report --by syscall`` derives it from the names of functions, so that a receiver need not.
    Samples of user mode, and of kernel functions without names, have none.
    """
    labels_of_stacks: dict[
        int, LabelSet
    ] = {}  # by the identity of stacks, which the window keeps alive

    def describe(sample: WindowSample) -> WindowSample:
        labels = labels_of_stacks.get(id(sample.stack))
        if labels is None:
            entry = find_entry(sample.stack)
            labels = () if entry in {USER_MODE, UNKNOWN_ENTRY} else ((KERNEL_ENTRY, entry),)
            labels_of_stacks[id(sample.stack)] = labels
        return sample._replace(labels=(*sample.labels, *labels)) if labels else sample

    return window.change_samples(describe, Pacer())
